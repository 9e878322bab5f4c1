"""Shares of test items that a network gets right, from its scores.

accuracy          the highest score is that of the label                                        y [N]
pairs             the two highest scores are those of the two labels                            y [N, K]
confident_pairs   the same, and the second highest score is above 1/2 (Su 2018)                 y [N, K]
exact_match       the probabilities above 1/2 are those of all labels, and no others            y [N, K]
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcaps.training import Classification

__all__ = ["MEASURES", "answers", "measure"]


def _accuracy(scores: Tensor, chances: Tensor, y: Tensor) -> Tensor:
    return scores.argmax(1) == y


def _pairs(scores: Tensor, chances: Tensor, y: Tensor) -> Tensor:
    return y.gather(1, scores.topk(2).indices).sum(1) == 2


def _confident_pairs(scores: Tensor, chances: Tensor, y: Tensor) -> Tensor:
    return _pairs(scores, chances, y) & (scores.topk(2).values[:, 1] > 0.5)


def _exact_match(scores: Tensor, chances: Tensor, y: Tensor) -> Tensor:
    return ((chances > 0.5) == (y > 0.5)).all(1)


MEASURES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "accuracy": _accuracy,
    "pairs": _pairs,
    "confident_pairs": _confident_pairs,
    "exact_match": _exact_match,
}


@torch.no_grad()
def answers(module: Classification, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """(scores `[N, K]`, y) of a whole part, on the CPU, in the model's own precision."""
    module.eval()
    found, labels = [], []
    for x, y in loader:
        found.append(module(x.to(module.device)).float().cpu())
        labels.append(y)
    return torch.cat(found), torch.cat(labels)


def measure(names: Iterable[str], module: Classification, scores: Tensor, y: Tensor) -> dict[str, float]:
    """Each measure in percent. Raises ValueError where a score is no number."""
    if not scores.isfinite().all():
        raise ValueError(f"{type(module.model).__name__} gave scores that are no numbers: its training has diverged")
    chances = module.probabilities(scores)
    return {name: 100 * MEASURES[name](scores, chances, y).double().mean().item() for name in names}
