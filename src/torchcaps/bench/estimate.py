"""What a GPU should take, from counted work and a data sheet alone: nothing here is measured.

    time = operations / (share of the peak)  or  bytes / (share of the bandwidth), whichever is more,  +  launches

Eager PyTorch is bound by the votes, V bytes, which it walks over: a forward pass writes them once, sums them in the
first round and reads them twice in each later one; a backward pass reads them for each use, and writes and adds up a
gradient of their size for each use:

    forward     V (1 + 1 + 2 (T - 1))                   backward     V (5 (2 T - 1) + 2)

The kernels are bound by recomputing the votes: the multiply-adds of `Workload.floor`. In float32 these run outside the
tensor cores; with TF32 inside.
"""

from dataclasses import dataclass

from torchcaps.bench.workloads import Workload

__all__ = ["H200", "Estimate", "Gpu", "estimate"]


@dataclass(frozen=True)
class Gpu:
    """From a data sheet: operations and bytes a second, seconds a launch; and what share of the peaks to hope for."""

    name: str
    float32: float
    tf32: float
    bfloat16: float
    bandwidth: float
    launch: float = 4e-6
    compute_share: float = 0.4
    bandwidth_share: float = 0.8


H200 = Gpu("H200 SXM", 67e12, 494.5e12, 989e12, 4.8e12)
"""NVIDIA's data sheet of the H200 (SXM), without sparsity; TFLOPS in float32, TF32 and bfloat16, and 4.8 TB/s."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a layer, forward and forward + backward."""

    form: str
    forward: float
    both: float


def estimate(workload: Workload, gpu: Gpu = H200) -> list[Estimate]:
    """Eager PyTorch beside the kernels in float32 and with TF32."""
    T = workload.rule.iterations
    moved = 4.0 * workload.votes / (gpu.bandwidth * gpu.bandwidth_share)
    walks, back = 2 + 2 * (T - 1), 5 * (2 * T - 1) + 2
    product = 2.0 * workload.votes * workload.P / (gpu.float32 * gpu.compute_share)
    launches = 6 * T + 4
    found = [
        Estimate(
            "eager",
            max(walks * moved, product) + launches * gpu.launch,
            max((walks + back) * moved, 3 * product) + 4 * launches * gpu.launch,
        )
    ]
    for form, speed in (("triton", gpu.float32), ("triton, TF32", gpu.tf32)):
        forward, both = workload.floor(speed * gpu.compute_share / 2)
        found.append(Estimate(form, forward + T * gpu.launch, both + 3 * T * gpu.launch))
    return found
