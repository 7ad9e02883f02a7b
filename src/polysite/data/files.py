"""Cases from image files: open the files that a manifest lists, and check them."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from polysite.data import images, layouts, manifest
from polysite.data.case import Case, CaseRef, channels
from polysite.data.images import Image
from polysite.data.layouts import SAMPLED_FILES, Scan
from polysite.data.manifest import Manifest, Row, natural
from polysite.errors import ConfigError, DataError, nearest

MAX_BOX_VOXELS = 1 << 26
TOLERANCE = 0.1  # voxels: largest distance between the same corner of two images of one case


@dataclass(frozen=True)
class Files:
    """Image files: a manifest, or a folder in one of the known layouts.

    Args:
        path: A manifest (.csv, .jsonl) or a folder.
        format: Layout of the folder; ``polysite data formats`` lists the layouts.
        tables: CSV files with the site, group or split of the cases.
        modalities: Modalities to use, in this order; empty for all.
        labels: Values of every label by name, instead of those in the manifest.
        sites: Sites to use; empty for all. A number may be written without leading zeros: "6" for the site "06".
        exclude: Sites to leave out.
        classes: Classes to use, in a classification; cases of other classes are left out. Empty for all.
        allow: ``missing`` replaces modalities that were not acquired by zeros; ``empty`` accepts label maps without any
            label.
    """

    path: str = ""
    format: str = "auto"
    tables: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    allow: tuple[Literal["missing", "empty"], ...] = ()

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("data.path is missing: name a manifest (.csv, .jsonl) or a folder of images")

    @cached_property
    def _scan(self) -> Scan:
        """All cases of the folder or manifest, before any selection."""
        path = Path(self.path)
        if path.is_dir():
            return layouts.scan(path, self.format, [Path(t) for t in self.tables], self.labels or None)
        listed = manifest.read(path)
        if self.labels and listed.task == "segmentation":
            listed = Manifest(tuple(replace(r, labels=self.labels) for r in listed.rows), listed.root)
        return Scan("manifest", listed)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on how the folder was read, such as cases that were left out."""
        return self._scan.remarks

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the sites, classes and modalities that this study uses."""
        listed = coloured(self._scan.manifest)
        sites, classes = self._sites(tuple(listed.sites)), self._classes(listed)
        wanted = self._modalities(listed)
        if wanted == listed.modalities and sites == listed.sites.keys() and classes == {*listed.label_names}:
            return listed
        rows = (r for r in listed.rows if r.site in sites and (r.label or r.category in classes))
        return Manifest(tuple(replace(r, images={m: r.images[m] for m in wanted}) for r in rows), listed.root)

    def _modalities(self, listed: Manifest) -> tuple[str, ...]:
        """Return the chosen modalities, or all. The column of a picture in colours stands for its three channels."""
        columns = self._scan.manifest.modalities
        found: list[str] = []
        for name in self.modalities or listed.modalities:
            if name not in listed.modalities and name not in columns:
                raise ConfigError(f"data.modalities names {name!r}; {self.path} has {', '.join(listed.modalities)}")
            found += (
                [name] if name in listed.modalities else [m for m in listed.modalities if m in _names(name, columns)]
            )
        return tuple(found)

    def _sites(self, known: Sequence[str]) -> set[str]:
        """Return the sites that are chosen and not excluded; refuse names that the data do not have."""
        chosen, excluded = (
            {_site(name, known, f"data.{key}") for name in getattr(self, key)} for key in ("sites", "exclude")
        )
        both = natural(chosen & excluded)
        if both:
            raise ConfigError(f"data.sites and data.exclude both name {both[0]!r}; remove it from one of them")
        left = (chosen or set(known)) - excluded
        if not left:
            raise ConfigError(f"data.exclude names all sites of {self.path}; at least one must stay")
        return left

    def _classes(self, listed: Manifest) -> set[str]:
        """Return the chosen classes, or all; refuse unknown ones, a single one, and classes of a segmentation."""
        if self.classes and listed.task != "classification":
            raise ConfigError(f"data.classes chooses classes, but {self.path} has label maps; leave it out")
        unknown = [c for c in self.classes if c not in listed.label_names]
        if unknown:
            raise ConfigError(
                f"data.classes names {unknown[0]!r}, which is no class of {self.path}; "
                f"{nearest(unknown[0], listed.label_names)}"
            )
        if len(set(self.classes)) == 1:
            raise ConfigError(f"data.classes = {list(self.classes)}: a classification takes two classes or more")
        return set(self.classes or listed.label_names)

    @property
    def task(self) -> str:
        """``segmentation`` or ``classification``."""
        return self.manifest.task

    @cached_property
    def dims(self) -> int:
        """Dimensions of the first image that can be read; 3 if there is none, which opening a case reports."""
        for row in self.manifest.rows:
            file = self.manifest.file(next(f for f in row.images.values() if f))[0]
            if images.suffix(str(file)) in images.FLAT:
                return 2
            try:
                return images.read(file).dims
            except DataError:
                continue
        return 3

    def geometry(self, tries: int = 3) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Return shape and voxel size of the first of some cases that can be read; None if there is none."""
        for row in self.manifest.rows[:tries]:
            try:
                image = channel(self.manifest, next(f for f in row.images.values() if f), {}, spacing=row.spacing)
            except DataError:
                continue
            return image.shape, image.spacing
        return None

    @property
    def modality_names(self) -> tuple[str, ...]:
        """Modalities, in the order of the image's channels."""
        return self.manifest.modalities

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels, or classes."""
        return self.manifest.label_names

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        """Return the cases of every site, not opened yet."""
        return {site: [*refs] for site, refs in self._refs.items()}

    @cached_property
    def _refs(self) -> Mapping[str, list[CaseRef]]:
        """The cases of every site, listed once: a dataset may have hundreds of thousands of boxes."""
        names, cell, files_of = self.label_names, cache(self.manifest.file), cache(_files_of)
        return {s: [self._ref(r, names, cell, files_of) for r in rows] for s, rows in self.manifest.sites.items()}

    def _ref(
        self,
        row: Row,
        names: tuple[str, ...],
        cell: Callable[[str], tuple[Path, int | None]],
        files_of: Callable[[Path], tuple[Path, ...]],
    ) -> CaseRef:
        listed, allow = self.manifest, self.allow
        cells = [cell(f) if f else None for f in (*row.images.values(), row.label)]
        files = tuple(dict.fromkeys(file for c in cells if c for file in files_of(c[0])))
        # the cache identifies files by their content, so the recipe holds their order and not their names
        recipe = [
            [c and _place(files, files_of(c[0]), *c) for c in cells],
            dict(row.labels),
            row.category,
            names,
            row.box,
            allow,
            *([row.spacing] if row.spacing else []),
        ]
        return CaseRef(
            site=row.site,
            name=row.case,
            read=lambda: open_case(listed, row, names, allow),
            volumes=lambda: volumes(listed, row, names),
            patient=row.patient or (str(files[0]) if row.box else ""),  # boxes of one scan belong to one patient
            group=row.group,
            category=row.category,
            split=row.split,
            files=files,
            recipe=json.dumps(recipe),
            modalities=len(row.images),
        )


def _place(files: Sequence[Path], own: Sequence[Path], file: Path, channel: int | None) -> tuple[object, ...]:
    """Return the place of an image among the files of its case: its first file, its key and its channel."""
    key = images.location(file)[1]
    return (files.index(own[0]) if own else -1, channel, *([key] if key else []))


COLOURS = ("red", "green", "blue")


def _names(column: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the channels of a column of pictures: red, green, blue if there is no other column."""
    return COLOURS if len(columns) == 1 else tuple(f"{column}_{colour}" for colour in COLOURS)


