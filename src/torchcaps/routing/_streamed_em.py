"""EM routing without votes in memory: one walk over the children for each round, and one for its derivative.

With the state of the round before as k_j = log a_j - sum_h log sqrt(s2_jh) and w_j = 1 / (2 s2_j), a round is

    b_ij = k_j - sum_h w_jh (u_ijh - mu'_jh)^2      log R = log_softmax_j(b), uniform without a state
    q_ij = a_i exp(log R_ij - top_j)                relative to the parent's largest share, top_j
    p_ij = q_ij / sum_i q_ij                        m_j = exp(top_j) sum_i q_ij
    mu_j = sum_i p_ij u_ij                          s2_j = sum_i p_ij (u_ij - mu_j)^2

s2 is centred: a tile's own mean and scatter are merged with those so far (Chan, Golub, LeVeque 1983), never
E[u^2] - mean^2, which loses every digit where votes agree. As s2 is smallest at mu, its slope by mu is 0, and

    g_ij = <u_ij - mu_j, dmu_j> + <(u_ij - mu_j)^2 - s2_j, ds2_j>
    dlogR_ij = p_ij g_ij + R_ij a_i dm_j            db_ij = dlogR_ij - R_ij sum_k dlogR_ik
    du_ij = p_ij (dmu_j + 2 (u_ij - mu_j) ds2_j) - 2 db_ij w_j (u_ij - mu'_j)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcaps.routing._passes import Children, Gradients
from torchcaps.routing._round import own_precision
from torchcaps.routing._streamed import Slab, VotesTile, slabs

__all__ = ["MOST", "em_moments"]

MOST = 60.0
"""Bound of the exponent of a relative share: only a child of activation 0 can lie above its parent's largest."""

NOBODY = -1e30
"""Largest share, in logarithm, of a parent for whom nobody has spoken yet."""


def em_moments(
    poses: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    offset: Tensor | None,
    activations: Tensor,
    k: Tensor | None,
    mean: Tensor | None,
    precision: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mass `[N, J]`, mean, variance, both `[N, J, R, Q]`) of the votes; the state's three are None in round one."""
    return _Moments.apply(poses, weight, mask, offset, activations, k, mean, precision)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses, weight, mask, offset, activations, k, mean, precision):
        m, mu, s2, mass, top = _forward(poses, weight, mask, offset, activations, k, mean, precision)
        ctx.save_for_backward(poses, weight, mask, offset, activations, k, mean, precision, mu, s2, mass, top)
        return m, mu, s2

    @staticmethod
    def backward(ctx: Any, dm: Tensor, dmu: Tensor, ds2: Tensor):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("streamed EM has no derivative of its derivative: take backend='reference' for that")
        with own_precision(dm):
            poses, weight, offset, da, dk, dmean, dprecision = _backward(*ctx.saved_tensors, dm, dmu, ds2)
        _, _, _, has_offset, _, has_state, *_ = ctx.saved_tensors
        state = (None, None, None) if has_state is None else (dk, dmean, dprecision)
        return poses, weight, None, None if has_offset is None else offset, da, *state


