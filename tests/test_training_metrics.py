"""Metrics: the numbers of scikit-learn, also where a class does not occur; probabilities come from one place."""

import contextlib
import math

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

from torchcaps.models import CapsNet
from torchcaps.training import Classification, evaluation_metrics, probabilities

N = 60


def measured(p: Tensor, y: Tensor, **settings: bool) -> dict[str, float]:
    metrics = evaluation_metrics(p.shape[1], **settings)
    for part in range(0, len(p), 25):  # in batches, the last of them smaller
        metrics.update(p[part : part + 25], y[part : part + 25])
    return {name: value.item() for name, value in metrics.compute().items()}


def mean_over_contested(score: object, y: Tensor, p: Tensor) -> float:
    """One class against the rest by scikit-learn, over classes that some examples have and some have not."""
    columns = [(y[:, k], p[:, k]) for k in range(y.shape[1]) if 0 < y[:, k].sum() < len(y)]
    return sum(score(*map(Tensor.numpy, pair)) for pair in columns) / len(columns)  # type: ignore[operator]


@pytest.mark.parametrize("absent", [None, 2], ids=["all classes occur", "a class does not occur"])
def test_single_label_metrics_are_those_of_scikit_learn(absent: int | None) -> None:
    p, y = torch.randn(N, 5).mul(2).softmax(1), torch.randint(0, 5, (N,))
    if absent is not None:
        y[y == absent] = 0
    found, chosen, presence = measured(p, y), p.argmax(1), nn.functional.one_hot(y, 5)
    assert (chosen == 2).any()  # a class that does not occur is nevertheless chosen, and must not count as recall 0
    with pytest.warns(UserWarning, match="y_pred contains classes") if absent is not None else contextlib.nullcontext():
        balanced = sklearn.metrics.balanced_accuracy_score(y, chosen)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y, chosen))
    assert found["balanced_accuracy"] == pytest.approx(balanced)
    assert found["f1"] == pytest.approx(
        sklearn.metrics.f1_score(y, chosen, average="macro", labels=range(5), zero_division=0)
    )
    assert found["auroc"] == pytest.approx(mean_over_contested(sklearn.metrics.roc_auc_score, presence, p))
    assert found["map"] == pytest.approx(mean_over_contested(sklearn.metrics.average_precision_score, presence, p))
    assert "exact_match" not in found


def test_multi_label_metrics_are_those_of_scikit_learn() -> None:
    p, y = torch.rand(N, 4), torch.randint(0, 2, (N, 4))
    y[:, 3] = 0  # nobody has this label
    found, chosen = measured(p, y, multi_label=True), (p > 0.5).long()
    assert found["accuracy"] == pytest.approx((chosen == y).float().mean().item())
    assert found["exact_match"] == pytest.approx(sklearn.metrics.accuracy_score(y, chosen))
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(y, chosen, average="macro", zero_division=0))
    each = [sklearn.metrics.balanced_accuracy_score(y[:, k], chosen[:, k]) for k in range(3)]
    specificity = 1 - chosen[:, 3].float().mean().item()  # all that can be said of the last one
    assert found["balanced_accuracy"] == pytest.approx((sum(each) + specificity) / 4)
    assert found["auroc"] == pytest.approx(mean_over_contested(sklearn.metrics.roc_auc_score, y, p))
    assert found["map"] == pytest.approx(mean_over_contested(sklearn.metrics.average_precision_score, y, p))


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    p = torch.tensor([0.8, 0.2]).repeat(10, 1)
    y = torch.tensor([0] * 6 + [1] * 4)
    assert measured(p, y)["ece"] == pytest.approx(0.2, abs=1e-6)
    every_answer = torch.tensor([[0.7, 0.4]]).repeat(10, 1), torch.ones(10, 2, dtype=torch.long)
    assert measured(*every_answer, multi_label=True)["ece"] == pytest.approx((0.3 + 0.6) / 2, abs=1e-6)


def test_a_set_of_one_class_has_no_curve_and_says_so() -> None:
    found = measured(torch.rand(6, 3).softmax(1), torch.zeros(6, dtype=torch.long))
    assert math.isnan(found["auroc"])
    assert math.isnan(found["map"])
    assert not math.isnan(found["balanced_accuracy"])


def test_probabilities_are_the_model_s_own_where_it_has_them() -> None:
    model, lengths = CapsNet(num_classes=3, decoder=False), torch.tensor([[0.9, 0.1, 0.1]])
    assert torch.equal(probabilities(model, lengths), model.probabilities(lengths))
    assert torch.equal(probabilities(model, lengths, multi_label=True), lengths)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.5]),
        ({"multi_label": True}, [0.5, 0.5]),
        ({"link": "sigmoid"}, [0.5, 0.5]),
        ({"link": "identity"}, [0.0, 0.0]),
    ],
)
def test_scores_of_other_models_are_logits_unless_said_otherwise(
    settings: dict[str, str], expected: list[float]
) -> None:
    assert probabilities(nn.Identity(), torch.zeros(1, 2), **settings).tolist() == [expected]  # type: ignore[arg-type]
    three = torch.tensor([[0.0, 0.0, math.log(2)]])
    if not settings:
        assert torch.allclose(probabilities(nn.Identity(), three), torch.tensor([[0.25, 0.25, 0.5]]))


def test_probabilities_are_never_of_low_precision() -> None:
    assert probabilities(nn.Identity(), torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_model_that_knows_its_scores_takes_no_other_word_for_them() -> None:
    with pytest.raises(ValueError, match=r"CapsNet says itself what its scores are.*leave out link='softmax'"):
        Classification(CapsNet(decoder=False), loss=nn.CrossEntropyLoss(), num_classes=10, link="softmax")
    with pytest.raises(ValueError, match="link='logit': take 'softmax'"):
        Classification(nn.Linear(2, 2), loss=nn.CrossEntropyLoss(), num_classes=2, link="logit")  # type: ignore[arg-type]
