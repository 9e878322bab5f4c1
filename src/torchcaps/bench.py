"""What routing costs: time and memory of every backend beside the reference, in one run.

    python -m torchcaps.bench                                  all workloads, every backend that runs here
    python -m torchcaps.bench --workload fc --batch 1 8 128    one workload at several batch sizes
    python -m torchcaps.bench --json OUT.json --plot OUT.png

Machines are noisy, so what counts are ratios within one run. On a CPU the figure is the process's CPU time on one
thread, the smallest of interleaved repeats (a neighbour makes a run slower, never faster); on CUDA it is the time
between events. Memory is what the process's peak grows by over a call, after all that was free was given back (Linux),
or CUDA's peak.

Beside the backends stand:

    tutorial    the einsum style of tutorials: all votes, an einsum for every line, the last agreement computed in vain
    uniform     the same layer with one uniform round: what a layer costs with routing off
    floor       counted multiply-adds of a walk that recomputes votes, over the speed of a large matrix product here
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.func
from torch import Tensor, nn

from torchcaps.layers import ConvCapsules
from torchcaps.routing import Attention, Backend, Dynamic
from torchcaps.routing._backends import Situation, choose
from torchcaps.types import Capsules

__all__ = ["WORKLOADS", "Measured", "Workload", "measure"]


@dataclass(frozen=True)
class Workload:
    """A layer of the field at its usual size."""

    name: str
    what: str
    rule: Dynamic | Attention
    N: int
    I: int
    J: int
    R: int
    P: int
    Q: int
    shared: bool = False
    window: tuple[int, int, int] | None = None
    """(size of the map, kernel, stride) of a convolution; I is then the number of child types."""

    def make(self, device: str = "cpu") -> tuple[Callable[[Tensor, Tensor, str], Tensor], list[Tensor]]:
        """(route(poses, weight, backend) -> parents' poses, [poses, weight])."""
        if self.window is not None:
            size, kernel, stride = self.window
            layer = ConvCapsules(
                self.I, self.J, (self.R, self.P), (self.R, self.Q), kernel, stride, routing=self.rule
            ).to(device)
            poses = torch.randn(self.N, self.I, size, size, self.R, self.P, device=device, requires_grad=True)

            weight = layer.weight.detach().requires_grad_()

            def convolve(poses: Tensor, weight: Tensor, backend: str) -> Tensor:
                out: Tensor = torch.func.functional_call(_Routed(layer), {"layer.weight": weight}, (poses, backend))
                return out

            return convolve, [poses, weight]
        std = self.rule.weight_std(self.I, self.J, self.R, self.P, self.Q)
        weight = torch.empty(1 if self.shared else self.I, self.J, self.P, self.Q, device=device).normal_(0, std)

        def connect(poses: Tensor, weight: Tensor, backend: str) -> Tensor:
            return self.rule(poses, weight, backend=backend).poses  # type: ignore[arg-type]

        poses = torch.randn(self.N, self.I, self.R, self.P, device=device, requires_grad=True)
        return connect, [poses, weight.requires_grad_()]

    @property
    def positions(self) -> int:
        """Windows of an example, 1 without a convolution."""
        if self.window is None:
            return 1
        size, kernel, stride = self.window
        return ((size - kernel) // stride + 1) ** 2

    @property
    def children(self) -> int:
        """Children of a window."""
        return self.I if self.window is None else self.I * self.window[1] ** 2

    @property
    def votes(self) -> int:
        """Numbers in all votes."""
        return self.N * self.positions * self.children * self.J * self.R * self.Q

    def floor(self, speed: float) -> tuple[float, float]:
        """(forward, forward + backward) in seconds at `speed` multiply-adds a second, votes recomputed each walk."""
        T = self.rule.iterations
        vote = 0.0 if self.shared else self.P  # multiply-adds to form one number of a vote
        product = self.P * (1 if not self.shared else 1 / max(1, self.children))
        forward = product + (T - 1) * (vote + (2 if not self.shared else 2 * self.P / self.Q))
        light = (T - 1) * (vote + (3 if not self.shared else 3 * self.P / self.Q))
        full = vote + (T - 1) * (4 if not self.shared else 4 * self.P / self.Q) + 2 * product
        return self.votes * forward / speed, self.votes * (forward + light + full) / speed


class _Routed(nn.Module):
    """A layer as a function of its weight and of the backend."""

    def __init__(self, layer: ConvCapsules) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, backend: Backend) -> Tensor:
        return self.layer.route(Capsules(poses), backend=backend).poses


WORKLOADS = {
    w.name: w
    for w in (
        Workload("fc", "CapsNet's class capsules", Dynamic(), 128, 1152, 10, 1, 8, 16),
        Workload("shared", "shared weights over a map", Dynamic(), 128, 576, 10, 1, 128, 16, shared=True),
        Workload(
            "conv", "4x4 matrix capsules, 3x3 stride 2", Attention(iterations=3), 8, 32, 32, 4, 4, 4, window=(16, 3, 2)
        ),
    )
}


@dataclass(frozen=True)
class Measured:
    """One line of the table. Seconds; bytes, or None where the platform does not tell."""

    workload: str
    batch: int
    form: str
    forward: float
    both: float
    memory_forward: int | None
    memory_both: int | None


def measure(workload: Workload, forms: Sequence[str], device: str = "cpu", repeats: int = 5) -> list[Measured]:
    """Time and memory of a workload in every form, interleaved."""
    route, inputs = workload.make(device)
    calls = {form: _call(workload, route, form, device) for form in forms}
    forward = {form: float("inf") for form in forms}
    both = dict(forward)
    for repeat in range(repeats + 1):  # the first is a warm-up
        for form, call in calls.items():
            with torch.no_grad():
                spent = _time(functools.partial(call, *inputs), device)
            spent_both = _time(functools.partial(_forward_backward, call, inputs), device)
            if repeat:
                forward[form], both[form] = min(forward[form], spent), min(both[form], spent_both)
    memory = {}
    for form, call in calls.items():
        with torch.no_grad():
            alone = _peak(functools.partial(call, *inputs), device)
        memory[form] = alone, _peak(functools.partial(_forward_backward, call, inputs), device)
    return [Measured(workload.name, workload.N, form, forward[form], both[form], *memory[form]) for form in forms]


def _call(
    workload: Workload, route: Callable[..., Tensor], form: str, device: str
) -> Callable[[Tensor, Tensor], Tensor]:
    if form == "tutorial":
        return lambda poses, weight: _tutorial(workload, poses, weight)
    if form == "uniform":
        once, _ = replace(workload, rule=replace(workload.rule, iterations=1)).make(device)
        return lambda poses, weight: once(poses, weight, "auto")
    if form == "compiled":
        compiled = torch.compile(lambda poses, weight: route(poses, weight, "reference"))
        return lambda poses, weight: compiled(poses, weight)
    return lambda poses, weight: route(poses, weight, form)


def _tutorial(workload: Workload, poses: Tensor, weight: Tensor) -> Tensor:
    """Dynamic routing as tutorials write it, or a convolution by unfolding and one small product for each vote."""
    if workload.window is None:
        x, w = poses[:, :, 0], weight.expand(poses.shape[1], -1, -1, -1)
        u = torch.einsum("ijpq,nip->nijq", w, x)
        b = u.new_zeros(u.shape[:3])
        for _ in range(3):
            s = torch.einsum("nij,nijq->njq", b.softmax(-1), u)
            q = (s**2).sum(-1, keepdim=True)
            v = q / (1 + q) * s / torch.sqrt(q + 1e-8)
            b = b + torch.einsum("njq,nijq->nij", v, u)
        return v
    _, kernel, stride = workload.window
    x = poses.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [N, C, h, w, R, P, k, k]
    x = x.permute(0, 2, 3, 1, 6, 7, 4, 5).flatten(3, 5)  # [N, h, w, children, R, P]
    u = x[:, :, :, :, None] @ weight  # one 4x4 product for each vote
    p = u.sum(3) / workload.J
    p = torch.nn.functional.layer_norm(p, p.shape[-2:])
    for _ in range(workload.rule.iterations - 1):
        r = ((u * p[:, :, :, None]).sum((-2, -1)) * (workload.R * workload.Q) ** -0.5).softmax(-1)
        p = torch.nn.functional.layer_norm((r[..., None, None] * u).sum(3), p.shape[-2:])
    return p


def _forward_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _time(work: Callable[[], object], device: str) -> float:
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


def _peak(work: Callable[[], object], device: str) -> int | None:
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


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def multiply_adds_per_second(size: int = 1024) -> float:
    """The speed of a large matrix product on this CPU, one thread."""
    a = torch.randn(size, size)
    a @ a
    return size**3 / min(_time(lambda: a @ a, "cpu") for _ in range(5))


def table(rows: list[Measured], floors: dict[tuple[str, int], tuple[float, float]]) -> Iterator[str]:
    """The lines of a table; ratios are against the reference of the same workload and batch."""
    yield f"{'workload':<10}{'N':>5}  {'form':<11}{'forward':>12}{'both':>12}{'ratio':>16}{'memory':>14}{'ratio':>8}"
    for (name, batch), (forward, both) in floors.items():
        group = [r for r in rows if (r.workload, r.batch) == (name, batch)]
        base = next((r for r in group if r.form == "reference"), group[0])
        for r in group:
            ratio = f"{base.forward / r.forward:.1f}x {base.both / r.both:.1f}x"
            memory, less = "-", "-"
            if r.memory_both is not None:
                memory = f"{r.memory_both / 2**20:.1f} MiB"
                less = f"1/{base.memory_both / r.memory_both:.0f}" if r.memory_both and base.memory_both else "-"
            times = f"{1000 * r.forward:>9.2f} ms{1000 * r.both:>9.2f} ms"
            yield f"{name:<10}{batch:>5}  {r.form:<11}{times}{ratio:>16}{memory:>14}{less:>8}"
        yield f"{name:<10}{batch:>5}  {'floor':<11}{1000 * forward:>9.2f} ms{1000 * both:>9.2f} ms"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m torchcaps.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--batch", nargs="+", type=int, help="batch sizes; each workload's own where not given")
    parser.add_argument("--form", nargs="+", default=["reference", "tutorial", "streamed", "auto", "uniform"],
                        help="backends, or tutorial, uniform, compiled")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    speed = multiply_adds_per_second()
    rows, floors = [], {}
    for name in chosen.workload:
        for batch in chosen.batch or [WORKLOADS[name].N]:
            workload = replace(WORKLOADS[name], N=batch)
            rows += measure(workload, chosen.form, chosen.device, chosen.repeats)
            floors[name, batch] = workload.floor(speed)
            auto = choose("auto", Situation(votes=workload.votes, lanes=workload.N * workload.positions * workload.R))
            print(f"{name}, N={batch}: auto takes {auto}", flush=True)
    print(f"{platform.machine()}, {chosen.threads} thread(s), {chosen.device}, torch {torch.__version__}, "
          f"{2 * speed / 1e9:.0f} GFLOP/s in a large product")  # fmt: skip
    print("\n".join(table(rows, floors)))
    if chosen.json:
        record = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": chosen.threads,
            "multiply_adds_per_second": speed,
            "rows": [asdict(r) for r in rows],
        }
        chosen.json.write_text(json.dumps(record, indent=1))
    if chosen.plot:
        plot(rows, chosen.plot)


def plot(rows: list[Measured], path: Path) -> None:
    """Time and memory against the batch, one line for each form."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({r.workload for r in rows})
    figure, axes = plt.subplots(len(names), 2, figsize=(10, 3 * len(names)), squeeze=False, layout="constrained")
    for (left, right), name in zip(axes, names, strict=True):
        for form in dict.fromkeys(r.form for r in rows):
            line = sorted((r for r in rows if r.workload == name and r.form == form), key=lambda r: r.batch)
            left.plot([r.batch for r in line], [1000 * r.both for r in line], "o-", label=form)
            right.plot([r.batch for r in line], [(r.memory_both or 0) / 2**20 for r in line], "o-", label=form)
        left.set(title=f"{name}: forward + backward, ms", xscale="log", yscale="log", xlabel="batch")
        right.set(title=f"{name}: peak memory, MiB", xscale="log", yscale="log", xlabel="batch")
        left.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
