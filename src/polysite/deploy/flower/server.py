"""The coordinator's end of the wire: Flower's SuperLink in this process, behind a gateway.

Flower's SuperLink serves three APIs on one port, and two of them let any client register keys and start code; so
``polysite.deploy.flower.gateway`` stands in front of it.

State and objects are in memory. Flower's own way of waiting for responses is not used: it hides a response that has
arrived once its site is offline.
"""

import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from polysite.buffers import Buffer
from polysite.deploy.coordinator.posted import Envelope
from polysite.deploy.flower.admission import Admission
from polysite.deploy.flower.answers import FOREVER, Answers
from polysite.deploy.flower.gateway import Guard, Pace, Renewal
from polysite.deploy.flower.messages import Header, content_of, deflate, inflate, pack, unpack, wrap
from polysite.deploy.flower.port import Server
from polysite.deploy.revocations import Revocations
from polysite.errors import PayloadError, RunError

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey  # isort: skip  # from here on: dependencies of Flower
from flwr.app import Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
)
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.date import now
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import bytes_to_public_key
from flwr.superlink.main import create_app


class Link:
    """The coordinator's port, to which sites connect.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        certificate: The server's certificate.
        key: The server's key.
        ca: Certificate of the federation's authority.
        sites: Public key of every site.
        limit: Largest response in bytes.
        pace: How slow a client may be.
        revoked: List of revoked keys, which is read again whenever it changes.
        renewal: Returns a new certificate for a site and its request, or None if it has to be made by hand.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        certificate: Path,
        key: Path,
        ca: Path,
        sites: Mapping[str, bytes],
        limit: int = 8 << 30,
        pace: Pace = Pace(),
        revoked: Path | None = None,
        renewal: Renewal = lambda site, request: None,
    ):
        self._at = host, port
        self._files = certificate, key, ca
        self._sites, self._limit, self._pace = dict(sites), limit, pace
        self._revoked, self._renewal = Revocations(revoked), renewal
        self._sent: dict[str, str] = {}  # message → site

    def __enter__(self) -> Self:
        keys, context = _keys(self._sites), _context(*self._files)
        app = create_app()
        app.state.enable_supernode_auth = True
        state = app.state.linkstate_factory.state()
        if not isinstance(state, InMemoryLinkState) or not isinstance(state.object_store, InMemoryObjectStore):
            raise RunError("the coordinator keeps what is on the wire in memory: unset FLWR_DATABASE")
        self._state, self._store, self._run = state, state.object_store, _run(state)
        self._store.verify = False  # names of objects that arrive are checked by the gateway
        self._nodes = {
            site: state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0) for site, key in self._sites.items()
        }
        self._admission = Admission(self._sites, keys)
        self._admission.revoked = self._revoked
        self._answers = Answers(state, self._run, self._nodes, self._limit)
        self._guard = Guard(app, state, self._nodes, self._admission, self._answers, self._pace, self._renewal)
        self._server = Server(self._guard, context)
        listener = _listen(*self._at)
        self._at = self._at[0], listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="polysite-link", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RunError(
                    f"the coordinator cannot listen at {self._at[0]}:{self._at[1]}: its server did not start"
                )
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._at[1]

    def online(self) -> dict[str, str]:
        """Return the connected sites, each with a token that changes whenever the site connects anew."""
        return {site: token for site, token in list(self._guard.tokens.items()) if self._guard.online(site)}

    def send(self, site: str, header: Mapping[str, Header], body: Buffer, ttl: float, group: str) -> str:
        """Queue a message for a site and return the identifier of the message."""
        return self.send_all({site: (header, body)}, ttl, group)[site]

    def send_all(
        self, letters: Mapping[str, tuple[Mapping[str, Header], Buffer]], ttl: float, group: str
    ) -> dict[str, str]:
        """Leave a message for each site; return their identifiers. A body for several sites is hashed and kept once.

        A site sees its message only when it is complete.
        """
        if unknown := sorted(set(letters) - set(self._nodes)):
            raise RunError(f"no message can go to {unknown[0]!r}: the sites are {', '.join(self._nodes)}")
        distinct = {id(body): body for _, body in letters.values() if body}
        bodies = {each: wrap(body) for each, body in distinct.items()}
        messages = {
            site: make_message(self._metadata(site, ttl, group), pack(header, bodies.get(id(body), b"")))
            for site, (header, body) in letters.items()
        }
        for tree, objects in map(deflate, messages.values()):
            for name in self._store.preregister(self._run, tree):
                self._store.put(name, cast(bytes, content_of(objects[name])))
        for site, message in messages.items():
            if self._state.store_message_ins(remove_content_from_message(message)) is None:
                self.forget([each.metadata.message_id for each in messages.values()])
                raise RunError(f"no message can go to {site!r}: it has not connected yet")
            self._sent[message.metadata.message_id] = site
        self._server.announce(letters)
        return {site: message.metadata.message_id for site, message in messages.items()}

    def collect(self, ids: Iterable[str]) -> Iterator[Envelope]:
        """Yield the responses that have arrived, complete or failed; each is yielded once and then forgotten."""
        for each in list(ids):
            envelope = self._envelope(each)
            if envelope is not None:
                self.forget([each])
                yield envelope

    def wait(self, seconds: float) -> None:
        """Return when a response is complete or a site has connected, or else after so many seconds."""
        self._answers.arrived.wait(seconds)
        self._answers.arrived.clear()

    def forget(self, ids: Collection[str]) -> None:
        """Drop these messages and their responses; a response that still comes is not accepted."""
        for each in ids:
            with self._state.lock:
                reply = self._state.message_ins_id_to_message_res_id.get(each)
                self._state.delete_messages({each})
            for name in filter(None, (each, reply)):
                self._answers.drop(name)
            if site := self._sent.pop(each, None):
                self._answers.rest(site)

    def note(self, what: str) -> None:
        """Record an incident of the coordinator itself."""
        self._admission.note(what, None)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the refusals since the last call, each with its time, reason, sender address, site and count."""
        return self._admission.incidents()

    def _metadata(self, site: str, ttl: float, group: str) -> Metadata:
        return Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._nodes[site],
            reply_to_message_id="",
            group_id=group,
            created_at=now().timestamp(),
            ttl=ttl,
            message_type="train",
        )

    def _envelope(self, id: str) -> Envelope | None:
        if id not in self._sent:
            return None
        site = self._sent[id]
        with self._state.lock:
            asked, reply = self._state.message_ins_store.get(id), self._state.message_ins_id_to_message_res_id.get(id)
        if reply is None:
            gone = asked is None or asked.metadata.created_at + asked.metadata.ttl <= now().timestamp()
            return Envelope(id, error="no answer came in time") if gone else None
        if site in self._answers.excessive:
            return Envelope(id, error=f"the answer is of more than {self._limit} bytes")
        contents = self._answers.contents(reply)
        if contents is None:
            return None
        try:
            message = inflate(reply, contents, self._limit, self._answers.landings.joined(site, reply))
            if message.has_error():
                return Envelope(id, error=message.error.reason or f"error {message.error.code}")
            header, body = unpack(message.content)
        except PayloadError as problem:
            return Envelope(id, error=str(problem))
        return Envelope(id, header, body)


