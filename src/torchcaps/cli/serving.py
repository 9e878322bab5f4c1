"""`torchcaps serve RUN`: a page on this machine to draw on, and to see what the capsules make of it.

torchcaps serve runs/digits
torchcaps serve runs/experts            of expert capsules: images drawn from one capsule
"""

import argparse
import socket
from pathlib import Path
from typing import cast, get_args

import numpy as np
from gradio import Blocks
from torch import Tensor

from torchcaps.cli.loading import COMPONENTS_OF, data_of, first_images, load
from torchcaps.data import preprocess
from torchcaps.energy.generation import Law
from torchcaps.explain.page import experts_page, model_page, serve
from torchcaps.explain.poses import DecoderCheck, decoder_check, draws
from torchcaps.explain.report import first_of_each
from torchcaps.run.experts import draw, load_experts
from torchcaps.training import LoadedModel

__all__ = ["run"]

EXAMPLES, CHECKED = 12, 500
"""Test images that the page begins with, and those that the decoder is measured on."""


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run's folder, or a checkpoint")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 opens the page to other machines; there is no login"
    )
    parser.add_argument("--port", type=int, help="the first free one from 7860 on, where not given")
    parser.add_argument("--places", type=int, nargs=2, help="rows and columns of the map that a list of children was")
    chosen = parser.parse_args(arguments)
    if chosen.port is not None:
        _check_port(chosen.host, chosen.port)
    folder = Path(chosen.run)
    if (folder / "experts.pt").exists():
        pipeline = load_experts(folder)

        def from_one(capsule: int, law: str, seed: int) -> Tensor:
            return draw(pipeline, [capsule], law=cast("Law", law), rows=1, seed=seed)

        page = experts_page(pipeline.experts.out_caps, get_args(Law), from_one, title=folder.name)
    else:
        page = _model_page(load(chosen.run), chosen)
    serve(page, chosen.host, chosen.port)


def _check_port(host: str, port: int) -> None:
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {port} of {host} cannot be had ({error}): give another --port, or none") from error


def _model_page(loaded: LoadedModel, chosen: argparse.Namespace) -> Blocks:
    spec = loaded.preprocessing
    if spec is None or spec["kind"] != "image" or spec["channels"] not in (1, 3):
        raise ValueError(f"{chosen.run} takes no pictures of 1 or 3 channels: there is nothing to draw for it")
    examples, check = _from_data(loaded, chosen.run)
    lengths = getattr(loaded.model, "scores", "logits") != "logits"
    return model_page(
        loaded.model,
        preprocess(spec),
        loaded.class_names or [str(k) for k in range(loaded.config["num_classes"])],
        title=Path(chosen.run).name,
        read=(lambda scores: scores) if lengths else loaded.probabilities,
        examples=examples,
        places=None if chosen.places is None else tuple(chosen.places),
        check=check,
    )


def _from_data(loaded: LoadedModel, run: str) -> tuple[Tensor | None, DecoderCheck | None]:
    """Test images in 0..1, one of each class first, and the state of the decoder; nothing where data are missing."""
    try:
        parts = data_of(run).parts
    except (ValueError, OSError) as error:
        print(f"no examples: {error}")
        return None, None
    part = parts.test or parts.train
    images, labels, *_ = part.take(0, np.arange(min(CHECKED, len(part))))
    check = None
    if draws(loaded.model):
        trained = first_images(parts.train, parts.settings, COMPONENTS_OF)
        check = decoder_check(loaded.model, first_images(part, parts.settings, CHECKED), trained)
    return images[first_of_each(labels if labels.dim() == 1 else labels.argmax(1), EXAMPLES)], check
