"""From what a user has, arrays or image files, to parts: every look at whether it makes sense is here."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .module import Loaded
from .parts import FilePart, StoredPart, TensorPart
from .preprocessing import AXES, DIMS, Header, Kind, Preprocessing, as_tensor, check_scale, full_scale, read_header

__all__ = ["Layout", "Raw", "from_arrays", "from_files"]

Layout = Literal["channels_first", "channels_last"]

IN_MEMORY = 2**30
"""Bytes of image files, read, that are kept in memory by default."""

MOST_CLASSES = 1_000_000
"""Beyond that a number is no label."""


class Raw(NamedTuple):
    """Arrays of one part, and what to call it: `train_images of data.npz`."""

    x: Any
    y: Any
    x_name: str
    y_name: str
    lengths: Any = None


def from_arrays(
    train: Raw,
    val: Raw | None,
    test: Raw | None,
    class_names: Sequence[str] | None = None,
    kind: Kind | None = None,
    layout: Layout | None = None,
) -> Loaded:
    """A set in memory. ValueErrors name the array and the item."""
    y, names = _labels(train, class_names)
    _all_there(y, names, train.y_name)
    if y.dim() == 2 and y.sum(1).eq(1).all():
        warnings.warn(
            f"{train.y_name} is {list(y.shape)} with a single 1 in each row. It is taken for several labels that may "
            "be there at once; where each item has one, give y.argmax(1)",
            stacklevel=2,
        )
    x, lengths, kind = _items(train, kind, layout)
    low, high = _value_range(train.x, x, lengths, train.x_name)
    settings = Preprocessing(kind, x.shape[1], tuple(x.shape[2:]), low, high, any_length=lengths is not None)
    parts = [_part(train, x, y, lengths, settings)]
    for other in (val, test):
        if other is None:
            continue
        y, _ = _labels(other, names)
        if y.dim() != parts[0].labels.dim():
            raise ValueError(f"{other.y_name} holds one label for each item or several, {train.y_name} the other way")
        x, lengths, _ = _items(other, kind, layout)
        if full_scale(other.x, x) != full_scale(train.x, parts[0].raw):
            raise ValueError(
                f"{other.x_name} and {train.x_name} hold numbers of different types, such as bytes and fractions: make "
                "them alike"
            )
        if settings.any_length != (lengths is not None):
            raise ValueError(f"{other.x_name} and {train.x_name}: either both have lengths or none")
        if x.shape[1] != settings.channels or (lengths is None and tuple(x.shape[2:]) != settings.size):
            raise ValueError(
                f"{other.x_name} is {list(x.shape)}, but {train.x_name} is {list(parts[0].raw.shape)} (with channels "
                "first): all parts need the same channels and size"
            )
        check_scale(other.x, _there(x, lengths), settings, other.x_name, f"{train.x_name} holds")
        parts.append(_part(other, x, y, lengths, settings))
    longest = (max(p.raw.shape[-1] for p in parts),)
    if settings.any_length and longest != settings.size:
        settings = settings._replace(size=longest)
        parts = [TensorPart(p.raw, p.labels, settings, p.lengths) for p in parts]
    at_test = 1 if val is None else 2
    return Loaded(
        parts[0], None if val is None else parts[1], None if test is None else parts[at_test], settings, names
    )


def from_files(
    train: tuple[list[Path], Tensor],
    val: tuple[list[Path], Tensor] | None,
    test: tuple[list[Path], Tensor] | None,
    class_names: list[str],
    image_size: int | tuple[int, int] | None,
    channels: int | None,
    in_memory: bool | None,
) -> Loaded:
    """A set of image files, brought to one size. Errors name the file."""
    files = [file for part in (train, val, test) if part is not None for file in part[0]]
    headers: list[Header] = []
    if channels is None or image_size is None:
        headers = [read_header(file) for file in files]
    if channels is None:
        channels = headers[0].channels
        for file, header in zip(files, headers, strict=True):
            if header.channels != channels:
                grey, colour = (files[0], file) if channels == 1 else (file, files[0])
                raise ValueError(
                    f"{grey} is grey and {colour} has colours: give channels=1 to read all as grey, or channels=3"
                )
    if image_size is None:  # every side as half of the training images have it, at most
        height, width = np.median([header.size for header in headers[: len(train[0])]], axis=0)
        size = int(height), int(width)
    else:
        size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    deep = (headers or [read_header(files[0])])[0].deep
    settings = Preprocessing("image", channels, size, 0.0, 65535.0 if deep else 255.0)
    if in_memory is None:
        in_memory = len(files) * channels * size[0] * size[1] * (4 if deep else 1) <= IN_MEMORY

    def part(listed: tuple[list[Path], Tensor]) -> StoredPart:
        files = FilePart(*listed, settings)
        return files.in_memory() if in_memory else files

    val_part, test_part = (None if listed is None else part(listed) for listed in (val, test))
    return Loaded(part(train), val_part, test_part, settings, class_names)


def _part(raw: Raw, x: Tensor, y: Tensor, lengths: Tensor | None, settings: Preprocessing) -> TensorPart:
    if len(x) != len(y):
        raise ValueError(f"{raw.x_name} has {len(x)} items, but {raw.y_name} has {len(y)} labels")
    return TensorPart(x, y, settings, lengths)


def _items(raw: Raw, kind: Kind | None, layout: Layout | None) -> tuple[Tensor, Tensor | None, Kind]:
    """`[n, C, *size]`, the lengths where they differ, and what they are."""
    name = raw.x_name
    if isinstance(raw.x, list | tuple) or (isinstance(raw.x, np.ndarray) and raw.x.dtype == object and raw.x.ndim):
        items = [as_tensor(item, f"{name}[{i}]") for i, item in enumerate(raw.x)]
        if len({item.shape for item in items}) > 1:
            return _ragged(items, name, kind)
        x = torch.stack(items) if items else torch.empty(0)
    else:
        x = as_tensor(raw.x, name)
    if x.dim() < 2 or not x.numel():
        raise ValueError(f"{name} is {list(x.shape)}: data are [n, L], [n, H, W], [n, H, W, C] or [n, C, H, W]")
    if kind is None:
        few, many = min(x.shape[1:]), max(x.shape[1:])
        signal = x.dim() == 2 or (x.dim() == 3 and (raw.lengths is not None or x.shape[1] == 1 or few <= 4 < many))
        kind = "signal" if signal else "volume" if x.dim() == 5 else "image"
    dims, axes = DIMS[kind], AXES[kind]
    if x.dim() == dims + 1:
        x = x[:, None]
    elif x.dim() != dims + 2:
        raise ValueError(f"{name} is {list(x.shape)}, but a {kind} is [n, {axes}], [n, C, {axes}] or [n, {axes}, C]")
    elif (layout or _layout(x, kind, name)) == "channels_last":
        x = x.movedim(-1, 1).contiguous()
    if raw.lengths is None:
        return x, None, kind
    given = as_tensor(raw.lengths, f"lengths of {name}").flatten()
    lengths = given.long()
    if (lengths != given).any():
        i = int((lengths != given).nonzero()[0])
        raise ValueError(f"lengths of {name}: [{i}] is {given[i]:g}: give whole numbers")
    if kind != "signal" or lengths.shape != x.shape[:1] or not 1 <= lengths.min() <= lengths.max() <= x.shape[-1]:
        raise ValueError(
            f"lengths of {name}: {len(lengths)} numbers from {lengths.min()} to {lengths.max()} do not fit a {kind} "
            f"{list(x.shape)}: give one for each item, 1 to {x.shape[-1]}"
        )
    return x, lengths, kind


def _ragged(items: list[Tensor], name: str, kind: Kind | None) -> tuple[Tensor, Tensor, Kind]:
    items = [item[None] if item.dim() == 1 else item for item in items]
    for i, item in enumerate(items):
        if item.dim() != 2 or item.shape[0] != items[0].shape[0] or not item.shape[1] or kind not in (None, "signal"):
            raise ValueError(
                f"{name}[{i}] is {list(item.shape)} and {name}[0] is {list(items[0].shape)}: signals alone can differ, "
                "each [L] or [C, L] with the same C; bring images to one size"
            )
    lengths = torch.tensor([item.shape[1] for item in items])
    x = torch.zeros(len(items), items[0].shape[0], int(lengths.max()), dtype=items[0].dtype)
    for row, item in zip(x, items, strict=True):
        row[:, : item.shape[1]] = item
    return x, lengths, "signal"


def _layout(x: Tensor, kind: Kind, name: str) -> Layout:
    if kind == "signal":
        if x.shape[1] > x.shape[2]:
            raise ValueError(
                f'{name} is {list(x.shape)}: give layout="channels_last" for signals [n, L, C], "channels_first" where '
                f'there are {x.shape[1]} channels of length {x.shape[2]}, or kind="image"'
            )
        return "channels_first"
    first, last = x.shape[1] <= 4, x.shape[-1] <= 4
    if first == last:
        raise ValueError(
            f'{name} is {list(x.shape)}: give layout="channels_first" or "channels_last", as its channels may be the '
            f"{x.shape[1]} or the {x.shape[-1]}" + (', or kind="volume"' if x.dim() == 4 else "")
        )
    return "channels_first" if first else "channels_last"


def _value_range(raw: Any, x: Tensor, lengths: Tensor | None, name: str) -> tuple[float, float]:
    """The raw values that become 0 and 1."""
    if (full := full_scale(raw, x)) is not None:
        return 0.0, full
    x = _there(x, lengths)
    low, high = x.min().item(), x.max().item()
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    if low == high:
        raise ValueError(f"{name} holds {low:g} and nothing else")
    return low, high


def _there(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The numbers of signals without what fills them up."""
    return x if lengths is None else x.movedim(1, -1)[torch.arange(x.shape[-1]) < lengths[:, None]]


