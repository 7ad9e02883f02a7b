"""Hospitals that should use another model than the strategy for all: that of another strategy, or one of their own.

For every hospital, the gains of all other strategies and of its own models over the strategy for all are shrunk
(``polysite.metrics.shrinkage``). One is promising if P(gain > 0) >= PROMISING and a second training that repeats the
gains of the first one, with the usual luck (d = 2 LUCK below), would confirm it. Of those that are promising, the
simplest is taken that is not shown to be worse at this hospital than the one with the highest expected gain: the mean m
of their differences over the n cases of the hospital, of standard deviation s, has

    m <= 1.96 sqrt(s^2 / n + 2 LUCK^2 / folds)

For an outlier, for example, training apart, its own model and a cluster of its patients are all but the same. What is
taken is trained a second time with another seed, and so is the strategy for all. It is used at that hospital
only if its gain is positive in both trainings, the signed-rank test over the hospital's cases has p <= LEVEL, and

    p <= RATE / (hospitals * strategies)

p is that of the mean gain g of the n cases of the hospital over both trainings, compared with Student's t:

    t = g / sqrt(s^2 / n + l^2 / (2 folds))

s is the standard deviation of the gains of the cases, each the mean over both trainings, so that the second training
does not make cases count twice. l^2 is the variance of the gain over trainings with other seeds in one inner fold,
which shows in the difference d_kf of both trainings at hospital k in fold f:

    l^2 = (PRIOR L^2 + sum_f d_kf^2 / 2) / (PRIOR + folds)
    L^2 = (PRIOR 2 LUCK^2 + sum_kf d_kf^2 / 2) / (PRIOR + hospitals folds)

The degrees of freedom, of n - 1 for s and PRIOR + folds for l, are those of Welch and Satterthwaite.

The cases are the same in both trainings, so the second one does not make up for having chosen the luckiest of many
comparisons by these cases. Therefore all hospitals times all strategies count, also those that were not trained again.
A claim is made only if one of these comparisons, each fixed in advance, has a p below its share of RATE; choosing by
the first training can only leave claims out. So RATE bounds the probability of any wrong claim (Bonferroni).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance

from polysite.advice import decide
from polysite.advice.contenders import Contender
from polysite.advice.tournament import Key, Played
from polysite.metrics import shrinkage
from polysite.metrics.statistics import signed_rank

PROMISING = 0.97  # probability of a gain, after one training, that is worth a second one
LUCK = 0.014  # standard deviation of a hospital's mean score over trainings of one inner fold


@dataclass(frozen=True)
class Promise:
    """What is expected to serve a hospital best instead of the strategy for all, after one training."""

    contender: Contender  # the strategy or the own model
    expected: shrinkage.Gain
    p: float  # that of two trainings with the gains of the first one and the usual luck

    @property
    def likely(self) -> bool:
        """Whether it is likely to gain, by one training."""
        return self.expected.mean > 0 and self.expected.positive >= PROMISING

    @property
    def promising(self) -> bool:
        """Whether it is worth a second training."""
        return self.likely and self.p <= decide.RATE


@dataclass(frozen=True)
class Confirmation:
    """What a second training shows for a hospital, of what was promising for it."""

    gain: decide.Gain  # over the strategy for all, the mean of both trainings
    p: float  # that it is better by chance, times the number of hospitals and strategies
    steady: bool  # whether it gained in both trainings, and not by few cases alone

    @property
    def better(self) -> bool:
        """Whether the hospital should use it."""
        return self.steady and self.p <= decide.RATE


def promises(others: Iterable[Played], shared: Played, folds: int, comparisons: int) -> dict[str, Promise]:
    """Return what is expected to serve each hospital best, by one training: the simplest of what is promising and not
    shown to be worse than the best; the one with the highest expected gain if nothing is promising.

    Args:
        others: Strategies and own models.
        shared: The strategy for all.
        folds: Number of inner folds.
        comparisons: Number of hospitals times the number of strategies that were compared.
    """
    each = [
        (one.contender, gains := decide.differences(one, shared), decide.shrunken(gains, folds).sites) for one in others
    ]
    found = {}
    for site in sorted({site for _, _, expected in each for site in expected}):
        here = {contender.name: decide.at(site, gains) for contender, gains, expected in each if site in expected}
        made = [
            Promise(contender, expected[site], repeated(list(here[contender.name].values()), folds, comparisons))
            for contender, _, expected in each
            if site in expected
        ]
        made.sort(key=lambda promise: -promise.expected.mean)
        best = here[made[0].contender.name]
        level = [p for p in made if p.promising and not _leads(best, here[p.contender.name], folds)]
        found[site] = min(level, key=lambda promise: promise.contender.rank, default=made[0])
    return found


def _leads(one: Mapping[Key, float], other: Mapping[Key, float], folds: int) -> bool:
    """Return whether the gains of a hospital's cases are shown to be larger than others, each of one training."""
    apart = [gain - other[key] for key, gain in one.items()]
    cases = variance(apart) / len(apart) if len(apart) > 1 else 0.0
    return fmean(apart) > decide.WITHIN / 2 * sqrt(cases + 2 * LUCK**2 / folds)


def repeated(gains: list[float], folds: int, comparisons: int) -> float:
    """Return the p-value that a hospital will have if a second training repeats the gains of its cases.

    Args:
        gains: Gain of every case of the hospital in the first training.
        folds: Number of inner folds.
        comparisons: Number of hospitals times the number of strategies that were compared.
    """
    usual = (2 * LUCK,) * folds
    return min(1.0, comparisons * chance(gains, usual, [usual]))


def confirm(site: str, one: decide.Pair, two: decide.Pair, comparisons: int) -> Confirmation:
    """Return what two trainings show for a hospital.

    Args:
        site: The hospital.
        one: What was promising for it and the strategy for all, trained with one seed.
        two: The same, trained with another seed.
        comparisons: Number of hospitals times the number of strategies that were compared.
    """
    first, second = decide.differences(*one), decide.differences(*two)
    gains = decide.at(site, decide.differences(decide.mean_of(one[0], two[0]), decide.mean_of(one[1], two[1])))
    apart = _apart(first, second, one[1].folds)
    values = list(gains.values())
    p = min(1.0, comparisons * chance(values, apart[site], list(apart.values())))
    both = min(fmean(decide.at(site, each).values()) for each in (first, second))
    return Confirmation(decide.gain_of(gains), p, both > 0 and signed_rank(values, "greater") <= decide.LEVEL)


def chance(gains: list[float], apart: tuple[float, ...], everywhere: list[tuple[float, ...]]) -> float:
    """Return the p-value that the mean gain of a hospital over both trainings is due to chance.

    Args:
        gains: Gain of every case of the hospital, the mean over both trainings.
        apart: Difference between the mean gains of both trainings at the hospital, in every inner fold.
        everywhere: The same at every hospital.
    """
    if len(gains) < 2:
        return 1.0
    every = [d for each in everywhere for d in each]
    usual = (decide.PRIOR * 2 * LUCK**2 + sum(d * d / 2 for d in every)) / (decide.PRIOR + len(every))
    return decide.by_luck(fmean(gains), variance(gains) / len(gains), len(gains), apart, usual)


def _apart(
    one: Mapping[Key, float], two: Mapping[Key, float], folds: Mapping[Key, int]
) -> dict[str, tuple[float, ...]]:
    """Return the difference between the mean gains of two trainings, by hospital, in every inner fold."""
    change = {key: gain - two[key] for key, gain in one.items()}
    return {site: decide.by_fold(decide.at(site, change), folds) for site in sorted({site for site, _ in change})}
