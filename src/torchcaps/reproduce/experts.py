"""Hauser 2019: capsules learned without labels, measured, beside random weights and beside what betters them.

    torchcaps reproduce experts --root DATA

One autoencoder for each set, then W and U of every arm and seed on it. results/experts.json gets a record for each, and
results/experts_SET_ARM_LAW.png the pictures. The source prints no numbers: there are none to stand beside ours.
"""

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data import MNIST, FashionMNIST, ImageData
from torchcaps.energy import ConvAutoencoder
from torchcaps.energy.generation import Law
from torchcaps.reproduce.records import append, config_hash, hardware, read, versions
from torchcaps.run.experts import (
    SOME,
    ExpertSettings,
    Part,
    draw,
    encode,
    fit_autoencoder,
    fit_experts,
    measure_experts,
    save_picture,
)
from torchcaps.training import read_checkpoint

__all__ = ["ARMS", "TITLE", "run", "section"]

SETS: dict[str, type[ImageData]] = {"mnist": MNIST, "fashion": FashionMNIST}


class Arm(NamedTuple):
    """One way to learn W and U: in words, and its settings."""

    what: str
    settings: ExpertSettings


ARMS = {
    "random": Arm("random W", ExpertSettings(objective="none", alone=True)),
    "paper": Arm("the paper's", ExpertSettings(alone=True)),
    "line": Arm("4 numbers on a line", ExpertSettings(line=4, alone=True)),
    "competition": Arm(
        "competition", ExpertSettings(objective="competition", iterations=1, centre=True, alone=True)
    ),
    "competition_routed": Arm(
        "competition, routed", ExpertSettings(objective="competition", centre=True, alone=True)
    ),
    "competition_even": Arm(
        "competition, no centre", ExpertSettings(objective="competition", iterations=1, alone=True)
    ),
}  # fmt: skip

PICTURES: tuple[tuple[str, Law], ...] = (
    ("paper", "sphere"), ("paper", "half"), ("competition", "sphere"), ("competition", "fitted"),
)  # fmt: skip
"""(arm, law) of what is drawn for the page, from the first seed."""


