"""DiverseMultiMNIST: capsules against convolutions on overlapping digits (Tsai et al. 2020, figure 5)."""

from typing import Any

from torchcaps.reproduce.plan import Arm, Reproduction, Test

__all__ = ["DIVERSE"]

EIGHTH: dict[str, Any] = {"backbone_channels": 128, "primary_types": 8, "conv_caps": [[8, 3, 1]]}
DYNAMIC = {"routing": {"rule": "Dynamic.sabour", "iterations": 3}, "order": "sequential"}


def _capsules(**settings: Any) -> dict[str, Any]:
    return {"model.settings": {**EIGHTH, **settings}}


def _cnn(pooling: str) -> dict[str, Any]:
    return {
        "model.name": "cnn_diverse",
        "model.settings": {"channels": [128, 128, 128], "hidden": [80], "pooling": pooling},
    }


def _near(ours: float) -> dict[str, tuple[float, float]]:
    """Of one seed of ours: how far others lie is not known, so five points to both sides."""
    return {"images.exact_match": (ours - 5, ours + 5)}


DIVERSE = Reproduction(
    title="DiverseMultiMNIST: one digit or two overlapping ones, all to be named",
    source="Tsai, Srivastava, Goh, Salakhutdinov 2020, Capsules with inverted dot-product attention routing, figure 5",
    about=(
        "The share of images whose set of digits is named exactly (`exact match`, every sigmoid on the right side of "
        "1/2). An eighth of the paper's width: 128 channels, 8 types of 4x4 matrix or 16-number vector poses; the CNN "
        "has 128 channels in the same three layers and 80 hidden units. A million generated images where the paper "
        "shows 21 million, Adam at 0.001 with a cosine schedule for all. The overlap is added and clipped; the paper "
        "does not say. Dynamic routing has the vector network with three rounds, layer after layer. What can be "
        "compared with the paper is the order of the networks."
    ),
    recipe="diverse_multimnist",
    arms={
        "matrix": Arm("capsules, matrix poses", _capsules(pose=[4, 4]), {"images.exact_match": "80.59"}, _near(62.4)),
        "vector": Arm("capsules, vector poses", _capsules(pose=16), {"images.exact_match": "85.74"}, _near(75.1)),
        "dynamic": Arm(
            "capsules, vector poses, dynamic routing", _capsules(pose=16, **DYNAMIC), {"images.exact_match": "83.39"}
        ),
        "cnn_mean": Arm("CNN, average pooling", _cnn("mean"), {"images.exact_match": "79.81"}, _near(47.3)),
        "cnn_learned": Arm("CNN, learned pooling", _cnn("none"), {"images.exact_match": "84.84"}, _near(66.7)),
    },
    tests={"images": Test("10,000 generated test images", ("exact_match",))},
    curve="val/exact_match",
    seeds=(0, 1),
    base="data.init_args.base.init_args",
    image=(1, 36, 36),
    images=50_000,
)
