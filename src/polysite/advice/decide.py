"""What the scores of a tournament show: paired differences to one model for all, and which of them are beyond chance.

A strategy is said to be better than the reference only if

    the signed-rank test over all cases has p <= 0.05, after Holm over the strategies,
    the probability of a gain is at least 1 - 0.05 / strategies, with the luck of a training counted in, and
    its mean gain is positive in every inner fold.

The test alone treats the two models of a fold as given. Their difference partly comes from the luck of a training,
which all cases of the fold share: two trainings that differ by chance alone differ by about ``LUCK`` in their mean
score. The mean over n folds, whose models are trained apart, has that luck divided by the root of n
(``polysite.metrics.shrinkage``). ``bench/advise.py null`` measures how often equal hospitals are said to differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polysite.advice.tournament import Key, Played
from polysite.metrics import shrinkage
from polysite.metrics.statistics import holm, interval, signed_rank

LEVEL = 0.05
LUCK = 0.015  # standard deviation of the difference of two trainings, in units of the score; 0.01 to 0.015 measured


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
    p: float  # of the signed-rank test that it is better, adjusted by Holm
    sure: float  # probability of a mean gain over hospitals, with the luck of a training counted in
    among: int  # strategies that were compared
    folds: tuple[float, ...]  # mean gain of every inner fold
    sites: Mapping[str, Gain]

    @property
    def better(self) -> bool:
        """Whether it was shown to be better than the reference."""
        return self.p <= LEVEL and self.sure >= 1 - LEVEL / self.among and min(self.folds) > 0


def compare(played: Mapping[str, Played], reference: str) -> list[Comparison]:
    """Return every strategy against the reference, the largest mean gain first."""
    names = [name for name in played if name != reference]
    gains = {name: differences(played[name], played[reference]) for name in names}
    p = holm(np.array([signed_rank(list(d.values()), "greater") for d in gains.values()]))
    folds = played[reference].folds
    found = [
        Comparison(
            name,
            gain_of(gains[name]),
            float(p[k]),
            shrunken(gains[name], len({*folds.values()})).overall.positive,
            len(names),
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
