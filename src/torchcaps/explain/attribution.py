"""Which pixels matter: gradients of scores, and the function that Captum's methods take.

saliency_hw = max_c | d score_k / d x_chw |        Simonyan, Vedaldi, Zisserman 2014

from captum.attr import IntegratedGradients
IntegratedGradients(attribution_forward(model)).attribute(images, target=labels)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.explain.watching import check_images, check_labels, evaluating

__all__ = ["attribution_forward", "saliency"]


def attribution_forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function images `[N, C, *size]` -> scores `[N, K]`, in evaluation mode and with gradients to the images.

    Routing is part of it: gradients run through all rounds, as far as the rule lets them. This is what methods of
    attribution take, Captum's as `forward_func`, with the class as `target`.
    """

    def forward(images: Tensor) -> Tensor:
        with evaluating(model):
            scores: Tensor = model(images)
        return scores

    return forward


def saliency(model: nn.Module, images: Tensor, target: Tensor | None = None) -> Tensor:
    """`[N, *size]`: how much a score changes with each pixel, the largest over channels.

    target  class indices `[N]`; None is the class with the highest score.

    Raises ValueError for what are no images, or no class for each.
    """
    check_images(images)
    with torch.inference_mode(False), torch.enable_grad():
        x = images.detach().clone().requires_grad_(True)
        scores = attribution_forward(model)(x)
        if target is not None:
            check_labels(target, images, scores.shape[1])
        chosen = scores.argmax(1) if target is None else target
        (gradient,) = torch.autograd.grad(scores.gather(1, chosen[:, None]).sum(), x)
    return gradient.abs().amax(1)
