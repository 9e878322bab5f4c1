"""Checkpoints that are whole or not there, and that say all it takes to predict.

A file is written beside its place under another name, flushed to the disk and renamed: whoever reads, or pulls the
plug, finds the old one or the new one. Reading never runs code (weights only). Beside what Lightning keeps, each holds

    torchcaps    schema            the number of this layout, 1
                 version           the library's, as it was written
                 config            a plain dict that the model can be built from, or None
                 class_names       K names, or None
                 preprocessing     a plain dict, or None
                 multi_label, link, threshold      how scores become probabilities and labels
"""

import errno
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO
from torch import Tensor, nn

from torchcaps.training.scores import Link, probabilities

__all__ = ["SCHEMA", "AtomicCheckpointIO", "LoadedModel", "describe_model", "load_checkpoint", "read_checkpoint"]

SCHEMA = 1
"""The number of the layout above. Files of a higher one are refused."""


@dataclass(frozen=True)
class LoadedModel:
    """A model out of a checkpoint, in evaluation mode, with all that belongs to it."""

    model: nn.Module
    config: dict[str, Any]
    class_names: list[str] | None
    preprocessing: dict[str, Any] | None
    multi_label: bool
    link: Link | None
    threshold: float
    version: str
    """Of the library that wrote the file."""

    def probabilities(self, scores: Tensor) -> Tensor:
        """The model's scores `[N, K]` as probabilities `[N, K]`."""
        return probabilities(self.model, scores, multi_label=self.multi_label, link=self.link)


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to the disk, made safe: `Trainer(plugins=[AtomicCheckpointIO()])`.

    A save that fails, for want of room or for any other reason, leaves the file that was there before and raises one
    OSError that names it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        path = Path(path)
        checkpoint.setdefault("torchcaps", _stamp())
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")  # in the same folder: a rename within a file system is one step
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except (OSError, RuntimeError) as error:  # torch wraps what its writer meets in a RuntimeError
            part.unlink(missing_ok=True)
            raise _not_saved(path, error) from error
        _sync_folder(path.parent)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See `read_checkpoint`: weights only, whatever `weights_only` says."""
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def describe_model(
    config: Mapping[str, Any] | None,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    multi_label: bool,
    link: Link | None,
    threshold: float,
) -> dict[str, Any]:
    """What a checkpoint says of its model, after a look at whether all of it can be written down.

    Raises ValueError for what is no plain data: dicts, lists, strings, numbers, True, False and None.
    """
    plain = {}
    for name, value in (("config", config), ("class_names", class_names), ("preprocessing", preprocessing)):
        try:
            plain[name] = json.loads(json.dumps(value if value is None or name != "class_names" else list(value)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} goes into the checkpoint and must be plain data (dicts, lists, strings, numbers): {error}"
            ) from error
    return {**_stamp(), **plain, "multi_label": multi_label, "link": link, "threshold": threshold}


def _stamp() -> dict[str, Any]:
    return {"schema": SCHEMA, "version": version("torchcaps")}


def load_checkpoint(
    path: str | os.PathLike[str],
    build: Callable[[dict[str, Any]], nn.Module],
    map_location: torch.device | str = "cpu",
) -> LoadedModel:
    """The model of a checkpoint, in evaluation mode: `build(config)` with the weights of the file.

    Of a run with averaged weights these are the averaged ones. Raises FileNotFoundError where there is no such file,
    and ValueError that names the file where it is cut off, of another program, or of a model that `build` does not
    make.
    """
    checkpoint = read_checkpoint(path, map_location)
    said = checkpoint["torchcaps"]
    if said.get("config") is None:
        raise ValueError(
            f"{path} does not say how to build its model: give config= to Classification before training, or build the "
            'model yourself and load the weights from the entries "model.*" of its "state_dict"'
        )
    model = build(said["config"])
    weights = {
        name.removeprefix("model."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {path} are not those of the {type(model).__name__} that its config builds; it was written "
            f"by torchcaps {said['version']}, and this is {version('torchcaps')}: {error}"
        ) from error
    return LoadedModel(
        model=model.to(map_location).eval(),
        config=said["config"],
        class_names=said["class_names"],
        preprocessing=said["preprocessing"],
        multi_label=said["multi_label"],
        link=said["link"],
        threshold=said["threshold"],
        version=said["version"],
    )


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """All that a checkpoint holds, read without running any code in it.

    Raises FileNotFoundError where there is no such file, and ValueError that names the file and says what it is where
    it is no whole checkpoint of this library.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file, such as {path / 'checkpoints' / 'last.ckpt'}")
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    with open(path, "rb") as file:
        start = file.read(8)
    if not start.startswith(b"PK"):  # what torch writes is a zip
        raise ValueError(f"{path} {_no_zip(start)}")
    if zipfile.is_zipfile(path) and not _whole(path):  # torch reads on where a bit has changed
        raise ValueError(f"{path} {_what_is_wrong(path)}")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} {_what_is_wrong(path)}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("torchcaps"), dict):
        raise ValueError(f"{path} {_whose_it_is(checkpoint)}")
    schema = checkpoint["torchcaps"]["schema"]
    if schema > SCHEMA:
        raise ValueError(
            f"{path} was written by torchcaps {checkpoint['torchcaps']['version']} in layout {schema}, and this is "
            f"{version('torchcaps')}, which reads layouts up to {SCHEMA}: install the newer one"
        )
    return checkpoint


