"""Do capsules help on your data, and does routing? One call, one answer with its interval.

from torchcaps.data import Digits
from torchcaps.run.compare import compare

comparison = compare(Digits(), "runs/digits")
comparison.verdict, "runs/digits/report.html"
"""

from torchcaps.run.compare.arms import Arm, standard_arms
from torchcaps.run.compare.command import main, open_data
from torchcaps.run.compare.comparison import Comparison, compare
from torchcaps.run.compare.statistics import Difference, paired

__all__ = ["Arm", "Comparison", "Difference", "compare", "main", "open_data", "paired", "standard_arms"]
