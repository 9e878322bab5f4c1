"""The rooms of the library: who may import whom, and that importing it loads torch and nothing heavier."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

import pytest

import torchcaps

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "torchcaps"
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

# What the extras bring, by import name.
TRAINING = {"jsonargparse", "pytorch_lightning", "rich", "tensorboard", "timm", "torchmetrics", "torchvision"}
TRAINING |= {"PIL", "huggingface_hub", "matplotlib", "safetensors", "sklearn", "webdataset"}
EXTRAS = {*TRAINING, "gradio", "onnx", "onnxruntime", "onnxscript", "numpy", "scipy"}


class May(NamedTuple):
    """What a room may import besides itself, the standard library and torch."""

    rooms: set[str]
    packages: set[str] = set()  # noqa: RUF012  (never changed)


# The import table. A room is a file or folder of src/torchcaps; "torchcaps" is its front door, __init__.py.
MAY = {
    "types": May({"squash"}),
    "squash": May(set()),
    "kernels": May(set(), {"triton"}),
    "routing": May({"types", "squash", "kernels"}),
    "layers": May({"types", "squash", "routing"}),
    "models": May({"types", "squash", "routing", "layers"}),
    "energy": May({"types", "squash", "routing", "layers"}),
    "losses": May({"types"}),
    "testing": May({"types", "routing", "layers"}),
    "bench": May({"types", "kernels", "routing", "layers", "models", "losses"}, {"matplotlib"}),
    "torchcaps": May({"types", "squash", "routing", "layers", "models", "energy", "losses"}),
    # filelock comes with torch
    "data": May(set(), {"PIL", "filelock", "numpy", "pytorch_lightning", "sklearn", "torchvision", "webdataset"}),
    "training": May({"types", "losses"}, {"numpy", "pytorch_lightning", "torchmetrics"}),
    "explain": May({"types", "routing"}, {"matplotlib", "numpy", "sklearn"}),
}
MAY["run"] = May(set(MAY), EXTRAS)
# filelock comes with torch, lightning_fabric with pytorch-lightning
MAY["cli"] = May({*MAY, "run"}, {*EXTRAS, "filelock", "lightning_fabric", "yaml"})
MAY["reproduce"] = May({*MAY, "run", "cli"}, {"filelock", "matplotlib", "yaml"})

# Single files that may import more than their room.
MAY_ALSO = {"explain/page.py": {"PIL", "gradio"}}


def imports(tree: ast.AST, file: str, in_try: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, stands under `try`) of everything that `file` of src/torchcaps imports, functions included.

    What stands under `if TYPE_CHECKING:` is never imported, and is left out.
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from imports(ast.Module(node.orelse, []), file, in_try)
            case ast.Try():
                yield from imports(node, file, in_try=True)
            case ast.Import(names):
                yield from ((node.lineno, alias.name, in_try) for alias in names)
            case ast.ImportFrom(module, names, level):
                here = ("torchcaps", *Path(file).parts[:-1])
                start = ".".join((*here[: len(here) - level + 1], *([module] if module else []))) if level else module
                # `from torchcaps import losses` speaks of the room torchcaps.losses
                each = [f"{start}.{alias.name}" for alias in names] if start == "torchcaps" else [start]
                yield from ((node.lineno, name, in_try) for name in each)
            case ast.Call(
                ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                [ast.Constant(str(name)), *_],
            ):
                yield node.lineno, name, in_try
            case _:
                yield from imports(node, file, in_try)


def trespasses(source: str, file: str) -> list[str]:
    """Every import in `source`, the text of `file` in src/torchcaps, that the table does not allow."""
    room = file.split("/")[0].removesuffix(".py")
    room = {"__init__": "torchcaps", "__main__": "cli"}.get(room, room)
    if room not in MAY:
        return [f"{file} belongs to no room of the table: {', '.join(MAY)}"]
    packages = {"torch", *MAY[room].packages, *MAY_ALSO.get(file, ())}
    found = []
    for line, name, in_try in imports(ast.parse(source), file):
        first, *rest = name.split(".")
        if first == "torchcaps":
            target = rest[0] if rest and rest[0] in MAY else "torchcaps"
            allowed = target in {room, *MAY[room].rooms}
        else:
            # shape annotations are for the tests: the one place that knows jaxtyping can do without it
            shapes = first == "jaxtyping" and file == "types.py" and in_try
            allowed = shapes or first in packages or first in sys.stdlib_module_names
        if not allowed:
            found.append(f"{file}:{line} imports {name}; {room} may import {sorted(MAY[room].rooms | packages)}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_file_imports_only_what_its_room_may(file: str) -> None:
    assert trespasses((SRC / file).read_text("utf-8"), file) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types.py", "from torchcaps.routing import dynamic"),
        ("types.py", "import jaxtyping"),
        ("types.py", "def f():\n    import numpy as np"),
        ("squash.py", "from .types import Capsules"),
        ("squash.py", "try:\n    import jaxtyping\nexcept ImportError:\n    pass"),
        ("routing/dynamic.py", "from torchcaps.layers import ConvCapsules"),
        ("routing/dynamic.py", "import torchcaps.layers.conv as conv"),
        ("routing/dynamic.py", "from ..layers.conv import ConvCapsules"),
        ("routing/dynamic.py", "from .. import layers"),
        ("routing/dynamic.py", "from torchcaps import types, models"),
        ("routing/dynamic.py", "from torchcaps import Capsules"),
        ("routing/dynamic.py", "import torchcaps"),
        (
            "routing/dynamic.py",
            "class A:\n    def f(self):\n        if self:\n            from torchcaps import losses",
        ),
        ("routing/dynamic.py", "match 1:\n    case 1:\n        import numpy"),
        ("routing/dynamic.py", "try:\n    pass\nfinally:\n    import numpy"),
        ("routing/dynamic.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy"),
        ("routing/dynamic.py", "from importlib import import_module\nimport_module('numpy')"),
        ("routing/dynamic.py", "import importlib\nx = importlib.import_module('torchcaps.cli')"),
        ("routing/__init__.py", "from ..losses import margin_loss"),
        ("kernels/auto.py", "from torchcaps.types import Capsules"),
        ("layers/conv.py", "import triton"),
        ("losses.py", "from torchcaps.models import CapsNet"),
        ("models/capsnet.py", "from torchcaps.losses import margin_loss"),
        ("models/capsnet.py", "import timm"),
        ("data/own.py", "from torchcaps.models import create_model"),
        ("training/module.py", "from torchcaps.models import create_model"),
        ("explain/page.py", "from torchcaps.training import Classification"),
        ("explain/pictures.py", "import gradio"),
        ("run/compare.py", "from torchcaps.cli import main"),
        ("__init__.py", "from torchcaps import training"),
        ("cli.py", "import pandas"),
        ("utils.py", "import torch"),
    ],
)
def test_an_import_that_points_back_or_out_is_found(file: str, source: str) -> None:
    assert len(trespasses(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types.py", "import math\nimport torch.nn.functional as F\nfrom collections import abc"),
        ("types.py", "try:\n    from jaxtyping import Float\nexcept ImportError:\n    Float = None"),
        ("routing/dynamic.py", "from torchcaps.types import Routed\nfrom ..squash import squash\nfrom . import rule"),
        (
            "routing/dynamic.py",
            "from torchcaps import types\nfrom .rule import Rule\nfrom torchcaps.routing import rule",
        ),
        ("routing/dynamic.py", "if TYPE_CHECKING:\n    import numpy\n    from torchcaps.layers import ConvCapsules"),
        ("routing/dynamic.py", "import typing\nif typing.TYPE_CHECKING:\n    import numpy"),
        ("kernels/gpu.py", "import triton.language as tl"),
        ("explain/page.py", "import gradio\nfrom torchcaps.explain.pictures import draw"),
        ("run/compare.py", "import torchcaps\nfrom torchcaps import create_model\nimport sklearn.base"),
        ("cli.py", "import torchcaps.run.compare\nfrom torchcaps.training import Classification"),
        ("__main__.py", "from torchcaps.cli import main"),
        ("__init__.py", "from torchcaps import layers, losses\nfrom .types import Capsules"),
    ],
)
def test_an_import_along_the_way_is_let_through(file: str, source: str) -> None:
    assert trespasses(source, file) == []


def run_python(program: str) -> str:
    """What a new Python process prints for `program`, warnings being errors; tests/conftest.py has no say there."""
    command = [sys.executable, "-W", "error::DeprecationWarning:torchcaps", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_torchcaps_loads_torch_and_nothing_heavier() -> None:
    program = """
