"""Statistics of paired differences, and correction for multiple tests.

Differences are those of two methods on the same cases, positive if the first is better.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError, DataError

Tail = Literal["two-sided", "greater", "less"]
CHUNK = 1 << 20  # resampled cases in memory at a time


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return p-values adjusted by Holm's step-down correction.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(steps)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def signed_rank(differences: ArrayLike, alternative: Tail = "two-sided") -> float:
    """Return the p-value of Wilcoxon's signed-rank test; ``greater`` tests whether differences are above zero.

    Zeros are dropped, as in Wilcoxon's paper; p is 1 if no other difference is left. SciPy chooses the method: exact up
    to 50 differences without ties, all sign changes up to 13 with ties, else the normal approximation with a correction
    for ties.

    >>> signed_rank([1, 2, 3, 4, 5, 0]), signed_rank([1, 2, 3, 4, 5], "greater"), signed_rank([0, 0])
    (0.0625, 0.03125, 1.0)
    """
    from scipy.stats import wilcoxon

    nonzero = _nonzero(differences)
    return float(wilcoxon(nonzero, alternative=alternative).pvalue) if nonzero.size else 1.0


def rank_biserial(differences: ArrayLike) -> float:
    """Return the matched-pairs rank-biserial correlation, (W+ − W−) / (W+ + W−) of Wilcoxon's rank sums.

    It is 1 if every difference is positive, −1 if every one is negative, and 0 if all are zero (Kerby 2014, The simple
    difference formula).

    >>> rank_biserial([3, 2, -1, 0])
    0.6666666666666666
    """
    from scipy.stats import rankdata

    nonzero = _nonzero(differences)
    ranks = rankdata(np.abs(nonzero))
    return float((ranks * np.sign(nonzero)).sum() / ranks.sum()) if nonzero.size else 0.0


def wins(differences: ArrayLike, margin: float = 0.0) -> tuple[int, int, int]:
    """Return the numbers of differences above the margin, within it, and below it.

    >>> wins([0.3, 0.0, -0.2, 0.1], margin=0.1)
    (1, 2, 1)
    """
    values = finite(differences)
    won, lost = int((values > margin).sum()), int((values < -margin).sum())
    return won, values.size - won - lost, lost


def interval(
    differences: ArrayLike,
    groups: Sequence[str] | NDArray[np.str_] | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the mean difference; cases are resampled within their groups.

    The variance of a resample of n cases is (n − 1)/n of a sample's, so deviations are scaled up, group by group (Rao
    and Wu 1988, Resampling inference with complex survey data). This matters if a hospital has few cases. A group of
    one case does not vary and makes the interval too narrow.

    >>> low, high = interval([1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"])
    >>> round(low, 3), round(high, 3)
    (1.793, 3.207)
    """
    values = finite(differences)
    names = np.zeros(values.size, np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if not values.size or names.size != values.size:
        raise DataError(f"{values.size} differences in {names.size} places; give at least one, and a group for each")
    if not (0 < level < 1 and draws > 0):
        raise ConfigError(f"level = {level}, draws = {draws}: the level lies between 0 and 1, draws are at least 1")
    rng = np.random.default_rng(seed)
    off = np.zeros(draws)
    for group in range(names.max() + 1):
        members = values[names == group]
        n = members.size
        scale = math.sqrt(n / (n - 1)) / values.size if n > 1 else 0.0
        away = (members - members.mean()) * scale
        step = max(1, CHUNK // n)
        for start in range(0, draws, step):
            chunk = off[start : start + step]
            chunk += away[rng.integers(0, n, (chunk.size, n))].sum(1)
    low, high = values.mean() + np.quantile(off, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def finite(given: ArrayLike, what: str = "differences") -> NDArray[np.float64]:
    """Return numbers as a flat array; refuse any that are not finite."""
    values = np.asarray(given, np.float64).reshape(-1)
    odd = int((~np.isfinite(values)).sum())
    if odd:
        raise DataError(f"{odd} of {values.size} {what} are not finite numbers; leave those cases out")
    return values


def _nonzero(differences: ArrayLike) -> NDArray[np.float64]:
    values = finite(differences)
    nonzero: NDArray[np.float64] = values[values != 0]
    return nonzero
