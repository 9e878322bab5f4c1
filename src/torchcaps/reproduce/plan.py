"""What a reproduction consists of: a recipe, arms that change it, and tests with what the paper says of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchcaps.data import ImageData

__all__ = ["Arm", "Reproduction", "Test"]


@dataclass(frozen=True)
class Arm:
    """One network of a reproduction.

    what     in words, for the tables.
    changes  arguments of `torchcaps fit` that differ from the recipe's, such as {"model.name": "su_cnn"}.
    paper    what the source says, by "test.measure"; text, as it may come with a spread or a remark.
    expect   (lowest, highest) that a rerun should give, by "test.measure", in percent: from our own runs.
    recipe   where it is not that of the reproduction.
    """

    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    recipe: str | None = None


@dataclass(frozen=True)
class Test:
    """What a trained network is tested on.

    what      in words.
    measures  names of `measures.MEASURES`.
    data      the set whose test part is taken, made of the run's own; None is that itself.
    """

    what: str
    measures: tuple[str, ...]
    data: Callable[[Any], ImageData] | None = None


@dataclass(frozen=True)
class Reproduction:
    """A published experiment.

    title, source  of the paper.
    about          what is found out, and where ours differs, in a few sentences.
    recipe         name of the recipe that all arms start from.
    arms, tests    by name.
    curve          a logged metric to draw against images seen, such as "val/exact_match"; None draws nothing.
    seeds          that a full reproduction takes.
    base           where the recipe's set of single images stands, for `--root`.
    image          (channels, height, width) of an image.
    num_classes    classes.
    images         of an epoch.
    """

    title: str
    source: str
    about: str
    recipe: str
    arms: Mapping[str, Arm]
    tests: Mapping[str, Test]
    curve: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    base: str = "data.init_args"
    image: tuple[int, int, int] = (1, 28, 28)
    num_classes: int = 10
    images: int = 60_000

    def recipe_of(self, arm: Arm) -> str:
        """The name of an arm's recipe."""
        return arm.recipe or self.recipe
