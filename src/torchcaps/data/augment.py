"""Augmentation of whole batches: shift, crop, flip, and the affine maps of torchvision's `RandomAffine`.

Every random number is a function of (seed, epoch, item), so an image is changed in the same way whatever batch, process
or worker it is in, and in another way the next epoch.

Of a shift by whole pixels alone a window of the padded batch is taken, without interpolation. Everything else is one
affine map with bilinear interpolation and zeros outside, as in torchvision: for a point p measured from the centre, x
to the right and y down,

    p  ->  R(angle) [1, -tan(shear); 0, 1] diag(scale_x, scale_y) p + shift
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .random import integers, uniform

__all__ = ["Augment"]


@dataclass(frozen=True)
class Augment:
    """How a training image is changed, uniformly at random within what is allowed. Nothing is changed by default.

    Shift, crop and flips are for signals `[N, C, L]`, images `[N, C, H, W]` and volumes; the others for images.

    Args:
        shift: Up to so many pixels to each side, per axis. A whole number shifts by whole pixels; one like 0.75 by
            fractions of a pixel. Zeros move in. `shift=4` is the usual crop of a CIFAR image padded by 4.
        crop: Keep a window of this size, one number or one per axis. Evaluation keeps the central one.
        flip: Mirror left and right, every second time.
        vertical_flip: Mirror top and bottom, every second time.
        degrees: Rotate by up to so many degrees to each side.
        scale: Enlarge by a factor between these two.
        each_axis: Height and width have a factor each; otherwise both the same.
        shear: Shear along x by up to so many degrees to each side.
    """

    shift: float = 0.0
    crop: int | tuple[int, ...] | None = None
    flip: bool = False
    vertical_flip: bool = False
    degrees: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    each_axis: bool = False
    shear: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.shift, self.degrees, self.shear)) or self.shear >= 90:
            raise ValueError(
                f"Augment: shift={self.shift}, degrees={self.degrees} and shear={self.shear} are the furthest to each "
                "side: give 0 or more, and a shear below 90"
            )
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"Augment: scale={self.scale} must be (smallest, largest) factor, both above 0")

    @property
    def bends(self) -> bool:
        """Whether pixels are interpolated, and not only moved."""
        affine = self.degrees or self.shear or tuple(self.scale) != (1.0, 1.0)
        return bool(affine) or self.shift != int(self.shift)

    def window(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size that is left of images of this size; ValueError where the crop is larger, or cannot be done."""
        if self.bends and len(size) != 2:
            raise ValueError(
                "Augment: degrees, scale, shear and a shift by fractions of a pixel are for images [N, C, H, W], but "
                f"these data are {_by(size)}: shift by a whole number, crop and flip are for any"
            )
        if self.vertical_flip and len(size) < 2:
            raise ValueError("Augment: vertical_flip is for data with a height; flip mirrors signals")
        if self.crop is None:
            return tuple(size)
        crop = (self.crop,) * len(size) if isinstance(self.crop, int) else tuple(self.crop)
        if len(crop) != len(size) or any(not 1 <= c <= s for c, s in zip(crop, size, strict=True)):
            raise ValueError(f"Augment: crop={self.crop} does not fit into data of {_by(size)}")
        return crop

    def __call__(self, x: Tensor, seed: int, epoch: int, items: NDArray[np.int64]) -> Tensor:
        """The batch `[N, C, *size]` of `items` `[N]`, changed: `[N, C, *window(size)]`."""
        size, out = x.shape[2:], self.window(x.shape[2:])
        flips = [axis for axis, flip in ((-1, self.flip), (-2, self.vertical_flip)) if flip]
        for axis in flips:
            mirrored = torch.from_numpy(uniform(seed, f"flip {axis}", epoch, items)[:, 0] < 0.5)
            x = torch.where(mirrored.view(-1, *(1,) * (x.dim() - 1)), x.flip(axis), x)
        start = np.zeros((len(items), len(size)), np.int64)
        margin = 0
        if self.bends:
            x = affine(x, *self._affine_numbers(seed, epoch, items))
        elif self.shift:
            margin = int(self.shift)
            start += integers(2 * margin + 1, seed, "shift", epoch, items, len(size))
        room = np.array([s - o for s, o in zip(size, out, strict=True)])
        if room.any():
            start += integers(room + 1, seed, "crop", epoch, items, len(size))
        return windows(x, start, out, margin) if margin or room.any() else x

    def _affine_numbers(self, seed: int, epoch: int, items: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """angle `[N]` and shear `[N]` in radians, scale `[N, 2]`, shift `[N, 2]` in pixels; x before y."""
        u = torch.from_numpy(uniform(seed, "affine", epoch, items, 4))
        low, high = self.scale
        scale = low + (high - low) * (u[:, 2:4] if self.each_axis else u[:, 2:3].expand(-1, 2))
        if self.shift == int(self.shift):
            shift = torch.from_numpy(integers(2 * int(self.shift) + 1, seed, "shift", epoch, items, 2)) - self.shift
        else:
            shift = self.shift * (2 * torch.from_numpy(uniform(seed, "shift", epoch, items, 2)) - 1)
        to_radians = math.pi / 180
        return self.degrees * to_radians * (2 * u[:, 0] - 1), self.shear * to_radians * (2 * u[:, 1] - 1), scale, shift


def windows(x: Tensor, start: NDArray[np.int64], size: Sequence[int], margin: int = 0) -> Tensor:
    """Of each `x[n]`, padded by `margin` zeros on all sides, the window of `size` at `start[n]`: `[N, C, *size]`."""
    spatial = range(2, x.dim())
    if margin:
        x = F.pad(x, (margin,) * (2 * len(spatial)))
    for axis, length in zip(spatial, size, strict=True):
        x = x.unfold(axis, length, 1)
    at: list[Any] = [torch.arange(len(x)), slice(None), *torch.from_numpy(start).unbind(1)]
    return x[tuple(at)]


def centre(x: Tensor, size: Sequence[int]) -> Tensor:
    """The central window of each `x[n]`: `[N, C, *size]`."""
    for axis, length in enumerate(size, start=x.dim() - len(size)):
        x = x.narrow(axis, (x.shape[axis] - length) // 2, length)
    return x


def affine(x: Tensor, angle: Tensor, shear: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Images `[N, C, H, W]` under this file's affine map; angle, shear `[N]`; scale, shift `[N, 2]`, x before y."""
    cos, sin, tan = angle.cos(), angle.sin(), shear.tan()
    turn = torch.stack([cos, -cos * tan - sin, sin, cos - sin * tan], 1).view(-1, 2, 2)
    back = torch.linalg.inv(turn * scale[:, None])
    # grid_sample asks where a pixel comes from, in units in which the image reaches from -1 to 1
    half = torch.tensor([x.shape[3] / 2, x.shape[2] / 2], dtype=back.dtype)
    shift = shift.to(back.dtype)
    theta = torch.cat([back * half / half[:, None], -(back @ shift[:, :, None]) / half[:, None]], 2)
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
