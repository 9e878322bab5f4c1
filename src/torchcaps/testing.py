"""What every routing rule promises, as a test for a rule of one's own.

    assert_routing_contract(rule)    an AssertionError names the promise that `rule` breaks, and the numbers
    assert_backends_agree(rule)      every backend against the reference: values and gradients

Nothing but torch is needed, so that both can stand in anybody's tests. A rule is anything that is called as a
`torchcaps.routing.Rule` is and has its `sums_to`, `needs_activations` and `learned(I, J, R, P, Q)`. Where it has a
setting `iterations` (a field of a dataclass, or an attribute of its own), rounds are tried with 1, 2 and 3 of them.

Tensors named by `learned` get generic values: the starting values plus noise. Which of their axes belong to children
and which to parents is read off their shapes: an axis is one of children when it is I long and grows with I, one of
parents when it is J long and grows with J.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcaps.routing import Rule
from torchcaps.routing._round import BACKENDS
from torchcaps.types import Routed

__all__ = ["PROMISES", "assert_backends_agree", "assert_routing_contract"]

Sizes = tuple[int, int, int, int, int, int]
"""(N, I, J, R, P, Q)."""

SIZES: Sizes = (3, 6, 4, 2, 3, 5)  # all different, so that no axis can pass for another
ODD_SIZES: tuple[Sizes, ...] = ((1, 1, 1, 1, 1, 1), (2, 1, 3, 1, 4, 2), (2, 3, 1, 2, 1, 3), (1, 7, 2, 3, 2, 1))
CROSSING_TILES: tuple[Sizes, ...] = (*ODD_SIZES, (3, 33, 10, 1, 8, 16), (2, 65, 5, 4, 4, 4), (1, 130, 17, 1, 3, 9))

EXACT = 1e-9  # float64 that went another way, as a part of the largest value
ROUNDINGS = 64  # what float32 may lose in a few rounds of routing, in its eps

MISHAPS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def assert_routing_contract(
    rule: Rule, *, except_for: Collection[str] = (), device: torch.device | str = "cpu"
) -> None:
    """Raise an AssertionError that names the promise which `rule` breaks, with the numbers that show it.

    The promises are the keys of `PROMISES`. `except_for` names those that a rule does not make: one that scores poses
    rather than votes leaves out "only the votes speak" and "a vote offset is added to the votes". A rule whose setting
    `detach` is not "none" stops gradients on purpose: they are not compared with finite differences. Takes seconds.

    Raises ValueError for a name in `except_for` that is no promise.

    >>> from torchcaps.routing import Dynamic
    >>> assert_routing_contract(Dynamic.sabour())
    """
    if unknown := sorted(set(except_for) - set(PROMISES)):
        raise ValueError(f"except_for names {unknown}, but the promises are {sorted(PROMISES)}")
    trial = _Trial(rule, torch.device(device))
    for promise, keep in PROMISES.items():
        if promise in except_for:
            continue
        try:
            keep(trial)
        except AssertionError as error:
            raise AssertionError(f"{promise}: {error}") from error
        except MISHAPS as error:
            raise AssertionError(f"{promise}: the rule raised {type(error).__name__}: {error}") from error


def assert_backends_agree(
    rule: Rule,
    backends: Sequence[str] | None = None,
    *,
    sizes: Sequence[Sizes] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
) -> None:
    """Raise an AssertionError if a backend gives other values or gradients than the reference does.

    backends  names to compare; None is "auto" and every other one that there is. A backend may refuse cases with a
              ValueError, but "auto" may refuse none, and one that is named here may not refuse all.
    sizes     (N, I, J, R, P, Q) of the cases; None is a list that crosses the edges of tiles.
    dtypes    float64 is compared to 1e-9. In lower precision the backend's root-mean-square error against the
              reference in float64 may be at most twice the reference's own, on inputs that differ by their last bit,
              plus 4 eps of the tensor's scale.

    Every size is tried with vote offsets, shared weights, masks that hide NaN, a start, windows that share children.

    >>> from torchcaps.routing import Attention
    >>> assert_backends_agree(Attention.tsai(), sizes=[(2, 7, 3, 1, 4, 5)])
    """
    trial = _Trial(rule, torch.device(device))
    named = ("auto", *(b for b in BACKENDS if b not in ("auto", "reference"))) if backends is None else tuple(backends)
    agreed, refusal = dict.fromkeys(named, 0), dict.fromkeys(named, "there was none")
    for size in CROSSING_TILES if sizes is None else sizes:
        for name, rounds, case in _parity_cases(trial, size):
            for dtype in dtypes:
                routed, low = trial.with_rounds(rounds), case.to(dtype)
                exact = _everything(routed, low.to(torch.float64), "reference")
                own = [] if dtype == torch.float64 else [_everything(routed, x, "reference") for x in _nudged(low)]
                for backend in named:
                    where = f"backend {backend!r}, (N, I, J, R, P, Q) = {size}, {name}, {_all(rounds)}, {dtype}"
                    try:
                        got = _everything(routed, low, backend)
                    except ValueError as error:
                        if backend == "auto":
                            raise AssertionError(f"{where}: auto refused what it has to choose for: {error}") from error
                        refusal[backend] = str(error)
                        continue
                    _compare(got, exact, own, where)
                    agreed[backend] += 1
    for backend in backends or ():
        if not agreed[backend]:
            raise AssertionError(f"backend {backend!r} refused every case: {refusal[backend]}")


# ---------------------------------------------------------------------------------------------------------------------
# One call of a rule as a value


@dataclass(frozen=True)
class _Case:
    """All that a rule is called with."""

    tensors: dict[str, Tensor]  # poses, weight, activations, vote_offset and what is learned, where there are such
    axes: dict[str, str]  # a letter for each leading axis of those: "N", "I", "J", or "." for others
    mask: Tensor | None = None
    child_ids: Tensor | None = None
    start: Any = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def but(self, **changes: Any) -> "_Case":
        """The same call with other arguments; None takes one away."""
        rest = {name: changes.pop(name) for name in ("mask", "child_ids", "start") if name in changes}
        tensors = {name: x for name, x in {**self.tensors, **changes}.items() if x is not None}
        return dataclasses.replace(self, tensors=tensors, **rest)

    def each(self, change: Callable[[Tensor], Tensor]) -> "_Case":
        """Every floating-point tensor of the call changed."""
        tensors = {name: change(x) for name, x in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors, start=_map(change, self.start))

    def to(self, dtype: torch.dtype) -> "_Case":
        return self.each(lambda x: x.to(dtype))

    def pick(self, **chosen: Sequence[int]) -> "_Case":
        """The call with these N, I or J alone, in this order."""
        size = {"N": self["poses"].shape[0], "I": self["poses"].shape[1], "J": self["weight"].shape[1]}

        def take(x: Tensor, letters: str) -> Tensor:
            for axis, letter in enumerate(letters):
                if letter in chosen and x.shape[axis] == size[letter]:  # else an axis of 1 that serves all
                    x = x.index_select(axis, torch.tensor(chosen[letter], device=x.device))
            return x

        tensors = {name: take(x, self.axes[name]) for name, x in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors, mask=None if self.mask is None else take(self.mask, "NI"))

    def leaves(self) -> dict[str, Tensor]:
        """Every tensor that has a gradient, by name."""
        return self.tensors | {f"start[{k}]": x for k, x in enumerate(_tensors(self.start))}

    def with_leaves(self, leaves: dict[str, Tensor]) -> "_Case":
        state = iter([x for name, x in leaves.items() if name not in self.tensors])
        tensors = {name: leaves[name] for name in self.tensors}
        return dataclasses.replace(self, tensors=tensors, start=_map(lambda _: next(state), self.start))

    def route(self, rule: Rule, return_coupling: Any = True, backend: Any = "auto") -> Routed:
        tensors: dict[str, Any] = dict(self.tensors)
        poses, weight, activations = tensors.pop("poses"), tensors.pop("weight"), tensors.pop("activations", None)
        return rule(
            poses,
            weight,
            activations,
            mask=self.mask,
            child_ids=self.child_ids,
            start=self.start,
            return_coupling=return_coupling,
            backend=backend,
            **tensors,
        )

    def coupling(self, rule: Rule, return_coupling: Any = True) -> Tensor:
        coupling = self.route(rule, return_coupling).coupling
        _fail_unless(isinstance(coupling, Tensor), f"return_coupling={return_coupling!r} gave {coupling!r}")
        assert coupling is not None
        return coupling.detach()


class _Trial:
    """A rule on trial: how to call it, and generic numbers to call it with."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        iterations = _setting(rule, "iterations")
        self.original = rule
        self.device = device
        self.has_rounds = isinstance(iterations, int)
        self.rounds: tuple[int | None, ...] = (1, 2, 3) if self.has_rounds else (None,)
        self.stops_gradients = _setting(rule, "detach") not in (None, "none")
        # one round hides most faults, many rounds only repeat them
        self.rule = self.with_rounds(min(max(iterations, 2), 3)) if self.has_rounds else rule

    def with_rounds(self, rounds: int | None) -> Rule:
        if rounds is None:
            return self.original
        if "iterations" in _fields(self.original):
            return dataclasses.replace(self.original, iterations=rounds)  # type: ignore[call-arg]
        rule = copy.copy(self.original)
        object.__setattr__(rule, "iterations", rounds)
        return rule

    def case(
        self,
        sizes: Sizes = SIZES,
        *,
        shared: bool = False,
        offset: str | None = "IJ",
        noise: float = 0.3,
        scale: float = 1.0,
    ) -> _Case:
        """Generic numbers: votes of about scale, an offset with these axes, what is learned a little off its start."""
        N, I, J, R, P, Q = sizes
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device)

        tensors = {"poses": scale * random(N, I, R, P), "weight": P**-0.5 * random(1 if shared else I, J, P, Q)}
        axes = {"poses": "NI", "weight": "IJ"}
        if self.rule.needs_activations:
            tensors["activations"], axes["activations"] = random(N, I).sigmoid(), "NI"
        if offset is not None:
            extent = {"N": N, "I": I, "J": J, "1": 1}
            tensors["vote_offset"] = 0.5 * scale * random(*(extent[letter] for letter in offset), R, Q)
            axes["vote_offset"] = ("N" if len(offset) == 3 else "") + "IJ"
        start, more_children = self.rule.learned(I, J, R, P, Q), self.rule.learned(I + 1, J, R, P, Q)
        more_parents = self.rule.learned(I, J + 1, R, P, Q)
        for name, x in start.items():
            tensors[name] = x.detach().to(self.device, torch.float64) + noise * random(*x.shape)
            grown = zip(x.shape, more_children[name].shape, more_parents[name].shape, strict=True)
            axes[name] = "".join(
                "I" if (n, i) == (I, I + 1) else "J" if (n, j) == (J, J + 1) else "." for n, i, j in grown
            )
        return _Case(tensors, axes)

    def mask(self, sizes: Sizes = SIZES) -> Tensor:
        """About two of three children take part, others in each example; the first always does, the last never."""
        mask = torch.rand(sizes[:2], generator=torch.Generator().manual_seed(1)) < 0.67
        mask[:, 0], mask[:, -1] = True, False
        return mask.to(self.device)


