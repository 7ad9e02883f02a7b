"""Fit of the clusters of cases with the features of all cases in one place, as Manthe et al. do.

Percentiles and principal components are exact. ``starts = "shared"`` then takes the starts and iterations of
``polysite.cluster.federated_mixture``, so that both fits find the same clusters; ``starts = "kmeans"`` is the fit of
scikit-learn, whose k-means begins from cases.
"""

import warnings

import numpy as np
from numpy.typing import ArrayLike

from polysite.cluster import federated_mixture
from polysite.cluster.federated_mixture import RIVALS, State
from polysite.cluster.mixture import Mixture, Settings, Values, agreement_of, checked, enough, flattened, rank, scaled


def pooled(vectors: ArrayLike, settings: Settings = Settings()) -> State:
    """Return the finished fit to the features of all cases, one row per case."""
    from sklearn.decomposition import PCA

    rows = checked(vectors)
    enough(len(rows), settings)
    low, high = np.percentile(rows, settings.percentiles, axis=0)
    high = flattened(low, high)
    table = scaled(rows, low, high)
    with np.errstate(invalid="ignore"):  # without any variance, which ``rank`` refuses
        pca = PCA(min(settings.dimensions, *table.shape), svd_solver="full").fit(table)
    keep = rank(pca.explained_variance_)
    known = {"low": low, "high": high, "centre": pca.mean_, "axes": pca.components_[:keep]}
    kept = float(pca.explained_variance_ratio_[:keep].sum())
    if settings.starts == "kmeans":
        return _scikit_learn((table - pca.mean_) @ pca.components_[:keep].T, known, kept, settings)
    state = federated_mixture.projected(State(settings), known, pca.explained_variance_[:keep], kept)
    while state.mixture is None:
        asked = federated_mixture.ask(state)
        state = federated_mixture.learn(state, {"all": federated_mixture.answer(asked, rows)})
    return state


def _scikit_learn(points: Values, known: dict[str, Values], kept: float, settings: Settings) -> State:
    """Fit by scikit-learn's GaussianMixture; its restarts are taken one by one, to compare them."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    fits = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the best restart counts, converged or not
        for count in settings.candidates:
            stream = np.random.RandomState(settings.seed)  # as scikit-learn's own restarts draw from it
            options = {"covariance_type": "tied", "reg_covar": settings.reg, "tol": settings.tolerance}
            restarts = [
                GaussianMixture(count, max_iter=settings.iterations, random_state=stream, **options).fit(points)
                for _ in range(settings.restarts)
            ]
            fits[count] = sorted(restarts, key=lambda fit: -fit.lower_bound_)
    scores = {count: float(ordered[0].bic(points)) for count, ordered in fits.items()}
    best, *others = fits[min(scores, key=lambda count: scores[count])]
    mixture = Mixture(**known, weights=best.weights_, means=best.means_, covariance=best.covariances_)
    rivals = others[: max(1, settings.restarts // RIVALS)]
    found = [agreement_of(best.predict(points), fit.predict(points)) for fit in rivals]
    alike, cases = float(np.mean(found or [1.0])), float(len(points))
    return State(settings, cases=cases, kept=kept, bic=tuple(scores.items()), agreement=alike, mixture=mixture)
