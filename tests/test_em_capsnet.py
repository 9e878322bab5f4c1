"""EMCapsNet: the paper's networks to the last parameter, behind its own stem and others'."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcaps import Capsules
from torchcaps.layers import ConvCapsules
from torchcaps.losses import spread_loss
from torchcaps.models import ActivatedAttention, EMCapsNet, create_model
from torchcaps.routing import EM, Attention, Dynamic, em

SMALL: dict[str, Any] = {
    "in_chans": 2, "num_classes": 3, "image_size": (17, 20), "stem_channels": 6, "primary_types": 2,
    "conv_caps": ((3, 3, 2), (2, 3, 1)),
}  # fmt: skip


def small(**settings: Any) -> EMCapsNet:
    return EMCapsNet(**{**SMALL, **settings})


def images(N: int = 4, **kind: Any) -> Tensor:
    return torch.rand(N, 2, 17, 20, **kind)


@pytest.mark.parametrize(
    ("name", "num_classes", "in_chans", "count"),
    [
        ("em_capsnet", 5, 2, 317_194),
        ("em_capsnet_small", 5, 2, 68_754),
        ("em_capsnet_resnet", 10, 3, 1_710_580),
        ("em_capsnet_resnet", 100, 3, 1_756_840),
        ("em_capsnet_simple", 10, 3, 447_156),
        ("em_capsnet_simple", 100, 3, 493_416),
    ],
)
def test_it_has_as_many_parameters_as_the_papers(name: str, num_classes: int, in_chans: int, count: int) -> None:
    with torch.device("meta"):
        model = create_model(name, num_classes, in_chans, 32)
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_defaults_are_the_papers_network_for_small_norb() -> None:
    with torch.device("meta"):
        model = EMCapsNet()
    assert sum(p.numel() for p in model.parameters()) == 317_194
    assert (model.in_chans, model.num_classes, model.image_size) == (2, 5, (32, 32))


@pytest.mark.parametrize(
    ("name", "in_chans", "sizes"), [("em_capsnet", 2, (14, 6, 4)), ("em_capsnet_simple", 3, (16, 7, 5))]
)
def test_maps_have_the_papers_sizes(name: str, in_chans: int, sizes: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = create_model(name, 5, in_chans, 32)
        capsules = model.primary(model.stem(torch.empty(1, in_chans, 32, 32)))
        seen = [capsules.spatial]
        for layer in model.conv_caps:
            capsules = layer(capsules)
            seen.append(capsules.spatial)
    assert seen == [(n, n) for n in sizes]
    assert model.class_caps(capsules).poses.shape == (1, 5, 4, 4)


def test_scores_are_what_the_papers_equations_give() -> None:
    # poses of one number and 1x1 kernels, so that every sum can be written out
    model = EMCapsNet(
        2, 3, (3, 2), kernel_size=1, stem_stride=1, stem_channels=4, primary_types=2, pose=(2, 2),
        conv_caps=((3, 2, 1),),
    ).double()  # fmt: skip
    for layer in (model.conv_caps[0], model.class_caps):
        for value in layer.learned.values():
            nn.init.normal_(value)
    x = torch.rand(4, 2, 3, 2, dtype=torch.float64)
    first, second = model.stem[0], model.primary.conv
    features = nn.functional.conv2d(x, first.weight, first.bias).relu()
    channels = nn.functional.conv2d(features, second.weight, second.bias)
    poses = channels[:, :8].view(4, 2, 2, 2, 3, 2).permute(0, 1, 4, 5, 2, 3)  # [N, type, row, column, R, P]
    active = channels[:, 8:].sigmoid()
    # two windows of 2x2, one below the other: the middle row of children is in both, and they compete for it
    children = torch.stack([poses[:, :, k : k + 2].flatten(1, 3) for k in (0, 1)], 1).flatten(0, 1)
    weights = torch.stack([active[:, :, k : k + 2].flatten(1, 3) for k in (0, 1)], 1).flatten(0, 1)
    ids = torch.arange(12).view(2, 3, 2)
    ids = torch.stack([ids[:, k : k + 2].flatten() for k in (0, 1)])
    layer = model.conv_caps[0]
    middle = em(children, layer.weight, weights, child_ids=ids, **layer.learned)
    parents = middle.poses.view(4, 2, 3, 2, 2).transpose(1, 2).flatten(1, 2)  # [N, (type, row), R, Q]
    present = middle.activations.view(4, 2, 3).transpose(1, 2).flatten(1, 2)
    offset = torch.zeros(6, 1, 2, 2, dtype=torch.float64)
    offset[:, 0, 0, 1] = torch.tensor([0.25, 0.75]).repeat(3)  # the row of a place in the middle of its half
    offset[:, 0, 1, 1] = 0.5  # the only column
    last = model.class_caps
    weight = last.weight.repeat_interleave(2, 0)
    expected = em(parents, weight, present, vote_offset=offset, **last.learned)
    scores, reconstruction, capsules = model(x, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(scores, expected.activations, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(capsules.poses, expected.poses, rtol=1e-9, atol=1e-12)
    assert reconstruction is None


def test_images_of_any_size_that_leaves_a_place_pass() -> None:
    model = small()
    for height, width in ((17, 17), (17, 40), (33, 18)):
        scores = model(torch.rand(2, 2, height, width))
        assert scores.shape == (2, 3)
    with pytest.raises(ValueError, match=r"\[N, 2, H, W\] with H and W of 17 or more, not \[2, 2, 17, 16\]"):
        model(torch.rand(2, 2, 17, 16))


@pytest.mark.parametrize(
    ("settings", "least"),
    [({}, 17), ({"kernel_size": 3, "stem_padding": 1}, 13), ({"conv_caps": ()}, 5), ({"stem_stride": 1}, 11)],
)
def test_the_smallest_image_is_told_and_works(settings: dict[str, Any], least: int) -> None:
    assert small(image_size=least, **settings)(torch.rand(2, 2, least, least)).shape == (2, 3)
    with pytest.raises(ValueError, match=rf"image of 20 x {least - 1} .* the smallest is {least} x {least};"):
        small(image_size=(20, least - 1), **settings)


def test_the_windows_of_a_child_compete_unless_told_otherwise() -> None:
    assert [layer.competition for layer in small().conv_caps] == ["all", "all"]
    one, other, x = small(), small(competition="window"), images()
    other.load_state_dict(one.state_dict())
    assert [layer.competition for layer in other.conv_caps] == ["window", "window"]
    assert not torch.allclose(one(x), other(x), rtol=1e-6)


def test_classes_are_told_places_unless_not_wanted() -> None:
    model = small(conv_caps=((3, 3, 2),), image_size=(21, 24)).double()
    capsules = Capsules(torch.rand(4, 3, 4, 5, 4, 4).double(), torch.rand(4, 3, 4, 5).double())
    turned = Capsules(capsules.poses.flip(2), capsules.activations.flip(2))
    poses = model.class_caps(capsules).poses
    assert not torch.allclose(model.class_caps(turned).poses, poses, rtol=1e-6)
    model = small(conv_caps=((3, 3, 2),), image_size=(21, 24), coordinates=False).double()
    poses = model.class_caps(capsules).poses
    torch.testing.assert_close(model.class_caps(turned).poses, poses, rtol=1e-9, atol=1e-12)


def test_every_layer_routes_by_the_rule_that_was_given() -> None:
    rule = EM.hinton(iterations=2)
    model = small(routing=rule)
    assert all(layer.routing is rule for layer in (*model.conv_caps, model.class_caps))
    assert all(isinstance(layer, ConvCapsules) for layer in model.conv_caps)
    assert small(routing=ActivatedAttention())(images()).shape == (4, 3)


def test_a_stem_of_ones_own_takes_the_first_convolutions_place() -> None:
    stem = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.MaxPool2d(2))
    model = small(stem=stem)
    assert model.stem is stem
    assert model.primary.conv.in_channels == 5
    assert model(images()).shape == (4, 3)
    with pytest.raises(ValueError, match="kernel of 3 x 3 of layer 2 of conv_caps does not fit the map of 2 x 3 that"):
        small(stem=stem, image_size=(13, 16))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": Dynamic.su()}, "scores are activations, so routing must be .* EM.hinton"),
        ({"routing": Attention()}, "scores are activations, so routing must be .* EM.hinton"),
        ({"routing": "em"}, "scores are activations, so routing must be"),
        ({"competition": "none"}, "competition='none' must be 'window' or 'all'"),
        ({"conv_caps": ((3, 3),)}, r"conv_caps=\(\(3, 3\),\) must hold \(types, kernel size, stride\)"),
        ({"stem_channels": 0}, "stem_channels must be a whole number of 1 or more"),
        ({"kernel_size": 1.5}, "kernel_size must be a whole number of 1 or more"),
        ({"stem_padding": -1}, "stem_padding=-1 must be a whole number of at least 0"),
        ({"pose": 1}, "2 coordinates do not fit"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**settings)


def lines(N: int) -> tuple[Tensor, Tensor]:
    """Lines in noise: upright, level and slanted."""
    x, labels, along = 0.3 * torch.rand(N, 1, 24, 24), torch.arange(N) % 3, torch.arange(4, 20)
    for n, label in enumerate(labels.tolist()):
        row, column = [(along, 11), (11, along), (along, along)][label]
        x[n, 0, row, column] += 0.7
        x[n, 0, row, column + 1] += 0.7
    return x, labels


@pytest.mark.parametrize("competition", ["all", "window"])
def test_it_learns_a_few_images_by_heart(competition: Any) -> None:
    model = EMCapsNet(
        1, 3, 24, stem_channels=8, primary_types=4, conv_caps=((6, 3, 2), (6, 3, 1)), competition=competition
    )
    x, labels = lines(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        spread_loss(model(x), labels, margin=0.9).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), labels)
