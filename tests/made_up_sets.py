"""Standard sets of random images, in the files in which torchvision and the home pages keep the real ones."""

import gzip
import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import torchvision.datasets.cifar

from torchcaps.data import norb

MAGIC = {np.dtype(np.uint8): 0x1E3D4C55, np.dtype("<i4"): 0x1E3D4C54}


def mnist(root: Path, train: int = 120, test: int = 80, name: str = "MNIST") -> None:
    """MNIST or FashionMNIST: each image has a bright block whose place is its class: something to learn."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = generator.integers(0, 128, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[4 + 8 * (label // 4) :, 2 + 6 * (label % 4) :][:6, :5] = 255
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes()
        answers = struct.pack(">II", 2049, count) + labels.tobytes()
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", answers)):
            (raw / name).write_bytes(content)
            (raw / f"{name}.gz").write_bytes(gzip.compress(content))


def cifar(root: Path, monkeypatch, count: int = 40) -> None:
    """CIFAR-10 and CIFAR-100, whose checksums torchvision is kept from looking at."""
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    generator = np.random.default_rng(0)
    ten, hundred = root / "cifar-10-batches-py", root / "cifar-100-python"
    names = [f"data_batch_{number}" for number in range(1, 6)]
    for folder, files, key, classes in (
        (ten, [*names, "test_batch"], "labels", 10), (hundred, ["train", "test"], "fine_labels", 100),
    ):  # fmt: skip
        folder.mkdir(parents=True)
        n = count if classes == 10 else 200
        for file in files:
            pixels = generator.integers(0, 256, (n, 3072), dtype=np.uint8)
            (folder / file).write_bytes(pickle.dumps({"data": pixels, key: [i % classes for i in range(n)]}))
    (ten / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"thing {k}" for k in range(10)]}))
    (hundred / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"thing {k}" for k in range(100)]}))


def smallnorb(root: Path, monkeypatch) -> None:
    """36 pairs for training and 36 for test: every azimuth, elevations in turn, classes in turn."""
    generator = np.random.default_rng(0)
    (root / "smallnorb").mkdir(parents=True)
    checks = {}
    for name in (norb.TRAINING, norb.TESTING):
        azimuth = np.tile(np.arange(0, 36, 2), 2)
        matrices = {
            "dat": generator.integers(0, 256, (36, 2, 96, 96), np.uint8),
            "cat": (np.arange(36) % 5).astype("<i4"),
            "info": np.stack([np.zeros(36), np.arange(36) % 9, azimuth, np.zeros(36)], 1).astype("<i4"),
        }
        for part, entries in matrices.items():
            file = root / "smallnorb" / f"{name}-{part}.mat.gz"
            file.write_bytes(_packed(entries))
            checks[file.name] = hashlib.md5(file.read_bytes()).hexdigest()
    monkeypatch.setattr(norb, "MD5", checks)


def _packed(entries) -> bytes:
    sizes = [*entries.shape, 1, 1][: max(3, entries.ndim)]
    header = np.array([MAGIC[entries.dtype], entries.ndim, *sizes], "<i4")
    return gzip.compress(header.tobytes() + entries.tobytes())
