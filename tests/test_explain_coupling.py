"""Coupling made readable: maps add up, trees tell the model's own numbers, and a child left out is a child removed."""

import itertools
import math
from typing import Any

import pytest
import torch
from explained_models import MODELS, capsnet, model_and_images
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from torchcaps import create_model
from torchcaps.explain import (
    Part,
    coupling_maps,
    look,
    occlude,
    occlusion,
    over_image,
    parse_tree,
    receptive_fields,
    routing_trace,
    scores_per_round,
)
from torchcaps.explain.watching import Seen, routed_layers
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.types import Capsules

every_model = pytest.mark.parametrize("name", MODELS)
RULES = {"dynamic": Dynamic.sabour(), "attention": Attention.tsai(iterations=2), "em": EM.hinton()}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def windows_that_see(call: Seen) -> Tensor:
    """How many windows of a convolution see each child, `[*spatial]`, counted one by one."""
    assert call.windows is not None
    spatial = call.children.spatial
    count = torch.zeros(spatial)
    for place in itertools.product(*map(range, call.windows.out(spatial))):
        corners = [o * s - p for o, s, p in zip(place, call.windows.stride, call.windows.padding, strict=True)]
        count[tuple(slice(max(0, c), c + k) for c, k in zip(corners, call.windows.kernel, strict=True))] += 1
    return count


@every_model
def test_shares_add_up_to_what_the_rule_states(name: str) -> None:
    model, images = model_and_images(name)
    for layer in routed_layers(model):
        maps = coupling_maps(model, images, layer)
        call = look(model, images).of(layer)[0]
        if call.rule.sums_to == "children":
            total = maps.shares.flatten(3).sum(3)
            torch.testing.assert_close(total, torch.ones_like(total))
            continue
        assert maps.sums_to == "parents"
        total = maps.shares.sum(2)  # [T, N, C, *spatial]
        stated = torch.ones_like(total)
        if call.windows is not None:
            seen = windows_that_see(call)
            all_compete = getattr(routed_layers(model)[layer], "competition", "") == "all"
            stated = (seen.clamp(max=1) if all_compete else seen).expand_as(total)
        torch.testing.assert_close(total, stated)


@every_rule
def test_coupling_maps_are_the_coupling_of_the_layer_laid_out_over_its_children(rule: Any) -> None:
    settings = {"primary_pose": (2, 2), "class_pose": (2, 2)} if isinstance(rule, EM) else {}
    model, images = capsnet(rule, **settings).eval(), torch.rand(2, 1, 13, 11)
    with torch.no_grad():
        children = model.primary(model.stem(images))
        routed = model.class_caps.route(children, return_coupling="all", backend="reference")
    maps = coupling_maps(model, images)
    for t, n, j, c, y, x in itertools.product(range(len(routed.coupling)), range(2), range(4), (0, 1), (0, 3), (0, 2)):
        assert maps.shares[t, n, j, c, y, x] == routed.coupling[t, n, (c * 4 + y) * 3 + x, j]
    presence = children.lengths if children.activations is None else children.activations
    torch.testing.assert_close(maps.presence[-1], presence)
    torch.testing.assert_close(maps.by_place(), (maps.shares * presence[:, None]).sum(3))
    torch.testing.assert_close(maps.by_type(), (maps.shares * presence[:, None]).sum((-1, -2)))


def test_children_in_a_list_are_laid_out_where_they_lie() -> None:
    model, images = model_and_images("su_capsnet")
    in_a_list = coupling_maps(model, images)
    maps = coupling_maps(model, images, places=(2, 3))
    assert in_a_list.by_type().shape == (3, 2, 10, 6)
    assert maps.shares.shape == (3, 2, 10, 1, 2, 3)
    assert torch.equal(maps.shares.flatten(3), in_a_list.shares)
    with pytest.raises(ValueError, match=r"places=\(4, 4\) does not lay out children \[6\]"):
        coupling_maps(model, images, places=(4, 4))


def test_one_parent_of_a_convolution_hears_its_window_alone() -> None:
    model, images = model_and_images("sequential")
    whole = coupling_maps(model, images, "layers.1")
    places = [(y, x) for y in range(3) for x in range(4)]
    each = [coupling_maps(model, images, "layers.1", parent_at=place).shares for place in places]
    torch.testing.assert_close(sum(each), whole.shares)
    one = torch.zeros_like(whole.shares, dtype=torch.bool)
    one[..., 1:4, 2:5] = True
    assert torch.equal(each[places.index((1, 2))] > 0, one)
    with pytest.raises(ValueError, match=r"parents at places 0 .. \[2, 3\], not at \(3, 0\)"):
        coupling_maps(model, images, "layers.1", parent_at=(3, 0))
    with pytest.raises(ValueError, match="has no places: each of its parents hears all children"):
        coupling_maps(model, images, parent_at=(0, 0))


