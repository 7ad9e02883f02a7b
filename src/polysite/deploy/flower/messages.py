"""A message as Flower carries it: a header of plain values and, if there is one, a body of bytes.

::

    Message └─ RecordDict ├─ header   ConfigRecord: text, numbers, truth values and lists of them
                          └─ body     ArrayRecord └─ "payload"  Array └─ chunks of 5 MiB

Flower keeps and sends each of these objects under the hash of its content, so a body for several hospitals is kept
once. Chunks are cut and joined here rather than by Flower: the same bytes under the same names, with a third of the
copying.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from polysite.errors import PayloadError, RunError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it while it is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject,
        get_all_nested_objects,
        get_object_head_values_from_object_content,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
except ModuleNotFoundError as problem:
    if (problem.name or "").partition(".")[0] != "flwr":
        raise
    raise RunError("deployment needs Flower: pip install 'polysite[deploy]'") from problem

INSTANCE = "x-polysite-instance"  # HTTP header that identifies one start of a site's courier

Header = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


class _Relay(logging.Handler):
    """Sends the log of Flower and its web server to polysite's own debug log instead of the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("polysite.link").debug("%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)


for _name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "alembic"):
    _logger = logging.getLogger(_name)
    _logger.handlers, _logger.propagate = [_Relay()], False
    _logger.setLevel(logging.WARNING)


def pack(header: Mapping[str, Header], body: bytes | ArrayRecord = b"") -> RecordDict:
    """Return the records of a message. A body for several sites should be wrapped first, so that it is hashed once."""
    record = ConfigRecord({name: _plain(name, value) for name, value in header.items()})
    if isinstance(body, bytes):
        body = wrap(body) if body else ArrayRecord()
    return RecordDict({"header": record, "body": body} if body else {"header": record})


def unpack(records: RecordDict) -> tuple[dict[str, Header], bytes]:
    """Return the header and the body of a message; refuse anything that ``pack`` would not have made."""
    header, body = records.get("header"), records.get("body")
    if not isinstance(header, ConfigRecord) or set(records) - {"header", "body"}:
        raise PayloadError(f"a message has a header and at most a body, not {_names(records)}")
    values = {name: _plain(name, value) for name, value in header.items()}
    if body is None:
        return values, b""
    if not isinstance(body, ArrayRecord) or set(body) != {"payload"}:
        raise PayloadError(f"the body of a message is one payload, not {_names(body)}")
    array = body["payload"]
    if (array.dtype, array.shape, array.stype) != ("uint8", (len(array.data),), "safetensors") or not array.data:
        raise PayloadError(
            f"the payload of a message is bytes of safetensors, not {array.stype[:40]} of {array.dtype[:40]} and shape "
            f"{str(array.shape)[:40]} in {len(array.data)} bytes"
        )
    return values, array.data


def wrap(body: bytes) -> ArrayRecord:
    """Return a body as a record that can be sent several times."""
    array = Array(dtype="uint8", shape=(len(body),), stype="safetensors", data=body)
    view = memoryview(body)
    chunks = [_Chunk(view[start : start + CHUNK]) for start in range(0, len(body), CHUNK)]
    array.__dict__["_chunks"] = [(chunk.object_id, chunk) for chunk in chunks]  # where Flower keeps its own
    record = ArrayRecord()
    record["payload"] = array  # the constructor would copy it without its chunks
    return record


def deflate(message: Message) -> tuple[ObjectTree, dict[str, InflatableObject]]:
    """Return the object tree of a message and its objects by name, children first; also sets the message's name."""
    with no_object_id_recompute():
        objects, tree = get_all_nested_objects(message), get_object_tree(message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return tree, objects


def inflate(name: str, contents: Mapping[str, bytes], limit: int) -> Message:
    """Return the message made of these contents; PayloadError if they make none, or more than ``limit`` bytes.

    Flower would join all chunks that an array lists, and one chunk may be listed a million times; so lengths are added
    up first.
    """
    try:
        arrays: dict[str, InflatableObject] = {}
        for each, content in contents.items():
            kind, children, _ = get_object_head_values_from_object_content(content)
            if kind == "Array":
                arrays[each] = _join(content, children, contents, limit)
                limit -= len(arrays[each].data)  # type: ignore[attr-defined]
        message = inflate_object_from_contents(name, dict(contents), objects=arrays)
    except PayloadError:
        raise
    except Exception as problem:  # untrusted bytes may raise anything
        raise PayloadError(f"what arrived is not a message: {str(problem)[:200]}") from problem
    if not isinstance(message, Message):
        raise PayloadError(f"what arrived is a {type(message).__name__}, not a message")
    message.metadata.__dict__["_message_id"] = name
    return message


class _Chunk(ArrayChunk):
    """A chunk that is hashed without being copied."""

    @property
    def _head(self) -> bytes:
        return b"ArrayChunk  %d" % len(self.data) + HEAD_BODY_DIVIDER

    def deflate(self) -> bytes:
        """Return the chunk as Flower stores it."""
        return b"".join((self._head, self.data))

    @cached_property
    def object_id(self) -> str:
        """SHA-256 of the stored chunk."""
        digest = hashlib.sha256(self._head)
        digest.update(self.data)
        return digest.hexdigest()


def _join(content: bytes, children: list[str], contents: Mapping[str, bytes], limit: int) -> Array:
    facts = json.loads(_body(content).tobytes())
    parts = {child: _body(contents[child]) for child in children}
    listed = [parts[children[i]] for i in facts["arraychunk_ids"]]
    if sum(map(len, listed)) > limit:
        raise PayloadError(f"a message may hold {limit} more bytes, not {sum(map(len, listed))}")
    return Array(facts["dtype"], tuple(facts["shape"]), facts["stype"], b"".join(listed))


def _body(content: bytes) -> memoryview:
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
