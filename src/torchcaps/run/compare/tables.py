"""A comparison as a CSV, as JSON, and as lines for the terminal."""

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.run.compare.statistics import Difference

if TYPE_CHECKING:
    from torchcaps.run.compare.comparison import Comparison

__all__ = ["ROWS", "csv_text", "differences", "mean_and_sd", "plain", "robustness_differences", "text_table"]

ROWS: dict[str, tuple[str, bool]] = {
    "accuracy": ("Accuracy", True),
    "exact_match": ("Exact match", True),
    "balanced_accuracy": ("Balanced accuracy", True),
    "f1": ("Macro F1", True),
    "auroc": ("AUC", True),
    "map": ("Mean average precision", True),
    "nll": ("NLL", False),
    "nll_calibrated": ("NLL, calibrated", False),
    "ece": ("ECE", True),
    "ece_calibrated": ("ECE, calibrated", True),
}
"""Metrics in the order of tables: what they are called, and whether they are given in percent."""

PAIRS = (("routed", "matched"), ("routed", "uniform"), ("routed", "linear"), ("uniform", "matched"))
"""What is compared, the two of the verdict first."""


def mean_and_sd(c: "Comparison", arm: str, metric: str, fraction: float | None = None) -> tuple[float, float | None]:
    """Over seeds; no deviation of one."""
    values = c.values(arm, metric, fraction)
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


def metrics_of(c: "Comparison") -> list[str]:
    """Those that these data have."""
    there = c.records[0]["metrics"]
    return [name for name in ROWS if name in there]


def pairs_of(c: "Comparison") -> list[tuple[str, str]]:
    """Of the standard arms those that are there; of others, each against the first arm."""
    keys = [arm.key for arm in c.arms]
    found = [(a, b) for a, b in PAIRS if a in keys and b in keys]
    known = {key for pair in PAIRS for key in pair}
    return found + [(key, keys[0]) for key in keys[1:] if key not in known or keys[0] not in known]


def differences(c: "Comparison") -> list[Difference]:
    """Of the measure and of the calibrated NLL, for each pair."""
    return [c.difference(a, b, of) for of in (c.measure, "nll") for a, b in pairs_of(c)]


def robustness_differences(c: "Comparison") -> list[Difference]:
    """Of each perturbation's mean, for the pairs of the verdict."""
    panel = c.of(c.arms[0].key)[0]["robustness"]
    return [c.difference(a, b, name) for name in panel for a, b in pairs_of(c)[:2]]


def csv_text(c: "Comparison") -> str:
    """One row for each network: its metrics, and its accuracy at every strength of every perturbation."""
    rows = []
    for r in c.records:
        hard = {
            f"{name}@{strength:g}": value
            for name, found in r["robustness"].items()
            for strength, value in zip(found["strengths"], found["accuracy"], strict=True)
        }
        cost = c.costs[r["arm"]]
        rows.append(
            {
                "data": c.name, "arm": r["arm"], "seed": r["seed"], "label_fraction": r["fraction"], **r["metrics"],
                "temperature": r["temperature"], "train_minutes": r["minutes"], "parameters": cost["parameters"],
                "head_parameters": cost["head_parameters"], "multiply_adds": cost["multiply_adds"],
                "ms_per_item": cost["ms"], "step_bytes": cost["step_bytes"], "peak_bytes": r["peak_bytes"], **hard,
            }
        )  # fmt: skip
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plain(c: "Comparison") -> dict[str, Any]:
    """Everything but the answers to single items, which are in the records."""
    records = [
        {key: value for key, value in r.items() if key != "items"}
        | {"robustness": {n: {k: v for k, v in f.items() if k != "items"} for n, f in r["robustness"].items()}}
        for r in c.records
    ]
    return {
        "verdict": c.verdict, "name": c.name, "measure": c.measure, "seeds": c.seeds, "label_fractions": c.fractions,
        "facts": c.facts, "arms": [arm.trained() | {"title": arm.title, "costs": c.costs[arm.key]} for arm in c.arms],
        "means": {arm.key: {m: mean_and_sd(c, arm.key, m) for m in metrics_of(c)} for arm in c.arms},
        "differences": [asdict(d) for d in differences(c) + robustness_differences(c)], "records": records,
    }  # fmt: skip


def text_table(c: "Comparison") -> Iterator[str]:
    """Lines for the terminal."""
    width = max(len(arm.key) for arm in c.arms) + 2
    names = metrics_of(c)
    yield "arm".ljust(width) + "".join(ROWS[name][0].rjust(max(16, len(ROWS[name][0]) + 2)) for name in names)
    for arm in c.arms:
        cells = [
            number(*mean_and_sd(c, arm.key, name), percent=ROWS[name][1]).rjust(max(16, len(ROWS[name][0]) + 2))
            for name in names
        ]
        yield arm.key.ljust(width) + "".join(cells)


def number(mean: float, sd: float | None, percent: bool) -> str:
    """
    >>> number(0.97312, 0.00321, percent=True), number(0.1234, None, percent=False)
    ('97.3 ± 0.3', '0.123')
    """
    if np.isnan(mean):
        return "-"
    factor, digits = (100, 1) if percent else (1, 3)
    spread = "" if sd is None else f" ± {factor * sd:.{digits}f}"
    return f"{factor * mean:.{digits}f}{spread}"
