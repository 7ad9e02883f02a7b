"""Compiled loops that compute the matrices. They release the GIL and never write to shared arrays.

Grey levels are in one flat array with a rim of zeros (outside) on every side, so that a neighbour is a fixed offset and
borders need no check. Half of the directions are forward steps; their opposites give the same pairs.
"""

from typing import Any

import numpy as np

BLOCK = 512  # voxels per vectorised loop over neighbours
CHUNK = 4096  # values per partial sum, so that sums do not depend on the number of threads


# The functions below are compiled: plain loops over contiguous arrays.


def bounds(first, last, mask, found):  # type: ignore[no-untyped-def]
    """Find for each plane the number of voxels, and the first and past the last row and column."""
    for i in range(first, last):
        voxels = bottom = right = 0
        top, left = mask.shape[1:]
        for j in range(mask.shape[1]):
            row = mask[i, j]
            some = 0
            for k in range(len(row)):
                some += row[k]
            if some:
                voxels += some
                top, bottom = min(top, j), j + 1
                for k in range(left):
                    if row[k]:
                        left = k
                        break
                for k in range(len(row) - 1, right - 1, -1):
                    if row[k]:
                        right = k + 1
                        break
        found[i, 0], found[i, 1], found[i, 2], found[i, 3], found[i, 4] = voxels, top, bottom, left, right


def gather(first, last, image, mask, starts, values):  # type: ignore[no-untyped-def]
    """Copy the values inside the mask in order; ``starts`` are the positions of the planes."""
    for i in range(first, last):
        n = starts[i]
        for j in range(mask.shape[1]):
            for k in range(mask.shape[2]):
                if mask[i, j, k]:
                    values[n] = image[i, j, k]
                    n += 1


def digitise(first, last, values, mask, starts, edges, levels):  # type: ignore[no-untyped-def]
    """Write the number of edges at or below each value to an array with a rim."""
    top = len(edges) - 1
    low, per = 0.0, 0.0
    if top > 1:  # not from the first edge, which may be minus infinity
        per = 1 / (edges[2] - edges[1])
        low = edges[1] - 1 / per
    for i in range(first, last):
        n = starts[i]
        for j in range(mask.shape[1]):
            for k in range(mask.shape[2]):
                if mask[i, j, k]:
                    v = values[n]
                    n += 1
                    t = min(max(int((v - low) * per), 0), top)  # a first guess, as edges are not exactly even
                    while v < edges[t]:
                        t -= 1
                    while t < top and v >= edges[t + 1]:
                        t += 1
                    levels[i + 1, j + 1, k + 1] = t + 1


def select(levels, wanted, values, found):  # type: ignore[no-untyped-def]
    """Copy the values of the wanted levels; return their number."""
    n = at = 0
    for p in range(len(levels)):
        if levels[p]:
            if wanted[levels[p]]:
                found[n] = values[at]
                n += 1
            at += 1
    return n


def sums(first, last, values, found):  # type: ignore[no-untyped-def]
    """Compute for each chunk Σ x and Σ x²."""
    for c in range(first, last):
        plain = square = 0.0
        for v in values[c * CHUNK : (c + 1) * CHUNK]:
            plain += v
            square += v * v
        found[c, 0], found[c, 1] = plain, square


def moments(first, last, values, mean, low, high, found):  # type: ignore[no-untyped-def]
    """Compute for each chunk Σ |x − mean|, Σ (x − mean)ᵏ for k = 1 to 4, and number and Σ of the x in [low, high]."""
    for c in range(first, last):
        absolute = plain = second = third = fourth = inside = 0.0
        n = 0
        for v in values[c * CHUNK : (c + 1) * CHUNK]:
            d = v - mean
            absolute += abs(d)
            plain += d
            second += d * d
            third += d * d * d
            fourth += d * d * d * d
            here = (v >= low) & (v <= high)
            n += here
            inside += v * here
        found[c, 0], found[c, 1], found[c, 2], found[c, 3], found[c, 4] = absolute, plain, second, third, fourth
        found[c, 5], found[c, 6] = n, inside


def deviation(first, last, values, mean, low, high, found):  # type: ignore[no-untyped-def]
    """Compute for each chunk Σ |x − mean| of the values from low to high."""
    for c in range(first, last):
        absolute = 0.0
        for v in values[c * CHUNK : (c + 1) * CHUNK]:
            absolute += abs(v - mean) * ((v >= low) & (v <= high))
        found[c] = absolute


def join(parent: Any, s: int, t: int) -> None:
    """Join the trees of two voxels; the smaller root becomes that of both."""
    while parent[s] != s:
        parent[s] = parent[parent[s]]
        s = parent[s]
    while parent[t] != t:
        parent[t] = parent[parent[t]]
        t = parent[t]
    if s < t:
        parent[t] = s
    elif t < s:
        parent[s] = t


