"""What all figures share: colours, markers, names that fit, legends, panels.

Colours can be distinguished by colour-blind readers; lines also differ by dashes, points by markers and bars by
hatches, so that figures can be read in print without colour. What belongs to a method carries its name (`tag`), so that
a page can hide it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from statistics import stdev
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polysite.report.names import MAX_LETTERS, cut, shorten

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")
FEW = 5  # entries of a legend above the axes
WIDE = 7.2  # inches
INK = "#1c2430"
DOTS = 2000  # more dots are drawn as pixels, so that the page stays small
METHOD = "method:"  # begins the id of what belongs to a method; methods.js knows it


def colour(k: int) -> str:
    """Return the colour of the k-th of several lines."""
    return COLOURS[k % len(COLOURS)]


def dashes(k: int) -> str:
    """Return the line style of the k-th of several lines; colour and style together differ for the first 28."""
    return DASHES[k % len(DASHES)]


def filling(k: int) -> dict[str, Any]:
    """Return the look of the k-th of several bars: its colour, with white lines that differ without colour."""
    return {"color": colour(k), "hatch": HATCHES[k % len(HATCHES)], "edgecolor": "white", "linewidth": 0}


def marker(k: int) -> str:
    """Return the marker of the k-th of several; colour and marker together differ for the first 49."""
    return MARKERS[(k + k // len(COLOURS)) % len(MARKERS)]


def new(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def panels(titles: Sequence[str], height: float, shared: bool = False) -> tuple[Figure, list[tuple[str, Axes]]]:
    """Return a figure with a panel per title, three in a row; ``shared``: with one vertical axis, and a grid."""
    columns = min(3, len(titles))
    rows = ceil(len(titles) / columns)
    figure = Figure((WIDE, height * rows + 0.7), layout="constrained")
    short = shorten(titles, 72 // columns)
    made: list[tuple[str, Axes]] = []
    for k, title in enumerate(titles):
        axes = figure.add_subplot(rows, columns, k + 1, sharey=made[0][1] if shared and made else None)
        if shared:
            axes.grid(color="#eceff2", zorder=0)
        axes.set_title(unformatted(short[title]), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        made.append((title, axes))
    return figure, made


def name_axes(made: Sequence[tuple[str, Axes]], below: str, beside: str) -> None:
    """Name the axes of the lowest panel of every column, and of the first panel of every row."""
    columns = min(3, len(made))
    for k, (_, axes) in enumerate(made):
        if k + columns >= len(made):
            axes.set_xlabel(below, fontsize=9)
        if k % columns == 0:
            axes.set_ylabel(beside, fontsize=9)


def count_rounds(axes: Axes, label: bool = True) -> None:
    """Give the horizontal axis whole numbers of rounds."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if label:
        axes.set_xlabel("round")


def legend(figure: Figure, entries: Mapping[str, Any], below: bool = False) -> None:
    """Add a legend above the axes for few entries, below them for many, in as many columns as its names allow."""
    if len(entries) < 2:
        return
    few = len(entries) <= FEW and not below
    short = shorten(list(entries), MAX_LETTERS)
    size, longest = 10 if few else 8, max(map(len, short.values()))
    columns = max(1, min(5, len(entries), int(figure.get_figwidth() / (0.0085 * size * longest + 0.45))))
    rows = ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + 0.02 * size * max(0, rows - 2))  # the axes keep their height
    made = figure.legend(
        entries.values(), [short[name] for name in entries], ncols=columns, frameon=False, fontsize=size,
        loc="outside upper center" if few else "outside lower center",
    )  # fmt: skip
    for drawn, handle, text in zip(entries.values(), made.legend_handles, made.get_texts(), strict=True):
        for artist in (handle, text):
            if isinstance(artist, Artist) and isinstance(drawn, Artist) and drawn.get_gid():
                artist.set_gid(drawn.get_gid())


def entries(axes: Axes) -> Iterator[tuple[str, Any]]:
    """Yield the names of a legend with what is drawn for them."""
    handles, names = axes.get_legend_handles_labels()
    yield from zip(names, handles, strict=True)


def tag(method: str) -> dict[str, Any]:
    """Return the keyword arguments that mark an artist as part of a method."""
    return {"gid": f"{METHOD}{method}"}


