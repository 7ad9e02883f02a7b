"""Figures of runs as SVG text. Colours can be distinguished by colour-blind readers and in print."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysite.metrics.measures import about
from polysite.report.compare import Comparison
from polysite.report.figure_files import draw
from polysite.report.runs import Method, Summary

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
FEW = 5  # up to so many methods are drawn as bars, more as dots
WIDE = 7.2  # inches
MAX_LETTERS = 40  # of a name in a legend
MAX_ENTRIES = 12  # of a legend of weights


def hospitals(comparison: Comparison, measure: str) -> str:
    """Draw the mean of every hospital under every method, with the standard error over its cases."""
    return _bars(comparison, measure) if len(comparison.methods) <= FEW else _dots(comparison, measure)


def _bars(comparison: Comparison, measure: str) -> str:
    sites = [*comparison.sites, None]
    figure, axes = _new(max(WIDE, 0.3 + 0.45 * len(sites)), 3.2)
    width = 0.8 / len(comparison.methods)
    for k, method in enumerate(comparison.methods):
        groups = [method.of(s, measure, comparison.policy) for s in sites]
        x = np.arange(len(groups)) + (k - (len(comparison.methods) - 1) / 2) * width
        look = {"lw": 1, "capsize": 2, "ecolor": "#444"}
        means, error = [fmean(g) if g else np.nan for g in groups], [_error(g) for g in groups]
        axes.bar(x, means, width * 0.92, yerr=error, label=unformatted(method.name), color=_colour(k), error_kw=look)
    axes.set_xticks(range(len(sites)), [unformatted(s or "all") for s in sites], rotation=45 if len(sites) > 10 else 0)
    _scale(axes, comparison, measure, "y")
    _legend(figure, dict(_entries(axes)))
    return draw(figure)


def _dots(comparison: Comparison, measure: str) -> str:
    """Draw a row per method, the best on top: a marker per hospital, a black bar for all cases."""
    sign = about(measure).better
    means = {m.name: fmean(comparison.all_of(m, measure) or [0.0]) for m in comparison.methods}
    ranked = sorted(comparison.methods, key=lambda m: sign * means[m.name])
    figure, axes = _new(WIDE, 0.9 + 0.27 * len(ranked))
    for k, site in enumerate(comparison.sites):
        x = [fmean(v) if (v := m.of(site, measure, comparison.policy)) else np.nan for m in ranked]
        axes.plot(
            x,
            range(len(ranked)),
            MARKERS[(k + k // 7) % 7],
            color=_colour(k),
            ms=5,
            mec="white",
            mew=0.5,
            label=unformatted(site),
        )
    for y, m in enumerate(ranked):
        error = _error(comparison.all_of(m, measure))
        axes.errorbar(means[m.name], y, xerr=error, fmt="|", color="black", ms=11, mew=2, lw=1.2, capsize=0)
    axes.set_yticks(range(len(ranked)), [unformatted(m.name) for m in ranked])
    axes.set_ylim(-0.6, len(ranked) - 0.4)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    _scale(axes, comparison, measure, "x")
    _legend(figure, dict(_entries(axes)))
    return draw(figure)


def curves(methods: Sequence[Method]) -> str:
    """Draw the validation score by round; the chosen round of every run is marked."""
    figure, axes = _new(WIDE, 3.0 + 0.2 * (len(methods) > FEW))
    for k, method in enumerate(methods):
        rounds, scores = method.curve(lambda run: run.curve)
        axes.plot(rounds, scores, DASHES[k // 7 % 4], color=_colour(k), lw=1.8, label=unformatted(method.name))
        for begin in method.first.begins:
            axes.axvline(begin - 0.5, color=_colour(k), lw=0.9, ls=":")
        for run in method.runs:
            at = dict(zip(*run.curve, strict=True))
            if run.best_round + 1 in at and len(method.runs) == 1:
                chosen = run.best_round + 1
                axes.plot(chosen, at[chosen], MARKERS[k % 7], color=_colour(k), ms=7, mec="white")
    axes.set_xlabel("round")
    axes.set_ylabel(f"{_measure(methods)}, validation cases")
    axes.set_ylim(bottom=0)
    _legend(figure, dict(_entries(axes)))
    return draw(figure)


def site_curves(methods: Sequence[Method]) -> str:
    """Draw the validation score by round, a panel per hospital."""
    sites = sorted({s for m in methods for s in m.sites if any(m.first.site_curve(s)[0] for m in methods)})
    figure, panels = _panels(sites, 2.1)
    for site, axes in panels:
        for k, method in enumerate(methods):
            rounds, scores = method.curve(partial(Summary.site_curve, site=site))
            axes.plot(rounds, scores, DASHES[k // 7 % 4], color=_colour(k), lw=1.3, label=unformatted(method.name))
        axes.set_ylim(0, 1)
    _name_axes(panels, "round", f"{_measure(methods)}, validation")
    _legend(figure, dict(_entries(panels[0][1])), below=True)
    return draw(figure)


def times(methods: Sequence[Method], hours: Callable[[Summary], Sequence[float]]) -> str:
    """Draw the validation score over simulated time; ``hours`` returns the time at the end of every round."""
    figure, axes = _new(WIDE, 3.0 + 0.2 * (len(methods) > FEW))
    for k, method in enumerate(methods):
        rounds, scores = method.curve(lambda run: run.curve)
        _, clock = method.curve(lambda run: (list(range(1, len(run.records) + 1)), list(hours(run))))
        at = [clock[r - 1] for r in rounds]
        axes.plot(at, scores, DASHES[k // 7 % 4], color=_colour(k), lw=1.8, label=unformatted(method.name))
    axes.set_xlabel("simulated hours")
    axes.set_ylabel(f"{_measure(methods)}, validation cases")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(figure, dict(_entries(axes)))
    return draw(figure)


def matrix(values: Mapping[str, Mapping[str, float]]) -> str:
    """Draw the Dice of every hospital's model (rows) on every hospital's cases (columns)."""
    rows, columns = list(values), list(next(iter(values.values())))
    table = np.array([[values[r][c] for c in columns] for r in rows])
    figure, axes = _new(max(3.2, min(1.0, 9 / len(columns)) * len(columns) + 2.2), 0.42 * len(rows) + 1.1)
    low, top = float(np.nanmin(table)), float(np.nanmax(table))
    low, top = min(low, top - 0.1), max(top, low + 0.1)  # small differences stay pale
    axes.imshow(table, cmap="cividis", vmin=low, vmax=top, aspect="auto")
    if len(columns) <= 16:
        for i, j in np.ndindex(*table.shape):
            if not np.isnan(table[i, j]):
                colour = "white" if table[i, j] < (low + top) / 2 else "black"
                axes.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=9)
    long = sum(map(len, columns)) > 60
    axes.set_xticks(
        range(len(columns)), map(unformatted, columns), rotation=45 if long else 0, ha="right" if long else "center"
    )
    axes.set_yticks(range(len(rows)), map(unformatted, rows))
    axes.set_xlabel("cases of")
    axes.set_ylabel("model of")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return draw(figure)


def shares(methods: Sequence[Method]) -> str | None:
    """Draw the weight of every hospital in the aggregate by round; methods with the same weights share a panel."""
    alike: dict[str, list[str]] = {}
    series: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for method in methods:
        lines = _by_name(method.first, "shares")
        if lines:
            key = repr([(s, [round(v, 3) for v in values]) for s, (_, values) in sorted(lines.items())])
            alike.setdefault(key, []).append(method.name)
            series[key] = lines
    if not series:
        return None
    figure, panels = _panels([_names(alike[key]) for key in series], 2.0)
    for (_, axes), lines in zip(panels, series.values(), strict=True):
        _lines(axes, lines)
        axes.set_ylim(0, 1)
    _name_axes(panels, "round", "weight in the aggregate")
    entries = dict(entry for _, axes in panels for entry in _entries(axes))
    if len(entries) <= MAX_ENTRIES:
        _legend(figure, entries, below=True)
    return draw(figure)


def diagnostics(methods: Sequence[Method]) -> str | None:
    """Draw the diagnostics of the algorithms by round, a panel per quantity."""
    known: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for method in methods:
        for what, line in _by_name(method.first, "diagnostics").items():
            known.setdefault(what, {})[method.name] = line
    if not known:
        return None
    figure, panels = _panels(list(known), 2.0)
    for what, axes in panels:
        _lines(axes, known[what])
        axes.legend(frameon=False, fontsize=8)
    _name_axes(panels, "round", "")
    return draw(figure)


def _by_name(run: Summary, what: str) -> dict[str, tuple[list[int], list[float]]]:
    """Return named numbers of the records as curves."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for record in run.records:
        for name, value in getattr(record, what).items():
            rounds, values = curves.setdefault(name, ([], []))
            rounds.append(record.round + 1)
            values.append(value)
    return curves


