"""Distances between two hospitals, each represented by sorted lists of numbers.

For every quantity a hospital has a list of equally weighted values in ascending order. On the merged list z of two
hospitals, with weights w = 1/n at the values of the one and -1/m at those of the other, and c the running sum of w:

    Earth Mover's   W1 = sum |c| dz          (SciPy: wasserstein_distance)
    energy          E^2 = 2 sum c^2 dz       (SciPy: energy_distance)
    shift           d = sum w z              (difference of the means)

All are zero between equal lists, symmetric, and independent of the order and the duplication of the values. Other
weights on the same z represent a permutation or a bootstrap resample of the same pair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
CHUNK = (
    1 << 11
)  # draws of all quantities at a time: small arrays are reused, large ones are fetched from the system anew


def slices(values: Values, levels: int, weights: Values | None = None) -> Values:
    """Return at most ``levels`` quantiles of a list: its sorted values or, if there are more, means of equal slices.

    The Earth Mover's distance of two lists changes by at most (range + range) / (2 levels); the range of a list counts
    only if it was averaged.

    Args:
        values: The list.
        levels: Largest number of quantiles.
        weights: Number of cases behind each value, if a value is the mean of several; slices then have equal numbers of
            cases.

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
    return np.clip(np.maximum.accumulate(means), ordered[0], ordered[-1])  # a constant list stays constant


def earth_movers(laws: Sequence[Values]) -> Values:
    """Return the distances of all pairs: ascending lists (quantity, value) of every site to (quantity, site, site)."""
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
    """Return the common steps of two step functions with n and m steps: the index into either, and the widths."""
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    starts = np.concatenate([[0], ends[:-1]])
    return starts // m, starts // n, (ends - starts) / (n * m)


def merged(one: Values, other: Values) -> tuple[Values, Values, NDArray[np.intp]]:
    """Return for every quantity (row) the merged list, its weights, and its order in the concatenated lists."""
    both, n, m = np.concatenate([one, other], axis=1), one.shape[1], other.shape[1]
    order = np.argsort(both, axis=1, kind="stable")
    return np.take_along_axis(both, order, 1), np.where(order < n, 1 / n, -1 / m), order


class Weights:
    """Weights of a merged list in several draws, with the sums that statistics share.

    Args:
        each: The weights, (draw, value) or (quantity, draw, value).
    """

    def __init__(self, each: Values):
        self.each = each

    @cached_property
    def running(self) -> Values:
        """Running sums along the list without the last, which is zero."""
        if self.each.strides[-1] == self.each.itemsize:
            return np.cumsum(self.each, -1)[..., :-1]
        sums = np.empty_like(self.each)  # value by value: NumPy's own is slow along a strided axis
        sums[..., 0] = self.each[..., 0]
        for r in range(1, sums.shape[-1] - 1):
            np.add(sums[..., r - 1], self.each[..., r], out=sums[..., r])
        return sums[..., :-1]


def chunks(quantities: int, draws: int) -> Iterator[slice]:
    """Yield slices of quantities with ``CHUNK`` draws together, or one at a time.

    >>> [(chunk.start, chunk.stop) for chunk in chunks(16, 300)]
    [(0, 6), (6, 12), (12, 18)]
    """
    step = max(CHUNK // draws, 1)
    for start in range(0, quantities, step):
        yield slice(start, start + step)


# A function of z (quantity, value) and weights; it returns (quantity, draw).
Statistic = Callable[[Values, Weights], Values]


def earth_movers_of(z: Values, weights: Weights) -> Values:
    """Return the Earth Mover's distances."""
    return _along(np.abs(weights.running), np.diff(z))


def energy(z: Values, weights: Weights) -> Values:
    """Return the squared energy distances."""
    return 2 * _along(np.square(weights.running), np.diff(z))


def shift(z: Values, weights: Weights) -> Values:
    """Return the squared differences of the means."""
    return np.square(_along(weights.running, np.diff(z)))


def _along(weights: Values, values: Values) -> Values:
    """Return the weighted sums of every quantity in every draw."""
    return values @ weights.T if weights.ndim == 2 else np.matmul(weights, values[:, :, None])[:, :, 0]


# statistics that are averaged over the directions of an embedding; all are squares
SQUARES: Mapping[str, Statistic] = {"euclidean": shift, "energy": energy}


def angle(one: Values, other: Values) -> float:
    """Return the angle between two vectors in degrees; 90 if one of them is zero.

    >>> round(angle(np.array([1.0, 0.0]), np.array([-1.0, 1.0])))
    135
    """
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.degrees(np.arccos(np.clip(one @ other / length, -1, 1)))) if length else 90.0
