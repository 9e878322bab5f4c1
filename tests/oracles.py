"""Scalar-loop oracles: every formula of the library once more, from the papers, one number at a time.

Nothing here comes from the library and nothing is clever. NumPy arrays only hold float64 numbers, Python's loops run
over them, and a sum is a loop that adds. What a test compares with the library is a second reading of the paper.

    n  example        r  row of a pose              t  round of routing
    i  child          p  column of a pose below     w  window (a batch of windows has the window fastest)
    j  parent         q  column of a pose above

A masked child is left out of every loop: whatever it holds, NaN included, is never read.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Row = list[float]
Matrix = list[Row]


class Squash(NamedTuple):
    """A member of the squash family: v = f(r) s / r, r = sqrt(sum s^2 + eps), and 0 where r = 0."""

    kind: str = "sabour"
    a: float = 1.0
    eps: float = 0.0


SABOUR = Squash()


class RoutedByLoops(NamedTuple):
    """Parents [N,J,R,Q], their activations [N,J] or None, the coupling of all rounds [T,N,I,J], the last state."""

    poses: Array
    activations: Array | None
    coupling: Array
    state: object


class EMStateByLoops(NamedTuple):
    """Mean and variance [N,J,R,Q], logit of the activation [N,J], rounds done."""

    mean: Array
    variance: Array
    activation_logits: Array
    round: int


# ---------------------------------------------------------------------------------------------------------------------
# Squash


def squash_pose(s: Array, form: Squash = SABOUR) -> Array:
    """One pose [R,Q] through the squash."""
    rows, columns = s.shape
    square = form.eps
    for r in range(rows):
        for q in range(columns):
            square += float(s[r, q]) ** 2
    length = math.sqrt(square)
    v = np.zeros((rows, columns))
    if length == 0.0:
        return v
    if form.kind == "sabour":
        f = square / (form.a + square)
    elif form.kind == "tanh":
        f = math.tanh(length)
    elif form.kind == "exp":
        f = -math.expm1(-length)
    elif form.kind == "rational":
        f = length / (1.0 + length)
    elif form.kind == "normalize":
        f = 1.0
    elif form.kind == "identity":
        f = length
    else:
        raise KeyError(form.kind)
    for r in range(rows):
        for q in range(columns):
            v[r, q] = f * float(s[r, q]) / length
    return v


def unsquash_pose(v: Array) -> Array:
    """The inverse of Sabour's squash for one pose [R,Q]: a length n < 1 becomes sqrt(n / (1 - n))."""
    n = _length(v)
    s = np.zeros(v.shape)
    if n == 0.0:
        return s
    for r in range(v.shape[0]):
        for q in range(v.shape[1]):
            s[r, q] = math.sqrt(n / (1.0 - n)) * float(v[r, q]) / n
    return s


def _length(pose: Array) -> float:
    square = 0.0
    for r in range(pose.shape[0]):
        for q in range(pose.shape[1]):
            square += float(pose[r, q]) ** 2
    return math.sqrt(square)


def _inner(x: Array, y: Array) -> float:
    total = 0.0
    for r in range(x.shape[0]):
        for q in range(x.shape[1]):
            total += float(x[r, q]) * float(y[r, q])
    return total


def _unit(pose: Array) -> Array:
    """The pose at length 1, or zeros for a pose of zeros."""
    return squash_pose(pose, Squash("normalize"))


# ---------------------------------------------------------------------------------------------------------------------
# Votes, and a given coupling carried up and down


def votes(poses: Array, weight: Array, vote_offset: Array | None = None) -> Array:
    """u[n,i,j,r,q] = sum_p poses[n,i,r,p] weight[i,j,p,q] + vote_offset[n,i,j,r,q]; sizes of 1 are shared."""
    batch, children, rows, below = poses.shape
    parents, above = weight.shape[1], weight.shape[3]
    u = np.zeros((batch, children, parents, rows, above))
    for n in range(batch):
        for i in range(children):
            own = i if weight.shape[0] > 1 else 0
            for j in range(parents):
                for r in range(rows):
                    for q in range(above):
                        total = 0.0
                        for p in range(below):
                            total += float(poses[n, i, r, p]) * float(weight[own, j, p, q])
                        u[n, i, j, r, q] = total + _offset(vote_offset, n, i, j, r, q)
    return u


