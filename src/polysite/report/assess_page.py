"""The page of an assessment: what to do, what was found, how sure that is, and everything it rests on.

It is for a clinician first, who may stop after the strategies, and for a data scientist, who finds every number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from polysite.heterogeneity.assessment import LEVEL, TESTED, Assessment, Distance, Groups, Quantity
from polysite.heterogeneity.distances import Values
from polysite.heterogeneity.exchange import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.verdict import Finding, Verdict, tests
from polysite.payload import SiteId
from polysite.report import assess_figures as draw
from polysite.report.page import Picture
from polysite.report.template import render

FIRST = ("emd", "euclidean")  # the paper's own: shown large
PAIRS = 30  # of the most distant, where there are too many hospitals to list them all
BESIDE = ("assessment.json", "distances.csv")  # files that may lie beside the page
SHORT = {"emd": "Earth Mover's", "euclidean": "Euclidean", "energy": "energy", "mmd": "MMD", "frechet": "Fréchet"}
EXPLAINED = {
    "emd": "How far the values of one hospital would have to be moved, on average, to become those of the other: "
    "the mean over the one modality and the one label in which the hospitals differ most",
    "euclidean": "How far apart the average scans of two hospitals are, in the eyes of the encoder",
    "energy": "Compares all scans of two hospitals, not only the average ones: it is zero only where they look alike "
    "in every respect",
    "mmd": "Also compares all scans, but counts what is usual and hardly what is extreme (maximum mean discrepancy)",
    "frechet": "Compares the average scans and how varied the scans are",
}
EVIDENCE = {
    "clear": "chance alone does this less than once in a hundred times",
    "likely": "chance alone does this less than once in twenty times",
    "thin": "too little is known to be sure",
}


def write(folder: Path, found: Assessment, verdict: Verdict, about: Mapping[str, Any]) -> Path:
    """Write ``index.html``, which needs nothing else, and its figures; ``about`` is printed at the end."""
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    text = render(
        "assess.html",
        title="How these hospitals differ, and what to do about it",
        lead=verdict.summary,
        verdict=verdict,
        found=found,
        findings=_by_site(verdict.findings),
        evidence=EVIDENCE,
        site_tests=_site_tests(found),
        heatmaps=_heatmaps(found, pictures),
        maps=_maps(found, pictures),
        held=_held(found, pictures),
        angles=_angles(found, pictures),
        quantities=list(_quantities(found)),
        tables=[_pairs(found, found.distances[name]) for name in FIRST if name in found.distances],
        all_pairs=len(found.sites) <= draw.MANY,
        most_pairs=PAIRS,
        short=SHORT,
        tests=list(_tests(found)),
        named=[_named(d) for d in found.distances.values()],
        ranks=_ranks(found),
        left=[
            (site, found.cases.get(site, "not known"), amount(size), words)
            for site, (size, words) in found.left.items()
        ],
        settings=asdict(found.settings),
        about=about,
        beside=[name for name in BESIDE if (folder / name).exists()],
        columns=2 if len(found.sites) <= draw.SOME else 1,
    )
    page.write_text(text, encoding="utf-8")
    return page


def groups(clusters: Groups) -> str:
    """In words; of many hospitals, the largest group is named by what it leaves out.

    >>> groups((("a", "b"), ("c",))), groups((("a", "b"),)), groups((tuple("abcdefgh"), ("i",)))
    ('{a, b} and {c}', 'none: all belong together', '{i} and the 8 others')
    """
    if len(clusters) < 2:
        return "none: all belong together"
    told, rest = list(clusters), ""
    if sum(map(len, told)) > draw.SOME:
        largest = max(told, key=len)
        told.remove(largest)
        rest = f" and the {len(largest)} others"
    return " and ".join("{" + ", ".join(members) + "}" for members in told) + rest


def probability(p: float) -> str:
    """
    >>> probability(0.0124), probability(0.0004), probability(1.0)
    ('0.012', '< 0.001', '1')
    """
    return "< 0.001" if p < 0.001 else "1" if p > 0.9995 else f"{p:.3f}"


def amount(count: int) -> str:
    """
    >>> amount(24), amount(16_136), amount(2_400_000)
    ('24 bytes', '16.1 kB', '2.4 MB')
    """
    return f"{count} bytes" if count < 1000 else f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def _site_tests(found: Assessment) -> dict[str, Any]:
    """What decides whether a hospital differs: its adjusted p by metadata and by embeddings."""
    p, kinds = tests(found), [name for name in TESTED if name in found.distances]
    columns = [f"p, {'metadata' if name == 'emd' else 'embeddings'}" for name in kinds]
    rows = [
        {
            "site": site,
            "cases": found.cases[site],
            "p": [probability(p[name, site]) for name in kinds],
            "differs": min(p[name, site] for name in kinds) <= LEVEL,
        }
        for site in found.sites
    ]
    return {"columns": columns, "rows": rows}


def _by_site(findings: tuple[Finding, ...]) -> dict[str, list[str]]:
    """What was found at every hospital, then in the federation."""
    sites = dict.fromkeys(f.site for f in findings if f.site is not None)
    found = {site: [f.text for f in findings if f.site == site] for site in sites}
    whole = [f.text for f in findings if f.site is None]
    return {**found, "all together": whole} if whole else found


def _heatmaps(found: Assessment, folder: Path) -> list[Picture]:
    """The paper's distances, then the others, smaller."""
    shown = []
    for name, distance in found.distances.items():
        figure = draw.heatmap(found, distance, small=name not in FIRST)
        title = distance.title[0].upper() + distance.title[1:]
        svg = draw.save(figure, folder, f"distances-{name}", f"{title} between all hospitals, as a table of colours")
        caption = f"{EXPLAINED[name]}{_unit(found, name)}.\n{_outcome(found, distance)}"
        shown.append(Picture(title, svg, caption, narrow=name not in FIRST))
    return shown


