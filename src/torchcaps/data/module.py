"""What every set offers: loaders for a Trainer, and what a model and a checkpoint must know of the data."""

import copy
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torchvision.transforms import v2

from ._splits import class_keys, split_off, stratified
from .augment import Augment
from .loader import Loader, Schedule
from .parts import Part, StoredPart, TensorPart, View
from .preprocessing import Preprocessing
from .random import permutation

__all__ = ["ImageData", "LabelledData"]

Data = TypeVar("Data", bound="ImageData")
Labelled = TypeVar("Labelled", bound="LabelledData")


class Parts(NamedTuple):
    """A set, ready to be looked at. A part that was not asked for is None."""

    train: Part
    val: Part | None
    test: Part | None
    class_names: list[str]
    multi_label: bool
    settings: Preprocessing
    test_settings: Preprocessing | None = None
    """Where test images have another size."""


class ImageData(pl.LightningDataModule, ABC):
    """A set of images, signals or volumes with labels.

    Loaders give `(x, y)`: x `[N, C, *size]`, float32 in 0..1; y `[N]` of int64, or `[N, K]` of float32, 1 where a class
    is there, for a set with several labels. Signals of different lengths come as `(x, y, mask)`, filled up with zeros
    to the longest of the batch; mask `[N, L]` is True where there is something.

    Order and augmentation are functions of (seed, epoch, item): whatever `num_workers`, and after a restart in the
    middle of an epoch, training sees the same numbers.

    Args:
        batch_size: Items of a training step, in each process.
        eval_batch_size: Items of a batch in validation and test; by default as in training.
        num_workers: Processes that prepare batches. 0: the training process does, which is best for what fits into
            memory.
        seed: Of order and augmentation. It does not change which items are in which part.
        augment: How training images are changed.
        transform: A transform of torchvision's v2 for training images `[C, H, W]` in 0..1, after `augment`, one by one.
        normalize: "train" for the mean and standard deviation of each channel of the training part, or (means,
            deviations). Decoders draw in 0..1: leave it out where images are to be reconstructed.
        drop_last: Leave out a last training batch that is not full.
        limit: Use so many items of each part at most, all classes with their shares: for a quick try.
    """

    def __init__(
        self,
        *,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        augment: Augment | None = None,
        transform: v2.Transform | None = None,
        normalize: Literal["train"] | tuple[list[float], list[float]] | None = None,
        drop_last: bool = False,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1), ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0), ("limit", limit, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{type(self).__name__}: {name}={value}: give {least} or more")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.num_workers, self.seed, self.drop_last, self.limit = num_workers, seed, drop_last, limit
        self.augment, self.transform, self.normalize = augment, transform, normalize
        self._shuffle = True
        self._ready: Parts | None = None

    @abstractmethod
    def _parts(self) -> Parts:
        """The set, in 0..1, without crop and normalisation."""

    def setup(self, stage: str | None = None) -> None:
        """Load the set, once. What is asked for before, such as `num_classes`, loads it too."""
        if self._ready is None:
            parts = self._parts()
            settings, crop = parts.settings, None
            if self.augment is not None:
                if settings.any_length:
                    raise ValueError(f"{type(self).__name__}: augment is not for signals of different lengths")
                window = self.augment.window(settings.size)
                crop = None if window == settings.size else window
            if crop is not None and parts.test_settings is not None:
                raise ValueError(f"{type(self).__name__}: crop is not for test images of another size than training's")
            if len(set(parts.class_names)) < len(parts.class_names):
                raise ValueError(f"{type(self).__name__}: class_names={parts.class_names} names one twice")
            mean, std = self._normalization(parts.train, settings.channels)
            changed: dict[str, Any] = {"crop": crop, "mean": mean, "std": std}
            test = parts.test_settings
            self._ready = parts._replace(
                settings=settings._replace(**changed), test_settings=None if test is None else test._replace(**changed)
            )

    def with_seed(self: Data, seed: int) -> Data:
        """The set with order and augmentation by another seed; the items of each part stay where they are."""
        self.setup()
        seeded = copy.copy(self)
        seeded.seed = seed
        return seeded

    @property
    def parts(self) -> Parts:
        """Training, validation and test part; loads the set."""
        self.setup()
        assert self._ready is not None
        return self._ready

    @property
    def num_classes(self) -> int:
        """Classes."""
        return len(self.parts.class_names)

    @property
    def class_names(self) -> list[str]:
        """Their names, in the order of the labels."""
        return list(self.parts.class_names)

    @property
    def multi_label(self) -> bool:
        """Whether several classes may be there: labels are `[N, K]`."""
        return self.parts.multi_label

    @property
    def in_chans(self) -> int:
        """Channels."""
        return self.parts.settings.channels

    @property
    def image_size(self) -> tuple[int, ...]:
        """Size of a training image as a model sees it: (H, W), or (L,) for signals, the longest where they differ."""
        return self.parts.settings.window

    @property
    def any_length(self) -> bool:
        """Whether signals have different lengths, and batches a mask."""
        return self.parts.settings.any_length

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How raw input becomes a tensor, as plain JSON: `torchcaps.data.preprocess` reads it."""
        return self.parts.settings.spec()

    def train_dataloader(self) -> Loader:
        """Training batches, in another order each epoch."""
        parts = self.parts
        view = View(parts.train, parts.settings, self.seed, self.augment, self.transform)
        return self._loader(view, training=True)

    def val_dataloader(self) -> Loader | list[Loader]:
        """Validation batches; an empty list where there is no validation part."""
        parts = self.parts
        return [] if parts.val is None else self._loader(View(parts.val, parts.settings), training=False)

    def test_dataloader(self) -> Loader:
        """Test batches. ValueError where there is no test part."""
        parts = self.parts
        if parts.test is None:
            raise ValueError(f"{type(self).__name__} has no test part: give one, or a test_fraction above 0")
        return self._loader(View(parts.test, parts.test_settings or parts.settings), training=False)

    def predict_dataloader(self) -> Loader:
        """As `test_dataloader`."""
        return self.test_dataloader()

    def _loader(self, view: View, training: bool) -> Loader:
        rank, world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        schedule = Schedule(
            len(view), self.batch_size if training else self.eval_batch_size, training=training,
            shuffle=self._shuffle, seed=self.seed, drop_last=self.drop_last, rank=rank, world_size=world_size,
        )  # fmt: skip
        return Loader(view, schedule, self.num_workers)

    def _normalization(
        self, train: Part, channels: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
        if self.normalize is None:
            return None, None
        if self.normalize == "train":
            return mean_and_std(train, channels)
        mean, std = self.normalize
        if not len(mean) == len(std) == channels or min(std) <= 0:
            raise ValueError(
                f"{type(self).__name__}: normalize={self.normalize} must be a mean and a deviation above 0 for each of "
                f"{channels} channels"
            )
        return tuple(mean), tuple(std)


class LabelledData(ImageData):
    """A set of single items with labels, split where it does not come in parts.

    Test items are never trained on, nor are validation items.

    Args:
        val_fraction: Share of the training part that is set apart for validation where the set has no part for it, each
            class with its share. 0: no validation.
        test_fraction: The same for test, before validation.
        split_seed: Of these splits, and of `label_fraction`.
        label_fraction: Train on this share of the training part alone, each class with its share. A smaller share is
            part of a larger one.
        **common: The settings of `ImageData`.
    """

    def __init__(
        self,
        *,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        split_seed: int = 0,
        label_fraction: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= share < 1:
                raise ValueError(f"{type(self).__name__}: {name}={share} must be a share, from 0 to less than 1")
        if label_fraction is not None and not 0 < label_fraction <= 1:
            raise ValueError(f"{type(self).__name__}: label_fraction={label_fraction} must be a share, above 0 to 1")
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.split_seed, self.label_fraction = split_seed, label_fraction

    def with_label_fraction(self: Labelled, share: float) -> Labelled:
        """The set with this share of its training part alone; validation and test part are the same."""
        part = copy.copy(self)
        part.label_fraction, part._ready = share, None
        return part

    @abstractmethod
    def _load(self) -> "Loaded":
        """The set as it came."""

    def _parts(self) -> Parts:
        loaded = self._load()
        train, val, test, names = loaded.train, loaded.val, loaded.test, loaded.class_names
        cut_test = test is None and self.test_fraction > 0
        cut_val = val is None and self.val_fraction > 0
        if cut_test:
            rest, share = split_off(train.labels, self.test_fraction, self.split_seed, "test", names, 2 + cut_val)
            train, test = train.subset(rest), train.subset(share)
        if cut_val:
            rest, share = split_off(train.labels, self.val_fraction, self.split_seed, "val", names, 2)
            train, val = train.subset(rest), train.subset(share)
        settings = loaded.settings
        if (cut_test or cut_val) and isinstance(train, TensorPart):  # what is set apart says nothing about the scale
            settings = train.own_settings()
            for part in (train, val, test):
                if isinstance(part, TensorPart):
                    part.settings = settings
        if self.label_fraction is not None:
            n = len(train)
            count = max(len(names), int(self.label_fraction * n + 0.5))
            order = permutation(n, self.split_seed, "label fraction")
            train = train.subset(stratified(class_keys(train.labels), count, order))
        if self.limit is not None:
            train = train.subset(stratified(class_keys(train.labels), self.limit))
            val, test = (
                None if part is None else part.subset(stratified(class_keys(part.labels), self.limit))
                for part in (val, test)
            )
        return Parts(train, val, test, names, train.labels.dim() == 2, settings)


class Loaded(NamedTuple):
    """A set as it came; parts that it does not have are None."""

    train: StoredPart
    val: StoredPart | None
    test: StoredPart | None
    settings: Preprocessing
    class_names: list[str]


def mean_and_std(part: Part, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each channel, over all items of a part in epoch 0, in float64; what a mask leaves out does not count."""
    count, total, squares = 0.0, torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
    for first in range(0, len(part), 1000):
        x, _, *mask = part.take(0, np.arange(first, min(first + 1000, len(part))))
        x = x.double()
        count += float(mask[0].sum()) if mask else x.numel() / channels
        over = [0, *range(2, x.dim())]
        total += x.sum(over)
        squares += x.square().sum(over)
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    if not std.min() > 0:
        raise ValueError(f"channel {int(std.argmin())} is the same everywhere: it cannot be normalised, leave it out")
    return tuple(mean.tolist()), tuple(std.tolist())
