"""Result of an assessment, and what the analysis of lists and that of sums under noise have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from polysite.heterogeneity import significance
from polysite.heterogeneity.bounds import INTENSITY
from polysite.heterogeneity.distances import Values
from polysite.heterogeneity.exchange import Assess
from polysite.payload import SiteId
from polysite.spreadsheets import csv_text

Groups = tuple[tuple[SiteId, ...], ...]
LEVEL = 0.05  # familywise error rate of all tests
METADATA = ("emd", "shift")  # distances of metadata; the second one under noise
TESTED = (*METADATA, "energy", "centre")  # distances of the test that a site differs: metadata and embeddings
MAX_PERMUTATIONS = 50_000  # of a test
MANY = 10  # sites; with more, only the distances in TESTED get tests with many permutations
LARGE = 30  # sites; with more, tests of pairs and the search for differing sites are limited
FINE = 30  # most distant pairs of a large federation that get tests with many permutations
MAX_FINE = 400_000  # permutations of such a test
CHANCE = 199  # permutations of a pair of a large federation by the distances not in TESTED
ROUNDS = 20  # in which the differing sites of a large federation are set apart
TITLES = {
    "emd": "Earth Mover's distance of the metadata",
    "euclidean": "Euclidean distance of the mean embeddings",
    "energy": "energy distance of the embeddings",
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
            f"have up to {fine(count)} permutations, which a pair needs to be starred; the other pairs have "
            f"{significance.FIRST - 1}, and {CHANCE} by the other distances"
        )
        search = f"hospitals that differ are set apart {at_once(count)} at a time, in at most {ROUNDS} rounds"
        return pairs, search

    def table(self) -> str:
        """Return a CSV with a line for every distance and pair."""
        lines, noise = [], ["noise"] if self.noise else []
        head = ["distance", "site", "other", "value", "low", "high", "chance", "p", "p_holm", *noise]
        for d in self.distances.values():
            for (i, one), (j, other) in combinations(enumerate(self.sites), 2):
                columns = (d.matrix, d.low, d.high, d.chance, d.p, d.adjusted, *([] if d.error is None else [d.error]))
                numbers = (float(x[i, j]) for x in columns)
                lines.append([d.name, one, other, *(f"{x:.6g}" for x in numbers)])
        return csv_text(head, lines)

    def plain(self) -> dict[str, Any]:
        """Return the assessment as values for JSON."""
        return _plain(self)  # type: ignore[no-any-return]


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

    def set_apart(self, test: Callable[[int, Sequence[int]], float]) -> "Tested":
        """Return the distance with, for every site, the p of its difference from the other sites pooled, and these.

        A distant site makes every other site differ from "the others". So the most distant of the differing sites is
        set apart, and the rest is tested again without it, until no site differs or two are left. Sites are tested from
        the most distant on, so that a round ends with the first that differs. In a large federation, a round sets
        several sites apart (``at_once``), and after ``ROUNDS`` rounds the sites that are left are tested once more.

        Args:
            test: Returns p of a site against others, by their places.
        """
        matrix, count = self.matrix, at_once(len(self.matrix))
        left, p = list(range(len(matrix))), np.ones(len(matrix))
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
        return replace(self, alone=p, others=others)


# quantities, distances, and what an `Assessment` has of one source of these alone
Compared = tuple[dict[str, Quantity], dict[str, Tested], dict[str, Any]]


def combined(matrices: Mapping[str, Values], combine: str = "max") -> tuple[list[str], Values]:
    """Return the quantities that count, and the mean of their distances.

    ``max``: f_I and f_L, or the one that exists. ``mean``: all.
    """
    if combine == "mean":
        return list(matrices), np.mean(list(matrices.values()), axis=0)
    kinds = [[n for n in matrices if n.startswith(INTENSITY)], [n for n in matrices if not n.startswith(INTENSITY)]]
    chosen = [max(group, key=lambda n: _over_pairs(matrices[n])) for group in kinds if group]
    return chosen, np.mean([matrices[n] for n in chosen], axis=0)


def at_once(sites: int) -> int:
    """Return the number of sites that a round of the search for differing sites sets apart.

    >>> at_once(30), at_once(100)
    (1, 5)
    """
    return 1 if sites <= LARGE else -(-sites // ROUNDS)


def fine(sites: int) -> int:
    """Return the permutations with which a pair of a large federation can be significant among all pairs."""
    return min(max(MAX_PERMUTATIONS, 20 * sites * (sites - 1)), MAX_FINE)


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
