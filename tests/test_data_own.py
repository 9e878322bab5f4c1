"""Your own data: arrays, .npz, folders and tables become batches, and what makes no sense is said with its name."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from torchcaps.data import CSV, NPZ, Arrays, Augment, ImageData, ImageFolder, preprocess
from torchcaps.data._splits import class_keys, stratified
from torchcaps.data.own import LabelledData

RNG = np.random.default_rng(0)


def everything(loader: Any) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*loader, strict=True))


def sizes(data: ImageData) -> tuple[int, int, int]:
    return tuple(0 if part is None else len(part) for part in data.parts[:3])  # type: ignore[return-value]


def bytes_of(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def folder(root: Path, n: int = 6, classes: int = 3, size: tuple[int, int] = (37, 52), mode: str = "RGB") -> Path:
    for k in range(classes):
        (root / f"class{k}").mkdir(parents=True)
        for i in range(n):
            pixels = bytes_of(*size, *([3] if mode == "RGB" else []))
            Image.fromarray(pixels).save(root / f"class{k}" / f"{i}.png")
    return root


# arrays


@pytest.mark.parametrize(
    ("shape", "settings", "channels", "size"),
    [
        ((16,), {}, 1, (16,)),
        ((1, 16), {}, 1, (16,)),
        ((5, 16), {"kind": "signal"}, 5, (16,)),
        ((16, 5), {"kind": "signal", "layout": "channels_last"}, 5, (16,)),
        ((4, 16), {}, 4, (16,)),
        ((4, 16), {"kind": "image"}, 1, (4, 16)),
        ((16, 4), {"layout": "channels_last"}, 4, (16,)),
        ((4, 4), {}, 1, (4, 4)),
        ((7, 9), {}, 1, (7, 9)),
        ((7, 9, 3), {}, 3, (7, 9)),
        ((3, 7, 9), {}, 3, (7, 9)),
        ((2, 7, 9), {}, 2, (7, 9)),
        ((7, 9, 12), {"layout": "channels_last"}, 12, (7, 9)),
        ((12, 7, 9), {"layout": "channels_first"}, 12, (7, 9)),
        ((6, 7, 8), {"kind": "volume"}, 1, (6, 7, 8)),
        ((2, 6, 7, 8), {}, 2, (6, 7, 8)),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_arrays_of_any_shape_come_with_channels_first_in_0_to_1(
    shape: tuple[int, ...], settings: dict[str, Any], channels: int, size: tuple[int, ...], kind: str
) -> None:
    x = bytes_of(60, *shape)
    data = Arrays(x if kind == "numpy" else torch.from_numpy(x), np.arange(60) % 4, batch_size=7, **settings)
    assert (data.in_chans, data.image_size, data.num_classes, data.multi_label) == (channels, size, 4, False)
    assert data.class_names == ["0", "1", "2", "3"]
    images, labels = everything(data.train_dataloader())
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.shape[1:] == (channels, *size)
    # pixel for pixel what was given, whatever the order
    flat = np.moveaxis(x, -1, 1) if settings.get("layout") == "channels_last" or shape == (7, 9, 3) else x
    given = {tuple(row) for row in flat.reshape(60, -1).tolist()}
    assert {tuple(row) for row in (images * 255).round().int().flatten(1).tolist()} <= given


def test_parts_that_are_not_given_are_split_off_with_their_classes_shares_and_no_item_is_in_two() -> None:
    y = np.array([0] * 100 + [1] * 50 + [2] * 10)
    x = np.arange(160, dtype=np.float32)[:, None].repeat(3, 1) / 160
    data = Arrays(x, y, val_fraction=0.125, test_fraction=0.25)
    assert sizes(data) == (105, 15, 40)
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    labels = [Counter(everything(loader)[1].tolist()) for loader in loaders]
    for found, part in zip(labels, (105, 15, 40), strict=True):
        assert all(abs(found[k] - n * part / 160) <= 1 for k, n in enumerate((100, 50, 10)))
    items = torch.cat([everything(loader)[0][:, 0, 0] for loader in loaders])
    assert len(items.unique()) == 160


def test_splits_depend_on_their_own_seed_alone() -> None:
    x, y = RNG.random((60, 5)).astype(np.float32), np.arange(60) % 3

    def test_items(**settings: Any) -> Tensor:
        return everything(Arrays(x, y, **settings).test_dataloader())[0]

    assert torch.equal(test_items(), test_items(seed=9))
    assert torch.equal(test_items(), test_items(label_fraction=0.5))
    assert not torch.equal(test_items(), test_items(split_seed=1))


def test_given_parts_are_kept_as_they_are() -> None:
    x = [bytes_of(n, 4, 4) for n in (12, 6, 9)]
    y = [np.arange(len(part)) % 3 for part in x]
    data = Arrays(x[0], y[0], x_val=x[1], y_val=y[1], x_test=x[2], y_test=y[2])
    assert sizes(data) == (12, 6, 9)
    for loader, images, labels in zip((data.val_dataloader(), data.test_dataloader()), x[1:], y[1:], strict=True):
        found = everything(loader)
        assert torch.equal(found[0][:, 0], torch.from_numpy(images) / 255)
        assert found[1].tolist() == labels.tolist()


def test_without_a_validation_share_there_are_no_validation_batches_and_without_a_test_share_no_test() -> None:
    data = Arrays(bytes_of(9, 4, 4), np.arange(9) % 3, val_fraction=0, test_fraction=0)
    assert sizes(data) == (9, 0, 0)
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="Arrays has no test part"):
        data.test_dataloader()


def test_a_smaller_share_of_labels_is_part_of_a_larger_one_and_each_class_keeps_its_share() -> None:
    x, y = np.arange(1000, dtype=np.float32)[:, None].repeat(2, 1) / 1000, np.array([0] * 800 + [1] * 200)
    found = {}
    for share in (0.05, 0.2, 1.0):
        images, labels = everything(
            Arrays(x, y, label_fraction=share, val_fraction=0, test_fraction=0).train_dataloader()
        )
        assert Counter(labels.tolist()) == {0: round(800 * share), 1: round(200 * share)}
        found[share] = set(images[:, 0, 0].tolist())
    assert found[0.05] < found[0.2] < found[1.0]


def test_a_share_of_labels_is_drawn_by_the_seed_of_the_splits() -> None:
    x, y = np.arange(200, dtype=np.float32)[:, None].repeat(2, 1) / 200, np.arange(200) % 2

    def chosen(split_seed: int) -> list[int]:
        data = Arrays(x, y, x_test=x, y_test=y, val_fraction=0, label_fraction=0.1, split_seed=split_seed)
        return sorted((everything(data.train_dataloader())[0][:, 0, 0] * 200).round().int().tolist())

    assert chosen(0) == chosen(0) != chosen(1)
    for seed in (0, 1):
        assert len(chosen(seed)) == 20
        assert chosen(seed)[0] < 60
        assert chosen(seed)[-1] > 140


def test_a_class_of_two_is_in_both_parts_however_large_the_share() -> None:
    for fraction in (0.05, 0.5, 0.95):
        y = np.array([0] * 40 + [1, 1])
        data = Arrays(bytes_of(42, 4, 4), y, val_fraction=fraction, test_fraction=0)
        assert everything(data.train_dataloader())[1].unique().tolist() == [0, 1]
        assert everything(data.val_dataloader())[1].unique().tolist() == [0, 1]


def test_a_limit_takes_the_first_of_each_class_and_none_is_lost() -> None:
    keys = np.array([0] * 90 + [1] * 9 + [2])
    assert stratified(keys, 10).tolist() == [*range(8), 90, 99]
    assert Counter(keys[stratified(keys, 20)].tolist()) == {0: 17, 1: 2, 2: 1}
    assert stratified(keys, 100).tolist() == list(range(100))
    data = Arrays(bytes_of(100, 4, 4), np.arange(100) % 5, limit=10)
    assert sizes(data) == (10, 8, 10)
    assert Counter(everything(data.train_dataloader())[1].tolist()) == dict.fromkeys(range(5), 2)


def test_several_labels_are_split_by_the_rarest() -> None:
    y = np.zeros((200, 3), int)
    y[:, 0] = 1
    y[:20, 1] = 1
    y[150:, 2] = 1
    y[199] = 0
    assert Counter(class_keys(torch.from_numpy(y)).tolist()) == {0: 130, 1: 20, 2: 49, 3: 1}
    data = Arrays(bytes_of(200, 4, 4), y, test_fraction=0.5, val_fraction=0)
    assert data.multi_label
    assert data.num_classes == 3
    _, labels = everything(data.test_dataloader())
    assert labels.dtype == torch.float32
    assert labels[:, 1].sum() == 10


def test_bytes_words_and_other_numbers_are_scaled_as_documented() -> None:
    y = np.arange(12) % 2

    def scaled(x: np.ndarray, **settings: Any) -> tuple[Tensor, list[float]]:
        data = Arrays(x, y, x_test=x, y_test=y, val_fraction=0, **settings)
        return everything(data.test_dataloader())[0], data.preprocessing["range"]

    x = RNG.random((12, 4, 4))
    assert torch.equal(scaled((x * 255).astype(np.uint8))[0][:, 0], torch.from_numpy((x * 255).astype(np.uint8)) / 255)
    words, limits = scaled((x * 65535).astype(np.uint16))
    assert limits == [0, 65535]
    torch.testing.assert_close(words[:, 0], torch.from_numpy(x).float(), atol=1e-4, rtol=0)
    assert torch.equal(scaled(x)[0][:, 0], torch.from_numpy(x).float())
    assert scaled(1.5 * x)[1] == pytest.approx([1.5 * x.min(), 1.5 * x.max()])
    wide = 8 * x - 3
    low, high = wide.min(), wide.max()
    found, limits = scaled(wide)
    assert limits == pytest.approx([low, high])
    torch.testing.assert_close(found[:, 0].double(), torch.from_numpy((wide - low) / (high - low)), atol=1e-6, rtol=0)
    assert found.min() == 0
    assert scaled(np.arange(12 * 16).reshape(12, 4, 4))[1] == [0, 191]


def test_labels_may_be_names() -> None:
    data = Arrays(
        bytes_of(30, 4, 4), np.array(["dog", "cat", "emu"] * 10), x_test=bytes_of(3, 4, 4), y_test=["emu", "cat", "dog"]
    )
    assert data.class_names == ["cat", "dog", "emu"]
    assert everything(data.test_dataloader())[1].tolist() == [2, 0, 1]


def test_normalising_uses_the_training_part_alone() -> None:
    x = np.concatenate([RNG.random((50, 2, 6, 5)) * [[[0.5]], [[0.2]]], np.ones((10, 2, 6, 5))])
    y = np.arange(60) % 2
    data = Arrays(x[:50], y[:50], x_test=x[50:], y_test=y[50:], val_fraction=0, normalize="train")
    images = everything(data.train_dataloader())[0]
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5, rtol=0)
    assert data.preprocessing["mean"] == pytest.approx(x[:50].mean((0, 2, 3)))
    given = Arrays(x[:50], y[:50], x_test=x[50:], y_test=y[50:], normalize=([0.5, 0.5], [0.25, 0.5]))
    test = everything(given.test_dataloader())[0]
    assert test[:, 0].unique().tolist() == [2]
    assert test[:, 1].unique().tolist() == [1]
    with pytest.raises(ValueError, match="for each of 2 channels"):
        Arrays(x, y, normalize=([0.5], [0.5])).setup()


# signals of different lengths


def test_signals_of_different_lengths_come_with_a_mask_and_zeros_behind() -> None:
    signals = [np.full((2, 3 + i % 5), i + 1.0) for i in range(40)]
    data = Arrays(signals, np.arange(40) % 2, batch_size=4)
    assert (data.in_chans, data.image_size, data.any_length) == (2, (7,), True)
    lengths = []
    for x, y, mask in data.train_dataloader():
        assert mask.dtype == torch.bool
        assert mask.shape == (len(y), x.shape[2])
        assert x.shape[2] == mask.sum(1).max()
        numbers = x * (40 - 1) + 1
        for row, there in zip(numbers, mask, strict=True):
            length = int(there.sum())
            assert there[:length].all()
            value = round(float(row[0, 0]))
            assert length == 3 + (value - 1) % 5
            assert row[:, :length].round().unique().tolist() == [value]
        assert not x[~mask[:, None].expand_as(x)].any()
        lengths.append(x.shape[2])
    assert len(set(lengths)) > 1


def test_filled_up_signals_with_lengths_are_the_same_as_a_list(tmp_path: Path) -> None:
    signals = [RNG.random(3 + i % 5).astype(np.float32) * 4 - 2 for i in range(40)]
    y = np.arange(40) % 2
    filled = np.full((40, 7), 99, np.float32)
    for row, signal in zip(filled, signals, strict=True):
        row[: len(signal)] = signal
    np.savez(tmp_path / "a.npz", x=filled, y=y, lengths=[len(s) for s in signals])
    for settings in ({}, {"normalize": "train"}):
        a, b = Arrays(signals, y, batch_size=8, **settings), NPZ(str(tmp_path / "a.npz"), batch_size=8, **settings)
        for one, two in zip(a.train_dataloader(), b.train_dataloader(), strict=True):
            for u, v in zip(one, two, strict=True):
                torch.testing.assert_close(u, v)
            assert not one[0][~one[2][:, None]].any()


def test_arrays_with_lengths_are_signals_however_many_channels_they_have(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.eye(12)[:, None].repeat(8, 1), y=np.arange(12) % 2, lengths=np.full(12, 9))
    data = NPZ(tmp_path / "a.npz")
    assert (data.preprocessing["kind"], data.in_chans) == ("signal", 8)


def test_augmentation_of_signals_of_different_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="augment is not for signals of different lengths"):
        Arrays([np.ones(i % 3 + 2) * i for i in range(40)], np.arange(40) % 2, augment=Augment(shift=1)).setup()


# .npz


def test_an_npz_in_the_manner_of_medmnist_gives_its_own_parts(tmp_path: Path) -> None:
    arrays = {}
    for part, n in (("train", 20), ("val", 8), ("test", 12)):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = bytes_of(n, 9, 7, 3), (np.arange(n) % 4)[:, None]
    np.savez(tmp_path / "set.npz", **arrays)
    data = NPZ(str(tmp_path / "set.npz"), class_names=["a", "b", "c", "d"])
    assert sizes(data) == (20, 8, 12)
    assert (data.in_chans, data.image_size, data.class_names) == (3, (9, 7), ["a", "b", "c", "d"])
    images, labels = everything(data.test_dataloader())
    assert torch.equal(images, torch.from_numpy(arrays["test_images"]).movedim(-1, 1) / 255)
    assert labels.tolist() == arrays["test_labels"][:, 0].tolist()


def test_an_npz_of_one_channel_signals_is_enough(tmp_path: Path) -> None:
    np.savez(tmp_path / "signals.npz", x=RNG.normal(size=(60, 128)), y=np.arange(60) % 3)
    data = NPZ(str(tmp_path / "signals.npz"))
    assert (data.in_chans, data.image_size, data.num_classes) == (1, (128,), 3)
    x, _ = next(iter(data.train_dataloader()))
    assert x.shape == (43, 1, 128)
    assert 0 <= x.min() < x.max() <= 1


def test_several_labels_in_an_npz(tmp_path: Path) -> None:
    y = np.eye(3, dtype=int)[np.arange(30) % 3]
    y[::5, 0] = 1
    np.savez(tmp_path / "set.npz", train_images=bytes_of(30, 4, 4), train_labels=y)
    data = NPZ(str(tmp_path / "set.npz"))
    assert data.multi_label
    assert everything(data.train_dataloader())[1].shape == (22, 3)


# folders of images


def test_a_folder_of_images_of_odd_size_is_enough(tmp_path: Path) -> None:
    data = ImageFolder(str(folder(tmp_path, n=40, classes=5)), augment=Augment(shift=2))
    assert (data.in_chans, data.image_size, data.num_classes) == (3, (37, 52), 5)
    assert data.class_names == [f"class{k}" for k in range(5)]
    assert sizes(data) == (144, 16, 40)
    x, _ = next(iter(data.train_dataloader()))
    assert x.shape == (128, 3, 37, 52)
    assert x.max() == 1


def test_images_of_any_size_are_brought_to_the_median_or_the_size_asked_for(tmp_path: Path) -> None:
    for i, size in enumerate([(10, 30), (12, 30), (14, 40), (16, 50), (18, 60)]):
        folder(tmp_path / "all" / "train" / f"part{i}", n=1, classes=1, size=size, mode="L")
    (tmp_path / "all" / "train" / "b").mkdir()
    Image.fromarray(bytes_of(13, 41)).save(tmp_path / "all" / "train" / "b" / "a.png")
    data = ImageFolder(str(tmp_path / "all"), val_fraction=0, test_fraction=0)
    assert data.image_size == (13, 40)
    assert data.in_chans == 1
    for given, size in ((20, (20, 20)), ((9, 11), (9, 11))):
        data = ImageFolder(str(tmp_path / "all"), given, channels=3, val_fraction=0, test_fraction=0)
        assert data.image_size == size
        assert next(iter(data.train_dataloader()))[0].shape == (6, 3, *size)


def test_folders_named_train_val_and_test_are_these_parts(tmp_path: Path) -> None:
    for part, n in (("train", 4), ("valid", 2), ("test", 3)):
        folder(tmp_path / part, n=n)
    assert sizes(ImageFolder(str(tmp_path))) == (12, 6, 9)


def test_images_read_when_needed_are_those_in_memory_also_in_workers(tmp_path: Path) -> None:
    folder(tmp_path, n=8, size=(20, 14))
    Image.fromarray(bytes_of(31, 11, 3)).save(tmp_path / "class0" / "large.png")
    kept, read = (ImageFolder(str(tmp_path), in_memory=m, num_workers=w) for m, w in ((True, 0), (False, 2)))
    assert not isinstance(kept.parts.train, type(read.parts.train))
    for a, b in zip(kept.train_dataloader(), read.train_dataloader(), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_words_of_16_bits_keep_their_depth(tmp_path: Path) -> None:
    folder(tmp_path, n=3, classes=2, size=(5, 6), mode="L")
    pixels = {}
    for file in tmp_path.rglob("*.png"):
        pixels[file] = RNG.integers(0, 65536, (5, 6), dtype=np.uint16)
        Image.fromarray(pixels[file]).save(file)
    for in_memory in (True, False):
        data = ImageFolder(str(tmp_path), in_memory=in_memory, val_fraction=0, test_fraction=0)
        assert data.preprocessing["range"] == [0, 65535]
        found = {
            tuple(row) for row in (everything(data.train_dataloader())[0] * 65535).round().int().flatten(1).tolist()
        }
        assert found == {tuple(p.flatten().tolist()) for p in pixels.values()}


def test_photographs_taken_on_their_side_are_turned(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pixels = bytes_of(4, 6)
    for i, turned in enumerate((False, True)):
        picture = Image.fromarray(pixels if not turned else np.rot90(pixels))
        exif = picture.getexif()
        exif[0x0112] = 6 if turned else 1  # 6: to be turned by a quarter clockwise
        picture.save(tmp_path / "a" / f"{i}.png", exif=exif)
    data = ImageFolder(str(tmp_path), val_fraction=0, test_fraction=0)
    assert data.image_size == (4, 6)
    x, _ = everything(data.train_dataloader())
    assert torch.equal(x[0], x[1])
    assert torch.equal((x[0, 0] * 255).round(), torch.from_numpy(pixels).float())


# tables


def table(path: Path, rows: list[list[str]], header: str = "path,label,split") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return path


def test_a_table_of_paths_and_labels(tmp_path: Path) -> None:
    folder(tmp_path / "images", n=6, classes=2, size=(6, 5), mode="L")
    files = sorted(p.relative_to(tmp_path / "images").as_posix() for p in (tmp_path / "images").rglob("*.png"))
    rows = [[file, "10" if i % 2 else "9", ("train", "val", "test")[i // 4]] for i, file in enumerate(files)]
    data = CSV(str(table(tmp_path / "a.csv", rows)), root=str(tmp_path / "images"))
    assert sizes(data) == (4, 4, 4)
    assert data.class_names == ["9", "10"]
    assert everything(data.test_dataloader())[1].tolist() == [0, 1, 0, 1]
    rows = [[f"images/{file}", "ab"[i % 2]] for i, file in enumerate(files)]
    data = CSV(str(table(tmp_path / "b.csv", rows, "file,kind")), image_column="file", label_column="kind")
    assert sizes(data) == (8, 2, 2)


def test_a_table_with_several_labels(tmp_path: Path) -> None:
    folder(tmp_path, n=4, classes=1, size=(6, 5), mode="L")
    rows = [[f"class0/{i}.png", label] for i, label in enumerate(["cat|dog", "dog", "", "cat | emu"])]
    data = CSV(
        str(table(tmp_path / "a.csv", rows, "path,label")), separator="|", val_fraction=0, test_fraction=0, batch_size=4
    )
    assert data.class_names == ["cat", "dog", "emu"]
    assert data.multi_label
    found = sorted(everything(data.train_dataloader())[1].tolist())
    assert found == sorted([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]])


# what a checkpoint needs


def sources(tmp_path: Path) -> dict[str, tuple[ImageData, Any]]:
    folder(tmp_path / "colour", n=5, size=(20, 14))
    Image.fromarray(bytes_of(31, 11, 3)).save(tmp_path / "colour" / "class0" / "large.png")
    x, signals = bytes_of(40, 9, 7, 3), RNG.normal(size=(40, 3, 50))
    y = np.arange(40) % 2
    return {
        "folder": (
            ImageFolder(str(tmp_path / "colour"), augment=Augment(crop=10), normalize="train"),
            sorted((tmp_path / "colour").rglob("*.png")),
        ),
        "images": (Arrays(x, y, x_test=x, y_test=y, normalize="train"), x),
        "signals": (Arrays(signals, y, x_test=signals, y_test=y, kind="signal", augment=Augment(crop=30)), signals),
    }


@pytest.mark.parametrize("name", ["folder", "images", "signals"])
def test_preprocessing_is_plain_json_and_makes_the_same_tensor_again(tmp_path: Path, name: str) -> None:
    data, raw = sources(tmp_path)[name]
    to_tensor = preprocess(json.loads(json.dumps(data.preprocessing)))
    again = torch.stack([to_tensor(item) for item in raw])
    loaded = everything(data.test_dataloader())[0]
    assert again.shape[1:] == (data.in_chans, *data.image_size)
    if name == "folder":
        assert {tuple(row) for row in loaded.flatten(1).tolist()} < {tuple(row) for row in again.flatten(1).tolist()}
    else:
        assert torch.equal(loaded, again)


def test_preprocessing_takes_pictures_paths_and_arrays_with_channels_on_either_side(tmp_path: Path) -> None:
    data, files = sources(tmp_path)["folder"]
    to_tensor = preprocess(data.preprocessing)
    pixels = np.asarray(Image.open(files[0]))
    expected = to_tensor(files[0])
    for same in (str(files[0]), Image.open(files[0]), pixels, torch.from_numpy(pixels.copy()).movedim(-1, 0)):
        assert torch.equal(to_tensor(same), expected)


def test_preprocessing_refuses_what_it_was_not_made_for() -> None:
    data = Arrays(bytes_of(20, 9, 7), np.arange(20) % 2)
    spec = data.preprocessing
    with pytest.raises(ValueError, match="give the numbers as they were before division by 255"):
        preprocess(spec)(np.full((9, 7), 0.5))
    with pytest.raises(ValueError, match="made for 1 channels"):
        preprocess(spec)(np.zeros((9, 7, 3), np.uint8))
    with pytest.raises(ValueError, match="preprocessing of version 99"):
        preprocess({**spec, "version": 99})
    fractions = preprocess(Arrays(RNG.random((20, 9, 7)), np.arange(20) % 2).preprocessing)
    with pytest.raises(ValueError, match="made of numbers from 0 to 1: divide by 255"):
        fractions(bytes_of(9, 7))
    signals = preprocess(Arrays(RNG.random((20, 8)), np.arange(20) % 2).preprocessing)
    with pytest.raises(ValueError, match=r"a signal of \[9\], but the model was made for \[8\]"):
        signals(np.zeros(9))
    with pytest.raises(ValueError, match="not for pictures"):
        signals(Image.new("L", (8, 8)))


# what makes no sense


def load(make: Any) -> None:
    data: LabelledData = make()
    data.setup()


NINE, THIRDS = bytes_of(9, 4, 4), [0, 1, 2] * 3


@pytest.mark.parametrize(
    ("x", "y", "settings", "message"),
    [
        (NINE, np.arange(8) % 2, {}, "x has 9 items, but y has 8 labels"),
        (NINE, [0, 1, -1] * 3, {}, r"y\[2\] = -1 is out of range: labels are whole numbers, here 0 to 1"),
        (NINE, [0, 1, 0.5] * 3, {}, r"y\[2\] = 0.5 is out of range"),
        (NINE, [0, 1, np.nan] * 3, {}, r"y\[2\] = nan is out of range"),
        (NINE, THIRDS, {"class_names": ["a", "b"]}, r"y\[2\] = 2 is out of range"),
        (NINE, [0, 1, 3] * 3, {}, r"y: class '2' \(2 of 0 to 3\) is empty"),
        (NINE, THIRDS, {"class_names": ["a", "b", "c", "d"]}, "y: class 'd' .* is empty"),
        (NINE, [[0, 1, 2]] * 9, {}, r"y\[0\] holds other numbers than 0 and 1"),
        (NINE, [[0, 1]] * 9, {}, "class '0' .* is empty"),
        (NINE, np.eye(9, 3) + np.eye(9, 3, -3) + np.eye(9, 3, -6), {"class_names": ["a"]}, "speaks of 3 classes"),
        (NINE, np.zeros((9, 2, 2)), {}, r"y is \[9, 2, 2\]"),
        (NINE, [None] * 9, {}, "labels are whole numbers from 0, or names"),
        (np.where(np.arange(90).reshape(9, 10) == 25, np.nan, 0.5), THIRDS, {}, r"x\[2\] holds NaN .*\(1 of 9 do\)"),
        (np.full((9, 10), 3.0), THIRDS, {}, "x holds 3 and nothing else"),
        (np.full((9, 10), 1j), THIRDS, {}, "x holds complex128"),
        (np.zeros(9), THIRDS, {}, r"x is \[9\]"),
        (np.zeros((0, 4, 4)), [], {}, r"y is \[0\]"),
        (bytes_of(9, 12, 7, 9), THIRDS, {}, r'x is \[9, 12, 7, 9\]: give layout="channels_first"'),
        (bytes_of(9, 3, 7, 3), THIRDS, {}, "the 3 or the 3"),
        (bytes_of(9, 7, 9), THIRDS, {"kind": "volume"}, r"x is \[9, 7, 9\], but a volume is \[n, D, H, W\]"),
        ([np.ones((2, 3)), np.ones((3, 4))] * 4, [0, 1] * 4, {}, r"x\[1\] is \[3, 4\] and x\[0\] is \[2, 3\]"),
        (NINE, [0] * 7 + [1, 1], {}, "class '1' has 2 training items, too few to split off test data: .* needs 3"),
        (NINE, [0] * 8 + [1], {"test_fraction": 0}, "class '1' has 1 training item, too few to split off val"),
        (NINE, THIRDS, {"x_test": bytes_of(2, 4, 5), "y_test": [0, 1]}, r"x_test is \[2, 1, 4, 5\], but x is"),
        (NINE, THIRDS, {"x_test": bytes_of(2, 4, 4), "y_test": [0, 3]}, r"y_test\[1\] = 3 is out of range"),
        (NINE, THIRDS, {"x_test": bytes_of(2, 4, 4)}, "x_test and y_test come together"),
        (NINE, THIRDS, {"x_test": bytes_of(2, 4, 4) / 255, "y_test": [0, 1]}, "x_test and x hold numbers of different"),
        (NINE, [*"abc"] * 3, {"x_test": bytes_of(2, 4, 4), "y_test": [*"ad"]}, r"y_test\[1\] = 'd' is out of range"),
        (NINE, THIRDS, {"x_test": bytes_of(2, 4, 4), "y_test": np.eye(2, 3)}, "one label for each item or several"),
        (NINE, THIRDS, {"class_names": ["a", "b", "a"]}, "names one twice"),
        (NINE, THIRDS, {"val_fraction": 1}, "val_fraction=1 must be a share"),
        (NINE, THIRDS, {"label_fraction": 0}, "label_fraction=0 must be a share"),
        (NINE, THIRDS, {"batch_size": 0}, "Arrays: batch_size=0: give 1 or more"),
    ],
)
def test_arrays_that_make_no_sense_are_refused_by_name(x: Any, y: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(lambda: Arrays(x, y, **settings))


def test_an_npz_that_makes_no_sense_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*set\.npz"):
        load(lambda: NPZ(str(path)))
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"set\.npz cannot be read"):
        load(lambda: NPZ(str(path)))
    np.savez(path, train_images=bytes_of(9, 4, 4), labels=np.zeros(9))
    with pytest.raises(ValueError, match=r"set\.npz has no 'train_labels', but labels, train_images"):
        load(lambda: NPZ(str(path)))
    np.savez(path, pictures=bytes_of(9, 4, 4))
    with pytest.raises(ValueError, match=r"set\.npz has no 'x', but pictures"):
        load(lambda: NPZ(str(path)))
    np.savez(path, x=bytes_of(9, 4, 4), y=np.arange(9) % 2, test_images=bytes_of(2, 4, 4))
    with pytest.raises(ValueError, match=r"set\.npz has no 'test_labels'"):
        load(lambda: NPZ(str(path)))
    np.savez(path, x=np.array([np.ones(2), np.ones(3)], dtype=object), y=[0, 1])
    with pytest.raises(ValueError, match=r"set\.npz cannot be read .* filled up to the longest, and their lengths"):
        load(lambda: NPZ(str(path)))
    np.savez(path, x=RNG.random((9, 4)), y=np.arange(9) % 3, lengths=[5] * 9)
    with pytest.raises(ValueError, match=r"lengths of x of .*set\.npz: 9 numbers from 5 to 5 do not fit"):
        load(lambda: NPZ(str(path)))
    np.savez(path, train_images=bytes_of(9, 4, 4), train_labels=[0, 1, 7] * 3)
    with pytest.raises(
        ValueError, match=r"train_labels\[2\] = 7 is out of range|train_labels of .*set\.npz: class '2'"
    ):
        load(lambda: NPZ(str(path)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"set\.npz cannot be read"):
        load(lambda: NPZ(str(path)))


def test_a_folder_that_makes_no_sense_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        load(lambda: ImageFolder(str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match="holds no folders: give each class a folder"):
        load(lambda: ImageFolder(str(tmp_path)))
    root = folder(tmp_path / "set", n=4, size=(5, 6))
    (root / "empty").mkdir()
    (root / "empty" / "notes.txt").write_text("none yet")
    with pytest.raises(ValueError, match=r"set/empty is empty, it holds no image"):
        load(lambda: ImageFolder(str(root)))
    Image.fromarray(bytes_of(5, 6)).save(root / "empty" / "a.png")
    with pytest.raises(ValueError, match=r"empty/a\.png is grey and .*class0/0\.png has colours: give channels=1"):
        load(lambda: ImageFolder(str(root), val_fraction=0, test_fraction=0))
    assert ImageFolder(str(root), channels=1, val_fraction=0, test_fraction=0).in_chans == 1
    Image.fromarray(bytes_of(5, 6).astype(np.uint16) * 200).save(root / "empty" / "a.png")
    with pytest.raises(ValueError, match=r"empty/a\.png and .*class0/0\.png differ in depth"):
        load(lambda: ImageFolder(str(root), channels=1, val_fraction=0, test_fraction=0))
    with pytest.raises(ValueError, match=r"read with 1 or 3 channels, not 2"):
        load(lambda: ImageFolder(str(root), channels=2, val_fraction=0, test_fraction=0))
    split = tmp_path / "split"
    folder(split / "train", n=3)
    folder(split / "test", n=1, classes=4)
    with pytest.raises(ValueError, match=r"test/class3 is out of range, no class of the training part"):
        load(lambda: ImageFolder(str(split)))


@pytest.mark.parametrize("damage", ["text", "truncated", "empty"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_an_unreadable_image_is_named(tmp_path: Path, damage: str, in_memory: bool) -> None:
    root = folder(tmp_path, n=4, size=(40, 50))
    file = root / "class1" / "2.png"
    file.write_bytes({"text": b"no image", "truncated": file.read_bytes()[:3000], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"class1/2\.png cannot be read as an image"):
        list(ImageFolder(str(root), in_memory=in_memory, val_fraction=0, test_fraction=0).train_dataloader())


def test_an_unreadable_image_is_named_by_a_worker(tmp_path: Path) -> None:
    root = folder(tmp_path, n=4, size=(40, 50))
    file = root / "class1" / "2.png"
    file.write_bytes(file.read_bytes()[:3000])
    data = ImageFolder(str(root), in_memory=False, val_fraction=0, test_fraction=0, num_workers=1)
    with pytest.raises(ValueError, match=r"class1/2\.png cannot be read as an image"):
        list(data.train_dataloader())


@pytest.mark.parametrize(
    ("rows", "header", "settings", "error", "message"),
    [
        ([["a.png", "x"]], "path,kind", {}, ValueError, r"t\.csv has no column 'label', but path, kind"),
        ([["b.png", "x"]], "path,label", {}, FileNotFoundError, r"t\.csv, line 2: there is no file .*b\.png"),
        ([["a.png", ""]], "path,label", {}, ValueError, r"t\.csv, line 2: no label"),
        ([["a.png", "x", "holdout"]], "path,label,split", {}, ValueError, "line 2: split is 'holdout'"),
        ([["a.png", "x", "test"]], "path,label,split", {}, ValueError, "has no training images"),
        (
            [["a.png", "x", "train"], ["c.png", "y", "test"]], "path,label,split", {}, ValueError,
            "line 3: label 'y' is out of range: the training images have x",
        ),
        ([["a.png", "x"]], "path,label", {"class_names": ["x", "y"]}, ValueError, "class 'y' is empty"),
        (
            [["a.png", "x"], ["c.png", "x"], ["./a.png", "y"]], "path,label", {}, ValueError,
            r"a\.png is in line 2 and in line 4: give each image one line, for several labels with separator=",
        ),
        (
            [["a.png", "x", "train"], ["a.png", "x", "test"]], "path,label,split", {}, ValueError,
            r"a\.png is in line 2 and in line 3",
        ),
        ([["a.png", "x", ""]], "path,label,split", {}, ValueError, "line 2: split is ''"),
        ([["a.png", "x"]], "path,label,split", {}, ValueError, "line 2: split is ''"),
        ([["a.png", "x"]], "path,label", {"split_column": "fold"}, ValueError, "no column 'fold', but path, label: g"),
        ([["a.png", "x"]], "path,label", {"separator": ""}, ValueError, "separator='' separates nothing"),
        ([["a.png", "x", "holdout"]], "path,label,Split", {}, ValueError, "line 2: Split is 'holdout'"),
    ],
)  # fmt: skip
def test_a_table_that_makes_no_sense_is_refused_by_line(
    tmp_path: Path, rows: list[list[str]], header: str, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    for name in ("a.png", "c.png"):
        Image.fromarray(bytes_of(5, 6)).save(tmp_path / name)
    with pytest.raises(error, match=message):
        load(lambda: CSV(str(table(tmp_path / "t.csv", rows, header)), **settings))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,label\na.png,\u00e9".encode("latin-1"), r"t\.csv is no text in UTF-8"),
        ("path,label\na.png,x".encode("utf-16"), r"t\.csv is no text in UTF-8"),
        (b'path,label\n"a.png,x\n' + b"b.png,y\n" * 30_000, r"t\.csv, line \d+: field larger than field limit"),
        (b'path,label\n"a.png,x\nb.png,y\n', r"t\.csv, line \d+: unexpected end of data"),
        (b"", r"t\.csv has no column 'path', but none"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(lambda: CSV(str(tmp_path / "t.csv")))


@pytest.mark.parametrize(("column", "word"), [("split", "test"), ("Split", "TEST"), (" SPLIT ", "Testing")])
def test_columns_and_parts_of_a_table_are_the_same_in_capitals(tmp_path: Path, column: str, word: str) -> None:
    folder(tmp_path, n=4, classes=2, size=(6, 5), mode="L")
    rows = [[f"class{k}/{i}.png", str(k), word if i == 3 else "Training"] for k in (0, 1) for i in range(4)]
    data = CSV(str(table(tmp_path / "t.csv", rows, f"Path,LABEL,{column}")), val_fraction=0)
    assert sizes(data) == (6, 0, 2)


@pytest.mark.parametrize(
    "names", [("Train", "VAL", "Test"), ("training", "validation", "testing"), ("Training", "Valid", "Testing")]
)
def test_folders_of_parts_are_known_in_the_usual_spellings(tmp_path: Path, names: tuple[str, ...]) -> None:
    for part, n in zip(names, (4, 2, 3), strict=True):
        folder(tmp_path / part, n=n)
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "boxes.txt").write_text("none")
    assert sizes(ImageFolder(str(tmp_path))) == (12, 6, 9)


@pytest.mark.parametrize(
    ("images", "empty", "message"),
    [
        (("cat/", "dog/", "test/"), (), "holds test, which is a part, beside cat, dog: put classes into train/"),
        (("cat/", "Train/cat/"), (), "holds Train, which is a part, beside cat"),
        (("Train/cat/", "training/cat/"), (), "Train and .*training are both called train data: keep one"),
        (("val/a/", "test/a/"), (), "holds test, val, but no folder train: add one"),
        (("cat/train/", "cat/test/"), (), r"cat/(train|test) is named like a part, but lies in the folder of a class"),
        (("photos/train/cat/", "photos/test/cat/"), (), r"photos/test is named like a part"),
        (("train/cat/", "test/"), (), r"test is empty, it holds no image in a folder of a class \(cat\)"),
        (("train/cat/",), ("val",), "val is empty, it holds no image in a folder of a class"),
        (("train/cat/",), ("Testing/cat",), "Testing is empty, it holds no image in a folder of a class"),
    ],
)
def test_folders_of_which_it_is_not_clear_whether_they_are_parts_are_refused(
    tmp_path: Path, images: tuple[str, ...], empty: tuple[str, ...], message: str
) -> None:
    for place in images:
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(bytes_of(5, 6)).save(tmp_path / place / "a.png")
    for place in empty:
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        load(lambda: ImageFolder(str(tmp_path), val_fraction=0, test_fraction=0))


def test_hidden_files_and_folders_hold_no_images(tmp_path: Path) -> None:
    folder(tmp_path, n=3, classes=2)
    (tmp_path / "class0" / ".thumbnails").mkdir()
    for name in ("._0.png", ".thumbnails/0.png", ".DS_Store"):
        (tmp_path / "class0" / name).write_bytes(b"no image")
    assert sizes(ImageFolder(str(tmp_path), val_fraction=0, test_fraction=0)) == (6, 0, 0)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (RNG.random((5, 6)).astype(np.float32), r"1\.tif cannot be read as an image \(its pixels are fractions"),
        (np.full((5, 6), 100_000, np.int32), r"1\.tif cannot be read as an image \(its pixels go from 100000 to"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"image_size": 6, "channels": 1}])
def test_files_of_numbers_that_are_neither_bytes_nor_words_are_refused(
    tmp_path: Path, pixels: np.ndarray, message: str, given: dict[str, Any]
) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((5, 6), 7, np.uint16)).save(tmp_path / "a" / "0.png")
    Image.fromarray(pixels).save(tmp_path / "a" / "1.tif")
    with pytest.raises(ValueError, match=message):
        load(lambda: ImageFolder(str(tmp_path), **given, val_fraction=0, test_fraction=0))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x", "y"), ("x_test", "y_test")),
        (("x_train", "y_train"), ("x_test", "y_test")),
        (("train_images", "train_labels"), ("x_test", "y_test")),
        (("x", "y"), ("test_images", "test_labels")),
    ],
)
def test_an_npz_may_call_its_parts_by_either_name(
    tmp_path: Path, train: tuple[str, str], test: tuple[str, str]
) -> None:
    arrays = {}
    for (x, y), n in ((train, 20), (test, 8)):
        arrays[x], arrays[y] = bytes_of(n, 9, 7), np.arange(n) % 4
    np.savez(tmp_path / "set.npz", **arrays, ids=np.arange(20))
    assert sizes(NPZ(str(tmp_path / "set.npz"), val_fraction=0)) == (20, 0, 8)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"X_test": NINE, "Y_test": THIRDS}, r"set\.npz holds X_test, which is not read beside x, y"),
        ({"x_valid": NINE}, "holds x_valid, which is not read"),
        ({"train_lengths": THIRDS}, "holds train_lengths, which is not read beside x, y"),
        ({"x_test": NINE}, r"has no 'y_test', but x, x_test, y: x_test and y_test come together"),
        ({"train_images": NINE, "train_labels": THIRDS}, "holds train_images and x, both train data"),
        ({"lengths": np.full(9, 3.5)}, r"lengths of x of .*set\.npz: \[0\] is 3.5: give whole numbers"),
        ({"lengths": 4}, r"lengths of x of .*set\.npz: 1 numbers"),
        ({"y": np.float64(1)}, r"y of .*set\.npz is \[\]: labels are"),
        ({"x": np.float64(1)}, r"x of .*set\.npz is \[\]: data are"),
        ({"x": np.float64(np.nan)}, r"x of .*set\.npz\[0\] holds NaN"),
        ({"y": np.array([0, 1, 2_000_000_000] * 3)}, r"y of .*set\.npz\[2\] = 2e\+09 is out of range: .* 0 to 999999"),
    ],
)
def test_arrays_of_an_npz_that_would_be_passed_over_or_misread_are_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "set.npz", **{"x": NINE[:, 0], "y": THIRDS} | extra)
    with pytest.raises(ValueError, match=message):
        load(lambda: NPZ(str(tmp_path / "set.npz")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.zeros((9, 16, 5)), "kind": "signal"}, r'x is \[9, 16, 5\]: give layout="channels_last" for signals'),
        ({"x": np.zeros((9, 16, 4))}, r'x is \[9, 16, 4\]: give layout="channels_last" .* or kind="image"'),
        ({"x": NINE / 255.0, "x_test": NINE * 1.0}, "x_test: .* but x holds numbers from 0 to 1: divide by 255"),
        ({"x": NINE / 255.0, "x_test": NINE / 100.0 - 1}, "x_test: numbers from .* bring them to that scale"),
        ({"x": NINE * 1.5, "x_test": NINE * 40.0}, "x_test: numbers from .* bring them to that scale"),
        ({"y": [[0], [1, 2]] * 4}, "y holds rows of different lengths"),
        ({"val_fraction": 0.9, "test_fraction": 0}, "val_fraction=0.9 takes 8 of 9 items and leaves 1, too few"),
        ({"test_fraction": 0.7, "val_fraction": 0.5}, "class '0' has 1 training item, too few to split off val"),
    ],
)  # fmt: skip
def test_arrays_of_another_scale_order_or_share_are_refused(given: dict[str, Any], message: str) -> None:
    x, y = given.pop("x", NINE), given.pop("y", THIRDS)
    parts = {"y_test": THIRDS} if "x_test" in given else {}
    with pytest.raises(ValueError, match=message):
        load(lambda: Arrays(x, y, **given, **parts))


def test_names_of_labels_may_be_objects_as_in_a_table_of_pandas() -> None:
    data = Arrays(bytes_of(30, 4, 4), np.array(["dog", "cat", "emu"] * 10, dtype=object))
    assert data.class_names == ["cat", "dog", "emu"]


def test_one_label_each_written_as_several_is_said_to_be_taken_for_several() -> None:
    with pytest.warns(UserWarning, match=r"y is \[30, 3\] with a single 1 in each row.* give y.argmax\(1\)"):
        assert Arrays(bytes_of(30, 4, 4), np.eye(3)[np.arange(30) % 3]).multi_label


@pytest.mark.parametrize(
    ("made_of", "given", "message"),
    [
        (
            "bytes",
            RNG.random((9, 7)),
            "numbers from .* made of bytes from 0 to 255: give the numbers as they were before",
        ),
        ("bytes", np.full((9, 7), -30), "numbers from -30 to -30, .* bring them to that scale"),
        ("bytes", np.full((9, 7), 280.0), "numbers from 280 to 280, .* bring them to that scale"),
        ("bytes", np.full((9, 7), 200, np.uint16), "words of 16 bits from 200 to 200, .* give them in that type"),
        ("words", np.full((9, 7), 200, np.uint8), "bytes from 200 .* of words of 16 bits .* give them in that type"),
        ("words", np.full((9, 7), 0.5), "give the numbers as they were before division by 65535"),
        ("words", np.full((9, 7), 70_000), "bring them to that scale"),
        ("fractions", np.full((9, 7), 200.0), "from 0 to 1: divide by 255"),
        ("fractions", np.full((9, 7), 200, np.uint8), "from 0 to 1: divide by 255"),
        ("fractions", np.full((9, 7), 60_000, np.uint16), "from 0 to 1: divide by 65535"),
        ("fractions", RNG.random((9, 7)) * 2 - 1, "bring them to that scale"),
        ("others", np.full((9, 7), 90.0), "numbers from 90 to 90, but the model was made of numbers from -2 to 3"),
        ("bytes", np.full((9, 7), np.nan), "preprocess: it holds NaN or infinity"),
    ],
)
def test_a_model_takes_no_numbers_of_another_scale_than_it_was_made_of(made_of: str, given: Any, message: str) -> None:
    fractions = np.linspace(0, 1, 20 * 63).reshape(20, 9, 7)
    x = {
        "bytes": (255 * fractions).astype(np.uint8), "words": (65535 * fractions).astype(np.uint16),
        "fractions": fractions, "others": 5 * fractions - 2,
    }[made_of]  # fmt: skip
    to_tensor = preprocess(Arrays(x, np.arange(20) % 2).preprocessing)
    with pytest.raises(ValueError, match=message):
        to_tensor(given)
    assert 0 <= to_tensor(x[0]).min() <= to_tensor(x[19]).max() <= 1


def test_what_is_new_may_be_a_little_beyond_all_that_was_seen() -> None:
    signals = preprocess(Arrays(RNG.normal(size=(20, 50)), np.arange(20) % 2).preprocessing)
    assert signals(np.full(50, 5.0)).max() > 1
    assert preprocess(Arrays(RNG.random((20, 9, 7)), np.arange(20) % 2).preprocessing)(np.full((9, 7), 1.2)).max() > 1


def test_the_scale_of_numbers_is_that_of_the_items_that_are_trained_on() -> None:
    x = np.random.default_rng(0).normal(size=(80, 30))
    for special in range(0, 80, 7):
        with_outlier = x.copy()
        with_outlier[special, 3] = 40.0
        data = Arrays(with_outlier, np.arange(80) % 2)
        (trained,) = data.parts.train.take(0, np.arange(len(data.parts.train)))[:1]
        assert (data.parts.settings.high == 40.0) == bool((data.parts.train.rows == special).any())  # type: ignore[attr-defined]
        assert trained.min() == 0
        assert trained.max() == 1
