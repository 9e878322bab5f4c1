"""Checkpoints: whole or not there, readable without running code, and enough to predict in a new process."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchcaps.losses import MarginLoss
from torchcaps.models import create_model
from torchcaps.training import (
    AtomicCheckpointIO,
    Classification,
    Optimization,
    load_checkpoint,
    read_checkpoint,
    trainer,
)

CONFIG = {
    "name": "capsnet", "num_classes": 3, "in_chans": 1, "image_size": [8, 9], "stem_channels": 4, "kernel_size": 3,
    "primary_types": 2, "primary_pose": 4, "primary_kernel_size": 3, "class_pose": 4, "hidden": [8],
}  # fmt: skip
NAMES = ["left", "middle", "right"]


def build(config: dict[str, Any]) -> nn.Module:
    return create_model(**config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    x, y = torch.rand(12, 1, 8, 9), torch.arange(12) % 3
    module = Classification(
        build(CONFIG), loss=MarginLoss(), reconstruction_weight=0.0005, optimization=Optimization(schedule="one_cycle"),
        config=CONFIG, class_names=NAMES, preprocessing={"mean": [0.5], "size": [8, 9]},
    )  # fmt: skip
    data = DataLoader(TensorDataset(x, y), 4)
    trainer(folder, max_epochs=1, num_sanity_val_steps=0, ema=0.5, costs=False).fit(module, data, data)
    return folder


@pytest.fixture
def best(run: Path) -> Path:
    return run / "checkpoints" / "best.ckpt"


def test_a_checkpoint_alone_predicts_the_same_in_a_new_process(best: Path, tmp_path: Path) -> None:
    x = torch.rand(5, 1, 8, 9)
    torch.save(x, tmp_path / "x.pt")
    program = f"""
import sys, torch
from torchcaps.models import create_model
from torchcaps.training import load_checkpoint
torch.set_num_threads(1)
loaded = load_checkpoint(sys.argv[1], lambda config: create_model(**config))
with torch.no_grad():
    scores = loaded.model(torch.load(r"{tmp_path / "x.pt"}"))
torch.save([scores, loaded.probabilities(scores)], r"{tmp_path / "out.pt"}")
print(loaded.class_names, loaded.preprocessing, loaded.multi_label, loaded.model.training)
"""
    done = subprocess.run([sys.executable, "-c", program, str(best)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NAMES} {{'mean': [0.5], 'size': [8, 9]}} False False\n"
    scores, chances = torch.load(tmp_path / "out.pt", weights_only=True)
    here = load_checkpoint(best, build)
    assert torch.equal(here.model(x), scores)
    assert torch.equal(here.probabilities(scores), chances)
    assert torch.equal(here.model.probabilities(scores), chances)  # type: ignore[operator]


def test_a_checkpoint_says_its_schema_its_version_and_what_belongs_to_the_model(best: Path) -> None:
    said = read_checkpoint(best)["torchcaps"]
    assert said["schema"] == 1
    assert said["version"] == version("torchcaps")
    assert said["config"] == CONFIG
    assert said["class_names"] == NAMES


def test_saving_goes_through_another_name_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []
    monkeypatch.setattr(os, "replace", lambda a, b: moves.append((Path(a), Path(b), Path(b).exists())))
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "deep" / "a.ckpt")
    assert moves == [(tmp_path / "deep" / ".a.ckpt.part", tmp_path / "deep" / "a.ckpt", False)]


@pytest.fixture
def no_room() -> Any:
    """No file of this process may grow beyond 20 KB, which the system answers as it answers a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


def test_a_save_without_room_leaves_the_old_checkpoint_whole_and_names_the_file(tmp_path: Path, no_room: Any) -> None:
    path, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {"w": torch.arange(4)}}, path)
    with pytest.raises(OSError, match=r"the checkpoint that was there before is whole; make room.*last\.ckpt"):
        io.save_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.arange(4))
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full device is Linux's")
def test_a_full_disk_is_called_that(tmp_path: Path) -> None:
    (tmp_path / ".last.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: the checkpoint was not saved, and no checkpoint is"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_save_that_was_killed_is_written_over_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".last.ckpt.part").write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    assert read_checkpoint(tmp_path / "last.ckpt")["state_dict"] == {}
    assert os.listdir(tmp_path) == ["last.ckpt"]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("evil",)


