"""Analysis of the replies of an assessment: distances between hospitals, outliers, clusters and their significance.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024; distances beyond the paper's two are
computed on the same embeddings.

    D_f[i,j]   Earth Mover's distance between sites i and j in quantity f, over a standard deviation of f: that of all
               cases (``scale = "pooled"``), or, as the paper's numbers imply, that of the cases of site i alone, i
               before j in the natural order of the names (``scale = "first"``)
    EMD_f      mean of D_f over the pairs; f_I and f_L: the modality and the label for which it is largest
    emd        (D_{f_I} + D_{f_L}) / 2, or the mean of all D_f (``combine = "mean"``)
    euclidean  distance between the mean embeddings
    energy, mmd, frechet   root of the mean, over random directions, of the squares in distances.py
    outlier    the site with the largest sum of distances to the others
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations
from typing import Any, get_args, get_type_hints
from zlib import crc32

import numpy as np

from polysite.cluster import distance as cluster
from polysite.errors import DataError
from polysite.heterogeneity import significance
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.distances import SQUARES, Values, angle, earth_movers, earth_movers_of, slices
from polysite.heterogeneity.exchange import Assess, component, left, odd
from polysite.metrics.statistics import holm
from polysite.payload import Payload, SiteId, natural
from polysite.spreadsheets import Writer

Groups = tuple[tuple[SiteId, ...], ...]
LEVEL = 0.05  # familywise error rate of all tests
METADATA = ("emd", "shift")  # distances of metadata; the second one under noise
TESTED = (*METADATA, "energy", "centre")  # distances of the test that a site differs: metadata and embeddings
MAX_PERMUTATIONS = 50_000  # of a test
MANY = 10  # sites; with more, only the distances in TESTED get tests with many permutations
MAX_VALUES = 256  # of the list that represents several sites
LARGE = 30  # sites; with more, tests of pairs and the search for differing sites are limited
FINE = 30  # most distant pairs of a large federation that get tests with many permutations
MAX_FINE = 400_000  # permutations of such a test
CHANCE = 199  # permutations of a pair of a large federation by the distances not in TESTED
ROUNDS = 20  # in which the differing sites of a large federation are set apart
SCALES, COMBINES = (get_args(get_type_hints(Assess)[name]) for name in ("scale", "combine"))
OTHERS = {name: statistic for name, statistic in SQUARES.items() if name not in TESTED}
UNITS = {3: "mL", 2: "cm²"}
TITLES = {
    "emd": "Earth Mover's distance of the metadata",
    "euclidean": "Euclidean distance of the mean embeddings",
    "energy": "energy distance of the embeddings",
    "mmd": "maximum mean discrepancy of the embeddings",
    "frechet": "Fréchet distance of the embeddings",
    "shift": "shift of the means of the metadata",
    "centre": "distance of the mean embeddings under noise",
}


@dataclass(frozen=True, eq=False)
class Quantity:
    """A quantity measured in every case: its distribution at every hospital, and distances between distributions."""

    name: str
    kind: str  # intensity, volume or class
    of: str  # the modality, label or class
    unit: str
    divisors: Mapping[SiteId, float]  # of the distances from a site to those after it
    values: Mapping[SiteId, Values]  # quantiles, as received
    absent: Mapping[SiteId, int]  # cases without the modality, or without the label
    matrix: Values  # Earth Mover's distances
    p: Values  # of the permutation tests, by pair
    alone: Mapping[SiteId, float]  # p that a site differs from the others together

    @property
    def mean(self) -> float:
        """EMD_f: mean distance over all pairs."""
        return _over_pairs(self.matrix)


@dataclass(frozen=True, eq=False)
class Distance:
    """One distance between all hospitals, with its significance, outlier and clusters."""

    name: str
    matrix: Values
    low: Values  # 95 % bootstrap interval
    high: Values
    p: Values  # of the permutation tests, by pair
    adjusted: Values  # p adjusted by Holm over the pairs
    chance: Values  # mean distance if the cases of a pair were assigned at random
    alone: Mapping[SiteId, float]  # p that a site differs from the others together; for distances in TESTED
    against: Mapping[SiteId, tuple[SiteId, ...]]  # the other sites of that test
    sums: Mapping[SiteId, float]  # of the distances of a site to the others
    graded: Mapping[SiteId, float]  # factor of a site's weight that falls with its sum
    outlier: SiteId  # the site with the largest sum
    named: Mapping[SiteId, float]  # share of the resamples in which each site is the outlier
    clusters: Groups  # around the outlier, as in the paper
    linked: Groups  # by average linkage
    silhouette: float  # of the latter
    error: Values | None = None  # standard error that noise adds; None without noise

    @property
    def title(self) -> str:
        """Name of the distance for a report."""
        return TITLES[self.name]


@dataclass(frozen=True)
class Noise:
    """Differential privacy of an assessment: its cost for every patient, and its noise."""

    epsilon: float
    delta: float
    noise: float  # deviation, as a multiple of what one patient can change in all sums
    hidden: tuple[str, ...] = ()  # quantities whose deviation over all patients noise hides


@dataclass(frozen=True, eq=False, kw_only=True)
class Assessment:
    """Result of an assessment."""

    sites: tuple[SiteId, ...]  # the sites that are compared
    cases: Mapping[SiteId, int]  # of all sites that replied
    quantities: Mapping[str, Quantity]
    distances: Mapping[str, Distance]
    # component -> degrees between the mean vectors of two sites
    angles: Mapping[str, Values] = field(default_factory=dict)
    # degrees between a case's components and the site's mean ones
    alignment: Mapping[SiteId, Mapping[str, Values]] = field(default_factory=dict)
    left: Mapping[SiteId, tuple[int, str]] = field(default_factory=dict)  # bytes that left a site, and what they were
    unlabelled: Mapping[SiteId, int]  # cases without any label
    silent: tuple[SiteId, ...]  # sites with too few cases to be described
    refused: Mapping[SiteId, str]  # sites with a reply that was not used, and why
    settings: Assess
    encoder: str = ""  # description; empty without embeddings
    # distance -> setting -> the outlier if that alone were changed
    alternatives: Mapping[str, Mapping[str, SiteId]] = field(default_factory=dict)
    case_angles: Mapping[str, Values] = field(default_factory=dict)  # as ``angles``, of random cases; in a simulation
    noise: Noise | None = None  # under differential privacy

    @property
    def metadata(self) -> Distance:
        """The distance of the metadata."""
        return next(self.distances[name] for name in METADATA if name in self.distances)

    def largest(self, *kinds: str) -> Quantity | None:
        """Return the quantity of these kinds with the largest mean distance: f_I or f_L."""
        return max((q for q in self.quantities.values() if q.kind in kinds), key=lambda q: q.mean, default=None)

    def index(self, site: SiteId) -> int:
        """Return the row of a site in the matrices."""
        return self.sites.index(site)

    def differ(self, one: SiteId, other: SiteId, level: float = LEVEL) -> tuple[str, ...]:
        """Return the distances with a significant difference between two hospitals."""
        i, j = self.index(one), self.index(other)
        return tuple(name for name, d in self.distances.items() if d.adjusted[i, j] <= level)

    def stands_out(self, quantity: Quantity, site: SiteId) -> bool:
        """Return whether a site differs significantly from the others in a quantity, corrected for all tests."""
        tests = len(self.sites) * len(self.quantities) * sum(name in self.distances for name in TESTED)
        return quantity.alone[site] * tests <= LEVEL

    def unable(self, level: float = LEVEL) -> tuple[tuple[SiteId, SiteId], ...]:
        """Return the pairs with too few cases for any test to be significant; none under noise, which has no such
        limit."""
        if self.noise:
            return ()
        pairs = list(combinations(self.sites, 2))
        size = {s: min(self.cases[s], self.settings.levels) for s in self.sites}
        return tuple((a, b) for a, b in pairs if significance.least_p(size[a], size[b]) * len(pairs) > level)

    def untestable(self, level: float = LEVEL) -> tuple[SiteId, ...]:
        """Return the sites that no test could tell from all others, because of the numbers of cases or permutations."""
        if self.noise:
            return ()
        kinds = sum(name in self.distances for name in TESTED)
        size = {s: min(self.cases[s], self.settings.levels) for s in self.sites}
        finest = 1 / (self.settings.permutations + 1)
        least = {s: max(significance.least_p(size[s], sum(size.values()) - size[s]), finest) for s in self.sites}
        return tuple(s for s in self.sites if least[s] * kinds * len(self.sites) > level)

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences on what was limited because the federation is large; none for up to ``LARGE`` hospitals."""
        count = len(self.sites)
        if count <= LARGE or self.noise:
            return ()
        pairs = (
            f"with more than {LARGE} hospitals, the {FINE} most distant pairs by Earth Mover's and energy distance "
            f"have up to {_fine(count)} permutations, which a pair needs to be starred; the other pairs have "
            f"{significance.FIRST - 1}, and {CHANCE} by the other distances"
        )
        search = f"hospitals that differ are set apart {at_once(count)} at a time, in at most {ROUNDS} rounds"
        return pairs, search

    def table(self) -> str:
        """Return a CSV with a line for every distance and pair."""
        text = io.StringIO()
        lines = Writer(text)
        noise = ["noise"] if self.noise else []
        lines.writerow(["distance", "site", "other", "value", "low", "high", "chance", "p", "p_holm", *noise])
        for d in self.distances.values():
            for (i, one), (j, other) in combinations(enumerate(self.sites), 2):
                columns = (d.matrix, d.low, d.high, d.chance, d.p, d.adjusted, *([] if d.error is None else [d.error]))
                numbers = (float(x[i, j]) for x in columns)
                lines.writerow([d.name, one, other, *(f"{x:.6g}" for x in numbers)])
        return text.getvalue()

    def plain(self) -> dict[str, Any]:
        """Return the assessment as values for JSON."""
        return _plain(self)  # type: ignore[no-any-return]


