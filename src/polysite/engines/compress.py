"""Fewer bytes from a site: what it changed of the parameters that it was sent, in fewer bits.

``half`` rounds every difference to 16 bits. ``int8`` rounds it to 255 steps of equal size, as many as fit between the
largest difference of the array and its negative; the size of a step goes along. Running statistics and all other fields
are left as they are. The server adds the differences to what it sent, so an algorithm notices nothing but the rounding.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.errors import PayloadError
from polysite.payload import Payload, plain
from polysite.tree import Tree

Compress = Literal["none", "half", "int8"]
STEP = " step"  # how the name of a step's size ends
MOST = 127


def squeeze(how: Compress, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
    """What leaves the site, given what it was sent."""
    if how == "none":
        return reply
    return Payload(**{f: _squeezed(how, v, _base(f, kinds, got)) for f, v in reply.items()})


def restore(how: Compress, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
    """What the server goes on with."""
    if how == "none":
        return reply
    try:
        with np.errstate(all="ignore"):  # what is beyond all numbers is looked for later
            return Payload(**{f: _restored(v, _base(f, kinds, got)) for f, v in reply.items()})
    except (KeyError, ValueError, IndexError, AttributeError) as problem:
        raise PayloadError(f"the compressed reply does not fit what was sent: {problem}") from problem


def _base(field: str, kinds: Mapping[str, Kind], got: Payload) -> Tree | None:
    """What the differences are taken to; an update is a difference already. None: the field is left as it is."""
    if kinds.get(field) == "update":
        return {}
    return (got.get(field) or got.get("model") or {}) if kinds.get(field) == "model" else None


def _squeezed(how: Compress, value: Any, base: Tree | None) -> Any:
    if base is None:
        return value
    found: dict[str, Any] = {**tree.statistics(value)}
    for name, x in tree.trained(value).items():
        difference = plain(x) - plain(base[name]) if name in base else plain(x)
        if difference.dtype != np.float32 or not np.isfinite(difference).all():
            found[name] = x  # nothing that can be rounded; the server looks at it as it is
        elif how == "half":
            found[name] = np.clip(difference, -65504, 65504).astype(np.float16)
        else:
            step = np.float32(np.abs(difference).max(initial=0.0) / MOST)
            found[name] = np.round(difference / step).astype(np.int8) if step else np.zeros(difference.shape, np.int8)
            found[f"{name}{STEP}"] = np.array([step])
    return found


def _restored(value: Any, base: Tree | None) -> Any:
    if base is None:
        return value
    found: dict[str, Any] = {}
    for name, x in value.items():
        if name.endswith(STEP):
            continue
        packed = plain(x)
        if packed.dtype not in (np.float16, np.int8):
            found[name] = x
            continue
        if name in base and packed.shape != tuple(base[name].shape):
            raise ValueError(f"{name!r} is of shape {packed.shape} instead of {tuple(base[name].shape)}")
        step = plain(value[f"{name}{STEP}"]) if packed.dtype == np.int8 else np.ones(1, np.float32)
        if step.shape != (1,) or step.dtype != np.float32:  # another would make more of it than came
            raise ValueError(f"the step of {name!r} is {step.dtype} of shape {step.shape} and not one number")
        difference = packed.astype(np.float32) * step[0]
        found[name] = difference + plain(base[name]) if name in base else difference
    return found
