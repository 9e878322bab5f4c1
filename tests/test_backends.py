"""Which backend a call runs on, and that every one of them gives the equations' numbers, on lists and on maps."""

import dataclasses
import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from torchcaps import Capsules
from torchcaps.kernels import native
from torchcaps.layers import ConvCapsules
from torchcaps.routing import EM, Attention, Dynamic, Windows, _ops, dynamic
from torchcaps.routing._backends import LANES, WORTH_NATIVE, WORTH_STREAMING, Situation, choose
from torchcaps.testing import assert_backends_agree

here = pytest.mark.skipif(native.missing() is not None, reason=f"no CPU kernels: {native.missing()}")

RULES = {
    "sabour": Dynamic.sabour(),
    "one round": Dynamic(iterations=1),
    "hauser": Dynamic.hauser(),
    "cosine": Dynamic(agreement="cosine", accumulate=False),
    "prior, bias, leaky": Dynamic(leaky=True, learn_prior=True, learn_bias=True),
    "attention": Attention(iterations=3),
    "attention without norm": Attention(norm=False),
}
KNOWN = {name: rule for name, rule in RULES.items() if getattr(rule, "normalize", "parents") == "parents"}

# ---------------------------------------------------------------------------------------------------------------------
# The choice


PLENTY = Situation(votes=WORTH_STREAMING, lanes=LANES)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, "streamed"),
        ({"votes": WORTH_STREAMING - 1}, "reference"),
        ({"lanes": LANES - 1}, "reference"),
        ({"native_cannot": None}, "native"),
        ({"native_cannot": None, "votes": WORTH_NATIVE, "lanes": 1}, "native"),
        ({"native_cannot": None, "votes": WORTH_NATIVE - 1}, "reference"),
        ({"native_cannot": None, "triton_cannot": None}, "triton"),
        ({"triton_cannot": None, "votes": 1, "lanes": 1}, "triton"),
        *(
            ({"native_cannot": None, "triton_cannot": None, what: True}, "reference")
            for what in ("windows_compete", "coupling_wanted", "exporting", "transformed")
        ),
        ({"native_cannot": None, "compiling": True}, "native"),
        ({"native_cannot": None, "compiling": True, "traceable": False}, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(change, taken):
    assert choose("auto", dataclasses.replace(PLENTY, **change)) == taken


@pytest.mark.parametrize("backend", ["reference", "streamed", "native", "triton"])
def test_a_named_backend_that_can_is_kept_whatever_the_size(backend):
    able = Situation(votes=1, lanes=1, native_cannot=None, triton_cannot=None)
    assert choose(backend, able) == backend


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        ("native", {"native_cannot": "is not there: no compiler"}, "is not there: no compiler"),
        ("triton", {"triton_cannot": "runs on CUDA alone"}, "runs on CUDA alone"),
        ("native", {"exporting": True}, "plain operators"),
        ("streamed", {"windows_compete": True}, "child_ids"),
        ("streamed", {"coupling_wanted": True}, "return_coupling"),
    ],
)
def test_a_named_backend_that_cannot_says_why_and_what_to_take(backend, change, words):
    with pytest.raises(ValueError, match=f"backend '{backend}' .*{words}.*: take backend='reference' or 'auto'"):
        choose(backend, dataclasses.replace(PLENTY, **{"native_cannot": None, "triton_cannot": None} | change))


@here
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x, w: dynamic(x.double(), w.double(), backend="native"), "float32"),
        (lambda x, w: dynamic(x, w, normalize="children", backend="native"), "shares over children"),
        (lambda x, w: dynamic(x, w, detach="coupling", backend="native"), "stopped gradients"),
        (lambda x, w: dynamic(x, w, vote_offset=torch.zeros(1, 1, 1, 4), backend="native"), "vote offsets"),
        (lambda x, w: EM()(x, w, torch.ones(2, 6), backend="native"), "EM"),
    ],
)
def test_the_cpu_kernels_say_what_they_cannot(make, words):
    with pytest.raises(ValueError, match=words):
        make(torch.randn(2, 6, 1, 3), torch.randn(6, 5, 3, 4))


