"""Golden vectors of dynamic routing, of its relatives by Su and by Hauser, and of the squashes they use."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import golden
import oracles
import pytest
import torch
from golden import Golden
from torch import Tensor

from torchcaps import squash
from torchcaps.routing import Dynamic, combine, combine_transposed, dynamic
from torchcaps.squash import safe_norm


def labml_squash(s: Tensor) -> Tensor:
    """q / (1 + q) s / sqrt(q + 1e-8): labml's constant stands beside the length, not in it."""
    q = s.square().sum((-2, -1), keepdim=True)
    return q / (1 + q) * s / (q + 1e-8).sqrt()


def xifeng_squash(s: Tensor) -> Tensor:
    """n^2 / (1 + n^2) s / (n + 1e-8)."""
    n = torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True)
    return n.square() / (1 + n.square()) / (n + 1e-8) * s


def su_normalize(s: Tensor) -> Tensor:
    """s / sqrt(max(q, 1e-12)), Keras' l2_normalize."""
    return s / s.square().sum((-2, -1), keepdim=True).clamp(min=1e-12).sqrt()


su_squash = partial(squash, a=0.5, eps=1e-7)


class Case(NamedTuple):
    """A file in the library's words: poses and weight, the settings, the learned tensors, the name of the output."""

    poses: Tensor
    weight: Tensor
    settings: dict[str, Any]
    learned: dict[str, Tensor]
    output: str


def labml(g: Golden) -> Case:
    settings = {"iterations": int(g.number("iterations")), "squash": labml_squash}
    return Case(g.leaf("u").unsqueeze(-2), g.leaf("weight"), settings, {}, "v")


def xifeng(g: Golden) -> Case:
    settings = {"iterations": int(g.number("routings")), "squash": xifeng_squash, "detach": "all_but_last"}
    return Case(g.leaf("x").unsqueeze(-2), g.leaf("weight").permute(1, 0, 3, 2), settings, {}, "y")


def adambielski(g: Golden) -> Case:
    extra = int(g.number("n_iterations_arg"))
    weight = g.leaf("weights").unflatten(-1, (4, 5)).transpose(1, 2)
    return Case(g.leaf("x").unsqueeze(-2), weight, {"iterations": extra + 1}, {"prior": g.leaf("b_prior")}, "y")


def sarasra(g: Golden) -> Case:
    settings = {"iterations": int(g.number("num_routing")), "leaky": bool(g.number("leaky"))}
    weight = g.leaf("w").unflatten(-1, (4, 5)).transpose(1, 2)
    return Case(g.leaf("x").unsqueeze(-2), weight, settings, {"bias": g.leaf("bias").unsqueeze(-2)}, "y")


def bojone(g: Golden) -> Case:
    weight = g.leaf("W").unflatten(-1, (3, 5)).transpose(1, 2)
    settings = {"iterations": int(g.number("routings")), "accumulate": False, "squash": su_squash}
    return Case(g.leaf("u").unsqueeze(-2), weight, settings, {}, "y")


def bojone_head(g: Golden) -> Case:
    case = bojone(g)
    return case._replace(settings={**case.settings, "inner_squash": su_normalize})


READERS: dict[str, Callable[[Golden], Case]] = {
    "labml_router": labml,
    "xifeng_dense": xifeng,
    "adambielski_dense": adambielski,
    "sarasra_capsule": sarasra,
    "bojone_jan2018": bojone,
    "bojone_head": bojone_head,
}


def read(name: str) -> tuple[Golden, Case]:
    """A router's file and its case."""
    g = Golden(name)
    (reader,) = [reader for prefix, reader in READERS.items() if name.startswith(f"others/{prefix}_")]
    return g, reader(g)


def test_the_folder_holds_exactly_the_files_on_the_list() -> None:
    folder = Path(golden.__file__).parent
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.npz")}
    assert found == set(golden.FILES)
    assert len(golden.FILES) == len(set(golden.FILES)) == 48


