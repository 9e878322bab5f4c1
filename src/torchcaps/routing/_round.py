"""What every routing algorithm shares: the door, the votes, and the softmax that turns logits into coupling.

    u_ij = x_i W_ij + o_ij                          make_votes
    c_ij = exp b_ij / sum_j exp b_ij                couple(over="parents"): each child shares 1 among the parents
    c_ij = exp b_ij / sum_i exp b_ij                couple(over="children"): each parent shares 1 among the children
    c_wij = exp b_wij / sum_wj exp b_wij            couple(child_ids): windows w that hold the same child i

The door (`enter`) turns the caller's tensors into a `Call` whose shapes fit, or raises a ValueError that names both
sides. Masked children are replaced by zeros there, once, before any product: multiplying by 0 would keep a NaN alive.
An algorithm works on the call and gives back `call.answer(...)`:

    call = enter(poses, weight, activations, ...)
    with call.own_precision():
        ... call.votes(), couple(...) ...
    return call.answer(parents, rounds, state)
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from torchcaps.routing._windows import Windows, check_window
from torchcaps.types import Float, Routed, readable

__all__ = ["BACKENDS", "Backend", "Call", "Over", "couple", "enter", "make_votes"]

Backend = Literal["auto", "reference", "streamed", "native", "triton"]
BACKENDS: tuple[str, ...] = ("auto", "reference", "streamed", "native", "triton")
Over = Literal["parents", "children"]


@dataclass(frozen=True)
class Call:
    """One call of an algorithm after the door: tensors of one dtype whose shapes fit each other."""

    poses: Tensor  # [N, I, R, P], 0 where masked; with windows a map [N, C, *spatial, R, P]
    weight: Tensor  # [I | 1, J, P, Q]
    activations: Tensor | None  # [N, I], 0 where masked
    vote_offset: Tensor | None  # [N | 1, I | 1, J | 1, R, Q]
    mask: Tensor | None  # [N, I] or [N, C, *spatial], True takes part
    child_ids: Tensor | None  # [windows, I]
    dtype: torch.dtype  # of the answer
    return_coupling: bool | str
    windows: Windows | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(N, I, J, R, Q); with windows each of them is an example, so that N counts them all."""
        N, I, *spatial, R, _ = self.poses.shape
        if self.windows is not None:
            N, I = N * self.windows.count(spatial), I * math.prod(self.windows.kernel)
        return N, I, self.weight.shape[1], R, self.weight.shape[3]

    def unfolded(self) -> "Call":
        """The same call with the children of every window in a list of their own."""
        if self.windows is None:
            return self
        mask = self.windows.present(self.poses, self.mask)
        return replace(self, poses=self.windows.unfold(self.poses), mask=mask, windows=None)

    def votes(self) -> Tensor:
        """`[N, I, J, R, Q]`, 0 for masked children."""
        votes = make_votes(self.poses, self.weight)
        if self.vote_offset is not None:
            votes = votes + self.vote_offset
            if self.mask is not None:
                votes = votes.masked_fill(~self.mask[:, :, None, None, None], 0.0)
        return votes

    def zeros(self, *shape: int) -> Tensor:
        """Zeros beside the poses."""
        return self.poses.new_zeros(shape)

    @overload
    def tensor(self, name: str, value: None, *shape: int) -> None: ...
    @overload
    def tensor(self, name: str, value: Tensor, *shape: int) -> Tensor: ...
    def tensor(self, name: str, value: Tensor | None, *shape: int) -> Tensor | None:
        """A tensor argument of the call in the call's dtype, after a look at its shape."""
        if value is None:
            return None
        _check_real(name, value)
        _check_device(name, value, self.poses)
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} {list(value.shape)} does not fit this call: it must be {list(shape)}")
        return value.to(self.poses.dtype)

    def own_precision(self) -> contextlib.AbstractContextManager[object]:
        """Routing picks its own precision (float32 at the least): autocast stays outside."""
        return own_precision(self.poses)

    def answer(self, poses: Tensor, rounds: Sequence[Tensor], state: Any, activations: Tensor | None = None) -> Routed:
        """The result in the caller's dtype, with as much of every round's coupling as was asked for."""
        coupling = None
        if self.return_coupling == "all":
            coupling = torch.stack(list(rounds)).to(self.dtype)
        elif self.return_coupling:
            coupling = rounds[-1].to(self.dtype)
        return Routed(
            poses.to(self.dtype), None if activations is None else activations.to(self.dtype), coupling, state
        )


