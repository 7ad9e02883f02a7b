"""Figures of a paper, by name: ``bars``, ``boxes``, ``groups``, ``volumes``, ``cases``, ``clusters`` and others.

``PAPER_FIGURES`` maps a name to a function of a comparison and the options of its page, which returns pictures; none if
the runs do not hold what the figure shows. Most are figures of paper B (Manthe et al., Federated brain tumor
segmentation: an extensive benchmark, 2024): sites by decreasing number of cases, mean ± one standard deviation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysite.errors import ConfigError, nearest
from polysite.metrics.measures import about
from polysite.report import axes_figures, example_cases
from polysite.report.axes import FederationResult
from polysite.report.compare import Comparison
from polysite.report.drawing import COLOURS, INK, WIDE, deviation, filling, new, unformatted
from polysite.report.figure_files import Picture, draw
from polysite.report.names import cut, shorten
from polysite.report.page import Options, cluster_pictures
from polysite.report.runs import Method
from polysite.report.viewer import draw_plate, trim

FULL = 6  # methods in one panel of bars
LETTERS = 25  # of a name below or beside an axis
REPEATED = 2  # methods that every panel repeats, at most
LABELS = 4  # panels of box plots in a row
UNKNOWN, GREY = "#c4c9d0", "#8a93a0"
SLANTED = 70  # letters of all names, beyond which they are slanted
Draw = Callable[[Comparison, Options], list[Picture]]


def paper_figures(comparison: Comparison, options: Options) -> list[Picture]:
    """Return the figures that the options name; ``cases`` also if cases are named."""
    more = ["cases"] if options.cases and "scans" not in options.figures else []
    names = list(dict.fromkeys([*options.figures, *more]))
    for name in names:
        if name not in PAPER_FIGURES:
            raise ConfigError(f"there is no figure {name!r}; {nearest(name, PAPER_FIGURES)}")
    return [picture for name in names for picture in PAPER_FIGURES[name](comparison, options)]


def bars(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw mean ± one standard deviation of every site, with several panels for many methods."""
    panels = _panels(comparison)
    what, split = about(comparison.main).title, comparison.methods[0].first.split
    caption = (
        f"Mean {what} of the {split} cases of every hospital, by decreasing number of cases (in brackets). Error bars: "
        "one standard deviation over cases."
    )
    many = len(panels) > 1
    return [
        Picture(
            f"{what} by hospital" + f", {k} of {len(panels)}" * many,
            draw(_bars(comparison, methods)),
            caption + " Every panel repeats the reference." * many,
            name="bars" + f"-{k}" * many,
        )
        for k, methods in enumerate(panels, start=1)
    ]


def _panels(comparison: Comparison) -> list[list[Method]]:
    """Divide the methods into panels of at most FULL; each repeats pooled training and the reference."""
    if len(comparison.methods) <= FULL:
        return [list(comparison.methods)]
    pooled = [m for m in comparison.methods if m.first.settings["run"]["pooled"]]
    first = [*pooled, comparison.find(comparison.reference)]
    first = list({m.name: m for m in first}.values())[-REPEATED:]
    rest = [m for m in comparison.methods if m not in first]
    count = ceil(len(rest) / (FULL - len(first)))
    size = ceil(len(rest) / count)
    return [[*first, *rest[k : k + size]] for k in range(0, len(rest), size)]


def _bars(comparison: Comparison, methods: Sequence[Method]) -> Figure:
    sites = [*comparison.sites_by_size, None]
    counts = comparison.find(comparison.reference).sizes
    short = shorten([s for s in sites if s], LETTERS)
    named = [f"{short[s]} ({counts.get(s, 0)})" if s else "all" for s in sites]
    figure, axes = new(max(WIDE, 0.06 * len(sites) * len(methods) + 0.8), 2.9 + _depth(named))
    width, ends = 0.82 / len(methods), {"capsize": 1.5, "capthick": 0.8, "ecolor": "#444", "lw": 0.8}
    for k, method in enumerate(methods):
        values = [method.of(s, comparison.main, comparison.policy) for s in sites]
        x = np.arange(len(sites)) + (k - (len(methods) - 1) / 2) * width
        means, errors = [fmean(v) if v else np.nan for v in values], [deviation(v) for v in values]
        label = unformatted(method.name)
        axes.bar(x, means, width * 0.93, yerr=errors, label=label, error_kw=ends, **filling(k))
    _name_sites(axes, named)
    axes.axvline(len(sites) - 1.5, color=UNKNOWN, lw=0.8)
    axes.set_xlim(-0.6, len(sites) - 0.4)
    axes.set_ylim(0, max(1.0, float(axes.dataLim.y1)) + 0.01)
    axes.set_yticks(np.arange(0, 1.01, 0.2))
    axes.grid(axis="y", color="#eceff2")
    axes.set_axisbelow(True)
    axes.set_ylabel(f"{about(comparison.main).title}, mean ± SD")
    if len(methods) > 1:
        place: dict[str, Any] = {"loc": "outside upper center", "ncols": min(3, len(methods))}
        figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, **place)
    return figure


