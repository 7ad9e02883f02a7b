"""Progress of a run on standard error: bars in a terminal, plain lines in a file."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)  # fmt: skip
from rich.table import Column

from polysite.engines.record import RoundRecord
from polysite.engines.watch import Watch
from polysite.report.costs import duration

EVERY = 10.0  # seconds between two lines


class Bar(Watch):
    """Observer that shows a line per study, one for prepared cases, and one per real hospital."""

    def __init__(self, bars: Progress):
        self.bars, self.best = bars, 0.0
        self.task: Any = None
        self.preparing: Any = None
        self.sites: dict[str, Any] = {}

    def case(self, done: int, of: int, case: str) -> None:
        """Show how many cases are prepared."""
        if self.preparing is None:
            self.bars.start()
            self.preparing = self.bars.add_task(f"{'cases':12}", total=of, note="")
        self.bars.update(self.preparing, total=of, completed=done, note=case if done < of else "prepared")
        if done == of:
            self.bars.stop_task(self.preparing)

    def begin(self, title: str, rounds: int, done: int, best: float) -> None:
        """Start the bar of a study."""
        self.bars.start()  # not earlier, so that no empty bar stands above a refusal
        self.task = self.bars.add_task(f"{title:12}", total=rounds, completed=done, note="")
        self.best, self.measure = max(best, 0.0), "score"

    def site(self, round: int, site: str, done: int, of: int) -> None:
        """Advance the bar by one site."""
        self._show(round + done / of, f"round {round + 1} · {site}")

    def doing(self, site: str, what: str, done: bool) -> None:
        """Show what a real hospital is doing."""
        self.bars.start()
        if site not in self.sites:
            self.sites[site] = self.bars.add_task(f"{site:12}", total=1, note="")
        self.bars.update(self.sites[site], completed=int(done), note=what)

    def round(self, record: RoundRecord) -> None:
        """Show the score after a round."""
        score = record.mean_score
        if score is not None:
            self.best, self.measure = max(self.best, score), record.measure
            note = f"round {record.round + 1} · {self.measure} {score:.3f}, best {self.best:.3f}"
            self._show(record.round + 1, note)

    def end(self) -> None:
        """Show the best score."""
        if self.task is not None:
            self.bars.update(self.task, note=f"done · best validation {self.measure} {self.best:.3f}")
            self.bars.stop_task(self.task)

    def _show(self, completed: float, note: str) -> None:
        if self.task is not None:
            self.bars.update(self.task, completed=completed, note=note)


@contextmanager
def counted(title: str) -> Iterator[Callable[[float, int, str], None]]:
    """Yield a function that shows how many of some things are done, a fraction included, and the current one."""
    with _bars() as bars:
        task: Any = None

        def show(done: float, of: int, note: str) -> None:
            nonlocal task
            if task is None:
                bars.start()
                task = bars.add_task(f"{title:12}", total=of, note="")
            words = f"{min(int(done) + 1, of)} of {of} · {note}" if done < of else "done"
            bars.update(task, completed=done, note=words)

        yield show


@contextmanager
def counting(title: str, total: int | None, quiet: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that shows what happens, and adds to the number of things that are done."""
    if quiet:
        yield lambda note, done=1: None
        return
    with _bars(MofNCompleteColumn()) as bars:
        bars.start()
        task = bars.add_task(f"{title:12}", total=total, note="")
        yield lambda note, done=1: bars.update(task, advance=done, note=note)


@contextmanager
def progress() -> Iterator[Bar]:
    """Yield a bar on standard error, where warnings are printed, too; standard output stays clean."""
    with _bars() as bars:
        yield Bar(bars)


@contextmanager
def _bars(*more: ProgressColumn) -> Iterator[Any]:
    """Yield bars, which start with the first task, or plain lines; warnings are printed above them."""
    console = Console(stderr=True)
    name = Column(min_width=12, max_width=24, no_wrap=True, overflow="ellipsis")
    note = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", markup=False, table_column=name),  # names may contain brackets
        BarColumn(bar_width=14),
        *more,
        TextColumn("{task.fields[note]}", markup=False, table_column=note),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    log = logging.getLogger("polysite")
    handler = RichHandler(logging.WARNING, console, show_path=False, show_time=False)
    log.addHandler(handler)
    bars = Progress(*columns, console=console, expand=True) if console.is_terminal else PlainProgress(console)
    try:
        yield bars
    finally:
        if isinstance(bars, PlainProgress) or bars.live.is_started:
            bars.stop()
        log.removeHandler(handler)


class PlainProgress(Progress):
    """Progress that prints a line at the start, every few seconds, and at the end.

    Args:
        console: Where lines are printed.
        every: Seconds between two lines.
        get_time: The clock.
    """

    def __init__(self, console: Console, every: float = EVERY, get_time: Callable[[], float] = monotonic):
        super().__init__(console=console, disable=True, get_time=get_time)
        self.every = every
        self.printed: float | None = None  # when the last line was printed

    def add_task(self, *given: Any, **fields: Any) -> TaskID:
        """Add a job; remember how much of it was done before."""
        return super().add_task(*given, first=fields.get("completed", 0), **fields)

    def stop(self) -> None:
        """Print the last state of what has not ended."""
        for task in self.tasks:
            self.stop_task(task.id)

    def update(self, task_id: TaskID, **changed: Any) -> None:
        """Change a job, and print it if the last line is old enough."""
        super().update(task_id, **changed)
        if self._tasks[task_id].fields["note"] and (
            self.printed is None or self.get_time() - self.printed >= self.every
        ):
            self._print(self._tasks[task_id])

    def stop_task(self, task_id: TaskID) -> None:
        """Print the last state of a job, once."""
        if self._tasks[task_id].stop_time is None:
            super().stop_task(task_id)
            self._print(self._tasks[task_id])

    def _print(self, task: Task) -> None:
        self.printed = self.get_time()
        name, note = task.description.strip(), task.fields["note"]
        text = f"{name}: {note}" if note else name
        if task.total and task.total > 1:
            text += f" · {task.completed:.0f} of {task.total:.0f}"
            done = task.completed - task.fields["first"]
            left = (task.elapsed or 0.0) * (task.total - task.completed) / done if done > 0 else 0.0
            text += f" · about {duration(left)} left" if left >= 1 else ""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
