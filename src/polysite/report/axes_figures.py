"""Figures over the axes of a benchmark: loss against distance over federations, scores against a swept setting."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from polysite.config import flat
from polysite.metrics.averages import AVERAGES, OF_CLASSIFICATIONS, OF_SEGMENTATIONS, Way
from polysite.metrics.correlation import correlation
from polysite.metrics.measures import about
from polysite.report.averages import best_mean
from polysite.report.axes import FederationResult, related
from polysite.report.drawing import COLOURS, MARKERS, deviation, entries, legend, panels, unformatted
from polysite.report.figure_files import Picture, draw
from polysite.report.published import BEST_MEANS, Paper, numbers
from polysite.report.runs import Method

HIGH = 2.5  # inches of a panel
MAX_METHODS = 7  # largest number of methods in the figure of distances
Score = Callable[[FederationResult, Method], list[float]]  # values whose mean and deviation are drawn


def distance(results: Sequence[FederationResult]) -> list[Picture]:
    """Draw the loss of every method against every distance, a point per federation; none without distances."""
    pairs = related(results)
    kinds = list(dict.fromkeys(pair.distance for pair in pairs))
    known = list(dict.fromkeys(pair.method for pair in pairs))
    methods = known[:MAX_METHODS]
    if not kinds:
        return []
    figure, made = panels([""] * len(kinds), HIGH, shared=True)
    main = about(results[0].comparison.main).title
    for (_, axes), kind in zip(made, kinds, strict=True):
        shown = [pair for pair in pairs if pair.distance == kind and pair.method in methods]
        for k, pair in enumerate(shown):
            errors = [deviation(values) for values in pair.y]
            look: dict[str, Any] = {"ms": 5, "mec": "white", "mew": 0.5, "elinewidth": 0.8, "capsize": 1.5, "ls": ""}
            axes.errorbar(
                pair.x, pair.means, yerr=errors, fmt=MARKERS[k % 7], color=COLOURS[k % 7],
                label=unformatted(pair.method), **look,
            )  # fmt: skip
            for x, y, title in zip(pair.x, pair.means, pair.titles, strict=True) if len(shown) == 1 else ():
                place = 1 + next(i for i, r in enumerate(results) if r.title == title)
                axes.annotate(str(place), (x, y), (3, 3), textcoords="offset points", fontsize=7, color="#444")
        rank = [correlation(pair.x, pair.means, "spearman") for pair in shown]
        words = f"Spearman {rank[0]:+.2f}" if len(rank) == 1 and rank[0] == rank[0] else ""
        axes.set_title(words, fontsize=9, loc="left")
        axes.set_xlabel(kind, fontsize=9)
        axes.axhline(0, color="#c4c9d0", lw=0.8, zorder=0)
    made[0][1].set_ylabel(f"loss of {main}", fontsize=9)
    legend(figure, dict(entries(made[0][1])))
    named = "; ".join(f"{k} {r.title}" for k, r in enumerate(results, start=1))
    numbered = f" Numbers: {named}." if len(methods) == 1 else ""
    numbered += f" {len(methods)} of {len(known)} methods are shown." if len(known) > len(methods) else ""
    caption = (
        f"Loss of {main} against the mean distance between the sites, a point per federation; bars: one standard "
        f"deviation over the seeds.{numbered}"
    )
    return [Picture("Does distance predict loss?", draw(figure), caption, name="distance")]


def sweep(results: Sequence[FederationResult], paper: Paper = Paper()) -> list[Picture]:
    """Draw scores against every swept setting, a panel per federation; none if no setting is swept.

    Scores are the main one and, from runs with ``run.peek`` and counts, the best means that the paper's tables name, or
    all without any.
    """
    main = about(results[0].comparison.main).title
    pictures = []
    for key in swept(results[0].comparison.trained):
        words = f"Mean {main} of all cases against {key}; bars: one standard deviation over the seeds."
        pictures.append(_swept(results, key, main, words, f"sweep {key}", _main))
        for measure in _peeked(results, paper):
            title = AVERAGES[measure].best_mean
            words = (
                f"{title} against {key}: the highest {AVERAGES[measure].title} on test cases in any round, averaged as "
                f"{_way(results[0].comparison.trained[0]).title!r}. It is too good, because the round was chosen on "
                "the test cases. Bars: one standard deviation over the runs."
            )
            pictures.append(_swept(results, key, title, words, f"sweep {key} {title}", partial(_best, measure)))
    return pictures


def _swept(results: Sequence[FederationResult], key: str, title: str, words: str, name: str, score: Score) -> Picture:
    """Draw one score against one setting."""
    figure, made = panels([result.title for result in results], HIGH, shared=True)
    for (_, axes), result in zip(made, results, strict=True):
        _curves(axes, result, key, score)
        axes.set_xlabel(key, fontsize=9)
        if axes.get_xscale() == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(4))  # more numbers of many digits would touch
    made[0][1].set_ylabel(title, fontsize=9)
    legend(figure, {label: handle for _, axes in made for label, handle in entries(axes)})
    caption = f"{words} Dashed lines: methods without this setting."
    return Picture(f"{title} against {key}", draw(figure), caption, name=name)


def _main(result: FederationResult, method: Method) -> list[float]:
    """Return the main score of every seed."""
    return method.spread(result.comparison.main, result.comparison.policy)


def _best(measure: str, result: FederationResult, method: Method) -> list[float]:
    """Return the best mean of every run; none if one has none, or was trained with the sites of another federation."""
    known = not any(run.like for run in method.runs)
    values = [best_mean(run, measure, _way(method)) for run in method.runs] if known else []
    return [] if any(map(isnan, values)) else values


def _way(method: Method) -> Way:
    """Return how best means are averaged: per client, with the background in a segmentation."""
    return Way(background=method.first.measure == "Dice")


def _peeked(results: Sequence[FederationResult], paper: Paper) -> list[str]:
    """Return the measures whose best means are drawn: those that the paper's tables name, or all without any."""
    methods = [(result, method) for result in results for method in result.comparison.trained]
    known = OF_CLASSIFICATIONS if methods[0][1].first.measure == "accuracy" else OF_SEGMENTATIONS
    printed = {BEST_MEANS.get(n.measure) for table in paper.tables for n in numbers(table)}
    named = [measure for measure in known if measure in printed] or known
    return [measure for measure in named if any(_best(measure, *each) for each in methods)]


