"""The calls of hospitals, and who may make them.

Only calls that a hospital needs pass, and only with a client certificate of the federation's CA, from an authenticated
site (``admission.py``), and from the one process in which its key is in use. Sizes, times and the number of connections
are bounded before anything is read. No call can start code.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from polysite.buffers import Buffer, room
from polysite.deploy.flower.admission import Admission, Refusal
from polysite.deploy.flower.messages import INSTANCE, LAST, MAX_LETTER, PREFIX, START, WAIT, Letter, digest
from polysite.deploy.flower.port import Reply, Request
from polysite.deploy.flower.superlink import SuperLink
from polysite.errors import PayloadError

CALLS = {  # what a hospital may call, with its method and the largest body in bytes; None: of an answer
    "connect": ("POST", 0),
    "disconnect": ("POST", 0),
    "beat": ("POST", 0),
    "next": ("POST", 0),
    "body": ("GET", 0),
    "answer": ("POST", MAX_LETTER),
    "upload": ("PUT", None),
}
MAX_WAIT = 5.0  # seconds for which a request for messages is held


@dataclass(slots=True)
class Arrival:
    """An answer of which the body has perhaps arrived in part; the rest comes with later requests, one at a time."""

    letter: Letter
    memory: memoryview
    arrived: int = 0

    def grow(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.arrived += count


@dataclass(slots=True)
class Sent:
    """A message for a site that is not collected yet."""

    site: str
    letter: Letter
    body: Buffer
    end: float  # until when an answer is accepted, by the monotonic clock
    given: str = ""  # the start of a courier that it was given to: after another start it is not sent again
    received: bool = False
    answered: bool = False
    arrival: Arrival | None = None
    excessive: bool = False  # the answer is larger than the limit
    busy: Request | None = None  # the request that brings the answer
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        """Whether the time for an answer is over."""
        return time.monotonic() > self.end

    @contextmanager
    def alone(self, request: Request) -> Iterator[None]:
        """Have one request at a time bring the answer: the one before is broken, for the site has given it up."""
        if (former := self.busy) is not None:
            former.drop()
        with self.lock:
            self.busy = request
            try:
                yield
            finally:
                self.busy = None


class Gateway:
    """Answers the requests of sites.

    Args:
        superlink: Flower's record of nodes.
        admission: Authenticates requests.
        limit: Largest answer in bytes.
    """

    def __init__(self, superlink: SuperLink, admission: Admission, limit: int):
        self._superlink, self._admission, self._limit = superlink, admission, limit
        self.sent: dict[str, Sent] = {}
        self.tokens: dict[str, str] = {}
        self.arrived = threading.Event()  # an answer is complete, or a site has connected
        self.news = threading.Condition()  # there may be a message for a site
        self._instances: dict[str, str] = {}  # process in which each site's key is in use
        self._kept_online: dict[str, float] = {}  # when moving bytes were last taken for a heartbeat

    def answer(self, request: Request) -> Reply:
        """Answer a request; ``Refusal`` if it does not pass."""
        call, _, id = request.path.removeprefix(PREFIX).partition("/")
        method, most = CALLS.get(call, ("", 0))
        if not request.path.startswith(PREFIX) or request.method != method:
            raise Refusal(404, "unknown", f"asked for {request.method} {request.path[:60]!r}")
        site = self._admission.authenticate(request.headers)
        instance = request.headers.get(INSTANCE, "")
        if call != "connect" and instance != self._instances.get(site):
            if site not in self._instances:
                raise Refusal(409, "anew")  # this server was restarted: the site must connect again
            raise Refusal(409, "elsewhere", "the key of this site is used from a second place", site)
        size = _announced(request.headers, self._limit if most is None else most, site)
        if call not in ("connect", "disconnect"):
            request.moved = lambda: self._keep_online(site)
            request.moved()
        match call:
            case "connect":
                self._connect(site, instance)
            case "disconnect":
                self._superlink.leave(site)
            case "next":
                return self._next(site, instance, request.headers)
            case "body":
                return self._body(site, id, request.headers)
            case "answer":
                return self._announce(site, id, request, size)
            case "upload":
                return self._upload(site, id, request, size)
        return Reply(200)

    def online(self, site: str) -> bool:
        """Return whether a site is connected, and its key was not revoked."""
        return not self._admission.is_revoked(site) and self._superlink.online(site)

    def _connect(self, site: str, instance: str) -> None:
        """Admit a connection of a site; refuse it while another courier is connected with the site's key.

        The other courier counts as connected until its heartbeats stop.
        """
        if not 16 <= len(instance) <= 64:
            raise Refusal(400, "instance", f"a connection without {INSTANCE}", site)
        with self.news:
            if instance != self._instances.get(site):
                if self.online(site):
                    what = "connected anew, or from a second place, while it is connected"
                    raise Refusal(409, "elsewhere", what, site)
                self.tokens[site] = secrets.token_hex(8)  # otherwise its requests and responses are not lost
            self._instances[site] = instance
            self._superlink.beat(site)
        self.arrived.set()

    def _keep_online(self, site: str) -> None:
        """Take moving bytes for a heartbeat, which may be late on a link that is busy with them."""
        clock = time.monotonic()
        if clock - self._kept_online.get(site, 0.0) > 1.0:
            self._kept_online[site] = clock
            self._superlink.beat(site)

    def _next(self, site: str, instance: str, headers: Mapping[str, str]) -> Reply:
        """Return the next message for a site; wait for one, at most for the time that the site asks for."""
        if last := headers.get(LAST):
            with suppress(Refusal):
                self._find(last, site).received = True
        seconds = headers.get(WAIT, "")
        end = time.monotonic() + (min(int(seconds), MAX_WAIT) if seconds.isdecimal() and len(seconds) < 4 else 0.0)
        with self.news:
            while instance == self._instances[site]:
                for sent in list(self.sent.values()):
                    if sent.site == site and not sent.received and sent.given in ("", instance):
                        sent.given = instance
                        return Reply(200, sent.letter.dump())
                if not self.news.wait(max(0.0, end - time.monotonic())):
                    break
        return Reply(204)

    def _find(self, id: str, site: str) -> Sent:
        """Return a message for this site that waits for its answer, or is not collected yet."""
        if (sent := self.sent.get(id)) is None or sent.site != site:
            raise Refusal(410, "unwanted")
        return sent

    def _body(self, site: str, id: str, headers: Mapping[str, str]) -> Reply:
        """Return the body of a message, or the rest of it."""
        body = memoryview(self._find(id, site).body)
        return Reply(200, body[_start(headers, site) :])

    def _announce(self, site: str, id: str, request: Request, size: int) -> Reply:
        """Expect the body of an answer; return how much of it is there."""
        sent = self._find(id, site)
        with sent.alone(request):
            try:
                letter = Letter.load(_read(request, size))
            except PayloadError as problem:
                raise Refusal(400, "odd", f"an answer that is none: {problem}", site) from problem
            sent.received = True
            if letter.size > self._limit:
                sent.excessive = True
                self.arrived.set()
                raise Refusal(413, "large", f"an answer of more than {self._limit} bytes", site)
            came = sent.arrival
            if sent.answered:
                if came is None or came.letter != letter:
                    raise Refusal(410, "unwanted")
                return Reply(200, b"%d" % letter.size)
            if came is None or came.letter != letter:
                came = sent.arrival = None  # memory of a former answer is given back before more is taken
                try:
                    came = sent.arrival = Arrival(letter, room(letter.size))
                except (OSError, MemoryError) as problem:
                    raise Refusal(503, "memory", "no memory is left for its answer", site) from problem
            if came.arrived == letter.size:
                self._complete(sent, came)
        return Reply(200, b"%d" % came.arrived)

    def _upload(self, site: str, id: str, request: Request, size: int) -> Reply:
        """Receive the rest of an answer's body in its place, or as much of it as comes."""
        sent = self._find(id, site)
        with sent.alone(request):
            came = sent.arrival
            if came is None or _start(request.headers, site) != came.arrived or size > len(came.memory) - came.arrived:
                raise Refusal(416, "range")
            request.read(came.memory[came.arrived : came.arrived + size], came.grow)
            if came.arrived == len(came.memory):
                self._complete(sent, came)
        return Reply(200, b"%d" % came.arrived)

    def _complete(self, sent: Sent, came: Arrival) -> None:
        """Check an answer that has arrived and have it collected."""
        if self._admission.is_revoked(sent.site):
            raise Refusal(403, "revoked", "a key that was revoked while its answer came", sent.site)
        if digest(came.memory) != came.letter.digest:
            sent.arrival = None
            raise Refusal(400, "odd", "an answer that is damaged", sent.site)
        if sent.is_over:
            raise Refusal(410, "unwanted")
        sent.answered = True
        self.arrived.set()


def _announced(headers: Mapping[str, str], most: int, site: str) -> int:
    """Return the size of a request's body."""
    announced = headers.get("content-length", "0")
    if "transfer-encoding" in headers:
        raise Refusal(413, "large", "a request that does not announce its size", site)
    if not announced.isdecimal() or len(announced) > 15 or int(announced) > most:
        raise Refusal(413, "large", f"a request of {announced[:20]} bytes announced", site)
    return int(announced)


def _start(headers: Mapping[str, str], site: str) -> int:
    start = headers.get(START, "0")
    if not start.isdecimal() or len(start) > 15:
        raise Refusal(400, "odd", "a part of a body that is not described", site)
    return int(start)


def _read(request: Request, size: int) -> bytes:
    body = bytearray(size)
    request.read(memoryview(body))
    return bytes(body)
