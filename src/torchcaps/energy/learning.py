"""How expert capsules learn from visible capsules alone.

Hauser 2019 (arXiv 1907.11643), algorithm 1, contrastive divergence with one step of mixing by dynamic routing:

    up       c, z_j                     by routing of x;  x_j = squash(z_j)
    down     xt_i = squash(sum_j c_ij x_j W_ij^T)                   the same c, through the transposed weights
    up       zt_j = sum_i c_ij xt_i W_ij                            the same c again
    W_ij += rate * 2 mean over the batch of c_ij (x_i^T z_j / (1 + |z_j|^2) - xt_i^T zt_j / (1 + |zt_j|^2))

`mix` is the first three lines, `contrastive_update` the fourth, and `contrastive_loss` = mean(F(x) - F(xt)), with x, xt
and c constants, has minus that for its gradient. The way down takes x_j, a mean; `stochastic` draws whether a capsule
fires and sends h_j z_j / |z_j|.

Mixing is not a draw from P(x | h), and so no valid step of a Markov chain: its update is biased, though it points
uphill (mean cosine with the true gradient 0.45 to 0.7 in small models). Valid negatives are drawn by `sampling.hmc`.

An objective is any callable `objective(model, visible, generator) -> loss`, whose gradient is followed:

    ContrastiveDivergence   x against its mixture of k steps                                    the source, k = 1
    PersistentDivergence    x against chains that mix on from batch to batch                    Tieleman 2008
    SampledDivergence       x against persistent chains of HMC or Langevin: true samples of P
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.energy.experts import ExpertCapsules
from torchcaps.energy.sampling import hmc, uniform_in_balls
from torchcaps.types import whole

__all__ = [
    "ContrastiveDivergence", "Mixed", "Objective", "PersistentDivergence", "SampledDivergence", "contrastive_loss",
    "contrastive_update", "mix", "train_experts",
]  # fmt: skip

Generator = torch.Generator | None
Objective = Callable[[ExpertCapsules, Tensor, Generator], Tensor]


class Mixed(NamedTuple):
    """What a way up, down and up again made of a batch.

    z, coupling     `[N, J, 1, Q]` and `[N, I, J]` of the visible capsules, by routing.
    visible         `[N, I, 1, P]`, what came down last.
    z_again         `[N, J, 1, Q]`, its z with the same coupling.
    """

    z: Tensor
    coupling: Tensor
    visible: Tensor
    z_again: Tensor


@torch.no_grad()
def mix(
    model: ExpertCapsules,
    visible: Tensor,
    *,
    steps: int = 1,
    stochastic: bool = False,
    generator: Generator = None,
) -> Mixed:
    """Mixing by dynamic routing from `visible` `[N, I, 1, P]`, `steps` times down and up; no gradient passes.

    stochastic  capsules fire or not, by chance, instead of sending what they would on average.
    """
    if (whole(steps) or 0) < 1:
        raise ValueError(f"steps={steps!r} of mixing must be a whole number of 1 or more")
    z, coupling = model.up(visible)
    z_again = z
    for _ in range(steps):
        poses = model.pose(z_again)
        if stochastic:
            chance = model.lengths(poses)[..., None, None]
            draw = torch.rand(chance.shape, generator=generator, dtype=chance.dtype, device=chance.device)
            poses = torch.where(draw < chance, poses / chance, 0.0)
        visible = model.down(poses, coupling)
        z_again = model.up(visible, coupling)[0]
    return Mixed(z, coupling, visible, z_again)


@torch.no_grad()
def contrastive_update(model: ExpertCapsules, visible: Tensor, mixed: Mixed) -> Tensor:
    """The source's change of the weight `[I, J, P, Q]`, without its rate."""
    data = model.ascent(visible, mixed.z, mixed.coupling)
    return data - model.ascent(mixed.visible, mixed.z_again, mixed.coupling)


def contrastive_loss(
    model: ExpertCapsules,
    visible: Tensor,
    negatives: Tensor,
    coupling: Tensor | None = None,
    negatives_coupling: Tensor | None = None,
) -> Tensor:
    """mean F(visible) - mean F(negatives), a number; couplings are given, or found by routing."""
    data = model.free_energy(visible, coupling)
    return data.mean() - model.free_energy(negatives, negatives_coupling).mean()


