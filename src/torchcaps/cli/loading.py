"""The model of a run, and its data: what `predict`, `export`, `explain` and `serve` begin with."""

from pathlib import Path

import numpy as np
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from torchcaps.data import ImageData
from torchcaps.data.parts import Part, View
from torchcaps.data.preprocessing import Preprocessing
from torchcaps.run.build import build
from torchcaps.training import LoadedModel, load_checkpoint

__all__ = ["COMPONENTS_OF", "data_of", "first_images", "load"]

COMPONENTS_OF = 2000
"""Training images whose principal components a decoder is measured against."""


def load(run: str) -> LoadedModel:
    """The model of a run's folder (its best checkpoint, or its last where none was chosen), or of a checkpoint file."""
    path = Path(run)
    if path.is_dir():
        folder = path / "checkpoints"
        found = [folder / name for name in ("best.ckpt", "last.ckpt") if (folder / name).exists()]
        if not found:
            raise FileNotFoundError(
                f"{path} holds no checkpoints/best.ckpt or last.ckpt: give a run's folder, or a file"
            )
        path = found[0]
    return load_checkpoint(path, build)


def data_of(run: str) -> ImageData:
    """The data that a run was trained on, as its config.yaml names them. Raises ValueError where it names none."""
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{run} has no config.yaml that says what data it was trained on: give a run's folder")
    described = (yaml.safe_load(file.read_text("utf-8")) or {}).get("data")
    if described is None:
        raise ValueError(f"{file} does not say what data the run was trained on")
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    data: ImageData = parser.instantiate_classes(parser.parse_object({"data": described})).data
    return data


def first_images(part: Part, settings: Preprocessing, count: int) -> Tensor:
    """So many images `[N, C, *size]` as the model sees them in evaluation: not augmented."""
    images: Tensor = View(part, settings).__getitems__((0, np.arange(min(count, len(part)))))[0]
    return images
