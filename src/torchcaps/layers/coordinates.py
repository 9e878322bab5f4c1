"""Coordinate addition: a vote is told where its child stands.

Hinton, Sabour, Frosst 2018, section 4: the scaled row and column of a child's centre are added to the first two entries
of the right-hand column of its votes. Here they run from 0 to 1, each axis by its own size:

    position k of n on an axis        (k + 1/2) / n
    a matrix pose [R, Q]              axis a adds to entry (a, Q - 1)
    a vector pose [1, Q]              axis a adds to entry (0, a)
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps.types import Pose, pose_shape

__all__ = ["coordinate_offset"]


def coordinate_offset(
    types: int,
    spatial: Sequence[int],
    pose: Pose,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`vote_offset` `[types * positions, 1, R, Q]` for a flattened map of `types` capsule types at `spatial` positions.

    The children come in the order type, row, column, as `Capsules.flatten` has them. `pose` is the parents' pose.
    Raises ValueError where the map has no axes, or the pose fewer rows (a vector: numbers) than the map has axes.

    >>> coordinate_offset(1, (2, 4), 3)[:, 0, 0].tolist()[:2]  # first row of two; first and second column of four
    [[0.25, 0.125, 0.0], [0.25, 0.375, 0.0]]
    """
    R, Q = pose_shape(pose)
    axes = len(spatial)
    if not axes or not all(n > 0 for n in (types, *spatial)):
        raise ValueError(
            f"coordinates need a map of capsules [N, C, *spatial, R, P], not {types} capsules without positions: "
            "give the map before it is flattened, or build the layer with coordinates=False"
        )
    if axes > (Q if R == 1 else R):
        have = f"vector pose of {Q} numbers" if R == 1 else f"pose [{R}, {Q}] of {R} rows"
        raise ValueError(f"{axes} coordinates do not fit a {have}: take out_pose with {axes} or more")
    offset = torch.zeros(types, *spatial, 1, R, Q, device=device, dtype=dtype)
    for axis, size in enumerate(spatial):
        at = (torch.arange(size, device=offset.device, dtype=offset.dtype) + 0.5) / size
        row, column = (0, axis) if R == 1 else (axis, Q - 1)
        offset[..., 0, row, column] = at.view(-1, *(1,) * (axes - axis - 1))
    return offset.view(types * math.prod(spatial), 1, R, Q)
