"""Processes that run the jobs of a benchmark, as many in parallel as fit into memory, each on one GPU.

A worker process runs one job after the other, so that its libraries are loaded once; after a crash it ends and the next
job gets a new one. A job whose first phases are a job of their own waits for that job and continues from it. A worker
sees one GPU; several workers share it if they fit.
"""

import json
import os
import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from select import select
from signal import SIGTERM, default_int_handler, signal

from polysite import machine
from polysite.benchmark.jobs import REFUSED, Job, Step, silent
from polysite.benchmark.worker import Order
from polysite.own_process import worker_command

SPARE = 0.8  # fraction of the free memory that runs may use
MACHINE = ""  # its memory, beside that of the GPUs
# runs on one GPU, unless the user names a number: one nearly fills it, others fill its gaps (docs/speed.md)
SHARING = 3
LOOK = 20.0  # seconds after which a run has allocated most of its memory


class Workers:
    """Trains jobs in processes of this machine, in parallel as memory allows.

    Idle processes wait for the next jobs, and end with this object.

    Args:
        most: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
    """

    def __init__(self, most: int | None = None, step: Step = silent):
        self.most, self.step = most, step
        self.idle: list[Worker] = []
        self.room: Room | None = None  # once it is known
        weakref.finalize(self, _end, self.idle)

    def train(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Train what is not done; return the failed jobs with the reason."""
        signal(SIGTERM, default_int_handler)  # SIGTERM interrupts like Ctrl-C, so that no child is left behind
        done = [job for job in jobs if job.done]
        left = [job for job in jobs if job not in done]
        room = self.room = self.room or Room(self.most)
        running, idle = dict[Job, Worker](), self.idle
        failed: dict[str, str] = {}
        try:
            while left or running:
                while placed := _next(left, running, room):
                    job, gpu = placed
                    left.remove(job)
                    worker = running[job] = _worker(idle, gpu, room.threads)
                    worker.begin(job, job.first(done), 1 + len(left) // room.parallel)
                    self.step(f"{len(running)} in parallel · {job.title}{_on(gpu, room)}", 0)
                select([worker.replies for worker in running.values()], [], [], 0.2)
                room.look()
                for job, worker in list(running.items()):
                    code = worker.ended()
                    if code is None:
                        continue
                    del running[job]
                    room.learnt = room.learnt or not code
                    if code:
                        failed[job.title] = reason(job, code)
                    else:
                        done.append(job)
                    if code in (0, REFUSED):
                        idle.append(worker)
                    else:
                        worker.end()
                    self.step(f"{job.title}: {'failed' if code else 'done'}")
        finally:
            _end(running.values())
        return failed


def _end(workers: "Iterable[Worker]") -> None:
    for worker in workers:
        worker.end()


def _next(left: Collection[Job], running: "dict[Job, Worker]", room: "Room") -> tuple[Job, str] | None:
    """Return the next job that may start, and its GPU; None if there is none or nothing fits."""
    busy = Counter(worker.gpu for worker in running.values())
    for job in left:
        if not job.first([*left, *running]) and (gpu := room.place(busy, job.study.train.device)) is not None:
            return job, gpu
    return None


def _worker(idle: "list[Worker]", gpu: str, threads: int) -> "Worker":
    """Return an idle worker on this GPU, or a new one; an idle worker on another GPU ends, to release its memory."""
    same = next((worker for worker in idle if worker.gpu == gpu), None)
    if same is not None:
        idle.remove(same)
        return same
    if idle:
        idle.pop().end()
    return Worker(threads, gpu)


def _on(gpu: str, room: "Room") -> str:
    return f" on GPU {gpu}" if gpu and len(room.gpus) > 1 else ""


def order(job: Job, before: Job | None, runs: int) -> Order:
    """Write the study of a job, and return what a worker needs to know; it takes over the phases of the job before, if
    that has finished.

    ``runs`` is the number of runs that the worker can expect, with this one: for many of them it pays to compile.
    """
    job.write()
    paths = {"output": job.output, "study": job.file, "run": job.run, **({"after": before.run} if before else {})}
    wanted = {"runs": runs, "until": job.until, "evaluate": job.evaluate}
    return {**wanted, **{name: str(path.absolute()) for name, path in paths.items()}}


class Worker:
    """A process that runs jobs one after the other."""

    def __init__(self, threads: int, gpu: str = MACHINE):
        self.threads, self.gpu = threads, gpu  # the only GPU that it sees, or MACHINE: all of them
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def replies(self) -> int:
        """File descriptor that can be read once a job has ended."""
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.fileno()

    def begin(self, job: Job, before: Job | None, runs: int = 1) -> None:
        """Start or resume a job; see ``order``."""
        job.run.parent.mkdir(parents=True, exist_ok=True)
        with job.output.open("ab") as output:
            self.process = self.process or self._start(output.fileno())
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(order(job, before, runs))}\n".encode())
        self.process.stdin.flush()

    def _start(self, errors: int) -> "subprocess.Popen[bytes]":
        chosen = {"OMP_NUM_THREADS": str(self.threads), "GOMP_SPINCOUNT": "1000", **os.environ}
        if self.gpu:
            chosen[machine.VISIBLE] = self.gpu
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


def reason(job: Job, code: int) -> str:
    """Return why a job failed: the last line that it printed, or else its exit code."""
    lines = [line for line in job.output.read_text(errors="replace").splitlines() if line.strip()]
    end = f"it was ended by signal {-code}, perhaps because memory ran out" if code < 0 else f"exit code {code}"
    return f"{lines[-1].removeprefix('polysite: ') if lines else end} ({job.output})"


class Room:
    """The number of runs that fit in memory and in the memory of each GPU, measured on the first run.

    Args:
        most: Largest number of runs in parallel; None for one per core, and three per GPU.
    """

    def __init__(self, most: int | None):
        self.cores = machine.cores()
        self.most = most or self.cores
        self.threads = max(1, self.cores // self.most)
        self.learnt, self.until = False, time.monotonic() + LOOK
        self.before = self.least = _free()
        self.gpus = [gpu for gpu in self.before if gpu]
        self.sharing = SHARING if most is None else self.most  # runs on one GPU at most
        self.parallel = min(self.most, self.sharing * len(self.gpus)) if self.gpus else self.most

    def look(self) -> None:
        """Measure the memory of the first run until it ends or has trained for a while."""
        if not self.learnt:
            now = _free()
            self.least = {k: min(self.least[k], now[k]) for k in self.before}
            self.learnt = time.monotonic() > self.until

    def place(self, busy: "Counter[str]", device: str = "auto") -> str | None:
        """Return the GPU on which the next run fits, or MACHINE; None if it does not fit now.

        The GPU is the one with most memory left. A run that names another device than ``auto`` or ``cuda`` (the CPU, or
        a GPU by number) sees all GPUs.

        Args:
            busy: Number of runs on every GPU.
            device: The run's ``train.device``.
        """
        if busy.total() >= (min(self.most, self._fit(MACHINE)) if self.learnt else 1):
            return None
        if not self.gpus or device not in ("auto", "cuda"):
            return MACHINE
        left = {g: self.before[g] - busy[g] * self._need(g) for g in self.gpus if busy[g] < self._fit(g)}
        return max(left, key=lambda gpu: left[gpu]) if left else None

    def _need(self, where: str) -> int:
        """Return the memory that the first run took of the machine, or of the GPU that it ran on; at least a byte."""
        of = self.gpus if where else [MACHINE]
        return max(1, *(self.before[k] - self.least[k] for k in of))

    def _fit(self, where: str) -> int:
        """Return the number of runs that fit on the machine or on a GPU, at least one."""
        fit = max(1, int(SPARE * self.before[where] / self._need(where)))
        return min(fit, self.sharing) if where else fit


def _free() -> dict[str, int]:
    """Return the free bytes of the machine and of every GPU, by the value of CUDA_VISIBLE_DEVICES."""
    return {MACHINE: machine.memory().free, **{gpu.visible: gpu.memory.free for gpu in machine.gpus()}}
