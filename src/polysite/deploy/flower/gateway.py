"""The gateway in front of Flower's SuperLink: which requests pass, at which size and pace.

Only the eight calls that a hospital needs pass, and only with a client certificate of the federation's CA, from an
authenticated site (``admission.py``), and from the one process in which its key is in use. Sizes, times and the number
of connections are bounded before anything is read. What hospitals answer goes to ``answers.py``.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from polysite.buffers import Buffer, room
from polysite.deploy.flower.admission import Admission, Refusal
from polysite.deploy.flower.answers import Answers
from polysite.deploy.flower.landing import Arrival
from polysite.deploy.flower.messages import INSTANCE, REST, WAIT, Chunk, Content
from polysite.deploy.flower.objects import PIECE, pulled
from polysite.deploy.flower.port import BODY, Body, Connection
from polysite.errors import PolysiteError

from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState  # isort: skip  # from here on: dependencies of Flower
from flwr.supercore.constant import NodeStatus
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from starlette.concurrency import run_in_threadpool

FLEET = "/v1/fleet/"
CALLS = {
    FLEET + call: (64 if call == "push-object" else 16) << 20  # largest request in bytes
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
}
RENEW = "/v1/polysite/renew-certificate"
CALLS[RENEW] = 16 << 10
MAX_WAIT = 5.0  # seconds for which a request for messages is held
CONFIRM = 3.0  # seconds between two confirmations that the bytes of a request arrive

ALIVE = "polysite.alive"  # extension of a scope: to be called when bytes of its site have moved
HEADERS = "polysite.headers"  # extension of a scope: further headers of the response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Reply = tuple[int, *tuple[Buffer, ...]]  # the status and the parts of the body
Renewal = Callable[[str, bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class Pace:
    """How slow a client may be before it is dropped.

    Args:
        silence: Seconds without a byte; also for the whole handshake and for all headers.
        window: Seconds after which the rate of a body or a response counts.
        rate: Least bytes per second; far below any link that can be used, and above a client that only trickles.
    """

    silence: float = 20.0
    window: float = 60.0
    rate: float = 1000.0


class Guard:
    """An ASGI application in front of Flower's.

    Args:
        app: Flower's application.
        state: Its record of messages.
        nodes: Its number of every site.
        admission: Authenticates requests.
        answers: Receives what sites answer.
        pace: How slow a client may be.
        renewal: Returns a new certificate for a site and its request, or None if it has to be made by hand.
    """

    def __init__(
        self,
        app: Any,
        state: InMemoryLinkState,
        nodes: Mapping[str, int],
        admission: Admission,
        answers: Answers,
        pace: Pace,
        renewal: Renewal = lambda site, request: None,
    ):
        self._app, self._state, self._nodes, self._renewal = app, state, nodes, renewal
        self.admission, self.answers, self.pace = admission, answers, pace
        self._store = cast(InMemoryObjectStore, state.object_store)
        # connections by the site of their certificate, oldest first; those of no known site under ""
        self.callers: dict[str, dict[Connection, None]] = {site: {} for site in ("", *nodes)}
        self._instances: dict[str, bytes] = {}  # process in which each site's key is in use
        self.tokens: dict[str, str] = {}
        self._kept_online: dict[str, float] = {}  # when moving bytes were last taken for a heartbeat
        self._news: dict[str, asyncio.Event] = {}  # there may be a message for a site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the web server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            status, *parts = await self._admit(scope)
        except Refusal as refusal:
            self.admission.note(refusal.what, scope["client"], refusal.site)
            status, parts = refusal.status, [b'{"detail":"%s"}' % refusal.word.encode()]
        await self._respond(scope, send, status, parts)

    async def _admit(self, scope: Scope) -> Reply:
        path = scope["path"]
        if scope["method"] != "POST" or path not in CALLS:
            raise Refusal(404, "unknown", f"asked for {scope['method'][:10]} {path[:60]!r}")
        headers = dict(reversed(scope["headers"]))  # the first of several counts, as in Flower
        site = self.admission.authenticate(headers)
        instance = headers.get(INSTANCE.encode(), b"")
        call = path.removeprefix(FLEET)
        if call != "activate-node" and instance != self._instances.get(site):
            if site not in self._instances:
                raise Refusal(409, "anew")  # this server was restarted: the site must connect again
            raise Refusal(409, "elsewhere", "the key of this site is used from a second place", site)
        if call not in ("activate-node", "deactivate-node"):
            scope["extensions"][ALIVE] = partial(self._keep_online, site)
            self._keep_online(site)
        size = _announced(headers, CALLS[path], site)
        if call == "push-object":
            return 200, await self.answers.receive(partial(self._read, scope, site), headers, size, site)
        body = room(size)
        await self._read(scope, site, body)
        if path == RENEW:
            return 200, await self._renew(site, bytes(body))
        if call == "pull-object":
            return 200, *_sent(scope, self.answers.pull(site, body), headers.get(REST.encode(), b""))
        match call:
            case "activate-node":
                self._make_way(site, instance)
            case "pull-messages":
                await self._await_message(site, headers.get(WAIT.encode(), b""))
            case "push-messages":
                asked, reply = self.answers.expect(site, body)
        status, *parts = await self._flower(scope, bytes(body))
        if status >= 400:
            raise Refusal(status, "refused", f"{call} was refused by Flower", site)
        match call:
            case "activate-node":
                if instance != self._instances.get(site):  # otherwise its requests and responses are not lost
                    self.tokens[site] = secrets.token_hex(8)
                self._instances[site] = instance
                self.answers.arrived.set()
            case "push-messages":
                self.answers.check_taken(asked, reply, b"".join(parts))
        return status, *parts

    def _keep_online(self, site: str) -> None:
        """Take moving bytes for a heartbeat, which may be late on a link that is busy with them."""
        clock = self.admission.hear(site)
        if clock - self._kept_online.get(site, 0.0) > 1.0:
            self._kept_online[site] = clock
            (node,) = self._state.get_node_info(node_ids=[self._nodes[site]])
            self._state.acknowledge_node_heartbeat(self._nodes[site], node.heartbeat_interval)

    async def _read(self, scope: Scope, site: str, *parts: memoryview, arrival: Arrival | None = None) -> None:
        """Receive the body of a request in memory of its size, and confirm to the site every few seconds that bytes
        arrive."""
        size, began, loop, known = sum(map(len, parts)), time.monotonic(), asyncio.get_running_loop(), 0
        body: Body = scope["extensions"][BODY](*parts)
        if arrival is not None:
            arrival.begin(body, len(parts[0]))
        try:
            while not body.over.done():
                left = body.heard + self.pace.silence - loop.time()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait((body.over,), timeout=min(left, CONFIRM))
                self._keep_pace(began, body.size)
                if not body.over.done() and body.size > known:
                    known = body.size
                    body.confirm()
                    _alive(scope)
        except TimeoutError as problem:
            raise Refusal(408, "slow", "a request that trickled in", site) from problem
        finally:
            if arrival is not None and arrival.is_filled_by(body):
                arrival.pause()
        if body.size < size:
            raise Refusal(400, "cut")

    def _keep_pace(self, began: float, size: int) -> None:
        seconds = time.monotonic() - began
        if seconds > self.pace.window and size < seconds * self.pace.rate:
            raise TimeoutError

    async def _respond(self, scope: Scope, send: Send, status: int, parts: Sequence[Buffer]) -> None:
        headers = [(b"content-length", b"%d" % sum(map(len, parts))), *scope["extensions"].get(HEADERS, ())]
        if status >= 400:
            headers.append((b"connection", b"close"))  # otherwise the rest of a refused request would be read
        began, size = time.monotonic(), 0
        try:
            async with asyncio.timeout(self.pace.silence) as watch:
                await send({"type": "http.response.start", "status": status, "headers": headers})
                for piece in _pieces(parts):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    size += len(piece)
                    self._keep_pace(began, size)
                    _alive(scope)
                    watch.reschedule(asyncio.get_running_loop().time() + self.pace.silence)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self.admission.note("a response that was not fetched", scope["client"], "")
            raise

    async def _flower(self, scope: Scope, body: bytes) -> Reply:
        """Return the response of Flower's own application."""
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        await self._app(scope, receive, send)
        return said[0]["status"], *(message["body"] for message in said[1:])

    def online(self, site: str) -> bool:
        """Return whether Flower considers a site connected, and its key was not revoked."""
        if self.admission.is_revoked(site):
            return False
        return bool(self._state.get_node_info(node_ids=[self._nodes[site]], statuses=[NodeStatus.ONLINE]))

    def _make_way(self, site: str, instance: bytes) -> None:
        """Admit a connection of a site; refuse it while another courier is connected with the site's key.

        The other courier counts as connected until its heartbeats stop.
        """
        if not 16 <= len(instance) <= 64:
            raise Refusal(400, "instance", f"a connection without {INSTANCE}", site)
        if self.online(site):
            if instance != self._instances.get(site):
                raise Refusal(409, "elsewhere", "connected anew, or from a second place, while it is connected", site)
            self._state.deactivate_node(self._nodes[site])  # the same courier: it missed the response

    async def _await_message(self, site: str, seconds: bytes) -> None:
        """Wait until there is a message for a site, at most for the time that it asks for."""
        wait = min(int(seconds), MAX_WAIT) if seconds.isdigit() and len(seconds) < 4 else 0.0
        news = self._news[site] = asyncio.Event()
        try:
            async with asyncio.timeout(wait):
                while not self._redeliver(site):
                    await news.wait()
                    news.clear()
        except TimeoutError:
            pass

    def announce(self, sites: Iterable[str]) -> None:
        """Have requests for messages answered that wait on behalf of these sites. Call it in the server's thread."""
        for site in sites:
            if site in self._news:
                self._news[site].set()

    def _redeliver(self, site: str) -> bool:
        """Have all messages sent whose receipt was not confirmed, some of them again; return whether there are any."""
        found = False
        with self._state.lock:
            for name, message in self._state.message_ins_store.items():
                if message.metadata.dst_node_id == self._nodes[site] and name in self._store:
                    message.metadata.delivered_at = ""
                    found = True
        return found

    async def _renew(self, site: str, request: bytes) -> bytes:
        """Return a new certificate for a site that asks for one with its own key."""
        try:
            made = await run_in_threadpool(self._renewal, site, request)
        except PolysiteError as problem:
            raise Refusal(400, "odd", f"asks for a certificate that it cannot have: {problem}", site) from problem
        if made is None:
            raise Refusal(404, "by hand", "needs a new certificate: have it send a request (polysite site renew)", site)
        return made


def _announced(headers: Mapping[bytes, bytes], most: int, site: str) -> int:
    """Return the size of a request's body."""
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or len(announced) > 15 or int(announced) > most:
        raise Refusal(413, "large", f"a request of {announced[:20].decode('latin-1')} bytes announced", site)
    if b"transfer-encoding" in headers:
        raise Refusal(413, "large", "a request that does not announce its size", site)
    return int(announced)


def _sent(scope: Scope, content: Content | None, rest: bytes) -> list[Buffer]:
    """Return the parts of a response with an object, which is not copied; of a chunk perhaps only the rest."""
    if isinstance(content, Chunk) and rest.isdigit() and len(rest) < 12 and 0 < int(rest) < len(content.data):
        scope["extensions"][HEADERS] = [(REST.encode(), rest)]
        return [memoryview(content.data)[int(rest) :]]
    return pulled(content)


def _alive(scope: Scope) -> None:
    if ALIVE in scope["extensions"]:
        scope["extensions"][ALIVE]()


def _pieces(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