def _labels(raw: Raw, names: Sequence[str] | None) -> tuple[Tensor, list[str]]:
    """`[n]` of int64 or `[n, K]` of float32, and the names of the classes."""
    name = raw.y_name
    y = _label_array(raw.y, name)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or not y.size:
        raise ValueError(f"{name} is {list(y.shape)}: labels are [n], or [n, K] of 0 and 1 where several may be there")
    if y.dtype.kind in "US" and y.ndim == 1:
        return _named(y.astype(str), names, name)
    if y.dtype.kind not in "buif":
        raise ValueError(f"{name} holds {y.dtype}: labels are whole numbers from 0, or names")
    if y.ndim == 2:
        wrong = ~np.isin(y, (0, 1)).all(1)
        if wrong.any():
            raise ValueError(
                f"{name}[{int(wrong.argmax())}] holds other numbers than 0 and 1: [n, K] says which are there"
            )
        K = len(names) if names is not None else y.shape[1]
        if y.shape[1] != K:
            raise ValueError(f"{name} speaks of {y.shape[1]} classes, but there are {K}: {', '.join(names or ())}")
        return torch.from_numpy(y.astype(np.float32)), _or_numbers(names, K)
    K = len(names) if names is not None else min(int(y[np.isfinite(y)].max(initial=0)) + 1, MOST_CLASSES)
    wrong = ~((y >= 0) & (y < K) & (y == np.floor(y)))
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{name}[{i}] = {y[i]:g} is out of range: labels are whole numbers, here 0 to {K - 1}")
    return torch.from_numpy(y.astype(np.int64)), _or_numbers(names, K)