def test_where_the_library_is_absent_auto_goes_on_without_it_and_a_name_says_why(monkeypatch):
    monkeypatch.setattr(native, "missing", lambda: "built without a C++ compiler")
    poses, weight = torch.randn(30, 64, 1, 8), torch.randn(64, 10, 8, 16)
    assert dynamic(poses, weight).poses.isfinite().all()
    with pytest.raises(ValueError, match="backend 'native' is not there: built without a C\\+\\+ compiler"):
        dynamic(poses, weight, backend="native")


# ---------------------------------------------------------------------------------------------------------------------
# The numbers, of lists


@here
@pytest.mark.parametrize("name", KNOWN)
def test_the_cpu_kernels_give_what_the_equations_give(name):
    assert_backends_agree(KNOWN[name], ["native"], dtypes=[torch.float32, torch.bfloat16])


# ---------------------------------------------------------------------------------------------------------------------
# The numbers, of maps


def on_a_map(rule, backend, dtype, spatial, windows, *, pose=((2, 3), (2, 2)), masked=False, seed=0):
    """Parents, and gradients of the map, the weight and what is learned."""
    torch.manual_seed(seed)
    kernel, stride, padding = windows
    layer = ConvCapsules(
        3, 4, *pose, kernel_size=kernel, stride=stride, padding=padding, routing=rule, spatial_dims=len(spatial)
    ).to(dtype)
    for learned in layer.learned.values():
        torch.nn.init.normal_(learned)
    poses = torch.randn(2, 3, *spatial, *pose[0], dtype=dtype).requires_grad_()
    mask = torch.rand(2, 3, *spatial) > 0.3 if masked else None
    activations = torch.rand(2, 3, *spatial, dtype=dtype)
    parents = layer.route(Capsules(poses, activations), mask, backend=backend).poses
    found = torch.autograd.grad((parents * torch.randn(parents.shape, dtype=dtype)).sum(), [poses, *layer.parameters()])
    return [parents, *found]


MAPS = [
    ((7,), (3, 2, 1)),
    ((6, 5), (3, 2, 0)),
    ((6, 5), ((2, 3), (1, 2), (1, 0))),
    ((5, 5), (1, 3, 0)),
    ((4, 4, 3), (2, 1, 1)),
]


@pytest.mark.parametrize(("spatial", "windows"), MAPS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [*RULES, "em"])
def test_windows_of_a_map_stream_as_if_they_were_laid_out(name, masked, spatial, windows):
    rule = RULES.get(name, EM(final_lambda=0.5))
    ours = on_a_map(rule, "streamed", torch.float64, spatial, windows, masked=masked)
    theirs = on_a_map(rule, "reference", torch.float64, spatial, windows, masked=masked)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11 * max(1.0, b.abs().max().item()))


def assert_no_worse(rule, backend, *sizes, **more):
    """The backend's float32 error against float64 is at most twice the reference's own, plus a few eps of scale."""
    exact = on_a_map(rule, "reference", torch.float64, *sizes, **more)
    own = on_a_map(rule, "reference", torch.float32, *sizes, **more)
    found = on_a_map(rule, backend, torch.float32, *sizes, **more)
    for a, b, e in zip(found, own, exact, strict=True):
        allowed = 2 * rms(b.double() - e) + 8 * torch.finfo(torch.float32).eps * rms(e)
        assert rms(a.double() - e) <= allowed


def rms(x):
    return x.square().mean().sqrt().item()


