"""Routing passes in C++ for the CPU: votes are made in registers, used, and forgotten.

    u_ij = x_i W_ij                                     a child's vote, [R, P] x [P, Q]
    b_ij = prior_ij + <u_ij, state_j>                   cosine: <u_ij, state_j> / |u_ij|, 0 for a vote of zeros
    c_ij = exp b_ij / sum_k exp b_ik                    leaky: one more logit, 0, whose share goes to nobody
    s_j  = sum_i c_ij u_ij                              forward_pass;  sum_pass: c = 1

    g_ij = <u_ij, grad_j>
    d_ij = c_ij (g_ij - sum_k c_ik g_ik)                the gradient of b_ij
    d_state_j = sum_i d_ij u_ij                         backward_state (cosine: of u_ij / |u_ij|)

    du_ij = uniform_j + sum over rounds of c_ij grad_j + d_ij state_j
    d_x_i = sum_j du_ij W_ij^T,  d_W_ij = sum_n x_i^T du_ij        backward_full

Letters as everywhere: N batch, I children, J parents, R rows of a pose, P / Q columns below / above, K rounds.
Plain float32 tensors in and out, any strides. A child that takes no part has a pose of zeros, hence votes of zeros, and
needs no mask but where its gradient is asked for. Results are bitwise the same for every number of
threads, but for the gradient of a shared weight, which ends in products of torch.

The library is looked for at the first call, next to this file, and comes in several builds for one kind of machine
(x86-64-v2, v3, v4); the best that this processor runs is taken. Nothing is compiled at run time.
"""

import ctypes
import functools
import math
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Full", "backward_full", "backward_state", "build", "builds", "forward_pass", "load", "map_backward_full",
    "map_backward_state", "map_forward_pass", "map_sum_pass", "missing", "sum_pass", "supports",
]  # fmt: skip

_VERSION = 4
_POINTER = ctypes.c_void_p


def _fields(numbers: str, pointers: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in numbers.split()] + [(name, _POINTER) for name in pointers.split()]


class _Connected(ctypes.Structure):
    _fields_ = _fields("N I J R P Q shared leaky cosine threads", "poses weight prior")


class _Map(ctypes.Structure):
    _fields_ = _fields(
        "N C H W J R P Q kernel_h kernel_w stride_h stride_w padding_h padding_w out_h out_w leaky cosine threads",
        "poses weight prior",
    )


class _Folded(ctypes.Structure):
    _fields_ = _fields("N I J D leaky threads", "poses prior")


# name: problem, whether the number of rounds follows, how many tensors do
_FUNCTIONS: dict[str, tuple[type[ctypes.Structure], bool, int]] = {
    "tc_connected_sum": (_Connected, False, 1),
    "tc_connected_forward": (_Connected, False, 2),
    "tc_connected_backward_state": (_Connected, False, 3),
    "tc_connected_backward_full": (_Connected, True, 6),
    "tc_map_sum": (_Map, False, 1),
    "tc_map_forward": (_Map, False, 2),
    "tc_map_backward_state": (_Map, False, 3),
    "tc_map_backward_full": (_Map, True, 6),
    "tc_folded_sum": (_Folded, False, 1),
    "tc_folded_forward": (_Folded, False, 2),
    "tc_folded_backward_state": (_Folded, False, 3),
    "tc_folded_backward_full": (_Folded, True, 7),
}


# ---------------------------------------------------------------------------------------------------------- the library


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())


