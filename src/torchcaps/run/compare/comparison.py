"""`compare`: the same data, splits, steps and seeds for every arm, and what the numbers say."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng

from torchcaps import __version__
from torchcaps.data import ImageData, LabelledData
from torchcaps.data.parts import View
from torchcaps.run.compare.arms import Arm, chosen_arms, standard_arms
from torchcaps.run.compare.costs import count, milliseconds
from torchcaps.run.compare.measures import class_weights
from torchcaps.run.compare.panel import PANEL, Bench
from torchcaps.run.compare.statistics import Difference, paired
from torchcaps.run.compare.trial import (
    Budget,
    Select,
    Trial,
    make_module,
    read_record,
    run_trial,
    with_fraction,
    write_json,
)
from torchcaps.run.files import check_place, write_whole
from torchcaps.training import Optimization
from torchcaps.types import whole

__all__ = ["MEASURES", "Comparison", "compare", "default_optimization"]

MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "exact_match": "exact match",
}
"""What the verdict may be about, and how to call it."""

LAYOUT = 1
"""Of records."""


def default_optimization(epochs: int, lr: float = 2e-3) -> Optimization:
    """AdamW with a cosine over the run, the first twentieth of it as warm-up."""
    return Optimization("adamw", lr=lr, weight_decay=1e-2, schedule="cosine", warmup_epochs=epochs / 20)


def compare(
    data: ImageData,
    out: str | os.PathLike[str],
    *,
    seeds: int | Sequence[int] = 3,
    epochs: int = 20,
    arms: Sequence[str | Arm] | None = None,
    backbone: str | Mapping[str, Any] | None = None,
    routing: str | Mapping[str, Any] = "Dynamic",
    head: Mapping[str, Any] | None = None,
    optimization: Optimization | None = None,
    select: Select = "last",
    clip: float | None = 1.0,
    precision: str = "32-true",
    device: str = "auto",
    measure: str | None = None,
    robustness: bool = True,
    label_fractions: Sequence[float] = (1.0,),
    name: str | None = None,
    say: Callable[[str], None] = print,
) -> "Comparison":
    """Train every arm from every seed on the same data, test it, and say whether capsules help, and routing.

    data             with a validation and a test part. Its batch size and augmentation are every arm's.
    out              a folder for report.html, results.csv, results.json, and a record of each network. A comparison
                     that was stopped goes on there; seeds, arms and label fractions can be added later.
    seeds            so many, or which: of the weights, of the order of the data, and of augmentation.
    epochs           of training, on all labels; on a share of them as many steps.
    arms             out of "linear", "matched", "uniform" and "routed" (arms.py), or `Arm`s of your own.
    backbone         None: three convolutions; or a model of timm's: "resnet18", or {"timm": ..., "pretrained": True}.
    routing          of the arm "routed", as in a recipe.
    head             sizes of the capsules: primary_types, primary_pose, class_pose; and widths of the convolutions.
    optimization     optimiser and learning rate, by default `default_optimization(epochs)`.
    select           "last" epoch, or "best" by validation loss.
    clip             largest norm of a gradient, None for any.
    precision        of training, Lightning's name of it; tested is in float32.
    device           "cpu", "cuda", or "auto".
    measure          what the verdict is about: "accuracy" or "balanced_accuracy" of one label, "exact_match" or
                     "accuracy" (of single answers) of several. The first is the default.
    robustness       test the networks of all labels also on items made harder (panel.py).
    label_fractions  shares of the training labels, such as (0.05, 0.2, 1): each adds a network for each arm and seed.
    name             of the data, for the report.
    say              called with a line for each network that is ready, and with the outcome.

    On one machine, with one version of torch and one number of threads, the numbers are the same each time on a CPU;
    times are not. Raises ValueError where arguments, data or what lies in `out` do not fit.
    """
    if not isinstance(data, ImageData):
        raise ValueError(
            f"data must be a set of torchcaps.data, such as Arrays(x, y) or NPZ(path), not a {type(data).__name__}"
        )
    epochs = _at_least_one("epochs", epochs)
    optimization = optimization or default_optimization(epochs)
    budget = Budget(epochs, optimization, select, clip, precision, _device(device))
    if select not in ("last", "best"):
        raise ValueError(f"select={select!r}: take 'last' or 'best', the epoch with the lowest validation loss")
    chosen_seeds = _seeds(seeds)
    measure = _measure(data, measure)
    fractions = _fractions(data, label_fractions)
    _check_parts(data, robustness)
    folder = Path(out)
    for place in (folder, folder / "records"):
        check_place(place, folder=True)
    with isolate_rng(include_cuda=torch.cuda.is_available()):
        chosen = chosen_arms(standard_arms(data, backbone, routing, head), arms)
        modules = {arm.key: make_module(arm, data, budget) for arm in chosen}
        costs = {key: count(module, data, precision, budget.device) for key, module in modules.items()}
    steps = epochs * len(data.train_dataloader())
    same = _same_for_all(data, budget)
    bench, panel = None, None
    if robustness:
        bench, panel = _bench(data), {key: list(p.strengths) for key, p in PANEL.items()}
    records: list[dict[str, Any]] = []
    trials = [Trial(arm, seed, share) for share in fractions for seed in chosen_seeds for arm in chosen]
    for number, trial in enumerate(trials, start=1):
        path = folder / "records" / trial.file
        all_labels = trial.fraction == 1
        of = {
            **same, "robustness": panel if all_labels else None,
            "arm": trial.arm.trained(), "seed": trial.seed, "fraction": trial.fraction,
        }  # fmt: skip
        record = read_record(path, of)
        if record is None:
            part = with_fraction(data, trial.fraction)
            found = run_trial(trial, part, budget, steps, bench if all_labels else None)
            write_json(path, {"of": of, **found})
            record = read_record(path, of)
            assert record is not None
        value, took = record["metrics"][measure], _duration(record["minutes"])
        say(f"{number} of {len(trials)}: {trial}: {MEASURES[measure]} {100 * value:.1f} %, {took}")
        records.append({key: value for key, value in record.items() if key != "of"})
    # timed when everything else is done
    batch = next(iter(data.test_dataloader()))
    times = milliseconds(modules, batch, torch.device(budget.device))
    comparison = Comparison(
        name=name or type(data).__name__,
        measure=measure,
        arms=chosen,
        seeds=chosen_seeds,
        fractions=fractions,
        costs={key: {**cost, "ms": times[key], "batch": len(batch[0])} for key, cost in costs.items()},
        records=records,
        facts=_facts(data, budget, same),
        labels=None if data.multi_label else np.concatenate([y.numpy() for _, y, *_ in data.test_dataloader()]),
    )
    comparison.write(folder)
    say(str(comparison))
    say(f"{folder / 'report.html'}")
    return comparison


@dataclass(frozen=True)
class Comparison:
    """What came out, and what can be said of it.

    records  of each network: "arm", "seed", "fraction", "metrics", "items" (test item by test item), ...
    costs    of each arm, by its key.
    labels   of the test items `[N]`; None where an item has several.
    """

    name: str
    measure: str
    arms: list[Arm]
    seeds: list[int]
    fractions: list[float]
    costs: dict[str, dict[str, Any]]
    records: list[dict[str, Any]]
    facts: dict[str, Any]
    labels: NDArray[np.int64] | None = field(repr=False, default=None)

    def of(self, arm: str, fraction: float | None = None) -> list[dict[str, Any]]:
        """An arm's records, by seed; of the largest share of labels where none is said."""
        share = max(self.fractions) if fraction is None else fraction
        return [r for r in self.records if r["arm"] == arm and r["fraction"] == share]

    def values(self, arm: str, metric: str, fraction: float | None = None) -> NDArray[np.float64]:
        """A metric of each seed's network; NaN where it is not defined."""
        found = [r["metrics"][metric] for r in self.of(arm, fraction)]
        return np.array([math.nan if v is None else v for v in found])

    def difference(self, a: str, b: str, of: str | None = None, fraction: float | None = None) -> Difference:
        """a - b with its interval: of the measure, of "nll" (calibrated), or of the mean over a perturbation."""
        of = self.measure if of is None else of
        tables = [np.array([self._items(r, of) for r in self.of(arm, fraction)]) for arm in (a, b)]
        if of == "balanced_accuracy":
            assert self.labels is not None
            tables = [table * class_weights(self.labels) for table in tables]
        d = paired(*tables, names=(a, b), of=of)
        # shares differ by 1 at most, however wide the interval of few seeds is
        return d if of == "nll" else replace(d, low=max(d.low, -1.0), high=min(d.high, 1.0))

    @property
    def verdict(self) -> str:
        """In one sentence: do capsules help here, and does routing?"""
        return verdict(self)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """report.html, results.csv and results.json."""
        from torchcaps.run.compare.report import html
        from torchcaps.run.compare.tables import csv_text, plain

        folder = Path(folder)
        write_json(folder / "results.json", plain(self))
        write_whole(folder / "results.csv", csv_text(self))
        write_whole(folder / "report.html", html(self))

    def __str__(self) -> str:
        from torchcaps.run.compare.tables import text_table

        return "\n".join([*text_table(self), "", self.verdict])

    @staticmethod
    def _items(record: Mapping[str, Any], of: str) -> list[float]:
        items: list[float]
        if of in PANEL:
            items = record["robustness"][of]["items"]
        else:
            items = record["items"]["accuracy" if of == "balanced_accuracy" else of]
        return items


