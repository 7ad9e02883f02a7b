"""Is it more than chance? Permutation tests that two hospitals differ, bootstrap intervals, and how they are combined.

A permutation deals the cases of both hospitals out anew and asks how often that makes them as different as they are.
Quantities arrive as unconnected lists (which value of one belongs to which of another never leaves a site), so each
list is tested by itself, and the p of all m of them become one:

    p = min_k  m p_(k) / k,    p_(1) <= ... <= p_(m)      (Simes, Biometrika 1986)

That is exact for independent lists, and holds for lists that go together, as these do. A bootstrap resample draws every
hospital's cases again with replacement, the same ranks in every list: as if a case that is extreme in one list were so
in all, which makes intervals rather too wide than too narrow. Chance makes a distance too large, and a resample makes
it too large once more, so the interval reaches as far below the distance as the resamples do above it: D - (q - D) to
q, with q their 97.5 % quantile, and never below zero. The percentile interval (2.5 % to q) misses distances near zero,
the basic one (2D - q to 2D - the 2.5 % quantile) is too short for few cases.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import comb
from zlib import crc32

import numpy as np

from polysite.assess.distances import Values, merged

Statistic = Callable[[Values, Values, float], Values]


FIRST = 1000  # deals; only where they leave it open whether p is very small are there more
OPEN = 0.01


@lru_cache(maxsize=128)
def _dealt(n: int, m: int, part: int) -> Values:
    """Weights of the merged list after dealing its values out anew, so many times."""
    rng = np.random.default_rng([n, m, part])
    first = np.argsort(rng.random((FIRST, n + m)), -1) < n
    return np.where(first, 1 / n, -1 / m)


def permuted(
    one: Values, other: Values, statistics: Mapping[str, Statistic], widths: Values, draws: int
) -> dict[str, tuple[Values, Values]]:
    """Of every quantity (row) under every statistic: p, which is (1 + deals at least as extreme) / (1 + deals), and
    what chance makes of the statistic, the mean over the deals."""
    found = {name: (np.ones(len(one)), np.zeros(len(one))) for name in statistics}
    sizes = one.shape[1], other.shape[1]
    for q in range(len(one)):
        z, weights, _ = merged(one[q], other[q])
        for name, statistic in statistics.items():
            least, extreme, done = statistic(z, weights, widths[q]) * (1 - 1e-9), 0, 0
            while done < draws and (not done or (1 + extreme) / (1 + done) <= OPEN):
                deals = statistic(z, _dealt(*sizes, done // FIRST)[: draws - done], widths[q])
                if not done:
                    found[name][1][q] = deals.mean()
                extreme, done = extreme + int(np.count_nonzero(deals >= least)), done + len(deals)
            found[name][0][q] = (1 + extreme) / (1 + done)
    return found


def counts(site: str, cases: int, draws: int) -> Values:
    """How often each of a hospital's cases, in order, is drawn in every resample."""
    rng = np.random.default_rng([crc32(site.encode()), cases, draws])
    return rng.multinomial(cases, np.full(cases, 1 / cases), draws).astype(np.float64)


def resampled(
    one: Values,
    other: Values,
    drawn: tuple[Values, Values],
    statistics: Mapping[str, Statistic],
    widths: Values,
) -> dict[str, Values]:
    """Every statistic of every quantity in every resample: (quantity, resample)."""
    weights = np.concatenate([drawn[0] / one.shape[1], -drawn[1] / other.shape[1]], -1)
    found: dict[str, list[Values]] = {name: [] for name in statistics}
    for q in range(len(one)):
        z, _, order = merged(one[q], other[q])
        shuffled = weights[:, order]
        for name, statistic in statistics.items():
            found[name].append(statistic(z, shuffled, widths[q]))
    return {name: np.array(rows) for name, rows in found.items()}


def simes(p: Values) -> Values:
    """One p out of those of several lists, along the first axis.

    >>> round(float(simes(np.array([0.04, 0.03, 0.5]))), 3)
    0.06
    """
    ordered, count = np.sort(p, 0), len(p)
    ranks = np.arange(1, count + 1).reshape(-1, *[1] * (p.ndim - 1))
    combined: Values = (ordered * count / ranks).min(0)
    return combined


def interval(distance: Values, resamples: Values) -> tuple[Values, Values]:
    """A 95 % bootstrap interval; resamples along the first axis."""
    high = np.maximum(np.quantile(resamples, 0.975, axis=0), distance)
    return np.maximum(2 * distance - high, 0.0), high


def least_p(n: int, m: int) -> float:
    """The smallest p that a permutation test of so many cases can reach, whatever they are.

    >>> round(least_p(1, 10), 3)
    0.091
    """
    return 1 / comb(n + m, n)
