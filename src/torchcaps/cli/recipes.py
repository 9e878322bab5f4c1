"""Recipes: one YAML file each, shipped with the package and found by name. What it is stands in its first comment."""

import argparse
import difflib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

__all__ = ["Recipe", "find", "recipes", "run", "with_files"]


class Recipe(NamedTuple):
    """A recipe's name, its file, and the lines of its first comment."""

    name: str
    path: Path
    about: list[str]


def recipes() -> list[Recipe]:
    """All that come with the package, by name."""
    folder = Path(str(files("torchcaps") / "recipes"))
    return [Recipe(path.stem, path, _first_comment(path)) for path in sorted(folder.glob("*.yaml"))]


def find(name: str) -> Path:
    """The file of a recipe: a path that is there, or the name of a shipped one. ValueError where it is neither."""
    if Path(name).is_file():
        return Path(name)
    shipped = {recipe.name: recipe.path for recipe in recipes()}
    if name in shipped:
        return shipped[name]
    close = difflib.get_close_matches(name, shipped, n=3)
    raise ValueError(
        f"there is no recipe {name!r}, and no file of that name"
        f"{': did you mean ' + ' or '.join(close) + '?' if close else ';'} torchcaps recipes lists them all"
    )


def with_files(arguments: Sequence[str]) -> list[str]:
    """The arguments of `torchcaps fit`, the names of recipes among them turned into files."""
    given = list(arguments)
    for place, argument in enumerate(given):
        if argument in ("--config", "-c") and place + 1 < len(given):
            given[place + 1] = str(find(given[place + 1]))
        elif argument.startswith("--config="):
            given[place] = f"--config={find(argument.removeprefix('--config='))}"
    return given


def run(command: str, arguments: list[str]) -> None:
    """`torchcaps recipes [NAME]`: what there is and what to expect of it; with a name, the recipe itself."""
    parser = argparse.ArgumentParser(prog="torchcaps recipes", description="The recipes that come with the package.")
    parser.add_argument("name", nargs="?", help="print this recipe, to copy and change it")
    chosen = parser.parse_args(arguments)
    if chosen.name:
        print(find(chosen.name).read_text("utf-8"), end="")
        return
    for recipe in recipes():
        print(f"{recipe.name}\n    " + "\n    ".join(recipe.about) + "\n")


def _first_comment(path: Path) -> list[str]:
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return lines
