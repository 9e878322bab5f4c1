"""The scikit-learn classifier: scikit-learn's own checks, arrays of every kind, and the same result under a seed."""

import itertools
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

from torchcaps.losses import MarginLoss
from torchcaps.models import HeadedNet
from torchcaps.routing import Dynamic
from torchcaps.run.estimator import CapsuleClassifier

SMALL: dict[str, Any] = {"widths": (8, 12), "primary_types": 4, "epochs": 2, "random_state": 0}
CHECKED: dict[str, Any] = {"widths": (16,), "epochs": 8, "batch_size": 64, "lr": 1e-2, "random_state": 0}


def may_fail(estimator: CapsuleClassifier) -> dict[str, str]:
    """scikit-learn's checks that a classifier in float32 need not pass. It passes all others.

    Two more skip themselves: check_array_api_input where SCIPY_ARRAY_API is not set, check_classifier_data_not_an_array
    where pandas is not installed. Its checks bring X of two dimensions alone: images and volumes are tried below.
    """
    return {"check_methods_subset_invariance": "asks for 1e-7, which is what float32 rounds by: see the test below"}


@parametrize_with_checks(
    [CapsuleClassifier(**CHECKED), CapsuleClassifier(kind="sequences", **CHECKED)],
    expected_failed_checks=may_fail,
    xfail_strict=False,
)
def test_it_passes_the_checks_of_scikit_learn(estimator: CapsuleClassifier, check: Any) -> None:
    check(estimator)


def patterns(*size: int, N: int = 60, classes: int = 3) -> tuple[Any, Any]:
    """(X `[N, *size]`, names): each class a pattern of its own, and noise."""
    random = np.random.default_rng(0)
    y = np.arange(N) % classes
    return 2 * random.normal(size=(classes, *size))[y] + 0.3 * random.normal(size=(N, *size)), np.array(list("abc"))[y]


@pytest.mark.parametrize(
    ("size", "settings", "shape"),
    [
        ((5,), {}, (5, 1)),
        ((20,), {"kind": "sequences"}, (1, 20)),
        ((2, 20), {"kind": "sequences"}, (2, 20)),
        ((20, 2), {"kind": "sequences", "channels_last": True}, (2, 20)),
        ((8, 9), {}, (1, 8, 9)),
        ((3, 8, 9), {}, (3, 8, 9)),
        ((8, 9, 3), {"channels_last": True}, (3, 8, 9)),
        ((5, 8, 9), {"kind": "volumes"}, (1, 5, 8, 9)),
        ((2, 5, 8, 9), {}, (2, 5, 8, 9)),
        ((5, 8, 9, 2), {"channels_last": True}, (2, 5, 8, 9)),
    ],
)
def test_arrays_of_every_kind_are_learned(size: tuple[int, ...], settings: Any, shape: tuple[int, ...]) -> None:
    X, y = patterns(*size)
    classifier = CapsuleClassifier(**{**SMALL, "epochs": 15, "lr": 1e-2, **settings}).fit(X[:45], y[:45])
    assert classifier.score(X[45:], y[45:]) > 0.9
    assert (classifier.model_.in_chans, *classifier.model_.image_size) == shape
    assert classifier.n_features_in_ == size[0]
    x, mask = classifier.prepare(X)
    assert x.shape == (60, *shape)
    assert mask is None


def test_channels_first_and_last_are_the_same() -> None:
    X, y = patterns(3, 8, 9)
    first = CapsuleClassifier(**SMALL).fit(X, y).predict_proba(X)
    last = (
        CapsuleClassifier(channels_last=True, **SMALL)
        .fit(np.moveaxis(X, 1, -1), y)
        .predict_proba(np.moveaxis(X, 1, -1))
    )
    np.testing.assert_allclose(last, first, rtol=1e-4)


