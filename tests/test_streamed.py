"""The streamed backend: the same numbers as the equations, without votes in memory."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcaps.routing import EM, Attention, Dynamic, EMState, _streamed

RULES = {
    "sabour": Dynamic.sabour(),
    "su": Dynamic.su(),
    "su_first": Dynamic.su_first(),
    "hauser": Dynamic.hauser(),
    "cosine": Dynamic(agreement="cosine"),
    "children": Dynamic(normalize="children"),
    "all but last": Dynamic(detach="all_but_last"),
    "leaky with bias": Dynamic.sabour_code(leaky=True),
    "prior, coupling detached": Dynamic(detach="coupling", learn_prior=True),
    "prior and bias, all but last": Dynamic(detach="all_but_last", learn_prior=True, learn_bias=True),
    "prior and bias": Dynamic(learn_prior=True, learn_bias=True),
    "one round": Dynamic(iterations=1),
    "one round with prior": Dynamic(iterations=1, learn_prior=True),
    "a callable": Dynamic(squash=lambda s: s.tanh(), inner_squash="exp"),
    "attention": Attention.tsai(),
    "attention without norm": Attention(iterations=3, norm=False),
    "em": EM(final_lambda=0.5),
    "em, one round": EM(iterations=1, final_lambda=0.5),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """A few numbers to a tile, so that every size crosses several."""
    monkeypatch.setattr(_streamed, "TILE_NUMBERS", 60)


def draw(rule, sizes, *, shared=False, masked=False, offset=False, started=False, seed=0, dtype=torch.float64):
    """(leaves that want a gradient, the call's arguments)."""
    torch.manual_seed(seed)
    N, I, J, R, P, Q = sizes
    poses = torch.randn(N, I, R, P, dtype=dtype)
    weight = torch.randn(1 if shared else I, J, P, Q, dtype=dtype)
    leaves = {"poses": poses, "weight": weight}
    leaves |= {name: torch.randn_like(v, dtype=dtype) for name, v in rule.learned(I, J, R, P, Q).items()}
    if rule.needs_activations:
        leaves["activations"] = torch.rand(N, I, dtype=dtype)
    if offset:
        leaves["vote_offset"] = torch.randn(I, 1, R, Q, dtype=dtype)
    plain = {}
    if masked:
        plain["mask"] = torch.rand(N, I) > 0.3
        plain["mask"][0] = False
    if started:
        if isinstance(rule, EM):
            state = rule(**leaves).state
            leaves |= {"mean": state.mean, "variance": state.variance, "logits": state.activation_logits}
        else:
            leaves["start"] = torch.randn(N, J, R, Q, dtype=dtype)
    return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}, plain


def run(rule, backend, leaves, plain):
    """Everything that a call gives, and the gradient of a generic function of it."""
    given_ = dict(leaves)
    if "mean" in given_:
        given_["start"] = EMState(given_.pop("mean"), given_.pop("variance"), given_.pop("logits"), 2)
    routed = rule(**given_, **plain, backend=backend)
    state = routed.state[:3] if isinstance(routed.state, EMState) else (routed.state,)
    out = [x for x in (routed.poses, routed.activations, *state) if x is not None]
    torch.manual_seed(1)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in out)  # randn_like would follow strides
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return out + [torch.zeros_like(v) if g is None else g for g, v in zip(found, leaves.values(), strict=True)]


