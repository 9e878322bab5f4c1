"""Margin, spread and reconstruction loss: their formulas, every form of target, and mistakes answered at the door."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchcaps.losses import (
    MarginLoss,
    ReconstructionLoss,
    SpreadLoss,
    linear_margin,
    margin_loss,
    reconstruction_loss,
    sigmoid_margin,
    spread_loss,
)

LABELS = torch.tensor([0, 2, 1, 2, 0])
SCORES = torch.tensor(
    [[0.50, 0.00, 0.00], [0.30, 0.95, 0.20], [0.05, 0.92, 0.08], [0.10, 0.90, 0.00], [1.00, 1.00, 1.00]],
    dtype=torch.float64,
)


def scores_and_presence(N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(N, K, generator=random, dtype=torch.float64)
    return scores, torch.rand(N, K, generator=random) < 0.4


# ---------------------------------------------------------------------------------------------------------------------
# Margin


@given(
    N=st.integers(1, 4),
    K=st.integers(1, 5),
    seed=st.integers(0, 99),
    power=st.sampled_from([1, 2, 3]),
    over_classes=st.sampled_from(["sum", "mean"]),
    weights=st.sampled_from([(1.0, 0.5), (0.5, 0.25), (2.0, 3.0)]),
    margins=st.sampled_from([(0.9, 0.1), (0.7, 0.4)]),
)
def test_margin_loss_is_the_papers_sum_over_the_classes(
    N: int,
    K: int,
    seed: int,
    power: int,
    over_classes: Any,
    weights: tuple[float, float],
    margins: tuple[float, float],
) -> None:
    scores, present = scores_and_presence(N, K, seed)
    settings: dict[str, Any] = {
        "positive": margins[0],
        "negative": margins[1],
        "power": power,
        "over_classes": over_classes,
    }
    settings |= {"positive_weight": weights[0], "negative_weight": weights[1]}
    loss = margin_loss(scores, present, reduction="none", **settings)
    expected = oracles.margin_loss(scores.numpy(), present.tolist(), **settings)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_a_half_sure_right_class_costs_sixteen_hundredths() -> None:
    scores = torch.tensor([[0.5, 0.0, 0.0]], dtype=torch.float64)
    assert margin_loss(scores, torch.tensor([0])).item() == pytest.approx(0.16)
    assert MarginLoss.labml()(scores, torch.tensor([0])).item() == pytest.approx(0.40)


def test_what_other_sources_use_has_a_name() -> None:
    paper = MarginLoss.paper()(SCORES, LABELS)
    torch.testing.assert_close(paper, margin_loss(SCORES, LABELS))
    torch.testing.assert_close(MarginLoss.sabour_code()(SCORES, LABELS), paper / (2 * 3))
    su = margin_loss(SCORES, LABELS, negative_weight=0.25, reduction="sum") / SCORES.numel()
    torch.testing.assert_close(MarginLoss.su()(SCORES, LABELS), su)
    torch.testing.assert_close(MarginLoss.labml()(SCORES, LABELS), margin_loss(SCORES, LABELS, power=1))


def test_defaults_of_the_loss_are_the_papers() -> None:
    torch.testing.assert_close(MarginLoss()(SCORES, LABELS), MarginLoss.paper()(SCORES, LABELS), rtol=0, atol=0)
    by_hand = sum(oracles.margin_loss(SCORES.numpy(), nn.functional.one_hot(LABELS, 3).tolist())) / len(SCORES)
    assert margin_loss(SCORES, LABELS).item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
)
def test_presence_of_any_dtype_says_the_same_as_class_indices(dtype: torch.dtype) -> None:
    one_hot = nn.functional.one_hot(LABELS, 3).to(dtype)
    torch.testing.assert_close(margin_loss(SCORES, one_hot), margin_loss(SCORES, LABELS), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_class_indices_may_be_any_whole_numbers(dtype: torch.dtype) -> None:
    torch.testing.assert_close(margin_loss(SCORES, LABELS.to(dtype)), margin_loss(SCORES, LABELS), rtol=0, atol=0)
    torch.testing.assert_close(spread_loss(SCORES, LABELS.to(dtype)), spread_loss(SCORES, LABELS), rtol=0, atol=0)


def test_an_example_that_shows_no_class_wants_all_scores_low() -> None:
    nothing = torch.zeros(2, 3)
    scores = torch.tensor([[0.1, 0.05, 0.0], [0.3, 0.0, 0.0]], requires_grad=True)
    loss = margin_loss(scores, nothing, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.5 * 0.2**2]))
    loss.sum().backward()
    assert scores.grad is not None
    assert (scores.grad >= 0).all()
    assert scores.grad[1, 0] > 0


def test_a_target_between_absent_and_present_weighs_both_terms() -> None:
    present, absent = torch.ones(5, 3), torch.zeros(5, 3)
    mixed = margin_loss(SCORES, torch.full((5, 3), 0.25))
    expected = 0.25 * margin_loss(SCORES, present) + 0.75 * margin_loss(SCORES, absent)
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("loss", [margin_loss, spread_loss], ids=["margin", "spread"])
def test_reduction_goes_over_the_batch(loss: Callable[..., Tensor]) -> None:
    each = loss(SCORES, LABELS, reduction="none")
    assert each.shape == (5,)
    alone = torch.stack([loss(SCORES[n : n + 1], LABELS[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(each, alone)
    torch.testing.assert_close(loss(SCORES, LABELS), each.mean())
    torch.testing.assert_close(loss(SCORES, LABELS, reduction="sum"), each.sum())


@pytest.mark.parametrize("power", [1, 1.5, 2, 3])
def test_gradients_are_finite_where_the_hinges_begin(power: float) -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0, 1.0]], requires_grad=True)
    margin_loss(scores, torch.tensor([[1, 0, 1, 0]]), power=power).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert scores.grad[0, 2] < 0 < scores.grad[0, 3]


def test_gradients_are_those_of_finite_differences() -> None:
    scores = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0])
    assert torch.autograd.gradcheck(lambda s: margin_loss(s, labels, power=3, reduction="none"), scores)
    assert torch.autograd.gradcheck(lambda s: spread_loss(s, labels, margin=0.3, reduction="none"), scores)
    images = torch.rand(2, 2, 3, 3, dtype=torch.float64)
    drawn = torch.rand(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: reconstruction_loss(r, images, reduction="none"), drawn)


# ---------------------------------------------------------------------------------------------------------------------
# Spread


@given(N=st.integers(1, 4), K=st.integers(1, 5), seed=st.integers(0, 99), margin=st.sampled_from([0.2, 0.41, 0.9]))
def test_spread_loss_is_the_papers_sum_over_the_wrong_classes(N: int, K: int, seed: int, margin: float) -> None:
    activations, _ = scores_and_presence(N, K, seed)
    target = torch.arange(N) % K
    expected = torch.tensor(oracles.spread_loss(activations.numpy(), target.tolist(), margin), dtype=torch.float64)
    loss = spread_loss(activations, target, margin=margin, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-15)
    tensor_margin = torch.tensor(margin, dtype=torch.float64)
    torch.testing.assert_close(spread_loss(activations, target, margin=tensor_margin), expected.mean())


def test_spread_loss_is_zero_once_the_right_class_leads_by_the_margin() -> None:
    activations = torch.tensor([[0.9, 0.25, 0.5], [0.9, 0.25, 0.6]])
    loss = spread_loss(activations, torch.tensor([0, 0]), margin=0.4, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.01]))


@pytest.mark.parametrize("margin", [torch.tensor([0.4]), torch.tensor([[[0.4]]]), np.float32(0.4), np.float64(0.4)])
def test_a_margin_of_one_number_may_have_any_form(margin: Any) -> None:
    loss = spread_loss(SCORES.float(), LABELS, margin=margin, reduction="none")
    torch.testing.assert_close(loss, spread_loss(SCORES.float(), LABELS, margin=0.4, reduction="none"))


@pytest.mark.parametrize("margin", [torch.full((3,), 0.4), torch.ones(0), torch.ones(5, 1), [0.4], np.ones(3), "0.4"])
def test_a_margin_of_several_numbers_is_one_clear_error(margin: Any) -> None:
    for call in (lambda: spread_loss(SCORES, LABELS, margin=margin), lambda: SpreadLoss(margin)):
        with pytest.raises(ValueError, match="margin must be a number or a tensor of one number, not"):
            call()


def test_a_single_class_that_is_nan_makes_the_spread_loss_nan() -> None:
    scores = torch.tensor([[0.5], [torch.nan], [torch.inf]])
    loss = spread_loss(scores, torch.zeros(3, dtype=torch.long), reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


def test_with_a_single_class_there_is_nothing_to_spread() -> None:
    activations = torch.rand(3, 1, requires_grad=True)
    loss = spread_loss(activations, torch.zeros(3, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert activations.grad is not None
    assert not activations.grad.any()


def test_the_margin_grows_in_a_line_and_stays_at_its_end() -> None:
    margins = [linear_margin(step, steps=100).item() for step in (0, 50, 100, 1000)]
    assert margins == pytest.approx([0.2, 0.55, 0.9, 0.9])
    assert linear_margin(25, steps=100, start=0.0, end=1.0).item() == pytest.approx(0.25)


def test_the_margin_grows_along_the_sigmoid_of_the_authors_code() -> None:
    for step in (0, 50_000, 200_000, 10_000_000):
        expected = 0.2 + 0.79 / (1 + math.exp(-min(10.0, step / 50_000 - 4)))
        assert sigmoid_margin(step).item() == pytest.approx(expected, rel=1e-6)


def test_the_module_takes_the_next_margin_only_when_stepped() -> None:
    loss = SpreadLoss.linear(steps=10)
    for steps in range(12):
        expected = spread_loss(SCORES, LABELS, margin=0.2 + 0.07 * min(steps, 10))
        torch.testing.assert_close(loss(SCORES, LABELS), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(loss(SCORES, LABELS), expected, rtol=1e-6, atol=0)
        loss.step()


@pytest.mark.parametrize("make", [lambda: SpreadLoss.linear(steps=10), SpreadLoss.sigmoid], ids=["linear", "sigmoid"])
def test_the_state_of_the_margin_is_saved_and_loaded(make: Callable[[], SpreadLoss]) -> None:
    loss = make()
    for _ in range(7):
        loss.step()
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = make()
    assert other.current_margin() != loss.current_margin()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.current_margin() == loss.current_margin()
    assert pickle.loads(pickle.dumps(loss)).current_margin() == loss.current_margin()
    assert copy.deepcopy(loss).half().current_margin() == loss.current_margin()


def test_a_margin_of_ones_own_is_a_number_or_a_function_of_the_steps() -> None:
    torch.testing.assert_close(SpreadLoss(0.3)(SCORES, LABELS), spread_loss(SCORES, LABELS, margin=0.3))
    loss = SpreadLoss(lambda step: 0.1 * step)
    loss.step()
    loss.step()
    torch.testing.assert_close(loss(SCORES, LABELS), spread_loss(SCORES, LABELS, margin=0.2), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Reconstruction


def test_for_the_papers_images_it_is_the_sum_of_squared_errors() -> None:
    drawn, image = torch.rand(2, 3, 1, 28, 28, dtype=torch.float64)
    squares = (drawn - image).square().flatten(1).sum(1)
    torch.testing.assert_close(reconstruction_loss(drawn, image, reduction="none"), squares)
    torch.testing.assert_close(reconstruction_loss(drawn, image), squares.mean())
    torch.testing.assert_close(reconstruction_loss(drawn, image, reduction="sum"), squares.sum())


def test_its_weight_means_the_same_for_images_of_every_size_and_number_of_channels() -> None:
    drawn, image = torch.rand(2, 4, 1, 5, 7, dtype=torch.float64)
    loss = ReconstructionLoss()(drawn, image)
    torch.testing.assert_close(loss, 0.392 * nn.functional.mse_loss(drawn, image))
    larger = [t.repeat_interleave(3, 2).repeat_interleave(2, 3).repeat(1, 3, 1, 1) for t in (drawn, image)]
    torch.testing.assert_close(ReconstructionLoss()(*larger), loss)
    torch.testing.assert_close(ReconstructionLoss(weight=0.001)(*larger), 2 * loss)


# ---------------------------------------------------------------------------------------------------------------------
# All


LOSSES = {
    "margin": lambda scores: margin_loss(scores, LABELS, reduction="none"),
    "spread": lambda scores: spread_loss(scores, LABELS, reduction="none"),
    "reconstruction": lambda scores: reconstruction_loss(scores, scores.new_full((5, 3), 0.25), reduction="none"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_low_precision_is_calculated_in_float32(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    low = SCORES.to(dtype).requires_grad_()
    result = loss(low)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, loss(low.detach().float()), rtol=0, atol=0)
    result.sum().backward()
    assert low.grad is not None
    assert low.grad.dtype == dtype
    assert loss(SCORES).dtype == torch.float64


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_score_that_is_nan_is_seen_in_its_examples_loss_alone(loss: Callable[[Tensor], Tensor]) -> None:
    for k in range(3):
        scores = SCORES.clone()
        scores[1, k] = torch.nan
        assert loss(scores).isnan().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    "loss", [MarginLoss(), SpreadLoss.linear(steps=10), SpreadLoss.sigmoid()], ids=["margin", "linear", "sigmoid"]
)
def test_a_compiled_loss_is_one_graph(loss: nn.Module) -> None:
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(SCORES, LABELS), loss(SCORES, LABELS))


@pytest.mark.parametrize("loss", [margin_loss, spread_loss], ids=["margin", "spread"])
def test_labels_are_not_looked_at_where_that_would_wait_for_a_device(loss: Callable[..., Tensor]) -> None:
    # a tensor on "meta" has no values: looking at one is an error
    assert loss(SCORES.to("meta"), LABELS.to("meta")).device.type == "meta"


PER_SAMPLE: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "margin": (margin_loss, LABELS),
    "margin of presence": (margin_loss, nn.functional.one_hot(LABELS, 3)),
    "spread": (spread_loss, LABELS),
    "reconstruction": (reconstruction_loss, SCORES.flip(1)),
}


@pytest.mark.parametrize(("loss", "target"), PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_per_sample_gradients_are_those_of_each_example_alone(loss: Callable[..., Tensor], target: Tensor) -> None:
    def of_one(scores: Tensor, target: Tensor) -> Tensor:
        return loss(scores[None], target[None])

    together = torch.func.vmap(torch.func.grad(of_one))(SCORES, target)
    for got, scores, right in zip(together, SCORES, target, strict=True):
        alone = scores.clone().requires_grad_()
        of_one(alone, right).backward()
        torch.testing.assert_close(got, alone.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss", [margin_loss, spread_loss], ids=["margin", "spread"])
def test_a_batch_of_none_has_no_losses(loss: Callable[..., Tensor]) -> None:
    nothing = SCORES[:0], LABELS[:0]
    assert loss(*nothing, reduction="none").shape == (0,)
    assert loss(*nothing, reduction="sum").item() == 0


@pytest.mark.parametrize("loss", [margin_loss, spread_loss], ids=["margin", "spread"])
@pytest.mark.parametrize(
    ("scores", "target", "message"),
    [
        (torch.rand(3), torch.tensor([0]), r"scores must be floating point \[N, classes\], not \[3\]"),
        (torch.rand(2, 3, 1), torch.tensor([0, 1]), r"\[N, classes\], not \[2, 3, 1\]"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([0, 1]), "not .* of torch.int64"),
        (torch.rand(2, 0), torch.tensor([0, 1]), r"not \[2, 0\]"),
        (torch.rand(2, 3), torch.tensor([0]), r"target \[1\] does not fit scores \[2, 3\]"),
        (torch.rand(2, 3), torch.tensor([0.0, 1.0]), "must be whole numbers"),
        (torch.rand(2, 3), torch.tensor([False, True]), "must be whole numbers"),
        (torch.rand(2, 3), torch.tensor([0, 3]), "target holds 0 to 3, but may hold 0 to 2, for scores of 3 classes"),
        (torch.rand(2, 3), torch.tensor([-1, 0]), "target holds -1 to 0"),
    ],
)
def test_a_target_that_does_not_fit_is_one_clear_error(
    loss: Callable[..., Tensor], scores: Tensor, target: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loss(scores, target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(2, 1), r"target \[2, 1\] does not fit scores \[2, 3\]"),
        (torch.zeros(2, 3, 1), "does not fit"),
        (torch.tensor([[0, 1, 2], [0, 0, 0]]), "target holds 0 to 2, but may hold 0 to 1, for presence"),
        (torch.full((2, 3), torch.nan), "target holds nan"),
        (torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
    ],
)
def test_presence_that_does_not_fit_is_one_clear_error(target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        margin_loss(torch.rand(2, 3), target)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("loss", [margin_loss, spread_loss], ids=["margin", "spread"])
def test_unsigned_labels_of_any_size_are_labels(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.testing.assert_close(loss(SCORES, LABELS.to(dtype)), loss(SCORES, LABELS), rtol=0, atol=0)
    with pytest.raises(ValueError, match="target holds 3 to 3"):
        loss(SCORES, torch.full((5,), 3).to(dtype))


@pytest.mark.parametrize("loss", [margin_loss, spread_loss, reconstruction_loss])
@pytest.mark.parametrize("turn", [Tensor.tolist, Tensor.numpy], ids=["list", "numpy"])
def test_what_is_no_tensor_is_told_how_to_become_one(loss: Callable[..., Tensor], turn: Callable[..., Any]) -> None:
    second = SCORES if loss is reconstruction_loss else LABELS
    for arguments in ((turn(SCORES), second), (SCORES, turn(second))):
        with pytest.raises(ValueError, match=r"must be a tensor, not (list|ndarray): give torch\.as_tensor\("):
            loss(*arguments)


def test_the_spread_loss_points_several_labels_to_the_margin_loss() -> None:
    with pytest.raises(ValueError, match=r"class indices \[N\], not \[2, 3\]; .* use margin_loss"):
        spread_loss(torch.rand(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        (((2, 784), (2, 1, 28, 28)), torch.float32, r"\[2, 784\] and image \[2, 1, 28, 28\] must have one shape"),
        (((2, 1, 4, 4), (2, 3, 4, 4)), torch.float32, "must have one shape"),
        (((1, 1, 4, 4), (2, 1, 4, 4)), torch.float32, "must have one shape"),
        (((5,), (5,)), torch.float32, "must have one shape"),
        (((2, 1, 4, 4), (2, 1, 4, 4)), torch.uint8, "must be floating point, not torch.uint8: for bytes"),
    ],
)
def test_an_image_that_does_not_fit_its_reconstruction_is_one_clear_error(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reconstruction_loss(torch.ones(shapes[0]), torch.ones(shapes[1], dtype=dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda: MarginLoss(power=0.5),
        lambda: MarginLoss(reduction="average"),
        lambda: MarginLoss(over_classes="none"),
        lambda: SpreadLoss(reduction="average"),
        lambda: SpreadLoss.linear(steps=0),
        lambda: ReconstructionLoss(reduction="average"),
        lambda: margin_loss(SCORES, LABELS, power=0),
        lambda: margin_loss(SCORES, LABELS, over_classes="max"),
        lambda: spread_loss(SCORES, LABELS, reduction="max"),
        lambda: reconstruction_loss(SCORES, SCORES, reduction="max"),
    ],
)
def test_a_setting_that_is_none_of_the_choices_is_an_error_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"take one of|must be 1 or more|above 0"):
        make()


@pytest.mark.parametrize(
    ("module", "function", "settings"),
    [
        (MarginLoss, margin_loss, {"positive": 0.8, "negative": 0.2, "positive_weight": 2.0}),
        (MarginLoss, margin_loss, {"negative_weight": 0.7, "power": 3, "over_classes": "mean", "reduction": "sum"}),
        (SpreadLoss, spread_loss, {"margin": 0.4, "reduction": "none"}),
    ],
)
def test_a_module_is_its_function_with_settings(
    module: Callable[..., nn.Module], function: Callable[..., Tensor], settings: dict[str, Any]
) -> None:
    loss = module(**settings)
    torch.testing.assert_close(loss(SCORES, LABELS), function(SCORES, LABELS, **settings), rtol=0, atol=0)
    assert all(f"{name}={value!r}" in repr(loss) for name, value in settings.items())
