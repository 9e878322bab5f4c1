"""Measurements as tables on the terminal and as pictures."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchcaps.bench.layers import Measured
from torchcaps.bench.scaling import Point
from torchcaps.bench.steps import Step

__all__ = ["plot", "plot_scaling", "step_table", "table"]


def table(rows: Sequence[Measured], floors: dict[tuple[str, int], tuple[float, float]]) -> Iterator[str]:
    """The lines of a table; ratios are against the reference of the same workload and batch."""
    yield f"{'workload':<10}{'N':>5}  {'form':<11}{'forward':>12}{'both':>12}{'ratio':>16}{'memory':>14}{'ratio':>8}"
    for (name, batch), (forward, both) in floors.items():
        group = [r for r in rows if (r.workload, r.batch) == (name, batch)]
        base = next((r for r in group if r.form == "reference"), group[0])
        for r in group:
            ratio = f"{base.forward / r.forward:.1f}x {base.both / r.both:.1f}x"
            memory, less = "-", "-"
            if r.memory_both is not None:
                memory = f"{r.memory_both / 2**20:.1f} MiB"
                less = f"1/{base.memory_both / r.memory_both:.0f}" if r.memory_both and base.memory_both else "-"
            times = f"{1000 * r.forward:>9.2f} ms{1000 * r.both:>9.2f} ms"
            yield f"{name:<10}{batch:>5}  {r.form:<11}{times}{ratio:>16}{memory:>14}{less:>8}"
        yield f"{name:<10}{batch:>5}  {'floor':<11}{1000 * forward:>9.2f} ms{1000 * both:>9.2f} ms"


def step_table(steps: Sequence[Step]) -> Iterator[str]:
    """The lines of a table of whole steps; ratios are against the last form, which is the bound."""
    yield f"{'step':<14}{'form':<11}{'time':>12}{'ratio':>8}{'kept for backward':>26}"
    for name in dict.fromkeys(s.step for s in steps):
        group = [s for s in steps if s.step == name]
        for s in group:
            kept = f"{s.saved / 2**20:.2f} MiB an example"
            yield f"{name:<14}{s.form:<11}{1000 * s.seconds:>9.1f} ms{s.seconds / group[-1].seconds:>7.2f}x{kept:>26}"


def plot(rows: Sequence[Measured], path: Path) -> None:
    """Time and memory against the batch, one line for each form."""
    names = sorted({r.workload for r in rows})
    figure, axes = _axes(len(names), 2)
    for (left, right), name in zip(axes, names, strict=True):
        for form in dict.fromkeys(r.form for r in rows):
            line = sorted((r for r in rows if r.workload == name and r.form == form), key=lambda r: r.batch)
            left.plot([r.batch for r in line], [1000 * r.both for r in line], "o-", label=form)
            right.plot([r.batch for r in line], [(r.memory_both or 0) / 2**20 for r in line], "o-", label=form)
        left.set(title=f"{name}: forward + backward, ms", xscale="log", yscale="log", xlabel="batch")
        right.set(title=f"{name}: peak memory, MiB", xscale="log", yscale="log", xlabel="batch")
        left.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_scaling(points: Sequence[Point], path: Path) -> None:
    """Time above and memory below, against each size; the dotted line is linear growth."""
    letters = list(dict.fromkeys(p.letter for p in points))
    figure, axes = _axes(2, len(letters))
    for column, letter in enumerate(letters):
        for form in dict.fromkeys(p.form for p in points):
            line = [p for p in points if p.letter == letter and p.form == form]
            sizes = [p.size for p in line]
            axes[0][column].plot(sizes, [1000 * p.both for p in line], "o-", label=form)
            axes[1][column].plot(sizes, [(p.memory or 0) / 2**20 for p in line], "o-", label=form)
        last = 1000 * line[-1].both
        axes[0][column].plot(sizes, [last * s / sizes[-1] for s in sizes], "k:", lw=1, label="linear")
        axes[0][column].set(title=f"forward + backward, ms, against {letter}", xscale="log", yscale="log")
        axes[1][column].set(title=f"peak memory, MiB, against {letter}", xscale="log", yscale="log")
        axes[0][column].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _axes(rows: int, columns: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
