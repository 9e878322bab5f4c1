"""Streamed passes in plain PyTorch: a tile of children at a time, whose votes are formed, used and dropped.

A tile comes in two forms with the same three products: parents' tensors against votes, coupled sums of votes, and the
way back into poses and weight. `VotesTile` forms the votes; `FoldedTile`, where all children share one weight, folds
the weight with the parents' side and forms none. Nothing of size N x I x J outlives a tile. Equations: `_passes.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcaps.routing._passes import Children, Detach, Gradients, Round
from torchcaps.squash import safe_norm

__all__ = ["backward_full", "backward_state", "forward"]

TILE_NUMBERS = 2**18
"""Numbers in a tile: 1 MiB in float32, so that a tile stays in the second-level cache."""


def forward(ch: Children, V: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `Passes`."""
    ch = ch.unfolded()
    s = torch.empty_like(V)
    lse = V.new_zeros(V.shape[:2]) if ch.over == "children" else None
    for slab in slabs(ch):
        laid = slab.lay(V)
        if lse is None:
            s[slab.batch] = slab.take(_total(tile.sum(tile.shares(tile.logits(laid))) for tile in slab.tiles()))
        else:
            sums, lse[slab.batch] = _over_children(slab, laid)
            s[slab.batch] = slab.take(sums)
    return s, lse


