"""The coordinator's port: accepts connections, performs TLS handshakes, and reads HTTP requests within limits.

Every connection has a thread of its own. Bytes of a body are decrypted into the memory where they will stay.
"""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from polysite.buffers import Buffer
from polysite.deploy.flower.admission import Admission, Refusal
from polysite.deploy.flower.messages import pieces

MAX_HEADERS = 64 << 10  # bytes of the headers of a request
MAX_CONNECTIONS = 8  # of a site, which needs two
MAX_GREETINGS = 64  # handshakes in progress
BLOCK = 16 << 10  # bytes that are read at a time, until the headers of a request have come
KEEP = 75.0  # seconds for which a connection without a request stays open
CONFIRM = 3.0  # seconds between two confirmations that the bytes of a request arrive
LINE = re.compile(rb"([A-Z]{1,10}) (/\S*) HTTP/1\.[01]")
ENDS = b"\r\n\r\n"


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

    def keep(self, began: float, size: int) -> None:
        """Raise TimeoutError if too few bytes have moved since a moment."""
        seconds = time.monotonic() - began
        if seconds > self.window and size < seconds * self.rate:
            raise TimeoutError


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a request."""

    status: int
    body: Buffer = b""


class Request:
    """A connection, and the request that is being answered on it."""

    def __init__(self, connection: socket.socket, caller: Any, pace: Pace):
        self.connection, self.caller, self.pace = connection, caller, pace
        self.method, self.path, self.headers = "", "", dict[str, str]()
        self.site = ""  # by the certificate
        self.moved: Callable[[], None] = lambda: None  # to be called when bytes have moved
        self._early = b""  # what came after the headers

    def drop(self) -> None:
        """Break the connection: its thread stops at once."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # that of TLS would forget its key meanwhile

    def read_headers(self, first: bool) -> bool:
        """Read up to the body of the next request; return False if none comes."""
        head, self._early, self.moved = self._early, b"", lambda: None
        end = time.monotonic() + (self.pace.silence if first or head else KEEP)
        while ENDS not in head:
            if head and not re.match(rb"[A-Z]{1,10}( |$)", head):
                raise Refusal(400, "odd", "not HTTP", self.site)
            if len(head) > MAX_HEADERS:
                raise Refusal(431, "large", "headers that do not end", self.site)
            try:
                self.connection.settimeout(max(0.001, end - time.monotonic()))
                block = self.connection.recv(BLOCK)
            except TimeoutError as problem:
                if head or first:
                    raise Refusal(408, "slow", "headers that do not come", self.site) from problem
                return False
            if not block:
                return False
            if not head:
                end = min(end, time.monotonic() + self.pace.silence)
            head += block
        head, _, self._early = head.partition(ENDS)
        line, *fields = head.split(b"\r\n")
        if (found := LINE.fullmatch(line)) is None:
            raise Refusal(400, "odd", "not HTTP", self.site)
        self.method, self.path = found[1].decode(), found[2].decode("latin-1")
        pairs = (each.decode("latin-1").partition(":") for each in reversed(fields))
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}  # the first of several counts
        return True

    def read(self, memory: memoryview, arrived: Callable[[int], None] = lambda count: None) -> None:
        """Receive a body in memory of its size, and confirm to the client every few seconds that bytes arrive."""
        count, at = min(len(self._early), len(memory)), 0
        memory[:count], self._early = self._early[:count], self._early[count:]
        began = confirmed = time.monotonic()
        self.connection.settimeout(self.pace.silence)
        while True:
            at += count
            arrived(count)
            if at == len(memory):
                return
            try:
                count = self.connection.recv_into(memory[at:])
                self.pace.keep(began, at)
            except TimeoutError as problem:
                raise Refusal(408, "slow", "a request that trickled in", self.site) from problem
            if not count:
                raise Refusal(400, "cut")
            if time.monotonic() > confirmed + CONFIRM:
                confirmed = time.monotonic()
                self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")  # its timeout counts from there
                self.moved()

    def respond(self, reply: Reply) -> None:
        """Send a response; TimeoutError if it is not fetched."""
        began, size = time.monotonic(), 0
        self.connection.settimeout(self.pace.silence)
        head = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", f"date: {formatdate(usegmt=True)}"]
        head += [f"content-length: {len(reply.body)}", *(["connection: close"] if reply.status >= 400 else [])]
        self.connection.sendall("\r\n".join(head).encode() + ENDS)
        for piece in pieces(reply.body):
            self.connection.sendall(piece)
            size += len(piece)
            self.pace.keep(began, size)
            self.moved()

    def end(self) -> None:
        """Close the connection, and give the client time to read what it was told."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            end = time.monotonic() + 1.0
            while (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not socket.socket.recv(self.connection, BLOCK):
                    break
        self.connection.close()


class Port:
    """Listens, and has every request answered in the thread of its connection.

    Args:
        listener: The socket that listens.
        context: TLS, which requires a certificate of the federation's CA.
        sites: Names of the sites.
        admission: Takes note of what is refused.
        pace: How slow a client may be.
        answer: Answers a request.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        sites: list[str],
        admission: Admission,
        pace: Pace,
        answer: Callable[[Request], Reply],
    ):
        self._listener, self._context, self._admission, self._pace = listener, context, admission, pace
        self._answer, self._closing, self._lock = answer, threading.Event(), threading.Lock()
        self._greetings: dict[Request, None] = {}  # handshakes in progress; the oldest gives way
        # connections by the site of their certificate, oldest first; those of no known site under ""
        self._callers: dict[str, dict[Request, None]] = {site: {} for site in ("", *sites)}
        listener.settimeout(0.1)
        self._door = threading.Thread(target=self._answer_the_door, name="polysite-link", daemon=True)
        self._door.start()

    def close(self) -> None:
        """Stop accepting and close all connections."""
        self._closing.set()
        self._door.join()
        self._listener.close()
        with self._lock:
            for request in [*self._greetings, *(each for callers in self._callers.values() for each in callers)]:
                request.drop()

    def _answer_the_door(self) -> None:
        while not self._closing.is_set():
            try:
                connection, caller = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as problem:  # no file descriptor left, or hung up already
                self._admission.note(f"no connection can be accepted: {problem.strerror}", None)
                time.sleep(0.1)
                continue
            request = Request(connection, caller, self._pace)
            self._enter(self._greetings, request, MAX_GREETINGS, "too many callers at once")
            try:
                threading.Thread(target=self._serve, args=(request,), name="polysite-site", daemon=True).start()
            except RuntimeError as problem:  # no thread left
                self._admission.note(f"no connection can be accepted: {problem}", caller)
                self._leave(self._greetings, request)
                connection.close()

    def _enter(self, those: dict[Request, None], request: Request, most: int, why: str) -> None:
        """Count a connection; if there are too many of its kind, the oldest gives way: it may be a broken one."""
        with self._lock:
            those[request] = None
            oldest = next(iter(those)) if len(those) > most else None
            if oldest is not None:
                del those[oldest]
        if oldest is not None:
            self._admission.note(why, oldest.caller, oldest.site)
            oldest.drop()

    def _leave(self, those: dict[Request, None], request: Request) -> bool:
        with self._lock:
            return those.pop(request, self) is None

    def _serve(self, request: Request) -> None:
        """Perform the handshake and answer requests until the connection ends."""
        try:
            self._greet(request)
        except (OSError, ValueError) as problem:
            if self._leave(self._greetings, request):
                why = getattr(problem, "reason", None) or str(problem) or "cut"
                self._admission.note(f"no handshake: {why}", request.caller)
            request.connection.close()
            return
        self._leave(self._greetings, request)
        mine = self._callers[request.site]
        self._enter(mine, request, MAX_CONNECTIONS, "too many connections")
        try:
            first = True
            while not self._closing.is_set() and self._respond(request, first):
                first = False
        except OSError:  # it was broken
            pass
        finally:
            self._leave(mine, request)
            request.end()

    def _greet(self, request: Request) -> None:
        request.connection.settimeout(self._pace.silence)
        request.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = self._context.wrap_socket(request.connection, server_side=True, do_handshake_on_connect=False)
        request.connection = secure
        secure.do_handshake()
        shown: Any = secure.getpeercert() or {}
        names = (value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName")
        if (name := next(names, "")) in self._callers:
            request.site = name
            end = datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC)
            self._admission.note_expiry(name, end)

    def _respond(self, request: Request, first: bool) -> bool:
        """Answer the next request; return whether another may follow."""
        try:
            if not request.read_headers(first):
                return False
            reply = self._answer(request)
        except Refusal as refusal:
            self._admission.note(refusal.what, request.caller, refusal.site)
            reply = Reply(refusal.status, b'{"detail":"%s"}' % refusal.word.encode())
        try:
            request.respond(reply)
        except TimeoutError:
            self._admission.note("a response that was not fetched", request.caller, request.site)
            return False
        return reply.status < 400
