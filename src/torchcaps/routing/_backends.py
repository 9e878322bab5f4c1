"""Which backend a call runs on: what each can do, and what `auto` takes.

    reference   the equations, on all votes at once; the definition
    streamed    plain PyTorch, a tile of children at a time
    native      compiled kernels for the CPU, of the same walk
    triton      kernels for CUDA, of the same walk

`choose` is one pure function of plain values; a backend that was named and cannot do what was asked says why.
"""

from dataclasses import dataclass

import torch

from torchcaps.routing import _native, _triton
from torchcaps.routing._round import Call
from torchcaps.squash import transformed

__all__ = ["Situation", "choose", "situation"]

WORTH_STREAMING = 2**17
"""Numbers in all votes from which on a walk over tiles is faster than the reference; measured on a server CPU."""

WORTH_NATIVE = 2**12
"""The same for the CPU kernels."""

LANES = 24
"""Rows (N R) that a tile needs for that: its innermost dimension."""


@dataclass(frozen=True)
class Situation:
    """All that the choice depends on."""

    votes: int
    """N I J R Q, numbers."""
    lanes: int
    """N R, rows of poses over the batch."""
    windows_compete: bool = False
    """child_ids were given."""
    coupling_wanted: bool = False
    exporting: bool = False
    """`torch.export` (and ONNX through it) is looking: plain operators only."""
    transformed: bool = False
    """Inside vmap, grad or another transform of `torch.func`, or a level of forward-mode derivatives."""
    traceable: bool = True
    """All settings are known by name, so that a compiled graph can hold the derivative."""
    compiling: bool = False
    squash_twice: str | None = None
    """Why a squash of the caller's own cannot be walked through a second time, in the backward pass, or None."""
    native_cannot: str | None = "is not there"
    """Why the CPU kernels are out of the question, or None."""
    triton_cannot: str | None = "runs on CUDA alone"
    """Why the Triton kernels are out of the question, or None."""


def situation(
    call: Call,
    backend: str,
    *,
    traceable: bool = True,
    squash_twice: str | None = None,
    cosine: bool = False,
    kernels_know: bool = True,
) -> Situation:
    """The situation of a call, now. `kernels_know`: the algorithm's options are among those of the kernels."""
    N, I, J, R, Q = call.sizes
    strange = None
    if not kernels_know or call.vote_offset is not None:
        strange = "has no kernels for EM, shares over children, stopped gradients or vote offsets"
    return Situation(
        votes=N * I * J * R * Q,
        lanes=N * R,
        windows_compete=call.child_ids is not None,
        coupling_wanted=bool(call.return_coupling),
        exporting=torch.compiler.is_exporting(),
        transformed=not torch.compiler.is_compiling() and transformed(),
        traceable=traceable,
        compiling=torch.compiler.is_compiling(),
        squash_twice=squash_twice,
        native_cannot=strange or _native.why_not(call.poses, call.weight),
        triton_cannot="runs on CUDA alone"
        if backend != "triton" and not call.poses.is_cuda
        else strange or _triton.why_not(call.poses, call.weight, cosine),
    )


def choose(backend: str, now: Situation) -> str:
    """The backend to run on. "auto" picks; a name is kept, or is a ValueError that says why it cannot be."""
    if backend == "reference":
        return backend
    reason = _why_not_streamed(now)
    if backend == "auto":
        if reason:  # before any look at sizes: an exported graph must not branch on the batch
            return "reference"
        if now.triton_cannot is None:
            return "triton"
        if now.native_cannot is None and now.votes >= WORTH_NATIVE:
            return "native"
        return "reference" if now.votes < WORTH_STREAMING or now.lanes < LANES else "streamed"
    if backend == "native":
        reason = reason or now.native_cannot
    if backend == "triton":
        reason = reason or now.triton_cannot
    if reason:
        raise ValueError(f"backend {backend!r} {reason}: take backend='reference' or 'auto'")
    return backend


def _why_not_streamed(now: Situation) -> str | None:
    if now.windows_compete:
        return "does not let windows compete for a child (child_ids)"
    if now.coupling_wanted:
        return "never holds the coupling that return_coupling asks for"
    if now.exporting:
        return "is not made of plain operators, which an exported graph must be"
    if now.transformed:
        return "does not run inside transforms of torch.func, nor with forward-mode derivatives"
    if now.compiling and not now.traceable:
        return "cannot be compiled with a squash that is a callable of your own"
    if now.squash_twice:
        return f"goes through the squash a second time for its gradient, and yours {now.squash_twice}"
    return None
