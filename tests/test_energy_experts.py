"""Expert capsules: the golden numbers, the energy by brute force, the symmetries, the options, mistakes at the door."""

import copy
import dataclasses
import math
from typing import Any

import golden
import pytest
import torch
from golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchcaps import Capsules, squash
from torchcaps.energy import ExpertCapsules, firing_patterns, log_joint, log_probability_of_states, uniform_in_balls
from torchcaps.routing import Dynamic
from torchcaps.types import CapsuleLayer

OPTIONS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "shares over parents": {"routing": Dynamic.hauser(normalize="parents")},
    "one round": {"routing": Dynamic.hauser(iterations=1)},
    "dot agreement": {"routing": Dynamic(normalize="children")},
    "bias": {"bias": True},
    "line": {"line": 2},
    "all": {"bias": True, "line": 3, "centre": True},
}


def a_model(caps: int = 4, *, centre: bool = False, seed: int = 0, std: float = 4.0, **options: Any) -> ExpertCapsules:
    torch.manual_seed(seed)
    model = ExpertCapsules(6, caps, 3, 5, std=std, **options).double()
    if model.bias is not None:
        model.bias.data.normal_()
    if centre:
        model.centre_on(some_visible(20, seed=seed + 1))
    return model


def some_visible(count: int = 7, seed: int = 5) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return uniform_in_balls(count, 6, 3, generator=random, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def golden_model(g: Golden, name: str) -> ExpertCapsules:
    I, J, D, d = g["W"].shape
    over: Any = "children" if "normin" in name else "parents"
    rounds = int(g.number("routing_iterations")) if "routing_iterations" in g else 1
    model = ExpertCapsules(I, J, d, D, routing=Dynamic.hauser(rounds, normalize=over)).double()
    model.weight.data.copy_(g["W"].transpose(-1, -2))
    return model


@pytest.mark.parametrize("name", golden.EXPERTS)
def test_the_model_makes_hausers_numbers(name: str) -> None:
    g = Golden(name)
    model = golden_model(g, name)
    visible = g["X"].unsqueeze(-2)
    z, coupling = model.up(visible)
    g.check("c", coupling)
    g.check("z", z.squeeze(-2))
    g.check("x_hid", model.pose(z).squeeze(-2))
    g.check("prob", model.firing(z))
    g.check("free_energy", model.free_energy(visible))
    routed = model.route(Capsules(visible), return_coupling=True)
    g.check("x_hid", routed.poses.squeeze(-2))
    g.check("prob", routed.activations)  # type: ignore[arg-type]
    g.check("c", routed.coupling)  # type: ignore[arg-type]
    down = model.down(model.pose(z), coupling)
    g.check("x_vis_rec", down.squeeze(-2))
    again = model.up(down, coupling)[0]
    g.check("z_hid_rec", again.squeeze(-2))
    g.check("x_hid_rec", model.pose(again).squeeze(-2))
    g.check("free_energy_rec", model.free_energy(down, coupling))


def test_enumeration_gives_the_stored_likelihood_and_its_gradient_is_the_closed_one() -> None:
    g = Golden(golden.ENUMERATION)
    model = golden_model(g, "normin")
    states = g["X_states"].unsqueeze(-2)
    coupling = g["c"].expand(len(states), -1, -1)
    joint = log_joint(model, states, coupling)
    order = [int(row @ torch.tensor([8.0, 4.0, 2.0, 1.0])) for row in g["patterns"].float()]
    close(firing_patterns(4)[order].double(), g["patterns"])
    g.check("log_joint_unnorm", joint[:, order])
    g.check("logZ", joint.logsumexp((0, 1)))
    log_p = log_probability_of_states(model, states, coupling)
    g.check("log_p", log_p)
    likelihood = (g["q"] * log_p).sum()
    g.check("loglik", likelihood)
    (gradient,) = torch.autograd.grad(likelihood, model.weight)
    golden.close(gradient.transpose(-1, -2), g["grad_W_loglik"], golden.GRADIENTS, "grad_W_loglik")
    # eq. 18: the data's expectation of the ascent less the model's
    z = model.up(states, coupling)[0]
    weights = g["q"] - log_p.exp()
    closed = sum(
        w * model.ascent(states[n : n + 1], z[n : n + 1], coupling[n : n + 1]) for n, w in enumerate(weights.detach())
    )
    assert isinstance(closed, Tensor)
    golden.close(closed.transpose(-1, -2), g["grad_W_loglik"], golden.GRADIENTS, "grad_W_loglik")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_free_energy_and_firing_are_sums_over_all_firing_patterns(options: dict[str, Any]) -> None:
    model, visible = a_model(**options), some_visible()
    patterns = firing_patterns(4).double()
    joint = log_joint(model, visible)
    for k, pattern in enumerate(patterns):
        close(-model.energy(visible, pattern.expand(7, -1)), joint[:, k])
    close(joint.logsumexp(1), -model.free_energy(visible))
    posterior = joint.softmax(1)
    firing = model.firing(model.up(visible)[0])
    close(posterior @ patterns, firing)
    # given x the capsules fire independently
    product = torch.where(patterns[None] > 0, firing[:, None], 1 - firing[:, None]).prod(2)
    close(product, posterior)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_length_of_a_pose_is_the_firing_probability_and_its_direction_that_of_z(options: dict[str, Any]) -> None:
    model = a_model(**options)
    z = model.up(some_visible())[0]
    poses, firing = model.pose(z), model.firing(z)
    ball, line = poses[..., : 5 - model.line], poses[..., 5 - model.line :]
    close(ball.norm(dim=-1).squeeze(-1), firing)
    close(torch.cosine_similarity(ball, z[..., : 5 - model.line], -1), torch.ones(7, 4, 1, dtype=torch.float64))
    close(line, firing[..., None, None] * z[..., 5 - model.line :])
    if not model.line and model.bias is None:
        close(poses, squash(z))


def test_numbers_on_a_line_are_those_of_a_normal_law_integrated_out() -> None:
    model = a_model(line=1)
    z = model.up(some_visible())[0]
    t = torch.linspace(-40, 40, 8001, dtype=torch.float64)
    mean = z[..., -1:]
    # exp(-E(x, h = 1, t)) = |a|^2 exp(t t(x) - t^2 / 2) / sqrt(2 pi), whose integral over t is |a|^2 exp(t(x)^2 / 2)
    density = torch.exp(t * mean - t.square() / 2) / math.sqrt(2 * math.pi) * z[..., :-1].square().sum(-1, keepdim=True)
    fires = torch.trapezoid(density, t).squeeze(-1)
    close(model.firing(z), fires / (1 + fires))
    close(model.free_energy_of(z), -fires.log1p().sum(-1))
    mean_of_t = torch.trapezoid(t * density, t).squeeze(-1) / (1 + fires)  # 0 where the capsule is silent
    close(model.pose(z)[..., -1].squeeze(-1), mean_of_t)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_pull_is_minus_the_slope_of_the_free_energy(options: dict[str, Any]) -> None:
    model = a_model(**options)
    z = model.up(some_visible())[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(-model.free_energy_of(z).sum(), z)
    close(model.pull(z), slope)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_ascent_is_the_gradient_of_the_mean_log_density_with_the_coupling_constant(options: dict[str, Any]) -> None:
    model, visible = a_model(**options), some_visible()
    z, coupling = model.up(visible)
    loss = model.free_energy(visible, coupling.detach()).mean()
    (gradient,) = torch.autograd.grad(loss, model.weight)
    close(model.ascent(visible, z, coupling), -gradient)


def test_the_default_rule_holds_the_coupling_constant_and_detach_none_gives_the_whole_gradient() -> None:
    visible = some_visible()
    model, whole = a_model(), a_model(routing=Dynamic(agreement="cosine", normalize="children", detach="none"))
    z, coupling = model.up(visible)
    (partial,) = torch.autograd.grad(model.free_energy(visible).mean(), model.weight)
    close(partial, -model.ascent(visible, z, coupling))
    weight = whole.weight
    (gradient,) = torch.autograd.grad(whole.free_energy(visible).mean(), weight)
    assert (gradient - partial).norm() > 0.05 * partial.norm()
    direction = torch.randn_like(weight)
    values = []
    for step in (1e-6, -1e-6):
        weight.data.add_(direction, alpha=step)
        values.append(whole.free_energy(visible).mean().item())
        weight.data.add_(direction, alpha=-step)
    close((gradient * direction).sum(), torch.tensor((values[0] - values[1]) / 2e-6, dtype=torch.float64), rtol=1e-6)


@given(seed=st.integers(0, 99), over=st.sampled_from(["children", "parents"]), rounds=st.integers(1, 4))
def test_no_such_model_tells_capsules_from_their_negatives(seed: int, over: Any, rounds: int) -> None:
    model, visible = a_model(routing=Dynamic.hauser(rounds, normalize=over), seed=seed), some_visible(seed=seed)
    assert torch.equal(model.free_energy(-visible), model.free_energy(visible))
    assert torch.equal(model.up(-visible)[1], model.up(visible)[1])
    assert torch.equal(model.up(-visible)[0], -model.up(visible)[0])


def test_a_centre_breaks_the_evenness_about_zero_and_moves_it() -> None:
    model = a_model(centre=True)
    visible = 0.5 * some_visible()
    assert ((model.free_energy(-visible) - model.free_energy(visible)).abs() > 1e-2).all()
    close(model.free_energy(2 * model.centre - visible), model.free_energy(visible))
    close(model.centre, some_visible(20, seed=1).mean(0))


def test_silent_capsules_come_down_as_the_centre() -> None:
    model = a_model(centre=True)
    silent, coupling = torch.zeros(2, 4, 1, 5).double(), torch.full((2, 6, 4), 1 / 6).double()
    close(model.down(silent, coupling), model.centre.expand(2, -1, -1, -1))
    close(a_model().down(silent, coupling), torch.zeros(2, 6, 1, 3).double())


@pytest.mark.parametrize("line", [0, 2])
def test_turning_a_capsules_directions_changes_no_energy(line: int) -> None:
    model, visible = a_model(line=line), some_visible()
    before, firing = model.free_energy(visible), model.firing(model.up(visible)[0])
    turn = torch.linalg.qr(torch.randn(4, 5 - line, 5 - line, dtype=torch.float64))[0]
    with torch.no_grad():
        model.weight[..., : 5 - line] = torch.einsum("ijpq,jqr->ijpr", model.weight[..., : 5 - line], turn)
    close(model.free_energy(visible), before)
    close(model.firing(model.up(visible)[0]), firing)


def test_the_order_of_hidden_capsules_does_not_matter() -> None:
    model, visible = a_model(bias=True), some_visible()
    before, firing = model.free_energy(visible), model.firing(model.up(visible)[0])
    order = torch.tensor([2, 0, 3, 1])
    assert model.bias is not None
    model.weight.data, model.bias.data = model.weight.data[:, order], model.bias.data[order]
    close(model.free_energy(visible), before)
    close(model.firing(model.up(visible)[0]), firing[:, order])


def test_with_shares_over_children_z_is_no_longer_than_the_largest_weight() -> None:
    model = a_model()
    z = model.up(squash(1e6 * torch.randn(50, 6, 1, 3, dtype=torch.float64)))[0]
    largest = torch.linalg.matrix_norm(model.weight, 2).amax(0)
    assert (z.norm(dim=-1).squeeze(-1) <= largest * (1 + 1e-12)).all()


def test_energies_keep_their_digits_near_zero_and_do_not_overflow() -> None:
    model = a_model(line=2).float()
    z = torch.zeros(3, 4, 1, 5)
    z[0, :, 0, 0] = 1e-6  # 1 + |a|^2 is 1 in float32
    z[1, :, 0, 0] = 1e15
    z[2, :, 0] = 60.0  # exp(|t|^2 / 2) is e^3600
    z.requires_grad_()
    F = model.free_energy_of(z)
    close(F[0].detach(), torch.tensor(-4e-12), rtol=1e-5, atol=0)
    close(F[1].detach(), torch.tensor(-4 * 30 * math.log(10)), rtol=1e-5)
    close(F[2].detach(), torch.tensor(-4 * (3600 + math.log(3 * 3600))), rtol=1e-5)
    (slope,) = torch.autograd.grad(F.sum() + model.firing(z).sum() + model.pose(z).sum(), z)
    assert slope.isfinite().all()
    assert model.pull(z).isfinite().all()
    close(model.firing(z)[1:].detach(), torch.ones(2, 4), rtol=1e-6)


def test_energies_come_from_z_and_stay_right_where_the_squashed_pose_has_lost_it() -> None:
    model = a_model(std=3e4).float()
    visible = 0.9 * some_visible().float()
    z = model.up(visible)[0]
    assert (model.firing(z) == 1).any()
    close(model.free_energy(visible).double(), copy.deepcopy(model).double().free_energy(visible.double()), rtol=1e-5)


def test_with_a_given_coupling_nothing_is_routed() -> None:
    model, visible = a_model(centre=True), some_visible()
    coupling = torch.rand(7, 6, 4, dtype=torch.float64)
    z, same = model.up(visible, coupling)
    assert same is coupling
    loops = torch.stack(
        [
            sum(coupling[n, i, j] * (visible[n, i] - model.centre[i]) @ model.weight[i, j] for i in range(6))  # type: ignore[misc]
            for n in range(7)
            for j in range(4)
        ]
    )
    close(z, loops.view(7, 4, 1, 5))


def test_a_large_batch_is_routed_in_parts_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, visible = a_model(), some_visible(9)
    whole = model.up(visible)
    monkeypatch.setattr("torchcaps.energy.experts.VOTES_AT_ONCE", 4 * 6 * 4 * 5)
    parts = model.up(visible)
    close(parts[0], whole[0], rtol=1e-12)
    close(parts[1], whole[1], rtol=1e-12)
    assert model.up(visible[:0])[0].shape == (0, 4, 1, 5)


@pytest.mark.parametrize("over", ["children", "parents"])
@pytest.mark.parametrize("rounds", [2, 4])
def test_without_gradients_the_lean_rounds_are_those_of_the_rule(rounds: int, over: Any) -> None:
    model, visible = a_model(routing=Dynamic.hauser(rounds, normalize=over), centre=True), some_visible()
    visible[:, 2] = model.centre[2]  # votes of length 0
    routed = model.up(visible)
    with torch.no_grad():
        lean = model.up(visible)
    assert routed[0].requires_grad
    close(lean[0], routed[0])
    close(lean[1], routed[1])


def test_other_rules_are_routed_by_the_core_with_gradients_and_without() -> None:
    model = a_model(routing=dataclasses.replace(Dynamic.hauser(), accumulate=False))
    routed, visible = model.up(some_visible()), some_visible()
    with torch.no_grad():
        close(model.up(visible)[1], routed[1])
    assert not torch.allclose(routed[1], a_model().up(visible)[1])


def test_it_is_a_layer_like_others() -> None:
    model = a_model()
    assert isinstance(model, CapsuleLayer)
    assert (model.out_caps, model.out_pose) == (4, (1, 5))
    hidden = model(Capsules(some_visible().view(7, 2, 3, 1, 3)))
    assert hidden.poses.shape == (7, 4, 1, 5)
    close(hidden.lengths, hidden.activations)
    mask = torch.ones(7, 6, dtype=torch.bool)
    mask[:, 4:] = False
    visible = some_visible()
    visible[:, 4:] = torch.nan
    routed = a_model().route(Capsules(torch.nan_to_num(visible)), mask, return_coupling=True)
    assert routed.coupling is not None
    assert (routed.coupling[:, 4:] == 0).all()


def test_a_model_comes_back_from_its_state_with_centre_and_bias() -> None:
    model, again = a_model(bias=True, centre=True), a_model(bias=True, seed=9)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.free_energy(some_visible()), model.free_energy(some_visible()))


@pytest.mark.parametrize("std", [1.0, 4.0])
def test_weights_start_as_said(std: float) -> None:
    model = ExpertCapsules(std=std)
    assert sum(p.numel() for p in model.parameters()) == 1_474_560
    close(model.weight.std(), torch.tensor(std / 8**0.5), rtol=1e-2)


def outside() -> Tensor:
    visible = some_visible()
    visible[3, 2] = 0.8
    return visible


def with_nan() -> Tensor:
    visible = some_visible()
    visible[3, 2, 0, 1] = torch.nan
    return visible


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (outside(), r"up to 1.38\d+ long, but the density lives on balls of radius 1"),
        (with_nan(), "hold NaN"),
        (some_visible()[:, :5], r"takes visible capsules \['N', 6, 1, 3\], not \[7, 5, 1, 3\]"),
        (some_visible().squeeze(-2), r"not \[7, 6, 3\].*unsqueeze"),
        (torch.zeros(7, 6, 1, 3, dtype=torch.long), "must be floating point"),
        ("capsules", "not str"),
    ],
)
@pytest.mark.parametrize("method", ["free_energy", "up", "centre_on", "energy", "route"])
def test_visible_capsules_that_do_not_fit_are_refused_at_the_door(method: str, visible: Any, message: str) -> None:
    model = a_model()
    if method == "route":
        if not isinstance(visible, Tensor) or visible.dim() != 4:
            return
        visible = Capsules(visible)
    extra = (torch.ones(7, 4),) if method == "energy" else ()
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(visible, *extra)