_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def builds() -> tuple[str, ...]:
    """Names of the builds this processor runs, best first: "v4", "v3", "v2", or "generic" where it is no x86-64."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return ("generic",)
    flags = _cpu_flags()
    if not flags:  # no /proc (macOS, Windows): torch knows
        capability = torch.backends.cpu.get_cpu_capability()
        return {"AVX512": ("v4", "v3", "v2"), "AVX2": ("v3", "v2")}.get(capability, ("v2",))
    return tuple(name for name, needed in (("v4", _V4), ("v3", _V3), ("v2", _V2)) if needed <= flags)


def _cut_short(path: Path) -> bool:
    """Whether an ELF file of 64 bits (Linux) ends before its last table, the section headers."""
    data = path.read_bytes() if path.is_file() else b""
    if data[:6] != b"\x7fELF\x02\x01":
        return False
    if len(data) < 64:
        return True
    (offset,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    return len(data) < offset + size * count


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions declared. OSError where it does not load or speaks another version."""
    if _cut_short(path):  # the system would load it, and stop the process at the first touch of what is missing
        raise OSError(f"{path} is cut short: install torchcaps once more")
    library = ctypes.CDLL(str(path))
    if absent := [name for name in ("tc_version", *_FUNCTIONS) if not hasattr(library, name)]:
        raise OSError(f"{path} has no {absent[0]}: it is no library of this package, or that of another version")
    version = int(library.tc_version())
    if version != _VERSION:
        raise OSError(f"{path} speaks version {version} of the interface, this package version {_VERSION}")
    for name, (problem, with_rounds, tensors) in _FUNCTIONS.items():
        function = getattr(library, name)
        rounds = [ctypes.c_int64] if with_rounds else []
        function.argtypes = [ctypes.POINTER(problem), *rounds, *[_POINTER] * tensors]
        function.restype = ctypes.c_int
    return library


def _paths(build: str) -> list[Path]:
    """Where libraries of a build lie: in every folder of this package, of which an editable install has two."""
    folders = dict.fromkeys([*sys.modules[__package__].__path__, str(Path(__file__).parent)])
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*torchcaps_native_{build}.*"))]


@functools.lru_cache(maxsize=1)
def _found() -> tuple[ctypes.CDLL | None, str]:
    """The library and the name of its build, or None and why."""
    reasons = []
    for name in builds():
        for path in _paths(name):
            try:
                return load(path), name
            except OSError as error:
                reasons.append(str(error))
    return None, "; ".join(reasons) or (
        f"torchcaps was built without a C++ compiler and has no kernels for {' or '.join(builds())}: "
        "install g++ or clang, then torchcaps once more"
    )


def missing() -> str | None:
    """Why there are no kernels, or None where there are."""
    library, text = _found()
    return text if library is None else None


def build() -> str | None:
    """Name of the build in use, one of `builds()`, or None."""
    library, text = _found()
    return None if library is None else text


def supports(
    poses: Tensor, weight: Tensor, *, cosine: bool = False, window: Sequence[Sequence[int]] | None = None
) -> str | None:
    """Why these kernels cannot take this call, or None where they can. bfloat16 and float16 have to be widened first.

    window  kernel, stride and padding of a map, each a number per axis; one axis counts as rows of a map of height 1.

    >>> supports(torch.zeros(2, 6, 1, 8, dtype=torch.float64), torch.zeros(6, 3, 8, 16, dtype=torch.float64))
    'the native kernels compute in float32: poses are torch.float64'
    """
    for name, tensor in (("poses", poses), ("weight", weight)):
        if tensor.device.type != "cpu":
            return f"the native kernels run on the CPU: {name} are on {tensor.device}"
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the native kernels compute in float32: {name} are {tensor.dtype}"
    if window is not None and len(window[0]) > 2:
        return f"the native kernels read maps of one or two axes: this one has {len(window[0])}"
    if window is not None and weight.shape[0] == 1:
        return "the native kernels take a weight for every entry of a window: this one is shared by all"
    return missing()


# ------------------------------------------------------------------------------------------------------------ arguments


def _floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {list(tensor.shape)} should be {list(shape)}")
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but the native kernels take torch.float32 on cpu"
        )
    return tensor.detach().contiguous()


def _pointers(tensors: list[Tensor]) -> ctypes.Array[_POINTER]:
    return (_POINTER * len(tensors))(*(t.data_ptr() for t in tensors))


