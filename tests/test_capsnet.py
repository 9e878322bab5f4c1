"""CapsNet: the paper's network to the last parameter, any image size, and a decoder that never touches the scores."""

import contextlib
import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchcaps import Capsules, squash
from torchcaps.layers import ConvDecoder
from torchcaps.losses import ReconstructionLoss, margin_loss
from torchcaps.models import CapsNet, Output
from torchcaps.routing import EM, Attention, Dynamic, Rule, dynamic

RULES: dict[str, Rule] = {
    "dynamic": Dynamic.sabour(),
    "su": Dynamic.su(),
    "em": EM.hinton(),
    "attention": Attention.tsai(),
}
each_rule = pytest.mark.parametrize("routing", RULES.values(), ids=RULES)

SMALL_KERNELS: dict[str, Any] = {"kernel_size": 3, "primary_kernel_size": 3}
SMALL: dict[str, Any] = {
    "in_chans": 2, "num_classes": 3, "image_size": (8, 11), "stem_channels": 6, "primary_types": 2,
    "primary_pose": (2, 3), "class_pose": (2, 4), "hidden": (8,), **SMALL_KERNELS,
}  # fmt: skip
LABELS = torch.tensor([0, 2, 1, 2])


def small(**settings: Any) -> CapsNet:
    return CapsNet(**{**SMALL, **settings})


def images(N: int = 4) -> Tensor:
    return torch.rand(N, 2, 8, 11)


def on_meta(**settings: Any) -> CapsNet:
    """A model without numbers, to count or to shape."""
    with torch.device("meta"):
        return CapsNet(**settings)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The paper's network


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 8_215_568),
        ({"decoder": False}, 6_804_224),
        ({"image_size": 36}, 11_361_808),  # MultiMNIST
        ({"routing": Dynamic.sabour_code()}, 8_215_728),  # its code has a bias per class capsule
    ],
)
def test_it_has_as_many_parameters_as_the_papers(settings: dict[str, Any], count: int) -> None:
    assert parameters(on_meta(**settings)) == count


def test_maps_and_capsules_have_the_papers_sizes() -> None:
    model = on_meta()
    x = torch.empty(2, 1, 28, 28, device="meta")
    stem = model.stem(x)
    assert stem.shape == (2, 256, 20, 20)
    assert model.primary(stem).poses.shape == (2, 32, 6, 6, 1, 8)
    scores, reconstruction, capsules = model(x, torch.empty(2, dtype=torch.long, device="meta"))
    assert (scores.shape, capsules.poses.shape) == ((2, 10), (2, 10, 1, 16))
    assert reconstruction.shape == (2, 1, 28, 28)


def test_scores_are_what_the_papers_equations_give() -> None:
    model = small(primary_pose=5, class_pose=7, image_size=(9, 12)).double()
    x = torch.rand(3, 2, 9, 12, dtype=torch.float64)
    first, last = model.stem[0], model.primary.conv
    features = nn.functional.conv2d(x, first.weight, first.bias).relu()
    channels = nn.functional.conv2d(features, last.weight, last.bias, stride=2)
    # a capsule is 5 channels in a row at one position; capsules come in the order type, row, column
    poses = [channels[:, 5 * c : 5 * c + 5, y, x] for c in range(2) for y in range(3) for x in range(4)]
    children = squash(torch.stack(poses, 1), dim=-1)[:, :, None]
    parents = dynamic(children, model.class_caps.weight, iterations=3).poses
    expected = parents.square().sum((2, 3)).sqrt()
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Any size


@pytest.mark.parametrize(
    ("in_chans", "image_size", "capsules"),
    [
        (1, 28, 1152), (1, 36, 3200), (1, 40, 4608), (3, 48, 1152), (3, 64, 3200), (3, 200, 4608), (3, 224, 4608),
        (3, (37, 52), 2464), (1, (17, 300), 352), (1, 17, 32), (1, 1000, 4608),
    ],
)  # fmt: skip
def test_any_size_from_17_pixels_on_works_as_it_is(in_chans: int, image_size: Any, capsules: int) -> None:
    model = on_meta(in_chans=in_chans, image_size=image_size, num_classes=7)
    assert model.class_caps.in_caps == capsules
    x = torch.empty(2, in_chans, *model.image_size, device="meta")
    out = model(x, torch.empty(2, 7, device="meta"))
    assert out.scores.shape == (2, 7)
    assert out.reconstruction.shape == x.shape


