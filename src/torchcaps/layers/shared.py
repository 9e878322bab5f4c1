"""Every parent hears every child through one weight per parent, so that any number of children will do.

Su 2018 (kexue.fm 4819, 5112): u_ij = x_i W_j. Images of any size and sequences of any length pass the same layer.

Hinton, Sabour, Frosst 2018 share less in their class capsules: a weight for each type of child and parent, the same at
every position (`in_types`), and the position is added to the vote so that it is not lost (`coordinates=True`).
"""

import math
from typing import Any, Literal

from torch import Tensor

from torchcaps.layers._layer import Init, RoutedLayer, positive
from torchcaps.layers.coordinates import coordinate_offset
from torchcaps.routing import Backend, Rule
from torchcaps.types import Capsules, Pose, Routed

__all__ = ["SharedCapsules"]


class SharedCapsules(RoutedLayer):
    """Capsules `[N, I, R, P]`, or a map `[N, C, *spatial, R, P]`, of any I, to `[N, J, R, Q]`.

    out_caps      J.
    in_pose       `(R, P)`, or P for vectors.
    out_pose      `(R, Q)` with the same R, or Q.
    routing       a rule, e.g. `Dynamic.su()`.
    in_types      None: all children share the weight `[1, J, P, Q]`. C: each type of a map of C types has its own, the
                  same at every position: weight `[C, J, P, Q]`.
    init          standard deviation of the initial weights, or a callable that fills them; None asks the rule.
    coordinates   add each child's place to its votes (`coordinate_offset`): maps only. They run from 0 to 1 over the
                  whole map, masked places included.
    typical_caps  about how many children there will be. A parent sums the votes of all of them, so the right scale of
                  the initial weights depends on their number, which this layer alone cannot know. Nothing else does.

    A prior that the rule learns is shared like the weight. Raises ValueError where sizes do not fit.

    >>> import torch
    >>> from torchcaps.routing import Dynamic
    >>> layer = SharedCapsules(10, 128, 16, routing=Dynamic.su())
    >>> [layer(Capsules(torch.randn(2, n, 1, 128))).poses.shape[1] for n in (64, 176)]
    [10, 10]
    """

    def __init__(
        self,
        out_caps: int,
        in_pose: Pose,
        out_pose: Pose,
        *,
        routing: Rule,
        in_types: int | None = None,
        init: Init = None,
        coordinates: bool = False,
        typical_caps: int = 64,
    ) -> None:
        name = type(self).__name__
        typical_caps = positive(name, "typical_caps", typical_caps)
        if in_types is not None:
            in_types = positive(name, "in_types", in_types)
        weights = 1 if in_types is None else in_types
        super().__init__(weights, out_caps, in_pose, out_pose, routing=routing, init=init, children=typical_caps)
        self.in_types = in_types
        self.coordinates = coordinates
        self.typical_caps = typical_caps
        one, two = (routing.learned(n, self.out_caps, *self.in_pose, self.out_pose[1]) for n in (1, 2))
        self._per_child = frozenset(name for name in one if one[name].shape != two[name].shape)

    def route(
        self,
        capsules: Capsules,
        mask: Tensor | None = None,
        *,
        start: Any = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
    ) -> Routed:
        """All that the rule gives. `mask` has the leading shape of the poses; the keywords are the rule's."""
        self._check(capsules, mask)
        types, spatial = capsules.poses.shape[1], capsules.spatial
        positions = math.prod(spatial)
        if self.in_types not in (None, types):
            raise ValueError(
                f"{self.name} has weights for {self.in_types} types of children, but poses "
                f"{list(capsules.poses.shape)} hold {types}: give the map itself, [N, {self.in_types}, *spatial, R, P] "
                f"(not flattened), or build it with in_types={types}"
            )
        poses, activations = capsules.flatten()
        children = types * positions
        weight = self.weight if self.in_types is None else _repeat(self.weight, positions)
        repeats = children if self.in_types is None else positions
        learned: dict[str, Any] = {
            name: _repeat(t, repeats) if name in self._per_child else t for name, t in self.learned.items()
        }
        offset = None
        if self.coordinates:
            offset = coordinate_offset(types, spatial, self.out_pose, device=poses.device, dtype=poses.dtype)
        return self.routing(
            poses,
            weight,
            activations,
            vote_offset=offset,
            mask=None if mask is None else mask.flatten(1),
            start=start,
            backend=backend,
            return_coupling=return_coupling,
            **learned,
        )

    def extra_repr(self) -> str:
        types = "" if self.in_types is None else f"in_types={self.in_types}, "
        return f"{types}{super().extra_repr()}, typical_caps={self.typical_caps}"


def _repeat(shared: Tensor, times: int) -> Tensor:
    """`[W, ...]` as `[W * times, ...]`, each entry `times` times in a row: the order type, position."""
    return shared[:, None].expand(-1, times, *shared.shape[1:]).flatten(0, 1)