@dataclass
class _Call:
    """A call's arguments, checked and laid out, and kept alive while C++ reads them."""

    kind: str
    """connected, map or folded: the middle of the names of its functions"""
    problem: ctypes.Structure
    poses: Tensor
    weight: Tensor
    prior: Tensor | None
    mask: Tensor | None
    parents: tuple[int, ...]
    """shape of a state"""

    @property
    def empty(self) -> bool:
        return self.poses.numel() == 0 or self.weight.numel() == 0

    def run(self, name: str, *arguments: Tensor | list[Tensor] | int | None) -> None:
        """Call a function; a list of tensors goes as an array of pointers."""
        if self.empty:
            return
        library, reason = _found()
        if library is None:
            raise RuntimeError(reason)
        each = [a for given in arguments for a in (given if isinstance(given, list) else [given])]
        for a in each:  # C++ reads what it is pointed at as float32
            if isinstance(a, Tensor) and (a.dtype != torch.float32 or not a.is_contiguous()):
                raise ValueError(f"{name}: the native kernels were handed {a.dtype}: is autocast on around them?")
        plain = [
            _pointers(a) if isinstance(a, list) else a.data_ptr() if isinstance(a, Tensor) else a for a in arguments
        ]
        if getattr(library, f"tc_{self.kind}_{name}")(ctypes.byref(self.problem), *plain):
            raise MemoryError(f"the native kernels found no memory for {name} of {list(self.parents)} parents")

    def new(self, *shape: int) -> Tensor:
        make = torch.zeros if self.empty else torch.empty
        return make(shape, dtype=torch.float32, device="cpu")

    def sum_over_children(self, name: str, *targets: Tensor) -> Tensor:
        targets = tuple(_floats("state" if k == 0 else "grad", t, self.parents) for k, t in enumerate(targets))
        out = self.new(*self.parents)
        self.run(name, *targets, out)
        return out


def _call(
    kind: str, sizes: dict[str, int], poses: Tensor, weight: Tensor, parents: tuple[int, ...], *,
    mask: Tensor | None, prior: Tensor | None, leaky: bool, cosine: bool, threads: int | None,
) -> _Call:  # fmt: skip
    children, J = (weight.shape[0] if kind == "map" else poses.shape[1]), weight.shape[1]
    poses, weight = _floats("poses", poses, tuple(poses.shape)), _floats("weight", weight, tuple(weight.shape))
    prior = None if prior is None else _floats("prior", prior, (children, J))
    if mask is not None and (mask.shape != poses.shape[:-2] or mask.dtype != torch.bool):
        raise ValueError(f"mask {list(mask.shape)} of {mask.dtype} should be {list(poses.shape[:-2])} of torch.bool")
    problem = {"connected": _Connected, "map": _Map, "folded": _Folded}[kind](
        **sizes, leaky=leaky, threads=torch.get_num_threads() if threads is None else threads,
        poses=poses.data_ptr(), prior=None if prior is None else prior.data_ptr(),
        **({} if kind == "folded" else {"cosine": cosine, "weight": weight.data_ptr()}),
    )  # fmt: skip
    return _Call(kind, problem, poses, weight, prior, mask, parents)


def _connected(
    poses: Tensor, weight: Tensor, *, mask: Tensor | None = None, prior: Tensor | None = None, leaky: bool = False,
    cosine: bool = False, threads: int | None = None,
) -> _Call:  # fmt: skip
    if (
        poses.ndim != 4
        or weight.ndim != 4
        or weight.shape[0] not in (1, poses.shape[1])
        or weight.shape[2] != poses.shape[3]
    ):
        raise ValueError(
            f"weight {list(weight.shape)} [I or 1, J, P, Q] does not fit poses {list(poses.shape)} [N, I, R, P]"
        )
    (N, I, R, P), (_, J, _, Q) = poses.shape, weight.shape
    shared = weight.shape[0] == 1 and I != 1
    if shared and not cosine:  # <x W, state> = <x, state W^T>: no votes at all
        kind, sizes = "folded", {"N": N, "I": I, "J": J, "D": R * P}
    else:
        kind, sizes = "connected", {"N": N, "I": I, "J": J, "R": R, "P": P, "Q": Q, "shared": shared}
    return _call(
        kind, sizes, poses, weight, (N, J, R, Q), mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads
    )


