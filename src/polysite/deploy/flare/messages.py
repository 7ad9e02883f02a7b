"""A message as NVIDIA FLARE carries it: a Shareable with a header of JSON text and a body of plain bytes.

::

    Shareable ├─ header   text: JSON of text, numbers, truth values and lists of them
              └─ body     list of bytes, each at most 1 GiB: an encoded payload (``polysite.payload``)

FLARE serialises Shareables with FOBS, which can also rebuild objects of classes. Nothing of that kind is put in here,
and what arrives is refused unless it is text and bytes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polysite.buffers import Buffer, room
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
PART = 1 << 30  # bytes of a part; FLARE's format holds at most 4 GiB in one
MAX_HEADER = 64 << 20  # characters


def cut(body: Buffer) -> list[memoryview]:
    """Return a body in parts, which are no copies and which several messages may share."""
    view = memoryview(body)
    return [view[start : start + PART] for start in range(0, len(view), PART)]


def pack(header: Mapping[str, Any], parts: Sequence[Buffer] = ()) -> Shareable:
    """Return a message of a header and the parts of a body."""
    message = Shareable()
    message[HEADER], message[BODY] = json.dumps(dict(header)), list(parts)
    return message


def unpack(message: Any) -> tuple[dict[str, Any], Buffer]:
    """Return the header and the body of a message that FLARE brought; refuse anything but text and bytes."""
    text, parts = (message.get(name) if isinstance(message, dict) else None for name in (HEADER, BODY))
    if type(text) is not str or len(text) > MAX_HEADER:
        raise PayloadError("a message of FLARE has no header, or one that is too long")
    if type(parts) is not list or not all(type(part) is bytes for part in parts):
        raise PayloadError("the body of a message of FLARE is not a list of bytes")
    try:
        header = parse_json(text)
    except ValueError as problem:
        raise PayloadError(f"the header of a message of FLARE cannot be read: {str(problem)[:200]}") from problem
    if not isinstance(header, dict):
        raise PayloadError("the header of a message of FLARE is not a table of names and values")
    return header, _joined(parts)


def _joined(parts: list[bytes]) -> Buffer:
    if len(parts) < 2:
        return parts[0] if parts else b""
    whole, at = room(sum(map(len, parts))), 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole
