"""What holds for every model that has a name: scores, labels, gradients, batches, precision, and errors at the door."""

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchcaps import Capsules
from torchcaps.losses import ReconstructionLoss, margin_loss
from torchcaps.models import Output, create_model, list_models

CLASSES, IN_CHANS = 3, 2


@dataclass(frozen=True)
class Small:
    """A model at a size that is tried in no time."""

    image_size: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    any_size: bool = False
    too_small: tuple[int, int] | None = None
    """An image that leaves the last layer nothing to look at."""
    capsules: tuple[int, ...] | None = None
    """Shape of the pose of a class."""


CAPS: dict[str, Any] = {"primary_types": 2, "conv_caps": ((3, 3, 2), (2, 3, 1))}
ATTENTION: dict[str, Any] = {"backbone_channels": 6, **CAPS}

SMALL: dict[str, Small] = {
    "capsnet": Small(
        (8, 11), {"stem_channels": 6, "primary_types": 2, "kernel_size": 3, "primary_kernel_size": 3, "hidden": (8,)},
        too_small=(4, 11), capsules=(1, 16),
    ),
    "capsnet_resnet": Small(
        (10, 8), {"stem_widths": (4, 6), "primary_types": 2, "primary_kernel_size": 3}, too_small=(4, 8),
        capsules=(1, 16),
    ),
    "em_capsnet": Small((17, 20), {"stem_channels": 6, **CAPS}, True, (16, 20), (4, 4)),
    "em_capsnet_small": Small((17, 20), {"stem_channels": 6, **CAPS}, True, (17, 16), (4, 4)),
    "em_capsnet_simple": Small((13, 16), {"stem_channels": 6, **CAPS}, True, (12, 16), (4, 4)),
    "em_capsnet_resnet": Small((13, 14), {"stem_widths": (4, 6), **CAPS}, True, (12, 14), (4, 4)),
    "su_capsnet": Small((14, 17), {"channels": (4, 4, 5, 6)}, True, (13, 17), (1, 16)),
    "su_cnn": Small((14, 17), {"channels": (4, 4, 5, 6), "hidden": 7}, True, (14, 13)),
    "inverted_attention_resnet": Small(
        (13, 16), {"resnet_width": 4, **ATTENTION}, too_small=(12, 16), capsules=(4, 4)
    ),
    "inverted_attention_simple": Small((13, 16), ATTENTION, too_small=(13, 12), capsules=(4, 4)),
    "inverted_attention_diverse": Small(
        (14, 13), {"backbone_channels": 6, "primary_types": 2, "conv_caps": ((3, 3, 1),), "pose": (3, 3)},
        too_small=(14, 12), capsules=(3, 3),
    ),
    "cnn_cifar": Small((13, 16), {"channels": (4, 5, 6)}, True, (12, 16)),
    "cnn_diverse": Small((13, 16), {"channels": (4, 5, 6), "hidden": (7,)}, True, (13, 12)),
    "capsule_head": Small((9, 8), {"primary_types": 2}, True, capsules=(1, 16)),
    "linear_head": Small((9, 8), {}, True),
    "mlp_head": Small((9, 8), {}, True),
    "resnet18_cifar": Small((9, 8), {"widths": (4, 4, 6, 6), "blocks": (1, 1, 2, 1)}, True),
}  # fmt: skip

each_model = pytest.mark.parametrize("name", list_models())


def make(name: str, classes: int = CLASSES, **settings: Any) -> Any:
    small = SMALL[name]
    return create_model(name, classes, IN_CHANS, small.image_size, **{**small.settings, **settings})


def images(name: str, N: int = 4) -> Tensor:
    return torch.rand(N, IN_CHANS, *SMALL[name].image_size)


def labels(N: int = 4) -> Tensor:
    return torch.arange(N) % CLASSES


def loss_of(model: nn.Module, out: Output, x: Tensor, target: Tensor) -> Tensor:
    """The loss that fits what the scores are."""
    if model.scores == "logits":  # cross-entropy would not see a bias that all classes share
        return binary_cross_entropy_with_logits(out.scores.float(), torch.eye(CLASSES)[target])
    loss = margin_loss(out.scores, target)
    return loss if out.reconstruction is None else loss + ReconstructionLoss()(out.reconstruction, x)


