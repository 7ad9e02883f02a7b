"""Groups of sites by the directions of their updates: spherical k-means, from the cosines between updates alone.

    group of i = argmax_c cos(u_i, sum of u_j over c),    u_i the update of site i divided by its length

The length of an update says how much a site trained, its direction what it would change in the model.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import DataError

MAX_ITERATIONS = 50  # a few are usual


def direction_groups(cosines: ArrayLike, k: int) -> tuple[tuple[int, ...], ...]:
    """Return k groups, none empty; the largest comes first, of equals the one with the first row.

    A site is a row of a symmetric matrix. The first groups form around k sites that point far apart.

    >>> direction_groups([[1.0, 0.9, -0.8], [0.9, 1.0, -0.9], [-0.8, -0.9, 1.0]], 2)
    ((0, 1), (2,))
    """
    alike = np.asarray(cosines, float)
    if alike.ndim != 2 or alike.shape[0] != alike.shape[1] or not np.isfinite(alike).all():
        raise DataError(f"sites are grouped by a square table of finite cosines, not one of shape {alike.shape}")
    if not 1 <= k <= len(alike):
        raise DataError(f"{len(alike)} sites cannot form {k} groups")
    seeds = _seeds(alike, k)
    place = alike[:, seeds].argmax(1)
    place[seeds] = range(k)
    for _ in range(MAX_ITERATIONS):
        better = _to_means(alike, place, k).argmax(1)
        if len(set(better)) < k or (better == place).all():
            break
        place = better
    groups = (tuple(int(i) for i in np.flatnonzero(place == c)) for c in range(k))
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))


def _seeds(alike: NDArray[np.float64], k: int) -> list[int]:
    """Return k sites: the one furthest from the mean direction, then repeatedly the furthest from those taken."""
    taken = [int(alike.sum(1).argmin())]
    while len(taken) < k:
        nearest = alike[:, taken].max(1)
        nearest[taken] = np.inf
        taken.append(int(nearest.argmin()))
    return taken


def _to_means(alike: NDArray[np.float64], place: NDArray[np.intp], k: int) -> NDArray[np.float64]:
    """Return the inner product of every site with the direction of every group."""
    members = np.eye(k)[place]
    sums = alike @ members
    cosines: NDArray[np.float64] = sums / np.sqrt(np.maximum((members * sums).sum(0), 1e-30))
    return cosines