def test_a_large_image_runs_with_real_numbers() -> None:
    model = CapsNet(in_chans=3, image_size=(224, 190), stem_channels=4, primary_types=2, decoder=False)
    scores = model(torch.rand(2, 3, 224, 190))
    assert scores.shape == (2, 10)
    assert scores.isfinite().all()


@given(size=st.integers(17, 2000))
def test_primary_capsules_stay_4608_at_most_and_no_pixel_is_passed_over(size: int) -> None:
    model = on_meta(image_size=(size, 28), decoder=False, stem_channels=1)
    conv = model.stem[0]
    assert 1 <= model.class_caps.in_caps / (32 * 6) <= 12
    assert all(k >= s for k, s in zip(conv.kernel_size, conv.stride, strict=True))
    assert conv.stride[1] == 1
    assert (conv.stride[0] == 1) == (size <= 40)


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"image_size": 65, "kernel_size": 1, "primary_kernel_size": 22}, 32),
        ({"image_size": 400, "primary_kernel_size": 31}, 33),
        ({"image_size": 400, "primary_kernel_size": 392}, 392),
    ],
)
def test_the_stem_leaves_room_for_the_kernel_of_the_primary_capsules(settings: Any, positions: int) -> None:
    model = on_meta(decoder=False, stem_channels=1, primary_types=1, primary_stride=1, num_classes=2, **settings)
    x = torch.empty(2, 1, *model.image_size, device="meta")
    assert model.stem(x).shape[2:] == (positions, positions)
    assert model(x).shape == (2, 2)


@given(size=st.integers(1, 500), kernel=st.integers(1, 12), padding=st.integers(0, 3), above=st.integers(1, 70))
def test_every_image_either_works_or_is_told_the_smallest_that_does(
    size: int, kernel: int, padding: int, above: int
) -> None:
    def make(size: int) -> CapsNet:
        return on_meta(
            image_size=size, kernel_size=kernel, stem_padding=padding, primary_kernel_size=above, decoder=False,
            stem_channels=1, primary_types=1, num_classes=2,
        )  # fmt: skip

    smallest = max(1, above - 1 + kernel - 2 * padding)
    if size >= smallest:
        assert make(size)(torch.empty(1, 1, size, size, device="meta")).shape == (1, 2)
    else:
        with pytest.raises(ValueError, match=f"smallest image .* is {smallest} x {smallest};"):
            make(size)


def test_the_stride_of_the_stem_is_the_callers_where_given() -> None:
    model = on_meta(image_size=(64, 40), stem_stride=(1, 2))
    assert model.class_caps.in_caps == 32 * 24 * 4


@pytest.mark.parametrize(
    ("settings", "layer", "reached", "smallest"),
    [
        ({"image_size": 16}, "primary capsules' kernel of 9 x 9", "8 x 8", 17),
        ({"image_size": 8}, "stem's kernel of 9 x 9", "8 x 8", 17),
        ({"image_size": (40, 16)}, "primary capsules' kernel of 9 x 9", "32 x 8", 17),
        ({"image_size": 16, "stem_stride": 2}, "primary capsules' kernel of 9 x 9", "4 x 4", 25),
        ({"image_size": 8, "stem_padding": 2}, "primary capsules' kernel of 9 x 9", "4 x 4", 13),
        ({"image_size": 4, **SMALL_KERNELS}, "primary capsules' kernel of 3 x 3", "2 x 2", 5),
    ],
)
def test_an_image_too_small_is_told_the_layer_the_size_there_and_the_smallest_that_works(
    settings: dict[str, Any], layer: str, reached: str, smallest: int
) -> None:
    with pytest.raises(ValueError, match="smaller kernel_size and primary_kernel_size") as error:
        on_meta(**settings)
    assert layer in str(error.value)
    assert reached in str(error.value)
    assert f"is {smallest} x {smallest};" in str(error.value)
    on_meta(**{**settings, "image_size": smallest})
    with pytest.raises(ValueError, match="smallest image"):
        on_meta(**{**settings, "image_size": smallest - 1})


