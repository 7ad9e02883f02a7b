"""IFCA: several models; every site trains the one with the lowest loss on its cases.

Paper: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020

    j_i = argmin_j F_i(theta_j)                               at site i, of all k models, on its training cases
    theta_j <- sum of p_i fit_i(theta_j) over j_i = j         model averaging; p_i = n_i / n of the sites that chose j
    theta_j <- theta_j - eta sum of p_i grad F_i(theta_j)     gradient averaging; p_i = n_i / n of all replies

A model that no site chose stays as it is. A site chooses by the training loss without augmentation, on the same patches
for all k models, which costs k forward passes. All models are sent; one model and its number are returned. ``uniform``
follows the authors' program. With ``clustered`` only these layers exist k times; the others are averaged over all
sites.

The initial models must differ, and no model may be the best for all sites, or the others are never chosen. They come
from the data: after a ``warmup`` by FedAvg, the updates of the last round part the sites into k groups by direction
(``polysite.cluster.directions``), and the start of a group is the mean of its models (``starts`` = groups), the model
of its most typical site (sites), or the mean with noise (noise). In the next ``settle`` rounds each of these sites
trains the model of its group; then it chooses by the loss. Noise turns every array into

    mean + sqrt(1 - spread^2) (w - mean) + spread std u,    u of mean 0 and variance 1 from a hash of seed, model, name

which has the mean and standard deviation of the given array, so that a bias of zeros or a scale of ones stays. (An
array with a single element changes by its own size.) The paper starts from k random initialisations: ``starts`` = noise
without a warm-up, with spread = 1. The first is then the given model, and sites choose from the first round on; in a
network one of the models is often the best for all sites.

A site is served the model with the lowest loss on its training cases, or on its validation cases if it does not train.
A site without either is served the model that most sites chose last. k = 1 is FedAvg.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from math import fsum
from typing import Any, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.average import average, towards
from polysite.algorithms.base import INF, Facts, Kind, in_rounds, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.cluster.directions import direction_groups
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, plain
from polysite.site import Budget, Cases, Site
from polysite.tree import Tree

FREE = -1  # instead of a group: the site chooses


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    shared: Tree  # layers that all clusters share
    models: tuple[Tree, ...]  # other layers, by cluster; a single entry during the warm-up
    places: Mapping[SiteId, int]  # last choice of every site
    rounds: int = 0
    since: int = 0  # rounds before there were k models


@dataclass(frozen=True)
class Ifca:
    """Several models; every site trains the one with the lowest loss on its cases.

    Args:
        k: Number of models (k in the paper), at least 1; 1 is FedAvg.
        starts: Initial models, by groups of sites with similar updates: groups (the mean of a group), sites (the model
            of its most typical site) or noise (the mean with noise). The paper's: noise, with warmup = 0.
        spread: Amount of noise in the initial models, more than 0 and at most 1; 1 makes them unrelated, as in the
            paper, 0.1 similar.
        warmup: Rounds of FedAvg before there are k models; a value between 0 and 1 is a share of all rounds. 0 is
            allowed only with noise. Updates must differ in direction to group sites: docs/results/defaults.md.
        settle: Rounds after the warm-up in which a site trains the model of its group before it chooses; a
            value between 0 and 1 is a share of all rounds. If it is too short, sites leave their model before it is
            better than that of the others: docs/results/defaults.md.
        seed: Seed of the noise.
        clustered: Patterns of the parameters that exist k times; the others are averaged over all sites.
        averaged: What is averaged: models, or gradients, with a single step of plain SGD per round.
        uniform: Whether all sites have the same weight, as in the authors' program, instead of p_i = n_i / n.
    """

    k: int = 2
    starts: Literal["groups", "sites", "noise"] = "groups"
    spread: float = 1.0
    warmup: float = 0.1
    settle: float = 0.3
    seed: int = 0
    clustered: tuple[str, ...] = ("*",)
    averaged: Literal["models", "gradients"] = "models"
    uniform: bool = False

    def __post_init__(self) -> None:
        within(self, k=(1, INF), spread=(0, 1), warmup=(0, INF), settle=(0, INF))
        if self.k > 1 and self.starts == "noise" and self.spread == 0:
            raise ConfigError(f"with spread = 0 all k = {self.k} models start alike; take more, as in 0.1")
        if self.k > 1 and self.starts != "noise" and not self.warmup:
            raise ConfigError(f"starts = {self.starts!r} takes models that sites have trained; set warmup, as in 0.1")
        if not self.clustered:
            raise ConfigError("clustered names nothing that clusters differ in; name it, as in ['*'], or choose fedavg")

    @property
    def facts(self) -> Facts:
        return Facts(plain_sgd=self.averaged == "gradients")

    @property
    def reply(self) -> Mapping[str, Kind]:
        return {"model": "model", "cluster": "number", "weight": "one" if self.uniform else "count"}

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("clustered", self.clustered, params)
        shared, own = parted(self.clustered, params)
        return State(shared, (own,) if self.warmup else self._noisy(own), {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        chosen = list(state.places.values())
        most = max(range(len(state.models)), key=lambda j: (chosen.count(j), -j))
        models = {f"model_{j}": model for j, model in enumerate(state.models)}
        payload = Payload(shared=state.shared, **models, most=most)
        if len(models) == 1 or not self.warmup:
            return dict.fromkeys(cohort, payload)
        held = state.places if state.rounds < state.since + self.settle else {}
        return {i: Payload(**payload, group=held.get(i, FREE)) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        models = _models(got)
        best = int(got.get("group", FREE)) if len(models) > 1 else 0
        if best == FREE:
            best = _least([fsum(site.losses(m).values()) for m in models])
        fit = site.fit(models[best], budget=Budget(steps=1 if self.averaged == "gradients" else None))
        return Payload(model=fit.params, cluster=best, weight=1 if self.uniform else site.size), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        chosen = _chosen(state, replies)
        if not chosen:
            return state
        parts = {i: parted(self.clustered, replies[i]["model"]) for i in chosen}
        weight = {i: replies[i]["weight"] for i in chosen}
        shared = average({i: Payload(model=parts[i][0], weight=weight[i]) for i in chosen})
        models = list(state.models)
        for j in set(chosen.values()):
            here = {i: Payload(model=parts[i][1], weight=weight[i]) for i in chosen if chosen[i] == j}
            share = sum(weight[i] for i in here) / sum(weight.values()) if self.averaged == "gradients" else 1.0
            models[j] = towards(models[j], average(here), share)
        after = State(
            shared, tuple(models), dict(sorted({**state.places, **chosen}.items())), state.rounds + 1, state.since
        )
        if len(models) < self.k <= len(parts) and after.rounds >= self.warmup:  # the warm-up waits for k replies
            return self._begin(after, state.models[0], {i: own for i, (_, own) in parts.items()}, weight)
        return after

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the model that it chose."""
        chosen = _chosen(state, replies)
        together = {i: [j for j in chosen if self.averaged == "gradients" or chosen[j] == chosen[i]] for i in chosen}
        return {i: replies[i]["weight"] / sum(replies[j]["weight"] for j in together[i]) for i in chosen}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"clusters": len(set(state.places.values()))}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        models, known = _models(got), site.cases("validation")
        if len(models) == 1:
            best = 0
        elif site.size:
            best = _least([fsum(site.losses(m).values()) for m in models])
        elif known:
            best = _least([fsum(s.loss for s in site.score(m, known).values()) for m in models])
        else:
            best = int(got["most"])
        yield models[best], cases

    def scaled(self, rounds: int) -> "Ifca":
        """Return the algorithm with the warm-up and the settling in rounds."""
        return replace(self, warmup=in_rounds(self.warmup, rounds), settle=in_rounds(self.settle, rounds))

    def _begin(self, state: State, sent: Tree, trained: Mapping[SiteId, Tree], weight: Mapping[SiteId, float]) -> State:
        """Return the state with k models, one per group of sites with similar updates."""
        names = sorted(trained)
        cosines = _cosines([tree.sub(tree.trained(trained[i]), tree.trained(sent)) for i in names])
        groups = direction_groups(cosines, self.k)
        models = []
        for j, group in enumerate(groups):
            typical = max(group, key=lambda n: cosines[n][list(group)].sum())
            mean = average({names[n]: Payload(model=trained[names[n]], weight=weight[names[n]]) for n in group})
            noisy = _shaken(mean, self.spread, f"{self.seed}/{j}") if self.starts == "noise" else mean
            models.append(trained[names[typical]] if self.starts == "sites" else noisy)
        places = {names[n]: j for j, group in enumerate(groups) for n in group}
        return replace(state, models=tuple(models), places=dict(sorted(places.items())), since=state.rounds)

    def _noisy(self, model: Tree) -> tuple[Tree, ...]:
        return model, *(_shaken(model, self.spread, f"{self.seed}/{j}") for j in range(1, self.k))