def _offset(vote_offset: Array | None, n: int, i: int, j: int, r: int, q: int) -> float:
    if vote_offset is None:
        return 0.0
    own = vote_offset
    if own.ndim == 5:
        own = own[n if own.shape[0] > 1 else 0]
    return float(own[i if own.shape[0] > 1 else 0, j if own.shape[1] > 1 else 0, r, q])


def combine(poses: Array, weight: Array, coupling: Array, vote_offset: Array | None = None) -> Array:
    """s[n,j] = sum_i coupling[n,i,j] u[n,i,j]."""
    u = votes(poses, weight, vote_offset)
    batch, children, parents, rows, above = u.shape
    s = np.zeros((batch, parents, rows, above))
    for n in range(batch):
        for j in range(parents):
            for i in range(children):
                for r in range(rows):
                    for q in range(above):
                        s[n, j, r, q] += float(coupling[n, i, j]) * float(u[n, i, j, r, q])
    return s


def combine_transposed(parent_poses: Array, weight: Array, coupling: Array) -> Array:
    """x[n,i] = sum_j coupling[n,i,j] parent_poses[n,j] weight[i,j]^T."""
    batch, parents, rows, above = parent_poses.shape
    children, below = coupling.shape[1], weight.shape[2]
    x = np.zeros((batch, children, rows, below))
    for n in range(batch):
        for i in range(children):
            own = i if weight.shape[0] > 1 else 0
            for j in range(parents):
                for r in range(rows):
                    for p in range(below):
                        for q in range(above):
                            step = float(parent_poses[n, j, r, q]) * float(weight[own, j, p, q])
                            x[n, i, r, p] += float(coupling[n, i, j]) * step
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Who competes with whom


def _present(mask: Bools | None, n: int, i: int) -> bool:
    return mask is None or bool(mask[n, i])