def _fields(rule: Rule) -> set[str]:
    return {field.name for field in dataclasses.fields(rule)} if dataclasses.is_dataclass(rule) else set()


def _setting(rule: Rule, name: str) -> Any:
    """What `rule` itself holds under a name, in a field of a dataclass or an attribute; None where it holds nothing."""
    return getattr(rule, name) if name in _fields(rule) else inspect.getattr_static(rule, name, None)


def _map(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state with its floating-point tensors changed: a tensor, a (named) tuple of such, or anything else as it is."""
    if isinstance(state, Tensor):
        return change(state) if state.is_floating_point() else state
    if isinstance(state, tuple):
        parts = [_map(change, part) for part in state]
        return tuple(parts) if type(state) is tuple else type(state)(*parts)
    return state


def _tensors(state: Any) -> list[Tensor]:
    """The floating-point tensors of a state, in order."""
    if isinstance(state, tuple):
        return [x for part in state for x in _tensors(part)]
    return [state] if isinstance(state, Tensor) and state.is_floating_point() else []


def _gradients(
    rule: Rule, case: _Case, backend: str = "auto", with_state: bool = False, return_coupling: Any = "all"
) -> tuple[Routed, dict[str, Tensor]]:
    """A call, and the gradient of all its outputs together in every leaf; 0 where there is none."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.leaves().items()}
    routed = case.with_leaves(leaves).route(rule, return_coupling, backend)
    total = _weigh(_outputs(routed) + (_tensors(routed.state) if with_state else []))
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = zip(leaves.items(), gradients, strict=True)
    return routed, {name: torch.zeros_like(x) if g is None else g for (name, x), g in found}


def _outputs(routed: Routed) -> list[Tensor]:
    return [routed.poses] if routed.activations is None else [routed.poses, routed.activations]


def _weigh(outputs: Sequence[Tensor]) -> Tensor:
    """One number that every output counts in, each in a way of its own."""
    total = outputs[0].new_zeros((), dtype=torch.float64)
    for k, x in enumerate(outputs):
        share = torch.cos(torch.arange(x.numel(), dtype=torch.float64, device=x.device) * 0.7 + k)
        total = total + (share * x.flatten().double()).sum()
    return total


def _example(routed: Routed, n: int) -> Routed:
    """One example of a batch."""
    poses, activations, coupling = (None if x is None else x[n : n + 1] for x in routed[:3])
    assert poses is not None
    return Routed(poses, activations, coupling, None)


def _all(rounds: int | None) -> str:
    return "all rounds" if rounds is None else "1 round" if rounds == 1 else f"{rounds} rounds"


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def _fail_unless(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _finite(x: Tensor, what: str) -> None:
    bad = int((~x.isfinite()).sum())
    _fail_unless(bad == 0, f"{what} {list(x.shape)} holds {bad} numbers that are not finite")


def _same(got: Tensor | None, want: Tensor | None, what: str, tolerance: float = EXACT) -> None:
    """Equal to `tolerance` of the largest value."""
    if got is None or want is None:
        _fail_unless(got is None and want is None, f"{what}: one is None, the other is not")
        return
    got, want = got.detach(), want.detach()
    _fail_unless(got.shape == want.shape, f"{what} {list(got.shape)} should be {list(want.shape)}")
    _finite(got, what)
    if want.numel():
        scale, off = float(want.abs().max()), float((got - want).abs().max())
        allowed = tolerance * scale
        _fail_unless(off <= allowed, f"{what} off by {off:.3g} of values up to {scale:.3g}; allowed is {allowed:.3g}")


def _same_routed(got: Routed, want: Routed, what: str, tolerance: float = EXACT) -> None:
    _same(got.poses, want.poses, f"{what}: poses", tolerance)
    _same(got.activations, want.activations, f"{what}: activations", tolerance)
    _same(got.coupling, want.coupling, f"{what}: coupling", tolerance)


def _rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# The promises


def _shapes_and_dtypes(trial: _Trial) -> None:
    for sizes in (SIZES, *ODD_SIZES):
        _check_outputs(trial, trial.case(sizes), sizes)
    for narrow in (torch.float32, torch.bfloat16, torch.float16):
        for wide in {narrow, torch.float32}:
            case = trial.case().to(narrow)
            _check_outputs(trial, case.but(weight=case["weight"].to(wide)), SIZES)


def _check_outputs(trial: _Trial, case: _Case, sizes: Sizes) -> None:
    N, I, J, R, _, Q = sizes
    routed, wide = case.route(trial.rule), case["weight"].dtype
    outputs = {"poses": (routed.poses, [N, J, R, Q]), "coupling": (routed.coupling, [N, I, J])}
    if routed.activations is not None:
        outputs["activations"] = (routed.activations, [N, J])
    for name, (x, shape) in outputs.items():
        what = f"poses of {case['poses'].dtype}, weight of {wide}: {name}"
        _fail_unless(isinstance(x, Tensor), f"{what} should be a tensor {shape}, not {x!r}")
        assert x is not None
        _fail_unless(list(x.shape) == shape, f"{what} {list(x.shape)} should be {shape}")
        _fail_unless(x.dtype == wide, f"{what} of {x.dtype} should be of {wide}")


def _pure(trial: _Trial) -> None:
    case = trial.case().but(mask=trial.mask())
    kept = case.each(Tensor.clone)
    first = case.route(trial.rule)
    for name, x in case.tensors.items():
        _fail_unless(torch.equal(x, kept[name]), f"the call wrote into {name}")
    _same_routed(case.route(trial.rule), first, "the second call")


def _errors(trial: _Trial) -> None:
    case = trial.case()
    calls: dict[str, Callable[[], object]] = {
        "a backend that does not exist": lambda: case.route(trial.rule, backend="no such backend"),
    }
    if trial.has_rounds:
        calls["iterations=0"] = lambda: case.route(trial.with_rounds(0))
        calls["iterations=-1"] = lambda: case.route(trial.with_rounds(-1))
    if trial.rule.needs_activations:
        calls["no activations"] = lambda: case.but(activations=None).route(trial.rule)
    for name, call in calls.items():
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"{name} went through")


def _shares(trial: _Trial) -> None:
    sums_to = trial.rule.sums_to
    _fail_unless(sums_to in ("parents", "children", None), f"sums_to={sums_to!r} is not 'parents', 'children' or None")
    for mask in (None, trial.mask()):
        case = trial.case(scale=2.0).but(mask=mask)
        there = torch.ones_like(trial.mask()).double() if mask is None else mask.double()
        for rounds in trial.rounds:
            coupling = case.coupling(trial.with_rounds(rounds))
            where = f"{'with' if mask is not None else 'without'} a mask, {_all(rounds)}: coupling"
            _fail_unless(bool((coupling >= 0).all()), f"{where} is as low as {float(coupling.min()):.3g}")
            _same(coupling * (1 - there)[:, :, None], torch.zeros_like(coupling), f"{where} of masked children")
            if sums_to == "parents":
                _same(coupling.sum(2), there, f"{where} summed over the parents of each child")
            elif sums_to == "children":
                _same(
                    coupling.sum(1), torch.ones_like(coupling[:, 0]), f"{where} summed over the children of each parent"
                )


def _uniform_first_round(trial: _Trial) -> None:
    if not trial.has_rounds:
        return
    for mask in (None, trial.mask()):
        case = trial.case(scale=2.0, noise=0.0).but(mask=mask)
        coupling = case.coupling(trial.with_rounds(1))
        there = torch.ones_like(trial.mask()).double() if mask is None else mask.double()
        share = coupling[:, :1, :1]  # the first child always takes part
        if trial.rule.sums_to == "parents":
            share = torch.full_like(share, 1 / coupling.shape[2])
        elif trial.rule.sums_to == "children":
            share = 1 / there.sum(1)[:, None, None]
        want = share * there[:, :, None].expand_as(coupling)
        _same(coupling, want, "coupling after one round", 4 * torch.finfo(torch.float64).eps)


def _every_coupling(trial: _Trial) -> None:
    case = trial.case().but(mask=trial.mask())
    for rounds in trial.rounds:
        rule = trial.with_rounds(rounds)
        every, last = case.coupling(rule, "all"), case.coupling(rule)
        unasked = case.route(rule, False).coupling
        _fail_unless(unasked is None, "a coupling came without return_coupling")
        T = len(every) if rounds is None else rounds
        _fail_unless(
            every.shape == (T, *last.shape),
            f'return_coupling="all" of {_all(rounds)} gave {list(every.shape)}: it should be {[T, *last.shape]}',
        )
        _same(every[-1], last, f'the last coupling of "all" and that of True, {_all(rounds)}')
        for t in range(1, rounds or 1):
            _same(every[t - 1], case.coupling(trial.with_rounds(t)), f"coupling {t} of {rounds}, and that of {_all(t)}")


def _further_rounds(trial: _Trial) -> None:
    if not trial.has_rounds:
        return
    case = trial.case()
    for t in (1, 2, 3):
        fewer, more = (case.route(trial.with_rounds(rounds)).poses for rounds in (t, t + 1))
        change, scale = _rms(more - fewer), _rms(fewer)
        _fail_unless(change > EXACT * scale, f"round {t + 1} moved poses of {scale:.3g} by {change:.3g} on average")


def _one_round_at_a_time(trial: _Trial) -> None:
    if not trial.has_rounds:
        return
    one = trial.with_rounds(1)
    for name, case in _plain_and_masked(trial):
        state = None
        for t in (1, 2, 3):
            step, at_once = case.but(start=state).route(one), case.route(trial.with_rounds(t))
            _same_routed(step, at_once, f"{_all(t)} through start=, and {_all(t)} at once{name}")
            state = step.state
        two = case.route(trial.with_rounds(2)).state
        _same_routed(case.but(start=two).route(one), at_once, f"two rounds and one through start=, and 3 at once{name}")


def _plain_and_masked(trial: _Trial) -> Iterator[tuple[str, _Case]]:
    yield "", trial.case()
    yield ", with a mask and an offset for each example", trial.case(offset="NIJ").but(mask=trial.mask())


def _order_of_children(trial: _Trial) -> None:
    order = [3, 0, 5, 1, 4, 2]
    for name, case in _plain_and_masked(trial):
        want, got = case.route(trial.rule), case.pick(I=order).route(trial.rule)
        assert want.coupling is not None
        _same_routed(got, want._replace(coupling=want.coupling[:, order]), f"children in another order{name}")


def _order_of_parents(trial: _Trial) -> None:
    order = [2, 0, 3, 1]
    for name, case in _plain_and_masked(trial):
        want, got = case.route(trial.rule), case.pick(J=order).route(trial.rule)
        assert want.coupling is not None
        activations = None if want.activations is None else want.activations[:, order]
        want = Routed(want.poses[:, order], activations, want.coupling[:, :, order], None)
        _same_routed(got, want, f"parents in another order{name}")


def _batch(trial: _Trial) -> None:
    louder = torch.tensor([1.0, 30.0, 1e3], device=trial.device)[:, None, None, None]
    beside_louder = trial.case().but(poses=trial.case()["poses"] * louder)
    single = ROUNDINGS * torch.finfo(torch.float32).eps
    for name, case in (*_plain_and_masked(trial), (", beside longer ones", beside_louder)):
        for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, single)):
            together = case.to(dtype).route(trial.rule)
            for n in range(1 if case is beside_louder else SIZES[0]):
                alone = case.to(dtype).pick(N=[n]).route(trial.rule)
                _same_routed(
                    alone, _example(together, n), f"example {n} alone and in a batch{name}, {dtype}", tolerance
                )


