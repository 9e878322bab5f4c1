"""The loader: each item where it belongs, the same batches for any number of workers, a pass that can be resumed."""

import pickle
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pytorch_lightning.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch import Tensor, nn
from torchvision.transforms import v2

from torchcaps.data import Arrays, Augment, Digits, DiverseMultiMNIST, ImageData, Loader, Schedule

# Lightning's own, of torch's trees
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Plain:
    """A view that shows what it was asked for."""

    def __getitems__(self, request: tuple[int, np.ndarray]) -> tuple[Tensor, ...]:
        epoch, items = request
        return (torch.tensor([[epoch, item] for item in items.tolist()]),)


def loader(items: int = 10, batch_size: int = 3, workers: int = 0, **settings: Any) -> Loader:
    return Loader(Plain(), Schedule(items, batch_size, **settings), workers)


def seen(batches: Any) -> list[list[list[int]]]:
    return [batch[0].tolist() for batch in batches]


@given(
    items=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_processes_together_make_the_batches_of_one_process(
    items: int, batch_size: int, world: int, epoch: int, drop_last: bool
) -> None:
    if items < (world * batch_size if drop_last else world):
        return
    shares = [Schedule(items, batch_size, drop_last=drop_last, rank=r, world_size=world) for r in range(world)]
    each = [share.batches(epoch) for share in shares]
    assert {len(batches) for batches in each} == {len(shares[0])}
    whole = Schedule(items, batch_size * world, drop_last=drop_last)
    for batches, expected in zip(zip(*each, strict=True), whole.batches(epoch), strict=True):
        together = np.concatenate(batches)
        assert len({len(batch) for batch in batches}) == 1
        # at the end of an epoch its first items fill up what cannot be shared out
        assert together[: len(expected)].tolist() == expected.tolist()
        assert len(together) - len(expected) < world
    if not drop_last:
        assert set(np.concatenate([np.concatenate(batches) for batches in each])) == set(range(items))


@given(items=st.integers(1, 60), batch_size=st.integers(1, 20), world=st.integers(1, 5))
@example(items=3, batch_size=1, world=2)
def test_evaluation_sees_each_item_once_in_equally_many_batches(items: int, batch_size: int, world: int) -> None:
    if items < world:
        return
    each = [Schedule(items, batch_size, training=False, rank=r, world_size=world) for r in range(world)]
    batches = [share.batches(0) for share in each]
    assert sorted(np.concatenate([np.concatenate(b) for b in batches]).tolist()) == list(range(items))
    assert {len(b) for b in batches} == {len(each[0])}
    assert all(len(batch) for b in batches for batch in b)
    if world == 1:
        assert [len(batch) for batch in batches[0][:-1]] == [batch_size] * (len(batches[0]) - 1)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    first, again, other = loader(50), loader(50), loader(50, seed=1)
    epochs = [seen(first), seen(first), seen(first)]
    assert epochs == [seen(again), seen(again), seen(again)]
    orders = [[item for batch in epoch for _, item in batch] for epoch in [*epochs, seen(other)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert [batch[0][0] for batch in [epoch[0] for epoch in epochs]] == [0, 1, 2]


def test_evaluation_is_always_the_first_epoch_in_its_own_order() -> None:
    evaluation = loader(training=False)
    evaluation.set_epoch(7)
    for _ in range(2):
        assert [pair for batch in seen(evaluation) for pair in batch] == [[0, item] for item in range(10)]


def test_set_epoch_names_the_epoch_of_the_next_pass() -> None:
    l, reference = loader(), loader()
    epochs = [seen(reference) for _ in range(4)]
    l.set_epoch(2)
    assert seen(l) == epochs[2]
    assert seen(l) == epochs[3]
    l.set_epoch(2)
    assert seen(l) == epochs[2]
    l.set_epoch(2)
    assert seen(l) == epochs[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_state_goes_on_where_the_batches_ended_that_were_handed_out(workers: int) -> None:
    reference = loader(20, workers=0)
    epochs = [seen(reference) for _ in range(3)]
    broken = loader(20, workers=workers)
    seen(broken)
    assert seen(islice(broken, 2)) == epochs[1][:2]
    state = broken.state_dict()
    assert (state["epoch"], state["position"]) == (1, 2)
    resumed = loader(20, workers=workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert len(resumed) == 7
    resumed.set_epoch(1)  # a trainer says so before it asks for batches
    assert seen(resumed) == epochs[1][2:]
    assert seen(resumed) == epochs[2]


def test_a_pass_that_was_resumed_can_be_resumed() -> None:
    whole = seen(loader())
    state = loader().state_dict()
    for position in range(4):
        resumed = loader()
        resumed.load_state_dict(state)
        assert seen(islice(resumed, 1)) == whole[position : position + 1]
        state = resumed.state_dict()
    assert state["position"] == 4


def test_lightning_ends_the_workers_and_they_can_start_again() -> None:
    helped = loader(workers=2)
    first = seen(helped)
    assert len(active_children()) == 2
    _shutdown_workers_and_reset_iterator(helped)
    assert active_children() == []
    helped.set_epoch(0)
    assert seen(helped) == first


class Broken(Plain):
    def __getitems__(self, request: tuple[int, np.ndarray]) -> tuple[Tensor, ...]:
        if 3 in request[1]:
            raise ValueError("item 3 is broken")
        return super().__getitems__(request)


def test_a_failure_of_a_worker_ends_them_all_at_once() -> None:
    broken = Loader(Broken(), Schedule(10, 3), 2)
    with pytest.raises(ValueError, match="item 3 is broken"):
        list(broken)
    assert active_children() == []


def test_a_state_from_the_end_of_an_epoch_leads_to_the_next() -> None:
    reference = loader()
    epochs = [seen(reference) for _ in range(2)]
    broken = loader()
    seen(broken)
    resumed = loader()
    resumed.load_state_dict(broken.state_dict())
    resumed.set_epoch(1)
    assert seen(resumed) == epochs[1]


def test_a_look_at_one_batch_costs_the_next_pass_nothing() -> None:
    l = loader()
    next(iter(l))
    assert len(seen(l)) == 4


@pytest.mark.parametrize(
    "change", [{"items": 11}, {"batch_size": 4}, {"seed": 1}, {"drop_last": True}, {"world_size": 2}]
)
def test_the_state_of_another_order_is_refused(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(ValueError, match=rf"cannot go on from that state: {name}="):
        loader(**change).load_state_dict(loader().state_dict())


def test_a_set_that_makes_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="3 items do not make one full batch of 4 for each of 1 processes"):
        Schedule(3, 4, drop_last=True)
    with pytest.raises(ValueError, match="1 items do not make one batch for each of 2 processes"):
        Schedule(1, 4, training=False, world_size=2)
    with pytest.raises(ValueError, match="rank=2 is none of the processes 0 to 1"):
        Schedule(8, 4, rank=2, world_size=2)
    with pytest.raises(ValueError, match="batch_size=0"):
        Schedule(8, 0)


def sets(workers: int) -> dict[str, ImageData]:
    digits = Digits(limit=100)
    augment = Augment(shift=1, crop=7, flip=True, vertical_flip=True)
    bend = Augment(shift=0.5, degrees=20, scale=(0.8, 1.2), each_axis=True, shear=10)
    return {
        "moved": Digits(augment=augment, num_workers=workers, batch_size=16, limit=100),
        "bent": Digits(augment=bend, num_workers=workers, batch_size=16, limit=100),
        "transformed": Digits(
            transform=v2.Compose([v2.RandomErasing(), v2.GaussianNoise()]),
            num_workers=workers, batch_size=16, limit=100,
        ),
        "composed": DiverseMultiMNIST(digits, num_workers=workers, batch_size=16),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["moved", "bent", "transformed", "composed"])
def test_batches_are_the_same_to_the_bit_with_and_without_workers(name: str) -> None:
    alone, helped = sets(0)[name].train_dataloader(), sets(2)[name].train_dataloader()
    first: list[Tensor] = []
    for _ in range(2):
        torch.rand(1)  # what a model draws has no say in it
        for i, (a, b) in enumerate(zip(alone, helped, strict=True)):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            if i == 0:
                first.append(a[0])
    assert not torch.equal(*first)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_leaves_torchs_random_numbers_alone(workers: int) -> None:
    before = torch.get_rng_state()
    for data in (sets(workers)["moved"], sets(workers)["transformed"]):
        list(data.train_dataloader())
        list(data.val_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_an_item_is_changed_in_the_same_way_in_any_batch() -> None:
    def by_item(batch_size: int) -> Tensor:
        data = Arrays(images, labels, augment=Augment(shift=2, degrees=30), batch_size=batch_size, seed=3)
        loaded = data.train_dataloader()
        order = np.concatenate(loaded.batch_sampler.batches(0))
        return torch.cat([x for x, _ in loaded])[np.argsort(order)]

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 9, 9), dtype=torch.uint8, generator=generator)
    labels = torch.arange(60) % 3
    assert torch.equal(by_item(7), by_item(40))


class Listener(pl.LightningModule):
    """Writes down what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.heard: list[tuple[int, int, float]] = []
        self.validated = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        weights = torch.arange(1, x.numel() + 1, dtype=torch.float64).view(x.shape)
        self.heard.append((self.current_epoch, batch_idx, float((x * weights).sum() + y.sum())))
        return self.layer(x.mean().view(1, 1)).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated += len(batch[0])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated += len(batch[0])

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeper(pl.Callback):
    """Keeps a checkpoint of everything that may be a checkpoint's moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"validated{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")


def trained(keep: Path | None, workers: int, resume: Path | None = None, **settings: Any) -> Listener:
    data = Digits(augment=Augment(shift=1), batch_size=16, limit=96, num_workers=workers)
    module = Listener()
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[Keeper(keep)] if keep else [], num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return module


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (0, {}),
        (2, {}),
        (0, {"val_check_interval": 2}),
        (0, {"accumulate_grad_batches": 2}),
        (0, {"limit_train_batches": 4}),
    ],
    ids=["no workers", "two workers", "validation in between", "accumulated", "short epochs"],
)
def test_training_goes_on_from_any_checkpoint_with_the_batches_that_would_have_come(
    tmp_path: Path, workers: int, settings: dict[str, Any]
) -> None:
    whole = trained(tmp_path, workers, **settings)
    batches = settings.get("limit_train_batches", 6)
    assert [heard[:2] for heard in whole.heard] == [(epoch, batch) for epoch in range(3) for batch in range(batches)]
    assert len(set(whole.heard)) == 3 * batches
    each = settings.get("accumulate_grad_batches", 1)
    kept = [(kind, n) for kind in ("batch", "validated", "epoch") for n in range(each, 3 * batches, each)]
    for kind, n in kept if workers == 0 else [("batch", 2), ("batch", batches), ("epoch", batches), ("batch", 9)]:
        checkpoint = tmp_path / f"{kind}{n}.ckpt"
        if checkpoint.exists():
            assert trained(None, workers, checkpoint, **settings).heard == whole.heard[n:], checkpoint
    assert active_children() == []  # the workers were ended with the training


def test_processes_of_a_group_get_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.cat([y for _, y in Digits(batch_size=40, limit=100).train_dataloader()])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        shares.append([y for _, y in Digits(batch_size=20, limit=100).train_dataloader()])
    assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(*shares, strict=True)]), whole)


def test_a_trainer_validates_tests_and_predicts_each_item_once() -> None:
    module, data = Listener(), Digits(batch_size=16, limit=96)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.validate(module, data)
    assert module.validated == 96
    trainer.test(module, data)
    assert module.validated == 192
    predicted = trainer.predict(module, data)
    assert torch.equal(torch.cat(predicted), torch.cat([y for _, y in data.test_dataloader()]))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero:UserWarning")
def test_a_trainer_does_without_validation() -> None:
    module = Listener()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Digits(batch_size=16, limit=32, val_fraction=0))
    assert len(module.heard) == 2


@pytest.mark.parametrize("name", ["moved", "bent", "transformed", "composed"])
def test_what_workers_are_sent_can_be_sent(name: str) -> None:
    loaded = sets(0)[name].train_dataloader()
    request = loaded.batch_sampler.begin()[0]
    copy = pickle.loads(pickle.dumps(loaded.view))
    assert torch.equal(copy.__getitems__(request)[0], loaded.view.__getitems__(request)[0])
