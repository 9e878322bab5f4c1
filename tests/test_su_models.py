"""Su's two models: 28x28 images and larger ones, capsules that share a weight, and three ways of pooling."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

from torchcaps.losses import margin_loss
from torchcaps.models import SuCapsNet, SuCNN
from torchcaps.routing import EM, Attention, Dynamic, Rule, dynamic

CHANNELS = (4, 4, 5, 6)


def digits(N: int = 3, height: int = 28, width: int = 28) -> Tensor:
    return torch.rand(N, 1, height, width, dtype=torch.float64)


def by_hand(features: nn.Module, x: Tensor) -> Tensor:
    """The four convolutions, `[N, places, channels]`."""
    first, second, third, fourth = (layer for layer in features.modules() if isinstance(layer, nn.Conv2d))
    x = conv2d(conv2d(x, first.weight, first.bias).relu(), second.weight, second.bias).relu()
    x = avg_pool2d(x, 2)
    x = conv2d(conv2d(x, third.weight, third.bias).relu(), fourth.weight, fourth.bias).relu()
    return x.flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("model", "count"), [(SuCNN, 276_810), (SuCapsNet, 279_488)])
def test_they_have_as_many_parameters_as_the_source_says(model: Any, count: int) -> None:
    with torch.device("meta"):
        made = model()
    assert sum(p.numel() for p in made.parameters()) == count
    assert sum(p.numel() for p in made.features.parameters()) == 259_008


@pytest.mark.parametrize(("height", "width", "capsules"), [(28, 28, 64), (56, 28, 176), (28, 56, 176), (14, 14, 1)])
def test_an_image_makes_as_many_capsules_as_the_source_says(height: int, width: int, capsules: int) -> None:
    with torch.device("meta"):
        model = SuCapsNet()
        assert model.features(torch.empty(2, 1, height, width)).flatten(2).shape == (2, 128, capsules)
        assert model(torch.empty(2, 1, height, width)).shape == (2, 10)


@pytest.mark.parametrize("height", [28, 56])
def test_scores_of_the_capsules_are_what_the_equations_give(height: int) -> None:
    model, x = SuCapsNet(channels=CHANNELS).double(), digits(height=height)
    places = by_hand(model.features, x)[:, :, None]
    parents = dynamic(places, model.class_caps.weight, iterations=3, **sus()).poses
    expected = parents.square().sum((2, 3)).sqrt()
    scores, reconstruction, capsules = model(x, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(capsules.poses, parents, rtol=1e-9, atol=1e-12)
    assert reconstruction is None


def sus() -> dict[str, Any]:
    """His second form: l2-normalised inside, r^2 / (0.5 + r^2) at the end, logits replaced."""

    def last(s: Tensor) -> Tensor:
        q = s.square().sum((-2, -1), keepdim=True)
        return s * q.sqrt() / (0.5 + q)

    return {"accumulate": False, "squash": last, "inner_squash": "normalize"}


@pytest.mark.parametrize("height", [28, 56])
@pytest.mark.parametrize("pooling", ["mean", "sum", "max"])
def test_scores_of_the_pooling_network_are_what_the_equations_give(pooling: Any, height: int) -> None:
    model, x = SuCNN(channels=CHANNELS, hidden=7, pooling=pooling).double(), digits(height=height)
    places = by_hand(model.features, x)
    pooled = {"mean": places.mean(1), "sum": places.sum(1), "max": places.max(1).values}[pooling]
    first, last = model.head[0], model.head[2]
    expected = ((pooled @ first.weight.T + first.bias).relu() @ last.weight.T + last.bias).sigmoid()
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)


def test_the_three_ways_of_pooling_have_the_same_parameters() -> None:
    state = SuCNN(channels=CHANNELS).state_dict()
    for pooling in ("mean", "sum", "max"):
        SuCNN(channels=CHANNELS, pooling=pooling).load_state_dict(state)


@pytest.mark.parametrize(
    "routing",
    [Dynamic.su(iterations=1), Dynamic.su(iterations=5), Dynamic.su_first(), Dynamic.sabour(), Attention()],
)
def test_the_routing_is_the_callers(routing: Rule) -> None:
    model = SuCapsNet(channels=CHANNELS, routing=routing)
    assert model.class_caps.routing is routing
    assert model(digits().float()).shape == (3, 10)


def test_with_routing_off_every_place_counts_the_same() -> None:
    model, x = SuCapsNet(channels=CHANNELS, routing=Dynamic.su(iterations=1)).double(), digits()
    total = by_hand(model.features, x).sum(1)
    s = torch.einsum("np,jpq->njq", total, model.class_caps.weight[0]) / 10
    q = s.square().sum(2)
    torch.testing.assert_close(model(x), q / (0.5 + q), rtol=1e-9, atol=1e-12)


def test_weights_start_as_keras_starts_them() -> None:
    capsules, pooling = SuCapsNet(), SuCNN()
    limits = [(9, 9 * 64), (9 * 64, 9 * 64), (9 * 64, 9 * 128), (9 * 128, 9 * 128)]
    for model in (capsules, pooling):
        convolutions = [layer for layer in model.features if isinstance(layer, nn.Conv2d)]
        for layer, (below, above) in zip(convolutions, limits, strict=True):
            assert_uniform(layer.weight, math.sqrt(6 / (below + above)))
            assert not layer.bias.any()
    assert_uniform(capsules.class_caps.weight, math.sqrt(6 / (128 + 160)))
    assert_uniform(pooling.head[0].weight, math.sqrt(6 / (128 + 128)))
    assert_uniform(pooling.head[2].weight, math.sqrt(6 / (128 + 10)))
    assert not pooling.head[0].bias.any()
    assert not pooling.head[2].bias.any()


def assert_uniform(weight: Tensor, limit: float) -> None:
    """Evenly from -limit to limit: the largest of n numbers is near the limit, the deviation is limit / sqrt(3)."""
    assert 0.95 * limit < weight.abs().max() <= limit
    assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_an_image_too_small_is_told_the_smallest() -> None:
    for model in (SuCapsNet, SuCNN):
        with pytest.raises(ValueError, match=r"image of 28 x 13 is too small .* the smallest is 14 x 14"):
            model(image_size=(28, 13))
        with pytest.raises(ValueError, match=r"with H and W of 14 or more, not \[3, 1, 13, 28\]: .* pad smaller ones"):
            model()(torch.rand(3, 1, 13, 28))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuCapsNet(routing=EM.hinton()), "must be a rule without activations such as Dynamic.su"),
        (lambda: SuCapsNet(routing="su"), "must be a rule without activations such as Dynamic.su"),
        (lambda: SuCapsNet(channels=(4, 4, 4)), r"channels=\(4, 4, 4\): give four numbers"),
        (lambda: SuCNN(channels=(4, 4, 4, 0)), "every size of channels must be a whole number of 1 or more"),
        (lambda: SuCNN(pooling="median"), "pooling='median': take 'mean', 'sum' or 'max'"),
        (lambda: SuCNN(hidden=0), "hidden must be a whole number of 1 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [SuCapsNet, SuCNN])
def test_they_learn_a_few_images_by_heart(make: Any) -> None:
    model = make(num_classes=3, channels=(8, 8, 12, 12))
    x, labels = digits(6, 16, 16).float(), torch.arange(6) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        margin_loss(model(x), labels, negative_weight=0.25).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), labels)
