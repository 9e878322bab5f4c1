"""Poses moved through the decoder and laid out as points, the decoder held to account, pixels that matter, figures."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from explained_models import capsnet, model_and_images
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps import create_model
from torchcaps.explain import (
    attribution_forward,
    class_poses,
    coupling_maps,
    decoder_check,
    draws,
    look,
    occlusion,
    parse_tree,
    pictures,
    pose_map,
    pose_sweep,
    principal_directions,
    reconstructions,
    redraw,
    routing_trace,
    saliency,
    scores_per_round,
)
from torchcaps.routing import EM, Dynamic
from torchcaps.types import Capsules

DRAWING = ["capsnet", "capsnet_attention", "capsnet_em"]


@pytest.mark.parametrize("name", DRAWING)
def test_a_sweep_draws_the_pose_moved_along_each_direction(name: str) -> None:
    model: Any
    model, images = model_and_images(name, 1)
    sweep = pose_sweep(model, images[0])
    with torch.no_grad():
        capsules = model.capsules(images)
        best = int(model(images).argmax())
        label = torch.tensor([best])
        still = model.reconstruct(capsules, label)[0]
        numbers = capsules.poses[0, 0].numel()
        assert sweep.capsule == best
        assert sweep.images.shape == (numbers, 11, 1, 13, 11)
        assert sweep.values.tolist() == pytest.approx([0.05 * s for s in range(-5, 6)])
        torch.testing.assert_close(sweep.still, still)
        torch.testing.assert_close(sweep.images[:, 5], still.expand(numbers, 1, 13, 11))
        for number in range(numbers):
            poses = capsules.poses.clone()
            poses[0, best].view(-1)[number] += 0.25
            moved = model.reconstruct(Capsules(poses, capsules.activations), label)[0]
            torch.testing.assert_close(sweep.images[number, 10], moved)
            change = (sweep.images[number] - still).square().flatten(1).mean(1).sqrt().max()
            torch.testing.assert_close(sweep.effect[number], change)


def test_a_sweep_takes_another_capsule_and_other_directions() -> None:
    model: Any
    model, images = model_and_images("capsnet", 1)
    direction = torch.tensor([[0.6, 0.0, 0.8, 0.0, 0.0]])
    sweep = pose_sweep(model, images, 2, values=(-1.0, 0.5), directions=direction)
    with torch.no_grad():
        capsules = model.capsules(images)
        pose = capsules.poses[0, 2].flatten()
        drawn = redraw(model, capsules, 2, torch.stack([pose - direction[0], pose + 0.5 * direction[0]]))
    torch.testing.assert_close(sweep.images[0], drawn)
    with pytest.raises(ValueError, match=r"directions \[1, 4\] must be \[D, 5\]"):
        pose_sweep(model, images, directions=direction[:, :4])
    with pytest.raises(ValueError, match="one image at a time"):
        pose_sweep(model, images.repeat(2, 1, 1, 1))
    with pytest.raises(ValueError, match=r"give \[M, 5\], a capsule of 0 to 3"):
        redraw(model, capsules, 4, pose[None])


def test_a_model_without_a_decoder_says_so() -> None:
    model = capsnet(Dynamic.sabour(), decoder=False)
    assert not draws(model)
    assert not draws(create_model("su_capsnet"))
    assert draws(capsnet(Dynamic.sabour()))
    for ask in (lambda: pose_sweep(model, torch.rand(1, 13, 11)), lambda: reconstructions(model, *[torch.rand(1)] * 2)):
        with pytest.raises(ValueError, match="has no decoder to draw with: build it with decoder=True"):
            ask()
    with pytest.raises(ValueError, match="has no class capsules"):
        class_poses(nn.Flatten(), torch.rand(1, 2))


def test_class_poses_are_those_of_the_label_or_of_the_highest_score() -> None:
    model: Any
    model, images = model_and_images("capsule_head", 4)
    with torch.no_grad():
        poses, best = model.capsules(images).poses, model(images).argmax(1)
    assert torch.equal(class_poses(model, images), torch.stack([p[k] for p, k in zip(poses, best, strict=True)]))
    assert torch.equal(class_poses(model, images, torch.tensor([3, 0, 1, 2]))[1], poses[1, 0])


def test_principal_directions_are_those_of_the_covariance() -> None:
    poses = torch.randn(60, 2, 3, dtype=torch.float64) * torch.arange(1.0, 4.0)
    directions, deviations = principal_directions(poses)
    covariance = torch.cov(poses.flatten(1).T)
    torch.testing.assert_close(covariance @ directions.T, directions.T * deviations.square())
    assert (deviations.diff() <= 0).all()
    assert (directions.gather(1, directions.abs().argmax(1, keepdim=True)) > 0).all()
    few, _ = principal_directions(poses, 2)
    assert torch.equal(few, directions[:2])
    with pytest.raises(ValueError, match="2 poses or more, not 1"):
        principal_directions(poses[:1])


def test_reconstructions_mark_what_was_read_wrongly() -> None:
    model: Any
    model, images = model_and_images("capsnet", 5)
    with torch.no_grad():
        said, drawn = model(images).argmax(1), model.reconstruct(model.capsules(images))
    labels = said.clone()
    labels[[1, 3]] = (said[[1, 3]] + 1) % 4
    found = reconstructions(model, images, labels)
    assert found.wrong.tolist() == [False, True, False, True, False]
    torch.testing.assert_close(found.drawn, drawn)
    torch.testing.assert_close(found.error, (drawn - images).square().mean((1, 2, 3)))
    figure = pictures.draw_reconstructions(found, ["a", "b", "c", "d"], columns=3)
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    names = "abcd"
    assert [", not " in title for title in titles] == found.wrong.tolist()
    assert titles[1] == f"{names[labels[1]]}, not {names[said[1]]}"
    framed = sum(ax.spines["left"].get_linewidth() > 1 and ax.spines["left"].get_visible() for ax in figure.axes)
    assert framed == 2 * 2


class Plays(nn.Module):
    """Draws what it was shown plus an error."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error, self.decoder = error, nn.Identity()

    def capsules(self, x: Tensor) -> Capsules:
        return Capsules(x.flatten(1)[:, None, None, :])

    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        return capsules.poses.flatten(1).unflatten(1, (1, 4, 4)) + self.error