def test_eight_by_eight_pixels_work_with_smaller_kernels() -> None:
    model = CapsNet(image_size=8, stem_channels=8, primary_types=2, stem_padding=1, hidden=(16,), **SMALL_KERNELS)
    out = model(torch.rand(2, 1, 8, 8), torch.tensor([3, 9]))
    assert model.class_caps.in_caps == 2 * 3 * 3
    assert out.reconstruction.shape == (2, 1, 8, 8)


class Gate(nn.Module):
    """Channels weighed by a look at the whole image. In training its norm cannot take a single image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(x.mean((2, 3)))[:, :, None, None].sigmoid()


def test_a_stem_of_ones_own_takes_the_first_convolutions_place_and_is_left_as_it_was() -> None:
    stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), Gate(4), nn.Conv2d(4, 5, 3), nn.ReLU())
    before = copy.deepcopy(stem.state_dict())
    model = small(stem=stem)
    assert model.stem is stem
    assert model.training
    assert stem.training
    for name, value in before.items():
        torch.testing.assert_close(stem.state_dict()[name], value, rtol=0, atol=0)
    assert model.primary.conv.in_channels == 5
    assert model.class_caps.in_caps == 2 * 2 * 4
    assert model(images()).shape == (4, 3)


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        (nn.Conv2d(2, 4, 7), r"map of 2 x 5 of an image of 8 x 11, but .* kernel of 3 x 3"),
        (nn.Conv2d(3, 4, 3), r"stem does not take an image \[1, 2, 8, 11\]: .*: build it for 2 channels, or give"),
        (lambda x: x, r"stem must be a torch.nn.Module, or None"),
        (True, r"stem must be a torch.nn.Module, or None"),
        (nn.Flatten(), r"map \[N, channels, height, width\] of an image, not \[1, 176\]"),
    ],
)
def test_a_stem_that_makes_no_map_for_the_primary_capsules_is_a_clear_error(stem: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(stem=stem)


def test_a_stem_without_a_size_is_told_to_see_an_image_before() -> None:
    stem = nn.LazyConv2d(4, 3)
    with pytest.raises(ValueError, match=r"show it an image before, stem\(torch\.rand\(1, 2, 8, 11\)\)"):
        small(stem=stem)
    stem(torch.rand(1, 2, 8, 11))
    assert small(stem=stem)(images()).shape == (4, 3)


@pytest.mark.parametrize("shape", [(4, 1, 8, 11), (4, 2, 11, 8), (4, 2, 8, 12), (2, 8, 11), (4, 176)])
def test_an_image_of_another_size_or_number_of_channels_is_told_both_sides(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"built for images \[N, 2, 8, 11\], not .*SharedCapsules") as error:
        small()(torch.rand(shape))
    assert f"not {list(shape)}" in str(error.value)
    assert ("x.unsqueeze(0)" in str(error.value)) == (shape == (2, 8, 11))


def test_bytes_are_told_to_be_scaled() -> None:
    with pytest.raises(ValueError, match=r"not torch\.uint8: for bytes give x / 255"):
        small()(torch.zeros(4, 2, 8, 11, dtype=torch.uint8))


@pytest.mark.parametrize(
    "settings",
    [
        {"in_chans": 0}, {"num_classes": 0}, {"num_classes": 2.0}, {"image_size": (28, 28, 1)}, {"image_size": (28, 0)},
        {"kernel_size": 0}, {"stem_padding": -1}, {"scores": "length"}, {"routing": "dynamic"},
        {"primary_pose": (4, 4), "class_pose": 16}, {"decoder": 0}, {"decoder": 1}, {"decoder": None},
        {"decoder": "conv"}, {"num_classes": True}, {"image_size": True}, {"image_size": 2.5}, {"image_size": None},
        {"primary_types": 0}, {"primary_types": True}, {"hidden": 512},
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_an_error_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|take one of|keeps its 4 rows"):
        on_meta(**settings)


def test_sizes_of_a_model_may_be_whole_numbers_of_numpy() -> None:
    four = np.int64(4)
    model = small(
        num_classes=four, image_size=(np.int32(8), np.int64(11)), kernel_size=np.int64(3), stem_channels=four,
        primary_types=four, hidden=(four,),
    )  # fmt: skip
    assert model.image_size == (8, 11)
    assert all(type(n) is int for n in (*model.image_size, model.num_classes))
    assert model(images()).shape == (4, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Scores and labels


@each_rule
@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_scores_are_one_per_example_and_class_always(routing: Rule, classes: int, N: int, training: bool) -> None:
    model = small(routing=routing, num_classes=classes).train(training)
    scores = model(images(N))
    assert isinstance(scores, Tensor)
    assert scores.shape == (N, classes)
    out = model(images(N), torch.zeros(N, dtype=torch.long))
    assert isinstance(out, Output)
    assert out.scores.shape == (N, classes)
    assert out.capsules.poses.shape == (N, classes, 2, 4)


@each_rule
@pytest.mark.parametrize("training", [True, False])
def test_scores_never_depend_on_the_label(routing: Rule, training: bool) -> None:
    model, x = small(routing=routing).train(training), images()
    scores = model(x)
    for labels in (LABELS, (LABELS + 1) % 3, torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)):
        assert torch.equal(model(x, labels).scores, scores)


def test_the_decoder_sees_the_label_in_training() -> None:
    model, x = small(), images()
    out = model(x, LABELS)
    keep = nn.functional.one_hot(LABELS, 3).float()
    torch.testing.assert_close(out.reconstruction, model.decoder(out.capsules.poses, keep), rtol=0, atol=0)
    assert not torch.equal(model(x, (LABELS + 1) % 3).reconstruction, out.reconstruction)


@each_rule
def test_the_decoder_sees_the_longest_capsule_in_evaluation_whatever_the_label(routing: Rule) -> None:
    model, x = small(routing=routing).eval(), images(16)
    scores = model(x)
    longest = scores.argmax(1)
    expected = model.train()(x, longest).reconstruction
    model.eval()
    for labels in (longest, (longest + 1) % 3, torch.ones(16, 3)):
        assert torch.equal(model(x, labels).reconstruction, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_labels_may_be_indices_or_presence_of_any_dtype(dtype: torch.dtype) -> None:
    model, x = small(), images()
    one_hot = nn.functional.one_hot(LABELS, 3).to(dtype)
    torch.testing.assert_close(model(x, one_hot), model(x, LABELS), rtol=0, atol=0)
    torch.testing.assert_close(model(x, LABELS.to(torch.int32)), model(x, LABELS), rtol=0, atol=0)
    several = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]]).to(dtype)
    out = model(x, several)
    drawn = model.decoder(out.capsules.poses * several[:, :, None, None], torch.ones(4, 3))
    torch.testing.assert_close(out.reconstruction, drawn)


def test_reconstruct_draws_what_is_asked_for_in_either_mode() -> None:
    model, x = small(), images()
    capsules = model.capsules(x)
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model.reconstruct(capsules, LABELS), model.train()(x, LABELS).reconstruction)
        model.train(training)
        torch.testing.assert_close(model.reconstruct(capsules), model.eval()(x, LABELS).reconstruction)


def test_without_a_decoder_there_is_no_reconstruction() -> None:
    model, x = small(decoder=False), images()
    out = model(x, LABELS)
    assert out.reconstruction is None
    assert torch.equal(out.scores, model(x))
    with pytest.raises(ValueError, match="no decoder"):
        model.reconstruct(out.capsules)


def test_the_decoder_may_be_a_module_of_ones_own() -> None:
    decoder = ConvDecoder(3, (2, 4), (2, 8, 11), channels=(4,))
    model = small(decoder=decoder)
    assert model.decoder is decoder
    assert model(images(), LABELS).reconstruction.shape == (4, 2, 8, 11)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), r"labels \[2\] of torch.int64 do not fit scores \[4, 3\]"),
        (torch.rand(4), "do not fit"),
        (torch.tensor([True, False, True, True]), "do not fit"),
        (torch.rand(4, 2), "do not fit"),
        (torch.tensor([0, 1, 2, 3]), "labels hold 0 to 3, but the model has 3 classes"),
        (torch.tensor([0, 1, 2, -1]), "labels hold -1 to 2"),
        (torch.tensor([0, 1, 2, 3]).to(torch.uint16), "labels hold 0 to 3, but the model has 3 classes"),
        (torch.full((4, 3), torch.nan), "labels hold nan to nan, but presence is 0 to 1"),
        (torch.full((4, 3), 7.0), "labels hold 7.0 to 7.0, but presence is 0 to 1"),
        (torch.full((4, 3), -1), "labels hold -1 to -1, but presence is 0 to 1"),
        (torch.zeros(4, 3, dtype=torch.complex64), "complex64 do not fit"),
        (torch.zeros(4, dtype=torch.complex64), "complex64 do not fit"),
        ([0, 1, 2, 0], r"labels must be a tensor, not list: give torch\.as_tensor\(labels\)"),
    ],
)
def test_labels_that_do_not_fit_are_one_clear_error(labels: Any, message: str, training: bool) -> None:
    with pytest.raises(ValueError, match=message):
        small().train(training)(images(), labels)


@pytest.mark.parametrize("labels", [LABELS, nn.functional.one_hot(LABELS, 3)], ids=["indices", "presence"])
@each_rule
def test_gradients_per_example_are_those_of_each_example_alone(routing: Rule, labels: Tensor) -> None:
    model, x = small(routing=routing).double(), images().double()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        out = torch.func.functional_call(model, weights, (x[None], label[None]))
        return margin_loss(out.scores, label[None]) + ReconstructionLoss()(out.reconstruction, x[None])

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, labels)
    for n in range(len(x)):
        alone = torch.func.grad(loss)(weights, x[n], labels[n])
        for name in weights:
            torch.testing.assert_close(together[name][n], alone[name], rtol=1e-8, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# What scores are


@pytest.mark.parametrize("routing", [Dynamic.sabour(), Dynamic.sabour_code(leaky=True), Dynamic.su(), Dynamic.hauser()])
def test_under_dynamic_routing_scores_are_lengths_within_0_and_1(routing: Rule) -> None:
    model, x = small(routing=routing), 100 * images()
    out = model(x, LABELS)
    assert model.scores == "lengths"
    torch.testing.assert_close(out.scores, out.capsules.poses.flatten(2).norm(dim=2))
    assert (out.scores >= 0).all()
    assert (out.scores <= 1 + 1e-6).all()


def test_under_em_routing_scores_are_activations() -> None:
    model = small(routing=EM.hinton())
    out = model(images(), LABELS)
    assert model.scores == "activations"
    assert torch.equal(out.scores, out.capsules.activations)
    assert (out.scores > 0).all()
    assert (out.scores < 1).all()


def test_under_attention_scores_are_logits_alike_for_all_classes() -> None:
    model = small(routing=Attention.tsai())
    out = model(images(), LABELS)
    assert model.scores == "logits"
    flat = out.capsules.poses.flatten(2)
    torch.testing.assert_close(out.scores, flat @ model.readout.weight[0] + model.readout.bias)
    assert parameters(model.readout) == 2 * 4 + 1


def test_children_speak_as_the_classes_do() -> None:
    x = images()
    for routing in (Dynamic.sabour(), EM.hinton(), Attention.tsai()):
        model = small(routing=routing)
        features = model.stem(x)
        poses, activations = model.primary(features)
        channels = model.primary.conv(features)
        raw = channels[:, : 2 * 2 * 3].unflatten(1, (2, 2, 3)).permute(0, 1, 4, 5, 2, 3)
        expected = {
            "lengths": squash(raw),
            "activations": raw,
            "logits": nn.functional.layer_norm(raw, (2, 3)),
        }[model.scores]
        torch.testing.assert_close(poses, expected)
        assert (activations is None) == (model.scores != "activations")
        if activations is not None:
            torch.testing.assert_close(activations, channels[:, 2 * 2 * 3 :].sigmoid())


def test_what_scores_are_can_be_chosen() -> None:
    model = small(routing=Attention.tsai(), scores="lengths")
    out = model(images(), LABELS)
    torch.testing.assert_close(out.scores, out.capsules.lengths, rtol=0, atol=0)


@pytest.mark.parametrize("routing", [Dynamic(), Dynamic(learn_prior=True), Attention.tsai()])
def test_scores_cannot_be_activations_under_a_rule_that_has_none(routing: Rule) -> None:
    with pytest.raises(ValueError, match=r"class capsules have none: .* scores=\"lengths\""):
        small(routing=routing, scores="activations")
    with pytest.raises(ValueError, match=r"class capsules have none: .* scores=\"lengths\""):
        small(routing=EM()).reconstruct(Capsules(torch.ones(4, 3, 2, 4)))


@dataclass(frozen=True)
class Present(Dynamic):
    """A rule that asks for no activations, but gives some."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        routed = super().__call__(*args, **settings)
        return routed._replace(activations=routed.capsules.lengths)


