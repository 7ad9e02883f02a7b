"""HTTP over TLS by the standard library, for the hospital's end of the wire; through a proxy, if there is one.

Timeouts count from the last byte that moved. A request is sent in small pieces, each within the timeout; while its body
is on its way, the coordinator confirms every few seconds that bytes arrive (status 100), which Python's HTTP client
skips. So a slow link needs patience, and only a silent one is given up.
"""

import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path

from polysite.buffers import Buffer
from polysite.deploy.flower.messages import REST
from polysite.deploy.flower.objects import PIECE, before_chunk
from polysite.deploy.proxy import Proxy
from polysite.errors import RunError

import httpx  # isort: skip  # a dependency of Flower

MAX_RESPONSE = 64 << 20  # bytes; an object is a chunk of at most 16 MiB


@dataclass(slots=True)
class Slot:
    """Memory for a chunk that is received in its place; after a cut, the rest is asked for."""

    memory: memoryview
    filled: int = 0

    def __len__(self) -> int:
        return len(self.memory)


class Wire(httpx.BaseTransport):
    """A transport with one connection per thread.

    A request may come in ``parts``, which are sent as they lie in memory, and have a ``slot`` for a chunk at the end of
    the response.
    """

    def __init__(self, context: ssl.SSLContext, proxy: Proxy | None = None):
        self._context, self._proxy = context, proxy
        self._mine, self._all = threading.local(), list[HTTPSConnection]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over this thread's connection."""
        connection = self._connection(request.url)
        try:
            if connection.sock is None:
                connection.timeout = request.extensions["timeout"]["connect"]
                connection.connect()
            connection.sock.settimeout(request.extensions["timeout"]["read"])
            path, headers = request.url.raw_path.decode(), dict(request.headers.items())
            parts = request.extensions.get("parts") or [request.read()]
            headers["content-length"] = str(sum(map(len, parts)))
            connection.request(request.method, path, pieces(parts), headers)
            line, answer = connection.sock, connection.getresponse()
            content = read_response(answer, line, request.extensions.get("slot"))
            return httpx.Response(answer.status, headers=_few(answer), content=content)
        except BaseException:
            connection.close()
            raise

    def hang_up(self) -> None:
        """Close this thread's connection, which may be broken; the next request opens another."""
        if hasattr(self._mine, "connection"):
            self._mine.connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._all:
            connection.close()

    def _connection(self, url: httpx.URL) -> HTTPSConnection:
        if not hasattr(self._mine, "connection"):
            proxy = self._proxy
            if proxy is None:
                made = HTTPSConnection(url.host, url.port, context=self._context)
            else:
                made = HTTPSConnection(proxy.host, proxy.port, context=self._context)
                made.set_tunnel(url.host, url.port, proxy.headers)
            self._mine.connection = made
            self._all.append(made)
        return self._mine.connection  # type: ignore[no-any-return]


def _few(answer: HTTPResponse) -> dict[str, str]:
    """Return only the headers that the client needs; without ``content-encoding`` no body is decompressed."""
    return {name: value for name in ("date", "content-type") if (value := answer.getheader(name))}


def pieces(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the parts of a request in small pieces."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def read_response(answer: HTTPResponse, line: socket.socket, slot: Slot | None) -> bytes:
    """Return a response; of one with a chunk that fits the slot, only what comes before, and the chunk in the slot.

    Of a chunk of which a part has come already, the response is the rest, under a header that says so.
    """
    if answer.length is None or answer.length > MAX_RESPONSE:
        raise HTTPException(f"a response of {answer.length} bytes")
    if slot is None or answer.status != 200:
        return answer.read()
    if slot.filled and answer.getheader(REST) == str(slot.filled) and answer.length == len(slot) - slot.filled:
        _fill(answer, line, slot)
        return before_chunk(len(slot))
    size = len(before_chunk(len(slot)))
    slot.filled = 0
    if answer.length != size + len(slot):
        whole = answer.read()
        if whole == before_chunk(len(slot)):
            raise HTTPException("a response that announces a chunk and lacks it")
        return whole
    before = answer.read(size)
    if len(before) < size:
        raise HTTPException("a response that was cut")
    _fill(answer, line, slot)
    return before


def _fill(answer: HTTPResponse, line: socket.socket, slot: Slot) -> None:
    """Receive the rest of a chunk in its place."""
    rest = slot.memory[slot.filled :]
    count = answer.fp.readinto1(rest[:DEFAULT_BUFFER_SIZE])  # what came with the headers; the rest needs no buffer
    while count:
        slot.filled, rest = slot.filled + count, rest[count:]
        if not rest:
            break
        count = line.recv_into(rest)
    if not count:
        raise HTTPException(f"a response that lacks {len(rest)} bytes")
    answer.close()  # of the connection nothing but this response


def tls_context(certificate: Path, key: Path, ca: Path, proxy: Proxy | None = None) -> ssl.SSLContext:
    """Return a TLS context that trusts only this federation's CA, and that of a proxy that opens TLS; it checks the
    host name and shows this site's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca)
    except OSError as problem:
        raise RunError(f"{ca} cannot be read as the certificate of the consortium's CA: {problem}") from problem
    if proxy is not None and proxy.ca is not None:
        try:
            context.load_verify_locations(proxy.ca)
        except OSError as problem:
            raise RunError(f"{proxy.ca} cannot be read as the certificate of the proxy's CA: {problem}") from problem
    try:
        context.load_cert_chain(certificate, key)
    except OSError as problem:
        raise RunError(f"{certificate} and {key} are not a certificate and its key: {problem}") from problem
    return context
