"""Correlation of two quantities over a few units (federations, sites), with a bootstrap interval.

A resample draws units with both of their values. The noise of a measured value is part of the scatter between units, so
it is not drawn a second time.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kind = Literal["pearson", "spearman"]
FEWEST = 3  # units with a correlation


def correlation(x: ArrayLike, y: ArrayLike, kind: Kind = "pearson") -> float:
    """Return Pearson's or Spearman's correlation; NaN for fewer than three units or a constant quantity.

    >>> correlation([1, 2, 3, 4], [1, 4, 9, 16], "spearman"), round(correlation([1, 2, 3], [1, 3, 2]), 3)
    (1.0, 0.5)
    """
    rows = np.asarray(x, np.float64)[None], np.asarray(y, np.float64)[None]
    return float(_rows(*rows, kind)[0])


def interval(
    x: ArrayLike, y: ArrayLike, kind: Kind = "pearson", level: float = 0.95, draws: int = 5000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a correlation; NaN if it has none.

    Args:
        x: First quantity of every unit.
        y: Second quantity of every unit.
        kind: Pearson's or Spearman's correlation.
        level: Coverage.
        draws: Resamples; those in which a quantity is constant are left out.
        seed: Seed of the resamples.

    >>> low, high = interval([1, 2, 3, 4, 5], [1, 2, 3, 5, 5])
    >>> 0.5 < low < high <= 1
    True
    """
    first, second = np.asarray(x, np.float64), np.asarray(y, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(first), (draws, len(first)))
    found = _rows(first[picks], second[picks], kind)
    known = found[np.isfinite(found)]
    if known.size < draws // 2:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _rows(x: NDArray[np.float64], y: NDArray[np.float64], kind: Kind) -> NDArray[np.float64]:
    """Return the correlation of every pair of rows; NaN where one is constant."""
    if x.shape[1] < FEWEST:
        return np.full(len(x), np.nan)
    if kind == "spearman":
        from scipy.stats import rankdata

        x, y = rankdata(x, axis=1), rankdata(y, axis=1)
    constant = (np.ptp(x, axis=1) == 0) | (np.ptp(y, axis=1) == 0)
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    size = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    found: NDArray[np.float64] = np.where(constant, np.nan, (x * y).sum(1) / np.where(constant, 1.0, size))
    return np.clip(found, -1.0, 1.0)