@pytest.mark.parametrize("name", golden.ROUTERS)
def test_dynamic_makes_the_peers_numbers_and_gradients(name: str) -> None:
    g, case = read(name)
    routed = dynamic(case.poses, case.weight, **case.settings, **case.learned)
    g.check(case.output, routed.poses.squeeze(-2))
    g.check_gradients((routed.poses.squeeze(-2), "cot"))


@pytest.mark.parametrize("name", golden.ROUTERS)
def test_the_frozen_rule_makes_the_peers_numbers_too(name: str) -> None:
    g, case = read(name)
    flags = {f"learn_{name}": True for name in case.learned}
    routed = Dynamic(**case.settings, **flags)(case.poses, case.weight, **case.learned)
    g.check(case.output, routed.poses.squeeze(-2))


@pytest.mark.parametrize("name", [name for name in golden.ROUTERS if name.endswith(("_r3", "_extra2"))])
def test_three_single_rounds_through_the_state_make_the_peers_numbers(name: str) -> None:
    g, case = read(name)
    settings = {**case.settings, "iterations": 1}
    state = None
    for _ in range(3):
        routed = dynamic(case.poses, case.weight, start=state, **settings, **case.learned)
        state = routed.state
    g.check(case.output, routed.poses.squeeze(-2))


@pytest.mark.parametrize("name", golden.ROUTERS)
def test_each_preset_has_its_papers_settings_and_only_the_epsilon_is_put_into_it(name: str) -> None:
    g, case = read(name)
    T = case.settings["iterations"]
    if name.startswith("others/bojone_"):
        rule = Dynamic.su(iterations=T) if "_head_" in name else Dynamic.su_first(iterations=T)
        plain = rule(case.poses, case.weight).poses.squeeze(-2)
        torch.testing.assert_close(plain, g[case.output], rtol=1e-4, atol=0.0)  # without Su's 1e-7 inside the squash
        rule = dataclasses.replace(rule, squash=su_squash)
    elif name.startswith("others/sarasra_"):
        rule = Dynamic.sabour_code(iterations=T, leaky=case.settings["leaky"])
        assert set(rule.learned(6, 4, 1, 3, 5)) == {"bias"}
    else:
        rule = Dynamic.sabour(iterations=T)
        rule = dataclasses.replace(rule, squash=case.settings.get("squash", "sabour"))
    g.check(case.output, rule(case.poses, case.weight, **case.learned).poses.squeeze(-2))


FORMS = {su_squash: oracles.Squash(a=0.5, eps=1e-7), su_normalize: oracles.Squash("normalize")}


@pytest.mark.parametrize(
    "name", [name for name in golden.ROUTERS if not name.startswith(("others/labml", "others/xif"))]
)
def test_the_oracle_makes_the_peers_numbers_too(name: str) -> None:
    g, case = read(name)
    settings = {key: FORMS[value] if callable(value) else value for key, value in case.settings.items()}
    tensors = {"poses": case.poses, "weight": case.weight, **case.learned}
    routed = oracles.dynamic(**{key: value.detach().numpy() for key, value in tensors.items()}, **settings)
    g.check(case.output, torch.from_numpy(routed.poses).squeeze(-2))


@pytest.mark.parametrize("name", golden.SQUASHES)
def test_squash_makes_the_peers_numbers_once_its_length_has_their_epsilon(name: str) -> None:
    g = Golden(name)
    s = g.leaf("s")
    r = safe_norm(s, dim=-1, keepdim=True)
    ratio = r / (r.square() + 1e-8).sqrt() if name == "others/labml_squash" else r / (r + 1e-8)
    v = squash(s, dim=-1) * ratio
    g.check("v", v)
    g.check_gradients((v, "cot"))