def _only_votes(trial: _Trial) -> None:
    case = trial.case((2, 4, 3, 2, 3, 3))  # P = Q, so that a transposed weight does not stumble over its shape
    turn = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 1.0, 0.5], [0.0, 0.5, 2.0]], dtype=torch.float64, device=trial.device)
    same_votes = case.but(poses=case["poses"] @ turn, weight=torch.linalg.solve(turn, case["weight"]))
    what = "poses x A with weights A^-1 W, and x with W, which give the same votes"
    _same_routed(same_votes.route(trial.rule), case.route(trial.rule), what)


def _shared_weight(trial: _Trial) -> None:
    case = trial.case(shared=True).but(mask=trial.mask())
    spread = case.but(weight=case["weight"].expand(SIZES[1], -1, -1, -1).contiguous())
    for rounds in trial.rounds:
        rule = trial.with_rounds(rounds)
        _same_routed(case.route(rule), spread.route(rule), f"a weight [1, J, P, Q], and its copies, {_all(rounds)}")


def _vote_offset(trial: _Trial) -> None:
    N, I, J, R, _, Q = SIZES
    for axes in ("IJ", "I1", "1J", "11", "NIJ", "1IJ", "N11"):
        case = trial.case(offset=axes)
        routed, given = case.route(trial.rule), case["vote_offset"]
        offset = given.expand(N, I, J, R, Q)
        # a pose longer by R columns, that are 1 in their own row, takes the offset from R more rows of weight
        rows = torch.eye(R, dtype=torch.float64, device=trial.device).expand(N, I, R, R)
        for n in range(N):
            longer = torch.cat([case["poses"], rows], 3), torch.cat([case["weight"], offset[n]], 2)
            moved = case.but(vote_offset=None, poses=longer[0], weight=longer[1])
            want = moved.pick(N=[n]).route(trial.rule)
            _same_routed(_example(routed, n), want, f"vote_offset {list(given.shape)}, and votes moved by it")


