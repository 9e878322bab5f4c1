r"""The squash family: what turns a pose of any length into one whose length can be read as "how present".

Every kind keeps the direction and changes the length r = ||s|| to f(r):

    v = f(r) s / r,    v = 0 at s = 0

    kind         f(r)              source
    sabour       r^2 / (a + r^2)   Sabour, Frosst, Hinton 2017, eq. 1 (a = 1); Su 2018 (a = 0.5)
    tanh         tanh r            Su 2018
    exp          1 - e^-r          Su 2018; Mazzia et al. 2021 (Efficient-CapsNet)
    rational     r / (1 + r)       Su 2018
    normalize    1                 Su 2018, inside the rounds
    identity     r                 no squash

`sabour` is flat at 0 (Jacobian 0: a capsule that is exactly zero gets no gradient); `tanh`, `exp` and `rational` have
Jacobian 1 there and no dead zone. Every bounded kind shrinks gradients somewhere: sabour's by 1.54 at the least.

The textbook quotient gives NaN at 0, loses everything below 1e-19 in float32 and overflows at length 256 in float16.
Here lengths are scaled by the largest entry before they are squared, quotients f(r)/r have no singularity, and float16
and bfloat16 calculate in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "Sabour", "Squash", "check_squash", "safe_norm", "squash", "unsquash"]

Squash = str | Callable[[Tensor], Tensor]

KINDS = ("sabour", "tanh", "exp", "rational", "normalize", "identity")

# below this length tanh(r)/r and (1 - e^-r)/r are taken from their series, whose rest is then below 1e-17
_SERIES_BELOW = 1e-2


def squash(
    s: Tensor, kind: Squash = "sabour", dim: int | Sequence[int] = (-2, -1), a: float = 1.0, eps: float = 0.0
) -> Tensor:
    """Change the length of `s` over `dim` to f(length) and keep its direction.

    s     any shape; by default the last two dimensions are one pose `[R, Q]`. For vectors in the last one: `dim=-1`.
    kind  one of `KINDS` (table on top of this file), or a callable `s -> v` of the same shape, that takes its place.
    a     the constant of kind "sabour", above 0; no other kind has one.
    eps   added to the squared length before anything else, as some published code does: Su's is `a=0.5, eps=1e-7`.

    Returns a tensor like `s`. Raises ValueError for an unknown kind, a dimension that `s` has not, integers, a <= 0.

    >>> squash(torch.tensor([3.0, 4.0]), dim=-1)  # length 5 becomes 25/26
    tensor([0.5769, 0.7692])
    """
    if callable(kind):
        v = kind(s)
        if v.shape != s.shape:
            raise ValueError(
                f"the squash {kind!r} turned shape {list(s.shape)} into {list(v.shape)}: it must keep the shape"
            )
        return v
    check_squash("squash", kind)
    if not a > 0 or (a != 1.0 and kind != "sabour"):
        raise ValueError(f"a={a} with squash {kind!r}: only 'sabour' has the constant a, and it must be above 0")
    dim = _check(s, dim, "squash")
    if kind == "identity":
        return s
    if torch.is_grad_enabled() and s.requires_grad and not (torch.compiler.is_compiling() or transformed()):
        return _Squash.apply(s, kind, dim, a, eps)
    return _Squash.forward(s, kind, dim, a, eps)  # the way through apply takes longer than the squash of a few capsules


def transformed() -> bool:
    """Whether this runs inside a transform of torch.func, such as vmap or jvp, or carries derivatives forward."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


