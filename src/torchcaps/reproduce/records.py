"""results/NAME.json: one record for each network that was trained, appended, never changed.

    {"name": "su", "runs": [{"arm", "seed", "epochs", "config_hash", "command", "changes", "versions", "hardware",
                             "minutes", "cpu_minutes", "images", "parameters", "results", "curve", "date"}, ...]}

`results` are percent by test and measure; `curve` [[images seen, value], ...] of validation data; `limit`, where it is
there, says that only so many images were used, so that the record is a trial and no result.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

__all__ = ["append", "config_hash", "hardware", "read", "versions"]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none where it is not there. ValueError where it is something else."""
    if not path.exists():
        return []
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["runs"]
        _ = [run["arm"] for run in runs]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records of a reproduction: move it away, or give another --out") from error
    return runs


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more record. Several processes may do so at once; the file is whole at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        whole = {"name": path.stem, "runs": [*read(path), dict(record)]}
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        os.replace(part, path)


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of what a run was asked for."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    packages = ("torchcaps", "torch", "torchvision", "pytorch-lightning", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def hardware() -> dict[str, Any]:
    """The processor, how many threads were used, and the GPU if there is one."""
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
