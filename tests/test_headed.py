"""One backbone and three heads: what the layers say, masks that padding does not see, and heads of one size."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from torchcaps.losses import margin_loss
from torchcaps.models import ConvFeatures, HeadedNet, matched_hidden
from torchcaps.models.headed import CarriesMask, Head
from torchcaps.routing import EM, Attention, Dynamic, Rule, attention, dynamic

HEADS: list[Head] = ["linear", "mlp", "capsules"]
RULES = [Dynamic(), Dynamic(iterations=1), Dynamic.su(), Attention(), EM()]


def small(image_size: Any = (9, 12), head: Head = "capsules", **settings: Any) -> HeadedNet:
    given: dict[str, Any] = {"widths": (4, 6), "primary_types": 3, "primary_pose": 4, "class_pose": 5, "hidden": 7}
    model = HeadedNet(2, 3, image_size, head=head, **{**given, **settings}).double()
    for layer in model.backbone.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(layer.bias)  # as after some training: a bias of 0 would hide faults
    return model


def examples(N: int, *size: int) -> Tensor:
    return torch.rand(N, 2, *size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("size", "widths", "places"),
    [
        ((8, 8), (4, 4, 4), (4, 4)),
        ((28, 28), (4, 4, 4), (4, 4)),
        ((37, 52), (4, 4, 4), (5, 7)),
        ((32, 7), (4, 4, 4, 4), (4, 4)),
        ((128, 129), (4, 4, 4), (16, 9)),
        ((65, 224), (4, 4, 4), (9, 14)),
        ((28, 28), (4,), (14, 14)),
        ((2, 1), (4, 4, 4), (2, 1)),
        ((1000,), (4, 4, 4), (63,)),
        ((20,), (4, 4, 4), (5,)),
        ((1,), (4, 4, 4), (1,)),
        ((28, 28, 28), (4, 4, 4), (4, 4, 4)),
        ((64, 8, 8), (4, 4, 4), (8, 4, 4)),
    ],
)
def test_strides_leave_at_least_four_places_and_not_too_many(
    size: tuple[int, ...], widths: tuple[int, ...], places: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        features = ConvFeatures(2, size, widths)
        assert features(torch.empty(1, 2, *size)).shape == (1, 4, *places)


def test_every_number_is_seen() -> None:
    features = ConvFeatures(1, (2000,), (4, 4)).double()
    assert features.strides == [(16,), (2,)]
    x = torch.rand(1, 1, 2000, dtype=torch.float64, requires_grad=True)
    features.convolutions[0](x).sum().backward()
    assert x.grad is not None
    assert x.grad.all()


def test_an_axis_of_one_place_has_kernels_of_one_place() -> None:
    features = ConvFeatures(7, (1,), (4, 5))
    assert [convolution.weight.shape for convolution in features.convolutions] == [(4, 7, 1), (5, 4, 1)]
    assert ConvFeatures(7, (1, 9), (4,)).convolutions[0].weight.shape == (4, 7, 1, 5)


def test_a_map_is_what_the_layers_say() -> None:
    features, x = ConvFeatures(2, (12,), (4, 6)).double(), examples(3, 12)
    first, second = features.convolutions
    nn.init.normal_(first.bias), nn.init.normal_(second.bias)
    assert [convolution.weight.shape for convolution in (first, second)] == [(4, 2, 9), (6, 4, 9)]
    y = conv1d(conv1d(x, first.weight, first.bias, 2, 4).relu(), second.weight, second.bias, 1, 4).relu()
    torch.testing.assert_close(features(x), y, rtol=1e-9, atol=1e-12)


def test_features_start_as_large_as_the_input_at_any_depth() -> None:
    for depth in (1, 3, 9):
        features = ConvFeatures(3, (32, 32), (64,) * depth)(torch.randn(8, 3, 32, 32))
        assert 0.3 < features.square().mean() < 3  # He: half of them are 0, the others of twice the variance


def test_plain_heads_are_what_the_layers_say() -> None:
    x = examples(3, 9, 12)
    linear, mlp = small(head="linear"), small(head="mlp")
    pooled = linear.backbone(x).mean((2, 3))
    torch.testing.assert_close(
        linear(x), pooled @ linear.head.layers.weight.T + linear.head.layers.bias, rtol=1e-9, atol=0
    )
    first, _, last = mlp.head.layers
    assert first.weight.shape == (7, 6)
    hidden = (mlp.backbone(x).mean((2, 3)) @ first.weight.T + first.bias).relu()
    torch.testing.assert_close(mlp(x), hidden @ last.weight.T + last.bias, rtol=1e-9, atol=0)


def test_capsules_are_routed_by_one_weight_per_type_and_class() -> None:
    model, x = small(), examples(3, 9, 12)
    children = model.head.primary(model.backbone(x)).flatten().poses
    weight = model.head.class_caps.weight
    assert weight.shape == (3, 3, 4, 5)
    parents = dynamic(children, weight.repeat_interleave(children.shape[1] // 3, 0), iterations=3).poses
    scores, reconstruction, capsules = model(x, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(scores, parents.square().sum((2, 3)).sqrt(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(capsules.poses, parents, rtol=1e-9, atol=1e-12)
    assert reconstruction is None


def test_under_attention_scores_are_linear_in_the_pose_and_under_em_activations() -> None:
    x, labels = examples(3, 9, 12), torch.tensor([0, 1, 2])
    model = small(routing=Attention(), primary_pose=(2, 2), class_pose=(2, 3))
    scores, _, capsules = model(x, labels)
    readout = model.head.readout
    torch.testing.assert_close(scores, capsules.poses.flatten(2) @ readout.weight[0] + readout.bias)
    children = model.head.primary(model.backbone(x)).flatten().poses
    weight = model.head.class_caps.weight.repeat_interleave(children.shape[1] // 3, 0)
    torch.testing.assert_close(capsules.poses, attention(children, weight).poses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(children.mean((2, 3)), torch.zeros_like(children[..., 0, 0]), rtol=0, atol=1e-9)
    model = small(routing=EM(), primary_pose=(2, 2), class_pose=(2, 2))
    scores, _, capsules = model(x, labels)
    assert model.scores == "activations"
    assert torch.equal(scores, capsules.activations)


@pytest.mark.parametrize("size", [(20,), (9, 12), (6, 5, 7)])
@pytest.mark.parametrize("head", HEADS)
def test_any_size_passes_and_no_weight_belongs_to_a_place(size: tuple[int, ...], head: Head) -> None:
    model = small(size, head)
    larger = tuple(2 * n + 1 for n in size)
    assert model(examples(2, *larger)).shape == (2, 3)
    # to the mean over places a map and its repetition are the same
    features = torch.rand(2, 6, *size, dtype=torch.float64)
    if head != "capsules":
        torch.testing.assert_close(model.head(features.repeat(1, 1, *size))[0], model.head(features)[0])


@pytest.mark.parametrize("routing", [Dynamic(), Dynamic(iterations=1), Dynamic.su(), Dynamic.hauser()])
def test_lengths_start_neither_dead_nor_full_whatever_the_size_of_the_image(routing: Rule) -> None:
    for size in (8, 28, 64):
        models = [HeadedNet(2, 10, size, routing=routing) for _ in range(5)]
        mean = torch.stack([model(torch.randn(4, 2, size, size)).mean() for model in models]).mean()
        assert 0.2 < mean < 0.75


def test_an_int_is_the_size_of_two_axes_or_of_as_many_as_are_said() -> None:
    assert small(9).image_size == (9, 9)
    assert small(9, spatial_dims=1).image_size == (9,)
    assert small(9, spatial_dims=3)(examples(2, 9, 8, 7)).shape == (2, 3)


# masks


def there(*lengths: int, of: int) -> Tensor:
    return torch.arange(of) < torch.tensor(lengths)[:, None]


each_head = pytest.mark.parametrize(
    ("head", "routing"), [("linear", Dynamic()), ("mlp", Dynamic()), *(("capsules", rule) for rule in RULES)]
)


@each_head
def test_padding_a_sequence_further_changes_nothing(head: Head, routing: Rule) -> None:
    for length in (1, 2, 11, 16, 19, 20):
        model, x = small((16,), head, routing=routing, widths=(4, 6, 32)), examples(2, length)
        alone = model(x)
        for more in (0, 1, 2, 5, 13):
            padded = torch.nn.functional.pad(x, (0, more), value=7.0)
            padded[..., length + 1 :] = torch.nan  # what is there does not count, whatever it is
            scores = model(padded, mask=there(length, length, of=length + more))
            torch.testing.assert_close(scores, alone, rtol=1e-9, atol=1e-12)


@each_head
def test_gradients_are_those_without_padding(head: Head, routing: Rule) -> None:
    model, x = small((16,), head, routing=routing), examples(2, 13)
    gradients = []
    for padded, mask in ((x, None), (torch.nn.functional.pad(x, (0, 8), value=torch.nan), there(13, 13, of=21))):
        # a single class would not see a bias that all share
        loss = model(padded, mask=mask)[:, 0].sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
    for with_mask, without in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(with_mask, without, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("size", [(300,), (9, 12), (6, 5, 7)])
def test_a_corner_of_an_image_counts_as_the_corner_alone(head: Head, size: tuple[int, ...]) -> None:
    model, corner = small(size, head), [n // 2 + 1 for n in size]
    x, mask = examples(2, *size), torch.zeros(2, *size, dtype=torch.bool)
    inside = (slice(None), slice(None), *(slice(n) for n in corner))
    mask[inside[1:]] = True
    torch.testing.assert_close(model(x, mask=mask), model(x[inside]), rtol=1e-9, atol=1e-12)


@each_head
def test_a_batch_of_different_lengths_is_its_examples_one_by_one(head: Head, routing: Rule) -> None:
    model, x, lengths = small((16,), head, routing=routing), examples(4, 17), (17, 9, 4, 1)
    together = model(x, mask=there(*lengths, of=17))
    for n, length in enumerate(lengths):
        torch.testing.assert_close(together[n : n + 1], model(x[n : n + 1, :, :length]), rtol=1e-9, atol=1e-12)


@each_head
def test_an_example_with_nothing_in_it_has_finite_scores_and_gradients(head: Head, routing: Rule) -> None:
    model = small((16,), head, routing=routing)
    x = torch.full((2, 2, 16), torch.nan, dtype=torch.float64)
    scores = model(x, mask=there(0, 0, of=16))
    assert scores.isfinite().all()
    scores.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_hole_in_the_middle_is_no_part_of_the_mean() -> None:
    model, x, mask = small((16,), "linear"), examples(2, 16), torch.ones(2, 16, dtype=torch.bool)
    mask[:, 6:11] = False
    before = model(x, mask=mask)
    x[..., 6:11] = torch.nan
    assert torch.equal(model(x, mask=mask), before)
    assert not torch.allclose(before, model(x.nan_to_num(0.0)))


@pytest.mark.parametrize("head", HEADS)
def test_a_mask_that_leaves_nothing_out_changes_nothing_in_low_precision_either(head: Head) -> None:
    model, x = small((16,), head).bfloat16(), examples(2, 16).bfloat16()
    scores = model(x, mask=there(16, 16, of=16))
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores, model(x), rtol=0, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        scores, without = model.float()(x.float(), mask=there(16, 16, of=16)), model(x.float())
    torch.testing.assert_close(scores.float(), without.float(), rtol=0, atol=0.02)


def test_an_exported_model_takes_any_batch_of_masks() -> None:
    model = small((16,)).eval()
    given = examples(3, 16), None, there(16, 9, 4, of=16)
    N = torch.export.Dim("N")
    exported = torch.export.export(model, given, dynamic_shapes=({0: N}, None, {0: N})).module()
    for lengths in ((7,), (16, 3, 12, 1, 2)):
        x, mask = examples(len(lengths), 16), there(*lengths, of=16)
        torch.testing.assert_close(exported(x, None, mask), model(x, None, mask))


# backbones of one's own


class Doubled(nn.Module):
    """Places of two numbers each, and their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)

    def with_mask(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x.where(mask[:, None], 0.0)), mask[:, ::2]


