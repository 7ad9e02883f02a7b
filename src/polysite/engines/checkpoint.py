"""Save and load values bit for bit, without pickle.

A state consists of frozen dataclasses, mappings, tuples, numbers and arrays. Its arrays become a safetensors file; its
structure becomes JSON in the file's header, next to a digest of everything, which reveals a truncated or altered file.
Classes are looked up by name in polysite or in the algorithm's own module; no code is executed from the file.
"""

import hashlib
import json
import sys
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from polysite.errors import PayloadError, PolysiteError, RunError, shown
from polysite.foreign import parse_json
from polysite.payload import STORED, Payload, pack, plain, unpack
from polysite.storage import link_file, map_file, write_file
from polysite.tree import Tree

Lift = Callable[[Tree], Tree]
# what reading a damaged file may raise, also one with a digest that was computed anew
DAMAGE = (
    PolysiteError, OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
# modules and classes that have moved since 0.1.0, whose names old files hold
MOVED = {
    "polysite.engines.rounds:Checkpoint": "polysite.engines.phases:Checkpoint",
    "polysite.engines.memory": "polysite.engines.site_memory",
    "polysite.algorithms.costs": "polysite.algorithms.cost_weighted",
    "polysite.algorithms.server": "polysite.algorithms.server_optimisers",
    "polysite.algorithms.ditto:State": "polysite.algorithms.average:State",
    "polysite.algorithms.fedprox:State": "polysite.algorithms.average:State",
    "polysite.algorithms.moon:State": "polysite.algorithms.average:State",
}


class Damaged(RunError):
    """A file that cannot be read as what it was written as, or is missing."""


def save(path: Path, value: Any, twins: Iterable[Path] = ()) -> None:
    """Write a value to a file; if one of the ``twins`` holds the same value, let the file be another name of it."""
    arrays: dict[str, np.ndarray] = {}
    shape = json.dumps(_flatten(value, "value", arrays))
    header = {"checkpoint": f"{_digest(shape, arrays)} {shape}"}  # one entry: several have no fixed order on disk
    twin = next((t for t in twins if t.exists() and _header(t) == header), None)
    if twin is not None:
        link_file(twin, path)
        return
    try:
        write_file(path, lambda temporary: temporary.write_bytes(pack(arrays, header)))
    except PayloadError as problem:
        raise RunError(f"{path} could not be written: {problem}") from problem


def load(path: Path, lift: Lift = lambda t: t, modules: Collection[str] = (), mapped: bool = False) -> Any:
    """Return the value in a file; ``Damaged`` if it cannot be read.

    Args:
        path: The file.
        lift: Moves arrays to the device of the computation.
        modules: Modules whose classes the value may hold, besides those of polysite.
        mapped: Map the arrays into memory instead of reading them.
    """
    try:
        header, there = unpack(map_file(path), STORED)
        arrays = there if mapped else {k: a.copy() for k, a in there.items()}
        digest, _, shape = header["checkpoint"].partition(" ")
        if digest != _digest(shape, arrays):
            raise Damaged(f"{path} is damaged: its content does not match its digest")
        return _restore(parse_json(shape), dict(lift(arrays)), modules)
    except Damaged:
        raise
    except DAMAGE as problem:
        kind = RunError if isinstance(problem, OSError | MemoryError) and path.exists() else Damaged  # may pass
        raise kind(f"{path} cannot be read as a checkpoint: {shown(problem)}") from problem


def _header(path: Path) -> Mapping[str, str]:
    """Return the header of a checkpoint, which has the digest of its content; empty if it cannot be read."""
    try:
        return unpack(map_file(path), STORED)[0]
    except DAMAGE:
        return {}


def _digest(shape: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(shape.encode())
    for key in sorted(arrays):
        digest.update(f"{key} {arrays[key].dtype.str} {arrays[key].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _flatten(x: Any, at: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return the structure of a value as JSON; its arrays are collected under their path."""
    if x is None or isinstance(x, bool | int | float | str):
        return {"is": x}
    if isinstance(x, Mapping):
        kind = "payload" if isinstance(x, Payload) else "map"
        return {kind: [[k, _flatten(v, f"{at}/{k}", arrays)] for k, v in x.items()]}
    if isinstance(x, tuple | list):
        return {type(x).__name__: [_flatten(v, f"{at}/{i}", arrays) for i, v in enumerate(x)]}
    if is_dataclass(x):
        inside = {f.name: _flatten(getattr(x, f.name), f"{at}/{f.name}", arrays) for f in fields(x)}
        return {"class": f"{type(x).__module__}:{type(x).__qualname__}", "fields": inside}
    if hasattr(x, "dtype"):
        arrays[at] = plain(x)
        return {"array": at}
    raise TypeError(
        f"a state may not hold a {type(x).__name__}: use numbers, text, arrays, mappings, tuples, dataclasses"
    )


def _restore(x: Any, arrays: Mapping[str, Any], modules: Collection[str]) -> Any:
    def deeper(y: Any) -> Any:
        return _restore(y, arrays, modules)

    match x:
        case {"is": value}:
            return value
        case {"array": key}:
            return arrays[key]
        case {"map": items}:
            return {k: deeper(v) for k, v in items}
        case {"payload": items}:
            return Payload(**{k: deeper(v) for k, v in items})
        case {"tuple": items}:
            return tuple(deeper(v) for v in items)
        case {"list": items}:
            return [deeper(v) for v in items]
        case {"class": name, "fields": inside}:
            kind = _dataclass(name, modules)
            return _built(kind, {f.name: deeper(inside[f.name]) for f in fields(kind) if f.name in inside})
    raise ValueError(f"unknown entry {str(x)[:60]!r}")


def _built(kind: Any, values: dict[str, Any]) -> Any:
    """Return a dataclass with these values; ValueError if one is not of the kind that polysite's own classes state."""
    if kind.__module__.startswith("polysite."):
        hints = get_type_hints(kind)
        for name, value in values.items():
            if not _fits(value, hints.get(name, Any)):
                raise ValueError(f"{kind.__qualname__}.{name} may not be a {type(value).__name__}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may stand where a type is stated; a number may be an array, and unusual types fit anything."""
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inside)
    if hasattr(value, "dtype"):  # an array, or a tensor where one is stated
        return not (is_dataclass(origin) or origin in (abc.Mapping, dict, str, tuple))
    if origin in (int, float):
        return isinstance(value, int | float)
    if origin is tuple:
        return isinstance(value, tuple | list)
    if origin is NoneType:
        return value is None
    if origin is Any or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin)


def _dataclass(name: str, modules: Collection[str]) -> Any:
    home, _, attribute = MOVED.get(name, name).partition(":")
    home = MOVED.get(home, home)
    if home not in modules and not home.startswith("polysite."):
        raise ValueError(f"class {name!r} does not belong to polysite or to the algorithm's own module")
    found = getattr(sys.modules.get(home), attribute, None)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"class {name!r} is not a dataclass that is known here")
    return found
