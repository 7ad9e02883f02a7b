"""Aggregates that a few broken or hostile sites cannot move: median, trimmed mean, Krum, geometric median.

All of them train like FedAvg and differ in how they aggregate the replies. They protect against a few bad sites at a
price: honest hospitals that differ from most are treated like bad ones. Distances are over trained parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from polysite import tree
from polysite.algorithms.average import OneModel, State
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean
from polysite.site import Site
from polysite.tree import Tree


class _Alike(OneModel):
    """Base of the aggregates in which all sites have the same weight: a reply is a model and nothing else."""

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model"}
    facts: ClassVar[Facts] = Facts(shared_model=True)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return Payload(model=site.fit(got["model"]).params), memory


@dataclass(frozen=True)
class Median(_Alike):
    """The median of the sites' models, coordinate by coordinate.

    Paper: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018

        w_j <- median_k w_kj

    With an even number of replies it is the mean of the middle two. All sites have the same weight. It has no
    hyper-parameter.
    """

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(_median(replies))


@dataclass(frozen=True)
class TrimmedMean(_Alike):
    """The mean of the sites' models without the extremes of every coordinate.

    Paper: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018

        w_j <- mean of the w_kj without the floor(beta K) smallest and the floor(beta K) largest

    ``beta`` should be at least the share of bad sites. K is the number of replies of a round; with few replies nothing
    may be cut. All sites have the same weight.

    Args:
        beta: Share of the replies cut from each end (beta in the paper), at least 0 and less than 0.5. The
            default, one site of four, is our choice.
    """

    beta: float = 0.25

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        check_cut(self.beta, len(sites))
        return State(params)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(tree.trimmed_mean([replies[i]["model"] for i in sorted(replies)], cut_of(self.beta, len(replies))))


@dataclass(frozen=True)
class Krum(_Alike):
    """The reply closest to its neighbours, or the mean of the ``keep`` closest (multi-Krum).

    Paper: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017

        score_k = sum of |w_k - w_j|^2 over the K - f - 2 nearest others j;    w <- the w_k of lowest score

    ``f`` bad sites need K >= 2f + 3 sites; in a round with fewer replies the median is taken. All sites have the same
    weight. The guarantee of multi-Krum holds for ``keep`` up to K - f - 2.

    Args:
        f: Number of bad sites to tolerate (f in the paper), at least 0; it needs 2f + 3 sites. The default is
            our choice.
        keep: Number of models to average (m of multi-Krum), at least 1; 1 is Krum.
    """

    f: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        within(self, f=(0, INF), keep=(1, INF))

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        check_krum(self.f, self.keep, len(sites))
        return State(params)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        if len(replies) < 2 * self.f + 3:
            return State(_median(replies))
        return State(mean({i: replies[i] for i in krum_choice(replies, self.f, self.keep)}, "model"))


@dataclass(frozen=True)
class GeometricMedian(OneModel):
    """The point with the smallest sum of distances to the sites' models, by Weiszfeld's iteration.

    Paper: Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022

        z <- sum_k b_k w_k / sum_k b_k,    b_k = p_k / max(smoothing, |z - w_k|),    from z = sum_k p_k w_k

    z is always a mean of the replies, so the iteration needs only their mutual distances and reads the models once.

    Args:
        iterations: Weiszfeld iterations at most, at least 1. This default and the others are our choice: they end at
            the median itself, not after the few iterations of the paper.
        smoothing: Smallest distance that is divided by (nu in the paper), more than 0 and at most 1.
        tolerance: Relative change of the sum of distances at which the iteration stops, 0 to 1.
    """

    iterations: int = 100
    smoothing: float = 1e-6
    tolerance: float = 1e-6

    facts: ClassVar[Facts] = Facts(shared_model=True)

    def __post_init__(self) -> None:
        within(self, iterations=(1, INF), smoothing=(TINY, 1), tolerance=(0, 1))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        shares = self.shares(state, replies)  # for running statistics too, which may be broken as well
        return State(mean(replies, "model", shares))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the weights s_k of the replies in z = sum_k s_k w_k.

        |z - w_k|^2 = sum_j s_j d_kj^2 - sum_ij s_i s_j d_ij^2 / 2, with d the distances between replies.
        """
        order, squares = sorted(replies), _squared_distances(replies)
        p = np.array([replies[i]["weight"] for i in order], float)
        p /= p.sum()
        share, last = p, float("inf")
        for _ in range(self.iterations):
            spread = squares @ share
            away = np.sqrt(np.maximum(spread - share @ spread / 2, 0.0))
            objective = float(p @ away)
            if abs(last - objective) <= self.tolerance * objective:
                break
            pull = p / np.maximum(self.smoothing, away)
            share, last = pull / pull.sum(), objective
        return dict(zip(order, share.tolist(), strict=True))


def _median(replies: Mapping[SiteId, Payload]) -> Tree:
    """Return the median of the sites' models in every coordinate: the mean of the middle one or two values."""
    return tree.trimmed_mean([replies[i]["model"] for i in sorted(replies)], (len(replies) - 1) // 2)


def check_beta(beta: float) -> None:
    """Refuse a share that leaves nothing of a trimmed mean."""
    if not 0 <= beta < 0.5:
        raise ConfigError(f"the trimmed mean cuts less than half from each end, got beta = {beta}; set it below 0.5")


def check_cut(beta: float, sites: int) -> None:
    """Refuse a share that cuts nothing from this number of sites, unless it is 0."""
    if beta and not cut_of(beta, sites):
        least = f"set it to {ceil(100 / sites) / 100} or more" if sites > 2 else "it takes three or more"
        raise ConfigError(f"beta = {beta} cuts nothing from {sites} sites; {least}, or to 0 for a mean")


def cut_of(beta: float, sites: int) -> int:
    """Return the number of replies that a trimmed mean cuts from each end."""
    return floor(beta * sites + 1e-9)


def check_krum(f: int, keep: int, sites: int) -> None:
    """Refuse a number of sites that Krum cannot choose from."""
    if sites < 2 * f + 3:
        raise ConfigError(
            f"krum tolerates f = {f} bad sites among {2 * f + 3} or more, and there are {sites}; lower f, or choose "
            "median or geometric_median"
        )
    if keep > sites - f:
        raise ConfigError(f"krum cannot keep {keep} of {sites} sites of which f = {f} may be bad; lower keep")


def krum_choice(replies: Mapping[SiteId, Payload], f: int, keep: int) -> list[SiteId]:
    """Return the sites whose replies have the smallest sums of squared distances to the nearest others."""
    order, squares = sorted(replies), _squared_distances(replies)
    np.fill_diagonal(squares, np.inf)  # no reply is its own neighbour
    score = dict(zip(order, np.sort(squares)[:, : len(order) - f - 2].sum(1).tolist(), strict=True))
    return sorted(order, key=score.__getitem__)[: min(keep, len(order) - f)]  # ties: by name


def _squared_distances(replies: Mapping[SiteId, Payload]) -> NDArray[np.float64]:
    """Return the squared Euclidean distances between the sites' models, in the order of the sites' names."""
    return tree.squared_distances([tree.trained(replies[i]["model"]) for i in sorted(replies)])
