"""A rule: an algorithm with its settings, ready to be given to a layer.

A rule is frozen and holds numbers, flags and callables only, so that one rule may serve many layers. What is learned
belongs to the layer: `rule.learned(...)` names it, the layer keeps it and hands it back at every call.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor

from torchcaps.routing._round import Backend
from torchcaps.routing._windows import Windows
from torchcaps.types import Routed

__all__ = ["Rule"]


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """What all rules have. A rule of your own: a frozen dataclass below this one (docs/adding-an-algorithm.md)."""

    function: ClassVar[Callable[..., Routed]]
    """The pure function behind the rule; the rule's fields, but for those named `learn_...`, are its keywords."""

    needs_activations: ClassVar[bool] = False
    """Whether children must bring activations. Where not, they are ignored: the pose's length speaks."""

    reads_maps: ClassVar[bool] = False
    """Whether the function takes `windows`: a map whose windows are its examples. Where not, layers unfold the map."""

    @property
    @abstractmethod
    def sums_to(self) -> Literal["parents", "children"] | None:
        """What a coupling sums to 1 over: "parents" (each child's shares), "children" (each parent's), or None."""

    @abstractmethod
    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        """Starting values of the tensors that a layer of this size should learn, by their names in the call."""

    @abstractmethod
    def weight_std(self, I: int, J: int, R: int, P: int, Q: int) -> float:
        """Standard deviation of initial weights that keeps lengths and gradients alive in a stack of layers."""

    def __str__(self) -> str:
        """The rule with whatever differs from its defaults."""
        set_ = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in set_)})"

    def __call__(
        self,
        poses: Tensor,
        weight: Tensor,
        activations: Tensor | None = None,
        *,
        vote_offset: Tensor | None = None,
        mask: Tensor | None = None,
        start: Any = None,
        child_ids: Tensor | None = None,
        windows: Windows | None = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
        **learned: Tensor,
    ) -> Routed:
        """Route `poses` `[N, I, R, P]` through `weight` `[I | 1, J, P, Q]`; see the algorithm's function."""
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if not field.name.startswith("learn_")
        }
        if windows is not None:
            settings["windows"] = windows
        return type(self).function(
            poses,
            weight,
            activations,
            vote_offset=vote_offset,
            mask=mask,
            start=start,
            child_ids=child_ids,
            backend=backend,
            return_coupling=return_coupling,
            **settings,
            **learned,
        )
