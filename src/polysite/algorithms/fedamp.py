"""FedAMP: every site is held near a personal mean of all models, in which similar sites have the largest weights.

Paper: Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021, Algorithm 1

    u_k = sum_j x_kj w_j,    x_kj = alpha A'(|w_k - w_j|^2) for j != k,    x_kk = 1 - sum_{j != k} x_kj    at the server
    w_k ~ argmin_v F_k(v) + pull/2 |v - u_k|^2, from w_k,    pull = lam / alpha                            at the site

A(y) = 1 - exp(-y/sigma), so A'(y) = exp(-y/sigma) / sigma: the nearer two models, the stronger their attraction. The
server keeps the last model of every site, also while the site is absent. A site is served its own model. A new site
receives the plain mean, starts from it, and joins with its first reply; a site that never trained is served that mean.
alpha = 0 holds every site near its own last model, pull = 0 is local training.

The weight of a site on itself must not be negative: alpha (m - 1) must not exceed sigma. Both are on the scale of
squared distances between networks, which is unknown beforehand and changes in training. By default sigma is the median
squared distance between two sites in each round, and alpha is sigma over the number of sites; we do not know the
paper's values.

``pull`` replaces the paper's lambda = pull * alpha, because a small alpha would otherwise require ever smaller learning
rates. By default it is 1 / reach, where reach is the distance that a constant gradient of one moved a weight in the
last round of the site (the sum of its learning rates): whatever the learning rate and the number of steps, a round
then goes about 1 - 1/e of the way to u_k, and the product of rate and pull is one over the number of steps. In its
first round a site is not held: u_k is its own start. Every ``every`` rounds alpha is multiplied and pull divided by
``decay``. The learning rate must then fall as fast (train.gamma), since its product with pull has to stay well below 2.

With ``cosine`` it is HeurFedAMP: x_kj in proportion to exp(cosine cos(w_k, w_j)), and x_kk = ``own``. Distances and
cosines use the trained parameters that ``on`` names. u_k has the running statistics of site k.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import ClassVar

from polysite import tree
from polysite.algorithms.base import INF, TINY, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Objective, Site, Tilt
from polysite.tree import Tree

Pair = tuple[SiteId, SiteId]


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    start: Tree
    models: Mapping[SiteId, Tree] = field(default_factory=dict)  # last model of every site that has replied
    # weights of every site on all sites
    attention: Mapping[SiteId, Mapping[SiteId, float]] = field(default_factory=dict)
    sigma: float | None = None
    rounds: int = 0


@dataclass(frozen=True)
class FedAMP:
    """A personal model per site, drawn to a weighted mean of the models of similar sites.

    Args:
        pull: Weight of the proximal term, at least 0: lambda / alpha in the paper. 0 is local training. None: one over
            the sum of the site's learning rates in a round (our choice), which suits any rate and number of steps.
        sigma: Squared distance at which attraction fades (sigma in the paper), more than 0; None: the median over pairs
            of sites, in every round (our choice).
        alpha: Step size of the attraction (alpha in the paper), at least 0; None: sigma over the number of sites, so
            that equal models have equal weights (our choice).
        decay: Factor of alpha after every ``every`` rounds, more than 0 and at most 1.
        every: Rounds between two decays, at least 1; without effect with the default decay of 1.
        cosine: Scale of the cosine similarity (sigma of HeurFedAMP), at least 0; None: FedAMP by distances.
        own: HeurFedAMP: weight of a site on itself, 0 to 1 (xi_ii in the paper); None: one over the number of sites.
        on: Patterns of the parameters by which sites are compared; large layers outweigh small ones.
    """

    pull: float | None = None
    sigma: float | None = None
    alpha: float | None = None
    decay: float = 1.0
    every: int = 30
    cosine: float | None = None
    own: float | None = None
    on: tuple[str, ...] = ("*",)

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model"}

    def __post_init__(self) -> None:
        within(self, pull=(0, INF), sigma=(TINY, INF), alpha=(0, INF), decay=(TINY, 1), every=(1, INF))
        within(self, cosine=(0, INF), own=(0, 1))
        if self.alpha and self.sigma is None:
            raise ConfigError(f"fedamp measures alpha = {self.alpha} against sigma; give sigma too, or leave alpha out")
        if self.own is not None and self.cosine is None:
            raise ConfigError(f"own = {self.own} is of HeurFedAMP, which fedamp becomes with cosine; give cosine too")
        if self.cosine is not None and (self.sigma is not None or self.alpha is not None):
            raise ConfigError("HeurFedAMP (cosine) knows no sigma and no alpha; leave them out, or cosine")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        if self.alpha and self.sigma and self.alpha * (len(sites) - 1) > self.sigma:
            raise ConfigError(
                f"fedamp with alpha = {self.alpha}, sigma = {self.sigma} and {len(sites)} sites could give a site a "
                f"negative weight on itself; lower alpha to at most {self.sigma / (len(sites) - 1):g}, or raise sigma"
            )
        if params and not tree.select(tree.trained(params), self.on):
            raise ConfigError(f"on = {list(self.on)} names no trained parameter of this network to compare sites by")
        return State(params)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        pull = (1.0 if self.pull is None else self.pull) / self._faded(state.rounds)
        clouds = _clouds(state, cohort)
        return {i: Payload(model=clouds[i], pull=pull) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        cloud, pull = got["model"], got["pull"]
        if self.pull is None:
            pull = pull / memory["reach"] if "reach" in memory else 0.0
        fit = site.fit(memory.get("model", cloud), Objective(Tilt(anchor=cloud, weight=pull)))
        reach = {"reach": fit.reach} if self.pull is None else {}
        return Payload(model=fit.params), Payload(model=fit.params, **reach)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        models = dict(sorted({**state.models, **{i: p["model"] for i, p in replies.items()}}.items()))
        looked = {i: tree.select(tree.trained(w), self.on) for i, w in models.items()}
        if self.cosine is not None:
            return State(state.start, models, self._by_direction(looked), None, state.rounds + 1)
        squares = tree.squared_distances(list(looked.values())).tolist()
        apart = {(i, j): squares[n][m] for (n, i), (m, j) in combinations(enumerate(looked), 2)}
        found = median(apart.values()) if apart else 0.0
        sigma = self.sigma or found or state.sigma
        faded = self._faded(state.rounds + 1)
        attention = _complete(
            models, {pair: self._attraction(d, sigma, len(models)) * faded for pair, d in apart.items()}
        )
        return State(state.start, models, attention, sigma, state.rounds + 1)

    def diagnostics(self, state: State) -> Mapping[str, float]:
        """Return the mean weight of a site on itself (1 if no two sites are similar), and sigma."""
        own = [weights[i] for i, weights in state.attention.items()]
        mean = {"own": math.fsum(own) / len(own)} if own else {}
        return {**mean, **({} if state.sigma is None else {"sigma": state.sigma})}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield memory.get("model", got["model"]), cases

    def _faded(self, rounds: int) -> float:
        """Return the factor by which alpha has decayed after this number of rounds."""
        return float(self.decay ** (rounds // self.every))

    def _attraction(self, apart: float, sigma: float | None, sites: int) -> float:
        """Return alpha A'(apart), with alpha capped so that the weight of a site on itself stays positive."""
        if sigma is None:  # all models are still equal
            return 0.0
        alpha = sigma / sites if self.alpha is None else min(self.alpha, sigma / max(sites - 1, 1))
        return alpha / sigma * math.exp(-apart / sigma)

    def _by_direction(self, looked: Mapping[SiteId, Tree]) -> Mapping[SiteId, Mapping[SiteId, float]]:
        own = 1 / len(looked) if self.own is None else self.own
        cos = tree.cosines(tree.gram(list(looked.values()))).tolist()
        weights = {}
        for n, i in enumerate(looked):
            force = {j: math.exp((self.cosine or 0.0) * (cos[n][m] - 1)) for m, j in enumerate(looked) if j != i}
            rest = (1 - own) / math.fsum(force.values()) if force else 0.0
            weights[i] = {j: force[j] * rest if j != i else own if force else 1.0 for j in looked}
        return weights


def _complete(sites: Mapping[SiteId, Tree], between: Mapping[Pair, float]) -> Mapping[SiteId, Mapping[SiteId, float]]:
    """Return the weights of every site on all sites, itself included; they sum to one."""
    weights = {}
    for i in sites:
        others = {j: between[min(i, j), max(i, j)] for j in sites if j != i}
        weights[i] = {j: others[j] if j != i else max(1 - math.fsum(others.values()), 0.0) for j in sites}
    return weights


def _clouds(state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Tree]:
    """Return u_k of every site; for a site that never replied, the plain mean of all models."""
    if not state.models:
        return dict.fromkeys(cohort, state.start)
    known = [i for i in cohort if i in state.models]
    weights = [list(state.attention[i].values()) for i in known]
    shares = [[x / whole for x in w] for w, whole in zip(weights, map(sum, weights), strict=True)]
    mixed = tree.mixtures([tree.trained(w) for w in state.models.values()], shares)
    clouds = {i: {**u, **tree.statistics(state.models[i])} for i, u in zip(known, mixed, strict=True)}
    plain = tree.mean(state.models.values()) if len(known) < len(cohort) else {}
    return {i: clouds.get(i, plain) for i in cohort}
