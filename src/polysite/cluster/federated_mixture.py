"""Federated fit of the clusters of cases: no case leaves its site.

The model is the mixture of ``polysite.cluster.mixture``; Manthe et al. pool the features instead. The server sends a
request, every site answers with sums over its cases, and the server uses only the sums over all sites.

    stage     exchanges   a site answers                                         the server learns
    moments   1           n, sum f, sum f^2 of every feature                     where the percentiles can be
    counts    2 to 4      cases at or below 257 edges in 4 brackets per feature  percentiles, to 1e-4 of the spread
    products  1           n, sum s, sum s s' of the scaled features              the principal components, exactly
    cells     2 to 6      n, sum x x'; of every cell its n, sum x, sum x^2       a codebook of the projected cases
    mixtures  until done  n, sum x x'; of every component of every fit           an iteration of EM, with
                          N_k = sum r_k, sum r_k x; the log-likelihood           S = sum x x'/n - sum_k N_k mu_k mu_k'/n

The codebook is that of Linde, Buzo and Gray (1980): cells are split along their longest axis until there are four for
each component. The server runs k-means on the cells to start the fits: one fit for every restart and number of
components, all in the same exchanges. A fit ends if its mean log-likelihood changes less than ``tolerance``, or if at
its pace it could not catch up with the best in ten more exchanges. The fit with the least BIC is chosen.

A site may be absent from any exchange. The exchange then covers exactly the cases of the other sites, since the server
stores nothing about a site: percentiles may move to those of the others, an iteration of EM increases the likelihood of
their cases, and fits are compared on the same cases. If sites come and go, the likelihood may never converge; EM then
ends after ``iterations``.

What leaves a site. A site with fewer than ``fewest`` cases sends nothing; its cases can still be assigned to clusters.
A site drops cells and components with fewer than ``fewest`` of its cases, the smallest first, and counts these cases to
the next nearest, so that no sum is over fewer cases. (Sums that are merely withheld would contradict the products, and
S could collapse.) A component therefore moves by the sites that have enough cases of it; without any such site it stays
at its start. ``fewest = 0`` turns both rules off. The fit is then the EM of scikit-learn, number for number, but the
sum of a component with a single case is that case.

What a curious server could still learn from the answers of each site. Counts reveal values of single features in single
cases, without their owner: to 1/256 of the first bracket everywhere, and finely next to both percentiles (which, with
fewer than 51 cases at all sites, are next to the smallest and the largest value). The products of a site with fewer
cases than features determine its cases up to a rotation, which is little protection for very few cases. The sums of a
site in two exchanges, or in two fits, differ by the cases that moved to another component, and many such differences
may reveal a case; so may the difference between two runs if the site has one more case in the second. None of this is
possible if the server sees only the sum of the answers. It needs no more: every answer may go through secure
aggregation.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2

import numpy as np
from numpy.typing import ArrayLike

from polysite.cluster import quantiles
from polysite.cluster.mixture import (
    CONSTANT,
    Mixture,
    Settings,
    Values,
    bic,
    checked,
    enough,
    flattened,
    joint,
    rank,
    responsibilities,
    scaled,
    squared_distances,
)
from polysite.errors import DataError
from polysite.payload import SiteId

Arrays = dict[str, Values]

STAGES = {  # names of a site's answers in each stage
    "moments": {"cases", "sums", "squares"},
    "counts": {"cases", "counts"},
    "products": {"cases", "sums", "products"},
    "cells": {"cases", "products", "counts", "sums", "squares"},
    "mixtures": {"cases", "products", "counts", "sums", "likelihoods"},
}
COUNTINGS = 4  # exchanges at most; the last brackets are then 2e-10 of the first
CELLS = 4  # per component
ROUNDS = 2  # exchanges with all cells, so that the cells of the last split move to their cases
HALF = 0.8  # deviations between the mean of a normal distribution and that of either half, sqrt(2 / pi)
PACE = 10  # exchanges in which a fit that is behind must be able to catch up
DEAD = 1e-9  # cases: a component with fewer has no mean and stays in place


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The server's state."""

    settings: Settings
    stage: str = "moments"
    known: Mapping[str, Values] = field(default_factory=dict)  # arrays that the sites get in this stage
    exchanges: int = 0  # so far
    steps: int = 0  # exchanges of this stage
    likelihoods: Values = field(default_factory=lambda: np.empty(0))  # mean over cases, by fit
    converged: Values = field(default_factory=lambda: np.empty(0))  # 1 for a converged fit
    bic: tuple[tuple[int, float], ...] = ()  # of every number of components, when done
    mixture: Mixture | None = None


