"""Train studies on inner folds, and collect the score of every case that is not tested.

Each inner fold is left out once: the models of that run have not seen its cases, and nothing was chosen by them
(``contenders.unselected``). So every case has a score by a model that does not know it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from polysite.advice.contenders import Contender, unselected
from polysite.benchmark.jobs import Job, Trainer, inner_jobs, why_failed
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError

Key = tuple[str, str]  # hospital and case


@dataclass(frozen=True)
class Played:
    """A strategy after its runs on all inner folds."""

    contender: Contender
    jobs: tuple[Job, ...]  # one per inner fold that it was trained on
    scores: Mapping[Key, float]  # of every case of these folds, by the run that left it out
    folds: Mapping[Key, int]  # the inner fold of every case

    @property
    def study(self) -> Study:
        """The study, without inner folds; with the rounds that it trained."""
        return self.contender.study

    @property
    def mean(self) -> float:
        """Mean score over all cases."""
        return fmean(self.scores.values())

    def by_site(self) -> dict[str, float]:
        """Return the mean score of every hospital."""
        return {site: fmean(v) for site, v in sorted(grouped(self.scores).items())}


@dataclass(frozen=True)
class Runs:
    """Where and how the runs of an advice take place.

    Args:
        folder: Folder of the advice.
        inner: Number of inner folds.
        trainer: Trains the jobs.
    """

    folder: Path
    inner: int
    trainer: Trainer

    def play(
        self,
        contenders: Iterable[Contender],
        place: str,
        before: Iterable[Played] = (),
        folds: Sequence[int] = (),
        needed: Collection[str] = (),
    ) -> dict[str, Played]:
        """Train strategies on inner folds and return those that did not fail; runs that are done are not repeated.

        Args:
            contenders: The strategies; one whose first phases are another of them goes on from it.
            place: Name of the folder of the runs.
            before: Finished strategies; one that begins with them goes on from them.
            folds: The inner folds; all without any.
            needed: Names of strategies that must not fail.

        Raises:
            RunError: One that is needed failed, or all strategies.
        """
        known = {c.name: c for c in contenders}
        studies = {name: unselected(c.study) for name, c in known.items()}
        jobs = inner_jobs(self.folder / place, studies, self.inner, folds)
        every = [job for mine in jobs.values() for job in mine]
        self.trainer.step(f"{len(every)} runs", 0)
        lost = why_failed(jobs, self.trainer.train([*(job for one in before for job in one.jobs), *every]))
        for name in needed:
            if lost[name]:
                raise RunError(f"{name} failed, which all others are compared with: {lost[name]}")
        if all(lost.values()):
            name, why = next(iter(lost.items()))
            raise RunError(f"{name} failed: {why}")
        for name, why in lost.items():
            if why:
                self.trainer.step(f"{name} failed and is left out: {why}", 0)
        return {name: played(known[name], jobs[name]) for name in known if not lost[name]}


def played(chosen: Contender, jobs: Sequence[Job]) -> Played:
    """Return a strategy with the scores of its finished runs, one per inner fold."""
    scores: dict[Key, float] = {}
    folds: dict[Key, int] = {}
    for job in jobs:
        for site, cases in RunFolder(job.run).result.scores.items():
            for case, score in cases.items():
                scores[site, case], folds[site, case] = score.mean, job.fold
    return Played(chosen, tuple(jobs), scores, folds)


def grouped(scores: Mapping[Key, float]) -> dict[str, list[float]]:
    """Return the values of the cases of every hospital, smallest first: an order that does not depend on their names,
    which are pseudonyms where the hospitals are real."""
    found: dict[str, list[float]] = {}
    for site, score in sorted((site, score) for (site, _), score in scores.items()):
        found.setdefault(site, []).append(score)
    return found
