"""Bipartition of sites into the two groups with the smallest maximal similarity between them.

Paper: Sattler, Müller and Samek, Clustered Federated Learning, IEEE TNNLS 2021

    c1, c2 = argmin over all bipartitions of max_{i in c1, j in c2} a_ij

Single linkage solves this exactly: it joins the most similar sites until two groups are left, and so separates no pair
that is more similar than the smallest possible maximum. The authors' program uses complete linkage. That misses the
minimum for many matrices, but its groups are more even in size.

>>> bipartition([[1.0, 0.9, -0.5], [0.9, 1.0, 0.2], [-0.5, 0.2, 1.0]])
(((0, 1), (2,)), 0.2)
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from polysite.cluster.distance import ROUNDING, Clusters
from polysite.errors import DataError

Linkage = Literal["single", "complete"]


def bipartition(similarity: ArrayLike, linkage: Linkage = "single") -> tuple[Clusters, float]:
    """Return two clusters, and the largest similarity between members of different clusters.

    A site is a row of a symmetric matrix. A cluster is a tuple of rows in ascending order; the cluster of the first row
    comes first.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    alike = np.asarray(similarity, float)
    if alike.ndim != 2 or alike.shape[0] != alike.shape[1] or len(alike) < 2:
        raise DataError(f"two or more sites are parted by a square table of similarities, not one of {alike.shape}")
    if not np.isfinite(alike).all() or abs(alike - alike.T).max() > ROUNDING * abs(alike).max():
        raise DataError("similarities between sites are finite, and the same both ways")
    apart = squareform(alike.max() - alike, checks=False)  # the diagonal is not used
    last = hierarchy.to_tree(hierarchy.linkage(apart, linkage))  # its two branches are joined last
    one, other = sorted(tuple(sorted(map(int, branch.pre_order()))) for branch in (last.left, last.right))
    return (one, other), float(alike[np.ix_(one, other)].max())
