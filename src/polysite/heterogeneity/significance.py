"""Significance of differences between hospitals: permutation tests, their combination, and bootstrap intervals.

A permutation assigns the cases of both hospitals at random; p is the share of permutations that make them at least as
different as they are. Quantities arrive as separate sorted lists (the link between the values of one case never leaves
a site), so each list is tested by itself, and the p of all m lists are combined:

    p = min_k  m p_(k) / k,    p_(1) <= ... <= p_(m)      (Simes, Biometrika 1986)

This is exact for independent lists, and valid for positively dependent ones, as these are. A bootstrap resample draws
every hospital's cases with replacement, with the same ranks in every list: as if a case that is extreme in one list
were extreme in all. This makes intervals of embeddings too wide rather than too narrow. Chance makes a distance too
large, and a resample makes it too large once more, so the interval extends as far below the distance as the resamples
do above it: D - (q - D) to q, with q their 97.5 % quantile; and down to zero if p > 0.05. The percentile interval
(2.5 % to q) misses distances near zero; the basic interval (2D - q to 2D - the 2.5 % quantile) is too short for few
cases.
"""

from functools import lru_cache
from math import comb
from zlib import crc32

import numpy as np

from polysite.heterogeneity.distances import Statistic, Values, Weights, chunks, merged

FIRST = 1000  # permutations of every test; more follow only while p is at most OPEN
OPEN = 0.01


@lru_cache(maxsize=51)  # all blocks of a test, since most hospitals have similar numbers of cases
def _permutations(n: int, m: int, block: int, count: int = FIRST) -> Weights:
    """Return the weights of the merged list in a block of random permutations, or in the first of them."""
    rng = np.random.default_rng([n, m, block])
    drawn = rng.random((FIRST, n + m))
    smallest = drawn <= np.partition(drawn, n - 1, -1)[:, n - 1 : n]  # the n smallest of a row
    return Weights(np.where(smallest, 1 / n, -1 / m)[:count])


def permuted(one: Values, other: Values, statistic: Statistic, draws: int) -> tuple[Values, Values]:
    """Return the p of every quantity (row), and the mean of the statistic over the permutations.

    p is (1 + permutations at least as extreme) / (1 + permutations).
    """
    z, here, _ = merged(one, other)
    least = statistic(z, Weights(here[:, None])) * (1 - 1e-9)
    extreme, done = np.zeros(len(z)), np.zeros(len(z))
    chance, still = np.zeros(len(z)), np.arange(len(z))
    for block in range(-(-draws // FIRST)):
        weights = _permutations(one.shape[1], other.shape[1], block, min(draws - block * FIRST, FIRST))
        drawn = statistic(z[still], weights)
        extreme[still] += np.count_nonzero(drawn >= least[still], axis=1)
        done[still] += drawn.shape[1]
        if not block:
            chance = drawn.mean(1)
        still = still[(1 + extreme[still]) / (1 + done[still]) <= OPEN]
        if not len(still):
            break
    return (1 + extreme) / (1 + done), chance


def counts(site: str, cases: int, draws: int) -> Values:
    """Return how often each of a hospital's cases, in order, is drawn in every resample."""
    rng = np.random.default_rng([crc32(site.encode()), cases, draws])
    return rng.multinomial(cases, np.full(cases, 1 / cases), draws).astype(np.float64)


def resampled(one: Values, other: Values, drawn: tuple[Values, Values], statistic: Statistic) -> Values:
    """Return the statistic of every quantity in every resample: (quantity, resample)."""
    z, _, order = merged(one, other)
    weights = np.concatenate([drawn[0] / one.shape[1], -drawn[1] / other.shape[1]], -1)
    return np.concatenate([
        statistic(z[chunk], Weights(weights[:, order[chunk]].transpose(1, 0, 2)))
        for chunk in chunks(len(z), len(weights))
    ])  # fmt: skip


def simes(p: Values) -> Values:
    """Combine the p of several lists, along the first axis.

    >>> round(float(simes(np.array([0.04, 0.03, 0.5]))), 3)
    0.06
    """
    ordered, count = np.sort(p, 0), len(p)
    ranks = np.arange(1, count + 1).reshape(-1, *[1] * (p.ndim - 1))
    combined: Values = (ordered * count / ranks).min(0)
    return combined


def upper(resamples: Values) -> Values:
    """Return the 97.5 % quantile of resamples along the first axis."""
    return np.quantile(resamples, 0.975, axis=0)


def interval(distance: Values, upper: Values, p: Values) -> tuple[Values, Values]:
    """Return a 95 % bootstrap interval from the 97.5 % quantile of the resamples."""
    high = np.maximum(upper, distance)
    return np.where(p > 0.05, 0.0, np.maximum(2 * distance - high, 0.0)), high


def least_p(n: int, m: int) -> float:
    """Return the smallest p that a permutation test of n against m cases can reach.

    >>> round(least_p(1, 10), 3), least_p(2, 2)  # with equal numbers, swapping all cases is as extreme
    (0.091, 0.3333333333333333)
    """
    return (1 + (n == m)) / comb(n + m, n)
