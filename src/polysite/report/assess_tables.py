"""Tables of an assessment, on its page and in the terminal: hospitals, quantities, distances, tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from polysite.heterogeneity.assessment import LEVEL, METADATA, TESTED, Assessment, Distance, Groups
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.distances import Values
from polysite.heterogeneity.verdict import LISTED, some, tests
from polysite.report.assess_figures import MANY, SOME, STAR, decimals, outlier
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.paired_tests import p_value

MAX_PAIRS = 30  # the most distant ones are listed, if there are too many for all
MAX_GROUPS = 6  # that are described, of more than LISTED hospitals
SHORT = {"emd": "Earth Mover's", "euclidean": "Euclidean", "energy": "energy"}
SHORT |= {"shift": "shift", "centre": "mean embedding"}


def by_site(assessment: Assessment) -> Grid:
    """Return the hospitals: typical values of the quantities in which they differ most, and whether one stands out."""
    shown = [q for q in (assessment.largest(INTENSITY), assessment.largest(VOLUME, CLASS)) if q]
    middle = "mean" if assessment.noise else "median"
    units = {q.name: f" ({q.unit})" * (q.kind == VOLUME) for q in shown}
    heads = [f"share of {q.of}" if q.kind == CLASS else f"{middle} {q.of}{units[q.name]}" for q in shown]
    kinds = [kind for kind in TESTED if kind in assessment.distances]
    heads += [f"p, {'metadata' if kind in METADATA else 'embeddings'}" for kind in kinds]
    p, lines = tests(assessment), []
    for site, cases in assessment.cases.items():
        cells = [name(site), number(cases, "d")]
        for q in shown:
            values = q.values.get(site)
            typical = np.mean if q.kind == CLASS else np.median
            absent = Cell("–") if values is None else Cell("absent")
            cells += [absent if values is None or not values.any() else number(float(typical(values)), ".4g")]
        found = [p[kind, site] for kind in kinds if (kind, site) in p]
        differs = "yes" if min(found, default=1.0) <= LEVEL else "not shown"
        cells += [_chance(value) for value in found] or [Cell("–")] * len(kinds)
        lines.append(Line((*cells, name(differs if found else "–"))))
    head = ("hospital", "cases", *heads, "differs")
    note = (
        "p-values that a hospital differs from all others together, adjusted for all hospitals and both kinds of "
        f"evidence (Holm); p ≤ {LEVEL:g} counts as significant."
    )
    return Grid("hospitals", "Hospitals", head, tuple(lines), note)


def quantities(assessment: Assessment) -> Grid:
    """Return every quantity: how far apart hospitals are in it, and which of them differ from all others."""
    kind = "shift" if assessment.noise else "EMD"
    largest = {"maxI": assessment.largest(INTENSITY), "maxL": assessment.largest(VOLUME, CLASS)}
    roles = {quantity.name: f"{kind}_{role}" for role, quantity in largest.items() if quantity}
    lines = []
    for q in assessment.quantities.values():
        apart = [site for site in assessment.sites if assessment.stands_out(q, site)]
        divided = dict.fromkeys(f"{f(q.divisors.values()):.4g}" for f in (min, max))
        role, mean = roles.get(q.name, ""), Cell(f"{q.mean:.3f}", q.mean, q.name in roles)
        words = map(name, (role, " to ".join(divided), q.unit, some(apart) or "–"))
        lines.append(Line((name(q.name), mean, *words)))
    head = ("quantity", f"{kind} over all pairs", "", "divided by", "unit", "differ from all others")
    return Grid("quantities", "Quantity by quantity", head, tuple(lines))


def matrix(assessment: Assessment, distance: Distance) -> Grid:
    """Return the distances of all hospitals, with their sums."""
    digits, rows = decimals(distance.matrix) + 1, []
    for i, site in enumerate(assessment.sites):
        rows.append(Line((name(site), *(_apart(distance, (i, j), digits) for j in range(len(assessment.sites))))))
    far = outlier(assessment, distance)
    sums = (Cell(f"{distance.sums[s]:.{digits}f}", distance.sums[s], s == far) for s in assessment.sites)
    head = ("", *assessment.sites)
    error = " ±: standard error by noise." if distance.error is not None else ""
    note = f"{STAR}: the two differ significantly. Sum: of the distances to the others.{error}"
    title = _capital(distance.title)
    return Grid(f"matrix_{distance.name}", title, head, (*rows, Line((name("Sum"), *sums), "total")), note)


def _apart(distance: Distance, at: tuple[int, int], digits: int) -> Cell:
    if at[0] == at[1]:
        return Cell("–")
    value, starred = float(distance.matrix[at]), bool(distance.adjusted[at] <= LEVEL)
    noise = f" ± {distance.error[at]:.{digits}f}" if distance.error is not None else ""
    return Cell(f"{value:.{digits}f}{noise}{f' {STAR}' * starred}", value, starred)


def pairs(assessment: Assessment, distance: Distance) -> Grid:
    """Return the pairs of hospitals, the most distant first: distance, interval and test."""
    digits, lines = decimals(distance.matrix) + 1, []
    for at in _couples(assessment, distance.matrix):
        low, high, by_chance = (f"{values[at]:.{digits}f}" for values in (distance.low, distance.high, distance.chance))
        adjusted, span = _chance(distance.adjusted[at]), name(f"{low} to {high}")
        first = name(_pair(assessment, at)), _apart(distance, at, digits)
        lines.append(Line((*first, span, name(by_chance), p_value(float(distance.p[at])), adjusted)))
    head = ("hospitals", "distance", "95 % interval", "by chance", "p", "adjusted p")
    count = len(assessment.sites)
    every = f"all {len(lines)} pair{'s' * (len(lines) > 1)}" if count <= MANY else f"the {MAX_PAIRS} most distant pairs"
    title = f"{_capital(distance.title)}: {every}, with intervals and tests"
    return Grid(f"pairs_{distance.name}", title, head, tuple(lines))


def agreement(assessment: Assessment) -> Grid:
    """Return for every distance the most distant hospital and the groups of hospitals."""
    lines = []
    for d in assessment.distances.values():
        silhouette = f" ({d.silhouette:.2f})" if len(d.linked) > 1 else ""
        words = f"{d.outlier} ({d.named[d.outlier]:.0%})", groups(d.clusters), groups(d.linked) + silhouette
        lines.append(Line(tuple(map(name, (SHORT[d.name], *words)))))
    head = ("distance", "most distant", "groups around it", "groups by linkage")
    note = "In brackets: the share of the resamples in which this hospital is the most distant; the silhouette."
    return Grid("agreement", "By distance", head, tuple(lines), note)


def groups(clusters: Groups) -> str:
    """Describe groups of hospitals; of many hospitals, the largest group is described by its size.

    >>> groups((("a", "b"), ("c",))), groups((tuple("abcdefgh"), ("i",)))
    ('{a, b} and {c} alone', '{i} alone and the 8 others')
    >>> groups((("a", "b"),)), groups((("a",), ("b",)))
    ('none: all form one group', 'none: each alone')
    """
    if len(clusters) < 2:
        return "none: all form one group"
    if all(len(members) == 1 for members in clusters):
        return "none: each alone"
    named, rest = list(clusters), ""
    if sum(map(len, named)) > SOME:
        largest = max(named, key=len)
        named.remove(largest)
        rest = f" and the {len(largest)} others"
    large = sum(map(len, clusters)) > LISTED
    if large and len(named) > MAX_GROUPS:
        named, rest = named[:MAX_GROUPS], f" and {len(named) - MAX_GROUPS} more groups{rest}"
    return " and ".join("{" + some(members) + "}" + " alone" * (len(members) == 1) for members in named) + rest


def _chance(p: float) -> Cell:
    """Return a cell with an adjusted p-value, and a star if it is significant."""
    significant = bool(p <= LEVEL)
    return replace(p_value(float(p), f" {STAR}" * significant), best=significant)


def _couples(assessment: Assessment, matrix: Values) -> Sequence[tuple[int, int]]:
    """Return all pairs, or the most distant ones, as indices of a matrix; the most distant come first."""
    every = sorted(combinations(range(len(assessment.sites)), 2), key=lambda pair: -float(matrix[pair]))
    return every if len(assessment.sites) <= MANY else every[:MAX_PAIRS]


def _pair(assessment: Assessment, at: tuple[int, int]) -> str:
    return f"{assessment.sites[at[0]]} – {assessment.sites[at[1]]}"


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
