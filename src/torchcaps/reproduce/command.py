"""`torchcaps reproduce`: train a published experiment again and print ours beside the paper's."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.estimate import H200
from torchcaps.reproduce import experts
from torchcaps.reproduce.minutes import estimate_minutes
from torchcaps.reproduce.page import figure, percent, write_page
from torchcaps.reproduce.plan import Reproduction
from torchcaps.reproduce.running import Settings, reproduce
from torchcaps.reproduce.table import REPRODUCTIONS

__all__ = ["run"]


def run(command: str, arguments: Sequence[str]) -> None:
    """The command."""
    if arguments and arguments[0] == "experts":  # no network with a test accuracy: it has a command of its own
        experts.run(arguments[1:])
        return
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.page is not None:
        write_page(chosen.page, chosen.out)
        return
    if chosen.name is None:
        for name, plan in REPRODUCTIONS.items():
            print(f"{name}\n    {plan.title}\n    arms: {', '.join(plan.arms)}\n")
        print(f"experts\n    {experts.TITLE}\n    arms: {', '.join(experts.ARMS)}\n")
        return
    if chosen.name not in REPRODUCTIONS:
        known = [*REPRODUCTIONS, "experts"]
        close = difflib.get_close_matches(chosen.name, known, n=2)
        raise ValueError(
            f"there is no reproduction {chosen.name!r}"
            f"{': did you mean ' + ' or '.join(close) + '?' if close else ';'} there are {', '.join(known)}"
        )
    plan = REPRODUCTIONS[chosen.name]
    if unknown := [arm for arm in chosen.arms or () if arm not in plan.arms]:
        raise ValueError(f"{chosen.name} has no arm {unknown[0]!r}: it has {', '.join(plan.arms)}")
    if chosen.estimate:
        _estimates(plan, chosen.arms or list(plan.arms))
        return
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    settings = Settings(
        chosen.root, chosen.data, chosen.out, chosen.runs, chosen.epochs, chosen.limit,
        tuple(_changes(chosen.set or ())),
    )  # fmt: skip
    records = []
    for seed in plan.seeds if chosen.seeds is None else chosen.seeds:
        for arm in chosen.arms or plan.arms:
            print(f"{chosen.name}: {plan.arms[arm].what}, seed {seed}", flush=True)
            records.append(reproduce(chosen.name, plan, arm, seed, settings))
            _say(plan, records[-1:])
    print()
    _say(plan, records)


def _say(plan: Reproduction, records: Sequence[dict[str, Any]]) -> None:
    """Ours beside the paper's, and whether it is where it should be."""
    for name, arm in plan.arms.items():
        runs = [r for r in records if r["arm"] == name]
        if not runs:
            continue
        print(f"{arm.what}: {runs[0]['parameters']:,} parameters, {len(runs)} seed(s), {runs[0]['epochs']} epochs")
        for test_name, test in plan.tests.items():
            for measure in test.measures:
                key = f"{test_name}.{measure}"
                ours = [r["results"][test_name][measure] for r in runs]
                said, place = arm.paper.get(key, "-"), _place(ours, arm.expect.get(key))
                print(f"    {f'{test.what}, {measure}':<52}{figure(ours):>16}  paper {said:<10} {place}", flush=True)


def _estimates(plan: Reproduction, arms: Sequence[str]) -> None:
    """What each arm should take on a GPU."""
    print(f"{plan.title}: on a {H200.name}, from counted work and its data sheet; nothing here was measured")
    print(f"{'':<44}{'epochs':>8}{'GFLOP a step':>14}{'GB a step':>11}{'eager, min':>12}{'compiled, min':>15}")
    for name in arms:
        found = estimate_minutes(plan, plan.arms[name])
        operations = 6e-9 * found.step.multiply_adds * found.step.batch
        print(
            f"{plan.arms[name].what:<44}{found.epochs:>8}{operations:>14.0f}{found.step.moved / 1e9:>11.1f}"
            f"{found.eager:>12.1f}{found.compiled:>15.1f}",
            flush=True,
        )


def _place(ours: Sequence[float], expected: tuple[float, float] | None) -> str:
    if expected is None:
        return ""
    low, high = expected
    inside = all(low <= value <= high for value in ours)
    return f"{'inside' if inside else 'OUTSIDE'} {percent(low)} to {percent(high)}"


def _changes(pairs: Sequence[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write it as name=value, such as trainer.precision=32-true")
        found.append((name, value))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcaps reproduce", description="Train a published experiment again, and print ours beside the paper's."
    )
    add = parser.add_argument
    add("name", nargs="?", help="of the experiment; none lists them all")
    add("--arms", nargs="+", help="some of its networks; all where not given")
    add("--seeds", nargs="+", type=int, help="its own where not given")
    add("--root", default="data", help="folder of the data")
    add("--data", type=Path, help="a MedMNIST-style .npz in the place of the recipe's set; the records name it")
    add("--out", type=Path, default=Path("results"), help="folder of the records")
    add(
        "--runs",
        type=Path,
        default=Path("runs/reproduce"),
        help="folder of checkpoints, from which a killed run goes on",
    )
    add("--epochs", type=int, help="instead of the recipe's")
    add("--limit", type=int, help="use so many images alone: a trial")
    add("--set", nargs="+", metavar="NAME=VALUE", help="further arguments of torchcaps fit")
    add("--threads", type=int, help="of the processor")
    add("--estimate", action="store_true", help="what it should take on an H200, from counted work; trains nothing")
    add("--page", type=Path, help="write the page of results from the records in --out, and train nothing")
    return parser
