"""The hospital's end of the wire: a client of Flower's Fleet API, over outgoing connections only.

A site polls for messages, fetches their objects, answers, and sends a heartbeat every few seconds. Each HTTP request
carries the site's client certificate, a signature of its key and an identifier of this start of the courier. The caller
decides how often to poll and what to do after ``Lost``: usually ``connect`` again. That resumes the former connection
if the coordinator still knows it, so an earlier request can still be answered.
"""

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from polysite.buffers import Buffer, room
from polysite.deploy.flower.messages import (
    INSTANCE,
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
from polysite.deploy.flower.wire import Slot, Wire, tls_context
from polysite.deploy.proxy import Proxy
from polysite.errors import PayloadError, RunError, shown

import httpx  # isort: skip  # from here on: dependencies of Flower
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
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
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

FLEET, RENEW = "/v1/fleet/", "/v1/polysite/renew-certificate"
CUT = (OSError, HTTPException, ValueError)  # a connection that breaks, or brings something else than a response
TROUBLE = (*CUT, httpx.HTTPError)
T = TypeVar("T")


class Refused(RunError):
    """There is no connection; ``slowly`` if trying again soon is of no use. It may help at any later time, so this
    never ends a site."""

    def __init__(self, sentence: str, slowly: bool = False):
        super().__init__(sentence)
        self.slowly = slowly


class Lost(RunError):
    """The connection is lost, or the coordinator does not know this site any more."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it arrived; ``message`` is for ``Fleet.answer`` only."""

    header: dict[str, Header]
    body: Buffer
    message: Message


class Fleet:
    """One site's connection to the coordinator.

    Args:
        address: host:port of the coordinator.
        key: The site's private key.
        certificate: The site's certificate.
        ca: Certificate of the federation's authority.
        heartbeat: Seconds between two heartbeats, doubled.
        patience: Seconds to retry over a connection that is broken and moves nothing.
        timeout: Seconds to wait for a silent peer, however long a transfer takes.
        limit: Largest message in bytes.
        proxy: Proxy through which to connect.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Path,
        certificate: Path,
        ca: Path,
        heartbeat: float = 10,
        patience: float = 10,
        timeout: float = 10,
        limit: int = 8 << 30,
        proxy: Proxy | None = None,
    ):
        if not 10 <= heartbeat <= 1800:
            raise RunError(f"a heartbeat comes every 10 s to 30 min, not every {heartbeat} s")
        self._address, self._heartbeat, self._patience, self._limit = address, heartbeat, patience, limit
        private = _private_key(key)
        self._public = public_key_to_bytes(private.public_key())
        signs = (_Instance(secrets.token_hex(16)), NodeAuthHttpInterceptor(private, private.public_key()))
        self._proxy = proxy
        self._context = context = tls_context(certificate, key, ca, proxy)
        self._wire = Wire(context, proxy)
        self._client = FleetHttpClient(f"https://{address}", interceptors=signs, verify=context)
        self._client._client.close()  # Flower's own handles every 16 kB of a response in Python
        self._client._client = httpx.Client(transport=self._wire, timeout=timeout, trust_env=False)
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="polysite-wire")
        self._closing = threading.Event()
        self._pulse: threading.Thread | None = None
        self._node: Node | None = None
        self._outgoing: _Outgoing | None = None  # a response that may have to be uploaded further
        self._arriving: _Arriving | None = None  # a request that may have to be downloaded further
        self._unconfirmed: tuple[ConfirmMessageReceivedRequest, Incoming | PayloadError] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Try once to connect, or to resume a connection that is still known; ``Refused`` says why it fails."""
        self._wire.hang_up()
        try:
            if self._node is not None and self._still_known():
                return
            activation = ActivateNodeRequest(public_key=self._public, heartbeat_interval=self._heartbeat)
            node = Node(node_id=self._client.ActivateNode(activation).node_id)
            if node != self._node:  # another start of the coordinator
                self._node, self._arriving, self._unconfirmed = node, None, None
        except httpx.HTTPStatusError as problem:
            raise self._refusal(problem.response) from problem
        except TROUBLE as problem:
            raise _unreachable(self._address, problem, self._proxy) from problem
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat_on, name="polysite-heartbeat", daemon=True)
            self._pulse.start()

    def receive(self, seconds: int = 0) -> Incoming | None:
        """Return the next request, if one is there or comes within so many seconds.

        ``Lost`` after ``patience`` seconds without a connection. After ``connect``, the next call goes on where this
        one ended.
        """
        node = self._connected()
        if self._unconfirmed is not None:
            return self._confirm(*self._unconfirmed)
        parts: list[Buffer] = [PullMessagesRequest(node=node).SerializeToString()]
        held = {WAIT: str(seconds)}
        answer = self._call(lambda each: self._post("pull-messages", each, headers=held), parts, self._patience)
        pulled = _parsed(PullMessagesResponse, answer)
        if not pulled.messages_list:
            return None
        message, tree = message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]
        run, name = message.metadata.run_id, message.metadata.message_id
        outcome: Incoming | PayloadError
        try:
            whole = inflate(name, *self._objects(node, run, tree))
            outcome = Incoming(*unpack(whole.content), remove_content_from_message(whole))
        except _Unwanted:
            return None
        except PayloadError as problem:  # received nevertheless: it would come again
            outcome = problem
        self._arriving = None
        self._unconfirmed = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name), outcome
        return self._confirm(*self._unconfirmed)

    def _confirm(self, request: ConfirmMessageReceivedRequest, outcome: "Incoming | PayloadError") -> Incoming:
        """Confirm that a message was received, and return it, or raise what is wrong with it."""
        self._call(self._client.ConfirmMessageReceived, request, self._patience)
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
        self._all(pull, [name for name in inner if name not in came.contents])
        came.reserve(inner, self._limit)
        self._all(lambda name: self._pull_chunk(node, run, name, came.slots[name], came), came.missing())
        self._all(pull, [n for n, leaf in leaves.items() if leaf and n not in came.slots and n not in came.contents])
        return came.contents, self._limit, came.joined

    def answer(
        self, incoming: Incoming, header: Mapping[str, Header], body: Buffer = b"", *, patience: float = 120.0
    ) -> bool:
        """Upload a response; return False if it is no longer wanted.

        ``Lost`` after ``patience`` seconds in which nothing arrived. After ``connect``, a second call for the same
        request goes on where the first one ended; its header and body are those of the first.
        """
        node, end = self._connected(), time.monotonic() + patience
        if self._outgoing is None or self._outgoing.incoming is not incoming:
            self._outgoing = _Outgoing.pack(incoming, header, body)
        leaving = self._outgoing
        while True:
            try:
                wanted = self._call(self._client.PushMessages, leaving.announcement(node), patience)
            except _Unwanted:
                self._outgoing = None
                return False
            request = PushObjectRequest(node=node, run_id=leaving.run, session_id=wanted.session_id)
            missing = set(wanted.objects_to_push)
            small = [name for name in leaving.objects if name in missing and not leaving.is_chunk(name)]
            chunks = [name for name in leaving.objects if name in missing and leaving.is_chunk(name)]
            stored = self._all(lambda name: self._push(request, name, leaving, patience), small)  # noqa: B023
            # only now is known where chunks belong
            stored += self._all(lambda name: self._push_chunk(request, name, leaving, patience), chunks)  # noqa: B023
            if all(stored):
                self._outgoing = None
                return True
            end = time.monotonic() + patience if any(stored) else end
            if time.monotonic() > end:  # otherwise announce again and push what is missing
                raise Lost(f"the coordinator at {self._address} did not take the answer within {patience:.0f} s")
            self._closing.wait(0.2)

    def _push(self, request: PushObjectRequest, name: str, leaving: "_Outgoing", patience: float) -> bool:
        """Push an object as a whole; return whether it was stored."""
        parts = pushed(_named(request, name), content_of(leaving.objects[name]))
        headers = {OBJECT: name} if leaving.is_chunk(name) else {}
        answer = self._call(lambda each: self._post("push-object", each, headers=headers), parts, patience)
        return bool(_parsed(PushObjectResponse, answer).stored)

    def _push_chunk(self, request: PushObjectRequest, name: str, leaving: "_Outgoing", patience: float) -> bool:
        """Push a chunk; after a cut, only what has not arrived. Return whether it was stored."""
        data = memoryview(leaving.chunk(name).data)
        front = _named(request, name).SerializeToString()
        arrived, certain = 0, name not in leaving.tried
        leaving.tried.add(name)

        def push(start: int, rest: memoryview) -> tuple[int, bool]:
            headers = {OBJECT: name, PART: f"{start} {len(rest)} {len(data)}"}
            have, stored = self._post("push-object", [front, rest], headers=headers).split()
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

        done = self._call(attempt, None, patience, lambda: arrived)
        return self._push(request, name, leaving, patience) if done is None else done

    def renew(self, request: bytes) -> bytes | None:
        """Ask for a new certificate by a signing request; None if the coordinator has to make it by hand."""

        def ask(parts: list[Buffer]) -> bytes | None:
            try:
                return self._post(RENEW, parts)
            except httpx.HTTPStatusError as refused:
                if _detail(refused.response) == "by hand":
                    return None
                raise

        return self._call(ask, [request], self._patience)

    def use(self, certificate: Path, key: Path) -> None:
        """Show another certificate of this site's key from now on."""
        self._context.load_cert_chain(certificate, key)

    def close(self) -> None:
        """Disconnect."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._pulse is not None:
            self._pulse.join()
        self._workers.shutdown(cancel_futures=True)
        if self._node is not None:
            with suppress(*TROUBLE):  # the coordinator notices when the heartbeats stop
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        self._client.close()
        self._wire.close()

    def _connected(self) -> Node:
        if self._node is None or self._closing.is_set():
            raise Lost(f"this site is not connected to the coordinator at {self._address}")
        return self._node

    def _beat(self) -> bool:
        beat = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=self._heartbeat)
        return self._client.SendNodeHeartbeat(beat).success

    def _still_known(self) -> bool:
        try:
            return self._beat()
        except httpx.HTTPStatusError:
            return False

    def _beat_on(self) -> None:
        while not self._closing.wait(self._heartbeat / 2):
            with suppress(*TROUBLE):  # receive and answer report the problem
                self._beat()

    def _pull(self, node: Node, run: int, name: str, slot: Slot | None = None) -> bytes:
        """Return an object; nothing, if it is a chunk that was received in its place."""
        wanted, end = PullObjectRequest(node=node, run_id=run, object_id=name), time.monotonic() + self._patience
        parts: list[Buffer] = [wanted.SerializeToString()]

        def pull(each: list[Buffer]) -> bytes:
            return self._post("pull-object", each, slot, {REST: str(slot.filled)} if slot and slot.filled else {})

        while True:
            answer = self._call(pull, parts, self._patience, lambda: slot.filled if slot else 0)
            if slot is not None and answer == before_chunk(len(slot)):
                return b""
            pulled = _parsed(PullObjectResponse, answer)
            if pulled.object_available:
                if not pulled.object_content:
                    raise PayloadError("what arrived is not a message: an object is empty")
                return bytes(pulled.object_content)
            if not pulled.object_found or time.monotonic() > end:
                raise _Unwanted
            self._closing.wait(0.05)

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

    def _post(
        self,
        call: str,
        parts: Sequence[Buffer],
        slot: Slot | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Send a signed request in parts. A chunk in the response goes into ``slot``, if it has that size; return the
        rest."""
        kind = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        carried = {"parts": parts, "slot": slot, "timeout": self._client._client.timeout.as_dict()}
        url = f"https://{self._address}{call if call == RENEW else FLEET + call}"
        request = httpx.Request("POST", url, headers={**kind, **headers}, extensions=carried)
        try:
            response = self._client._send(ProtobufRequestContext(call, Node(), request))
        finally:
            request.extensions.clear()  # request and response refer to each other and would keep the memory
        response.raise_for_status()
        return response.content

    def _all(self, do: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Apply ``do`` to all names, two at a time; stop after the first failure."""
        jobs = [self._workers.submit(do, name) for name in names]
        try:
            return [job.result() for job in jobs]
        except _Unwanted:  # perhaps because another part was refused, which says more
            for job in jobs:
                if not job.cancel() and isinstance(refused := job.exception(), PayloadError):
                    raise refused from None
            raise
        finally:
            wait([job for job in jobs if not job.cancel()])  # a later attempt must not meet those of this one

    def _call(
        self, method: Callable[[Any], T], request: Any, patience: float, moved: Callable[[], int] = lambda: 0
    ) -> T:
        """Call a method until it succeeds; ``Lost`` at once if the site is not known, or if it has failed for
        ``patience`` seconds in which nothing moved, by the number of bytes that ``moved`` returns."""
        failed, pause, problem, before = 0.0, 0.0, None, moved()
        while not self._closing.wait(pause):
            try:
                return method(request)
            except httpx.HTTPStatusError as refused:
                problem = self._passing(refused)
            except CUT as cut:
                problem = str(cut) or type(cut).__name__
            clock = time.monotonic()
            if not failed or moved() != before:
                failed, before, pause = clock, moved(), 0.0
            if clock > failed + patience:
                break
            pause = min(1.0, 2 * pause or 0.1)
        raise Lost(f"the coordinator at {self._address} cannot be reached any more: {problem or 'closing'}")

    def _passing(self, refused: httpx.HTTPStatusError) -> str:
        """Return what is wrong, if trying again may help; raise what it means otherwise."""
        code = refused.response.status_code
        if code == 410:
            raise _Unwanted from refused
        if code == 413:
            raise PayloadError(f"the coordinator at {self._address} takes no message of this size") from refused
        # 408: too slow; 416: not as many bytes have arrived as was thought; signed in the same instant: sign anew
        if code < 500 and code not in (408, 416) and _detail(refused.response) != "replayed":
            raise Lost(str(self._refusal(refused.response))) from refused
        return f"it answers {code}"

    def _refusal(self, response: httpx.Response) -> Refused:
        why, at = _detail(response), f"the coordinator at {self._address}"
        if why == "unregistered":
            return Refused(f"{at} does not know this site's key; ask its people to enrol this hospital", slowly=True)
        if why == "revoked":
            return Refused(f"{at} has revoked this site's key; ask its people why, and enrol again", slowly=True)
        if why == "anew":
            return Refused(f"{at} was started anew")
        if why == "elsewhere":
            return Refused(
                f"this site's key is in use elsewhere, or its former connection to {at} has not lapsed yet; "
                "that takes half a minute"
            )
        if why == "clock":
            return Refused(
                f"the clock of {at} shows {response.headers.get('date', 'another time')}, this machine's "
                f"{time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}: set them right"
            )
        return Refused(f"{at} refuses this site: {response.status_code} {why or response.reason_phrase}")


class _Unwanted(Exception):
    """The coordinator no longer wants the response."""


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


class _Instance:
    """Adds the identifier of this start of the courier to every request."""

    def __init__(self, instance: str):
        self._instance = instance

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the header and continue."""
        context.request.headers[INSTANCE] = self._instance
        return call_next(context)


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


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])[:100]
    except (ValueError, KeyError, TypeError):
        return ""