@here
@pytest.mark.parametrize(("spatial", "windows"), MAPS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_the_cpu_kernels_read_windows_from_the_map(name, masked, spatial, windows, monkeypatch):
    if len(spatial) < 3:  # volumes alone are laid out
        monkeypatch.setattr(Windows, "unfold", None)
        exact = on_a_map(KNOWN[name], "native", torch.float32, spatial, windows, masked=masked)
        assert all(x.isfinite().all() for x in exact)
        monkeypatch.undo()
    assert_no_worse(KNOWN[name], "native", spatial, windows, masked=masked)


@pytest.mark.parametrize(
    ("name", "spatial", "windows"), [("prior, bias, leaky", *MAPS[0]), ("attention", (4, 3), (3, 1, 1))]
)
def test_the_triton_kernels_read_windows_from_the_map(name, spatial, windows):
    pytest.importorskip("triton", reason="PyTorch for the CPU alone does not bring Triton")
    assert_no_worse(RULES[name], "triton", spatial, windows, masked=True)


@here
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
    st.sampled_from([((4, 4), (4, 4)), ((1, 8), (1, 16)), ((2, 3), (2, 5)), ((3, 1), (3, 1))]),
    st.sampled_from(sorted(KNOWN)),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_no_map_and_no_window_makes_a_difference(spatial, windows, pose, name, masked, seed):
    kernel, _, padding = windows
    if min(spatial) + 2 * padding >= kernel:
        assert_no_worse(KNOWN[name], "native", spatial, windows, pose=pose, masked=masked, seed=seed)


@pytest.mark.parametrize(("spatial", "windows"), MAPS)
def test_folding_is_the_adjoint_of_unfolding(spatial, windows):
    view = Windows(*(tuple([n] * len(spatial)) if isinstance(n, int) else n for n in windows))
    x = torch.randn(2, 3, *spatial, 4, dtype=torch.float64)
    laid = view.unfold(x)
    y = torch.randn_like(laid)
    torch.testing.assert_close((laid * y).sum(), (x * view.fold(y, spatial)).sum())


def test_a_convolution_saves_neither_votes_nor_windows():
    layer = ConvCapsules(4, 5, 3, 6, kernel_size=3, routing=Attention(iterations=3))
    poses = torch.randn(2, 4, 9, 9, 1, 3, requires_grad=True)
    for backend in ["streamed"] if native.missing() else ["streamed", "native"]:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x) or x, lambda x: x):
            layer.route(Capsules(poses), backend=backend)
        assert saved
        assert max(x.numel() for x in saved) <= max(poses.numel(), layer.weight.numel(), 2 * 49 * 5 * 6)


@pytest.mark.parametrize("backend", ["reference", "streamed", "native"])
def test_a_map_without_examples_gives_parents_of_none(backend):
    if backend == "native" and native.missing():
        pytest.skip(str(native.missing()))
    layer = ConvCapsules(2, 3, 4, 4, kernel_size=2, routing=Dynamic())
    poses = torch.randn(0, 2, 5, 5, 1, 4, requires_grad=True)
    parents = layer.route(Capsules(poses), backend=backend).poses
    assert parents.shape == (0, 3, 4, 4, 1, 4)
    assert torch.autograd.grad(parents.sum(), poses)[0].shape == poses.shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, v: dynamic(x[:, :, 0], w, windows=v), r"poses must be a tensor \[N, C, \*spatial, R, P\]"),
        (lambda x, w, v: dynamic(x, w[:6], windows=v), "6 input capsules .* hold 12 capsules of 3 columns in a window"),
        (lambda x, w, v: dynamic(x[:, :, :1], w, windows=v), "does not fit a map of 1 x 4"),
        (lambda x, w, v: dynamic(x, w, windows=v, mask=torch.ones(2, 12, dtype=torch.bool)), r"need \[2, 3, 4, 4\]"),
        (lambda x, w, v: dynamic(x, w, windows=v, start=torch.zeros(2, 5, 1, 6)), r"must be \[18, 5, 1, 6\]"),
        (lambda x, w, v: dynamic(x, w, windows=v, child_ids=torch.zeros(9, 12, dtype=torch.long)), "leave one"),
    ],
)
def test_what_does_not_fit_a_map_is_said_at_the_door(call, words):
    poses, weight = torch.randn(2, 3, 4, 4, 1, 3), torch.randn(12, 5, 3, 6)
    with pytest.raises(ValueError, match=words):
        call(poses, weight, Windows((2, 2), (1, 1), (0, 0)))