def verdict(c: Comparison) -> str:
    """One sentence out of the intervals."""
    keys = [arm.key for arm in c.arms]
    what, n = MEASURES[c.measure], c.facts["test_items"]
    k = len(c.seeds)
    parts = []
    against = next((key for key in ("matched", "linear") if key in keys), None)
    plain = {"matched": "a plain head of the same size", "linear": "a linear head"}
    capsules = next((key for key in ("routed", "uniform") if key in keys), None)
    if capsules and against:
        d = c.difference(capsules, against)
        word = {"higher": "better than", "lower": "worse than", "none": "not measurably different from"}[d.direction]
        parts.append(f"the capsule head is {word} {plain[against]} in {what} ({_points(d)})")
    if "routed" in keys and "uniform" in keys:
        d = c.difference("routed", "uniform")
        word = {"higher": "made it better", "lower": "made it worse", "none": "added nothing measurable"}[d.direction]
        parts.append(f"routing itself {word} ({_points(d)} against one uniform round)")
    if not parts:
        return (
            f"{c.name}: {len(keys)} arms over {k} seeds and {n:,} test items, none of them a pair to judge capsules by."
        )
    if k == 1:
        return (
            f"{c.name}: one seed decides nothing, for it does not show how much training varies (with it "
            f"{'; '.join(parts)}, where the intervals are of {n:,} test items alone): compare with seeds=3 or more."
        )
    return f"On {c.name} ({n:,} test items, {k} seeds) {', and '.join(parts)}."


