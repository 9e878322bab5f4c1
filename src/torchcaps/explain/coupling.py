"""Coupling made readable: over the image, as a tree, round by round, and what changes without a child.

share        c_ij, what child i gives to parent j; over all parents it sums to what the rule states
presence     a_i, how much child i is there: its activation where the rule weighs by it, else its pose's length
flow         c_ij a_i, what of child i reaches parent j: maps and trees show it, for an absent child has shares too
agreement    A_j = sum_i c_ij cos(u_ij, v_j) / sum_i c_ij, in -1 .. 1: how far the votes for a parent point its way
entropy      -sum_j p_ij log p_ij / log J,  p_ij = c_ij / sum_j c_ij, mean over children: 1 where all shares are
             even, 0 where each child has chosen one parent
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity

from torchcaps.explain.watching import Look, Seen, evaluating, last_layer, look, routed_layers
from torchcaps.types import Capsules, Routed

__all__ = [
    "CouplingMaps", "Occlusion", "Part", "RoutingTrace", "coupling_maps", "maps_of", "occlude", "occlusion",
    "over_image", "parse_tree", "receptive_fields", "routing_trace", "scores_per_round",
]  # fmt: skip

Over = Literal["places", "types", "children"]

Fields = tuple[Tensor, ...]
"""Per axis of the map `[places, 2]`: the first and the last pixel that a place sees."""


@dataclass(frozen=True)
class CouplingMaps:
    """Who feeds whom, in every round.

    layer     whose parents these are.
    shares    `[T, N, J, C, *spatial]`, each child's share for each parent.
    presence  `[T, N, C, *spatial]` of the children. It changes with T only where a network routes all layers at once.
    sums_to   "parents", "children" or None, as the rule states it.
    """

    layer: str
    shares: Tensor
    presence: Tensor
    sums_to: Literal["parents", "children"] | None

    @property
    def flow(self) -> Tensor:
        """Shares times presence, `[T, N, J, C, *spatial]`."""
        return self.shares * self.presence.unsqueeze(2)

    def by_place(self) -> Tensor:
        """Flow summed over types, `[T, N, J, *spatial]`."""
        return self.flow.sum(3)

    def by_type(self) -> Tensor:
        """Flow summed over places, `[T, N, J, C]`."""
        return self.flow.flatten(4).sum(4) if self.flow.dim() > 4 else self.flow


def coupling_maps(
    model: nn.Module,
    images: Tensor,
    layer: str | None = None,
    *,
    places: tuple[int, ...] | None = None,
    parent_at: tuple[int, ...] | None = None,
) -> CouplingMaps:
    """Which positions and types feed which parent of a layer, in each round, for images `[N, C, *size]`.

    layer      by name; None is the last, whose parents are the classes.
    places     how a list of children lies, such as (8, 8), where the layer is given a list and not a map.
    parent_at  the place of one parent of a convolution; without it each child's shares are summed over all windows.

    Raises ValueError for names, places and images that do not fit.
    """
    return maps_of(look(model, images), layer, places=places, parent_at=parent_at)


def maps_of(
    found: Look,
    layer: str | None = None,
    *,
    places: tuple[int, ...] | None = None,
    parent_at: tuple[int, ...] | None = None,
) -> CouplingMaps:
    """`coupling_maps` of what was already looked at, which may be with other rounds or without some children."""
    calls = found.of(layer)
    shares = torch.cat([call.shares(parent_at) for call in calls])
    presence = torch.cat([call.presence.expand(len(call.coupling), *call.presence.shape) for call in calls])
    if places is not None:
        if shares.dim() != 4 or shares.shape[3] % math.prod(places):
            raise ValueError(f"places={places} does not lay out children {list(shares.shape[3:])} of {calls[0].layer}")
        shares, presence = (x.unflatten(-1, (-1, *places)) for x in (shares, presence))
    return CouplingMaps(calls[0].layer, shares, presence, calls[0].rule.sums_to)


def receptive_fields(model: nn.Module, image_size: tuple[int, ...], layer: str | None = None) -> Fields | None:
    """The pixels that each place of a layer's children sees, per axis `[places, 2]`: first and last, both included.

    Found by trial: a row of the image is set to NaN, and the places whose poses become NaN have seen it. None where the
    children are a list, or where places do not follow the image (all see all of it). Takes a forward pass up to the
    layer for each row and column.

    image_size  (C, *size) of an image.
    """
    name = last_layer(model) if layer is None else layer
    C, *size = image_size
    found: list[Tensor] = []
    for axis, length in enumerate(size):
        x = torch.zeros(length, C, *size, dtype=torch.float64)
        for i in range(length):
            x[i].select(axis + 1, i).fill_(torch.nan)
        lost = torch.cat([_children(model, part, name).isnan() for part in x.split(16)])
        if lost.dim() != 4 + len(size):
            return None
        others = [d for d in range(1, lost.dim()) if d != axis + 2]
        sees = lost.any(others)  # [pixels, places]
        steps = torch.arange(length)[:, None]
        first = torch.where(sees, steps, length).amin(0)
        last = torch.where(sees, steps, -1).amax(0)
        if (last < first).any() or (len(first) > 1 and ((first + last).diff() <= 0).any()):
            return None
        found.append(torch.stack([first, last], 1))
    return tuple(found)


def over_image(values: Tensor, size: tuple[int, int], fields: Fields | None = None) -> Tensor:
    """A map `[..., h, w]` enlarged over an image: `[..., H, W]`, linear between the middles of what the places see.

    fields  of `receptive_fields`; None stretches the map over the whole image. Pixels beyond the outermost places, by
            more than half a step, are NaN: no place stands there.
    """
    for axis, length in zip((-2, -1), size, strict=True):
        n = values.shape[axis]
        if fields is None:
            middles = (torch.arange(n, dtype=torch.float64) + 0.5) * length / n - 0.5
        else:
            middles = fields[axis].double().mean(1)
        at = torch.arange(length, dtype=torch.float64)
        if n == 1:
            weights = torch.ones(length, 1, dtype=torch.float64)
        else:
            step = (middles[-1] - middles[0]) / (n - 1)
            upper = torch.searchsorted(middles, at).clamp(1, n - 1)
            t = ((at - middles[upper - 1]) / (middles[upper] - middles[upper - 1])).clamp(0, 1)
            weights = torch.zeros(length, n, dtype=torch.float64)
            weights.scatter_(1, (upper - 1)[:, None], (1 - t)[:, None])
            weights.scatter_add_(1, upper[:, None], t[:, None])
            weights[(at < middles[0] - step / 2) | (at > middles[-1] + step / 2)] = torch.nan
        moved = values.movedim(axis, -1) @ weights.T.to(values)
        values = moved.movedim(-1, axis)
    return values


@dataclass(frozen=True)
class Part:
    """A capsule in a parse tree.

    layer     the layer that made it; None for primary capsules, which nobody routed.
    type      its number among the types of its map (of classes: the class).
    place     in its map; () for a list.
    presence  activation or length.
    share     c_ij, what it gives to the capsule above it; None for the root.
    flow      share times presence; None for the root.
    parts     its strongest children by flow, the strongest first.
    covered   share of the flow of all its children that these carry; None where there are none.
    """

    layer: str | None
    type: int
    place: tuple[int, ...]
    presence: float
    share: float | None
    flow: float | None
    parts: tuple["Part", ...]
    covered: float | None


def parse_tree(model: nn.Module, image: Tensor, parent: int | None = None, *, top: int = 4) -> Part:
    """From a class capsule down to primary capsules: who made it, by the last round's coupling.

    image   one, `[C, *size]` or `[1, C, *size]`.
    parent  the class; None is the one with the highest score.
    top     children kept of each capsule.

    Raises ValueError for another class, or more than one image.
    """
    image = _one(image)
    if top < 1:
        raise ValueError(f"top={top}: a tree keeps 1 child of each capsule or more")
    found = look(model, image)
    last = found.of()[-1]
    K = last.routed.poses.shape[1]
    chosen = int(found.scores[0].argmax()) if parent is None else parent
    if not 0 <= chosen < K:
        raise ValueError(f"parent={parent}: the classes are numbered 0 to {K - 1}")
    return _part(found.seen, last, chosen, (), top, None)


@dataclass(frozen=True)
class RoutingTrace:
    """How a layer comes to its answer, round by round, for each example.

    entropy    `[T, N]`, 0 .. 1; NaN with a single parent, or where no child takes part.
    agreement  `[T, N, J]`, -1 .. 1; of a convolution the mean over places.
    """

    layer: str
    entropy: Tensor
    agreement: Tensor


def routing_trace(model: nn.Module, images: Tensor, layer: str | None = None) -> RoutingTrace:
    """Entropy and agreement of a layer (None: the last) per round. Holds all votes of the layer in memory."""
    calls = look(model, images).of(layer)
    N = len(images)
    entropy, agreement = [], []
    with torch.no_grad():
        for call in calls:
            votes, coupling = call.votes(), call.coupling
            for t, c in enumerate(coupling, start=1):
                parents = call.after(t).poses
                agree = cosine_similarity(votes.flatten(3), parents[:, None].flatten(3), dim=3)
                total = c.sum(1).clamp(min=torch.finfo(c.dtype).tiny)
                agreement.append(((c * agree).sum(1) / total).unflatten(0, (N, -1)).mean(1))
                entropy.append(_entropy(c, N))
    return RoutingTrace(calls[0].layer, torch.stack(entropy), torch.stack(agreement))


def scores_per_round(model: nn.Module, images: Tensor) -> Tensor:
    """Scores `[T, N, K]` had the class capsules stopped after 1, 2, ... T rounds; the last are the model's own."""
    whole = look(model, images)
    calls = whole.of()
    T = sum(len(call.coupling) for call in calls)
    earlier = [look(model, images, rounds={calls[0].layer: t}).scores for t in range(1, T)]
    return torch.stack([*earlier, whole.scores])


