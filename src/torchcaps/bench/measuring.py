"""Time and memory of a call: what is measured, and how."""

import contextlib
import ctypes
import gc
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["by_itself", "multiply_adds_per_second", "peak", "saved_bytes", "spent"]

T = TypeVar("T")


def spent(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        before = time.process_time()
        work()
        return time.process_time() - before
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def peak(work: Callable[[], object], device: str) -> int | None:
    """Bytes that the peak grows by over `work`."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if platform.system() != "Linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    except OSError:
        return None
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


def by_itself(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, a function of a module, in a process of its own, for `peak`.

    There glibc gives every tensor pages of its own and takes them back at once: what a call holds is measured, and not
    how the heap happens to be cut. Raises RuntimeError where the process fails, which says why on standard error.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    asked = pickle.dumps((work, arguments))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=asked, env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the process that measures memory ended with status {done.returncode}")
    found: T = pickle.loads(done.stdout)
    return found


_CHILD = """
import os, pickle, sys
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever is printed is no answer
work, arguments = pickle.load(sys.stdin.buffer)
answer.write(pickle.dumps(work(*arguments)))
"""


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def multiply_adds_per_second(size: int = 1024) -> float:
    """The speed of a large matrix product on this CPU, one thread."""
    a = torch.randn(size, size)
    a @ a
    return size**3 / min(spent(lambda: a @ a, "cpu") for _ in range(5))


def saved_bytes(work: Callable[[], object]) -> int:
    """Bytes of all storages that `work` keeps for a backward pass, each counted once."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = work()
    del out
    return sum(kept.values())
