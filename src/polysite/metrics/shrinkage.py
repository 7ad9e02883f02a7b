"""How sure a gain of a hospital is: paired gains per case, shrunk towards those of all hospitals and towards none.

A gain is the score of a case with one model minus its score with a reference model; neither was trained on the case.

    y_ki ~ N(mu_k + e, r_k sigma^2)  gain of case i of hospital k
    mu_k ~ N(m, tau^2)               true mean gain of hospital k
    e ~ N(0, p.training^2)           luck of this training, the same for all hospitals; none by default
    m ~ N(0, p.mean^2),   tau ~ half-Cauchy(p.spread),   sigma^2 ~ p.noise^2 / chi^2_1     p the prior

The posterior of mu_k is integrated over m in closed form and over tau and sigma on a grid. No value is plugged in for
tau, because it is poorly known from 3 to 23 hospitals: its posterior keeps both "all gain alike" and "each differs".
m, tau and mu_k shrink towards no gain; the priors have the weight of about one hospital and one case.

Outliers: the mean of a hospital is the plain mean of its cases, because a rare failure of a model must count in full.
Its variance is not that of all hospitals together: one failure elsewhere would hide a steady gain here, and a hospital
with failures would look as sure as the others. r_k is the relative variance of the hospital, moderated with as many
degrees of freedom of the common variance s^2 as ``MODERATE`` says, with s^2 the fixed point of

    r_k = (MODERATE + d_k s_k^2 / s^2) / (MODERATE + d_k)
    s^2 = (p.noise^2 + sum_k d_k s_k^2 / r_k) / (1 + sum_k d_k)

where s_k^2 is the variance of the d_k + 1 gains of hospital k (compare Smyth 2004, Linear models and empirical Bayes
methods for assessing differential expression in microarray experiments).

The cases stand for further patients of the same hospitals and the same models. Whether the method would gain again if
it were trained with another seed is a further question: no number of cases of one training answers it. ``p.training``,
the standard deviation of a method's mean score over seeds times sqrt(2), makes the posterior one of the method. With
equal 24^3 phantoms and short trainings it is about 0.01 Dice (``bench/structures.py equal``: four trainings in groups
without meaning gain -0.012 to +0.010, two of them with p < 0.01 over cases), so that paired tests of cases alone call
differences significant that another seed reverses.

>>> found = shrink({"a": [0.10, 0.12, 0.11, 0.09], "b": [0.01, -0.02, 0.02, 0.00], "c": []})
>>> {site: (round(gain.mean, 3), round(gain.positive, 2)) for site, gain in found.sites.items()}
{'a': (0.089, 1.0), 'b': (0.012, 0.7), 'c': (0.032, 0.74)}
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polysite.errors import ConfigError
from polysite.metrics.statistics import finite

MODERATE = 8.0  # degrees of freedom of the common variance in that of a hospital
TAUS, SIGMAS = 96, 48  # nodes of the grid
NEGLIGIBLE = 1e-9  # nodes with a smaller share of the largest weight are left out

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prior:
    """What is assumed about gains before any are seen, in units of the score. The defaults are for Dice and accuracy.

    Args:
        mean: Standard deviation of the mean gain over hospitals, around 0; more than 0.
        spread: Median of the standard deviation of the true gains between hospitals; more than 0.
        noise: Typical standard deviation of the gains of cases, with the weight of one case; more than 0.
        training: Standard deviation of the gain over trainings with other seeds, common to all hospitals; at least 0.
            0 is for a question about these models, more for one about the method.
    """

    mean: float = 0.05
    spread: float = 0.02
    noise: float = 0.1
    training: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean", "spread", "noise"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value}: a prior is positive and finite")
        if not 0 <= self.training < math.inf:
            raise ConfigError(f"training = {self.training}: it must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Tally:
    """Gains of the cases of a hospital, summed: all that a hospital has to reveal."""

    cases: int
    total: float
    squares: float

    @classmethod
    def of(cls, gains: ArrayLike) -> Self:
        """Sum up the gains of the cases of a hospital."""
        values = finite(gains, "gains")
        return cls(values.size, float(values.sum()), float((values**2).sum()))

    @property
    def mean(self) -> float:
        """Mean gain; 0 without cases."""
        return self.total / self.cases if self.cases else 0.0

    @property
    def deviation(self) -> float:
        """Sum of the squared deviations from the mean."""
        return max(0.0, self.squares - self.total * self.mean)


@dataclass(frozen=True, slots=True)
class Gain:
    """Posterior of a true mean gain."""

    mean: float
    sd: float
    positive: float  # probability that the true mean gain is positive
    cases: int


@dataclass(frozen=True, slots=True)
class Gains:
    """Posterior of the gains of all hospitals."""

    sites: Mapping[str, Gain]
    overall: Gain  # of m, the mean over hospitals such as these
    spread: float  # posterior mean of tau
    noise: float  # posterior mean of sigma


def shrink(gains: Mapping[str, ArrayLike], prior: Prior = Prior()) -> Gains:
    """Return the posterior of the true mean gain of every hospital.

    Args:
        gains: Paired gains of the cases of every hospital. A hospital without cases gets what the others predict for
            it.
        prior: What is assumed before any gain is seen.
    """
    return posterior({site: Tally.of(values) for site, values in gains.items()}, prior)


def posterior(tallies: Mapping[str, Tally], prior: Prior = Prior()) -> Gains:
    """Return the posterior of the true mean gain of every hospital, from the sums of its gains.

    Args:
        tallies: Summed gains of every hospital.
        prior: What is assumed before any gain is seen.
    """
    ratio, noise = relative_noise(tallies.values(), prior)
    heard = [tally for tally in tallies.values() if tally.cases]
    y = np.array([tally.mean for tally in heard])
    share = np.array([r / t.cases for r, t in zip(ratio, tallies.values(), strict=True) if t.cases])
    freedom = 1.0 + sum(tally.cases - 1 for tally in heard)
    tau, sigma, weight, centre, width = _grid(y, share, prior, noise, freedom)
    # centre and width are those of m + e; the share luck of it is expected to be e, with the variance rest
    luck = prior.training**2 / (prior.training**2 + prior.mean**2)
    rest = luck * prior.mean**2
    sites, columns = {}, iter(zip(y, share, strict=True))
    for site, tally in tallies.items():
        if tally.cases:
            mean, own = next(columns)
            error = own * sigma**2
            pull = error / (error + tau**2)  # towards m
            middle = (1 - pull) * mean + (pull - luck) * centre
            sites[site] = _mixture(weight, middle, pull * tau**2 + (pull - luck) ** 2 * width + rest, tally.cases)
        else:
            sites[site] = _mixture(weight, (1 - luck) * centre, tau**2 + (1 - luck) ** 2 * width + rest, 0)
    every = sum(tally.cases for tally in heard)
    overall = _mixture(weight, (1 - luck) * centre, (1 - luck) ** 2 * width + rest, every)
    return Gains(sites, overall, float(weight @ tau), float(weight @ sigma))


def relative_noise(tallies: Iterable[Tally], prior: Prior = Prior()) -> tuple[Array, float]:
    """Return r_k of every hospital and s, as the module's docstring defines them.

    Args:
        tallies: Summed gains of every hospital.
        prior: Its noise counts as one degree of freedom.
    """
    known = list(tallies)
    free = np.array([max(0, tally.cases - 1) for tally in known], np.float64)
    within = np.array([tally.deviation for tally in known], np.float64)
    ratio = np.ones(len(known))
    for _ in range(200):
        square = (prior.noise**2 + (within / ratio).sum()) / (1.0 + free.sum())
        before, ratio = ratio, (MODERATE + within / square) / (MODERATE + free)
        if np.allclose(before, ratio, rtol=1e-10, atol=0):
            break
    return ratio, math.sqrt((prior.noise**2 + (within / ratio).sum()) / (1.0 + free.sum()))


def _grid(
    y: Array, share: Array, prior: Prior, noise: float, freedom: float
) -> tuple[Array, Array, Array, Array, Array]:
    """Return tau and sigma of the nodes, their posterior weights, and mean and variance of m + e at each.

    ``y`` has the mean gain of every hospital with cases, ``share`` its variance in units of sigma^2. The nodes of tau
    are quantiles of its prior; those of log(sigma / noise) cover its posterior given the spread within hospitals, which
    has ``freedom`` degrees of freedom.
    """
    taus = prior.spread * np.tan(np.pi / 2 * (np.arange(TAUS) + 0.5) / TAUS)
    away = np.linspace(-3.5, 7.0, SIGMAS) / math.sqrt(freedom)
    tau, log_sigma = (axis.reshape(-1) for axis in np.meshgrid(taus, away, indexing="ij"))
    sigma = noise * np.exp(log_sigma)
    variance = np.outer(sigma**2, share) + tau[:, None] ** 2
    precision = 1 / (prior.mean**2 + prior.training**2) + (1 / variance).sum(1)
    centre = (y / variance).sum(1) / precision
    height = -freedom * (log_sigma + 0.5 * np.exp(-2 * log_sigma))
    height -= 0.5 * (np.log(variance).sum(1) + np.log(precision) + (y**2 / variance).sum(1) - precision * centre**2)
    weight = np.exp(height - height.max())
    kept = weight > NEGLIGIBLE
    return tau[kept], sigma[kept], weight[kept] / weight[kept].sum(), centre[kept], 1 / precision[kept]


def _mixture(weight: Array, means: Array, variances: Array, cases: int) -> Gain:
    """Return mean, standard deviation and probability above 0 of a mixture of normal distributions."""
    mean = float(weight @ means)
    sd = math.sqrt(float(weight @ (variances + (means - mean) ** 2)))
    tails = np.array([math.erfc(-z) for z in means / np.sqrt(2 * variances)])
    return Gain(mean, sd, float(0.5 * weight @ tails), cases)
