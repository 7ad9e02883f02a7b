"""Measures of classification over many cases, from the predicted and the true class of every case.

Means over classes weigh every class equally. A class that is never true and never predicted is left out. Recall needs
the class to occur in the ground truth; specificity needs a case of another class. Without cases or classes, the result
is NaN.

>>> predicted, true = [0, 1, 1, 1], [0, 0, 1, 1]
>>> confusion(predicted, true, 3).tolist()
[[1, 1, 0], [0, 2, 0], [0, 0, 0]]
>>> accuracy(predicted, true), balanced_accuracy(predicted, true, 3), specificity(predicted, true, 3)
(0.75, 0.75, 0.75)
>>> round(f1(predicted, true, 3), 4)
0.7333
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polysite.errors import DataError


def accuracy(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Return the share of cases with the right class."""
    _paired(predicted, true)
    return float(np.mean(np.equal(predicted, true))) if len(true) else math.nan


def balanced_accuracy(predicted: Sequence[int], true: Sequence[int], classes: int) -> float:
    """Return the mean recall over the classes that occur in the ground truth."""
    table = confusion(predicted, true, classes)
    return _mean(table.diagonal(), table.sum(1))


def f1(predicted: Sequence[int], true: Sequence[int], classes: int) -> float:
    """Return the mean over classes of 2TP / (2TP + FP + FN): 0 for a class that is only predicted or only true."""
    table = confusion(predicted, true, classes)
    return _mean(2 * table.diagonal(), table.sum(0) + table.sum(1))


def specificity(predicted: Sequence[int], true: Sequence[int], classes: int) -> float:
    """Return the mean specificity over classes: the share of other classes' cases that were not predicted as it."""
    table = confusion(predicted, true, classes)
    occurs = table.sum(0) + table.sum(1) > 0
    others = table.sum() - table.sum(1)
    return _mean((others - table.sum(0) + table.diagonal())[occurs], others[occurs])


def confusion(predicted: Sequence[int], true: Sequence[int], classes: int) -> NDArray[np.int64]:
    """Return the number of cases by true class (rows) and predicted class (columns)."""
    _paired(predicted, true)
    a, b = np.asarray(predicted, np.int64), np.asarray(true, np.int64)
    if len(a) and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) >= classes):
        raise DataError(f"a class is not one of 0 to {classes - 1}: {sorted({*a.tolist(), *b.tolist()})} occur")
    return np.bincount(b * classes + a, minlength=classes * classes).reshape(classes, classes)


def _paired(predicted: Sequence[int], true: Sequence[int]) -> None:
    if len(predicted) != len(true):
        raise DataError(f"{len(predicted)} classes were predicted for {len(true)} cases; give one per case")


def _mean(parts: NDArray[np.int64], wholes: NDArray[np.int64]) -> float:
    """Return the mean of parts / wholes over the wholes that are not zero."""
    some = wholes > 0
    return float(np.mean(parts[some] / wholes[some])) if some.any() else math.nan
