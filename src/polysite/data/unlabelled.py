"""Scans without ground truth, for predictions: a manifest, a folder, or a single file.

Of a manifest the columns of the modalities are used; ``label`` and ``class`` are ignored, and ``site`` may be missing.
In a folder, a file belongs to the modality that its name ends in (``n01/t1.nii.gz``, ``n01_t1.nii.gz``, or nnU-Net's
``n01_0000.nii.gz``); arrays of HDF5 and NPZ files go by their keys. Where no name fits, every file is a case: of the
only modality, or of all of them as its channels. Files and folders that are called after label maps are left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from polysite.data import images, manifest
from polysite.data.case import Case
from polysite.data.files import COLOURS, open_images
from polysite.data.images import Image
from polysite.data.layouts import image_files, is_series
from polysite.data.manifest import UNKNOWN_SITE, Manifest, Row, locate
from polysite.data.pairing import ENDINGS, rank
from polysite.data.private_names import Pseudonyms
from polysite.errors import DataError, nearest

DEPTH = 5  # folders below the given one that are searched
SYNONYMS = {"t1n": "t1", "t1c": "t1ce", "t1gd": "t1ce", "t2w": "t2", "t1w": "t1", "t2f": "flair"}  # of BraTS and BIDS


@dataclass(frozen=True)
class Unlabelled:
    """Scans to predict, one row of a manifest per case, with the modalities of a model."""

    manifest: Manifest
    pseudonyms: Mapping[str, str]  # pseudonym -> name of a folder that is called after its patient
    joint: bool = False  # all modalities are the channels of one file, in their order

    @property
    def rows(self) -> tuple[Row, ...]:
        """The cases; their names are unique."""
        return self.manifest.rows

    def open(self, row: Row, zero: Sequence[int] = (), missing: bool = False) -> tuple[Case, Image]:
        """Read a case, and the first of its images with its geometry.

        Args:
            row: The case.
            zero: Modalities, by number, that the model must not see.
            missing: Replace modalities that were not acquired by zeros.
        """
        opened: dict[Path, Image] = {}
        volume, grid = open_images(self.manifest, row, opened, ("missing",) if missing or zero else ())
        if self.joint and (odd := next((f for f, i in opened.items() if i.channels != len(row.images)), None)):
            raise DataError(
                f"{odd} has {opened[odd].channels} channels, and the model was trained with {', '.join(row.images)}: "
                f"write a manifest with these columns that says which, as in {odd.name}#0"
            )
        volume[list(zero)] = 0
        return Case(row.site, row.case, volume, np.zeros(0, np.uint8), grid.spacing, "", grid.affine, grid.unit), grid

    def source(self, row: Row) -> Path:
        """Return the file, or the folder of DICOM slices, whose format and geometry the predictions take."""
        return self.manifest.file(next(f for f in row.images.values() if f))[0]


def find(path: Path, modalities: Sequence[str], zero: Sequence[int] = (), missing: bool = False) -> Unlabelled:
    """Find the scans below a path; refuse scans without the modalities of a model.

    Args:
        path: A manifest (.csv, .jsonl), a folder of scans, or one scan: a file or a folder of DICOM slices.
        modalities: Modalities of the model, in their order.
        zero: Modalities, by number, that need not be there.
        missing: Accept scans that lack some modalities.
    """
    if not path.exists() and not images.location(path)[0].exists():
        raise DataError(f"{path} does not exist; name a manifest, a folder of scans, or one scan")
    root, joint = _root(path), False
    if path.suffix.lower() in (".csv", ".jsonl"):
        rows = list(_listed(path, modalities))
    else:
        rows, joint = _found(path, modalities)
    names = Pseudonyms()
    rows = [replace(row, case=names.of(row.case, _file(row, root))) for row in _unique(rows, root)]
    listed = Manifest(tuple(rows), root, labelled=False)
    for row in listed.rows:
        lacking = [m for k, (m, f) in enumerate(row.images.items()) if not f and k not in zero]
        if lacking and not missing:
            raise DataError(
                f"case {row.case!r} has no {', '.join(lacking)}, and the model was trained with "
                f"{', '.join(modalities)}; add the file, or leave the case out"
            )
        for cell in filter(None, row.images.values()):
            file = images.location(listed.file(cell)[0])[0]
            if not file.exists():
                raise DataError(f"{file} of case {row.case!r} does not exist; correct {path}")
    return Unlabelled(listed, names.known, joint)


def _root(path: Path) -> Path:
    return (path if path.is_dir() and not is_series(path) else path.parent).resolve()


def _listed(path: Path, modalities: Sequence[str]) -> Iterator[Row]:
    """Return the cases of a manifest with the model's modalities; a column of pictures has three of them."""
    listed = manifest.read(path, labelled=False)

    def cells(row: Row) -> dict[str, str]:
        found = {}
        for name in modalities:
            column, channel = _column(name, listed.modalities)
            if column not in row.images:
                raise DataError(
                    f"{path} has no column {name!r}, which the model was trained with; {nearest(name, row.images)}"
                )
            cell = row.images[column]
            found[name] = cell if channel is None or not cell else f"{cell}#{channel}"
        return found

    return (replace(row, images=cells(row)) for row in listed.rows)


