"""Sheets to look at before training, one a site: are the data what the hospital believes them to be?

A row is a case: its modalities, with the outlines of its labels. Below, the intensities of all cases shown.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from nibabel.orientations import aff2axcodes, apply_orientation, axcodes2ornt, io_orientation, ornt_transform

from polysite.data.case import Case, Patient
from polysite.data.sources import Source
from polysite.errors import PolysiteError
from polysite.report.figures import COLOURS

OUTLINES = tuple(COLOURS[k] for k in (4, 1, 3, 2, 5))  # those that show on grey
SAMPLE = 200_000  # voxels that stand for a whole volume in percentiles and histograms
DPI = 150
NAMES, PANEL, GAP, LINE, HISTOGRAM = 1.65, 2.2, 0.1, 0.15, 1.2  # inches
LETTERS = 14  # an inch, of a refusal


class Study(Protocol):
    """As much of a study as a sheet needs; whole ones live in a layer above."""

    @property
    def seed(self) -> int: ...

    @property
    def data(self) -> Source: ...


@dataclass(frozen=True, eq=False)
class Row:
    """What of a case goes on the sheet, so that the volume itself can be let go."""

    text: Sequence[str]  # name, size and so on
    pictures: Sequence[np.ndarray] = ()  # one a modality
    masks: Sequence[np.ndarray] = ()  # one a label
    voxels: Sequence[np.ndarray] = ()  # one a modality: some of those that are not zero
    pixel: float = 1.0  # its height over its width
    place: str = ""  # which slice; none in a flat image
    problem: str = ""  # why the case cannot be shown


def draw(study: Study, out: Path, cases: int = 6) -> Iterator[Path]:
    """Write ``out/SITE.png`` for every site, with up to so many cases, evenly over its list."""
    out.mkdir(parents=True, exist_ok=True)
    labels = study.data.label_names if study.data.task == "segmentation" else ()
    for site, patients in study.data.patients(study.seed).items():
        chosen = np.linspace(0, len(patients) - 1, min(cases, len(patients))).round().astype(int)
        rows = [_row(patients[k]) for k in chosen]
        title = f"{site}: {len(patients)} case{'s' * (len(patients) != 1)}, {len(rows)} shown"
        file = out / f"{file_name(site)}.png"
        _sheet(title, rows, study.data.modality_names, labels).savefig(file, dpi=DPI)
        yield file


def file_name(site: str) -> str:
    """A name that file systems take, and different ones for different sites.

    >>> file_name("St. Anna"), file_name("../a/b"), file_name("50%")
    ('St. Anna', '%2E.%2Fa%2Fb', '50%25')
    """
    return re.sub(r"[^\w .-]|^\.", lambda found: f"%{ord(found[0]):02X}", site)


def upright(case: Case) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]]:
    """Image and label as (channel, slice, row, column) and the voxel size in that order, turned as radiologists look:
    axial slices seen from the feet, so that the front is up and the patient's left is on the right."""
    label = case.label if case.label.ndim > 1 else np.zeros((0, *case.image.shape[1:]), np.uint8)
    if case.image.ndim == 3:  # flat: rows and columns already
        return case.image[:, None], label[:, None], (1.0, *case.spacing)
    turn = ornt_transform(io_orientation(_affine(case)), axcodes2ornt("LPS"))
    image, label = (apply_orientation(np.moveaxis(a, 0, -1), turn).transpose(3, 2, 1, 0) for a in (case.image, label))
    return image, label, tuple(case.spacing[k] for k in np.argsort(turn[:, 0])[::-1])


def widest(label: np.ndarray) -> int:
    """The slice of (label, slice, row, column) in which most is labelled; the middle one where nothing is."""
    areas = label.sum((0, 2, 3))
    return int(areas.argmax()) if areas.any() else len(areas) // 2


def _affine(case: Case) -> np.ndarray:
    return np.diag([*case.spacing, 1.0]) if case.affine is None else case.affine


def _row(patient: Patient) -> Row:
    name = wrap(patient.name, 22)
    try:
        case = patient.open()
    except PolysiteError as problem:
        return Row(name, problem=str(problem))
    image, label, (_, height, width) = upright(case)
    k, slices = widest(label), image.shape[1]
    return Row(
        text=[*name, *_facts(patient, case)],
        pictures=list(image[:, k].copy()),
        masks=list(label[:, k].copy()),
        voxels=[found[:: max(1, len(found) // SAMPLE)] for found in (volume[volume != 0] for volume in image)],
        pixel=height / width,
        place=f"{k + 1} of {slices}" if case.image.ndim == 4 else "",
    )


def _facts(patient: Patient, case: Case) -> Iterator[str]:
    yield " × ".join(map(str, case.image.shape[1:]))
    yield f"{' × '.join(f'{s:.3g}' for s in case.spacing)} mm"
    if case.image.ndim == 4:
        yield f"axes {''.join(aff2axcodes(_affine(case)))}{' (assumed)' if case.affine is None else ''}"
    for what, value in (("group", patient.group), ("class", patient.category)):
        yield from wrap(f"{what} {value}", 24) if value else ()


def _sheet(title: str, rows: Sequence[Row], modalities: Sequence[str], labels: Sequence[str]) -> Figure:
    """All cases, then their histograms, measured in inches; cases of few modalities lie side by side."""
    count = len(modalities)
    beside = max(1, min(len(rows), int(13 / (NAMES + count * (PANEL + GAP)))))
    widths = [NAMES, *[PANEL] * count] * beside
    heights = [max(_height(r, count) for r in rows[k : k + beside]) for k in range(0, len(rows), beside)] + [HISTOGRAM]
    width, body = sum(widths) + GAP * (len(widths) + 1), sum(heights) + GAP * (len(heights) - 1)
    figure = Figure((width, body))
    top, bottom = _head(figure, wrap(title, int(9 * width)), labels), 0.35
    height = top + body + bottom
    figure.set_figheight(height)
    grid = figure.add_gridspec(
        len(heights), len(widths), width_ratios=widths, height_ratios=heights,
        left=GAP / width, right=1 - GAP / width, top=1 - top / height, bottom=bottom / height,
        wspace=GAP * len(widths) / sum(widths), hspace=GAP * len(heights) / sum(heights),
    )  # fmt: skip
    return figure
