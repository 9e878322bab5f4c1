"""A trained model as a folder for the Hugging Face hub: weights as safetensors, everything else as JSON.

Pretrained.of(load_checkpoint("runs/mine/checkpoints/best.ckpt", build)).save_pretrained("my-model")
model = Pretrained.from_pretrained("my-model")          # a folder, or "owner/name" on the hub
model.probabilities(model(images))
"""

from typing import Any

from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from torchcaps.run.build import build
from torchcaps.training import LoadedModel, probabilities
from torchcaps.training.scores import Link

__all__ = ["Pretrained"]


class Pretrained(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="torchcaps",
    tags=["capsule-network"],
):
    """A model with all it takes to use it.

    architecture   a plain mapping that `torchcaps.run.build.build` makes the model of.
    class_names    K names in the order of the scores, or None.
    preprocessing  what `torchcaps.data.preprocess` makes a tensor by, or None.
    multi_label, link, threshold  how scores become probabilities and labels, as in `Classification`.

    `from_pretrained`, `save_pretrained` and `push_to_hub` are the hub's own.
    """

    def __init__(
        self,
        architecture: dict[str, Any],
        class_names: list[str] | None = None,
        preprocessing: dict[str, Any] | None = None,
        multi_label: bool = False,
        link: Link | None = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__()
        self.model = build(architecture)
        self.class_names, self.preprocessing = class_names, preprocessing
        self.multi_label, self.link, self.threshold = multi_label, link, threshold

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Pretrained":
        """The same model as a checkpoint's."""
        made = cls(
            loaded.config, loaded.class_names, loaded.preprocessing, loaded.multi_label, loaded.link, loaded.threshold
        )
        made.model.load_state_dict(loaded.model.state_dict())
        return made.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[N, K]` of inputs `[N, C, *size]`."""
        scores: Tensor = self.model(x)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores `[N, K]` as probabilities."""
        return probabilities(self.model, scores, multi_label=self.multi_label, link=self.link)
