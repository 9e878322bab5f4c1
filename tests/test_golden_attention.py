"""Golden vectors of inverted dot-product attention routing: layers, single rounds, and whole models in both orders.

Fully connected layers are one call of `attention`. A convolution is the same call on windows cut here, by hand, with
the children of a window in the order type, kernel row, kernel column; the layer that cuts them itself is tried against
the same files. The models are driven one round at a time through `start=`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import golden
import oracles
import pytest
import torch
from golden import Golden
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm

from torchcaps import Capsules
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules, PrimaryCapsules
from torchcaps.routing import Attention, Routed, attention

KERNEL = 3


def as_matrix(flat: Tensor) -> Tensor:
    """Poses of D numbers as poses of sqrt(D) rows."""
    side = round(flat.shape[-1] ** 0.5)
    return flat.unflatten(-1, (side, side))


def as_vector(flat: Tensor) -> Tensor:
    """Poses of D numbers as poses of one row."""
    return flat.unsqueeze(-2)


def same(tensor: Tensor) -> Tensor:
    """What needs no other layout."""
    return tensor


def fully_connected_weight(w: Tensor, matrix: bool) -> Tensor:
    """[i, p, q, j] of a matrix file, [i, p, j, q] of a vector file, as [i, j, p, q]."""
    return w.permute(0, 3, 1, 2) if matrix else w.transpose(1, 2)


def window_weight(w: Tensor, matrix: bool) -> Tensor:
    """[row, column, type, p, q, j] or [row, column, type, p, j, q] as [(type, row, column), j, p, q]."""
    w = w.permute(2, 0, 1, 5, 3, 4) if matrix else w.permute(2, 0, 1, 4, 3, 5)
    return w.flatten(0, 2)


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, type, height, width, D] as [(B, up, left), (type, row, column), D], a window wherever the kernel fits."""
    cut = x.unfold(2, KERNEL, stride).unfold(3, KERNEL, stride)  # [B, type, up, left, D, row, column]
    return cut.permute(0, 2, 3, 1, 5, 6, 4).flatten(3, 5).flatten(0, 2)


def from_windows(poses: Tensor, batch: int, height: int, width: int) -> Tensor:
    """[(B, up, left), j, R, Q] as [B, j, up, left, D]."""
    return poses.flatten(-2).unflatten(0, (batch, height, width)).permute(0, 3, 1, 2, 4)


def to_windows(parents: Tensor) -> Tensor:
    """[B, j, up, left, D] as [(B, up, left), j, D]."""
    return parents.permute(0, 2, 3, 1, 4).flatten(0, 2)


def window_coupling(stored: Tensor) -> Tensor:
    """[B, type, row, column, j, up, left] as [(B, up, left), (type, row, column), j]."""
    return stored.permute(0, 5, 6, 1, 2, 3, 4).flatten(3, 5).flatten(0, 2)


class Layer:
    """One layer file: how its arrays become the arguments of `attention`, and back."""

    def __init__(self, name: str) -> None:
        self.golden = g = Golden(name)
        self.matrix = "_matrix_" in name
        self.convolution = "conv_" in name
        self.step = "_step" in name
        self.stride = 2 if "_s2_" in name else 1
        self.pose: Callable[[Tensor], Tensor] = as_matrix if self.matrix else as_vector
        self.rounds = 1 if self.step else sum(key.startswith("pose_it") for key in g)
        x, w = g.leaf("x"), g.leaf("w")
        self.weight = window_weight(w, self.matrix) if self.convolution else fully_connected_weight(w, self.matrix)
        self.poses = self.pose(windows(x, self.stride) if self.convolution else x)
        self.learned: dict[str, Tensor] = {}
        if "grad_ln_weight" in g:
            self.learned = {"norm_weight": g.leaf("ln_weight"), "norm_bias": g.leaf("ln_bias")}
        self.start: Tensor | None = None
        if self.step:
            parent = g.leaf("parent_in")
            self.start = self.pose(to_windows(parent) if self.convolution else parent)

    def call(self, **settings: Any) -> Routed:
        return attention(self.poses, self.weight, **settings, **self.learned)

    def as_stored(self, poses: Tensor) -> Tensor:
        batch, height, width = (self.golden["out"].shape[k] for k in (0, -3, -2))
        return from_windows(poses, batch, height, width) if self.convolution else poses.flatten(-2)

    def coupling(self, key: str) -> Tensor:
        """A stored coefficient or agreement in the library's order."""
        stored = self.golden[key]
        if not self.convolution:
            return stored.expand(len(self.poses), -1, -1)
        if stored.dim() == 4:  # the first round's are the same everywhere
            return stored.flatten(0, 2).expand(len(self.poses), -1, -1)
        return window_coupling(stored)


