"""The door of routing: what does not fit is a ValueError that names both sides and the way out."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.routing import EM, Attention, Dynamic, EMState, attention, combine, combine_transposed, dynamic, em

N, I, J, R, P, Q = 4, 6, 3, 2, 4, 5


def route(function: Callable[..., Any], **changes: Any) -> Any:
    """A sound call of an algorithm, but for the changes."""
    call: dict[str, Any] = {
        "poses": torch.randn(N, I, R, P),
        "weight": torch.randn(I, J, P, Q),
        "activations": torch.rand(N, I),
    }
    return function(**{**call, **changes})


every_algorithm = pytest.mark.parametrize("function", [dynamic, attention, em], ids=["dynamic", "attention", "em"])


@every_algorithm
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": torch.randn(7, J, P, Q)},
            r"weight \[7, 3, 4, 5\] transforms 7 input capsules of 4 columns, but poses \[4, 6, 2, 4\] hold 6 capsules",
        ),
        (
            {"weight": torch.randn(I, J, 3, Q)},
            r"weight \[6, 3, 3, 5\] transforms 6 input capsules of 3 columns, but poses \[4, 6, 2, 4\] .* of 4 columns",
        ),
        ({"weight": torch.randn(1, J, 3, Q)}, r"weight \[1, 3, 3, 5\] .* but poses \[4, 6, 2, 4\]"),
        ({"weight": torch.randn(I, P, Q)}, r"weight must be a tensor \[I or 1, J, P, Q\], not \[6, 4, 5\]"),
        ({"weight": [1, 2]}, r"weight must be a tensor \[I or 1, J, P, Q\], not list"),
        (
            {"poses": torch.randn(N, I, P)},
            r"poses must be a tensor \[N, I, R, P\], not \[4, 6, 4\]; a vector capsule is .* poses.unsqueeze\(-2\)",
        ),
        ({"poses": torch.randn(N, I, 5, 5, R, P)}, r"poses must be a tensor \[N, I, R, P\], not \[4, 6, 5, 5, 2, 4\]"),
        ({"poses": None}, r"poses must be a tensor \[N, I, R, P\], not NoneType"),
        (
            {"poses": torch.ones(N, I, R, P, dtype=torch.long)},
            r"poses must be floating point of 16, 32 or 64 bits, not torch.int64: call .float\(\)",
        ),
        ({"weight": torch.ones(I, J, P, Q, dtype=torch.int32)}, r"weight must be floating point .* not torch.int32"),
        ({"poses": torch.randn(N, I, R, P).to(torch.float8_e5m2)}, r"of 16, 32 or 64 bits, not torch.float8_e5m2"),
        ({"poses": torch.randn(N, I, R, P).to_sparse()}, r"poses must be dense, not torch.sparse_coo: call .to_dense"),
        (
            {"weight": torch.empty(I, J, P, Q, device="meta")},
            r"weight is on meta, but poses are on cpu: move one to the other",
        ),
        ({"mask": torch.empty(N, I, dtype=torch.bool, device="meta")}, r"mask is on meta, but poses are on cpu"),
        ({"vote_offset": torch.empty(1, 1, R, Q, device="meta")}, r"vote_offset is on meta, but poses are on cpu"),
        (
            {"child_ids": torch.empty(2, I, dtype=torch.long, device="meta")},
            r"child_ids is on meta, but poses are on cpu",
        ),
        ({"weight": torch.randn(I, 0, P, Q)}, r"weight \[6, 0, 4, 5\] must have no empty dimension"),
        (
            {"poses": torch.randn(N, I, 0, P)},
            r"poses \[4, 6, 0, 4\] and weight \[6, 3, 4, 5\] must have no empty dimension but the batch",
        ),
        ({"activations": torch.rand(N, I, 1)}, r"activations \[4, 6, 1\] but poses \[4, 6, 2, 4\] need \[4, 6\]"),
        ({"activations": torch.rand(N, J)}, r"activations \[4, 3\] but poses \[4, 6, 2, 4\] need \[4, 6\]"),
        (
            {"mask": torch.ones(N, J, dtype=torch.bool)},
            r"mask \[4, 3\] of torch.bool but poses \[4, 6, 2, 4\] need \[4, 6\] of torch.bool, True for a child",
        ),
        ({"mask": torch.ones(N, I)}, r"mask \[4, 6\] of torch.float32 but poses .* need \[4, 6\] of torch.bool"),
        (
            {"vote_offset": torch.randn(I, J, R, 1)},
            r"vote_offset \[6, 3, 2, 1\] does not fit votes \[N=4, I=6, J=3, R=2, Q=5\]: it must be \[I or 1, J or 1",
        ),
        ({"vote_offset": torch.randn(2, J, R, Q)}, r"vote_offset \[2, 3, 2, 5\] does not fit votes"),
        (
            {"vote_offset": torch.randn(2, I, J, R, Q)},
            r"vote_offset \[2, 6, 3, 2, 5\] does not fit .* or have a leading N or 1",
        ),
        ({"vote_offset": torch.randn(J, R, Q)}, r"vote_offset \[3, 2, 5\] does not fit votes"),
        ({"vote_offset": torch.randn(1, 1, 1, 1, R, Q)}, r"vote_offset \[1, 1, 1, 1, 2, 5\] does not fit votes"),
        ({"iterations": 0}, r"iterations=0: routing needs a whole number of rounds, 1 or more \(1 is no routing\)"),
        ({"iterations": -2}, r"iterations=-2"),
        ({"iterations": 2.0}, r"iterations=2.0: routing needs a whole number of rounds"),
        ({"iterations": True}, r"iterations=True"),
        ({"backend": "fast"}, r"backend 'fast' is not there: take one of auto, reference"),
        ({"backend": None}, r"backend None is not there"),
        ({"return_coupling": "last"}, r"return_coupling='last': take False, True \(the last round\) or \"all\""),
        (
            {"child_ids": torch.zeros(2, J, dtype=torch.long)},
            r"child_ids \[2, 3\] of torch.int64 must be \[windows, 6\]",
        ),
        ({"child_ids": torch.zeros(2, I)}, r"child_ids \[2, 6\] of torch.float32 must be \[windows, 6\] of torch.long"),
        ({"child_ids": torch.zeros(I, dtype=torch.long)}, r"child_ids \[6\] of torch.int64 must be \[windows, 6\]"),
        (
            {"child_ids": torch.zeros(3, I, dtype=torch.long)},
            r"a batch of 4 is no multiple of the 3 windows of child_ids",
        ),
        ({"child_ids": torch.zeros(0, I, dtype=torch.long)}, r"a batch of 4 is no multiple of the 0 windows"),
        ({"child_ids": -torch.ones(2, I, dtype=torch.long)}, r"child_ids must be 0 or more: mask out the entries"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_named_on_both_sides(
    function: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        route(function, **changes)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (
            dynamic,
            {"start": torch.randn(N, J, Q)},
            r"start \[4, 3, 5\] does not fit this call: it must be \[4, 3, 2, 5\]",
        ),
        (dynamic, {"prior": torch.randn(J, I)}, r"prior \[3, 6\] does not fit this call: it must be \[6, 3\]"),
        (dynamic, {"bias": torch.randn(J, Q)}, r"bias \[3, 5\] does not fit this call: it must be \[3, 2, 5\]"),
        (dynamic, {"prior": torch.empty(I, J, device="meta")}, r"prior is on meta, but poses are on cpu"),
        (attention, {"scale": torch.tensor(0.5)}, r"scale is a tensor, but must be a number: .* norm_weight"),
        (dynamic, {"agreement": "cos"}, r"agreement='cos': take one of 'dot', 'cosine'"),
        (dynamic, {"normalize": "both"}, r"normalize='both': take one of 'parents', 'children'"),
        (dynamic, {"detach": True}, r"detach=True: take one of 'none', 'all_but_last', 'coupling'"),
        (
            dynamic,
            {"normalize": "children", "leaky": True},
            r"leaky=True adds a parent, so the shares must be taken over parents, but normalize='children'",
        ),
        (
            dynamic,
            {"normalize": "children", "child_ids": torch.zeros(2, I, dtype=torch.long)},
            r"child_ids lets parents of several windows compete, .* but normalize='children'",
        ),
        (dynamic, {"squash": "sqush"}, r"unknown squash 'sqush': take one of sabour, "),
        (dynamic, {"inner_squash": "sqush"}, r"unknown squash 'sqush'"),
        (
            dynamic,
            {"squash": lambda s: s.sum(-1)},
            r"turned shape \[4, 3, 2, 5\] into \[4, 3, 2\]: it must keep the shape",
        ),
        (
            attention,
            {"start": torch.randn(N, I, R, Q)},
            r"start \[4, 6, 2, 5\] does not fit this call: it must be \[4, 3, 2, 5\]",
        ),
        (attention, {"norm_weight": torch.ones(Q)}, r"norm_weight \[5\] does not fit this call: it must be \[2, 5\]"),
        (attention, {"norm_bias": torch.ones(Q, R)}, r"norm_bias \[5, 2\] does not fit this call: it must be \[2, 5\]"),
        (
            em,
            {"activations": None},
            r"EM routing weighs each child by its activation, but there are none: give activations",
        ),
        (em, {"min_variance": 0.0}, r"min_variance=0.0 must be above 0: a parent with a single child has variance 0"),
        (em, {"beta_a": torch.zeros(I)}, r"beta_a \[6\] does not fit this call: it must be \[3\]"),
        (em, {"beta_u": torch.zeros(J, 1)}, r"beta_u \[3, 1\] does not fit this call: it must be \[3\]"),
        (em, {"start": torch.randn(N, J, R, Q)}, r"EM starts from the EMState of an earlier call, not from a Tensor"),
        (
            em,
            {"start": EMState(torch.zeros(N, J, R, P), torch.ones(N, J, R, Q), torch.zeros(N, J), 1)},
            r"start.mean \[4, 3, 2, 4\] does not fit this call: it must be \[4, 3, 2, 5\]",
        ),
        (
            em,
            {"start": EMState(torch.zeros(N, J, R, Q), torch.ones(N, I, R, Q), torch.zeros(N, J), 1)},
            r"start.variance \[4, 6, 2, 5\] does not fit this call",
        ),
        (
            em,
            {"start": EMState(torch.zeros(N, J, R, Q), torch.ones(N, J, R, Q), torch.zeros(N, I), 1)},
            r"start.activation_logits \[4, 6\] does not fit this call: it must be \[4, 3\]",
        ),
    ],
)
def test_what_does_not_fit_an_algorithm_is_named(
    function: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        route(function, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dynamic(agreement="cos"), r"agreement='cos': take one of"),
        (lambda: Dynamic(detach="all"), r"detach='all': take one of"),
        (lambda: Dynamic(normalize="children", leaky=True), r"leaky=True adds a parent, .* but normalize='children'"),
        (lambda: EM(min_variance=0.0), r"min_variance=0.0 must be above 0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rule", [Dynamic(), Attention(), EM()], ids=str)
def test_a_rule_cannot_be_changed_and_knows_its_names(rule: Any) -> None:
    with pytest.raises(AttributeError):
        rule.iterations = 5
    with pytest.raises(TypeError, match="no_such_tensor"):
        route(rule, no_such_tensor=torch.zeros(1))


@pytest.mark.parametrize("rule", [Dynamic, Attention, EM])
@pytest.mark.parametrize("iterations", [0, -1, 1.5, True, "3"])
def test_no_round_is_an_error_when_the_rule_is_made_and_at_the_call(rule: Any, iterations: Any) -> None:
    with pytest.raises(ValueError, match=f"iterations={iterations!r}"):
        rule(iterations=iterations)
    with pytest.raises(ValueError, match=f"iterations={iterations!r}"):
        route(functools.partial(rule.function, iterations=iterations))


@every_algorithm
@pytest.mark.parametrize("name", ["activations", "vote_offset", "mask", "child_ids", "start"])
@pytest.mark.parametrize(
    "value", [[1.0], 3, "x", torch.zeros(1, dtype=torch.complex64)], ids=["list", "int", "str", "complex"]
)
def test_what_is_no_tensor_of_real_numbers_is_an_error(function: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a tensor of real numbers|EM starts from"):
        route(function, **{name: value})


@pytest.mark.parametrize("function", [dynamic, attention])
def test_the_state_of_another_algorithm_is_an_error(function: Any) -> None:
    with pytest.raises(ValueError, match="start must be a tensor of real numbers, not a EMState"):
        route(function, start=route(em).state)


def test_a_weight_for_one_parent_does_not_serve_for_four_on_the_way_down() -> None:
    with pytest.raises(ValueError, match="with the same I and J"):
        combine_transposed(torch.randn(2, 4, 2, 5), torch.randn(6, 1, 3, 5), torch.rand(2, 6, 4))


@every_algorithm
def test_children_may_be_numbered_as_one_likes(function: Any) -> None:
    ids = torch.stack([torch.arange(I), torch.arange(I) + 2])
    poses = torch.randn(N, I, R, P)
    one, other = (
        route(function, poses=poses, child_ids=k, weight=torch.ones(I, J, P, Q), activations=torch.ones(N, I))
        for k in (ids, ids * 10**15)
    )
    torch.testing.assert_close(one.poses, other.poses)


def test_an_unknown_squash_is_an_error_when_the_rule_is_made() -> None:
    for settings in ({"squash": "no"}, {"inner_squash": "no"}):
        with pytest.raises(ValueError, match="take one of sabour"):
            Dynamic(**settings)


def test_a_rule_says_only_what_is_not_its_default() -> None:
    assert str(Dynamic.sabour()) == "Dynamic()"
    assert str(Dynamic.su()) == "Dynamic(accumulate=False, squash=Sabour(a=0.5, eps=0.0), inner_squash='normalize')"


def shapes(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: combine(*shapes((N, I, R, P), (I, J, P, Q), (N, J, I))),
            r"coupling \[4, 3, 6\] does not fit this call: it must be \[4, 6, 3\]",
        ),
        (
            lambda: combine(*shapes((N, I, R, P), (7, J, P, Q), (N, I, J))),
            r"weight \[7, 3, 4, 5\] transforms 7 .*, but poses \[4, 6, 2, 4\] hold 6",
        ),
        (
            lambda: combine(*shapes((N, I, R, P), (I, J, P, Q), (N, I, J), (R, Q))),
            r"vote_offset \[2, 5\] does not fit votes",
        ),
        (
            lambda: combine_transposed(*shapes((N, J, R, Q), (7, J, P, Q), (N, I, J))),
            r"coupling \[4, 6, 3\] must be \[N, I, J\] and weight \[7, 3, 4, 5\] \[I or 1, J, P, Q\] with ",
        ),
        (
            lambda: combine_transposed(*shapes((N, J, R, Q), (I, J, P, Q), (I, J))),
            r"coupling \[6, 3\] must be \[N, I, J\]",
        ),
        (
            lambda: combine_transposed(*shapes((N, J, R, P), (I, J, P, Q), (N, I, J))),
            r"\[4, 3, 2, 4\] hold 3 capsules of 4",
        ),
        (
            lambda: combine_transposed(*shapes((N, J, R, Q), (I, J, P, Q), (2, I, J))),
            r"coupling \[2, 3, 6\] does not fit",
        ),
    ],
)
def test_what_cannot_be_combined_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