def begin(settings: Settings = Settings()) -> State:
    """Return the state before the first exchange."""
    return State(settings)


def ask(state: State) -> Arrays:
    """Return the request of the next exchange, the same for all sites."""
    stage, fewest = list(STAGES).index(state.stage), state.settings.fewest
    return {"stage": np.array([float(stage)]), "fewest": np.array([float(fewest)]), **state.known}


def done(state: State) -> Mixture | None:
    """Return the mixture once it is fitted, else None."""
    return state.mixture


def federated(vectors: Mapping[SiteId, ArrayLike], settings: Settings = Settings()) -> State:
    """Run all exchanges with sites that are all in this process."""
    state = begin(settings)
    while done(state) is None:
        asked = ask(state)
        state = learn(state, {site: answer(asked, cases) for site, cases in vectors.items()})
    return state


# At a site.


def answer(asked: Mapping[str, Values], vectors: ArrayLike, fewest: float = 0) -> Arrays:
    """Return a site's answer: sums over its cases, or nothing if it has too few.

    Args:
        asked: Request of the server.
        vectors: Features of the site's cases, one row per case.
        fewest: Smallest number of cases that the site itself insists on.
    """
    stage, fewest = list(STAGES)[int(asked["stage"][0])], max(fewest, float(asked["fewest"][0]))
    rows = checked(vectors, asked["low"].shape[-1] if "low" in asked else None)
    if len(rows) < max(fewest, 1):
        return {}
    cases = np.array([float(len(rows))])
    if stage == "moments":
        with np.errstate(over="ignore"):  # the server refuses infinite sums
            return {"cases": cases, "sums": rows.sum(0), "squares": np.square(rows).sum(0)}
    if stage == "counts":
        return {"cases": cases, "counts": quantiles.counts(rows, asked["low"], asked["high"])}
    table = scaled(rows, asked["low"], asked["high"])
    if stage == "products":
        return {"cases": cases, "sums": table.sum(0), "products": table.T @ table}
    points = (table - asked["centre"]) @ asked["axes"].T
    sums = _of_cells(points, asked["cells"], fewest) if stage == "cells" else _of_fits(points, asked, fewest)
    return {"cases": cases, "products": points.T @ points, **sums}


def _of_cells(points: Values, cells: Values, fewest: float) -> Arrays:
    member = _shared(-squared_distances(points, cells), fewest, lambda near: np.eye(len(cells))[near.argmax(1)])
    return {"counts": member.sum(0), "sums": member.T @ points, "squares": member.T @ points**2}


def _of_fits(points: Values, asked: Mapping[str, Values], fewest: float) -> Arrays:
    counts, sums, likelihoods = [], [], []
    for weights, means, covariance in _fits(asked):
        logs = joint(points, weights, means, covariance)
        share = _shared(logs, fewest, lambda likely: responsibilities(likely)[0])
        counts.append(share.sum(0))
        sums.append(share.T @ points)
        likelihoods.append(responsibilities(logs)[1].sum())
    return {"counts": np.concatenate(counts), "sums": np.concatenate(sums), "likelihoods": np.array(likelihoods)}


def _shared(near: Values, fewest: float, share: Callable[[Values], Values]) -> Values:
    """Return the share of every case in each group, cases x groups.

    Groups of too few cases are dropped, the smallest first, and their cases go to the next nearest group.
    """
    near = near.copy()
    while True:
        shares = share(near)
        counts = shares.sum(0)
        small = np.flatnonzero((counts < fewest) & np.isfinite(near[0]))
        if not len(small) or np.isfinite(near[0]).sum() == 1:
            return shares
        near[:, small[counts[small].argmin()]] = -np.inf


# At the server.


def learn(state: State, answers: Mapping[SiteId, Mapping[str, Values]]) -> State:
    """Return the state after an exchange with the sites that answered. Without any answer, the request is repeated."""
    if state.mixture is not None:
        return state
    if not answers:
        return replace(state, exchanges=state.exchanges + 1)
    steps: dict[str, Callable[[State, Arrays], State]] = {
        "moments": _moments,
        "counts": _counts,
        "products": _products,
        "cells": _cells,
        "mixtures": _mixtures,
    }
    new = steps[state.stage](state, _summed(state, answers))
    return replace(new, exchanges=state.exchanges + 1, steps=state.steps + 1 if new.stage == state.stage else 0)


