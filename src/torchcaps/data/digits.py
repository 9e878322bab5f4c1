"""The 1797 handwritten digits that come with scikit-learn: nothing to download, seconds to train on."""

from ._sources import Raw, from_arrays
from .module import LabelledData, Loaded

__all__ = ["Digits"]


class Digits(LabelledData):
    """Digits of 8x8 pixels, 10 classes; raw values 0 to 16. They have no test part: see `test_fraction`.

    Source: E. Alpaydin, C. Kaynak 1998, "Optical recognition of handwritten digits", UCI; of its test part.
    """

    def _load(self) -> Loaded:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return from_arrays(Raw(digits.images, digits.target, "Digits", "labels of Digits"), None, None)
