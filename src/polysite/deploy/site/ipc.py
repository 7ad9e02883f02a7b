"""Frames between the courier and the worker of a hospital, over a pair of sockets that no other process can open.

A frame is two lengths, a header in JSON and a body of bytes. Requests and responses alternate.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from polysite.buffers import Buffer, room
from polysite.errors import PayloadError, shown
from polysite.foreign import parse_json

LENGTHS = struct.Struct(">QQ")
MAX_HEADER, MAX_BODY = 64 << 20, 8 << 30  # bytes
PIECE = 1 << 30  # bytes that are asked of the system at once


class TooLarge(PayloadError):
    """A frame that is too large to be read, so that the next one cannot be found either."""


def send(to: socket.socket, header: Mapping[str, Any], body: Buffer = b"") -> None:
    """Send a frame."""
    text = json.dumps(dict(header)).encode()
    to.sendall(LENGTHS.pack(len(text), len(body)) + text)
    to.sendall(body)


def receive(of: socket.socket) -> tuple[dict[str, Any], memoryview] | None:
    """Return the next frame, or None if the other side has disconnected.

    Raises:
        PayloadError: The frame is too large (the connection is of no use then), or its header is no JSON object.
    """
    lengths = _exactly(of, LENGTHS.size)
    if lengths is None:
        return None
    header, body = LENGTHS.unpack(lengths)
    if header > MAX_HEADER or body > MAX_BODY:
        raise TooLarge(f"a frame of {header} and {body} bytes is more than is accepted here")
    text = _exactly(of, header)
    content = None if text is None else _exactly(of, body)
    if text is None or content is None:
        return None
    try:
        found = parse_json(text)
    except ValueError as problem:
        raise PayloadError(f"the header of a frame is not valid JSON: {shown(problem, 100)}") from problem
    if not isinstance(found, dict):
        raise PayloadError(f"the header of a frame is no JSON object, but a {type(found).__name__}")
    return found, content


def _exactly(of: socket.socket, size: int) -> memoryview | None:
    """Return ``size`` bytes, received in place; None if the other side disconnects."""
    whole = room(size)
    at = 0
    while at < size:
        count = of.recv_into(whole[at:], min(size - at, PIECE), socket.MSG_WAITALL)
        if not count:
            return None
        at += count
    return whole
