"""Real hospitals as a transport: the same five functions, asked of them over Flower.

A site answers one thing at a time. Whoever connects is greeted first, with the study, and says what it has and whether
its policy lets it take part. What a site remembers stays there, in versions: a version is the last round in which the
site was heard, so a server that goes back to a checkpoint asks for the version that belongs to it. Personal models stay
there, too: a site tells what its model hashes to, and where that is something it was sent, the server knows it already.

What a site says is read where it is taken. An answer that nobody can mean is worth as much as one that says that
something failed: it is noted, and the site is asked again when it is needed. No site can end a study with words.

Nothing here opens a socket: the ``Wire`` does, which is ``polysite.deploy.flower.server``, or in a test a handful of lines.
"""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, cast

from polysite.algorithms.base import Algorithm
from polysite.data.case import SPLITS
from polysite.engines.compress import Compress, restore
from polysite.engines.reply_checks import kinds_of
from polysite.engines.rounds import Watch
from polysite.engines.transport import Reply, Served
from polysite.errors import PayloadError, RunError, shown
from polysite.payload import Limits, Payload, SiteId, decode, encode, plain
from polysite.site import Fit, Scores, Site
from polysite.tree import Tree

PROTOCOL = 1  # of what is asked and answered here
TTL = 30 * 86400.0  # seconds; what is late is dropped here, by its deadline
MOST = 16  # incidents that a site may tell of at a time
LOOK = 60.0  # seconds between two looks at what the wire refused
COUNT = 1e9  # cases, steps, seconds: no site comes to that many
SINGLE = 3.5e38  # no number of single precision is beyond it
CASES = 100_000  # that a site may score which does not say how many it has
SCORES = 16 << 20  # characters of all its scores
MODELS = 64  # of one site
Header = Mapping[str, Any]  # flat: text, numbers, lists of them
Incident = Mapping[str, Any]
Scale = Mapping[str, float]  # what a case is scored by besides the loss, and the highest value of each
# what was read of an answer; the body is to be taken, so that none is held by who passes it on
Heard = tuple[SiteId, Header, Callable[[], bytes]]

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
class Deadlines:
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


