"""CIFAR-10 behind one convolution: three routings and a CNN on equally many images (Tsai et al. 2020, table 1)."""

from typing import Any

from torchcaps.reproduce.plan import Arm, Reproduction, Test

__all__ = ["CIFAR10_RESNET", "CIFAR10_SIMPLE"]

TESTS = {"images": Test("test images", ("accuracy",))}


def _model(name: str, **settings: Any) -> dict[str, Any]:
    return {"model.name": name, "model.settings": settings}


CIFAR10_SIMPLE = Reproduction(
    title="CIFAR-10 behind a single convolution",
    source="Tsai, Srivastava, Goh, Salakhutdinov 2020, table 1",
    about=(
        "The networks of the paper's table with a simple backbone, trained briefly: one cycle over a few epochs, the "
        "same images in the same order for all, where the paper trains for 350 epochs. What can be compared is what a "
        "network has learnt after so many images, not the paper's accuracy. The CNN is the paper's three convolutions "
        "with 192 channels in the place of 1024, which makes about as many multiply-adds as the capsules. In the EM "
        "network the parents of each window compete, not those of all windows, whose votes would need 20 gigabytes."
    ),
    recipe="cifar10_simple",
    arms={
        "attention": Arm("inverted attention", {}, {"images.accuracy": "85.17"}),
        "dynamic": Arm("dynamic routing", _model("capsnet", decoder=False), {"images.accuracy": "84.08"}),
        "em": Arm("EM routing", _model("em_capsnet_simple", competition="window"), {"images.accuracy": "82.19"}),
        "cnn": Arm("CNN, 192 channels", _model("cnn_cifar", channels=[192] * 3), {"images.accuracy": "87.10 (1024)"}),
    },
    tests=TESTS,
    seeds=(0,),
)

CIFAR10_RESNET = Reproduction(
    title="CIFAR-10 behind a ResNet backbone",
    source="Tsai, Srivastava, Goh, Salakhutdinov 2020, table 1",
    about="The paper's configuration and schedule. Made for a GPU: 350 epochs.",
    recipe="cifar10_inverted_attention",
    arms={
        "attention": Arm("inverted attention, T = 2", {}, {"images.accuracy": "94.85 (best run 95.14)"}),
        "one_round": Arm(
            "inverted attention, T = 1",
            _model("inverted_attention_resnet", routing={"rule": "Attention.tsai", "iterations": 1}),
            {"images.accuracy": "94.73"},
        ),
        "short": Arm("inverted attention, one cycle of 50 epochs", recipe="cifar10_inverted_attention_short"),
        "resnet18": Arm("ResNet-18", _model("resnet18_cifar"), {"images.accuracy": "95.11"}),
    },
    tests=TESTS,
)
