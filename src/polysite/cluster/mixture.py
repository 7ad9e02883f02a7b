"""Clusters of cases from their radiomic features: scaled, projected, and a mixture of Gaussians.

Paper: Manthe, Duffner and Lartizien, Whole-brain radiomics for clustered federated personalization, MIDL 2023

    s_r = clip((f_r - low_r) / (high_r - low_r), 0, 1),  low and high: the 2nd and the 98th percentile     (equation 1)
    x   = A (s - m),                                     principal components
    cluster(f) = argmax_k  log w_k + log N(x; mu_k, S)   one covariance S for all components

A feature that is the same in (nearly) all cases is scaled to zero. The mixture consists of a few plain arrays: a
payload brings it to every site, and every site assigns a case to the same cluster, the one that scikit-learn assigns.

``polysite.cluster.pooled_mixture`` fits the mixture if all cases are in one place, and
``polysite.cluster.federated_mixture`` if they are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError, DataError
from polysite.tree import Tree

Values = NDArray[np.float64]
Labels = NDArray[np.intp]

CONSTANT = 1e-7  # relative spread between the percentiles below which a feature counts as constant
FLAT = 1e-10  # share of the first principal component's variance below which a component is rounding error


@dataclass(frozen=True)
class Settings:
    """Settings of the fit. The paper takes 20 restarts and seed 6; its other values are the defaults.

    Args:
        percentiles: Percentiles of a feature that are scaled to 0 and 1, two rising numbers from 0 to 100.
        dimensions: Principal components, at least 1; fewer if the cases vary in fewer dimensions.
        components: Number of clusters, at least 1; of several numbers, the one with the least BIC is used.
        restarts: Fits for every number of components, at least 1; the likeliest is kept.
        reg: Value added to the variances, more than 0.
        tolerance: A fit has converged if its mean log-likelihood changes less than this, more than 0.
        iterations: Largest number of iterations of a fit, at least 1.
        seed: Seed of the initialisation.
        starts: Starts of the fits: shared, which a federated fit and a pooled one compute alike, or kmeans, those of
            scikit-learn, for which all cases must be in one place.
    """

    percentiles: tuple[float, float] = (2.0, 98.0)
    dimensions: int = 30
    components: int | tuple[int, ...] = 10
    restarts: int = 5
    reg: float = 1e-6
    tolerance: float = 1e-3
    iterations: int = 100
    seed: int = 0
    starts: Literal["shared", "kmeans"] = "shared"

    def __post_init__(self) -> None:
        if not isinstance(self.components, int):
            object.__setattr__(self, "components", tuple(self.components))  # a checkpoint stores tuples, not ranges
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ConfigError(f"percentiles = {self.percentiles} are two rising numbers from 0 to 100")
        if not self.candidates or min(self.candidates) < 1:
            raise ConfigError(f"components = {self.components} is a number of clusters or several, each at least 1")
        for name, least in {"dimensions": 1, "restarts": 1, "iterations": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least}")
        if not (self.reg > 0 and self.tolerance > 0):
            raise ConfigError(f"reg = {self.reg} and tolerance = {self.tolerance} must be above 0")

    @property
    def candidates(self) -> tuple[int, ...]:
        """Numbers of components to choose from, in ascending order.

        >>> Settings(components=(4, 2, 4)).candidates, Settings().candidates
        ((2, 4), (10,))
        """
        return (self.components,) if isinstance(self.components, int) else tuple(sorted(set(self.components)))


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture that assigns cases to clusters. F features, D dimensions, K components; all arrays are float64."""

    low: Values  # F: value that is scaled to 0
    high: Values  # F: value that is scaled to 1; equal to low if a feature is constant
    centre: Values  # F: mean of the scaled features
    axes: Values  # D x F: principal components
    weights: Values  # K
    means: Values  # K x D
    covariance: Values  # D x D

    def __post_init__(self) -> None:
        shapes = {f.name: getattr(self, f.name).shape for f in fields(self)}
        (count, dims), features = self.means.shape if self.means.ndim == 2 else (0, 0), self.low.size
        wanted = dict.fromkeys(("low", "high", "centre"), (features,)) | {"axes": (dims, features)}
        wanted |= {"weights": (count,), "means": (count, dims), "covariance": (dims, dims)}
        if shapes != wanted:
            raise DataError(f"arrays of shapes {shapes} are no mixture; they do not fit together")

    def arrays(self) -> dict[str, Values]:
        """Return the arrays by name, for a payload."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, arrays: Mapping[str, ArrayLike]) -> "Mixture":
        """Return the mixture of these arrays; refuse arrays that are not a mixture."""
        names = {f.name for f in fields(cls)}
        if set(arrays) != names:
            raise DataError(f"a mixture is made of {', '.join(sorted(names))}; these are {', '.join(sorted(arrays))}")
        values = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        if not all(np.isfinite(array).all() for array in values.values()):
            raise DataError("a mixture is made of finite numbers; some of these are not")
        return cls(**values)

    def transform(self, vectors: ArrayLike) -> Values:
        """Scale and project the features: cases x dimensions."""
        projected: Values = (scaled(checked(vectors, self.low.size), self.low, self.high) - self.centre) @ self.axes.T
        return projected

    def assign(self, vectors: ArrayLike) -> Labels:
        """Return the component of every case."""
        labels: Labels = np.argmax(self._joint(vectors), axis=1)
        return labels

    def probabilities(self, vectors: ArrayLike) -> Values:
        """Return the probability of every component for every case: cases x components."""
        return responsibilities(self._joint(vectors))[0]

    def likelihood(self, vectors: ArrayLike) -> float:
        """Return the sum of the cases' log-likelihoods."""
        return float(responsibilities(self._joint(vectors))[1].sum())

    def bic(self, vectors: ArrayLike) -> float:
        """Return the Bayesian information criterion on these cases; less is better."""
        return bic(self.likelihood(vectors), len(np.asarray(vectors)), *self.means.shape)

    def _joint(self, vectors: ArrayLike) -> Values:
        return joint(self.transform(vectors), self.weights, self.means, self.covariance)


