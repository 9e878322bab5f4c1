"""Your own data: arrays, `.npz` files, a folder of images for each class, a CSV of paths and labels."""

import csv
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._sources import Layout, Raw, from_arrays, from_files
from .module import LabelledData, Loaded
from .preprocessing import IMAGES, Kind

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
            a = 1, or where one of both is 4 at most and the other is larger.
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

    Parts may also be called `x_train` and `y_train`, or `x` and `y`; `x_val`, `x_test` likewise. Those that are not
    there are split off. What the arrays may be says `Arrays`. Signals of different lengths are filled up to the
    longest, and `train_lengths`, `val_lengths`, `test_lengths` (or `lengths`, of x) say how long each one is.

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
        names = [_names_of(arrays, part, self.path) for part in ("train", "val", "test")]
        train, val, test = (
            Raw(arrays[n[0]], arrays[n[1]], f"{n[0]} of {self.path}", f"{n[1]} of {self.path}", arrays.get(n[2]))
            if n
            else None
            for n in names
        )
        if train is None:
            raise ValueError(
                f"NPZ: {self.path} has no 'x', but {', '.join(sorted(arrays)) or 'nothing'}: give train_images and "
                "train_labels (val_, test_ likewise), or x and y"
            )
        read = [key for n in names for key in n if key in arrays]
        for key in sorted(arrays.keys() - set(read)):
            if {*_PARTS, "lengths"} & set(re.split("[^a-z]+", key.lower())):
                raise ValueError(
                    f"NPZ: {self.path} holds {key}, which is not read beside {', '.join(read)}: call parts "
                    "train_images, train_labels and train_lengths, val_ and test_ likewise, or take it out"
                )
        return from_arrays(train, val, test, self._names, self.kind, self.layout)


