"""A message as Flower carries it: a header of plain values and, if there is one, a body of bytes.

::

    Message └─ RecordDict ├─ header   ConfigRecord: text, numbers, truth values and lists of them
                          └─ body     ArrayRecord └─ "payload"  Array └─ chunks of 16 MiB

Flower keeps and sends each of these objects under the hash of its content, so a body for several hospitals is kept
once. Chunks are cut and joined here rather than by Flower: with a third of the copying, and larger than Flower's 5 MiB,
because every chunk is a request that is signed and checked.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from polysite.buffers import Buffer, room
from polysite.errors import PayloadError, RunError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it while it is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject,
        get_all_nested_objects,
        get_object_head_values_from_object_content,
        get_object_id,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
except ModuleNotFoundError as problem:
    if (problem.name or "").partition(".")[0] != "flwr":
        raise
    raise RunError("deployment needs Flower: pip install 'polysite[deploy]'") from problem

INSTANCE = "x-polysite-instance"  # HTTP header that identifies one start of a site's courier
OBJECT = "x-polysite-object"  # HTTP header: name of the chunk that a request pushes, which may be received in place
PART = "x-polysite-part"  # HTTP header of a pushed chunk: where its bytes begin, how many come, how many it has
REST = "x-polysite-rest"  # HTTP header of a pulled chunk: how many of its bytes have arrived, so that the rest is sent
WAIT = "x-polysite-wait"  # HTTP header: seconds that a request for messages may be held until there is one
CHUNK = 16 << 20  # bytes of a chunk
MAX_CHUNK_HEAD = 40  # bytes

Header = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


class _Relay(logging.Handler):
    """Sends the log of Flower and its web server to polysite's own debug log instead of the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("polysite.link").debug("%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)


for _name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "alembic"):
    _logger = logging.getLogger(_name)
    _logger.handlers, _logger.propagate = [_Relay()], False
    _logger.setLevel(logging.WARNING)


class Chunk(ArrayChunk):
    """A chunk that is hashed, stored and sent without being copied."""

    @staticmethod
    def head_of(size: int) -> bytes:
        """Return what comes before the data of a chunk."""
        return b"ArrayChunk  %d" % size + HEAD_BODY_DIVIDER

    @property
    def head(self) -> bytes:
        """What comes before the data."""
        return self.head_of(len(self.data))

    def __len__(self) -> int:
        return len(self.head) + len(self.data)

    def deflate(self) -> bytes:
        """Return the chunk as Flower stores it."""
        return b"".join((self.head, self.data))

    @cached_property
    def object_id(self) -> str:
        """SHA-256 of the stored chunk."""
        digest = hashlib.sha256(self.head)
        digest.update(self.data)
        return digest.hexdigest()


Content = bytes | Chunk  # an object of a message


class _Data(bytes):
    """Stands for the data of an array, of which Flower accepts nothing but bytes."""

    view: Buffer

    def __new__(cls, view: Buffer) -> "_Data":
        """Return empty bytes that know the data."""
        data = super().__new__(cls)
        data.view = view
        return data


def _data(array: Array) -> Buffer:
    return array.data.view if isinstance(array.data, _Data) else array.data


def pack(header: Mapping[str, Header], body: Buffer | ArrayRecord = b"") -> RecordDict:
    """Return the records of a message. A body for several sites should be wrapped first, so that it is hashed once."""
    record = ConfigRecord({name: _plain(name, value) for name, value in header.items()})
    if not isinstance(body, ArrayRecord):
        body = wrap(body) if body else ArrayRecord()
    return RecordDict({"header": record, "body": body} if body else {"header": record})


def unpack(records: RecordDict) -> tuple[dict[str, Header], Buffer]:
    """Return the header and the body of a message; refuse anything that ``pack`` would not have made."""
    header, body = records.get("header"), records.get("body")
    if not isinstance(header, ConfigRecord) or set(records) - {"header", "body"}:
        raise PayloadError(f"a message has a header and at most a body, not {_names(records)}")
    values = {name: _plain(name, value) for name, value in header.items()}
    if body is None:
        return values, b""
    if not isinstance(body, ArrayRecord) or set(body) != {"payload"}:
        raise PayloadError(f"the body of a message is one payload, not {_names(body)}")
    array, data = body["payload"], _data(body["payload"])
    if (array.dtype, array.shape, array.stype) != ("uint8", (len(data),), "safetensors") or not data:
        raise PayloadError(
            f"the payload of a message is bytes of safetensors, not {array.stype[:40]} of {array.dtype[:40]} and shape "
            f"{str(array.shape)[:40]} in {len(data)} bytes"
        )
    return values, data


def wrap(body: Buffer) -> ArrayRecord:
    """Return a body as a record that can be sent several times."""
    array = _array("uint8", (len(body),), "safetensors", body)
    view = memoryview(body)
    chunks = [Chunk(view[start : start + CHUNK]) for start in range(0, len(body), CHUNK)]
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(lambda chunk: chunk.object_id, chunks))
    array.__dict__["_chunks"] = list(zip(names, chunks, strict=True))  # where Flower keeps its own
    record = ArrayRecord()
    record["payload"] = array  # the constructor would copy it without its chunks
    return record