def test_a_classifier_knows_digits_and_how_sure_it_is() -> None:
    X, y = load_digits(return_X_y=True)
    X = X.reshape(-1, 8, 8)
    classifier = CapsuleClassifier(widths=(16, 32, 64), epochs=8, random_state=0).fit(X[:1000], y[:1000])
    chances = classifier.predict_proba(X[1000:])
    assert chances.dtype == np.float64
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-6)
    assert classifier.score(X[1000:], y[1000:]) > 0.93
    assert log_loss(y[1000:], chances) < 0.3
    assert (classifier.classes_[chances.argmax(1)] == classifier.predict(X[1000:])).all()


def test_each_channel_is_brought_to_mean_0_and_variance_1() -> None:
    X, y = patterns(3, 8, 9)
    X = np.clip(128 + 30 * X + np.array([0, 20, 40])[:, None, None], 0, 255).astype(np.uint8)
    classifier = CapsuleClassifier(**SMALL).fit(X, y)
    x, _ = classifier.prepare(X)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.var((0, 2, 3), correction=0), torch.ones(3), rtol=1e-5, atol=0)
    np.testing.assert_allclose(classifier.mean_, X.mean((0, 2, 3)))
    far = CapsuleClassifier(**SMALL).fit(X.astype(np.float64) + 1e9, y)  # more digits than float32 has
    np.testing.assert_allclose(far.predict_proba(X + 1e9), classifier.predict_proba(X), rtol=1e-3)


def test_a_channel_that_is_always_the_same_is_no_harm() -> None:
    X, y = patterns(3, 8, 9)
    X[:, 1] = 7.0
    assert np.isfinite(CapsuleClassifier(**SMALL).fit(X, y).predict_proba(X)).all()


def test_sequences_end_where_nan_begins_and_padding_changes_nothing() -> None:
    X, y = patterns(2, 20)
    lengths = 8 + np.arange(60) % 11
    X[np.broadcast_to(np.arange(20) >= lengths[:, None, None], X.shape)] = np.nan
    longer = np.concatenate([X, np.full((60, 2, 9), np.nan)], axis=2)
    settings = {**SMALL, "kind": "sequences", "epochs": 15, "lr": 1e-2}
    classifier = CapsuleClassifier(**settings).fit(X[:45], y[:45])
    assert classifier.score(X[45:], y[45:]) == 1
    x, mask = classifier.prepare(X[:4])
    assert mask is not None
    assert mask.sum(1).tolist() == [8, 9, 10, 11]
    np.testing.assert_allclose(classifier.mean_, np.nanmean(X[:45], axis=(0, 2)))
    # the same weights on longer arrays
    padded, longer_mask = torch.nn.functional.pad(x, (0, 9)), torch.nn.functional.pad(mask, (0, 9))
    with torch.no_grad():
        torch.testing.assert_close(classifier.model_(padded, mask=longer_mask), classifier.model_(x, mask=mask))
    with pytest.raises(ValueError, match=r"X \[60, 2, 29\], but it was fitted on \[n, 2, 20\]"):
        classifier.predict(longer)


def test_nan_elsewhere_is_an_error() -> None:
    X, y = patterns(8, 9)
    X[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="contains NaN"):
        CapsuleClassifier(**SMALL).fit(X, y)


# what is random