def swept(methods: Sequence[Method]) -> list[str]:
    """Return the numeric settings in which two methods differ while all their other settings are the same."""
    every = [_settings(m) for m in methods]
    found: dict[str, None] = {}
    for i, one in enumerate(every):
        for other in every[:i]:
            differing = [k for k in one.keys() | other.keys() if one.get(k) != other.get(k)]
            if len(differing) == 1 and all(_is_number(each.get(differing[0])) for each in (one, other)):
                found[differing[0]] = None
    return sorted(found)


def _settings(method: Method) -> dict[str, Any]:
    """Return every setting of a method by its dotted key; seeds are left out."""
    return {k: v for k, v in flat(method.first.settings).items() if k not in ("seed", "split.seed", "split.fold")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _curves(axes: Axes, result: FederationResult, key: str, score: Score) -> None:
    """Draw a line through methods that differ in the key alone, and a dashed line for every other method."""
    lines: dict[str, list[tuple[float, list[float], Method]]] = {}
    for method in result.comparison.trained:
        settings = _settings(method)
        value = settings.pop(key, None)
        rest = str(sorted(settings.items(), key=str))
        point = float(value) if _is_number(value) else 0.0, score(result, method), method
        lines.setdefault(rest, []).append(point)
    several = [sorted(line, key=lambda point: point[0]) for line in lines.values() if len(line) > 1]
    for k, line in enumerate(several):
        known = [point for point in line if point[1]]
        x, y = [point[0] for point in known], [fmean(point[1]) for point in known]
        errors = [deviation(point[1]) for point in known]
        label = _label([point[2].name for point in line])
        axes.errorbar(x, y, yerr=errors, fmt=f"{MARKERS[k % 7]}-", color=COLOURS[k % 7], ms=4, capsize=2, label=label)
    _scale(axes, [point[0] for line in several for point in line])
    for k, line in enumerate(line for line in lines.values() if len(line) == 1):
        (_, scores, method) = line[0]
        if scores:
            axes.axhline(fmean(scores), color=COLOURS[-1 - k % 6], ls="--", lw=1, label=unformatted(method.name))


def _label(names: Sequence[str]) -> str:
    """Return the parts that the names of methods share.

    >>> _label(["feddiv, alpha = 1, lam = 0", "feddiv, alpha = 1, lam = 10"])
    'feddiv, alpha = 1'
    """
    parts = [name.split(", ") for name in names]
    return unformatted(", ".join(p for p in parts[0] if all(p in other for other in parts)) or names[0])


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic axis for values of different magnitudes; a symmetric one if they include zero."""
    positive = [v for v in values if v > 0]
    if not positive or max(positive) < 50 * min(positive):
        return
    if min(values) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive))
