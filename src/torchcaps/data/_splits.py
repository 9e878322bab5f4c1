"""Which items go where: shares of a set that keep its classes' shares."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .random import permutation

__all__ = ["class_keys", "split_off", "stratified"]


def class_keys(labels: Tensor) -> NDArray[np.int64]:
    """For each item what is kept in its share: its class; of several the rarest, and K where there is none."""
    y = labels.numpy()
    if y.ndim == 1:
        return y.astype(np.int64)
    K = y.shape[1]
    rarity = np.where(y > 0, y.sum(0, keepdims=True), np.inf)
    return np.where(y.any(1), rarity.argmin(1), K).astype(np.int64)


def stratified(keys: NDArray[np.int64], count: int, order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """`count` of the items, in rising order, each class with its share; one at least, and all but one at most.

    Within a class the first in `order` are taken, by default the first. What is taken for a smaller count is part of
    what is taken for a larger one.
    """
    n = len(keys)
    order = np.arange(n) if order is None else order
    _, inverse, sizes = np.unique(keys[order], return_inverse=True, return_counts=True)
    by_class = np.argsort(inverse, kind="stable")
    rank = np.empty(n, np.int64)
    rank[by_class] = np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    size = sizes[inverse]
    quantile = (rank + 0.5) / size  # the items of every class lie evenly between 0 and 1
    quantile[rank == 0] = -1
    quantile[(rank == size - 1) & (size > 1)] = 2
    return np.sort(order[np.argsort(quantile, kind="stable")[:count]])


def split_off(
    labels: Tensor, fraction: float, seed: int, purpose: str, names: Sequence[str], parts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the rest, a stratified random share) of a set that is being split into `parts`.

    Raises ValueError where a class of a single-label set has too few items to be in every part.
    """
    n, keys = len(labels), class_keys(labels)
    if labels.dim() == 1:
        counts = np.bincount(keys, minlength=len(names))
        if counts.min() < parts:
            k = int(counts.argmin())
            raise ValueError(
                f"class {names[k]!r} has {counts[k]} training item{'' if counts[k] == 1 else 's'}, too few to split "
                f"off {purpose} data: each class needs {parts}. Give more of it, or {purpose}_fraction=0"
            )
    least = len(names) if labels.dim() == 1 else 1
    count = max(least, int(fraction * n + 0.5))
    if n - count < least:
        raise ValueError(
            f"{purpose}_fraction={fraction} takes {count} of {n} items and leaves {n - count}, too few to train on "
            f"{len(names)} classes: give a smaller one"
        )
    share = stratified(keys, count, permutation(n, seed, f"split {purpose}"))
    return np.setdiff1d(np.arange(n), share), share
