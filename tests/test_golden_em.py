"""Golden vectors of EM routing: the paper's equations, written out by hand, on votes that are given.

The library makes its votes from poses and a weight and never takes them. Votes [b, i, j, h] are therefore fed as poses
of one row that holds all of a child's votes one after another, and a shared weight that picks the j-th for parent j:
products with 1 and 0, so the votes come out exactly.
"""

import dataclasses
from typing import Any

import golden
import oracles
import pytest
import torch
from golden import Golden
from torch import Tensor

from torchcaps.routing import EM, em


def picking_weight(parents: int, length: int) -> Tensor:
    """[1, J, J * length, length], the weight that gives parent j the j-th stretch of the row."""
    weight = torch.zeros(1, parents, parents * length, length, dtype=torch.float64)
    for j in range(parents):
        for h in range(length):
            weight[0, j, j * length + h, h] = 1.0
    return weight


def read(name: str) -> tuple[Golden, tuple[Tensor, Tensor, Tensor], dict[str, Any], int]:
    g = Golden(name)
    votes = g.leaf("votes")
    poses = votes.flatten(2).unsqueeze(-2)
    weight = picking_weight(*votes.shape[2:])
    # the file adds its eps to the variance, as min_variance is added here, and to the mass, where it is below rounding
    settings = {"final_lambda": g.number("final_lambda"), "min_variance": g.number("eps")}
    betas = {"beta_a": g.leaf("beta_a"), "beta_u": g.leaf("beta_u")}
    return g, (poses, weight, g.leaf("act")), settings | betas, int(name[-1])


@pytest.mark.parametrize("name", golden.EMS)
def test_em_makes_the_papers_numbers_and_gradients(name: str) -> None:
    g, tensors, settings, rounds = read(name)
    routed = em(*tensors, iterations=rounds, **settings)
    assert routed.activations is not None
    g.check("a_out", routed.activations)
    g.check("mu", routed.poses.squeeze(-2))
    g.check_gradients((routed.activations, "cot_0"), (routed.poses.squeeze(-2), "cot_1"))


@pytest.mark.parametrize("name", golden.EMS)
def test_the_round_after_the_last_starts_from_the_papers_assignment(name: str) -> None:
    g, tensors, settings, rounds = read(name)
    state = em(*tensors, iterations=rounds, **settings).state
    coupling = em(*tensors, iterations=1, start=state, return_coupling=True, **settings).coupling
    assert coupling is not None
    g.check("R_next", coupling)


@pytest.mark.parametrize("name", golden.EMS)
def test_single_rounds_through_the_state_and_the_frozen_rule_make_the_papers_numbers_too(name: str) -> None:
    g, tensors, settings, rounds = read(name)
    betas = {key: settings.pop(key) for key in ("beta_a", "beta_u")}
    assert settings["final_lambda"] == EM.hinton().final_lambda
    rule = dataclasses.replace(EM.hinton(iterations=1), min_variance=settings["min_variance"])
    state = None
    for _ in range(rounds):
        routed = rule(*tensors, start=state, **betas)
        state = routed.state
    assert routed.activations is not None
    g.check("a_out", routed.activations)
    g.check("mu", routed.poses.squeeze(-2))


@pytest.mark.parametrize("name", golden.EMS)
def test_the_oracle_makes_the_papers_numbers_too(name: str) -> None:
    g, (poses, weight, activations), settings, rounds = read(name)
    arrays = [tensor.detach().numpy() for tensor in (poses, weight, activations)]
    settings |= {key: settings[key].detach().numpy() for key in ("beta_a", "beta_u")}
    routed = oracles.em(*arrays, iterations=rounds + 1, **settings)
    g.check("R_next", torch.from_numpy(routed.coupling[-1]))
    routed = oracles.em(*arrays, iterations=rounds, **settings)
    assert routed.activations is not None
    g.check("a_out", torch.from_numpy(routed.activations))
    g.check("mu", torch.from_numpy(routed.poses).squeeze(-2))
