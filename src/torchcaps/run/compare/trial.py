"""One network: an arm trained from one seed on a share of the labels, then tested. What is kept of it is a record.

A record is a JSON file of its own, written under another name and renamed, so that it is whole or not there. It says
what it is of; a comparison that was stopped reads those it has and trains the others.
"""

import copy
import json
import math
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, RichProgressBar
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from torchcaps.data import ImageData, LabelledData
from torchcaps.run.compare.arms import Arm, make_loss
from torchcaps.run.compare.measures import by_item, pairs_named, summary, temperature
from torchcaps.run.compare.panel import PANEL, Bench
from torchcaps.run.files import write_whole
from torchcaps.training import CapsuleHealth, Classification, Optimization, quiet

__all__ = ["Budget", "Trial", "read_record", "run_trial", "with_fraction", "write_json"]

Select = Literal["last", "best"]


@dataclass(frozen=True)
class Budget:
    """What every arm gets, all the same.

    epochs        over the training part. On a share of the labels as many steps as on all of them.
    optimization  optimiser and learning rate.
    select        "last": the network after the last epoch; "best": after the epoch with the lowest validation loss.
                  Nothing is ever selected by test items.
    clip          largest norm of a gradient, None for any.
    precision     Lightning's name of it.
    device        "cpu", "cuda", or "auto".
    """

    epochs: int
    optimization: Optimization
    select: Select = "last"
    clip: float | None = None
    precision: str = "32-true"
    device: str = "auto"


@dataclass(frozen=True)
class Trial:
    """An arm, a seed, and the share of the labels it is trained on."""

    arm: Arm
    seed: int
    fraction: float = 1.0

    @property
    def file(self) -> str:
        """Its record's name."""
        return f"{self.arm.key}-{100 * self.fraction:g}percent-seed{self.seed}.json"

    def __str__(self) -> str:
        share = "" if self.fraction == 1 else f" on {100 * self.fraction:g} % of the labels"
        return f"{self.arm.key}, seed {self.seed}{share}"


def run_trial(trial: Trial, data: ImageData, budget: Budget, steps: int, bench: Bench | None) -> dict[str, Any]:
    """Train and test; plain data.

    data   its seed is not looked at: order and augmentation follow the trial's, the same for all arms.
    steps  of the optimiser.
    """
    data = data.with_seed(trial.seed)
    with isolate_rng(include_cuda=torch.cuda.is_available()):
        torch.manual_seed(trial.seed)
        module = make_module(trial.arm, data, budget)
        torch.manual_seed(trial.seed)  # heads draw differently many numbers: from here on all arms see the same again
        history, minutes, peak = _train(module, data, budget, steps, str(trial))
        val, y_val = _answers(module, data.val_dataloader())
        test, y_test = _answers(module, data.test_dataloader())
    T = temperature(val, y_val)
    record = summary(test, y_test, T, module.threshold)
    hard = {} if bench is None else _robustness(module, bench, data.eval_batch_size)
    return {
        "arm": trial.arm.key, "seed": trial.seed, "fraction": trial.fraction, "minutes": minutes, "peak_bytes": peak,
        "temperature": T, "history": history, **record, "robustness": hard,
    }  # fmt: skip


def make_module(arm: Arm, data: ImageData, budget: Budget) -> Classification:
    """An arm's model and loss, ready to be trained."""
    model = arm.build()
    return Classification(
        model,
        loss=make_loss(arm, model, data.multi_label),
        num_classes=data.num_classes,
        multi_label=data.multi_label,
        optimization=budget.optimization,
    )


def with_fraction(data: ImageData, fraction: float) -> ImageData:
    """The set with this share of its training labels; validation and test part are the same."""
    if fraction == 1:
        return data
    assert isinstance(data, LabelledData)
    return data.with_label_fraction(fraction * (data.label_fraction or 1.0))


