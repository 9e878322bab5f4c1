"""Rounds without votes: the executor that runs dot-product routing on passes over the children.

A round is a walk over all pairs of children and parents that ends in sums `[N, J, R, Q]`, and a small step on them:

    s = pass(V)                      forward pass over the children, V the state
    V, v = step(s, V)                the algorithm's own: squash and accumulation, or LayerNorm

`run_rounds` runs T of them as one autograd function. Saved are the caller's own tensors and the sums of every round.
The backward walks the rounds in reverse, asks the step for its derivative and a light pass for the state's gradient;
at the end one full pass gives the gradients of poses and weight of all rounds together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchcaps.routing import _ops
from torchcaps.routing._passes import Children, Detach, Round, uniform_share
from torchcaps.routing._round import Call, Over, own_precision

__all__ = ["Plan", "Step", "run_rounds", "zeros_like"]


class Step(Protocol):
    """What an algorithm does with the sums of a round."""

    @property
    def scale(self) -> float:
        """Votes agree with `scale * V`."""

    def __call__(self, s: Tensor, V: Tensor | None, last: bool, extras: tuple[Tensor, ...], /) -> tuple[Tensor, Tensor]:
        """(the next state, the parents' poses), both `[N, J, R, Q]`; only the last round's poses are looked at."""

    def backward(
        self, s: Tensor, V: Tensor | None, last: bool, extras: tuple[Tensor, ...], dV: Tensor, dv: Tensor, /
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Gradients of s, of the state before, and of the extras."""


@dataclass(frozen=True)
class Plan:
    """All that is no tensor."""

    iterations: int
    step: Step
    equations: Callable[
        [Call, Tensor | None, Tensor | None, tuple[Tensor, ...]],
        tuple[Tensor, list[Tensor], Tensor],
    ]
    """The same on whole votes, for derivatives of derivatives."""
    backend: str
    leaky: bool = False
    cosine: bool = False
    over: Over = "parents"
    detach: Detach = "none"


def run_rounds(
    plan: Plan,
    call: Call,
    prior: Tensor | None,
    start: Tensor | None,
    extras: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(parents' poses, no coupling, state)."""
    tensors = (call.poses, call.weight, call.mask, call.vote_offset, prior, start, *extras)
    v, *V = _Rounds.apply(plan, call.windows, *tensors)
    return v, [], V[0] if V else v


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, windows, poses, weight, mask, offset, prior, start, *extras):
        ch = Children(poses, weight, mask, prior, offset, plan.leaky, plan.cosine, plan.over, windows)
        V, sums, lses = start, [], []
        for t in range(plan.iterations):
            if V is None and prior is None:
                s, lse = _ops.uniform(plan.backend, ch), None
            else:
                s, lse = _ops.forward(plan.backend, ch, _seen(plan, ch, V))
            sums.append(s)
            lses.append(lse)
            V, v = plan.step(s, V, t == plan.iterations - 1, extras)
        if v is s:  # what is saved must not change where the caller changes the parents in place
            v = V = v.clone()
        ctx.plan, ctx.windows, ctx.extras = plan, windows, len(extras)
        ctx.save_for_backward(poses, weight, mask, offset, prior, start, *extras, *sums, *lses)
        return (v,) if v is V else (v, V)

    @staticmethod
    def backward(ctx: Any, dv: Tensor, *dV: Tensor):
        with own_precision(dv):
            return _Rounds._backward(ctx, dv, *dV)

    @staticmethod
    def _backward(ctx: Any, dv: Tensor, *given: Tensor):
        plan, windows, T = ctx.plan, ctx.windows, ctx.plan.iterations
        poses, weight, mask, offset, prior, start, *rest = ctx.saved_tensors
        extras, sums, lses = tuple(rest[: ctx.extras]), rest[ctx.extras : ctx.extras + T], rest[ctx.extras + T :]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this derivative is wanted
            return (
                None,
                None,
                *_through_equations(plan, windows, poses, weight, mask, offset, prior, start, extras, dv, *given),
            )
        if not torch.compiler.is_compiling():  # unless the graph is kept, the sums may go before the last pass
            del rest
            ctx.maybe_clear_saved_tensors()
        ch = Children(poses, weight, mask, prior, offset, plan.leaky, plan.cosine, plan.over, windows)
        states = [start]
        for t in range(T - 1):
            states.append(plan.step(sums[t], states[t], False, extras)[0])
        dV = given[0] if given else zeros_like(dv)
        scored: list[Round] = []
        base, dextras = None, [torch.zeros_like(e) for e in extras]
        for t in reversed(range(T)):
            V = states.pop()
            ds, dV, parts = plan.step.backward(sums[t], V, t == T - 1, extras, dV, dv)
            dextras = [a + b for a, b in zip(dextras, parts, strict=True)]
            if V is None and prior is None:
                base = ds = ds * uniform_share(ch)
                break
            r = Round(_seen(plan, ch, V), sums[t] if plan.over == "children" else None, lses[t], ds)
            scored.append(r)
            if plan.detach == "all_but_last":
                dV = zeros_like(dV)
                break
            if plan.detach == "none" and V is not None:
                dV = torch.add(dV, _ops.backward_state(plan.backend, ch, r), alpha=plan.step.scale)
        del sums
        g = _ops.backward_full(plan.backend, ch, scored, base, plan.detach)
        return (
            None,
            None,
            g.poses,
            g.weight,
            None,
            g.offset,
            g.prior,
            None if start is None else dV,
            *dextras,
        )


def _seen(plan: Plan, ch: Children, V: Tensor | None) -> Tensor:
    """The state as votes agree with it; a first round with a prior and no state agrees with nothing."""
    if V is None:
        return ch.poses.new_zeros(ch.parents)
    return V * plan.step.scale


def zeros_like(x: Tensor) -> Tensor:
    """Zeros of the shape of x that take no memory; read only."""
    return x.new_zeros(()).expand_as(x)


def _through_equations(plan: Plan, windows, poses, weight, mask, offset, prior, start, extras, *d):
    """The same gradients as a differentiable function of everything."""
    call = Call(poses, weight, None, offset, mask, None, poses.dtype, False, windows)
    v, _, V = plan.equations(call, prior, start, extras)
    inputs = (poses, weight, mask, offset, prior, start, *extras)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad((v, V)[: len(d)], wanted, d, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
