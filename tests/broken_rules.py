"""Rules that break one promise each, and the promise that they break. `Sound`, which they all derive from, keeps all.

Each of them is a mistake that somebody made in published code, or that is easily made. They are there to be rejected.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.squash import squash
from torchcaps.types import Routed

__all__ = ["BROKEN", "Sound"]


@dataclass(frozen=True)
class Sound:
    """Dynamic routing with weighed children and a learned prior. It is no `Rule`, to show that none is needed."""

    iterations: int = 3

    sums_to: ClassVar[str | None] = "parents"
    needs_activations: ClassVar[bool] = True

    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        return {"prior": torch.zeros(I, J)}

    def __call__(
        self,
        poses: Tensor,
        weight: Tensor,
        activations: Tensor | None = None,
        *,
        prior: Tensor,
        vote_offset: Tensor | None = None,
        mask: Tensor | None = None,
        start: Tensor | None = None,
        child_ids: Tensor | None = None,
        backend: str = "auto",
        return_coupling: Any = False,
    ) -> Routed:
        self.check(activations, child_ids, backend)
        assert activations is not None
        dtype, inside = torch.promote_types(poses.dtype, weight.dtype), self.inside(poses.dtype, weight.dtype)
        poses, weight, prior, activations = (x.to(inside) for x in (poses, weight, prior, activations))
        if mask is None:
            mask = torch.ones_like(activations, dtype=torch.bool)
        poses, activations = self.hide(poses, mask, 2), self.hide(activations, mask, 0)
        u = self.hide(self.votes(poses, weight, vote_offset), mask, 3)
        state, rounds = None if start is None else start.to(inside), []
        for t in range(self.iterations):
            c = self.couple(self.logits(u, state, prior, t), mask)
            rounds.append(c)
            v = self.squash(torch.einsum("nij,ni,nijrq->njrq", c, activations, u))
            state = self.update(state, v)
        coupling = torch.stack(rounds) if return_coupling == "all" else rounds[-1] if return_coupling else None
        return Routed(v.to(dtype), None, None if coupling is None else coupling.to(dtype), state.to(dtype))

    def check(self, activations: Tensor | None, child_ids: Tensor | None, backend: str) -> None:
        if activations is None or child_ids is not None or self.iterations < 1 or backend not in ("auto", "reference"):
            raise ValueError("activations are needed, windows are not to be had, and a round is the least")

    def inside(self, poses: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.promote_types(torch.promote_types(poses, weight), torch.float32)

    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return x.masked_fill(~mask[(...,) + (None,) * further_axes], 0.0)

    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        u = torch.einsum("nirp,ijpq->nijrq", poses, weight.expand(poses.shape[1], -1, -1, -1))
        return u if offset is None else u + offset.to(u.dtype)

    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        agreement = u.new_zeros(u.shape[:3]) if state is None else torch.einsum("nijrq,njrq->nij", u, state)
        return agreement + prior

    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return self.hide(b.softmax(2), mask, 1)

    def squash(self, s: Tensor) -> Tensor:
        return squash(s)

    def update(self, state: Tensor | None, v: Tensor) -> Tensor:
        return v if state is None else state + v


# What is shared out ---------------------------------------------------------------------------------------------------


class OverChildren(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return b.masked_fill(~mask[..., None], -1e30).softmax(1) * mask[..., None]


class Sigmoid(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return self.hide(b.sigmoid(), mask, 1)


class Unnormalised(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return self.hide(b, mask, 1)


class MaskedChildrenKeepTheirShare(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return b.softmax(2)


class RandomFirstRound(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        start = torch.linspace(-0.01, 0.01, u.shape[2], dtype=u.dtype)
        return super().logits(u, state, prior, t) + start[u[0, 0, :, 0, 0].argsort()]


class FirstRoundAgreesWithTheMean(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        return super().logits(u, squash(u.mean(1)) if state is None else state, prior, t)


class CouplingOfTheNextRound(Sound):
    def __call__(self, *args: Any, return_coupling: Any = False, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, return_coupling=return_coupling, **kwargs)
        if return_coupling is not True:
            return routed
        after = Sound(iterations=1).__call__(*args, return_coupling=True, **{**kwargs, "start": routed.state})
        return routed._replace(coupling=after.coupling)


class OnlyTheLastCoupling(Sound):
    def __call__(self, *args: Any, return_coupling: Any = False, **kwargs: Any) -> Routed:
        return super().__call__(*args, return_coupling=bool(return_coupling), **kwargs)


# Rounds and state -----------------------------------------------------------------------------------------------------


class AlwaysOneRound(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        return super().logits(u, None, prior, t)


class AtMostTwoRounds(Sound):
    def update(self, state: Tensor | None, v: Tensor) -> Tensor:
        return v if state is None else state


class IgnoresStart(Sound):
    def __call__(self, *args: Any, start: Tensor | None = None, **kwargs: Any) -> Routed:
        return super().__call__(*args, **kwargs)


class StateIsTheLastParent(Sound):
    def __call__(self, *args: Any, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, **kwargs)
        return routed._replace(state=routed.poses)


class CountsRoundsFromZero(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        return super().logits(u, state, prior, t) * (1 + 0.1 * t)


class NoRoundIsAnAnswer(Sound):
    def check(self, activations: Tensor | None, child_ids: Tensor | None, backend: str) -> None:
        if self.iterations < 1:
            object.__setattr__(self, "iterations", 1)
        super().check(activations, child_ids, backend)


class AnyBackend(Sound):
    def check(self, activations: Tensor | None, child_ids: Tensor | None, backend: str) -> None:
        super().check(activations, child_ids, "auto")


# Order and batch ------------------------------------------------------------------------------------------------------


class LaterChildrenCountMore(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        place = torch.linspace(1, 1.1, poses.shape[1], dtype=poses.dtype)
        return super().votes(poses, weight, offset) * place[:, None, None, None]


class FirstParentIsFavoured(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        b = super().logits(u, state, prior, t)
        return b if state is None else b + 0.1 * (torch.arange(b.shape[2]) == 0)


class LogitsOfTheWholeBatch(Sound):
    def logits(self, u: Tensor, state: Tensor | None, prior: Tensor, t: int) -> Tensor:
        b = super().logits(u, state, prior, t)
        return b.mean(0, keepdim=True).expand_as(b)


class ScaledByTheLongestOfTheBatch(Sound):
    def squash(self, s: Tensor) -> Tensor:
        return s / (1 + s.norm(dim=(-2, -1)).max())


# Votes ----------------------------------------------------------------------------------------------------------------


class TransposedWeight(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        square = weight.shape[2] == weight.shape[3]
        return super().votes(poses, weight.mT if square else weight, offset)


class NormalisedPoses(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return super().votes(squash(poses), weight, offset)


class SharedWeightIsAMean(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return super().votes(poses, weight / poses.shape[1] if len(weight) == 1 else weight, offset)


class DropsTheOffset(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return super().votes(poses, weight, None)


class OffsetOfTheFirstExample(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        first = offset if offset is None or offset.dim() == 4 else offset[0]
        return super().votes(poses, weight, first)


class RowsOfAPoseApart(Sound):
    def squash(self, s: Tensor) -> Tensor:
        return squash(s[:, :, 0], dim=-1)[:, :, None]


# Masks and activations ------------------------------------------------------------------------------------------------


class MaskByMultiplication(Sound):
    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return x * mask[(...,) + (None,) * further_axes]


class MaskIgnored(Sound):
    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return x


class MaskAtTheEndAlone(Sound):
    """Values are right; the gradient goes through 0 times NaN."""

    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return x if further_axes == 2 else super().hide(x, mask, further_axes)


class MaskInTheAnswerAlone(Sound):
    """Masked children, whose pose is 0, still vote with their offset."""

    def __call__(self, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, mask=mask, **kwargs)
        if mask is None or routed.coupling is None:
            return routed
        return routed._replace(coupling=routed.coupling.masked_fill(~mask[..., None], 0.0))

    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return (
            torch.where(x.isnan(), 0.5, x)
            if further_axes == 0
            else x
            if further_axes in (1, 3)
            else super().hide(x, mask, 2)
        )


class MeanOverAllChildren(Sound):
    """Divides by the number of children, the masked ones too."""

    def squash(self, s: Tensor) -> Tensor:
        return super().squash(s)

    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return super().votes(poses, weight, offset) / poses.shape[1]


class MeanOfTheMasked(Sound):
    """0 / 0 where nobody takes part."""

    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        there = mask[..., None].to(b.dtype)
        return self.hide(b.softmax(2) * (there.sum(1, keepdim=True) / there.sum(1, keepdim=True)), mask, 1)


class ActivationLeftOut(Sound):
    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return torch.ones_like(x) if further_axes == 0 else super().hide(x, mask, further_axes)


class ActivationCancels(Sound):
    """Shares are normalised once more after activations came in, so that these cancel."""

    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        x = super().hide(x, mask, further_axes)
        return x / (x + 1e-12) if further_axes == 0 else x


class NoActivationIsOne(Sound):
    def __call__(self, poses: Tensor, weight: Tensor, activations: Tensor | None = None, **kwargs: Any) -> Routed:
        return super().__call__(
            poses, weight, poses[..., 0, 0] * 0 + 1 if activations is None else activations, **kwargs
        )


class UnneededActivationsCount(Dynamic):
    def __call__(self, poses: Tensor, weight: Tensor, activations: Tensor | None = None, **kwargs: Any) -> Routed:
        return super().__call__(
            poses if activations is None else poses * activations[:, :, None, None], weight, None, **kwargs
        )


# Gradients ------------------------------------------------------------------------------------------------------------


class DetachedRounds(Sound):
    def update(self, state: Tensor | None, v: Tensor) -> Tensor:
        return super().update(state, v).detach()


class DetachedCoupling(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return super().couple(b, mask).detach()


class NoGradientInTheOffset(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return super().votes(poses, weight, None if offset is None else offset.detach())


class NoGradientInTheActivations(Sound):
    def hide(self, x: Tensor, mask: Tensor, further_axes: int) -> Tensor:
        return super().hide(x.detach() if further_axes == 0 else x, mask, further_axes)


class NothingLearns(Sound):
    detach = "everything"

    def squash(self, s: Tensor) -> Tensor:
        return squash(s.detach())


class _SquashWithAWrongSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        ctx.save_for_backward(s)
        return squash(s)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (s,) = ctx.saved_tensors
        r = s.square().sum((-2, -1), keepdim=True).sqrt()
        return gradient * r / (1 + r * r)  # as if the gain were a constant


class WrongBackward(Sound):
    def squash(self, s: Tensor) -> Tensor:
        return _SquashWithAWrongSlope.apply(s)


class GradientLost(Sound):
    """As one who makes a new tensor of its numbers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, **kwargs)
        return routed if self.iterations > 1 else routed._replace(poses=routed.poses.detach())


