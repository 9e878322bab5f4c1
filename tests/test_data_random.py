"""Random numbers as functions of (seed, purpose, epoch, item): reproducible, uniform, independent of each other."""

import numpy as np
import pytest
from scipy import stats

from torchcaps.data.random import GOLDEN, bits, integers, permutation, uniform

N = 100_000
ITEMS = np.arange(N)


def plain_mix(z: int) -> int:
    """The output function of SplitMix64 in Python's whole numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_the_mixer_is_that_of_splitmix64() -> None:
    # the first numbers of the published generator, started at 1234567
    state, numbers = 1234567, []
    for _ in range(3):
        state = (state + int(GOLDEN)) % 2**64
        numbers.append(plain_mix(state))
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_bits_are_the_recipe_in_plain_whole_numbers() -> None:
    import zlib

    def plain(*keys: int) -> int:
        state = 0
        for key in keys:
            state = plain_mix((state + int(GOLDEN) * (key % 2**64 + 1)) % 2**64)
        return state

    found = bits(-3, "shift", 7, np.array([0, 5, 2**40]), 4)
    expected = [[plain(-3, zlib.crc32(b"shift"), 7, item, draw) for draw in range(4)] for item in (0, 5, 2**40)]
    assert found.tolist() == expected


def test_an_item_gets_the_same_numbers_in_any_company() -> None:
    items = np.array([17, 3, 99_999])
    assert np.array_equal(bits(1, "a", 2, ITEMS, 3)[items], bits(1, "a", 2, items, 3))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (2**63, 10_000)])
def test_numbers_are_uniform(seed: int, epoch: int) -> None:
    u = uniform(seed, "shift", epoch, ITEMS, 2)
    assert u.min() >= 0
    assert u.max() < 1
    for column in u.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    set_bits = np.unpackbits(bits(seed, "shift", epoch, ITEMS).view(np.uint8)).reshape(N, 64).mean(0)
    assert abs(set_bits - 0.5).max() < 5 * 0.5 / N**0.5


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, "shift", 0, 0), (1, "shift", 0, 0)),
        ((0, "shift", 0, 0), (0, "crop", 0, 0)),
        ((0, "shift", 0, 0), (0, "shift", 1, 0)),
        ((0, "shift", 0, 0), (0, "shift", 0, 1)),
        ((0, "shift", 1, 0), (1, "shift", 0, 0)),
        ((5, "shift", 0, 0), (0, "shift", 5, 0)),
    ],
    ids=["seeds", "purposes", "epochs", "draws", "seed and epoch", "seed for epoch"],
)
def test_numbers_with_other_keys_are_independent(a: tuple, b: tuple) -> None:
    u, v = (uniform(seed, purpose, epoch, ITEMS, 2)[:, draw] for seed, purpose, epoch, draw in (a, b))
    assert abs(np.corrcoef(u, v)[0, 1]) < 4 / N**0.5
    # all 64 pairs of eighths equally often, and no common bits
    table = np.histogram2d(u, v, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-3
    x, y = (bits(seed, purpose, epoch, ITEMS, 2)[:, draw] for seed, purpose, epoch, draw in (a, b))
    equal = np.unpackbits((x ^ y).view(np.uint8)).reshape(N, 64).mean(0)
    assert abs(equal - 0.5).max() < 5 * 0.5 / N**0.5


def test_neighbours_are_independent() -> None:
    u = uniform(0, "partner", 3, ITEMS)[:, 0]
    for lag in (1, 2, 3, 64, 128):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / N**0.5


def test_no_two_items_of_an_epoch_share_a_number() -> None:
    assert len(np.unique(bits(0, "order", 0, np.arange(1_000_000)))) == 1_000_000


def test_whole_numbers_are_equally_often_and_within_their_range() -> None:
    found = integers(9, 0, "shift", 0, ITEMS, 2)
    counts = np.bincount(found.ravel(), minlength=9)
    assert len(counts) == 9
    assert stats.chisquare(counts).pvalue > 1e-3
    high = np.array([[1], [2], [1000]])
    assert (integers(high, 0, "partner", 0, np.arange(3), 500) < high).all()
    assert integers(high, 0, "partner", 0, np.arange(3), 500)[2].max() > 900


def test_permutations_hold_every_item_once_and_each_item_is_equally_likely_everywhere() -> None:
    orders = np.array([permutation(5, 0, "order", epoch) for epoch in range(20_000)])
    assert (np.sort(orders, 1) == np.arange(5)).all()
    places = np.array([np.bincount(column, minlength=5) for column in orders.T])
    assert stats.chisquare(places.ravel()).pvalue > 1e-3
    codes = orders @ 5 ** np.arange(5)
    assert stats.chisquare(np.unique(codes, return_counts=True)[1]).pvalue > 1e-3
    assert len(np.unique(codes)) == 120
