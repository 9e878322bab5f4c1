"""Losses for capsules: margin, spread and reconstruction; a function each, and a Module that holds its settings.

Sabour, Frosst, Hinton 2017, eq. 4, the margin loss of scores p_k (lengths), with T_k = 1 where class k is present:

    L = sum_k  T_k max(0, 0.9 - p_k)^2 + 0.5 (1 - T_k) max(0, p_k - 0.1)^2

Every number in it is an argument. What other sources use is a classmethod of `MarginLoss`:

    paper         sum over classes, weights 1 and 0.5
    sabour_code   mean over classes, weights 0.5 and 0.25       the code of that paper: 1/(2K) of its text
    su            mean over classes, weights 1 and 0.25         Su 2018
    labml         sum over classes, weights 1 and 0.5, power 1  labml.ai: a hinge, not squared

Hinton, Sabour, Frosst 2018, eq. 3, the spread loss of activations a_k for the one class t, with a margin m that grows:

    L = sum_{k != t} max(0, m - (a_t - a_k))^2

Sabour, Frosst, Hinton 2017, section 4.1, the reconstruction loss of an image x of any size:

    L = 784 mean (r - x)^2                                      for 28x28 numbers the sum of squared errors

All take low precision, calculate in float32 and return that; a score that is NaN makes the loss NaN. Labels outside
their range are a ValueError on the CPU alone, and not under transforms of `torch.func` (`torchcaps.types.readable`).
"""

import functools
import numbers
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.types import value_range

__all__ = [
    "MarginLoss", "ReconstructionLoss", "SpreadLoss",
    "linear_margin", "margin_loss", "reconstruction_loss", "sigmoid_margin", "spread_loss",
]  # fmt: skip

Reduction = Literal["mean", "sum", "none"]
OverClasses = Literal["sum", "mean"]

PAPER_PIXELS = 28 * 28
"""Numbers in the images for which Sabour et al. chose their weight of the reconstruction, 0.0005."""


def margin_loss(
    scores: Tensor,
    target: Tensor,
    *,
    positive: float = 0.9,
    negative: float = 0.1,
    positive_weight: float = 1.0,
    negative_weight: float = 0.5,
    power: float = 2,
    over_classes: OverClasses = "sum",
    reduction: Reduction = "mean",
) -> Tensor:
    """Push the scores of present classes above `positive` and those of absent ones below `negative`.

    scores            `[N, K]`: lengths, or activations, one per class; not softmaxed.
    target            class indices `[N]`, or presence `[N, K]`, 0 and 1 of any dtype: several classes, one, or none.
                      What lies between 0 and 1 weighs both terms.
    positive_weight, negative_weight  of the terms of present and of absent classes.
    power             of the hinge, 1 or more.
    over_classes      "sum" (paper), or "mean" (a K-th of that).
    reduction         over the batch: "mean", "sum", or "none" for each example's loss `[N]`.

    Raises ValueError where shapes, dtypes or settings do not fit, and on the CPU for labels out of range.
    Source: Sabour et al. 2017, eq. 4.

    >>> margin_loss(torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([0]))
    tensor(0.1600)
    """
    _check_margin(power, over_classes, reduction)
    present = _presence(scores, target)
    p = _wide(scores)
    too_low, too_high = (positive - p).relu().pow(power), (p - negative).relu().pow(power)
    loss = positive_weight * present * too_low + negative_weight * (1 - present) * too_high
    return _reduce(loss.sum(1) if over_classes == "sum" else loss.mean(1), reduction)


