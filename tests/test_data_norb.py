"""smallNORB from files made here, in the format of its home page."""

import made_up_sets
import numpy as np
import pytest
import torch

from torchcaps.data import SmallNORB, norb


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with 36 training and 36 test pairs."""
    made_up_sets.smallnorb(tmp_path, monkeypatch)
    return tmp_path


def make(root, **settings):
    return SmallNORB(root=str(root), download=False, val_fraction=0, batch_size=36, **settings)


def test_pairs_of_cameras_are_two_channels_averaged_to_half_the_size(root):
    data = make(root)
    x, y = next(iter(data.test_dataloader()))
    raw = norb._matrix(root / "smallnorb", f"{norb.TESTING}-dat.mat.gz", download=False)
    assert x.shape == (36, 2, 48, 48)
    means = torch.from_numpy(raw).double().unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    assert (255 * x.double() - means).abs().max() <= 0.5 + 1e-4
    assert y.tolist() == [i % 5 for i in range(36)]
    assert data.class_names[3] == "truck"


def test_files_that_are_missing_or_damaged_are_named(root):
    file = root / "smallnorb" / f"{norb.TESTING}-cat.mat.gz"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match=r"testing-cat\.mat\.gz is damaged"):
        make(root).setup()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"testing-cat\.mat\.gz is missing"):
        make(root).setup()


@pytest.mark.parametrize(("views", "column"), [("novel_azimuth", 2), ("novel_elevation", 1)])
def test_novel_viewpoints_are_those_that_training_leaves_out(root, views, column):
    info = norb._matrix(root / "smallnorb", f"{norb.TESTING}-info.mat.gz", download=False)
    familiar = np.isin(info[:, 2], (30, 32, 34, 0, 2, 4)) if column == 2 else info[:, 1] < 3
    for test_views, count in (("familiar", familiar.sum()), (views, (~familiar).sum()), ("all", 36)):
        data = make(root, train_views=views, test_views=test_views)
        assert (len(data.parts.train), len(data.parts.test)) == (familiar.sum(), count)
    assert 0 < familiar.sum() < 36


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="a divisor of 96"):
        SmallNORB(size=50)
    with pytest.raises(ValueError, match="train_views='all'"):
        SmallNORB(test_views="novel_azimuth")
    with pytest.raises(ValueError, match="train_views='some'"):
        SmallNORB(train_views="some")
