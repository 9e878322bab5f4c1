"""CIFAR with inverted attention: its rivals, ablations and rounds (Tsai et al. 2020, table 1, section 5)."""

from typing import Any

from torchcaps.reproduce.plan import Arm, Reproduction, Test

__all__ = ["CIFAR10_ABLATIONS", "CIFAR10_RESNET", "CIFAR10_ROUNDS", "CIFAR10_SIMPLE", "CIFAR100_RESNET"]

PAPER = "Tsai, Srivastava, Goh, Salakhutdinov 2020, Capsules with inverted dot-product attention routing"
ACCURACY = "images.accuracy"


def _model(name: str, **settings: Any) -> dict[str, Any]:
    return {"model.name": name, "model.settings": settings}


def _attention(iterations: int = 2, rule: str = "Attention.tsai", **fields: Any) -> dict[str, Any]:
    """Settings of the routing alone, for the recipe's model."""
    return {"model.settings": {"routing": {"rule": rule, "iterations": iterations, **fields}}}


def _sequential(iterations: int) -> dict[str, Any]:
    settings = _attention(iterations)["model.settings"]
    return {"model.settings": {**settings, "order": "sequential"}}


COMMON: dict[str, Any] = {
    "tests": {"images": Test("test images", ("accuracy",))},
    "image": (3, 32, 32),
    "images": 50_000,
}
SHORT: dict[str, Any] = {"recipe": "cifar10_simple", "seeds": (0,), **COMMON}

CIFAR10_SIMPLE = Reproduction(
    title="CIFAR-10 behind a single convolution",
    source=f"{PAPER}, table 1",
    about=(
        "The networks of the paper's table with a simple backbone, trained briefly: one cycle over a few epochs, the "
        "same images in the same order for all, where the paper trains for 350 epochs. What can be compared is what a "
        "network has learnt after so many images, not the paper's accuracy. The CNN is the paper's three convolutions "
        "with 344 channels in the place of 1024, which makes as many multiply-adds as the capsules, 81 million. In the "
        "EM network the parents of each window compete, not those of all windows, whose votes would need 20 gigabytes."
    ),
    arms={
        "attention": Arm("inverted attention", {}, {ACCURACY: "85.17"}),
        "dynamic": Arm("dynamic routing", _model("capsnet", decoder=False), {ACCURACY: "84.08"}),
        "em": Arm("EM routing", _model("em_capsnet_simple", competition="window"), {ACCURACY: "82.19"}),
        "cnn": Arm("CNN, 344 channels", _model("cnn_cifar", channels=[344] * 3), {ACCURACY: "87.10 (1024)"}),
    },
    **SHORT,
)

CIFAR10_ROUNDS = Reproduction(
    title="Rounds of inverted attention on CIFAR-10",
    source=f"{PAPER}, section 5",
    about=(
        "The network behind a single convolution with T rounds, all layers at once or layer after layer: what more "
        "rounds bring, and what they cost in memory and minutes. Trained as briefly as the table of rivals."
    ),
    arms={
        **{f"concurrent_{T}": Arm(f"all layers at once, T = {T}", _attention(T)) for T in (1, 2, 3, 4, 5)},
        **{f"sequential_{T}": Arm(f"layer after layer, T = {T}", _sequential(T)) for T in (2, 3, 4, 5)},
    },
    **SHORT,
)

CIFAR10_ABLATIONS = Reproduction(
    title="Ablations of inverted attention on CIFAR-10",
    source=f"{PAPER}, section 5",
    about=(
        "One thing changed at a time: no normalisation of parents (A), layers routed one after the other (B), "
        "activations as in EM routing (C; the paper does not say how, `ActivatedAttention` is ours). Behind a single "
        "convolution, two rounds, trained as briefly as the table of rivals."
    ),
    arms={
        "whole": Arm("as published", {}),
        "no_norm": Arm("A: without layer normalisation", _attention(norm=False)),
        "sequential": Arm("B: layer after layer", _sequential(2)),
        "activations": Arm("C: with activations", _attention(rule="ActivatedAttention")),
    },
    **SHORT,
)

CIFAR10_RESNET = Reproduction(
    title="CIFAR-10 behind a ResNet backbone",
    source=f"{PAPER}, table 1",
    about=(
        "The paper's configurations and schedule, for a GPU: 350 epochs. The schedules of the rivals are not "
        "published: here all have that of inverted attention."
    ),
    recipe="cifar10_inverted_attention",
    arms={
        "attention": Arm("inverted attention, T = 2", {}, {ACCURACY: "94.85 (best run 95.14)"}),
        "one_round": Arm("inverted attention, T = 1", _attention(1), {ACCURACY: "94.73"}),
        "short": Arm("inverted attention, one cycle of 50 epochs", recipe="cifar10_inverted_attention_short"),
        "dynamic": Arm("dynamic routing", _model("capsnet_resnet"), {ACCURACY: "92.65"}),
        "em": Arm("EM routing", _model("em_capsnet_resnet", competition="window"), {ACCURACY: "92.15"}),
        "resnet18": Arm("ResNet-18", _model("resnet18_cifar"), {ACCURACY: "95.11"}),
    },
    **COMMON,
)

CIFAR100_RESNET = Reproduction(
    title="CIFAR-100 behind a ResNet backbone",
    source=f"{PAPER}, table 1",
    about="The paper's configurations and schedule, for a GPU: 350 epochs; the rivals with the same schedule.",
    recipe="cifar100_inverted_attention",
    arms={
        "attention": Arm("inverted attention, T = 2", {}, {ACCURACY: "76.27 (best run 78.02)"}),
        "dynamic": Arm("dynamic routing", _model("capsnet_resnet"), {ACCURACY: "71.70"}),
        "em": Arm("EM routing", _model("em_capsnet_resnet", competition="window"), {ACCURACY: "58.08"}),
        "resnet18": Arm("ResNet-18", _model("resnet18_cifar"), {ACCURACY: "77.92"}),
    },
    num_classes=100,
    **COMMON,
)
