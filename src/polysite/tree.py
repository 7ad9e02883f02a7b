"""Arithmetic on named arrays.

A tree maps names to leaves; a leaf is a NumPy array or a torch tensor on any device. The functions use only what both
offer, so that models stay where they are: on a GPU inside the simulator, in plain arrays after a wire.

>>> import numpy as np
>>> a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}
>>> mean([a, b], weights=[3, 1])["w"]
array([1.5, 3. ])
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

Tree = Mapping[str, Any]

# Elements in a slice of a mean, measured in bench/aggregate.py: an operation on a tensor costs more to start, one on
# an array leaves a product behind that should still be in cache when it is added.
TENSOR_SLICE, ARRAY_SLICE = 1 << 21, 1 << 17


def map(f: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply ``f`` leaf by leaf; every tree must have the same names."""
    first, *rest = trees
    for other in rest:
        if other.keys() != first.keys():
            odd = sorted(first.keys() ^ other.keys())
            raise KeyError(f"trees do not share the same names; they differ in {odd[:3]}")
    return {k: f(*(t[k] for t in trees)) for k in first}


def add(a: Tree, b: Tree) -> Tree:
    return map(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(lambda x, y: x - y, a, b)


def scale(a: Tree, s: float) -> Tree:
    return map(lambda x: x * s, a)


def zeros(a: Tree) -> Tree:
    return map(lambda x: x * 0, a)


def dot(a: Tree, b: Tree) -> float:
    """Inner product over all leaves.

    >>> import numpy as np
    >>> dot({"w": np.ones((2, 3))}, {"w": np.full((2, 3), 2.0)})
    12.0
    """
    return float(sum(float(v) for v in map(lambda x, y: x.reshape(-1) @ y.reshape(-1), a, b).values()))


def norm(a: Tree) -> float:
    return float(dot(a, a) ** 0.5)


def mean(trees: Iterable[Tree], weights: Iterable[float] | None = None) -> Tree:
    """Weighted mean; equal weights unless told otherwise. Needs room for one tree besides those given."""
    trees = list(trees)
    given = [1.0] * len(trees) if weights is None else [float(w) for w in weights]
    total = sum(given)
    if not trees or len(given) != len(trees) or not all(0 <= w < float("inf") for w in given) or total <= 0:
        raise ValueError(
            f"a mean of {len(trees)} trees needs as many finite weights, none negative, not all zero; got {given}"
        )
    shares = [w / total for w in given]
    return map(lambda *leaves: _blend(leaves, shares), *trees)


def _blend(leaves: tuple[Any, ...], shares: list[float]) -> Any:
    """The sum of share x leaf, slice by slice: the running sum stays in cache while every leaf is read once."""
    first = leaves[0]
    if any(x.shape != first.shape for x in leaves):
        raise ValueError(f"a mean needs leaves of one shape, got {sorted({tuple(x.shape) for x in leaves})}")
    tensor = hasattr(first, "new_zeros")
    out: Any = first.new_empty(first.shape) if tensor else np.empty(np.shape(first), np.result_type(first, 1.0))
    flat, columns = out.reshape(-1), [x.reshape(-1) for x in leaves]
    step = max(len(flat), 1) if getattr(first, "is_cuda", False) else TENSOR_SLICE if tensor else ARRAY_SLICE
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        part[...] = 0
        for x, share in zip(columns, shares, strict=True):
            if tensor:
                part.add_(x[start : start + step], alpha=share)  # multiplies and adds in one pass
            else:
                part += x[start : start + step] * share
    return out


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def select(a: Tree, patterns: Iterable[str]) -> Tree:
    """The leaves whose name matches one of the patterns.

    >>> sorted(select({"head.w": 1, "encoder.0.w": 2}, ["head.*"]))
    ['head.w']
    """
    patterns = tuple(patterns)
    return {k: v for k, v in a.items() if matches(k, patterns)}


def drop(a: Tree, patterns: Iterable[str]) -> Tree:
    """The leaves whose name matches none of the patterns."""
    patterns = tuple(patterns)
    return {k: v for k, v in a.items() if not matches(k, patterns)}
