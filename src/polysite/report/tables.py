"""Tables for the terminal: what does every hospital get?"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polysite.report.runs import Summary, mean_std, read


def show(paths: Sequence[Path], names: Sequence[str] | None = None) -> None:
    """Print the test Dice of every hospital, one column a run."""
    runs = [read(p, n) for p, n in zip(paths, names or [p.name for p in paths], strict=True)]
    Console().print(per_hospital(runs))


def per_hospital(runs: Sequence[Summary]) -> Table:
    title = f"Dice on {runs[0].split} patients (mean over labels, ± deviation over patients)"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("hospital")
    table.add_column("patients", justify="right")
    for run in runs:
        table.add_column(run.name, justify="right")
    for site in runs[0].sites:
        table.add_row(site, str(len(runs[0].cases(site))), *(mean_std(r.cases(site)) for r in runs))
    table.add_section()
    table.add_row("all", str(len(runs[0].cases())), *(mean_std(r.cases()) for r in runs), style="bold")
    for label in runs[0].labels:
        table.add_row(f"  {label}", "", *(mean_std(r.cases(label=label)) for r in runs), style="dim")
    return table
