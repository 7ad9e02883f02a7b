"""A message as NVIDIA FLARE carries it: a Shareable with a header of JSON text and a body of plain bytes.

::

    Shareable ├─ header   text: JSON of text, numbers, truth values and lists of them
              └─ body     bytes, at most 4 GiB: an encoded payload (``polysite.payload``)

FLARE serialises Shareables with FOBS, which can also rebuild objects of classes. Nothing of that kind is put in here,
and what arrives is refused unless it is text and bytes.
"""

import json
from collections.abc import Mapping
from typing import Any

from polysite.buffers import Buffer
from polysite.errors import PayloadError, RunError
from polysite.foreign import parse_json

try:
    from nvflare.apis.shareable import Shareable
except ModuleNotFoundError as problem:
    if (problem.name or "").partition(".")[0] != "nvflare":
        raise
    raise RunError("this engine needs NVIDIA FLARE: pip install 'polysite[flare]'") from problem

TASK = "polysite"  # name of every task
HERE = "polysite.here"  # topic of the message with which a site says that it is there
HEADER, BODY = "polysite_header", "polysite_body"
MAX_BODY = (4 << 30) - 1  # bytes; FLARE's format holds no more in one
MAX_HEADER = 64 << 20  # characters


def pack(header: Mapping[str, Any], body: Buffer = b"") -> Shareable:
    """Return a message of a header and a body, which several messages may share."""
    if len(body) > MAX_BODY:
        raise PayloadError(f"a message of FLARE may hold {MAX_BODY} bytes, not {len(body)}: choose a smaller network")
    message = Shareable()
    message[HEADER], message[BODY] = json.dumps(dict(header)), memoryview(body)
    return message


def unpack(message: Any) -> tuple[dict[str, Any], Buffer]:
    """Return the header and the body of a message that FLARE brought; refuse anything but text and bytes."""
    text, body = (message.get(name) if isinstance(message, dict) else None for name in (HEADER, BODY))
    if type(text) is not str or len(text) > MAX_HEADER:
        raise PayloadError("a message of FLARE has no header, or one that is too long")
    if not isinstance(body, bytes | memoryview):
        raise PayloadError("the body of a message of FLARE is not bytes")
    try:
        header = parse_json(text)
    except ValueError as problem:
        raise PayloadError(f"the header of a message of FLARE cannot be read: {str(problem)[:200]}") from problem
    if not isinstance(header, dict):
        raise PayloadError("the header of a message of FLARE is not a table of names and values")
    return header, body
