"""The command line: every recipe runs, a run is enough to predict and export, and mistakes are one line each."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import made_up_sets
import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.cli import main
from torchcaps.cli.recipes import find, recipes
from torchcaps.run.hub import Pretrained
from torchcaps.training import read_checkpoint


@pytest.fixture(scope="module")
def own_images(tmp_path_factory):
    """A folder of 3x37x52 images in five classes, each with a bar in a place of its own."""
    folder = tmp_path_factory.mktemp("own") / "photos"
    generator = np.random.default_rng(0)
    for k in range(5):
        (folder / f"kind{k}").mkdir(parents=True)
        for i in range(12):
            pixels = generator.integers(0, 80, (37, 52, 3))
            pixels[5 * k : 5 * k + 8, 10:40] += 150
            Image.fromarray(pixels.astype("uint8")).save(folder / f"kind{k}" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def own_signals(tmp_path_factory):
    """One-channel signals of 40 numbers in three classes, as an .npz of x and y."""
    path = tmp_path_factory.mktemp("own") / "signals.npz"
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 60)
    x = np.sin(np.linspace(0, 1, 40)[None] * 6.28 * (2 + 3 * y[:, None]) + generator.random((60, 1)))
    np.savez(path, x=x.astype("float32"), y=y)
    return path


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A run of two epochs on few digits."""
    run = tmp_path_factory.mktemp("runs") / "digits"
    main(["fit", "--config", "digits_capsule_head", "--run", str(run), "--trainer.max_epochs", "2",
          "--data.init_args.limit", "80"])  # fmt: skip
    return run


def needs(recipe, own_images, own_signals, root, monkeypatch):
    """The arguments by which a recipe finds its data here."""
    text = recipe.path.read_text("utf-8")
    if "ImageFolder" in text:
        return ["--data.init_args.root", str(own_images)]
    if "NPZ" in text:
        return ["--data.init_args.path", str(own_signals)]
    if "data.CIFAR" in text:
        made_up_sets.cifar(root, monkeypatch)
    elif "SmallNORB" in text:
        made_up_sets.smallnorb(root, monkeypatch)
    elif "MNIST" in text:
        made_up_sets.mnist(root, name="FashionMNIST" if "FashionMNIST" in text else "MNIST")
    else:
        return []
    place = "data.init_args.base.init_args.root" if "base: {" in text else "data.init_args.root"
    return [f"--{place}", str(root)]


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_trains_on_a_batch(recipe, own_images, own_signals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", recipe.name, "--trainer.fast_dev_run", "1", "--data.init_args.batch_size", "4",
          "--data.init_args.num_workers", "0",
          *needs(recipe, own_images, own_signals, tmp_path / "root", monkeypatch)])  # fmt: skip


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_says_what_it_is_and_keeps_its_run_under_its_own_name(recipe):
    assert len(recipe.about) >= 2
    assert f"run: runs/{recipe.name}\n" in recipe.path.read_text("utf-8")


def test_recipes_lists_them_all_and_prints_one(capsys):
    main(["recipes"])
    listed = capsys.readouterr().out
    assert all(recipe.name in listed for recipe in recipes())
    main(["recipes", "images"])
    assert capsys.readouterr().out == find("images").read_text("utf-8")


def test_a_run_is_a_folder_with_all_it_took(a_run):
    assert {p.name for p in a_run.iterdir()} >= {"config.yaml", "metrics.csv", "events", "checkpoints"}
    with open(a_run / "metrics.csv", newline="") as file:
        assert "val/accuracy" in next(csv.DictReader(file))
    said = read_checkpoint(a_run / "checkpoints" / "last.ckpt")["torchcaps"]
    assert said["config"]["name"] == "capsule_head"
    assert said["class_names"] == [str(k) for k in range(10)]


def test_a_run_is_tested_on_its_own_data(a_run, capsys):
    main(["test", str(a_run), "--data.init_args.limit", "40"])
    assert "test/accuracy" in capsys.readouterr().out


