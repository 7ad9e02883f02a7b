"""The page of an assessment: strategies, findings, their evidence, and all numbers.

A clinician can stop after the strategies; a data scientist finds every number below.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polysite.heterogeneity.assessment import LARGE, METADATA, ROUNDS, Assessment, at_once
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.verdict import Finding, Verdict
from polysite.report import assess_figures as draw
from polysite.report import assess_tables
from polysite.report.assess_tables import SHORT
from polysite.report.figure_files import Picture, write_figures
from polysite.report.template import render

FIRST = (
    "emd",
    "euclidean",
    "shift",
    "centre",
)  # the distances of the paper, or those under noise, with trees and tables
BESIDE = ("assessment.json", "distances.csv")  # files that the page mentions if they exist
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
    heatmaps, trees = _heatmaps(assessment), _trees(assessment)
    held, angles, case_angles = _held(assessment), _angles(assessment, False), _angles(assessment, True)
    write_figures(folder / "figures", [*heatmaps, *trees, *([held] if held else []), *angles, *case_angles])
    main = [assessment.distances[name] for name in FIRST if name in assessment.distances]
    page = folder / "index.html"
    text = render(
        "assess.html",
        title="How the hospitals differ, and which strategies fit",
        lead=verdict.summary,
        verdict=verdict,
        assessment=assessment,
        findings=_by_site(verdict.findings),
        evidence=EVIDENCE,
        hospitals=assess_tables.by_site(assessment),
        heatmaps=heatmaps,
        trees=trees,
        held=held,
        angles=angles,
        case_angles=case_angles,
        quantities=assess_tables.quantities(assessment),
        pairs=[assess_tables.pairs(assessment, distance) for distance in assessment.distances.values()],
        matrices=[assess_tables.matrix(assessment, d) for d in main if len(assessment.sites) <= draw.MANY],
        agreement=assess_tables.agreement(assessment),
        left=_left(assessment),
        settings=asdict(assessment.settings),
        about=about,
        beside=[name for name in BESIDE if (folder / name).exists()],
        columns=2 if len(assessment.sites) <= draw.SOME else 1,
        grouped=len(assessment.sites) > LARGE,
        at_once=at_once(len(assessment.sites)),
        rounds=ROUNDS,
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


def amount(count: int) -> str:
    """Format a number of bytes.

    >>> amount(24), amount(16_136), amount(2_400_000)
    ('24 bytes', '16.1 kB', '2.4 MB')
    """
    return f"{count} bytes" if count < 1000 else f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def _by_site(findings: tuple[Finding, ...]) -> dict[str, list[str]]:
    """Return the findings of every hospital, then those of the federation."""
    sites = dict.fromkeys(f.site for f in findings if f.site is not None)
    texts = {site: [f.text for f in findings if f.site == site] for site in sites}
    whole = [f.text for f in findings if f.site is None]
    return {**texts, "all together": whole} if whole else texts


def _heatmaps(assessment: Assessment) -> list[Picture]:
    """Draw every distance."""
    shown = []
    for name, distance in assessment.distances.items():
        figure = draw.heatmap(assessment, distance)
        title = distance.title[0].upper() + distance.title[1:]
        file = f"distances-{name}"
        svg = draw.drawing(figure, file, f"{title} between all hospitals, as a table of colours")
        caption = f"{EXPLAINED[name]}{_unit(assessment, name)}."
        shown.append(Picture(title, svg, caption, name=file))
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


def _trees(assessment: Assessment) -> list[Picture]:
    """Draw a tree of each main distance."""
    shown = []
    for distance in (assessment.distances[name] for name in FIRST if name in assessment.distances):
        name, title = distance.name, f"Tree of the hospitals by the {distance.title}"
        svg = draw.drawing(draw.dendrogram(assessment, distance), f"tree-{name}", title)
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
