"""The passes on Triton kernels (`kernels/triton_passes.py`), for CUDA, in float32.

The kernels do not know the uniform round's gradient, nor stopped gradients: the first is one product and is added here,
the second is refused by `choose`.
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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

__all__ = ["TritonPasses", "why_not"]


def why_not(poses: Tensor, weight: Tensor, cosine: bool) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    reason: str | None = _kernels().supports(poses, weight, cosine=cosine)
    return reason and f"cannot: {reason}"


class TritonPasses:
    """See `Passes`."""

    def forward(self, ch: Children, V: Tensor) -> tuple[Tensor, None]:
        ch = flat(ch)
        s: Tensor = _kernels().forward_pass(ch.poses, ch.weight, by_window(ch, V), **_settings(ch))
        return s.view(V.shape), None

    def backward_state(self, ch: Children, r: Round) -> Tensor:
        ch = flat(ch)
        V, ds = by_window(ch, r.V), by_window(ch, r.ds)
        dV: Tensor = _kernels().backward_state(ch.poses, ch.weight, V, ds, **_settings(ch))
        return dV.view(r.V.shape)

    def backward_full(
        self, ch: Children, rounds: list[Round], base: Tensor | None, detach: Detach = "none"
    ) -> Gradients:
        if not rounds:  # a single uniform round
            assert base is not None
            return Gradients(*uniform_gradients(ch, base), None, None)
        laid = flat(ch)
        if rounds:
            V, ds = (
                by_window(laid, torch.stack([r.V for r in rounds])),
                by_window(laid, torch.stack([r.ds for r in rounds])),
            )
            poses, weight, _, prior = _kernels().backward_full(laid.poses, laid.weight, V, ds, **_settings(laid))
        else:
            poses, weight, prior = torch.zeros_like(laid.poses), torch.zeros_like(laid.weight), None
        if base is not None:
            from_base = uniform_gradients(laid, base)
            poses, weight = poses + from_base[0], weight + from_base[1]
        return Gradients(flat_gradient(ch, poses), weight, prior, None)


def _settings(ch: Children) -> dict[str, Any]:
    settings: dict[str, Any] = {"mask": ch.mask, "prior": ch.prior, "leaky": ch.leaky, "cosine": ch.cosine}
    if ch.windows is not None:
        settings["window"] = _kernels().Window(ch.windows.kernel, ch.windows.stride, ch.windows.padding)
    return settings


def _kernels() -> ModuleType:
    return importlib.import_module("torchcaps.kernels.triton_passes")