def coloured(listed: Manifest) -> Manifest:
    """Return the manifest with the three channels of every column of pictures in colours. The first one decides."""
    columns = listed.modalities
    wide = {m for m in columns if _in_colours(listed, m)}
    if not wide:
        return listed

    def cells(row: Row) -> dict[str, str]:
        found: dict[str, str] = {}
        for column, cell in row.images.items():
            channels = {m: f"{cell}#{i}" if cell else "" for i, m in enumerate(_names(column, columns))}
            found |= channels if column in wide else {column: cell}
        return found

    return Manifest(tuple(replace(r, images=cells(r)) for r in listed.rows), listed.root)


def _in_colours(listed: Manifest, column: str) -> bool:
    for row in listed.rows[:SAMPLED_FILES]:
        if cell := row.images[column]:
            file, index = listed.file(cell)
            if index is not None or images.suffix(str(file)) not in (*images.FLAT, *images.ARRAYS):
                return False
            with suppress(DataError):
                if images.suffix(str(file)) in images.FLAT:
                    return images.colours(file) == 3
                found = images.read(file)
                return found.dims == 2 and found.channels == 3
    return False


def _site(name: str, known: Sequence[str], key: str) -> str:
    """Return the site of the data with this name; a number may lack leading zeros.

    >>> _site("6", ["06", "13"], "data.sites")
    '06'
    """
    alike = [s for s in known if s == name] or [s for s in known if s.isdecimal() and s.lstrip("0") == name]
    if not alike:
        raise ConfigError(f"{key} names {name!r}, which is no site of the data; {nearest(name, known)}")
    return alike[0]


