"""Averages of measures over classes and clients, from counts of true and false positives and negatives.

All cases of a client are counted together, class by class: voxels in a segmentation, cases in a classification. Per
client: the average over the classes of every client, then over clients. Pooled: the counts of all clients are added
before the average over classes. The two differ if the frequencies of classes differ between clients, as here: each
client has four cases of one class and one of the other, and always predicts its own majority class.

>>> clients = [of_classes([(k, k)] * 4 + [(k, 1 - k)]) for k in (0, 1)]
>>> [round(averaged(clients, name), 2) for name in ("balanced_accuracy", "f1", "specificity")]
[0.5, 0.44, 0.5]
>>> [round(averaged(clients, name, Way(pooled=True)), 2) for name in ("balanced_accuracy", "f1", "specificity")]
[0.8, 0.8, 0.8]

A class that a client neither has nor predicts is left out of its average, and so is a ratio whose denominator is 0,
such as the sensitivity to an absent class. IoU is TP / (TP + FP + FN).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from polysite.metrics.overlap import BACKGROUND
from polysite.site import Count, Counts, Scores


@dataclass(frozen=True, slots=True)
class Average:
    """A measure that is averaged over classes.

    Args:
        title: Name in tables.
        best_mean: Name of its best mean over rounds in the FedDiv paper.
        ratio: Numerator and denominator of one class from its counts.
    """

    title: str
    best_mean: str
    ratio: Callable[[int, int, int, int], tuple[int, int]]


AVERAGES: Mapping[str, Average] = {
    "accuracy": Average("accuracy", "BMACC", lambda tp, fp, fn, tn: (tp, tp + fp + fn + tn)),  # summed, not averaged
    "balanced_accuracy": Average("balanced accuracy", "BMBACC", lambda tp, fp, fn, tn: (tp, tp + fn)),
    "f1": Average("F1", "BMCAF1", lambda tp, fp, fn, tn: (2 * tp, 2 * tp + fp + fn)),
    "iou": Average("IoU", "BMIoU", lambda tp, fp, fn, tn: (tp, tp + fp + fn)),
    "dice": Average("Dice", "BMDice", lambda tp, fp, fn, tn: (2 * tp, 2 * tp + fp + fn)),
    "sensitivity": Average("sensitivity", "BMSens", lambda tp, fp, fn, tn: (tp, tp + fn)),
    "specificity": Average("specificity", "BMSpec", lambda tp, fp, fn, tn: (tn, tn + fp)),
}
OF_SEGMENTATIONS = ("iou", "dice", "sensitivity", "specificity")
OF_CLASSIFICATIONS = ("accuracy", "balanced_accuracy", "f1", "sensitivity", "specificity")


@dataclass(frozen=True, slots=True)
class Way:
    """How counts are averaged.

    Args:
        pooled: Add the counts of all clients before averaging over classes; else average every client, then clients.
        background: In a segmentation, count the voxels without any label as a class.
    """

    pooled: bool = False
    background: bool = False

    @property
    def title(self) -> str:
        """Name in tables.

        >>> [way.title for way in WAYS]
        ['per client', 'per client + bg', 'pooled', 'pooled + bg']
        """
        return ("pooled" if self.pooled else "per client") + " + bg" * self.background


WAYS = (Way(), Way(background=True), Way(pooled=True), Way(True, True))


def of_classes(pairs: Iterable[tuple[int, int]]) -> Counts:
    """Return the counts of every class that occurs, by its index, from the predicted and true class of every case."""
    cells = Counter(pairs)
    predicted, true = (Counter[int]() for _ in range(2))
    for (said, is_), n in cells.items():
        predicted[said] += n
        true[is_] += n
    total = cells.total()

    def count(k: int) -> Count:
        hit, said, is_ = cells[k, k], predicted[k], true[k]
        return hit, said - hit, is_ - hit, total - said - is_ + hit

    return {str(k): count(k) for k in sorted({*predicted, *true})}


def of_cases(scores: Scores) -> Counts:
    """Return the summed counts of cases; empty if a case has no counts, as in records of 0.1.0."""
    pairs = [(s.predicted, s.true) for s in scores.values() if s.predicted is not None and s.true is not None]
    if pairs:
        return of_classes(pairs)
    return total(s.counts for s in scores.values()) if all(s.counts for s in scores.values()) else {}


def total(tables: Iterable[Counts]) -> Counts:
    """Add counts class by class. All cases of a table without a class are true negatives of it.

    >>> total([{"0": (3, 0, 0, 0)}, {"0": (0, 0, 1, 1), "1": (1, 1, 0, 0)}])
    {'0': (3, 0, 1, 1), '1': (1, 1, 0, 3)}
    """
    known = [table for table in tables if table]
    names = dict.fromkeys(name for table in known for name in table)
    sums: dict[str, Count] = dict.fromkeys(names, (0, 0, 0, 0))
    for table in known:
        absent = (0, 0, 0, sum(next(iter(table.values()))))
        for name, (a, b, c, d) in sums.items():
            tp, fp, fn, tn = table.get(name, absent)
            sums[name] = (a + tp, b + fp, c + fn, d + tn)
    return sums


def averaged(clients: Iterable[Counts], measure: str, way: Way = Way()) -> float:
    """Return a measure averaged over classes and clients; NaN if no client has a value.

    Args:
        clients: Counts of every client.
        measure: A key of ``AVERAGES``.
        way: Per client or pooled, with or without background.
    """
    tables = [{k: v for k, v in table.items() if way.background or k != BACKGROUND} for table in clients]
    tables = [dict(total(tables))] if way.pooled else tables
    known = [x for table in tables if not math.isnan(x := average(table, measure))]
    return fmean(known) if known else math.nan


def average(counts: Counts, measure: str) -> float:
    """Return a measure of one client: the mean over its classes, or the accuracy over all cases; NaN if undefined.

    >>> average({"a": (3, 1, 0, 4), "b": (2, 0, 2, 4)}, "iou")
    0.625
    """
    occur = [count for count in counts.values() if any(count[:3])]
    ratios = [AVERAGES[measure].ratio(*count) for count in occur]
    if measure == "accuracy":
        whole = ratios[0][1] if ratios else 0
        apart = all(sum(tp + at[k] for tp, *at in occur) == whole for k in (0, 1))  # every voxel has one class
        return sum(hits for hits, _ in ratios) / whole if whole and apart else math.nan
    known = [part / whole for part, whole in ratios if whole]
    return fmean(known) if known else math.nan
