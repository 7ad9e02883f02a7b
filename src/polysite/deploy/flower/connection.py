"""A hospital's connection to the coordinator: signed requests over TLS, heartbeats, and what a refusal means.

Each HTTP request carries the site's client certificate, a signature of its key and an identifier of this start of the
courier. A request over a broken connection is repeated for some seconds. After ``Lost`` the caller connects again, and
resumes the former connection if the coordinator still knows it.

Timeouts count from the last byte that moved. A request is sent in small pieces, each within the timeout; while its body
is on its way, the coordinator confirms every few seconds that bytes arrive (status 100), which Python's HTTP client
skips. So a slow link needs patience, and only a silent one is given up.
"""

import json
import secrets
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import formatdate
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from polysite.buffers import Buffer
from polysite.deploy.certificates import SIGNATURE_OF_REQUEST, public_pem, read_key
from polysite.deploy.flower.messages import INSTANCE, KEY, MAX_LETTER, PREFIX, SIGNATURE, TIME, pieces
from polysite.deploy.flower.tls import tls_context
from polysite.deploy.proxy import Proxy
from polysite.errors import PayloadError, RunError, shown

HEARTBEAT = 5.0  # seconds between two
# by the coordinator's word: a sentence, and whether trying again soon is of no use
REFUSALS = {
    "unregistered": ("{at} does not know this site's key; ask its people to enrol this hospital", True),
    "revoked": ("{at} has revoked this site's key; ask its people why, and enrol again", True),
    "anew": ("{at} was started anew", False),
    "elsewhere": (
        "this site's key is in use elsewhere, or its former connection to {at} has not lapsed yet; that takes half a "
        "minute",
        False,
    ),
    "clock": ("the clock of {at} shows {there}, this machine's {here}: set them right", False),
}
CUT = (OSError, HTTPException, ValueError)  # a connection that breaks, or brings something else than a response
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


class Declined(Exception):
    """The coordinator does not do what was asked; status, word and time of its response."""

    def __init__(self, response: HTTPResponse, said: bytes):
        super().__init__(response.status)
        self.status, self.date = response.status, response.getheader("date") or "another time"
        try:
            self.word = str(json.loads(said)["detail"])[:100]
        except (ValueError, KeyError, TypeError):
            self.word = ""


