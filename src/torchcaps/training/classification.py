"""Training and testing of any model that gives one score per class.

    (x, y) or (x, y, mask)     a batch: y class indices [N], or presence [N, K] where labels are several
    scores [N, K]              model(x), model(x, mask=mask)
    loss                       loss(scores, y), a mean over the batch
                               + weight * reconstruction_loss(reconstruction, x)      of model(x, y)
    probabilities [N, K]       scores.py, the one place; all metrics are of these

The loss being a mean, gradients of processes that hold equal parts of a batch average to the gradient of the whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from torchcaps.losses import SpreadLoss, reconstruction_loss
from torchcaps.training.checkpoint import describe_model
from torchcaps.training.metrics import ExampleMean, evaluation_metrics, training_accuracy
from torchcaps.training.optimization import Optimization
from torchcaps.training.scores import Link, check_link, probabilities
from torchcaps.types import value_range, whole

__all__ = ["Batch", "Classification", "Prediction", "Reconstructed"]

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


@runtime_checkable
class Reconstructed(Protocol):
    """What a model with a decoder gives to those who bring labels."""

    @property
    def scores(self) -> Tensor: ...
    @property
    def reconstruction(self) -> Tensor | None: ...


class Prediction(NamedTuple):
    """What `predict` gives for a batch.

    scores          `[N, K]`, the model's.
    probabilities   `[N, K]`.
    labels          the class of the highest probability `[N]`; of several labels, presence `[N, K]` in bool.
    """

    scores: Tensor
    probabilities: Tensor
    labels: Tensor


class Classification(pl.LightningModule):
    """A model, its loss, and how it is trained: give it to a `Trainer` (`torchcaps.training.trainer` makes one).

    model                  any module from a batch `[N, ...]` to scores `[N, K]`. A mask in the batch is handed on as
                           `model(x, mask=mask)`.
    loss                   `loss(scores, y)` to a single number: `MarginLoss()`, `SpreadLoss.linear(...)`,
                           `nn.CrossEntropyLoss()`, `nn.BCEWithLogitsLoss()`. The margin of a `SpreadLoss` follows the
                           steps of the optimiser by itself.
    num_classes            K; None takes it from `class_names`, or from `config`.
    multi_label            y is presence `[N, K]`; False: one class each, `[N]`.
    link                   what a model without a method `probabilities` gives (scores.py).
    reconstruction_weight  of `reconstruction_loss`, 0.0005 in Sabour et al. 2017; 0 leaves the decoder alone, and a
                           model to be trained so is better built without one.
    optimization           optimiser and learning rate.
    threshold              probability from which on a label counts as present, with `multi_label`.
    compile                True compiles the model when training or testing starts; a string is the name of a backend of
                           `torch.compile`. Checkpoints are the same with and without.
    channels_last          True keeps weights and images of convolutions with their channels last in memory, which is
                           faster in bfloat16 and on GPUs. The numbers are the same but for rounding.
    config                 a plain dict from which the model can be built again: {"name": ..., "num_classes": ..., ...}.
    class_names            K names, in the order of the scores.
    preprocessing          a plain dict that says what was done to the data.

    The last three go into every checkpoint, so that one file is enough to predict (`load_checkpoint`). Raises
    ValueError where arguments, or a batch and they, do not fit.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        num_classes: int | None = None,
        multi_label: bool = False,
        link: Link | None = None,
        reconstruction_weight: float = 0.0,
        optimization: Optimization = Optimization(),  # noqa: B008  (frozen)
        threshold: float = 0.5,
        compile: bool | str = False,
        channels_last: bool = False,
        config: Mapping[str, Any] | None = None,
        class_names: Sequence[str] | None = None,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {model!r}: build it before, create_model(...)")
        check_link(model, link)
        if not reconstruction_weight >= 0:
            raise ValueError(
                f"reconstruction_weight={reconstruction_weight}: it must be 0 or more; the paper's is 0.0005"
            )
        self.model, self.loss = model, loss
        self.num_classes = _count(num_classes, class_names, config, multi_label)
        self.multi_label, self.link, self.threshold = multi_label, link, threshold
        self.reconstruction_weight = reconstruction_weight
        self.optimization = optimization
        self.compile_with, self.channels_last = compile, channels_last
        self.description = describe_model(config, class_names, preprocessing, multi_label, link, threshold)
        K = self.num_classes
        self.train_loss, self.train_accuracy = ExampleMean(), training_accuracy(K, multi_label, threshold)
        self.val_loss, self.test_loss = ExampleMean(), ExampleMean()
        self.val_metrics = evaluation_metrics(K, multi_label, threshold, prefix="val/")
        self.test_metrics = evaluation_metrics(K, multi_label, threshold, prefix="test/")
        # half an epoch's sums are saved with the rest, so that a resumed epoch reports what a whole one would
        for metric in (self.train_loss, self.train_accuracy):
            metric.persistent(True)

    def setup(self, stage: str) -> None:
        """Lay out and compile the model, once, if that was asked for."""
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if self.compile_with and self.model._compiled_call_impl is None:
            self.model.compile(backend="inductor" if self.compile_with is True else self.compile_with)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores `[N, K]`."""
        x = self._laid_out(x)
        scores: Tensor = self.model(x) if mask is None else self.model(x, mask=mask)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores `[N, K]` as probabilities `[N, K]`."""
        return probabilities(self.model, scores, multi_label=self.multi_label, link=self.link)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, scores `[N, K]`, reconstruction or None) of a batch."""
        x, y, mask = self.read(batch)
        if isinstance(self.loss, SpreadLoss) and self._fitting():
            self.loss.steps_taken.fill_(self.global_step)
        if not self.reconstruction_weight:
            scores = self(x, mask)
            return self._classify(scores, y), scores, None
        laid = self._laid_out(x)
        output = self.model(laid, y) if mask is None else self.model(laid, y, mask=mask)
        if not isinstance(output, Reconstructed) or output.reconstruction is None:
            raise ValueError(
                f"reconstruction_weight={self.reconstruction_weight}, but {type(self.model).__name__} reconstructs "
                "nothing: build it with a decoder (decoder=True), or leave the weight at 0"
            )
        loss = self._classify(output.scores, y)
        loss = loss + self.reconstruction_weight * reconstruction_loss(output.reconstruction, x)
        return loss, output.scores, output.reconstruction

    def read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """The door: (x, y, mask or None). Looks at the labels' values on the CPU alone."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise ValueError(f"a batch must be (x, y) or (x, y, mask), not {_what(batch)}")
        x, y, mask = (*batch, None) if len(batch) == 2 else batch
        if not isinstance(y, Tensor):
            raise ValueError(f"labels must be a tensor, not {_what(y)}")
        N, K = len(x), self.num_classes
        wanted = (N, K) if self.multi_label else (N,)
        if tuple(y.shape) != wanted or (not self.multi_label and (y.is_floating_point() or y.dtype == torch.bool)):
            they_are = "presence, 0 or 1" if self.multi_label else "class indices of torch.long"
            raise ValueError(
                f"labels {list(y.shape)} of {y.dtype} do not fit: with multi_label={self.multi_label} and {K} classes "
                f"they are {list(wanted)}, {they_are}; or give multi_label={not self.multi_label}"
            )
        values = value_range(y)
        highest = 1 if self.multi_label else K - 1
        if values is not None and not (values[0] >= 0 and values[1] <= highest):
            raise ValueError(f"labels hold {values[0]} to {values[1]}, but with {K} classes may be 0 to {highest}")
        return x, y, mask

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, scores, _ = self.losses(batch)
        self.train_loss.update(loss, len(scores))
        self.train_accuracy.update(self.probabilities(scores.detach()), self._answers(batch))
        self.log("train/loss_step", loss.detach(), prog_bar=True, on_step=True, on_epoch=False)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=True, on_epoch=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self._report({"train/loss": self.train_loss, "train/accuracy": self.train_accuracy})

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.val_loss, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self._report({"val/loss": self.val_loss}, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.test_loss, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        self._report({"test/loss": self.test_loss}, self.test_metrics)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Prediction:
        x, mask = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[2] if len(batch) == 3 else None)
        scores = self(x, mask)
        chances = self.probabilities(scores)
        return Prediction(scores, chances, chances > self.threshold if self.multi_label else chances.argmax(1))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimization.make_optimizer(self)
        total = self.trainer.estimated_stepping_batches
        batches = self.trainer.num_training_batches  # inf where the data have no length
        epoch = batches if math.isinf(batches) else math.ceil(batches / self.trainer.accumulate_grad_batches)
        if self.trainer.ckpt_path is not None:
            # asking for the number of steps has set up the loaders, before the state that they should go on from is
            # there; Lightning hands it over when it sets them up, so let it do so again
            self.trainer.fit_loop._combined_loader = None
        schedule = self.optimization.make_schedule(optimizer, total, epoch)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        there = checkpoint.get("torchcaps", {})
        for name in ("class_names", "multi_label", "preprocessing") if self._fitting() else ():
            if there.get(name) != self.description[name]:
                raise ValueError(
                    f"the checkpoint was trained on other data: {name} is {there.get(name)!r} there and "
                    f"{self.description[name]!r} here; go on with the same data, or begin another run"
                )
        own = {name: tuple(w.shape) for name, w in self.state_dict().items() if not is_lazy(w)}
        saved = {name: tuple(w.shape) for name, w in checkpoint["state_dict"].items()}
        wrong = [name for name in own | saved if name.startswith("model.") and own.get(name) != saved.get(name)]
        if wrong:
            said = [f"{list(s[wrong[0]])}" if wrong[0] in s else "not there" for s in (saved, own)]
            raise ValueError(
                f"the checkpoint holds another model than this {type(self.model).__name__}: {len(wrong)} weights "
                f"differ, {wrong[0]} is {said[0]} in the checkpoint and {said[1]} here; take the configuration that "
                "it was trained with"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["torchcaps"] = self.description
        if isinstance(self.loss, SpreadLoss):  # a callback that averages weights averages this count too
            checkpoint["state_dict"]["loss.steps_taken"] = torch.tensor(self.global_step)

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def _fitting(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == "fit"

    def _classify(self, scores: Tensor, y: Tensor) -> Tensor:
        if tuple(scores.shape) != (len(y), self.num_classes):
            raise ValueError(
                f"{type(self.model).__name__} gives scores {list(scores.shape)} for {len(y)} examples of "
                f"{self.num_classes} classes, not [{len(y)}, {self.num_classes}]: give both the same num_classes"
            )
        return self.loss(scores, y.to(scores.dtype) if self.multi_label else y.long())

    def _answers(self, batch: Batch) -> Tensor:
        return (batch[1] > 0.5).long() if self.multi_label else batch[1]

    def _evaluate(self, batch: Batch, mean: ExampleMean, metrics: MetricCollection) -> None:
        loss, scores, _ = self.losses(batch)
        mean.update(loss, len(scores))
        metrics.update(self.probabilities(scores), self._answers(batch))

    def _report(self, means: dict[str, Metric], metrics: MetricCollection | None = None) -> None:
        """Log what an epoch came to. The values are those of all processes already: torchmetrics gathers."""
        values = {name: metric.compute() for name, metric in means.items()}
        if metrics is not None:
            values |= metrics.compute()
        for name, value in values.items():
            self.log(name, value, prog_bar=name.endswith(("/loss", "/accuracy")), sync_dist=True)
        for metric in means.values():
            metric.reset()
        if metrics is not None:
            metrics.reset()


def _count(
    num_classes: int | None, class_names: Sequence[str] | None, config: Mapping[str, Any] | None, multi_label: bool
) -> int:
    """K, from whatever names it; a ValueError where they differ, or none does."""
    named = {
        "num_classes": num_classes,
        "class_names": None if class_names is None else len(class_names),
        "config": None if config is None else config.get("num_classes"),
    }
    counts = {name: count for name, count in named.items() if count is not None}
    if len(set(counts.values())) != 1:
        said = ", ".join(f"{name} says {count}" for name, count in counts.items()) or "nothing says it"
        raise ValueError(f"the number of classes is not clear: {said}; give num_classes=, or class_names=")
    K = whole(next(iter(counts.values())))
    if K is None or not (K >= 2 or (K == 1 and multi_label)):
        raise ValueError(
            f"num_classes={K}: a choice needs 2 classes or more; for one question with yes or no give multi_label=True "
            "and presence [N, 1]"
        )
    return K


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{len(value)} things" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
