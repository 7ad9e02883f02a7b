"""The hospital's end of the wire: receives requests of the coordinator and uploads responses.

A site only makes outgoing connections: it polls for messages, fetches their objects, and answers. The caller decides
how often to poll and what to do after ``Lost``: usually ``connect`` again. A download or an upload that was cut then
goes on where it was, and an earlier request can still be answered. The signed requests are in ``connection.py``.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from polysite.buffers import Buffer, room
from polysite.deploy.flower.connection import Connection, Lost, Unwanted
from polysite.deploy.flower.messages import (
    OBJECT,
    PART,
    REST,
    WAIT,
    Chunk,
    Content,
    Header,
    array_chunks,
    content_of,
    deflate,
    inflate,
    pack,
    unpack,
)
from polysite.deploy.flower.objects import before_chunk, pushed
from polysite.deploy.flower.wire import Slot
from polysite.errors import PayloadError

from flwr.app import Message  # isort: skip  # from here on: dependencies of Flower
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it arrived; ``message`` is for ``Fleet.answer`` only."""

    header: dict[str, Header]
    body: Buffer
    message: Message


class Fleet(Connection):
    """One site's connection to the coordinator, with the requests that come and the responses that go over it."""

    _outgoing: "_Outgoing | None" = None  # a response that may have to be uploaded further
    _arriving: "_Arriving | None" = None  # a request that may have to be downloaded further
    _unconfirmed: tuple[ConfirmMessageReceivedRequest, Incoming | PayloadError] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> bool:
        """Try once to connect, or to resume a connection that is still known; ``Refused`` says why it fails.

        Return whether this is another start of the coordinator than before.
        """
        if anew := super().connect():
            self._arriving, self._unconfirmed = None, None
        return anew

    def receive(self, seconds: int = 0) -> Incoming | None:
        """Return the next request, if one is there or comes within so many seconds.

        ``Lost`` after ``patience`` seconds without a connection. After ``connect``, the next call goes on where this
        one ended.
        """
        node = self.connected()
        if self._unconfirmed is not None:
            return self._confirm(*self._unconfirmed)
        parts: list[Buffer] = [PullMessagesRequest(node=node).SerializeToString()]
        held = {WAIT: str(seconds)}
        answer = self.call(lambda each: self.post("pull-messages", each, headers=held), parts, self.patience)
        pulled = _parsed(PullMessagesResponse, answer)
        if not pulled.messages_list:
            return None
        message, tree = message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]
        run, name = message.metadata.run_id, message.metadata.message_id
        outcome: Incoming | PayloadError
        try:
            whole = inflate(name, *self._objects(node, run, tree))
            outcome = Incoming(*unpack(whole.content), remove_content_from_message(whole))
        except Unwanted:
            return None
        except PayloadError as problem:  # received nevertheless: it would come again
            outcome = problem
        self._arriving = None
        self._unconfirmed = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name), outcome
        return self._confirm(*self._unconfirmed)

    def _confirm(self, request: ConfirmMessageReceivedRequest, outcome: "Incoming | PayloadError") -> Incoming:
        """Confirm that a message was received, and return it, or raise what is wrong with it."""
        self.call(self.client.ConfirmMessageReceived, request, self.patience)
        self._unconfirmed = None
        if isinstance(outcome, PayloadError):
            raise outcome
        return outcome

    def _objects(self, node: Node, run: int, tree: ObjectTree) -> tuple[dict[str, Content], int, dict[str, memoryview]]:
        """Return the objects of a message, without the chunks of its arrays, the limit of its size, and the data of the
        arrays.

        Chunks are received in the place where they belong. What came before a connection was lost is not pulled again.
        """
        if self._arriving is None or self._arriving.name != tree.object_id:
            self._arriving = _Arriving(tree.object_id)
        came = self._arriving
        leaves = {each.object_id: not each.children for each in iterate_object_tree(tree)}

        def pull(name: str) -> None:
            came.contents[name] = self._pull(node, run, name)

        inner = [name for name, leaf in leaves.items() if not leaf]
        self.all(pull, [name for name in inner if name not in came.contents])
        came.reserve(inner, self.limit)
        self.all(lambda name: self._pull_chunk(node, run, name, came.slots[name], came), came.missing())
        self.all(pull, [n for n, leaf in leaves.items() if leaf and n not in came.slots and n not in came.contents])
        return came.contents, self.limit, came.joined

    def _pull(self, node: Node, run: int, name: str, slot: Slot | None = None) -> bytes:
        """Return an object; nothing, if it is a chunk that was received in its place."""
        wanted, end = (
            PullObjectRequest(node=node, run_id=run, object_id=name),
            time.monotonic() + self.patience,
        )
        parts: list[Buffer] = [wanted.SerializeToString()]

        def pull(each: list[Buffer]) -> bytes:
            return self.post("pull-object", each, slot, {REST: str(slot.filled)} if slot and slot.filled else {})

        while True:
            answer = self.call(pull, parts, self.patience, lambda: slot.filled if slot else 0)
            if slot is not None and answer == before_chunk(len(slot)):
                return b""
            pulled = _parsed(PullObjectResponse, answer)
            if pulled.object_available:
                if not pulled.object_content:
                    raise PayloadError("what arrived is not a message: an object is empty")
                return bytes(pulled.object_content)
            if not pulled.object_found or time.monotonic() > end:
                raise Unwanted
            self.closing.wait(0.05)

    def _pull_chunk(
        self, node: Node, run: int, name: str, slots: Sequence[memoryview], came: "_Arriving | None" = None
    ) -> None:
        """Receive a chunk in the places where it belongs."""
        if len(set(map(len, slots))) > 1:
            raise PayloadError("what arrived is not a message: a chunk has places of different size in two arrays")
        slot = Slot(slots[0]) if came is None else came.parts.setdefault(name, Slot(slots[0]))
        if self._pull(node, run, name, slot):
            raise PayloadError(f"what arrived is not a message: a chunk has not the {len(slots[0])} bytes of its place")
        for other in slots[1:]:
            other[:] = slots[0]

    def answer(
        self, incoming: Incoming, header: Mapping[str, Header], body: Buffer = b"", *, patience: float = 120.0
    ) -> bool:
        """Upload a response; return False if it is no longer wanted.

        ``Lost`` after ``patience`` seconds in which nothing arrived. After ``connect``, a second call for the same
        request goes on where the first one ended; its header and body are those of the first.
        """
        node, end = self.connected(), time.monotonic() + patience
        if self._outgoing is None or self._outgoing.incoming is not incoming:
            self._outgoing = _Outgoing.pack(incoming, header, body)
        leaving = self._outgoing
        while True:
            try:
                wanted = self.call(self.client.PushMessages, leaving.announcement(node), patience)
            except Unwanted:
                self._outgoing = None
                return False
            request = PushObjectRequest(node=node, run_id=leaving.run, session_id=wanted.session_id)
            missing = set(wanted.objects_to_push)
            small = [name for name in leaving.objects if name in missing and not leaving.is_chunk(name)]
            chunks = [name for name in leaving.objects if name in missing and leaving.is_chunk(name)]
            stored = self.all(lambda name: self._push(request, name, leaving, patience), small)  # noqa: B023
            # only now is known where chunks belong
            stored += self.all(lambda name: self._push_chunk(request, name, leaving, patience), chunks)  # noqa: B023
            if all(stored):
                self._outgoing = None
                return True
            end = time.monotonic() + patience if any(stored) else end
            if time.monotonic() > end:  # otherwise announce again and push what is missing
                raise Lost(f"the coordinator at {self.address} did not take the answer within {patience:.0f} s")
            self.closing.wait(0.2)

    def _push(self, request: PushObjectRequest, name: str, leaving: "_Outgoing", patience: float) -> bool:
        """Push an object as a whole; return whether it was stored."""
        parts = pushed(_named(request, name), content_of(leaving.objects[name]))
        headers = {OBJECT: name} if leaving.is_chunk(name) else {}
        answer = self.call(lambda each: self.post("push-object", each, headers=headers), parts, patience)
        return bool(_parsed(PushObjectResponse, answer).stored)

    def _push_chunk(self, request: PushObjectRequest, name: str, leaving: "_Outgoing", patience: float) -> bool:
        """Push a chunk; after a cut, only what has not arrived. Return whether it was stored."""
        data = memoryview(leaving.chunk(name).data)
        front = _named(request, name).SerializeToString()
        arrived, certain = 0, name not in leaving.tried
        leaving.tried.add(name)

        def push(start: int, rest: memoryview) -> tuple[int, bool]:
            headers = {OBJECT: name, PART: f"{start} {len(rest)} {len(data)}"}
            have, stored = self.post("push-object", [front, rest], headers=headers).split()
            return int(have), stored == b"1"

        def attempt(_: None) -> bool | None:
            nonlocal arrived, certain
            if not certain:
                arrived, stored = push(0, data[:0])  # asks how much has arrived
                if stored or arrived < 0:
                    return stored or None
            certain = False
            arrived, stored = push(arrived, data[arrived:])
            certain = True
            return stored if arrived == len(data) else None

        done = self.call(attempt, None, patience, lambda: arrived)
        return self._push(request, name, leaving, patience) if done is None else done