def test_rounds_on_a_map_can_be_run_one_at_a_time():
    poses, weight = torch.randn(2, 3, 4, 4, 1, 3), torch.randn(12, 5, 3, 6)
    view = Windows((2, 2), (1, 1), (0, 0))
    state = None
    for _ in range(3):
        one = dynamic(poses, weight, iterations=1, windows=view, start=state)
        state = one.state
    torch.testing.assert_close(one.poses, dynamic(poses, weight, windows=view).poses)


def test_every_combination_of_backends_learns_the_same_step():
    """A layer may run forward on one backend for training and on another for inference."""
    layer = ConvCapsules(3, 4, (4, 4), (4, 4), kernel_size=3, stride=2, routing=Attention())
    poses = torch.randn(2, 3, 9, 9, 4, 4)
    kinds = ["reference", "streamed", *([] if native.missing() else ["native"])]
    for a, b in itertools.combinations(kinds, 2):
        ours, theirs = (layer.route(Capsules(poses), backend=k).poses for k in (a, b))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["streamed", "native"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_pass_under_autocast_is_the_same_as_without(backend, shared):
    if backend == "native" and native.missing():
        pytest.skip(str(native.missing()))
    poses = torch.randn(16, 40, 2, 6, requires_grad=True)
    weight = torch.randn(1 if shared else 40, 9, 6, 7, requires_grad=True)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = dynamic(poses, weight, backend=backend).poses.square().sum()
            found.append(torch.autograd.grad(loss, (poses, weight)))
    for plain, cast in zip(*found, strict=True):
        torch.testing.assert_close(cast, plain, rtol=1e-5, atol=1e-6)


def test_em_streams_the_same_gradients_under_autocast():
    leaves = [torch.randn(4, 40, 2, 6), torch.randn(40, 3, 6, 5), torch.rand(4, 40)]
    leaves = [x.requires_grad_() for x in leaves]
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = EM()(*leaves, backend="streamed").poses.square().sum()
            found.append(torch.autograd.grad(loss, leaves))
    for plain, cast in zip(*found, strict=True):
        torch.testing.assert_close(cast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("shape", ["connected", "shared", "map"])
def test_operators_give_contiguous_results_as_their_shapes_promise(iterations, shape):
    """`torch.library.opcheck` compares each operator with its promise, strides and all."""
    torch.manual_seed(0)
    windows = [2, 2, 1, 1, 0, 0] if shape == "map" else []
    poses = torch.randn(2, 3, 4, 5, 2, 6) if windows else torch.randn(4, 12, 6, 2).transpose(2, 3)
    N = 2 * 3 * 4 if windows else 4
    weight = torch.randn(1 if shape == "shared" else 12, 6, 5, 7).transpose(1, 2)
    V, ds = torch.randn(N, 5, 7, 2).transpose(2, 3), torch.randn(N, 5, 2, 7)
    same = (poses, weight, None, None, None, False, False, "parents", windows)
    for backend in ["streamed"] + ([] if native.missing() else ["native"]):
        rounds = ([V], [ds], [], [ds]) if iterations > 1 else ([], [], [], [])
        for op, arguments in (
            (_ops._forward, (backend, *same, V)),
            (_ops._backward_state, (backend, *same, V, ds, None, ds)),
            (_ops._backward_full, (backend, *same, *rounds, ds, "none")),
        ):
            torch.library.opcheck(op, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own
def test_forward_derivatives_run_on_the_reference_under_auto():
    poses, weight = torch.randn(16, 40, 2, 6), torch.randn(40, 9, 6, 7)
    with forward_ad.dual_level():
        parents = dynamic(forward_ad.make_dual(poses, torch.randn_like(poses)), weight).poses
        assert forward_ad.unpack_dual(parents).tangent.isfinite().all()
        with pytest.raises(ValueError, match="forward-mode"):
            dynamic(forward_ad.make_dual(poses, torch.randn_like(poses)), weight, backend="streamed")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("rule", [Dynamic(), Dynamic.su(), Attention()], ids=["sabour", "su", "attention"])
def test_forward_and_second_derivatives_of_what_learns(rule):
    poses, weight = torch.randn(2, 3, 1, 2, dtype=torch.float64), torch.randn(3, 2, 2, 2, dtype=torch.float64)

    def loss(w):
        return rule(poses, w).poses.square().sum()

    weight.requires_grad_()
    backward = torch.autograd.functional.hessian(loss, weight)
    torch.testing.assert_close(torch.func.hessian(loss)(weight), backward, rtol=1e-9, atol=1e-12)
    toward = torch.randn_like(weight)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(weight, toward))).tangent
    gradient = torch.autograd.grad(loss(weight), weight)[0]
    torch.testing.assert_close(tangent, (gradient * toward).sum(), rtol=1e-9, atol=1e-12)


def test_few_examples_compile_whole_with_sizes_that_change():
    script = """
        import torch
        from torchcaps.routing import dynamic

        weight = torch.randn(20, 8, 4, 5, requires_grad=True)
        compiled = torch.compile(
            lambda x: dynamic(x, weight).poses, dynamic=True, fullgraph=True, backend="aot_eager"
        )
        for N in (2, 5, 40):  # on both sides of what the CPU kernels are worth
            poses = torch.randn(N, 20, 2, 4)
            found, wanted = compiled(poses), dynamic(poses, weight, backend="reference").poses
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            a, b = (torch.autograd.grad(v.square().sum(), weight)[0] for v in (found, wanted))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    """  # in a process of its own: the checks of shapes around the tests cannot be traced
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


@pytest.mark.parametrize("backend", ["auto", "streamed", pytest.param("native", marks=here)])
@pytest.mark.parametrize("rule", [Dynamic(iterations=1), Attention(iterations=1)], ids=["dynamic", "attention"])
def test_one_round_of_a_map_whose_windows_share_one_weight_learns(rule, backend):
    grads = []
    for chosen in ("reference", backend):
        torch.manual_seed(0)
        poses = torch.randn(8, 5, 7, 6, 2, 4, requires_grad=True)
        weight = torch.randn(1, 6, 4, 5, requires_grad=True)
        windows = Windows((3, 2), (2, 1), (1, 0))
        rule(poses, weight, windows=windows, backend=chosen).poses.square().sum().backward()
        grads.append((poses.grad, weight.grad))
    for found, wanted in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, s):
        return self.gain * s


