"""Train studies on inner folds, and collect the score of every case that is not tested.

Each inner fold is left out once: the models of that run have not seen its cases, and nothing was chosen by them
(``contenders.unselected``). So every case has a score by a model that does not know it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polysite.advice.contenders import unselected
from polysite.benchmark.jobs import Job, Step, inner_job, prepare, silent, why_failed
from polysite.benchmark.workers import work
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError

Key = tuple[str, str]  # hospital and case
STRATEGIES = "strategies"  # folder of the runs of all strategies


@dataclass(frozen=True)
class Played:
    """A study after its runs on all inner folds."""

    study: Study  # without inner folds; with the rounds that it trained
    jobs: tuple[Job, ...]  # one per inner fold that it was trained on
    scores: Mapping[Key, float]  # of every case of these folds, by the run that left it out
    folds: Mapping[Key, int]  # the inner fold of every case

    @property
    def mean(self) -> float:
        """Mean score over all cases."""
        return sum(self.scores.values()) / len(self.scores)

    @property
    def runs(self) -> list[Path]:
        """The run folders, one per inner fold."""
        return [job.run for job in self.jobs]

    def by_site(self) -> dict[str, float]:
        """Return the mean score of every hospital."""
        return {site: sum(v) / len(v) for site, v in sorted(grouped(self.scores).items())}


@dataclass(frozen=True)
class Runs:
    """Where and how the runs of an advice take place.

    Args:
        folder: Folder of the advice.
        inner: Number of inner folds.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
    """

    folder: Path
    inner: int
    parallel: int | None = None
    step: Step = silent

    def play(
        self,
        studies: Mapping[str, Study],
        place: str,
        before: Sequence[Job] = (),
        folds: Sequence[int] = (),
        reference: str = "",
    ) -> dict[str, Played]:
        """Train studies on inner folds and return their scores; runs that are done are not repeated.

        Args:
            studies: The studies by name; one whose first phases are another of them goes on from it.
            place: Name of the folder of the runs.
            before: Finished runs; a study that begins with one of them goes on from it.
            folds: The inner folds; all without any.
            reference: A study that must not fail.

        Raises:
            RunError: The reference failed, or all studies.
        """
        root, listed = self.folder / place, folds or range(self.inner)
        jobs = {n: [inner_job(root, n, unselected(s), self.inner, k) for k in listed] for n, s in studies.items()}
        every = [job for mine in jobs.values() for job in mine]
        prepare(every, root)
        self.step(f"{len(every)} runs", 0)
        failed = work([*before, *every], self.parallel, self.step)
        lost = why_failed(jobs, failed)
        if reference and lost[reference]:
            raise RunError(f"{reference} failed, which all others are compared with: {lost[reference]}")
        if all(lost.values()):
            name, why = next(iter(lost.items()))
            raise RunError(f"{name} failed: {why}")
        for name, why in lost.items():
            if why:
                self.step(f"{name} failed and is left out: {why}", 0)
        return {name: played(studies[name], jobs[name]) for name in studies if not lost[name]}


def played(chosen: Study, jobs: Sequence[Job]) -> Played:
    """Return a study with the scores of its finished runs, one per inner fold."""
    scores: dict[Key, float] = {}
    folds: dict[Key, int] = {}
    for job in jobs:
        for site, cases in RunFolder(job.run).result.scores.items():
            for case, score in cases.items():
                scores[site, case], folds[site, case] = score.mean, job.fold
    return Played(chosen, tuple(jobs), scores, folds)


def grouped(scores: Mapping[Key, float]) -> dict[str, list[float]]:
    """Return the values of the cases of every hospital."""
    found: dict[str, list[float]] = {}
    for (site, _), score in scores.items():
        found.setdefault(site, []).append(score)
    return found