def _models(got: Payload) -> list[Tree]:
    count = sum(field.startswith("model_") for field in got)
    return [{**got["shared"], **got[f"model_{j}"]} for j in range(count)]


def _least(losses: Sequence[float]) -> int:
    """Return the index of the lowest loss; ties go to the first."""
    return min(range(len(losses)), key=losses.__getitem__)


def _chosen(state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, int]:
    """Return the choice of every site, without sites that name a model that does not exist."""
    numbers = range(len(state.models))
    return {i: int(p["cluster"]) for i, p in sorted(replies.items()) if p["cluster"] in numbers}


def _cosines(updates: Sequence[Tree]) -> Any:
    """Return the cosines between updates; an update of length zero has the cosine 0 with all."""
    lengths = [tree.norm(u) or 1.0 for u in updates]
    table = np.zeros((len(updates), len(updates)))
    for i, one in enumerate(updates):
        for j, other in enumerate(updates[: i + 1]):
            table[i, j] = table[j, i] = tree.dot(one, other) / lengths[i] / lengths[j]
    return table


def _shaken(model: Tree, spread: float, key: str) -> Tree:
    """Return the model with every trained array mixed with noise of the same mean and standard deviation."""
    return {**model, **{k: _mixed(x, spread, f"{key}/{k}") for k, x in tree.trained(model).items()}}


def _mixed(x: Any, spread: float, key: str) -> Any:
    values = plain(x)
    if not values.size:
        return x
    exact = values.astype(np.float64)
    mean, std = exact.mean(), exact.std() if exact.size > 1 else abs(exact.mean())
    bits = np.frombuffer(shake_128(key.encode()).digest(4 * exact.size), "<u4").reshape(exact.shape)
    noise = 3**0.5 * (2 * ((bits + 0.5) / 2**32) - 1)
    mixed = (mean + (1 - spread**2) ** 0.5 * (exact - mean) + spread * std * noise).astype(values.dtype)
    return x.new_tensor(mixed) if hasattr(x, "new_tensor") else mixed
