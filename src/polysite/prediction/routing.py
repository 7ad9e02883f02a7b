"""The model of a new scan, chosen by its radiomic features: features, scaling, principal components, mixture, model.

A scan that is far from all clusters is unlike those that the clusters were fitted to; it gets the model that the
clusters began from.

A scan is far if one of two things holds (our choice, the paper has no such rule). More than half of its features lie
outside the range from the 2nd to the 98th percentile of the fitted cases: since scaling clips them, the mixture cannot
see how far. Or the squared Mahalanobis distance to the nearest cluster exceeds the 99.9 % quantile of new cases of that
cluster. With the covariance S of n cases around K means in D dimensions, v = n - K degrees of freedom, and a cluster of
share w (Hotelling's prediction region):

    (x - mu)' S^-1 (x - mu)  >  (1 + 1 / (w n))  D v / (v - D + 1)  F(0.999; D, v - D + 1)

With v < D the covariance says nothing about new cases, and only the first rule applies.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from polysite.cluster.mixture import Mixture, Values, squared_mahalanobis

QUANTILE = 0.999
OUTSIDE = 0.5  # share of the features that differ between the fitted cases
GLOBAL = -1  # route of a scan that is far from all clusters


def limits(mixture: Mixture, cases: float) -> Values:
    """Return for every cluster the squared distance beyond which a scan is far from it.

    Args:
        mixture: The clusters.
        cases: Number of cases that they were fitted to.
    """
    from scipy.stats import f

    count, dims = mixture.means.shape
    free = cases - count
    if free < dims:
        return np.full(count, np.inf)
    own = np.maximum(mixture.weights * cases, 1.0)  # a cluster without a case counts as one of a single case
    wide: Values = (1 + 1 / own) * dims * free / (free - dims + 1) * f.ppf(QUANTILE, dims, free - dims + 1)
    return wide


def distances(mixture: Mixture, vectors: Values) -> Values:
    """Return squared Mahalanobis distances, cases x clusters."""
    from scipy.linalg import cholesky

    return squared_mahalanobis(mixture.transform(vectors), mixture.means, cholesky(mixture.covariance, lower=True))


def outside(mixture: Mixture, vector: Values) -> float:
    """Return the share of a case's features that lie outside the range that is scaled, without constant features."""
    differ = mixture.high > mixture.low
    beyond = (vector < mixture.low) | (vector > mixture.high)
    return float(beyond[differ].mean())


@dataclass(frozen=True)
class Route:
    """The model of a scan: that of its cluster, or the global one (-1)."""

    model: int
    cluster: int  # the most probable one, whether near or far
    distance: float  # from the nearest cluster, or of the features from their ranges; above 1 is far

    def row(self, case: str) -> dict[str, Any]:
        """Return the row of a case in routes.csv."""
        model = "global" if self.model == GLOBAL else f"cluster {self.model}"
        return {"case": case, "cluster": self.cluster, "model": model, "distance": f"{self.distance:.4g}"}


def route(mixture: Mixture, cases: float, vector: Values) -> Route:
    """Choose the model of a case from its features."""
    cluster = int(mixture.assign(vector[None])[0])
    apart = max(
        float((distances(mixture, vector[None])[0] / limits(mixture, cases)).min()), outside(mixture, vector) / OUTSIDE
    )
    return Route(GLOBAL if apart > 1 else cluster, cluster, apart)
