"""smallNORB: toys photographed by two cameras, from all sides and under six lamps. LeCun, Huang, Bottou 2004.

Files of its home page, "binary matrices" packed with gzip, little-endian: int32 magic (0x1E3D4C55 bytes, 0x1E3D4C54
int32), int32 number of axes, at least three int32 sizes, then the entries.

    dat   [24300, 2, 96, 96] bytes     the two cameras' images
    cat   [24300] int32                0 animal, 1 human, 2 airplane, 3 truck, 4 car
    info  [24300, 4] int32             instance, elevation 0..8, azimuth 0, 2, .. 34, lighting 0..5
"""

import gzip
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets.utils import check_integrity, download_url

from .standard import Opened, StandardData

__all__ = ["SmallNORB"]

HOME = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
TRAINING, TESTING = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"
MD5 = {
    f"{TRAINING}-dat.mat.gz": "66054832f9accfe74a0f4c36a75bc0a2",
    f"{TRAINING}-cat.mat.gz": "23c8b86101fbf0904a000b43d3ed2fd9",
    f"{TRAINING}-info.mat.gz": "51dee1210a742582ff607dfd94e332e3",
    f"{TESTING}-dat.mat.gz": "e4ad715691ed5a3a5f138751a4ceb071",
    f"{TESTING}-cat.mat.gz": "5aa791cd7e6016cf957ce9bdb93b8603",
    f"{TESTING}-info.mat.gz": "a9454f3864d7fd4bb3ea7fc3eb84924e",
}
_TYPES: dict[int, Any] = {0x1E3D4C55: np.uint8, 0x1E3D4C54: np.dtype("<i4")}

Views = Literal["all", "familiar", "novel_azimuth", "novel_elevation"]


class SmallNORB(StandardData):
    """smallNORB, 2x48x48 (two cameras), five classes of toys; test toys are others than the training's.

    Source of size and of the tests of viewpoint: Hinton, Sabour, Frosst 2018, sections 4 and 5.1: images halved to
    48x48, training on random windows of 32x32 and test on the middle (`augment={"crop": 32}`); for novel viewpoints
    training on a third of the azimuths (300, 320, 340, 0, 20, 40 degrees), or on the three smallest elevations, and
    test on the others.

    Args:
        size: Height and width to which the 96x96 pixels are averaged, a divisor of 96.
        train_views: "all"; or the views that are trained on for the tests of "novel_azimuth", "novel_elevation".
        test_views: "all"; "familiar": those of `train_views`; or the others, by the same name as `train_views`.
        **common: The settings of `StandardData`, which looks into `root`/smallnorb.
    """

    def __init__(
        self,
        size: int = 48,
        train_views: Literal["all", "novel_azimuth", "novel_elevation"] = "all",
        test_views: Views = "all",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if size < 1 or 96 % size:
            raise ValueError(f"SmallNORB: size={size}: give a divisor of 96, such as 48")
        if train_views not in ("all", "novel_azimuth", "novel_elevation"):
            raise ValueError(
                f"SmallNORB: train_views={train_views!r}: take 'all', 'novel_azimuth' or 'novel_elevation'"
            )
        if test_views not in ("all", train_views) and (test_views != "familiar" or train_views == "all"):
            raise ValueError(
                f"SmallNORB: test_views={test_views!r} with train_views={train_views!r}: take 'all', or, where "
                "training leaves views out, 'familiar' or the name of train_views"
            )
        self.size, self.train_views, self.test_views = size, train_views, test_views

    def _open(self, train: bool, download: bool) -> Opened:
        folder, name = Path(self.root) / "smallnorb", TRAINING if train else TESTING
        dat, cat, info = (_matrix(folder, f"{name}-{part}.mat.gz", download) for part in ("dat", "cat", "info"))
        kept = np.ones(len(cat), bool)
        if self.train_views != "all":
            familiar = _familiar(info, self.train_views)
            test = {"all": kept, "familiar": familiar}.get(self.test_views, ~familiar)
            kept = familiar if train else test
        x = torch.from_numpy(dat[kept])
        return _halved(x, self.size), cat[kept].astype(np.int64), ["animal", "human", "airplane", "truck", "car"]


def _familiar(info: NDArray[Any], views: str) -> NDArray[np.bool_]:
    azimuth, elevation = info[:, 2], info[:, 1]
    return np.isin(azimuth, (30, 32, 34, 0, 2, 4)) if views == "novel_azimuth" else elevation < 3


def _halved(x: Tensor, size: int) -> Tensor:
    """Means over squares of pixels, rounded, `[N, 2, size, size]` in bytes; a thousand at a time to save memory."""
    if size == x.shape[-1]:
        return x
    parts = [F.adaptive_avg_pool2d(part.float(), size).round().to(torch.uint8) for part in x.split(1000)]
    return torch.cat(parts)


def _matrix(folder: Path, name: str, download: bool) -> NDArray[Any]:
    """The entries of one file, fetched where that is allowed. RuntimeError where it is missing or damaged."""
    path = folder / name
    if download and not check_integrity(path, MD5[name]):
        download_url(HOME + name, folder, name, MD5[name])
    if not check_integrity(path, MD5[name]):
        raise RuntimeError(f"{path} is {'damaged' if path.exists() else 'missing'}")
    raw = gzip.decompress(path.read_bytes())
    magic, axes = np.frombuffer(raw, "<i4", 2)
    if int(magic) not in _TYPES:
        raise RuntimeError(f"{path} is no binary matrix of bytes or int32: it begins with {int(magic):#x}")
    sizes = np.frombuffer(raw, "<i4", max(3, int(axes)), offset=8)[: int(axes)].tolist()
    start = 8 + 4 * max(3, int(axes))
    return np.frombuffer(raw, _TYPES[int(magic)], math.prod(sizes), start).reshape(sizes).copy()
