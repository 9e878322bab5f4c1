"""The model of a run, and its data: what `predict`, `export`, `explain` and `serve` begin with."""

from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser
from torch import Tensor

from torchcaps.cli.folders import read_config
from torchcaps.data import ImageData
from torchcaps.data.parts import Part, View
from torchcaps.data.preprocessing import Preprocessing
from torchcaps.run.build import build
from torchcaps.training import LoadedModel, load_checkpoint

__all__ = ["COMPONENTS_OF", "chosen_checkpoint", "data_of", "first_images", "load"]

COMPONENTS_OF = 2000
"""Training images whose principal components a decoder is measured against."""


def chosen_checkpoint(folder: Path) -> Path:
    """The best checkpoint of a run's folder, or its last where none was chosen."""
    paths = [folder / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no checkpoints/best.ckpt or last.ckpt: give a run's folder, or a file")
    return found


def load(run: str) -> LoadedModel:
    """The model of a run's folder (see `chosen_checkpoint`), or of a checkpoint file."""
    path = Path(run)
    return load_checkpoint(chosen_checkpoint(path) if path.is_dir() else path, build)


def data_of(run: str) -> ImageData:
    """The data that a run was trained on, as its config.yaml names them. Raises ValueError where it names none."""
    described = read_config(Path(run)).get("data")
    if described is None:
        raise ValueError(f"{run}/config.yaml does not say what data the run was trained on")
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    data: ImageData = parser.instantiate_classes(parser.parse_object({"data": described})).data
    return data


def first_images(part: Part, settings: Preprocessing, count: int) -> Tensor:
    """So many images `[N, C, *size]` as the model sees them in evaluation: not augmented."""
    images: Tensor = View(part, settings).__getitems__((0, np.arange(min(count, len(part)))))[0]
    return images