def _summed(state: State, answers: Mapping[SiteId, Mapping[str, Values]]) -> Arrays:
    """Return the sum of the answers in the order of the sites' names, so that arrival order has no effect."""
    described = {site: answers[site] for site in sorted(answers) if answers[site]}
    if not described:
        raise DataError(
            f"none of {len(answers)} sites has {state.settings.fewest} cases (fewest), so none may describe its cases"
        )
    shapes = {name: array.shape for name, array in next(iter(described.values())).items()}
    for site, arrays in described.items():
        if set(arrays) != STAGES[state.stage]:
            raise DataError(f"site {site!r} answers {sorted(arrays)}; it was asked for {sorted(STAGES[state.stage])}")
        for name, array in arrays.items():
            if array.shape != shapes[name]:
                raise DataError(
                    f"site {site!r} answers with {name} of shape {array.shape}, and {next(iter(described))!r} with "
                    f"{shapes[name]}; extract the same features of the same modalities at all sites"
                )
            if not np.isfinite(array).all():
                raise DataError(f"site {site!r} answers with {name} that are not finite; its features are too large")
    return {name: np.sum([arrays[name] for arrays in described.values()], axis=0) for name in shapes}


def _moments(state: State, total: Arrays) -> State:
    cases = float(total["cases"][0])
    enough(int(cases), state.settings)
    low, high = quantiles.brackets(cases, total["sums"], total["squares"], state.settings.percentiles)
    return replace(state, stage="counts", known={"low": low, "high": high})


def _counts(state: State, total: Arrays) -> State:
    low, high = state.known["low"], state.known["high"]
    cases = float(total["cases"][0])
    left, right, percentiles = quantiles.narrowed(low, high, total["counts"], cases, state.settings.percentiles)
    fine = quantiles.resolved(left, right, percentiles, CONSTANT)
    if not fine.all() and state.steps + 1 < COUNTINGS:  # brackets that are fine enough are not narrowed
        return replace(state, known={"low": np.where(fine, low, left), "high": np.where(fine, high, right)})
    least, largest = percentiles
    bins = (high - low).max(0) / quantiles.BINS
    largest = np.where(largest - least > 4 * bins, largest, least)  # closer ones may be equal
    return replace(state, stage="products", known={"low": least, "high": flattened(least, largest)})


def _products(state: State, total: Arrays) -> State:
    cases = float(total["cases"][0])
    enough(int(cases), state.settings)
    centre = total["sums"] / cases
    covariance = (total["products"] - cases * np.outer(centre, centre)) / (cases - 1)
    variances, vectors = np.linalg.eigh(covariance)
    variances, axes = variances[::-1], vectors.T[::-1]
    keep = min(rank(variances), state.settings.dimensions, int(cases))
    largest = axes[np.arange(keep), abs(axes[:keep]).argmax(1)]
    axes = axes[:keep] * np.sign(largest)[:, None]  # scikit-learn's choice of sign
    cells = np.zeros((1, keep))
    for axis in range(min(keep, 3)):  # the first splits need no exchange: these variances are known
        step = HALF * np.sqrt(variances[axis]) * np.eye(keep)[axis]
        cells = np.concatenate([cells - step, cells + step])
    return replace(state, stage="cells", known={**state.known, "centre": centre, "axes": axes, "cells": cells})


def _cells(state: State, total: Arrays) -> State:
    held = total["counts"] > 0
    counts = total["counts"][held]
    means, squares = (total[name][held] / counts[:, None] for name in ("sums", "squares"))
    wanted = CELLS * max(state.settings.candidates)
    splits = max(0, ceil(log2(wanted / 2 ** min(means.shape[1], 3))))
    if state.steps < splits:
        cells = _split(counts, means, np.maximum(squares - means**2, 0.0), wanted - len(means))
        return replace(state, known={**state.known, "cells": cells})
    if state.steps < splits + ROUNDS - 1:
        return replace(state, known={**state.known, "cells": means})
    known = {name: array for name, array in state.known.items() if name != "cells"}
    known |= _started(state.settings, counts, means, total["products"])
    fits = len(known["sizes"])
    return replace(state, stage="mixtures", known=known, likelihoods=np.full(fits, -np.inf), converged=np.zeros(fits))


