"""The sites in one phase of a study, at the server: what an algorithm sends becomes requests, responses become values.

The memory of a simulated site is kept here for it, on the device, in main memory or on disk (``memory_store.py``). That
of a hospital stays there, in versions: a version is the last round in which the site's reply was merged, so a server
that returns to a checkpoint asks for the version that belongs to it. Personal models stay at a hospital, too: it
reports the digest of its model, and a model that equals something it was sent is known to the server already.

Replies of hospitals that are only summed (``replies.py``) are stored until the round ends; a simulated site takes its
turn again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

from polysite.algorithms.base import Algorithm, is_summable
from polysite.engines import messages
from polysite.engines.memory_store import Memories, MemoryStore, Stored, to_host
from polysite.engines.record import Incident
from polysite.engines.secure.member import MaskStep
from polysite.engines.sites import Sites
from polysite.payload import Payload, SiteId, model_digest
from polysite.privacy import Release
from polysite.site import Cases, Examined, Fit, Scores, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a site as it left the site, with the effort behind it."""

    payload: Payload
    fits: tuple[Fit, ...]
    seconds: float
    nbytes: int  # that crossed from the site to the server
    releases: tuple[Release, ...] = ()  # what it cost under differential privacy


@dataclass(frozen=True, slots=True)
class Origin:
    """The payloads and memories from which hospitals derive the models that they are served."""

    phase: int
    round: int
    sent: Mapping[SiteId, Payload]
    versions: Mapping[SiteId, int]


@dataclass(frozen=True, slots=True)
class Served:
    """Models that sites would use, one tree per group of their cases, as far as the server may see them."""

    models: Mapping[SiteId, tuple[Tree, ...]]
    hidden: Mapping[SiteId, int] = field(default_factory=dict)  # number of models that stay at their site
    origin: Origin | None = None

    @property
    def groups(self) -> dict[SiteId, int]:
        """Number of models of every site."""
        return {**{i: len(trees) for i, trees in self.models.items()}, **self.hidden}

    @property
    def shared(self) -> tuple[Tree, ...] | None:
        """The models, if all sites use the same."""
        first, *others = [[Payload(model=t) for t in trees] for trees in self.models.values()] or [[]]
        return None if self.hidden or any(each != first for each in others) else tuple(p["model"] for p in first)


class KnownSite(Protocol):
    """Interface of what a server knows of a site in a simulation."""

    @property
    def size(self) -> int:
        """Number of training cases."""
        ...

    def cases(self, split: str) -> Cases:
        """Return the names of the cases of a split."""
        ...


