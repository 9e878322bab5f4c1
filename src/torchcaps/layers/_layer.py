"""What the routed layers share: the weight, the tensors that the rule learns, and the door.

    weight [W, J, P, Q] ~ Normal(0, std),    std = rule.weight_std(I, J, R, P, Q) unless `init` says otherwise

W is the number of weights that the layer keeps per parent. For the standard deviation, I is the number of children
whose votes a parent sums, and J the number of parents that share a child.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torchcaps.routing import Backend, Rule
from torchcaps.types import Capsules, Pose, Routed, pose_shape, whole

__all__ = ["Init", "RoutedLayer", "per_axis", "positive", "positive_all"]

Init = float | Callable[[Tensor], object] | None
"""None: the rule's own standard deviation; a number, 0 or more: that one; a callable: fills the weight, in place."""


class RoutedLayer(nn.Module, ABC):
    """A layer that routes children to parents, with a weight of its own.

    weights   W, or None where the first input will tell.
    children  I for the standard deviation of the initial weight; None is W.
    rivals    J for it; None is out_caps.
    """

    def __init__(
        self,
        weights: int | None,
        out_caps: int,
        in_pose: Pose,
        out_pose: Pose,
        *,
        routing: Rule,
        init: Init,
        children: int | None = None,
        rivals: int | None = None,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.out_caps = positive(self.name, "the number of parents", out_caps)
        self.in_pose, self.out_pose = pose_shape(in_pose), pose_shape(out_pose)
        if self.in_pose[0] != self.out_pose[0]:
            raise ValueError(
                f"{self.name}: a pose {list(self.in_pose)} times a weight keeps its {self.in_pose[0]} rows, but "
                f"out_pose {list(self.out_pose)} has {self.out_pose[0]}: give both the same rows (a vector has one)"
            )
        if not isinstance(routing, Rule):
            raise ValueError(f"{self.name}: routing must be a rule such as Dynamic.sabour(), not {routing!r}")
        self.routing = routing
        if not (init is None or callable(init) or (_real(init) and 0 <= init < math.inf)):
            raise ValueError(
                f"{self.name}: init must be a standard deviation of 0 or more, a callable that fills the weight such "
                f"as torch.nn.init.xavier_normal_, or None for the rule's own, not {init!r}"
            )
        self.init = init
        self._children, self._rivals = children, rivals
        self.learned = nn.ParameterDict()
        if weights is None:
            self.weight: nn.Parameter | UninitializedParameter = UninitializedParameter()
        else:
            self.weight = nn.Parameter(torch.empty(weights, self.out_caps, self.in_pose[1], self.out_pose[1]))
            self._start()

    @abstractmethod
    def route(
        self,
        capsules: Capsules,
        mask: Tensor | None = None,
        *,
        start: Any = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
    ) -> Routed:
        """All that the rule gives for these capsules: parents, coupling, state."""

    def forward(self, capsules: Capsules, mask: Tensor | None = None) -> Capsules:
        """The parents of `capsules`. `mask` has the leading shape of the poses, True for a child that takes part."""
        return self.route(capsules, mask).capsules

    def reset_parameters(self) -> None:
        """Draw the weight anew and put what the rule learns back to its start."""
        W, J, P, Q = self.weight.shape
        with torch.no_grad():
            if callable(self.init):
                self.init(self.weight)
            else:
                I = W if self._children is None else self._children
                rivals = J if self._rivals is None else self._rivals
                std = self.routing.weight_std(I, rivals, self.in_pose[0], P, Q) if self.init is None else self.init
                self.weight.normal_(0.0, std)
            for name, value in self._learned_at_start().items():
                self.learned[name].copy_(value)

    def extra_repr(self) -> str:
        return f"out_caps={self.out_caps}, in_pose={self.in_pose}, out_pose={self.out_pose}, routing={self.routing}"

    def _start(self) -> None:
        """Make what the rule learns, now that the weight has its size, and set all to first numbers."""
        for name, value in self._learned_at_start().items():
            self.learned[name] = nn.Parameter(value.to(self.weight.device, self.weight.dtype))
        self.reset_parameters()

    def _learned_at_start(self) -> dict[str, Tensor]:
        W, J, P, Q = self.weight.shape
        return self.routing.learned(W, J, self.in_pose[0], P, Q)

    def _check(self, capsules: Capsules, mask: Tensor | None) -> None:
        """The door: capsules of the layer's pose, activations where the rule needs them, and a mask that fits."""
        poses, activations = _unwrap(self.name, capsules)
        R, P = self.in_pose
        if poses.dim() < 4 or poses.shape[-2:] != (R, P):
            hint = ""
            if R == 1 and poses.dim() > 2 and poses.shape[-1] == P:
                hint = "; a vector capsule is a pose of one row: poses.unsqueeze(-2)"
            raise ValueError(
                f"{self.name} with in_pose {[R, P]} takes poses [N, I, {R}, {P}] or a map [N, C, *spatial, {R}, {P}], "
                f"not {list(poses.shape)}{hint}"
            )
        places = poses.shape[:-2]
        if activations is None:
            if self.routing.needs_activations:
                raise ValueError(
                    f"{self.name}: {type(self.routing).__name__} weighs each child by its activation, but these "
                    "capsules have none: PrimaryCapsules(activations=True) gives them, or Capsules(poses, activations)"
                )
        elif activations.shape != places:
            raise ValueError(
                f"{self.name}: activations {list(activations.shape)} but poses {list(poses.shape)} need {list(places)}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != places):
            raise ValueError(
                f"{self.name}: mask {list(mask.shape)} of {mask.dtype} but poses {list(poses.shape)} need "
                f"{list(places)} of torch.bool, True for a child that takes part; expand a mask of positions over types"
            )


def per_axis(layer: str, name: str, value: int | Sequence[int], axes: int, least: int) -> tuple[int, ...]:
    """One number per spatial axis, from one for all or one each."""
    each: Sequence[object] = (value,) * axes
    if whole(value) is None and isinstance(value, Iterable):
        each = tuple(value)
    values = tuple(n for n in map(whole, each) if n is not None and n >= least)
    if not len(each) == len(values) == axes:
        raise ValueError(
            f"{layer}: {name}={value!r} must be a whole number of at least {least}, or {axes}, one per axis"
        )
    return values


def positive(layer: str, name: str, value: int) -> int:
    """The number, if one can count with it."""
    number = whole(value)
    if number is None or number < 1:
        raise ValueError(f"{layer}: {name} must be a whole number of 1 or more, not {value!r}")
    return number


def positive_all(layer: str, name: str, values: Sequence[int]) -> tuple[int, ...]:
    """`positive` for each of several numbers."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{layer}: {name} must be a tuple of whole numbers, not {values!r}")
    return tuple(positive(layer, f"every size of {name}", value) for value in values)


def _real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _unwrap(layer: str, capsules: object) -> Capsules:
    if isinstance(capsules, Capsules):
        return capsules
    what = f"a tensor {list(capsules.shape)}" if isinstance(capsules, Tensor) else f"a {type(capsules).__name__}"
    raise ValueError(f"{layer} takes Capsules, not {what}: wrap it, Capsules(poses) or Capsules(poses, activations)")
