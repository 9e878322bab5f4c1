"""What holds for every test: one thread, the same random numbers each time, and shapes checked in every call."""

import os
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch

# Before anything imports Triton, which decides as it loads: kernels run on the CPU, in its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports torchcaps: where shapes are annotated they are checked at every call. The whole package would
# not do: Triton reads the source of its kernels and must find it as it is written.
jaxtyping.install_import_hook("torchcaps.routing._round", "shape_checks.check")

torch.set_num_threads(1)  # the tests run as one process per core


class _TorchRandom:
    """torch's default generator in the form of Python's `random`, so that hypothesis can set it for each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random: Any = _TorchRandom()  # hypothesis keeps a weak reference: this name keeps it alive
hypothesis.register_random(_torch_random)

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _same_random_numbers_each_time() -> None:
    torch.manual_seed(0)
