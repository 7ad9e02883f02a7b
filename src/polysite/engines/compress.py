"""Compression of replies: the change of each parameter in fewer bits. An outgoing step.

``half`` rounds every difference to 16 bits. ``int8`` rounds it to 255 equal steps between the largest absolute
difference of the array and its negative; the step size is sent along. Running statistics and all other fields are sent
unchanged. The server adds the differences to what it sent, so an algorithm sees only the rounding. A model that the
site was not sent under the same name (IFCA and FedDiv send several) is rounded itself, which costs more accuracy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.errors import PayloadError
from polysite.payload import Payload, plain
from polysite.tree import Tree

Precision = Literal["half", "int8"]
STEP = " step"  # suffix of the name of a step size
LEVELS = 127


@dataclass(frozen=True, slots=True)
class Compress:
    """Send the difference to the received parameters in 16 or 8 bits."""

    precision: Precision
    reveals: Literal["each"] = "each"

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the compressed reply."""
        return Payload(**{f: _squeezed(self.precision, v, _base(f, kinds, got)) for f, v in reply.items()})

    def restore(self, kinds: Mapping[str, Kind], sent: Payload, reply: Payload) -> Payload:
        """Return the reply with full parameters."""
        try:
            with np.errstate(all="ignore"):  # overflow is looked for later
                return Payload(**{f: _restored(v, _base(f, kinds, sent)) for f, v in reply.items()})
        except (KeyError, ValueError, IndexError, AttributeError) as problem:
            raise PayloadError(f"the compressed reply does not fit what was sent: {problem}") from problem


def _base(field: str, kinds: Mapping[str, Kind], got: Payload) -> Tree | None:
    """Return the parameters that are subtracted from a field before compression.

    Empty for an update, which is a difference already; None for a field that is sent unchanged.
    """
    if kinds.get(field) == "update":
        return {}
    return (got.get(field) or got.get("model") or {}) if kinds.get(field) == "model" else None


def _squeezed(precision: Precision, value: Any, base: Tree | None) -> Any:
    if base is None:
        return value
    found: dict[str, Any] = {**tree.statistics(value)}
    for name, x in tree.trained(value).items():
        difference = plain(x) - plain(base[name]) if name in base else plain(x)
        if difference.dtype != np.float32 or not np.isfinite(difference).all():
            found[name] = x  # cannot be rounded; the server checks it as it is
        elif precision == "half":
            found[name] = np.clip(difference, -65504, 65504).astype(np.float16)
        else:
            step = np.float32(np.abs(difference).max(initial=0.0) / LEVELS)
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
        if step.shape != (1,) or step.dtype != np.float32:  # any other would expand in memory
            raise ValueError(f"the step of {name!r} is {step.dtype} of shape {step.shape} and not one number")
        difference = packed.astype(np.float32) * step[0]
        found[name] = difference + plain(base[name]) if name in base else difference
    return found
