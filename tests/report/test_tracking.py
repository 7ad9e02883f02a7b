"""TensorBoard and MLflow hold every number of a run: read back from their own files."""

import json
import os
import socket
import sys
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polysite.algorithms.fedavg import FedAvg
from polysite.engines.phases import Phase, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, RunError
from polysite.report import tracking
from polysite.report.tracking import Many, scalars, tracker
from quadratic import Quadratic

START = {"w": np.array([3.0])}
CONFIG = 'seed = 7\n[algorithm]\nname = "fedavg"\n[data.sites."St. Anna (2)"]\ncases = 5\n'
ODD = "St. Anna (2)/.."


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No server, no network, and nothing of the environment stays behind."""
    for name in ("DISABLE_TELEMETRY", "ALLOW_FILE_STORE", "TRACKING_URI", "EXPERIMENT_NAME"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")  # so that it is taken back afterwards
        monkeypatch.delenv(f"MLFLOW_{name}")

    def refuse(*address):
        raise AssertionError(f"the network was asked for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def go(path, watch, rounds=6, resume=False):
    """A run, or the rest of it, as ``study`` does it."""
    algorithm = FedAvg()
    engine = Simulator(algorithm, {"a": Quadratic(1.0, np.zeros(1)), ODD: Quadratic(4.0, np.array([1.0, 1.2]))})
    folder = RunFolder.open(path) if resume else RunFolder.create(path, CONFIG, 0)
    phases = [Phase(algorithm, engine, Plan(rounds=rounds, checkpoint_every=2, validate_every=2))]
    at = find_progress(folder, phases) if resume else None
    watch.begin(path.name, rounds, at.round + 1 if at else 0, at.best_score if at else 0.0)
    run_phases(phases, START, 0, folder, resume=at, watch=watch)
    watch.end()
    return folder


def tensorboard_scalars(path):
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    return {k: [(e.step, e.value) for e in events.Scalars(k)] for k in events.Tags()["scalars"]}


def store(uri):
    """A client of a store, and its runs."""
    from mlflow.tracking import MlflowClient  # after the tracker: what it sets must be there before

    client = MlflowClient(tracking_uri=uri)
    return client, client.search_runs([e.experiment_id for e in client.search_experiments()])


def mlflow_scalars(path):
    client, (run,) = store((path / "mlflow" / "store").as_uri())
    return {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics}


READERS = {"tensorboard": tensorboard_scalars, "mlflow": mlflow_scalars}
both = pytest.mark.parametrize("kind", READERS)


def expected(folder):
    found = {}
    for record in folder.records():
        for name, value in scalars(record).items():
            found.setdefault(name, []).append((record.round + 1, pytest.approx(value)))
    return found


class Stop(Watch):
    """Interrupts a run, as a power cut would, after a round has been shown."""

    def __init__(self, after):
        self.after = after

    def round(self, record):
        if record.round == self.after:
            raise KeyboardInterrupt


def test_one_run_is_told_to_both_and_mlflow_has_the_configuration_and_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_PARAMS", 2)  # so that they go in parts
    monkeypatch.setattr(tracking, "MAX_METRICS", 3)
    path = tmp_path / "a run"
    folder = go(path, Many(*(tracker(kind, path) for kind in READERS)))
    want = expected(folder)
    assert tensorboard_scalars(path) == want and mlflow_scalars(path) == want
    assert [step for step, _ in want["mean_Dice"]] == [2, 4, 6] and len(want["steps"]) == 6
    assert {"loss/a", "Dice/a/L", "validation_loss/a", "bytes_up"} < want.keys() and len(want) == 10
    client, (run,) = store((path / "mlflow" / "store").as_uri())
    assert run.data.params == {"seed": "7", "algorithm.name": "fedavg", "data.sites.St. Anna :282:29.cases": "5"}
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.tags["polysite.folder"] == str(path)
    assert {f.path for f in client.list_artifacts(run.info.run_id)} == {"config.toml", "result.json"}
    copy = client.download_artifacts(run.info.run_id, "result.json", str(tmp_path))
    assert json.loads(Path(copy).read_text())["rounds"] == 6


@both
@pytest.mark.parametrize(
    ("after", "tracked"), [(0, True), (2, True), (3, True), (4, False)],
    ids=["before a checkpoint", "after one", "at one", "not tracked until then"],
)  # fmt: skip
def test_a_run_that_goes_on_is_told_once_and_whole(kind, after, tracked, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        go(path, Many(*[tracker(kind, path)] * tracked, Stop(after)))
    if tracked:
        assert len(READERS[kind](path)["steps"]) == after + 1  # nothing is held back
    folder = go(path, tracker(kind, path), resume=True)
    assert READERS[kind](path) == expected(folder)


def test_the_users_own_store_is_used_and_its_address_kept_out_of_the_folder(tmp_path, monkeypatch):
    mine = tmp_path / "secret"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mine.as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "hearts")
    for name in ("one", "two"):
        go(tmp_path / name, tracker("mlflow", tmp_path / name))
        (note,) = (tmp_path / name / "mlflow").iterdir()
        assert "secret" not in note.name + note.read_text()
    client, runs = store(mine.as_uri())
    assert {r.info.run_name for r in runs} == {"one", "two"} and client.get_experiment_by_name("hearts")


def test_a_store_that_is_away_for_a_round_misses_nothing(tmp_path, monkeypatch, caplog):
    path, watch = tmp_path / "run", tracker("mlflow", tmp_path / "run")
    send, calls = watch._send, []

    def unsteady(record):
        calls.append(record.round)
        if len(calls) in (3, 4):
            raise watch.problem.MlflowException("gone")
        send(record)

    monkeypatch.setattr(watch, "_send", unsteady)
    folder = go(path, watch)
    assert mlflow_scalars(path) == expected(folder) and calls == [0, 1, 2, 2, 2, 3, 4, 5]
    assert caplog.text.count("gone") == 2


def test_what_cannot_be_used_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "carrier-pigeon://loft")
    with pytest.raises(RunError, match="cannot be used"):
        go(tmp_path / "run", tracker("mlflow", tmp_path / "run"))
    assert RunFolder.open(tmp_path / "run").records() == []
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        tracker("ml_flow", tmp_path)
    for kind in READERS:
        monkeypatch.setitem(sys.modules, kind, None)
        with pytest.raises(ConfigError, match=rf"{kind}.*pip install 'polysite\[track\]'"):
            tracker(kind, tmp_path / "run")


def test_mlflow_is_told_not_to_report_home_before_it_is_imported(tmp_path, monkeypatch):
    real, asked = tracking.import_module, []

    def noted(name):
        asked.append((name, os.environ.get("MLFLOW_DISABLE_TELEMETRY")))
        return real(name)

    monkeypatch.setattr(tracking, "import_module", noted)
    tracker("mlflow", tmp_path)
    assert asked[0] == ("mlflow", "true")


def test_many_pass_everything_on():
    names, notes = [name for name in vars(Watch) if not name.startswith("_")], (Mock(), Mock())
    for name in names:
        getattr(Many(*notes), name)(name, 1)
    assert notes[0].mock_calls == notes[1].mock_calls == [getattr(call, name)(name, 1) for name in names]
