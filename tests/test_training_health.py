"""Health of capsules: the numbers are what they say, and trouble is told in words, once, with what to do."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchcaps.layers import ConvCapsules, FullyConnectedCapsules, PrimaryCapsules
from torchcaps.losses import MarginLoss
from torchcaps.models import CapsNet
from torchcaps.routing import EM, Dynamic
from torchcaps.training import CapsuleHealth, Classification, MetricsFile, Optimization, capsule_health
from torchcaps.training.health import first_not_finite
from torchcaps.types import Capsules, Routed

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def capsnet(**settings: Any) -> CapsNet:
    settings = {"stem_channels": 4, "primary_types": 2, "hidden": (8,), "primary_pose": 4, "class_pose": 4, **settings}
    return CapsNet(num_classes=3, image_size=8, kernel_size=3, primary_kernel_size=3, **settings)


def fit(module: pl.LightningModule, *data: Tensor, callbacks: Any, **settings: Any) -> pl.Trainer:
    settings = {"max_epochs": 1, "logger": False, **settings}
    trainer = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        log_every_n_steps=1, callbacks=callbacks, **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*data), 4))
    return trainer


class Stack(nn.Module):
    """Capsules of two kinds: a convolution whose capsules have activations, and class capsules called by `route`."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = PrimaryCapsules(1, 4, (2, 2), activations=True)
        self.conv = ConvCapsules(4, 5, (2, 2), (2, 2), 3, routing=EM.hinton())
        self.classes = FullyConnectedCapsules(5 * 9, 3, (2, 2), (2, 2), routing=Dynamic())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.classes.route(self.conv(self.primary(x)), backend="auto").capsules.lengths


def test_every_layer_from_capsules_to_capsules_is_found_however_it_is_called() -> None:
    model, x = Stack(), torch.rand(6, 1, 5, 5)
    found = capsule_health(model, lambda: model(x))
    assert list(found) == ["conv", "classes"]
    capsules = model.conv(model.primary(x))
    assert torch.equal(found["conv"].presence, capsules.activations.amax((0, 2, 3)))
    assert found["conv"].mean_length == pytest.approx(capsules.lengths.mean().item())
    assert torch.equal(found["classes"].presence, model(x).amax(0))
    assert "route" not in vars(model.conv)  # nothing stays behind