class Roster:
    """The sites of a study, as they come and go."""

    def __init__(
        self,
        wire: Wire,
        study: str,
        config: str,
        names: Sequence[SiteId],
        deadlines: Deadlines,
        about: Header,
        watch: Watch = Watch(),
        scale: Scale = MappingProxyType({}),
    ):
        self.wire, self.study, self.config, self.deadlines, self.about = wire, study, config, deadlines, about
        self.watch, self.scale = watch, scale
        self.sites = {name: Hospital() for name in sorted(names)}
        self.beginnings: dict[int, Callable[[SiteId], Ask | None]] = {}  # of phases: how a site is brought there
        self.needed: Mapping[SiteId, Collection[int]] = {}  # versions of memories, in all phases
        self._journal: Callable[[Incident], None] = lambda incident: None
        self._incidents: list[Incident] = []
        self._looked = 0.0  # when the wire was last asked for what it refused

    def note(self, what: str, site: SiteId = "", **more: Any) -> None:
        """Something went wrong that the record should know of."""
        what = shown(what)
        log.warning("%s%s", f"{site}: " if site else "", what)
        if site:
            self.watch.doing(site, what, False)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._add({"time": now, **({"site": site} if site else {}), "what": what, **more})

    def _add(self, incident: Incident) -> None:
        kept = {k: shown(v) if isinstance(v, str) else v for k, v in incident.items()}
        self._incidents.append(kept)
        self._journal(kept)

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
        if len(self.ready) < self.deadlines.quorum:  # and nobody is left to wait for
            reasons = "; ".join(f"{i}: {s.refused}" for i, s in self.sites.items() if s.refused)
            raise RunError(
                f"{len(self.ready)} of {len(self.sites)} sites take part, fewer than the {self.deadlines.quorum} that the "
                f"study needs: {reasons}"
            )

    def _enough(self, began: float, wait: float) -> bool:
        answered = all(s.ready or s.refused for s in self.sites.values())
        return answered or (len(self.ready) >= self.deadlines.quorum and time.monotonic() - began > wait)

    @property
    def ready(self) -> list[SiteId]:
        return [i for i, s in self.sites.items() if s.ready]

    def ask(
        self, asks: Mapping[SiteId, Ask], phase: int = 0, able: Callable[[SiteId], bool] = lambda site: True
    ) -> Iterator[Heard]:
        """Answers as they arrive, from whoever gives one before the deadline; at least a quorum, however long it takes.

        Nobody waits for a site that was away before; one that has just gone may come back within the grace, and is
        then asked again. A site that still works on something else is not asked; one that refuses, or fails, is asked
        again after a while, if it is needed. The quorum is one of those that are ``able`` to answer; a site may tell
        otherwise when it comes back.
        """
        began, answered = time.monotonic(), 0
        for site in sorted(asks.keys() & self.wire.online().keys()):
            for owed in self.sites[site].owes.values():
                self.note(f"still busy with {owed.words}; not asked before that", site)
        open_asks = dict(asks)
        held: dict[SiteId, float] = {}  # who said no, and until when that is left so
        late = False

        def over() -> bool:
            nonlocal late
            least = min(self.deadlines.quorum, sum(map(able, asks)))
            if answered < least:
                if not late and time.monotonic() - began > self.deadlines.deadline:
                    late = True
                    self.note(f"{answered} answers, {least} are needed: waiting on for sites to come back")
                return False
            hope = any(self._hopeful(i) for i in open_asks.keys() - held.keys())
            return time.monotonic() - began > self.deadlines.deadline or not hope

        for site, said, take in self._exchange(open_asks, over, phase, held):
            no = _no(said)
            if no:
                if site not in held:
                    self.note(f"{'refuses' if 'refused' in said else 'fails'}: {no}", site)
                held[site] = time.monotonic() + self.deadlines.again
            else:
                answered += 1
                open_asks.pop(site)
                yield site, said, take
        for site in sorted(open_asks.keys() - held.keys()):
            if self.sites[site].greeted and not self.sites[site].known:
                continue  # it was not asked, and why was noted
            where = "away" if site not in self.wire.online() else "too late"
            self.note(f"{where}: no answer to {open_asks[site].words}", site)

    def _hopeful(self, site: SiteId) -> bool:
        """Whether a site may still answer: it is there, or has just gone away."""
        found, here = self.sites[site], site in self.wire.online()
        if found.greeted and not found.known:  # something there must be mended first
            return False
        away = time.monotonic() - found.seen
        return not found.refused and not found.owes and (here or away < self.deadlines.grace)

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
            time.sleep(self.deadlines.poll)
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
        if not site.known and time.monotonic() - site.greeted < self.deadlines.again:
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
        said = self._read(name, ask, answer)
        no = _no(said)
        if kind == "hello":
            if "refused" in said:
                site.refused = no
                self.note(f"does not take part: {no}", name)
            elif no:
                if not site.greeted:
                    self.note(f"could not be greeted: {no}", name)
                site.greeted = time.monotonic()
            else:
                site.told, site.known = dict(said), True
                self.watch.doing(name, "takes part", True)
            return None
        if kind == "begin":
            if not no:
                site.begun.add(int(ask.header["phase"]))
            return {"refused": no} if no else None
        if not no:
            self.watch.doing(name, f"answered {ask.words}", True)
        return said

    def _read(self, name: SiteId, ask: Ask, answer: Answer) -> Header:
        """What an answer says, if anybody can mean it; or why there is none."""
        header, told = answer.header, self.sites[name].told
        if answer.error or header.get("error"):
            return {"error": shown(answer.error or header["error"])}
        if header.get("refused"):
            return {"refused": shown(header["refused"])}
        try:
            match ask.header["kind"]:
                case "hello":
                    return _greeting(header)
                case "train" | "assess":
                    return {"fits": _fits(header), "seconds": _number("seconds", header.get("seconds", 0.0))}
                case "score":
                    return {"scores": _scores(header, told.get(ask.header["split"], 0), self.scale)}
                case "serve":
                    return {"digests": _digests(header)}
            return {}
        except PayloadError as problem:
            return {"error": f"its answer to {ask.words} makes no sense: {problem}"}

    def _hear(self, name: SiteId, answer: Answer) -> None:
        """What a site tells of itself besides its answer: its worker was killed, its link was cut."""
        said = answer.header.get("incidents", ())
        for what in said[:MOST] if isinstance(said, list) else ():
            self.note(str(what), name)

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


