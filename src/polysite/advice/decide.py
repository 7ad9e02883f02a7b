"""What the scores of a tournament show: paired differences to one model for all, and which of them are beyond chance.

A strategy is said to be better than the reference only if

    p <= 0.05, after Holm over the strategies, and
    its mean gain is positive in every inner fold.

p is the larger of two: that of the signed-rank test over all cases, and that of the mean gain with the luck of a
training counted in. The first treats the two models of a fold as given, but their difference partly comes from luck,
which all cases of the fold share: two trainings that differ by chance alone differ by about ``LUCK`` in their mean
score. The mean gain over n folds, whose models are trained apart, has the variance s^2 + LUCK^2 / n, with s its
standard error over cases, and is taken as normal. ``bench/advise.py null`` measures how often equal hospitals are said
to differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from polysite.advice.tournament import Key, Played
from polysite.metrics import shrinkage
from polysite.metrics.statistics import holm, interval, signed_rank

LEVEL = 0.05
LUCK = 0.01  # standard deviation of the difference of two trainings, in units of the score (bench/README.md)
WITHIN = 3.92  # standard errors between the ends of a 95 % interval


@dataclass(frozen=True)
class Gain:
    """A mean difference with its 95 % interval."""

    mean: float
    low: float
    high: float
    cases: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


@dataclass(frozen=True)
class Comparison:
    """A strategy against the reference, over the same cases."""

    name: str
    gain: Gain
    p: float  # that it is better by chance, adjusted by Holm
    folds: tuple[float, ...]  # mean gain of every inner fold
    sites: Mapping[str, Gain]

    @property
    def better(self) -> bool:
        """Whether it was shown to be better than the reference."""
        return self.p <= LEVEL and min(self.folds) > 0


def compare(played: Mapping[str, Played], reference: str) -> list[Comparison]:
    """Return every strategy against the reference, the largest mean gain first."""
    names = [name for name in played if name != reference]
    gains = {name: differences(played[name], played[reference]) for name in names}
    folds = played[reference].folds
    p = holm(np.array([chance(d, len({*folds.values()})) for d in gains.values()]))
    found = [
        Comparison(
            name,
            gain_of(gains[name]),
            float(p[k]),
            _by_fold(gains[name], folds),
            _by_site(gains[name]),
        )
        for k, name in enumerate(names)
    ]
    return sorted(found, key=lambda c: -c.gain.mean)


def differences(one: Played, other: Played) -> dict[Key, float]:
    """Return the score of every case in one minus that in the other."""
    return {key: score - other.scores[key] for key, score in one.scores.items() if key in other.scores}


def gain_of(differences: Mapping[Key, float]) -> Gain:
    """Return the mean of paired differences with its bootstrap interval; cases are resampled inside hospitals."""
    values = list(differences.values())
    low, high = interval(values, [site for site, _ in differences])
    return Gain(sum(values) / len(values), low, high, len(values))


def chance(differences: Mapping[Key, float], folds: int) -> float:
    """Return the p-value that a mean gain is due to chance: to the cases, or to the luck of trainings in some folds."""
    gain = gain_of(differences)
    error = ((gain.high - gain.low) / WITHIN) ** 2 + LUCK**2 / folds
    return max(signed_rank(list(differences.values()), "greater"), NormalDist(0, error**0.5).cdf(-gain.mean))


def shrunken(differences: Mapping[Key, float], folds: int) -> shrinkage.Gains:
    """Return the posterior of the mean gain of every hospital, with the luck of trainings in some inner folds."""
    gains: dict[str, list[float]] = {}
    for (site, _), gain in differences.items():
        gains.setdefault(site, []).append(gain)
    return shrinkage.shrink(gains, shrinkage.Prior(training=LUCK / folds**0.5))


def winner(compared: Sequence[Comparison], reference: str) -> str:
    """Return the strategy with the largest gain of those that were shown to be better; else the reference."""
    return next((c.name for c in compared if c.better), reference)


def _by_site(differences: Mapping[Key, float]) -> dict[str, Gain]:
    sites = sorted({site for site, _ in differences})
    return {s: gain_of({k: v for k, v in differences.items() if k[0] == s}) for s in sites}


def _by_fold(differences: Mapping[Key, float], folds: Mapping[Key, int]) -> tuple[float, ...]:
    found: dict[int, list[float]] = {}
    for key, value in differences.items():
        found.setdefault(folds[key], []).append(value)
    return tuple(sum(found[k]) / len(found[k]) for k in sorted(found))
