"""Clusters of cases from their radiomic features: scaled, projected, and a mixture of Gaussians.

Paper: Manthe, Duffner and Lartizien, Whole-brain radiomics for clustered federated personalization, MIDL 2023

    s_r = clip((f_r - low_r) / (high_r - low_r), 0, 1),  low and high: the 2nd and the 98th percentile     (equation 1)
    x   = A (s - m),                                     principal components
    cluster(f) = argmax_k  log w_k + log N(x; mu_k, S)   one covariance S for all components

A feature that is the same in (nearly) all cases is scaled to zero. The mixture is a handful of plain arrays: it goes to
every site in a payload and gives every case the same cluster everywhere, the one that scikit-learn would give it.

``pooled`` fits it where all cases are in one place. ``polysite.cluster.federated_mixture`` fits it where they are not.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError, DataError

Values = NDArray[np.float64]
Labels = NDArray[np.intp]

CONSTANT = 1e-7  # of its size: a feature that varies less than this, from percentile to percentile, only rounds
FLAT = 1e-10  # of the variance of the first principal component: one with less variance only rounds


@dataclass(frozen=True)
class Settings:
    """How the mixture is fitted; the defaults are the paper's, where it says."""

    percentiles: tuple[float, float] = (2.0, 98.0)
    dimensions: int = 30  # principal components; fewer if the cases differ in fewer
    components: int | tuple[int, ...] = 10  # clusters; of several numbers, the one with the least BIC
    restarts: int = 5  # of every number of components; the likeliest is kept
    reg: float = 1e-6  # added to the variances
    tolerance: float = 1e-3  # a fit has converged if its mean log-likelihood changes less than this
    iterations: int = 100  # of a fit, at most
    fewest: int = 5  # federated: a site with fewer cases tells nothing, and of fewer in a component only how many
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.components, int):
            object.__setattr__(self, "components", tuple(self.components))  # of a range, say: a checkpoint takes tuples
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ConfigError(f"percentiles = {self.percentiles} are two rising numbers from 0 to 100")
        if not self.candidates or min(self.candidates) < 1:
            raise ConfigError(f"components = {self.components} is a number of clusters or several, each at least 1")
        for name, least in {"dimensions": 1, "restarts": 1, "iterations": 1, "fewest": 0, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least}")
        if not (self.reg > 0 and self.tolerance > 0):
            raise ConfigError(f"reg = {self.reg} and tolerance = {self.tolerance} must be above 0")

    @property
    def candidates(self) -> tuple[int, ...]:
        """The numbers of components to choose from, rising.

        >>> Settings(components=(4, 2, 4)).candidates, Settings().candidates
        ((2, 4), (10,))
        """
        return (self.components,) if isinstance(self.components, int) else tuple(sorted(set(self.components)))


@dataclass(frozen=True, eq=False)
class Mixture:
    """From the features of a case to its cluster. F features, D dimensions, K components; all arrays are float64."""

    low: Values  # F: what is scaled to 0
    high: Values  # F: what is scaled to 1; equal to low where a feature is constant
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
        """By name, as they travel."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, arrays: Mapping[str, ArrayLike]) -> "Mixture":
        """The way back from ``arrays``; what is no mixture is refused."""
        names = {f.name for f in fields(cls)}
        if set(arrays) != names:
            raise DataError(f"a mixture is made of {', '.join(sorted(names))}; these are {', '.join(sorted(arrays))}")
        found = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        if not all(np.isfinite(array).all() for array in found.values()):
            raise DataError("a mixture is made of finite numbers; some of these are not")
        return cls(**found)

    def transform(self, vectors: ArrayLike) -> Values:
        """Cases x dimensions: scaled and projected."""
        projected: Values = (scaled(checked(vectors, self.low.size), self.low, self.high) - self.centre) @ self.axes.T
        return projected

    def assign(self, vectors: ArrayLike) -> Labels:
        """The component that every case belongs to."""
        labels: Labels = np.argmax(self._joint(vectors), axis=1)
        return labels

    def probabilities(self, vectors: ArrayLike) -> Values:
        """Cases x components: how probable it is that a case belongs to each."""
        return responsibilities(self._joint(vectors))[0]

    def likelihood(self, vectors: ArrayLike) -> float:
        """The sum of the cases' log-likelihoods."""
        return float(responsibilities(self._joint(vectors))[1].sum())

    def bic(self, vectors: ArrayLike) -> float:
        """Bayes' information criterion on these cases: less is better."""
        return bic(self.likelihood(vectors), len(np.asarray(vectors)), *self.means.shape)

    def _joint(self, vectors: ArrayLike) -> Values:
        return joint(self.transform(vectors), self.weights, self.means, self.covariance)


def checked(vectors: ArrayLike, features: int | None = None) -> Values:
    """Vectors of features, a row for each case, if they can be used; a message names neither case nor value."""
    try:
        found = np.asarray(vectors, np.float64)
    except (TypeError, ValueError) as problem:
        raise DataError("the features of the cases are a table of numbers, a row for each case") from problem
    if found.ndim != 2 or not found.shape[1]:
        raise DataError(f"the features of the cases are a table, a row for each case; this is of shape {found.shape}")
    if features is not None and found.shape[1] != features:
        raise DataError(
            f"the cases have {found.shape[1]} features, and the clusters are made of {features}; extract the same "
            "features of the same modalities at all sites"
        )
    if bad := int((~np.isfinite(found)).any(1).sum()):
        raise DataError(f"{bad} of {len(found)} cases have a feature that is not a finite number; mend or omit them")
    return found


