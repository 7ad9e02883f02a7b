"""Checks, before anything trains, that this machine has the memory and the disk space for a benchmark.

Both estimates are lower bounds (``peak.py``): a refused benchmark cannot run, and an accepted one may still fail.
Memory is that of one training step; every run estimates the rest when it starts.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polysite import study
from polysite.benchmark.jobs import Job
from polysite.engines.run_folder import KEPT
from polysite.errors import ConfigError
from polysite.peak import Step, device_memory, existing, gigabytes, step_bytes


def refuse_too_large(jobs: Sequence[Job], out: Path) -> None:
    """Refuse a job whose training step exceeds the memory, and jobs whose models exceed the free disk space."""
    _refuse(jobs, out, lambda job, step: _refuse_memory(job, step.total))


def refuse_full_disk(jobs: Sequence[Job], out: Path) -> None:
    """Refuse jobs whose models exceed the free disk space; they train on other machines."""
    _refuse(jobs, out, lambda job, step: None)


def _refuse(jobs: Sequence[Job], out: Path, refuse: Callable[[Job, Step], None]) -> None:
    steps: dict[Any, Step] = {}
    stored = 0
    for job in jobs:
        chosen = job.study
        key = (chosen.model, chosen.train, chosen.data.task)
        if key not in steps:
            steps[key] = step_bytes(chosen, study.build_module(chosen))
            refuse(job, steps[key])
        stored += 0 if job.run.exists() else (KEPT + 1) * steps[key].model
    free = shutil.disk_usage(existing(out)).free
    if stored > free:
        raise ConfigError(
            f"the models of {len(jobs)} runs take at least {gigabytes(stored)}, and {out} has {gigabytes(free)} "
            "free; choose another --out, or fewer methods with --only"
        )


def _refuse_memory(job: Job, needed: int) -> None:
    device, memory = device_memory(job.study)
    if needed > memory.total:
        train = job.study.train
        patch = " x ".join(map(str, train.patch))
        raise ConfigError(
            f"{job.title}: a training step with {train.batch} patches of {patch} takes at least {gigabytes(needed)} "
            f"of memory, and {device} has {gigabytes(memory.total)}; choose a smaller train.batch or train.patch"
        )
