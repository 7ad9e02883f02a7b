"""Percentiles of numbers at several sites, by counting.

Of n numbers, NumPy's percentile p lies between those of ranks floor(h) and floor(h) + 1, with h = (n - 1) p / 100. The
server has a bracket for each of the two. It sends the brackets, and every site counts its numbers at or below each of
257 edges in a bracket. The sum of the counts shows between which two edges the number of that rank lies: the next
bracket. The first bracket follows from mean and standard deviation: r + 1 numbers cannot all lie further than
sqrt(n / (r + 1)) deviations below the mean. A bracket that no longer contains its number, because other sites answer
than before, grows again.

p percentiles of F features have 2p x F brackets, sent as two arrays of that shape; the counts are 2pF x 257.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

BINS = 256
FINE = 1e-4  # share of the distance between the outer percentiles at which a bracket is short enough
ROUNDING = 1e-14  # rounding error of a variance from sums, relative to the mean square


def brackets(cases: float, sums: Values, squares: Values, percentiles: Sequence[float]) -> tuple[Values, Values]:
    """Return the lower and upper ends of the first brackets."""
    mean, square = sums / cases, squares / cases
    deviation = np.sqrt(np.maximum(square - mean**2, ROUNDING * square))
    ranks, _ = _ranks(cases, percentiles)
    reach = np.sqrt(cases / np.minimum(ranks + 1, cases - ranks))[:, None] * deviation * (1 + 1e-6)
    return mean - reach, mean + reach


def counts(numbers: Values, low: Values, high: Values) -> Values:
    """Count a site's numbers (cases x features) at or below every edge."""
    rows, ordered = low.shape[0], np.sort(numbers, axis=0)
    edges = _edges(low, high).reshape(rows, -1, BINS + 1)
    found = [np.searchsorted(ordered[:, f], edges[:, f], side="right") for f in range(numbers.shape[1])]
    return np.stack(found, 1).reshape(-1, BINS + 1).astype(np.float64)


def narrowed(
    low: Values, high: Values, counted: Values, cases: float, percentiles: Sequence[float]
) -> tuple[Values, Values, Values]:
    """Return the next brackets (lower and upper ends) and the estimated percentiles, percentiles x features."""
    ranks, share = _ranks(cases, percentiles)
    edges, wanted = _edges(low, high), np.repeat(ranks + 1, low.shape[1])
    right = (counted < wanted[:, None]).sum(1)  # the first edge with enough numbers at or below it
    row, inside = np.arange(len(edges)), np.clip(right, 1, BINS)
    left, end = edges[row, inside - 1], edges[row, inside]
    below, held = counted[row, inside - 1], counted[row, inside] - counted[row, inside - 1]
    at = left + (end - left) * np.clip((wanted - below - 0.5) / np.maximum(held, 1), 0, 1)
    far = BINS * (edges[:, -1] - edges[:, 0])
    left, end = (
        np.select([right == 0, right > BINS], [edges[:, 0] - far, edges[:, -1]], left),
        np.select([right == 0, right > BINS], [edges[:, 0], edges[:, -1] + far], end),
    )
    one, next_one = at.reshape(-1, 2, low.shape[1]).swapaxes(0, 1)
    return left.reshape(low.shape), end.reshape(low.shape), one + share[:, None] * (next_one - one)


def resolved(low: Values, high: Values, found: Values, constant: float) -> NDArray[np.bool_]:
    """Return for each feature whether all its brackets are short enough.

    The measure is the distance of its outer percentiles or, if larger, ``constant`` times its size.
    """
    enough = np.maximum(FINE * (found[-1] - found[0]), constant * abs(found).max(0) / 10)
    short: NDArray[np.bool_] = (high - low).max(0) <= enough
    return short


def _ranks(cases: float, percentiles: Sequence[float]) -> tuple[Values, Values]:
    """Return the two ranks around every percentile, flattened, and its relative position between them."""
    at = (cases - 1) * np.asarray(percentiles, float) / 100
    lower = np.floor(at)
    return np.stack([lower, np.minimum(lower + 1, cases - 1)], 1).ravel(), at - lower


def _edges(low: Values, high: Values) -> Values:
    """Return the edges of every bracket, bit by bit the same at the server and at every site."""
    return low.reshape(-1, 1) + (high - low).reshape(-1, 1) * (np.arange(BINS + 1) / BINS)