def _lines(axes: Axes, lines: Mapping[str, tuple[list[int], list[float]]]) -> None:
    for k, (name, (x, y)) in enumerate(sorted(lines.items())):
        mark = "o" if len(x) == 1 else ""
        axes.plot(x, y, DASHES[k // 7 % 4], marker=mark, color=_colour(k), lw=1.4, label=unformatted(name))


def _panels(titles: Sequence[str], height: float) -> tuple[Figure, list[tuple[str, Axes]]]:
    """Return a figure with a panel per title, three in a row."""
    columns = min(3, len(titles))
    rows = ceil(len(titles) / columns)
    figure = Figure((WIDE, height * rows + 0.7), layout="constrained")
    made = []
    for k, title in enumerate(titles):
        axes = figure.add_subplot(rows, columns, k + 1)
        axes.set_title(unformatted(cut(title, 78 // columns)), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        made.append((title, axes))
    return figure, made


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _measure(methods: Sequence[Method]) -> str:
    return methods[0].first.measure or "score"


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _scale(axes: Axes, comparison: Comparison, measure: str, axis: str) -> None:
    unit = f" ({comparison.unit})" if measure == "hd95" and comparison.unit else ""
    label = f"{about(measure).title}{unit}, {comparison.methods[0].first.split} cases"
    if axis == "y":
        axes.set_ylabel(label)
        axes.set_ylim(0, 1 if measure != "hd95" else None)
    else:
        axes.set_xlabel(label)
        if measure == "hd95":
            axes.set_xlim(left=0)


def _legend(figure: Figure, entries: Mapping[str, Any], below: bool = False) -> None:
    """Add a legend above the axes for few entries, below them for many, in as many columns as its names allow."""
    if len(entries) < 2:
        return
    few = len(entries) <= FEW and not below
    size, longest = 10 if few else 8, max(len(cut(name)) for name in entries)
    columns = max(1, min(5, len(entries), int(figure.get_figwidth() / (0.0085 * size * longest + 0.45))))
    rows = ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + 0.02 * size * max(0, rows - 2))  # the axes keep their height
    figure.legend(
        entries.values(), [cut(name) for name in entries], ncols=columns, frameon=False, fontsize=size,
        loc="outside upper center" if few else "outside lower center",
    )  # fmt: skip


def _entries(axes: Axes) -> Iterator[tuple[str, Any]]:
    """Yield the names of a legend with what is drawn for them."""
    handles, names = axes.get_legend_handles_labels()
    yield from zip(names, handles, strict=True)


def _name_axes(panels: Sequence[tuple[str, Axes]], below: str, beside: str) -> None:
    """Name the axes of the lowest panel of every column, and of the first panel of every row."""
    columns = min(3, len(panels))
    for k, (_, axes) in enumerate(panels):
        if k + columns >= len(panels):
            axes.set_xlabel(below, fontsize=9)
        if k % columns == 0:
            axes.set_ylabel(beside, fontsize=9)


def cut(name: str, most: int = MAX_LETTERS) -> str:
    """Shorten a long name in the middle, because names often differ at their ends.

    >>> cut("hospital-of-the-north-17", 11)
    'hospit…h-17'
    """
    return name if len(name) <= most else f"{name[: most - most // 3 - 2]}…{name[-(most // 3 + 1) :]}"


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def unformatted(text: str) -> str:
    """Escape a name for matplotlib: a dollar sign starts a formula, a leading underscore hides a line."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


_svg = draw
