"""Distances between two surfaces: Hausdorff distances, mean surface distance, surface Dice. Exact, in mm.

A surface voxel belongs to its mask and has a face-neighbour that does not; voxels outside the image belong to no mask.
This is MONAI's convention too (its crop adds a rim of background), and the numbers are MONAI's, with three exceptions.
If a mask is empty, MONAI returns infinity, NaN or (NSD) 0; here everything is NaN, and a policy decides
(`polysite.metrics.measures`). Percentile 0 is MONAI's maximum; here it is the smallest distance. MONAI rounds distances
to single precision.

The steps are: crop to the union of the masks; find surfaces eight voxels at a time; sweep along the first axis to count
the steps of every voxel to a surface voxel of the other mask in its column. The squared distance of a surface voxel is
the minimum of (distance to a column)² + (steps along it)² over the surrounding columns, searched from near to far until
the columns alone are farther than the minimum so far. This is slow if the surfaces are far apart. Then the lower
envelope of parabolas minimises over the second axis (Felzenszwalb and Huttenlocher 2012, Distance transforms of sampled
functions, Theory of Computing 8), and only the third is searched. A sample of voxels decides which way is used; the
results are the same.

>>> far = surfaces(np.array([1, 1, 0, 0, 0, 0], bool), np.array([1, 0, 0, 0, 1, 0], bool), (0.5,))
>>> far.to_truth.tolist(), far.to_predicted.tolist(), far.hausdorff(100), far.assd(), far.nsd(0.5)
([0.0, 0.5], [0.0, 1.5], 1.5, 0.5, 0.75)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polysite.compiled import compiled
from polysite.errors import DataError

Floats = NDArray[np.float64]
ROUNDING = 1e-7  # a distance of 3 × 0.1 mm lies within a tolerance of 0.3 mm
NEAR = 4096  # columns that are searched from near to far; beyond, row by row
SAMPLE = 64  # one in so many surface voxels is used to estimate the duration of the search
ENVELOPE = 8  # cost of a voxel of the envelope, in columns searched


@dataclass(frozen=True, eq=False)
class Surfaces:
    """Distances of the surface voxels of each mask to the surface of the other; empty if a mask is empty."""

    to_truth: Floats
    to_predicted: Floats

    def hausdorff(self, percentile: float = 95.0, how: Literal["max", "union"] = "max") -> float:
        """Return the larger of the two directed percentiles (``max``) or the percentile of all (``union``)."""
        if not self:
            return math.nan
        if how == "union":
            return float(np.percentile(self._pooled, percentile))
        return float(max(np.percentile(self.to_truth, percentile), np.percentile(self.to_predicted, percentile)))

    def assd(self) -> float:
        """Return the average symmetric surface distance: the mean of all distances."""
        return float(self._pooled.mean()) if self else math.nan

    def nsd(self, tolerance: float) -> float:
        """Return the normalised surface Dice: the share of both masks' surface voxels within the tolerance."""
        return float((self._pooled <= tolerance * (1 + ROUNDING)).mean()) if self else math.nan

    def __bool__(self) -> bool:
        return bool(self.to_truth.size and self.to_predicted.size)

    @property
    def _pooled(self) -> Floats:
        return np.concatenate([self.to_truth, self.to_predicted])


def surfaces(predicted: NDArray[np.bool_], truth: NDArray[np.bool_], spacing: Sequence[float]) -> Surfaces:
    """Return the surface distances of two masks with one to three axes; the spacing is in mm per axis."""
    check(predicted.shape, truth.shape, spacing)
    masks = [np.asarray(m, bool) for m in (predicted, truth)]
    size = tuple(map(float, spacing))
    if all(m.flags.f_contiguous for m in masks):  # as nibabel reads them: transpose, do not copy
        masks, size = [m.T for m in masks], size[::-1]
    flat = 3 - truth.ndim
    masks = [np.ascontiguousarray(m).view(np.uint8).reshape((1,) * flat + m.shape) for m in masks]
    size = (1.0,) * flat + size
    box = compiled(_bounds)(*masks)
    if min(box[1::2]) == 0:
        return Surfaces(np.empty(0), np.empty(0))
    edges, columns = _edges(masks, box, flat)
    return Surfaces(_distances(edges[0], edges[1], columns, size), _distances(edges[1], edges[0], columns, size))


