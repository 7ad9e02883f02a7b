"""The gateway in front of Flower's SuperLink: authentication, limits, and a record of refusals.

Only the eight calls that a hospital needs pass, and only with a client certificate of the federation's CA, a registered
key, a signature that was not seen before, and from the one process in which this key is in use. Sizes, times and the
number of connections are bounded before anything is read. Every refusal is recorded as an incident.
"""

import asyncio
import logging
import secrets
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, cast

from polysite.buffers import Buffer, room
from polysite.deploy.certificates import SOON
from polysite.deploy.flower.landing import Arrival, Landings, Place
from polysite.deploy.flower.messages import (
    INSTANCE,
    OBJECT,
    PART,
    REST,
    WAIT,
    Chunk,
    Content,
    array_chunks,
    read_content,
)
from polysite.deploy.flower.objects import MAX_SMALL, PIECE, pulled, read_before_chunk, read_pushed
from polysite.deploy.flower.port import BODY, Body, Connection
from polysite.deploy.revocations import Revocations
from polysite.errors import PayloadError, PolysiteError

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey  # isort: skip  # from here on: dependencies of Flower
from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NodeStatus,
)
from flwr.supercore.corestate.in_memory_corestate import ObjectPushSession
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import verify_signature
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
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
SILENT = 15.0  # seconds without a request of a site, which sends a heartbeat every five
MAX_WAIT = 5.0  # seconds for which a request for messages is held
SMALL = 64 << 10  # bytes of an object that is hashed in the server's thread
CONFIRM = 3.0  # seconds between two confirmations that the bytes of a request arrive
SLACK = 1 << 20  # bytes of a response beyond its limit: header and names

ALIVE = "polysite.alive"  # extension of a scope: to be called when bytes of its site have moved
HEADERS = "polysite.headers"  # extension of a scope: further headers of the response

FOREVER = datetime.max.replace(tzinfo=UTC)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Reply = tuple[int, *tuple[Buffer, ...]]  # the status and the parts of the body
Renewal = Callable[[str, bytes], bytes | None]
log = logging.getLogger("polysite.link")


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


class Refusal(Exception):
    """A request that does not pass: status and word for the client, and a sentence for the incidents."""

    def __init__(self, status: int, word: str, what: str = "", site: str = ""):
        super().__init__(what)
        self.status, self.word, self.what, self.site = status, word, what, site


