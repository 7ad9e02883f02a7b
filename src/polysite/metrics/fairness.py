"""Fairness between hospitals: how much their mean scores differ, with equal weight for every hospital.

Jain's index, (Σx)² / (n Σx²), is 1 if all scores are equal and 1/n if all but one are zero (Jain, Chiu and Hawe 1984, A
quantitative measure of fairness and discrimination for resource allocation in shared computer systems).

>>> f = fairness({"a": 0.9, "b": 0.6, "c": 0.9})
>>> f.worst, f.best, round(f.mean, 3), round(f.spread, 3), round(f.std, 3), round(f.jain, 3)
(('b', 0.6), ('a', 0.9), 0.8, 0.3, 0.173, 0.97)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from polysite.errors import DataError


@dataclass(frozen=True)
class Fairness:
    """Summary of the mean scores of sites."""

    worst: tuple[str, float]
    best: tuple[str, float]
    mean: float
    spread: float  # largest − smallest
    std: float  # of a sample (n − 1): the sites stand for those that may join; 0 for one site
    jain: float  # of scores that are not negative; 1 if all are 0


def fairness(means: Mapping[str, float], better: int = 1) -> Fairness:
    """Summarise the mean scores of sites.

    Args:
        means: Mean score of every site.
        better: 1 if larger scores are better, −1 if smaller ones are. Of equal scores, the first site counts.
    """
    for site, value in means.items():
        if not math.isfinite(value):
            raise DataError(f"{site} has the mean score {value}; leave a site without a score out")
    if not means:
        raise DataError("no site has a mean score; fairness needs at least one")
    values = list(means.values())
    squares = math.fsum(v * v for v in values)
    return Fairness(
        worst=min(means.items(), key=lambda item: better * item[1]),
        best=max(means.items(), key=lambda item: better * item[1]),
        mean=fmean(values),
        spread=max(values) - min(values),
        std=stdev(values) if len(values) > 1 else 0.0,
        jain=math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0,
    )
