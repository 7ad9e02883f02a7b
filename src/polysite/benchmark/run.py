"""Run all jobs of a benchmark, in parallel as memory allows; write the comparison of every federation, and of all."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from polysite import config
from polysite.benchmark.bench import Bench
from polysite.benchmark.cluster import Cluster
from polysite.benchmark.jobs import (
    Job,
    Step,
    Trainer,
    assess_federations,
    check,
    jobs,
    refuse_too_large,
    settings,
    silent,
)
from polysite.benchmark.trials import Chosen, Trials
from polysite.benchmark.workers import Workers
from polysite.engines.run_folder import RunFolder, file_name
from polysite.report import axes_page
from polysite.report.axes import FederationResult, distances, regrouped
from polysite.report.grid import Grid
from polysite.report.page import Options
from polysite.report.publish import comparison as write_comparison
from polysite.report.runs import Method, read
from polysite.spreadsheets import rows as csv_rows
from polysite.storage import write_file

log = logging.getLogger("polysite")


@dataclass(frozen=True)
class Results:
    """The finished runs of a benchmark as methods, by federation."""

    cells: Mapping[str, Sequence[Method]]  # title of a federation -> its methods; "" without an axis of federations
    failed: Mapping[str, str] = field(default_factory=dict)  # failed run -> reason
    remarks: tuple[str, ...] = ()


def run(
    bench: Bench,
    out: Path,
    overrides: Mapping[str, str] | None = None,
    parallel: int | None = None,
    step: Step = silent,
    slurm: Mapping[str, str] = MappingProxyType({}),
) -> Results:
    """Run what is not finished; return the methods of every federation, and the failed runs with the reason.

    Args:
        bench: The benchmark.
        out: Its folder; an existing one is continued.
        overrides: Settings that override those of all studies.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        slurm: Parameters of sbatch, for a job array of SLURM; none for processes of this machine.
    """
    trainer: Trainer = Cluster(slurm, parallel, out, step) if slurm else Workers(parallel, step)
    text = settings(out, bench, overrides or {})
    listed = jobs(bench, out, overrides or {}, step)
    trials = Trials(bench.tuning, bench.methods, listed) if bench.tuning else None
    listed = trials.decided() if trials else listed
    remarks = check(listed, "distance" in bench.compare.figures)
    for remark in remarks:
        log.warning(remark)
    refuse_too_large(listed, out)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "bench.toml", lambda path: path.write_text(text, encoding="utf-8"))
    unknown = assess_federations(bench, out, overrides or {}, step)
    tuned = trials.run(trainer) if trials else Chosen(listed, {}, ())
    listed, remarks = list(tuned.jobs), remarks + tuned.remarks
    for job in listed:
        if others := job.federations[1:]:
            step(f"{job.title}: also serves {len(others)} other federations of the same cases", len(others))
        if job.done:
            step(f"{job.title}: finished before")
    failed = {**tuned.failed, **trainer.train([job for job in listed if job.title not in tuned.failed])}
    remarks += tuple(f"No distances of {title}: {why}." for title, why in unknown.items())
    cells = {f.title: _methods(listed, f.title, failed) for f in bench.dealt}
    return Results(cells, failed, remarks)


def _methods(listed: Sequence[Job], federation: str, failed: Mapping[str, str]) -> list[Method]:
    """Return the methods of a federation that have finished all their runs."""
    here = [job for job in listed if federation in job.federations]
    complete = [
        [job for job in here if job.method == name]
        for name in dict.fromkeys(job.method for job in here)
        if all(job.done and job.title not in failed for job in here if job.method == name)
    ]
    own = {(j.fold, j.seed): j for mine in complete for j in mine if j.federations[0] == federation}
    methods = []
    for mine in complete:
        runs = [read(job.run, job.method) for job in mine]
        for k, job in enumerate(mine):
            like = own.get((job.fold, job.seed))
            if job.federations[0] != federation and like is not None:
                runs[k] = regrouped(runs[k], read(like.run))
        methods.append(Method(mine[0].method, tuple(runs)))
    return methods


def publish(bench: Bench, out: Path, results: Results) -> list[Grid]:
    """Write the comparison of every federation and, if there are several, the page over all; return its tables."""
    cells = {title: methods for title, methods in results.cells.items() if methods}
    compared = []
    for title, methods in cells.items():
        chosen = options(bench, out, methods, results, title)
        place = Path("federations", file_name(title)) if title else Path("comparison")
        name = f"{bench.title}: {title}" if title else bench.title
        done = write_comparison(out / place, name, methods, chosen, replace=True)
        compared.append(FederationResult(title, done, distances(_assessed(out, title))))
    if not bench.federations or not cells:
        return []
    grids = axes_page.tables(compared)
    pages = {title: f"../federations/{file_name(title)}/index.html" for title in cells}
    remarks = (*bench.remarks, *results.remarks, *_lost(results))
    axes_page.write(out / "comparison", bench.title, bench.about, compared, grids, pages, remarks, bench.published)
    return grids


def options(bench: Bench, out: Path, methods: Sequence[Method], results: Results, federation: str = "") -> Options:
    """Return the options of a page: reference, tests, figures, published numbers, assessment, failed runs."""
    assessed = next(iter(_assessed(out, federation)), None)
    names = [m.name for m in methods]
    lost, here, first = _lost(results), _cases(methods), methods[0].first
    absent = [case for case in bench.compare.cases if case not in here]
    if absent:
        lost.append(f"Not in the data, so not shown: {', '.join(absent)}.")
    swept = ("sweep",) if bench.sweep and "sweep" not in bench.compare.figures else ()
    return Options(
        reference=bench.reference if bench.reference in names else None,
        policy=bench.compare.policy,
        tail=bench.compare.tail,
        speeds=config.parse(first.config, where=str(first.path / "config.toml")).cost,
        assessment=assessed,
        scans=not federation,  # or every federation's page would show the same patients
        remarks=(*bench.remarks, *lost),
        figures=(*bench.compare.figures, *swept),
        cases=tuple(case for case in bench.compare.cases if case in here),
        questions=tuple(q for q in bench.compare.questions if _known(q, names)),
        published=bench.published.on(federation),
    )


def _lost(results: Results) -> list[str]:
    return [f"Left out: {job} failed: {why}." for job, why in results.failed.items()]


def _assessed(out: Path, federation: str) -> list[Path]:
    """Return the folders of a federation's assessments, one for every fold and seed that assigns its cases anew."""
    place = out / "assess" / file_name(federation) if federation else out / "assess"
    return sorted(place.glob("fold*-seed*"))


def _cases(methods: Sequence[Method]) -> set[str]:
    """Return the names of all cases of the runs, whatever their split."""
    runs = [run for method in methods for run in method.runs]
    return {row["Subject_ID"] for run in runs for row in csv_rows(RunFolder(run.path).split.splitlines())}


def _known(question: str, names: Sequence[str]) -> bool:
    """Return whether both methods of a question are here; a row of one hospital's model is named after its method.

    >>> _known("scaffold > local, model of 01 @ 3", ["scaffold", "local"]), _known("cfl < fedavg", ["fedavg"])
    (True, False)
    """
    asked = re.split(r"!=|>|<", re.split(r"\s[@/]\s", question)[0])
    return all(method.strip().partition(", model of ")[0] in names for method in asked)