def _run(state: InMemoryLinkState) -> int:
    """Create a run without an app. Its only task is this process, and Flower never expires it."""
    run = state.create_run(
        "polysite/study", "1", "0" * 64, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    (task,) = state.get_tasks(run_ids=[run])
    state.claim_task(task.task_id)
    state.activate_task(task.task_id)
    state.task_token_store[task.task_id].active_until = FOREVER
    return run


def _keys(sites: Mapping[str, bytes]) -> dict[str, EllipticCurvePublicKey]:
    found, seen = {}, set[bytes]()
    for site, key in sites.items():
        try:
            found[site] = bytes_to_public_key(key)
        except ValueError as problem:
            raise RunError(f"the key of {site!r} cannot be read: {problem}") from problem
        if key in seen:
            raise RunError(f"{site!r} has the same key as another site; each needs its own")
        seen.add(key)
    return found


def _context(certificate: Path, key: Path, ca: Path) -> ssl.SSLContext:
    """Return a TLS context that requires a client certificate of this CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (certificate, key, ca):
        if not path.is_file():
            raise RunError(f"the coordinator's port cannot be opened: there is no file {path}")
    try:
        context.load_cert_chain(certificate, key)
    except OSError as problem:
        raise RunError(f"{certificate} and {key} are not a certificate and its key: {problem}") from problem
    try:
        context.load_verify_locations(ca)
    except OSError as problem:
        raise RunError(f"{ca} cannot be read as the certificate of the consortium's CA: {problem}") from problem
    return context


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as problem:
        raise RunError(f"the coordinator cannot listen at {host}:{port}: {problem.strerror or problem}") from problem
