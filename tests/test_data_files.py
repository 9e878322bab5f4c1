"""Real data sets, where they are at hand: in the folder TORCHCAPS_DATA, or in shared/data beside this project."""

import hashlib
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.data import MNIST, NPZ, Augment, DiverseMultiMNIST, FashionMNIST, ImageData, Loader

ROOT = Path(os.environ.get("TORCHCAPS_DATA", Path(__file__).parents[1] / "../shared/data"))


def at(*names: str) -> str:
    path = ROOT.joinpath(*names)
    if not path.exists():
        pytest.skip(f"{path} is not there: set TORCHCAPS_DATA to the folder of the data sets")
    return str(path)


def labels(loader: Loader) -> list[int]:
    return torch.bincount(torch.cat([y for _, y in loader])).tolist()


@pytest.mark.parametrize(("kind", "mean", "std"), [(MNIST, 0.1307, 0.3081), (FashionMNIST, 0.2860, 0.3530)])
def test_the_mnists_have_the_numbers_they_are_known_for(kind: type[MNIST], mean: float, std: float) -> None:
    at("torchvision", kind.__name__)
    data = kind(at("torchvision"), download=False, val_fraction=0, normalize="train", batch_size=10_000)
    assert [len(part or ()) for part in data.parts[:3]] == [60_000, 0, 10_000]
    assert data.preprocessing["mean"] == pytest.approx([mean], abs=1e-4)
    assert data.preprocessing["std"] == pytest.approx([std], abs=1e-4)
    split = kind(at("torchvision"), download=False, batch_size=10_000)
    train, val = labels(split.train_dataloader()), labels(split.val_dataloader())  # type: ignore[arg-type]
    assert (sum(train), sum(val)) == (54_000, 6_000)
    assert all(abs(v - 0.1 * (t + v)) <= 1 for t, v in zip(train, val, strict=True))


def test_pneumonia_has_its_own_parts() -> None:
    data = NPZ(at("medmnist", "pneumoniamnist_28_reassembled.npz"), class_names=["normal", "pneumonia"])
    assert [len(part or ()) for part in data.parts[:3]] == [4708, 524, 624]
    assert (data.num_classes, data.in_chans, data.image_size) == (2, 1, (28, 28))
    assert labels(data.train_dataloader()) == [1214, 3494]


@pytest.mark.slow
def test_cifar_of_jpegs_unpacked_is_an_npz_like_others(tmp_path: Path) -> None:
    program, out = at("prepare.py"), tmp_path / "cifar10.npz"
    at("cifar10", "cifar10_jpeg_q75.npz")
    packed = np.load(at("cifar10", "cifar10_jpeg_q75.npz"))
    assert len(packed["labels"]) == 60_000
    subprocess.run([sys.executable, program, "cifar10", str(out)], check=True, capture_output=True)
    data = NPZ(str(out), class_names=[str(name) for name in packed["class_names"]], batch_size=500)
    assert [len(part or ()) for part in data.parts[:3]] == [45_000, 5_000, 10_000]
    assert (data.num_classes, data.in_chans, data.image_size) == (10, 3, (32, 32))
    assert data.class_names[0] == "airplane"
    x = torch.cat([x for x, _ in data.test_dataloader()])
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0.4941, 0.4851, 0.4504], abs=1e-3)


def images_per_second(data: ImageData, batches: int) -> float:
    loader = iter(data.train_dataloader())
    next(loader)
    start = time.process_time()
    seen = sum(len(batch[0]) for batch in islice(loader, batches))
    return seen / (time.process_time() - start)


def test_loading_does_not_hold_up_training() -> None:
    root = at("torchvision")
    at("torchvision", "MNIST")
    # measured on one core: 250 000 and 80 000 images a second; the bounds leave room for a busy machine
    assert images_per_second(MNIST(root, download=False, augment=Augment(shift=2)), 100) > 50_000
    assert images_per_second(DiverseMultiMNIST(MNIST(root, download=False)), 100) > 20_000


def test_composed_images_are_these_forever() -> None:
    at("torchvision", "MNIST")
    data = DiverseMultiMNIST(MNIST(at("torchvision"), download=False), test_size=1000)
    x, y = (torch.cat(column) for column in zip(*data.test_dataloader(), strict=True))
    digest = hashlib.sha256((x * 255).round().byte().numpy().tobytes() + y.byte().numpy().tobytes()).hexdigest()
    assert digest == "0da9d98aaed6b8f7e24f0e2428bb8b347bc3d81aaaf87ddfca78fcf5d4850d7d"
