"""The wire to hospitals: requests and responses as messages with a header and a body, whatever carries them.

A ``Post`` carries the messages: that of ``deploy/flower`` over Flower, that of ``deploy/flare`` as tasks of FLARE. The
tests have one without a network. Sites that get the same arrays share one encoded body. A body that a site still holds
is not sent again, but named by its digest.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polysite.buffers import Buffer
from polysite.deploy.protocol import HOLDS, MISSING, NAME, Header, Subject, body_of, header_of, parse_response
from polysite.engines.messages import Answer, Join, Request
from polysite.engines.record import Incident
from polysite.errors import shown
from polysite.payload import Limits, Payload, SiteId, likeness

TTL = 30 * 86400.0  # seconds that the post keeps a message; deadlines are kept by ``Sites``
MAX_INCIDENTS = 16  # that a site may report at a time
NAMED = 64 << 10  # bytes from which on a body gets a name, so that it can be held


@dataclass(slots=True)
class Envelope:
    """What came back for a message, with the identifier of the message: header and body, or an error of the post."""

    id: str
    header: Header = field(default_factory=dict)
    body: Buffer = b""
    error: str = ""

    def take(self) -> Buffer:
        """Return the body and release it: it may have gigabytes."""
        body, self.body = self.body, b""
        return body


class Post(Protocol):
    """Carries messages to sites and responses back."""

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
        """Return what the post refused since the last call."""
        ...


class Posted:
    """A wire over a post.

    Args:
        post: Carries the messages.
        study: Name by which all sides know the study.
        identity: Version and digest of the coordinator's code.
        subject: What cases are scored by.
        limits: Largest payload that is accepted.
    """

    def __init__(
        self,
        post: Post,
        study: str,
        identity: Mapping[str, str],
        subject: Subject = Subject(),
        limits: Limits = Limits(),
    ):
        self.post, self.study, self.identity, self.subject, self.limits = post, study, identity, subject, limits
        self.cases_of: Callable[[SiteId], Mapping[str, int]] = lambda site: {}  # numbers that a site reported
        self.note: Callable[[str, SiteId], None] = lambda what, site: None  # keeps what a site reports
        self._waiting: dict[str, tuple[SiteId, Request]] = {}  # by identifier
        self._tokens: dict[SiteId, str] = {}
        self._held: dict[SiteId, str] = {}  # names of the bodies that sites hold, by their last response

    def online(self) -> Mapping[SiteId, str]:
        """Return the connected sites; messages to a site that has connected anew are dropped."""
        online = self.post.online()
        anew = {site for site, token in online.items() if self._tokens.get(site, token) != token}
        if lost := [id for id, (site, _) in self._waiting.items() if site in anew]:
            self.post.forget(lost)
            for id in lost:
                del self._waiting[id]
        for site in anew:
            self._held.pop(site, None)
        self._tokens.update(online)
        return online

    def ask(self, requests: Mapping[SiteId, Request], wait: float) -> Iterator[Answer]:
        """Send requests, and yield the responses that have arrived, to these and to earlier requests."""
        self._send(requests)
        arrived = False
        for envelope in self._collected():
            arrived = True
            yield envelope
        if not arrived:
            self.post.wait(wait)
            yield from self._collected()

    def _send(self, requests: Mapping[SiteId, Request]) -> None:
        if requests:
            sent = self.post.send_all(self._letters(requests), TTL, self.study)
            self._waiting.update({id: (site, requests[site]) for site, id in sent.items()})

    def _collected(self) -> Iterator[Answer]:
        for envelope in self.post.collect(self._waiting.keys()) if self._waiting else ():
            site, request = self._waiting.pop(envelope.id)
            incidents = envelope.header.get("incidents", ())
            for what in incidents[:MAX_INCIDENTS] if isinstance(incidents, list) else ():
                self.note(str(what), site)
            named = self._held.pop(site, "")
            if envelope.header.get(MISSING) and named:  # it was restarted
                self._send({site: request})
                continue
            self._held[site] = shown(envelope.header.get(HOLDS, ""), 64)
            header = {"error": envelope.error} if envelope.error else envelope.header
            cases = self.cases_of(site)
            yield site, request, parse_response(request, header, envelope.take, cases, self.subject, self.limits)

    def _letters(self, requests: Mapping[SiteId, Request]) -> dict[SiteId, tuple[Header, Buffer]]:
        bodies: dict[Any, tuple[str, Buffer]] = {}
        letters: dict[SiteId, tuple[Header, Buffer]] = {}
        for site, request in requests.items():
            like = likeness(Payload() if isinstance(request, Join) else request.payload)
            if like not in bodies:
                body = body_of(request)
                bodies[like] = hashlib.sha256(body).hexdigest() if len(body) >= NAMED else "", body
            name, body = bodies[like]
            header = header_of(request, self.study, self.identity)
            held = name and self._held.get(site) == name
            letters[site] = {**header, NAME: name} if name else header, b"" if held else body
        return letters
