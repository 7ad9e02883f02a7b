"""Clustered federated learning: a cluster whose sites disagree is split in two, recursively.

Paper: Sattler, Müller and Samek, Clustered Federated Learning, IEEE TNNLS 2021

    D_k = fit_k(w_c) - w_c,    w_c <- w_c + sum_k p_k D_k,    p_k = n_k / sum_j n_j         in every cluster c
    split c if |sum_k p_k D_k| < eps1 and max_k |D_k| > eps2:
        c1, c2 = argmin of max a_ij over i in c1, j in c2,    a_ij = cos(D_i, D_j)
        if gamma_max < sqrt((1 - a) / 2),    a = max a_ij over i in c1, j in c2

All sites begin in one cluster. Both halves continue from the model of the round; with ``split_first`` the cluster is
split before that round is aggregated, so that each half takes the mean of its own replies. Running statistics are
averaged; norms and cosines ignore them. With ``split_at`` every cluster is split in those rounds, regardless of the
norms (the FeTS 2022 benchmark: before the aggregation of round 201 of 300, by complete linkage: split_at = [201],
split_first = true, linkage = "complete"). eps1 = 0 is FedAvg.

A cluster is not split in a round in which a share of less than ``quorum`` of its sites replied. A site that was absent
from a split, or is new, next receives the model before that split. It joins the half with the update most similar to
its own, one split per round. A site that never trained is served the model before the first split, or the common model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polysite import tree
from polysite.algorithms.average import OneModel, average
from polysite.algorithms.base import INF, TINY, within
from polysite.cluster.bipartition import Linkage, bipartition
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

ALL = ""  # name of the cluster of all sites; the halves of a cluster append 0 and 1 to its name
Updates = Mapping[SiteId, Tree]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of sites."""

    model: Tree
    born: int  # completed rounds when it was formed
    updates: Updates = field(default_factory=dict)  # updates of its model by which it was split; empty if it was not


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    clusters: Mapping[str, Cluster]
    places: Mapping[SiteId, str]  # cluster of every site; a split one if the site has yet to join a half
    rounds: int = 0
    unit: float = 0.0  # longest update of the first round


