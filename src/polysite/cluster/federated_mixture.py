"""Federated fit of the clusters of cases, from sums over the cases of every site.

The model is the mixture of ``polysite.cluster.mixture``; Manthe et al. pool the features instead. The server sends a
request, every site answers with sums over its cases, and the server uses only the sums over all sites.

    stage     exchanges   a site answers                                         the server learns
    moments   1           n, sum f, sum f^2 of every feature                     where the percentiles can be
    counts    2 to 4      cases at or below 257 edges in 4 brackets per feature  percentiles, to 1e-4 of the spread
    products  1           n, sum s, sum s s' of the scaled features              the principal components, exactly
    groups    4 to 12     n, sum x x'; of every group of every start its         an iteration of k-means
                          n, sum x, sum x^2
    mixtures  until done  n, sum x x'; of every component of every fit           an iteration of EM, with
                          N_k = sum r_k, sum r_k x; the log-likelihood           S = sum x x'/n - sum_k N_k mu_k mu_k'/n
    check     1 or none   cases in every pair of components of the best fit      whether restarts agree
                          and of a runner-up

There is one start for every restart and number of components, all in the same exchanges. For K components 3 K means are
drawn from N(0, C) with the seed (seed, restart, K), where C is the covariance of the scaled features. An iteration of
k-means moves them to the cases, K of them are drawn as in k-means++, by the cases that they stand for, k-means goes on
with these, and EM begins from its groups. An empty group is put into the widest one. Since a start follows from the
seed and from sums over all cases, it does not depend on how cases are dealt to sites:
``polysite.cluster.pooled_mixture`` begins from the same starts and finds the same clusters. Their likelihood is that of
scikit-learn's starts, on average (bench/clusters.py).

A fit ends if its mean log-likelihood changes less than ``tolerance``, or if at its pace it could not catch up with the
best of the same number of components in ten more exchanges. The fit with the least BIC is chosen.

A site may be absent from any exchange. The exchange then covers exactly the cases of the other sites, since the server
stores nothing about a site: percentiles may move to those of the others, an iteration of EM increases the likelihood of
their cases, and fits are compared on the same cases. If sites come and go, the likelihood may never converge; EM then
ends after ``iterations``.

The fit is the EM of scikit-learn, number for number. What leaves a site are the sums above, over as many cases as a
site has in a group: the sum of a component with a single case is that case. The server needs the sum over the
federation alone, which secure sums give it.

What else a curious server could learn from the answers of each site. Counts reveal values of single features in single
cases, without their owner: to 1/256 of the first bracket everywhere, and finely next to both percentiles (which, with
fewer than 51 cases at all sites, are next to the smallest and the largest value). The products of a site with fewer
cases than features determine its cases up to a rotation, which is little protection for very few cases. The sums of a
site in two exchanges, or in two fits, differ by the cases that moved to another component, and many such differences
may reveal a case; so may the difference between two runs if the site has one more case in the second. None of this is
possible if the server sees only the sum of the answers: every answer may go through secure aggregation.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
    rand_index,
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
    "groups": {"cases", "products", "counts", "sums", "squares"},
    "mixtures": {"cases", "products", "counts", "sums", "likelihoods"},
    "check": {"cases", "counts"},
}
COUNTINGS = 4  # exchanges at most; the last brackets are then 2e-10 of the first
SPREAD, MOVES = 3, 2  # means that are drawn for every component, and exchanges after which one in three is kept
GROUPINGS = 12  # exchanges of k-means at most
HALF = 0.8  # deviations between the mean of a normal distribution and that of either half, sqrt(2 / pi)
RIVALS = 5  # restarts per runner-up that is compared with the best fit
PACE = 10  # exchanges in which a fit that is behind must be able to catch up
DEAD = 1e-9  # cases: a component with fewer has no mean and stays in place


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The server's state."""

    settings: Settings = Settings()
    stage: str = "moments"
    known: Mapping[str, Values] = field(default_factory=dict)  # arrays that the sites get in this stage
    exchanges: int = 0  # so far
    steps: int = 0  # exchanges of this stage
    likelihoods: Values = field(default_factory=lambda: np.empty(0))  # mean over cases, by fit
    converged: Values = field(default_factory=lambda: np.empty(0))  # 1 for a converged fit
    cases: float = 0.0  # in the last exchange of EM
    kept: float = 1.0  # share of the variance that the principal components keep
    bic: tuple[tuple[int, float], ...] = ()  # of every number of components, when done
    agreement: float = 1.0  # of the best restarts: mean adjusted Rand index of the chosen fit and its runners-up
    mixture: Mixture | None = None


