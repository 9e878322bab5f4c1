"""From class capsules back to the image, to make their poses describe it.

    decoder(poses [N, J, R, Q], keep [N, J]) -> image [N, C, *spatial] in 0..1

`keep` says which capsules the decoder may see: the label as one-hot in training, the longest capsule otherwise, several
at once for several labels. It multiplies the poses, so that a number between 0 and 1 fades.
"""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchcaps.layers._layer import positive, positive_all
from torchcaps.types import Pose, pose_shape

__all__ = ["ClassIndependentDecoder", "ConvDecoder", "MaskedDecoder"]


class MaskedDecoder(nn.Module):
    """Fully connected, and sees which class is kept: the poses of all classes side by side, 0 where not kept.

    Sabour, Frosst, Hinton 2017, figure 2: two hidden layers of 512 and 1024 with ReLU, then a sigmoid.

    num_classes  J.
    pose         `(R, Q)` of the class capsules, or Q.
    out_shape    `(C, *spatial)` of the image.
    hidden       widths of the hidden layers.

    >>> import torch
    >>> decoder = MaskedDecoder(10, 16, (1, 28, 28))
    >>> decoder(torch.randn(2, 10, 1, 16), torch.eye(10)[[3, 7]]).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self, num_classes: int, pose: Pose, out_shape: Sequence[int], hidden: Sequence[int] = (512, 1024)
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.num_classes, self.pose = positive(name, "num_classes", num_classes), pose_shape(pose)
        self.out_shape = _image_shape(name, out_shape)
        self.layers = _perceptron(self.num_classes * math.prod(self.pose), hidden, self.out_shape, name)

    def forward(self, poses: Tensor, keep: Tensor) -> Tensor:
        """The image `[N, *out_shape]`. Raises ValueError where poses or keep do not fit."""
        _check(self, poses, keep, self.num_classes, self.pose)
        return self.layers((poses * keep[:, :, None, None]).flatten(1)).unflatten(1, self.out_shape)


class ClassIndependentDecoder(nn.Module):
    """Fully connected, and sees the kept capsule's pose but not its class: pose numbers mean the same for every class.

    Rajasegaran et al. 2019 (DeepCaps). Several kept capsules are added up.

    pose         `(R, Q)` of the class capsules, or Q.
    out_shape    `(C, *spatial)` of the image.
    hidden       widths of the hidden layers.
    """

    def __init__(self, pose: Pose, out_shape: Sequence[int], hidden: Sequence[int] = (512, 1024)) -> None:
        super().__init__()
        name = type(self).__name__
        self.pose, self.out_shape = pose_shape(pose), _image_shape(name, out_shape)
        self.layers = _perceptron(math.prod(self.pose), hidden, self.out_shape, name)

    def forward(self, poses: Tensor, keep: Tensor) -> Tensor:
        """The image `[N, *out_shape]`. Raises ValueError where poses or keep do not fit."""
        _check(self, poses, keep, None, self.pose)
        return self.layers((poses * keep[:, :, None, None]).sum(1).flatten(1)).unflatten(1, self.out_shape)


class ConvDecoder(nn.Module):
    """A small map from the poses of all classes, 0 where not kept, then doubled and convolved until it is an image.

    Each entry of `channels` is one doubling: a nearest-neighbour resize to the exact size on the way, ceil(size / 2^k),
    and a 3x3 convolution with ReLU. A last 3x3 convolution with a sigmoid makes the image, of any height and width.

    num_classes  J.
    pose         `(R, Q)` of the class capsules, or Q.
    out_shape    `(C, height, width)` of the image.
    channels     of the map after each doubling; the small map has the first entry's too.
    """

    def __init__(
        self, num_classes: int, pose: Pose, out_shape: Sequence[int], channels: Sequence[int] = (64, 32, 16)
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.num_classes, self.pose = positive(name, "num_classes", num_classes), pose_shape(pose)
        self.out_shape, channels = _image_shape(name, out_shape), positive_all(name, "channels", channels)
        if len(self.out_shape) != 3 or not channels:
            raise ValueError(
                f"{name} makes images (C, height, width) in one or more doublings, not {out_shape!r}, {channels!r}"
            )
        C, *image = self.out_shape
        # the sizes on the way, the smallest first
        self.sizes = [tuple(-(-n // 2**k) for n in image) for k in range(len(channels), -1, -1)]
        self.small = (channels[0], *self.sizes[0])
        self.first = nn.Linear(self.num_classes * math.prod(self.pose), math.prod(self.small))
        widths = zip((channels[0], *channels[:-1]), channels, strict=True)
        self.convolutions = nn.ModuleList(nn.Conv2d(below, above, 3, padding=1) for below, above in widths)
        self.last = nn.Conv2d(channels[-1], C, 3, padding=1)

    def forward(self, poses: Tensor, keep: Tensor) -> Tensor:
        """The image `[N, *out_shape]`. Raises ValueError where poses or keep do not fit."""
        _check(self, poses, keep, self.num_classes, self.pose)
        x = self.first((poses * keep[:, :, None, None]).flatten(1)).relu().unflatten(1, self.small)
        for size, convolution in zip(self.sizes[1:], self.convolutions, strict=True):
            x = convolution(interpolate(x, size=size)).relu()
        return self.last(x).sigmoid()


def _image_shape(name: str, out_shape: Sequence[int]) -> tuple[int, ...]:
    shape = positive_all(name, "out_shape", out_shape)
    if not shape:
        raise ValueError(f"{name}: out_shape must be (C, *spatial), such as (1, 28, 28), not {out_shape!r}")
    return shape


def _perceptron(inputs: int, hidden: Sequence[int], out_shape: Sequence[int], name: str) -> nn.Sequential:
    widths = [inputs, *positive_all(name, "hidden", hidden), math.prod(out_shape)]
    layers: list[nn.Module] = []
    for below, above in itertools.pairwise(widths):
        layers += [nn.Linear(below, above), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.Sigmoid())


def _check(decoder: nn.Module, poses: Tensor, keep: Tensor, classes: int | None, pose: tuple[int, int]) -> None:
    wanted = ["N", "J" if classes is None else classes, *pose]
    if poses.dim() != 4 or tuple(poses.shape[2:]) != pose or classes not in (None, poses.shape[1]):
        raise ValueError(
            f"{type(decoder).__name__} takes poses [{', '.join(map(str, wanted))}], not {list(poses.shape)}: "
            "build it with the class capsules' pose and number"
        )
    if keep.shape != poses.shape[:2]:
        raise ValueError(
            f"{type(decoder).__name__}: keep {list(keep.shape)} but poses {list(poses.shape)} need "
            f"{list(poses.shape[:2])}, 1 for a kept capsule: torch.nn.functional.one_hot(label, classes)"
        )