class PhaseSites:
    """One phase of a study over its sites.

    Args:
        algorithm: The algorithm of the phase.
        sites: The sites of the study.
        phase: Number of the phase, from 0.
        lift: Moves parameters to the device on which the server computes.
        known: The sites of a simulation. They compute for this server alone: they repeat a turn at no cost, leave their
            memory with the server, and show their models. None for real hospitals.
        names: Sites of a simulation that train.
        audience: Sites of a simulation that score models.
        kind: Whether the sites train or are assessed.
        store: Where memories and replies are kept.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        sites: Sites,
        phase: int = 0,
        lift: Callable[[Tree], Tree] = lambda t: t,
        *,
        known: Mapping[SiteId, KnownSite] | None = None,
        names: Collection[SiteId] = (),
        audience: Collection[SiteId] = (),
        kind: Literal["train", "assess"] = "train",
        store: MemoryStore | None = None,
    ):
        self.algorithm, self.sites, self.phase, self.kind, self.lift = algorithm, sites, phase, kind, lift
        self.known, self.simulated = known or {}, known is not None
        self._names, self._audience = tuple(sorted(names)), tuple(sorted(audience))
        self.store = store or MemoryStore()
        self._memory: dict[SiteId, Stored] = {}  # of simulated sites that have one, as last settled
        self._new: dict[SiteId, Stored | None] = {}  # memories of this round, kept if the reply is merged
        self._replies: dict[SiteId, tuple[Reply, Stored]] = {}  # of this round, if they are only summed
        self._versions: dict[SiteId, int] = {}
        self._round = -1
        self.began: frozenset[SiteId] | None = None  # sites that have a model to begin this phase from
        self._least = 0  # number of masked replies that a secure sum needs

    @property
    def names(self) -> tuple[SiteId, ...]:
        """Sites that train, or are assessed; a site that has not connected yet may still come."""
        if self.simulated:
            return self._names
        known = self.sites.status
        if self.kind == "assess":
            return tuple(i for i, s in known.items() if s.ready and s.greeting and s.greeting.may_assess)
        return tuple(i for i, s in known.items() if not s.refused and s.cases.get("train", 1))

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """Sites that are served a model and score it on their own cases."""
        if self.simulated:
            return self._audience
        ready = ((i, s.greeting) for i, s in self.sites.status.items() if s.ready and s.greeting)
        return tuple(i for i, g in ready if g.may_score and (g.cases["validation"] or g.cases["test"]))

    @property
    def can_cross(self) -> bool:
        """Whether a site's own model can be examined on the cases of other sites: no hospital's model leaves it."""
        return self.simulated

    @property
    def sizes(self) -> Mapping[SiteId, int]:
        """Numbers of training cases: the weights to expect in replies. Empty if replies come in any order: they are
        then summed as they are delivered again."""
        return {i: self.known[i].size for i in self._names}

    @property
    def reported(self) -> Mapping[SiteId, int]:
        """Numbers of training cases that hospitals reported when they joined: the only weights that are accepted."""
        if self.simulated or self.kind == "assess":
            return {}
        return {i: s.cases["train"] for i, s in self.sites.status.items() if s.cases}

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Deliver the payloads and yield each reply as it arrives, with outgoing steps such as compression."""
        self._round, self._replies = round, {}
        make = messages.Assess if self.kind == "assess" else messages.Train
        requests = self._requests(sent, make, round)
        summed = bool(requests) and is_summable(self.algorithm) and not self.simulated
        for site, response in self.sites.ask(requests, self.phase, least=self._least):
            if isinstance(response, messages.Trained):
                reply = self._reply(site, response)
                if summed:
                    self._replies[site] = replace(reply, payload=Payload()), self.store.put(reply.payload)
                del response
                yield site, reply
                del reply  # before the next site trains

    def _reply(self, site: SiteId, response: messages.Trained) -> Reply:
        fits, payload = response.fits, response.payload
        if response.turn is not None:
            self._new[site] = self._stored(response.turn.memory)
            if self.store.spilled:  # the effort behind a fit, without the model on the device
                fits = tuple(replace(fit, params={}, twin={}, personal={}) for fit in fits)
        return Reply(payload, fits, response.seconds, payload.nbytes, response.releases)

    def repeat(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Yield the replies to the payloads of this round again, before ``settle``, in the order of the sites' names.

        A simulated site takes the same turn again: all randomness comes from the seed, the site and the round.
        """
        if self.simulated:
            with self.sites.uncounted():
                yield from self.train(round, sent)
        for site in sorted(sent.keys() & self._replies.keys()):
            reply, stored = self._replies[site]
            yield site, replace(reply, payload=stored.get())

    def settle(self, heard: Collection[SiteId]) -> None:
        """Commit the new memories of the sites in ``heard``; all others return to their previous memory."""
        self._versions.update(dict.fromkeys(heard, self._round))
        self._settle({i: m for i, m in self._new.items() if i in heard})
        self._new, self._replies, self._least = {}, {}, 0

    def _stored(self, memory: Payload) -> Stored | None:
        return self.store.put(memory) if memory else None

    def _settle(self, new: Mapping[SiteId, Stored | None]) -> None:
        self._memory = {i: m for i, m in {**self._memory, **new}.items() if m is not None}

    def mask_step(
        self, step: MaskStep, round: int, sent: Mapping[SiteId, Payload], least: int
    ) -> Mapping[SiteId, Payload]:
        """Have the sites take a step of a secure sum; return the answers of those that did.

        ``least`` is the number of answers without which the sum fails: real hospitals are waited for.
        """
        self._least = least
        requests = self._requests(sent, partial(messages.MaskTurn, step=step), round)
        asked = self.sites.ask(requests, self.phase, least=least)
        return {site: response.payload for site, response in asked if isinstance(response, messages.MaskTaken)}

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Have every site score the model that it is served, on one split of its cases."""
        requests = self._requests(sent, partial(messages.Score, split=split), round)
        asked = self.sites.ask(requests, self.phase, self._scores)
        scores = {site: response.scores for site, response in asked if isinstance(response, messages.Scored)}
        self._note_unscored(round, split, any(scores.values()))
        return {i: scores[i] for i in (sent if self.simulated else sorted(scores)) if i in scores}

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Yield (owner of the model, site of the case, all measures), computed where the images are.

        ``others`` also examines every site's model on the cases of all other sites.
        """
        if others:
            with self.sites.uncounted():  # no hospital's model goes to others: what would cross are its own measures
                for owner, host, examined in self._examine_others(round, sent, split, tolerance):
                    self.sites.status[host].up += messages.bytes_of(examined) if owner == host else 0
                    yield owner, host, examined
            return
        requests = self._requests(sent, partial(messages.Examine, split=split, tolerance=tolerance), round)
        scored = False
        for site, response in self._in_order(self.sites.ask(requests, self.phase, self._scores)):
            for examined in response.cases if isinstance(response, messages.Measured) else ():
                scored = True
                yield site, site, examined
        self._note_unscored(round, split, scored)

    def _in_order(self, asked: Iterator[tuple[SiteId, Any]]) -> Iterator[tuple[SiteId, Any]]:
        """Yield responses in the order of the sites' names; simulated sites answer in a fixed order anyway."""
        yield from asked if self.simulated else sorted(asked, key=lambda answer: answer[0])

    def _examine_others(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Examine every site's model on the cases of all sites; the site itself chooses the model for a case."""
        served: dict[SiteId, dict[SiteId, messages.Models]] = {
            owner: {} for owner in sent
        }  # by host, whose cases they are for
        for host in sorted({*self.names, *self.audience}):
            cases = self.known[host].cases(split)
            requests = self._requests(sent, partial(messages.Serve, cases=cases), round)
            for owner, found in self.sites.ask(requests, self.phase):
                if isinstance(found, messages.Models):
                    served[owner][host] = found
        for owner, models in served.items():
            for k in range(max((len(m.models) for m in models.values()), default=0)):
                requests = {
                    host: messages.ExamineModel(
                        phase=self.phase,
                        round=round,
                        payload=Payload(model=cast(Tree, each.models[k])),
                        cases=each.groups[k],
                        tolerance=tolerance,
                        pictures=host == owner,
                    )
                    for host, each in models.items()
                    if k < len(each.models)
                }
                for host, measured in self.sites.ask(requests, self.phase):
                    found_cases = measured.cases if isinstance(measured, messages.Measured) else ()
                    yield from ((owner, host, examined) for examined in found_cases)

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the models that sites are served, where the server knows them; the others stay hidden.

        With a name, a site may keep a copy under it.
        """
        models: dict[SiteId, tuple[Tree, ...]] = {}
        hidden: dict[SiteId, int] = {}
        requests = self._requests(sent, partial(messages.Serve, name=name), round)
        for site, response in self.sites.ask(requests, self.phase):
            if not isinstance(response, messages.Models):
                continue
            if not any(isinstance(model, str) for model in response.models):
                trees = tuple(self.lift(cast(Tree, model)) for model in response.models)
                models[site] = tuple(map(to_host, trees)) if self.store.spilled else trees
                continue
            known, certain = self._derivable(sent[site])
            if certain and response.models != certain:  # false, or computed on a machine that rounds differently
                self.sites.note("reports another model than was sent; the study continues with what was sent", site)
            digests = certain or response.models
            if all(d in known for d in digests):
                models[site] = tuple(dict(known[cast(str, d)]) for d in digests)
            else:
                hidden[site] = len(digests)
        order = sent if self.simulated else sorted(models)
        origin = Origin(self.phase, round, dict(sent), dict(self._versions))
        return Served({i: models[i] for i in order if i in models}, hidden, origin)

    def _derivable(self, sent: Payload) -> tuple[dict[str, Tree], tuple[str, ...]]:
        """Return models derivable from the sent payload alone, keyed by digest, and the digests of those that the site
        must have, whatever it remembers."""
        trees = [v for v in sent.values() if not isinstance(v, float)]
        certain = self._served(sent, cast(Payload, object()))  # any look into this memory fails
        known = {model_digest(tree): tree for tree in (*self._served(sent, Payload()), *trees)}
        return known, tuple(model_digest(tree) for tree in certain)

    def _served(self, sent: Payload, memory: Payload) -> list[Tree]:
        try:
            return [tree for tree, _ in self.algorithm.serve(sent, memory, cast(Site, None), ())]
        except (AttributeError, KeyError, TypeError):  # the algorithm needs the site or its memory
            return []

    def begin(self, round: int, served: Served) -> None:
        """Have every site begin this phase from the models that it was served, before its next request."""
        shared, origin, simulated = served.shared, served.origin, self.simulated
        self.began = frozenset({*served.models, *served.hidden})

        def beginning(site: SiteId) -> messages.Begin | None:
            if simulated:
                models = served.models.get(site) or shared  # a new site starts from the shared model, too
                return messages.Begin(phase=self.phase, begins=round, start=models[0]) if models else None
            if origin is None or site not in origin.sent:
                return None
            return messages.Begin(
                phase=self.phase,
                begins=round,
                before=origin.phase,
                round=origin.round,
                version=origin.versions.get(site, -1),
                payload=origin.sent[site],
            )

        self.sites.beginnings[self.phase] = beginning
        for status in self.sites.status.values():
            status.begun.discard(self.phase)

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return the memories that the server keeps for sites; those of hospitals stay there."""
        return Memories(self._memory)

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Restore the sites' memories after a restart. A hospital goes back to the given version, the last round in
        which its reply was merged."""
        self._settle({i: self._stored(memory) for i, memory in memories.items()})
        self._versions = dict(versions)

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Tell hospitals with the next requests which versions may still be asked for; they can delete all others."""
        self.sites.needed = versions

    def incidents(self) -> Sequence[Incident]:
        """Return the incidents since the last call: absent, late or refusing sites, and why."""
        return self.sites.incidents()

    @property
    def secret(self) -> int:
        """Number, unknown to the sites, from which the guard draws its signs."""
        return self.sites.secret

    def _scores(self, site: SiteId) -> bool:
        return site in self.audience

    def _note_unscored(self, round: int, split: str, any_scored: bool) -> None:
        if not any_scored and not self.simulated and any(s.cases.get(split) for s in self.sites.status.values()):
            self.sites.note(f"no site scored the model of round {round + 1} on {split} cases")

    def _requests(
        self, sent: Mapping[SiteId, Payload], make: Callable[..., messages.Request], round: int
    ) -> dict[SiteId, messages.Request]:
        requests = {}
        for site, payload in sent.items():
            version, stored = self._versions.get(site, -1), self._memory.get(site)
            keep = tuple(sorted({*self.sites.needed.get(site, ()), version}))
            memory = stored.get() if stored else None
            at = {"phase": self.phase, "round": round, "version": version, "keep": keep}
            requests[site] = make(**at, payload=payload, memory=memory)
        return requests
