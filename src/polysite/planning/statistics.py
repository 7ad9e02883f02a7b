"""Statistics of the cases of a site that a plan needs: medians over some of its cases, no number of a single one.

At most ``SAMPLE`` cases of all sites together are opened, evenly spread over the list of every site, and the first
modality of each. Sizes are those of the box around all voxels that are not zero, to which preparation crops.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.orientations import apply_orientation, io_orientation, ornt_transform

from polysite import config
from polysite.data.files import Files, channel
from polysite.data.images import Image
from polysite.data.manifest import Row
from polysite.errors import ConfigError, DataError
from polysite.foreign import parse_json

SAMPLE = 32  # cases that are opened
FEWEST = 2  # of a site, if it has as many
RAS = np.array([[0, 1], [1, 1], [2, 1]])


@dataclass(frozen=True)
class SiteStatistics:
    """What a plan needs to know of a site.

    Args:
        site: Name of the site.
        cases: Number of its cases.
        channels: Modalities.
        labels: Labels, or classes.
        task: Segmentation or classification.
        shape: Median size in voxels, in the order of the files' axes, after a crop to voxels that are not zero.
        spacing: Median size of a voxel in millimetres; empty if the files do not state it.
        spread: Largest over smallest size of a voxel, along the axis where they differ most; 1 if unknown.
        axes: Orientations of the axes that occur, such as RAS; none in 2D.
        turned_shape: As ``shape``, with the axes in the order right, anterior, superior.
        turned_spacing: As ``spacing``, in that order.
    """

    site: str
    cases: int
    channels: int
    labels: int
    task: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...] = ()
    spread: float = 1.0
    axes: tuple[str, ...] = ()
    turned_shape: tuple[int, ...] = ()
    turned_spacing: tuple[float, ...] = ()

    @property
    def dims(self) -> int:
        """Spatial dimensions."""
        return len(self.shape)

    def to_json(self) -> str:
        """Return the statistics as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str, where: str) -> "SiteStatistics":
        """Return the statistics in a text of JSON, as another site wrote it; refuse anything else."""
        try:
            given = parse_json(text)
            if missing := {f.name for f in fields(cls)} - set(given):
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            found = config.convert(cls, given, "")
        except (ConfigError, ValueError, TypeError, OverflowError) as problem:
            raise DataError(f"{where} does not hold the statistics of a site ({problem}); make them again") from problem
        sizes = (*found.shape, *found.turned_shape, *found.spacing, *found.turned_spacing, found.spread)
        sound = all(0 < v < 1e6 for v in sizes) and found.dims in (2, 3) and {*map(len, found.axes)} <= {3}
        equal = all(len(v) in (0, found.dims) for v in (found.spacing, found.turned_shape, found.turned_spacing))
        if not (sound and equal and min(found.cases, found.channels, found.labels) > 0):
            raise DataError(f"{where} holds statistics that no images have; make them again")
        return found


def joined(name: str, parts: Sequence[SiteStatistics]) -> SiteStatistics:
    """Return the statistics of a hospital whose data name several sites: those of its largest one, for all cases."""
    largest = max(parts, key=lambda s: s.cases)
    spread, axes = max(s.spread for s in parts), tuple(sorted({a for s in parts for a in s.axes}))
    return replace(largest, site=name, cases=sum(s.cases for s in parts), spread=spread, axes=axes)


def measure(files: Files, least: int = FEWEST) -> tuple[SiteStatistics, ...]:
    """Return the statistics of every site; a case that cannot be read is left out, which training reports.

    Args:
        files: The images.
        least: Cases of a site that are opened, if it has as many.
    """
    sites = files.manifest.sites
    each = max(least, SAMPLE // len(sites))
    found = [_site(files, site, rows, each) for site, rows in sites.items()]
    known = tuple(s for s in found if s is not None)
    if not known:
        raise DataError(f"no case of {files.path} can be read; 'polysite data check {files.path}' says why")
    return known


def _site(files: Files, site: str, rows: Sequence[Row], most: int) -> SiteStatistics | None:
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))
    measured = [m for k in chosen if (m := _measured(files, rows[k])) is not None]
    if not measured:
        return None
    dims = len(measured[0]["shape"])
    measured = [m for m in measured if len(m["shape"]) == dims]
    metric = all(m["unit"] == "mm" for m in measured)
    sizes = np.array([m["turned_spacing"] for m in measured])

    def median(name: str, kind: type) -> tuple[Any, ...]:
        return tuple(kind(v) for v in np.median([m[name] for m in measured], axis=0))

    return SiteStatistics(
        site=site,
        cases=len(rows),
        channels=len(files.modality_names),
        labels=len(files.label_names),
        task=files.task,
        shape=median("shape", int),
        spacing=median("spacing", float) if metric else (),
        spread=float((sizes.max(0) / sizes.min(0)).max()) if metric else 1.0,
        axes=tuple(sorted({m["axes"] for m in measured if m["axes"]})),
        turned_shape=median("turned_shape", int),
        turned_spacing=median("turned_spacing", float) if metric else (),
    )


def _measured(files: Files, row: Row) -> Mapping[str, Any] | None:
    """Return size, spacing and orientation of a case; None if it cannot be read."""
    cell = next(f for f in row.images.values() if f)
    try:
        image = channel(files.manifest, cell, {}, spacing=row.spacing)
    except DataError:
        return None
    shape = _box(image)
    order = _order(image)
    return {
        "shape": shape,
        "spacing": image.spacing,
        "unit": image.unit,
        "axes": image.orientation,
        "turned_shape": [shape[k] for k in order],
        "turned_spacing": [image.spacing[k] for k in order],
    }


def _box(image: Image) -> list[int]:
    """Return the size of the box around all voxels that are not zero."""
    inside = image.array != 0
    lines = [np.flatnonzero(inside.any(tuple(a for a in range(inside.ndim) if a != k))) for k in range(inside.ndim)]
    return [int(at[-1] - at[0] + 1) if len(at) else n for at, n in zip(lines, image.shape, strict=True)]


def _order(image: Image) -> list[int]:
    """Return the axes of a volume in the order right, anterior, superior."""
    if image.dims == 2:
        return [0, 1]
    way = ornt_transform(io_orientation(image.affine), RAS)
    count = apply_orientation(np.indices((1, 1, 1))[0], way).ndim  # refuses an affine without orientation
    order = [0] * count
    for axis, (to, _) in enumerate(way):
        order[int(to)] = axis
    return order


def read(path: Path) -> SiteStatistics:
    """Read the statistics that ``polysite data statistics`` wrote."""
    try:
        return SiteStatistics.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"the statistics {path} cannot be read: {problem}") from problem