def all_parts(tree: Part) -> list[Part]:
    return [tree, *(part for child in tree.parts for part in all_parts(child))]


@every_rule
def test_the_numbers_of_a_tree_are_those_of_the_model(rule: Any) -> None:
    settings = {"primary_pose": (2, 2), "class_pose": (2, 2)} if isinstance(rule, EM) else {}
    model, image = capsnet(rule, **settings).eval(), torch.rand(1, 1, 13, 11)
    with torch.no_grad():
        children = model.primary(model.stem(image)).flatten()
        routed = model.class_caps.route(children, return_coupling=True, backend="reference")
        classes = routed.capsules
        scores = model(image)[0]
    tree = parse_tree(model, image[0], top=3)
    best = int(scores.argmax())
    assert (tree.layer, tree.type, tree.place, tree.share) == ("class_caps", best, (), None)
    told = classes.lengths if classes.activations is None else classes.activations
    assert tree.presence == pytest.approx(float(told[0, best]), rel=1e-5)
    there = (children.lengths if children.activations is None else children.activations)[0]
    flow = routed.coupling[0, :, best] * there
    strongest = flow.argsort(descending=True)[:3].tolist()
    assert [(part.type * 4 + part.place[0]) * 3 + part.place[1] for part in tree.parts] == strongest
    for part, i in zip(tree.parts, strongest, strict=True):
        assert part.share == pytest.approx(float(routed.coupling[0, i, best]), rel=1e-5)
        assert part.presence == pytest.approx(float(there[i]), rel=1e-5)
        assert part.flow == pytest.approx(float(flow[i]), rel=1e-5)
        assert (part.layer, part.parts) == (None, ())
    assert tree.covered == pytest.approx(float(flow[strongest].sum() / flow.sum()), rel=1e-5)


@pytest.mark.parametrize("name", ["sequential", "concurrent", "em_capsnet", "em_window"])
def test_a_tree_goes_down_through_all_layers_to_the_primary_capsules(name: str) -> None:
    model, images = model_and_images(name)
    tree = parse_tree(model, images[:1], parent=2, top=2)
    layers = [*routed_layers(model)]
    level, depth = [tree], 0
    while level[0].parts:
        assert {part.layer for part in level} == {layers[len(layers) - 1 - depth]}
        assert all(len(part.parts) == 2 for part in level)
        assert all(part.flow == pytest.approx(part.share * part.presence) for part in level[1:])
        level, depth = [child for part in level for child in part.parts], depth + 1
    assert depth == len(layers)
    assert {part.layer for part in level} == {None}
    call = look(model, images[:1]).of(layers[0])[0]
    primary = call.presence[0]
    assert all(part.presence == pytest.approx(float(primary[(part.type, *part.place)])) for part in level)


def test_a_tree_of_what_is_not_there_is_refused() -> None:
    model, images = model_and_images("capsnet")
    with pytest.raises(ValueError, match="parent=4: the classes are numbered 0 to 3"):
        parse_tree(model, images[0], 4)
    with pytest.raises(ValueError, match="one image at a time"):
        parse_tree(model, images)
    with pytest.raises(ValueError, match="top=0"):
        parse_tree(model, images[0], top=0)


def fewer(x: Tensor | None, child: int, dim: int = 1) -> Tensor | None:
    """Without one child."""
    return (
        None
        if x is None
        else torch.cat([x.narrow(dim, 0, child), x.narrow(dim, child + 1, x.shape[dim] - child - 1)], dim)
    )


