"""Example cases as HTML: an interactive viewer of scans and outlines, and plates for print.

Both are self-contained. Masks are embedded as deflated bytes rather than as images, because browsers with
fingerprinting protection change the pixels that a script reads back from an image.
"""

import io
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import fmean
from textwrap import wrap
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from polysite.errors import DataError
from polysite.report.drawing import outline
from polysite.report.names import cut
from polysite.report.preview import OUTLINES, label_lines
from polysite.report.template import render

COLOURS = (*OUTLINES, "#F0E442", "#FFFFFF", "#B3A2FF")  # of up to eight labels, on grey
QUALITY = 85  # of JPEG: no visible artefacts at three times the size
BLOCK = 8  # JPEG block size; slices are aligned to blocks, so that they do not bleed into their neighbours
MAX_PIXELS = 16_000_000  # of a sheet: phones refuse more
MIN_SIDE = 64  # pixels: no scan is downsampled below
DARK = 8  # grey values up to here are background
MAX_ROWS, PLATE_ROWS = 24, 6  # of all plates together, and of one
PAGE, PANEL, LINE, GAP, DPI = (7.2, 9.3), 0.8, 0.17, 0.06, 180  # inches: a page, the width of a panel, a line of text
CUT = 20  # maximum number of letters of a label
PLATE = """<figure class="plate"><img src="{}" alt="{}" width="{}" height="{}"
style="width: {:.2f}in; max-width: 100%; height: auto; break-inside: avoid"></figure>"""


@dataclass(frozen=True, eq=False)
class Shown:
    """A case to show: scans, ground truth and the predictions of every method."""

    site: str
    case: str
    why: str  # "worst", "median" or "best": its rank at its site by the mean Dice of the first method
    modalities: tuple[str, ...]
    labels: tuple[str, ...]  # at most eight
    image: np.ndarray  # uint8 (modality, slice, row, column), in radiological orientation
    truth: np.ndarray  # uint8 (slice, row, column), bit k for label k
    predicted: Mapping[str, np.ndarray]  # by method, like the truth
    scores: Mapping[str, Mapping[str, float]]  # Dice by method and label; may be empty
    pixel: tuple[float, float] = (1.0, 1.0)  # height and width
    sides: bool = True  # whether left and right are known
    depths: tuple[float, ...] = ()  # of every slice, in the unit of a pixel; without them there is no second plane

    def __post_init__(self) -> None:
        who = f"case {self.case!r} of site {self.site!r}"
        if not 1 <= len(self.labels) <= 8:
            raise DataError(f"{who} has {len(self.labels)} labels; between 1 and 8 can be shown")
        if self.image.ndim != 4 or not 1 <= len(self.image) == len(self.modalities):
            raise DataError(
                f"{who}: an image of shape {self.image.shape} for {len(self.modalities)} modalities; "
                "give (modality, slice, row, column)"
            )
        for name, array in {"the image": self.image, "the truth": self.truth, **self.predicted}.items():
            if array.dtype != np.uint8 or array.shape[-3:] != self.image.shape[1:]:
                raise DataError(
                    f"{who}: {name} is {array.dtype} of shape {array.shape}; give uint8 {self.image.shape[1:]}"
                )

    def dice(self, method: str) -> float | None:
        """Return the mean Dice over the labels that have one."""
        known = [v for v in self.scores.get(method, {}).values() if np.isfinite(v)]
        return fmean(known) if known else None

    @property
    def start(self) -> int:
        """The slice with most labelled voxels in the ground truth, or else in the predictions; else the middle one."""
        for masks in ([self.truth], list(self.predicted.values())):
            areas = sum((np.bitwise_count(m).sum((1, 2), dtype=int) for m in masks), np.zeros(len(self.truth), int))
            if areas.any():
                return int(areas.argmax())
        return len(self.truth) // 2