def deflate(message: Message) -> tuple[ObjectTree, dict[str, InflatableObject]]:
    """Return the object tree of a message and its objects by name, children first; also sets the message's name."""
    with no_object_id_recompute():
        objects, tree = get_all_nested_objects(message), get_object_tree(message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return tree, objects


def content_of(thing: InflatableObject) -> Content:
    """Return an object as it is stored and sent."""
    return thing if isinstance(thing, Chunk) else thing.deflate()


def read_content(name: str, given: memoryview) -> Content:
    """Return an object that arrived; ValueError if it is not the one of this name, which is its SHA-256."""
    if get_object_id(given) != name:  # type: ignore[arg-type]
        raise ValueError("an object that is not the one of its name")
    head = bytes(given[:MAX_CHUNK_HEAD]).partition(HEAD_BODY_DIVIDER)[0] + HEAD_BODY_DIVIDER
    if head == Chunk.head_of(len(given) - len(head)):
        return Chunk(given[len(head) :])
    content = bytes(given)
    try:
        validate_object_content(content)
    except Exception as problem:  # Flower's own kinds of errors
        raise ValueError(str(problem)) from problem
    return content


def array_chunks(content: bytes, limit: int) -> tuple[int, dict[str, list[slice]]] | None:
    """Return how many bytes an array has and where each of its chunks belongs; None if the object is no array.

    PayloadError if the chunks are not as ``wrap`` cuts them, or have more than ``limit`` bytes.
    """
    try:
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != "Array":
            return None
        facts = json.loads(_body(content).tobytes())
        (size,), listed = facts["shape"], [children[i] for i in facts["arraychunk_ids"]]
        if type(size) is not int or not 0 <= size <= limit:
            raise PayloadError(f"a message may hold {limit} more bytes, not {str(size)[:40]}")
    except PayloadError:
        raise
    except Exception as problem:  # untrusted bytes may raise anything
        raise PayloadError(f"what arrived is not a message: {str(problem)[:200]}") from problem
    places: dict[str, list[slice]] = {name: [] for name in children}
    starts = range(0, size, CHUNK)
    if len(listed) != len(starts):
        raise PayloadError(f"a body of {size} bytes comes in {len(starts)} chunks, not {len(listed)}")
    for name, start in zip(listed, starts, strict=True):
        places[name].append(slice(start, min(start + CHUNK, size)))
    if any(len({place.stop - place.start for place in each}) != 1 for each in places.values()):
        raise PayloadError("a chunk is in no place, or in places of different size")
    return size, places


def inflate(
    name: str, contents: Mapping[str, Content], limit: int, joined: Mapping[str, memoryview] = MappingProxyType({})
) -> Message:
    """Return the message made of these contents; PayloadError if they make none, or more than ``limit`` bytes.

    Flower would join all chunks that an array lists, and one chunk may be listed a million times; so lengths are added
    up first. The data of arrays in ``joined`` are there already, their chunks need not be.
    """
    try:
        arrays: dict[str, InflatableObject] = {}
        for each, content in contents.items():
            if isinstance(content, Chunk):
                continue
            kind, children, _ = get_object_head_values_from_object_content(content)
            if kind == "Array":
                arrays[each] = array = _join(content, children, contents, limit, joined.get(each))
                limit -= len(_data(array))
        message = inflate_object_from_contents(name, dict(contents), objects=arrays)  # type: ignore[arg-type]
    except PayloadError:
        raise
    except Exception as problem:  # untrusted bytes may raise anything
        raise PayloadError(f"what arrived is not a message: {str(problem)[:200]}") from problem
    if not isinstance(message, Message):
        raise PayloadError(f"what arrived is a {type(message).__name__}, not a message")
    message.metadata.__dict__["_message_id"] = name
    return message


def _join(
    content: bytes, children: list[str], contents: Mapping[str, Content], limit: int, whole: memoryview | None
) -> Array:
    facts = json.loads(_body(content).tobytes())
    if whole is None:
        parts = {child: _body(contents[child]) for child in children}
        listed = [parts[children[i]] for i in facts["arraychunk_ids"]]
        size = sum(map(len, listed))
        if size > limit:
            raise PayloadError(f"a message may hold {limit} more bytes, not {size}")
        if len(listed) > 1 + size // CHUNK:  # millions of small ones would take minutes
            raise PayloadError(f"a body of {size} bytes comes in chunks of {CHUNK}, not in {len(listed)} chunks")
        whole, at = room(size), 0
        for part in listed:
            np.copyto(np.asarray(whole[at : at + len(part)]), np.asarray(part))
            at += len(part)
    return _array(facts["dtype"], tuple(facts["shape"]), facts["stype"], whole)


def _array(dtype: str, shape: tuple[int, ...], stype: str, data: Buffer) -> Array:
    return Array(dtype, shape, stype, _Data(data))


def _body(content: Content) -> memoryview:
    if isinstance(content, Chunk):
        return content.data
    return memoryview(content)[content.index(HEAD_BODY_DIVIDER) + 1 :]


def _plain(name: str, value: Any) -> Any:
    several = list(value) if isinstance(value, list | tuple) else [value]
    if len({type(one) for one in several}) > 1 or not all(type(one) in (str, int, float, bool) for one in several):
        raise PayloadError(f"the header field {str(name)[:40]!r} is not text, a number or a list of one kind of them")
    if any(type(one) is int and not -(2**63) <= one < 2**63 for one in several):
        raise PayloadError(f"the header field {str(name)[:40]!r} is a number of more than 64 bits")
    return several if isinstance(value, list | tuple) else value


def _names(found: Any) -> str:
    return ", ".join(sorted(map(str, found)))[:80] or "nothing" if isinstance(found, Mapping) else type(found).__name__