@every_rule
def test_leaving_a_child_out_is_routing_with_one_child_fewer(rule: Any) -> None:
    settings = {"primary_pose": (2, 2), "class_pose": (2, 2)} if isinstance(rule, EM) else {}
    model, image = capsnet(rule, **settings).eval(), torch.rand(1, 1, 13, 11)
    drop = occlusion(model, image[0], over="children")
    with torch.no_grad():
        children = model.primary(model.stem(image)).flatten()
        for child in range(24):
            routed = rule(
                fewer(children.poses, child), fewer(model.class_caps.weight, child, 0),
                fewer(children.activations, child), **model.class_caps.learned,
            )  # fmt: skip
            scores = model._score(routed.capsules)[0]
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(child), (2, 4, 3)))
            torch.testing.assert_close(drop.without[place], scores, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(drop.drop, model(image)[0] - drop.without, rtol=1e-4, atol=1e-6)


def test_leaving_out_children_with_a_shared_weight_is_a_list_without_them() -> None:
    model, images = model_and_images("su_capsnet", 1)
    found = occlusion(model, images, over="types")
    with torch.no_grad():
        children = look(model, images).seen[0].children
        for child in range(6):
            scores = model.class_caps(Capsules(fewer(children.poses, child))).lengths[0]
            torch.testing.assert_close(found.without[child], scores, rtol=1e-4, atol=1e-6)


def test_leaving_out_a_child_of_a_convolution_is_each_window_without_it() -> None:
    model, images = model_and_images("sequential", 1)
    layer: Any = model.layers[0]
    gone = torch.zeros(1, 3, 12, 13, dtype=torch.bool)
    gone[0, 1, 4, 5] = True
    with torch.no_grad():
        children = model.primary(model.backbone(images))
        entries, left_out = layer.windows.unfold(children.poses), layer.windows.unfold(gone)
        parents = []
        for poses, out in zip(entries, left_out, strict=True):
            parents.append(layer.routing(poses[None, ~out], layer.weight[~out]).poses[0])
        out_size = layer.out_size((12, 13))
        above = Capsules(torch.stack(parents).unflatten(0, (1, *out_size)).movedim(3, 1))
        for next_layer in list(model.layers)[1:]:
            above = next_layer(above)
        scores = model.readout(above.poses.flatten(-2)).squeeze(-1)
    torch.testing.assert_close(occlude(model, images, gone, "layers.0"), scores, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(scores, look(model, images).scores, rtol=1e-4, atol=1e-5)


@every_model
def test_what_an_absent_child_held_changes_nothing(name: str) -> None:
    model, images = model_and_images(name, 1)
    layer = next(iter(routed_layers(model)))
    children = look(model, images).of(layer)[0].children
    absent = torch.zeros(children.poses.shape[:-2], dtype=torch.bool)
    absent.view(-1)[3] = True
    inner: Any = routed_layers(model)[layer]
    scores = occlude(model, images, absent, layer)
    before = inner.route

    def spoiled(capsules: Capsules, *arguments: Any, **settings: Any) -> Any:
        poses = capsules.poses.masked_fill(absent[..., None, None], torch.nan)
        return before(Capsules(poses, capsules.activations), *arguments, **settings)

    inner.route = spoiled
    assert torch.equal(occlude(model, images, absent, layer), scores)
    assert not look(model, images).scores.isfinite().all()


@every_model
@pytest.mark.parametrize("over", ["types", "places"])
def test_occlusion_leaves_out_a_group_at_a_time(name: str, over: Any) -> None:
    model, images = model_and_images(name, 1)
    if over == "places" and name in ("su_capsnet", "sequential"):
        with pytest.raises(ValueError, match="a list without places: take over='children'"):
            occlusion(model, images, over=over)
        return
    found = occlusion(model, images, over=over, chunk=5)
    places = look(model, images).of()[-1].children.poses.shape[1:-2]
    assert found.without.shape[:-1] == (places[:1] if over == "types" else places[1:])
    absent = torch.zeros(1, *places, dtype=torch.bool)
    if over == "types":
        absent[:, 1] = True
        one = found.without[1]
    else:
        absent[..., -1, 0] = True
        one = found.without[-1, 0]
    torch.testing.assert_close(occlude(model, images, absent)[0], one)


def test_other_groups_are_refused() -> None:
    model, images = model_and_images("capsnet", 1)
    with pytest.raises(ValueError, match="over='parts'"):
        occlusion(model, images, over="parts")  # type: ignore[arg-type]


def test_a_place_sees_the_pixels_that_its_convolutions_reach() -> None:
    model = capsnet(Dynamic.sabour())  # 4x4, then 3x3 with stride 2: 6 pixels in steps of 2
    fields = receptive_fields(model, (1, 13, 11))
    assert fields is not None
    assert fields[0].tolist() == [[0, 5], [2, 7], [4, 9], [6, 11]]
    assert fields[1].tolist() == [[0, 5], [2, 7], [4, 9]]
    x = torch.rand(1, 1, 13, 11)
    y = x.clone()
    y[..., :2, :] = 0.0  # what only the first row of places sees
    with torch.no_grad():
        same = (model.primary(model.stem(x)).poses == model.primary(model.stem(y)).poses).all((0, 1, 3, 4, 5))
    assert same.tolist() == [False, True, True, True]


def test_places_without_a_field_of_their_own_are_told_from_those_that_have_one() -> None:
    assert receptive_fields(model_and_images("su_capsnet")[0], (1, 17, 19)) is None  # a list
    em, _ = model_and_images("em_capsnet")  # windows compete, and so each parent hears all of the map
    assert receptive_fields(em, (1, 23, 25), "class_caps") is None
    fields = receptive_fields(em, (1, 23, 25), "conv_caps.0")
    assert fields is not None
    assert fields[0][:2].tolist() == [[0, 4], [2, 6]]
    padded = create_model("inverted_attention_simple", in_chans=1, image_size=(9, 8), backbone_channels=4,
                          primary_types=2, conv_caps=((3, 3, 1),))  # fmt: skip
    fields = receptive_fields(padded, (1, 9, 8), "layers.0")  # 3x3, stride 2, padding 1
    assert fields is not None
    assert fields[0].tolist() == [[0, 1], [1, 3], [3, 5], [5, 7], [7, 8]]
    assert fields[1].tolist() == [[0, 1], [1, 3], [3, 5], [5, 7]]


def test_a_map_over_an_image_has_its_values_where_its_places_look() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [5.0, 6.0, 8.0]])
    fields = torch.tensor([[0, 4], [4, 8]]), torch.tensor([[0, 2], [4, 6], [8, 10]])
    over = over_image(values, (9, 12), fields)
    assert over[2, 1] == 1.0
    assert over[6, 9] == 8.0
    assert over[4, 1] == 3.0  # half-way down
    assert over[2, 7] == 3.0  # half-way along
    assert over[:, 11].isfinite().all()
    assert over[0].isfinite().all()
    narrow = over_image(values, (20, 12), fields)
    assert narrow[9:].isnan().all()
    assert narrow[:9].isfinite().all()
    stretched = over_image(values, (4, 6))
    assert stretched.isfinite().all()
    torch.testing.assert_close(stretched[0], torch.tensor([1.0, 1.25, 1.75, 2.5, 3.5, 4.0]))
    assert over_image(torch.ones(1, 1), (5, 3)).tolist() == torch.ones(5, 3).tolist()


