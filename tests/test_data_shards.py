"""Streams of shards: every image once where that is promised, the same for any workers, and resumed where they were."""

import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from torchcaps.data import Augment, Shards, shards
from torchcaps.data.shards import StreamPart, Streams


def shard(path: Path, first: int, n: int, label: Any = None) -> None:
    """n grey images that say who they are, by their level of grey."""
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(first, first + n):
            picture = io.BytesIO()
            Image.fromarray(np.full((6, 5), i, np.uint8)).save(picture, "png")
            text = str(i % 3) if label is None else label(i)
            writer.write({"__key__": f"image{i:04}", "png": picture.getvalue(), "cls": text.encode()})


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for s in range(6):
        shard(tmp_path / f"train-{s}.tar", 10 * s, 10)
    for s in range(2):
        shard(tmp_path / f"test-{s}.tar", 200 + 7 * s, 7)
    return tmp_path


def stream(tars: Path, **settings: Any) -> Shards:
    settings = {"streams": 3, "shuffle_buffer": 12, "batch_size": 4, **settings}
    return Shards(
        f"{tars}/train-{{0..5}}.tar", 60, 3, (6, 5), channels=1,
        test=[f"{tars}/test-0.tar", f"{tars}/test-1.tar"], test_samples=14, **settings,
    )  # fmt: skip


def seen(batches: Any) -> list[list[int]]:
    return [(x[:, 0, 0, 0] * 255).round().int().tolist() for x, _ in batches]


def all_of(*passes: list[list[int]]) -> list[int]:
    return [level for batches in passes for batch in batches for level in batch]


def test_an_epoch_of_even_streams_has_every_image_once_with_its_label(tars: Path) -> None:
    data = stream(tars)
    assert (data.num_classes, data.in_chans, data.image_size, data.multi_label) == (3, 1, (6, 5), False)
    loader = data.train_dataloader()
    assert len(loader) == 15
    for _ in range(2):
        x, y = (torch.cat(column) for column in zip(*loader, strict=True))
        levels = (x[:, 0, 0, 0] * 255).round().int()
        assert sorted(levels.tolist()) == list(range(60))
        assert torch.equal(levels % 3, y.int())