def checked(vectors: ArrayLike, features: int | None = None) -> Values:
    """Return feature vectors as an array, one row per case; refuse others. Messages name neither case nor value."""
    try:
        rows = np.asarray(vectors, np.float64)
    except (TypeError, ValueError) as problem:
        raise DataError("the features of the cases are a table of numbers, a row for each case") from problem
    if rows.ndim != 2 or not rows.shape[1]:
        raise DataError(f"the features of the cases are a table, a row for each case; this is of shape {rows.shape}")
    if features is not None and rows.shape[1] != features:
        raise DataError(
            f"the cases have {rows.shape[1]} features, and the clusters are made of {features}; extract the same "
            "features of the same modalities at all sites"
        )
    if bad := int((~np.isfinite(rows)).any(1).sum()):
        raise DataError(f"{bad} of {len(rows)} cases have a feature that is not a finite number; mend or omit them")
    return rows


def scaled(vectors: Values, low: Values, high: Values) -> Values:
    """Scale every feature to [0, 1]; a constant one becomes 0."""
    spread = np.where(high > low, high - low, np.inf)
    clipped: Values = np.clip((vectors - low) / spread, 0.0, 1.0)
    return clipped


def flattened(low: Values, high: Values) -> Values:
    """Return ``high``, but ``low`` for features that are constant up to rounding."""
    return np.where(high - low > CONSTANT * np.maximum(abs(low), abs(high)), high, low)


def joint(points: Values, weights: Values, means: Values, covariance: Values) -> Values:
    """Return the logarithm of weight times density: cases x components."""
    from scipy.linalg import cholesky

    factor = cholesky(covariance, lower=True)
    constant = points.shape[1] * np.log(2 * np.pi) / 2 + np.log(factor.diagonal()).sum()
    logs: Values = np.log(weights) - constant - squared_mahalanobis(points, means, factor) / 2
    return logs


def squared_mahalanobis(points: Values, means: Values, factor: Values) -> Values:
    """Return squared Mahalanobis distances, points x means, from the lower Cholesky factor of the covariance."""
    from scipy.linalg import solve_triangular

    white, centres = (solve_triangular(factor, x.T, lower=True).T for x in (points, means))
    return squared_distances(white, centres)


