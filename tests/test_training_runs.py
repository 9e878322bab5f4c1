"""A run's folder: what is in it, what its log keeps over a resume, and that nobody chatters."""

import csv
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchcaps.training import Classification, MetricsFile, Optimization, SaveLast, read_checkpoint, trainer


def data() -> DataLoader[Any]:
    x = torch.arange(48.0).view(12, 4) / 48
    return DataLoader(TensorDataset(x, torch.arange(12) % 3), 4)


def module() -> Classification:
    torch.manual_seed(0)
    return Classification(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), num_classes=3, optimization=Optimization(lr=0.1))


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_a_folder_with_its_config_log_events_and_checkpoints(tmp_path: Path) -> None:
    config = {"model": {"name": "linear"}, "lr": 0.1}
    made = trainer(tmp_path / "run", max_epochs=2, config=config, monitor="val/accuracy", mode="max", max_time=None)
    made.fit(module(), data(), data())
    assert json.loads((tmp_path / "run" / "config.yaml").read_text()) == config
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert [p.name.split(".")[1] for p in (tmp_path / "run" / "events").glob("events*")] == ["out"]
    assert {"step", "epoch", "train/loss", "val/accuracy"} <= set(rows(tmp_path / "run")[0])
    assert made.checkpoint_callback is not None
    assert made.checkpoint_callback.monitor == "val/accuracy"  # type: ignore[attr-defined]


def test_without_validation_data_the_last_checkpoint_is_the_only_one(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=1, monitor=None).fit(module(), data())
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_run_that_goes_on_keeps_its_log(tmp_path: Path) -> None:
    for epochs, resume in ((1, None), (3, tmp_path / "checkpoints" / "last.ckpt")):
        trainer(tmp_path, max_epochs=epochs, log_every_n_steps=1).fit(module(), data(), data(), ckpt_path=resume)
    assert [row["step"] for row in rows(tmp_path) if row["val/loss"]] == ["2", "5", "8"]
    assert [row["step"] for row in rows(tmp_path) if row["train/loss_step"]] == [str(n) for n in range(9)]


def test_a_new_run_in_the_same_folder_begins_its_log_anew(tmp_path: Path) -> None:
    for epochs in (2, 1):
        trainer(tmp_path, max_epochs=epochs).fit(module(), data(), data())
    assert {row["step"] for row in rows(tmp_path)} == {"2"}


def test_rows_of_steps_that_are_taken_again_are_replaced_and_half_a_row_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n1,0,0.5\n3,0,0.25\n5,0,0.1\n7,")
    log = MetricsFile(tmp_path)
    log.begin(5)
    log.log_metrics({"loss": torch.tensor(0.2), "epoch": 0}, step=5)
    log.log_metrics({"acc": 1.0}, step=6)
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,epoch,loss,acc", "1,0,0.5,", "3,0,0.25,", f"5,0,{torch.tensor(0.2).item()},", "6,,,1.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("every", "validated", "expected"),
    [
        (2, True, ["2 in training", "4 after validation", "6 in training", "7 after the epoch"]),
        (7, True, ["7 after the epoch"]),
        (7, False, ["7 after the epoch"]),
    ],
)
def test_last_is_saved_every_n_steps_after_validation_and_at_the_end_of_epochs(
    every: int, validated: bool, expected: list[str], tmp_path: Path
) -> None:
    saved, where = [], ["in training"]

    class Watch(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            where[0] = "in training"

        def on_validation_epoch_end(self, *_: Any) -> None:
            where[0] = "after validation"

        def on_train_epoch_end(self, *_: Any) -> None:
            where[0] = "after the epoch"

        def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
            saved.append(f"{trainer.global_step} {where[0]}")

    loader = DataLoader(TensorDataset(torch.rand(28, 4), torch.arange(28) % 3), 4)  # 7 steps
    pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[SaveLast(tmp_path / "last.ckpt", every), Watch()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=4, num_sanity_val_steps=0,
    ).fit(module(), loader, loader if validated else None)  # fmt: skip
    assert saved == expected
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 7


def test_a_trial_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=1, fast_dev_run=True).fit(module(), data(), data())
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ValueError, match="save_every_n_steps=0: it must be 1 or more"):
        trainer(tmp_path, max_epochs=1, save_every_n_steps=0)


def test_nobody_chatters(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        made = trainer(tmp_path, max_epochs=1, costs=False)
        made.fit(module(), data(), data())
        made.fit_loop.max_epochs = 2
        made.fit(module(), data(), data(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    out, err = capfd.readouterr()
    assert out == ""
    said = [record.getMessage() for record in caplog.records if record.name.startswith(("pytorch_l", "lightning"))]
    assert [line for line in said if not line.startswith("Restor")] == []
    assert "Tip" not in err


pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