def test_a_new_process_predicts_the_same_from_the_checkpoint_alone(a_run, tmp_path):
    images = np.random.default_rng(1).integers(0, 17, (7, 8, 8)).astype("float32")
    np.save(tmp_path / "images.npy", images)
    found = []
    for out in ("here.csv", "there.csv"):
        arguments = ["predict", str(a_run), str(tmp_path / "images.npy"), "--out", str(tmp_path / out)]
        if out == "here.csv":
            main(arguments)
        else:
            subprocess.run([sys.executable, "-m", "torchcaps", *arguments], check=True, capture_output=True)
        found.append((tmp_path / out).read_text())
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 8


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_exported_file_gives_the_models_probabilities_at_any_batch(a_run, tmp_path, capsys, ending):
    out = tmp_path / f"model.{ending}"
    main(["export", str(a_run), str(out)])
    said = capsys.readouterr().out
    assert float(said.split()[-1]) < 1e-4
    assert out.stat().st_size > 10_000


def test_an_export_that_differs_is_refused_and_leaves_no_file(a_run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(a_run), str(tmp_path / "model.onnx"), "--tolerance", "-1"])
    assert "was not written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_the_hub_holds_the_model_whole(a_run, tmp_path):
    main(["export", str(a_run), str(tmp_path / "hub")])
    assert {"config.json", "model.safetensors"} <= {p.name for p in (tmp_path / "hub").iterdir()}
    model = Pretrained.from_pretrained(tmp_path / "hub").eval()
    assert model.class_names == [str(k) for k in range(10)]
    assert model.preprocessing["kind"] == "image"
    chances = model.probabilities(model(torch.rand(3, 1, 8, 8)))
    torch.testing.assert_close(chances.sum(1), torch.ones(3))


def test_a_run_can_be_gone_on_with_and_is_never_overwritten(a_run, tmp_path, capsys):
    again = ["fit", "--config", str(a_run / "config.yaml"), "--run", str(a_run)]
    with pytest.raises(SystemExit, match="2"):
        main(again)
    assert "--ckpt_path last" in capsys.readouterr().err
    before = len((a_run / "metrics.csv").read_text().splitlines())
    main([*again, "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    assert len((a_run / "metrics.csv").read_text().splitlines()) > before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt"], "there is no command 'fitt'"),
        (["fit", "--config", "digits_capsnt"], "did you mean digits_caps"),
        (["test", "nowhere"], "nowhere is no run"),
        (["predict", "nowhere", "x.png"], "no checkpoint nowhere"),
        (["recipes", "nothing"], "there is no recipe 'nothing'"),
        (["fit", "--config", "images", "--data.init_args.root", "nowhere"], "nowhere"),
        (["fit", "--config", "digits_capsule_head", "--model.name", "capsulehead"], "did you mean capsule_head"),
        (
            ["fit", "--config", "digits_capsule_head", "--model.settings", "{routing: {rule: Dynamik}}"],
            "routing 'Dynamik' is not there: take one of Dynamic",
        ),
        (
            ["fit", "--config", "digits_capsule_head", "--model.settings.routing.iterations", "1"],
            "routing {'iterations': '1'} names no rule: write the rule too",
        ),
        (["fit", "--config", "digits_capsule_head", "--log", "notepad"], "take wandb or mlflow"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_status_of_two(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]


def test_without_a_command_it_says_what_there_is(capsys):
    main([])
    assert "torchcaps fit" in capsys.readouterr().out


def test_bench_needs_torch_alone():
    program = """
import sys
for name in ("pytorch_lightning", "jsonargparse", "torchvision", "timm", "numpy"):
    sys.modules[name] = None
from torchcaps.cli import main
main(["bench", "--workload", "fc", "--batch", "1", "--repeats", "1", "--form", "reference"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "reference" in done.stdout, done.stderr


def test_what_is_missing_is_named_with_the_way_to_get_it():
    program = """
import sys
sys.modules["pytorch_lightning"] = None
from torchcaps.cli import main
main(["fit"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'torchcaps[all]'" in done.stderr
    assert done.returncode == 2


def test_the_names_of_recipes_are_those_of_their_files():
    assert all(re.fullmatch(r"[a-z0-9_]+", Path(recipe.path).stem) for recipe in recipes())
