"""torchcaps: capsule networks for PyTorch. Right, fast, honest.

rule(poses, weight, activations=None, ...) -> Routed      torchcaps.routing: dynamic, attention, em and their rules
layer(Capsules) -> Capsules                               torchcaps.layers
model(images) -> scores [N, classes]                      torchcaps.models
"""

from torchcaps import layers, losses, models, routing
from torchcaps.models import create_model, list_models
from torchcaps.squash import squash, unsquash
from torchcaps.types import Capsules, Routed

__version__ = "0.1.0"

__all__ = [
    "Capsules", "Routed", "create_model", "layers", "list_models", "losses", "models", "routing", "squash", "unsquash",
]  # fmt: skip
