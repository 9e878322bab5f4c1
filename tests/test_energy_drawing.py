"""From images to capsules and back: the tied autoencoder, both decoders, the source's rule, the laws of the poses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps import squash
from torchcaps.energy import (
    CapsuleDecoder,
    ConvAutoencoder,
    ExpertCapsules,
    ExpertPipeline,
    PoseLaw,
    caps_from_code,
    code_from_caps,
    train_autoencoder,
)
from torchcaps.routing import Dynamic


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


# ---------------------------------------------------------------------------------------------------------------------
# The autoencoder


def test_the_autoencoder_has_the_papers_numbers() -> None:
    model = ConvAutoencoder()
    assert model.code_shape == (128, 6, 6)
    assert sum(p.numel() for p in [*model.filters, *model.biases]) == 1_337_728
    assert sum(p.numel() for p in model.biases_back) == 129
    assert sum(p.numel() for p in model.parameters()) == 1_337_728 + 129


@pytest.mark.parametrize("size", [28, (28, 29), (25, 30)])
def test_an_image_of_any_size_comes_back_in_its_size_between_0_and_1(size: Any) -> None:
    model = ConvAutoencoder(3, size, channels=4)
    images = torch.rand(2, 3, *model.image_size)
    again = model(images)
    assert again.shape == images.shape
    assert 0 < again.min() <= again.max() < 1


def test_the_way_back_is_the_transpose_of_the_way_in() -> None:
    model = ConvAutoencoder(1, 28, channels=4, slope=1.0).double()  # slope 1: linear but for the sigmoid
    x, code = torch.randn(1, 1, 28, 28).double(), torch.randn(1, 4, 6, 6).double()
    back = torch.logit(model.decode(code))
    close((model.encode(x) * code).sum(), (x * back).sum())


def test_an_autoencoder_learns_and_drops_nothing_afterwards() -> None:
    torch.manual_seed(0)
    images = torch.zeros(64, 1, 28, 28)
    for k in range(64):
        images[k, 0, k % 8 * 3 : k % 8 * 3 + 6, k // 8 * 3 : k // 8 * 3 + 6] = 1
    model = ConvAutoencoder(channels=4)
    told: list[int] = []
    losses = train_autoencoder(model, images, epochs=10, batch_size=16, after_epoch=lambda epoch, _: told.append(epoch))
    assert losses[-1] < 0.7 * losses[0]
    assert told == list(range(10))
    assert torch.equal(model(images), model(images))


def test_capsules_are_neighbouring_channels_of_a_place_and_make_the_code_again() -> None:
    code = torch.arange(2 * 16 * 3 * 2.0).view(2, 16, 3, 2)
    poses = caps_from_code(code, 8).poses
    assert poses.shape == (2, 12, 1, 8)
    assert torch.equal(poses[1, 2 * (1 * 2 + 1) + 1, 0], code[1, 8:, 1, 1])  # row 1, column 1, the second eight
    assert torch.equal(code_from_caps(poses, (16, 3, 2)), code)
    with pytest.raises(ValueError, match="capsules of 5 numbers"):
        caps_from_code(code, 5)
    with pytest.raises(ValueError, match=r"hold no code \['N', 16, 3, 3\]"):
        code_from_caps(poses, (16, 3, 3))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ConvAutoencoder(image_size=16), "give images of 17 x 17 or more"),
        (lambda: ConvAutoencoder(dropout=1.0), "dropout=1.0"),
        (lambda: ConvAutoencoder(image_size=(28, 28, 28)), "image_size must be one number, or two"),
        (lambda: ConvAutoencoder(channels=4)(torch.rand(2, 3, 28, 28)), r"\['N', 1, 28, 28\], not \[2, 3, 28, 28\]"),
        (lambda: ConvAutoencoder(channels=4)(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)), "x / 255 for bytes"),
        (lambda: ConvAutoencoder(channels=4).decode(torch.rand(2, 4, 5, 6)), r"\['N', 4, 6, 6\], not \[2, 4, 5, 6\]"),
    ],
)
def test_an_autoencoder_says_what_it_cannot_take(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


# ---------------------------------------------------------------------------------------------------------------------
# The decoder


def pairs(count: int = 60) -> tuple[Tensor, Tensor]:
    """Hidden poses of 4 capsules of 5 numbers, and visible ones of 6 of 3."""
    random = torch.Generator().manual_seed(1)
    poses = squash(torch.randn(count, 4, 1, 5, generator=random, dtype=torch.float64))
    return poses, torch.randn(count, 6, 1, 3, generator=random, dtype=torch.float64)


def a_decoder(rounds: int = 1) -> CapsuleDecoder:
    return CapsuleDecoder(4, 6, 5, 3, routing=Dynamic.hauser(rounds)).double()


@pytest.mark.parametrize("affine", [True, False])
def test_with_uniform_shares_the_sum_is_a_least_squares_fit(affine: bool) -> None:
    poses, target = pairs()
    decoder = a_decoder()
    decoder.fit(poses, target, affine=affine, ridge=0.0)
    design = poses.flatten(1)
    if affine:
        design = torch.cat([design, torch.ones(60, 1, dtype=torch.float64)], 1)
    best = design @ torch.linalg.lstsq(design, target.flatten(1)).solution
    close(decoder(poses).flatten(1), best, rtol=1e-7, atol=1e-9)
    assert decoder.mode == "sum"


def test_where_shares_are_routed_they_are_the_ones_that_were_fitted() -> None:
    poses, target = pairs()
    errors = []
    for rounds in (1, 2):
        decoder = a_decoder(3)
        decoder.fit(poses, target, rounds=rounds)
        errors.append((decoder(poses) - target).square().mean())
    assert errors[1] < errors[0]


def test_alone_each_capsule_says_the_best_that_it_can_say_by_itself() -> None:
    poses, target = pairs()
    decoder, weights = a_decoder(), torch.rand(60, 4, dtype=torch.float64)
    decoder.fit(poses, target, mode="alone", weights=weights, ridge=0.0)
    for j in range(4):
        single = torch.zeros_like(poses)
        single[:, j] = poses[:, j]
        design = torch.cat([poses[:, j, 0], torch.ones(60, 1, dtype=torch.float64)], 1)
        root = weights[:, j].sqrt()[:, None]
        best = design @ torch.linalg.lstsq(root * design, root * target.flatten(1)).solution
        close(decoder(single).flatten(1), best, rtol=1e-7, atol=1e-9)


def test_a_ridge_shortens_what_is_said() -> None:
    poses, target = pairs()
    lengths = []
    for ridge in (0.0, 1.0):
        decoder = a_decoder()
        decoder.fit(poses, target, ridge=ridge)
        lengths.append(decoder.weight.norm())
    assert lengths[1] < 0.9 * lengths[0]


def test_the_papers_rule_is_its_formula() -> None:
    poses, target = pairs(3)
    decoder = a_decoder()
    decoder.weight.normal_()
    U, e = decoder.weight, 1 / 4
    expected = torch.zeros_like(U)
    for x, z in zip(poses[:, :, 0], target[:, :, 0], strict=True):
        zt = sum(e * x[j] @ U[j] for j in range(4))  # [I, P], an int only where there is no capsule
        assert isinstance(zt, Tensor)
        xt = squash(zt, dim=-1)
        for j in range(4):
            back = squash(sum(e * U[j, i] @ xt[i] for i in range(6)), dim=-1)  # type: ignore[arg-type]
            for i in range(6):
                data = torch.outer(x[j], z[i] / (1 + z[i] @ z[i]))
                expected[j, i] += 2 * e * (data - torch.outer(back, zt[i] / (1 + zt[i] @ zt[i]))) / 3
    close(decoder.rule_update(poses, target), expected)


def test_the_papers_rule_learns_directions_and_makes_them_too_long() -> None:
    random = torch.Generator().manual_seed(0)
    poses = 0.9 * torch.nn.functional.normalize(torch.randn(400, 1, 1, 5, generator=random), dim=-1)
    target = (poses.squeeze(1) @ torch.randn(5, 3, generator=random))[:, None]
    ruled, fitted = (CapsuleDecoder(1, 1, 5, 3, routing=Dynamic.hauser(1)) for _ in range(2))
    ruled.fit_by_rule(poses, target, rate=0.5, epochs=15, generator=random)
    assert ruled.scale > target.norm(dim=-1).max()
    assert torch.nn.functional.cosine_similarity(ruled(poses), target, dim=-1).mean() > 0.9
    assert ruled(poses).norm() > 1.5 * target.norm()  # the defect: r / (1 + r^2) does not grow with r
    fitted.fit(poses, target)
    assert (fitted(poses) - target).norm() < 1e-2 * target.norm()


def test_a_decoder_comes_back_from_its_state() -> None:
    poses, target = pairs()
    decoder, again = a_decoder(), a_decoder()
    decoder.fit(poses, target, mode="alone")
    again.load_state_dict(decoder.state_dict())
    assert again.mode == "alone"
    assert torch.equal(again(poses), decoder(poses))


def test_a_decoder_says_what_it_cannot_take() -> None:
    poses, target = pairs()
    decoder = a_decoder()
    with pytest.raises(ValueError, match=r"takes poses \['N', 4, 1, 5\], not \[60, 3, 1, 5\]"):
        decoder(poses[:, :3])
    with pytest.raises(ValueError, match=r"takes target \[60, 6, 1, 3\], not \[59, 6, 1, 3\]"):
        decoder.fit(poses, target[1:])
    with pytest.raises(ValueError, match="mode='both': take 'sum' or 'alone'"):
        decoder.fit(poses, target, mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights \[60, 4\] with mode='sum'"):
        decoder.fit(poses, target, weights=torch.ones(60, 4))
    silent = torch.ones(60, 4, dtype=torch.float64)
    silent[:, 2] = 0
    with pytest.raises(ValueError, match="capsule 2 weighs every example 0"):
        decoder.fit(poses, target, mode="alone", weights=silent)
    with pytest.raises(ValueError, match=r"give Dynamic.hauser\(\), not normalize='parents'"):
        CapsuleDecoder(4, 6, routing=Dynamic.hauser(normalize="parents"))


# ---------------------------------------------------------------------------------------------------------------------
# The laws


def a_law(line: int = 0) -> tuple[PoseLaw, Tensor]:
    random = torch.Generator().manual_seed(2)
    law = PoseLaw(3, 4, line).double()
    spread = torch.tensor([0.05, 0.1, 0.02, 0.08], dtype=torch.float64)
    poses = 0.3 + spread * torch.randn(500, 3, 1, 4, generator=random, dtype=torch.float64)
    law.fit(poses)
    return law, poses


@pytest.mark.parametrize("law", ["sphere", "half", "fitted"])
@pytest.mark.parametrize("line", [0, 1])
def test_a_draw_is_of_one_capsule_inside_its_ball(law: Any, line: int) -> None:
    laws, _ = a_law(line)
    drawn = laws.sample(1, 50, law=law, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (50, 3, 1, 4)
    assert (drawn[:, [0, 2]] == 0).all()
    ball = drawn[:, 1, 0, : 4 - line].norm(dim=-1)
    assert 0 < ball.min() <= ball.max() <= 1 + 1e-12
    again = laws.sample(1, 50, law=law, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_half_of_the_sphere_is_the_half_that_training_poses_lie_in() -> None:
    law, poses = a_law()
    sphere, half = (law.sample(0, 400, law=which)[:, 0, 0] @ poses[:, 0, 0].sum(0) for which in ("sphere", "half"))  # type: ignore[arg-type]
    assert 0.4 < (sphere < 0).double().mean() < 0.6
    assert (half >= 0).all()


def test_raw_draws_are_as_long_as_normal_ones() -> None:
    law, _ = a_law()
    raw = law.sample(0, 2000, law="sphere", raw=True)[:, 0, 0]
    assert abs(raw.square().sum(1).mean().item() - 4) < 4 * (2 * 4 / 2000) ** 0.5


def test_fitted_draws_have_the_mean_and_covariance_of_the_poses_weighted_by_firing() -> None:
    law, poses = a_law()
    x, w = poses[:, 2, 0], poses[:, 2, 0].norm(dim=1)
    mean = (w[:, None] * x).sum(0) / w.sum()
    covariance = (w[:, None] * (x - mean)).T @ (x - mean) / w.sum()
    drawn = law.sample(2, 20_000, law="fitted", generator=torch.Generator().manual_seed(0))[:, 2, 0]
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=4 * 0.1 / 20_000**0.5)
    torch.testing.assert_close(drawn.T.cov(), covariance, rtol=0.05, atol=2e-4)


def test_numbers_on_a_line_keep_their_own_law_whatever_the_sphere_does() -> None:
    law, poses = a_law(line=1)
    drawn = law.sample(0, 20_000, law="sphere", generator=torch.Generator().manual_seed(0))[:, 0, 0, 3]
    assert drawn.mean() == pytest.approx(poses[:, 0, 0, 3].mean().item(), abs=0.005)
    assert drawn.std() == pytest.approx(poses[:, 0, 0, 3].std().item(), rel=0.05)


@pytest.mark.parametrize("capsule", [-1, 3, 1.5, "1", True])
def test_a_capsule_that_is_not_there_is_refused(capsule: Any) -> None:
    law, _ = a_law()
    with pytest.raises(ValueError, match="is not there: the 3 capsules are numbered 0 to 2"):
        law.sample(capsule, 2)


def test_a_law_says_what_it_cannot_take() -> None:
    law, poses = a_law()
    with pytest.raises(ValueError, match="law='whole' with raw=False"):
        law.sample(0, 2, law="whole")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="law='fitted' with raw=True"):
        law.sample(0, 2, law="fitted", raw=True)
    with pytest.raises(ValueError, match=r"poses of this law are \['N', 3, 1, 4\], not \[500, 2, 1, 4\]"):
        law.fit(poses[:, :2])


def test_the_chain_goes_up_and_down_and_draws_with_the_decoder_for_single_capsules() -> None:
    torch.manual_seed(0)
    autoencoder = ConvAutoencoder(channels=8).eval()
    experts = ExpertCapsules(36, 3, 8, 4)
    both = [CapsuleDecoder(3, 36, 4, 8, routing=Dynamic.hauser(1)) for _ in range(2)]
    chain = ExpertPipeline(autoencoder, experts, *both).requires_grad_(False)
    images = torch.rand(20, 1, 28, 28)
    hidden, codes = chain(images), chain.unsquashed(images)
    assert hidden.poses.shape == (20, 3, 1, 4)
    torch.testing.assert_close(hidden.activations, hidden.poses.norm(dim=(-2, -1)))
    both[0].fit(hidden.poses, codes)
    both[1].fit(hidden.poses, codes, mode="alone")
    chain.law.fit(hidden.poses)
    assert chain.reconstruct(images).shape == images.shape
    drawn = chain.generate(2, 3, law="fitted", generator=torch.Generator().manual_seed(0))
    poses = chain.law.sample(2, 3, law="fitted", generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, chain.decode(poses, alone=True))
    assert not torch.equal(drawn, chain.decode(poses))
    chain.alone = None
    assert torch.equal(
        chain.generate(2, 3, law="fitted", generator=torch.Generator().manual_seed(0)), chain.decode(poses)
    )
