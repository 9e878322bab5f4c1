"""Passes over the children: what a fast backend provides, and what it is handed.

A round of dot-product routing needs of the votes only the sums s_j, and its derivative only sums over children too:

    forward         b_ij = prior_ij + <u_ij, V_j>       c = softmax(b)       s_j = sum_i c_ij u_ij
    backward_state  g_ij = <u_ij, ds_j>                 d_ij = c_ij (g_ij - sum_k c_ik g_ik)
                    dV_j = sum_i d_ij u_ij
    backward_full   du_ij = c_ij ds_j + d_ij V_j        dx_i = sum_j du_ij W_ij^T,  dW_ij = sum_n x_i^T du_ij

With cosine agreement u_ij / |u_ij| stands wherever u_ij meets V. Over children the softmax runs over i; its sum over i
of c g is <s_j, ds_j>, so that one number per parent, the log-sum-exp, is all that has to be remembered of it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

__all__ = [
    "Children",
    "Detach",
    "Gradients",
    "Passes",
    "Round",
    "uniform",
    "uniform_share",
]

Detach = Literal["none", "all_but_last", "coupling"]


class Passes(Protocol):
    """The three walks over the children."""

    def forward(self, ch: "Children", V: Tensor) -> tuple[Tensor, Tensor | None]:
        """(s, lse) of a round from V: sums `[N, J, R, Q]`, and the log-sum-exp `[N, J]` where it runs over children."""

    def backward_state(self, ch: "Children", r: "Round") -> Tensor:
        """dV `[N, J, R, Q]` of a round."""

    def backward_full(
        self,
        ch: "Children",
        rounds: "list[Round]",
        base: Tensor | None,
        detach: Detach = "none",
    ) -> "Gradients":
        """Gradients of poses, weight, prior and offset, of several rounds over the same votes at once.

        base    `[N, J, R, Q]`, a gradient that every vote gets besides: the uniform first round's.
        detach  "none"; or what is a constant: "all_but_last", votes in the logits (a prior is not); "coupling", all.
        """


@dataclass(frozen=True)
class Children:
    """What does not change over the rounds of a call. Shapes as in `torchcaps.routing`."""

    poses: Tensor  # [N, I, R, P], 0 where masked
    weight: Tensor  # [I | 1, J, P, Q]
    mask: Tensor | None = None  # [N, I]
    prior: Tensor | None = None  # [I, J]
    offset: Tensor | None = None  # [N | 1, I | 1, J | 1, R, Q]
    leaky: bool = False
    cosine: bool = False
    over: str = "parents"


@dataclass(frozen=True)
class Round:
    """A round as its derivative needs it: the state it started from, its sums, and the gradient of the sums."""

    V: Tensor  # [N, J, R, Q]
    s: Tensor  # [N, J, R, Q]
    lse: Tensor | None  # [N, J], log-sum-exp over children
    ds: Tensor  # [N, J, R, Q]


@dataclass
class Gradients:
    """Gradients of what the caller gave."""

    poses: Tensor
    weight: Tensor
    prior: Tensor | None
    offset: Tensor | None


def uniform(ch: Children) -> Tensor:
    """The first round from nothing and without prior: s_j = sum_i u_ij times one share, a single product."""
    (N, I, R, P), (_, J, _, Q) = ch.poses.shape, ch.weight.shape
    if ch.weight.shape[0] == 1:
        s = torch.einsum("nrp,jpq->njrq", ch.poses.sum(1), ch.weight[0])
    else:
        flat = ch.poses.transpose(1, 2).reshape(N * R, I * P)
        s = (flat @ ch.weight.transpose(1, 2).reshape(I * P, J * Q)).view(N, R, J, Q).transpose(1, 2)
    if ch.offset is not None:
        offset = ch.offset.expand(-1, I, -1, -1, -1)
        s = s + (
            offset.sum(1)
            if ch.mask is None
            else torch.einsum("ni,nijrq->njrq", ch.mask.to(s), offset.expand(N, -1, -1, -1, -1))
        )
    return s * uniform_share(ch)


def uniform_share(ch: Children) -> float | Tensor:
    """The share of a first round from nothing: a number, or `[N, 1, 1, 1]` where the mask decides it."""
    if ch.over == "parents":
        return 1 / (ch.weight.shape[1] + ch.leaky)
    if ch.mask is None:
        return 1 / ch.poses.shape[1]
    return ch.mask.sum(1).clamp(min=1).to(ch.poses.dtype).reciprocal()[:, None, None, None]
