"""Layers from capsules to capsules: one call of a rule, each with its own way of choosing the children of a parent.

    PrimaryCapsules          a feature map becomes a map of capsules
    FullyConnectedCapsules   every parent hears every child              weight [I, J, P, Q]
    SharedCapsules           the same, with any number of children       weight [1, J, P, Q]
    ConvCapsules             a parent hears the window below it          weight [C * kernel, J, P, Q]
    MaskedDecoder, ClassIndependentDecoder, ConvDecoder                  class capsules become an image

A routed layer owns its weight and what its rule learns. `layer(Capsules, mask=None)` gives the parents as Capsules;
`layer.route(...)` gives all that the rule gave, coupling and state included.
"""

from torchcaps.layers.conv import ConvCapsules
from torchcaps.layers.coordinates import coordinate_offset
from torchcaps.layers.decoders import ClassIndependentDecoder, ConvDecoder, MaskedDecoder
from torchcaps.layers.fully_connected import FullyConnectedCapsules
from torchcaps.layers.primary import PrimaryCapsules
from torchcaps.layers.shared import SharedCapsules

__all__ = [
    "ClassIndependentDecoder", "ConvCapsules", "ConvDecoder", "FullyConnectedCapsules", "MaskedDecoder",
    "PrimaryCapsules", "SharedCapsules", "coordinate_offset",
]  # fmt: skip