@dataclass(frozen=True)
class Occlusion:
    """Scores of one image with parts of a layer's children left out.

    layer    whose children.
    scores   `[K]`, with all of them.
    without  `[*groups, K]`: groups are the map's places `[*spatial]`, its types `[C]`, or each child `[C, *spatial]`.
    """

    layer: str
    over: Over
    scores: Tensor
    without: Tensor

    @property
    def drop(self) -> Tensor:
        """What each group adds to each score, `[*groups, K]`: the score with it less the score without it."""
        return self.scores - self.without


def occlude(model: nn.Module, images: Tensor, absent: Tensor, layer: str | None = None) -> Tensor:
    """Scores `[G, K]` had the children marked in `absent` `[G, C, *spatial]` (or `[G, I]`) not been there.

    Exact: they take no part in the routing of `layer` (None: the last), as if it had been built without them. G is the
    number of images, or any for a single one.
    """
    name = last_layer(model) if layer is None else layer
    return look(model, images, absent={name: absent}).scores


def occlusion(
    model: nn.Module, image: Tensor, layer: str | None = None, *, over: Over = "places", chunk: int = 256
) -> Occlusion:
    """What one image's scores would be without each place, type or single child of a layer (None: the last).

    chunk  groups that are tried at once.
    """
    image = _one(image)
    name = last_layer(model) if layer is None else layer
    all_there = look(model, image)
    poses = all_there.of(name)[-1].children.poses
    C, *spatial = poses.shape[1:-2]
    if over == "places" and not spatial:
        raise ValueError(f"the children of {name} are a list without places: take over='children'")
    eye = torch.eye(math.prod({"places": spatial, "types": [C], "children": [C, *spatial]}[_over(over)]))
    eye = eye.bool().to(poses.device)
    if over == "places":
        groups, absent = spatial, eye[:, None].expand(-1, C, -1)
    elif over == "types":
        groups, absent = [C], eye[:, :, None].expand(-1, -1, math.prod(spatial))
    else:
        groups, absent = [C, *spatial], eye
    absent = absent.reshape(-1, C, *spatial)
    without = torch.cat([occlude(model, image, part, name) for part in absent.split(chunk)])
    return Occlusion(name, over, all_there.scores[0], without.unflatten(0, groups))


