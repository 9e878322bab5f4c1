"""How the weights move: the optimiser, which weights decay, and the learning rate over the steps of a run.

Step t of T, w of them warm-up, m the share of the learning rate that is left at the end:

    warm-up     lr (t + 1) / (w + 1)                                      t < w, before any of the three below
    constant    lr
    cosine      lr (m + (1 - m) (1 + cos(pi (t - w) / (T - w))) / 2)      Loshchilov, Hutter 2017
    multistep   lr gamma^k                                                k milestones lie behind
    one_cycle   torch.optim.lr_scheduler.OneCycleLR                       Smith, Topin 2018; its warm-up is w, or 0.3 T
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

__all__ = ["MakeOptimizer", "Optimization", "Schedule", "decaying_and_spared"]

Schedule = Literal["constant", "cosine", "multistep", "one_cycle"]
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Optimization:
    """Settings of a run's optimiser and learning rate.

    optimizer        "adam", "adamw", "sgd", or a callable that makes one of parameter groups: the next three settings
                     are then its own.
    lr               the learning rate at its highest.
    weight_decay     0 is none; of the weights alone while `decay_everything` is False, which spares norms and biases.
    momentum         of "sgd".
    schedule         "constant", "cosine", "multistep" or "one_cycle": the table on top of this file.
    warmup_steps, warmup_epochs  how long the learning rate rises: steps of the optimiser, or epochs (parts of one too).
    milestones       epochs after which "multistep" multiplies the learning rate by `gamma`.
    final_lr         what "cosine" ends at, as a share of `lr`.

    Raises ValueError for settings that contradict each other.

    >>> Optimization("sgd", lr=0.1, schedule="multistep", milestones=[2]).factor(step=20, total=30, epoch=10)
    0.1
    """

    optimizer: str | MakeOptimizer = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    decay_everything: bool = False
    momentum: float = 0.9
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    milestones: Sequence[float] = ()
    gamma: float = 0.1
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.optimizer) and self.optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: take {_names(_OPTIMIZERS)}, or a callable that makes one")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}: take {_names(_SCHEDULES)}")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr}: the learning rate must be above 0")
        if min(self.weight_decay, self.warmup_steps, self.warmup_epochs, self.final_lr) < 0:
            raise ValueError(f"no setting of {self} may be below 0")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"warm-up of {self.warmup_steps} steps and of {self.warmup_epochs} epochs: give one of them"
            )
        if bool(self.milestones) != (self.schedule == "multistep"):
            raise ValueError(
                f"schedule={self.schedule!r} with milestones={tuple(self.milestones)}: the schedule 'multistep' needs "
                "epochs to step at, such as milestones=[20, 30], and no other takes any"
            )

    def make_optimizer(self, module: nn.Module) -> Optimizer:
        """An optimiser of all parameters of `module` that train."""
        lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
        if lazy:
            raise ValueError(f"{lazy[0]} has no size yet: run the model on one batch before it is trained")
        decaying, spared = decaying_and_spared(module)
        if self.decay_everything:
            decaying, spared = [*decaying, *spared], []
        groups: list[dict[str, Any]] = [{"params": decaying}, {"params": spared, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if not groups:
            raise ValueError(f"{type(module).__name__} has no parameter that trains (requires_grad)")
        if callable(self.optimizer):
            return self.optimizer(groups)
        return _OPTIMIZERS[self.optimizer](self, groups)

    def make_schedule(self, optimizer: Optimizer, total: float, epoch: float) -> LRScheduler | None:
        """The schedule over `total` steps of the optimiser, `epoch` of them an epoch; None where the rate is constant.

        Raises ValueError where the schedule needs a number that is not known (inf): the data have no length.
        """
        needs_end, needs_epochs = self.schedule in ("cosine", "one_cycle"), bool(self.warmup_epochs or self.milestones)
        if (needs_end and math.isinf(total)) or (needs_epochs and math.isinf(epoch)):
            raise ValueError(
                f"schedule={self.schedule!r} with warmup_epochs={self.warmup_epochs} needs the number of steps, and "
                "these data have no length: give max_steps, and the warm-up in steps; or take 'constant'"
            )
        warmup = self._warmup(epoch)
        if self.schedule == "constant" and not warmup:
            return None
        if needs_end and warmup >= total:
            raise ValueError(f"a warm-up of {warmup:g} steps leaves nothing of {total:g}: make it shorter")
        if self.schedule == "one_cycle":
            rates = [self.lr] * len(optimizer.param_groups)
            return OneCycleLR(optimizer, rates, total_steps=int(total), pct_start=warmup / total if warmup else 0.3)
        return LambdaLR(optimizer, lambda step: self.factor(step, total, epoch))

    def factor(self, step: int, total: float, epoch: float) -> float:
        """The learning rate of a step, as a share of `lr`, for all schedules but "one_cycle"."""
        warmup = self._warmup(epoch)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.schedule == "cosine":
            along = min(1.0, (step - warmup) / (total - warmup))
            return self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * along)) / 2
        if self.schedule == "multistep":
            return self.gamma ** sum(step >= milestone * epoch for milestone in self.milestones)
        return 1.0

    def _warmup(self, epoch: float) -> int:
        return round(self.warmup_epochs * epoch) if self.warmup_epochs else self.warmup_steps


_OPTIMIZERS: dict[str, Callable[[Optimization, Any], Optimizer]] = {
    "adam": lambda o, groups: Adam(groups, o.lr, weight_decay=o.weight_decay),
    "adamw": lambda o, groups: AdamW(groups, o.lr, weight_decay=o.weight_decay),
    "sgd": lambda o, groups: SGD(groups, o.lr, momentum=o.momentum, weight_decay=o.weight_decay),
}
_SCHEDULES = ("constant", "cosine", "multistep", "one_cycle")


def decaying_and_spared(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that train: those that weight decay should pull on, and those that it should spare.

    Spared are vectors and single numbers, all of a normalisation, and what is named after a bias, a norm or a prior
    (what routing rules learn: prior logits, LayerNorm gains, betas).
    """
    decaying: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            named = any(word in name for word in ("bias", "norm", "prior", "beta"))
            spare = parameter.dim() < 2 or isinstance(part, NORMS) or named
            (spared if spare else decaying).append(parameter)
    return decaying, spared


def _names(table: Iterable[str]) -> str:
    return ", ".join(map(repr, table))
