"""The sites of a study as they come and go, at the server: who is connected, busy, late or refusing, and what crosses.

A site answers one request at a time. A site that connects is greeted first and reports its numbers of cases and what it
allows; then it begins the phases that have begun without it. A response that is not valid counts as a failure: it is
noted, and the site is asked again when it is needed. No response of a site can end a study.

Nothing here opens a socket, and nothing knows whether sites are processes, actors or hospitals: a ``Wire`` does.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from polysite.engines import messages
from polysite.engines.record import Incident, incident
from polysite.engines.watch import Watch
from polysite.engines.wire import Wire
from polysite.errors import RunError, shown
from polysite.payload import LastPayload, Payload, SiteId
from polysite.site import Examined

WIRE_CHECK = 60.0  # seconds between two looks at what the wire refused

log = logging.getLogger("polysite")


@dataclass(frozen=True)
class Deadlines:
    """How long the server waits for sites, and for how many.

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


PATIENT = Deadlines(quorum=0, deadline=math.inf, grace=0.0, again=math.inf, poll=0.0)  # in one process none is late


@dataclass
class SiteStatus:
    """What is known about a site, and what it is doing."""

    greeting: messages.Greeting | None = None  # its last one
    cases: Mapping[str, int] = field(default_factory=dict)  # their numbers in its first greeting, which stand
    token: str = ""  # of its connection
    known: bool = False  # it was greeted in this connection
    refused: str = ""  # why it does not take part
    begun: set[int] = field(default_factory=set)  # phases that it has begun, in this connection
    seen: float = 0.0  # when it was last connected
    asked: messages.Request | None = None  # what it is asked now
    owes: messages.Request | None = None  # what it works on past the deadline
    last: LastPayload = field(default_factory=LastPayload)  # that it got in this connection, and keeps
    down: int = 0  # bytes to it since they were last asked for
    up: int = 0  # bytes from it
    greeting_failed: float = 0.0  # when it could not be greeted, for a reason that may be mended

    @property
    def ready(self) -> bool:
        """Whether the site takes part: it has been greeted and does not refuse."""
        return self.greeting is not None and not self.refused