def run(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="torchcaps reproduce experts", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of W and U")
    add("--root", default="data", help="folder of the data")
    add("--out", type=Path, default=Path("results"), help="folder of the records and pictures")
    add("--runs", type=Path, default=Path("runs/experts"), help="folder of the trained chains")
    add("--limit", type=int, help="use so many images alone: a trial")
    add("--threads", type=int, help="of the processor")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    records = []
    for name in chosen.sets:
        parts = functools.cache(functools.partial(_parts, name, chosen))
        for seed in chosen.seeds:
            for arm in chosen.arms:
                records.append(_record(name, arm, seed, chosen, parts))
                _say(records[-1:])
    print()
    _say(records)


class Parts(NamedTuple):
    """The images of a set and what its autoencoder makes of them, which all arms and seeds share."""

    autoencoder: ConvAutoencoder
    train: Part
    test: Part
    other: Tensor
    """Codes of test images of the other set."""
    minutes: float
    """That the autoencoder took."""


def _parts(name: str, chosen: argparse.Namespace) -> Parts:
    settings = ExpertSettings()
    (images, labels), (test_images, test_labels) = _images(name, chosen)
    file = chosen.runs / name / f"autoencoder{'' if chosen.limit is None else f'-{chosen.limit}'}.pt"
    autoencoder = fit_autoencoder(settings, images, file, say=_now)
    other = _images(next(each for each in SETS if each != name), chosen)[1][0][:SOME]
    codes, test_codes, other_codes = (encode(settings, autoencoder, x) for x in (images, test_images, other))
    train, test = Part(images, labels, codes), Part(test_images, test_labels, test_codes)
    return Parts(autoencoder, train, test, other_codes, read_checkpoint(file)["minutes"])


def _record(name: str, arm: str, seed: int, chosen: argparse.Namespace, parts: Callable[[], Parts]) -> dict[str, Any]:
    """Of one chain: from the file, or trained now."""
    settings = ARMS[arm].settings
    asked = {"set": name, "settings": asdict(settings), "limit": chosen.limit}
    key, path = config_hash(asked), chosen.out / "experts.json"
    for record in read(path):
        if (record["arm"], record["seed"], record["config_hash"]) == (arm, seed, key):
            return record
    autoencoder, train, test, other, autoencoder_minutes = parts()
    _now(f"{name}, {arm}, seed {seed}")
    start, cpu = time.perf_counter(), time.process_time()
    folder = chosen.runs / name / f"{arm}-{key}-seed{seed}"
    pipeline = fit_experts(settings, autoencoder, train.images, train.codes, folder, seed=seed, say=_now)
    minutes, cpu_minutes = (time.perf_counter() - start) / 60, (time.process_time() - cpu) / 60
    results = measure_experts(pipeline, train, test, other=other, seed=seed)
    record = {
        "arm": arm, "set": name, "seed": seed, "config_hash": key, "settings": asdict(settings),
        "command": f"torchcaps reproduce experts --sets {name} --arms {arm} --seeds {seed}",
        "versions": versions(), "hardware": hardware(),
        "minutes": round(minutes, 2), "cpu_minutes": round(cpu_minutes, 2),
        "autoencoder_minutes": round(autoencoder_minutes, 2), "images": len(train.images),
        "results": results, "date": datetime.now(timezone.utc).date().isoformat(),
    }  # fmt: skip
    if chosen.limit is not None:
        record["limit"] = chosen.limit
    for law in (law for drawn, law in PICTURES if drawn == arm and seed == 0):
        save_picture(draw(pipeline, law=law), chosen.out / _picture(name, arm, law))
    append(path, record)
    return record


def _images(name: str, chosen: argparse.Namespace) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((training images, labels), (test images, labels))."""
    data = SETS[name](root=chosen.root, val_fraction=0.0, batch_size=1000, limit=chosen.limit)  # type: ignore[call-arg]
    data.prepare_data()
    parts = []
    for loader in (data.train_dataloader(), data.test_dataloader()):
        x, y = zip(*loader, strict=True)
        parts.append((torch.cat(x), torch.cat(y)))
    return parts[0], parts[1]


def _now(what: str) -> None:
    print(what, flush=True)


def _say(records: Sequence[dict[str, Any]]) -> None:
    for name, arm in dict.fromkeys((r["set"], r["arm"]) for r in records):
        runs = [r for r in records if (r["set"], r["arm"]) == (name, arm)]
        print(f"{name}, {arm}: {len(runs)} seed(s), {mean(r['minutes'] for r in runs):.1f} minutes")
        for measure in runs[0]["results"]:
            values = [r["results"][measure] for r in runs]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            print(f"    {measure:<36}{mean(values):10.4f}{spread}", flush=True)


def _picture(name: str, arm: str, law: str) -> str:
    return f"experts_{name}_{arm}_{law}.png"


ROWS = (
    ("linear probe on the 20 lengths, %", "probe.lengths", 100, 1),
    ("... of random W, routed alike", "probe.random_lengths", 100, 1),
    ("... on 20 principal components", "probe.pca_20", 100, 1),
    ("linear probe on all numbers, %", "probe.poses", 100, 1),
    ("... of random W, routed alike", "probe.random_poses", 100, 1),
    ("k-means on the 20 lengths, %", "clusters.lengths", 100, 1),
    ("... of random W, routed alike", "clusters.random_lengths", 100, 1),
    ("... on 20 principal components", "clusters.pca_20", 100, 1),
    ("k-means on all numbers, %", "clusters.poses", 100, 1),
    ("... of random W, routed alike", "clusters.random_poses", 100, 1),
    ("negatives drawn from the whole sphere, %", "negatives.sphere", 100, 1),
    ("... from half of it", "negatives.half", 100, 1),
    ("... from the fitted law", "negatives.fitted", 100, 1),
    ("... among test images", "negatives.real_images", 100, 1),
    ("free energy of shuffled capsules above that of images", "free_energy_gap.shuffled", 1, 2),
    ("... of random directions", "free_energy_gap.random_directions", 1, 2),
    ("... of the other set", "free_energy_gap.other_set", 1, 2),
    ("AUROC, images against shuffled capsules", "auroc.shuffled", 1, 3),
    ("... against random directions", "auroc.random_directions", 1, 3),
    ("... against the other set", "auroc.other_set", 1, 3),
    ("error of one step of mixing, of the mean 1", "one_step_error", 1, 2),
    ("squared error of images from all capsules, x 1000", "image_error.capsules", 1000, 1),
    ("... from 20 principal components", "image_error.pca_20", 1000, 1),
    ("... from 320 principal components", "image_error.pca_320", 1000, 1),
    ("... from the autoencoder alone", "image_error.autoencoder", 1000, 1),
    ("evenness of use, 1 is even", "use.entropy", 1, 2),
    ("class purity of the capsule that fires most, %", "use.purity", 100, 1),
    ("capsules that never change", "use.dead", 1, 1),
)
"""(in words, measure, factor, decimals) of the page; "..." is a control of the row above."""

TITLE = "Products of expert capsules"

ABOUT = (
    "Capsules learned without labels: a frozen convolutional autoencoder, 576 visible capsules of 8 numbers, 20 expert "
    "capsules of 16, and a decoder back. The source has pictures and no numbers. **The paper's** is contrastive "
    "divergence with one step of mixing by dynamic routing, on 20,000 images. **Competition** is added here: experts "
    "that win images for themselves (`torchcaps.energy.compete`), around the mean capsule, which ends F(-x) = F(x), "
    'the cause of photographic negatives; coupling is uniform there, and by routing in "routed". It '
    "knows no negatives: on MNIST it likes capsules of random direction better than those of images. The autoencoder "
    "of a set, one epoch over the 60,000 training images, was trained twice from the same seed, on two machines: the "
    "paper's on MNIST with seed 0 and competition stand on the first, all others on the second. Probes learn from "
    "10,000 and are tested on the 10,000 test images; errors and free energies of other capsules are of 2,000. ± is "
    "the standard deviation over "
    "seeds of W and U."
)


def section(records: Sequence[Mapping[str, Any]], folder: Path, pictures: Path) -> list[str]:
    """The lines of the page of results; new pictures move from `folder` to `pictures`, which stands beside the page."""
    lines = [f"## {TITLE}", "", "Hauser 2019, arXiv 1907.11643. `torchcaps reproduce experts`", "", ABOUT, ""]
    for name, data in SETS.items():
        arms = {arm: [r for r in records if (r["set"], r["arm"]) == (name, arm)] for arm in ARMS}
        arms = {arm: runs for arm, runs in arms.items() if runs}
        if not arms:
            continue
        lines += [f"### {data.__name__}", "", _row(["", *(ARMS[arm].what for arm in arms)])]
        lines += [_row(["---", *("---:" for _ in arms)]), _row(["seeds", *(str(len(runs)) for runs in arms.values())])]
        for what, measure, factor, decimals in ROWS:
            values = [[factor * r["results"][measure] for r in runs] for runs in arms.values()]
            lines.append(_row([what, *(_figure(each, decimals) for each in values)]))
        for what, key in (
            ("minutes of W and U", "minutes"), ("... of all cores", "cpu_minutes"),
            ("... of the autoencoder before", "autoencoder_minutes"),
        ):  # fmt: skip
            lines.append(_row([what, *(_figure([r[key] for r in runs], 1) for runs in arms.values())]))
        for arm, law in PICTURES:
            file = folder / _picture(name, arm, law)
            if arm in arms and file.exists():
                pictures.mkdir(parents=True, exist_ok=True)
                shutil.move(file, pictures / file.name)
            if arm in arms and (pictures / file.name).exists():
                what = f"{ARMS[arm].what}: a column for each of 20 capsules, four draws each, {LAWS[law]}"
                lines += ["", f"![{name}, {arm}]({pictures.name}/{file.name})", "", f"*{what[0].upper()}{what[1:]}.*"]
        lines.append("")
    return lines


LAWS = {"sphere": "from the whole sphere", "half": "from half of the sphere", "fitted": "from the fitted law"}


def _figure(values: Sequence[float], decimals: int) -> str:
    spread = f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{mean(values):.{decimals}f}{spread}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    run(sys.argv[1:])
