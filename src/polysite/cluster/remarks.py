"""Remarks on fitted clusters that a user should read before using them."""

from collections.abc import Mapping

import numpy as np

from polysite.cluster.mixture import rand_index
from polysite.payload import SiteId

SAME_AS_SITES = 0.5  # adjusted Rand index of clusters and hospitals from which they are reported to coincide
UNSTABLE = 0.7  # adjusted Rand index of the best restarts below which there are no clear clusters


def remarks(counts: Mapping[SiteId, Mapping[str, float]], components: int, agreement: float = 1.0) -> list[str]:
    """Return sentences about empty clusters, clusters that are hospitals, and restarts that disagree.

    Args:
        counts: Cases of every hospital in every cluster; clusters are named 0, 1, ...
        components: Number of clusters.
        agreement: Mean adjusted Rand index of the best restarts.
    """
    found = []
    names = [f"{c}" for c in range(components)]
    table = np.array([[own.get(c, 0.0) for c in names] for own in counts.values()]).reshape(-1, components)
    empty = [f"{int(c) + 1}" for c, cases in zip(names, table.sum(0), strict=True) if not cases]
    if empty:
        found.append(
            f"{len(empty)} of {components} clusters have no case ({', '.join(empty)}); choose fewer components"
        )
    alike = sites_index(counts) if len(counts) > 1 else 0.0
    if alike >= SAME_AS_SITES:
        found.append(
            f"the clusters coincide with the hospitals (adjusted Rand index {alike:.2f}): a model per cluster is then "
            "little more than a model per hospital"
        )
    if agreement < UNSTABLE:
        found.append(
            f"the best restarts end in different clusters (adjusted Rand index {agreement:.2f}), so another seed may "
            "give others: the cases have no clear clusters of this number; try fewer components or dimensions"
        )
    return found


def sites_index(counts: Mapping[SiteId, Mapping[str, float]]) -> float:
    """Return the adjusted Rand index of clusters and hospitals; 0 if there is only one cluster with cases."""
    names = sorted({c for own in counts.values() for c in own})
    if len(names) < 2:
        return 0.0
    return rand_index(np.array([[own.get(c, 0.0) for c in names] for own in counts.values()]).reshape(len(counts), -1))
