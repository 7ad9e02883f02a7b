"""Arithmetic on named arrays.

A tree maps names to leaves; a leaf is a NumPy array or a torch tensor on any device. The functions use only what both
offer, so that models stay where they are: on a GPU inside the simulator, in plain arrays after a wire.

>>> import numpy as np
>>> a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}
>>> mean([a, b], weights=[3, 1])["w"]
array([1.5, 3. ])
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

Tree = Mapping[str, Any]

STATISTICS = ("*running_mean", "*running_var")  # of batch normalisation: they travel with a model, nobody trains them

TENSOR_SLICE, ARRAY_SLICE = 1 << 22, 1 << 18  # elements in a slice of a mean; measured in bench/aggregate.py


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
    return float(sum(map(lambda x, y: x.reshape(-1) @ y.reshape(-1), a, b).values()))  # waits for a GPU once


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
    for name in trees[0]:
        shapes = {tuple(t[name].shape) for t in trees if t.keys() == trees[0].keys()}
        if len(shapes) != 1:
            raise ValueError(f"a mean needs trees of the same names and shapes; {name!r} has {sorted(shapes)}")
    if all(hasattr(x, "add_") for x in trees[0].values()):
        return map(lambda *leaves: _mean_of_tensors(leaves, shares), *trees)
    return _mean_of_arrays(trees, shares)


def _mean_of_tensors(leaves: tuple[Any, ...], shares: list[float]) -> Any:
    """The sum of share x leaf in slices: every leaf is read once, while the running sum stays in cache."""
    out = _room_for(leaves[0])
    flat, columns = out.reshape(-1), [x.reshape(-1) for x in leaves]
    step = len(flat) if getattr(out, "is_cuda", False) else TENSOR_SLICE
    for start in range(0, len(flat), max(step, 1)):
        part = flat[start : start + step].zero_()
        for x, share in zip(columns, shares, strict=True):
            part.add_(x[start : start + step], alpha=share)  # multiplies and adds in one pass, with all threads
    return out


def _room_for(x: Any) -> Any:
    """Memory for a result. NumPy asks for huge pages, which spares a large model thousands of page faults."""
    wrap = getattr(sys.modules.get(type(x).__module__), "from_numpy", None)
    if wrap is None or getattr(x, "is_cuda", False):
        return x.new_empty(x.shape)
    return wrap(np.empty(tuple(x.shape), str(x.dtype).rpartition(".")[2]))


def _mean_of_arrays(trees: list[Tree], shares: list[float]) -> Tree:
    """The same for arrays. NumPy works on one core and leaves a product behind, but lets threads go on beside it."""
    out = {k: np.empty(np.shape(x), np.result_type(x, 1.0)) for k, x in trees[0].items()}
    jobs = [
        (total, leaves, slice(start, start + ARRAY_SLICE))
        for total, leaves in ((out[k].reshape(-1), [t[k].reshape(-1) for t in trees]) for k in out)
        for start in range(0, len(total), ARRAY_SLICE)
    ]

    def work(mine: list[tuple[Any, list[Any], slice]]) -> None:
        room: dict[Any, Any] = {}  # one buffer per type of number
        for total, leaves, here in mine:
            part = total[here]
            if part.dtype not in room:
                room[part.dtype] = np.empty(ARRAY_SLICE, part.dtype)
            product = room[part.dtype][: len(part)]
            np.multiply(leaves[0][here], shares[0], out=part)
            for x, share in zip(leaves[1:], shares[1:], strict=True):
                np.multiply(x[here], share, out=product)
                np.add(part, product, out=part)

    threads = min(len(jobs), os.cpu_count() or 1, 8)
    if threads < 2:
        work(jobs)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, (jobs[i::threads] for i in range(threads))))
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


def trained(a: Tree) -> Tree:
    """A model without its running statistics."""
    return drop(a, STATISTICS)


def statistics(a: Tree) -> Tree:
    """The running statistics of a model."""
    return select(a, STATISTICS)


def trimmed_mean(trees: Iterable[Tree], cut: int) -> Tree:
    """Coordinate by coordinate, the mean without the ``cut`` smallest and the ``cut`` largest values.

    >>> trimmed_mean([{"w": np.array([x])} for x in (0.0, 1.0, 2.0, 900.0)], 1)["w"]
    array([1.5])
    """

    def leaf(*leaves: Any) -> Any:
        library = sys.modules[type(leaves[0]).__module__]  # NumPy or torch, whose sort answers with its indices too
        ordered = library.sort(library.stack(leaves), 0)
        ordered = getattr(ordered, "values", ordered)
        return ordered[cut : len(leaves) - cut].mean(0)

    return map(leaf, *trees)
