"""What the models share: a look at images and labels, the size of a map, and what scores say.

scores          what they are                                                          a class's own chance
"lengths"       lengths of poses, in 0..1 as far as the squash keeps them there        itself, at most 1
"activations"   activations, or the sigmoids of a plain head: in 0..1                  itself
"logits"        any numbers                                                            its sigmoid
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchcaps.layers import ConvCapsules
from torchcaps.layers._layer import per_axis, positive_all
from torchcaps.layers.conv import Competition
from torchcaps.routing import Rule
from torchcaps.types import Capsules, Pose, value_range

__all__ = [
    "ConvLayer", "Output", "Scores", "answer", "by", "check_images", "check_layers", "conv_stack", "map_of", "pair",
    "places_after", "presence", "probabilities", "smallest",
]  # fmt: skip

Scores = Literal["lengths", "activations", "logits"]


class Output(NamedTuple):
    """What a model gives to those who bring labels.

    scores          `[N, classes]`, the same as without labels.
    reconstruction  `[N, C, H, W]` in 0..1, or None without a decoder.
    capsules        the class capsules, poses `[N, classes, R, Q]`; None of a plain network.
    """

    scores: Tensor
    reconstruction: Tensor | None
    capsules: Capsules | None


ConvLayer = tuple[int, int, int]
"""(types, kernel size, stride) of a layer of convolutional capsules."""


def probabilities(scores: Tensor, kind: Scores, multi_label: bool) -> Tensor:
    """Scores `[N, classes]` of this kind as probabilities.

    Single-label: a distribution over the classes, in the order of the scores. Lengths and activations p_k are taken as
    the independent chances that class k is there. Given that exactly one is, it is k with a probability of

        p_k / (1 - p_k)  over the sum of that for all classes

    Logits go through a softmax. multi_label: each class's own chance to be there.
    """
    if kind == "logits":
        return scores.sigmoid() if multi_label else scores.softmax(-1)
    if multi_label:
        return scores.clamp(0, 1)
    p = scores.to(torch.promote_types(scores.dtype, torch.float32))
    info = torch.finfo(p.dtype)
    # rounding may carry a length a little above 1: the odds stay finite and in order; all zeros share evenly
    odds = p / (1 + 8 * info.eps - p.clamp(max=1 + 7 * info.eps)) + info.tiny
    return (odds / odds.sum(-1, keepdim=True)).to(scores.dtype)


def check_images(
    model: str,
    x: Tensor,
    in_chans: int,
    *,
    size: Sequence[int] | None = None,
    least: int = 1,
    way_out: str,
) -> None:
    """A ValueError for what is no batch of images `[N, in_chans, H, W]` of that size, or of `least` or more."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{model} takes a tensor of images, not {type(x).__name__}: give torch.as_tensor(x)")
    H, W = ("H", "W") if size is None else size
    wanted = f"[N, {in_chans}, {H}, {W}]" + ("" if size else f" with H and W of {least} or more")
    fits = x.dim() == 4 and x.shape[1] == in_chans
    if not (fits and (min(x.shape[2:]) >= least if size is None else tuple(x.shape[2:]) == tuple(size))):
        single = x.dim() == 3 and x.shape[0] == in_chans
        hint = "; one image is a batch of one: x.unsqueeze(0)" if single else ""
        raise ValueError(f"{model} was built for images {wanted}, not {list(x.shape)}{hint}: {way_out}")
    if not x.is_floating_point():
        raise ValueError(f"{model} takes floating-point images, not {x.dtype}: for bytes give x / 255")


def answer(scores: Tensor, capsules: Capsules | None, labels: Tensor | None) -> Tensor | Output:
    """What a model without a decoder gives: scores `[N, classes]`; with labels, after a look at these, `Output`."""
    if labels is None:
        return scores
    presence(scores, labels)
    return Output(scores, None, capsules)


