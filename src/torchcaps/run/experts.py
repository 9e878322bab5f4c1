"""The whole chain of expert capsules on a set of images: trained by phases, kept in a folder, measured, drawn from.

    1  autoencoder       on images; then frozen, and every image is a batch of visible capsules       autoencoder.pt
    2  experts           W on visible capsules, without labels
    3  decoder           U from hidden capsules back to visible ones, and the law of the poses         experts.pt

A phase whose file is there is not repeated, so that several W can stand on one autoencoder. Hauser 2019 (arXiv
1907.11643) gives neither rates, epochs nor initial weights; `ExpertSettings` holds what is taken here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from torchcaps.energy import (
    CapsuleDecoder,
    ContrastiveDivergence,
    ConvAutoencoder,
    ExpertCapsules,
    ExpertPipeline,
    PersistentDivergence,
    SampledDivergence,
    caps_from_code,
    compete,
    measures,
    mix,
    train_autoencoder,
    train_experts,
)
from torchcaps.energy.generation import Law
from torchcaps.routing import Dynamic
from torchcaps.squash import squash
from torchcaps.training import AtomicCheckpointIO, read_checkpoint

__all__ = [
    "ExpertSettings", "Part", "draw", "encode", "fit_autoencoder", "fit_experts", "load_experts", "measure_experts",
    "save_picture",
]  # fmt: skip

Objective = Literal["none", "divergence", "persistent", "sampled", "competition"]
Say = Callable[[str], None]

PROBED = 10_000
"""Training images that the probes learn from."""

SOME = 2000
"""Test images that the dearer figures are of."""

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "divergence": ContrastiveDivergence,
    "persistent": PersistentDivergence,
    "sampled": SampledDivergence,
}


@dataclass(frozen=True)
class ExpertSettings:
    """How the chain is built and trained. The defaults are the paper's as far as it has any.

    Args:
        objective: Of the experts: "divergence" is the paper's, one step of mixing; "persistent" and "sampled" are
            `torchcaps.energy`'s; "competition" sets the weights by `compete`; "none" leaves them random.
        iterations: Rounds of routing; 1 is a uniform coupling.
        normalize: What the shares sum to 1 over: the "children" of a parent (its formulas) or the "parents" of a child.
        centre: Take votes from the mean of the visible capsules, which ends the evenness F(-x) = F(x).
        line: So many numbers of a pose lie on a line.
        std: Of the initial weights.
        out_caps: Hidden capsules.
        out_pose: Numbers of each.
        in_pose: Numbers of a visible capsule.
        channels: Of the autoencoder.
        autoencoder_epochs: Epochs of phase 1.
        epochs: Of phase 2.
        rate: Adam's of phase 2.
        images: Gradients of phase 2, and phase 3, see the first so many images; "competition" sees them all.
        decoder: "ridge", least squares; or "rule", the paper's own.
        alone: Learn a second decoder, by which each capsule draws for itself, from the images that it wins.
        bfloat16: Convolutions in bfloat16.
    """

    objective: Objective = "divergence"
    iterations: int = 3
    normalize: Literal["children", "parents"] = "children"
    centre: bool = False
    line: int = 0
    std: float = 4.0
    out_caps: int = 20
    out_pose: int = 16
    in_pose: int = 8
    channels: int = 128
    autoencoder_epochs: int = 1
    epochs: int = 1
    rate: float = 3e-3
    images: int = 20_000
    decoder: Literal["ridge", "rule"] = "ridge"
    alone: bool = False
    bfloat16: bool = True

    def __post_init__(self) -> None:
        least = {"out_caps": 2}
        for name in (
            "iterations",
            "out_caps",
            "out_pose",
            "in_pose",
            "channels",
            "autoencoder_epochs",
            "epochs",
            "images",
        ):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(f"{name}={getattr(self, name)}: give {least.get(name, 1)} or more")
        if self.channels % self.in_pose:
            raise ValueError(
                f"in_pose={self.in_pose} does not divide channels={self.channels}, of which visible capsules are cut"
            )
        if self.line and self.objective == "competition":
            raise ValueError(f"line={self.line}: competition is about lengths, and takes no numbers on a line")

    def build(self, in_chans: int, image_size: Sequence[int]) -> ExpertPipeline:
        """The untrained chain for such images; its weights are torch's random numbers."""
        autoencoder = ConvAutoencoder(in_chans, image_size, channels=self.channels)
        channels, height, width = autoencoder.code_shape
        sizes = height * width * channels // self.in_pose, self.out_caps, self.in_pose, self.out_pose
        rule = Dynamic.hauser(self.iterations, normalize=self.normalize)
        experts = ExpertCapsules(*sizes, routing=rule, std=self.std, line=self.line)
        back = sizes[1], sizes[0], sizes[3], sizes[2]
        # uniform shares: routed ones make U of a visible capsule 576 problems instead of one, and fit no better
        return ExpertPipeline(
            autoencoder,
            experts,
            CapsuleDecoder(*back, routing=Dynamic.hauser(1)),
            CapsuleDecoder(*back, routing=Dynamic.hauser(1)) if self.alone else None,
        )


