"""What a training step will cost, told before a number of it is calculated or a byte of it allocated.

The step runs on tensors without numbers (torch's fake tensors), and every storage that comes and goes is counted:

    live bytes(t) = sum of the storages that somebody still holds          peak = its largest value over a step
    a step        = forward, gradients of the step before dropped, backward, the optimiser's update

in the order in which Lightning does it, with the optimiser's state as it is from the second step on. That is what the
tensor allocators of torch will show, up to buffers within single operators (a convolution's, a sort's). What a process
is charged for by the system is more: the program itself, and what allocators keep for later.

Streamed routing works tile by tile inside its operators: there the first tiles are looked at, and the others are alike.
A compiled model holds less than is told here, for what it fuses is never stored.
"""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import _maybe_get_opdef
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from torchcaps.training.optimization import Optimization

__all__ = ["Estimate", "available_bytes", "estimate", "readable_bytes", "refuse_if_too_large"]

Loss = Callable[[nn.Module, Tensor], Tensor]

LOOKED_AT = 300
"""Operators that are looked at inside one of streamed routing's: some tiles of many."""

PRECISIONS: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    "64-true": (torch.float64, None),
    "32-true": (torch.float32, None),
    "16-true": (torch.float16, None),
    "bf16-true": (torch.bfloat16, None),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
"""Lightning's names: (dtype of weights and input, dtype of autocast)."""


@dataclass(frozen=True)
class Estimate:
    """What a step costs.

    parameters     numbers in the model's parameters.
    multiply_adds  of one example, forward alone: matrix products, convolutions and the sums of routing, as executed.
    batch          examples in the step.
    parts          bytes at the moment of the peak: "parameters" (buffers too), "gradients", "optimizer", "batch", and
                   "activations", all that forward and backward hold besides.
    phases         the peak in "forward", "backward" and "update", bytes.
    fixed          bytes in each of these phases that do not depend on the batch.
    moved          bytes that the operators of a step read and write, each for itself, views left out.
    operators      how many these are.
    """

    parameters: int
    multiply_adds: int
    batch: int
    parts: Mapping[str, int]
    phases: Mapping[str, int]
    fixed: Mapping[str, int]
    moved: int = 0
    operators: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once in a step, bytes."""
        return max(self.phases.values())

    def largest_batch(self, available: int) -> int:
        """Examples of a step that fits into so many bytes, 0 where none does; rather a little too few."""
        fits = []
        for phase, peak in self.phases.items():
            each = (peak - self.fixed[phase]) / self.batch
            room = available - self.fixed[phase]
            fits.append(-1 if room < 0 else math.inf if each <= 0 else room / each)
        return max(0, int(min(*fits, 2**31)))

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.multiply_adds / 1e6:,.1f} million multiply-adds an example\n"
            f"a training step of {self.batch} examples holds about {readable_bytes(self.peak_bytes)}: {self._parts()}"
        )

    def _parts(self) -> str:
        return ", ".join(f"{name} {readable_bytes(size)}" for name, size in self.parts.items())


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    input_shape: Sequence[int],
    batch: int,
    *,
    optimizer: Optimization | Callable[[list[nn.Parameter]], Optimizer] = Optimization(),  # noqa: B008  (frozen)
    precision: str = "32-true",
    loss: Loss | None = None,
    forward: Callable[[nn.Module, Tensor], object] | None = None,
    device: str = "cpu",
) -> Estimate:
    """The cost of one training step of `model` on `batch` examples of `input_shape`, such as (1, 28, 28).

    model      a module, which is left as it is, or a function that makes one: it is called on torch's meta device, so
               that not even the weights are allocated.
    optimizer  settings, or a function from parameters to an optimiser.
    precision  Lightning's name of it: "32-true", "bf16-mixed", ...
    loss       from the model and x `[batch, *input_shape]` to the loss; the sum of the scores where it is not given.
    forward    what is counted as multiply-adds, `model(x)` where it is not given.
    device     "cpu", or "cuda" where there is one: torch goes no step back on a device that it cannot find.

    Raises ValueError where the model has parameters without a size, does not take such an input, or takes other ways
    for other numbers.

    >>> estimate(lambda: nn.Linear(1000, 10), (1000,), batch=1).parts["optimizer"]  # Adam: two numbers a weight
    80088
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: take {', '.join(map(repr, PRECISIONS))}")
    if batch < 1:
        raise ValueError(f"batch={batch}: a step has one example or more")
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no size yet: run the model on one example before its cost is estimated")
    dtype, autocast = PRECISIONS[precision]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _twin(model, fake, dtype, device)
    parameters = sum(p.numel() for p in twin.parameters())
    with fake:
        x = torch.empty(batch, *input_shape, dtype=dtype, device=device)
    try:
        with fake:
            macs = _multiply_adds(twin, x[:1], forward)
            ledger = _step(twin, x, optimizer, loss, torch.autocast(device, autocast, enabled=autocast is not None))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the cost of {type(model).__name__} cannot be told without numbers, for what it does depends on them: "
            f"{error}"
        ) from error
    except Exception as error:  # whatever a model of others may raise
        raise ValueError(f"{type(model).__name__} does not take {list(x.shape)}: {error}") from error
    return Estimate(
        parameters, macs, batch, ledger.parts(), ledger.phases, ledger.fixed, ledger.moved, ledger.operators
    )


