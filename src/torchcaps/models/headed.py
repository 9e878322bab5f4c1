"""One backbone, three heads: what capsules, and routing itself, add to a network that is otherwise the same.

    backbone    a convolution and ReLU for each of `widths`                           [N, in_chans, *spatial] -> map
    linear      mean over all places, linear                                          scores are logits
    mlp         mean over all places, linear to `hidden`, ReLU, linear                scores are logits
    capsules    convolution 1x1 to types of capsules, and routing to the classes by one weight for each type and class,
                the same at every place                                               scores are what the rule speaks by

Routing off is `routing=Dynamic(iterations=1)`; `matched_hidden` gives the mlp as many parameters as the capsules have.

The backbone's strides follow from `image_size`, per axis: 2 for each convolution, 1 where fewer than 4 places would be
left, and more for the first where more than 64 places (of one axis), 16 (of each of two) or 8 (of three) would be. 28
pixels leave 4 places, 8 pixels 4, 64 pixels 8. Kernels are 9, 5 or 3 wide, for one, two or three axes, or 2 s - 1 at a
larger stride s, and are padded so that n places become ceil(n / s).

There is no normalisation: an example is the same alone as in any batch, in training as in evaluation, and spread over
processes as in one. He's initial weights do without, the fan-in being what a kernel sees of the map on average, without
the padding. In 500 steps on 2000 images each of MNIST, Fashion-MNIST and PneumoniaMNIST they came as far as BatchNorm,
whose first 100 steps are better, and farther than GroupNorm. The input should have about mean 0 and variance 1.

    masks   place o of a convolution's output takes part if any of the places o s .. o s + s - 1 below it does
            masked places are 0 before each convolution, as its padding is, and left out of the mean and the routing

So padding a sequence further changes nothing. (A place whose kernel merely reaches one that takes part does not: it
would be one more place than the sequence alone has.)
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool1d, max_pool2d, max_pool3d, relu
from torch.nn.parameter import is_lazy

from torchcaps.layers import PrimaryCapsules, SharedCapsules
from torchcaps.layers._layer import per_axis, positive, positive_all
from torchcaps.models._model import Scores, answer, probabilities
from torchcaps.models.capsnet import Output, _scores_of
from torchcaps.routing import Dynamic, Rule
from torchcaps.types import Capsules, Pose, pose_shape, whole

__all__ = ["CarriesMask", "ConvFeatures", "Head", "HeadedNet", "matched_hidden"]

Head = Literal["linear", "mlp", "capsules"]

LEAST_PLACES = 4
MOST_PLACES = {1: 64, 2: 16, 3: 8}
KERNELS = {1: 9, 2: 5, 3: 3}
"""Per axis, by the number of axes: 9, 25 and 27 numbers of each channel."""

_CONVOLUTIONS: dict[int, Callable[..., nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_MAX_POOLS = {1: max_pool1d, 2: max_pool2d, 3: max_pool3d}


@runtime_checkable
class CarriesMask(Protocol):
    """A backbone that knows which places of its map take part."""

    def with_mask(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(map `[N, channels, *places]`, mask `[N, *places]`) of `x` and a mask `[N, *spatial]`, True takes part."""


