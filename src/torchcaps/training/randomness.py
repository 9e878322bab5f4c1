"""A run that was stopped goes on as if it had not been: the random numbers that Lightning's checkpoints leave out.

The steps of training draw from one stream of random numbers each (Python's, numpy's, torch's, the device's). Its state
is kept at the end of every step and put back before the next, so that nothing in between moves it: neither how often
is validated, nor how loaders are started, nor a stop. The state goes into every checkpoint, one for each process.

Bit for bit that makes a resumed run equal to one in one piece where the rest does not depend on when it was stopped:
order and augmentation are functions of (seed, epoch, index), the loader keeps its place (`state_dict`), and the device
adds in a fixed order (a CPU with the same number of threads does).
"""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import distributed

__all__ = ["RandomState"]


class RandomState(Callback):
    """Keeps the random numbers of training in one stream, and saves where it stands.

    A checkpoint of a run on other than this number of processes, or without this callback, brings no stream for each:
    then training goes on from the numbers that the processes have.
    """

    def __init__(self) -> None:
        self.state: tuple[Any, ...] | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back(pl_module.device)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._put_back(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.state = _read(pl_module.device)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """All processes come here, and the one that writes gets the state of each."""
        own = _packed(self.state or _read(pl_module.device))
        states: list[Any] = [own]
        if distributed.is_available() and distributed.is_initialized():
            states = [None] * distributed.get_world_size()
            distributed.all_gather_object(states, own)
        checkpoint["random_states"] = states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get("random_states", [])
        self.state = _unpacked(states[trainer.global_rank]) if len(states) == trainer.world_size else None

    def _put_back(self, device: torch.device) -> None:
        if self.state is not None:
            _write(self.state, device)


def _read(device: torch.device) -> tuple[Any, ...]:
    """The states of Python's, numpy's, torch's and the device's generator, as these give them."""
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device  # noqa: NPY002


def _write(state: tuple[Any, ...], device: torch.device) -> None:
    in_python, in_numpy, in_torch, on_device = state
    random.setstate(in_python)
    np.random.set_state(in_numpy)  # noqa: NPY002  (numpy's global numbers are what others draw from)
    torch.set_rng_state(in_torch)
    if on_device is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(on_device)


def _packed(state: tuple[Any, ...]) -> dict[str, Any]:
    """A state as tensors and plain data, which a checkpoint may hold."""
    in_python, (kind, key, *rest), in_torch, on_device = state
    numbers = torch.from_numpy(key.astype(np.int64))
    return {"python": in_python, "numpy": (kind, numbers, *rest), "torch": in_torch, "device": on_device}


def _unpacked(packed: dict[str, Any]) -> tuple[Any, ...]:
    kind, numbers, *rest = packed["numpy"]
    in_numpy = (kind, numbers.numpy().astype(np.uint32), *rest)
    on_device = packed["device"]
    return packed["python"], in_numpy, packed["torch"].cpu(), None if on_device is None else on_device.cpu()
