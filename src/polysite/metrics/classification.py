"""How well classes were named, over many cases: from the class that was said and the true class of every case.

Means over classes count every class once, however many cases it has. A class that is nobody's (never true, never said)
is no class here and left out; recall needs the class to occur in truth, specificity needs a case of another class. With
no case, or no class left, the answer is NaN.

>>> said, true = [0, 1, 1, 1], [0, 0, 1, 1]
>>> confusion(said, true, 3).tolist()
[[1, 1, 0], [0, 2, 0], [0, 0, 0]]
>>> accuracy(said, true), balanced_accuracy(said, true, 3), specificity(said, true, 3), round(f1(said, true, 3), 4)
(0.75, 0.75, 0.75, 0.7333)
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polysite.errors import DataError


def accuracy(said: Sequence[int], true: Sequence[int]) -> float:
    """The share of cases whose class was named."""
    _paired(said, true)
    return float(np.mean(np.equal(said, true))) if len(true) else math.nan


def balanced_accuracy(said: Sequence[int], true: Sequence[int], classes: int) -> float:
    """The mean, over the classes that occur in truth, of the share of their cases that were named (recall)."""
    table = confusion(said, true, classes)
    return _mean(table.diagonal(), table.sum(1))


def f1(said: Sequence[int], true: Sequence[int], classes: int) -> float:
    """The mean over classes of 2TP / (2TP + FP + FN): 0 for a class that is said but never true, or the reverse."""
    table = confusion(said, true, classes)
    return _mean(2 * table.diagonal(), table.sum(0) + table.sum(1))


def specificity(said: Sequence[int], true: Sequence[int], classes: int) -> float:
    """The mean over classes of the share of all other classes' cases that were not given this class."""
    table = confusion(said, true, classes)
    occurs = table.sum(0) + table.sum(1) > 0
    others = table.sum() - table.sum(1)
    return _mean((others - table.sum(0) + table.diagonal())[occurs], others[occurs])


def confusion(said: Sequence[int], true: Sequence[int], classes: int) -> NDArray[np.int64]:
    """How many cases of every true class (rows) were given every class (columns)."""
    _paired(said, true)
    a, b = np.asarray(said, np.int64), np.asarray(true, np.int64)
    if len(a) and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) >= classes):
        raise DataError(f"a class is not one of 0 to {classes - 1}: {sorted({*a.tolist(), *b.tolist()})} occur")
    return np.bincount(b * classes + a, minlength=classes * classes).reshape(classes, classes)


def _paired(said: Sequence[int], true: Sequence[int]) -> None:
    if len(said) != len(true):
        raise DataError(f"{len(said)} classes were said of {len(true)} cases; give one per case")


def _mean(parts: NDArray[np.int64], wholes: NDArray[np.int64]) -> float:
    """The mean share, over those that have something to share."""
    some = wholes > 0
    return float(np.mean(parts[some] / wholes[some])) if some.any() else math.nan
