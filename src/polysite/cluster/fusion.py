"""Fusion of models by pairwise penalties: shrinkage coefficients and graphs.

Papers: Yu, Liu, Wang and Sun, Clustered FL based on Nonconvex Pairwise Fusion, 2022 (smoothed SCAD); Zhao, Liu, Liu and
He, Medical Federated Model with Mixture of Personalized and Sharing Components, 2023 (network lasso)

    scad:  argmin over t of g(|t|) + rho/2 |t - d|^2  is  scad_share(|d|) d
    lasso: argmin over Z of 1/2 |Z - Y|^2 + weight sum over edges of |z_i - z_j|  is  Y lasso_mixture(...)

Both results are linear combinations of the given vectors. The functions here compute the coefficients from lengths and
inner products alone, so that the vectors may be as long as a network and stay on their device.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import DataError

TOLERANCE = 1e-12  # relative to the largest vector: the iteration ends if nothing moves more
MAX_ITERATIONS = 20_000  # about a hundred are usual and take milliseconds
WORK = 400_000_000  # numbers that all iterations together may compute for the edges: some 1000 iterations for 400 sites
FEWEST_ITERATIONS = 200  # whatever the size; the authors' program stops after 25 or 200
RANK = 1e-14  # eigenvalues below this share of the largest are rounding


def scad_share(length: float, lam: float, a: float, xi: float, rho: float) -> float:
    """Return the factor that shrinks a difference of this length: nearly 0 if it is short, 1 if it is long.

    The penalty is quadratic below xi, then lam t, bends between lam and a lam, and is constant beyond; rho > 1/(a - 1).

    >>> [round(scad_share(t, 0.5, 3.7, 1e-2, 2.0), 3) for t in (0.2, 0.5, 1.5, 2.0)]
    [0.038, 0.5, 0.947, 1.0]
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

    ADMM iterates until nothing moves, or until a bound on its work (``WORK``) is reached. Subtract a common part of the
    vectors first, so that their differences are not lost to rounding.

    >>> lasso_mixture([[1.0, -1.0], [-1.0, 1.0]], [(0, 1)], 0.25).round(6).tolist()
    [[0.875, 0.125], [0.125, 0.875]]
    """
    inner = np.asarray(gram, float)
    if inner.ndim != 2 or inner.shape[0] != inner.shape[1] or not np.isfinite(inner).all():
        raise DataError(f"a mixture is found from a square table of finite inner products, not one of {inner.shape}")
    size = float(np.sqrt(max(inner.diagonal().max(initial=0.0), 0.0)))
    if not edges or weight <= 0 or size == 0:
        return np.eye(len(inner))
    values, directions = np.linalg.eigh(inner)
    kept = values > RANK * values[-1]
    lengths = np.sqrt(values[kept])
    vectors = directions[:, kept] * lengths  # rows with the given inner products, however long the vectors are
    fused = _network_lasso(vectors, np.array(edges), weight, TOLERANCE * size)
    mixture: NDArray[np.float64] = np.eye(len(inner)) + (directions[:, kept] / lengths) @ (fused - vectors).T
    return mixture


def _network_lasso(
    vectors: NDArray[np.float64], edges: NDArray[np.int64], weight: float, tolerance: float
) -> NDArray[np.float64]:
    """Return argmin over Z of 1/2 |Z - vectors|^2 + weight sum over edges of |z_i - z_j|; z_i is a row.

    In the first iterations the penalty of ADMM is doubled or halved where one of its two residuals is far larger.
    """
    from scipy.sparse import csr_array

    one, other, order = edges[:, 0], edges[:, 1], np.arange(len(edges))
    signs = np.repeat([1.0, -1.0], len(edges))
    ends = csr_array((signs, (np.r_[one, other], np.r_[order, order])), shape=(len(vectors), len(edges)))
    frequencies, modes = np.linalg.eigh((ends @ ends.T).toarray())
    penalty, z = 1.0, vectors
    apart = np.zeros((len(edges), vectors.shape[1]))
    dual = np.zeros_like(apart)
    inverse = (modes / (1 + penalty * frequencies)) @ modes.T
    for iteration in range(max(FEWEST_ITERATIONS, min(MAX_ITERATIONS, WORK // apart.size))):
        before, last, z = z, apart, inverse @ (vectors + penalty * (ends @ (apart - dual)))
        differences = z[one] - z[other]
        wanted = differences + dual
        shrunk = np.maximum(1 - weight / penalty / np.maximum(_lengths(wanted), 1e-300), 0)
        apart = wanted * shrunk[:, None]
        dual = wanted - apart
        gaps = _lengths(differences - apart)
        if max(_lengths(z - before).max(), gaps.max()) <= tolerance:
            break
        if iteration < 200 and iteration % 10 == 9:
            primal, change = np.linalg.norm(gaps), penalty * np.linalg.norm(apart - last)
            factor = 2.0 if primal > 10 * change else 0.5 if change > 10 * primal else 1.0
            penalty, dual = penalty * factor, dual / factor
            inverse = (modes / (1 + penalty * frequencies)) @ modes.T if factor != 1 else inverse
    return z


def _lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return found


def nearest_edges(points: Sequence[Sequence[float]], neighbours: int) -> tuple[tuple[int, int], ...]:
    """Return the graph that joins every point with its nearest; an edge exists if either point lists the other.

    Points of different dimensions are never neighbours.

    >>> nearest_edges([(0.0,), (1.0,), (9.0,)], 1)
    ((0, 1), (1, 2))
    """
    edges = set()
    for length in {len(point) for point in points}:
        alike = [i for i, point in enumerate(points) if len(point) == length]
        table = np.array([points[i] for i in alike], float).reshape(len(alike), length)
        for n, i in enumerate(alike):
            apart = np.linalg.norm(table - table[n], axis=1)
            apart[n] = inf  # no point is its own neighbour
            nearest = np.argsort(apart, kind="stable")[: min(neighbours, len(alike) - 1)]  # ties: the first
            edges |= {(min(i, alike[j]), max(i, alike[j])) for j in nearest if apart[j] < inf}
    return tuple(sorted(edges))