def _over_children(slab: "Slab", V: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and log-sum-exp of a softmax over children, online: what is there is rescaled when a larger logit comes."""
    so_far: tuple[Tensor, Tensor, Tensor] | None = None  # largest logit, sum of e, sum of e u
    for tile in slab.tiles():
        b = tile.logits(V)
        top = b.amax(slab.child).clamp(min=torch.finfo(b.dtype).min)
        if so_far is not None:
            top = torch.maximum(top, so_far[0])
        e = (b - top.unsqueeze(slab.child)).exp()
        total, sums = e.sum(slab.child), tile.sum(e)
        if so_far is not None:
            keep = (so_far[0] - top).exp()
            total, sums = total + so_far[1] * keep, sums + slab.scale(so_far[2], keep)
        so_far = top, total, sums
    assert so_far is not None
    top, total, sums = so_far
    nobody = total == 0
    total = total.masked_fill(nobody, 1.0)
    return slab.scale(sums, total.reciprocal()), slab.swap((top + total.log()).masked_fill(nobody, 0.0))


def backward_state(ch: Children, r: Round) -> Tensor:
    """See `Passes`."""
    ch = ch.unfolded()
    dV = torch.empty_like(r.V)
    for slab in slabs(ch):
        V, ds, over_children = slab.lay(r.V), slab.lay(r.ds), slab.over_children(r)
        parts = (tile.sum(tile.shares_and_slopes(V, ds, over_children)[1], seen=True) for tile in slab.tiles())
        dV[slab.batch] = slab.take(_total(parts))
    return dV


def _total(parts: Iterator[Tensor]) -> Tensor:
    """The sum of tensors that nobody else holds."""
    total = next(parts)
    for part in parts:
        total.add_(part)
    return total


def backward_full(ch: Children, rounds: list[Round], base: Tensor | None, detach: Detach = "none") -> Gradients:
    """See `Passes`."""
    if ch.windows is not None:
        g = backward_full(ch.unfolded(), rounds, base, detach)
        return replace(g, poses=ch.windows.fold(g.poses, ch.poses.shape[2:-2]))
    votes_see_slopes = detach == "none"
    out = Gradients(
        torch.zeros_like(ch.poses),
        torch.zeros_like(ch.weight),
        None if ch.prior is None else torch.zeros_like(ch.prior),
        None if ch.offset is None else torch.zeros_like(ch.offset),
    )
    for slab in slabs(ch):
        laid = [(slab.lay(r.V), slab.lay(r.ds), slab.over_children(r)) for r in rounds]
        laid_base = None if base is None else slab.lay(base)
        coupled: list[Tensor] = []
        for tile in slab.tiles():
            terms = []
            for V, ds, over_children in laid:
                c, d = tile.shares_and_slopes(V, ds, over_children)
                terms.append((c, ds, False))
                if votes_see_slopes:
                    terms.append((d, V, True))
                if out.prior is not None and detach != "coupling":
                    out.prior[tile.children] += d.sum(0) if slab.folded else d.sum(2)
            sums = tile.send(terms, laid_base, out)
            coupled = [a.add_(b) for a, b in zip(coupled, sums, strict=True)] if coupled else sums
        if slab.folded:
            parents = [K for r in rounds for K in ((r.ds, r.V) if votes_see_slopes else (r.ds,))]
            for y, K in zip(coupled, parents if base is None else [*parents, base], strict=True):
                y = y.unflatten(2, (ch.poses.shape[2], -1))
                out.weight[0] += torch.einsum("njrp,njrq->jpq", y.expand(-1, K.shape[1], -1, -1), K[slab.batch])
    return out


@dataclass(frozen=True)
class Slab:
    """A slice of the batch: how parents' tensors are laid out beside its tiles.

    votes   a tile is `[children, J, Q, R, n]`, shares are `[children, J, n]`, a parents' tensor is `[J, Q, R, n]`: the
            batch is the contiguous lane, so that sums over a pose run over whole lanes.
    folded  where all children share one weight, it is folded with what stands on the parents' side, A_j = V_j W_j^T:
            then b_ij = <x_i, A_j> and s_j = (sum_i c_ij x_i) W_j, and no vote is formed. A tile is
            `[n, children, R P]`, shares are `[n, children, J]`, a parents' tensor is `[n, J, R P]`.
    """

    ch: Children
    batch: slice
    folded: bool

    @property
    def child(self) -> int:
        """The dimension of children in shares."""
        return 1 if self.folded else 0

    @property
    def parent(self) -> int:
        """The dimension of parents in shares."""
        return 2 if self.folded else 1

    def lay(self, K: Tensor) -> Tensor:
        """A parents' tensor `[N, J, R, Q]` as the tiles meet it."""
        K = K[self.batch]
        if self.folded:
            return torch.einsum("njrq,jpq->njrp", K, self.ch.weight[0]).flatten(2)
        return K.permute(1, 3, 2, 0).contiguous()

    def take(self, sums: Tensor) -> Tensor:
        """Sums over the tiles as `[n, J, R, Q]`."""
        if self.folded:
            R = self.ch.poses.shape[2]
            return torch.einsum("njrp,jpq->njrq", sums.unflatten(2, (R, -1)), self.ch.weight[0])
        return sums.permute(3, 0, 2, 1)

    def scale(self, sums: Tensor, factor: Tensor) -> Tensor:
        """Sums times one number per parent."""
        return sums * (factor[:, :, None] if self.folded else factor[:, None, None])

    def swap(self, x: Tensor) -> Tensor:
        """One number per parent, between `[n, J]` and the tiles' layout."""
        return x if self.folded else x.T

    def over_children(self, r: Round) -> tuple[Tensor, Tensor] | None:
        """(log-sum-exp, <s, ds>) of each parent, where the softmax runs over children."""
        if r.lse is None:
            return None
        assert r.s is not None
        rest = (r.s[self.batch] * r.ds[self.batch]).sum((2, 3))
        return self.swap(r.lse[self.batch]).unsqueeze(self.child), self.swap(rest).unsqueeze(self.child)

    def tiles(self) -> "Iterator[Tile]":
        n, I = self.ch.poses[self.batch].shape[:2]
        step = max(1, TILE_NUMBERS // (n * _numbers(self.ch, self.folded)))
        for i in range(0, I, step):
            yield (FoldedTile if self.folded else VotesTile)(self, slice(i, min(i + step, I)))


def slabs(ch: Children, fold: bool = True) -> Iterator[Slab]:
    """Slices of the batch small enough that a tile holds several children."""
    folded = fold and ch.weight.shape[0] == 1 and ch.offset is None and not ch.cosine
    N = ch.poses.shape[0]
    step = max(1, min(N, TILE_NUMBERS // (4 * _numbers(ch, folded))))
    for n in range(0, N, step):
        yield Slab(ch, slice(n, min(n + step, N)), folded)


def _numbers(ch: Children, folded: bool) -> int:
    """Numbers that one child of one example adds to a tile."""
    (_, _, R, P), (_, J, _, Q) = ch.poses.shape, ch.weight.shape
    return R * P + 2 * J if folded else J * Q * R


Term = tuple[Tensor, Tensor, bool]
"""Shares or slopes, the parents' tensor as laid, and whether it meets the votes as the agreement sees them."""


class Tile(ABC):
    """Some children of a slab."""

    def __init__(self, slab: Slab, children: slice):
        self.slab, self.ch, self.children = slab, slab.ch, children
        self.x = self.ch.poses[slab.batch, children]
        self.absent = None  # masked children, in the layout of shares
        if self.ch.mask is not None:
            absent = ~self.ch.mask[slab.batch, children]
            self.absent = absent[:, :, None] if slab.folded else absent.T[:, None]
        self.prior = None
        if self.ch.prior is not None:
            prior = self.ch.prior[children]
            self.prior = prior if slab.folded else prior[:, :, None]

    @abstractmethod
    def dot(self, K: Tensor, seen: bool = False) -> Tensor:
        """<u_ij, K_j>; `seen` takes the votes as the agreement sees them (unit length for cosine)."""

    @abstractmethod
    def sum(self, c: Tensor, seen: bool = False) -> Tensor:
        """sum_i c_ij u_ij."""

    @abstractmethod
    def send(self, terms: list[Term], base: Tensor | None, out: Gradients) -> list[Tensor]:
        """Send du_ij = base_j + the sum over the terms of c_ij K_j into the gradients of poses and weight.

        A folded tile leaves the weight to the end of its slab and returns what that needs: sum_i c_ij x_i of each term.
        """

    def logits(self, V: Tensor) -> Tensor:
        b = self.dot(V, seen=True)
        if self.prior is not None:
            b = b + self.prior
        if self.absent is not None and self.ch.over == "children":
            b = b.masked_fill(self.absent, -math.inf)
        return b

    def shares(self, b: Tensor) -> Tensor:
        """The softmax over parents."""
        dim = self.slab.parent
        if self.ch.leaky:
            J = b.shape[dim]
            b = torch.cat([b, torch.zeros_like(b.narrow(dim, 0, 1))], dim)
            c = b.softmax(dim).narrow(dim, 0, J)
        else:
            c = b.softmax(dim)
        return c if self.absent is None else c.masked_fill(self.absent, 0.0)

    def shares_and_slopes(
        self, V: Tensor, ds: Tensor, over_children: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """(c, d): shares of a round, and the gradient of its logits."""
        b, g = self.logits(V), self.dot(ds)
        if over_children is None:
            c = self.shares(b)
            return c, c * (g - (c * g).sum(self.slab.parent, keepdim=True))
        lse, rest = over_children
        c = (b - lse).exp()
        return c, c * (g - rest)


class VotesTile(Tile):
    """Votes of some children, formed here and gone with the tile."""

    def __init__(self, slab: Slab, children: slice):
        super().__init__(slab, children)
        n, T, R, P = self.x.shape
        _, J, _, Q = self.ch.weight.shape
        self.lanes = self.x.permute(1, 3, 2, 0).reshape(T, P, R * n)
        weight = self.ch.weight if self.ch.weight.shape[0] == 1 else self.ch.weight[children]
        self.w = weight.transpose(2, 3).reshape(-1, J * Q, P).expand(T, -1, -1)
        self.u = torch.bmm(self.w, self.lanes).view(T, J, Q, R, n)
        if self.ch.offset is not None:
            self.u = self.u + _cut(self.ch.offset, slab.batch, children).permute(1, 2, 4, 3, 0)
            if self.absent is not None:
                self.u = self.u.masked_fill(self.absent[:, :, None, None], 0.0)
        self.seen, self.length = self.u, None
        if self.ch.cosine:
            length = safe_norm(self.u, dim=(2, 3), keepdim=True)
            self.length = length.masked_fill(length == 0, math.inf)
            self.seen = self.u / self.length

    def dot(self, K: Tensor, seen: bool = False) -> Tensor:
        return ((self.seen if seen else self.u) * K).sum((2, 3))

    def sum(self, c: Tensor, seen: bool = False) -> Tensor:
        return ((self.seen if seen else self.u) * c[:, :, None, None]).sum(0)

    def send(self, terms: list[Term], base: Tensor | None, out: Gradients) -> list[Tensor]:
        du = (
            torch.zeros_like(self.u)
            if base is None
            else base.expand_as(self.u).clone(memory_format=torch.contiguous_format)
        )
        if self.length is not None:
            through = torch.zeros_like(self.u)
            for c, K, seen in terms:
                if seen:
                    through.addcmul_(c[:, :, None, None], K)
            du += (through - self.seen * (self.seen * through).sum((2, 3), keepdim=True)) / self.length
        for c, K, seen in terms:
            if not seen or self.length is None:
                du.addcmul_(c[:, :, None, None], K)
        self.contract(du, out)
        return []

    def contract(self, du: Tensor, out: Gradients) -> None:
        """The gradient of the votes, `[children, J, Q, R, n]`, into those of poses, weight and offset."""
        if self.absent is not None:
            du.masked_fill_(self.absent[:, :, None, None], 0.0)
        n, T, R, P = self.x.shape
        _, J, Q, _, _ = du.shape
        flat = du.view(T, J * Q, R * n)
        out.poses[self.slab.batch, self.children] = (
            torch.bmm(self.w.transpose(1, 2), flat).view(T, P, R, n).permute(3, 0, 2, 1)
        )
        dw = torch.bmm(flat, self.lanes.transpose(1, 2)).view(T, J, Q, P).transpose(2, 3)
        if self.ch.weight.shape[0] == 1:
            out.weight[0] += dw.sum(0)
        else:
            out.weight[self.children] += dw
        if out.offset is not None:
            part = _cut(out.offset, self.slab.batch, self.children)
            part += du.permute(4, 0, 1, 3, 2).sum_to_size(part.shape)


class FoldedTile(Tile):
    """Children beside parents' tensors that hold the weight: no votes."""

    def __init__(self, slab: Slab, children: slice):
        super().__init__(slab, children)
        self.flat = self.x.flatten(2)

    def dot(self, K: Tensor, seen: bool = False) -> Tensor:
        return torch.bmm(self.flat, K.transpose(1, 2))

    def sum(self, c: Tensor, seen: bool = False) -> Tensor:
        return torch.bmm(c.transpose(1, 2), self.flat)

    def send(self, terms: list[Term], base: Tensor | None, out: Gradients) -> list[Tensor]:
        dx = (
            torch.zeros_like(self.flat) if base is None else base.sum(1, keepdim=True).expand_as(self.flat).contiguous()
        )
        for c, K, _ in terms:
            dx.baddbmm_(c, K)
        out.poses[self.slab.batch, self.children] = dx.view(self.x.shape)
        sums = [self.sum(c) for c, _, _ in terms]
        return sums if base is None else [*sums, self.flat.sum(1, keepdim=True)]


def _cut(x: Tensor, batch: slice, children: slice) -> Tensor:
    """The part of `[N | 1, I | 1, J | 1, R, Q]` that belongs to a tile, as a view."""
    return x[
        batch if x.shape[0] > 1 else slice(None),
        children if x.shape[1] > 1 else slice(None),
    ]
