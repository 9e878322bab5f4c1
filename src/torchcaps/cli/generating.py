"""Expert capsules on the command line: trained by a recipe, and images drawn from single capsules.

    torchcaps fit --config mnist_expert_capsules
    torchcaps generate RUN --law fitted --out digits.png

The run's folder then holds autoencoder.pt, experts.pt, measures.json, and a picture for each law.
"""

import argparse
import itertools
import json
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jsonargparse
import torch
import yaml
from PIL import Image
from torch import Tensor

import torchcaps.data  # noqa: F401  (its classes can then be named without their module)
from torchcaps.cli import folders
from torchcaps.cli.recipes import with_files
from torchcaps.data import ImageData
from torchcaps.energy.generation import Law
from torchcaps.run.experts import (
    ExpertSettings,
    Part,
    draw,
    encode,
    fit_autoencoder,
    fit_experts,
    load_experts,
    measure_experts,
    save_picture,
)
from torchcaps.run.files import check_place

__all__ = ["fit", "is_ours", "run"]

TRIAL = 64
"""Images of each part in a fast_dev_run."""


def run(command: str, arguments: list[str]) -> None:
    """`torchcaps generate RUN`: a picture with a column for each capsule, a row for each draw."""
    parser = argparse.ArgumentParser(
        prog="torchcaps generate", description="Draw images from single expert capsules, the others being silent."
    )
    parser.add_argument("run", help="a run's folder, or its experts.pt")
    parser.add_argument("--law", choices=get_args(Law), default="fitted", help="what poses are drawn from")
    parser.add_argument("--capsule", type=int, help="draw from this one alone; all where not given")
    parser.add_argument("--rows", type=int, default=4, help="draws of each capsule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the picture; by default RUN/LAW.png")
    chosen = parser.parse_args(arguments)
    if chosen.rows < 1:
        raise ValueError(f"--rows {chosen.rows}: give 1 or more")
    if chosen.out is not None and chosen.out.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"--out {chosen.out}: its ending says no kind of picture, such as .png or .jpg")
    if chosen.out is not None:
        check_place(chosen.out)
    pipeline = load_experts(chosen.run)
    folder = Path(chosen.run) if Path(chosen.run).is_dir() else Path(chosen.run).parent
    out = chosen.out or folder / f"{chosen.law}.png"
    capsules = None if chosen.capsule is None else [chosen.capsule]
    save_picture(draw(pipeline, capsules, law=chosen.law, rows=chosen.rows, seed=chosen.seed), out)
    print(f"{out} holds {chosen.rows} draw(s) of {'each capsule' if capsules is None else f'capsule {capsules[0]}'}")


def is_ours(arguments: Sequence[str]) -> bool:
    """Whether a recipe among the arguments of `torchcaps fit` is one of expert capsules."""
    given = with_files(arguments)
    files = [b for a, b in itertools.pairwise(given) if a in ("--config", "-c")]
    files += [argument.removeprefix("--config=") for argument in given if argument.startswith("--config=")]
    return any("name: expert_capsules\n" in Path(file).read_text("utf-8") for file in files)


def fit(arguments: Sequence[str]) -> None:
    """`torchcaps fit` for such a recipe. What a run's folder holds already is not trained again."""
    parser = _parser()
    chosen = parser.parse_args(with_files(arguments))
    with warnings.catch_warnings():  # all of jsonargparse before 5 has this name, though the newest prefer another
        warnings.simplefilter("ignore", DeprecationWarning)
        ready = parser.instantiate_classes(chosen)
    trial = bool(ready.trainer.fast_dev_run)
    data, settings, seed = ready.data, ready.model.settings, ready.seed_everything
    data.prepare_data()
    train, test = (
        _tensors(loader, TRIAL if trial else None) for loader in (data.train_dataloader(), data.test_dataloader())
    )
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere if trial else ready.run)
        _hold = None if trial else _begin(parser, chosen, folder)
        file = Path(ready.autoencoder) if ready.autoencoder else folder / "autoencoder.pt"
        autoencoder = fit_autoencoder(settings, train[0], file)
        parts = [Part(*part, encode(settings, autoencoder, part[0])) for part in (train, test)]
        pipeline = fit_experts(settings, autoencoder, parts[0].images, parts[0].codes, folder, seed=seed)
        found = measure_experts(pipeline, *parts, rows=1 if trial else 50, seed=seed)
        (folder / "measures.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        for law in get_args(Law):
            save_picture(draw(pipeline, law=law), folder / f"{law}.png")
    for name, value in found.items():
        print(f"{name:<36}{value:.4f}")
    if not trial:
        print(f"{folder} holds the run. Next: torchcaps generate {folder}")


def _begin(parser: jsonargparse.ArgumentParser, chosen: jsonargparse.Namespace, folder: Path) -> object:
    """The folder for this process alone, with the configuration in it, which later calls must have too."""
    lock = folders.take(folder)
    if (folder / "checkpoints").exists():
        raise ValueError(f"{folder} holds a run of another kind: give another folder, --run NAME")
    if (folder / "config.yaml").exists():
        folders.check_same(folder, yaml.safe_load(parser.dump(chosen)))
    else:
        parser.save(chosen, folder / "config.yaml")
    return lock


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(prog="torchcaps fit", description="Train a chain of expert capsules.")
    parser.add_argument("--config", "-c", action="config", help="A recipe.")
    parser.add_argument("--seed_everything", type=int, default=0, help="Of the experts; the autoencoder's is always 0.")
    parser.add_argument("--run", type=str, default="runs/unnamed", help="The folder that keeps the run.")
    parser.add_argument("--autoencoder", type=str | None, default=None, help="Use this autoencoder.pt.")
    parser.add_subclass_arguments(ImageData, "data", required=True)
    parser.add_argument("--model.name", type=Literal["expert_capsules"], required=True)
    parser.add_argument("--model.settings", type=ExpertSettings, default=ExpertSettings())
    parser.add_argument("--trainer.fast_dev_run", type=int, default=0, help="Try it on a few images, and keep nothing.")
    return parser


def _tensors(loader: Iterable[Any], limit: int | None) -> tuple[Tensor, Tensor]:
    images, labels, count = [], [], 0
    for x, y in loader:
        images.append(x)
        labels.append(y)
        count += len(x)
        if limit is not None and count >= limit:
            break
    return torch.cat(images)[:limit], torch.cat(labels)[:limit]
