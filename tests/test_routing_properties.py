"""What holds for every routing rule whatever the numbers are, and what holds for one of them alone.

Hypothesis draws the rule, its options, the sizes, and whether there are a mask, an offset and a shared weight; the
numbers come from a seed. float64 unless a test is about something else.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from torchcaps import squash
from torchcaps.routing import (
    EM,
    Attention,
    Dynamic,
    EMState,
    Routed,
    Rule,
    attention,
    combine,
    combine_transposed,
    dynamic,
    em,
)
from torchcaps.squash import KINDS

F64 = torch.float64
BOUNDED = [kind for kind in KINDS if kind != "identity"]


@dataclass(frozen=True)
class Call:
    """A rule and everything that it is called with."""

    rule: Rule
    poses: Tensor
    weight: Tensor
    rest: dict[str, Any]  # activations, vote_offset, mask and what is learned

    def __call__(self, **changes: Any) -> Routed:
        given = {"poses": self.poses, "weight": self.weight, "return_coupling": True, **self.rest, **changes}
        return self.rule(**given)

    def but(self, **changes: Any) -> "Call":
        """Other tensors, or other settings of the rule."""
        names = {field.name for field in dataclasses.fields(self.rule)}
        rule = dataclasses.replace(self.rule, **{k: v for k, v in changes.items() if k in names})
        tensors = {k: v for k, v in changes.items() if k not in names}
        poses, weight = tensors.pop("poses", self.poses), tensors.pop("weight", self.weight)
        return Call(rule, poses, weight, {**self.rest, **tensors})

    def to(self, dtype: torch.dtype) -> "Call":
        rest = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.rest.items()}
        return Call(self.rule, self.poses.to(dtype), self.weight.to(dtype), rest)

    def leaves(self) -> dict[str, Tensor]:
        found = {"poses": self.poses, "weight": self.weight, **self.rest}
        return {k: v for k, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of a sum over all outputs, each in a weight of its own."""
        leaves = {k: v.detach().clone().requires_grad_() for k, v in self.leaves().items()}
        routed = self.but(**leaves)()
        total = sum(
            (x * torch.linspace(-1, 1, x.numel(), dtype=F64).reshape(x.shape).to(x.dtype)).sum()
            for x in (routed.poses, routed.activations)
            if x is not None
        )
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), found, strict=True)}


dynamics = st.builds(
    Dynamic,
    iterations=st.integers(1, 3),
    accumulate=st.booleans(),
    agreement=st.sampled_from(["dot", "cosine"]),
    normalize=st.sampled_from(["parents", "children"]),
    squash=st.sampled_from(KINDS),
    inner_squash=st.sampled_from([None, *BOUNDED]),
    leaky=st.just(False),
    detach=st.sampled_from(["none", "none", "all_but_last", "coupling"]),
    learn_prior=st.booleans(),
    learn_bias=st.booleans(),
)
leaky_dynamics = st.builds(
    Dynamic,
    iterations=st.integers(1, 3),
    accumulate=st.booleans(),
    squash=st.sampled_from(BOUNDED),
    leaky=st.just(True),
    learn_prior=st.booleans(),
    learn_bias=st.booleans(),
)
attentions = st.builds(
    Attention, iterations=st.integers(1, 3), scale=st.sampled_from([None, 1.0]), norm=st.booleans(), eps=st.just(1e-5)
)
ems = st.builds(
    EM,
    iterations=st.integers(1, 3),
    final_lambda=st.sampled_from([0.01, 0.5]),
    min_variance=st.sampled_from([1e-4, 1e-2]),
)
presets = st.sampled_from(
    [
        Dynamic.sabour(), Dynamic.sabour_code(), Dynamic.sabour_code(leaky=True), Dynamic.su(), Dynamic.su_first(),
        Dynamic.hauser(), Dynamic.hauser(normalize="parents"), Attention.tsai(), EM.hinton(),
    ]
)  # fmt: skip
rules = st.one_of(presets, dynamics, leaky_dynamics, attentions, ems)


@st.composite
def calls(
    draw: Any, rules: st.SearchStrategy[Rule] = rules, masks: bool | None = None, children: int = 1, parents: int = 1
) -> Call:
    """A call with generic numbers; `masks` None: sometimes with one; `children`, `parents`: at least so many."""
    rule = draw(rules)
    N, I, J = draw(st.integers(1, 3)), draw(st.integers(children, 7)), draw(st.integers(parents, 5))
    R, P = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    Q = draw(st.one_of(st.just(P), st.integers(1, 4)))  # often a square weight, which can be transposed unseen
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    poses, weight = random(N, I, R, P), random(1 if draw(st.booleans()) else I, J, P, Q) / P**0.5
    rest: dict[str, Any] = {k: v.to(F64) + 0.3 * random(*v.shape) for k, v in rule.learned(I, J, R, P, Q).items()}
    if rule.needs_activations:
        rest["activations"] = random(N, I).sigmoid()
    offset = draw(st.sampled_from([None, (I, J), (1, 1), (N, I, 1), (N, 1, J)]))
    if offset is not None:
        rest["vote_offset"] = 0.5 * random(*offset, R, Q)
    if masks if masks is not None else draw(st.booleans()):
        rest["mask"] = torch.rand(N, I, generator=generator) < 0.6
    return Call(rule, poses, weight, rest)


