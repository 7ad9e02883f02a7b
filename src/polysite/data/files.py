"""Cases from image files: what a manifest lists, opened and checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from polysite.data import images, layouts, manifest
from polysite.data.case import Case, CaseRef, channels
from polysite.data.images import Image
from polysite.data.layouts import Scan
from polysite.data.manifest import Manifest, Row
from polysite.errors import ConfigError, DataError

BOX = 1 << 26  # voxels
TOLERANCE = 0.1  # voxels: how far apart two images of one case may put the same corner


@dataclass(frozen=True)
class Files:
    """Image files of your own: a manifest, or a folder in one of the known layouts."""

    path: str = ""  # a manifest (.csv, .jsonl) or a folder
    format: str = "auto"  # layout of the folder; polysite data formats lists them
    tables: tuple[str, ...] = ()  # CSV files that say which case is of which site, group or split
    modalities: tuple[str, ...] = ()  # which of them, in this order; empty: all
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # name -> values, instead of the manifest's
    exclude: tuple[str, ...] = ()  # sites to leave out
    allow: tuple[Literal["missing", "empty"], ...] = ()  # modalities not acquired become zero; nothing may be labelled

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("data.path is missing: name a manifest (.csv, .jsonl) or a folder of images")

    @cached_property
    def _scan(self) -> Scan:
        """What there is; a manifest is taken at its word."""
        path = Path(self.path)
        if path.is_dir():
            return layouts.scan(path, self.format, [Path(t) for t in self.tables], self.labels or None)
        found = manifest.read(path)
        if self.labels and found.task == "segmentation":
            found = Manifest(tuple(replace(r, labels=self.labels) for r in found.rows), found.root)
        return Scan("manifest", found)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know about how the folder was read, such as cases that were left out."""
        return self._scan.remarks

    @cached_property
    def manifest(self) -> Manifest:
        """What there is, as far as this study wants it."""
        found = self._scan.manifest
        odd = [s for s in self.exclude if s not in found.sites]
        if odd:
            raise ConfigError(f"data.exclude names {odd[0]!r}; the sites are {', '.join(found.sites)}")
        odd = [m for m in self.modalities if m not in found.modalities]
        if odd:
            raise ConfigError(f"data.modalities names {odd[0]!r}; {self.path} has {', '.join(found.modalities)}")
        wanted = self.modalities or found.modalities
        rows = (r for r in found.rows if r.site not in self.exclude)
        return Manifest(tuple(replace(r, images={m: r.images[m] for m in wanted}) for r in rows), found.root)

    @property
    def task(self) -> str:
        return self.manifest.task

    @cached_property
    def dims(self) -> int:
        """Of the first image that can be read; volumes if none can, and then that is said soon enough."""
        for row in self.manifest.rows:
            file = self.manifest.file(next(f for f in row.images.values() if f))[0]
            if images.suffix(file.name) in images.FLAT:
                return 2
            try:
                return images.read(file).dims
            except DataError:
                continue
        return 3

    @property
    def modality_names(self) -> tuple[str, ...]:
        return self.manifest.modalities

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.manifest.label_names

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        names, parts = self.label_names, cache(_parts)
        return {site: [self._patient(r, names, parts) for r in rows] for site, rows in self.manifest.sites.items()}

    def _patient(self, row: Row, names: tuple[str, ...], parts: Callable[[Path], tuple[Path, ...]]) -> CaseRef:
        listed, allow = self.manifest, self.allow
        cells = [listed.file(f) if f else None for f in (*row.images.values(), row.label)]
        files = tuple(dict.fromkeys(file for c in cells if c for file in parts(c[0])))
        # the cache knows files by what is in them, so only their order counts here, not their names
        recipe = [
            [c and (files.index(c[0]), c[1]) for c in cells],
            dict(row.labels),
            row.category,
            names,
            row.box,
            allow,
        ]
        return CaseRef(
            site=row.site,
            name=row.case,
            read=lambda: open_case(listed, row, names, allow),
            volumes=lambda: volumes(listed, row, names),
            patient=row.patient or (str(files[0]) if row.box else ""),  # boxes of one scan are of one person
            group=row.group,
            category=row.category,
            split=row.split,
            files=files,
            recipe=json.dumps(recipe),
            modalities=len(row.images),
        )


def open_case(listed: Manifest, row: Row, names: Sequence[str], allow: Sequence[str] = ()) -> Case:
    """One case, read and checked; the first thing that is wrong with it is said."""
    absent = [m for m, f in row.images.items() if not f]
    if absent and "missing" not in allow:
        raise DataError(
            f"case {row.case!r} of site {row.site!r} has no {', '.join(absent)}; leave it out, choose data.modalities "
            "that all cases have, or set data.allow = ['missing'] to see zeros there"
        )
    opened: dict[Path, Image] = {}
    found = {m: boxed(channel(listed, f, opened, bool(row.box)), row) for m, f in row.images.items() if f}
    first = next(iter(found))
    for other, image in found.items():
        agree(listed, row, first, found[first], other, image)
    grid = found[first]
    for name, image in found.items():
        if image.array.min() == image.array.max():
            raise DataError(
                f"{listed.file(row.images[name])[0]}: every voxel is {image.array.flat[0]:g}; leave the case out, or "
                "empty its cell in the manifest and set data.allow = ['missing']"
            )
    stack = [found[m].array if m in found else np.zeros(grid.shape, np.float32) for m in row.images]
    if row.category:
        label = np.array([n == row.category for n in names], np.uint8)
    else:
        truth = boxed(channel(listed, row.label, opened, bool(row.box)), row, outside=0)
        agree(listed, row, first, grid, "label", truth)
        label = channels(truth.array, list(row.labels.items()), str(listed.file(row.label)[0]))
        if not label.any() and "empty" not in allow:
            raise DataError(
                f"{listed.file(row.label)[0]}: nothing is labelled; leave the case out, or set data.allow = ['empty'] "
                "if there is really nothing to find"
            )
    volume = np.stack(stack).astype(np.float32)
    return Case(row.site, row.case, volume, label, grid.spacing, row.group, grid.affine, grid.unit)