@dataclass(frozen=True)
class Cfl(OneModel):
    """Clustered federated learning by recursive bipartition of the sites.

    Args:
        eps1: A cluster is stationary if its mean update is shorter than this (epsilon_1 in the paper), at least 0; 0 is
            FedAvg. 0.4 in the authors' program.
        eps2: A site still progresses if its update is longer than this (epsilon_2 in the paper), at least 0;
            1.6 in the authors' program.
        relative: Whether eps1 and eps2 are multiples of the longest update of the first round.
        gamma_max: Relative noise of an update, 0 to 1 (gamma_max in the paper); 0 splits at any angle, as the authors'
            program does, 1 at wide angles only.
        after: Rounds before the first split; 20 in the authors' program.
        least: Fewest sites of a cluster that can be split, at least 2; 3 in the authors' program.
        linkage: How a cluster is split: single is the exact bipartition of the paper, complete the authors' program.
        split_at: Rounds, counted from 1, in which every cluster is split, instead of by eps1, eps2 and gamma_max.
        split_first: Whether a cluster is split before its replies are averaged: each half takes the mean of its own.
        quorum: Share of its sites that must reply for a cluster to be split, more than 0 and at most 1. The
            default is our choice: the paper assumes that all sites reply.
    """

    eps1: float = 0.4
    eps2: float = 1.6
    relative: bool = False
    gamma_max: float = 0.0
    after: int = 20
    least: int = 3
    linkage: Linkage = "single"
    split_at: tuple[int, ...] = ()
    split_first: bool = False
    quorum: float = 1.0

    def __post_init__(self) -> None:
        within(self, eps1=(0, INF), eps2=(0, INF), gamma_max=(0, 1), after=(0, INF), least=(2, INF), quorum=(TINY, 1))
        if any(r < 1 for r in self.split_at):
            raise ConfigError(f"split_at = {list(self.split_at)} counts rounds from 1")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State({ALL: Cluster(params, 0)}, dict.fromkeys(sorted(sites), ALL))

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.clusters[state.places.get(i, ALL)].model) for i in cohort}

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        came = {i: state.places.get(i, ALL) for i in sorted(replies)}
        unit = state.unit
        if self.relative and not unit:
            unit = max(tree.norm(_moved(state.clusters[c].model, replies[i])) for i, c in came.items())
        state = State(state.clusters, dict(sorted({**state.places, **came}.items())), state.rounds + 1, unit)
        for name in sorted(set(came.values())):
            here = {i: replies[i] for i in came if came[i] == name}
            state = _choose(state, name, here) if state.clusters[name].updates else self._advance(state, name, here)
        return state

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the model of its cluster; 0 for a site that has yet to join a half."""
        split = {c for c, cluster in state.clusters.items() if cluster.updates}
        came = {i: state.places.get(i, ALL) for i in sorted(replies)}
        if self.split_first:
            after = self.merge(state, replies).places
            came = {i: c if c in split else after[i] for i, c in came.items()}
        total = {c: sum(replies[i]["weight"] for i in came if came[i] == c) for c in came.values()}
        return {i: 0.0 if c in split else replies[i]["weight"] / total[c] for i, c in came.items()}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"clusters": sum(not c.updates for c in state.clusters.values())}

    def site_clusters(self, state: State, sites: Sequence[SiteId]) -> Mapping[SiteId, str]:
        return {i: state.places.get(i, ALL) for i in sites}

    def _advance(self, state: State, name: str, replies: Mapping[SiteId, Payload]) -> State:
        """Give a cluster its new model, or split it in two."""
        cluster, members = state.clusters[name], sum(place == name for place in state.places.values())
        model = average(replies)
        whole = replace(state, clusters={**state.clusters, name: replace(cluster, model=model)})
        enough = len(replies) >= max(self.least, self.quorum * members - 1e-9)
        if not (enough and self._due(state, cluster, model, replies)):
            return whole
        order = sorted(replies)  # the halves are row numbers
        models = [tree.trained(replies[i]["model"]) for i in order]
        products = tree.gram(models, tree.trained(cluster.model), coarse=True)
        halves, across = bipartition(tree.cosines(products), self.linkage)
        if not self.split_at and self.gamma_max >= max((1 - across) / 2, 0.0) ** 0.5:
            return whole
        moved = {i: _moved(cluster.model, replies[i]) for i in order}
        sides = {order[i]: f"{name}{side}" for side, half in enumerate(halves) for i in half}
        fresh = {}
        for half in sorted(set(sides.values())):
            own = {i: replies[i] for i in sides if sides[i] == half}
            fresh[half] = Cluster(average(own) if self.split_first else model, state.rounds)
        clusters = {**state.clusters, name: replace(cluster, updates=moved), **fresh}
        return replace(state, clusters=clusters, places={**state.places, **sides})

    def _due(self, state: State, cluster: Cluster, model: Tree, replies: Mapping[SiteId, Payload]) -> bool:
        """Return whether the round, or the norms of the updates, call for a split."""
        if self.split_at:
            # a split may come late if replies were missing
            return any(cluster.born < r <= state.rounds for r in self.split_at)
        unit = state.unit if self.relative else 1.0
        return (
            state.rounds > self.after
            and tree.norm(_moved(cluster.model, Payload(model=model))) < self.eps1 * unit
            and max(tree.norm(_moved(cluster.model, reply)) for reply in replies.values()) > self.eps2 * unit
        )


def _moved(start: Tree, reply: Payload) -> Tree:
    return tree.sub(tree.trained(reply["model"]), tree.trained(start))


def _choose(state: State, name: str, replies: Mapping[SiteId, Payload]) -> State:
    """Move each of these sites to the half of a split cluster with the most similar update."""
    cluster, places = state.clusters[name], dict(state.places)
    for site, reply in replies.items():
        update = _moved(cluster.model, reply)
        alike = {i: tree.dot(update, other) / (tree.norm(other) or 1.0) for i, other in cluster.updates.items()}
        nearest = max(sorted(alike), key=alike.__getitem__)
        places[site] = state.places[nearest][: len(name) + 1]
    return replace(state, places=places)
