"""All reproductions by name."""

from torchcaps.reproduce.plan import Reproduction
from torchcaps.reproduce.su import SU

__all__ = ["REPRODUCTIONS"]

REPRODUCTIONS: dict[str, Reproduction] = {"su": SU}