def viewer(cases: Sequence[Shown], budget: int = 12_000_000) -> str:
    """Return an HTML viewer of these cases of at most about ``budget`` bytes; it states what was left out."""
    if not cases:
        return Markup("")
    trimmed = [trim(c) for c in cases]
    packed = [[zlib.compress(m.tobytes(), 9) for m in (c.truth, *c.predicted.values())] for c in trimmed]
    masks = [[b64encode(m).decode() for m in each] for each in packed]
    sheets, note = _fitted(trimmed, budget - sum(len(m) for each in masks for m in each))
    entries = [_entry(c, s, m) for c, s, m in zip(trimmed, sheets, masks, strict=True)]
    return Markup(render("viewer.html", data={"cases": entries, "colours": COLOURS}, note=note))


def plate(cases: Sequence[Shown], most: int = MAX_ROWS) -> str:
    """Return figures for print, a row per case: scan, ground truth and every method, in one slice."""
    if not cases:
        return Markup("")
    chosen, note = _chosen(cases, most)
    trimmed = [trim(c) for c in chosen]
    figures = []
    for rows in (trimmed[k : k + PLATE_ROWS] for k in range(0, len(trimmed), PLATE_ROWS)):
        picture = _png(draw_plate(rows))
        url, words = _url(picture, "PNG", optimize=True), "; ".join(map(_words, rows))
        figures.append(Markup(PLATE).format(url, words, *picture.size, picture.width / DPI))
    words = "Every row is a case, in the slice with most labelled voxels; Dice is the mean over the labels."
    return Markup("\n").join([*figures, Markup('<p class="note">{} {}</p>').format(words, note)])


@dataclass(frozen=True)
class Sheet:
    """All slices of one modality in one image, row by row."""

    url: str
    across: int  # slices per row
    tile: tuple[int, int]  # height and width of a slice with its padding
    size: tuple[float, float]  # height and width of a slice


def trim(case: Shown) -> Shown:
    """Return the case without the background around all slices, so that the head appears larger."""
    masks = [case.truth, *case.predicted.values()]
    seen = (case.image > DARK).any((0, 1)) | np.any([m.any(0) for m in masks], axis=0)
    if not seen.any():
        return case
    row, column = (_span(seen.any(axis)) for axis in (1, 0))
    return replace(
        case,
        image=case.image[..., row, column],
        truth=case.truth[:, row, column],
        predicted={name: m[:, row, column] for name, m in case.predicted.items()},
    )


def _span(seen: np.ndarray) -> slice:
    """Return the range from the first to the last True, with a small margin."""
    where, margin = np.flatnonzero(seen), 1 + len(seen) // 40
    return slice(max(0, int(where[0]) - margin), int(where[-1]) + 1 + margin)


def _fitted(cases: Sequence[Shown], budget: int) -> tuple[list[list[Sheet]], str]:
    """Return sheets of at most ``budget`` bytes, and what was left out: modalities first, then resolution."""
    most = max(len(c.modalities) for c in cases)
    for halvings in range(3):
        # so often must a scan be halved that any device decodes its sheet
        needed = [ceil(np.log2(max(c.truth.size, 1) / MAX_PIXELS) / 2) for c in cases]
        coarse = [max(halvings, n) for n in needed]
        sheets = [[_sheet(volume, h) for volume in c.image] for c, h in zip(cases, coarse, strict=True)]
        for count in range(most, 0, -1):
            if sum(len(sheet.url) for each in sheets for sheet in each[:count]) <= budget:
                return [each[:count] for each in sheets], _left_out(cases, count, coarse)
    return [each[:1] for each in sheets], _left_out(cases, 1, coarse)


def _left_out(cases: Sequence[Shown], count: int, coarse: Sequence[int]) -> str:
    gone = list(dict.fromkeys(m for c in cases for m in c.modalities[count:]))
    words = [f"Left out, to keep this page small: {', '.join(gone)}."] if gone else []
    if any(coarse):
        whose = "The scans" if all(coarse) else "Some scans"
        size = "half" if max(coarse) == 1 else "a quarter of" if min(coarse) > 1 else "a half or a quarter of"
        words.append(f"{whose} are shown at {size} their resolution, to keep this page small; the outlines are not.")
    return " ".join(words)