def test_scores_may_be_activations_that_a_rule_makes_out_of_poses() -> None:
    model = small(routing=Present(), scores="activations")
    out = model(images(), LABELS)
    torch.testing.assert_close(out.scores, out.capsules.lengths, rtol=0, atol=0)


@given(
    scores=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6),
    kind=st.sampled_from(["lengths", "activations", "logits"]),
)
def test_probabilities_are_a_distribution_in_the_order_of_the_scores(scores: list[float], kind: Any) -> None:
    model = on_meta(num_classes=1, decoder=False, routing=EM() if kind == "activations" else Dynamic(), scores=kind)
    given_scores = torch.tensor([scores, scores[::-1]])
    p = model.probabilities(given_scores)
    torch.testing.assert_close(p.sum(1), torch.ones(2))
    assert (p >= 0).all()
    order = given_scores.argsort(1)
    assert (p.gather(1, order).diff(dim=1) >= 0).all()
    best = p.gather(1, given_scores.argmax(1, keepdim=True))
    assert torch.equal(best, p.amax(1, keepdim=True))


def test_lengths_at_the_targets_of_the_margin_loss_are_read_as_nine_tenths() -> None:
    model = small(num_classes=10)
    scores = torch.full((1, 10), 0.1)
    scores[0, 4] = 0.9
    assert model.probabilities(scores)[0, 4].item() == pytest.approx(0.9)
    torch.testing.assert_close(model.probabilities(torch.zeros(1, 10)), torch.full((1, 10), 0.1))
    rounded_up = model.probabilities(torch.tensor([[0.5, 1 + 2**-23, 1.0]]))
    assert rounded_up.argmax(1).item() == 1
    torch.testing.assert_close(rounded_up.sum(), torch.tensor(1.0))
    assert model.probabilities(scores.bfloat16()).dtype == torch.bfloat16