def open_case(listed: Manifest, row: Row, names: Sequence[str], allow: Sequence[str] = ()) -> Case:
    """Read and check one case; raise DataError for the first problem."""
    opened: dict[Path, Image] = {}
    volume, grid = open_images(listed, row, opened, allow)
    if row.category:
        label = np.array([n == row.category for n in names], np.uint8)
    else:
        truth = boxed(truth_of(listed, row, opened, bool(row.box)), row, outside=0)
        agree(listed, row, next(m for m, f in row.images.items() if f), grid, "label", truth)
        label = channels(truth.array, list(row.labels.items()), str(listed.file(row.label)[0]))
        if not label.any() and "empty" not in allow:
            raise DataError(
                f"{listed.file(row.label)[0]}: nothing is labelled; leave the case out, or set data.allow = ['empty'] "
                "if there is really nothing to find"
            )
    return Case(row.site, row.case, volume, label, grid.spacing, row.group, grid.affine, grid.unit)


def open_images(
    listed: Manifest, row: Row, opened: dict[Path, Image], allow: Sequence[str] = ()
) -> tuple[np.ndarray, Image]:
    """Return all modalities of a case as one array (modality, *space), and the first one with its geometry.

    Args:
        listed: The manifest.
        row: The case.
        opened: Files that are open already; those of the case are added.
        allow: ``missing`` replaces modalities that were not acquired by zeros.
    """
    absent = [m for m, f in row.images.items() if not f]
    if absent and "missing" not in allow:
        raise DataError(
            f"case {row.case!r} of site {row.site!r} has no {', '.join(absent)}; leave it out, choose data.modalities "
            "that all cases have, or set data.allow = ['missing'] to see zeros there"
        )
    acquired = {
        m: boxed(channel(listed, f, opened, bool(row.box), row.spacing), row) for m, f in row.images.items() if f
    }
    first = next(iter(acquired))
    for other, image in acquired.items():
        agree(listed, row, first, acquired[first], other, image)
    grid = acquired[first]
    for name, image in acquired.items():
        if image.array.min() == image.array.max():
            raise DataError(
                f"{listed.file(row.images[name])[0]}: every voxel is {image.array.flat[0]:g}; leave the case out, or "
                "empty its cell in the manifest and set data.allow = ['missing']"
            )
    stack = [acquired[m].array if m in acquired else np.zeros(grid.shape, np.float32) for m in row.images]
    return np.stack(stack).astype(np.float32), grid


def truth_of(listed: Manifest, row: Row, opened: dict[Path, Image], keep: bool = False) -> Image:
    """Return the label map of a case; of a picture in three equal colours, one of them."""
    file, index = listed.file(row.label)
    if index is None and images.suffix(str(file)) in images.BARE:
        image = opened[file] if file in opened else images.read(file)
        if image.dims == 2 and image.channels == 3 and (image.array == image.array[..., :1]).all():
            image = replace(image, array=image.array[..., 0])
        opened[file] = image
    return channel(listed, row.label, opened, keep, row.spacing)


