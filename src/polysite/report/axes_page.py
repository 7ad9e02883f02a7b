"""The page of a benchmark over several federations: scores, distances, losses, swept settings, links."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from polysite.report import axes, axes_figures
from polysite.report.axes import FederationResult
from polysite.report.grid import Grid, write_tables
from polysite.report.page import Section, layout
from polysite.report.published import Paper
from polysite.storage import draft_folder


def tables(results: Sequence[FederationResult]) -> list[Grid]:
    """Return the tables over all federations: scores, correlations, distances with losses."""
    found: list[Grid | None] = [axes.overview(results)]
    if any(r.distances for r in results):
        found += [axes.correlations(results), axes.distance_table(results)]
    return [grid for grid in found if grid is not None]


def write(
    folder: Path,
    title: str,
    lead: str,
    results: Sequence[FederationResult],
    grids: Sequence[Grid],
    pages: Mapping[str, str],
    remarks: Sequence[str] = (),
    paper: Paper = Paper(),
) -> None:
    """Write the folder with index.html, ``figures/`` and every table in ``tables.md``, ``tables.tex`` and NAME.csv.

    Args:
        folder: The folder, which is replaced.
        title: Title of the page.
        lead: First paragraph.
        results: The federations.
        grids: The tables that `tables` returns.
        pages: For every federation, the path of its own page from this folder.
        remarks: Warnings before the sections.
        paper: Published tables, which name the measures of the figure ``sweep``.
    """
    sections = list(_sections(results, {grid.name: grid for grid in grids}, pages, paper))
    version = results[0].comparison.methods[0].first.versions["polysite"]
    page = layout(title, lead, sections, version, remarks=remarks)
    with draft_folder(folder, "comparison", private=False) as draft:
        page.write(draft)
        write_tables(draft, grids, "\n\n".join([f"# {title}", *remarks]))


def _sections(
    results: Sequence[FederationResult], grids: Mapping[str, Grid], pages: Mapping[str, str], paper: Paper
) -> list[Section]:
    scores = replace(grids["federations"], title="")
    found = [Section("federations", "Scores in every federation", (scores, _links(pages, bool(paper.tables))))]
    predicted: list[Any] = [replace(grids["correlation"], title="")] if "correlation" in grids else []
    predicted += axes_figures.distance(results)
    predicted += [grids["distance"]] if "distance" in grids else []
    if predicted:
        found.append(Section("predict", "Does distance predict loss?", tuple(predicted)))
    curves = axes_figures.sweep(results, paper)
    if curves:
        found.append(Section("sweep", "Swept settings", tuple(curves)))
    return found


def _links(pages: Mapping[str, str], published: bool) -> Markup:
    """Return links to the pages of the federations, which also have the published numbers if there are any."""
    links = (f'<a href="{quote(path)}">{escape(title)}</a>' for title, path in pages.items())
    content = "training curves and published numbers" if published else "and training curves"
    comma = "," if published else ""
    return Markup(f"<p>Tests, hospitals{comma} {content} of every federation: {' · '.join(links)}.</p>")