def own_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """No autocast on the device of x, in a backward pass too, which may run under it."""
    device = x.device.type
    return (
        torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext()
    )


def enter(
    poses: Tensor,
    weight: Tensor,
    activations: Tensor | None,
    *,
    vote_offset: Tensor | None,
    mask: Tensor | None,
    child_ids: Tensor | None,
    windows: Windows | None = None,
    iterations: int,
    backend: str,
    return_coupling: bool | str,
) -> Call:
    """Look at everything that all algorithms take, and make it ready.

    With `windows` poses are a map, mask and activations too, and every window is an example of its own.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not there: take one of {', '.join(BACKENDS)}")
    check_iterations(iterations)
    if return_coupling not in (True, False, "all"):
        raise ValueError(f'return_coupling={return_coupling!r}: take False, True (the last round) or "all"')
    _check_pair(poses, weight, windows)
    if windows is not None and child_ids is not None:
        raise ValueError("child_ids number the children of windows that are laid out already: leave one of the two out")
    for name, value in (("activations", activations), ("vote_offset", vote_offset), ("mask", mask)):
        if value is not None:
            _check_real(name, value)
            _check_device(name, value, poses)
    places = poses.shape[:-2]
    if activations is not None and activations.shape != places:
        raise ValueError(f"activations {list(activations.shape)} but poses {list(poses.shape)} need {list(places)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != places):
        raise ValueError(
            f"mask {list(mask.shape)} of {mask.dtype} but poses {list(poses.shape)} need {list(places)} of torch.bool, "
            "True for a child that takes part"
        )
    N, I, J, R, Q = Call(poses, weight, None, None, None, None, poses.dtype, False, windows).sizes
    if vote_offset is not None and not _broadcasts(vote_offset.shape, (N, I, J, R, Q)):
        raise ValueError(
            f"vote_offset {list(vote_offset.shape)} does not fit votes [N={N}, I={I}, J={J}, R={R}, Q={Q}]: "
            "it must be [I or 1, J or 1, R, Q], or have a leading N or 1"
        )
    if child_ids is not None:
        _check_child_ids(child_ids, poses, N, I)
        if readable(child_ids):  # numbered anew, from 0 on without gaps
            child_ids = child_ids.unique(return_inverse=True)[1]
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    poses = poses.to(compute)
    if activations is not None:
        activations = activations.to(compute)
    if mask is not None:
        poses = poses.masked_fill(~mask[..., None, None], 0.0)
        if activations is not None:
            activations = activations.masked_fill(~mask, 0.0)
    if vote_offset is not None:
        vote_offset = vote_offset.to(compute)
        vote_offset = vote_offset if vote_offset.dim() == 5 else vote_offset[None]
    return Call(poses, weight.to(compute), activations, vote_offset, mask, child_ids, dtype, return_coupling, windows)


def check_iterations(iterations: int) -> None:
    """A ValueError for anything but a whole number of rounds, 1 or more."""
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(
            f"iterations={iterations!r}: routing needs a whole number of rounds, 1 or more (1 is no routing)"
        )


def make_votes(poses: Float[Tensor, "N I R P"], weight: Float[Tensor, "#I J P Q"]) -> Float[Tensor, "N I J R Q"]:
    """What each child says of each parent's pose: the child's pose times the pair's weight."""
    if weight.shape[0] == 1:
        return torch.einsum("nirp,jpq->nijrq", poses, weight[0])
    return torch.einsum("nirp,ijpq->nijrq", poses, weight)


def couple(
    logits: Float[Tensor, "N I J"],
    *,
    over: Over = "parents",
    mask: Tensor | None = None,
    child_ids: Tensor | None = None,
    leaky: bool = False,
    log: bool = False,
) -> Float[Tensor, "N I J"]:
    """Shares from logits: a softmax over the parents or over the children; masked children have 0.

    `leaky` adds a parent "none of the above" with logit 0 that takes its share and is then dropped. With `child_ids`
    (`[windows, I]`, the batch holding the windows of each example one after the other) a child that several windows
    see shares 1 among the parents of all of them. `log` gives the logarithms, -inf for masked children.
    """
    softmax = torch.log_softmax if log else torch.softmax
    if over == "children":
        if mask is not None:
            logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
        coupling = softmax(logits, 1)
    elif child_ids is not None:
        coupling = _couple_windows(logits, mask, child_ids, leaky, log)
    elif leaky:
        coupling = softmax(torch.cat([logits, torch.zeros_like(logits[:, :, :1])], dim=2), 2)[:, :, :-1]
    else:
        coupling = softmax(logits, 2)
    return coupling if mask is None else coupling.masked_fill(~mask[:, :, None], -torch.inf if log else 0.0)


