"""The command line of the benchmark: what to measure, and where the figures go."""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.estimate import H200, estimate
from torchcaps.bench.layers import measure
from torchcaps.bench.measuring import multiply_adds_per_second
from torchcaps.bench.report import plot, plot_scaling, step_table, table
from torchcaps.bench.scaling import SIZES, measure_scaling
from torchcaps.bench.steps import STEPS, measure_steps
from torchcaps.bench.workloads import WORKLOADS
from torchcaps.kernels import native
from torchcaps.routing._backends import Situation, choose

__all__ = ["main"]

FORMS = ["reference", "streamed", "native", "triton", "auto", "tutorial", "batched", "uniform", "compiled"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write what was asked for. Raises SystemExit for arguments that it does not know."""
    chosen = _parser().parse_args(arguments)
    if chosen.estimate:
        _estimates(chosen.workload or list(WORKLOADS), chosen.batch)
        return
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "torch": torch.__version__, "machine": platform.machine(), "device": chosen.device, "threads": chosen.threads,
        "native": native.build() or native.missing(),
    }  # fmt: skip
    print(f"{platform.machine()}, {chosen.threads} thread(s), {chosen.device}, torch {torch.__version__}, "
          f"CPU kernels: {record['native']}")  # fmt: skip
    forms = chosen.form or _backends(chosen.device)
    if chosen.step is not None:
        names = chosen.step or list(STEPS)
        steps = measure_steps(names, (chosen.batch or [None])[0], chosen.device, chosen.repeats)
        print("\n".join(step_table(steps)))
        record["steps"] = [asdict(s) for s in steps]
    elif chosen.scaling:
        points = measure_scaling(forms, _sizes(chosen.batch), chosen.device, chosen.repeats)
        for p in points:
            print(f"{p.letter} = {p.size:<6}{p.form:<11}{1000 * p.both:>9.2f} ms{(p.memory or 0) / 2**20:>9.1f} MiB")
        record["scaling"] = [asdict(p) for p in points]
        if chosen.plot:
            plot_scaling(points, chosen.plot)
    else:
        rows = _layers(chosen, forms, record)
        if chosen.plot:
            plot(rows, chosen.plot)
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1))


def _estimates(names: Sequence[str], batches: Sequence[int] | None) -> None:
    print(f"{H200.name}, from counted work and its data sheet; not measured")
    for name in names:
        for batch in batches or [WORKLOADS[name].N]:
            for e in estimate(replace(WORKLOADS[name], N=batch)):
                print(f"{name:<8}{batch:>6}  {e.form:<14}{1000 * e.forward:>9.3f} ms{1000 * e.both:>9.3f} ms")


def _layers(chosen: argparse.Namespace, forms: Sequence[str], record: dict[str, Any]) -> list[Any]:
    speed = multiply_adds_per_second()
    rows, floors = [], {}
    for name in chosen.workload or list(WORKLOADS):
        for batch in chosen.batch or [WORKLOADS[name].N]:
            workload = replace(WORKLOADS[name], N=batch)
            here = [form for form in forms if form != "batched" or workload.window is not None]
            rows += measure(workload, here, chosen.device, chosen.repeats)
            floors[name, batch] = workload.floor(speed)
            now = Situation(
                votes=workload.votes, lanes=workload.N * workload.positions * workload.R,
                native_cannot=native.missing() if chosen.device == "cpu" else "runs on the CPU",
                triton_cannot=None if chosen.device.startswith("cuda") else "runs on CUDA alone",
            )  # fmt: skip
            print(f"{name}, N={batch}: auto takes {choose('auto', now)}", flush=True)
    print(f"{2 * speed / 1e9:.0f} GFLOP/s in a large product")
    print("\n".join(table(rows, floors)))
    record |= {"multiply_adds_per_second": speed, "rows": [asdict(r) for r in rows]}
    return rows


def _backends(device: str) -> list[str]:
    """Every form that runs here, but the compiled one, which takes a minute to make."""
    fast = ["triton"] if device.startswith("cuda") else [] if native.missing() else ["native"]
    return ["reference", "tutorial", "streamed", *fast, "uniform"]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1 on")
    return int(text)


def _device(text: str) -> str:
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as e:
        raise argparse.ArgumentTypeError(f"{text}: PyTorch cannot use it here ({str(e).splitlines()[0]})") from e
    return text


def _sizes(of_each: Sequence[int] | None) -> dict[str, Sequence[int]]:
    return dict.fromkeys(SIZES, of_each) if of_each else SIZES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchcaps bench", description="What routing costs, in time and memory.")
    add = parser.add_argument
    add("--workload", nargs="+", choices=list(WORKLOADS), help="layers; all where not given")
    add("--step", nargs="*", choices=list(STEPS), help="whole training steps instead of layers")
    add("--scaling", action="store_true", help="how cost grows with N, I and J, instead of layers")
    add("--estimate", action="store_true", help="what an H200 should take, from counted work, instead of measuring")
    add("--batch", nargs="+", type=_count, help="batch sizes; each workload's own where not given")
    add(
        "--form",
        nargs="+",
        choices=FORMS,
        help="what to measure; all that run here but compiled and batched if not given",
    )
    add("--repeats", type=_count, default=5)
    add("--threads", type=_count, default=1)
    add("--device", type=_device, default="cpu")
    add("--json", type=Path, help="write all figures here")
    add("--plot", type=Path, help="draw time and memory here")
    return parser
