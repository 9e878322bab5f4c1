"""Dynamic routing: parents that a child's vote agrees with get more of the child.

Sabour, Frosst, Hinton 2017, "Dynamic routing between capsules", procedure 1:

    u_ij = x_i W_ij                                     votes
    b_ij = 0
    repeat T times:
        c_ij = exp b_ij / sum_j exp b_ij                each child's shares over its parents
        s_j  = sum_i c_ij u_ij
        v_j  = squash(s_j)
        b_ij = b_ij + <u_ij, v_j>                       (not after the last round)

Since b is linear in v, the sum of all v so far is all there is to keep: b_ij = prior_ij + <u_ij, sum of v_j>.
That sum is the `state` of a call.

The named options cover the published variants (each paper's settings are a preset of `Dynamic`):

    accumulate=False      b_ij = prior_ij + <u_ij, v_j> of the last round alone         Su 2018
    inner_squash          the squash of every round but the last                        Su 2018, second form
    agreement="cosine"    cos(u_ij, s_j) instead of <u_ij, v_j>; 0 where either is 0    Hauser 2019
    normalize="children"  c_ij = exp b_ij / sum_i exp b_ij                              Hauser 2019, formulas
    leaky                 a parent "none of the above" with logit 0 takes its share     Sabour 2017, code
    bias                  s_j = sum_i c_ij u_ij + bias_j in every round                 Sabour 2017, code
    prior                 b_ij starts at a learned prior_ij                             Sabour 2017, "log priors"
    detach="all_but_last" the rounds before the last are constants to the gradient      widespread in open code
    detach="coupling"     so is the coupling of the last round                          Hauser 2019, eq. 18

Activations are ignored: the length of a pose is what says how present a capsule is.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.routing._backends import choose, situation
from torchcaps.routing._passes import Detach
from torchcaps.routing._round import Backend, Call, Over, check_iterations, couple, enter
from torchcaps.routing._rounds import Plan, run_rounds
from torchcaps.routing._rule import Rule
from torchcaps.routing._windows import Windows
from torchcaps.squash import Sabour, Squash, check_squash, resolve, squash_backward, transformed, why_not_twice
from torchcaps.squash import squash as apply_squash
from torchcaps.types import Routed

__all__ = ["Dynamic", "dynamic"]

Agreement = Literal["dot", "cosine"]

SU_SQUASH = Sabour(a=0.5)
"""Su's r^2 / (0.5 + r^2)."""


def dynamic(
    poses: Tensor,
    weight: Tensor,
    activations: Tensor | None = None,
    *,
    iterations: int = 3,
    accumulate: bool = True,
    agreement: Agreement = "dot",
    normalize: Over = "parents",
    squash: Squash = "sabour",
    inner_squash: Squash | None = None,
    leaky: bool = False,
    detach: Detach = "none",
    prior: Tensor | None = None,
    bias: Tensor | None = None,
    vote_offset: Tensor | None = None,
    mask: Tensor | None = None,
    start: Tensor | None = None,
    child_ids: Tensor | None = None,
    windows: Windows | None = None,
    backend: Backend = "auto",
    return_coupling: bool | Literal["all"] = False,
) -> Routed:
    """Route children to parents by agreement: Sabour, Frosst, Hinton 2017, procedure 1, and its published variants.

    The equations stand on top of the file routing/dynamic.py.

    poses        `[N, I, R, P]`.
    weight       `[I, J, P, Q]`, or `[1, J, P, Q]` shared by all children.
    activations  `[N, I]` or None; ignored: the length of a pose is what says how present a capsule is.
    iterations   T, 1 or more; 1 is no routing: uniform coupling.
    accumulate   add each round's agreement to the logits (Sabour), or let it take their place (Su 2018).
    agreement    "dot", or "cosine" (Hauser 2019).
    normalize    shares sum to 1 over the "parents" of a child (Sabour), or over the "children" of a parent (Hauser).
    squash       of the parents: a kind of `torchcaps.squash`, or a callable on `[N, J, R, Q]`.
    inner_squash the squash of every round but the last; None is `squash` (Su's second form: "normalize").
    leaky        a further parent "none of the above" with logit 0 takes its share and is dropped.
    detach       what is a constant to the gradient: "none"; "all_but_last", the rounds before the last; "coupling", all
                 coupling.
    prior        `[I, J]`, added to the logits of every round.
    bias         `[J, R, Q]`, added to the sum of votes in every round.
    vote_offset  `[I | 1, J | 1, R, Q]`, or with a leading N, added to the votes.
    mask         `[N, I]`, True for a child that takes part; what a masked child holds changes nothing.
    start        the `state` of an earlier call, `[N, J, R, Q]`: the rounds go on from there.
    child_ids    `[windows, I]`: which child each entry of a window is; the parents of all windows compete for it.
    windows      poses are then a map `[N, C, *spatial, R, P]`, mask too, and each window is an example of its own, its
                 children in the order type, kernel row, kernel column: N counts windows in all other shapes.
    backend      "reference", the equations on all votes at once; "streamed", a tile of children at a time, without
                 votes in memory; "native", compiled kernels for the CPU; "triton", kernels for CUDA; "auto" picks by
                 device and size.
    return_coupling  True for the last round's coupling, "all" for every round's.

    Returns `Routed`: poses `[N, J, R, Q]`; no activations; coupling `[N, I, J]`, or `[T, N, I, J]` for "all"; state.
    Raises ValueError where shapes or settings do not fit.

    >>> routed = dynamic(torch.randn(2, 6, 1, 8), torch.randn(6, 3, 8, 16), return_coupling=True)
    >>> routed.poses.shape, routed.coupling.sum(2).allclose(torch.ones(2, 6))
    (torch.Size([2, 3, 1, 16]), True)
    """
    _check_settings(agreement, normalize, leaky, detach, child_ids is not None)
    call = enter(
        poses, weight, activations, vote_offset=vote_offset, mask=mask, child_ids=child_ids, windows=windows,
        iterations=iterations, backend=backend, return_coupling=return_coupling,
    )  # fmt: skip
    N, I, J, R, Q = call.sizes
    step = DynamicStep(
        squash,
        squash if inner_squash is None else inner_squash,
        accumulate,
        agreement == "cosine",
    )
    prior = call.tensor("prior", prior, I, J)
    extras = () if bias is None else (call.tensor("bias", bias, J, R, Q),)
    start = call.tensor("start", start, N, J, R, Q)
    equations = functools.partial(
        _reference,
        T=iterations,
        step=step,
        normalize=normalize,
        leaky=leaky,
        detach=detach,
    )
    with call.own_precision():
        known = normalize == "parents" and detach == "none"
        once = None if step.traceable or backend == "reference" else step.why_not_twice(call.zeros(1, J, R, Q) + 0.1)
        now = situation(
            call, backend, traceable=step.traceable, squash_twice=once, cosine=step.cosine, kernels_know=known
        )
        chosen = choose(backend, now)
        if chosen == "reference":
            return call.answer(*equations(call, prior, start, extras))
        plan = Plan(iterations, step, equations, chosen, leaky, step.cosine, normalize, detach)
        return call.answer(*run_rounds(plan, call, prior, start, extras))