def test_a_decoder_is_believed_that_does_as_well_as_principal_components() -> None:
    torch.manual_seed(1)
    basis = torch.randn(20, 16)
    train, test = (torch.randn(n, 20) @ basis + 1 for n in (300, 50))
    train, test = train.unflatten(1, (1, 4, 4)), test.unflatten(1, (1, 4, 4))
    good = decoder_check(Plays(0.0), test, train)
    assert good.numbers == 16
    assert good.decoder == 0.0
    assert good.components == pytest.approx(0.0, abs=1e-9)  # as many components as pixels
    mean = train.double().mean(0)
    assert good.mean_image == pytest.approx(float((test - mean).square().mean()))
    bad = decoder_check(Plays(0.1), test, train)
    assert (good.believed, bad.believed) == (True, False)
    assert bad.decoder == pytest.approx(0.01, rel=1e-4)


def test_components_of_a_check_are_scikit_learns() -> None:
    from sklearn.decomposition import PCA

    model, images = model_and_images("capsnet", 30)
    train = torch.rand(40, 1, 13, 11)
    found = decoder_check(model, images, train)
    pca = PCA(5).fit(train.flatten(1).double().numpy())
    flat = images.flatten(1).double().numpy()
    again = pca.inverse_transform(pca.transform(flat))
    assert found.numbers == 5
    assert found.components == pytest.approx(float(np.square(again - flat).mean()))


def test_a_map_of_poses_keeps_what_is_near() -> None:
    torch.manual_seed(2)
    centres = 5 * torch.randn(3, 1, 8)
    poses = torch.cat([centre + 0.1 * torch.randn(20, 1, 8) for centre in centres])
    labels = torch.arange(3).repeat_interleave(20)
    flat = pose_map(poses)
    assert flat.explained is not None
    assert 0.9 < sum(flat.explained) <= 1.0
    variance = (poses.flatten(1) - poses.flatten(1).mean(0)).square().sum()
    assert float(flat.points.square().sum() / variance) == pytest.approx(sum(flat.explained), rel=1e-4)
    for found in (flat, pose_map(poses, "tsne")):
        distance = torch.cdist(found.points, found.points).fill_diagonal_(torch.inf)
        assert (labels[distance.argmin(1)] == labels).all()
    assert torch.equal(pose_map(poses, "tsne", seed=3).points, pose_map(poses, "tsne", seed=3).points)
    assert pose_map(poses[:3], "tsne").points.shape == (3, 2)
    with pytest.raises(ValueError, match="3 poses or more"):
        pose_map(poses[:2])
    with pytest.raises(ValueError, match="method='umap'"):
        pose_map(poses, "umap")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["capsnet", "su_capsnet", "em_capsnet", "concurrent"])