class Part(NamedTuple):
    """Images `[N, C, H, W]` in 0..1, their labels `[N]`, and what `encode` makes of them, `[N, I, 1, P]`."""

    images: Tensor
    labels: Tensor
    codes: Tensor


def fit_autoencoder(settings: ExpertSettings, images: Tensor, file: Path, *, say: Say = print) -> ConvAutoencoder:
    """Phase 1 on `images` `[N, C, H, W]` in 0..1: trained from seed 0 and kept in `file`, or read from it.

    Raises ValueError for a file that holds an autoencoder of other images or of another size.
    """
    about = {"in_chans": images.shape[1], "image_size": list(images.shape[2:]), "channels": settings.channels}
    torch.manual_seed(0)
    autoencoder = ConvAutoencoder(images.shape[1], images.shape[2:], channels=settings.channels)
    if file.exists():
        saved = read_checkpoint(file)
        if saved.get("expert_autoencoder") != about:
            raise ValueError(
                f"{file} holds {saved.get('expert_autoencoder', 'no autoencoder')}, but {about} is asked for: give "
                "another file"
            )
        autoencoder.load_state_dict(saved["state_dict"])
        return autoencoder.eval().requires_grad_(False)
    minutes, wall, cpu = _stopwatch(say), time.perf_counter(), time.process_time()
    losses = train_autoencoder(
        autoencoder.to(memory_format=torch.channels_last), images, epochs=settings.autoencoder_epochs,
        precision=torch.bfloat16 if settings.bfloat16 else torch.float32,
        after_epoch=lambda epoch, loss: minutes(f"autoencoder, epoch {epoch + 1}: squared error {loss:.5f}"),
    )  # fmt: skip
    AtomicCheckpointIO().save_checkpoint(
        {
            "expert_autoencoder": about, "losses": losses, "state_dict": autoencoder.state_dict(),
            "minutes": (time.perf_counter() - wall) / 60, "cpu_minutes": (time.process_time() - cpu) / 60,
        }, file,
    )  # fmt: skip
    return autoencoder.eval().requires_grad_(False)


@torch.no_grad()
def encode(settings: ExpertSettings, autoencoder: ConvAutoencoder, images: Tensor) -> Tensor:
    """Visible capsules `[N, I, 1, P]` of images, before their squash."""
    return _in_parts(images, lambda x: caps_from_code(autoencoder.encode(x), settings.in_pose).poses, settings.bfloat16)


