"""The likelihood of expert capsules, exactly where that is possible: for few capsules, or on a finite set of states.

With F the free energy and V = (pi^(P/2) / Gamma(P/2 + 1))^I the volume of I unit balls of P numbers:

    log P(x) = - F(x) - log Z
    Z = sum over states of exp(-F)                 where the visible capsules take finitely many states
    Z = integral over the balls of exp(-F)         else; closed for a coupling c that is a constant and J = 1 or 2

    A_j,ik = c_ij c_kj W_ij W_kj^T                 |z_j|^2 = sum_ik x_i A_j,ik x_k^T
    m(A) = sum_i tr A_ii / (P + 2)                 the mean of |z|^2 over the balls
    J = 1:  Z / V = 1 + m(A)
    J = 2:  Z / V = 1 + m(A) + m(B) + sum_i (tr A_ii tr B_ii + 2 tr A_ii B_ii) / ((P + 2) (P + 4))
                                    + sum_{i != k} (tr A_ii tr B_kk + 2 tr A_ik B_ik^T) / (P + 2)^2

For more capsules there is annealed importance sampling (Neal 2001): from the uniform law, whose Z is V, through
exp(-beta F) with beta from 0 to 1, by HMC.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.energy.experts import ExpertCapsules
from torchcaps.energy.sampling import hmc, uniform_in_balls
from torchcaps.types import whole

__all__ = [
    "LogPartition", "annealed_log_partition", "exact_log_partition", "firing_patterns", "log_joint",
    "log_probability_of_states", "log_volume",
]  # fmt: skip

MOST_PATTERNS = 1 << 20
MOST_CAPSULES = 20


class LogPartition(NamedTuple):
    """An estimate of log Z.

    log_z           the logarithm of the mean weight of all chains.
    standard_error  of log_z, from the weights' spread.
    acceptance      share of HMC's proposals that were kept.
    """

    log_z: float
    standard_error: float
    acceptance: float


def firing_patterns(caps: int) -> Tensor:
    """Every way in which `caps` capsules can fire, `[2^caps, caps]` of 0 and 1, the last capsule changing fastest."""
    if not 1 <= (whole(caps) or 0) <= MOST_CAPSULES:
        raise ValueError(f"{caps} capsules fire in 2^{caps} ways: enumeration is for 1 to {MOST_CAPSULES} of them")
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=caps)))


def log_joint(model: ExpertCapsules, states: Tensor, coupling: Tensor | None = None) -> Tensor:
    """- E(x, h) = log P(x, h) + log Z of every visible state and every firing pattern, `[N, 2^J]`.

    states    visible capsules `[N, I, 1, P]`.
    coupling  `[N, I, J]`, or None for the model's routing.
    """
    log_odds = model.log_odds(model.up(states, coupling)[0])
    patterns = firing_patterns(model.out_caps).to(log_odds)
    # not a matrix product: a silent capsule adds 0, even where its log odds are -inf
    return torch.where(patterns[None] > 0, log_odds[:, None], torch.zeros_like(log_odds[:, None])).sum(-1)


def log_probability_of_states(model: ExpertCapsules, states: Tensor, coupling: Tensor | None = None) -> Tensor:
    """log P(x) `[N]` where the visible capsules can be in these N `states` `[N, I, 1, P]` and in no others."""
    log_p = -model.free_energy(states, coupling)
    return log_p - log_p.logsumexp(0)


def log_volume(caps: int, pose: int) -> float:
    """log V of `caps` unit balls of `pose` numbers."""
    return caps * (pose / 2 * math.log(math.pi) - math.lgamma(pose / 2 + 1))


def exact_log_partition(model: ExpertCapsules, coupling: Tensor) -> Tensor:
    """log Z over the product of the balls, differentiable in the weight, for a constant coupling `[I, J]` and J <= 2.

    Raises ValueError for more capsules and for models with a centre or numbers on a line.
    """
    _check_coupling(model, coupling)
    if model.out_caps > 2 or model.line or bool(model.centre.any()):
        raise ValueError(
            f"log Z is closed for 1 or 2 capsules without centre and line, not for {model.out_caps} with "
            f"line={model.line}{' and a centre' if bool(model.centre.any()) else ''}: annealed_log_partition "
            "estimates it for all"
        )
    P = model.in_pose[1]
    weight = model.weight if model.bias is None else model.weight * (model.bias / 2).exp()[:, None, None]
    weight = coupling[:, :, None, None] * weight
    forms = torch.einsum("ijpq,kjrq->jikpr", weight, weight)  # A_j,ik
    traces = forms.diagonal(dim1=1, dim2=2).diagonal(dim1=1, dim2=2).sum(-1)  # tr A_j,ii, [J, I]
    z = 1 + traces.sum() / (P + 2)
    if model.out_caps == 2:
        (s, t), (A, B) = traces, forms
        both = torch.outer(s, t) + 2 * (A * B).sum((-2, -1))
        same = both.diagonal().sum()
        z = z + same / ((P + 2) * (P + 4)) + (both.sum() - same) / (P + 2) ** 2
    return z.log() + log_volume(model.in_caps, P)


@torch.no_grad()
def annealed_log_partition(
    model: ExpertCapsules,
    coupling: Tensor,
    *,
    temperatures: int = 50,
    chains: int = 256,
    steps: int = 5,
    step_size: float = 0.3,
    generator: torch.Generator | None = None,
) -> LogPartition:
    """An estimate of log Z over the product of the balls for a constant coupling `[I, J]`, any number of capsules.

    temperatures  steps of beta from 0 to 1.
    chains        independent runs, whose weights are averaged.
    steps, step_size  of HMC, one proposal per temperature.

    exp(log_z) is right on average for any settings; more temperatures make it steadier. Where the weights are so
    uneven that few chains hold most of the sum, the standard error is itself too small to be trusted.
    """
    _check_coupling(model, coupling)
    for name, value in (("temperatures", temperatures), ("chains", chains)):
        if (whole(value) or 0) < 2:
            raise ValueError(f"{name}={value!r} must be a whole number of 2 or more")
    I, P = model.in_caps, model.in_pose[1]
    x = uniform_in_balls(chains, I, P, generator=generator, dtype=model.weight.dtype)
    shares = coupling.to(x).expand(chains, -1, -1)
    log_weights, kept = torch.zeros(chains, dtype=torch.float64), []
    for t in range(1, temperatures + 1):
        log_weights -= model.free_energy(x, shares).double() / temperatures
        if t < temperatures:
            beta = t / temperatures

            def tempered(x: Tensor, beta: float = beta) -> Tensor:
                return -beta * model.free_energy(x, shares)

            chain = hmc(tempered, x, step_size=step_size, steps=steps, generator=generator)
            x = chain.visible
            kept.append(chain.acceptance)
    log_mean = log_weights.logsumexp(0) - math.log(chains)
    spread = (log_weights - log_mean).exp().std().item()
    return LogPartition(log_mean.item() + log_volume(I, P), spread / chains**0.5, sum(kept) / len(kept))


def _check_coupling(model: ExpertCapsules, coupling: Tensor) -> None:
    wanted = (model.in_caps, model.out_caps)
    if tuple(coupling.shape) != wanted:
        raise ValueError(
            f"coupling {list(coupling.shape)} must be a constant {list(wanted)}, one share for each pair of capsules: "
            "routing of a single example gives one, coupling[0]"
        )