class RemoteSites:
    """One phase of a study over real sites."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        hospitals: Roster,
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
            return tuple(i for i, s in self.hospitals.sites.items() if s.ready and s.told["described"])
        return tuple(i for i, s in self.hospitals.sites.items() if not s.refused and s.told.get("train", 1))

    @property
    def audience(self) -> tuple[SiteId, ...]:
        told = {i: s.told for i, s in self.hospitals.sites.items() if s.ready}
        return tuple(i for i, t in told.items() if t["judges"] and (t["validation"] or t["test"]))

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        self._round = round
        for site, said, take in self._ask(self.kind, round, sent):
            try:
                left = decode(take(), self.limits)
                kinds = kinds_of(self.algorithm.reply, sent[site], left)
                payload = restore(self.compress, kinds, sent[site], left).each(self.lift)
            except PayloadError as problem:
                self.hospitals.note(f"its reply is refused: {problem}", site)
                continue
            yield site, Reply(payload, said["fits"], said["seconds"], left.nbytes)

    def settle(self, heard: Collection[SiteId]) -> None:
        self._versions.update(dict.fromkeys(heard, self._round))

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        asked = self._ask("score", round, sent, lambda site: site in self.audience, split=split)
        found: dict[SiteId, Scores] = {site: said["scores"] for site, said, _ in asked}
        if not any(found.values()) and any(s.told.get(split) for s in self.hospitals.sites.values()):
            self.hospitals.note(f"nobody judged the model of round {round + 1} by {split} cases")
        return {i: found[i] for i in sorted(found)}

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        models: dict[SiteId, tuple[Tree, ...]] = {}
        hidden: dict[SiteId, int] = {}
        for site, told, _ in self._ask("serve", round, sent, name=name):
            known, sure = self._guess(sent[site])
            if sure and told["digests"] != sure:  # it lies, or its machine rounds otherwise
                self.hospitals.note("has another model by its own account; the study goes by what was sent", site)
            said = sure or told["digests"]
            if all(d in known for d in said):
                models[site] = tuple(dict(known[d]) for d in said)
            else:
                hidden[site] = len(said)
        order = {"phase": self.phase, "round": round, "sent": sent, "versions": dict(self._versions)}
        return Served({i: models[i] for i in sorted(models)}, hidden, order)

    def _guess(self, sent: Payload) -> tuple[dict[str, Tree], list[str]]:
        """By what they hash to, the models that a site may have which knows nothing but what it was sent; and those
        that it must have, whatever it is and remembers."""
        trees = [v for v in sent.values() if not isinstance(v, float)]
        sure = self._served(sent, cast(Payload, object()))  # to look into it, for anything, fails
        known = {digest(tree): tree for tree in (*self._served(sent, Payload()), *trees)}
        return known, [digest(tree) for tree in sure]

    def _served(self, sent: Payload, memory: Payload) -> list[Tree]:
        try:
            return [tree for tree, _ in self.algorithm.serve(sent, memory, cast(Site, None), ())]
        except (AttributeError, KeyError, TypeError):  # it needs the site, or what that remembers
            return []

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

    def _ask(
        self,
        kind: str,
        round: int,
        sent: Mapping[SiteId, Payload],
        able: Callable[[SiteId], bool] = lambda site: True,
        **more: Any,
    ) -> Iterator[Heard]:
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
        yield from self.hospitals.ask(asks, self.phase, able)


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


# what sites say: read, or refused with a PayloadError


def _no(said: Header) -> str:
    """Why there is no answer, if there is none."""
    return str(said.get("refused") or said.get("error") or "")


def _number(what: str, value: Any, most: float = COUNT) -> float:
    if not _numeric(value) or not 0 <= value <= most:
        raise PayloadError(f"{what}: {value!r:.40} is no number from 0 to {most:g}")
    return float(value)


def _loss(what: str, value: Any) -> float:
    """Any number: a model that has come apart has an endless loss, or none, and that is no lie."""
    if not _numeric(value):
        raise PayloadError(f"{what}: {value!r:.40} is no number")
    return float(value) if abs(value) < SINGLE else math.nan


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _greeting(header: Header) -> dict[str, Any]:
    """What a site says of itself: how many cases it has, what it lets be asked, what it runs on."""
    found: dict[str, Any] = {part: header.get(part) for part in SPLITS}
    for part, count in found.items():
        if type(count) is not int or not 0 <= count < COUNT:
            raise PayloadError(f"{part}: {count!r:.40} is no number of cases")
    for name in ("judges", "described"):
        found[name] = header.get(name, True)
        if type(found[name]) is not bool:
            raise PayloadError(f"{name}: {found[name]!r:.40} is neither true nor false")
    return {**found, **{name: shown(header.get(name, ""))[:80] for name in ("torch", "device")}}


def _fits(header: Header) -> tuple[Fit, ...]:
    """What local training did, without the parameters that it came to."""
    columns = [header.get(f"fit_{name}", []) for name in ("loss", "steps", "lr_sum", "reach")]
    if not all(isinstance(c, list) for c in columns) or len({len(c) for c in columns}) > 1:
        raise PayloadError("losses, steps and learning rates of its training are not lists of one length")
    return tuple(
        Fit({}, _loss("loss", a), int(_number("steps", b)), _number("learning rates", c), _number("reach", d))
        for a, b, c, d in zip(*columns, strict=True)
    )


def _scores(header: Header, count: int, scale: Scale) -> Scores:
    """The scores of so many cases, or fewer; one alone may stand for a number that a policy keeps back."""
    text, most = header.get("scores"), count if count != 1 else CASES
    if not isinstance(text, str) or len(text) > SCORES:
        raise PayloadError("its scores are no text, or one without end")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise PayloadError(f"its scores cannot be read: {problem}") from problem
    if not isinstance(found, dict) or len(found) > most:
        raise PayloadError(f"its scores are not those of {most} cases, or fewer")
    return {_case(name): _scored(name, s, scale) for name, s in found.items()}


def _case(name: str) -> str:
    if not name.isprintable() or not 0 < len(name) <= 64:
        raise PayloadError(f"{name!r:.40} is no name of a case")
    return name


def _scored(case: str, scores: Any, scale: Scale) -> dict[str, float]:
    if not isinstance(scores, dict) or scores.keys() != {*scale, "loss"}:
        raise PayloadError(f"{case!r} is not scored by {', '.join(scale)} and the loss")
    found = {k: _number(f"{k} of {case!r}", scores[k], most) for k, most in scale.items()}
    return {**found, "loss": _loss(f"loss of {case!r}", scores["loss"])}


def _digests(header: Header) -> list[str]:
    said = header.get("digests")
    if not isinstance(said, list) or not 0 < len(said) <= MODELS:
        raise PayloadError(f"digests: {said!r:.40} are not those of 1 to {MODELS} models")
    for each in said:
        if not isinstance(each, str) or not re.fullmatch("[0-9a-f]{64}", each):
            raise PayloadError(f"digests: {each!r:.40} is none")
    return list(said)