def test_epochs_and_seeds_have_orders_of_their_own_that_mix_within_and_across_shards(tars: Path) -> None:
    loader, other = stream(tars).train_dataloader(), stream(tars, seed=1).train_dataloader()
    first, second, third = seen(loader), seen(loader), seen(other)
    assert first != second
    assert first != third
    assert first == seen(stream(tars).train_dataloader())
    steps = np.diff(np.concatenate(first))
    assert (steps != 1).mean() > 0.7
    assert len({level // 10 for level in first[0] + first[1] + first[2]}) >= 3


def test_shards_come_in_another_order_each_epoch() -> None:
    part = StreamPart([f"{s}.tar" for s in range(20)], 20, None, Streams(0, 4, 1, 1))  # type: ignore[arg-type]
    orders = []
    for epoch in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "_read", lambda urls: iter([{"url": url} for url in urls]))
            orders.append([sample["url"] for sample in part._samples(epoch, 0, np.arange(20))])
    assert [sorted(order) for order in orders] == [sorted(part.urls)] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_images_within_a_shard_are_drawn_in_another_order_each_epoch_and_stream(tars: Path) -> None:
    data = Shards(f"{tars}/train-{{0..1}}.tar", 20, 3, 6, streams=2, shuffle_buffer=20, batch_size=5)
    loader = data.train_dataloader()
    orders = set()
    for _ in range(2):
        batches = seen(loader)
        for stream in (0, 1):
            order = [level % 10 for level in batches[stream] + batches[stream + 2]]
            assert sorted(order) == list(range(10))
            orders.add(tuple(order))
    assert len(orders) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(tars: Path, workers: int) -> None:
    alone, helped = stream(tars), stream(tars, num_workers=workers)
    for loaders in (
        (alone.train_dataloader(), helped.train_dataloader()),
        (alone.test_dataloader(), helped.test_dataloader()),
    ):
        for _ in range(2):
            assert seen(loaders[0]) == seen(loaders[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was(tars: Path, workers: int) -> None:
    settings = {"num_workers": workers, "augment": Augment(shift=1)}
    reference = stream(tars, **settings).train_dataloader()
    epochs = [[x for x, _ in reference] for _ in range(3)]
    broken = stream(tars, **settings).train_dataloader()
    list(broken)
    list(islice(broken, 7))
    resumed = stream(tars, **settings).train_dataloader()
    resumed.load_state_dict(broken.state_dict())
    for expected in (epochs[1][7:], epochs[2]):
        found = [x for x, _ in resumed]
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # also where streams of another epoch stand open
    begun = stream(tars, **settings).train_dataloader()
    list(islice(begun, 3))
    begun.load_state_dict(broken.state_dict())
    assert all(torch.equal(a, b[0]) for a, b in zip(epochs[1][7:], begun, strict=True))


def test_a_stream_is_read_through_once_an_epoch(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    read = shards._read
    monkeypatch.setattr(shards, "_read", lambda urls: opened.extend(urls) or read(urls))
    loader = stream(tars).train_dataloader()
    for epoch in (1, 2):
        list(loader)
        assert sorted(opened) == sorted([f"{tars}/train-{s}.tar" for s in range(6)] * epoch)
    resumed = stream(tars).train_dataloader()
    resumed.load_state_dict({**loader.state_dict(), "position": 12})
    opened.clear()
    list(resumed)
    assert len(opened) == 6


def test_processes_share_an_epoch(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    train, test = [], []
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        data = stream(tars, streams=2, batch_size=5)
        train.append(seen(data.train_dataloader()))
        test.append(seen(data.test_dataloader()))
    assert [len(batches) for batches in train + test] == [6, 6, 2, 2]
    assert sorted(all_of(*train)) == list(range(60))
    assert sorted(all_of(*test)) == list(range(200, 214))


def test_evaluation_is_in_the_order_of_the_shards(tars: Path) -> None:
    loader = stream(tars, seed=5).test_dataloader()
    for _ in range(2):
        assert all_of(seen(loader)) == list(range(200, 214))


def test_uneven_streams_start_again(tars: Path) -> None:
    shard(tars / "train-5.tar", 50, 3)
    levels = all_of(seen(stream(tars, streams=6).train_dataloader()))
    assert len(levels) == 60
    assert set(levels) <= set(range(53))
    assert {50, 51, 52} <= set(levels)


def test_labels_may_be_names_and_several(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", 0, 8, lambda i: ["cat", "dog"][i % 2])
    data = Shards(str(tmp_path / "a.tar"), 8, ["cat", "dog"], 6, channels=3, batch_size=8)
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (8, 3, 6, 6)
    assert torch.equal((x[:, 0, 0, 0] * 255).round() % 2, y.float())
    shard(tmp_path / "b.tar", 0, 8, lambda i: ["cat|dog", ""][i % 2])
    data = Shards(str(tmp_path / "b.tar"), 8, ["cat", "dog"], 6, batch_size=8, separator="|")
    assert data.multi_label
    assert sorted(next(iter(data.train_dataloader()))[1].tolist()) == [[0, 0]] * 4 + [[1, 1]] * 4


def consume(make: Any) -> None:
    for loader in (make().train_dataloader(), make().test_dataloader()):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_in_a_shard_is_named(tars: Path, workers: int) -> None:
    shard(tars / "train-3.tar", 30, 10, lambda i: "3" if i == 34 else "0")
    with pytest.raises(ValueError, match=r"train-3\.tar: image0034: label '3' is out of range: a number from 0 to 2"):
        consume(lambda: stream(tars, num_workers=workers))
    with webdataset.TarWriter(str(tars / "train-3.tar")) as writer:
        writer.write({"__key__": "a", "png": b"no image", "cls": b"0"})
    with pytest.raises(ValueError, match=r"train-3\.tar: a\.png cannot be read as an image"):
        consume(lambda: stream(tars, num_workers=workers))
    with webdataset.TarWriter(str(tars / "train-3.tar")) as writer:
        writer.write({"__key__": "a", "gif": b"", "cls": b"0"})
    with pytest.raises(ValueError, match=r"train-3\.tar: a has cls, gif, but an image is one of jpg, jpeg, png, webp"):
        consume(lambda: stream(tars, num_workers=workers))
    (tars / "train-3.tar").write_bytes(b"no shard" * 1000)
    with pytest.raises(ValueError, match=r"shard .*train-3\.tar cannot be read"):
        consume(lambda: stream(tars, num_workers=workers))
    (tars / "train-3.tar").unlink()
    with pytest.raises(ValueError, match=r"shard .*train-3\.tar cannot be read"):
        consume(lambda: stream(tars, num_workers=workers))


def test_shards_that_make_no_sense_are_refused(tars: Path) -> None:
    one = str(tars / "train-0.tar")
    with pytest.raises(ValueError, match="test_samples=0: say how many images test holds"):
        Shards(one, 10, 3, 6, test=one)
    with pytest.raises(ValueError, match="would read all of them: give the means and deviations"):
        stream(tars, normalize="train")
    with pytest.raises(ValueError, match="streams=0"):
        stream(tars, streams=0)
    with pytest.raises(ValueError, match="names one twice"):
        Shards(one, 10, ["a", "a"], 6).setup()
    data = Shards(one, 10, 3, 6, test=one, test_samples=11, batch_size=5)
    with pytest.raises(ValueError, match="end before image 10, but are said to hold 11"):
        list(data.test_dataloader())
    with webdataset.TarWriter(one):
        pass
    with pytest.raises(ValueError, match=r"train-0\.tar: no samples"):
        list(Shards(one, 10, 3, 6, batch_size=5).train_dataloader())
