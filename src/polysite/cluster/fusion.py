"""Fusion of models by pairwise penalties: shrinkage coefficients, graphs and their components.

Papers: Yu, Liu, Wang and Sun, Clustered FL based on Nonconvex Pairwise Fusion, 2022 (smoothed SCAD); Zhao, Liu, Liu and
He, Medical Federated Model with Mixture of Personalized and Sharing Components, 2023 (network lasso)

    scad:  argmin over t of g(|t|) + rho/2 |t - d|^2  is  scad_share(|d|) d
    lasso: argmin over Z of 1/2 |Z - Y|^2 + weight sum over edges of |z_i - z_j|  is  Y lasso_mixture(...)

Both results are linear combinations of the given vectors. The functions here compute the coefficients from lengths and
inner products alone, so that the vectors may be as long as a network and stay on their device.
"""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import DataError

TOLERANCE = 1e-12  # relative to the largest vector: the iteration ends if nothing moves more
MAX_ITERATIONS = 20_000  # a few hundred are usual and take milliseconds


def scad_share(length: float, lam: float, a: float, xi: float, rho: float) -> float:
    """Return the factor that shrinks a difference of this length: nearly 0 if it is short, 1 if it is long.

    The penalty is quadratic below xi, then lam t, bends between lam and a lam, and is constant beyond; rho > 1/(a - 1).

    >>> [round(scad_share(t, 0.5, 3.7, 1e-3, 1.0), 3) for t in (0.4, 0.75, 1.5, 2.0)]
    [0.002, 0.333, 0.863, 1.0]
    """
    if length <= xi + lam / rho:
        return xi * rho / (lam + xi * rho)
    if length <= lam + lam / rho:
        return 1 - lam / (rho * length)
    if length <= a * lam:
        bend = (a - 1) * rho
        return max(0.0, 1 - a * lam / (bend * length)) / (1 - 1 / bend)
    return 1.0


def lasso_mixture(gram: ArrayLike, edges: Sequence[tuple[int, int]], weight: float) -> NDArray[np.float64]:
    """Return the m x m coefficients of the network lasso from the inner products of its m vectors: z_i is column i.

    ADMM iterates until nothing moves; its penalty does not depend on the size of the vectors. Subtract a common part of
    the vectors first, so that their differences are not lost to rounding.

    >>> lasso_mixture([[1.0, -1.0], [-1.0, 1.0]], [(0, 1)], 0.25).round(6).tolist()
    [[0.875, 0.125], [0.125, 0.875]]
    """
    inner = np.asarray(gram, float)
    if inner.ndim != 2 or inner.shape[0] != inner.shape[1] or not np.isfinite(inner).all():
        raise DataError(f"a mixture is found from a square table of finite inner products, not one of {inner.shape}")
    vectors, size = np.eye(len(inner)), float(np.sqrt(max(inner.diagonal().max(initial=0.0), 0.0)))
    if not edges or weight <= 0 or size == 0:
        return vectors
    ends = np.zeros((len(inner), len(edges)))
    for e, (i, j) in enumerate(edges):
        ends[i, e], ends[j, e] = 1.0, -1.0
    solve = np.linalg.inv(vectors + ends @ ends.T)
    apart, dual = np.zeros_like(ends), np.zeros_like(ends)
    mixture: NDArray[np.float64] = vectors
    for _ in range(MAX_ITERATIONS):
        before, mixture = mixture, (vectors + (apart - dual) @ ends.T) @ solve
        wanted = mixture @ ends + dual
        lengths = _lengths(inner, wanted)
        apart = wanted * np.maximum(1 - weight / np.maximum(lengths, 1e-300), 0)
        dual = wanted - apart
        moved, open_ = _lengths(inner, mixture - before), _lengths(inner, mixture @ ends - apart)
        if max(moved.max(), open_.max()) <= TOLERANCE * size:
            break
    return mixture


def _lengths(inner: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths of the vectors with these coefficients."""
    squares: NDArray[np.float64] = np.einsum("ie,ie->e", columns, inner @ columns)
    return np.sqrt(np.maximum(squares, 0.0))


def nearest_edges(points: Sequence[Sequence[float]], neighbours: int) -> tuple[tuple[int, int], ...]:
    """Return the graph that joins every point with its nearest; an edge exists if either point lists the other.

    Points of different dimensions are never neighbours.

    >>> nearest_edges([(0.0,), (1.0,), (9.0,)], 1)
    ((0, 1), (1, 2))
    """
    edges = set()
    for i, here in enumerate(points):
        others = sorted((_apart(here, there), j) for j, there in enumerate(points) if j != i)
        edges |= {(min(i, j), max(i, j)) for apart, j in others[:neighbours] if apart < inf}
    return tuple(sorted(edges))


def _apart(here: Sequence[float], there: Sequence[float]) -> float:
    return float(np.linalg.norm(np.subtract(here, there))) if len(here) == len(there) else inf


def components(names: Iterable[str], links: Iterable[tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
    """Return the connected components of a graph; the component of the first name comes first.

    >>> components("abcd", [("a", "c"), ("d", "c")])
    (('a', 'c', 'd'), ('b',))
    """
    group = {name: {name} for name in names}
    for one, other in links:
        if group[one] is not group[other]:
            group[one] |= group[other]
            for name in group[other]:
                group[name] = group[one]
    return tuple(sorted({tuple(sorted(members)) for members in group.values()}))
