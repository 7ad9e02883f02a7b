"""The manifest: a table of cases with their site and files. CSV or JSON lines, one row per case.

::

    site,case,t1,flair,label,labels,group,split
    north,n01,n01/t1.nii.gz,n01/flair.nii.gz,n01/seg.nii.gz,"WT=1,2,4; TC=1,4; ET=4",HGG,
    north,n02,n02/t1.nii.gz,,n02/seg.nii.gz,"WT=1,2,4; TC=1,4; ET=4",LGG,test

=========  ============================================================================================
site       the hospital
case       name of the case, unique in the hospital
label      the label map (segmentation)
labels     meaning of its values; rows may differ in values (1/2/4 here, 1/2/3 there), not in names
class      instead of ``label``: the class of the whole image (classification)
spacing    size of a voxel in millimetres, "0.5 0.5 2", for files that state none: pictures, HDF5, NPY, NPZ
box        use only this box of the image: centre and size in millimetres, "x y z dx dy dz" (RAS)
patient    identifier of a patient with several cases (time points): they stay in one split
group      tumour grade, scanner: splits can be stratified by it, federations built from it
split      train, validation or test, if it is fixed
*others*   a column of images is a modality; an empty cell means not acquired. Other columns are ignored
=========  ============================================================================================

Files are relative to the manifest. ``scan.nii.gz#2`` is the third channel of a file, ``scan.h5#image`` an array of a
file of several, ``scan.h5#image#2`` its third channel, and ``n01/ct/`` a folder that holds a DICOM series.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any

from polysite.data.case import SPLITS
from polysite.data.images import KEYED, is_image, suffix, what_is_read
from polysite.errors import DataError, shown
from polysite.foreign import parse_json
from polysite.payload import natural as natural
from polysite.spreadsheets import csv_text, plain_cell
from polysite.storage import write_file

Labels = Mapping[str, tuple[int, ...]]  # name -> values of the label map

UNKNOWN_SITE = "scans"  # of scans to predict whose hospital is not stated
COLUMNS = ("site", "case", "patient", "label", "labels", "class", "spacing", "box", "group", "split")


@dataclass(frozen=True)
class Row:
    """One case. Files are as written in the manifest; ``Manifest.file`` resolves them."""

    site: str
    case: str
    images: Mapping[str, str]  # modality -> file; "" if it was not acquired
    label: str = ""
    labels: Labels = field(default_factory=dict)
    category: str = ""  # the column "class"
    spacing: tuple[float, ...] = ()  # of files that state none, in millimetres
    box: tuple[float, ...] = ()
    patient: str = ""  # identifier of a patient with several cases
    group: str = ""
    split: str = ""


@dataclass(frozen=True)
class Manifest:
    """All cases of a dataset."""

    rows: tuple[Row, ...]
    root: Path  # folder that relative files are relative to
    labelled: bool = True  # every case has a label map or a class; scans to predict have neither

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(f"no case was found in {self.root}")
        seen: set[tuple[str, str]] = set()
        for row in self.rows:
            self._check(row, seen)
            seen.add((row.site, row.case))

    def _check(self, row: Row, seen: set[tuple[str, str]]) -> None:
        who, first = f"case {row.case!r} of site {row.site!r}", self.rows[0]
        if not row.site or not row.case:
            raise DataError(f"a row without site or case: {row}")
        try:
            f"{row.site}{row.case}".encode()
        except UnicodeEncodeError as problem:
            raise DataError(f"{who} has a name that is not valid text; rename it") from problem
        if (row.site, row.case) in seen:
            raise DataError(f"{who} is there twice; names of cases must be unique in a site")
        if reserved := set(row.images) & set(COLUMNS):
            raise DataError(
                f"{who} has a modality called {min(reserved)!r}, which is a column of its own; rename that file"
            )
        if not any(row.images.values()):
            raise DataError(f"{who} has no image: no column of its row names an image file")
        if row.images.keys() != first.images.keys():
            raise DataError(f"{who} has the modalities {', '.join(row.images)}; others have {', '.join(first.images)}")
        if self.labelled and bool(row.label) == bool(row.category):
            raise DataError(f"{who} needs either a label map (column 'label') or a class (column 'class')")
        if self.labelled and bool(row.label) != bool(first.label):
            raise DataError(f"{who} has a {'label map' if row.label else 'class'} and others do not")
        if row.label and (list(row.labels) != list(first.labels) or not row.labels):
            given, others = shown(", ".join(row.labels) or "none"), shown(", ".join(first.labels))
            raise DataError(
                f"{who} declares the labels {given}; others declare {others}: use the same names in one order"
            )
        if row.split not in ("", *SPLITS):
            raise DataError(f"{who} has split = {row.split!r}; it is one of {', '.join(SPLITS)} or empty")
        if row.spacing and not (len(row.spacing) in (2, 3) and all(isfinite(v) and v > 0 for v in row.spacing)):
            raise DataError(
                f"{who} has spacing = {' '.join(map(str, row.spacing))}; it is the size of a voxel along every axis in "
                "millimetres, as in '0.5 0.5 2'"
            )
        sound = len(row.box) in (4, 6) and all(map(isfinite, row.box)) and min(row.box[len(row.box) // 2 :]) > 0
        if row.box and not sound:
            raise DataError(
                f"{who} has a box of {len(row.box)} numbers; it is centre and size, as in '10 20 30 50 50 50'"
            )

    @property
    def task(self) -> str:
        """``segmentation`` or ``classification``."""
        return "segmentation" if self.rows[0].label else "classification"

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of every row, in their order."""
        return tuple(self.rows[0].images)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels, or classes in natural order."""
        if self.task == "segmentation":
            return tuple(self.rows[0].labels)
        return tuple(natural({r.category for r in self.rows}))

    @property
    def sites(self) -> Mapping[str, list[Row]]:
        """Rows by site, in natural order."""
        rows: dict[str, list[Row]] = {name: [] for name in natural({r.site for r in self.rows})}
        for row in self.rows:
            rows[row.site].append(row)
        return rows

    def file(self, name: str) -> tuple[Path, int | None]:
        """Return the path of a row's file, with the key of an array in it, and the channel if one is given."""
        return locate(self.root, name)