LAYERS = golden.FULLY_CONNECTED + golden.CONVOLUTIONS


@pytest.mark.parametrize("name", LAYERS)
def test_attention_makes_the_authors_poses_and_gradients(name: str) -> None:
    layer = Layer(name)
    routed = layer.call(iterations=layer.rounds, start=layer.start)
    out = layer.as_stored(routed.poses)
    layer.golden.check("out", out)
    layer.golden.check("S", (out * layer.golden["cotangent"]).sum())
    layer.golden.check_gradients((out, "cotangent"))


@pytest.mark.parametrize("name", LAYERS)
def test_every_round_has_the_authors_coefficients(name: str) -> None:
    layer = Layer(name)
    coupling = layer.call(iterations=layer.rounds, start=layer.start, return_coupling="all").coupling
    assert coupling is not None
    assert len(coupling) == layer.rounds
    last = layer.call(iterations=layer.rounds, start=layer.start, return_coupling=True).coupling
    torch.testing.assert_close(last, coupling[-1], rtol=0.0, atol=0.0)
    for t in range(layer.rounds):
        suffix = "" if layer.step else f"_it{t + 1}"
        golden.close(coupling[t], layer.coupling(f"coef{suffix}"), golden.VALUES, f"coef{suffix}")
        if f"agree_scaled{suffix}" in layer.golden:  # a softmax keeps its logits but for one number per child
            agree = layer.coupling(f"agree_scaled{suffix}")
            centred = coupling[t].log() - coupling[t].log().mean(-1, keepdim=True)
            golden.close(centred, agree - agree.mean(-1, keepdim=True), golden.VALUES, f"agree_scaled{suffix}")


@pytest.mark.parametrize("name", [name for name in LAYERS if "_step" not in name])
def test_each_count_of_rounds_and_each_single_round_through_the_state_has_the_authors_poses(name: str) -> None:
    layer = Layer(name)
    state = None
    for t in range(layer.rounds):
        at_once = layer.call(iterations=t + 1)
        layer.golden.check(f"pose_it{t + 1}", layer.as_stored(at_once.poses))
        one_more = layer.call(iterations=1, start=state)
        layer.golden.check(f"pose_it{t + 1}", layer.as_stored(one_more.poses))
        state = one_more.state


@pytest.mark.parametrize("name", golden.FULLY_CONNECTED)
def test_the_frozen_rule_and_an_explicit_scale_make_the_authors_poses_too(name: str) -> None:
    layer = Layer(name)
    rule = Attention(iterations=layer.rounds, scale=layer.golden.number("scale"))
    routed = rule(layer.poses, layer.weight, start=layer.start, **layer.learned)
    layer.golden.check("out", layer.as_stored(routed.poses))


