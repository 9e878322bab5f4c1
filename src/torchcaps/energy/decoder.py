"""From hidden capsules back to the visible ones: a layer of its own, learned once the experts stand still.

Hauser 2019 (arXiv 1907.11643). With z_i the visible capsule's pose before its squash, and e by the same cosine routing,
in which every visible capsule shares 1 among the hidden ones:

    z_i = m_i + sum_j e_ji (x_j U_ji + o_ji)

The offsets m and o are added here; the source has none. Two ways to learn U, both closed, with a ridge:

    "sum"     min sum |z_i - m_i - sum_j e_ji x_j U_ji|^2      what all capsules say together; o = 0
    "alone"   min sum w_j |z_i - o_ji - x_j U_ji|^2            what each capsule says by itself, over the examples where
                                                               it fires: w_j is its firing probability, or as given;
                                                               m = 0

"sum" rebuilds an image best. "alone" is for images drawn from a single capsule: a capsule that learned in company says
only what the others leave unsaid. In "alone" a capsule that is all zero takes no part, and the shares of the others sum
to 1; in "sum" its cosine is 0 and it keeps a share, as in the source.

The source's own rule is `rule_update`, from the pair (z_i, x_j) and what the layer makes of it, zt_i and xt_j:

    dU_ji = 2 e_ji (x_j^T z_i / (1 + |z_i|^2) - xt_j^T zt_i / (1 + |zt_i|^2))
    zt_i = sum_j e_ji x_j U_ji,   xt_i = squash(zt_i),   xt_j = squash(sum_i e_ji xt_i U_ji^T)

It has a defect: r / (1 + r^2) is the same for r and 1 / r, so that a pose of length r > 1 is learned as one of length
1 / r, or runs away. It is therefore used on poses scaled below length 1, and with a weight decay. (The printed sum for
xt_j runs over j; it must run over i.)
"""

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.energy.experts import PAPER_ROUTING, without_squash
from torchcaps.layers._layer import positive
from torchcaps.routing import Dynamic, combine_transposed
from torchcaps.squash import safe_norm, squash

__all__ = ["CapsuleDecoder"]

Mode = Literal["sum", "alone"]


