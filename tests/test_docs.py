"""Every code block of the documents runs, and every example in a docstring gives what it says."""

import doctest
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import torchcaps
from torchcaps.cli import _COMMANDS as COMMANDS
from torchcaps.cli.recipes import find

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
MODULES = ["torchcaps", *(m.name for m in pkgutil.walk_packages(torchcaps.__path__, "torchcaps."))]
MODULES = [name for name in MODULES if "libtorchcaps_native" not in name]  # compiled kernels, no modules of Python
if importlib.util.find_spec("triton") is None:  # PyTorch for the CPU alone does not bring it
    MODULES.remove("torchcaps.kernels.triton_passes")


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_blocks_of_a_page_run_in_order(page: Path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_pictures_and_files_that_a_page_points_to_are_there(page: Path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        path = (page.parent / target).resolve()
        # annotated pages are made when the site is built: tests/test_docs_site.py follows the links to them
        assert path.exists() or path.parent == ROOT / "docs" / "annotated", target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_recipes_that_a_page_names_are_there(page: Path):
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for command, rest in re.findall(r"\btorchcaps ([a-z]+)(.*)", block.replace("\\\n", " ")):
            assert command in COMMANDS, command
            for recipe in re.findall(r"--config (\S+)", rest):
                assert recipe.endswith(".yaml") or find(recipe).exists(), recipe


def test_the_pages_known_to_hold_code_hold_it():
    counts = {page.relative_to(ROOT).as_posix(): len(python_blocks(page)) for page in PAGES}
    known = {
        "README.md": 2,
        "docs/adding-an-algorithm.md": 5,
        "docs/index.md": 1,
        "docs/algorithms/dynamic-routing.md": 2,
        "docs/algorithms/su.md": 3,
        "docs/algorithms/hauser.md": 2,
        "docs/algorithms/inverted-attention.md": 3,
        "docs/algorithms/em.md": 2,
        "docs/algorithms/expert-capsules.md": 2,
        "docs/start.md": 2,
        "docs/faq.md": 32,
        "docs/glossary.md": 1,
        "docs/honesty.md": 1,
        "docs/tutorials/squash-to-capsnet.md": 8,
        "docs/tutorials/one-digit-to-two.md": 3,
        "docs/tutorials/generating-from-one-capsule.md": 8,
        "docs/how-to/timm-backbone.md": 4,
        "docs/how-to/own-folder.md": 3,
        "docs/how-to/multi-label.md": 3,
        "docs/how-to/signals.md": 4,
        "docs/how-to/sequences.md": 6,
        "docs/how-to/export.md": 3,
        "docs/how-to/reading-a-report.md": 2,
    }
    assert {name: counts.get(name, 0) for name in known if counts.get(name, 0) < known[name]} == {}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_say(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert failed == 0


def test_docstrings_have_examples():
    found = sum(
        len(t.examples) for name in MODULES for t in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert found >= 10
