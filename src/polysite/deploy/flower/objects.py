"""Requests and responses that carry one object of a message, put together and taken apart without copying the object.

They are Flower's ``PushObjectRequest`` and ``PullObjectResponse`` in protobuf's binary form, in which a field of bytes
is a tag, a length and the bytes themselves.
"""

from polysite.buffers import Buffer
from polysite.deploy.flower.messages import Chunk, Content

from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest  # isort: skip
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

PIECE = 64 << 10  # bytes that are handed to a connection at a time, each within the time-out
BYTES = 2  # protobuf's type of a field with a length
MAX_SMALL = 64 << 10  # bytes of all fields of a request but the object


def pushed(request: PushObjectRequest, content: Content) -> list[Buffer]:
    """Return the parts of a request that pushes an object; ``request`` has all other fields."""
    whole = parts_of(content)
    tag = _tag(PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER, sum(map(len, whole)))
    return [request.SerializeToString() + tag, *whole]


def read_pushed(body: Buffer) -> tuple[PushObjectRequest, memoryview]:
    """Return a request that pushes an object, without the object, and the object; DecodeError if it is none."""
    view, content, small, at = memoryview(body), memoryview(b""), bytearray(), 0
    while at < len(view):
        start = at
        key, at = _read_varint(view, at)
        if key & 7 == 0:
            _, at = _read_varint(view, at)
        elif key & 7 == BYTES:
            length, at = _read_varint(view, at)
            at += length
        else:
            raise DecodeError(f"a field of type {key & 7}")
        if at > len(view):
            raise DecodeError("a field that does not end")
        if key == PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER << 3 | BYTES:
            content = view[at - length : at]
        elif len(small) + at - start > MAX_SMALL:
            raise DecodeError("fields that are too long")
        else:
            small += view[start:at]
    return PushObjectRequest.FromString(bytes(small)), content


def read_before_chunk(before: bytes, size: int) -> PushObjectRequest:
    """Return a request that pushes a chunk of ``size`` bytes, from what comes before them; or raise DecodeError."""
    head = Chunk.head_of(size)
    end = _tag(PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER, len(head) + size) + head
    if not before.endswith(end):
        raise DecodeError(f"no chunk of {size} bytes")
    request: PushObjectRequest = PushObjectRequest.FromString(before.removesuffix(end))
    return request


def pulled(content: Content | None) -> list[Buffer]:
    """Return the parts of a response with an object; without it, if it is not there (None), or not yet (empty)."""
    whole = parts_of(content or b"")
    return [_before(content is not None, bool(content), sum(map(len, whole))), *whole]


def before_chunk(size: int) -> bytes:
    """Return the bytes that come before the data of a chunk in a response with it."""
    head = Chunk.head_of(size)
    return _before(True, True, len(head) + size) + head


def parts_of(content: Content) -> tuple[Buffer, ...]:
    """Return an object in the parts in which it lies in memory."""
    return (content.head, content.data) if isinstance(content, Chunk) else (content,)


def _before(found: bool, available: bool, size: int) -> bytes:
    response = PullObjectResponse(object_found=found, object_available=available)
    return bytes(response.SerializeToString()) + _tag(PullObjectResponse.OBJECT_CONTENT_FIELD_NUMBER, size)


def _tag(field: int, size: int) -> bytes:
    return _varint(field << 3 | BYTES) + _varint(size)


def _varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits a byte, the lowest first.

    >>> _varint(300).hex()
    'ac02'
    """
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends.

    >>> _read_varint(memoryview(bytes.fromhex("ac02")), 0)
    (300, 2)
    """
    number = 0
    for k, byte in enumerate(view[at : at + 10]):
        number |= (byte & 127) << 7 * k
        if byte < 128:
            return number, at + k + 1
    raise DecodeError("a number that does not end")