def test_saliency_is_the_slope_of_the_score(name: str) -> None:
    model, images = model_and_images(name, 2)
    before = [p.grad for p in model.parameters()]
    found = saliency(model, images, torch.tensor([1, 0]))
    assert found.shape == (2, *images.shape[2:])
    double = model.double()
    n, pixel = 0, (int(found[0].argmax()) // found.shape[2], int(found[0].argmax()) % found.shape[2])
    slopes = []
    for channel in range(images.shape[1]):
        ends = []
        for step in (1e-5, -1e-5):
            x = images.double()
            x[(n, channel, *pixel)] += step
            with torch.no_grad():
                ends.append(float(double(x)[n, 1]))
        slopes.append(abs(ends[0] - ends[1]) / 2e-5)
    assert float(found[(n, *pixel)]) == pytest.approx(max(slopes), rel=2e-2)
    assert [p.grad for p in model.parameters()] == before


def test_integrated_gradients_add_up_to_the_difference_of_scores() -> None:
    model, images = model_and_images("capsnet", 1)
    forward = attribution_forward(model.double().train())
    images = images.double()
    steps = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    x = (steps[:, None, None, None] * images).requires_grad_(True)
    (gradient,) = torch.autograd.grad(forward(x)[:, 2].sum(), x)
    total = float((gradient.mean(0) * images[0]).sum())
    with torch.no_grad():
        difference = forward(images)[0, 2] - forward(torch.zeros_like(images))[0, 2]
    assert total == pytest.approx(float(difference), rel=1e-3)
    assert model.training  # as it was


def test_captum_takes_the_forward_of_a_model() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    model, images = model_and_images("capsnet", 2)
    found = captum.Saliency(attribution_forward(model)).attribute(images.requires_grad_(), target=torch.tensor([1, 0]))
    torch.testing.assert_close(found.amax(1), saliency(model, images, torch.tensor([1, 0])))


def texts(figure: Figure) -> list[str]:
    figure.canvas.draw()
    found = [t.get_text() for ax in figure.axes for t in (*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label)]
    found += [t.get_text() for ax in figure.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels())]
    return found + [t.get_text() for t in figure.texts]


def test_figures_show_the_numbers_that_were_found() -> None:
    model, images = model_and_images("capsnet", 3)
    names = ["ant", "bee", "cat", "dog"]
    maps = coupling_maps(model, images)
    figure = pictures.draw_coupling(maps, images, 1, parents=[3, 0], names=names)
    assert len(figure.axes) == 2 * (1 + 3)
    assert {"dog", "ant", "round 3"} <= set(texts(figure))
    heat = figure.axes[3].images[-1]
    assert heat.get_array().shape == (13, 11)
    assert float(heat.get_array().max()) == pytest.approx(float(maps.by_place()[2, 1, 3].max()), rel=0.2)
    assert heat.get_clim()[1] == pytest.approx(float(maps.by_place()[:, 1, [3, 0]].max()))

    tree = parse_tree(model, images[0], 1, top=3)
    said = texts(pictures.draw_tree(tree, names))
    assert f"bee\n{tree.presence:.2f}" in said
    assert all(f"{part.share:.2f}" in said for part in tree.parts)

    scores = scores_per_round(model, images)[:, 0]
    bars = pictures.draw_scores(scores, names, label=2).axes[0]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(scores.flatten().tolist())
    assert [t.get_fontweight() for t in bars.get_yticklabels()] == ["normal", "normal", "bold", "normal"]

    sweep = pose_sweep(model, images[0])
    drawn = pictures.draw_sweep(sweep, rows=[4, 0]).axes[0]
    assert [t.get_text() for t in drawn.get_yticklabels()] == ["4", "0"]
    tiles = np.asarray(drawn.images[0].get_array())
    assert tiles.shape == (2 * 14, 11 * 12)
    np.testing.assert_allclose(tiles[14:27, 12:23], sweep.images[0, 1, 0].numpy())

    trace = routing_trace(model, images)
    left, right = pictures.draw_trace(trace, 2, names, parent=1).axes
    np.testing.assert_allclose(left.lines[0].get_ydata(), trace.entropy[:, 2])
    np.testing.assert_allclose(right.lines[-1].get_ydata(), trace.agreement[:, 2, 1])

    parts = occlusion(model, images[0])
    shown = pictures.draw_occlusion(parts, images[0], 2, names=names).axes[0]
    assert shown.get_title() == "what each place adds to cat"
    assert shown.images[-1].get_clim() == pytest.approx((-float(parts.drop[..., 2].abs().max()),
                                                         float(parts.drop[..., 2].abs().max())))  # fmt: skip
    with pytest.raises(ValueError, match="has no places on an image"):
        pictures.draw_occlusion(occlusion(model, images[0], over="types"), images[0], 2)

    points = pose_map(class_poses(model, images))
    assert {"ant", "dog"} <= set(texts(pictures.draw_pose_map(points, torch.tensor([0, 3, 3]), names)))


