"""The page of an assessment: strategies, findings, their evidence, and all numbers.

A clinician can stop after the strategies; a data scientist finds every number below.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from polysite.heterogeneity.assessment import (
    LARGE,
    LEVEL,
    METADATA,
    ROUNDS,
    TESTED,
    Assessment,
    Distance,
    Groups,
    at_once,
)
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.distances import Values
from polysite.heterogeneity.verdict import LISTED, Finding, Verdict, some, tests
from polysite.report import assess_figures as draw
from polysite.report.figure_files import Picture, write_figures
from polysite.report.template import render

FIRST = ("emd", "euclidean", "shift", "centre")  # the distances of the paper, or those under noise, shown large
MAX_PAIRS = 30  # the most distant ones are listed, if there are too many for all
MAX_GROUPS = 6  # that are described, of more than LISTED hospitals
BESIDE = ("assessment.json", "distances.csv")  # files that the page mentions if they exist
SHORT = {"emd": "Earth Mover's", "euclidean": "Euclidean", "energy": "energy"}
SHORT |= {"shift": "shift", "centre": "mean embedding"}
EXPLAINED = {
    "emd": "How far the values of one hospital must be moved, on average, to become those of the other: the mean over ",
    "euclidean": "Distance between the mean embeddings of two hospitals",
    "energy": "Compares the distributions of the embeddings, not only their means: zero only if both are the same",
    "shift": "How far the mean values of two hospitals are apart, under noise: the mean over ",
    "centre": "Distance between the mean embeddings of two hospitals, without what noise adds on average",
}
EVIDENCE = {
    "clear": "p ≤ 0.01: chance alone does this at most once in a hundred times",
    "likely": "p ≤ 0.05: chance alone does this at most once in twenty times",
    "thin": "too few cases to be sure",
}


def write(folder: Path, assessment: Assessment, verdict: Verdict, about: Mapping[str, Any]) -> Path:
    """Write the self-contained ``index.html`` and its figures; ``about`` is printed at the end."""
    heatmaps, maps = _heatmaps(assessment), _maps(assessment)
    held, angles, case_angles = _held(assessment), _angles(assessment, False), _angles(assessment, True)
    write_figures(folder / "figures", [*heatmaps, *maps, *([held] if held else []), *angles, *case_angles])
    page = folder / "index.html"
    text = render(
        "assess.html",
        title="How the hospitals differ, and which strategies fit",
        lead=verdict.summary,
        verdict=verdict,
        assessment=assessment,
        findings=_by_site(verdict.findings),
        evidence=EVIDENCE,
        site_tests=_site_tests(assessment),
        heatmaps=heatmaps,
        maps=maps,
        held=held,
        angles=angles,
        case_angles=case_angles,
        quantities=list(_quantities(assessment)),
        tables=[_pairs(assessment, assessment.distances[name]) for name in FIRST if name in assessment.distances],
        matrices=[_matrix(assessment, assessment.distances[name]) for name in FIRST if name in assessment.distances],
        all_pairs=len(assessment.sites) <= draw.MANY,
        most_pairs=MAX_PAIRS,
        short=SHORT,
        tests=list(_tests(assessment)),
        named=[_named(d) for d in assessment.distances.values()],
        ranks=_ranks(assessment),
        left=_left(assessment),
        settings=asdict(assessment.settings),
        about=about,
        beside=[name for name in BESIDE if (folder / name).exists()],
        columns=2 if len(assessment.sites) <= draw.SOME else 1,
        grouped=len(assessment.sites) > LARGE,
        at_once=at_once(len(assessment.sites)),
        rounds=ROUNDS,
        labelled=draw.LABELLED,
    )
    page.write_text(text, encoding="utf-8")
    return page


def _left(assessment: Assessment) -> list[tuple[list[str], str, str, str]]:
    """Return what left the hospitals: those that sent the same together, by their number of cases."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for site, (size, words) in assessment.left.items():
        key = (str(assessment.cases.get(site, "not known")), amount(size), words)
        alike.setdefault(key, []).append(site)
    return [(sites, *key) for key, sites in sorted(alike.items(), key=lambda each: (len(each[0][0]), each[0]))]


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
    if sum(map(len, named)) > draw.SOME:
        largest = max(named, key=len)
        named.remove(largest)
        rest = f" and the {len(largest)} others"
    large = sum(map(len, clusters)) > LISTED
    if large and len(named) > MAX_GROUPS:
        named, rest = named[:MAX_GROUPS], f" and {len(named) - MAX_GROUPS} more groups{rest}"
    return " and ".join("{" + some(members) + "}" + " alone" * (len(members) == 1) for members in named) + rest


