"""Standard sets, from tiny files made here: read where they are, downloaded where they are not, or said how to get."""

import gzip
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from torchvision import datasets

from torchcaps.data import CIFAR10, CIFAR100, KMNIST, MNIST, SVHN, Digits, FashionMNIST

RNG = np.random.default_rng(0)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape) + array.tobytes()


def idx_files(n: int = 60) -> dict[str, bytes]:
    files = {}
    for part, count in (("train", n), ("t10k", n // 2)):
        files[f"{part}-images-idx3-ubyte"] = idx(RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def write_idx(root: Path, name: str) -> dict[str, bytes]:
    (root / name / "raw").mkdir(parents=True)
    files = idx_files()
    for file, content in files.items():
        (root / name / "raw" / file).write_bytes(content)
    return files


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], label: str, classes: int) -> None:
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    for listed, count in ((kind.train_list, 3 * classes), (kind.test_list, classes)):
        entries = []
        for file, _ in listed:
            pixels = RNG.integers(0, 256, (count, 3 * 32 * 32), dtype=np.uint8)
            (folder / file).write_bytes(pickle.dumps({"data": pixels, label: [i % classes for i in range(count)]}))
            entries.append([file, md5(folder / file)])
        monkeypatch.setattr(kind, "train_list" if listed is kind.train_list else "test_list", entries)
    meta = dict(kind.meta)
    (folder / meta["filename"]).write_bytes(pickle.dumps({meta["key"]: [f"thing{k}" for k in range(classes)]}))
    monkeypatch.setattr(kind, "meta", {**meta, "md5": md5(folder / meta["filename"])})


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {}
    for part, count in (("train", 60), ("test", 20)):
        file = root / f"{part}_32x32.mat"
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]  # 10 stands for the digit 0
        scipy.io.savemat(file, {"X": RNG.integers(0, 256, (32, 32, 3, count), dtype=np.uint8), "y": labels})
        listed[part] = ["nowhere", file.name, md5(file)]
    monkeypatch.setattr(datasets.SVHN, "split_list", listed)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, KMNIST])
def test_sets_in_the_form_of_mnist_are_read_from_an_existing_root(tmp_path: Path, kind: type[MNIST]) -> None:
    files = write_idx(tmp_path, kind.__name__)
    data = kind(str(tmp_path), download=False, val_fraction=1 / 6)
    assert (data.num_classes, data.in_chans, data.image_size, data.multi_label) == (10, 1, (28, 28), False)
    assert len(set(data.class_names)) == 10
    assert [len(part or ()) for part in data.parts[:3]] == [50, 10, 30]
    images = np.frombuffer(files["t10k-images-idx3-ubyte"][16:], np.uint8).reshape(30, 1, 28, 28)
    x, y = next(iter(data.test_dataloader()))
    assert torch.equal(x, torch.from_numpy(images.copy()) / 255)
    assert y.tolist() == [i % 10 for i in range(30)]


@pytest.mark.parametrize(
    ("kind", "source", "label", "classes"),
    [(CIFAR10, datasets.CIFAR10, "labels", 10), (CIFAR100, datasets.CIFAR100, "fine_labels", 100)],
)
def test_cifar_is_read_from_an_existing_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[CIFAR10], source: Any, label: str, classes: int
) -> None:
    write_cifar(tmp_path, monkeypatch, source, label, classes)
    data = kind(str(tmp_path), download=False)
    assert (data.num_classes, data.in_chans, data.image_size) == (classes, 3, (32, 32))
    assert data.class_names == [f"thing{k}" for k in range(classes)]
    x, y = next(iter(data.test_dataloader()))
    own = source(str(tmp_path), train=False)
    assert torch.equal(x[7], torch.from_numpy(np.array(own[7][0])).movedim(-1, 0) / 255)
    assert y[7] == own[7][1]


def test_svhn_is_read_from_an_existing_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(tmp_path, monkeypatch)
    data = SVHN(str(tmp_path), download=False)
    assert (data.num_classes, data.in_chans, data.image_size) == (10, 3, (32, 32))
    x, y = next(iter(data.test_dataloader()))
    own = datasets.SVHN(str(tmp_path), "test")
    assert torch.equal(x[9], torch.from_numpy(np.array(own[9][0])).movedim(-1, 0) / 255)
    assert y.tolist() == [*range(1, 10), 0] * 2


@pytest.fixture
def asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A mirror of MNIST on this machine; the files that it was asked for."""
    resources, asked = [], []
    (tmp_path / "mirror").mkdir()
    for name, content in idx_files().items():
        file = tmp_path / "mirror" / f"{name}.gz"
        file.write_bytes(gzip.compress(content))
        resources.append((file.name, md5(file)))

    class Mirror(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "mirror"))

        def log_request(self, *_: Any) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(datasets.MNIST, "resources", resources)
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        yield asked
        server.shutdown()


def test_missing_files_are_downloaded_once_also_by_several_at_a_time(tmp_path: Path, asked_for: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: MNIST(str(tmp_path / "new")).num_classes, range(3)))
    assert found == [10, 10, 10]
    assert len(set(asked_for)) == 4
    assert set(Counter(asked_for).values()) == {2}  # torchvision asks where it is, and then for it
    assert MNIST(str(tmp_path / "new"), download=False).in_chans == 1
    assert len(asked_for) == 8


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, KMNIST, CIFAR10, CIFAR100, SVHN])
@pytest.mark.parametrize("download", [True, False])
def test_without_files_and_network_both_ways_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MNIST], download: bool
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    data = kind(str(tmp_path / "none"), download=download)
    for ask in (data.prepare_data, data.setup, lambda: data.num_classes):
        with pytest.raises(FileNotFoundError, match=f"{kind.__name__}: no readable files under .*none") as error:
            ask()
        assert "download=True, where there is a network" in str(error.value)
        assert "give root=" in str(error.value)
        assert ("the download failed" in str(error.value)) == download


def test_a_damaged_file_of_a_standard_set_is_said(tmp_path: Path) -> None:
    write_idx(tmp_path, "MNIST")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(FileNotFoundError, match="MNIST: no readable files under"):
        MNIST(str(tmp_path), download=False).setup()


def test_the_embedded_digits_need_no_file() -> None:
    data = Digits()
    assert (data.num_classes, data.in_chans, data.image_size) == (10, 1, (8, 8))
    assert data.class_names == [str(digit) for digit in range(10)]
    assert [len(part or ()) for part in data.parts[:3]] == [1294, 144, 359]
    assert data.preprocessing["range"] == [0, 16]
    x, _ = next(iter(data.train_dataloader()))
    assert (x * 16).unique().tolist() == list(range(17))
