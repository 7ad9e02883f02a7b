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
    Console().print(per_hospital(runs))


def per_hospital(runs: Sequence[Summary]) -> Table:
    over = "mean over labels, " if runs[0].measure == "Dice" else ""
    title = f"{runs[0].measure} on {runs[0].split} patients ({over}± deviation over patients)"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("hospital")
    table.add_column("patients", justify="right")
    for run in runs:
        table.add_column(run.name, justify="right")
    for site in runs[0].sites:
        table.add_row(site, str(len(runs[0].cases(site))), *(mean_std(r.cases(site)) for r in runs))
    table.add_section()
    table.add_row("all", str(len(runs[0].cases())), *(mean_std(r.cases()) for r in runs), style="bold")
    for label in runs[0].labels if runs[0].measure == "Dice" else ():
        table.add_row(f"  {label}", "", *(mean_std(r.cases(label=label)) for r in runs), style="dim")
    return table


def show_manifest(format: str, manifest: Manifest) -> None:
    """What a scan found."""
    table = Table(title=f"layout: {format} · {manifest.task}", title_justify="left", header_style="bold")
    for column in ("site", "cases"):
        table.add_column(column, justify="right" if column == "cases" else "left")
    for site, rows in manifest.sites.items():
        table.add_row(site, str(len(rows)))
    table.add_section()
    table.add_row("all", str(len(manifest.rows)), style="bold")
    console = Console()
    console.print(table)
    console.print(f"modalities: {', '.join(manifest.modalities)}", highlight=False)
    kind = "labels" if manifest.task == "segmentation" else "classes"
    meaning = format_labels(manifest.rows[0].labels) or ", ".join(manifest.label_names)
    console.print(f"{kind}: {meaning}", highlight=False)


def show_check(report: Report) -> None:
    """A line per site, then a line per problem."""
    table = Table(header_style="bold")
    for column in ("site", "cases", "errors", "warnings", "shape", "voxel, mm", "axes"):
        table.add_column(column, justify="right" if column in ("cases", "errors", "warnings") else "left")
    for name in report.labels if report.task == "segmentation" else ():
        table.add_column(f"{name}, ml", justify="right")
    for s in report.sites():
        volumes = [f"{s['volumes'][k]:.3g}" if k in s["volumes"] else "–" for k in report.labels]
        table.add_row(
            s["site"],
            str(s["cases"]),
            str(s["errors"]) if s["errors"] else "–",
            str(s["warnings"]) if s["warnings"] else "–",
            _spans(s["shape"], "d"),
            _spans(s["spacing"], ".3g") + ("" if s["unit"] == "mm" else " ?"),
            " ".join(s["orientation"]),
            *(volumes if report.task == "segmentation" else ()),
        )
    console = Console()
    console.print(table)
    if report.task == "segmentation":
        console.print("ml: median volume of a label over the cases of a site", style="dim", highlight=False)
    if any(s["unit"] != "mm" for s in report.sites()):
        console.print("?: the files do not say that their unit is the millimetre", style="dim", highlight=False)
    for remark in report.remarks:
        console.print(f"note: {escape(remark)}", highlight=False, soft_wrap=True)
    for p in report.problems:
        style = "red" if p.kind == "error" else "yellow"
        console.print(
            f"[{style}]{p.kind}[/] {escape(f'{p.site} · {p.case}: {p.what}')}", highlight=False, soft_wrap=True
        )
    warnings = len(report.problems) - len(report.errors)
    verdict = "fit to train on" if not report.errors else "not fit to train on"
    console.print(f"\n{len(report.findings)} cases, {len(report.errors)} errors, {warnings} warnings: {verdict}")


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
