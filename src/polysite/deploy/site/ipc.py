"""The Unix socket between the courier and the worker of a hospital, in a folder that only their user can open.

A frame is two lengths, a header in JSON and a body of bytes. Requests and responses alternate.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysite.buffers import Buffer, room
from polysite.errors import PayloadError, RunError

LENGTHS = struct.Struct(">QQ")
MAX_HEADER, MAX_BODY = 64 << 20, 8 << 30  # bytes
PIECE = 1 << 30  # bytes that are asked of the system at once


def listen(path: Path) -> socket.socket:
    """Return a listening socket that only this user can reach: the folder has mode 0700, the socket 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        found.bind(str(path))
    except OSError as problem:
        raise RunError(f"the socket {path} could not be made: {problem}") from problem
    finally:
        os.umask(before)
    found.listen(1)
    return found


def connect(path: Path) -> socket.socket:
    """Return a connection to a listening socket."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(str(path))
    except OSError:
        found.close()
        raise
    return found


def send(to: socket.socket, header: Mapping[str, Any], body: Buffer = b"") -> None:
    """Send a frame."""
    text = json.dumps(dict(header)).encode()
    to.sendall(LENGTHS.pack(len(text), len(body)) + text)
    to.sendall(body)


def receive(of: socket.socket) -> tuple[dict[str, Any], memoryview] | None:
    """Return the next frame, or None if the other side has disconnected."""
    lengths = _exactly(of, LENGTHS.size)
    if lengths is None:
        return None
    header, body = LENGTHS.unpack(lengths)
    if header > MAX_HEADER or body > MAX_BODY:
        raise PayloadError(f"a frame of {header} and {body} bytes is more than is accepted here")
    text = _exactly(of, header)
    content = None if text is None else _exactly(of, body)
    if text is None or content is None:
        return None
    return json.loads(bytes(text)), content


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
