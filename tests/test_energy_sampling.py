"""Samplers on the product of balls, and log Z: known moments, known constants, flights that can be run backwards."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.energy import (
    ExpertCapsules,
    annealed_log_partition,
    exact_log_partition,
    flight,
    hmc,
    langevin,
    log_volume,
    uniform_in_balls,
)
from torchcaps.routing import Dynamic


def a_model(I: int = 3, J: int = 1, P: int = 4, Q: int = 5, std: float = 3.0, **options: Any) -> ExpertCapsules:
    return ExpertCapsules(I, J, P, Q, std=std, **options).double()


def a_coupling(I: int, J: int) -> Tensor:
    coupling = torch.rand(I, J, dtype=torch.float64)
    return coupling / coupling.sum(0)


def within(samples: Tensor, expected: Tensor, errors: float = 4.0) -> None:
    """The mean over the first dimension is the expected one, within so many of its standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < errors * error).all(), (samples.mean(0), expected, error)


def exact_samples(form: Tensor, count: int) -> Tensor:
    """Of the density 1 + x A x^T on one ball, by rejection from the uniform law."""
    most, kept = 1 + torch.linalg.eigvalsh(form)[-1], []
    while sum(map(len, kept)) < count:
        x = uniform_in_balls(4 * count, 1, len(form), dtype=torch.float64)
        height = 1 + torch.einsum("nirp,pq,nirq->n", x, form, x)
        kept.append(x[torch.rand(len(x), dtype=torch.float64) * most < height])
    return torch.cat(kept)[:count]


def second_moment(form: Tensor) -> Tensor:
    """E[x x^T] under 1 + x A x^T on one ball of d numbers, in closed form."""
    d = len(form)
    eye = torch.eye(d, dtype=torch.float64)
    top = eye / (d + 2) + (form.trace() * eye + 2 * form) / ((d + 2) * (d + 4))
    return top / (1 + form.trace() / (d + 2))


@pytest.mark.parametrize("pose", [1, 2, 3, 8])
@pytest.mark.parametrize("time", [0.1, 1.0, 30.0])
def test_a_flight_stays_in_the_ball_keeps_its_speed_and_can_be_run_backwards(pose: int, time: float) -> None:
    x = uniform_in_balls(500, 2, pose, dtype=torch.float64)
    v = torch.randn_like(x)
    y, w = flight(x, v, time)
    assert y.norm(dim=-1).max() <= 1 + 1e-12
    torch.testing.assert_close(w.norm(dim=-1), v.norm(dim=-1), rtol=1e-9, atol=0)
    back, u = flight(y, -w, time)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-8)
    torch.testing.assert_close(u, -v, rtol=0, atol=1e-7)


def test_a_flight_is_reflected_as_by_a_wall_step_after_step() -> None:
    x = uniform_in_balls(50, 1, 2, dtype=torch.float64)
    v = 3 * torch.randn_like(x)
    end, velocity = flight(x, v, 1.0)
    y, w, pieces = x.clone(), v.clone(), 20_000
    for _ in range(pieces):
        y = y + w / pieces
        normal = y / y.norm(dim=-1, keepdim=True)
        out = (y.norm(dim=-1, keepdim=True) > 1) & ((w * normal).sum(-1, keepdim=True) > 0)
        w = torch.where(out, w - 2 * (w * normal).sum(-1, keepdim=True) * normal, w)
    torch.testing.assert_close(end, y, rtol=0, atol=1e-2)
    torch.testing.assert_close(velocity, w, rtol=0, atol=0.1)


def test_uniform_capsules_fill_their_balls_evenly() -> None:
    x = uniform_in_balls(4000, 2, 3, dtype=torch.float64)
    within(x.norm(dim=-1).squeeze(-1) ** 3, torch.full((2,), 0.5))
    within(x[:, :, 0], torch.zeros(2, 3))


@pytest.mark.parametrize("kernel", ["hmc", "langevin"])
@pytest.mark.parametrize("start", ["exact", "far"])
def test_the_kernels_keep_and_reach_a_density_that_is_known(kernel: str, start: str) -> None:
    root = 3 * torch.randn(3, 3, dtype=torch.float64)
    form = root @ root.T
    count = 4000

    def log_density(x: Tensor) -> Tensor:
        return torch.einsum("nirp,pq,nirq->n", x, form, x).log1p()

    x = exact_samples(form, count) if start == "exact" else torch.zeros(count, 1, 1, 3, dtype=torch.float64) + 0.01
    moment = second_moment(form)
    if start == "exact":
        within(torch.einsum("nirp,nirq->npq", x, x), moment)
    if kernel == "hmc":
        chain = hmc(log_density, x, step_size=0.4, steps=6, rounds=4 if start == "exact" else 80)
    else:
        chain = langevin(log_density, x, step_size=0.5, rounds=10 if start == "exact" else 160)
    assert 0.4 < chain.acceptance < 0.99
    assert chain.visible.norm(dim=-1).max() <= 1 + 1e-12
    within(torch.einsum("nirp,nirq->npq", chain.visible, chain.visible), moment)
    within(chain.visible.flatten(1), torch.zeros(3))
    torch.testing.assert_close(chain.log_density, log_density(chain.visible))


