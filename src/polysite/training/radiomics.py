"""Radiomics of tensors on their device: the same numbers as `polysite.radiomics.features`.

The device counts in integers, and the formulas are the same. Runs: comparing a voxel with the next 1, 2, 4, 8... voxels
gives the length of the run that begins there. Zones: pairs of touching equal voxels join their trees, larger root to
smaller, until no pair has two roots. Directions are processed one after the other, to save memory.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from polysite.radiomics import Settings, formulas
from polysite.radiomics.extraction import directions, lined
from polysite.radiomics.formulas import Direction, Values, Zones
from polysite.radiomics.settings import check, check_values

Table = NDArray[np.int64]


def features(
    image: Tensor, mask: Tensor, *, spacing: Sequence[float] | None = None, settings: Settings = Settings()
) -> dict[str, float]:
    """Return the features by PyRadiomics' names.

    Args:
        image: A 2D or 3D image.
        mask: Mask of the same shape, on the same device; the region has the value ``settings.label``.
        spacing: Voxel size per axis; None for 1.
        settings: Settings of the extraction.
    """
    spacing = spacing or (1.0,) * image.ndim
    check(image.shape, mask.shape, spacing, settings)
    missing = 3 - image.ndim
    axis = settings.force2D_dimension + missing if settings.force2D else None
    inside = (mask == settings.label).reshape((1,) * missing + mask.shape)
    image, inside = _crop(image.reshape(inside.shape), inside, settings.label)
    values = image[inside].double()
    least, largest = torch.stack(torch.aminmax(values)).tolist()
    check_values(len(values), least, largest, settings.label)
    edges = settings.edges(least, largest, str(image.dtype).removeprefix("torch."))
    levels = inside.int()
    levels[inside] = torch.bucketize(values, torch.from_numpy(edges).to(values.device), right=True).int()
    levels = pad(levels, (1,) * 6)
    vectors = directions(axis)
    steps = [int(np.dot(v, levels.stride())) for v in vectors]
    at = levels.ravel().nonzero().squeeze(1)
    dependence, apart = _neighbours(levels.ravel(), at, steps)
    parent = torch.arange(len(at), device=at.device)
    order = torch.zeros_like(levels, dtype=torch.int64).ravel()
    order[at] = parent
    with ThreadPoolExecutor(4) as pool:  # compute formulas of one direction while the device counts the next
        along = []
        for vector, step in zip(vectors, steps, strict=True):
            pairs, runs, parent = _ahead(levels, at, order, step, parent)
            some = bool(pairs[:, 1:].any()) or lined(levels.cpu().numpy(), vector)
            along.append(pool.submit(formulas.along, Direction(pairs, runs, some), dependence.sum(1)))
        first_order = _values(values, least, largest, float(np.prod(spacing)), settings)
        zones = _zones(levels.ravel()[at].long(), parent)
        return formulas.all_features(first_order, [a.result() for a in along], zones, dependence, apart)


def _crop(image: Tensor, inside: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Crop image and mask to the box around the mask."""
    for axis in range(3):
        held = inside.any([a for a in range(3) if a != axis]).nonzero()
        check_values(2 * len(held), 0, 0, label)
        first, last = torch.cat([held[0], held[-1]]).tolist()
        image, inside = (t.narrow(axis, first, last + 1 - first) for t in (image, inside))
    return image, inside


def _neighbours(levels: Tensor, at: Tensor, steps: Sequence[int]) -> tuple[Table, Table]:
    """Return for each level the voxels by number of equal neighbours, and the differences by number of neighbours."""
    here = levels[at].long()
    equal, number, total = torch.zeros((3, len(at)), dtype=torch.int64, device=at.device)
    for step in (*steps, *(-s for s in steps)):
        there = levels[at + step]
        equal += there == here
        number += there > 0
        total += there
    top, most = int(here.max()), 2 * len(steps) + 1
    dependence = torch.bincount(here * most + equal, minlength=(top + 1) * most)
    apart = torch.zeros_like(dependence).index_add_(0, here * most + number, (number * here - total).abs_())
    dependence, apart = torch.stack([dependence, apart]).reshape(2, top + 1, most).cpu().numpy()
    return dependence, apart


def _ahead(levels: Tensor, at: Tensor, order: Tensor, step: int, parent: Tensor) -> tuple[Table, Table, Tensor]:
    """Return the pairs and runs of one direction, and the trees with its equal pairs joined."""
    flat = levels.ravel()
    here, there = flat[at].long(), flat[at + step]
    size, longest = int(here.max()) + 1, max(levels.shape)
    pairs = torch.bincount(here * size + there, minlength=size * size).reshape(size, size)
    same = (here == there).nonzero().squeeze(1)
    place = at[same]
    first = flat[place - step] != flat[place]
    length = _lengths(flat, place, place[first], step)
    runs = torch.bincount(here[same[first]] * longest + length, minlength=size * longest).reshape(size, longest)
    parent = _join(parent, same, order[place + step])
    return pairs.cpu().numpy(), runs.cpu().numpy(), parent


def _lengths(flat: Tensor, same: Tensor, begins: Tensor, step: int) -> Tensor:
    """Return the lengths of the runs that begin at these places; `same` are the voxels that equal the next one."""
    equals = [torch.zeros_like(flat, dtype=torch.bool)]
    equals[0][same] = True
    while bool(equals[-1].any()):
        far = step << (len(equals) - 1)
        twice = torch.zeros_like(equals[-1])
        twice[:-far] = equals[-1][:-far] & equals[-1][far:]
        equals.append(twice)
    length, place = torch.ones_like(begins), begins.clone()
    for power in reversed(range(len(equals) - 1)):
        on = equals[power][place].long() << power
        length += on
        place += on * step
    return length


def _join(parent: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return the root of every voxel after joining u and v, pair by pair; a root is the smallest voxel of its tree."""
    while True:
        a, b = parent[u], parent[v]
        differ = a != b
        u, v = torch.minimum(a, b)[differ], torch.maximum(a, b)[differ]
        if not len(u):
            return parent
        parent = parent.scatter_reduce(0, v, u, "amin")
        while not torch.equal(up := parent[parent], parent):
            parent = up


def _zones(here: Tensor, parent: Tensor) -> Zones:
    """Return the number of zones of every level and size."""
    sizes = torch.bincount(parent)
    roots = sizes.nonzero().squeeze(1)
    kinds, count = torch.unique(here[roots] * (len(here) + 1) + sizes[roots], return_counts=True)
    level, size = kinds // (len(here) + 1), kinds % (len(here) + 1)
    return Zones(*(t.cpu().numpy() for t in (level, size, count)))


def _values(values: Tensor, least: float, largest: float, volume: float, settings: Settings) -> Values:
    """Return sums over the values, for the first-order features."""
    places = formulas.places(len(values))
    ordered = values.sort().values[places].tolist()
    percentiles = formulas.percentiles(dict(zip(places, ordered, strict=True)), len(values))
    mean = values.mean()
    away = values - mean
    middle = values[(values >= percentiles[10]) & (values <= percentiles[90])]
    square = away * away
    sums = [
        mean,
        (values + settings.voxel_array_shift).square().sum(),
        away.abs().sum(),
        away.sum(),
        square.sum(),
        (square * away).sum(),
        (square * square).sum(),
        (middle - middle.mean()).abs().mean(),  # NaN if there is no value between
    ]
    mean_, energy, absolute, *about, robust = torch.stack(sums).tolist()
    powers = formulas.central(about, len(values))
    return Values(least, largest, mean_, percentiles, energy, absolute, powers, robust, volume)