import json, sys
import torch
import jaxtyping  # brings two small packages of its own; where it is not installed torchcaps does without
before = set(sys.modules)
import torchcaps
import torchcaps.models
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run_python(program))) - sys.stdlib_module_names
    assert loaded == {"torchcaps"}


def test_torchcaps_works_where_only_torch_is_installed() -> None:
    program = f"""
import sys
import torch
for name in {sorted({*EXTRAS, "jaxtyping", "beartype", "hypothesis", "triton"})}:
    sys.modules[name] = None  # importing it is now an ImportError
import torchcaps.models
from torchcaps.routing import Dynamic
print(Dynamic()(torch.ones(1, 2, 1, 3), torch.ones(2, 4, 3, 5)).poses.shape[1])
"""
    assert run_python(program) == "4\n"


def test_torch_is_the_only_dependency_of_the_core() -> None:
    core = [requirement for requirement in requires("torchcaps") or [] if "extra ==" not in requirement]
    assert [re.split(r"[^\w-]", requirement)[0] for requirement in core] == ["torch"]


def test_the_library_under_test_is_the_one_beside_the_tests() -> None:
    assert Path(torchcaps.__file__).parent == SRC


def test_the_version_is_the_same_for_those_who_cite() -> None:
    assert f"\nversion: {torchcaps.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize("file", FILES)
def test_no_file_picks_a_device_of_its_own(file: str) -> None:
    source = (SRC / file).read_text("utf-8")
    assert [word for word in (".cuda(", "torch.cuda.FloatTensor") if word in source] == []