@pytest.mark.parametrize("name", [name for name in LAYERS if "_s1_" not in name])  # the loops are slow
def test_the_oracle_makes_the_authors_poses_and_coefficients_too(name: str) -> None:
    layer = Layer(name)
    arrays = {"poses": layer.poses, "weight": layer.weight, **layer.learned}
    if layer.start is not None:
        arrays["start"] = layer.start
    routed = oracles.attention(
        **{key: value.detach().numpy() for key, value in arrays.items()}, iterations=layer.rounds
    )
    layer.golden.check("out", layer.as_stored(torch.from_numpy(routed.poses)))
    last = "coef" if layer.step else f"coef_it{layer.rounds}"
    golden.close(torch.from_numpy(routed.coupling[-1]), layer.coupling(last), golden.VALUES, last)


def test_rows_and_columns_that_no_window_reaches_get_no_gradient() -> None:
    layer = Layer("inverted-attention/conv_matrix_s2_it2_fixed")
    out = layer.as_stored(layer.call(iterations=2).poses)
    (gradient,) = torch.autograd.grad((out * layer.golden["cotangent"]).sum(), layer.golden.leaf("x"))
    assert gradient[:, :, :, :7].abs().amin() > 0
    assert not gradient[:, :, :, 7].any()


class Network:
    """The authors' small network: two layers of convolution and two fully connected ones, matrix poses of 3 x 3."""

    def __init__(self, g: Golden) -> None:
        self.g = g

    def parameter(self, name: str) -> Tensor:
        return self.g.leaf(f"param.{name}")

    def primary(self) -> Tensor:
        image = self.g.leaf("image")
        weight, bias = self.parameter("pre_caps.pre_caps.0.weight"), self.parameter("pre_caps.pre_caps.0.bias")
        features = conv2d(image, weight, bias, stride=2, padding=1).relu()
        self.g.check("features", features)
        channels = conv2d(features, self.parameter("pc_layer.weight"))
        self.g.check("primary_conv", channels)
        poses = channels.unflatten(1, (4, 9)).movedim(2, -1)  # a capsule is nine consecutive channels at one place
        gain, bias = self.parameter("nonlinear_act.weight"), self.parameter("nonlinear_act.bias")
        poses = layer_norm(poses, [9], gain, bias)
        self.g.check("primary", poses)
        return poses

    def round(self, layer: int, children: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor]:
        """One round of one layer on stored-order poses: the new parents, and its coupling in the stored order."""
        w = self.parameter(f"capsule_layers.{layer}.w")
        learned = {
            f"norm_{kind}": self.parameter(f"capsule_layers.{layer}.nonlinear_act.{kind}")
            for kind in ("weight", "bias")
        }
        settings: dict[str, Any] = {"iterations": 1, "return_coupling": True, **learned}
        if layer >= 2:
            flat = children.flatten(1, -2)
            start = None if parents is None else as_matrix(parents)
            routed = attention(as_matrix(flat), fully_connected_weight(w, matrix=True), start=start, **settings)
            assert routed.coupling is not None
            return routed.poses.flatten(-2), routed.coupling
        stride = (2, 1)[layer]
        batch, types, height, width, _ = children.shape
        up, left = (height - KERNEL) // stride + 1, (width - KERNEL) // stride + 1
        start = None if parents is None else as_matrix(to_windows(parents))
        routed = attention(as_matrix(windows(children, stride)), window_weight(w, matrix=True), start=start, **settings)
        assert routed.coupling is not None
        coupling = routed.coupling.unflatten(0, (batch, up, left)).unflatten(3, (types, KERNEL, KERNEL))
        return from_windows(routed.poses, batch, up, left), coupling.permute(0, 3, 4, 5, 6, 1, 2)

    def logits(self, poses: Tensor) -> Tensor:
        return (poses @ self.parameter("final_fc.weight").squeeze(0)) + self.parameter("final_fc.bias")


def rounds_of(name: str) -> int:
    """T of a model's file name."""
    return int(name.removesuffix("_fixed").split("_T")[1])


