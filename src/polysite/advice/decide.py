"""What the scores of a tournament show: paired differences to one model for all, and which of them are beyond chance.

A strategy is said to be better than the reference only if

    p <= 0.05, after Holm over the strategies, and
    its mean gain is positive in every inner fold.

Of several, the simplest one wins (one model with less weight for a hospital, a model per group of hospitals, per
hospital, per cluster of patients) that is not shown to be worse than the best, by the same p.

p is the larger of two: that of the signed-rank test over all cases, and that of the mean gain with the luck of a
training counted in. The first treats the models of a fold as given, but their difference partly comes from luck, which
all cases of the fold share, and an unlucky reference makes every strategy look better. So the reference is trained
twice in every fold, with two seeds. Its score is the mean of both, and their difference shows the luck: with d_f the
difference of the means of fold f of n, the variance of one training is

    l^2 = (PRIOR LUCK^2 + sum_f d_f^2 / 2) / (PRIOR + n)

and the mean gain has the variance s^2 + (1 + 1/2) l^2 / n, with s its standard error over cases. It is compared with
Student's t of PRIOR + n degrees of freedom. ``bench/advise.py null`` measures how often equal hospitals are said to
differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polysite.advice.tournament import Key, Played, grouped
from polysite.metrics import shrinkage
from polysite.metrics.statistics import holm, interval, signed_rank

LEVEL = 0.05
LUCK, PRIOR = 0.007, 2.0  # standard deviation of a training's mean score, and how many folds that is worth
TWO = 2.0  # variance of the difference of two strategies that are trained once each, in that of one training
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


@dataclass(frozen=True)
class Luck:
    """Variance of the mean score of one training, from the differences of two in every inner fold."""

    variance: float
    freedom: float
    folds: int

    @classmethod
    def of(cls, one: Played, two: Played) -> "Luck":
        """Estimate the luck of a training from two that differ by their seeds alone."""
        apart = _by_fold(differences(one, two), one.folds)
        total = PRIOR * LUCK**2 + sum(d * d / 2 for d in apart)
        return cls(total / (PRIOR + len(apart)), PRIOR + len(apart), len(apart))


def mean_of(one: Played, two: Played) -> Played:
    """Return the reference with the mean of two scores for every case."""
    return replace(one, scores={key: (score + two.scores[key]) / 2 for key, score in one.scores.items()})


def compare(played: Mapping[str, Played], reference: str, luck: Luck) -> list[Comparison]:
    """Return every strategy against the reference, the largest mean gain first."""
    names = [name for name in played if name != reference]
    gains = {name: differences(played[name], played[reference]) for name in names}
    folds = played[reference].folds
    p = holm(np.array([chance(d, luck) for d in gains.values()]))
    found = [
        Comparison(
            name,
            gain_of(gains[name]),
            float(p[k]),
            _by_fold(gains[name], folds),
            by_site(gains[name]),
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


def chance(differences: Mapping[Key, float], luck: Luck, trainings: float = 1.5) -> float:
    """Return the p-value that a mean gain is due to chance: to the cases, or to the luck of trainings.

    Args:
        differences: Of the scores of all cases.
        luck: Variance of the mean score of one training.
        trainings: Variance of the difference of two strategies in a fold, in that of one training.
    """
    from scipy.stats import t

    gain = gain_of(differences)
    error = ((gain.high - gain.low) / WITHIN) ** 2 + trainings * luck.variance / luck.folds
    return max(signed_rank(list(differences.values()), "greater"), float(t.sf(gain.mean / error**0.5, luck.freedom)))


def shrunken(differences: Mapping[Key, float], folds: int) -> shrinkage.Gains:
    """Return the posterior of the mean gain of every hospital, with the luck of trainings in some inner folds."""
    return shrinkage.shrink(grouped(differences), shrinkage.Prior(training=LUCK / folds**0.5))


def winner(
    compared: Sequence[Comparison], reference: str, played: Mapping[str, Played], luck: Luck, simple: Sequence[str]
) -> str:
    """Return the simplest strategy of those that were shown to be better and not shown to be worse than the best.

    Args:
        compared: The strategies against the reference, the largest mean gain first.
        reference: Name of the reference, which wins if nothing was shown to be better.
        played: Scores of all strategies.
        luck: Variance of the mean score of a training.
        simple: Names of all strategies, the simplest first.
    """
    better = [c.name for c in compared if c.better]
    if not better:
        return reference
    behind = {name: differences(played[better[0]], played[name]) for name in better[1:]}
    level = [better[0], *(name for name, lead in behind.items() if chance(lead, luck, TWO) > LEVEL)]
    return min(level, key=list(simple).index)


def by_site(differences: Mapping[Key, float]) -> dict[str, Gain]:
    """Return the mean gain of every hospital."""
    sites = sorted({site for site, _ in differences})
    return {s: gain_of({k: v for k, v in differences.items() if k[0] == s}) for s in sites}


def _by_fold(differences: Mapping[Key, float], folds: Mapping[Key, int]) -> tuple[float, ...]:
    found: dict[int, list[float]] = {}
    for key, value in differences.items():
        found.setdefault(folds[key], []).append(value)
    return tuple(sum(found[k]) / len(found[k]) for k in sorted(found))
