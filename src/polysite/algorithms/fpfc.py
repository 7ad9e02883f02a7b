"""FPFC: one model per site, with a penalty on every pair of models that fuses similar ones.

Paper: Yu, Liu, Wang and Sun, Clustered Federated Learning based on Nonconvex Pairwise Fusion, 2022

    min  sum_i F_i(w_i) + 1/(2m) sum_ij g(|w_i - w_j|),    g the smoothed SCAD penalty, constant beyond a lam
    w_i     <- steps on F_i(w) + rho/2 |w - zeta_i|^2 from w_i       zeta_i = 1/m sum_j (w_j + theta_ij - v_ij / rho)
    theta_ij <- argmin g(|t|) + rho/2 |t - delta_ij|^2               delta_ij = w_i - w_j + v_ij / rho
    v_ij    <- rho (delta_ij - theta_ij)                             once per pair with at least one reply

theta is a multiple s of delta, so the server keeps delta and s of every pair. Sites i and j are in one cluster if
|theta_ij| <= nu, directly or through other sites. A site is served the mean of its cluster, weighted by cases. The
number of clusters need not be known. As in the authors' program, only the ``fused`` layers are personal and the rest is
averaged over all sites: the server holds m models and m(m-1)/2 vectors of the fused layers. zeta is sent together with
the model; the site replies w_i.

lam, xi and nu are distances between models, which grow with the network and with training; with ``relative`` they are
multiples of the largest distance between two models so far, which is measured again in every round after the warm-up.
(The largest so far, not that of the round: as sites fuse, distances shrink, and a limit that shrank with them would
never be reached.) ``freeze`` keeps the distance of the first of these rounds. The paper's warm-up, which chooses lam,
could not be read: here the warm-up is a number of rounds without penalty (lam = 0), a reconstruction. In these rounds,
and with lam = 0, every site trains the fused layers alone, held near its own last model.

Pairs without a reply stay as they are. A new site starts at the mean of all models. A site that never trained is served
the largest cluster, or the mean of all sites if every cluster is a single site. lr (L + rho) must stay below 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar, Literal

from polysite import tree
from polysite.algorithms.average import serve_received
from polysite.algorithms.base import INF, TINY, Facts, Kind, in_rounds, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.cluster.fusion import components, scad_share
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class Pair:
    """Dual variables of a pair of sites."""

    delta: Tree  # w_i - w_j + v_ij / rho
    share: float  # s: theta_ij = s delta, v_ij = rho (1 - s) delta
    gap: float  # |theta_ij|


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    shared: Tree  # part that is averaged over all sites
    models: Mapping[SiteId, Tree]  # fused part of every site
    pairs: Mapping[SiteId, Mapping[SiteId, Pair]]  # by both sites, in the order of their names; none before a reply
    cases: Mapping[SiteId, float]  # of every site that has replied
    rounds: int = 0
    unit: float = 0.0  # unit of lam, xi and nu if they are relative


@dataclass(frozen=True)
class Fpfc:
    """A model per site with a pairwise penalty that fuses the models of similar sites.

    Args:
        lam: Strength of the penalty (lambda in the paper), at least 0: models nearer than about this distance are
            fused. The authors' programs take 0.4 and 0.6.
        a: Models further apart than a times lam are not penalised (a in the paper), more than 2; 3.7 in the authors'
            programs.
        xi: Distance below which the penalty is quadratic (xi in the paper), more than 0 and less than lam; 1e-4 to 1e-3
            in the authors' programs.
        rho: Weight of the proximal term (rho in the paper), more than 1 / (a - 1); 1 in the authors' programs.
        nu: Sites with |theta_ij| up to this are in one cluster (nu in the paper), at least 0; 0.1 in the authors'
            programs.
        relative: Whether lam, xi and nu are multiples of the largest distance between two models so far.
        warmup: Rounds without penalty, at least 0; a value between 0 and 1 is a share of all rounds. The default is our
            choice: the paper's warm-up could not be read.
        fused: Patterns of the parameters that are personal and fused; the others are averaged over all sites.
        freeze: Whether the distance for ``relative`` stays that of the first round after the warm-up. False: it is
            measured in every round.
    """

    lam: float = 0.5
    a: float = 3.7
    xi: float = 1e-3
    rho: float = 1.0
    nu: float = 0.1
    relative: bool = False
    warmup: float = 0.0
    fused: tuple[str, ...] = ("head.*",)
    freeze: bool = False

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "cases": "count"}
    needs: ClassVar[Literal["sum", "each"]] = "each"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within(self, lam=(0, INF), a=(2 + 1e-9, INF), xi=(TINY, INF), rho=(TINY, INF), nu=(0, INF), warmup=(0, INF))
        if 0 < self.lam <= self.xi:
            raise ConfigError(f"xi = {self.xi} must be less than lam = {self.lam}, or the penalty has no linear part")
        if self.rho <= 1 / (self.a - 1):
            raise ConfigError(
                f"rho = {self.rho} must be more than 1 / (a - 1) = {1 / (self.a - 1):g}, or a pair has no one answer"
            )
        if not self.fused:
            raise ConfigError("fused names nothing that is personal; name it, as in ['head.*'], or choose fedavg")

    @property
    def facts(self) -> Facts:
        """Facts that other modules act on."""
        return Facts(pull=self.rho)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("fused", self.fused, params)
        shared, own = parted(self.fused, params)
        return State(shared, dict.fromkeys(sorted(sites), own), {}, {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        groups = self._clusters(state)
        home = {i: group for group in groups for i in group}
        largest = max(groups, key=len)  # the first of several largest
        largest = (
            largest if len(largest) > 1 else tuple(state.models)
        )  # a model of a single site is not served to others
        means = {g: {**state.shared, **_mean(state, g)} for g in {home.get(i, largest) for i in cohort}}
        return {i: Payload(model=means[home.get(i, largest)], anchor=_anchor(state, i)) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        start = {**got["model"], **got["anchor"], **memory.get("own", {})}
        fit = site.fit(start, Objective(Tilt(anchor=got["anchor"], weight=self.rho)))
        _, own = parted(self.fused, fit.params)
        return Payload(model=fit.params, cases=site.size), Payload(own=own)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        order = sorted(replies)
        parts = {i: parted(self.fused, replies[i]["model"]) for i in order}
        cases = {i: replies[i]["cases"] for i in order}
        models = dict(sorted({**state.models, **{i: own for i, (_, own) in parts.items()}}.items()))
        shared = tree.mean([parts[i][0] for i in order], [cases[i] for i in order])
        rounds, unit = state.rounds + 1, state.unit
        touched = [(i, j) for i, j in combinations(models, 2) if i in replies or j in replies]
        if self.relative and not (self.freeze and unit) and rounds > self.warmup:
            unit = max((tree.norm(_apart(models, i, j)) for i, j in touched), default=0.0)
            unit = max(unit, state.unit)
        state = State(shared, models, state.pairs, dict(sorted({**state.cases, **cases}.items())), rounds, unit)
        fresh: dict[SiteId, dict[SiteId, Pair]] = {i: dict(js) for i, js in state.pairs.items()}
        for i, j in touched:
            fresh.setdefault(i, {})[j] = self._pair(state, i, j)
        return replace(state, pairs={i: dict(sorted(fresh[i].items())) for i in sorted(fresh)})

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the part that is averaged over all sites."""
        total = sum(p["cases"] for p in replies.values())
        return {i: p["cases"] / total for i, p in sorted(replies.items())}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"clusters": len(self._clusters(state)), **({"unit": state.unit} if self.relative else {})}

    serve = serve_received

    def scaled(self, rounds: int) -> "Fpfc":
        """Return the algorithm with the warm-up in rounds."""
        return replace(self, warmup=in_rounds(self.warmup, rounds))

    def _pair(self, state: State, i: SiteId, j: SiteId) -> Pair:
        """Return theta and v of a pair after an update of its sites."""
        delta, before = _apart(state.models, i, j), state.pairs.get(i, {}).get(j)
        if before is not None:
            delta = tree.map(lambda d, last: d + (1 - before.share) * last, delta, before.delta)
        unit = (state.unit or 1.0) if self.relative else 1.0
        lam, length = 0.0 if state.rounds <= self.warmup else self.lam * unit, tree.norm(delta)
        share = scad_share(length, lam, self.a, self.xi * unit, self.rho)
        return Pair(delta, share, share * length)

    def _clusters(self, state: State) -> tuple[tuple[SiteId, ...], ...]:
        unit = (state.unit or 1.0) if self.relative else 1.0
        gaps = {(i, j): pair.gap for i, js in state.pairs.items() for j, pair in js.items()}
        linked = [pair for pair in combinations(state.models, 2) if gaps.get(pair, 0.0) <= self.nu * unit]
        return components(state.models, linked)


def _apart(models: Mapping[SiteId, Tree], i: SiteId, j: SiteId) -> Tree:
    return tree.sub(tree.trained(models[i]), tree.trained(models[j]))


def _mean(state: State, group: Sequence[SiteId]) -> Tree:
    """Return the mean by cases over the sites of a group that have replied; the initial model if none has."""
    heard = [i for i in group if i in state.cases]
    if not heard:
        return state.models[group[0]]
    return tree.mean([state.models[i] for i in heard], [state.cases[i] for i in heard])


def _anchor(state: State, i: SiteId) -> Tree:
    """Return zeta_i; for a new site, the mean of all models."""
    pulls = []
    for j, model in state.models.items():
        first, last = sorted((i, j))
        pair = state.pairs.get(first, {}).get(last)
        sign = 0.0 if pair is None else (2 * pair.share - 1) * (1 if i == first else -1)  # theta - v / rho over delta
        there = tree.trained(model)
        pulls.append(there if pair is None else tree.map(lambda w, d, s=sign: w + s * d, there, pair.delta))
    return tree.mean(pulls)