def _column(name: str, columns: Sequence[str]) -> tuple[str, int | None]:
    """Return the column of a modality, and its channel where the column holds pictures in colours.

    >>> _column("t1", ["t1", "t2"]), _column("green", ["image"])
    (('t1', None), ('image', 1))
    >>> _column("eye_blue", ["eye"])
    ('eye', 2)
    """
    if name in columns:
        return name, None
    if name in COLOURS and len(columns) == 1:
        return columns[0], COLOURS.index(name)
    column, _, colour = name.rpartition("_")
    return (column, COLOURS.index(colour)) if colour in COLOURS and column in columns else (name, None)


def _found(path: Path, modalities: Sequence[str]) -> tuple[list[Row], bool]:
    """Return the cases below a folder, or the case that a file or a DICOM folder is.

    Also return whether the modalities are the channels of one file, whose number must agree.
    """
    root = _root(path)
    if root == path.resolve():
        folders = {f: files for f, files in image_files(root, DEPTH).items() if not _is_truth(f)}
    else:
        name, end = path.resolve().name, "/" if path.is_dir() else ""
        if not end and not images.suffix(name):
            raise DataError(f"{path} is no image that polysite reads: it reads {images.what_is_read()}")
        folders = {"": {images.stem(images.location(Path(name))[0].name): f"{name}{end}"}}
    rows = [row for folder, files in folders.items() for row in _by_name(root, folder, files, modalities)]
    if rows:
        return rows, False
    coloured = len(modalities) > 1 and all(m in COLOURS for m in modalities)
    channels = [COLOURS.index(m) for m in modalities] if coloured else list(range(len(modalities)))
    rows = [row for files in folders.values() for row in _each(files, dict(zip(modalities, channels, strict=True)))]
    if not rows:
        raise DataError(f"no scan was found in {path}: polysite reads {images.what_is_read()}")
    return rows, len(modalities) > 1 and not coloured


def _is_truth(folder: str) -> bool:
    return any(rank(part) >= 0 for part in PurePosixPath(folder).parts)


def _by_name(root: Path, folder: str, files: Mapping[str, str], modalities: Sequence[str]) -> list[Row]:
    """Return the cases of a folder whose files are named after modalities, or hold arrays that are."""
    groups: dict[str, dict[str, str]] = {}
    for name, file in files.items():
        if file.lower().endswith(images.KEYED):
            known = {PurePosixPath(key).name: key for key in images.keys(root / file)}
            if all(m in known for m in modalities):
                groups[name] = {m: f"{file}#{known[m]}" for m in modalities}
            continue
        prefix, modality = _parsed(name, modalities)
        if modality:
            groups.setdefault(prefix, {}).setdefault(modality, file)
    home = PurePosixPath(folder).name or root.name
    return [
        Row(UNKNOWN_SITE, prefix or home, {m: found.get(m, "") for m in modalities}) for prefix, found in groups.items()
    ]


def _parsed(name: str, modalities: Sequence[str]) -> tuple[str, str]:
    """Split the name of a file into case and modality; the modality is empty if the name does not say it.

    >>> _parsed("n01_T1", ["t1", "flair"]), _parsed("n01_0001", ["t1", "flair"]), _parsed("n01", ["t1"])
    (('n01', 't1'), ('n01', 'flair'), ('n01', ''))
    """
    lower = {m.lower(): m for m in modalities}
    for modality in sorted(lower, key=len, reverse=True):
        if re.search(rf"(^|[_.\-\s]){re.escape(modality)}$", name.lower()):
            return name[: len(name) - len(modality)].rstrip("_.- "), lower[modality]
    match = re.fullmatch(r"(?:(.*)[_.\-\s])?([^_.\-\s]+)", name)
    if match and (known := lower.get(SYNONYMS.get(match[2].lower(), ""))):
        return match[1] or "", known
    if match and match[1] and re.fullmatch(r"\d{4}", match[2]) and int(match[2]) < len(modalities):
        return match[1], modalities[int(match[2])]
    return name, ""


def _each(files: Mapping[str, str], modalities: Mapping[str, int]) -> list[Row]:
    """Return every image of a folder as a case: of the only modality, or with all of them as its channels."""
    rows = []
    for name, file in files.items():
        words = re.split(r"[_.\-\s]", name)
        if ENDINGS.fullmatch(words[-1]) and (len(words) > 1 or len(files) > 1):
            continue  # a label map beside its image
        one = len(modalities) == 1
        rows.append(Row(UNKNOWN_SITE, name, {m: file if one else f"{file}#{k}" for m, k in modalities.items()}))
    return rows


def _file(row: Row, root: Path) -> Path:
    """Return the first image of a case, with the key of an array."""
    return locate(root, next(f for f in row.images.values() if f))[0]


def _unique(rows: Sequence[Row], root: Path) -> list[Row]:
    """Return the rows with names of cases that occur once: by folder, by site or by path, where they do not."""
    for other in (_by_folder, _by_site, _by_path):
        count = Counter(row.case for row in rows)
        rows = [row if count[row.case] == 1 else replace(row, case=other(row, root)) for row in rows]
    return list(rows)


def _by_folder(row: Row, root: Path) -> str:
    """Return the folder of a file: files in folders of cases often have the same name."""
    return row.case if row.site != UNKNOWN_SITE else _file(row, root).parent.name


def _by_site(row: Row, _root: Path) -> str:
    return row.case if row.site == UNKNOWN_SITE else f"{row.site}_{row.case}"


def _by_path(row: Row, root: Path) -> str:
    file = images.location(_file(row, root))[0]
    inside = file.relative_to(root) if file.is_relative_to(root) else file
    return "_".join((*inside.parts[:-1], images.stem(inside.name)))
