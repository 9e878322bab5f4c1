"""Sets composed on the fly from the images of another set: pairs side by side, overlapping pairs, affine test images.

Which images, where, and how many are functions of (seed, epoch, item). Training images are composed of training images,
validation images of validation images, test images of test images. For the latter two it is always epoch 0, and the
seed is the base's `split_seed`: the same images each time, whatever the seed of training. Over the epochs every image
comes first equally often, in the order of a permutation; its partner is drawn uniformly from all images of other
classes.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .augment import Augment, windows
from .module import ImageData, LabelledData, Parts
from .parts import Items, Part, StoredPart
from .random import integers, permutation, uniform

__all__ = ["AffineTest", "DiverseMultiMNIST", "MultiMNIST", "SideBySide"]

SHIFTED = Augment(shift=6)
AFFINE = Augment(shift=6, degrees=20, scale=(0.8, 1.2), each_axis=True, shear=11)

Overlay = Literal["add", "mean", "max"]
OVERLAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: (a + b).clamp_(max=1),
    "mean": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
}


class ComposedData(ImageData):
    """A set composed from the images of another.

    Args:
        base: The set of single images, each with one label. Its splits, `limit` and `label_fraction` hold; how images
            are augmented and normalised is said here and not there.
        train_size: Images of a training epoch; by default as many as `base` has.
        val_size: Validation images, likewise.
        test_size: Test images, likewise.
        **common: The settings of `ImageData`.
    """

    def __init__(
        self,
        base: LabelledData,
        *,
        train_size: int | None = None,
        val_size: int | None = None,
        test_size: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        name = type(self).__name__
        if base.augment is not None or base.transform is not None or base.normalize is not None:
            raise ValueError(
                f"{name}: its base gives images as they are: augment, transform, normalize belong to {name}"
            )
        sizes = train_size, val_size, test_size
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError(f"{name}: train_size, val_size, test_size = {sizes}: give 1 or more")
        self.base, self.sizes = base, sizes

    def prepare_data(self) -> None:
        """What the base has to prepare."""
        self.base.prepare_data()

    def _composed(
        self,
        how: Callable[[str, StoredPart, int, int], Part],
        canvas: tuple[int, ...],
        multi_label: bool,
        test_canvas: tuple[int, ...] | None = None,
    ) -> Parts:
        """`how("train" | "val" | "test", the base's part, number of images, seed)` for each part of the base."""
        base = self.base.parts
        made: list[Part | None] = []
        for name, part, size in zip(
            ("train", "val", "test"), (base.train, base.val, base.test), self.sizes, strict=True
        ):
            if part is None:
                made.append(None)
            else:
                assert isinstance(part, StoredPart)
                n = len(part) if size is None else size
                seed = self.seed if name == "train" else self.base.split_seed
                made.append(how(name, part, n if self.limit is None else min(n, self.limit), seed))
        settings = base.settings._replace(size=canvas)
        assert made[0] is not None
        return Parts(
            made[0], made[1], made[2], base.class_names, multi_label, settings,
            None if test_canvas is None else settings._replace(size=test_canvas),
        )  # fmt: skip

    def _canvas(self, pad: int = 0) -> tuple[int, int]:
        """(height, width) of the base's images with `pad` pixels on each side."""
        settings = self.base.parts.settings
        if self.base.multi_label or settings.kind != "image":
            raise ValueError(f"{type(self).__name__}: its base must be a set of images with one label each")
        return settings.size[0] + 2 * pad, settings.size[1] + 2 * pad


class SideBySide(ComposedData):
    """Two images of different classes joined at a side; the label says which two.

    Source: Su 2018, where networks trained on single digits are tested on two, one above the other. His pairs are the
    test digits and a random permutation of them, less those of equal digits; here each image has a partner of another
    class.

    Args:
        base: The set of single images; see `ComposedData` for this and the sizes.
        axis: "vertical" joins them one above the other, "horizontal" left and right.
        train_on: "pairs", or "single" to train and validate on single images, with the same kind of labels.
        **common: `train_size`, `val_size`, `test_size`, and the settings of `ImageData`.
    """

    def __init__(
        self,
        base: LabelledData,
        axis: Literal["vertical", "horizontal"] = "vertical",
        train_on: Literal["pairs", "single"] = "pairs",
        **common: Any,
    ) -> None:
        super().__init__(base, **common)
        if axis not in ("vertical", "horizontal") or train_on not in ("pairs", "single"):
            raise ValueError(
                f'SideBySide: axis={axis!r} and train_on={train_on!r}: take "vertical" or "horizontal", and "pairs" or '
                '"single"'
            )
        self.axis, self.train_on = axis, train_on

    def _parts(self) -> Parts:
        H, W = self._canvas()
        pair = (2 * H, W) if self.axis == "vertical" else (H, 2 * W)
        single, K = self.train_on == "single", self.base.num_classes

        def how(name: str, part: StoredPart, n: int, seed: int) -> Part:
            return Joined(part, n, seed, K, None if single and name != "test" else self.axis)

        return self._composed(how, (H, W) if single else pair, True, pair if single else None)


