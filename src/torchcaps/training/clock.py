"""How long a run has trained, over all its parts where it was stopped and resumed."""

import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

__all__ = ["Clock"]


class Clock(Callback):
    """Counts minutes of training: by the wall, and of all threads of the process. Both are logged at an epoch's end.

    On a machine that others use too the second says more: it does not count waiting.
    """

    def __init__(self) -> None:
        self._before = (0.0, 0.0)
        self._start: tuple[float, float] | None = None

    @property
    def minutes(self) -> tuple[float, float]:
        """(of the wall, of processors) so far."""
        if self._start is None:
            return self._before
        wall, cpu = (now - then for now, then in zip(_now(), self._start, strict=True))
        return self._before[0] + wall, self._before[1] + cpu

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = _now()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wall, cpu = self.minutes
        pl_module.log("time/minutes", wall, rank_zero_only=True)
        pl_module.log("time/cpu_minutes", cpu, rank_zero_only=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before, self._start = self.minutes, None

    def state_dict(self) -> dict[str, Any]:
        return {"minutes": list(self.minutes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        wall, cpu = state_dict["minutes"]
        self._before = wall, cpu


def _now() -> tuple[float, float]:
    return time.perf_counter() / 60, time.process_time() / 60