class ImageFolder(LabelledData):
    """A folder of images for each class, `root/cat/1.png`, or `root/train/cat/1.png` and the same for val and test.

    Parts may also be called training, valid, validation and testing, in small letters or capitals.

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
        parts = _parts_in(root)
        source = parts.get("train", root)
        names = [folder.name for folder in _folders(source)]
        if not names:
            raise FileNotFoundError(f"ImageFolder: {source} holds no folders: give each class a folder of images there")
        train = _listed(source, names)
        val_files, test_files = (_listed(parts[part], names) if part in parts else None for part in ("val", "test"))
        for part, files in (("val", val_files), ("test", test_files)):
            if files is not None and not files[0]:
                raise ValueError(
                    f"ImageFolder: {parts[part]} is empty, it holds no image in a folder of a class "
                    f"({', '.join(names)}): put some in, or take the folder away"
                )
        for k, name in enumerate(names):
            if not (train[1] == k).any():
                raise ValueError(
                    f"ImageFolder: {source / name} is empty, it holds no image ({', '.join(IMAGES)}): put "
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
            An image stands in one line alone.
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
        if separator == "":
            raise ValueError("CSV: separator='' separates nothing: give what stands between labels, such as '|'")
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
        rows: list[tuple[str, Path, list[str], int]] = []
        if not self.path.is_file():
            raise FileNotFoundError(f"CSV: there is no file {self.path}")
        seen: dict[str, int] = {}
        there, lines = self._table()
        image, label, split = (self._column(there, column) for column in self.columns)
        for line, row in lines:
            place, text = self.root / (row[image] or ""), (row[label] or "").strip()
            if not place.is_file():
                raise FileNotFoundError(f"CSV: {self.path}, line {line}: there is no file {place}: give root=")
            labels = [text] if self.separator is None else [s.strip() for s in text.split(self.separator) if s.strip()]
            if labels == [""]:
                raise ValueError(f"CSV: {self.path}, line {line}: no label")
            part = _PARTS.get((row[split] or "").strip().lower()) if split else "train"
            if part is None:
                raise ValueError(
                    f"CSV: {self.path}, line {line}: {split} is {row[split] or ''!r}: take train, val or test"
                )
            first = seen.setdefault(os.path.normpath(place), line)
            if first != line:
                raise ValueError(
                    f"CSV: {self.path}: {place} is in line {first} and in line {line}: give each image one line, "
                    "for several labels with separator="
                )
            rows.append((part, place, labels, line))
        return rows

    def _table(self) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
        """Names of columns, and the rows with the numbers of their lines. ValueError where it is no table in UTF-8."""
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, delimiter="\t" if self.path.suffix == ".tsv" else ",", strict=True)
            try:
                return list(table.fieldnames or ()), [(table.line_num, row) for row in table]
            except UnicodeDecodeError as error:
                raise ValueError(f"CSV: {self.path} is no text in UTF-8 ({error}): save it as UTF-8") from error
            except csv.Error as error:
                raise ValueError(
                    f"CSV: {self.path}, line {table.line_num}: {error}: mend it there, or an open quotation mark above"
                ) from error

    def _column(self, there: list[str], wanted: str) -> str:
        """The column of this name, small letters and capitals being the same; "" where there is no split column."""
        found = [wanted] if wanted in there else [c for c in there if c.strip().lower() == wanted.strip().lower()]
        if len(found) == 1:
            return found[0]
        split = self.columns[2]
        if wanted == split == "split" and not found:
            return ""
        raise ValueError(
            f"CSV: {self.path} has no column {wanted!r}, but {', '.join(there) or 'none'}: give "
            f"{'split_column=' if wanted == split else 'image_column= and label_column='}"
        )


_PARTS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
"""How parts are called, in small letters."""


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _parts_in(root: Path) -> dict[str, Path]:
    """The folders of a root that are parts and not classes, by "train", "val" and "test"; none where it holds classes.

    Raises ValueError where it cannot be told.
    """
    parts: dict[str, Path] = {}
    classes = []
    for folder in _folders(root):
        part = _PARTS.get(folder.name.lower())
        if part is None:
            classes.append(folder)
        elif part in parts:
            raise ValueError(f"ImageFolder: {parts[part]} and {folder} are both called {part} data: keep one of them")
        else:
            parts[part] = folder
    if parts and (beside := [folder for folder in classes if next(_images(folder), None)]):
        raise ValueError(
            f"ImageFolder: {root} holds {', '.join(f.name for f in parts.values())}, which is a part, beside "
            f"{', '.join(f.name for f in beside)}: put classes into train/, val/ and test/, or give the folder another "
            "name if it is a class"
        )
    if parts and "train" not in parts:
        raise ValueError(
            f"ImageFolder: {root} holds {', '.join(f.name for f in parts.values())}, but no folder train: add one, or "
            "put the folders of the classes there"
        )
    for folder in parts.values() if parts else [root]:
        for inner in (inner for each in _folders(folder) for inner in _folders(each)):
            if inner.name.lower() in _PARTS and next(_images(inner), None):
                raise ValueError(
                    f"ImageFolder: {inner} is named like a part, but lies in the folder of a class: give root= the "
                    "folder in which train/ and test/ lie, with the classes in them"
                )
    return parts


def _images(folder: Path) -> Iterator[Path]:
    """The image files in a folder and those in it, but for hidden ones."""
    hidden = re.compile(r"(^|[/\\])\.")
    return (
        p for p in folder.rglob("*") if p.suffix.lower() in IMAGES and not hidden.search(str(p.relative_to(folder)))
    )


def _listed(root: Path, names: list[str]) -> tuple[list[Path], Tensor]:
    files, labels = [], []
    for folder in _folders(root):
        if folder.name not in names:
            raise ValueError(
                f"ImageFolder: {folder} is out of range, no class of the training part: these are {', '.join(names)}"
            )
        found = sorted(_images(folder))
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
            f"NPZ: {path} cannot be read ({error}): write it with numpy.savez, with arrays of numbers, and names as "
            "y.astype(str); signals of different lengths filled up to the longest, and their lengths"
        ) from error


def _names_of(arrays: dict[str, Any], part: str, path: str) -> tuple[str, ...]:
    """What data, labels and lengths of a part are called, out of the names they may have; () where it is not there."""
    pairs = [(f"{part}_images", f"{part}_labels"), (f"x_{part}", f"y_{part}"), *([("x", "y")] * (part == "train"))]
    there = [pair for pair in pairs if set(pair) & arrays.keys()]
    if not there:
        return ()
    x, y = there[0]
    if len(there) > 1:
        raise ValueError(f"NPZ: {path} holds {x} and {there[1][0]}, both {part} data: take one of them out")
    if missing := [key for key in (x, y) if key not in arrays]:
        raise ValueError(
            f"NPZ: {path} has no {missing[0]!r}, but {', '.join(sorted(arrays))}: {x} and {y} come together"
        )
    return x, y, "lengths" if x == "x" else f"{part}_lengths"
