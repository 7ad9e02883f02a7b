"""What the scores of a tournament show: paired differences to one model for all, and which of them are beyond chance.

A strategy looks better than the reference if p <= 0.05 in the signed-rank test over all cases and its mean gain is
positive in every inner fold. That test treats the models of a fold as given, but their difference partly comes from the
luck of training, which all cases of the fold share. So the simplest strategy (one model with less weight for a
hospital, a model per group of hospitals, own models, training alone, a model per cluster of patients) of those that
look better and are not shown to be worse than the best is trained again, and so is the reference, with another seed. A
strategy is shown to be worse than the best if the mean m of their differences over n inner folds has

    m > 1.96 sqrt(s^2 + 2 LUCK^2 / n),    s its standard error over cases

The second term is the luck of both trainings in every fold; they have the first phase in common. Without it, two
trainings of the same models with other random patches would often be told apart: where the clusters of patients are
groups of hospitals, both strategies train the same models. The chosen strategy is said to be better only if its gain,
the mean over both seeds, has

    p <= RATE, times the number of strategies, and
    is positive in every inner fold.

p is the larger of two: that of the signed-rank test, and that of the mean gain with luck counted in. The luck of a gain
shows in the difference d_f of the gains of both seeds in fold f of n: with one seed in one fold it has the variance

    l^2 = (2 PRIOR WHOLE^2 + sum_f d_f^2 / 2) / (PRIOR + n)

so the mean gain has the variance s^2 + l^2 / (2 n), with s its standard error over cases, and is compared with
Student's t. The degrees of freedom, one less than the number of cases for s and PRIOR + n for l, are those of Welch and
Satterthwaite. WHOLE is larger than LUCK, because a first phase with another seed ends in another model.

Since the first training decides only together with the second one, choosing by it does not raise the rate of false
claims. ``bench/advise.py null`` measures how often equal hospitals are said to differ. Hospitals that should use
something else than this strategy are found in ``exceptions.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean

from polysite.advice.contenders import Contender
from polysite.advice.tournament import Key, Played, grouped
from polysite.metrics import shrinkage
from polysite.metrics.statistics import interval, signed_rank

LEVEL = 0.05  # p of a strategy that looks better
RATE = 0.05  # of wrong claims: for strategies for all, and again for exceptions of single hospitals
HOPE = 0.8  # probability of a gain at a hospital, after the first inner fold, for which a strategy goes on
LUCK, WHOLE = 0.007, 0.02  # standard deviation of the mean score of an inner fold: over last phases, over trainings
PRIOR = 2.0  # folds that the expected luck is worth beside the observed one
WITHIN = 3.92  # standard errors between the ends of a 95 % interval

Pair = tuple[Played, Played]  # a strategy, and the one that it is compared with


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

    contender: Contender
    gain: Gain
    p: float  # that it is better by chance; adjusted for the number of strategies if it was trained twice
    folds: tuple[float, ...]  # mean gain of every inner fold
    sites: Mapping[str, Gain]
    twice: bool = False  # whether it and the reference were trained with two seeds

    @property
    def looks_better(self) -> bool:
        """Whether it is worth a second training, or has passed it."""
        return self.p <= LEVEL and min(self.folds) > 0

    @property
    def better(self) -> bool:
        """Whether it was shown to be better than the reference."""
        return self.twice and self.looks_better and self.p <= RATE


def mean_of(one: Played, two: Played) -> Played:
    """Return the first with the mean of the scores of both for every case."""
    return replace(one, scores={key: (score + two.scores[key]) / 2 for key, score in one.scores.items()})


def compare(played: Iterable[Played], reference: Played) -> list[Comparison]:
    """Return every strategy against the reference, each trained once, the largest mean gain first."""
    found = []
    for one in played:
        gains = differences(one, reference)
        p = signed_rank(list(gains.values()), "greater")
        found.append(Comparison(one.contender, gain_of(gains), p, by_fold(gains, reference.folds), by_site(gains)))
    return sorted(found, key=lambda c: -c.gain.mean)


def hopeful(one: Played, reference: Played) -> bool:
    """Return whether a strategy goes on after some inner folds: it may still be better for all, or for a hospital."""
    gains = differences(one, reference)
    if sum(gains.values()) > 0:
        return True
    return any(gain.positive >= HOPE for gain in shrunken(gains, 1).sites.values())


def candidate(compared: Sequence[Comparison], played: Mapping[str, Played]) -> Comparison | None:
    """Return the simplest strategy of those that look better and are not shown to be worse than the best; of equally
    simple ones, that with the largest gain. None if no strategy looks better.

    Args:
        compared: The strategies against the reference, the largest mean gain first.
        played: Scores of all strategies, by name.
    """
    better = [c for c in compared if c.looks_better]
    level = [c for c in better if not leads(played[better[0].contender.name], played[c.contender.name])]
    return min(level, key=lambda c: c.contender.rank, default=None)


def leads(one: Played, other: Played) -> bool:
    """Return whether a strategy is shown to be better than another, both trained once: beyond the chance of the cases
    and the luck of the trainings."""
    lead, folds = gain_of(differences(one, other)), len(set(one.folds.values()))
    return lead.mean > WITHIN / 2 * sqrt(_error(lead) ** 2 + 2 * LUCK**2 / folds)


def confirmed(one: Pair, two: Pair, strategies: int) -> Comparison:
    """Compare a strategy with the reference after a second training of both.

    Args:
        one: Strategy and reference, trained with one seed.
        two: The same, trained with another seed.
        strategies: Number of strategies that this one was chosen from.
    """
    mine, reference = mean_of(one[0], two[0]), mean_of(one[1], two[1])
    gains, folds = differences(mine, reference), reference.folds
    first, second = (by_fold(differences(*pair), folds) for pair in (one, two))
    p = min(1.0, strategies * chance(gains, [a - b for a, b in zip(first, second, strict=True)]))
    return Comparison(mine.contender, gain_of(gains), p, by_fold(gains, folds), by_site(gains), twice=True)


def differences(one: Played, other: Played) -> dict[Key, float]:
    """Return the score of every case in one minus that in the other."""
    return {key: score - other.scores[key] for key, score in one.scores.items() if key in other.scores}


def gain_of(differences: Mapping[Key, float]) -> Gain:
    """Return the mean of paired differences with its bootstrap interval; cases are resampled inside hospitals."""
    sites = grouped(differences)
    values = [value for here in sites.values() for value in here]
    low, high = interval(values, [site for site, here in sites.items() for _ in here])
    return Gain(fmean(values), low, high, len(values))


def chance(gains: Mapping[Key, float], apart: Sequence[float]) -> float:
    """Return the p-value that a mean gain over two seeds is due to chance: to the cases, or to the luck of trainings.

    Args:
        gains: Gain of every case, the mean over both seeds.
        apart: Difference between the mean gains of both seeds, in every inner fold.
    """
    gain = gain_of(gains)
    p = by_luck(gain.mean, _error(gain) ** 2, gain.cases, apart, 2 * WHOLE**2)
    return max(signed_rank(list(gains.values()), "greater"), p)


def by_luck(gain: float, cases: float, count: int, apart: Sequence[float], usual: float) -> float:
    """Return the p-value of a mean gain over two seeds by Student's t, with the degrees of freedom of Welch.

    Args:
        gain: The mean gain.
        cases: Its variance over cases.
        count: Number of cases.
        apart: Difference between the mean gains of both seeds, in every inner fold.
        usual: Expected variance of the gain over trainings, in one inner fold.
    """
    from scipy.stats import t

    folds = len(apart)
    luck = (PRIOR * usual + sum(d * d / 2 for d in apart)) / (PRIOR + folds) / (2 * folds)
    freedom = (cases + luck) ** 2 / (cases**2 / max(count - 1, 1) + luck**2 / (PRIOR + folds))
    return float(t.sf(gain / sqrt(cases + luck), freedom))


def _error(gain: Gain) -> float:
    """Return the standard error of a mean gain over cases."""
    return (gain.high - gain.low) / WITHIN


def shrunken(differences: Mapping[Key, float], folds: int) -> shrinkage.Gains:
    """Return the posterior of the mean gain of every hospital, with the luck of trainings in some inner folds."""
    return shrinkage.shrink(grouped(differences), shrinkage.Prior(training=LUCK / folds**0.5))


def by_site(differences: Mapping[Key, float]) -> dict[str, Gain]:
    """Return the mean gain of every hospital."""
    return {site: gain_of(at(site, differences)) for site in sorted({site for site, _ in differences})}


def at(site: str, differences: Mapping[Key, float]) -> dict[Key, float]:
    """Return what is of one hospital."""
    return {key: value for key, value in differences.items() if key[0] == site}


def by_fold(differences: Mapping[Key, float], folds: Mapping[Key, int]) -> tuple[float, ...]:
    """Return the mean gain of every inner fold."""
    found: dict[int, list[float]] = {}
    for key, value in differences.items():
        found.setdefault(folds[key], []).append(value)
    return tuple(fmean(found[k]) for k in sorted(found))
