"""Models by name, out of one explicit table. A model of your own is made by its constructor; the table is for ours."""

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from torchcaps.models.capsnet import CapsNet
from torchcaps.models.cnn import ConvNet, ResNet, ResNetFeatures
from torchcaps.models.em_capsnet import EMCapsNet
from torchcaps.models.headed import HeadedNet
from torchcaps.models.inverted_attention import InvertedAttentionCapsNet
from torchcaps.models.su import SuCapsNet, SuCNN

__all__ = ["create_model", "list_models"]


def _behind_resnet(model: Callable[..., nn.Module], width: int, **fixed: Any) -> Callable[..., nn.Module]:
    """The model with two stages of a ResNet as its stem; `stem_widths` are their channels."""

    def make(in_chans: int, stem_widths: Sequence[int] = (64, width), **settings: Any) -> nn.Module:
        stem = ResNetFeatures(in_chans, stem_widths, (3, 4), (1, 2))
        return model(in_chans=in_chans, stem=stem, **{**fixed, **settings})

    return make


_DIVERSE: dict[str, Any] = {
    "backbone": "simple", "backbone_channels": 1024, "primary_types": 16, "primary_kernel_size": 3,
    "primary_stride": 2, "pose": (8, 8), "conv_caps": ((16, 3, 1),),
}  # fmt: skip

MODELS: dict[str, Callable[..., nn.Module]] = {
    # Sabour, Frosst, Hinton 2017; behind a resnet: Tsai et al. 2020
    "capsnet": CapsNet,
    "capsnet_resnet": _behind_resnet(CapsNet, 256, primary_stride=1, decoder=False),
    # Hinton, Sabour, Frosst 2018, large and small; behind other stems: Tsai et al. 2020
    "em_capsnet": EMCapsNet,
    "em_capsnet_small": partial(EMCapsNet, stem_channels=64, primary_types=8, conv_caps=((16, 3, 2), (16, 3, 1))),
    "em_capsnet_simple": partial(EMCapsNet, stem_channels=256, kernel_size=3, stem_stride=2, stem_padding=1),
    "em_capsnet_resnet": _behind_resnet(EMCapsNet, 128),
    # Su 2018
    "su_capsnet": SuCapsNet,
    "su_cnn": SuCNN,
    # Tsai, Srivastava, Goh, Salakhutdinov 2020: for CIFAR-10, and for DiverseMultiMNIST of 36x36
    "inverted_attention_resnet": InvertedAttentionCapsNet,
    "inverted_attention_simple": partial(InvertedAttentionCapsNet, backbone="simple", backbone_channels=256),
    "inverted_attention_diverse": partial(InvertedAttentionCapsNet, **_DIVERSE),
    # what they compare with
    "cnn_cifar": ConvNet,
    "cnn_diverse": partial(ConvNet, hidden=(640,)),
    "resnet18_cifar": ResNet,
    # one backbone, three heads
    "capsule_head": HeadedNet,
    "linear_head": partial(HeadedNet, head="linear"),
    "mlp_head": partial(HeadedNet, head="mlp"),
}

WITH_WEIGHTS: tuple[str, ...] = ()
"""Names that `pretrained=True` has weights for."""


def create_model(
    name: str,
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: int | Sequence[int] = 28,
    pretrained: bool = False,
    **settings: Any,
) -> nn.Module:
    """The model of that name, for images `[N, in_chans, H, W]`; `settings` are further arguments of its constructor.

    Raises ValueError for a name that `list_models()` does not hold, and for `pretrained=True` without weights to load.

    >>> create_model("capsnet", num_classes=2, decoder=False).num_classes
    2
    """
    if not isinstance(name, str):
        raise ValueError(f"a model's name is a string, not {name!r}: list_models() names them all")
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(MODELS))};"
        raise ValueError(f"no model {name!r}: {hint} list_models() names them all")
    if pretrained and name not in WITH_WEIGHTS:
        there = ", ".join(WITH_WEIGHTS) or "none yet"
        raise ValueError(f"no pretrained weights for {name!r}: names that have some: {there}; give pretrained=False")
    return MODELS[name](num_classes=num_classes, in_chans=in_chans, image_size=image_size, **settings)


def list_models(filter: str = "*") -> list[str]:
    """Names for `create_model`, in order, that match a pattern of the shell's kind.

    Raises ValueError for a filter that is no string.

    >>> list_models("su_*")
    ['su_capsnet', 'su_cnn']
    """
    if not isinstance(filter, str):
        raise ValueError(f"filter must be a pattern such as 'caps*', or left out for all models, not {filter!r}")
    return sorted(fnmatch.filter(MODELS, filter))
