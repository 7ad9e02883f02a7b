"""A tiny benchmark on phantoms as TOML, of which tests change what they are about."""

import tomli_w

from polysite import benchmark, config
from polysite.benchmark import worker, workers
from polysite.benchmark.last_run import LastRun

SITES = {"east": {"cases": 8}, "north": {"cases": 8, "scanner": 2}, "west": {"cases": 9, "scanner": 9}}
HEAD = 'title = "Tiny"\nreference = "fedavg"\n'


def study(sites=SITES, **sections):
    """The study that all methods share."""
    base = {
        "model": {"filters": [2, 4, 4]},
        "data": {"name": "phantom", "shape": [24, 24, 24], "sites": sites},
        "train": {"patch": [16, 16, 16], "device": "cpu", "augment": "none"},
        "run": {"rounds": 1},
    }
    return config.merge(base, sections)


def text(methods="fedavg = {}\n", head=HEAD, **changes):
    """The file; ``methods`` is the text of its last section, ``changes`` are those of the study."""
    return f"{head}{tomli_w.dumps({'study': study(**changes)})}\n[methods]\n{methods}"


def load(folder, text):
    """The benchmark of a file."""
    (folder / "tiny.toml").write_text(text)
    return benchmark.load(str(folder / "tiny.toml"))


def train_here(self, jobs):
    """Run jobs in this process as worker processes do; return the titles of those that failed."""
    last, done, failed = LastRun(), [job for job in jobs if job.done], {}
    for job in sorted(jobs, key=lambda job: len(job.study.then)):  # a job comes after the job it continues from
        if job.done:
            continue
        job.run.parent.mkdir(parents=True, exist_ok=True)
        if worker._run(workers.order(job, job.first(done), 1), last):
            failed[job.title] = "it failed"
        else:
            done.append(job)
        self.step(job.title)
    return failed
