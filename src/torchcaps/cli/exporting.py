"""`torchcaps export`: a trained model as ONNX, as a program of torch.export, or as a folder for the hub."""

import argparse
from pathlib import Path

from safetensors import SafetensorError

from torchcaps.cli.loading import load
from torchcaps.run.export import ENDINGS, TOLERANCE, export
from torchcaps.run.files import check_place
from torchcaps.run.hub import Pretrained
from torchcaps.training import LoadedModel

__all__ = ["run"]


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps export", description=__doc__)
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("out", help="model.onnx, model.pt2, or a folder: weights as safetensors, the rest as JSON")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest difference of a probability")
    chosen = parser.parse_args(arguments)
    out = Path(chosen.out)
    as_folder = not out.suffix
    if not as_folder and out.suffix not in ENDINGS:
        raise ValueError(f"{out}: the ending says what to write: {', '.join(ENDINGS)}, or none for a folder")
    check_place(out, folder=as_folder)
    loaded = load(chosen.run)
    if as_folder:
        _write_folder(loaded, out)
        print(f"{out} holds config.json and model.safetensors: torchcaps.run.hub has Pretrained, and "
              f"Pretrained.from_pretrained({chosen.out!r}) reads them")  # fmt: skip
        return
    shape = (loaded.config["in_chans"], *loaded.config["image_size"])
    worst = export(
        loaded.model, chosen.out, shape, multi_label=loaded.multi_label, link=loaded.link, tolerance=chosen.tolerance
    )
    print(f"{chosen.out}: inputs [N, {', '.join(map(str, shape))}], probabilities [N, {loaded.config['num_classes']}]; "
          f"largest difference from the model at N = 1, 3, 8: {worst:.1e}")  # fmt: skip


def _write_folder(loaded: LoadedModel, folder: Path) -> None:
    try:
        Pretrained.of(loaded).save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written ({error}): make room, or give another place") from error
    # safetensors lets nobody else read its file
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
