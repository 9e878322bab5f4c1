"""A model as it routes: what went into each capsule layer and what came out, every round's coupling with it.

    with watching(model) as seen:
        model(images)
    seen[-1].layer, seen[-1].coupling.shape                 "class_caps", [T, N, I, J]

While the context is open each layer's rule runs on the reference backend, which alone holds the coupling; the numbers
are those of the model. Two things can be changed meanwhile, to ask "what if": after how many rounds layers stop
(`rounds`), and which children are there (`absent`). Afterwards the model is as it was. The context changes attributes
of the layers while it is open: one at a time for each model.

Everything here works for any layer that keeps the `CapsuleLayer` protocol with its rule in `routing`, whether its
`forward` is called or, as in concurrent routing, its `route`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from torchcaps.routing import Rule, Windows, enter
from torchcaps.types import Capsules, Routed, whole

__all__ = ["Look", "Rounds", "Seen", "evaluating", "last_layer", "look", "routed_layers", "watching"]

Rounds = int | Mapping[str, int] | None
"""Rounds after which all layers stop, or each one named."""


@runtime_checkable
class RoutedLayer(Protocol):
    """A capsule layer whose rule can be read."""

    routing: Rule
    out_caps: int

    def route(self, capsules: Capsules, mask: Tensor | None = None) -> Routed: ...


@runtime_checkable
class Convolves(Protocol):
    """A capsule layer whose parents look at windows of a map."""

    @property
    def windows(self) -> Windows: ...


@dataclass(frozen=True)
class Seen:
    """One call of one layer.

    layer      its name in the model.
    rule       its rule.
    children   as the layer was given them, a list `[N, I, R, P]` or a map `[N, C, *spatial, R, P]`.
    mask       of the children, `[N, I]` or `[N, C, *spatial]`, or None.
    arguments  those of the rule's call, by name: poses, weight, activations, mask, start, learned tensors, ...
    coupling   `[T, N, I, J]`, of every round; of a convolution `[T, N * windows, C * kernel, J]`.
    routed     what the layer gave.
    windows    of a convolution; None where every parent hears every child.
    """

    layer: str
    rule: Rule
    children: Capsules
    mask: Tensor | None
    arguments: Mapping[str, Any]
    coupling: Tensor
    routed: Routed
    windows: Windows | None

    @property
    def presence(self) -> Tensor:
        """How much each child is there, `[N, C, *spatial]`; 0 for one that is masked.

        Its activation where the rule weighs by that, else its pose's length.
        """
        poses, activations = self.children
        there = activations if self.rule.needs_activations and activations is not None else Capsules(poses).lengths
        return there if self.mask is None else there.masked_fill(~self.mask, 0.0)

    def shares(self, parent_at: tuple[int, ...] | None = None) -> Tensor:
        """What each child gives to each parent, `[T, N, J, C, *spatial]`, summed over the windows that see the child.

        parent_at  the place of one parent of a convolution: its window alone, 0 outside of it.

        Summed over J this is 1 for each child under a rule that shares over parents; where windows do not compete for
        a child, the number of windows that see it. Raises ValueError for a place that is not there.
        """
        places = self.children.poses.shape[1:-2]
        if self.windows is None:
            if parent_at is not None:
                raise ValueError(f"{self.layer} has no places: each of its parents hears all children")
            return self.coupling.movedim(-1, 2).unflatten(-1, places)
        windows, spatial = self.windows, places[1:]
        coupling = self.coupling
        if parent_at is not None:
            out = windows.out(spatial)
            if len(parent_at) != len(out) or any(not 0 <= p < n for p, n in zip(parent_at, out, strict=True)):
                raise ValueError(f"{self.layer} has parents at places 0 .. {[n - 1 for n in out]}, not at {parent_at}")
            chosen = torch.zeros(out, dtype=torch.bool, device=coupling.device)
            chosen[parent_at] = True
            N = len(self.children.poses)
            coupling = coupling * chosen.flatten().repeat(N)[:, None, None]
        return torch.stack([windows.fold(c, spatial).movedim(-1, 1) for c in coupling])

    def votes(self) -> Tensor:
        """`[N, I, J, R, Q]`; of a convolution `[N * windows, C * kernel, J, R, Q]`. The largest thing in a network."""
        a = self.arguments
        call = enter(
            a["poses"], a["weight"], a["activations"], vote_offset=a["vote_offset"], mask=a["mask"], child_ids=None,
            windows=a["windows"], iterations=1, backend="reference", return_coupling=False,
        )  # fmt: skip
        return call.unfolded().votes()

    def after(self, rounds: int) -> Routed:
        """What the rule alone gives when it stops after so many rounds of this call, 1 or more."""
        return _with_rounds(self.layer, self.rule, rounds)(**self.arguments, backend="reference")


@dataclass(frozen=True)
class Look:
    """What a model says of some images, and all that its layers did on the way there, in the order of their calls."""

    scores: Tensor
    seen: list[Seen]

    def of(self, layer: str | None = None) -> list[Seen]:
        """The calls of one layer, by its name; without a name those of the last, whose parents are the classes.

        There are several of them where a network routes one round at a time. Raises ValueError for other names.
        """
        if not self.seen:
            raise ValueError("the model routed nothing: it has no capsule layers, or called none of them")
        name = self.seen[-1].layer if layer is None else layer
        found = [s for s in self.seen if s.layer == name]
        if not found:
            names = list(dict.fromkeys(s.layer for s in self.seen))
            raise ValueError(f"no capsule layer {name!r} was called: take one of {', '.join(names)}")
        return found


def look(
    model: nn.Module,
    images: Tensor,
    *,
    rounds: Rounds = None,
    absent: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Look:
    """Put images `[N, C, *size]` through the model, in evaluation mode and without gradients, and watch.

    rounds, absent  as in `watching`.
    mask            of the input, for models that take one.

    >>> import torch
    >>> from torchcaps import create_model
    >>> model = create_model("capsnet", image_size=20, stem_channels=8, primary_types=2, decoder=False)
    >>> look(model, torch.rand(4, 1, 20, 20)).of("class_caps")[0].coupling.shape  # T, N, I, J
    torch.Size([3, 4, 8, 10])
    """
    check_images(images)
    with torch.no_grad(), evaluating(model), watching(model, rounds=rounds, absent=absent) as seen:
        scores = model(images) if mask is None else model(images, mask=mask)
    return Look(scores, seen)


def check_images(images: Tensor) -> None:
    """ValueError for a batch of images that nothing can be said about."""
    if not isinstance(images, Tensor) or images.dim() < 3 or not len(images):
        raise ValueError(f"images must be a batch [N, C, *size] of one or more, not {_what(images)}")
    if not images.is_floating_point() or not images.isfinite().all():
        raise ValueError(f"images must be finite floating point numbers, not {_what(images)}: call .float() first, say")


def check_labels(labels: Tensor, images: Tensor, classes: int) -> None:
    """ValueError for labels that are not one class of 0 .. classes - 1 for each image."""
    if (
        labels.shape != images.shape[:1]
        or labels.dtype != torch.long
        or not bool(((labels >= 0) & (labels < classes)).all())
    ):
        raise ValueError(
            f"labels {labels.tolist()[:8]} must be {len(images)} of torch.long, of classes 0 to {classes - 1}"
        )


def _what(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def routed_layers(model: nn.Module) -> dict[str, RoutedLayer]:
    """The layers that can be watched, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, RoutedLayer)}