def test_a_seed_makes_the_same_classifier_and_leaves_torchs_random_numbers_and_threads_alone() -> None:
    X, y = patterns(8, 9)
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    one = CapsuleClassifier(**SMALL).fit(X, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(6)
    two = CapsuleClassifier(**SMALL).fit(X, y)
    assert one.history_ == two.history_
    assert (one.predict_proba(X) == two.predict_proba(X)).all()
    assert (one.predict_proba(X) == one.fit(X, y).predict_proba(X)).all()
    other = CapsuleClassifier(**{**SMALL, "random_state": 1}).fit(X, y)
    assert one.history_ != other.history_


def test_a_generator_as_random_state_goes_on_from_fit_to_fit() -> None:
    X, y = patterns(8, 9)
    settings = {**SMALL, "random_state": np.random.RandomState(0)}
    one = CapsuleClassifier(**settings)
    first, second = one.fit(X, y).history_, one.fit(X, y).history_
    assert first != second


def test_an_example_alone_gets_the_probabilities_that_it_gets_among_others() -> None:
    X, y = patterns(8, 9, N=300)
    classifier = CapsuleClassifier(**SMALL).fit(X, y)
    together = classifier.predict_proba(X)  # more than one chunk of them
    alone = np.concatenate([classifier.predict_proba(X[n : n + 1]) for n in range(0, 300, 50)])
    np.testing.assert_allclose(alone, together[::50], rtol=1e-4)


# stopping


def test_without_early_stopping_all_epochs_are_run_on_all_of_x() -> None:
    X, y = patterns(8, 9)
    classifier = CapsuleClassifier(**SMALL).fit(X, y)
    assert classifier.n_iter_ == 2
    assert {name: len(values) for name, values in classifier.history_.items()} == {"loss": 2, "accuracy": 2}


def test_early_stopping_keeps_the_weights_that_did_best_on_what_was_held_out() -> None:
    X, y = patterns(8, 9, N=90)
    y = np.random.default_rng(0).permutation(y)  # nothing to learn but noise: it soon gets worse
    backbone = nn.Sequential(nn.Conv2d(1, 12, 3, 2), nn.Dropout(0.2))  # whose evaluation is not its training
    settings = {**SMALL, "early_stopping": True, "epochs": 30, "lr": 1e-2, "n_iter_no_change": 3, "backbone": backbone}
    classifier = CapsuleClassifier(**settings, validation_fraction=0.2).fit(X, y)
    losses = classifier.history_["validation_loss"]
    best = int(np.argmin(losses))
    assert classifier.n_iter_ == len(losses) == best + 1 + 3 < 30
    stopped = CapsuleClassifier(**settings, validation_fraction=0.2)
    stopped.n_iter_no_change = 30  # the same run to its end has the same best weights, or better ones later
    assert stopped.fit(X, y).history_["validation_loss"][: len(losses)] == losses
    # the loss on the examples held out, by the final weights
    held_out = held_out_of(X, y, 0.2)
    chances = classifier.predict_proba(X[held_out])
    assert log_loss(y[held_out], chances, labels=classifier.classes_) == pytest.approx(losses[best], rel=1e-4)
    counts = np.unique(y[held_out], return_counts=True)[1]
    assert counts.tolist() == [6, 6, 6]


def held_out_of(X: Any, y: Any, fraction: float) -> Any:
    """The examples that a classifier with random_state=0 does not learn from."""
    seen: list[Any] = []

    class Watched(CapsuleClassifier):
        def _train(self, X: Any, y: Tensor, examples: Any, held_out: Any) -> None:
            seen.append(held_out)

    Watched(**{**SMALL, "early_stopping": True, "validation_fraction": fraction}).fit(X, y)
    return seen[0]


# as scikit-learn uses it


def test_it_works_in_pipelines_searches_and_cross_validation() -> None:
    X, y = patterns(72)
    as_images = FunctionTransformer(lambda X: X.reshape(-1, 8, 9))
    pipeline = make_pipeline(as_images, CapsuleClassifier(**{**SMALL, "epochs": 12, "lr": 1e-2}))
    assert cross_val_score(pipeline, X, y, cv=2).min() > 0.9
    search = GridSearchCV(pipeline, {"capsuleclassifier__routing": ["Attention", Dynamic(iterations=1)]}, cv=2)
    assert search.fit(X, y).score(X, y) > 0.9


def test_a_clone_has_the_settings_and_nothing_learned() -> None:
    X, y = patterns(8, 9)
    classifier = CapsuleClassifier(Dynamic.su(), loss=MarginLoss(), **SMALL).fit(X, y)
    copy = clone(classifier)
    assert copy.routing == Dynamic.su()
    assert copy.get_params().keys() == classifier.get_params().keys()
    with pytest.raises(NotFittedError):
        copy.predict(X)
    np.testing.assert_array_equal(copy.fit(X, y).predict_proba(X), classifier.predict_proba(X))


def test_a_stored_classifier_predicts_the_same_in_a_new_process(tmp_path: Any) -> None:
    X, y = patterns(8, 9)
    classifier = CapsuleClassifier(**SMALL).fit(X, y)
    (tmp_path / "it.pickle").write_bytes(pickle.dumps(classifier))
    np.save(tmp_path / "X.npy", X)
    program = f"""
import pickle, numpy, torch
torch.set_num_threads(1)
it = pickle.load(open({str(tmp_path / "it.pickle")!r}, "rb"))
numpy.save({str(tmp_path / "p.npy")!r}, it.predict_proba(numpy.load({str(tmp_path / "X.npy")!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), classifier.predict_proba(X))


def test_the_model_is_a_headed_net_in_evaluation_with_the_settings_asked_for() -> None:
    X, y = patterns(8, 9)
    classifier = CapsuleClassifier("EM", primary_pose=(2, 2), class_pose=(2, 3), **SMALL).fit(X, y)
    model = classifier.model_
    assert isinstance(model, HeadedNet)
    assert not model.training
    assert model.scores == "activations"
    assert model.head.class_caps.weight.shape == (4, 3, 2, 3)
    x, mask = classifier.prepare(X)
    with torch.no_grad():
        chances = model.probabilities(model(x, mask=mask).double()).numpy()
    np.testing.assert_array_equal(chances, classifier.predict_proba(X))


def test_a_backbone_of_ones_own_is_copied_and_trained() -> None:
    X, y = patterns(8, 9)
    backbone = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU())
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    classifier = CapsuleClassifier(backbone=backbone, **SMALL).fit(X, y)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    trained = classifier.model_.backbone.state_dict()
    assert not any(torch.equal(value, before[name]) for name, value in trained.items())


def test_batches_are_of_nearly_the_same_size_and_an_epoch_sees_each_example_once() -> None:
    X, y = patterns(8, 9, N=65)
    seen: list[Tensor] = []

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return MarginLoss()(scores, target)

    CapsuleClassifier(loss=loss, **{**SMALL, "epochs": 1}).fit(X, y)  # 32, 32 and 1 would be three worse steps
    assert [len(target) for target in seen] == [22, 22, 21]
    assert torch.equal(torch.cat(seen).bincount(), torch.tensor([22, 22, 21]))


class Watched(nn.Conv2d):
    """Notes its weight before each step."""

    seen: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(self.weight.detach().clone())
        return super().forward(x)


def test_steps_begin_at_the_learning_rate_and_end_near_0() -> None:
    X, y = patterns(8, 9)
    Watched.seen.clear()
    settings = {**SMALL, "epochs": 20, "batch_size": 100, "lr": 0.01, "weight_decay": 0}
    CapsuleClassifier(backbone=Watched(1, 8, 3), **settings).fit(X, y)
    seen = [weight for weight in Watched.seen if weight.device.type == "cpu"]  # not those that only ask for the size
    assert len(seen) == 20
    steps = [(after - before).abs().max().item() for before, after in itertools.pairwise(seen)]
    assert steps[0] == pytest.approx(0.01, rel=0.01)  # Adam's first step is the learning rate itself
    assert steps[-1] < 0.001


def test_a_loss_of_ones_own_takes_the_place_of_the_logarithm() -> None:
    X, y = patterns(8, 9)
    seen = []

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        seen.append((scores.detach(), target))
        return MarginLoss()(scores, target)

    classifier = CapsuleClassifier(loss=loss, **{**SMALL, "epochs": 1, "batch_size": 100}).fit(X, y)
    scores, target = seen[0]
    assert classifier.history_["loss"] == [pytest.approx(MarginLoss()(scores, target).item())]
    assert classifier.history_["accuracy"] == [pytest.approx((scores.argmax(1) == target).float().mean().item())]
    plain = CapsuleClassifier(**{**SMALL, "epochs": 1, "batch_size": 100}).fit(X, y)
    chances = plain.model_.probabilities(scores)[torch.arange(60), target]
    assert plain.history_["loss"] == [pytest.approx(-chances.log().mean().item(), rel=1e-5)]


@pytest.mark.parametrize(
    ("settings", "size", "message"),
    [
        ({"kind": "pictures"}, (8, 9), "kind='pictures': take one of 'vectors', 'sequences', 'images', 'volumes'"),
        ({"kind": "images"}, (8,), r"X \[60, 8\] of 2 dimensions is no array of images"),
        ({"kind": "vectors"}, (8, 9), r"X \[60, 8, 9\] of 3 dimensions is no array of vectors"),
        ({}, (2, 2, 2, 2, 2), r"of 6 dimensions is no array of anything known: .*; say which by kind="),
        ({}, (8, 0), r"X \[60, 8, 0\]"),
        ({"epochs": 0}, (8, 9), "epochs must be a whole number of 1 or more, not 0"),
        ({"batch_size": 1.5}, (8, 9), r"batch_size must be a whole number of 1 or more, not 1\.5"),
        ({"n_iter_no_change": 0}, (8, 9), "n_iter_no_change must be a whole number of 1 or more"),
        ({"routing": "dynamic"}, (8, 9), "routing 'dynamic' is not there: take one of Dynamic"),
        ({"lr": 0}, (8, 9), "the learning rate must be above 0"),
        ({"lr": 1e30}, (8, 9), r"the loss became (nan|inf) in epoch 1: give a lower lr than 1e\+30"),
    ],
)
def test_what_does_not_fit_is_an_error_at_the_door(settings: Any, size: tuple[int, ...], message: str) -> None:
    X, y = patterns(*size)
    with pytest.raises(ValueError, match=message):
        CapsuleClassifier(**{**SMALL, **settings}).fit(X, y)


def test_examples_of_another_shape_are_told_both_sides() -> None:
    X, y = patterns(8, 9)
    classifier = CapsuleClassifier(**SMALL).fit(X, y)
    with pytest.raises(ValueError, match=r"X \[60, 8, 8\], but it was fitted on \[n, 8, 9\]"):
        classifier.predict(X[:, :, 1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": 5}, "routing=5: give a rule"),
        ({"routing": None}, "routing=None: give a rule"),
        ({"loss": "mse"}, "loss='mse': give loss"),
        ({"lr": "fast"}, "lr='fast': give a number"),
        ({"lr": float("nan")}, "lr=nan: give a number"),
        ({"weight_decay": -1}, "weight_decay=-1: give a number"),
        ({"device": "foo"}, "device='foo': torch has no such device"),
        ({"device": object()}, "torch has no such device"),
    ],
)
def test_settings_of_another_kind_are_refused_before_anything_is_learned(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CapsuleClassifier(**SMALL, **settings).fit(*patterns(5))


@pytest.mark.parametrize("kind", ["datetime64[D]", "timedelta64[s]"])
def test_times_are_no_numbers(kind: str) -> None:
    X, y = patterns(5)
    with pytest.raises(ValueError, match=r"X holds (datetime|timedelta).*: give real numbers"):
        CapsuleClassifier(**SMALL).fit((100 * X).astype(int).astype(kind), y)


@pytest.mark.parametrize("before", [False, True])
def test_after_a_fit_that_failed_there_is_no_classifier(before: bool) -> None:
    X, y = patterns(5)
    classifier = CapsuleClassifier(**SMALL)
    if before:
        classifier.fit(X, y).predict(X)
    with pytest.raises(ValueError, match="the loss became"):
        classifier.set_params(lr=1e30, epochs=4).fit(X, y)
    with pytest.raises(NotFittedError):
        classifier.predict(X)