def ask(state: State) -> Arrays:
    """Return the request of the next exchange, the same for all sites."""
    return {"stage": np.array([float(list(STAGES).index(state.stage))]), **state.known}


def mixture_of(state: State) -> Mixture:
    """Return the mixture of a finished fit."""
    if state.mixture is None:
        raise ValueError("this fit is not finished")
    return state.mixture


def federated(vectors: Mapping[SiteId, ArrayLike], settings: Settings = Settings()) -> State:
    """Run all exchanges with sites that are all in this process."""
    state = State(settings)
    while state.mixture is None:
        asked = ask(state)
        state = learn(state, {site: answer(asked, cases) for site, cases in vectors.items()})
    return state


# At a site.


def answer(asked: Mapping[str, Values], vectors: ArrayLike) -> Arrays:
    """Return a site's answer: sums over its cases, or nothing if it has none.

    Args:
        asked: Request of the server.
        vectors: Features of the site's cases, one row per case.
    """
    stage = list(STAGES)[int(asked["stage"][0])]
    rows = checked(vectors, asked["low"].shape[-1] if "low" in asked else None)
    if not len(rows):
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
    if stage == "check":
        return {"cases": cases, "counts": _in_pairs(points, asked)}
    sums = _of_groups(points, asked) if stage == "groups" else _of_fits(points, asked)
    return {"cases": cases, "products": points.T @ points, **sums}


def _of_groups(points: Values, asked: Mapping[str, Values]) -> Arrays:
    """Return the sums of the cases that are nearest to each mean."""
    members = [
        np.eye(len(means))[squared_distances(points, means).argmin(1)] for means in _apart(asked, asked["means"])
    ]
    member = np.concatenate(members, axis=1)
    return {"counts": member.sum(0), "sums": member.T @ points, "squares": member.T @ points**2}


def _in_pairs(points: Values, asked: Mapping[str, Values]) -> Values:
    """Return how many cases are in a component of a runner-up (row) and in one of the first fit (column)."""
    first, *others = (np.eye(len(fit[0]))[joint(points, *fit).argmax(1)] for fit in _fits(asked))
    return np.concatenate([other.T @ first for other in others])


def _of_fits(points: Values, asked: Mapping[str, Values]) -> Arrays:
    counts, sums, likelihoods = [], [], []
    for weights, means, covariance in _fits(asked):
        share, likely = responsibilities(joint(points, weights, means, covariance))
        counts.append(share.sum(0))
        sums.append(share.T @ points)
        likelihoods.append(likely.sum())
    return {"counts": np.concatenate(counts), "sums": np.concatenate(sums), "likelihoods": np.array(likelihoods)}


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
        "groups": _groups,
        "mixtures": _mixtures,
        "check": _check,
    }
    new = steps[state.stage](state, _summed(state, answers))
    return replace(new, exchanges=state.exchanges + 1, steps=state.steps + 1 if new.stage == state.stage else 0)


def _summed(state: State, answers: Mapping[SiteId, Mapping[str, Values]]) -> Arrays:
    """Return the sum of the answers in the order of the sites' names, so that arrival order has no effect."""
    described = {site: answers[site] for site in sorted(answers) if answers[site]}
    if not described:
        raise DataError(f"none of {len(answers)} sites has a case to describe")
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
    kept = float(variances[:keep].sum() / np.maximum(variances, 0.0).sum())
    return projected(state, {**state.known, "centre": centre, "axes": axes}, variances[:keep], kept)


def projected(state: State, known: Mapping[str, Values], variances: Values, kept: float) -> State:
    """Return the state with all starts, once scaling and principal components are known.

    Args:
        state: The state before.
        known: ``low``, ``high``, ``centre`` and ``axes`` of the mixture.
        variances: Variances along the axes.
        kept: Share of the variance that the axes keep.
    """
    settings, sizes, means = state.settings, [], []
    for count, rng in _streams(settings):
        # drawn by feature, not by axis: axes of nearly equal variance may differ between two fits
        drawn = (known["axes"] @ rng.normal(size=(known["axes"].shape[1], SPREAD * count))).T
        means.append(drawn * np.sqrt(variances))
        sizes.append(float(len(drawn)))
    starts = {"sizes": np.array(sizes), "means": np.concatenate(means)}
    return replace(state, stage="groups", known={**known, **starts}, kept=kept)


def _streams(settings: Settings) -> Iterator[tuple[int, np.random.Generator]]:
    """Yield the number of components and the random generator of every start."""
    for count in settings.candidates:
        for restart in range(settings.restarts):
            yield count, np.random.default_rng([settings.seed, restart, count])


