# mypy: disable-error-code="no-untyped-def"
"""Routing passes as Triton kernels: votes are made in registers, used, and forgotten.

    u_ij = x_i W_ij                                     a child's vote, [R, P] x [P, Q]
    b_ij = prior_ij + <u_ij, state_j>                   cosine: <u_ij, state_j> / |u_ij|, 0 for a vote of zeros
    c_ij = exp b_ij / sum_k exp b_ik                    leaky: one more logit, 0, whose share goes to nobody
    s_j  = sum_i c_ij u_ij                              forward_pass

    g_ij = <u_ij, grad_j>
    d_ij = c_ij (g_ij - sum_k c_ik g_ik)                the gradient of b_ij
    d_state_j = sum_i d_ij u_ij                         backward_state (cosine: of u_ij / |u_ij|)

    du_ij = sum over rounds of c_ij grad_j + d_ij state_j
    d_x_i = sum_j du_ij W_ij^T,  d_W_ij = sum_n x_i^T du_ij        backward_full

Letters as everywhere: N batch, I children, J parents, R rows of a pose, P / Q columns below / above.

Three layouts, two families of kernels:

    fully connected   a program holds some batch rows and walks over the children: rows x (J Q) votes per child
    convolution       the same walk; a "batch row" is a window, and where its child lies on the map is computed
    shared weight     <x_i W_j, state_j> = <x_i, state_j W_j^T>: no votes at all, attention over the children
                      (cosine needs the length of every vote and takes the first family)

What does not fit in one tile of parents is walked in tiles; the softmax's normaliser is then found by a pass of its own
([N, I], never [N, I, J]). Inputs are float32, bfloat16 or float16; all sums and all results are float32.

Deterministic: no atomics. Every output has one owner, or is a sum of partial sums in a fixed order; how many there are
depends on the sizes alone.

Needs Triton; import this module only where it is wanted. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Tiles", "Window", "backward_full", "backward_state", "forward_pass", "supports"]

Precision = Literal["ieee", "tf32x3", "tf32"]
"""How float32 matrix products are made: in full, as three tf32 products (nearly full), or as one (10 bits)."""


class Window(NamedTuple):
    """How a convolution looks at a map: rows and columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def out(self, height: int, width: int) -> tuple[int, int]:
        """How many windows there are."""
        high, wide = (
            (size + 2 * pad - k) // step + 1
            for size, k, step, pad in zip((height, width), self.kernel, self.stride, self.padding, strict=True)
        )
        return high, wide


class Tiles(NamedTuple):
    """What one program holds at a time (powers of two), and over how many programs a sum is spread."""

    rows: int
    """batch rows (windows) of the first family, children of the second"""
    parents: int
    parts: int
    warps: int


# --------------------------------------------------------------------------------------------------------- kernel parts


