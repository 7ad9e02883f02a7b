"""Benchmarks as job arrays: chains of runs, failures, another call; a stub of SLURM, and processes in its place."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from typer.testing import CliRunner

import tiny_bench
from polysite import benchmark
from polysite.benchmark import cluster
from polysite.benchmark import jobs as benchmark_jobs
from polysite.cli import app
from polysite.errors import ConfigError

METHODS = """
tuned.then = [{ algorithm = "fine_tune" }]
fedavg = {}
fedprox.algorithm = "fedprox"
"far away" = { train = { device = "cuda:7" } }
"""
TINY = tiny_bench.text(METHODS, sites={"east": {"cases": 4}, "west": {"cases": 4}})


@pytest.fixture
def bench(tmp_path):
    return tiny_bench.load(tmp_path, TINY)


@pytest.fixture
def jobs(bench, tmp_path):
    return list(benchmark_jobs.jobs(bench, tmp_path / "out", {}))


def finish(run):
    """Write what makes a run a finished one."""
    for name in ("config.toml", "result.json", "evaluation/test/about.json"):
        (Path(run) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(run) / name).write_text("{}")


def performed(order, load):
    """Stand in for a run: all but ``far away`` succeed."""
    if "far away" in order["run"]:
        Path(order["output"]).parent.mkdir(parents=True, exist_ok=True)
        Path(order["output"]).write_text("polysite: there is no such device\n")
        return 2
    finish(order["run"])
    return 0


class Cluster:
    """An executor that records arrays; a task runs when its result is asked for."""

    def __init__(self):
        self.arrays, self.dies = [], ()

    def map_array(self, runner, orders):
        self.arrays.append(orders)
        return [self._handle(k, partial(self._run, runner, mine)) for k, mine in enumerate(orders)]

    def _handle(self, number, run):
        paths = SimpleNamespace(stderr="log.err")
        return SimpleNamespace(job_id=f"7_{number}", paths=paths, done=lambda force_check=False: True, result=run)

    def _run(self, runner, orders):
        if any(name in each["run"] for name in self.dies for each in orders):
            raise RuntimeError("Job (task=0) was killed: out of memory")
        return runner(orders)


@pytest.fixture
def executor(monkeypatch):
    made = Cluster()
    for name, stub in {"_executor": lambda *given: made, "perform": performed, "release": int, "begin": int}.items():
        monkeypatch.setattr(cluster, name, stub)
    return made


def run(jobs, tmp_path):
    steps = []
    made = cluster.Cluster({}, None, tmp_path / "out", lambda note, done=1: steps.append(done))
    failed = made.train(jobs)
    return failed, steps


def names(array):
    """The methods of the tasks of an array."""
    return sorted([Path(each["run"]).parent.name for each in orders] for orders in array)


def test_a_run_and_those_that_continue_from_it_are_one_task_of_one_array(jobs, executor, tmp_path):
    failed, steps = run(jobs, tmp_path)
    (array,) = executor.arrays
    assert names(array) == [["far away"], ["fedavg", "tuned"], ["fedprox"]]
    tuned = next(each for orders in array for each in orders if "tuned" in each["run"])
    assert tuned["after"].endswith("runs/fedavg/fold0-seed0")
    assert list(failed) == ["far away, fold 0, seed 0"] and "there is no such device (" in failed[next(iter(failed))]
    assert sum(steps) == len(jobs)
    run(jobs, tmp_path)  # again: what is missing
    assert names(executor.arrays[1]) == [["far away"]]


def test_a_killed_task_is_reported_for_all_its_runs_and_a_finished_run_is_not_repeated(jobs, executor, tmp_path):
    executor.dies = ("tuned",)
    failed, _ = run(jobs, tmp_path)
    assert {name.split(",")[0] for name in failed} == {"fedavg", "tuned", "far away"}
    assert failed["tuned, fold 0, seed 0"] == "Job (task=0) was killed: out of memory (log.err)"
    finish(next(j.run for j in jobs if j.method == "fedavg"))
    executor.dies = ()
    failed, _ = run(jobs, tmp_path)
    assert names(executor.arrays[-1]) == [["far away"], ["tuned"]] and len(failed) == 1
    assert json.loads((tmp_path / "out" / "cluster" / "jobs.json").read_text())["fedavg/fold0-seed0"].startswith("7_")


STUBS = {
    "srun": "",
    "sbatch": 'cp "$1" {folder}/submitted.sh; echo "Submitted batch job 41"',
    "sacct": 'echo "JobID|State|NodeList"; echo "41_[0-2]|{state}|"',
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands of SLURM as stubs; returns how to set the state of all tasks."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=":")

    def write(state):
        for name, text in STUBS.items():
            (tools / name).write_text("#!/bin/sh\n" + text.format(folder=tmp_path, state=state))
            (tools / name).chmod(0o755)

    write("PENDING")
    return write


def test_parameters_reach_sbatch_and_a_second_command_waits_for_the_first_ones_tasks(jobs, slurm, tmp_path):
    given = {"partition": "gpu", "time": "90", "gpus_per_node": "2"}
    folder = (tmp_path / "out" / "cluster").resolve()
    made = cluster._executor(folder, given, 5)
    tasks = cluster._submit(made, cluster._chains(jobs), folder, jobs, benchmark.silent)
    text = (tmp_path / "submitted.sh").read_text()
    for line in ("--partition=gpu", "--time=90", "--gpus-per-node=2", "--array=0-2%3", "--cpus-per-task=4"):
        assert line in text
    assert [task.handle.job_id for task in tasks] == ["41_0", "41_1", "41_2"]
    again = cluster._running(folder, jobs)
    assert sorted(len(task.jobs) for task in again) == [1, 1, 2]
    slurm("FAILED")
    assert not cluster._running(folder, jobs)
    with pytest.raises(ConfigError, match="--slurm: Unavailable parameter"):
        cluster._executor(tmp_path, {"partitions": "gpu"}, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--slurm", "time=3"], "--slurm: there is no SLURM here"),
        (["--slurm", "gpu"], "--slurm gpu: write KEY=VALUE"),
    ],
)
def test_what_a_machine_without_slurm_cannot_do_is_refused_in_a_sentence(words, sentence, bench, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(
        app, ["bench", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out"), "--only", "fedavg", *words]
    )
    assert sentence in str(done.exception)


@pytest.mark.soak
def test_submitit_runs_a_benchmark_on_this_machine(bench, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(cluster, "_executor", lambda folder, *given: submitit.LocalExecutor(folder=folder))
    words = ["bench", str(tmp_path / "tiny.toml"), "--out", str(out), "--slurm", "time=3"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 1 and "far away, fold 0, seed 0 failed: train.device = 'cuda:7'" in first.stderr
    assert len(list(out.rglob("result.json"))) == 3 and (out / "comparison" / "index.html").exists()
    records = (out / "runs" / "tuned" / "fold0-seed0" / "rounds.jsonl").read_text().splitlines()
    shared = (out / "runs" / "fedavg" / "fold0-seed0" / "rounds.jsonl").read_text().splitlines()
    assert records[: len(shared)] == shared and len(records) > len(shared)  # it went on from FedAvg's run