def refuse_if_too_large(cost: Estimate, available: int | None = None, device: str = "cpu") -> None:
    """A ValueError where a step does not fit into `available` bytes, with the largest batch that does.

    available  bytes; None looks at what is free on the device now, and lets everything pass where that is not known.
    """
    available = available_bytes(device) if available is None else available
    if available is None or cost.peak_bytes <= available:
        return
    batch = cost.largest_batch(available)
    if batch:
        steps = math.ceil(cost.batch / batch)
        way_out = (
            f"a batch of {batch} fits (with accumulate_grad_batches={steps} a step sees as many examples as now); or "
            "take fewer capsule types, a stem with more stride, weights that places share, or precision='bf16-mixed'"
        )
    else:
        way_out = "not even a batch of 1 fits: take a smaller model"
    raise ValueError(
        f"a training step of {cost.batch} examples holds about {readable_bytes(cost.peak_bytes)} ({cost._parts()}), "
        f"but {readable_bytes(available)} are free: {way_out}"
    )


def available_bytes(device: str = "cpu") -> int | None:
    """Bytes that a device has for this process, or None where nobody says.

    On CUDA what is free and what torch holds already, such as the model; on a CPU, under Linux, what is free.
    """
    where = torch.device(device)
    if where.type == "cuda":
        held: int = torch.cuda.memory_reserved(where)
        return held + int(torch.cuda.mem_get_info(where)[0])
    if where.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # a container may have less; "max" is no number
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def readable_bytes(size: float) -> str:
    """
    >>> readable_bytes(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _twin(model: nn.Module, fake: FakeTensorMode, dtype: torch.dtype, device: str) -> nn.Module:
    """A copy of the model with weights that have no numbers."""
    memo: dict[int, Any] = {}
    with fake:
        for tensor in (*model.parameters(), *model.buffers()):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            blank = torch.empty(tensor.shape, dtype=kind, device=device)
            memo[id(tensor)] = (
                nn.Parameter(blank, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
            )
    return copy.deepcopy(model, memo)


def _multiply_adds(model: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], object] | None) -> int:
    training = model.training
    counter = FlopCounterMode(display=False, custom_mapping=_routing_formulas())
    with torch.no_grad(), _Answering(), counter:
        model.eval()
        model(x) if forward is None else forward(model, x)
    model.train(training)
    return int(counter.get_total_flops()) // 2


def _step(
    model: nn.Module,
    x: Tensor,
    optimizer: Optimization | Callable[[list[nn.Parameter]], Optimizer],
    loss: Loss | None,
    autocast: Any,
) -> "_Ledger":
    """Two steps, of which the second is on record: by then there are gradients of a step before, and a state."""
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    update = optimizer.make_optimizer(model) if isinstance(optimizer, Optimization) else optimizer(weights)
    ledger = _Ledger()
    with ledger:
        ledger.own("parameters", (*model.parameters(), *model.buffers()))
        ledger.own("batch", [x])
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        update.step()
        ledger.own("gradients", [w.grad for w in weights if w.grad is not None])
        ledger.own("optimizer", [t for t in tree_iter(dict(update.state)) if isinstance(t, Tensor)])
        with ledger.phase("forward"):
            with autocast:
                out = model(x) if loss is None else loss(model, x)
            cost = out if loss is not None else _first_tensor(out).float().sum()
            update.zero_grad()
        with ledger.phase("backward"):
            del out
            cost.backward()
        ledger.own("gradients", [w.grad for w in weights if w.grad is not None])
        with ledger.phase("update"):
            update.step()
    return ledger


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers in memory: what is expanded is there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _first_tensor(out: object) -> Tensor:
    return next(t for t in tree_iter(out) if isinstance(t, Tensor))


class _Answering(TorchDispatchMode):
    """Answers the few questions for numbers that the library's checks ask, as right labels and step counts would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        if func is aten._unique2.default:  # which windows see a child: no more than there are entries
            return args[0].flatten(), torch.empty_like(args[0]), args[0].flatten()
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _Enough(Exception):
    """As much of an operator was looked at as is needed."""


