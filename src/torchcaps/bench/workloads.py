"""Layers of the field at their usual size, and what they would cost at the speed of a matrix product."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.func
from torch import Tensor, nn

from torchcaps.layers import ConvCapsules
from torchcaps.routing import Attention, Backend, Dynamic
from torchcaps.types import Capsules

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A layer of the field at its usual size."""

    name: str
    what: str
    rule: Dynamic | Attention
    N: int
    I: int
    J: int
    R: int
    P: int
    Q: int
    shared: bool = False
    window: tuple[int, int, int] | None = None
    """(size of the map, kernel, stride) of a convolution; I is then the number of child types."""

    def make(self, device: str = "cpu") -> tuple[Callable[[Tensor, Tensor, str], Tensor], list[Tensor]]:
        """(route(poses, weight, backend) -> parents' poses, [poses, weight])."""
        if self.window is not None:
            size, kernel, stride = self.window
            layer = ConvCapsules(
                self.I, self.J, (self.R, self.P), (self.R, self.Q), kernel, stride, routing=self.rule
            ).to(device)
            poses = torch.randn(self.N, self.I, size, size, self.R, self.P, device=device, requires_grad=True)

            weight = layer.weight.detach().requires_grad_()

            def convolve(poses: Tensor, weight: Tensor, backend: str) -> Tensor:
                out: Tensor = torch.func.functional_call(_Routed(layer), {"layer.weight": weight}, (poses, backend))
                return out

            return convolve, [poses, weight]
        std = self.rule.weight_std(self.I, self.J, self.R, self.P, self.Q)
        weight = torch.empty(1 if self.shared else self.I, self.J, self.P, self.Q, device=device).normal_(0, std)

        def connect(poses: Tensor, weight: Tensor, backend: str) -> Tensor:
            return self.rule(poses, weight, backend=backend).poses  # type: ignore[arg-type]

        poses = torch.randn(self.N, self.I, self.R, self.P, device=device, requires_grad=True)
        return connect, [poses, weight.requires_grad_()]

    @property
    def positions(self) -> int:
        """Windows of an example, 1 without a convolution."""
        if self.window is None:
            return 1
        size, kernel, stride = self.window
        return ((size - kernel) // stride + 1) ** 2

    @property
    def children(self) -> int:
        """Children of a window."""
        return self.I if self.window is None else self.I * self.window[1] ** 2

    @property
    def votes(self) -> int:
        """Numbers in all votes."""
        return self.N * self.positions * self.children * self.J * self.R * self.Q

    def floor(self, speed: float) -> tuple[float, float]:
        """(forward, forward + backward) in seconds at `speed` multiply-adds a second, votes recomputed each walk."""
        T = self.rule.iterations
        vote = 0.0 if self.shared else self.P  # multiply-adds to form one number of a vote
        product = self.P * (1 if not self.shared else 1 / max(1, self.children))
        forward = product + (T - 1) * (vote + (2 if not self.shared else 2 * self.P / self.Q))
        light = (T - 1) * (vote + (3 if not self.shared else 3 * self.P / self.Q))
        full = vote + (T - 1) * (4 if not self.shared else 4 * self.P / self.Q) + 2 * product
        return self.votes * forward / speed, self.votes * (forward + light + full) / speed


class _Routed(nn.Module):
    """A layer as a function of its weight and of the backend."""

    def __init__(self, layer: ConvCapsules) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, backend: Backend) -> Tensor:
        return self.layer.route(Capsules(poses), backend=backend).poses


WORKLOADS = {
    w.name: w
    for w in (
        Workload("fc", "CapsNet's class capsules", Dynamic(), 128, 1152, 10, 1, 8, 16),
        Workload("shared", "shared weights over a map", Dynamic(), 128, 576, 10, 1, 128, 16, shared=True),
        Workload(
            "conv", "4x4 matrix capsules, 3x3 stride 2", Attention(iterations=3), 8, 32, 32, 4, 4, 4, window=(16, 3, 2)
        ),
    )
}
