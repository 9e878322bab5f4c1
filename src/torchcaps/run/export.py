"""A trained model as a file that runs without this library, checked against the model itself.

    .pt2     torch.export, for PyTorch and ExecuTorch
    .onnx    ONNX, for onnxruntime and what builds on it

Both take images `[N, C, *size]` of any N and give probabilities `[N, K]`: what a score means goes into the file. It is
read back and run at batches of 1, 3 and 8, and kept only where the largest difference stays below the tolerance.
"""

import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.run.files import check_place, write_whole
from torchcaps.training import probabilities
from torchcaps.training.scores import Link

__all__ = ["ENDINGS", "TOLERANCE", "export"]

BATCHES = (1, 3, 8)
TOLERANCE = 1e-4
"""Largest difference between a probability of the file and the model's."""


class _Probabilities(nn.Module):
    def __init__(self, model: nn.Module, multi_label: bool, link: Link | None) -> None:
        super().__init__()
        self.model, self.multi_label, self.link = model, multi_label, link

    def forward(self, x: Tensor) -> Tensor:
        return probabilities(self.model, self.model(x), multi_label=self.multi_label, link=self.link)


def export(
    model: nn.Module,
    path: str | PathLike[str],
    shape: Sequence[int],
    *,
    multi_label: bool = False,
    link: Link | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """Write the model to `path` (.pt2 or .onnx) for inputs `[N, *shape]`, and return the largest difference found.

    Raises ValueError for another ending or a place that cannot be written, and where the file differs from the
    model by more than `tolerance`: then no file is left.
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path}: the ending says what to write: {' or '.join(_WRITERS)}")
    check_place(path)
    whole = _Probabilities(model, multi_label, link).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(N, *shape, generator=generator) for N in BATCHES]
    with torch.no_grad():
        content, found = _WRITERS[path.suffix](whole, inputs)
        worst = max(float((a - whole(x)).abs().max()) for a, x in zip(found, inputs, strict=True))
    if not worst <= tolerance:
        raise ValueError(
            f"{path} was not written: at batches of {', '.join(map(str, BATCHES))} its probabilities differ from the "
            f"model's by up to {worst:.2e}, more than {tolerance:g}"
        )
    write_whole(path, content)
    return worst


def _program(model: nn.Module, inputs: list[Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=2**16)
    return torch.export.export(model, (inputs[1],), dynamic_shapes=({0: batch},), strict=False)


# into memory first: torch ends the process where its own writer finds no room on a disk


def _write_program(model: nn.Module, inputs: list[Tensor]) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    torch.export.save(_program(model, inputs), file)
    content = file.getvalue()
    loaded: Any = torch.export.load(io.BytesIO(content)).module()
    return content, [loaded(x) for x in inputs]


def _write_onnx(model: nn.Module, inputs: list[Tensor]) -> tuple[bytes, list[Tensor]]:
    import onnxruntime

    program = torch.onnx.export(
        _program(model, inputs), (), input_names=["images"], output_names=["probabilities"], dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    assert program is not None
    content = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return content, [torch.from_numpy(session.run(None, {"images": x.numpy()})[0]) for x in inputs]


_WRITERS = {".pt2": _write_program, ".onnx": _write_onnx}
ENDINGS = tuple(_WRITERS)
"""Of files."""