@pytest.mark.parametrize(
    ("squash", "words"),
    [(Learned(), "holds tensors that need gradients"), (torch.nn.Dropout(0.5), "draws random numbers")],
)
@pytest.mark.parametrize("place", ["squash", "inner_squash"])
def test_a_squash_that_a_second_walk_would_not_know_runs_on_the_reference(squash, words, place):
    poses, weight = torch.randn(64, 30, 1, 4), torch.randn(30, 8, 4, 5, requires_grad=True)
    learned, found = [weight, *squash.parameters()], []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        parents = dynamic(poses, weight, backend=backend, **{place: squash}).poses
        found.append([parents, *torch.autograd.grad(parents.square().sum(), learned)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=f"a second time .* yours {words}"):
        dynamic(poses, weight, backend="streamed", **{place: squash})
    with torch.no_grad():  # without a gradient there is no second walk
        dynamic(poses, weight, backend="streamed", **{place: squash})


@here
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_cpu_kernels_do_not_take_the_default_dtype_or_device_for_their_own(dtype):
    poses, weight = torch.randn(16, 30, 1, 4), torch.randn(30, 8, 4, 5, requires_grad=True)
    wanted = dynamic(poses, weight, backend="native").poses
    torch.set_default_dtype(dtype)
    try:
        found = dynamic(poses, weight, backend="native").poses
        found.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
    with torch.device("meta"):
        parents = native.forward_pass(poses, weight.detach(), wanted.detach())
    assert parents.device.type == "cpu"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (((3, 3), (1, 0), (0, 0)), r"stride=\(1, 0\) must be whole numbers of 1 or more"),
        (((3, 3), (1, 1), (0, -1)), r"padding=\(0, -1\) must be whole numbers of 0 or more"),
        (((3, 2.0), (1, 1), (0, 0)), r"kernel=\(3, 2.0\) must be whole"),
        (((3, 3), (1,), (0, 0)), r"as many numbers of each kind as the map has axes, 1 to 3"),
        (((), (), ()), r"as many numbers of each kind"),
    ],
)
def test_windows_that_cannot_be_say_so_when_they_are_made(settings, words):
    with pytest.raises(ValueError, match=words):
        Windows(*settings)


