"""Membership inference: how well an attacker tells training patients from others by a score of each.

Papers: Yeom et al., Privacy Risk in Machine Learning, CSF 2018 (the loss as a score); Watson et al., On the Importance
of Difficulty Calibration in Membership Inference Attacks, ICLR 2022; Newcombe, Confidence Intervals for an Effect Size
Measure Based on the Mann-Whitney Statistic, part 2, Statistics in Medicine 2006 (method 5)

    loss          s(x) = -L(w; x)
    calibrated    s(x) = L(reference; x) - L(w; x),    the reference: models that have not seen x, or have seen it less
    AUC           probability that a training patient has a higher score than another one, ties as half

Patients of different hospitals are not compared: one may have easier scans than another. The AUC of several hospitals
is the mean over all pairs within hospitals. The interval solves |AUC - a| = 1.96 sqrt(V(a)) for a, with

    V(a) = a (1 - a) (1 + ((m + n) / 2 - 1) ((1 - a) / (2 - a) + a / (1 + a))) / (m n)

and so has a width even where all training patients rank above all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution

Group = tuple[NDArray[np.float64], NDArray[np.float64]]  # scores of training patients and of others, at a hospital


@dataclass(frozen=True)
class Auc:
    """An area under the ROC curve with its 95 % interval."""

    value: float
    low: float
    high: float
    members: int  # training patients
    others: int

    @property
    def succeeds(self) -> bool:
        """Whether the attack is significantly better than guessing."""
        return self.low > 0.5

    @property
    def words(self) -> str:
        """The area and its interval as text."""
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def area(groups: Sequence[Group]) -> Auc:
    """Return the area of the patients of several hospitals, each compared within its hospital.

    >>> area([(np.array([2.0, 3.0]), np.array([1.0, 2.0]))]).value
    0.875
    """
    used = [(m, o) for m, o in groups if len(m) and len(o)]
    if not used:
        raise ValueError("an area needs training patients and others at one hospital at least")
    wins = np.array([_wins(m, o) for m, o in used])
    sizes = np.array([[len(m), len(o)] for m, o in used], np.float64)
    pairs = sizes.prod(1)
    value, shares = float(wins.sum() / pairs.sum()), pairs / pairs.sum()
    low, high = (_limit(value, end, sizes, shares) for end in (0.0, 1.0))
    return Auc(value, low, high, int(sizes[:, 0].sum()), int(sizes[:, 1].sum()))


def _wins(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    difference = members[:, None] - others[None]
    return float((difference > 0).sum() + 0.5 * (difference == 0).sum())


def _limit(value: float, end: float, sizes: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    """Return the solution between the value and an end of the range, by bisection."""
    near, far = value, end
    for _ in range(60):
        middle = (near + far) / 2
        inside = abs(value - middle) <= Z * np.sqrt(_variance(middle, sizes, shares))
        near, far = (middle, far) if inside else (near, middle)
    return near


def _variance(a: float, sizes: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    spread = 1 + (sizes.mean(1) - 1) * ((1 - a) / (2 - a) + a / (1 + a))
    return float((np.square(shares) * a * (1 - a) * spread / sizes.prod(1)).sum())
