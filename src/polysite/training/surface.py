"""Surface distances of tensors on their device: the same numbers as `polysite.metrics.surface`.

The steps are: crop; find surfaces by shifted masks; find the nearest surface voxel of every column by running maxima
along the first axis, both ways; minimise over the second axis, shift by shift; search along the third axis for the
surface voxels only. The shifts end once none can be nearer. All in double precision.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from polysite.metrics.surface import Surfaces, check

CHUNK = 1 << 24  # numbers in memory at a time while the last axis is searched


def surfaces(predicted: Tensor, truth: Tensor, spacing: Sequence[float]) -> Surfaces:
    """Return the surface distances of two boolean masks with one to three axes; the spacing is in mm per axis."""
    check(predicted.shape, truth.shape, spacing)
    masks = torch.stack([predicted, truth]).bool()
    edges = _edges(_crop(masks))
    missing = 3 - truth.ndim
    edges = edges.reshape(2, *(1,) * missing, *edges.shape[1:])
    size = (1.0,) * missing + tuple(map(float, spacing))
    if not bool(edges.flatten(1).any(1).all()):
        nothing = torch.empty(0, dtype=torch.float64).numpy()
        return Surfaces(nothing, nothing)
    there, back = (_distances(a, b, size).cpu().numpy() for a, b in (edges, edges.flip(0)))
    return Surfaces(there, back)


def _crop(masks: Tensor) -> Tensor:
    """Crop both masks to the box around their union."""
    union = masks.any(0)
    for axis in range(union.ndim):
        others = [a for a in range(union.ndim) if a != axis]
        held = (union.any(others) if others else union).nonzero()
        if not len(held):
            return masks
        first, last = torch.cat([held[0], held[-1]]).tolist()
        masks, union = masks.narrow(axis + 1, first, last + 1 - first), union.narrow(axis, first, last + 1 - first)
    return masks


def _edges(masks: Tensor) -> Tensor:
    """Return the voxels of each mask that have a face-neighbour outside."""
    inside = masks.clone()
    padded = pad(masks, (1, 1) * (masks.ndim - 1))
    for axis in range(1, masks.ndim):
        middle = padded
        for other in range(1, masks.ndim):
            if other != axis:
                middle = middle.narrow(other, 1, masks.shape[other])
        inside &= middle.narrow(axis, 0, masks.shape[axis]) & middle.narrow(axis, 2, masks.shape[axis])
    return masks & ~inside


def _distances(edges: Tensor, others: Tensor, spacing: tuple[float, ...]) -> Tensor:
    """Return the distance from every surface voxel to the nearest one of the other mask."""
    columns, asked = _columns(others, spacing[0]), edges.nonzero()
    found, n = columns.clone(), columns.shape[1]
    for d in range(1, n):
        away = (d * spacing[1]) ** 2
        if d & (d - 1) == 0:  # at 1, 2, 4, 8...: each check synchronises with the device
            nearest = _search(found, asked, spacing[2])
            if bool((nearest <= away).all()):
                return nearest.sqrt_()
        for here, there in ((0, d), (d, 0)):
            least = found.narrow(1, here, n - d)
            torch.minimum(least, columns.narrow(1, there, n - d) + away, out=least)
    return _search(found, asked, spacing[2]).sqrt_()


def _search(plane: Tensor, asked: Tensor, size: float) -> Tensor:
    """Return the minimum of (distance along the third axis)² + plane, for the surface voxels ``asked``."""
    along = torch.arange(plane.shape[2], dtype=torch.float64, device=plane.device)
    step = max(1, CHUNK // plane.shape[2])
    nearest = []
    for start in range(0, len(asked), step):
        i, j, k = asked[start : start + step].T
        nearest.append(((k[:, None] - along) * size).square_().add_(plane[i, j]).amin(1))
    return torch.cat(nearest)


def _columns(others: Tensor, size: float) -> Tensor:
    """Return the squared distance of every voxel to the nearest one in its column along the first axis, or infinity."""
    n = others.shape[0]
    at = torch.arange(n, device=others.device).reshape(n, 1, 1).expand(others.shape)
    far = 2 * n  # farther than any column is long
    before = torch.where(others, at, -far).cummax(0).values
    after = torch.where(others, -at, -far - n).flip(0).cummax(0).values.flip(0).neg_()
    steps = torch.minimum(at - before, after - at)
    return torch.where(steps < n, (steps.double() * size).square_(), math.inf)
