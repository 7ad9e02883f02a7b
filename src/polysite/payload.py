"""Payloads: the only values that cross the network, and the only ones that a site keeps between rounds.

On the wire a payload is a safetensors file: a JSON header and raw little-endian arrays. Nothing is ever unpickled,
and the header is checked against limits before any array is built.

>>> import numpy as np
>>> p = Payload(model={"w": np.ones(2)}, n=3)
>>> p["n"], p.nbytes
(3.0, 24)
>>> decode(encode(p)) == p
True
"""

import hashlib
import json
import math
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from polysite import tree
from polysite.buffers import Buffer, room
from polysite.errors import PayloadError
from polysite.foreign import parse_json

SiteId = str


def natural(names: Iterable[str]) -> list[str]:
    """Sort names in natural order: numbers inside them by value.

    >>> natural(["10", "9", "b2", "01", "b10", "1"])
    ['01', '1', '9', '10', 'b2', 'b10']
    """
    return sorted(names, key=lambda n: ([(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in _runs(n)], n))


def _runs(name: str) -> list[str]:
    """Split a name into runs of digits and of other characters."""
    return [p for p in re.split(r"([0-9]+)", name) if p]


# types that may cross: name in the file -> name in NumPy
TYPES: Mapping[str, str] = {
    **{f"F{n}": f"float{n}" for n in (64, 32, 16)},
    **{f"I{n}": f"int{n}" for n in (64, 32, 16, 8)},
    **{f"U{n}": f"uint{n}" for n in (64, 32, 16, 8)},
    "BOOL": "bool",
}
NAMES: Mapping[str, str] = {there: here for here, there in TYPES.items()}
# order of the arrays in a file, as the library safetensors writes it: types from left to right, then names
FILE_ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "F16", "U16", "I16", "I8", "U8", "BOOL")


class Payload(dict[str, Any]):
    """An immutable mapping of field names to values; each value is a tree of arrays or a number."""

    __slots__ = ()

    def __init__(self, /, **fields: tree.Tree | float):
        super().__init__(
            (k, MappingProxyType(dict(v)) if isinstance(v, Mapping) else float(v)) for k, v in fields.items()
        )

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"no field {name!r} in this payload; it holds {sorted(self)}")

    def __reduce__(self) -> Any:
        """Return how a copy is made in another process of this run: with plain arrays."""
        fields = {k: v if isinstance(v, float) else {n: plain(x) for n, x in v.items()} for k, v in self.items()}
        return _remade, (fields,)

    def _unchangeable(self, *given: Any, **more: Any) -> Any:
        raise TypeError("a payload cannot be changed; make a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _unchangeable

    def __repr__(self) -> str:
        inside = (f"{k}={v!r}" if isinstance(v, float) else f"{k}=<{len(v)} arrays>" for k, v in self.items())
        return f"Payload({', '.join(inside)})"

    def __eq__(self, other: object) -> bool:
        """Compare bit by bit: fields, names, shapes, types and bytes."""
        if not isinstance(other, Payload) or self.keys() != other.keys():
            return False
        pairs = [({"": np.float64(v)} if isinstance(v, float) else v, other[f]) for f, v in self.items()]
        pairs = [(a, {"": np.float64(b)} if isinstance(b, float) else b) for a, b in pairs]
        return all(a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a) for a, b in pairs)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays and numbers. The cost model uses this number."""
        return sum([8 if isinstance(v, float) else sum([int(x.nbytes) for x in v.values()]) for v in self.values()])

    def each(self, f: Any) -> "Payload":
        """Return this payload with ``f`` applied to every tree, for example to move it to another device."""
        return Payload(**{k: v if isinstance(v, float) else f(v) for k, v in self.items()})


def _remade(fields: Mapping[str, Any]) -> Payload:
    return Payload(**fields)


def likeness(payload: Payload) -> Any:
    """Return a key that is equal for payloads with the same array objects; the contents are not compared."""
    fields = [(k, v if isinstance(v, float) else (*v, *map(id, v.values()))) for k, v in payload.items()]
    return tuple(fields)


class LastPayload:
    """The payload that a site got last and keeps, so that a request with the same arrays brings it no bytes.

    Its arrays are not kept alive here.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._arrays: list[weakref.ref[Any]] = []

    def replace(self, payload: Payload) -> int:
        """Note the next payload of a site; return the bytes that cross for it."""
        key = likeness(payload)
        gone = [array for array in self._arrays if array() is None]
        if key == self._key and self._arrays and not gone:
            return 0
        leaves = [x for value in payload.values() if not isinstance(value, float) for x in value.values()]
        weak = (x if type(x).__weakrefoffset__ else np.asarray(x) for x in leaves)  # not so a number of NumPy
        self._key, self._arrays = key, [weakref.ref(x) for x in weak]
        return payload.nbytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what a receiver accepts. The default admits a model of 500 M parameters with its control variates.

    Args:
        nbytes: Bytes of the whole payload.
        header: Bytes of its JSON header.
        arrays: Number of arrays.
        dimensions: Dimensions of an array.
    """

    nbytes: int = 8 << 30
    header: int = 16 << 20
    arrays: int = 100_000
    dimensions: int = 8


STORED = Limits(1 << 62, 100 << 20, 1 << 62, 64)  # of a file on one's own disk; safetensors has no longer headers


def plain(x: Any) -> np.ndarray:
    """Return a contiguous, little-endian NumPy array of a leaf on any device."""
    a = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    a = a.astype(a.dtype.newbyteorder("<"), copy=False)
    return a if a.flags.c_contiguous else a.copy(order="C")


def model_digest(params: tree.Tree) -> str:
    """Return the SHA-256 of a model's names, shapes, types and values."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = plain(params[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def encode(p: Payload) -> memoryview:
    """Return the bytes of a payload, which are those that the library safetensors would write."""
    arrays: dict[str, np.ndarray] = {}
    order = []
    for field, value in p.items():
        number = isinstance(value, float)
        order.append([field, None if number else list(value)])
        leaves = {field: np.float64(value)} if number else {f"{field}/{k}": x for k, x in value.items()}
        arrays.update({k: plain(x) for k, x in leaves.items()})
    return pack(arrays, {"payload": json.dumps(order)})


