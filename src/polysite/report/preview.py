"""Preview sheets, one per site, to check the data before training.

A row shows the modalities of a case with the outlines of its labels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from polysite.config import Study
from polysite.data.case import Case, CaseRef
from polysite.engines.run_folder import file_name
from polysite.errors import PolysiteError
from polysite.report.drawing import COLOURS, outline
from polysite.report.orientation import axes_of, turned, turned_size
from polysite.storage import write_file

OUTLINES = tuple(COLOURS[k] for k in (4, 1, 3, 2, 5))  # colours that are visible on grey
SAMPLE = 200_000  # voxels of a volume that enter percentiles
DPI = 150
NAMES, PANEL, HEAD, LINE, NARROW = 1.65, 2.2, 1.1, 0.15, 5.0  # inches


@dataclass(frozen=True, eq=False)
class Row:
    """The part of a case that a sheet shows, so that the volume can be freed."""

    text: Sequence[str]  # name, size and so on
    pictures: Sequence[np.ndarray] = ()  # per modality
    masks: Sequence[np.ndarray] = ()  # per label
    voxels: Sequence[np.ndarray] = ()  # per modality: a sample of the voxels that are not zero
    pixel: float = 1.0  # height of a pixel over its width
    place: str = ""  # the slice; empty for a 2D image
    problem: Sequence[str] = ()  # why the case cannot be shown


def draw(study: Study, out: Path, cases: int = 6) -> Iterator[Path]:
    """Write ``out/SITE.png`` for every site, with up to ``cases`` cases, spread evenly over its list.

    A volume that is cut into slices shows its middle slice.
    """
    out.mkdir(parents=True, exist_ok=True)
    labels = study.data.label_names if study.data.task == "segmentation" else ()
    for site, refs in study.data.case_refs(study.seed).items():
        chosen = np.linspace(0, len(refs) - 1, min(cases, len(refs))).round().astype(int)
        shown = study.cut([refs[k] for k in chosen]).values()
        rows = [_row(cases[len(cases) // 2], len(study.data.modality_names)) for cases in shown if cases]
        title = f"{site}: {len(refs)} case{'s' * (len(refs) != 1)}, {len(rows)} shown"
        file = out / f"{file_name(site)}.png"
        _sheet(title, rows, study.data.modality_names, labels).savefig(file, dpi=DPI)
        yield file


def upright(case: Case) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]]:
    """Return image and label as (channel, slice, row, column), and the voxel size, in radiological orientation: axial
    slices seen from the feet, with the front up and the patient's left on the right."""
    label = case.label if case.label.ndim > 1 else np.zeros((0, *case.image.shape[1:]), np.uint8)
    way = axes_of(case)
    return turned(case.image, way), turned(label, way), turned_size(case.spacing, way)


def widest(label: np.ndarray) -> int:
    """Return the slice of (label, slice, row, column) with most labelled voxels; the middle one if there are none."""
    areas = label.sum((0, 2, 3))
    return int(areas.argmax()) if areas.any() else len(areas) // 2


def write_sheet(file: Path, title: str, rows: Sequence[Row], modalities: Sequence[str], labels: Sequence[str]) -> None:
    """Write a sheet of these rows as PNG."""
    figure = _sheet(title, rows, modalities, labels)
    write_file(file, lambda draft: figure.savefig(draft, dpi=DPI, format="png"))


def _row(ref: CaseRef, panels: int) -> Row:
    try:
        case = ref.open()
    except PolysiteError as problem:
        return Row(wrap(ref.name, 22), problem=wrap(str(problem), int(13 * panels * PANEL)))
    known = [f"{what} {value}" for what, value in (("group", ref.group), ("class", ref.category)) if value]
    return row_of(replace(case, name=ref.name), known)


