"""The library's reference equals the scalar loops of oracles.py, in float64, to a relative 1e-9.

Masked children hold NaN throughout: an answer that read one would be NaN.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from torchcaps import squash, unsquash
from torchcaps.losses import margin_loss, reconstruction_loss, spread_loss
from torchcaps.routing import Attention, Dynamic, EMState, attention, combine, combine_transposed, dynamic, em
from torchcaps.squash import KINDS, safe_norm

RTOL, ATOL = 1e-9, 1e-12


def tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def equal(actual: Tensor | None, expected: np.ndarray, atol: float = ATOL) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.detach(), torch.from_numpy(np.asarray(expected)), rtol=RTOL, atol=atol)


class Sizes(NamedTuple):
    """Sizes of a call; all differ where they can, so that a wrong axis does not fit."""

    N: int
    I: int
    J: int
    R: int
    P: int
    Q: int


SIZES = (
    Sizes(N=2, I=5, J=4, R=3, P=2, Q=4),
    Sizes(N=3, I=1, J=4, R=1, P=3, Q=5),
    Sizes(N=2, I=5, J=1, R=3, P=4, Q=2),
    Sizes(N=3, I=1, J=1, R=1, P=2, Q=1),
    Sizes(N=2, I=4, J=3, R=1, P=5, Q=1),
)
MIXED = SIZES[0]
WINDOWS = 3


class Inputs:
    """Random arrays for one call, and the same call made by the library and by an oracle."""

    def __init__(self, sizes: Sizes, seed: int, *, shared: bool = False, windows: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.sizes = sizes._replace(N=sizes.N * WINDOWS) if windows else sizes
        N, I, J, R, P, Q = self.sizes
        self.poses = self.normal(N, I, R, P)
        self.weight = self.normal(1 if shared else I, J, P, Q)
        self.activations = self.rng.uniform(0.05, 1.0, (N, I))
        self.options: dict[str, Any] = {}
        if windows:  # I entries of each window out of I + 2 children: some are seen by many windows, some by one
            self.options["child_ids"] = np.stack([self.rng.permutation(I + 2)[:I] for _ in range(WINDOWS)])

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape)

    def mask(self, kind: str) -> "Inputs":
        """Leave children out, and put NaN wherever they are."""
        N, I, J, R, _, Q = self.sizes
        mask = self.rng.random((N, I)) < 0.7
        mask[0] = False  # nobody takes part
        if kind == "a whole example":
            mask[:] = True
            mask[:WINDOWS] = False
        self.options["mask"] = mask
        self.poses[~mask] = np.nan
        self.activations[~mask] = np.nan
        if kind == "with offset":
            self.options["vote_offset"] = self.normal(N, I, J, R, Q)
            self.options["vote_offset"][~mask] = np.nan
        return self

    def offset(self, kind: str) -> "Inputs":
        N, I, J, R, _, Q = self.sizes
        sizes = {"N": N, "I": I, "J": J, "1": 1}
        self.options["vote_offset"] = self.normal(*(sizes[letter] for letter in kind.split()), R, Q)
        return self

    def library(self, function: Any, **settings: Any) -> Any:
        options = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in settings.items()}
        options |= {name: tensor(value) for name, value in self.options.items()}
        if isinstance(options.get("start"), oracles.EMStateByLoops):
            mean, variance, logits, done = options["start"]
            options["start"] = EMState(
                torch.from_numpy(mean), torch.from_numpy(variance), torch.from_numpy(logits), done
            )
        for name in ("squash", "inner_squash"):
            if isinstance(options.get(name), oracles.Squash):
                kind, a, eps = options[name]
                options[name] = kind if (a, eps) == (1.0, 0.0) else partial(squash, kind=kind, a=a, eps=eps)
        options.setdefault("return_coupling", "all")
        return function(tensor(self.poses), tensor(self.weight), tensor(self.activations), **options)

    def agree(self, function: Any, oracle: Any, **settings: Any) -> None:
        """Library and oracle give the same parents, activations, couplings of every round and state."""
        routed = self.library(function, **settings)
        if function is em:
            expected = oracle(self.poses, self.weight, self.activations, **settings, **self.options)
            equal(routed.activations, expected.activations)
            equal(routed.state.mean, expected.state.mean)
            equal(routed.state.variance, expected.state.variance)
            equal(routed.state.activation_logits, expected.state.activation_logits)
            assert routed.state.round == expected.state.round
        else:
            expected = oracle(self.poses, self.weight, **settings, **self.options)
            assert routed.activations is None
            equal(routed.state, expected.state)
        equal(routed.poses, expected.poses)
        equal(routed.coupling, expected.coupling)
        equal(self.library(function, **settings, return_coupling=True).coupling, expected.coupling[-1])

    def chain(self, function: Any, rounds: int, **settings: Any) -> None:
        """Rounds at once, and one by one through the state, are the same."""
        at_once = self.library(function, iterations=rounds, **settings)
        state, couplings = None, []
        for _ in range(rounds):
            routed = self.library(function, iterations=1, start=state, **settings)
            state = routed.state
            couplings.append(routed.coupling)
        torch.testing.assert_close(routed.poses, at_once.poses, rtol=RTOL, atol=ATOL)
        torch.testing.assert_close(torch.cat(couplings), at_once.coupling, rtol=RTOL, atol=ATOL)
        if at_once.activations is not None:
            torch.testing.assert_close(routed.activations, at_once.activations, rtol=RTOL, atol=ATOL)

    # what the algorithms learn or start from

    def dynamic_start(self) -> np.ndarray:
        N, _, J, R, _, Q = self.sizes
        return self.normal(N, J, R, Q)

    def betas(self) -> dict[str, np.ndarray]:
        return {"beta_a": self.normal(self.sizes.J), "beta_u": self.normal(self.sizes.J)}

    def em_start(self) -> oracles.EMStateByLoops:
        N, _, J, R, _, Q = self.sizes
        variance = self.rng.uniform(0.1, 2.0, (N, J, R, Q))
        return oracles.EMStateByLoops(self.normal(N, J, R, Q), variance, self.normal(N, J), 2)


# ---------------------------------------------------------------------------------------------------------------------
# Dynamic routing

FORMS = (
    *(oracles.Squash(kind) for kind in KINDS),
    oracles.Squash("sabour", a=0.5),
    oracles.Squash("sabour", a=0.5, eps=1e-2),
    oracles.Squash("tanh", eps=1e-2),
)
ALONE: dict[str, dict[str, Any]] = {
    "as the paper has it": {},
    "accumulate": {"accumulate": False},
    "agreement": {"agreement": "cosine"},
    "normalize": {"normalize": "children"},
    "leaky": {"leaky": True},
    "inner_squash": {"inner_squash": oracles.Squash("normalize")},
    "Su, second form": {"accumulate": False, "squash": FORMS[6], "inner_squash": oracles.Squash("normalize")},
    "Hauser": {"agreement": "cosine", "normalize": "children", "squash": oracles.Squash("identity")},
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("option", ALONE)
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_each_option_of_dynamic_alone_is_the_papers(sizes: Sizes, option: str, iterations: int) -> None:
    Inputs(sizes, seed=1).agree(dynamic, oracles.dynamic, iterations=iterations, **ALONE[option])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("place", ["squash", "inner_squash"])
def test_dynamic_squashes_as_it_is_told(form: oracles.Squash, place: str) -> None:
    Inputs(MIXED, seed=2).agree(dynamic, oracles.dynamic, **{place: form})


@pytest.mark.parametrize("learned", ["prior", "bias", "both"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("normalize", ["parents", "children"])
def test_prior_and_bias_stand_in_every_round_of_dynamic(learned: str, accumulate: bool, normalize: str) -> None:
    x = Inputs(MIXED, seed=3)
    tensors = {"prior": x.normal(x.sizes.I, x.sizes.J), "bias": x.normal(x.sizes.J, x.sizes.R, x.sizes.Q)}
    chosen = {name: value for name, value in tensors.items() if learned in (name, "both")}
    x.agree(dynamic, oracles.dynamic, accumulate=accumulate, normalize=normalize, **chosen)


WHOLES: dict[str, dict[str, Any]] = {
    "parents": {},
    "parents and a leak": {"leaky": True},
    "children": {"normalize": "children"},
    "windows": {"windows": True},
    "windows and a leak": {"windows": True, "leaky": True},
}
CORNERS = list(itertools.product(WHOLES, [True, False], ["dot", "cosine"], range(len(SIZES))))


@pytest.mark.parametrize(("whole", "accumulate", "agreement", "size"), CORNERS)
def test_options_of_dynamic_together_are_the_papers(whole: str, accumulate: bool, agreement: str, size: int) -> None:
    settings = {"accumulate": accumulate, "agreement": agreement, **WHOLES[whole]}
    windows = settings.pop("windows", False)
    seed = CORNERS.index((whole, accumulate, agreement, size))
    coin = np.random.default_rng(1000 + seed)  # the rest is drawn, the same at every run
    x = Inputs(SIZES[size], seed=seed, shared=coin.random() < 0.5, windows=windows)
    if coin.random() < 0.5:
        x.offset(coin.choice(["I J", "1 J", "N I J"]))
    if coin.random() < 0.6:
        x.mask(coin.choice(["some", "with offset"]))
    if coin.random() < 0.5:
        settings["prior"] = x.normal(x.sizes.I, x.sizes.J)
    if coin.random() < 0.5:
        settings["bias"] = x.normal(x.sizes.J, x.sizes.R, x.sizes.Q)
    if coin.random() < 0.5:
        settings["start"] = x.dynamic_start()
    if coin.random() < 0.5:
        settings["inner_squash"] = FORMS[coin.integers(len(FORMS))]
    settings |= {"squash": FORMS[coin.integers(len(FORMS))], "iterations": int(coin.integers(1, 4))}
    x.agree(dynamic, oracles.dynamic, **settings)


@pytest.mark.parametrize("option", ALONE)
@pytest.mark.parametrize("whole", WHOLES)
def test_rounds_of_dynamic_through_the_state_are_rounds_at_once(option: str, whole: str) -> None:
    settings = WHOLES[whole] | ALONE[option]
    windows = settings.pop("windows", False)
    if windows or settings.get("leaky"):
        settings["normalize"] = "parents"
    x = Inputs(MIXED, seed=5, windows=windows).mask("with offset")
    settings |= {"prior": x.normal(x.sizes.I, x.sizes.J), "bias": x.normal(x.sizes.J, x.sizes.R, x.sizes.Q)}
    x.chain(dynamic, 4, **settings)


@pytest.mark.parametrize("normalize", ["parents", "children"])
def test_with_a_stopped_coupling_the_gradient_is_that_of_a_given_coupling(normalize: str) -> None:
    x = Inputs(MIXED, seed=6)
    poses, weight = torch.from_numpy(x.poses), torch.from_numpy(x.weight).requires_grad_()
    rule = Dynamic(detach="coupling", normalize=normalize)
    routed = rule(poses, weight, return_coupling=True)
    given = squash(combine(poses, weight, routed.coupling.detach()))
    cotangent = torch.from_numpy(x.normal(*routed.poses.shape))
    actual, expected = (torch.autograd.grad((v * cotangent).sum(), weight)[0] for v in (routed.poses, given))
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


def test_rounds_before_the_last_are_constants_where_only_the_last_is_to_be_seen() -> None:
    x = Inputs(MIXED, seed=7)
    poses, weight = torch.from_numpy(x.poses), torch.from_numpy(x.weight).requires_grad_()
    prior = torch.from_numpy(x.normal(x.sizes.I, x.sizes.J)).requires_grad_()
    before = dynamic(poses, weight.detach(), prior=prior.detach(), iterations=2)
    votes = torch.einsum("nirp,ijpq->nijrq", poses, weight)
    # the last round by hand: its logits see the votes as constants, and the prior as what it is
    logits = prior + (votes.detach() * before.state[:, None]).sum((3, 4))
    v = squash((logits.softmax(2)[..., None, None] * votes).sum(1))
    routed = dynamic(poses, weight, prior=prior, iterations=3, detach="all_but_last")
    cotangent = torch.from_numpy(x.normal(*v.shape))
    actual = torch.autograd.grad((routed.poses * cotangent).sum(), (weight, prior))
    for one, other in zip(actual, torch.autograd.grad((v * cotangent).sum(), (weight, prior)), strict=True):
        torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


# ---------------------------------------------------------------------------------------------------------------------
# What all algorithms share: shared weights, offsets, masks, windows, starts

ALGORITHMS = {
    "dynamic": (dynamic, oracles.dynamic),
    "attention": (attention, oracles.attention),
    "em": (em, oracles.em),
}


def learned(name: str, x: Inputs) -> dict[str, Any]:
    return x.betas() if name == "em" else {}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("shared", [False, True])
def test_every_child_may_have_its_weight_or_all_may_share_one(sizes: Sizes, name: str, shared: bool) -> None:
    x = Inputs(sizes, seed=10, shared=shared)
    x.agree(*ALGORITHMS[name], iterations=3, **learned(name, x))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", ["I J", "1 J", "I 1", "N I J", "1 1 1", "N 1 J"])
@pytest.mark.parametrize("shared", [False, True])
def test_votes_are_moved_by_their_offset(name: str, kind: str, shared: bool) -> None:
    x = Inputs(MIXED, seed=11, shared=shared).offset(kind)
    x.agree(*ALGORITHMS[name], iterations=3, **learned(name, x))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", ["some", "with offset"])
def test_masked_children_are_left_out(sizes: Sizes, name: str, kind: str) -> None:
    x = Inputs(sizes, seed=12).mask(kind)
    x.agree(*ALGORITHMS[name], iterations=3, **learned(name, x))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", ["none", "some", "with offset", "a whole example"])
@pytest.mark.parametrize("shared", [False, True])
def test_windows_compete_for_the_child_they_share(sizes: Sizes, name: str, kind: str, shared: bool) -> None:
    x = Inputs(sizes, seed=13, shared=shared, windows=True)
    if kind != "none":
        x.mask(kind)
    x.agree(*ALGORITHMS[name], iterations=3, **learned(name, x))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_single_window_is_no_window(sizes: Sizes, name: str) -> None:
    x = Inputs(sizes, seed=14)
    settings = {"iterations": 3, **learned(name, x)}
    plain = x.library(ALGORITHMS[name][0], **settings)
    x.options["child_ids"] = x.rng.permutation(x.sizes.I + 3)[None, : x.sizes.I]
    x.agree(*ALGORITHMS[name], **settings)
    torch.testing.assert_close(x.library(ALGORITHMS[name][0], **settings).poses, plain.poses, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rounds_go_on_from_a_given_start(name: str, iterations: int, windows: bool, masked: bool) -> None:
    x = Inputs(MIXED, seed=15, windows=windows)
    if masked:
        x.mask("some")
    start = x.em_start() if name == "em" else x.dynamic_start()
    x.agree(*ALGORITHMS[name], iterations=iterations, start=start, **learned(name, x))


@pytest.mark.parametrize("name", ["attention", "em"])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rounds_through_the_state_are_rounds_at_once(name: str, windows: bool, sizes: Sizes) -> None:
    x = Inputs(sizes, seed=16, windows=windows).mask("with offset")
    x.chain(ALGORITHMS[name][0], 4, **learned(name, x))


# ---------------------------------------------------------------------------------------------------------------------
# Inverted attention


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("norm", [True, False])
def test_attention_is_the_papers(sizes: Sizes, iterations: int, scale: float | None, norm: bool) -> None:
    x = Inputs(sizes, seed=20)
    x.agree(attention, oracles.attention, iterations=iterations, scale=scale, norm=norm)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("chosen", ["norm_weight", "norm_bias", "both"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_normalises_with_its_gain_and_bias(flat: bool, chosen: str, eps: float, masked: bool) -> None:
    x = Inputs(MIXED, seed=21)
    if masked:
        x.mask("some")
    shape = (MIXED.R * MIXED.Q,) if flat else (MIXED.R, MIXED.Q)
    gains = {name: x.normal(*shape) for name in ("norm_weight", "norm_bias") if chosen in (name, "both")}
    x.agree(attention, oracles.attention, eps=eps, **gains)


def test_a_pose_of_one_number_is_never_normalised() -> None:
    x = Inputs(SIZES[4], seed=22)
    with_norm, without = (x.library(attention, iterations=3, norm=norm).poses for norm in (True, False))
    assert torch.equal(with_norm, without)
    assert Attention().learned(4, 3, 1, 5, 1) == {}


# ---------------------------------------------------------------------------------------------------------------------
# EM


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("final_lambda", [0.01, 0.5])
@pytest.mark.parametrize("min_variance", [1e-4, 0.3])
def test_em_is_the_papers(sizes: Sizes, iterations: int, final_lambda: float, min_variance: float) -> None:
    x = Inputs(sizes, seed=30)
    settings = {"iterations": iterations, "final_lambda": final_lambda, "min_variance": min_variance}
    x.agree(em, oracles.em, **settings, **x.betas())


def test_em_without_betas_has_them_at_zero() -> None:
    x = Inputs(MIXED, seed=31)
    zeros = np.zeros(MIXED.J)
    expected = oracles.em(x.poses, x.weight, x.activations, beta_a=zeros, beta_u=zeros)
    equal(x.library(em).activations, expected.activations)


@pytest.mark.parametrize("windows", [False, True])
def test_a_child_of_activation_zero_is_no_child_to_em(windows: bool) -> None:
    x = Inputs(MIXED, seed=32, windows=windows)
    betas = x.betas()
    absent = x.rng.random(x.activations.shape) < 0.4
    absent[0] = True
    x.activations[absent] = 0.0
    actual = x.library(em, **betas)
    if windows:  # it competes for nothing with nobody else, so other children do not care
        expected = oracles.em(x.poses, x.weight, x.activations, **betas, **x.options)
    else:
        expected = oracles.em(x.poses, x.weight, x.activations, **betas, mask=~absent)
    equal(actual.poses, expected.poses)
    equal(actual.activations, expected.activations)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients: of the library by the chain rule, of the oracle by differences

DIFFERENCES = {
    "dynamic": {"accumulate": True},
    "dynamic, replaced": {"accumulate": False, "inner_squash": oracles.Squash("normalize")},
    "dynamic, cosine": {"agreement": "cosine", "normalize": "children", "squash": oracles.Squash("rational")},
    "dynamic, leaky": {"leaky": True, "squash": oracles.Squash("exp")},
    "attention": {"iterations": 3},
    "attention, plain": {"norm": False, "scale": 0.2},
    "em": {"final_lambda": 0.5, "min_variance": 0.1},
}


@pytest.mark.parametrize("which", DIFFERENCES)
@pytest.mark.parametrize("windows", [False, True])
def test_gradients_are_the_slopes_of_the_oracle(which: str, windows: bool) -> None:
    name = which.split(",")[0]
    settings = dict(DIFFERENCES[which])
    if windows and settings.get("normalize") == "children":
        settings["normalize"] = "parents"
    function, oracle = ALGORITHMS[name]
    x = Inputs(Sizes(N=1, I=3, J=2, R=1, P=2, Q=3), seed=40, windows=windows)
    N, I, J, R, _, Q = x.sizes
    mask = np.ones((N, I), bool)
    mask[0, 1] = False
    fixed = {"mask": mask, **x.options}
    arrays = {"poses": x.poses, "weight": x.weight, "vote_offset": x.normal(I, J, R, Q)}
    if name == "dynamic":
        arrays |= {"prior": x.normal(I, J), "bias": x.normal(J, R, Q), "start": x.normal(N, J, R, Q)}
    elif name == "attention":
        arrays |= {"norm_weight": x.normal(R, Q), "norm_bias": x.normal(R, Q), "start": x.normal(N, J, R, Q)}
        if settings.get("norm") is False:
            del arrays["norm_weight"], arrays["norm_bias"]
    else:
        arrays |= {"activations": x.activations, **x.betas()}
    cotangent, other = x.normal(N, J, R, Q), x.normal(N, J)

    def slow() -> float:
        routed = oracle(**arrays, **settings, **fixed)
        total = float((routed.poses * cotangent).sum())
        return total if routed.activations is None else total + float((routed.activations * other).sum())

    leaves = {key: torch.from_numpy(value.copy()).requires_grad_() for key, value in arrays.items()}
    forms = {key: value.kind if isinstance(value, oracles.Squash) else value for key, value in settings.items()}
    routed = function(**leaves, **forms, **{key: tensor(value) for key, value in fixed.items()})
    total = (routed.poses * torch.from_numpy(cotangent)).sum()
    if routed.activations is not None:
        total = total + (routed.activations * torch.from_numpy(other)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    for key, gradient in zip(leaves, gradients, strict=True):
        flat, step = arrays[key].reshape(-1), 1e-5
        for place in range(flat.size):
            kept = flat[place]
            flat[place] = kept + step
            above = slow()
            flat[place] = kept - step
            below = slow()
            flat[place] = kept
            slope = (above - below) / (2 * step)
            assert float(gradient.reshape(-1)[place]) == pytest.approx(slope, rel=1e-6, abs=1e-7), (key, place)


# ---------------------------------------------------------------------------------------------------------------------
# Squash, and a given coupling


def of_lengths(*lengths: float, seed: int) -> np.ndarray:
    """Poses [lengths, 3, 5] of random direction, one of each length."""
    directions = np.random.default_rng(seed).normal(size=(len(lengths), 3, 5))
    directions /= np.sqrt((directions**2).sum((1, 2), keepdims=True))
    return np.array(lengths)[:, None, None] * directions


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_squash_is_the_papers_at_every_length(form: oracles.Squash) -> None:
    s = of_lengths(0.0, 1e-30, 1e-5, 9e-3, 1.1e-2, 0.5, 1.0, 3.0, 40.0, 1e4, seed=50)
    kind, a, eps = form
    expected = np.array([oracles.squash_pose(pose, form) for pose in s])
    equal(squash(torch.from_numpy(s), kind, a=a, eps=eps), expected, atol=0.0)
    rows = squash(torch.from_numpy(s), kind, dim=-1, a=a, eps=eps)
    equal(rows, np.array([[oracles.squash_pose(row[None], form)[0] for row in pose] for pose in s]), atol=0.0)


def test_unsquash_is_the_papers_and_undoes_squash() -> None:
    v = of_lengths(0.0, 1e-12, 1e-3, 0.3, 0.9, 0.999, seed=51)
    s = unsquash(torch.from_numpy(v))
    equal(s, np.array([oracles.unsquash_pose(pose) for pose in v]), atol=0.0)
    equal(squash(s), v, atol=0.0)


def test_a_length_is_the_root_of_the_sum_of_squares() -> None:
    s = np.random.default_rng(52).normal(size=(4, 3, 5))
    equal(safe_norm(torch.from_numpy(s)), np.sqrt((s**2).sum((1, 2))))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("offset", [None, "I J", "N I J", "1 1 1"])
def test_a_given_coupling_goes_up_and_down(sizes: Sizes, shared: bool, offset: str | None) -> None:
    x = Inputs(sizes, seed=53, shared=shared)
    if offset:
        x.offset(offset)
    moved = x.options.get("vote_offset")
    coupling = x.normal(sizes.N, sizes.I, sizes.J)
    parents = x.normal(sizes.N, sizes.J, sizes.R, sizes.Q)
    poses, weight, shares = torch.from_numpy(x.poses), torch.from_numpy(x.weight), torch.from_numpy(coupling)
    equal(combine(poses, weight, shares, tensor(moved)), oracles.combine(x.poses, x.weight, coupling, moved))
    down = combine_transposed(torch.from_numpy(parents), weight, shares)
    equal(down, oracles.combine_transposed(parents, x.weight, coupling))


# ---------------------------------------------------------------------------------------------------------------------
# Losses

PRESENCE = {
    "one class": [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]],
    "several": [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]],
}
MARGINS: dict[str, dict[str, Any]] = {
    "paper": {},
    "margins": {"positive": 0.8, "negative": 0.3},
    "weights": {"positive_weight": 0.7, "negative_weight": 0.2},
    "power 1": {"power": 1},
    "mean over classes": {"over_classes": "mean"},
}


@pytest.mark.parametrize("target", PRESENCE)
@pytest.mark.parametrize("option", MARGINS)
def test_margin_loss_is_the_papers(target: str, option: str) -> None:
    scores = np.random.default_rng(60).uniform(0.0, 1.1, (3, 4))
    present = torch.tensor(PRESENCE[target])
    expected = oracles.margin_loss(scores, PRESENCE[target], **MARGINS[option])
    for form in (present, present.bool(), present.double(), *([present.argmax(1)] if target == "one class" else [])):
        settings = MARGINS[option]
        equal(margin_loss(torch.from_numpy(scores), form, reduction="none", **settings), np.array(expected))
        equal(margin_loss(torch.from_numpy(scores), form, reduction="sum", **settings), np.array(sum(expected)))
        equal(margin_loss(torch.from_numpy(scores), form, **settings), np.array(sum(expected) / 3))


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_spread_loss_is_the_papers(margin: float, classes: int) -> None:
    rng = np.random.default_rng(61)
    activations, target = rng.uniform(0.0, 1.0, (4, classes)), rng.integers(classes, size=4)
    expected = oracles.spread_loss(activations, target, margin)
    for reduction, value in (("none", expected), ("sum", sum(expected)), ("mean", sum(expected) / 4)):
        loss = spread_loss(torch.from_numpy(activations), torch.from_numpy(target), margin=margin, reduction=reduction)
        equal(loss, np.array(value))


def test_reconstruction_loss_is_784_times_the_mean_square() -> None:
    image, made = np.random.default_rng(62).uniform(size=(2, 3, 2, 4, 5))
    expected = oracles.reconstruction_loss(made, image)
    loss = reconstruction_loss(torch.from_numpy(made), torch.from_numpy(image), reduction="none")
    equal(loss, np.array(expected))
    equal(reconstruction_loss(torch.from_numpy(made), torch.from_numpy(image)), np.array(sum(expected) / 3))
