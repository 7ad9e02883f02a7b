"""Tables in the terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from polysite.data.check import Report
from polysite.data.manifest import Manifest, format_labels
from polysite.heterogeneity.assessment import LEVEL, TESTED, Assessment, Distance
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.heterogeneity.verdict import Verdict, some, tests
from polysite.report import costs, published
from polysite.report.compare import summary, tables
from polysite.report.grid import Grid, fitting
from polysite.report.names import shorten
from polysite.report.page import Options
from polysite.report.runs import Method

FULL = (  # tables that are printed besides the scores
    "tests_dice", "tests_hd95", "tests_accuracy", "asked", "best_rounds", "averages", "subgroups_dice",
    "subgroups_accuracy",
)  # fmt: skip
MOST_PARTS = 4  # of a table that is printed although it has a file


def show(methods: Sequence[Method], options: Options = Options(), full: bool = False) -> None:
    """Print the scores of every hospital and a summary; with ``full`` also tests and costs."""
    comparison = options.compare(methods)
    console = Console(highlight=False)
    names = ("overview", f"hospitals_{comparison.main}", *(FULL if full else ()))
    wanted = [g for g in tables(comparison) if g.name in names]
    if full:
        wanted.append(costs.table(comparison.methods, options.speeds))
        wanted += published.tables(comparison, options.published, options.speeds, options.assessment)
    for grid in wanted:
        show_grid(grid)
    for sentence in (*summary(comparison), *options.remarks, *comparison.remarks):
        console.print(Text(sentence))


def show_grid(grid: Grid, file: Path | None = None) -> None:
    """Print a table as wide as the window: in several parts, one below the other, if it is wider.

    Args:
        grid: The table.
        file: CSV file of the table, which is named instead if it would take more than ``MOST_PARTS`` parts.
    """
    console = Console(highlight=False)
    parts = fitting(grid, console.width)
    if file is not None and len(parts) > MOST_PARTS:
        console.print(Text(f"{grid.title}: {len(grid.head)} columns, too wide to print; see the page or {file}\n"))
        return
    for part in parts:
        console.print(part.terminal())
    console.print(Text(f"{parts[-1].note}\n", "dim"))


def show_manifest(format: str, manifest: Manifest) -> None:
    """Print the layout, sites, modalities and labels of a manifest."""
    console = Console(highlight=False)
    console.print(f"layout: {format} · {manifest.task}")
    table = _table("site", "cases")
    for site, rows in manifest.sites.items():
        table.add_row(escape(site), str(len(rows)))
    if len(manifest.sites) > 1:
        table.add_section()
        table.add_row("all", str(len(manifest.rows)), style="bold")
    console.print(table)
    console.print(f"modalities: {escape(', '.join(manifest.modalities))}", soft_wrap=True)
    kind = "labels" if manifest.task == "segmentation" else "classes"
    meaning = format_labels(manifest.rows[0].labels) or ", ".join(manifest.label_names)
    console.print(f"{kind}: {escape(meaning)}", soft_wrap=True)


def show_check(report: Report, every: bool = False) -> None:
    """Print the result of a data check: tables of the sites and their label volumes or classes, and the problems.

    Args:
        report: The result.
        every: List every problem of every case, instead of one line for cases of a site with the same problem.
    """
    console, sites = Console(highlight=False), list(report.sites())
    table = _table("site", "cases", "errors", "warnings", "shape", "voxel", "axes")
    for s in sites:
        voxel = f"{_spans(s['spacing'], '.3g')} {s['unit']}"
        counts = (str(s[k] or "–") for k in ("cases", "errors", "warnings"))
        table.add_row(escape(s["site"]), *counts, _spans(s["shape"], "d"), voxel, " ".join(s["orientation"]))
    console.print(table)
    table = _table("site", *map(escape, report.labels))
    for s in sites:
        table.add_row(escape(s["site"]), *(s["labels"].get(name, "–") for name in report.labels))
    what = "median volume of a label" if report.task == "segmentation" else "cases of a class"
    console.print(f"{what}, by site:")
    console.print(table)
    for remark in report.remarks:
        console.print(f"note: {escape(remark)}", soft_wrap=True)
    groups = report.groups(least=len(report.findings) + 1 if every else 3)
    for g in groups:
        style, where = "red" if g.kind == "error" else "yellow", f"{g.site} · {g.cases[0]}: " if g.cases[0] else ""
        if len(g.cases) > 1:
            where = f"{len(g.cases)} cases of {g.site} ({', '.join(g.cases[:2])}, ...): "
        console.print(f"[{style}]{g.kind}[/] {escape(where + g.what)}", soft_wrap=True)
    if any(len(g.cases) > 1 for g in groups):
        console.print("--all lists every case", soft_wrap=True)
    warnings = len(report.problems) - len(report.errors)
    verdict = "fit to train on" if not report.errors else "not fit to train on"
    console.print(f"\n{len(report.findings)} cases, {len(report.errors)} errors, {warnings} warnings: {verdict}")


def show_assessment(assessment: Assessment, verdict: Verdict) -> None:
    """Print distances, findings and strategies; the page has the details."""
    console = Console(highlight=False)
    console.print(Text(verdict.summary, "bold"), "", sep="\n")
    console.print(*_described(assessment), "", sep="\n")
    if len(assessment.sites) > 2:
        console.print(_compared(assessment), "", sep="\n")
    if len(assessment.sites) <= 8:
        console.print(
            _matrices(assessment),
            f" * differ significantly, metadata in any quantity: p <= {LEVEL:g} (Holm)",
            "",
            sep="\n",
        )
    if verdict.findings:
        seen = _listed([("–", Text(finding.text)) for finding in verdict.findings])
        console.print(Text("Findings", "bold"), seen, "", sep="\n")
    console.print(Text("Strategies", "bold"), _advice(verdict), "", sep="\n")
    if verdict.cautions:
        cautions = _listed([("–", Text(caution)) for caution in verdict.cautions])
        console.print(Text("Evidence", "bold"), cautions, "", sep="\n")
    console.print(Text("What left each hospital", "bold"), _listed([("–", Text(words)) for words in _sent(assessment)]))


def _described(assessment: Assessment) -> tuple[Table, Text]:
    """Return a table of the hospitals: median of the modality and of the label in which they differ most, p-values."""
    kind, middle_name = ("shift", "mean") if assessment.noise else ("EMD", "median")
    largest = {f"{kind}_maxI": assessment.largest(INTENSITY), f"{kind}_maxL": assessment.largest(VOLUME, CLASS)}
    chosen = {name: quantity for name, quantity in largest.items() if quantity}
    units = {q.name: f" ({q.unit})" if q.kind == VOLUME else "" for q in chosen.values()}
    heads = [f"{'share of' if q.kind == CLASS else middle_name} {q.of}{units[q.name]}" for q in chosen.values()]
    p, kinds = tests(assessment), [name for name in TESTED if name in assessment.distances]
    table = _slim("hospital", "cases", *heads, *("p metadata", "p embeddings")[: len(kinds)])
    short = shorten(list(assessment.cases), 26)
    for site, cases in assessment.cases.items():
        known = [q.values.get(site) for q in chosen.values()]
        middle = [np.mean if q.kind == CLASS else np.median for q in chosen.values()]
        cells = ["–" if v is None else f"{m(v):.4g}" for m, v in zip(middle, known, strict=True)]
        cells = ["absent" if v is not None and not v.any() else c for v, c in zip(known, cells, strict=True)]
        chances = [f"{p[name, site]:.3f}" if (name, site) in p else "–" for name in kinds]
        table.add_row(escape(short[site]), str(cases), *cells, *chances)
    words = ", ".join(f"{name} {q.mean:.3f} ({q.name})" for name, q in chosen.items())
    return table, Text(f" {words}: means over all pairs; p: adjusted p-value that a hospital differs from the others")


def _compared(assessment: Assessment) -> Table:
    """Return a table with a line per distance."""
    from polysite.report.assess_page import SHORT, groups

    describe = groups if len(assessment.sites) <= 8 else lambda clusters: " and ".join(str(len(c)) for c in clusters)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False)
    for name in ("distance", "most distant", "resamples", "groups around it", "groups by linkage (silhouette)"):
        table.add_column(name, overflow="fold")
    for distance in assessment.distances.values():
        apart = f" ({distance.silhouette:.2f})" if len(distance.linked) > 1 else ""
        share, most = f"{distance.named[distance.outlier]:.0%}", shorten(assessment.sites, 26)[distance.outlier]
        cells = most, share, describe(distance.clusters), describe(distance.linked) + apart
        table.add_row(SHORT[distance.name], *map(escape, cells))
    return table


def _matrices(assessment: Assessment) -> Columns:
    """Return the matrices of the two main distances, side by side if they fit; under noise with the error it adds."""
    from polysite.report.assess_page import FIRST, SHORT

    titles = {name: SHORT[name] for name in FIRST}
    shown = [
        _matrix(assessment, assessment.distances[n], title) for n, title in titles.items() if n in assessment.distances
    ]
    return Columns(shown, padding=(0, 1))


def _matrix(assessment: Assessment, distance: Distance, title: str) -> Table:
    table = _slim(title, *assessment.sites)
    for i, site in enumerate(assessment.sites):
        stars = ["*" if p <= LEVEL else " " for p in distance.adjusted[i]]
        cells = [f"{d:#.3g}{star}" for d, star in zip(distance.matrix[i], stars, strict=True)]
        if distance.error is not None:
            cells = [f"{cell} ± {e:#.2g}" for cell, e in zip(cells, distance.error[i], strict=True)]
        table.add_row(escape(site), *("" if j == i else cell for j, cell in enumerate(cells)))
    table.add_row("Sum", *(f"{distance.sums[site]:#.3g} " for site in assessment.sites))
    return table


def _advice(verdict: Verdict) -> Table:
    """Return the strategies in order; a reason that was printed before is not repeated."""
    lines: list[tuple[str, Text]] = []
    given = {finding.text for finding in verdict.findings}
    for s in verdict.strategies:
        sure = f"; evidence of a difference: {s.evidence}" if s.evidence else ""
        lines.append((f"{s.rank}.", Text(s.title, "bold")))
        lines += [("–", Text(reason)) for reason in s.reasons if reason not in given]
        lines.append(("→", Text(f"strategies/{s.file} ({s.goal}{sure})")))
        given.update(s.reasons)
    return _listed(lines)


def _sent(assessment: Assessment) -> Iterator[str]:
    from polysite.report.assess_page import amount

    sizes = some([f"{site} {amount(size)}" for site, (size, _) in assessment.left.items()])
    mean = ", a mean embedding" if assessment.settings.projections else ""
    what = f"counts, sorted lists of numbers{mean}"
    if assessment.noise:
        what = f"counts, sums of bounded numbers under noise (epsilon = {assessment.noise.epsilon:g})"
    yield f"{sizes}: {what}; no scan, no segmentation, no record of a patient"
    for site, why in assessment.refused.items():
        yield f"the reply of {site} was not used: {why}"


def _listed(lines: Sequence[tuple[str, Text]]) -> Table:
    """Return a list with hanging indents."""
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=2, justify="right")
    table.add_column()
    for mark, words in lines:
        table.add_row(mark, words)
    return table


def _slim(first: str, *others: str) -> Table:
    """Return a compact table of numbers; long names of hospitals are truncated."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, collapse_padding=True)
    table.add_column(escape(first), no_wrap=True, max_width=30)
    for name in others:
        table.add_column(escape(name), justify="right", no_wrap=True, max_width=max(9, 90 // len(others)))
    return table


def _table(first: str, *others: str) -> Table:
    """Return a table whose first column is never truncated."""
    table = Table(header_style="bold")
    table.add_column(first, no_wrap=True, overflow="fold")
    for name in others:
        numbers = name in ("cases", "errors", "warnings")
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    return table


def _spans(axes: Sequence[Sequence[float]], style: str) -> str:
    """Format ``[[120, 128], [20, 20]]`` as ``120–128 × 20``."""
    return " × ".join(f"{a:{style}}" if a == b else f"{a:{style}}–{b:{style}}" for a, b in axes) or "–"
