"""One layer in every form: backends, the einsum style of tutorials, one uniform round, and what compiling gives."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcaps.bench.measuring import by_itself, peak, spent
from torchcaps.bench.workloads import Workload

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """One line of the table. Seconds; bytes, or None where the platform does not tell."""

    workload: str
    batch: int
    form: str
    forward: float
    both: float
    memory_forward: int | None
    memory_both: int | None


def measure(workload: Workload, forms: Sequence[str], device: str = "cpu", repeats: int = 5) -> list[Measured]:
    """Time and memory of a workload in every form, the times interleaved."""
    calls, inputs = _calls(workload, forms, device)
    forward = {form: float("inf") for form in forms}
    both = dict(forward)
    for repeat in range(repeats + 1):  # the first is a warm-up
        for form, call in calls.items():
            with torch.no_grad():
                alone = spent(functools.partial(call, *inputs), device)
            together = spent(functools.partial(_forward_backward, call, inputs), device)
            if repeat:
                forward[form], both[form] = min(forward[form], alone), min(both[form], together)
    asked = (workload, forms, device, torch.get_num_threads())
    memory = by_itself(_memory, *asked) if device == "cpu" else _memory(*asked)
    return [Measured(workload.name, workload.N, form, forward[form], both[form], *memory[form]) for form in forms]


def _memory(
    workload: Workload, forms: Sequence[str], device: str, threads: int
) -> dict[str, tuple[int | None, int | None]]:
    """Bytes that (forward, forward + backward) add to the peak, after a warm-up."""
    torch.set_num_threads(threads)
    calls, inputs = _calls(workload, forms, device)
    memory = {}
    for form, call in calls.items():
        both = functools.partial(_forward_backward, call, inputs)
        both()
        with torch.no_grad():
            call(*inputs)
            alone = peak(functools.partial(call, *inputs), device)
        memory[form] = alone, peak(both, device)
    return memory


def _calls(
    workload: Workload, forms: Sequence[str], device: str
) -> tuple[dict[str, Callable[[Tensor, Tensor], Tensor]], list[Tensor]]:
    route, inputs = workload.make(device)
    return {form: _call(workload, route, form, device) for form in forms}, inputs


def _call(
    workload: Workload, route: Callable[..., Tensor], form: str, device: str
) -> Callable[[Tensor, Tensor], Tensor]:
    if form == "tutorial":
        return lambda poses, weight: _tutorial(workload, poses, weight)
    if form == "batched":
        return lambda poses, weight: _batched(workload, poses, weight)
    if form == "uniform":
        once, _ = replace(workload, rule=replace(workload.rule, iterations=1)).make(device)
        return lambda poses, weight: once(poses, weight, "auto")
    if form == "compiled":
        compiled = torch.compile(lambda poses, weight: route(poses, weight, "reference"))
        return lambda poses, weight: compiled(poses, weight)
    return lambda poses, weight: route(poses, weight, form)


def _tutorial(workload: Workload, poses: Tensor, weight: Tensor) -> Tensor:
    """Dynamic routing as tutorials write it, or a convolution by unfolding and one small product for each vote."""
    if workload.window is None:
        x, w = poses[:, :, 0], weight.expand(poses.shape[1], -1, -1, -1)
        u = torch.einsum("ijpq,nip->nijq", w, x)
        b = u.new_zeros(u.shape[:3])
        for _ in range(3):
            s = torch.einsum("nij,nijq->njq", b.softmax(-1), u)
            q = (s**2).sum(-1, keepdim=True)
            v = q / (1 + q) * s / torch.sqrt(q + 1e-8)
            b = b + torch.einsum("njq,nijq->nij", v, u)
        return v
    _, kernel, stride = workload.window
    x = poses.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [N, C, h, w, R, P, k, k]
    x = x.permute(0, 2, 3, 1, 6, 7, 4, 5).flatten(3, 5)  # [N, h, w, children, R, P]
    u = x[:, :, :, :, None] @ weight  # one 4x4 product for each vote
    p = u.sum(3) / workload.J
    p = torch.nn.functional.layer_norm(p, p.shape[-2:])
    for _ in range(workload.rule.iterations - 1):
        r = ((u * p[:, :, :, None]).sum((-2, -1)) * (workload.R * workload.Q) ** -0.5).softmax(-1)
        p = torch.nn.functional.layer_norm((r[..., None, None] * u).sum(3), p.shape[-2:])
    return p


def _batched(workload: Workload, poses: Tensor, weight: Tensor) -> Tensor:
    """A convolution as a careful hand writes it: votes from one product batched over children, and then products."""
    assert workload.window is not None
    _, kernel, stride = workload.window
    J, R, Q = workload.J, workload.R, workload.Q
    x = poses.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [N, C, h, w, R, P, k, k]
    N, _, height, width = x.shape[:4]
    x = x.permute(1, 6, 7, 0, 2, 3, 4, 5).flatten(0, 2).flatten(1, 4)  # [children, N h w R, P]
    u = torch.bmm(x, weight.transpose(1, 2).flatten(2))  # [children, N h w R, J Q]
    places = N * height * width
    u = u.view(-1, places, R, J, Q).permute(1, 3, 0, 2, 4).reshape(places * J, -1, R * Q)  # a list of votes per parent
    p = torch.nn.functional.layer_norm((u.sum(1) / J).view(-1, R, Q), (R, Q))
    for _ in range(workload.rule.iterations - 1):
        b = torch.bmm(u, p.view(places * J, R * Q, 1)) * (R * Q) ** -0.5
        c = b.view(places, J, -1).softmax(1).view(places * J, 1, -1)
        p = torch.nn.functional.layer_norm(torch.bmm(c, u).view(-1, R, Q), (R, Q))
    return p.view(N, height, width, J, R, Q)


def _forward_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
