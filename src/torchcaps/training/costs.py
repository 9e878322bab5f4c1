"""What a run will cost, printed before its first step; a run that cannot fit is refused there."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor, nn

from torchcaps.training.classification import Batch, Classification
from torchcaps.training.memory import Estimate, estimate, refuse_if_too_large

__all__ = ["Costs", "training_cost"]


class Costs(Callback):
    """Prints parameters, multiply-adds and memory of a training step when its first batch is there, before it is run.

    refuse     raise a ValueError, with the largest batch that fits, where the step needs more memory than is free.
    available  bytes to go by; None asks the device.

    After it has run, `estimate` is what was found; None where nothing could be told, of which it warns.
    """

    def __init__(self, refuse: bool = True, available: int | None = None) -> None:
        self.refuse, self.available = refuse, available
        self.estimate: Estimate | None = None
        self._asked = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._asked:
            return
        self._asked = True
        if not isinstance(pl_module, Classification):
            raise ValueError(f"Costs are those of a Classification, not of a {type(pl_module).__name__}")
        name = type(pl_module.model).__name__
        try:
            self.estimate = training_cost(pl_module, batch, str(trainer.precision))
        except ValueError as error:  # a cost that cannot be told is no reason not to train
            rank_zero_warn(f"{name} is trained without knowing what it will cost: {error}")
            return
        rank_zero_only(print)(f"{name}: {self.estimate}")
        if self.refuse:
            refuse_if_too_large(self.estimate, self.available, str(pl_module.device))


def training_cost(module: Classification, batch: Batch, precision: str = "32-true") -> Estimate:
    """The cost of a training step on a batch such as this one, whose numbers are not looked at."""
    x, y, mask = module.read(batch)

    def loss(twin: nn.Module, x: Tensor) -> Tensor:
        rest = tuple(torch.empty_like(part, device=x.device) for part in (y, mask) if part is not None)
        value: Tensor = twin.losses((x, *rest))[0]  # type: ignore[operator]
        return value

    def forward(twin: nn.Module, x: Tensor) -> Tensor:
        scores: Tensor = twin(x, None if mask is None else torch.empty_like(mask[:1], device=x.device))
        return scores

    return estimate(
        module,
        x.shape[1:],
        len(x),
        optimizer=module.optimization,
        precision=precision,
        loss=loss,
        forward=forward,
        device=module.device.type,
    )
