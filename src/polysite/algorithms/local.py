"""Local training: no exchange at all, the baseline of what a hospital reaches alone.

Paper: none; the "local" baseline of every federated benchmark

    w_k <- fit_k(w_k)

Nothing is sent in either direction. A site that never trained is served the initial model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite.algorithms.base import Facts, Kind
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True)
class Local:
    """Local training without any exchange; it has no hyper-parameter."""

    reply: ClassVar[Mapping[str, Kind]] = {}
    facts: ClassVar[Facts] = Facts(needs="sum", strangers=False)  # they get the untrained model

    def init(self, params: Tree, sites: Sequence[SiteId]) -> None:
        return None

    def send(self, state: None, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload() for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(memory.get("model", site.start))
        return Payload(), Payload(model=fit.params)

    def merge(self, state: None, replies: Mapping[SiteId, Payload]) -> None:
        return None

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield memory.get("model", site.start), cases
