"""Times of the native passes: process CPU time, one thread, least of interleaved repeats.

python bench_native.py [fc|small|map|shared ..]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import native


def least(runs: dict[str, Callable[[], object]], repeats: int = 9) -> dict[str, float]:
    """Milliseconds of CPU time of each run."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], (time.process_time() - start) * 1e3)
    return best


def show(title: str, runs: dict[str, Callable[[], object]], repeats: int = 9) -> None:
    print(f"{title}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in least(runs, repeats).items()), "ms", flush=True)


def squash(s: Tensor) -> Tensor:
    q = s.square().sum((-2, -1), keepdim=True)
    return s * (q.sqrt() / (1 + q))


def squash_backward(s: Tensor, dv: Tensor) -> Tensor:
    s = s.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(squash(s), s, dv)[0]


def uniform_round(poses: Tensor, weight: Tensor) -> Tensor:
    return native.sum_pass(poses, weight, threads=1) / weight.shape[1]


def dynamic(poses: Tensor, weight: Tensor, dv: Tensor | None, rounds: int = 3) -> object:
    """Routing by dynamic agreement with the passes, forward and, with a gradient, backward."""
    J = weight.shape[1]
    sums, states = [uniform_round(poses, weight)], []
    state = squash(sums[0])
    for _ in range(rounds - 1):
        states.append(state)
        sums.append(native.forward_pass(poses, weight, state, threads=1))
        v = squash(sums[-1])
        state = state + v
    if dv is None:
        return v
    grads = [squash_backward(sums[-1], dv)]
    running = torch.zeros_like(dv)
    for k in range(rounds - 2, -1, -1):
        running = running + native.backward_state(poses, weight, states[k], grads[0], threads=1)
        grads.insert(0, squash_backward(sums[k], running))
    return native.backward_full(
        *(poses, weight, torch.stack(states), torch.stack(grads[1:])), uniform=grads[0] / J, with_state=False, threads=1
    )


def fc() -> None:
    torch.manual_seed(0)
    for N, I, J, R, P, Q in [
        (128, 1152, 10, 1, 8, 16),
        (128, 1152, 10, 1, 16, 16),
        (64, 288, 10, 4, 4, 4),
        (32, 1152, 100, 1, 8, 16),
    ]:
        poses, weight = torch.randn(N, I, R, P), torch.randn(I, J, P, Q) * 0.1
        state, grad = torch.randn(N, J, R, Q) * 0.1, torch.randn(N, J, R, Q)
        states, grads = state.expand(2, -1, -1, -1, -1).contiguous(), grad.expand(2, -1, -1, -1, -1).contiguous()
        show(
            f"connected N={N} I={I} J={J} {R}x{P}->{R}x{Q}",
            {
                "uniform": lambda: uniform_round(poses, weight),
                "forward pass": lambda: native.forward_pass(poses, weight, state, threads=1),
                "backward_state": lambda: native.backward_state(poses, weight, state, grad, threads=1),
                "backward_full 2": lambda: native.backward_full(
                    poses, weight, states, grads, uniform=grad, with_state=False, threads=1
                ),
                "T=3 forward": lambda: dynamic(poses, weight, None),
                "T=3 both": lambda: dynamic(poses, weight, grad),
            },
        )


def small() -> None:
    for N in (1, 2, 4, 8, 12, 16, 20, 24, 32):
        poses, weight, grad = torch.randn(N, 1152, 1, 8), torch.randn(1152, 10, 8, 16) * 0.1, torch.randn(N, 10, 1, 16)
        state = torch.randn(N, 10, 1, 16) * 0.1
        pair = torch.stack([state, state])
        show(
            f"connected N={N} I=1152 J=10 8->16",
            {
                "forward pass": lambda: native.forward_pass(poses, weight, state, threads=1),
                "backward_full 2": lambda: native.backward_full(poses, weight, pair, pair, with_state=False, threads=1),
                "T=3 forward": lambda: dynamic(poses, weight, None),
                "T=3 both": lambda: dynamic(poses, weight, grad),
            },
        )


def shared() -> None:
    for I in (64, 144, 576):
        poses, weight = torch.randn(128, I, 1, 128), torch.randn(1, 10, 128, 16) * 0.02
        state, grad = torch.randn(128, 10, 1, 16) * 0.1, torch.randn(128, 10, 1, 16)
        query, pull = torch.randn(2, 128, 10, 1, 128) * 0.1, torch.randn(2, 128, 10, 1, 128)
        show(
            f"shared N=128 I={I} d=128 J=10",
            {
                "forward pass": lambda: native.forward_pass(poses, weight, state, threads=1),
                "backward_state": lambda: native.backward_state(poses, weight, state, grad, threads=1),
                "folded full 2": lambda: native.folded_backward_full(poses, query, pull, threads=1),
            },
        )


def maps() -> None:
    torch.manual_seed(0)
    poses, weight = torch.randn(8, 32, 16, 16, 4, 4), torch.randn(288, 32, 4, 4) * 0.25
    state, grad = torch.randn(8, 49, 32, 4, 4) * 0.1, torch.randn(8, 49, 32, 4, 4)
    pair, grads = torch.stack([state, state]), torch.stack([grad, grad])
    options = {"kernel": (3, 3), "stride": (2, 2), "padding": (0, 0), "threads": 1}
    show(
        "map N=8 32->32 4x4 16x16->7x7",
        {
            "forward pass": lambda: native.map_forward_pass(poses, weight, state, **options),
            "backward_state": lambda: native.map_backward_state(poses, weight, state, grad, **options),
            "backward_full 2": lambda: native.map_backward_full(
                poses, weight, pair, grads, uniform=grad, with_state=False, **options
            ),
        },
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("build", native.build())
    for name in sys.argv[1:] or ["fc", "small", "map", "shared"]:
        {"fc": fc, "small": small, "map": maps, "shared": shared}[name]()
