"""predict, export and compare from the command line: what is given is read as the model was taught, or refused."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from torchcaps.cli import main
from torchcaps.run.files import check_place, write_whole

RNG = np.random.default_rng(0)


def train(run: Path, recipe: str, *settings: str) -> Path:
    main(["fit", "--config", recipe, "--run", str(run), "--trainer.max_epochs", "1", *settings])
    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on numbers from 0 to 16."""
    return train(tmp_path_factory.mktemp("digits") / "run", "digits_capsule_head", "--data.init_args.limit", "40")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on grey images of bytes."""
    root = tmp_path_factory.mktemp("photos")
    for k in range(2):
        (root / "set" / f"kind{k}").mkdir(parents=True)
        for i in range(10):
            pixels = RNG.integers(0, 80, (12, 16), dtype=np.uint8) + np.uint8(150 * k)
            Image.fromarray(pixels).save(root / "set" / f"kind{k}" / f"{i}.png")
    return train(root / "run", "images", "--data.init_args.root", str(root / "set"))


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on signals of different lengths, and its file, filled up with a number that none of them holds."""
    root = tmp_path_factory.mktemp("signals")
    lengths = RNG.integers(20, 41, 60)
    x = np.full((60, 40), 1e9, np.float32)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = RNG.random(length)
    np.savez(root / "set.npz", x=x, y=np.arange(60) % 2, lengths=lengths)
    return train(root / "run", "arrays", "--data.init_args.path", str(root / "set.npz")), root / "set.npz"


def predicted(run: Path, out: Path, *files: Path) -> list[list[str]]:
    main(["predict", str(run), *map(str, files), "--out", str(out)])
    return rows_of(out)


