"""The search: train candidates on inner folds, rung by rung, and write down the best as a study.

Every candidate is a run per inner fold, in the folder of the search. The cases of the study's test fold are in none of
them. What goes on at a rung follows from the scores in the run folders alone, so a search that was interrupted ends
with the same choice when the same command is given again.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from polysite import config, study
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import Job, Trainer, inner_jobs, why_failed
from polysite.benchmark.scores import LAST, last_scores
from polysite.benchmark.workers import Workers
from polysite.config import Study
from polysite.errors import ConfigError, RunError
from polysite.foreign import read_toml
from polysite.spreadsheets import csv_text
from polysite.storage import write_file
from polysite.tuning.halving import Rung, affordable, cost, rungs, survivors
from polysite.tuning.space import Candidate, Space

AT_RUNGS = 0.3  # smallest share of a training where scores come from the rungs alone: a third is the first rung


@dataclass(frozen=True)
class Row:
    """What became of a candidate."""

    run: str  # name of its runs
    candidate: Candidate
    share: float  # of a whole training that it took
    score: float | None  # mean Dice, or accuracy, over the cases of all inner folds; None if it failed
    sites: Mapping[str, float]  # the same for every hospital
    path: tuple[tuple[float, float], ...] = ()  # share of a training and score at every rung
    failed: str = ""


@dataclass(frozen=True)
class Tuned:
    """A search and its folder, finished or after some of its rungs."""

    folder: Path
    rows: tuple[Row, ...]  # best first; candidates that trained longer come before others
    reference: Row
    study: Study  # the best
    rung: int  # rungs that have ended
    rungs: int

    @property
    def best(self) -> Row:
        """The best candidate."""
        return self.rows[0]

    @property
    def finished(self) -> bool:
        """Whether all rungs have ended."""
        return self.rung == self.rungs


@dataclass(frozen=True)
class Plan:
    """What a search will train."""

    base: Study
    space: Space
    budget: float  # whole trainings of the reference
    inner: int
    candidates: Sequence[Candidate]
    rungs: Sequence[Rung]

    @property
    def trainings(self) -> float:
        """Cost in whole trainings of the reference, at most."""
        return self.inner * cost(self.rungs)


def plan(base: Study, space: Space, trainings: float, inner: int = 3) -> Plan:
    """Return the candidates and rungs that a budget affords; every method has equally many candidates.

    Args:
        base: The study; its test cases are never used.
        space: Methods and values to try.
        trainings: The budget, in whole trainings of the reference.
        inner: Number of inner folds, each of which validates once.
    """
    if inner < 2:
        raise ConfigError(f"the number of inner folds must be at least two, got {inner}")
    methods, shortest = len(space.methods), _shortest(base)
    most = max(m.points + 1 for m in space.methods.values()) * methods
    count = affordable(trainings / inner, most, shortest) // methods
    if not count:
        raise ConfigError(
            f"the budget is {trainings:.3g} trainings, but one candidate of each of {methods} methods on {inner} inner "
            f"folds takes {inner * cost(rungs(methods, shortest)):.3g}: name fewer methods, or raise the budget"
        )
    chosen = space.candidates(base, count, base.seed)
    return Plan(base, space, trainings, inner, chosen, rungs(len(chosen), shortest))


def _shortest(base: Study) -> float:
    """Return the smallest share of a training after which scores can be compared.

    A study that is validated only at its end is scored once at every rung.
    """
    every, rounds = base.run.validate_every, base.run.rounds
    return AT_RUNGS if every >= rounds else LAST * every / rounds


def tune(
    planned: Plan,
    out: Path,
    trainer: Trainer | None = None,
    seen: Callable[[Tuned], object] = lambda found: None,
) -> Tuned:
    """Search for the best method and its settings; an interrupted search in the same folder is continued.

    Args:
        planned: What is trained.
        out: Folder of the search.
        trainer: Trains the candidates, and reports progress; None for processes of this machine.
        seen: Sees the state of the search after every rung.

    Raises:
        RunError: The search in the folder began with other settings, or the reference failed.
    """
    trainer = trainer or Workers()
    base, space, inner = planned.base, planned.space, planned.inner
    settings = {"study": config.dump(base), "trainings": planned.budget, "inner": inner, "equal": "steps"}
    settings |= {"methods": {n: {"changes": m.changes, "grid": m.grid} for n, m in space.methods.items()}}
    same_settings(out, "tune.toml", settings)
    names = {f"{k:03d} {c.method}": c for k, c in enumerate(planned.candidates)}
    reference = next(iter(names))  # the reference with its own values
    studies = equalise({n: space.study(base, c) for n, c in names.items()}, reference, "steps")
    jobs = inner_jobs(out, studies, inner)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "tune.toml", lambda path: path.write_text(tomli_w.dumps(settings), encoding="utf-8"))
    rows = {n: Row(n, c, 0.0, None, {}) for n, c in names.items()}
    going, last = list(names), len(planned.rungs)
    for number, rung in enumerate(planned.rungs, start=1):
        going = [n for n in going if not rows[n].failed]
        if number > 1:
            going = survivors({n: rows[n].score or 0.0 for n in going}, rung.candidates, reference)
        trainer.step(f"rung {number} of {last}: {len(going)} candidates", 0)
        listed = {n: [job.paused(rung.share) for job in jobs[n]] for n in going}
        lost = why_failed(listed, trainer.train([j for mine in listed.values() for j in mine]))
        rows |= {n: _row(rows[n], rung.share, mine, lost[n]) for n, mine in listed.items()}
        _write(out, rows)
        if rows[reference].failed:
            raise RunError(f"the reference {rows[reference].candidate.name} failed: {rows[reference].failed}")
        ranked = sorted(rows.values(), key=lambda row: (-row.share, -(row.score or 0.0)))
        best = replace(studies[ranked[0].run], split=base.split)
        found = Tuned(out, tuple(ranked), rows[reference], best, number, last)
        seen(found)
    text = config.dump(study.pinned(found.study))
    write_file(out / "best.toml", lambda path: path.write_text(text, encoding="utf-8"))
    return found


def _row(before: Row, share: float, jobs: Sequence[Job], failed: str) -> Row:
    """Return the scores of a candidate over the validation cases of all inner folds after one more rung."""
    if failed:
        return replace(before, share=share, score=None, sites={}, failed=failed)
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for job in jobs:
        for site, (score, cases) in last_scores(job).items():
            sums[site] = sums.get(site, 0.0) + score * cases
            counts[site] = counts.get(site, 0) + cases
    mean = sum(sums[site] for site in sorted(sums)) / max(1, sum(counts.values()))
    each = {site: sums[site] / counts[site] for site in sorted(sums)}
    return replace(before, share=share, score=mean, sites=each, path=(*before.path, (share, mean)))


def same_settings(out: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Refuse to continue in a folder whose search began with other settings.

    Args:
        out: The folder.
        name: File of the settings in it; without the file nothing has begun.
        settings: The settings now, with the study as TOML.
    """
    file = out / name
    if not file.exists():
        return
    before = read_toml(file)
    asked = tomllib.loads(tomli_w.dumps(dict(settings)))
    for given in (before, asked):
        given["study"] = config.parse(given["study"])  # a later version may write more keys
    odd = next((key for key in asked if before.get(key) != asked[key]), None)
    if odd is not None:
        words = {
            "trainings": "budget",
            "inner": "number of inner folds",
            "only": "choice of strategies",
            "rules": "version of polysite, which spent a budget in another way",
        }.get(odd, odd)
        raise RunError(f"the search in {out} began with another {words}; choose another --out, or remove it")


def _write(out: Path, rows: Mapping[str, Row]) -> None:
    """Write the table of all candidates so far."""
    sites = sorted({site for row in rows.values() for site in row.sites})
    lines = []
    for name, row in rows.items():
        values = json.dumps(dict(row.candidate.values))
        score = "" if row.score is None else f"{row.score:.6f}"
        each = [f"{row.sites[s]:.6f}" if s in row.sites else "" for s in sites]
        lines.append([name, row.candidate.method, values, f"{row.share:.4f}", score, *each, row.failed])
    text = csv_text(["run", "method", "settings", "share of a training", "score", *sites, "failed"], lines)
    write_file(out / "candidates.csv", lambda path: path.write_text(text, encoding="utf-8"))