def analyse(replies: Mapping[SiteId, Payload], settings: Assess, encoder: str = "") -> Assessment:
    """Compare the hospitals that replied."""
    replies = {i: replies[i] for i in natural(replies)}
    heard, about = described(replies, "quantiles", odd(replies, settings), settings, encoder)
    sites = tuple(heard)
    drawn = {i: significance.counts(i, _length(heard[i]), settings.resamples) for i in sites}
    quantities, metadata, alternatives = _metadata(heard, settings, drawn)
    embeddings = _embeddings(heard, settings, drawn) if settings.projections else {}
    return Assessment(
        **about,
        quantities=quantities,
        distances={n: distance_of(n, sites, settings, found) for n, found in {"emd": metadata, **embeddings}.items()},
        angles=_angles(heard) if settings.projections else {},
        alignment={i: dict(r["angles"]) for i, r in heard.items()} if settings.projections else {},
        unlabelled={i: int(r["unlabelled"]) for i, r in heard.items()},
        alternatives={"emd": alternatives},
    )


def described(
    replies: Mapping[SiteId, Payload], by: str, refused: Mapping[SiteId, str], settings: Assess, encoder: str
) -> tuple[dict[SiteId, Payload], dict[str, Any]]:
    """Return the replies that are compared, and the fields of an `Assessment` that do not depend on the comparison.

    Args:
        replies: The replies of all sites.
        by: Field that describes the cases; it is empty at a site with too few of them.
        refused: Sites with a reply that is not used, and why.
        settings: The settings.
        encoder: Description of the encoder.
    """
    heard = {i: r for i, r in replies.items() if r[by] and i not in refused}
    if len(replies) < 2:
        raise DataError("an assessment compares hospitals, and there is only one")
    if len(heard) < 2:
        raise DataError(
            f"an assessment compares hospitals, and {len(heard)} of {len(replies)} can be described: "
            + (next(iter(refused.values())) if refused else f"a site needs {settings.fewest} cases (assess.fewest)")
        )
    return heard, {
        "sites": tuple(heard),
        "cases": {i: int(r["cases"]) for i, r in replies.items()},
        "left": {i: (r.nbytes, "what was refused" if i in refused else left(r)) for i, r in replies.items()},
        "silent": tuple(i for i, r in replies.items() if not r[by]),
        "refused": refused,
        "settings": settings,
        "encoder": encoder if settings.projections else "",
    }