def locate(root: Path, name: str) -> tuple[Path, int | None]:
    """Return the path of a file that is relative to a folder, with the key of an array, and the channel if given."""
    path, channel = _split(name)
    return root / path, channel


def read(path: Path, labelled: bool = True) -> Manifest:
    """Read a manifest from a CSV or JSON-lines file.

    Args:
        path: The file.
        labelled: Require a label map or a class of every case. Scans to predict need neither (both are ignored), nor a
            site.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"the manifest {path} cannot be read: {problem}") from problem
    cells = list(_json_lines(text, path) if path.suffix == ".jsonl" else _csv(text, path))
    if not cells:
        raise DataError(f"the manifest {path} holds no case")
    modalities = _modalities(cells, path)
    if not labelled:
        unused = dict.fromkeys(("label", "labels", "class"), "")
        cells = [(line, {"site": UNKNOWN_SITE, **{k: v for k, v in c.items() if v}, **unused}) for line, c in cells]
    rows = tuple(_row(line, c, modalities, path) for line, c in cells)
    return Manifest(rows, path.parent.resolve(), labelled)


def write(manifest: Manifest, path: Path) -> None:
    """Write a manifest. Files below its folder are written relative to it, others with their full path."""
    home = path.parent.resolve()
    rows = [_cells(r, manifest, home) for r in manifest.rows]
    used = [
        c for c in dict.fromkeys(k for r in rows for k in r) if any(r.get(c) for r in rows) or c in manifest.modalities
    ]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps({k: r[k] for k in used if r.get(k)}) + "\n" for r in rows)
    else:
        text = csv_text(used, ([r.get(k, "") for k in used] for r in rows))
    write_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def parse_labels(text: str) -> Labels:
    """Parse the column ``labels``: the values of every label.

    >>> parse_labels("WT=1,2,4; ET=4")
    {'WT': (1, 2, 4), 'ET': (4,)}
    """
    labels: dict[str, tuple[int, ...]] = {}
    for entry in filter(str.strip, text.split(";")):
        name, sign, values = entry.partition("=")
        try:
            labels[name.strip()] = tuple(int(v) for v in values.split(","))
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise DataError(f"labels = {text!r} is not of the form 'WT=1,2,4; TC=1,4'")
    return labels


def format_labels(labels: Labels) -> str:
    """Return the text that ``parse_labels`` parses.

    >>> format_labels({"WT": (1, 2, 4), "ET": (4,)})
    'WT=1,2,4; ET=4'
    """
    return "; ".join(f"{name}={','.join(map(str, values))}" for name, values in labels.items())


def _split(name: str) -> tuple[str, int | None]:
    """Split ``scan.nii.gz#2`` into file and channel. What follows the first # of HDF5 and NPZ files is a key."""
    path, mark, channel = name.rpartition("#")
    numbered = mark and channel.isdecimal() and len(channel) < 5 and suffix(path)
    if numbered and path.lower().endswith(KEYED):
        return name, None
    return (path, int(channel)) if numbered else (name, None)


