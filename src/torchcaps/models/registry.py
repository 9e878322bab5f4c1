"""Models by name, out of one explicit table. A model of your own is made by its constructor; the table is for ours."""

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchcaps.models.capsnet import CapsNet

__all__ = ["create_model", "list_models"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "capsnet": CapsNet,  # Sabour, Frosst, Hinton 2017
}

WITH_WEIGHTS: tuple[str, ...] = ()
"""Names that `pretrained=True` has weights for."""


def create_model(
    name: str,
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: int | Sequence[int] = 28,
    pretrained: bool = False,
    **settings: Any,
) -> nn.Module:
    """The model of that name, for images `[N, in_chans, H, W]`; `settings` are further arguments of its constructor.

    Raises ValueError for a name that `list_models()` does not hold, and for `pretrained=True` without weights to load.

    >>> create_model("capsnet", num_classes=2, decoder=False).num_classes
    2
    """
    if not isinstance(name, str):
        raise ValueError(f"a model's name is a string, not {name!r}: list_models() names them all")
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=3) or sorted(MODELS)
        raise ValueError(f"no model {name!r}: did you mean {' or '.join(close)}? list_models() names them all")
    if pretrained and name not in WITH_WEIGHTS:
        there = ", ".join(WITH_WEIGHTS) or "none yet"
        raise ValueError(f"no pretrained weights for {name!r}: names that have some: {there}; give pretrained=False")
    return MODELS[name](num_classes=num_classes, in_chans=in_chans, image_size=image_size, **settings)


def list_models(filter: str = "*") -> list[str]:
    """Names for `create_model`, in order, that match a pattern of the shell's kind.

    Raises ValueError for a filter that is no string.

    >>> list_models("caps*")
    ['capsnet']
    """
    if not isinstance(filter, str):
        raise ValueError(f"filter must be a pattern such as 'caps*', or left out for all models, not {filter!r}")
    return sorted(fnmatch.filter(MODELS, filter))
