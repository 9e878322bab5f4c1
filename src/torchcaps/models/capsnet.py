"""CapsNet: a convolution, capsules, and an image drawn from the capsule of one class.

Sabour, Frosst, Hinton 2017, "Dynamic routing between capsules", section 4, for an image of 28x28:

    stem            convolution 9x9, stride 1, 256 channels, ReLU            1x28x28 -> 256x20x20
    primary         convolution 9x9, stride 2, squash                        -> 32 types x 6x6 capsules of 8 numbers
    class_caps      3 rounds of dynamic routing, a weight for each pair      1152 -> 10 capsules of 16 numbers
    scores          their lengths                                            10
    decoder         all but one class set to 0; 160 -> 512 -> 1024 -> 784, ReLU, ReLU, sigmoid

8,215,568 parameters, 6,804,224 without the decoder. The decoder keeps the capsule of the label in training, and the
longest one in evaluation.

Added to the paper, for images of other sizes:

    Per axis the stem's stride is the smallest that leaves at most 32 positions: 1 up to 40 pixels, 2 at 64, 7 at 224.
    So there are never more than 32 x 12 x 12 = 4608 primary capsules with the paper's kernels. Where the stride would
    pass the kernel's size (above 296 pixels) the kernel grows with it, so that every pixel is seen. It is smaller where
    the primary capsules' kernel would find no room otherwise.

Any rule may take the place of dynamic routing. What a class says its presence by then changes, and with it the primary
capsules (`scores`):

                    primary capsules                      a class's score
    "lengths"       squashed poses                        the length of its pose                    dynamic routing
    "activations"   poses as they are, a sigmoid each     its activation                            EM
    "logits"        poses through a LayerNorm             linear in its pose, alike for all         inverted attention

The last is that of Tsai et al. 2020: behind a LayerNorm all lengths are nearly equal, and say nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.layers import FullyConnectedCapsules, MaskedDecoder, PrimaryCapsules
from torchcaps.layers._layer import positive
from torchcaps.models._model import Output, Scores, by, check_images, map_of, pair, presence, probabilities
from torchcaps.routing import Attention, Dynamic, Rule
from torchcaps.types import Capsules, Pose, pose_shape

__all__ = ["CapsNet", "Output", "Scores"]

LARGEST_MAP = 32
"""Positions per axis that the stem leaves at most, where the stride is not given."""

_NO_ACTIVATIONS = (
    'no activations, but with scores="activations" they are the scores, and these class capsules have none: take a '
    'rule that gives them, such as EM.hinton(), or scores="lengths"'
)

PAPER_ROUTING = Dynamic.sabour()

_PRIMARY: dict[str, dict[str, Any]] = {
    "lengths": {"squash": "sabour"},
    "activations": {"squash": "identity"},
    "logits": {"squash": "identity", "norm": True},
}


class CapsNet(nn.Module):
    """Images to one score per class (the architecture and its source stand on top of this file).

    in_chans, image_size   of the images: `[N, in_chans, H, W]`; `image_size` is H = W, or `(H, W)`.
    routing                any rule, e.g. `Dynamic.sabour()`. EM's paper has matrix poses: `primary_pose=(4, 4)`,
                           `class_pose=(4, 4)`.
    scores                 "lengths", "activations" or "logits"; None picks by the rule: activations where it needs
                           them, logits for `Attention`, lengths otherwise.
    decoder                True for the paper's with its `hidden` layers, False for none, or a module of your own:
                           `decoder(poses [N, classes, R, Q], keep [N, classes]) -> [N, in_chans, H, W]`. The paper's
                           has 1024 weights per number of the image, 154 million for 3x224x224; `layers.ConvDecoder` is
                           smaller.
    stem_channels, kernel_size, stem_stride, stem_padding  of the first convolution. `stem_stride=None` is per axis the
                           smallest that leaves at most 32 positions: 1 up to 40 pixels.
    stem                   a module that takes the first convolution's place, `[N, in_chans, H, W]` to a map
                           `[N, channels, h, w]` of any size; the four settings before are then not used.
    primary_types, primary_pose, primary_kernel_size, primary_stride  of the primary capsules.
    class_pose             pose of the class capsules: `(R, Q)` with the primary capsules' R, or Q.

    Kernels, strides and padding are one number, or one per axis.

    `model(x)` gives scores `[N, num_classes]`; `model(x, labels)` gives `Output`. `labels` are class indices `[N]` or
    presence `[N, num_classes]`, and only the decoder sees them. To train without a reconstruction, build the model with
    `decoder=False`: parameters that get no gradient are an error to DistributedDataParallel.

    Attribute `scores` says what the scores are. Lengths and activations are independent of each other and in 0..1 (a
    length as far as the rule's squash keeps it there); logits are any number. `probabilities` reads each of them.

    Every place of the image has weights of its own, so that the size is fixed. Raises ValueError where an image is too
    small for the kernels, or is not of the size or channels that the model was built for.

    >>> model = CapsNet(in_chans=3, image_size=(37, 52), num_classes=5)
    >>> model(torch.rand(2, 3, 37, 52)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        in_chans: int = 1,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 28,
        *,
        routing: Rule = PAPER_ROUTING,
        scores: Scores | None = None,
        decoder: bool | nn.Module = True,
        hidden: Sequence[int] = (512, 1024),
        stem: nn.Module | None = None,
        stem_channels: int = 256,
        kernel_size: int | Sequence[int] = 9,
        stem_stride: int | Sequence[int] | None = None,
        stem_padding: int | Sequence[int] = 0,
        primary_types: int = 32,
        primary_pose: Pose = 8,
        primary_kernel_size: int | Sequence[int] = 9,
        primary_stride: int | Sequence[int] = 2,
        class_pose: Pose = 16,
    ) -> None:
        super().__init__()
        in_chans, num_classes = (
            positive("CapsNet", "in_chans", in_chans),
            positive("CapsNet", "num_classes", num_classes),
        )
        stem_channels = positive("CapsNet", "stem_channels", stem_channels)
        primary_types = positive("CapsNet", "primary_types", primary_types)
        if not isinstance(routing, Rule):
            raise ValueError(f"CapsNet: routing must be a rule such as routing=Dynamic.sabour(), not {routing!r}")
        if scores not in (None, *_PRIMARY):
            raise ValueError(f"CapsNet: scores={scores!r}: take one of {', '.join(map(repr, _PRIMARY))}, or None")
        if not isinstance(decoder, bool | nn.Module):
            raise ValueError(
                f"CapsNet: decoder must be True for the paper's, False for none, or a torch.nn.Module, not {decoder!r}"
            )
        if not isinstance(stem, nn.Module | None):
            raise ValueError(
                f"CapsNet: stem must be a torch.nn.Module, or None for the paper's convolution, not {stem!r}: a "
                "function can be called in the forward of a module"
            )
        self.in_chans, self.num_classes = in_chans, num_classes
        self.image_size = pair("CapsNet", "image_size", image_size, 1)
        self.scores: Scores = _scores_of(routing) if scores is None else scores
        image, primary_kernel = self.image_size, pair("CapsNet", "primary_kernel_size", primary_kernel_size, 1)
        if stem is None:
            conv, positions = _first_convolution(
                in_chans, stem_channels, image, pair("CapsNet", "kernel_size", kernel_size, 1),
                None if stem_stride is None else pair("CapsNet", "stem_stride", stem_stride, 1),
                pair("CapsNet", "stem_padding", stem_padding, 0), primary_kernel,
            )  # fmt: skip
            stem, channels = nn.Sequential(conv, nn.ReLU()), stem_channels
        else:
            channels, (height, width) = map_of("CapsNet", "stem", stem, (in_chans, *image))
            positions = [height, width]
            if any(n < k for n, k in zip(positions, primary_kernel, strict=True)):
                raise ValueError(
                    f"CapsNet: the stem makes a map of {by(positions)} of an image of {by(image)}, but the primary "
                    f"capsules' kernel of {by(primary_kernel)} needs a map of that size at least: give a smaller "
                    "primary_kernel_size, or a stem that leaves more"
                )
        places = _windows(positions, primary_kernel, pair("CapsNet", "primary_stride", primary_stride, 1))
        self.stem = stem
        self.primary = PrimaryCapsules(
            channels, primary_types, primary_pose, primary_kernel_size, primary_stride,
            activations=routing.needs_activations, **_PRIMARY[self.scores],
        )  # fmt: skip
        self.class_caps = FullyConnectedCapsules(
            primary_types * places[0] * places[1], num_classes, primary_pose, class_pose, routing=routing
        )
        if self.scores == "activations" and not _gives_activations(routing):
            raise ValueError(f"CapsNet: {routing} gives {_NO_ACTIVATIONS}")
        R, Q = pose_shape(class_pose)
        self.readout = nn.Linear(R * Q, 1) if self.scores == "logits" else None
        if decoder is True:
            decoder = MaskedDecoder(num_classes, class_pose, (in_chans, *self.image_size), hidden)
        self.decoder = None if decoder is False else decoder

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Scores `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`.

        The reconstruction is made from the capsules of the labels in training mode, from each example's longest one
        (that of the highest score) in evaluation mode. Scores never depend on labels.
        """
        capsules = self.capsules(x)
        scores = self._score(capsules)
        if labels is None:
            return scores
        keep = presence(scores, labels)
        if self.decoder is None:
            return Output(scores, None, capsules)
        return Output(scores, self.decoder(capsules.poses, keep if self.training else _highest(scores)), capsules)

    def capsules(self, x: Tensor) -> Capsules:
        """The class capsules of images `[N, in_chans, H, W]`, poses `[N, num_classes, R, Q]`."""
        way_out = (
            "every place has weights of its own, so give in_chans and image_size as the images have them, or resize "
            "the images; layers.SharedCapsules in the place of class_caps hears images of any size"
        )
        check_images(type(self).__name__, x, self.in_chans, size=self.image_size, way_out=way_out)
        parents: Capsules = self.class_caps(self.primary(self.stem(x)))
        return parents

    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        """Images `[N, in_chans, H, W]` from the capsules of the labels; without them, from each example's longest one.

        In training and evaluation alike. Of an image that shows two digits, each is drawn by itself with its own label.
        Raises ValueError for a model without a decoder.
        """
        if self.decoder is None:
            raise ValueError("this CapsNet has no decoder to reconstruct with: build it with decoder=True")
        scores = self._score(capsules)
        image: Tensor = self.decoder(capsules.poses, _highest(scores) if labels is None else presence(scores, labels))
        return image

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """Scores `[N, num_classes]` as probabilities.

        Single-label: a distribution over the classes, in the order of the scores. Lengths and activations p_k are taken
        as the independent chances that class k is there. Given that exactly one is, it is k with a probability of

            p_k / (1 - p_k)  over the sum of that for all classes

        Of ten classes at the margin loss's targets, 0.9 for one and 0.1 for nine, the first gets 0.9; a softmax of the
        lengths would say 0.2. Logits go through a softmax. A single class has probability 1, whatever its score.

        multi_label: each class's own chance to be there: lengths and activations themselves, at most 1; the sigmoid of
        logits.

        >>> CapsNet(num_classes=3, decoder=False).probabilities(torch.tensor([[0.9, 0.1, 0.1]]))
        tensor([[0.9759, 0.0120, 0.0120]])
        """
        return probabilities(scores, self.scores, multi_label)

    def _score(self, capsules: Capsules) -> Tensor:
        if self.readout is not None:
            logits: Tensor = self.readout(capsules.poses.flatten(-2)).squeeze(-1)
            return logits
        if self.scores == "lengths":
            return capsules.lengths
        if capsules.activations is None:
            raise ValueError(f"CapsNet was given {_NO_ACTIVATIONS}")
        return capsules.activations


def _scores_of(routing: Rule) -> Scores:
    """What a class says its presence by under this rule."""
    if routing.needs_activations:
        return "activations"
    return "logits" if isinstance(routing, Attention) else "lengths"


def _gives_activations(routing: Rule) -> bool:
    """Whether the parents of one call, on a device without numbers, have activations."""
    if routing.needs_activations:
        return True
    with torch.device("meta"), torch.no_grad():
        learned: dict[str, Any] = routing.learned(1, 1, 1, 1, 1)
        parents = routing(torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1), torch.empty(1, 1), **learned)
    return parents.activations is not None


def _highest(scores: Tensor) -> Tensor:
    """1 at each example's highest score, 0 elsewhere."""
    return torch.zeros_like(scores).scatter(1, scores.argmax(1, keepdim=True), 1.0)


def _first_convolution(
    in_channels: int,
    channels: int,
    image: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int] | None,
    padding: tuple[int, int],
    primary_kernel: tuple[int, int],
) -> tuple[nn.Conv2d, list[int]]:
    """The stem's convolution and the map it makes, after a look at whether both it and the primary capsules fit."""
    padded = [size + 2 * p for size, p in zip(image, padding, strict=True)]
    given = stride is not None
    if stride is None:
        steps, kernel = zip(*map(_stride_and_kernel, padded, kernel, primary_kernel), strict=True)
    else:
        steps = stride
    room = [size - k for size, k in zip(padded, kernel, strict=True)]
    reached = _windows(padded, kernel, steps)
    if any(r < 0 or n < k for r, n, k in zip(room, reached, primary_kernel, strict=True)):
        least = [
            max(1, (n - 1) * s + k - 2 * p) for n, s, k, p in zip(primary_kernel, steps, kernel, padding, strict=True)
        ]
        if min(room) < 0:
            where = f"the stem's kernel of {by(kernel)} does not fit an image of {by(image)}"
        else:
            where = (
                f"the stem makes a map of {by(reached)} of an image of {by(image)}, and the primary capsules' kernel "
                f"of {by(primary_kernel)} does not fit it"
            )
        raise ValueError(
            f"CapsNet: {where}: the smallest image for these kernels{'' if given else ' at stem_stride=1'} is "
            f"{by(least)}; for smaller ones give a smaller kernel_size and primary_kernel_size (3 and 3 for 8 x 8 "
            "pixels), or stem_padding"
        )
    return nn.Conv2d(in_channels, channels, kernel, steps, padding), reached


def _stride_and_kernel(size: int, kernel: int, primary_kernel: int) -> tuple[int, int]:
    """The stem's on one axis, from the padded size of the image: rarely more positions than `LARGEST_MAP`."""
    stride = max(0, size - kernel) // LARGEST_MAP + 1
    # a stride above the kernel would pass over pixels: the kernel grows, and may leave the primary capsules no room
    while stride > 1 and (size - max(kernel, stride)) // stride + 1 < primary_kernel:
        stride -= 1
    return stride, max(kernel, stride)


def _windows(sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    """How many windows fit, per axis."""
    return [(n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride, strict=True)]
