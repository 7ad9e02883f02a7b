"""Figures of what every hospital gets under every method.

Every row is a hospital, with a marker for each method. Many methods are a heat map, because 23 markers cannot be told
from each other.
"""

from collections.abc import Sequence
from math import ceil, floor
from statistics import fmean, stdev

import numpy as np

from polysite.metrics.measures import about
from polysite.report import drawing
from polysite.report.compare import Comparison
from polysite.report.figure_files import draw
from polysite.report.names import shorten
from polysite.report.runs import Method

FEW = 7  # methods that have markers of their own
FEW_ROWS = 12  # hospitals up to which rows are tall
LONGEST = 34  # letters of a name beside a row


def hospitals(comparison: Comparison, measure: str) -> tuple[str, str]:
    """Draw the mean of every hospital under every method; return the figure and its caption."""
    if len(comparison.methods) <= FEW:
        words = "A row per hospital, the best on top; lines: standard error over cases."
        return _sites(comparison, measure), words
    words = "Means of hospitals (rows) under methods (columns), both ordered from the best to the worst."
    return _heat_map(comparison, measure), words


def _sites(comparison: Comparison, measure: str) -> str:
    """Draw a row per hospital, the highest scores on top, and one for all cases below: a marker per method."""
    sites: list[str | None] = [None, *reversed(_best_first(comparison, measure))]
    figure, axes = drawing.new(drawing.WIDE, 0.9 + (0.27 if len(sites) > FEW_ROWS else 0.45) * len(sites))
    several = len(comparison.methods)
    for k, method in enumerate(comparison.methods):
        groups = [method.of(s, measure, comparison.policy) if s else comparison.all_of(method, measure) for s in sites]
        y = np.arange(len(sites)) + (0.5 - (k + 0.5) / several) * 0.5 * (several > 1)
        axes.errorbar(
            [_mean(g) for g in groups], y, xerr=[_error(g) for g in groups], label=drawing.unformatted(method.name),
            fmt=drawing.marker(k), color=drawing.colour(k), ms=4.5, mec="white", mew=0.4, lw=0.9,
        )  # fmt: skip
    axes.axhline(0.5, color="#999999", lw=0.8)
    short = shorten(comparison.sites, LONGEST)
    drawing.name_rows(axes, [short[s] if s else "all" for s in sites])
    axes.set_xlabel(_label(comparison, measure))
    if about(measure).distance:
        axes.set_xlim(left=0)
    drawing.legend(figure, dict(drawing.entries(axes)), below=several > 3)
    return draw(figure)


def _heat_map(comparison: Comparison, measure: str) -> str:
    """Draw a row per hospital and a column per method, ordered from the best, with the numbers, and a row for all."""
    ranked, sites = _ranked(comparison, measure), _best_first(comparison, measure)
    rows: list[str | None] = [*sites, None]
    columns = [
        [m.of(s, measure, comparison.policy) if s else comparison.all_of(m, measure) for s in rows] for m in ranked
    ]
    table = np.array([list(map(_mean, column)) for column in columns]).T
    figure, axes = drawing.new(max(drawing.WIDE, 2.9 + 0.42 * len(ranked)), 1.9 + max(0.25 * len(rows), 2.4))
    digits, reverse = 1 if about(measure).distance else 2, about(measure).better < 0
    short, titles = shorten(sites, LONGEST), shorten([m.name for m in ranked], 28)
    named = [short[s] if s else "all cases" for s in rows], [titles[m.name] for m in ranked]
    tags = [drawing.tag(m.name) for m in ranked]
    shown = drawing.heat_map(axes, table, *named, limits(table, measure), digits=digits, reverse=reverse, tags=tags)
    axes.axhline(len(sites) - 0.5, color="white", lw=3)
    figure.colorbar(shown, ax=axes, label=_label(comparison, measure), shrink=0.6, aspect=30, pad=0.015)
    return draw(figure)


def limits(table: np.ndarray, measure: str) -> tuple[float, float]:
    """Return the ends of a colour scale: whole twentieths for scores, whole numbers for distances."""
    unit = 1.0 if about(measure).distance else 0.05
    low, high = (float(x) / unit for x in (np.nanmin(table), np.nanmax(table)))
    return unit * floor(low), unit * max(ceil(high), floor(low) + 1)


def _ranked(comparison: Comparison, measure: str) -> list[Method]:
    """Return the methods, the best mean over all cases first."""
    sign = about(measure).better
    return sorted(comparison.methods, key=lambda m: -sign * fmean(comparison.all_of(m, measure) or [0.0]))


def _best_first(comparison: Comparison, measure: str) -> list[str]:
    """Return the hospitals, the best mean over all methods first."""
    sign = about(measure).better

    def mean(site: str) -> float:
        return fmean([x for m in comparison.methods for x in m.of(site, measure, comparison.policy)] or [0.0])

    return sorted(comparison.sites, key=lambda s: (-sign * mean(s), s))


def _label(comparison: Comparison, measure: str) -> str:
    return f"{comparison.title(measure)}, {comparison.methods[0].first.split} cases"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
