"""Train studies on inner folds, and collect the score of every case that is not tested.

Each inner fold is left out once: the models of that run have not seen its cases, and nothing was chosen by them
(``contenders.unselected``). So every case has a score by a model that does not know it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polysite.advice.contenders import unselected
from polysite.benchmark.jobs import Job, Step, check, inner_job, refuse_too_large, with_standings
from polysite.benchmark.workers import work
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError
from polysite.report.live import Standing

Key = tuple[str, str]  # hospital and case


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


def play(
    studies: Mapping[str, Study],
    root: Path,
    inner: int,
    parallel: int | None,
    step: Step,
    before: Sequence[Job] = (),
) -> dict[str, Played]:
    """Train studies on all inner folds and return their scores; runs that are done are not repeated.

    Args:
        studies: The studies by name; one whose first phases are another of them goes on from it.
        root: Folder of the runs.
        inner: Number of inner folds.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        before: Finished runs; a study that begins with one of them goes on from it.

    Raises:
        RunError: All studies failed.
    """
    return _play(studies, None, range(inner), root, inner, parallel, step, before)


def race(
    studies: Mapping[str, Study],
    reference: str,
    kept: Collection[str],
    root: Path,
    inner: int,
    parallel: int | None,
    step: Step,
    hopeful: Callable[[Played, Played], bool],
    before: Sequence[Job] = (),
) -> dict[str, Played]:
    """Train studies like ``play``, but on the other inner folds only those that are hopeful after the first one.

    Args:
        studies: The studies by name.
        reference: The study that the others are compared with.
        kept: Studies that are trained on all folds, with the reference.
        root: Folder of the runs.
        inner: Number of inner folds.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        hopeful: Returns whether a study goes on, by its scores in the first fold and those of the reference.
        before: Finished runs; a study that begins with one of them goes on from it.

    Raises:
        RunError: The reference failed, or all others.
    """
    first = _play(studies, reference, [0], root, inner, parallel, step, before)
    whole = {reference, *kept}
    alive = {n: studies[n] for n, one in first.items() if n in whole or hopeful(one, first[reference])}
    for name in (name for name in first if name not in alive):
        step(f"{name} ends after the first inner fold: it gained at no hospital", 0)
    played = _play(alive, reference, range(inner), root, inner, parallel, step, before)
    return {n: played.get(n, one) for n, one in first.items() if n in played or n not in alive}


def _play(
    equal: Mapping[str, Study],
    reference: str | None,
    folds: Sequence[int],
    root: Path,
    inner: int,
    parallel: int | None,
    step: Step,
    before: Sequence[Job] = (),
) -> dict[str, Played]:
    """Train studies with given rounds on some inner folds."""
    jobs = {name: [inner_job(root, name, unselected(s), inner, k) for k in folds] for name, s in equal.items()}
    every = [job for mine in jobs.values() for job in mine]
    check(every)
    refuse_too_large(every, root)
    for job in every:
        job.write()
    step(f"{len(every)} runs", 0, (), _standings(jobs))
    failed = work([*before, *every], parallel, with_standings(step, lambda: _standings(jobs)))
    lost = {name: next((failed[j.title] for j in mine if j.title in failed), "") for name, mine in jobs.items()}
    if reference and lost[reference]:
        raise RunError(f"{reference} failed, which all others are compared with: {lost[reference]}")
    if all(lost.values()):
        name, why = next(iter(lost.items()))
        raise RunError(f"{name} failed: {why}")
    for name, why in lost.items():
        if why:
            step(f"{name} failed and is left out: {why}", 0)
    return {name: played(equal[name], jobs[name]) for name in equal if not lost[name]}


def _standings(jobs: Mapping[str, Sequence[Job]]) -> list[Standing]:
    """Return the share of the runs of every study that have ended, and the mean score of their cases."""
    found = []
    for name, mine in jobs.items():
        ended = [job for job in mine if job.done]
        scores = [s.mean for job in ended for site in RunFolder(job.run).result.scores.values() for s in site.values()]
        mean = sum(scores) / len(scores) if scores else None
        found.append(Standing(name, name, len(ended) / len(mine), mean))
    return found


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
