"""The port of the gateway: accepts connections, performs TLS handshakes, and reads HTTP requests within limits.

Uvicorn parses the headers of a request. Its body is received in the memory where it will stay: decrypted bytes of a
body are written there and nowhere else.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn  # isort: skip  # from here on: dependencies of Flower
import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from polysite.deploy.flower.gateway import Guard

MAX_HEADERS = 64 << 10  # bytes of the headers of a request
MAX_CONNECTIONS = 8  # of a site, which needs four
BLOCK = 16 << 10  # bytes that are parsed at a time, until the headers of a request have come
WRITTEN = 64 << 10  # bytes that are written ahead of a connection, so that its progress is seen
BODY = "polysite.body"  # extension of a scope: receives the body of its request in memory that is given


class Body:
    """The body of a request, while it is received in memory of its size, which may be in several parts."""

    def __init__(
        self,
        parts: Iterable[memoryview],
        early: bytearray,
        loop: asyncio.AbstractEventLoop,
        confirm: Callable[[], None],
    ):
        self._parts, self._loop = [part for part in parts if part], loop  # what is left of them
        self.confirm = confirm  # tells the client that bytes arrive
        self._abandoned: memoryview | None = None  # memory for the rest of a body that was given up
        self.size, self.heard = 0, loop.time()  # bytes that have come, and when the last ones did
        self.over = loop.create_future()  # when all have come, or no more will
        while self.size < len(early):
            count = min(len(early) - self.size, len(self.slot))
            self.slot[:count] = early[self.size : self.size + count]
            self.grow(count)

    @property
    def slot(self) -> memoryview:
        """Where the next bytes belong."""
        return self._parts[0] if self._abandoned is None else self._abandoned

    def grow(self, count: int) -> bool:
        """Count bytes that were received in the slot; return whether the body is complete."""
        if self._abandoned is not None:
            return False
        self.size, self.heard = self.size + count, self._loop.time()
        rest = self._parts[0][count:]
        self._parts[:1] = [rest] if rest else []
        return not self._parts

    def abandon(self) -> None:
        """Write no more bytes to the memory that was given."""
        self._parts, self._abandoned = [], memoryview(bytearray(BLOCK))
        self.end()

    def end(self) -> None:
        """Expect no more bytes."""
        if not self.over.done():
            self.over.set_result(None)


class Server(uvicorn.Server):
    """Uvicorn with its own accept loop, which sees failed handshakes."""

    def __init__(self, guard: "Guard", context: ssl.SSLContext):
        config = uvicorn.Config(
            guard,
            interface="asgi3",
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
        )
        super().__init__(config)
        self.guard, self.context = guard, context
        self.greetings: dict[asyncio.Task[None], None] = {}  # handshakes in progress; the oldest gives way

    def announce(self, sites: Iterable[str]) -> None:
        """Have requests for messages answered that wait on behalf of these sites."""
        self.loop.call_soon_threadsafe(self.guard.announce, list(sites))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        self.loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        self.servers = []
        self.listener = (sockets or [])[0]
        self.listener.setblocking(False)
        self.door = asyncio.create_task(self._answer_the_door())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and close all connections."""
        for task in (self.door, *self.greetings):
            task.cancel()
        self.listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.wait((self.door, *self.greetings), timeout=1)
        await self.lifespan.shutdown()

    async def _answer_the_door(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                caller, address = await loop.sock_accept(self.listener)
            except OSError as problem:  # no file descriptor left, or hung up already
                self.guard.admission.note(f"no connection can be accepted: {problem.strerror}", None)
                await asyncio.sleep(0.1)
                continue
            if len(self.greetings) >= 64:
                oldest = next(iter(self.greetings))
                del self.greetings[oldest]
                oldest.cancel()
                self.guard.admission.note("too many callers at once", address)
            task = loop.create_task(self._greet(caller, address))
            self.greetings[task] = None
            task.add_done_callback(partial(self._dismiss, caller))
            await asyncio.sleep(0)  # other tasks get their turn, however many clients wait

    def _dismiss(self, caller: socket.socket, greeting: asyncio.Task[None]) -> None:
        """Forget a handshake that is over; one that was cancelled may not even have begun."""
        self.greetings.pop(greeting, None)
        if greeting.cancelled():
            caller.close()

    async def _greet(self, caller: socket.socket, address: Any) -> None:
        """Perform the TLS handshake, which requires a certificate of the federation's CA."""
        connection = Connection(self.config, self.server_state, self.lifespan.state)
        silence = self.guard.pace.silence
        try:
            await connection.loop.connect_accepted_socket(
                lambda: _Receiver(connection),
                caller,
                ssl=self.context,
                ssl_handshake_timeout=silence,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as problem:
            self.guard.admission.note(
                f"no handshake: {getattr(problem, 'reason', None) or str(problem) or 'cut'}", address
            )
        finally:
            if connection not in self.server_state.connections:
                caller.close()


class Connection(HttpToolsProtocol):
    """A connection after its handshake: uvicorn's, with limits for the time and size of headers."""

    app: "Guard"

    def __init__(self, *args: Any, **others: Any):
        super().__init__(*args, **others)
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._mine: dict[Connection, None] = {}  # all connections of this site
        self._site = ""
        self.body: Body | None = None  # that bytes are received for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and start the timer for its headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITTEN)
        self._wait()
        name = _name(transport)
        self._site = name if name in self.app.callers else ""
        if self._site and (end := _expiry(transport)) is not None:
            self.app.admission.note_expiry(self._site, end)
        self._mine = self.app.callers[self._site]
        self._mine[self] = None
        if len(self._mine) > MAX_CONNECTIONS:  # the oldest gives way: it may be a broken connection
            next(iter(self._mine))._drop("too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._done()
        self._mine.pop(self, None)
        super().connection_lost(exc)
        if self.body is not None:
            self.body.end()

    def data_received(self, data: bytes) -> None:
        """Parse data; drop a connection whose headers are too large."""
        if self.transport.is_closing():
            return
        self._size += len(data)
        super().data_received(data)
        if self._timer is not None and self._size > MAX_HEADERS:
            self._drop("headers that do not end")

    def on_message_begin(self) -> None:
        """Start the timer for the headers of a request."""
        super().on_message_begin()
        self._size = 0
        self._wait()

    def on_headers_complete(self) -> None:
        """Stop the timer, and read on when the request was authenticated and there is memory for its body."""
        self._done()
        super().on_headers_complete()
        cycle = self.cycle
        receive: Callable[..., Body] = lambda *parts: self._receive(cycle, parts)  # noqa: E731
        cycle.scope["extensions"] = {BODY: receive}  # type: ignore[dict-item]
        self.flow.pause_reading()

    def _receive(self, cycle: RequestResponseCycle, parts: Iterable[memoryview]) -> Body:
        """Receive the body of a request, whose size is known, in memory of that size."""
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        body = Body(parts, cycle.body, self.loop, self._confirm)
        cycle.body = bytearray()
        if cycle.more_body and not cycle.disconnected:
            self.body = body
        else:
            body.end()
        self.flow.resume_reading()
        return body

    def _confirm(self) -> None:
        """Tell the client that bytes arrive: its time-out counts from there."""
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def body_received(self, body: Body, count: int) -> None:
        """Count bytes of a body; after the last one the next request is parsed."""
        if self.transport.is_closing() or not body.grow(count):
            return
        self.body = None
        self.parser = httptools.HttpRequestParser(self)  # the former one did not see the body
        with suppress(AttributeError):  # as uvicorn does; not in all versions
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.on_message_complete()
        body.end()

    def send_400_response(self, msg: str) -> None:
        """Record and answer what is not HTTP."""
        self.app.admission.note("not HTTP", self.client, self._site)
        super().send_400_response(msg)

    def _wait(self) -> None:
        self._done()
        self._timer = self.loop.call_later(self.app.pace.silence, self._drop, "headers that do not come")

    def _done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, why: str) -> None:
        self._done()
        self._mine.pop(self, None)
        self.app.admission.note(why, self.client, self._site)
        self.transport.abort()


class _Receiver(asyncio.BufferedProtocol):
    """What the event loop sees of a connection: it writes decrypted bytes where they belong."""

    def __init__(self, connection: Connection):
        self._connection, self._block = connection, memoryview(bytearray(BLOCK))
        self.connection_made = connection.connection_made  # type: ignore[method-assign,assignment]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for the next bytes."""
        body = self._connection.body
        return self._block if body is None else body.slot

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that were received."""
        body = self._connection.body
        if body is None:
            self._connection.data_received(bytes(self._block[:nbytes]))
        else:
            self._connection.body_received(body, nbytes)

    def eof_received(self) -> None:
        """Close the connection."""


def _expiry(transport: asyncio.Transport) -> datetime | None:
    """Return when the client certificate expires."""
    shown = transport.get_extra_info("peercert") or {}
    end = shown.get("notAfter")
    return None if end is None else datetime.fromtimestamp(ssl.cert_time_to_seconds(end), UTC)


def _name(transport: asyncio.Transport) -> str:
    """Return the common name of the client certificate: the name of the hospital."""
    shown = transport.get_extra_info("peercert") or {}
    names = (value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName")
    return next(names, "")
