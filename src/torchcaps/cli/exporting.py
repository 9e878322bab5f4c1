"""`torchcaps export`: a trained model as ONNX, as a program of torch.export, or as a folder for the hub."""

import argparse
from pathlib import Path

from torchcaps.cli.loading import load
from torchcaps.run.export import TOLERANCE, export
from torchcaps.run.hub import Pretrained

__all__ = ["run"]


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps export", description=__doc__)
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument("out", help="model.onnx, model.pt2, or a folder: weights as safetensors, the rest as JSON")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest difference of a probability")
    chosen = parser.parse_args(arguments)
    loaded = load(chosen.run)
    if not Path(chosen.out).suffix:
        Pretrained.of(loaded).save_pretrained(chosen.out)
        print(f"{chosen.out} holds config.json and model.safetensors: Pretrained.from_pretrained({chosen.out!r})")
        return
    shape = (loaded.config["in_chans"], *loaded.config["image_size"])
    worst = export(
        loaded.model, chosen.out, shape, multi_label=loaded.multi_label, link=loaded.link, tolerance=chosen.tolerance
    )
    print(f"{chosen.out}: inputs [N, {', '.join(map(str, shape))}], probabilities [N, {loaded.config['num_classes']}]; "
          f"largest difference from the model at N = 1, 3, 8: {worst:.1e}")  # fmt: skip
