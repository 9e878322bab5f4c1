"""Windows of a convolution: which children of a map a parent hears.

    out = floor((size + 2 padding - kernel) / stride) + 1        on each axis
    window o holds the children at  o stride - padding + k,      k = 0 .. kernel - 1, of every type

`unfold` lays the windows out as a list of children, in the order type, kernel row, kernel column; `fold` is its adjoint
and sums what every window says of a child. Kernels that read the map itself need neither.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Windows", "check_window"]


@dataclass(frozen=True)
class Windows:
    """One number per axis of the map, 1 to 3 of them."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def __post_init__(self) -> None:
        each = {"kernel": (self.kernel, 1), "stride": (self.stride, 1), "padding": (self.padding, 0)}
        if len({len(sizes) for sizes, _ in each.values()}) > 1 or not 1 <= len(self.kernel) <= 3:
            raise ValueError(f"{self} must have as many numbers of each kind as the map has axes, 1 to 3")
        for name, (sizes, least) in each.items():
            if any(isinstance(size, bool) or not isinstance(size, int) or size < least for size in sizes):
                raise ValueError(f"Windows: {name}={sizes} must be whole numbers of {least} or more")

    @property
    def axes(self) -> int:
        """Spatial axes of the map."""
        return len(self.kernel)

    @property
    def padded(self) -> bool:
        """Whether windows reach over the border."""
        return any(self.padding)

    def out(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Windows on each axis of a map of this size."""
        sizes = zip(spatial, self.kernel, self.stride, self.padding, strict=True)
        return tuple((size + 2 * p - k) // s + 1 for size, k, s, p in sizes)

    def count(self, spatial: Sequence[int]) -> int:
        """Windows in a map of this size."""
        return math.prod(self.out(spatial))

    def unfold(self, x: Tensor) -> Tensor:
        """`[N, C, *spatial, *rest]`, padded by 0 or False, as `[N * windows, C * kernel, *rest]`, window fastest."""
        axes = self.axes
        rest = x.dim() - 2 - axes
        if self.padded:
            x = pad(x, (0, 0) * rest + tuple(p for size in reversed(self.padding) for p in (size, size)))
        for axis, (k, s) in enumerate(zip(self.kernel, self.stride, strict=True), start=2):
            x = x.unfold(axis, k, s)  # a view: the axis now counts windows, their entries come last
        out, tail = range(2, 2 + axes), range(2 + axes, 2 + axes + rest)
        x = x.permute(0, *out, 1, *range(2 + axes + rest, x.dim()), *tail)
        return x.flatten(1 + axes, 1 + 2 * axes).flatten(0, axes)

    def fold(self, x: Tensor, spatial: Sequence[int]) -> Tensor:
        """`[N * windows, C * kernel, *rest]`, summed at each child of a map of this size: `[N, C, *spatial, *rest]`."""
        out = self.out(spatial)
        N, C = x.shape[0] // math.prod(out), x.shape[1] // math.prod(self.kernel)
        entries = x.reshape(N, *out, C, *self.kernel, *x.shape[2:])
        sizes = [size + 2 * p for size, p in zip(spatial, self.padding, strict=True)]
        total = x.new_zeros(N, *sizes, C, *x.shape[2:])
        for place in itertools.product(*map(range, self.kernel)):
            steps = zip(place, out, self.stride, strict=True)
            seen = (slice(None), *(slice(k, k + (n - 1) * s + 1, s) for k, n, s in steps))
            total[seen] += entries[(slice(None),) * (2 + self.axes) + place]
        inside = (slice(None), *(slice(p, p + size) for p, size in zip(self.padding, spatial, strict=True)))
        return total[inside].movedim(1 + self.axes, 1)

    def present(self, poses: Tensor, mask: Tensor | None) -> Tensor | None:
        """`[N * windows, C * kernel]`, True for a child inside the map that is not masked; None where all take part."""
        if mask is None and self.padded:
            axes = self.axes
            mask = poses.new_ones((1, *poses.shape[1 : 2 + axes]), dtype=torch.bool)
            mask = mask.expand(poses.shape[0], *mask.shape[1:])  # len() would fix the batch of an exported graph
        return None if mask is None else self.unfold(mask)


def check_window(who: str, spatial: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> None:
    """A ValueError where the kernel is larger than the padded map."""
    if any(size + 2 * p < k for size, k, p in zip(spatial, kernel, padding, strict=True)):
        least = [max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True)]
        raise ValueError(
            f"{who}: a kernel of {_by(kernel)} does not fit a map of {_by(spatial)} with padding {_by(padding)}: the "
            f"smallest map it takes is {_by(least)}; take a smaller kernel, more padding, or less stride before it"
        )


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