class _Squash(torch.autograd.Function):
    """v = g(r) s with g = f(r)/r, and its gradient g dv + (f'(r) - g) e <e, dv> with e = s / r.

    Transforms and compilers differentiate the operations of `forward` instead, which they can see through.

    Only s is saved. The backward is made of differentiable operations, so that derivatives of any order are right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor, kind: str, dim: tuple[int, ...], a: float, eps: float) -> Tensor:
        x = _wide(s)
        if kind == "normalize":
            return _direction(x, dim, eps)[1].to(s.dtype)
        return (x * _gains(_length(x, dim, eps), kind, a)[0]).to(s.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, tuple[int, ...], float, float], output: Tensor) -> None:
        s, *ctx.settings = inputs
        ctx.save_for_backward(s)

    @staticmethod
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor | None, ...]:
        (s,) = ctx.saved_tensors
        return _backward(s, dv, *ctx.settings), None, None, None, None


def squash_backward(s: Tensor, dv: Tensor, kind: Squash) -> Tensor:
    """The gradient of `s` where `dv` is that of `squash(s, kind)`: a formula, or autograd for a callable."""
    known = resolve(kind)
    if known is None:
        with torch.enable_grad():
            x = s.detach().requires_grad_()
            return torch.autograd.grad(squash(x, kind), x, dv)[0]
    name, a, eps = known
    return dv if name == "identity" else _backward(s, dv, name, (-2, -1), a, eps)


def resolve(kind: Squash) -> tuple[str, float, float] | None:
    """(kind, a, eps) of a squash of the family; None for a callable of the caller's own."""
    if isinstance(kind, str):
        return kind, 1.0, 0.0
    return ("sabour", kind.a, kind.eps) if isinstance(kind, Sabour) else None