def test_coupling_entropy_is_1_for_even_shares_and_0_where_one_parent_gets_all() -> None:
    poses = torch.rand(2, 6, 1, 4)
    even = FullyConnectedCapsules(6, 3, 4, 4, routing=Dynamic(iterations=1))
    assert capsule_health(even, lambda: even(Capsules(poses)))[""].coupling_entropy == pytest.approx(1.0)
    sure = FullyConnectedCapsules(6, 3, 4, 4, routing=Dynamic(iterations=1, learn_prior=True))
    with torch.no_grad():
        sure.learned["prior"][:, 1] = 99.0
    assert capsule_health(sure, lambda: sure(Capsules(poses)))[""].coupling_entropy == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        sure.learned["prior"].copy_(torch.tensor([0.5, 0.25, 0.25]).log().expand(6, 3))
    expected = (0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(3)
    assert capsule_health(sure, lambda: sure(Capsules(poses)))[""].coupling_entropy == pytest.approx(expected, rel=1e-5)


def test_masked_children_have_no_say_in_the_entropy() -> None:
    layer = FullyConnectedCapsules(6, 3, 4, 4, routing=Dynamic(iterations=1))
    mask = torch.tensor([[True] * 3 + [False] * 3])
    found = capsule_health(layer, lambda: layer(Capsules(torch.rand(1, 6, 1, 4)), mask))
    assert found[""].coupling_entropy == pytest.approx(1.0)


def test_a_layer_of_one_s_own_needs_the_protocol_alone() -> None:
    class Own(nn.Module):
        out_caps, out_pose = 2, (1, 4)

        def route(self, capsules: Capsules, mask: Tensor | None = None) -> Routed:
            return Routed(capsules.poses[:, :2], None, None, None)

    layer = Own()
    found = capsule_health(layer, lambda: layer.route(Capsules(torch.ones(1, 5, 1, 4))))
    assert found[""].presence.tolist() == [2.0, 2.0]
    assert found[""].coupling_entropy is None


def test_looking_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(), Stack())
    model[0].eval()
    x, before = torch.rand(4, 1, 5, 5), {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    capsule_health(model, lambda: model(x))
    assert torch.equal(torch.rand(3), expected)
    assert [m.training for m in model] == [False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_health_is_logged_every_n_steps_for_every_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Classification(Stack(), loss=MarginLoss(), num_classes=3)
    norms: list[Tensor] = []

    class Norm(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
            grads = [p.grad.flatten() for p in module.model.conv.parameters()]
            norms.append(torch.cat(grads).norm())

    x, y = torch.rand(24, 1, 5, 5), torch.arange(24) % 3
    fit(module, x, y, callbacks=[CapsuleHealth(every_n_steps=3), Norm()], logger=MetricsFile(tmp_path))
    header, *rows = (line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines())
    column = header.index("health/conv/gradient_norm")
    logged = {int(row[0]): float(row[column]) for row in rows if row[column]}
    assert logged == {step: pytest.approx(norms[step].item(), rel=1e-5) for step in (0, 2, 5)}
    for what in ("dead", "mean_length", "coupling_entropy", "gradient_norm"):
        assert {f"health/conv/{what}", f"health/classes/{what}"} <= set(header)


def test_dead_capsules_are_told_once_with_the_fix() -> None:
    model = capsnet(decoder=False)
    with torch.no_grad():
        model.class_caps.weight[:, 1:] = 0  # two of three classes never speak
        model.class_caps.weight[:, 0] = 1
    module = Classification(model, loss=MarginLoss(), num_classes=3, optimization=Optimization(lr=1e-9))
    x, y = torch.rand(400, 1, 8, 8), torch.zeros(400, dtype=torch.long)
    with pytest.warns(UserWarning, match="dead") as told:
        fit(module, x, y, callbacks=[CapsuleHealth(every_n_steps=1)])
    ours = [str(w.message) for w in told if "dead" in str(w.message)]
    assert len(ours) == 1
    assert "class_caps: 2 of 3 capsules are dead: no length above 0.01 in the last 256 examples" in ours[0]
    assert "Try a lower learning rate (now 1e-09) or a warm-up, a squash that is steep at 0" in ours[0]


def test_healthy_capsules_and_images_raise_no_word() -> None:
    module = Classification(capsnet(), loss=MarginLoss(), num_classes=3, reconstruction_weight=0.0005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not|You defined a|.*LeafSpec")
        fit(module, torch.rand(400, 1, 8, 8), torch.arange(400) % 3, callbacks=[CapsuleHealth(every_n_steps=1)])


def test_images_beyond_what_the_decoder_draws_are_told_once_with_the_fix() -> None:
    module = Classification(capsnet(), loss=MarginLoss(), num_classes=3, reconstruction_weight=0.0005)
    with pytest.warns(UserWarning, match="decoder") as told:
        fit(module, 2 * torch.rand(16, 1, 8, 8) - 1, torch.arange(16) % 3, callbacks=[CapsuleHealth(every_n_steps=1)])
    ours = [str(w.message) for w in told if "decoder" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].startswith("images hold -")
    assert "but the decoder draws in 0..1 and can never match them: give images in 0..1 (bytes / 255" in ours[0]


def test_a_decoder_without_bounds_may_draw_any_image() -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(12, 64)

        def forward(self, poses: Tensor, keep: Tensor) -> Tensor:
            image: Tensor = self.last((poses * keep[:, :, None, None]).flatten(1)) - 1
            return image.view(-1, 1, 8, 8)

    module = Classification(capsnet(decoder=Free()), loss=MarginLoss(), num_classes=3, reconstruction_weight=0.0005)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "images hold")
        fit(module, torch.randn(8, 1, 8, 8), torch.arange(8) % 3, callbacks=[CapsuleHealth(every_n_steps=1)])


class Poison(pl.Callback):
    """Makes a step go wrong."""

    def __init__(self, step: int, parameter: nn.Parameter) -> None:
        self.step, self.parameter = step, parameter

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                self.parameter.fill_(torch.nan)


def test_a_loss_that_is_no_number_stops_the_run_before_the_step_and_names_where() -> None:
    model = capsnet()
    module = Classification(model, loss=MarginLoss(), num_classes=3, optimization=Optimization(lr=0.02))
    poison = Poison(2, model.class_caps.weight)
    kept = {}

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            kept.update({name: p.detach().clone() for name, p in model.stem.named_parameters()})

    with pytest.raises(FloatingPointError) as stopped:
        fit(module, torch.rand(16, 1, 8, 8), torch.arange(16) % 3, callbacks=[CapsuleHealth(), Keep(), poison])
    said = str(stopped.value)
    assert said.startswith("the loss of step 3 (epoch 0) is nan: the weights class_caps.weight are not finite already")
    assert "The step was not taken" in said
    assert "Try a lower learning rate (now 0.02) or a warm-up, gradient_clip_val=1.0" in said
    assert all(torch.equal(p, kept[name]) for name, p in model.stem.named_parameters())


class Explodes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - 2)


def test_the_innermost_layer_whose_output_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid(), Explodes()), nn.Linear(4, 3))
    x = torch.rand(2, 4)
    assert first_not_finite(model, (x, torch.zeros(2)), lambda: model(x)) == (
        "it first appears in 1.1 (Explodes), whose input is finite"
    )
    assert not model[0]._forward_hooks


def test_a_batch_that_holds_nan_is_named_with_its_examples() -> None:
    x = torch.rand(5, 1, 8, 8)
    x[3, 0, 2] = torch.nan
    module = Classification(capsnet(decoder=False), loss=MarginLoss(), num_classes=3)
    with pytest.raises(FloatingPointError, match=r"the images themselves hold NaN or infinity, in examples \[3\]"):
        fit(module, x, torch.zeros(5, dtype=torch.long), callbacks=[CapsuleHealth()])


def test_a_loss_function_that_breaks_is_named_as_such() -> None:
    module = Classification(nn.Linear(4, 3), loss=lambda scores, y: scores.sum() * torch.inf, num_classes=3)
    with pytest.raises(FloatingPointError, match="the model gives is finite, so it comes from the loss function"):
        fit(module, torch.rand(4, 4), torch.zeros(4, dtype=torch.long), callbacks=[CapsuleHealth()])


def test_low_precision_is_among_the_things_to_try() -> None:
    module = Classification(nn.Sequential(nn.Sigmoid(), Explodes()), loss=MarginLoss(), num_classes=3)
    module.model.append(nn.Linear(3, 3))  # type: ignore[union-attr,operator]
    with pytest.raises(FloatingPointError, match="precision='32-true' instead of 'bf16-mixed'"):
        fit(
            module,
            torch.rand(4, 3),
            torch.zeros(4, dtype=torch.long),
            callbacks=[CapsuleHealth()],
            precision="bf16-mixed",
        )


def test_settings_that_make_no_sense_and_modules_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0 and examples=32 must be 1 or more"):
        CapsuleHealth(every_n_steps=0)

    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.layer(batch[0]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match="CapsuleHealth looks into a Classification, not into a Other"):
        fit(Other(), torch.rand(4, 4), callbacks=[CapsuleHealth()])
