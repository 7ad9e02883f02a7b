"""A message as it crosses the wire: a small letter, and apart from it a body of bytes.

A letter is JSON: a header of plain values, and the SHA-256 and size of the body. The body follows as bytes and nothing
else, so that it is neither copied nor parsed, and can go on where it was cut.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polysite.buffers import Buffer
from polysite.errors import PayloadError
from polysite.foreign import parse_json

PREFIX = "/v1/polysite/"
KEY, TIME, SIGNATURE = "x-polysite-key", "x-polysite-time", "x-polysite-signature"  # HTTP headers that authenticate
INSTANCE = "x-polysite-instance"  # HTTP header that identifies one start of a site's courier
WAIT = "x-polysite-wait"  # HTTP header: seconds that a request for messages may be held until there is one
LAST = "x-polysite-last"  # HTTP header: the message that was received last, which shall not come again
START = "x-polysite-start"  # HTTP header: bytes of a body that are there already; those after them follow
MAX_LETTER = 32 << 20  # bytes; scores of many cases are in the header
PIECE = 64 << 10  # bytes that are handed to a connection at a time, each within the timeout

Header = Any  # a value of a header: whatever JSON can hold; the protocol checks each (``deploy/protocol.py``)


@dataclass(frozen=True, slots=True)
class Letter:
    """What is known of a message before its body comes.

    Args:
        id: Name of a request; an answer has that of its request.
        header: Plain values.
        digest: SHA-256 of the body, or empty.
        size: Bytes of the body.
    """

    id: str
    header: Mapping[str, Header] = field(default_factory=dict)
    digest: str = ""
    size: int = 0

    def dump(self) -> bytes:
        """Return the letter as it is sent."""
        return json.dumps({**asdict(self), "header": dict(self.header)}).encode()

    @classmethod
    def load(cls, text: bytes) -> "Letter":
        """Parse a letter; refuse anything that ``dump`` would not have made."""
        try:
            letter = cls(**parse_json(text))
        except (ValueError, TypeError) as problem:
            raise PayloadError(f"what arrived is not a message: {str(problem)[:200]}") from problem
        kinds = [type(each) for each in (letter.id, letter.header, letter.digest, letter.size)]
        if kinds != [str, dict, str, int] or letter.size < 0 or bool(letter.size) != bool(letter.digest):
            raise PayloadError("what arrived is not a message: its id, header, digest or size is odd")
        return letter


def digest(body: Buffer) -> str:
    """Return the SHA-256 of a body; nothing for an empty one."""
    return hashlib.sha256(body).hexdigest() if body else ""


def pieces(body: Buffer) -> Iterator[memoryview]:
    """Yield a body in the pieces in which it is sent."""
    view = memoryview(body)
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))