Pair = tuple[float, Values, float, float]  # distance, its resamples, p, and the mean distance by chance


@dataclass(frozen=True, eq=False)
class Tested:
    """A distance with its tests, before outlier and clusters are computed. Resamples are summed, never kept."""

    matrix: Values  # (site, site)
    upper: Values  # 97.5 % quantile of the resamples
    sums: Values  # (resample, site): of the distances to the others
    p: Values
    chance: Values
    alone: Values  # (site,)
    others: Sequence[Sequence[int]] = ()  # sites that each was tested against
    error: Values | None = None  # standard error that noise adds, (site, site)

    @classmethod
    def empty(cls, sites: int, draws: int) -> "Tested":
        """Return arrays to be filled by ``put``."""
        square = sites, sites
        return cls(
            np.zeros(square), np.zeros(square), np.zeros((draws, sites)), np.ones(square), np.zeros(square),
            np.ones(sites),
        )  # fmt: skip

    def put(self, i: int, pairs: Sequence[Pair]) -> None:
        """Set the values of a site and all that come after it."""
        after = slice(i + 1, None)
        matrix, samples, p, chance = zip(*pairs, strict=True)
        drawn = np.stack(samples, 1)
        self.sums[:, i] += drawn.sum(1)
        self.sums[:, after] += drawn
        for table, row in ((self.matrix, matrix), (self.upper, significance.upper(drawn)), (self.p, p)):
            table[i, after] = table[after, i] = row
        self.chance[i, after] = self.chance[after, i] = chance


