"""Watching changes nothing: the numbers are the model's, and afterwards the model is bit for bit as it was."""

from typing import Any

import pytest
import torch
from explained_models import MODELS, capsnet, model_and_images
from torch import Tensor, nn

from torchcaps.explain import look, watching
from torchcaps.explain.watching import evaluating, last_layer, routed_layers
from torchcaps.layers import ConvCapsules, FullyConnectedCapsules, PrimaryCapsules
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.types import Capsules, Routed

every_model = pytest.mark.parametrize("name", MODELS)


def everything_of(model: nn.Module) -> dict[str, Any]:
    """Weights, and all that the model and its parts keep beside them."""
    kept = {f"state {key}": value.clone() for key, value in model.state_dict().items()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                kept[f"{name}.{key}"] = value
    return kept


def assert_as_it_was(model: nn.Module, before: dict[str, Any]) -> None:
    after = everything_of(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        same = torch.equal(after[key], value) if isinstance(value, Tensor) else after[key] == value
        assert same, key


@every_model
@pytest.mark.parametrize("training", [False, True])
def test_watching_leaves_the_model_and_its_answers_bit_for_bit_as_they_were(name: str, training: bool) -> None:
    model, images = model_and_images(name)
    model.train(training)
    with torch.no_grad():
        scores = model(images)
    before = everything_of(model)
    look(model, images)
    look(model, images, rounds=1)
    assert_as_it_was(model, before)
    with torch.no_grad():
        assert torch.equal(model(images), scores)


def run_and_fail(model: nn.Module, images: Tensor) -> None:
    model(images)
    raise RuntimeError("in the middle")


@every_model
def test_an_exception_leaves_the_model_as_it_was(name: str) -> None:
    model, images = model_and_images(name)
    before = everything_of(model)
    with pytest.raises(RuntimeError, match="in the middle"), watching(model), evaluating(model):
        run_and_fail(model, images)
    assert_as_it_was(model, before)
    with pytest.raises(ValueError, match=r"built for|images"):
        look(model, images[0, 0])
    assert_as_it_was(model, before)


def test_a_method_that_stood_in_a_layer_before_stands_there_afterwards() -> None:
    model, images = model_and_images("capsnet")
    layer: Any = model.class_caps
    own = layer.route
    layer.route = own
    look(model, images)
    assert vars(layer)["route"] is own


@every_model
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_seen_are_the_numbers_of_the_model(name: str, batch: int) -> None:
    model, images = model_and_images(name, batch)
    found = look(model, images)
    with torch.no_grad():
        torch.testing.assert_close(found.scores, model(images), rtol=1e-4, atol=1e-5)
    last = found.of()[-1]
    assert last.layer == last_layer(model) == list(routed_layers(model))[-1]
    with torch.no_grad():
        torch.testing.assert_close(last.routed.poses, model.capsules(images).poses, rtol=1e-4, atol=1e-5)
    for call in found.seen:
        layer: Any = routed_layers(model)[call.layer]
        again = layer.route(call.children, start=call.arguments["start"], return_coupling="all", backend="reference")
        assert torch.equal(call.coupling, again.coupling)


@every_model
def test_what_the_rule_gives_after_all_rounds_is_what_the_layer_gave(name: str) -> None:
    model, images = model_and_images(name)
    for call in look(model, images).seen:
        poses = call.after(len(call.coupling)).poses
        torch.testing.assert_close(poses.flatten(), _windows_first(call.routed.poses).flatten())


def _windows_first(poses: Tensor) -> Tensor:
    """`[N, J, *out, R, Q]` as `[N, *out, J, R, Q]`."""
    return poses.movedim(1, -3)


@every_model
def test_rounds_are_those_that_were_asked_for(name: str) -> None:
    model, images = model_and_images(name)
    short = look(model, images, rounds=1)
    assert all(len(call.coupling) == 1 for call in short.seen)
    assert len(short.of()) == 1
    whole = look(model, images)
    assert sum(len(call.coupling) for call in whole.of()) > 1
    assert not torch.allclose(short.scores, whole.scores, rtol=1e-6, atol=1e-7)
    many = look(model, images, rounds=50)
    assert torch.equal(many.of()[0].coupling[: len(whole.of()[0].coupling)], whole.of()[0].coupling)


def test_one_round_is_the_model_built_with_routing_off() -> None:
    model, images = model_and_images("capsnet")
    off = capsnet(Dynamic.sabour(iterations=1)).eval()
    off.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(look(model, images, rounds={"class_caps": 1}).scores, off(images))


def test_children_that_are_absent_are_absent_for_each_row_of_a_single_image() -> None:
    model, images = model_and_images("capsnet", 1)
    absent = torch.zeros(3, 2, 4, 3, dtype=torch.bool)
    absent[1, 0], absent[2] = True, True
    found = look(model, images, absent={"class_caps": absent})
    assert found.scores.shape == (3, 4)
    assert torch.equal(found.seen[0].coupling[:, 1, :12], torch.zeros(3, 12, 4))
    assert torch.equal(found.seen[0].presence[2], torch.zeros(2, 4, 3))
    torch.testing.assert_close(found.scores[0], look(model, images).scores[0])


class Own(nn.Module):
    """Capsules called in ways of their own: by `route`, with a mask, and one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = PrimaryCapsules(1, 4, (2, 2), activations=True)
        self.conv = ConvCapsules(4, 4, (2, 2), (2, 2), 3, padding=1, routing=EM.hinton())
        self.classes = FullyConnectedCapsules(4 * 25, 3, (2, 2), (2, 2), routing=Attention())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        capsules = self.conv.route(self.conv(self.primary(x), mask), backend="auto").capsules
        return self.classes(capsules, mask).lengths


def test_layers_are_watched_however_they_are_called_with_the_mask_they_were_given() -> None:
    model, x = Own().eval(), torch.rand(2, 1, 5, 5)
    mask = torch.rand(2, 4, 5, 5) < 0.7
    found = look(model, x, mask=mask)
    assert [call.layer for call in found.seen] == ["conv", "conv", "classes"]
    first, second, last = found.seen
    assert torch.equal(first.mask, mask)
    assert second.mask is None
    assert torch.equal(first.presence[~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(last.shares()[0].movedim(1, -1)[~mask], torch.zeros(int((~mask).sum()), 3))
    assert first.votes().shape == (2 * 25, 4 * 9, 4, 2, 2)


class Rude(nn.Module):
    """A layer that keeps the protocol, and its rule to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.routing, self.out_caps = Dynamic(), 2

    def route(self, capsules: Capsules, mask: Tensor | None = None) -> Routed:
        return Routed(capsules.poses, None, None, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.route(Capsules(x)).capsules.lengths


def test_what_cannot_be_looked_into_is_said_in_words() -> None:
    model, images = model_and_images("capsnet")
    with pytest.raises(ValueError, match="no capsule layer nowhere: there are class_caps"):
        look(model, images, rounds={"nowhere": 1})
    with pytest.raises(ValueError, match="no capsule layer 'nowhere' was called: take one of class_caps"):
        look(model, images).of("nowhere")
    with pytest.raises(ValueError, match=r"1 or more \(1 is routing off\)"):
        look(model, images, rounds=0)
    with pytest.raises(ValueError, match=r"absent \[2, 7\] of torch.bool does not fit the children \[2, 2, 4, 3\]"):
        look(model, images, absent={"class_caps": torch.zeros(2, 7, dtype=torch.bool)})
    with pytest.raises(ValueError, match="routed nothing"):
        look(nn.Flatten(), images).of()
    with pytest.raises(ValueError, match="Flatten has no capsule layers"):
        last_layer(nn.Flatten())
    with pytest.raises(ValueError, match=r"Rude.* routes without a call of its rule"):
        look(nn.Sequential(Rude()), torch.rand(2, 3, 1, 4))


def test_a_compiled_model_is_looked_into_uncompiled_and_stays_compiled() -> None:
    model, images = model_and_images("capsnet")
    scores = look(model, images).scores
    model.compile(backend=lambda *_: pytest.fail("it was compiled"))
    compiled = model._compiled_call_impl
    assert torch.equal(look(model, images).scores, scores)
    assert model._compiled_call_impl is compiled
