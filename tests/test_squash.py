"""The squash family: lengths, directions, the edges of four number formats, and the way back."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from torchcaps import Capsules, squash, unsquash
from torchcaps.squash import KINDS, safe_norm

F64 = torch.float64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOUNDED = [kind for kind in KINDS if kind != "identity"]

# f(r) by Python's own mathematics
LENGTH: dict[str, Callable[[float], float]] = {
    "sabour": lambda r: r * r / (1 + r * r),
    "tanh": math.tanh,
    "exp": lambda r: -math.expm1(-r),
    "rational": lambda r: r / (1 + r),
    "normalize": lambda r: 1.0 if r else 0.0,
    "identity": lambda r: r,
}

kinds = st.sampled_from(KINDS)
numbers_not_too_small = st.floats(-50, 50).filter(lambda x: x == 0 or abs(x) > 1e-50)
vectors = st.lists(numbers_not_too_small, min_size=1, max_size=6)


def length(v: Tensor) -> float:
    return math.sqrt(math.fsum(x * x for x in v.detach().double().flatten().tolist()))


@given(kind=kinds, numbers=vectors, scale=st.sampled_from([1.0, 1e-3, 1e-8, 1e-30, 1e3, 1e100]))
def test_the_length_becomes_f_of_the_length_and_the_direction_is_kept(
    kind: str, numbers: list[float], scale: float
) -> None:
    s = torch.tensor(numbers, dtype=F64) * scale
    v, r = squash(s, kind, dim=-1), math.hypot(*(x * scale for x in numbers))
    wanted = LENGTH[kind](r)
    for got, x in zip(v.tolist(), s.tolist(), strict=True):
        assert got == pytest.approx(wanted * x / r if r else 0.0, rel=1e-13, abs=0)


@pytest.mark.parametrize("a", [0.1, 0.5, 1.0, 4.0])
@given(numbers=vectors)
def test_the_constant_of_sabours_squash_is_the_squared_length_that_becomes_one_half(
    a: float, numbers: list[float]
) -> None:
    s = torch.tensor(numbers, dtype=F64)
    r = math.hypot(*numbers)
    assert length(squash(s, a=a, dim=-1)) == pytest.approx(r * r / (a + r * r), rel=1e-13, abs=0)
    half = squash(torch.tensor([math.sqrt(a), 0.0], dtype=F64), a=a, dim=-1)
    assert half.tolist() == pytest.approx([0.5, 0.0], rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_eps_is_added_to_the_squared_length_before_anything_else(kind: str) -> None:
    s = torch.tensor([3e-4, -4e-4], dtype=F64)
    r = math.sqrt(25e-8 + 1e-7)
    want = LENGTH[kind](r) / r * s if kind != "identity" else s
    torch.testing.assert_close(squash(s, kind, dim=-1, eps=1e-7), want, rtol=1e-13, atol=0)


def test_the_published_repository_of_su_is_a_half_and_an_eps() -> None:
    s = torch.randn(5, 1, 7, dtype=F64)
    q = s.square().sum(-1, keepdim=True) + 1e-7
    torch.testing.assert_close(squash(s, a=0.5, eps=1e-7), q.sqrt() / (0.5 + q) * s, rtol=1e-13, atol=0)


def test_a_pose_is_squashed_over_rows_and_columns_together_unless_told_otherwise() -> None:
    s = torch.randn(2, 3, 4, 5, dtype=F64)
    assert torch.equal(squash(s), squash(s, dim=(2, 3)))
    torch.testing.assert_close(squash(s), squash(s.flatten(2), dim=-1).reshape(s.shape), rtol=1e-14, atol=0)
    torch.testing.assert_close(squash(s, dim=1), squash(s.movedim(1, -1), dim=-1).movedim(-1, 1), rtol=1e-14, atol=0)
    assert not torch.allclose(squash(s), squash(s, dim=-1))


# ---------------------------------------------------------------------------------------------------------------------
# Number formats

LENGTHS = [0.0, 1e-30, 1e-7, 1e-3, 0.0099, 0.0101, 0.5, 1.0, 2.0, 20.0, 400.0, 1e4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_finite_and_right_at_every_length(kind: str, dtype: torch.dtype) -> None:
    eps, tiny = torch.finfo(dtype).eps, max(torch.finfo(dtype).smallest_normal, 1e-30)
    direction = torch.tensor([[2.0, -1.0, 2.0], [0.0, 4.0, 0.0]], dtype=F64) / 5  # of length 1, with zeros in it
    share = torch.tensor([[0.3, 1.0, -0.7], [0.5, -0.2, 0.1]], dtype=F64)
    for r in LENGTHS:
        s = (direction * r).to(dtype).requires_grad_()
        exact = s.detach().double().requires_grad_()
        v, want = squash(s, kind), squash(exact, kind)
        assert v.dtype == dtype
        assert bool(v.isfinite().all())
        # what is calculated in float32 inside is rounded once, at the end
        torch.testing.assert_close(v.double(), want, rtol=(0.51 if eps > 1e-6 else 4) * eps, atol=tiny)
        if kind != "identity":
            assert length(v) <= 1 + 4 * eps
        (gradient,) = torch.autograd.grad((v * share.to(dtype)).sum(), s)
        (exact_gradient,) = torch.autograd.grad((want * share).sum(), exact)
        if float(exact_gradient.abs().max()) < torch.finfo(dtype).max:  # the slope of normalize is 1 / r
            assert bool(gradient.isfinite().all())
            off = 8 * eps * float(exact_gradient.abs().max()) + tiny
            torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=off)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_becomes_zero_with_the_gradient_of_the_limit(kind: str, dtype: torch.dtype) -> None:
    s = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    v = squash(s, kind)
    assert torch.equal(v, torch.zeros_like(v))
    v.sum().backward()
    assert s.grad is not None
    # sabour is flat at 0, the slope of normalize is declared 0 there, and the others start with slope 1
    assert torch.equal(s.grad, torch.full_like(s, 0.0 if kind in ("sabour", "normalize") else 1.0))


@given(kind=st.sampled_from(BOUNDED), numbers=vectors, dtype=st.sampled_from(DTYPES))
def test_no_bounded_kind_is_longer_than_one(kind: str, numbers: list[float], dtype: torch.dtype) -> None:
    v = squash(torch.tensor(numbers, dtype=dtype), kind, dim=-1)
    assert length(v) <= 1 + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("r", [0.3, 0.0099999, 0.0100001, 1.0000001, 5.0])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_gradients_are_those_of_finite_differences(kind: str, r: float, eps: float) -> None:
    s = torch.randn(2, 3, 2, dtype=F64)
    s = (s / torch.linalg.vector_norm(s, dim=(1, 2), keepdim=True) * r).requires_grad_()
    assert torch.autograd.gradcheck(partial(squash, kind=kind, eps=eps), s, eps=1e-7 * min(r, 1), atol=1e-5, rtol=1e-5)
    if kind == "sabour":
        assert torch.autograd.gradcheck(partial(squash, a=0.5, eps=eps), s, eps=1e-7 * min(r, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("r", [0.3, 3.0])
def test_second_derivatives_are_those_of_finite_differences(kind: str, r: float) -> None:
    s = torch.randn(1, 3, dtype=F64)
    s = (s / s.norm() * r).requires_grad_()
    assert torch.autograd.gradgradcheck(partial(squash, kind=kind), s, atol=1e-4)


@pytest.mark.parametrize("kind", ["tanh", "exp"])
def test_the_series_near_zero_meets_the_function(kind: str) -> None:
    near = torch.tensor([[1e-2 * (1 - 1e-9)], [1e-2 * (1 + 1e-9)]], dtype=F64)
    below, above = squash(near, kind, dim=-1).flatten().tolist()
    assert below == pytest.approx(LENGTH[kind](near[0].item()), rel=1e-15)
    assert above == pytest.approx(LENGTH[kind](near[1].item()), rel=1e-15)


@given(
    kind=st.sampled_from(["sabour", "tanh", "exp", "rational"]), small=st.floats(1e-6, 1e3), factor=st.floats(1.001, 10)
)
def test_longer_stays_longer(kind: str, small: float, factor: float) -> None:
    v = squash(torch.tensor([[small], [small * factor]], dtype=F64), kind, dim=-1).flatten()
    assert v[0] <= v[1] * (1 + 1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# The norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_neither_over_nor_underflows(dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max / 8
    small = torch.finfo(dtype).smallest_normal * 4
    for scale in (big, small, 1.0):
        s = torch.tensor([[3.0, 4.0]], dtype=F64).mul(scale).to(dtype)
        assert float(safe_norm(s, dim=-1)) == pytest.approx(5 * scale, rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_a_norm_is_the_direction_and_zero_at_zero(dtype: torch.dtype) -> None:
    s = torch.tensor([[3.0, -4.0], [0.0, 0.0], [3e-4, 4e-4]], dtype=dtype, requires_grad=True)
    safe_norm(s, dim=-1).sum().backward()
    assert s.grad is not None
    want = torch.tensor([[0.6, -0.8], [0.0, 0.0], [0.6, 0.8]], dtype=dtype)
    torch.testing.assert_close(s.grad, want, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_a_norm_keeps_its_dimensions_when_asked() -> None:
    s = torch.randn(2, 3, 4, 5)
    assert safe_norm(s).shape == (2, 3)
    assert safe_norm(s, keepdim=True).shape == (2, 3, 1, 1)
    assert safe_norm(s, dim=1).shape == (2, 4, 5)
    torch.testing.assert_close(safe_norm(s), s.square().sum((2, 3)).sqrt())


def test_lengths_of_capsules_are_norms_over_rows_and_columns_with_gradient_zero_at_zero() -> None:
    poses = torch.randn(2, 3, 2, 4)
    poses[0, 1] = 0
    poses.requires_grad_()
    lengths = Capsules(poses).lengths
    torch.testing.assert_close(lengths, poses.detach().square().sum((2, 3)).sqrt())
    lengths.sum().backward()
    assert poses.grad is not None
    assert bool(poses.grad.isfinite().all())
    assert not bool(poses.grad[0, 1].any())
    assert Capsules(torch.randn(2, 3, 5, 6, 1, 8)).lengths.shape == (2, 3, 5, 6)


# ---------------------------------------------------------------------------------------------------------------------
# The way back


@given(numbers=vectors, scale=st.sampled_from([1.0, 0.1, 1e-4]))
def test_unsquash_takes_sabours_squash_back(numbers: list[float], scale: float) -> None:
    s = torch.tensor(numbers, dtype=F64) * scale
    r = math.hypot(*s.tolist())
    back = unsquash(squash(s, dim=-1), dim=-1)
    # a relative error of eps in the squashed length is one of eps (1 + r^2) / 2 in r
    torch.testing.assert_close(back, s, rtol=1e-15 * (8 + 2 * r * r), atol=1e-150)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [1e-3, 0.1, 1.0, 3.0, 10.0])
def test_the_way_back_loses_what_its_docstring_says(r: float, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    if eps * (1 + r * r) > 0.5 or r * r < torch.finfo(dtype).smallest_normal / eps:
        return  # the squashed length rounds to 1, or below what this format holds: nothing is left to come back from
    s = torch.tensor([[0.6, -0.8]], dtype=F64).mul(r).to(dtype)
    back = unsquash(squash(s), dim=(-2, -1))
    assert back.dtype == dtype
    torch.testing.assert_close(back, s, rtol=2 * eps * (1 + (1 + r * r) / 2), atol=0)


def test_squash_takes_unsquash_back() -> None:
    v = torch.randn(20, 2, 3, dtype=F64)
    v = (
        v
        / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
        * torch.linspace(0.01, 0.99, 20, dtype=F64)[:, None, None]
    )
    torch.testing.assert_close(squash(unsquash(v)), v, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_unsquash_is_declared_zero_at_zero(dtype: torch.dtype) -> None:
    v = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    back = unsquash(v)
    assert torch.equal(back, torch.zeros_like(back))
    back.sum().backward()
    assert v.grad is not None
    assert torch.equal(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unsquash_of_a_length_of_one_and_more_is_finite(dtype: torch.dtype) -> None:
    for n in (1.0, 1.5):
        v = torch.tensor([[n, 0.0]], dtype=dtype, requires_grad=True)
        back = unsquash(v)
        (gradient,) = torch.autograd.grad(back.sum(), v)
        assert bool(back.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert back[0, 0] > 0


def test_the_gradient_of_unsquash_is_that_of_finite_differences() -> None:
    v = torch.randn(3, 2, 2, dtype=F64)
    v = (
        v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True) * torch.tensor([0.1, 0.5, 0.9])[:, None, None]
    ).double()
    assert torch.autograd.gradcheck(unsquash, v.requires_grad_())
    flat = torch.tensor([0.3, 0.4], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(unsquash, dim=-1), flat)


# ---------------------------------------------------------------------------------------------------------------------
# What can take a kind's place, and what cannot


def test_a_callable_takes_the_place_of_a_kind() -> None:
    s = torch.randn(2, 3, 1, 4)
    assert torch.equal(squash(s, lambda x: x * 2), s * 2)
    assert torch.equal(squash(s, torch.tanh), torch.tanh(s))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: squash(s, "relu"), r"unknown squash 'relu': take one of sabour, tanh, .*, or a callable"),
        (lambda s: squash(s, lambda x: x.sum(-1)), r"turned shape \[2, 3, 4\] into \[2, 3\]: it must keep the shape"),
        (lambda s: squash(s, a=0.0), r"a=0.0 with squash 'sabour': .* it must be above 0"),
        (lambda s: squash(s, a=-1.0), r"a=-1.0 with squash 'sabour'"),
        (lambda s: squash(s, "tanh", a=0.5), r"a=0.5 with squash 'tanh': only 'sabour' has the constant a"),
        (lambda s: squash(s, dim=3), r"squash over dim=\(3,\) of a tensor of shape \[2, 3, 4\]: no such dimension"),
        (lambda s: squash(s, dim=(-1, -4)), r"dim=\(-1, -4\) of a tensor of shape \[2, 3, 4\]"),
        (lambda s: squash(s, dim=()), r"squash over dim=\(\)"),
        (
            lambda s: squash(s[0, 0]),
            r"dim=\(-2, -1\) of a tensor of shape \[4\]: no such dimension; give dim=-1 for vectors",
        ),
        (lambda s: unsquash(s[0, 0]), r"unsquash over dim=\(-2, -1\) of a tensor of shape \[4\]"),
        (lambda s: safe_norm(s, dim=5), r"safe_norm over dim=\(5,\) of a tensor of shape \[2, 3, 4\]"),
        (lambda s: squash(s.long()), r"squash wants floating-point numbers, not torch.int64: call .float\(\) first"),
        (lambda s: unsquash(s.int()), r"unsquash wants floating-point numbers, not torch.int32"),
    ],
)
def test_what_cannot_be_done_says_why(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 3, 4))


def test_a_kind_may_be_given_with_nothing_to_squash() -> None:
    for kind in KINDS:
        assert squash(torch.zeros(0, 3, 1, 4), kind).shape == (0, 3, 1, 4)
