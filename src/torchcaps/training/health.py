"""How the capsules are doing: measured every so many steps, logged, and said in words when something is wrong.

For each layer that keeps the `CapsuleLayer` protocol, over a few examples of the batch:

    presence            activation of a capsule, or where it has none the length of its pose
    dead                share of capsules whose presence stayed below 0.01 in every example lately looked at
    mean_length         of all poses
    coupling_entropy    -sum_j p_ij log p_ij / log J,  p_ij = c_ij / sum_j c_ij, mean over children:
                        1 where a child's shares are even (routing decides nothing), 0 where one parent gets all
    gradient_norm       of all parameters of the layer together

The examples go through the model once more for that, in evaluation mode, without gradients and not compiled.
"""

import contextlib
import inspect
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchcaps.training.classification import Batch, Classification
from torchcaps.types import CapsuleLayer, Capsules, Routed

__all__ = ["CapsuleHealth", "LayerHealth", "capsule_health", "first_not_finite"]

COUPLED = 2
"""Examples whose coupling is looked at: it takes all votes in memory."""

Route = Callable[..., Routed]

BEYOND = 1e-3
"""How far an image may be outside 0..1 before that is worth a word."""


@dataclass(frozen=True)
class LayerHealth:
    """What a look at one layer found; `presence` `[J]` is each capsule's largest over the examples (and places)."""

    presence: Tensor
    mean_length: float
    coupling_entropy: float | None
    has_activations: bool


