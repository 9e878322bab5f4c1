"""The loader: an order that is a function of (seed, epoch), a position in it, and a share of it for each process.

order       training: a permutation by (seed, epoch); evaluation: as it stands
share       training: process r of W takes the r-th of W equal pieces of each W x batch_size items of the order, so
            that batch k of all processes together is batch k of one process with W times the batch size
ends        training: the order starts again at its front until it can be shared out (at most W - 1 items are seen
            twice in an epoch), or with drop_last stops at the last full batch of all. Evaluation: each item once;
            every process has the same number of batches, of sizes as even as that asks for
position    batches handed out in this epoch, whatever the workers have fetched ahead
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from .random import permutation

__all__ = ["Loader", "Schedule"]


class Schedule:
    """Which items are in which batch: an epoch, a position in it, and both as a state that goes into a checkpoint.

    A pass goes through what is left of the epoch. The next pass is through the next epoch, unless `set_epoch` says
    another. For evaluation (`training=False`) every pass is through all of epoch 0, unshuffled.
    """

    def __init__(
        self,
        items: int,
        batch_size: int,
        *,
        training: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least one item makes a batch")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is none of the processes 0 to {world_size - 1}")
        full = training and drop_last
        if items < (world_size * batch_size if full else world_size):
            raise ValueError(
                f"{items} items do not make one {f'full batch of {batch_size}' if full else 'batch'} for each of "
                f"{world_size} processes: give more items, {'a smaller batch_size, ' if full else ''}or fewer processes"
            )
        self.items, self.batch_size, self.training, self.shuffle = items, batch_size, training, shuffle
        self.seed, self.drop_last, self.rank, self.world_size = seed, drop_last, rank, world_size
        self.epoch = 0
        self.position = 0
        self._fresh = True  # no pass has begun since epoch and position were set

    @property
    def sampler(self) -> "Schedule":
        """Itself: Lightning looks for `set_epoch` in the sampler of a loader's `batch_sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next pass is through this epoch. A position in it that was loaded, and not begun yet, is kept."""
        if self.training and not (self._fresh and epoch == self.epoch):
            self.epoch, self.position, self._fresh = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches handed out in it, and what these numbers speak of."""
        return {"epoch": self.epoch, "position": self.position, **self._speaks_of()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on from there. ValueError where the state speaks of another order."""
        here = self._speaks_of()
        wrong = [
            f"{key}={here[key]}, but the state has {state.get(key)}" for key in here if here[key] != state.get(key)
        ]
        if wrong:
            raise ValueError(f"this loader cannot go on from that state: {'; '.join(wrong)}: give the settings it had")
        self.epoch, self.position, self._fresh = state["epoch"], state["position"], True

    def begin(self) -> list[tuple[int, NDArray[np.int64]]]:
        """A new pass: (epoch, items) of each batch of it."""
        if not self.training:
            self.position = 0
        elif not self._fresh:
            self.epoch, self.position = self.epoch + 1, 0
        self._fresh = False
        return [(self.epoch, items) for items in self.batches(self.epoch)[self.position :]]

    def __len__(self) -> int:
        """Batches of a whole epoch, in each process."""
        n, W, B = self.items, self.world_size, self.batch_size
        if self.training:
            return n // (W * B) if self.drop_last else -(-n // (W * B))
        return min(-(-n // (W * B)), n // W)

    def batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Every batch of an epoch for this process."""
        n, W, B = self.items, self.world_size, self.batch_size
        if not self.training:
            mine = np.arange(self.rank, n, W)
            return np.array_split(mine, len(self)) if W > 1 else [mine[i : i + B] for i in range(0, n, B)]
        order = permutation(n, self.seed, "order", epoch) if self.shuffle else np.arange(n)
        order = order[: len(self) * W * B] if self.drop_last else np.resize(order, -(-n // W) * W)
        return [np.split(order[i : i + W * B], W)[self.rank] for i in range(0, len(order), W * B)]

    def _speaks_of(self) -> dict[str, Any]:
        return {
            key: getattr(self, key) for key in ("items", "batch_size", "seed", "shuffle", "drop_last", "world_size")
        }


class Batchable(Protocol):
    """What a loader reads from: batches by (epoch, items)."""

    def __getitems__(self, request: tuple[int, NDArray[np.int64]]) -> tuple[Tensor, ...]: ...


class Loader:
    """Batches of a view, as scheduled, fetched by `num_workers` processes or, at 0, by this one.

    It has a state, which Lightning stores and restores in the middle of an epoch. torch's global random numbers are
    neither used nor changed. Nothing is fetched before the first batch is asked for.
    """

    def __init__(self, view: Batchable, schedule: Schedule, num_workers: int = 0) -> None:
        self.view, self.batch_sampler, self.num_workers = view, schedule, num_workers
        self._plan: list[tuple[int, NDArray[np.int64]]] = []
        self._workers: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        schedule = self.batch_sampler
        plan = schedule.begin()
        epoch, start = schedule.epoch, schedule.position
        fetched = self._from_workers(plan) if self.num_workers else map(self.view.__getitems__, plan)
        try:
            for position, batch in enumerate(fetched, start + 1):
                schedule.epoch, schedule.position = epoch, position
                yield batch
        except GeneratorExit:  # the pass is left early: the workers wait for the next
            raise
        except BaseException:  # left to the garbage collector each of them would take torch 5 seconds to end
            self._end_workers()
            raise

    def _from_workers(self, plan: list[tuple[int, NDArray[np.int64]]]) -> Iterator[Any]:
        self._plan[:] = plan
        if self._workers is None:
            self._workers = DataLoader(
                self.view,  # type: ignore[arg-type]  # torch asks for batches where there is a __getitems__
                batch_sampler=self._plan,  # type: ignore[arg-type]  # read anew at each pass
                num_workers=self.num_workers,
                collate_fn=_as_it_is,
                persistent_workers=True,
                generator=torch.Generator(),  # of a seed that torch draws and nobody uses
            )
        return iter(self._workers)

    def _end_workers(self) -> None:
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None

    @property
    def _iterator(self) -> Any:
        """torch's iterator over the workers: by this name Lightning ends them when it is through."""
        return None if self._workers is None else self._workers._iterator

    @_iterator.setter
    def _iterator(self, ended: None) -> None:
        self._workers = ended

    def set_epoch(self, epoch: int) -> None:
        """The next pass is through this epoch: `Schedule.set_epoch`."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands: `Schedule.state_dict`."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: `Schedule.load_state_dict`."""
        self.batch_sampler.load_state_dict(state)


def _as_it_is(batch: Any) -> Any:
    return batch
