"""Sets composed on the fly: what is on each image is what its label says, and no part takes from another."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from torchcaps.data import AffineTest, Arrays, Augment, Digits, DiverseMultiMNIST, ImageData, MultiMNIST, SideBySide
from torchcaps.data.composed import Partners

K, H, W = 5, 6, 4


def base(n: int = 200, **settings: Any) -> Arrays:
    """Images that say who they are: each has its own level of grey, from 1/255 on; its class is its number modulo 5."""
    x = (np.arange(n) + 1).astype(np.uint8)[:, None, None].repeat(H, 1).repeat(W, 2)
    return Arrays(x, np.arange(n) % K, **{"kind": "image", **settings})


def everything(loader: Any) -> tuple[Tensor, Tensor]:
    x, y = zip(*loader, strict=True)
    return torch.cat(x), torch.cat(y)


def levels(x: Tensor) -> Tensor:
    return (x * 255).round().long()


def grey_levels_of(data: ImageData) -> list[set[int]]:
    return [set(levels(everything(loader)[0]).unique().tolist()) for loader in loaders(data)]


def loaders(data: ImageData) -> list[Any]:
    return [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]


@pytest.mark.parametrize("axis", ["vertical", "horizontal"])
def test_two_images_of_different_classes_stand_side_by_side_and_the_label_names_both(axis: Any) -> None:
    data = SideBySide(base(), axis, seed=1)
    assert data.multi_label
    assert data.num_classes == K
    assert data.image_size == ((2 * H, W) if axis == "vertical" else (H, 2 * W))
    single = grey_levels_of(base())
    for loader, allowed in zip(loaders(data), single, strict=True):
        x, y = everything(loader)
        assert y.dtype == torch.float32
        assert x.shape[1:] == (1, *data.image_size)
        first, second = (half.flatten(1) for half in levels(x).chunk(2, 2 if axis == "vertical" else 3))
        for one, two, label in zip(first, second, y, strict=True):
            a, b = one.unique(), two.unique()
            assert len(a) == len(b) == 1
            classes = {(int(a) - 1) % K, (int(b) - 1) % K}
            assert {int(a), int(b)} <= allowed
            assert len(classes) == 2
            assert set(label.nonzero().flatten().tolist()) == classes
            assert label.sum() == 2


def test_a_network_for_pairs_can_be_trained_on_single_images() -> None:
    data = SideBySide(base(), train_on="single")
    assert data.image_size == (H, W)
    x, y = everything(data.train_dataloader())
    assert x.shape[1:] == (1, H, W)
    assert (y.sum(1) == 1).all()
    assert torch.equal(y.argmax(1), (levels(x)[:, 0, 0, 0] - 1) % K)
    x, y = everything(data.test_dataloader())
    assert x.shape[1:] == (1, 2 * H, W)
    assert (y.sum(1) == 2).all()


def ones(classes: int = 4, each: int = 30) -> Arrays:
    """White images of one pixel less than the frame: where they lie can be read off."""
    x = np.zeros((classes * each, H, W), np.uint8)
    x[:, 1:-1, 1:-1] = 102
    return Arrays(x, np.arange(classes * each) % classes, kind="image")


def test_overlapping_images_are_added_and_clipped_where_they_overlap() -> None:
    data = MultiMNIST(ones(), pad=3, shift=2, train_size=2000)
    assert data.image_size == (H + 6, W + 6)
    x, y = everything(data.train_dataloader())
    assert (y.sum(1) == 2).all()
    assert set(levels(x).unique().tolist()) == {0, 102, 204}
    torch.testing.assert_close(x.sum((1, 2, 3)), torch.full((2000,), 2 * 8 * 102 / 255))
    bright = Arrays(np.full((120, H, W), 200, np.uint8), np.arange(120) % 4, kind="image")
    values = {
        o: set(levels(everything(MultiMNIST(bright, overlay=o).train_dataloader())[0]).unique().tolist())
        for o in ("add", "mean", "max")
    }
    assert values == {"add": {0, 200, 255}, "mean": {0, 100, 200}, "max": {0, 200}}


def corners(x: Tensor) -> tuple[Tensor, Tensor]:
    """First row and column of each image that hold something."""
    return (x[:, 0].sum(2) > 0).int().argmax(1), (x[:, 0].sum(1) > 0).int().argmax(1)


def test_shifts_are_uniform_and_one_image_in_six_is_alone() -> None:
    data = DiverseMultiMNIST(ones(), pad=4, shift=4, train_size=6000, seed=2)
    x, y = everything(data.train_dataloader())
    alone = y.sum(1) == 1
    assert stats.binomtest(int(alone.sum()), 6000, 1 / 6).pvalue > 1e-3
    assert set(y.sum(1).tolist()) == {1, 2}
    for found in corners(x[alone]):
        assert stats.chisquare(np.bincount(found - 1, minlength=9)).pvalue > 1e-3
    rows, columns = corners(x[alone])
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.15
    # the second one's shift is its own: of pairs both extremes are met
    assert levels(x).max() == 204
    apart = (levels(x[~alone]) == 204).flatten(1).sum(1) == 0
    assert 0 < apart.float().mean() < 1
    for single in (0.0, 1.0):
        _, y = everything(DiverseMultiMNIST(ones(), single=single, train_size=50).train_dataloader())
        assert (y.sum(1) == 2 - single).all()


def test_a_shift_within_the_canvas_loses_nothing_and_one_beyond_cuts_off() -> None:
    within = everything(DiverseMultiMNIST(ones(), pad=2, shift=3, single=1.0, train_size=500).train_dataloader())[0]
    # one pixel of margin lets a shift of 3 on a pad of 2 lose nothing but zeros
    torch.testing.assert_close(within.sum((1, 2, 3)), torch.full((500,), 8 * 102 / 255))
    cut = everything(DiverseMultiMNIST(ones(), pad=2, shift=4, single=1.0, train_size=500).train_dataloader())[0]
    assert set((levels(cut) == 102).flatten(1).sum(1).tolist()) == {8, 6, 4, 3}


def test_partners_are_uniform_over_all_images_of_other_classes() -> None:
    labels = np.array([0] * 5 + [1] * 2 + [2] * 3)
    rng = np.random.default_rng(0)
    rng.shuffle(labels)
    data = Arrays(np.zeros((10, 2, 2), np.uint8), labels, kind="image", val_fraction=0, test_fraction=0)
    part = data.parts.train
    partners = Partners(part, 3, seed=0)  # type: ignore[arg-type]
    for first in range(10):
        found = partners(0, np.arange(4000), np.full(4000, first))
        others = np.flatnonzero(labels != labels[first])
        counts = np.bincount(found, minlength=10)
        assert counts[labels == labels[first]].sum() == 0
        assert stats.chisquare(counts[others]).pvalue > 1e-3


def test_over_the_epochs_each_image_comes_first_equally_often() -> None:
    data = SideBySide(base(val_fraction=0), train_size=40)
    loader = data.train_dataloader()
    firsts: Counter[int] = Counter()
    for _ in range(8):
        firsts.update(levels(everything(loader)[0])[:, 0, 0, 0].tolist())
    assert set(firsts.values()) == {2}
    assert len(firsts) == 160


@pytest.mark.parametrize("kind", [SideBySide, MultiMNIST, DiverseMultiMNIST, AffineTest])
def test_no_part_takes_images_of_another(kind: type[Any]) -> None:
    n = 200
    x = np.zeros((n, n, 4), np.uint8)
    x[np.arange(n), np.arange(n)] = 255  # each image has a row of its own
    single = Arrays(x, np.arange(n) % K, kind="image")
    settings: dict[str, Any] = {} if kind is SideBySide else {"pad": 0}
    if kind in (MultiMNIST, DiverseMultiMNIST):
        settings["shift"] = 0
    if kind is AffineTest:
        settings |= {"train": Augment(), "test": Augment(flip=True)}
    data = kind(single, axis="horizontal") if kind is SideBySide else kind(single, **settings)
    rows = [
        {int(row) for image in everything(loader)[0] for row in image[0].sum(1).nonzero()} for loader in loaders(data)
    ]
    expected = [
        {int(row) for image in everything(loader)[0] for row in image[0].sum(1).nonzero()} for loader in loaders(single)
    ]
    for found, allowed in zip(rows, expected, strict=True):
        assert found
        assert found <= allowed
    assert not (rows[0] & rows[1] | rows[0] & rows[2] | rows[1] & rows[2])


def test_training_images_are_new_each_epoch_and_test_images_never() -> None:
    data = DiverseMultiMNIST(base())
    train, test = data.train_dataloader(), data.test_dataloader()
    assert not torch.equal(
        everything(train)[0].sum((1, 2, 3)).sort().values, everything(train)[0].sum((1, 2, 3)).sort().values
    )
    first, again = everything(test), everything(test)
    other = everything(DiverseMultiMNIST(base(), seed=1).test_dataloader())
    for same in (again, other):  # the seed is that of training
        assert torch.equal(first[0], same[0])
        assert torch.equal(first[1], same[1])
    assert not torch.equal(first[0], everything(DiverseMultiMNIST(base(split_seed=1)).test_dataloader())[0])
    epochs = [everything(DiverseMultiMNIST(base(), seed=seed).train_dataloader())[0] for seed in (0, 1)]
    assert not torch.equal(*(epoch.sum((1, 2, 3)).sort().values for epoch in epochs))


def test_affine_test_trains_on_shifted_images_and_tests_on_bent_ones() -> None:
    data = AffineTest(ones(), pad=6)
    assert not data.multi_label
    assert data.image_size == (H + 12, W + 12)
    x, y = everything(data.train_dataloader())
    assert y.dtype == torch.int64
    assert set(levels(x).unique().tolist()) == {0, 102}
    for found in corners(x):
        assert {found.min().item(), found.max().item()} <= set(range(1, 14))
        assert len(found.unique()) > 8
    bent, _ = everything(data.test_dataloader())
    assert len(levels(bent).unique()) > 20
    assert torch.equal(everything(data.val_dataloader())[0], everything(data.val_dataloader())[0])
    assert set(levels(everything(data.val_dataloader())[0]).unique().tolist()) == {0, 102}


def test_composed_images_can_be_augmented_and_normalised() -> None:
    data = DiverseMultiMNIST(base(), augment=Augment(crop=8), normalize=([0.5], [0.5]))
    assert data.image_size == (8, 8)
    x, _ = everything(data.train_dataloader())
    assert x.shape[1:] == (1, 8, 8)
    assert x.min() == -1
    assert everything(data.test_dataloader())[0].shape[1:] == (1, 8, 8)


def test_sizes_and_limits_count_composed_images() -> None:
    data = MultiMNIST(base(), train_size=70, test_size=90, limit=80)
    assert [len(everything(loader)[1]) for loader in loaders(data)] == [70, 16, 80]


def test_real_digits_compose() -> None:
    data = DiverseMultiMNIST(Digits(), pad=2, shift=2)
    x, y = everything(data.test_dataloader())
    assert x.shape == (359, 1, 12, 12)
    assert y.shape == (359, 10)
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiMNIST(base(augment=Augment(shift=1))), "MultiMNIST: its base gives images as they are"),
        (lambda: MultiMNIST(base(), overlay="mix"), "overlay='mix': take one of add, mean, max"),  # type: ignore[arg-type]
        (lambda: MultiMNIST(base(), shift=-1), "numbers of pixels, 0 or more"),
        (lambda: MultiMNIST(base(), train_size=0), "give 1 or more"),
        (lambda: DiverseMultiMNIST(base(), single=1.5), "single=1.5 must be a share"),
        (lambda: SideBySide(base(), "diagonal"), "axis='diagonal'"),  # type: ignore[arg-type]
        (lambda: AffineTest(base(), augment=Augment(shift=1)), "say how images are changed in train= and test="),
        (lambda: AffineTest(base(), test=Augment(crop=3)), "without crop"),
        (lambda: AffineTest(base(), pad=-1), "pad=-1"),
        (lambda: MultiMNIST(Arrays(np.zeros((9, 5)), np.arange(9) % 3)).setup(), "set of images with one label each"),
        (lambda: MultiMNIST(Arrays(np.zeros((9, 5, 5)), [[1, 1]] * 9)).setup(), "with one label each"),
        (lambda: MultiMNIST(Arrays(np.zeros((9, 5, 5)), [0] * 9)).setup(), "all .* images of a part are of class 0"),
        (lambda: SideBySide(base(), train_on="single", augment=Augment(crop=3)).setup(), "crop is not for test images"),
    ],
)  # fmt: skip
def test_what_cannot_be_composed_is_said(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