class Sites:
    """The sites of a study.

    Args:
        wire: Carries requests and responses.
        names: Names of the sites.
        deadlines: How long to wait.
        join: What a site that connects is asked first; None where the sites are known.
        watch: Observer of the progress.
        secret: Number, unknown to the sites, from which the guard draws its signs.
        refusals: Returns what the wire itself refused since the last call.
    """

    def __init__(
        self,
        wire: Wire,
        names: Iterable[SiteId],
        deadlines: Deadlines = PATIENT,
        join: messages.Join | None = None,
        watch: Watch = Watch(),
        *,
        secret: int = 0,
        refusals: Callable[[], Sequence[Incident]] = lambda: (),
    ):
        self.wire, self.deadlines, self.join, self.watch, self.secret = wire, deadlines, join, watch, secret
        self.status: dict[SiteId, SiteStatus] = {}
        self.expect(names)
        self.beginnings: dict[int, Callable[[SiteId], messages.Begin | None]] = {}  # phase -> how a site begins it
        self.needed: Mapping[SiteId, Collection[int]] = {}  # versions of memories, in all phases
        self._refusals = refusals
        self._journal: Callable[[Incident], None] = lambda incident: None
        self._incidents: list[Incident] = []
        self._counts = True
        self._wire_checked = 0.0

    def expect(self, names: Iterable[SiteId]) -> None:
        """Add sites that take part."""
        for name in sorted(names):
            self.status.setdefault(name, SiteStatus(known=self.join is None))

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
        for each in self._refusals():
            self._add(each)

    # requests

    def gather(self, wait: float) -> None:
        """Greet the sites that connect. Waits ``wait`` seconds for all of them, and without limit for a quorum."""
        began = time.monotonic()
        for name in self.status:
            self.watch.doing(name, "not connected yet", False)

        def enough() -> bool:
            all_answered = all(s.ready or s.refused for s in self.status.values())
            return all_answered or (len(self.ready) >= self.deadlines.quorum and time.monotonic() - began > wait)

        for _ in self._exchange({}, enough):
            ...
        if len(self.ready) < self.deadlines.quorum:  # and all other sites refuse
            reasons = "; ".join(f"{i}: {s.refused}" for i, s in self.status.items() if s.refused)
            raise RunError(
                f"{len(self.ready)} of {len(self.status)} sites take part, fewer than the {self.deadlines.quorum} that "
                f"the study needs: {reasons}"
            )

    @property
    def ready(self) -> list[SiteId]:
        """Sites that take part."""
        return [i for i, s in self.status.items() if s.ready]

    def ask(
        self,
        requests: Mapping[SiteId, messages.Request],
        phase: int = 0,
        able: Callable[[SiteId], bool] = lambda site: True,
        least: int = 0,
    ) -> Iterator[tuple[SiteId, messages.Response]]:
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
            owed = self.status[site].owes
            if owed is not None:
                self.note(f"still busy with {messages.words_of(owed)}; not asked before that", site)
        pending = dict(requests)
        held: dict[SiteId, float] = {}  # sites that refused or failed, and when they may be asked again

        def over() -> bool:
            nonlocal late
            hope = any(self._may_answer(i) for i in pending.keys() - held.keys())
            needed = min(max(self.deadlines.quorum, least), sum(map(able, requests)))
            if answered < needed and not math.isinf(self.deadlines.again):
                if not late and time.monotonic() - began > self.deadlines.deadline:
                    late = True
                    self.note(f"{answered} answers, {needed} are needed: waiting on for sites to come back")
                return False
            return time.monotonic() - began > self.deadlines.deadline or not hope

        for site, response in self._exchange(pending, over, phase, held):
            if isinstance(response, messages.Refused | messages.Failed):
                if site not in held:
                    verb = "refuses" if isinstance(response, messages.Refused) else "fails"
                    self.note(f"{verb}: {response.reason}", site)
                held[site] = time.monotonic() + self.deadlines.again
            else:
                answered += 1
                pending.pop(site)
                if isinstance(response, messages.Unreadable):
                    self.note(f"its reply is refused: {response.reason}", site)
                else:
                    yield site, response
            del response  # before the next site computes
        for site in sorted(pending.keys() - held.keys()):
            if self.status[site].greeting_failed and not self.status[site].known:
                continue  # it was not asked; the reason was noted
            where = "away" if site not in self.wire.online() else "too late"
            self.note(f"{where}: no answer to {messages.words_of(pending[site])}", site)

    def _may_answer(self, name: SiteId) -> bool:
        """Whether a site may still answer: it is connected, or has just disconnected."""
        site, here = self.status[name], name in self.wire.online()
        if site.greeting_failed and not site.known:
            return False
        away = time.monotonic() - site.seen
        return not site.refused and site.owes is None and (here or away < self.deadlines.grace)

    def _exchange(
        self,
        requests: Mapping[SiteId, messages.Request],
        over: Callable[[], bool],
        phase: int = 0,
        held: Mapping[SiteId, float] = MappingProxyType({}),
    ) -> Iterator[tuple[SiteId, messages.Response]]:
        """Greet sites, have them begin the phase, ask, and ask again after a restart, until ``over``. The caller
        removes answered requests, and decides which sites are held until when."""
        while True:
            online, now = self.wire.online(), time.monotonic()
            self._meet(online)
            free = [i for i in online if i in self.status and self.status[i].asked is None and held.get(i, 0.0) <= now]
            due = {i: request for i in free if (request := self._next(i, requests.get(i), phase)) is not None}
            order = [*(i for i in requests if i in due), *(i for i in due if i not in requests)]
            for i in order:
                self._send(i, due[i])
            for site, request, response in self.wire.ask({i: due[i] for i in order}, self.deadlines.poll):
                self.status[site].up += messages.bytes_of(response) if self._counts else 0
                taken = self._take(site, request, response)
                del response
                if taken is not None and site in requests:
                    yield site, taken
                del taken  # before the next site computes
            if now > self._wire_checked + WIRE_CHECK:
                self._check_wire(now)
            if over():
                break
        for status in self.status.values():
            if status.asked is not None:
                status.asked, status.owes = None, status.asked

    def _send(self, name: SiteId, request: messages.Request) -> None:
        """Note what a site is asked, and the bytes of that; a payload that the site has does not cross again."""
        site = self.status[name]
        site.asked = request
        if not isinstance(request, messages.Join) and request.payload:
            crossed = site.last.replace(request.payload)
            site.down += crossed if self._counts else 0
        if self.join is not None:
            self.watch.doing(name, messages.words_of(request), False)

    def _meet(self, online: Mapping[SiteId, str]) -> None:
        """Notice new connections. What a site was asked over its former connection is lost."""
        now = time.monotonic()
        for name, token in online.items():
            site = self.status.get(name)
            if site is None:
                continue
            if site.token and site.token != token:
                if self.join is not None:
                    self.note("connected anew", name)
                site.asked = site.owes = None
                site.last = LastPayload()
                site.known, site.begun, site.refused, site.greeting_failed = self.join is None, set(), "", 0.0
            site.token, site.seen = token, now

    def _next(self, name: SiteId, wanted: messages.Request | None, phase: int) -> messages.Request | None:
        """Return the next request for a site: a greeting, the beginning of a phase, or what is wanted of it."""
        site = self.status[name]
        if site.refused or site.owes is not None:
            return None
        if not site.known and site.greeting_failed and time.monotonic() - site.greeting_failed < self.deadlines.again:
            return None
        if not site.known and self.join is not None:
            return self.join
        if wanted is None:
            return None
        for k in sorted(k for k in self.beginnings if k <= phase and k not in site.begun):
            beginning = self.beginnings[k](name)
            if beginning is not None:
                return beginning
        return wanted

    def _take(self, name: SiteId, request: messages.Request, response: messages.Response) -> messages.Response | None:
        """Return a response for the caller; greetings, beginnings and late responses are dealt with here."""
        site = self.status[name]
        late = site.owes is request
        if late:
            site.owes = None
        elif site.asked is request:
            site.asked = None
        else:
            return None  # of a former connection
        if isinstance(request, messages.Join):
            self._greeted(name, response)
            return None
        if isinstance(response, messages.Begun):
            site.begun.add(request.phase)
            return None
        if late:
            self.note(f"its answer to {messages.words_of(request)} came late and was dropped", name)
            return None
        if isinstance(request, messages.Begin) and isinstance(response, messages.Failed):
            return messages.Refused(response.reason)
        if self.join is not None and not isinstance(response, messages.Refused | messages.Failed):
            self.watch.doing(name, f"answered {messages.words_of(request)}", True)
        if isinstance(response, messages.Measured):
            return messages.Measured(self._counted(site, response.cases))
        return response

    def _counted(self, site: SiteStatus, cases: Iterable[Examined]) -> Iterator[Examined]:
        for each in cases:
            site.up += messages.bytes_of(each) if self._counts else 0
            yield each

    def traffic(self) -> tuple[dict[SiteId, int], dict[SiteId, int]]:
        """Return the bytes to every site and from it since the last call."""
        moved = {i: s for i, s in self.status.items() if s.down or s.up}
        down, up = {i: s.down for i, s in moved.items()}, {i: s.up for i, s in moved.items()}
        for site in moved.values():
            site.down = site.up = 0
        return down, up

    def have(self, payloads: Mapping[SiteId, Payload]) -> None:
        """Note what sites got last, before this process began."""
        for site, payload in payloads.items():
            self.status[site].last.replace(payload)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no bytes meanwhile: what is repeated after a restart, or by a simulated site, was counted before."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def _greeted(self, name: SiteId, response: messages.Response) -> None:
        site = self.status[name]
        if isinstance(response, messages.Refused):
            site.refused = response.reason
            self.note(f"does not take part: {response.reason}", name)
        elif isinstance(response, messages.Failed):
            if not site.greeting_failed:
                self.note(f"could not be greeted: {response.reason}", name)
            site.greeting_failed = time.monotonic()
        elif isinstance(response, messages.Greeting):
            self.fix_cases(name, response)
            site.greeting, site.known = response, True
            self.watch.doing(name, "takes part", True)

    def fix_cases(self, name: SiteId, greeting: messages.Greeting) -> None:
        """Keep the numbers of cases of a site's first greeting; note others, or other cases, that it reports later."""
        site, cases = self.status[name], greeting.cases
        if site.greeting and site.greeting.listed != greeting.listed:
            self.note("its list of cases is not the one with which it joined: its data have changed", name)
        site.cases = site.cases or dict(cases)
        changed = [f"{cases[k]} {k} cases instead of {n}" for k, n in site.cases.items() if cases[k] != n]
        if changed:
            self.note(f"reports {', '.join(changed)}; the numbers with which it joined stand", name)
