"""The Triton kernels give what the equations give, to float32 rounding: in Triton's interpreter, on the CPU."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchcaps.routing import EM, Attention, Dynamic

pytest.importorskip(
    "triton", reason="PyTorch for the CPU alone does not bring Triton: its kernels cannot be tried here"
)

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def passes():
    """The kernels, interpreted: `conftest.py` sees to it."""
    return importlib.import_module("torchcaps.kernels.triton_passes")


# ---------------------------------------------------------------------------------------------- the equations, plainly


def round_of(poses, weight, state, mask=None, prior=None, leaky=False, cosine=False, window=None) -> Tensor:
    """s_j = sum_i c_ij u_ij, in float64 and with every vote in memory."""
    if window is not None:
        return torch.stack(
            [
                round_of(children, weight, state[:, at], inside, prior, leaky, cosine)
                for at, (children, inside) in enumerate(windows_of(poses, mask, window))
            ],
            dim=1,
        )
    u = torch.einsum("nirp,ijpq->nijrq", poses, weight.expand(poses.shape[1], -1, -1, -1))
    direction = u
    if cosine:
        length = u.square().sum((-2, -1), keepdim=True)
        direction = torch.where(length > 0, u / torch.where(length > 0, length, 1).sqrt(), 0)
    b = torch.einsum("nijrq,njrq->nij", direction, state)
    if prior is not None:
        b = b + prior
    c = torch.cat([b, torch.zeros_like(b[..., :1])], dim=2).softmax(2)[..., :-1] if leaky else b.softmax(2)
    if mask is not None:
        c = c * mask[:, :, None]
    return torch.einsum("nij,nijrq->njrq", c, u)


def windows_of(maps, mask, window):
    """Window by window: its children [N, I, R, P], index (type, kernel row, kernel column), and which take part."""
    N, C, H, W, R, P = maps.shape
    mask = torch.ones(N, C, H, W, dtype=torch.bool) if mask is None else mask
    high, wide = window.out(H, W)
    for top in range(high):
        for left in range(wide):
            children, inside = [], []
            for c in range(C):
                for row in range(window.kernel[0]):
                    for col in range(window.kernel[1]):
                        y = top * window.stride[0] - window.padding[0] + row
                        x = left * window.stride[1] - window.padding[1] + col
                        if 0 <= y < H and 0 <= x < W:
                            children.append(maps[:, c, y, x])
                            inside.append(mask[:, c, y, x])
                        else:
                            children.append(maps.new_zeros(N, R, P))
                            inside.append(torch.zeros(N, dtype=torch.bool))
            yield torch.stack(children, 1), torch.stack(inside, 1)


# ----------------------------------------------------------------------------------------------------------- the cases

CASES = {
    # name: N, I, J, R, P, Q, options
    "plain": (3, 7, 5, 1, 3, 6, {}),
    "one of everything": (1, 1, 1, 1, 1, 1, {}),
    "two blocks of rows": (18, 3, 4, 1, 5, 4, {"prior": True}),
    "poses of 2 by 3": (3, 5, 3, 2, 3, 2, {"mask": True}),
    "poses of 4 by 4": (5, 3, 8, 4, 4, 4, {"cosine": True, "mask": True}),
    "three rows": (2, 3, 2, 3, 2, 5, {"leaky": True, "prior": True}),
    "every option": (2, 5, 5, 1, 4, 3, {"mask": True, "leaky": True, "cosine": True, "prior": True}),
    "shared": (2, 19, 5, 1, 6, 4, {"shared": True}),
    "shared, every option": (2, 18, 3, 2, 3, 4, {"shared": True, "mask": True, "leaky": True, "prior": True}),
    "shared, cosine": (
        2, 5, 3, 1, 4, 3, {"shared": True, "cosine": True, "mask": True, "prior": True, "tiles": (16, 4, 2, 4)},
    ),
    "parents in two tiles": (3, 3, 9, 1, 3, 4, {"tiles": (16, 8, 2, 4), "mask": True, "prior": True}),
    "two tiles, cosine and leaky": (3, 2, 9, 1, 3, 4, {"tiles": (16, 8, 2, 4), "cosine": True, "leaky": True}),
    "shared, two tiles": (2, 17, 18, 1, 3, 4, {"shared": True, "tiles": (16, 16, 2, 4), "mask": True, "prior": True}),
    "shared, two tiles, leaky": (1, 5, 17, 1, 3, 4, {"shared": True, "tiles": (16, 16, 1, 4), "leaky": True}),
    "more columns than a chunk": (2, 3, 3, 1, 33, 4, {"mask": True, "prior": True}),
    "shared, more entries than a chunk": (1, 3, 17, 2, 65, 2, {"shared": True, "mask": True}),
    "shared, cosine, more columns than a chunk": (2, 3, 3, 1, 35, 4, {"shared": True, "cosine": True}),
    "batch in parts": (9, 2, 2, 2, 3, 4, {"tiles": (8, 4, 2, 4)}),
}  # fmt: skip

CONV_CASES = {
    # name: N, C, (H, W), J, R, P, Q, (kernel, stride, padding), options
    "3x3 stride 2": (2, 1, (5, 5), 3, 2, 2, 3, ((3, 3), (2, 2), (0, 0)), {"tiles": (8, 4, 2, 4)}),
    "overlapping, padded": (
        1, 2, (3, 4), 3, 1, 3, 4, ((2, 3), (1, 1), (1, 1)), {"mask": True, "prior": True, "leaky": True},
    ),
    "one dimension, cosine": (2, 1, (1, 6), 2, 1, 3, 8, ((1, 3), (1, 2), (0, 1)), {"cosine": True}),
    "parents in two tiles": (2, 1, (3, 3), 9, 1, 2, 4, ((2, 2), (1, 1), (0, 0)), {"tiles": (16, 8, 1, 4)}),
}  # fmt: skip


def make(case, passes, rounds=1):
    """Tensors in float64 that are exact in bfloat16 and the options of both sides."""
    generator = torch.Generator().manual_seed(5)

    def draw(*size):
        return torch.randn(*size, generator=generator).bfloat16().double()

    if isinstance(case, tuple):
        N, C, (H, W), J, R, P, Q, window, given = CONV_CASES[case[0]]
        window = passes.Window(*window)
        high, wide = window.out(H, W)
        poses, I, parents = (draw(N, C, H, W, R, P), C * window.kernel[0] * window.kernel[1], (N, high * wide, J, R, Q))
        mask_shape, options = (N, C, H, W), {"window": window}
    else:
        N, I, J, R, P, Q, given = CASES[case]
        poses, parents, mask_shape, options = draw(N, I, R, P), (N, J, R, Q), (N, I), {}
    weight = draw(1 if given.get("shared") else I, J, P, Q) / 2
    if given.get("mask"):
        options["mask"] = torch.rand(mask_shape, generator=generator) < 0.7
    if given.get("prior"):
        options["prior"] = draw(I, J)
    options |= {name: True for name in ("leaky", "cosine") if given.get(name)}
    tiles = {"tiles": passes.Tiles(*given["tiles"])} if "tiles" in given else {}
    return (poses, weight, draw(rounds, *parents) / 2, draw(rounds, *parents), options, tiles)


def as_given(options, dtype=torch.float32):
    return options | ({"prior": options["prior"].to(dtype)} if "prior" in options else {})


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """To rounding: 64 eps of the largest entry (sums here are of at most a few hundred terms)."""
    assert got.shape == wanted.shape, what
    assert got.dtype == torch.float32, what
    error = (got.double() - wanted).abs().max()
    assert error <= 64 * EPS * wanted.abs().max() + 1e-30, f"{what}: {error:.1e} beside {wanted.abs().max():.1e}"


EVERY = [*CASES, *((name, "conv") for name in CONV_CASES)]
named = pytest.mark.parametrize("case", EVERY, ids=lambda case: case if isinstance(case, str) else f"conv {case[0]}")


@named
def test_forward_pass_is_the_sum_of_coupled_votes(passes, case):
    poses, weight, states, _, options, tiles = make(case, passes)
    got = passes.forward_pass(poses.float(), weight.float(), states[0].float(), **as_given(options), **tiles)
    assert_close(got, round_of(poses, weight, states[0], **options), "sums")


@named
def test_backward_state_is_the_gradient_of_the_state(passes, case):
    poses, weight, states, grads, options, tiles = make(case, passes)
    state = states[0].requires_grad_()
    (wanted,) = torch.autograd.grad(round_of(poses, weight, state, **options), state, grads[0])
    arguments = (tensor.detach().float() for tensor in (poses, weight, state, grads[0]))
    assert_close(passes.backward_state(*arguments, **as_given(options), **tiles), wanted, "state")


@named
def test_backward_full_is_the_gradient_of_everything_over_all_rounds(passes, case):
    poses, weight, states, grads, options, tiles = make(case, passes, rounds=2)
    leaves = {"poses": poses, "weight": weight, "states": states}
    if "prior" in options:
        leaves["prior"] = options["prior"]
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = sum(
        (round_of(poses, weight, state, **options) * grad).sum() for state, grad in zip(states, grads, strict=True)
    )
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    arguments = (tensor.detach().float() for tensor in (poses, weight, states, grads))
    d_poses, d_weight, d_state, d_prior = passes.backward_full(*arguments, **as_given(options), **tiles)
    assert_close(d_poses, wanted["poses"], "poses")
    assert_close(d_weight, wanted["weight"], "weight")
    assert_close(d_state, wanted["states"][0], "state of the first round")
    assert (d_prior is None) == ("prior" not in options)
    if d_prior is not None:
        assert_close(d_prior, wanted["prior"], "prior")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "shared"])
def test_low_precision_inputs_are_summed_in_float32(passes, case, dtype):
    """The inputs are exact in both dtypes, so that nothing but float32 rounding is left."""
    poses, weight, states, grads, options, _ = make(case, passes)
    got = passes.forward_pass(poses.to(dtype), weight.to(dtype), states[0].float(), **as_given(options))
    assert_close(got, round_of(poses, weight, states[0], **options), "sums")
    poses.requires_grad_()
    (wanted,) = torch.autograd.grad(round_of(poses, weight, states[0], **options), poses, grads[0])
    arguments = (poses.detach().to(dtype), weight.to(dtype), states.float(), grads.float())
    assert_close(passes.backward_full(*arguments, **as_given(options))[0], wanted, "poses")


@pytest.mark.parametrize("case", ["poses of 2 by 3", "shared, every option", ("overlapping, padded", "conv")])
def test_what_a_masked_child_holds_changes_nothing(passes, case):
    poses, weight, states, grads, options, _ = make(case, passes)
    options = as_given(options)

    def everything(poses):
        return passes.backward_full(poses, weight.float(), states.float(), grads.float(), **options)

    clean = everything(poses.float())
    poses[~options["mask"]] = float("nan")
    for a, b in zip(clean, everything(poses.float()), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("scale", [1e-25, 1e18])
def test_the_direction_of_a_vote_does_not_depend_on_its_length(passes, scale):
    poses, weight, states, _, options, _ = make("poses of 4 by 4", passes)
    plain = passes.forward_pass(poses.float(), weight.float(), states[0].float(), **options)
    scaled = passes.forward_pass(poses.float() * scale, weight.float(), states[0].float(), **options)
    assert_close(scaled / scale, plain.double(), "sums")


def test_a_vote_of_zeros_agrees_with_nobody(passes):
    poses, weight, states, grads, options, _ = make("poses of 4 by 4", passes)
    poses[:, 1] = 0
    weight[2, 3] = 0  # and here one vote of many is null
    got = passes.forward_pass(poses.float(), weight.float(), states[0].float(), **options)
    assert_close(got, round_of(poses, weight, states[0], **options), "sums")
    leaves = poses.requires_grad_(), weight.requires_grad_()
    wanted = torch.autograd.grad(round_of(poses, weight, states[0], **options), leaves, grads[0])
    arguments = (tensor.detach().float() for tensor in (poses, weight, states, grads))
    d_poses, d_weight, *_ = passes.backward_full(*arguments, **options)
    assert_close(d_poses, wanted[0], "poses")
    assert_close(d_weight, wanted[1], "weight")


@pytest.mark.parametrize("case", ["poses of 2 by 3", "shared"])
def test_strides_are_read_and_not_assumed(passes, case):
    poses, weight, states, grads, options, _ = make(case, passes)
    given = [tensor.float() for tensor in (poses, weight, states, grads)]
    turned = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in given]
    for a, b in zip(passes.backward_full(*given, **options), passes.backward_full(*turned, **options), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_how_sums_are_cut_depends_on_sizes_alone(passes):
    walk = passes.walk_tiles((128, 1152, 10, 1, 8, 16), full=False)
    assert walk == passes.Tiles(rows=16, parents=16, parts=64, warps=8)
    assert passes.walk_tiles((128, 1152, 1000, 1, 8, 16), full=True).parents == 32
    for sizes in ((1, 1, 1, 1, 1, 1), (7, 5, 3, 64, 128, 64), (300, 2, 128, 3, 100, 256), (2, 9, 33, 4, 4, 4)):
        for full in (False, True):
            tiles = passes.walk_tiles(sizes, full)
            _, _, _, R, _, Q = sizes
            columns = tiles.parents * passes.triton.next_power_of_2(Q)
            lines = tiles.rows * passes.triton.next_power_of_2(R)
            assert columns >= 16
            assert lines >= 16
            assert columns * lines <= 16384


def test_what_the_kernels_cannot_do_is_said_in_words(passes):
    def poses(*shape, **kind):
        return torch.zeros(*shape, **kind)

    assert passes.supports(poses(2, 6, 1, 8), poses(6, 3, 8, 16)) is None
    assert passes.supports(poses(2, 6, 4, 128), poses(1, 3, 128, 16)) is None
    assert "float64" in passes.supports(poses(2, 6, 1, 8, dtype=torch.float64), poses(6, 3, 8, 16))
    assert "256 columns" in passes.supports(poses(2, 6, 1, 8), poses(6, 3, 8, 257))
    assert passes.supports(poses(2, 6, 1, 513), poses(1, 3, 513, 16)) is None
    assert "every entry" in passes.supports(poses(2, 6, 3, 3, 1, 8), poses(1, 3, 8, 16), window=passes.Window((2, 2)))


RULES = {
    "sabour": Dynamic.sabour(),
    "su": Dynamic.su(),
    "leaky with bias and prior": Dynamic(leaky=True, learn_bias=True, learn_prior=True),
    "cosine": Dynamic(agreement="cosine"),
    "one round": Dynamic(iterations=1),
    "attention": Attention.tsai(),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_on_the_kernels_is_the_rule(passes, name, shared):
    rule, (N, I, J, R, P, Q) = RULES[name], (5, 7, 3, 2, 3, 4)
    torch.manual_seed(0)
    poses = torch.randn(N, I, R, P, requires_grad=True)
    weight = torch.randn(1 if shared else I, J, P, Q, requires_grad=True)
    learned = {k: torch.randn_like(v).requires_grad_() for k, v in rule.learned(I, J, R, P, Q).items()}
    mask = torch.rand(N, I) > 0.3
    cotangent = torch.randn(N, J, R, Q)
    found = {}
    for backend in ("reference", "triton"):
        parents = rule(poses, weight, mask=mask, backend=backend, **learned).poses
        leaves = [poses, weight, *learned.values()]
        found[backend] = [parents, *torch.autograd.grad((parents * cotangent).sum(), leaves)]
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        scale = theirs.abs().max().clamp(min=1).item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=256 * EPS * scale)


@pytest.mark.parametrize("rule", [EM(), Dynamic(normalize="children"), Dynamic(detach="coupling")], ids=str)
def test_a_rule_that_the_kernels_do_not_know_says_so(passes, rule):
    with pytest.raises(ValueError, match="backend 'triton' has no kernels"):
        rule(torch.randn(2, 3, 1, 4), torch.randn(3, 2, 4, 4), torch.rand(2, 3), backend="triton")


def test_every_kernel_compiles_for_both_generations_without_spills_but_the_named_ones():
    """Registers are counted by the assembler that comes with Triton; no GPU is needed."""
    script = Path(__file__).parent.parent / "scripts" / "compile_triton.py"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=compiled)
    assert run.returncode == 0, run.stdout + run.stderr