def same(got: Tensor | None, want: Tensor | None, rtol: float = 1e-9) -> None:
    """Equal to `rtol` of the largest value."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert got.shape == want.shape
        assert bool(got.isfinite().all())
        assert (got - want).abs().max().item() <= rtol * want.abs().max().item()


def same_routed(got: Routed, want: Routed, rtol: float = 1e-9) -> None:
    for g, w in zip(got[:3], want[:3], strict=True):
        same(g, w, rtol)


def finite(call: Call) -> None:
    """Values and gradients."""
    routed = call()
    for x in (routed.poses, routed.activations, routed.coupling, *call.gradients().values()):
        assert x is None or bool(x.isfinite().all())


def pick(x: Tensor, axis: int, order: Tensor, size: int) -> Tensor:
    """`x` in another order along an axis, unless that axis is of size 1 and serves all."""
    return x.index_select(axis, order) if x.shape[axis] == size else x


# ---------------------------------------------------------------------------------------------------------------------
# Order, batch, shares


@given(call=calls(), seed=st.integers(0, 10**6))
def test_the_order_of_children_does_not_matter(call: Call, seed: int) -> None:
    I = call.poses.shape[1]
    order = torch.randperm(I, generator=torch.Generator().manual_seed(seed))
    changes = {"poses": call.poses[:, order], "weight": pick(call.weight, 0, order, I)}
    for name, axis in (("activations", 1), ("mask", 1), ("prior", 0), ("vote_offset", -4)):
        if name in call.rest:
            changes[name] = pick(call.rest[name], axis, order, I)
    want = call()
    assert want.coupling is not None
    same_routed(call(**changes), want._replace(coupling=want.coupling[:, order]))


@given(call=calls(), seed=st.integers(0, 10**6))
def test_the_order_of_parents_is_kept(call: Call, seed: int) -> None:
    J = call.weight.shape[1]
    order = torch.randperm(J, generator=torch.Generator().manual_seed(seed))
    changes = {"weight": call.weight[:, order]}
    for name, axis in (("prior", 1), ("bias", 0), ("beta_a", 0), ("beta_u", 0), ("vote_offset", -3)):
        if name in call.rest:
            changes[name] = pick(call.rest[name], axis, order, J)
    want = call()
    assert want.coupling is not None
    activations = None if want.activations is None else want.activations[:, order]
    same_routed(call(**changes), Routed(want.poses[:, order], activations, want.coupling[:, :, order], None))


def example(call: Call, n: int) -> Call:
    """One example of the batch alone."""
    changes = {"poses": call.poses[n : n + 1]}
    for name in ("activations", "mask"):
        if name in call.rest:
            changes[name] = call.rest[name][n : n + 1]
    if "vote_offset" in call.rest and call.rest["vote_offset"].dim() == 5:
        changes["vote_offset"] = call.rest["vote_offset"][n : n + 1]
    return call.but(**changes)


@given(call=calls())
def test_an_example_does_not_depend_on_its_batch(call: Call) -> None:
    together, exactly = call.to(torch.float32)(), call.to(torch.float32).to(F64)()
    for n in range(len(call.poses)):
        alone = example(call.to(torch.float32), n)()
        for one, batch, exact in zip(alone[:3], together[:3], exactly[:3], strict=True):
            if one is None or batch is None or exact is None:
                continue
            rounding = (batch - exact).double().square().mean().sqrt() + 4 * 2**-23 * exact.abs().max()
            assert float((one[0] - batch[n]).abs().max()) <= 8 * float(rounding)


@given(call=calls())
def test_an_example_does_not_see_a_nan_beside_it(call: Call) -> None:
    beside = call.poses.clone()
    beside[1:] = torch.nan
    same_routed(Routed(*(x if x is None else x[:1] for x in call(poses=beside)[:3]), None), example(call, 0)())


@given(call=calls())
def test_shares_sum_as_the_rule_says(call: Call) -> None:
    every = call(return_coupling="all").coupling
    assert every is not None
    assert every.shape == (call.rule.iterations, *call.poses.shape[:2], call.weight.shape[1])
    mask = call.rest.get("mask", torch.ones(call.poses.shape[:2], dtype=torch.bool))
    assert bool((every >= 0).all())
    assert not bool((every * ~mask[:, :, None]).any())
    if call.rule.sums_to == "parents":
        torch.testing.assert_close(every.sum(3), mask.to(F64).expand(every.shape[:3]), rtol=1e-12, atol=0)
    elif call.rule.sums_to == "children":
        shared_out = mask.any(1).to(F64)[:, None].expand(-1, every.shape[3]).expand(len(every), -1, -1)
        torch.testing.assert_close(every.sum(2), shared_out, rtol=1e-12, atol=0)
    else:
        assert bool((every.sum(3) < 1).all())


@given(call=calls(st.one_of(dynamics, attentions, ems)))
def test_the_first_round_from_nothing_is_uniform_to_the_last_bit(call: Call) -> None:
    call = call.but(iterations=1)
    call.rest.pop("prior", None)
    coupling = call().coupling
    assert coupling is not None
    mask = call.rest.get("mask", torch.ones(call.poses.shape[:2], dtype=torch.bool))
    among = mask.sum(1) if call.rule.sums_to == "children" else torch.full((len(mask),), coupling.shape[2])
    want = torch.where(mask, (1 / among.to(F64))[:, None], 0.0)
    assert torch.equal(coupling, want[:, :, None].expand_as(coupling))


@given(call=calls(masks=False, children=2, parents=2))
def test_each_further_round_changes_the_result(call: Call) -> None:
    # a pose of one number is only a sign to normalize, and one of two to LayerNorm: nothing for a round to change
    assume(call.poses.shape[2] * call.weight.shape[3] > 2)
    call = call.but(poses=call.poses / 3)  # long votes decide in one round
    for rounds in (1, 2, 3):
        fewer, more = (call.but(iterations=t)().poses for t in (rounds, rounds + 1))
        assert float((more - fewer).abs().max()) > 1e-9 * float(fewer.abs().max())


@given(call=calls(), rounds=st.integers(2, 4))
def test_rounds_run_one_at_a_time_give_what_they_give_at_once(call: Call, rounds: int) -> None:
    state = None
    for _ in range(rounds):
        step = call.but(iterations=1)(start=state)
        state = step.state
    same_routed(step, call.but(iterations=rounds)())


@given(call=calls())
def test_a_start_that_was_stored_in_lower_precision_is_taken_up(call: Call) -> None:
    state = call.but(iterations=1)().state
    low = EMState(*(x.float() for x in state[:3]), state[3]) if isinstance(state, EMState) else state.float()
    same_routed(call(start=low), call(start=state), rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Masks and activations


@given(call=calls(masks=True))
def test_what_masked_children_hold_changes_neither_values_nor_gradients(call: Call) -> None:
    mask = call.rest["mask"]
    hiding = {"poses": call.poses.masked_fill(~mask[:, :, None, None], torch.nan)}
    if "activations" in call.rest:
        hiding["activations"] = call.rest["activations"].masked_fill(~mask, torch.nan)
    offset = call.rest.get("vote_offset")
    if offset is not None and offset.shape[:-3] == mask.shape:
        hiding["vote_offset"] = offset.masked_fill(~mask[:, :, None, None, None], torch.nan)
    same_routed(call(**hiding), call())
    gradients, want = call.but(**hiding).gradients(), call.gradients()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, want[name])
    assert not bool(gradients["poses"][~mask].any())


@given(call=calls(dynamics.map(lambda rule: dataclasses.replace(rule, normalize="children")), masks=True))
def test_masked_children_leave_their_share_of_a_parent_to_the_others(call: Call) -> None:
    coupling, somebody = call().coupling, call.rest["mask"].any(1)
    assert coupling is not None
    torch.testing.assert_close(coupling.sum(1), somebody.to(F64)[:, None].expand_as(coupling[:, 0]), rtol=1e-12, atol=0)


@given(call=calls(masks=True))
def test_a_masked_child_is_a_child_left_out(call: Call) -> None:
    for n in range(len(call.poses)):
        one = example(call, n)
        mask, I = one.rest["mask"][0], one.poses.shape[1]
        kept = mask.nonzero().flatten()
        if not len(kept):
            continue
        changes: dict[str, Any] = {"mask": None, "poses": one.poses[:, kept], "weight": pick(one.weight, 0, kept, I)}
        for name, axis in (("activations", 1), ("prior", 0), ("vote_offset", -4)):
            if name in one.rest:
                changes[name] = pick(one.rest[name], axis, kept, I)
        got, want = one(), one(**changes)
        assert got.coupling is not None
        same_routed(got._replace(coupling=got.coupling[:, kept]), want)


@given(call=calls(masks=True), dtype=st.sampled_from([torch.float32, F64]))
def test_no_child_at_all_has_a_finite_answer(call: Call, dtype: torch.dtype) -> None:
    nobody = {"mask": torch.zeros_like(call.rest["mask"]), "poses": torch.full_like(call.poses, torch.nan)}
    finite(call.but(**nobody).to(dtype))


@given(call=calls(ems, masks=False, children=2), seed=st.integers(0, 10**6))
def test_a_child_of_activation_zero_is_no_child(call: Call, seed: int) -> None:
    present = torch.rand(call.poses.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.6
    activations = call.rest["activations"] * present
    got, want = call(activations=activations), call(mask=present)
    assert got.coupling is not None
    same_routed(got._replace(coupling=got.coupling * present[:, :, None]), want)
    assert not bool(call.but(activations=activations).gradients()["poses"][~present].any())


@given(call=calls(st.one_of(dynamics, leaky_dynamics, attentions)), value=st.sampled_from([0.0, 0.5, math.nan]))
def test_activations_are_ignored_where_a_poses_length_speaks(call: Call, value: float) -> None:
    same_routed(call(activations=torch.full(call.poses.shape[:2], value, dtype=F64)), call(), rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients

EXACT = [
    Dynamic.sabour(),
    Dynamic(leaky=True, learn_prior=True, learn_bias=True),
    Dynamic(accumulate=False, inner_squash="normalize", squash="tanh"),
    Dynamic(agreement="cosine", normalize="children", learn_prior=True, squash="exp"),
    Attention.tsai(),
    Attention(iterations=3, norm=False),
    EM.hinton(),
    EM(final_lambda=0.5, min_variance=1e-2),
]


@pytest.mark.parametrize("rule", EXACT, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_of_finite_differences(rule: Rule, shared: bool) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64)

    rest = {name: x.to(F64) + 0.3 * random(*x.shape) for name, x in rule.learned(4, 3, 2, 2, 2).items()}
    rest["vote_offset"] = random(2, 1, 3, 2, 2)
    if rule.needs_activations:
        rest["activations"] = random(2, 4).sigmoid()
    call = Call(rule, random(2, 4, 2, 2), random(1 if shared else 4, 3, 2, 2), rest)
    names, leaves = zip(*call.leaves().items(), strict=True)
    mask = torch.tensor([[True, True, False, True], [True, True, True, False]])

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        routed = call(**dict(zip(names, values, strict=True)), mask=mask)
        return tuple(x for x in routed[:3] if x is not None)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in leaves], fast_mode=True)
    if shared:
        assert torch.autograd.gradgradcheck(outputs, leaves, fast_mode=True)


@given(call=calls(st.one_of(dynamics, leaky_dynamics, attentions, ems), masks=False, children=2, parents=2))
def test_gradients_reach_every_input_in_every_number_of_rounds(call: Call) -> None:
    assume(call.poses.shape[2] * call.weight.shape[3] > 2)
    constant = getattr(call.rule, "detach", "none") == "coupling"
    for name, gradient in call.gradients().items():
        if name == "prior" and constant:
            continue
        assert float(gradient.abs().max()) > 0, name


@given(call=calls(dynamics))
def test_stopped_gradients_are_those_of_a_sum_with_given_shares(call: Call) -> None:
    call = call.but(detach="coupling")
    kind = call.rule.squash
    coupling = call().coupling
    assert coupling is not None

    def by_hand(poses: Tensor, weight: Tensor, vote_offset: Tensor | None, bias: Tensor | None) -> Tensor:
        s = combine(poses, weight, coupling.detach(), vote_offset)
        return squash(s if bias is None else s + bias, kind)

    leaves = {k: v.clone().requires_grad_() for k, v in call.leaves().items() if k != "prior"}
    poses, weight = leaves["poses"], leaves["weight"]
    want = by_hand(poses, weight, leaves.get("vote_offset"), leaves.get("bias"))
    got = call(**leaves).poses
    same(got, want)
    share = torch.randn_like(got)
    for g, w in zip(*(torch.autograd.grad((x * share).sum(), list(leaves.values())) for x in (got, want)), strict=True):
        same(g, w)
    assert not bool(call.gradients().get("prior", torch.zeros(1)).any())


@given(call=calls(dynamics), rounds=st.integers(2, 3))
def test_all_but_last_leaves_a_gradient_to_the_last_sum_and_the_prior(call: Call, rounds: int) -> None:
    call = call.but(detach="all_but_last", iterations=rounds)
    I, J = call.poses.shape[1], call.weight.shape[1]
    call.rest.setdefault("prior", torch.randn(I, J, dtype=F64))
    over = 2 if call.rule.sums_to == "parents" else 1
    coupling, rule = call().coupling, call.rule
    assert coupling is not None
    leaves = {k: v.clone().requires_grad_() for k, v in call.leaves().items()}
    logits = (coupling.clamp(min=1e-300).log() - leaves["prior"].detach()).detach() + leaves["prior"]
    shares = logits.softmax(over)
    if "mask" in call.rest:
        shares = logits.masked_fill(~call.rest["mask"][:, :, None], -1e30).softmax(over) * call.rest["mask"][:, :, None]
    s = combine(leaves["poses"], leaves["weight"], shares, None)
    if "vote_offset" in leaves:
        s = s + (shares[..., None, None] * leaves["vote_offset"]).sum(1)
    want = squash(s + leaves["bias"] if "bias" in leaves else s, rule.squash)
    got = call(**leaves).poses
    same(got, want)
    share = torch.randn_like(got)
    for g, w in zip(*(torch.autograd.grad((x * share).sum(), list(leaves.values())) for x in (got, want)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers at the edge


@given(call=calls(), dtype=st.sampled_from([torch.float32, F64]), zero=st.sampled_from(["poses", "weight", "both"]))
def test_zeros_have_finite_values_and_gradients(call: Call, dtype: torch.dtype, zero: str) -> None:
    changes = {"poses": call.poses * (zero == "weight"), "weight": call.weight * (zero == "poses")}
    for name in ("vote_offset", "bias", "prior", "activations"):
        if name in call.rest:
            changes[name] = torch.zeros_like(call.rest[name])
    finite(call.but(**changes).to(dtype))


@given(call=calls(), dtype=st.sampled_from([torch.float32, F64]), scale=st.sampled_from([1e3, 1e-3, 1e-30]))
def test_long_and_short_votes_have_finite_values_and_gradients(call: Call, dtype: torch.dtype, scale: float) -> None:
    offset = {"vote_offset": call.rest["vote_offset"] * scale} if "vote_offset" in call.rest else {}
    finite(call.but(poses=call.poses * scale, **offset).to(dtype))


@given(call=calls(), dtype=st.sampled_from([torch.float32, F64]))
def test_votes_that_are_all_alike_leave_the_shares_uniform(call: Call, dtype: torch.dtype) -> None:
    N, I, R, P = call.poses.shape
    alike = call.but(
        poses=call.poses[:, :1].expand(N, I, R, P), weight=call.weight[:1, :1].expand(I, *call.weight.shape[1:])
    )
    for name in ("vote_offset", "bias", "prior", "beta_a", "beta_u"):
        if name in alike.rest:
            alike.rest[name] = torch.zeros_like(alike.rest[name])
    finite(alike.to(dtype))
    routed, first = alike(), alike.but(iterations=1)()
    assert routed.coupling is not None
    if call.rule.sums_to is None:  # there the leak's share changes
        first = first._replace(coupling=routed.coupling[:, :, :1].expand_as(routed.coupling))
    same(routed.coupling, first.coupling, rtol=1e-12)
    same(routed.poses, routed.poses[:, :1].expand_as(routed.poses), rtol=1e-12)


@given(call=calls(masks=False))
def test_one_parent_takes_every_child_whole(call: Call) -> None:
    assume(call.rule.sums_to == "parents")
    prior = {"prior": call.rest["prior"][:, :1]} if "prior" in call.rest else {}
    learned = {name: call.rest[name][:1] for name in ("bias", "beta_a", "beta_u") if name in call.rest}
    offset = call.rest.get("vote_offset")
    only = {} if offset is None else {"vote_offset": offset[..., :1, :, :]}
    coupling = call.but(weight=call.weight[:, :1], **prior, **learned, **only)().coupling
    assert coupling is not None
    assert torch.equal(coupling, torch.ones_like(coupling))


@pytest.mark.parametrize("rule", [Dynamic.sabour(), Dynamic.hauser(), Attention.tsai(), EM.hinton()], ids=str)
def test_an_empty_batch_is_an_empty_answer(rule: Rule) -> None:
    activations = torch.rand(0, 5) if rule.needs_activations else None
    routed = rule(torch.randn(0, 5, 2, 3), torch.randn(5, 4, 3, 6), activations, return_coupling=True)
    assert routed.poses.shape == (0, 4, 2, 6)
    assert routed.coupling is not None
    assert routed.coupling.shape == (0, 5, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Windows that share children

competing = st.one_of(
    st.sampled_from(
        [Dynamic.sabour(), Dynamic.sabour_code(), Dynamic.sabour_code(leaky=True), Dynamic.su(), Attention.tsai()]
    ),
    ems,
    attentions,
)


@st.composite
def windowed(draw: Any) -> tuple[Call, Tensor]:
    """A call whose batch is examples times windows, and which child each entry of a window is."""
    call = draw(calls(competing, masks=False))
    windows, examples, I = draw(st.integers(2, 4)), draw(st.integers(1, 2)), call.poses.shape[1]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    N = windows * examples
    changes: dict[str, Any] = {"poses": torch.randn(N, *call.poses.shape[1:], generator=generator, dtype=F64)}
    if "activations" in call.rest:
        changes["activations"] = torch.rand(N, I, generator=generator, dtype=F64)
    if "vote_offset" in call.rest:
        offset = call.rest["vote_offset"]
        changes["vote_offset"] = offset if offset.dim() == 4 else offset[:1]
    if draw(st.booleans()):
        changes["mask"] = torch.rand(N, I, generator=generator) < 0.7
    children = draw(st.integers(I, windows * I))
    # a window holds a child at most once, some windows share children
    ids = torch.stack([torch.randperm(children, generator=generator)[:I] for _ in range(windows)])
    return call.but(**changes), ids


def seen_by(ids: Tensor, mask: Tensor | None, examples: int) -> Tensor:
    """In how many windows each entry's child takes part, `[examples * windows, I]`."""
    windows, I = ids.shape
    there = torch.ones(examples, windows, I, dtype=F64) if mask is None else mask.reshape(examples, windows, I).to(F64)
    count = torch.zeros(examples, windows, I, dtype=F64)
    for w in range(windows):
        for i in range(I):
            count[:, w, i] = (there * (ids == ids[w, i])).sum((1, 2))
    return count.flatten(0, 1)


