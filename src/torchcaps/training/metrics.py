"""What is measured on validation and test data, by torchmetrics, from probabilities.

                      single-label                              multi-label
    accuracy          share of examples that are right          share of all yes-or-no answers that are right
    balanced_accuracy mean recall of the classes that occur     mean over labels of (recall + specificity) / 2
    f1                mean over classes                         mean over labels
    auroc, map        mean over the classes that some examples have and some have not, one against the rest
    exact_match       -                                         share of examples with every label right
    ece               of the class that was chosen              of every yes-or-no answer

`balanced_accuracy` and `auroc` are those of scikit-learn, `map` its mean of average precisions. A class that does not
occur has no recall, no curve and no part in these means; torchmetrics' own means count it as 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MulticlassStatScores,
    MultilabelAccuracy,
    MultilabelExactMatch,
    MultilabelF1Score,
    MultilabelStatScores,
)
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities.data import dim_zero_cat

__all__ = ["ExampleMean", "evaluation_metrics", "training_accuracy"]

BINS = 15
"""Bins of the calibration error, equal widths (Guo et al. 2017)."""


def training_accuracy(num_classes: int, multi_label: bool = False, threshold: float = 0.5) -> Metric:
    """The accuracy of the table above."""
    if multi_label:
        return MultilabelAccuracy(num_classes, threshold=threshold, average="micro", validate_args=False)
    return MulticlassAccuracy(num_classes, average="micro", validate_args=False)


def evaluation_metrics(
    num_classes: int, multi_label: bool = False, threshold: float = 0.5, prefix: str = ""
) -> MetricCollection:
    """All of the table above: `update(probabilities [N, K], target)`, target `[N]` or presence `[N, K]`, whole numbers.

    AUROC and average precision are exact and so keep every probability of a set until its end, 4 N K bytes.
    """
    K = num_classes
    metrics: dict[str, Metric] = {"accuracy": training_accuracy(K, multi_label, threshold)}
    if multi_label:
        metrics |= {
            "balanced_accuracy": _MultilabelBalancedAccuracy(K, threshold, average=None, validate_args=False),
            "f1": MultilabelF1Score(K, threshold, average="macro", validate_args=False),
            "exact_match": MultilabelExactMatch(K, threshold, validate_args=False),
            "ece": _EveryAnswersCalibrationError(BINS, validate_args=False),
        }
    else:
        metrics |= {
            "balanced_accuracy": _BalancedAccuracy(K, average=None, validate_args=False),
            "f1": MulticlassF1Score(K, average="macro", validate_args=False),
            "ece": MulticlassCalibrationError(K, BINS, validate_args=False),
        }
    metrics |= {"auroc": _OneAgainstTheRest(binary_auroc), "map": _OneAgainstTheRest(binary_average_precision)}
    # states are not shared between metrics: sharing is found out by comparing numbers, and depends on the first batch
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]


class ExampleMean(Metric):
    """Mean over examples of a loss that comes as means over batches: `update(mean, examples)`. A NaN stays one."""

    full_state_update = False
    total: Tensor
    examples: Tensor

    def __init__(self) -> None:
        super().__init__()
        # torchmetrics' own mean either leaves NaN out, or (where it is told not to look for any) the weights
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("examples", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, mean: Tensor, examples: int) -> None:
        self.total += mean.detach().float() * examples
        self.examples += examples

    def compute(self) -> Tensor:
        return self.total / self.examples


class _BalancedAccuracy(MulticlassStatScores):
    """Mean recall of the classes that occur."""

    def compute(self) -> Tensor:
        right, _, _, _, there = super().compute().unbind(-1)
        return (right / there)[there > 0].mean()


class _MultilabelBalancedAccuracy(MultilabelStatScores):
    """Mean over labels of (recall + specificity) / 2; of a label that all have, or none, the one that there is."""

    def compute(self) -> Tensor:
        yes_right, yes_wrong, no_right, no_wrong, _ = super().compute().unbind(-1)
        both = torch.stack([yes_right / (yes_right + no_wrong), no_right / (no_right + yes_wrong)])
        return both.nanmean(0).mean()


class _EveryAnswersCalibrationError(BinaryCalibrationError):
    """Of all labels of all examples together."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


class _OneAgainstTheRest(Metric):
    """Mean of a binary score over the classes that some examples have and some have not; NaN where there is none."""

    full_state_update = False
    chances: list[Tensor]
    presence: list[Tensor]

    def __init__(self, score: Callable[..., Tensor]) -> None:
        super().__init__()
        self.score = score
        self.add_state("chances", default=[], dist_reduce_fx="cat")
        self.add_state("presence", default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        if target.dim() == 1:
            target = torch.zeros_like(preds, dtype=torch.bool).scatter(1, target.long()[:, None], True)
        self.chances.append(preds)
        self.presence.append(target.bool())

    def compute(self) -> Tensor:
        chances, presence = dim_zero_cat(self.chances), dim_zero_cat(self.presence)
        contested = presence.any(0) & ~presence.all(0)
        if not contested.any():
            return chances.new_tensor(torch.nan)
        columns = zip(chances.T[contested], presence.T[contested].long(), strict=True)
        return torch.stack([self.score(p, t, validate_args=False) for p, t in columns]).mean()
