"""EM routing: every parent is a Gaussian cluster of votes.

Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", procedure 1. With h over all R x Q entries of a pose:

    V_ij = x_i W_ij                                                        votes
    R_ij = 1 / number of parents                                           before the first round
    repeat for t = 0 .. T-1 (no E-step after the last):
        q_ij = R_ij a_i                                                    M-step, for each parent j
        m_j  = sum_i q_ij
        mu_j = sum_i q_ij V_ij / m_j
        s2_j = sum_i q_ij (V_ij - mu_j)^2 / m_j + min_variance
        cost_j = sum_h (beta_u_j + log sqrt(s2_jh)) m_j
        a_j  = sigmoid(lambda_t (beta_a_j - cost_j)),   lambda_t = final_lambda (1 - 0.95^(t+1))
        R_ij = a_j p_ij / sum_k a_k p_ik                                   E-step, for each child i
        log p_ij = - sum_h (V_ijh - mu_jh)^2 / (2 s2_jh) - sum_h log sqrt(s2_jh)    (+ a constant that cancels)

The E-step runs in log space. A child with activation 0 equals no child; a parent that nobody votes for has mean 0,
variance `min_variance` and activation sigmoid(lambda_t beta_a). Gradients run through all rounds.

Added to the paper: `min_variance`, since a parent with a single child has variance 0. Where windows of a convolution
share children, the sum over k runs over the parents of all of them (`child_ids`), as the paper defines it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps.routing._backends import choose, situation
from torchcaps.routing._round import Backend, Call, check_iterations, couple, enter
from torchcaps.routing._rule import Rule
from torchcaps.routing._streamed_em import MOST, em_moments
from torchcaps.types import Routed

__all__ = ["EM", "EMState", "em"]


class EMState(NamedTuple):
    """What EM's next round needs."""

    mean: Tensor
    """`[N, J, R, Q]`, mu."""
    variance: Tensor
    """`[N, J, R, Q]`, s2."""
    activation_logits: Tensor
    """`[N, J]`, log(a / (1 - a)): the activation itself would round to 0 or 1 and lose its logarithm."""
    round: int
    """Rounds run so far: lambda goes on from there."""


def em(
    poses: Tensor,
    weight: Tensor,
    activations: Tensor | None = None,
    *,
    iterations: int = 3,
    final_lambda: float = 0.01,
    min_variance: float = 1e-4,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
    vote_offset: Tensor | None = None,
    mask: Tensor | None = None,
    start: EMState | None = None,
    child_ids: Tensor | None = None,
    backend: Backend = "auto",
    return_coupling: bool | Literal["all"] = False,
) -> Routed:
    """Route children to parents by expectation-maximisation: Hinton, Sabour, Frosst 2018, procedure 1.

    The equations stand on top of the file routing/em.py.

    poses         `[N, I, R, P]`.
    weight        `[I, J, P, Q]`, or `[1, J, P, Q]` shared by all children.
    activations   `[N, I]`, 0 or more; required: a child counts as much as its activation.
    iterations    T, 1 or more.
    final_lambda  inverse temperature that lambda_t nears from below.
    min_variance  added to every variance, in squared units of the votes; above 0.
    beta_a        `[J]`, the activation's threshold; None is 0.
    beta_u        `[J]`, cost of a vote; None is 0.
    vote_offset   `[I | 1, J | 1, R, Q]`, or with a leading N, added to the votes: coordinate addition.
    mask          `[N, I]`, True for a child that takes part; what a masked child holds changes nothing.
    start         the `state` of an earlier call.
    child_ids     `[windows, I]`: which child each entry of a window is; the parents of all windows compete for it.
    backend       "reference", the equations on all votes at once; "streamed", a tile of children at a time, without
                  votes in memory; "auto" picks by size.
    return_coupling  True for the last round's coupling, "all" for every round's.

    Returns `Routed`: poses `[N, J, R, Q]`, the means; activations `[N, J]`; coupling R `[N, I, J]` before
    multiplication by activations, or `[T, N, I, J]` for "all"; the state (`EMState`).
    Raises ValueError where shapes or settings do not fit, or activations are missing.

    >>> em(torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4), torch.rand(2, 6)).activations.shape
    torch.Size([2, 3])
    """
    if activations is None:
        raise ValueError("EM routing weighs each child by its activation, but there are none: give activations [N, I]")
    if not min_variance > 0:
        raise ValueError(f"min_variance={min_variance} must be above 0: a parent with a single child has variance 0")
    call = enter(
        poses, weight, activations, vote_offset=vote_offset, mask=mask, child_ids=child_ids,
        iterations=iterations, backend=backend, return_coupling=return_coupling,
    )  # fmt: skip
    J = call.sizes[2]
    beta_a = call.zeros(J) if beta_a is None else call.tensor("beta_a", beta_a, J)
    beta_u = call.zeros(J) if beta_u is None else call.tensor("beta_u", beta_u, J)
    moments = (
        _moments if choose(backend, situation(call, backend, kernels_know=False)) == "reference" else _streamed_moments
    )
    with call.own_precision():
        state, rounds = _rounds(
            call, moments, iterations, final_lambda, min_variance, beta_a, beta_u, _check_start(call, start)
        )
        return call.answer(state.mean, rounds, state, activations=state.activation_logits.sigmoid())


