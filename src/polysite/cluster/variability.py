"""How much a clustering of cases depends on the seed of its fit and on the cases that it was fitted to.

Every measure is an adjusted Rand index over all cases: 1 if two fits give the same clusters, 0 if they agree by chance.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from polysite.cluster.federated_mixture import mixture_of
from polysite.cluster.mixture import Settings, agreement_of, checked
from polysite.cluster.pooled_mixture import pooled


@dataclass(frozen=True)
class Variability:
    """Adjusted Rand indices of repeated fits with the first."""

    seeds: tuple[float, ...]  # fits with other seeds
    bootstraps: tuple[float, ...]  # fits to cases that were drawn with replacement


def variability(vectors: ArrayLike, settings: Settings, repeats: int = 10) -> Variability:
    """Fit again with ``repeats`` other seeds and to as many bootstrap samples of the cases; compare with the fit.

    Scaling and principal components are fitted again, too. All fits have the number of components of the first.
    """
    rows = checked(vectors)
    first = mixture_of(pooled(rows, settings))
    settings, labels = replace(settings, components=len(first.weights)), first.assign(rows)
    rng = np.random.default_rng([settings.seed, len(rows)])
    samples = [rng.integers(len(rows), size=len(rows)) for _ in range(repeats)]
    others = [pooled(rows, replace(settings, seed=settings.seed + 1 + k)) for k in range(repeats)]
    again = [pooled(rows[sample], settings) for sample in samples]
    seeds, bootstraps = (
        tuple(agreement_of(labels, mixture_of(fit).assign(rows)) for fit in fits) for fits in (others, again)
    )
    return Variability(seeds, bootstraps)
