"""Test whether subgroups of cases differ, within hospitals.

Values are aligned (the mean of their hospital is subtracted) and ranked over all cases; the statistic is that of
Kruskal and Wallis. Its distribution comes from permutations of the subgroups within every hospital (Hodges and Lehmann
1962, Rank methods for combination of independent experiments in analysis of variance).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 9999
CHUNK = 1 << 22  # permuted cases in memory at a time


class SubgroupTest(NamedTuple):
    """A p-value, and the smallest that these numbers of cases allow."""

    p: float
    smallest: float


def subgroup_test(
    values: Sequence[float], groups: Sequence[str], strata: Sequence[str], draws: int = DRAWS, seed: int = 0
) -> SubgroupTest:
    """Test whether the subgroups have the same values within every stratum.

    >>> subgroup_test([1, 2, 3, 7, 8, 9], ["a"] * 3 + ["b"] * 3, ["north"] * 6, draws=999).smallest
    0.1
    >>> subgroup_test([1, 2, 7, 8], ["a", "a", "b", "b"], ["north", "north", "south", "south"])
    SubgroupTest(p=1.0, smallest=1.0)
    """
    from scipy.stats import rankdata

    numbers, places = np.asarray(values, np.float64), np.unique(np.asarray(strata), return_inverse=True)[1]
    labels = np.unique(np.asarray(groups), return_inverse=True)[1]
    smallest = max(_smallest(labels, places), 1 / (draws + 1))
    if smallest == 1.0 or not numbers.size:
        return SubgroupTest(1.0, 1.0)
    means = np.bincount(places, numbers) / np.bincount(places)
    ranks = rankdata((numbers - means[places]).round(12))  # equal values stay equal after the subtraction
    sizes = np.bincount(labels)
    seen, reached, rng = _spread(labels[None], ranks, sizes)[0], 0, np.random.default_rng(seed)
    step = max(1, CHUNK // numbers.size)
    for start in range(0, draws, step):
        dealt = np.tile(labels, (min(step, draws - start), 1))
        for place in range(places.max() + 1):
            here = np.flatnonzero(places == place)
            dealt[:, here] = rng.permuted(dealt[:, here], axis=1)
        reached += int((_spread(dealt, ranks, sizes) >= seen * (1 - 1e-9)).sum())
    return SubgroupTest((1 + reached) / (1 + draws), smallest)


def _spread(labels: NDArray[np.int64], ranks: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return Kruskal and Wallis's sum of every row of labels: squared sums of centred ranks, over sizes."""
    centred = ranks - ranks.mean()
    total = np.zeros(len(labels))
    for group, size in enumerate(sizes):
        total += ((labels == group) @ centred) ** 2 / size
    return total


def _smallest(labels: NDArray[np.int64], places: NDArray[np.int64]) -> float:
    """Return the smallest p-value: with how many ways to deal the subgroups out within the strata, and two equal
    subgroups exchanged, none of which is more extreme."""
    ways = 0.0  # logarithm
    for place in range(int(places.max(initial=-1)) + 1):
        counts = Counter(labels[places == place].tolist()).values()
        ways += math.lgamma(sum(counts) + 1) - sum(math.lgamma(n + 1) for n in counts)
    sizes = {group: tuple(np.bincount(places[labels == group], minlength=places.max() + 1)) for group in set(labels)}
    alike = math.prod(math.factorial(n) for n in Counter(sizes.values()).values())
    return min(1.0, round(alike * math.exp(-ways), 12))