def squared_distances(points: Values, centres: Values) -> Values:
    """Return squared distances, points x centres, one centre at a time to save memory."""
    return np.stack([np.square(points - centre).sum(1) for centre in centres], 1)


def responsibilities(logs: Values) -> tuple[Values, Values]:
    """Return the probabilities, cases x components, and the log-likelihood of every case."""
    from scipy.special import logsumexp

    likelihoods = logsumexp(logs, axis=1)
    return np.exp(logs - likelihoods[:, None]), likelihoods


def bic(likelihood: float, cases: float, components: int, dimensions: int) -> float:
    """Return the BIC of a mixture with one covariance: -2 log-likelihood + free parameters x log(cases)."""
    free = components - 1 + components * dimensions + dimensions * (dimensions + 1) / 2
    return float(-2 * likelihood + free * np.log(cases))


def enough(cases: int, settings: Settings) -> None:
    """Refuse more clusters than cases."""
    largest = max(settings.candidates)
    if cases < max(largest, 2):
        raise DataError(f"{cases} cases cannot be {largest} clusters; have more cases, or fewer components")


@dataclass(frozen=True)
class CaseClusters:
    """Clusters of cases by which an algorithm chooses a model, and how they were fitted."""

    mixture: Mixture
    fit: str  # "federated" or "pooled"
    bin_width: float  # of the grey levels of the radiomic features
    settings: Settings
    splits: tuple[str, ...] = ("train",)  # splits whose cases they were fitted to
    cases: float = 0.0  # number of these cases
    models: tuple[Tree, ...] = ()  # model of every cluster
    start: Tree = field(default_factory=dict)  # model that the clusters began from


def rank(variances: Values) -> int:
    """Return how many principal components, given their descending variances, exceed rounding error."""
    if not variances[0] > FLAT:
        raise DataError("no feature differs between the cases, so there is nothing to cluster")
    return int((variances > FLAT * variances[0]).sum())


def rand_index(table: Values) -> float:
    """Return the adjusted Rand index of two groupings from the number of cases in every pair of their groups.

    >>> rand_index(np.array([[3.0, 0.0], [0.0, 4.0]])), round(rand_index(np.array([[2.0, 2.0], [2.0, 2.0]])), 3)
    (1.0, -0.167)
    """

    def pairs(counts: Values) -> float:
        return float((counts * (counts - 1)).sum() / 2)

    both, one, other, every = (pairs(x) for x in (table, table.sum(1), table.sum(0), table.sum(keepdims=True)))
    chance = one * other / every if every else 0.0
    return (both - chance) / ((one + other) / 2 - chance) if (one + other) / 2 > chance else 1.0


def agreement_of(one: Labels, other: Labels) -> float:
    """Return the adjusted Rand index of two groupings of the same cases.

    >>> agreement_of(np.array([0, 0, 1]), np.array([5, 5, 2]))
    1.0
    """
    table = np.zeros((int(one.max()) + 1, int(other.max()) + 1))
    np.add.at(table, (one, other), 1.0)
    return rand_index(table)


def agreement(one: Mixture, other: Mixture, vectors: ArrayLike) -> dict[str, float]:
    """Return the agreement of two mixtures on some cases, for a report (federated versus pooled).

    ``rand``: adjusted Rand index of the clusters, 1 if they are the same. ``explained``, ``other_explained``: share of
    the scaled features' variance that the projection keeps. ``percentiles``: largest difference of a percentile,
    relative to the feature's spread in the other mixture; 1 for a feature that is constant in only one mixture.
    """
    spread = other.high - other.low
    moved = np.maximum(abs(one.low - other.low), abs(one.high - other.high))
    apart = np.where(spread > 0, moved / np.where(spread > 0, spread, 1.0), 0.0)
    apart[(one.high > one.low) != (spread > 0)] = 1.0
    return {
        "rand": agreement_of(one.assign(vectors), other.assign(vectors)),
        "explained": _explained(one, vectors),
        "other_explained": _explained(other, vectors),
        "percentiles": float(apart.max()),
    }


def _explained(mixture: Mixture, vectors: ArrayLike) -> float:
    total = float(scaled(checked(vectors, mixture.low.size), mixture.low, mixture.high).var(0).sum())
    return float(mixture.transform(vectors).var(0).sum()) / total if total else 1.0
