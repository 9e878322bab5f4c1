"""`torchcaps predict RUN FILE ...`: a label and its probability for images, arrays, or folders of these.

A checkpoint says all it takes: the model, the names of the classes, and how a file becomes a tensor. The answer is a
table on the terminal, or a CSV with every probability.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.cli.loading import load
from torchcaps.data import preprocess
from torchcaps.training import LoadedModel

__all__ = ["read_inputs", "run"]

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
ARRAYS = {".npy", ".npz"}


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps predict", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("files", nargs="+", help="images; .npy or .npz with items one after the other; folders")
    parser.add_argument("--out", type=Path, help="write a CSV with all probabilities here")
    parser.add_argument("--batch_size", type=int, default=64)
    chosen = parser.parse_args(arguments)
    loaded = load(chosen.run)
    if loaded.preprocessing is None:
        raise ValueError(
            f"{chosen.run} does not say how a file becomes a tensor: it was trained on tensors of your own"
        )
    names = loaded.class_names or [str(k) for k in range(loaded.config["num_classes"])]
    rows = list(_predict(loaded, read_inputs(chosen.files, loaded.preprocessing), chosen.batch_size))
    if chosen.out:
        with open(chosen.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["input", "label", *names])
            writer.writerows([name, _label(p, names, loaded), *(f"{x:.6f}" for x in p)] for name, p in rows)
        print(f"{chosen.out} holds {len(rows)} predictions")
        return
    for name, p in rows:
        sure = "" if loaded.multi_label else f"{float(p.max()):8.1%}"
        print(f"{_label(p, names, loaded):<20}{sure}  {name}")


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


def read_inputs(files: list[str], spec: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor `[C, *size]`) of everything in these files and folders. ValueError where there is nothing."""
    prepare = preprocess(spec)
    found = 0
    for file in files:
        path = Path(file)
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}")
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES | ARRAYS) if path.is_dir() else [path]
        for each in inside:
            if each.suffix.lower() in ARRAYS:
                for k, item in enumerate(_items(each)):
                    found += 1
                    yield f"{each}[{k}]", prepare(item)
            else:
                found += 1
                yield str(each), prepare(each)
    if not found:
        print(f"torchcaps: no images or arrays in {', '.join(files)}", file=sys.stderr)
        sys.exit(2)


def _items(path: Path) -> Iterator[np.ndarray[Any, Any]]:
    """The items of an array file: those of .npy, or of the first of x, test_images, images that an .npz has."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no array that NumPy can read: {error}") from error
    if isinstance(loaded, np.ndarray):
        yield from loaded
        return
    with loaded as arrays:
        key = next((k for k in ("x", "test_images", "images") if k in arrays), None)
        if key is None:
            raise ValueError(f"{path} holds {', '.join(arrays)}: name the array of inputs x, test_images or images")
        yield from arrays[key]
