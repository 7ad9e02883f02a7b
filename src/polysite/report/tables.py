"""Tables for the terminal: what does every hospital have, and what does it get?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from polysite.data.check import Report
from polysite.data.manifest import Manifest, format_labels
from polysite.report.runs import Summary, mean_std, read


def show(paths: Sequence[Path], names: Sequence[str] | None = None) -> None:
    """Print what every hospital gets, one column a run."""
    runs = [read(p, n) for p, n in zip(paths, names or [p.name for p in paths], strict=True)]
    over = "mean over labels, " if runs[0].measure == "Dice" else ""
    console = Console(highlight=False)
    console.print(f"{runs[0].measure} on {runs[0].split} patients ({over}± deviation over patients)", soft_wrap=True)
    console.print(per_hospital(runs))


def per_hospital(runs: Sequence[Summary]) -> Table:
    table = Table(header_style="bold")
    table.add_column("hospital")
    table.add_column("patients", justify="right")
    for run in runs:
        table.add_column(escape(run.name), justify="right")
    for site in runs[0].sites:
        unseen = " (unseen)" if site in runs[0].unseen else ""
        table.add_row(escape(site) + unseen, str(len(runs[0].cases(site))), *(mean_std(r.cases(site)) for r in runs))
    table.add_section()
    table.add_row("all", str(len(runs[0].cases())), *(mean_std(r.cases()) for r in runs), style="bold")
    for label in runs[0].labels if runs[0].measure == "Dice" else ():
        table.add_row(f"  {escape(label)}", "", *(mean_std(r.cases(label=label)) for r in runs), style="dim")
    return table


def show_manifest(format: str, manifest: Manifest) -> None:
    """What a scan found."""
    console = Console(highlight=False)
    console.print(f"layout: {format} · {manifest.task}")
    table = _table("site", "cases")
    for site, rows in manifest.sites.items():
        table.add_row(escape(site), str(len(rows)))
    table.add_section()
    table.add_row("all", str(len(manifest.rows)), style="bold")
    console.print(table)
    console.print(f"modalities: {escape(', '.join(manifest.modalities))}", soft_wrap=True)
    kind = "labels" if manifest.task == "segmentation" else "classes"
    meaning = format_labels(manifest.rows[0].labels) or ", ".join(manifest.label_names)
    console.print(f"{kind}: {escape(meaning)}", soft_wrap=True)


def show_check(report: Report) -> None:
    """A line per site, what is labelled, then a line per problem."""
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
    for p in report.problems:
        style, where = "red" if p.kind == "error" else "yellow", f"{p.site} · {p.case}: " if p.case else ""
        console.print(f"[{style}]{p.kind}[/] {escape(where + p.what)}", soft_wrap=True)
    warnings = len(report.problems) - len(report.errors)
    verdict = "fit to train on" if not report.errors else "not fit to train on"
    console.print(f"\n{len(report.findings)} cases, {len(report.errors)} errors, {warnings} warnings: {verdict}")


def _table(first: str, *others: str) -> Table:
    """A table whose first column, a name, is never cut."""
    table = Table(header_style="bold")
    table.add_column(first, no_wrap=True, overflow="fold")
    for name in others:
        numbers = name in ("cases", "errors", "warnings")
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    return table


def _spans(axes: Sequence[Sequence[float]], style: str) -> str:
    """``[[120, 128], [20, 20]]`` as ``120–128 × 20``."""
    return " × ".join(f"{a:{style}}" if a == b else f"{a:{style}}–{b:{style}}" for a, b in axes) or "–"


@contextmanager
def counting(what: str, total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that is told of every step."""
    if quiet:
        yield lambda note: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda note: bar.update(task, advance=1, note=note)
