"""The Ray engine on real Ray processes: several nodes on this machine, which are killed."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

import studies
from polysite import study
from polysite.config import parse
from polysite.engines.watch import Watch

SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # no token below the home folder
SITES = {"north": 6, "south": 5, "west": 4}
STUDY = studies.text(SITES, "steps = 2", "rounds = 5\ncheckpoint_every = 2", filters=(4, 4, 4))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A worker has as many threads as this process; bits depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cluster(one_thread):
    """A head without CPUs and two nodes with two CPUs each; nodes that a test kills are started again."""
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


class Killing(Watch):
    """Kills something after some rounds."""

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


def kill_a_worker(_):
    started = psutil.Process().children(recursive=True)
    workers = [p for p in started if "".join(p.cmdline()).startswith("ray::SiteWorker")]
    min(workers, key=lambda p: p.pid).kill()


def kill_a_node(nodes):
    nodes.remove_node(sorted(nodes.worker_nodes, key=id)[0], allow_graceful=False)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kill", "rounds", "said", "least"),
    [(kill_a_worker, (1, 3), "loaded again", 2), (kill_a_node, (2,), "was lost", 1)],
)
def test_a_killed_worker_or_node_loses_nothing(kill, rounds, said, least, whole, nodes, tmp_path):
    chosen, expected = whole
    watch = Killing(lambda: kill(nodes), rounds)
    run = study.train(chosen, tmp_path / "ray", watch, engine=engine(nodes))
    assert differing(expected, tmp_path / "ray") == []
    assert sum(said in i["what"] for r in run.folder.records() for i in r.incidents) >= least


@pytest.mark.soak
@pytest.mark.parametrize("after", ["ray", "simulator"])
def test_a_killed_driver_is_resumed_in_any_engine(after, whole, nodes, tmp_path):
    _, expected = whole
    file, run = tmp_path / "study.toml", tmp_path / "ray"
    file.write_text(STUDY)
    command = [sys.executable, "-m", "polysite.cli", "train", "--quiet", "--no-page"]
    on = ["--engine", "ray", "--ray-address", nodes.address, "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [*command, str(file), "--set", "algorithm=scaffold", "--out", str(run), *on]
    first = subprocess.Popen(start, env=environment)
    while not (run / "rounds.jsonl").exists() or (run / "rounds.jsonl").read_text().count("\n") < 3:
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    assert first.wait() and not (run / "result.json").exists()
    subprocess.run([*command, "--resume", str(run), *(on if after == "ray" else [])], env=environment, check=True)
    assert differing(expected, run) == []