def last_layer(model: nn.Module) -> str:
    """The name of the last capsule layer in the model's list: the class capsules. ValueError where there is none."""
    layers = routed_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no capsule layers to look into")
    return list(layers)[-1]


@contextlib.contextmanager
def watching(
    model: nn.Module, *, rounds: Rounds = None, absent: Mapping[str, Tensor] | None = None
) -> Iterator[list[Seen]]:
    """While it is open, each call of a capsule layer of `model` is added to the list that it gives.

    rounds  stop all layers after so many rounds, or each by its name; 1 is routing off. A layer that runs one round at
            a time keeps what it had after so many calls.
    absent  by the layers' names, True for children that are not there: `[G, I]` or `[G, C, *spatial]`. G is N, or any
            number for a single example: from that layer on there are G of it, one for each row.

    Raises ValueError where a name or a shape does not fit, and for a layer that does not call its rule.
    """
    layers = routed_layers(model)
    wanted = {**({} if rounds is None or isinstance(rounds, int) else rounds), **(absent or {})}
    if unknown := sorted(set(wanted) - set(layers)):
        raise ValueError(f"no capsule layer {', '.join(unknown)}: there are {', '.join(layers) or 'none'}")
    seen: list[Seen] = []
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            limit = rounds if rounds is None or isinstance(rounds, int) else rounds.get(name)
            gone = None if absent is None else absent.get(name)
            stack.enter_context(_watched(name, layer, seen.append, limit, gone))
        yield seen


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and not compiled; then as it was."""
    modes = [(module, module.training) for module in model.modules()]
    compiled = model._compiled_call_impl
    try:
        if compiled is not None:
            model._compiled_call_impl = None
        model.eval()
        yield
    finally:
        if compiled is not None:
            model._compiled_call_impl = compiled
        for module, training in modes:
            module.training = training


class _Heard:
    """Stands in a layer's place of its rule, keeps the arguments of the call, and asks for every round's coupling."""

    def __init__(self, layer: str, rule: Rule, limit: int | None) -> None:
        self._layer, self._rule, self._limit = layer, rule, limit
        self._done = 0
        self.last: tuple[dict[str, Any], Routed] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def __str__(self) -> str:
        return str(self._rule)

    def __call__(self, poses: Tensor, weight: Tensor, activations: Tensor | None = None, **settings: Any) -> Routed:
        asked, _ = settings.pop("return_coupling", False), settings.pop("backend", "auto")
        rule = self._rule
        if self._limit is not None:
            left = self._limit - self._done
            if left <= 0 and self.last is not None:
                return _asked_for(self.last[1], asked)
            rule = _with_rounds(self._layer, rule, min(left, _rounds_of(self._layer, rule)))
        usual = dict.fromkeys(("vote_offset", "mask", "start", "child_ids", "windows"))
        arguments = {**usual, "poses": poses, "weight": weight, "activations": activations, **settings}
        routed = rule(**arguments, backend="reference", return_coupling="all")
        assert routed.coupling is not None
        self._done += len(routed.coupling)
        self.last = arguments, routed
        return _asked_for(routed, asked)


@contextlib.contextmanager
def _watched(
    name: str, layer: RoutedLayer, keep: Callable[[Seen], None], limit: int | None, gone: Tensor | None
) -> Iterator[None]:
    rule, route, own = layer.routing, layer.route, layer.__dict__.get("route")
    heard = _Heard(name, rule, limit)

    def watched(capsules: Capsules, mask: Tensor | None = None, **settings: Any) -> Routed:
        if gone is not None:
            capsules, mask = _without(name, capsules, mask, gone)
        before = heard.last
        routed = route(capsules, mask, **settings)
        if heard.last is None:
            raise ValueError(f"{name} ({type(layer).__name__}) routes without a call of its rule: it cannot be watched")
        if heard.last is not before:  # a layer that has stopped says what it said before
            arguments, full = heard.last
            assert full.coupling is not None
            windows = layer.windows if isinstance(layer, Convolves) else None
            keep(Seen(name, rule, capsules, mask, arguments, full.coupling, routed, windows))
        return routed

    layer.routing = cast("Rule", heard)
    layer.route = watched  # type: ignore[method-assign]  # in the instance, over the method
    try:
        yield
    finally:
        layer.routing = rule
        if own is None:
            del layer.route
        else:
            layer.route = own  # type: ignore[method-assign]


def _without(name: str, capsules: Capsules, mask: Tensor | None, gone: Tensor) -> tuple[Capsules, Tensor]:
    """The children with a mask that leaves out what is gone, as many times as there are rows of `gone`."""
    places = capsules.poses.shape[:-2]
    if gone.dtype != torch.bool or gone.shape[1:] != places[1:] or (len(gone) != places[0] and places[0] != 1):
        raise ValueError(
            f"absent {list(gone.shape)} of {gone.dtype} does not fit the children {list(places)} of {name}: it must be "
            f"of torch.bool, {list(places)}, or for a single example any number of rows of it"
        )
    G = len(gone)
    poses, activations = (None if x is None else x.expand(G, *x.shape[1:]) for x in capsules)
    assert poses is not None
    return Capsules(poses, activations), ~gone if mask is None else mask & ~gone


def _with_rounds(layer: str, rule: Rule, rounds: int) -> Rule:
    _rounds_of(layer, rule)
    if whole(rounds) is None or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: {layer} takes a whole number of rounds, 1 or more (1 is routing off)")
    settings: Any = rule
    return cast("Rule", dataclasses.replace(settings, iterations=rounds))


def _rounds_of(layer: str, rule: Rule) -> int:
    if "iterations" not in {field.name for field in dataclasses.fields(rule)}:
        raise ValueError(f"{layer}: {rule} has no number of rounds to change")
    settings: Any = rule
    return int(settings.iterations)


def _asked_for(routed: Routed, asked: bool | str) -> Routed:
    assert routed.coupling is not None
    return routed._replace(coupling=routed.coupling if asked == "all" else routed.coupling[-1] if asked else None)
