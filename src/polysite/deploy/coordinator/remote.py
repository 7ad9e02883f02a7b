"""Real hospitals as a transport: the five functions of an algorithm, asked of the sites of a roster.

The memory of a site stays there, in versions: a version is the last round in which the site's reply was merged, so a
server that returns to a checkpoint asks for the version that belongs to it. Personal models stay there, too: a site
reports the digest of its model, and a model that equals something it was sent is known to the server already.

Replies that are only summed (``engines/replies.py``) are stored until the round ends: in main memory while they take at
most half of what was free at the start, then on disk, so that the number of sites is not limited by memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, cast

from polysite.algorithms.base import Algorithm
from polysite.buffers import Buffer
from polysite.deploy.coordinator.roster import Heard, Roster
from polysite.deploy.protocol import Digests, Measured, Request, RequestKind, Scored, Trained, model_digest
from polysite.engines.memory_store import MemoryStore, Stored
from polysite.engines.phase_sites import Reply, Served
from polysite.engines.record import Incident
from polysite.engines.replies import is_summable
from polysite.engines.secure.member import MaskStep
from polysite.errors import PayloadError
from polysite.payload import Limits, Payload, SiteId, decode, encode
from polysite.site import Examined, Scores, Site
from polysite.tree import Tree

SMALL = Limits(nbytes=1 << 24, header=1 << 22, arrays=10_000, dimensions=1)  # of a step of a secure sum


class RemoteSites:
    """One phase of a study over real sites.

    Args:
        algorithm: The algorithm of the phase.
        roster: The sites.
        phase: Number of the phase, from 0.
        lift: Moves parameters to the device on which the server computes.
        kind: Whether the sites train or are assessed.
        limits: Largest payload that is accepted.
        store: Where replies that are only summed are kept.
    """

    sizes: Mapping[SiteId, int] = MappingProxyType({})  # replies come in any order
    can_cross = False  # a site's own model never leaves it

    def __init__(
        self,
        algorithm: Algorithm[Any],
        roster: Roster,
        phase: int = 0,
        lift: Callable[[Tree], Tree] = lambda t: t,
        kind: Literal["train", "assess"] = "train",
        limits: Limits = Limits(),
        store: MemoryStore | None = None,
    ):
        self.algorithm, self.roster, self.phase, self.kind, self.limits = algorithm, roster, phase, kind, limits
        self._lift = lift
        self._store = store or MemoryStore()
        self._replies: dict[SiteId, tuple[Reply, Stored]] = {}  # of this round, if they are only summed
        self._versions: dict[SiteId, int] = {}
        self._round = -1
        self._least = 0  # number of masked replies that a secure sum needs

    @property
    def names(self) -> tuple[SiteId, ...]:
        """Sites that may train, or be assessed; a site that has not connected yet may still come."""
        sites = self.roster.sites
        if self.kind == "assess":
            return tuple(i for i, s in sites.items() if s.ready and s.greeting and s.greeting.may_assess)
        return tuple(i for i, s in sites.items() if not s.refused and s.cases.get("train", 1))

    @property
    def reported(self) -> Mapping[SiteId, int]:
        """Numbers of training cases that the sites reported when they joined: the only weights that are accepted."""
        known = {} if self.kind == "assess" else self.roster.sites
        return {i: s.cases["train"] for i, s in known.items() if s.cases}

    @property
    def secret(self) -> int:
        """Number, unknown to the sites, from which the guard draws its signs."""
        return self.roster.secret

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """Sites that may score models on their cases."""
        ready = ((i, s.greeting) for i, s in self.roster.sites.items() if s.ready and s.greeting)
        return tuple(i for i, g in ready if g.may_score and (g.cases["validation"] or g.cases["test"]))

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Yield the reply of each site as it arrives; outgoing steps such as compression are not reversed yet."""
        self._round, self._replies = round, {}
        summed = is_summable(self.algorithm)
        for site, response, take in self._ask(self.kind, round, sent, least=self._least):
            try:
                payload = decode(take(), self.limits)
            except PayloadError as problem:
                self.roster.note(f"its reply is refused: {problem}", site)
                continue
            if isinstance(response, Trained):
                reply = Reply(payload, response.fits, response.seconds, payload.nbytes, response.releases)
                if summed:
                    self._replies[site] = replace(reply, payload=Payload()), self._store.put(payload)
                yield site, reply
                del reply
            del payload  # before the next one is received

    def repeat(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Yield the replies to these payloads that arrived, in the order of the sites' names."""
        for site in sorted(sent.keys() & self._replies.keys()):
            reply, stored = self._replies[site]
            yield site, replace(reply, payload=stored.get())

    def settle(self, heard: Collection[SiteId]) -> None:
        """Let the next requests of these sites continue from this round's memories."""
        self._versions.update(dict.fromkeys(heard, self._round))
        self._replies, self._least = {}, 0

    def mask_step(
        self, step: MaskStep, round: int, sent: Mapping[SiteId, Payload], least: int
    ) -> Mapping[SiteId, Payload]:
        """Have the sites take a step of a secure sum. What a site answers is small."""
        answers: dict[SiteId, Payload] = {}
        self._least = least
        for site, _, take in self._ask("mask", round, sent, least=least, step=step):
            try:
                answers[site] = decode(take(), SMALL)
            except PayloadError as problem:
                self.roster.note(f"its answer to the step {step!r} of a secure sum is refused: {problem}", site)
        return answers

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Have every site score its model on one split of its cases."""
        scores: dict[SiteId, Scores] = {}
        for site, response, _ in self._ask("score", round, sent, self._in_audience, split=split):
            if isinstance(response, Scored):
                scores[site] = response.scores
        self._note_unscored(round, split, any(scores.values()))
        return {i: scores[i] for i in sorted(scores)}

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Have every site compute all measures of its own cases; predictions stay there. ``others`` has no effect."""
        measured: dict[SiteId, tuple[Examined, ...]] = {}
        asked = self._ask("examine", round, sent, self._in_audience, split=split, tolerance=tolerance)
        for site, response, _ in asked:
            if isinstance(response, Measured):
                measured[site] = response.cases
        self._note_unscored(round, split, any(measured.values()))
        for site in sorted(measured):
            yield from ((site, site, examined) for examined in measured[site])

    def _in_audience(self, site: SiteId) -> bool:
        return site in self.audience

    def _note_unscored(self, round: int, split: str, any_scored: bool) -> None:
        if not any_scored and any(s.cases.get(split) for s in self.roster.sites.values()):
            self.roster.note(f"no site scored the model of round {round + 1} on {split} cases")

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the models that sites are served, where the server knows them; the others stay hidden."""
        models: dict[SiteId, tuple[Tree, ...]] = {}
        hidden: dict[SiteId, int] = {}
        for site, response, _ in self._ask("serve", round, sent, name=name):
            if not isinstance(response, Digests):
                continue
            known, certain = self._derivable(sent[site])
            if certain and response.models != certain:  # false, or computed on a machine that rounds differently
                self.roster.note("reports another model than was sent; the study continues with what was sent", site)
            digests = certain or response.models
            if all(d in known for d in digests):
                models[site] = tuple(dict(known[d]) for d in digests)
            else:
                hidden[site] = len(digests)
        order = {"phase": self.phase, "round": round, "sent": sent, "versions": dict(self._versions)}
        return Served({i: models[i] for i in sorted(models)}, hidden, order)

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
        order, phase = served.order, self.phase

        def beginning(site: SiteId) -> Request | None:
            if site not in order["sent"]:
                return None
            return Request(
                "begin",
                self.roster.study,
                phase=phase,
                begins=round,
                before=order["phase"],
                round=order["round"],
                version=order["versions"].get(site, -1),
                body=encode(order["sent"][site]),
            )

        self.roster.beginnings[phase] = beginning
        for site in self.roster.sites.values():
            site.begun.discard(phase)

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return an empty mapping, because the memories stay at the sites."""
        return {}

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Set the version of its memory that every site continues from."""
        self._versions = dict(versions)

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Tell the sites with the next requests which versions may still be asked for."""
        self.roster.needed = versions

    def incidents(self) -> Sequence[Incident]:
        """Return the incidents since the last call."""
        return self.roster.incidents()

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the device on which the server computes."""
        return self._lift(params)

    def _ask(
        self,
        kind: RequestKind,
        round: int,
        sent: Mapping[SiteId, Payload],
        able: Callable[[SiteId], bool] = lambda site: True,
        least: int = 0,
        **more: Any,
    ) -> Iterator[Heard]:
        bodies: dict[Any, Buffer] = {}
        requests: dict[SiteId, Request] = {}
        for site, payload in sent.items():
            version = self._versions.get(site, -1)
            like = _likeness(payload)
            bodies[like] = bodies.get(like) or encode(payload)
            requests[site] = Request(
                kind,
                self.roster.study,
                phase=self.phase,
                round=round,
                version=version,
                keep=tuple(sorted({*self.roster.needed.get(site, ()), version})),
                body=bodies[like],
                **more,
            )
        yield from self.roster.ask(requests, self.phase, able, least)


def _likeness(payload: Payload) -> Any:
    """Return a key that is equal for payloads with the same array objects; the contents are not compared."""
    return tuple(
        (k, v if isinstance(v, float) else tuple((n, id(x)) for n, x in v.items())) for k, v in payload.items()
    )