@dataclass(frozen=True)
class ContrastiveDivergence:
    """x against its own mixture: the source's objective.

    steps       of mixing, all with the coupling of x.
    stochastic  see `mix`.
    """

    steps: int = 1
    stochastic: bool = False

    def __call__(self, model: ExpertCapsules, visible: Tensor, generator: Generator = None) -> Tensor:
        mixed = mix(model, visible, steps=self.steps, stochastic=self.stochastic, generator=generator)
        return contrastive_loss(model, visible, mixed.visible, mixed.coupling, mixed.coupling)


@dataclass
class PersistentDivergence:
    """x against chains that mix on from batch to batch; they start at the first batch.

    steps       of mixing per batch. The coupling is routed anew at each batch, from where the chain stands.
    stochastic  see `mix`; without it a chain falls into a fixed point.
    """

    steps: int = 1
    stochastic: bool = True
    chains: Tensor | None = field(default=None, repr=False)

    def __call__(self, model: ExpertCapsules, visible: Tensor, generator: Generator = None) -> Tensor:
        start = visible.detach() if self.chains is None else self.chains
        mixed = mix(model, start, steps=self.steps, stochastic=self.stochastic, generator=generator)
        self.chains = mixed.visible
        return contrastive_loss(model, visible, mixed.visible, None, mixed.coupling)


@dataclass
class SampledDivergence:
    """x against persistent chains of Hamiltonian Monte Carlo, valid samples of P; they start uniform in the balls.

    chains      how many.
    step_size   of a leapfrog step; it follows the acceptance, 2 % up or down per batch, towards 0.8.
    steps       leapfrog steps of a proposal; 1 is Langevin.
    rounds      proposals per batch.
    acceptance  of the last batch.
    """

    chains: int = 100
    step_size: float = 0.05
    steps: int = 5
    rounds: int = 1
    state: Tensor | None = field(default=None, repr=False)
    acceptance: float = float("nan")

    def __call__(self, model: ExpertCapsules, visible: Tensor, generator: Generator = None) -> Tensor:
        I, P = model.in_caps, model.in_pose[1]
        start = self.state
        if start is None:
            start = uniform_in_balls(self.chains, I, P, generator=generator, dtype=visible.dtype)
        chain = hmc(
            lambda x: -model.free_energy(x), start,
            step_size=self.step_size, steps=self.steps, rounds=self.rounds, generator=generator,
        )  # fmt: skip
        self.state, self.acceptance = chain.visible, chain.acceptance
        self.step_size *= 1.02 if chain.acceptance > 0.8 else 0.98
        return contrastive_loss(model, visible, chain.visible)


def train_experts(
    model: ExpertCapsules,
    visible: Tensor,
    objective: Objective,
    *,
    epochs: int = 1,
    batch_size: int = 100,
    rate: float = 1e-3,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    after_epoch: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Follow the objective over `visible` `[N, I, 1, P]`; the mean loss of every epoch.

    optimizer    of the model's parameters; None is Adam at `rate`.
    seed         of the batches' order and of all that the objective draws.
    after_epoch  told the epoch's number, from 0, and its loss.

    A last batch that is smaller is left out, unless it is the only one. Raises ValueError for no examples at all.
    """
    if not len(visible) or min(epochs, batch_size) < 1:
        raise ValueError(f"{len(visible)} examples, {epochs} epochs, batches of {batch_size}: give 1 of each or more")
    if optimizer is None:
        optimizer = torch.optim.Adam(model.parameters(), rate)
    random = torch.Generator().manual_seed(seed)
    losses = []
    for epoch in range(epochs):
        batches = torch.randperm(len(visible), generator=random).split(batch_size)
        if len(batches) > 1 and len(batches[-1]) < batch_size:
            batches = batches[:-1]
        total = 0.0
        for batch in batches:
            loss = objective(model, visible[batch], random)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
        if after_epoch is not None:
            after_epoch(epoch, losses[-1])
    return losses