def test_with_several_labels_each_class_has_a_probability_of_its_own() -> None:
    scores = torch.tensor([[0.9, 0.0, 1 + 2**-23]])
    assert small().probabilities(scores, multi_label=True).tolist() == [[pytest.approx(0.9), 0.0, 1.0]]
    attention = small(routing=Attention.tsai())
    torch.testing.assert_close(attention.probabilities(scores, multi_label=True), scores.sigmoid())
    torch.testing.assert_close(attention.probabilities(scores), scores.softmax(1))


# ---------------------------------------------------------------------------------------------------------------------
# It trains, and lives with the rest of torch


def loss_of(out: Output, x: Tensor) -> Tensor:
    loss = margin_loss(out.scores, LABELS[: len(x)])
    return loss if out.reconstruction is None else loss + ReconstructionLoss()(out.reconstruction, x)


@each_rule
@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("N", [1, 4])
def test_every_parameter_gets_a_finite_gradient(routing: Rule, decoder: bool, N: int) -> None:
    model, x = small(routing=routing, decoder=decoder), images(N)
    loss_of(model(x, LABELS[:N]), x).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@each_rule
def test_it_learns_a_few_images_by_heart(routing: Rule) -> None:
    model = small(routing=routing)
    x, labels = images(6), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        scores = model(x)
        logits = scores if model.scores == "logits" else scores.logit(eps=1e-6)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), labels)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@each_rule