def test_a_model_that_routes_is_sampled_with_its_own_coupling_though_the_slope_holds_it_constant() -> None:
    """Two visible capsules of one number each: moments are sums over a grid."""
    torch.manual_seed(2)
    model = a_model(2, 2, 1, 3, std=4.0, routing=Dynamic.hauser(normalize="parents"))
    grid = torch.linspace(-1, 1, 201, dtype=torch.float64)
    x, y = torch.meshgrid(grid, grid, indexing="ij")
    states = torch.stack([x.flatten(), y.flatten()], 1)[:, :, None, None]
    p = (-model.free_energy(states)).exp().detach()
    expected = (p[:, None] * states.flatten(1) ** 2).sum(0) / p.sum()
    start = uniform_in_balls(3000, 2, 1, dtype=torch.float64)
    chain = hmc(lambda x: -model.free_energy(x), start, step_size=0.2, steps=6, rounds=15)
    within(chain.visible.flatten(1) ** 2, expected)
    assert chain.acceptance > 0.5


def test_samplers_say_what_they_cannot_do() -> None:
    x = torch.zeros(2, 1, 1, 3)
    for settings, message in (
        ({"step_size": 0.0}, "step_size=0.0 must be above 0"),
        ({"step_size": 0.1, "steps": 0}, "steps=0 must be a whole number"),
        ({"step_size": 0.1, "rounds": 1.5}, "rounds=1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            hmc(lambda x: x.sum((1, 2, 3)), x, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"start inside balls of radius 1, but these hold capsules of length 1\.73"):
        hmc(lambda x: x.sum((1, 2, 3)), x + 1, step_size=0.1)
    with pytest.raises(ValueError, match="nan"):
        langevin(lambda x: x.sum((1, 2, 3)), x * torch.nan, step_size=0.1)


@pytest.mark.parametrize("J", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_the_closed_log_partition_is_the_integral(J: int, bias: bool) -> None:
    """One ball of 2 numbers, by quadrature over radius and angle; a product of intervals, by its polynomial."""
    model = a_model(1, J, 2, 3, bias=bias)
    if model.bias is not None:
        model.bias.data.normal_()
    r = torch.linspace(0, 1, 2001, dtype=torch.float64)
    angle = torch.arange(64, dtype=torch.float64) * 2 * math.pi / 64
    x = torch.stack([r[:, None] * angle.cos(), r[:, None] * angle.sin()], -1).reshape(-1, 1, 1, 2)
    coupling = torch.ones(1, J, dtype=torch.float64)
    height = (-model.free_energy(x.clamp(-1, 1), coupling.expand(len(x), -1, -1))).exp().view(2001, 64).mean(1)
    Z = torch.trapezoid(height * r, r) * 2 * math.pi
    torch.testing.assert_close(exact_log_partition(model, coupling), Z.log(), rtol=1e-5, atol=0)

    model = a_model(3, J, 1, 2)
    coupling = a_coupling(3, J)
    nodes = torch.tensor([-math.sqrt(0.6), 0.0, math.sqrt(0.6)], dtype=torch.float64)  # Gauss: exact to degree 5
    weights = torch.tensor([5, 8, 5], dtype=torch.float64) / 9
    x = torch.cartesian_prod(nodes, nodes, nodes)[:, :, None, None]
    volume = torch.cartesian_prod(weights, weights, weights).prod(1)
    height = (-model.free_energy(x, coupling.expand(len(x), -1, -1))).exp()
    torch.testing.assert_close(exact_log_partition(model, coupling), (height * volume).sum().log(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("J", [1, 2])
def test_annealed_importance_sampling_meets_the_closed_form(J: int) -> None:
    model, coupling = a_model(J=J), a_coupling(3, J)
    estimate = annealed_log_partition(model, coupling, temperatures=20, chains=400, step_size=0.4)
    assert 0 < estimate.standard_error < 0.05
    assert 0.4 < estimate.acceptance < 1
    exact = exact_log_partition(model, coupling).item()
    assert exact - log_volume(3, 4) > 1  # far from the uniform law
    assert abs(estimate.log_z - exact) < 3 * estimate.standard_error


def test_closed_forms_and_couplings_are_refused_where_they_do_not_hold() -> None:
    with pytest.raises(ValueError, match="not for 3 with line=0"):
        exact_log_partition(a_model(J=3), a_coupling(3, 3))
    with pytest.raises(ValueError, match="line=1"):
        exact_log_partition(a_model(line=1), a_coupling(3, 1))
    centred = a_model()
    centred.centre.fill_(0.1)
    with pytest.raises(ValueError, match="and a centre"):
        exact_log_partition(centred, a_coupling(3, 1))
    for estimate in (exact_log_partition, annealed_log_partition):
        with pytest.raises(ValueError, match=r"coupling \[1, 3, 1\] must be a constant \[3, 1\]"):
            estimate(a_model(), a_coupling(3, 1)[None])
    with pytest.raises(ValueError, match="chains=1"):
        annealed_log_partition(a_model(), a_coupling(3, 1), chains=1)
