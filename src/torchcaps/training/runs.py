"""A Lightning Trainer with a run's folder, its loggers, checkpoints and callbacks.

RUN/config.yaml                      what the run was asked for, where that is given
RUN/metrics.csv                      one row for each time something is logged, also after a resume
RUN/events/                          the same for TensorBoard
RUN/checkpoints/{last,best}.ckpt     last: every n steps and after every epoch; best: of the monitored metric
"""

import contextlib
import csv
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    Callback,
    Checkpoint,
    EMAWeightAveraging,
    ModelCheckpoint,
    RichProgressBar,
)
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from torchcaps.training.checkpoint import AtomicCheckpointIO
from torchcaps.training.clock import Clock
from torchcaps.training.costs import Costs
from torchcaps.training.health import CapsuleHealth
from torchcaps.training.randomness import RandomState

__all__ = ["MetricsFile", "SaveLast", "quiet", "trainer", "trainer_settings"]


def trainer(
    run: str | os.PathLike[str],
    *,
    max_epochs: int,
    monitor: str | None = "val/loss",
    mode: Literal["min", "max"] = "min",
    save_every_n_steps: int = 500,
    ema: float | None = None,
    costs: bool = True,
    health: bool = True,
    config: Mapping[str, Any] | None = None,
    callbacks: Iterable[Callback] = (),
    loggers: Iterable[Logger] = (),
    **settings: Any,
) -> pl.Trainer:
    """A Trainer that keeps its run in the folder `run`.

    monitor             the metric that chooses checkpoints/best.ckpt, of validation data: "val/loss", "val/accuracy",
                        ... (None where there are none), and `mode`, whether the smallest or the largest is the best.
    save_every_n_steps  steps of the optimiser from one checkpoints/last.ckpt to the next; every epoch ends with one.
    ema                 decay of a running average of the weights, such as 0.999, which is then what is validated, saved
                        and kept (Lightning's `EMAWeightAveraging`). None: no average.
    costs, health       print and check memory (`Costs`); watch the capsules (`CapsuleHealth`).
    config              written to config.yaml, plain data.
    callbacks, loggers  besides those of a run.
    settings            further arguments of `pytorch_lightning.Trainer`, such as precision, gradient_clip_val,
                        accumulate_grad_batches or devices.

    To go on with a run that was stopped: `trainer(...).fit(module, data, ckpt_path=RUN / "checkpoints" / "last.ckpt")`.
    """
    made = trainer_settings(
        run, monitor=monitor, mode=mode, save_every_n_steps=save_every_n_steps, ema=ema, costs=costs, health=health
    )
    made["callbacks"] += callbacks
    made["logger"] += loggers
    if config is not None:
        _write_config(Path(run) / "config.yaml", config)
    return pl.Trainer(max_epochs=max_epochs, **(made | settings))


def trainer_settings(
    run: str | os.PathLike[str],
    *,
    monitor: str | None = "val/loss",
    mode: Literal["min", "max"] = "min",
    save_every_n_steps: int = 500,
    ema: float | None = None,
    costs: bool = True,
    health: bool = True,
) -> dict[str, Any]:
    """The arguments that `trainer` gives to `pytorch_lightning.Trainer`, for those who build one by other means."""
    quiet()
    run = Path(run)
    folder = run / "checkpoints"
    metrics = MetricsFile(run)
    chosen: list[Callback] = [RandomState(), Clock(), _Begin(metrics)]
    chosen += [CapsuleHealth()] if health else []
    chosen += [Costs()] if costs else []
    chosen += [] if ema is None else [EMAWeightAveraging(decay=ema)]
    if monitor is not None:
        chosen += [ModelCheckpoint(folder, "best", monitor=monitor, mode=mode, enable_version_counter=False)]
    chosen += [SaveLast(folder / "last.ckpt", save_every_n_steps)]
    terminal = sys.stdout.isatty()
    chosen += [RichProgressBar()] if terminal else []
    return {
        "default_root_dir": run,
        "logger": [metrics, TensorBoardLogger(run, name="events", version="", default_hp_metric=False)],
        "callbacks": chosen,
        "plugins": [AtomicCheckpointIO()],
        "enable_progress_bar": terminal,
        "enable_model_summary": False,
        "log_every_n_steps": 10,
    }


