"""A given coupling carried up and down: the sums of routing without the routing.

    up      s_j = sum_i c_ij x_i W_ij
    down    x_i = sum_j c_ij v_j W_ij^T

Products of expert capsules (Hauser 2019, algorithm 1) need both, with one coupling.
"""

import torch
from torch import Tensor

from torchcaps.routing._round import enter

__all__ = ["combine", "combine_transposed"]


def combine(poses: Tensor, weight: Tensor, coupling: Tensor, vote_offset: Tensor | None = None) -> Tensor:
    """Sum of the children's votes with given shares.

    poses `[N, I, R, P]`, weight `[I | 1, J, P, Q]`, coupling `[N, I, J]`, vote_offset as in routing.
    Returns `[N, J, R, Q]`.
    Raises ValueError where the shapes do not fit.
    """
    call = enter(
        poses, weight, None, vote_offset=vote_offset, mask=None, child_ids=None,
        iterations=1, backend="reference", return_coupling=False,
    )  # fmt: skip
    N, I, J, _, _ = call.sizes
    shares = call.tensor("coupling", coupling, N, I, J)
    P, Q = call.weight.shape[2:]
    with call.own_precision():
        if vote_offset is None and P <= Q:  # shares on the children, who then hold fewer numbers than their votes
            heard = torch.einsum("nij,nirp->nijrp", shares, call.poses)
            return torch.einsum("nijrp,ijpq->njrq", heard, call.weight.expand(I, -1, -1, -1)).to(call.dtype)
        return torch.einsum("nij,nijrq->njrq", shares, call.votes()).to(call.dtype)


def combine_transposed(parents: Tensor, weight: Tensor, coupling: Tensor) -> Tensor:
    """Sum of the parents' poses sent down through the transposed weights with given shares.

    parents `[N, J, R, Q]`, weight `[I | 1, J, P, Q]`, coupling `[N, I, J]`. Returns `[N, I, R, P]`.
    Raises ValueError where the shapes do not fit.
    """
    if (
        coupling.dim() != 3
        or weight.dim() != 4
        or tuple(weight.shape[:2]) not in ((1, coupling.shape[2]), tuple(coupling.shape[1:]))
    ):
        raise ValueError(
            f"coupling {list(coupling.shape)} must be [N, I, J] and weight {list(weight.shape)} "
            "[I or 1, J, P, Q] with the same I and J"
        )
    I = coupling.shape[1]
    # downwards the parents are the ones who vote, so they and the children change places
    return combine(parents, weight.expand(I, -1, -1, -1).permute(1, 0, 3, 2), coupling.transpose(1, 2))
