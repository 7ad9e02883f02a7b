"""Where the runs of a search take place: in processes of this machine, or at real hospitals (``hospitals.py``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polysite.benchmark.jobs import Job, Step, check, refuse_too_large
from polysite.benchmark.workers import work
from polysite.config import Study
from polysite.study import Sizes


class Runner(Protocol):
    """Works off the runs of a search."""

    def meet(self, base: Study, out: Path, step: Step) -> Sizes | None:
        """Return the numbers of cases of every hospital in the splits of a study; None if the data are here.

        ``out`` is the folder of the search.
        """
        ...

    def check(self, jobs: Sequence[Job], out: Path, step: Step) -> Mapping[str, str]:
        """Refuse runs that cannot work, before anything is trained; return the titles of those that a hospital does
        not allow, with its reason."""
        ...

    def work(self, jobs: Sequence[Job], step: Step) -> Mapping[str, str]:
        """Train jobs, or continue them, up to where each pauses; return the failed ones with the reason."""
        ...


@dataclass(frozen=True)
class Simulated:
    """Simulations in processes of this machine.

    Args:
        parallel: Largest number of runs in parallel; None for as many as fit.
    """

    parallel: int | None = None

    def meet(self, base: Study, out: Path, step: Step) -> None:
        """Return None: cases are counted where they are needed."""

    def check(self, jobs: Sequence[Job], out: Path, step: Step) -> Mapping[str, str]:
        """Refuse studies that cannot run, and runs that do not fit into memory or on the disk."""
        check(jobs)
        refuse_too_large(jobs, out)
        return {}

    def work(self, jobs: Sequence[Job], step: Step) -> Mapping[str, str]:
        """Run jobs in worker processes."""
        return work(jobs, self.parallel, step)