# Numbers --------------------------------------------------------------------------------------------------------------


class NanAtZero(Sound):
    def squash(self, s: Tensor) -> Tensor:
        q = s.square().sum((-2, -1), keepdim=True)
        return q / (1 + q) * s / q.sqrt()


class NanInTheGradientAtZero(Sound):
    def squash(self, s: Tensor) -> Tensor:
        q = s.square().sum((-2, -1), keepdim=True)
        return torch.where(q > 0, q / (1 + q) * s / q.sqrt(), 0.0)


class NoMaximumTakenOff(Sound):
    def couple(self, b: Tensor, mask: Tensor) -> Tensor:
        return self.hide(b.exp() / b.exp().sum(2, keepdim=True), mask, 1)


class HalfInside(Sound):
    def inside(self, poses: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.promote_types(poses, weight)


class OverflowsInHalf(Sound):
    def __call__(self, poses: Tensor, *args: Any, **kwargs: Any) -> Routed:
        routed = super().__call__(poses, *args, **kwargs)
        squares = poses.nan_to_num().square().sum((1, 2, 3))
        return routed._replace(poses=routed.poses + 0 * squares[:, None, None, None])


class SingleInside(Sound):
    def inside(self, poses: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.float32


class AnswersInSingle(Sound):
    def __call__(self, *args: Any, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, **kwargs)
        return routed._replace(poses=routed.poses.float())


class DropsOnesAxes(Sound):
    def __call__(self, *args: Any, **kwargs: Any) -> Routed:
        routed = super().__call__(*args, **kwargs)
        return routed._replace(poses=routed.poses.squeeze(0))


class WritesIntoThePoses(Sound):
    def __call__(self, poses: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Routed:
        if mask is not None and not poses.requires_grad:
            poses.masked_fill_(~mask[:, :, None, None], 0.0)
        return super().__call__(poses, *args, mask=mask, **kwargs)


class DropsVotesAtRandom(Sound):
    def votes(self, poses: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return torch.nn.functional.dropout(super().votes(poses, weight, offset), 0.1)


class ReadsMemoryInOrder(Sound):
    """As a kernel that takes a pointer and forgets the strides."""

    def __call__(self, poses: Tensor, *args: Any, **kwargs: Any) -> Routed:
        dense = poses.storage_offset() == 0 and poses.numel() > 1 and not poses.requires_grad
        in_order = torch.as_strided(poses, poses.shape, torch.empty(poses.shape).stride()) if dense else poses
        return super().__call__(in_order, *args, **kwargs)


# The library's own rules with one thing wrong -------------------------------------------------------------------------


class WindowsIgnored(Attention):
    def __call__(self, *args: Any, child_ids: Tensor | None = None, **kwargs: Any) -> Routed:
        return super().__call__(*args, **kwargs)


class LambdaStartsAnew(EM):
    def __call__(self, *args: Any, start: Any = None, **kwargs: Any) -> Routed:
        return super().__call__(*args, start=None if start is None else start._replace(round=0), **kwargs)


class EveryChildIsThere(EM):
    def __call__(self, poses: Tensor, weight: Tensor, activations: Tensor | None = None, **kwargs: Any) -> Routed:
        return super().__call__(poses, weight, None if activations is None else activations * 0 + 1, **kwargs)


class SaysChildren(Dynamic):
    sums_to = "children"


SHARES = "coupling is shared out as sums_to says"
FIRST = "the first round from nothing is uniform"
FURTHER = "each further round changes the result"
ONE_AT_A_TIME = "rounds can be run one at a time"
ERRORS = "what cannot be done is a ValueError"
CONTENT = "what a masked child holds changes nothing"
ACTIVATIONS = "activations count where they are needed, and nowhere else"
SLOPES = "gradients are those of the values"
EXTREMES = "zeros, equal votes and long votes have finite values and gradients"
SHAPES = "poses are [N, J, R, Q], of the dtype of poses and weight together"

BROKEN: dict[type[Any], str] = {
    OverChildren: SHARES,
    Sigmoid: SHARES,
    Unnormalised: SHARES,
    MaskedChildrenKeepTheirShare: SHARES,
    SaysChildren: SHARES,
    RandomFirstRound: FIRST,
    FirstRoundAgreesWithTheMean: FIRST,
    CouplingOfTheNextRound: FIRST,
    OnlyTheLastCoupling: "the coupling of every round can be asked for",
    AlwaysOneRound: FURTHER,
    AtMostTwoRounds: FURTHER,
    IgnoresStart: ONE_AT_A_TIME,
    StateIsTheLastParent: ONE_AT_A_TIME,
    CountsRoundsFromZero: ONE_AT_A_TIME,
    LambdaStartsAnew: ONE_AT_A_TIME,
    NoRoundIsAnAnswer: ERRORS,
    AnyBackend: ERRORS,
    NoActivationIsOne: ERRORS,
    LaterChildrenCountMore: "the order of the children does not matter",
    FirstParentIsFavoured: "the order of the parents is kept",
    LogitsOfTheWholeBatch: "an example does not depend on its batch",
    ScaledByTheLongestOfTheBatch: "an example does not depend on its batch",
    TransposedWeight: "only the votes speak",
    NormalisedPoses: "only the votes speak",
    SharedWeightIsAMean: "a shared weight is the same for every child",
    DropsTheOffset: "a vote offset is added to the votes",
    OffsetOfTheFirstExample: "an example does not depend on its batch",
    MaskByMultiplication: CONTENT,
    MaskIgnored: SHARES,
    MaskAtTheEndAlone: CONTENT,
    MaskInTheAnswerAlone: CONTENT,
    MeanOverAllChildren: "a masked child is a child left out",
    MeanOfTheMasked: "no child at all has a finite answer",
    ActivationLeftOut: ACTIVATIONS,
    ActivationCancels: ACTIVATIONS,
    UnneededActivationsCount: ACTIVATIONS,
    EveryChildIsThere: ACTIVATIONS,
    DetachedRounds: SLOPES,
    DetachedCoupling: SLOPES,
    NoGradientInTheOffset: SLOPES,
    NoGradientInTheActivations: SLOPES,
    WrongBackward: SLOPES,
    GradientLost: SLOPES,
    NothingLearns: "gradients reach every input in every number of rounds",
    NanAtZero: EXTREMES,
    NanInTheGradientAtZero: EXTREMES,
    NoMaximumTakenOff: EXTREMES,
    HalfInside: "lower precision loses no more than rounding does",
    OverflowsInHalf: "lower precision loses no more than rounding does",
    SingleInside: SHARES,
    AnswersInSingle: SHAPES,
    DropsOnesAxes: SHAPES,
    RowsOfAPoseApart: SHAPES,
    WritesIntoThePoses: "the same call gives the same answer and leaves its arguments alone",
    DropsVotesAtRandom: "the same call gives the same answer and leaves its arguments alone",
    ReadsMemoryInOrder: "strides do not matter",
    WindowsIgnored: "windows that share a child compete for it",
}
"""Every broken rule, and the promise that the contract should name."""