class CapsuleHealth(Callback):
    """Logs the state of every capsule layer, stops a run whose loss is no number, and warns of what is going wrong.

    every_n_steps  steps of the optimiser from one look to the next.
    examples       of the batch that are looked at.
    dead_below     a presence that counts as none.
    warn_above     share of dead capsules in a layer from which on a warning is given, once per layer.

    Raises FloatingPointError before a step is taken on a loss that is NaN or infinite, and names the step, where in the
    model it came from, and what to try.
    """

    def __init__(
        self, every_n_steps: int = 50, examples: int = 32, dead_below: float = 0.01, warn_above: float = 0.1
    ) -> None:
        if every_n_steps < 1 or examples < 1:
            raise ValueError(f"every_n_steps={every_n_steps} and examples={examples} must be 1 or more")
        self.every_n_steps, self.examples = every_n_steps, examples
        self.dead_below, self.warn_above = dead_below, warn_above
        self._batch: Any = None
        self._norms: dict[str, Tensor] = {}
        self._lately: dict[str, deque[Tensor]] = {}
        self._warned: set[str] = set()
        self._looked_at = -1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if not loss.isfinite():
            raise FloatingPointError(self._say_not_finite(trainer, _ours(pl_module), loss))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0 or trainer.global_step == 0:
            layers = capsule_layers(_ours(pl_module).model)
            self._norms = {name: _gradient_norm(layer) for name, layer in layers.items()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == 1
        if not due or step == self._looked_at or not trainer.is_global_zero:
            return
        self._looked_at = step
        module = _ours(pl_module)
        few = tuple(part[: self.examples] for part in batch)
        with trainer.precision_plugin.forward_context():
            found = capsule_health(module.model, lambda: module(*_seen(module, few)))
            self._look_at_range(module, few)
        values: dict[str, float] = {}
        for name, health in found.items():
            dead = self._dead(name, health, trainer)
            values[f"health/{name}/dead"] = dead
            values[f"health/{name}/mean_length"] = health.mean_length
            if health.coupling_entropy is not None:
                values[f"health/{name}/coupling_entropy"] = health.coupling_entropy
            if name in self._norms:
                values[f"health/{name}/gradient_norm"] = self._norms[name].item()
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step - 1)  # Lightning counts the steps of its loggers from 0

    def _dead(self, name: str, health: LayerHealth, trainer: pl.Trainer) -> float:
        """Share of capsules that lately nothing has stirred, and a warning once where it is too large."""
        J = len(health.presence)
        wanted = math.ceil(max(256, 10 * J) / self.examples)  # so many looks that each of J classes was likely shown
        lately = self._lately.setdefault(name, deque(maxlen=wanted))
        lately.append(health.presence)
        silent = int((torch.stack(list(lately)).amax(0) < self.dead_below).sum())
        if len(lately) == wanted and silent > self.warn_above * J and name not in self._warned:
            self._warned.add(name)
            what = "activation" if health.has_activations else "length"
            fix = "for EM a smaller final_lambda, or fewer capsules" if health.has_activations else (
                "a squash that is steep at 0 (squash='rational'), a larger init= of the layer, or fewer capsules"
            )  # fmt: skip
            warnings.warn(
                f"{name}: {silent} of {J} capsules are dead: no {what} above {self.dead_below} in the last "
                f"{wanted * self.examples} examples looked at, up to step {trainer.global_step}. Hardly a gradient "
                f"reaches them. Try a lower learning rate (now {_rate(trainer):.2g}) or a warm-up, {fix}; a class that "
                "no example shows looks the same",
                stacklevel=2,
            )
        return silent / J

    def _look_at_range(self, module: Classification, few: Batch) -> None:
        """Warn once where images go beyond what the decoder can draw."""
        if not module.reconstruction_weight or "range" in self._warned:
            return
        low, high = (end.item() for end in few[0].aminmax())
        if low >= -BEYOND and high <= 1 + BEYOND:
            return
        with torch.no_grad(), _untouched(module.model):
            reconstruction = module.losses(few)[2]
        assert reconstruction is not None
        bottom, top = (end.item() for end in reconstruction.aminmax())
        if bottom >= 0 and top <= 1:
            self._warned.add("range")
            warnings.warn(
                f"images hold {low:.3g} to {high:.3g}, but the decoder draws in 0..1 and can never match them: give "
                "images in 0..1 (bytes / 255, and no normalisation by mean and deviation), or leave out the decoder "
                "and reconstruction_weight",
                stacklevel=2,
            )

    def _say_not_finite(self, trainer: pl.Trainer, module: Classification, loss: Tensor) -> str:
        with trainer.precision_plugin.forward_context():
            where = first_not_finite(module.model, self._batch, lambda: module.losses(self._batch))
        advice = [f"a lower learning rate (now {_rate(trainer):.2g}) or a warm-up"]
        if trainer.gradient_clip_val is None:
            advice.append("gradient_clip_val=1.0")
        if "16" in str(trainer.precision):
            advice.append(f"precision='32-true' instead of '{trainer.precision}'")
        return (
            f"the loss of step {trainer.global_step + 1} (epoch {trainer.current_epoch}) is {loss.item()}: {where}. "
            f"The step was not taken, and the last checkpoint is from before it. Try {', '.join(advice)}"
        )


def capsule_health(model: nn.Module, run: Callable[[], object]) -> dict[str, LayerHealth]:
    """What each capsule layer of `model` does while `run()` puts some examples through it, by the layers' names.

    Nothing of the model changes: evaluation mode, no gradients, and the random numbers are put back.
    """
    found: dict[str, LayerHealth] = {}

    def watch(name: str, route: Route, capsules: Capsules, mask: Tensor | None, routed: Routed) -> None:
        found[name] = _look(route, capsules, mask, routed)

    with torch.no_grad(), _untouched(model), _watched(model, watch):
        run()
    return found


