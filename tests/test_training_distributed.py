"""Two processes (gloo, CPU) take the steps that one takes on the same batches, and each keeps its random numbers."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from training_runs import in_a_new_process, shared_run

from torchcaps.losses import MarginLoss
from torchcaps.training import Classification, RandomState, read_checkpoint


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Any]]]:
    """The folder and what was kept of a run on one process, and on two."""
    made = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"on{processes}")
        assert in_a_new_process(shared_run, folder, processes) == 0
        made[processes] = folder, torch.load(folder / "out.pt", weights_only=True)
    return made


def test_gradients_of_two_processes_are_those_of_one_on_the_same_batches(runs: Any) -> None:
    one, two = (runs[processes][1]["gradients"] for processes in (1, 2))
    assert len(one) == len(two) == 8
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-5 * float(a[name].abs().max())), name


def test_metrics_of_two_processes_are_those_of_one_over_every_example(runs: Any) -> None:
    one, two = (runs[processes][1]["metrics"] for processes in (1, 2))
    same = {name for name in one if name.startswith("val/")} | {"train/loss", "train/accuracy"}
    assert len(same) == 9
    assert {name: two[name] for name in same} == pytest.approx({name: one[name] for name in same}, rel=1e-4)


def test_a_checkpoint_keeps_the_random_numbers_of_every_process(runs: Any) -> None:
    states = read_checkpoint(runs[2][0] / "checkpoints" / "last.ckpt")["random_states"]
    assert len(states) == 2


def test_another_number_of_processes_goes_on_from_the_numbers_that_it_has() -> None:
    callback = RandomState()
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    module = Classification(torch.nn.Linear(2, 2), loss=MarginLoss(), num_classes=2)
    checkpoint: dict[str, Any] = {}
    callback.on_save_checkpoint(trainer, module, checkpoint)
    checkpoint["random_states"] *= 2
    torch.rand(1)
    own = torch.get_rng_state()
    callback.on_load_checkpoint(trainer, module, checkpoint)
    callback.on_train_batch_start(trainer, module, None, 0)
    assert torch.equal(torch.get_rng_state(), own)