def _masked_content(trial: _Trial) -> None:
    mask = trial.mask()
    case = _hide(trial.case(offset="NIJ"), mask, 0.5, 0.5)
    hiding = _hide(case, mask, torch.nan, 1e3)
    for rounds in trial.rounds:
        want, want_gradients = _gradients(trial.with_rounds(rounds), case)
        got, gradients = _gradients(trial.with_rounds(rounds), hiding)
        what = f"NaN and 0.5 in masked children, {_all(rounds)}"
        _same_routed(got, want, what)
        for name, gradient in gradients.items():
            _same(gradient, want_gradients[name], f"{what}: gradient in {name}")
    everyone = trial.case().but(mask=torch.ones_like(mask))
    _same_routed(everyone.route(trial.rule), trial.case().route(trial.rule), "a mask that hides nobody, and no mask")


def _hide(case: _Case, mask: Tensor, content: float, offset: float | None = None) -> _Case:
    """The case under a mask, the poses and activations of masked children (and an offset of each vote) replaced."""
    changes = {"poses": case["poses"].masked_fill(~mask[:, :, None, None], content)}
    if "activations" in case.tensors:
        changes["activations"] = case["activations"].masked_fill(~mask, content)
    if offset is not None:
        changes["vote_offset"] = case["vote_offset"].masked_fill(~mask[:, :, None, None, None], offset)
    return case.but(mask=mask, **changes)


