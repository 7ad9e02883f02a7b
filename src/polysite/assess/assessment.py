"""From the replies of the hospitals to distances, outliers, clusters, and what of it is more than chance.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024; distances beyond the paper's two are
computed on the same embeddings.

    D_f[i,j]   Earth Mover's distance between sites i and j in quantity f, over the pooled standard deviation of f
    EMD_f      mean of D_f over the pairs; f_I and f_L: the modality and the label for which it is largest
    emd        (D_{f_I} + D_{f_L}) / 2
    euclidean  distance between the mean embeddings
    energy, mmd, frechet   root of the mean, over random directions, of the squares in distances.py
    outlier    the site with the largest sum of distances to the others
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from typing import Any

import numpy as np

from polysite.assess import support
from polysite.assess.distances import SQUARES, Values, angle, earth_movers, earth_movers_of, slices
from polysite.assess.exchange import Assess, left
from polysite.cluster import distance as cluster
from polysite.errors import DataError
from polysite.metrics.statistics import holm
from polysite.payload import Payload, SiteId

Groups = tuple[tuple[SiteId, ...], ...]
LEVEL = 0.05  # of error, over all tests together
TESTED = ("emd", "energy")  # by which a site is said to differ: metadata, and the embeddings in every respect
MOST = 50_000  # deals of a test
INTENSITY, VOLUME, CLASS = "intensity", "volume", "class"  # how the name of a quantity begins
TITLES = {
    "emd": "Earth Mover's distance of the metadata",
    "euclidean": "Euclidean distance of the mean embeddings",
    "energy": "energy distance of the embeddings",
    "mmd": "maximum mean discrepancy of the embeddings",
    "frechet": "Fréchet distance of the embeddings",
}


@dataclass(frozen=True, eq=False)
class Quantity:
    """One number of every case: what the hospitals hold of it, and how far apart that is."""

    name: str
    kind: str  # intensity, volume or class
    of: str  # which modality, label or class
    unit: str
    scale: float  # what distances are divided by
    values: Mapping[SiteId, Values]  # quantiles, as they came
    matrix: Values  # Earth Mover's distances
    p: Values  # of the permutation tests, pair by pair
    alone: Mapping[SiteId, float]  # p that a site differs from the others together, as under the distance ``emd``

    @property
    def mean(self) -> float:
        """EMD_f: over all pairs."""
        return _over_pairs(self.matrix)


@dataclass(frozen=True, eq=False)
class Distance:
    """One way to compare all hospitals."""

    name: str
    matrix: Values
    low: Values  # 95 % bootstrap interval
    high: Values
    p: Values  # of the permutation tests, pair by pair
    adjusted: Values  # the same, by Holm over the pairs
    chance: Values  # what the distance would be on average, if the cases of a pair were dealt out at random
    alone: Mapping[SiteId, float]  # p that a site differs from the others together, of the distances that are TESTED
    outlier: SiteId
    named: Mapping[SiteId, float]  # share of the resamples in which each site is the outlier
    clusters: Groups  # around the outlier, as the paper has it
    linked: Groups  # by average linkage
    silhouette: float  # of the latter

    @property
    def title(self) -> str:
        return TITLES[self.name]


@dataclass(frozen=True, eq=False)
class Assessment:
    """All that one exchange tells of a federation."""

    sites: tuple[SiteId, ...]  # those that are compared
    cases: Mapping[SiteId, int]  # of all sites that replied
    quantities: Mapping[str, Quantity]
    distances: Mapping[str, Distance]
    angles: Mapping[str, Values]  # component -> degrees between the mean components of two sites
    alignment: Mapping[SiteId, Mapping[str, Values]]  # degrees between a case's components and the site's mean ones
    left: Mapping[SiteId, tuple[int, str]]  # bytes and words
    silent: tuple[SiteId, ...]  # sites with too few cases to be described
    refused: Mapping[SiteId, str]  # whose reply was not used, and why
    settings: Assess
    encoder: str  # in words; empty without embeddings

    def largest(self, *kinds: str) -> Quantity | None:
        """The quantity of these kinds in which the federation differs most: f_I or f_L."""
        found = [q for q in self.quantities.values() if q.kind in kinds]
        return max(found, key=lambda q: q.mean, default=None)

    def index(self, site: SiteId) -> int:
        return self.sites.index(site)

    def differ(self, one: SiteId, other: SiteId, level: float = LEVEL) -> tuple[str, ...]:
        """The distances under which two hospitals differ by more than chance."""
        i, j = self.index(one), self.index(other)
        return tuple(name for name, d in self.distances.items() if d.adjusted[i, j] <= level)

    def stands_out(self, quantity: Quantity, site: SiteId) -> bool:
        """Whether a site differs from the others in a quantity by more than chance, all that is tested considered."""
        tests = len(self.sites) * len(self.quantities) * sum(name in self.distances for name in TESTED)
        return quantity.alone[site] * tests <= LEVEL

    def unable(self, level: float = LEVEL) -> tuple[tuple[SiteId, SiteId], ...]:
        """Pairs with too few cases for any test to tell them apart, however different they are."""
        most = self.settings.levels
        return tuple(
            (a, b)
            for a, b in combinations(self.sites, 2)
            if support.least_p(min(self.cases[a], most), min(self.cases[b], most)) * len(self.quantities) > level
        )

    def table(self) -> str:
        """A line for every distance and pair, as CSV."""
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(["distance", "site", "other", "value", "low", "high", "chance", "p", "p_holm"])
        for d in self.distances.values():
            for (i, one), (j, other) in combinations(enumerate(self.sites), 2):
                numbers = (float(x[i, j]) for x in (d.matrix, d.low, d.high, d.chance, d.p, d.adjusted))
                lines.writerow([d.name, one, other, *(f"{x:.6g}" for x in numbers)])
        return text.getvalue()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return _plain(self)  # type: ignore[no-any-return]


def analyse(replies: Mapping[SiteId, Payload], settings: Assess, encoder: str = "") -> Assessment:
    """Compare the hospitals that replied."""
    replies = {i: replies[i] for i in sorted(replies)}
    refused = _odd(replies, settings)
    heard = {i: r for i, r in replies.items() if r["quantiles"] and i not in refused}
    if len(heard) < 2:
        raise DataError(
            f"an assessment compares hospitals, and {len(heard)} of {len(replies)} can be described: "
            + "; ".join(refused.values() or [f"a site needs {settings.fewest} cases (assess.fewest)"])
        )
    sites = tuple(heard)
    drawn = {i: support.counts(i, _length(heard[i]), settings.resamples) for i in sites}
    quantities, metadata = _metadata(heard, settings, drawn)
    embeddings = _embeddings(heard, settings, drawn) if settings.projections else {}
    return Assessment(
        sites=sites,
        cases={i: int(r["cases"]) for i, r in replies.items()},
        quantities=quantities,
        distances={n: _distance(n, sites, settings, found) for n, found in {"emd": metadata, **embeddings}.items()},
        angles=_angles(heard) if settings.projections else {},
        alignment={i: dict(r["angles"]) for i, r in heard.items()} if settings.projections else {},
        left={i: (r.nbytes, "what was refused" if i in refused else left(r)) for i, r in replies.items()},
        silent=tuple(i for i, r in replies.items() if not r["quantiles"] and i not in refused),
        refused=refused,
        settings=settings,
        encoder=encoder if settings.projections else "",
    )


@dataclass(frozen=True, eq=False)
class Found:
    """A distance, before its outlier and clusters are looked for."""

    matrix: Values  # (site, site)
    samples: Values  # (resample, site, site)
    p: Values
    chance: Values
    alone: Values  # (site,)

    @classmethod
    def empty(cls, *shape: int, sites: int, draws: int) -> "Found":
        square = (*shape, sites, sites)
        return cls(
            np.zeros(square), np.zeros((*shape, draws, sites, sites)), np.ones(square), np.zeros(square),
            np.ones((*shape, sites)),
        )  # fmt: skip

    def put(self, i: int, j: int, matrix: Any, samples: Any, p: Any, chance: Any) -> None:
        for at in ((..., i, j), (..., j, i)):
            self.matrix[at], self.samples[at], self.p[at], self.chance[at] = matrix, samples, p, chance


def _metadata(
    heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]
) -> tuple[dict[str, Quantity], Found]:
    names, sites = list(next(iter(heard.values()))["quantiles"]), list(heard)
    laws = [np.stack([r["quantiles"][n] for n in names]) for r in heard.values()]
    spread = _pooled(laws, [r["cases"] for r in heard.values()])
    scale = np.where(spread > 0, spread, 1.0) if settings.scale == "pooled" else np.ones(len(names))
    laws = [law / scale[:, None] for law in laws]
    matrices = earth_movers(laws)
    found = Found.empty(len(names), sites=len(sites), draws=settings.resamples)
    only, widths = {"emd": earth_movers_of}, np.ones(len(names))
    # as many deals as it takes for the smallest p to remain one after all corrections
    draws = max(settings.permutations, min(40 * len(names) * len(sites) ** 2 // 2, MOST))
    for (i, a), (j, b) in combinations(enumerate(sites), 2):
        p, chance = support.permuted(laws[i], laws[j], only, widths, draws)["emd"]
        again = support.resampled(laws[i], laws[j], (drawn[a], drawn[b]), only, widths)["emd"]
        found.put(i, j, matrices[:, i, j], again, p, chance)

    def test(i: int, others: Sequence[int]) -> float:
        found.alone[:, i] = support.permuted(laws[i], _together(laws, others), only, widths, draws)["emd"][0]
        return float(support.simes(found.alone[:, i]))

    chosen = [names.index(n) for n in _chosen(names, matrices)]
    alone = _set_apart(matrices[chosen].mean(0), test)
    metric = next(iter(heard.values()))["metric"]
    quantities = {}
    for k, n in enumerate(names):
        values = {i: r["quantiles"][n] for i, r in heard.items()}
        each = dict(zip(sites, found.alone[k].tolist(), strict=True))
        quantities[n] = _quantity(n, metric, scale[k], values, matrices[k], found.p[k], each)
    return quantities, Found(
        matrices[chosen].mean(0),
        found.samples[chosen].mean(0),
        support.simes(found.p),  # that they differ in any quantity
        found.chance[chosen].mean(0),
        alone,
    )


def _set_apart(matrix: Values, test: Callable[[int, Sequence[int]], float]) -> Values:
    """p that a site differs from the others together, site by site.

    One that is far out makes every other differ from "the others": so the most distant of those that differ is set
    apart, and the rest is tested again without it, until nobody is found to differ or two are left.
    """
    left, p = list(range(len(matrix))), np.ones(len(matrix))
    while True:
        for i in left:
            p[i] = test(i, [j for j in left if j != i])
        found = [i for i in left if p[i] * 2 * len(matrix) <= LEVEL]  # as strict as what follows from it
        if not found or len(left) <= 2:
            return p
        left.remove(max(found, key=lambda i: (remoteness(matrix[np.ix_(left, left)], left.index(i)), -i)))


def remoteness(matrix: Values, i: int) -> float:
    """How many times as far a site is from the others as these are from one another, on average.

    >>> remoteness(np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 3.0], [3.0, 3.0, 0.0]]), 2)
    3.0
    """
    count = len(matrix)
    if count < 3:
        return 1.0
    rest = np.delete(np.delete(matrix, i, 0), i, 1)
    usual = rest.sum() / ((count - 1) * (count - 2))
    return float(matrix[i].sum() / (count - 1) / usual) if usual else float("inf")


def _together(laws: Sequence[Values], which: Sequence[int]) -> Values:
    """Several hospitals as one; no longer than it must be."""
    return np.stack([slices(row, 256) for row in np.concatenate([laws[k] for k in which], axis=1)])


def _chosen(names: Sequence[str], matrices: Values) -> list[str]:
    """f_I and f_L, or the one of them that there is."""
    size = {n: _over_pairs(m) for n, m in zip(names, matrices, strict=True)}
    kinds = [[n for n in names if n.startswith(INTENSITY)], [n for n in names if not n.startswith(INTENSITY)]]
    return [max(group, key=size.__getitem__) for group in kinds if group]


def _quantity(
    name: str,
    metric: float,
    scale: float,
    values: Mapping[SiteId, Values],
    matrix: Values,
    p: Values,
    alone: Mapping[SiteId, float],
) -> Quantity:
    kind, _, of = name.partition(" ")
    unit = {INTENSITY: "as stored", VOLUME: {3: "mL", 2: "cm²"}.get(int(metric), "1000 voxels"), CLASS: "share"}[kind]
    return Quantity(name, kind, of, unit, float(scale), values, matrix, p, alone)


def _embeddings(heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]) -> dict[str, Found]:
    sites = list(heard)
    laws = [r["directions"]["embedding"] for r in heard.values()]
    widths = _pooled(laws, [r["cases"] for r in heard.values()])
    found = {n: Found.empty(sites=len(sites), draws=settings.resamples) for n in SQUARES}
    for (i, a), (j, b) in combinations(enumerate(sites), 2):
        tested = support.permuted(laws[i], laws[j], SQUARES, widths, settings.permutations)
        again = support.resampled(laws[i], laws[j], (drawn[a], drawn[b]), SQUARES, widths)
        once = np.ones((1, laws[i].shape[1])), np.ones((1, laws[j].shape[1]))
        seen = support.resampled(laws[i], laws[j], once, SQUARES, widths)
        for name, each in found.items():
            here = exact = float(np.sqrt(seen[name].mean()))
            if name == "euclidean":  # the means themselves are known; the directions say how far they may be off
                exact = float(np.linalg.norm(_mean(heard[a]) - _mean(heard[b])))
            stretch = exact / here if here else 1.0
            p, chance = tested[name]
            samples = np.sqrt(again[name].mean(0)) * stretch
            each.put(i, j, exact, samples, support.simes(p), np.sqrt(chance.mean()) * stretch)

    def test(i: int, others: Sequence[int]) -> float:
        only = {"energy": SQUARES["energy"]}
        p, _ = support.permuted(laws[i], _together(laws, others), only, widths, settings.permutations)["energy"]
        return float(support.simes(p))

    found["energy"].alone[:] = _set_apart(found["energy"].matrix, test)
    return found


def _distance(name: str, sites: Sequence[SiteId], settings: Assess, found: Found) -> Distance:
    matrix, p = found.matrix, found.p
    low, high = support.interval(matrix, found.samples)
    upper = np.triu_indices(len(sites), 1)
    adjusted = np.ones_like(p)
    adjusted[upper] = holm(p[upper])
    adjusted = np.minimum(adjusted, adjusted.T)
    sums = found.samples.sum(-1)
    named = np.bincount(sums.argmax(-1), minlength=len(sites)) / len(sums)
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
        outlier=sites[cluster.outlier(matrix)],
        named=dict(zip(sites, named.tolist(), strict=True)),
        clusters=_names(sites, cluster.around_outlier(matrix, settings.take)),
        linked=_names(sites, groups),
        silhouette=silhouette,
    )


def _names(sites: Sequence[SiteId], groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(tuple(sites[i] for i in group) for group in groups)


def _pooled(laws: Sequence[Values], cases: Sequence[float]) -> Values:
    """The standard deviation of every quantity over all cases of the federation."""
    share = np.asarray(cases) / sum(cases)
    mean = sum(s * law.mean(1) for s, law in zip(share, laws, strict=True))
    square = sum(s * np.square(law - mean[:, None]).mean(1) for s, law in zip(share, laws, strict=True))
    return np.sqrt(square)  # type: ignore[no-any-return]


def _mean(reply: Payload) -> Values:
    return np.concatenate(list(reply["mean"].values()))


def _length(reply: Payload) -> int:
    return len(next(iter(reply["quantiles"].values())))


def _angles(heard: Mapping[SiteId, Payload]) -> dict[str, Values]:
    """Between the mean components of every two sites; small where the same component means the same thing."""
    names = list(next(iter(heard.values()))["mean"])
    return {n: np.array([[angle(a["mean"][n], b["mean"][n]) if a is not b else 0.0 for b in heard.values()]
                         for a in heard.values()]) for n in names}  # fmt: skip


def _over_pairs(matrix: Values) -> float:
    return float(matrix[np.triu_indices(len(matrix), 1)].mean())


def _odd(replies: Mapping[SiteId, Payload], settings: Assess) -> dict[SiteId, str]:
    """Replies that cannot be compared with the others, and why."""
    found = {i: problem for i, r in replies.items() if r["quantiles"] and (problem := _malformed(r, settings))}
    described = {i: r for i, r in replies.items() if r["quantiles"] and i not in found}
    if not described:
        return found
    usual = Counter(_form(r) for r in described.values()).most_common(1)[0][0]
    for i, r in described.items():
        for what, mine, theirs in zip(FORM, _form(r), usual, strict=True):
            if mine != theirs:
                found.setdefault(i, f"it has other {what} than most sites: {mine} instead of {theirs}"[:200])
    return found


def _form(reply: Payload) -> tuple[Any, ...]:
    """What must be the same at all hospitals."""
    parts = tuple((name, v.shape) for name, v in reply.get("mean", {}).items())
    return tuple(sorted(reply["quantiles"])), reply["metric"], reply.get("encoder", 0.0), parts


FORM = ("quantities", "units (3: millimetres, 0: voxels)", "encoder weights", "embedding")


def _malformed(reply: Payload, settings: Assess) -> str | None:
    """What no honest site can have sent."""
    length = min(int(reply["cases"]), settings.levels)
    if reply["cases"] < settings.fewest:
        return f"it describes {int(reply['cases'])} cases, fewer than assess.fewest = {settings.fewest}"
    for name, values in reply["quantiles"].items():
        if name.partition(" ")[0] not in (INTENSITY, VOLUME, CLASS):
            return f"there is no quantity called {name!r}"
        if values.shape != (length,) or (np.diff(values) < 0).any():
            return f"the quantiles of {name!r} are not {length} ascending numbers"
        if not name.startswith(INTENSITY) and values[0] < 0:
            return f"the quantiles of {name!r} are negative"
    if not settings.projections:
        return None
    along = reply["directions"].get("embedding")
    if along is None or along.shape != (settings.projections, length) or (np.diff(along) < 0).any():
        return f"the embedding is not {length} ascending numbers along each of {settings.projections} directions"
    if not reply["mean"] or any(v.ndim != 1 for v in reply["mean"].values()):
        return "the mean of the embedding is not a list of numbers"
    if reply["angles"].keys() != reply["mean"].keys() or any(v.shape != (length,) for v in reply["angles"].values()):
        return f"the angles are not {length} numbers for every component"
    return None


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