@given(case=windowed())
def test_a_child_shares_one_among_the_parents_of_all_windows_that_see_it(case: tuple[Call, Tensor]) -> None:
    call, ids = case
    mask, examples = call.rest.get("mask"), len(call.poses) // len(ids)
    coupling = call(child_ids=ids).coupling
    assert coupling is not None
    shares = coupling.sum(2).reshape(examples, *ids.shape)
    there = torch.ones_like(shares) if mask is None else mask.reshape(shares.shape).to(F64)
    assert not bool((shares * (1 - there)).any())
    for child in ids.unique():
        held = ids == child
        total, windows = (shares * held).sum((1, 2)), (there * held).sum((1, 2))
        if call.rule.sums_to is None:
            assert bool((total[windows > 0] < 1).all())
        else:
            torch.testing.assert_close(total, (windows > 0).to(F64), rtol=1e-12, atol=1e-12)


@given(case=windowed())
def test_the_first_round_of_windows_is_one_over_parents_times_windows(case: tuple[Call, Tensor]) -> None:
    call, ids = case
    call = call.but(iterations=1)
    coupling, J = call(child_ids=ids).coupling, call.weight.shape[1]
    assert coupling is not None
    mask = call.rest.get("mask")
    count = seen_by(ids, mask, len(call.poses) // len(ids))
    leak = 1 if call.rule.sums_to is None else 0
    want = 1 / (J * count + leak)
    if mask is not None:
        want = torch.where(mask, want, 0.0)
    torch.testing.assert_close(coupling, want[:, :, None].expand_as(coupling), rtol=1e-15, atol=0)


@given(case=windowed())
def test_windows_that_share_no_child_are_routed_as_if_alone(case: tuple[Call, Tensor]) -> None:
    call, ids = case
    apart = torch.arange(ids.numel()).flip(0).reshape(ids.shape)
    same_routed(call(child_ids=apart), call())
    one = torch.arange(ids.shape[1])[None]
    same_routed(call(child_ids=one), call())


@given(case=windowed(), seed=st.integers(0, 10**6))
def test_ids_of_padding_change_nothing(case: tuple[Call, Tensor], seed: int) -> None:
    call, ids = case
    generator = torch.Generator().manual_seed(seed)
    holds = torch.rand(ids.shape, generator=generator) < 0.6
    mask = holds.repeat(len(call.poses) // len(ids), 1)
    other = torch.where(holds, ids, torch.randint(0, 50, ids.shape, generator=generator))
    padded = call.but(mask=mask, poses=call.poses.masked_fill(~mask[:, :, None, None], torch.nan))
    same_routed(padded(child_ids=other), call.but(mask=mask)(child_ids=ids))
    gradients, want = padded.but(child_ids=other).gradients(), call.but(mask=mask, child_ids=ids).gradients()
    for name, gradient in gradients.items():
        same(gradient, want[name])


@pytest.mark.parametrize("rule", [Dynamic(leaky=True), Attention.tsai(), EM(final_lambda=0.5)], ids=str)
def test_gradients_of_windows_are_those_of_finite_differences(rule: Rule) -> None:
    poses, weight = torch.randn(4, 3, 2, 2, dtype=F64), torch.randn(3, 2, 2, 2, dtype=F64)
    activations = torch.rand(4, 3, dtype=F64)
    ids = torch.tensor([[0, 1, 2], [2, 1, 3]])

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        routed = rule(*values, child_ids=ids, return_coupling=True)
        return tuple(x for x in routed[:3] if x is not None)

    leaves = (poses, weight, activations) if rule.needs_activations else (poses, weight)
    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in leaves], fast_mode=True)