@pytest.mark.parametrize("name", golden.SQUASHES)
def test_a_callable_takes_the_place_of_the_squash(name: str) -> None:
    g = Golden(name)
    peer = labml_squash if name == "others/labml_squash" else xifeng_squash
    v = squash(g.leaf("s").unsqueeze(-2), peer).squeeze(-2)
    g.check("v", v)
    g.check_gradients((v, "cot"))


@pytest.mark.parametrize("name", golden.EXPERTS)
def test_cosine_routing_and_a_given_coupling_make_hausers_numbers(name: str) -> None:
    g = Golden(name)
    poses, weight = g["X"].unsqueeze(-2), g["W"].transpose(-1, -2)
    over: Any = "children" if "normin" in name else "parents"
    settings: dict[str, Any] = {"agreement": "cosine", "normalize": over, "squash": "identity"}
    rounds = int(g.number("routing_iterations"))
    routed = dynamic(poses, weight, iterations=rounds, return_coupling=True, **settings)
    z, c = routed.poses, routed.coupling
    assert c is not None
    g.check("c", c)
    g.check("z", z.squeeze(-2))
    by_loops = oracles.dynamic(
        poses.numpy(), weight.numpy(), iterations=rounds, **{**settings, "squash": oracles.Squash("identity")}
    )
    g.check("z", torch.from_numpy(by_loops.poses).squeeze(-2))
    g.check("c", torch.from_numpy(by_loops.coupling[-1]))
    preset = Dynamic.hauser(iterations=rounds, normalize=over)
    g.check("x_hid", preset(poses, weight).poses.squeeze(-2))
    g.check("z", combine(poses, weight, c).squeeze(-2))
    g.check("x_hid", squash(z).squeeze(-2))
    down = combine_transposed(squash(z), weight, c)
    g.check("z_vis_rec", down.squeeze(-2))
    g.check("x_vis_rec", squash(down).squeeze(-2))
    up = combine(squash(down), weight, c)
    g.check("z_hid_rec", up.squeeze(-2))
    g.check("x_hid_rec", squash(up).squeeze(-2))
    g.check("prob", safe_norm(squash(z)))
    g.check("free_energy", -safe_norm(z).square().log1p().sum(-1))
    g.check("free_energy_rec", -safe_norm(up).square().log1p().sum(-1))


@pytest.mark.parametrize("name", golden.EXPERTS)
def test_hausers_update_is_the_gradient_of_a_difference_of_free_energies_through_combine(name: str) -> None:
    g = Golden(name)
    poses, weight, c = g["X"].unsqueeze(-2), g["W"].transpose(-1, -2).requires_grad_(), g["c"]
    visible = g["x_vis_rec"].unsqueeze(-2)
    data, model = combine(poses, weight, c), combine(visible, weight, c)
    energy = -(data.square().sum((-2, -1)).log1p() - model.square().sum((-2, -1)).log1p()).sum(-1).mean()
    (gradient,) = torch.autograd.grad(energy, weight)
    golden.close(-gradient.transpose(-1, -2), g["deltaW"], golden.GRADIENTS, "deltaW")


def test_combine_enumerates_the_exact_likelihood_of_a_product_of_experts() -> None:
    g = Golden(golden.ENUMERATION)
    weight = g["W"].transpose(-1, -2).requires_grad_()
    poses = g["X_states"].unsqueeze(-2)
    z = combine(poses, weight, g["c"].expand(len(poses), -1, -1))
    square = z.square().sum((-2, -1))
    joint = square.log() @ g["patterns"].T
    g.check("log_joint_unnorm", joint)
    log_z = joint.logsumexp((0, 1))
    g.check("logZ", log_z)
    log_p = square.log1p().sum(-1) - log_z
    g.check("log_p", log_p)
    likelihood = (g["q"] * log_p).sum()
    g.check("loglik", likelihood)
    (gradient,) = torch.autograd.grad(likelihood, weight)
    golden.close(gradient.transpose(-1, -2), g["grad_W_loglik"], golden.GRADIENTS, "grad_W_loglik")
