"""How many runs of a benchmark run in parallel, and on which GPU."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from polysite import machine
from polysite.benchmark import workers
from polysite.benchmark.jobs import Job, silent
from polysite.config import Study
from polysite.errors import RunError
from polysite.machine import Gpu, Memory


@pytest.fixture
def free(monkeypatch):
    """Free memory of the machine ("") and of its GPUs, which a test changes."""
    found = {"": 1000}
    monkeypatch.setattr(machine, "memory", lambda: Memory(1000, found[""]))
    monkeypatch.setattr(machine, "gpus", lambda: tuple(Gpu(k, Memory(1000, n)) for k, n in found.items() if k))
    monkeypatch.setattr(machine, "cores", lambda: 16)
    return found


def learnt(room, free, **taken):
    """Let the first run take memory."""
    for where, count in taken.items():
        free[{"host": "", "first": "2"}[where]] -= count
    room.look()
    room.learnt = True
    return room


def placed(room, device="auto"):
    """Start runs until no other fits; return how many every GPU has."""
    busy = Counter()
    while (gpu := room.place(busy, device)) is not None:
        busy[gpu] += 1
    return dict(busy)


def test_as_many_run_as_fit_into_memory(free):
    room = workers.Room(8)
    assert placed(room) == {"": 1}  # the first alone
    assert placed(learnt(room, free, host=300)) == {"": 2}  # 800 of 1000, at 300 each
    assert placed(learnt(workers.Room(1), free)) == {"": 1}


def test_runs_are_spread_over_gpus_by_free_memory(free):
    free.update({"2": 1000, "5": 1000, "7": 500})
    room = workers.Room(100)
    assert placed(room) == {"2": 1}
    learnt(room, free, host=50, first=200)
    assert placed(room) == {"2": 4, "5": 4, "7": 2}  # 800 of 1000, 400 of 500, at 200 each
    assert room.place(Counter({"2": 1})) == "5" and room.place(Counter({"2": 1, "5": 2, "7": 0})) == "2"


def test_at_most_three_runs_share_a_gpu_unless_the_user_names_a_number(free, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 16)
    free.update({"2": 1000, "5": 1000})
    room = learnt(workers.Room(None), free, host=10, first=10)
    assert placed(room) == {"2": 3, "5": 3} and room.parallel == 6
    free.update({"": 1000, "2": 1000})
    room = learnt(workers.Room(9), free, host=10, first=10)
    assert sum(placed(room).values()) == 9 == room.parallel


def test_a_large_run_has_a_gpu_of_its_own_and_memory_of_the_machine_limits_all(free):
    free.update({"2": 1000, "5": 1000, "7": 1000})
    assert placed(learnt(workers.Room(None), free, host=100, first=700)) == {"2": 1, "5": 1, "7": 1}
    free.update({"": 1000, "2": 1000})
    assert placed(learnt(workers.Room(None), free, host=400, first=700)) == {"2": 1, "5": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_run_that_names_its_device_sees_all_gpus(device, free):
    free.update({"2": 1000, "5": 1000})
    assert placed(workers.Room(4), device) == {"": 1}


def test_a_worker_sees_its_gpu_alone(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(workers.subprocess, "Popen", lambda command, env, **more: seen.update(env))
    workers.Worker(1, "5")._start(0)
    assert seen["CUDA_VISIBLE_DEVICES"] == "5" and seen["OMP_NUM_THREADS"]
    workers.Worker(1)._start(0)
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_an_idle_worker_goes_on_with_its_own_gpu_only():
    first, second = workers.Worker(1, "2"), workers.Worker(1, "5")
    idle = [first, second]
    assert workers._worker(idle, "5", 1) is second and idle == [first]
    fresh = workers._worker(idle, "7", 1)
    assert fresh.gpu == "7" and not idle


def test_workers_wait_for_the_next_stage_if_they_are_kept(monkeypatch):
    """Nothing is started and measured twice; outside, every stage has workers of its own, which end with it."""
    made = []

    class Fake(workers.Worker):
        replies = 0

        def __init__(self, threads, gpu=""):
            made.append(self)
            self.gpu, self.ends = gpu, 0

        def begin(self, job, before, runs=1):
            pass

        def ended(self):
            return 0

        def end(self):
            self.ends += 1

    class FakeJob:
        done, method, title, study = False, "m", "t", Study()

        def first(self, jobs):
            return None

    FakeJob.__hash__ = object.__hash__
    monkeypatch.setattr(workers, "Worker", Fake)
    monkeypatch.setattr(workers, "signal", lambda *_: None)
    monkeypatch.setattr(workers, "select", lambda *_: ([], [], []))
    with workers.kept():
        for _ in range(2):
            assert workers.work([FakeJob(), FakeJob()], 1, silent) == {}
        with workers.kept():  # a search inside an advice
            workers.work([FakeJob()], 1, silent)
        assert len(made) == 1 and not made[0].ends
    assert made[0].ends == 1
    for _ in range(2):
        workers.work([FakeJob()], 1, silent)
    assert [worker.ends for worker in made] == [1, 1, 1]


def test_a_worker_ends_in_the_middle_of_a_run_when_the_benchmark_is_killed():
    """Its run folder would be in use, and the command that continues the search would take the candidate for failed."""
    code = """
import time
from polysite.benchmark import worker
worker.perform = lambda order, last: (print("begun", flush=True), time.sleep(3600))
worker.main()
"""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **ends) as process:
        process.stdin.write("{}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begun\n"
        process.stdin.close()  # as a killed process leaves it
        assert process.wait(60) == 1


def test_the_file_of_a_study_is_whole_or_absent(tmp_path, monkeypatch):
    job = Job("m", 0, 0, Study(), tmp_path)
    job.write()
    before = job.file.read_bytes()

    def die(self, target):
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(RunError):
        Job("m", 0, 0, Study(seed=1), tmp_path).write()
    assert job.file.read_bytes() == before
