"""Passes over the children: what a fast backend provides, and what it is handed.

A round of dot-product routing needs of the votes only the sums s_j, and its derivative only sums over children too:

    forward         b_ij = prior_ij + <u_ij, V_j>       c = softmax(b)       s_j = sum_i c_ij u_ij
    backward_state  g_ij = <u_ij, ds_j>                 d_ij = c_ij (g_ij - sum_k c_ik g_ik)
                    dV_j = sum_i d_ij u_ij
    backward_full   du_ij = c_ij ds_j + d_ij V_j        dx_i = sum_j du_ij W_ij^T,  dW_ij = sum_n x_i^T du_ij

With cosine agreement u_ij / |u_ij| stands wherever u_ij meets V. Over children the softmax runs over i; its sum over i
of c g is <s_j, ds_j>, so that one number per parent, the log-sum-exp, is all that has to be remembered of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchcaps.routing._windows import Windows

__all__ = [
    "Children", "Detach", "Gradients", "Passes", "Round",
    "by_window", "flat", "flat_gradient", "uniform", "uniform_gradients", "uniform_share",
]  # fmt: skip

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

    poses: Tensor  # [N, I, R, P], 0 where masked; with windows a map [N, C, *spatial, R, P]
    weight: Tensor  # [I | 1, J, P, Q]
    mask: Tensor | None = None  # [N, I] or [N, C, *spatial]
    prior: Tensor | None = None  # [I, J]
    offset: Tensor | None = None  # [N | 1, I | 1, J | 1, R, Q]
    leaky: bool = False
    cosine: bool = False
    over: str = "parents"
    windows: Windows | None = None

    @property
    def parents(self) -> tuple[int, int, int, int]:
        """(N, J, R, Q) of a parents' tensor, N counting the windows of all examples."""
        N, _, *spatial, R, _ = self.poses.shape
        return (
            N if self.windows is None else N * self.windows.count(spatial),
            self.weight.shape[1], R, self.weight.shape[3],
        )  # fmt: skip

    def unfolded(self) -> "Children":
        """The same with the children of every window in a list of their own."""
        if self.windows is None:
            return self
        mask = self.windows.present(self.poses, self.mask)
        return replace(self, poses=self.windows.unfold(self.poses), mask=mask, windows=None)


@dataclass(frozen=True)
class Round:
    """A round as its derivative needs it: the state it started from, its sums, and the gradient of the sums."""

    V: Tensor  # [N, J, R, Q]
    s: Tensor | None  # [N, J, R, Q], where the softmax runs over children
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
    """The first round from nothing and without prior: s_j = sum_i u_ij times one share, a product or a convolution."""
    if ch.windows is not None and ch.offset is None and len(ch.weight) > 1 and ch.over == "parents":
        return _convolve(ch.poses, ch.weight, ch.windows) * uniform_share(ch)
    ch = ch.unfolded()
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


def uniform_gradients(ch: Children, base: Tensor) -> tuple[Tensor, Tensor]:
    """What du_ij = base_j gives: gradients of poses and weight. The door drops what masked poses get."""
    if ch.windows is not None and len(ch.weight) > 1:
        return _convolve_backward(ch.poses, ch.weight, ch.windows, base)
    if ch.windows is not None:
        down, dw = uniform_gradients(ch.unfolded(), base)
        return ch.windows.fold(down, ch.poses.shape[2:-2]), dw
    if len(ch.weight) == 1:
        down = torch.einsum("njrq,jpq->nrp", base, ch.weight[0])[:, None]
        return down.expand_as(ch.poses), torch.einsum("nrp,njrq->jpq", ch.poses.sum(1), base)[None]
    down = torch.einsum("njrq,ijpq->nirp", base, ch.weight)
    return down, torch.einsum("nirp,njrq->ijpq", ch.poses, base)


