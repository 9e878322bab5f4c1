"""All reproductions by name."""

from torchcaps.reproduce.capsnet import CAPSNET, EM_MNIST
from torchcaps.reproduce.cifar import CIFAR10_RESNET, CIFAR10_SIMPLE
from torchcaps.reproduce.diverse import DIVERSE
from torchcaps.reproduce.plan import Reproduction
from torchcaps.reproduce.su import SU

__all__ = ["REPRODUCTIONS"]

REPRODUCTIONS: dict[str, Reproduction] = {
    "su": SU,
    "capsnet": CAPSNET,
    "diverse": DIVERSE,
    "cifar10_simple": CIFAR10_SIMPLE,
    "cifar10_resnet": CIFAR10_RESNET,
    "em_mnist": EM_MNIST,
}
