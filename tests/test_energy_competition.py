"""Experts that compete: the mean rises, planted subspaces are found, and lengths then tell classes apart."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps import squash
from torchcaps.energy import ExpertCapsules, compete
from torchcaps.energy.measures import linear_probe
from torchcaps.routing import Dynamic


def planted(count: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Visible capsules on one of 4 planes of the 30 numbers of 10 capsules, and which."""
    random = torch.Generator().manual_seed(seed)
    planes = torch.randn(4, 2, 30, generator=torch.Generator().manual_seed(99))
    which = torch.randint(4, (count,), generator=random)
    x = torch.einsum("nk,nkd->nd", torch.randn(count, 2, generator=random), planes[which])
    x = x / x.norm(dim=1, keepdim=True) + 0.02 * torch.randn(count, 30, generator=random)
    return (0.5 * x).view(count, 10, 1, 3), which


def a_model(rounds: int = 1, **options: Any) -> ExpertCapsules:
    return ExpertCapsules(10, 4, 3, 2, routing=Dynamic.hauser(rounds), **options)


def winners(model: ExpertCapsules, visible: Tensor) -> Tensor:
    return model.firing(model.up(visible)[0]).argmax(1)


def test_the_winners_hold_more_with_every_round() -> None:
    visible = squash(torch.randn(300, 10, 1, 3))
    shares = compete(a_model(), visible)
    assert len(shares) > 3
    assert all(after >= before - 1e-6 for before, after in itertools.pairwise(shares))
    assert shares[-1] > shares[0] + 0.02
    assert shares == compete(a_model(), visible)
    assert shares != compete(a_model(), visible, seed=1)


@pytest.mark.parametrize("rounds", [1, 3])
def test_planted_planes_are_found_each_by_a_capsule_of_its_own(rounds: int) -> None:
    (visible, which), (held_out, truth) = planted(), planted(200, seed=1)
    best = max(range(5), key=lambda seed: compete(a_model(), visible, seed=seed)[-1])
    model = a_model(rounds)
    assert compete(model, visible, seed=best)[-1] > 0.95
    name_of = {int(w): int(t) for w, t in zip(winners(model, visible), which, strict=True)}
    assert sorted(name_of.values()) == [0, 1, 2, 3]
    named = torch.tensor([name_of[int(w)] for w in winners(model, held_out)])
    assert (named == truth).double().mean() > 0.97


def test_frames_are_orthonormal_but_for_one_gain_which_puts_the_mean_log_odds_at_zero() -> None:
    visible, _ = planted()
    model = a_model(bias=True)
    model.bias.data.fill_(2.0)  # type: ignore[union-attr]
    compete(model, visible)
    frames = model.weight.detach().permute(1, 0, 2, 3).flatten(1, 2)  # [J, I P, Q]
    gram = frames.transpose(1, 2) @ frames
    gain = gram[0, 0, 0]
    torch.testing.assert_close(gram, gain * torch.eye(2).expand(4, -1, -1), rtol=1e-3, atol=1e-3 * gain.item())
    assert model.log_odds(model.up(visible)[0]).mean().abs() < 0.05
    assert (model.bias == 0).all()  # type: ignore[union-attr]


def test_a_centre_is_taken_off_before() -> None:
    visible, which = planted()
    moved = visible + 0.3
    model = a_model()
    model.centre_on(moved)
    plain = a_model()
    plain.centre_on(visible)
    compete(model, moved)
    compete(plain, visible)
    torch.testing.assert_close(model.up(moved)[0].norm(dim=-1), plain.up(visible)[0].norm(dim=-1), rtol=1e-2, atol=1e-3)
    assert len(which) == len(moved)


def test_lengths_after_competing_tell_more_than_those_of_random_weights() -> None:
    (visible, y), (held_out, z) = planted(), planted(300, seed=1)
    model = a_model()

    def probe() -> float:
        firing = [model.firing(model.up(x)[0]) for x in (visible, held_out)]
        return linear_probe(firing[0], y, firing[1], z)

    before = probe()
    compete(model, visible)
    assert probe() > before + 0.1


def test_competition_says_what_it_cannot_do() -> None:
    visible, _ = planted()
    with pytest.raises(ValueError, match="line=1"):
        compete(a_model(line=1), visible)
    with pytest.raises(ValueError, match="starts from 2 different examples, but there are 1"):
        compete(a_model(), visible[:1])
    with pytest.raises(ValueError, match="rounds=0"):
        compete(a_model(), visible, rounds=0)
