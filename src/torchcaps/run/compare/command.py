"""`compare` by plain words: a set's name or a path, and options."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchcaps.data import (
    CIFAR10,
    CIFAR100,
    CSV,
    KMNIST,
    MNIST,
    NPZ,
    SVHN,
    Augment,
    Digits,
    FashionMNIST,
    ImageFolder,
    LabelledData,
)
from torchcaps.run.compare.arms import STANDARD
from torchcaps.run.compare.comparison import MEASURES, Comparison, compare, default_optimization
from torchcaps.run.files import check_place

__all__ = ["main", "open_data"]

NAMED: dict[str, Callable[..., LabelledData]] = {
    "cifar10": CIFAR10, "cifar100": CIFAR100, "fashion_mnist": FashionMNIST, "kmnist": KMNIST, "mnist": MNIST,
    "svhn": SVHN,
}  # fmt: skip


def open_data(source: str, root: str = "data", **settings: Any) -> LabelledData:
    """A set by what it is called or where it lies: "digits", "mnist", a folder of classes, an `.npz`, a `.csv`.

    root      folder of torchvision's sets.
    settings  of the set: batch_size, augment, val_fraction, ...

    Raises ValueError or FileNotFoundError for what is none of these.
    """
    path = Path(source)
    if source.lower() == "digits":
        return Digits(**settings)
    if source.lower() in NAMED:
        return NAMED[source.lower()](root=root, **settings)
    if path.is_dir():
        return ImageFolder(str(path), **settings)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no set and no file {source!r}: give digits, {', '.join(NAMED)}, or the path of a folder with a "
            "folder of images for each class, of an .npz, or of a .csv of paths and labels"
        )
    if path.suffix == ".npz":
        return NPZ(str(path), **settings)
    if path.suffix in (".csv", ".tsv"):
        return CSV(str(path), **settings)
    raise ValueError(f"{source} is no folder, .npz, .csv or .tsv: bring the data to one of these")


def main(arguments: Sequence[str] | None = None) -> Comparison:
    """`torchcaps compare DATA --out FOLDER`: parse, open, compare. Raises as `compare` and `open_data` do."""
    parser = argparse.ArgumentParser(
        prog="torchcaps compare",
        description="Do capsules help on your data, and does routing? Trains four heads on one backbone and reports.",
    )
    parser.add_argument("data", help=f"digits, {', '.join(NAMED)}; a folder of classes, an .npz, a .csv")
    parser.add_argument("--out", required=True, help="folder for report.html, results.csv, results.json, records/")
    parser.add_argument("--name", help="of the data in the report; by default that of the file or folder")
    parser.add_argument("--root", default="data", help="folder of torchvision's sets")
    parser.add_argument("--kind", choices=("signal", "image", "volume"), help="of the arrays of an .npz, where unclear")
    parser.add_argument("--separator", help="between several labels of an image in a .csv, such as '|'")
    parser.add_argument("--seeds", type=int, default=3, help="so many networks of each arm (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="of training each (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="of every arm (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW, of every arm (%(default)s)")
    parser.add_argument("--arms", nargs="+", choices=STANDARD, help="all four by default")
    parser.add_argument("--backbone", help="a model of timm's, such as resnet18; by default three convolutions")
    parser.add_argument("--pretrained", action="store_true", help="load timm's weights into it")
    parser.add_argument("--routing", default="Dynamic", help='a rule\'s name, or JSON: \'{"rule": "EM"}\'')
    parser.add_argument("--iterations", type=int, help="rounds of routing")
    parser.add_argument("--measure", choices=MEASURES, help="what the verdict is about")
    parser.add_argument("--select", choices=("last", "best"), default="last", help="epoch, best by validation loss")
    parser.add_argument("--label_fractions", type=float, nargs="+", default=[1.0], help="such as 0.05 0.2 1")
    parser.add_argument("--shift", type=float, default=0.0, help="augmentation: shift by up to so many pixels")
    parser.add_argument("--flip", action="store_true", help="augmentation: mirror left and right")
    parser.add_argument("--degrees", type=float, default=0.0, help="augmentation: rotate by up to so many degrees")
    parser.add_argument("--no_robustness", action="store_true", help="leave out the items made harder")
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    given = parser.parse_args(arguments)
    check_place(Path(given.out), folder=True)
    augment = Augment(shift=given.shift, flip=given.flip, degrees=given.degrees)
    data = open_data(
        given.data,
        given.root,
        batch_size=given.batch_size,
        augment=None if augment == Augment() else augment,
        **_settings_of_files(given),
    )
    return compare(
        data,
        given.out,
        seeds=given.seeds,
        epochs=given.epochs,
        arms=given.arms,
        backbone=_backbone(given.backbone, given.pretrained),
        routing=_routing(given.routing, given.iterations),
        optimization=default_optimization(given.epochs, given.lr),
        select=given.select,
        precision=given.precision,
        device=given.device,
        measure=given.measure,
        robustness=not given.no_robustness,
        label_fractions=given.label_fractions,
        name=given.name or Path(given.data).stem,
    )


def _settings_of_files(given: argparse.Namespace) -> dict[str, Any]:
    """What is said of a file's contents, and makes sense for its kind alone."""
    found = {}
    for name, endings in (("kind", (".npz",)), ("separator", (".csv", ".tsv"))):
        value = getattr(given, name)
        if value is not None and not given.data.lower().endswith(endings):
            raise ValueError(f"--{name} says something of {' or '.join(endings)}, and {given.data} is none")
        if value is not None:
            found[name] = value
    return found


def _backbone(name: str | None, pretrained: bool) -> dict[str, Any] | None:
    if name is None:
        if pretrained:
            raise ValueError("--pretrained loads weights of a model of timm's: give --backbone too")
        return None
    return {"timm": name.removeprefix("timm:"), "pretrained": pretrained}


def _routing(described: str, iterations: int | None) -> Mapping[str, Any]:
    try:
        routing = json.loads(described) if described.lstrip().startswith("{") else {"rule": described}
    except ValueError as error:
        raise ValueError(f"--routing {described!r} is no JSON: {error}") from error
    return routing if iterations is None else {**routing, "iterations": iterations}
