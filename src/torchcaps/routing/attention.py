"""Inverted dot-product attention routing: parents attend to children, and parents compete.

Tsai, Srivastava, Goh, Salakhutdinov 2020, "Capsules with inverted dot-product attention routing", section 3:

    V_ij = x_i W_ij                                     votes
    a_ij = scale <p_j, V_ij>                            agreement with the parent's pose of the round before
    r_ij = exp a_ij / sum_j exp a_ij                    over the parents: the "inverted" softmax
    p_j  = LayerNorm(sum_i r_ij V_ij)                   over rows and columns together

In the first round there is no parent's pose and r_ij = 1/J. Nothing accumulates: the parents' poses are the whole
`state`, so a network can run one round of every layer at a time (concurrent routing): `iterations=1, start=state`.

Open in the paper, named here: `scale` is 1/sqrt(R Q), as in the authors' code (the text has the plain product);
`norm=False` leaves the LayerNorm out (their ablation). A pose of a single number is never normalised, as in their code.
There is no squash and no activation; given activations are ignored.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.routing._backends import choose, situation
from torchcaps.routing._round import Backend, Call, check_iterations, couple, enter
from torchcaps.routing._rounds import Plan, run_rounds, zeros_like
from torchcaps.routing._rule import Rule
from torchcaps.routing._windows import Windows
from torchcaps.types import Routed

__all__ = ["Attention", "attention"]


def attention(
    poses: Tensor,
    weight: Tensor,
    activations: Tensor | None = None,
    *,
    iterations: int = 2,
    scale: float | None = None,
    norm: bool = True,
    eps: float = 1e-5,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    vote_offset: Tensor | None = None,
    mask: Tensor | None = None,
    start: Tensor | None = None,
    child_ids: Tensor | None = None,
    windows: Windows | None = None,
    backend: Backend = "auto",
    return_coupling: bool | Literal["all"] = False,
) -> Routed:
    """Route children to parents by inverted dot-product attention: Tsai et al. 2020, section 3.

    The equations stand on top of the file routing/attention.py.

    poses        `[N, I, R, P]`.
    weight       `[I, J, P, Q]`, or `[1, J, P, Q]` shared by all children.
    activations  `[N, I]` or None; ignored.
    iterations   rounds, 1 or more; the first from nothing is uniform.
    scale        of the agreement; None is 1/sqrt(R Q).
    norm         LayerNorm of the parents' poses; `eps` is added to its variance.
    norm_weight, norm_bias  gain and bias of the LayerNorm, R Q numbers each, as `[R, Q]` or flat; None is 1 and 0.
    vote_offset  `[I | 1, J | 1, R, Q]`, or with a leading N, added to the votes.
    mask         `[N, I]`, True for a child that takes part; what a masked child holds changes nothing.
    start        parents' poses `[N, J, R, Q]` to start from (the `state` of an earlier call).
    child_ids    `[windows, I]`: which child each entry of a window is; the parents of all windows compete for it.
    windows      poses are then a map `[N, C, *spatial, R, P]`, mask too, and each window is an example of its own, its
                 children in the order type, kernel row, kernel column: N counts windows in all other shapes.
    backend      "reference", the equations on all votes at once; "streamed", a tile of children at a time, without
                 votes in memory; "native", compiled kernels for the CPU; "triton", kernels for CUDA; "auto" picks by
                 device and size.
    return_coupling  True for the last round's coupling, "all" for every round's.

    Returns `Routed`: poses `[N, J, R, Q]`; no activations; coupling `[N, I, J]`, or `[T, N, I, J]` for "all"; state.
    Raises ValueError where shapes or settings do not fit.

    >>> attention(torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4)).poses.shape
    torch.Size([2, 3, 4, 4])
    """
    call = enter(
        poses, weight, activations, vote_offset=vote_offset, mask=mask, child_ids=child_ids, windows=windows,
        iterations=iterations, backend=backend, return_coupling=return_coupling,
    )  # fmt: skip
    N, _, J, R, Q = call.sizes
    if isinstance(scale, Tensor):
        raise ValueError(
            "scale is a tensor, but must be a number: a scale that learns is the norm_weight of the parents"
        )
    step = AttentionStep((R * Q) ** -0.5 if scale is None else scale, norm and R * Q > 1, eps)
    gains: tuple[Tensor, ...] = ()
    if norm_weight is not None or norm_bias is not None:
        gains = (
            _gain("norm_weight", norm_weight, call, 1.0),
            _gain("norm_bias", norm_bias, call, 0.0),
        )
    start = call.tensor("start", start, N, J, R, Q)
    equations = functools.partial(_reference, T=iterations, step=step)
    with call.own_precision():
        chosen = choose(backend, situation(call, backend))
        if chosen == "reference":
            return call.answer(*equations(call, None, start, gains))
        return call.answer(*run_rounds(Plan(iterations, step, equations, chosen), call, None, start, gains))


def _reference(
    call: Call,
    prior: None,
    p: Tensor | None,
    gains: tuple[Tensor, ...],
    *,
    T: int,
    step: "AttentionStep",
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The equations, line by line: the parents, every round's coupling, and p, the state, which is the parents too."""
    call = call.unfolded()
    N, I, J, _, _ = call.sizes
    V = call.votes()
    rounds = []
    for t in range(1, T + 1):
        a = call.zeros(N, I, J) if p is None else step.scale * torch.einsum("nijrq,njrq->nij", V, p)
        r = couple(a, over="parents", mask=call.mask, child_ids=call.child_ids)
        p, _ = step(torch.einsum("nij,nijrq->njrq", r, V), p, t == T, gains)
        rounds.append(r)
    assert p is not None
    return p, rounds, p