def _private_key(path: Path) -> EllipticCurvePrivateKey:
    try:
        key = bytes_to_private_key(path.read_bytes())
    except (OSError, ValueError, TypeError) as problem:
        raise RunError(f"{path} cannot be read as this site's key: {problem}") from problem
    if not isinstance(key, EllipticCurvePrivateKey):
        raise RunError(f"{path} is not an elliptic curve key, as this site's key must be")
    return key


def _unreachable(address: str, problem: Exception, proxy: Proxy | None) -> Refused:
    at = f"the coordinator at {address}" + (f" (through the proxy {proxy.host}:{proxy.port})" if proxy else "")
    if isinstance(problem, ssl.SSLCertVerificationError):
        hint = (
            "; a proxy that opens TLS has to let this address pass, or needs [proxy] ca in site.toml" if proxy else ""
        )
        return Refused(
            f"what answers at {address} is not this consortium's coordinator: {problem.verify_message}{hint}",
            slowly=True,
        )
    if isinstance(problem, ssl.SSLError) and "ALERT" in (problem.reason or ""):
        return Refused(f"{at} does not accept this site's certificate: {problem.reason}", slowly=True)
    if proxy and "Tunnel connection failed" in str(problem):
        wants = "; it wants a login: see [proxy] login in site.toml" if " 407" in str(problem) else ""
        return Refused(f"the proxy {proxy.host}:{proxy.port} gives no tunnel to {address}: {shown(problem, 80)}{wants}")
    if isinstance(problem, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError):
        return Refused(f"{at} hung up at once; it may not accept this site's certificate")
    return Refused(f"{at} cannot be reached: {shown(problem) or type(problem).__name__}")
