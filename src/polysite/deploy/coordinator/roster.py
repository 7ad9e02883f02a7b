"""The sites of a deployed study as they come and go: who is connected, greeted, busy, late or refusing.

A site answers one request at a time. A site that connects is greeted first, with the study, and reports its numbers of
cases and what its policy allows. A response that is not valid counts as a failure: it is noted, and the site is asked
again when it is needed. No response of a site can end a study.

Nothing here opens a socket: the ``Wire`` does. That of ``polysite.deploy.flower.server`` does; the tests have
one without a network.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from polysite.buffers import Buffer
from polysite.deploy.protocol import (
    Begun,
    Failed,
    Greeting,
    Header,
    Refused,
    Request,
    Response,
    Subject,
    parse_response,
)
from polysite.engines.record import Incident, incident
from polysite.engines.rounds import Watch
from polysite.errors import RunError, shown
from polysite.payload import SiteId

TTL = 30 * 86400.0  # seconds that the wire keeps a message; deadlines are enforced here
MAX_INCIDENTS = 16  # that a site may report at a time
WIRE_CHECK = 60.0  # seconds between two checks for what the wire refused

Heard = tuple[SiteId, Response, Callable[[], Buffer]]  # the last takes the body, which may be large, out of the wire

log = logging.getLogger("polysite")


@dataclass(slots=True)
class Envelope:
    """What came back for a message, with the identifier of the message: header and body, or an error of the wire."""

    id: str
    header: Header = field(default_factory=dict)
    body: Buffer = b""
    error: str = ""

    def take(self) -> Buffer:
        """Return the body and release it: it may have gigabytes."""
        body, self.body = self.body, b""
        return body


class Wire(Protocol):
    """Carries requests to sites and responses back."""

    def online(self) -> Mapping[SiteId, str]:
        """Return the connected sites, each with a token that changes whenever the site connects anew."""
        ...

    def send_all(self, letters: Mapping[SiteId, tuple[Header, Buffer]], ttl: float, group: str) -> Mapping[SiteId, str]:
        """Send a header and a body to every site; return the identifiers by which to collect the responses. Sites that
        get the same body share one object."""
        ...

    def collect(self, ids: Iterable[str]) -> Iterable[Envelope]:
        """Yield the responses that have arrived, without waiting."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something may have arrived, at the latest after so many seconds."""
        ...

    def forget(self, ids: Collection[str]) -> None:
        """Drop these messages and their responses."""
        ...

    def incidents(self) -> Sequence[Incident]:
        """Return what the wire refused since the last call."""
        ...


@dataclass(frozen=True)
class Deadlines:
    """How long the coordinator waits for sites, and for how many.

    Args:
        quorum: Number of sites that must respond before a round continues.
        deadline: Seconds after which a round continues without the missing sites.
        grace: Seconds in which a site that has just disconnected may come back.
        again: Seconds after which a site that refused or failed is asked again, if it is needed.
        poll: Most seconds between two checks for responses.
    """

    quorum: int = 2
    deadline: float = 3600.0
    grace: float = 60.0
    again: float = 60.0
    poll: float = 0.05


@dataclass
class SiteStatus:
    """What is known about a site, and what it is doing."""

    greeting: Greeting | None = None  # the last one
    cases: Mapping[str, int] = field(default_factory=dict)  # their numbers in its first greeting, which stand
    token: str = ""  # of its connection
    known: bool = False  # it was greeted in this connection
    refused: str = ""  # why it does not take part
    begun: set[int] = field(default_factory=set)  # phases that it has begun, in this connection
    seen: float = 0.0  # when it was last connected
    owes: dict[str, Request] = field(default_factory=dict)  # requests that it works on, past their deadline
    greeting_failed: float = 0.0  # when it could not be greeted, for a reason that may be mended

    @property
    def ready(self) -> bool:
        """Whether the site takes part: it has been greeted and does not refuse."""
        return self.greeting is not None and not self.refused


