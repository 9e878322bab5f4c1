"""The CPU kernels agree with a plain float64 autograd of their equations, err in float32 at most about twice as much as
plain float32 does, and are bitwise the same for every number of threads."""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.kernels import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=f"no CPU kernels: {native.missing()}")

EPS = torch.finfo(torch.float32).eps
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class Case(NamedTuple):
    """One fully connected problem in float64."""

    poses: Tensor
    weight: Tensor
    states: Tensor
    grads: Tensor
    uniform: Tensor | None
    mask: Tensor | None
    prior: Tensor | None
    leaky: bool
    cosine: bool

    def to(self, dtype: torch.dtype) -> Case:
        cast = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in self]
        return Case(*cast)

    @property
    def options(self) -> dict[str, object]:
        return {"mask": self.mask, "prior": self.prior, "leaky": self.leaky, "cosine": self.cosine}


def plain_forward(poses, weight, state, mask=None, prior=None, leaky=False, cosine=False, offset=None):
    """The equations on votes in memory. `offset` [N, I, J] is a logit of its own, to differentiate in."""
    votes = torch.einsum("nirp,ijpq->nijrq", poses, weight.expand(poses.shape[1], -1, -1, -1))
    directions = votes
    if cosine:
        norm = votes.square().sum((-2, -1), keepdim=True)
        directions = votes / torch.where(norm > 0, norm, torch.ones_like(norm)).sqrt()
    b = torch.einsum("nijrq,njrq->nij", directions, state)
    if prior is not None:
        b = b + prior
    if leaky:
        b = torch.cat([b, torch.zeros_like(b[..., :1])], dim=-1)
    c = b.softmax(dim=-1)[..., : state.shape[1]]
    if mask is not None:
        c = c * mask[..., None]
    return torch.einsum("nij,nijrq->njrq", c, votes)


def plain_results(case: Case) -> dict[str, Tensor]:
    poses, weight, states = (t.clone().requires_grad_() for t in (case.poses, case.weight, case.states))
    prior = None if case.prior is None else case.prior.clone().requires_grad_()
    options = {**case.options, "prior": prior}
    total = poses.new_zeros(())
    first = None
    for k in range(len(states)):
        s = plain_forward(poses, weight, states[k], **options)
        first = s if first is None else first
        total = total + (s * case.grads[k]).sum()
    if case.uniform is not None:
        votes = torch.einsum("nirp,ijpq->nijrq", poses, weight.expand(poses.shape[1], -1, -1, -1))
        if case.mask is not None:
            votes = votes * case.mask[..., None, None, None]
        total = total + (votes.sum(1) * case.uniform).sum()
        found_sum = votes.sum(1).detach()
    total.backward()
    found = {"s": first.detach(), "d_state": states.grad[0], "d_poses": poses.grad, "d_weight": weight.grad}
    if case.uniform is not None:
        found["sum"] = found_sum
    if prior is not None:
        found["d_prior"] = prior.grad
    return found


def native_results(case: Case, threads: int = 1) -> dict[str, Tensor]:
    tensors = (case.poses, case.weight)
    options = {**case.options, "threads": threads}
    s = native.forward_pass(*tensors, case.states[0], **options)
    d_state = native.backward_state(*tensors, case.states[0], case.grads[0], **options)
    full = native.backward_full(
        *tensors, case.states, case.grads, uniform=case.uniform, with_prior=case.prior is not None, **options
    )
    assert torch.equal(full.d_state_first, d_state) or case.weight.shape[0] == 1
    found = {"s": s, "d_state": full.d_state_first, "d_poses": full.d_poses, "d_weight": full.d_weight}
    if case.uniform is not None:
        found["sum"] = native.sum_pass(*tensors, mask=case.mask, threads=threads)
    if case.prior is not None:
        found["d_prior"] = full.d_prior
    return found


