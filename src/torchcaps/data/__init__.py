"""Data: standard sets, your own, sets composed on the fly, and streams, with loaders that resume bit for bit."""

from .augment import Augment
from .composed import AffineTest, DiverseMultiMNIST, MultiMNIST, SideBySide
from .digits import Digits
from .loader import Loader, Schedule
from .module import ImageData, LabelledData
from .norb import SmallNORB
from .own import CSV, NPZ, Arrays, ImageFolder
from .preprocessing import preprocess
from .shards import Shards
from .standard import CIFAR10, CIFAR100, KMNIST, MNIST, SVHN, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CSV",
    "KMNIST",
    "MNIST",
    "NPZ",
    "SVHN",
    "AffineTest",
    "Arrays",
    "Augment",
    "Digits",
    "DiverseMultiMNIST",
    "FashionMNIST",
    "ImageData",
    "ImageFolder",
    "LabelledData",
    "Loader",
    "MultiMNIST",
    "Schedule",
    "Shards",
    "SideBySide",
    "SmallNORB",
    "preprocess",
]
