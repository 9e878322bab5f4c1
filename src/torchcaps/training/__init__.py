"""Training and testing, on Lightning: the room is given a model and data, and makes neither.

module = Classification(model, loss=MarginLoss(), class_names=names, config=config)
trainer("runs/mine", max_epochs=10).fit(module, data)
load_checkpoint("runs/mine/checkpoints/best.ckpt", build).model
"""

from torchcaps.training.checkpoint import AtomicCheckpointIO, LoadedModel, load_checkpoint, read_checkpoint
from torchcaps.training.classification import Classification, Prediction
from torchcaps.training.clock import Clock
from torchcaps.training.costs import Costs, training_cost
from torchcaps.training.health import CapsuleHealth, LayerHealth, capsule_health
from torchcaps.training.memory import Estimate, available_bytes, estimate, refuse_if_too_large
from torchcaps.training.metrics import evaluation_metrics
from torchcaps.training.optimization import Optimization
from torchcaps.training.randomness import RandomState
from torchcaps.training.runs import MetricsFile, SaveLast, quiet, trainer, trainer_settings
from torchcaps.training.scores import probabilities

__all__ = [
    "AtomicCheckpointIO", "CapsuleHealth", "Classification", "Clock", "Costs", "Estimate", "LayerHealth", "LoadedModel",
    "MetricsFile", "Optimization", "Prediction", "RandomState", "SaveLast", "available_bytes", "capsule_health",
    "estimate", "evaluation_metrics", "load_checkpoint", "probabilities", "quiet", "read_checkpoint",
    "refuse_if_too_large", "trainer", "trainer_settings", "training_cost",
]  # fmt: skip