@dataclass(frozen=True)
class AttentionStep:
    """From the sums of a round to the parents, which are the state: p_j = LayerNorm(s_j), or s_j."""

    scale: float
    norm: bool
    eps: float

    def __call__(self, s: Tensor, p: Tensor | None, last: bool, gains: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(the state after the round, the parents' poses)."""
        if self.norm:
            gain, bias = gains or (None, None)
            s = torch.nn.functional.layer_norm(s, s.shape[2:], gain, bias, self.eps)
        return s, s

    def backward(
        self,
        s: Tensor,
        p: Tensor | None,
        last: bool,
        gains: tuple[Tensor, ...],
        dp: Tensor,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Gradients of s, of the state before the round (none), and of gain and bias."""
        if last:
            dp = dp + dv
        if not self.norm:
            return dp, zeros_like(dp), tuple(torch.zeros_like(g) for g in gains)
        gain, bias = gains or (None, None)
        _, mean, per_sd = torch.native_layer_norm(s, s.shape[2:], gain, bias, self.eps)
        ds, *dgains = torch.ops.aten.native_layer_norm_backward(
            dp, s, s.shape[2:], mean, per_sd, gain, bias, [True, bool(gains), bool(gains)]
        )
        return ds, zeros_like(dp), tuple(dgains) if gains else ()


def _gain(name: str, value: Tensor | None, call: Call, default: float) -> Tensor:
    _, _, _, R, Q = call.sizes
    if value is None:
        return call.poses.new_full((R, Q), default)
    if value.dim() == 1 and value.numel() == R * Q:
        value = value.reshape(R, Q)
    return call.tensor(name, value, R, Q)


@dataclass(frozen=True)
class Attention(Rule):
    """Settings of `attention`, whose keywords the fields are. A layer learns the LayerNorm's gain and bias."""

    iterations: int = 2
    scale: float | None = None
    norm: bool = True
    eps: float = 1e-5

    function: ClassVar[Callable[..., Routed]] = attention
    reads_maps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_iterations(self.iterations)

    @classmethod
    def tsai(cls, iterations: int = 2) -> "Attention":
        """As in Tsai et al. 2020 and its code: scaled agreement, LayerNorm, two rounds."""
        return cls(iterations=iterations)

    @property
    def sums_to(self) -> Literal["parents"]:
        """Each child shares 1 among the parents."""
        return "parents"

    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        """`norm_weight` at 1 and `norm_bias` at 0, `[R, Q]`; nothing without LayerNorm."""
        if not self.norm or R * Q == 1:
            return {}
        return {"norm_weight": torch.ones(R, Q), "norm_bias": torch.zeros(R, Q)}

    def weight_std(self, I: int, J: int, R: int, P: int, Q: int) -> float:
        """sqrt(J / (P I)), as in the authors' code: for children of unit variance the first sum has variance 1/J."""
        return float((J / (P * I)) ** 0.5)
