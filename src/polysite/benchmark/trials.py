"""Equal tuning: every method of a benchmark tries equally many settings, in every fold and with every seed.

A trial trains for a share of the rounds. The one with the best score on the validation cases of its fold goes on from
where it stopped and becomes the run of the method; test cases choose nothing. A method that continues another one, such
as fine-tuning after FedAvg, takes over the choice of that one.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polysite import config
from polysite.benchmark.equal_tuning import Tuning, Values, words
from polysite.benchmark.jobs import Job, Trainer
from polysite.benchmark.scores import last_scores
from polysite.foreign import parse_json
from polysite.storage import write_file


@dataclass(frozen=True)
class Chosen:
    """The runs of a benchmark with the settings that were chosen for them."""

    jobs: Sequence[Job]
    failed: Mapping[str, str]  # title of a run whose trials all failed -> reason
    remarks: tuple[str, ...]


class Trials:
    """The trials of all runs of a benchmark.

    Args:
        tuning: What is tried.
        methods: The methods of the benchmark; ``tuning`` names settings of their own.
        jobs: All runs, with the settings that the benchmark has for them.
    """

    def __init__(self, tuning: Tuning, methods: Mapping[str, Mapping[str, Any]], jobs: Sequence[Job]):
        self.tuning, self.jobs = tuning, jobs
        self._before = {job: job.first(other for other in jobs if other is not job) for job in jobs}
        self._tried = {
            job: [_trial(job, values, tuning.share) for values in tuning.trials(methods[job.method].get("tuning"))]
            for job, before in self._before.items()
            if before is None
        }

    def decided(self) -> list[Job]:
        """Return all runs, those whose trials ended before with the settings that were chosen."""
        found = {job: _read(job) for job in self._tried}
        best = {job: _best(self._tried[job], scores)[1] for job, scores in found.items() if scores}
        return self._with(best)

    def run(self, trainer: Trainer) -> Chosen:
        """Run the trials that have not ended; return all runs with the best settings, to go on from the best trial."""
        todo = [trial for job, trials in self._tried.items() if not _file(job).exists() for trial, _ in trials]
        for job, trials in self._tried.items():
            if _file(job).exists():
                trainer.step(f"{job.title}: its settings were chosen before", len(trials))
        for each in todo:
            if each.done:
                trainer.step(f"{each.title}: finished before")
        lost = trainer.train(todo)
        best: dict[Job, Values] = {}
        failed: dict[str, str] = {}
        for job, trials in self._tried.items():
            scores = _read(job) or _write(job, trials, lost)
            if scores:
                best[job] = _take_over(job, _best(trials, scores))
            else:
                failed[job.title] = next(lost[trial.title] for trial, _ in trials)
        for job, before in self._before.items():
            if before is not None:
                trainer.step(f"{job.title}: takes over the settings of {before.method}", len(self.tuning.trials(None)))
                failed |= {job.title: failed[before.title]} if before.title in failed else {}
        return Chosen(self._with(best), failed, _remarks(self.tuning, best))

    def _with(self, best: Mapping[Job, Values]) -> list[Job]:
        """Return all runs with the settings that were chosen for them, or for the run that they continue."""
        return [_varied(job, best.get(self._before[job] or job, {})) for job in self.jobs]


Trial = tuple[Job, Values]  # a short run, and the settings that it tries


def _trial(job: Job, values: Values, share: float) -> Trial:
    name = f"{job.method}, {words(values)}"
    trial = replace(_varied(job, values), method=name, root=job.root / "tuning", evaluate=False)
    return trial.paused(share), values


def _varied(job: Job, values: Values) -> Job:
    return replace(job, study=config.vary(job.study, values)) if values else job


def _best(trials: Sequence[Trial], scores: Sequence[float | None]) -> Trial:
    """Return the first trial with the highest score."""
    pairs = zip(trials, scores, strict=True)
    return max(pairs, key=lambda pair: -1.0 if pair[1] is None else pair[1])[0]


def _take_over(job: Job, best: Trial) -> Values:
    """Make the run of a trial that of its job, unless it is already; return the settings."""
    trial, values = best
    if trial.run.exists() and not job.run.exists():
        job.run.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(trial.run, job.run)
    return values


def _file(job: Job) -> Path:
    """Return the file with the scores of a job's trials, which is written when all have ended."""
    return job.root / "tuning" / "scores" / f"{job.place}.json"


def _read(job: Job) -> list[float | None]:
    """Return the scores of the trials of a job; empty if they have not ended."""
    file = _file(job)
    found: list[float | None] = parse_json(file.read_text(encoding="utf-8"))["scores"] if file.exists() else []
    return found


def _write(job: Job, trials: Sequence[Trial], lost: Mapping[str, str]) -> list[float | None]:
    """Write and return the score of every trial, None for one that failed; write nothing if all have failed."""
    scores = [None if trial.title in lost else _mean(trial) for trial, _ in trials]
    if all(score is None for score in scores):
        return []
    text = json.dumps({"settings": [dict(values) for _, values in trials], "scores": scores}, indent=1)
    _file(job).parent.mkdir(parents=True, exist_ok=True)
    write_file(_file(job), lambda path: path.write_text(text, encoding="utf-8"))
    return scores


def _mean(job: Job) -> float:
    """Return the mean score over all validation cases of a trial."""
    found = last_scores(job).values()
    return sum(score * cases for score, cases in found) / max(1, sum(cases for _, cases in found))


def _remarks(tuning: Tuning, found: Mapping[Job, Values]) -> tuple[str, ...]:
    """Return sentences on the effort, and on the settings that were chosen for every method."""
    if not found:
        return ()
    first = (
        f"Equal tuning: in every fold, every method tried {len(tuning.trials(None))} settings for {tuning.share:.0%} "
        "of its rounds and went on with the best on validation cases."
    )
    chosen: dict[str, dict[str, int]] = {}
    for job, values in found.items():
        counts = chosen.setdefault(job.method, {})
        counts[words(values)] = counts.get(words(values), 0) + 1
    each = [f"{name}: {', '.join(f'{v} ({n} times)' for v, n in c.items())}" for name, c in chosen.items()]
    return first, f"Chosen settings: {'; '.join(each)}."
