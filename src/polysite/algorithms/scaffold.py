"""SCAFFOLD: control variates cancel the client drift that heterogeneous data cause.

Paper: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II

    y <- y - eta (g(y) - c_k + c)                      at the site, from y = w
    c_k' = c_k - c + (w - y) / sum of eta              the learning rates used, not K times a nominal one
    w <- w + server_lr sum_k p_k (y_k - w)
    c <- c + sum_k p_k (c_k' - c_k)                    so that c stays the mean of all c_k, absent sites included

``uniform`` takes p_k = 1/K as in the paper, otherwise p_k = n_k/N. For the control, n_k is that of a site's first
reply: the server does not know c_k, so it could not correct a weight that changes. The control variate equals the mean
gradient along the local path only for plain SGD, so momentum and Adam are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, average, towards
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.payload import Payload, SiteId, mean
from polysite.site import Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    control: Tree
    weights: Mapping[SiteId, float]  # of every site, from its first reply
    awaited: tuple[SiteId, ...]  # sites with weight 1 in the mean control that have not replied yet


@dataclass(frozen=True)
class Scaffold(OneModel):
    """Federated averaging with control variates against client drift.

    Args:
        server_lr: Step of the server towards the mean (eta_g in the paper), more than 0; 1 takes the mean itself, as
            in the paper's experiments.
        uniform: Whether all sites have the same weight, p_k = 1/K, as in the paper, for model and control; else n_k/N.
    """

    server_lr: float = 1.0
    uniform: bool = True

    facts: ClassVar[Facts] = Facts(plain_sgd=True, shared_model=True)  # it remembers the weight of every site

    def __post_init__(self) -> None:
        within(self, server_lr=(TINY, INF))

    @property
    def reply(self) -> Mapping[str, Kind]:
        return {"model": "model", "control": "update", "weight": "one" if self.uniform else "count"}

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params, tree.zeros(tree.trained(params)), {}, tuple(sorted(sites)) if self.uniform else ())

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.model, control=state.control) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w, c = got["model"], got["control"]
        ck = memory["control"] if "control" in memory else tree.zeros(c)
        fit = site.fit(w, Objective(Tilt(linear=tree.sub(c, ck))))
        start, end = tree.trained(w), tree.trained(fit.params)
        new = tree.map(lambda ck, c, w, y: ck - c + (w - y) / fit.lr_sum, ck, c, start, end)
        weight = 1 if self.uniform else site.size
        return Payload(model=fit.params, control=tree.sub(new, ck), weight=weight), Payload(control=new)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        weights = dict(sorted({**{i: p["weight"] for i, p in replies.items()}, **state.weights}.items()))
        awaited = tuple(i for i in state.awaited if i not in replies)
        before = sum(state.weights.values()) + len(state.awaited)
        after, here = sum(weights.values()) + len(awaited), sum(weights[i] for i in sorted(replies))
        control = tree.map(
            lambda c, d: c * (before / after) + d * (here / after), state.control, mean(replies, "control", weights)
        )
        model = towards(state.model, average(replies), self.server_lr)
        return State(model, control, weights, awaited)
