"""Distances between hospitals from sums under noise: an assessment under differential privacy.

Every hospital has sent sums over its n patients (``bounds.py``) with noise of deviation t on each number. For two
hospitals i and j, with the mean m of a quantity (scaled to its range), the deviation s over all patients of the
federation, and the mean u of the embeddings (of D numbers), whose total variance is T:

    shift    |m_i - m_j| / s                                         noise adds the error  t sqrt(1/n_i^2 + 1/n_j^2) / s
             under chance and noise, m_i - m_j ~ N(0, s^2 (1/n_i + 1/n_j) + t^2 (1/n_i^2 + 1/n_j^2))
    centre   root of |u_i - u_j|^2 - D t^2 (1/n_i^2 + 1/n_j^2)       what noise adds on average is taken off
             under chance and noise, |u_i - u_j|^2 is at most (A + b) chi^2_1 + b chi^2_(D-1) in distribution,
             A = T (1/n_i + 1/n_j), b = t^2 (1/n_i^2 + 1/n_j^2)

The second bound takes all variance in one direction, which has the heaviest tail beyond 1.6 times the mean (Szekely and
Bakirov, 2003), so the test errs on the safe side. The shift of the means is the part of the Earth Mover's distance that
sums can tell: it is never larger, and equal where one hospital's values are those of the other, moved. As without
noise, shifts of all quantities are combined by Simes, and those of the modality and the label with the largest ones are
averaged. A quantity whose s^2 is below three errors by noise is left out there and named: its s^2 is taken for
three errors. s^2 and T are taken one standard error of their noise too large in tests. Absent values are counted as
none or all within three deviations of the noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erfc
from zlib import crc32

import numpy as np

from polysite.heterogeneity import significance
from polysite.heterogeneity.assessment import Compared, Noise, Quantity, Tested, combined
from polysite.heterogeneity.bounds import CLASS, EMBEDDING, INTENSITY, SQUARE, VOLUME, largest
from polysite.heterogeneity.distances import Values
from polysite.heterogeneity.exchange import Assess
from polysite.payload import Payload, SiteId

SURE = 3.0  # deviations of the noise below which a variance is hidden, or a count of absent values none or all
NODES = 200  # of a quadrature
TINY = 1e-9  # error of a variance by noise, below which it is known exactly


def compare(heard: Mapping[SiteId, Payload], settings: Assess) -> Compared:
    """Compare hospitals by their sums under noise."""
    cost = settings.private
    known = _Known.of(heard, cost.noise)
    quantities, metadata, hidden = _metadata(known, settings)
    embeddings = {"centre": _embeddings(known, settings)} if settings.projections else {}
    noise = Noise(cost.epsilon, cost.delta, cost.noise, hidden)
    return quantities, {"shift": metadata, **embeddings}, {"noise": noise}


@dataclass(frozen=True, eq=False)
class _Known:
    """Means over the patients of every hospital, as the server knows them."""

    sites: tuple[SiteId, ...]
    names: tuple[str, ...]  # of the quantities
    cases: Values  # (site,)
    patients: Values
    first: Values  # (quantity, site): of the scaled value, and below of its square and of absence
    second: Values
    absent: Values
    vectors: Values  # (site, number): of the scaled embedding
    squares: Values  # (site,): of its squared length
    noise: float  # deviation of the noise on a sum

    @classmethod
    def of(cls, heard: Mapping[SiteId, Payload], noise: float) -> "_Known":
        first = next(iter(heard.values()))["sums"]
        names = tuple(sorted(n for n in first if n not in (EMBEDDING, SQUARE)))
        bound, count = largest(len(names), EMBEDDING in first), np.array([r["patients"] for r in heard.values()])
        sums = np.array([[r["sums"][n] for r in heard.values()] for n in names]) * bound / count[:, None]
        vectors = np.array([r["sums"].get(EMBEDDING, np.zeros(0)) for r in heard.values()]) * bound / count[:, None]
        squares = np.array([float(r["sums"].get(SQUARE, np.zeros(1))[0]) for r in heard.values()]) * bound / count
        halves = np.array([0.0, 0.5, 0.5])
        value, square, absent = np.moveaxis(sums + halves, -1, 0)
        cases = np.array([r["cases"] for r in heard.values()])
        return cls(tuple(heard), names, cases, count, value, square, absent, vectors, squares + 0.5, noise * bound)

    def error(self, i: int, others: Sequence[int]) -> float:
        """Return the variance that noise has in the difference of a mean and the mean of other hospitals together."""
        rest = self.patients[list(others)].sum()
        return float(self.noise**2 * (1 / self.patients[i] ** 2 + len(others) / rest**2))

    def chance(self, i: int, others: Sequence[int]) -> float:
        """Return the factor of a variance over all patients in the difference of two such means by chance."""
        return float(1 / self.patients[i] + 1 / self.patients[list(others)].sum())

    def together(self, means: Values, others: Sequence[int]) -> Values:
        """Return the mean over several hospitals, along the last axis."""
        return means[..., list(others)] @ self.patients[list(others)] / self.patients[list(others)].sum()  # type: ignore[no-any-return]

    @property
    def pairs(self) -> tuple[Values, Values]:
        """Variance that noise has in the difference of the means of two hospitals, and the factor by chance."""
        n = self.patients
        return self.noise**2 * np.add.outer(1 / n**2, 1 / n**2), np.add.outer(1 / n, 1 / n)

    @property
    def all_noise(self) -> float:
        """Deviation of the noise on a mean over all patients."""
        return float(self.noise * np.sqrt(len(self.sites)) / self.patients.sum())


def _metadata(known: _Known, settings: Assess) -> tuple[dict[str, Quantity], Tested, tuple[str, ...]]:
    """Return the quantities, their distance, and the names of those whose deviation is hidden by noise."""
    sites, names, everyone = known.sites, known.names, range(len(known.sites))
    low, high = np.array([settings.private.range_of(n) for n in names]).T
    halves, middles = (high - low) / 2, (low + high) / 2
    centre = known.together(known.first, everyone)
    variance = known.together(known.second, everyone) - centre**2 + known.all_noise**2
    doubt = known.all_noise * np.sqrt(1 + 4 * centre**2)
    spread2, safe2 = _scales(variance, doubt)
    hidden = tuple(n for n, v, e in zip(names, variance, doubt, strict=True) if v < SURE * e and e >= TINY)
    seen = [n for n in names if n not in hidden] or list(names)
    spread = np.sqrt(spread2)
    noise, chance = known.pairs
    wide = np.sqrt(safe2[:, None, None] * chance + noise)  # deviation of a difference, by chance and noise
    differences = np.abs(known.first[:, :, None] - known.first[:, None, :])
    unit = spread[:, None, None] if settings.scale != "none" else 1 / halves[:, None, None]
    matrices, each = differences / unit, _two_sided(differences / wide)
    each[:, list(everyone), list(everyone)] = 1.0
    by_name = dict(zip(names, matrices, strict=True))
    chosen, distance = combined({n: by_name[n] for n in seen}, settings.combine)
    picked = [names.index(n) for n in chosen]
    error = np.sqrt(np.square(np.sqrt(noise) / unit[picked]).sum(0)) / len(picked)
    np.fill_diagonal(error, 0.0)
    by_chance = (wide / unit)[picked].mean(0) * np.sqrt(2 / np.pi)

    alone = np.ones((len(names), len(sites)))

    def test(i: int, others: Sequence[int]) -> float:
        apart = np.abs(known.first[:, i] - known.together(known.first, others))
        alone[:, i] = _two_sided(apart / np.sqrt(safe2 * known.chance(i, others) + known.error(i, others)))
        return float(significance.simes(alone[:, i]))

    own = np.sqrt(safe2[:, None] / known.patients + known.noise**2 / known.patients**2)
    drawn = known.first[picked] + own[picked] * _normal(sites, (settings.resamples, len(picked), len(sites)))
    again = (np.abs(drawn[..., :, None] - drawn[..., None, :]) / unit[picked]).mean(1)
    found = _tested(distance, again, significance.simes(each), by_chance, error).set_apart(test)
    divisors = spread * halves if settings.scale != "none" else np.ones(len(names))
    counts = _counted(known)
    quantities = {}
    for k, name in enumerate(names):
        kind, _, of = name.partition(" ")
        words = {INTENSITY: "as stored", VOLUME: "mL or cm²", CLASS: "share"}[kind]
        values = {i: np.array([middles[k] + halves[k] * x]) for i, x in zip(sites, known.first[k], strict=True)}
        absent, by_site = (dict(zip(sites, x[k].tolist(), strict=True)) for x in (counts, alone))
        divided = dict.fromkeys(sites, float(divisors[k]))
        quantities[name] = Quantity(name, kind, of, words, divided, values, absent, matrices[k], each[k], by_site)
    return quantities, found, hidden


def _embeddings(known: _Known, settings: Assess) -> Tested:
    sites, everyone, width = known.sites, range(len(known.sites)), known.vectors.shape[1]
    centre, noise_all = known.together(known.vectors.T, everyone), known.all_noise
    inside = float(centre @ centre) - width * noise_all**2
    variance = float(known.together(known.squares, everyone)) - inside
    doubt = noise_all * np.sqrt(1 + 4 * max(inside, 0.0) + 2 * width * noise_all**2)
    safe = float(_scales(np.array([variance]), np.array([doubt]))[1][0])
    noise, chance = known.pairs
    square = np.square(known.vectors[:, None] - known.vectors[None]).sum(-1)
    matrix = np.sqrt(np.maximum(square - width * noise, 0.0)) * settings.private.length
    np.fill_diagonal(matrix, 0.0)
    p = np.ones_like(matrix)
    for i, j in zip(*np.triu_indices(len(sites), 1), strict=True):
        p[i, j] = p[j, i] = tail(float(square[i, j]), safe * chance[i, j], float(noise[i, j]), width)

    def test(i: int, others: Sequence[int]) -> float:
        apart = known.vectors[i] - known.together(known.vectors.T, others)
        return tail(float(apart @ apart), safe * known.chance(i, others), known.error(i, others), width)

    own = np.sqrt(safe / width / known.patients + known.noise**2 / known.patients**2)
    again = np.empty((settings.resamples, len(sites), len(sites)))
    for k, draw in enumerate(_normal(sites, (settings.resamples, width, len(sites)))):
        moved = known.vectors.T + own * draw
        far = np.square(moved[:, :, None] - moved[:, None, :]).sum(0) - 2 * width * noise
        again[k] = np.sqrt(np.maximum(far, 0.0)) * settings.private.length
    scaled = matrix / settings.private.length
    doubt2 = 2 * width * noise**2 + 4 * scaled**2 * noise  # variance of the square by noise
    least = np.power(2 * width * noise**2, 0.25)
    error = np.minimum(np.sqrt(doubt2) / np.where(scaled > 0, 2 * scaled, 1.0), least)
    error = np.where(scaled > 0, error, least) * settings.private.length
    np.fill_diagonal(error, 0.0)
    by_chance = np.sqrt(safe * chance) * settings.private.length
    return _tested(matrix, again, p, by_chance, error).set_apart(test)


def tail(square: float, chance: float, noise: float, width: int) -> float:
    """Return the probability that (chance + noise) chi^2_1 + noise chi^2_(width - 1) is at least ``square``."""
    from scipy.special import chdtrc

    if square <= 0 or chance + noise <= 0:
        return 1.0 if square <= 0 else 0.0
    end = np.sqrt(square / (chance + noise))
    beyond = erfc(end / np.sqrt(2))
    if noise == 0 or width == 1:
        return beyond
    at, weights = np.polynomial.legendre.leggauss(NODES)
    z = (at + 1) * end / 2
    rest = chdtrc(width - 1, (square - (chance + noise) * z**2) / noise)
    within = float((weights * np.exp(-(z**2) / 2) * rest).sum() * end / 2 * np.sqrt(2 / np.pi))
    return min(beyond + within, 1.0)


def _tested(matrix: Values, again: Values, p: Values, chance: Values, error: Values) -> Tested:
    """Return a distance with its resamples, (resample, site, site)."""
    chance, p = chance.copy(), p.copy()
    np.fill_diagonal(chance, 0.0)
    np.fill_diagonal(p, 1.0)
    return Tested(
        matrix, significance.upper(again), again.sum(-1), p, chance, np.ones(len(matrix)), error=error
    )  # fmt: skip


def _scales(variance: Values, error: Values) -> tuple[Values, Values]:
    """Return variances to divide by, and to test with, from estimates and the standard errors of their noise.

    An estimate below three of its errors is taken for three errors; a quantity that never varies has the variance 1.
    """
    known = np.maximum(variance, SURE * error)
    constant = known <= 1e-18
    return np.where(constant, 1.0, known), np.where(constant, 0.0, known + error)


def _two_sided(z: Values) -> Values:
    from scipy.special import erfc

    return erfc(np.nan_to_num(z, posinf=1e9) / np.sqrt(2))  # type: ignore[no-any-return]


def _normal(sites: Sequence[SiteId], shape: tuple[int, ...]) -> Values:
    return np.random.default_rng([crc32(s.encode()) for s in sites]).standard_normal(shape)


def _counted(known: _Known) -> Values:
    """Return the cases with an absent quantity, (quantity, site): none or all if noise may explain the rest."""
    counts, doubt = known.absent * known.cases, SURE * known.noise * known.cases / known.patients
    every = np.broadcast_to(known.cases, counts.shape)
    rounded = np.clip(np.rint(counts), 0, every)
    rounded = np.where((every - counts < doubt) & (counts > doubt), every, rounded)
    return np.where(counts < doubt, 0.0, rounded).astype(int)