def assert_same(rule, leaves, plain):
    for ours, theirs in zip(run(rule, "streamed", leaves, plain), run(rule, "reference", leaves, plain), strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients_are_the_equations_own(name, small_tiles):
    for sizes in ((3, 5, 4, 2, 3, 2), (4, 6, 3, 1, 4, 5), (1, 1, 1, 1, 1, 1)):
        for shared, masked, offset, started in itertools.product([False, True], repeat=4):
            rule = RULES[name]
            assert_same(rule, *draw(rule, sizes, shared=shared, masked=masked, offset=offset, started=started))


@given(
    st.tuples(*[st.integers(1, n) for n in (9, 40, 9, 3, 9, 9)]),
    st.sampled_from(sorted(RULES)),
    st.tuples(*[st.booleans()] * 3),
    st.integers(1, 4000),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_no_size_and_no_tile_makes_a_difference(sizes, name, flags, tile, seed):
    before, _streamed.TILE_NUMBERS = _streamed.TILE_NUMBERS, tile
    try:
        shared, masked, offset = flags
        assert_same(RULES[name], *draw(RULES[name], sizes, shared=shared, masked=masked, offset=offset, seed=seed))
    finally:
        _streamed.TILE_NUMBERS = before


@pytest.mark.parametrize("name", [name for name in RULES if "one round" not in name])
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_of_the_size_of_votes_or_coupling_is_saved(name, shared):
    sizes = (5, 29, 11, 2, 3, 4)
    N, I, J = sizes[:3]
    leaves, plain = draw(RULES[name], sizes, shared=shared)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        RULES[name](**leaves, **plain, backend="streamed")
    assert saved
    assert all(not {N, I, J} <= set(shape) for shape in saved), [s for s in saved if {N, I, J} <= set(s)]
    assert all(s.numel() < N * I * J for s in saved if s != leaves["weight"].shape)


@pytest.mark.parametrize("name", ["sabour", "su", "attention", "leaky with bias"])
def test_a_derivative_of_the_derivative_is_right(name):
    leaves, plain = draw(RULES[name], (2, 3, 2, 1, 2, 2))
    names = list(leaves)

    def parents(*values):
        return RULES[name](**dict(zip(names, values, strict=True)), **plain, backend="streamed").poses

    assert torch.autograd.gradgradcheck(parents, list(leaves.values()))


def test_em_says_that_it_has_no_second_derivative():
    leaves, plain = draw(RULES["em"], (2, 3, 2, 1, 2, 2))
    routed = RULES["em"](**leaves, **plain, backend="streamed")
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(routed.poses.sum(), leaves["poses"], create_graph=True)


@pytest.mark.parametrize("backend", ["reference", "streamed"])
@pytest.mark.parametrize("scale", [3.0, 6.0, 100.0])
def test_a_loose_parent_beside_a_tight_one_keeps_its_mean_and_gradient(backend, scale):
    """The tight one wins each child by e^88 and more: in float32 the loose one's shares are 0, their ratios are not."""
    torch.manual_seed(0)
    poses, a = torch.eye(4).expand(1, 8, 4, 4), torch.ones(1, 8)
    weight = torch.cat([torch.zeros(8, 1, 4, 4), scale * torch.randn(8, 1, 4, 4)], 1).requires_grad_()
    routed = EM.hinton()(poses, weight, a, backend=backend)
    exact = EM.hinton()(poses.double(), weight.detach().double(), a.double())
    torch.testing.assert_close(routed.poses.double(), exact.poses, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(routed.poses.sum(), weight)[0].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "streamed"])
@pytest.mark.parametrize("loudness", [1e-38, 1e-30, 1e30])
def test_means_depend_on_the_ratios_of_activations_alone(backend, loudness):
    leaves, _ = draw(RULES["em"], (2, 5, 3, 4, 4, 4), dtype=torch.float32)
    a = leaves.pop("activations").detach()
    one = EM(iterations=1)(**leaves, activations=a.clamp(min=0.1), backend=backend)
    other = EM(iterations=1)(**leaves, activations=a.clamp(min=0.1) * loudness, backend=backend)
    torch.testing.assert_close(other.poses, one.poses, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(other.poses.sum(), [leaves["poses"], leaves["weight"]])
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("backend", ["reference", "streamed"])
def test_variance_survives_votes_that_all_but_agree(backend):
    """Mean 1000, standard deviation 1e-3 in float32: E[v^2] - mean^2 would be 0 or negative."""
    torch.manual_seed(0)
    poses = 1000 + 1e-3 * torch.randn(2, 4096, 1, 1, dtype=torch.float64)
    poses = poses.float().double()  # what float32 can hold of them
    weight, a = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(2, 4096, dtype=torch.float64)
    exact = EM(iterations=1, min_variance=1e-12)(poses, weight, a).state.variance
    ours = EM(iterations=1, min_variance=1e-12)(poses.float(), weight.float(), a.float(), backend=backend)
    torch.testing.assert_close(ours.state.variance.double(), exact, rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sabour", "su", "attention", "em"])
def test_low_precision_errs_at_most_twice_as_much_as_the_reference_does(name, dtype):
    rule = RULES[name]
    leaves, plain = draw(rule, (4, 300, 5, 1, 6, 7), dtype=torch.float64)
    low = {k: v.detach().to(dtype).requires_grad_() for k, v in leaves.items()}
    exact = run(rule, "reference", {k: v.detach().double().requires_grad_() for k, v in low.items()}, plain)
    for e, r, s in zip(exact, run(rule, "reference", low, plain), run(rule, "streamed", low, plain), strict=True):
        worst = 2 * (r.double() - e).square().mean().sqrt() + 4 * torch.finfo(dtype).eps * e.square().mean().sqrt()
        assert (s.double() - e).square().mean().sqrt() <= worst


def test_a_compiled_graph_holds_it_whole():
    """In a process of its own: the tests' shape checks cannot be traced."""
    script = """
        import torch
        from torchcaps.routing import EM, Attention, Dynamic
        for rule in (Dynamic.sabour(), Dynamic.su(), Attention.tsai(), EM.hinton()):
            poses, weight = torch.randn(2, 6, 2, 3, requires_grad=True), torch.randn(6, 3, 3, 2, requires_grad=True)
            route = lambda poses, weight: rule(poses, weight, torch.ones(2, 6), backend="streamed").poses.square().sum()
            plain = torch.autograd.grad(route(poses, weight), (poses, weight))
            compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
            for a, b in zip(plain, torch.autograd.grad(compiled(poses, weight), (poses, weight))):
                torch.testing.assert_close(a, b)
        print("compiled")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert "compiled" in done.stdout, done.stderr[-2000:]


def test_a_named_backend_that_cannot_says_why():
    leaves, _ = draw(RULES["sabour"], (2, 3, 2, 1, 2, 2))
    with pytest.raises(ValueError, match="return_coupling"):
        RULES["sabour"](**leaves, backend="streamed", return_coupling=True)
    with pytest.raises(ValueError, match="child_ids"):
        RULES["sabour"](**leaves, backend="streamed", child_ids=torch.arange(3)[None])
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda p: RULES["sabour"](p[None], leaves["weight"], backend="streamed").poses)(leaves["poses"])


def test_transforms_of_torch_func_run_on_the_reference_under_auto(monkeypatch):
    leaves, _ = draw(RULES["sabour"], (3, 4, 2, 1, 2, 2))
    monkeypatch.setattr("torchcaps.routing._backends.WORTH_STREAMING", 1)
    monkeypatch.setattr("torchcaps.routing._backends.LANES", 1)
    rule, poses, weight = RULES["sabour"], leaves["poses"], leaves["weight"]
    mapped = torch.func.vmap(lambda p: rule(p[None], weight).poses[0])(poses)
    torch.testing.assert_close(mapped, rule(poses, weight).poses)


@pytest.mark.slow
def test_a_thousand_parents_of_shared_children_fit_in_two_gib():
    """The votes alone would be 25.7 GB. In a process of its own, whose peak is measured."""
    script = """
        import resource, torch
        from torchcaps.routing import Dynamic
        poses, weight = torch.randn(128, 3136, 1, 128), torch.randn(1, 1000, 128, 16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.no_grad():
            Dynamic.sabour()(poses, weight)
        print("MiB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 2048


@pytest.mark.slow
def test_a_thousand_parents_with_weights_of_their_own_train_in_one_and_a_half_gib():
    script = """
        import resource, torch
        from torchcaps.routing import Dynamic
        poses = torch.randn(32, 1152, 1, 8, requires_grad=True)
        weight = torch.randn(1152, 1000, 8, 16, requires_grad=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Dynamic.sabour()(poses, weight).poses.sum().backward()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print("MiB", grown - weight.numel() * 4 / 2**20)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 1536
