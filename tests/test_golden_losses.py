"""Golden vectors of the losses: every peer's is ours with its own arguments."""

import pytest
from golden import Golden

from torchcaps.losses import MarginLoss, margin_loss, reconstruction_loss, spread_loss
from torchcaps.squash import safe_norm


def test_the_mean_over_classes_with_half_the_weights_is_the_official_codes_margin_loss() -> None:
    g = Golden("others/sarasra_margin_loss")
    loss = margin_loss(
        g.leaf("lengths"), g["labels"], positive_weight=0.5, negative_weight=0.25, over_classes="mean", reduction="mean"
    )
    g.check("loss", loss)
    g.check("loss", MarginLoss.sabour_code()(g["lengths"], g["labels"]))
    g.check("loss", MarginLoss.sabour_code()(g["lengths"], g["labels"].argmax(1)))
    g.check_gradients_of(loss)


def test_the_mean_over_classes_with_a_quarter_is_sus_margin_loss() -> None:
    g = Golden("others/bojone_loss")
    weight = g.number("lambda_")
    loss = margin_loss(g.leaf("y_pred"), g["y_true"], negative_weight=weight, over_classes="mean", reduction="mean")
    g.check("loss", loss)
    g.check("loss", MarginLoss.su()(g["y_pred"], g["y_true"]))
    g.check_gradients_of(loss)


def test_the_power_one_is_labmls_margin_loss_of_lengths() -> None:
    g = Golden("others/labml_margin_unsquared")
    lengths = safe_norm(g.leaf("v"), dim=-1)
    loss = margin_loss(lengths, g["labels"], negative_weight=g.number("lambda_"), power=1)
    g.check("loss", loss)
    g.check("loss", MarginLoss.labml()(lengths, g["labels"]))
    g.check_gradients_of(loss)


def test_the_papers_margin_loss_and_the_papers_weight_of_the_reconstruction_are_xifengs_loss() -> None:
    g = Golden("others/xifeng_caps_loss")
    # 0.0005 of a sum over 784 pixels is 0.392 of a mean, here over 36
    weight = g.number("lam_recon") / 784
    assert weight == pytest.approx(0.0005, rel=1e-12)
    loss = margin_loss(g.leaf("y_pred"), g["y_true"]) + weight * reconstruction_loss(g.leaf("x_recon"), g["x"])
    g.check("loss", loss)
    g.check_gradients_of(loss)


def test_the_spread_loss_is_yl1993s_once_the_right_class_is_left_out_of_the_sum() -> None:
    g = Golden("others/yl1993_spread")
    margin = g.number("margin")
    assert margin == pytest.approx(0.2 + 0.7 * g.number("r"), rel=1e-12)
    loss = spread_loss(g.leaf("a"), g["target"], margin=margin)
    g.check("loss", loss)
    g.check_gradients_of(loss)
