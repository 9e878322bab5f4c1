"""The layers: weights, the door, sizes, masks, places, and what every torch module must be able to do.

What convolutional capsules add stands in test_conv_layers.py, how deep stacks start in test_stacking.py.
"""

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchcaps import Capsules
from torchcaps.layers import (
    ClassIndependentDecoder,
    ConvCapsules,
    ConvDecoder,
    FullyConnectedCapsules,
    MaskedDecoder,
    PrimaryCapsules,
    SharedCapsules,
    coordinate_offset,
)
from torchcaps.routing import EM, Attention, Dynamic, Rule
from torchcaps.types import CapsuleLayer

RULES: dict[str, Rule] = {
    "dynamic": Dynamic.sabour(),
    "dynamic that learns": Dynamic(learn_prior=True, learn_bias=True),
    "dynamic over children": Dynamic.hauser(),
    "attention": Attention.tsai(),
    "em": EM.hinton(),
}
Layer = FullyConnectedCapsules | SharedCapsules | ConvCapsules

# All take a map of 3 types at 4 x 5 places, poses of 2 x 4, to parents of 2 x 6.
IN, OUT, TYPES, SPATIAL = (2, 4), (2, 6), 3, (4, 5)
LAYERS: dict[str, Callable[[Rule], Layer]] = {
    "fully connected": lambda rule: FullyConnectedCapsules(60, 5, IN, OUT, routing=rule),
    "inferred": lambda rule: FullyConnectedCapsules(None, 5, IN, OUT, routing=rule),
    "with places": lambda rule: FullyConnectedCapsules(60, 5, IN, OUT, routing=rule, coordinates=True),
    "shared": lambda rule: SharedCapsules(5, IN, OUT, routing=rule, typical_caps=60),
    "shared by type": lambda rule: SharedCapsules(5, IN, OUT, routing=rule, in_types=3, coordinates=True),
    "convolution": lambda rule: ConvCapsules(3, 5, IN, OUT, (3, 2), (1, 2), routing=rule),
    "padded convolution": lambda rule: ConvCapsules(3, 5, IN, OUT, 3, 2, 1, routing=rule),
}


def a_map(batch: int = 2, dtype: torch.dtype = torch.float32, spatial: tuple[int, ...] = SPATIAL) -> Capsules:
    """Random capsules for the layers above, with activations in 0..1."""
    places = (batch, TYPES, *spatial)
    return Capsules(torch.randn(*places, *IN, dtype=dtype), torch.rand(places, dtype=dtype))


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.fixture(params=LAYERS)
def make(request: pytest.FixtureRequest) -> Callable[[Rule], Layer]:
    return LAYERS[request.param]


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


# ---------------------------------------------------------------------------------------------------------------------
# One layer, one call of the rule


