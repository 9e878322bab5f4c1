"""The report: one HTML file with everything in it, light or dark as the reader's system is, for a desk or a phone."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.run.compare.measures import BINS
from torchcaps.run.compare.panel import PANEL
from torchcaps.run.compare.plots import Line, chart, marker, scale, strip
from torchcaps.run.compare.statistics import Difference
from torchcaps.run.compare.tables import ROWS, differences, mean_and_sd, metrics_of, number, pairs_of
from torchcaps.training.memory import readable_bytes

if TYPE_CHECKING:
    from torchcaps.run.compare.comparison import Comparison

__all__ = ["html", "page"]

STYLE = Path(__file__).with_name("style.css")

STYLES = 6
"""Colours there are for arms."""


def html(c: "Comparison") -> str:
    """The page."""
    sections = (
        _head, _differences, _table, _seeds, _robustness, _fractions, _calibration, _learning, _costs, _how,
    )  # fmt: skip
    return page(f"{c.name}: do capsules help?", "".join(section(c) for section in sections))


def page(title: str, body: str) -> str:
    """A whole file around `body`, which is HTML in the words of style.css; the title is plain text."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE.read_text('utf-8')}</style>\n"
        f"</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _head(c: "Comparison") -> str:
    f, things = c.facts, _things(c)
    shape = " x ".join(map(str, (f["in_chans"], *f["image_size"])))
    several = ", several at a time" if f["multi_label"] else ""
    facts = (
        f"{f['train_items']:,} {things} of {shape} to train on, {f['val_items']:,} to validate, {f['test_items']:,} to "
        f"test. {len(f['class_names'])} classes{several}. {len(c.seeds)} seed{'s' * (len(c.seeds) != 1)}, "
        f"{f['epochs']} epochs in batches of {f['batch_size']}."
    )
    return (
        f"<header><p class='kicker'>{escape(c.name)}</p><h1>Do capsules help here?</h1>"
        f"<p class='verdict'>{_typeset(c.verdict)}</p><p class='note'>{escape(facts)}</p></header>\n"
    )


def _differences(c: "Comparison") -> str:
    found = differences(c)
    if not found:
        return ""
    measured, nll = ([d for d in found if d.of == of] for of in (c.measure, "nll"))
    if len(c.seeds) > 1:
        over = f"over test {_things(c)} and seeds together. An interval that holds 0 is no measurable difference"
    else:
        over = f"over test {_things(c)} alone: with one seed nothing tells how much training varies"
    note = f"The first arm less the second, with the interval of 95 % {over}."
    return (
        f"<section><h2>Differences</h2><p>{note}</p><h3>{_name(c)}, points</h3>{_forest(c, measured, 100, 1)}"
        f"<h3>NLL, calibrated: lower is better</h3>{_forest(c, nll, 1, 3)}</section>\n"
    )


def _table(c: "Comparison") -> str:
    rows = []
    for name in metrics_of(c):
        label, percent = ROWS[name]
        cells = [_cell(*mean_and_sd(c, arm.key, name), percent) for arm in c.arms]
        rows.append(_row(f"{label}, %" if percent else label, cells))
    several = ", both over every yes-or-no answer" if c.facts["multi_label"] else ""
    note = (
        f"Of the test {_things(c)}: mean ± standard deviation over seeds. NLL is the negative log-likelihood, ECE the "
        f"expected calibration error in {BINS} bins{several}: lower is better. Calibrated: after one temperature for "
        "each network, fitted to validation data."
    )
    return f"<section><h2>Results</h2>{_arm_table(c, rows)}<p class='note'>{note}</p></section>\n"


def _seeds(c: "Comparison") -> str:
    values = {arm.key: c.values(arm.key, c.measure) for arm in c.arms}
    everything = np.concatenate(list(values.values()))
    air = max(0.005, 0.1 * float(np.ptp(everything)))
    low, high = max(0.0, float(everything.min()) - air), min(1.0, float(everything.max()) + air)
    rows = []
    for i, arm in enumerate(c.arms):
        about = f"{arm.title}: {', '.join(f'{100 * v:.1f}' for v in values[arm.key])} %"
        line = strip(low, high, dots=values[arm.key].tolist(), style=f"a{i % STYLES}", about=about)
        rows.append(f"<tr><th scope='row'>{_tag(i)}{escape(arm.title)}</th><td>{line}</td></tr>")
    rows.append(f"<tr><td></td><td>{scale(low, high, 100)}</td></tr>")
    return (
        f"<section><h2>Every network</h2><p>{_name(c)} of each seed's network, %.</p>"
        f"<table class='strips'>{''.join(rows)}</table></section>\n"
    )