def probability(p: float) -> str:
    """Format a p-value.

    >>> probability(0.0124), probability(0.0004), probability(1.0)
    ('0.012', '< 0.001', '1')
    """
    return "< 0.001" if p < 0.001 else "1" if p > 0.9995 else f"{p:.3f}"


def amount(count: int) -> str:
    """Format a number of bytes.

    >>> amount(24), amount(16_136), amount(2_400_000)
    ('24 bytes', '16.1 kB', '2.4 MB')
    """
    return f"{count} bytes" if count < 1000 else f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def _site_tests(assessment: Assessment) -> dict[str, Any]:
    """Return the adjusted p-values that a hospital differs, by metadata and by embeddings."""
    p, kinds = tests(assessment), [name for name in TESTED if name in assessment.distances]
    columns, rows = [f"p, {'metadata' if name in METADATA else 'embeddings'}" for name in kinds], []
    for site in assessment.sites:
        own = [p[name, site] for name in kinds]
        given = {"p": list(map(probability, own)), "differs": min(own) <= LEVEL}
        rows.append({"site": site, "cases": assessment.cases[site], **given})
    return {"columns": columns, "rows": rows}


def _by_site(findings: tuple[Finding, ...]) -> dict[str, list[str]]:
    """Return the findings of every hospital, then those of the federation."""
    sites = dict.fromkeys(f.site for f in findings if f.site is not None)
    texts = {site: [f.text for f in findings if f.site == site] for site in sites}
    whole = [f.text for f in findings if f.site is None]
    return {**texts, "all together": whole} if whole else texts


def _heatmaps(assessment: Assessment) -> list[Picture]:
    """Draw the main distances large, the others small."""
    shown = []
    for name, distance in assessment.distances.items():
        figure = draw.heatmap(assessment, distance, small=name not in FIRST)
        title = distance.title[0].upper() + distance.title[1:]
        file = f"distances-{name}"
        svg = draw.drawing(figure, file, f"{title} between all hospitals, as a table of colours")
        caption = f"{EXPLAINED[name]}{_unit(assessment, name)}.\n{_outcome(assessment, distance)}"
        shown.append(Picture(title, svg, caption, narrow=name not in FIRST, name=file))
    return shown


def _unit(assessment: Assessment, name: str) -> str:
    if name not in METADATA:
        return ""
    unit = {
        "pooled": "in standard deviations over all cases",
        "first": "in standard deviations of the hospital that comes first in the order of names",
        "none": "in units as stored",
    }[assessment.settings.scale]
    if assessment.settings.combine == "mean":
        return f"all {len(assessment.quantities)} quantities, {unit}"
    chosen = [q for q in (assessment.largest(INTENSITY), assessment.largest(VOLUME, CLASS)) if q]
    most = "the one modality and the one label in which the hospitals differ most"
    return f"{most} ({' and '.join(q.name for q in chosen)}), {unit}"


