"""The passes as torch operators, so that a compiled graph calls them and does not look inside.

    torchcaps::sum    torchcaps::forward    torchcaps::backward_state    torchcaps::backward_full

Results are contiguous, whatever the strides of what went in: a compiled graph relies on that. An operator takes tensors
and plain values only: a `Children` goes in field by field, its windows as one list of numbers, the backend by its name.
"""

import torch
from torch import Tensor

from torchcaps.routing import _passes, _streamed
from torchcaps.routing._native import NativePasses
from torchcaps.routing._passes import Children, Detach, Gradients, Passes, Round
from torchcaps.routing._triton import TritonPasses
from torchcaps.routing._windows import Windows

__all__ = ["backward_full", "backward_state", "forward", "uniform"]

_NATIVE = NativePasses()
_PASSES: dict[str, Passes] = {"streamed": _streamed, "native": _NATIVE, "triton": TritonPasses()}


def uniform(backend: str, ch: Children) -> Tensor:
    """s `[N, J, R, Q]` of a first round from nothing."""
    if backend == "native" and ch.over == "parents" and ch.offset is None:  # faster than the products of torch
        return _sum(ch.poses, ch.weight, ch.mask, _numbers(ch.windows)) * _passes.uniform_share(ch)
    return _passes.uniform(ch)


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
        [r.s for r in rounds if r.s is not None],
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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, bool, str, list[int]]:
    return ch.poses, ch.weight, ch.mask, ch.prior, ch.offset, ch.leaky, ch.cosine, ch.over, _numbers(ch.windows)


def _numbers(windows: Windows | None) -> list[int]:
    return [] if windows is None else [*windows.kernel, *windows.stride, *windows.padding]


def _windows(numbers: list[int]) -> Windows | None:
    axes = len(numbers) // 3
    return Windows(*(tuple(numbers[i * axes : (i + 1) * axes]) for i in range(3))) if numbers else None


@torch.library.custom_op("torchcaps::sum", mutates_args=())
def _sum(poses: Tensor, weight: Tensor, mask: Tensor | None, windows: list[int]) -> Tensor:
    return _NATIVE.sum(Children(poses, weight, mask, windows=_windows(windows))).contiguous()


@_sum.register_fake
def _(poses, weight, mask, windows):
    return poses.new_empty(Children(poses, weight, mask, windows=_windows(windows)).parents)


@torch.library.custom_op("torchcaps::forward", mutates_args=())
def _forward(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str, windows: list[int], V: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ch = Children(poses, weight, mask, prior, offset, leaky, cosine, over, _windows(windows))
    s, lse = _PASSES[backend].forward(ch, V)
    return s.contiguous(), V.new_empty(0) if lse is None else lse.contiguous()


@_forward.register_fake
def _(backend, poses, weight, mask, prior, offset, leaky, cosine, over, windows, V):
    return V.new_empty(V.shape), V.new_empty(V.shape[:2] if over == "children" else 0)


@torch.library.custom_op("torchcaps::backward_state", mutates_args=())
def _backward_state(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str, windows: list[int],
    V: Tensor, s: Tensor | None, lse: Tensor | None, ds: Tensor,
) -> Tensor:  # fmt: skip
    ch = Children(poses, weight, mask, prior, offset, leaky, cosine, over, _windows(windows))
    return _PASSES[backend].backward_state(ch, Round(V, s, lse, ds)).contiguous()


@_backward_state.register_fake
def _(backend, poses, weight, mask, prior, offset, leaky, cosine, over, windows, V, s, lse, ds):
    return V.new_empty(V.shape)


@torch.library.custom_op("torchcaps::backward_full", mutates_args=())
def _backward_full(
    backend: str, poses: Tensor, weight: Tensor, mask: Tensor | None, prior: Tensor | None, offset: Tensor | None,
    leaky: bool, cosine: bool, over: str, windows: list[int],
    V: list[Tensor], s: list[Tensor], lse: list[Tensor], ds: list[Tensor], base: Tensor | None, detach: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ch = Children(poses, weight, mask, prior, offset, leaky, cosine, over, _windows(windows))
    nothing: list[Tensor | None] = [None] * len(V)
    rounds = [Round(*r) for r in zip(V, s or nothing, lse or nothing, ds, strict=True)]
    g = _PASSES[backend].backward_full(ch, rounds, base, detach)  # type: ignore[arg-type]
    return (
        g.poses.contiguous(),
        g.weight.contiguous(),
        poses.new_empty(0) if g.prior is None else g.prior.contiguous(),
        poses.new_empty(0) if g.offset is None else g.offset.contiguous(),
    )


@_backward_full.register_fake
def _(
    backend, poses, weight, mask, prior, offset, leaky, cosine, over, windows, V, s, lse, ds, base, detach
):  # fmt: skip
    empty = poses.new_empty
    return (
        empty(poses.shape),
        empty(weight.shape),
        empty(0) if prior is None else empty(prior.shape),
        empty(0) if offset is None else empty(offset.shape),
    )  # fmt: skip