def _robustness(c: "Comparison") -> str:
    panel = c.of(c.arms[0].key)[0]["robustness"]
    if not panel:
        return ""
    cards = []
    for name, found in panel.items():
        order = np.argsort(found["strengths"])
        strengths = np.array(found["strengths"], float)[order].tolist()
        lines = [
            _line(c, i, strengths, [np.array(r["robustness"][name]["accuracy"])[order] for r in c.of(arm.key)])
            for i, arm in enumerate(c.arms)
        ]
        told = "".join(f"<li>{_told(c, c.difference(a, b, name))}</li>" for a, b in pairs_of(c)[:2])
        drawn = chart(lines, PANEL[name].unit, "accuracy, %", x_ticks=strengths)
        cards.append(
            f"<figure><figcaption>{PANEL[name].title}</figcaption>{drawn}<ul class='told'>{told}</ul></figure>"
        )
    n = len(next(iter(panel.values()))["items"])
    both = " Both are named where the two highest classes are the two that are there." if "both" in panel else ""
    note = (
        f"The same networks on {n:,} test {_things(c)} made harder; none was trained for that beyond the augmentation "
        f"that all had.{'' if c.facts['multi_label'] else both} Bands are ± one standard deviation over seeds. The "
        "differences are of the mean over all strengths that change something, in points with intervals of 95 %: of so "
        "many, about one in twenty leaves out 0 by chance."
    )
    return f"<section><h2>Robustness</h2><p>{note}</p>{_legend(c)}<div class='grid3'>{''.join(cards)}</div></section>\n"


def _fractions(c: "Comparison") -> str:
    if len(c.fractions) < 2:
        return ""
    shares = sorted(c.fractions)
    percents = [100 * share for share in shares]
    lines = [
        _line(c, i, percents, np.stack([c.values(arm.key, c.measure, share) for share in shares], 1))
        for i, arm in enumerate(c.arms)
    ]
    drawn = chart(lines, "labels trained on, %", f"{_name(c).lower()}, %", log_x=True, x_ticks=percents)
    told = "".join(
        f"<li>{100 * share:g} % of labels: {_told(c, c.difference(a, b, fraction=share))}</li>"
        for share in shares
        for a, b in pairs_of(c)[:2]
    )
    note = "On a share of the training part, each class with its share of it, for as many steps as on the whole."
    return (
        f"<section><h2>Fewer labels</h2><p>{note}</p>{_legend(c)}<div class='grid2'><figure>{drawn}</figure>"
        f"<figure><figcaption>Differences, points</figcaption><ul class='told'>{told}</ul></figure></div></section>\n"
    )


def _calibration(c: "Comparison") -> str:
    figures = []
    for kind, title in (("raw", "As the model gives them"), ("calibrated", "After a temperature")):
        lines = []
        for i, arm in enumerate(c.arms):
            bins = np.array([r["calibration"][kind] for r in c.of(arm.key)], float)
            count = bins[..., 0].sum(0)
            enough = count >= max(10, 0.002 * count.sum())
            mean, share = ((bins[..., 0] * bins[..., j]).sum(0)[enough] / count[enough] for j in (1, 2))
            lines.append(Line(arm.title, i % STYLES, (100 * mean).tolist(), share.tolist()))
        drawn = chart(
            lines, "probability given, %", "share that is right, %", diagonal=True,
            x_range=(0.0, 100.0), y_range=(0.0, 1.0),
        )  # fmt: skip
        figures.append(f"<figure><figcaption>{title}</figcaption>{drawn}</figure>")
    each = {arm.title: [f"{r['temperature']:.2f}" for r in c.of(arm.key)] for arm in c.arms}
    temperatures = "; ".join(f"{escape(title)} {', '.join(found)}" for title, found in each.items())
    note = (
        "Answers in bins by the probability that their model gives them. On the dotted line it is right as often as it "
        f"says, below it too sure, above it not sure enough. Temperatures of the seeds: {temperatures}."
    )
    return (
        f"<section><h2>Calibration</h2><p>{note}</p>{_legend(c)}<div class='grid2'>{''.join(figures)}</div></section>\n"
    )


