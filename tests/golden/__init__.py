"""The golden vectors: which files there are, how to read one, how closely it must be met. More in README.md here."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent

VALUES = 1e-9
"""Relative tolerance of every stored value."""
GRADIENTS = 1e-7
"""Relative tolerance of every stored gradient."""
NOTHING = 1e-12
"""Absolute tolerance, for numbers that are zero but for rounding."""

ROUTERS = (
    "others/adambielski_dense_extra0",
    "others/adambielski_dense_extra2",
    "others/bojone_head_full_r1",
    "others/bojone_head_full_r3",
    "others/bojone_head_shared_r1",
    "others/bojone_head_shared_r3",
    "others/bojone_jan2018_full_r1",
    "others/bojone_jan2018_full_r3",
    "others/bojone_jan2018_shared_r1",
    "others/bojone_jan2018_shared_r3",
    "others/labml_router_softmax_over_out_r1",
    "others/labml_router_softmax_over_out_r3",
    "others/sarasra_capsule_leaky0_r1",
    "others/sarasra_capsule_leaky0_r3",
    "others/sarasra_capsule_leaky1_r1",
    "others/xifeng_dense_r1",
    "others/xifeng_dense_r3",
)
SQUASHES = (
    "others/labml_squash",
    "others/xifeng_squash",
)
EXPERTS = (
    "others/own_poe_normin_r1",
    "others/own_poe_normin_r3",
    "others/own_poe_normout_r1",
)
ENUMERATION = "others/own_poe_enumeration"
FULLY_CONNECTED = (
    "inverted-attention/fc_matrix_it1",
    "inverted-attention/fc_matrix_it2",
    "inverted-attention/fc_matrix_step",
    "inverted-attention/fc_vector_d1_it2",
    "inverted-attention/fc_vector_it1",
    "inverted-attention/fc_vector_it3",
    "inverted-attention/fc_vector_step",
)
CONVOLUTIONS = (
    "inverted-attention/conv_matrix_s1_it1_fixed",
    "inverted-attention/conv_matrix_s1_it3_fixed",
    "inverted-attention/conv_matrix_s1_step_fixed",
    "inverted-attention/conv_matrix_s2_it1_fixed",
    "inverted-attention/conv_matrix_s2_it2_fixed",
    "inverted-attention/conv_matrix_s2_step_fixed",
    "inverted-attention/conv_vector_s2_it2_fixed",
)
MODELS = (
    "inverted-attention/model_concurrent_T1_fixed",
    "inverted-attention/model_concurrent_T2_fixed",
    "inverted-attention/model_sequential_T1_fixed",
    "inverted-attention/model_sequential_T3_fixed",
)
EMS = (
    "others/own_em_paper_fc_it1",
    "others/own_em_paper_fc_it3",
)
LOSSES = (
    "others/bojone_loss",
    "others/labml_margin_unsquared",
    "others/sarasra_margin_loss",
    "others/xifeng_caps_loss",
    "others/yl1993_spread",
)
FILES = (*ROUTERS, *SQUASHES, *EXPERTS, ENUMERATION, *FULLY_CONNECTED, *CONVOLUTIONS, *MODELS, *EMS, *LOSSES)


class Golden(Mapping[str, Tensor]):
    """One file: `golden["x"]` is a plain tensor, `golden.leaf("x")` one that a gradient is wanted of."""

    def __init__(self, name: str) -> None:
        with np.load(HERE / f"{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.leaves: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        return torch.from_numpy(np.array(self.arrays[key]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def number(self, key: str) -> float:
        """A stored scalar."""
        return float(self.arrays[key])

    def leaf(self, key: str) -> Tensor:
        """The tensor that `check_gradients` will ask the gradient of; the same one at every call."""
        if key not in self.leaves:
            self.leaves[key] = self[key].requires_grad_()
        return self.leaves[key]

    def check(self, key: str, actual: Tensor) -> None:
        """`actual` is the stored value."""
        close(actual, self[key], VALUES, key)

    def check_gradients(self, *pairs: tuple[Tensor, str]) -> None:
        """The gradients of the sum of every (output, name of its cotangent) are the stored ones, and all of those."""
        total = torch.zeros((), dtype=torch.float64)
        for output, cotangent in pairs:
            total = total + (output * self[cotangent]).sum()
        self.check_gradients_of(total)

    def check_gradients_of(self, total: Tensor) -> None:
        """The same for a scalar that is differentiated itself."""
        stored = {key for key in self if key.startswith(("grad_", "grad."))}
        wanted = {self._gradient(name): leaf for name, leaf in self.leaves.items()}
        assert stored == set(wanted), f"gradients that are stored, and that are tried, differ: {stored ^ set(wanted)}"
        gradients = torch.autograd.grad(total, list(wanted.values()))
        for key, gradient in zip(wanted, gradients, strict=True):
            close(gradient, self[key], GRADIENTS, key)

    @staticmethod
    def _gradient(name: str) -> str:
        return f"grad.{name.removeprefix('param.')}" if name.startswith("param.") else f"grad_{name}"


def close(actual: Tensor | None, expected: Tensor, rtol: float, what: str) -> None:
    """Every number within `rtol` of the expected one."""
    assert actual is not None, f"{what} is missing"
    torch.testing.assert_close(
        actual.detach(), expected, rtol=rtol, atol=NOTHING, msg=lambda text: f"{what}: {text}", check_dtype=True
    )