@torch.library.custom_op("torchcaps::em_forward", mutates_args=())
def _forward(
    poses: Tensor, weight: Tensor, mask: Tensor | None, offset: Tensor | None, activations: Tensor,
    k: Tensor | None, mean: Tensor | None, precision: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ch = Children(poses, weight, mask, None, offset)
    (N, _, R, _), (_, J, _, Q) = poses.shape, weight.shape
    mass, top = poses.new_empty(N, J), poses.new_empty(N, J)
    mu, s2 = poses.new_empty(N, J, R, Q), poses.new_empty(N, J, R, Q)
    for slab in slabs(ch, fold=False):
        state = _Laid(slab, k, mean, precision)
        so_far: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # largest share, mass, mean, scatter
        for tile in _tiles(slab):
            a, log_r = _activations(activations, slab, tile), state.log_shares(tile)
            high = log_r.masked_fill(a == 0, NOBODY).amax(0).clamp(min=NOBODY)
            if so_far is not None:
                high = torch.maximum(high, so_far[0])
            q = a * _relative(log_r, high)
            total = q.sum(0)
            at = tile.sum(q) / _safe(total)[:, None, None]
            scatter = (q[:, :, None, None] * (tile.u - at).square()).sum(0)
            if so_far is not None:
                keep = (so_far[0] - high).exp()
                before = so_far[1] * keep
                share, apart = (total / _safe(before + total))[:, None, None], at - so_far[2]
                scatter = scatter + so_far[3] * keep[:, None, None] + apart.square() * share * before[:, None, None]
                at, total = so_far[2] + apart * share, before + total
            so_far = high, total, at, scatter
        assert so_far is not None
        high, total, at, scatter = so_far
        mass[slab.batch], top[slab.batch] = total.T, high.masked_fill(high == NOBODY, 0.0).T
        mu[slab.batch], s2[slab.batch] = slab.take(at), slab.take(scatter / _safe(total)[:, None, None])
    return mass * top.exp(), mu, s2, mass, top


@_forward.register_fake
def _(poses, weight, mask, offset, activations, k, mean, precision):
    (N, _, R, _), (_, J, _, Q) = poses.shape, weight.shape
    one, entry = poses.new_empty(N, J), poses.new_empty(N, J, R, Q)
    return one, entry, torch.empty_like(entry), torch.empty_like(one), torch.empty_like(one)


@torch.library.custom_op("torchcaps::em_backward", mutates_args=())
def _backward(
    poses: Tensor, weight: Tensor, mask: Tensor | None, offset: Tensor | None, activations: Tensor,
    k: Tensor | None, mean: Tensor | None, precision: Tensor | None,
    mu: Tensor, s2: Tensor, mass: Tensor, top: Tensor, dm: Tensor, dmu: Tensor, ds2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ch = Children(poses, weight, mask, None, offset)
    out = Gradients(
        torch.zeros_like(poses), torch.zeros_like(weight), None, None if offset is None else torch.zeros_like(offset)
    )
    da, dk = torch.zeros_like(activations), torch.zeros_like(mass)
    dmean, dprecision = torch.zeros_like(mu), torch.zeros_like(mu)
    rest = (s2 * ds2).sum((2, 3))
    for slab in slabs(ch, fold=False):
        state = _Laid(slab, k, mean, precision)
        at, slope, curve = slab.lay(mu), slab.lay(dmu), slab.lay(ds2)
        high, less, down, total = top[slab.batch].T, rest[slab.batch].T, dm[slab.batch].T, _safe(mass[slab.batch].T)
        sums = [torch.zeros_like(high), torch.zeros_like(at), torch.zeros_like(at)]
        for tile in _tiles(slab):
            a, log_r = _activations(activations, slab, tile), state.log_shares(tile)
            share, off = log_r.exp(), tile.u - at
            e = _relative(log_r, high) / total
            g = (off * (slope + off * curve)).sum((2, 3)) - less
            da[slab.batch, tile.children] = (e * g + share * down).sum(1).T
            du = (a * e)[:, :, None, None] * (slope + 2 * off * curve)
            if k is not None:
                dlog = a * (e * g + share * down)
                db = dlog - share * dlog.sum(1, keepdim=True)
                from_mean = tile.u - state.mean
                pull = db[:, :, None, None] * from_mean
                du -= 2 * state.precision * pull
                sums[0] += db.sum(0)
                sums[1] += pull.sum(0)
                sums[2] -= (pull * from_mean).sum(0)
            tile.contract(du, out)
        if k is not None:
            dk[slab.batch] = sums[0].T
            dmean[slab.batch], dprecision[slab.batch] = slab.take(2 * state.precision * sums[1]), slab.take(sums[2])
    return out.poses, out.weight, poses.new_empty(0) if out.offset is None else out.offset, da, dk, dmean, dprecision


@_backward.register_fake
def _(poses, weight, mask, offset, activations, k, mean, precision, mu, s2, mass, top, dm, dmu, ds2):
    like = torch.empty_like
    return (
        like(poses), like(weight), poses.new_empty(0) if offset is None else like(offset),
        like(activations), like(mass), like(mu), like(mu),
    )  # fmt: skip


class _Laid:
    """The state of the round before, laid out beside the tiles of a slab."""

    def __init__(self, slab: Slab, k: Tensor | None, mean: Tensor | None, precision: Tensor | None):
        self.k = None
        if k is not None:
            assert mean is not None
            assert precision is not None
            self.k, self.mean, self.precision = k[slab.batch].T, slab.lay(mean), slab.lay(precision)

    def log_shares(self, tile: VotesTile) -> Tensor:
        """log R, `[children, J, n]`, -inf for masked children."""
        T, J, _, _, n = tile.u.shape
        if self.k is None:
            b = tile.u.new_zeros(T, J, n)
        else:
            b = self.k - (self.precision * (tile.u - self.mean).square()).sum((2, 3))
        log_r = b.log_softmax(1)
        return log_r if tile.absent is None else log_r.masked_fill(tile.absent, -torch.inf)


def _tiles(slab: Slab) -> Iterator[VotesTile]:
    for tile in slab.tiles():
        assert isinstance(tile, VotesTile)
        yield tile


def _activations(activations: Tensor, slab: Slab, tile: VotesTile) -> Tensor:
    return activations[slab.batch, tile.children].T[:, None]


def _relative(log_r: Tensor, top: Tensor) -> Tensor:
    return (log_r - top).clamp(max=MOST).exp()


def _safe(mass: Tensor) -> Tensor:
    """A mass to divide by: 1 where there is none."""
    return mass.masked_fill(mass == 0, 1.0)