def _duration(minutes: float) -> str:
    return f"{60 * minutes:.1f} seconds" if minutes < 1 else f"{minutes:.1f} minutes"


def _points(d: Difference) -> str:
    return f"{100 * d.mean:+.1f} points, 95 % interval {100 * d.low:+.1f} to {100 * d.high:+.1f}"


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    number = whole(seeds)
    if number is not None and number >= 1:
        return list(range(number))
    chosen = list(seeds) if isinstance(seeds, Sequence) else []
    if not chosen or len(set(chosen)) < len(chosen) or any(whole(s) is None or s < 0 for s in chosen):
        raise ValueError(f"seeds={seeds!r}: give how many, 1 or more, or different whole numbers such as [0, 1, 2]")
    return chosen


def _at_least_one(what: str, value: int) -> int:
    number = whole(value)
    if number is None or number < 1:
        raise ValueError(f"{what}={value!r}: give a whole number, 1 or more")
    return number


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}: take 'auto', 'cpu' or 'cuda'")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ValueError("device='cuda', but torch sees no such device here: take 'cpu' or 'auto'")
    return ("cuda" if there else "cpu") if device == "auto" else device


def _measure(data: ImageData, measure: str | None) -> str:
    fit = ("exact_match", "accuracy") if data.multi_label else ("accuracy", "balanced_accuracy")
    if measure is not None and measure not in fit:
        labels = "several labels" if data.multi_label else "one label"
        raise ValueError(f"measure={measure!r}: for data with {labels} an item take {' or '.join(map(repr, fit))}")
    return measure or fit[0]


