"""The estimate of a step's memory, against what torch's allocator hands out in that step; and what is counted."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from torchcaps.layers import ConvCapsules, FullyConnectedCapsules, PrimaryCapsules
from torchcaps.losses import MarginLoss
from torchcaps.models import CapsNet
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.training import (
    Classification,
    Costs,
    Estimate,
    Optimization,
    estimate,
    refuse_if_too_large,
    training_cost,
)
from torchcaps.training.memory import available_bytes, readable_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
            nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip


class Matrix(nn.Module):
    """4x4 matrix capsules: convolutional, whose windows compete or not, then fully connected."""

    def __init__(self, rule: Any, backend: str, competition: Any = "window") -> None:
        super().__init__()
        em = isinstance(rule, EM)
        self.em, self.backend = em, backend
        self.primary = PrimaryCapsules(1, 4, (4, 4), 5, 4, squash="identity", norm=not em, activations=em)
        self.conv = ConvCapsules(4, 6, (4, 4), (4, 4), 3, 2, routing=rule, competition=competition)
        self.classes = FullyConnectedCapsules(6 * 4, 10, (4, 4), (4, 4), routing=rule)

    def forward(self, x: Tensor) -> Tensor:
        capsules = self.conv.route(self.primary(x), backend=self.backend).capsules  # type: ignore[arg-type]
        parents = self.classes.route(capsules, backend=self.backend).capsules  # type: ignore[arg-type]
        return parents.activations if self.em else parents.lengths  # type: ignore[return-value]


def capsnet(backend: str = "auto") -> CapsNet:
    model = CapsNet(stem_channels=32, primary_types=8, hidden=(64, 128))
    caps = model.class_caps
    route = caps.route
    caps.route = functools.partial(route, backend=backend)  # type: ignore[method-assign]
    return model


def allocated(module: Classification, batch: tuple[Tensor, ...], precision: str = "32-true") -> int:
    """The most that torch's CPU allocator had handed out at once, in two real steps that Lightning takes.

    The batch is left out of what the profiler sees, and comes on top.
    """
    data = DataLoader([0, 0], batch_size=None, collate_fn=lambda _: batch)  # type: ignore[arg-type,var-annotated]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, precision=precision, logger=False, enable_progress_bar=False,  # type: ignore[arg-type]
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.fit(module, data)
    assert profiler.profiler is not None
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    weights = [*module.parameters(), *module.buffers()]
    return peak + sum(t.untyped_storage().nbytes() for t in (*weights, *batch))


MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "cnn": (Cnn, 0.0),
    "capsnet reference": (functools.partial(capsnet, "reference"), 0.0005),
    "capsnet streamed": (functools.partial(capsnet, "streamed"), 0.0005),
    "attention reference": (functools.partial(Matrix, Attention.tsai(), "reference"), 0.0),
    "attention streamed": (functools.partial(Matrix, Attention.tsai(), "streamed"), 0.0),
    "em reference": (functools.partial(Matrix, EM.hinton(), "reference"), 0.0),
    "em streamed": (functools.partial(Matrix, EM.hinton(), "streamed"), 0.0),
    "em, windows compete": (functools.partial(Matrix, EM.hinton(), "reference", "all"), 0.0),
}


@pytest.mark.parametrize("batch", [6, 30])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_within_a_quarter_of_what_the_allocator_hands_out(name: str, batch: int) -> None:
    make, weight = MODELS[name]
    module = Classification(make(), loss=MarginLoss(), num_classes=10, reconstruction_weight=weight)
    x, y = torch.rand(batch, 1, 28, 28), torch.arange(batch) % 10
    told = training_cost(module, (x, y))
    assert told.batch == batch
    real = allocated(module, (x, y))
    assert told.peak_bytes == pytest.approx(real, rel=0.25)


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("bf16-mixed", "sgd"), ("bf16-true", "adamw"), ("64-true", "adam")]
)
def test_precision_and_optimiser_count_too(precision: str, optimizer: str) -> None:
    module = Classification(Cnn(), loss=nn.CrossEntropyLoss(), num_classes=10, optimization=Optimization(optimizer))
    x, y = torch.rand(32, 1, 28, 28), torch.arange(32) % 10
    told = training_cost(module, (x, y), precision)
    assert told.peak_bytes == pytest.approx(allocated(module, (x, y), precision), rel=0.25)


def test_the_estimate_of_a_large_model_allocates_nothing_and_runs_nothing() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        told = estimate(lambda: CapsNet(3, 10, 224), (3, 224, 224), 256)
    assert sum(size for size in _allocations(profiler) if size > 0) < 2**20
    assert told.parameters == sum(p.numel() for p in _on_meta(lambda: CapsNet(3, 10, 224)).parameters())
    assert told.peak_bytes > 4 * 4 * told.parameters  # weights, gradients and Adam's two, at the least


def test_the_parts_add_up_and_are_what_they_are_called() -> None:
    told = estimate(nn.Linear(1000, 10), (1000,), 64, optimizer=Optimization("adam"))
    weights = 4 * (10_000 + 10)
    assert sum(told.parts.values()) == told.peak_bytes
    assert told.parts["parameters"] == weights
    assert told.parts["optimizer"] == 2 * weights + 2 * 4  # and the number of steps, for each of two tensors
    assert told.parts["batch"] == 4 * 64 * 1000
    plain = estimate(nn.Linear(1000, 10), (1000,), 64, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert plain.parts["optimizer"] == 0


def test_gradients_of_the_step_before_are_there_in_forward_and_gone_in_backward() -> None:
    told = estimate(nn.Linear(1000, 10), (1000,), 1)
    four = 4 * 4 * (10_000 + 10)  # weights, gradients and Adam's two
    assert told.phases["forward"] == pytest.approx(four, rel=0.05)
    assert told.phases["backward"] == pytest.approx(four, rel=0.05)
    assert told.phases["update"] > four
    assert told.fixed["forward"] == pytest.approx(four, rel=0.01)


def test_the_model_is_left_as_it_was() -> None:
    module = Classification(capsnet(), loss=MarginLoss(), num_classes=10, reconstruction_weight=0.0005)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.model.eval()
    training_cost(module, (torch.rand(2, 1, 28, 28), torch.tensor([0, 1])))
    assert not module.model.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_multiply_adds_of_plain_layers_are_those_of_their_products() -> None:
    told = estimate(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 5)), (3, 8, 8), 7)
    assert told.multiply_adds == 36 * 8 * 27 + 8 * 36 * 5


@pytest.mark.parametrize("backend", ["reference", "streamed"])
def test_multiply_adds_of_routing_are_counted_on_every_backend(backend: str) -> None:
    I, J, P, Q, T = 72, 10, 16, 16, 3
    layer = FullyConnectedCapsules(I, J, P, Q, routing=Dynamic(iterations=T))

    class Routes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.routing(x, self.layer.weight, backend=backend).poses  # type: ignore[arg-type]

    votes, formed_anew = I * J * Q, T - 1
    once = votes * P + (2 * T - 1) * votes  # formed once; a sum in every round, and an agreement between
    walks = votes * P + formed_anew * votes * (P + 2)  # the first, uniform, is one product
    found = estimate(Routes(), (I, 1, P), 4).multiply_adds
    assert found == (once if backend == "reference" else walks)


def test_the_largest_batch_that_is_suggested_fits_and_is_not_far_from_the_limit() -> None:
    told = functools.partial(estimate, Cnn(), (1, 28, 28))
    available = 40 * 2**20
    batch = told(512).largest_batch(available)
    assert told(batch).peak_bytes <= available < told(round(1.2 * batch)).peak_bytes


def test_a_step_that_does_not_fit_is_refused_with_the_way_out() -> None:
    told = estimate(Cnn(), (1, 28, 28), 512)
    refuse_if_too_large(told, told.peak_bytes)
    with pytest.raises(
        ValueError, match=r"a training step of 512 examples holds about .* MiB \(parameters .*but 20.0 MiB"
    ) as e:
        refuse_if_too_large(told, 20 * 2**20)
    batch = told.largest_batch(20 * 2**20)
    assert f"a batch of {batch} fits (with accumulate_grad_batches={-(-512 // batch)}" in str(e.value)
    with pytest.raises(ValueError, match="not even a batch of 1 fits: take a smaller model"):
        refuse_if_too_large(told, 1000)


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    module = Classification(Cnn(), loss=MarginLoss(), num_classes=10)
    before = [p.detach().clone() for p in module.parameters()]
    data = DataLoader(TensorDataset(torch.rand(64, 1, 28, 28), torch.arange(64) % 10), 64)
    costs = Costs(available=2**20)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[costs], logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"but 1.0 MiB are free: a batch of \d+ fits"):
        trainer.fit(module, data)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Cnn: 5,")
    assert first.endswith("million multiply-adds an example")
    assert second.startswith("a training step of 64 examples holds about ")


def test_memory_that_is_free_is_known_here_and_where_it_is_not_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = available_bytes()
    assert free is None or free > 2**20
    told = Estimate(1, 1, 1, {}, {"forward": 2**60}, {"forward": 0})
    monkeypatch.setattr("torchcaps.training.memory.available_bytes", lambda device: None)
    refuse_if_too_large(told)


def test_sizes_are_written_for_people() -> None:
    assert [readable_bytes(n) for n in (12, 2048, 3 * 2**30)] == ["12 bytes", "2.0 KiB", "3.0 GiB"]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0][None]


def test_what_cannot_be_told_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="the cost of Branches cannot be told without numbers"):
        estimate(Branches(), (3,), 2)
    with pytest.raises(ValueError, match=r"weight has no size yet: run the model on one example"):
        estimate(nn.LazyLinear(3), (3,), 2)
    with pytest.raises(ValueError, match=r"Linear does not take \[2, 4\]: "):
        estimate(nn.Linear(3, 3), (4,), 2)
    with pytest.raises(ValueError, match="precision='16': take '64-true'"):
        estimate(nn.Linear(3, 3), (3,), 2, precision="16")
    with pytest.raises(ValueError, match="batch=0: a step has one example or more"):
        estimate(nn.Linear(3, 3), (3,), 0)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _allocations(profiler: profile) -> list[int]:
    """Bytes handed out, or below 0 taken back, one after the other."""
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
