"""`torchcaps explain RUN`: one HTML file on what a trained model learned, with pictures of its capsules.

torchcaps explain runs/digits                                 on the run's own test images
torchcaps explain runs/digits --images seven.png photos/      and on yours
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.cli.loading import COMPONENTS_OF, data_of, first_images, load
from torchcaps.cli.predicting import read_inputs
from torchcaps.data import ImageData
from torchcaps.explain.report import Subject, answers, sections
from torchcaps.run.compare.report import page
from torchcaps.run.files import check_place, write_whole
from torchcaps.training import LoadedModel, capsule_health

__all__ = ["run"]

LOOKED_AT = 128
"""Images over which the state of the capsules is taken."""


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps explain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run's folder; with --images a checkpoint will do")
    parser.add_argument("--images", nargs="+", default=[], help="images of your own, .npy, .npz, folders: shown first")
    parser.add_argument("--out", type=Path, help="the file; by default explanation.html in the run's folder")
    parser.add_argument("--examples", type=int, default=3, help="right and wrong test images shown, so many of each")
    parser.add_argument(
        "--places", type=int, nargs=2, help="rows and columns of the map that a list of children was (Su's: 8 8)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.examples < 1:
        raise ValueError(f"--examples {chosen.examples}: give 1 or more")
    folder = Path(chosen.run)
    out = chosen.out or (folder if folder.is_dir() else folder.parent) / "explanation.html"
    check_place(out)
    loaded = load(chosen.run)
    kind = (loaded.preprocessing or {"kind": "image"})["kind"]
    if loaded.multi_label or kind != "image":
        raise ValueError(f"explain tells of images of one class each, and {chosen.run} was trained on "
                         f"{'several labels' if loaded.multi_label else f'a {kind}'}: torchcaps.explain's functions "
                         "look into it")  # fmt: skip
    given: dict[str, Tensor] = {}
    if chosen.images:
        if loaded.preprocessing is None:
            raise ValueError(f"{chosen.run} does not say how a file becomes a tensor: leave out --images")
        given = dict(read_inputs(chosen.images, loaded.preprocessing))
    if not folder.is_dir() and not given:
        raise ValueError(f"{chosen.run} is a checkpoint, without data of its own: give a run's folder, or --images")
    data = _data(chosen.run, bool(given)) if folder.is_dir() else None
    html = page(f"{folder.name}: what did it learn?", sections(_subject(loaded, data, given, chosen)))
    write_whole(out, html)
    print(f"{out} holds the report: open it in a browser")


def _data(run: str, without: bool) -> ImageData | None:
    """The run's data. Where they are gone, and there are images to show `without` them, say so and go on."""
    try:
        data = data_of(run)
        _ = data.parts
    except (ValueError, OSError) as error:
        if not without:
            raise
        print(f"without the run's own test images: {error}")
        return None
    return data


def _subject(
    loaded: LoadedModel, data: ImageData | None, given: dict[str, Tensor], chosen: argparse.Namespace
) -> Subject:
    model, K = loaded.model, loaded.config["num_classes"]
    tested = None if data is None else answers(model, data.test_dataloader(), K)
    some = torch.stack(list(given.values())) if tested is None else tested.kept.images
    return Subject(
        name=Path(chosen.run).name,
        model=model,
        class_names=loaded.class_names or [str(k) for k in range(K)],
        tested=tested,
        train_images=None if data is None else first_images(data.parts.train, data.parts.settings, COMPONENTS_OF),
        given=given,
        health=capsule_health(model, lambda: model(some[:LOOKED_AT])),
        places=None if chosen.places is None else tuple(chosen.places),
        examples=chosen.examples,
    )