def _learning(c: "Comparison") -> str:
    figures = []
    per_epoch = c.facts["steps"] / c.facts["epochs"]
    for key, title in (("val_accuracy", "Validation"), ("train_accuracy", "Training")):
        lines = []
        for i, arm in enumerate(c.arms):
            epochs = [row["step"] / per_epoch for row in c.of(arm.key)[0]["history"]]
            runs = [[row[key] for row in r["history"]] for r in c.of(arm.key)]
            lines.append(_line(c, i, epochs, runs, points=len(epochs) < 8))
        figures.append(f"<figure><figcaption>{title}</figcaption>{chart(lines, 'epoch', 'accuracy, %')}</figure>")
    note = "Where a curve still rises at its end there were too few epochs for a fair answer: compare with more."
    return f"<section><h2>Learning</h2><p>{note}</p>{_legend(c)}<div class='grid2'>{''.join(figures)}</div></section>\n"


def _costs(c: "Comparison") -> str:
    costs = [c.costs[arm.key] for arm in c.arms]
    minutes = [np.array([r["minutes"] for r in c.of(arm.key)]) for arm in c.arms]
    spread = [float(m.std(ddof=1)) if len(m) > 1 else None for m in minutes]
    peaks = [[r["peak_bytes"] for r in c.of(arm.key) if r["peak_bytes"]] for arm in c.arms]
    rows = [
        _row("Parameters", [f"{cost['parameters']:,}" for cost in costs]),
        _row("of them in the head", [f"{cost['head_parameters']:,}" for cost in costs]),
        _row("Multiply-adds, million", [f"{cost['multiply_adds'] / 1e6:,.2f}" for cost in costs]),
        _row(f"ms per {c.facts['kind']}", [f"{cost['ms']:.3f}" for cost in costs]),
        _row("Memory of a step", [readable_bytes(cost["step_bytes"]) for cost in costs]),
        *([_row("Memory, measured", [readable_bytes(max(each)) for each in peaks])] if all(peaks) else []),
        _row("Training, minutes", [_cell(float(m.mean()), sd, False) for m, sd in zip(minutes, spread, strict=True)]),
    ]
    note = (
        f"Multiply-adds and milliseconds are of a forward pass, the latter in batches of {costs[0]['batch']} on "
        f"{escape(c.facts['hardware'])}, the least of several tries with the arms in turn. Memory is the most that a "
        f"training step on {c.facts['batch_size']} holds, counted beforehand."
    )
    return f"<section><h2>Costs</h2>{_arm_table(c, rows)}<p class='note'>{note}</p></section>\n"


def _how(c: "Comparison") -> str:
    f, o = c.facts, c.facts["optimization"]
    augment = "none" if f["augment"] == "None" else f["augment"]
    points = [
        f"Every arm: {f['steps']:,} steps of {o['optimizer']}, learning rate {o['lr']:g} ({o['schedule']}), weight "
        f"decay {o['weight_decay']:g}, gradients of norm {f['clip'] or 'any'} at most, augmentation {augment}.",
        f"Seeds {', '.join(map(str, c.seeds))} set the first weights, the order of the data and the augmentation, in "
        "every arm alike: backbones start from the same numbers.",
        "Tested is the network "
        + ("after the last epoch." if f["select"] == "last" else "of the epoch with the lowest validation loss.")
        + " Nothing was chosen by looking at test data.",
        "All of it on one split of the data; another one may give another answer.",
        "Neither learning rate nor loss was tuned for any arm. One that needs others than these is at a disadvantage.",
        "Intervals: seeds and test items both vary, as readers and cases do in studies of diagnosis (Dorfman, Berbaum, "
        "Metz 1992; degrees of freedom of Hillis 2007), with one item more to disagree on (Agresti, Min 2005)."
        if len(c.seeds) > 1
        else "Intervals are of test items alone, p is McNemar's where it is of right and wrong answers.",
        f"torchcaps {f['torchcaps']}, torch {f['torch']}, {f['hardware']}, precision {f['precision']}.",
    ]
    told = "".join(f"<li>{escape(point)}</li>" for point in points)
    arms = "".join(
        f"<li>{_tag(i)}<b>{escape(arm.title)}</b> ({arm.key}), loss {escape(arm.loss)}: "
        f"<code>{escape(json.dumps(dict(arm.config)))}</code></li>"
        for i, arm in enumerate(c.arms)
    )
    return (
        f"<section><h2>How it was done</h2><ul>{told}</ul><details><summary>The arms as data</summary>"
        f"<ul class='arms'>{arms}</ul></details></section>\n"
    )


