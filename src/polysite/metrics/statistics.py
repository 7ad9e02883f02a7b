"""What paired differences, and several tests together, allow to say.

Differences are those of two methods on the same cases, positive where the first is better.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError, DataError

Tail = Literal["two-sided", "greater", "less"]
CHUNK = 1 << 20  # resampled cases that are held at a time


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Holm's step-down correction: the p that each would need to have been found alone.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(steps)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def signed_rank(differences: ArrayLike, alternative: Tail = "two-sided") -> float:
    """The p of Wilcoxon's signed-rank test; ``greater`` asks whether differences are above zero.

    Zeros are dropped, as Wilcoxon did; 1 if nothing else is left. SciPy's choice of method: exact up to 50 differences
    without ties, all sign changes tried up to 13 with ties, else the normal approximation with ties accounted for.

    >>> signed_rank([1, 2, 3, 4, 5, 0]), signed_rank([1, 2, 3, 4, 5], "greater"), signed_rank([0, 0])
    (0.0625, 0.03125, 1.0)
    """
    from scipy.stats import wilcoxon

    some = _numbers(differences)
    some = some[some != 0]
    return float(wilcoxon(some, alternative=alternative).pvalue) if some.size else 1.0


def rank_biserial(differences: ArrayLike) -> float:
    """Matched-pairs rank-biserial correlation: (W+ − W−) / (W+ + W−) of Wilcoxon's rank sums; 0 if all are zero.

    1 if every difference is positive, −1 if every one is negative (Kerby 2014, The simple difference formula).

    >>> rank_biserial([3, 2, -1, 0])
    0.6666666666666666
    """
    from scipy.stats import rankdata

    some = _numbers(differences)
    some = some[some != 0]
    ranks = rankdata(np.abs(some))
    return float((ranks * np.sign(some)).sum() / ranks.sum()) if some.size else 0.0


def cohen_dz(differences: ArrayLike) -> float:
    """Cohen's d of paired differences: their mean in (sample) standard deviations; NaN for fewer than two.

    Where all differences are the same there is nothing to measure by: infinite, or 0 if they are zero.

    >>> cohen_dz([1.0, 2.0, 3.0])
    2.0
    """
    found = _numbers(differences)
    if found.size < 2:
        return math.nan
    mean, std = float(found.mean()), float(found.std(ddof=1))
    if np.ptp(found) == 0:  # a mean may be off by a rounding, and the deviation then tiny instead of zero
        return math.copysign(math.inf, found[0]) if found[0] else 0.0
    return mean / std


def wins(differences: ArrayLike, margin: float = 0.0) -> tuple[int, int, int]:
    """How many differences are above the margin, within it, and below it.

    >>> wins([0.3, 0.0, -0.2, 0.1], margin=0.1)
    (1, 2, 1)
    """
    found = _numbers(differences)
    won, lost = int((found > margin).sum()), int((found < -margin).sum())
    return won, found.size - won - lost, lost


def interval(
    differences: ArrayLike,
    groups: Sequence[str] | NDArray[np.str_] | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean difference; with groups, cases are resampled within their own.

    A resample of n cases varies by (n − 1)/n of what a sample does, so deviations are scaled up, group by group (Rao
    and Wu 1988, Resampling inference with complex survey data): it matters where a hospital has few cases. One case
    alone does not vary, so groups of one make the interval too narrow.

    >>> low, high = interval([1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"])
    >>> round(low, 3), round(high, 3)
    (1.793, 3.207)
    """
    found = _numbers(differences)
    names = np.zeros(found.size, np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if not found.size or names.size != found.size:
        raise DataError(f"{found.size} differences in {names.size} places; give at least one, and a group for each")
    if not (0 < level < 1 and draws > 0):
        raise ConfigError(f"level = {level}, draws = {draws}: the level lies between 0 and 1, draws are at least 1")
    rng = np.random.default_rng(seed)
    off = np.zeros(draws)
    for group in range(names.max() + 1):
        mine = found[names == group]
        n = mine.size
        scale = math.sqrt(n / (n - 1)) / found.size if n > 1 else 0.0
        away = (mine - mine.mean()) * scale
        step = max(1, CHUNK // n)
        for start in range(0, draws, step):
            part = off[start : start + step]
            part += away[rng.integers(0, n, (part.size, n))].sum(1)
    low, high = found.mean() + np.quantile(off, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _numbers(differences: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(differences, np.float64).reshape(-1)
    odd = int((~np.isfinite(found)).sum())
    if odd:
        raise DataError(f"{odd} of {found.size} differences are not finite numbers; leave those cases out")
    return found
