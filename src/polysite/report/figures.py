"""Figures of training as SVG text: scores, losses, weights and diagnostics by round."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysite.engines.record import RoundRecord
from polysite.report import drawing
from polysite.report.figure_files import draw
from polysite.report.names import shorten
from polysite.report.runs import Method, Summary

Curve = tuple[Sequence[float], Sequence[float]]  # rounds, counted from 1, and values
Lines = Mapping[str, Curve]  # by name
FEW_LINES = 7  # hospitals that have lines of their own; more are rows of a heat map
MOST_PANELS = 6  # heat maps of weights


def curves(methods: Sequence[Method]) -> str:
    """Draw the validation score by round; the chosen round of every run is marked."""
    figure, axes = drawing.new(drawing.WIDE, 3.0 + 0.2 * (len(methods) > drawing.FEW))
    for k, method in enumerate(methods):
        mark = drawing.tag(method.name)
        rounds, scores = method.curve(lambda run: run.curve)
        _line(axes, k, (rounds, scores), method.name, lw=1.8, **drawing.tag(method.name))
        for begin in method.first.begins:
            axes.axvline(begin - 0.5, color=drawing.colour(k), lw=0.9, ls=":", **mark)
        for run in method.runs:
            at = dict(zip(*run.curve, strict=True))
            if run.best_round + 1 in at and len(method.runs) == 1:
                chosen = run.best_round + 1
                axes.plot(
                    chosen, at[chosen], drawing.MARKERS[k % 7], color=drawing.colour(k), ms=7, mec="white", **mark
                )
    drawing.count_rounds(axes)
    axes.set_ylabel(f"{_measure(methods)}, validation cases")
    axes.set_ylim(bottom=0)
    drawing.legend(figure, dict(drawing.entries(axes)))
    return draw(figure)


def site_curves(methods: Sequence[Method]) -> str:
    """Draw the validation score by round, a panel per hospital."""
    found = {
        site: {m.name: m.curve(partial(Summary.site_curve, site=site)) for m in methods}
        for site in sorted({s for m in methods for s in m.sites if m.first.site_curve(s)[0]})
    }
    what = f"{_measure(methods)}, validation"
    return _panels_of_lines(list(found.items()), [m.name for m in methods], what, {"bottom": 0, "top": 1}, drawing.tag)


def progress(methods: Sequence[Method]) -> str:
    """Draw the mean training loss of the hospitals, and the learning rate by round."""
    named: dict[str, Callable[[Summary], Curve]] = {
        "training loss": _losses,
        "learning rate": _rates,
    }
    found = [(what, {m.name: of(m.first) for m in methods}) for what, of in named.items()]
    return _panels_of_lines(found, [m.name for m in methods], "", {"bottom": 0}, drawing.tag)


def site_losses(method: Method) -> str | None:
    """Draw the training loss of every hospital by round: lines for few hospitals, a heat map for many."""
    lines = _by_name(method.first, lambda r: {i: s.loss for i, s in r.sites.items() if s.steps and s.loss is not None})
    return _by_site([("", lines)], "training loss") if lines else None


def matrix(values: Mapping[str, Mapping[str, float]], ends: tuple[float, float] | None = None) -> str:
    """Draw the Dice of every hospital's model (rows) on every hospital's cases (columns).

    Args:
        values: Dice by model and hospital.
        ends: The ends of the colour scale, where several matrices have the same.
    """
    rows, columns = list(values), list(next(iter(values.values())))
    table = np.array([[values[r][c] for c in columns] for r in rows])
    short = shorten(list(dict.fromkeys([*rows, *columns])), 30)
    upright = sum(len(short[c]) for c in columns) > 60
    width = max(3.6, min(1.0, 9 / len(columns)) * len(columns) + 2.6)
    figure, axes = drawing.new(width, 0.3 * len(rows) + (2.9 if upright else 1.3))
    low, top = ends or (float(np.nanmin(table)), float(np.nanmax(table)))
    low, top = min(low, top - 0.1), max(top, low + 0.1)  # small differences stay pale
    named = [short[r] for r in rows], [short[c] for c in columns]
    digits = 2 if len(columns) <= 16 else None
    shown = drawing.heat_map(axes, table, *named, (low, top), digits=digits, upright=upright)
    axes.set_xlabel("cases of")
    axes.set_ylabel("model of")
    figure.colorbar(shown, ax=axes, label="Dice", shrink=0.8, aspect=25, pad=0.02)
    return draw(figure)


def shares(methods: Sequence[Method]) -> str | None:
    """Draw the weight of every hospital in the aggregate by round; methods with the same weights share a panel.

    Of many hospitals, the weights of the first ``MOST_PANELS`` different methods are drawn.
    """
    alike: dict[str, list[str]] = {}
    series: dict[str, Lines] = {}
    for method in methods:
        lines = _by_name(method.first, attrgetter("shares"))
        if lines:
            key = repr([(s, [round(v, 3) for v in lines[s][1]]) for s in sorted(lines)])
            alike.setdefault(key, []).append(method.name)
            series[key] = lines
    if not series:
        return None
    more = {key: f" and {len(names) - 1} more" * (len(names) > 1) for key, names in alike.items()}
    named = [(alike[key][0] + more[key], lines) for key, lines in series.items()]
    return _by_site(named, "weight in the aggregate", 1.0)


def diagnostics(methods: Sequence[Method]) -> str | None:
    """Draw the diagnostics of the algorithms by round, a panel per quantity."""
    known: dict[str, dict[str, Curve]] = {}
    for method in methods:
        for what, line in _by_name(method.first, attrgetter("diagnostics")).items():
            known.setdefault(what, {})[method.name] = line
    if not known:
        return None
    names = [m.name for m in methods if any(m.name in lines for lines in known.values())]
    return _panels_of_lines(list(known.items()), names, "", {}, drawing.tag)


def _by_site(named: Sequence[tuple[str, Lines]], what: str, top: float | None = None) -> str:
    """Draw a value of every hospital by round, a panel for each title; many hospitals are rows of heat maps."""
    sites = sorted({s for _, lines in named for s in lines})
    if len(sites) > FEW_LINES:
        return _heat_maps(named[:MOST_PANELS], sites, what)
    return _panels_of_lines(named, sites, what, {"bottom": 0, "top": top})


def _panels_of_lines(
    named: Sequence[tuple[str, Lines]],
    names: Sequence[str],
    what: str,
    ends: Mapping[str, Any],
    look: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> str:
    """Draw a panel for each title, with a line per name.

    Args:
        named: Titles of the panels, and their lines.
        names: Names of all lines, in the order of their colours.
        what: Name of the vertical axes.
        ends: Ends of the vertical axes; without any, the data set them.
        look: Returns the looks of the line of a name.
    """
    figure, made = drawing.panels([title for title, _ in named], 2.1)
    for (_, axes), (_, lines) in zip(made, named, strict=True):
        for k, name in enumerate(names):
            if name in lines:
                dot = "o" if len(lines[name][0]) == 1 else ""
                _line(axes, k, lines[name], name, marker=dot, **look(name))
        if ends:
            axes.set_ylim(**ends)
        drawing.count_rounds(axes, label=False)
    drawing.name_axes(made, "round", what)
    drawing.legend(figure, dict(entry for _, axes in made for entry in drawing.entries(axes)), below=True)
    return draw(figure)


def _heat_maps(named: Sequence[tuple[str, Lines]], sites: Sequence[str], what: str) -> str:
    """Draw a row per hospital and a column per round; all maps have one colour scale."""
    last = int(max(max(x) for _, lines in named for x, _ in lines.values()))
    high = max(max(y) for _, lines in named for _, y in lines.values())
    short = shorten(sites, 34)
    figure = Figure((drawing.WIDE, (0.75 + 0.17 * len(sites)) * len(named)), layout="constrained")
    for k, (title, lines) in enumerate(named):
        table = np.full((len(sites), last), np.nan)
        for i, site in enumerate(sites):
            x, y = lines.get(site, ((), ()))
            table[i, np.asarray(x, int) - 1] = y
        axes = figure.add_subplot(len(named), 1, k + 1)
        extent = (0.5, last + 0.5, len(sites) - 0.5, -0.5)
        look: dict[str, Any] = {"vmin": 0, "vmax": high or 1, "extent": extent, "interpolation": "none"}
        shown = axes.imshow(table, cmap="cividis", aspect="auto", **look)
        axes.set_title(drawing.unformatted(title), fontsize=9)
        axes.set_yticks(range(len(sites)), [drawing.unformatted(short[s]) for s in sites], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        drawing.count_rounds(axes, label=k + 1 == len(named))
        figure.colorbar(shown, ax=axes, label=what, shrink=0.8, aspect=20, pad=0.02)
    return draw(figure)


def _losses(run: Summary) -> Curve:
    """Return the mean training loss of the hospitals that trained, by round."""
    found = [(r.round + 1, [s.loss for s in r.sites.values() if s.steps and s.loss is not None]) for r in run.records]
    return [t for t, losses in found if losses], [fmean(losses) for _, losses in found if losses]


def _rates(run: Summary) -> Curve:
    """Return the mean learning rate of all steps of a round."""
    found = [(r.round + 1, r.sites.values()) for r in run.records if any(s.steps for s in r.sites.values())]
    return [t for t, _ in found], [sum(s.lr_sum for s in did) / sum(s.steps for s in did) for _, did in found]


def _by_name(run: Summary, of: Callable[[RoundRecord], Mapping[str, float]]) -> Lines:
    """Return named numbers of the records as curves."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for record in run.records:
        for name, value in of(record).items():
            rounds, values = curves.setdefault(name, ([], []))
            rounds.append(record.round + 1)
            values.append(value)
    return curves


def _line(axes: Axes, k: int, line: Curve, name: str, lw: float = 1.4, **look: Any) -> None:
    """Draw the k-th of several lines."""
    axes.plot(*line, drawing.dashes(k), color=drawing.colour(k), lw=lw, label=drawing.unformatted(name), **look)


def _measure(methods: Sequence[Method]) -> str:
    return methods[0].first.measure or "score"