def why_not_twice(kind: Squash, s: Tensor) -> str | None:
    """Why `squash_backward` would be wrong for a callable, found by trying it on `s`; None where it is right."""
    if not callable(kind) or resolve(kind) is not None or not torch.is_grad_enabled():
        return None
    before = _random_state(s)
    with torch.enable_grad():
        x = s.detach().requires_grad_()
        v = kind(x)
    after = _random_state(s)
    if not torch.equal(before, after):
        torch.cuda.set_rng_state(before, s.device) if s.is_cuda else torch.set_rng_state(before)
        return "draws random numbers"
    seen, todo = set(), [v.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", x) is not x:  # a leaf of the graph, such as a parameter
            return "holds tensors that need gradients"
        todo += [following for following, _ in node.next_functions]
    return None


def _random_state(s: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(s.device) if s.is_cuda else torch.get_rng_state()


def _backward(s: Tensor, dv: Tensor, kind: str, dim: tuple[int, ...], a: float, eps: float) -> Tensor:
    """g dv + (f'(r) - g) e <e, dv>, with g = f(r) / r and e = s / r."""
    r, e = _direction(_wide(s), dim, eps)
    across, along = _gains(r, kind, a)
    dv = _wide(dv)
    return (across * dv + (along - across) * (e * dv).sum(dim, keepdim=True) * e).to(s.dtype)


@dataclass(frozen=True)
class Sabour:
    """Sabour's squash with a constant of its own, for a rule: Su's is `Sabour(a=0.5)`, in his code with `eps=1e-7`."""

    a: float = 1.0
    eps: float = 0.0

    def __call__(self, s: Tensor) -> Tensor:
        return squash(s, "sabour", a=self.a, eps=self.eps)


def check_squash(name: str, kind: Squash) -> None:
    """A ValueError where `kind` is neither of the family nor a callable."""
    if not callable(kind) and kind not in KINDS:
        raise ValueError(f"unknown {name} {kind!r}: take one of {', '.join(KINDS)}, or a callable")


def unsquash(v: Tensor, dim: int | Sequence[int] = (-2, -1)) -> Tensor:
    """The inverse of Sabour's squash: `v / sqrt(n (1 - n))` with n the length of `v`, defined for n < 1.

    The way back loses digits as n nears 1: the relative error grows by (1 + r^2) / 2 for a result of length r (float32:
    1e-4 at r = 10, 2e-2 at r = 100). Lengths above 1 - 1e-6 (float64: 1 - 1e-12) are read as that. The slope at 0 is
    infinite; its gradient there is declared 0. Where the pre-activation is at hand, use it instead.

    Source: Hauser 2019 (products of expert capsules).

    >>> unsquash(squash(torch.tensor([3.0, 4.0]), dim=-1), dim=-1).round(decimals=3)
    tensor([3., 4.])
    """
    dim = _check(v, dim, "unsquash")
    x = _wide(v)
    n, e = _direction(x, dim, 0.0)
    # sqrt(n / (1 - n)) along the direction; the slope of the root is infinite at 0, and overflows just above it
    gone = n < 1e7 * torch.finfo(x.dtype).tiny
    n = n.masked_fill(gone, 0.5).clamp(max=1 - (1e-12 if x.dtype == torch.float64 else 1e-6))
    return (e * (n / (1 - n)).sqrt().masked_fill(gone, 0.0)).to(v.dtype)


def safe_norm(s: Tensor, dim: int | Sequence[int] = (-2, -1), keepdim: bool = False) -> Tensor:
    """Euclidean length over `dim` that neither over- nor underflows, and whose gradient at 0 is 0.

    >>> safe_norm(torch.tensor([3e-30, 4e-30]), dim=-1)
    tensor(5.0000e-30)
    """
    dim = _check(s, dim, "safe_norm")
    x = _wide(s)
    m = _largest(x, dim)  # ||s|| = m ||s / m|| for every m, so m may be a constant to the gradient
    q = (x / m).square().sum(dim, keepdim=True)
    zero = q == 0
    r = (q.masked_fill(zero, 1.0).sqrt() * m).masked_fill(zero, 0.0).to(s.dtype)
    return r if keepdim else r.squeeze(dim)


def _wide(s: Tensor) -> Tensor:
    return s.to(torch.promote_types(s.dtype, torch.float32))


def _length(x: Tensor, dim: tuple[int, ...], eps: float) -> Tensor:
    """r, the length over `dim`, or sqrt(length^2 + eps)."""
    r = safe_norm(x, dim, keepdim=True)
    return torch.hypot(r, torch.full_like(r, eps**0.5)) if eps > 0 else r


def _direction(x: Tensor, dim: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """(r, x / r), 0 where r is 0; without eps both factors of x / m are near 1, whatever the scale of x."""
    if eps > 0:
        r = _length(x, dim, eps)
        return r, x / r
    m = _largest(x, dim)
    y = x / m
    n = safe_norm(y, dim, keepdim=True)
    return n * m.masked_fill(n == 0, 0.0), y / n.masked_fill(n == 0, 1.0)


def _largest(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """The largest magnitude over `dim` as a constant, 1 where all is 0."""
    m = x.detach().abs().amax(dim, keepdim=True)
    return m.masked_fill(m == 0, 1.0)


def _gains(r: Tensor, kind: str, a: float) -> tuple[Tensor, Tensor]:
    """(f(r) / r, f'(r)): how a squash scales what lies across and what lies along s; without a singularity at 0."""
    if kind == "sabour":
        # r / (a + r^2), as t / (1 + a t^2) with t = 1/r above 1, where r^2 could overflow
        large = r > 1
        t = r.masked_fill(~large, 1.0).reciprocal()
        low, high = (a + r.masked_fill(large, 1.0).square()).reciprocal(), (1 + a * t.square()).reciprocal()
        across = torch.where(large, t * high, r * low)
        return across, 2 * a * across * torch.where(large, t.square() * high, low)
    if kind == "rational":
        across = 1 / (1 + r)
        return across, across.square()
    if kind == "normalize":
        # 1/r of a length near the smallest number would overflow in the products that follow: no slope below it
        gone = r < 1e7 * torch.finfo(r.dtype).tiny
        return r.masked_fill(gone, 1.0).reciprocal().masked_fill(gone, 0.0), torch.zeros_like(r)
    small = r < _SERIES_BELOW
    x, y = r.masked_fill(~small, 0.0), r.masked_fill(small, 1.0)
    if kind == "tanh":
        q = x.square()
        series = 1 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315)))
        return torch.where(small, series, y.tanh() / y), 1 - r.tanh().square()
    series = 1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7)))))
    return torch.where(small, series, -torch.expm1(-y) / y), (-r).exp()


def _check(s: Tensor, dim: int | Sequence[int], who: str) -> tuple[int, ...]:
    """The dimensions as a tuple, or a ValueError."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not s.is_floating_point():
        raise ValueError(f"{who} wants floating-point numbers, not {s.dtype}: call .float() first")
    if not dims or any(not -s.dim() <= d < s.dim() for d in dims):
        raise ValueError(
            f"{who} over dim={dims} of a tensor of shape {list(s.shape)}: no such dimension; give dim=-1 for vectors"
        )
    return dims
