"""IFCA: several models; every site trains the one with the lowest loss on its cases.

Paper: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020

    j_i = argmin_j F_i(theta_j)                               at site i, of all k models, on its training cases
    theta_j <- sum of p_i fit_i(theta_j) over j_i = j         model averaging; p_i = n_i / n of the sites that chose j
    theta_j <- theta_j - eta sum of p_i grad F_i(theta_j)     gradient averaging; p_i = n_i / n of all replies

A model that no site chose stays as it is. A site chooses by the training loss without augmentation, on the same patches
for all k models, which costs k forward passes. All models are sent; one model and its number are returned. ``uniform``
follows the authors' program. With ``clustered`` only these layers exist k times; the others are averaged over all
sites.

The initial models must differ, or every site would choose the first. The first is the given model; in the others every
array is

    mean + sqrt(1 - spread^2) (w - mean) + spread std u,    u of mean 0 and variance 1 from a hash of seed, model, name

which has the mean and standard deviation of the given array, so that a bias of zeros or a scale of ones stays. (An
array with a single element changes by its own size.) With spread = 1 these are new random initialisations, as in the
paper. One of these is often the best for all sites, and the others are never chosen. A remedy is a ``warmup`` by
FedAvg: of the models of its last round, the k that are furthest apart become the initial models (``starts`` = sites).

A site is served the model with the lowest loss on its training cases, or on its validation cases if it does not train.
A site without either is served the model that most sites chose last. k = 1 is FedAvg.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from math import fsum
from typing import Any, ClassVar, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.average import average, towards
from polysite.algorithms.base import INF, Kind, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, plain
from polysite.site import Budget, Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    shared: Tree  # layers that all clusters share
    models: tuple[Tree, ...]  # other layers, by cluster; a single entry during the warm-up
    places: Mapping[SiteId, int]  # last choice of every site
    rounds: int = 0


@dataclass(frozen=True)
class Ifca:
    """Several models; every site trains the one with the lowest loss on its cases.

    Args:
        k: Number of models (k in the paper), at least 1; 1 is FedAvg.
        starts: Initial models: noise, or sites, which takes k of the models of the last round of the warm-up.
        spread: Amount of noise in the initial models, 0 to 1; 1 makes them unrelated, 0.1 similar.
        warmup: Rounds of FedAvg before there are k models.
        seed: Seed of the noise.
        clustered: Patterns of the parameters that exist k times; the others are averaged over all sites.
        averaged: What is averaged: models, or gradients, with a single step of plain SGD per round.
        uniform: Whether all sites have the same weight, as in the authors' program, instead of p_i = n_i / n.
    """

    k: int = 2
    starts: Literal["noise", "sites"] = "noise"
    spread: float = 1.0
    warmup: int = 0
    seed: int = 0
    clustered: tuple[str, ...] = ("*",)
    averaged: Literal["models", "gradients"] = "models"
    uniform: bool = False

    needs: ClassVar[Literal["sum", "each"]] = "each"
    strangers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within(self, k=(1, INF), spread=(0, 1), warmup=(0, INF))
        if self.k > 1 and self.spread == 0:
            raise ConfigError(f"with spread = 0 all k = {self.k} models start alike; take more, as in 0.1")
        if self.starts == "sites" and not self.warmup:
            raise ConfigError("starts = 'sites' takes models that sites have trained; set warmup, as in 5")
        if not self.clustered:
            raise ConfigError("clustered names nothing that clusters differ in; name it, as in ['*'], or choose fedavg")

    @property
    def plain_sgd(self) -> bool:
        return self.averaged == "gradients"

    @property
    def reply(self) -> Mapping[str, Kind]:
        return {"model": "model", "cluster": "number", "weight": "one" if self.uniform else "count"}

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("clustered", self.clustered, params)
        shared, own = parted(self.clustered, params)
        return State(shared, (own,) if self.warmup else self._starts(own), {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        chosen = list(state.places.values())
        most = max(range(len(state.models)), key=lambda j: (chosen.count(j), -j))
        models = {f"model_{j}": model for j, model in enumerate(state.models)}
        return {i: Payload(shared=state.shared, **models, most=most) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        models = _models(got)
        best = _least([fsum(site.losses(m).values()) for m in models]) if len(models) > 1 else 0
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
        rounds = state.rounds + 1
        if len(models) < self.k and rounds >= self.warmup:
            models = list(self._parted(models[0], {i: own for i, (_, own) in parts.items()}))
        return State(shared, tuple(models), dict(sorted({**state.places, **chosen}.items())), rounds)

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

    def _parted(self, model: Tree, sites: Mapping[SiteId, Tree]) -> tuple[Tree, ...]:
        """Return the k models after the warm-up, which is extended until k sites reply."""
        if self.starts == "noise":
            return self._starts(model)
        return (model,) if len(sites) < self.k else _furthest(sites, self.k)

    def _starts(self, model: Tree) -> tuple[Tree, ...]:
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


def _furthest(sites: Mapping[SiteId, Tree], k: int) -> tuple[Tree, ...]:
    """Return k models far apart: the furthest from the mean, then repeatedly the furthest from those taken.

    The one nearest to the mean comes first, since it serves sites that cannot choose.
    """
    models = {i: tree.trained(model) for i, model in sites.items()}
    mean = tree.mean(models.values())
    odd = {i: tree.norm(tree.sub(w, mean)) for i, w in models.items()}
    taken = [max(odd, key=odd.__getitem__)]
    while len(taken) < k:
        gaps = {i: min(tree.norm(tree.sub(w, models[j])) for j in taken) for i, w in models.items() if i not in taken}
        taken.append(max(gaps, key=gaps.__getitem__))
    return tuple(sites[i] for i in sorted(taken, key=odd.__getitem__))


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
