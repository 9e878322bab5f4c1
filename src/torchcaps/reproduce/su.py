"""Su 2018: does a network that was trained on single digits know two of them, joined at a side?"""

from torchcaps.data import SideBySide
from torchcaps.reproduce.plan import Arm, Reproduction, Test

__all__ = ["SU"]

JOINED = ("pairs", "confident_pairs")


def _routed(rule: str, iterations: int = 3) -> dict[str, object]:
    return {"model.settings": {"routing": {"rule": rule, "iterations": iterations}}}


def _expect(single: tuple[float, float], pairs: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Of a rerun of 5 to 20 epochs: our own three seeds, give or take three standard deviations, and room for more
    epochs."""
    return {"single.accuracy": single, "vertical.pairs": pairs}


def _pooled(pooling: str) -> dict[str, object]:
    return {"model.name": "su_cnn", "model.settings": {"pooling": pooling}}


SU = Reproduction(
    title="Su's generalisation test: trained on one digit, tested on two",
    source="Su Jianlin 2018, kexue.fm/archives/4819 and 5112",
    about=(
        "Trained on single MNIST digits, tested on single digits and on two different digits joined one above the "
        "other (as in the source) or side by side. `pairs`: the two highest scores are those of the two digits; "
        "`confident pairs`: and the second highest is above 1/2. The source compares capsules with mean pooling "
        "alone. Mean pooling halves each digit's evidence in the doubled image, capsules sum votes: so here are also "
        "sum and max pooling, and capsules with routing off. All arms have the same convolutions, the same loss, Adam "
        "at 0.001, batches of 128, no augmentation; the last epoch is what is tested. Ours differs from the source: "
        "bfloat16 convolutions, and each test digit has a partner of another class, where the source leaves out pairs "
        "of equal digits."
    ),
    recipe="su_mnist",
    arms={
        "mean_pooling": Arm(
            "CNN, mean pooling", _pooled("mean"),
            {"single.accuracy": "99.3", "vertical.pairs": "40", "vertical.confident_pairs": "10"},
            _expect((98.0, 99.4), (3, 45)),
        ),
        "sum_pooling": Arm("CNN, sum pooling", _pooled("sum"), expect=_expect((98.4, 99.5), (0, 78))),
        "max_pooling": Arm("CNN, max pooling", _pooled("max"), expect=_expect((98.0, 99.5), (0, 66))),
        "uniform": Arm("capsules, routing off", _routed("Dynamic.su", 1), expect=_expect((99.0, 99.6), (70, 98))),
        "sabour": Arm("capsules, Sabour's routing", _routed("Dynamic.sabour"), expect=_expect((99.0, 99.5), (51, 88))),
        "su_first": Arm(
            "capsules, Su's first form", _routed("Dynamic.su_first"),
            {"single.accuracy": "99.3", "vertical.pairs": "91", "vertical.confident_pairs": "above 90"},
            _expect((99.0, 99.5), (78, 92)),
        ),
        "su_second": Arm(
            "capsules, Su's second form", _routed("Dynamic.su"),
            {"single.accuracy": "99.3", "vertical.pairs": "95", "vertical.confident_pairs": "above 90"},
            _expect((98.9, 99.5), (91, 97)),
        ),
        **{
            f"su_second_{T}_rounds": Arm(f"capsules, Su's second form, {T} rounds", _routed("Dynamic.su", T))
            for T in (2, 4, 5)
        },
    },
    tests={
        "single": Test("one digit", ("accuracy",)),
        "vertical": Test("two digits, one above the other", JOINED, lambda data: SideBySide(data, "vertical")),
        "horizontal": Test("two digits side by side", JOINED, lambda data: SideBySide(data, "horizontal")),
    },
)  # fmt: skip
