"""Train a CapsNet with reconstruction on real handwritten digits, and look at what it learned.

    python examples/digits.py            about a minute on one core
    python examples/digits.py --seed 1   another start; --help lists the rest

The data are the 1,797 images of 8x8 pixels that ship inside scikit-learn: nothing is downloaded. A fifth of them, drawn
once with a fixed seed and balanced over the classes, is the test set. It is looked at once, at the end: the recipe was
chosen by 5-fold cross-validation on the other four fifths (99.65 %, standard deviation over the folds 0.22).

Written to runs/demo/:

    model.pt      weights and settings, read back by `load`
    digits.png    test digits, their reconstructions, and what moving each of the 16 numbers of a pose does
"""

import argparse
import copy
import math
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from torchcaps import Capsules
from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import CapsNet


@dataclass(frozen=True)
class Recipe:
    """What was chosen, by cross-validation on the training part."""

    epochs: int = 80
    batch: int = 64
    learning_rate: float = 3e-3  # AdamW; a tenth of the steps to warm up, then a cosine to 0
    weight_decay: float = 1e-4
    reconstruction: float = 0.0008  # weight of `reconstruction_loss`, 0.01 per squared error of 8x8 pixels
    average: float = 0.995  # of the weights, exponential over the steps
    shift: float = 0.75  # pixels, at most, as all of these; drawn anew for each image and epoch
    degrees: float = 12.0
    scale: float = 0.1
    shear: float = 0.15


def build() -> CapsNet:
    """CapsNet for 8x8 images: two small convolutions, 8 types x 3x3 primary capsules of 8, 10 class capsules of 16."""
    stem = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
    )  # fmt: skip
    return CapsNet(image_size=8, stem=stem, primary_types=8, primary_kernel_size=3, primary_stride=2, hidden=(256, 256))


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(training images, test images, training labels, test labels); images `[N, 1, 8, 8]` in 0..1."""
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None] / 16
    parts = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    return tuple(torch.from_numpy(part) for part in parts)


def augment(images: Tensor, recipe: Recipe, random: torch.Generator) -> Tensor:
    """One small random affine map for each image; what comes in from outside is black."""
    u = torch.rand(6, len(images), generator=random) * 2 - 1
    angle = u[0] * math.radians(recipe.degrees)
    wide, high, shear = (u[1] * recipe.scale).exp(), (u[2] * recipe.scale).exp(), u[3] * recipe.shear
    cos, sin = angle.cos(), angle.sin()
    move = recipe.shift * 2 / images.shape[-1]
    top = torch.stack([cos * wide, (shear * cos - sin) * high, u[4] * move], 1)
    low = torch.stack([sin * wide, (shear * sin + cos) * high, u[5] * move], 1)
    grid = nn.functional.affine_grid(torch.stack([top, low], 1), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, align_corners=False)


def train(images: Tensor, labels: Tensor, recipe: Recipe, seed: int, console: Console) -> CapsNet:
    """The running average of the weights after the last epoch."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed + 1000)
    model = build()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    per_epoch = len(images) // recipe.batch
    steps = per_epoch * recipe.epochs
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: max(1e-3, n / warm if n < warm else (1 + math.cos(math.pi * (n - warm) / (steps - warm))) / 2),
    )
    loss_so_far = TextColumn("epochs  loss {task.fields[loss]}")
    columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), loss_so_far, TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=recipe.epochs, loss="-")
        for epoch in range(recipe.epochs):
            order = torch.randperm(len(images), generator=random)
            shown, total = augment(images[order], recipe, random), 0.0
            for batch in torch.arange(per_epoch * recipe.batch).split(recipe.batch):
                x, y = shown[batch], labels[order[batch]]
                out = model(x, y)
                loss = margin_loss(out.scores, y) + recipe.reconstruction * reconstruction_loss(out.reconstruction, x)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                follow(average, model, min(recipe.average, schedule.last_epoch / (9 + schedule.last_epoch)))
                total += loss.item() / per_epoch
            progress.update(bar, advance=1, loss=f"{total:.4f}")
            if not console.is_terminal and (epoch + 1) % 10 == 0:
                console.print(f"epoch {epoch + 1} of {recipe.epochs}, loss {total:.4f}")
    return average.eval()


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, keep: float) -> None:
    """Move the average's weights towards the model's; statistics of batch norms are taken as they are."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
    for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)


def per_class(labels: Tensor, predicted: Tensor) -> Table:
    """A line for each digit: how many there are, how many were read right, and what the others were taken for."""
    table = Table(title="test set, by class")
    for heading in ("digit", "images", "right", "accuracy", "taken for"):
        table.add_column(heading, justify="right")
    for digit in range(10):
        read = predicted[labels == digit]
        wrong = ", ".join(str(int(w)) for w in read[read != digit])
        right = int((read == digit).sum())
        table.add_row(str(digit), str(len(read)), str(right), f"{100 * right / len(read):.1f} %", wrong or "-")
    return table


@torch.no_grad()
def draw(model: CapsNet, images: Tensor, labels: Tensor, path: Path) -> None:
    """The picture: above, test digits and their reconstructions; below, the sweep of each number of one pose."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    each = [int((labels == digit).nonzero()[k]) for k in range(4) for digit in range(10)]  # four of every digit
    shown = images[each]
    capsules = model.capsules(shown)
    drawn = model.reconstruct(capsules)
    pairs = torch.stack([shown.view(4, 10, 8, 8), drawn.view(4, 10, 8, 8)], 1).flatten(0, 1)  # a row below the other

    one = 3  # the digit whose pose is swept
    moves = torch.linspace(-0.25, 0.25, 11)
    poses = capsules.poses[one].repeat(16, len(moves), 1, 1, 1)
    for number in range(16):
        poses[number, :, one, 0, number] += moves
    swept = model.reconstruct(Capsules(poses.flatten(0, 1)), torch.full((16 * len(moves),), one))

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 6.6), width_ratios=[1.15, 1], layout="constrained")
    left.imshow(tiles(pairs), cmap="gray", vmin=0, vmax=1)
    left.set_title("test digits, and below each what its capsule draws", fontsize=10)
    left.set_axis_off()
    right.imshow(tiles(swept.view(16, len(moves), 8, 8)), cmap="gray", vmin=0, vmax=1)
    right.set_title(f"a {one}, redrawn with one number of its pose moved", fontsize=10)
    right.set_xticks([4.5, 4.5 + 9 * 5, 4.5 + 9 * 10], ["-0.25", "0", "+0.25"])
    right.set_yticks([4.5 + 9 * number for number in range(16)], [str(number) for number in range(16)], fontsize=7)
    right.set_ylabel("which number of the 16")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def tiles(images: Tensor) -> Tensor:
    """`[rows, columns, h, w]` as one image, with a line of grey between the tiles."""
    rows, columns, h, w = images.shape
    canvas = torch.full((rows, h + 1, columns, w + 1), 0.35)
    canvas[:, :h, :, :w] = images.transpose(1, 2)
    return canvas.view(rows * (h + 1), columns * (w + 1))[:-1, :-1]


