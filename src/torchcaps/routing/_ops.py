"""The passes as torch operators, so that a compiled graph calls them and does not look inside.

    torchcaps::forward    torchcaps::backward_state    torchcaps::backward_full

An operator takes tensors and plain values only: a `Children` goes in field by field, the backend by its name.
"""

import torch
from torch import Tensor

from torchcaps.routing import _streamed
from torchcaps.routing._passes import Children, Detach, Gradients, Passes, Round
from torchcaps.routing._triton import TritonPasses

__all__ = ["backward_full", "backward_state", "forward"]

_PASSES: dict[str, Passes] = {"streamed": _streamed, "triton": TritonPasses()}


def forward(backend: str, ch: Children, V: Tensor) -> tuple[Tensor, Tensor | None]:
    """(s `[N, J, R, Q]`, lse `[N, J]` or None) of a round from V."""
    s, lse = _forward(backend, *_fields(ch), V)
    return s, lse if ch.over == "children" else None


def backward_state(backend: str, ch: Children, r: Round) -> Tensor:
    """dV `[N, J, R, Q]` of a round."""
    return _backward_state(backend, *_fields(ch), r.V, r.s, r.lse, r.ds)


def backward_full(backend: str, ch: Children, rounds: list[Round], base: Tensor | None, detach: Detach) -> Gradients:
    """Gradients of poses, weight, prior and offset, of all rounds together."""
    columns = [
        [r.V for r in rounds],
        [r.s for r in rounds],
        [r.lse for r in rounds if r.lse is not None],
        [r.ds for r in rounds],
    ]
    poses, weight, prior, offset = _backward_full(backend, *_fields(ch), *columns, base, detach)
    return Gradients(
        poses,
        weight,
        None if ch.prior is None else prior,
        None if ch.offset is None else offset,
    )


def _fields(
    ch: Children,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, bool, str]:
    return (
        ch.poses,
        ch.weight,
        ch.mask,
        ch.prior,
        ch.offset,
        ch.leaky,
        ch.cosine,
        ch.over,
    )


@torch.library.custom_op("torchcaps::forward", mutates_args=())
def _forward(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str, V: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    s, lse = _PASSES[backend].forward(Children(poses, weight, mask, prior, offset, leaky, cosine, over), V)
    return s, V.new_empty(0) if lse is None else lse


@_forward.register_fake
def _(backend, poses, weight, mask, prior, offset, leaky, cosine, over, V):
    return torch.empty_like(V), V.new_empty(V.shape[:2] if over == "children" else 0)


@torch.library.custom_op("torchcaps::backward_state", mutates_args=())
def _backward_state(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str, V: Tensor, s: Tensor, lse: Tensor | None, ds: Tensor,
) -> Tensor:  # fmt: skip
    ch = Children(poses, weight, mask, prior, offset, leaky, cosine, over)
    return _PASSES[backend].backward_state(ch, Round(V, s, lse, ds))


@_backward_state.register_fake
def _(backend, poses, weight, mask, prior, offset, leaky, cosine, over, V, s, lse, ds):
    return torch.empty_like(V)


@torch.library.custom_op("torchcaps::backward_full", mutates_args=())
def _backward_full(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str,
    V: list[Tensor], s: list[Tensor], lse: list[Tensor], ds: list[Tensor], base: Tensor | None, detach: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ch = Children(poses, weight, mask, prior, offset, leaky, cosine, over)
    sums: list[Tensor | None] = [*lse] if lse else [None] * len(V)
    rounds = [Round(*r) for r in zip(V, s, sums, ds, strict=True)]
    g = _PASSES[backend].backward_full(ch, rounds, base, detach)  # type: ignore[arg-type]
    return (
        g.poses,
        g.weight,
        poses.new_empty(0) if g.prior is None else g.prior,
        poses.new_empty(0) if g.offset is None else g.offset,
    )


@_backward_full.register_fake
def _(
    backend,
    poses,
    weight,
    mask,
    prior,
    offset,
    leaky,
    cosine,
    over,
    V,
    s,
    lse,
    ds,
    base,
    detach,
):
    empty = poses.new_empty
    return (
        torch.empty_like(poses),
        torch.empty_like(weight),
        empty(0) if prior is None else torch.empty_like(prior),
        empty(0) if offset is None else torch.empty_like(offset),
    )  # fmt: skip
