"""Tables in the terminal."""

from collections.abc import Iterator, Sequence

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from polysite.data.check import Report
from polysite.data.manifest import Manifest, format_labels
from polysite.heterogeneity.assessment import Assessment
from polysite.heterogeneity.verdict import Verdict, some
from polysite.report import assess_tables, costs, published
from polysite.report.assess_page import FIRST, amount
from polysite.report.compare import summary, tables
from polysite.report.grid import Grid, Line, fitting, name, number
from polysite.report.page import Options
from polysite.report.runs import Method

FULL = (  # tables that are printed besides the scores
    "tests_dice", "tests_hd95", "tests_accuracy", "asked", "averages", "subgroups_dice", "subgroups_accuracy",
)  # fmt: skip
SMALL = 8  # hospitals up to which all distances are printed


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


def show_grid(grid: Grid) -> None:
    """Print a table, as far as the window is wide enough."""
    console = Console(highlight=False)
    shown = fitting(grid, console.width)
    console.print(shown.terminal())
    console.print(Text(f"{shown.note}\n", "dim"))


def show_manifest(format: str, manifest: Manifest) -> None:
    """Print the layout, sites, modalities and labels of a manifest."""
    console = Console(highlight=False)
    console.print(f"layout: {format} · {manifest.task}")
    lines = [Line((name(site), number(len(rows), "d"))) for site, rows in manifest.sites.items()]
    if len(lines) > 1:
        lines.append(Line((name("all"), number(len(manifest.rows), "d")), "total"))
    console.print(Grid("sites", "", ("site", "cases"), tuple(lines)).terminal())
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
    console, seen, labels = Console(highlight=False), list[Line](), list[Line]()
    for s in report.sites():
        counts = (number(s[k] or None, "d") for k in ("cases", "errors", "warnings"))
        spans = _spans(s["shape"], "d"), f"{_spans(s['spacing'], '.3g')} {s['unit']}", " ".join(s["orientation"])
        seen.append(Line((name(s["site"]), *counts, *map(name, spans))))
        labels.append(Line((name(s["site"]), *(name(s["labels"].get(label, "–")) for label in report.labels))))
    head = ("site", "cases", "errors", "warnings", "shape", "voxel", "axes")
    console.print(Grid("sites", "", head, tuple(seen)).terminal())
    what = "Median volume of a label" if report.task == "segmentation" else "Cases of a class"
    console.print(Grid("labels", f"{what}, by site", ("site", *report.labels), tuple(labels)).terminal())
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
    shown = [assess_tables.by_site(assessment)]
    shown += [assess_tables.agreement(assessment)] if len(assessment.sites) > 2 else []
    for grid in shown:
        show_grid(grid)
    if len(assessment.sites) <= SMALL:
        main = (assessment.distances[kind] for kind in FIRST if kind in assessment.distances)
        grids = [assess_tables.matrix(assessment, distance) for distance in main]
        console.print(Columns([grid.terminal() for grid in grids], padding=(0, 1)))
        console.print(Text(f"{grids[0].note}\n", "dim"))
    if verdict.findings:
        seen = _listed([("–", Text(finding.text)) for finding in verdict.findings])
        console.print(Text("Findings", "bold"), seen, "", sep="\n")
    console.print(Text("Strategies", "bold"), _advice(verdict), "", sep="\n")
    if verdict.cautions:
        cautions = _listed([("–", Text(caution)) for caution in verdict.cautions])
        console.print(Text("Evidence", "bold"), cautions, "", sep="\n")
    console.print(Text("What left each hospital", "bold"), _listed([("–", Text(words)) for words in _sent(assessment)]))


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


def _spans(axes: Sequence[Sequence[float]], style: str) -> str:
    """Format ``[[120, 128], [20, 20]]`` as ``120–128 × 20``."""
    return " × ".join(f"{a:{style}}" if a == b else f"{a:{style}}–{b:{style}}" for a, b in axes) or "–"