def _csv(text: str, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    table = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    if table.fieldnames and len(set(table.fieldnames)) < len(table.fieldnames):
        raise DataError(f"{path}: two columns of the manifest have the same name")
    for cells in _lines(table, path):
        if None in cells or None in cells.values():
            raise DataError(f"{path}, line {table.line_num}: the row has more or fewer cells than the header")
        if any(cells.values()):
            yield table.line_num, {plain_cell(k.strip()): plain_cell(v.strip()) for k, v in cells.items()}


def _lines(table: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from table
    except csv.Error as problem:
        raise DataError(f"{path}, line {table.line_num}: {problem}") from problem


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                cells = parse_json(line)
            except ValueError as problem:
                raise DataError(f"{path}, line {number}: not a JSON object of a case: {problem}") from problem
            if not isinstance(cells, dict):
                raise DataError(f"{path}, line {number}: not a JSON object of a case, but {line.strip()[:40]!r}")
            yield number, {k: _text(v) for k, v in cells.items()}


def _text(value: Any) -> str:
    """Convert a JSON value to the cell of a table; box and labels may be lists and objects."""
    if isinstance(value, Mapping):
        return format_labels({k: tuple(v) if isinstance(v, list) else (v,) for k, v in value.items()})
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _modalities(cells: Sequence[tuple[int, Mapping[str, str]]], path: Path) -> list[str]:
    """Return the columns with images."""
    modalities = []
    strange: dict[str, str] = {}  # ending -> a cell with it
    for name in dict.fromkeys(k for _, c in cells for k in c if k not in COLUMNS):
        given = [(line, c[name]) for line, c in cells if c.get(name)]
        images = [is_image(_split(v)[0]) for _, v in given]
        if any(images):
            if not all(images):
                line, odd = given[images.index(False)]
                ending = PurePosixPath(odd).suffix
                why = f": {ending} files are not read" if ending else ""
                raise DataError(
                    f"{path}, line {line}: {odd!r} in column {name!r} is no image file, others there are{why}; "
                    f"polysite reads {what_is_read()}"
                )
            modalities.append(name)
        strange |= {PurePosixPath(v).suffix: v for _, v in given if re.search(r"\.[A-Za-z]\w{1,5}$", v)}
    if not modalities:
        seen = ", ".join(f"{ending} as in {cell!r}" for ending, cell in list(strange.items())[:3])
        strangers = f" ({seen} is not)" if seen else ""
        raise DataError(
            f"{path}: no column of the manifest names image files that are read{strangers}; polysite reads "
            f"{what_is_read()}: add a column of such files, or name the folder of the images instead of this file"
        )
    return modalities


def _row(line: int, cells: Mapping[str, str], modalities: Sequence[str], path: Path) -> Row:
    lacking = [k for k in ("site", "case") if not cells.get(k)]
    if lacking:
        raise DataError(f"{path}, line {line}: the row has no {' and no '.join(lacking)}")
    label = cells.get("label", "")
    try:
        return Row(
            site=cells["site"],
            case=cells["case"],
            images={m: cells.get(m, "") for m in modalities},
            label=label,
            labels=parse_labels(cells.get("labels", "")) if label else {},
            category=cells.get("class", ""),
            spacing=tuple(float(v) for v in cells.get("spacing", "").replace(",", " ").split()),
            box=tuple(float(v) for v in cells.get("box", "").split()),
            patient=cells.get("patient", ""),
            group=cells.get("group", ""),
            split=cells.get("split", ""),
        )
    except (DataError, ValueError) as problem:
        raise DataError(f"{path}, line {line}: {problem}") from problem


def _cells(row: Row, manifest: Manifest, home: Path) -> dict[str, str]:
    def file(name: str) -> str:
        path, channel = manifest.file(name)
        path = path.relative_to(home) if path.is_relative_to(home) else path
        end = "/" if name.endswith("/") else ""
        return path.as_posix() + end + ("" if channel is None else f"#{channel}")

    return {
        "site": row.site,
        "case": row.case,
        **{m: file(f) if f else "" for m, f in row.images.items()},
        "label": file(row.label) if row.label else "",
        "labels": format_labels(row.labels),
        "class": row.category,
        "spacing": " ".join(map(repr, row.spacing)),
        "box": " ".join(map(repr, row.box)),
        "patient": row.patient,
        "group": row.group,
        "split": row.split,
    }