def _masked_is_left_out(trial: _Trial) -> None:
    mask = trial.mask()
    for name, case in (("", trial.case()), (", shared weight", trial.case(shared=True, offset="NIJ"))):
        together = case.but(mask=mask).route(trial.rule)
        for n in range(SIZES[0]):
            kept = mask[n].nonzero().flatten().tolist()
            got, want = _example(together, n), case.pick(N=[n], I=kept).route(trial.rule)
            assert got.coupling is not None
            got = got._replace(coupling=got.coupling[:, kept])
            _same_routed(got, want, f"example {n}: all but children {kept} masked, and left out{name}")


def _nobody_takes_part(trial: _Trial) -> None:
    for dtype in (torch.float64, torch.float32):
        for rounds in trial.rounds:
            case = _hide(trial.case(noise=0.0), torch.zeros_like(trial.mask()), torch.nan)
            _all_finite(trial, rounds, case.to(dtype), f"all children masked, {dtype}")


def _activations(trial: _Trial) -> None:
    case = trial.case()
    if not trial.rule.needs_activations:
        without = case.route(trial.rule)
        for activations in (0.1 + torch.arange(18.0).reshape(SIZES[:2]) / 20, torch.full(SIZES[:2], torch.nan)):
            case = dataclasses.replace(case, axes=case.axes | {"activations": "NI"})
            given = case.but(activations=activations.to(trial.device, torch.float64)).route(trial.rule)
            _same_routed(given, without, "activations given where none are needed, and none")
        return
    present = torch.ones_like(case["activations"])
    present[0, 2], present[1, :4] = 0, 0
    case = case.but(activations=case["activations"] * present)
    got, want = case.route(trial.rule), case.but(mask=present > 0).route(trial.rule)
    assert got.coupling is not None
    got = got._replace(coupling=got.coupling * present[:, :, None])
    _same_routed(got, want, "children of activation 0, and the same children masked")
    fainter = case["activations"].clone()
    fainter[:, -1] *= 0.2
    for rounds in trial.rounds:
        rule = trial.with_rounds(rounds)
        poses = case.route(rule).poses
        change, scale = _rms(case.but(activations=fainter).route(rule).poses - poses), _rms(poses)
        what = f"a child with a fifth of its activation moved poses of {scale:.3g} by {change:.3g}, {_all(rounds)}"
        _fail_unless(change > 1e-6 * scale, what)


def _gradients_are_right(trial: _Trial) -> None:
    if trial.stops_gradients:
        return
    sizes = (2, 4, 3, 2, 3, 2)
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]], device=trial.device)
    case, masked = trial.case(sizes), trial.case(sizes, shared=True, offset="NI1").but(mask=mask)
    for rounds in trial.rounds:
        _check_gradients(trial.with_rounds(rounds), case, _all(rounds))
        _check_gradients(trial.with_rounds(rounds), masked, f"{_all(rounds)}, shared weight and mask")
    if trial.has_rounds:
        one = trial.with_rounds(1)
        _check_gradients(one, case.but(start=_map(Tensor.detach, case.route(one).state)), "1 round from a start")


def _check_gradients(rule: Rule, case: _Case, where: str) -> None:
    """The gradient along a random direction through all leaves, against a difference of fourth order."""
    _, gradients = _gradients(rule, case)
    generator, leaves = torch.Generator().manual_seed(3), case.leaves()
    ways = {name: torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for name, x in leaves.items()}
    size = max(1e-3, *(float(gradient.norm()) for gradient in gradients.values()))

    def off(names: Collection[str]) -> tuple[bool, str]:
        value = []
        for step in (2e-4, 1e-4, -1e-4, -2e-4):
            moved = case.with_leaves({name: x + step * ways[name] * (name in names) for name, x in leaves.items()})
            value.append(float(_weigh(_outputs(moved.route(rule)))))
        far, near = (value[0] - value[3]) / 4e-4, (value[1] - value[2]) / 2e-4
        difference, slope = near + (near - far) / 3, sum(float((gradients[n] * ways[n]).sum()) for n in names)
        told = (
            f"the gradient in {', '.join(names)} gives a slope of {slope:.8g}, finite differences give {difference:.8g}"
        )
        return not abs(difference - slope) <= 1e-6 * max(abs(difference), size), f"{where}: {told}"

    if off(leaves)[0]:  # then look which of them it is
        for name in leaves:
            wrong, told = off([name])
            _fail_unless(not wrong, told)
        _fail_unless(False, off(leaves)[1])


def _gradients_reach_everything(trial: _Trial) -> None:
    for rounds in trial.rounds:
        _, gradients = _gradients(trial.with_rounds(rounds), trial.case())
        for name, gradient in gradients.items():
            if name in ("poses", "weight", "vote_offset") or not trial.stops_gradients:
                largest = float(gradient.abs().max())
                _fail_unless(largest > 0, f"{_all(rounds)}: the gradient in {name} is at most {largest:.3g}")


def _extremes(trial: _Trial) -> None:
    for dtype, numbers in ((torch.float32, trial.rounds), (torch.float64, trial.rounds[-1:])):
        case = trial.case(noise=0.0, offset=None).to(dtype)
        poses, weight = case["poses"], case["weight"]
        cases = {
            "poses all 0": case.but(poses=poses * 0),
            "weights all 0": case.but(weight=weight * 0),
            "poses and weights all 0": case.but(poses=poses * 0, weight=weight * 0),
            "children all alike": case.but(poses=poses[:, :1].expand_as(poses), weight=weight[:1].expand_as(weight)),
            "votes all alike": case.but(poses=poses[:, :1].expand_as(poses), weight=weight[:1, :1].expand_as(weight)),
            "votes times 1e3": case.but(poses=poses * 1e3),
            "votes times 1e-30": case.but(poses=poses * 1e-30),
        }
        if trial.rule.needs_activations:
            cases["activations all 0"] = case.but(activations=case["activations"] * 0)
            cases["activations all 1"] = case.but(activations=torch.ones_like(case["activations"]))
        for sizes in ODD_SIZES:
            cases[f"(N, I, J, R, P, Q) = {sizes}"] = trial.case(sizes).to(dtype)
        for name, extreme in cases.items():
            for rounds in numbers:
                _all_finite(trial, rounds, extreme, f"{name}, {dtype}")