@given(case=windowed())
def test_examples_of_windows_do_not_depend_on_each_other(case: tuple[Call, Tensor]) -> None:
    call, ids = case
    windows = len(ids)
    together = call(child_ids=ids)
    for first in range(0, len(call.poses), windows):
        part = slice(first, first + windows)
        changes = {name: call.rest[name][part] for name in ("activations", "mask") if name in call.rest}
        want = Routed(*(None if x is None else x[part] for x in together[:3]), None)
        same_routed(call(poses=call.poses[part], child_ids=ids, **changes), want)


# ---------------------------------------------------------------------------------------------------------------------
# Each algorithm for itself


@given(call=calls(dynamics))
def test_accumulating_makes_no_difference_before_the_third_round(call: Call) -> None:
    for rounds in (1, 2):
        same_routed(*(call.but(accumulate=yes, iterations=rounds)() for yes in (True, False)), rtol=0)


@given(call=calls(dynamics), kind=st.sampled_from(KINDS))
def test_the_last_squash_is_not_seen_inside_when_there_is_an_inner_one(call: Call, kind: str) -> None:
    call = call.but(inner_squash="exp", iterations=3)
    got, plain = call.but(squash=kind)(), call.but(squash="identity")()
    same(got.coupling, plain.coupling, rtol=0)
    same(got.poses, squash(plain.poses, kind), rtol=1e-12)