def test_a_length_that_rounding_carried_to_one_passes() -> None:
    model = a_model().float()
    assert model.free_energy(squash(1e5 * torch.randn(2, 6, 1, 3))).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_caps": 0}, "in_caps must be a whole number of 1 or more"),
        ({"out_pose": 2.5}, "out_pose must be a whole number"),
        ({"line": 16}, "line=16 of 16 numbers lie on a line"),
        ({"line": -1}, "line=-1"),
        ({"std": -1.0}, "std=-1.0"),
        ({"routing": "dynamic"}, "routing must be a Dynamic rule"),
        ({"routing": Dynamic(leaky=True)}, "without leak"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertCapsules(**options)


def test_fires_must_say_of_every_capsule() -> None:
    with pytest.raises(ValueError, match=r"fires \[7, 3\] must say of each of 4 capsules"):
        a_model().energy(some_visible(), torch.ones(7, 3))


def test_a_silent_capsule_that_fires_has_infinite_energy_and_one_that_does_not_adds_nothing() -> None:
    model = a_model()
    model.weight.data[:, 0] = 0
    visible = some_visible()
    assert (model.energy(visible, torch.tensor([1.0, 0, 0, 0]).expand(7, -1)) == torch.inf).all()
    assert (model.energy(visible, torch.zeros(7, 4)) == 0).all()
    assert log_joint(model, visible)[:, :8].isfinite().all()
