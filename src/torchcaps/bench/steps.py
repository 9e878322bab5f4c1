"""Whole training steps, with one uniform round as the bound: what routing adds to a network.

capsnet         CapsNet on 28x28 images, batch 128: forward, margin loss and reconstruction, backward, Adam
capsnet-bf16    the same under autocast: convolutions and decoder in bfloat16, routing in float32
attention       the network of Tsai et al. 2020 for CIFAR-10, T = 2, batch 16: forward and backward of cross-entropy,
                beside its backbone and primary capsules alone
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.bench.measuring import saved_bytes, spent
from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import CapsNet, create_model
from torchcaps.routing import Dynamic, Routed

__all__ = ["STEPS", "Step", "measure_steps"]


@dataclass(frozen=True)
class _Reference(Dynamic):
    """Routing on all votes at once, wherever it stands."""

    def __call__(self, *args: Any, **kwargs: Any) -> Routed:
        return super().__call__(*args, **{**kwargs, "backend": "reference"})


@dataclass(frozen=True)
class Step:
    """One line of the table: seconds of a step, and bytes kept for the backward pass, per example."""

    step: str
    form: str
    seconds: float
    saved: float


def measure_steps(names: Sequence[str], batch: int | None = None, device: str = "cpu", repeats: int = 3) -> list[Step]:
    """Every step in all its forms, interleaved; the smallest time of the repeats."""
    found = []
    for name in names:
        forms, examples = STEPS[name](batch, device)
        least = dict.fromkeys(forms, float("inf"))
        for repeat in range(repeats + 1):  # the first is a warm-up
            for form, (_, step) in forms.items():
                seconds = spent(step, device)
                least[form] = min(least[form], seconds) if repeat else least[form]
        for form, (forward, _) in forms.items():
            found.append(Step(name, form, least[form], saved_bytes(forward) / examples))
    return found


Forms = dict[str, tuple[Callable[[], Tensor], Callable[[], object]]]
"""By form: a forward pass to a loss, and a whole step."""


def _capsnet(batch: int | None, device: str, low: bool = False) -> tuple[Forms, int]:
    N = batch or 128
    torch.manual_seed(0)
    images = torch.rand(N, 1, 28, 28, device=device)
    labels = torch.randint(0, 10, (N,), device=device)

    def form(rule: Dynamic) -> tuple[Callable[[], Tensor], Callable[[], object]]:
        torch.manual_seed(0)
        model = CapsNet(routing=rule).to(device)
        adam = torch.optim.Adam(model.parameters())

        def forward() -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=low):
                scores, reconstruction, _ = model(images, labels)
            assert reconstruction is not None
            return margin_loss(scores.float(), labels) + 5e-4 * 784 * reconstruction_loss(
                reconstruction.float(), images
            )

        return forward, _stepper(forward, adam)

    return {"reference": form(_Reference()), "auto": form(Dynamic()), "uniform": form(Dynamic(iterations=1))}, N


def _attention(batch: int | None, device: str) -> tuple[Forms, int]:
    N = batch or 16
    torch.manual_seed(0)
    images, labels = torch.rand(N, 3, 32, 32, device=device), torch.randint(0, 10, (N,), device=device)
    model = create_model("inverted_attention_resnet", in_chans=3, image_size=32).to(device)
    features: nn.Module = model.backbone  # type: ignore[assignment]
    primary: nn.Module = model.primary  # type: ignore[assignment]

    def whole() -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    def below() -> Tensor:
        poses: Tensor = primary(features(images)).poses
        return poses.square().mean()

    return {"auto": (whole, lambda: whole().backward()), "primary": (below, lambda: below().backward())}, N


def _stepper(forward: Callable[[], Tensor], optimiser: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimiser.zero_grad()
        forward().backward()
        optimiser.step()

    return step


STEPS: dict[str, Callable[[int | None, str], tuple[Forms, int]]] = {
    "capsnet": _capsnet,
    "capsnet-bf16": lambda batch, device: _capsnet(batch, device, low=True),
    "attention": _attention,
}
