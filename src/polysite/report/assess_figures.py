"""Figures of an assessment: distances, groups, and distributions of the hospitals' data.

Figures of more than ``LARGE`` hospitals have a fixed size: heat maps and trees name the outlier alone, maps the most
distant hospitals, and distributions are bands over all hospitals instead of a row for each.

Maps by classical scaling: Torgerson, Multidimensional scaling, Psychometrika 1952. Names of hospitals are drawn
literally, without formulas; the browser renders letters that no local font has.
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
from polysite.report.drawing import COLOURS, DOTS, INK, strip
from polysite.report.figure_files import Drawing
from polysite.report.names import shorten

USUAL, MARKED, BLANK = COLOURS[0], COLOURS[5], "#eef1f4"
STAR = "★"  # significant
FEW, SOME, MANY = 6, 8, 12  # hospitals up to which figures are large, are side by side, have numbers in cells
HALF, WHOLE = 4.2, 8.4  # inches: width of half a page and of a page
BAND = 2.6  # inches: height of a panel that shows many hospitals as a band
LETTER = 0.078  # inches: width of a letter
MAX_LETTERS = 26  # of a name
CLOSE = 0.15  # inches between a point and its name beyond which a line joins them
TALL = 7.0  # inches: height of all rows of more than LARGE hospitals
LABELLED = 10  # most distant hospitals that a map of more than LARGE hospitals names
DPI = 150  # of dots that are drawn as pixels
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 1), (-0.7, 1), (0.7, -1), (-0.7, -1))  # of a point, for its name
PLACES = np.array([(gap, *side) for gap in (0.03, CLOSE, 0.3, 0.45, 0.6, 0.8) for side in SIDES])  # with a gap


def heatmap(assessment: Assessment, distance: Distance, small: bool = False) -> Figure:
    """Draw the distances between all hospitals, with a star if significant, and the outlier in bold.

    Many hospitals are in the order of their tree, without stars; only the outlier is named.
    """
    sites, table = ordered(assessment.sites, distance.matrix)
    count, large, marked = len(sites), len(sites) > LARGE, outlier(assessment, distance)
    names = [site if site == marked or not large else "" for site in sites]
    numbers = count <= (FEW if small else MANY)
    cell = _cell(count, (0.62 if count <= FEW else 0.5) if numbers else max(0.14, 2.2 / count) if small else 0.24)
    edge = LETTER * _longest(names)
    size = count * cell + edge + (0.2 if numbers else 0.9), count * cell + 0.75 * edge + 0.2
    figure = Figure(size, layout="constrained")
    axes = figure.add_subplot()
    digits = decimals(distance.matrix)
    texts = {
        (i, j): ((f"{table[i, j]:.{digits}f}" if numbers else "") + STAR * starred, starred)
        for i, j in np.ndindex(table.shape)
        if i != j and not large and ((starred := bool(distance.adjusted[i, j] <= LEVEL)) or numbers)
    }
    letters = (9 if count <= FEW else 7.5) if numbers else 6
    mesh = _cells(axes, table, texts, "cividis", float(np.nanmax(table, initial=0.0)) or 1.0, letters, large)
    _names(axes, names, cell, marked)
    if not numbers:
        _colours(figure, axes, mesh, shrink=0.6)
    return figure


def ordered(sites: Sequence[SiteId], matrix: Values) -> tuple[list[SiteId], Values]:
    """Return the hospitals with their table, many of them in the order of their tree; NaN on the diagonal.

    >>> ordered(["a", "b"], np.array([[0, 2], [2, 0.0]]))
    (['a', 'b'], array([[nan,  2.],
           [ 2., nan]]))
    """
    order: Sequence[int] = range(len(sites))
    if len(sites) > LARGE:
        from scipy.cluster.hierarchy import leaves_list

        order = leaves_list(cluster.tree(matrix))
    table = matrix[np.ix_(order, order)].astype(float)
    np.fill_diagonal(table, np.nan)
    return [sites[i] for i in order], table


def _cell(count: int, usual: float) -> float:
    """Return the height of a row in inches; many rows share a fixed height."""
    return TALL / count if count > LARGE else usual


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


def places(matrix: Values) -> tuple[Values, float]:
    """Return coordinates in the plane by classical scaling of a distance matrix, and the share that they reproduce.

    The coordinates are the leading eigenvectors of B = -1/2 J D^2 J times the roots of their eigenvalues; the share is
    that of the two eigenvalues in the sum of the absolute values of all.

    >>> at, share = places(np.array([[0, 3, 5], [3, 0, 4], [5, 4, 0.0]]))
    >>> round(float(np.linalg.norm(at[0] - at[2])), 6), round(share, 6)
    (5.0, 1.0)
    """
    centred = np.eye(len(matrix)) - 1 / len(matrix)
    values, vectors = np.linalg.eigh(-0.5 * centred @ np.square(matrix) @ centred)
    leading = np.maximum(values[:-3:-1], 0)
    at = vectors[:, :-3:-1] * np.sqrt(leading)
    at = at * np.where(at[np.abs(at).argmax(0), [0, 1]] < 0, -1, 1)  # fixes the signs, which differ between machines
    total = float(np.abs(values).sum())
    return at, float(leading.sum()) / total if total else 1.0


def plane(assessment: Assessment, distance: Distance) -> Figure:
    """Draw a map on which nearby hospitals have similar cases. One unit of its axes is an inch."""
    width, height = (HALF, 3.7) if len(assessment.sites) <= SOME else (WHOLE, 5.6)
    at, _ = places(distance.matrix)
    reach = at.max(0) - at.min(0)
    unit = float((reach / (width - 1.7, height - 1.4)).max()) or 1.0  # distance per inch
    height = max(float(reach[1]) / unit + 1.4, 2.0)  # no taller than it must be
    at = (at - at.min(0) - reach / 2) / unit
    figure = Figure((width + 0.04, height + 0.04))  # and room for the frame
    edge = 0.02 / (width + 0.04), 0.02 / (height + 0.04)
    axes = figure.add_axes((*edge, 1 - 2 * edge[0], 1 - 2 * edge[1]), xticks=[], yticks=[])
    axes.set(xlim=(-width / 2, width / 2), ylim=(-height / 2, height / 2))
    axes.spines[:].set_color("#c9d0d8")
    _points(axes, assessment, distance, at, (width, height))
    _ruler(axes, unit, width, height)
    return figure


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
        axes.plot(along, across, color=shade, lw=2 if count <= LARGE else 0.8)
    leaves = [assessment.sites[i] for i in drawn["leaves"]]
    names = [site if site == far or count <= LARGE else "" for site in leaves]
    _rows(axes, [10 * k + 5 for k in range(count)], names, far, 9)
    axes.set_ylim(0, 10 * count)
    axes.set_xlim(left=0)
    axes.set_xlabel("distance at which they merge", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    return figure


def distributions(assessment: Assessment) -> Figure:
    """Draw the distributions at every hospital, a panel per quantity; of many hospitals, bands over all of them."""
    quantities, count = list(assessment.quantities.values()), len(assessment.sites)
    columns = min(2, len(quantities))
    lines = ceil(len(quantities) / columns)
    row, large = 0.3 if count <= SOME else 0.2, count > LARGE
    figure = Figure((WHOLE, lines * (BAND if large else row * count + 0.95)))
    figure.set_layout_engine("constrained", h_pad=0.08, wspace=0.03)
    used = {q.name for q in (assessment.largest(INTENSITY), assessment.largest(VOLUME, CLASS)) if q}
    pixels = sum(len(v) for q in quantities for v in q.values.values()) > DOTS
    for k, quantity in enumerate(quantities):
        axes = figure.add_subplot(lines, columns, k + 1)
        apart = {s: assessment.stands_out(quantity, s) for s in assessment.sites}
        if large:
            _band(axes, quantity, apart)
        else:
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
    sites, table = ordered(assessment.sites, (assessment.case_angles if cases else assessment.angles)[component])
    count, large = len(sites), len(sites) > LARGE
    names = [""] * count if large else sites
    cell = _cell(count, 0.55 if count <= FEW else 0.4 if count <= MANY else 0.19)
    edge = LETTER * _longest(names)
    width = min(count * cell * 1.15, WHOLE - edge - 2.6)
    size = width + edge + 1.1 if cases else WHOLE, count * cell + max(0.75 * edge, 0.5) + 0.4
    figure = Figure(size, layout="constrained")
    left, *right = figure.subplots(1, 2 - cases, squeeze=False, width_ratios=(width, WHOLE - edge - width)[cases:])[0]
    numbers = {(i, j): (f"{table[i, j]:.0f}°", False) for i, j in np.ndindex(table.shape) if i != j and count <= MANY}
    mesh = _cells(left, table, numbers, "viridis", 180.0, 8.5 if count <= SOME else 7, large)
    _names(left, names, cell, None)
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
    """Draw the angles of the cases of every hospital to their mean; of many hospitals, the range and the median."""
    lists = [assessment.alignment[s][component] for s in sites]
    if len(sites) > LARGE:
        low, middle, high = np.array([np.quantile(values, (0, 0.5, 1)) for values in lists]).T
        axes.hlines(range(len(lists)), low, high, color=USUAL, lw=0.8, alpha=0.6)
        axes.plot(middle, range(len(lists)), ".", color=INK, ms=3)
    else:
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
    pixels: bool,
) -> Any:
    """Draw a coloured square and text for every pair."""
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
    size = 9 if cell > 0.3 else 7
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


def _band(axes: Axes, quantity: Quantity, sites: Mapping[SiteId, bool]) -> None:
    """Draw the medians of all hospitals in ascending order, with bands of their quartiles and of all their values."""
    known = [s for s in sites if quantity.kind != INTENSITY or quantity.values[s].any()]
    if quantity.kind == CLASS:
        spans = np.array([[quantity.values[s].mean()] * 5 for s in known]).reshape(-1, 5)
    else:
        spans = np.array([np.quantile(quantity.values[s], (0, 0.25, 0.5, 0.75, 1)) for s in known]).reshape(-1, 5)
    order = np.argsort(spans[:, 2], kind="stable")
    ranks, (low, first, middle, third, high) = np.arange(1, len(known) + 1), spans[order].T
    axes.fill_between(ranks, low, high, color=USUAL, alpha=0.18, lw=0)
    axes.fill_between(ranks, first, third, color=USUAL, alpha=0.4, lw=0)
    axes.plot(ranks, middle, color=INK, lw=1.6)
    apart = [k for k, i in enumerate(order) if sites[known[i]]]
    if apart:  # not clipped at the edge; without points, such a line would confuse the layout
        axes.plot(ranks[apart], middle[apart], "o", ms=4.5, mew=0, color=MARKED, clip_on=False, zorder=3)
    never = len(sites) - len(known)
    axes.set_xlabel(f"hospitals by their median{f'; never acquired at {never}' * bool(never)}", fontsize=8.5)
    axes.set_xlim(1, max(len(known), 2))
    axes.set_ylabel("share of the cases" if quantity.kind == CLASS else quantity.unit, fontsize=8.5)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _points(axes: Axes, assessment: Assessment, distance: Distance, at: Values, paper: tuple[float, float]) -> None:
    """Draw a dot per hospital, its area proportional to the number of cases, and its name."""
    far, most = outlier(assessment, distance), max(assessment.cases[s] for s in assessment.sites)
    letters = 8.5 if len(assessment.sites) <= MANY else 7.0
    areas = [max(260.0 * assessment.cases[s] / most, 14.0) for s in assessment.sites]  # square points
    radii = [float(np.sqrt(area / np.pi)) / 72 for area in areas]
    if len(assessment.sites) > LARGE:
        chosen = sorted(range(len(at)), key=lambda k: -distance.sums[assessment.sites[k]])[:LABELLED]
        rest = [k for k in range(len(at)) if k not in chosen]
        sizes = [areas[k] for k in rest]
        axes.scatter(at[rest, 0], at[rest, 1], s=sizes, alpha=0.5, lw=0.8, edgecolors="white", color=USUAL)
    else:
        chosen = list(range(len(at)))
    sites = [assessment.sites[k] for k in chosen]
    named = shorten(assessment.sites, MAX_LETTERS)
    spots = _free(at, radii, chosen, [named[s] for s in sites], letters, paper)
    for k, site, spot in zip(chosen, sites, spots, strict=True):
        (x, y), area, radius = at[k], areas[k], radii[k]
        style: dict[str, Any] = {"color": MARKED, "marker": "D"} if site == far else {"color": USUAL, "marker": "o"}
        axes.scatter(x, y, s=area, alpha=0.85, linewidths=0.8, edgecolors="white", zorder=2, **style)
        near = np.clip(x, spot[0], spot[2]), np.clip(y, spot[1], spot[3])
        if np.hypot(near[0] - x, near[1] - y) >= radius + CLOSE:
            axes.plot((x, near[0]), (y, near[1]), color="#9aa5b1", lw=0.6, zorder=1)
        words = {"fontsize": letters, "fontweight": "bold" if site == far else "normal", "zorder": 3}
        _write(axes, (spot[0] + spot[2]) / 2, (spot[1] + spot[3]) / 2, named[site], **words)


def _ruler(axes: Axes, unit: float, width: float, height: float) -> None:
    """Draw a ruler of a round distance on the map."""
    length = _round(unit * width / 4)
    x, y = -width / 2 + 0.2, -height / 2 + 0.2
    axes.plot((x, x, x + length / unit, x + length / unit), (y + 0.05, y, y, y + 0.05), color=INK, lw=1.2)
    _write(axes, x, y + 0.15, f"distance {length:g}", ha="left", fontsize=8, color=INK)


def _round(value: float) -> float:
    """Round down to 1, 2 or 5 times a power of ten."""
    tens = 10.0 ** floor(log10(value))
    return max(step * tens for step in (1, 2, 5) if step * tens <= value * 1.000001)


def _free(
    at: Values,
    radii: Sequence[float],
    chosen: Sequence[int],
    names: Sequence[str],
    letters: float,
    paper: tuple[float, float],
) -> list[Values]:
    """Return a box for every name near its chosen point, away from points, other names, the ruler and the edge."""
    right, top = paper[0] / 2, paper[1] / 2
    frame = np.array([[0.04 - right, 0.04 - top, right - 0.04, top - 0.04]])
    ruler, size = [[-right, -top, -right / 2, 0.45 - top]], np.array(radii)[:, None]
    taken, spots = np.vstack([ruler, np.hstack([at - size, at + size])]), list[Values]()
    gap, side = PLACES[:, :1], PLACES[:, 1:]
    for k, name in zip(chosen, names, strict=True):
        half = np.array((letters / 9 * LETTER * (len(name) + 1) / 2, letters / 9 * 0.085))
        middle = at[k] + side * (radii[k] + gap + half)
        boxes = np.hstack([middle - half, middle + half])
        outside = (boxes[:, 2:] - boxes[:, :2]).prod(1) - _overlaps(boxes, frame)
        spots.append(boxes[(_overlaps(boxes, taken) + 3 * outside + 0.02 * gap[:, 0]).argmin()])
        taken = np.vstack([taken, spots[-1]])
    return spots


def _overlaps(boxes: Values, others: Values) -> Values:
    """Return the area that every box shares with other boxes."""
    low, high = np.maximum(boxes[:, None, :2], others[:, :2]), np.minimum(boxes[:, None, 2:], others[:, 2:])
    areas: Values = np.maximum(high - low, 0).prod(2).sum(1)
    return areas
