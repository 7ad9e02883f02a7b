"""How well two masks agree, voxel by voxel.

Empty masks follow one stated policy. Dice and IoU: both empty is a perfect answer (1), exactly one empty is a complete
miss (0). Sensitivity without a voxel to find and specificity without a voxel to leave alone are undefined: NaN, to be
left out of means. IoU is TP / (TP + FP + FN); the denominator 2TP + FP + FN that can be found in print is Dice's.

>>> import numpy as np
>>> dice(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool))
0.6666666666666666
>>> dice(np.zeros(4, bool), np.zeros(4, bool)), dice(np.zeros(4, bool), np.ones(4, bool))
(1.0, 0.0)
>>> overlap(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool))
Overlap(tp=1, fp=1, fn=0, tn=2)
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polysite.errors import DataError

BLOCK = 1 << 17  # bytes that are counted three times before they leave the cache


@dataclass(frozen=True)
class Overlap:
    """Voxels that are rightly and wrongly in (tp, fp), wrongly and rightly out (fn, tn)."""

    tp: int
    fp: int
    fn: int
    tn: int

    @property
    def dice(self) -> float:
        total = 2 * self.tp + self.fp + self.fn
        return 2 * self.tp / total if total else 1.0

    @property
    def iou(self) -> float:
        union = self.tp + self.fp + self.fn
        return self.tp / union if union else 1.0

    @property
    def sensitivity(self) -> float:
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else math.nan

    @property
    def specificity(self) -> float:
        return self.tn / (self.tn + self.fp) if self.tn + self.fp else math.nan


def overlap(predicted: Any, truth: Any) -> Overlap:
    """Of two boolean arrays or tensors, on whichever device."""
    if predicted.shape != truth.shape:
        raise DataError(
            f"the prediction has shape {tuple(predicted.shape)}, the truth {tuple(truth.shape)}; bring both to one grid"
        )
    if str(predicted.device) == str(truth.device) == "cpu":
        both, said, true = _count(np.asarray(predicted, bool), np.asarray(truth, bool))
    else:  # all three are under way before the first is waited for
        both, said, true = map(int, [(predicted & truth).sum(), predicted.sum(), truth.sum()])
    return Overlap(both, said - both, true - both, math.prod(truth.shape) - said - true + both)


def dice(predicted: Any, truth: Any) -> float:
    """Dice coefficient of two boolean arrays or tensors: 2 |A and B| / (|A| + |B|)."""
    return overlap(predicted, truth).dice


def _count(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> tuple[int, int, int]:
    """Voxels in both, in the first and in the second: every byte is fetched from memory once."""
    if predicted.flags.f_contiguous and truth.flags.f_contiguous:  # as nibabel reads them: turned round, not copied
        predicted, truth = predicted.T, truth.T
    a, b = predicted.reshape(-1), truth.reshape(-1)
    buffer = np.empty(min(BLOCK, a.size), bool)
    both = said = true = 0
    for start in range(0, a.size, BLOCK):
        x, y = a[start : start + BLOCK], b[start : start + BLOCK]
        both += int(np.count_nonzero(np.logical_and(x, y, out=buffer[: x.size])))
        said += int(np.count_nonzero(x))
        true += int(np.count_nonzero(y))
    return both, said, true
