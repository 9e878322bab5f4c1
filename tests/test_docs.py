"""Every code block of the documents runs, and every example in a docstring gives what it says."""

import doctest
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import torchcaps

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
        assert (page.parent / target).exists(), target


def test_the_pages_known_to_hold_code_hold_it():
    counts = {page.name: len(python_blocks(page)) for page in PAGES}
    assert counts["adding-an-algorithm.md"] >= 5
    assert counts["README.md"] >= 1


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_say(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert failed == 0


def test_docstrings_have_examples():
    found = sum(
        len(t.examples) for name in MODULES for t in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert found >= 10