class CapsuleDecoder(nn.Module):
    """Hidden poses `[N, J, 1, Q]` to visible ones before their squash, `[N, I, 1, P]` (source on top of this file).

    hidden_caps, hidden_pose    J and Q.
    visible_caps, visible_pose  I and P.
    routing                     of hidden capsules, the children here, to visible ones; shares over children.

    Buffers, all 0 until a fit: `weight` `[J, I, Q, P]`, `offset` `[J, I, 1, P]` (o), `base` `[I, 1, P]` (m); and
    `scale`, by which the answer is multiplied, 1 but for the source's rule. `mode` says how it was fitted.

    >>> import torch
    >>> decoder = CapsuleDecoder(4, 6, 5, 3)
    >>> decoder.fit(squash(torch.randn(50, 4, 1, 5)), torch.randn(50, 6, 1, 3))
    >>> decoder(squash(torch.randn(2, 4, 1, 5))).shape
    torch.Size([2, 6, 1, 3])
    """

    def __init__(
        self,
        hidden_caps: int = 20,
        visible_caps: int = 576,
        hidden_pose: int = 16,
        visible_pose: int = 8,
        *,
        routing: Dynamic = PAPER_ROUTING,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        J, I, Q, P = (
            positive(name, "every size", size) for size in (hidden_caps, visible_caps, hidden_pose, visible_pose)
        )
        self.routing = without_squash(name, routing)
        if routing.normalize != "children":
            raise ValueError(
                f"{name}: the hidden capsules share what a visible one hears, so shares must sum to 1 over children: "
                f"give Dynamic.hauser(), not normalize={routing.normalize!r}"
            )
        self.weight: Tensor
        self.offset: Tensor
        self.base: Tensor
        self.scale: Tensor
        self._alone: Tensor
        self.register_buffer("weight", torch.zeros(J, I, Q, P))
        self.register_buffer("offset", torch.zeros(J, I, 1, P))
        self.register_buffer("base", torch.zeros(I, 1, P))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("_alone", torch.zeros((), dtype=torch.bool))

    @property
    def mode(self) -> Mode:
        """ "sum" or "alone"."""
        return "alone" if self._alone else "sum"

    def forward(self, poses: Tensor) -> Tensor:
        """Visible poses `[N, I, 1, P]`, not squashed, of hidden ones `[N, J, 1, Q]`."""
        self._check(poses, None)
        return self.base + self.scale * self._sums(poses)[0]

    @torch.no_grad()
    def fit(
        self,
        poses: Tensor,
        target: Tensor,
        *,
        mode: Mode = "sum",
        affine: bool = True,
        weights: Tensor | None = None,
        ridge: float = 1e-4,
        rounds: int = 2,
        batch_size: int = 100,
    ) -> None:
        """Learn U by least squares, so that `poses` `[N, J, 1, Q]` give `target` `[N, I, 1, P]`.

        mode     "sum" or "alone" (on top of this file).
        affine   learn the offsets as well; False is the source's form.
        weights  `[N, J]` for "alone", 0 or more: how much each capsule cares for each example. None is the length of
                 its pose.
        ridge    relative to the mean square of the numbers that U is multiplied with.
        rounds   of "sum": the shares e follow from U, so that both are found in turn; 1 leaves e uniform.

        Raises ValueError for shapes that do not fit and for a capsule whose weights are all 0.
        """
        self._check(poses, target)
        J, I, Q, P = self.weight.shape
        if mode not in ("sum", "alone"):
            raise ValueError(f"mode={mode!r}: take 'sum' or 'alone'")
        if weights is not None and (mode == "sum" or tuple(weights.shape) != (len(poses), J)):
            raise ValueError(
                f"weights {list(weights.shape)} with mode={mode!r}: they say how much each capsule cares for each "
                f"example when mode='alone', as {[len(poses), J]}"
            )
        for buffer in (self.weight, self.offset, self.base):
            buffer.zero_()
        self.scale.fill_(1.0)
        self._alone.fill_(mode == "alone")
        if mode == "alone":
            weights = safe_norm(poses) if weights is None else weights
            for j in range(J):
                w = weights[:, j]
                if not w.sum() > 0:
                    raise ValueError(
                        f"capsule {j} weighs every example 0: it never fires, and there is nothing it could learn"
                    )
                normal = _Normal(1, Q, I * P, affine, poses)
                normal.add(poses[:, None, j, 0], target.flatten(1)[:, None], w)
                U, offset = normal.solve(ridge)
                self.weight[j] = U.view(Q, I, P).transpose(0, 1)
                self.offset[j] = offset.view(I, 1, P)
            return
        for t in range(rounds if self.routing.iterations > 1 else 1):
            groups = I if t else 1  # uniform shares are alike for all visible capsules, and so is what U hears
            normal = _Normal(groups, J * Q, I * P // groups, affine, poses)
            for batch in torch.arange(len(poses), device=poses.device).split(batch_size):
                x, z = poses[batch].squeeze(-2), target[batch].reshape(len(batch), groups, -1)
                shares = self._sums(poses[batch])[1] if t else x.new_full((len(batch), J, 1), 1 / J)
                normal.add(torch.einsum("nji,njq->nijq", shares, x).flatten(2), z)
            U, base = normal.solve(ridge)  # [groups, J * Q, ...], [groups, ...]
            self.weight.copy_(U.view(groups, J, Q, I // groups, P).permute(1, 0, 3, 2, 4).reshape(J, I, Q, P))
            self.base.copy_(base.view(I, 1, P))

    def rule_update(self, poses: Tensor, target: Tensor) -> Tensor:
        """The source's dU `[J, I, Q, P]`, the mean over a batch, without its rate; `target` is z_i."""
        self._check(poses, target)
        z_again, shares = self._sums(poses)
        poses_again = squash(combine_transposed(squash(z_again), self.weight, shares))
        data, model = _pull(target), _pull(z_again)
        x, x_again = poses.squeeze(-2), poses_again.squeeze(-2)
        up = torch.einsum("nji,njq,nip->jiqp", shares, x, data)
        return 2 * (up - torch.einsum("nji,njq,nip->jiqp", shares, x_again, model)) / len(poses)

    @torch.no_grad()
    def fit_by_rule(
        self,
        poses: Tensor,
        target: Tensor,
        *,
        rate: float = 1.0,
        decay: float = 1e-3,
        epochs: int = 10,
        batch_size: int = 100,
        generator: torch.Generator | None = None,
    ) -> None:
        """Learn U by the source's rule, on targets scaled below length 1 (why: on top of this file).

        rate   what an update is multiplied with.
        decay  the share of U that is forgotten at every update.
        """
        self._check(poses, target)
        self.offset.zero_()
        self.base.zero_()
        self._alone.fill_(False)
        self.scale.fill_(1.05 * safe_norm(target).max().item() or 1.0)
        self.weight.normal_(0.0, self.weight.shape[2] ** -0.5, generator=generator)
        for _ in range(epochs):
            for batch in torch.randperm(len(poses), generator=generator).split(batch_size):
                update = self.rule_update(poses[batch], target[batch] / self.scale)
                self.weight.mul_(1 - decay).add_(update, alpha=rate)

    def _sums(self, poses: Tensor) -> tuple[Tensor, Tensor]:
        """sum_j e_ji (x_j U_ji + o_ji) `[N, I, 1, P]`, and e `[N, J, I]`."""
        present = poses.ne(0).any(-1).squeeze(-1) if self._alone else None
        offset = self.offset if self._alone else None
        routed = self.routing(poses, self.weight, vote_offset=offset, mask=present, return_coupling=True)
        assert routed.coupling is not None
        return routed.poses, routed.coupling

    def _check(self, poses: Tensor, target: Tensor | None) -> None:
        J, I, Q, P = self.weight.shape
        pairs = [("poses", poses, ["N", J, 1, Q])]
        if target is not None:
            pairs.append(("target", target, [len(poses), I, 1, P]))
        for name, tensor, wanted in pairs:
            if tensor.dim() != 4 or list(tensor.shape[1:]) != wanted[1:] or wanted[0] not in ("N", len(tensor)):
                raise ValueError(
                    f"CapsuleDecoder of {J} hidden capsules of {Q} numbers and {I} visible ones of {P} takes {name} "
                    f"{wanted}, not {list(tensor.shape)}"
                )


def _pull(z: Tensor) -> Tensor:
    """z / (1 + |z|^2) `[N, I, P]`."""
    z = z.squeeze(-2)
    return z / (1 + z.square().sum(-1, keepdim=True))


class _Normal:
    """The normal equations of several least squares of one design's form, added up batch by batch.

    groups of them; `columns` of the design; `answers` of the target; with a constant column if `affine`.
    """

    def __init__(self, groups: int, columns: int, answers: int, affine: bool, like: Tensor) -> None:
        self.affine = affine
        D = columns + affine
        self.gram, self.cross = like.new_zeros(groups, D, D), like.new_zeros(groups, D, answers)

    def add(self, design: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """design `[n, groups, columns]`, target `[n, groups, answers]`, weights `[n]` or 1."""
        if self.affine:
            design = torch.cat([design, torch.ones_like(design[..., :1])], -1)
        heard = design if weights is None else weights[:, None, None] * design
        self.gram += torch.einsum("ngd,nge->gde", heard, design)
        self.cross += torch.einsum("ngd,nga->gda", heard, target)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """`[groups, columns, answers]` and the constants `[groups, answers]`."""
        D = self.gram.shape[-1] - self.affine
        penalty = torch.zeros_like(self.gram)
        diagonal = penalty.diagonal(dim1=1, dim2=2)[:, :D]
        diagonal += ridge * self.gram.diagonal(dim1=1, dim2=2)[:, :D].mean(1, keepdim=True)
        answer = torch.linalg.solve(self.gram + penalty, self.cross)
        return answer[:, :D], answer[:, D] if self.affine else torch.zeros_like(answer[:, 0])
