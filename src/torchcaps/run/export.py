"""A trained model as a file that runs without this library, checked against the model itself.

    .pt2     torch.export, for PyTorch and ExecuTorch
    .onnx    ONNX, for onnxruntime and what builds on it

Both take images `[N, C, *size]` of any N and give probabilities `[N, K]`: what a score means goes into the file. It is
read back and run at batches of 1, 3 and 8, and kept only where the largest difference stays below the tolerance.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.training import probabilities
from torchcaps.training.scores import Link

__all__ = ["TOLERANCE", "export"]

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
    path: str | os.PathLike[str],
    shape: Sequence[int],
    *,
    multi_label: bool = False,
    link: Link | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """Write the model to `path` (.pt2 or .onnx) for inputs `[N, *shape]`, and return the largest difference found.

    Raises ValueError for another ending, and where the file differs from the model by more than `tolerance`: then no
    file is left.
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path}: the ending says what to write: {' or '.join(_WRITERS)}")
    whole = _Probabilities(model, multi_label, link).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(N, *shape, generator=generator) for N in BATCHES]
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.no_grad():
            found = _WRITERS[path.suffix](whole, part, inputs)
            worst = max(float((a - whole(x)).abs().max()) for a, x in zip(found, inputs, strict=True))
        if not worst <= tolerance:
            raise ValueError(
                f"{path} was not written: at batches of {', '.join(map(str, BATCHES))} its probabilities differ from "
                f"the model's by up to {worst:.2e}, more than {tolerance:g}"
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return worst


def _program(model: nn.Module, inputs: list[Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=2**16)
    return torch.export.export(model, (inputs[1],), dynamic_shapes=({0: batch},), strict=False)


def _write_program(model: nn.Module, path: Path, inputs: list[Tensor]) -> list[Tensor]:
    torch.export.save(_program(model, inputs), path)
    loaded: Any = torch.export.load(path).module()
    return [loaded(x) for x in inputs]


def _write_onnx(model: nn.Module, path: Path, inputs: list[Tensor]) -> list[Tensor]:
    import onnxruntime

    torch.onnx.export(
        _program(model, inputs), (), path, input_names=["images"], output_names=["probabilities"], dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(session.run(None, {"images": x.numpy()})[0]) for x in inputs]


_WRITERS = {".pt2": _write_program, ".onnx": _write_onnx}
