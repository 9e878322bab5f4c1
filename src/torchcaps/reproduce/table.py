"""All reproductions by name."""

from torchcaps.reproduce.capsnet import CAPSNET, EM_MNIST
from torchcaps.reproduce.cifar import (
    CIFAR10_ABLATIONS,
    CIFAR10_RESNET,
    CIFAR10_ROUNDS,
    CIFAR10_SIMPLE,
    CIFAR100_RESNET,
)
from torchcaps.reproduce.diverse import DIVERSE
from torchcaps.reproduce.plan import Reproduction
from torchcaps.reproduce.su import SU

__all__ = ["REPRODUCTIONS"]

REPRODUCTIONS: dict[str, Reproduction] = {
    "su": SU,
    "capsnet": CAPSNET,
    "diverse": DIVERSE,
    "cifar10_simple": CIFAR10_SIMPLE,
    "cifar10_rounds": CIFAR10_ROUNDS,
    "cifar10_ablations": CIFAR10_ABLATIONS,
    "cifar10_resnet": CIFAR10_RESNET,
    "cifar100_resnet": CIFAR100_RESNET,
    "em_mnist": EM_MNIST,
}