def _couple_windows(logits: Tensor, mask: Tensor | None, child_ids: Tensor, leaky: bool, log: bool) -> Tensor:
    """The softmax over (window, parent) of the same child: sums and maxima are gathered by the child's id."""
    windows, I = child_ids.shape
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    b = logits.unflatten(0, (-1, windows)).flatten(1, 2)  # [examples, windows * I, J]
    ids = child_ids.flatten().expand(b.shape[0], -1)
    children = child_ids.numel()
    lowest = 0.0 if leaky else -torch.inf
    largest = b.new_full((b.shape[0], children), lowest).scatter_reduce(1, ids, b.detach().amax(2), "amax")
    below = b - largest.gather(1, ids)[:, :, None]
    e = below.exp()
    total = (-largest).exp() if leaky else torch.zeros_like(largest)
    total = total.scatter_add(1, ids, e.sum(2))
    total = total.gather(1, ids)[:, :, None]
    shares = below - total.log() if log else e / total
    return shares.unflatten(1, (windows, I)).flatten(0, 1)


def _check_pair(poses: Tensor, weight: Tensor, windows: Windows | None) -> None:
    kind = ("[N, I, R, P]", 4) if windows is None else ("[N, C, *spatial, R, P]", 4 + windows.axes)
    for name, tensor, letters, dims in (("poses", poses, *kind), ("weight", weight, "[I or 1, J, P, Q]", 4)):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            hint = "; a vector capsule is a pose of one row: poses.unsqueeze(-2)" if name == "poses" else ""
            raise ValueError(f"{name} must be a tensor {letters}, not {shape}{hint}")
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be floating point of 16, 32 or 64 bits, not {tensor.dtype}: call .float() first"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} must be dense, not {tensor.layout}: call .to_dense() first")
    _check_device("weight", weight, poses)
    I = poses.shape[1]
    if windows is not None:
        check_window("windows", poses.shape[2:-2], windows.kernel, windows.padding)
        I *= math.prod(windows.kernel)
    children, _, columns, _ = weight.shape
    if children not in (1, I) or columns != poses.shape[-1]:
        raise ValueError(
            f"weight {list(weight.shape)} transforms {children} input capsules of {columns} columns, "
            f"but poses {list(poses.shape)} hold {I} capsules of {poses.shape[-1]} columns"
            f"{'' if windows is None else ' in a window'}"
        )
    if 0 in poses.shape[1:] or 0 in weight.shape:
        raise ValueError(
            f"poses {list(poses.shape)} and weight {list(weight.shape)} must have no empty dimension but the batch"
        )


def _check_child_ids(child_ids: Tensor, poses: Tensor, N: int, I: int) -> None:
    _check_real("child_ids", child_ids)
    _check_device("child_ids", child_ids, poses)
    if child_ids.dtype != torch.long or child_ids.dim() != 2 or child_ids.shape[1] != I:
        raise ValueError(f"child_ids {list(child_ids.shape)} of {child_ids.dtype} must be [windows, {I}] of torch.long")
    if child_ids.shape[0] == 0 or N % child_ids.shape[0]:
        raise ValueError(f"a batch of {N} is no multiple of the {child_ids.shape[0]} windows of child_ids")
    if readable(child_ids) and int(child_ids.min()) < 0:
        raise ValueError("child_ids must be 0 or more: mask out the entries of a window that hold no child")


def _check_real(name: str, value: object) -> None:
    """A ValueError for what is no tensor of real numbers."""
    if not isinstance(value, Tensor) or value.is_complex():
        what = f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"{name} must be a tensor of real numbers, not {what}: torch.as_tensor makes one")


def _check_device(name: str, value: Tensor, poses: Tensor) -> None:
    if value.device != poses.device:
        raise ValueError(f"{name} is on {value.device}, but poses are on {poses.device}: move one to the other")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether `shape` broadcasts to `target`, its last two sizes being equal."""
    if len(shape) not in (4, 5):
        return False
    tail = target[-len(shape) :]
    return tuple(shape[-2:]) == tuple(tail[-2:]) and all(s in (1, t) for s, t in zip(shape, tail, strict=True))
