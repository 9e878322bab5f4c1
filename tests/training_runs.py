"""Runs that the tests of training start in new processes, out of one that has done nothing but import."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from torchcaps.data import Augment, Digits
from torchcaps.losses import MarginLoss, SpreadLoss
from torchcaps.models import CapsNet
from torchcaps.training import Classification, Optimization, trainer

STEPS = 6
"""Of an epoch of `noisy_run`."""


def in_a_new_process(run: Callable[..., object], *arguments: Any) -> int:
    """The exit code of a process that does `run(*arguments)`, a function of this file."""
    # neither a fork of a process that has differentiated, which torch refuses, nor seconds of imports each time
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchcaps.data", "torchcaps.models", "torchcaps.training"])
    process = context.Process(target=_alone, args=(run, *arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _alone(run: Callable[..., object], *arguments: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for the workers of loaders, as it is outside
    torch.set_num_threads(1)
    run(*arguments)


class Kill(pl.Callback):
    """SIGKILL to this very process, after so many batches or when validation begins after so many steps."""

    def __init__(self, batches: int | None = None, validating: int | None = None) -> None:
        self.batches, self.validating = batches, validating

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.batches:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.validating:
            os.kill(os.getpid(), signal.SIGKILL)


class Noisy(nn.Module):
    """Draws from every generator there is, keeps running means, and has a layer that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * (random.random() + np.random.rand()) * torch.randn_like(x)  # noqa: NPY002
        scores: Tensor = self.layers(x).sigmoid()
        return scores


def noisy_run(run: Path, workers: int, kill: Kill | None = None, resume: bool = False) -> None:
    """Two epochs of digits, validated twice in each, with averaged weights and a margin that grows."""
    pl.seed_everything(3, verbose=False)
    module = Classification(
        Noisy(), loss=SpreadLoss.linear(steps=10), num_classes=10,
        optimization=Optimization("adamw", lr=3e-3, schedule="cosine", warmup_steps=3, weight_decay=1e-2),
    )  # fmt: skip
    data = Digits(batch_size=48, num_workers=workers, seed=5, augment=Augment(shift=1), limit=280)
    last = run / "checkpoints" / "last.ckpt"
    trainer(
        run, max_epochs=2, save_every_n_steps=2, ema=0.9, costs=False, callbacks=[kill] if kill else [],
        val_check_interval=3, log_every_n_steps=1, num_sanity_val_steps=1,
    ).fit(module, data, ckpt_path=last if resume else None)  # fmt: skip


class KeepGradients(pl.Callback):
    """Writes every step's gradients, and what was measured in the end, into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            torch.save({"gradients": self.gradients, "metrics": metrics}, self.path)


def shared_run(run: Path, processes: int) -> None:
    """Two epochs on batches of 32 in all; the gradients of each step, and the metrics, go into `run`/out.pt."""
    pl.seed_everything(0, verbose=False)
    model = CapsNet(
        image_size=8, stem_channels=8, kernel_size=3, primary_types=2, primary_pose=4, primary_kernel_size=3,
        class_pose=4, hidden=(16,),
    )  # fmt: skip
    module = Classification(
        model, loss=MarginLoss(), num_classes=10, reconstruction_weight=0.05, optimization=Optimization(lr=0.01)
    )
    data = Digits(batch_size=32 // processes, eval_batch_size=16, limit=98, seed=1)
    trainer(
        run, max_epochs=2, costs=False, callbacks=[KeepGradients(run / "out.pt")], accelerator="cpu",
        devices=processes, strategy="ddp_fork" if processes > 1 else "auto", num_sanity_val_steps=0,
    ).fit(module, data)  # fmt: skip
