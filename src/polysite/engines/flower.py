"""Real hospitals as a transport: the same five functions, asked of them over Flower.

A site answers one thing at a time. Whoever connects is greeted first, with the study, and says what it has and whether
its policy lets it take part. What a site remembers stays there, in versions: a version is the last round in which the
site was heard, so a server that goes back to a checkpoint asks for the version that belongs to it. Personal models stay
there, too: a site tells what its model hashes to, and where that is something it was sent, the server knows it already.

Nothing here opens a socket: the ``Wire`` does, which is ``polysite.engines.link``, or in a test a handful of lines.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, cast

from polysite.algorithms.base import Algorithm
from polysite.engines.compress import Compress, restore
from polysite.engines.rounds import Reply, Served, Watch
from polysite.engines.screen import kinds_of
from polysite.errors import PayloadError, RunError
from polysite.payload import Limits, Payload, SiteId, decode, encode, plain
from polysite.site import Fit, Scores, Site
from polysite.tree import Tree

PROTOCOL = 1  # of what is asked and answered here
TTL = 30 * 86400.0  # seconds; what is late is dropped here, by its deadline
MOST = 16  # incidents that a site may tell of at a time
LOOK = 60.0  # seconds between two looks at what the wire refused
Header = Mapping[str, Any]  # flat: text, numbers, lists of them
Incident = Mapping[str, Any]
Heard = tuple[SiteId, Header, Callable[[], bytes]]  # the body is to be taken, so that none is held by who passes it on

log = logging.getLogger("polysite")


class Answer(Protocol):
    """What came back for a message: a header and bytes, or why there are none."""

    @property
    def id(self) -> str: ...

    @property
    def header(self) -> Header: ...

    @property
    def error(self) -> str: ...

    def take(self) -> bytes:
        """The body, once."""
        ...


class Wire(Protocol):
    """Takes messages to sites and brings their answers back."""

    def online(self) -> Mapping[SiteId, str]:
        """Who is connected, and a token that is another one whenever a site has connected anew."""
        ...

    def send_all(self, letters: Mapping[SiteId, tuple[Header, bytes]], ttl: float, group: str) -> Mapping[SiteId, str]:
        """Returns what to ask for the answers by. A body that several sites get is the same object."""
        ...

    def collect(self, ids: Iterable[str]) -> Iterable[Answer]:
        """Those that have arrived, one by one; does not wait."""
        ...

    def forget(self, ids: Collection[str]) -> None: ...

    def incidents(self) -> Sequence[Incident]: ...


@dataclass(frozen=True)
class Terms:
    """How long to wait, and for how many."""

    quorum: int = 2  # sites that must answer before a round goes on
    deadline: float = 3600.0  # seconds after which a round goes on without those who have not answered
    grace: float = 60.0  # seconds that a site which has just gone away may take to come back
    again: float = 60.0  # seconds after which a site that refused, or failed, is asked again, if it is needed
    poll: float = 0.05  # seconds between two looks


@dataclass
class Hospital:
    """What is known of a site, and what it is doing."""

    told: dict[str, Any] = field(default_factory=dict)  # what it said of itself when it was last greeted
    token: str = ""  # of the connection
    known: bool = False  # it has said so in this connection
    refused: str = ""  # why it does not take part
    begun: set[int] = field(default_factory=set)  # the phases that it knows to have begun, in this connection
    seen: float = 0.0  # when it was last connected
    owes: dict[str, "Ask"] = field(default_factory=dict)  # what it still works on, though nobody waits for it
    greeted: float = 0.0  # when it could not be greeted, because of something that may be mended

    @property
    def ready(self) -> bool:
        return bool(self.told) and not self.refused


@dataclass(frozen=True, slots=True)
class Ask:
    header: Header
    body: bytes = b""

    @property
    def words(self) -> str:
        where = f", round {self.header['round'] + 1}" if "round" in self.header else ""
        return f"{self.header['kind']}{where}"


class Hospitals:
    """The sites of a study, as they come and go."""

    def __init__(
        self,
        wire: Wire,
        study: str,
        config: str,
        names: Sequence[SiteId],
        terms: Terms,
        about: Header,
        watch: Watch = Watch(),
    ):
        self.wire, self.study, self.config, self.terms, self.about = wire, study, config, terms, about
        self.watch = watch
        self.sites = {name: Hospital() for name in sorted(names)}
        self.beginnings: dict[int, Callable[[SiteId], Ask | None]] = {}  # of phases: how a site is brought there
        self.needed: Mapping[SiteId, Collection[int]] = {}  # versions of memories, in all phases
        self._journal: Callable[[Incident], None] = lambda incident: None
        self._incidents: list[Incident] = []
        self._looked = 0.0  # when the wire was last asked for what it refused

    def note(self, what: str, site: SiteId = "", **more: Any) -> None:
        """Something went wrong that the record should know of."""
        log.warning("%s%s", f"{site}: " if site else "", what)
        if site:
            self.watch.doing(site, what, False)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._add({"time": now, **({"site": site} if site else {}), "what": what, **more})

    def _add(self, incident: Incident) -> None:
        self._incidents.append(incident)
        self._journal(incident)

    def keep(self, journal: Callable[[Incident], None]) -> None:
        """Have every incident written down at once, from those on that there are already: this may be killed."""
        self._journal = journal
        for each in self._incidents:
            journal(each)

    def recall(self, incidents: Iterable[Incident]) -> None:
        """What the journal has, and no record: also what an earlier server did not live to record."""
        self._incidents = list(incidents)

    def _overhear(self, now: float) -> None:
        """What the wire refused; not too often, since it counts equal ones together."""
        self._looked = now
        for each in self.wire.incidents():
            self._add(each)

    def incidents(self) -> list[Incident]:
        self._overhear(time.monotonic())
        found, self._incidents = self._incidents, []
        return found

    def gather(self, wait: float) -> None:
        """Greet whoever is there; wait for all that long, and for a quorum without end."""
        began = time.monotonic()
        for name in self.sites:
            self.watch.doing(name, "not connected yet", False)
        for _ in self._exchange({}, lambda: self._enough(began, wait)):
            ...
        if len(self.ready) < self.terms.quorum:  # and nobody is left to wait for
            reasons = "; ".join(f"{i}: {s.refused}" for i, s in self.sites.items() if s.refused)
            raise RunError(
                f"{len(self.ready)} of {len(self.sites)} sites take part, fewer than the {self.terms.quorum} that the "
                f"study needs: {reasons}"
            )

    def _enough(self, began: float, wait: float) -> bool:
        answered = all(s.ready or s.refused for s in self.sites.values())
        return answered or (len(self.ready) >= self.terms.quorum and time.monotonic() - began > wait)

    @property
    def ready(self) -> list[SiteId]:
        return [i for i, s in self.sites.items() if s.ready]

    def ask(self, asks: Mapping[SiteId, Ask], phase: int = 0) -> Iterator[Heard]:
        """Answers as they arrive, from whoever gives one before the deadline; at least a quorum, however long it takes.

        Nobody waits for a site that was away before; one that has just gone may come back within the grace, and is
        then asked again. A site that still works on something else is not asked; one that refuses, or fails, is asked
        again after a while, if it is needed.
        """
        began, answered = time.monotonic(), 0
        least = min(self.terms.quorum, len(asks))
        for site in sorted(asks.keys() & self.wire.online().keys()):
            for owed in self.sites[site].owes.values():
                self.note(f"still busy with {owed.words}; not asked before that", site)
        open_asks = dict(asks)
        held: dict[SiteId, float] = {}  # who said no, and until when that is left so
        late = False

        def over() -> bool:
            nonlocal late
            if answered < least:
                if not late and time.monotonic() - began > self.terms.deadline:
                    late = True
                    self.note(f"{answered} answers, {least} are needed: waiting on for sites to come back")
                return False
            hope = any(self._hopeful(i) for i in open_asks.keys() - held.keys())
            return time.monotonic() - began > self.terms.deadline or not hope

        for site, header, take in self._exchange(open_asks, over, phase, held):
            no = header.get("refused") or header.get("error")
            if no:
                if site not in held:
                    self.note(f"{'refuses' if header.get('refused') else 'fails'}: {no}", site)
                held[site] = time.monotonic() + self.terms.again
            else:
                answered += 1
                open_asks.pop(site)
                yield site, header, take
        for site in sorted(open_asks.keys() - held.keys()):
            where = "away" if site not in self.wire.online() else "too late"
            self.note(f"{where}: no answer to {open_asks[site].words}", site)

    def _hopeful(self, site: SiteId) -> bool:
        """Whether a site may still answer: it is there, or has just gone away."""
        found, here = self.sites[site], site in self.wire.online()
        if found.greeted and not found.known:  # something there must be mended first
            return False
        away = time.monotonic() - found.seen
        return not found.refused and not found.owes and (here or away < self.terms.grace)

    def _exchange(
        self,
        asks: Mapping[SiteId, Ask],
        over: Callable[[], bool],
        phase: int = 0,
        held: Mapping[SiteId, float] = MappingProxyType({}),
    ) -> Iterator[Heard]:
        """Greet, bring to the phase, ask, ask again after a restart; until ``over``. The caller takes out of ``asks``
        what is answered, and says who is held, until when."""
        waiting: dict[str, tuple[SiteId, Ask]] = {}  # what was sent, by its id
        while True:
            online, now = self.wire.online(), time.monotonic()
            self._meet(online, waiting)
            busy = {site for site, _ in waiting.values()} | {i for i, until in held.items() if until > now}
            due = {i: self._next(i, asks.get(i), phase) for i in online if i in self.sites and i not in busy}
            messages = {i: a for i, a in due.items() if a is not None}
            if messages:
                sent = self.wire.send_all({i: (a.header, a.body) for i, a in messages.items()}, TTL, self.study)
                waiting.update({id: (i, messages[i]) for i, id in sent.items()})
                for i in sent:
                    self.watch.doing(i, messages[i].words, False)
            for answer in self.wire.collect(waiting.keys()) if waiting else ():
                site, ask = waiting.pop(answer.id)
                self._hear(site, answer)
                got = self._take(site, ask, answer)
                if got is not None and site in asks:
                    yield site, got, answer.take
            self._late()
            if now > self._looked + LOOK:
                self._overhear(now)
            if over():
                break
            time.sleep(self.terms.poll)
        for id, (site, ask) in waiting.items():
            self.sites[site].owes[id] = ask

    def _meet(self, online: Mapping[SiteId, str], waiting: dict[str, tuple[SiteId, Ask]]) -> None:
        """Notice who came, and whose former connection is lost with all that it was asked."""
        now = time.monotonic()
        for name, token in online.items():
            site = self.sites.get(name)
            if site is None:
                continue
            if site.token and site.token != token:
                self.note("connected anew", name)
                lost = [id for id, (i, _) in waiting.items() if i == name]
                self.wire.forget([*lost, *site.owes])
                for id in lost:
                    waiting.pop(id)
                site.owes, site.known, site.begun, site.refused, site.greeted = {}, False, set(), "", 0.0
            site.token, site.seen = token, now

    def _next(self, name: SiteId, wanted: Ask | None, phase: int) -> Ask | None:
        """What a site is to be asked now: to say who it is, to begin a phase, or what is wanted of it."""
        site = self.sites[name]
        if site.refused or site.owes:
            return None
        if not site.known and time.monotonic() - site.greeted < self.terms.again:
            return None
        if not site.known:
            return Ask({"kind": "hello", "config": self.config, "from": "coordinator", **self.common})
        if wanted is None:
            return None
        for k in sorted(k for k in self.beginnings if k <= phase and k not in site.begun):
            beginning = self.beginnings[k](name)
            if beginning is not None:
                return beginning
        return wanted

    @property
    def common(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "study": self.study, **self.about}

    def _take(self, name: SiteId, ask: Ask, answer: Answer) -> Header | None:
        """An answer that the caller is to have; greetings and beginnings are dealt with here."""
        site, kind = self.sites[name], ask.header["kind"]
        header = {**answer.header, "kind": kind}
        if answer.error:
            header["error"] = answer.error
        if kind == "hello":
            if header.get("error"):
                if not site.greeted:
                    self.note(f"could not be greeted: {header['error']}", name)
                site.greeted = time.monotonic()
            elif header.get("refused"):
                site.refused = str(header["refused"])
                self.note(f"does not take part: {site.refused}", name)
            else:
                site.told, site.known = dict(header), True
                self.watch.doing(name, "takes part", True)
            return None
        if kind == "begin":
            if header.get("refused") or header.get("error"):
                return {**header, "refused": header.get("refused") or header["error"]}
            site.begun.add(int(ask.header["phase"]))
            return None
        self.watch.doing(name, f"answered {ask.words}", True)
        return header

    def _hear(self, name: SiteId, answer: Answer) -> None:
        """What a site tells of itself besides its answer: its worker was killed, its link was cut."""
        said = answer.header.get("incidents", ())
        for what in said[:MOST] if isinstance(said, list) else ():
            self.note(str(what)[:200], name)

    def _late(self) -> None:
        """Answers that nobody waits for any more: dropped, and listed; but a site that is greeted may take its time."""
        owed = {id: (name, ask) for name, site in self.sites.items() for id, ask in site.owes.items()}
        for answer in self.wire.collect(owed.keys()) if owed else ():
            name, ask = owed[answer.id]
            del self.sites[name].owes[answer.id]
            self._hear(name, answer)
            if ask.header["kind"] in ("hello", "begin"):
                self._take(name, ask, answer)
            else:
                self.note(f"its answer to {ask.words} came late and was dropped", name)


class Flower:
    """One phase of a study over real sites."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        hospitals: Hospitals,
        phase: int = 0,
        lift: Callable[[Tree], Tree] = lambda t: t,
        kind: str = "train",
        compress: Compress = "none",
        limits: Limits = Limits(),
    ):
        self.algorithm, self.hospitals, self.phase, self.lift = algorithm, hospitals, phase, lift
        self.kind, self.compress, self.limits = kind, compress, limits
        self._versions: dict[SiteId, int] = {}
        self._round = -1

    @property
    def names(self) -> tuple[SiteId, ...]:
        """All who may train, or be described; of whom nothing is known yet may come later."""
        if self.kind == "assess":
            return tuple(i for i, s in self.hospitals.sites.items() if s.ready and s.told.get("described", True))
        return tuple(i for i, s in self.hospitals.sites.items() if not s.refused and s.told.get("train", 1))

    @property
    def audience(self) -> tuple[SiteId, ...]:
        told = {i: s.told for i, s in self.hospitals.sites.items() if s.ready}
        return tuple(i for i, t in told.items() if t.get("judges", True) and (t.get("validation") or t.get("test")))

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        self._round = round
        for site, header, take in self._ask(self.kind, round, sent):
            try:
                left = decode(take(), self.limits)
                kinds = kinds_of(self.algorithm.reply, sent[site], left)
                payload = restore(self.compress, kinds, sent[site], left).each(self.lift)
            except PayloadError as problem:
                self.hospitals.note(f"its reply is refused: {problem}", site)
                continue
            yield site, Reply(payload, _fits(header), float(header.get("seconds", 0.0)), left.nbytes)

    def settle(self, heard: Collection[SiteId]) -> None:
        self._versions.update(dict.fromkeys(heard, self._round))

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        found: dict[SiteId, Scores] = {}
        for site, header, _ in self._ask("score", round, sent, split=split):
            try:
                found[site] = _scores(header)
            except PayloadError as problem:
                self.hospitals.note(str(problem), site)
        return {i: found[i] for i in sorted(found)}

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        models: dict[SiteId, tuple[Tree, ...]] = {}
        hidden: dict[SiteId, int] = {}
        for site, header, _ in self._ask("serve", round, sent, name=name):
            said, known = list(header["digests"]), self._guess(sent[site])
            if all(d in known for d in said):
                models[site] = tuple(dict(known[d]) for d in said)
            else:
                hidden[site] = len(said)
        order = {"phase": self.phase, "round": round, "sent": sent, "versions": dict(self._versions)}
        return Served({i: models[i] for i in sorted(models)}, hidden, order)

    def _guess(self, sent: Payload) -> dict[str, Tree]:
        """By what they hash to, the models that a site may have which knows nothing but what it was sent."""
        try:
            served = [tree for tree, _ in self.algorithm.serve(sent, Payload(), cast(Site, None), ())]
        except (AttributeError, KeyError, TypeError):  # it needs the site, or what that remembers
            served = []
        trees = (*served, *(v for v in sent.values() if not isinstance(v, float)))
        return {digest(tree): tree for tree in trees}

    def begin(self, round: int, served: Served) -> None:
        order, mine = served.order, self.phase

        def beginning(site: SiteId) -> Ask | None:
            if site not in order["sent"]:
                return None
            header = {
                **self.hospitals.common,
                "kind": "begin",
                "phase": mine,
                "begins": round,
                "before": order["phase"],
                "round": order["round"],
                "version": order["versions"].get(site, -1),
            }
            return Ask(header, encode(order["sent"][site]))

        self.hospitals.beginnings[mine] = beginning
        for site in self.hospitals.sites.values():
            site.begun.discard(mine)

    def memories(self) -> Mapping[SiteId, Payload]:
        return {}  # they stay where they are

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        self._versions = dict(versions)

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        self.hospitals.needed = versions

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        return self.hospitals.incidents()

    def _ask(self, kind: str, round: int, sent: Mapping[SiteId, Payload], **more: Any) -> Iterator[Heard]:
        bodies: dict[Any, bytes] = {}
        asks: dict[SiteId, Ask] = {}
        for site, payload in sent.items():
            header = {
                **self.hospitals.common,
                "kind": kind,
                "phase": self.phase,
                "round": round,
                "version": self._versions.get(site, -1),
                "keep": sorted({*self.hospitals.needed.get(site, ()), self._versions.get(site, -1)}),
                **more,
            }
            like = _likeness(payload)
            bodies[like] = bodies.get(like) or encode(payload)
            asks[site] = Ask(header, bodies[like])
        yield from self.hospitals.ask(asks, self.phase)


def digest(tree: Tree) -> str:
    """The same for the same names, shapes, types and bytes."""
    found = hashlib.sha256()
    for name in sorted(tree):
        array = plain(tree[name])
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(array.reshape(-1).view("uint8").data)
    return found.hexdigest()


def _likeness(payload: Payload) -> Any:
    """The same for payloads of the same arrays, without looking into them."""
    return tuple(
        (k, v if isinstance(v, float) else tuple((n, id(x)) for n, x in v.items())) for k, v in payload.items()
    )


def _fits(header: Header) -> tuple[Fit, ...]:
    """What local training did, without the parameters that it came to."""
    columns = [list(header.get(f"fit_{name}", ())) for name in ("loss", "steps", "time", "reach")]
    return tuple(
        Fit({}, float(loss), int(steps), float(t), float(r)) for loss, steps, t, r in zip(*columns, strict=True)
    )


def _scores(header: Header) -> Scores:
    try:
        found = json.loads(header["scores"])
        return {str(case): {str(k): float(v) for k, v in s.items()} for case, s in found.items()}
    except (KeyError, ValueError, AttributeError, TypeError) as problem:
        raise PayloadError(f"its scores cannot be read: {problem}") from problem
