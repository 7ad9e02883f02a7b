"""The default engine: every site in this process, models staying on the device they are computed on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from polysite.algorithms.base import Algorithm
from polysite.engines.record import Incident
from polysite.engines.site_turn import OutgoingStep, take_turn
from polysite.engines.transport import Reply, Served
from polysite.payload import Payload, SiteId, decode, encode
from polysite.site import Examined, Scores, Site
from polysite.tree import Tree


class Simulator:
    """A transport without a network. ``guests`` are served and score models, but do not train."""

    can_cross = True

    def __init__(
        self,
        algorithm: Algorithm[Any],
        sites: Mapping[SiteId, Site],
        *,
        guests: Mapping[SiteId, Site] | None = None,
        wire: bool = False,
        outgoing: Sequence[OutgoingStep] = (),
    ):
        self.algorithm, self.sites, self.guests, self.wire = algorithm, dict(sites), guests, wire
        self.outgoing = tuple(outgoing)
        self._memory = {i: Payload() for i in sites}
        self._new: dict[SiteId, Payload] = {}  # memories of this round, kept if the reply is merged

    @property
    def names(self) -> tuple[SiteId, ...]:
        """Sites that train."""
        return tuple(sorted(self.sites))

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """Sites that score models."""
        return tuple(sorted(self.guests if self.guests is not None else self.sites))

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Let each site take its turn."""
        for name, payload in sent.items():
            yield name, self._turn(round, name, payload)  # no reply is kept while the next site trains

    def _turn(self, round: int, name: SiteId, payload: Payload) -> Reply:
        site = self.sites[name].at(round)
        got, memory = self._carry(payload).each(site.lift), self._memory[name].each(site.lift)
        turn = take_turn(self.algorithm, got, memory, site, self.outgoing)
        self._new[name] = turn.memory
        reply = self._carry(turn.reply)
        return Reply(reply, turn.fits, turn.seconds, reply.nbytes)

    @property
    def sizes(self) -> Mapping[SiteId, int]:
        """Number of training cases of every site."""
        return {i: site.size for i, site in self.sites.items()}

    def repeat(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Let each site take the same turn again: all randomness comes from the seed, the site and the round."""
        return self.train(round, sent)

    def settle(self, heard: Collection[SiteId]) -> None:
        """Commit the new memories of the sites in ``heard``; all others keep their previous memory."""
        self._memory.update({i: m for i, m in self._new.items() if i in heard})
        self._new = {}

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Score the model that every site is served, on the cases of that site."""
        scores: dict[SiteId, Scores] = {}
        for name, site, got, memory in self._arrived(round, sent):
            groups = self.algorithm.serve(got, memory, site, site.cases(split))
            scores[name] = {case: s for params, cases in groups for case, s in site.score(params, cases).items()}
        return scores

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the models that every site is served."""
        return Served(
            {
                i: tuple(params for params, _ in self.algorithm.serve(got, memory, site, site.cases("validation")))
                for i, site, got, memory in self._arrived(round, sent)
            }
        )

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Examine the model that every site is served on its own cases; with ``others``, on the cases of all sites."""
        hosts = {**self.sites, **(self.guests or {})}
        for owner, payload in sent.items():
            for name in sorted(hosts) if others else (owner,):
                host, home = hosts[name].at(round), hosts.get(owner, hosts[name]).at(round)  # home chooses its model
                got, memory = payload.each(host.lift), self._memory.get(owner, Payload()).each(host.lift)
                for params, cases in self.algorithm.serve(got, memory, home, host.cases(split)):
                    for examined in host.examine(params, cases, tolerance):
                        yield owner, name, examined

    def begin(self, round: int, served: Served) -> None:
        """Start a phase from the models that the sites were served."""

        def begun(sites: Mapping[SiteId, Site]) -> dict[SiteId, Site]:
            start = {**dict.fromkeys(sites, served.shared), **served.models}  # a new site starts from the shared model
            return {i: site.begin(round, models[0]) if (models := start[i]) else site for i, site in sites.items()}

        self.sites, self.guests = begun(self.sites), None if self.guests is None else begun(self.guests)

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return the memories of all sites."""
        return dict(self._memory)

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Restore memories."""
        self._memory.update(memories)

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Do nothing: only the current memories are kept here."""

    def incidents(self) -> Sequence[Incident]:
        """Return none: nothing is lost on the way."""
        return ()

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device of the sites."""
        return next(iter(self.sites.values())).lift(params)

    def _arrived(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Site, Payload, Payload]]:
        for name, payload in sent.items():
            site = ({**self.sites, **(self.guests or {})})[name].at(round)
            yield name, site, self._carry(payload).each(site.lift), self._memory.get(name, Payload()).each(site.lift)

    def _carry(self, payload: Payload) -> Payload:
        return decode(encode(payload)) if self.wire else payload