def decode(b: Buffer, limits: Limits = Limits()) -> Payload:
    """Return the payload in these bytes; raise PayloadError if they are not exactly one payload.

    The arrays of a ``memoryview`` are views of it, so it must not be changed afterwards; ``bytes`` are copied.
    """
    texts, arrays = unpack(b, limits)
    try:
        index = [
            (str(f), None if names is None else [str(k) for k in names]) for f, names in parse_json(texts["payload"])
        ]
    except (ValueError, KeyError, TypeError) as problem:
        raise PayloadError(f"the payload's header cannot be read: {type(problem).__name__}: {problem}") from problem
    if not all(f.isidentifier() for f, _ in index) or len({f for f, _ in index}) < len(index):
        raise PayloadError("the payload's field names are not distinct plain names")
    try:
        fields = {f: float(arrays.pop(f)) if names is None else {k: arrays.pop(f"{f}/{k}") for k in names}
                  for f, names in index}  # fmt: skip
    except (KeyError, TypeError, ValueError) as problem:
        raise PayloadError(f"the payload is damaged: {problem}") from problem
    if arrays:
        raise PayloadError(f"the payload holds {len(arrays)} arrays that its index does not name")
    return Payload(**fields)


def pack(arrays: Mapping[str, np.ndarray], texts: Mapping[str, str] | None = None) -> memoryview:
    """Return a safetensors file: the length of the header, the header in JSON with the texts, the arrays."""
    types = {name: NAMES.get(a.dtype.name, "") for name, a in arrays.items()}
    if odd := next((name for name, found in types.items() if not found), None):
        raise PayloadError(
            f"array {odd!r} of type {arrays[odd].dtype} cannot be encoded; use one of {', '.join(TYPES.values())}"
        )
    names = sorted(arrays, key=lambda name: (FILE_ORDER.index(types[name]), name))
    header: dict[str, Any] = {} if texts is None else {"__metadata__": texts}
    end = 0
    for name in names:
        start, end = end, end + arrays[name].nbytes
        header[name] = {"dtype": types[name], "shape": arrays[name].shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that arrays in the file are aligned
    first = 8 + len(text)
    file = room(first + end)
    file[:first] = len(text).to_bytes(8, "little") + text
    for name in names:
        a = arrays[name]
        np.copyto(np.ndarray(a.shape, a.dtype.newbyteorder("<"), file, first + header[name]["data_offsets"][0]), a)
    return file


def unpack(b: Buffer, limits: Limits) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the texts in the header of a safetensors file, and its arrays; raise PayloadError if it is damaged.

    Every limit is checked before anything is allocated. Arrays are views of a ``memoryview``; ``bytes`` are copied.
    """
    if len(b) > limits.nbytes:
        raise PayloadError(f"the payload has {len(b)} bytes, more than the {limits.nbytes} accepted here")
    length = int.from_bytes(b[:8], "little")
    if len(b) < 8 or length > len(b) - 8 or length > limits.header:
        raise PayloadError(f"the payload announces a header of {length} bytes in {len(b)} bytes of data")
    first = 8 + length
    try:
        entries = parse_json(str(b[8:first], "utf-8"))
        texts = dict(entries.pop("__metadata__", {}))
        for name, entry in entries.items():
            name.encode()  # half of a surrogate pair, which JSON can escape, could not be written again
            if entry["dtype"] not in TYPES:
                raise PayloadError(f"array {name!r} has type {entry['dtype']!r}; accepted: {', '.join(TYPES)}")
            if len(entry["shape"]) > limits.dimensions:
                raise PayloadError(f"array {name!r} has {len(entry['shape'])} dimensions")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise PayloadError(f"the payload's header cannot be read: {type(problem).__name__}: {problem}") from problem
    if len(entries) > limits.arrays:
        raise PayloadError(f"the payload holds {len(entries)} arrays, more than the {limits.arrays} accepted here")
    try:
        _check_places(entries, len(b) - first)
        if isinstance(b, bytes):
            whole = room(len(b))
            whole[:] = b
            b = whole
        return texts, {name: _array(b, first, entry) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError) as problem:
        raise PayloadError(f"the payload is damaged: {problem}") from problem


def _check_places(entries: Mapping[str, Any], size: int) -> None:
    """Raise ValueError unless the arrays fill ``size`` bytes, each with as many as its shape and type need."""
    places = []
    for name, entry in entries.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise ValueError(f"shape or place of {name[:80]!r} are not whole numbers")
        needed = math.prod(shape) * np.dtype(TYPES[entry["dtype"]]).itemsize
        if end - start != needed:
            raise ValueError(f"array {name[:80]!r} is placed in {end - start} bytes and needs {needed}")
        places.append((start, end))
    at = 0
    for start, end in sorted(places):
        if start != at:
            raise ValueError(f"an array begins at {start} and the one before ends at {at}")
        at = end
    if at != size:
        raise ValueError(f"the arrays end at {at} of {size} bytes")


def _array(b: memoryview, first: int, entry: Mapping[str, Any]) -> np.ndarray:
    """Return an array that lies in these bytes; a copy of it, if it is not aligned there."""
    a: np.ndarray = np.ndarray(
        entry["shape"], np.dtype(TYPES[entry["dtype"]]).newbyteorder("<"), b, first + entry["data_offsets"][0]
    )
    return a if a.flags.aligned else a.copy()


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    a, b = plain(x), plain(y)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def mean(
    replies: Mapping[SiteId, Payload], field: str, weight: str | Mapping[SiteId, float] | None = None
) -> tree.Tree:
    """Return the mean of one field over the replies, summed in a fixed order, so that arrival order has no effect.

    Args:
        replies: The payload of every site.
        field: Name of the field to average.
        weight: Name of the field with the sample weights, or the weights by site; None for equal weights.
    """
    order = sorted(replies)
    weights = {i: replies[i][weight] for i in order} if isinstance(weight, str) else weight
    return tree.mean([replies[i][field] for i in order], None if weights is None else [weights[i] for i in order])
