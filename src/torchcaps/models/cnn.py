"""Plain convolutional networks, which capsules are measured against.

`ConvNet`: convolutions with ReLU, then the mean over all places, or all places as they are, and linear layers. In Tsai
et al. 2020, "Capsules with inverted dot-product attention routing", three convolutions of 1024 channels:

    CIFAR-10, CIFAR-100     mean, linear                                     18,915,338 and 19,007,588 parameters
    DiverseMultiMNIST       mean, linear to 640, ReLU, linear                19,549,066
    "learned pooling"       all 6 x 6 places, linear to 640, ReLU, linear    42,486,666

The paper gives kernels and channels; strides and padding are its capsule network's, and reproduce the last count.

`ResNet`: He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", with the first convolution of its
CIFAR networks (3x3, stride 1, no pooling). The 18 layers that are usual for CIFAR have 11,173,962 parameters for 10
classes, 11,220,132 for 100.

    block       convolution 3x3, batch norm, ReLU, convolution 3x3, batch norm, plus the input, ReLU
    the input   through a convolution 1x1 and a batch norm where stride or channels change

Scores are logits.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from torchcaps.layers._layer import positive, positive_all
from torchcaps.models._model import Output, Scores, answer, by, check_images, pair, probabilities, smallest
from torchcaps.types import whole

__all__ = ["BasicBlock", "ConvNet", "ResNet", "ResNetFeatures"]


class ConvNet(nn.Module):
    """Images to one logit per class (sources on top of this file).

    in_chans, image_size  of the images `[N, in_chans, H, W]`; `image_size` is H = W, or `(H, W)`.
    channels, kernel_size, strides, paddings  one number per convolution.
    pooling               "mean" over all places: then images of any size pass that leave one; "none": every place has
                          weights of its own, and images are of `image_size`.
    hidden                widths of linear layers with ReLU before the last.

    `model(x)` gives scores `[N, num_classes]`; `model(x, labels)` gives `Output`, with neither reconstruction nor
    capsules. Raises ValueError where an image is too small for the kernels, or not as the model was built.

    >>> import torch
    >>> ConvNet(in_chans=3, image_size=32, channels=(8, 8, 8))(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    scores: Scores = "logits"

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 32,
        *,
        channels: Sequence[int] = (1024, 1024, 1024),
        kernel_size: int = 3,
        strides: Sequence[int] = (2, 2, 1),
        paddings: Sequence[int] = (1, 0, 0),
        pooling: Literal["mean", "none"] = "mean",
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        name = type(self).__name__
        in_chans, num_classes = positive(name, "in_chans", in_chans), positive(name, "num_classes", num_classes)
        channels, strides = positive_all(name, "channels", channels), positive_all(name, "strides", strides)
        kernel_size, paddings = positive(name, "kernel_size", kernel_size), tuple(paddings)
        if not channels or not len(channels) == len(strides) == len(paddings):
            raise ValueError(
                f"{name}: channels {channels}, strides {strides} and paddings {paddings} must be of one length, a "
                "number for each convolution"
            )
        if any((-1 if whole(padding) is None else padding) < 0 for padding in paddings):
            raise ValueError(f"{name}: paddings {paddings} must be whole numbers of 0 or more")
        if pooling not in ("mean", "none"):
            raise ValueError(f"{name}: pooling={pooling!r}: take 'mean' or 'none'")
        windows = [(kernel_size, stride, padding) for stride, padding in zip(strides, paddings, strict=True)]
        self.in_chans, self.num_classes, self.pooling = in_chans, num_classes, pooling
        self.image_size, self.least = pair(name, "image_size", image_size), smallest(windows)
        if min(self.image_size) < self.least:
            raise ValueError(
                f"{name}: an image of {by(self.image_size)} leaves no place after {len(channels)} convolutions: the "
                f"smallest is {self.least} x {self.least} with these kernels and strides"
            )
        layers: list[nn.Module] = []
        for (below, above), window in zip(itertools.pairwise((in_chans, *channels)), windows, strict=True):
            layers += [nn.Conv2d(below, above, *window), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        height, width = self.image_size
        for kernel, stride, padding in windows:
            height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        places = 1 if pooling == "mean" else height * width
        widths = [channels[-1] * places, *positive_all(name, "hidden", hidden), num_classes]
        layers = []
        for below, above in itertools.pairwise(widths):
            layers += [nn.Linear(below, above), nn.ReLU()]
        self.head = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Logits `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        size = None if self.pooling == "mean" else self.image_size
        way_out = "give in_chans and image_size as the images have them, or resize the images"
        check_images(type(self).__name__, x, self.in_chans, size=size, least=self.least, way_out=way_out)
        features = self.features(x)
        logits: Tensor = self.head(features.mean((2, 3)) if self.pooling == "mean" else features.flatten(1))
        return answer(logits, None, labels)

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """The softmax of logits `[N, num_classes]`; `multi_label`: their sigmoid."""
        return probabilities(scores, self.scores, multi_label)


class BasicBlock(nn.Module):
    """Two convolutions and a way around them: maps `[N, in_channels, H, W]` to `[N, channels, H / stride, W / stride]`.

    Sizes that the stride does not divide are rounded up.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.around = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """A map of maps."""
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(y + self.around(x))
        return out


class ResNetFeatures(nn.Module):
    """Images `[N, in_chans, H, W]` to a map `[N, widths[-1], h, w]`: the first convolution, then stages of blocks.

    widths, blocks, strides  of each stage; the first convolution has the first stage's width.

    >>> import torch
    >>> ResNetFeatures(3, widths=(64, 128), blocks=(3, 4), strides=(1, 2))(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 128, 16, 16])
    """

    def __init__(
        self,
        in_chans: int,
        widths: Sequence[int] = (64, 128, 256, 512),
        blocks: Sequence[int] = (2, 2, 2, 2),
        strides: Sequence[int] = (1, 2, 2, 2),
    ) -> None:
        super().__init__()
        name = type(self).__name__
        in_chans, widths = positive(name, "in_chans", in_chans), positive_all(name, "widths", widths)
        blocks, strides = positive_all(name, "blocks", blocks), positive_all(name, "strides", strides)
        if not widths or not len(widths) == len(blocks) == len(strides):
            raise ValueError(
                f"{name}: widths {widths}, blocks {blocks} and strides {strides} must be of one length, a number for "
                "each stage"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        stages, below = [], widths[0]
        for width, count, stride in zip(widths, blocks, strides, strict=True):
            steps = (stride, *(1,) * (count - 1))
            inputs = (below, *(width,) * (count - 1))
            stages.append(nn.Sequential(*(BasicBlock(i, width, s) for i, s in zip(inputs, steps, strict=True))))
            below = width
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """The map of images."""
        features: Tensor = self.stages(self.stem(x))
        return features


class ResNet(nn.Module):
    """Images of any size to one logit per class (source on top of this file); by default the 18 layers for CIFAR.

    in_chans, image_size     of the images `[N, in_chans, H, W]`; other sizes pass too.
    widths, blocks, strides  of each stage.

    `model(x)` gives scores `[N, num_classes]`; `model(x, labels)` gives `Output`, with neither reconstruction nor
    capsules. Raises ValueError for what is no batch of images of `in_chans` channels.
    """

    scores: Scores = "logits"

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 32,
        *,
        widths: Sequence[int] = (64, 128, 256, 512),
        blocks: Sequence[int] = (2, 2, 2, 2),
        strides: Sequence[int] = (1, 2, 2, 2),
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.in_chans, self.num_classes = in_chans, positive(name, "num_classes", num_classes)
        self.image_size = pair(name, "image_size", image_size)
        self.features = ResNetFeatures(in_chans, widths, blocks, strides)
        self.head = nn.Linear(widths[-1], self.num_classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Logits `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        check_images(type(self).__name__, x, self.in_chans, way_out="give in_chans as the images have them")
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return answer(logits, None, labels)

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """The softmax of logits `[N, num_classes]`; `multi_label`: their sigmoid."""
        return probabilities(scores, self.scores, multi_label)
