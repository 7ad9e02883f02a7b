"""A progress bar for the terminal: round, site, Dice now and at best."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from polysite.engines.rounds import Watch


class Bar(Watch):
    """One line a study, filling site by site."""

    def __init__(self, bars: Progress):
        self.bars, self.best = bars, 0.0
        self.task: TaskID | None = None

    def begin(self, title: str, rounds: int, done: int, best: float) -> None:
        self.bars.start()  # not before: a refusal is printed without an empty bar above it
        self.task = self.bars.add_task(f"{title:12}", total=rounds, completed=done, note="")
        self.best = max(best, 0.0)

    def site(self, round: int, site: str, done: int, of: int) -> None:
        self._show(round + done / of, f"round {round + 1} · {site}")

    def round(self, record: Mapping[str, Any]) -> None:
        dice = record.get("mean_dice")
        if dice is not None:
            self.best = max(self.best, dice)
            self._show(record["round"] + 1, f"round {record['round'] + 1} · Dice {dice:.3f}, best {self.best:.3f}")

    def end(self) -> None:
        if self.task is not None:
            self.bars.update(self.task, note=f"done · best Dice {self.best:.3f}")
            self.bars.stop_task(self.task)

    def _show(self, completed: float, note: str) -> None:
        if self.task is not None:
            self.bars.update(self.task, completed=completed, note=note)


@contextmanager
def progress() -> Iterator[Bar]:
    """Bars and warnings on standard error, so that standard output stays clean."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]:44}"),
        TimeRemainingColumn(),
    )
    log, handler = (
        logging.getLogger("polysite"),
        RichHandler(logging.WARNING, console, show_path=False, show_time=False),
    )
    log.addHandler(handler)
    bars = Progress(*columns, console=console)
    try:
        yield Bar(bars)
    finally:
        if bars.live.is_started:
            bars.stop()
        log.removeHandler(handler)
