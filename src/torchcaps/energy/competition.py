"""Experts that compete for the data instead of explaining all of it together: no negatives, lengths that tell classes.

In a product every expert is pulled by every example (17), and what experts learn is what all data share, so that their
lengths say little about what an image shows. Here an example pulls the one expert that likes it best:

    maximise  mean over x of max_j |z_j|^2,     z_j = (x - m) W_j / I,     W_j^T W_j = gain^2 Id

W_j `[I P, Q]` stacks the W_ij of capsule j. Negatives keep experts from growing everywhere at once; so does the
constraint, for by it tr A_j is fixed, and with it each expert's own normaliser Z_j / V = 1 + tr A_j / (P + 2)
(`likelihood`). It is K-subspaces (Bradley, Mangasarian 2000, "k-plane clustering", through m), and is solved in turn:

    a(x) = argmax_j |z_j|^2
    W_j  = gain * the Q leading eigenvectors of the second moment of the x - m with a(x) = j

Each step raises the mean or leaves it. The numbers of a pose are then the principal components of what its capsule
wins. The coupling is taken as uniform here; a model that routes keeps these weights.

On MNIST (docs/results.md) a linear probe on the 20 lengths is right of 92 % of the test digits, on those of random
weights of 61 %. What it gives up: without negatives, capsules of random direction have a lower free energy than images.
On Fashion-MNIST it is 77 % and 66 %, and images have the lower free energy.
"""

import torch
from torch import Tensor

from torchcaps.energy.experts import ExpertCapsules
from torchcaps.energy.measures import leading_directions
from torchcaps.types import whole

__all__ = ["compete"]


@torch.no_grad()
def compete(
    model: ExpertCapsules,
    visible: Tensor,
    *,
    rounds: int = 20,
    components: int = 200,
    seed: int = 0,
) -> list[float]:
    """Set the model's weights by competition (top of this file) over `visible` `[N, I, 1, P]`.

    rounds      at most; it ends where no example changes its capsule.
    components  the search is confined to so many leading directions of x - m.
    seed        of the frames to start with, each of Q random examples.

    The gain is such that the log odds of firing are 0 on average over capsules and examples. A bias is put to 0.
    Returns the share of the squared length of all x - m that the winners hold, after each round.
    Raises ValueError for a model with numbers on a line and for fewer than Q examples.
    """
    model.check(visible)
    N, I, J, P, Q = len(visible), model.in_caps, model.out_caps, model.in_pose[1], model.out_pose[1]
    if model.line:
        raise ValueError(f"competition is about lengths: it is for models without a line, not line={model.line}")
    if (whole(rounds) or 0) < 1:
        raise ValueError(f"rounds={rounds!r} must be a whole number of 1 or more")
    if I * P < Q:
        raise ValueError(f"a capsule of {Q} numbers needs as many directions, but {I} capsules of {P} have {I * P}")
    if N < Q:
        raise ValueError(f"a capsule of {Q} numbers starts from {Q} different examples, but there are {N}: give more")
    random = torch.Generator().manual_seed(seed)
    x = (visible - model.centre).flatten(1)
    total = x.square().sum()
    basis = leading_directions(x, min(max(components, Q), I * P, N), random)  # [I P, components]
    x = x @ basis
    starts = torch.randperm(N, generator=random).repeat(-(-J * Q // N))[: J * Q].view(J, Q)
    frames = torch.stack([torch.linalg.qr(x[each].T)[0] for each in starts])  # [J, components, Q]
    winner, shares = torch.full((N,), -1), []
    for _ in range(rounds):
        held = torch.stack([(x @ frame).square().sum(1) for frame in frames], 1)
        shares.append((held.amax(1).sum() / total).item())
        before, winner = winner, held.argmax(1)
        if torch.equal(before, winner):
            break
        for j in range(J):
            won = x[winner == j]
            if len(won) >= Q:  # a capsule that wins less than its frame can hold keeps its frame
                frames[j] = torch.linalg.eigh(won.T @ won)[1][:, -Q:].flip(1)
    weight = torch.einsum("dk,jkq->djq", basis, frames).view(I, P, J, Q).transpose(1, 2)
    if model.bias is not None:
        model.bias.zero_()
    model.weight.copy_(I * weight)
    # by routing z is no longer linear in x, so the gain is taken from what the model makes of some examples
    log_odds = model.log_odds(model.up(visible[: min(N, 1000)])[0])
    model.weight.mul_((-log_odds.clamp(min=-50).mean() / 2).exp())
    return shares