@given(call=calls(dynamics), kind=st.sampled_from(KINDS))
def test_an_inner_squash_that_is_the_last_one_is_no_inner_squash(call: Call, kind: str) -> None:
    same_routed(call.but(squash=kind, inner_squash=kind)(), call.but(squash=kind, inner_squash=None)(), rtol=0)


@given(call=calls(dynamics))
def test_a_squash_may_be_a_callable(call: Call) -> None:
    by_name = call.but(squash="tanh", inner_squash="normalize")
    by_callable = call.but(squash=lambda s: squash(s, "tanh"), inner_squash=lambda s: squash(s, "normalize"))
    same_routed(by_callable(), by_name(), rtol=0)


@given(call=calls(leaky_dynamics))
def test_a_leak_is_a_further_parent_whose_votes_are_zero(call: Call) -> None:
    I, J = call.poses.shape[1], call.weight.shape[1]
    none_of_the_above = {"weight": torch.cat([call.weight, torch.zeros_like(call.weight[:, :1])], 1)}
    if "prior" in call.rest:
        none_of_the_above["prior"] = torch.cat([call.rest["prior"], torch.zeros(I, 1, dtype=F64)], 1)
    if "bias" in call.rest:
        none_of_the_above["bias"] = torch.cat([call.rest["bias"], torch.zeros_like(call.rest["bias"][:1])])
    offset = call.rest.get("vote_offset")
    if offset is not None:
        spread = offset.expand(*offset.shape[:-3], J, *offset.shape[-2:])
        none_of_the_above["vote_offset"] = torch.cat([spread, torch.zeros_like(spread[..., :1, :, :])], -3)
    got, want = call(), call.but(leaky=False, **none_of_the_above)()
    assert want.coupling is not None
    same_routed(got, Routed(want.poses[:, :J], None, want.coupling[:, :, :J], None))