def pairs(first, last, levels, steps, parent, counts, runs):  # type: ignore[no-untyped-def]
    """Count pairs and runs of two or more, and join the trees of touching equals, in one pass over neighbours ahead.

    Trees stay within the voxels from first to last; `bridge` joins them.
    """
    for p in range(first, last):
        a = levels[p]
        if a == 0:
            continue
        for d in range(len(steps)):
            step = steps[d]
            b = levels[p + step]
            counts[d, a, b] += 1
            if b != a:
                continue
            if levels[p - step] != a:  # a run begins
                n, q = 2, p + 2 * step
                while levels[q] == a:
                    n += 1
                    q += step
                runs[d, a, n] += 1
            if p + step < last:
                join(parent, p, p + step)


def bridge(levels, steps, cuts, parent):  # type: ignore[no-untyped-def]
    """Join the trees of touching equal voxels across the cuts between threads."""
    reach = steps.max()
    for cut in cuts:
        for p in range(max(0, cut - reach), cut):
            a = levels[p]
            if a == 0:
                continue
            for step in steps:
                if p + step >= cut and levels[p + step] == a:
                    join(parent, p, p + step)


def zones(levels, parent, small):  # type: ignore[no-untyped-def]
    """Turn trees into zones: a root holds minus its size. Count the small zones by level and size."""
    for p in range(len(levels)):
        if levels[p]:
            r = parent[p]
            if r == p:
                parent[p] = -1
            else:
                if parent[r] >= 0:  # a root comes first in its tree, so earlier voxels point to their root
                    r = parent[r]
                    parent[p] = r
                parent[r] -= 1
    for p in range(len(levels)):
        if levels[p] and -small.shape[1] < parent[p] < 0:
            small[levels[p], -parent[p]] += 1


def neighbours(first, last, levels, steps, dependence, apart):  # type: ignore[no-untyped-def]
    """Count for each level voxels by equal neighbours, and Σ |n · level − sum of the neighbours| by their number n."""
    equal, number = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint16)
    total = np.empty(BLOCK, np.uint32)
    for start in range(first, last, BLOCK):
        size = min(BLOCK, last - start)
        here = levels[start : start + size]
        some = np.uint16(0)
        for q in range(size):
            some |= here[q]
        if some == 0:
            continue
        equal[:] = 0
        number[:] = 0
        total[:] = 0
        for step in steps:
            there = levels[start + step : start + step + size]
            for q in range(size):
                b = there[q]
                equal[q] += b == here[q]
                number[q] += b != 0
                total[q] += b
        for q in range(size):
            a = here[q]
            if a:
                n = number[q]
                dependence[a, equal[q]] += 1
                apart[a, n] += abs(np.int64(n) * np.int64(a) - np.int64(total[q]))


def second_eigenvalue(matrix):  # type: ignore[no-untyped-def]
    """Return the second largest eigenvalue by absolute value of a symmetric matrix of four or more rows; overwrite it.

    Householder's reflections make it tridiagonal; Sturm's sequence counts eigenvalues below a number, and bisection
    finds the two at each end. LAPACK would start its own threads, which compete with ours.
    """
    n = len(matrix)
    diagonal, beside = np.empty(n), np.zeros(n)
    for k in range(n - 2):
        diagonal[k], v = matrix[k, k], matrix[k, k + 1 :].copy()
        rest = matrix[k + 1 :, k + 1 :]
        norm = np.sqrt((v * v).sum())
        beside[k + 1] = -norm if v[0] > 0 else norm
        half = norm * norm - v[0] * beside[k + 1]
        if half == 0:
            continue
        v[0] -= beside[k + 1]
        w = np.zeros(len(v))
        for i in range(len(v)):
            row, factor = rest[i], v[i] / half
            for j in range(len(v)):
                w[j] += factor * row[j]
        w -= v * ((v * w).sum() / (2 * half))
        for i in range(len(v)):
            row = rest[i]
            for j in range(len(v)):
                row[j] -= v[i] * w[j] + w[i] * v[j]
    diagonal[n - 2], diagonal[n - 1], beside[n - 1] = matrix[n - 2, n - 2], matrix[n - 1, n - 1], matrix[n - 2, n - 1]
    reach = 0.0
    for k in range(n):
        reach = max(reach, abs(diagonal[k]) + abs(beside[k]) + (abs(beside[k + 1]) if k + 1 < n else 0.0))
    first = second = 0.0
    for rank in (1, 2, n - 1, n):
        low, high = -reach, reach
        for _ in range(60):
            middle = (low + high) / 2
            below = 0
            q = 1.0
            for k in range(n):
                q = diagonal[k] - middle - beside[k] * beside[k] / q
                if q == 0:
                    q = 1e-300
                below += q < 0
            if below >= rank:
                high = middle
            else:
                low = middle
        found = abs(low + high) / 2
        first, second = max(first, found), max(second, min(first, found))
    return second