@triton.jit
def _place(b, exists, i, MASK, I, C, H, W, HO, WO, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
           SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):  # fmt: skip
    """Where child i of batch row b lies among all poses, and whether it takes part. KH = 0: no map."""
    if KH > 0:
        n = b // (HO * WO)
        y = b % (HO * WO) // WO * SH - PH + i // KW % KH
        x = b % WO * SW - PW + i % KW  # WO divides HO * WO
        place = ((n.to(tl.int64) * C + i // (KH * KW)) * H + y) * W + x
        takes = exists & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    else:
        place = b.to(tl.int64) * I + i
        takes = exists
    if MASK is not None:
        takes = takes & (tl.load(MASK + place, mask=takes, other=0) != 0)
    return place, takes


@triton.jit
def _weight(W, i, weight_step, p0, j0, J: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, PC: tl.constexpr,
            JT: tl.constexpr, QP: tl.constexpr):  # fmt: skip
    """Rows p0 ... p0 + PC of the weights of child i towards a tile of parents, [PC, JT * QP], and where they lie."""
    p = p0 + tl.arange(0, PC)[:, None]
    col = tl.arange(0, JT * QP)[None, :]
    j = j0 + col // QP
    q = col % QP
    at = (j * P + p) * Q + q
    here = (p < P) & (j < J) & (q < Q)
    # int64: I * J * P * Q may exceed 2^31
    w = tl.load(W + tl.cast(i, tl.int64) * weight_step + at, mask=here, other=0.0)
    return w.to(tl.float32), at, here


@triton.jit
def _poses(X, place, takes, p0, R: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, RP: tl.constexpr,
           PC: tl.constexpr):  # fmt: skip
    """Columns p0 ... p0 + PC of one child of each batch row, [BB * RP, PC], where they lie, and which of them exist."""
    r = tl.arange(0, BB * RP) % RP
    p = p0 + tl.arange(0, PC)
    at = (place * (R * P) + r * P)[:, None] + p[None, :]
    inside = (r < R)[:, None] & (p < P)[None, :]
    x = tl.load(X + at, mask=takes[:, None] & inside, other=0.0)
    return x.to(tl.float32), at, inside


@triton.jit
def _votes(X, W, place, takes, i, weight_step, j0, J: tl.constexpr, R: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
           PRECISION: tl.constexpr, BB: tl.constexpr, RP: tl.constexpr, PC: tl.constexpr, JT: tl.constexpr,
           QP: tl.constexpr):  # fmt: skip
    """Votes of child i in a tile of parents, [BB, RP, JT, QP]. A few columns of a pose at a time."""
    u = tl.zeros((BB * RP, JT * QP), dtype=tl.float32)
    for p0 in range(0, P, PC):
        x, _, _ = _poses(X, place, takes, p0, R, P, BB, RP, PC)
        w, _, _ = _weight(W, i, weight_step, p0, j0, J, P, Q, PC, JT, QP)
        u = tl.dot(x, w, u, input_precision=PRECISION)
    return tl.reshape(u, (BB, RP, JT, QP))


@triton.jit
def _parents_at(b0, row_end, j0, J: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, BB: tl.constexpr, RP: tl.constexpr,
                JT: tl.constexpr, QP: tl.constexpr):  # fmt: skip
    """Where [BB, RP, JT, QP] lies in a tensor [B, J, R, Q]."""
    row = tl.arange(0, BB * RP)[:, None]
    b = b0 + row // RP
    r = row % RP
    col = tl.arange(0, JT * QP)[None, :]
    j = j0 + col // QP
    q = col % QP
    return (b.to(tl.int64) * (J * R * Q) + r * Q) + (j * (R * Q) + q), (b < row_end) & (r < R) & (j < J) & (q < Q)


@triton.jit
def _agree(u, s):
    """<u, s> over rows and columns of a pose: [BB, RP, JT, QP] -> [BB, JT]."""
    return tl.sum(tl.sum(u * s, axis=3), axis=1)


@triton.jit
def _inverse_length(u):
    """1 / |u| over rows and columns of a pose, 0 for zeros; scaled first: no square vanishes or overflows."""
    top = tl.max(tl.max(tl.abs(u), axis=3), axis=1)
    null = top < 1e-36
    scale = 1.0 / tl.where(null, 1.0, top)
    v = u * scale[:, None, :, None]
    return tl.where(null, 0.0, scale / tl.sqrt(tl.where(null, 1.0, _agree(v, v))))


@triton.jit
def _with_prior(a, PRIOR, i, j0, J: tl.constexpr, JT: tl.constexpr):
    """Logits [rows, JT] of child i (or of one child per row): -inf where there is no parent."""
    j = j0 + tl.arange(0, JT)
    if PRIOR is not None:
        a += tl.load(PRIOR + tl.cast(i, tl.int64) * J + j, mask=j < J, other=0.0)[None, :]
    return tl.where((j < J)[None, :], a, float("-inf"))


@triton.jit
def _couple(b, LSE, at, takes, LEAKY: tl.constexpr):
    """Shares [rows, JT] from logits: a softmax where all parents are in the tile, else by the normaliser in LSE."""
    if LSE is None:
        top = tl.max(b, axis=1)
        if LEAKY:
            top = tl.maximum(top, 0.0)
        e = tl.exp(b - top[:, None])
        z = tl.sum(e, axis=1)
        if LEAKY:
            z += tl.exp(-top)
        c = e / z[:, None]
    else:
        c = tl.exp(b - tl.load(LSE + at, mask=takes, other=0.0)[:, None])
    return tl.where(takes[:, None], c, 0.0)


@triton.jit
def _logit_grad(c, g, DELTA, at, takes):
    """d [rows, JT] = c (g - sum_k c_k g_k); the sum comes from DELTA where the parents are in several tiles."""
    g = tl.where(takes[:, None], g, 0.0)
    mean = tl.sum(c * g, axis=1) if DELTA is None else tl.load(DELTA + at, mask=takes, other=0.0)
    return c * (g - mean[:, None])


@triton.jit
def _online(b, g, top, z, mean):
    """One more tile of parents for a running softmax: highest logit, sum of exp, sum of exp * g."""
    new = tl.maximum(top, tl.max(b, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp(top - safe)
    e = tl.exp(b - safe[:, None])
    return new, z * shrink + tl.sum(e, axis=1), mean * shrink + tl.sum(e * g, axis=1)


# ------------------------------------------------------------------------- fully connected and convolution: the kernels


@triton.jit
def rows_sum(X, WEIGHT, STATE, GRAD, MASK, PRIOR, LSE, DELTA, OUT, B, I, weight_step, per_part, C, H, W, HO, WO,
             KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
             J: tl.constexpr, R: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, LEAKY: tl.constexpr,
             COSINE: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, RP: tl.constexpr, PC: tl.constexpr,
             JT: tl.constexpr, QP: tl.constexpr):  # fmt: skip
    """Forward (GRAD None): sum_i c_ij u_ij. Backward: sum_i d_ij u_ij. Grid: rows, parts of the children, parents.

    OUT [parts, B, J, R, Q].
    """
    b0 = tl.program_id(0) * BB
    part = tl.program_id(1)
    j0 = tl.program_id(2) * JT
    b = b0 + tl.arange(0, BB)
    rows = b0 + tl.arange(0, BB * RP) // RP
    at, here = _parents_at(b0, B, j0, J, R, Q, BB, RP, JT, QP)
    state = tl.reshape(tl.load(STATE + at, mask=here, other=0.0), (BB, RP, JT, QP))
    if GRAD is not None:
        grad = tl.reshape(tl.load(GRAD + at, mask=here, other=0.0), (BB, RP, JT, QP))
    total = tl.zeros((BB, RP, JT, QP), dtype=tl.float32)
    for i in range(part * per_part, tl.minimum((part + 1) * per_part, I)):
        place, takes = _place(rows, rows < B, i, MASK, I, C, H, W, HO, WO, KH, KW, SH, SW, PH, PW)
        u = _votes(X, WEIGHT, place, takes, i, weight_step, j0, J, R, P, Q, PRECISION, BB, RP, PC, JT, QP)
        _, takes_part = _place(b, b < B, i, MASK, I, C, H, W, HO, WO, KH, KW, SH, SW, PH, PW)
        a = _agree(u, state)
        if COSINE:
            inverse = _inverse_length(u)
            a = a * inverse
        child = b.to(tl.int64) * I + i
        share = _couple(_with_prior(a, PRIOR, i, j0, J, JT), LSE, child, takes_part, LEAKY)
        if GRAD is not None:
            share = _logit_grad(share, _agree(u, grad), DELTA, child, takes_part)
            if COSINE:
                share = share * inverse
        total += share[:, None, :, None] * u
    start = tl.cast(part, tl.int64) * B * (J * R * Q)
    tl.store(OUT + start + at, tl.reshape(total, (BB * RP, JT * QP)), mask=here)


@triton.jit
def rows_statistics(X, WEIGHT, STATES, GRADS, MASK, PRIOR, LSE, DELTA, B, I, weight_step, per_part, C, H, W, HO, WO,
                    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
                    PW: tl.constexpr, J: tl.constexpr, R: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
                    LEAKY: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr,
                    RP: tl.constexpr, PC: tl.constexpr, JT: tl.constexpr, QP: tl.constexpr):  # fmt: skip
    """For parents in several tiles: LSE [K, B, I] = log sum_j exp b_ij, DELTA [K, B, I] = sum_j c_ij g_ij.

    Grid: rows, parts of the children, rounds.
    """
    b0 = tl.program_id(0) * BB
    part = tl.program_id(1)
    k = tl.program_id(2)
    b = b0 + tl.arange(0, BB)
    rows = b0 + tl.arange(0, BB * RP) // RP
    start = tl.cast(k, tl.int64) * B
    for i in range(part * per_part, tl.minimum((part + 1) * per_part, I)):
        place, takes = _place(rows, rows < B, i, MASK, I, C, H, W, HO, WO, KH, KW, SH, SW, PH, PW)
        if LEAKY:
            top = tl.zeros((BB,), dtype=tl.float32)
            z = top + 1.0
        else:
            top = tl.full((BB,), float("-inf"), dtype=tl.float32)
            z = tl.zeros((BB,), dtype=tl.float32)
        mean = tl.zeros((BB,), dtype=tl.float32)
        for j0 in range(0, J, JT):
            u = _votes(X, WEIGHT, place, takes, i, weight_step, j0, J, R, P, Q, PRECISION, BB, RP, PC, JT, QP)
            at, here = _parents_at(b0, B, j0, J, R, Q, BB, RP, JT, QP)
            at += start * (J * R * Q)
            a = _agree(u, tl.reshape(tl.load(STATES + at, mask=here, other=0.0), (BB, RP, JT, QP)))
            if COSINE:
                a = a * _inverse_length(u)
            g = a
            if GRADS is not None:
                g = _agree(u, tl.reshape(tl.load(GRADS + at, mask=here, other=0.0), (BB, RP, JT, QP)))
            top, z, mean = _online(_with_prior(a, PRIOR, i, j0, J, JT), g, top, z, mean)
        child = (start + b) * I + i
        tl.store(LSE + child, top + tl.log(z), mask=b < B)
        if GRADS is not None:
            tl.store(DELTA + child, mean / z, mask=b < B)


@triton.jit
def rows_full(X, WEIGHT, STATES, GRADS, MASK, PRIOR, LSE, DELTA, D_X, D_WEIGHT, D_PRIOR, B, I, K, weight_step,
              per_group, per_part, poses_size, C, H, W, HO, WO, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
              SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, J: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
              Q: tl.constexpr, SHARED: tl.constexpr, LEAKY: tl.constexpr, COSINE: tl.constexpr,
              PRECISION: tl.constexpr, BB: tl.constexpr, RP: tl.constexpr, PC: tl.constexpr, JT: tl.constexpr,
              QP: tl.constexpr):  # fmt: skip
    """Gradients of poses, weight and prior over all rounds.

    Grid: groups of children, parts of the rows, tiles of parents x chunks of the columns below.

    D_X [tiles of parents, poses]; D_WEIGHT [parts of the rows, I | groups, J, P, Q]; D_PRIOR [parts of the rows, I, J].
    On a map a group is all children of one type, so that a place of the map has one owner however many windows see it.
    """
    group = tl.program_id(0)
    part = tl.program_id(1)
    chunks: tl.constexpr = (P + PC - 1) // PC
    j0 = tl.program_id(2) // chunks * JT
    p0 = tl.program_id(2) % chunks * PC
    row_end = tl.minimum((part + 1) * per_part, B)
    j = j0 + tl.arange(0, JT)
    d_x_tile = tl.cast(tl.program_id(2) // chunks, tl.int64) * poses_size
    weights = tl.num_programs(0) if SHARED else I
    d_w = tl.zeros((PC, JT * QP), dtype=tl.float32)
    for i in range(group * per_group, tl.minimum((group + 1) * per_group, I)):
        w, w_at, w_here = _weight(WEIGHT, i, weight_step, p0, j0, J, P, Q, PC, JT, QP)
        if not SHARED:
            d_w = tl.zeros((PC, JT * QP), dtype=tl.float32)
        d_prior = tl.zeros((JT,), dtype=tl.float32)
        for b0 in range(part * per_part, row_end, BB):
            b = b0 + tl.arange(0, BB)
            rows = b0 + tl.arange(0, BB * RP) // RP
            place, takes = _place(rows, rows < row_end, i, MASK, I, C, H, W, HO, WO, KH, KW, SH, SW, PH, PW)
            x, x_at, inside = _poses(X, place, takes, p0, R, P, BB, RP, PC)
            if chunks == 1:
                u = tl.reshape(tl.dot(x, w, input_precision=PRECISION), (BB, RP, JT, QP))
            else:
                u = _votes(X, WEIGHT, place, takes, i, weight_step, j0, J, R, P, Q, PRECISION, BB, RP, PC, JT, QP)
            _, takes_part = _place(b, b < row_end, i, MASK, I, C, H, W, HO, WO, KH, KW, SH, SW, PH, PW)
            if COSINE:
                inverse = _inverse_length(u)
            d_u = tl.zeros((BB, RP, JT, QP), dtype=tl.float32)
            at, here = _parents_at(b0, row_end, j0, J, R, Q, BB, RP, JT, QP)
            for k in range(K):
                start = tl.cast(k, tl.int64) * B
                child = (start + b) * I + i
                state = tl.reshape(tl.load(STATES + start * (J * R * Q) + at, mask=here, other=0.0), (BB, RP, JT, QP))
                a = _agree(u, state)
                if COSINE:
                    a = a * inverse
                c = _couple(_with_prior(a, PRIOR, i, j0, J, JT), LSE, child, takes_part, LEAKY)
                grad = tl.reshape(tl.load(GRADS + start * (J * R * Q) + at, mask=here, other=0.0), (BB, RP, JT, QP))
                d = _logit_grad(c, _agree(u, grad), DELTA, child, takes_part)
                if D_PRIOR is not None:
                    d_prior += tl.sum(d, axis=0)
                if COSINE:
                    d = d * inverse
                    d_u += c[:, None, :, None] * grad + d[:, None, :, None] * (
                        state - (a * inverse)[:, None, :, None] * u
                    )
                else:
                    d_u += c[:, None, :, None] * grad + d[:, None, :, None] * state
            h = tl.reshape(d_u, (BB * RP, JT * QP))
            d_x = tl.dot(h, tl.trans(w), input_precision=PRECISION)
            d_w += tl.dot(tl.trans(x), h, input_precision=PRECISION)
            if KH > 0:  # other entries of the window have been here
                to = takes[:, None] & inside
                d_x += tl.load(D_X + d_x_tile + x_at, mask=to, other=0.0)
            else:
                to = (rows < row_end)[:, None] & inside
            tl.store(D_X + d_x_tile + x_at, d_x, mask=to)
        if KH > 0:
            tl.debug_barrier()  # what this entry of the window has added is seen by the threads that add the next
        if not SHARED:
            start_w = (tl.cast(part, tl.int64) * I + i) * (J * P * Q)
            tl.store(D_WEIGHT + start_w + w_at, d_w, mask=w_here)
        if D_PRIOR is not None:
            mine = (j < J) & (p0 == 0)
            tl.store(D_PRIOR + (tl.cast(part, tl.int64) * I + i) * J + j, d_prior, mask=mine)
    if SHARED:
        _, w_at, w_here = _weight(WEIGHT, 0, 0, p0, j0, J, P, Q, PC, JT, QP)
        start_w = (tl.cast(part, tl.int64) * weights + group) * (J * P * Q)
        tl.store(D_WEIGHT + start_w + w_at, d_w, mask=w_here)


# ------------------------------------------------------------------ shared weight: attention over the children, kernels


@triton.jit
def _taking_part(MASK, n, i, I):
    """Which of children i of sample n take part."""
    takes = i < I
    if MASK is not None:
        takes = takes & (tl.load(MASK + tl.cast(n, tl.int64) * I + i, mask=takes, other=0) != 0)
    return takes


@triton.jit
def _children(X, n, i, takes, e0, I, E: tl.constexpr, EC: tl.constexpr):
    """Entries e0 ... e0 + EC of children i of sample n, [BI, EC] in float32."""
    e = e0 + tl.arange(0, EC)
    at = (tl.cast(n, tl.int64) * I + i) * E
    return tl.load(X + at[:, None] + e[None, :], mask=takes[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _queries(A, kn, j0, e0, J: tl.constexpr, E: tl.constexpr, JT: tl.constexpr, EC: tl.constexpr):
    """Entries e0 ... e0 + EC of folded parents of sample and round kn, [JT, EC] from [K N, J, E]."""
    e = e0 + tl.arange(0, EC)[None, :]
    j = j0 + tl.arange(0, JT)[:, None]
    return tl.load(A + tl.cast(kn, tl.int64) * (J * E) + j * E + e, mask=(j < J) & (e < E), other=0.0)


@triton.jit
def _agreements(X, A, G, n, kn, i, takes, j0, I, J: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
                BI: tl.constexpr, JT: tl.constexpr, EL: tl.constexpr):  # fmt: skip
    """<x_i, A_j> and, where there is a G, <x_i, G_j>: [BI, JT] each. A few entries of a pose at a time."""
    a = tl.zeros((BI, JT), dtype=tl.float32)
    g = tl.zeros((BI, JT), dtype=tl.float32)
    for e0 in range(0, E, EL):
        x = _children(X, n, i, takes, e0, I, E, EL)
        a = tl.dot(x, tl.trans(_queries(A, kn, j0, e0, J, E, JT, EL)), a, input_precision=PRECISION)
        if G is not None:
            g = tl.dot(x, tl.trans(_queries(G, kn, j0, e0, J, E, JT, EL)), g, input_precision=PRECISION)
    return a, g


@triton.jit
def _with_priors(a, PRIOR, i, I, j0, J: tl.constexpr, JT: tl.constexpr):
    """Logits [BI, JT] of children i: -inf where there is no parent."""
    j = j0 + tl.arange(0, JT)
    if PRIOR is not None:
        at = (i.to(tl.int64) * J)[:, None] + j[None, :]
        a += tl.load(PRIOR + at, mask=(i < I)[:, None] & (j < J)[None, :], other=0.0)
    return tl.where((j < J)[None, :], a, float("-inf"))


@triton.jit
def fold_sum(X, A, G, MASK, PRIOR, LSE, DELTA, OUT_C, OUT_D, N, I, per_part, J: tl.constexpr, E: tl.constexpr,
             LEAKY: tl.constexpr, PRECISION: tl.constexpr, BI: tl.constexpr, JT: tl.constexpr,
             EL: tl.constexpr, EC: tl.constexpr):  # fmt: skip
    """OUT_C [parts, K N, J, E] = sum_i c_ij x_i, OUT_D = sum_i d_ij x_i; either may be None.

    A, G [K N, J, E]: state and gradient folded with the weight.
    Grid: rounds x samples, parts of the children, tiles of parents x chunks of the pose.
    """
    kn = tl.program_id(0)
    part = tl.program_id(1)
    chunks: tl.constexpr = (E + EC - 1) // EC
    j0 = tl.program_id(2) // chunks * JT
    e0 = tl.program_id(2) % chunks * EC
    sum_c = tl.zeros((JT, EC), dtype=tl.float32)
    sum_d = tl.zeros((JT, EC), dtype=tl.float32)
    for i0 in range(part * per_part, tl.minimum((part + 1) * per_part, I), BI):
        i = i0 + tl.arange(0, BI)
        child = tl.cast(kn, tl.int64) * I + i
        takes = _taking_part(MASK, kn % N, i, I)
        a, g = _agreements(X, A, G, kn % N, kn, i, takes, j0, I, J, E, PRECISION, BI, JT, EL)
        c = _couple(_with_priors(a, PRIOR, i, I, j0, J, JT), LSE, child, takes, LEAKY)
        x = _children(X, kn % N, i, takes, e0, I, E, EC)
        if OUT_C is not None:
            sum_c += tl.dot(tl.trans(c), x, input_precision=PRECISION)
        if G is not None:
            sum_d += tl.dot(tl.trans(_logit_grad(c, g, DELTA, child, takes)), x, input_precision=PRECISION)
    j = j0 + tl.arange(0, JT)[:, None]
    e = e0 + tl.arange(0, EC)[None, :]
    at = (tl.cast(part, tl.int64) * tl.num_programs(0) + kn) * (J * E) + j * E + e
    if OUT_C is not None:
        tl.store(OUT_C + at, sum_c, mask=(j < J) & (e < E))
    if G is not None:
        tl.store(OUT_D + at, sum_d, mask=(j < J) & (e < E))


@triton.jit
def fold_statistics(X, A, G, MASK, PRIOR, LSE, DELTA, N, I, J: tl.constexpr, E: tl.constexpr, LEAKY: tl.constexpr,
                    PRECISION: tl.constexpr, BI: tl.constexpr, JT: tl.constexpr, EL: tl.constexpr):  # fmt: skip
    """For parents in several tiles: LSE [K N, I], DELTA [K N, I]. Grid: rounds x samples, blocks of children."""
    kn = tl.program_id(0)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    takes = _taking_part(MASK, kn % N, i, I)
    if LEAKY:
        top = tl.zeros((BI,), dtype=tl.float32)
        z = top + 1.0
    else:
        top = tl.full((BI,), float("-inf"), dtype=tl.float32)
        z = tl.zeros((BI,), dtype=tl.float32)
    mean = tl.zeros((BI,), dtype=tl.float32)
    for j0 in range(0, J, JT):
        a, g = _agreements(X, A, G, kn % N, kn, i, takes, j0, I, J, E, PRECISION, BI, JT, EL)
        top, z, mean = _online(_with_priors(a, PRIOR, i, I, j0, J, JT), g, top, z, mean)
    child = tl.cast(kn, tl.int64) * I + i
    tl.store(LSE + child, top + tl.log(z), mask=i < I)
    if G is not None:
        tl.store(DELTA + child, mean / z, mask=i < I)


@triton.jit
def fold_poses(X, A, G, MASK, PRIOR, LSE, DELTA, D_X, N, I, K, J: tl.constexpr, E: tl.constexpr, LEAKY: tl.constexpr,
               PRECISION: tl.constexpr, BI: tl.constexpr, JT: tl.constexpr, EL: tl.constexpr,
               EC: tl.constexpr):  # fmt: skip
    """D_X [N, I, E] = sum over rounds and parents of c G_j + d A_j. Grid: samples, children, chunks of the pose."""
    n = tl.program_id(0)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    e0 = tl.program_id(2) * EC
    takes = _taking_part(MASK, n, i, I)
    d_x = tl.zeros((BI, EC), dtype=tl.float32)
    for k in range(K):
        kn = k * N + n
        child = tl.cast(kn, tl.int64) * I + i
        for j0 in range(0, J, JT):
            a, g = _agreements(X, A, G, n, kn, i, takes, j0, I, J, E, PRECISION, BI, JT, EL)
            c = _couple(_with_priors(a, PRIOR, i, I, j0, J, JT), LSE, child, takes, LEAKY)
            d = _logit_grad(c, g, DELTA, child, takes)
            d_x += tl.dot(c, _queries(G, kn, j0, e0, J, E, JT, EC), input_precision=PRECISION)
            d_x += tl.dot(d, _queries(A, kn, j0, e0, J, E, JT, EC), input_precision=PRECISION)
    e = e0 + tl.arange(0, EC)
    to = (tl.cast(n, tl.int64) * I + i) * E
    tl.store(D_X + to[:, None] + e[None, :], d_x, mask=(i < I)[:, None] & (e < E)[None, :])


@triton.jit
def fold_prior(X, A, G, MASK, PRIOR, LSE, DELTA, D_PRIOR, N, I, rounds, J: tl.constexpr, E: tl.constexpr,
               LEAKY: tl.constexpr, PRECISION: tl.constexpr, BI: tl.constexpr, JT: tl.constexpr,
               EL: tl.constexpr):  # fmt: skip
    """D_PRIOR [I, J] = sum over samples and rounds (K N of them) of d_ij. Grid: blocks of children, parents."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    j0 = tl.program_id(1) * JT
    total = tl.zeros((BI, JT), dtype=tl.float32)
    for kn in range(rounds):
        child = tl.cast(kn, tl.int64) * I + i
        takes = _taking_part(MASK, kn % N, i, I)
        a, g = _agreements(X, A, G, kn % N, kn, i, takes, j0, I, J, E, PRECISION, BI, JT, EL)
        c = _couple(_with_priors(a, PRIOR, i, I, j0, J, JT), LSE, child, takes, LEAKY)
        total += _logit_grad(c, g, DELTA, child, takes)
    j = j0 + tl.arange(0, JT)
    at = (i.to(tl.int64) * J)[:, None] + j[None, :]
    tl.store(D_PRIOR + at, total, mask=(i < I)[:, None] & (j < J)[None, :])


# --------------------------------------------------------------------------------------------------- sizes and launches

PROGRAMS = 512
"""About how many programs a launch is spread over: four on each of 132 processors. A constant, not the device's own
number, so that sums are cut in the same places everywhere."""

STAGES = 2
"""Children loaded ahead of the one at work."""

_Sizes = tuple[int, int, int, int, int, int]


class _Walk(NamedTuple):
    """One call of the first family: its tensors, its sizes and its tiles."""

    poses: Tensor
    weight: Tensor
    mask: Tensor | None
    prior: Tensor | None
    sizes: _Sizes
    """B, I, J, R, P, Q; B is the batch times the windows of a map"""
    window: Window | None
    options: dict[str, object]
    tiles: Tiles

    def padded(self) -> tuple[int, int, int]:
        _, _, _, R, P, Q = self.sizes
        return _power(R), columns_below(P), _power(Q)

    def arguments(self) -> dict[str, object]:
        """What every kernel of the family takes, beside its own tensors and cuts."""
        B, I, J, R, P, Q = self.sizes
        RP, PC, QP = self.padded()
        place = (0,) * 11
        if self.window is not None:
            _, C, H, W, _, _ = self.poses.shape
            kernel, stride, padding = self.window
            place = (C, H, W, *self.window.out(H, W), *kernel, *stride, *padding)
        names = ("C", "H", "W", "HO", "WO", "KH", "KW", "SH", "SW", "PH", "PW")
        step = 0 if self.weight.shape[0] == 1 else J * P * Q
        return dict(
            X=self.poses, WEIGHT=self.weight, MASK=self.mask, PRIOR=self.prior, B=B, I=I, weight_step=step,
            **dict(zip(names, place, strict=True)), J=J, R=R, P=P, Q=Q, BB=self.tiles.rows, RP=RP, PC=PC,
            JT=self.tiles.parents, QP=QP, num_warps=self.tiles.warps, num_stages=STAGES, **self.options,
        )  # fmt: skip

    def parent_tiles(self) -> int:
        return _ceil(self.sizes[2], self.tiles.parents)

    def statistics(self, states: Tensor, grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """LSE and DELTA [K, B, I] where the parents do not fit one tile, else None twice."""
        if self.parent_tiles() == 1:
            return None, None
        B, I, *_ = self.sizes
        K = len(states)
        lse = self.poses.new_empty(K, B, I, dtype=torch.float32)
        delta = None if grads is None else torch.empty_like(lse)
        blocks = _ceil(B, self.tiles.rows)
        parts, per_part = _cut(I, PROGRAMS // (blocks * K))
        rows_statistics[(blocks, parts, K)](
            STATES=states, GRADS=grads, LSE=lse, DELTA=delta, per_part=per_part, **self.arguments()
        )
        return lse, delta

    def sum(self, state: Tensor, grad: Tensor | None) -> Tensor:
        """sum_i c_ij u_ij, or with a gradient sum_i d_ij u_ij: [B, J, R, Q]."""
        B, I, J, R, _, Q = self.sizes
        lse, delta = self.statistics(state[None], None if grad is None else grad[None])
        parts, per_part = _cut(I, self.tiles.parts)
        out = state.new_empty(parts, B, J, R, Q)
        rows_sum[(_ceil(B, self.tiles.rows), parts, self.parent_tiles())](
            STATE=state, GRAD=grad, LSE=lse, DELTA=delta, OUT=out, per_part=per_part, **self.arguments()
        )
        return _add(out)

    def full(self, states: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of poses, weight and prior."""
        B, I, J, _, P, Q = self.sizes
        shared = self.weight.shape[0] == 1
        lse, delta = self.statistics(states, grads)
        if self.window is not None:  # one type of children at a time; rows are cut between images
            types, images = self.poses.shape[1], self.poses.shape[0]
            groups, per_group = types, I // types
            parts, images_per_part = _cut(images, self.tiles.parts)
            per_part = images_per_part * (B // images)
        else:
            groups, per_group = _cut(I, self.tiles.parts) if shared else (I, 1)
            parts, per_part = (1, B) if shared else _cut(B, self.tiles.parts)
        d_poses = states.new_zeros if self.window is not None else states.new_empty
        d_x = d_poses(self.parent_tiles(), self.poses.numel())
        d_weight = states.new_empty(parts, groups if shared else I, J, P, Q)
        d_prior = None if self.prior is None else states.new_empty(parts, I, J)
        rows_full[(groups, parts, self.parent_tiles() * _ceil(P, self.padded()[1]))](
            STATES=states, GRADS=grads, LSE=lse, DELTA=delta, D_X=d_x, D_WEIGHT=d_weight, D_PRIOR=d_prior,
            K=len(states), per_group=per_group, per_part=per_part, poses_size=self.poses.numel(), SHARED=shared,
            **self.arguments(),
        )  # fmt: skip
        d_weight = d_weight.flatten(0, 1).sum(0, keepdim=True) if shared else _add(d_weight)
        return (_add(d_x).view(self.poses.shape), d_weight, None if d_prior is None else _add(d_prior))


class _Fold(NamedTuple):
    """One call of the second family."""

    poses: Tensor
    """[N, I, E], E = R P"""
    weight: Tensor
    """[J, P, Q] in float32"""
    mask: Tensor | None
    prior: Tensor | None
    options: dict[str, object]
    tiles: Tiles

    def fold(self, parents: Tensor) -> Tensor:
        """parents_j W_j^T: [..., J, R, Q] -> [K N, J, E]."""
        folded = torch.einsum("...jrq,jpq->...jrp", parents, self.weight)
        return folded.flatten(-2).flatten(0, -3).contiguous()

    def unfold(self, sums: Tensor, like: Tensor) -> Tensor:
        """sums_j W_j: [K N, J, E] -> [..., J, R, Q]."""
        sums = sums.view(*like.shape[:-1], self.weight.shape[1])
        return torch.einsum("...jrp,jpq->...jrq", sums, self.weight)

    def arguments(self, a: Tensor, g: Tensor | None) -> dict[str, object]:
        N, I, E = self.poses.shape
        return dict(
            X=self.poses, A=a, G=g, MASK=self.mask, PRIOR=self.prior, N=N, I=I, J=len(self.weight), E=E,
            BI=self.tiles.rows, JT=self.tiles.parents, EL=entries(E, self.tiles.parents)[0],
            num_warps=self.tiles.warps, num_stages=STAGES, **self.options,
        )  # fmt: skip

    def parent_tiles(self) -> int:
        return _ceil(len(self.weight), self.tiles.parents)

    def child_blocks(self) -> int:
        return _ceil(self.poses.shape[1], self.tiles.rows)

    def chunks(self) -> int:
        return _ceil(self.poses.shape[2], self.entries())

    def entries(self) -> int:
        return entries(self.poses.shape[2], self.tiles.parents)[1]

    def statistics(self, a: Tensor, g: Tensor | None) -> dict[str, Tensor | None]:
        if self.parent_tiles() == 1:
            return {"LSE": None, "DELTA": None}
        lse = a.new_empty(len(a), self.poses.shape[1])
        found = {"LSE": lse, "DELTA": None if g is None else torch.empty_like(lse)}
        fold_statistics[(len(a), self.child_blocks())](**self.arguments(a, g), **found)
        return found

    def sums(
        self, a: Tensor, g: Tensor | None, found: dict[str, Tensor | None], coupled: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """sum_i c_ij x_i (if coupled) and, with g, sum_i d_ij x_i: [K N, J, E] each."""
        parts, blocks = _cut(self.child_blocks(), self.tiles.parts)
        out_c, out_d = (a.new_empty(parts, *a.shape) if yes else None for yes in (coupled, g is not None))
        fold_sum[(len(a), parts, self.parent_tiles() * self.chunks())](
            OUT_C=out_c,
            OUT_D=out_d,
            per_part=blocks * self.tiles.rows,
            EC=self.entries(),
            **self.arguments(a, g),
            **found,
        )
        return None if out_c is None else _add(out_c), None if out_d is None else _add(out_d)

    def forward(self, state: Tensor) -> Tensor:
        a = self.fold(state)
        t, _ = self.sums(a, None, self.statistics(a, None), coupled=True)
        assert t is not None
        return self.unfold(t, state)

    def backward_state(self, state: Tensor, grad: Tensor) -> Tensor:
        a, g = self.fold(state), self.fold(grad)
        _, y = self.sums(a, g, self.statistics(a, g), coupled=False)
        assert y is not None
        return self.unfold(y, state)

    def full(self, states: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of poses, weight, first state and prior."""
        K, N, J = states.shape[:3]
        _, I, E = self.poses.shape
        a, g = self.fold(states), self.fold(grads)
        found = self.statistics(a, g)
        arguments = self.arguments(a, g)
        t, y = self.sums(a, g, found, coupled=True)
        assert t is not None
        assert y is not None
        rows = (*states.shape[:-1], self.weight.shape[1])
        d_weight = torch.einsum("knjrp,knjrq->jpq", t.view(rows), grads)
        d_weight = d_weight + torch.einsum("knjrp,knjrq->jpq", y.view(rows), states)
        d_x = a.new_empty(N, I, E)
        fold_poses[(N, self.child_blocks(), self.chunks())](D_X=d_x, K=K, EC=self.entries(), **arguments, **found)
        d_prior = None
        if self.prior is not None:
            d_prior = a.new_empty(I, J)
            fold_prior[(self.child_blocks(), self.parent_tiles())](D_PRIOR=d_prior, rounds=K * N, **arguments, **found)
        return d_x, d_weight[None], self.unfold(y[:N], states[0]), d_prior


def _power(size: int) -> int:
    return triton.next_power_of_2(size)


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _cut(size: int, parts: int) -> tuple[int, int]:
    """Into how many parts of which size: at most `parts`, none of them empty."""
    step = _ceil(size, max(1, min(parts, size)))
    return _ceil(size, step), step


def _add(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def walk_tiles(sizes: _Sizes, full: bool, groups: int = 1) -> Tiles:
    """Tiles of the first family.

    `full`: for backward_full, whose programs share out `groups` of children before they cut the batch; 0: a shared
    weight, the children themselves are cut.

    All parents go into one tile where that leaves the registers room: 512 columns of votes for vectors of up to 8.
    """
    B, I, J, R, P, Q = sizes
    RP, QP = _power(R), _power(Q)
    widest = 8192 // max(16, RP, 2 * columns_below(P))
    parents = max(1, min(_power(J), widest // QP), 16 // QP)
    columns = parents * QP
    rows = max(1, 16 // RP, min(64, 4096 // columns, _power(B * RP)) // RP)
    warps = max(4, min(16, rows * RP * columns // 512))
    tiles = _ceil(J, parents)
    if full:
        parts = min(PROGRAMS // (groups * tiles), _ceil(B, 4 * rows)) if groups else PROGRAMS // tiles
    else:
        parts = min(PROGRAMS // (_ceil(B, rows) * tiles), _ceil(I, 4))
    return Tiles(rows, parents, max(1, parts), warps)


def columns_below(P: int) -> int:
    """How many columns of a pose below the first family multiplies at a time (tensor cores take no fewer than 8)."""
    return max(8, min(_power(P), 32))


def exactness(length: int) -> Precision:
    """How to make float32 products where nothing is asked for: in full while they are short, where the matrix units win
    little; three tf32 products where they are long."""
    return "ieee" if length <= 16 else "tf32x3"


def entries(E: int, parents: int) -> tuple[int, int]:
    """How many entries of a pose the second family multiplies, and sums, at a time."""
    return max(16, min(_power(E), 32)), max(16, min(_power(E), 2048 // parents))


def fold_tiles(N: int, I: int, J: int, E: int) -> Tiles:
    """Tiles of the second family; N counts samples and rounds."""
    parents = max(16, min(_power(J), 32))
    rows = max(16, min(32, _power(I)))
    programs = N * _ceil(J, parents) * _ceil(E, entries(E, parents)[1])
    return Tiles(rows, parents, max(1, min(PROGRAMS // programs, _ceil(I, 4 * rows))), 4)


# ----------------------------------------------------------------------------------------------------- the three passes


def supports(poses: Tensor, weight: Tensor, *, cosine: bool = False, window: Window | None = None) -> str | None:
    """Why these kernels cannot take this call, or None where they can.

    >>> supports(torch.zeros(2, 6, 1, 8, dtype=torch.float64), torch.zeros(6, 3, 8, 16, dtype=torch.float64))
    'the Triton kernels compute in float32: poses are torch.float64'
    """
    for name, tensor in (("poses", poses), ("weight", weight)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the Triton kernels compute in float32: {name} are {tensor.dtype}"
        if tensor.device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"the Triton kernels run on CUDA: {name} are on {tensor.device}"
    if poses.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(poses.device) < (8, 0)):
        return "the Triton kernels are checked for NVIDIA GPUs of compute capability 8.0 and later only"
    if window is not None and weight.shape[0] == 1:
        return "the Triton kernels take a weight for every entry of a window: this one is shared by all"
    R, Q = poses.shape[-2], weight.shape[-1]
    if not _folds(weight, cosine) and (Q > 256 or R > 64 or _power(R) * _power(Q) > 4096):
        return (
            "the Triton kernels hold parents of up to 64 rows and 256 columns, 4096 entries in all: "
            f"these have {R} rows and {Q} columns"
        )
    return None


def forward_pass(
    poses: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    window: Window | None = None,
    precision: Precision | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """s_j = sum_i c_ij u_ij, the parents of one round.

    poses   `[N, I, R, P]`, or with a window a map `[N, C, H, W, R, P]`.
    weight  `[I, J, P, Q]`, or `[1, J, P, Q]` shared; with a window `[C * rows * columns, J, P, Q]`.
    state   `[N, J, R, Q]`, with a window `[N, windows, J, R, Q]`; any scale of the logits is in it.
    mask    `[N, I]` or `[N, C, H, W]`, True for a child that takes part. Places outside the map take no part.
    prior   `[I, J]`.
    precision  of float32 products: "ieee", "tf32x3", "tf32"; None: not below three tf32 products.
    tiles   what one program holds (found from the sizes where None).

    Returns a float32 tensor of the state's shape.
    """
    with torch.cuda.device_of(poses):
        if _folds(weight, cosine):
            return _fold(poses, weight, mask, prior, leaky, precision, tiles, len(poses)).forward(_ready(state))
        walk = _walk(poses, weight, mask, prior, leaky, cosine, window, precision, tiles, full=False)
        return walk.sum(_rows(state, walk), None).view(state.shape)


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
    window: Window | None = None,
    precision: Precision | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The gradient of `state` from that of `forward_pass(poses, weight, state)`, which `grad` is.

    Shapes and options as in `forward_pass`; returns a float32 tensor of the state's shape.
    """
    with torch.cuda.device_of(poses):
        if _folds(weight, cosine):
            fold = _fold(poses, weight, mask, prior, leaky, precision, tiles, len(poses))
            return fold.backward_state(_ready(state), _ready(grad))
        walk = _walk(poses, weight, mask, prior, leaky, cosine, window, precision, tiles, full=False)
        return walk.sum(_rows(state, walk), _rows(grad, walk)).view(state.shape)


def backward_full(
    poses: Tensor,
    weight: Tensor,
    states: Tensor,
    grads: Tensor,
    *,
    mask: Tensor | None = None,
    prior: Tensor | None = None,
    leaky: bool = False,
    cosine: bool = False,
    window: Window | None = None,
    precision: Precision | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients over K rounds of `forward_pass` on the same poses and weight.

    states  `[K, ...]`, the state each round went in with; the rest as in `forward_pass`.
    grads   `[K, ...]`, the gradient of what each round gave.

    Returns float32 gradients of poses, weight, the state of round 0, and the prior (None without one).
    """
    with torch.cuda.device_of(poses):
        if _folds(weight, cosine):
            fold = _fold(poses, weight, mask, prior, leaky, precision, tiles, len(poses) * len(states))
            d_poses, d_weight, d_state, d_prior = fold.full(_ready(states), _ready(grads))
            return d_poses.view(poses.shape), d_weight, d_state, d_prior
        walk = _walk(poses, weight, mask, prior, leaky, cosine, window, precision, tiles, full=True)
        d_poses, d_weight, d_prior = walk.full(_rows(states, walk), _rows(grads, walk))
        d_state = backward_state(
            poses, weight, states[0], grads[0], mask=mask, prior=prior, leaky=leaky, cosine=cosine, window=window,
            precision=precision, tiles=tiles,
        )  # fmt: skip
    return d_poses, d_weight, d_state, d_prior


def _folds(weight: Tensor, cosine: bool) -> bool:
    return weight.shape[0] == 1 and not cosine


def _ready(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _rows(parents: Tensor, walk: _Walk) -> Tensor:
    """[K, N, (windows,) J, R, Q] -> [K, B, J, R, Q]; without the rounds -> [B, J, R, Q]."""
    rounds = parents.shape[: parents.ndim - 4 - (walk.window is not None)]
    B, _, J, R, _, Q = walk.sizes
    return _ready(parents).view(*rounds, B, J, R, Q)


def _walk(
    poses: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    prior: Tensor | None,
    leaky: bool,
    cosine: bool,
    window: Window | None,
    precision: Precision | None,
    tiles: Tiles | None,
    full: bool,
) -> _Walk:
    J, P, Q = weight.shape[1:]
    R = poses.shape[-2]
    if window is None:
        B, I = poses.shape[:2]
    else:
        I = weight.shape[0]
        high, wide = window.out(poses.shape[2], poses.shape[3])
        B = len(poses) * high * wide
    sizes = B, I, J, R, P, Q
    if tiles is None:
        tiles = walk_tiles(sizes, full, groups=0 if len(weight) == 1 else poses.shape[1])
    return _Walk(
        poses.detach().contiguous(), weight.detach().contiguous(), _flags(mask),
        None if prior is None else _ready(prior), sizes, window,
        {"LEAKY": leaky, "COSINE": cosine, "PRECISION": precision or exactness(P)}, tiles,
    )  # fmt: skip


def _fold(
    poses: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    prior: Tensor | None,
    leaky: bool,
    precision: Precision | None,
    tiles: Tiles | None,
    samples: int,
) -> _Fold:
    flat = poses.detach().contiguous().flatten(2)
    _, I, E = flat.shape
    return _Fold(
        flat, _ready(weight[0]), _flags(mask), None if prior is None else _ready(prior),
        {"LEAKY": leaky, "PRECISION": precision or exactness(E)},
        fold_tiles(samples, I, weight.shape[1], E) if tiles is None else tiles,
    )  # fmt: skip


def _flags(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.uint8).contiguous()