@torch.no_grad()
def fit_experts(
    settings: ExpertSettings,
    autoencoder: ConvAutoencoder,
    images: Tensor,
    codes: Tensor,
    folder: Path,
    *,
    seed: int = 0,
    say: Say = print,
) -> ExpertPipeline:
    """Phases 2 and 3: W, U and all that follows, from `seed`, kept in `folder`, or read from it.

    images, codes  `[N, C, H, W]`, and `[N, I, 1, P]` that `encode` made of them.

    Raises ValueError for a folder that holds a chain of other settings or of another seed.
    """
    file = folder / "experts.pt"
    about = {
        "settings": asdict(settings), "seed": seed,
        "in_chans": autoencoder.in_chans, "image_size": list(autoencoder.image_size),
    }  # fmt: skip
    if file.exists():
        if (found := read_checkpoint(file).get("expert_capsules")) != about:
            raise ValueError(f"{file} holds {found}, but {about} is asked for: give another folder, --run NAME")
        return load_experts(file)
    minutes = _stopwatch(say)
    torch.manual_seed(seed)
    pipeline = settings.build(autoencoder.in_chans, autoencoder.image_size)
    pipeline.autoencoder.load_state_dict(autoencoder.state_dict())
    pipeline.eval().requires_grad_(False)
    visible = squash(codes)
    if settings.centre:
        pipeline.experts.centre_on(visible)
    _train(pipeline.experts, settings, visible, seed, minutes)
    visible, codes = visible[: settings.images], codes[: settings.images]
    hidden = _in_parts(visible, lambda x: pipeline.experts.pose(pipeline.experts.up(x)[0]))
    if settings.decoder == "rule":
        pipeline.decoder.fit_by_rule(hidden, codes)
    else:
        pipeline.decoder.fit(hidden, codes)
    weights = None
    if pipeline.alone is not None:
        firing = pipeline.experts.lengths(hidden)
        # who does not win anything still learns, from all images alike
        weights = F.one_hot(firing.argmax(1), settings.out_caps).to(firing) + 1e-4
        pipeline.alone.fit(hidden, codes, mode="alone", weights=weights, ridge=1e-3)
    pipeline.law.fit(hidden, weights)
    pipeline.mean_image.copy_(images.mean(0))
    minutes("decoder")
    AtomicCheckpointIO().save_checkpoint({"expert_capsules": about, "state_dict": pipeline.state_dict()}, file)
    return pipeline


def load_experts(run: str | Path) -> ExpertPipeline:
    """The trained chain of a run's folder, or of its file. ValueError where it holds none."""
    path = Path(run)
    path = path / "experts.pt" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"there is no {path}: train a chain first, torchcaps fit --config mnist_expert_capsules")
    saved = read_checkpoint(path)
    if "expert_capsules" not in saved:
        raise ValueError(f"{path} holds no chain of expert capsules: torchcaps predict and export read other models")
    about = saved["expert_capsules"]
    pipeline = ExpertSettings(**about["settings"]).build(about["in_chans"], about["image_size"])
    pipeline.load_state_dict(saved["state_dict"])
    return pipeline.eval().requires_grad_(False)


@torch.no_grad()
def draw(
    pipeline: ExpertPipeline, capsules: Sequence[int] | None = None, *, law: Law = "half", rows: int = 4, seed: int = 0
) -> Tensor:
    """A picture `[C, rows * H, J * W]`: a column for each capsule, a row for each draw (the paper's figure 2)."""
    random = torch.Generator().manual_seed(seed)
    chosen = range(pipeline.experts.out_caps) if capsules is None else capsules
    columns = [pipeline.generate(k, rows, law=law, generator=random) for k in chosen]
    return torch.cat([column.transpose(0, 1).flatten(1, 2) for column in columns], -1)