def channel(
    listed: Manifest, name: str, opened: dict[Path, Image], keep: bool = False, spacing: Sequence[float] = ()
) -> Image:
    """Return the image of a cell of the manifest: a file of one channel, or one channel of a file.

    Args:
        listed: The manifest.
        name: The cell.
        opened: Files of this case that are open already; the file is added.
        keep: Keep the file in memory for the next case, since many boxes may lie in one scan.
        spacing: Size of a voxel, for a file that states none.
    """
    file, index = listed.file(name)
    if file not in opened:
        stamp = [p.stat().st_mtime_ns for p in _files_of(file) if p.is_file()] if keep else []
        opened[file] = _kept(file, *stamp) if stamp else images.read(file)
    image = _spaced(file, opened[file], spacing)
    if images.stem(file.name).endswith("_staple"):
        image = _decided(image)
    if index is None and image.channels == 1:
        return image
    if index is None:
        raise DataError(f"{file} has {image.channels} channels; say which, as in {file.name}#0")
    if index >= image.channels:
        if image.channels == 1 and images.suffix(str(file)) in images.FLAT:
            raise DataError(f"{file} is grey, others are in colours; convert it, or leave the case out")
        raise DataError(f"{file} has {image.channels} channels; there is no channel {index} (the first is 0)")
    return image if image.channels == 1 else Image(image.array[..., index], image.affine, image.unit)


def _spaced(file: Path, image: Image, spacing: Sequence[float]) -> Image:
    """Return an image with the spacing of the manifest, if its file states none; refuse another than the file's."""
    if not spacing:
        return image
    if len(spacing) != image.dims:
        raise DataError(f"{file} has {image.dims} dimensions, and its spacing in the manifest {len(spacing)} numbers")
    if images.suffix(str(file)) in images.BARE:
        return replace(image, affine=np.diag([*spacing, 1.0]), unit="mm")
    if not np.allclose(spacing, image.spacing, rtol=0.01):
        raise DataError(
            f"{file} has voxels of {' x '.join(f'{s:.3g}' for s in image.spacing)} mm, and the manifest says "
            f"{' x '.join(f'{s:.3g}' for s in spacing)}; empty the cell 'spacing', or correct the file"
        )
    return image


def _decided(image: Image) -> Image:
    """Return a map of the probabilities that STAPLE writes as a mask, 1 above one half; other values as they are."""
    fractions = image.array.dtype.kind == "f" and image.array.min() >= 0 and image.array.max() <= 1
    return replace(image, array=(image.array > 0.5).astype(np.uint8)) if fractions else image


@lru_cache(maxsize=2)
def _kept(file: Path, *changed: int) -> Image:
    return images.read(file)


def _files_of(file: Path) -> tuple[Path, ...]:
    """Return the files that hold an image. An unreadable file is reported when it is opened, not here."""
    try:
        return images.files_of(file)
    except DataError:
        return (file,)


def agree(listed: Manifest, row: Row, first: str, one: Image, second: str, other: Image) -> None:
    """Refuse two images of a case that do not lie on the same grid."""
    a, b = (listed.file(row.label if n == "label" else row.images[n])[0] for n in (first, second))
    if one.shape != other.shape:
        raise DataError(f"{b} has the shape {other.shape}, {a.name} has {one.shape}: resample them to one grid")
    gap = apart(one, other)
    if gap > TOLERANCE:
        raise DataError(
            f"{b} and {a.name} lie up to {gap:.3g} voxels apart (allowed: {TOLERANCE}): resample them to one grid"
        )


def apart(one: Image, other: Image) -> float:
    """Return the largest distance between the same corner of two images, in voxels of the first."""
    corners = np.array([[*c, 1] for c in product(*((0, n - 1) for n in one.shape))])
    gaps = np.linalg.norm((corners @ (one.affine - other.affine).T)[:, :-1], axis=1)
    return float(gaps.max() / min(one.spacing))


def boxed(image: Image, row: Row, outside: float | None = None) -> Image:
    """Cut the box of a case out of an image. Voxels beyond the image get ``outside``, or the darkest value inside."""
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
    if np.prod(count.astype(float)) > MAX_BOX_VOXELS:
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
    truth = truth_of(listed, row, {})
    masks = channels(truth.array, list(row.labels.items()), str(listed.file(row.label)[0]))
    voxel = float(np.prod(truth.spacing)) / 1000
    return {name: float(mask.sum()) * voxel for name, mask in zip(row.labels, masks, strict=True)}