def root_mean_square(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def assert_errs_as_float32_does(exact: dict[str, Tensor], plain: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    assert exact.keys() == ours.keys()
    for name, value in exact.items():
        assert ours[name].shape == value.shape, name
        own, theirs = root_mean_square(ours[name] - value), root_mean_square(plain[name] - value)
        allowed = 2 * theirs + 4 * EPS * root_mean_square(value)
        assert own <= allowed, (
            f"{name}: {own:.3g} against {theirs:.3g} of plain float32, scale {root_mean_square(value):.3g}"
        )


def make_case(
    N: int,
    I: int,
    J: int,
    R: int,
    P: int,
    Q: int,
    K: int = 2,
    *,
    shared: bool = False,
    mask: bool = False,
    prior: bool = False,
    uniform: bool = False,
    leaky: bool = False,
    cosine: bool = False,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float32).double()

    keep = torch.rand(N, I, generator=g) < 0.7 if mask else None
    poses = draw(N, I, R, P)
    if keep is not None:
        poses = poses * keep[..., None, None]
    return Case(
        poses=poses,
        weight=draw(1 if shared else I, J, P, Q) / P**0.5,
        states=draw(K, N, J, R, Q) * (R * Q) ** -0.5,
        grads=draw(K, N, J, R, Q),
        uniform=draw(N, J, R, Q) if uniform else None,
        mask=keep,
        prior=draw(I, J) if prior else None,
        leaky=leaky,
        cosine=cosine,
    )


def check(case: Case) -> None:
    single = case.to(torch.float32)
    ours = native_results(single, threads=1)
    assert_errs_as_float32_does(plain_results(case), plain_results(single), ours)
    for name, value in native_results(single, threads=2).items():
        assert torch.equal(value, ours[name]), f"{name} differs between 1 and 2 threads"


SHAPES = [
    (1, 8, 16),
    (1, 8, 8),
    (1, 16, 16),
    (4, 4, 4),
    (2, 2, 2),
    (1, 3, 5),
    (3, 5, 2),
    (8, 8, 8),
    (1, 1, 1),
    (2, 7, 3),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("N", [1, 3, 16, 19, 33])
def test_every_pose_shape_and_both_arrangements_agree_with_the_equations(shape: tuple[int, int, int], N: int) -> None:
    R, P, Q = shape
    check(make_case(N, 37, 5, R, P, Q, 2, seed=N))


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("N", [2, 17])
@pytest.mark.parametrize("shape", [(1, 8, 16), (2, 3, 5)])
def test_any_number_of_rounds_goes_in_one_backward(K: int, N: int, shape: tuple[int, int, int]) -> None:
    check(make_case(N, 21, 3, *shape, K, uniform=True))


@SETTINGS
@given(
    N=st.integers(1, 40),
    I=st.integers(1, 150),
    J=st.integers(1, 19),
    shape=st.sampled_from(SHAPES),
    K=st.integers(1, 4),
    flags=st.tuples(*[st.booleans()] * 6),
    seed=st.integers(0, 1000),
)
def test_odd_sizes_and_every_option_agree_with_the_equations(N, I, J, shape, K, flags, seed) -> None:
    shared, mask, prior, uniform, leaky, cosine = flags
    check(
        make_case(
            *(N, I, J, *shape, K),
            shared=shared,
            mask=mask,
            prior=prior,
            uniform=uniform,
            leaky=leaky,
            cosine=cosine,
            seed=seed,
        )
    )


def test_long_sums_do_not_err_more_than_plain_float32() -> None:
    check(make_case(20, 1152, 3, 1, 8, 16, 2))
    check(make_case(3, 1152, 3, 4, 4, 4, 2))
    check(make_case(300, 9, 3, 1, 8, 16, 2))
    check(make_case(2, 1500, 4, 1, 33, 16, 2, shared=True))


@pytest.mark.parametrize("N", [2, 32])
@pytest.mark.parametrize("scale", [1e-22, 1e-12, 1e18])
def test_cosine_keeps_the_direction_of_tiny_and_huge_votes(N: int, scale: float) -> None:
    case = make_case(N, 20, 4, 1, 8, 16, 1, cosine=True)
    ours = native.forward_pass(*(t.float() for t in (case.poses * scale, case.weight, case.states[0])), cosine=True)
    expected = plain_forward(case.poses, case.weight, case.states[0], cosine=True)
    torch.testing.assert_close(ours.double() / scale, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("N", [2, 32])
def test_a_vote_of_zero_has_no_direction_and_no_nan(N: int) -> None:
    case = make_case(N, 20, 4, 1, 8, 16, 2, cosine=True).to(torch.float32)
    case.poses[:, ::3] = 0
    assert all(torch.isfinite(t).all() for t in native_results(case).values())


def test_sharp_logits_route_to_one_parent_without_overflow() -> None:
    case = make_case(18, 33, 6, 1, 8, 16, 2).to(torch.float32)
    case = case._replace(states=case.states * 1e4)
    assert_errs_as_float32_does(plain_results(case.to(torch.float64)), plain_results(case), native_results(case))


def test_strided_tensors_are_read_as_what_they_are() -> None:
    case = make_case(18, 33, 6, 4, 4, 4, 2).to(torch.float32)
    strided = case._replace(
        poses=case.poses.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        weight=case.weight.contiguous(memory_format=torch.channels_last),
        states=case.states.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert not strided.poses.is_contiguous()
    assert not strided.weight.is_contiguous()
    for name, value in native_results(strided).items():
        assert torch.equal(value, native_results(case)[name]), name


@pytest.mark.parametrize("name", ["N", "I"])
def test_no_rows_or_no_children_give_empty_sums(name: str) -> None:
    sizes = {"N": 2, "I": 3} | {name: 0}
    case = make_case(sizes["N"], sizes["I"], 2, 1, 8, 16).to(torch.float32)
    assert not any(value.any() for value in native_results(case).values())


def test_what_does_not_fit_is_refused_by_name() -> None:
    poses, weight, state = torch.zeros(2, 6, 1, 4), torch.zeros(7, 3, 4, 5), torch.zeros(2, 3, 1, 5)
    with pytest.raises(ValueError, match=r"weight \[7, 3, 4, 5\].*poses \[2, 6, 1, 4\]"):
        native.forward_pass(poses, weight, state)
    with pytest.raises(ValueError, match="float32"):
        native.forward_pass(poses.double(), weight[:6].double(), state.double())
    with pytest.raises(ValueError, match=r"state \[2, 3, 5, 1\]"):
        native.forward_pass(poses, weight[:6], state.transpose(2, 3))


# ---- maps


class Window(NamedTuple):
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


def unfold(map_: Tensor, window: Window, value: float = 0.0) -> Tensor:
    """[N, C, H, W, ...] -> [N, windows, C * kernel, ...], children in the order (type, kernel row, kernel column)."""
    (kh, kw), (sh, sw), (ph, pw) = window
    N, C, H, W = map_.shape[:4]
    rest = map_.shape[4:]
    wide = map_.new_full((N, C, H + 2 * ph, W + 2 * pw, *rest), value)
    wide[:, :, ph : ph + H, pw : pw + W] = map_
    out_h, out_w = (H + 2 * ph - kh) // sh + 1, (W + 2 * pw - kw) // sw + 1
    rows = []
    for y in range(out_h):
        for x in range(out_w):
            cut = wide[:, :, y * sh : y * sh + kh, x * sw : x * sw + kw]
            rows.append(cut.reshape(N, C * kh * kw, *rest))
    return torch.stack(rows, dim=1)


def plain_map_results(case: Case, window: Window, map_mask: Tensor | None) -> dict[str, Tensor]:
    poses, weight, states = (t.clone().requires_grad_() for t in (case.poses, case.weight, case.states))
    prior = None if case.prior is None else case.prior.clone().requires_grad_()
    there = torch.ones(poses.shape[:4]) if map_mask is None else map_mask.float()
    children = unfold(poses, window)
    keep = unfold(there, window) > 0
    N, windows = children.shape[:2]
    total = poses.new_zeros(())
    first = None
    for k in range(len(states)):
        s = plain_forward(
            *(children.flatten(0, 1), weight, states[k].flatten(0, 1)),
            mask=keep.flatten(0, 1),
            prior=prior,
            leaky=case.leaky,
            cosine=case.cosine,
        ).unflatten(0, (N, windows))
        first = s if first is None else first
        total = total + (s * case.grads[k]).sum()
    if case.uniform is not None:
        votes = torch.einsum("nwirp,ijpq->nwijrq", children, weight) * keep[..., None, None, None]
        total = total + (votes.sum(2) * case.uniform).sum()
        found_sum = votes.sum(2).detach()
    total.backward()
    found = {"s": first.detach(), "d_state": states.grad[0], "d_poses": poses.grad, "d_weight": weight.grad}
    if case.uniform is not None:
        found["sum"] = found_sum
    if prior is not None:
        found["d_prior"] = prior.grad
    return found


def native_map_results(case: Case, window: Window, map_mask: Tensor | None, threads: int = 1) -> dict[str, Tensor]:
    options = {"mask": map_mask, "prior": case.prior, "leaky": case.leaky, "cosine": case.cosine, "threads": threads}
    options |= window._asdict()
    s = native.map_forward_pass(case.poses, case.weight, case.states[0], **options)
    full = native.map_backward_full(
        *(case.poses, case.weight, case.states, case.grads),
        uniform=case.uniform,
        with_prior=case.prior is not None,
        **options,
    )
    found = {"s": s, "d_state": full.d_state_first, "d_poses": full.d_poses, "d_weight": full.d_weight}
    if case.uniform is not None:
        found["sum"] = native.map_sum_pass(case.poses, case.weight, mask=map_mask, threads=threads, **window._asdict())
    if case.prior is not None:
        found["d_prior"] = full.d_prior
    return found


def make_map(
    sizes: tuple[int, int, int, int],
    J: int,
    shape: tuple[int, int, int],
    window: Window,
    K: int = 2,
    *,
    mask: bool = False,
    prior: bool = False,
    uniform: bool = False,
    leaky: bool = False,
    cosine: bool = False,
    seed: int = 0,
) -> tuple[Case, Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    N, C, H, W = sizes
    R, P, Q = shape
    (kh, kw), (sh, sw), (ph, pw) = window

    def draw(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=g, dtype=torch.float32).double()

    windows = ((H + 2 * ph - kh) // sh + 1) * ((W + 2 * pw - kw) // sw + 1)
    children = C * kh * kw
    keep = torch.rand(N, C, H, W, generator=g) < 0.7 if mask else None
    poses = draw(N, C, H, W, R, P)
    if keep is not None:
        poses = poses * keep[..., None, None]
    case = Case(
        poses=poses,
        weight=draw(children, J, P, Q) / P**0.5,
        states=draw(K, N, windows, J, R, Q) * (R * Q) ** -0.5,
        grads=draw(K, N, windows, J, R, Q),
        uniform=draw(N, windows, J, R, Q) if uniform else None,
        mask=None,
        prior=draw(children, J) if prior else None,
        leaky=leaky,
        cosine=cosine,
    )
    return case, keep


def check_map(case: Case, window: Window, keep: Tensor | None) -> None:
    single = case.to(torch.float32)
    ours = native_map_results(single, window, keep)
    exact, plain = plain_map_results(case, window, keep), plain_map_results(single, window, keep)
    assert_errs_as_float32_does(exact, plain, ours)
    for name, value in native_map_results(single, window, keep, threads=2).items():
        assert torch.equal(value, ours[name]), f"{name} differs between 1 and 2 threads"


@pytest.mark.parametrize("J", [1, 5, 8, 16, 17, 32, 35])
@pytest.mark.parametrize("shape", [(4, 4, 4), (1, 8, 16), (2, 3, 5)])
def test_maps_agree_with_unfolded_windows(J: int, shape: tuple[int, int, int]) -> None:
    window = Window((3, 3), (2, 2), (0, 0))
    case, keep = make_map((2, 3, 7, 6), J, shape, window, uniform=True)
    check_map(case, window, keep)


@SETTINGS
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(3, 8), st.integers(3, 8)),
    J=st.integers(1, 36),
    shape=st.sampled_from([(4, 4, 4), (1, 8, 16), (2, 2, 2), (3, 5, 2), (1, 3, 1), (8, 8, 8)]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    K=st.integers(1, 4),
    flags=st.tuples(*[st.booleans()] * 5),
    seed=st.integers(0, 1000),
)
def test_maps_of_odd_sizes_and_every_option_agree_with_the_equations(
    sizes, J, shape, kernel, stride, padding, K, flags, seed
) -> None:
    mask, prior, uniform, leaky, cosine = flags
    window = Window(kernel, stride, padding)
    case, keep = make_map(
        *(sizes, J, shape, window, K), mask=mask, prior=prior, uniform=uniform, leaky=leaky, cosine=cosine, seed=seed
    )
    check_map(case, window, keep)


def test_one_spatial_dimension_is_a_map_of_height_one() -> None:
    window = Window((1, 3), (1, 2), (0, 1))
    case, keep = make_map((2, 4, 1, 9), 6, (1, 8, 16), window, mask=True)
    check_map(case, window, keep)


# ---- every build that this processor runs


@pytest.mark.parametrize("build", native.builds())
def test_every_build_agrees(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load(native._paths(build)[0])
    monkeypatch.setattr(native, "_found", lambda: (library, build))
    for N in (1, 5, 18):
        check(make_case(N, 37, 5, 1, 8, 16, 2, mask=True, prior=True, uniform=True))
        check(make_case(N, 37, 5, 4, 4, 4, 2, cosine=True, leaky=True))
        check(make_case(N, 37, 5, 1, 16, 16, 3, shared=True))
        check(make_case(N, 37, 5, 2, 3, 5, 3))
    window = Window((3, 3), (2, 2), (1, 1))
    for shape in ((4, 4, 4), (1, 8, 16), (2, 3, 5)):
        for J in (3, 16, 32):
            case, keep = make_map((2, 3, 7, 6), J, shape, window, mask=True, uniform=True)
            check_map(case, window, keep)


def test_a_library_that_is_another_one_says_what_it_lacks() -> None:
    other = ctypes.util.find_library("m")
    if other is None:
        pytest.skip("this system has no library of mathematics to take for another one")
    with pytest.raises(OSError, match="has no tc_version: it is no library of this package"):
        native.load(Path(other))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")
@pytest.mark.parametrize("kept", [10, 64, 20_000, -1])
def test_a_library_cut_short_is_refused_before_the_system_loads_it(tmp_path, kept) -> None:
    whole = native._paths(native.builds()[0])[0].read_bytes()
    (tmp_path / "cut.so").write_bytes(whole[:kept])
    with pytest.raises(OSError, match="is cut short"):
        native.load(tmp_path / "cut.so")