def test_every_listed_model_is_tried_here() -> None:
    assert sorted(SMALL) == list_models()


@each_model
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_scores_are_one_per_example_and_class_always(name: str, classes: int, N: int, training: bool) -> None:
    model = make(name, classes).train(training)
    scores = model(images(name, N))
    assert isinstance(scores, Tensor)
    assert scores.shape == (N, classes)
    assert scores.isfinite().all()


@each_model
def test_with_labels_a_model_gives_its_output_and_the_same_scores(name: str) -> None:
    model, x, pose = make(name).eval(), images(name), SMALL[name].capsules
    scores = model(x)
    for given in (labels(), torch.eye(3)[labels()]):
        out = model(x, given)
        assert isinstance(out, Output)
        assert torch.equal(out.scores, scores)
    if pose is None:
        assert out.capsules is None
    else:
        assert isinstance(out.capsules, Capsules)
        assert out.capsules.poses.shape == (4, CLASSES, *pose)
        torch.testing.assert_close(out.capsules, model.capsules(x))
    assert out.reconstruction is None or out.reconstruction.shape == x.shape


@each_model
def test_a_model_says_what_its_scores_are_and_reads_them_as_probabilities(name: str) -> None:
    model, x = make(name).eval(), images(name)
    scores = model(x)
    if model.scores != "logits":
        assert (scores >= 0).all()
        assert (scores <= 1 + 1e-6).all()
    p = model.probabilities(scores)
    torch.testing.assert_close(p.sum(1), torch.ones(4))
    assert torch.equal(p.argsort(1), scores.argsort(1))
    own = model.probabilities(scores, multi_label=True)
    torch.testing.assert_close(own, scores.sigmoid() if model.scores == "logits" else scores)


@each_model
def test_a_step_of_training_lowers_the_loss_and_every_parameter_takes_part(name: str) -> None:
    model, x, target = make(name), images(name, 6), labels(6)
    loss = loss_of(model, model(x, target), x, target)
    loss.backward()
    loss = loss.detach()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key
    steepness = sum(float(parameter.grad.square().sum()) for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():  # so short that the slope alone decides: the loss falls by 1e-3 or so
            parameter -= 1e-3 / steepness * parameter.grad
        after = loss_of(model, model(x, target), x, target)
    assert float(loss - after) == pytest.approx(1e-3, rel=0.5)


@each_model
def test_examples_do_not_depend_on_their_batch(name: str) -> None:
    model, x = make(name).double().eval(), images(name, 3).double()
    together = model(x)
    for n in range(3):
        torch.testing.assert_close(model(x[n : n + 1]), together[n : n + 1], rtol=1e-9, atol=1e-12)
    assert model(x[:0]).shape == (0, CLASSES)


@each_model
def test_autocast_changes_scores_by_its_rounding_alone(name: str) -> None:
    model, x, target = make(name).eval(), images(name), labels()
    expected = model(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, target)
        loss = loss_of(model, out, x, target)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out.scores.detach().float(), expected, rtol=0, atol=0.05 * scale)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@each_model
def test_channels_last_changes_nothing(name: str) -> None:
    model, x = make(name).double().eval(), images(name).double()
    expected = model(x)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-9, atol=1e-12)


@each_model
def test_copies_and_stored_models_give_the_same_scores(name: str) -> None:
    model, x = make(name).eval(), images(name)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make(name).eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(same(x), expected)


@each_model
def test_images_of_another_size_pass_or_are_told_both_sides(name: str) -> None:
    model, small = make(name).eval(), SMALL[name]
    H, W = small.image_size
    x = torch.rand(2, IN_CHANS, H + 3, W + 6)
    if small.any_size:
        assert model(x).shape == (2, CLASSES)
    else:
        with pytest.raises(ValueError, match=rf"\[N, 2, {H}, {W}\], not \[2, 2, {H + 3}, {W + 6}\]"):
            model(x)


