"""The command line: every recipe runs, a run is enough to predict and export, and mistakes are one line each."""

import csv
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import made_up_sets
import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image

from torchcaps.cli import main
from torchcaps.cli.loading import chosen_checkpoint
from torchcaps.cli.recipes import find, recipes
from torchcaps.run.hub import Pretrained
from torchcaps.training import MetricsFile, read_checkpoint


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


def test_a_run_is_tested_on_its_own_data_with_the_weights_that_predict(a_run, capsys):
    before = (a_run / "metrics.csv").read_text().splitlines()
    main(["test", str(a_run), "--data.init_args.limit", "40"])
    assert re.search(r"^test/accuracy +0\.\d{4}$", capsys.readouterr().out, re.MULTILINE)
    assert chosen_checkpoint(a_run).name == "best.ckpt"
    assert len((a_run / "metrics.csv").read_text().splitlines()) == len(before) + 1
    tested = MetricsFile(a_run).rows()[-1]
    said = read_checkpoint(chosen_checkpoint(a_run))
    assert (int(tested["step"]), int(tested["epoch"])) == (said["global_step"] - 1, said["epoch"])
    main(["fit", "--config", "digits_capsule_head", "--run", str(a_run), "--trainer.fast_dev_run", "1"])
    assert len(MetricsFile(a_run).rows()) == len(before), "a trial leaves everything as it is"


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
    shutil.copy(a_run / "checkpoints" / "last.ckpt", tmp_path / "of_another.ckpt")
    for more in ([], ["--ckpt_path", str(tmp_path / "of_another.ckpt")]):
        with pytest.raises(SystemExit, match="2"):
            main([*again, *more])
        assert "holds a run already: go on with it by --ckpt_path last" in capsys.readouterr().err
    before = len((a_run / "metrics.csv").read_text().splitlines())
    config = (a_run / "config.yaml").read_text()
    earlier = yaml.safe_load(config)
    del earlier["model"]["channels_last"]  # as of a version that had no such setting
    (a_run / "config.yaml").write_text(yaml.safe_dump(earlier))
    config = (a_run / "config.yaml").read_text()
    for other, checkpoint in [
        (["--model.optimization.lr", "0.5"], "last"),
        (["--data.init_args.limit", "90"], str((a_run / "checkpoints" / "last.ckpt").resolve())),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main([*again, "--ckpt_path", checkpoint, "--trainer.max_epochs", "3", *other])
        said = capsys.readouterr().err
        assert f"{other[0][2:]}=" in said
        assert "begin another run" in said
    assert (a_run / "config.yaml").read_text() == config
    main([*again, "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    assert len((a_run / "metrics.csv").read_text().splitlines()) > before
    assert yaml.safe_load((a_run / "config.yaml").read_text())["ckpt_path"] is None


def test_a_run_that_cannot_start_leaves_what_was_there(a_run, tmp_path, capsys):
    shutil.copytree(a_run, tmp_path / "run")
    before = (tmp_path / "run" / "config.yaml").read_text()
    elsewhere = tmp_path / "other.ckpt"
    shutil.copy(a_run / "checkpoints" / "last.ckpt", elsewhere)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(
            ["fit", "--config", "digits_capsnet_dynamic", "--run", str(tmp_path / "run"), "--ckpt_path", str(elsewhere)]
        )
    assert "holds another model than this CapsNet" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_run_does_not_go_on_with_other_data_of_the_same_sizes(own_signals, tmp_path, capsys):
    signals = dict(np.load(own_signals))
    np.savez(tmp_path / "others.npz", x=signals["x"], y=np.array(["bat", "cat", "dog"])[signals["y"]])
    command = ["fit", "--config", "arrays", "--run", str(tmp_path / "run"), "--data.init_args.path"]
    main([*command, str(own_signals), "--trainer.max_epochs", "1"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*command, str(tmp_path / "others.npz"), "--trainer.max_epochs", "2", "--ckpt_path", "last"])
    assert "was trained on other data: class_names is ['0', '1', '2'] there" in capsys.readouterr().err


def test_a_test_beside_a_training_takes_nothing_from_its_metrics(tmp_path):
    training, testing = MetricsFile(tmp_path), MetricsFile(tmp_path)
    training.begin(0)
    for step in range(3):
        training.log_metrics({"loss": 0.5}, step)
    testing.log_metrics({"test/accuracy": 0.9}, 0)
    for step in range(3, 6):
        training.log_metrics({"loss": 0.25}, step)
    rows = MetricsFile(tmp_path).rows()
    assert [row["step"] for row in rows] == ["0", "1", "2", "0", "3", "4", "5"]
    assert [row["test/accuracy"] for row in rows] == ["", "", "", "0.9", "", "", ""]
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.csv holds no metrics of a run"):
        MetricsFile(tmp_path).begin(0)


def test_two_trainings_never_share_a_folder(a_run, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", "digits_capsule_head", "--run", str(tmp_path)])
    assert f"another torchcaps fit is at work in {tmp_path}" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_told_to_stop_says_how_to_go_on(by, tmp_path):
    run = tmp_path / "run"
    arguments = ["fit", "--config", "digits_capsule_head", "--run", str(run), "--trainer.max_epochs", "1000"]
    own = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # in the background it is ignored
    program = f"{own}; from torchcaps.cli import main; main({arguments!r})"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as at_work:
        try:
            until = time.monotonic() + 120
            while not (run / "checkpoints" / "last.ckpt").exists():
                assert at_work.poll() is None, at_work.communicate()
                assert time.monotonic() < until
                time.sleep(0.2)
            at_work.send_signal(by)
            _, said = at_work.communicate(timeout=120)
        finally:
            at_work.kill()
    assert at_work.returncode == 128 + by
    assert f"To go on: torchcaps fit --config {run}/config.yaml --run {run} --ckpt_path last" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt"], "there is no command 'fitt'"),
        (["fit", "--config", "digits_capsnt"], "did you mean digits_caps"),
        (["test", "nowhere"], "nowhere is no run"),
        (["test"], "torchcaps test measures a run"),
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
        *(
            (["fit", "--config", "digits_capsule_head", *more], words)
            for more, words in [
                (["--log", "notepad"], "take wandb or mlflow"),
                (["--run", ""], "--run '' names no folder"),
                (["--monitor", "val/acc"], "--monitor val/acc is not measured: take one of val/loss, val/accuracy"),
                (["--mode", "best"], "--mode best: take min"),
                (["--trainer.max_epochs", "0"], "--trainer.max_epochs 0 trains nothing"),
                (["--trainer.max_epochs", "-1"], "--trainer.max_epochs -1 has no end"),
                (["--trainer.max_epochs", "x"], "Expected a <class 'int'>; Given value: x"),
                (["--trainer.accelerator", "tpu"], "torch_xla"),
                (["--data.init_args.batchsize", "3"], "Option 'batchsize' is not accepted"),
                (["--modl.loss", "3"], "unrecognized arguments: --modl.loss 3"),
                (["--model.optimization.lr", "1e30"], "nan"),
            ]
        ),
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
