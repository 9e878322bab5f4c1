"""Inverted attention whose capsules have the activations of EM routing: an ablation.

Tsai et al. 2020, section 5, report that "activations as in EM routing" make their routing worse, and do not say how
they were added. Here, with the equations of routing/attention.py for poses and of routing/em.py for activations, h over
all R x Q entries of a pose:

    V_ij = x_i W_ij                                                       votes
    r_ij = exp a_ij / sum_j exp a_ij,    a_ij = scale <p_j, V_ij>         1/J in the first round
    q_ij = r_ij times the child's activation
    s_j  = sum_i q_ij V_ij               p_j  = LayerNorm(s_j)
    m_j  = sum_i q_ij                    mu_j = s_j / m_j
    v_j  = sum_i q_ij (V_ij - mu_j)^2 / m_j + min_variance
    activation_j = sigmoid(inverse_temperature (beta_a_j - sum_h (beta_u_j + log sqrt(v_jh)) m_j))

The state is p. A child of activation 0 equals no child; a parent that nobody votes for has mean 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.routing import Attention, Backend, Routed, Rule, couple, enter

__all__ = ["ActivatedAttention", "activated_attention"]


def activated_attention(
    poses: Tensor,
    weight: Tensor,
    activations: Tensor | None = None,
    *,
    iterations: int = 2,
    scale: float | None = None,
    eps: float = 1e-5,
    inverse_temperature: float = 0.01,
    min_variance: float = 1e-4,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    beta_a: Tensor | None = None,
    beta_u: Tensor | None = None,
    vote_offset: Tensor | None = None,
    mask: Tensor | None = None,
    start: Tensor | None = None,
    child_ids: Tensor | None = None,
    backend: Backend = "auto",
    return_coupling: bool | Literal["all"] = False,
) -> Routed:
    """Route by inverted attention, with activations as in EM routing. The equations stand on top of this file.

    poses, weight, mask, start, child_ids, vote_offset, scale, eps, norm_weight, norm_bias  as in `routing.attention`.
    activations  `[N, I]`, 0 or more; required.
    beta_a, beta_u  `[J]`; None is 0.
    backend      "reference" or "auto", which is the same.

    Returns `Routed`: poses `[N, J, R, Q]`; activations `[N, J]`; coupling r `[N, I, J]`, before multiplication by
    activations; state. Raises ValueError where shapes or settings do not fit.
    """
    if activations is None:
        raise ValueError("activated attention weighs each child by its activation: give activations [N, I]")
    if backend not in ("auto", "reference"):
        raise ValueError(f"backend {backend!r} does not know activated attention: take 'reference' or 'auto'")
    call = enter(
        poses, weight, activations, vote_offset=vote_offset, mask=mask, child_ids=child_ids,
        iterations=iterations, backend=backend, return_coupling=return_coupling,
    )  # fmt: skip
    N, I, J, R, Q = call.sizes
    scale = (R * Q) ** -0.5 if scale is None else scale
    gain, bias = call.tensor("norm_weight", norm_weight, R, Q), call.tensor("norm_bias", norm_bias, R, Q)
    beta_a = call.zeros(J) if beta_a is None else call.tensor("beta_a", beta_a, J)
    beta_u = call.zeros(J) if beta_u is None else call.tensor("beta_u", beta_u, J)
    p = call.tensor("start", start, N, J, R, Q)
    a, rounds = call.activations, []
    assert a is not None
    with call.own_precision():
        V = call.votes()
        for _ in range(iterations):
            logits = call.zeros(N, I, J) if p is None else scale * torch.einsum("nijrq,njrq->nij", V, p)
            r = couple(logits, over="parents", mask=call.mask, child_ids=call.child_ids)
            q = r * a[:, :, None]
            s = torch.einsum("nij,nijrq->njrq", q, V)
            p = s if R * Q == 1 else torch.nn.functional.layer_norm(s, (R, Q), gain, bias, eps)
            rounds.append(r)
        assert p is not None
        m = q.sum(1)
        share = q / m.masked_fill(m == 0, 1.0)[:, None]
        mu = torch.einsum("nij,nijrq->njrq", share, V)
        v = torch.einsum("nij,nijrq->njrq", share, (V - mu[:, None]).square()) + min_variance
        cost = (R * Q * beta_u + v.log().sum((2, 3)) / 2) * m
        active = (inverse_temperature * (beta_a - cost)).sigmoid()
    return call.answer(p, rounds, p, activations=active)


@dataclass(frozen=True)
class ActivatedAttention(Rule):
    """Settings of `activated_attention`, whose keywords the fields are.

    A layer learns the LayerNorm's gain and bias, and beta_a and beta_u, one each per parent.
    """

    iterations: int = 2
    scale: float | None = None
    eps: float = 1e-5
    inverse_temperature: float = 0.01
    min_variance: float = 1e-4

    function: ClassVar[Callable[..., Routed]] = activated_attention
    needs_activations: ClassVar[bool] = True

    @property
    def sums_to(self) -> Literal["parents"]:
        """Each child shares 1 among the parents, before activations."""
        return "parents"

    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        """`norm_weight` at 1 and `norm_bias` at 0, `[R, Q]`; `beta_a` and `beta_u`, `[J]`, at 0."""
        return {
            **Attention(self.iterations).learned(I, J, R, P, Q),
            "beta_a": torch.zeros(J), "beta_u": torch.zeros(J),
        }  # fmt: skip

    def weight_std(self, I: int, J: int, R: int, P: int, Q: int) -> float:
        """That of `Attention`."""
        return Attention(self.iterations).weight_std(I, J, R, P, Q)
