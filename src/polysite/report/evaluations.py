"""Evaluation folders as tables and figures read them: measures of every case, predictions and scans to look at."""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan, prod
from pathlib import Path
from statistics import fmean
from typing import Any, Self
from zipfile import BadZipFile, ZipFile

import numpy as np

from polysite.engines.phases import SHARED
from polysite.errors import RunError
from polysite.foreign import parse_json
from polysite.site import Count, Counts
from polysite.spreadsheets import rows as csv_rows

Key = tuple[str, str]  # site and case
MEND = "'polysite evaluate --again' makes it anew, and a page does without it with --no-scans"

TEXT_COLUMNS = ("model", "site", "case", "label")  # of cases.csv; all other columns are numbers
DEFLATE = 1100  # times that an archive can make its content smaller
# what NumPy and the archive of a damaged .npz file may raise
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, ArithmeticError, MemoryError, BadZipFile,
    zlib.error, struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The measures of a label of a case under a model: a row of ``cases.csv``."""

    model: str  # hospital whose own model it is, or SHARED
    site: str
    case: str
    label: str
    values: Mapping[str, float]  # by measure

    @classmethod
    def parse(cls, row: Mapping[str, str]) -> Self:
        """Return a row of the file."""
        values = {k: float(v) for k, v in row.items() if k not in TEXT_COLUMNS}
        return cls(row["model"], row["site"], row["case"], row["label"], values)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation folder: measures of every case, predictions and scans to look at."""

    path: Path
    about: Mapping[str, Any]
    rows: Sequence[Measured]
    counts: Mapping[tuple[str, str, str], Counts] = field(default_factory=dict)  # by model, site and case

    @cached_property
    def own(self) -> Mapping[Key, Mapping[str, Mapping[str, float]]]:
        """Measures of every case under the model of its own hospital: label -> measure -> value."""
        cases: dict[Key, dict[str, Mapping[str, float]]] = {}
        for row in self.rows:
            if row.model in (SHARED, row.site):
                cases.setdefault((row.site, row.case), {})[row.label] = row.values
        return cases

    @cached_property
    def subgroups(self) -> Mapping[Key, str]:
        """Subgroup (grade, scanner, sex) of every case whose subgroup is known."""
        known = self.about.get("subgroups", {})  # none in evaluations of 0.1.0
        return {(site, case): str(group) for site, cases in known.items() for case, group in cases.items()}

    def prediction(self, site: str, case: str) -> np.ndarray | None:
        """Return the prediction of the hospital's model on the grid of the prepared case; None if it was not kept."""
        return self._kept("predictions.npz", f"{site}/{case}")

    def scan(self, site: str, case: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the image (modality, slice, row, column) and ground truth (slice, row, column) of a kept case."""
        image, truth = (self._kept("scans.npz", f"{site}/{case}/{what}") for what in ("image", "truth"))
        if image is None or truth is None:
            raise RunError(f"{self.path / 'scans.npz'} does not hold case {case!r} of site {site!r}; {MEND}")
        return image, truth[0]

    @cached_property
    def clusters(self) -> list[dict[str, str]]:
        """Rows of clusters.csv: hospital, cluster, coordinates and label volumes of every case."""
        path = self.path / "clusters.csv"
        if not path.is_file():
            return []
        try:
            return read_table(path)
        except (OSError, ValueError) as problem:
            raise RunError(f"{path} cannot be read: {problem}; 'polysite evaluate --again' makes it anew") from problem

    def _kept(self, file: str, name: str) -> np.ndarray | None:
        if not (self.path / file).exists():  # nothing was kept, as in a deployed run
            return None
        try:
            return _array(self.path / file, name)
        except UNREADABLE as problem:
            raise RunError(f"{self.path / file} cannot be read: {problem!r:.200}; {MEND}") from problem


def _array(path: Path, name: str) -> np.ndarray | None:
    """Return an array of an .npz file, or None; ValueError if it claims more than can be in the file."""
    with ZipFile(path) as archive:
        if f"{name}.npy" not in archive.namelist():
            return None
        with archive.open(f"{name}.npy") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        if prod(shape) * dtype.itemsize > DEFLATE * path.stat().st_size:
            raise ValueError(f"{name!r} claims the shape {shape}")
        with archive.open(f"{name}.npy") as stream:
            found: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
            return found


def read_evaluation(path: Path, name: str) -> Evaluation | None:
    """Read an evaluation of a run folder; None if there is no evaluation of that name."""
    place = path / "evaluation" / name
    if not (place / "about.json").is_file():
        return None
    try:
        rows = [Measured.parse(row) for row in read_table(place / "cases.csv")]
        about = parse_json((place / "about.json").read_text(encoding="utf-8"))
        counts = read_counts(place / "counts.csv")
        _ = Evaluation(place, about, rows).subgroups
        declared, present = sum(about["cases"].values()), len({(row.site, row.case) for row in rows})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise RunError(f"the evaluation {place} cannot be read ({problem!r}); 'polysite evaluate --again'") from problem
    if present != declared:
        raise RunError(
            f"{place / 'cases.csv'} holds {present} cases of {declared}; 'polysite evaluate --again' makes it anew"
        )
    return Evaluation(place, about, rows, counts)


def read_counts(path: Path) -> Mapping[tuple[str, str, str], Counts]:
    """Read the counts of an evaluation; none if there is no such file, as in 0.1.0 and in a classification."""
    if not path.is_file():
        return {}
    counts: dict[tuple[str, str, str], dict[str, Count]] = {}
    for row in read_table(path):
        count = int(row["tp"]), int(row["fp"]), int(row["fn"]), int(row["tn"])
        counts.setdefault((row["model"], row["site"], row["case"]), {})[row["label"]] = count
    return counts


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv_rows(file))


def matrix(rows: Iterable[Measured]) -> dict[str, dict[str, float]]:
    """Return the mean Dice of every model on the cases of every hospital: owner of the model -> hospital -> Dice."""
    cells: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cells.setdefault((row.model, row.site), []).append(row.values["dice"])
    models, sites = (sorted({key[k] for key in cells}) for k in (0, 1))
    return {m: {s: _mean(cells.get((m, s), ())) for s in sites} for m in models}


def _mean(numbers: Iterable[float]) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there are none."""
    known = [x for x in numbers if not isnan(x)]
    return fmean(known) if known else nan