def _sheet(volume: np.ndarray, halvings: int) -> Sheet:
    """Return a sheet as JPEG, or as PNG if that is smaller for the middle slice."""
    size = volume.shape[1:]
    for _ in range(halvings):
        if min(volume.shape[1:]) >= 2 * MIN_SIDE:
            volume, size = _halved(volume), (size[0] / 2, size[1] / 2)
    full = [BLOCK * ceil(n / BLOCK) for n in volume.shape[1:]]
    tiles = np.pad(volume, [(0, 0), *((0, f - n) for f, n in zip(full, volume.shape[1:], strict=True))], "edge")
    across = max(1, round(sqrt(len(tiles) * full[0] / full[1])))
    tiles = np.pad(tiles, [(0, -len(tiles) % across), (0, 0), (0, 0)])
    sheet = tiles.reshape(-1, across, *full).swapaxes(1, 2).reshape(-1, across * full[1])
    middle, jpeg = Image.fromarray(volume[len(volume) // 2]), {"quality": QUALITY, "optimize": True}
    smaller = len(_url(middle, "PNG")) < len(_url(middle, "JPEG", **jpeg))
    picture = Image.fromarray(sheet)
    url = _url(picture, "PNG", optimize=True) if smaller else _url(picture, "JPEG", **jpeg)
    return Sheet(url, across, (full[0], full[1]), size)


def _halved(volume: np.ndarray) -> np.ndarray:
    _, rows, columns = volume.shape
    even = np.pad(volume, [(0, 0), (0, rows % 2), (0, columns % 2)], "edge").astype(np.uint16)
    mean = (even[:, ::2, ::2] + even[:, 1::2, ::2] + even[:, ::2, 1::2] + even[:, 1::2, 1::2] + 2) // 4
    return mean.astype(np.uint8)


def _url(picture: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{b64encode(file.getvalue()).decode()}"


def _entry(case: Shown, sheets: Sequence[Sheet], masks: Sequence[str]) -> dict[str, Any]:
    """Return the data of a case for the script in ``viewer.html``."""
    slices, rows, columns = case.truth.shape
    dice = case.dice(next(iter(case.predicted), ""))
    return {
        "site": case.site,
        "title": " · ".join(s for s in (case.case, case.why, "" if dice is None else f"Dice {dice:.2f}") if s),
        "labels": case.labels,
        "scans": [{"name": n, **vars(s)} for n, s in zip(case.modalities, sheets, strict=False)],
        "drawn": [
            {"name": name, "truth": not k, "mask": mask, "dice": _figures(case, name) if k else []}
            for k, (name, mask) in enumerate(zip(("truth", *case.predicted), masks, strict=True))
        ],
        "slices": slices,
        "rows": rows,
        "columns": columns,
        "ratio": columns * case.pixel[1] / (rows * case.pixel[0]),
        "sides": case.sides,
        "depths": case.depths,
        "across": columns * case.pixel[1] / sum(case.depths) if case.depths else 0,
        "start": case.start,
    }


def _figures(case: Shown, method: str) -> list[str]:
    """Return the Dice of every label and, for several labels, their mean."""
    of = [case.scores.get(method, {}).get(k) for k in case.labels]
    of += [case.dice(method)] if len(of) > 1 else []
    return ["–" if v is None or not np.isfinite(v) else f"{v:.2f}" for v in of]


def _chosen(cases: Sequence[Shown], most: int) -> tuple[Sequence[Shown], str]:
    """Return at most ``most`` cases, and a sentence about the selection if some are left out."""
    if len(cases) <= most:
        return cases, ""
    for ranks in (("worst", "median"), ("worst",)):
        kept = [c for c in cases if c.why in ranks]
        if 0 < len(kept) <= most:
            return kept, f"Of {len(cases)} cases, only the {' and the '.join(ranks)} of every hospital are here."
    kept = kept or list(cases)
    return kept[:most], f"Of {len(cases)} cases, only {most} are here{': of hospitals, the worst' * (kept != cases)}."


def _words(case: Shown) -> str:
    dice = [f"{name} {d:.2f}" for name in case.predicted if (d := case.dice(name)) is not None]
    return f"{case.site}, {case.case}, {case.why}" + (f": Dice {', '.join(dice)}" if dice else "")


def draw_plate(rows: Sequence[Shown]) -> Figure:
    """Draw a row of images per case, below a line of text and the names of the columns; no higher than a page."""
    columns = ["scan", "truth", *dict.fromkeys(m for c in rows for m in c.predicted)]
    labels = list(dict.fromkeys(k for c in rows for k in c.labels))
    ratios = [min(1.3, c.truth.shape[1] * c.pixel[0] / (c.truth.shape[2] * c.pixel[1])) for c in rows]
    panel = min(max(PANEL, PAGE[0] / len(columns)), (PAGE[1] - (6 + len(rows)) * LINE) / sum(ratios))
    names = ["\n".join(wrap(cut(name, int(45 * panel)), int(16 * panel))) for name in columns]
    width = panel * len(columns)
    across = max(1, int(width / (0.4 + 0.075 * min(CUT, max(map(len, labels))))))
    lines = ceil(len(labels) / across) + 1 + max(name.count("\n") + 1 for name in names) + len(rows)
    figure = Figure((width, LINE * lines + panel * sum(ratios)), layout="constrained")
    figure.set_layout_engine("constrained", w_pad=GAP / 2, h_pad=GAP / 2, wspace=0, hspace=0)
    black = {"xticks": [], "yticks": [], "facecolor": "black"}
    grid = figure.subplots(len(rows), len(columns), squeeze=False, height_ratios=ratios, subplot_kw=black)
    for k, (case, panels) in enumerate(zip(rows, grid, strict=True)):
        masks = [None, case.truth, *(case.predicted.get(method) for method in columns[2:])]
        dice = [case.dice(method) for method in columns]
        words = [_title(case, int(31 * panel)), *("" if d is None else f"Dice {d:.2f}" for d in dice[1:])]
        for j, axes in enumerate(panels):
            head = f"{names[j]}\n" * (not k) + words[j]
            axes.set_title(head, loc="left", fontsize=7.5, pad=2, parse_math=False)
            axes.spines[:].set_visible(False)
            if j and masks[j] is None:
                axes.set_axis_off()
            else:
                _panel(axes, case, masks[j], labels)
    look: dict[str, Any] = {"loc": "outside upper left", "fontsize": 7.5, "labelcolor": "white", "facecolor": "#333333"}
    look |= {"borderpad": 0.3, "handlelength": 1.4, "columnspacing": 1, "labelspacing": 0.3, "framealpha": 1}
    colours = [(COLOURS[k % len(COLOURS)], "-") for k in range(len(labels))]
    label_lines(figure, [cut(name, CUT) for name in labels], colours, ncols=min(len(labels), across), **look)
    return figure


def _title(case: Shown, most: int) -> str:
    """Return site, case and rank in about so many letters."""
    room = max(most - len(case.why) - 6, 8)
    names = [case.site, case.case]
    if sum(map(len, names)) > room:
        names = [cut(name, room // 2) for name in names]
    return " · ".join(s for s in (*names, case.why) if s)


def _panel(axes: Axes, case: Shown, mask: np.ndarray | None, labels: Sequence[str]) -> None:
    """Draw the first modality in the chosen slice with the outlines of a mask."""
    aspect = case.pixel[0] / case.pixel[1]
    axes.imshow(case.image[0, case.start], cmap="gray", vmin=0, vmax=255, aspect=aspect, interpolation="bilinear")
    if mask is not None:
        colours = [COLOURS[labels.index(name) % len(COLOURS)] for name in case.labels]
        outline(axes, [mask[case.start] >> k & 1 for k in range(len(case.labels))], colours, 1.0)
    white: dict[str, Any] = {"color": "white", "fontsize": 6, "transform": axes.transAxes, "va": "center"}
    if case.sides:
        axes.text(0.02, 0.5, "R", **white)
        axes.text(0.98, 0.5, "L", ha="right", **white)


def _png(figure: Figure) -> Image.Image:
    """Return the figure with 128 colours, which halves its size."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, facecolor="white")
    with Image.open(file) as picture:
        return picture.convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
