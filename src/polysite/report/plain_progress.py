"""Progress as plain lines, for an output that is a file or a pipe and shows no bars."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import Progress, Task, TaskID

from polysite.report.costs import duration

EVERY = 10.0  # seconds between two lines


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
