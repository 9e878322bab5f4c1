"""A part of a set, for training, validation or test: from items and an epoch to a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2

from .augment import Augment, centre
from .preprocessing import Preprocessing, depth, read_image, resize
from .random import bits

__all__ = ["FilePart", "Part", "Request", "StoredPart", "TensorPart", "View"]

Items = NDArray[np.int64]
Request = tuple[int, Items]
"""(epoch, items): what a loader asks for."""


class Part(ABC):
    """Items, each with a label, or with several."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        """x `[N, C, *size]` in 0..1 and y, or with different lengths x, y, mask `[N, L]` (True = is there)."""


class StoredPart(Part):
    """Items that are the same each epoch, with labels `[n]` of int64, or `[n, K]` of float32 where each has several."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, items: Items) -> "StoredPart":
        """These items alone."""


class TensorPart(StoredPart):
    """In memory, as it came: bytes stay bytes until they are asked for.

    `raw` is `[N, C, *size]`, and item i of the part is `raw[rows[i]]`. With `lengths` `[n]` these are signals, each
    filled up to the length of the longest.
    """

    def __init__(
        self,
        raw: Tensor,
        labels: Tensor,
        settings: Preprocessing,
        lengths: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.raw, self.labels, self.settings, self.lengths = raw, labels, settings, lengths
        self.rows = torch.arange(len(labels)) if rows is None else rows

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        chosen = torch.from_numpy(items)
        x, y = self.settings.scaled(self.raw[self.rows[chosen]]), self.labels[chosen]
        if self.lengths is None:
            return x, y
        lengths = self.lengths[chosen]
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        return torch.where(mask[:, None], x[..., :longest], 0.0), y, mask

    def own_settings(self) -> Preprocessing:
        """The settings with the smallest and largest number of these items as 0 and 1, unless their kind gives them."""
        if self.settings.low == 0 and self.settings.high in (1.0, 255.0, 65535.0):
            return self.settings
        low, high = float("inf"), -float("inf")
        for rows, items in zip(self.rows.split(1024), torch.arange(len(self.rows)).split(1024), strict=True):
            x = self.raw[rows]
            if self.lengths is not None:
                x = x.movedim(1, -1)[torch.arange(x.shape[-1]) < self.lengths[items, None]]
            low, high = min(low, x.min().item()), max(high, x.max().item())
        return self.settings if low == high else self.settings._replace(low=low, high=high)

    def subset(self, items: Items) -> "TensorPart":
        """These items alone; the raw values are shared."""
        chosen = torch.from_numpy(items)
        lengths = None if self.lengths is None else self.lengths[chosen]
        return TensorPart(self.raw, self.labels[chosen], self.settings, lengths, self.rows[chosen])


class FilePart(StoredPart):
    """Image files, read when they are asked for."""

    def __init__(self, files: Sequence[Path], labels: Tensor, settings: Preprocessing) -> None:
        self.files, self.labels, self.settings = list(files), labels, settings

    def read(self, item: int) -> Tensor:
        """Raw values `[C, H, W]`, in the size of the set."""
        raw = read_image(self.files[item], self.settings.channels)
        if depth(raw) != self.settings.high:
            raise ValueError(
                f"{self.files[item]} and {self.files[0]} differ in depth, one has 8 bits and one 16: make them alike"
            )
        return raw if raw.shape[1:] == self.settings.size else resize(raw, self.settings.size)

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        raw = torch.stack([self.read(int(i)) for i in items])
        return self.settings.scaled(raw), self.labels[torch.from_numpy(items)]

    def subset(self, items: Items) -> "FilePart":
        """These items alone."""
        return FilePart([self.files[i] for i in items], self.labels[torch.from_numpy(items)], self.settings)

    def in_memory(self) -> TensorPart:
        """The same with all files read."""
        dtype = torch.uint8 if self.settings.high == 255 else torch.float32
        raw = torch.empty(len(self), self.settings.channels, *self.settings.size, dtype=dtype)
        for i in range(len(self)):
            raw[i] = self.read(i)
        return TensorPart(raw, self.labels, self.settings)


class View:
    """A part as a model sees it: augmented for training, in the middle for evaluation, normalised where asked."""

    def __init__(
        self,
        part: Part,
        settings: Preprocessing,
        seed: int = 0,
        augment: Augment | None = None,
        transform: v2.Transform | None = None,
    ) -> None:
        self.part, self.settings, self.seed, self.augment, self.transform = part, settings, seed, augment, transform

    def __len__(self) -> int:
        return len(self.part)

    def __getitems__(self, request: Request) -> tuple[Tensor, ...]:
        epoch, items = request
        x, *rest = self.part.take(epoch, items)
        if self.augment is not None:
            x = self.augment(x, self.seed, epoch, items)
        elif self.settings.crop is not None:
            x = centre(x, self.settings.crop)
        if self.transform is not None:
            x = self._transformed(x, self.transform, epoch, items)
        x = self.settings.finish(x)
        if len(rest) == 2:  # what is not there stays 0
            x = torch.where(rest[1][:, None], x, 0.0)
        return x, *rest

    def _transformed(self, x: Tensor, transform: v2.Transform, epoch: int, items: Items) -> Tensor:
        # torchvision draws from torch's own generator: each item gets it in a state of its own, then it is put back
        seeds = bits(self.seed, "transform", epoch, items)[:, 0]
        with torch.random.fork_rng(devices=[]):
            changed = []
            for image, seed in zip(x, seeds, strict=True):
                torch.manual_seed(int(seed >> np.uint64(1)))
                changed.append(transform(image))
        return torch.stack(changed)