class Guard:
    """An ASGI application in front of Flower's."""

    def __init__(
        self,
        app: Any,
        state: InMemoryLinkState,
        run: int,
        sites: Mapping[str, bytes],
        keys: Mapping[str, EllipticCurvePublicKey],
        nodes: Mapping[str, int],
        limit: int,
        pace: Pace,
    ):
        self._app, self._state, self._run, self._limit, self.pace = app, state, run, limit, pace
        self._store = cast(InMemoryObjectStore, state.object_store)
        self._sites, self._public = {key: site for site, key in sites.items()}, dict(sites)
        self._keys, self._nodes = keys, nodes
        # connections by the site of their certificate, oldest first; those of no known site under ""
        self.callers: dict[str, dict[Connection, None]] = {site: {} for site in ("", *sites)}
        self._instances: dict[str, bytes] = {}  # process in which each site's key is in use
        self.tokens: dict[str, str] = {}
        self.excessive: set[str] = set()
        self._pushed = dict.fromkeys(nodes, 0)  # bytes of responses that are not collected yet
        self.landings = Landings(self._store)
        self.revoked = Revocations(None)
        self.renewal: Renewal = lambda site, request: None
        self._noted_expiry: dict[str, date] = {}  # of certificates, and the day on which it was noted
        self._seen: dict[tuple[str, str], float] = {}  # signed times, oldest first
        self._heard: dict[str, float] = {}  # when a site was last heard
        self._kept_online: dict[str, float] = {}  # when moving bytes were last taken for a heartbeat
        self._news: dict[str, asyncio.Event] = {}  # there may be a message for a site
        self.arrived = threading.Event()  # a response is complete, or a site has connected
        self._incidents: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the web server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            status, *parts = await self._admit(scope)
        except Refusal as refusal:
            self.note(refusal.what, scope["client"], refusal.site)
            status, parts = refusal.status, [b'{"detail":"%s"}' % refusal.word.encode()]
        await self._respond(scope, send, status, parts)

    # requests

    async def _admit(self, scope: Scope) -> Reply:
        path = scope["path"]
        if scope["method"] != "POST" or path not in CALLS:
            raise Refusal(404, "unknown", f"asked for {scope['method'][:10]} {path[:60]!r}")
        headers = dict(reversed(scope["headers"]))  # the first of several counts, as in Flower
        site = self._authenticate(headers)
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
        if call == "push-object" and PART.encode() in headers:
            return 200, await self._receive_part(scope, headers, size, site)
        if call == "push-object":
            return 200, await self._receive_object(scope, headers, size, site)
        body = room(size)
        await self._read(scope, site, body)
        if path == RENEW:
            return 200, await self._renew(site, bytes(body))
        if call == "pull-object":
            return 200, *_sent(scope, self._pull(site, body), headers.get(REST.encode(), b""))
        match call:
            case "activate-node":
                self._make_way(site, instance)
            case "pull-messages":
                await self._await_message(site, headers.get(WAIT.encode(), b""))
            case "push-messages":
                asked, reply = self._expect(site, body)
        status, *parts = await self._flower(scope, bytes(body))
        if status >= 400:
            raise Refusal(status, "refused", f"{call} was refused by Flower", site)
        match call:
            case "activate-node":
                if instance != self._instances.get(site):  # otherwise its requests and responses are not lost
                    self.tokens[site] = secrets.token_hex(8)
                self._instances[site] = instance
                self.arrived.set()
            case "push-messages" if self._state.message_ins_id_to_message_res_id.get(asked) != reply:
                begun = PushMessagesResponse.FromString(b"".join(parts)).session_id
                self._state._cleanup_push_session(begun, cleanup_messages=False)
                raise Refusal(410, "unwanted")  # Flower also answers 200 when it ignores the message
        return status, *parts

    def _authenticate(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the site that signed this request; refuse an old signature, or one that was seen before."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower().encode()], validate=True)
            signed = headers[TIMESTAMP_HEADER.lower().encode()].decode("ascii")
            age = (now() - datetime.fromisoformat(signed)).total_seconds()
        except (KeyError, ValueError, TypeError) as problem:
            raise Refusal(401, "unsigned", "a request without a signature") from problem
        site = self._sites.get(key)
        if site is None:
            raise Refusal(401, "unregistered", "a key that is not registered")
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            raise Refusal(401, "clock", f"a request signed {age:.0f} s ago", site)
        if not verify_signature(self._keys[site], signed.encode(), signature):
            raise Refusal(401, "signature", "a signature that is not of this key", site)
        self._first(site, signed)
        if key in self.revoked:
            raise Refusal(403, "revoked", "a key that was revoked", site)
        self._hear(site)
        return site

    def _hear(self, site: str) -> None:
        """Record an incident if the site was silent for long before this request: disconnected, or suspended."""
        clock = time.monotonic()
        silence = clock - self._heard.get(site, clock)
        self._heard[site] = clock
        if silence > SILENT:
            self.note(f"nothing was heard of it for {silence:.0f} s", None, site)

    def _first(self, site: str, signed: str) -> None:
        """Refuse a replayed request: a site may use each signed time only once.

        Signatures are not compared, because a signature can be altered and stay valid.
        """
        clock = time.monotonic()
        while self._seen:
            oldest = next(iter(self._seen))
            if clock - self._seen[oldest] < TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE:
                break
            del self._seen[oldest]
        if (site, signed) in self._seen:
            raise Refusal(401, "replayed", "a request that was seen before", site)
        self._seen[site, signed] = clock

    def _keep_online(self, site: str) -> None:
        """Take moving bytes for a heartbeat, which may be late on a link that is busy with them."""
        clock = self._heard[site] = time.monotonic()
        if clock - self._kept_online.get(site, 0.0) > 1.0:
            self._kept_online[site] = clock
            (node,) = self._state.get_node_info(node_ids=[self._nodes[site]])
            self._state.acknowledge_node_heartbeat(self._nodes[site], node.heartbeat_interval)

    async def _receive_part(self, scope: Scope, headers: Mapping[bytes, bytes], size: int, site: str) -> bytes:
        """Receive the rest of a chunk in its place, or as much of it as comes. The response is the number of bytes
        that have arrived (-1: it is not received in parts) and whether the chunk is stored."""
        name = headers.get(OBJECT.encode(), b"").decode("latin-1")
        start, count, total = _part(headers[PART.encode()], size, site)
        arrival, front = self.landings.arrival(site, name, total), room(size - count)
        if arrival is not None:
            arrival.pause()  # the last request counts: the site has given up the one before
        if count and (arrival is None or start != arrival.arrived or count > len(arrival.rest)):
            raise Refusal(416, "range")
        await self._read(scope, site, front, *(() if arrival is None else (arrival.rest[:count],)), arrival=arrival)
        request = _parsed(PushObjectRequest, front, site)
        self._own(request, site)
        if request.object_id != name:
            raise Refusal(400, "odd", "a part of another object", site)
        if arrival is not None and arrival.arrived < total:
            return b"%d 0" % arrival.arrived
        if arrival is None or not arrival.place.landing.complete(arrival):
            return b"-1 %d" % self._is_available(name)
        return b"%d %d" % (total, await run_in_threadpool(self._stored, request, memoryview(b""), arrival.place, site))

    def _is_available(self, name: str) -> bool:
        with self._store.lock_store:
            entry = self._store.store.get(name)
            return entry is not None and bool(entry.is_available)

    async def _receive_object(self, scope: Scope, headers: Mapping[bytes, bytes], size: int, site: str) -> bytes:
        """Receive and store a part of an answer, a chunk in its place if there is one; return the response."""
        place = self.landings.take(site, headers.get(OBJECT.encode(), b"").decode("latin-1"), size)
        slots = () if place is None else place.slots[:1]
        body = room(size - sum(map(len, slots)))
        await self._read(scope, site, body, *slots)
        push = partial(self._push, site, body, place)
        return push() if size < SMALL else await run_in_threadpool(push)

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
            self.note("a response that was not fetched", scope["client"], "")
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

    # calls

    def online(self, site: str) -> bool:
        """Return whether Flower considers a site connected, and its key was not revoked."""
        if self._public[site] in self.revoked:
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

    def _expect(self, site: str, body: Buffer) -> tuple[str, str]:
        """Check an announced response: it must be expected from this site. Returns the identifiers of the request and
        of the response."""
        request = _parsed(PushMessagesRequest, body, site)
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refusal(400, "odd", "not one answer but several", site)
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        names = [each.object_id for each in iterate_object_tree(tree)]
        if (
            len(names) > 64 + self._limit // SLACK
            or len(set(names)) < len(names)
            or tree.object_id != metadata.message_id
        ):
            raise Refusal(400, "odd", "an answer of too many or repeated parts", site)
        question, reply = metadata.reply_to_message_id, metadata.message_id
        with self._state.lock:
            asked = self._state.message_ins_store.get(question)
            if asked is None or {asked.metadata.dst_node_id, metadata.src_node_id} != {self._nodes[site]}:
                raise Refusal(410, "unwanted")
            former = self._state.message_ins_id_to_message_res_id.get(question)
            if former is not None and former != reply:
                if self.contents(former) is not None:
                    raise Refusal(410, "unwanted")
                del self._state.message_res_store[former]  # an incomplete response, which is now replaced
                del self._state.message_ins_id_to_message_res_id[question]
                self.drop(former)
                with self._lock:
                    self._pushed[site] = 0  # what was dropped does not count against the limit
        return question, reply

    def _push(self, site: str, body: memoryview, place: Place | None) -> bytes:
        """Store a part of an answer; its data are not in the body, if they were received in a place."""
        given = memoryview(b"")
        try:
            if place is None:
                request, given = read_pushed(body)
            else:
                request = read_before_chunk(bytes(body), len(place.slots[0]))
        except DecodeError as problem:
            raise Refusal(400, "odd", "a request that cannot be read", site) from problem
        self._own(request, site)
        with self._lock:  # counted before it is stored: parts of an answer arrive at the same time
            excessive = self._pushed[site] + len(body) > self._limit + SLACK
            self._pushed[site] += 0 if excessive else len(body)
        if excessive:
            self.excessive.add(site)
            raise Refusal(413, "large", f"an answer of more than {self._limit} bytes", site)
        stored = False
        try:
            stored = self._stored(request, given, place, site)
        finally:
            if not stored:
                with self._lock:
                    self._pushed[site] = max(0, self._pushed[site] - len(body))
        return bytes(PushObjectResponse(stored=stored).SerializeToString())

    def _stored(self, request: PushObjectRequest, given: memoryview, place: Place | None, site: str) -> bool:
        """Store a part of an answer, if it is wanted; return whether it was."""
        with self._state._lock_object_push_sessions:
            session = self._state._object_push_sessions.get(request.session_id)
            if session is None and place is not None:  # the answer was announced again meanwhile
                request.session_id = self._state._object_push_session_by_root.get(place.landing.reply, "")
                session = self._state._object_push_sessions.get(request.session_id)
            if session is not None:
                session.expires_at = FOREVER  # responses are dropped here; Flower's own way can deadlock
        try:
            content = read_content(request.object_id, given) if place is None else _settled(place, request.object_id)
        except ValueError as problem:
            raise Refusal(400, "odd", f"a part of an answer that is damaged: {problem}", site) from problem
        if session is None:
            return False
        if not isinstance(content, Chunk):
            self._reserve(site, session, request.object_id, content)
        stored = self._state.store_object(self._run, request.session_id, request.object_id, cast(bytes, content))
        if stored and not session.pending_object_ids:
            self.arrived.set()
        return bool(stored)

    def _reserve(self, site: str, session: ObjectPushSession, name: str, content: bytes) -> None:
        """Reserve memory for an array of this site's answer; its bytes count against the limit from now on.

        Without it, as when a part of the array is here already, chunks are received as they come.
        """
        with self._state._lock_object_push_sessions:
            roots, pending = list(session.root_object_ids), set(session.pending_object_ids)
        answer = self._state.message_res_store.get(roots[0]) if roots and name in pending else None
        if answer is None or answer.metadata.src_node_id != self._nodes[site] or len(content) > SMALL:
            return
        try:
            found = array_chunks(content, self._limit)
        except PayloadError:  # reported when the answer is collected
            return
        if found is None or not found[1] or not found[1].keys() <= pending:
            return
        size, places = found
        with self._lock:
            if self._pushed[site] + size <= self._limit + SLACK:
                reserved = self.landings.reserve(site, roots[0], name, size, places)
                self._pushed[site] += size if reserved else 0

    def _pull(self, site: str, body: Buffer) -> Content | None:
        """Return an object from the store."""
        request = _parsed(PullObjectRequest, body, site)
        self._own(request, site)
        return self._store.get(request.object_id)

    def _own(self, request: Any, site: str) -> None:
        if (request.node.node_id, request.run_id) != (self._nodes[site], self._run):
            raise Refusal(403, "odd", "a request in the name of another", site)

    async def _renew(self, site: str, request: bytes) -> bytes:
        """Return a new certificate for a site that asks for one with its own key."""
        try:
            made = await run_in_threadpool(self.renewal, site, request)
        except PolysiteError as problem:
            raise Refusal(400, "odd", f"asks for a certificate that it cannot have: {problem}", site) from problem
        if made is None:
            raise Refusal(404, "by hand", "needs a new certificate: have it send a request (polysite site renew)", site)
        return made

    def note_expiry(self, site: str, end: datetime) -> None:
        """Record once a day that the certificate of a site expires soon."""
        today = datetime.now(UTC)
        if end - today < SOON and self._noted_expiry.get(site) != today.date():
            self._noted_expiry[site] = today.date()
            self.note(f"its certificate expires on {end:%Y-%m-%d}", None, site)

    # storage

    def contents(self, name: str) -> dict[str, Content] | None:
        """Return the objects of a message, or None if some are missing."""
        found: dict[str, Content] = {}
        wanted = [name]
        with self._store.lock_store:
            while wanted:
                each = wanted.pop()
                entry = self._store.store.get(each)
                if entry is None or not entry.is_available:
                    return None
                if each not in found:
                    found[each] = entry.content
                    wanted += entry.child_object_ids
        return found

    def drop(self, name: str) -> None:
        """Delete the objects of a message that no other message shares."""
        self._store.delete(name)
        with self._state._lock_object_push_sessions:
            session = self._state._object_push_session_by_root.get(name)
            if session is not None:
                self._state._cleanup_push_session(session, cleanup_messages=False)
        self.landings.drop(name)

    def rest(self, site: str) -> None:
        """Reset the size limit of a site from which no response is expected."""
        with self._lock:
            self._pushed[site] = 0
            self.landings.rest(site)
        self.excessive.discard(site)

    # refusals

    def note(self, what: str, client: Any, site: str = "") -> None:
        """Record a refusal. Equal ones are counted, so that a flood fills neither memory nor the record."""
        if not what:
            return
        host = client[0] if client else ""
        log.debug("refused from %s (%s): %s", host, site or "unknown", what)
        with self._lock:
            at = what, host, site
            if at not in self._incidents and len(self._incidents) >= 255:
                at = "many more", "", ""
            if at not in self._incidents:
                found = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "what": at[0], "from": at[1]}
                self._incidents[at] = {**found, "site": at[2], "count": 0}
            self._incidents[at]["count"] += 1

    def incidents(self) -> list[dict[str, Any]]:
        """Return the refusals since the last call."""
        with self._lock:
            found, self._incidents = list(self._incidents.values()), {}
        return found


