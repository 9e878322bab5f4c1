"""A run that is killed and resumed ends as if nothing had happened: every number of its checkpoints and its log."""

import csv
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training_runs import STEPS, Kill, Noisy, in_a_new_process, noisy_run

from torchcaps.training import Classification, RandomState, read_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one piece."""
    run = tmp_path_factory.mktemp("whole")
    assert in_a_new_process(noisy_run, run, 0) == 0
    return run


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Every place where two checkpoints hold other than the same bits.

    Left out is where files lie, and a score that Lightning saves for people to read and never reads back.
    """
    if where.endswith(("dirpath", "_path", "best_k_models", "current_score")):
        return
    if isinstance(a, Tensor):
        if not (isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)):
            yield where
    elif isinstance(a, dict):
        yield from (f"{where}: {key}" for key in a.keys() ^ b.keys())
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield where
        for number, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{where}/{number}")
    elif a != b:
        yield f"{where}: {a} {b}"


@pytest.mark.parametrize(
    ("workers", "kill", "saved"),
    [
        pytest.param(0, Kill(batches=5), 4, id="in mid-epoch"),
        pytest.param(2, Kill(batches=11), 10, id="in mid-epoch, with 2 workers"),
        pytest.param(0, Kill(validating=6), 4, id="before the validation that ends an epoch"),
        pytest.param(0, Kill(batches=7), 6, id="just after an epoch"),
    ],
)
def test_killed_and_resumed_is_the_same_run_bit_for_bit(
    workers: int, kill: Kill, saved: int, whole: Path, tmp_path: Path
) -> None:
    assert in_a_new_process(noisy_run, tmp_path, workers, kill) == -signal.SIGKILL
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == saved
    assert in_a_new_process(noisy_run, tmp_path, workers, None, True) == 0
    for name in ("last.ckpt", "best.ckpt"):
        a, b = (read_checkpoint(run / "checkpoints" / name) for run in (whole, tmp_path))
        for each in (a, b):  # minutes are what may differ
            assert each["callbacks"].pop("Clock")["minutes"][0] > 0
        assert list(differences(a, b)) == []
    assert read_checkpoint(last)["global_step"] == 2 * STEPS
    a, b = (without_time(run / "metrics.csv") for run in (whole, tmp_path))
    assert a == b


def without_time(path: Path) -> list[dict[str, str]]:
    """The rows of a file of metrics, but for the minutes."""
    with path.open() as file:
        return [{name: v for name, v in row.items() if not name.startswith("time/")} for row in csv.DictReader(file)]


def test_the_comparison_sees_a_single_bit(whole: Path) -> None:
    a, b = (read_checkpoint(whole / "checkpoints" / "last.ckpt") for _ in range(2))
    assert list(differences(a, b)) == []
    weight = b["state_dict"]["model.layers.5.weight"]
    weight.view(torch.int32)[0, 0] ^= 1
    b["random_states"][0]["numpy"][1][0] += 1
    assert len(list(differences(a, b))) == 2


def test_how_often_is_validated_does_not_change_what_is_learned(tmp_path: Path) -> None:
    ends = []
    for times in (1, 3):
        pl.seed_everything(1, verbose=False)
        module = Classification(Noisy(), loss=nn.CrossEntropyLoss(), num_classes=10)
        x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 10
        val = DataLoader(TensorDataset(x, y), 8)  # torch's own, which draws a random number whenever it starts
        fit = pl.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=[RandomState()], val_check_interval=1 / times,
            num_sanity_val_steps=times, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        ).fit  # fmt: skip
        fit(module, DataLoader(TensorDataset(x, y), 8), val)
        ends.append(module.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
