"""True samples of a density on a product of unit balls: Hamiltonian Monte Carlo, and Langevin, its shortest form.

One round of HMC (Neal 2011) for a density exp(L(x)), with step e and S leapfrog steps:

    v ~ Normal(0, 1)
    S times:    v = v + e/2 dL/dx;    (x, v) = flight(x, v, e);    v = v + e/2 dL/dx
    keep the new x with probability min(1, exp(L(x') - |v'|^2 / 2 - L(x) + |v|^2 / 2)), else the old one

Langevin with Metropolis' correction (MALA) is S = 1: x' = x + e^2/2 dL/dx + e v.

At a ball's edge a capsule is reflected like a ball from a wall and flies on with the same speed, as many times as the
step's time allows: its velocity's part along the edge's normal changes sign. Flights are straight between, so each is
calculated without error: all chords after the first are equally long, and lie in one plane. Reflection keeps volume and
can be run backwards, so that the correction above stays right. Rejecting what leaves a ball would be right as well, but
of 576 balls of 8 numbers some capsule leaves at almost every step: half of such a ball's volume lies above length 0.92.

dL/dx may be any function of x without making the answer wrong; only L itself must be right. So the free energy of a
model whose coupling is a constant to the gradient may be sampled with its own coupling at every x.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.squash import safe_norm
from torchcaps.types import whole

__all__ = ["Chain", "flight", "hmc", "langevin", "uniform_in_balls"]


class Chain(NamedTuple):
    """Where the chains stand.

    visible      `[N, I, 1, P]`, inside the balls.
    log_density  `[N]`, L there.
    acceptance   share of the proposals that were kept, over chains and rounds.
    """

    visible: Tensor
    log_density: Tensor
    acceptance: float


def hmc(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    step_size: float,
    steps: int = 10,
    rounds: int = 1,
    generator: torch.Generator | None = None,
) -> Chain:
    """Rounds of Hamiltonian Monte Carlo from `start` `[N, I, 1, P]`: N independent chains on products of unit balls.

    log_density  L: `[N, I, 1, P]` to `[N]`, but for a constant; it is differentiated.
    step_size    e; 0.6 to 0.9 of the proposals should be kept.
    steps        S, leapfrog steps of a proposal.
    rounds       proposals.

    Raises ValueError for a start outside the balls and for settings that are no positive numbers.
    """
    for name, number in (("steps", steps), ("rounds", rounds)):
        if (whole(number) or 0) < 1:
            raise ValueError(f"{name}={number!r} must be a whole number of 1 or more")
    if not 0 < step_size < float("inf"):
        raise ValueError(f"step_size={step_size!r} must be above 0")
    longest = safe_norm(start.detach()).max().item() if start.numel() else 0.0
    if not longest <= 1 + 8 * torch.finfo(start.dtype).eps:
        raise ValueError(
            f"chains start inside balls of radius 1, but these hold capsules of length {longest:.6g}: start from "
            "visible capsules, or from uniform_in_balls"
        )
    x = start.detach()
    value, slope = _value_and_slope(log_density, x)
    kept = 0.0
    for _ in range(rounds):
        v = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        y, w, new_value, new_slope = x, v, value, slope
        for _step in range(steps):
            y, w = flight(y, w + step_size / 2 * new_slope, step_size)
            new_value, new_slope = _value_and_slope(log_density, y)
            w = w + step_size / 2 * new_slope
        change = new_value - value - (w.square() - v.square()).flatten(1).sum(1) / 2
        chance = torch.rand(len(x), generator=generator, dtype=x.dtype, device=x.device)
        keep = chance.log() < change  # False for NaN: a proposal without a density is not kept
        x = torch.where(keep[:, None, None, None], y, x)
        slope = torch.where(keep[:, None, None, None], new_slope, slope)
        value = torch.where(keep, new_value, value)
        kept += keep.double().mean().item()
    return Chain(x, value, kept / rounds)


def langevin(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    step_size: float,
    rounds: int = 1,
    generator: torch.Generator | None = None,
) -> Chain:
    """Rounds of Metropolis-adjusted Langevin, as `hmc` with one leapfrog step."""
    return hmc(log_density, start, step_size=step_size, steps=1, rounds=rounds, generator=generator)


def flight(x: Tensor, v: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """Position and velocity of every capsule after this time inside its unit ball, reflected at the edge.

    x, v  `[..., P]`, |x| <= 1.
    """
    speed = safe_norm(v, -1, keepdim=True)
    d = v / speed.masked_fill(speed == 0, 1.0)
    way = speed * time
    inward = (x * d).sum(-1, keepdim=True)
    room = (1 - x.square().sum(-1, keepdim=True)).clamp(min=0)
    to_edge = (inward.square() + room).sqrt() - inward  # the way along d until |x + way d| = 1
    hits = way > to_edge
    # on the edge: a frame of the normal y and of the tangent that the flight goes along
    y = x + to_edge * d
    y = y / safe_norm(y, -1, keepdim=True).clamp(min=0.5)
    cosine = (d * y).sum(-1, keepdim=True).clamp(0, 1)
    tangent = d - cosine * y
    sine = safe_norm(tangent, -1, keepdim=True)
    tangent = tangent / sine.masked_fill(sine == 0, 1.0)
    chord = (2 * cosine).clamp(min=torch.finfo(x.dtype).eps)
    left = (way - to_edge).clamp(min=0)
    chords = (left / chord).floor()
    # each chord turns the frame by the same angle
    angle = chords * 2 * torch.atan2(cosine, sine)
    normal = angle.cos() * y + angle.sin() * tangent
    tangent = angle.cos() * tangent - angle.sin() * y
    bounced = sine * tangent - cosine * normal
    end = torch.where(hits, normal + (left - chords * chord) * bounced, x + way * d)
    end = end / safe_norm(end, -1, keepdim=True).clamp(min=1)  # rounding alone
    return end, torch.where(hits, speed * bounced, v)


def uniform_in_balls(
    count: int,
    caps: int,
    pose: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`[count, caps, 1, pose]`, each capsule uniform in the unit ball: a uniform direction, and length u^(1/pose)."""
    x = torch.randn(count, caps, 1, pose, generator=generator, dtype=dtype)
    u = torch.rand(count, caps, 1, 1, generator=generator, dtype=dtype)
    return x / safe_norm(x, -1, keepdim=True) * u ** (1 / pose)


def _value_and_slope(log_density: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        value = log_density(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope
