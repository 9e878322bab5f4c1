"""Test items made harder, step by step: what is left of an arm's answers.

    rotation    by so many degrees, to a random side                               images
    scale       enlarged by this factor, below 1 made smaller                      images
    shift       by this share of the side, in a random direction; signals and volumes by whole steps
    noise       of this standard deviation, in units of the item's own
    occlusion   a block at a random place takes this share of the area, and is its mean
    overlap     another item of another class lies over it, at this share of its contrast; the answer is the first's
    both        the same, and the answer is both: of single labels the two highest

What moves in from outside is 0, as it is in augmentation. Images stay in 0..1. The other item is laid over as what it
is beside its own background (its median): ink on white is overlaid like white on black.

Every random number is a function of the item, so all arms and seeds see the same pictures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.data.augment import affine, centre, windows
from torchcaps.data.parts import View
from torchcaps.data.random import uniform

__all__ = ["PANEL", "Bench", "Perturbation"]

MOST_ITEMS = 1000
MOST_BYTES = 2**28
"""Test items that are looked at are in memory: so many of them, and so many bytes, at most."""


@dataclass(frozen=True)
class Perturbation:
    """One way to make items harder; the strengths, first the one that changes nothing."""

    title: str
    unit: str
    strengths: tuple[float, ...]
    dims: frozenset[int]
    masked: bool = False
    """Whether it is done to signals of different lengths."""


EVERY, IMAGES = frozenset((1, 2, 3)), frozenset((2,))
PANEL: dict[str, Perturbation] = {
    "rotation": Perturbation("Rotation", "degrees", (0, 15, 30, 45, 60, 90), IMAGES),
    "scale": Perturbation("Scale", "factor", (1, 0.5, 0.7, 0.85, 1.2, 1.5), IMAGES),
    "shift": Perturbation("Shift", "share of the side", (0, 0.05, 0.1, 0.15, 0.2, 0.25), EVERY),
    "noise": Perturbation("Noise", "standard deviations", (0, 0.25, 0.5, 1, 2), EVERY, masked=True),
    "occlusion": Perturbation("Occlusion", "share of the area", (0, 0.1, 0.2, 0.3, 0.5), EVERY, masked=True),
    "overlap": Perturbation("Overlap, name the first", "contrast of the other", (0, 0.25, 0.5, 0.75), EVERY),
    "both": Perturbation("Overlap, name both", "contrast of the other", (0.25, 0.5, 0.75, 1), EVERY),
}


class Bench(NamedTuple):
    """Test items in 0..1 to be made harder, each with another one to lie over it.

    x `[N, C, *size]`, y `[N]` or presence `[N, K]`, mask `[N, L]` or None, items `[N]` (their places in the test part);
    `other` `[N]` says which of the N lies over each. `finish` is the last step of preprocessing.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None
    items: NDArray[np.int64]
    other: NDArray[np.int64]
    finish: Callable[[Tensor], Tensor]
    images: bool

    @classmethod
    def of(cls, view: View, most: int = MOST_ITEMS) -> "Bench":
        """Items spread evenly over a test part."""
        settings = view.settings
        bytes_each = 4 * settings.channels * math.prod(settings.size)
        n = max(2, min(len(view), most, MOST_BYTES // bytes_each))
        items = np.linspace(0, len(view) - 1, min(n, len(view))).astype(np.int64)
        x, y, *mask = view.part.take(0, items)
        x = x if settings.crop is None else centre(x, settings.crop)
        other = partners(y, uniform(0, "overlap", 0, items)[:, 0])
        return cls(x, y, mask[0] if mask else None, items, other, settings.finish, settings.kind == "image")

    def names(self) -> list[str]:
        """What can be done to such items; of two classes, both is no question."""
        dims = self.x.dim() - 2
        names = [n for n, p in PANEL.items() if dims in p.dims and (self.mask is None or p.masked)]
        return names if self.y.dim() == 2 or len(self.y.unique()) > 2 else [n for n in names if n != "both"]

    def batch(self, name: str, strength: float, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(x, y, mask) of some of the items; y is presence `[n, K]` or pairs of classes `[n, 2]` for "both"."""
        x, y = self.x[rows], self.y[rows]
        mask = None if self.mask is None else self.mask[rows]
        if strength != PANEL[name].strengths[0] or name == "both":
            x = self._changed(name, x, strength, rows)
            x = x.clamp(0, 1) if self.images else x
        if name == "both":
            others = self.y[torch.from_numpy(self.other[rows])]
            y = torch.maximum(y, others) if y.dim() == 2 else torch.stack([y, others], 1)
        x = self.finish(x)
        return (x if mask is None else torch.where(mask[:, None], x, 0.0)), y, mask

    def _changed(self, name: str, x: Tensor, strength: float, rows: slice) -> Tensor:
        def draws(count: int) -> NDArray[np.float64]:
            return uniform(0, name, 0, self.items[rows], count)

        match name:
            case "rotation":
                side = torch.from_numpy(np.where(draws(1)[:, 0] < 0.5, -1.0, 1.0))
                return _turned(x, angle=side * math.radians(strength))
            case "scale":
                return _turned(x, scale=strength)
            case "shift":
                return _shifted(x, strength, draws(x.dim() - 2))
            case "noise":
                seeded = (torch.Generator().manual_seed(int(item)) for item in self.items[rows])
                noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in seeded])
                return x + strength * x.flatten(1).std(1).view(-1, *(1,) * (x.dim() - 1)) * noise
            case "occlusion":
                return _occluded(x, strength, draws(x.dim() - 2))
            case _:
                over = self.x[torch.from_numpy(self.other[rows])]
                background = over.flatten(2).median(2).values.view(*over.shape[:2], *(1,) * (x.dim() - 2))
                return x + strength * (over - background)


def partners(y: Tensor, u: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each item another one, with other labels where there is one: the u-th `[N]` of them, u in 0..1."""
    labels = y.numpy()
    found = np.empty(len(labels), np.int64)
    for i, own in enumerate(labels):
        differs = labels != own if labels.ndim == 1 else (labels != own).any(1)
        candidates = np.flatnonzero(differs) if differs.any() else np.delete(np.arange(len(labels)), i)
        found[i] = candidates[int(u[i] * len(candidates))]
    return found


def _turned(x: Tensor, angle: Tensor | float = 0.0, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
    """Images turned by angles `[N]`, enlarged, and shifted by pixels `[N, 2]`, x before y."""
    N = len(x)
    angles = torch.as_tensor(angle, dtype=torch.float64).expand(N)
    scales = torch.full((N, 2), scale, dtype=torch.float64)
    return affine(x, angles, torch.zeros_like(angles), scales, torch.zeros_like(scales) if shift is None else shift)


def _shifted(x: Tensor, share: float, u: NDArray[np.float64]) -> Tensor:
    """In a direction drawn evenly from all there are; u is `[N, axes]`."""
    size = x.shape[2:]
    if len(size) == 2:
        angle = torch.from_numpy(2 * np.pi * u[:, 0])
        return _turned(x, shift=share * torch.stack([size[1] * angle.cos(), size[0] * angle.sin()], 1))
    side = np.where(u < 0.5, -1.0, 1.0) / len(size) ** 0.5
    steps = np.rint(share * np.array(size) * side).astype(np.int64)
    margin = int(np.abs(steps).max())
    return windows(x, margin - steps, size, margin)


def _occluded(x: Tensor, share: float, u: NDArray[np.float64]) -> Tensor:
    """A block with sides in the proportions of the item's takes this share of it."""
    size = x.shape[2:]
    mean = x.flatten(2).mean(2).view(*x.shape[:2], *(1,) * len(size))
    covered = torch.ones(len(x), 1, *size, dtype=torch.bool)
    for axis, length in enumerate(size):
        block = max(1, round(length * share ** (1 / len(size))))
        start = torch.from_numpy(np.floor(u[:, axis] * (length - block + 1)).astype(np.int64))
        place = torch.arange(length)
        inside = (place >= start[:, None]) & (place < start[:, None] + block)
        shape: Sequence[int] = [len(x), 1, *(length if a == axis else 1 for a in range(len(size)))]
        covered &= inside.view(*shape)
    return torch.where(covered, mean, x)