def presence(scores: Tensor, labels: Tensor) -> Tensor:
    """Labels, class indices `[N]` or presence `[N, classes]`, as `[N, classes]`, 1 where a class is present.

    A ValueError for labels that do not fit the scores `[N, classes]`.
    """
    N, K = scores.shape
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor, not {type(labels).__name__}: give torch.as_tensor(labels)")
    present = tuple(labels.shape) == (N, K)
    indices = tuple(labels.shape) == (N,) and not (labels.is_floating_point() or labels.dtype == torch.bool)
    if labels.is_complex() or not (present or indices):
        raise ValueError(
            f"labels {list(labels.shape)} of {labels.dtype} do not fit scores [{N}, {K}]: "
            f"give class indices [{N}] of torch.long, or presence [{N}, {K}] in 0..1"
        )
    values = value_range(labels)
    if values is not None and not (values[0] >= 0 and values[1] <= (1 if present else K - 1)):
        allowed = "presence is 0 to 1" if present else f"the model has {K} classes: 0 to {K - 1}"
        raise ValueError(f"labels hold {values[0]} to {values[1]}, but {allowed}")
    if present:
        return labels.to(scores.dtype)
    return torch.zeros_like(scores).scatter(1, labels.long()[:, None], 1.0)


def map_of(model: str, name: str, module: nn.Module, image: tuple[int, int, int]) -> tuple[int, tuple[int, int]]:
    """(channels, (height, width)) that the module called `name` makes of an image, without calculating a number."""
    if any(map(is_lazy, module.parameters())):
        raise ValueError(
            f"{model}: the {name} has parameters without a size: show it an image before, "
            f"{name}(torch.rand{(1, *image)}), or build it for {image[0]} channels"
        )
    try:
        on_meta = deepcopy(module).to("meta").eval()
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        with torch.no_grad():
            x = on_meta(torch.empty(1, *image, device="meta", dtype=dtype))
    except Exception as error:
        raise ValueError(
            f"{model}: the {name} does not take an image {[1, *image]}: {error}: build it for {image[0]} channels, or "
            "give the in_chans and image_size that it takes"
        ) from error
    if not isinstance(x, Tensor) or x.dim() != 4:
        what = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{model}: the {name} must make a map [N, channels, height, width] of an image, not {what}")
    _, channels, height, width = x.shape
    return channels, (height, width)


def check_layers(model: str, conv_caps: Sequence[ConvLayer]) -> list[ConvLayer]:
    """The layers, if each is (types, kernel size, stride)."""
    layers = [positive_all(model, "conv_caps", layer) for layer in conv_caps]
    if any(len(layer) != 3 for layer in layers):
        raise ValueError(f"{model}: conv_caps={conv_caps!r} must hold (types, kernel size, stride) for each layer")
    return [(types, kernel, stride) for types, kernel, stride in layers]


def conv_stack(
    model: str,
    types: int,
    places: tuple[int, int],
    pose: Pose,
    layers: Sequence[ConvLayer],
    image: Sequence[int],
    *,
    routing: Rule,
    competition: Competition,
) -> tuple[list[ConvCapsules], int, tuple[int, int]]:
    """Layers of convolutional capsules over a map of `types` at `places`; the types and places that the last leaves."""
    stack = []
    for number, (above, kernel, stride) in enumerate(layers, start=1):
        stack.append(ConvCapsules(types, above, pose, pose, kernel, stride, routing=routing, competition=competition))
        places = places_after(
            model, f"layer {number} of conv_caps", places, stack[-1].kernel_size, stack[-1].stride, image
        )
        types = above
    return stack, types, places


def places_after(
    model: str, layer: str, places: Sequence[int], kernel: Sequence[int], stride: Sequence[int], image: Sequence[int]
) -> tuple[int, int]:
    """(height, width) of the map that a layer without padding makes of one of these places."""
    if any(n < k for n, k in zip(places, kernel, strict=True)):
        raise ValueError(
            f"{model}: the kernel of {by(kernel)} of {layer} does not fit the map of {by(places)} that an image of "
            f"{by(image)} leaves there: give larger images, a smaller kernel, or less stride before it"
        )
    height, width = ((n - k) // s + 1 for n, k, s in zip(places, kernel, stride, strict=True))
    return height, width


def pair(model: str, name: str, value: int | Sequence[int], least: int = 1) -> tuple[int, int]:
    """(height, width) from one number for both, or one each."""
    height, width = per_axis(model, name, value, 2, least)
    return height, width


def smallest(layers: Iterable[tuple[int, int, int]]) -> int:
    """The size that leaves one position after windows of (kernel, stride, padding), one after the other."""
    size = 1
    for kernel, stride, padding in reversed(list(layers)):
        size = max(1, (size - 1) * stride + kernel - 2 * padding)
    return size


def by(sizes: Sequence[int]) -> str:
    """`[20, 30]` as "20 x 30"."""
    return " x ".join(map(str, sizes))
