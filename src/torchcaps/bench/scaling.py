"""How cost grows: one size of a fully connected layer at a time, over two decades.

Votes are N I J R Q numbers. Without them in memory, time is linear in each of N, I and J, and memory in what a caller
holds anyway: poses, parents, weight and their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchcaps.bench.layers import measure
from torchcaps.bench.workloads import Workload
from torchcaps.routing import Dynamic

__all__ = ["SIZES", "Point", "measure_scaling"]

BASE = Workload("scaling", "8 -> 16 vectors", Dynamic(), N=16, I=128, J=16, R=1, P=8, Q=16)

SIZES: dict[str, Sequence[int]] = {
    "N": (4, 12, 40, 120, 400),
    "I": (32, 100, 320, 1000, 3200),
    "J": (4, 12, 40, 120, 400),
}


@dataclass(frozen=True)
class Point:
    """Seconds and bytes of a forward and backward pass at one size."""

    letter: str
    size: int
    form: str
    both: float
    memory: int | None


def measure_scaling(
    forms: Sequence[str], sizes: dict[str, Sequence[int]] = SIZES, device: str = "cpu", repeats: int = 2
) -> list[Point]:
    """Each size in turn, the others as in `BASE`."""
    found = []
    for letter, values in sizes.items():
        for size in values:
            change: dict[str, Any] = {letter: size}
            for row in measure(replace(BASE, **change), forms, device, repeats):
                found.append(Point(letter, size, row.form, row.both, row.memory_both))
    return found