@each_model
def test_an_image_too_small_for_the_kernels_is_an_error_at_once(name: str) -> None:
    small = SMALL[name]
    if small.too_small is None:  # then a single pixel passes
        assert make(name)(torch.rand(2, IN_CHANS, 1, 1)).shape == (2, CLASSES)
        return
    with pytest.raises(ValueError, match=rf"image of {small.too_small[0]} x {small.too_small[1]}\b"):
        create_model(name, CLASSES, IN_CHANS, small.too_small, **small.settings)
    if small.any_size and name != "em_capsnet_resnet":  # a stem is a module of one's own, and says so itself
        with pytest.raises(ValueError, match=r"with H and W of \d+ or more, not \[2, 2"):
            make(name)(torch.rand(2, IN_CHANS, *small.too_small))


@each_model
def test_what_is_no_batch_of_such_images_is_told_both_sides(name: str) -> None:
    model, x = make(name), images(name)
    for wrong, message in (
        (x[:, :1], r"was built for .*\[N, 2, .*\].*, not \[4, 1, "),
        (x[0], r"not \[2, .*a batch of one: x\.unsqueeze\(0\)"),
        (x.flatten(1), r"not \[4, "),
        (x.byte(), r"takes floating-point .*, not torch\.uint8: for bytes give x / 255"),
        (x.tolist(), r"takes a tensor.*, not list"),
    ):
        with pytest.raises(ValueError, match=message):
            model(wrong)


@each_model
def test_labels_that_do_not_fit_are_one_clear_error(name: str) -> None:
    model, x = make(name), images(name)
    for wrong, message in (
        (torch.tensor([0, 1]), r"labels \[2\] of torch.int64 do not fit scores \[4, 3\]"),
        (torch.tensor([0, 1, 2, 3]), "labels hold 0 to 3, but the model has 3 classes"),
        (torch.full((4, 3), 7.0), "labels hold 7.0 to 7.0, but presence is 0 to 1"),
        ([0, 1, 2, 0], r"labels must be a tensor, not list"),
    ):
        with pytest.raises(ValueError, match=message):
            model(x, wrong)


@each_model
@pytest.mark.parametrize("argument", ["num_classes", "in_chans", "image_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_sizes_are_whole_numbers(name: str, argument: str, value: Any) -> None:
    sizes = {"num_classes": CLASSES, "in_chans": IN_CHANS, "image_size": SMALL[name].image_size, argument: value}
    with pytest.raises(ValueError, match=f"{argument}.* must be"):
        create_model(name, **sizes, **SMALL[name].settings)


@pytest.mark.parametrize("name", [name for name in SMALL if not name.startswith("em_capsnet_")])  # as em_capsnet
def test_an_exported_model_takes_any_batch(name: str) -> None:
    model = make(name).eval()
    exported = torch.export.export(model, (images(name, 3),), dynamic_shapes=({0: torch.export.Dim("N")},)).module()
    for N in (1, 2, 7):
        x = images(name, N)
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.slow
@each_model
def test_it_compiles_to_one_graph(name: str) -> None:
    # in a process of its own: here every call carries a check of shapes, which the compiler cannot read
    small = SMALL[name]
    program = f"""
import torch
from torchcaps.models import create_model
model = create_model({name!r}, {CLASSES}, {IN_CHANS}, {small.image_size}, **{small.settings}).eval()
x = torch.rand(4, {IN_CHANS}, *{small.image_size})
compiled = torch.compile(model, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(x), model(x))
print("same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: create_model("capsnett"), r"no model 'capsnett': did you mean capsnet.*\? list_models"),
        (lambda: create_model("zzz"), "no model 'zzz': there are capsnet, .*, su_cnn; list_models"),
        (lambda: create_model(None), r"a model's name is a string, not None: list_models\(\) names them all"),
        (lambda: create_model("su_cnn", pretrained=True), "no pretrained weights for 'su_cnn': .* some: none yet"),
        (lambda: list_models(None), "filter must be a pattern such as 'caps\\*', .* not None"),
    ],
)
def test_a_name_or_weights_that_are_not_there_are_a_clear_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_names_are_listed_by_pattern_and_in_order() -> None:
    assert list_models("su_*") == ["su_capsnet", "su_cnn"]
    assert list_models("nothing*") == []
    assert list_models() == sorted(list_models())
