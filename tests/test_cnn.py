"""Plain networks: as many parameters as the published ones, and the same numbers as torchvision's."""

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from torchcaps.models import ConvNet, ResNet, ResNetFeatures, create_model


def parameters(name: str, num_classes: int, in_chans: int, image_size: int, **settings: Any) -> int:
    with torch.device("meta"):
        model = create_model(name, num_classes, in_chans, image_size, **settings)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "count"),
    [
        ("cnn_cifar", 10, 18_915_338),
        ("cnn_cifar", 100, 19_007_588),
        ("resnet18_cifar", 10, 11_173_962),
        ("resnet18_cifar", 100, 11_220_132),
    ],
)
def test_the_networks_for_cifar_have_as_many_parameters_as_the_published(
    name: str, num_classes: int, count: int
) -> None:
    assert parameters(name, num_classes, 3, 32) == count


@pytest.mark.parametrize(("pooling", "count"), [("mean", 19_549_066), ("none", 42_486_666)])
def test_the_networks_for_two_digits_have_as_many_parameters_as_the_published(pooling: str, count: int) -> None:
    assert parameters("cnn_diverse", 10, 1, 36, pooling=pooling) == count


def test_the_maps_of_the_network_for_two_digits_are_those_of_the_capsules() -> None:
    with torch.device("meta"):
        cnn, capsules = (create_model(name, 10, 1, 36) for name in ("cnn_diverse", "inverted_attention_diverse"))
        x = torch.empty(1, 1, 36, 36)
        assert cnn.features[:2](x).shape == capsules.backbone(x).shape == (1, 1024, 18, 18)
        assert cnn.features[:4](x).shape == (1, 1024, 8, 8)
        assert cnn.features(x).shape == (1, 1024, 6, 6)
        assert capsules.primary(capsules.backbone(x)).poses.shape == (1, 16, 8, 8, 8, 8)


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_logits_of_a_convolutional_network_are_what_its_layers_say(pooling: Any) -> None:
    model = ConvNet(
        2, 3, (9, 12), channels=(4, 5), kernel_size=3, strides=(2, 1), paddings=(1, 0), pooling=pooling, hidden=(6,)
    ).double()
    x = torch.rand(3, 2, 9, 12, dtype=torch.float64)
    first, second = model.features[0], model.features[2]
    y = nn.functional.conv2d(x, first.weight, first.bias, 2, 1).relu()
    y = nn.functional.conv2d(y, second.weight, second.bias).relu()
    assert y.shape == (3, 5, 3, 4)
    y = y.mean((2, 3)) if pooling == "mean" else y.flatten(1)
    hidden, last = model.head[0], model.head[2]
    expected = (y @ hidden.weight.T + hidden.bias).relu() @ last.weight.T + last.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)


def test_images_of_any_size_pass_the_mean_but_not_weights_of_their_own_places() -> None:
    settings: dict[str, Any] = {"channels": (4, 4, 4), "image_size": 16}
    x = torch.rand(2, 3, 20, 14)
    assert ConvNet(**settings)(x).shape == (2, 10)
    with pytest.raises(ValueError, match=r"\[N, 3, 16, 16\], not \[2, 3, 20, 14\]"):
        ConvNet(pooling="none", **settings)(x)


def as_theirs(model: nn.Module, theirs: nn.Module) -> None:
    """Give ours the weights of theirs: the layers come in the same order."""
    ours, state = model.state_dict(), theirs.state_dict()
    assert [x.shape for x in ours.values()] == [x.shape for x in state.values()]
    model.load_state_dict(dict(zip(ours, state.values(), strict=True)))


@pytest.mark.parametrize("training", [True, False])
def test_a_resnet_gives_torchvisions_logits_and_gradients(training: bool) -> None:
    theirs = torchvision.models.resnet18(num_classes=7)
    theirs.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)  # what the networks for CIFAR have there
    theirs.maxpool = nn.Identity()
    model = ResNet(num_classes=7)
    as_theirs(model, theirs)
    x = torch.rand(2, 3, 9, 10)
    results = []
    for network in (model.double(), theirs.double()):
        logits = network.train(training)(x.double())
        results.append((logits, *torch.autograd.grad(logits.square().sum(), list(network.parameters()))))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)
    for mine, other in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)  # running statistics too


def test_a_stage_may_have_any_width_number_of_blocks_and_stride() -> None:
    features = ResNetFeatures(2, widths=(4, 6, 6), blocks=(1, 3, 2), strides=(2, 3, 1))
    assert features(torch.rand(2, 2, 13, 7)).shape == (2, 6, 3, 2)
    assert [len(stage) for stage in features.stages] == [1, 3, 2]
    # the way around is a convolution only where stride or width change
    assert [[len(block.around) for block in stage] for stage in features.stages] == [[2], [2, 0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvNet(strides=(1, 1)), r"must be of one length, a number for each convolution"),
        (lambda: ConvNet(channels=(), strides=(), paddings=()), r"must be of one length"),
        (lambda: ConvNet(channels=(4, 0, 4)), "every size of channels must be a whole number of 1 or more"),
        (lambda: ConvNet(paddings=(-1, 0, 0)), r"paddings \(-1, 0, 0\) must be whole numbers of 0 or more"),
        (lambda: ConvNet(kernel_size=0), "kernel_size must be a whole number of 1 or more"),
        (lambda: ConvNet(hidden=(0,)), "every size of hidden must be a whole number of 1 or more"),
        (lambda: ConvNet(pooling="max"), "pooling='max': take 'mean' or 'none'"),
        (lambda: ConvNet(image_size=(40, 12)), "image of 40 x 12 leaves no place .* smallest is 13 x 13"),
        (lambda: ResNet(widths=(4, 4)), r"must be of one length, a number for each stage"),
        (lambda: ResNet(widths=(), blocks=(), strides=()), r"must be of one length"),
        (lambda: ResNet(blocks=(1, 0, 1, 1)), "every size of blocks must be a whole number of 1 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConvNet(2, 3, 16, channels=(16, 16, 16)),
        lambda: ConvNet(2, 3, 16, channels=(8, 8, 8), pooling="none", hidden=(8,)),
        lambda: ResNet(2, 3, 16, widths=(4, 8), blocks=(1, 1), strides=(1, 2)),
    ],
    ids=["mean", "learned", "resnet"],
)
def test_they_learn_a_few_images_by_heart(make: Any) -> None:
    model = make()
    x, labels = torch.rand(6, 2, 16, 16), torch.arange(6) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    logits: Tensor = model(x)
    assert torch.equal(logits.argmax(1), labels)
