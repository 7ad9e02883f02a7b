"""Tables of measures averaged over classes, per client and pooled, with the best mean over rounds beside them."""

from collections.abc import Iterable, Sequence
from itertools import chain
from math import isnan, nan

from polysite.metrics.averages import AVERAGES, OF_CLASSIFICATIONS, OF_SEGMENTATIONS, WAYS, Way, averaged
from polysite.report.grid import Cell, Grid, Line, mark_best, name, spread
from polysite.report.runs import Method, Summary


def honest(run: Summary, measure: str, way: Way = Way()) -> float:
    """Return an average of the final model, from the round that was best on validation cases.

    Args:
        run: A finished run.
        measure: A key of `polysite.metrics.averages.AVERAGES`.
        way: Per client or pooled, with or without background.

    Returns:
        The average on the cases that the result is reported on; NaN if their counts were not recorded.
    """
    return averaged(run.counts.values(), measure, way)


def best_mean(run: Summary, measure: str, way: Way = Way()) -> float:
    """Return the highest average on test cases in any round; NaN without ``run.peek`` or without counts."""
    rounds = [[site.counts for site in r.peeked.values()] for r in run.records if r.peeked]
    values = [averaged(sites, measure, way) for sites in rounds if all(sites)]
    return max((x for x in values if not isnan(x)), default=nan)


def tables(methods: Sequence[Method], split: str) -> list[Grid]:
    """Return a table with a block for every way to average; none if no run recorded counts."""
    if not any(run.counts for m in methods for run in m.runs):
        return []
    classes = methods[0].first.measure == "accuracy"
    measures, ways = (OF_CLASSIFICATIONS, WAYS[::2]) if classes else (OF_SEGMENTATIONS, WAYS)
    peeked = any(not isnan(best_mean(run, measures[0])) for m in methods for run in m.runs)
    titles = [(AVERAGES[k].title, *([AVERAGES[k].best_mean] if peeked else [])) for k in measures]
    blocks = (
        mark_best([_line(m, measures, way, peeked) for m in methods], [0, 0, *(1 for t in titles for _ in t)])
        for way in ways
    )
    head = ("average", "method", *chain.from_iterable(titles))
    title = "Averages over classes, per client and pooled"
    return [Grid("averages", title, head, tuple(chain.from_iterable(blocks)), _note(split, classes, peeked))]


def _line(method: Method, measures: Sequence[str], way: Way, peeked: bool) -> Line:
    cells = [name(way.title), name(method.name)]
    for k in measures:
        cells.append(_over(honest(run, k, way) for run in method.runs))
        if peeked:
            cells.append(_over(nan if method.owner else best_mean(run, k, way) for run in method.runs))
    return Line(tuple(cells))


def _over(values: Iterable[float]) -> Cell:
    """Return mean ± standard deviation over runs; a dash if one has no value."""
    each = list(values)
    return spread([] if any(map(isnan, each)) else each)


def _note(split: str, classes: bool, peeked: bool) -> str:
    """Return how the averages are computed."""
    what = "cases" if classes else "voxels"
    words = (
        f"True and false positives and negatives of every class are counted over the {what} of all {split} cases of a "
        "hospital; a measure is computed for every class and averaged over classes. Per client: then averaged over "
        "hospitals. Pooled: from the added counts of all hospitals. A class that a hospital neither has nor predicts "
        "is left out. "
    )
    if classes:
        words += "Averaged over classes, sensitivity is balanced accuracy. "
    else:
        words += "+ bg: the background, voxels without any label, counts as a class. "
    if peeked:
        words += (
            "Columns BM…: the best mean, the highest value on test cases in any round, for each measure by itself. It "
            "is too good, because the round was chosen on the test cases. The columns before them have the round that "
            "was best on validation cases. "
        )
    return f"{words}±: standard deviation over runs."
