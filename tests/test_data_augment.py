"""Augmentation: the maps are torchvision's, and their numbers are spread as they should be."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2

from torchcaps.data import Arrays, Augment
from torchcaps.data.augment import affine, centre, windows


def pictures(n: int = 40, height: int = 12, width: int = 9, channels: int = 2) -> Tensor:
    return torch.rand(n, channels, height, width)


def items(n: int = 40) -> np.ndarray:
    return np.arange(n)


def test_the_affine_map_is_that_of_torchvision() -> None:
    x = pictures()
    generator = torch.Generator().manual_seed(1)
    angle, shear, scale, *shift = torch.rand(5, len(x), generator=generator, dtype=torch.float64)
    angle, shear, scale = 120 * (angle - 0.5), 60 * (shear - 0.5), 0.5 + scale
    moved = 6 * torch.stack(shift, 1) - 3
    found = affine(x, angle * math.pi / 180, shear * math.pi / 180, scale[:, None].expand(-1, 2), moved)
    for i in range(len(x)):
        expected = v2.functional.affine(
            x[i], float(angle[i]), moved[i].tolist(), float(scale[i]), [float(shear[i]), 0.0],
            interpolation=v2.InterpolationMode.BILINEAR,
        )  # fmt: skip
        torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=0)


def test_height_and_width_are_scaled_apart() -> None:
    x = torch.zeros(1, 1, 20, 20)
    x[0, 0, 8:12, 8:12] = 1
    zero = torch.zeros(1, dtype=torch.float64)
    wide = affine(x, zero, zero, torch.tensor([[2.0, 1.0]], dtype=torch.float64), torch.zeros(1, 2))[0, 0]
    assert (wide > 0.5).sum(1).tolist() == [0] * 8 + [8] * 4 + [0] * 8


@pytest.mark.parametrize("shape", [(13,), (6, 9), (4, 5, 6)], ids=["signals", "images", "volumes"])
def test_a_shift_by_whole_pixels_moves_what_is_there_and_lets_zeros_in(shape: tuple[int, ...]) -> None:
    x = torch.rand(300, 2, *shape) + 0.1
    found = Augment(shift=2)(x, 5, 1, items(300))
    assert found.shape == x.shape
    offsets = []
    padded = torch.nn.functional.pad(x, (4,) * (2 * len(shape)))
    for image, result in zip(padded, found, strict=True):
        matches = [
            start
            for start in np.ndindex(*(5,) * len(shape))
            if torch.equal(
                result, image[(slice(None), *(slice(s + 2, s + 2 + n) for s, n in zip(start, shape, strict=True)))]
            )
        ]
        assert len(matches) == 1
        offsets.append(matches[0])
    for axis in range(len(shape)):
        counts = np.bincount([offset[axis] for offset in offsets], minlength=5)
        assert stats.chisquare(counts).pvalue > 1e-3


def test_a_padded_crop_of_the_old_recipes_is_a_shift() -> None:
    x = pictures(1)
    possible = [v2.functional.crop(v2.functional.pad(x, [4]), i, j, 12, 9) for i in range(9) for j in range(9)]
    for item in range(30):
        found = Augment(shift=4)(x, 0, 0, np.array([item]))
        assert any(torch.equal(found, crop) for crop in possible)


def test_crops_are_windows_everywhere_and_evaluation_keeps_the_middle() -> None:
    x = torch.arange(12 * 9).view(1, 1, 12, 9).float().expand(400, 1, 12, 9)
    found = Augment(crop=(10, 5))(x, 0, 0, items(400))
    corners = found[:, 0, 0, 0].long()
    assert sorted(set(corners.tolist())) == [9 * i + j for i in range(3) for j in range(5)]
    assert torch.equal(found[:, 0] - corners[:, None, None], x[:, 0, :10, :5])
    assert centre(x, (10, 5))[0, 0, 0, 0] == 9 * 1 + 2
    assert torch.equal(centre(x, (10, 5)), v2.functional.center_crop(x, [10, 5]))
    data = Arrays(
        np.arange(4 * 6 * 6, dtype=np.uint8).reshape(4, 6, 6).repeat(3, 0), [0, 1, 2] * 4, augment=Augment(crop=4)
    )
    assert data.image_size == (4, 4)
    x, _ = next(iter(data.test_dataloader()))
    assert torch.equal(x * 255 % 36, torch.arange(36.0).view(6, 6)[1:5, 1:5].expand_as(x))


def test_half_of_the_images_are_mirrored() -> None:
    x = pictures(1000)
    found = Augment(flip=True, vertical_flip=True)(x, 0, 0, items(1000))
    kinds = [x, x.flip(-1), x.flip(-2), x.flip(-1, -2)]
    which = [[torch.equal(result, kind[i]) for kind in kinds].index(True) for i, result in enumerate(found)]
    assert stats.chisquare(np.bincount(which, minlength=4)).pvalue > 1e-3


def test_affine_numbers_fill_the_range_that_was_asked_for() -> None:
    how = Augment(shift=0.75, degrees=12, scale=(0.9, 1.2), each_axis=True, shear=8)
    angle, shear, scale, shift = how._affine_numbers(0, 0, items(4000))
    for numbers, low, high in (
        (angle * 180 / math.pi, -12, 12), (shear * 180 / math.pi, -8, 8), (scale[:, 0], 0.9, 1.2),
        (scale[:, 1], 0.9, 1.2), (shift[:, 0], -0.75, 0.75), (shift[:, 1], -0.75, 0.75),
    ):  # fmt: skip
        assert stats.kstest((numbers - low) / (high - low), "uniform").pvalue > 1e-3
    assert (
        abs(np.corrcoef(torch.cat([angle[:, None], shear[:, None], scale, shift], 1).T)[~np.eye(6, dtype=bool)]).max()
        < 0.07
    )
    together = Augment(scale=(0.5, 2.0), shift=2)._affine_numbers(0, 0, items(4000))
    assert torch.equal(together[2][:, 0], together[2][:, 1])
    assert sorted(set(together[3].flatten().tolist())) == [-2, -1, 0, 1, 2]
    assert not together[0].any()


def test_nothing_asked_for_changes_nothing() -> None:
    x = pictures()
    assert torch.equal(Augment()(x, 0, 0, items()), x)


def test_other_seeds_and_epochs_give_other_images() -> None:
    x = pictures(1).expand(40, -1, -1, -1)
    how = Augment(shift=3, degrees=10)
    results = [how(x, seed, epoch, items()) for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    assert not any(torch.equal(results[0], other) for other in results[1:])
    assert len(torch.unique(results[0].flatten(1), dim=0)) == 40


def test_windows_take_what_stands_where_they_start() -> None:
    x = pictures(3)
    start = np.array([[0, 0], [3, 1], [2, 4]])
    found = windows(x, start, (5, 4))
    for image, result, (i, j) in zip(x, found, start, strict=True):
        assert torch.equal(result, image[:, i : i + 5, j : j + 4])


def test_a_transform_of_torchvision_changes_training_images_alone_each_by_its_own_numbers() -> None:
    data = Arrays(np.full((60, 8, 8), 128, np.uint8), np.arange(60) % 3, transform=v2.ColorJitter(brightness=0.5))
    first, second = (next(iter(loader))[0][:, 0, 0, 0] for loader in [data.train_dataloader()] * 2)
    assert len(first.unique()) > 30
    assert not torch.equal(first.sort().values, second.sort().values)
    assert next(iter(data.test_dataloader()))[0].unique().tolist() == [pytest.approx(128 / 255)]


@pytest.mark.parametrize(
    ("how", "size", "message"),
    [
        (Augment(degrees=5), (30,), "are for images"),
        (Augment(shift=0.5), (30,), "shift by a whole number"),
        (Augment(scale=(0.5, 1)), (3, 4, 5), "are for images"),
        (Augment(vertical_flip=True), (30,), "vertical_flip is for data with a height"),
        (Augment(crop=31), (30, 40), r"crop=31 does not fit into data of 30 x 40"),
        (Augment(crop=(3, 3, 3)), (30, 40), r"does not fit"),
    ],
)
def test_what_cannot_be_done_to_such_data_is_said(how: Augment, size: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        how.window(size)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        Augment(shift=-1)
    with pytest.raises(ValueError, match=r"scale=\(2, 1\) must be"):
        Augment(scale=(2, 1))