def read_record(path: Path, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record in a file, or None where there is none. ValueError where it is of something else than `of`."""
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found = record["of"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a comparison: delete it, or give another folder as out=") from error
    if differs := [key for key in {**found, **of} if found.get(key) != of.get(key)]:
        key = differs[0]
        raise ValueError(
            f"{path} is of another comparison: {key} was {found.get(key)} there, and is {of.get(key)} here: give "
            "another folder as out=, or delete that one"
        )
    return record


def write_json(path: Path, value: Any) -> None:
    """A JSON file; what is no finite number is null."""
    write_whole(path, json.dumps(_finite(value), allow_nan=False) + "\n")


class _History(Callback):
    """Accuracy over the epochs that were validated; for "best" also the weights of the one with the lowest loss."""

    def __init__(self, keep_best: bool) -> None:
        self.keep_best = keep_best
        self.rows: list[dict[str, float]] = []
        self.best: tuple[float, dict[str, Tensor]] | None = None

    # callbacks come before the module, which reports its metrics and starts them anew

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Classification)
        self.rows.append(
            {
                "step": trainer.global_step,
                "train_accuracy": float(pl_module.train_accuracy.compute()),
                "val_accuracy": float(pl_module.val_metrics["accuracy"].compute()),
                "val_loss": float(pl_module.val_loss.compute()),
            }
        )
        loss = self.rows[-1]["val_loss"]
        if self.keep_best and (self.best is None or loss < self.best[0]):
            self.best = loss, copy.deepcopy(pl_module.model.state_dict())


def _train(
    module: Classification, data: ImageData, budget: Budget, steps: int, name: str
) -> tuple[list[dict[str, float]], float, int | None]:
    """(history, minutes, peak bytes on a device that counts them)."""
    batches = len(data.train_dataloader())
    epochs = math.ceil(steps / batches)
    module.optimization = _stretched(budget.optimization, steps / budget.epochs / batches)
    history, terminal = _History(budget.select == "best"), sys.stdout.isatty()
    with warnings.catch_warnings():
        quiet()
        trainer = pl.Trainer(
            accelerator="gpu" if budget.device == "cuda" else budget.device,
            devices=1,
            precision=budget.precision,  # type: ignore[arg-type]
            max_epochs=epochs,
            max_steps=steps,
            gradient_clip_val=budget.clip,
            check_val_every_n_epoch=max(1, round(epochs / budget.epochs)),
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=terminal,
            enable_model_summary=False,
            callbacks=[history, CapsuleHealth(every_n_steps=10**9), *([RichProgressBar()] if terminal else [])],
        )
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        try:
            trainer.fit(module, data)
        except FloatingPointError as error:
            raise FloatingPointError(f"{name}: {error}. Networks that were finished are kept") from error
        minutes = (time.perf_counter() - start) / 60
    if history.best is not None:
        module.model.load_state_dict(history.best[1])
    module.to(device).eval()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return history.rows, minutes, peak


def _stretched(optimization: Optimization, times: float) -> Optimization:
    """The same warm-up and milestones where epochs are shorter and so many times as many."""
    return replace(
        optimization,
        warmup_epochs=times * optimization.warmup_epochs,
        milestones=[times * milestone for milestone in optimization.milestones],
    )


def _answers(module: Classification, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """(probabilities `[N, K]` in float64, y) of a whole part, on the CPU."""
    found, labels = [], []
    for x, y, *mask in loader:
        found.append(_probabilities(module, x, mask[0] if mask else None))
        labels.append(y)
    return torch.cat(found), torch.cat(labels)


@torch.no_grad()
def _probabilities(module: Classification, x: Tensor, mask: Tensor | None) -> Tensor:
    device = module.device
    scores = module(x.to(device), None if mask is None else mask.to(device))
    return module.probabilities(scores.double().cpu())


def _robustness(module: Classification, bench: Bench, batch: int) -> dict[str, Any]:
    """For each perturbation the items' mean answers at each strength, and each item's over all that change it."""
    found = {}
    for name in bench.names():
        means, total = [], torch.zeros(len(bench.items), dtype=torch.float64)
        strengths = PANEL[name].strengths
        unchanged = 0 if name == "both" else 1
        for number, strength in enumerate(strengths):
            each = []
            for first in range(0, len(bench.items), batch):
                x, y, mask = bench.batch(name, strength, slice(first, first + batch))
                p = _probabilities(module, x, mask)
                if name == "both" and bench.y.dim() == 1:
                    each.append(pairs_named(p, y))
                else:
                    each.append(by_item(p, y, "accuracy", module.threshold))
            right = torch.cat(each)
            means.append(float(right.mean()))
            if number >= unchanged:
                total += right
        items = total / (len(strengths) - unchanged)
        found[name] = {"strengths": list(strengths), "accuracy": means, "items": [round(v, 5) for v in items.tolist()]}
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