def _farthest(matrix: Values) -> list[tuple[int, int]]:
    """Return the most distant pairs of a large federation, which are tested with many permutations."""
    if len(matrix) <= LARGE:
        return []
    rows, columns = np.triu_indices(len(matrix), 1)
    order = np.argsort(-matrix[rows, columns], kind="stable")[:FINE]
    return list(zip(rows[order].tolist(), columns[order].tolist(), strict=True))


def _fine(sites: int) -> int:
    """Return the permutations with which a pair of a large federation can be significant among all pairs."""
    return min(max(MAX_PERMUTATIONS, 20 * sites * (sites - 1)), MAX_FINE)


def _metadata(
    heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]
) -> tuple[dict[str, Quantity], Tested, dict[str, SiteId]]:
    names, sites = list(next(iter(heard.values()))["quantiles"]), list(heard)
    laws = [np.stack([r["quantiles"][n] for n in names]) for r in heard.values()]
    cases = [r["cases"] for r in heard.values()]
    divisors = _divisors(laws, cases)
    unit = divisors["none" if settings.scale == "first" else settings.scale][:, :1]  # the same for all sites
    laws = [law / unit for law in laws]
    plain = earth_movers(laws)
    factors = {scale: _by_first(unit / each) for scale, each in divisors.items()}
    rescale = factors[settings.scale]
    matrices = plain * rescale
    only, widths = {"emd": earth_movers_of}, np.ones(len(names))
    # enough permutations for the smallest p to stay significant after all corrections
    draws = max(settings.permutations, min(40 * len(names) * len(sites) ** 2 // 2, MAX_PERMUTATIONS))

    def mean(scale: str, combine: str) -> tuple[list[str], Values]:
        return combined(dict(zip(names, plain * factors[scale], strict=True)), combine)

    chosen, distance = mean(settings.scale, settings.combine)
    picked = [names.index(n) for n in chosen]
    each = np.ones((len(names), len(sites), len(sites)))  # p of every quantity
    alone = np.ones((len(names), len(sites)))
    found = Tested.empty(len(sites), settings.resamples)

    def compare(i: int, j: int, draws: int) -> Values:
        p, chance = significance.permuted(laws[i], laws[j], only, widths, draws)["emd"]
        each[:, i, j] = each[:, j, i] = p
        found.p[i, j] = found.p[j, i] = significance.simes(p)  # that two sites differ in any quantity
        return chance

    def pair(i: int, j: int) -> Pair:
        chance = compare(i, j, draws if len(sites) <= LARGE else significance.FIRST - 1)
        drawn_pair = drawn[sites[i]], drawn[sites[j]]
        again = significance.resampled(laws[i][picked], laws[j][picked], drawn_pair, only, widths[picked])["emd"]
        ratio = rescale[picked, i, j]
        samples, by_chance = (again * ratio[:, None]).mean(0), float((chance[picked] * ratio).mean(0))
        return distance[i, j], samples, found.p[i, j], by_chance

    for i in range(len(sites) - 1):
        found.put(i, [pair(i, j) for j in range(i + 1, len(sites))])
    for i, j in _farthest(distance):
        compare(i, j, _fine(len(sites)))

    def test(i: int, others: Sequence[int]) -> float:
        rest = _together(laws, cases, others)
        alone[:, i] = significance.permuted(laws[i], rest, only, widths, draws)["emd"][0]
        return float(significance.simes(alone[:, i]))

    apart, others = set_apart(distance, test)
    metric = next(iter(heard.values()))["metric"]
    quantities = {}
    for k, n in enumerate(names):
        values = {i: r["quantiles"][n] for i, r in heard.items()}
        by_site = dict(zip(sites, alone[k].tolist(), strict=True))
        absent = {i: int(r["absent"][n].item()) for i, r in heard.items()}
        kind, _, of = n.partition(" ")
        words = {INTENSITY: "as stored", VOLUME: UNITS.get(int(metric), "1000 voxels"), CLASS: "share"}[kind]
        divided = dict(zip(sites, divisors[settings.scale][k].tolist(), strict=True))
        quantities[n] = Quantity(n, kind, of, words, divided, values, absent, matrices[k], each[k], by_site)
    together = replace(found, alone=apart, others=others)
    found_by = {f'assess.scale = "{s}"': mean(s, settings.combine)[1] for s in SCALES if s != settings.scale}
    found_by |= {f'assess.combine = "{c}"': mean(settings.scale, c)[1] for c in COMBINES if c != settings.combine}
    return quantities, together, {setting: sites[cluster.outlier(matrix)] for setting, matrix in found_by.items()}


def _divisors(laws: Sequence[Values], cases: Sequence[float]) -> dict[str, Values]:
    """Return, for every ``scale``, what the distances from a site to those after it are divided by: (quantity, site).

    A quantity that never varies, at the site or anywhere, has no deviation to divide by: the pooled one takes the place
    of a site's own, and 1 that of the pooled one.
    """
    shape, size = (len(laws[0]), len(laws)), np.max([np.abs(law).max(1) for law in laws], 0)
    own, spread = np.stack([law.std(1) for law in laws], 1), _pooled(laws, cases)
    pooled = np.broadcast_to(np.where(spread > 1e-9 * size, spread, 1.0)[:, None], shape)
    return {"pooled": pooled, "first": np.where(own > 1e-9 * size[:, None], own, pooled), "none": np.ones(shape)}


def _by_first(values: Values) -> Values:
    """Return the values of the first site of every pair: (quantity, site) to (quantity, site, site)."""
    places = np.arange(values.shape[1])
    return values[:, np.minimum.outer(places, places)]


def combined(matrices: Mapping[str, Values], combine: str = "max") -> tuple[list[str], Values]:
    """Return the quantities that count, and the mean of their distances.

    ``max``: f_I and f_L, or the one that exists. ``mean``: all.
    """
    if combine == "mean":
        return list(matrices), np.mean(list(matrices.values()), axis=0)
    kinds = [[n for n in matrices if n.startswith(INTENSITY)], [n for n in matrices if not n.startswith(INTENSITY)]]
    chosen = [max(group, key=lambda n: _over_pairs(matrices[n])) for group in kinds if group]
    return chosen, np.mean([matrices[n] for n in chosen], axis=0)


def set_apart(matrix: Values, test: Callable[[int, Sequence[int]], float]) -> tuple[Values, list[list[int]]]:
    """Return, for every site, the p-value of its difference from the other sites pooled, and the list of these sites.

    A distant site makes every other site differ from "the others". So the most distant of the differing sites is set
    apart, and the rest is tested again without it, until no site differs or two are left. Sites are tested from the
    most distant on, so that a round ends with the first that differs. In a large federation, a round sets several
    sites apart (``at_once``), and after ``ROUNDS`` rounds the sites that are left are tested once more.
    """
    left, p, count = list(range(len(matrix))), np.ones(len(matrix)), at_once(len(matrix))
    others: list[list[int]] = [[] for _ in left]
    for done in range(len(matrix)):
        last = len(left) <= 2 or (count > 1 and done == ROUNDS)
        near = matrix[np.ix_(left, left)]
        far = {i: remoteness(near, k) for k, i in enumerate(left)}
        differing: list[int] = []
        for i in sorted(left, key=lambda i: (-far[i], i)):
            others[i] = [j for j in left if j != i]
            p[i] = test(i, others[i])
            if not last and p[i] * 2 * len(matrix) <= LEVEL:  # corrected for sites and both distances
                differing.append(i)
            if len(differing) == min(count, len(left) - 2) > 0:
                break
        if not differing:
            break
        left = [i for i in left if i not in differing]
    return p, others


def at_once(sites: int) -> int:
    """Return the number of sites that a round of the search for differing sites sets apart.

    >>> at_once(30), at_once(100)
    (1, 5)
    """
    return 1 if sites <= LARGE else -(-sites // ROUNDS)


def remoteness(matrix: Values, i: int) -> float:
    """Return the mean distance of a site to the others, relative to the mean distance between the others.

    >>> remoteness(np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 3.0], [3.0, 3.0, 0.0]]), 2)
    3.0
    """
    count = len(matrix)
    if count < 3:
        return 1.0
    rest = np.delete(np.delete(matrix, i, 0), i, 1)
    usual = rest.sum() / ((count - 1) * (count - 2))
    return float(matrix[i].sum() / (count - 1) / usual) if usual else float("inf")


def _together(laws: Sequence[Values], cases: Sequence[float], which: Sequence[int]) -> Values:
    """Pool several hospitals, with equal weight for every case, in a list of limited length."""
    heavy = np.concatenate([np.full(laws[k].shape[1], cases[k] / laws[k].shape[1]) for k in which])
    rows = np.concatenate([laws[k] for k in which], axis=1)
    weights = None if (heavy == 1).all() else heavy
    return np.stack([slices(row, MAX_VALUES, weights) for row in rows])


def _embeddings(heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]) -> dict[str, Tested]:
    sites = list(heard)
    laws, cases = [r["directions"]["embedding"] for r in heard.values()], [r["cases"] for r in heard.values()]
    widths = _pooled(laws, cases)
    draws = max(settings.permutations, min(20 * len(sites) ** 2, MAX_PERMUTATIONS))
    large = len(sites) > LARGE
    fewer = settings.permutations if len(sites) <= MANY else CHANCE if large else significance.FIRST - 1
    found = {n: Tested.empty(len(sites), settings.resamples) for n in SQUARES}
    only = {"energy": SQUARES["energy"]}

    def pair(i: int, j: int) -> dict[str, Pair]:
        a, b = sites[i], sites[j]
        tested = significance.permuted(laws[i], laws[j], only, widths, significance.FIRST - 1 if large else draws)
        tested |= significance.permuted(laws[i], laws[j], OTHERS, widths, fewer)
        again = significance.resampled(laws[i], laws[j], (drawn[a], drawn[b]), SQUARES, widths)
        once = np.ones((1, laws[i].shape[1])), np.ones((1, laws[j].shape[1]))
        seen = significance.resampled(laws[i], laws[j], once, SQUARES, widths)
        pairs: dict[str, Pair] = {}
        for name in found:
            here = exact = float(np.sqrt(seen[name].mean()))
            if name == "euclidean":  # the means are known exactly; the directions give their variation
                exact = float(np.linalg.norm(_mean(heard[a]) - _mean(heard[b])))
            stretch = exact / here if here else 1.0
            p, chance = tested[name]
            samples = np.sqrt(again[name].mean(0)) * stretch
            pairs[name] = exact, samples, float(significance.simes(p)), float(np.sqrt(chance.mean()) * stretch)
        return pairs

    for i in range(len(sites) - 1):
        row = [pair(i, j) for j in range(i + 1, len(sites))]
        for name, each in found.items():
            each.put(i, [pairs[name] for pairs in row])
    energy = found["energy"]
    for i, j in _farthest(energy.matrix):
        p, _ = significance.permuted(laws[i], laws[j], only, widths, _fine(len(sites)))["energy"]
        energy.p[i, j] = energy.p[j, i] = significance.simes(p)

    def test(i: int, others: Sequence[int]) -> float:
        p, _ = significance.permuted(laws[i], _together(laws, cases, others), only, widths, draws)["energy"]
        return float(significance.simes(p))

    alone, others = set_apart(energy.matrix, test)
    return {**found, "energy": replace(energy, alone=alone, others=others)}


def distance_of(name: str, sites: Sequence[SiteId], settings: Assess, found: Tested) -> Distance:
    """Return a distance with its outlier and clusters."""
    matrix, p = found.matrix, found.p
    low, high = significance.interval(matrix, found.upper, p)
    upper = np.triu_indices(len(sites), 1)
    adjusted = np.ones_like(p)
    adjusted[upper] = holm(p[upper])
    adjusted = np.minimum(adjusted, adjusted.T)
    named = np.bincount(found.sums.argmax(-1), minlength=len(sites)) / len(found.sums)
    groups, silhouette = cluster.linked(matrix)
    return Distance(
        name=name,
        matrix=matrix,
        low=low,
        high=high,
        p=p,
        adjusted=adjusted,
        chance=found.chance,
        alone=dict(zip(sites, found.alone.tolist(), strict=True)) if name in TESTED else {},
        against={s: tuple(sites[j] for j in which) for s, which in zip(sites, found.others, strict=False)},
        sums=dict(zip(sites, cluster.sums(matrix), strict=True)),
        graded=dict(zip(sites, cluster.graded(matrix), strict=True)),
        outlier=sites[cluster.outlier(matrix)],
        named=dict(zip(sites, named.tolist(), strict=True)),
        clusters=_names(sites, cluster.around_outlier(matrix, settings.take)),
        linked=_names(sites, groups),
        silhouette=silhouette,
        error=found.error,
    )


def _names(sites: Sequence[SiteId], groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(tuple(sites[i] for i in group) for group in groups)


def _pooled(laws: Sequence[Values], cases: Sequence[float]) -> Values:
    """Return the standard deviation of every quantity over all cases of the federation."""
    share = np.asarray(cases) / sum(cases)
    mean = sum(s * law.mean(1) for s, law in zip(share, laws, strict=True))
    square = sum(s * np.square(law - mean[:, None]).mean(1) for s, law in zip(share, laws, strict=True))
    return np.sqrt(square)  # type: ignore[no-any-return]


def _mean(reply: Payload) -> Values:
    return np.concatenate(list(reply["mean"].values()))


def _length(reply: Payload) -> int:
    return len(next(iter(reply["quantiles"].values())))


def _angles(heard: Mapping[SiteId, Payload]) -> dict[str, Values]:
    """Return, for every component of the embedding, the matrix of angles (degrees) between the sites' mean vectors.

    A small angle shows that the component has the same meaning at both sites.
    """
    names = list(next(iter(heard.values()))["mean"])
    return {n: np.array([[angle(a["mean"][n], b["mean"][n]) if a is not b else 0.0 for b in heard.values()]
                         for a in heard.values()]) for n in names}  # fmt: skip


def random_case_angles(cases: Mapping[SiteId, Values], seed: int) -> dict[str, Values]:
    """Return, for every component, the angles (degrees) between a random case of each of two sites, anew for each pair.

    This is the paper's check, which takes vectors of single cases; sites that send only their means have ``angles``.

    Args:
        cases: Vectors (case, channel, component) of the cases of every site.
        seed: The same seed draws the same cases.
    """
    sites = list(cases)
    angles = np.zeros((next(iter(cases.values())).shape[-1], len(sites), len(sites)))
    for (i, a), (j, b) in combinations(enumerate(sites), 2):
        rng = np.random.default_rng([seed, crc32(a.encode()), crc32(b.encode())])
        one, other = (cases[site][rng.integers(len(cases[site]))] for site in (a, b))
        angles[:, i, j] = angles[:, j, i] = [angle(v, w) for v, w in zip(one.T, other.T, strict=True)]
    return {component(k): matrix for k, matrix in enumerate(angles)}


def _over_pairs(matrix: Values) -> float:
    return float(matrix[np.triu_indices(len(matrix), 1)].mean())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if is_dataclass(value):
        derived = {"mean": value.mean} if isinstance(value, Quantity) else {}
        return {**{f.name: _plain(getattr(value, f.name)) for f in fields(value)}, **derived}
    return value
