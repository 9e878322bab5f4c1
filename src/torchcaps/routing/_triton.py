"""The passes on Triton kernels (`kernels/triton_passes.py`), for CUDA, in float32.

The kernels do not know the uniform round's gradient, nor stopped gradients: the first is one product and is added here,
the second is refused by `choose`.
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from torchcaps.routing._passes import Children, Detach, Gradients, Round

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
        s: Tensor = _kernels().forward_pass(
            ch.poses, ch.weight, V, mask=ch.mask, prior=ch.prior, leaky=ch.leaky, cosine=ch.cosine
        )
        return s, None

    def backward_state(self, ch: Children, r: Round) -> Tensor:
        dV: Tensor = _kernels().backward_state(
            ch.poses, ch.weight, r.V, r.ds, mask=ch.mask, prior=ch.prior, leaky=ch.leaky, cosine=ch.cosine
        )
        return dV

    def backward_full(
        self, ch: Children, rounds: list[Round], base: Tensor | None, detach: Detach = "none"
    ) -> Gradients:
        if rounds:
            poses, weight, _, prior = _kernels().backward_full(
                ch.poses, ch.weight, torch.stack([r.V for r in rounds]), torch.stack([r.ds for r in rounds]),
                mask=ch.mask, prior=ch.prior, leaky=ch.leaky, cosine=ch.cosine,
            )  # fmt: skip
        else:
            poses, weight, prior = torch.zeros_like(ch.poses), torch.zeros_like(ch.weight), None
        if base is not None:
            _add_uniform(ch, base, poses, weight)
        return Gradients(poses, weight, prior, None)


def _add_uniform(ch: Children, base: Tensor, poses: Tensor, weight: Tensor) -> None:
    """Add what du_ij = base_j gives to the gradients of poses and weight; the door drops what masked poses get."""
    if ch.weight.shape[0] == 1:
        poses += torch.einsum("njrq,jpq->nrp", base, ch.weight[0])[:, None]
        weight += torch.einsum("nrp,njrq->jpq", ch.poses.sum(1), base)
    else:
        poses += torch.einsum("njrq,ijpq->nirp", base, ch.weight)
        weight += torch.einsum("nirp,njrq->ijpq", ch.poses, base)


def _kernels() -> ModuleType:
    return importlib.import_module("torchcaps.kernels.triton_passes")