def scaled(vectors: Values, low: Values, high: Values) -> Values:
    """To [0, 1], feature by feature; a constant one to 0."""
    spread = np.where(high > low, high - low, np.inf)
    clipped: Values = np.clip((vectors - low) / spread, 0.0, 1.0)
    return clipped


def flattened(low: Values, high: Values) -> Values:
    """``high``, but equal to ``low`` where what is between them is rounding."""
    return np.where(high - low > CONSTANT * np.maximum(abs(low), abs(high)), high, low)


def joint(points: Values, weights: Values, means: Values, covariance: Values) -> Values:
    """Cases x components: the logarithm of weight times density."""
    from scipy.linalg import cholesky, solve_triangular

    factor = cholesky(covariance, lower=True)
    white, centres = (solve_triangular(factor, x.T, lower=True).T for x in (points, means))
    constant = points.shape[1] * np.log(2 * np.pi) / 2 + np.log(factor.diagonal()).sum()
    logs: Values = np.log(weights) - constant - squared_distances(white, centres) / 2
    return logs


def squared_distances(points: Values, centres: Values) -> Values:
    """Points x centres; a centre at a time, as all at once may not fit into memory."""
    return np.stack([np.square(points - centre).sum(1) for centre in centres], 1)


def responsibilities(logs: Values) -> tuple[Values, Values]:
    """Cases x components, every row of sum 1; and the log-likelihood of every case."""
    from scipy.special import logsumexp

    likelihoods = logsumexp(logs, axis=1)
    return np.exp(logs - likelihoods[:, None]), likelihoods


def bic(likelihood: float, cases: float, components: int, dimensions: int) -> float:
    """Of a mixture with one covariance: -2 log-likelihood + free numbers x log(cases)."""
    free = components - 1 + components * dimensions + dimensions * (dimensions + 1) / 2
    return float(-2 * likelihood + free * np.log(cases))


def enough(cases: int, settings: Settings) -> None:
    """Refuse more clusters than cases."""
    most = max(settings.candidates)
    if cases < max(most, 2):
        raise DataError(f"{cases} cases cannot be {most} clusters; have more cases, or fewer components")


@dataclass(frozen=True)
class CaseClusters:
    """Clusters of cases by which an algorithm chooses a model, and how they were fitted."""

    mixture: Mixture
    fit: str  # "federated" or "pooled"
    bin_width: float  # of the grey levels of the radiomic features
    settings: Settings


def pooled(vectors: ArrayLike, settings: Settings = Settings()) -> Mixture:
    """The mixture of cases that are all here, by scikit-learn."""
    from sklearn.decomposition import PCA
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    found = checked(vectors)
    enough(len(found), settings)
    low, high = np.percentile(found, settings.percentiles, axis=0)
    high = flattened(low, high)
    table = scaled(found, low, high)
    with np.errstate(invalid="ignore"):  # shares of no variance at all, which is refused next
        pca = PCA(min(settings.dimensions, *table.shape), svd_solver="full").fit(table)
    keep = rank(pca.explained_variance_)
    points = (table - pca.mean_) @ pca.components_[:keep].T
    fits = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the best of some restarts, as far as it got
        for count in settings.candidates:
            fit = GaussianMixture(
                count,
                covariance_type="tied",
                n_init=settings.restarts,
                reg_covar=settings.reg,
                tol=settings.tolerance,
                max_iter=settings.iterations,
                random_state=settings.seed,
            )
            fits.append(fit.fit(points))
    best = min(fits, key=lambda fit: fit.bic(points))
    return Mixture(low, high, pca.mean_, pca.components_[:keep], best.weights_, best.means_, best.covariances_)


def rank(variances: Values) -> int:
    """How many principal components, given their falling variances, are more than rounding."""
    if not variances[0] > FLAT:
        raise DataError("no feature differs between the cases, so there is nothing to cluster")
    return int((variances > FLAT * variances[0]).sum())


def agreement(one: Mixture, other: Mixture, vectors: ArrayLike) -> dict[str, float]:
    """How alike two mixtures are on some cases: what a report prints as federated versus pooled.

    ``rand``: adjusted Rand index of the clusters, 1 if they are the same. ``explained``, ``other_explained``: the
    share of the scaled features' variance that is left after the projection. ``percentiles``: the largest difference
    of a percentile, as a share of the feature's spread in the other mixture; a feature that is constant in one of them
    alone counts as 1.
    """
    from sklearn.metrics import adjusted_rand_score

    spread = other.high - other.low
    moved = np.maximum(abs(one.low - other.low), abs(one.high - other.high))
    apart = np.where(spread > 0, moved / np.where(spread > 0, spread, 1.0), 0.0)
    apart[(one.high > one.low) != (spread > 0)] = 1.0
    return {
        "rand": float(adjusted_rand_score(other.assign(vectors), one.assign(vectors))),
        "explained": _explained(one, vectors),
        "other_explained": _explained(other, vectors),
        "percentiles": float(apart.max()),
    }


def _explained(mixture: Mixture, vectors: ArrayLike) -> float:
    total = float(scaled(checked(vectors, mixture.low.size), mixture.low, mixture.high).var(0).sum())
    return float(mixture.transform(vectors).var(0).sum()) / total if total else 1.0
