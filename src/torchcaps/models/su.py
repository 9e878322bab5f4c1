"""Su's experiment: does a network that saw single digits know two of them side by side?

Su Jianlin 2018, kexue.fm/archives/4819 and 5112, code in github.com/bojone/Capsule. Both models, for an image of 28x28:

    features    convolution 3x3, 64 channels, ReLU, twice; mean of 2x2; convolution 3x3, 128 channels, ReLU, twice
                259,008 parameters                                                              1x28x28 -> 128x8x8
    SuCapsNet   each place is a capsule of 128 numbers; routing to 10 capsules of 16 by one weight per class that all
                children share; scores are their lengths                                        279,488 in all
    SuCNN       mean over all places, linear to 128, ReLU, linear to 10; scores are sigmoids    276,810 in all

Images of any size pass: two digits, one above the other, make 22x8 places. The mean over them halves the evidence of
each digit, which a sum of votes does not; so `SuCNN` also pools by sum or by maximum. Capsules with routing off are
`SuCapsNet(routing=Dynamic.su(iterations=1))`.

Weights start as Keras starts them: Glorot-uniform, with biases at 0.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from torchcaps.layers import SharedCapsules
from torchcaps.layers._layer import positive, positive_all
from torchcaps.models._model import Output, Scores, answer, by, check_images, pair, probabilities, smallest
from torchcaps.routing import Dynamic, Rule
from torchcaps.types import Capsules

__all__ = ["SuCNN", "SuCapsNet"]

PAPER_ROUTING = Dynamic.su()

Four = tuple[int, int, int, int]

CHANNELS: Four = (64, 64, 128, 128)

LEAST = smallest([(3, 1, 0), (3, 1, 0), (2, 2, 0), (3, 1, 0), (3, 1, 0)])
"""Pixels per side that leave one place: 14."""

_WAY_OUT = "give in_chans as the images have them, and pad smaller ones"


class SuCapsNet(nn.Module):
    """Images of any size from 14 x 14 on to one length per class (the source stands on top of this file).

    in_chans, image_size  of the images `[N, in_chans, H, W]`; other sizes pass too.
    routing               any rule without activations.
    channels              of the four convolutions; the last is the length of the children's poses.
    class_pose            length of the classes' poses.

    `model(x)` gives scores `[N, num_classes]`, in 0..1; `model(x, labels)` gives `Output`, without a reconstruction.
    Raises ValueError for images smaller than 14 x 14 or of other channels.

    >>> model = SuCapsNet()
    >>> [model(torch.rand(2, 1, height, 28)).shape for height in (28, 56)]
    [torch.Size([2, 10]), torch.Size([2, 10])]
    """

    scores: Scores = "lengths"

    def __init__(
        self,
        in_chans: int = 1,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 28,
        *,
        routing: Rule = PAPER_ROUTING,
        channels: Sequence[int] = CHANNELS,
        class_pose: int = 16,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(routing, Rule) or routing.needs_activations:
            raise ValueError(
                f"{name}: routing must be a rule without activations such as Dynamic.su(), not {routing}: EMCapsNet "
                "takes the others"
            )
        self.features, self.in_chans = _features(name, in_chans, channels), in_chans
        self.image_size = _size(name, image_size)
        self.num_classes = positive(name, "num_classes", num_classes)
        self.class_caps = SharedCapsules(self.num_classes, channels[-1], class_pose, routing=routing, init=_glorot)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Lengths `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        capsules = self.capsules(x)
        return answer(capsules.lengths, capsules, labels)

    def capsules(self, x: Tensor) -> Capsules:
        """The class capsules of images `[N, in_chans, H, W]`, poses `[N, num_classes, 1, Q]`."""
        check_images(type(self).__name__, x, self.in_chans, least=LEAST, way_out=_WAY_OUT)
        places = self.features(x).flatten(2).transpose(1, 2)
        parents: Capsules = self.class_caps(Capsules(places.unsqueeze(-2)))
        return parents

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """Scores `[N, num_classes]` as probabilities, as `CapsNet.probabilities` does for lengths."""
        return probabilities(scores, self.scores, multi_label)


class SuCNN(nn.Module):
    """Images of any size from 14 x 14 on to one sigmoid per class (the source stands on top of this file).

    in_chans, image_size  of the images `[N, in_chans, H, W]`; other sizes pass too.
    pooling               over all places: "mean" as in the source; "sum" or "max".
    channels              of the four convolutions.
    hidden                width of the linear layer before the last.

    `model(x)` gives scores `[N, num_classes]`, in 0..1; `model(x, labels)` gives `Output`, with neither reconstruction
    nor capsules. Raises ValueError for images smaller than 14 x 14 or of other channels.
    """

    scores: Scores = "activations"

    def __init__(
        self,
        in_chans: int = 1,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 28,
        *,
        pooling: Literal["mean", "sum", "max"] = "mean",
        channels: Sequence[int] = CHANNELS,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if pooling not in ("mean", "sum", "max"):
            raise ValueError(f"{name}: pooling={pooling!r}: take 'mean', 'sum' or 'max'")
        self.features, self.in_chans = _features(name, in_chans, channels), in_chans
        self.image_size = _size(name, image_size)
        self.num_classes, self.pooling = positive(name, "num_classes", num_classes), pooling
        hidden = positive(name, "hidden", hidden)
        self.head = nn.Sequential(
            nn.Linear(channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, self.num_classes), nn.Sigmoid()
        )
        self.head.apply(_start_as_keras)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Sigmoids `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        check_images(type(self).__name__, x, self.in_chans, least=LEAST, way_out=_WAY_OUT)
        places = self.features(x).flatten(2)
        pooled = places.amax(2) if self.pooling == "max" else places.sum(2)
        if self.pooling == "mean":
            pooled = pooled / places.shape[2]
        return answer(self.head(pooled), None, labels)

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """Scores `[N, num_classes]` as probabilities, as `CapsNet.probabilities` does for activations."""
        return probabilities(scores, self.scores, multi_label)


def _size(name: str, image_size: int | Sequence[int]) -> tuple[int, int]:
    size = pair(name, "image_size", image_size)
    if min(size) < LEAST:
        raise ValueError(
            f"{name}: an image of {by(size)} is too small for these kernels: the smallest is {LEAST} x {LEAST}; pad it"
        )
    return size


def _features(name: str, in_chans: int, channels: Sequence[int]) -> nn.Sequential:
    widths = positive_all(name, "channels", channels)
    if len(widths) != 4:
        raise ValueError(f"{name}: channels={channels!r}: give four numbers, one for each convolution")
    a, b, c, d = widths
    features = nn.Sequential(
        nn.Conv2d(positive(name, "in_chans", in_chans), a, 3), nn.ReLU(), nn.Conv2d(a, b, 3), nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(b, c, 3), nn.ReLU(), nn.Conv2d(c, d, 3), nn.ReLU(),
    )  # fmt: skip
    return features.apply(_start_as_keras)


def _start_as_keras(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)


def _glorot(weight: Tensor) -> None:
    """`[1, J, P, Q]` by Glorot and Bengio's rule for a matrix `[P, J Q]`."""
    _, J, P, Q = weight.shape
    limit = math.sqrt(6 / (P + J * Q))
    weight.uniform_(-limit, limit)
