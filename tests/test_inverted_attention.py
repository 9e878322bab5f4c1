"""Inverted attention: the authors' numbers, rounds that are dead, and all networks that the paper compares."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import golden
import numpy as np
import oracles
import pytest
import torch
from golden import Golden
from torch import Tensor, nn

from torchcaps import Capsules
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules
from torchcaps.models import (
    ActivatedAttention,
    InvertedAttentionCapsNet,
    ResNetFeatures,
    create_model,
)
from torchcaps.models.activated_attention import activated_attention
from torchcaps.routing import EM, Attention, Dynamic, Routed, Rule
from torchcaps.testing import assert_routing_contract

SMALL: dict[str, Any] = {
    "in_chans": 2, "num_classes": 3, "image_size": (13, 18), "backbone": "simple", "backbone_channels": 6,
    "primary_types": 3, "pose": (2, 2), "conv_caps": ((4, 3, 2), (3, 2, 1)), "hidden_caps": (5,),
}  # fmt: skip


def small(T: int = 2, **settings: Any) -> InvertedAttentionCapsNet:
    return InvertedAttentionCapsNet(**{**SMALL, "routing": Attention.tsai(T), **settings})


def images(N: int = 4, **kind: Any) -> Tensor:
    return torch.rand(N, 2, 13, 18, **kind)


def parameters(name: str, num_classes: int, in_chans: int, image_size: int, **settings: Any) -> int:
    with torch.device("meta"):
        model = create_model(name, num_classes, in_chans, image_size, **settings)
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The paper's networks

CIFAR100: dict[str, Any] = {"pose": (6, 6), "hidden_caps": (20,)}


@pytest.mark.parametrize(
    ("name", "num_classes", "settings", "count"),
    [
        ("inverted_attention_resnet", 10, {}, 1_828_817),
        ("inverted_attention_resnet", 100, CIFAR100, 2_799_629),
        ("inverted_attention_simple", 10, {}, 561_297),
        ("inverted_attention_simple", 100, {**CIFAR100, "backbone_channels": 128}, 1_462_989),
        ("capsnet", 10, {"decoder": False}, 7_992_576),
        ("capsnet", 100, {"decoder": False}, 31_585_536),
        ("capsnet_resnet", 10, {}, 12_451_136),
        ("capsnet_resnet", 100, {}, 36_044_096),
    ],
)
def test_the_networks_for_cifar_have_as_many_parameters_as_the_papers(
    name: str, num_classes: int, settings: dict[str, Any], count: int
) -> None:
    assert parameters(name, num_classes, 3, 32, **settings) == count


@pytest.mark.parametrize(("pose", "count"), [((8, 8), 9_963_969), (64, 42_478_017)])
def test_the_networks_for_two_digits_have_as_many_parameters_as_the_papers(pose: Any, count: int) -> None:
    assert parameters("inverted_attention_diverse", 10, 1, 36, pose=pose) == count


@pytest.mark.parametrize(("channels", "count"), [(128, 1_340_224), (256, 4_521_024)])
def test_the_resnet_backbone_has_as_many_parameters_as_the_papers(channels: int, count: int) -> None:
    with torch.device("meta"):
        model = InvertedAttentionCapsNet(backbone_channels=channels)
    assert sum(p.numel() for p in model.backbone.parameters()) == count


def test_ablations_change_the_parameters_they_name_and_no_others() -> None:
    def count(**settings: Any) -> int:
        return parameters("inverted_attention_resnet", 10, 3, 32, **settings)

    whole, norms = count(), 3 * 2 * 16
    assert count(order="sequential") == whole
    assert count(routing=Attention(norm=False)) == whole - norms
    assert count(routing=Attention(norm=False), primary_norm=False) == whole - norms - 2 * 16
    # an activation for each primary type, and two betas for each type above
    assert count(routing=ActivatedAttention()) == whole + 128 * 32 + 2 * (32 + 32 + 10)


def test_an_eighth_of_the_width_has_the_same_layers() -> None:
    with torch.device("meta"):
        model = create_model(
            "inverted_attention_diverse", 10, 1, 36, backbone_channels=128, primary_types=8, pose=16,
            conv_caps=((8, 3, 1),),
        )  # fmt: skip
        x = torch.empty(2, 1, 36, 36)
    assert model.backbone(x).shape == (2, 128, 18, 18)
    assert model.primary(model.backbone(x)).poses.shape == (2, 8, 8, 8, 1, 16)
    assert model.layers[1].in_caps == 8 * 6 * 6


@pytest.mark.parametrize(("backbone", "channels"), [("resnet", 128), ("simple", 256)])
def test_maps_and_capsules_have_the_papers_sizes(backbone: Any, channels: int) -> None:
    with torch.device("meta"):
        model = InvertedAttentionCapsNet(backbone=backbone, backbone_channels=channels)
        x = torch.empty(2, 3, 32, 32)
    features = model.backbone(x)
    assert features.shape == (2, channels, 16, 16)
    capsules = model.primary(features)
    sizes = [capsules.poses.shape]
    for layer in model.layers:
        capsules = layer(capsules)
        sizes.append(capsules.poses.shape)
    assert sizes == [(2, 32, 16, 16, 4, 4), (2, 32, 7, 7, 4, 4), (2, 32, 5, 5, 4, 4), (2, 10, 4, 4)]
    assert [type(layer) for layer in model.layers] == [ConvCapsules, ConvCapsules, FullyConnectedCapsules]
    assert model.layers[2].in_caps == 800


# ---------------------------------------------------------------------------------------------------------------------
# The authors' numbers


def from_the_authors(g: Golden, **settings: Any) -> tuple[InvertedAttentionCapsNet, list[tuple[nn.Parameter, Tensor]]]:
    """Their small network, and for each parameter the stored gradient."""
    model = InvertedAttentionCapsNet(
        3, 3, 20, backbone="simple", backbone_channels=6, primary_types=4, pose=(3, 3),
        conv_caps=((5, 3, 2), (4, 3, 1)), hidden_caps=(6,), **settings,
    ).double()  # fmt: skip

    def same(x: Tensor) -> Tensor:
        return x

    def matrix(x: Tensor) -> Tensor:
        return x.view(3, 3)

    def window(w: Tensor) -> Tensor:  # [row, column, type, p, q, j]
        return w.permute(2, 0, 1, 5, 3, 4).flatten(0, 2)

    def connected(w: Tensor) -> Tensor:  # [i, p, q, j]
        return w.permute(0, 3, 1, 2)

    theirs = {
        "backbone.0.weight": ("pre_caps.pre_caps.0.weight", same),
        "backbone.0.bias": ("pre_caps.pre_caps.0.bias", same),
        "primary.conv.weight": ("pc_layer.weight", same),
        "primary.norm.weight": ("nonlinear_act.weight", matrix),
        "primary.norm.bias": ("nonlinear_act.bias", matrix),
        "readout.weight": ("final_fc.weight", same),
        "readout.bias": ("final_fc.bias", same),
    }
    for index, order in enumerate((window, window, connected, connected)):
        theirs[f"layers.{index}.weight"] = (f"capsule_layers.{index}.w", order)
        for kind in ("weight", "bias"):
            theirs[f"layers.{index}.learned.norm_{kind}"] = (f"capsule_layers.{index}.nonlinear_act.{kind}", matrix)
    assert set(theirs) == set(dict(model.named_parameters()))
    assert {f"param.{name}" for name, _ in theirs.values()} == {key for key in g if key.startswith("param.")}
    gradients = []
    for key, parameter in model.named_parameters():
        name, order = theirs[key]
        parameter.data.copy_(order(g[f"param.{name}"]))
        gradients.append((parameter, order(g[f"grad.{name}"])))
    return model, gradients


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", golden.MODELS)
def test_the_network_makes_the_authors_logits_and_gradients(name: str, skip: bool) -> None:
    g = Golden(name)
    T = int(name.removesuffix("_fixed").split("_T")[1])
    order: Any = "sequential" if "_sequential_" in name else "concurrent"
    model, gradients = from_the_authors(g, routing=Attention.tsai(T), order=order, skip_dead_rounds=skip)
    image = g["image"].requires_grad_()
    logits, _, capsules = model(image, torch.zeros(2, dtype=torch.long))
    g.check("logits", logits)
    g.check(f"pose.L3.it{T}", capsules.poses.flatten(-2))
    (logits * g["cotangent"]).sum().backward()
    golden.close(image.grad, g["grad_image"], golden.GRADIENTS, "grad_image")
    for parameter, gradient in gradients:
        golden.close(parameter.grad, gradient, golden.GRADIENTS, "gradient")


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


class Diary:
    """Which layer ran, from what, and for how many rounds, in the order in which it happened."""

    def __init__(self, model: InvertedAttentionCapsNet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[int, bool, int]] = []
        for index, layer in enumerate(model.layers):
            monkeypatch.setattr(layer, "route", self.watched(index, layer))

    def watched(self, index: int, layer: Any) -> Any:
        route = layer.route

        def noted(capsules: Capsules, mask: Tensor | None = None, *, start: Any = None) -> Routed:
            self.entries.append((index, start is None, layer.routing.iterations))
            return route(capsules, mask, start=start)

        return noted


def test_with_two_rounds_only_the_class_capsules_are_ever_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = InvertedAttentionCapsNet()
        x = torch.empty(2, 3, 32, 32)
    diary = Diary(model, monkeypatch)
    model(x)
    uniform, routed = True, False
    assert diary.entries == [(0, uniform, 1), (1, uniform, 1), (2, uniform, 1), (2, routed, 1)]


@pytest.mark.parametrize(
    ("hidden_caps", "T", "needed"), [((), 1, 3), ((), 2, 4), ((), 3, 6), ((5,), 2, 5), ((5,), 4, 10), ((5,), 6, 18)]
)
def test_dead_rounds_are_not_run_unless_asked_for(
    hidden_caps: tuple[int, ...], T: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for skip in (True, False):
        model = small(T, hidden_caps=hidden_caps, skip_dead_rounds=skip)
        diary = Diary(model, monkeypatch)
        model(images())
        assert len(diary.entries) == (needed if skip else T * len(model.layers))


@pytest.mark.parametrize("T", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("routing", [Attention(), ActivatedAttention()], ids=["attention", "activated"])
def test_without_dead_rounds_logits_and_gradients_are_the_same_to_the_last_bit(routing: Rule, T: int) -> None:
    model, x = small(routing=replace(routing, iterations=T)), images().requires_grad_()  # type: ignore[type-var]
    results = []
    for skip in (True, False):
        model.skip_dead_rounds = skip
        logits = model(x)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), [x, *model.parameters()])))
    for skipped, run in zip(*results, strict=True):
        assert torch.equal(skipped, run)


@pytest.mark.parametrize("T", [1, 2, 3, 5])
def test_concurrent_routing_is_what_its_equations_say(T: int) -> None:
    model = small(T).double()
    x = images(dtype=torch.float64)
    primary = model.primary(model.backbone(x))
    p: dict[tuple[int, int], Routed | None] = {}

    def children(l: int, t: int) -> Capsules:
        return primary if l == 0 else p[l, t].capsules  # type: ignore[union-attr]

    n = len(model.layers)
    for l in range(1, n + 1):
        p[l, 1] = model.layers[l - 1].route(children(l - 1, 1))
    for t in range(2, T + 1):
        for l in range(1, n + 1):
            p[l, t] = model.layers[l - 1].route(children(l - 1, t - 1), start=p[l, t - 1].state)  # type: ignore[union-attr]
    poses = children(n, T).poses
    expected = poses.flatten(2) @ model.readout.weight[0] + model.readout.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)


def test_sequential_routing_ends_a_layer_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(3, order="sequential")
    diary = Diary(model, monkeypatch)
    model(images())
    assert diary.entries == [(l, True, 3) for l in range(4)]


def test_the_orders_agree_for_one_round_and_for_no_more() -> None:
    x = images()
    for T in (1, 2, 3):
        one, other = small(T), small(T, order="sequential")
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(x), other(x)) == (T == 1)


@pytest.mark.parametrize("order", ["concurrent", "sequential"])
def test_each_further_round_gives_other_scores(order: Any) -> None:
    x, first = images(), small(1, order=order)
    seen = [first(x)]
    for T in (2, 3, 4):
        model = small(T, order=order)
        model.load_state_dict(first.state_dict())
        seen.append(model(x))
        assert not any(torch.allclose(seen[-1], before, rtol=1e-6) for before in seen[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# Its parts


def test_logits_are_one_linear_map_alike_for_all_classes() -> None:
    model = small()
    logits, _, capsules = model(images(), torch.zeros(4, dtype=torch.long))
    assert model.readout.weight.shape == (1, 4)
    for k in range(3):
        torch.testing.assert_close(logits[:, k], model.readout(capsules.poses[:, k].flatten(1))[:, 0])


def test_primary_capsules_are_normalised_channels_of_a_convolution_without_bias() -> None:
    model, x = small(), images()
    features = model.backbone(x)
    conv = model.primary.conv
    assert conv.bias is None
    channels = nn.functional.conv2d(features, conv.weight)
    for c in range(3):  # a pose is four channels in a row
        pose = nn.functional.layer_norm(channels[:, 4 * c : 4 * c + 4].movedim(1, -1), (4,))
        torch.testing.assert_close(model.primary(features).poses[:, c].flatten(-2), pose)


def test_a_capsule_moves_with_its_image_and_its_pose_does_not_change() -> None:
    # were positions and the entries of poses mixed, a shift of the map would change poses
    layer = small().layers[0].double()
    poses = torch.randn(2, 3, 9, 9, 2, 2, dtype=torch.float64)
    parents = layer(Capsules(poses)).poses
    moved = layer(Capsules(poses.roll((2, 4), (2, 3)))).poses
    torch.testing.assert_close(moved[:, :, 1:, 2:], parents[:, :, :-1, :-2], rtol=1e-12, atol=1e-12)


def test_poses_may_be_vectors() -> None:
    model = small(pose=5)
    assert model(images()).shape == (4, 3)
    assert model.capsules(images()).poses.shape == (4, 3, 1, 5)
    assert model.layers[0].weight.shape == (3 * 9, 4, 5, 5)


class Pyramid(nn.Module):
    """A backbone of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