class OverlaidData(ComposedData):
    """Images laid over each other on a larger canvas.

    Args:
        base: The set of single images; see `ComposedData` for this and the sizes.
        pad: The canvas is larger than an image by so many pixels on each side.
        shift: Each image moves by up to so many pixels to each side, per axis. What leaves the canvas is cut off.
        overlay: "add" adds and clips at white; "mean" halves the contrast; "max" keeps the brighter pixel.
        **common: `train_size`, `val_size`, `test_size`, and the settings of `ImageData`.
    """

    def __init__(
        self, base: LabelledData, pad: int = 4, shift: int = 4, overlay: Overlay = "add", **common: Any
    ) -> None:
        super().__init__(base, **common)
        if min(pad, shift) < 0:
            raise ValueError(f"{type(self).__name__}: pad={pad} and shift={shift} are numbers of pixels, 0 or more")
        if overlay not in OVERLAYS:
            raise ValueError(f"{type(self).__name__}: overlay={overlay!r}: take one of {', '.join(OVERLAYS)}")
        self.pad, self.shift, self.overlay = pad, shift, overlay

    def _overlaid(self, single: float) -> Parts:
        canvas, K = self._canvas(self.pad), self.base.num_classes

        def how(name: str, part: StoredPart, n: int, seed: int) -> Part:
            return Overlapping(part, n, seed, K, self.pad, self.shift, single, self.overlay)

        return self._composed(how, canvas, True)


class MultiMNIST(OverlaidData):
    """Two overlapping images of different classes; the label says which two. Settings: `OverlaidData`.

    Source: Sabour, Frosst, Hinton 2017, section 6: digits on 36x36, each shifted by up to 4 pixels, added and clipped.
    Their set has 1000 partners for each digit; here a partner is drawn anew in each epoch.
    """

    def _parts(self) -> Parts:
        return self._overlaid(0.0)


class DiverseMultiMNIST(OverlaidData):
    """One image, or two overlapping ones of different classes; the label says which. Settings: `OverlaidData`.

    Source: Tsai, Srivastava, Goh, Salakhutdinov 2020, appendix B: digits on 36x36, each shifted by up to 4 pixels; one
    alone in 1/6 of the images. How two are laid over each other is not said there: `overlay`.

    Args:
        base: The set of single images.
        single: Share of images that show one alone.
        **common: The settings of `OverlaidData`.
    """

    def __init__(self, base: LabelledData, single: float = 1 / 6, **common: Any) -> None:
        super().__init__(base, **common)
        if not 0 <= single <= 1:
            raise ValueError(f"DiverseMultiMNIST: single={single} must be a share, 0 to 1")
        self.single = single

    def _parts(self) -> Parts:
        return self._overlaid(self.single)


class AffineTest(ComposedData):
    """Trained on images that are only shifted, tested on images under affine maps, all on a larger canvas.

    The test of Sabour, Frosst, Hinton 2017, section 5.2: training on digits anywhere on 40x40, test on affNIST (T.
    Tieleman 2013). Here the test images are made of those of `base`, by maps like those of affNIST. Its own files are
    other images, so their numbers and these are not the same thing.

    Args:
        base: The set of single images; see `ComposedData` for this and the sizes.
        pad: The canvas is larger than an image by so many pixels on each side.
        train: How training images are placed, and validation images, these each time in the same way.
        test: How test images are changed.
        **common: `train_size`, `val_size`, `test_size`, and the settings of `ImageData` but for `augment`.
    """

    def __init__(
        self, base: LabelledData, pad: int = 6, train: Augment = SHIFTED, test: Augment = AFFINE, **common: Any
    ) -> None:
        super().__init__(base, **common)
        if self.augment is not None or train.crop is not None or test.crop is not None:
            raise ValueError(
                "AffineTest: say how images are changed in train= and test=, not in augment=, and without crop"
            )
        if pad < 0:
            raise ValueError(f"AffineTest: pad={pad} is a number of pixels, 0 or more")
        self.pad, self.placed, self.changed = pad, train, test

    def _parts(self) -> Parts:
        def how(name: str, part: StoredPart, n: int, seed: int) -> Part:
            return Placed(part, n, seed, self.pad, self.changed if name == "test" else self.placed)

        return self._composed(how, self._canvas(self.pad), False)


