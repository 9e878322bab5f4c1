"""Small untrained models of every kind that can be looked into: connected, shared and convolutional layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps import create_model
from torchcaps.models import CapsNet
from torchcaps.routing import EM, Attention, Dynamic, Rule

CONV: dict[str, Any] = {"primary_types": 3, "conv_caps": ((4, 3, 2), (5, 3, 1))}
SMALL: dict[str, Any] = {"image_size": (23, 25), **CONV}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "capsnet": lambda: capsnet(Dynamic.sabour()),
    "capsnet_attention": lambda: capsnet(Attention.tsai(iterations=2)),
    "capsnet_em": lambda: capsnet(EM.hinton(), primary_pose=(2, 3), class_pose=(2, 4)),
    "capsnet_hauser": lambda: capsnet(Dynamic.hauser()),
    "su_capsnet": lambda: create_model("su_capsnet", image_size=(17, 19), channels=(4, 4, 6, 8), class_pose=5),
    "concurrent": lambda: create_model(
        "inverted_attention_simple", in_chans=3, backbone_channels=6, routing=Attention.tsai(iterations=3), **SMALL
    ),
    "sequential": lambda: create_model(
        "inverted_attention_simple", in_chans=1, backbone_channels=6, order="sequential", hidden_caps=(6,), **SMALL
    ),
    "em_capsnet": lambda: create_model("em_capsnet", stem_channels=4, num_classes=5, **SMALL),
    "em_window": lambda: create_model("em_capsnet", stem_channels=4, competition="window", **SMALL),
    "capsule_head": lambda: create_model("capsule_head", image_size=8, widths=(8, 12), primary_types=3),
}


def capsnet(routing: Rule, **settings: Any) -> CapsNet:
    """For images of 13 x 11: children of 2 types at 4 x 3 places, 4 classes."""
    settings = {"stem_channels": 6, "primary_types": 2, "primary_pose": 4, "class_pose": 5, "hidden": (12,), **settings}
    return CapsNet(1, 4, (13, 11), routing=routing, kernel_size=4, primary_kernel_size=3, **settings)


def model_and_images(name: str, count: int = 2) -> tuple[nn.Module, Tensor]:
    """The model of that name in evaluation mode, with weights that make routing decide something, and images."""
    model: Any = MODELS[name]().eval()
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "routing"):
                layer.weight.mul_(3.0)
    return model, torch.rand(count, model.in_chans, *model.image_size)
