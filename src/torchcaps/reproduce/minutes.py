"""What a reproduction should take on a GPU: counted operations and bytes, and a data sheet. Nothing here is measured.

A training step of B images, with M multiply-adds an image forward and G bytes read and written by K operators:

    arithmetic   2 * 3 M B / (share of the peak)        backward is twice the work of forward
    memory       G / (share of the bandwidth)           every operator reads and writes for itself
    launches     K * 5 microseconds                     Python hands out one operator after the other

    eager        max(arithmetic + memory, launches)
    compiled     arithmetic + memory                    launches are recorded; what fusing saves is left out

Validation and the loader are left out: preparing a batch of CIFAR with shifts and flips takes one core of a current
server some 20 microseconds an image, and four of them work beside the GPU.
"""

from dataclasses import dataclass

import yaml

from torchcaps.bench.estimate import H200, Gpu
from torchcaps.cli.recipes import find
from torchcaps.cli.training import classifier
from torchcaps.reproduce.plan import Arm, Reproduction
from torchcaps.training import Optimization
from torchcaps.training.memory import Estimate, estimate

__all__ = ["Minutes", "estimate_minutes"]

DISPATCH = 5e-6
"""Seconds that Python and PyTorch take to hand out an operator."""


@dataclass(frozen=True)
class Minutes:
    """Of a whole training.

    eager, compiled  minutes.
    step             what was counted, see `Estimate`.
    epochs, steps    of the recipe; steps are those of all epochs.
    """

    eager: float
    compiled: float
    step: Estimate
    epochs: int
    steps: int


def estimate_minutes(plan: Reproduction, arm: Arm, gpu: Gpu = H200) -> Minutes:
    """Of one arm by its recipe."""
    recipe = yaml.safe_load(find(plan.recipe_of(arm)).read_text("utf-8"))
    model = {**recipe["model"], **{key.removeprefix("model."): value for key, value in arm.changes.items()}}
    optimization = Optimization(**model["optimization"])
    batch = recipe["data"]["init_args"]["batch_size"]
    precision = str(recipe["trainer"]["precision"])
    module = classifier(
        model["name"],
        model.get("settings", {}),
        num_classes=plan.num_classes,
        in_chans=plan.image[0],
        image_size=plan.image[1:],
    )
    step = estimate(module.model, plan.image, batch, optimizer=optimization, precision=precision)
    peak = gpu.bfloat16 if precision == "bf16-mixed" else gpu.float32
    arithmetic = 6 * step.multiply_adds * batch / (peak * gpu.compute_share)
    memory = step.moved / (gpu.bandwidth * gpu.bandwidth_share)
    epochs = recipe["trainer"]["max_epochs"]
    steps = epochs * -(-plan.images // batch)
    compiled = steps * (arithmetic + memory) / 60
    return Minutes(max(compiled, steps * step.operators * DISPATCH / 60), compiled, step, epochs, steps)
