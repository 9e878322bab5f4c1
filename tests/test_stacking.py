"""Initial weights: 1 to 6 stacked layers of default weights keep lengths and gradients alive.

Poses go in with entries of unit variance (so of length sqrt(P), longer than any squashed pose) and squashed to a length
below 1. After each layer the mean length lies within 0.01 .. 0.99, and the gradient of the first layer's weight is
within three decades of the last one's. EM answers for its activations in place of lengths. Attention's poses leave a
LayerNorm, with length sqrt(R Q).

One bound is left out: convolutions and very wide layers, whose parents have many more children than rivals, bring
poses of length sqrt(P) to 0.992 to 1 in the first layer, where Sabour's squash is flat. In the scans made, weights
small enough against that let squashed poses die in a deep stack; `PrimaryCapsules` gives squashed ones.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcaps import Capsules, squash
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules, SharedCapsules
from torchcaps.routing import EM, Attention, Dynamic, Rule

RULES: dict[str, Rule] = {
    "sabour": Dynamic.sabour(),
    "sabour code": Dynamic.sabour_code(),
    "leaky": Dynamic.sabour_code(leaky=True),
    "su": Dynamic.su(),
    "su first": Dynamic.su_first(),
    "hauser": Dynamic.hauser(),
    "no routing": Dynamic(iterations=1),
    "tanh": Dynamic(squash="tanh"),
    "stopped gradients": Dynamic(detach="all_but_last"),
    "attention": Attention.tsai(),
    "em": EM.hinton(),
}
DEPTH, CAPS, POSE, BATCH = 6, 16, 8, 4
Layer = FullyConnectedCapsules | SharedCapsules | ConvCapsules

STACKS: dict[str, tuple[tuple[int, ...], Callable[[int, Rule], Layer]]] = {
    "fully connected": (
        (CAPS,),
        lambda _, rule: FullyConnectedCapsules(CAPS, CAPS, POSE, POSE, routing=rule),
    ),
    "narrowing": (
        (64,),
        lambda k, rule: FullyConnectedCapsules(CAPS if k else 64, CAPS, POSE, POSE, routing=rule),
    ),
    "shared": (
        (CAPS,),
        lambda _, rule: SharedCapsules(CAPS, POSE, POSE, routing=rule, typical_caps=CAPS),
    ),
    "convolution": (
        (CAPS, 4),
        lambda _, rule: ConvCapsules(CAPS, CAPS, POSE, POSE, 3, padding=1, routing=rule, spatial_dims=1),
    ),
    "convolution where all compete": (
        (CAPS, 4),
        lambda _, rule: ConvCapsules(
            CAPS, CAPS, POSE, POSE, 3, padding=1, routing=rule, spatial_dims=1, competition="all"
        ),
    ),
}
MANY_CHILDREN = ("narrowing", "convolution")
CASES = [
    (kind, name)
    for kind in STACKS
    for name, rule in RULES.items()
    if kind != "convolution where all compete" or rule.sums_to != "children"  # no such layer
]


def stack(kind: str, rule: Rule, squashed: bool) -> tuple[list[Tensor], list[float]]:
    """After each of six layers: presence (lengths, or activations), and first over last gradient norm."""
    places, make = STACKS[kind]
    layers = [make(k, rule) for k in range(DEPTH)]
    poses = torch.randn(BATCH, *places, 1, POSE)
    capsules = Capsules(squash(poses) if squashed else poses, torch.rand(BATCH, *places))
    presence, ratios = [], []
    for k, layer in enumerate(layers):
        capsules = layer(capsules)
        assert capsules.poses.isfinite().all()
        presence.append(capsules.lengths if capsules.activations is None else capsules.activations)
        total = (capsules.poses * torch.randn_like(capsules.poses)).sum()
        if capsules.activations is not None:
            total = total + (capsules.activations * torch.randn_like(capsules.activations)).sum()
        first, last = torch.autograd.grad(total, [layers[0].weight, layers[k].weight], retain_graph=True)
        assert first.isfinite().all()
        ratios.append((first.norm() / last.norm()).item())
    return presence, ratios


@pytest.mark.parametrize("squashed", [True, False], ids=["squashed", "unit variance"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_to_six_layers_keep_lengths_and_gradients_alive(kind: str, name: str, squashed: bool) -> None:
    presence, ratios = stack(kind, RULES[name], squashed)
    means = [p.mean().item() for p in presence]
    if name == "attention":
        means = [m / POSE**0.5 for m in means]
        assert all(0.9 < m < 1.1 for m in means)
    else:
        assert min(means) > 0.01
        saturated = kind in MANY_CHILDREN and not squashed
        assert max(means[saturated:]) < 0.99
    assert all(1e-3 < ratio < 1e3 for ratio in ratios), ratios
