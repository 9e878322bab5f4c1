"""What k trained networks and n test items allow to say of the difference between two arms.

Both arms are trained from the same k seeds and answer the same n items: c[s, i] is what the network of seed s gets for
item i, 1 or 0 (or a number). The differences D = c_A - c_B are a table of seeds x items, and their mean m varies with
both: other seeds and other items would have given another one.

    MS_seed = n sum_s (D[s, .] - m)^2 / (k - 1)                     D[s, .], D[., i]: means over items, over seeds
    MS_item = k sum_i (D[., i] - m)^2 / (n - 1)
    MS_rest = sum_si (D[s, i] - D[s, .] - D[., i] + m)^2 / ((k - 1) (n - 1))
    both    = max(MS_seed, MS_rest) + max(MS_item - MS_rest, 0)
    Var(m)  = both / (k n) + 1 / (n + 2)^2
    df      = both^2 / (MS_seed^2 / (k - 1))
    interval: m -+ t(df) sqrt(Var(m))

This is the analysis of studies in which several readers judge the same cases, one test for both at once: Dorfman,
Berbaum, Metz 1992, "Receiver operating characteristic rating analysis", with the degrees of freedom of Hillis 2007, "A
comparison of denominator degrees of freedom methods for multiple observer ROC analysis". Seeds are the readers and test
items the cases. Networks that differ much between seeds leave k - 1 degrees of freedom, with three seeds a factor of
4.3 instead of 2: few seeds make wide intervals, as they should. Two things are added here, both to the safe side:

    max(MS_seed, MS_rest)   the expectation of MS_seed is that of MS_rest and something more, so a smaller value is
                            luck: it would make intervals too short where seeds are few
    1 / (n + 2)^2           one item more that the arms disagree on, the half that Agresti and Min 2005, "Simple
                            improved confidence intervals for comparing matched proportions", add to each cell.
                            Without it, arms that agree on the n items would be certain to agree on all others

In simulated comparisons without a difference, of 100 to 1000 items with 3 to 10 seeds, 0 to 6.5 % of the intervals
leave out 0, whatever the share of the seeds in the variance; with two seeds up to 10 %.

With one seed only the items vary: Var(m) is their variance over n, and the p-value of right or wrong answers is exact
(McNemar 1947). Training has then no part in the interval, and in the same simulations up to 60 % leave out 0: one seed
decides nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Difference", "paired"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of a - b with its interval of 95 %, over `seeds` and test `items`.

    p   of a difference as large as this or larger where there is none.
    df  degrees of freedom; None with one seed.
    """

    a: str
    b: str
    of: str
    mean: float
    low: float
    high: float
    p: float
    df: float | None
    seeds: int
    items: int

    @property
    def direction(self) -> Literal["higher", "lower", "none"]:
        """Whether a is measurably higher than b, or lower."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "none"


def paired(
    a: NDArray[np.float64], b: NDArray[np.float64], *, names: tuple[str, str] = ("a", "b"), of: str = "accuracy"
) -> Difference:
    """The difference of two arms' tables `[seeds, items]`, row s of both trained from the same seed.

    Raises ValueError where the tables do not belong together, or hold fewer than two items.
    """
    if a.shape != b.shape or a.ndim != 2 or a.shape[0] < 1 or a.shape[1] < 2:
        raise ValueError(
            f"{names[0]} {list(a.shape)} and {names[1]} {list(b.shape)} must be tables of the same seeds and items, "
            "one seed and two items at least"
        )
    D = a - b
    k, n = D.shape
    m = float(D.mean())
    one_more = (np.abs(D).max() if D.any() else 1.0) ** 2 / (n + 2) ** 2
    df = None
    if k == 1:
        variance = float(D.var(ddof=1)) / n + one_more
    else:
        of_seed, of_item = D.mean(1, keepdims=True), D.mean(0, keepdims=True)
        seed = n * float(((of_seed - m) ** 2).sum()) / (k - 1)
        item = k * float(((of_item - m) ** 2).sum()) / (n - 1)
        rest = float(((D - of_seed - of_item + m) ** 2).sum()) / ((k - 1) * (n - 1))
        both = max(seed, rest) + max(item - rest, 0.0)
        variance = both / (k * n) + one_more
        df = both**2 / (seed**2 / (k - 1)) if seed > 0 else math.inf
    distribution = stats.norm() if df is None else stats.t(df)
    reach = float(distribution.isf((1 - CONFIDENCE) / 2)) * variance**0.5
    p = float(2 * distribution.sf(abs(m) / variance**0.5))
    if k == 1 and np.isin(D, (-1, 0, 1)).all() and D.any():
        p = float(stats.binomtest(int((D > 0).sum()), int(np.abs(D).sum())).pvalue)
    return Difference(*names, of, m, m - reach, m + reach, p, df, k, n)
