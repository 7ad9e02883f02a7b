"""Clusters of sites from the distances between them: around an outlier, or by average linkage.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, equation 3 and Algorithm 1

    i_max = argmax_i sum_j D_ij,    C2 = i_max and the sites nearest to it,    C1 = all others

A site is a row of a symmetric matrix D. A cluster is a tuple of rows in rising order; the cluster of the first row
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

ROUNDING = 1e-9  # what two ways to compute the same number may differ by


def check(matrix: ArrayLike) -> Distances:
    """The matrix as an array, if it holds distances between sites; anything else is refused.

    The way back may differ by a rounding error; the mean of both ways is taken.
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
    """The site with the largest sum of distances to the others; the first of several.

    >>> outlier([[0, 1, 5], [1, 0, 4], [5, 4, 0]])
    2
    """
    sums = [fsum(row) for row in check(matrix)]  # exact, so that the order of the sites plays no part
    return sums.index(max(sums))


def around_outlier(matrix: ArrayLike, take: int | Literal["least", "literal"] = "least") -> Clusters:
    """Two clusters: the outlier with the ``take`` sites nearest to it, and the others.

    ``least`` takes as many, from one to all but one of the others, as give the smallest sum of the distances between
    members of a cluster; of equals, the fewest. ``literal`` takes until two others are left, as the printed algorithm
    does, so that five sites always become three and two. The text of the paper, and the clusters that it reports, are
    those of ``least``.

    Up to three sites, the outlier is alone in both: the other two of three are never further apart than it is from
    either. Two sites are two clusters, one site is one.
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


def linked(matrix: ArrayLike, most: int | None = None) -> tuple[Clusters, float]:
    """The clusters of average linkage, and their silhouette, the mean of (b - a) / max(a, b) over the sites.

    a is the mean distance of a site to the others of its cluster, b to those of the nearest other cluster. There are
    as many clusters, from two to one less than sites and ``most`` at most, as give the highest silhouette; of equals,
    the fewest. Where none gives one above zero, and with fewer than three sites, all are one cluster of silhouette 0.
    """
    from scipy.cluster.hierarchy import cut_tree
    from sklearn.metrics import silhouette_score

    apart = check(matrix)
    if most is not None and most < 1:
        raise ConfigError(f"there is one cluster at least, got most = {most}")
    merged, best = tree(apart), (_ordered([range(len(apart))]), 0.0)
    last = len(apart) - 1 if most is None else min(most, len(apart) - 1)
    for count in range(2, last + 1):
        labels = cut_tree(merged, count).ravel()
        silhouette = float(silhouette_score(apart, labels, metric="precomputed"))
        if silhouette > best[1] + ROUNDING:
            best = _ordered(np.flatnonzero(labels == k) for k in range(count)), silhouette
    return best


def tree(matrix: ArrayLike) -> Distances:
    """Average linkage as SciPy has it, for a dendrogram: a row per merger, none for a single site."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    apart = check(matrix)
    merged: Distances = linkage(squareform(apart), "average") if len(apart) > 1 else np.empty((0, 4))
    return merged


def _hold(apart: Distances, good: NDArray[Any], rule: str) -> None:
    """Refuse the first entry that is not good."""
    if not good.all():
        i, j = np.argwhere(~good)[0]
        raise DataError(f"the distance in row {i + 1}, column {j + 1} of the table is {apart[i, j]:g}; {rule}")


def _within(apart: Distances, clusters: Clusters) -> float:
    """The sum of the distances between members of a cluster, every pair once."""
    return fsum(apart[i, j] for members in clusters for i in members for j in members if i < j)


def _ordered(clusters: Iterable[Iterable[int]]) -> Clusters:
    """Without the empty ones, in the order of their first members."""
    found = (tuple(sorted(int(i) for i in members)) for members in clusters)
    return tuple(sorted(members for members in found if members))