def _no_zip(start: bytes) -> str:
    """In words, of a file that begins so and that torch cannot have written."""
    if not start:
        return "is empty: its writing was cut off; take another checkpoint"
    kinds = {b"\x89HDF": "an HDF5 file (Keras)", b"\x93NUMPY": "a NumPy array", b"\x80": "a pickle of Python objects"}
    kind = next(
        (what for begin, what in kinds.items() if start.startswith(begin)), f"a file that begins with {start!r}"
    )
    return f"is no checkpoint of torchcaps but {kind}"


def _what_is_wrong(path: Path) -> str:
    """In words, of a zip that torch did not read."""
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        return f"is cut off: {size:,} bytes, and the end of the file is not among them; take another checkpoint"
    if not _whole(path):
        return f"is damaged: its {size:,} bytes are not those that were written; take another checkpoint"
    return (
        "holds Python objects beside weights, and is not read, for reading it could run their code: a checkpoint of "
        "torchcaps holds weights and plain data alone"
    )


def _whole(path: Path) -> bool:
    """Whether the zip is what was once written, and so what stopped torch is in it."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except zipfile.BadZipFile:
        return False


def _whose_it_is(checkpoint: object) -> str:
    """In words, of what torch read but this library did not write."""
    if not isinstance(checkpoint, dict):
        return f"is no checkpoint of torchcaps: it holds a {type(checkpoint).__name__}"
    if "pytorch-lightning_version" in checkpoint:
        return "is a Lightning checkpoint of another program: it does not say what torchcaps model it holds"
    tensors = sum(isinstance(value, Tensor) for value in checkpoint.values())
    if tensors and tensors == len(checkpoint):
        return (
            f"holds {tensors} tensors and nothing else, a bare state_dict: build its model and call "
            "model.load_state_dict(torch.load(path, weights_only=True))"
        )
    return f"is no checkpoint of torchcaps: it holds a dict of {', '.join(map(str, list(checkpoint)[:5])) or 'nothing'}"


def _not_saved(path: Path, error: Exception) -> OSError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
    reason = os.strerror(number) if cause is not None else str(error).splitlines()[0]
    kept = "the checkpoint that was there before is whole" if path.exists() else "no checkpoint is there"
    return OSError(
        number, f"{reason}: the checkpoint was not saved, and {kept}; make room, then resume from it", str(path)
    )


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk too, where a folder can be opened for that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
