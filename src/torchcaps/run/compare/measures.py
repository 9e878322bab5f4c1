"""From probabilities to what is reported: item by item where arms are compared, and as one number for each run.

    item by item       accuracy     single label: 1 where the class of the highest probability is right, 0 where not
                                    several labels: the share of an item's yes-or-no answers that are right
                       exact_match  several labels: 1 where all of them are right
                       nll          -log p of the right class; of several labels the mean over them
    balanced_accuracy  is the mean of the items' accuracy with weights n / (K n_y), n_y items being of the item's class
    nll, ece           as the model gives probabilities, and calibrated

Calibrated: with one temperature T for each network, fitted to the validation items (Guo et al. 2017, "On calibration of
modern neural networks"),

    p_k(T) = p_k^(1/T) / sum_j p_j^(1/T)              for logits that is softmax(logits / T); of several labels the same
                                                      for each answer, yes against no
    minimise  sum_i -log p_iy(T)  +  mean over i and k of -log p_ik(T)

The second term is one item more of which nobody knows the class: without it a network that is right on all validation
items would be told to be certain. The sum is convex in 1/T, so its derivative is searched for its one zero.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.training import evaluation_metrics

__all__ = ["by_item", "calibration", "class_weights", "metrics", "pairs_named", "temperature", "tempered"]

LEAST = 1e-12
"""Probabilities are taken as no smaller, and no larger than 1 less this, where their logarithm is."""

BINS = 15
"""Of the calibration error, as in training."""

RANGE = 0.01, 100.0
"""Of a temperature."""


def metrics(p: Tensor, y: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """All that torchcaps.training measures, and "nll", of probabilities `[N, K]` and y `[N]` or presence `[N, K]`."""
    several = y.dim() == 2
    collection = evaluation_metrics(p.shape[1], several, threshold)
    collection.update(p.float(), (y > 0.5).long() if several else y)
    values = {name: float(value) for name, value in collection.compute().items()}
    return values | {"nll": float(by_item(p, y, "nll", threshold).mean())}


def by_item(p: Tensor, y: Tensor, what: str, threshold: float = 0.5) -> Tensor:
    """`[N]` in float64: "accuracy", "exact_match" or "nll" of each item."""
    if what == "nll":
        log_p, answers = _binary(p, y)
        nll = -log_p.gather(1, answers[:, None])[:, 0]
        return nll.view(len(y), -1).mean(1)
    if y.dim() == 1:
        return (p.argmax(1) == y).double()
    right = (p > threshold) == (y > 0.5)
    return right.all(1).double() if what == "exact_match" else right.double().mean(1)


def pairs_named(p: Tensor, pairs: Tensor) -> Tensor:
    """`[N]`: 1 where the two highest of the probabilities `[N, K]` are the two classes `[N, 2]`, 0 where not."""
    return (p.topk(2, 1).indices.sort(1).values == pairs.sort(1).values).all(1).double()


def class_weights(y: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights `[N]` that make a mean over items one over the classes `[N]` that occur."""
    classes, inverse, counts = np.unique(y, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = (len(y) / (len(classes) * counts))[inverse]
    return weights


def temperature(p: Tensor, y: Tensor) -> float:
    """T for the probabilities `[N, K]` of validation items and their y `[N]`, or presence `[N, K]`."""
    z, answers = _binary(p, y)
    low, high = (float(np.log(1 / end)) for end in reversed(RANGE))
    for _ in range(60):
        middle = (low + high) / 2
        expected = ((np.exp(middle) * z).softmax(1) * z).sum(1)
        slope = (expected - z.gather(1, answers[:, None])[:, 0]).sum() + (expected - z.mean(1)).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


def tempered(p: Tensor, T: float, several: bool) -> Tensor:
    """Probabilities `[N, K]` at the temperature T."""
    z = _log(p)
    if several:
        return ((z - _log(1 - p)) / T).sigmoid()
    return (z / T).softmax(1)


def calibration(p: Tensor, y: Tensor) -> list[list[float]]:
    """For each bin of equal width [items, mean confidence, share that is right]; of several labels, every answer."""
    if y.dim() == 2:
        confidence, right = p.flatten(), (y > 0.5).flatten()
    else:
        confidence, chosen = p.max(1)
        right = chosen == y
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    found = []
    for b in range(BINS):
        inside = bins == b
        count = int(inside.sum())
        mean, share = (float(v[inside].double().mean()) if count else 0.0 for v in (confidence, right))
        found.append([count, mean, share])
    return found


def summary(p: Tensor, y: Tensor, T: float, threshold: float) -> dict[str, Any]:
    """What a record keeps of the test items' probabilities."""
    calm = tempered(p, T, y.dim() == 2)
    raw = metrics(p, y, threshold)
    after = metrics(calm, y, threshold)
    items = {"accuracy": by_item(p, y, "accuracy", threshold), "nll": by_item(calm, y, "nll")}
    if y.dim() == 2:
        items["exact_match"] = by_item(p, y, "exact_match", threshold)
    return {
        "metrics": raw | {"nll_calibrated": after["nll"], "ece_calibrated": after["ece"]},
        "calibration": {"raw": calibration(p, y), "calibrated": calibration(calm, y)},
        "items": {name: [round(v, 5) for v in values.tolist()] for name, values in items.items()},
    }


def _binary(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, answers): `[N, K]` and `[N]`; of several labels each answer is an item of two classes, no and yes."""
    if y.dim() == 1:
        return _log(p), y.long()
    return torch.stack([_log(1 - p).flatten(), _log(p).flatten()], 1), (y > 0.5).long().flatten()


def _log(p: Tensor) -> Tensor:
    return p.double().clamp(LEAST, 1 - LEAST).log()
