"""Arithmetic on named arrays.

A tree maps names to leaves; a leaf is a NumPy array or a torch tensor on any device. The functions use only operations
that both offer, so models stay on their device: on a GPU inside the simulator, in plain arrays after a transfer.

>>> import numpy as np
>>> a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}
>>> mean([a, b], weights=[3, 1])["w"]
array([1.5, 3. ])
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from polysite import machine

Tree = Mapping[str, Any]

STATISTICS = ("*running_mean", "*running_var")  # of batch normalisation: part of a model, but not trained

TENSOR_SLICE, ARRAY_SLICE = 1 << 22, 1 << 18  # elements per slice of a mean; measured in bench/aggregate.py


def map(f: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply ``f`` leaf by leaf; all trees must have the same names."""
    first, *rest = trees
    for other in rest:
        if other.keys() != first.keys():
            odd = sorted(first.keys() ^ other.keys())
            raise KeyError(f"trees do not share the same names; they differ in {odd[:3]}")
    return {k: f(*(t[k] for t in trees)) for k in first}


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b."""
    return map(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b."""
    return map(lambda x, y: x - y, a, b)


def scale(a: Tree, s: float) -> Tree:
    """Return s * a."""
    return map(lambda x: x * s, a)


def zeros(a: Tree) -> Tree:
    """Return a tree of zeros with the names, shapes and devices of ``a``."""
    return map(lambda x: x * 0, a)


def dot(a: Tree, b: Tree) -> float:
    """Return the inner product over all leaves.

    >>> import numpy as np
    >>> dot({"w": np.ones((2, 3))}, {"w": np.full((2, 3), 2.0)})
    12.0
    """
    return float(sum(map(lambda x, y: x.reshape(-1) @ y.reshape(-1), a, b).values()))  # one synchronisation with a GPU


def norm(a: Tree) -> float:
    """Return the Euclidean norm over all leaves."""
    return float(dot(a, a) ** 0.5)


def mean(trees: Iterable[Tree], weights: Iterable[float] | None = None) -> Tree:
    """Return the weighted mean, by default with equal weights. It allocates memory for one more tree."""
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
    """Sum share * leaf slice by slice: every leaf is read once, and the running sum stays in the CPU's cache."""
    out = _empty_like(leaves[0])
    flat, columns = out.reshape(-1), [x.reshape(-1) for x in leaves]
    step = len(flat) if getattr(out, "is_cuda", False) else TENSOR_SLICE
    for start in range(0, len(flat), max(step, 1)):
        piece = flat[start : start + step].zero_()
        for x, share in zip(columns, shares, strict=True):
            piece.add_(x[start : start + step], alpha=share)  # multiplies and adds in one pass, with all threads
    return out


def _empty_like(x: Any) -> Any:
    """Allocate a result. NumPy requests huge pages, which avoids thousands of page faults for a large model."""
    wrap = getattr(sys.modules.get(type(x).__module__), "from_numpy", None)
    if wrap is None or getattr(x, "is_cuda", False):
        return x.new_empty(x.shape)
    return wrap(np.empty(tuple(x.shape), str(x.dtype).rpartition(".")[2]))


def _mean_of_arrays(trees: list[Tree], shares: list[float]) -> Tree:
    """Do the same for arrays. NumPy uses one core and needs a buffer for each product, so threads share the work."""
    out = {k: np.empty(np.shape(x), np.result_type(x, 1.0)) for k, x in trees[0].items()}
    jobs = [
        (total, leaves, slice(start, start + ARRAY_SLICE))
        for total, leaves in ((out[k].reshape(-1), [t[k].reshape(-1) for t in trees]) for k in out)
        for start in range(0, len(total), ARRAY_SLICE)
    ]

    def work(assigned: list[tuple[Any, list[Any], slice]]) -> None:
        buffers: dict[Any, Any] = {}  # by dtype
        for total, leaves, here in assigned:
            piece = total[here]
            if piece.dtype not in buffers:
                buffers[piece.dtype] = np.empty(ARRAY_SLICE, piece.dtype)
            product = buffers[piece.dtype][: len(piece)]
            np.multiply(leaves[0][here], shares[0], out=piece)
            for x, share in zip(leaves[1:], shares[1:], strict=True):
                np.multiply(x[here], share, out=product)
                np.add(piece, product, out=piece)

    small = sum(len(x.reshape(-1)) for x in out.values()) < ARRAY_SLICE  # starting threads would take longer
    threads = 1 if small else min(len(jobs), machine.cores(), 8)
    if threads < 2:
        work(jobs)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, (jobs[i::threads] for i in range(threads))))
    return out


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def select(a: Tree, patterns: Iterable[str]) -> Tree:
    """Return the leaves with names that match one of the patterns.

    >>> sorted(select({"head.w": 1, "encoder.0.w": 2}, ["head.*"]))
    ['head.w']
    """
    patterns = tuple(patterns)
    return {k: v for k, v in a.items() if matches(k, patterns)}


def drop(a: Tree, patterns: Iterable[str]) -> Tree:
    """Return the leaves with names that match none of the patterns."""
    patterns = tuple(patterns)
    return {k: v for k, v in a.items() if not matches(k, patterns)}


def trained(a: Tree) -> Tree:
    """Return a model without its running statistics."""
    return drop(a, STATISTICS)


def statistics(a: Tree) -> Tree:
    """Return the running statistics of a model."""
    return select(a, STATISTICS)


def trimmed_mean(trees: Iterable[Tree], cut: int) -> Tree:
    """Return the mean of every coordinate without its ``cut`` smallest and ``cut`` largest values.

    >>> trimmed_mean([{"w": np.array([x])} for x in (0.0, 1.0, 2.0, 900.0)], 1)["w"]
    array([1.5])
    """

    def leaf(*leaves: Any) -> Any:
        library = sys.modules[type(leaves[0]).__module__]  # NumPy, or torch, which returns values and indices
        ordered = library.sort(library.stack(leaves), 0)
        ordered = getattr(ordered, "values", ordered)
        return ordered[cut : len(leaves) - cut].mean(0)

    return map(leaf, *trees)