class SaveLast(Checkpoint):
    """Saves the run to one file every so many steps of the optimiser, and at the end of every epoch.

    A save that falls due where validation comes next waits for it (at an epoch's last batch, for the epoch's end): a
    run that is resumed between a step and its validation would leave that validation out.
    """

    def __init__(self, path: str | os.PathLike[str], every_n_steps: int) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"save_every_n_steps={every_n_steps}: it must be 1 or more")
        self.path, self.every_n_steps = Path(path), every_n_steps
        self._saved_at = self._due_at = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.every_n_steps or step == self._saved_at or trainer.is_last_batch:
            return
        self._due_at = step
        if not _validation_follows(trainer, batch_idx):
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._due_at > self._saved_at:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"saved_at": self._saved_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_at = self._due_at = state_dict["saved_at"]

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # a trial leaves nothing behind
            return
        self._saved_at = self._due_at = trainer.global_step
        trainer.save_checkpoint(self.path, weights_only=False)


class MetricsFile(Logger):
    """metrics.csv in a run's folder: a row for each step at which something is logged, written at once.

    A run that is resumed goes on in the same file: rows of steps that are trained again are replaced, none is lost. So
    does one that is tested later.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(run) / "metrics.csv"
        self.columns: list[str] = []
        self.measured: tuple[int, int] | None = None
        """(step, epoch) of the weights that are tested, where no training says it."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """One more row."""
        if self.measured is not None:
            step, metrics = self.measured[0], metrics | {"epoch": self.measured[1]}
        row = {"step": step} | {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        if not self.columns or self.columns != self._header():  # a test of the run may have added some
            self._open()
        if new := [name for name in row if name not in self.columns]:
            self._rewrite(self.rows(), [*self.columns, *sorted(new)])
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: what a run was asked for is in config.yaml."""

    @rank_zero_only
    def begin(self, step: int) -> None:
        """Training begins at this step: of what the file holds, keep the steps before it."""
        self._open([row for row in self.rows() if int(row["step"]) < step])

    def _open(self, rows: list[dict[str, Any]] | None = None) -> None:
        rows = self.rows() if rows is None else rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(rows, list(rows[0]) if rows else ["step", "epoch"])

    def rows(self) -> list[dict[str, Any]]:
        """What the file holds, a dict of strings for each row. ValueError where it is something else."""
        if not self.path.exists():
            return []
        text = self.path.read_text("utf-8")
        table = csv.DictReader(text.splitlines(), restval="")
        rows = list(table)
        if not {"step"} <= set(table.fieldnames or ["step"]) or not all(row["step"].isdecimal() for row in rows):
            raise ValueError(f"{self.path} holds no metrics of a run: move it away, or give another folder")
        return rows if text.endswith("\n") else rows[:-1]  # a kill may leave half a row at the end

    def _header(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError), open(self.path, newline="") as file:
            return next(csv.reader(file), [])
        return []

    def _rewrite(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        self.columns = columns
        part = self.path.with_name(f".{self.path.name}.part")
        with open(part, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)


class _Begin(Callback):
    """Tells the file of metrics at which step training begins, once a checkpoint has been read."""

    def __init__(self, metrics: MetricsFile) -> None:
        self.metrics = metrics

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.metrics in trainer.loggers:  # a trial has none
            self.metrics.begin(trainer.global_step)


def _validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether the loop validates after this batch, which is not the epoch's last."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or not isinstance(every, int):
        return False
    done = (trainer.fit_loop.total_batch_idx if epochs is None else batch_idx) + 1
    return done % every == 0 and (epochs is None or (trainer.current_epoch + 1) % epochs == 0)


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")  # JSON is YAML


def quiet() -> None:
    """Leave out what Lightning says about itself, and warnings that do not apply to a run made here."""
    for name in ("pytorch_lightning.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_news)
    for message in (
        r"The '\w+_dataloader' does not have many workers",  # data in memory are fastest without
        r"The number of training batches \(\d+\) is smaller than the logging interval",  # an epoch's end is logged
        r"Checkpoint directory .* exists and is not empty",  # it is the run's, resumed
        r"You defined a `validation_step` but have no `val_dataloader`",  # then nothing is validated
        r"Trying to infer the `batch_size`",
        r"Total length of `list` across ranks is zero",  # a set without a validation part
    ):
        warnings.filterwarnings("ignore", message, UserWarning)
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning
    )  # Lightning's, of torch 2.14


def _is_news(record: logging.LogRecord) -> bool:
    known = ("💡", "GPU available", "TPU available", "HPU available", "LOCAL_RANK", "`Trainer.fit`", "Loading `train_")
    return not record.getMessage().startswith(known)