def rows_of(out: Path) -> list[list[str]]:
    with open(out, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    """The lines that the command leaves with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    assert left.value.code == 2
    return capsys.readouterr().err.strip().splitlines()


def test_signals_are_predicted_without_what_fills_them_up(signals: tuple[Path, Path], tmp_path: Path) -> None:
    run, path = signals
    with np.load(path) as file:
        x, lengths = file["x"], file["lengths"]
    found = predicted(run, tmp_path / "all.csv", path)
    for i in range(0, 60, 13):
        np.save(tmp_path / "one.npy", x[i : i + 1, : lengths[i]])
        (alone,) = predicted(run, tmp_path / "one.csv", tmp_path / "one.npy")
        assert [float(p) for p in found[i][2:]] == pytest.approx([float(p) for p in alone[2:]], abs=2e-6)


@pytest.mark.parametrize("lengths", [[5, 4.5], [0, 5], [41, 5], [5], 5, [5, np.nan]])
def test_lengths_that_do_not_fit_are_refused(
    lengths: Any, signals: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", x=RNG.random((2, 40)), lengths=lengths)
    (said,) = refused(capsys, "predict", signals[0], tmp_path / "new.npz")
    assert "new.npz: lengths" in said
    assert "give a whole number from 1 to 40 for each item" in said


def test_lengths_for_a_model_of_one_size_are_refused(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", x=np.ones((2, 8, 8)), lengths=[3, 4])
    (said,) = refused(capsys, "predict", digits, tmp_path / "new.npz")
    assert "new.npz holds lengths, but the model was made for a image of [8, 8]" in said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", np.float64(3), "a.npy holds []: give items one after the other"),
        ("a.npy", np.zeros((0, 8, 8)), "a.npy holds [0, 8, 8]: give items"),
        ("a.npz", {"x": np.float64(3)}, "a.npz holds []: give items"),
        ("a.npz", {"pictures": np.zeros((2, 8, 8))}, "a.npz holds pictures: name the array of inputs x, test_images"),
        ("a.npz", {}, "a.npz holds nothing: name the array"),
        ("a.npy", np.full((2, 8, 8), np.nan), "a.npy[0]: it holds NaN or infinity (1 more cannot be taken)"),
        ("a.npy", np.zeros((2, 8, 8, 3)), "a.npy[0]: [8, 8, 3], but the model was made for 1 channels"),
        ("a.npy", np.zeros((2, 8, 8), complex), "a.npy[0]: it holds complex128"),
        ("a.npy", np.full((2, 8, 8), 255.0), "a.npy[0]: numbers from 255 to 255, but the model was made of numbers"),
        ("a.npy", np.array([None, 1]), "a.npy is no array that NumPy can read: Object arrays"),
        ("a.npz", {"x": np.array([None, 1])}, "a.npz is no array that NumPy can read: Object arrays"),
        ("a.npy", b"nothing", "a.npy is no array that NumPy can read"),
        ("a.npy", b"", "a.npy is no array that NumPy can read"),
        ("a.npz", b"PK\x03\x04 broken", "a.npz is no array that NumPy can read"),
        ("a.txt", b"nothing", "a.txt cannot be read as an image"),
    ],
)
def test_a_file_that_is_no_input_is_one_line_with_its_name(
    name: str, content: Any, words: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif name.endswith(".npz"):
        np.savez(tmp_path / name, **content)
    else:
        np.save(tmp_path / name, content)
    (said,) = refused(capsys, "predict", digits, tmp_path / name)
    assert words in said


@pytest.mark.parametrize("damage", ["half", "flipped"])
@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_a_damaged_array_is_one_line(
    damage: str, ending: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "npy":
        np.save(path, np.ones((50, 8, 8)))
    else:
        np.savez_compressed(path, x=RNG.random((50, 8, 8)))
    whole = bytearray(path.read_bytes())
    place = 3 if ending == "npy" else len(whole) // 2
    whole[place] ^= 255
    path.write_bytes(whole if damage == "flipped" else whole[: len(whole) // 2])
    (said,) = refused(capsys, "predict", digits, path)
    assert f"a.{ending} is no array that NumPy can read" in said


def test_what_cannot_be_read_is_left_out_and_named_at_the_end(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new" / ".cache").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(RNG.integers(0, 256, (12, 16), dtype=np.uint8)).save(tmp_path / "new" / f"{i}.png")
    (tmp_path / "new" / "1.png").write_bytes(b"no image")
    for name in ("._0.png", ".DS_Store", ".cache/0.png", "notes.txt"):
        (tmp_path / "new" / name).write_bytes(b"no image")
    np.save(tmp_path / "new" / "z.npy", np.stack([np.full((12, 16), 100.0), np.full((12, 16), np.inf)]))
    said = refused(capsys, "predict", photos, tmp_path / "new", "--out", tmp_path / "out.csv")
    assert [Path(row[0]).name for row in rows_of(tmp_path / "out.csv")] == ["0.png", "2.png", "z.npy[0]"]
    assert [line.split("new/")[-1] for line in said[:2]] == [
        "1.png cannot be read as an image (it is no image, or of an unknown kind): mend it or take it out",
        "z.npy[1]: it holds NaN or infinity",
    ]
    assert said[2] == "torchcaps: 2 of 5 inputs were left out, named above: mend them, or take them away"


def test_a_folder_with_nothing_to_predict_says_what_it_looked_for(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = refused(capsys, "predict", digits, tmp_path)
    assert "no images (.jpg" in said
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("predict", "folder"), ("predict", "file/a.csv"), ("predict", "/proc/a.csv"),
        ("export", "folder.onnx"), ("export", "file/a.pt2"), ("export", "/proc/a.onnx"), ("export", "file"),
        ("compare", "file"), ("compare", "file/out"), ("compare", "/proc/nothing/out"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_found_before_anything_is_loaded(
    command: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("here already")
    for name in ("folder", "folder.onnx"):
        (tmp_path / name).mkdir()
    place = tmp_path / out
    if command == "export":
        (said,) = refused(capsys, "export", "nowhere", place)
    else:
        more = ["nothing.png"] if command == "predict" else []
        (said,) = refused(capsys, command, "nowhere", *more, "--out", place)
    assert str(place) in said
    assert "give the name of a" in said or "cannot be written" in said
    assert (tmp_path / "file").read_text() == "here already"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "nowhere", "a.png", "--batch_size", "0"), "--batch_size 0: give 1 or more"),
        (("predict", "nowhere", "a.png", "--batch_size", "-1"), "--batch_size -1: give 1 or more"),
        (("export", "nowhere", "a.foo"), "a.foo: the ending says what to write: .pt2, .onnx, or none for a folder"),
        (("compare", "digits", "--out", "out", "--degrees", "nan"), "degrees=nan"),
        (("compare", "digits", "--out", "out", "--shift", "inf"), "shift=inf"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (said,) = refused(capsys, *arguments)
    assert words in said
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_written_in_utf_8_whatever_the_terminal_speaks(digits: Path, tmp_path: Path) -> None:
    names = ["smörgås.npy", os.fsdecode(b"d\xff.npy")]
    for name in names:
        np.save(tmp_path / name, np.ones((1, 8, 8)))
    speech = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "torchcaps", "predict", str(digits), *(str(tmp_path / name) for name in names)]
    told = subprocess.run(command, env=speech, capture_output=True, check=True).stdout
    assert rb"sm\xf6rg\xe5s.npy[0]" in told
    out = tmp_path / "out.csv"
    subprocess.run([*command, "--out", str(out)], env=speech, capture_output=True, check=True)
    assert [Path(row[0]).name for row in rows_of(out)] == ["smörgås.npy[0]", r"d\xff.npy[0]"]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b.csv"
    check_place(path)
    assert list(tmp_path.iterdir()) == []
    write_whole(path, "first")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"b\.csv cannot be written \(No space left on device\): make room"):
        write_whole(path, "second")
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["b.csv"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_place(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        write_whole(tmp_path / "pipe", "words")
        assert reader.communicate()[0] == b"words"
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("out", ["model.pt2", "model.onnx", "model"])
def test_an_export_to_a_full_disk_is_one_line(
    out: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*rest: Any, **more: Any) -> None:
        from safetensors import SafetensorError

        raise SafetensorError("No space left on device") if out == "model" else OSError(28, "No space left on device")

    if out == "model":
        monkeypatch.setattr("torchcaps.run.hub.Pretrained.save_pretrained", full)
    else:
        monkeypatch.setattr(os, "fsync", full)
    (said,) = refused(capsys, "export", digits, tmp_path / out)[-1:]
    assert f"{out} cannot be written (No space left on device): make room, or give another place" in said
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_an_exported_folder_may_be_read_by_the_same_people(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(digits), str(tmp_path / "hub")])
    assert len({path.stat().st_mode for path in (tmp_path / "hub").iterdir()}) == 1
    assert "torchcaps.run.hub has Pretrained" in capsys.readouterr().out


def test_a_comparison_that_diverges_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", x=RNG.random((40, 8, 8)), y=np.arange(40) % 2)
    said = refused(capsys, "compare", tmp_path / "a.npz", "--out", tmp_path / "out", "--seeds", 1, "--epochs", 2,
                   "--arms", "linear", "--lr", "1e30", "--no_robustness")  # fmt: skip
    assert said[-1].startswith("torchcaps: linear, seed 0: the loss of step")