class MarginLoss(nn.Module):
    """`margin_loss` with its settings; `paper`, `sabour_code`, `su` and `labml` are what those sources use.

    >>> MarginLoss.sabour_code()(torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([0]))  # 1/(2 * 3) of 0.16
    tensor(0.0267)
    """

    def __init__(
        self,
        *,
        positive: float = 0.9,
        negative: float = 0.1,
        positive_weight: float = 1.0,
        negative_weight: float = 0.5,
        power: float = 2,
        over_classes: OverClasses = "sum",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        _check_margin(power, over_classes, reduction)
        self.positive, self.negative = positive, negative
        self.positive_weight, self.negative_weight = positive_weight, negative_weight
        self.power: float = power
        self.over_classes: OverClasses = over_classes
        self.reduction: Reduction = reduction

    @classmethod
    def paper(cls, reduction: Reduction = "mean") -> "MarginLoss":
        """Sabour, Frosst, Hinton 2017, as the paper has it."""
        return cls(reduction=reduction)

    @classmethod
    def sabour_code(cls, reduction: Reduction = "mean") -> "MarginLoss":
        """The code of that paper. Its reconstruction, at the same 0.0005, weighs 2K times as much as in the text."""
        return cls(positive_weight=0.5, negative_weight=0.25, over_classes="mean", reduction=reduction)

    @classmethod
    def su(cls, reduction: Reduction = "mean") -> "MarginLoss":
        """Su 2018: mean over classes, absent classes at 0.25."""
        return cls(negative_weight=0.25, over_classes="mean", reduction=reduction)

    @classmethod
    def labml(cls, reduction: Reduction = "mean") -> "MarginLoss":
        """The hinge without its square, as labml.ai and others wrote it."""
        return cls(power=1, reduction=reduction)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        """See `margin_loss`."""
        return margin_loss(
            scores,
            target,
            positive=self.positive,
            negative=self.negative,
            positive_weight=self.positive_weight,
            negative_weight=self.negative_weight,
            power=self.power,
            over_classes=self.over_classes,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return (
            f"positive={self.positive}, negative={self.negative}, positive_weight={self.positive_weight}, "
            f"negative_weight={self.negative_weight}, power={self.power}, over_classes={self.over_classes!r}, "
            f"reduction={self.reduction!r}"
        )


def spread_loss(
    activations: Tensor, target: Tensor, *, margin: float | Tensor = 0.9, reduction: Reduction = "mean"
) -> Tensor:
    """Push the activation of the one right class above each other by `margin`.

    activations  `[N, K]`; with K = 1 there is no other class and the loss is 0.
    target       class indices `[N]`: one class each. For several, or none, there is `margin_loss`.
    margin       m of the equation, a number or a tensor of one number.
    reduction    over the batch: "mean", "sum", or "none" for each example's loss `[N]`.

    Raises ValueError where shapes, dtypes or settings do not fit, and on the CPU for labels out of range.
    Source: Hinton et al. 2018, eq. 3. Code that lets k = t take part adds margin^2 to it, a constant.

    >>> spread_loss(torch.tensor([[0.5, 0.0, 0.4]]), torch.tensor([0]), margin=0.2)
    tensor(0.0100)
    """
    _check("reduction", reduction, ("mean", "sum", "none"))
    if isinstance(target, Tensor) and target.dim() != 1:
        raise ValueError(
            f"the spread loss compares one right class to all others: target must be class indices [N], "
            f"not {list(target.shape)}; for several classes at once use margin_loss"
        )
    _check_target(activations, target)
    a, t = _wide(activations), target.long()[:, None]
    right = a.gather(1, t)
    too_close = (_one_number(margin) - (right - a)).relu().square()
    own = torch.zeros_like(right).masked_fill(right.isnan(), torch.nan)
    return _reduce(too_close.scatter(1, t, own).sum(1), reduction)


def _one_number(margin: object) -> float | Tensor:
    if isinstance(margin, Tensor):
        if margin.numel() != 1:
            raise ValueError(f"margin must be a number or a tensor of one number, not {list(margin.shape)}")
        return margin.reshape(())
    if not isinstance(margin, numbers.Real):
        raise ValueError(f"margin must be a number or a tensor of one number, not {margin!r}")
    return float(margin)


def linear_margin(step: Tensor | float, steps: float, start: float = 0.2, end: float = 0.9) -> Tensor:
    """The margin after `step` steps, from `start` to `end` in a line over `steps` steps, then `end`.

    Source: Hinton et al. 2018, which does not say over how many.

    >>> linear_margin(500, steps=1000)
    tensor(0.5500)
    """
    if not steps > 0:
        raise ValueError(f"steps={steps}: the margin needs a number of steps above 0 to grow over")
    return start + (end - start) * (torch.as_tensor(step) / steps).clamp(0, 1)


def sigmoid_margin(step: Tensor | float) -> Tensor:
    """The margin after `step` steps, 0.2 + 0.79 sigmoid(min(10, step / 50,000 - 4)), as the authors' code has it.

    >>> sigmoid_margin(200_000)
    tensor(0.5950)
    """
    return 0.2 + 0.79 * (torch.as_tensor(step) / 50_000 - 4).clamp(max=10).sigmoid()


class SpreadLoss(nn.Module):
    """`spread_loss` with its margin: a number, or a function from the number of steps taken to the margin.

    A margin that grows does so when `step()` is called, once after each step of the optimiser. `steps_taken`, the count
    of those calls, is a buffer: it is saved and loaded with `state_dict`. A function of your own gets that buffer, a
    tensor of one whole number; written in tensor operations it does not wait for the device.

    >>> loss = SpreadLoss.linear(steps=1000)
    >>> loss.step()
    >>> loss.current_margin()
    tensor(0.2007)
    """

    steps_taken: Tensor

    def __init__(
        self, margin: float | Callable[[Tensor], float | Tensor] = 0.9, *, reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        _check("reduction", reduction, ("mean", "sum", "none"))
        if not callable(margin):
            _one_number(margin)
        self.margin = margin
        self.reduction: Reduction = reduction
        self.register_buffer("steps_taken", torch.zeros((), dtype=torch.long))

    @classmethod
    def linear(
        cls, steps: float, start: float = 0.2, end: float = 0.9, *, reduction: Reduction = "mean"
    ) -> "SpreadLoss":
        """With `linear_margin`: the paper's, over `steps` calls of `step()`."""
        margin = functools.partial(linear_margin, steps=steps, start=start, end=end)
        margin(0)  # a wrong number of steps is found now, not at the first batch
        return cls(margin, reduction=reduction)

    @classmethod
    def sigmoid(cls, *, reduction: Reduction = "mean") -> "SpreadLoss":
        """With `sigmoid_margin`: the authors' code's."""
        return cls(sigmoid_margin, reduction=reduction)

    def step(self) -> None:
        """One step of the optimiser has been taken."""
        self.steps_taken += 1

    def current_margin(self) -> float | Tensor:
        """The margin of the next call."""
        return self.margin(self.steps_taken) if callable(self.margin) else self.margin

    def forward(self, activations: Tensor, target: Tensor) -> Tensor:
        """See `spread_loss`."""
        return spread_loss(activations, target, margin=self.current_margin(), reduction=self.reduction)

    def extra_repr(self) -> str:
        return f"margin={self.margin}, reduction={self.reduction!r}"


def reconstruction_loss(reconstruction: Tensor, image: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """784 times the mean squared error over all numbers of an image.

    For the paper's 28x28 images of one channel that is its sum of squared errors. For every other size and number of
    channels it is what the same error per pixel would be there, so that one weight means the same everywhere: the
    paper's 0.0005 is 0.392 times the mean squared error.

    reconstruction, image  of one shape, `[N, ...]`; both in the range that the decoder can reach, 0..1 after a sigmoid.
    reduction              over the batch: "mean", "sum", or "none" for each example's loss `[N]`.

    Raises ValueError where shapes, dtypes or settings do not fit. Source: Sabour et al. 2017, section 4.1.

    >>> reconstruction_loss(torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5))
    tensor(196.)
    """
    _check("reduction", reduction, ("mean", "sum", "none"))
    _check_tensor(
        "reconstruction", reconstruction, "" if reconstruction is not None else ": build the model with decoder=True"
    )
    _check_tensor("image", image)
    if reconstruction.shape != image.shape or image.dim() < 2 or 0 in image.shape[1:]:
        raise ValueError(
            f"reconstruction {list(reconstruction.shape)} and image {list(image.shape)} must have one shape, "
            "[N, channels, height, width] or any other [N, ...]"
        )
    for name, tensor in (("reconstruction", reconstruction), ("image", image)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {tensor.dtype}: for bytes give image / 255")
    squares = (_wide(reconstruction) - _wide(image)).square()
    return _reduce(PAPER_PIXELS * squares.flatten(1).mean(1), reduction)


class ReconstructionLoss(nn.Module):
    """`weight` times `reconstruction_loss`; the default is the paper's weight, whatever the size of the images.

    >>> ReconstructionLoss()(torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5))
    tensor(0.0980)
    """

    def __init__(self, weight: float = 0.0005, *, reduction: Reduction = "mean") -> None:
        super().__init__()
        _check("reduction", reduction, ("mean", "sum", "none"))
        self.weight = weight
        self.reduction: Reduction = reduction

    def forward(self, reconstruction: Tensor, image: Tensor) -> Tensor:
        """See `reconstruction_loss`."""
        return self.weight * reconstruction_loss(reconstruction, image, reduction=self.reduction)

    def extra_repr(self) -> str:
        return f"weight={self.weight}, reduction={self.reduction!r}"


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _presence(scores: Tensor, target: Tensor) -> Tensor:
    """T of the equation, `[N, K]`, out of either form of target."""
    _check_target(scores, target)
    if target.dim() == 2:
        return target.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.zeros_like(_wide(scores)).scatter(1, target.long()[:, None], 1.0)


def _check_tensor(name: str, value: object, hint: str = "") -> None:
    if not isinstance(value, Tensor):
        way_out = hint or f": give torch.as_tensor({name})"
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}{way_out}")


def _check_target(scores: Tensor, target: Tensor) -> None:
    capsules = hasattr(scores, "lengths")
    hint = ": of capsules give .lengths, or .activations where the rule has them" if capsules else ""
    _check_tensor("scores", scores, hint)
    _check_tensor("target", target)
    if scores.dim() != 2 or scores.shape[1] == 0 or not scores.is_floating_point():
        raise ValueError(f"scores must be floating point [N, classes], not {list(scores.shape)} of {scores.dtype}")
    N, K = scores.shape
    if tuple(target.shape) not in ((N,), (N, K)):
        raise ValueError(
            f"target {list(target.shape)} does not fit scores {list(scores.shape)}: "
            f"give class indices [{N}] or presence [{N}, {K}]"
        )
    indices = target.dim() == 1
    if target.is_complex() or (indices and (target.is_floating_point() or target.dtype == torch.bool)):
        raise ValueError(
            f"target {list(target.shape)} of {target.dtype}: class indices must be whole numbers (torch.long); "
            f"presence, of any dtype, has the shape [{N}, {K}]"
        )
    values = value_range(target)
    if values is not None and not (values[0] >= 0 and values[1] <= (K - 1 if indices else 1)):
        allowed = f"0 to {K - 1}, for scores of {K} classes" if indices else "0 to 1, for presence"
        raise ValueError(f"target holds {values[0]} to {values[1]}, but may hold {allowed}")


def _check_margin(power: float, over_classes: str, reduction: str) -> None:
    if not power >= 1:
        raise ValueError(f"power={power} must be 1 or more: below, the gradient is infinite where the hinge begins")
    _check("over_classes", over_classes, ("sum", "mean"))
    _check("reduction", reduction, ("mean", "sum", "none"))


def _check(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: take one of {', '.join(map(repr, choices))}")
