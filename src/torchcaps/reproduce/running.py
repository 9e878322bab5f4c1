"""One network of a reproduction: trained by its recipe, tested after its last epoch, and put on record.

Nothing is chosen by test items. A run that was killed goes on from its last checkpoint; one on record is not repeated.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from torchcaps.cli import training
from torchcaps.cli.recipes import find
from torchcaps.reproduce.measures import answers, measure
from torchcaps.reproduce.plan import Arm, Reproduction
from torchcaps.reproduce.records import append, config_hash, hardware, read, versions
from torchcaps.training import Clock, MetricsFile

__all__ = ["Settings", "reproduce"]


@dataclass(frozen=True)
class Settings:
    """How a reproduction is run here.

    root     folder of the data.
    data     a MedMNIST-style .npz that takes the place of the recipe's set.
    out      folder of the records.
    runs     folder of checkpoints, which are deleted once a run is on record.
    epochs   instead of the recipe's.
    limit    use so many images alone: a trial.
    changes  further arguments of `torchcaps fit`.
    """

    root: str = "data"
    data: Path | None = None
    out: Path = Path("results")
    runs: Path = Path("runs/reproduce")
    epochs: int | None = None
    limit: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()


def reproduce(name: str, plan: Reproduction, arm_name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """The record of one arm and seed: from the file, or trained now."""
    arm = plan.arms[arm_name]
    changes = _changes(plan, arm, settings)
    recipe = plan.recipe_of(arm)
    text = find(recipe).read_text("utf-8")
    asked = {"recipe": recipe, "text": text, "changes": changes}
    if settings.data is not None:
        asked["data"] = settings.data.name
    key = config_hash(asked)
    path = settings.out / f"{name}.json"
    for record in read(path):
        if (record["arm"], record["seed"], record["config_hash"]) == (arm_name, seed, key):
            return record
    folder = settings.runs / name / f"{arm_name}-{key}-seed{seed}"
    seeds = {"seed_everything": seed, "data.init_args.seed": seed}
    place: dict[str, Any] = {f"{plan.base}.root": settings.root}
    if settings.data is not None:
        place = {"data": _in_its_place(yaml.safe_load(text)["data"]["init_args"], settings.data)}
    written = _written({"run": str(folder), **place, **changes, **seeds})
    last = folder / "checkpoints" / "last.ckpt"
    fitted = training.fit(["--config", recipe, *written, *(["--ckpt_path", "last"] if last.exists() else [])])
    module, data, trainer = fitted.model, fitted.datamodule, fitted.trainer
    results = {}
    for test_name, test in plan.tests.items():
        tested = data if test.data is None else test.data(data)
        scores, y = answers(module, tested.test_dataloader())
        results[test_name] = measure(test.measures, module, scores, y)
    (clock,) = (c for c in vars(trainer)["callbacks"] if isinstance(c, Clock))
    wall, cpu = clock.minutes
    record = {
        "arm": arm_name, "seed": seed, "epochs": trainer.current_epoch, "config_hash": key,
        "command": " ".join(["torchcaps fit --config", recipe, *_quoted({**changes, **seeds})]),
        "changes": changes, "versions": versions(), "hardware": hardware(),
        "minutes": round(wall, 2), "cpu_minutes": round(cpu, 2),
        "images": trainer.current_epoch * len(data.parts.train),
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "results": results, "curve": _curve(plan, folder, len(data.parts.train)),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }  # fmt: skip
    if settings.limit is not None:
        record["limit"] = settings.limit
    if settings.data is not None:
        record["data"] = settings.data.name
    append(path, record)
    shutil.rmtree(folder / "checkpoints")
    return record


def _changes(plan: Reproduction, arm: Arm, settings: Settings) -> dict[str, Any]:
    changes = dict(arm.changes)
    if settings.epochs is not None:
        changes["trainer.max_epochs"] = settings.epochs
    if settings.limit is not None:
        changes["data.init_args.limit"] = settings.limit
    return changes | dict(settings.changes)


def _in_its_place(init_args: dict[str, Any], file: Path) -> dict[str, Any]:
    """The data's arguments for a file that takes the place of the recipe's set."""
    rest = {name: value for name, value in init_args.items() if name not in ("root", "download")}
    return {"class_path": "torchcaps.data.NPZ", "init_args": {"path": str(file), **rest}}


def _written(changes: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={_value(value)}" for name, value in changes.items()]


def _quoted(changes: Mapping[str, Any]) -> list[str]:
    return [f"--{name} '{_value(value)}'" for name, value in changes.items()]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _curve(plan: Reproduction, folder: Path, images: int) -> list[list[float]]:
    """[images seen, percent] of the validation data after each epoch."""
    if plan.curve is None:
        return []
    rows = MetricsFile(folder).rows()
    found = [float(row[plan.curve]) for row in rows if row.get(plan.curve)]
    return [[(epoch + 1) * images, 100 * value] for epoch, value in enumerate(found)]
