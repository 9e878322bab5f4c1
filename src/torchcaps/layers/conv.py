"""A parent of each type at every place, which hears the children in the window below it.

    out = floor((size + 2 padding - kernel) / stride) + 1        on each axis
    parent at o hears the children at  o stride - padding + k,   k = 0 .. kernel - 1, of every type

To the rule a window is one more example: the batch is N * windows, the window fastest, and the children are the entries
of the window in the order type, kernel row, kernel column. Weights are the same in every window. What lies outside the
map is masked, not zero: a window at the border has fewer children.

    competition="window"    a child shares 1 among the parents of each window that sees it         Tsai et al. 2020
    competition="all"       a child shares 1 among the parents of all windows that see it          Hinton et al. 2018

With "all", one round from nothing gives each parent 1 / (J * windows that see the child).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps.layers._layer import Init, RoutedLayer, per_axis, positive
from torchcaps.routing import Backend, Rule, Windows
from torchcaps.routing._windows import check_window
from torchcaps.types import Capsules, Pose, Routed, whole

__all__ = ["ConvCapsules"]

Competition = Literal["window", "all"]


class ConvCapsules(RoutedLayer):
    """A map of capsules `[N, C, *spatial, R, P]` to a map `[N, J, *out, R, Q]`.

    in_types      C.
    out_types     J.
    in_pose       `(R, P)`, or P for vectors.
    out_pose      `(R, Q)` with the same R, or Q.
    kernel_size, stride, padding  one number, or one per axis.
    routing       a rule, e.g. `EM.hinton()`.
    competition   "window" or "all", as above; "all" wants a rule whose shares run over parents.
    spatial_dims  1, 2 or 3.
    init          standard deviation of the initial weights, or a callable that fills them; None asks the rule.

    `weight` is `[C * kernel, J, P, Q]`; `learned` holds what the rule learns. Raises ValueError where sizes do not fit.

    >>> from torchcaps.routing import Attention
    >>> layer = ConvCapsules(8, 16, (4, 4), (4, 4), kernel_size=3, stride=2, routing=Attention.tsai())
    >>> layer(Capsules(torch.randn(2, 8, 7, 9, 4, 4))).poses.shape
    torch.Size([2, 16, 3, 4, 4, 4])
    """

    def __init__(
        self,
        in_types: int,
        out_types: int,
        in_pose: Pose,
        out_pose: Pose,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        routing: Rule,
        competition: Competition = "window",
        spatial_dims: int = 2,
        init: Init = None,
    ) -> None:
        name = type(self).__name__
        if whole(spatial_dims) not in (1, 2, 3):
            raise ValueError(f"{name}: spatial_dims={spatial_dims!r} must be 1, 2 or 3")
        if competition not in ("window", "all"):
            raise ValueError(f"{name}: competition={competition!r} must be 'window' or 'all'")
        kernel = per_axis(name, "kernel_size", kernel_size, spatial_dims, 1)
        steps = per_axis(name, "stride", stride, spatial_dims, 1)
        in_types, out_types = positive(name, "in_types", in_types), positive(name, "out_types", out_types)
        weights, rivals = in_types * math.prod(kernel), out_types
        if competition == "all":  # as many parents share a child as there are in the windows that see it
            rivals *= math.prod(math.ceil(k / s) for k, s in zip(kernel, steps, strict=True))
        super().__init__(weights, out_types, in_pose, out_pose, routing=routing, init=init, rivals=rivals)
        if competition == "all" and routing.sums_to == "children":
            raise ValueError(
                f"{name}: with competition='all' the parents of several windows compete for a child, but in {routing} "
                "the children compete for a parent: take competition='window', or a rule whose shares sum over parents"
            )
        self.in_types = in_types
        self.kernel_size, self.stride = kernel, steps
        self.padding = per_axis(name, "padding", padding, spatial_dims, 0)
        self.competition = competition

    def route(
        self,
        capsules: Capsules,
        mask: Tensor | None = None,
        *,
        start: Any = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
    ) -> Routed:
        """All that the rule gives, its parents as a map.

        `mask` is `[N, C, *spatial]`. Poses `[N, J, *out, R, Q]` and activations `[N, J, *out]` are what `forward`
        gives. Coupling `[N * windows, C * kernel, J]` and the state, which `start` takes, stay window by window.
        """
        self._check(capsules, mask)
        poses, activations = capsules
        N, C, *spatial = poses.shape[:-2]
        if len(spatial) != len(self.kernel_size) or self.in_types != C:
            raise ValueError(
                f"{self.name} takes a map of {self.in_types} types with {len(self.kernel_size)} spatial sizes, but "
                f"poses {list(poses.shape)} hold {C} types with spatial sizes {spatial}: build it with the in_types "
                "and spatial_dims of its input"
            )
        check_window(self.name, spatial, self.kernel_size, self.padding)
        view: dict[str, Any] = {"windows": self.windows}
        if self.competition == "all" or not self.routing.reads_maps:
            mask = self.windows.present(poses, mask)
            poses = self.windows.unfold(poses)
            activations = None if activations is None else self.windows.unfold(activations)
            view = {"child_ids": self._child_ids(spatial, poses.device)} if self.competition == "all" else {}
        routed = self.routing(
            poses,
            self.weight,
            activations,
            mask=mask,
            start=start,
            backend=backend,
            return_coupling=return_coupling,
            **view,
            **self.learned,
        )
        out = self.out_size(spatial)
        return routed._replace(
            poses=_as_map(routed.poses, N, out),
            activations=None if routed.activations is None else _as_map(routed.activations, N, out),
        )

    @property
    def windows(self) -> Windows:
        """Where the parents look."""
        return Windows(self.kernel_size, self.stride, self.padding)

    def out_size(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Spatial sizes of the map of parents, from those of the children's."""
        return self.windows.out(spatial)

    def extra_repr(self) -> str:
        return (
            f"in_types={self.in_types}, {super().extra_repr()}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, competition={self.competition!r}"
        )

    def _child_ids(self, spatial: Sequence[int], device: torch.device) -> Tensor:
        """`[windows, C * kernel]`: a number for each child that a window sees, all below windows * C * kernel."""
        kernel, axes = self.kernel_size, len(self.kernel_size)
        steps = [min(k, s) for k, s in zip(kernel, self.stride, strict=True)]  # no number for a child between windows
        seen = [(n - 1) * s + k for n, s, k in zip(self.out_size(spatial), steps, kernel, strict=True)]
        ids = torch.arange(self.in_types * math.prod(seen), device=device)
        return Windows(kernel, tuple(steps), (0,) * axes).unfold(ids.view(1, self.in_types, *seen))


def _as_map(x: Tensor, N: int, out: Sequence[int]) -> Tensor:
    """`[N * windows, J, ...]` as `[N, J, *out, ...]`."""
    return x.unflatten(0, (N, *out)).movedim(1 + len(out), 1)