Moments = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Mass `[N, J]`, mean and variance `[N, J, R, Q]` of the votes of each parent, and the coupling where it is held."""


def _rounds(
    call: Call,
    moments: Callable[[Call, EMState | None], Moments],
    T: int,
    final_lambda: float,
    min_variance: float,
    beta_a: Tensor,
    beta_u: Tensor,
    state: EMState | None,
) -> tuple[EMState, list[Tensor]]:
    """The equations, line by line, but for the sums over children: those are `moments`."""
    _, _, _, R, Q = call.sizes
    assert call.activations is not None
    # activations relative to the loudest child's: only their ratios make means and variances
    loudest = call.activations.detach().amax(1, keepdim=True)
    loudest = loudest.masked_fill(loudest == 0, 1.0)
    call = replace(call, activations=call.activations / loudest)
    rounds = []
    first = 0 if state is None else state.round
    for t in range(first, first + T):
        m, mu, s2, r = moments(call, state)
        m = m * loudest
        s2 = s2 + min_variance
        cost = (R * Q * beta_u + s2.log().sum((2, 3)) / 2) * m
        lam = final_lambda * (1 - 0.95 ** (t + 1))
        state = EMState(mu, s2, lam * (beta_a - cost), t + 1)
        if r is not None:
            rounds.append(r)
    assert state is not None
    return state, rounds


def _moments(call: Call, state: EMState | None) -> Moments:
    """The E-step and the sums of the M-step, on all votes at once.

    Shares are taken relative to each parent's largest, q_ij = a_i exp(log R_ij - max_i log R_ij): where a tight parent
    leaves a loose one shares of e^-100 alone, the loose one still has its mean, which float32 could not divide out.
    """
    N, I, J, _, _ = call.sizes
    a, V = call.activations, call.votes()
    assert a is not None
    if state is None:
        b = call.zeros(N, I, J)
    else:
        mu, s2, logit, _ = state
        log_p = -((V - mu[:, None]).square() / (2 * s2[:, None])).sum((3, 4)) - (s2.log().sum((2, 3)) / 2)[:, None]
        b = torch.nn.functional.logsigmoid(logit)[:, None] + log_p
    log_r = couple(b, over="parents", mask=call.mask, child_ids=call.child_ids, log=True)
    top = log_r.detach().masked_fill((a == 0)[:, :, None], -torch.inf).amax(1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    q = a[:, :, None] * (log_r - top).clamp(max=MOST).exp()
    m = q.sum(1)
    w = q / m.masked_fill(m == 0, 1.0)[:, None]
    mu = torch.einsum("nij,nijrq->njrq", w, V)
    s2 = torch.einsum("nij,nijrq->njrq", w, (V - mu[:, None]).square())
    return m * top[:, 0].exp(), mu, s2, log_r.exp()


def _streamed_moments(call: Call, state: EMState | None) -> Moments:
    """The same, gathered a tile of children at a time (`_streamed_em.py`)."""
    k = mean = precision = None
    if state is not None:
        k = torch.nn.functional.logsigmoid(state.activation_logits) - state.variance.log().sum((2, 3)) / 2
        mean, precision = state.mean, 0.5 / state.variance
    assert call.activations is not None
    m, mu, s2 = em_moments(call.poses, call.weight, call.mask, call.vote_offset, call.activations, k, mean, precision)
    return m, mu, s2, None


def _check_start(call: Call, start: EMState | None) -> EMState | None:
    if start is None:
        return None
    if not isinstance(start, EMState):
        raise ValueError(f"EM starts from the EMState of an earlier call, not from a {type(start).__name__}")
    N, _, J, R, Q = call.sizes
    return EMState(
        call.tensor("start.mean", start.mean, N, J, R, Q),
        call.tensor("start.variance", start.variance, N, J, R, Q),
        call.tensor("start.activation_logits", start.activation_logits, N, J),
        start.round,
    )


@dataclass(frozen=True)
class EM(Rule):
    """Settings of `em`, whose keywords the fields are. A layer learns beta_a and beta_u, one each per parent."""

    iterations: int = 3
    final_lambda: float = 0.01
    min_variance: float = 1e-4

    function: ClassVar[Callable[..., Routed]] = em
    needs_activations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_iterations(self.iterations)
        if not self.min_variance > 0:
            raise ValueError(f"min_variance={self.min_variance} must be above 0")

    @classmethod
    def hinton(cls, iterations: int = 3) -> "EM":
        """As in Hinton, Sabour, Frosst 2018, with lambda nearing 0.01."""
        return cls(iterations=iterations)

    @property
    def sums_to(self) -> Literal["parents"]:
        """Each child shares 1 among the parents, before activations."""
        return "parents"

    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        """`beta_a` and `beta_u`, `[J]`, at 0."""
        return {"beta_a": torch.zeros(J), "beta_u": torch.zeros(J)}

    def weight_std(self, I: int, J: int, R: int, P: int, Q: int) -> float:
        """Keeps the length of poses through a stack; the routing itself does not see their scale, `min_variance` apart.

        The mean of I votes of random direction is sqrt(I) times shorter than one of them. After one round that is the
        parent: sqrt(I / Q) makes it as long as a child. Later rounds leave a parent with the few votes that agree, and
        the same weights made poses 100 to 4000 times longer over 6 layers; the middle way of I^(1/4) / sqrt(Q) stays
        within a factor of 20 either way, measured.
        """
        return float(I ** (0.5 if self.iterations == 1 else 0.25) / Q**0.5)
