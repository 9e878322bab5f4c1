"""A run's folder: one training at a time is at work in it, and it is gone on with as it was begun."""

from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from pytorch_lightning.utilities import rank_zero_only

__all__ = ["check_same", "read_config", "take"]

MAY_CHANGE = {
    "root", "path", "num_workers", "eval_batch_size", "download", "in_memory", "compile", "channels_last", "threshold",
}  # fmt: skip
"""Settings that may be others when a run is gone on with: they change no step, or what is made of the answers."""


def take(folder: Path) -> FileLock | None:
    """The folder for this process alone while the answer is held. Further processes of the same training have none."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another torchcaps fit is at work in {folder}: wait for it, or give another --run") from None
    return lock


def read_config(folder: Path) -> dict[str, Any]:
    """What RUN/config.yaml says; ValueError where it is not there, or no YAML."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{folder} is no run: a run's folder holds a config.yaml and checkpoints")
    try:
        config = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no settings of a run")
    return config


def check_same(folder: Path, new: dict[str, Any]) -> None:
    """ValueError where a run is to go on with another model, data or seed than RUN/config.yaml says."""
    old = read_config(folder)
    for part in ("seed_everything", "model", "data", "ema", "autoencoder"):
        before, now = _flat(part, old.get(part)), _flat(part, new.get(part))
        for name in sorted(before.keys() & now.keys()):  # a later version may have settings that the earlier had not
            if before[name] != now[name] and name.rsplit(".", 1)[-1] not in MAY_CHANGE:
                raise ValueError(
                    f"{folder} was begun with {name}={before[name]!r}, and is now to go on with "
                    f"{now[name]!r}: leave that as it was, or begin another run, --run NAME"
                )


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(f"{name}.{key}", inner).items()}
    return {name: value}