def row_of(case: Case, facts: Iterable[str] = ()) -> Row:
    """Return the row of a case: the slice with most labelled voxels, with the outlines of its labels.

    Args:
        case: The case.
        facts: Lines below its name, size and voxel size.
    """
    image, label, (_, height, width) = upright(case)
    k = widest(label)
    return Row(
        text=[*wrap(case.name, 22), *_facts(case), *(line for fact in facts for line in wrap(fact, 24))],
        pictures=list(image[:, k].copy()),
        masks=list(label[:, k].copy()),
        voxels=[v[:: max(1, len(v) // SAMPLE)].copy() for v in (volume[volume != 0] for volume in case.image)],
        pixel=height / width,
        place=f"{k + 1} of {image.shape[1]}" if case.image.ndim == 4 else "",
    )


def _facts(case: Case) -> Iterator[str]:
    yield " × ".join(map(str, case.image.shape[1:]))
    yield f"{' × '.join(f'{s:.3g}' for s in case.spacing)} {case.unit or '(unit unknown)'}"
    if case.image.ndim == 4:
        yield f"axes {axes_of(case)}{' (assumed)' if case.affine is None else ''}"


def _sheet(title: str, rows: Sequence[Row], modalities: Sequence[str], labels: Sequence[str]) -> Figure:
    """Draw a row per case."""
    heights, widths = list(map(_height, rows)) or [PANEL], [NAMES, *[PANEL] * len(modalities)]
    width = max(sum(widths), NARROW)
    heading = "\n".join(wrap(title, int(9 * width)))
    figure = Figure((width, sum(heights) + HEAD), layout="constrained")
    figure.suptitle(heading, x=0, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    blank: dict[str, Any] = {"xticks": [], "yticks": [], "anchor": "NW", "facecolor": "none"}
    ratios: dict[str, Any] = {"width_ratios": widths, "height_ratios": heights}
    grid = figure.subplots(len(heights), len(widths), squeeze=False, subplot_kw=blank, **ratios)
    for axes in np.ravel(grid):
        axes.spines[:].set_visible(False)
    for row, (named, *panels) in zip(rows, grid, strict=False):  # without rows, the grid has an empty one
        _text(named, 0, 1, "\n".join(row.text))
        _text(panels[0], 0, 1, "\n".join(row.problem), color="#B00020", fontsize=9)
        for j, axes in enumerate(panels if row.pictures else ()):
            _panel(axes, row, j)
    for axes, modality in zip(grid[0][1:], modalities, strict=True):
        axes.set_title(modality, fontsize=10, parse_math=False)
    if labels:
        lines = [(OUTLINES[k % len(OUTLINES)], ("-", "--")[k % 2]) for k in range(len(labels))]
        columns = max(1, min(len(labels), int(width / (0.7 + 0.08 * max(map(len, labels))))))
        label_lines(figure, labels, lines, ncols=columns, loc="outside lower left", frameon=False, fontsize=9)
    return figure


def _height(row: Row) -> float:
    """Return the height of a row: that of the image, limited to 1.3 times its width, or that of the text."""
    rows, columns = row.pictures[0].shape if row.pictures else (0, 1)
    picture, lines = float(rows * row.pixel / columns), max(len(row.text) + 1.0, 1.2 * len(row.problem))
    return max(PANEL * min(picture, 1.3), LINE * lines)


def _text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    style = {"fontsize": 8, "verticalalignment": "top", "linespacing": 1.3, "parse_math": False, **style}
    axes.text(x, y, text, transform=axes.transAxes, in_layout=False, **style)


def label_lines(where: Axes | Figure, labels: Sequence[str], lines: Sequence[tuple[str, str]], **look: Any) -> None:
    """Add a legend of labels, whose lines have a colour and a style; names are drawn literally."""
    handles = [Line2D([], [], color=colour, linestyle=style, linewidth=2) for colour, style in lines]
    for text in where.legend(handles, labels, **look).get_texts():
        text.set_parse_math(False)


def _panel(axes: Axes, row: Row, modality: int) -> None:
    picture, voxels = row.pictures[modality], row.voxels[modality]
    low, high = np.percentile(voxels, (1, 99.5)) if len(voxels) else (0, 1)
    if low == high:  # a constant image, such as a mask, on a black background
        low, high = min(0, low), max(0, high)
    axes.imshow(picture, cmap="gray", vmin=low, vmax=high, aspect=row.pixel)
    outline(axes, row.masks, [OUTLINES[k % len(OUTLINES)] for k in range(len(row.masks))], 0.9)
    notes = [(0.03, 0.5, "R", "left"), (0.97, 0.5, "L", "right"), (0.97, 0.03, row.place, "right")] if row.place else []
    if not len(voxels):
        notes.append((0.5, 0.9, "every voxel is zero", "center"))
    white = {"color": "white", "fontsize": 7, "path_effects": [withStroke(linewidth=1.5, foreground="black")]}
    for left, up, text, end in notes:
        _text(axes, left, up, text, horizontalalignment=end, verticalalignment="baseline", **white)
