"""What every room hands to the next: capsules, the result of routing, and the letters of their shapes.

    N   batch                            R   rows of a pose (1 for a vector capsule)
    I   children, the lower capsules     P   columns of a pose below
    J   parents, the upper capsules      Q   columns of a pose above
    C   capsule types of a map           T   rounds of routing

A pose is a matrix, `R x P` below and `R x Q` above. A vector capsule is a pose of one row; the 4x4 matrix capsules of
EM routing have R = P = Q = 4.
"""

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchcaps.squash import safe_norm

if TYPE_CHECKING:
    from jaxtyping import Float
else:
    try:  # shapes are checked where jaxtyping is installed and switched on: in the tests
        from jaxtyping import Float
    except ImportError:

        class Float:
            """Stands in for jaxtyping's Float: `Float[Tensor, "N I R P"]` is then read by people alone."""

            def __class_getitem__(cls, item: tuple[type, str]) -> type:
                return item[0]


__all__ = ["CapsuleLayer", "Capsules", "Float", "Pose", "Routed", "pose_shape", "readable", "value_range", "whole"]

Pose = int | tuple[int, int]


class Capsules(NamedTuple):
    """Capsules: a pose each, and an activation each where the algorithm has one.

    `poses` is `[N, I, R, P]`, or a map `[N, C, *spatial, R, P]` of C types at every position. `activations` has the
    same leading shape, `[N, I]` or `[N, C, *spatial]`, or is None where the length of a pose says how present it is.

    >>> import torch
    >>> Capsules(torch.zeros(2, 8, 5, 5, 1, 16)).flatten().poses.shape
    torch.Size([2, 200, 1, 16])
    """

    poses: Tensor
    activations: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Length of each pose over rows and columns, `[N, I]` or `[N, C, *spatial]`; its gradient at 0 is 0."""
        return safe_norm(self.poses)

    @property
    def spatial(self) -> tuple[int, ...]:
        """Height, width, ... of a map; empty for a flat list of capsules."""
        return tuple(self.poses.shape[2:-2])

    def flatten(self) -> "Capsules":
        """A map as a list of children, `[N, C * positions, R, P]`, in the order type, row, column."""
        poses, activations = self.poses, self.activations
        return Capsules(poses.flatten(1, -3), None if activations is None else activations.flatten(1, -1))

    def to(self, *args: Any, **kwargs: Any) -> "Capsules":
        """`Tensor.to` on both."""
        return Capsules(
            self.poses.to(*args, **kwargs),
            None if self.activations is None else self.activations.to(*args, **kwargs),
        )

    def detach(self) -> "Capsules":
        """`Tensor.detach` on both."""
        return Capsules(self.poses.detach(), None if self.activations is None else self.activations.detach())


class Routed(NamedTuple):
    """What one call of a routing algorithm gives.

    poses        `[N, J, R, Q]`, the parents.
    activations  `[N, J]`, or None where the algorithm has none.
    coupling     `[N, I, J]`, each child's share for each parent in the last round, before any multiplication by
                 activations; `[T, N, I, J]`, every round's, when asked for "all"; None when not asked for.
    state        what the next round needs: pass it as `start=` to go on where this call stopped.
    """

    poses: Tensor
    activations: Tensor | None
    coupling: Tensor | None
    state: Any

    @property
    def capsules(self) -> Capsules:
        """The parents as a value that the next layer takes."""
        return Capsules(self.poses, self.activations)


@runtime_checkable
class CapsuleLayer(Protocol):
    """A layer from capsules to capsules, as health checks and memory estimates recognise it."""

    out_caps: int
    out_pose: tuple[int, int]

    def route(self, capsules: Capsules, mask: Tensor | None = None) -> Routed: ...


def pose_shape(pose: Pose) -> tuple[int, int]:
    """(rows, columns) of a pose given as an int (a vector of that many numbers) or as a pair.

    >>> pose_shape(16), pose_shape((4, 4))
    ((1, 16), (4, 4))
    """
    numbers = (1, pose) if whole(pose) is not None else pose
    shape = [whole(n) for n in numbers] if isinstance(numbers, Iterable) else []
    match shape:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"a pose is a positive int (a vector) or a pair of them (rows, columns), not {pose!r}")


def whole(value: object) -> int | None:
    """A whole number of any kind, numpy's too, as an int; None for what is none, True and False among it.

    >>> whole(3), whole(3.0), whole(True)
    (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def readable(tensor: Tensor) -> bool:
    """Whether a check may look at the values.

    Not on another device than the CPU, for that would wait for it; not in a graph that is being compiled; and not under
    a transform of `torch.func`, where a value may stand for many.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def value_range(tensor: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest value of any real dtype, or None where there is none or it may not be looked at.

    >>> value_range(torch.tensor([2, 0, 1]))
    (0, 2)
    """
    if not readable(tensor) or tensor.numel() == 0:
        return None
    wide = tensor.double() if tensor.is_floating_point() else tensor.long()  # torch has no minimum of every dtype
    low, high = wide.aminmax()
    return low.item(), high.item()