class _EnoughError(Exception):
    """Ends a forward pass once the children are there."""

    def __init__(self, poses: Tensor) -> None:
        self.poses = poses


def _children(model: nn.Module, images: Tensor, name: str) -> Tensor:
    """Poses of the children of a layer for images of float64, on the CPU.

    Convolutions of lower precision may be calculated by algorithms that mix neighbours and take them apart again, which
    NaN does not survive.
    """
    layer = routed_layers(model)[name]
    own = layer.__dict__.get("route")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    double = {key: (x.double() if x.is_floating_point() else x).cpu() for key, x in state.items()}

    def stop(capsules: Capsules, mask: Tensor | None = None, **_: object) -> Routed:
        raise _EnoughError(capsules.poses)

    layer.route = stop  # type: ignore[method-assign]  # in the instance, over the method
    try:
        with torch.no_grad(), evaluating(model):
            functional_call(model, double, (images,))
    except _EnoughError as enough:
        return enough.poses
    finally:
        if own is None:
            del layer.route
        else:
            layer.route = own  # type: ignore[method-assign]
    raise ValueError(f"{name} was not called")


def _part(
    seen: list[Seen], call: Seen, type: int, place: tuple[int, ...], top: int, above: tuple[float, float] | None
) -> Part:
    """The parent `type` at `place` that `call` made, with its strongest children; `above` is its (share, flow)."""
    shares = call.shares(place or None)[-1, 0, type]
    flow = shares * call.presence[0]
    best = flow.flatten().topk(min(top, flow.numel()))
    below = next((s for s in seen if s.routed.poses is call.children.poses), None)
    parts = []
    for number, strength in zip(best.indices, best.values.tolist(), strict=True):
        index = tuple(int(i) for i in torch.unravel_index(number, flow.shape))
        edge = float(shares[index]), strength
        if below is not None:
            parts.append(_part(seen, below, index[0], index[1:], top, edge))
        else:
            parts.append(Part(None, index[0], index[1:], float(call.presence[0][index]), *edge, (), None))
    poses, activations = call.routed.capsules
    presence = float((Capsules(poses).lengths if activations is None else activations)[0, type][place])
    total = float(flow.sum())
    covered = float(best.values.sum()) / total if total > 0 else None
    share, strength_above = above or (None, None)
    return Part(call.layer, type, place, presence, share, strength_above, tuple(parts), covered)


def _entropy(c: Tensor, N: int) -> Tensor:
    """`[N]`, from shares `[N * windows, I, J]`."""
    J = c.shape[2]
    total = c.sum(2, keepdim=True)
    shares = c / total.clamp(min=torch.finfo(c.dtype).tiny)
    there = (total[..., 0] > 0).unflatten(0, (N, -1))
    each = (torch.special.entr(shares).sum(2) / math.log(J)).unflatten(0, (N, -1)) if J > 1 else there * torch.nan
    return torch.where(there, each, 0.0).sum((1, 2)) / there.sum((1, 2))


def _one(image: Tensor) -> Tensor:
    image = image if image.dim() > 3 else image[None]
    if len(image) != 1:
        raise ValueError(f"one image at a time, [C, H, W] or [1, C, H, W], not {list(image.shape)}")
    return image


def _over(over: str) -> str:
    if over not in ("places", "types", "children"):
        raise ValueError(f"over={over!r}: take 'places', 'types' or 'children'")
    return over