def check(predicted: Sequence[int], truth: Sequence[int], spacing: Sequence[float]) -> None:
    """Refuse different shapes and an invalid spacing."""
    if tuple(predicted) != tuple(truth):
        raise DataError(
            f"the prediction has shape {tuple(predicted)}, the truth {tuple(truth)}; bring both to one grid"
        )
    if not 1 <= len(truth) <= 3 or len(spacing) != len(truth) or not all(0 < s < math.inf for s in spacing):
        raise DataError(f"masks of shape {tuple(truth)} with spacing {tuple(spacing)}; give a positive size per axis")


def _edges(
    masks: Sequence[NDArray[np.uint8]], box: Sequence[int], flat: int
) -> tuple[NDArray[np.uint8], NDArray[np.unsignedinteger[Any]]]:
    """Return the cropped surface voxels of both masks, with a rim of zeros and rows of whole words; and a buffer."""
    crop = tuple(slice(a, b) for a, b in zip(box[::2], box[1::2], strict=True))
    n = [s.stop - s.start for s in crop]
    shape = (n[0] + 2, n[1] + 2, -(-(n[2] + 2) // 8) * 8)
    whole = np.min_scalar_type(n[0] + 2)
    # one allocation, for huge pages: allocating small pages would take longer than all the rest
    room = np.zeros((3 + whole.itemsize, *shape), np.uint8)
    padded, edges = room[0], room[1:3]
    for axis in range(flat):  # every neighbour along an axis that the image lacks counts as inside
        padded[(slice(None),) * axis + ([0, -1],)] = 1
    for mask, found in zip(masks, edges, strict=True):
        padded[1:-1, 1:-1, 1 : n[2] + 1] = mask[crop]
        compiled(_shell)(padded.view(np.uint64), found.view(np.uint64))
    if flat == 2:
        edges[:, 1, [0, -1]] = 0
    return edges, room[3:].reshape(-1).view(whole).reshape(shape)


def _distances(
    edges: NDArray[np.uint8], others: NDArray[np.uint8], columns: NDArray[Any], spacing: tuple[float, ...]
) -> Floats:
    """Return the distance of every surface voxel to the nearest of the others; empty if either mask is empty."""
    found = np.empty(np.count_nonzero(edges) if others.any() else 0)
    if not found.size:
        return found
    compiled(_columns)(others, columns)
    at = np.flatnonzero(edges.view(bool))
    taken = np.count_nonzero(columns[0] != np.iinfo(columns.dtype).max)
    limit = np.count_nonzero(edges.reshape(len(edges), -1).any(1)) * (ENVELOPE * taken + columns[0].size)
    around = _around(spacing[1], spacing[2])
    for every in (SAMPLE, 1):
        if not compiled(_search)(at, columns, spacing, *around, every, limit / every, found):
            compiled(_envelope)(at, columns, spacing, found)
            break
    return np.sqrt(found, out=found)


@lru_cache(8)
def _around(row: float, column: float) -> tuple[NDArray[np.int32], NDArray[np.int32], Floats]:
    """Return the positions around the origin of a plane, from near to far, and their squared distances."""
    # about twice the extent of a disc of NEAR positions
    reach = [max(1, math.ceil(math.sqrt(NEAR * row * column / math.pi) / s)) for s in (row, column)]
    j, k = np.mgrid[-reach[0] : reach[0] + 1, -reach[1] : reach[1] + 1].reshape(2, -1).astype(np.int32)
    square = (j * row) ** 2 + (k * column) ** 2
    whole = min((r + 1) * s for r, s in zip(reach, (row, column), strict=True)) ** 2  # nearer than all left out
    order = np.argsort(square, kind="stable")[1:]
    order = order[square[order] < whole]
    return j[order], k[order], square[order]


# The functions below are compiled: plain loops over contiguous arrays.


def _bounds(a, b):  # type: ignore[no-untyped-def]
    """Return the box around the union of the masks: first and past the last index of each axis."""
    top, left, front = a.shape
    bottom = right = back = 0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            some = np.uint8(0)
            for k in range(a.shape[2]):
                some |= a[i, j, k] | b[i, j, k]
            if some:
                top, bottom = min(top, i), i + 1
                left, right = min(left, j), max(right, j + 1)
                for k in range(front):
                    if a[i, j, k] | b[i, j, k]:
                        front = k
                        break
                for k in range(a.shape[2] - 1, back - 1, -1):
                    if a[i, j, k] | b[i, j, k]:
                        back = k + 1
                        break
    return top, bottom, left, right, front, back


def _shell(mask, found):  # type: ignore[no-untyped-def]
    """Find the voxels of the mask with a neighbour outside, eight voxels per word, plane by plane."""
    m, out = mask.ravel(), found.ravel()
    row, n = mask.shape[2], mask.shape[1] * mask.shape[2]
    byte, rest = np.uint64(8), np.uint64(56)
    for p in range(n, m.size - n, n):
        here, before, after, edge = m[p : p + n], m[p - 1 : p - 1 + n], m[p + 1 : p + 1 + n], out[p : p + n]
        left, right = m[p - row : p - row + n], m[p + row : p + row + n]
        above, below = m[p - n : p], m[p + n : p + 2 * n]
        for q in range(n):
            c = here[q]
            along = ((c << byte) | (before[q] >> rest)) & ((c >> byte) | (after[q] << rest))
            edge[q] = c & ~(along & left[q] & right[q] & above[q] & below[q])


def _columns(edges, steps):  # type: ignore[no-untyped-def]
    """Count the steps along the first axis to the nearest surface voxel; the largest number if a column has none."""
    e, s = edges.reshape(edges.shape[0], -1), steps.reshape(steps.shape[0], -1)
    whole = steps.dtype.type
    none = whole(np.iinfo(steps.dtype).max)
    s[0] = none  # the rim
    for i in range(1, len(s)):  # views of one plane each, so that the loop is vectorised over columns
        last, here, edge = s[i - 1], s[i], e[i]
        for p in range(len(here)):
            here[p] = (last[p] + (last[p] != none)) * (1 - edge[p])
    for i in range(len(s) - 2, -1, -1):
        last, here = s[i + 1], s[i]
        for p in range(len(here)):
            here[p] = min(here[p], whole(last[p] + (last[p] != none)))


def _search(at, columns, spacing, dj, dk, square, every, limit, found):  # type: ignore[no-untyped-def]
    """Compute squared distances of one surface voxel in ``every``; False if it took more columns than the limit."""
    rows, width = columns.shape[1:]
    a, b, c = spacing
    none = np.iinfo(columns.dtype).max
    looked = 0
    for n in range(every - 1, len(at), every):
        i, jk = divmod(at[n], rows * width)
        j, k = divmod(jk, width)
        s = columns[i, j, k]
        best = (a * s) ** 2 if s != none else np.inf
        t = 0
        while t < len(square) and square[t] < best:
            y, x = j + dj[t], k + dk[t]
            if 0 <= y < rows and 0 <= x < width:
                s = columns[i, y, x]
                if s != none:
                    best = min(best, square[t] + (a * s) ** 2)
            t += 1
        looked += t
        if t == len(square):
            for y in range(rows):
                if (b * (y - j)) ** 2 < best:
                    looked += width
                    for x in range(width):
                        s = columns[i, y, x]
                        if s != none:
                            best = min(best, (b * (y - j)) ** 2 + (c * (x - k)) ** 2 + (a * s) ** 2)
        found[n] = best
        if looked > limit:
            return False
    return True


def _envelope(at, columns, spacing, found):  # type: ignore[no-untyped-def]
    """Compute squared distances plane by plane: the lower envelope over rows, then a search along each row."""
    rows, width = columns.shape[1:]
    a, b, c = spacing
    none = np.iinfo(columns.dtype).max
    plane = np.empty((rows, width))
    low, height, until = np.empty(rows, np.int64), np.empty(rows), np.empty(rows)
    n = 0
    while n < len(at):
        i = at[n] // (rows * width)
        for k in range(width):
            top = -1
            for j in range(rows):
                if columns[i, j, k] == none:
                    continue
                h = (a * columns[i, j, k]) ** 2 + (b * j) ** 2
                while top >= 0:
                    meet = (h - height[top]) / (2 * b * b * (j - low[top]))
                    if top == 0 or meet > until[top - 1]:
                        until[top] = meet
                        break
                    top -= 1
                top += 1
                low[top], height[top] = j, h
            if top >= 0:
                until[top] = np.inf
            t = 0
            for j in range(rows):
                if top < 0:
                    plane[j, k] = np.inf
                    continue
                while until[t] < j:
                    t += 1
                plane[j, k] = (b * (j - low[t])) ** 2 + (a * columns[i, low[t], k]) ** 2
        while n < len(at) and at[n] < (i + 1) * rows * width:
            j, k = divmod(at[n] - i * rows * width, width)
            best = plane[j, k]
            d = 1
            while d < width and (c * d) ** 2 < best:
                if k >= d:
                    best = min(best, plane[j, k - d] + (c * d) ** 2)
                if k + d < width:
                    best = min(best, plane[j, k + d] + (c * d) ** 2)
                d += 1
            found[n] = best
            n += 1
