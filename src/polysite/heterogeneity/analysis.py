"""Analysis of the replies of an assessment: distances between hospitals, their significance, outliers and groups.

Under differential privacy distances come from sums under noise (``noisy.py``), else from the lists of every hospital:

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024; distances beyond the paper's two are
computed on the same embeddings.

    D_f[i,j]   Earth Mover's distance between sites i and j in quantity f, over a standard deviation of f: that of all
               cases (``scale = "pooled"``), or, as the paper's numbers imply, that of the cases of site i alone, i
               before j in the natural order of the names (``scale = "first"``)
    EMD_f      mean of D_f over the pairs; f_I and f_L: the modality and the label for which it is largest
    emd        (D_{f_I} + D_{f_L}) / 2, or the mean of all D_f (``combine = "mean"``)
    euclidean  distance between the mean embeddings
    energy     root of the mean, over random directions, of the squares in distances.py
    outlier    the site with the largest sum of distances to the others
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import get_args, get_type_hints
from zlib import crc32

import numpy as np

from polysite.cluster import distance as cluster
from polysite.errors import DataError
from polysite.heterogeneity import assessment, noisy, significance
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.distances import SQUARES, Values, angle, earth_movers, earth_movers_of, slices
from polysite.heterogeneity.exchange import Assess, component, left, odd
from polysite.metrics.statistics import holm
from polysite.payload import Payload, SiteId, natural

MAX_VALUES = 256  # of the list that represents several sites
SCALES, COMBINES = (get_args(get_type_hints(Assess)[name]) for name in ("scale", "combine"))
UNITS = {3: "mL", 2: "cm²"}


def analyse(replies: Mapping[SiteId, Payload], settings: Assess, encoder: str = "") -> assessment.Assessment:
    """Compare the hospitals that replied; ``encoder`` describes the encoder."""
    replies = {i: replies[i] for i in natural(replies)}
    by, refused = settings.describes, odd(replies, settings)
    heard = {i: r for i, r in replies.items() if r[by] and i not in refused}
    if len(replies) < 2:
        raise DataError("an assessment compares hospitals, and there is only one")
    if len(heard) < 2:
        raise DataError(
            f"an assessment compares hospitals, and {len(heard)} of {len(replies)} can be described: "
            + (next(iter(refused.values())) if refused else f"a site needs {settings.fewest} cases (assess.fewest)")
        )
    sites = tuple(heard)
    quantities, distances, more = (noisy.compare if settings.private.on else _compare)(heard, settings)
    return assessment.Assessment(
        sites=sites,
        cases={i: int(r["cases"]) for i, r in replies.items()},
        quantities=quantities,
        distances={name: _distance(name, sites, settings, found) for name, found in distances.items()},
        angles=_angles(heard),
        alignment={i: dict(r["angles"]) for i, r in heard.items() if "angles" in r},
        unlabelled={i: int(r.get("unlabelled", 0)) for i, r in heard.items()},
        left={i: (r.nbytes, "what was refused" if i in refused else left(r)) for i, r in replies.items()},
        silent=tuple(i for i, r in replies.items() if not r[by]),
        refused=refused,
        settings=settings,
        encoder=encoder if settings.projections else "",
        **more,
    )


def _distance(name: str, sites: Sequence[SiteId], settings: Assess, found: assessment.Tested) -> assessment.Distance:
    """Return a distance with its outlier and clusters."""
    matrix, p = found.matrix, found.p
    low, high = significance.interval(matrix, found.upper, p)
    upper = np.triu_indices(len(sites), 1)
    adjusted = np.ones_like(p)
    adjusted[upper] = holm(p[upper])
    adjusted = np.minimum(adjusted, adjusted.T)
    named = np.bincount(found.sums.argmax(-1), minlength=len(sites)) / len(found.sums)
    groups, silhouette = cluster.linked(matrix)
    return assessment.Distance(
        name=name,
        matrix=matrix,
        low=low,
        high=high,
        p=p,
        adjusted=adjusted,
        chance=found.chance,
        alone=dict(zip(sites, found.alone.tolist(), strict=True)) if name in assessment.TESTED else {},
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


def _names(sites: Sequence[SiteId], groups: Sequence[Sequence[int]]) -> assessment.Groups:
    return tuple(tuple(sites[i] for i in group) for group in groups)


def _compare(heard: Mapping[SiteId, Payload], settings: Assess) -> assessment.Compared:
    lengths = {i: len(next(iter(r["quantiles"].values()))) for i, r in heard.items()}
    drawn = {i: significance.counts(i, length, settings.resamples) for i, length in lengths.items()}
    quantities, metadata, alternatives = _metadata(heard, settings, drawn)
    embeddings = _embeddings(heard, settings, drawn) if settings.projections else {}
    return quantities, {"emd": metadata, **embeddings}, {"alternatives": {"emd": alternatives}}


def _farthest(matrix: Values) -> list[tuple[int, int]]:
    """Return the most distant pairs of a large federation, which are tested with many permutations."""
    if len(matrix) <= assessment.LARGE:
        return []
    rows, columns = np.triu_indices(len(matrix), 1)
    order = np.argsort(-matrix[rows, columns], kind="stable")[: assessment.FINE]
    return list(zip(rows[order].tolist(), columns[order].tolist(), strict=True))


def _metadata(
    heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]
) -> tuple[dict[str, assessment.Quantity], assessment.Tested, dict[str, SiteId]]:
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
    # enough permutations for the smallest p to stay significant after all corrections
    draws = max(settings.permutations, min(40 * len(names) * len(sites) ** 2 // 2, assessment.MAX_PERMUTATIONS))

    def mean(scale: str, combine: str) -> tuple[list[str], Values]:
        return assessment.combined(dict(zip(names, plain * factors[scale], strict=True)), combine)

    chosen, distance = mean(settings.scale, settings.combine)
    picked = [names.index(n) for n in chosen]
    each = np.ones((len(names), len(sites), len(sites)))  # p of every quantity
    alone = np.ones((len(names), len(sites)))
    found = assessment.Tested.empty(len(sites), settings.resamples)

    def compare(i: int, j: int, draws: int) -> Values:
        p, chance = significance.permuted(laws[i], laws[j], earth_movers_of, draws)
        each[:, i, j] = each[:, j, i] = p
        found.p[i, j] = found.p[j, i] = significance.simes(p)  # that two sites differ in any quantity
        return chance

    def pair(i: int, j: int) -> assessment.Pair:
        chance = compare(i, j, draws if len(sites) <= assessment.LARGE else significance.FIRST - 1)
        drawn_pair = drawn[sites[i]], drawn[sites[j]]
        again = significance.resampled(laws[i][picked], laws[j][picked], drawn_pair, earth_movers_of)
        ratio = rescale[picked, i, j]
        samples, by_chance = (again * ratio[:, None]).mean(0), float((chance[picked] * ratio).mean(0))
        return distance[i, j], samples, found.p[i, j], by_chance

    for i in range(len(sites) - 1):
        found.put(i, [pair(i, j) for j in range(i + 1, len(sites))])
    for i, j in _farthest(distance):
        compare(i, j, assessment.fine(len(sites)))

    def test(i: int, others: Sequence[int]) -> float:
        rest = _together(laws, cases, others)
        alone[:, i], _ = significance.permuted(laws[i], rest, earth_movers_of, draws)
        return float(significance.simes(alone[:, i]))

    together = found.set_apart(test)
    metric = next(iter(heard.values()))["metric"]
    quantities = {}
    for k, n in enumerate(names):
        values = {i: r["quantiles"][n] for i, r in heard.items()}
        by_site = dict(zip(sites, alone[k].tolist(), strict=True))
        absent = {i: int(r["absent"][n].item()) for i, r in heard.items()}
        kind, _, of = n.partition(" ")
        words = {INTENSITY: "as stored", VOLUME: UNITS.get(int(metric), "1000 voxels"), CLASS: "share"}[kind]
        divided = dict(zip(sites, divisors[settings.scale][k].tolist(), strict=True))
        quantities[n] = assessment.Quantity(n, kind, of, words, divided, values, absent, matrices[k], each[k], by_site)
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


def _together(laws: Sequence[Values], cases: Sequence[float], which: Sequence[int]) -> Values:
    """Pool several hospitals, with equal weight for every case, in a list of limited length."""
    heavy = np.concatenate([np.full(laws[k].shape[1], cases[k] / laws[k].shape[1]) for k in which])
    rows = np.concatenate([laws[k] for k in which], axis=1)
    weights = None if (heavy == 1).all() else heavy
    return np.stack([slices(row, MAX_VALUES, weights) for row in rows])


def _embeddings(
    heard: Mapping[SiteId, Payload], settings: Assess, drawn: Mapping[SiteId, Values]
) -> dict[str, assessment.Tested]:
    sites = list(heard)
    laws, cases = [r["directions"]["embedding"] for r in heard.values()], [r["cases"] for r in heard.values()]
    draws = max(settings.permutations, min(20 * len(sites) ** 2, assessment.MAX_PERMUTATIONS))
    large = len(sites) > assessment.LARGE
    fewer = (
        settings.permutations
        if len(sites) <= assessment.MANY
        else assessment.CHANCE
        if large
        else significance.FIRST - 1
    )
    counts = {"euclidean": fewer, "energy": significance.FIRST - 1 if large else draws}
    found = {n: assessment.Tested.empty(len(sites), settings.resamples) for n in SQUARES}

    def pair(i: int, j: int) -> dict[str, assessment.Pair]:
        a, b = sites[i], sites[j]
        once = np.ones((1, laws[i].shape[1])), np.ones((1, laws[j].shape[1]))
        pairs: dict[str, assessment.Pair] = {}
        for name, statistic in SQUARES.items():
            again, seen = (
                significance.resampled(laws[i], laws[j], each, statistic) for each in ((drawn[a], drawn[b]), once)
            )
            here = exact = float(np.sqrt(seen.mean()))
            if name == "euclidean":  # the means are known exactly; the directions give their variation
                exact = float(np.linalg.norm(_mean(heard[a]) - _mean(heard[b])))
            stretch = exact / here if here else 1.0
            p, chance = significance.permuted(laws[i], laws[j], statistic, counts[name])
            samples = np.sqrt(again.mean(0)) * stretch
            pairs[name] = exact, samples, float(significance.simes(p)), float(np.sqrt(chance.mean()) * stretch)
        return pairs

    for i in range(len(sites) - 1):
        row = [pair(i, j) for j in range(i + 1, len(sites))]
        for name, each in found.items():
            each.put(i, [pairs[name] for pairs in row])
    energy = found["energy"]
    for i, j in _farthest(energy.matrix):
        p, _ = significance.permuted(laws[i], laws[j], SQUARES["energy"], assessment.fine(len(sites)))
        energy.p[i, j] = energy.p[j, i] = significance.simes(p)

    def test(i: int, others: Sequence[int]) -> float:
        p, _ = significance.permuted(laws[i], _together(laws, cases, others), SQUARES["energy"], draws)
        return float(significance.simes(p))

    return {**found, "energy": energy.set_apart(test)}


def _pooled(laws: Sequence[Values], cases: Sequence[float]) -> Values:
    """Return the standard deviation of every quantity over all cases of the federation."""
    share = np.asarray(cases) / sum(cases)
    mean = sum(s * law.mean(1) for s, law in zip(share, laws, strict=True))
    square = sum(s * np.square(law - mean[:, None]).mean(1) for s, law in zip(share, laws, strict=True))
    return np.sqrt(square)  # type: ignore[no-any-return]


def _mean(reply: Payload) -> Values:
    return np.concatenate(list(reply["mean"].values()))


def _angles(heard: Mapping[SiteId, Payload]) -> dict[str, Values]:
    """Return, for every component of the embedding, the matrix of angles (degrees) between the sites' mean vectors.

    A small angle shows that the component has the same meaning at both sites.
    """
    names = list(next(iter(heard.values())).get("mean", {}))
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