def shaken(layer: Layer) -> Layer:
    """In float64, with generic numbers in what the rule learns, so that none of it goes unnoticed."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.learned.values():
            parameter.add_(torch.rand_like(parameter))
    return layer


def test_a_fully_connected_layer_is_one_call_of_its_rule_on_the_flattened_map(rule: Rule) -> None:
    layer, children = shaken(FullyConnectedCapsules(60, 5, IN, OUT, routing=rule)), a_map(dtype=torch.float64)
    flat = children.poses.reshape(2, 60, *IN)
    expected = rule(flat, layer.weight, children.activations.reshape(2, 60), return_coupling="all", **layer.learned)
    routed = layer.route(children, return_coupling="all")
    assert torch.equal(routed.poses, expected.poses)
    assert torch.equal(routed.coupling, expected.coupling)
    out = layer(children)
    assert torch.equal(out.poses, expected.poses)
    assert out.activations is expected.activations or torch.equal(out.activations, expected.activations)
    assert torch.equal(layer(children.flatten()).poses, expected.poses)


def test_a_shared_layer_is_a_fully_connected_one_whose_weights_are_all_the_same(rule: Rule) -> None:
    layer, children = shaken(SharedCapsules(5, IN, OUT, routing=rule)), a_map(dtype=torch.float64).flatten()
    full = FullyConnectedCapsules(60, 5, IN, OUT, routing=rule).double()
    with torch.no_grad():
        for theirs, ours in zip(full.parameters(), layer.parameters(), strict=True):
            theirs.copy_(ours)  # broadcasts a weight and a prior over the children
    close(layer(children).poses, full(children).poses)


def test_a_layer_shared_by_type_has_the_weight_of_the_type_at_every_place(rule: Rule) -> None:
    layer, children = shaken(SharedCapsules(5, IN, OUT, routing=rule, in_types=3)), a_map(dtype=torch.float64)
    full = FullyConnectedCapsules(60, 5, IN, OUT, routing=rule).double()
    assert layer.weight.shape == (3, 5, 4, 6)
    with torch.no_grad():
        for theirs, ours in zip(full.parameters(), layer.parameters(), strict=True):
            if len(theirs) == 60:
                for child in range(60):
                    theirs[child] = ours[child // 20]
            else:
                theirs.copy_(ours)
    close(layer(children).poses, full(children).poses)


def test_rounds_go_on_from_the_state_of_an_earlier_call(make: Callable[[Rule], Layer]) -> None:
    one, two = shaken(make(Dynamic(iterations=1))), shaken(make(Dynamic(iterations=2)))
    children = a_map(dtype=torch.float64)
    one(children), two(children)
    two.load_state_dict(one.state_dict())
    routed = one.route(children)
    close(one.route(children, start=routed.state).poses, two.route(children).poses)


def test_every_layer_is_recognised_from_outside_and_routes(make: Callable[[Rule], Layer]) -> None:
    layer = make(Dynamic())
    assert isinstance(layer, CapsuleLayer)
    assert (layer.out_caps, layer.out_pose) == (5, OUT)
    routed = layer.route(a_map(), return_coupling=True)
    assert routed.poses.shape[1] == 5
    assert routed.poses.shape[-2:] == OUT
    assert routed.coupling.shape[-1] == 5
    assert "out_caps=5" in repr(layer)


def test_a_named_backend_reaches_the_rule(make: Callable[[Rule], Layer]) -> None:
    layer, children = make(Dynamic()), a_map()
    assert torch.allclose(layer.route(children, backend="reference").poses, layer(children).poses, atol=1e-5)
    with pytest.raises(ValueError, match="backend 'abacus' is not there"):
        layer.route(children, backend="abacus")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (FullyConnectedCapsules(1152, 10, 8, 16, routing=Dynamic()), 1_474_560),  # Sabour 2017
        (SharedCapsules(10, 128, 16, routing=Dynamic.su()), 20_480),  # Su 2018
        (ConvCapsules(32, 32, (4, 4), (4, 4), 3, 2, routing=Attention(norm=False)), 147_456),  # Tsai 2020
        (ConvCapsules(32, 32, (4, 4), (4, 4), 3, 2, routing=Attention()), 147_456 + 32),  # gain and bias
        (ConvCapsules(32, 32, (4, 4), (4, 4), 3, routing=EM(), competition="all"), 147_456 + 64),  # two betas per type
        (SharedCapsules(5, (4, 4), (4, 4), routing=EM(), in_types=32), 32 * 16 * 5 + 10),  # Hinton's class capsules
        (PrimaryCapsules(256, 32, 8, 9, 2), 5_308_672),  # Sabour 2017
        (PrimaryCapsules(128, 32, (4, 4), norm=True, bias=False), 128 * 512 + 32),  # Tsai 2020
        (MaskedDecoder(10, 16, (1, 28, 28)), 1_411_344),  # Sabour 2017
    ],
)
def test_a_layer_has_the_published_number_of_parameters(layer: nn.Module, count: int) -> None:
    assert sum(parameter.numel() for parameter in layer.parameters()) == count


def test_initial_weights_are_normal_with_the_standard_deviation_of_the_rule() -> None:
    rule = Dynamic()
    for layer, std in (
        (FullyConnectedCapsules(100, 7, 8, 16, routing=rule), rule.weight_std(100, 7, 1, 8, 16)),
        (SharedCapsules(20, 32, 32, routing=rule, typical_caps=30), rule.weight_std(30, 20, 1, 32, 32)),
        (ConvCapsules(4, 9, 8, 16, (3, 5), routing=rule), rule.weight_std(60, 9, 1, 8, 16)),
        # where all parents compete there are as many for a child as the windows that see it have: 3 x 2 and 2 x 1
        (ConvCapsules(4, 9, 8, 16, (3, 2), routing=rule, competition="all"), rule.weight_std(24, 54, 1, 8, 16)),
        (ConvCapsules(4, 9, 8, 16, 3, (2, 3), routing=rule, competition="all"), rule.weight_std(36, 18, 1, 8, 16)),
    ):
        weight = layer.weight.detach()
        assert weight.std().item() == pytest.approx(std, rel=0.05)  # 3 standard errors of the smallest, and more
        assert abs(weight.mean().item()) < 0.05 * std


def test_initial_weights_may_be_given_as_a_number_or_filled_by_a_callable(make: Callable[[Rule], Layer]) -> None:
    assert SharedCapsules(20, 32, 32, routing=Dynamic(), init=0.02).weight.std().item() == pytest.approx(0.02, rel=0.05)
    layer = ConvCapsules(2, 3, 4, 5, 3, routing=Dynamic(), init=nn.init.ones_)
    assert layer.weight.eq(1).all()
    lazy = FullyConnectedCapsules(None, 5, IN, OUT, routing=Dynamic(), init=nn.init.zeros_)
    assert not lazy(a_map()).poses.any()


def test_reset_draws_the_weight_anew_and_puts_back_what_the_rule_learns(make: Callable[[Rule], Layer]) -> None:
    layer = make(Dynamic(learn_prior=True, learn_bias=True))
    layer(a_map())
    before = layer.weight.detach().clone()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    layer.reset_parameters()
    assert not layer.weight.eq(before).any()
    assert abs(layer.weight.mean().item()) < 0.5
    assert layer.learned["prior"].eq(0).all()
    assert layer.learned["bias"].eq(0.1).all()


def test_every_parameter_gets_a_gradient(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer = make(rule)
    out = layer(a_map())
    weights = torch.randn_like(out.poses)
    total = (out.poses * weights).sum() + (0 if out.activations is None else out.activations.sum())
    total.backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# ---------------------------------------------------------------------------------------------------------------------
# Batches, dtypes, devices, and the life of a module


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_of_one_keeps_its_axis_and_an_empty_one_is_empty(
    make: Callable[[Rule], Layer], rule: Rule, batch: int
) -> None:
    layer = make(rule)
    layer(a_map())
    out, two = layer(a_map(batch)), layer(a_map(2))
    assert out.poses.shape == (batch, *two.poses.shape[1:])
    if two.activations is not None:
        assert out.activations.shape == (batch, *two.activations.shape[1:])
    out.poses.sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_an_example_does_not_depend_on_its_batch(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer, children = shaken(make(rule)), a_map(3, torch.float64)
    together = layer(children).poses
    for n in range(3):
        alone = layer(Capsules(children.poses[n : n + 1], children.activations[n : n + 1])).poses
        close(alone[0], together[n])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_layer_works_in_other_dtypes(make: Callable[[Rule], Layer], rule: Rule, dtype: torch.dtype) -> None:
    layer = make(rule).to(dtype)
    out = layer(a_map(dtype=dtype))
    assert out.poses.dtype == dtype
    assert out.poses.isfinite().all()
    out.poses.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_nothing_is_calculated_on_the_meta_device_but_all_shapes_are_known(make: Callable[[Rule], Layer]) -> None:
    rule = EM()
    expected = make(rule)(a_map())
    with torch.device("meta"):
        built_there, children = make(rule), a_map()
    for layer, dtype in ((built_there, torch.float32), (make(rule).double().to("meta"), torch.float64)):
        out = layer(children)
        assert out.poses.is_meta
        assert out.poses.shape == expected.poses.shape
        assert all(parameter.is_meta and parameter.dtype == dtype for parameter in layer.parameters())


def test_a_layer_made_on_meta_starts_anew_where_it_is_put() -> None:
    with torch.device("meta"):
        layer = ConvCapsules(3, 5, IN, OUT, 3, routing=Dynamic(learn_bias=True))
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(a_map()).poses.isfinite().all()
    assert layer.learned["bias"].eq(0.1).all()


def test_new_tensors_follow_the_input_not_the_default_device(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer, children = make(rule), a_map()
    expected = layer(children).poses
    try:
        torch.set_default_device("meta")  # whatever is made without a device is now lost
        out = layer(children).poses
    finally:
        torch.set_default_device(None)
    assert torch.equal(out, expected)


def test_a_stored_layer_gives_the_same_parents_in_a_new_one(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer, children = shaken(make(rule)), a_map(dtype=torch.float64)
    expected = layer(children).poses
    other = make(rule).double()
    assert other.load_state_dict(layer.state_dict()).missing_keys == []
    assert torch.equal(other(children).poses, expected)


def test_a_copied_and_a_pickled_layer_give_the_same_parents(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer, children = shaken(make(rule)), a_map(dtype=torch.float64)
    expected = layer(children).poses
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(children).poses, expected)
        assert twin.weight is not layer.weight


def test_layers_compile_as_one_graph() -> None:
    program = """