def _groups(state: State, total: Arrays) -> State:
    known, step = state.known, state.steps + 1
    apart = (_apart(known, array) for array in (known["means"], total["counts"], total["sums"], total["squares"]))
    groups = list(zip(*apart, strict=True))
    moved = [_moved(*group) for group in groups]
    if step == MOVES:
        streams = zip(_streams(state.settings), moved, groups, strict=True)
        moved = [_drawn(count, means, counts, rng) for (count, rng), means, (_, counts, *_) in streams]
    means, sizes = np.concatenate(moved), np.array([float(len(each)) for each in moved])
    still = step > MOVES and np.allclose(means, known["means"], rtol=0, atol=1e-12)
    if step < GROUPINGS and not still:
        return replace(state, known={**known, "means": means, "sizes": sizes})
    fits = [_maximised(n, x, total["products"], before, state.settings) for before, n, x, _ in groups]
    return replace(
        state,
        stage="mixtures",
        known={**known, **_joined(fits)},
        likelihoods=np.full(len(fits), -np.inf),
        converged=np.zeros(len(fits)),
    )


def _drawn(count: int, means: Values, counts: Values, rng: np.random.Generator) -> Values:
    """Draw this many of the means as k-means++ does: by their cases and the squared distance to those drawn before."""
    near, chosen = np.ones(len(means)), []
    for _ in range(count):
        odds = counts * near
        odds = odds if odds.sum() > 0 else near + 1.0  # fewer places than components
        chosen.append(means[np.searchsorted(np.cumsum(odds / odds.sum()), rng.random() * (1 - 1e-9))])
        near = squared_distances(means, np.array(chosen)).min(1)
    return np.array(chosen)


def _moved(before: Values, counts: Values, sums: Values, squares: Values) -> Values:
    """Return the means of the groups; an empty group takes half of the one with the largest scatter."""
    size = np.maximum(counts, DEAD)[:, None]
    means = np.where(counts[:, None] > DEAD, sums / size, before)
    variances = np.where(counts[:, None] > DEAD, np.maximum(squares / size - means**2, 0.0), 0.0)
    scatter = counts * variances.sum(1)
    for empty in np.flatnonzero(counts <= DEAD):
        wide = int(scatter.argmax())
        if not scatter[wide] > 0:
            break
        axis = int(variances[wide].argmax())
        step = HALF * np.sqrt(variances[wide, axis]) * np.eye(means.shape[1])[axis]
        means[empty], means[wide] = means[wide] + step, means[wide] - step
        scatter[wide] = 0.0  # another empty group takes half of another
    return means


Fit = tuple[Values, Values, Values]  # weights, means, covariance


def _maximised(counts: Values, sums: Values, products: Values, before: Values, settings: Settings) -> Fit:
    """Compute the M-step as scikit-learn does; but a component without a case stays in place."""
    counts = counts + 10 * np.finfo(float).eps
    means = np.where((counts > DEAD)[:, None], sums / counts[:, None], before)
    covariance = (products - (counts * means.T) @ means) / counts.sum() + settings.reg * np.eye(len(products))
    values, vectors = np.linalg.eigh(covariance)
    if values[0] < settings.reg / 2:  # rounding of secure sums: means and products may differ a little
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
    leading = np.array([scores[known["sizes"] == size].min() for size in known["sizes"]])
    behind = scores - 2 * cases * PACE * np.maximum(change, 0.0) > leading
    state = replace(state, likelihoods=likelihoods, converged=converged, cases=cases)
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
    sizes, settings = state.known["sizes"], state.settings
    least = tuple((count, float(scores[sizes == count].min())) for count in settings.candidates)
    order = [k for k in np.argsort(scores, kind="stable") if sizes[k] == sizes[scores.argmin()]]
    fits = list(_fits(state.known))
    rivals = order[1 : 1 + max(1, settings.restarts // RIVALS)] if sizes[order[0]] > 1 else []
    state = replace(state, bic=least, known={**state.known, **_joined([fits[k] for k in (order[0], *rivals)])})
    return replace(state, stage="check") if rivals else _done(state)


def _check(state: State, total: Arrays) -> State:
    """Compare the chosen fit with its runners-up: restarts that end in other clusters mean that none are clear."""
    tables = np.split(total["counts"], len(state.known["sizes"]) - 1)
    return _done(replace(state, agreement=float(np.mean([rand_index(table) for table in tables]))))


def _done(state: State) -> State:
    weights, means, covariance = next(_fits(state.known))
    scale = {name: state.known[name] for name in ("low", "high", "centre", "axes")}
    return replace(state, mixture=Mixture(**scale, weights=weights, means=means, covariance=covariance))
