"""Classification: losses, batches, metrics and predictions of any model that gives scores."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchcaps.layers import SharedCapsules
from torchcaps.losses import MarginLoss, SpreadLoss, margin_loss, reconstruction_loss
from torchcaps.models import CapsNet
from torchcaps.routing import Dynamic
from torchcaps.training import Classification, Optimization
from torchcaps.types import Capsules


def small_capsnet(**settings: Any) -> CapsNet:
    settings = {"num_classes": 3, "image_size": 8, "stem_channels": 4, "primary_types": 2, **settings}
    return CapsNet(kernel_size=3, primary_kernel_size=3, primary_pose=4, class_pose=4, hidden=(8,), **settings)


def loader(*tensors: Tensor, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size)


@pytest.fixture
def fit(tmp_path: Any) -> Iterator[Any]:
    """Train a module for some epochs, without a word."""

    def run(module: pl.LightningModule, train: Any, val: Any = None, **settings: Any) -> pl.Trainer:
        settings = {"max_epochs": 1, "log_every_n_steps": 1, **settings}
        trainer = pl.Trainer(
            default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            logger=False, enable_checkpointing=False, num_sanity_val_steps=0, **settings,
        )  # fmt: skip
        trainer.fit(module, train, val)
        return trainer

    return run


pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def test_the_loss_is_that_of_the_scores_and_of_the_reconstruction_with_its_weight() -> None:
    model = small_capsnet()
    x, y = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    module = Classification(model, loss=MarginLoss(), num_classes=3, reconstruction_weight=0.01)
    loss, scores, reconstruction = module.losses((x, y))
    out = model(x, y)
    assert torch.equal(scores, out.scores)
    assert torch.equal(reconstruction, out.reconstruction)
    assert torch.allclose(loss, margin_loss(out.scores, y) + 0.01 * reconstruction_loss(out.reconstruction, x))
    plain = Classification(model, loss=MarginLoss(), num_classes=3).losses((x, y))
    assert torch.allclose(plain[0], margin_loss(out.scores, y))
    assert plain[2] is None


def test_a_reconstruction_that_no_decoder_makes_is_an_error_that_says_both_ways_out() -> None:
    for model in (small_capsnet(decoder=False), _Plain()):
        module = Classification(model, loss=MarginLoss(), num_classes=3, reconstruction_weight=0.01)
        with pytest.raises(
            ValueError, match=r"reconstructs nothing: build it with a decoder.*or leave the weight at 0"
        ):
            module.losses((torch.rand(2, 1, 8, 8), torch.tensor([0, 1])))


def test_a_mask_reaches_the_model_and_what_it_hides_changes_nothing(fit: Any) -> None:
    x, y = torch.randn(8, 6, 4), torch.arange(8) % 3
    mask = torch.arange(6) < torch.randint(1, 7, (8,))[:, None]
    hidden = torch.where(mask[:, :, None], x, torch.full_like(x, torch.nan))
    ends = []
    for given in (x, hidden):
        torch.manual_seed(1)
        module = Classification(_Sequence(), loss=MarginLoss(), num_classes=3)
        fit(module, loader(given, y, mask), loader(given, y, mask))
        ends.append(module.model.state_dict())
        prediction = module.predict_step((given, y, mask), 0)
        assert torch.equal(prediction.scores, module.model(given, mask=mask))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_training_learns_and_logs_every_metric(fit: Any) -> None:
    x, y = torch.rand(48, 1, 8, 8) * 0.1, torch.arange(48) % 3
    x[torch.arange(48), 0, y * 2 + 1] += 0.9  # a bar whose height is the class
    module = Classification(
        small_capsnet(), loss=MarginLoss(), num_classes=3, reconstruction_weight=0.0005,
        optimization=Optimization(lr=0.01, schedule="cosine", warmup_steps=3, weight_decay=1e-3),
    )  # fmt: skip
    metrics = fit(module, loader(x, y, batch_size=12), loader(x, y, batch_size=20), max_epochs=12).callback_metrics
    assert {f"val/{m}" for m in ("accuracy", "balanced_accuracy", "f1", "auroc", "map", "ece", "loss")} <= set(metrics)
    assert metrics["val/accuracy"] > 0.9
    assert metrics["train/accuracy"] > 0.9
    assert metrics["val/loss"] < 0.3


def test_epoch_means_weigh_examples_alike_whatever_the_batches(fit: Any) -> None:
    x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
    found = []
    for batch_size in (10, 7):  # the second batch has 3
        torch.manual_seed(2)
        module = Classification(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), num_classes=3)
        trainer = fit(module, loader(x, y, batch_size=batch_size), limit_train_batches=0)
        trainer.validate(module, loader(x, y, batch_size=batch_size), verbose=False)
        found.append(trainer.callback_metrics["val/loss"].item())
    assert found[0] == pytest.approx(found[1])


def test_several_labels_are_trained_tested_and_predicted(fit: Any) -> None:
    x = torch.randn(40, 4)
    y = (x[:, :3] > 0).float()
    module = Classification(
        nn.Linear(4, 3), loss=nn.BCEWithLogitsLoss(), class_names=["a", "b", "c"], multi_label=True,
        optimization=Optimization(lr=0.1),
    )  # fmt: skip
    trainer = fit(module, loader(x, y), loader(x, y), max_epochs=6)
    assert trainer.callback_metrics["val/exact_match"] > 0.8
    assert trainer.callback_metrics["train/accuracy"] > 0.9
    trainer.test(module, loader(x, y), verbose=False)
    assert trainer.callback_metrics["test/map"] > 0.95
    prediction = module.predict_step((x, y), 0)
    assert prediction.labels.shape == (40, 3)
    assert prediction.labels.dtype == torch.bool
    assert torch.equal(prediction.labels, module.model(x).sigmoid() > 0.5)


def test_whole_number_labels_of_several_classes_do_for_any_loss() -> None:
    y = torch.tensor([[1, 0, 1], [0, 0, 0]])
    for loss in (nn.BCEWithLogitsLoss(), MarginLoss()):
        module = Classification(nn.Linear(4, 3), loss=loss, num_classes=3, multi_label=True)
        assert module.losses((torch.randn(2, 4), y))[0].isfinite()


def test_class_indices_of_any_whole_number_will_do() -> None:
    module = Classification(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), num_classes=3)
    x, losses = torch.randn(2, 4), []
    for dtype in (torch.uint8, torch.int32, torch.long):
        losses.append(module.losses((x, torch.tensor([2, 1], dtype=dtype)))[0])
    assert losses[0] == losses[1] == losses[2]


def test_predictions_are_scores_probabilities_and_labels_of_images_with_or_without_labels() -> None:
    module = Classification(small_capsnet(), loss=MarginLoss(), num_classes=3)
    x = torch.rand(4, 1, 8, 8)
    of_images, of_batch = module.predict_step(x, 0), module.predict_step((x, torch.zeros(4, dtype=torch.long)), 0)
    assert torch.equal(of_images.probabilities, module.model.probabilities(of_images.scores))
    assert torch.equal(of_images.labels, of_images.scores.argmax(1))
    assert all(torch.equal(a, b) for a, b in zip(of_images, of_batch, strict=True))


def test_the_margin_of_the_spread_loss_follows_the_steps_of_the_optimiser(fit: Any) -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    loss = SpreadLoss.linear(steps=100)
    module = Classification(nn.Linear(4, 3), loss=loss, num_classes=3)
    margins = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            margins.append(float(loss.current_margin()))

    fit(module, loader(x, y, batch_size=2), max_epochs=2, accumulate_grad_batches=2, callbacks=[Look()])
    assert margins == pytest.approx([0.2, 0.2, 0.207, 0.207, 0.214, 0.214, 0.221, 0.221])


def test_the_margin_survives_averaged_weights(fit: Any, tmp_path: Any) -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    module = Classification(nn.Linear(4, 3), loss=SpreadLoss.linear(steps=100), num_classes=3)
    averaging = pl.callbacks.EMAWeightAveraging(decay=0.9)
    trainer = fit(module, loader(x, y, batch_size=2), max_epochs=2, callbacks=[averaging])
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved["loss.steps_taken"] == 8


def test_averaged_weights_are_what_is_validated_and_left_at_the_end(fit: Any) -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    module = Classification(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), num_classes=3)
    after_first: list[Tensor] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            after_first.append(module.model.weight.detach().clone())

    averaging = pl.callbacks.EMAWeightAveraging(decay=1.0)  # starts at the first step's weights and never moves
    trainer = fit(module, loader(x, y), loader(x, y), callbacks=[averaging, Look()])
    assert not torch.equal(after_first[0], after_first[1])
    assert torch.equal(module.model.weight, after_first[0])
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(module.losses((x, y))[0].item())


def test_a_compiled_model_trains_the_same_and_keeps_the_names_of_its_weights(fit: Any) -> None:
    x, y = torch.rand(8, 6), torch.arange(8) % 3
    ends = []
    for compile in (False, "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        module = Classification(model, loss=MarginLoss(), num_classes=3, compile=compile)
        fit(module, loader(x, y), loader(x, y))
        assert (model._compiled_call_impl is not None) == bool(compile)
        ends.append(module.state_dict())
    assert list(ends[0]) == list(ends[1])
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-5) for name in ends[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_with_clipped_gradients(fit: Any, precision: str) -> None:
    x, y = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    module = Classification(small_capsnet(), loss=MarginLoss(), num_classes=3, reconstruction_weight=0.0005)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    with pytest.warns(UserWarning, match="16.*CPU") if precision == "16-mixed" else contextlib.nullcontext():
        metrics = fit(module, loader(x, y), loader(x, y), precision=precision, gradient_clip_val=1.0).callback_metrics
    assert metrics["val/loss"].isfinite()
    assert all(
        p.dtype == torch.float32 and not torch.equal(p, before[name]) for name, p in module.model.named_parameters()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the number of classes is not clear: nothing says it; give num_classes="),
        ({"num_classes": 3, "class_names": ["a", "b"]}, "num_classes says 3, class_names says 2"),
        ({"num_classes": 3, "config": {"num_classes": 4}}, "num_classes says 3, config says 4"),
        ({"num_classes": 1}, "num_classes=1: a choice needs 2 classes or more.*multi_label=True"),
        ({"num_classes": 2.5}, "num_classes="),
        ({"num_classes": 3, "reconstruction_weight": -1.0}, "reconstruction_weight=-1.0: it must be 0 or more"),
        (
            {"num_classes": 3, "config": {"routing": Dynamic()}},
            "config goes into the checkpoint and must be plain data",
        ),
        ({"num_classes": 3, "preprocessing": {"mean": np.zeros(3)}}, "preprocessing goes into the checkpoint"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_door(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classification(nn.Linear(4, 3), loss=MarginLoss(), **settings)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module"):
        Classification("capsnet", loss=MarginLoss(), num_classes=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "multi_label", "message"),
    [
        ((torch.zeros(2, 4),), False, r"a batch must be \(x, y\) or \(x, y, mask\), not 1 things"),
        (torch.zeros(2, 4), False, r"not a tensor \[2, 4\]"),
        ((torch.zeros(2, 4), [0, 1]), False, "labels must be a tensor, not 2 things"),
        (
            (torch.zeros(2, 4), torch.zeros(2, 3)),
            False,
            r"labels \[2, 3\].*are \[2\], class indices.*or give multi_label=True",
        ),
        ((torch.zeros(2, 4), torch.zeros(2)), False, r"labels \[2\] of torch.float32 do not fit"),
        ((torch.zeros(2, 4), torch.tensor([0, 1])), True, r"they are \[2, 3\], presence.*or give multi_label=False"),
        ((torch.zeros(2, 4), torch.tensor([0, 3])), False, "labels hold 0 to 3, but with 3 classes may be 0 to 2"),
        ((torch.zeros(2, 4), torch.tensor([-1, 1])), False, "labels hold -1 to 1"),
        (
            (torch.zeros(2, 4), torch.full((2, 3), 255)),
            True,
            "labels hold 255 to 255, but with 3 classes may be 0 to 1",
        ),
    ],
)
def test_a_batch_that_does_not_fit_names_both_sides(batch: Any, multi_label: bool, message: str) -> None:
    module = Classification(nn.Linear(4, 3), loss=MarginLoss(), num_classes=3, multi_label=multi_label)
    with pytest.raises(ValueError, match=message):
        module.losses(batch)


def test_scores_of_another_number_of_classes_are_an_error() -> None:
    module = Classification(nn.Linear(4, 5), loss=MarginLoss(), num_classes=3)
    with pytest.raises(ValueError, match=r"Linear gives scores \[2, 5\] for 2 examples of 3 classes"):
        module.losses((torch.zeros(2, 4), torch.tensor([0, 1])))


class _Plain(nn.Module):
    """A model that takes labels, and does nothing with them."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return x.flatten(1)[:, :3]


class _Sequence(nn.Module):
    """Shared capsules over a sequence `[N, L, 4]` with a mask `[N, L]`."""

    def __init__(self) -> None:
        super().__init__()
        self.capsules = SharedCapsules(3, 4, 8, routing=Dynamic())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        lengths: Tensor = self.capsules(Capsules(x.unsqueeze(2)), mask).lengths
        return lengths