def _reference(
    call: Call,
    prior: Tensor | None,
    V: Tensor | None,
    bias: tuple[Tensor, ...],
    *,
    T: int,
    step: "DynamicStep",
    normalize: Over,
    leaky: bool,
    detach: Detach,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The equations, line by line: the parents, every round's coupling, and V, the state."""
    call = call.unfolded()
    N, I, J, _, _ = call.sizes
    u = call.votes()
    seen = u.detach() if detach == "all_but_last" else u  # the votes as all but the last sum sees them
    direction = apply_squash(seen, "normalize") if step.cosine else seen
    rounds = []
    for t in range(1, T + 1):
        last = t == T
        if V is not None and detach == "all_but_last":
            V = V.detach()
        b = call.zeros(N, I, J) if V is None else torch.einsum("nijrq,njrq->nij", direction, V)
        if prior is not None:
            b = b + prior
        c = couple(b, over=normalize, mask=call.mask, child_ids=call.child_ids, leaky=leaky)
        if detach == "coupling":
            c = c.detach()
        s = torch.einsum("nij,nijrq->njrq", c, u if last else seen)
        V, v = step(s, V, last, bias)
        rounds.append(c)
    assert V is not None
    return v, rounds, V


@dataclass(frozen=True)
class DynamicStep:
    """From the sums of a round to the parents, and to the state: the sum of the parents so far.

    v_j = squash(s_j + bias_j)            V_j = V_j + v_j        (cosine: V_j + s_j / |s_j|)
    """

    squash: Squash
    inner_squash: Squash
    accumulate: bool
    cosine: bool
    scale: float = 1.0

    def __call__(self, s: Tensor, V: Tensor | None, last: bool, bias: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(the state after the round, the parents' poses)."""
        s = s + bias[0] if bias else s
        heard = apply_squash(s, self._heard)
        v = apply_squash(s, self.squash) if last and self.squash != self._heard else heard
        return heard if V is None or not self.accumulate else V + heard, v

    def backward(
        self,
        s: Tensor,
        V: Tensor | None,
        last: bool,
        bias: tuple[Tensor, ...],
        dV: Tensor,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Gradients of s, of the state before the round, and of the bias; `dv` counts in the last round alone."""
        s = s + bias[0] if bias else s
        same = self.squash == self._heard
        ds = squash_backward(s, dV + dv if last and same else dV, self._heard)
        if last and not same:
            ds = ds + squash_backward(s, dv, self.squash)
        return (
            ds,
            dV if self.accumulate else torch.zeros_like(dV),
            tuple(ds.sum(0) for _ in bias),
        )

    @property
    def _heard(self) -> Squash:
        """How the next round hears the sums."""
        return "normalize" if self.cosine else self.inner_squash

    @property
    def traceable(self) -> bool:
        """Whether both squashes are of the family, so that their derivatives are formulas."""
        return resolve(self.squash) is not None and resolve(self.inner_squash) is not None

    def why_not_twice(self, s: Tensor) -> str | None:
        """Why the backward pass cannot go through the squashes a second time; `s`, any sum of votes, is to try them."""
        if torch.compiler.is_compiling() or transformed():
            return None
        return why_not_twice(self.squash, s) or why_not_twice(self.inner_squash, s)


def _check_settings(agreement: str, normalize: str, leaky: bool, detach: str, windows: bool) -> None:
    for name, value, choices in (
        ("agreement", agreement, ("dot", "cosine")),
        ("normalize", normalize, ("parents", "children")),
        ("detach", detach, ("none", "all_but_last", "coupling")),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: take one of {', '.join(map(repr, choices))}")
    if normalize == "children" and (leaky or windows):
        what = "leaky=True adds a parent" if leaky else "child_ids lets parents of several windows compete"
        raise ValueError(f"{what}, so the shares must be taken over parents, but normalize='children'")


@dataclass(frozen=True)
class Dynamic(Rule):
    """Settings of `dynamic`, whose keywords the fields are. Two flags say what a layer should learn beside its weight:

    learn_prior  a prior `[I, J]` to the logits, starting at 0.
    learn_bias   a bias `[J, R, Q]`, starting at 0.1 as in Sabour's code.
    """

    iterations: int = 3
    accumulate: bool = True
    agreement: Agreement = "dot"
    normalize: Over = "parents"
    squash: Squash = "sabour"
    inner_squash: Squash | None = None
    leaky: bool = False
    detach: Detach = "none"
    learn_prior: bool = False
    learn_bias: bool = False

    function: ClassVar[Callable[..., Routed]] = dynamic
    reads_maps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_iterations(self.iterations)
        check_squash("squash", self.squash)
        if self.inner_squash is not None:
            check_squash("inner_squash", self.inner_squash)
        _check_settings(self.agreement, self.normalize, self.leaky, self.detach, False)

    @classmethod
    def sabour(cls, iterations: int = 3) -> "Dynamic":
        """As in the paper of Sabour, Frosst and Hinton 2017."""
        return cls(iterations=iterations)

    @classmethod
    def sabour_code(cls, iterations: int = 3, leaky: bool = False) -> "Dynamic":
        """As in the code of that paper: with a bias inside every round, leaky for CIFAR-10."""
        return cls(iterations=iterations, leaky=leaky, learn_bias=True)

    @classmethod
    def su_first(cls, iterations: int = 3) -> "Dynamic":
        """Su 2018, first form: logits replaced by the last agreement, not accumulated; squash r^2 / (0.5 + r^2)."""
        return cls(iterations=iterations, accumulate=False, squash=SU_SQUASH)

    @classmethod
    def su(cls, iterations: int = 3) -> "Dynamic":
        """Su 2018, second form: as the first, but parents are l2-normalised inside and squashed once, at the end."""
        return cls(iterations=iterations, accumulate=False, squash=SU_SQUASH, inner_squash="normalize")

    @classmethod
    def hauser(cls, iterations: int = 3, normalize: Over = "children") -> "Dynamic":
        """Hauser 2019, products of expert capsules: cosine agreement; shares over children as in its formulas."""
        return cls(iterations=iterations, agreement="cosine", normalize=normalize, detach="coupling")

    @property
    def sums_to(self) -> Over | None:
        """As `normalize` says; a leak takes a share of its own, so that None holds."""
        return None if self.leaky else self.normalize

    def learned(self, I: int, J: int, R: int, P: int, Q: int) -> dict[str, Tensor]:
        """`prior` `[I, J]` at 0 and `bias` `[J, R, Q]` at 0.1, where the flags ask for them."""
        start = {}
        if self.learn_prior:
            start["prior"] = torch.zeros(I, J)
        if self.learn_bias:
            start["bias"] = torch.full((J, R, Q), 0.1)
        return start

    def weight_std(self, I: int, J: int, R: int, P: int, Q: int) -> float:
        """Makes the first round's s_j k times as long as a child, for votes of random direction.

        A length survives a stack of such layers if k > 2 sqrt(a) for Sabour's squash (r^2 / (a + r^2) = r / k has no
        solution below) and if k > 1 for the others, whose slope at 0 is 1. One round takes 1.25 times that.

        Further rounds lengthen s_j by themselves, measured 1.5 to 4 times, for each child finds a parent that agrees;
        and the longer the votes, the more each round multiplies the gradient. So they take 0.75 times the k above, and
        where agreement is a product no standard deviation above 1.4 times it. For Sabour's network this gives 0.11; its
        code has 0.1. Measured over 6 layers of 8 to 256 capsules: lengths of 0.03 to 0.98, gradients within about three
        decades.
        """
        a = self.squash.a if isinstance(self.squash, Sabour) else 1.0
        least = 1.0 if isinstance(self.squash, str) and self.squash != "sabour" else 2 * float(a) ** 0.5
        share = 1 / I if self.normalize == "children" else 1 / J
        std = least / (share * (I * Q) ** 0.5)
        if self.iterations == 1:
            return 1.25 * std
        return min(0.75 * std, 1.4 * least) if self.agreement == "dot" else 0.75 * std
