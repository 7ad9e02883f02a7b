"""Which sites take part in a round."""

from collections.abc import Sequence

import numpy as np

from polysite.payload import SiteId


def cohort(sites: Sequence[SiteId], share: float, seed: int, round: int) -> tuple[SiteId, ...]:
    """A random share of the sites, at least one, fixed by (seed, round).

    >>> cohort(["a", "b", "c"], 1.0, seed=0, round=7)
    ('a', 'b', 'c')
    >>> len(cohort(["a", "b", "c", "d"], 0.5, seed=0, round=7))
    2
    """
    count = max(1, round_half_up(share * len(sites)))
    chosen = np.random.default_rng([seed, round]).permutation(len(sites))[:count]
    return tuple(sites[i] for i in sorted(chosen))


def round_half_up(x: float) -> int:
    return int(x + 0.5)
