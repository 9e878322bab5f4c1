"""Charts as SVG inside a page: text in the page's own font and colours, light or dark, nothing to load.

Colours and dashes of arms are classes of the page's style (`a0`, `a1`, ...). A chart is drawn for a width of 360 pixels
and scales with its column; strips take their coordinates in percent and so any width.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Line", "chart", "marker", "readable", "scale", "strip", "ticks"]

Place = Callable[[float], float]

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 10, 38

MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",  # a circle, a square, a triangle, a diamond
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.2l4 7.2h-8z",
    "M0-4.4l4.4 4.4l-4.4 4.4l-4.4-4.4z",
)


@dataclass(frozen=True)
class Line:
    """An arm's values; `sd` around `y`, None where there is one seed. `style` is the number of its class."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float] | None = None
    points: bool = True


def chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    percent: bool = True,
    log_x: bool = False,
    diagonal: bool = False,
    x_ticks: Sequence[float] | None = None,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines over a common axis. With `percent` the values are shares; `diagonal` goes from corner to corner."""
    left, right = x_range or (min(x for line in lines for x in line.x), max(x for line in lines for x in line.x))
    low, high = y_range or _range(lines, percent)
    place_x = _scale(left, right, LEFT, WIDTH - RIGHT, log_x)
    place_y = _scale(low, high, HEIGHT - BOTTOM, TOP, False)
    parts = []
    for tick in ticks(low, high):
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = readable(100 * tick) if percent else readable(tick)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in x_ticks if x_ticks is not None else ticks(left, right):
        x = place_x(tick)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{readable(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(
        f'<text class="name" transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(y_label)}</text>'
    )
    if diagonal:
        parts.append(
            f'<line class="diagonal" x1="{place_x(left):.1f}" y1="{place_y(low):.1f}" '
            f'x2="{place_x(right):.1f}" y2="{place_y(high):.1f}"/>'
        )
    for line in lines:
        parts += _drawn(line, place_x, place_y, low, high, percent)
    names = ", ".join(line.label for line in lines)
    about = html.escape(f"{y_label} against {x_label}: {names}", quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


def strip(
    low: float, high: float, *, interval: tuple[float, float, float] | None = None, dots: Sequence[float] = (),
    style: str = "", about: str = "",
) -> str:  # fmt: skip
    """A line from `low` to `high` with an interval (left end, middle, right end) or with dots, as wide as its place."""
    parts = ['<line class="grid" x1="0" x2="100%" y1="50%" y2="50%"/>']
    if low < 0 < high:
        parts.append(f'<line class="zero" x1="{_at(0, low, high)}" x2="{_at(0, low, high)}" y1="0" y2="100%"/>')
    if interval is not None:
        left, middle, right = (_at(end, low, high) for end in interval)
        parts.append(f'<line class="reach" x1="{left}" x2="{right}" y1="50%" y2="50%"/>')
        parts.append(f'<circle class="dot" cx="{middle}" cy="50%" r="5"/>')
    for i, dot in enumerate(dots):  # one above the other, for two may be the same
        up = 4 * (i - (len(dots) - 1) / 2)
        parts.append(
            f'<circle class="seed" cx="{_at(dot, low, high)}" cy="50%" r="4" transform="translate(0 {up:g})"/>'
        )
    label = html.escape(about, quote=True)
    return f'<svg class="strip {style}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def scale(low: float, high: float, factor: float = 1.0) -> str:
    """The numbers under strips from `low` to `high`, times `factor`."""
    numbers = (
        f'<text x="{_at(tick, factor * low, factor * high)}" y="12" text-anchor="middle">{readable(tick)}</text>'
        for tick in ticks(factor * low, factor * high)
    )
    return f'<svg class="strip scale" aria-hidden="true">{"".join(numbers)}</svg>'


def marker(style: int, x: float = 0, y: float = 0) -> str:
    """The mark of an arm's points."""
    shape = MARKS[style % len(MARKS)]
    return f'<path class="mark" d="{shape}" transform="translate({x:.1f} {y:.1f})"/>'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, some five of them.

    >>> ticks(0.0, 1.0), ticks(0.91, 0.99), ticks(1.0, 1.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.92, 0.94, 0.96, 0.98], [1.0])
    """
    if low == high:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [round(i * step, digits) for i in range(first, last + 1)]


def readable(value: float) -> str:
    """
    >>> readable(0.30000000000000004), readable(1500.0)
    ('0.3', '1,500')
    """
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}").replace("-", "\N{MINUS SIGN}")


def _at(value: float, low: float, high: float) -> str:
    """Where a value is on a strip; some room is left at both ends."""
    share = (min(max(value, low), high) - low) / (high - low)
    return f"{4 + 92 * share:.2f}%"


def _range(lines: Sequence[Line], percent: bool) -> tuple[float, float]:
    """Of the values and their deviations, with some air; shares stay in 0..1."""
    ends = []
    for line in lines:
        spread = line.sd if line.sd is not None else [0.0] * len(line.y)
        ends += [end for y, sd in zip(line.y, spread, strict=True) for end in (y - sd, y + sd) if math.isfinite(end)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    air = max(0.06 * (high - low), 0.005 if percent else 1e-9)
    low, high = low - air, high + air
    return (max(low, 0.0), min(high, 1.0)) if percent else (low, high)


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Place:
    def change(value: float) -> float:
        return math.log10(value) if log else value

    width = change(high) - change(low) or 1.0
    return lambda value: start + (change(value) - change(low)) / width * (end - start)


def _drawn(line: Line, place_x: Place, place_y: Place, low: float, high: float, percent: bool) -> list[str]:
    known = [i for i, y in enumerate(line.y) if math.isfinite(y)]

    def spot(i: int, up: float = 0.0) -> str:
        return f"{place_x(line.x[i]):.1f},{place_y(min(max(line.y[i] + up, low), high)):.1f}"

    parts = []
    if line.sd is not None:
        edge = [spot(i, line.sd[i]) for i in known] + [spot(i, -line.sd[i]) for i in reversed(known)]
        parts.append(f'<polygon class="band" points="{" ".join(edge)}"/>')
    parts.append(f'<polyline class="line" points="{" ".join(spot(i) for i in known)}"/>')
    if line.points:
        for i in known:
            value = f"{100 * line.y[i]:.1f} %" if percent else readable(round(line.y[i], 4))
            title = f"<title>{html.escape(line.label)}: {value} at {readable(line.x[i])}</title>"
            parts.append(f"<g>{title}{marker(line.style, place_x(line.x[i]), place_y(line.y[i]))}</g>")
    return [f'<g class="a{line.style}">{"".join(parts)}</g>']
