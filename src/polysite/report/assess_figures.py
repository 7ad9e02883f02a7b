"""Figures of an assessment: distances, groups, and distributions of the hospitals' data.

Names of hospitals are drawn literally, without formulas; the browser renders letters that no local font has.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysite.cluster import distance as cluster
from polysite.heterogeneity.assessment import LARGE, LEVEL, Assessment, Distance, Quantity
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.distances import Values
from polysite.payload import SiteId
from polysite.report.drawing import COLOURS, DOTS, strip
from polysite.report.figure_files import Drawing
from polysite.report.names import shorten

USUAL, MARKED, BLANK = COLOURS[0], COLOURS[5], "#eef1f4"
STAR = "★"  # significant
FEW, SOME, MANY = 6, 8, 12  # hospitals up to which figures are large, are side by side, have numbers in cells
HALF, WHOLE = 4.2, 8.4  # inches: width of half a page and of a page
LETTER = 0.078  # inches: width of a letter
MAX_LETTERS = 26  # of a name
TALL = 24.0  # inches: largest height of all rows of a figure; more hospitals have lower rows
DPI = 150  # of dots that are drawn as pixels


def heatmap(assessment: Assessment, distance: Distance) -> Figure:
    """Draw the distances between all hospitals, with a star if significant, and the outlier in bold."""
    sites, table = assessment.sites, _without_diagonal(distance.matrix)
    count = len(sites)
    numbers = count <= MANY
    cell = _cell(count, (0.62 if count <= FEW else 0.5) if numbers else 0.24)
    edge = LETTER * _longest(sites)
    size = count * cell + edge + (0.2 if numbers else 0.8 + 0.03 * count * cell), count * cell + 0.75 * edge + 0.2
    figure = Figure(size, layout="constrained")
    axes = figure.add_subplot()
    digits = decimals(distance.matrix)
    texts = {
        (i, j): ((f"{table[i, j]:.{digits}f}" if numbers else "") + STAR * starred, starred)
        for i, j in np.ndindex(table.shape)
        if i != j and ((starred := bool(distance.adjusted[i, j] <= LEVEL)) or numbers)
    }
    letters = (9 if count <= FEW else 7.5) if numbers else 6
    mesh = _cells(axes, table, texts, "cividis", float(np.nanmax(table, initial=0.0)) or 1.0, letters)
    _names(axes, sites, cell, outlier(assessment, distance))
    if not numbers:
        _colours(figure, axes, mesh, shrink=0.6)
    return figure


def _without_diagonal(matrix: Values) -> Values:
    """Return a table with NaN on the diagonal, which is then left blank."""
    table: Values = matrix.astype(float)
    np.fill_diagonal(table, np.nan)
    return table


def _cell(count: int, usual: float) -> float:
    """Return the height of a row in inches."""
    return min(usual, TALL / count)


def outlier(assessment: Assessment, distance: Distance) -> SiteId | None:
    """Return the most distant hospital; None for two hospitals."""
    return distance.outlier if len(assessment.sites) > 2 else None


def decimals(table: Values) -> int:
    """Return the number of decimals that distinguish the numbers of a table.

    >>> [decimals(np.array([0.001, largest])) for largest in (0.02, 0.5, 7.9, 13.9, 250.0)]
    [3, 2, 2, 1, 0]
    """
    largest = float(table.max())
    if 0 < largest < 0.1:
        return 1 - floor(log10(largest))
    return max(0, 2 - floor(log10(max(largest, 1.0))))


def dendrogram(assessment: Assessment, distance: Distance) -> Figure:
    """Draw the tree of average linkage; the groups with the best silhouette are coloured."""
    from scipy.cluster.hierarchy import dendrogram as hang
    from scipy.cluster.hierarchy import to_tree

    merged = cluster.tree(distance.matrix)
    below = [set(node.pre_order()) for node in to_tree(merged, rd=True)[1]]
    groups = [{assessment.index(s) for s in group} for group in distance.linked if len(distance.linked) > 1]

    def shade(node: int) -> str:
        return next((COLOURS[k % 6] for k, group in enumerate(groups) if below[node] <= group), COLOURS[6])

    drawn = hang(merged, no_plot=True, link_color_func=shade)
    count, far = len(assessment.sites), outlier(assessment, distance)
    row = _cell(count, 0.42 if count <= SOME else 0.24)
    figure = Figure((WHOLE if count > SOME else HALF, row * count + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for across, along, shade in zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"], strict=True):
        axes.plot(along, across, color=shade, lw=2)
    leaves = [assessment.sites[i] for i in drawn["leaves"]]
    _rows(axes, [10 * k + 5 for k in range(count)], leaves, far, min(9, 60 * row))
    axes.set_ylim(0, 10 * count)
    axes.set_xlim(left=0)
    axes.set_xlabel("distance at which they merge", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    return figure


def distributions(assessment: Assessment) -> Figure:
    """Draw the distributions at every hospital, a panel per quantity."""
    quantities, count = list(assessment.quantities.values()), len(assessment.sites)
    columns = min(2, len(quantities))
    lines = ceil(len(quantities) / columns)
    row = _cell(count, 0.3 if count <= SOME else 0.2)
    figure = Figure((WHOLE, lines * (row * count + 0.95)))
    figure.set_layout_engine("constrained", h_pad=0.08, wspace=0.03)
    used = {q.name for q in (assessment.largest(INTENSITY), assessment.largest(VOLUME, CLASS)) if q}
    pixels = sum(len(v) for q in quantities for v in q.values.values()) > DOTS
    for k, quantity in enumerate(quantities):
        axes = figure.add_subplot(lines, columns, k + 1)
        apart = {s: assessment.stands_out(quantity, s) for s in assessment.sites}
        _panel(axes, quantity, apart, pixels)
        names = assessment.sites if k % columns == 0 else [""] * count
        _rows(axes, range(count), names, None, 8.5 if count <= SOME else 7)
        title = f"{quantity.of}: EMD {quantity.mean:.2f}" + ", the largest of its kind" * (quantity.name in used)
        weight = "bold" if quantity.name in used else "normal"
        axes.set_title(title, fontsize=9.5, loc="left", parse_math=False, fontweight=weight)
    return figure


def angles(assessment: Assessment, component: str, cases: bool = False) -> Figure:
    """Draw, for one component of the embedding, the angles between hospital means, and from each case to its mean;
    or, if ``cases``, the angle between a random case of each of two hospitals."""
    sites = assessment.sites
    table, count = _without_diagonal((assessment.case_angles if cases else assessment.angles)[component]), len(sites)
    cell = _cell(count, 0.55 if count <= FEW else 0.4 if count <= MANY else 0.19)
    edge = LETTER * _longest(sites)
    width = min(count * cell * 1.15, WHOLE - edge - 2.6)
    size = width + edge + 1.1 if cases else WHOLE, count * cell + max(0.75 * edge, 0.5) + 0.4
    figure = Figure(size, layout="constrained")
    left, *right = figure.subplots(1, 2 - cases, squeeze=False, width_ratios=(width, WHOLE - edge - width)[cases:])[0]
    numbers = {(i, j): (f"{table[i, j]:.0f}°", False) for i, j in np.ndindex(table.shape) if i != j and count <= MANY}
    mesh = _cells(left, table, numbers, "viridis", 180.0, 8.5 if count <= SOME else 7)
    _names(left, sites, cell, None)
    _colours(figure, left, mesh, ticks=[0, 45, 90, 135, 180], format="%d°")
    left.set_aspect("auto")
    if right:
        left.set_title("between the means of two hospitals", fontsize=9.5, loc="left")
        _turned(right[0], assessment, component, sites)
    return figure


def drawing(figure: Figure, name: str, title: str) -> Drawing:
    """Return a figure as SVG with letters as text; the title is for screen readers."""
    text, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Type", "Format"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(text, format="svg", metadata=nothing, dpi=DPI)
    svg = re.sub(r'<g id="[^"]*"', "<g", text.getvalue())  # ids would repeat on a page with many figures
    svg = svg[svg.index("<svg ") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return Drawing(svg, figure)


def _colours(figure: Figure, axes: Axes, mesh: Any, **style: Any) -> None:
    bar: Any = figure.colorbar(mesh, ax=axes, aspect=25, **style)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)


def _turned(axes: Axes, assessment: Assessment, component: str, sites: Sequence[SiteId]) -> None:
    """Draw the angles of the cases of every hospital to their mean."""
    lists = [assessment.alignment[s][component] for s in sites]
    for k, values in enumerate(lists):
        strip(axes, k, values, USUAL, sum(map(len, lists)) > DOTS)
    _rows(axes, range(len(lists)), [""] * len(lists), None, 8)
    axes.set_ylim(len(lists) - 0.5, -0.5)
    axes.set_xlim(0, max(90.0, *(float(values.max()) * 1.03 for values in lists)))
    axes.xaxis.set_major_formatter("{x:.0f}°")
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", color="#e4e8ec", lw=0.6)
    axes.set_title("cases to their mean", fontsize=9.5, loc="left")


def _longest(sites: Sequence[SiteId]) -> int:
    return max(*map(len, shorten(sites, MAX_LETTERS).values()), 5)


def _cells(
    axes: Axes,
    table: Values,
    texts: Mapping[Any, tuple[str, bool]],
    colours: str,
    most: float,
    size: float,
) -> Any:
    """Draw a coloured square and text for every pair."""
    pixels = len(table) > LARGE
    lines: dict[str, Any] = {"edgecolors": "white", "linewidth": 0 if pixels else 1 if len(table) <= MANY else 0.5}
    mesh = axes.pcolormesh(table, cmap=colours, vmin=0, vmax=most, rasterized=pixels, **lines)
    axes.set_facecolor(BLANK)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    for (i, j), (text, bold) in texts.items():
        bright = sum(np.array(mesh.cmap(mesh.norm(table[i, j]))[:3]) * (0.3, 0.59, 0.11)) > 0.5
        style = {"color": "black" if bright else "white", "fontsize": size, "fontweight": "bold" if bold else "normal"}
        _write(axes, j + 0.5, i + 0.5, text, **style)
    return mesh


def _names(axes: Axes, sites: Sequence[SiteId], cell: float, marked: SiteId | None) -> None:
    """Write the names of the hospitals at the rows and below the columns, rotated if they would touch."""
    size = 9 if cell > 0.3 else min(7, 60 * cell)
    at = [k + 0.5 for k in range(len(sites))]
    _rows(axes, at, sites, marked, size)
    named, flat = shorten(sites, MAX_LETTERS), LETTER * _longest(sites) < cell
    steep, slanted = {"rotation": 90}, {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    turn: dict[str, Any] = {} if flat else steep if cell < 0.3 else slanted
    axes.set_xticks(at, [named[s] for s in sites], fontsize=size, parse_math=False, **turn)
    axes.tick_params(axis="x", length=0)
    for site, text in zip(sites, axes.get_xticklabels(), strict=True):
        text.set_fontweight("bold" if site == marked else "normal")


def _rows(axes: Axes, at: Sequence[float], sites: Sequence[SiteId], marked: SiteId | None, size: float) -> None:
    named = shorten(sites, MAX_LETTERS)
    axes.set_yticks(at, [named[s] for s in sites], fontsize=size, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for site, text in zip(sites, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if site == marked else "normal")


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "center", "parse_math": False, **style})


def _panel(axes: Axes, quantity: Quantity, sites: Mapping[SiteId, bool], pixels: bool) -> None:
    """Draw a strip per hospital for one quantity; a hospital that differs has another colour and a star."""
    for k, (site, apart) in enumerate(sites.items()):
        values = quantity.values[site]
        shade = MARKED if apart else USUAL
        if quantity.kind == CLASS:
            axes.barh(k, values.mean(), 0.6, color=shade)
            _write(axes, values.mean(), k, f" {values.mean():.0%}", ha="left", fontsize=8)
        elif quantity.kind == INTENSITY and not values.any():
            place = {"transform": axes.get_yaxis_transform(), "ha": "left"}
            _write(axes, 0.01, k, "never acquired", fontsize=8, style="italic", color=shade, **place)
        else:
            strip(axes, k, values, shade, pixels)
        if apart:
            _write(axes, 1.01, k, STAR, transform=axes.get_yaxis_transform(), color=MARKED, fontsize=9, ha="left")
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.grid(axis="y", color="#e4e8ec", lw=0.6)
    axes.set_axisbelow(True)
    words = {INTENSITY: "maximum intensity of a scan, ", CLASS: "", VOLUME: "volume, "}[quantity.kind]
    axes.set_xlabel(f"{words}{'share of the cases' if quantity.kind == CLASS else quantity.unit}", fontsize=8.5)
    axes.tick_params(axis="x", labelsize=8)
    if quantity.kind == CLASS:
        axes.set_xlim(0, 1.12)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}" if x <= 1 else "")