def _outcome(assessment: Assessment, distance: Distance) -> str:
    if len(assessment.sites) < 3:
        return "With two hospitals, neither is more distant."
    share = f"{distance.named[distance.outlier]:.0%} of the resamples"
    other = {s: site for s, site in assessment.alternatives.get(distance.name, {}).items() if site != distance.outlier}
    instead = f"; {' and '.join(f'{site} with {setting}' for setting, site in other.items())}" if other else ""
    linked = groups(distance.linked) + (f" (silhouette {distance.silhouette:.2f})" if len(distance.linked) > 1 else "")
    return (
        f"Most distant: {distance.outlier}, in {share}{instead}.\nGroups around it: {groups(distance.clusters)}.\n"
        f"Groups by average linkage: {linked}."
    )


def _maps(assessment: Assessment) -> list[Picture]:
    """Draw a map and a tree of each main distance."""
    shown = []
    for distance in (assessment.distances[name] for name in FIRST if name in assessment.distances):
        name, words = distance.name, f"of the hospitals by the {distance.title}"
        share = draw.places(distance.matrix)[1]
        kept = f"The map reproduces {share:.0%} of the squared distances."
        svg = draw.drawing(draw.plane(assessment, distance), f"map-{name}", f"Map {words}")
        shown.append(Picture(f"Map by {SHORT[name]} distance", svg, kept, name=f"map-{name}"))
        svg = draw.drawing(draw.dendrogram(assessment, distance), f"tree-{name}", f"Tree {words}")
        apart = "Separate groups are coloured." if len(distance.linked) > 1 else "There are no separate groups."
        caption = apart if len(assessment.sites) > 2 else ""
        shown.append(Picture(f"Tree by {SHORT[name]} distance", svg, caption, name=f"tree-{name}"))
    return shown


def _held(assessment: Assessment) -> Picture | None:
    """Draw the distributions of all quantities; None if no lists left (noise)."""
    if assessment.noise:
        return None
    title, most = "Data of the hospitals", assessment.settings.levels
    svg = draw.drawing(draw.distributions(assessment), "distributions", f"{title}, quantity by quantity")
    few = max(assessment.cases[s] for s in assessment.sites) <= most
    if len(assessment.sites) > LARGE:
        caption = (
            "The line is the median of a hospital, in ascending order of the hospitals; the dark band spans the middle "
            "half of its cases, the light band all of them. Orange: the hospital differs significantly from all others "
            "together in this quantity. EMD: the mean Earth Mover's distance over all pairs of hospitals."
        )
        return Picture(title, svg, caption, name="distributions")
    caption = (
        f"One dot is one case{'' if few else f', or the mean of several if there are more than {most}'}; "
        "the line spans the middle half of the cases, the vertical mark is the median. "
        f"{'Bars are shares of the cases. ' * any(q.kind == CLASS for q in assessment.quantities.values())}"
        f"{draw.STAR} and orange: the hospital differs significantly from all others together in this quantity. "
        "EMD: the mean Earth Mover's distance over all pairs of hospitals."
    )
    return Picture(title, svg, caption, name="distributions")


def _angles(assessment: Assessment, cases: bool) -> list[Picture]:
    """Draw the angles of every component of the embedding: between the means of hospitals, or between random ``cases``,
    the paper's figure, which only a simulation can have."""
    shown, file, between = assessment.angles, "angles", "between and within hospitals"
    if cases:
        shown, file, between = assessment.case_angles, "case-angles", "between random cases of two hospitals"
    found = []
    for name in shown:
        at = f"{file}-{name.replace(' ', '-')}"
        svg = draw.drawing(draw.angles(assessment, name, cases), at, f"Angles of {name} {between}")
        found.append(Picture(name[0].upper() + name[1:], svg, "", name=at))
    return found