class _Ledger(_Answering):
    """Which storages are alive, whose they are, and the most there was at once, in each phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, int] = {}
        self.fixed: dict[str, int] = {}
        self._alive: dict[int, int] = {}  # storage -> number
        self._owner: dict[int, str] = {}  # number -> part
        self._history: list[tuple[int, int]] = []  # (number, bytes), bytes below 0 where it goes
        self._marks: dict[str, tuple[int, int]] = {}  # phase -> its part of the history
        self._now = self._peak = 0
        self.moved = self.operators = 0
        self._inside: int | None = None  # operators still to be looked at inside one of routing's

    def own(self, part: str, tensors: Sequence[Tensor]) -> None:
        """These tensors are what the part is made of."""
        for tensor in tensors:
            self._owner[self._note(tensor)] = part

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The peak of what is done here."""
        self._peak, begin = self._now, len(self._history)
        if not self.phases:
            self.moved = self.operators = 0  # what came before was the step before
        yield
        self.phases[name] = self._peak
        self._marks[name] = begin, len(self._history)
        self.fixed[name] = self._parts_at_peak(name, self._peak)[1]

    def parts(self) -> dict[str, int]:
        """Bytes of each part at the moment of the peak of all."""
        name = max(self.phases, key=self.phases.__getitem__)
        return self._parts_at_peak(name, self.phases[name])[0]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._inside is not None:
            self._inside -= 1
            if self._inside < 0:
                raise _Enough
        elif func.namespace == "torchcaps":
            self._look_inside(func, args, kwargs)
        out = func(*args, **kwargs)
        written = [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor)]
        for tensor in written:
            self._note(tensor)
        if self._inside is None and not getattr(func, "is_view", False):
            read = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)]
            self.moved += sum(_size(tensor) for tensor in (*read, *written))
            self.operators += 1
        return out

    def _look_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run what is inside an operator of streamed routing, for the memory that it takes for itself.

        The other backends' operators are programs, which take theirs from elsewhere.
        """
        definition = _maybe_get_opdef(func)
        streamed = args[0] == "streamed" if isinstance(args[0], str) else func._opname.startswith("em_")
        if definition is None or not streamed:
            return
        self._inside = LOOKED_AT
        try:
            with self:
                definition._init_fn(*args, **kwargs)
        except _Enough:
            pass
        finally:
            self._inside = None

    def _note(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is on record from now until nobody holds it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return self._alive[key]
        number, size = len(self._history), storage.nbytes()
        self._alive[key] = number
        self._change(number, size)

        def gone() -> None:
            del self._alive[key]
            self._change(number, -size)

        weakref.finalize(storage, gone)
        return number

    def _change(self, number: int, size: int) -> None:
        self._history.append((number, size))
        self._now += size
        self._peak = max(self._peak, self._now)

    def _parts_at_peak(self, phase: str, peak: int) -> tuple[dict[str, int], int]:
        """(bytes of each part, bytes that do not depend on the batch) when the phase was at its peak."""
        parts = dict.fromkeys(("parameters", "gradients", "optimizer", "batch", "activations"), 0)
        begin, end = self._marks[phase]
        at_peak, now = dict(parts), 0
        for index, (number, size) in enumerate(self._history[:end]):
            parts[self._owner.get(number, "activations")] += size
            now += size
            if now == peak and index >= begin - 1:
                at_peak = dict(parts)
                break
        return at_peak, at_peak["parameters"] + at_peak["gradients"] + at_peak["optimizer"]


def _routing_formulas() -> dict[Any, Callable[..., int]]:
    """Operations of routing's operators, two for each multiply-add; each walk over the children forms the votes."""
    named = {"sum": 0, "forward": 2, "em_forward": 4}  # products with each number of a vote, besides forming it
    formulas = {}
    for name, products in named.items():
        operator = getattr(torch.ops.torchcaps, name, None)
        if operator is not None:
            formulas[operator] = _formula(operator.default, products)
    return formulas


def _formula(operator: Any, products: int) -> Callable[..., int]:
    names = [argument.name for argument in operator._schema.arguments]

    def count(*shapes: Any, out_shape: Any, **keywords: Any) -> int:
        of = dict(zip(names, shapes, strict=False)) | keywords
        W, J, P, Q = of["weight"]
        parents = out_shape if isinstance(out_shape, torch.Size) else out_shape[0]  # [N * windows, ...]
        children = W if W > 1 else of["poses"][1]
        votes = parents[0] * children * J * of["poses"][-2] * Q
        return int(2 * votes * (P + products))

    return count
