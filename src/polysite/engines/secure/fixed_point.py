"""Replies as whole numbers modulo 2^64, so that masks and sums are exact.

A parameter becomes one number, round(weight * value * 2^fraction), of 64 bits in two's complement. Every other number
(a weight, a count, a statistic), which may be large or small, becomes DIGITS numbers: the digits of round(value *
2^FRACTION) in base 2^DIGIT, the last of them with the sign. Sums of digits stay below 2^63 for up to 2^20 sites, so no
digit carries into the next one. The sum of whole numbers is exact; rounding costs at most half a unit in the last place
for every site.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from polysite.algorithms.base import Kind
from polysite.errors import PayloadError
from polysite.payload import Payload, plain

DIGITS, DIGIT, FRACTION = 3, 40, 60
PARAMETERS = ("model", "update")
TOTALS = ("statistics", "counts")  # kinds of which an algorithm wants the sum; of others it wants the mean
NUMBER = "value"  # name of the array that stands for a single number

Form = tuple[tuple[str, str, tuple[int, ...]], ...]


def encode(kinds: Mapping[str, Kind], reply: Payload, fraction: int, members: int) -> Payload:
    """Return a reply as arrays of uint64: every field times its weight, and the weight.

    Args:
        kinds: Kind of every field.
        reply: The reply; without a field ``weight`` its weight is 1.
        fraction: Bits after the binary point of a parameter.
        members: Number of sites in the sum, whose parameters together must fit.
    """
    weight = float(reply.get("weight", 1.0))
    fields: dict[str, dict[str, Any]] = {"weight": {NUMBER: digits(np.array(weight))}}
    for name, value in reply.items():
        if name == "weight":
            continue
        by = 1.0 if kinds[name] in TOTALS else weight
        values = {NUMBER: np.array(value)} if isinstance(value, float) else value
        whole = kinds[name] in PARAMETERS
        fields[name] = {
            k: _rounded(name, plain(x) * np.float64(by), fraction, members) if whole else digits(plain(x) * by)
            for k, x in values.items()
        }
    return Payload(**fields)


def _rounded(field: str, values: Any, fraction: int, members: int) -> Any:
    scaled = np.rint(np.ldexp(np.asarray(values, np.float64), fraction))
    largest = float(np.abs(scaled).max(initial=0.0))
    if not largest * members < 2.0**63:
        raise PayloadError(
            f"{field!r} has values that are not finite"
            if not np.isfinite(largest)
            else f"{field!r} has values up to {largest / 2.0**fraction:.3g} after weighting, too large for a secure "
            f"sum of {members} sites with run.secure.fraction = {fraction}: lower it"
        )
    return np.ascontiguousarray(scaled.astype(np.int64)).view(np.uint64)


def digits(values: Any) -> Any:
    """Return numbers as digits in base 2^DIGIT along a new first axis, in uint64.

    >>> float(number(digits(np.array([-1.5, 2.0**60])))[0])
    -1.5
    """
    rest = np.rint(np.ldexp(np.asarray(values, np.float64), FRACTION))
    if not float(np.abs(rest).max(initial=0.0)) < 2.0 ** (DIGIT * DIGITS + 2):
        raise PayloadError("a number of the reply is not finite or too large for a secure sum")
    found = np.empty((DIGITS, *rest.shape), np.int64)
    for k in range(DIGITS - 1):
        above = np.floor(np.ldexp(rest, -DIGIT))  # exact, and so is the difference
        found[k] = rest - np.ldexp(above, DIGIT)
        rest = above
    found[DIGITS - 1] = rest
    return found.view(np.uint64)


def number(summed: Any) -> Any:
    """Return the numbers behind sums of digits, in float64."""
    signed = summed.view(np.int64).astype(np.float64)
    return sum(np.ldexp(signed[k], DIGIT * k - FRACTION) for k in reversed(range(DIGITS)))


def decode(kinds: Mapping[str, Kind], summed: Payload, fraction: int, like: Mapping[str, Any]) -> Payload:
    """Return the one reply that stands for all: means by weight, totals of statistics and counts, and the whole weight.

    Args:
        kinds: Kind of every field of a reply.
        summed: Sums of encoded replies.
        fraction: Bits after the binary point of a parameter.
        like: Arrays with the types of the parameters, by name.
    """
    weight = float(number(summed["weight"][NUMBER]))
    if not weight > 0:
        raise PayloadError(f"the weights of the replies add up to {weight:g}")
    fields: dict[str, Any] = {"weight": weight} if "weight" in kinds else {}
    for name, arrays in summed.items():
        if name == "weight":
            continue
        by = 1.0 if kinds[name] in TOTALS else weight
        if kinds[name] in PARAMETERS:
            types = {k: str(like[k].dtype).rpartition(".")[2] if k in like else "float64" for k in arrays}
            fields[name] = {
                k: (np.ldexp(x.view(np.int64).astype(np.float64), -fraction) / by).astype(types[k])
                for k, x in arrays.items()
            }
        else:
            found = {k: np.asarray(number(x) / by) for k, x in arrays.items()}
            scalar = kinds[name] not in TOTALS and set(found) == {NUMBER}
            fields[name] = float(found[NUMBER]) if scalar else found
    return Payload(**fields)


def form(reply: Payload) -> Form:
    """Return names and shapes of an encoded reply; raise PayloadError if it is none."""
    found = []
    for name in sorted(reply):
        if isinstance(reply[name], float):
            raise PayloadError(f"{name!r} is not masked")
        for k in sorted(reply[name]):
            if plain(reply[name][k]).dtype != np.uint64:
                raise PayloadError(f"{name!r} is not masked")
            found.append((name, k, tuple(reply[name][k].shape)))
    return tuple(found)


def form_of(kinds: Mapping[str, Kind], params: Mapping[str, Any]) -> Form | None:
    """Return the form of the encoded replies to an algorithm that asks for these parameters; None if it has fields of
    which only the sites know the shape."""
    found = [("weight", NUMBER, (DIGITS,))]
    for name, kind in kinds.items():
        if kind in TOTALS or kind == "cases" or name.endswith(("?", "*")):
            return None
        if kind in PARAMETERS:
            found += [(name, k, tuple(x.shape)) for k, x in params.items()]
        elif name != "weight":
            found.append((name, NUMBER, (DIGITS,)))
    return tuple(sorted(found))


def flat(encoded: Payload) -> list[Any]:
    """Return the arrays of an encoded reply, flat and in the order in which masks go over them."""
    return [encoded[name][k].reshape(-1) for name in sorted(encoded) for k in sorted(encoded[name])]
