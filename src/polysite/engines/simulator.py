"""The default engine: every site in this process, models staying on the device they are computed on."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from polysite.algorithms.base import Algorithm
from polysite.engines.compress import Compress, restore, squeeze
from polysite.engines.rounds import Reply, Served
from polysite.engines.screen import kinds_of
from polysite.payload import Payload, SiteId, decode, encode
from polysite.site import Examined, Scores, Site
from polysite.tree import Tree


class Simulator:
    """A transport without a network. ``guests`` are sites that are served and judge, but do not train."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        sites: Mapping[SiteId, Site],
        *,
        guests: Mapping[SiteId, Site] | None = None,
        wire: bool = False,
        compress: Compress = "none",
    ):
        self.algorithm, self.sites, self.guests, self.wire = algorithm, dict(sites), guests, wire
        self.compress = compress
        self._memory = {i: Payload() for i in sites}
        self._new: dict[SiteId, Payload] = {}  # what the sites would remember of this round, if they are heard

    @property
    def names(self) -> tuple[SiteId, ...]:
        return tuple(sorted(self.sites))

    @property
    def audience(self) -> tuple[SiteId, ...]:
        return tuple(sorted(self.guests if self.guests is not None else self.sites))

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        for name, payload in sent.items():
            began = time.perf_counter()
            site = self.sites[name].at(round)
            got = self._carry(payload).each(site.lift)
            reply, self._new[name] = self.algorithm.local(got, self._memory[name].each(site.lift), site)
            seconds = time.perf_counter() - began
            kinds = kinds_of(self.algorithm.reply, payload, reply)
            left = self._carry(squeeze(self.compress, kinds, got, reply))
            back = restore(self.compress, kinds, payload, left)
            yield name, Reply(back.each(self.lift), tuple(site.fits), seconds, left.nbytes)

    def settle(self, heard: Collection[SiteId]) -> None:
        self._memory.update({i: m for i, m in self._new.items() if i in heard})
        self._new = {}

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        found: dict[SiteId, Scores] = {}
        for name, site, got, memory in self._arrived(round, sent):
            groups = self.algorithm.serve(got, memory, site, site.cases(split))
            found[name] = {case: s for params, cases in groups for case, s in site.score(params, cases).items()}
        return found

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        return Served(
            {
                i: tuple(params for params, _ in self.algorithm.serve(got, memory, site, site.cases("validation")))
                for i, site, got, memory in self._arrived(round, sent)
            }
        )

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """(Whose model, whose patient, what came out) for what every site would use on its own patients, and if wanted
        on those of all others: only a simulation can do that, where a personal model need not leave its hospital."""
        hosts = {**self.sites, **(self.guests or {})}
        for owner, payload in sent.items():
            for name in sorted(hosts) if others else (owner,):
                host, home = hosts[name].at(round), hosts.get(owner, hosts[name]).at(round)  # which chooses its model
                got, memory = payload.each(host.lift), self._memory.get(owner, Payload()).each(host.lift)
                for params, cases in self.algorithm.serve(got, memory, home, host.cases(split)):
                    for found in host.examine(params, cases, tolerance):
                        yield owner, name, found

    def begin(self, round: int, served: Served) -> None:
        def begun(sites: Mapping[SiteId, Site]) -> dict[SiteId, Site]:
            start = {**dict.fromkeys(sites, served.shared), **served.models}  # whoever trains now has what all share
            return {i: site.begin(round, models[0]) if (models := start[i]) else site for i, site in sites.items()}

        self.sites, self.guests = begun(self.sites), None if self.guests is None else begun(self.guests)

    def memories(self) -> Mapping[SiteId, Payload]:
        return dict(self._memory)

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        self._memory.update(memories)

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None: ...

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def lift(self, params: Tree) -> Tree:
        return next(iter(self.sites.values())).lift(params)

    def _arrived(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Site, Payload, Payload]]:
        for name, payload in sent.items():
            site = ({**self.sites, **(self.guests or {})})[name].at(round)
            yield name, site, self._carry(payload).each(site.lift), self._memory.get(name, Payload()).each(site.lift)

    def _carry(self, payload: Payload) -> Payload:
        return decode(encode(payload)) if self.wire else payload
