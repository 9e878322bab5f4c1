"""Reproductions: what is measured and put on record, that nothing is trained twice, and the page of the records."""

import dataclasses
import json
import shutil
from pathlib import Path

import made_up_sets
import pytest
import torch
from torch import nn

from torchcaps.cli import main
from torchcaps.cli.recipes import find
from torchcaps.reproduce import REPRODUCTIONS, Settings, records, reproduce, running
from torchcaps.reproduce.measures import MEASURES, measure
from torchcaps.reproduce.minutes import estimate_minutes
from torchcaps.reproduce.page import figure, write_page
from torchcaps.run.build import build
from torchcaps.training import Classification

ROOT = Path(__file__).parents[1]
ARMS = [(name, arm) for name, plan in REPRODUCTIONS.items() for arm in plan.arms]


@pytest.fixture
def root(tmp_path):
    """A root with a small MNIST in it."""
    made_up_sets.mnist(tmp_path / "root")
    return tmp_path / "root"


def small(tmp_path, root, **changes):
    """Settings of a run of seconds."""
    changes = {"model.settings": {"channels": [4, 4, 4, 4]}, "data.init_args.batch_size": 40, **changes}
    return Settings(str(root), None, tmp_path / "results", tmp_path / "runs", 2, None, tuple(changes.items()))


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_arm_has_a_recipe_and_a_model_and_speaks_of_measures_that_are_taken(name, arm):
    import yaml

    plan = REPRODUCTIONS[name]
    chosen = plan.arms[arm]
    recipe = yaml.safe_load(find(chosen.recipe or plan.recipe).read_text("utf-8"))
    assert set(chosen.changes) <= {"model.name", "model.settings", "model.reconstruction_weight"}
    settings = chosen.changes.get("model.settings", recipe["model"].get("settings", {}))
    config = {"name": chosen.changes.get("model.name", recipe["model"]["name"]), "num_classes": plan.num_classes}
    shape = {"in_chans": plan.image[0], "image_size": plan.image[1:]}
    assert isinstance(build({**config, **shape, **settings}), nn.Module)
    taken = {f"{t}.{m}" for t, test in plan.tests.items() for m in test.measures}
    assert {m for test in plan.tests.values() for m in test.measures} <= set(MEASURES)
    assert {*chosen.paper, *chosen.expect} <= taken
    assert all(low <= high for low, high in chosen.expect.values())


def test_the_cnn_of_the_short_table_makes_as_many_multiply_adds_as_the_capsules():
    plan = REPRODUCTIONS["cifar10_simple"]
    capsules, cnn = (estimate_minutes(plan, plan.arms[name]).step.multiply_adds for name in ("attention", "cnn"))
    assert abs(cnn / capsules - 1) < 0.02


def test_an_estimate_of_minutes_grows_with_epochs_and_says_that_nothing_was_measured(capsys):
    plan = REPRODUCTIONS["cifar10_resnet"]
    long, short = (estimate_minutes(plan, plan.arms[name]) for name in ("attention", "short"))
    assert long.steps == 350 * 391
    assert long.step.multiply_adds == short.step.multiply_adds
    assert long.compiled / short.compiled == pytest.approx(7, rel=1e-4)
    assert long.eager >= long.compiled
    # every number of the first map is written by the convolution and read by what follows: bfloat16, and again backward
    assert long.step.moved > 4 * 2 * 128 * 64 * 32 * 32
    main(["reproduce", "cifar10_resnet", "--arms", "short", "--estimate"])
    said = capsys.readouterr().out
    assert "nothing here was measured" in said
    assert "one cycle of 50 epochs" in said
    assert "ResNet-18" not in said


def test_measures_of_two_labels_and_of_sets():
    module = Classification(_Same(), loss=nn.MSELoss(), num_classes=4, multi_label=True, link="identity")
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2], [0.9, 0.4, 0.1, 0.2], [0.9, 0.1, 0.6, 0.7], [0.1, 0.2, 0.3, 0.9]])
    y = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1]])
    found = measure(["pairs", "confident_pairs", "exact_match"], module, scores[:3], y[:3])
    assert found == pytest.approx({"pairs": 100, "confident_pairs": 200 / 3, "exact_match": 100 / 3})
    assert measure(["exact_match"], module, scores[3:], y[3:]) == {"exact_match": 100}
    assert measure(["accuracy"], module, scores, torch.tensor([0, 0, 3, 3])) == {"accuracy": 75}
    with pytest.raises(ValueError, match="no numbers: its training has diverged"):
        measure(["pairs"], module, scores.where(scores < 0.9, torch.nan), y)


class _Same(nn.Module):
    def forward(self, x):
        return x


def test_a_network_is_trained_once_put_on_record_and_tested_on_all_tests(tmp_path, root, monkeypatch):
    plan = REPRODUCTIONS["su"]
    record = reproduce("su", plan, "max_pooling", 3, small(tmp_path, root, **{"model.name": "su_cnn"}))
    assert (record["arm"], record["seed"], record["epochs"], record["images"]) == ("max_pooling", 3, 2, 240)
    assert record["results"].keys() == plan.tests.keys()
    assert record["minutes"] > 0
    assert record["parameters"] == sum(p.numel() for p in build({"name": "su_cnn", "channels": [4] * 4}).parameters())
    assert not list((tmp_path / "runs").rglob("*.ckpt"))
    assert str(tmp_path) not in json.dumps(record)
    monkeypatch.setattr(running.training, "fit", None)
    again = reproduce("su", plan, "max_pooling", 3, small(tmp_path, root, **{"model.name": "su_cnn"}))
    assert again == record
    with pytest.raises(TypeError):  # another seed is another network
        reproduce("su", plan, "max_pooling", 4, small(tmp_path, root, **{"model.name": "su_cnn"}))