def _rivals(
    batch: int, children: int, parents: int, normalize: str, mask: Bools | None, child_ids: Ints | None
) -> Iterator[list[tuple[int, int, int]]]:
    """The groups of places (n, i, j) whose shares add up to one whole."""
    if normalize == "children":
        for n in range(batch):
            for j in range(parents):
                group = [(n, i, j) for i in range(children) if _present(mask, n, i)]
                if group:
                    yield group
        return
    if child_ids is None:
        for n in range(batch):
            for i in range(children):
                if _present(mask, n, i):
                    yield [(n, i, j) for j in range(parents)]
        return
    windows = child_ids.shape[0]
    for example in range(batch // windows):
        physical: dict[int, list[tuple[int, int, int]]] = {}
        for w in range(windows):
            n = example * windows + w
            for i in range(children):
                if _present(mask, n, i):
                    places = physical.setdefault(int(child_ids[w, i]), [])
                    places.extend((n, i, j) for j in range(parents))
        yield from physical.values()


def _softmax(logits: Array, normalize: str, mask: Bools | None, child_ids: Ints | None, leaky: bool = False) -> Array:
    """Shares [N,I,J]; with a leak, each whole holds one more rival whose logit is 0 and whose share is dropped."""
    batch, children, parents = logits.shape
    c = np.zeros((batch, children, parents))
    for group in _rivals(batch, children, parents, normalize, mask, child_ids):
        top = 0.0 if leaky else -math.inf
        for place in group:
            top = max(top, float(logits[place]))
        total = math.exp(0.0 - top) if leaky else 0.0
        for place in group:
            total += math.exp(float(logits[place]) - top)
        for place in group:
            c[place] = math.exp(float(logits[place]) - top) / total
    return c


def _sum_of_votes(u: Array, c: Array, mask: Bools | None) -> Array:
    batch, children, parents, rows, above = u.shape
    s = np.zeros((batch, parents, rows, above))
    for n in range(batch):
        for j in range(parents):
            for i in range(children):
                if _present(mask, n, i):
                    for r in range(rows):
                        for q in range(above):
                            s[n, j, r, q] += float(c[n, i, j]) * float(u[n, i, j, r, q])
    return s


# ---------------------------------------------------------------------------------------------------------------------
# Dynamic routing


def dynamic(
    poses: Array,
    weight: Array,
    *,
    iterations: int = 3,
    accumulate: bool = True,
    agreement: str = "dot",
    normalize: str = "parents",
    squash: Squash = SABOUR,
    inner_squash: Squash | None = None,
    leaky: bool = False,
    prior: Array | None = None,
    bias: Array | None = None,
    vote_offset: Array | None = None,
    mask: Bools | None = None,
    start: Array | None = None,
    child_ids: Ints | None = None,
) -> RoutedByLoops:
    """Sabour, Frosst, Hinton 2017, procedure 1, with the options of Su 2018 and Hauser 2019.

    The logits are kept here, as the paper keeps them, and updated after every round; the state is what a logit was
    made of, the sum of what the rounds agreed with (or the last one alone where the logit is replaced).
    """
    u = votes(poses, weight, vote_offset)
    batch, children, parents, rows, above = u.shape
    first = np.zeros((batch, children, parents))
    for n in range(batch):
        for i in range(children):
            for j in range(parents):
                first[n, i, j] = 0.0 if prior is None else float(prior[i, j])
    state = np.zeros((batch, parents, rows, above)) if start is None else start.copy()
    b = first.copy()
    if start is not None:
        for n in range(batch):
            for i in range(children):
                if _present(mask, n, i):
                    for j in range(parents):
                        b[n, i, j] = first[n, i, j] + _agreement(u[n, i, j], start[n, j], agreement)
    couplings: list[Array] = []
    v = np.zeros((batch, parents, rows, above))
    for t in range(iterations):
        c = _softmax(b, normalize, mask, child_ids, leaky)
        couplings.append(c)
        s = _sum_of_votes(u, c, mask)
        if bias is not None:
            for n in range(batch):
                for j in range(parents):
                    for r in range(rows):
                        for q in range(above):
                            s[n, j, r, q] += float(bias[j, r, q])
        for n in range(batch):
            for j in range(parents):
                if agreement == "cosine":  # cos(u, s) = <u / ||u||, s / ||s||>
                    reached = _unit(s[n, j])
                else:
                    reached = squash_pose(s[n, j], squash if inner_squash is None else inner_squash)
                for r in range(rows):
                    for q in range(above):
                        state[n, j, r, q] = float(reached[r, q]) + (float(state[n, j, r, q]) if accumulate else 0.0)
                for i in range(children):
                    if _present(mask, n, i):
                        gain = _agreement(u[n, i, j], reached, agreement)
                        b[n, i, j] = gain + (float(b[n, i, j]) if accumulate else float(first[n, i, j]))
        if t == iterations - 1:
            for n in range(batch):
                for j in range(parents):
                    v[n, j] = squash_pose(s[n, j], squash)
    return RoutedByLoops(v, None, np.array(couplings), state)


def _agreement(vote: Array, parent: Array, agreement: str) -> float:
    """<u, v>, or for cosine <u / ||u||, v> (v is at length 1 already, or a sum of such)."""
    return _inner(_unit(vote) if agreement == "cosine" else vote, parent)


# ---------------------------------------------------------------------------------------------------------------------
# Inverted dot-product attention routing


def attention(
    poses: Array,
    weight: Array,
    *,
    iterations: int = 2,
    scale: float | None = None,
    norm: bool = True,
    eps: float = 1e-5,
    norm_weight: Array | None = None,
    norm_bias: Array | None = None,
    vote_offset: Array | None = None,
    mask: Bools | None = None,
    start: Array | None = None,
    child_ids: Ints | None = None,
) -> RoutedByLoops:
    """Tsai, Srivastava, Goh, Salakhutdinov 2020: each round agrees with the parents as the round before left them."""
    u = votes(poses, weight, vote_offset)
    batch, children, parents, rows, above = u.shape
    factor = 1.0 / math.sqrt(rows * above) if scale is None else scale
    parent = start
    couplings: list[Array] = []
    for _ in range(iterations):
        a = np.zeros((batch, children, parents))
        if parent is not None:
            for n in range(batch):
                for i in range(children):
                    if _present(mask, n, i):
                        for j in range(parents):
                            a[n, i, j] = factor * _inner(u[n, i, j], parent[n, j])
        c = _softmax(a, "parents", mask, child_ids)
        couplings.append(c)
        s = _sum_of_votes(u, c, mask)
        parent = np.zeros((batch, parents, rows, above))
        for n in range(batch):
            for j in range(parents):
                if norm and rows * above > 1:
                    parent[n, j] = layer_norm(s[n, j], eps, norm_weight, norm_bias)
                else:
                    parent[n, j] = s[n, j]
    assert parent is not None
    return RoutedByLoops(parent, None, np.array(couplings), parent)


def layer_norm(s: Array, eps: float, gain: Array | None, bias: Array | None) -> Array:
    """One pose [R,Q] less its mean, over its biased standard deviation, times gain plus bias ([R,Q] or [R*Q])."""
    rows, above = s.shape
    mean = 0.0
    for r in range(rows):
        for q in range(above):
            mean += float(s[r, q]) / (rows * above)
    variance = 0.0
    for r in range(rows):
        for q in range(above):
            variance += (float(s[r, q]) - mean) ** 2 / (rows * above)
    out = np.zeros((rows, above))
    for r in range(rows):
        for q in range(above):
            out[r, q] = (float(s[r, q]) - mean) / math.sqrt(variance + eps)
            if gain is not None:
                out[r, q] *= float(gain.reshape(-1)[r * above + q])
            if bias is not None:
                out[r, q] += float(bias.reshape(-1)[r * above + q])
    return out


# ---------------------------------------------------------------------------------------------------------------------
# EM routing


def em(
    poses: Array,
    weight: Array,
    activations: Array,
    *,
    beta_a: Array,
    beta_u: Array,
    iterations: int = 3,
    final_lambda: float = 0.01,
    min_variance: float = 1e-4,
    vote_offset: Array | None = None,
    mask: Bools | None = None,
    start: EMStateByLoops | None = None,
    child_ids: Ints | None = None,
) -> RoutedByLoops:
    """Hinton, Sabour, Frosst 2018, procedure 1; a parent without a child has mean 0 and the least variance."""
    u = votes(poses, weight, vote_offset)
    batch, children, parents, rows, above = u.shape
    state = start
    couplings: list[Array] = []
    for t in range(0 if start is None else start.round, (0 if start is None else start.round) + iterations):
        if state is None:
            assignment = _softmax(np.zeros((batch, children, parents)), "parents", mask, child_ids)
        else:
            assignment = _e_step(u, state, mask, child_ids)
        couplings.append(assignment)
        inverse_temperature = final_lambda * (1.0 - 0.95 ** (t + 1))
        mean = np.zeros((batch, parents, rows, above))
        variance = np.zeros((batch, parents, rows, above))
        logits = np.zeros((batch, parents))
        for n in range(batch):
            for j in range(parents):
                mass = 0.0
                for i in range(children):
                    if _present(mask, n, i):
                        mass += float(assignment[n, i, j]) * float(activations[n, i])
                cost = 0.0
                for r in range(rows):
                    for q in range(above):
                        for i in range(children):
                            if _present(mask, n, i) and mass > 0.0:
                                share = float(assignment[n, i, j]) * float(activations[n, i]) / mass
                                mean[n, j, r, q] += share * float(u[n, i, j, r, q])
                        for i in range(children):
                            if _present(mask, n, i) and mass > 0.0:
                                share = float(assignment[n, i, j]) * float(activations[n, i]) / mass
                                variance[n, j, r, q] += share * (float(u[n, i, j, r, q]) - float(mean[n, j, r, q])) ** 2
                        variance[n, j, r, q] += min_variance
                        sigma = math.sqrt(float(variance[n, j, r, q]))
                        cost += (float(beta_u[j]) + math.log(sigma)) * mass
                logits[n, j] = inverse_temperature * (float(beta_a[j]) - cost)
        state = EMStateByLoops(mean, variance, logits, t + 1)
    assert state is not None
    active = np.zeros((batch, parents))
    for n in range(batch):
        for j in range(parents):
            active[n, j] = 1.0 / (1.0 + math.exp(-float(state.activation_logits[n, j])))
    return RoutedByLoops(state.mean, active, np.array(couplings), state)


def _e_step(u: Array, state: EMStateByLoops, mask: Bools | None, child_ids: Ints | None) -> Array:
    """R_ij = a_j p_ij / sum_k a_k p_ik, p_ij the normal density of vote ij under parent j."""
    batch, children, parents, rows, above = u.shape
    log_joint = np.zeros((batch, children, parents))
    for n in range(batch):
        for i in range(children):
            if not _present(mask, n, i):
                continue
            for j in range(parents):
                log_p = 0.0
                for r in range(rows):
                    for q in range(above):
                        variance = float(state.variance[n, j, r, q])
                        distance = (float(u[n, i, j, r, q]) - float(state.mean[n, j, r, q])) ** 2
                        log_p -= distance / (2.0 * variance) + math.log(math.sqrt(2.0 * math.pi * variance))
                log_a = -math.log1p(math.exp(-float(state.activation_logits[n, j])))
                log_joint[n, i, j] = log_a + log_p
    return _softmax(log_joint, "parents", mask, child_ids)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def margin_loss(
    scores: Array,
    target: Sequence[Sequence[float]],
    *,
    positive: float = 0.9,
    negative: float = 0.1,
    negative_weight: float = 0.5,
    positive_weight: float = 1.0,
    power: int = 2,
    over_classes: str = "sum",
) -> list[float]:
    """Each example's loss, for a target of zeros and ones [N, classes]."""
    losses = []
    for row, wanted in zip(scores, target, strict=True):
        total = 0.0
        for score, present in zip(row, wanted, strict=True):
            if present:
                total += positive_weight * max(0.0, positive - float(score)) ** power
            else:
                total += negative_weight * max(0.0, float(score) - negative) ** power
        losses.append(total / len(row) if over_classes == "mean" else total)
    return losses


def spread_loss(activations: Array, target: Sequence[int], margin: float) -> list[float]:
    """Each example's sum over the wrong classes of max(0, margin - (a_target - a_k))^2."""
    losses = []
    for row, wanted in zip(activations, target, strict=True):
        total = 0.0
        for k in range(len(row)):
            if k != wanted:
                total += max(0.0, margin - (float(row[wanted]) - float(row[k]))) ** 2
        losses.append(total)
    return losses


def reconstruction_loss(reconstruction: Array, image: Array) -> list[float]:
    """Each example's sum of squared errors, as it would be if the image had the 784 numbers of the paper's."""
    losses = []
    for made, wanted in zip(reconstruction, image, strict=True):
        total = 0.0
        for number, goal in zip(made.reshape(-1), wanted.reshape(-1), strict=True):
            total += (float(number) - float(goal)) ** 2
        losses.append(total * 28 * 28 / wanted.size)
    return losses