def _all_finite(trial: _Trial, rounds: int | None, case: _Case, where: str) -> None:
    routed, gradients = _gradients(trial.with_rounds(rounds), case)
    found = {"poses": routed.poses, "activations": routed.activations, "coupling": routed.coupling}
    for name, x in (found | {f"gradient in {name}": gradient for name, gradient in gradients.items()}).items():
        if x is not None:
            _finite(x, f"{where}, {_all(rounds)}: {name}")


def _strides(trial: _Trial) -> None:
    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    case = trial.case().but(mask=trial.mask())
    for what, change in (("with gaps between their numbers", strided), ("with their axes the other way round", turned)):
        other = case.each(change).but(mask=change(trial.mask()))
        _same_routed(other.route(trial.rule), case.route(trial.rule), f"tensors {what} in memory, and contiguous ones")


def _precision(trial: _Trial) -> None:
    case = trial.case((4, 24, 4, 2, 4, 5), scale=2.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = case.to(dtype)
        want, (got, gradients) = low.to(torch.float64).route(trial.rule), _gradients(trial.rule, low)
        for name, exact, x in (("poses", want.poses, got.poses), ("activations", want.activations, got.activations)):
            if exact is None or x is None:
                continue
            _finite(x, f"{name} of {dtype}")
            rounding, off = _rms(exact.to(dtype).double() - exact), _rms(x.double() - exact)
            allowed = 2 * rounding + ROUNDINGS * torch.finfo(torch.float32).eps * _rms(exact)
            _fail_unless(
                off <= allowed,
                f"{name} of {dtype} are off by {off:.3g} on average, rounding alone costs {rounding:.3g}; "
                f"allowed is {allowed:.3g}",
            )
        for name, gradient in gradients.items():
            _finite(gradient, f"{dtype}: gradient in {name}")
        loud = trial.case(scale=200.0, offset=None).to(dtype)  # squares of these are more than float16 can hold
        for x in _outputs(loud.route(trial.rule)):
            _finite(x, f"votes of some hundred in {dtype}: outputs")


def _windows(trial: _Trial) -> None:
    if trial.rule.sums_to == "children":
        return  # there parents do not compete
    sizes = (4, 3, 2, 2, 3, 2)  # two examples of two windows of three children
    case = trial.case(sizes, offset="NIJ")
    overlapping = torch.tensor([[0, 1, 2], [1, 2, 3]], device=trial.device)
    try:
        coupling = case.but(child_ids=overlapping).coupling(trial.rule)
    except ValueError:
        return  # the rule says that it has no such competition
    apart = case.but(child_ids=torch.tensor([[0, 1, 2], [3, 4, 5]], device=trial.device))
    _same_routed(apart.route(trial.rule), case.route(trial.rule), "windows that share no child, and no child_ids")
    if trial.rule.sums_to == "parents":
        shares = coupling.sum(2).reshape(2, 2, 3)  # [examples, windows, I]
        twice = shares[:, 0, 1:] + shares[:, 1, :2]
        what = "shares of a child over the parents of"
        _same(twice, torch.ones_like(twice), f"{what} both windows that see it")
        _same(shares[:, [0, 1], [0, 2]], torch.ones_like(twice), f"{what} the one window that sees it")
    if not trial.stops_gradients:
        _check_gradients(trial.rule, case.but(child_ids=overlapping), "windows that share children")
    if trial.rule.sums_to == "parents" and trial.has_rounds:
        first = trial.case(sizes, noise=0.0).but(child_ids=overlapping).coupling(trial.with_rounds(1))
        want = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64, device=trial.device)
        _same(first, want.repeat(2, 1)[:, :, None].expand(4, 3, 2), "first coupling of windows that share children")


PROMISES: dict[str, Callable[[_Trial], None]] = {
    "poses are [N, J, R, Q], of the dtype of poses and weight together": _shapes_and_dtypes,
    "the same call gives the same answer and leaves its arguments alone": _pure,
    "what cannot be done is a ValueError": _errors,
    "coupling is shared out as sums_to says": _shares,
    "the first round from nothing is uniform": _uniform_first_round,
    "the coupling of every round can be asked for": _every_coupling,
    "each further round changes the result": _further_rounds,
    "rounds can be run one at a time": _one_round_at_a_time,
    "the order of the children does not matter": _order_of_children,
    "the order of the parents is kept": _order_of_parents,
    "an example does not depend on its batch": _batch,
    "only the votes speak": _only_votes,
    "a shared weight is the same for every child": _shared_weight,
    "a vote offset is added to the votes": _vote_offset,
    "zeros, equal votes and long votes have finite values and gradients": _extremes,
    "what a masked child holds changes nothing": _masked_content,
    "a masked child is a child left out": _masked_is_left_out,
    "no child at all has a finite answer": _nobody_takes_part,
    "activations count where they are needed, and nowhere else": _activations,
    "gradients are those of the values": _gradients_are_right,
    "gradients reach every input in every number of rounds": _gradients_reach_everything,
    "strides do not matter": _strides,
    "lower precision loses no more than rounding does": _precision,
    "windows that share a child compete for it": _windows,
}
"""Every promise by its name: what `except_for` takes and what an AssertionError starts with."""