@given(call=calls(dynamics))
def test_a_prior_counts_only_against_the_others_that_it_shares_with(call: Call) -> None:
    I, J = call.poses.shape[1], call.weight.shape[1]
    prior = torch.randn(I, J, dtype=F64)
    shift = torch.randn(I, 1, dtype=F64) if call.rule.sums_to == "parents" else torch.randn(1, J, dtype=F64)
    same_routed(call(prior=prior + shift), call(prior=prior), rtol=1e-8)


@given(call=calls(dynamics), scale=st.floats(0.1, 10))
def test_cosine_agreement_does_not_see_how_long_votes_are(call: Call, scale: float) -> None:
    call = call.but(agreement="cosine")
    call.rest.pop("bias", None)
    offset = {"vote_offset": call.rest["vote_offset"] * scale} if "vote_offset" in call.rest else {}
    same(call(poses=call.poses * scale, **offset).coupling, call().coupling, rtol=1e-8)


@given(call=calls(dynamics))
def test_cosine_agreement_of_unit_votes_with_unit_parents_is_the_dot_product(call: Call) -> None:
    call = call.but(weight=torch.eye(call.poses.shape[3], dtype=F64).expand(1, call.weight.shape[1], -1, -1))
    call.rest.pop("bias", None)
    call.rest.pop("vote_offset", None)
    call = call.but(poses=squash(call.poses, "normalize"), inner_squash="normalize", squash="normalize")
    same_routed(call.but(agreement="cosine")(), call.but(agreement="dot")())


