"""What the numbers of a pose mean: moved through the decoder, laid out as points, and whether to believe the decoder.

sweep    image_{d,s} = decoder(v + s e_d),  e_d the d-th number of the pose, or a principal direction of such poses;
         Sabour, Frosst, Hinton 2017, figure 4, has s in -0.25 .. 0.25 in steps of 0.05
check    the decoder's squared error against that of a principal component analysis with as many numbers as a pose
         has, fitted to training images. It is linear and knows no class: a decoder that does worse than that is not
         to be believed, and neither are pictures made with it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from torchcaps.explain.watching import check_images, check_labels, evaluating
from torchcaps.types import Capsules

__all__ = [
    "DecoderCheck", "PoseMap", "PoseSweep", "Reconstructions", "class_poses", "decoder_check", "draws", "pose_map",
    "pose_sweep", "principal_directions", "reconstructions", "redraw",
]  # fmt: skip

STEPS = tuple(round(0.05 * s, 2) for s in range(-5, 6))
"""-0.25 to 0.25, as in the paper."""


@runtime_checkable
class HasCapsules(Protocol):
    """A model that gives its class capsules."""

    def capsules(self, x: Tensor) -> Capsules: ...


@runtime_checkable
class Reconstructs(HasCapsules, Protocol):
    """A model that draws images from its class capsules."""

    decoder: nn.Module | None

    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor: ...


def draws(model: nn.Module) -> bool:
    """Whether the model has a decoder, which pictures of poses need."""
    return isinstance(model, Reconstructs) and model.decoder is not None


def class_poses(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """Poses `[N, R, Q]` of each image's own class capsule: that of its label `[N]`, or of the highest score.

    Raises ValueError for a model without capsules, and for labels that are no class for each image.
    """
    if not isinstance(model, HasCapsules):
        raise ValueError(f"{type(model).__name__} has no class capsules")
    with torch.no_grad(), evaluating(model):
        chosen = _scores(model, images).argmax(1) if labels is None else labels
        poses = model.capsules(images).poses
        check_labels(chosen, images, poses.shape[1])
    return poses[torch.arange(len(poses), device=poses.device), chosen]


@dataclass(frozen=True)
class PoseSweep:
    """Images drawn as a pose moves.

    capsule     the class whose pose moves.
    directions  `[D, R * Q]`, one a row.
    values      `[S]`, how far along each.
    images      `[D, S, C, H, W]`.
    still       `[C, H, W]`, drawn from the pose as it is.
    """

    capsule: int
    directions: Tensor
    values: Tensor
    images: Tensor
    still: Tensor

    @property
    def effect(self) -> Tensor:
        """`[D]`, the largest root-mean-square change of a pixel along each direction."""
        return (self.images - self.still).square().flatten(2).mean(2).sqrt().amax(1)


def pose_sweep(
    model: nn.Module,
    image: Tensor,
    capsule: int | None = None,
    *,
    values: Sequence[float] = STEPS,
    directions: Tensor | None = None,
) -> PoseSweep:
    """Move the pose of one class capsule of one image `[C, H, W]` and draw what comes of it.

    capsule     the class; None is the one with the highest score.
    values      how far to go along each direction.
    directions  `[D, R * Q]`; None moves each number by itself. `principal_directions` gives others.

    Raises ValueError for a model without a decoder, another capsule, and directions that do not fit.
    """
    image = image if image.dim() > 3 else image[None]
    if len(image) != 1:
        raise ValueError(f"one image at a time, [C, H, W] or [1, C, H, W], not {list(image.shape)}")
    drawing = _drawing(model)
    check_images(image)
    with torch.no_grad(), evaluating(model):
        found = drawing.capsules(image)
        if capsule is not None and not 0 <= capsule < found.poses.shape[1]:
            raise ValueError(f"capsule {capsule} is not there: the classes are 0 to {found.poses.shape[1] - 1}")
        chosen = int(_scores(model, image)[0].argmax()) if capsule is None else capsule
        pose = found.poses[0, chosen].flatten()
        if directions is None:
            directions = torch.eye(len(pose), device=pose.device, dtype=pose.dtype)
        if directions.dim() != 2 or directions.shape[1] != len(pose):
            raise ValueError(f"directions {list(directions.shape)} must be [D, {len(pose)}], numbers of a pose")
        steps = torch.tensor(list(values), device=pose.device, dtype=pose.dtype)
        moved = pose + steps[None, :, None] * directions[:, None]  # [D, S, R * Q]
        drawn = redraw(model, found, chosen, torch.cat([pose[None], moved.flatten(0, 1)]))
    return PoseSweep(chosen, directions, steps, drawn[1:].unflatten(0, moved.shape[:2]), drawn[0])


def redraw(model: nn.Module, capsules: Capsules, capsule: int, poses: Tensor) -> Tensor:
    """Images `[M, C, H, W]` of one example's class capsules with the pose of one of them replaced by `[M, R * Q]`.

    Raises ValueError for a model without a decoder, for another capsule, and for poses that do not fit.
    """
    drawing = _drawing(model)
    J, R, Q = capsules.poses.shape[1:]
    if not 0 <= capsule < J or poses.dim() != 2 or poses.shape[1] != R * Q or len(capsules.poses) != 1:
        raise ValueError(
            f"poses {list(poses.shape)} for capsule {capsule} of {list(capsules.poses.shape)}: give [M, {R * Q}], a "
            f"capsule of 0 to {J - 1}, and the capsules of one example"
        )
    M = len(poses)
    changed = capsules.poses.repeat(M, 1, 1, 1)
    changed[:, capsule] = poses.unflatten(1, (R, Q)).to(changed)
    activations = None if capsules.activations is None else capsules.activations.expand(M, -1)
    with torch.no_grad(), evaluating(model):
        return drawing.reconstruct(Capsules(changed, activations), torch.full((M,), capsule, device=changed.device))


def principal_directions(poses: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """(directions `[count, R * Q]` of length 1, standard deviations `[count]`) of poses `[N, R, Q]`, the widest first.

    Each direction points where its largest number is positive, so that the same poses give the same signs.
    """
    flat = poses.flatten(1)
    if len(flat) < 2:
        raise ValueError(f"principal directions take 2 poses or more, not {len(flat)}")
    _, S, Vh = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    return _same_signs(Vh)[:count], (S / (len(flat) - 1) ** 0.5)[:count]


@dataclass(frozen=True)
class Reconstructions:
    """Images beside what the decoder makes of the capsule with the highest score.

    images, drawn      `[N, C, H, W]`.
    labels, predicted  `[N]`.
    """

    images: Tensor
    drawn: Tensor
    labels: Tensor
    predicted: Tensor

    @property
    def wrong(self) -> Tensor:
        """`[N]`, True where the prediction is not the label."""
        return self.labels != self.predicted

    @property
    def error(self) -> Tensor:
        """`[N]`, mean squared error of a pixel."""
        return (self.drawn - self.images).square().flatten(1).mean(1)


def reconstructions(model: nn.Module, images: Tensor, labels: Tensor) -> Reconstructions:
    """Images `[N, C, H, W]` and their reconstructions. Raises ValueError for a model without a decoder."""
    drawing = _drawing(model)
    check_images(images)
    with torch.no_grad(), evaluating(model):
        capsules = drawing.capsules(images)
        check_labels(labels, images, capsules.poses.shape[1])
        drawn = drawing.reconstruct(capsules)
        return Reconstructions(images, drawn, labels, _scores(model, images).argmax(1))


@dataclass(frozen=True)
class DecoderCheck:
    """Mean squared errors of a pixel on test images.

    numbers      of a pose, and of principal components.
    decoder      of reconstructions from the capsule with the highest score.
    components   of as many principal components of the training images.
    mean_image   of drawing the mean training image, whatever is there.
    """

    numbers: int
    decoder: float
    components: float
    mean_image: float

    @property
    def believed(self) -> bool:
        """Whether the decoder does as well as the principal components."""
        return self.decoder <= self.components


def decoder_check(model: nn.Module, images: Tensor, train_images: Tensor) -> DecoderCheck:
    """The decoder's error on `images` against principal components of `train_images`, both `[N, C, H, W]`.

    Raises ValueError for a model without a decoder.
    """
    drawing = _drawing(model)
    for each in (images, train_images):
        check_images(each)
    with torch.no_grad(), evaluating(model):
        parts = [(part, drawing.capsules(part)) for part in images.split(256)]
        numbers = parts[0][1].poses[0, 0].numel()
        drawn = torch.cat([drawing.reconstruct(capsules) for _, capsules in parts])
    train, test = train_images.flatten(1).double(), images.flatten(1).double()
    mean = train.mean(0)
    basis = torch.linalg.svd(train - mean, full_matrices=False)[2][:numbers]
    near = mean + (test - mean) @ basis.T @ basis
    return DecoderCheck(
        numbers,
        (drawn.flatten(1).double() - test).square().mean().item(),
        (near - test).square().mean().item(),
        (mean - test).square().mean().item(),
    )


@dataclass(frozen=True)
class PoseMap:
    """Poses as points of a plane.

    points     `[N, 2]`.
    method     "pca" or "tsne".
    explained  share of the variance in each of the two directions; None of t-SNE, whose axes mean nothing.
    """

    points: Tensor
    method: Literal["pca", "tsne"]
    explained: tuple[float, float] | None


def pose_map(
    poses: Tensor, method: Literal["pca", "tsne"] = "pca", *, perplexity: float = 30.0, seed: int = 0
) -> PoseMap:
    """Poses `[N, R, Q]` on a plane: their two widest directions, or by t-SNE (scikit-learn's).

    perplexity, seed  of t-SNE; the perplexity is at most a third of the number of poses.
    """
    flat = poses.detach().flatten(1)
    if method not in ("pca", "tsne"):
        raise ValueError(f"method={method!r}: take 'pca' or 'tsne'")
    if len(flat) < 3:
        raise ValueError(f"a map takes 3 poses or more, not {len(flat)}")
    if method == "tsne":
        from sklearn.manifold import TSNE

        few, start = min(perplexity, (len(flat) - 1) / 3), "pca" if flat.std(0).any() else "random"
        points = TSNE(perplexity=few, random_state=seed, init=start).fit_transform(flat.cpu().double().numpy())
        return PoseMap(torch.from_numpy(points).float(), "tsne", None)
    centred = flat - flat.mean(0)
    _, S, Vh = torch.linalg.svd(centred, full_matrices=False)
    share = (S.square() / S.square().sum().clamp(min=torch.finfo(S.dtype).tiny))[:2].tolist()
    return PoseMap(centred @ _same_signs(Vh)[:2].T, "pca", (share[0], share[1]))


def _same_signs(directions: Tensor) -> Tensor:
    """Rows turned so that the number of largest size is positive: a direction and its opposite are the same one."""
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return directions * torch.where(largest < 0, -1.0, 1.0).to(directions)


def _drawing(model: nn.Module) -> Reconstructs:
    if not draws(model):
        raise ValueError(f"{type(model).__name__} has no decoder to draw with: build it with decoder=True and train it")
    return cast("Reconstructs", model)


def _scores(model: nn.Module, images: Tensor) -> Tensor:
    scores: Tensor = model(images)
    return scores
