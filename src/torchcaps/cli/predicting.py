"""`torchcaps predict RUN FILE ...`: a label and its probability for images, arrays, or folders of these.

A checkpoint says all it takes: the model, the names of the classes, and how a file becomes a tensor. The answer is a
table on the terminal, or a CSV with every probability.
"""

import argparse
import csv
import io
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.cli.loading import load
from torchcaps.data import preprocess
from torchcaps.data.preprocessing import IMAGES
from torchcaps.run.files import check_place, write_whole
from torchcaps.training import LoadedModel

__all__ = ["read_inputs", "run"]

ARRAYS = (".npy", ".npz")

LENGTHS = {"x": "lengths", "test_images": "test_lengths", "x_test": "test_lengths", "images": "lengths"}
"""What the array of inputs may be called in an .npz, the first that is there being taken, and what its lengths are."""

NAMED = 20
"""So many inputs that were left out are named."""

Array = np.ndarray[Any, Any]


def run(command: str, arguments: list[str]) -> None:
    """The command. What cannot be read is left out and named at the end: ValueError where there was any."""
    parser = argparse.ArgumentParser(prog="torchcaps predict", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("files", nargs="+", help="images; .npy or .npz with items one after the other; folders")
    parser.add_argument("--out", type=Path, help="write a CSV with all probabilities here")
    parser.add_argument("--batch_size", type=int, default=64)
    chosen = parser.parse_args(arguments)
    if chosen.batch_size < 1:
        raise ValueError(f"--batch_size {chosen.batch_size}: give 1 or more")
    if chosen.out:
        check_place(chosen.out)
    loaded = load(chosen.run)
    if loaded.preprocessing is None:
        raise ValueError(
            f"{chosen.run} does not say how a file becomes a tensor: it was trained on tensors of your own"
        )
    names = loaded.class_names or [str(k) for k in range(loaded.config["num_classes"])]
    left_out: list[ValueError] = []
    inputs = read_inputs(chosen.files, loaded.preprocessing, left_out)
    rows = list(_predict(loaded, inputs, chosen.batch_size))
    if not rows:
        more = f" ({len(left_out) - 1} more cannot be taken)" if len(left_out) > 1 else ""
        raise ValueError(f"{left_out[0]}{more}")
    if chosen.out:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["input", "label", *names])
        writer.writerows([name, _label(p, names, loaded), *(f"{x:.6f}" for x in p)] for name, p in rows)
        write_whole(chosen.out, _readable(text.getvalue()))
        _say(f"{chosen.out} holds {len(rows)} predictions")
    else:
        for name, p in rows:
            sure = "" if loaded.multi_label else f"{float(p.max()):8.1%}"
            _say(f"{_label(p, names, loaded):<20}{sure}  {name}")
    if left_out:
        sys.stdout.flush()
        for error in left_out[:NAMED]:
            print(f"left out: {error}", file=sys.stderr)
        raise ValueError(
            f"{len(left_out)} of {len(left_out) + len(rows)} inputs were left out, "
            f"{'named above' if len(left_out) <= NAMED else f'the first {NAMED} are named above'}: mend them, or take "
            "them away"
        )


def _say(line: str) -> None:
    """Print; what the terminal has no letters for is written as numbers."""
    encoding = sys.stdout.encoding or "utf-8"
    print(_readable(line).encode(encoding, "backslashreplace").decode(encoding))


