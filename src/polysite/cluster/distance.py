"""Clusters of sites from the distances between them: around an outlier, or by average linkage.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, equation 3 and Algorithm 1

    S_i = sum_j D_ij,    i_max = argmax_i S_i,    C2 = i_max and the sites nearest to it,    C1 = all others
    omega_i = min(1, median(S) / S_i)    factors for all sites instead of one for the outlier; not in the paper

A site is a row of a symmetric matrix D. A cluster is a tuple of rows in ascending order; the cluster of the first row
comes first.

>>> near, far = 1.0, 9.0
>>> two_pairs = [[0, near, far, far], [near, 0, far, far], [far, far, 0, near], [far, far, near, 0]]
>>> around_outlier(two_pairs)
((0, 1), (2, 3))
"""

from collections.abc import Iterable
from math import fsum
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError, DataError

Distances = NDArray[np.float64]
Clusters = tuple[tuple[int, ...], ...]

ROUNDING = 1e-9  # relative difference between two ways to compute the same number


def check(matrix: ArrayLike) -> Distances:
    """Return the matrix as an array; refuse it if it does not hold distances between sites.

    Rounding errors of the symmetry are removed: the result is the mean of the matrix and its transpose.
    """
    try:
        apart = np.asarray(matrix, float)
    except (TypeError, ValueError) as problem:
        raise DataError(f"distances between sites are a table of numbers: {problem}") from problem
    if apart.ndim != 2 or apart.shape[0] != apart.shape[1] or not apart.size:
        raise DataError(
            f"distances between sites are a square table, a row for each; this one is of shape {apart.shape}"
        )
    _hold(apart, np.isfinite(apart), "a distance is finite")
    _hold(apart, apart >= 0, "a distance is not negative")
    _hold(apart, (apart == 0) | ~np.eye(len(apart), dtype=bool), "no site is away from itself")
    _hold(apart, abs(apart - apart.T) <= ROUNDING * apart.max(), "the way back is as long, so the table is symmetric")
    return apart / 2 + apart.T / 2


def outlier(matrix: ArrayLike) -> int:
    """Return the site with the largest sum of distances to the others; the first of several.

    >>> outlier([[0, 1, 5], [1, 0, 4], [5, 4, 0]])
    2
    """
    every = sums(matrix)
    return every.index(max(every))


def sums(matrix: ArrayLike) -> list[float]:
    """Return the sum of the distances of every site to the others.

    >>> sums([[0, 1, 5], [1, 0, 4], [5, 4, 0]])
    [6.0, 5.0, 9.0]
    """
    return [fsum(row) for row in check(matrix)]  # exact, so that the order of the sites has no effect


def graded(matrix: ArrayLike) -> list[float]:
    """Return a factor for every site that falls with its distance: the median of all sums over its own, at most 1.

    At least half of the sites keep the factor 1. A site much farther from K - 1 others than these are from one another
    gets about 1 / (K - 1).

    >>> graded([[0, 1, 6], [1, 0, 6], [6, 6, 0]])
    [1.0, 1.0, 0.5833333333333334]
    """
    every = sums(matrix)
    usual = float(np.median(every))
    return [usual / each if each > usual else 1.0 for each in every]


def around_outlier(matrix: ArrayLike, take: int | Literal["least", "literal"] = "least") -> Clusters:
    """Return two clusters: the outlier with the ``take`` sites nearest to it, and the others.

    With three sites or fewer the outlier is alone: the other two of three are never further apart than the outlier is
    from either. Two sites are two clusters, one site is one.

    Args:
        matrix: Distances between the sites.
        take: A number of sites. ``least`` takes the number, from one to all but one of the others, with the smallest
            sum of distances within the clusters (of equals, the smallest number), as the text of the paper and its
            reported clusters do. ``literal`` takes sites until two others are left, as the printed algorithm does, so
            that five sites always become three and two.
    """
    apart = check(matrix)
    sites, centre = len(apart), outlier(apart)
    nearest = sorted((i for i in range(sites) if i != centre), key=apart[centre].__getitem__)  # ties: the first

    def cut(size: int) -> Clusters:
        return _ordered([[centre, *nearest[:size]], nearest[size:]])

    if take == "literal":
        return cut(max(sites - 3, 0))
    if take == "least":
        sizes = range(1, sites - 1) if sites > 3 else [0]
        return min((cut(size) for size in sizes), key=lambda clusters: _within(apart, clusters))
    if not (isinstance(take, int) and 0 <= take <= max(sites - 2, 0)):
        raise ConfigError(
            f"take = {take!r} sites cannot join the outlier of {sites} sites; it is 'least', 'literal', or a number "
            f"from 0 to {max(sites - 2, 0)}, so that one other is left"
        )
    return cut(take)


def linked(matrix: ArrayLike) -> tuple[Clusters, float]:
    """Return the clusters of average linkage, and their silhouette, the mean of (b - a) / max(a, b) over the sites.

    a is the mean distance of a site to the others of its cluster, b to those of the nearest other cluster. The number
    of clusters, from two to one less than the sites, is the one with the highest silhouette (of equals, the smallest).
    If no silhouette is above zero, or with fewer than three sites, all sites are one cluster with silhouette 0.
    """
    from scipy.cluster.hierarchy import cut_tree
    from sklearn.metrics import silhouette_score

    apart = check(matrix)
    merged, best = tree(apart), (_ordered([range(len(apart))]), 0.0)
    for count in range(2, len(apart)):
        labels = cut_tree(merged, count).ravel()
        silhouette = float(silhouette_score(apart, labels, metric="precomputed"))
        if silhouette > best[1] + ROUNDING:
            best = _ordered(np.flatnonzero(labels == k) for k in range(count)), silhouette
    return best


def tree(matrix: ArrayLike) -> Distances:
    """Return the average linkage in SciPy's format, for a dendrogram: one row per merger, none for a single site."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    apart = check(matrix)
    merged: Distances = linkage(squareform(apart), "average") if len(apart) > 1 else np.empty((0, 4))
    return merged


def _hold(apart: Distances, good: NDArray[Any], rule: str) -> None:
    """Raise DataError for the first distance that is not ``good``; ``rule`` states what it violates."""
    if not good.all():
        i, j = np.argwhere(~good)[0]
        raise DataError(f"the distance in row {i + 1}, column {j + 1} of the table is {apart[i, j]:g}; {rule}")


def _within(apart: Distances, clusters: Clusters) -> float:
    """Return the sum of the distances between members of the same cluster, every pair once."""
    return fsum(apart[i, j] for members in clusters for i in members for j in members if i < j)


def _ordered(clusters: Iterable[Iterable[int]]) -> Clusters:
    """Return the clusters that are not empty, in the order of their first members."""
    ascending = (tuple(sorted(int(i) for i in members)) for members in clusters)
    return tuple(sorted(members for members in ascending if members))
