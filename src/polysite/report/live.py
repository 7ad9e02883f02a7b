"""Progress on standard error: a bar below a table of what is compared, or plain lines in a file."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from polysite.report.plain_progress import PlainProgress

MOST = 15  # rows of the table


@dataclass(frozen=True)
class Standing:
    """A candidate of a search, or a strategy, while it is compared with others."""

    run: str  # name of its runs
    name: str
    share: float  # of a whole training, or of its runs, so far
    score: float | None  # the last one


class Board(Progress):
    """A progress bar with a table above it; the ``Step`` of searches and tournaments.

    Args:
        what: Word for what is counted.
        total: How many there are; None if that is not known.
        console: Where it is shown; there is no table unless this is a terminal.
        quiet: Show nothing.
    """

    def __init__(self, what: str, total: int | None, console: Console, quiet: bool = False):
        self._standings: Sequence[Standing] = ()
        self._running: Collection[str] = ()
        note = TextColumn("{task.fields[note]}", markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note)
        super().__init__(*columns, console=console, transient=True, disable=quiet)
        self._task = self.add_task(what, total=total, note="")

    def __call__(
        self,
        note: str,
        done: int = 1,
        running: Collection[str] | None = None,
        standings: Sequence[Standing] | None = None,
    ) -> None:
        """Advance the bar by ``done``, change its note, and show what runs and how the candidates stand, if given."""
        self._running = self._running if running is None else running
        self._standings = self._standings if standings is None else standings
        self.update(self._task, advance=done, note=note)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the table, in a terminal, and the bar."""
        if self._standings and self.console.is_terminal:
            yield standings_table(self._standings, self._running)
        yield self.make_tasks_table(self.tasks)


def standings_table(standings: Sequence[Standing], running: Collection[str]) -> Table:
    """Return the candidates by rank, at most ``MOST``: those that run, and the best of the others.

    Candidates that trained longer come before others.
    """
    ranked = sorted(standings, key=lambda s: (s.score is None, -s.share, -(s.score or 0.0)))
    first = sorted(range(len(ranked)), key=lambda k: (ranked[k].run not in running, k))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("candidate", no_wrap=True)
    for head in ("done", "score", "rank"):
        table.add_column(head, justify="right", no_wrap=True)
    for k in sorted(first[:MOST]):
        each = ranked[k]
        cells = ("–", "") if each.score is None else (f"{each.score:.3f}", str(k + 1))
        mark = "▸" if each.run in running else ""
        table.add_row(mark, escape(each.name), f"{each.share:.0%}", *cells, style="bold" if mark else None)
    if len(ranked) > MOST:
        table.caption = f"and {len(ranked) - MOST} more"
    return table


@contextmanager
def board(what: str, total: int | None, quiet: bool) -> Iterator[Any]:
    """Yield a ``Board`` on standard error, or a function that prints plain lines where that is no terminal."""
    console = Console(stderr=True)
    if quiet or console.is_terminal:
        with Board(what, total, console, quiet) as shown:
            yield shown
        return
    lines = PlainProgress(console)
    task = lines.add_task(what, total)
    try:
        yield lambda note, done=1, running=None, standings=None: lines.update(task, advance=done, note=note)
    finally:
        lines.stop()