@every_model
def test_traces_tell_entropy_and_agreement_as_they_are_defined(name: str) -> None:
    model, images = model_and_images(name)
    for layer in routed_layers(model):
        trace = routing_trace(model, images, layer)
        t = 0
        for call in look(model, images).of(layer):
            votes = call.votes()
            for rounds in range(1, len(call.coupling) + 1):
                c, parents = call.coupling[rounds - 1], call.after(rounds).poses
                per = len(c) // len(images)  # windows of an image
                for n in range(len(images)):
                    entropies, agreement = [], torch.zeros(c.shape[2])
                    for w in range(n * per, (n + 1) * per):
                        for shares in c[w]:
                            if shares.sum() > 0:
                                p = (shares / shares.sum()).tolist()
                                entropies.append(-sum(q * math.log(q) for q in p if q > 0) / math.log(len(p)))
                        cos = cosine_similarity(votes[w].flatten(2), parents[w].flatten(1)[None], dim=2)
                        agreement += (c[w] * cos).sum(0) / c[w].sum(0).clamp(min=1e-30) / per
                    assert float(trace.entropy[t, n]) == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
                    torch.testing.assert_close(trace.agreement[t, n], agreement, rtol=1e-4, atol=1e-5)
                t += 1
        assert len(trace.entropy) == t
        if look(model, images).of(layer)[0].rule.sums_to == "parents":
            torch.testing.assert_close(trace.entropy[0], torch.ones(2))


@every_model
def test_scores_per_round_end_with_the_models_own(name: str) -> None:
    model, images = model_and_images(name)
    scores = scores_per_round(model, images)
    with torch.no_grad():
        torch.testing.assert_close(scores[-1], model(images), rtol=1e-4, atol=1e-5)
    last = look(model, images).of()[-1].layer
    torch.testing.assert_close(scores[0], look(model, images, rounds={last: 1}).scores)
    assert len(scores) > 1
    assert not torch.allclose(scores[0], scores[-1])


def test_a_model_that_routes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no capsule layers"):
        coupling_maps(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.rand(1, 1, 2, 2))
    with pytest.raises(ValueError, match="no capsule layers"):
        occlusion(create_model("linear_head"), torch.rand(1, 1, 28, 28))