def _unit(found: Assessment, name: str) -> str:
    if name != "emd":
        return ""
    chosen = [q for q in (found.largest(INTENSITY), found.largest(VOLUME, CLASS)) if q]
    unit = "in standard deviations" if found.settings.scale == "pooled" else "in units as stored"
    return f" ({' and '.join(q.name for q in chosen)}), {unit}"


def _outcome(found: Assessment, distance: Distance) -> str:
    if len(found.sites) < 3:
        return "Of two hospitals, neither is the more distant one."
    share = f"{distance.named[distance.outlier]:.0%} of the resamples"
    linked = groups(distance.linked) + (f" (silhouette {distance.silhouette:.2f})" if len(distance.linked) > 1 else "")
    return (
        f"Most distant: {distance.outlier}, in {share}.\nGroups around it: {groups(distance.clusters)}.\n"
        f"Groups by average linkage: {linked}."
    )


def _maps(found: Assessment, folder: Path) -> list[Picture]:
    """A map and a tree of each of the paper's distances."""
    shown = []
    for distance in (found.distances[name] for name in FIRST if name in found.distances):
        name, words = distance.name, f"of the hospitals by the {distance.title}"
        share = draw.places(distance.matrix)[1]
        kept = f"The map reproduces {share:.0%} of the squared distances."
        svg = draw.save(draw.plane(found, distance), folder, f"map-{name}", f"Map {words}")
        shown.append(Picture(f"Map by {SHORT[name]} distance", svg, kept))
        svg = draw.save(draw.dendrogram(found, distance), folder, f"tree-{name}", f"Tree {words}")
        apart = "Groups that stand apart are in colours." if len(distance.linked) > 1 else "No groups stand apart."
        shown.append(Picture(f"Tree by {SHORT[name]} distance", svg, apart if len(found.sites) > 2 else ""))
    return shown


def _held(found: Assessment, folder: Path) -> Picture:
    title, most = "What the hospitals hold", found.settings.levels
    svg = draw.save(draw.distributions(found), folder, "distributions", f"{title}, quantity by quantity")
    few = max(found.cases[s] for s in found.sites) <= most
    caption = (
        f"One dot is one case{'' if few else f', or an equal share of them where there are more than {most}'}; "
        "the line spans the middle half of the cases, the upright mark is the median. "
        f"{'Bars are shares of the cases. ' * any(q.kind == CLASS for q in found.quantities.values())}"
        f"{draw.STAR} and orange: the hospital differs from all others together in this quantity by more than chance. "
        "EMD: the mean Earth Mover's distance over all pairs of hospitals."
    )
    return Picture(title, svg, caption)