def _forest(c: "Comparison", found: Sequence[Difference], factor: int, digits: int) -> str:
    ends = [end for d in found for end in (d.low, d.high, 0.0)]
    air = 0.05 * (max(ends) - min(ends))
    low, high = min(ends) - air, max(ends) + air
    titles = {arm.key: escape(arm.title) for arm in c.arms}
    rows = []
    for d in found:
        numbers = _numbers(d, factor, digits)
        line = strip(
            low, high, interval=(d.low, d.mean, d.high), style=_good(d), about=f"{d.a} less {d.b}: {numbers}",
        )  # fmt: skip
        p = "below 0.001" if d.p < 0.001 else f"{d.p:.3f}"
        rows.append(
            f"<tr><th scope='row'>{titles[d.a]} <span class='less'>less</span> {titles[d.b]}</th><td>{line}</td>"
            f"<td class='said'>{numbers}<br><span class='less'>p = {p}</span></td></tr>"
        )
    rows.append(f"<tr><td></td><td>{scale(low, high, factor)}</td><td></td></tr>")
    return f"<table class='strips'>{''.join(rows)}</table>"


def _arm_table(c: "Comparison", rows: Sequence[str]) -> str:
    heads = "".join(f"<th scope='col'>{_tag(i)}{escape(arm.title)}</th>" for i, arm in enumerate(c.arms))
    return (
        f"<div class='scroll' tabindex='0'><table><thead><tr><td></td>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(label: str, cells: Sequence[str]) -> str:
    return f"<tr><th scope='row'>{label}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _cell(mean: float, sd: float | None, percent: bool) -> str:
    """The deviation goes under the mean where there is little room."""
    middle, _, spread = number(mean, sd, percent).partition(" ± ")
    return f"{middle}<span class='sd'> ± {spread}</span>" if spread else middle


def _line(c: "Comparison", i: int, xs: Sequence[float], runs: Any, points: bool = True) -> Line:
    """The mean over seeds of `[seeds, points]`."""
    values = np.array(runs, float)
    sd = values.std(0, ddof=1).tolist() if len(values) > 1 else None
    return Line(c.arms[i].title, i % STYLES, xs, values.mean(0).tolist(), sd, points)


def _legend(c: "Comparison") -> str:
    return (
        f"<p class='legend'>{''.join(f'<span>{_tag(i)}{escape(arm.title)}</span>' for i, arm in enumerate(c.arms))}</p>"
    )


def _tag(i: int) -> str:
    """An arm's line and mark."""
    i %= STYLES
    return (
        f"<svg class='tag a{i}' viewBox='-12 -6 24 12' aria-hidden='true'><path class='line' d='M-11 0h22'/>"
        f"{marker(i)}</svg>"
    )


def _told(c: "Comparison", d: Difference) -> str:
    titles = {arm.key: escape(arm.title) for arm in c.arms}
    return f"<b class='{_good(d)}'>{_numbers(d, 100, 1)}</b> <span class='less'>{titles[d.a]} less {titles[d.b]}</span>"


def _good(d: Difference) -> str:
    """The class of a difference: "better", "worse" or "even"."""
    if d.direction == "none":
        return "even"
    return "better" if (d.direction == "higher") == (d.of != "nll") else "worse"


def _numbers(d: Difference, factor: int, digits: int) -> str:
    mean, low, high = (f"{factor * v:+.{digits}f}" for v in (d.mean, d.low, d.high))
    return _typeset(f"{mean} ({low} to {high})")


def _typeset(said: str) -> str:
    """For the page: a real minus, and no line break between a number and its percent."""
    return re.sub(r"-(?=\d)", "\N{MINUS SIGN}", escape(said)).replace(" %", "\N{NO-BREAK SPACE}%")


def _things(c: "Comparison") -> str:
    kind: str = c.facts["kind"]
    return f"{kind}s"


def _name(c: "Comparison") -> str:
    return ROWS[c.measure][0]