@pytest.mark.parametrize("head", HEADS)
def test_a_backbone_of_ones_own_takes_the_place_of_ours_and_may_carry_masks(head: Head) -> None:
    model, x = small((16,), head, backbone=Doubled()), examples(2, 10)
    assert isinstance(model.backbone, CarriesMask)
    padded = torch.nn.functional.pad(x, (0, 4), value=torch.nan)
    torch.testing.assert_close(model(padded, mask=there(10, 10, of=14)), model(x), rtol=1e-9, atol=1e-12)


def test_a_backbone_that_says_nothing_of_masks_is_given_none() -> None:
    model = small((16,), backbone=nn.Conv1d(2, 8, 3))
    assert model(examples(2, 16)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"given a mask, but its backbone Conv1d .* a method with_mask\(x, mask\)"):
        model(examples(2, 16), mask=there(16, 9, of=16))


# heads of one size


@pytest.mark.parametrize("routing", RULES)
@pytest.mark.parametrize("classes", [1, 10, 200])
@pytest.mark.parametrize("pose", [4, (4, 4)])
def test_a_matched_mlp_has_as_many_parameters_as_the_capsules(routing: Rule, classes: int, pose: Any) -> None:
    settings: dict[str, Any] = {"image_size": (8, 8), "num_classes": classes, "routing": routing}
    with torch.device("meta"):
        capsules = HeadedNet(primary_pose=pose, class_pose=pose, **settings)
        hidden = matched_hidden(capsules)
        mlp = HeadedNet(head="mlp", hidden=hidden, **settings)
    wanted, got = (sum(p.numel() for p in model.head.parameters()) for model in (capsules, mlp))
    assert abs(got / wanted - 1) <= 0.05
    assert sum(p.numel() for p in capsules.backbone.parameters()) == sum(p.numel() for p in mlp.backbone.parameters())