def first_not_finite(model: nn.Module, batch: Any, run: Callable[[], object]) -> str:
    """In words: where the first number that is NaN or infinite comes from when `run()` puts the batch through."""
    for number, part in enumerate(batch):
        if isinstance(part, Tensor) and not part.isfinite().all():
            bad = (~part.isfinite()).flatten(1 if part.dim() > 1 else 0).any(-1).nonzero().flatten().tolist()
            what = ("the images themselves hold", "the labels themselves hold", "the mask itself holds")[number]
            return f"{what} NaN or infinity, in examples {bad[:5]} of the batch: look at the data"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the weights {name} are not finite already, so the gradients of the step before were not"
    first: list[str] = []

    def look(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, out: Any) -> None:
            if not first and not _finite(out):
                come = "finite" if _finite(inputs) else "not finite"
                first.append(
                    f"it first appears in {name or 'the model'} ({type(module).__name__}), whose input is {come}"
                )

        return hook

    handles = [module.register_forward_hook(look(name, module)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), _untouched(model, evaluate=False):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return first[0] if first else "all that the model gives is finite, so it comes from the loss function"


def capsule_layers(model: nn.Module) -> dict[str, CapsuleLayer]:
    """Layers from capsules to capsules, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CapsuleLayer)}


@contextlib.contextmanager
def _watched(model: nn.Module, watch: Callable[..., None]) -> Iterator[None]:
    """Call `watch(name, route, capsules, mask, routed)` whenever a capsule layer routes, by its forward or not."""
    layers = capsule_layers(model)

    def watching(name: str, layer: CapsuleLayer) -> Route:
        route = layer.route

        def watched(capsules: Capsules, mask: Tensor | None = None, **settings: Any) -> Routed:
            routed = route(capsules, mask, **settings)
            watch(name, route, capsules, mask, routed)
            return routed

        return watched

    for name, layer in layers.items():
        layer.route = watching(name, layer)  # type: ignore[method-assign]  # in the instance, over the method
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.route


@contextlib.contextmanager
def _untouched(model: nn.Module, evaluate: bool = True) -> Iterator[None]:
    """The model not compiled and, if asked for, in evaluation mode; then all is as it was, random numbers too."""
    modes = [(module, module.training) for module in model.modules()]
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    devices = [d for d in {p.device for p in model.parameters()} if d.type != "cpu"]
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            if evaluate:
                model.eval()
            yield
    finally:
        model._compiled_call_impl = compiled
        for module, training in modes:
            module.training = training


def _look(route: Route, capsules: Capsules, mask: Tensor | None, routed: Routed) -> LayerHealth:
    parents = routed.capsules
    has_activations = parents.activations is not None
    presence = parents.lengths if parents.activations is None else parents.activations
    others = [d for d in range(presence.dim()) if d != 1]
    coupling = None
    if presence.shape[1] > 1 and "return_coupling" in inspect.signature(route).parameters:
        active = capsules.activations
        some = Capsules(capsules.poses[:COUPLED], None if active is None else active[:COUPLED])
        coupling = route(some, None if mask is None else mask[:COUPLED], return_coupling=True).coupling
    return LayerHealth(
        presence=presence.amax(others).float().cpu(),
        mean_length=parents.lengths.float().mean().item(),
        coupling_entropy=None if coupling is None else _entropy(coupling.float()),
        has_activations=has_activations,
    )


def _entropy(coupling: Tensor) -> float:
    """Mean entropy of the shares `[N, I, J]` of children that take part, as a share of the largest, log J."""
    total = coupling.sum(2, keepdim=True)
    shares = coupling / total.clamp(min=torch.finfo(coupling.dtype).tiny)
    entropy = torch.special.entr(shares).sum(2)[total[..., 0] > 0]
    return (entropy.mean() / math.log(coupling.shape[2])).item()


def _finite(values: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in tree_iter(values) if isinstance(t, Tensor))


def _gradient_norm(layer: CapsuleLayer) -> Tensor:
    assert isinstance(layer, nn.Module)
    norms = [p.grad.norm() for p in layer.parameters() if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.zeros(())


def _seen(module: Classification, batch: Batch) -> tuple[Tensor, Tensor | None]:
    x, _, mask = module.read(batch)
    return x, mask


def _rate(trainer: pl.Trainer) -> float:
    rate: float = trainer.optimizers[0].param_groups[0]["lr"]
    return rate


def _ours(module: pl.LightningModule) -> Classification:
    if not isinstance(module, Classification):
        raise ValueError(f"CapsuleHealth looks into a Classification, not into a {type(module).__name__}")
    return module
