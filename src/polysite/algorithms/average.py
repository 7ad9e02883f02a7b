"""What algorithms with one shared model have in common: the mean of the sites' models, a step towards it, and the
methods of an algorithm that sends its model to every site and serves it as it is (``OneModel``).

    target <- sum_k a_k w_k / sum_k a_k,    w <- w + length (target - w)

Running statistics of batch normalisation are always a plain mean by the sites' own weights, because a variance that is
extrapolated or passed to an adaptive optimiser can become negative.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.payload import Payload, SiteId, mean
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of a server with one model, or with the part of a model that all sites share."""

    model: Tree


def average(replies: Mapping[SiteId, Payload], by: str | Mapping[SiteId, float] = "weight") -> Tree:
    """Return the weighted mean of the sites' models.

    ``by`` holds the weights of trained parameters; running statistics are always weighted by the field ``weight``.
    """
    if by == "weight":
        return mean(replies, "model", "weight")
    parts = {i: Payload(model=tree.trained(p["model"]), rest=tree.statistics(p["model"])) for i, p in replies.items()}
    weights = {i: p["weight"] for i, p in replies.items()}
    return {**mean(parts, "model", by), **mean(parts, "rest", weights)}


def towards(model: Tree, target: Tree, length: float) -> Tree:
    """Return model + length * (target - model), with the running statistics of the target."""
    if length == 1:
        return target
    start, end = tree.trained(model), tree.trained(target)
    return {**target, **tree.map(lambda w, t: w + length * (t - w), start, end)}


def send_model(algorithm: Any, state: Any, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
    """Send the same model to every site: a method ``send``."""
    return {i: Payload(model=state.model) for i in cohort}


def serve_received(
    algorithm: Any, got: Payload, memory: Payload, site: Site, cases: Cases
) -> Iterator[tuple[Tree, Cases]]:
    """Serve the received model to all cases: a method ``serve``."""
    yield got["model"], cases


class OneModel:
    """Base of an algorithm with one model, or a part of it, that all sites train and average."""

    uniform = False  # whether all sites have the same weight

    @property
    def reply(self) -> Mapping[str, Kind]:
        return {"model": "model", "weight": "one" if self.uniform else "count"}

    def init(self, params: Tree, sites: Sequence[SiteId]) -> Any:
        return State(params)

    send = send_model

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return Payload(model=site.fit(got["model"]).params, weight=1 if self.uniform else site.size), memory

    def merge(self, state: Any, replies: Mapping[SiteId, Payload]) -> Any:
        return State(average(replies))

    serve = serve_received
