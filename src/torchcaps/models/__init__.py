"""Models: images in, one score per class out. One file per architecture, its paper on top.

model(images) -> scores [N, classes]        model(images, labels) -> Output(scores, reconstruction, capsules)
"""

from torchcaps.models.capsnet import CapsNet, Output
from torchcaps.models.registry import create_model, list_models

__all__ = ["CapsNet", "Output", "create_model", "list_models"]
