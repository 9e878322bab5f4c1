"""What is compared: one backbone under four heads, each arm as plain data.

    linear    backbone, mean over all places, linear layer
    matched   backbone, mean, one hidden layer: as many parameters as the capsules have, give or take 5 %
    uniform   backbone, capsules, routing off: one round, in which every parent gets the same share
    routed    backbone, capsules, routing

matched and routed say what capsules are worth where both may use as many weights; uniform and routed have the same
weights and differ in the rounds of routing alone. All four start from the same numbers in the backbone, for each seed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchcaps.data import ImageData
from torchcaps.losses import MarginLoss
from torchcaps.models.headed import HeadedNet, matched_hidden
from torchcaps.routing import Rule
from torchcaps.run.build import build, make_rule

__all__ = ["LOSSES", "STANDARD", "Arm", "make_loss", "standard_arms"]

STANDARD = ("linear", "matched", "uniform", "routed")

LOSSES = ("auto", "cross_entropy", "binary_cross_entropy", "margin")


@dataclass(frozen=True)
class Arm:
    """One of the things that are compared.

    key     a short name for files and tables.
    title   what to call it in the report.
    config  of the model, for `torchcaps.run.build.build`; a model of your own needs no routing.
    loss    "cross_entropy", "binary_cross_entropy" (several labels), "margin"; "auto" takes the margin loss for scores
            that are lengths or activations, and cross-entropy for logits.
    """

    key: str
    title: str
    config: Mapping[str, Any]
    loss: str = "auto"

    def __post_init__(self) -> None:
        if not self.key.isidentifier():
            raise ValueError(f"an arm's key names its files: letters, digits and _, not {self.key!r}")
        if self.loss not in LOSSES:
            raise ValueError(f"arm {self.key!r}: loss={self.loss!r}: take one of {', '.join(map(repr, LOSSES))}")

    def build(self) -> nn.Module:
        """The model, with new weights from torch's random numbers."""
        return build(self.config)

    def trained(self) -> dict[str, Any]:
        """What its networks depend on, as plain data."""
        return {"key": self.key, "config": dict(self.config), "loss": self.loss}


def standard_arms(
    data: ImageData,
    backbone: str | Mapping[str, Any] | None = None,
    routing: str | Mapping[str, Any] = "Dynamic",
    head: Mapping[str, Any] | None = None,
) -> list[Arm]:
    """The four arms for a set.

    backbone  None: three convolutions. A name of timm's, such as "resnet18", or a mapping {"timm": name, "stage": -1,
              "pretrained": True}.
    routing   as in `torchcaps.run.build.make_rule`: "Dynamic", "EM.hinton", {"rule": "Dynamic.su", "iterations": 5}.
    head      further arguments of `HeadedNet`: widths, primary_types, primary_pose, class_pose.

    Raises ValueError where routing cannot be switched off, or no plain head has as many parameters as the capsules.
    """
    common: dict[str, Any] = {
        "num_classes": data.num_classes,
        "in_chans": data.in_chans,
        "image_size": list(data.image_size),
    }
    if backbone is not None:
        common["backbone"] = {"timm": backbone} if isinstance(backbone, str) else dict(backbone)
    settings = dict(head or {})
    if wrong := sorted(set(settings) - {"widths", "primary_types", "primary_pose", "class_pose"}):
        raise ValueError(f"head={settings}: {wrong[0]!r} is none of widths, primary_types, primary_pose, class_pose")
    if "widths" in settings:
        common["widths"] = list(settings.pop("widths"))
    rule = make_rule(routing)
    written = {"rule": routing} if isinstance(routing, str) else dict(routing)
    routed = {"name": "capsule_head", **common, **settings, "routing": written}
    uniform = {**routed, "routing": {**written, **_off(rule, written)}}
    hidden = matched_hidden(_headed(routed))
    return [
        Arm("linear", "Linear head", {"name": "linear_head", **common}),
        Arm("matched", "Plain head, same size", {"name": "mlp_head", **common, "hidden": hidden}),
        Arm("uniform", "Capsules, routing off", uniform),
        Arm("routed", "Capsules, routing on", routed),
    ]


def chosen_arms(standard: Sequence[Arm], arms: Sequence[str | Arm] | None) -> list[Arm]:
    """Those of the four that are named, and others as they come; all four for None."""
    by_key = {arm.key: arm for arm in standard}
    chosen = []
    for arm in STANDARD if arms is None else arms:
        if isinstance(arm, str) and arm not in by_key:
            raise ValueError(f"there is no arm {arm!r}: take {', '.join(STANDARD)}, or give an Arm with a config")
        chosen.append(by_key[arm] if isinstance(arm, str) else arm)
    keys = [arm.key for arm in chosen]
    if len(set(keys)) < len(keys) or not keys:
        raise ValueError(f"arms {', '.join(keys) or 'none'}: give one at least, and each a key of its own")
    return chosen


def make_loss(arm: Arm, model: nn.Module, several: bool) -> nn.Module:
    """The loss that an arm is trained with; of `several` labels, against presence."""
    kind = arm.loss
    if kind == "auto":
        bounded = getattr(model, "scores", "logits") in ("lengths", "activations")
        kind = "margin" if bounded else "binary_cross_entropy" if several else "cross_entropy"
    if kind == ("cross_entropy" if several else "binary_cross_entropy"):
        raise ValueError(
            f"arm {arm.key!r}: loss={kind!r}, but these data have {'several labels' if several else 'one label'} an "
            f"item: take {'binary_cross_entropy' if several else 'cross_entropy'!r}, or 'margin'"
        )
    return {
        "cross_entropy": nn.CrossEntropyLoss,
        "binary_cross_entropy": nn.BCEWithLogitsLoss,
        "margin": MarginLoss,
    }[kind]()


def _off(rule: Rule, written: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that leave one round of equal shares."""
    fields = {field.name for field in dataclasses.fields(rule)}
    if getattr(rule, "iterations", 1) < 2:
        raise ValueError(
            f"routing={dict(written)} has no second round, so that nothing is left to switch off: "
            "take iterations of 2 or more"
        )
    return {"iterations": 1} | {name: False for name in ("leaky", "learn_prior") if name in fields}


def _headed(config: Mapping[str, Any]) -> HeadedNet:
    model = build(config)
    assert isinstance(model, HeadedNet)
    return model