def save_picture(picture: Tensor, path: Path) -> None:
    """A picture `[C, H, W]` in 0..1, C = 1 or 3, as a file of 8 bits; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (255 * picture).round().byte().permute(1, 2, 0).squeeze(-1).numpy()
    Image.fromarray(pixels).save(path)


@torch.no_grad()
def measure_experts(
    pipeline: ExpertPipeline,
    train: Part,
    test: Part,
    *,
    other: Tensor | None = None,
    rows: int = 50,
    seed: int = 0,
) -> dict[str, float]:
    """What was learned, each figure with its controls: section names as in `torchcaps.energy.measures`.

    train, test  the probes learn from the first 10,000 of the one; all figures are of the other.
    other        codes of another set, which the free energy is to tell from these.
    rows         images drawn from each capsule, by each law, to be looked at for negatives.

    Probes, clusters and use are of all test images; errors, and free energies of noise, of the first 2,000.
    """
    experts, random = pipeline.experts, torch.Generator().manual_seed(seed)
    train = Part(*(each[:PROBED] for each in train))
    visible, test_visible = squash(train.codes), squash(test.codes)
    y, test_y = train.labels, test.labels
    z, test_z = (_in_parts(x, lambda v: experts.up(v)[0]) for x in (visible, test_visible))
    firing, test_firing = experts.firing(z), experts.firing(test_z)
    found: dict[str, float] = {}

    some = test_visible[:SOME]
    energy = experts.free_energy_of(test_z)
    noises = {
        "shuffled": measures.shuffled(some, random),
        "random_directions": measures.random_directions(some, random),
    }
    if other is not None:
        noises["other_set"] = squash(other[:SOME])
    for name, noise in noises.items():
        against = _in_parts(noise, experts.free_energy)
        found[f"free_energy_gap.{name}"] = measures.free_energy_gap(energy, against)
        found[f"auroc.{name}"] = measures.auroc(energy, against)
    found["one_step_error"] = measures.relative_error(some, _in_parts(some, lambda v: mix(experts, v).visible))

    def error(again: Tensor) -> float:
        return (again - test.images[:SOME]).square().mean().item()

    found["image_error.capsules"] = error(_in_parts(experts.pose(test_z[:SOME]), pipeline.decode))
    found["image_error.autoencoder"] = error(_in_parts(test.images[:SOME], pipeline.autoencoder))
    for count in (20, 320):
        components = measures.PrincipalComponents(train.images, min(count, *train.images.flatten(1).shape))
        found[f"image_error.pca_{count}"] = error(components.decode(components.encode(test.images[:SOME])))

    blind = ExpertCapsules(
        experts.in_caps, experts.out_caps, experts.in_pose[1], experts.out_pose[1], routing=experts.routing, std=4.0
    )
    blind.weight.normal_(0.0, blind.std / blind.in_pose[1] ** 0.5, generator=random)
    again, test_again = (_in_parts(x, lambda v: blind.up(v)[0]) for x in (visible, test_visible))
    few = measures.PrincipalComponents(visible, min(20, len(visible)))
    for name, a, b in (
        ("lengths", firing, test_firing),
        ("poses", experts.pose(z), experts.pose(test_z)),
        ("random_lengths", blind.firing(again), blind.firing(test_again)),
        ("random_poses", blind.pose(again), blind.pose(test_again)),
        ("pca_20", few.encode(visible), few.encode(test_visible)),
    ):
        found[f"probe.{name}"] = measures.linear_probe(a.flatten(1), y, b.flatten(1), test_y)
        found[f"clusters.{name}"] = measures.cluster_accuracy(b.flatten(1), test_y, generator=random)

    use = measures.capsule_use(test_firing, test_y)
    found["use.entropy"], found["use.purity"], found["use.dead"] = use.entropy, use.purity or 0.0, use.dead
    for law in get_args(Law):
        drawn = draw(pipeline, law=law, rows=rows, seed=seed)
        found[f"negatives.{law}"] = measures.negatives_rate(_cut(drawn, pipeline), pipeline.mean_image)
    found["negatives.real_images"] = measures.negatives_rate(test.images, pipeline.mean_image)
    return found


def _stopwatch(say: Say) -> Say:
    """`say`, with the minutes since now behind each sentence."""
    begin = time.perf_counter()
    return lambda what: say(f"{what} ({(time.perf_counter() - begin) / 60:.1f} min)")


def _train(experts: ExpertCapsules, settings: ExpertSettings, visible: Tensor, seed: int, minutes: Say) -> None:
    if settings.objective == "none":
        return
    if settings.objective == "competition":
        shares = compete(experts, visible, seed=seed)
        minutes(f"experts: winners hold {shares[-1]:.1%} of the squared lengths after {len(shares)} rounds")
        return
    experts.requires_grad_(True)
    with torch.enable_grad():
        train_experts(
            experts, visible[: settings.images], OBJECTIVES[settings.objective](), epochs=settings.epochs,
            rate=settings.rate, seed=seed,
            after_epoch=lambda epoch, loss: minutes(f"experts, epoch {epoch + 1}: loss {loss:.4f}"),
        )  # fmt: skip
    experts.requires_grad_(False)


@torch.no_grad()
def _in_parts(x: Tensor, function: Callable[[Tensor], Tensor], bfloat16: bool = False) -> Tensor:
    found = []
    for part in x.split(250):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bfloat16):
            found.append(function(part).float())
    return torch.cat(found)


def _cut(picture: Tensor, pipeline: ExpertPipeline) -> Tensor:
    """The images `[rows * J, C, H, W]` of a picture."""
    C, H, W = pipeline.mean_image.shape
    return picture.unflatten(1, (-1, H)).unflatten(3, (-1, W)).permute(1, 3, 0, 2, 4).reshape(-1, C, H, W)
