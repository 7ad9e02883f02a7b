"""The answers of sites while they arrive: announced, received in parts, counted against a limit, stored and collected.

An answer is a message of many objects in Flower's store. Only one that is expected from its site is stored. The chunks
of its arrays are received in the place where they belong (``landing.py``), also in parts after a connection was cut.
"""

import threading
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, cast

from polysite.buffers import Buffer, room
from polysite.deploy.flower.admission import Refusal
from polysite.deploy.flower.landing import Arrival, Landings, Place
from polysite.deploy.flower.messages import OBJECT, PART, Chunk, Content, array_chunks, read_content
from polysite.deploy.flower.objects import MAX_SMALL, read_before_chunk, read_pushed
from polysite.errors import PayloadError

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse  # isort: skip
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.corestate.in_memory_corestate import ObjectPushSession
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.concurrency import run_in_threadpool

SMALL = 64 << 10  # bytes of an object that is hashed in the server's thread
SLACK = 1 << 20  # bytes of a response beyond its limit: header and names
FOREVER = datetime.max.replace(tzinfo=UTC)


class Read(Protocol):
    """Receives the body of a request."""

    def __call__(self, *parts: memoryview, arrival: Arrival | None = None) -> Awaitable[None]:
        """Receive the body in memory that is given, which may be in several parts."""
        ...


class Answers:
    """The objects of messages in Flower's store.

    Args:
        state: Flower's record of messages.
        run: Flower's number of the run.
        nodes: Flower's number of every site.
        limit: Largest answer in bytes.
    """

    def __init__(self, state: InMemoryLinkState, run: int, nodes: Mapping[str, int], limit: int):
        self._state, self._run, self._nodes, self._limit = state, run, nodes, limit
        self._store = cast(InMemoryObjectStore, state.object_store)
        self.landings = Landings(self._store)
        self.excessive: set[str] = set()  # sites whose answer is larger than the limit
        self.arrived = threading.Event()  # a response is complete, or a site has connected
        self._pushed = dict.fromkeys(nodes, 0)  # bytes of responses that are not collected yet
        self._lock = threading.Lock()

    async def receive(self, read: Read, headers: Mapping[bytes, bytes], size: int, site: str) -> bytes:
        """Receive and store an object of an answer, or a part of it; return the response."""
        if PART.encode() in headers:
            return await self._receive_part(read, headers, size, site)
        return await self._receive_object(read, headers, size, site)

    async def _receive_part(self, read: Read, headers: Mapping[bytes, bytes], size: int, site: str) -> bytes:
        """Receive the rest of a chunk in its place, or as much of it as comes. The response is the number of bytes
        that have arrived (-1: it is not received in parts) and whether the chunk is stored."""
        name = headers.get(OBJECT.encode(), b"").decode("latin-1")
        start, count, total = _part(headers[PART.encode()], size, site)
        arrival, front = self.landings.arrival(site, name, total), room(size - count)
        if arrival is not None:
            arrival.pause()  # the last request counts: the site has given up the one before
        if count and (arrival is None or start != arrival.arrived or count > len(arrival.rest)):
            raise Refusal(416, "range")
        await read(front, *(() if arrival is None else (arrival.rest[:count],)), arrival=arrival)
        request = _parsed(PushObjectRequest, front, site)
        self._own(request, site)
        if request.object_id != name:
            raise Refusal(400, "odd", "a part of another object", site)
        if arrival is not None and arrival.arrived < total:
            return b"%d 0" % arrival.arrived
        if arrival is None or not arrival.place.landing.complete(arrival):
            return b"-1 %d" % self._is_available(name)
        return b"%d %d" % (total, await run_in_threadpool(self._stored, request, memoryview(b""), arrival.place, site))

    async def _receive_object(self, read: Read, headers: Mapping[bytes, bytes], size: int, site: str) -> bytes:
        """Receive and store a part of an answer, a chunk in its place if there is one; return the response."""
        place = self.landings.take(site, headers.get(OBJECT.encode(), b"").decode("latin-1"), size)
        slots = () if place is None else place.slots[:1]
        body = room(size - sum(map(len, slots)))
        await read(body, *slots)
        push = partial(self._push, site, body, place)
        return push() if size < SMALL else await run_in_threadpool(push)

    def _is_available(self, name: str) -> bool:
        with self._store.lock_store:
            entry = self._store.store.get(name)
            return entry is not None and bool(entry.is_available)

    def expect(self, site: str, body: Buffer) -> tuple[str, str]:
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

    def check_taken(self, asked: str, reply: str, response: bytes) -> None:
        """Refuse an announced response that Flower ignores, which it also confirms."""
        if self._state.message_ins_id_to_message_res_id.get(asked) != reply:
            begun = PushMessagesResponse.FromString(response).session_id
            self._state._cleanup_push_session(begun, cleanup_messages=False)
            raise Refusal(410, "unwanted")

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

    def pull(self, site: str, body: Buffer) -> Content | None:
        """Return an object from the store."""
        request = _parsed(PullObjectRequest, body, site)
        self._own(request, site)
        return self._store.get(request.object_id)

    def _own(self, request: Any, site: str) -> None:
        if (request.node.node_id, request.run_id) != (self._nodes[site], self._run):
            raise Refusal(403, "odd", "a request in the name of another", site)

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


def _part(given: bytes, size: int, site: str) -> tuple[int, int, int]:
    """Return where the bytes of a part of a chunk begin, how many come, and how many the chunk has."""
    numbers = [int(each) for each in given.split() if each.isdigit() and len(each) < 12]
    if len(numbers) != 3 or given.count(b" ") != 2 or not 0 < size - numbers[1] <= MAX_SMALL:
        raise Refusal(400, "odd", "a part of an answer that is not described", site)
    return numbers[0], numbers[1], numbers[2]


def _settled(place: Place, name: str) -> Chunk:
    chunk = place.settle() if name == place.name else None
    if chunk is None:
        raise ValueError("an object that is not the one of its name")
    return chunk


def _parsed(kind: Any, body: Buffer, site: str) -> Any:
    try:
        return kind.FromString(bytes(body))
    except DecodeError as problem:
        raise Refusal(400, "odd", "a request that cannot be read", site) from problem
