"""What a comparison calculates: intervals, calibration, and items made harder."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy import stats
from torch import Tensor

from torchcaps.data import Arrays
from torchcaps.run.compare import paired
from torchcaps.run.compare.measures import (
    by_item,
    calibration,
    class_weights,
    metrics,
    pairs_named,
    temperature,
    tempered,
)
from torchcaps.run.compare.panel import PANEL, Bench


def interval_by_loops(a: list[list[float]], b: list[list[float]]) -> tuple[float, float, float]:
    """(low, mean, high) by the formulas of the paper on plain numbers, and the two additions."""
    k, n = len(a), len(a[0])
    d = [[a[s][i] - b[s][i] for i in range(n)] for s in range(k)]
    m = sum(map(sum, d)) / (k * n)
    row = [sum(d[s]) / n for s in range(k)]
    column = [sum(d[s][i] for s in range(k)) / k for i in range(n)]
    seed = n * sum((r - m) ** 2 for r in row) / (k - 1)
    item = k * sum((c - m) ** 2 for c in column) / (n - 1)
    rest = sum((d[s][i] - row[s] - column[i] + m) ** 2 for s in range(k) for i in range(n)) / ((k - 1) * (n - 1))
    both = max(seed, rest) + max(item - rest, 0)
    df = both**2 / (seed**2 / (k - 1))
    reach = stats.t.ppf(0.975, df) * math.sqrt(both / (k * n) + 1 / (n + 2) ** 2)
    return m - reach, m, m + reach


@pytest.mark.parametrize("spread", [0.0, 0.4], ids=["seeds alike", "seeds differ"])
def test_the_interval_is_that_of_readers_and_cases(spread: float) -> None:
    rng = np.random.default_rng(1)
    level, own = spread * rng.normal(size=(2, 4, 1)), rng.normal(size=(2, 1, 30))
    a, b = (rng.normal(size=(2, 4, 30)) + rng.normal(size=30) + own + level > 0).astype(float)
    found = paired(a, b)
    assert (found.low, found.mean, found.high) == pytest.approx(interval_by_loops(a.tolist(), b.tolist()), rel=1e-9)
    assert (found.seeds, found.items) == (4, 30)


def arms_without_difference(rng: np.random.Generator, seeds: int, items: int, of_seed: float, better: float) -> Tensor:
    """Answers of two arms to items of different difficulty, which vary with seed and item; one arm is better."""
    difficulty, own = 1.5 * rng.normal(size=items), 0.5 * rng.normal(size=(2, 1, items))
    level = of_seed * rng.normal(size=(2, seeds, 1)) + better * np.array([1.0, 0.0])[:, None, None]
    return (rng.normal(size=(2, seeds, items)) + difficulty + own + level + 2 > 0).astype(float)


@pytest.mark.parametrize("of_seed", [0.0, 0.1, 0.3])
def test_of_arms_that_do_not_differ_about_one_in_twenty_is_said_to(of_seed: float) -> None:
    rng = np.random.default_rng(0)
    said = [paired(*arms_without_difference(rng, 3, 300, of_seed, 0)).direction != "none" for _ in range(500)]
    assert 0 < np.mean(said) <= 0.08


def test_a_difference_that_is_there_is_found() -> None:
    rng = np.random.default_rng(0)
    said = [paired(*arms_without_difference(rng, 3, 1000, 0.1, 1.0)).direction for _ in range(100)]
    assert said.count("higher") > 90


def test_the_other_way_round_is_the_other_sign() -> None:
    a, b = arms_without_difference(np.random.default_rng(0), 3, 100, 0.1, 0.5)
    one, other = paired(a, b), paired(b, a)
    assert (one.low, one.mean, one.high) == pytest.approx((-other.high, -other.mean, -other.low))
    assert one.p == pytest.approx(other.p)
    assert (one.p < 0.05) == (one.direction != "none")


def test_arms_that_agree_on_every_item_may_still_differ_on_others() -> None:
    same = np.ones((3, 50))
    found = paired(same, same)
    assert (found.mean, found.p) == (0, 1)
    assert found.high == pytest.approx(1.96 / 52, rel=1e-2)


def test_seeds_that_differ_widen_the_interval_of_the_same_items() -> None:
    b = np.zeros((3, 90))
    a = np.zeros((3, 90))
    a[:, :30] = 1
    alike = paired(a, b)
    a[0, :60], a[1, :30], a[2, :] = 1, 1, 0
    differ = paired(a, b)
    assert alike.mean == differ.mean
    assert differ.high - differ.low > 3 * (alike.high - alike.low)


def test_one_seed_gives_mcnemars_p_value() -> None:
    a, b = np.ones((1, 40)), np.ones((1, 40))
    a[0, :1], b[0, 1:9] = 0, 0
    found = paired(a, b)
    assert found.df is None
    assert found.p == pytest.approx(2 * sum(math.comb(9, i) for i in (0, 1)) / 2**9)


@pytest.mark.parametrize("shapes", [((3, 10), (3, 11)), ((2, 10), (3, 10)), ((3, 1), (3, 1)), ((10,), (10,))])
def test_tables_that_do_not_belong_together_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="must be tables of the same seeds and items"):
        paired(np.zeros(shapes[0]), np.zeros(shapes[1]))


def test_a_temperature_undoes_the_factor_that_logits_were_multiplied_by() -> None:
    logits = torch.randn(20_000, 4, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1)[:, 0]
    assert temperature((2.5 * logits).softmax(1), y) == pytest.approx(2.5, rel=0.05)
    torch.testing.assert_close(tempered((2.5 * logits).softmax(1), 2.5, False), logits.softmax(1), rtol=1e-5, atol=1e-6)


def test_a_temperature_of_several_labels_is_that_of_every_answer() -> None:
    logits = torch.randn(10_000, 3, dtype=torch.float64)
    y = torch.bernoulli(logits.sigmoid())
    assert temperature((2 * logits).sigmoid(), y) == pytest.approx(2, rel=0.05)
    torch.testing.assert_close(tempered((2 * logits).sigmoid(), 2.0, True), logits.sigmoid(), rtol=1e-5, atol=1e-6)


def test_a_network_that_is_right_on_all_validation_items_is_not_made_certain() -> None:
    y = torch.arange(100) % 5
    p = torch.full((100, 5), 0.1).scatter(1, y[:, None], 0.6)
    sure = tempered(p, temperature(p, y), False).amax(1)
    assert 0.9 < sure.min() < 0.999


def test_the_metrics_of_single_labels_are_those_of_scikit_learn() -> None:
    p, y = torch.randn(90, 3).double().softmax(1), torch.randint(0, 3, (90,))
    found = metrics(p, y)
    assert found["nll"] == pytest.approx(sklearn.metrics.log_loss(y, p))
    right = by_item(p, y, "accuracy").numpy()
    assert right.mean() == pytest.approx(found["accuracy"])
    weighted = (right * class_weights(y.numpy())).mean()
    assert weighted == pytest.approx(sklearn.metrics.balanced_accuracy_score(y, p.argmax(1)))


def test_the_metrics_of_several_labels_are_those_of_scikit_learn() -> None:
    p, y = torch.rand(80, 3), torch.randint(0, 2, (80, 3)).float()
    each = [sklearn.metrics.log_loss(y[:, k], p[:, k].double()) for k in range(3)]
    assert metrics(p, y)["nll"] == pytest.approx(sum(each) / 3, rel=1e-5)
    chosen = (p > 0.5).float()
    assert by_item(p, y, "exact_match").mean() == pytest.approx(sklearn.metrics.accuracy_score(y, chosen))
    assert by_item(p, y, "accuracy").mean() == pytest.approx((chosen == y).double().mean().item())


@pytest.mark.parametrize("several", [False, True])
def test_the_bins_of_calibration_give_the_calibration_error(several: bool) -> None:
    p = torch.rand(500, 4) if several else torch.randn(500, 4).mul(2).softmax(1)
    y = torch.randint(0, 2, (500, 4)).float() if several else torch.randint(0, 4, (500,))
    bins = np.array(calibration(p, y))
    ece = (bins[:, 0] * np.abs(bins[:, 1] - bins[:, 2])).sum() / bins[:, 0].sum()
    assert ece == pytest.approx(metrics(p, y)["ece"], abs=1e-5)


def test_both_classes_are_named_by_the_two_highest_probabilities_in_any_order() -> None:
    p = torch.tensor([[0.1, 0.4, 0.5], [0.6, 0.1, 0.3]])
    assert pairs_named(p, torch.tensor([[1, 2], [1, 2]])).tolist() == [1, 0]
    assert pairs_named(p, torch.tensor([[2, 1], [2, 0]])).tolist() == [1, 1]


def bench(size: tuple[int, ...] = (12, 12), **settings: object) -> Bench:
    x = torch.rand(60, 1, *size, generator=torch.Generator().manual_seed(0)).numpy()
    kind = {1: "signal", 2: "image", 3: "volume"}[len(size)]
    data = Arrays(x, np.arange(60) % 3, kind=kind, layout="channels_first", test_fraction=0.5, **settings)
    return Bench.of(data.test_dataloader().view)


@pytest.mark.parametrize("size", [(40,), (12, 12), (32, 32, 32)])
def test_what_cannot_be_done_to_a_kind_of_item_is_not_in_its_panel(size: tuple[int, ...]) -> None:
    names = bench(size).names()
    assert ("rotation" in names) == ("scale" in names) == (len(size) == 2)
    assert {"shift", "noise", "occlusion", "overlap", "both"} <= set(names)
    assert "both" not in bench(size)._replace(y=torch.arange(30) % 2).names()  # of two classes they are all there are


@pytest.mark.parametrize("size", [(40,), (12, 12), (32, 32, 32)])
@pytest.mark.parametrize("name", PANEL)
def test_a_perturbation_is_a_function_of_the_item_and_of_its_strength(name: str, size: tuple[int, ...]) -> None:
    b = bench(size)
    if name not in b.names():
        return
    changed = []
    for strength in PANEL[name].strengths:
        whole = b.batch(name, strength, slice(0, 30))[0]
        parts = torch.cat([b.batch(name, strength, slice(i, i + 7))[0] for i in range(0, 28, 7)])
        torch.testing.assert_close(parts, whole[:28])
        assert not b.images or (whole.min() >= 0 and whole.max() <= 1)
        changed.append(float((whole - b.x).abs().mean()))
    assert (changed[0] == 0) == (name != "both")
    ordered = changed if name != "scale" else [changed[i] for i in (0, 4, 5)]
    assert all(more > less for less, more in itertools.pairwise(ordered)) or name == "rotation"
    assert len(set(changed)) == len(changed)


def test_a_quarter_turn_is_one_to_either_side() -> None:
    b = bench()
    x = b.batch("rotation", 90, slice(0, 30))[0]
    sides = [torch.rot90(b.x, k, (2, 3)) for k in (1, 3)]
    off = torch.stack([(x - side).abs().flatten(1).amax(1) for side in sides])
    assert (off.amin(0) < 1e-4).all()
    assert {0, 1} == set(off.argmin(0).tolist())


def test_shift_moves_and_occlusion_covers_what_they_say() -> None:
    b = bench((16, 16))
    b = b._replace(x=torch.zeros_like(b.x))
    b.x[..., 8, 8] = 1
    place = b.batch("shift", 0.25, slice(0, 30))[0].flatten(1).argmax(1)
    away = torch.stack([place // 16 - 8, place % 16 - 8], 1).float().norm(dim=1)
    assert ((away - 4).abs() < 1).all()
    assert len(set(place.tolist())) > 5
    b = b._replace(x=torch.ones_like(b.x))
    b.x[..., ::2, :] = 0  # the mean, one half, is none of its values
    covered = (b.batch("occlusion", 0.25, slice(0, 30))[0] == 0.5).double().mean((1, 2, 3))
    assert covered.tolist() == [0.25] * 30


def test_another_item_lies_over_the_first_by_what_it_is_beside_its_background() -> None:
    b = bench()
    ink = (b.x > 0.8).float()  # the background is the median
    labels = b.y[torch.from_numpy(b.other)]
    assert (labels != b.y).all()
    dark, light = b._replace(x=ink), b._replace(x=1 - ink)
    on_black, on_white = (each.batch("overlap", 0.5, slice(0, 30))[0] for each in (dark, light))
    torch.testing.assert_close(on_white, 1 - on_black)
    torch.testing.assert_close(on_black, torch.maximum(ink, 0.5 * ink[torch.from_numpy(b.other)]).clamp(max=1))
    assert dark.batch("both", 1, slice(0, 30))[1].tolist() == torch.stack([b.y, labels], 1).tolist()


def test_items_are_made_harder_before_they_are_normalised() -> None:
    plain, normalised = bench(), bench(normalize=([0.3], [0.2]))
    for name in ("noise", "rotation", "overlap"):
        strength = PANEL[name].strengths[-1]
        x = plain.batch(name, strength, slice(0, 30))[0]
        torch.testing.assert_close(normalised.batch(name, strength, slice(0, 30))[0], (x - 0.3) / 0.2)
