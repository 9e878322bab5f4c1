"""Figures of what the other files of this room found. No global state: each is a `Figure` of its own, to save or show.

    draw_sweep(pose_sweep(model, image)).savefig("sweep.png")

Figures are narrow, some 4 to 5 inches, so that they can be read on a telephone. Colours carry no meaning that is not
written beside them, and can be told apart by eyes that see few.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.explain.coupling import CouplingMaps, Fields, Occlusion, Part, RoutingTrace, over_image
from torchcaps.explain.poses import PoseMap, PoseSweep, Reconstructions

__all__ = [
    "draw_coupling", "draw_occlusion", "draw_over_image", "draw_pose_map", "draw_reconstructions", "draw_scores",
    "draw_sweep", "draw_trace", "draw_tree", "picture",
]  # fmt: skip

INK, SOFT, RIGHT, WRONG = "#1c1f23", "#6a7380", "#0a6ebd", "#c8421f"
HEAT = "magma"


def picture(image: Tensor) -> NDArray[np.float32]:
    """`[C, H, W]` as an array to show, in 0..1: grey where there are not three channels, and stretched if beyond."""
    x = image.detach().float().cpu()
    x = x.permute(1, 2, 0) if x.shape[0] == 3 else x.mean(0)
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:  # normalised images
        x = (x - low) / max(high - low, 1e-12)
    return np.asarray(x.numpy(), np.float32)


def draw_coupling(
    maps: CouplingMaps,
    images: Tensor,
    example: int = 0,
    parents: Sequence[int] | None = None,
    *,
    names: Sequence[str] | None = None,
    fields: Fields | None = None,
) -> Figure:
    """The flow over the image, a row for each parent and a column for each round, all on one scale.

    parents  which; None are the three that get most in the last round.
    names    of the parents.
    fields   of `receptive_fields`, so that each value stands where its capsule looks.

    Raises ValueError for children without two axes of places: `places=` of `coupling_maps` lays out a list.
    """
    flow = maps.by_place()[:, example]
    if flow.dim() != 4:
        raise ValueError(f"the children of {maps.layer} lie along {flow.dim() - 2} axes: a map over an image has two")
    T, J = flow.shape[:2]
    chosen = flow[-1].flatten(1).sum(1).topk(min(3, J)).indices.tolist() if parents is None else list(parents)
    figure, axes = _grid(len(chosen), T + 1, 1.15, top=0.3)
    image = images[example]
    height, width = image.shape[-2:]
    highest = float(flow[:, chosen].max())
    for row, parent in enumerate(chosen):
        _show(axes[row, 0], image)
        _say(axes[row, 0], _name(names, parent))
        for t in range(T):
            ax = axes[row, t + 1]
            _show(ax, image, faint=True)
            heat = over_image(flow[t, parent], (height, width), fields)
            ax.imshow(heat.cpu(), cmap=HEAT, vmin=0, vmax=highest, alpha=0.8)
            if row == 0:
                ax.set_title(f"round {t + 1}", fontsize=9, color=INK)
    axes[0, 0].set_title("image", fontsize=9, color=INK)
    figure.text(
        0.5, 0.005, f"share times presence, 0 to {highest:.2g}, summed over types", ha="center", fontsize=8, color=SOFT
    )
    return figure


def draw_tree(tree: Part, names: Sequence[str] | None = None) -> Figure:
    """The tree, the class on top; a line is as thick as what it carries, and says the share."""
    levels = _levels(tree)
    widest = max(len(level) for level in levels)
    figure = Figure(figsize=(min(9.0, max(4.2, 0.62 * widest + 1)), 1.25 * len(levels) + 0.3), layout="constrained")
    ax = figure.add_subplot()
    ax.set_axis_off()
    spots: dict[int, tuple[float, float]] = {}
    for depth, level in enumerate(levels):
        for i, part in enumerate(level):
            spots[id(part)] = ((i + 0.5) / len(level), -float(depth))
    strongest = max((p.flow or 0.0 for level in levels for p in level), default=0.0) or 1.0
    for level in levels:
        for part in level:
            x, y = spots[id(part)]
            for child in part.parts:
                cx, cy = spots[id(child)]
                thick = 0.6 + 5 * (child.flow or 0) / strongest
                ax.plot([x, cx], [y, cy], color=RIGHT, linewidth=thick, alpha=0.55, zorder=1)
                if len(levels[1]) <= 8 and part is tree:
                    ax.text(
                        (x + cx) / 2, (y + cy) / 2, f"{child.share:.2f}", fontsize=8, color=INK,
                        ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                    )  # fmt: skip
            label = _name(names, part.type) if part is tree else _where(part)
            size = 6.5 if len(level) > 6 else 8.5
            ax.text(
                x, y, f"{label}\n{part.presence:.2f}", fontsize=size, color=INK, ha="center", va="center",
                zorder=2, bbox={"facecolor": "white", "edgecolor": SOFT, "boxstyle": "round,pad=0.3"},
            )  # fmt: skip
    ax.set_xlim(0, 1)
    ax.set_ylim(-len(levels) + 0.55, 0.45)
    return figure


def draw_sweep(sweep: PoseSweep, rows: Sequence[int] | None = None) -> Figure:
    """A row for each direction, a column for each step; the middle is the pose as it is.

    rows  which directions; None is all of them.
    """
    chosen = list(range(len(sweep.directions))) if rows is None else list(rows)
    values = sweep.values.tolist()
    tiles = _tiles(sweep.images[chosen])
    width, labels = 4.6, 0.35
    height = (width - labels) * tiles.shape[0] / tiles.shape[1]
    figure = Figure(figsize=(width, height + labels))
    ax = figure.add_axes((labels / width, 0.02, 1 - labels / width - 0.01, height / (height + labels) - 0.02))
    ax.imshow(tiles, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    ax.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    named = [s for s, value in enumerate(values) if s in (0, len(values) - 1) or value == 0]
    ax.set_xticks(
        _middles(len(values), tiles.shape[1])[named], [f"{values[s]:+.2g}" if values[s] else "0" for s in named]
    )
    ax.set_yticks(_middles(len(chosen), tiles.shape[0]), [str(direction) for direction in chosen])
    ax.spines[:].set_visible(False)
    return figure


def draw_scores(scores: Tensor, names: Sequence[str] | None = None, label: int | None = None) -> Figure:
    """Scores of one example, `[T, K]`, a bar for each class and round; `label` is set in bold."""
    T, K = scores.shape
    figure = Figure(figsize=(4.4, 0.3 * K + 0.7), layout="constrained")
    ax = figure.add_subplot()
    colours = colormaps["Blues"](np.linspace(0.4, 0.95, T))  # from light to dark, round by round
    for t, row in enumerate(scores.detach().cpu()):
        at = np.arange(K) - 0.4 + 0.8 * (t + 0.5) / T
        ax.barh(at, row.numpy(), height=0.8 / T, color=colours[t], label=f"round {t + 1}")
    ax.set_yticks(range(K), [_name(names, k) for k in range(K)], fontsize=8)
    for k, text in enumerate(ax.get_yticklabels()):
        text.set_fontweight("bold" if k == label else "normal")
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelsize=8)
    _plain(ax)
    figure.legend(loc="outside upper right", ncols=min(T, 4), fontsize=8, frameon=False)
    return figure


def draw_reconstructions(found: Reconstructions, names: Sequence[str] | None = None, columns: int = 5) -> Figure:
    """Each image above its reconstruction; where the prediction is wrong it is framed, and both classes are named."""
    N = len(found.images)
    rows = -(-N // columns)
    figure, axes = _grid(2 * rows, min(columns, N), 4.4 / columns, between=0.3)
    for ax in axes.flat:
        ax.set_axis_off()
    wrong = found.wrong.tolist()
    for i, (label, said) in enumerate(zip(found.labels.tolist(), found.predicted.tolist(), strict=True)):
        above, below = axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]
        for ax, image in ((above, found.images[i]), (below, found.drawn[i])):
            ax.set_axis_on()
            _show(ax, image)
            if wrong[i]:
                for spine in ax.spines.values():
                    spine.set(visible=True, edgecolor=WRONG, linewidth=2.5)
        title = f"{_name(names, label)}, not {_name(names, said)}" if wrong[i] else _name(names, label)
        above.set_title(title, fontsize=8, color=WRONG if wrong[i] else INK, pad=2)
    return figure


def draw_pose_map(found: PoseMap, labels: Tensor, names: Sequence[str] | None = None) -> Figure:
    """The points, each as the number or name of its class."""
    figure = Figure(figsize=(4.4, 4.0), layout="constrained")
    ax = figure.add_subplot()
    points = found.points.detach().cpu().numpy()
    classes = sorted(set(labels.tolist()))
    for order, k in enumerate(classes):
        here = labels.cpu().numpy() == k
        marker = "osD^vP*X<>"[order % 10]
        x, y = points[here].T
        ax.scatter(x, y, s=14, marker=marker, color=f"C{order % 10}", alpha=0.55, linewidths=0)
    for k in classes:  # names last, over all points
        x, y = np.median(points[labels.cpu().numpy() == k], axis=0)
        ax.text(x, y, _name(names, k), fontsize=9, weight="bold", ha="center", va="center", color=INK,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1})  # fmt: skip
    if found.explained is not None:
        first, second = found.explained
        ax.set_xlabel(f"widest direction, {first:.0%} of the variance", fontsize=8)
        ax.set_ylabel(f"second, {second:.0%}", fontsize=8)
    ax.set_xticks([])
    ax.set_yticks([])
    _plain(ax)
    return figure


def draw_trace(
    found: RoutingTrace, example: int = 0, names: Sequence[str] | None = None, parent: int | None = None
) -> Figure:
    """Entropy, and agreement of every parent (one of them in colour), round by round."""
    figure = Figure(figsize=(4.4, 2.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rounds = range(1, len(found.entropy) + 1)
    left.plot(rounds, found.entropy[:, example].cpu(), "o-", color=INK)
    left.set_ylim(0, 1.03)
    left.set_title("entropy of shares", fontsize=9)
    agreement = found.agreement[:, example].cpu()
    for j in range(agreement.shape[1]):
        if j != parent:
            right.plot(rounds, agreement[:, j], "-", color=SOFT, alpha=0.5, linewidth=1)
    if parent is not None:
        right.plot(rounds, agreement[:, parent], "o-", color=RIGHT)
        right.annotate(
            _name(names, parent), (rounds[-1], float(agreement[-1, parent])), fontsize=8, color=RIGHT,
            xytext=(4, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    right.set_title("agreement with parents", fontsize=9)
    for ax in (left, right):
        ax.set_xticks(list(rounds))
        ax.set_xlabel("round", fontsize=8)
        ax.tick_params(labelsize=8)
        _plain(ax)
    return figure


def draw_occlusion(
    found: Occlusion, image: Tensor, parent: int, *, names: Sequence[str] | None = None, fields: Fields | None = None
) -> Figure:
    """Over the image, what each place adds to the score of one parent: for it, and against it.

    Raises ValueError for an occlusion over other than the places of an image.
    """
    drop = found.drop[..., parent]
    if found.over != "places" or drop.dim() != 2:
        raise ValueError(f"an occlusion over {found.over} of {list(drop.shape)} has no places on an image")
    return draw_over_image(
        drop, image, f"what each place adds to {_name(names, parent)}", fields=fields, signed=True,
    )  # fmt: skip


def draw_over_image(
    values: Tensor, image: Tensor, title: str = "", *, fields: Fields | None = None, signed: bool = False
) -> Figure:
    """A map `[h, w]`, or a value for each pixel, over an image `[C, H, W]`, with its scale."""
    figure = Figure(figsize=(3.2, 2.6), layout="constrained")
    ax = figure.add_subplot()
    _show(ax, image, faint=True)
    height, width = image.shape[-2:]
    values = values.detach().cpu()
    heat = values if tuple(values.shape) == (height, width) else over_image(values, (height, width), fields)
    most = float(values.abs().max()) or 1.0
    ax.set_xticks([])
    ax.set_yticks([])
    shown = ax.imshow(heat, cmap="RdBu" if signed else HEAT, vmin=-most if signed else 0.0, vmax=most, alpha=0.75)
    bar = figure.colorbar(shown, ax=ax, shrink=0.85)
    bar.ax.tick_params(labelsize=7)
    ax.set_title(title, fontsize=9, color=INK)
    return figure


def _grid(
    rows: int, columns: int, size: float, *, top: float = 0.05, left: float = 0.28, between: float = 0.0
) -> tuple[Figure, NDArray[Any]]:
    """Square cells of so many inches."""
    width = columns * size + left + 0.05
    height = rows * size + top + 0.2 + between * rows / 2
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left / width, 0.2 / height, 1 - 0.05 / width, 1 - (top + between / 2) / height,
        wspace=0.05, hspace=0.05 + between / size / 2,
    )  # fmt: skip
    for ax in axes.flat:
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)
    return figure, axes


def _tiles(images: Tensor) -> NDArray[np.float32]:
    """`[rows, columns, C, H, W]` side by side as one picture, with white between them."""
    each = np.stack([np.stack([picture(image) for image in row]) for row in images])
    rows, columns, H, W, *colours = each.shape
    gap = max(1, H // 14)
    whole = np.ones((rows, H + gap, columns, W + gap, *colours), np.float32)
    whole[:, :H, :, :W] = each.swapaxes(1, 2)
    return whole.reshape(rows * (H + gap), columns * (W + gap), *colours)


def _middles(count: int, length: int) -> NDArray[np.float64]:
    """Where the middles of so many equal parts of a length are, in pixels."""
    return (np.arange(count) + 0.5) * length / count - 0.5


def _show(ax: Axes, image: Tensor, faint: bool = False) -> None:
    shown = picture(image)
    if faint:
        shown = shown.mean(2) if shown.ndim == 3 else shown
    ax.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _say(ax: Axes, text: str) -> None:
    ax.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=9, color=INK)


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)


def _name(names: Sequence[str] | None, number: int) -> str:
    if names is not None and number >= len(names):
        raise ValueError(f"there are {len(names)} names, and none for class {number}: give one for each class")
    return str(number) if names is None else plain(names[number])


def plain(text: str) -> str:
    """Text for a figure that is not read as a formula."""
    return text.replace("$", r"\$")


def _where(part: Part) -> str:
    place = ",".join(map(str, part.place))
    return f"type {part.type}" + (f"\nat {place}" if place else "")


def _levels(tree: Part) -> list[list[Part]]:
    levels = [[tree]]
    while below := [child for part in levels[-1] for child in part.parts]:
        levels.append(below)
    return levels