class Composition(Part):
    """`size` images for each epoch, made of those of `part`."""

    def __init__(self, part: StoredPart, size: int, seed: int) -> None:
        self.part, self.size, self.seed = part, size, seed
        self._order = permutation(len(part), seed, "first")

    def __len__(self) -> int:
        return self.size

    def first(self, epoch: int, items: Items) -> Items:
        """Which image comes first in each item."""
        return self._order[(epoch * self.size + items) % len(self.part)]


class Placed(Composition):
    """One image on a canvas, changed."""

    def __init__(self, part: StoredPart, size: int, seed: int, pad: int, how: Augment) -> None:
        super().__init__(part, size, seed)
        self.pad, self.how = pad, how

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        x, y = self.part.take(epoch, self.first(epoch, items))
        return self.how(F.pad(x, (self.pad,) * 4), self.seed, epoch, items), y


class Partners:
    """For each image of a part one of another class, all of these equally likely."""

    def __init__(self, part: StoredPart, classes: int, seed: int) -> None:
        self.seed, self.labels = seed, part.labels.numpy()
        counts = np.bincount(self.labels, minlength=classes)
        if counts.max() == len(part):
            raise ValueError(
                f"pairs of different classes need two of them, but all {len(part)} images of a part are of class "
                f"{counts.argmax()}: give more images"
            )
        self.by_class = np.argsort(self.labels, kind="stable")
        self.start, self.count = np.cumsum(counts) - counts, counts

    def __call__(self, epoch: int, items: Items, first: Items) -> Items:
        """The partners of the images `first`, in these items."""
        own = self.labels[first]
        others = len(self.labels) - self.count[own]
        place = integers(others[:, None], self.seed, "partner", epoch, items)[:, 0]
        return self.by_class[np.where(place < self.start[own], place, place + self.count[own])]


class Joined(Composition):
    """Two images at a side; with no axis, one alone."""

    def __init__(self, part: StoredPart, size: int, seed: int, classes: int, axis: str | None) -> None:
        super().__init__(part, size, seed)
        self.classes, self.axis, self.partners = classes, axis, Partners(part, classes, seed)

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        first = self.first(epoch, items)
        x, y = self.part.take(epoch, first)
        if self.axis is None:
            return x, presence(y, self.classes)
        other, its = self.part.take(epoch, self.partners(epoch, items, first))
        joined = torch.cat([x, other], 2 if self.axis == "vertical" else 3)
        return joined, presence(y, self.classes) + presence(its, self.classes)


class Overlapping(Composition):
    """One image, or two, on a canvas."""

    def __init__(
        self,
        part: StoredPart,
        size: int,
        seed: int,
        classes: int,
        pad: int,
        shift: int,
        single: float,
        overlay: Overlay,
    ) -> None:
        super().__init__(part, size, seed)
        self.classes, self.partners = classes, Partners(part, classes, seed)
        self.pad, self.shift, self.single, self.overlay = pad, shift, single, overlay

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        first = self.first(epoch, items)
        x, y = self._placed("first shift", epoch, items, first)
        pair = uniform(self.seed, "single", epoch, items)[:, 0] >= self.single
        items, first = items[pair], first[pair]
        other, its = self._placed("partner shift", epoch, items, self.partners(epoch, items, first))
        both = torch.from_numpy(pair)
        x[both] = OVERLAYS[self.overlay](x[both], other)
        y[both] += its
        return x, y

    def _placed(self, purpose: str, epoch: int, items: Items, which: Items) -> tuple[Tensor, Tensor]:
        x, y = self.part.take(epoch, which)
        start = integers(2 * self.shift + 1, self.seed, purpose, epoch, items, 2)
        canvas = [side + 2 * self.pad for side in x.shape[2:]]
        return windows(x, start, canvas, self.pad + self.shift), presence(y, self.classes)


def presence(labels: Tensor, classes: int) -> Tensor:
    """Labels `[N]` as `[N, classes]`, 1 where the class is."""
    return F.one_hot(labels, classes).to(torch.float32)