class Roster:
    """The sites of a study, as they come and go.

    Args:
        wire: Carries the messages.
        study: Name by which all sides know the study.
        config: The study as TOML.
        names: The sites.
        deadlines: How long to wait.
        identity: Version and digest of the coordinator's code.
        watch: Observer of the progress.
        subject: What cases are scored by.
    """

    def __init__(
        self,
        wire: Wire,
        study: str,
        config: str,
        names: Sequence[SiteId],
        deadlines: Deadlines,
        identity: Mapping[str, str],
        watch: Watch = Watch(),
        subject: Subject = Subject(),
    ):
        self.wire, self.study, self.config, self.deadlines, self.identity = wire, study, config, deadlines, identity
        self.watch, self.subject = watch, subject
        self.sites = {name: SiteStatus() for name in sorted(names)}
        self.beginnings: dict[int, Callable[[SiteId], Request | None]] = {}  # phase -> how a site begins it
        self.needed: Mapping[SiteId, Collection[int]] = {}  # versions of memories, in all phases
        self.secret = secrets.randbits(63)  # of the guard
        self._journal: Callable[[Incident], None] = lambda incident: None
        self._incidents: list[Incident] = []
        self._wire_checked = 0.0

    # incidents

    def note(self, what: str, site: SiteId = "", **more: Any) -> None:
        """Log and record an incident."""
        what = shown(what)
        log.warning("%s%s", f"{site}: " if site else "", what)
        if site:
            self.watch.doing(site, what, False)
        self._add({**incident(what, site), **more})

    def _add(self, incident: Incident) -> None:
        kept = {k: shown(v) if isinstance(v, str) else v for k, v in incident.items()}
        self._incidents.append(kept)
        self._journal(kept)

    def keep(self, journal: Callable[[Incident], None]) -> None:
        """Write all incidents so far, and each new one at once, to a journal, because this process may be killed."""
        self._journal = journal
        for each in self._incidents:
            journal(each)

    def recall(self, incidents: Iterable[Incident]) -> None:
        """Replace the incidents by those of the journal that no round has recorded yet."""
        self._incidents = list(incidents)

    def incidents(self) -> list[Incident]:
        """Return the incidents since the last call."""
        self._check_wire(time.monotonic())
        incidents, self._incidents = self._incidents, []
        return incidents

    def _check_wire(self, now: float) -> None:
        self._wire_checked = now
        for each in self.wire.incidents():
            self._add(each)

    # requests

    def gather(self, wait: float) -> None:
        """Greet the sites that connect. Waits ``wait`` seconds for all of them, and without limit for a quorum."""
        began = time.monotonic()
        for name in self.sites:
            self.watch.doing(name, "not connected yet", False)

        def enough() -> bool:
            all_answered = all(s.ready or s.refused for s in self.sites.values())
            return all_answered or (len(self.ready) >= self.deadlines.quorum and time.monotonic() - began > wait)

        for _ in self._exchange({}, enough):
            ...
        if len(self.ready) < self.deadlines.quorum:  # and all other sites refuse
            reasons = "; ".join(f"{i}: {s.refused}" for i, s in self.sites.items() if s.refused)
            raise RunError(
                f"{len(self.ready)} of {len(self.sites)} sites take part, fewer than the {self.deadlines.quorum} that "
                f"the study needs: {reasons}"
            )

    @property
    def ready(self) -> list[SiteId]:
        """Sites that take part."""
        return [i for i, s in self.sites.items() if s.ready]

    def ask(
        self,
        requests: Mapping[SiteId, Request],
        phase: int = 0,
        able: Callable[[SiteId], bool] = lambda site: True,
        least: int = 0,
    ) -> Iterator[Heard]:
        """Yield responses as they arrive until the deadline; at least a quorum of them, however long that takes.

        A site that was away before is not waited for. A site that has just disconnected may come back within the grace
        period and is then asked again. A site that still works on another request is not asked. A site that refuses or
        fails is asked again after a while, if it is needed.

        Args:
            requests: What to ask each site.
            phase: The phase that the sites must have begun.
            able: Whether a site can answer; the quorum counts only such sites. It may change when a site comes back.
            least: Number of answers that are needed, if it is more than the quorum.
        """
        began, answered, late = time.monotonic(), 0, False
        for site in sorted(requests.keys() & self.wire.online().keys()):
            for owed in self.sites[site].owes.values():
                self.note(f"still busy with {owed.words}; not asked before that", site)
        pending = dict(requests)
        held: dict[SiteId, float] = {}  # sites that refused or failed, and when they may be asked again

        def over() -> bool:
            nonlocal late
            needed = min(max(self.deadlines.quorum, least), sum(map(able, requests)))
            if answered < needed:
                if not late and time.monotonic() - began > self.deadlines.deadline:
                    late = True
                    self.note(f"{answered} answers, {needed} are needed: waiting on for sites to come back")
                return False
            hope = any(self._may_answer(i) for i in pending.keys() - held.keys())
            return time.monotonic() - began > self.deadlines.deadline or not hope

        for site, response, take in self._exchange(pending, over, phase, held):
            if isinstance(response, Refused | Failed):
                if site not in held:
                    verb = "refuses" if isinstance(response, Refused) else "fails"
                    self.note(f"{verb}: {response.reason}", site)
                held[site] = time.monotonic() + self.deadlines.again
            else:
                answered += 1
                pending.pop(site)
                yield site, response, take
        for site in sorted(pending.keys() - held.keys()):
            if self.sites[site].greeting_failed and not self.sites[site].known:
                continue  # it was not asked; the reason was noted
            where = "away" if site not in self.wire.online() else "too late"
            self.note(f"{where}: no answer to {pending[site].words}", site)

    def _may_answer(self, name: SiteId) -> bool:
        """Whether a site may still answer: it is connected, or has just disconnected."""
        site, here = self.sites[name], name in self.wire.online()
        if site.greeting_failed and not site.known:
            return False
        away = time.monotonic() - site.seen
        return not site.refused and not site.owes and (here or away < self.deadlines.grace)

    def _exchange(
        self,
        requests: Mapping[SiteId, Request],
        over: Callable[[], bool],
        phase: int = 0,
        held: Mapping[SiteId, float] = MappingProxyType({}),
    ) -> Iterator[Heard]:
        """Greet sites, have them begin the phase, ask, and ask again after a restart, until ``over``. The caller
        removes answered requests, and decides which sites are held until when."""
        waiting: dict[str, tuple[SiteId, Request]] = {}  # by identifier
        while True:
            online, now = self.wire.online(), time.monotonic()
            self._meet(online, waiting)
            busy = {site for site, _ in waiting.values()} | {i for i, until in held.items() if until > now}
            due = {i: self._next(i, requests.get(i), phase) for i in online if i in self.sites and i not in busy}
            messages = {i: request for i, request in due.items() if request is not None}
            if messages:
                letters = {i: (request.header(self.identity), request.body) for i, request in messages.items()}
                sent = self.wire.send_all(letters, TTL, self.study)
                waiting.update({id: (i, messages[i]) for i, id in sent.items()})
                for i in sent:
                    self.watch.doing(i, messages[i].words, False)
            for envelope in self.wire.collect(waiting.keys()) if waiting else ():
                site, request = waiting.pop(envelope.id)
                self._hear(site, envelope)
                response = self._take(site, request, envelope)
                if response is not None and site in requests:
                    yield site, response, envelope.take
            self._collect_late()
            if now > self._wire_checked + WIRE_CHECK:
                self._check_wire(now)
            if over():
                break
            self.wire.wait(self.deadlines.poll)
        for id, (site, request) in waiting.items():
            self.sites[site].owes[id] = request

    def _meet(self, online: Mapping[SiteId, str], waiting: dict[str, tuple[SiteId, Request]]) -> None:
        """Notice new connections. What a site was asked over its former connection is lost."""
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
                site.owes, site.known, site.begun, site.refused, site.greeting_failed = {}, False, set(), "", 0.0
            site.token, site.seen = token, now

    def _next(self, name: SiteId, wanted: Request | None, phase: int) -> Request | None:
        """Return the next request for a site: a greeting, the beginning of a phase, or what is wanted of it."""
        site = self.sites[name]
        if site.refused or site.owes:
            return None
        if not site.known and time.monotonic() - site.greeting_failed < self.deadlines.again:
            return None
        if not site.known:
            return Request("hello", self.study, config=self.config)
        if wanted is None:
            return None
        for k in sorted(k for k in self.beginnings if k <= phase and k not in site.begun):
            beginning = self.beginnings[k](name)
            if beginning is not None:
                return beginning
        return wanted

    def _take(self, name: SiteId, request: Request, envelope: Envelope) -> Response | None:
        """Return a response for the caller; greetings and beginnings are dealt with here."""
        site = self.sites[name]
        header = {"error": envelope.error} if envelope.error else envelope.header
        response = parse_response(request, header, site.cases, self.subject)
        if request.kind == "hello":
            if isinstance(response, Refused):
                site.refused = response.reason
                self.note(f"does not take part: {response.reason}", name)
            elif isinstance(response, Failed):
                if not site.greeting_failed:
                    self.note(f"could not be greeted: {response.reason}", name)
                site.greeting_failed = time.monotonic()
            elif isinstance(response, Greeting):
                self._fix_cases(name, response)
                site.greeting, site.known = response, True
                self.watch.doing(name, "takes part", True)
            return None
        if isinstance(response, Begun):
            site.begun.add(request.phase)
            return None
        if request.kind == "begin" and isinstance(response, Failed):
            return Refused(response.reason)
        if not isinstance(response, Refused | Failed):
            self.watch.doing(name, f"answered {request.words}", True)
        return response

    def _fix_cases(self, name: SiteId, greeting: Greeting) -> None:
        """Keep the numbers of cases of a site's first greeting; note others, or other cases, that it reports later."""
        site, cases = self.sites[name], greeting.cases
        if site.greeting and site.greeting.listed != greeting.listed:
            self.note("its list of cases is not the one with which it joined: its data have changed", name)
        site.cases = site.cases or dict(cases)
        changed = [f"{cases[k]} {k} cases instead of {n}" for k, n in site.cases.items() if cases[k] != n]
        if changed:
            self.note(f"reports {', '.join(changed)}; the numbers with which it joined stand", name)

    def _hear(self, name: SiteId, envelope: Envelope) -> None:
        """Note the incidents that a site reports with a response: its worker was killed, its connection was cut."""
        incidents = envelope.header.get("incidents", ())
        for what in incidents[:MAX_INCIDENTS] if isinstance(incidents, list) else ():
            self.note(str(what), name)

    def _collect_late(self) -> None:
        """Drop and note responses that came after their deadline; late greetings and beginnings still count."""
        owed = {id: (name, request) for name, site in self.sites.items() for id, request in site.owes.items()}
        for envelope in self.wire.collect(owed.keys()) if owed else ():
            name, request = owed[envelope.id]
            del self.sites[name].owes[envelope.id]
            self._hear(name, envelope)
            if request.kind in ("hello", "begin"):
                self._take(name, request, envelope)
            else:
                self.note(f"its answer to {request.words} came late and was dropped", name)