def _announced(headers: Mapping[bytes, bytes], most: int, site: str) -> int:
    """Return the size of a request's body."""
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or len(announced) > 15 or int(announced) > most:
        raise Refusal(413, "large", f"a request of {announced[:20].decode('latin-1')} bytes announced", site)
    if b"transfer-encoding" in headers:
        raise Refusal(413, "large", "a request that does not announce its size", site)
    return int(announced)


def _part(given: bytes, size: int, site: str) -> tuple[int, int, int]:
    """Return where the bytes of a part of a chunk begin, how many come, and how many the chunk has."""
    numbers = [int(each) for each in given.split() if each.isdigit() and len(each) < 12]
    if len(numbers) != 3 or given.count(b" ") != 2 or not 0 < size - numbers[1] <= MAX_SMALL:
        raise Refusal(400, "odd", "a part of an answer that is not described", site)
    return numbers[0], numbers[1], numbers[2]


def _sent(scope: Scope, content: Content | None, rest: bytes) -> list[Buffer]:
    """Return the parts of a response with an object, which is not copied; of a chunk perhaps only the rest."""
    if isinstance(content, Chunk) and rest.isdigit() and len(rest) < 12 and 0 < int(rest) < len(content.data):
        scope["extensions"][HEADERS] = [(REST.encode(), rest)]
        return [memoryview(content.data)[int(rest) :]]
    return pulled(content)


def _alive(scope: Scope) -> None:
    if ALIVE in scope["extensions"]:
        scope["extensions"][ALIVE]()


def _settled(place: Place, name: str) -> Chunk:
    chunk = place.settle() if name == place.name else None
    if chunk is None:
        raise ValueError("an object that is not the one of its name")
    return chunk


def _pieces(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def _parsed(kind: Any, body: Buffer, site: str) -> Any:
    try:
        return kind.FromString(bytes(body))
    except DecodeError as problem:
        raise Refusal(400, "odd", "a request that cannot be read", site) from problem
