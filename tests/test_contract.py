"""The public contract: every rule of the library keeps it, and every broken rule is told which promise it breaks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from broken_rules import BROKEN, Sound
from torch import Tensor

from torchcaps.routing import EM, Attention, Dynamic, Routed, Rule
from torchcaps.testing import PROMISES, assert_backends_agree, assert_routing_contract

PRESETS: list[Rule] = [
    Dynamic.sabour(),
    Dynamic.sabour_code(),
    Dynamic.sabour_code(leaky=True),
    Dynamic.su(),
    Dynamic.su_first(),
    Dynamic.hauser(),
    Attention.tsai(),
    EM.hinton(),
]

OPTIONS: list[Rule] = [
    Dynamic(agreement="cosine", learn_prior=True),
    Dynamic(agreement="cosine", accumulate=False, squash="tanh"),
    Dynamic(normalize="children", learn_prior=True, learn_bias=True),
    Dynamic(normalize="children", accumulate=False, inner_squash="exp", squash="identity"),
    Dynamic(inner_squash="normalize", squash="rational", learn_prior=True),
    Dynamic(iterations=1, leaky=True, learn_prior=True, squash=lambda s: s / 2),
    Dynamic(detach="all_but_last", learn_prior=True),
    Dynamic.hauser(normalize="parents"),
    Attention(iterations=1, norm=False),
    Attention(norm=False, scale=1.0),
    Attention(scale=0.5, eps=1e-3),
    EM(iterations=1, final_lambda=1.0),
    EM(iterations=2, final_lambda=0.1, min_variance=1e-2),
]


@pytest.mark.parametrize(
    "rule", PRESETS + OPTIONS, ids=[f"{k} {type(r).__name__}" for k, r in enumerate(PRESETS + OPTIONS)]
)
def test_every_rule_of_the_library_keeps_the_contract(rule: Rule) -> None:
    assert_routing_contract(rule)


def test_a_rule_of_ones_own_keeps_the_contract_without_being_a_subclass_of_rule() -> None:
    assert not isinstance(Sound(), Rule)
    assert_routing_contract(Sound())


@pytest.mark.parametrize(("broken", "promise"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_rule_is_rejected_by_the_promise_that_it_breaks(broken: Callable[[], Rule], promise: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_routing_contract(broken())
    assert str(caught.value).startswith(f"{promise}: ")


def test_broken_rules_show_that_every_promise_is_looked_at() -> None:
    assert set(BROKEN.values()) == set(PROMISES)


def test_a_message_tells_numbers() -> None:
    @dataclass(frozen=True)
    class SaysParents(Dynamic):
        sums_to = "parents"

    with pytest.raises(
        AssertionError, match=r"summed over the parents of each child off by 0\.\d+ .* allowed is 1e-09"
    ):
        assert_routing_contract(SaysParents(leaky=True))


def test_a_promise_that_a_rule_does_not_make_can_be_left_out() -> None:
    rule = next(broken for broken, promise in BROKEN.items() if promise == "strides do not matter")()
    with pytest.raises(AssertionError, match="strides do not matter"):
        assert_routing_contract(rule)
    assert_routing_contract(rule, except_for=["strides do not matter"])
    with pytest.raises(ValueError, match=r"\['strides'\], but the promises are"):
        assert_routing_contract(rule, except_for=["strides"])


def test_a_rule_that_stumbles_is_told_at_which_promise() -> None:
    @dataclass(frozen=True)
    class KnowsNoStart(Attention):
        def __call__(self, *args: Any, start: None = None, **kwargs: Any) -> Routed:
            if start is not None:
                raise TypeError("start is not known here")
            return super().__call__(*args, **kwargs)

    with pytest.raises(
        AssertionError, match="rounds can be run one at a time: the rule raised TypeError: start is not"
    ):
        assert_routing_contract(KnowsNoStart())


def test_rounds_are_tried_on_rules_that_are_no_dataclass_too() -> None:
    class OneRound:
        iterations = 3
        sums_to, needs_activations, learned = "parents", False, Dynamic().learned

        def __call__(self, *args: Any, **kwargs: Any) -> Routed:
            if self.iterations < 1:
                raise ValueError
            return Dynamic(iterations=1)(*args, **kwargs)

    with pytest.raises(AssertionError, match="the coupling of every round can be asked for"):
        assert_routing_contract(OneRound())
    with pytest.raises(AssertionError, match="each further round changes the result"):
        assert_routing_contract(OneRound(), except_for=["the coupling of every round can be asked for"])


# ---------------------------------------------------------------------------------------------------------------------
# Backends

FEW = [(1, 1, 1, 1, 1, 1), (3, 9, 4, 2, 3, 5)]

# the CPU kernels have a test of their own (test_backends.py), as the Triton kernels have, which are slow to interpret
QUICK = ["auto", "streamed"]


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_backends_agree_with_the_reference(rule: Rule) -> None:
    assert_backends_agree(rule, QUICK, sizes=FEW)


@pytest.mark.parametrize("rule", [Dynamic.sabour(), Attention.tsai(), EM.hinton()], ids=str)
def test_backends_agree_where_sizes_cross_the_edges_of_tiles(rule: Rule) -> None:
    assert_backends_agree(rule, QUICK, dtypes=[torch.float32])


@dataclass(frozen=True)
class Planted(Attention):
    """A rule whose backend "auto" is the reference, and then something goes wrong: `spoil` changes what it gives."""

    spoil: Callable[[Routed, dict[str, Any]], Routed] = lambda routed, call: routed

    def __call__(
        self, poses: Tensor, weight: Tensor, activations: Tensor | None = None, *, backend: str = "auto", **call: Any
    ) -> Routed:
        routed = Attention(self.iterations)(poses, weight, activations, backend="reference", **call)
        call |= {"poses": poses, "weight": weight}
        return routed if backend == "reference" else self.spoil(routed, call)


def longer(routed: Routed, share: float = 1e-8) -> Routed:
    return routed._replace(poses=routed.poses * (1 + share))


def steeper(routed: Routed, x: Tensor) -> Routed:
    """The same values, but a gradient of one hundredth too much in `x`."""
    extra = 0.01 * x.sum()
    return routed._replace(poses=routed.poses + (extra - extra.detach()))


def coarser(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


FAULTS: dict[str, Callable[[Routed, dict[str, Any]], Routed]] = {
    "values off by 1e-8": lambda r, call: longer(r),
    "one number off": lambda r, call: r._replace(
        poses=r.poses + 1e-6 * (torch.arange(r.poses.numel()) == 0).view_as(r.poses)
    ),
    "activations where there are none": lambda r, call: r._replace(activations=r.poses.sum((2, 3))),
    "no coupling": lambda r, call: r._replace(coupling=None),
    "coupling in another order": lambda r, call: r if r.coupling is None else r._replace(coupling=r.coupling.flip(0)),
    "a state of its own": lambda r, call: r._replace(state=r.state * 1.001),
    "poses of float32": lambda r, call: r._replace(poses=r.poses.float()),
    "gradient in poses": lambda r, call: steeper(r, call["poses"].nan_to_num()),
    "gradient in weight": lambda r, call: steeper(r, call["weight"]),
    "gradient in the offset": lambda r, call: r if call.get("vote_offset") is None else steeper(r, call["vote_offset"]),
    "gradient in what is learned": lambda r, call: steeper(r, call["norm_bias"]) if "norm_bias" in call else r,
    "gradient in the start": lambda r, call: r if call["start"] is None else steeper(r, call["start"]),
    "gradient of the state": lambda r, call: r._replace(state=r.state.detach()),
    "no gradient": lambda r, call: r._replace(poses=r.poses.detach()),
    "without a graph": lambda r, call: r if torch.is_grad_enabled() else longer(r),
    "with a mask": lambda r, call: r if call["mask"] is None else longer(r),
    "gradient with a mask": lambda r, call: r if call["mask"] is None else steeper(r, call["weight"]),
    "NaN with a mask": lambda r, call: (
        r if call["mask"] is None else r._replace(poses=r.poses + 0 * call["poses"].sum())
    ),
    "with nobody there": lambda r, call: r if call["mask"] is None or call["mask"].any(1).all() else longer(r),
    "with a shared weight": lambda r, call: r if len(call["weight"]) > 1 or r.poses.shape[0] == 1 else longer(r),
    "with an offset for each example": lambda r, call: (
        r if "vote_offset" not in call or call["vote_offset"].dim() < 5 else longer(r)
    ),
    "with windows": lambda r, call: r if call["child_ids"] is None else longer(r),
    "with one parent": lambda r, call: r if r.poses.shape[1] > 1 else longer(r),
    "beyond 64 children": lambda r, call: r if call["poses"].shape[1] <= 64 else longer(r),
    "beyond 8 columns": lambda r, call: r if r.poses.shape[3] <= 8 else longer(r),
    "float32 in bfloat16": lambda r, call: r if r.poses.dtype != torch.float32 else r._replace(poses=coarser(r.poses)),
    "gradient of float32 in bfloat16": lambda r, call: (
        r
        if r.poses.dtype != torch.float32
        else r._replace(poses=r.poses + coarser(r.poses) - coarser(r.poses).detach())
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_wrong_backend_is_found(fault: Callable[[Routed, dict[str, Any]], Routed]) -> None:
    dtypes = [torch.float64, torch.float32]
    with pytest.raises(AssertionError, match=r"^backend 'auto', \(N, I, J, R, P, Q\) = "):
        assert_backends_agree(
            Planted(spoil=fault), sizes=[*FEW, (2, 65, 1, 1, 2, 3), (1, 2, 3, 1, 2, 9)], dtypes=dtypes
        )


def test_what_the_wrong_backends_are_planted_in_is_sound() -> None:
    assert_backends_agree(Planted(), sizes=FEW)


def test_a_backend_may_refuse_cases_but_auto_may_not_and_a_named_one_not_all() -> None:
    @dataclass(frozen=True)
    class WithFast(Attention):
        refused: frozenset[torch.dtype] = frozenset()
        refuser: str = "fast"

        def __call__(self, poses: Tensor, *args: Any, backend: str = "auto", **kwargs: Any) -> Routed:
            if backend == self.refuser and poses.dtype in self.refused:
                raise ValueError(f"{self.refuser} does not do {poses.dtype}")
            poses = poses * 1.0001 if backend == "fast" and poses.dtype == torch.float64 else poses
            return Attention(self.iterations)(poses, *args, backend="reference", **kwargs)

    everything = frozenset([torch.float64, torch.float32, torch.bfloat16])
    assert_backends_agree(WithFast(), sizes=FEW)  # "fast" is not looked at unless named
    with pytest.raises(AssertionError, match=r"backend 'fast', .*float64: poses off by"):
        assert_backends_agree(WithFast(), ["fast"], sizes=FEW)
    assert_backends_agree(WithFast(refused=frozenset([torch.float64])), ["auto", "fast"], sizes=FEW)
    with pytest.raises(AssertionError, match="backend 'fast' refused every case: fast does not do"):
        assert_backends_agree(WithFast(refused=everything), ["fast"], sizes=FEW)
    with pytest.raises(AssertionError, match=r"auto refused what it has to choose for: auto does not do torch.float32"):
        assert_backends_agree(WithFast(refused=frozenset([torch.float32]), refuser="auto"), sizes=FEW)
