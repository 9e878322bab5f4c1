"""Capsules with inverted dot-product attention, all layers routed at once.

Tsai, Srivastava, Goh, Salakhutdinov 2020, "Capsules with inverted dot-product attention routing", sections 3 and 5; the
equations of a round are in routing/attention.py. For CIFAR-10, images of 32x32:

    backbone     the first convolution and two stages of a ResNet, of 3 and 4 blocks          -> 128 x 16x16
                 ("resnet"), or one convolution 3x3, stride 2, ReLU ("simple")
    primary      convolution 1x1 without bias, LayerNorm over each pose: 32 types of 4x4      -> 32 x 16x16 capsules
    conv_caps    kernel 3x3, stride 2: 32 types                                               -> 32 x 7x7
                 kernel 3x3, stride 1: 32 types                                               -> 32 x 5x5
    hidden_caps  fully connected layers: none for CIFAR-10, 20 capsules for CIFAR-100
    class_caps   fully connected                                                              -> 10
    scores       one linear map from a pose to a number, alike for all classes: logits

Concurrent routing of n layers in T rounds, p_0 the primary capsules and ROUND one round of routing:

    t = 1         for l = 1 .. n:      p_l(1) = ROUND_l(p_{l-1}(1))                           from uniform coupling
    t = 2 .. T    for all l at once:   p_l(t) = ROUND_l(p_{l-1}(t-1), from p_l(t-1))          p_0(t) = p_0

Sequential routing ends all T rounds of a layer before the next layer begins. Scores are those of p_n(T).

Round t of layer l reaches p_n(T) only if t <= T - (n - l). All other rounds of concurrent routing are dead, and are not
run. With the paper's T = 2 the class capsules alone are ever routed; the layers below sum their votes once, uniformly.

Parameters                                  10 classes    100 classes
    resnet                                   1,828,817      2,799,629    CIFAR-100: poses 6x6, `hidden_caps=(20,)`
    simple                                     561,297      1,462,989    256 channels for CIFAR-10, 128 for CIFAR-100
    DiverseMultiMNIST                        9,963,969                   `inverted_attention_diverse` in registry.py
    the same with poses of 64               42,478,017                   `pose=64`
    Sabour's capsules                        7,992,576     31,585,536    `CapsNet` without a decoder
    behind a resnet of 256 channels         12,451,136     36,044,096    `capsnet_resnet` in registry.py
    Hinton's capsules, plain networks                                    em_capsnet.py, cnn.py

The first line are the authors' configurations. The others they did not publish: they are put together here so that the
parameters are as many as the paper's tables say.

Ablations of section 5:   A, no LayerNorm          `routing=Attention(norm=False)`
                          B, sequential routing    `order="sequential"`
                          C, with activations      `routing=ActivatedAttention()` (activated_attention.py)

Not as in the authors' code: that rearranges the windows of a convolution in memory, so that the entries of one pose
come from several places, and its published accuracies were most likely reached that way. Here a pose stays a pose, as
in the paper and in the first author's later code. It also runs dead rounds, and drops the batch axis of a batch of one.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, cast

from torch import Tensor, nn

from torchcaps.layers import FullyConnectedCapsules, PrimaryCapsules
from torchcaps.layers._layer import RoutedLayer, positive, positive_all
from torchcaps.models._model import (
    ConvLayer,
    Output,
    Scores,
    answer,
    check_images,
    check_layers,
    conv_stack,
    map_of,
    pair,
    places_after,
    probabilities,
)
from torchcaps.models.cnn import ResNetFeatures
from torchcaps.routing import Attention, Routed, Rule
from torchcaps.types import Capsules, Pose, pose_shape

__all__ = ["InvertedAttentionCapsNet"]

PAPER_ROUTING = Attention.tsai()

Backbone = Literal["resnet", "simple"]
Order = Literal["concurrent", "sequential"]


class InvertedAttentionCapsNet(nn.Module):
    """Images to one logit per class (the architecture and its source stand on top of this file).

    in_chans, image_size  of the images `[N, in_chans, H, W]`; `image_size` is H = W, or `(H, W)`.
    routing               a rule with a number of `iterations`, which is T.
    order                 "concurrent" or "sequential".
    backbone              "resnet", "simple", or a module: `[N, in_chans, H, W]` to a map `[N, channels, h, w]`.
    backbone_channels     of the map, where the backbone is no module.
    resnet_width          channels of the resnet's first stage.
    primary_types, primary_kernel_size, primary_stride  of the primary capsules.
    primary_norm          LayerNorm over the primary capsules' poses. (Whether ablation A keeps it is not known.)
    pose                  of all capsules: `(4, 4)` for matrices, or a number for vectors.
    conv_caps             (types, kernel size, stride) of each layer of convolutional capsules.
    hidden_caps           capsules of each fully connected layer below the class capsules.
    skip_dead_rounds      False runs what cannot change the scores too, as the authors' code does; they are the same.

    `model(x)` gives scores `[N, num_classes]`, any numbers; `model(x, labels)` gives `Output`, without a
    reconstruction. Under a rule with activations each capsule has one, and the readout sees each class's pose times it.

    Every place has weights of its own in the fully connected layers, so that the size of images is fixed. Raises
    ValueError where an image is too small for the kernels, or is not as the model was built.

    >>> import torch
    >>> layers = {"backbone_channels": 16, "primary_types": 4, "conv_caps": ((4, 3, 2), (4, 3, 1))}
    >>> model = InvertedAttentionCapsNet(backbone="simple", routing=Attention.tsai(iterations=3), **layers)
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    scores: Scores = "logits"

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 10,
        image_size: int | Sequence[int] = 32,
        *,
        routing: Rule = PAPER_ROUTING,
        order: Order = "concurrent",
        backbone: Backbone | nn.Module = "resnet",
        backbone_channels: int = 128,
        resnet_width: int = 64,
        primary_types: int = 32,
        primary_kernel_size: int = 1,
        primary_stride: int = 1,
        primary_norm: bool = True,
        pose: Pose = (4, 4),
        conv_caps: Sequence[ConvLayer] = ((32, 3, 2), (32, 3, 1)),
        hidden_caps: Sequence[int] = (),
        skip_dead_rounds: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if order not in ("concurrent", "sequential"):
            raise ValueError(f"{name}: order={order!r}: take 'concurrent' or 'sequential'")
        if not isinstance(routing, Rule) or "iterations" not in {field.name for field in fields(routing)}:
            raise ValueError(
                f"{name}: routing must be a rule with iterations such as Attention.tsai(), not {routing!r}"
            )
        self.in_chans, self.image_size = positive(name, "in_chans", in_chans), pair(name, "image_size", image_size)
        self.num_classes = positive(name, "num_classes", num_classes)
        self.order, self.skip_dead_rounds = order, skip_dead_rounds
        settings: Any = routing
        self.iterations: int = settings.iterations
        rule = replace(settings, iterations=1) if order == "concurrent" else routing
        self.backbone = _backbone(name, backbone, self.in_chans, backbone_channels, resnet_width)
        channels, places = map_of(name, "backbone", self.backbone, (self.in_chans, *self.image_size))
        self.primary = PrimaryCapsules(
            channels, primary_types, pose, primary_kernel_size, primary_stride, bias=False, squash="identity",
            norm=primary_norm, activations=routing.needs_activations,
        )  # fmt: skip
        conv = self.primary.conv
        places = places_after(name, "the primary capsules", places, conv.kernel_size, conv.stride, self.image_size)
        stack, types, places = conv_stack(
            name,
            primary_types,
            places,
            pose,
            check_layers(name, conv_caps),
            self.image_size,
            routing=rule,
            competition="window",
        )
        layers: list[RoutedLayer] = [*stack]
        children = types * places[0] * places[1]
        for parents in (*positive_all(name, "hidden_caps", hidden_caps), self.num_classes):
            layers.append(FullyConnectedCapsules(children, parents, pose, pose, routing=rule))
            children = parents
        self.layers = nn.ModuleList(layers)
        R, Q = pose_shape(pose)
        self.readout = nn.Linear(R * Q, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | Output:
        """Logits `[N, num_classes]` of images `[N, in_chans, H, W]`; with labels, `Output`."""
        capsules = self.capsules(x)
        poses = capsules.poses
        if capsules.activations is not None:
            poses = poses * capsules.activations[:, :, None, None]
        return answer(self.readout(poses.flatten(-2)).squeeze(-1), capsules, labels)

    def capsules(self, x: Tensor) -> Capsules:
        """The class capsules of images `[N, in_chans, H, W]`, poses `[N, num_classes, R, Q]`."""
        way_out = (
            "every place has weights of its own in the fully connected layers, so give in_chans and image_size as the "
            "images have them, or resize the images"
        )
        check_images(type(self).__name__, x, self.in_chans, size=self.image_size, way_out=way_out)
        primary: Capsules = self.primary(self.backbone(x))
        layers = cast("list[RoutedLayer]", list(self.layers))
        if self.order == "concurrent":
            return _at_once(layers, primary, self.iterations, self.skip_dead_rounds)
        for layer in layers:
            primary = layer(primary)
        return primary

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor:
        """The softmax of logits `[N, num_classes]`; `multi_label`: their sigmoid."""
        return probabilities(scores, self.scores, multi_label)


def _at_once(layers: Sequence[RoutedLayer], primary: Capsules, T: int, skip_dead_rounds: bool) -> Capsules:
    """Concurrent routing: the parents of the last layer after T rounds. Each layer's rule runs a single one."""
    n, below = len(layers), primary
    routed: list[Routed] = []
    for layer in layers:
        routed.append(layer.route(below))
        below = routed[-1].capsules
    for t in range(2, T + 1):
        lowest = max(0, n - 1 - (T - t)) if skip_dead_rounds else 0
        for l in reversed(range(lowest, n)):  # from above, so that each still finds its children of round t - 1
            children = routed[l - 1].capsules if l else primary
            routed[l] = layers[l].route(children, start=routed[l].state)
    return routed[-1].capsules


def _backbone(name: str, backbone: Backbone | nn.Module, in_chans: int, channels: int, width: int) -> nn.Module:
    if isinstance(backbone, nn.Module):
        return backbone
    channels = positive(name, "backbone_channels", channels)
    if backbone == "resnet":
        return ResNetFeatures(in_chans, (positive(name, "resnet_width", width), channels), (3, 4), (1, 2))
    if backbone == "simple":
        return nn.Sequential(nn.Conv2d(in_chans, channels, 3, 2, 1), nn.ReLU())
    raise ValueError(f"{name}: backbone={backbone!r}: take 'resnet', 'simple', or a torch.nn.Module that makes a map")