def test_where_no_mlp_is_near_enough_that_is_said() -> None:
    few = HeadedNet(1, 2, 8, widths=(512,), primary_types=1, primary_pose=1, class_pose=1)
    with pytest.raises(ValueError, match=r"no mlp head has the 515 parameters .* within 0.1%: 1 hidden units have 517"):
        matched_hidden(few, tolerance=0.001)
    with pytest.raises(ValueError, match="takes a HeadedNet with head='capsules'"):
        matched_hidden(small(head="mlp"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(head="conv"), "head='conv': take one of 'linear', 'mlp', 'capsules'"),
        (lambda: small(routing="dynamic"), r"routing must be a rule such as routing=Dynamic\(\), not 'dynamic'"),
        (lambda: small(backbone=print), "backbone must be a torch.nn.Module, or None for convolutions"),
        (lambda: small(backbone=nn.Conv2d(3, 4, 3)), r"the backbone does not take \[1, 2, 9, 12\].* for 2 channels"),
        (lambda: small(backbone=nn.Flatten()), r"must make a map \[N, channels, \*places\] .* not \[1, 216\]"),
        (lambda: small(backbone=nn.LazyConv2d(4, 3)), "the backbone has parameters without a size: show it"),
        (lambda: small(()), r"image_size=\(\) and spatial_dims=None must be of 1, 2 or 3 axes"),
        (lambda: small((8, 8, 8, 8)), "must be of 1, 2 or 3 axes"),
        (lambda: small((8, 8), spatial_dims=3), r"image_size=\(8, 8\) must be a whole number .* or 3, one per axis"),
        (lambda: small((8, 0)), r"image_size=\(8, 0\) must be a whole number"),
        (lambda: small(widths=()), r"widths=\(\) must hold a number for each convolution, one at least"),
        (lambda: small(head="mlp", hidden=0), "hidden must be a whole number of 1 or more, not 0"),
        (lambda: small(head="linear").capsules(examples(1, 9, 12)), "plain head: build it with head='capsules'"),
    ],
)
def test_what_does_not_fit_is_an_error_at_the_door(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 15).bool(), torch.ones(2, 16), torch.ones(2, 1, 16).bool(), torch.ones(1, 16).bool()]
)
def test_a_mask_that_does_not_fit_is_told_both_sides(mask: Tensor) -> None:
    message = rf"mask \[{', '.join(map(str, mask.shape))}\] of .*, but x \[2, 2, 16\] needs \[2, 16\] of torch.bool"
    with pytest.raises(ValueError, match=message):
        small((16,))(examples(2, 16), mask=mask)


@pytest.mark.parametrize("head", HEADS)
def test_training_and_evaluation_and_batches_of_one_give_the_same_scores(head: Head) -> None:
    model, x = small((8, 8), head, widths=(32, 64)), examples(3, 8, 8)
    training = model.train()(x)
    torch.testing.assert_close(training, copy.deepcopy(model).eval()(x), rtol=0, atol=0)
    torch.testing.assert_close(model(x[:1]), training[:1], rtol=1e-9, atol=1e-12)


def test_signals_of_different_lengths_are_learned_by_heart() -> None:
    model = small((16,), widths=(8, 12)).float()
    x, labels, mask = examples(6, 16).float(), torch.arange(6) % 3, there(16, 9, 4, 12, 7, 3, of=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        margin_loss(model(x, mask=mask), labels).backward()
        optimizer.step()
    assert torch.equal(model(x, mask=mask).argmax(1), labels)
