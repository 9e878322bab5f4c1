"""Convolutional capsules: which children a parent hears, what lies outside the map, and who competes for a child.

Windows are cut here by slices, one at a time, in the order that the layer's file states.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps import Capsules
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules
from torchcaps.routing import EM, Attention, Dynamic, Rule

RULES: dict[str, Rule] = {
    "dynamic": Dynamic.sabour(),
    "dynamic that learns": Dynamic(learn_prior=True, learn_bias=True),
    "leaky": Dynamic(leaky=True),
    "dynamic over children": Dynamic.hauser(),
    "attention": Attention.tsai(),
    "em": EM.hinton(),
}
OVER_PARENTS = [name for name, rule in RULES.items() if rule.sums_to == "parents"]

# spatial sizes, kernel, stride, padding: non-square, leftovers behind the last stride, strides beyond the kernel
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "1-D": ((9,), (4,), (2,), (0,)),
    "1-D padded": ((6,), (3,), (2,), (2,)),
    "2-D": ((5, 7), (3, 2), (1, 2), (0, 0)),
    "2-D padded": ((4, 5), (3, 3), (2, 3), (1, 2)),
    "2-D with gaps": ((7, 8), (2, 1), (3, 3), (0, 1)),
    "the whole map": ((3, 4), (3, 4), (1, 1), (0, 0)),
    "3-D": ((3, 4, 5), (2, 3, 1), (1, 2, 2), (1, 0, 0)),
}
POSES = {"vector": ((1, 4), (1, 6)), "matrix": ((2, 3), (2, 4))}
IN_TYPES, OUT_TYPES, BATCH = 2, 3, 2


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[tuple[int, ...], ...]:
    return SHAPES[request.param]


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


def build(rule: Rule, shape: tuple[tuple[int, ...], ...], pose: str = "vector", **settings: Any) -> ConvCapsules:
    """A layer in float64, with generic numbers in all that it learns."""
    spatial, kernel, stride, padding = shape
    layer = ConvCapsules(
        IN_TYPES, OUT_TYPES, *POSES[pose], kernel, stride, padding, routing=rule, spatial_dims=len(spatial), **settings
    ).double()
    with torch.no_grad():
        for parameter in layer.learned.values():
            parameter.add_(torch.rand_like(parameter))
    return layer


def a_map(spatial: tuple[int, ...], pose: str = "vector") -> Capsules:
    places = (BATCH, IN_TYPES, *spatial)
    return Capsules(torch.randn(*places, *POSES[pose][0]).double(), torch.rand(places).double())


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-3 * tolerance)


Child = tuple[int, ...]


def windows(shape: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], list[Child | None]]]:
    """(place of the parent, its children as (type, *place) in order, None outside the map), the last axis fastest."""
    spatial, kernel, stride, padding = shape
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(spatial, kernel, stride, padding, strict=True)]
    for place in itertools.product(*map(range, out)):
        children: list[Child | None] = []
        for entry in itertools.product(range(IN_TYPES), *map(range, kernel)):
            at = [o * s - p + k for o, s, p, k in zip(place, stride, padding, entry[1:], strict=True)]
            inside = all(0 <= a < n for a, n in zip(at, spatial, strict=True))
            children.append((entry[0], *at) if inside else None)
        yield place, children


# ---------------------------------------------------------------------------------------------------------------------
# Windows


@pytest.mark.parametrize("pose", POSES)
def test_each_window_is_a_fully_connected_layer_on_the_children_that_are_there(
    shape: tuple[tuple[int, ...], ...], rule: Rule, pose: str
) -> None:
    layer, children = build(rule, shape, pose), a_map(shape[0], pose)
    out = layer(children)
    for place, entries in windows(shape):
        there = [i for i, child in enumerate(entries) if child is not None]
        at = [entries[i] for i in there]
        # children outside the map are left out altogether, with their weights and priors
        dense = FullyConnectedCapsules(len(there) or 1, OUT_TYPES, *POSES[pose], routing=rule).double()
        with torch.no_grad():
            for name, ours in layer.named_parameters():
                theirs = dense.get_parameter(name)
                theirs.copy_(ours[there] if len(ours) == len(entries) else ours) if there else None
        if not there:
            assert out.poses[(slice(None), slice(None), *place)].isfinite().all()
            continue
        poses = torch.stack([children.poses[(slice(None), *child)] for child in at], 1)
        activations = torch.stack([children.activations[(slice(None), *child)] for child in at], 1)
        expected = dense(Capsules(poses, activations))
        close(out.poses[(slice(None), slice(None), *place)], expected.poses)
        if expected.activations is not None:
            close(out.activations[(slice(None), slice(None), *place)], expected.activations)


def test_the_map_of_parents_has_the_sizes_of_an_ordinary_convolution(shape: tuple[tuple[int, ...], ...]) -> None:
    spatial, kernel, stride, padding = shape
    layer = build(Dynamic(iterations=1), shape)
    convolution = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[len(spatial) - 1](2, 3, kernel, stride, padding)
    out = tuple(convolution(torch.ones(1, 2, *spatial)).shape[2:])
    assert layer.out_size(spatial) == out
    assert layer(a_map(spatial)).poses.shape == (BATCH, OUT_TYPES, *out, 1, 6)


def test_one_number_for_a_kernel_stride_or_padding_is_meant_for_every_axis() -> None:
    layer = ConvCapsules(2, 3, 4, 6, 3, 2, 1, routing=Dynamic(), spatial_dims=3)
    assert (layer.kernel_size, layer.stride, layer.padding) == ((3, 3, 3), (2, 2, 2), (1, 1, 1))


def test_a_parent_outside_the_windows_of_a_child_gets_no_gradient_from_it(
    shape: tuple[tuple[int, ...], ...], rule: Rule
) -> None:
    layer, children = build(rule, shape), a_map(shape[0])
    poses = children.poses.requires_grad_()
    out = layer(Capsules(poses, children.activations)).poses
    for place, entries in windows(shape):
        total = out[(slice(None), slice(None), *place)].square().sum()
        (gradient,) = torch.autograd.grad(total, poses, retain_graph=True)
        heard = {child for child in entries if child is not None}
        moved = {tuple(index) for index in gradient.any(-1).any(-1).any(0).nonzero().tolist()}
        assert moved == heard


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("size", "kernel", "stride"), [((12,), (3,), (2,)), ((9, 11), (3, 2), (2, 3))])
def test_a_shift_of_the_map_by_the_stride_shifts_the_parents_by_one(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: int, rule: Rule
) -> None:
    layer = build(rule, (size, kernel, stride, (padding,) * len(size)))
    scene = a_map(tuple(n + s for n, s in zip(size, stride, strict=True)))
    everything = (slice(None), slice(None))
    first = (*everything, *(slice(0, n) for n in size))
    second = (*everything, *(slice(s, None) for s in stride))  # what stood at s now stands at 0
    before, after = (layer(Capsules(scene.poses[part], scene.activations[part])) for part in (first, second))
    inside = [slice(1 + padding, n - padding) for n in before.spatial]
    moved = [slice(padding, n - 1 - padding) for n in before.spatial]
    expected = before.poses[(*everything, *inside)]
    assert expected.numel()
    close(after.poses[(*everything, *moved)], expected, 1e-6)
    if before.activations is not None:
        close(after.activations[(*everything, *moved)], before.activations[(*everything, *inside)], 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def test_a_masked_child_is_as_absent_as_one_outside_the_map(rule: Rule) -> None:
    spatial, kernel, stride, padding = (4, 6), (3, 3), (1, 2), (1, 1)
    layer, whole = build(rule, (spatial, kernel, stride, padding)), a_map(spatial)
    mask = torch.zeros(BATCH, IN_TYPES, *spatial, dtype=torch.bool)
    mask[..., 1:, :5] = True  # the first row and the last column are outside, too
    cut = Capsules(whole.poses[:, :, 1:, :5], whole.activations[:, :, 1:, :5])
    masked, smaller = layer(whole, mask), layer(cut)
    assert masked.spatial == (4, 3)
    assert smaller.spatial == (3, 3)
    close(masked.poses[:, :, 1:], smaller.poses)


@pytest.mark.parametrize("competition", ["window", "all"])
@pytest.mark.parametrize("name", OVER_PARENTS)
def test_what_a_masked_child_holds_changes_neither_parents_nor_gradients(name: str, competition: str) -> None:
    spatial = (4, 5)
    layer = build(RULES[name], (spatial, (3, 2), (1, 2), (1, 1)), competition=competition)
    children, mask = a_map(spatial), torch.rand(BATCH, IN_TYPES, *spatial) > 0.4
    spoilt = Capsules(
        children.poses.masked_fill(~mask[..., None, None], math.nan), children.activations.masked_fill(~mask, math.nan)
    )
    results = []
    for given in (children, spoilt):
        layer.zero_grad()
        poses, activations = (t.clone().requires_grad_() for t in given)
        out = layer(Capsules(poses, activations), mask)
        out.poses.square().sum().backward()
        results.append([out.poses, poses.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert results[0][1][mask].any()
    assert not results[0][1][~mask].any()


def test_a_window_of_which_nothing_is_left_has_finite_parents_and_gradients(rule: Rule) -> None:
    layer, children = build(rule, ((6,), (3,), (3,), (0,))), a_map((6,))
    mask = torch.ones(BATCH, IN_TYPES, 6, dtype=torch.bool)
    mask[:, :, :3] = False
    out = layer(children, mask)
    out.poses.square().sum().backward()
    assert out.poses.isfinite().all()
    assert layer.weight.grad.isfinite().all()
    close(out.poses[:, :, 1], layer(children).poses[:, :, 1])


# ---------------------------------------------------------------------------------------------------------------------
# Who competes for a child


def shares_by_child(
    shape: tuple[tuple[int, ...], ...], coupling: Tensor, mask: Tensor | None = None
) -> dict[tuple[int, Child], list[Tensor]]:
    """For each (example, child): its shares for the parents of every window that sees it, `[J]` each."""
    places = list(windows(shape))
    by_window = coupling.unflatten(0, (BATCH, len(places)))
    found: dict[tuple[int, Child], list[Tensor]] = {}
    for n in range(BATCH):
        for w, (_, entries) in enumerate(places):
            for i, child in enumerate(entries):
                if child is None or (mask is not None and not mask[(n, *child)]):
                    assert not by_window[n, w, i].any()
                else:
                    found.setdefault((n, child), []).append(by_window[n, w, i])
    return found


def test_each_child_that_a_window_sees_has_one_number_below_the_count_of_entries(
    shape: tuple[tuple[int, ...], ...],
) -> None:
    ids = build(Dynamic(), shape)._child_ids(shape[0], torch.device("cpu"))
    numbers: dict[Child, set[int]] = {}
    for row, (_, entries) in zip(ids.tolist(), windows(shape), strict=True):
        for number, child in zip(row, entries, strict=True):
            numbers.setdefault(child, set()).add(number)
    numbers.pop(None, None)
    assert all(len(own) == 1 for own in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
    assert ids.min() >= 0
    assert ids.max() < ids.numel()


@pytest.mark.parametrize("name", OVER_PARENTS)
def test_a_child_shares_one_among_the_parents_of_all_windows_that_see_it(
    shape: tuple[tuple[int, ...], ...], name: str
) -> None:
    layer, children = build(RULES[name], shape, competition="all"), a_map(shape[0])
    mask = torch.rand(BATCH, IN_TYPES, *shape[0]) > 0.2
    for seen in (None, mask):
        coupling = layer.route(children, seen, return_coupling=True).coupling
        found = shares_by_child(shape, coupling, seen)
        assert found
        for shares in found.values():
            close(torch.stack(shares).sum(), torch.tensor(1.0).double())


@pytest.mark.parametrize("competition", ["window", "all"])
@pytest.mark.parametrize("name", ["dynamic", "attention", "em"])
def test_the_first_round_shares_equally_in_the_window_or_among_all_windows_that_see_the_child(
    shape: tuple[tuple[int, ...], ...], name: str, competition: str
) -> None:
    layer, children = build(RULES[name], shape, competition=competition), a_map(shape[0])
    coupling = layer.route(children, return_coupling="all").coupling[0]
    for shares in shares_by_child(shape, coupling).values():
        rivals = OUT_TYPES * (len(shares) if competition == "all" else 1)
        for share in shares:
            close(share, torch.full_like(share, 1 / rivals), 1e-12)


@pytest.mark.parametrize("name", OVER_PARENTS)
def test_parents_compete_over_windows_as_if_all_were_parents_of_one_layer(name: str) -> None:
    rule = RULES[name]
    if name == "dynamic that learns":
        rule = Dynamic(learn_bias=True)  # a prior would differ between the entries of the windows
    layer, children = build(rule, ((3,), (3,), (1,), (1,)), competition="all"), a_map((3,))
    mask = torch.zeros(BATCH, IN_TYPES, 3, dtype=torch.bool)
    mask[..., 1] = True
    out = layer(children, mask)
    weight = layer.weight.view(IN_TYPES, 3, OUT_TYPES, 4, 6)
    # with the middle place alone, three windows see the same child: as entry 2, 1 and 0
    joint = torch.cat([weight[:, 2], weight[:, 1], weight[:, 0]], dim=1)
    learned = {
        key: value.repeat(3, *(1,) * (value.dim() - 1)) if len(value) == OUT_TYPES else value
        for key, value in layer.learned.items()
    }
    expected = rule(children.poses[:, :, 1], joint, children.activations[:, :, 1], **learned)
    close(out.poses, expected.poses.unflatten(1, (3, OUT_TYPES)).transpose(1, 2))
    if out.activations is not None:
        close(out.activations, expected.activations.unflatten(1, (3, OUT_TYPES)).transpose(1, 2))


@pytest.mark.parametrize("name", OVER_PARENTS)
def test_where_no_two_windows_see_the_same_child_it_does_not_matter_who_may_compete(name: str) -> None:
    for shape in (SHAPES["2-D with gaps"], SHAPES["the whole map"], ((8,), (2,), (2,), (0,))):
        alone, children = build(RULES[name], shape), a_map(shape[0])
        together = build(RULES[name], shape, competition="all")
        together.load_state_dict(alone.state_dict())
        close(together(children).poses, alone(children).poses)


# ---------------------------------------------------------------------------------------------------------------------
# The layer around it


@pytest.mark.parametrize("competition", ["window", "all"])
def test_route_gives_the_map_of_forward_and_goes_on_from_its_state(competition: str) -> None:
    shape = SHAPES["2-D padded"]
    for once, twice in ((Attention(1), Attention(2)), (EM(1), EM(2)), (Dynamic(1), Dynamic(2))):
        one, two = build(once, shape, competition=competition), build(twice, shape, competition=competition)
        two.load_state_dict(one.state_dict())
        children = a_map(shape[0])
        routed, out = one.route(children), one(children)
        assert torch.equal(routed.capsules.poses, out.poses)
        assert routed.coupling is None
        further = one.route(children, start=routed.state)
        close(further.poses, two(children).poses)
        if out.activations is not None:
            assert out.activations.shape == out.poses.shape[:-2]
            close(further.activations, two(children).activations)


def test_maps_of_capsules_go_from_layer_to_layer_with_their_activations() -> None:
    first = ConvCapsules(2, 4, (2, 3), (2, 4), 3, 2, routing=EM())
    second = ConvCapsules(4, 3, (2, 4), (2, 4), (2, 3), routing=EM(), competition="all")
    last = FullyConnectedCapsules(None, 5, (2, 4), (2, 4), routing=EM(), coordinates=True)
    out = last(second(first(Capsules(torch.randn(2, 2, 7, 10, 2, 3), torch.rand(2, 2, 7, 10)))))
    assert last.in_caps == 3 * 2 * 2
    assert out.poses.shape == (2, 5, 2, 4)
    assert out.activations.shape == (2, 5)


@pytest.mark.parametrize("batch", [0, 1])
def test_all_windows_compete_in_a_batch_of_one_and_in_an_empty_one(batch: int) -> None:
    layer = ConvCapsules(2, 3, 4, 6, 3, padding=1, routing=EM(), competition="all")
    out = layer(Capsules(torch.randn(batch, 2, 4, 5, 1, 4), torch.rand(batch, 2, 4, 5)))
    assert out.poses.shape == (batch, 3, 4, 5, 1, 6)
    assert out.activations.shape == (batch, 3, 4, 5)


def conv(*sizes: Any, **settings: Any) -> ConvCapsules:
    return ConvCapsules(*(sizes or (2, 3, 4, 6, 3)), **{"routing": Dynamic(), **settings})


def capsules(*places: int) -> Capsules:
    return Capsules(torch.ones(*places, 1, 4))


ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: conv(2, 3, 4, 6, (5, 3))(capsules(1, 2, 4, 9)),
        r"ConvCapsules: a kernel of 5 x 3 does not fit a map of 4 x 9 with padding 0 x 0: .* takes is 5 x 3",
    ),
    (
        lambda: conv(2, 3, 4, 6, (5, 3), 1, 1)(capsules(1, 2, 2, 9)),
        r"kernel of 5 x 3 .* map of 2 x 9 with padding 1 x 1: the smallest map it takes is 3 x 1",
    ),
    (lambda: conv()(capsules(1, 5, 4, 4)), r"ConvCapsules takes a map of 2 types .* \[1, 5, 4, 4, 1, 4\] hold 5 types"),
    (lambda: conv()(capsules(1, 2, 9)), r"with 2 spatial sizes, but poses .* spatial sizes \[9\]"),
    (lambda: conv()(torch.ones(1, 2, 4, 4, 1, 4)), r"ConvCapsules takes Capsules, not a tensor"),
    (
        lambda: conv(routing=EM())(capsules(1, 2, 4, 4)),
        r"ConvCapsules: EM weighs .*PrimaryCapsules\(activations=True\)",
    ),
    (lambda: conv(competition="both"), r"competition='both' must be 'window' or 'all'"),
    (lambda: conv(competition="all", routing=Dynamic.hauser()), r"competition='all' .* competition='window'"),
    (lambda: conv(spatial_dims=4), r"ConvCapsules: spatial_dims=4 must be 1, 2 or 3"),
    (lambda: conv(2, 3, 4, 6, 0), r"kernel_size=0 must be a whole number of at least 1"),
    (lambda: conv(2, 3, 4, 6, 3, (1, 2, 3)), r"stride=\(1, 2, 3\) .* or 2, one per axis"),
    (lambda: conv(2, 3, 4, 6, 3, 1, -1), r"padding=-1 must be a whole number of at least 0"),
    (lambda: conv(0, 3, 4, 6, 3), r"in_types must be a whole number of 1 or more, not 0"),
    (lambda: conv(True, 3, 4, 6, 3), r"in_types must be a whole number of 1 or more, not True"),
    (lambda: conv(2, True, 4, 6, 3), r"out_types must be a whole number of 1 or more, not True"),
    (lambda: conv(2, 3, 4, 6, 3, 1.5), r"stride=1.5 must be a whole number of at least 1"),
    (lambda: conv(2, 3, 4, 6, 3, 1, False), r"padding=False must be a whole number of at least 0"),
    (lambda: conv(spatial_dims=True), r"ConvCapsules: spatial_dims=True must be 1, 2 or 3"),
    (lambda: conv(init="xavier"), r"ConvCapsules: init must be a standard deviation .* not 'xavier'"),
    (lambda: conv(2, 0, 4, 6, 3), r"out_types must be a whole number of 1 or more, not 0"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_a_mistake_is_answered_at_the_door_with_both_sides_and_the_way_out(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()