def _truncated(path: Path, whole: bytes) -> None:
    path.write_bytes(whole[: len(whole) * 2 // 3])


def _damaged(path: Path, whole: bytes) -> None:
    begin, end = len(whole) // 3, len(whole) // 2
    path.write_bytes(whole[:begin] + bytes(255 - byte for byte in whole[begin:end]) + whole[end:])


def _of_lightning(path: Path, _: bytes) -> None:
    torch.save({"pytorch-lightning_version": "2.0", "state_dict": {}}, path)


def _newer(path: Path, _: bytes) -> None:
    torch.save({"torchcaps": {"schema": 2, "version": "9.0.0"}, "state_dict": {}}, path)


def _holds(begin: bytes) -> Callable[[Path, bytes], object]:
    return lambda path, _: path.write_bytes(begin + bytes(99))


def _saves(value: object) -> Callable[[Path, bytes], object]:
    return lambda path, _: torch.save(value, path)


FOREIGN: dict[str, tuple[Callable[[Path, bytes], object], str]] = {
    "truncated": (_truncated, "is cut off: .* bytes, and the end of the file is not among them"),
    "damaged": (_damaged, "is damaged"),
    "empty": (lambda path, _: path.write_bytes(b""), "is empty: its writing was cut off"),
    "text": (_holds(b"hello there"), "is no checkpoint of torchcaps but a file that begins with b'hello"),
    "pickle": (_holds(pickle.dumps(Evil())), "is no checkpoint of torchcaps but a pickle of Python objects"),
    "Keras": (_holds(b"\x89HDF\r\n\x1a\n"), "is no checkpoint of torchcaps but an HDF5 file"),
    "numpy": (_holds(b"\x93NUMPY"), "is no checkpoint of torchcaps but a NumPy array"),
    "whole model": (_saves(nn.Linear(2, 2)), "holds Python objects beside weights, and is not read"),
    "code": (_saves({"torchcaps": Evil()}), "holds Python objects .* reading it could run their code"),
    "state dict": (_saves(nn.Linear(2, 2).state_dict()), "holds 2 tensors and nothing else, a bare state_dict"),
    "tensor": (_saves(torch.zeros(2)), "is no checkpoint of torchcaps: it holds a Tensor"),
    "dict": (_saves({"epoch": 3}), "is no checkpoint of torchcaps: it holds a dict of epoch"),
    "Lightning": (_of_lightning, "is a Lightning checkpoint of another program"),
    "newer": (_newer, "was written by torchcaps 9.0.0 in layout 2, and this is .*, which reads layouts up to 1"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_no_checkpoint_gives_one_error_that_names_it_and_what_it_is(
    what: str, best: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write, message = FOREIGN[what]
    path = tmp_path / "given.ckpt"
    write(path, best.read_bytes())
    before = path.read_bytes()
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint, lambda path: load_checkpoint(path, build)):
        with pytest.raises(ValueError, match=rf"given\.ckpt {message}"):
            read(path)
    assert path.read_bytes() == before
    assert not (tmp_path / "evil").exists()


def test_a_file_that_is_not_there_or_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*gone\.ckpt"):
        read_checkpoint(tmp_path / "gone.ckpt")
    with pytest.raises(ValueError, match=r"is a folder: give the file, such as .*last\.ckpt"):
        read_checkpoint(tmp_path)


def test_resuming_from_a_truncated_checkpoint_names_the_file_and_trains_nothing(best: Path, tmp_path: Path) -> None:
    _truncated(tmp_path / "last.ckpt", best.read_bytes())
    module = Classification(build(CONFIG), loss=MarginLoss(), config=CONFIG)
    before = module.model.stem[0].weight.detach().clone()  # type: ignore[union-attr,index]
    data = DataLoader(TensorDataset(torch.rand(4, 1, 8, 9), torch.zeros(4, dtype=torch.long)), 4)
    fit = trainer(tmp_path, max_epochs=1, monitor=None, costs=False).fit
    with pytest.raises(ValueError, match=r"last\.ckpt is cut off"):
        fit(module, data, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(module.model.stem[0].weight, before)  # type: ignore[union-attr,index]


@pytest.mark.parametrize("place", [0.3, 0.5, 0.7])
def test_a_byte_that_changed_on_the_disk_is_noticed(best: Path, tmp_path: Path, place: float) -> None:
    data = bytearray(best.read_bytes())
    with zipfile.ZipFile(best) as file:
        largest = max(file.infolist(), key=lambda entry: entry.file_size)
    at = data.index(largest.filename.encode()) + len(largest.filename) + 200
    data[at + int(place * (largest.file_size - 300))] ^= 0x10
    (tmp_path / "last.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged: its [\d,]+ bytes are not those that were written"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_of_another_model_than_its_config_builds_is_an_error(best: Path) -> None:
    with pytest.raises(ValueError, match=r"weights in .*best\.ckpt are not those of the Linear that its config builds"):
        load_checkpoint(best, lambda config: nn.Linear(2, config["num_classes"]))


def test_a_checkpoint_without_a_config_says_how_to_get_one(tmp_path: Path) -> None:
    module = Classification(nn.Linear(2, 3), loss=MarginLoss(), num_classes=3)
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    AtomicCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a\.ckpt does not say how to build its model: give config="):
        load_checkpoint(tmp_path / "a.ckpt", build)


def test_averaged_weights_are_those_of_the_checkpoint(best: Path) -> None:
    checkpoint = read_checkpoint(best)
    averaged, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not torch.equal(averaged["model.class_caps.weight"], current["model.class_caps.weight"])
    loaded: Tensor = load_checkpoint(best, build).model.class_caps.weight  # type: ignore[union-attr,assignment]
    assert torch.equal(loaded, averaged["model.class_caps.weight"])