def test_the_backbone_may_be_any_module_that_makes_a_map() -> None:
    backbone = Pyramid()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    model = small(backbone=backbone)
    assert model.backbone is backbone
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    assert model.primary.conv.in_channels == 5
    assert model(images()).shape == (4, 3)


class LastMap(nn.Module):
    """The last of a list of maps."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)[-1]


def test_a_timm_model_can_be_the_backbone() -> None:
    import timm

    features = timm.create_model("resnet10t", features_only=True, out_indices=(0, 1), in_chans=2)
    model = small(backbone=LastMap(features), image_size=40)
    model(torch.rand(2, 2, 40, 40)).sum().backward()
    assert all(p.grad is not None for p in features.parameters())


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (nn.Flatten(), r"the backbone must make a map \[N, channels, height, width\] of an image, not \[1, 468\]"),
        (nn.Conv2d(3, 4, 1), r"the backbone does not take an image \[1, 2, 13, 18\]"),
        (nn.LazyConv2d(4, 1), "the backbone has parameters without a size: show it an image before"),
        ("vgg", "backbone='vgg': take 'resnet', 'simple', or a torch.nn.Module"),
    ],
)
def test_a_backbone_that_makes_no_map_is_a_clear_error(backbone: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(backbone=backbone)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "parallel"}, "order='parallel': take 'concurrent' or 'sequential'"),
        ({"routing": "attention"}, "routing must be a rule with iterations such as Attention.tsai"),
        ({"conv_caps": ((4, 3),)}, r"conv_caps=\(\(4, 3\),\) must hold \(types, kernel size, stride\)"),
        ({"conv_caps": ((4, 0, 1),)}, "every size of conv_caps must be a whole number of 1 or more, not 0"),
        ({"conv_caps": (4, 3, 1)}, "conv_caps must be a tuple of whole numbers, not 4"),
        ({"hidden_caps": (0,)}, "every size of hidden_caps must be a whole number of 1 or more"),
        ({"backbone_channels": 0}, "backbone_channels must be a whole number of 1 or more"),
        ({"backbone": "resnet", "resnet_width": 0}, "resnet_width must be a whole number of 1 or more"),
        ({"primary_kernel_size": 8}, "kernel of 8 x 8 of the primary capsules does not fit the map of 7 x 9 that"),
        (
            {"conv_caps": ((4, 3, 2), (4, 4, 1))},
            "kernel of 4 x 4 of layer 2 of conv_caps does not fit the map of 3 x 4",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**settings)


@pytest.mark.parametrize(
    ("routing", "order"),
    [
        (Attention.tsai(3), "concurrent"), (Attention.tsai(3), "sequential"), (Attention(3, norm=False), "concurrent"),
        (ActivatedAttention(3), "concurrent"), (Dynamic.su(), "concurrent"), (EM.hinton(), "concurrent"),
    ],
    ids=["attention", "B", "A", "C", "dynamic", "em"],
)  # fmt: skip
def test_it_learns_a_few_images_by_heart_under_any_rule(routing: Rule, order: Any) -> None:
    model = small(routing=routing, order=order, pose=(4, 4), conv_caps=((6, 3, 2), (6, 2, 1)), hidden_caps=())
    x, labels = images(6), torch.arange(6) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), labels)


def test_a_stored_network_is_one_of_the_other_order_and_of_any_number_of_rounds_too() -> None:
    state = small(2).state_dict()
    for other in (small(5), small(2, order="sequential"), small(2, skip_dead_rounds=False)):
        other.load_state_dict(state)


def test_settings_may_come_from_a_file() -> None:
    written = json.loads(json.dumps({key: SMALL[key] for key in ("image_size", "conv_caps", "hidden_caps")}))
    model = small(**written)
    assert model(images()).shape == (4, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Ablation C


def test_the_rule_with_activations_keeps_the_contract() -> None:
    # with the paper's eps the LayerNorm of a nearly constant sum is too steep for finite differences
    assert_routing_contract(ActivatedAttention(eps=1e-3))


def activated_by_loops(
    poses: np.ndarray, weight: np.ndarray, active: np.ndarray, rounds: int, rule: ActivatedAttention,
    gain: np.ndarray, shift: np.ndarray, beta_a: np.ndarray, beta_u: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The equations with a loop for every letter."""
    votes = oracles.votes(poses, weight)
    N, I, J, R, Q = votes.shape
    p: Sequence[Any] | None = None
    parents, activations = np.zeros((N, J, R, Q)), np.zeros((N, J))
    for n in range(N):
        p = None
        for _ in range(rounds):
            share = np.zeros((I, J))
            for i in range(I):
                agree = [0.0 if p is None else float((votes[n, i, j] * p[j]).sum()) / (R * Q) ** 0.5 for j in range(J)]
                total = sum(np.exp(a) for a in agree)
                for j in range(J):
                    share[i, j] = np.exp(agree[j]) / total * active[n, i]
            new = []
            for j in range(J):
                s = sum(share[i, j] * votes[n, i, j] for i in range(I))
                new.append((s - s.mean()) / (s.var() + rule.eps) ** 0.5 * gain + shift)
            p = new
        parents[n] = p
        for j in range(J):
            mass = sum(share[i, j] for i in range(I))
            mean = sum(share[i, j] * votes[n, i, j] for i in range(I)) / mass
            spread = sum(share[i, j] * (votes[n, i, j] - mean) ** 2 for i in range(I)) / mass + rule.min_variance
            cost = sum((beta_u[j] + 0.5 * np.log(v)) * mass for v in spread.flatten())
            activations[n, j] = 1 / (1 + np.exp(-rule.inverse_temperature * (beta_a[j] - cost)))
    return parents, activations


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_rule_with_activations_does_what_its_equations_say(rounds: int) -> None:
    kind: dict[str, Any] = {"dtype": torch.float64}
    poses, weight, active = torch.randn(2, 5, 2, 3, **kind), torch.randn(5, 4, 3, 2, **kind), torch.rand(2, 5, **kind)
    gain, shift = torch.randn(2, 2, **kind), torch.randn(2, 2, **kind)
    beta_a, beta_u = torch.randn(4, **kind), torch.randn(4, **kind)
    rule = ActivatedAttention(rounds, inverse_temperature=0.2)
    routed = rule(
        poses, weight, active, norm_weight=gain, norm_bias=shift, beta_a=beta_a, beta_u=beta_u, return_coupling=True
    )
    arrays = [x.numpy() for x in (poses, weight, active, gain, shift, beta_a, beta_u)]
    parents, activations = activated_by_loops(*arrays[:3], rounds, rule, *arrays[3:])
    np.testing.assert_allclose(routed.poses.numpy(), parents, rtol=1e-9)
    np.testing.assert_allclose(routed.activations.numpy(), activations, rtol=1e-9)


def test_the_rule_with_activations_says_what_it_cannot_do() -> None:
    poses, weight = torch.rand(2, 5, 2, 3), torch.rand(5, 4, 3, 2)
    with pytest.raises(ValueError, match="weighs each child by its activation"):
        activated_attention(poses, weight)
    with pytest.raises(ValueError, match="backend 'streamed' does not know activated attention"):
        activated_attention(poses, weight, torch.rand(2, 5), backend="streamed")


def test_activations_reach_the_logits() -> None:
    model = small(routing=ActivatedAttention())
    logits, _, capsules = model(images(), torch.zeros(4, dtype=torch.long))
    seen = capsules.poses * capsules.activations[..., None, None]
    torch.testing.assert_close(logits, model.readout(seen.flatten(2))[..., 0])


def test_a_resnet_of_another_width_is_the_backbone_that_was_asked_for() -> None:
    model = small(backbone="resnet", resnet_width=4)
    assert isinstance(model.backbone, ResNetFeatures)
    assert model.backbone(images()).shape == (4, 6, 7, 9)
