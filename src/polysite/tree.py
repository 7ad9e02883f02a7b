"""Arithmetic on named arrays.

A tree maps names to leaves; a leaf is a NumPy array or a torch tensor on any device. The functions use only operations
that both offer, so models stay on their device: on a GPU inside the simulator, in plain arrays after a transfer.

>>> import numpy as np
>>> a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}
>>> mean([a, b], weights=[3, 1])["w"]
array([1.5, 3. ])
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite import machine
from polysite.buffers import room

Tree = Mapping[str, Any]
T = TypeVar("T", int, str)

STATISTICS = ("*running_mean", "*running_var")  # of batch normalisation: part of a model, but not trained

TENSOR_SLICE, ARRAY_SLICE = 1 << 22, 1 << 18  # elements per slice of a mean; measured in bench/aggregate.py
BLOCK = 1 << 22  # elements of all trees that a block of ``gram`` or ``mixtures`` holds at once
COLUMNS = 1 << 21  # elements of all rows that ``row_mixtures`` reads at once: they stay in the CPU's cache
MANY = 64  # trees from which ``mixtures`` multiplies tensors on the CPU by NumPy, which is up to 1.7 times as fast
NARROW = 1 << 21  # elements of a block of more than MANY trees on the CPU: it stays in the CPU's cache
CANCELLED = 1e-9  # squared distance over squared lengths below which a difference of inner products is inexact
COARSE = 1e-2  # the same for inner products in float32


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
    return _add_shares(_room_for_sum(trees[0]), trees, shares, fresh=True)


def empty_like(x: Any) -> Any:
    """Allocate a result. NumPy requests huge pages, which avoids thousands of page faults for a large model."""
    if isinstance(x, np.ndarray):
        return np.empty(x.shape, x.dtype)
    wrap = getattr(sys.modules.get(type(x).__module__), "from_numpy", None)
    if wrap is None or getattr(x, "is_cuda", False):
        return x.new_empty(x.shape)
    return wrap(np.empty(tuple(x.shape), str(x.dtype).rpartition(".")[2]))


def used_again_like(x: Any) -> Any:
    """Allocate a result, on the CPU in memory of an earlier one that is gone: fresh memory is slow."""
    if getattr(x, "is_cuda", False):
        return x.new_empty(x.shape)
    like = np.asarray(x)
    return _like(x, np.frombuffer(room(like.nbytes), like.dtype).reshape(like.shape))


def add_share(total: Tree | None, a: Tree, share: float) -> Tree:
    """Return total + share * a in the memory of ``total``; None is the start of a sum.

    A sum over all trees, in order, with the shares of a mean has the bits of ``mean`` and needs one tree at a time.

    >>> add_share(add_share(None, {"w": np.array([1.0, 2.0])}, 0.75), {"w": np.array([3.0, 6.0])}, 0.25)["w"]
    array([1.5, 3. ])
    """
    return _add_shares(_room_for_sum(a) if total is None else total, [a], [share], fresh=total is None)


def _room_for_sum(a: Tree) -> Tree:
    """Allocate a tree like ``a`` that can hold fractions."""
    if _are_tensors(a):
        return map(empty_like, a)
    return map(lambda x: np.empty(np.shape(x), np.result_type(x, 1.0)), a)


def _are_tensors(a: Tree) -> bool:
    return all(hasattr(x, "add_") for x in a.values())


def _add_shares(total: Tree, trees: Sequence[Tree], shares: Sequence[float], fresh: bool) -> Tree:
    """Add share * tree to ``total`` for all trees, in order; what ``total`` holds counts as zero if it is ``fresh``."""
    flat = map(lambda out, *leaves: (out.reshape(-1), [x.reshape(-1) for x in leaves]), total, *trees)
    if not _are_tensors(trees[0]):
        _add_arrays(list(flat.values()), shares, fresh)
        return total
    for out, leaves in flat.values():
        _add_tensors(out, leaves, shares, fresh)
    return total


def _add_tensors(out: Any, leaves: Sequence[Any], shares: Sequence[float], fresh: bool) -> None:
    """Add slice by slice: every leaf is read once, and the running sum stays in the CPU's cache.

    The end of a slice may be rounded differently, so all sums have the same slices.
    """
    step = len(out) if getattr(out, "is_cuda", False) else TENSOR_SLICE
    for start in range(0, len(out), max(step, 1)):
        piece = out[start : start + step]
        if fresh:
            piece.zero_()
        for x, share in zip(leaves, shares, strict=True):
            piece.add_(x[start : start + step], alpha=share)  # multiplies and adds in one pass, with all threads


def _add_arrays(sums: Sequence[tuple[Any, list[Any]]], shares: Sequence[float], fresh: bool) -> None:
    """Do the same for arrays. NumPy uses one core and needs a buffer for each product, so threads share the work."""
    jobs = [
        (out, leaves, slice(start, start + ARRAY_SLICE))
        for out, leaves in sums
        for start in range(0, len(out), ARRAY_SLICE)
    ]

    def work(assigned: list[tuple[Any, list[Any], slice]]) -> None:
        buffers: dict[Any, Any] = {}  # by dtype
        for out, leaves, here in assigned:
            piece = out[here]
            if piece.dtype not in buffers:
                buffers[piece.dtype] = np.empty(ARRAY_SLICE, piece.dtype)
            product = buffers[piece.dtype][: len(piece)]
            for k, (x, share) in enumerate(zip(leaves, shares, strict=True)):
                if fresh and k == 0:
                    np.multiply(x[here], share, out=piece)
                else:
                    np.multiply(x[here], share, out=product)
                    np.add(piece, product, out=piece)

    small = sum(len(out) for out, _ in sums) < ARRAY_SLICE  # starting threads would take longer
    threads = 1 if small else min(len(jobs), machine.cores(), 8)
    if threads < 2:
        work(jobs)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, (jobs[i::threads] for i in range(threads))))


def gram(trees: Sequence[Tree], origin: Tree | None = None, coarse: bool = False) -> NDArray[np.float64]:
    """Return the inner products of all pairs of trees, in float64; those of their differences from ``origin``.

    Every leaf is read once, in blocks, so the memory needed depends neither on the size of a tree nor on their number.
    If ``coarse``, the products of more than MANY trees of float32 on the CPU are in float32 inside a block, which takes
    half of the time: the error is about 1e-6 of the lengths of the two trees.

    >>> gram([{"w": np.array([1.0, 2.0])}, {"w": np.array([0.0, 1.0])}]).tolist()
    [[5.0, 2.0], [2.0, 1.0]]
    """
    fast = coarse and origin is not None and _are_many(trees) and _in_float32(trees[0])
    found = _products(_blocks(trees, origin, coarse=fast), len(trees))
    if fast and not np.isfinite(found).all():  # too large for float32
        return gram(trees, origin)
    return found


def squared_distances(trees: Sequence[Tree], exact: bool = False) -> NDArray[np.float64]:
    """Return the squared Euclidean distances of all pairs of trees, in float64; 0 for equal trees.

    They follow from inner products about the mean of the trees. Trees that are too close for that, compared with their
    distance from the mean, are measured again about the mean of their group. For more than MANY trees of float32 on the
    CPU the products are about the first tree and in float32, with an error of about 1e-5; unless ``exact``, or for
    trees that are close.

    >>> squared_distances([{"w": np.array([1.0, 2.0])}, {"w": np.array([0.0, 1.0])}]).tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """
    coarse = not exact and _are_many(trees) and _in_float32(trees[0])
    blocks = _blocks(trees, trees[0] if trees else None, centred=not coarse, coarse=coarse)
    products = _products(blocks, len(trees))  # equal trees stay equal
    if coarse and not np.isfinite(products).all():  # too large for float32
        return squared_distances(trees, exact=True)
    lengths = products.diagonal()
    squares = np.maximum(lengths[:, None] + lengths - 2 * products, 0.0)
    np.fill_diagonal(squares, 0.0)
    near = np.triu(squares < (COARSE if coarse else CANCELLED) * (lengths[:, None] + lengths), 1)
    for group in components(range(len(trees)), zip(*np.nonzero(near), strict=True)):
        if len(group) == 1:
            continue
        if coarse or len(group) < len(trees):
            again = squared_distances([trees[i] for i in group], exact=True)
        else:
            again = np.array([[norm(sub(trees[i], trees[j])) ** 2 for j in group] for i in group])
        here = np.ix_(group, group)
        squares[here] = np.where((near | near.T)[here], again, squares[here])
    return squares


def cosines(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines of all pairs from their inner products: 1 on the diagonal, 0 where a tree is zero.

    >>> cosines(np.array([[4.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    [[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    lengths = np.sqrt(products.diagonal())
    both = lengths[:, None] * lengths
    found: NDArray[np.float64] = np.divide(products, both, out=np.zeros_like(products), where=both > 0)
    np.fill_diagonal(found, 1.0)
    return found


def mixtures(trees: Sequence[Tree], coefficients: ArrayLike, origin: Tree | None = None) -> Sequence[Tree]:
    """Return a linear combination of the trees for every row of coefficients; with ``origin``, origin + a combination
    of the differences from it.

    >>> [t["w"].tolist() for t in mixtures([{"w": np.array([1.0])}, {"w": np.array([3.0])}], [[0.5, 0.5], [1, -1]])]
    [[2.0], [-2.0]]
    """
    shares = np.asarray(coefficients, float)
    found: list[dict[str, Any]] = [{} for _ in shares]
    factors_of: dict[Any, Any] = {}  # by kind of leaf: a copy to a GPU makes the host wait
    for name, whole in trees[0].items() if found else ():
        leaves = [t[name].reshape(-1) for t in trees]
        start = None if origin is None else origin[name].reshape(-1)
        if _are_many(trees):
            leaves, start = [np.asarray(x) for x in leaves], None if start is None else np.asarray(start)
        first = leaves[0]
        library = sys.modules[type(first).__module__]
        kind = first.dtype, getattr(first, "device", None)
        if kind not in factors_of:
            to_tensor = getattr(first, "new_tensor", None)
            factors_of[kind] = to_tensor(shares) if to_tensor else shares.astype(first.dtype)
        factors = factors_of[kind]
        out: Any = _empty_rows(first, len(shares))
        held = product = out[:0]
        for here in _slices(len(leaves[0]), len(trees), NARROW if _are_many(trees) else BLOCK):
            if tuple(held.shape) != (len(trees), here.stop - here.start):  # reused: fresh memory is slow
                held, product = (_empty_rows(leaves[0][here], count) for count in (len(trees), len(shares)))
            rows = library.stack([x[here] for x in leaves], out=held)
            if start is not None:
                rows -= start[here]
            if start is None and library is np:
                np.matmul(factors, rows, out=out[:, here])
                continue
            piece = library.matmul(factors, rows, out=product)
            out[:, here] = piece if start is None else piece + start[here]
        for k, tree in enumerate(found):
            tree[name] = _like(whole, out[k]).reshape(whole.shape)
    return found


def _like(x: Any, array: Any) -> Any:
    """Return an array in the library of ``x``, without a copy."""
    wrap = getattr(sys.modules[type(x).__module__], "from_numpy", None)
    return wrap(array) if wrap is not None and isinstance(array, np.ndarray) else array


def _empty_rows(x: Any, count: int) -> Any:
    """Allocate ``count`` flat leaves like ``x``."""
    if hasattr(x, "new_empty"):
        return empty_like(x.reshape(1, -1).expand(count, -1))
    return np.frombuffer(room(count * x.nbytes), x.dtype).reshape(count, -1)  # of earlier rounds, if there is some


def _blocks(trees: Sequence[Tree], origin: Tree | None, centred: bool = False, coarse: bool = False) -> Iterator[Any]:
    """Yield the leaves of all trees as rows of float64 matrices, each valid until the next one is asked for.

    With ``origin`` they are the differences from it; if ``centred``, then also from the mean of the rows; if
    ``coarse``, in float32 and on the CPU.
    """
    kind, elements = np.dtype(np.float32 if coarse else np.float64), NARROW if coarse else BLOCK
    memory: NDArray[Any] = np.empty(0, kind)
    for name in trees[0] if trees else ():
        leaves = [t[name].reshape(-1) for t in trees]
        start = None if origin is None else origin[name].reshape(-1)
        on_gpu = getattr(leaves[0], "is_cuda", False)
        if not on_gpu:
            leaves, start = [np.asarray(x) for x in leaves], None if start is None else np.asarray(start)
        for here in _slices(len(leaves[0]), len(trees), elements):
            if on_gpu:
                rows = stacked([x[here] for x in leaves]).double()
                rows = rows if start is None else rows - start[here].double()
                yield rows - rows.mean(0) if centred else rows
                continue
            size = len(trees) * (here.stop - here.start)
            memory = memory if memory.size >= size else np.empty(size, kind)
            block = memory[:size].reshape(len(trees), -1)
            for row, x in zip(block, leaves, strict=True):
                if start is None:
                    row[:] = x[here]
                else:
                    np.subtract(x[here], start[here], out=row, dtype=kind)
            if centred:
                block -= block.mean(0)
            yield block


def _are_many(trees: Sequence[Tree]) -> bool:
    """Whether these are so many trees on the CPU that their products are worth small blocks and NumPy."""
    return len(trees) > MANY and not any(getattr(x, "is_cuda", False) for x in trees[0].values())


def _in_float32(a: Tree) -> bool:
    return all(np.asarray(x).dtype == np.float32 for x in a.values())


def _slices(length: int, trees: int, elements: int = BLOCK) -> Iterator[slice]:
    step = max(elements // max(trees, 1), 1)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _products(blocks: Iterable[Any], count: int) -> NDArray[np.float64]:
    """Return the sum of the products of all rows of blocks; those on a GPU are added there, and transferred once."""
    total: Any = np.zeros((count, count))
    for rows in blocks:
        if hasattr(rows, "new_zeros") and isinstance(total, np.ndarray):
            total = rows.new_zeros((count, count))
        total += rows @ rows.T
    found: NDArray[np.float64] = total.cpu().numpy() if hasattr(total, "cpu") else total
    return found


def sums(leaves: Iterable[Any]) -> list[float]:
    """Return the sum of every leaf, with one transfer from a GPU for all of them.

    >>> sums([np.array([1, 2]), np.array([0.5])])
    [3.0, 0.5]
    """
    found = [x.sum() for x in leaves]
    if found and getattr(found[0], "is_cuda", False):
        return [float(x) for x in stacked(found).tolist()]
    return [float(x) for x in found]


def components(members: Iterable[T], links: Iterable[tuple[T, T]]) -> tuple[tuple[T, ...], ...]:
    """Return the connected components of a graph, sorted.

    >>> components("abcd", [("a", "c"), ("d", "c")])
    (('a', 'c', 'd'), ('b',))
    """
    group = {member: {member} for member in members}
    for one, other in links:
        if group[one] is not group[other]:
            group[one] |= group[other]
            for member in group[other]:
                group[member] = group[one]
    return tuple(sorted({tuple(sorted(each)) for each in group.values()}))


def flat(a: Tree) -> Any:
    """Return all elements of a tree as one vector.

    >>> flat({"a": np.array([[1, 2]]), "b": np.array([3])}).tolist()
    [1, 2, 3]
    """
    leaves = [x.reshape(-1) for x in a.values()]
    return sys.modules[type(leaves[0]).__module__].concatenate(leaves)


def rows_like(x: Any, count: int) -> Any:
    """Return zeros in the shape of ``count`` leaves like ``x``, one after the other."""
    size = (count, *x.shape)
    return x.new_zeros(size) if hasattr(x, "new_zeros") else np.zeros(size, x.dtype)


def stacked(leaves: Sequence[Any]) -> Any:
    """Return leaves as rows of a new array or tensor."""
    return sys.modules[type(leaves[0]).__module__].stack(leaves)


def column_like(rows: Any, values: NDArray[np.float64]) -> Any:
    """Return numbers, one for each row, in the type of the rows."""
    shape = (len(values), *(1 for _ in rows.shape[1:]))
    return (rows.new_tensor(values) if hasattr(rows, "new_tensor") else values.astype(rows.dtype)).reshape(shape)


def row_mixtures(rows: Tree, chosen: Sequence[tuple[list[int], NDArray[np.float64]]]) -> Sequence[Tree]:
    """Return a tree for each of ``chosen``: the sum of these rows of every leaf by these factors.

    >>> row_mixtures({"w": np.array([[1.0], [2.0], [4.0]])}, [([0, 2], np.array([1.0, 0.5]))])[0]["w"].tolist()
    [3.0]
    """
    found: list[dict[str, Any]] = [{} for _ in chosen]
    for name, leaf in rows.items() if chosen else ():
        flat, out = leaf.reshape(len(leaf), -1), _empty_rows(leaf[0], len(chosen))
        weights = [flat.new_tensor(f) if hasattr(flat, "new_tensor") else f.astype(flat.dtype) for _, f in chosen]
        wide = max(COLUMNS // len(flat), 1024) // 64 * 64  # a multiple of what a processor multiplies at once
        wide = wide if str(getattr(flat, "device", "")) == "cpu" and hasattr(flat, "new_tensor") else out.shape[1]
        for start in range(0, out.shape[1], max(wide, 1)):
            here = slice(start, start + wide)
            for row, (places, _), factors in zip(out, chosen, weights, strict=True):
                row[here] = factors @ flat[:, here][places]
        for k, tree in enumerate(found):
            tree[name] = out[k].reshape(leaf.shape[1:])
    return found


def functions(x: Any, *names: str) -> tuple[Callable[..., Any], ...]:
    """Return functions of the library of a leaf, by the names that they have in NumPy and in torch."""
    return tuple(getattr(sys.modules[type(x).__module__], name) for name in names)


def memory(a: Tree) -> int:
    """Return the bytes of memory of the device on which a tree is."""
    x = next(iter(a.values()), None)
    if getattr(x, "is_cuda", False):
        library = sys.modules[type(x).__module__]
        return int(library.cuda.get_device_properties(x.device).total_memory)  # type: ignore[union-attr]
    return machine.memory().total


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
