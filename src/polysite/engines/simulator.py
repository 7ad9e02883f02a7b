"""The default engine: every site in this process.

Sites take turns with one network and one optimiser on the device. What a site keeps between turns (its memory, and the
model that a phase starts from) stays on the device while all of it fits there, or else leaves it (``memory_store.py``).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polysite.algorithms.base import Algorithm
from polysite.engines.memory_store import Memories, MemoryStore, Stored, to_host
from polysite.engines.noise import noise_steps
from polysite.engines.record import Incident, incident
from polysite.engines.secure.member import Mask, MaskStep, Session, open_session, take_step
from polysite.engines.secure.settings import Secure
from polysite.engines.site_turn import OutgoingStep, take_turn
from polysite.engines.transport import Reply, Served
from polysite.errors import PayloadError
from polysite.payload import Payload, SiteId, decode, encode
from polysite.privacy import Private
from polysite.site import Examined, Fit, Scores, Site
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
        store: MemoryStore | None = None,
        secure: Secure = Secure(),
        private: Private = Private(),
    ):
        self.algorithm, self.sites, self.guests, self.wire = algorithm, dict(sites), guests, wire
        self.outgoing, self.secure, self.private = tuple(outgoing), secure, private
        self._sessions: dict[SiteId, Session] = {}  # of the sites, in the secure sum of this round
        self._noted: list[Incident] = []
        self._store = store or MemoryStore()
        self._memory = {i: self._store.put(Payload()) for i in sites}
        self._new: dict[SiteId, Stored] = {}  # memories of this round, kept if the reply is merged
        self._first, self._starts = 0, dict[SiteId, Stored]()  # first round of the phase, models that it starts from

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
            try:
                reply = self._turn(round, name, payload)
            except PayloadError as problem:  # it cannot be masked, as if it were not finite
                if name not in self._sessions:
                    raise
                self._noted.append(incident(f"its reply cannot be masked: {problem}", name))
                continue
            yield name, reply  # no reply is kept while the next site trains
            del reply

    def _turn(self, round: int, name: SiteId, payload: Payload) -> Reply:
        site = self._site(self.sites, name, round)
        got, memory = self._carry(payload).each(site.lift), self._recall(name, site)
        known = self._sessions.get(name)
        masks = (Mask(known, self.secure.fraction),) if known else ()
        noise = noise_steps(self.algorithm, self.private, site, got, known)
        turn = take_turn(self.algorithm, got, memory, site, (*noise, *self.outgoing, *masks))
        self._new[name] = self._store.put(turn.memory)
        reply = self._carry(turn.reply)
        fits = tuple(map(_without_models, turn.fits)) if self._store.spilled else turn.fits
        return Reply(reply, fits, turn.seconds, reply.nbytes, turn.releases)

    def mask_step(
        self, step: MaskStep, round: int, sent: Mapping[SiteId, Payload], least: int
    ) -> Mapping[SiteId, Payload]:
        """Have each site take a step of a secure sum."""
        answers: dict[SiteId, Payload] = {}
        for name, payload in sent.items():
            try:
                if step == "keys":
                    self._sessions[name], answers[name] = open_session(
                        payload, name, self.secure.fewest, reveal=self.secure.reveal
                    )
                else:
                    self._sessions[name], answers[name] = take_step(step, payload, self._sessions[name])
            except PayloadError as problem:
                self._noted.append(incident(f"it refuses the step {step!r} of a secure sum: {problem}", name))
        return answers

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
        self._new, self._sessions = {}, {}

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Score the model that every site is served, on the cases of that site."""
        scores: dict[SiteId, Scores] = {i: {} for i in sent}
        for name, site, got, memory in self._arrived(round, sent):
            for params, cases in self.algorithm.serve(got, memory, site, site.cases(split)):
                scores[name] = {**scores[name], **site.score(params, cases)}
        return scores

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the models that every site is served."""
        models: dict[SiteId, tuple[Tree, ...]] = {}
        for i, site, got, memory in self._arrived(round, sent):
            groups = self.algorithm.serve(got, memory, site, site.cases("validation"))
            models[i] = tuple(to_host(params) if self._store.spilled else params for params, _ in groups)
        return Served(models)

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Examine the model that every site is served on its own cases; with ``others``, on the cases of all sites."""
        hosts = {**self.sites, **(self.guests or {})}
        for owner, payload in sent.items():
            got, memory = payload.each(self.lift), self._recall(owner, next(iter(hosts.values())))
            for name in sorted(hosts) if others else (owner,):
                host = hosts[name].at(round)
                home = self._site(hosts, owner if owner in hosts else name, round)  # home chooses its model
                for params, cases in self.algorithm.serve(got, memory, home, host.cases(split)):
                    for examined in host.examine(params, cases, tolerance):
                        yield owner, name, examined

    def begin(self, round: int, served: Served) -> None:
        """Start a phase from the models that the sites were served."""

        everyone = {*self.sites, *(self.guests or {})}
        shared = served.shared  # a new site starts from it, too
        if shared:
            common = self._store.put(Payload(model=shared[0]))
            self._starts = dict.fromkeys(everyone, common)
        else:
            models = {i: trees[0] for i, trees in served.models.items() if trees and i in everyone}
            self._starts = {i: self._store.put(Payload(model=tree)) for i, tree in models.items()}
        self._first = round

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return the memories of all sites."""
        return Memories(self._memory)

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Restore memories."""
        self._memory.update({i: self._store.put(memory) for i, memory in memories.items()})

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Do nothing: only the current memories are kept here."""

    def incidents(self) -> Sequence[Incident]:
        """Return the replies that could not be masked; nothing is lost on the way."""
        noted, self._noted = self._noted, []
        return noted

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device of the sites."""
        return next(iter(self.sites.values())).lift(params)

    def _arrived(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Site, Payload, Payload]]:
        for name, payload in sent.items():
            site = self._site({**self.sites, **(self.guests or {})}, name, round)
            yield name, site, self._carry(payload).each(site.lift), self._recall(name, site)

    def _site(self, sites: Mapping[SiteId, Site], name: SiteId, round: int) -> Site:
        """Return a site in a round; in a later phase it starts from the model that it was served."""
        site = sites[name]
        if name in self._starts:
            site = site.begin(self._first, site.lift(self._starts[name].get()["model"]))
        return site.at(round)

    def _recall(self, name: SiteId, site: Site) -> Payload:
        """Return the memory of a site on its device; empty if it has none."""
        return self._memory[name].get().each(site.lift) if name in self._memory else Payload()

    def _carry(self, payload: Payload) -> Payload:
        return decode(encode(payload)) if self.wire else payload


def _without_models(fit: Fit) -> Fit:
    """Return the effort behind a fit, without the model on the device."""
    return replace(fit, params={}, twin={}, personal={})