def unformatted(text: str) -> str:
    """Escape a name for matplotlib: a dollar sign starts a formula, a leading underscore hides a line."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows, from below, with a faint line through each."""
    axes.set_yticks(range(len(names)), [unformatted(n) for n in names], fontsize=9)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def outline(axes: Axes, masks: Sequence[np.ndarray], colours: Sequence[str], width: float) -> None:
    """Draw the outlines of masks; every second one is dashed and on top, so that coinciding outlines show."""
    limits = axes.axis()
    for k, mask in enumerate(masks):
        if mask.any():  # padded, so that outlines close at the border
            x, y = (np.arange(-1, n + 1) for n in mask.shape[::-1])
            look: dict[str, Any] = {"colors": colours[k], "linestyles": ("-", "--")[k % 2], "zorder": 2 + k % 2}
            axes.contour(x, y, np.pad(mask, 1), levels=[0.5], linewidths=width, **look)
    axes.axis(limits)


def heat_map(
    axes: Axes,
    table: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    ends: tuple[float, float],
    *,
    digits: int | None = 2,
    upright: bool = True,
    reverse: bool = False,
    tags: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Draw a table as colours with numbers; return an image for a colour bar.

    Args:
        axes: The axes.
        table: The numbers; NaN is left blank.
        rows: Names of the rows.
        columns: Names of the columns.
        ends: Ends of the colour scale.
        digits: Decimals of the numbers; None: without numbers.
        upright: Turn the names of the columns.
        reverse: Small numbers are bright.
        tags: What marks every column as part of a method (`tag`).
    """
    for j, column in enumerate(table.T):
        mark = dict(tags[j]) if tags else {}
        place = (j - 0.5, j + 0.5, len(rows) - 0.5, -0.5)
        shown = axes.imshow(column[:, None], "cividis_r" if reverse else "cividis", vmin=ends[0], vmax=ends[1],
                            aspect="auto", extent=place, **mark)  # fmt: skip
        for i, value in enumerate(column if digits is not None else ()):
            if not np.isnan(value):
                ink = "white" if sum(shown.to_rgba(value)[:3]) < 1.35 else "black"
                look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": ink, **mark}
                axes.text(j, i, f"{value:.{digits}f}", **look)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [unformatted(c) for c in columns], rotation=90 if upright else 0, fontsize=8.5)
    axes.set_yticks(range(len(rows)), [unformatted(r) for r in rows], fontsize=8.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return shown


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, for an error bar; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0


def strip(axes: Axes, row: int, values: np.ndarray, colour: str, pixels: bool) -> None:
    """Draw the values as jittered dots, with the quartiles and the median."""
    beside = np.random.default_rng(0).uniform(-0.24, 0.24, len(values))
    axes.plot(values, row + beside, "o", ms=3.2, mew=0, alpha=0.4, color=colour, rasterized=pixels)
    quartiles(axes, row, values)


def quartiles(axes: Axes, row: int, values: np.ndarray) -> None:
    """Draw a line from the first quartile to the third, and a mark at the median."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    axes.plot((low, high), (row, row), color=INK, lw=1.6, solid_capstyle="butt")
    axes.plot((middle, middle), (row - 0.3, row + 0.3), color=INK, lw=2, solid_capstyle="butt")


def pictures(
    rows: Sequence[tuple[str, Mapping[str, np.ndarray]]],
    width: float,
    height: float,
    ends: tuple[float, float] | None = None,
    aspect: float = 1.0,
) -> Figure:
    """Draw slices in rows and columns, each row in the grey scale of its first slice.

    Args:
        rows: A title and the slices of every row, by the title of their column.
        width: Inches of a column.
        height: Inches of a row.
        ends: Ends of the grey scale of all rows instead.
        aspect: Height of a pixel over its width.
    """
    columns = list(rows[0][1])
    figure = Figure((width * len(columns) + 0.2, height * len(rows) + 0.2), layout="constrained")
    for row, (title, slices) in enumerate(rows):
        low, high = ends or np.percentile(slices[columns[0]], (1, 99.5))
        for k, column in enumerate(columns):
            axes = figure.add_subplot(len(rows), len(columns), row * len(columns) + k + 1)
            grey: dict[str, Any] = {"cmap": "gray", "vmin": low, "vmax": max(high, low + 1e-6)}
            axes.imshow(slices[column], aspect=aspect, interpolation="nearest", **grey)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if not row:
                axes.set_title(unformatted(column), fontsize=8)
            if not k:
                axes.set_ylabel(unformatted(cut(title, 25)), fontsize=8)
    return figure
