"""Your own data: arrays, `.npz` files, a folder of images for each class, a CSV of paths and labels."""

import csv
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from ._sources import Layout, Raw, from_arrays, from_files
from .module import LabelledData, Loaded
from .preprocessing import Kind

__all__ = ["CSV", "NPZ", "Arrays", "ImageFolder"]


class Arrays(LabelledData):
    """Arrays or tensors in memory.

    Data are signals `[n, L]` or `[n, C, L]`, images `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]`, or volumes. Signals
    of different lengths are a list of `[L]` or `[C, L]`. Bytes are divided by 255 and words of 16 bits by 65535; other
    numbers stay as they are where they lie in 0..1, and are otherwise mapped so that the smallest and the largest of
    the training part become 0 and 1.

    Labels are `[n]` or `[n, 1]`, whole numbers from 0 or names, or `[n, K]` of 0 and 1 where several may be there.

    Args:
        x: Training data.
        y: Their labels.
        x_val: Validation data, with y_val; without them a share of the training part is taken, see `val_fraction`.
        y_val: Their labels.
        x_test: Test data, with y_test; without them a share of the training part, see `test_fraction`.
        y_test: Their labels.
        class_names: In the order of the labels.
        kind: "signal", "image" or "volume" where the axes leave it open: by default `[n, a, b]` is an image, but for
            a = 1.
        layout: "channels_first" or "channels_last" where the axes leave it open.
        **common: The settings of `LabelledData` and `ImageData`.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        x_val: Any = None,
        y_val: Any = None,
        x_test: Any = None,
        y_test: Any = None,
        class_names: Sequence[str] | None = None,
        kind: Kind | None = None,
        layout: Layout | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for part, data, labels in (("val", x_val, y_val), ("test", x_test, y_test)):
            if (data is None) != (labels is None):
                raise ValueError(f"Arrays: x_{part} and y_{part} come together: give both or none")
        self._raw_train = Raw(x, y, "x", "y")
        self._raw_val = None if x_val is None else Raw(x_val, y_val, "x_val", "y_val")
        self._raw_test = None if x_test is None else Raw(x_test, y_test, "x_test", "y_test")
        self._names, self.kind, self.layout = class_names, kind, layout

    def _load(self) -> Loaded:
        return from_arrays(self._raw_train, self._raw_val, self._raw_test, self._names, self.kind, self.layout)


class NPZ(LabelledData):
    """An `.npz` file: `train_images`, `train_labels`, the same for `val_` and `test_`, as in MedMNIST; or `x` and `y`.

    Parts that are not there are split off. What the arrays may be says `Arrays`. Signals of different lengths are
    filled up to the longest, and `train_lengths`, ... (or `lengths`) say how long each one is.

    Args:
        path: The file.
        class_names: In the order of the labels.
        kind: See `Arrays`.
        layout: See `Arrays`.
        **common: The settings of `LabelledData` and `ImageData`.
    """

    def __init__(
        self,
        path: str,
        class_names: list[str] | None = None,
        kind: Kind | None = None,
        layout: Layout | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.path, self._names, self.kind, self.layout = path, class_names, kind, layout

    def _load(self) -> Loaded:
        arrays = _read_npz(Path(self.path))
        named = "train_images" in arrays or "train_labels" in arrays
        train = _raw_of(arrays, *(("train_images", "train_labels") if named else ("x", "y")), self.path)
        val, test = (
            _raw_of(arrays, f"{part}_images", f"{part}_labels", self.path)
            if {f"{part}_images", f"{part}_labels"} & arrays.keys()
            else None
            for part in ("val", "test")
        )
        return from_arrays(train, val, test, self._names, self.kind, self.layout)


class ImageFolder(LabelledData):
    """A folder of images for each class, `root/cat/1.png`, or `root/train/cat/1.png` and the same for val and test.

    Args:
        root: The folder.
        image_size: All images are brought to this size, one number or (height, width); by default to the median height
            and width of the training images.
        channels: 1 reads all images as grey, 3 as colours; by default as they are, all alike.
        in_memory: Keep the images, read, in memory; by default where they take up to 1 GiB there. Otherwise each is
            read when it is needed: take some num_workers then.
        **common: The settings of `LabelledData` and `ImageData`.
    """

    def __init__(
        self,
        root: str,
        image_size: int | tuple[int, int] | None = None,
        channels: int | None = None,
        in_memory: bool | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.root, self._size, self.channels, self.in_memory = root, image_size, channels, in_memory

    def _load(self) -> Loaded:
        root = Path(self.root)
        if not root.is_dir():
            raise FileNotFoundError(f"ImageFolder: there is no folder {root}: give root=, a folder of class folders")
        inside = {folder.name: folder for folder in _folders(root)}
        val = next((inside[name] for name in ("val", "valid", "validation") if name in inside), None)
        test = inside.get("test")
        split = "train" in inside
        source = inside["train"] if split else root
        names = [folder.name for folder in _folders(source)]
        if not names:
            raise FileNotFoundError(f"ImageFolder: {source} holds no folders: give each class a folder of images there")
        train = _listed(source, names)
        val_files, test_files = (_listed(part, names) if split and part else None for part in (val, test))
        for k, name in enumerate(names):
            if not (train[1] == k).any():
                raise ValueError(
                    f"ImageFolder: {source / name} is empty, it holds no image ({', '.join(IMG_EXTENSIONS)}): put "
                    "some in, or take the folder away"
                )
        return from_files(train, val_files, test_files, names, self._size, self.channels, self.in_memory)


class CSV(LabelledData):
    """A table of image files and labels, with names of columns in its first line.

    Args:
        path: The file; columns are separated by commas, in a `.tsv` by tabs.
        root: The folder that paths are relative to; by default the folder of the table.
        image_column: The column of paths.
        label_column: The column of labels, names of any kind.
        split_column: The column that says train, val or test for each image. Where the table has none, splits are made.
        separator: What stands between the labels of an image that may have several, such as "|". No label: nothing.
        class_names: In the order that labels shall have; by default sorted.
        image_size: See `ImageFolder`.
        channels: See `ImageFolder`.
        in_memory: See `ImageFolder`.
        **common: The settings of `LabelledData` and `ImageData`.
    """

    def __init__(
        self,
        path: str,
        root: str | None = None,
        image_column: str = "path",
        label_column: str = "label",
        split_column: str = "split",
        separator: str | None = None,
        class_names: list[str] | None = None,
        image_size: int | tuple[int, int] | None = None,
        channels: int | None = None,
        in_memory: bool | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.path, self.root = Path(path), Path(path).parent if root is None else Path(root)
        self.columns = image_column, label_column, split_column
        self.separator, self._names = separator, class_names
        self._size, self.channels, self.in_memory = image_size, channels, in_memory

    def _load(self) -> Loaded:
        rows = self._rows()
        if not any(split == "train" for split, *_ in rows):
            raise ValueError(f"CSV: {self.path} has no training images")
        seen = {label for split, _, labels, _ in rows if split == "train" for label in labels}
        numbers = all(label.isdecimal() for label in seen)
        names = self._names if self._names is not None else sorted(seen, key=int if numbers else None)
        if missing := [name for name in names if name not in seen]:
            raise ValueError(f"CSV: {self.path}: class {missing[0]!r} is empty, no training image has it")
        files: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
        found: dict[str, list[Any]] = {"train": [], "val": [], "test": []}
        for split, file, labels, line in rows:
            if unknown := [label for label in labels if label not in names]:
                raise ValueError(
                    f"CSV: {self.path}, line {line}: label {unknown[0]!r} is out of range: the training images have "
                    f"{', '.join(names)}"
                )
            numbered = [names.index(label) for label in labels]
            files[split].append(file)
            found[split].append([float(k in numbered) for k in range(len(names))] if self.separator else numbered[0])
        train, val, test = (
            (files[part], torch.tensor(found[part])) if files[part] else None for part in ("train", "val", "test")
        )
        assert train is not None
        return from_files(train, val, test, names, self._size, self.channels, self.in_memory)

    def _rows(self) -> list[tuple[str, Path, list[str], int]]:
        """Part, file, labels and line of each image."""
        image, label, split = self.columns
        rows = []
        if not self.path.is_file():
            raise FileNotFoundError(f"CSV: there is no file {self.path}")
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, delimiter="\t" if self.path.suffix == ".tsv" else ",")
            if missing := [column for column in (image, label) if column not in (table.fieldnames or ())]:
                raise ValueError(
                    f"CSV: {self.path} has no column {missing[0]!r}, but {', '.join(table.fieldnames or ('none',))}: "
                    "give image_column= and label_column="
                )
            for row in table:
                line = table.line_num
                place, text = self.root / (row[image] or ""), (row[label] or "").strip()
                if not place.is_file():
                    raise FileNotFoundError(f"CSV: {self.path}, line {line}: there is no file {place}: give root=")
                labels = (
                    [text] if self.separator is None else [s.strip() for s in text.split(self.separator) if s.strip()]
                )
                if labels == [""]:
                    raise ValueError(f"CSV: {self.path}, line {line}: no label")
                part = _SPLITS.get((row.get(split) or "train").strip().lower())
                if part is None:
                    raise ValueError(
                        f"CSV: {self.path}, line {line}: {split} is {row[split]!r}: take train, val or test"
                    )
                rows.append((part, place, labels, line))
        return rows


_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _listed(root: Path, names: list[str]) -> tuple[list[Path], Tensor]:
    files, labels = [], []
    for folder in _folders(root):
        if folder.name not in names:
            raise ValueError(
                f"ImageFolder: {folder} is out of range, no class of the training part: these are {', '.join(names)}"
            )
        found = sorted(
            p for p in folder.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS and not p.name.startswith(".")
        )
        files += found
        labels += [names.index(folder.name)] * len(found)
    return files, torch.tensor(labels, dtype=torch.int64)


def _read_npz(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"NPZ: there is no file {path}")
    try:
        with zipfile.ZipFile(path):  # numpy would read a .npy, and a pickle, as well
            pass
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"NPZ: {path} cannot be read ({error}): write it with numpy.savez, with arrays of numbers; signals of "
            "different lengths filled up to the longest, and their lengths"
        ) from error


def _raw_of(arrays: dict[str, Any], x: str, y: str, path: str) -> Raw:
    if missing := [key for key in (x, y) if key not in arrays]:
        raise ValueError(
            f"NPZ: {path} has no {missing[0]!r}, but {', '.join(sorted(arrays)) or 'nothing'}: give train_images and "
            "train_labels (val_, test_ likewise), or x and y"
        )
    part = x.removesuffix("images")
    lengths = arrays.get("lengths" if part == "x" else f"{part}lengths")
    return Raw(arrays[x], arrays[y], f"{x} of {path}", f"{y} of {path}", lengths)