def save(model: CapsNet, recipe: Recipe, seed: int, path: Path) -> None:
    """Write weights and settings; the name appears only when all is written."""
    unfinished = path.with_suffix(".unfinished")
    torch.save({"weights": model.state_dict(), "recipe": asdict(recipe), "seed": seed}, unfinished)
    os.replace(unfinished, path)


def load(path: Path) -> CapsNet:
    """The model that `save` wrote, ready to look at images."""
    model = build()
    model.load_state_dict(torch.load(path, weights_only=True)["weights"])
    return model.eval()


def epochs(text: str) -> int:
    """A number of epochs from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def make_folder(folder: Path) -> None:
    """Make the folder, or stop with one line if nothing can be written into it: now, not after the training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SystemExit(f"cannot write to {folder}: {error.strerror}; give another folder with --out") from None


def main(arguments: list[str] | None = None) -> float:
    """Train, print and draw; returns the test accuracy, a number in 0..1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order and the augmentation")
    parser.add_argument("--epochs", type=epochs, default=Recipe.epochs)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the model and the picture")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for a network this small a second thread costs more than it brings: 99 s against 65 s
    console = Console()
    recipe = Recipe(epochs=chosen.epochs)
    make_folder(chosen.out)
    train_images, test_images, train_labels, test_labels = load_data()

    began = time.time()
    model = train(train_images, train_labels, recipe, chosen.seed, console)
    with torch.no_grad():
        predicted = model(test_images).argmax(1)
    accuracy = float((predicted == test_labels).float().mean())

    console.print(per_class(test_labels, predicted))
    wrong = int((predicted != test_labels).sum())
    console.print(
        f"test accuracy {100 * accuracy:.2f} % ({wrong} of {len(test_labels)} wrong)\n"
        f"seed {chosen.seed}, {recipe.epochs} epochs, {time.time() - began:.0f} s; threads: {torch.get_num_threads()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    save(model, recipe, chosen.seed, chosen.out / "model.pt")
    draw(model, test_images, test_labels, chosen.out / "digits.png")
    console.print(f"written: {chosen.out / 'model.pt'}, {chosen.out / 'digits.png'}")
    return accuracy


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped: nothing was written") from None