def _map(
    poses: Tensor, weight: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], *,
    mask: Tensor | None = None, prior: Tensor | None = None, leaky: bool = False, cosine: bool = False,
    threads: int | None = None,
) -> _Call:  # fmt: skip
    if poses.ndim != 6 or weight.ndim != 4 or weight.shape[0] != poses.shape[1] * kernel[0] * kernel[1]:
        raise ValueError(
            f"weight {list(weight.shape)} [C * {kernel[0]} * {kernel[1]}, J, P, Q] does not fit "
            f"poses {list(poses.shape)} [N, C, H, W, R, P]"
        )
    if weight.shape[2] != poses.shape[5]:
        raise ValueError(f"weight {list(weight.shape)} takes {weight.shape[2]} columns, poses {list(poses.shape)}")
    (N, C, H, W, R, P), (_, J, _, Q) = poses.shape, weight.shape
    rows, columns = (
        (size + 2 * pad - k) // step + 1 for size, k, step, pad in zip((H, W), kernel, stride, padding, strict=True)
    )
    if min(rows, columns) < 1:
        raise ValueError(f"a kernel of {list(kernel)} does not fit a map of {[H, W]} with padding {list(padding)}")
    sizes = {"N": N, "C": C, "H": H, "W": W, "J": J, "R": R, "P": P, "Q": Q, "out_h": rows, "out_w": columns}
    for name, (high, wide) in (("kernel", kernel), ("stride", stride), ("padding", padding)):
        sizes |= {f"{name}_h": high, f"{name}_w": wide}
    return _call(
        "map", sizes, poses, weight, (N, rows * columns, J, R, Q),
        mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- fully connected capsules


Rounds = Sequence[Tensor] | Tensor
"""A tensor of every round, in a list or stacked."""


class Full(NamedTuple):
    """What `backward_full` returns."""

    d_poses: Tensor
    d_weight: Tensor
    d_state_first: Tensor | None
    d_prior: Tensor | None


def sum_pass(poses: Tensor, weight: Tensor, *, mask: Tensor | None = None, threads: int | None = None) -> Tensor:
    """sum_i u_ij `[N, J, R, Q]`: a first round, but for its equal share 1 / J. See `forward_pass`."""
    call = _connected(poses, weight, mask=mask, threads=threads)
    if call.kind == "folded":
        return _each_parent(_total(call)[:, None].expand(-1, call.parents[1], -1, -1), call.weight[0])
    return call.sum_over_children("sum")


def forward_pass(
    poses: Tensor, weight: Tensor, state: Tensor, *, mask: Tensor | None = None, prior: Tensor | None = None,
    leaky: bool = False, cosine: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """s_j = sum_i c_ij u_ij `[N, J, R, Q]`, the parents of one round.

    poses    `[N, I, R, P]`, 0 where masked.
    weight   `[I, J, P, Q]`, or `[1, J, P, Q]` shared.
    state    `[N, J, R, Q]`.
    mask     `[N, I]`, True = takes part.
    prior    `[I, J]`, added to the logits.
    threads  how many, at most; None: as many as torch.
    """
    call = _connected(poses, weight, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads)
    if call.kind == "folded":
        return _lift(call, "forward", _floats("state", state, call.parents))
    return call.sum_over_children("forward", state)


def backward_state(
    poses: Tensor, weight: Tensor, state: Tensor, grad: Tensor, *, mask: Tensor | None = None,
    prior: Tensor | None = None, leaky: bool = False, cosine: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """Gradient `[N, J, R, Q]` in the state of a `forward_pass` from that in its result, `grad` `[N, J, R, Q]`."""
    call = _connected(poses, weight, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads)
    if call.kind == "folded":
        return _lift(call, "backward_state", _floats("state", state, call.parents), _floats("grad", grad, call.parents))
    return call.sum_over_children("backward_state", state, grad)


def backward_full(
    poses: Tensor, weight: Tensor, states: Rounds, grads: Rounds, *, uniform: Tensor | None = None,
    with_state: bool = True, with_prior: bool = False, mask: Tensor | None = None, prior: Tensor | None = None,
    leaky: bool = False, cosine: bool = False, threads: int | None = None,
) -> Full:  # fmt: skip
    """Gradients of K rounds over the same votes in one walk: a state and a grad of each, as of `backward_state`.

    uniform     `[N, J, R, Q]`, a gradient that every vote gets besides: a uniform round's gradient / J.
    with_state  also `d_state_first`, the gradient in the state of round 0 (a pass of its own).
    with_prior  also `d_prior` `[I, J]`.
    """
    call = _connected(poses, weight, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads)
    if call.kind == "folded":
        return _folded_full(call, states, grads, uniform, with_state, with_prior)
    return _full(call, states, grads, uniform, with_state, with_prior)


def _full(
    call: _Call, states: Rounds, grads: Rounds, uniform: Tensor | None, with_state: bool, with_prior: bool
) -> Full:
    states, grads = _each_round(call, states, grads)
    uniform = None if uniform is None else _floats("uniform", uniform, call.parents)
    d_poses, d_weight = call.new(*call.poses.shape), call.new(*call.weight.shape)
    d_prior = _prior_gradient(call) if with_prior else None
    call.run("backward_full", len(states), states, grads, uniform, d_poses, d_weight, d_prior)
    first = call.sum_over_children("backward_state", states[0], grads[0]) if with_state else None
    return Full(_of_those_present(call, d_poses), d_weight, first, d_prior)


def _each_round(call: _Call, states: Rounds, grads: Rounds) -> tuple[list[Tensor], list[Tensor]]:
    if len(states) != len(grads):
        raise ValueError(f"states of {len(states)} rounds do not fit grads of {len(grads)}")
    return ([_floats("state", s, call.parents) for s in states], [_floats("grad", g, call.parents) for g in grads])


def _prior_gradient(call: _Call) -> Tensor:
    children = call.weight.shape[0] if call.kind == "map" else call.poses.shape[1]
    return torch.zeros(children, call.weight.shape[1], dtype=torch.float32, device="cpu")


def _of_those_present(call: _Call, d_poses: Tensor) -> Tensor:
    """Zero where masked: the kernels know masked children as poses of zeros alone."""
    return d_poses if call.mask is None else d_poses.masked_fill_(~call.mask[..., None, None], 0)


# ----------------------------------------------------------------------------------------------- shared weights, folded


def _each_parent(rows: Tensor, weight: Tensor) -> Tensor:
    """rows `[.., J, R, A]` times weight `[J, A, B]`; a broadcast product would copy the weight for every row."""
    J, R, A = rows.shape[-3:]
    count = math.prod(rows.shape[:-3])
    by_parent = rows.reshape(count, J, R, A).transpose(0, 1).reshape(J, count * R, A)
    product = torch.bmm(by_parent, weight).view(J, count, R, weight.shape[2]).transpose(0, 1)
    return product.reshape(*rows.shape[:-1], weight.shape[2]).contiguous()


def _queries(call: _Call, parents: Tensor) -> Tensor:
    """`[.., N, J, R, Q]` -> `[.., N, J, R, P]`: parents seen from the children, state_j W_j^T."""
    return _each_parent(parents, call.weight[0].transpose(1, 2))


def _total(call: _Call) -> Tensor:
    """sum_i x_i `[N, R, P]`."""
    N, _, R, P = call.poses.shape
    total = call.new(N, R, P)
    call.run("sum", total)
    return total


def _lift(call: _Call, name: str, *targets: Tensor) -> Tensor:
    """A sum of children `[N, J, R, P]` as a sum of votes `[N, J, R, Q]`."""
    queries = [_queries(call, target) for target in targets]
    children = call.new(*queries[0].shape)
    call.run(name, *queries, children)
    return _each_parent(children, call.weight[0])


def _folded_full(
    call: _Call, states: Rounds, grads: Rounds, uniform: Tensor | None, with_state: bool, with_prior: bool
) -> Full:
    """With t_j = sum_i c_ij x_i and y_j = sum_i d_ij x_i of each round: dW_j = sum_k t_j^T grad_j + y_j^T state_j."""
    K = len(states)
    states, grads = (torch.stack(each) for each in _each_round(call, states, grads))
    queries, pulls = _queries(call, states), _queries(call, grads)
    d_poses, t, y = call.new(*call.poses.shape), call.new(*queries.shape), call.new(*queries.shape)
    d_prior = _prior_gradient(call) if with_prior else None
    flat = None if uniform is None else _queries(call, _floats("uniform", uniform, call.parents)).sum(dim=1)
    call.run("backward_full", K, queries, pulls, flat, d_poses, d_prior, t, y)
    d_weight = torch.einsum("knjrp,knjrq->jpq", torch.cat([t, y]), torch.cat([grads, states]))
    if uniform is not None:
        d_weight += torch.einsum("nrp,njrq->jpq", _total(call), uniform)
    first = _each_parent(y[0], call.weight[0]) if with_state else None
    return Full(_of_those_present(call, d_poses), d_weight[None], first, d_prior)


# ----------------------------------------------------------------------------------------------------------------- maps


def map_sum_pass(
    poses: Tensor, weight: Tensor, *, kernel: Sequence[int], stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0), mask: Tensor | None = None, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """`sum_pass` of every window: `[N, windows, J, R, Q]`. See `map_forward_pass`."""
    return _map(poses, weight, kernel, stride, padding, mask=mask, threads=threads).sum_over_children("sum")


def map_forward_pass(
    poses: Tensor, weight: Tensor, state: Tensor, *, kernel: Sequence[int], stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0), mask: Tensor | None = None, prior: Tensor | None = None, leaky: bool = False,
    cosine: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """`forward_pass` of every window of a map, which is read in place.

    poses    `[N, C, H, W, R, P]`, 0 where masked; one axis is H = 1.
    weight   `[C * kernel, J, P, Q]`, children in the order type, kernel row, kernel column.
    state    `[N, windows, J, R, Q]`, windows row by row.
    mask     `[N, C, H, W]`, True = takes part.
    prior    `[C * kernel, J]`.
    """
    call = _map(
        poses, weight, kernel, stride, padding, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads
    )
    return call.sum_over_children("forward", state)


def map_backward_state(
    poses: Tensor, weight: Tensor, state: Tensor, grad: Tensor, *, kernel: Sequence[int],
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), mask: Tensor | None = None,
    prior: Tensor | None = None, leaky: bool = False, cosine: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """`backward_state` of every window: `[N, windows, J, R, Q]`."""
    call = _map(
        poses, weight, kernel, stride, padding, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads
    )
    return call.sum_over_children("backward_state", state, grad)


def map_backward_full(
    poses: Tensor, weight: Tensor, states: Rounds, grads: Rounds, *, kernel: Sequence[int],
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), uniform: Tensor | None = None,
    with_state: bool = True, with_prior: bool = False, mask: Tensor | None = None, prior: Tensor | None = None,
    leaky: bool = False, cosine: bool = False, threads: int | None = None,
) -> Full:  # fmt: skip
    """`backward_full` of every window; states and grads `[N, windows, J, R, Q]`; a child sums over its windows."""
    call = _map(
        poses, weight, kernel, stride, padding, mask=mask, prior=prior, leaky=leaky, cosine=cosine, threads=threads
    )
    return _full(call, states, grads, uniform, with_state, with_prior)
