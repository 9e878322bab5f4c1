"""Models from plain data, so that a recipe or a checkpoint alone can make one.

    {"name": "capsnet", "num_classes": 10, "in_chans": 1, "image_size": [28, 28],
     "routing": {"rule": "Dynamic.su", "iterations": 5}}

`name` is one of `torchcaps.list_models()`, and the rest are arguments of its constructor. Two of these are objects and
are written as

    routing     a rule's class or preset out of `RULES`, or a mapping {"rule": that, and fields that differ}
    backbone    {"timm": "resnet18", "stage": -1, "pretrained": false}: a map of features of any model of timm's; and
    stem        the same where the model calls it so
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchcaps import create_model
from torchcaps.models.activated_attention import ActivatedAttention
from torchcaps.routing import EM, Attention, Dynamic, Rule
from torchcaps.squash import Sabour

__all__ = ["RULES", "TimmFeatures", "build", "make_rule"]

RULES: dict[str, Callable[[], Rule]] = {
    "Dynamic": Dynamic,
    "Dynamic.sabour": Dynamic.sabour,
    "Dynamic.sabour_code": Dynamic.sabour_code,
    "Dynamic.su": Dynamic.su,
    "Dynamic.su_first": Dynamic.su_first,
    "Dynamic.hauser": Dynamic.hauser,
    "Attention": Attention,
    "Attention.tsai": Attention.tsai,
    "ActivatedAttention": ActivatedAttention,
    "EM": EM,
    "EM.hinton": EM.hinton,
}


def build(config: Mapping[str, Any]) -> nn.Module:
    """The model that `config` describes.

    Raises ValueError where it has no name, or names what is not there.

    >>> build({"name": "su_capsnet", "routing": {"rule": "Dynamic.su", "iterations": 2}}).num_classes
    10
    """
    settings = dict(config)
    if not isinstance(name := settings.pop("name", None), str):
        raise ValueError(f"a model is described by a mapping with a 'name' of list_models(), not {dict(config)!r}")
    if isinstance(settings.get("routing"), str | Mapping):
        settings["routing"] = make_rule(settings["routing"])
    for place in ("backbone", "stem"):
        if isinstance(settings.get(place), Mapping):
            settings[place] = _backbone(place, settings[place], settings.get("in_chans", 1))
    try:
        return create_model(name, **settings)
    except TypeError as error:  # an argument that the constructor does not have
        raise ValueError(f"model {name!r}: {error}; settings were {sorted(settings)}") from error


def make_rule(described: str | Mapping[str, Any]) -> Rule:
    """A routing rule from its name, or from {"rule": name, field: value}; a squash {"a": 0.5} is Sabour's with that a.

    Raises ValueError for names and fields that are not there.

    >>> make_rule({"rule": "Dynamic.sabour", "iterations": 5})
    Dynamic(iterations=5, accumulate=True, agreement='dot', normalize='parents', squash='sabour', inner_squash=None, \
leaky=False, detach='none', learn_prior=False, learn_bias=False)
    """
    fields: dict[str, Any] = {"rule": described} if isinstance(described, str) else dict(described)
    name = fields.pop("rule", None)
    if name is None:  # a single field on a command line takes the place of the whole mapping
        raise ValueError(f"routing {fields} names no rule: write the rule too, such as {{rule: Dynamic.sabour, ...}}")
    if name not in RULES:
        raise ValueError(f"routing {name!r} is not there: take one of {', '.join(RULES)}")
    rule = RULES[name]()
    known = [field.name for field in dataclasses.fields(rule)]
    for field, value in fields.items():
        if field not in known:
            raise ValueError(f"routing {name!r} has no setting {field!r}: it has {', '.join(known)}")
        if field.endswith("squash") and isinstance(value, Mapping):
            fields[field] = Sabour(**value)
    return dataclasses.replace(rule, **fields)


class TimmFeatures(nn.Module):
    """The map of features `[N, C, H, W]` that one stage of a model of timm's makes of images.

    name        any model of timm's with `features_only`.
    stage       which of its maps, -1 the last and smallest.
    pretrained  load timm's weights (a download).

    Raises ValueError for a name that timm does not have, or a stage that the model does not.
    """

    def __init__(self, name: str, in_chans: int, stage: int = -1, pretrained: bool = False) -> None:
        super().__init__()
        import timm

        if not timm.is_model(name):
            close = timm.list_models(f"*{name.split('_')[0]}*")[:5]
            raise ValueError(f"timm has no model {name!r}; near it: {', '.join(close) or 'nothing'}")
        try:
            stages: Any = timm.create_model(name, features_only=True, in_chans=in_chans, pretrained=pretrained)
        except (RuntimeError, AttributeError) as error:
            raise ValueError(f"timm's {name} has no maps of features to put capsules on: {error}") from error
        channels: list[int] = stages.feature_info.channels()
        count = len(channels)
        if not -count <= stage < count:
            raise ValueError(f"timm's {name} has {count} stages, 0 to {count - 1}, or -1 for the last: not {stage}")
        self.stages: nn.Module = stages
        self.stage, self.channels = stage, channels[stage]

    def forward(self, x: Tensor) -> Tensor:
        """The map of images `[N, in_chans, H, W]`."""
        found: Tensor = self.stages(x)[self.stage]
        return found


def _backbone(place: str, described: Mapping[str, Any], in_chans: int) -> nn.Module:
    settings = dict(described)
    name = settings.pop("timm", None)
    if not isinstance(name, str) or set(settings) - {"stage", "pretrained"}:
        raise ValueError(
            f"{place}={dict(described)!r} must be a mapping such as "
            "{'timm': 'resnet18', 'stage': -1, 'pretrained': False}"
        )
    return TimmFeatures(name, in_chans, **settings)