def _split(counts: Values, means: Values, variances: Values, more: int) -> Values:
    """Split the cells with the largest scatter in two, at most ``more`` of them."""
    scatter = counts * variances.sum(1)
    wide = np.argsort(-scatter, kind="stable")[: max(more, 0)]
    wide = wide[scatter[wide] > 0]
    axis = variances[wide].argmax(1)
    step = HALF * np.sqrt(variances[wide, axis])[:, None] * np.eye(means.shape[1])[axis]
    return np.concatenate([np.delete(means, wide, 0), means[wide] - step, means[wide] + step])


def _started(settings: Settings, counts: Values, means: Values, products: Values) -> Arrays:
    """Start a fit for every number of components and restart by k-means of the cells; the first by the best of ten."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    fits = []
    for count in settings.candidates:
        for restart in range(settings.restarts):
            labels = np.arange(len(means))  # fewer cells than components: the others have no case
            if len(means) > count:
                means_of = KMeans(count, n_init=1 if restart else 10, random_state=settings.seed + restart)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)  # for identical cells
                    labels = means_of.fit(means, sample_weight=counts).labels_
            share = np.eye(count)[labels] * counts[:, None]
            fits.append(
                _maximised(share.sum(0), share.T @ means, products, np.zeros((count, means.shape[1])), settings)
            )
    return _joined(fits)


Fit = tuple[Values, Values, Values]  # weights, means, covariance


def _maximised(counts: Values, sums: Values, products: Values, before: Values, settings: Settings) -> Fit:
    """Compute the M-step as scikit-learn does; but a component without a case stays in place."""
    counts = counts + 10 * np.finfo(float).eps
    means = np.where((counts > DEAD)[:, None], sums / counts[:, None], before)
    covariance = (products - (counts * means.T) @ means) / counts.sum() + settings.reg * np.eye(len(products))
    values, vectors = np.linalg.eigh(covariance)
    if values[0] < settings.reg / 2:  # withheld sums make means that differ from those of the products
        covariance = (vectors * np.maximum(values, settings.reg)) @ vectors.T
    return counts / counts.sum(), means, covariance


def _joined(fits: list[Fit]) -> Arrays:
    """Stack all fits: the numbers of components, weights, means and covariances."""
    weights, means, covariances = (np.concatenate(arrays) for arrays in zip(*fits, strict=True))
    sizes = np.array([float(len(fit[0])) for fit in fits])
    return {"sizes": sizes, "weights": weights, "means": means, "covariances": covariances}


def _fits(known: Mapping[str, Values]) -> Iterator[Fit]:
    weights, means = (_apart(known, known[name]) for name in ("weights", "means"))
    return zip(weights, means, np.split(known["covariances"], len(known["sizes"])), strict=True)


def _apart(known: Mapping[str, Values], stacked: Values) -> list[Values]:
    """Split a stacked array by fit."""
    return np.split(stacked, np.cumsum(known["sizes"])[:-1].astype(int))


def _mixtures(state: State, total: Arrays) -> State:
    cases, settings, known = float(total["cases"][0]), state.settings, state.known
    likelihoods = total["likelihoods"] / cases
    change = likelihoods - state.likelihoods
    converged = np.maximum(state.converged, abs(change) < settings.tolerance)
    scores = np.array(
        [bic(x * cases, cases, *means.shape) for x, (_, means, _) in zip(likelihoods, _fits(known), strict=True)]
    )
    behind = scores - 2 * cases * PACE * np.maximum(change, 0.0) > scores.min()
    state = replace(state, likelihoods=likelihoods, converged=converged)
    if ((converged > 0) | behind).all() or state.steps + 1 >= settings.iterations:
        return _chosen(state, scores)
    counts, sums = (_apart(known, total[name]) for name in ("counts", "sums"))
    fits = [
        _maximised(n, x, total["products"], means, settings)
        for n, x, (_, means, _) in zip(counts, sums, _fits(known), strict=True)
    ]
    return replace(state, known={**known, **_joined(fits)})


def _chosen(state: State, scores: Values) -> State:
    """Choose the fit with the least BIC; among equal numbers of components, that is the likeliest."""
    sizes, best = state.known["sizes"], int(scores.argmin())
    least = tuple((count, float(scores[sizes == count].min())) for count in state.settings.candidates)
    weights, means, covariance = list(_fits(state.known))[best]
    scale = {name: state.known[name] for name in ("low", "high", "centre", "axes")}
    return replace(state, bic=least, mixture=Mixture(**scale, weights=weights, means=means, covariance=covariance))