class ConvFeatures(nn.Module):
    """Images, signals or volumes `[N, in_chans, *spatial]` to a map `[N, widths[-1], *places]`.

    image_size  per axis, one to three of them: strides follow from it. Other sizes pass too. An axis of size 1 has
                kernels of size 1, so that feature vectors `[N, features, 1]` go through linear layers.
    widths      channels of each convolution.

    >>> ConvFeatures(3, (28, 28))(torch.rand(2, 3, 28, 28)).shape
    torch.Size([2, 128, 4, 4])
    """

    def __init__(self, in_chans: int, image_size: Sequence[int], widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        name = type(self).__name__
        channels = (positive(name, "in_chans", in_chans), *positive_all(name, "widths", widths))
        sizes = positive_all(name, "image_size", image_size)
        if len(channels) == 1 or len(sizes) not in _CONVOLUTIONS:
            raise ValueError(
                f"{name}: widths={widths!r} must hold a number for each convolution, one at least, and "
                f"image_size={image_size!r} one for each of one to three axes"
            )
        each_axis = [_strides(size, len(channels) - 1, MOST_PLACES[len(sizes)]) for size in sizes]
        self.strides = list(zip(*each_axis, strict=True))
        """Of each convolution, per axis."""
        least = KERNELS[len(sizes)]
        self.convolutions, places = nn.ModuleList(), list(sizes)
        for below, above, strides in zip(channels[:-1], channels[1:], self.strides, strict=True):
            kernel = [
                1 if size == 1 else max(least, 2 * stride - 1) for size, stride in zip(sizes, strides, strict=True)
            ]
            convolution = _CONVOLUTIONS[len(sizes)](below, above, kernel, strides, [k // 2 for k in kernel])
            fan_in = below * math.prod(map(_numbers_under_kernel, places, kernel, strides))
            nn.init.normal_(convolution.weight, std=(2 / fan_in) ** 0.5)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            self.convolutions.append(convolution)
            places = [-(-size // stride) for size, stride in zip(places, strides, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        """The map."""
        for convolution in self.convolutions:
            x = relu(convolution(x))
        return x

    def with_mask(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(map, mask `[N, *places]`) of `x` and a mask `[N, *spatial]`; the map is 0 where the mask is False."""
        x = x.masked_fill(~mask[:, None], 0.0)
        for convolution, strides in zip(self.convolutions, self.strides, strict=True):
            mask = _shrink(mask, strides)
            x = relu(convolution(x)).masked_fill(~mask[:, None], 0.0)
        return x, mask


class CapsuleHead(nn.Module):
    """A map `[N, channels, *places]` to class capsules, and to one score per class."""

    def __init__(
        self,
        channels: int,
        num_classes: int,
        places: Sequence[int],
        *,
        routing: Rule,
        primary_types: int,
        primary_pose: Pose,
        class_pose: Pose,
    ) -> None:
        super().__init__()
        self.scores: Scores = _scores_of(routing)
        self.primary = PrimaryCapsules(
            channels, primary_types, primary_pose, spatial_dims=len(places),
            squash="sabour" if self.scores == "lengths" else "identity", norm=self.scores == "logits",
            activations=self.scores == "activations",
        )  # fmt: skip
        init, count = None, math.prod(places)
        if self.scores == "lengths":
            # votes of one type from places that see much the same add up: they count as one vote that is longer
            init = routing.weight_std(primary_types, num_classes, *self.primary.pose, pose_shape(class_pose)[1])
            init = init if routing.sums_to == "children" else init / count
        self.class_caps = SharedCapsules(
            num_classes, primary_pose, class_pose, routing=routing, in_types=primary_types, init=init,
            typical_caps=primary_types * count,
        )  # fmt: skip
        self.readout = nn.Linear(math.prod(pose_shape(class_pose)), 1) if self.scores == "logits" else None

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Capsules]:
        """(scores `[N, K]`, class capsules) of a map and the mask `[N, *places]` of the places that take part."""
        children = self.primary(features)
        parents = self.class_caps(children, None if mask is None else _expand(mask, self.primary.types))
        if self.readout is not None:
            return self.readout(parents.poses.flatten(-2)).squeeze(-1), parents
        if self.scores == "activations":
            assert parents.activations is not None
            return parents.activations, parents
        return parents.lengths, parents


class PooledHead(nn.Module):
    """The mean of a map `[N, channels, *places]` over its places, to logits; `hidden=0` is no layer more."""

    scores: Scores = "logits"

    def __init__(self, channels: int, num_classes: int, hidden: int = 0) -> None:
        super().__init__()
        self.layers: nn.Module = nn.Linear(hidden or channels, num_classes)
        if hidden:
            self.layers = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), self.layers)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        """(logits `[N, K]`, None) of a map and the mask `[N, *places]` of the places that take part."""
        if mask is None:
            pooled = features.flatten(2).mean(2)
        else:  # of an example without any place the mean is 0
            total = features.masked_fill(~mask[:, None], 0.0).flatten(2).sum(2)
            pooled = total / mask.flatten(1).sum(1, keepdim=True).clamp(min=1)
        return self.layers(pooled), None


class HeadedNet(nn.Module):
    """Images, signals or volumes to one score per class (the parts stand on top of this file).

    in_chans, image_size   of the input `[N, in_chans, *spatial]`; one number is that size along each of the axes. Other
                           sizes pass too: no weight belongs to a place.
    backbone               a module that takes the place of the convolutions, `[N, in_chans, *spatial]` to a map
                           `[N, channels, *places]`. With a method `with_mask` it takes masks too (`CarriesMask`).
    widths                 channels of each convolution, where no backbone is given.
    head                   "linear", "mlp" or "capsules".
    hidden                 width of the mlp's layer; the other heads do not use it.
    routing                any rule: scores are activations where it needs them, logits for `Attention`, and lengths
                           otherwise, as in `CapsNet`. This and the next three are the capsules' alone.
    primary_types, primary_pose  of the capsules at each place.
    class_pose             pose of the class capsules: `(R, Q)` with the primary capsules' R, or Q.
    spatial_dims           1, 2 or 3; None is as many as `image_size` has numbers, two where it is one number.

    `model(x)` gives scores `[N, num_classes]`; `model(x, labels)` gives `Output`, without a reconstruction, and without
    capsules under the plain heads. A mask `[N, *spatial]` of bools, True where there is something, leaves the rest out.
    Attribute `scores` says what the scores are. Raises ValueError where arguments do not fit each other or the input.

    >>> signals = HeadedNet(6, 4, [100], widths=(8, 16))
    >>> signals(torch.rand(2, 6, 120), mask=torch.arange(120) < torch.tensor([[80], [120]])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_chans: int = 1,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 28,
        *,
        backbone: nn.Module | None = None,
        widths: Sequence[int] = (32, 64, 128),
        head: Head = "capsules",
        hidden: int = 64,
        routing: Rule = Dynamic(),  # noqa: B008  (frozen)
        primary_types: int = 16,
        primary_pose: Pose = 8,
        class_pose: Pose = 16,
        spatial_dims: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if head not in get_args(Head):
            raise ValueError(f"{name}: head={head!r}: take one of {', '.join(map(repr, get_args(Head)))}")
        if not isinstance(routing, Rule):
            raise ValueError(f"{name}: routing must be a rule such as routing=Dynamic(), not {routing!r}")
        if not isinstance(backbone, nn.Module | None):
            raise ValueError(f"{name}: backbone must be a torch.nn.Module, or None for convolutions, not {backbone!r}")
        self.in_chans = positive(name, "in_chans", in_chans)
        self.num_classes = positive(name, "num_classes", num_classes)
        self.image_size = _sizes(name, image_size, spatial_dims)
        if backbone is None:
            backbone = ConvFeatures(self.in_chans, self.image_size, widths)
        channels, *places = _map_of(name, backbone, (self.in_chans, *self.image_size))
        self.backbone = backbone
        self.head: CapsuleHead | PooledHead
        if head == "capsules":
            self.head = CapsuleHead(
                channels, self.num_classes, places, routing=routing, primary_types=primary_types,
                primary_pose=primary_pose, class_pose=class_pose,
            )  # fmt: skip
        else:
            self.head = PooledHead(channels, self.num_classes, positive(name, "hidden", hidden) * (head == "mlp"))
        self.scores: Scores = self.head.scores

    def forward(self, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor | Output:
        """Scores `[N, num_classes]` of `x` `[N, in_chans, *spatial]`; with labels, `Output`."""
        scores, capsules = self._run(x, mask)
        return answer(scores, capsules, labels)

    def capsules(self, x: Tensor, mask: Tensor | None = None) -> Capsules:
        """The class capsules of `x` `[N, in_chans, *spatial]`, poses `[N, num_classes, R, Q]`.

        Raises ValueError under a head without capsules.
        """
        capsules = self._run(x, mask)[1]
        if capsules is None:
            raise ValueError("this HeadedNet has a plain head: build it with head='capsules'")
        return capsules

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """Scores `[N, num_classes]` as probabilities, as `CapsNet.probabilities` does for scores of their kind."""
        return probabilities(scores, self.scores, multi_label)

    def _run(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Capsules | None]:
        self._check(x, mask)
        if mask is None:
            result: tuple[Tensor, Capsules | None] = self.head(self.backbone(x))
            return result
        if not isinstance(self.backbone, CarriesMask):
            raise ValueError(
                f"HeadedNet was given a mask, but its backbone {type(self.backbone).__name__} does not say which "
                "places of its map take part: give it a method with_mask(x, mask) -> (map, mask), or give no mask"
            )
        result = self.head(*self.backbone.with_mask(x, mask))
        return result

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        axes = len(self.image_size)
        spatial = ("L", "H, W", "D, H, W")[axes - 1]
        if not isinstance(x, Tensor):
            raise ValueError(f"HeadedNet takes a tensor, not {type(x).__name__}: give torch.as_tensor(x)")
        if x.dim() != axes + 2 or x.shape[1] != self.in_chans or 0 in x.shape[2:]:
            single = x.dim() == axes + 1 and x.shape[0] == self.in_chans
            hint = (
                "one of them is a batch of one: x.unsqueeze(0)" if single else "give in_chans and image_size as x has"
            )
            raise ValueError(f"HeadedNet was built for x [N, {self.in_chans}, {spatial}], not {list(x.shape)}: {hint}")
        if not x.is_floating_point():
            raise ValueError(f"HeadedNet takes floating-point numbers, not {x.dtype}: for bytes give x / 255")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (x.shape[0], *x.shape[2:])):
            raise ValueError(
                f"mask {list(mask.shape)} of {mask.dtype}, but x {list(x.shape)} needs "
                f"{[x.shape[0], *x.shape[2:]]} of torch.bool, True for a place that takes part"
            )


def matched_hidden(model: HeadedNet, tolerance: float = 0.05) -> int:
    """The width `hidden` at which a mlp head has as many parameters as this model's capsules, give or take `tolerance`.

    Raises ValueError for a model without capsules, and where no width comes as near.

    >>> capsules = HeadedNet(1, 10, 28)
    >>> mlp = HeadedNet(1, 10, 28, head="mlp", hidden=matched_hidden(capsules))
    >>> [sum(p.numel() for p in model.head.parameters()) for model in (capsules, mlp)]
    [36992, 36984]
    """
    if not isinstance(model.head, CapsuleHead):
        raise ValueError("matched_hidden takes a HeadedNet with head='capsules'")
    wanted = sum(p.numel() for p in model.head.parameters())
    channels, K = model.head.primary.conv.in_channels, model.num_classes
    step = channels + 1 + K  # weights and bias of a hidden unit, and its weight for each class
    hidden = max(1, round((wanted - K) / step))
    reached = hidden * step + K
    if abs(reached - wanted) > tolerance * wanted:
        raise ValueError(
            f"no mlp head has the {wanted:,} parameters of these capsules within {tolerance:.1%}: {hidden} hidden "
            f"units have {reached:,}; give more primary_types or larger poses, or a backbone with fewer channels"
        )
    return hidden


def _strides(size: int, layers: int, most: int) -> list[int]:
    """Of each convolution along one axis of this size."""
    larger = 1
    while True:
        strides, places = list[int](), size
        for _ in range(layers):
            stride = 2 if -(-places // 2) >= LEAST_PLACES else 1
            strides.append(stride if strides else stride * larger)
            places = -(-places // strides[-1])
        if places <= most:
            return strides
        larger *= 2


def _numbers_under_kernel(size: int, kernel: int, stride: int) -> float:
    """Along one axis, of each channel, on average over places: fewer than the kernel is wide where it hangs over."""
    places, half = range(0, size, stride), kernel // 2
    return sum(min(size, place + half + 1) - max(0, place - half) for place in places) / len(places)


def _shrink(mask: Tensor, strides: Sequence[int]) -> Tensor:
    """`[N, *spatial]` after a convolution with these strides: True where any of the places of a stride is."""
    if set(strides) == {1}:
        return mask
    pool = _MAX_POOLS[len(strides)]
    pooled: Tensor = pool(mask[:, None].float(), tuple(strides), tuple(strides), ceil_mode=True)
    return pooled[:, 0] > 0


def _expand(mask: Tensor, types: int) -> Tensor:
    """A mask of places for each type of capsule there, `[N, types, *places]`."""
    return mask[:, None].expand(-1, types, *mask.shape[1:])


def _sizes(model: str, image_size: int | Sequence[int], spatial_dims: int | None) -> tuple[int, ...]:
    """One number per axis; a ValueError where the two do not say one thing."""
    axes = spatial_dims
    if axes is None:
        axes = len(image_size) if isinstance(image_size, Sequence) else 2
    if whole(axes) not in _CONVOLUTIONS:
        raise ValueError(
            f"{model}: image_size={image_size!r} and spatial_dims={spatial_dims!r} must be of 1, 2 or 3 axes"
        )
    return per_axis(model, "image_size", image_size, axes, 1)


def _map_of(model: str, backbone: nn.Module, sizes: Sequence[int]) -> list[int]:
    """[channels, *places] that the backbone makes of one example, without calculating a number."""
    if any(map(is_lazy, backbone.parameters())):
        raise ValueError(
            f"{model}: the backbone has parameters without a size: show it an example before, "
            f"backbone(torch.rand{(1, *sizes)}), or build it for {sizes[0]} channels"
        )
    try:
        on_meta = deepcopy(backbone).to("meta").eval()
        dtype = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), None)
        with torch.no_grad():
            features = on_meta(torch.empty(1, *sizes, device="meta", dtype=dtype))
    except Exception as error:
        raise ValueError(
            f"{model}: the backbone does not take {[1, *sizes]}: {error}: build it for {sizes[0]} channels, or give "
            "the in_chans and image_size that it takes"
        ) from error
    if not isinstance(features, Tensor) or features.dim() != len(sizes) + 1:
        what = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"{model}: the backbone must make a map [N, channels, *places] of {[1, *sizes]}, not {what}")
    return list(features.shape[1:])