def _fractions(data: ImageData, fractions: Sequence[float]) -> list[float]:
    chosen = sorted({float(share) for share in fractions}, reverse=True)  # the whole set first
    if not chosen or not 0 < chosen[-1] <= chosen[0] <= 1:
        raise ValueError(f"label_fractions={fractions!r}: give shares above 0 up to 1, such as (0.05, 0.2, 1)")
    if chosen != [1.0] and not isinstance(data, LabelledData):
        raise ValueError(
            f"label_fractions={fractions!r}, but {type(data).__name__} has no label_fraction: take (1,), or a set of "
            "single items with labels"
        )
    return chosen


def _check_parts(data: ImageData, robustness: bool) -> None:
    parts = data.parts
    if parts.val is None:
        raise ValueError(
            f"{type(data).__name__} has no validation part, which the calibrated columns are fitted on: give one, or a "
            "val_fraction above 0"
        )
    if parts.test is None:
        raise ValueError(f"{type(data).__name__} has no test part: give one, or a test_fraction above 0")
    if len(parts.test) < 2:
        raise ValueError(
            f"{type(data).__name__} has {len(parts.test)} test item: arms are compared on 2 at least, and on some "
            "hundreds to tell them apart"
        )
    if robustness and not isinstance(data.test_dataloader().view, View):
        raise ValueError(f"{type(data).__name__} gives no item twice: take robustness=False")


def _bench(data: ImageData) -> Bench:
    view = data.test_dataloader().view
    assert isinstance(view, View)
    return Bench.of(view)


def _same_for_all(data: ImageData, budget: Budget) -> dict[str, Any]:
    """What all records of one comparison are of, as plain data."""
    plan = asdict(budget) | {"optimization": _plain_optimization(budget.optimization)}
    return {
        "layout": LAYOUT, "torchcaps": __version__, "torch": torch.__version__, **plan, "batch_size": data.batch_size,
        "augment": str(data.augment), "transform": str(data.transform), "preprocessing": data.preprocessing,
        "class_names": data.class_names, "data": _fingerprint(data),
    }  # fmt: skip


def _plain_optimization(optimization: Optimization) -> dict[str, Any]:
    plain = asdict(optimization)
    return {key: list(v) if isinstance(v, tuple) else v if _is_plain(v) else str(v) for key, v in plain.items()}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list)


def _fingerprint(data: ImageData) -> str:
    """Of each part its size and all batches of an epoch: a comparison does not go on with other data."""
    digest = hashlib.sha256()
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    for loader in loaders:
        assert not isinstance(loader, list)
        digest.update(json.dumps([len(loader), loader.batch_sampler.items]).encode())
        loader.batch_sampler.shuffle = False
        for batch in loader:
            for part in batch:
                digest.update(part.numpy().tobytes())
    return digest.hexdigest()[:16]


def _facts(data: ImageData, budget: Budget, same: Mapping[str, Any]) -> dict[str, Any]:
    parts = data.parts
    assert parts.val is not None
    assert parts.test is not None
    return {
        **same, "kind": parts.settings.kind, "in_chans": data.in_chans, "image_size": list(data.image_size),
        "multi_label": data.multi_label, "train_items": len(parts.train), "val_items": len(parts.val),
        "test_items": len(parts.test), "steps": budget.epochs * len(data.train_dataloader()),
        "threads": torch.get_num_threads(), "hardware": _hardware(budget.device),
    }  # fmt: skip


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"