def _convolve(poses: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """Sums of the votes in every window of a map: an ordinary convolution, in which a pose's rows are examples and its
    columns channels."""
    N, J, R, Q = len(poses), weight.shape[1], poses.shape[-2], weight.shape[3]
    convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[windows.axes - 1]
    s = convolution(_as_channels(poses), _as_filters(weight, windows), None, windows.stride, windows.padding)
    return s.view(N, R, J, Q, *s.shape[2:]).movedim((1, 2, 3), (-2, -3, -1)).reshape(-1, J, R, Q)


def _convolve_backward(poses: Tensor, weight: Tensor, windows: Windows, base: Tensor) -> tuple[Tensor, Tensor]:
    N, C, *spatial, R, P = poses.shape
    _, J, _, Q = weight.shape
    zeros, ones = [0] * windows.axes, [1] * windows.axes
    g = base.view(N, *windows.out(spatial), J, R, Q).movedim((-2, -3, -1), (1, 2, 3)).flatten(2, 3).flatten(0, 1)
    x, w = _as_channels(poses), _as_filters(weight, windows)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        g, x, w, None, windows.stride, windows.padding, ones, False, zeros, 1, [True, True, False]
    )
    return (
        dx.view(N, R, C, P, *spatial).movedim((1, 3), (-2, -1)),
        dw.view(J, Q, C, P, *windows.kernel).movedim((0, 1, 2, 3), (-3, -1, 0, -2)).reshape(weight.shape),
    )


def _as_channels(poses: Tensor) -> Tensor:
    """`[N, C, *spatial, R, P]` as `[N * R, C * P, *spatial]`."""
    return poses.movedim((-2, -1), (1, 3)).flatten(2, 3).flatten(0, 1)


def _as_filters(weight: Tensor, windows: Windows) -> Tensor:
    """`[C * kernel, J, P, Q]` as `[J * Q, C * P, *kernel]`."""
    w = weight.unflatten(0, (-1, *windows.kernel)).movedim((-3, -1, 0, -2), (0, 1, 2, 3))
    return w.flatten(2, 3).flatten(0, 1)


def flat(ch: Children) -> Children:
    """Children as kernels of two axes read them: a row is a map of height 1; what they cannot read is unfolded."""
    windows = ch.windows
    if windows is None or (windows.axes == 2 and len(ch.weight) > 1):
        return ch
    if windows.axes == 3 or len(ch.weight) == 1:  # volumes, and one weight for all entries of a window
        return ch.unfolded()
    wide = Windows((1, *windows.kernel), (1, *windows.stride), (0, *windows.padding))
    mask = None if ch.mask is None else ch.mask.unsqueeze(2)
    return replace(ch, poses=ch.poses.unsqueeze(2), mask=mask, windows=wide)


def flat_gradient(ch: Children, d_poses: Tensor) -> Tensor:
    """The gradient of the poses of `flat(ch)` as that of the poses of `ch`."""
    if ch.windows is not None and flat(ch).windows is None:
        return ch.windows.fold(d_poses, ch.poses.shape[2:-2])
    return d_poses.view(ch.poses.shape)


def by_window(ch: Children, parents: Tensor) -> Tensor:
    """`[..., N * windows, J, R, Q]` as `[..., N, windows, J, R, Q]`; without windows as it is."""
    if ch.windows is None:
        return parents
    return parents.unflatten(-4, (len(ch.poses), ch.windows.count(ch.poses.shape[2:-2])))


def uniform_share(ch: Children) -> float | Tensor:
    """The share of a first round from nothing: a number, or `[N, 1, 1, 1]` where the mask decides it."""
    if ch.over == "parents":
        return 1 / (ch.weight.shape[1] + ch.leaky)
    mask = ch.mask if ch.windows is None else ch.windows.present(ch.poses, ch.mask)
    if mask is None:
        return 1 / (ch.poses.shape[1] * (1 if ch.windows is None else math.prod(ch.windows.kernel)))
    return mask.sum(1).clamp(min=1).to(ch.poses.dtype).reciprocal()[:, None, None, None]