def _readable(text: str) -> str:
    """Names of files that are no text, or of which the system did not know that they are."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _label(p: Tensor, names: list[str], loaded: LoadedModel) -> str:
    if loaded.multi_label:
        return ";".join(name for name, x in zip(names, p, strict=True) if x > loaded.threshold)
    return names[int(p.argmax())]


def _predict(loaded: LoadedModel, inputs: Iterator[tuple[str, Tensor]], size: int) -> Iterator[tuple[str, Tensor]]:
    waiting: list[tuple[str, Tensor]] = []

    def answer() -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            scores = loaded.model(torch.stack([x for _, x in waiting]))
        yield from zip([name for name, _ in waiting], loaded.probabilities(scores), strict=True)
        waiting.clear()

    for named in inputs:
        if waiting and (len(waiting) == size or waiting[0][1].shape != named[1].shape):
            yield from answer()
        waiting.append(named)
    if waiting:
        yield from answer()


def read_inputs(
    files: list[str], spec: dict[str, Any], left_out: list[ValueError] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor `[C, *size]`) of everything in these files and folders, but for what is hidden in a folder.

    FileNotFoundError where one is not there, ValueError where there is nothing. An input that is no image or array, or
    not for this model, is a ValueError that names it: kept in `left_out`, where that is given, and else raised.
    """
    prepare = preprocess(spec)
    paths = list(_paths(files))
    if not paths:
        raise ValueError(f"no images ({', '.join(IMAGES)}) or arrays ({', '.join(ARRAYS)}) in {', '.join(files)}")
    for path in paths:
        try:
            items = _items(path, spec) if path.suffix.lower() in ARRAYS else [(str(path), path)]
        except ValueError as error:
            _keep_or_raise(error, left_out)
            continue
        for name, item in items:
            try:
                tensor = prepare(item)
            except ValueError as error:
                why = str(error).removeprefix("preprocess: ")
                _keep_or_raise(ValueError(why if why.startswith(name) else f"{name}: {why}"), left_out)
            else:
                yield name, tensor


def _keep_or_raise(error: ValueError, left_out: list[ValueError] | None) -> None:
    if left_out is None:
        raise error
    left_out.append(error)


def _paths(files: list[str]) -> Iterator[Path]:
    for file in files:
        if not Path(file).exists():
            raise FileNotFoundError(f"there is no file {file}")
    for path in map(Path, files):
        if not path.is_dir():
            yield path
            continue
        for each in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
            if each.suffix.lower() in (*IMAGES, *ARRAYS) and not hidden and each.is_file():
                yield each


def _items(path: Path, spec: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Names and items of an array file: of .npy, or of the first of x, test_images, ... that an .npz has.

    ValueError at once where the file cannot be read as such.
    """
    try:
        with path.open("rb") as file:  # numpy leaves a broken one open
            loaded = np.load(file, allow_pickle=False)
            found = {"": loaded} if isinstance(loaded, np.ndarray) else _named_arrays(loaded)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path} is no array that NumPy can read: {error}") from error
    key = next((k for k in ("", *LENGTHS) if k in found), None)
    if key is None:
        raise ValueError(f"{path} holds {', '.join(found) or 'nothing'}: name the array of inputs {', '.join(LENGTHS)}")
    items, lengths = found[key], found.get(LENGTHS.get(key, "lengths"))
    if not items.ndim or not len(items):
        raise ValueError(f"{path} holds {list(items.shape)}: give items one after the other, [n, ...]")
    if lengths is not None:
        _check_lengths(path, items, lengths, spec)
    return ((f"{path}[{k}]", x if lengths is None else _cut(x, int(lengths[k]), spec)) for k, x in enumerate(items))


def _named_arrays(file: Any) -> dict[str, Array]:
    """The arrays of an .npz that say what is to be predicted; of others the names."""
    wanted = {*LENGTHS, *LENGTHS.values()}
    there = {key: file[key] for key in file if key in wanted}
    return there if LENGTHS.keys() & there.keys() else dict.fromkeys(file, np.empty(0))


def _check_lengths(path: Path, items: Array, lengths: Array, spec: dict[str, Any]) -> None:
    if not spec["any_length"]:
        raise ValueError(
            f"{path} holds lengths, but the model was made for a {spec['kind']} of {spec['size']} and no other: cut or "
            "fill up the items, and leave the lengths out"
        )
    longest = max(items.shape[1:], default=0)
    if lengths.shape != items.shape[:1] or not np.isin(lengths, np.arange(1, longest + 1)).all():
        raise ValueError(
            f"{path}: lengths {list(lengths.shape)} do not fit {list(items.shape)}: give a whole number from 1 to "
            f"{longest} for each item"
        )


def _cut(item: Array, length: int, spec: dict[str, Any]) -> Array:
    """A signal without what fills it up: [L] or [C, L], or [L, C] as `preprocess` reads it."""
    last = item.ndim == 2 and item.shape[1] == spec["channels"]
    return item[:length] if last else item[..., :length]