def _label_array(y: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    except ValueError as error:
        raise ValueError(f"{name} holds rows of different lengths: labels are [n], or [n, K] of 0 and 1") from error
    if array.dtype == object and array.ndim and all(isinstance(label, str) for label in array.flat):
        return array.astype(str)  # as tables of pandas hold names
    return array


def _named(y: NDArray[np.str_], names: Sequence[str] | None, where: str) -> tuple[Tensor, list[str]]:
    found = list(names) if names is not None else sorted(set(y.tolist()))
    number = {name: i for i, name in enumerate(found)}
    for i, label in enumerate(y.tolist()):
        if label not in number:
            raise ValueError(f"{where}[{i}] = {label!r} is out of range: the classes are {', '.join(found)}")
    return torch.tensor([number[label] for label in y.tolist()]), found


def _all_there(y: Tensor, names: Sequence[str], where: str) -> None:
    """ValueError where a class is nowhere in the training part."""
    there = y.sum(0) if y.dim() == 2 else torch.bincount(y, minlength=len(names))
    if not there.min() > 0:
        k = int(there.argmin())
        raise ValueError(
            f"{where}: class {names[k]!r} ({k} of 0 to {len(names) - 1}) is empty, no item has it: number the classes "
            "without gaps"
        )


def _or_numbers(names: Sequence[str] | None, K: int) -> list[str]:
    return [str(k) for k in range(K)] if names is None else list(names)