class Connection:
    """Signed requests of one site to the coordinator.

    Args:
        address: host:port of the coordinator.
        key: The site's private key.
        certificate: The site's certificate.
        ca: Certificate of the federation's authority.
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
        patience: float = 10,
        timeout: float = 10,
        limit: int = 8 << 30,
        proxy: Proxy | None = None,
    ):
        self.address, self.patience, self.limit, self._timeout = address, patience, limit, timeout
        self._key = read_key(key)
        self._who = {
            KEY: b64encode(public_pem(self._key.public_key())).decode(),
            INSTANCE: secrets.token_hex(16),
        }
        self._proxy = proxy
        self._context = tls_context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)
        self._mine, self._all = threading.local(), list[HTTPSConnection]()  # one line for each thread
        self.closing = threading.Event()
        self._pulse: threading.Thread | None = None
        self._known = False

    def connect(self) -> None:
        """Try once to connect, or to resume a connection that is still known; ``Refused`` says why it fails."""
        self._line().close()  # it may be broken
        try:
            if self._known and self._beat():
                return
            self.ask("POST", "connect")
        except Declined as problem:
            raise self._refusal(problem) from problem
        except CUT as problem:
            raise _unreachable(self.address, problem, self._proxy) from problem
        self._known = True
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat_on, name="polysite-heartbeat", daemon=True)
            self._pulse.start()

    def check(self) -> None:
        """Raise ``Lost`` if there is no connection."""
        if not self._known or self.closing.is_set():
            raise Lost(f"this site is not connected to the coordinator at {self.address}")

    def close(self) -> None:
        """Disconnect."""
        if self.closing.is_set():
            return
        self.closing.set()
        if self._pulse is not None:
            self._pulse.join()
        if self._known:
            with suppress(Declined, *CUT):  # the coordinator notices when the heartbeats stop
                self.ask("POST", "disconnect")
        for line in self._all:
            line.close()

    def ask(
        self, method: str, call: str, body: Buffer = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """Send a signed request; return the response. ``Declined`` if it is a refusal."""
        with self.asked(method, call, body, headers) as (response, _):
            if response.length is None or response.length > MAX_LETTER:
                raise HTTPException(f"a response of {response.length} bytes")
            return response.read()

    @contextmanager
    def asked(
        self, method: str, call: str, body: Buffer = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[tuple[HTTPResponse, socket.socket]]:
        """Send a signed request; give the response and the socket that it comes from, to be read where it belongs."""
        line, signed = self._line(), datetime.now(UTC).isoformat()
        signature = b64encode(self._key.sign(signed.encode(), SIGNATURE_OF_REQUEST)).decode()
        more = {TIME: signed, SIGNATURE: signature, "content-length": str(len(body))}
        try:
            line.request(method, PREFIX + call, pieces(body), {**self._who, **headers, **more})
            source, response = line.sock, line.getresponse()  # which may drop the socket, if it is the last response
            if response.status >= 300:
                raise Declined(response, response.read(1000))
            yield response, source
        except BaseException:
            line.close()
            raise

    def _line(self) -> HTTPSConnection:
        """Return the connection of this thread."""
        if not hasattr(self._mine, "line"):
            host, _, port = self.address.rpartition(":")
            at = (self._proxy.host, self._proxy.port) if self._proxy else (host.strip("[]"), int(port))
            line = HTTPSConnection(*at, context=self._context, timeout=self._timeout)
            if self._proxy:
                line.set_tunnel(host.strip("[]"), int(port), self._proxy.headers)
            self._mine.line = line
            self._all.append(line)
        return self._mine.line  # type: ignore[no-any-return]

    def call(self, do: Callable[[], T], patience: float, moved: Callable[[], int] = lambda: 0) -> T:
        """Call a function until it succeeds; ``Lost`` at once if the site is not known, or if it has failed for
        ``patience`` seconds in which nothing moved, by the number of bytes that ``moved`` returns."""
        self.check()
        failed, pause, problem, before = 0.0, 0.0, "closing", moved()
        while not self.closing.wait(pause):
            try:
                return do()
            except Declined as declined:
                problem = self._passing(declined)
            except CUT as cut:
                problem = str(cut) or type(cut).__name__
            clock = time.monotonic()
            if not failed or moved() != before:
                failed, before, pause = clock, moved(), 0.0
            if clock > failed + patience:
                break
            pause = min(1.0, 2 * pause or 0.1)
        raise Lost(f"the coordinator at {self.address} cannot be reached any more: {problem}")

    def _passing(self, declined: Declined) -> str:
        """Return what is wrong, if trying again may help; raise what it means otherwise."""
        if declined.status == 410:
            raise Unwanted from declined
        if declined.status == 413:
            raise PayloadError(f"the coordinator at {self.address} takes no message of this size") from declined
        # 408: too slow; 416: not as many bytes have arrived as was thought; signed in the same instant: sign anew
        if declined.status < 500 and declined.status not in (408, 416) and declined.word != "replayed":
            raise Lost(str(self._refusal(declined))) from declined
        return f"it answers {declined.status}"

    def _refusal(self, declined: Declined) -> Refused:
        sentence, slowly = REFUSALS.get(declined.word, ("{at} refuses this site: {status} {word}", False))
        known = {"status": declined.status, "word": declined.word, "there": declined.date}
        here = formatdate(usegmt=True)
        return Refused(sentence.format(at=f"the coordinator at {self.address}", here=here, **known), slowly)

    def _beat(self) -> bool:
        """Send a heartbeat; return whether the coordinator knows this site."""
        try:
            self.ask("POST", "beat")
        except Declined:
            return False
        return True

    def _beat_on(self) -> None:
        while not self.closing.wait(HEARTBEAT):
            with suppress(*CUT):  # receive and answer report the problem
                self._beat()


def _unreachable(address: str, problem: Exception, proxy: Proxy | None) -> Refused:
    at = f"the coordinator at {address}" + (f" (through the proxy {proxy.host}:{proxy.port})" if proxy else "")
    if isinstance(problem, ssl.SSLCertVerificationError):
        hint = "; a proxy that opens TLS has to let this address pass unopened" if proxy else ""
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