def channel(listed: Manifest, name: str, opened: dict[Path, Image], keep: bool = False) -> Image:
    """The image that a cell of the manifest means: a file of one channel, or one channel of a file.

    ``opened`` holds the files of this case; ``keep`` holds a file for the next case, since many boxes may be of it.
    """
    file, index = listed.file(name)
    if file not in opened:
        stamp = [p.stat().st_mtime_ns for p in _parts(file) if p.is_file()] if keep else []
        opened[file] = _kept(file, *stamp) if stamp else images.read(file)
    image = opened[file]
    if index is None and image.channels == 1:
        return image
    if index is None:
        raise DataError(f"{file} has {image.channels} channels; say which, as in {file.name}#0")
    if index >= image.channels:
        raise DataError(f"{file} has {image.channels} channels; there is no channel {index} (the first is 0)")
    return image if image.channels == 1 else Image(image.array[..., index], image.affine, image.unit)


@lru_cache(maxsize=2)
def _kept(file: Path, *changed: int) -> Image:
    return images.read(file)


def _parts(file: Path) -> tuple[Path, ...]:
    """The files behind an image; one that cannot be read is said to be so when it is opened."""
    try:
        return images.parts(file)
    except DataError:
        return (file,)


def agree(listed: Manifest, row: Row, first: str, one: Image, second: str, other: Image) -> None:
    """Refuse two images of a case that do not lie on one grid."""
    a, b = (listed.file(row.label if n == "label" else row.images[n])[0] for n in (first, second))
    if one.shape != other.shape:
        raise DataError(f"{b} has the shape {other.shape}, {a.name} has {one.shape}: resample them to one grid")
    gap = apart(one, other)
    if gap > TOLERANCE:
        raise DataError(
            f"{b} and {a.name} lie up to {gap:.3g} voxels apart (allowed: {TOLERANCE}): resample them to one grid"
        )


def apart(one: Image, other: Image) -> float:
    """The greatest distance between where two affines put a corner, in voxels of the first."""
    corners = np.array([[*c, 1] for c in product(*((0, n - 1) for n in one.shape))])
    gaps = np.linalg.norm((corners @ (one.affine - other.affine).T)[:, :-1], axis=1)
    return float(gaps.max() / min(one.spacing))


def boxed(image: Image, row: Row, outside: float | None = None) -> Image:
    """The part of an image that a case is; what lies ``outside`` of it is as dark as its darkest voxel."""
    if not row.box:
        return image
    who, dims = f"case {row.case!r} of site {row.site!r}", image.dims
    if len(row.box) != 2 * dims:
        raise DataError(f"{who}: a box of {len(row.box)} numbers in a {dims}D image")
    centre, size = np.array(row.box[:dims]), np.array(row.box[dims:])
    corners = np.array([[*(centre + size * c), 1] for c in product((-0.5, 0.5), repeat=dims)])
    at = (corners @ np.linalg.inv(image.affine).T)[:, :-1]
    start = np.floor(at.min(0) + 0.5).astype(int)  # np.round would put neighbouring halves on one voxel
    count = np.maximum(1, np.round(np.ptp(at, 0))).astype(int)
    stop, space = start + count, np.array(image.shape)
    if np.prod(count.astype(float)) > BOX:
        raise DataError(f"{who}: its box is too large, {' x '.join(map(str, count))} voxels")
    if (stop <= 0).any() or (start >= space).any():
        raise DataError(f"{who}: its box lies outside of the image")
    inside = image.array[tuple(slice(max(a, 0), b) for a, b in zip(start, stop, strict=True))]
    margins = list(zip(np.maximum(-start, 0), np.maximum(stop - space, 0), strict=True))
    affine = image.affine.copy()
    affine[:-1, -1] += affine[:-1, :-1] @ start
    dark = inside.min() if outside is None else outside
    return Image(np.pad(inside, margins, constant_values=dark), affine, image.unit)


def volumes(listed: Manifest, row: Row, names: Sequence[str]) -> Mapping[str, float]:
    """The volume of every label in millilitres; in a classification, 1 for the class and 0 for others."""
    if row.category:
        return {n: float(n == row.category) for n in names}
    truth = channel(listed, row.label, {})
    masks = channels(truth.array, list(row.labels.items()), str(listed.file(row.label)[0]))
    voxel = float(np.prod(truth.spacing)) / 1000
    return {name: float(mask.sum()) * voxel for name, mask in zip(row.labels, masks, strict=True)}
