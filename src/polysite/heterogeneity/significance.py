"""Is it more than chance? Permutation tests that two hospitals differ, bootstrap intervals, and how they are combined.

A permutation deals the cases of both hospitals out anew and asks how often that makes them as different as they are.
Quantities arrive as unconnected lists (which value of one belongs to which of another never leaves a site), so each
list is tested by itself, and the p of all m of them become one:

    p = min_k  m p_(k) / k,    p_(1) <= ... <= p_(m)      (Simes, Biometrika 1986)

That is exact for independent lists, and holds for lists that go together, as these do. A bootstrap resample draws every
hospital's cases again with replacement, the same ranks in every list: as if a case that is extreme in one list were so
in all, which makes intervals of embeddings rather too wide than too narrow. Chance makes a distance too large, and a
resample makes it too large once more, so the interval reaches as far below the distance as the resamples do above it:
D - (q - D) to q, with q their 97.5 % quantile; and down to zero where p > 0.05, so that chance alone would do. The
percentile interval (2.5 % to q) misses distances near zero, the basic one (2D - q to 2D - the 2.5 % quantile) is too
short for few cases.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import comb
from zlib import crc32

import numpy as np

from polysite.heterogeneity.distances import Statistic, Values, merged

FIRST = 1000  # deals; only where they leave it open whether p is very small are there more, if more are allowed
OPEN = 0.01


@lru_cache(maxsize=16)
def _dealt(n: int, m: int, part: int) -> Values:
    """Weights of the merged list after dealing its values out anew, so many times."""
    rng = np.random.default_rng([n, m, part])
    drawn = rng.random((FIRST, n + m))
    return np.where(drawn <= np.partition(drawn, n - 1, -1)[:, n - 1 : n], 1 / n, -1 / m)  # the n smallest of a row


def permuted(
    one: Values, other: Values, statistics: Mapping[str, Statistic], widths: Values, draws: int
) -> dict[str, tuple[Values, Values]]:
    """Of every quantity (row) under every statistic: p, which is (1 + deals at least as extreme) / (1 + deals), and
    what chance makes of the statistic, the mean over the deals."""
    z, weights, _ = merged(one, other)
    sizes, found = (one.shape[1], other.shape[1]), {}
    for name, statistic in statistics.items():
        least = statistic(z, weights[:, None], widths) * (1 - 1e-9)
        extreme, done = np.zeros(len(z)), np.zeros(len(z))
        chance, still = np.zeros(len(z)), np.arange(len(z))
        for part in range(-(-draws // FIRST)):
            deals = statistic(z[still], _dealt(*sizes, part)[: draws - part * FIRST], widths[still])
            extreme[still] += np.count_nonzero(deals >= least[still], axis=1)
            done[still] += deals.shape[1]
            if not part:
                chance = deals.mean(1)
            still = still[(1 + extreme[still]) / (1 + done[still]) <= OPEN]
            if not len(still):
                break
        found[name] = (1 + extreme) / (1 + done), chance
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
    z, _, order = merged(one, other)
    weights = np.concatenate([drawn[0] / one.shape[1], -drawn[1] / other.shape[1]], -1)[:, order].transpose(1, 0, 2)
    return {name: statistic(z, weights, widths) for name, statistic in statistics.items()}


def simes(p: Values) -> Values:
    """One p out of those of several lists, along the first axis.

    >>> round(float(simes(np.array([0.04, 0.03, 0.5]))), 3)
    0.06
    """
    ordered, count = np.sort(p, 0), len(p)
    ranks = np.arange(1, count + 1).reshape(-1, *[1] * (p.ndim - 1))
    combined: Values = (ordered * count / ranks).min(0)
    return combined


def interval(distance: Values, resamples: Values, p: Values) -> tuple[Values, Values]:
    """A 95 % bootstrap interval; resamples along the first axis."""
    high = np.maximum(np.quantile(resamples, 0.975, axis=0), distance)
    return np.where(p > 0.05, 0.0, np.maximum(2 * distance - high, 0.0)), high


def least_p(n: int, m: int) -> float:
    """The smallest p that a permutation test of so many cases can reach, whatever they are.

    >>> round(least_p(1, 10), 3), least_p(2, 2)  # of equal numbers, the deal that swaps all is as extreme
    (0.091, 0.3333333333333333)
    """
    return (1 + (n == m)) / comb(n + m, n)
