"""Averages with weights by the validation cost of each site: FedCostWAvg, FedPIDAvg, top-k.

c_k(t) is the cost of site k's model after local training in round t: one minus its mean Dice (or accuracy) on the
site's validation cases, or on its training cases if it has no validation cases. The cost is sent with the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import ClassVar, Literal

from polysite.algorithms.average import OneModel, average
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.payload import Payload, SiteId, mean
from polysite.site import Site
from polysite.tree import Tree

FLOOR = 1e-10  # added to a cost that is divided by
Costs = Mapping[SiteId, tuple[float, ...]]  # by site, oldest first


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    costs: Costs = field(default_factory=dict)


class _ByCost(OneModel):
    """What the three algorithms share: sites send their model, their number of cases and their cost."""

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "size": "count", "cost": "cost"}
    facts: ClassVar[Facts] = Facts(cost_split="validation", shared_model=True)
    number: ClassVar[str] = "size"  # field of a reply with the number of cases

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(got["model"])
        scores = site.score(fit.params, site.cases("validation") or site.cases("train"))
        cost = 1 - fmean(s.mean for s in scores.values())
        return Payload(model=fit.params, cost=max(cost, 0.0), **{self.number: site.size}), memory


@dataclass(frozen=True)
class FedCostWAvg(_ByCost):
    """Weights by size and by the ratio of a site's last two costs.

    Paper: Mächler et al., FedCostWAvg: A new averaging for better Federated Learning, BrainLes 2021

        p_k = alpha n_k/N + (1 - alpha) r_k/R,    r_k = c_k(t-1) / c_k(t),    N and R the sums over the sites

    The cost c_k is one minus the Dice of site k's model, after local training, on the site's own validation cases. A
    site in its first round has no previous cost and is weighted by size.

    Args:
        alpha: Share of the weight that follows the number of cases, 0 to 1 (alpha in the paper); 0.5 in
            the paper.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        within(self, alpha=(0, 1))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(mean(replies, "model", self.shares(state, replies)), _remember(state.costs, replies, 2))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        costs, order = _remember(state.costs, replies, 2), sorted(replies)
        total = sum(replies[i]["size"] for i in order)
        weights = {i: replies[i]["size"] / total for i in order}
        ratio = {i: (costs[i][0] + FLOOR) / (costs[i][1] + FLOOR) for i in order if len(costs[i]) > 1}
        known = sum(weights[i] for i in ratio)  # weight that is left after new sites, which are weighted by size
        for i, r in ratio.items():
            weights[i] = self.alpha * weights[i] + (1 - self.alpha) * known * r / sum(ratio.values())
        return weights


@dataclass(frozen=True)
class FedPIDAvg(_ByCost):
    """Weights by size, by the fall of a site's cost, and by the sum of its last six costs.

    Paper: Mächler et al., FedPIDAvg: A PID controller inspired aggregation method for Federated Learning, BrainLes 2022

        p_k = alpha n_k/N + beta d_k/D + gamma m_k/M
        d_k = max(0, c_k(t-1) - c_k(t)),    m_k = c_k(t) + ... + c_k(t-5),    N, D and M the sums over the sites

    The cost c_k is one minus the Dice of site k's model, after local training, on the site's own validation cases. The
    weights are rescaled to a sum of one: a term that is zero at all sites (no site improved) is left out, and its share
    goes to the other terms. Costs before a site's first round are set to one, as in the FeTS 2022 benchmark; with
    start = "size" there are none, and a site in its first round is weighted by size alone.

    Args:
        alpha: Share of the weight that follows the number of cases (alpha in the paper), more than 0; 0.45 in
            the paper and in the FeTS 2022 benchmark.
        beta: Share that follows the fall of the cost (beta in the paper), at least 0; 0.45 there.
        gamma: Share that follows the sum of the last costs (gamma in the paper), at least 0; 0.1 there.
        window: Number of costs in that sum, at least 2; 6 in the paper.
        start: Costs before the first round of a site: ones, as in the FeTS 2022 benchmark, or size, for none.
    """

    alpha: float = 0.45
    beta: float = 0.45
    gamma: float = 0.1
    window: int = 6
    start: Literal["ones", "size"] = "ones"

    def __post_init__(self) -> None:
        within(self, alpha=(TINY, INF), beta=(0, INF), gamma=(0, INF), window=(2, INF))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(mean(replies, "model", self.shares(state, replies)), self._costs(state, replies))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        costs = self._costs(state, replies)
        fall = {i: max(0.0, c[-2] - c[-1]) if len(c) > 1 else 0.0 for i, c in costs.items()}
        history = {i: sum(c) if len(c) > 1 else 0.0 for i, c in costs.items()}
        sizes = {i: p["size"] for i, p in replies.items()}
        return _blend(replies, (self.alpha, sizes), (self.beta, fall), (self.gamma, history))

    def _costs(self, state: State, replies: Mapping[SiteId, Payload]) -> Costs:
        before = (1.0,) * (self.window - 1) if self.start == "ones" else ()
        return _remember({**dict.fromkeys(replies, before), **state.costs}, replies, self.window)


@dataclass(frozen=True)
class TopK(_ByCost):
    """Federated averaging over the sites with the lowest costs of the round.

    Paper: none; a rule of several entries to the FeTS challenges

        w <- sum_k p_k w_k over the ``keep`` sites of lowest cost,    p_k = n_k / sum of their n_j

    The cost is one minus the Dice of a site's model, after local training, on the site's own validation cases.

    Args:
        keep: Number of sites whose models are averaged, at least 1. The default is our choice.
    """

    keep: int = 3

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "weight": "count", "cost": "cost"}
    number: ClassVar[str] = "weight"

    def __post_init__(self) -> None:
        within(self, keep=(1, INF))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(average({i: replies[i] for i in self._best(replies)}))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        best = self._best(replies)
        total = sum(replies[i]["weight"] for i in best)
        return {i: replies[i]["weight"] / total if i in best else 0.0 for i in sorted(replies)}

    def _best(self, replies: Mapping[SiteId, Payload]) -> list[SiteId]:
        return sorted(sorted(replies), key=lambda i: replies[i]["cost"])[: self.keep]  # ties: by name


def _remember(costs: Costs, replies: Mapping[SiteId, Payload], window: int) -> Costs:
    """Return the last costs of every site; those of an absent site stay."""
    new = {**costs, **{i: (*costs.get(i, ()), p["cost"])[-window:] for i, p in replies.items()}}
    return {i: new[i] for i in sorted(new)}


def _blend(replies: Mapping[SiteId, Payload], *terms: tuple[float, Mapping[SiteId, float]]) -> dict[SiteId, float]:
    """Return the sum over the terms of share * value_k / sum_j value_j; terms that are zero everywhere are left out."""
    weights, order = dict.fromkeys(sorted(replies), 0.0), sorted(replies)
    sums = [(share, values, sum(values[i] for i in order)) for share, values in terms]
    total = sum(share for share, _, whole in sums if whole > 0)
    for share, values, whole in sums:
        if whole > 0:
            weights = {i: weights[i] + share / total * values[i] / whole for i in order}
    return weights
