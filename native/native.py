"""The passes of routing on a CPU, in C++: votes live in registers, never in memory.

    forward_pass    s_j       = sum_i c_ij u_ij                      c = softmax_j of prior + <u_ij, state_j>
    backward_state  d_state_j = sum_i d_ij u_ij                      d_ij = c_ij (g_ij - sum_k c_ik g_ik), g_ij = <u_ij, grad_j>
    backward_full   du_ij     = uniform_j + sum_k c^k_ij grad^k_j + d^k_ij state^k_j, contracted at once into the gradients

Letters: N batch, I children, J parents, R rows of a pose, P / Q columns below / above, K rounds.
Plain float32 tensors in and out; anything else (devices, dtypes, autograd) is the caller's affair. The library is loaded at
the first call. It comes in several builds for one machine (x86-64-v2, v3, v4); the best that this processor runs is taken.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_VERSION = 1
_POINTER = ctypes.c_void_p


class _Connected(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("N", "I", "J", "R", "P", "Q", "shared", "leaky", "cosine", "threads")
    ] + [(name, _POINTER) for name in ("poses", "weight", "prior", "mask")]


class _Map(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *(
                "N",
                "C",
                "H",
                "W",
                "J",
                "R",
                "P",
                "Q",
                "kernel_h",
                "kernel_w",
                "stride_h",
                "stride_w",
                "padding_h",
                "padding_w",
            ),
            *("out_h", "out_w", "leaky", "cosine", "threads"),
        )
    ] + [(name, _POINTER) for name in ("poses", "weight", "prior", "mask")]


class _Folded(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("N", "I", "J", "D", "leaky", "threads")] + [
        (name, _POINTER) for name in ("poses", "prior", "mask")
    ]


_FUNCTIONS = {
    "tc_connected_sum": (_Connected, 1, False),
    "tc_map_sum": (_Map, 1, False),
    "tc_connected_forward": (_Connected, 2, False),
    "tc_connected_backward_state": (_Connected, 3, False),
    "tc_connected_backward_full": (_Connected, 6, True),
    "tc_map_forward": (_Map, 2, False),
    "tc_map_backward_state": (_Map, 3, False),
    "tc_map_backward_full": (_Map, 6, True),
    "tc_folded_forward": (_Folded, 2, False),
    "tc_folded_backward_state": (_Folded, 3, False),
    "tc_folded_backward_full": (_Folded, 5, True),
}


# ---- the library


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def builds() -> tuple[str, ...]:
    """Names of the builds that this processor runs, best first. "generic" is for every processor but x86-64."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return ("generic",)
    flags = _cpu_flags()
    if not flags:  # no /proc (macOS, Windows): torch knows
        capability = torch.backends.cpu.get_cpu_capability()
        return {"AVX512": ("v4", "v3", "v2"), "AVX2": ("v3", "v2")}.get(capability, ("v2",))
    levels = (("v4", _V4), ("v3", _V3), ("v2", _V2))
    return tuple(name for name, needed in levels if needed <= flags)


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions declared. Raises OSError where it does not load or speaks another version."""
    library = ctypes.CDLL(str(path))
    version = int(library.tc_version())
    if version != _VERSION:
        raise OSError(f"{path} speaks version {version} of the interface, this package version {_VERSION}")
    for name, (problem, pointers, with_rounds) in _FUNCTIONS.items():
        function = getattr(library, name)
        rounds = [ctypes.c_int64] if with_rounds else []
        function.argtypes = [ctypes.POINTER(problem), *rounds, *[_POINTER] * pointers]
        function.restype = ctypes.c_int
    return library


@functools.lru_cache(maxsize=1)
def _found() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    reasons = []
    for build in builds():
        for path in sorted(
            p
            for p in (*folder.glob("*torchcaps_native_*"), *folder.glob("build/*torchcaps_native_*"))
            if p.stem.endswith(build)
        ):
            try:
                return load(path), build
            except OSError as error:
                reasons.append(str(error))
    if reasons:
        return None, "; ".join(reasons)
    return None, (
        f"no native library for {' or '.join(builds()) or platform.machine()} in {folder}: the package was built without "
        "a C++ compiler; install g++ or clang and reinstall torchcaps"
    )


def missing() -> str | None:
    """Why the native kernels are absent, or None where they are there."""
    library, text = _found()
    return text if library is None else None


def build() -> str | None:
    """Name of the build in use ("v4", "v3", "v2", "generic"), or None."""
    library, text = _found()
    return None if library is None else text


def _library() -> ctypes.CDLL:
    library, text = _found()
    if library is None:
        raise RuntimeError(text)
    return library


# ---- arguments


def _floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {list(tensor.shape)} should be {list(shape)}")
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but the native kernels take torch.float32 on cpu"
        )
    return tensor.detach().contiguous()


def _maybe_floats(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if tensor is None else _floats(name, tensor, shape)


def _bytes(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    if tuple(mask.shape) != shape or mask.dtype != torch.bool:
        raise ValueError(f"mask {list(mask.shape)} of {mask.dtype} should be {list(shape)} of torch.bool")
    return mask.contiguous()


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads


def _run(name: str, problem: ctypes.Structure, *arguments: Tensor | int | None) -> None:
    plain = [a if isinstance(a, int) else _at(a) for a in arguments]
    if getattr(_library(), name)(ctypes.byref(problem), *plain):
        raise MemoryError(f"{name} ran out of memory")


# ---- fully connected capsules


class Full(NamedTuple):
    """What `backward_full` returns."""

    d_poses: Tensor
    d_weight: Tensor
    d_state_first: Tensor | None
    d_prior: Tensor | None


class _Sizes(NamedTuple):
    N: int
    I: int
    J: int
    R: int
    P: int
    Q: int

    @property
    def parents(self) -> tuple[int, ...]:
        return (self.N, self.J, self.R, self.Q)


def _sizes(poses: Tensor, weight: Tensor) -> _Sizes:
    if (
        poses.ndim != 4
        or weight.ndim != 4
        or weight.shape[0] not in (1, poses.shape[1])
        or weight.shape[2] != poses.shape[3]
    ):
        raise ValueError(
            f"weight {list(weight.shape)} [I or 1, J, P, Q] does not fit poses {list(poses.shape)} [N, I, R, P]"
        )
    N, I, R, P = poses.shape
    return _Sizes(N, I, weight.shape[1], R, P, weight.shape[3])


class _Call:
    """Arguments of one fully connected call, checked, and kept alive while C++ reads them."""

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        mask: Tensor | None,
        prior: Tensor | None,
        leaky: bool,
        cosine: bool,
        threads: int | None,
    ) -> None:
        self.sizes = s = _sizes(poses, weight)
        self.poses = _floats("poses", poses, tuple(poses.shape))
        self.weight = _floats("weight", weight, tuple(weight.shape))
        self.mask = _bytes(mask, (s.N, s.I))
        self.prior = _maybe_floats("prior", prior, (s.I, s.J))
        self.leaky, self.cosine, self.threads = leaky, cosine, _threads(threads)
        self.shared = weight.shape[0] == 1 and s.I != 1
        self.folds = self.shared and not cosine  # <x W, state> = <x, state W^T>: no votes at all
        self.empty = min(s) == 0

    def connected(self) -> _Connected:
        s = self.sizes
        return _Connected(
            *s,
            self.shared,
            self.leaky,
            self.cosine,
            self.threads,
            _at(self.poses),
            _at(self.weight),
            _at(self.prior),
            _at(self.mask),
        )

    def folded(self) -> _Folded:
        s = self.sizes
        return _Folded(
            *(s.N, s.I, s.J, s.R * s.P, self.leaky, self.threads), _at(self.poses), _at(self.prior), _at(self.mask)
        )

    def query(self, parents: Tensor) -> Tensor:
        """[.., N, J, R, Q] -> [.., N, J, R, P]: parents seen from the children, state_j W_j^T."""
        return _each_parent(parents, self.weight[0].transpose(1, 2))

    def lift(self, children: Tensor) -> Tensor:
        """[N, J, R, P] -> [N, J, R, Q]: a sum of children as a sum of votes."""
        return _each_parent(children, self.weight[0])


def _each_parent(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [.., J, R, A] times weight [J, A, B] -> [.., J, R, B]; a broadcast matmul would copy the weight for every row."""
    J, R, A = rows.shape[-3:]
    by_parent = rows.reshape(-1, J, R, A).transpose(0, 1).reshape(J, -1, A)
    return (
        torch.bmm(by_parent, weight)
        .view(J, -1, R, weight.shape[2])
        .transpose(0, 1)
        .reshape(*rows.shape[:-1], -1)
        .contiguous()
    )


