"""The page of results: tables and curves, from the records alone."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from torchcaps.reproduce import experts
from torchcaps.reproduce.plan import Reproduction
from torchcaps.reproduce.records import read
from torchcaps.reproduce.table import REPRODUCTIONS

__all__ = ["figure", "percent", "write_page"]


def percent(value: float) -> str:
    """Two decimals from 95 on, one below: what the spread over seeds allows."""
    return f"{value:.2f}" if value >= 95 else f"{value:.1f}"


def figure(values: Sequence[float]) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    spread = f" ± {percent_spread(stdev(values), mean(values))}" if len(values) > 1 else ""
    return percent(mean(values)) + spread


def percent_spread(spread: float, at: float) -> str:
    """With as many decimals as the mean."""
    return f"{spread:.2f}" if at >= 95 else f"{spread:.1f}"


def write_page(page: Path, folder: Path) -> None:
    """Write `page` and, beside it in pictures/, the curves, from the records in `folder`.

    Raises ValueError where there are none.
    """
    sections = []
    for name, plan in REPRODUCTIONS.items():
        runs = [run for run in read(folder / f"{name}.json") if "limit" not in run]
        if runs:
            sections.append(_section(name, plan, runs, page))
    runs = [run for run in read(folder / "experts.json") if "limit" not in run]
    if runs:
        lines = experts.section(runs, folder, page.parent / "pictures")
        sections.append("\n".join([*lines, *_how(runs), ""]))
    if not sections:
        raise ValueError(f"{folder} holds no records: train something first, such as torchcaps reproduce su")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_HEAD + "\n".join(sections), "utf-8")


_HEAD = """# Results

Published experiments, trained again with this library. This page is written by
`torchcaps reproduce --page docs/results.md` from the records in `results/`, which hold for each network its command,
seed, versions, hardware and minutes.

Where nothing else is said, a figure is a test accuracy in percent of the network after its **last** epoch: nothing was
selected by test images.
± is the standard deviation over seeds, where there are several. "Paper" is what the source says, often the best of
several runs or epochs.

"""


def _section(name: str, plan: Reproduction, runs: Sequence[dict[str, Any]], page: Path) -> str:
    columns = [(t, m) for t, test in plan.tests.items() for m in test.measures]
    names = [f"{plan.tests[t].what}: {m.replace('_', ' ')}" for t, m in columns]
    lines = [f"## {plan.title}", "", f"{plan.source}. `torchcaps reproduce {name}`", "", plan.about, ""]
    header = ["network", "epochs", "seeds", *names, "parameters", "minutes (of all cores)"]
    lines += [_row(header), _row(["---", *["---:"] * (len(header) - 1)])]
    for arm_name, arm in plan.arms.items():
        of_arm = [r for r in runs if r["arm"] == arm_name]
        for key in dict.fromkeys(r["config_hash"] for r in of_arm):
            same = [r for r in of_arm if r["config_hash"] == key]
            cells = []
            for t, m in columns:
                paper = arm.paper.get(f"{t}.{m}")
                cells.append(figure([r["results"][t][m] for r in same]) + (f" (paper {paper})" if paper else ""))
            first = same[0]
            what = arm.what + (f" (on {first['data']})" if "data" in first else "")
            lines.append(
                _row([what, str(first["epochs"]), str(len(same)), *cells, f"{first['parameters']:,}",
                      f"{mean(r['minutes'] for r in same):.0f} ({mean(r['cpu_minutes'] for r in same):.0f})"])
            )  # fmt: skip
    if plan.curve is not None and any(r["curve"] for r in runs):
        picture = page.parent / "pictures" / f"{name}.png"
        _draw(plan, runs, picture)
        lines += ["", f"![{plan.curve} against images seen](pictures/{picture.name})"]
    lines += ["", *_how(runs), ""]
    return "\n".join(lines)


def _how(runs: Sequence[dict[str, Any]]) -> list[str]:
    machines = dict.fromkeys(
        f"{h.get('gpu', h['processor'])}, {h['threads']} thread(s)" for h in (r["hardware"] for r in runs)
    )
    with_ = dict.fromkeys(f"torch {r['versions']['torch']}" for r in runs)
    dates = sorted(r["date"] for r in runs)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    one = next(iter(runs))
    return [f"On {'; '.join(machines)}; {', '.join(with_)}; {span}. One of the commands:", "", f"    {one['command']}"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _draw(plan: Reproduction, runs: Sequence[dict[str, Any]], picture: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = drawing.subplots()
    for number, (name, arm) in enumerate(plan.arms.items()):
        label: str | None = arm.what
        for run in (r for r in runs if r["arm"] == name and r["curve"]):
            seen, value = zip(*run["curve"], strict=True)
            axes.plot([images / 1e3 for images in seen], value, color=f"C{number}", label=label, lw=1.4)
            label = None
    axes.set_xlabel("training images seen, thousands")
    axes.set_ylabel(f"{str(plan.curve).split('/')[-1].replace('_', ' ')} on validation images, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(picture)
