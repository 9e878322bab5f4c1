"""From scores to probabilities: the one place where the training room does it.

A model with a method `probabilities` knows what its scores are (lengths, activations, logits) and is asked. Any other
`nn.Module` is taken to give logits, unless `link` says otherwise.

    single-label   a distribution over the classes               "softmax" of logits
    multi-label    each class's own chance to be there           "sigmoid" of logits
    either         scores that are probabilities already         "identity"
"""

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["GivesProbabilities", "Link", "check_link", "probabilities"]

Link = Literal["softmax", "sigmoid", "identity"]


@runtime_checkable
class GivesProbabilities(Protocol):
    """A model that knows what its scores say."""

    def probabilities(self, scores: Tensor, *, multi_label: bool = False) -> Tensor: ...


def probabilities(model: nn.Module, scores: Tensor, *, multi_label: bool = False, link: Link | None = None) -> Tensor:
    """Scores `[N, K]` of `model` as probabilities `[N, K]`, in float32 or more.

    link  what to do with the scores of a model that has no `probabilities` of its own; None is softmax for one label,
          sigmoid for several.

    >>> import torch
    >>> probabilities(nn.Identity(), torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])
    """
    scores = scores.double() if scores.element_size() == 8 else scores.float()
    if isinstance(model, GivesProbabilities):
        return model.probabilities(scores, multi_label=multi_label)
    match link:
        case "identity":
            return scores
        case "sigmoid":
            return scores.sigmoid()
        case "softmax":
            return scores.softmax(-1)
        case _:
            return scores.sigmoid() if multi_label else scores.softmax(-1)


def check_link(model: nn.Module, link: Link | None) -> None:
    """A ValueError for a link that is none, or that the model does not leave open."""
    if link not in (None, "softmax", "sigmoid", "identity"):
        raise ValueError(f"link={link!r}: take 'softmax', 'sigmoid' or 'identity', or None to leave it to the labels")
    if link is not None and isinstance(model, GivesProbabilities):
        raise ValueError(
            f"{type(model).__name__} says itself what its scores are, by its method probabilities: leave out "
            f"link={link!r}, which is for models without it"
        )
