"""Routing: how the parents' poses follow from the children's votes. One file per algorithm, the equations on top.

    rule(poses, weight, activations=None, *, vote_offset=None, mask=None, start=None, child_ids=None,
         backend="auto", return_coupling=False, **learned) -> Routed

`dynamic`, `attention` and `em` are pure functions; `Dynamic`, `Attention` and `EM` are their frozen settings.
`enter`, `Call` and `couple` are what a new algorithm is made of (docs/adding-an-algorithm.md).
"""

from torchcaps.routing._round import Backend, Call, couple, enter
from torchcaps.routing._rule import Rule
from torchcaps.routing._windows import Windows
from torchcaps.routing.attention import Attention, attention
from torchcaps.routing.combine import combine, combine_transposed
from torchcaps.routing.dynamic import Dynamic, dynamic
from torchcaps.routing.em import EM, EMState, em
from torchcaps.types import Routed

__all__ = [
    "EM", "Attention", "Backend", "Call", "Dynamic", "EMState", "Routed", "Rule", "Windows",
    "attention", "combine", "combine_transposed", "couple", "dynamic", "em", "enter",
]  # fmt: skip
