"""The jobs of a benchmark as one job array of SLURM, through submitit (``polysite[slurm]``).

A task of the array runs a job and then the jobs that continue from it, one after the other. So no SLURM dependency is
left waiting for ever when the first one fails (each of the others then trains all its phases), nothing has to be
submitted later, and the task loads its libraries and cases once. A task that reaches its time limit is queued again and
its run resumes from the last checkpoint.

The command waits for the array and collects the results. It may be stopped: the array goes on, and the same command
finds it by ``cluster/jobs.json`` of the benchmark's folder, waits for what still runs and submits only what is missing.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysite.benchmark.jobs import Job, Step
from polysite.benchmark.last_run import LastRun
from polysite.benchmark.worker import Order, perform, release
from polysite.benchmark.workers import order, reason
from polysite.errors import ConfigError
from polysite.foreign import parse_json
from polysite.own_process import begin
from polysite.storage import write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import submitit

DEFAULTS = {"job_name": "polysite", "time": 1440, "gpus_per_node": 1, "cpus_per_task": 4}  # time in minutes
REQUEUES = 10  # times that a task goes on after its time limit
ACTIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")  # not: unknown to SLURM
POLL = 1.0  # seconds between two looks


@dataclass(frozen=True)
class Cluster:
    """Trains jobs as tasks of an array.

    Args:
        given: Parameters of sbatch by name.
        most: Tasks that run at the same time; None for all.
        out: Folder of the benchmark, which all nodes must see.
        step: Reports progress.
    """

    given: Mapping[str, str]
    most: int | None
    out: Path
    step: Step

    def train(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Train what is not done; return the failed jobs with the reason."""
        folder = (self.out / "cluster").resolve()
        executor = _executor(folder, self.given, self.most)
        left = [job for job in jobs if not job.done]
        waiting = _running(folder, left)
        known = {job for task in waiting for job in task.jobs}
        chains = _chains([job for job in left if job not in known])
        if chains:
            waiting += _submit(executor, chains, folder, jobs, self.step)
        failed: dict[str, str] = {}
        while waiting:
            for task in [task for task in waiting if task.handle.done()]:
                waiting.remove(task)
                failed |= _collect(task, self.step)
            time.sleep(POLL if waiting else 0)
        return failed


@dataclass
class Task:
    """A submitted chain of jobs."""

    jobs: tuple[Job, ...]
    handle: "submitit.Job[list[int]]" = field(repr=False)


class Runner:
    """What a task runs: orders, one after the other. submitit sends it to the node."""

    def __call__(self, orders: Sequence[Order]) -> list[int]:
        """Return the exit code of every order."""
        begin()
        codes, last = [], LastRun()
        for each in orders:
            with _restored():
                codes.append(perform(each, last))
            release()
        return codes

    def checkpoint(self, orders: Sequence[Order]) -> Any:
        """Return what to submit again after the time limit: the same orders, whose runs then resume."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, orders)


@contextmanager
def _restored() -> "Iterator[None]":
    """Restore standard output and error, which a job redirects to a file of its own."""
    before = [os.dup(stream) for stream in (1, 2)]
    try:
        yield
    finally:
        for copy, stream in zip(before, (1, 2), strict=True):
            sys.stdout.flush()
            os.dup2(copy, stream)
            os.close(copy)


def _executor(folder: Path, given: Mapping[str, str], most: int | None) -> Any:
    """Return submitit's executor with the parameters of sbatch."""
    try:
        import submitit
    except ImportError as problem:
        raise ConfigError("--slurm needs submitit: pip install 'polysite[slurm]'") from problem
    try:
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=REQUEUES)
    except RuntimeError as problem:
        raise ConfigError("--slurm: there is no SLURM here (no 'srun'); use a login node") from problem
    limit = {"array_parallelism": most} if most else {}
    try:
        executor.update_parameters(**{**DEFAULTS, **limit, **{k: _value(v) for k, v in given.items()}})
    except ValueError as problem:
        raise ConfigError(f"--slurm: {' '.join(str(problem).split())}") from problem
    return executor


def _value(text: str) -> Any:
    """Return a parameter as sbatch takes it: a number, a list or text.

    >>> _value("60"), _value("gpu"), _value('["module load cuda"]')
    (60, 'gpu', ['module load cuda'])
    """
    try:
        return parse_json(text)
    except ValueError:
        return text


def _chains(left: Sequence[Job]) -> list[tuple[Job, ...]]:
    """Return the jobs in chains: a job that waits for none, and then those that continue from it."""
    chains: dict[Job, list[Job]] = {}
    roots: dict[Job, Job] = {}
    for job in sorted(left, key=lambda job: len(job.study.then)):  # a job comes after the job it continues from
        before = job.first(left)
        roots[job] = roots[before] if before else job
        chains.setdefault(roots[job], []).append(job)
    return [tuple(chain) for job in left if (chain := chains.get(job))]


def _submit(
    executor: Any, chains: Sequence[tuple[Job, ...]], folder: Path, jobs: Sequence[Job], step: Step
) -> list[Task]:
    """Submit chains as one array, and note which task has which run."""
    orders = [[order(job, job.first(jobs), len(chain)) for job in chain] for chain in chains]
    handles = executor.map_array(Runner(), orders)
    tasks = [Task(chain, handle) for chain, handle in zip(chains, handles, strict=True)]
    noted = {**_noted(folder), **{job.place: str(task.handle.job_id) for task in tasks for job in task.jobs}}
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "jobs.json", lambda path: path.write_text(json.dumps(noted, indent=1)))
    step(f"submitted {sum(map(len, chains))} runs in {len(tasks)} tasks, {tasks[0].handle.job_id} and following", 0)
    return tasks


def _running(folder: Path, left: Sequence[Job]) -> list[Task]:
    """Return the tasks of an earlier command that still wait or run, with their unfinished jobs."""
    import submitit

    noted, found = _noted(folder), dict[str, list[Job]]()
    for job in left:
        if job.place in noted:
            found.setdefault(noted[job.place], []).append(job)
    tasks = [Task(tuple(mine), submitit.SlurmJob(folder=folder, job_id=number)) for number, mine in found.items()]
    return [task for task in tasks if not task.handle.done(force_check=True) and task.handle.state in ACTIVE]


def _noted(folder: Path) -> dict[str, str]:
    file = folder / "jobs.json"
    return dict(parse_json(file.read_text())) if file.exists() else {}


def _collect(task: Task, step: Step) -> dict[str, str]:
    """Return the jobs of an ended task that have failed, with the reason."""
    try:
        codes, problem = task.handle.result(), ""
    except Exception as raised:  # submitit raises what the task raised, or that it was cancelled or killed
        lines = [line.strip() for line in str(raised).splitlines() if "Error: " in line or "Exception: " in line]
        codes, problem = [1] * len(task.jobs), lines[-1] if lines else " ".join(str(raised).split())[:300]
    failed = {}
    for job, code in zip(task.jobs, codes, strict=False):
        if not job.done:
            printed = job.output.exists() and job.output.stat().st_size
            failed[job.title] = reason(job, code) if printed else f"{problem} ({task.handle.paths.stderr})"
        step(f"{job.title}: {'done' if job.done else 'failed'}")
    return failed