def schedule(g: Golden, name: str) -> Iterator[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """(layer, round, where its children are, where its old parents are) in the authors' order; layer -1 is primary."""
    T = rounds_of(name)
    for step in g.arrays["order"]:
        layer, t = int(step[1]), int(step[4:])
        below = T if "_sequential_" in name else max(t - 1, 1)
        yield layer, t, (layer - 1, below), (layer, t - 1)


@pytest.mark.parametrize("name", golden.MODELS)
def test_a_network_driven_one_round_at_a_time_makes_the_authors_logits_poses_and_gradients(name: str) -> None:
    g = Golden(name)
    network, T = Network(g), rounds_of(name)
    primary = network.primary()
    poses = {(-1, t): primary for t in range(1, T + 1)}
    for layer, t, below, before in schedule(g, name):
        poses[layer, t], coupling = network.round(layer, poses[below], poses.get(before))
        g.check(f"pose.L{layer}.it{t}", poses[layer, t])
        if t >= 2:
            g.check(f"coef.L{layer}.it{t}", coupling)
    assert len(poses) == 5 * T
    logits = network.logits(poses[3, T])
    g.check("logits", logits)
    g.check("S", (logits * g["cotangent"]).sum())
    g.check_gradients((logits, "cotangent"))


# ---------------------------------------------------------------------------------------------------------------------
# The same through the layers, which cut their windows and keep their weights themselves


def build(
    w: Tensor, stride: int | None, matrix: bool, rounds: int, gain: Tensor | None = None, bias: Tensor | None = None
) -> ConvCapsules | FullyConnectedCapsules:
    """A layer in float64 with a file's weight, gain and bias; without a stride it is a fully connected one."""
    layout = fully_connected_weight if stride is None else window_weight
    weight = layout(w, matrix)
    children, parents, P, Q = weight.shape
    rows = P if matrix else 1
    rule = Attention(rounds)
    layer: ConvCapsules | FullyConnectedCapsules
    if stride is None:
        layer = FullyConnectedCapsules(children, parents, (rows, P), (rows, Q), routing=rule)
    else:
        types = children // KERNEL**2
        layer = ConvCapsules(types, parents, (rows, P), (rows, Q), KERNEL, stride, routing=rule)
    layer.double()
    layer.weight.data.copy_(weight)
    for name, value in (("norm_weight", gain), ("norm_bias", bias)):
        if value is not None:
            layer.learned[name].data.copy_(value.view(rows, Q))
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_itself_makes_the_authors_poses_coefficients_and_gradients(name: str) -> None:
    case = Layer(name)
    g = case.golden
    layout = window_weight if case.convolution else fully_connected_weight
    names = {"weight": layout(g["grad_w"], case.matrix)}
    gains: list[Tensor] = []
    if case.learned:
        gains = [g["ln_weight"], g["ln_bias"]]
        names |= {f"learned.norm_{kind}": case.pose(g[f"grad_ln_{kind}"]) for kind in ("weight", "bias")}
    layer = build(g["w"], case.stride if case.convolution else None, case.matrix, case.rounds, *gains)
    assert set(dict(layer.named_parameters())) == set(names)
    start = None if case.start is None else case.start.detach().requires_grad_()
    x = g["x"].requires_grad_()
    routed = layer.route(Capsules(case.pose(x)), start=start, return_coupling=True)
    out = routed.poses.flatten(-2)
    g.check("out", out)
    assert torch.equal(layer(Capsules(case.pose(x))).poses.flatten(-2), out) or start is not None
    assert routed.coupling is not None
    last = "coef" if case.step else f"coef_it{case.rounds}"
    golden.close(routed.coupling, case.coupling(last), golden.VALUES, last)
    (out * g["cotangent"]).sum().backward()
    golden.close(x.grad, g["grad_x"], golden.GRADIENTS, "grad_x")
    if start is not None:
        parent = g["grad_parent_in"]
        parent = case.pose(to_windows(parent) if case.convolution else parent)
        golden.close(start.grad, parent, golden.GRADIENTS, "grad_parent_in")
    for key, gradient in names.items():
        golden.close(layer.get_parameter(key).grad, gradient, golden.GRADIENTS, key)


@pytest.mark.parametrize("name", golden.MODELS)
def test_a_network_of_layers_makes_the_authors_logits_poses_and_gradients_in_either_order(name: str) -> None:
    g, T = Golden(name), rounds_of(name)
    stem = torch.nn.Conv2d(3, 6, 3, stride=2, padding=1).double()
    primary = PrimaryCapsules(6, 4, (3, 3), norm=True, squash="identity", bias=False).double()
    learned: dict[str, tuple[torch.nn.Parameter, Callable[[Tensor], Tensor]]] = {
        "pre_caps.pre_caps.0.weight": (stem.weight, same),
        "pre_caps.pre_caps.0.bias": (stem.bias, same),
        "pc_layer.weight": (primary.get_parameter("conv.weight"), same),
        "nonlinear_act.weight": (primary.get_parameter("norm.weight"), as_matrix),
        "nonlinear_act.bias": (primary.get_parameter("norm.bias"), as_matrix),
    }
    layers: list[ConvCapsules | FullyConnectedCapsules] = []
    for index, stride in enumerate((2, 1, None, None)):
        key = f"capsule_layers.{index}"
        w = g[f"param.{key}.w"]
        layers.append(build(w, stride, True, 1))
        order = fully_connected_weight if stride is None else window_weight
        learned[f"{key}.w"] = (layers[-1].weight, partial(order, matrix=True))
        for kind in ("weight", "bias"):
            learned[f"{key}.nonlinear_act.{kind}"] = (layers[-1].get_parameter(f"learned.norm_{kind}"), as_matrix)
    last = torch.nn.Linear(9, 1).double()
    learned |= {"final_fc.weight": (last.weight, same), "final_fc.bias": (last.bias, same)}
    assert {f"param.{key}" for key in learned} == {key for key in g if key.startswith("param.")}
    for key, (parameter, layout) in learned.items():
        parameter.data.copy_(layout(g[f"param.{key}"]))
    image = g["image"].requires_grad_()
    first = primary(stem(image).relu())
    g.check("primary", first.poses.flatten(-2))

    capsules = {(-1, t): first for t in range(1, T + 1)}
    states: dict[tuple[int, int], Any] = {}
    for layer, t, below, before in schedule(g, name):
        routed = layers[layer].route(capsules[below], start=states.get(before))
        capsules[layer, t], states[layer, t] = routed.capsules, routed.state
        g.check(f"pose.L{layer}.it{t}", routed.poses.flatten(-2))
    logits = last(capsules[3, T].poses.flatten(-2)).squeeze(-1)
    g.check("logits", logits)
    (logits * g["cotangent"]).sum().backward()
    golden.close(image.grad, g["grad_image"], golden.GRADIENTS, "grad_image")
    for key, (parameter, layout) in learned.items():
        golden.close(parameter.grad, layout(g[f"grad.{key}"]), golden.GRADIENTS, key)


@pytest.mark.parametrize("name", [name for name in golden.MODELS if "_sequential_" in name])
def test_in_the_sequential_order_a_layer_may_run_all_its_rounds_at_once(name: str) -> None:
    g, T = Golden(name), rounds_of(name)
    capsules = Capsules(as_matrix(g["primary"]))
    for index, stride in enumerate((2, 1, None, None)):
        key = f"param.capsule_layers.{index}"
        gain, bias = g[f"{key}.nonlinear_act.weight"], g[f"{key}.nonlinear_act.bias"]
        layer = build(g[f"{key}.w"], stride, True, T, gain, bias)
        capsules = layer(capsules)
        g.check(f"pose.L{index}.it{T}", capsules.poses.flatten(-2))
    logits = capsules.poses.flatten(-2) @ g["param.final_fc.weight"].squeeze(0) + g["param.final_fc.bias"]
    g.check("logits", logits)