def test_a_network_that_was_stopped_goes_on_to_the_same_record(tmp_path, root, monkeypatch):
    plan = dataclasses.replace(REPRODUCTIONS["su"])
    whole = reproduce("su", plan, "uniform", 0, small(tmp_path / "whole", root))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchcaps.data.MNIST.test_dataloader", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce("su", plan, "uniform", 0, small(tmp_path / "parts", root))
    monkeypatch.undo()
    assert list((tmp_path / "parts" / "runs").rglob("last.ckpt"))
    resumed = reproduce("su", plan, "uniform", 0, small(tmp_path / "parts", root))
    for times in ("minutes", "cpu_minutes"):
        del whole[times], resumed[times]
    assert resumed == whole


def test_records_are_appended_and_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "x.json"
    records.append(path, {"arm": "a"})
    records.append(path, {"arm": "b"})
    assert [run["arm"] for run in records.read(path)] == ["a", "b"]
    path.write_text('{"something": "else"}')
    with pytest.raises(ValueError, match="holds no records of a reproduction"):
        records.append(path, {"arm": "c"})
    assert path.read_text() == '{"something": "else"}'


def record(arm, seed, accuracy, **more):
    return {
        "arm": arm, "seed": seed, "epochs": 5, "config_hash": "1", "command": "torchcaps fit", "changes": {},
        "versions": {"torch": "2.9"}, "hardware": {"processor": "P", "threads": 1}, "minutes": 3.0, "cpu_minutes": 2.0,
        "images": 10, "parameters": 1234, "results": {"digits": {"accuracy": accuracy}}, "curve": [],
        "date": "2026-01-01", **more,
    }  # fmt: skip


def test_the_page_has_means_over_seeds_beside_the_papers_and_leaves_trials_out(tmp_path):
    for made in (
        record("decoder_3_rounds", 0, 99.6), record("decoder_3_rounds", 1, 99.7), record("code", 0, 12.0, limit=100)
    ):  # fmt: skip
        records.append(tmp_path / "capsnet.json", made)
    write_page(tmp_path / "page.md", tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert "| three rounds, decoder | 5 | 2 | 99.65 ± 0.07 (paper 99.75) | 1,234 | 3 (2) |" in page
    assert "12.0" not in page
    with pytest.raises(ValueError, match="holds no records"):
        write_page(tmp_path / "page.md", tmp_path / "nowhere")


def test_curves_are_drawn_from_the_records(tmp_path):
    for seed in (0, 1):
        made = record("matrix", seed, 0.0, curve=[[1000, 10.0], [2000, 40.0 + seed]])
        made["results"] = {"images": {"exact_match": 40.0}}
        records.append(tmp_path / "diverse.json", made)
    write_page(tmp_path / "docs" / "page.md", tmp_path)
    assert (tmp_path / "docs" / "pictures" / "diverse.png").stat().st_size > 10_000


def test_the_page_of_this_library_is_that_of_its_records(tmp_path):
    shutil.copytree(ROOT / "docs" / "pictures", tmp_path / "pictures")
    write_page(tmp_path / "results.md", ROOT / "results")
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()


def test_figures_have_the_decimals_that_they_can_have():
    assert figure([99.333]) == "99.33"
    assert figure([40.04, 42.0]) == "41.0 ± 1.4"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["reproduce", "sue"], "did you mean su"),
        (["reproduce", "su", "--arms", "nothing"], "su has no arm 'nothing': it has mean_pooling"),
        (["reproduce", "su", "--set", "lr"], "write it as name=value"),
    ],
)
def test_mistakes_are_one_line(arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert error in capsys.readouterr().err


def test_the_command_lists_them_all_and_says_where_ours_is(tmp_path, root, capsys):
    main(["reproduce"])
    listed = capsys.readouterr().out
    assert all(plan.title in listed for plan in REPRODUCTIONS.values())
    main(["reproduce", "su", "--arms", "mean_pooling", "--seeds", "0", "--epochs", "1", "--limit", "40", "--root",
          str(root), "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")])  # fmt: skip
    said = capsys.readouterr().out
    assert "276,810 parameters" in said
    assert "paper 99.3" in said
    assert json.loads((tmp_path / "out" / "su.json").read_text())["runs"][0]["limit"] == 40


@pytest.mark.parametrize("name", ["su", "diverse", "capsnet"])
def test_what_is_expected_holds_our_own_records(name):
    plan = REPRODUCTIONS[name]
    asked = 0
    for record in records.read(ROOT / "results" / f"{name}.json"):
        for key, (low, high) in plan.arms[record["arm"]].expect.items():
            test, measure = key.split(".")
            assert low <= record["results"][test][measure] <= high, (record["arm"], record["seed"], key)
            asked += 1
    assert asked >= {"su": 30, "diverse": 4, "capsnet": 1}[name]
