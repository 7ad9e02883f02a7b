"""Compare runs in Python: ``ps.compare`` writes what ``polysite compare`` writes, and returns its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polysite import config
from polysite.engines.run_folder import RunFolder
from polysite.frames import frame
from polysite.report import costs, publish
from polysite.report.compare import Comparison, tables
from polysite.report.grid import Grid
from polysite.report.page import Options
from polysite.report.runs import methods, read


@dataclass(frozen=True)
class Compared:
    """A comparison of runs."""

    folder: Path
    comparison: Comparison
    grids: Sequence[Grid]

    @property
    def tables(self) -> dict[str, Any]:
        """Every table by name: a pandas DataFrame, or a list of dictionaries where there is no pandas."""
        return {grid.name: frame(_rows(grid)) for grid in self.grids}

    @property
    def tests(self) -> Any:
        """The tests against the reference, one row each."""
        return frame(publish.plain(self.comparison)["tests"])


def compare(
    runs: Sequence[Path | str] | Mapping[str, Path | str],
    out: Path | str | None = None,
    reference: str | None = None,
    on: str | None = None,
    options: Options | None = None,
) -> Compared:
    """Compare finished runs: a page, tables as Markdown, LaTeX and CSV, and the same tables in Python.

    Args:
        runs: Run folders, or names with their run folders.
        out: The new folder; by default one below ``comparisons/``.
        reference: Method that the others are tested against; fedavg by default.
        on: Name of the evaluation to compare; that of the test cases by default.
        options: Options of the page.
    """
    named = runs.items() if isinstance(runs, Mapping) else [(None, run) for run in runs]
    compared = methods([read(Path(path), name, on) for name, path in named])
    first = compared[0].first
    speeds = config.parse(first.config, where=str(first.path / "config.toml")).cost
    chosen = options or Options(speeds=speeds)
    chosen = replace(chosen, reference=reference) if reference else chosen
    target = Path(out) if out else RunFolder.fresh(Path("comparisons"), "compare")
    done = publish.comparison(target, "Methods compared", compared, chosen)
    return Compared(target, done, [*tables(done), costs.table(done.methods, chosen.speeds)])


def _rows(grid: Grid) -> list[dict[str, Any]]:
    """Return the lines of a table: a number where a cell has one, else its text."""
    head = [name or "name" for name in grid.head]
    return [
        {name: cell.text if cell.value is None else cell.value for name, cell in zip(head, line.cells, strict=False)}
        for line in grid.lines
    ]
