"""Progress as plain lines, for an output that is a file or a pipe and shows no bars."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

from rich.console import Console

from polysite.report.costs import duration

EVERY = 10.0  # seconds between two lines


@dataclass
class Job:
    """What is counted: its name, how much of it is done, and a note."""

    name: str
    total: float | None
    done: float
    note: str
    began: float
    first: float  # how much was done when it began
    ended: bool = False


class PlainProgress:
    """Stand-in for ``rich.progress.Progress`` that prints a line at the start, every few seconds, and at the end.

    Args:
        console: Where lines are printed.
        every: Seconds between two lines.
    """

    def __init__(self, console: Console, every: float = EVERY):
        self.console, self.every, self.jobs = console, every, list[Job]()
        self.printed: float | None = None  # when the last line was printed

    def start(self) -> None:
        """Do nothing; lines come with the jobs."""

    def stop(self) -> None:
        """Print the last state of what has not ended."""
        for job in self.jobs:
            self._end(job)

    def add_task(self, name: str, total: float | None = None, completed: float = 0, note: str = "") -> int:
        """Add a job; return its number."""
        self.jobs.append(Job(name.strip(), total, completed, note, monotonic(), completed))
        return len(self.jobs) - 1

    def update(self, task: int, completed: float | None = None, advance: float = 0, **changed: Any) -> None:
        """Change a job, and print it if the last line is old enough."""
        job = self.jobs[task]
        job.done = (job.done if completed is None else completed) + advance
        for name, value in changed.items():
            setattr(job, name, value)
        now = monotonic()
        if job.note and (self.printed is None or now - self.printed >= self.every):
            self._print(job, now)

    def stop_task(self, task: int) -> None:
        """Print the last state of a job."""
        self._end(self.jobs[task])

    def _end(self, job: Job) -> None:
        if not job.ended:
            job.ended = True
            self._print(job, monotonic())

    def _print(self, job: Job, now: float) -> None:
        self.printed = now
        text = f"{job.name}: {job.note}" if job.note else job.name
        if job.total and job.total > 1:
            text += f" · {job.done:.0f} of {job.total:.0f}"
            done = job.done - job.first
            left = (now - job.began) * (job.total - job.done) / done if done > 0 else 0.0
            text += f" · about {duration(left)} left" if left >= 1 else ""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
