"""The passes on the compiled kernels of the CPU (`kernels/native.py`), in float32.

The kernels read a map of one or two axes in place; one of three axes is unfolded for them. They know no vote offsets,
no shares over children and no stopped gradients: `choose` keeps those away.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels import native
from torchcaps.routing._passes import (
    Children,
    Detach,
    Gradients,
    Round,
    by_window,
    flat,
    flat_gradient,
    uniform_gradients,
)
from torchcaps.routing._windows import Windows

__all__ = ["NativePasses", "why_not"]


def why_not(poses: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can."""
    for name, tensor in (("poses", poses), ("weight", weight)):
        if tensor.device.type != "cpu":
            return f"runs on the CPU, but {name} are on {tensor.device}"
        if tensor.dtype != torch.float32:
            return f"computes in float32, but {name} are {tensor.dtype}"
    return _absent()


def _absent() -> str | None:
    """Why there are no kernels."""
    reason = native.missing()
    return reason and f"is not there: {reason}"


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: looking for the library is
# no business of a compiled graph.
_absent._dynamo_marked_constant = True  # type: ignore[attr-defined]


class NativePasses:
    """See `Passes`."""

    def sum(self, ch: Children) -> Tensor:
        """The sum of all votes, `[N, J, R, Q]`."""
        ch = flat(ch)
        if ch.windows is None:
            return native.sum_pass(ch.poses, ch.weight, mask=ch.mask)
        return native.map_sum_pass(ch.poses, ch.weight, mask=ch.mask, **_geometry(ch.windows)).view(ch.parents)

    def forward(self, ch: Children, V: Tensor) -> tuple[Tensor, None]:
        ch = flat(ch)
        if ch.windows is None:
            return native.forward_pass(ch.poses, ch.weight, V, **_settings(ch)), None
        s = native.map_forward_pass(ch.poses, ch.weight, by_window(ch, V), **_settings(ch), **_geometry(ch.windows))
        return s.view(V.shape), None

    def backward_state(self, ch: Children, r: Round) -> Tensor:
        ch = flat(ch)
        if ch.windows is None:
            return native.backward_state(ch.poses, ch.weight, r.V, r.ds, **_settings(ch))
        V, ds = by_window(ch, r.V), by_window(ch, r.ds)
        dV = native.map_backward_state(ch.poses, ch.weight, V, ds, **_settings(ch), **_geometry(ch.windows))
        return dV.view(r.V.shape)

    def backward_full(
        self, ch: Children, rounds: list[Round], base: Tensor | None, detach: Detach = "none"
    ) -> Gradients:
        if not rounds:  # a single uniform round
            assert base is not None
            return Gradients(*uniform_gradients(ch, base), None, None)
        laid = flat(ch)
        V, ds = [by_window(laid, r.V) for r in rounds], [by_window(laid, r.ds) for r in rounds]
        uniform = None if base is None else by_window(laid, base)
        wanted: dict[str, Any] = {"with_state": False, "with_prior": ch.prior is not None, **_settings(laid)}
        if laid.windows is None:
            g = native.backward_full(laid.poses, laid.weight, V, ds, uniform=uniform, **wanted)
        else:
            wanted |= _geometry(laid.windows)
            g = native.map_backward_full(laid.poses, laid.weight, V, ds, uniform=uniform, **wanted)
        return Gradients(flat_gradient(ch, g.d_poses), g.d_weight, g.d_prior, None)


def _geometry(windows: Windows) -> dict[str, Any]:
    return {"kernel": windows.kernel, "stride": windows.stride, "padding": windows.padding}


def _settings(ch: Children) -> dict[str, Any]:
    return {"mask": ch.mask, "prior": ch.prior, "leaky": ch.leaky, "cosine": ch.cosine}