@given(call=calls(st.just(Dynamic.su()), masks=False), scale=st.sampled_from([0.3, 1.0, 3.0]))
def test_no_round_of_sus_second_form_loses_likelihood(call: Call, scale: float) -> None:
    call = call.but(poses=call.poses * scale, iterations=1, vote_offset=None)
    votes = torch.einsum("nirp,ijpq->nijrq", call.poses, call.weight.expand(call.poses.shape[1], -1, -1, -1))
    state, before = None, None
    for _ in range(6):
        state = call(start=state).state  # the parents' directions
        after = torch.einsum("nijrq,njrq->nij", votes, state).logsumexp(2).sum(1)
        if before is not None:
            assert bool((after >= before - 1e-12 * before.abs().clamp(min=1)).all())
        before = after


@given(call=calls(ems), rounds=st.integers(1, 4))
def test_lambda_goes_on_from_round_to_round(call: Call, rounds: int) -> None:
    state = None
    for t in range(1, rounds + 1):
        step = call.but(iterations=1)(start=state)
        state, coupling = step.state, step.coupling
        assert coupling is not None
        assert state.round == t
        mass = (coupling * call.rest["activations"][:, :, None]).sum(1)
        size = state.mean[0, 0].numel()
        cost = (size * call.rest["beta_u"] + state.variance.log().sum((2, 3)) / 2) * mass
        logits = call.rule.final_lambda * (1 - 0.95**t) * (call.rest["beta_a"] - cost)
        same(state.activation_logits, logits)
        same(step.activations, logits.sigmoid())


@given(call=calls(ems))
def test_em_parents_are_the_mean_and_the_variance_of_their_votes(call: Call) -> None:
    routed, I = call(), call.poses.shape[1]
    assert routed.coupling is not None
    shares = routed.coupling * call.rest["activations"][:, :, None]
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-300)
    votes = torch.einsum("nirp,ijpq->nijrq", call.poses, call.weight.expand(I, -1, -1, -1))
    votes = votes + call.rest.get("vote_offset", 0)
    mean = torch.einsum("nij,nijrq->njrq", shares, votes)
    variance = torch.einsum("nij,nijrq->njrq", shares, (votes - mean[:, None]) ** 2)
    same(routed.poses, mean)
    same(routed.state.variance, variance + call.rule.min_variance)


@given(call=calls(ems, masks=False))
def test_em_does_not_lose_small_variances_beside_large_means(call: Call) -> None:
    far = {"vote_offset": torch.full((1, 1, *call().poses.shape[2:]), 1e6, dtype=F64)}
    near = {"vote_offset": None}
    got, want = call(**far), call(**near)
    same(got.state.variance, want.state.variance, rtol=1e-6)
    same(got.activations, want.activations, rtol=1e-6)


@given(call=calls(attentions))
def test_the_scale_of_attention_is_one_over_the_root_of_a_poses_size(call: Call) -> None:
    size = call.poses.shape[2] * call.weight.shape[3]
    same_routed(call.but(scale=None)(), call.but(scale=1 / math.sqrt(size))(), rtol=1e-12)


@given(call=calls(attentions, masks=False))
def test_parents_of_attention_lose_mean_and_deviation_before_gain_and_bias(call: Call) -> None:
    call = call.but(norm=True, eps=1e-3, iterations=1)
    R, Q = call.poses.shape[2], call.weight.shape[3]
    assume(R * Q > 1)
    gain, bias = torch.randn(R, Q, dtype=F64), torch.randn(R, Q, dtype=F64)
    raw = call.but(norm=False)(norm_weight=None, norm_bias=None).poses.flatten(2)
    mean, variance = raw.mean(2, keepdim=True), raw.var(2, keepdim=True, correction=0)
    want = ((raw - mean) / (variance + 1e-3).sqrt()).unflatten(2, (R, Q))
    same(call(norm_weight=None, norm_bias=None).poses, want)
    same(call(norm_weight=gain, norm_bias=bias).poses, want * gain + bias)
    flat = call(norm_weight=gain.flatten(), norm_bias=bias.flatten())
    same_routed(flat, call(norm_weight=gain, norm_bias=bias), rtol=0)


