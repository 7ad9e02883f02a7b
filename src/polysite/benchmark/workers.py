"""Processes that run the jobs of a benchmark, as many in parallel as fit into memory.

A worker process runs one job after the other, so that its libraries are loaded once; after a crash it ends and the next
job gets a new one. A job whose first phases are a job of their own waits for that job and continues from it.
"""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from select import select
from signal import SIGTERM, default_int_handler, signal

from polysite.benchmark.jobs import REFUSED, Job, Step
from polysite.benchmark.room import machine_memory
from polysite.own_process import worker_command

SPARE = 0.8  # fraction of the free memory that runs may use
LOOK = 20.0  # seconds after which a run has allocated most of its memory


def work(jobs: Sequence[Job], most: int | None, step: Step) -> dict[str, str]:
    """Run jobs in parallel as memory allows; return the failed ones with the reason."""
    signal(SIGTERM, default_int_handler)  # SIGTERM interrupts like Ctrl-C, so that no child is left behind
    done = [job for job in jobs if job.done]
    left = [job for job in jobs if job not in done]
    room, running, idle = Room(most), dict[Job, Worker](), list[Worker]()
    failed: dict[str, str] = {}
    try:
        while left or running:
            while len(running) < room.now and (ready := [j for j in left if not j.first([*left, *running])]):
                job = ready[0]
                left.remove(job)
                worker = running[job] = idle.pop() if idle else Worker(room.threads)
                worker.begin(job, job.first(done))
                step(f"{len(running)} in parallel · {job.title}", 0)
            select([worker.replies for worker in running.values()], [], [], 0.2)
            room.look()
            for job, worker in list(running.items()):
                code = worker.ended()
                if code is None:
                    continue
                del running[job]
                room.learnt = room.learnt or not code
                if code:
                    failed[job.title] = _reason(job, code)
                else:
                    done.append(job)
                if code in (0, REFUSED):
                    idle.append(worker)
                else:
                    worker.end()
                step(f"{job.title}: {'failed' if code else 'done'}")
    finally:
        for worker in (*running.values(), *idle):
            worker.end()
    return failed


class Worker:
    """A process that runs jobs one after the other."""

    def __init__(self, threads: int):
        self.threads = threads
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def replies(self) -> int:
        """File descriptor that can be read once a job has ended."""
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.fileno()

    def begin(self, job: Job, before: Job | None) -> None:
        """Start or resume a job; it takes over the phases of the job before, if there is one."""
        job.run.parent.mkdir(parents=True, exist_ok=True)
        with job.output.open("ab") as output:
            self.process = self.process or self._start(output.fileno())
        order = {
            "output": str(job.output),
            "study": str(job.file),
            "run": str(job.run),
            "resume": (job.run / "config.toml").exists(),
            "after": str(before.run) if before else None,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(order)}\n".encode())
        self.process.stdin.flush()

    def _start(self, errors: int) -> "subprocess.Popen[bytes]":
        chosen = {"OMP_NUM_THREADS": str(self.threads), "GOMP_SPINCOUNT": "1000", **os.environ}
        command = worker_command("polysite.benchmark.worker")
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=chosen)

    def ended(self) -> int | None:
        """Return the exit code of the job; None while it runs."""
        if not select([self.replies], [], [], 0)[0]:
            return None
        assert self.process is not None and self.process.stdout is not None
        reply = self.process.stdout.readline()
        return int(reply) if reply else self.process.wait() or 1

    def end(self) -> None:
        """End the process."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.process = None


def _reason(job: Job, code: int) -> str:
    lines = [line for line in job.output.read_text(errors="replace").splitlines() if line.strip()]
    end = f"it was ended by signal {-code}, perhaps because memory ran out" if code < 0 else f"exit code {code}"
    return f"{lines[-1].removeprefix('polysite: ') if lines else end} ({job.output})"


class Room:
    """The number of runs that fit in memory and GPU memory, measured on the first run."""

    def __init__(self, most: int | None):
        self.cores = os.cpu_count() or 1
        self.most = most or self.cores
        self.threads = max(1, self.cores // self.most)
        self.learnt, self.until = False, time.monotonic() + LOOK
        self.before = self.least = free_memory()

    def look(self) -> None:
        """Measure the memory of the first run until it ends or has trained for a while."""
        if not self.learnt:
            self.least = tuple(map(min, self.least, free_memory()))
            self.learnt = time.monotonic() > self.until

    @property
    def now(self) -> int:
        """Number of runs that may run in parallel now."""
        if self.most == 1 or not self.learnt:
            return 1
        needs = [max(a - b, 1) for a, b in zip(self.before, self.least, strict=True)]
        fit = min(int(SPARE * free / need) for free, need in zip(self.before, needs, strict=True))
        return max(1, min(self.most, fit))


def free_memory() -> tuple[int, ...]:
    """Return the free bytes of the machine and, if there is one, of its first GPU."""
    free = [machine_memory("MemAvailable")]
    import torch

    if torch.cuda.is_available():
        free.append(torch.cuda.mem_get_info()[0])
    return tuple(free)
