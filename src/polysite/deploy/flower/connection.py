"""A hospital's connection to the coordinator: signed requests over TLS, heartbeats, and what a refusal means.

Each HTTP request carries the site's client certificate, a signature of its key and an identifier of this start of the
courier. A request over a broken connection is repeated for some seconds. After ``Lost`` the caller connects again, and
resumes the former connection if the coordinator still knows it.
"""

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from polysite.buffers import Buffer
from polysite.deploy.flower.messages import INSTANCE
from polysite.deploy.flower.wire import Slot, Wire, tls_context
from polysite.deploy.proxy import Proxy
from polysite.errors import PayloadError, RunError, shown

import httpx  # isort: skip  # from here on: dependencies of Flower
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

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


class Unwanted(Exception):
    """The coordinator no longer wants the response."""


class Connection:
    """Signed requests of one site to the coordinator.

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
        self.address, self._heartbeat, self.patience, self.limit = address, heartbeat, patience, limit
        private = _private_key(key)
        self._public = public_key_to_bytes(private.public_key())
        signs = (_Instance(secrets.token_hex(16)), NodeAuthHttpInterceptor(private, private.public_key()))
        self._proxy = proxy
        self._context = context = tls_context(certificate, key, ca, proxy)
        self._wire = Wire(context, proxy)
        self.client = FleetHttpClient(f"https://{address}", interceptors=signs, verify=context)
        self.client._client.close()  # Flower's own handles every 16 kB of a response in Python
        self.client._client = httpx.Client(transport=self._wire, timeout=timeout, trust_env=False)
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="polysite-wire")
        self.closing = threading.Event()
        self._pulse: threading.Thread | None = None
        self.node: Node | None = None

    def connect(self) -> bool:
        """Try once to connect, or to resume a connection that is still known; ``Refused`` says why it fails.

        Return whether this is another start of the coordinator than before.
        """
        self._wire.hang_up()
        try:
            if self.node is not None and self._still_known():
                return False
            activation = ActivateNodeRequest(public_key=self._public, heartbeat_interval=self._heartbeat)
            node = Node(node_id=self.client.ActivateNode(activation).node_id)
            anew, self.node = node != self.node, node
        except httpx.HTTPStatusError as problem:
            raise self._refusal(problem.response) from problem
        except TROUBLE as problem:
            raise _unreachable(self.address, problem, self._proxy) from problem
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat_on, name="polysite-heartbeat", daemon=True)
            self._pulse.start()
        return anew

    def connected(self) -> Node:
        """Return Flower's number of this site; ``Lost`` if there is no connection."""
        if self.node is None or self.closing.is_set():
            raise Lost(f"this site is not connected to the coordinator at {self.address}")
        return self.node

    def renew(self, request: bytes) -> bytes | None:
        """Ask for a new certificate by a signing request; None if the coordinator has to make it by hand."""

        def ask(parts: list[Buffer]) -> bytes | None:
            try:
                return self.post(RENEW, parts)
            except httpx.HTTPStatusError as refused:
                if _detail(refused.response) == "by hand":
                    return None
                raise

        return self.call(ask, [request], self.patience)

    def use(self, certificate: Path, key: Path) -> None:
        """Show another certificate of this site's key from now on."""
        self._context.load_cert_chain(certificate, key)

    def close(self) -> None:
        """Disconnect."""
        if self.closing.is_set():
            return
        self.closing.set()
        if self._pulse is not None:
            self._pulse.join()
        self._workers.shutdown(cancel_futures=True)
        if self.node is not None:
            with suppress(*TROUBLE):  # the coordinator notices when the heartbeats stop
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()
        self._wire.close()

    def post(
        self,
        call: str,
        parts: Sequence[Buffer],
        slot: Slot | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Send a signed request in parts. A chunk in the response goes into ``slot``, if it has that size; return the
        rest."""
        kind = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        carried = {"parts": parts, "slot": slot, "timeout": self.client._client.timeout.as_dict()}
        url = f"https://{self.address}{call if call == RENEW else FLEET + call}"
        request = httpx.Request("POST", url, headers={**kind, **headers}, extensions=carried)
        try:
            response = self.client._send(ProtobufRequestContext(call, Node(), request))
        finally:
            request.extensions.clear()  # request and response refer to each other and would keep the memory
        response.raise_for_status()
        return response.content

    def all(self, do: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Apply ``do`` to all names, two at a time; stop after the first failure."""
        jobs = [self._workers.submit(do, name) for name in names]
        try:
            return [job.result() for job in jobs]
        except Unwanted:  # perhaps because another part was refused, which says more
            for job in jobs:
                if not job.cancel() and isinstance(refused := job.exception(), PayloadError):
                    raise refused from None
            raise
        finally:
            wait([job for job in jobs if not job.cancel()])  # a later attempt must not meet those of this one

    def call(
        self, method: Callable[[Any], T], request: Any, patience: float, moved: Callable[[], int] = lambda: 0
    ) -> T:
        """Call a method until it succeeds; ``Lost`` at once if the site is not known, or if it has failed for
        ``patience`` seconds in which nothing moved, by the number of bytes that ``moved`` returns."""
        failed, pause, problem, before = 0.0, 0.0, None, moved()
        while not self.closing.wait(pause):
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
        raise Lost(f"the coordinator at {self.address} cannot be reached any more: {problem or 'closing'}")

    def _passing(self, refused: httpx.HTTPStatusError) -> str:
        """Return what is wrong, if trying again may help; raise what it means otherwise."""
        code = refused.response.status_code
        if code == 410:
            raise Unwanted from refused
        if code == 413:
            raise PayloadError(f"the coordinator at {self.address} takes no message of this size") from refused
        # 408: too slow; 416: not as many bytes have arrived as was thought; signed in the same instant: sign anew
        if code < 500 and code not in (408, 416) and _detail(refused.response) != "replayed":
            raise Lost(str(self._refusal(refused.response))) from refused
        return f"it answers {code}"

    def _refusal(self, response: httpx.Response) -> Refused:
        why, at = _detail(response), f"the coordinator at {self.address}"
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

    def _beat(self) -> bool:
        beat = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=self._heartbeat)
        return self.client.SendNodeHeartbeat(beat).success

    def _still_known(self) -> bool:
        try:
            return self._beat()
        except httpx.HTTPStatusError:
            return False

    def _beat_on(self) -> None:
        while not self.closing.wait(self._heartbeat / 2):
            with suppress(*TROUBLE):  # receive and answer report the problem
                self._beat()


class _Instance:
    """Adds the identifier of this start of the courier to every request."""

    def __init__(self, instance: str):
        self._instance = instance

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the header and continue."""
        context.request.headers[INSTANCE] = self._instance
        return call_next(context)


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