import torch
from torchcaps import Capsules
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules
from torchcaps.routing import Dynamic

children, mask = Capsules(torch.randn(2, 3, 4, 5, 2, 4)), torch.rand(2, 3, 4, 5) > 0.3
rule = Dynamic(learn_prior=True)
layers = {
    "fully connected": FullyConnectedCapsules(60, 5, (2, 4), (2, 6), routing=rule, coordinates=True),
    "convolution": ConvCapsules(3, 5, (2, 4), (2, 6), 3, 2, 1, routing=rule),
    "competition among all": ConvCapsules(3, 5, (2, 4), (2, 6), 3, 2, 1, routing=Dynamic(), competition="all"),
}
for name, layer in layers.items():
    out = torch.compile(layer, backend="eager", fullgraph=True)(children, mask).poses
    torch.testing.assert_close(out, layer(children, mask).poses, msg=name)
"""
    # in a process of its own: the shape checks of the other tests are no code for torch.compile
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Sizes taken from the first input


def test_a_fully_connected_layer_takes_its_size_from_the_first_input_and_keeps_it() -> None:
    layer = FullyConnectedCapsules(None, 5, IN, OUT, routing=Dynamic(learn_prior=True))
    assert layer.in_caps is None
    assert layer.route(a_map()).poses.shape == (2, 5, *OUT)
    assert layer.in_caps == 60
    assert layer.weight.shape == (60, 5, 4, 6)
    assert layer.learned["prior"].shape == (60, 5)
    assert type(layer.weight) is nn.Parameter
    with pytest.raises(ValueError, match="weights for 60 children"):
        layer(a_map(spatial=(4, 4)))


def test_an_optimiser_made_before_the_first_input_still_trains_the_weight() -> None:
    layer = FullyConnectedCapsules(None, 5, IN, OUT, routing=Dynamic())
    weight = layer.weight
    layer(a_map())
    assert layer.weight is weight


def test_a_layer_without_a_size_can_be_moved_stored_copied_and_filled_from_a_stored_one() -> None:
    rule = Dynamic(learn_prior=True)
    empty = FullyConnectedCapsules(None, 5, IN, OUT, routing=rule).double()
    same = FullyConnectedCapsules(None, 5, IN, OUT, routing=rule)
    same.load_state_dict(empty.state_dict())  # nothing to hand over yet
    assert same.in_caps is None
    early, children = copy.deepcopy(empty), a_map(dtype=torch.float64)
    full = shaken(FullyConnectedCapsules(60, 5, IN, OUT, routing=rule))
    for layer in (empty, early):
        layer.load_state_dict(full.state_dict())
        assert layer.in_caps == 60
        assert torch.equal(layer(children).poses, full(children).poses)
    assert pickle.loads(pickle.dumps(same))(a_map()).poses.shape == (2, 5, *OUT)


def test_primary_capsules_take_their_channels_from_the_first_input_or_a_stored_layer() -> None:
    layer, x = PrimaryCapsules(None, 3, 4, kernel_size=3), torch.randn(2, 7, 6, 5)
    fresh = copy.deepcopy(layer)
    expected = layer(x).poses
    assert expected.shape == (2, 3, 4, 3, 1, 4)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x).poses, expected)
    with pytest.raises(ValueError, match=r"\[N, 7, \*spatial\]"):
        layer(torch.randn(2, 6, 6, 5))


@pytest.mark.parametrize(
    ("broken", "coordinates", "message"),
    [
        (a_map(spatial=(0, 5)), False, r"FullyConnectedCapsules .* one child or more, but poses \[2, 3, 0, .* none"),
        (Capsules(torch.ones(2, 0, *IN)), False, r"FullyConnectedCapsules .* but poses \[2, 0, 2, 4\] hold none"),
        (a_map().flatten(), True, "need a map"),
    ],
)
def test_an_input_that_is_refused_leaves_a_layer_without_a_size_as_it_was(
    broken: Capsules, coordinates: bool, message: str
) -> None:
    layer = FullyConnectedCapsules(None, 5, IN, OUT, routing=Dynamic(), coordinates=coordinates)
    with pytest.raises(ValueError, match=message):
        layer(broken)
    assert layer.in_caps is None
    assert layer(a_map()).poses.shape == (2, 5, *OUT)


@pytest.mark.parametrize("stored", [(60, 4, 4, 6), (60, 5, 4, 7), (60, 5, 3, 6), (0, 5, 4, 6), (60, 5), ()])
def test_a_stored_weight_that_does_not_fit_gives_no_size(stored: tuple[int, ...]) -> None:
    layer = FullyConnectedCapsules(None, 5, IN, OUT, routing=Dynamic())
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: .* this layer's is \[in_caps, 5, 4, 6\]"):
        layer.load_state_dict({"weight": torch.ones(stored)})
    assert layer.in_caps is None
    assert layer(a_map(spatial=(2, 2))).poses.shape == (2, 5, *OUT)


@pytest.mark.parametrize("how", ["first input", "stored"])
def test_layers_that_get_their_size_in_inference_mode_can_still_be_trained(how: str) -> None:
    rule = Dynamic(learn_prior=True)

    def network() -> nn.Sequential:
        return nn.Sequential(PrimaryCapsules(None, 3, IN), FullyConnectedCapsules(None, 5, IN, OUT, routing=rule))

    net, x = network(), torch.randn(2, 7, 4, 5)
    other = network()
    other(x)
    with torch.inference_mode():
        if how == "stored":
            net.load_state_dict(other.state_dict())
        net(x)
    assert not any(parameter.is_inference() for parameter in net.parameters())
    net(x).poses.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_primary_capsules_filled_from_a_stored_layer_know_its_channels() -> None:
    stored, layer = PrimaryCapsules(7, 3, 4), PrimaryCapsules(None, 3, 4)
    layer.load_state_dict(stored.state_dict())
    with pytest.raises(ValueError, match=r"\[N, 7, \*spatial\]"):
        layer(torch.randn(2, 6, 6, 5))


@pytest.mark.parametrize("stored", [(11, 7, 3, 3), (12, 7, 3, 2), (12, 0, 3, 3), (12, 7, 3)])
def test_a_stored_convolution_that_does_not_fit_gives_no_channels(stored: tuple[int, ...]) -> None:
    layer = PrimaryCapsules(None, 3, 4, kernel_size=3)
    with pytest.raises(RuntimeError, match=r"size mismatch for conv.weight: .* \[12, in_channels, 3, 3\]"):
        layer.load_state_dict({"conv.weight": torch.ones(stored), "conv.bias": torch.ones(stored[0])})
    assert layer(torch.ones(2, 5, 4, 4)).poses.shape == (2, 3, 2, 2, 1, 4)


def test_sizes_may_be_whole_numbers_of_numpy() -> None:
    three, one, two = np.int64(3), np.int32(1), np.uint8(2)
    layer = PrimaryCapsules(three, three, (one, three), three, (one, two), one, spatial_dims=two)
    assert type(layer.types) is int
    assert layer.conv.kernel_size == (3, 3)
    above = ConvCapsules(three, two, three, three, (two, three), routing=Dynamic())
    assert above.kernel_size == (2, 3)
    top = SharedCapsules(two, three, three, in_types=two, typical_caps=three, routing=Dynamic())
    last = FullyConnectedCapsules(two, three, three, three, routing=Dynamic())
    for each in (above, top, last):
        assert type(each.out_caps) is int
    parents = last(top(above(layer(torch.randn(2, 3, 6, 9)))))
    assert ClassIndependentDecoder(three, (one, two), [two])(parents.poses, torch.ones(2, 3)).shape == (2, 1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Primary capsules


def test_a_primary_capsule_is_consecutive_channels_at_one_place() -> None:
    layer = PrimaryCapsules(3, 2, 8, squash="identity")  # 16 channels
    x = torch.randn(2, 3, 6, 6)
    channels, poses = layer.conv(x), layer(x).poses
    assert poses.shape == (2, 2, 6, 6, 1, 8)
    assert torch.equal(poses[0, 0, 0, 0, 0], channels[0, 0:8, 0, 0])
    assert torch.equal(poses[1, 1, 4, 2, 0], channels[1, 8:16, 4, 2])


def test_one_pixel_moves_only_the_primary_capsules_that_see_it() -> None:
    layer, x = PrimaryCapsules(3, 2, 8, kernel_size=3), torch.randn(1, 3, 6, 7)
    other = x.clone()
    other[:, :, 4, 1] += 1
    moved = (layer(x).poses != layer(other).poses).any(-1).any(-1).any(1)[0]  # [row, column]
    seen = torch.zeros(4, 5, dtype=torch.bool)
    seen[2:4, 0:2] = True
    assert torch.equal(moved, seen)


@pytest.mark.parametrize("spatial", [(9,), (9, 7), (9, 7, 8)])
def test_primary_capsules_come_from_maps_of_one_two_and_three_dimensions(spatial: tuple[int, ...]) -> None:
    axes = len(spatial)
    kernel, stride, padding = (3, 2, 4)[:axes], (2, 1, 3)[:axes], (1, 0, 1)[:axes]
    layer = PrimaryCapsules(
        5, 4, (2, 3), kernel, stride, padding, spatial_dims=axes, squash="identity", activations=True
    )
    x = torch.randn(2, 5, *spatial)
    convolution = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes - 1]
    channels = convolution(x, layer.conv.weight, layer.conv.bias, stride, padding)
    out = layer(x)
    assert out.poses.shape == (2, 4, *channels.shape[2:], 2, 3)
    assert out.activations.shape == (2, 4, *channels.shape[2:])
    for c in range(4):
        close(out.activations[:, c], channels[:, 24 + c].sigmoid(), 1e-5, 1e-6)
        for r in range(2):
            for p in range(3):
                close(out.poses[:, c, ..., r, p], channels[:, (c * 2 + r) * 3 + p], 1e-5, 1e-6)


def test_primary_poses_pass_a_layer_norm_of_their_own_then_the_squash() -> None:
    layer, x = PrimaryCapsules(3, 2, (2, 3), norm=True, squash="tanh"), torch.randn(2, 3, 4, 4)
    plain = PrimaryCapsules(3, 2, (2, 3), squash="identity")
    plain.conv.load_state_dict(layer.conv.state_dict())
    with torch.no_grad():
        layer.norm.weight.copy_(torch.rand(2, 3))
        layer.norm.bias.copy_(torch.rand(2, 3))
    poses = plain(x).poses
    centred = poses - poses.mean((-2, -1), keepdim=True)
    normed = centred / (centred.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
    s = normed * layer.norm.weight + layer.norm.bias
    r = s.square().sum((-2, -1), keepdim=True).sqrt()
    close(layer(x).poses, r.tanh() * s / r, 1e-5, 1e-6)
    alone = PrimaryCapsules(3, 2, 1, norm=True, squash="identity")
    assert alone.norm is None  # a pose of one number would become 0
    assert layer.double()(x.double()).poses.dtype == torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# Any number of children, and masks

SHARED: dict[str, Callable[[Rule], SharedCapsules]] = {
    "by all": lambda rule: SharedCapsules(5, IN, OUT, routing=rule),
    "by type": lambda rule: SharedCapsules(5, IN, OUT, routing=rule, in_types=3),
}


@pytest.fixture(params=SHARED)
def make_shared(request: pytest.FixtureRequest) -> Callable[[Rule], SharedCapsules]:
    return SHARED[request.param]


@pytest.mark.parametrize("spatial", [(), (1,), (5,), (50,), (6, 6), (3, 9), (2, 3, 4)])
def test_one_shared_layer_takes_sequences_and_images_of_any_size(
    make_shared: Callable[[Rule], SharedCapsules], rule: Rule, spatial: tuple[int, ...]
) -> None:
    layer = make_shared(rule)
    out = layer(a_map(spatial=spatial))
    assert out.poses.shape == (2, 5, *OUT)
    assert out.poses.isfinite().all()


def test_a_padded_sequence_is_the_sequence_and_what_stands_in_the_padding_is_never_read(
    make_shared: Callable[[Rule], SharedCapsules], rule: Rule
) -> None:
    layer, short = shaken(make_shared(rule)), a_map(dtype=torch.float64, spatial=(7,))
    poses, activations = (
        torch.full((2, TYPES, 12, *IN), torch.nan).double(),
        torch.full((2, TYPES, 12), torch.nan).double(),
    )
    mask = torch.zeros(2, TYPES, 12, dtype=torch.bool)
    mask[:, :, 2:9] = True
    poses[:, :, 2:9], activations[:, :, 2:9] = short.poses, short.activations
    results = []
    for children, seen in ((short, None), (Capsules(poses, activations), mask)):
        layer.zero_grad()
        children = Capsules(*(t.clone().requires_grad_() for t in children))
        out = layer(children, seen)
        (out.poses * torch.arange(12.0).view(2, 6)).sum().backward()
        gradient = children.poses.grad if seen is None else children.poses.grad[:, :, 2:9]
        results.append([out.poses, gradient, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
        if seen is not None:
            assert not children.poses.grad[~seen].any()
    assert len(results[0]) > 2
    for unpadded, padded in zip(*results, strict=True):
        close(padded, unpadded, 1e-12, 1e-12)


def test_masked_children_change_nothing_in_any_layer(make: Callable[[Rule], Layer], rule: Rule) -> None:
    layer, children = shaken(make(rule)), a_map(dtype=torch.float64)
    mask = torch.rand(2, TYPES, *SPATIAL) > 0.4
    spoilt = Capsules(
        children.poses.masked_fill(~mask[..., None, None], torch.nan),
        children.activations.masked_fill(~mask, torch.nan),
    )
    results = []
    for given in (children, spoilt):
        layer.zero_grad()
        poses = given.poses.clone().requires_grad_()
        out = layer(Capsules(poses, given.activations), mask)
        out.poses.square().sum().backward()
        results.append([out.poses, poses.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[0][1][~mask].any()
    assert not layer(children, mask).poses.isclose(layer(children).poses).all()


# ---------------------------------------------------------------------------------------------------------------------
# Places


def test_coordinates_stand_in_the_right_hand_column_of_a_matrix_each_axis_by_its_own_size() -> None:
    offset = coordinate_offset(2, (2, 5), (4, 4))
    assert offset.shape == (20, 1, 4, 4)
    for child in range(20):
        row, column = child % 10 // 5, child % 5
        expected = torch.zeros(4, 4)
        expected[0, 3], expected[1, 3] = (row + 0.5) / 2, (column + 0.5) / 5
        close(offset[child, 0], expected)


def test_coordinates_are_the_first_numbers_of_a_vector() -> None:
    close(
        coordinate_offset(1, (4,), 3)[:, 0, 0],
        torch.tensor([[0.125, 0, 0], [0.375, 0, 0], [0.625, 0, 0], [0.875, 0, 0]]),
    )
    cube = coordinate_offset(1, (2, 1, 4), 3)[:, 0, 0]
    close(cube[5], torch.tensor([0.75, 0.5, 0.375]))
    assert coordinate_offset(1, (2,), 3, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("kind", ["fully connected", "shared", "by type"])
def test_a_layer_with_coordinates_adds_them_to_the_votes(kind: str, rule: Rule) -> None:
    layer = shaken(
        FullyConnectedCapsules(60, 5, IN, OUT, routing=rule, coordinates=True)
        if kind == "fully connected"
        else SharedCapsules(5, IN, OUT, routing=rule, coordinates=True, in_types=3 if kind == "by type" else None)
    )
    children = a_map(dtype=torch.float64)
    offset = coordinate_offset(3, SPATIAL, OUT, dtype=torch.float64)
    weight = layer.weight.repeat_interleave(60 // len(layer.weight), 0)
    learned = {
        name: value.repeat_interleave(60 // len(value), 0) if name == "prior" else value
        for name, value in layer.learned.items()
    }
    flat = children.flatten()
    close(layer(children).poses, rule(*flat[:1], weight, flat.activations, vote_offset=offset, **learned).poses)


# ---------------------------------------------------------------------------------------------------------------------
# Decoders

KEEP = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize("out_shape", [(1, 28, 28), (3, 7, 13), (2, 1, 1), (1, 33, 64), (4, 8, 5)])
def test_every_decoder_makes_images_of_any_size_between_0_and_1(out_shape: tuple[int, int, int]) -> None:
    poses = 100 * torch.randn(2, 3, 2, 4)
    for decoder in (
        MaskedDecoder(3, (2, 4), out_shape, hidden=(16,)),
        ClassIndependentDecoder((2, 4), out_shape, hidden=(16, 8)),
        ConvDecoder(3, (2, 4), out_shape, channels=(8, 4)),
    ):
        for batch in (2, 1, 0):
            image = decoder(poses[:batch], KEEP[:batch])
            assert image.shape == (batch, *out_shape)
            assert image.ge(0).all()
            assert image.le(1).all()
        assert decoder.to(torch.bfloat16)(poses.bfloat16(), KEEP.bfloat16()).dtype == torch.bfloat16


def test_a_masked_decoder_draws_sequences_and_volumes_too() -> None:
    assert MaskedDecoder(3, 4, (2, 50), hidden=()).forward(torch.randn(2, 3, 1, 4), KEEP).shape == (2, 2, 50)
    assert ClassIndependentDecoder(4, (1, 3, 4, 5))(torch.randn(2, 3, 1, 4), KEEP).shape == (2, 1, 3, 4, 5)


@pytest.mark.parametrize("which", [MaskedDecoder, ClassIndependentDecoder, ConvDecoder])
def test_a_decoder_sees_the_kept_capsule_alone(which: type[nn.Module]) -> None:
    decoder = which((2, 4), (1, 6, 6)) if which is ClassIndependentDecoder else which(3, (2, 4), (1, 6, 6))
    poses = torch.randn(2, 3, 2, 4, requires_grad=True)
    decoder(poses, KEEP).square().sum().backward()
    assert torch.equal(poses.grad.abs().sum((2, 3)) > 0, KEEP.bool())


@pytest.mark.parametrize("which", [MaskedDecoder, ConvDecoder])
def test_a_masked_decoder_knows_which_class_it_draws(which: type[nn.Module]) -> None:
    decoder, poses = which(3, 4, (1, 6, 6)), torch.randn(1, 1, 1, 4).expand(1, 3, 1, 4)
    assert not decoder(poses, KEEP[:1]).allclose(decoder(poses, KEEP[1:]))


def test_a_class_independent_decoder_draws_the_same_pose_the_same_for_every_class() -> None:
    decoder, poses = ClassIndependentDecoder(4, (1, 6, 6)), torch.randn(1, 1, 1, 4).expand(1, 3, 1, 4)
    assert torch.equal(decoder(poses, KEEP[:1]), decoder(poses, KEEP[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# The door: errors name the layer, both sizes and the way out


def fc(**settings: object) -> FullyConnectedCapsules:
    return FullyConnectedCapsules(60, 5, IN, OUT, **{"routing": Dynamic(), **settings})  # type: ignore[arg-type]


MAP = a_map()
ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: fc()(MAP.poses), r"FullyConnectedCapsules takes Capsules, not a tensor \[2, 3, 4, 5, 2, 4\]: wrap it"),
    (lambda: fc()((MAP.poses, None)), r"FullyConnectedCapsules takes Capsules, not a tuple"),
    (
        lambda: fc()(a_map(spatial=(4, 4))),
        r"weights for 60 children.*\[2, 3, 4, 4, 2, 4\] hold 3 x 4 x 4 = 48.*SharedCaps",
    ),
    (lambda: fc()(Capsules(MAP.poses.mT)), r"in_pose \[2, 4\] takes poses \[N, I, 2, 4\].*not \[2, 3, 4, 5, 4, 2\]"),
    (
        lambda: SharedCapsules(5, 8, 8, routing=Dynamic())(Capsules(torch.ones(2, 9, 8))),
        r"SharedCapsules .* not \[2, 9, 8\]; a vector capsule is a pose of one row: poses.unsqueeze\(-2\)",
    ),
    (
        lambda: fc(routing=EM())(Capsules(MAP.poses)),
        r"FullyConnectedCapsules: EM weighs .* none: PrimaryCapsules\(activations=True\)",
    ),
    (lambda: fc()(Capsules(MAP.poses, torch.ones(2, 60))), r"activations \[2, 60\] but poses .* need \[2, 3, 4, 5\]"),
    (lambda: fc()(MAP, torch.ones(2, 3, 4, 5)), r"mask \[2, 3, 4, 5\] of torch.float32 .* torch.bool"),
    (lambda: fc()(MAP, torch.ones(2, 4, 5, dtype=torch.bool)), r"mask \[2, 4, 5\] .* need \[2, 3, 4, 5\].*over types"),
    (lambda: fc(routing="dynamic"), r"FullyConnectedCapsules: routing must be a rule such as Dynamic.*'dynamic'"),
    (lambda: FullyConnectedCapsules(0, 5, 8, 8, routing=Dynamic()), r"1 or more, not 0"),
    (lambda: SharedCapsules(0, 8, 8, routing=Dynamic()), r"SharedCapsules: the number of parents .* not 0"),
    (lambda: SharedCapsules(5, 8, 8, routing=Dynamic(), typical_caps=0), r"SharedCapsules: typical_caps .* not 0"),
    (lambda: SharedCapsules(5, (2, 4), 8, routing=Dynamic()), r"SharedCapsules: a pose \[2, 4\] .* \[1, 8\] has 1"),
    (
        lambda: SharedCapsules(5, IN, OUT, routing=Dynamic(), in_types=4)(MAP),
        r"weights for 4 types of children, but poses \[2, 3, 4, 5, 2, 4\] hold 3: give the map",
    ),
    (lambda: fc(coordinates=True)(MAP.flatten()), r"coordinates need a map"),
    (lambda: coordinate_offset(2, (3, 4), 1), r"2 coordinates do not fit a vector pose of 1 numbers"),
    (lambda: coordinate_offset(2, (3, 4, 5), (2, 6)), r"3 coordinates do not fit a pose \[2, 6\] of 2 rows"),
    (lambda: PrimaryCapsules(3, 2, 8)(torch.ones(2, 4, 9, 9)), r"PrimaryCapsules .*\[N, 3, .*not \[2, 4, 9, 9\]"),
    (lambda: PrimaryCapsules(3, 2, 8)(torch.ones(3, 9, 9)), r"2 spatial sizes, not \[3, 9, 9\]"),
    (
        lambda: PrimaryCapsules(3, 2, 8, (9, 5), padding=1)(torch.ones(2, 3, 6, 9)),
        r"PrimaryCapsules: a kernel of 9 x 5 does not fit a map of 6 x 9 with padding 1 x 1: .* takes is 7 x 3",
    ),
    (lambda: PrimaryCapsules(3, 2, 8, spatial_dims=4), r"spatial_dims=4 must be 1, 2 or 3"),
    (lambda: PrimaryCapsules(3, 2, 8, (3, 3, 3)), r"kernel_size=\(3, 3, 3\) .* or 2, one per axis"),
    (lambda: PrimaryCapsules(3, 2, 8, stride=0), r"PrimaryCapsules: stride=0 must be .* at least 1"),
    (lambda: PrimaryCapsules(0, 2, 8), r"in_channels must be a whole number of 1 or more, not 0"),
    (
        lambda: MaskedDecoder(3, 4, (1, 6, 6))(torch.ones(2, 4, 1, 4), KEEP),
        r"takes poses \[N, 3, 1, 4\], not \[2, 4, 1, 4\]",
    ),
    (lambda: MaskedDecoder(3, 4, (1, 6, 6))(torch.ones(2, 3, 1, 4), KEEP[:1]), r"keep \[1, 3\] .* need \[2, 3\]"),
    (lambda: ClassIndependentDecoder(4, (1, 6))(torch.ones(2, 3, 1, 5), KEEP), r"\[N, J, 1, 4\], not \[2, 3, 1, 5\]"),
    (lambda: ConvDecoder(3, 4, (6, 6)), r"ConvDecoder makes images \(C, height, width\).*\(6, 6\)"),
    (
        lambda: MaskedDecoder(3, 4, (1, 0, 6)),
        r"MaskedDecoder: every size of out_shape must be a whole number of 1 or more, not 0",
    ),
    (lambda: fc(init=-1), r"init must be a standard deviation of 0 or more, a callable .*, not -1"),
    (lambda: fc(init=math.nan), r"init must be .* not nan"),
    (lambda: fc(init=math.inf), r"init must be .* not inf"),
    (lambda: fc(init=True), r"init must be .* not True"),
    (lambda: fc(init="xavier"), r"init must be .*xavier_normal_.* not 'xavier'"),
    (lambda: SharedCapsules(5, 8, 8, routing=Dynamic(), init="xavier"), r"SharedCapsules: init must be"),
    (lambda: FullyConnectedCapsules(True, 5, 8, 8, routing=Dynamic()), r"in_caps must be a whole number .* not True"),
    (lambda: FullyConnectedCapsules(4, True, 8, 8, routing=Dynamic()), r"parents must be a whole number .* not True"),
    (lambda: FullyConnectedCapsules(4, 5, True, 8, routing=Dynamic()), r"a pose is a positive int .* not True"),
    (lambda: FullyConnectedCapsules(4, 5, None, 8, routing=Dynamic()), r"a pose is a positive int .* not None"),
    (lambda: FullyConnectedCapsules(4.0, 5, 8, 8, routing=Dynamic()), r"in_caps must be a whole number .* not 4.0"),
    (lambda: SharedCapsules(5, 8, 8, routing=Dynamic(), in_types=True), r"in_types must be .* not True"),
    (lambda: PrimaryCapsules(True, 2, 8), r"in_channels must be a whole number of 1 or more, not True"),
    (lambda: PrimaryCapsules(3, 2, 8, kernel_size=True), r"kernel_size=True must be a whole number"),
    (lambda: PrimaryCapsules(3, 2, 8, kernel_size=2.5), r"kernel_size=2.5 must be a whole number"),
    (lambda: PrimaryCapsules(3, 2, 8, kernel_size=None), r"kernel_size=None must be a whole number"),
    (lambda: PrimaryCapsules(3, 2, 8, spatial_dims=True), r"spatial_dims=True must be 1, 2 or 3"),
    (lambda: PrimaryCapsules(3, 2, 8, squash=None), r'PrimaryCapsules: squash must be .* squash="identity"'),
    (lambda: PrimaryCapsules(3, 2, 8, squash="relu"), r"unknown squash 'relu'"),
    (lambda: PrimaryCapsules(None, 2, 8)(torch.ones(2, 0, 9, 9)), r"PrimaryCapsules .* not \[2, 0, 9, 9\]"),
    (lambda: PrimaryCapsules(3, 2, 8)([1.0]), r"PrimaryCapsules takes a tensor, not list: .*as_tensor"),
    (lambda: MaskedDecoder(5, 4, ()), r"MaskedDecoder: out_shape must be \(C, \*spatial\).* not \(\)"),
    (lambda: MaskedDecoder(5, 4, 28), r"MaskedDecoder: out_shape must be a tuple of whole numbers, not 28"),
    (lambda: MaskedDecoder(5, 4, (1, 6), 512), r"MaskedDecoder: hidden must be a tuple of whole numbers, not 512"),
    (lambda: MaskedDecoder(True, 4, (1, 6)), r"MaskedDecoder: num_classes must be a whole number .* not True"),
    (lambda: ClassIndependentDecoder(4, ()), r"ClassIndependentDecoder: out_shape must be"),
    (lambda: ConvDecoder(5, 4, ()), r"ConvDecoder: out_shape must be"),
    (lambda: ConvDecoder(5, 4, (1, 6, 6), ()), r"ConvDecoder makes images .* one or more doublings"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_a_mistake_is_answered_at_the_door_with_both_sides_and_the_way_out(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_poses_without_activations_pass_where_the_rule_does_not_need_them(make: Callable[[Rule], Layer]) -> None:
    layer, children = make(Dynamic()), a_map()
    assert torch.equal(layer(Capsules(children.poses)).poses, layer(children).poses)
    assert math.isfinite(layer(Capsules(children.poses)).lengths.sum().item())