@here
@pytest.mark.parametrize("rule", [Dynamic(), Attention()], ids=["dynamic", "attention"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_a_batch_of_none_gives_parents_of_none_where_all_children_share_a_weight(rule, iterations):
    poses, weight = torch.randn(0, 7, 2, 4, requires_grad=True), torch.randn(1, 3, 4, 5, requires_grad=True)
    parents = dataclasses.replace(rule, iterations=iterations)(poses, weight, backend="native").poses
    assert parents.shape == (0, 3, 2, 5)
    parents.sum().backward()
    assert poses.grad.shape == poses.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@here
@pytest.mark.parametrize("J", [1, 3, 17])
def test_lanes_behind_the_last_parent_get_no_share_however_low_the_priors_are(J):
    torch.manual_seed(0)
    poses, weight = torch.randn(2, 3, 5, 5, 1, 4), torch.randn(27, J, 4, 5)
    prior = torch.zeros(27, J)
    prior[::2] = torch.finfo(torch.float32).min  # all parents of a child alike: as good as 0
    found, wanted = (
        dynamic(poses, weight, prior=prior, windows=Windows((3, 3), (1, 1), (0, 0)), backend=backend).poses
        for backend in ("native", "reference")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("competition", ["window", "all"])
def test_padded_windows_export_for_any_batch(competition):
    layer = ConvCapsules(3, 8, (2, 4), (2, 5), 3, padding=1, routing=Attention(), competition=competition)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(Capsules(x)).poses

    net, batch = Net().eval(), torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(net, (torch.randn(4, 3, 9, 9, 2, 4),), dynamic_shapes=({0: batch},)).module()
    for N in (1, 4, 7):
        x = torch.randn(N, 3, 9, 9, 2, 4)
        torch.testing.assert_close(exported(x), net(x), rtol=1e-4, atol=1e-5)


@here
@pytest.mark.parametrize("rule", [Dynamic(), Attention(iterations=3)], ids=["dynamic", "attention"])
def test_a_kept_graph_gives_the_same_gradients_again_and_one_used_up_says_so(rule):
    """The sums of a round go while the backward runs, but not from a graph that is kept."""
    poses, weight = torch.randn(16, 40, 2, 6, requires_grad=True), torch.randn(40, 9, 6, 7, requires_grad=True)
    total = rule(poses, weight, backend="native").poses.square().sum()
    first = torch.autograd.grad(total, [poses, weight], retain_graph=True)
    second = torch.autograd.grad(total, [poses, weight])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, [poses, weight])


@here
def test_the_state_of_attention_is_its_parents_and_carries_their_gradient():
    """`run_rounds` hands out one tensor for both: a gradient reaches it by either name."""
    poses, weight = torch.randn(16, 40, 2, 6, requires_grad=True), torch.randn(40, 9, 6, 7)
    found = {}
    for backend in ("reference", "native"):
        routed = Attention()(poses, weight, backend=backend)
        total = routed.poses.sum() + routed.state.square().sum()
        (found[backend],) = torch.autograd.grad(total, poses)
    torch.testing.assert_close(found["native"], found["reference"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["streamed", pytest.param("native", marks=here)])
@pytest.mark.parametrize(
    "rule", [Dynamic(), Attention(), Attention(norm=False)], ids=["dynamic", "attention", "no norm"]
)
def test_parents_may_be_changed_in_place(rule, backend):
    layer = ConvCapsules(3, 4, (2, 3), (2, 3), 3, routing=rule)
    poses = torch.randn(2, 3, 6, 6, 2, 3, requires_grad=True)
    found = []
    for name in ("reference", backend):
        parents = layer.route(Capsules(poses), backend=name).poses
        parents.mul_(2)
        found.append(torch.autograd.grad(parents.square().sum(), poses)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