def rotation(rows: int, seed: int) -> Tensor:
    """An orthogonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=F64))[0]


def turned(call: Call, turn: Tensor) -> tuple[Routed, Routed]:
    """Routed from children turned from the left, and the parents of the others turned likewise."""
    rest = {name: turn @ call.rest[name] for name in ("vote_offset", "bias") if name in call.rest}
    routed = call()
    return call(poses=turn @ call.poses, **rest), routed._replace(poses=turn @ routed.poses)


@given(call=calls(st.one_of(dynamics, leaky_dynamics, attentions)), seed=st.integers(0, 10**6))
def test_turning_all_children_turns_all_parents_in_dynamic_routing_and_attention(call: Call, seed: int) -> None:
    call = call.but(norm=False) if isinstance(call.rule, Attention) else call
    call.rest.pop("norm_weight", None)
    call.rest.pop("norm_bias", None)
    same_routed(*turned(call, rotation(call.poses.shape[2], seed)), rtol=1e-8)


@given(call=calls(ems), seed=st.integers(0, 10**6))
def test_em_has_variances_along_axes_so_it_commutes_with_swaps_and_mirrors_alone(call: Call, seed: int) -> None:
    rows = call.poses.shape[2]
    generator = torch.Generator().manual_seed(seed)
    mirrors = torch.randint(0, 2, (rows,), generator=generator) * 2.0 - 1
    swap = torch.eye(rows, dtype=F64)[torch.randperm(rows, generator=generator)] * mirrors
    same_routed(*turned(call, swap))


@pytest.mark.parametrize("rule", [EM(iterations=3), Attention(iterations=3)], ids=str)
def test_em_and_layer_norm_do_see_how_poses_are_turned(rule: Rule) -> None:
    activations = {"activations": torch.rand(2, 6, dtype=F64)} if rule.needs_activations else {}
    call = Call(rule, torch.randn(2, 6, 3, 3, dtype=F64), torch.randn(6, 4, 3, 3, dtype=F64), activations)
    got, want = turned(call, rotation(3, 0))
    assert float((got.poses - want.poses).abs().max()) > 0.01


@given(call=calls(masks=False), seed=st.integers(0, 10**6))
def test_combining_down_is_the_adjoint_of_combining_up(call: Call, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    N, I, R, _ = call.poses.shape
    J, Q = call.weight.shape[1], call.weight.shape[3]
    coupling = torch.randn(N, I, J, generator=generator, dtype=F64)
    parents = torch.randn(N, J, R, Q, generator=generator, dtype=F64)
    up, down = combine(call.poses, call.weight, coupling), combine_transposed(parents, call.weight, coupling)
    assert down.shape == call.poses.shape
    torch.testing.assert_close(
        (up * parents).sum((1, 2, 3)), (call.poses * down).sum((1, 2, 3)), rtol=1e-10, atol=1e-10
    )


@given(call=calls(masks=False))
def test_combining_adds_up_poses_times_weights(call: Call) -> None:
    N, I, J = len(call.poses), call.poses.shape[1], call.weight.shape[1]
    coupling, offset = torch.randn(N, I, J, dtype=F64), call.rest.get("vote_offset")
    votes = call.poses[:, :, None] @ call.weight
    want = (coupling[..., None, None] * (votes if offset is None else votes + offset)).sum(1)
    torch.testing.assert_close(combine(call.poses, call.weight, coupling, offset), want, rtol=1e-12, atol=1e-12)


@given(call=calls(st.just(Dynamic(squash="identity")), masks=False))
def test_a_parent_without_a_squash_is_the_sum_of_its_shares_of_poses_times_weights(call: Call) -> None:
    routed, offset = call(), call.rest.get("vote_offset")
    assert routed.coupling is not None
    votes = call.poses[:, :, None] @ call.weight
    same(routed.poses, (routed.coupling[..., None, None] * (votes if offset is None else votes + offset)).sum(1))


# ---------------------------------------------------------------------------------------------------------------------
# A function and its rule


@pytest.mark.parametrize(
    ("function", "rule"),
    [(dynamic, Dynamic()), (attention, Attention()), (em, EM())],
    ids=["dynamic", "attention", "em"],
)
def test_a_rule_without_settings_is_its_function(function: Callable[..., Routed], rule: Rule) -> None:
    poses, weight, activations = torch.randn(2, 6, 2, 3), torch.randn(6, 4, 3, 5), torch.rand(2, 6)
    same_routed(rule(poses, weight, activations), function(poses, weight, activations), rtol=0)


def test_a_preset_is_its_papers_settings_by_name() -> None:
    assert Dynamic.sabour() == Dynamic(iterations=3)
    assert Dynamic.sabour_code() == Dynamic(iterations=3, learn_bias=True)
    assert Dynamic.sabour_code(leaky=True) == Dynamic(iterations=3, learn_bias=True, leaky=True)
    half = Dynamic.su().squash
    assert Dynamic.su_first() == Dynamic(iterations=3, accumulate=False, squash=half)
    assert Dynamic.su() == Dynamic(iterations=3, accumulate=False, squash=half, inner_squash="normalize")
    s = torch.randn(2, 3, 1, 4)
    assert torch.equal(squash(s, half), squash(s, a=0.5))
    hauser = Dynamic(iterations=3, agreement="cosine", detach="coupling")
    assert Dynamic.hauser() == dataclasses.replace(hauser, normalize="children")
    assert Dynamic.hauser(normalize="parents") == hauser
    assert Attention.tsai() == Attention(iterations=2, scale=None, norm=True)
    assert EM.hinton() == EM(iterations=3, final_lambda=0.01)
    for preset in (Dynamic.sabour, Dynamic.sabour_code, Dynamic.su_first, Dynamic.su, Dynamic.hauser):
        assert preset(5).iterations == 5
    assert Attention.tsai(5).iterations == EM.hinton(5).iterations == 5


@given(rule=rules)
def test_a_rule_names_what_it_learns_as_its_function_does(rule: Rule) -> None:
    learned = rule.learned(5, 3, 2, 4, 6)
    sizes = {
        "prior": (5, 3),
        "bias": (3, 2, 6),
        "norm_weight": (2, 6),
        "norm_bias": (2, 6),
        "beta_a": (3,),
        "beta_u": (3,),
    }
    assert {name: tuple(x.shape) for name, x in learned.items()} == {name: sizes[name] for name in learned}
    assert rule.weight_std(5, 3, 2, 4, 6) > 0
    assert hash(rule) == hash(dataclasses.replace(rule))


@given(rule=rules)
def test_the_same_rule_gives_the_same_answer_twice_and_keeps_nothing(rule: Rule) -> None:
    poses, weight, activations = torch.randn(2, 6, 2, 3), torch.randn(6, 4, 3, 5), torch.rand(2, 6)
    first = rule(poses, weight, activations, return_coupling=True)
    rule(poses * 2, weight, activations)
    same_routed(rule(poses, weight, activations, return_coupling=True), first, rtol=0)
