"""What each arm costs: counted where it can be, and timed side by side.

parameters, head_parameters   in all, and beyond the backbone
multiply_adds                 of one example, forward
step_bytes                    the most that is alive in one training step: `torchcaps.training.estimate`
ms                            forward of one example out of a batch, the least of several tries: what else the machine
                              does can only add. Arms take turns, so that they meet the same machine
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import ImageData
from torchcaps.models.headed import HeadedNet
from torchcaps.training import Classification, training_cost
from torchcaps.training.memory import refuse_if_too_large

__all__ = ["count", "milliseconds"]

SECONDS = 1.0
"""That an arm is timed for."""


def count(module: Classification, data: ImageData, precision: str, device: str) -> dict[str, Any]:
    """The first four. ValueError where a training step does not fit into memory."""
    batch = next(iter(data.train_dataloader()))
    cost = training_cost(module, batch, precision)  # type: ignore[arg-type]  # two or three tensors
    refuse_if_too_large(cost, None, device)
    model = module.model
    head = model.head if isinstance(model, HeadedNet) else model
    return {
        "parameters": cost.parameters,
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "multiply_adds": cost.multiply_adds,
        "step_bytes": cost.peak_bytes,
    }


def milliseconds(
    modules: Mapping[str, Classification], batch: tuple[Tensor, ...], device: torch.device
) -> dict[str, float]:
    """Of one example, for each module."""
    x, _, *mask = (part.to(device) for part in batch)
    least = dict.fromkeys(modules, float("inf"))
    for module in modules.values():
        module.to(device).eval()
        _forward(module, x, mask, device)
    end = time.perf_counter() + SECONDS * len(modules)
    tries = 0
    while tries < 3 or time.perf_counter() < end:
        for name, module in modules.items():
            least[name] = min(least[name], _forward(module, x, mask, device))
        tries += 1
    return {name: 1000 * seconds / len(x) for name, seconds in least.items()}


@torch.no_grad()
def _forward(module: Classification, x: Tensor, mask: list[Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    module(x, *mask)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