def _quantities(assessment: Assessment) -> Iterator[dict[str, Any]]:
    largest = {"maxI": assessment.largest(INTENSITY), "maxL": assessment.largest(VOLUME, CLASS)}
    roles = {quantity.name: role for role, quantity in largest.items() if quantity}
    for quantity in assessment.quantities.values():
        apart = [site for site in assessment.sites if assessment.stands_out(quantity, site)]
        ends = dict.fromkeys(f"{f(quantity.divisors.values()):.4g}" for f in (min, max))
        yield {
            "name": quantity.name,
            "mean": f"{quantity.mean:.3f}",
            "role": roles.get(quantity.name, ""),
            "scale": " to ".join(ends),
            "unit": quantity.unit,
            "apart": some(apart) or "–",
        }


def _couples(assessment: Assessment, matrix: Values) -> list[tuple[int, int]]:
    """Return all pairs, or the most distant ones, as indices of a matrix; the most distant come first."""
    every = sorted(combinations(range(len(assessment.sites)), 2), key=lambda pair: -float(matrix[pair]))
    return every if len(assessment.sites) <= draw.MANY else every[:MAX_PAIRS]


def _pairs(assessment: Assessment, distance: Distance) -> dict[str, Any]:
    digits = draw.decimals(distance.matrix) + 1

    def row(at: tuple[int, int]) -> dict[str, Any]:
        values = {key: f"{getattr(distance, key)[at]:.{digits}f}" for key in ("matrix", "low", "high", "chance")}
        chances = {key: probability(getattr(distance, key)[at]) for key in ("p", "adjusted")}
        if distance.error is not None:
            values["error"] = f"{distance.error[at]:.{digits}f}"
        return {"pair": _pair(assessment, at), "star": distance.adjusted[at] <= LEVEL, **values, **chances}

    return {"title": distance.title, "rows": [row(at) for at in _couples(assessment, distance.matrix)]}


def _matrix(assessment: Assessment, distance: Distance) -> dict[str, Any]:
    """Return the distances of all hospitals as a table, with a last row of their sums."""
    digits = draw.decimals(distance.matrix) + 1
    rows = [
        (site, ["–" if i == j else f"{value:.{digits}f}" for j, value in enumerate(distance.matrix[i])])
        for i, site in enumerate(assessment.sites)
    ]
    total = [(f"{distance.sums[s]:.{digits}f}", s == draw.outlier(assessment, distance)) for s in assessment.sites]
    return {"title": distance.title, "rows": rows, "sums": total}


def _tests(assessment: Assessment) -> Iterator[dict[str, Any]]:
    """Yield the adjusted p-values of every pair, by distance."""
    for at in _couples(assessment, assessment.metadata.matrix):
        adjusted = [d.adjusted[at] for d in assessment.distances.values()]
        yield {"pair": _pair(assessment, at), "cells": [(probability(p), bool(p <= LEVEL)) for p in adjusted]}


def _pair(assessment: Assessment, at: tuple[int, int]) -> str:
    return f"{assessment.sites[at[0]]} – {assessment.sites[at[1]]}"


def _named(distance: Distance) -> dict[str, str]:
    silhouette = f" ({distance.silhouette:.2f})" if len(distance.linked) > 1 else ""
    return {
        "name": SHORT[distance.name],
        "outlier": f"{distance.outlier} ({distance.named[distance.outlier]:.0%})",
        "clusters": groups(distance.clusters),
        "linked": groups(distance.linked) + silhouette,
    }


def _ranks(assessment: Assessment) -> list[tuple[str, list[str]]]:
    """Return Spearman's rank correlations of the distances over the pairs; empty if there is too little to compare."""
    from scipy.stats import spearmanr

    pairs = {n: d.matrix[np.triu_indices(len(assessment.sites), 1)] for n, d in assessment.distances.items()}
    if len(assessment.sites) < 3 or len(pairs) < 2:
        return []

    def cell(one: str, other: str) -> str:
        if one == other:
            return ""
        constant = min(np.ptp(pairs[one]), np.ptp(pairs[other])) == 0
        return "–" if constant else f"{float(spearmanr(pairs[one], pairs[other]).statistic):.2f}"

    return [(SHORT[one], [cell(one, other) for other in pairs]) for one in pairs]
