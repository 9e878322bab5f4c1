"""Models: images in, one score per class out. One file per architecture, its paper on top.

model(images) -> scores [N, classes]        model(images, labels) -> Output(scores, reconstruction, capsules)
"""

from torchcaps.models._model import Output
from torchcaps.models.activated_attention import ActivatedAttention
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.cnn import ConvNet, ResNet, ResNetFeatures
from torchcaps.models.em_capsnet import EMCapsNet
from torchcaps.models.headed import ConvFeatures, HeadedNet, matched_hidden
from torchcaps.models.inverted_attention import InvertedAttentionCapsNet
from torchcaps.models.registry import create_model, list_models
from torchcaps.models.su import SuCapsNet, SuCNN

__all__ = [
    "ActivatedAttention", "CapsNet", "ConvFeatures", "ConvNet", "EMCapsNet", "HeadedNet", "InvertedAttentionCapsNet",
    "Output", "ResNet", "ResNetFeatures", "SuCNN", "SuCapsNet", "create_model", "list_models", "matched_hidden",
]  # fmt: skip