def sum_pass(poses: Tensor, weight: Tensor, *, mask: Tensor | None = None, threads: int | None = None) -> Tensor:
    """sum_i u_ij [N, J, R, Q] over the children that take part: a first round, but for its equal coupling 1 / J."""
    call = _Call(poses, weight, mask, None, False, False, threads)
    s = call.sizes
    if call.empty:
        return poses.new_zeros(s.parents)
    if call.folds:
        taking = call.poses if call.mask is None else call.poses * call.mask[:, :, None, None]
        return call.lift(taking.sum(dim=1, keepdim=True).expand(-1, s.J, -1, -1))
    out = poses.new_empty(s.parents)
    _run("tc_connected_sum", call.connected(), out)
    return out


def forward_pass(
    poses: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Tensor:
    """s [N, J, R, Q] of poses [N, I, R, P], weight [I or 1, J, P, Q], state [N, J, R, Q]; mask [N, I], prior [I, J]."""
    call = _Call(poses, weight, mask, prior, leaky, cosine, threads)
    s = call.sizes
    state = _floats("state", state, s.parents)
    if call.empty:
        return poses.new_zeros(s.parents)
    if call.folds:
        t = poses.new_empty(s.N, s.J, s.R, s.P)
        query = call.query(state)
        _run("tc_folded_forward", call.folded(), query, t)
        return call.lift(t)
    out = poses.new_empty(s.parents)
    _run("tc_connected_forward", call.connected(), state, out)
    return out


def backward_state(
    poses: Tensor,
    weight: Tensor,
    state: Tensor,
    grad: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Tensor:
    """d_state [N, J, R, Q]: the gradient of one forward pass in its state, of grad [N, J, R, Q] in its result."""
    call = _Call(poses, weight, mask, prior, leaky, cosine, threads)
    s = call.sizes
    state, grad = _floats("state", state, s.parents), _floats("grad", grad, s.parents)
    if call.empty:
        return poses.new_zeros(s.parents)
    if call.folds:
        y = poses.new_empty(s.N, s.J, s.R, s.P)
        query, pull = call.query(state), call.query(grad)
        _run("tc_folded_backward_state", call.folded(), query, pull, y)
        return call.lift(y)
    out = poses.new_empty(s.parents)
    _run("tc_connected_backward_state", call.connected(), state, grad, out)
    return out


def backward_full(
    poses: Tensor,
    weight: Tensor,
    states: Tensor,
    grads: Tensor,
    *,
    uniform: Tensor | None = None,
    with_state: bool = True,
    with_prior: bool = False,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Full:
    """All gradients of K rounds at once: states, grads [K, N, J, R, Q].

    uniform: [N, J, R, Q], gradient of a plain sum of votes (a first round with equal coupling: its gradient / J), or None.
    with_state: also `d_state_first`, the gradient in the state of round 0 (a pass of its own).
    with_prior: also `d_prior` [I, J].
    """
    call = _Call(poses, weight, mask, prior, leaky, cosine, threads)
    s = call.sizes
    K = states.shape[0]
    states, grads = _floats("states", states, (K, *s.parents)), _floats("grads", grads, (K, *s.parents))
    uniform = _maybe_floats("uniform", uniform, s.parents)
    d_prior = poses.new_zeros(s.I, s.J) if with_prior else None
    if call.empty:
        return Full(
            torch.zeros_like(poses),
            torch.zeros_like(weight),
            torch.zeros_like(states[0]) if with_state else None,
            d_prior,
        )
    d_poses, d_weight = torch.empty_like(call.poses), torch.empty_like(call.weight)
    if call.folds:
        first = _folded_full(call, states, grads, uniform, d_poses, d_weight, d_prior)
        return Full(d_poses, d_weight, first if with_state else None, d_prior)
    problem = call.connected()
    _run("tc_connected_backward_full", problem, K, states, grads, uniform, d_poses, d_weight, d_prior)
    first = None
    if with_state:
        first = poses.new_empty(s.parents)
        _run("tc_connected_backward_state", problem, states[0], grads[0], first)
    return Full(d_poses, d_weight, first, d_prior)


def _folded_full(
    call: _Call,
    states: Tensor,
    grads: Tensor,
    uniform: Tensor | None,
    d_poses: Tensor,
    d_weight: Tensor,
    d_prior: Tensor | None,
) -> Tensor:
    """Fills d_poses, d_weight, d_prior; returns d_state of round 0."""
    s = call.sizes
    problem = call.folded()
    queries, pulls = call.query(states), call.query(grads)
    flat = None if uniform is None else call.query(uniform).sum(dim=1)
    _run("tc_folded_backward_full", problem, states.shape[0], queries, pulls, flat, d_poses, d_prior)
    d_weight.zero_()
    first = torch.empty(0)
    for k in range(states.shape[0]):
        t, y = torch.empty_like(queries[k]), torch.empty_like(queries[k])
        _run("tc_folded_forward", problem, queries[k], t)
        _run("tc_folded_backward_state", problem, queries[k], pulls[k], y)
        d_weight[0] += torch.einsum("njrp,njrq->jpq", t, grads[k]) + torch.einsum("njrp,njrq->jpq", y, states[k])
        if k == 0:
            first = call.lift(y)
    if uniform is not None:
        taking = call.poses if call.mask is None else call.poses * call.mask[:, :, None, None]
        d_weight[0] += torch.einsum("nrp,njrq->jpq", taking.sum(dim=1), uniform)
    return first


def folded_forward(
    poses: Tensor,
    query: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    threads: int | None = None,
) -> Tensor:
    """t_j = sum_i c_ij x_i [N, J, R, P] with logits <x_i, query_j>; query [N, J, R, P] is state_j W_j^T."""
    call = _FoldedCall(poses, query.shape[1], mask, prior, leaky, threads)
    query = _floats("query", query, call.parents)
    t = torch.zeros(call.parents) if call.empty else torch.empty(call.parents)
    if not call.empty:
        _run("tc_folded_forward", call.problem, query, t)
    return t


def folded_backward_state(
    poses: Tensor,
    query: Tensor,
    grad: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    threads: int | None = None,
) -> Tensor:
    """y_j = sum_i d_ij x_i [N, J, R, P], g_ij = <x_i, grad_j>; grad [N, J, R, P] is the gradient in t_j."""
    call = _FoldedCall(poses, query.shape[1], mask, prior, leaky, threads)
    query, grad = _floats("query", query, call.parents), _floats("grad", grad, call.parents)
    y = torch.zeros(call.parents) if call.empty else torch.empty(call.parents)
    if not call.empty:
        _run("tc_folded_backward_state", call.problem, query, grad, y)
    return y


def folded_backward_full(
    poses: Tensor,
    queries: Tensor,
    grads: Tensor,
    *,
    uniform: Tensor | None = None,
    with_prior: bool = False,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    threads: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """d_poses and d_prior of K rounds; queries, grads [K, N, J, R, P]; uniform [N, R, P] is added to every child's gradient.

    The gradient of the weight is sum_k t^k_j^T (gradient of s^k_j) + y^k_j^T state^k_j, from the results of the other two.
    """
    call = _FoldedCall(poses, queries.shape[2], mask, prior, leaky, threads)
    shape = (queries.shape[0], *call.parents)
    queries, grads = _floats("queries", queries, shape), _floats("grads", grads, shape)
    uniform = _maybe_floats("uniform", uniform, (poses.shape[0], *poses.shape[2:]))
    d_poses = torch.zeros_like(call.poses) if call.empty else torch.empty_like(call.poses)
    d_prior = torch.zeros(poses.shape[1], call.parents[1]) if with_prior else None
    if not call.empty:
        _run("tc_folded_backward_full", call.problem, queries.shape[0], queries, grads, uniform, d_poses, d_prior)
    return d_poses, d_prior


class _FoldedCall:
    """Arguments of one folded call, checked, and kept alive while C++ reads them."""

    def __init__(
        self, poses: Tensor, parents: int, mask: Tensor | None, prior: Tensor | None, leaky: bool, threads: int | None
    ) -> None:
        N, I, R, P = poses.shape
        self.parents = (N, parents, R, P)
        self.poses = _floats("poses", poses, (N, I, R, P))
        self.mask, self.prior = _bytes(mask, (N, I)), _maybe_floats("prior", prior, (I, parents))
        self.empty = min(N, I, parents, R, P) == 0
        self.problem = _Folded(
            *(N, I, parents, R * P, leaky, _threads(threads)), _at(self.poses), _at(self.prior), _at(self.mask)
        )


# ---- maps


class _MapCall:
    """Arguments of one call on a map, checked, and kept alive while C++ reads them."""

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        mask: Tensor | None,
        prior: Tensor | None,
        leaky: bool,
        cosine: bool,
        threads: int | None,
    ) -> None:
        if poses.ndim != 6 or weight.ndim != 4:
            raise ValueError(
                f"poses {list(poses.shape)} should be [N, C, H, W, R, P], weight {list(weight.shape)} [I, J, P, Q]"
            )
        N, C, H, W, R, P = poses.shape
        children, J, Q = C * kernel[0] * kernel[1], weight.shape[1], weight.shape[3]
        out = [
            (size + 2 * pad - k) // step + 1 for size, k, step, pad in zip((H, W), kernel, stride, padding, strict=True)
        ]
        if min(out) < 1:
            raise ValueError(f"a kernel of {list(kernel)} does not fit a map of {[H, W]} with padding {list(padding)}")
        self.poses = _floats("poses", poses, (N, C, H, W, R, P))
        self.weight = _floats("weight", weight, (children, J, P, Q))
        self.mask, self.prior = _bytes(mask, (N, C, H, W)), _maybe_floats("prior", prior, (children, J))
        self.children, self.J = children, J
        self.parents = (N, out[0] * out[1], J, R, Q)
        self.empty = min(N, C, J, R, P, Q) == 0
        self.problem = _Map(
            *(N, C, H, W, J, R, P, Q, *kernel, *stride, *padding, *out, leaky, cosine, _threads(threads)),
            *(_at(self.poses), _at(self.weight), _at(self.prior), _at(self.mask)),
        )


def map_sum_pass(
    poses: Tensor,
    weight: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    mask: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """`sum_pass` of every window: [N, windows, J, R, Q]."""
    call = _MapCall(poses, weight, kernel, stride, padding, mask, None, False, False, threads)
    if call.empty:
        return torch.zeros(call.parents)
    out = torch.empty(call.parents)
    _run("tc_map_sum", call.problem, out)
    return out


def map_forward_pass(
    poses: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Tensor:
    """`forward_pass` of every window of poses [N, C, H, W, R, P]; weight [C * kernel, J, P, Q] in the order (type, kernel row,
    kernel column); state and result [N, windows, J, R, Q], windows row by row; mask [N, C, H, W]. One dimension is H = 1.
    """
    call = _MapCall(poses, weight, kernel, stride, padding, mask, prior, leaky, cosine, threads)
    state = _floats("state", state, call.parents)
    if call.empty:
        return torch.zeros(call.parents)
    out = torch.empty(call.parents)
    _run("tc_map_forward", call.problem, state, out)
    return out


def map_backward_state(
    poses: Tensor,
    weight: Tensor,
    state: Tensor,
    grad: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Tensor:
    """`backward_state` of every window: [N, windows, J, R, Q]."""
    call = _MapCall(poses, weight, kernel, stride, padding, mask, prior, leaky, cosine, threads)
    state, grad = _floats("state", state, call.parents), _floats("grad", grad, call.parents)
    if call.empty:
        return torch.zeros(call.parents)
    out = torch.empty(call.parents)
    _run("tc_map_backward_state", call.problem, state, grad, out)
    return out


def map_backward_full(
    poses: Tensor,
    weight: Tensor,
    states: Tensor,
    grads: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    uniform: Tensor | None = None,
    with_state: bool = True,
    with_prior: bool = False,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    threads: int | None = None,
) -> Full:
    """`backward_full` of every window; states, grads [K, N, windows, J, R, Q]; a child's gradient sums over its windows."""
    call = _MapCall(poses, weight, kernel, stride, padding, mask, prior, leaky, cosine, threads)
    shape = (states.shape[0], *call.parents)
    states, grads = _floats("states", states, shape), _floats("grads", grads, shape)
    uniform = _maybe_floats("uniform", uniform, call.parents)
    d_prior = torch.zeros(call.children, call.J) if with_prior else None
    first = torch.zeros(call.parents) if with_state else None
    if call.empty:
        return Full(torch.zeros_like(call.poses), torch.zeros_like(call.weight), first, d_prior)
    d_poses, d_weight = torch.empty_like(call.poses), torch.empty_like(call.weight)
    _run("tc_map_backward_full", call.problem, states.shape[0], states, grads, uniform, d_poses, d_weight, d_prior)
    if first is not None:
        _run("tc_map_backward_state", call.problem, states[0], grads[0], first)
    return Full(d_poses, d_weight, first, d_prior)
