"""The hospital's end of the wire: receives requests of the coordinator and uploads responses.

A site only makes outgoing connections: it polls for messages, fetches their bodies, and answers. The caller decides
how often to poll and what to do after ``Lost``: usually ``connect`` again. A download or an upload that was cut then
goes on where it was, and an earlier request can still be answered. The signed requests are in ``connection.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from io import DEFAULT_BUFFER_SIZE
from typing import Self

from polysite.buffers import Buffer, room
from polysite.deploy.flower.connection import Connection, Unwanted
from polysite.deploy.flower.messages import LAST, START, WAIT, Header, Letter, digest
from polysite.errors import PayloadError


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it arrived; ``id`` is for ``Fleet.answer`` only."""

    header: Mapping[str, Header]
    body: Buffer
    id: str


@dataclass(slots=True)
class _Body:
    """A body that has come, perhaps in part."""

    digest: str
    memory: memoryview
    filled: int = 0
    resumed: bool = False  # it came in parts: that they belong together is not what TLS promises


class Fleet(Connection):
    """One site's connection to the coordinator, with the requests that come and the responses that go over it."""

    _last = ""  # the request that was received last
    _body = _Body("", memoryview(b""))  # what is being fetched
    _outgoing: tuple[Incoming, Letter] | None = None  # a response that may have to be uploaded further

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self, seconds: int = 0) -> Incoming | None:
        """Return the next request, if one is there or comes within so many seconds.

        ``Lost`` after ``patience`` seconds without a connection. After ``connect``, the next call goes on where this
        one ended.
        """
        headers = {WAIT: str(seconds), LAST: self._last}
        text = self.call(lambda: self.ask("POST", "next", headers=headers), self.patience)
        if not text:
            return None
        letter = Letter.load(text)
        try:
            body = self._fetch(letter)
        except Unwanted:
            return None
        except PayloadError:  # received nevertheless: it would come again
            self._last = letter.id
            raise
        self._last = letter.id
        return Incoming(letter.header, body, letter.id)

    def _fetch(self, letter: Letter) -> Buffer:
        """Return the body of a request. What came before a connection was lost is not fetched again."""
        if not letter.size:
            return b""
        if letter.size > self.limit:
            raise PayloadError(f"a message may hold {self.limit} bytes, not {letter.size}")
        if (self._body.digest, len(self._body.memory)) != (letter.digest, letter.size):
            self._body = _Body("", memoryview(b""))  # its memory is given back before more is taken
            self._body = _Body(letter.digest, room(letter.size))
        came = self._body
        self.call(lambda: self._fill(came, letter.id), self.patience, lambda: came.filled)
        self._body = _Body("", memoryview(b""))
        if came.resumed and digest(came.memory) != letter.digest:
            raise PayloadError("what arrived is not a message: its body is not the one of its digest")
        return came.memory

    def _fill(self, came: _Body, id: str) -> None:
        """Receive the rest of a body in its place."""
        came.resumed = came.filled > 0
        with self.asked("GET", f"body/{id}", headers={START: str(came.filled)}) as (response, source):
            if response.length != len(came.memory) - came.filled:
                raise HTTPException(f"a response of {response.length} bytes")
            count = response.fp.readinto1(
                came.memory[came.filled :][:DEFAULT_BUFFER_SIZE]
            )  # what came with the headers
            while count and came.filled + count < len(came.memory):
                came.filled += count
                count = source.recv_into(came.memory[came.filled :])  # straight to where it belongs
            came.filled += count
            if not count:
                raise HTTPException(f"a response that lacks {len(came.memory) - came.filled} bytes")
            response.close()  # of the connection nothing but this response

    def answer(
        self, incoming: Incoming, header: Mapping[str, Header], body: Buffer = b"", *, patience: float = 120.0
    ) -> bool:
        """Upload a response; return False if it is no longer wanted.

        ``Lost`` after ``patience`` seconds in which nothing arrived. After ``connect``, a second call for the same
        request goes on where the first one ended; its header and body are those of the first.
        """
        if self._outgoing is None or self._outgoing[0] is not incoming:
            self._outgoing = incoming, Letter(incoming.id, header, digest(body), len(body))
        letter, arrived = self._outgoing[1], 0

        def push() -> None:
            nonlocal arrived
            arrived = int(self.ask("POST", f"answer/{incoming.id}", letter.dump()))
            if arrived < letter.size:
                self.ask("PUT", f"upload/{incoming.id}", memoryview(body)[arrived:], {START: str(arrived)})

        try:
            self.call(push, patience, lambda: arrived)
        except Unwanted:
            self._outgoing = None
            return False
        self._outgoing = None
        return True