def test_a_coupling_map_needs_places_on_an_image() -> None:
    model, images = model_and_images("su_capsnet")
    with pytest.raises(ValueError, match="lie along 0 axes: a map over an image has two"):
        pictures.draw_coupling(coupling_maps(model, images), images)
    assert len(pictures.draw_coupling(coupling_maps(model, images, places=(2, 3)), images).axes) == 3 * 4


def test_pictures_of_any_channels_and_range_can_be_shown() -> None:
    assert pictures.picture(torch.rand(3, 4, 5)).shape == (4, 5, 3)
    assert pictures.picture(torch.rand(2, 4, 5)).shape == (4, 5)
    stretched = pictures.picture(torch.tensor([[[-1.0, 3.0]]]))
    assert stretched.tolist() == [[0.0, 1.0]]
    assert pictures.picture(torch.full((1, 2, 2), 7.0)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_tree_of_many_layers_is_drawn() -> None:
    model, images = model_and_images("em_capsnet", 1)
    figure = pictures.draw_tree(parse_tree(model, images, top=2))
    assert sum("type" in text for text in texts(figure)) == 2 + 4 + 8


def test_em_capsules_are_explained_by_their_activations() -> None:
    model: Any = capsnet(EM.hinton(), primary_pose=(2, 2), class_pose=(2, 2)).eval()
    image = torch.rand(1, 1, 13, 11)
    with torch.no_grad():
        children = model.primary(model.stem(image))
    assert torch.equal(look(model, image).of()[0].presence, children.activations)


@pytest.mark.parametrize(
    "broken",
    [torch.zeros(0, 1, 13, 11), torch.zeros(2, 1, 13, 11, dtype=torch.uint8), torch.full((2, 1, 13, 11), torch.nan)],
    ids=["none", "bytes", "nan"],
)
def test_what_are_no_images_is_refused_by_all_that_look(broken: Tensor) -> None:
    model, images = model_and_images("capsnet", 8)
    labels = torch.zeros(len(broken), dtype=torch.long)
    for looks in (
        lambda: coupling_maps(model, broken),
        lambda: routing_trace(model, broken),
        lambda: saliency(model, broken),
        lambda: reconstructions(model, broken, labels),
        lambda: decoder_check(model, broken, images),
        lambda: decoder_check(model, images, broken),
        lambda: pose_sweep(model, broken[:1]),
    ):
        with pytest.raises(ValueError, match=r"images must be|one image at a time"):
            looks()
    for labels in (torch.tensor([0]), torch.full((8,), 4), torch.full((8,), -1), torch.zeros(8)):
        for looks in (saliency, class_poses, reconstructions):
            with pytest.raises(ValueError, match=r"must be 8 of torch.long, of classes 0 to 3"):
                looks(model, images, labels)
    with pytest.raises(ValueError, match="capsule 4 is not there: the classes are 0 to 3"):
        pose_sweep(model, images[0], 4)


def test_saliency_works_where_gradients_are_off() -> None:
    model, images = model_and_images("capsnet")
    wanted = saliency(model, images)
    with torch.inference_mode():
        assert torch.equal(saliency(model, images), wanted)


def test_names_are_never_read_as_formulas() -> None:
    model, images = model_and_images("capsnet")
    names = ["$\\frac$", "5$", "10$", "x^2_{$"]
    scores = scores_per_round(model, images)[:, 0]
    for figure in (
        pictures.draw_scores(scores, names),
        pictures.draw_tree(parse_tree(model, images[0]), names),
        pictures.draw_reconstructions(reconstructions(model, images, torch.tensor([1, 2])), names),
    ):
        figure.savefig(io.BytesIO(), format="png")
    with pytest.raises(ValueError, match="there are 2 names, and none for class 2"):
        pictures.draw_scores(scores, names[:2])
