"""The Ray engine on real Ray processes: several nodes on this machine, which are killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import studies
from polysite import study
from polysite.config import parse
from polysite.engines.rounds import Watch
from polysite.errors import ConfigError, DataError, RunError

SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # no token below the home folder
SITES = {"north": 6, "south": 5, "west": 4}
STUDY = studies.text(SITES, "steps = 2", "rounds = 5\ncheckpoint_every = 2", filters=(4, 4, 4))
TUNED = '[[then]]\nalgorithm = {name = "fine_tune"}\nrun = {rounds = 2}\n'
CLUSTERS = '[[then]]\nalgorithm = {name = "cfft", components = [2], dimensions = 2, rounds = 1}\nrun = {rounds = 60}\n'


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A worker has as many threads as this process; bits depend on their number."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cluster():
    """A head without CPUs and two nodes with two CPUs each; nodes that a test kills are started again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
        made = Cluster(True, False, {"num_cpus": 0, "include_dashboard": False, "_system_config": quick})
        yield made
        made.shutdown()


@pytest.fixture
def nodes(cluster):
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    return cluster


def engine(cluster):
    return study.Engine("ray", cluster.address, workers=2)


def differing(one, other):
    """Files of a run that differ, without those that tell times."""
    files = {f.relative_to(one) for f in one.rglob("*") if f.is_file()}
    assert files == {f.relative_to(other) for f in other.rglob("*") if f.is_file()}
    timed = {"log.txt", "rounds.jsonl", "run.json"}
    return [f for f in files if f.name not in timed and (one / f).read_bytes() != (other / f).read_bytes()]


@pytest.mark.slow
def test_two_workers_on_this_machine_end_in_the_simulators_bits(tmp_path):
    sets = {"run.rounds": "1", "train.steps": "1", "train.clean.largest": "true"}
    chosen = parse(STUDY, {"algorithm": "ditto", **sets})
    study.train(chosen, tmp_path / "simulator")
    study.train(chosen, tmp_path / "ray", engine=study.Engine("ray", workers=2))
    assert differing(tmp_path / "simulator", tmp_path / "ray") == []
    assert "2 workers on 1 node, each with 1 thread:" in (tmp_path / "ray" / "log.txt").read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    "name, text, sets",
    [
        ("fedavg", "", {"run.share": "0.5", "run.compress": "int8"}),
        ("scaffold", "", {}),
        ("scaffold", TUNED, {"run.rounds": "2"}),
        ("fedper", "", {"run.best": "own"}),
        ("fedavg", CLUSTERS, {"run.rounds": "1"}),
        ("fedavg", "", {"run.pooled": "true", "run.rounds": "2"}),
    ],
)
def test_studies_on_two_nodes_end_in_the_simulators_bits(name, text, sets, nodes, tmp_path):
    chosen = parse(STUDY + text, {"algorithm.name": name, **sets})
    study.train(chosen, tmp_path / "simulator")
    study.train(chosen, tmp_path / "ray", engine=engine(nodes))
    assert differing(tmp_path / "simulator", tmp_path / "ray") == []


class Killing(Watch):
    """Calls a function after some rounds."""

    def __init__(self, kill, rounds):
        self.kill, self.rounds = kill, rounds

    def round(self, record):
        if record.round in self.rounds:
            self.kill()


@pytest.fixture
def whole(tmp_path):
    """An undisturbed run in the simulator."""
    chosen = parse(STUDY, {"algorithm": "scaffold"})
    study.train(chosen, tmp_path / "whole")
    return chosen, tmp_path / "whole"


def descendants(root):
    """The processes that a process started, directly or not, with their titles."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    found, new = {}, {root}
    while new:
        found |= {pid: titles[pid] for pid in new}
        new = {pid for pid, parent in parents.items() if parent in new}
    return found


def kill_a_worker():
    workers = sorted(pid for pid, title in descendants(os.getpid()).items() if title.startswith("ray::SiteWorker"))
    os.kill(workers[0], signal.SIGKILL)


@pytest.mark.soak
def test_a_killed_worker_loses_nothing(whole, nodes, tmp_path):
    chosen, expected = whole
    watch = Killing(kill_a_worker, (1, 3))
    run = study.train(chosen, tmp_path / "ray", watch, engine=engine(nodes))
    assert differing(expected, tmp_path / "ray") == []
    assert sum("loaded again" in i["what"] for r in run.folder.records() for i in r.incidents) == 2


@pytest.mark.soak
def test_a_killed_node_loses_nothing(whole, nodes, tmp_path):
    chosen, expected = whole
    watch = Killing(lambda: nodes.remove_node(sorted(nodes.worker_nodes, key=id)[0], allow_graceful=False), (2,))
    run = study.train(chosen, tmp_path / "ray", watch, engine=engine(nodes))
    assert differing(expected, tmp_path / "ray") == []
    assert any("was lost" in i["what"] for r in run.folder.records() for i in r.incidents)


@pytest.mark.soak
@pytest.mark.parametrize("after", ["ray", "simulator"])
def test_a_killed_driver_is_resumed_in_any_engine(after, whole, nodes, tmp_path):
    _, expected = whole
    file, run = tmp_path / "study.toml", tmp_path / "ray"
    file.write_text(STUDY)
    command = [sys.executable, "-m", "polysite.cli", "train", "--quiet", "--no-page"]
    on = ["--engine", "ray", "--ray-address", nodes.address, "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [*command, str(file), "--set", "algorithm=scaffold", "--out", str(run), *on], env=environment
    )
    while not (run / "rounds.jsonl").exists() or (run / "rounds.jsonl").read_text().count("\n") < 3:
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert not (run / "result.json").exists()
    subprocess.run([*command, "--resume", str(run), *(on if after == "ray" else [])], env=environment, check=True)
    assert differing(expected, run) == []


STUBS = {  # of a cluster that has two nodes, both this machine
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo one; echo two",
    "polysite": f'exec {sys.executable} -m polysite.cli "$@"',
}


@pytest.mark.soak
def test_the_printed_slurm_script_runs_a_study_on_two_nodes(whole, tmp_path):
    _, expected = whole
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    (script,) = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
    script = script.replace("OMP_NUM_THREADS=4", "OMP_NUM_THREADS=1")  # as many as the simulator had
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "study.toml").write_text(f'algorithm = "scaffold"\n{STUDY}')
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "two", "SLURM_CPUS_PER_TASK": "1"}
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    files = {"HOME": str(tmp_path), "STUDY": str(tmp_path / "study.toml"), "RUN": str(tmp_path / "ray")}
    subprocess.run(["bash", "-c", script], env={**os.environ, **job, **files, "PATH": path}, check=True, timeout=600)
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    assert "2 workers on 2 nodes" in (tmp_path / "ray" / "log.txt").read_text()
    (tmp_path / "ray" / "index.html").unlink()
    assert differing(expected, tmp_path / "ray") == []


@pytest.mark.soak
def test_problems_are_one_sentence(nodes, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="diverged"):
        study.train(parse(STUDY, {"train.lr": "1e30"}), tmp_path / "a", engine=engine(nodes))
    with pytest.raises(ConfigError, match="no node of the Ray cluster has a GPU"):
        study.train(parse(STUDY, {"train.device": "cuda"}), tmp_path / "b", engine=engine(nodes))
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        study.train(parse(STUDY), tmp_path / "c", engine=study.Engine("ray", "127.0.0.1:9"))
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()
    with pytest.raises(DataError):
        study.train(parse(f'[data]\nname = "files"\npath = "{tmp_path}"'), tmp_path / "d", engine=engine(nodes))
