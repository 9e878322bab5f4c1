"""Optimisers and schedules: what decays, what the learning rate is at every step, and which settings contradict."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from torchcaps.layers import FullyConnectedCapsules, PrimaryCapsules
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.training import Optimization
from torchcaps.training.optimization import decaying_and_spared


class Everything(nn.Module):
    """A layer of every kind whose parameters a rule has to be known for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch_norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.primary = PrimaryCapsules(4, 2, (4, 4), norm=True)  # a LayerNorm with gains [4, 4]
        self.attention = FullyConnectedCapsules(8, 3, (4, 4), (4, 4), routing=Attention.tsai())
        self.em = FullyConnectedCapsules(3, 3, (4, 4), (4, 4), routing=EM.hinton())
        self.dynamic = FullyConnectedCapsules(3, 2, (4, 4), (4, 4), routing=Dynamic(learn_prior=True, learn_bias=True))


def test_weight_decay_spares_norms_biases_and_what_rules_learn() -> None:
    module = Everything()
    names = {parameter: name for name, parameter in module.named_parameters()}
    decaying, spared = decaying_and_spared(module)
    assert {names[p] for p in decaying} == {
        "conv.weight", "primary.conv.weight", "attention.weight", "em.weight", "dynamic.weight",
    }  # fmt: skip
    assert len(decaying) + len(spared) == len(names)


def test_weight_decay_pulls_on_weights_alone_unless_it_is_to_pull_on_everything() -> None:
    for everything in (False, True):
        module = nn.Linear(2, 2)
        nn.init.ones_(module.bias)
        before = module.weight.detach().clone()
        optimizer = Optimization("sgd", lr=0.5, weight_decay=0.1, decay_everything=everything).make_optimizer(module)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.allclose(module.weight, before * 0.95)
        assert module.bias.tolist() == pytest.approx([0.95, 0.95] if everything else [1.0, 1.0])


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    optimizer = Optimization().make_optimizer(module)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [module.bias]
    module.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no parameter that trains"):
        Optimization().make_optimizer(module)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", Adam), ("adamw", AdamW), ("sgd", SGD), (lambda groups: Adam(groups, 0.7), Adam)],
)
def test_an_optimiser_is_named_or_made_by_a_callable(
    name: str | Callable[..., Optimizer], kind: type[Optimizer]
) -> None:
    optimizer = Optimization(name, lr=0.3).make_optimizer(nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert {group["lr"] for group in optimizer.param_groups} == {0.7 if callable(name) else 0.3}


def rates(optimization: Optimization, total: int, epoch: int) -> list[float]:
    """The learning rate of every step of a run."""
    optimizer = optimization.make_optimizer(nn.Linear(2, 2))
    schedule, found = optimization.make_schedule(optimizer, total, epoch), []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return found


def test_a_cosine_falls_from_the_end_of_the_warm_up_to_the_end_of_the_run() -> None:
    found = rates(Optimization(lr=2.0, schedule="cosine", warmup_steps=4, final_lr=0.1), total=14, epoch=7)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert found[9] == pytest.approx(2.0 * 0.55)  # half way
    assert found[13] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(0.9 * math.pi)) / 2))


def test_multistep_falls_at_its_milestones_in_epochs() -> None:
    found = rates(Optimization(lr=1.0, schedule="multistep", milestones=[1, 2.5], gamma=0.5), total=12, epoch=4)
    assert found == pytest.approx([1.0] * 4 + [0.5] * 6 + [0.25] * 2)


def test_a_warm_up_in_epochs_is_that_many_steps() -> None:
    in_epochs = rates(Optimization(lr=1.0, warmup_epochs=0.5), total=8, epoch=6)
    assert in_epochs == rates(Optimization(lr=1.0, warmup_steps=3), total=8, epoch=6)
    assert in_epochs == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_one_cycle_rises_over_its_warm_up_and_ends_near_nothing() -> None:
    found = rates(Optimization("adamw", lr=1.0, schedule="one_cycle", warmup_steps=5), total=20, epoch=5)
    assert max(range(20), key=found.__getitem__) == 4
    assert found[4] == pytest.approx(1.0)
    assert found[0] == pytest.approx(1 / 25)
    assert found[-1] < 1e-4


def test_a_constant_rate_needs_no_schedule() -> None:
    optimization = Optimization()
    assert optimization.make_schedule(optimization.make_optimizer(nn.Linear(1, 1)), math.inf, math.inf) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adma"}, "optimizer='adma': take 'adam', 'adamw', 'sgd', or a callable"),
        ({"schedule": "linear"}, "schedule='linear': take 'constant', 'cosine'"),
        ({"lr": 0.0}, r"lr=0.0: the learning rate must be above 0"),
        ({"lr": math.nan}, r"lr=nan"),
        ({"weight_decay": -0.1}, "may be below 0"),
        ({"warmup_steps": 5, "warmup_epochs": 1.0}, "warm-up of 5 steps and of 1.0 epochs: give one of them"),
        ({"schedule": "multistep"}, "'multistep' needs epochs to step at"),
        ({"milestones": [3]}, "schedule='constant' with milestones=.3,.*no other takes any"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimization(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "total", "epoch"),
    [
        ({"schedule": "cosine"}, math.inf, 10.0),
        ({"schedule": "one_cycle"}, math.inf, 10.0),
        ({"schedule": "multistep", "milestones": [1]}, 100.0, math.inf),
        ({"warmup_epochs": 1.0}, 100.0, math.inf),
    ],
)
def test_a_schedule_that_needs_a_length_says_so_where_there_is_none(
    settings: dict[str, object], total: float, epoch: float
) -> None:
    optimization = Optimization(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="these data have no length: give max_steps"):
        optimization.make_schedule(optimization.make_optimizer(nn.Linear(1, 1)), total, epoch)


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    optimization = Optimization(schedule="cosine", warmup_steps=20)
    with pytest.raises(ValueError, match="a warm-up of 20 steps leaves nothing of 20"):
        optimization.make_schedule(optimization.make_optimizer(nn.Linear(1, 1)), 20, 5)


def test_a_parameter_without_a_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no size yet: run the model on one batch"):
        Optimization().make_optimizer(nn.Sequential(nn.LazyLinear(3)))