@pytest.mark.parametrize("decoder", [True, False])
def test_distributed_training_finds_no_unused_parameter(routing: Rule, decoder: bool) -> None:
    model, x = small(routing=routing, decoder=decoder), images()
    loss_of(model(x, LABELS), x).backward()
    with one_process():
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        for _ in range(2):  # an unused parameter is an error in the second step
            parallel.zero_grad()
            loss_of(parallel(x, LABELS), x).backward()
        for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_data_parallel_hands_the_output_on() -> None:
    model, x = small(), images()
    out = nn.DataParallel(model)(x, LABELS)
    torch.testing.assert_close(out, model(x, LABELS))


@each_rule
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.05)])
def test_models_of_other_precision_give_scores_of_theirs(routing: Rule, dtype: torch.dtype, tolerance: float) -> None:
    model, x = small(routing=routing), images()
    expected = model(x, LABELS)
    out = model.to(dtype)(x.to(dtype), LABELS)
    assert out.scores.dtype == out.reconstruction.dtype == dtype
    torch.testing.assert_close(out.scores.float(), expected.scores, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.reconstruction.float(), expected.reconstruction, rtol=tolerance, atol=tolerance)


@each_rule
def test_autocast_changes_scores_by_its_rounding_alone(routing: Rule) -> None:
    model, x = small(routing=routing), images()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, LABELS)
        loss = loss_of(out, x)
    torch.testing.assert_close(out.scores.float(), expected, rtol=0.05, atol=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@each_rule
def test_channels_last_changes_nothing(routing: Rule) -> None:
    model = small(routing=routing).double()
    x = images().double()
    expected = model(x, LABELS)
    model.to(memory_format=torch.channels_last)
    for given_images in (x, x.to(memory_format=torch.channels_last)):
        out = model(given_images, LABELS)
        torch.testing.assert_close(out.scores, expected.scores, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out.reconstruction, expected.reconstruction, rtol=1e-9, atol=1e-12)


@each_rule
def test_it_moves_to_meta_and_back_as_any_module(routing: Rule) -> None:
    model = small(routing=routing).to("meta")
    out = model(images().to("meta"), LABELS.to("meta"))
    assert (out.scores.shape, out.reconstruction.shape) == ((4, 3), (4, 2, 8, 11))
    model = model.to_empty(device="cpu")
    model.load_state_dict(small(routing=routing).state_dict())
    assert model(images()).isfinite().all()


@each_rule
def test_an_exported_model_takes_any_batch(routing: Rule) -> None:
    model = small(routing=routing).eval()
    exported = torch.export.export(model, (images(3),), dynamic_shapes=({0: torch.export.Dim("N")},)).module()
    for N in (1, 2, 7):
        x = images(N)
        torch.testing.assert_close(exported(x), model(x))


def test_it_compiles_to_one_graph() -> None:
    # in a process of its own: here every call carries a check of shapes, which the compiler cannot read
    program = f"""
import torch
from torchcaps.models import CapsNet
from torchcaps.routing import EM, Attention, Dynamic
x, labels = torch.rand(4, 2, 8, 11), torch.tensor([0, 2, 1, 2])
for routing in (Dynamic.sabour(), Dynamic.su(), EM.hinton(), Attention.tsai()):
    model = CapsNet(routing=routing, **{SMALL})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x, labels), model(x, labels))
print("same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


@each_rule
def test_copies_and_stored_models_give_the_same_scores(routing: Rule) -> None:
    model, x = small(routing=routing), images()
    expected = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = small(routing=routing)
    other.load_state_dict(torch.load(file, weights_only=True))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(same(x), expected)


def test_a_stored_model_of_another_size_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for class_caps.weight"):
        small().load_state_dict(small(image_size=(9, 15)).state_dict())


def test_a_batch_of_none_gives_scores_of_none() -> None:
    assert small()(images(0)).shape == (0, 3)


def test_capsules_can_be_changed_before_they_are_drawn() -> None:
    model = small()
    capsules = model.capsules(images())
    turned = Capsules(capsules.poses + 0.25)
    assert not torch.equal(model.reconstruct(turned, LABELS), model.reconstruct(capsules, LABELS))


# ---------------------------------------------------------------------------------------------------------------------
# The example, before it trains


def digits(*arguments: str) -> subprocess.CompletedProcess[str]:
    example = Path(__file__).parents[1] / "examples" / "digits.py"
    return subprocess.run([sys.executable, str(example), *arguments], capture_output=True, text=True, check=False)


def test_a_folder_that_cannot_be_written_is_one_line_before_the_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc")):
        done = digits("--out", str(folder))
        assert done.returncode == 1
        assert done.stderr.startswith(f"cannot write to {folder}: ")
        assert done.stderr.count("\n") == 1
        assert "training" not in done.stdout


@pytest.mark.parametrize("epochs", ["0", "-1", "1.5"])
def test_fewer_epochs_than_one_are_an_error_of_the_command_line(epochs: str, tmp_path: Path) -> None:
    done = digits(f"--epochs={epochs}", "--out", str(tmp_path / "new"))
    assert done.returncode == 2
    assert f"argument --epochs: '{epochs}' is not a whole number of 1 or more" in done.stderr
    assert not (tmp_path / "new").exists()
