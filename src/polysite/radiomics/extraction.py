"""Extraction of the 93 features of an image inside a mask, on all cores.

The steps are: crop to the mask; compute grey levels; one pass over all neighbours of every voxel for dependences and
differences, and one over those ahead for pairs, runs and zones; then the formulas. Every thread has a range of voxels
and its own tables of integers, so that their sum does not depend on the number of threads.

>>> image = np.arange(27.0).reshape(3, 3, 3)
>>> values = features(image, image > 3, settings=Settings(bin_width=5))
>>> len(values), values["firstorder_Mean"], values["glszm_ZonePercentage"]
(93, 15.0, 0.34782608695652173)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polysite.compiled import compiled
from polysite.errors import DataError
from polysite.machine import cores
from polysite.radiomics import formulas, kernels
from polysite.radiomics.formulas import NAMES, Counts, Direction, Floats, Values, Zones
from polysite.radiomics.settings import Settings, check, check_values

MAX_TABLE_BYTES = 1 << 27  # of all threads; with many grey levels, fewer directions and threads at a time
ROUNDING = 1e-5  # relative size below which a mean is rounding error
SMALL = 256  # zones of fewer voxels are counted in a table, larger ones in a list

Voxels = NDArray[np.uint8]
Levels = NDArray[np.uint16]
Vector = tuple[int, int, int]

AHEAD: list[Vector] = [(i, j, k) for i, j, k in product((-1, 0, 1), repeat=3) if (i, j, k) > (0, 0, 0)]  # 13 of 26


def features(
    image: NDArray[Any],
    mask: NDArray[Any],
    *,
    spacing: Sequence[float] | None = None,
    settings: Settings = Settings(),
    threads: int | None = None,
) -> dict[str, float]:
    """Return the features of an image inside a mask, by PyRadiomics' names (`NAMES`).

    NaN stands for a feature that this mask leaves undefined, as in PyRadiomics: those of the GLCM if no two voxels
    touch, those of the GLRLM if no two lie on a line, the robust deviation of two voxels.

    Args:
        image: An image with two or three axes, in any order.
        mask: Array of the same shape; the region has the value ``settings.label``.
        spacing: Voxel size in mm per axis, 1 by default; only TotalEnergy depends on it.
        settings: Settings of the extraction.
        threads: Number of threads; None for all cores.
    """
    spacing = spacing or (1.0,) * image.ndim
    check(image.shape, mask.shape, spacing)
    image, inside = _laid_out(image, mask, settings.label)
    workers = threads or cores()
    with ThreadPoolExecutor(workers) as pool:
        values, levels = _levels(image, inside, settings, pool, workers)
        dependence, apart = _neighbours(levels, pool, workers)
        parent = np.arange(levels.size, dtype=np.int32 if levels.size < 2**31 else np.int64)
        along: list[Future[dict[str, float]]] = []
        for group in _directions(levels, parent, pool, workers):
            wait(along)  # tables of two groups at most
            along += [pool.submit(formulas.along, direction, dependence.sum(1)) for direction in group]
        zones = pool.submit(_zones, levels, parent)
        sums = _values(values, levels, dependence.sum(1), float(np.prod(spacing)), pool, workers)
        return formulas.all_features(sums, [a.result() for a in along], zones.result(), dependence, apart)


def lined(levels: Levels, vector: Vector) -> bool:
    """Return whether any line in this direction holds two voxels; needed only in the rare case without neighbours."""
    at = np.argwhere(levels)
    axis = next(n for n, v in enumerate(vector) if v)
    foot = at - np.outer(at[:, axis] * vector[axis], vector)
    return len(np.unique(foot, axis=0)) < len(at)


def _laid_out(image: NDArray[Any], mask: NDArray[Any], label: int) -> tuple[NDArray[Any], Voxels]:
    """Return image and mask with three axes, in C order and in types that the kernels support."""
    if image.dtype.kind not in "buif":
        raise DataError(f"the image holds numbers of type {image.dtype}; give whole or real numbers")
    inside = mask if mask.dtype == bool and label == 1 else mask == label
    if image.flags.f_contiguous and not image.flags.c_contiguous:  # as nibabel reads it: transpose, do not copy
        image, inside = image.T, inside.T
    shape = (1,) * (3 - image.ndim) + image.shape
    if image.dtype.kind == "f" and image.dtype not in (np.float32, np.float64):
        image = image.astype(np.float64)
    native = image.dtype.newbyteorder("=") if image.dtype.kind != "b" else np.uint8
    image = np.ascontiguousarray(image, native).reshape(shape)
    inside = np.ascontiguousarray(inside).view(np.uint8).reshape(shape)
    return image, inside


def _levels(
    image: NDArray[Any], inside: Voxels, settings: Settings, pool: Executor, workers: int
) -> tuple[Floats, Levels]:
    """Return the values inside the mask, and their grey levels in the box of the mask, with a rim."""
    bounds = np.zeros((len(inside), 5), np.int64)
    _over(pool, kernels.bounds, _cuts(len(inside), workers), inside, bounds)
    held = np.flatnonzero(bounds[:, 0])
    check_values(int(bounds[:, 0].sum()), 0, 0, settings.label)
    box = (
        slice(held[0], held[-1] + 1),
        slice(bounds[held, 1].min(), bounds[held, 2].max()),
        slice(bounds[held, 3].min(), bounds[held, 4].max()),
    )
    image, inside = image[box], inside[box]
    starts = np.concatenate([[0], np.cumsum(bounds[box[0], 0])])
    cuts = np.searchsorted(starts, np.linspace(0, starts[-1], 4 * workers + 1)).tolist()  # equal numbers of voxels
    values = np.empty(starts[-1])
    _over(pool, kernels.gather, cuts, image, inside, starts, values)
    least, largest = float(values.min()), float(values.max())
    check_values(len(values), least, largest, settings.label)
    levels = np.zeros(tuple(n + 2 for n in inside.shape), np.uint16)
    edges = settings.edges(least, largest, image.dtype)
    _over(pool, kernels.digitise, cuts, values, inside, starts, edges, levels)
    return values, levels


def _neighbours(levels: Levels, pool: Executor, workers: int) -> tuple[Counts, Counts]:
    """Return for each level the voxels by number of equal neighbours, and the differences by number of neighbours."""
    ahead = _steps(levels)
    cuts = _inner(levels, ahead, workers)
    own = np.zeros((2, len(cuts) - 1, int(levels.max()) + 1, 2 * len(ahead) + 1), np.int64)
    _over(pool, kernels.neighbours, cuts, levels.ravel(), np.concatenate([ahead, -ahead]), own=tuple(own))
    dependence, apart = own.sum(1)
    return dependence, apart


def _directions(levels: Levels, parent: NDArray[Any], pool: Executor, workers: int) -> Iterator[list[Direction]]:
    """Yield pairs and runs of the directions, in groups that fit into memory; update the trees of zones."""
    top, longest = int(levels.max()), max(levels.shape)
    at_once = max(1, MAX_TABLE_BYTES // (4 * (top + 1) * (top + longest)))
    steps = _steps(levels)
    cuts = _inner(levels, steps, min(workers, at_once))
    group = max(1, at_once // (len(cuts) - 1))
    for n in range(0, len(steps), group):
        some = steps[n : n + group]
        counts = np.zeros((len(cuts) - 1, len(some), top + 1, top + 1), np.uint32)
        runs = np.zeros((len(cuts) - 1, len(some), top + 1, longest), np.uint32)
        _over(pool, kernels.pairs, cuts, levels.ravel(), some, parent, own=(counts, runs))
        compiled(kernels.bridge)(levels.ravel(), some, np.array(cuts[1:-1], np.int64), parent)
        pairs, ran = counts.sum(0, dtype=np.int64), runs.sum(0, dtype=np.int64)
        yield [
            Direction(p, r, bool(p[:, 1:].any()) or lined(levels, vector))
            for p, r, vector in zip(pairs, ran, AHEAD[n : n + group], strict=True)
        ]


def _zones(levels: Levels, parent: NDArray[Any]) -> Zones:
    """Count the zones by level and size: small ones from a table, others from a list."""
    flat = levels.ravel()
    small = np.zeros((int(levels.max()) + 1, SMALL), np.int64)
    compiled(kernels.zones)(flat, parent, small)
    level, size = np.nonzero(small)
    roots = np.flatnonzero(parent <= -SMALL)
    large, times = np.unique(flat[roots] * np.int64(flat.size) - parent[roots], return_counts=True)
    return Zones(
        np.concatenate([level, large // flat.size]),
        np.concatenate([size, large % flat.size]),
        np.concatenate([small[level, size], times]),
    )


def _percentiles(values: Floats, levels: Levels, voxels: Counts) -> dict[int, float]:
    """Return the percentiles; only values of the grey levels that contain them are sorted."""
    places = np.array(formulas.places(len(values)))
    until = np.cumsum(voxels)
    wanted = np.zeros(len(voxels), bool)
    wanted[np.searchsorted(until, places, side="right")] = True
    some = np.empty(voxels[wanted].sum())
    compiled(kernels.select)(levels.ravel(), wanted, values, some)
    left_out = np.cumsum(np.where(wanted, 0, voxels))[np.searchsorted(until, places, side="right")]
    some.partition(places - left_out)
    return formulas.percentiles(dict(zip(places.tolist(), some[places - left_out].tolist(), strict=True)), len(values))


def _values(values: Floats, levels: Levels, voxels: Counts, volume: float, pool: Executor, workers: int) -> Values:
    """Return sums over the values, chunk by chunk, for the first-order features."""
    percentiles = _percentiles(values, levels, voxels)
    chunks = -(-len(values) // kernels.CHUNK)
    cuts = _cuts(chunks, workers)
    plain = np.empty((chunks, 2))
    _over(pool, kernels.sums, cuts, values, plain)
    total, energy = plain.sum(0)
    mean = total / len(values)
    powers, robust = np.empty((chunks, 7)), np.empty(chunks)
    _over(pool, kernels.moments, cuts, values, mean, percentiles[10], percentiles[90], powers)
    absolute, *about, number, inside = powers.sum(0).tolist()
    centre = inside / number if number else math.nan  # with two voxels, no value may lie between the percentiles
    _over(pool, kernels.deviation, cuts, values, centre, percentiles[10], percentiles[90], robust)
    return Values(
        least=float(values.min()),
        largest=float(values.max()),
        mean=float(mean),
        percentiles=percentiles,
        energy=float(energy),
        absolute=absolute,
        powers=formulas.central(about, len(values)),
        robust=float(robust.sum()) / number if number else math.nan,
        volume=volume,
    )


def _steps(levels: Levels) -> NDArray[np.int64]:
    """Return the offset in the flat array to the neighbour in each direction ahead."""
    plane, row = levels.shape[1] * levels.shape[2], levels.shape[2]
    return np.array([i * plane + j * row + k for i, j, k in AHEAD], np.int64)


def _inner(levels: Levels, steps: NDArray[np.int64], parts: int) -> list[int]:
    """Cut the flat array into ranges, without the rim at both ends, which lacks neighbours."""
    reach = int(steps.max())
    return [reach + cut for cut in _cuts(levels.size - 2 * reach, parts)]


def _cuts(length: int, parts: int) -> list[int]:
    return [length * n // parts for n in range(parts + 1)]


def _over(
    pool: Executor, kernel: Callable[..., Any], cuts: Sequence[int], *shared: Any, own: Sequence[NDArray[Any]] = ()
) -> None:
    """Run a kernel on each range between two cuts, with its own tables."""
    stretches = enumerate(pairwise(cuts))
    done = [pool.submit(compiled(kernel), a, b, *shared, *(o[n] for o in own)) for n, (a, b) in stretches]
    for each in done:
        each.result()


def comparable(rows: Floats) -> Floats:
    """Return rows of features (93 per modality), with 0 for undefined features and for means that are rounding error.

    The mean of z-scores is rounding error; scaled to unit variance, it would be noise as large as any feature.
    """
    table: Floats = np.nan_to_num(np.asarray(rows, np.float64), nan=0.0).reshape(len(rows), -1, len(NAMES))
    mean, size = (NAMES.index(f"firstorder_{name}") for name in ("Mean", "RootMeanSquared"))
    table[..., mean] *= np.abs(table[..., mean]) > ROUNDING * table[..., size]
    return table.reshape(len(rows), -1)
