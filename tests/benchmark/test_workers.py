"""How many runs run in parallel, on which GPU; the cases and networks that a worker keeps for the next run."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import polysite as ps
from polysite import machine, study
from polysite.benchmark import workers
from polysite.benchmark.last_run import LastRun
from polysite.data.phantom import write
from polysite.machine import Gpu, Memory
from polysite.study.sites import expected_steps
from polysite.training.gpu_passes import GpuPasses
from polysite.training.gpu_steps import GpuSteps
from polysite.training.network import Network


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


@pytest.mark.parametrize(
    ("most", "gpus", "taken", "runs"),
    [
        (8, {}, {"host": 300}, {"": 2}),  # 800 of 1000, at 300 each
        (1, {}, {}, {"": 1}),
        (100, {"2": 1000, "5": 1000, "7": 500}, {"host": 50, "first": 200}, {"2": 4, "5": 4, "7": 2}),  # 400 of 500
        (None, {"2": 1000, "5": 1000}, {"host": 10, "first": 10}, {"2": 3, "5": 3}),  # three share a GPU
        (9, {"2": 1000, "5": 1000}, {"host": 10, "first": 10}, {"2": 5, "5": 4}),  # unless the user names a number
        (None, {"2": 1000, "5": 1000, "7": 1000}, {"host": 100, "first": 700}, {"2": 1, "5": 1, "7": 1}),
        (None, {"2": 1000, "5": 1000, "7": 1000}, {"host": 400, "first": 700}, {"2": 1, "5": 1}),  # for lack of memory
    ],
)
def test_as_many_run_as_fit_into_memory_of_the_machine_and_of_its_gpus(most, gpus, taken, runs, free):
    free.update(gpus)
    room = workers.Room(most)
    assert placed(room) == {next(iter(gpus), ""): 1}  # the first alone
    assert placed(learnt(room, free, **taken)) == runs
    assert placed(workers.Room(4), "cuda:1") == {"": 1}  # what names its device sees all GPUs


def test_a_worker_sees_its_gpu_alone(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(workers.subprocess, "Popen", lambda command, env, **more: seen.update(env))
    workers.Worker(1, "5")._start(0)
    assert seen["CUDA_VISIBLE_DEVICES"] == "5" and seen["OMP_NUM_THREADS"]
    workers.Worker(1)._start(0)
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_idle_processes_end_with_what_they_waited_for():
    ended, made = [], workers.Workers()
    made.idle.append(SimpleNamespace(end=lambda: ended.append(True)))
    del made
    assert ended


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


FEW = {"east": ps.Hospital(cases=4), "west": ps.Hospital(cases=3)}
PHANTOM = ps.Phantom(shape=(24, 24, 24), sites=FEW)
TRAIN = ps.Train(patch=(16, 16, 16), device="cpu")


@pytest.fixture
def files(tmp_path):
    write([ref.open() for refs in PHANTOM.case_refs(0).values() for ref in refs], tmp_path / "scans")
    return ps.Study(data=ps.Files(path=str(tmp_path / "scans")), train=TRAIN)


def cases(last, chosen):
    ready = last.cases(chosen, study.deal_cases(chosen))
    return {(s, c.name): c for s, splits in ready.items() for k in splits for c in splits[k]}, ready


def test_another_method_or_fold_has_the_same_cases(files):
    last = LastRun()
    first, _ = cases(last, files)
    other = replace(files, split=replace(files.split, seed=5), run=ps.Plan(rounds=7))
    again, ready = cases(last, other)
    assert len(first) == 7 and all(again[key] is case for key, case in first.items())
    for site, splits in study.load_cases(other, study.deal_cases(other)).items():
        for k, listed in splits.items():
            assert [c.name for c in listed] == [c.name for c in ready[site][k]]
            assert all(np.array_equal(a.image, b.image) for a, b in zip(listed, ready[site][k], strict=True))


def test_another_preparation_another_seed_or_a_changed_file_is_loaded_anew(files):
    last = LastRun()
    first, _ = cases(last, files)
    other, _ = cases(last, replace(files, train=replace(TRAIN, patch=(24, 24, 24))))
    assert not any(other[key] is case for key, case in first.items())
    first, _ = cases(last, files)
    ref = study.deal_cases(files)["east"]["train"][0]
    os.utime(ref.files[0], ns=(1, 1))
    again, _ = cases(last, files)
    assert [key for key, case in first.items() if again[key] is not case] == [(ref.site, ref.name)]
    drawn = ps.Study(data=PHANTOM, train=TRAIN)
    first, _ = cases(last, drawn)
    assert all(cases(last, drawn)[0][key] is case for key, case in first.items())
    assert not any(cases(last, replace(drawn, seed=1))[0][key] is case for key, case in first.items())


def as_on_a_gpu(init):
    def build(self, module, train, expected=0, later=0):
        init(self, module, train, expected)
        self.gpu_steps = GpuSteps(self.module, False, "auto", expected, later)
        self.passes = GpuPasses(self.gpu_steps, train.batch)

    return build


NETWORK = ps.Study(data=PHANTOM, train=replace(TRAIN, steps=1), model=ps.UNet(filters=(4, 4, 4)))


def test_a_network_on_a_gpu_is_used_again_with_the_initial_parameters_of_the_next_run(monkeypatch):
    last = LastRun()
    assert last.network(NETWORK, {}) is not last.network(NETWORK, {})  # on a CPU it is built anew
    monkeypatch.setattr(Network, "__init__", as_on_a_gpu(Network.__init__))
    last = LastRun()
    last.runs = 5
    first = last.network(NETWORK, {"east": 4})
    steps = expected_steps(NETWORK, {"east": 4})
    assert (first.gpu_steps.expected, first.gpu_steps.later) == (steps, 4 * steps)
    other = replace(NETWORK, seed=1, algorithm=ps.Scaffold())
    assert last.network(other, {}) is first
    for key, value in study.initial_params(other).items():
        assert np.array_equal(first.start[key], value) and np.array_equal(first.leaves[key].detach(), value)
    assert last.network(replace(NETWORK, model=ps.UNet(filters=(4, 4, 8))), {}) is not first
    assert last.network(NETWORK, {}) is first  # a method with a network of its own does not displace the common one
