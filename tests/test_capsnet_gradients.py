"""What trains what in CapsNet: the reconstruction shapes the capsules of the labels, and all that is below them."""

import pytest
import torch

from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import CapsNet
from torchcaps.routing import EM, Attention, Dynamic, Rule

LABELS = torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize(
    "routing", [Dynamic.sabour(), EM.hinton(), Attention.tsai()], ids=["dynamic", "em", "attention"]
)
def test_the_reconstruction_trains_the_capsules_of_the_labels_and_the_layers_below(routing: Rule) -> None:
    model = CapsNet(
        2, 3, (8, 11), routing=routing, stem_channels=6, primary_types=2, primary_pose=(2, 3), class_pose=(2, 4),
        hidden=(8,), kernel_size=3, primary_kernel_size=3,
    )  # fmt: skip
    images = torch.rand(4, 2, 8, 11)
    scores, reconstruction, capsules = model(images, LABELS)
    loss = reconstruction_loss(reconstruction, images)
    poses, stem, primary = torch.autograd.grad(
        loss, [capsules.poses, model.stem[0].weight, model.primary.conv.weight], retain_graph=True
    )
    moved = poses.flatten(2).abs().amax(2) > 0
    assert torch.equal(moved, torch.nn.functional.one_hot(LABELS, 3).bool())
    assert stem.abs().max() > 0
    assert primary.abs().max() > 0
    assert torch.autograd.grad(margin_loss(scores, LABELS), model.class_caps.weight)[0].abs().max() > 0
