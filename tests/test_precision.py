"""Small number formats: routing computes in float32 inside, whatever comes in and whatever autocast says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.routing import EM, Attention, Dynamic, EMState, Routed, Rule, combine, combine_transposed

RULES: list[Rule] = [
    Dynamic.sabour(),
    Dynamic.sabour_code(leaky=True),
    Dynamic.su(),
    Dynamic.hauser(),
    Attention.tsai(),
    Attention(norm=False),
    EM.hinton(),
]
HALF = [torch.bfloat16, torch.float16]

each_rule = pytest.mark.parametrize("rule", RULES, ids=str)
each_half = pytest.mark.parametrize("half", HALF, ids=str)


def numbers(rule: Rule, poses: torch.dtype, weight: torch.dtype) -> dict[str, Tensor]:
    """24 children, 5 parents, poses of 2 rows, votes of about 2."""
    rest = {"activations": torch.rand(3, 24).to(poses)} if rule.needs_activations else {}
    learned = {name: x + 0.3 * torch.randn_like(x) for name, x in rule.learned(24, 5, 2, 4, 6).items()}
    offset = {"vote_offset": torch.randn(24, 1, 2, 6).to(poses)}
    return {
        "poses": 2 * torch.randn(3, 24, 2, 4).to(poses),
        "weight": torch.randn(24, 5, 4, 6).to(weight) / 2,
        **offset,
        **rest,
        **learned,
    }


def to(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: x.to(dtype) for name, x in call.items()}


def outputs(routed: Routed) -> list[Tensor]:
    return [x for x in routed[:3] if x is not None]


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@each_half
@each_rule
def test_half_precision_costs_the_rounding_of_the_answer_and_little_more(rule: Rule, half: torch.dtype) -> None:
    call = numbers(rule, half, half)
    got, exact = rule(**call, return_coupling=True), rule(**to(call, torch.float64), return_coupling=True)
    for x, want in zip(outputs(got), outputs(exact), strict=True):
        assert x.dtype == half
        rounding = rms(want.to(half).double() - want)
        assert rms(x.double() - want) <= 1.1 * rounding + 4 * 2**-23 * rms(want)


@each_half
@each_rule
def test_half_precision_poses_and_a_weight_of_float32_give_float32(rule: Rule, half: torch.dtype) -> None:
    call = numbers(rule, half, torch.float32)
    mixed, single = rule(**call, return_coupling=True), rule(**to(call, torch.float32), return_coupling=True)
    for x, want in zip(outputs(mixed), outputs(single), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, want)
    leaves = {name: x.requires_grad_() for name, x in call.items()}
    rule(**leaves).poses.sum().backward()
    for x in leaves.values():
        assert x.grad is None or (x.grad.dtype == x.dtype and bool(x.grad.isfinite().all()))


@each_rule
def test_single_precision_errs_by_a_few_of_its_own_roundings(rule: Rule) -> None:
    call = numbers(rule, torch.float32, torch.float32)
    got, exact = rule(**call, return_coupling=True), rule(**to(call, torch.float64), return_coupling=True)
    for x, want in zip(outputs(got), outputs(exact), strict=True):
        assert rms(x.double() - want) <= 16 * 2**-23 * rms(want)


@each_rule
def test_double_precision_stays_double(rule: Rule) -> None:
    call = to(numbers(rule, torch.float64, torch.float64), torch.float64)
    for poses, weight in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        rounded = call | {"poses": call["poses"].to(poses), "weight": call["weight"].to(weight)}
        for x, want in zip(outputs(rule(**rounded)), outputs(rule(**to(rounded, torch.float64))), strict=True):
            assert x.dtype == torch.float64
            assert torch.equal(x, want)


@each_rule
def test_autocast_changes_nothing_inside(rule: Rule) -> None:
    for poses, weight in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        call = {name: x.requires_grad_() for name, x in numbers(rule, poses, weight).items()}
        plain = rule(**call, return_coupling="all")
        with torch.autocast("cpu", torch.bfloat16):
            cast = rule(**call, return_coupling="all")
        for x, want in zip(outputs(cast), outputs(plain), strict=True):
            assert x.dtype == want.dtype
            assert torch.equal(x, want)
        used = [x for name, x in call.items() if name != "activations" or rule.needs_activations]
        got, want = (torch.autograd.grad(sum(x.float().sum() for x in outputs(r)[:-1]), used) for r in (cast, plain))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_autocast_changes_nothing_when_a_coupling_is_combined() -> None:
    poses, weight, coupling = torch.randn(2, 24, 2, 4), torch.randn(24, 5, 4, 6), torch.rand(2, 24, 5)
    up = combine(poses, weight, coupling)
    down = combine_transposed(up, weight, coupling)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(combine(poses, weight, coupling), up)
        assert torch.equal(combine_transposed(up, weight, coupling), down)


@each_half
def test_a_coupling_is_combined_in_float32_inside(half: torch.dtype) -> None:
    poses, weight, coupling = (
        torch.randn(2, 200, 1, 4).to(half),
        torch.randn(200, 5, 4, 6).to(half),
        torch.rand(2, 200, 5).to(half),
    )
    exact = combine(poses.double(), weight.double(), coupling.double())
    got = combine(poses, weight, coupling)
    assert got.dtype == half
    assert rms(got.double() - exact) <= 1.1 * rms(exact.to(half).double() - exact)


@each_half
def test_rounds_one_at_a_time_in_half_precision_lose_the_rounding_of_the_state_alone(half: torch.dtype) -> None:
    for rule in (Dynamic(iterations=1), Attention(iterations=1), EM(iterations=1)):
        call = numbers(rule, half, half)
        state = rule(**call).state
        stored = [state.mean, state.variance, state.activation_logits] if isinstance(state, EMState) else [state]
        low = EMState(*(x.to(half) for x in stored), state.round) if isinstance(state, EMState) else state.to(half)
        single = EMState(*(x.to(half).float() for x in stored), 1) if isinstance(state, EMState) else low.float()
        got, want = rule(**call, start=low).poses, rule(**to(call, torch.float32), start=single).poses
        assert torch.equal(got, want.to(half))


@each_half
def test_long_half_precision_votes_do_not_overflow_inside(half: torch.dtype) -> None:
    for rule in RULES:
        call = numbers(rule, half, half)
        call["poses"] = 100 * call["poses"]  # squares of the sums are above 65504
        for x in outputs(rule(**call, return_coupling=True)):
            assert bool(x.isfinite().all())
