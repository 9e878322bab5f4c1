"""A capsule network as a scikit-learn classifier: arrays in, labels out, in pipelines and searches like any other.

    X [n, features]                                          vectors      d channels at one place
    X [n, length]     or [n, channels, length]               sequences    NaN where one has ended
    X [n, H, W]       or [n, channels, H, W]                 images
    X [n, D, H, W]    or [n, channels, D, H, W]              volumes

The model is `HeadedNet`: each channel (of a vector: each feature) is brought to mean 0 and variance 1, goes through a
few convolutions (of a vector: linear layers), becomes capsules at every place, and these are routed to the classes.

    loss    the negative logarithm of the probability that the model gives to the right class
            (`training.probabilities`, the same that `predict_proba` gives)
    steps   AdamW under a cosine from `lr` to 0; batches of nearly the same size, in a new order each epoch
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torchcaps.layers._layer import positive
from torchcaps.models import HeadedNet
from torchcaps.routing import Rule
from torchcaps.run.build import make_rule
from torchcaps.training import Optimization, probabilities
from torchcaps.types import Pose

__all__ = ["CapsuleClassifier", "Kind"]

Kind = Literal["vectors", "sequences", "images", "volumes"]

_AXES: dict[str, int] = {"vectors": 0, "sequences": 1, "images": 2, "volumes": 3}
_BY_DIMENSIONS: dict[int, Kind] = {2: "vectors", 3: "images", 4: "images", 5: "volumes"}

CHUNK = 256
"""Examples that are looked at together where nothing is learned from them."""


class CapsuleClassifier(ClassifierMixin, BaseEstimator):
    """Capsules on a small convolutional network, as a scikit-learn classifier (shapes on top of this file).

    routing              a rule, or one of the names that recipes use, such as "Dynamic.su" or "EM". With
                         `Dynamic(iterations=1)` routing is off.
    kind                 "vectors", "sequences", "images" or "volumes"; None takes X of 2 dimensions for vectors, of 3
                         and 4 for images, of 5 for volumes.
    channels_last        the channels of X, where it has any, are its last axis and not its second.
    backbone             a module from `[n, channels, *spatial]` to a map of features, in place of the convolutions:
                         `fit` trains a copy. For sequences with NaN it needs `with_mask` (`models.headed`).
    widths               channels of each convolution, where no backbone is given.
    primary_types, primary_pose, class_pose  of the capsules, as in `HeadedNet`.
    loss                 `loss(scores, y)`, such as `MarginLoss()`; None is the one on top of this file.
    epochs               how often all of X is seen, at most.
    batch_size, lr, weight_decay  of the steps. Weight decay spares norms and biases.
    early_stopping       hold out `validation_fraction` of X, of each class alike, stop after `n_iter_no_change` epochs
                         in a row that did not lower the loss on it, and keep the weights of the best epoch.
    device               where to calculate: "cpu", "cuda", ... A fitted classifier is stored for any machine.
    random_state         a whole number makes `fit` the same each time, on one machine and number of threads. torch's
                         own random numbers are left as they were.

    After `fit`: `classes_`; `n_features_in_`, the size of the second axis of X; `model_`, the `HeadedNet`; `mean_` and
    `scale_` of each channel; `n_iter_`, epochs that were run; and `history_`, for each of them "loss" and "accuracy"
    while learning, and "validation_loss" and "validation_accuracy" where something was held out.

    All methods raise ValueError where X, y and settings do not fit each other.

    >>> X = np.repeat([[0.0, 0.0], [1.0, 1.0]], 20, axis=0)
    >>> y = np.repeat(["no", "yes"], 20)
    >>> CapsuleClassifier(epochs=5, widths=(8,), random_state=0).fit(X, y).predict([[0.1, 0.0], [0.9, 1.0]])
    array(['no', 'yes'], dtype='<U3')
    """

    def __init__(
        self,
        routing: Rule | str = "Dynamic",
        *,
        kind: Kind | None = None,
        channels_last: bool = False,
        backbone: nn.Module | None = None,
        widths: Sequence[int] = (32, 64, 128),
        primary_types: int = 16,
        primary_pose: Pose = 8,
        class_pose: Pose = 16,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        epochs: int = 30,
        batch_size: int = 32,
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        device: str | torch.device = "cpu",
        random_state: Any = None,
    ) -> None:
        self.routing = routing
        self.kind = kind
        self.channels_last = channels_last
        self.backbone = backbone
        self.widths = widths
        self.primary_types = primary_types
        self.primary_pose = primary_pose
        self.class_pose = class_pose
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "CapsuleClassifier":
        """Learn from X and the label of each of its examples `[n]`, from the start each time."""
        name = type(self).__name__
        for setting in ("epochs", "batch_size", "n_iter_no_change"):
            positive(name, setting, getattr(self, setting))
        self._check_settings(name)
        if "n_iter_" in vars(self):  # the last thing that a fit sets: until then there is no classifier
            del self.n_iter_
        X, y = self._validate(X, y, fitting=True)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self.shape_in_ = X.shape[1:]
        random = check_random_state(self.random_state)
        examples, held_out = np.arange(len(X)), np.arange(0)
        if self.early_stopping:
            examples, held_out = train_test_split(
                examples, test_size=self.validation_fraction, stratify=codes, random_state=random
            )
        scaler = StandardScaler()
        for first in range(0, len(examples), CHUNK):  # NaN does not count
            arranged = self._arrange(X[examples[first : first + CHUNK]])
            scaler.partial_fit(np.moveaxis(arranged, 1, -1).reshape(-1, arranged.shape[1]))
        self.mean_, self.scale_ = scaler.mean_, scaler.scale_
        with torch.random.fork_rng(devices=_cuda_devices(self.device)):
            torch.manual_seed(int(random.randint(2**31 - 1)))
            self.model_ = self._model(arranged.shape[1:])
            self._train(X, torch.as_tensor(codes), examples, held_out)
        return self

    def predict(self, X: Any) -> Any:
        """The most probable label of each example, `[n]`."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:
        """Probabilities of the classes in the order of `classes_`, `[n, classes]` in float64."""
        check_is_fitted(self)
        X = self._validate(X)
        scores = self._scores(X, np.arange(len(X)))
        return probabilities(self.model_, scores.double()).numpy()

    def prepare(self, X: Any) -> tuple[Tensor, Tensor | None]:
        """(x `[n, channels, *spatial]`, mask or None) that `model_` takes, of X as `fit` takes it."""
        check_is_fitted(self)
        return self._prepare(self._validate(X))

    def __sklearn_is_fitted__(self) -> bool:
        return "n_iter_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = self.kind == "sequences"
        return tags

    def __getstate__(self) -> Any:
        state = {**super().__getstate__()}
        if "model_" in state:  # a machine that reads this may have no such device
            state["model_"] = copy.deepcopy(state["model_"]).cpu()
        return state

    def _check_settings(self, name: str) -> None:
        """ValueError where a setting is of another kind than the ones above."""
        if not isinstance(self.routing, Rule | str | Mapping):
            raise ValueError(f"{name}: routing={self.routing!r}: give a rule such as Dynamic(), or its name")
        if self.loss is not None and not callable(self.loss):
            raise ValueError(f"{name}: loss={self.loss!r}: give loss(scores, y), such as MarginLoss(), or None")
        for setting in ("lr", "weight_decay"):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < np.inf:
                raise ValueError(f"{name}: {setting}={value!r}: give a number, 0 or more")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, TypeError) as error:  # what torch says, by device
            raise ValueError(
                f"{name}: device={self.device!r}: torch has no such device here: give 'cpu', or one that it has"
            ) from error

    def _validate(self, X: Any, y: Any = None, *, fitting: bool = False) -> Any:
        """The door: X as an array of numbers of a shape that can be read, with y where there is one."""
        name = type(self).__name__
        if self.kind not in (None, *get_args(Kind)):
            raise ValueError(f"{name}: kind={self.kind!r}: take one of {', '.join(map(repr, _AXES))}, or None")
        finite = "allow-nan" if self.kind == "sequences" else True
        given = (X, y) if fitting else (X,)
        checked = validate_data(self, *given, reset=fitting, dtype="numeric", allow_nd=True, ensure_all_finite=finite)
        X = checked[0] if fitting else checked
        if X.dtype.kind not in "buif":
            raise ValueError(f"{name}: X holds {X.dtype}: give real numbers, of times such as seconds since the first")
        kind = self.kind or _BY_DIMENSIONS.get(X.ndim)
        allowed = (2,) if kind == "vectors" else (_AXES[kind] + 1, _AXES[kind] + 2) if kind else ()
        if X.ndim not in allowed or 0 in X.shape[1:]:
            raise ValueError(
                f"{name}: X {list(X.shape)} of {X.ndim} dimensions is no array of {kind or 'anything known'}: vectors "
                "are [n, features], sequences [n, length], images [n, H, W], volumes [n, D, H, W], all but vectors "
                "also with channels; say which by kind="
            )
        if not fitting and X.shape[1:] != self.shape_in_:
            raise ValueError(
                f"{name}: X {list(X.shape)}, but it was fitted on [n, {', '.join(map(str, self.shape_in_))}]"
            )
        return checked if fitting else X

    def _arrange(self, X: Any) -> Any:
        """A view of X as `[n, channels, *spatial]`; vectors are at one place."""
        axes = _AXES[self.kind or _BY_DIMENSIONS[X.ndim]]
        if axes == 0:
            return X[:, :, None]
        if X.ndim == axes + 1:
            return X[:, None]
        return np.moveaxis(X, -1, 1) if self.channels_last else X

    def _prepare(self, X: Any) -> tuple[Tensor, Tensor | None]:
        arranged = self._arrange(X)
        one_each = (-1, *(1,) * (arranged.ndim - 2))
        scaled = (arranged - self.mean_.reshape(one_each)) / self.scale_.reshape(one_each)
        x = torch.from_numpy(scaled.astype(np.float32))
        if self.kind != "sequences":
            return x, None
        mask = ~x.isnan().any(1)
        return (x, None) if mask.all() else (x, mask)

    def _model(self, shape: tuple[int, ...]) -> nn.Module:
        model = HeadedNet(
            shape[0], len(self.classes_), shape[1:],
            backbone=copy.deepcopy(self.backbone), widths=self.widths,
            routing=self.routing if isinstance(self.routing, Rule) else make_rule(self.routing),
            primary_types=self.primary_types, primary_pose=self.primary_pose, class_pose=self.class_pose,
        )  # fmt: skip
        return model.to(self.device)

    def _train(self, X: Any, y: Tensor, examples: Any, held_out: Any) -> None:
        model = self.model_
        steps = -(-len(examples) // self.batch_size)
        optimization = Optimization("adamw", lr=self.lr, weight_decay=self.weight_decay, schedule="cosine")
        optimizer = optimization.make_optimizer(model)
        schedule = optimization.make_schedule(optimizer, steps * self.epochs, steps)
        assert schedule is not None
        self.history_: dict[str, list[float]] = {"loss": [], "accuracy": []}
        if len(held_out):
            self.history_ |= {"validation_loss": [], "validation_accuracy": []}
        best, best_epoch, best_weights = np.inf, 0, {}
        for epoch in range(self.epochs):
            model.train()
            total, right = torch.zeros(2, device=self.device)
            for batch in torch.as_tensor(examples)[torch.randperm(len(examples))].tensor_split(steps):
                scores, target = self._forward(X[batch.numpy()]), y[batch].to(self.device)
                loss = self._loss(scores, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.detach() * len(batch)
                right += (scores.argmax(1) == target).sum()
            self._note("", total.item() / len(examples), right.item() / len(examples))
            if not len(held_out):
                continue
            scores, target = self._scores(X, held_out), y[held_out]
            held_out_loss = self._loss(scores, target).item()
            self._note("validation_", held_out_loss, (scores.argmax(1) == target).double().mean().item())
            if held_out_loss < best:
                best, best_epoch, best_weights = held_out_loss, epoch, copy.deepcopy(model.state_dict())
            elif epoch - best_epoch >= self.n_iter_no_change:
                break
        if best_weights:
            model.load_state_dict(best_weights)
        model.eval()
        self.n_iter_: int = len(self.history_["loss"])

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.loss is not None:
            return self.loss(scores, target)
        chance = probabilities(self.model_, scores).gather(1, target[:, None])
        return -chance.clamp(min=torch.finfo(chance.dtype).tiny).log().mean()

    def _note(self, part: str, loss: float, accuracy: float) -> None:
        if not np.isfinite(loss):
            raise ValueError(
                f"{type(self).__name__}: the loss became {loss} in epoch {len(self.history_['loss']) + 1}: give a "
                f"lower lr than {self.lr}, or look for extreme values in X"
            )
        self.history_[f"{part}loss"].append(loss)
        self.history_[f"{part}accuracy"].append(accuracy)

    def _forward(self, X: Any) -> Tensor:
        x, mask = self._prepare(X)
        scores: Tensor = self.model_(x.to(self.device), mask=None if mask is None else mask.to(self.device))
        return scores

    @torch.no_grad()
    def _scores(self, X: Any, examples: Any) -> Tensor:
        """Scores of these examples, on the CPU."""
        self.model_.to(self.device).eval()
        parts = [self._forward(X[examples[first : first + CHUNK]]) for first in range(0, len(examples), CHUNK)]
        return torch.cat(parts).cpu()


def _cuda_devices(device: str | torch.device) -> list[torch.device]:
    """What `fork_rng` should look after besides the CPU."""
    return [torch.device(device)] if torch.device(device).type == "cuda" else []