def _angles(found: Assessment, folder: Path) -> list[Picture]:
    shown = []
    for name in found.angles:
        file, words = f"angles-{name.replace(' ', '-')}", f"Angles of {name} between and within hospitals"
        svg = draw.save(draw.angles(found, name), folder, file, words)
        shown.append(Picture(name[0].upper() + name[1:], svg, ""))
    return shown


def _quantities(found: Assessment) -> Iterator[dict[str, Any]]:
    largest = {"EMD maxI": found.largest(INTENSITY), "EMD maxL": found.largest(VOLUME, CLASS)}
    roles = {quantity.name: role for role, quantity in largest.items() if quantity}
    for quantity in found.quantities.values():
        yield {
            "name": quantity.name,
            "mean": f"{quantity.mean:.3f}",
            "role": roles.get(quantity.name, ""),
            "scale": f"{quantity.scale:.4g}",
            "unit": quantity.unit,
            "apart": ", ".join(_apart(found, quantity)) or "–",
        }


def _apart(found: Assessment, quantity: Quantity) -> list[SiteId]:
    """Hospitals that differ from all others together in this quantity."""
    return [site for site in found.sites if found.stands_out(quantity, site)]


def _couples(found: Assessment, matrix: Values) -> list[tuple[int, int]]:
    """All pairs, or the most distant of them, as rows and columns of a matrix; the most distant come first."""
    every = sorted(combinations(range(len(found.sites)), 2), key=lambda pair: -float(matrix[pair]))
    return every if len(found.sites) <= draw.MANY else every[:PAIRS]


def _pairs(found: Assessment, distance: Distance) -> dict[str, Any]:
    digits = draw.decimals(distance.matrix) + 1

    def row(at: tuple[int, int]) -> dict[str, Any]:
        values = {key: f"{getattr(distance, key)[at]:.{digits}f}" for key in ("matrix", "low", "high", "chance")}
        chances = {key: probability(getattr(distance, key)[at]) for key in ("p", "adjusted")}
        return {"pair": _pair(found, at), "star": distance.adjusted[at] <= LEVEL, **values, **chances}

    return {"title": distance.title, "rows": [row(at) for at in _couples(found, distance.matrix)]}


def _tests(found: Assessment) -> Iterator[dict[str, Any]]:
    """By pair: what every distance says, and whether it is more than chance."""
    for at in _couples(found, found.distances["emd"].matrix):
        adjusted = [d.adjusted[at] for d in found.distances.values()]
        yield {"pair": _pair(found, at), "cells": [(probability(p), bool(p <= LEVEL)) for p in adjusted]}


def _pair(found: Assessment, at: tuple[int, int]) -> str:
    return f"{found.sites[at[0]]} – {found.sites[at[1]]}"


def _named(distance: Distance) -> dict[str, str]:
    silhouette = f" ({distance.silhouette:.2f})" if len(distance.linked) > 1 else ""
    return {
        "name": SHORT[distance.name],
        "outlier": f"{distance.outlier} ({distance.named[distance.outlier]:.0%})",
        "clusters": groups(distance.clusters),
        "linked": groups(distance.linked) + silhouette,
    }


def _ranks(found: Assessment) -> list[tuple[str, list[str]]]:
    """Do two distances order the pairs alike? Spearman's rank correlation; nothing where too few are compared."""
    from scipy.stats import spearmanr

    pairs = {n: d.matrix[np.triu_indices(len(found.sites), 1)] for n, d in found.distances.items()}
    if len(found.sites) < 3 or len(pairs) < 2:
        return []

    def cell(one: str, other: str) -> str:
        if one == other:
            return ""
        constant = min(np.ptp(pairs[one]), np.ptp(pairs[other])) == 0
        return "–" if constant else f"{float(spearmanr(pairs[one], pairs[other]).statistic):.2f}"

    return [(SHORT[one], [cell(one, other) for other in pairs]) for one in pairs]