# ---------------------------------------------------------------------------------------------------------------------
# Parity of backends


def _parity_cases(trial: _Trial, sizes: Sizes) -> Iterator[tuple[str, int | None, _Case]]:
    """(name, rounds, case): everything that a call can bring."""
    N, I = sizes[:2]
    first, *_, most = trial.rounds if trial.has_rounds else (None, None)
    mask = trial.mask(sizes)
    mask[0] = False  # an example of which nobody takes part
    yield "nothing else", first, trial.case(sizes, offset=None)
    yield "nothing else", most, trial.case(sizes, offset=None)
    yield "offset [I, J, R, Q]", most, trial.case(sizes)
    yield "shared weight, offset [N, 1, J, R, Q]", most, trial.case(sizes, shared=True, offset="N1J")
    yield "mask over NaN, offset [I, 1, R, Q]", most, _hide(trial.case(sizes, offset="I1"), mask, torch.nan)
    yield "mask over NaN, shared weight", most, _hide(trial.case(sizes, shared=True, offset=None), mask, torch.nan)
    if trial.has_rounds:
        case = trial.case(sizes, offset="11")
        state = case.route(trial.with_rounds(1), backend="reference").state
        yield "a start", 1, case.but(start=_map(Tensor.detach, state))
    if trial.rule.sums_to != "children":
        ids = torch.arange(N * I, device=trial.device).reshape(N, I) % max(I, N * I // 2)
        case = trial.case(sizes).but(child_ids=ids)
        try:
            case.route(trial.rule, backend="reference")
        except ValueError:
            return  # the rule has no such competition
        yield "windows that share children", most, case


def _everything(rule: Rule, case: _Case, backend: str) -> dict[str, Tensor]:
    """All values of a call, with and without a graph, and the gradients in every leaf.

    "auto" may take another backend where coupling is wanted, so most is asked for without; and a backend that was named
    may refuse to show it.
    """
    routed, gradients = _gradients(rule, case, backend, with_state=True, return_coupling=False)
    with torch.no_grad():
        try:
            alone = case.route(rule, "all", backend)
        except ValueError:
            if backend == "auto":
                raise
            alone = case.route(rule, False, backend)._replace(coupling=torch.empty(0))
    found: dict[str, Tensor] = {}
    for graph, answer in (("", routed), (" without a graph", alone)):
        values = {"poses": answer.poses, "activations": answer.activations, "coupling": answer.coupling}
        values |= {f"state[{k}]": x for k, x in enumerate(_tensors(answer.state))}
        found |= {name + graph: x.detach() for name, x in values.items() if x is not None}
    return found | {f"gradient in {name}": gradient for name, gradient in gradients.items()}


def _nudged(case: _Case) -> list[_Case]:
    """The case, and three more in float32 whose numbers are moved by their last bit.

    How far rounding carries depends on the case, and for a single small one on luck: what the reference errs by is the
    most it does on any of these.
    """
    generator = torch.Generator().manual_seed(4)
    cases = [case]
    for _ in range(3 if case.leaves()["poses"].dtype == torch.float32 else 0):
        moved = {
            name: x * (1 + torch.finfo(x.dtype).eps * (torch.rand(x.shape, generator=generator).to(x) * 2 - 1))
            for name, x in case.leaves().items()
        }
        cases.append(case.with_leaves(moved))
    return cases


def _compare(got: dict[str, Tensor], exact: dict[str, Tensor], own: list[dict[str, Tensor]], where: str) -> None:
    """Everything that a backend gave against the reference in float64, and against what the reference gives itself."""
    of = own[0] if own else exact
    _fail_unless(set(got) == set(of), f"{where}: gave {sorted(got)}, the reference gives {sorted(of)}")
    for name, want in exact.items():
        x = got[name]
        if name == "coupling without a graph" and not x.numel():  # refused, in words
            continue
        _fail_unless(x.shape == want.shape, f"{where}: {name} {list(x.shape)} should be {list(want.shape)}")
        _fail_unless(x.dtype == of[name].dtype, f"{where}: {name} of {x.dtype} should be of {of[name].dtype}")
        _finite(x, f"{where}: {name}")
        scale = _rms(want)
        if x.dtype == torch.float64:
            off, allowed = (x - want).abs(), EXACT * (want.abs() + scale)
            worst = f"off by up to {float(off.max()) if off.numel() else 0.0:.3g} of values of {scale:.3g} on average"
            _fail_unless(bool((off <= allowed).all()), f"{where}: {name} {worst}")
        else:
            error, reference = _rms(x.double() - want), max(_rms(o[name].double() - want) for o in own)
            allowed_error = 2 * reference + 4 * torch.finfo(x.dtype).eps * scale
            worst = f"off by {error:.3g} on average, the reference by {reference:.3g}; allowed is {allowed_error:.3g}"
            _fail_unless(error <= allowed_error, f"{where}: {name} {worst}")
