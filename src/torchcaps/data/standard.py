"""The usual small image sets, through torchvision: downloaded, or read from where they are."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from filelock import FileLock
from torchvision import datasets

from ._sources import Raw, from_arrays
from .module import LabelledData, Loaded

__all__ = ["CIFAR10", "CIFAR100", "KMNIST", "MNIST", "SVHN", "FashionMNIST"]

Opened = tuple[Any, Any, list[str]]
"""Images, labels and the names of the classes."""

_FAILURES = RuntimeError, OSError, AssertionError, ValueError, EOFError
"""What torchvision raises where files are missing, cannot be fetched, or are damaged."""


class StandardData(LabelledData):
    """A set of torchvision's, with an official test part. A part for validation is split off, see `val_fraction`.

    Args:
        root: The folder that torchvision keeps its sets in.
        download: Fetch the files where they are not there.
        **common: The settings of `LabelledData` and `ImageData`.
    """

    def __init__(self, root: str = "data", download: bool = True, **common: Any) -> None:
        super().__init__(**common)
        self.root, self.download = root, download

    @abstractmethod
    def _open(self, train: bool, download: bool) -> Opened: ...

    def prepare_data(self) -> None:
        """Download what is missing."""
        self._read(train=True)
        self._read(train=False)

    def _load(self) -> Loaded:
        name = type(self).__name__
        x, y, names = self._read(train=True)
        x_test, y_test, _ = self._read(train=False)
        train = Raw(x, y, f"{name} training images", f"{name} training labels")
        test = Raw(x_test, y_test, f"{name} test images", f"{name} test labels")
        return from_arrays(train, None, test, names, "image")

    def _read(self, train: bool) -> Opened:
        try:
            return self._open(train, download=False)
        except _FAILURES as missing:
            if not self.download:
                raise self._absent(missing) from missing
        try:
            Path(self.root).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(self.root) / ".download.lock"):  # several processes may start side by side
                return self._open(train, download=True)
        except _FAILURES as failed:
            raise self._absent(failed) from failed

    def _absent(self, error: Exception) -> FileNotFoundError:
        name, why = type(self).__name__, " ".join(str(error).split()) or type(error).__name__
        return FileNotFoundError(
            f"{name}: no readable files under {Path(self.root).resolve()}, and "
            f"{'the download failed' if self.download else 'download=False'} ({why}). Either let it download, with "
            f"download=True, where there is a network; or give root=, the folder in which torchvision.datasets.{name} "
            "finds its files. Damaged ones have to be deleted first"
        )


class MNIST(StandardData):
    """Handwritten digits, 1x28x28, 60,000 and 10,000 for test: LeCun, Bottou, Bengio, Haffner 1998."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.MNIST(self.root, train, download=download)
        return data.data, data.targets, [str(digit) for digit in range(10)]


class FashionMNIST(StandardData):
    """Pieces of clothing, 1x28x28, 60,000 and 10,000 for test: Xiao, Rasul, Vollgraf 2017."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.FashionMNIST(self.root, train, download=download)
        return data.data, data.targets, data.classes


class KMNIST(StandardData):
    """Ten cursive hiragana, 1x28x28, 60,000 and 10,000 for test: Clanuwat et al. 2018."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.KMNIST(self.root, train, download=download)
        return data.data, data.targets, data.classes


class CIFAR10(StandardData):
    """Ten kinds of things, 3x32x32, 50,000 and 10,000 for test: Krizhevsky 2009."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.CIFAR10(self.root, train, download=download)
        return data.data, data.targets, data.classes


class CIFAR100(StandardData):
    """A hundred kinds of things, 3x32x32, 50,000 and 10,000 for test: Krizhevsky 2009."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.CIFAR100(self.root, train, download=download)
        return data.data, data.targets, data.classes


class SVHN(StandardData):
    """House numbers, 3x32x32, 73,257 and 26,032 for test, without the extra ones: Netzer et al. 2011."""

    def _open(self, train: bool, download: bool) -> Opened:
        data = datasets.SVHN(self.root, "train" if train else "test", download=download)
        return data.data, data.labels, [str(digit) for digit in range(10)]
