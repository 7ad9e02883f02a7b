"""Distances between two hospitals, each known by sorted lists of numbers.

A hospital is, quantity by quantity, a list of equally heavy values in ascending order. On the merged list z of two
hospitals, with weights w = 1/n at the values of the one and -1/m at those of the other, and c the running sum of w:

    Earth Mover's   W1 = sum |c| dz          (SciPy: wasserstein_distance)
    energy          E^2 = 2 sum c^2 dz       (SciPy: energy_distance)
    shift           d = sum w z              (difference of the means)
    MMD             M^2 = w' K w,  K = exp(-|z - z'| / s)   (scikit-learn: laplacian_kernel)
    Frechet         F^2 = d^2 + (difference of the standard deviations)^2

On a sorted list the kernel needs no matrix: a_r = a_{r-1} exp(-dz_r / s) + w_r gives w' K w = sum_r w_r (2 a_r - w_r).

All are zero between equal lists, symmetric, and blind to the order and to the duplication of the values. Other weights
on the same z are a permutation or a bootstrap resample of the same pair.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def slices(values: Values, levels: int, weights: Values | None = None) -> Values:
    """At most so many quantiles of a list: its values in order or, of a longer one, the means of equal slices of it.

    ``weights``: how many cases a value stands for, where it is the mean of several; equal slices then of the cases.

    The Earth Mover's distance of two lists changes by no more than (range + range) / (2 levels), where a range counts
    only if its list was cut; what is not cut is exact.

    >>> slices(np.array([3.0, 1.0, 2.0]), 8).tolist(), slices(np.array([4.0, 1.0, 2.0, 3.0]), 2).tolist()
    ([1.0, 2.0, 3.0], [1.5, 3.5])
    """
    values = np.asarray(values, np.float64)
    if weights is None:
        ordered, places = np.sort(values), np.arange(len(values) + 1.0)
        if len(ordered) <= levels:
            return ordered
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
    else:
        order = np.argsort(values)
        ordered, heavy = values[order], weights[order]
        places, sums = (np.concatenate([[0.0], np.cumsum(x)]) for x in (heavy, heavy * ordered))
    means = np.diff(np.interp(np.linspace(0, places[-1], levels + 1), places, sums)) * (levels / places[-1])
    return np.clip(np.maximum.accumulate(means), ordered[0], ordered[-1])  # rounding moves no constant


def earth_movers(laws: Sequence[Values]) -> Values:
    """All pairs of hospitals, by quantity: laws of shape (quantity, values), ascending, to (quantity, site, site)."""
    sites = len(laws)
    found = np.zeros((len(laws[0]), sites, sites))
    for count in sorted({law.shape[1] for law in laws}):
        same = [i for i, law in enumerate(laws) if law.shape[1] == count]
        stack = np.stack([laws[i] for i in same])
        for k, i in enumerate(same):
            found[:, i, same[k + 1 :]] = np.abs(stack[k + 1 :] - stack[k]).mean(-1).T
    for i in range(sites):
        for j in range(i + 1, sites):
            n, m = laws[i].shape[1], laws[j].shape[1]
            if n != m:
                left, right, width = _common(n, m)
                found[:, i, j] = np.abs(laws[i][:, left] - laws[j][:, right]) @ width
    return found + found.transpose(0, 2, 1)


@lru_cache(maxsize=4096)
def _common(n: int, m: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Values]:
    """Two staircases of n and m steps on common steps: the index into either, and the widths; in whole numbers."""
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    starts = np.concatenate([[0], ends[:-1]])
    return starts // m, starts // n, (ends - starts) / (n * m)


def merged(one: Values, other: Values) -> tuple[Values, Values, NDArray[np.intp]]:
    """Of every quantity (row): the merged list, its weights, and where each value stood in both lists put in a row."""
    both, n, m = np.concatenate([one, other], axis=1), one.shape[1], other.shape[1]
    order = np.argsort(both, axis=1, kind="stable")
    return np.take_along_axis(both, order, 1), np.where(order < n, 1 / n, -1 / m), order


# Of z (quantity, value), weights (draw, value), or (quantity, draw, value) where they differ by quantity, and the
# width s of every quantity, to (quantity, draw).
Statistic = Callable[[Values, Values, Values], Values]


def earth_movers_of(z: Values, weights: Values, width: Values) -> Values:
    return _along(np.abs(np.cumsum(weights, -1)[..., :-1]), np.diff(z))


def energy(z: Values, weights: Values, width: Values) -> Values:
    return 2 * _along(np.square(np.cumsum(weights, -1)[..., :-1]), np.diff(z))


def shift(z: Values, weights: Values, width: Values) -> Values:
    return np.square(_along(np.cumsum(weights, -1)[..., :-1], np.diff(z)))


def discrepancy(z: Values, weights: Values, width: Values) -> Values:
    fade = np.exp(-np.diff(z, prepend=z[:, :1]) / np.where(width > 0, width, 1.0)[:, None])
    sums = np.zeros((len(z), weights.shape[-2]))
    square = np.zeros_like(sums)
    for r in range(z.shape[1]):
        here = weights[..., r]
        sums = sums * fade[:, r, None] + here
        square += here * (2 * sums - here)
    return np.where(square > 1e-12, square, 0.0)  # what is less is rounding: it lies between 0 and 2


def frechet(z: Values, weights: Values, width: Values) -> Values:
    centred = z - z.mean(1, keepdims=True)
    first, second = (
        np.sqrt(np.maximum(_along(half, np.square(centred)) - np.square(_along(half, centred)), 0.0))
        for half in (np.maximum(weights, 0), np.maximum(-weights, 0))
    )
    square: Values = shift(z, weights, width) + np.square(first - second)
    return square


def _along(weights: Values, values: Values) -> Values:
    """The weighted sums of every quantity, in every draw."""
    return values @ weights.T if weights.ndim == 2 else np.matmul(weights, values[:, :, None])[:, :, 0]


# what is averaged over the directions of an embedding; all are squares
SQUARES: Mapping[str, Statistic] = {
    "euclidean": shift,
    "energy": energy,
    "mmd": discrepancy,
    "frechet": frechet,
}


def angle(one: Values, other: Values) -> float:
    """Between two vectors, in degrees; a vector of zeros is at right angles to everything.

    >>> round(angle(np.array([1.0, 0.0]), np.array([-1.0, 1.0])))
    135
    """
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.degrees(np.arccos(np.clip(one @ other / length, -1, 1)))) if length else 90.0
