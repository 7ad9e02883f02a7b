"""Run a benchmark: all its jobs, in parallel as memory allows, and what the page about them needs."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from polysite import config
from polysite.benchmark.bench import Bench
from polysite.benchmark.jobs import Step, check, jobs, settings, silent
from polysite.benchmark.workers import work
from polysite.engines.run_folder import RunFolder
from polysite.report.page import Options
from polysite.report.runs import Method, read
from polysite.storage import write_file


def run(
    bench: Bench,
    out: Path,
    overrides: Mapping[str, str] | None = None,
    parallel: int | None = None,
    step: Step = silent,
) -> tuple[list[Method], dict[str, str]]:
    """Run what is not finished; return the methods to compare, and the failed runs with the reason."""
    text = settings(out, bench, overrides or {})
    listed = list(jobs(bench, out, overrides or {}, step))
    check(listed)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "bench.toml", lambda path: path.write_text(text, encoding="utf-8"))
    for job in listed:
        job.file.parent.mkdir(parents=True, exist_ok=True)
        job.file.write_text(config.dump(job.study), encoding="utf-8")
        if job.done:
            step(f"{job.title}: finished before")
    failed = work(listed, parallel, step)
    methods = []
    for name in bench.methods:
        mine = [job for job in listed if job.method == name]
        done = [read(job.run, name) for job in mine if job.done]
        if done and not any(job.title in failed for job in mine):
            methods.append(Method(name, tuple(done)))
    return methods, failed


def options(bench: Bench, out: Path, methods: Sequence[Method], failed: Mapping[str, str]) -> Options:
    """Return the options of the page: reference, tests, figures, published numbers, assessment, failed runs."""
    assessed = next(iter(sorted((out / "assess").glob("fold*-seed*"))), None)
    names = [m.name for m in methods]
    lost = [f"Left out: {job} failed: {why}." for job, why in failed.items()]
    here = _cases(methods)
    absent = [case for case in bench.compare.cases if case not in here]
    if absent:
        lost.append(f"Not in the data, so not shown: {', '.join(absent)}.")
    return Options(
        reference=bench.reference if bench.reference in names else None,
        policy=bench.compare.policy,
        tail=bench.compare.tail,
        speeds=config.parse(methods[0].first.config).cost,
        assessment=assessed,
        remarks=(*bench.remarks, *lost),
        figures=bench.compare.figures,
        cases=tuple(case for case in bench.compare.cases if case in here),
        questions=tuple(q for q in bench.compare.questions if _known(q, names)),
        published=bench.published,
    )


def _cases(methods: Sequence[Method]) -> set[str]:
    """Return the names of all cases of the runs, whatever their split."""
    runs = [run for method in methods for run in method.runs]
    return {row["Subject_ID"] for run in runs for row in csv.DictReader(RunFolder(run.path).split.splitlines())}


def _known(question: str, names: Sequence[str]) -> bool:
    """Return whether both methods of a question are here; a row of one hospital's model is named after its method.

    >>> _known("scaffold > local, model of 01 @ 3", ["scaffold", "local"]), _known("cfl < fedavg", ["fedavg"])
    (True, False)
    """
    asked = re.split(r"!=|>|<", re.split(r"\s[@/]\s", question)[0])
    return all(method.strip().partition(", model of ")[0] in names for method in asked)
