"""Scores of the validation cases of a run that is in progress."""

from statistics import fmean

from polysite.benchmark.jobs import Job
from polysite.engines.run_folder import RunFolder

LAST = 2  # validations whose mean is the score of a run: one alone depends on chance


def last_scores(job: Job) -> dict[str, tuple[float, int]]:
    """Return the mean score of every site over the last validations before a job's pause, and its number of cases.

    A study that is validated only at its end has one validation at every pause: that one counts.
    """
    records = [r for r in RunFolder(job.run).records() if r.validation and r.round < (job.until or r.round + 1)]
    found: dict[str, list[tuple[float, int]]] = {}
    for record in records[-1:] if job.validated_once else records[-LAST:]:
        for site, seen in record.validation.items():
            found.setdefault(site, []).append((fmean(seen.score.values()), seen.cases))
    return {site: (fmean(score for score, _ in seen), seen[-1][1]) for site, seen in found.items()}
