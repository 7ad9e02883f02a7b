"""What the server lets in: a reply that is broken, hostile or absurd is refused, with the reason.

An algorithm says what its sites reply (``reply``); every reply is held to it before anything is computed with it. A
round goes on with the replies that are left.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

LARGEST = 1e3  # times the model and what the other sites sent: no training goes that far in a round
MOST = 1e9  # cases, steps, learning rates: no number that counts something is larger


def screen(
    expected: Mapping[str, Kind], params: Tree, sent: Mapping[SiteId, Payload], replies: Mapping[SiteId, Payload]
) -> dict[SiteId, str]:
    """The replies to refuse and why, given what was sent and a tree like the model."""
    refused: dict[SiteId, str] = {}
    sizes: dict[SiteId, dict[str, float]] = {}
    for site in sorted(replies):
        problem = _malformed(expected, params, replies[site])
        if problem is None:
            with np.errstate(all="ignore"):  # what is beyond all numbers is infinite, and that is looked for
                sizes[site] = {f: tree.norm(v) for f, v in replies[site].items() if not isinstance(v, float)}
            problem = next((f"{f!r} is not finite" for f, n in sizes[site].items() if not math.isfinite(n)), None)
        if problem is not None:
            refused[site] = problem
            sizes.pop(site, None)
    if sizes:
        model = sent[next(iter(sizes))].get("model", params)
        refused.update(_too_large(sizes, tree.norm(model)))
    return refused


def _malformed(expected: Mapping[str, Kind], params: Tree, reply: Payload) -> str | None:
    """What is wrong with the form of a reply: its fields, names, shapes, types, numbers."""
    if reply.keys() != expected.keys():
        return f"it holds {sorted(reply) or 'nothing'} instead of {sorted(expected)}"
    for field, kind in expected.items():
        value = reply[field]
        if isinstance(value, float) != (kind in ("positive", "cost")):
            return f"{field!r} is {'a number' if isinstance(value, float) else 'a set of arrays'}"
        if isinstance(value, float):
            low = value > 0 if kind == "positive" else value >= 0
            if not (low and value <= MOST):
                return f"{field!r} is {value:g}"
            continue
        problem = _misshapen(value, tree.trained(params) if kind == "update" else params)
        if problem:
            return f"{field!r} {problem}"
    return None


def _misshapen(value: Tree, like: Tree) -> str | None:
    odd = sorted(value.keys() ^ like.keys())
    if odd:
        return f"{'lacks' if odd[0] in like else 'has an unknown'} {odd[0]!r}"
    for name, x in value.items():
        y = like[name]
        if tuple(x.shape) != tuple(y.shape):
            return f"has {name!r} of shape {tuple(x.shape)} instead of {tuple(y.shape)}"
        if _type(x) != _type(y):
            return f"has {name!r} of type {_type(x)} instead of {_type(y)}"
    return None


def _type(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _too_large(sizes: Mapping[SiteId, Mapping[str, float]], model: float) -> dict[SiteId, str]:
    """Who sent something far larger than the model and than what half of the others sent."""
    found = {}
    for site, mine in sizes.items():
        for field, size in mine.items():
            others = sorted(s[field] for i, s in sizes.items() if i != site)
            usual = max(model, others[(len(others) - 1) // 2] if others else 0.0)
            if usual and size > LARGEST * usual:
                found[site] = f"{field!r} is {size / usual:.0e} times as large as is usual"
    return found
