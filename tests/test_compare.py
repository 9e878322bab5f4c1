"""Comparing heads: fair to every arm, the same each time, whole after a stop, and honest in what it says."""

import csv
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import Arrays, Digits, ImageData, SideBySide
from torchcaps.run.compare import Arm, Comparison, compare, comparison, main, open_data, standard_arms, trial
from torchcaps.training import Optimization

SMALL: dict[str, Any] = {"head": {"widths": (4, 8), "primary_types": 2, "primary_pose": 4, "class_pose": 4}}
FAST = Optimization("adamw", lr=0.02)
QUICK: dict[str, Any] = {
    **SMALL, "seeds": 2, "epochs": 2, "optimization": FAST, "robustness": False, "say": lambda line: None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_time_for_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.run.compare.costs.SECONDS", 0.0)


def blobs(items: int = 60, size: tuple[int, ...] = (8, 8), **settings: Any) -> Arrays:
    """Two classes: bright at the start, or at the end of the first axis."""
    x = 0.3 * torch.rand(items, 1, *size, generator=torch.Generator().manual_seed(0)).numpy()
    y = np.arange(items) % 2
    x[y == 0, :, : size[0] // 2] += 0.5
    x[y == 1, :, size[0] // 2 :] += 0.5
    kind = {1: "signal", 2: "image"}[len(size)]
    return Arrays(x, y, kind=kind, layout="channels_first", test_fraction=0.4, batch_size=16, **settings)


def without_times(c: Comparison) -> list[dict[str, Any]]:
    return [{key: value for key, value in r.items() if key != "minutes"} for r in c.records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcaps.run.compare.costs.SECONDS", 0.0)
        c = compare(blobs(), folder, **{**QUICK, "epochs": 8, "robustness": True}, name="<Blobs> & co")
    return c, folder


def test_every_arm_is_trained_from_every_seed_and_measured(whole: tuple[Comparison, Path]) -> None:
    c, folder = whole
    keys = [arm.key for arm in c.arms]
    assert keys == ["linear", "matched", "uniform", "routed"]
    assert [(r["arm"], r["seed"]) for r in c.records] == [(key, seed) for seed in (0, 1) for key in keys]
    assert {path.name for path in (folder / "records").iterdir()} == {
        f"{key}-100percent-seed{seed}.json" for key in keys for seed in (0, 1)
    }
    for key in keys:
        assert c.values(key, "accuracy").mean() > 0.9  # such blobs are easy
        assert all(len(r["items"]["accuracy"]) == 24 for r in c.of(key))
        cost = c.costs[key]
        assert min(cost["parameters"], cost["multiply_adds"], cost["step_bytes"], cost["ms"]) > 0


def test_plain_head_and_capsules_have_as_many_parameters(whole: tuple[Comparison, Path]) -> None:
    costs = whole[0].costs
    assert costs["matched"]["head_parameters"] == pytest.approx(costs["routed"]["head_parameters"], rel=0.05)
    assert costs["uniform"]["parameters"] == costs["routed"]["parameters"]
    assert costs["linear"]["parameters"] < costs["matched"]["parameters"]


def test_routing_off_is_one_round_of_the_same_head() -> None:
    routing = {"rule": "Dynamic.sabour_code", "leaky": True, "learn_prior": True}
    _, _, uniform, routed = standard_arms(blobs(), routing=routing, **SMALL)
    off, on = uniform.build(), routed.build()
    rules = [model.head.class_caps.routing for model in (off, on)]
    assert rules[0] == dataclasses.replace(rules[1], iterations=1, leaky=False, learn_prior=False)
    coupling = off.head.class_caps.route(off.head.primary(off.backbone(torch.rand(1, 1, 8, 8))), return_coupling=True)
    assert coupling.coupling.unique().tolist() == [0.5]


def test_all_arms_start_from_the_same_backbone_and_see_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[tuple[str, int], tuple[dict[str, torch.Tensor], list[float]]] = {}
    train = trial._train

    def watched(module: Any, data: ImageData, *rest: Any) -> Any:
        weights = {name: w.clone() for name, w in module.model.backbone.state_dict().items()}
        seen = [float(x.double().sum()) for x, _ in data.train_dataloader()]
        started[rest[-1]] = weights, [*seen, float(torch.rand(()))]  # dropout draws the same, too
        return train(module, data, *rest)

    monkeypatch.setattr(trial, "_train", watched)
    data, budget = blobs(), trial.Budget(1, Optimization(), device="cpu")
    for arm in standard_arms(data, **SMALL):
        for seed in (0, 1):
            trial.run_trial(trial.Trial(arm, seed), data, budget, 1, None)
    for seed in (0, 1):
        first, *others = (started[f"{key}, seed {seed}"] for key in ("linear", "matched", "uniform", "routed"))
        for weights, seen in others:
            assert seen == first[1]
            assert all(torch.equal(weights[name], first[0][name]) for name in first[0])
    assert started["linear, seed 0"][1][0] != started["linear, seed 1"][1][0]
    assert not torch.equal(*(next(iter(started[f"linear, seed {s}"][0].values())) for s in (0, 1)))


def test_a_comparison_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(
    whole: tuple[Comparison, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**QUICK, "epochs": 8, "robustness": True, "name": "<Blobs> & co"}

    def stop(line: str) -> None:
        if line.startswith("3 of 8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(blobs(), tmp_path, **{**settings, "say": stop})
    assert len(list((tmp_path / "records").iterdir())) == 3
    assert not (tmp_path / "report.html").exists()
    torch.rand(1)  # the state of torch's random numbers plays no part
    trained, run = [], comparison.run_trial
    monkeypatch.setattr(comparison, "run_trial", lambda t, *rest: trained.append(t) or run(t, *rest))
    resumed = compare(blobs(), tmp_path, **settings)
    assert len(trained) == 5
    assert without_times(resumed) == without_times(whole[0])
    assert resumed.verdict == whole[0].verdict
    again = compare(blobs(), tmp_path, **settings)
    assert len(trained) == 5
    assert again.records == resumed.records


def test_nothing_outside_a_comparison_is_changed_by_it(tmp_path: Path) -> None:
    data = blobs(seed=5)
    state = torch.get_rng_state()
    compare(data, tmp_path, **{**QUICK, "seeds": 1, "epochs": 1, "arms": ["linear"]}, label_fractions=(0.5, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert (data.seed, data.label_fraction, len(data.parts.train)) == (5, None, blobs().parts.train.labels.numel())


@pytest.mark.parametrize("select", ["last", "best"])
def test_what_is_trained_does_not_depend_on_test_items(select: str, tmp_path: Path) -> None:
    def run(labels: int, folder: str) -> list[dict[str, Any]]:
        parts = blobs().parts
        (x, y), (x_val, y_val), (x_test, y_test) = (
            part.take(0, np.arange(len(part))) for part in (parts.train, parts.val, parts.test)
        )
        y_test = (y_test + labels) % 2
        data = Arrays(x, y, x_val=x_val, y_val=y_val, x_test=x_test, y_test=y_test, batch_size=16)
        settings = {**QUICK, "seeds": 1, "epochs": 8, "arms": ["routed"], "select": select}
        return compare(data, tmp_path / folder, **settings).records

    (one,), (other,) = run(0, "right"), run(1, "wrong")
    assert one["history"] == other["history"]
    assert one["temperature"] == other["temperature"]
    assert one["metrics"] != other["metrics"]


def test_the_best_epoch_is_that_of_the_lowest_validation_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []
    answers = trial._answers

    def watched(module: Any, loader: Any) -> Any:
        found = answers(module, loader)
        with torch.no_grad():
            tested.append(float(module.loss(module.model(next(iter(loader))[0]), found[1])))
        return found

    monkeypatch.setattr(trial, "_answers", watched)
    settings = {**QUICK, "seeds": 1, "epochs": 6, "arms": ["linear"], "optimization": Optimization("sgd", lr=3.0)}
    data = blobs(40, eval_batch_size=100)
    for select in ("last", "best"):
        (record,) = compare(data, tmp_path / select, **settings, select=select, clip=None).records
        losses = [row["val_loss"] for row in record["history"]]
        assert len(losses) == 6
        assert losses[-1] > min(losses)  # such a learning rate jumps about
        wanted = losses[-1] if select == "last" else min(losses)
        assert tested[-2] == pytest.approx(wanted, rel=1e-4)  # validation data come before test data


def test_a_share_of_the_labels_is_trained_on_for_as_many_steps_with_as_much_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[list[float]] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *rest: Any, **more: Any) -> Any:
        if rates:  # not where memory is estimated
            rates[-1].append(self.param_groups[0]["lr"])
        return step(self, *rest, **more)

    train = trial._train
    monkeypatch.setattr(trial, "_train", lambda *rest: rates.append([]) or train(*rest))
    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    warm = Optimization("adamw", schedule="multistep", warmup_epochs=1, milestones=[2])
    settings = {**QUICK, "seeds": 1, "epochs": 5, "arms": ["matched", "routed"], "optimization": warm}
    c = compare(blobs(100), tmp_path, **{**settings, "robustness": True}, label_fractions=(0.25, 0.7, 1))
    assert c.fractions == [1.0, 0.7, 0.25]
    assert [len(trial.with_fraction(blobs(100), share).parts.train) for share in c.fractions] == [54, 38, 14]
    wanted = [*np.array([1, 2, 3, 4]) / 5, *[1.0] * 4, *[0.1] * 12]  # 4, 3 and 1 batches an epoch
    assert rates == [[pytest.approx(1e-3 * share) for share in wanted]] * 6
    assert [bool(r["robustness"]) for r in c.records] == [True, True, False, False, False, False]
    assert "<h2>Fewer labels</h2>" in (tmp_path / "report.html").read_text()


def test_the_csv_has_a_row_for_each_network_and_the_json_no_nan(whole: tuple[Comparison, Path]) -> None:
    c, folder = whole
    rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(row["arm"], int(row["seed"]), float(row["label_fraction"])) for row in rows] == [
        (r["arm"], r["seed"], r["fraction"]) for r in c.records
    ]
    first = c.records[0]
    assert float(rows[0]["accuracy"]) == first["metrics"]["accuracy"]
    assert float(rows[0]["rotation@90"]) == first["robustness"]["rotation"]["accuracy"][-1]
    found = json.loads((folder / "results.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert found["verdict"] == c.verdict
    assert {d["of"] for d in found["differences"]} >= {"accuracy", "nll", "rotation", "overlap"}
    mean, sd = found["means"]["routed"]["accuracy"]
    assert (mean, sd) == (
        pytest.approx(c.values("routed", "accuracy").mean()),
        c.values("routed", "accuracy").std(ddof=1),
    )


def test_the_report_holds_everything_itself_and_names_of_data_are_no_code(whole: tuple[Comparison, Path]) -> None:
    page = (whole[1] / "report.html").read_text("utf-8")
    assert "&lt;Blobs&gt; &amp; co" in page
    assert "<Blobs>" not in page
    assert re.findall(r"""(?:src|href)=["'](?!data:)|url\(|@import|https?://|<script""", page) == []
    for title in (
        "Differences",
        "Results",
        "Every network",
        "Robustness",
        "Calibration",
        "Learning",
        "Costs",
    ):
        assert f"<h2>{title}</h2>" in page
    assert page.count("<svg class='chart'") + page.count('<svg class="chart"') == 6 + 2 + 2


def made_up(right: dict[str, float], seeds: int = 3, measure: str = "accuracy") -> Comparison:
    """Arms that are right on these shares of 200 items."""
    arms = [Arm(key, key, {"name": "linear_head"}) for key in right]
    records = []
    for key, share in right.items():
        for seed in range(seeds):
            answers = (np.random.default_rng(seed).random(200) < share).astype(float).tolist()
            metrics = {"accuracy": float(np.mean(answers))}
            records.append(
                {"arm": key, "seed": seed, "fraction": 1.0, "metrics": metrics, "items": {"accuracy": answers}}
            )
    facts = {"test_items": 200}
    labels = np.repeat([0, 1], [150, 50])
    return Comparison("Things", measure, arms, list(range(seeds)), [1.0], {}, records, facts, labels)


@pytest.mark.parametrize(
    ("shares", "capsules", "routing"),
    [
        ((0.7, 0.7, 0.9), "better than", "made it better"),
        ((0.9, 0.7, 0.7), "worse than", "added nothing measurable"),
        ((0.8, 0.8, 0.8), "not measurably different from", "added nothing measurable"),
        ((0.9, 0.9, 0.6), "worse than", "made it worse"),
    ],
)
def test_the_verdict_is_what_the_intervals_say(shares: tuple[float, ...], capsules: str, routing: str) -> None:
    c = made_up(dict(zip(("matched", "uniform", "routed"), shares, strict=True)))
    d = c.difference("routed", "matched")
    assert f"the capsule head is {capsules} a plain head of the same size in accuracy" in c.verdict
    assert f"routing itself {routing}" in c.verdict
    assert f"{100 * d.mean:+.1f} points, 95 % interval {100 * d.low:+.1f} to {100 * d.high:+.1f}" in c.verdict
    assert c.verdict.count(".") - c.verdict.count(" % ") <= 1 + len(re.findall(r"\d\.\d", c.verdict))


def test_one_seed_is_no_verdict() -> None:
    c = made_up({"matched": 0.5, "uniform": 0.5, "routed": 0.9}, seeds=1)
    assert "one seed decides nothing" in c.verdict
    assert "seeds=3" in c.verdict


def test_shares_differ_by_no_more_than_all() -> None:
    c = made_up({"matched": 0.5, "routed": 0.5}, seeds=2)
    c.of("routed")[0]["items"]["accuracy"] = [0.0] * 200
    d = c.difference("routed", "matched")
    assert (d.low, d.high) == (-1, 1)
    assert d.direction == "none"


def test_balanced_accuracy_counts_each_class_alike() -> None:
    c = made_up({"matched": 0.5, "routed": 0.5}, measure="balanced_accuracy")
    for record in c.of("routed"):
        record["items"]["accuracy"] = [0.0] * 150 + [1.0] * 50
    for record in c.of("matched"):
        record["items"]["accuracy"] = [0.0] * 200
    assert c.difference("routed", "matched").mean == pytest.approx(0.5)
    assert c.difference("routed", "matched", "accuracy").mean == pytest.approx(0.25)


def test_several_labels_are_compared_by_exact_match(tmp_path: Path) -> None:
    data = SideBySide(Digits(limit=60), batch_size=32)
    c = compare(data, tmp_path, **{**QUICK, "seeds": 1, "epochs": 1, "robustness": True}, arms=["matched", "routed"])
    assert c.measure == "exact_match"
    assert {"exact_match", "map", "nll_calibrated"} <= set(c.records[0]["metrics"])
    assert "both" in c.records[0]["robustness"]
    assert "every yes-or-no answer" in (tmp_path / "report.html").read_text()


def test_signals_of_different_lengths_are_compared(tmp_path: Path) -> None:
    lengths = [20 + i % 7 for i in range(60)]
    signals = [
        np.full(n, i % 2, np.float32) + 0.1 * np.sin(np.arange(n, dtype=np.float32)) for i, n in enumerate(lengths)
    ]
    data = Arrays(signals, np.arange(60) % 2, batch_size=16)
    c = compare(data, tmp_path, **{**QUICK, "seeds": 1, "robustness": True}, arms=["matched", "routed"])
    assert set(c.records[0]["robustness"]) == {"noise", "occlusion"}
    assert "20 signals" not in c.verdict


def test_a_model_of_ones_own_is_one_more_arm(tmp_path: Path) -> None:
    mine = Arm("mine", "My <net>", {"name": "linear_head", "num_classes": 2, "image_size": [8, 8], "widths": [4]})
    c = compare(blobs(), tmp_path, **{**QUICK, "epochs": 1}, arms=["matched", "routed", mine])
    assert [arm.key for arm in c.arms] == ["matched", "routed", "mine"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("My &lt;net&gt;") > 5
    assert "<net>" not in page
    assert {(d["a"], d["b"]) for d in json.loads((tmp_path / "results.json").read_text())["differences"]} == {
        ("routed", "matched"), ("mine", "matched"),
    }  # fmt: skip


def test_any_model_of_timm_is_a_backbone(tmp_path: Path) -> None:
    data = blobs(40, (32, 32))
    c = compare(
        data, tmp_path, backbone={"timm": "test_resnet", "stage": 1}, seeds=1, epochs=1, robustness=False,
        arms=["linear", "uniform", "routed"], head={"primary_types": 2}, say=lambda line: None,
    )  # fmt: skip
    assert c.costs["linear"]["parameters"] - c.costs["linear"]["head_parameters"] > 50_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 0}, "seeds=0: give how many, 1 or more"),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\]"),
        ({"seeds": "3"}, "seeds='3'"),
        ({"epochs": 0}, "epochs=0: give a whole number, 1 or more"),
        ({"select": "test"}, "select='test': take 'last' or 'best'"),
        ({"device": "tpu"}, "device='tpu': take 'auto', 'cpu' or 'cuda'"),
        ({"measure": "exact_match"}, "measure='exact_match': for data with one label an item take 'accuracy' or"),
        ({"label_fractions": (0.0, 1)}, "label_fractions=.*: give shares above 0 up to 1"),
        ({"arms": ["routed", "routed"]}, "arms routed, routed: give one at least, and each a key of its own"),
        ({"arms": ["capsules"]}, "there is no arm 'capsules': take linear, matched, uniform, routed"),
        ({"arms": []}, "arms none"),
        ({"routing": "Sabour"}, "routing 'Sabour' is not there: take one of Dynamic"),
        ({"routing": {"rule": "Dynamic", "iterations": 1}}, "nothing is left to switch off"),
        ({"head": {"hidden": 3}}, "'hidden' is none of widths, primary_types"),
        ({"backbone": "resnet9000"}, "timm has no model 'resnet9000'"),
        ({"data": [1, 2]}, "data must be a set of torchcaps.data, such as"),
        ({"data": blobs(val_fraction=0)}, "Arrays has no validation part"),
        ({"data": Arrays(np.zeros((9, 8, 8)) + np.arange(9)[:, None, None], np.arange(9) % 3, test_fraction=0)},
         "Arrays has no test part"),
        ({"data": Arrays(np.zeros((9, 8, 8)) + np.arange(9)[:, None, None], np.arange(9) % 3,
                         x_test=np.ones((1, 8, 8)), y_test=[0])},
         "Arrays has 1 test item: arms are compared on 2 at least"),
        ({"data": SideBySide(Digits(limit=40)), "label_fractions": (0.1, 1)}, "SideBySide has no label_fraction"),
        ({"arms": [Arm("a", "a", {"name": "linear_head", "num_classes": 2}, "binary_cross_entropy")]},
         "these data have one label an item: take 'cross_entropy', or 'margin'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = settings.pop("data", None) or blobs()
    with pytest.raises(ValueError, match=message):
        compare(data, tmp_path, **{**QUICK, **settings})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_comparison_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    settings = {**QUICK, "seeds": 1, "epochs": 1, "arms": ["linear"]}
    compare(blobs(), tmp_path, **settings)
    with pytest.raises(ValueError, match="epochs was 1 there, and is 2 here: give another folder as out="):
        compare(blobs(), tmp_path, **{**settings, "epochs": 2})
    with pytest.raises(ValueError, match="another comparison: data was"):
        compare(blobs(62), tmp_path, **settings)
    x = np.random.default_rng(0).random((40, 8, 8))

    def with_test_items(count: int) -> Arrays:  # the first batch of each part is the same
        return Arrays(x, np.arange(40) % 2, x_test=x[:count], y_test=np.arange(count) % 2, batch_size=8)

    compare(with_test_items(10), tmp_path / "ten", **settings)
    with pytest.raises(ValueError, match="another comparison: data was"):
        compare(with_test_items(12), tmp_path / "ten", **settings)
    (record,) = (tmp_path / "records").iterdir()
    record.write_text(record.read_text()[:-20])
    with pytest.raises(ValueError, match=r"linear-100percent-seed0\.json is no record of a comparison: delete it"):
        compare(blobs(), tmp_path, **settings)


@pytest.mark.parametrize("part", ["training", "test"])
def test_other_items_behind_the_first_batch_are_other_data(part: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((40, 8, 8))

    def with_changed(part: str) -> Arrays:
        both = {"training": x.copy(), "test": x.copy()}
        if part:
            both[part][-1] = 0.5
        y = np.arange(40) % 2
        return Arrays(both["training"], y, x_test=both["test"], y_test=y, batch_size=8, val_fraction=0.2)

    settings = {**QUICK, "seeds": 1, "epochs": 1, "arms": ["linear"]}
    compare(with_changed(""), tmp_path, **settings)
    with pytest.raises(ValueError, match="another comparison: data was"):
        compare(with_changed(part), tmp_path, **settings)


@pytest.mark.parametrize("place", ["file", "file/out", "/proc/nothing/out"])
def test_a_place_that_cannot_be_written_is_found_before_anything_is_trained(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here already")
    monkeypatch.setattr(comparison, "run_trial", lambda *rest: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=r"give the name of a folder|cannot be written .*: give another place"):
        compare(blobs(), tmp_path / place, **QUICK)
    with pytest.raises(ValueError, match=r"give the name of a folder|cannot be written .*: give another place"):
        main(["nowhere", "--out", str(tmp_path / place)])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_outcome_is_said_once_and_short_times_in_seconds(tmp_path: Path) -> None:
    said: list[str] = []
    c = compare(blobs(), tmp_path, **{**QUICK, "seeds": 1, "epochs": 1, "say": said.append})
    assert "\n".join(said).count(c.verdict) == 1
    assert said[-1] == str(tmp_path / "report.html")
    assert re.fullmatch(r"1 of 4: linear, seed 0: accuracy \d+\.\d %, \d+\.\d seconds", said[0])
    assert comparison._duration(2.5) == "2.5 minutes"


def test_help_names_what_is_taken_where_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for words in ("each arm (3)", "training each (20)", "every arm (64)", "every arm (0.002)"):
        assert words in told


def test_seeds_can_be_added_later(tmp_path: Path) -> None:
    settings = {**QUICK, "epochs": 1, "arms": ["linear"]}
    one = compare(blobs(), tmp_path, **{**settings, "seeds": 1})
    three = compare(blobs(), tmp_path, **{**settings, "seeds": 3})
    assert three.records[0] == one.records[0]
    assert len({math.fsum(r["items"]["nll"]) for r in three.records}) == 3


def test_an_arm_whose_loss_is_no_number_stops_with_its_name(tmp_path: Path) -> None:
    wild = Optimization("sgd", lr=1e30, momentum=0)
    with pytest.raises(FloatingPointError, match=r"linear, seed 0: the loss of step .* Networks that were finished"):
        compare(blobs(), tmp_path, **{**QUICK, "arms": ["linear"], "optimization": wild, "clip": None})


def test_the_command_compares_what_a_path_or_a_name_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).random((40, 9, 7)), y=np.arange(40) % 2)
    c = main([
        str(tmp_path / "mine.npz"), "--out", str(tmp_path / "out"), "--seeds", "1", "--epochs", "1", "--shift", "1",
        "--arms", "matched", "routed", "--routing", '{"rule": "Attention"}', "--iterations", "2", "--no_robustness",
        "--batch_size", "8", "--lr", "0.01",
    ])  # fmt: skip
    assert c.arms[1].config["routing"] == {"rule": "Attention", "iterations": 2}
    assert c.facts["optimization"]["lr"] == 0.01
    assert "shift=1" in c.facts["augment"]
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    assert isinstance(open_data("digits", batch_size=8), Digits)
    for wrong, message in (
        ("nowhere", "there is no set and no file 'nowhere': give digits"),
        (__file__, "is no folder, .npz"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_data(wrong)
    with pytest.raises(ValueError, match="give --backbone too"):
        main([str(tmp_path / "mine.npz"), "--out", str(tmp_path / "b"), "--pretrained"])


@pytest.mark.parametrize("option", [["--kind", "signal"], ["--separator", "|"]])
def test_what_is_said_of_files_is_refused_for_other_data(option: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{option[0]} says something of"):
        main(["digits", "--out", str(tmp_path / "out"), *option])


def test_arrays_and_tables_can_be_told_what_they_hold(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=random.normal(size=(40, 6, 24)), y=np.arange(40) % 2)
    for k in range(24):
        Image.fromarray(random.integers(0, 255, (12, 12), dtype=np.uint8)).save(tmp_path / f"{k}.png")
    labels = ["cat|dog", "dog", "", "cat"]
    rows = [f"{k}.png,{labels[k % 4]}" for k in range(24)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    brief = ["--seeds", "1", "--epochs", "1", "--arms", "linear", "--no_robustness"]
    signals = main([str(tmp_path / "a.npz"), "--kind", "signal", "--out", str(tmp_path / "s"), *brief])
    several = main([str(tmp_path / "table.csv"), "--separator", "|", "--out", str(tmp_path / "m"), *brief])
    assert signals.measure == "accuracy"
    assert several.measure == "exact_match"
