"""Random numbers that are a function of (seed, what for, epoch, item): the same for any batch, process or worker.

    mix(z)          z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    state = 0;      for each key:  state = mix(state + GOLDEN (key + 1))             all modulo 2^64

with the keys seed, purpose, epoch, item and number of the draw. `mix` is the output function of SplitMix64 (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators", with the constants of its published code); it is one
to one, and so no two items of an epoch ever meet in the same number. No generator is kept, so there is none to store,
to restore, or to hand to a worker.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits", "integers", "permutation", "uniform"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ALL = 2**64 - 1


def bits(seed: int, purpose: str, epoch: int, items: NDArray[np.int64], draws: int = 1) -> NDArray[np.uint64]:
    """64 random bits for each item and draw, `[N, draws]`, of items `[N]`.

    `purpose` keeps numbers for different ends apart: a shift of 2 says nothing about which partner was drawn.
    """
    state = np.zeros(1, np.uint64)
    for key in (seed, zlib.crc32(purpose.encode()), epoch):
        state = _absorb(state, np.array([key & _ALL], np.uint64))
    return _absorb(_absorb(state, items.astype(np.uint64))[:, None], np.arange(draws, dtype=np.uint64))


def uniform(seed: int, purpose: str, epoch: int, items: NDArray[np.int64], draws: int = 1) -> NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-53, `[N, draws]`."""
    return (bits(seed, purpose, epoch, items, draws) >> np.uint64(11)) * 2.0**-53


def integers(
    high: int | NDArray[np.int64], seed: int, purpose: str, epoch: int, items: NDArray[np.int64], draws: int = 1
) -> NDArray[np.int64]:
    """Whole numbers in 0 .. high - 1, `[N, draws]`; `high` may differ from item to item, `[N, 1]`, up to 2^53."""
    return np.floor(uniform(seed, purpose, epoch, items, draws) * high).astype(np.int64)


def permutation(n: int, seed: int, purpose: str, epoch: int = 0) -> NDArray[np.int64]:
    """An order of 0 .. n - 1, `[n]`: each of them is equally likely."""
    return np.argsort(bits(seed, purpose, epoch, np.arange(n))[:, 0], kind="stable")


def _absorb(state: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # in place of a loop over items: unsigned products of arrays wrap around, as the recipe asks
    z = state + GOLDEN * (key + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
    return z ^ (z >> np.uint64(31))