def boxes(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw box plots over cases, a row per method: the mean over labels, then every label."""
    labels = comparison.methods[0].first.labels
    columns: list[str | None] = [None, *(labels if len(labels) > 1 else ())]
    shown, what = list(reversed(comparison.methods)), about(comparison.main).title
    across = min(LABELS, len(columns))
    rows = ceil(len(columns) / across)
    figure = Figure((max(WIDE, 2.4 + 2.0 * across), rows * (0.3 * len(shown) + 0.9)), layout="constrained")
    for k, label in enumerate(columns):
        axes = figure.add_subplot(rows, across, k + 1)
        values = [m.of(None, comparison.main, comparison.policy, label) for m in shown]
        _boxes(axes, values, vertical=False)
        titles = [unformatted(cut(m.name, LETTERS)) for m in shown] if k % across == 0 else [""] * len(shown)
        axes.set_yticks(range(1, len(shown) + 1), titles, fontsize=9)
        axes.set_ylim(0.4, len(shown) + 0.6)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_title(unformatted(label or ("mean over labels" if len(labels) > 1 else "")), fontsize=10, loc="left")
        axes.set_xlabel(what, fontsize=9)
    cases = len(comparison.methods[0].of(None, comparison.main, comparison.policy))
    caption = (
        f"{what} over the {cases} {comparison.methods[0].first.split} cases of all hospitals. Box: middle half of the "
        "cases with the median; whiskers: to the last case within 1.5 box lengths; triangle: mean; dots: other cases."
    )
    return [Picture(f"{what} over cases", draw(figure), caption, name="boxes")]


def groups(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw the number of cases and their groups (grades, scanners) at every site."""
    counts = _groups(comparison)
    sites = sorted(counts, key=lambda s: (-sum(counts[s].values()), s))
    names = sorted({g for groups in counts.values() for g in groups if g})
    names += [""] if any("" in groups for groups in counts.values()) else []
    short = list(shorten(sites, LETTERS).values())
    figure, axes = new(max(WIDE, 0.34 * len(sites) + 1.0), 2.6 + _depth(short))
    below = np.zeros(len(sites))
    for k, group in enumerate(names):
        height = np.array([counts[s].get(group, 0) for s in sites], float)
        colour = COLOURS[k % len(COLOURS)] if group else UNKNOWN
        axes.bar(range(len(sites)), height, 0.7, bottom=below, color=colour, label=unformatted(group or "not known"))
        below += height
    for x, total in enumerate(below):
        axes.annotate(f"{total:.0f}", (x, total), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    _name_sites(axes, short)
    axes.set_ylabel("cases")
    axes.set_xlim(-0.6, len(sites) - 0.4)
    known = names != [""]
    if known:
        axes.legend(frameon=False, fontsize=9)
    caption = f"Cases of every hospital in all splits, {sum(map(int, below))} together"
    caption += ", by group." if known else "; the data name no groups."
    return [Picture("Cases by hospital", draw(figure), caption, name="groups")]


def _groups(comparison: Comparison) -> dict[str, dict[str, int]]:
    """Return the cases of every site by group; "" where it is not known."""
    found: dict[str, dict[str, int]] = {}
    for method in comparison.methods:
        for run in method.runs:
            for site, counts in (run.evaluation.about.get("groups", {}) if run.evaluation else {}).items():
                if sum(counts.values()) > sum(found.get(site, {}).values()):
                    found[site] = counts
    reference = comparison.find(comparison.reference)
    return found or {site: {"": count} for site, count in reference.sizes.items()}


def volumes(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw box plots of the volume of every label at every site, from the ground truth of the evaluated cases."""
    reference = comparison.find(comparison.reference)
    known = [run.evaluation for run in reference.runs if run.evaluation]
    if not known or comparison.main != "dice":
        return []
    litres = comparison.unit == "mm" and all("voxel" in e.about for e in known)
    sizes: dict[tuple[str, str, str], float] = {}
    for evaluation in known:
        for (site, case), of in evaluation.own.items():
            scale = evaluation.about["voxel"][site][case] / 1000 if litres else 1.0
            sizes |= {(site, case, label): row["truth"] * scale for label, row in of.items()}
    sites, labels = comparison.sites_by_size, reference.first.labels
    short = list(shorten(sites, LETTERS).values())
    size = max(WIDE, 0.34 * len(sites) + 1.0), 1.7 * len(labels) + _depth(short)
    figure = Figure(size, layout="constrained")
    for k, label in enumerate(labels):
        axes = figure.add_subplot(len(labels), 1, k + 1)
        _boxes(axes, [[v for (s, _, n), v in sizes.items() if (s, n) == (site, label)] for site in sites], True)
        _name_sites(axes, short if k == len(labels) - 1 else [""] * len(sites), 1)
        axes.set_title(unformatted(label), fontsize=10, loc="left")
        axes.set_ylabel("mL" if litres else "voxels", fontsize=9)
        axes.set_xlim(0.4, len(sites) + 0.6)
        axes.set_ylim(bottom=0)
    caption = (
        f"Volume of every label in the ground truth of the {reference.first.split} cases, hospitals by decreasing "
        f"number of cases{'' if litres else '; the size of a voxel is not known'}. Boxes as in a box plot over cases."
    )
    return [Picture("Label volumes by hospital", draw(figure), caption, name="volumes")]


def cases(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw chosen cases in one slice, a row per modality: the scan, then outlines of the truth and of predictions."""
    if comparison.main != "dice" or not options.scans:
        return []
    pictures = []
    for shown in map(trim, example_cases.named(comparison.trained, options.cases)):
        rows = [replace(shown, modalities=(m,), image=shown.image[k : k + 1], why=m)
                for k, m in enumerate(shown.modalities)]  # fmt: skip
        caption = (
            f"Case {shown.case} of {shown.site} in the axial slice with most labelled voxels, a row per modality: the "
            f"scan, the ground truth and the predictions of {', '.join(shown.predicted)}; Dice: mean over the labels."
        )
        pictures.append(Picture(f"Case {shown.case}", draw(draw_plate(rows)), caption, name=f"cases {shown.case}"))
    return pictures


def scans(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw the scans of chosen cases, tested or not: three slices of every modality, with the cluster of the case."""
    from polysite.report.cluster_examples import draw_scan  # imports torch
    from polysite.report.scans import read_scan

    known: dict[str, dict[str, Mapping[str, str]]] = {}
    for method in comparison.trained:
        for row in method.first.evaluation.clusters if method.first.evaluation else ():
            known.setdefault(row["case"], {})[method.name] = row
    pictures, run = [], comparison.trained[0].first
    if run.evaluation is None or not options.scans:
        return []
    for case in options.cases:
        rows = known.get(case, {})
        where = "; ".join(f"{name}: cluster {int(row['cluster']) + 1}" for name, row in rows.items())
        site = next(iter(rows.values()))["site"] if rows else ""
        drawing = draw_scan(read_scan(run, site, case), run.evaluation.about["modalities"])
        caption = f"Three slices of case {case}{f' of {site}' if site else ''}, every modality. {where}".strip()
        pictures.append(Picture(f"Scan of case {case}", drawing, caption, name=f"scans {case}"))
    return pictures


def sweep(comparison: Comparison, options: Options) -> list[Picture]:
    """Draw the main score and best means against every numeric setting that is the only difference between methods."""
    return axes_figures.sweep(options.federations or (FederationResult("", comparison),), options.published)


def _boxes(axes: Axes, values: Sequence[Iterable[float]], vertical: bool) -> None:
    """Draw box plots with the mean as a triangle, at 1, 2, ..."""
    dots = {"marker": "o", "ms": 2, "mfc": GREY, "mec": "none", "alpha": 0.5}
    axes.boxplot(
        [list(v) for v in values], orientation="vertical" if vertical else "horizontal", widths=0.6, showmeans=True,
        patch_artist=True, boxprops={"facecolor": "#d6e6f2", "edgecolor": INK, "lw": 0.8},
        medianprops={"color": INK, "lw": 1.4}, whiskerprops={"lw": 0.8}, capprops={"lw": 0.8}, flierprops=dots,
        meanprops={"marker": "^", "ms": 4, "mfc": COLOURS[5], "mec": "none"}, manage_ticks=False,
    )  # fmt: skip
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if vertical else "x", color="#eceff2")
    axes.set_axisbelow(True)


def _name_sites(axes: Axes, names: Sequence[str], first: int = 0) -> None:
    """Write the names of sites below the axes, slanted where they are long or many."""
    slanted: dict[str, Any] = {"rotation": 50, "ha": "right", "rotation_mode": "anchor"}
    look = slanted if sum(map(len, names)) > SLANTED else {}
    axes.set_xticks(range(first, first + len(names)), [unformatted(n) for n in names], fontsize=9, **look)


def _depth(names: Sequence[str]) -> float:
    """Return the height in inches that the names below the axes take."""
    return 0.2 + 0.055 * max(map(len, names)) if sum(map(len, names)) > SLANTED else 0.2


PAPER_FIGURES: Mapping[str, Draw] = {
    "bars": bars,
    "boxes": boxes,
    "groups": groups,
    "volumes": volumes,
    "cases": cases,
    "clusters": lambda comparison, options: cluster_pictures(comparison.trained),
    "scans": scans,
    "distance": lambda comparison, options: axes_figures.distance(options.federations),
    "sweep": sweep,
}
