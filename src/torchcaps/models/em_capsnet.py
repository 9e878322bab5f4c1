"""EMCapsNet: matrix capsules, convolutional ones among them, routed by expectation-maximisation.

Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", section 4 and figure 1, for an image of 32x32:

    stem         convolution 5x5, stride 2, A channels, ReLU                         -> A x 14x14
    primary      convolution 1x1: B types of 4x4 poses, and a sigmoid each           -> B x 14x14 capsules
    conv_caps    kernel 3x3, stride 2: C types                                       -> C x 6x6
                 kernel 3x3, stride 1: D types                                       -> D x 4x4
    class_caps   a weight for each type of child and class, the same everywhere; the place of a child is added to
                 the first two entries of the right-hand column of its votes         -> classes
    scores       activations of the class capsules

Three rounds of EM everywhere. The parents of all windows that see a child compete for it. A = B = C = D = 32 has
317,194 parameters for the two channels and five classes of smallNORB (310K in the paper); A = 64, B = 8, C = D = 16 has
68,754 (68K). Its loss is the spread loss.

All weights are shared over places: images of any size pass that leave the last kernel a place.

Tsai et al. 2020 compare against this routing, on CIFAR-10 and CIFAR-100, behind stems of their own (`stem=`):

    ResNetFeatures(3, (64, 128), (3, 4), (1, 2))          1,710,580 and 1,756,840 parameters    1.71M, 1.76M in print
    convolution 3x3, stride 2, padding 1, 256 channels      447,156 and   493,416               0.45M, 0.50M in print

How the last of these was made is not known.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from torchcaps.layers import PrimaryCapsules, SharedCapsules, coordinate_offset
from torchcaps.layers._layer import positive
from torchcaps.layers.conv import Competition
from torchcaps.models._model import (
    ConvLayer,
    Output,
    Scores,
    answer,
    by,
    check_images,
    check_layers,
    conv_stack,
    map_of,
    pair,
    probabilities,
    smallest,
)
from torchcaps.routing import EM, Rule
from torchcaps.types import Capsules, Pose

__all__ = ["EMCapsNet"]

PAPER_ROUTING = EM.hinton()


class EMCapsNet(nn.Module):
    """Images to one activation per class (the architecture and its source stand on top of this file).

    in_chans, image_size  of the images `[N, in_chans, H, W]`; `image_size` is H = W, or `(H, W)`. Other sizes pass too:
                          this one sets the scale of the class capsules' initial weights.
    routing               a rule that gives activations, e.g. `EM.hinton()`.
    stem_channels, kernel_size, stem_stride, stem_padding  of the first convolution: A, 5, 2 and 0.
    stem                  a module that takes its place, `[N, in_chans, H, W]` to a map `[N, channels, h, w]`; the four
                          settings before are then not used.
    primary_types         B.
    pose                  of all capsules.
    conv_caps             (types, kernel size, stride) of each layer of convolutional capsules: with C, and with D.
    competition           "all": the parents of all windows that see a child compete for it, as in the paper; "window":
                          those of each window do.
    coordinates           add each child's place to its votes for the classes.

    `model(x)` gives scores `[N, num_classes]`, in 0..1; `model(x, labels)` gives `Output`, without a reconstruction.
    Raises ValueError where an image is too small for the kernels, or has other channels.

    >>> import torch
    >>> model = EMCapsNet(stem_channels=8, primary_types=4, conv_caps=((4, 3, 2), (4, 3, 1)))
    >>> model(torch.rand(2, 2, 32, 32)).shape
    torch.Size([2, 5])
    """

    scores: Scores = "activations"

    def __init__(
        self,
        in_chans: int = 2,
        num_classes: int = 5,
        image_size: int | Sequence[int] = 32,
        *,
        routing: Rule = PAPER_ROUTING,
        stem: nn.Module | None = None,
        stem_channels: int = 32,
        kernel_size: int = 5,
        stem_stride: int = 2,
        stem_padding: int = 0,
        primary_types: int = 32,
        pose: Pose = (4, 4),
        conv_caps: Sequence[ConvLayer] = ((32, 3, 2), (32, 3, 1)),
        competition: Competition = "all",
        coordinates: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(routing, Rule) or not routing.needs_activations:
            raise ValueError(
                f"{name}: scores are activations, so routing must be a rule with activations such as EM.hinton(), not "
                f"{routing}: CapsNet and InvertedAttentionCapsNet take the others"
            )
        self.in_chans = positive(name, "in_chans", in_chans)
        self.num_classes = positive(name, "num_classes", num_classes)
        self.image_size, self.least = pair(name, "image_size", image_size), 1
        conv_caps = check_layers(name, conv_caps)
        if stem is None:
            window = (
                positive(name, "kernel_size", kernel_size),
                positive(name, "stem_stride", stem_stride),
                pair(name, "stem_padding", stem_padding, 0)[0],
            )
            self.least = smallest([window, *((kernel, stride, 0) for _, kernel, stride in conv_caps)])
            if min(self.image_size) < self.least:
                raise ValueError(
                    f"{name}: an image of {by(self.image_size)} is too small for these kernels: the smallest is "
                    f"{self.least} x {self.least}; give a smaller kernel_size, more stem_padding, or fewer conv_caps"
                )
            stem = nn.Sequential(
                nn.Conv2d(self.in_chans, positive(name, "stem_channels", stem_channels), *window), nn.ReLU()
            )
        channels, places = map_of(name, "stem", stem, (self.in_chans, *self.image_size))
        self.stem = stem
        self.primary = PrimaryCapsules(channels, primary_types, pose, squash="identity", activations=True)
        layers, types, places = conv_stack(
            name, primary_types, places, pose, conv_caps, self.image_size, routing=routing, competition=competition
        )
        self.conv_caps = nn.Sequential(*layers)
        if coordinates:
            coordinate_offset(types, places, pose)  # an error here where the pose has no room for them
        self.class_caps = SharedCapsules(
            self.num_classes, pose, pose, routing=routing, in_types=types, coordinates=coordinates,
            typical_caps=types * math.prod(places),
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Activations `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        capsules = self.capsules(x)
        assert capsules.activations is not None
        return answer(capsules.activations, capsules, labels)

    def capsules(self, x: Tensor) -> Capsules:
        """The class capsules of images `[N, in_chans, H, W]`, poses `[N, num_classes, R, Q]`."""
        way_out = "give in_chans as the images have them, and smaller kernels for smaller images"
        check_images(type(self).__name__, x, self.in_chans, least=self.least, way_out=way_out)
        parents: Capsules = self.class_caps(self.conv_caps(self.primary(self.stem(x))))
        return parents

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """Scores `[N, num_classes]` as probabilities, as `CapsNet.probabilities` does for activations."""
        return probabilities(scores, self.scores, multi_label)
