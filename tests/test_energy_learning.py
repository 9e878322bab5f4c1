"""How expert capsules learn: the source's update, what its loss is, chains, contrasts, and that learning learns."""

from typing import Any

import golden
import pytest
import torch
from golden import Golden
from torch import Tensor

from torchcaps import squash
from torchcaps.energy import (
    ContrastiveDivergence,
    ExpertCapsules,
    PersistentDivergence,
    SampledDivergence,
    contrastive_loss,
    contrastive_update,
    log_probability_of_states,
    mix,
    train_experts,
    uniform_in_balls,
)
from torchcaps.energy.measures import shuffled
from torchcaps.routing import Dynamic

OPTIONS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "shares over parents": {"routing": Dynamic.hauser(normalize="parents")},
    "bias and line": {"bias": True, "line": 2},
}


def a_model(seed: int = 0, **options: Any) -> ExpertCapsules:
    torch.manual_seed(seed)
    model = ExpertCapsules(6, 4, 3, 5, std=4.0, **options).double()
    if model.bias is not None:
        model.bias.data.normal_()
    return model


def some_visible(count: int = 7, seed: int = 5) -> Tensor:
    return uniform_in_balls(count, 6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clustered(count: int = 200, seed: int = 3) -> Tensor:
    """Capsules that belong together: each example is one of three patterns, with noise."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(3, 6, 1, 3, generator=random, dtype=torch.float64)
    which = torch.randint(3, (count,), generator=random)
    return squash(patterns[which] + 0.2 * torch.randn(count, 6, 1, 3, generator=random, dtype=torch.float64))


@pytest.mark.parametrize("name", golden.EXPERTS)
def test_one_step_of_mixing_and_the_update_are_hausers(name: str) -> None:
    g = Golden(name)
    I, J, D, d = g["W"].shape
    over: Any = "children" if "normin" in name else "parents"
    model = ExpertCapsules(I, J, d, D, routing=Dynamic.hauser(int(g.number("routing_iterations")), normalize=over))
    model = model.double()
    model.weight.data.copy_(g["W"].transpose(-1, -2))
    visible = g["X"].unsqueeze(-2)
    mixed = mix(model, visible)
    g.check("z", mixed.z.squeeze(-2))
    g.check("c", mixed.coupling)
    g.check("x_vis_rec", mixed.visible.squeeze(-2))
    g.check("z_hid_rec", mixed.z_again.squeeze(-2))
    g.check("deltaW", contrastive_update(model, visible, mixed).transpose(-1, -2))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_minus_the_gradient_of_the_loss_is_the_update(options: dict[str, Any]) -> None:
    model, visible = a_model(**options), some_visible()
    mixed = mix(model, visible)
    update = contrastive_update(model, visible, mixed)
    assert update.norm() > 1e-3
    for loss in (
        contrastive_loss(model, visible, mixed.visible, mixed.coupling, mixed.coupling),
        ContrastiveDivergence()(model, visible),
    ):
        (gradient,) = torch.autograd.grad(loss, model.weight)
        torch.testing.assert_close(gradient, -update, rtol=1e-9, atol=1e-12)


def test_more_steps_mix_on_with_the_same_coupling() -> None:
    model, visible = a_model(), some_visible()
    z, coupling = model.up(visible)
    x = visible
    for _ in range(3):
        x = model.down(model.pose(model.up(x, coupling)[0]), coupling)
    mixed = mix(model, visible, steps=3)
    torch.testing.assert_close(mixed.visible, x)
    torch.testing.assert_close(mixed.z, z)
    with pytest.raises(ValueError, match="steps=0"):
        mix(model, visible, steps=0)


def test_stochastic_mixing_sends_directions_as_often_as_capsules_fire() -> None:
    model = ExpertCapsules(1, 1, 3, 3).double()
    model.weight.data.copy_(torch.eye(3, dtype=torch.float64))
    visible = torch.tensor([0.6, 0.0, 0.0], dtype=torch.float64).expand(4000, 1, 1, 3)
    mixed = mix(model, visible, stochastic=True, generator=torch.Generator().manual_seed(0))
    came = mixed.visible[:, 0, 0, 0]
    fired = came > 0
    torch.testing.assert_close(came[fired], torch.full_like(came[fired], 0.5))  # squash of a direction
    p = 0.36 / 1.36
    assert abs(fired.double().mean().item() - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_persistent_chains_go_on_where_they_stood() -> None:
    model, first, second = a_model(), some_visible(seed=1), some_visible(seed=2)
    objective = PersistentDivergence(stochastic=False)
    objective(model, first)
    stood = mix(model, first).visible
    torch.testing.assert_close(objective.chains, stood)
    loss = objective(model, second)
    mixed = mix(model, stood)
    torch.testing.assert_close(objective.chains, mixed.visible)
    torch.testing.assert_close(loss, contrastive_loss(model, second, mixed.visible, None, mixed.coupling))


def test_sampled_negatives_are_the_models_own_and_their_step_follows_the_acceptance() -> None:
    model = a_model()
    objective = SampledDivergence(chains=50, step_size=2.0)
    random = torch.Generator().manual_seed(0)
    for _ in range(150):
        objective(model, some_visible(), random)
    assert objective.step_size < 1.0
    assert 0.5 < objective.acceptance <= 1
    assert objective.state is not None
    uniform = model.free_energy(uniform_in_balls(500, 6, 3, dtype=torch.float64)).mean()
    assert model.free_energy(objective.state).mean() < uniform - 0.3


@pytest.mark.parametrize(
    "objective",
    [
        ContrastiveDivergence(),
        ContrastiveDivergence(steps=3, stochastic=True),
        PersistentDivergence(),
        SampledDivergence(chains=100),
    ],
    ids=["CD", "stochastic CD-3", "persistent", "sampled"],
)
def test_every_objective_teaches_data_from_capsules_that_do_not_belong_together(objective: Any) -> None:
    visible, held_out = clustered(), clustered(200, seed=3)
    noise = shuffled(held_out, torch.Generator().manual_seed(1))
    model = a_model(routing=Dynamic.hauser(iterations=1))

    def gap() -> float:
        return (model.free_energy(noise).mean() - model.free_energy(held_out).mean()).item()

    before = gap()
    losses = train_experts(model, visible, objective, epochs=15, batch_size=50, rate=0.05)
    assert len(losses) == 15
    assert gap() > before + 0.1


def test_on_finitely_many_states_contrastive_divergence_raises_the_exact_likelihood() -> None:
    states, model = some_visible(40), a_model(routing=Dynamic.hauser(iterations=1))
    data = torch.arange(40) % 40 < 6  # six states hold all the data

    def likelihood() -> float:
        return log_probability_of_states(model, states)[data].mean().item()

    exact = ExpertCapsules(6, 4, 3, 5, routing=Dynamic.hauser(iterations=1)).double()
    exact.load_state_dict(model.state_dict())
    before = likelihood()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(60):
        loss = ContrastiveDivergence()(model, states[data])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert likelihood() > before + 0.1
    optimizer = torch.optim.SGD(exact.parameters(), 0.5)
    for _ in range(60):
        loss = -log_probability_of_states(exact, states)[data].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert -loss.item() > likelihood()


def test_learning_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    visible = clustered()
    weights = []
    for seed in (0, 0, 1):
        model = a_model(routing=Dynamic.hauser(iterations=1))
        train_experts(model, visible, ContrastiveDivergence(stochastic=True), epochs=1, seed=seed)
        weights.append(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
