"""Overlap of two masks: Dice, IoU, sensitivity and specificity.

Dice and IoU are 1 if both masks are empty and 0 if exactly one is. Sensitivity without a positive voxel and specificity
without a negative voxel are undefined: NaN, to be left out of means. IoU is TP / (TP + FP + FN); the denominator
2TP + FP + FN that can be found in print is that of Dice.

>>> import numpy as np
>>> found = overlap(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool))
>>> found, found.dice
(Overlap(tp=1, fp=1, fn=0, tn=2), 0.6666666666666666)
>>> overlap(np.zeros(4, bool), np.zeros(4, bool)).dice, overlap(np.zeros(4, bool), np.ones(4, bool)).dice
(1.0, 0.0)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polysite.errors import DataError
from polysite.site import Count

BACKGROUND = "background"  # in counts: the voxels without any label


@dataclass(frozen=True)
class Overlap:
    """Numbers of true and false positive, false and true negative voxels."""

    tp: int
    fp: int
    fn: int
    tn: int

    @property
    def count(self) -> Count:
        """True positives, false positives, false negatives and true negatives."""
        return self.tp, self.fp, self.fn, self.tn

    @property
    def dice(self) -> float:
        """Dice coefficient: 2TP / (2TP + FP + FN)."""
        total = 2 * self.tp + self.fp + self.fn
        return 2 * self.tp / total if total else 1.0

    @property
    def iou(self) -> float:
        """Intersection over union: TP / (TP + FP + FN)."""
        union = self.tp + self.fp + self.fn
        return self.tp / union if union else 1.0

    @property
    def sensitivity(self) -> float:
        """TP / (TP + FN)."""
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else math.nan

    @property
    def specificity(self) -> float:
        """TN / (TN + FP)."""
        return self.tn / (self.tn + self.fp) if self.tn + self.fp else math.nan


def overlap(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> Overlap:
    """Count the overlap of two boolean arrays."""
    if predicted.shape != truth.shape:
        raise DataError(
            f"the prediction has shape {tuple(predicted.shape)}, the truth {tuple(truth.shape)}; bring both to one grid"
        )
    both, positive, true = (int(np.count_nonzero(mask)) for mask in (predicted & truth, predicted, truth))
    return counted(both, positive, true, truth.size)


def counted(both: int, positive: int, true: int, voxels: int) -> Overlap:
    """Return the overlap of masks with this many voxels in both, in the prediction, in the truth and in all."""
    return Overlap(both, positive - both, true - both, voxels - positive - true + both)