@dataclass(slots=True)
class _Arriving:
    """A message of which a part has come: its objects, and the places of its chunks."""

    name: str
    contents: dict[str, Content] = field(default_factory=dict)
    joined: dict[str, memoryview] = field(default_factory=dict)  # data of arrays
    slots: dict[str, list[memoryview]] = field(default_factory=dict)  # places of chunks
    parts: dict[str, Slot] = field(default_factory=dict)  # how much of a chunk has come

    def reserve(self, inner: Iterable[str], limit: int) -> None:
        """Reserve memory for the data of all arrays."""
        limit -= sum(map(len, self.joined.values()))
        for name in inner:
            if name not in self.joined and (found := array_chunks(self.contents[name], limit)):  # type: ignore[arg-type]
                size, places = found
                self.joined[name], limit = room(size), limit - size
                for chunk, each in places.items():
                    self.slots.setdefault(chunk, []).extend(self.joined[name][place] for place in each)

    def missing(self) -> list[str]:
        """Return the chunks that have not come completely."""
        return [
            name for name in self.slots if name not in self.parts or self.parts[name].filled < len(self.parts[name])
        ]


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A response as it is uploaded: the same objects, however often the connection is cut."""

    incoming: Incoming
    message: Message
    tree: ObjectTree
    objects: Mapping[str, Any]
    tried: set[str] = field(default_factory=set)  # chunks of which a part may have arrived

    @classmethod
    def pack(cls, incoming: Incoming, header: Mapping[str, Header], body: Buffer) -> "_Outgoing":
        """Return a response, cut into objects."""
        message = Message(pack(header, body), reply_to=incoming.message)
        return cls(incoming, message, *deflate(message))

    @property
    def run(self) -> int:
        """Flower's number of the run."""
        return int(self.message.metadata.run_id)

    def is_chunk(self, name: str) -> bool:
        """Whether an object is a chunk of an array."""
        return isinstance(self.objects[name], Chunk)

    def chunk(self, name: str) -> Chunk:
        """Return a chunk of an array."""
        found = self.objects[name]
        assert isinstance(found, Chunk)
        return found

    def announcement(self, node: Node) -> PushMessagesRequest:
        """Return the request that says which objects will come."""
        bare = message_to_proto(remove_content_from_message(self.message))
        announced = PushMessagesRequest(node=node, messages_list=[bare], message_object_trees=[self.tree])
        announced.clientapp_runtime_list.append(0.0)
        return announced


def _named(request: PushObjectRequest, name: str) -> PushObjectRequest:
    """Return a copy of a request for an object."""
    copy = PushObjectRequest()
    copy.CopyFrom(request)
    copy.object_id = name
    return copy


def _parsed(kind: type[T], answer: bytes) -> T:
    try:
        return kind.FromString(answer)  # type: ignore[attr-defined,no-any-return]
    except DecodeError as problem:
        raise PayloadError(f"the coordinator sent a {kind.__name__} that cannot be read") from problem
