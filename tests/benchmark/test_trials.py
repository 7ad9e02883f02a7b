"""Equal tuning in a benchmark: trials on validation cases, the best of which goes on."""

import json

import pytest

import tiny_bench
from polysite import benchmark, config
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError

HEAD = """
title = "Tuned"
reference = "fedavg"

[tuning]
share = 0.5
settings = { "train.lr" = [1e-9, 0.05] }

"""
METHODS = """
[methods.fedavg]
[methods.fedprox]
algorithm = "fedprox"
tuning = { "algorithm.mu" = [0.1, 1.0] }
[[methods."fine-tuned".then]]
algorithm = { name = "fine_tune", lr = [0.01] }
run = { rounds = 1, validate_every = 1 }
"""
TUNED = tiny_bench.text(
    METHODS,
    HEAD,
    sites={"east": {"cases": 4}, "west": {"cases": 4, "scanner": 9}},
    train={"optimiser": "adam", "lr": 0.02, "batch": 4},
    run={"rounds": 2, "validate_every": 1},
)


@pytest.fixture
def tuned(tmp_path):
    return tiny_bench.load(tmp_path, TUNED)


@pytest.mark.slow
def test_the_best_trial_goes_on_and_a_second_call_trains_nothing(tuned, tmp_path, in_process):
    out, told = tmp_path / "out", []
    results = benchmark.run(tuned, out, parallel=1, step=lambda note, *_, **__: told.append(note))
    assert not results.failed
    run = RunFolder(out / "runs" / "fedavg" / "fold0-seed0")
    assert config.parse(run.config).train.lr == 0.05 and [r.round for r in run.records()] == [0, 1]
    scores = json.loads((out / "tuning" / "scores" / "fedavg" / "fold0-seed0.json").read_text())
    assert scores["settings"] == [{"train.lr": 1e-9}, {"train.lr": 0.05}] and scores["scores"][1] > scores["scores"][0]
    lost = RunFolder(out / "tuning" / "runs" / file_name("fedavg, lr 1e-09") / "fold0-seed0")
    assert [r.round for r in lost.records()] == [0] and not (lost.path / "evaluation").exists()
    after = config.parse(RunFolder(out / "runs" / "fine-tuned" / "fold0-seed0").config)
    assert after.train.lr == 0.05, "a method that goes on from fedavg takes over its choice"
    assert config.parse(RunFolder(out / "runs" / "fedprox" / "fold0-seed0").config).train.lr == 0.02
    assert "fedavg: lr 0.05 (1 times)" in " ".join(results.remarks)

    before = {path: path.stat().st_mtime_ns for path in out.rglob("rounds.jsonl")}
    again = benchmark.run(tuned, out, parallel=1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("rounds.jsonl")} == before
    assert [m.name for m in again.cells[""]] == ["fedavg", "fedprox", "fine-tuned"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("share = 0.5", "share = 1.0", "between 0 and 1"),
        ("[0.1, 1.0]", "[0.1]", "has 1 settings, but other methods try 2"),
        ("[0.1, 1.0]", "0.1", "write a list of values"),
        ("[tuning]", "[sweep]\n'train.lr' = [1, 2]\n[tuning]", "leave out one of them"),
    ],
)
def test_unequal_tuning_is_refused(old, new, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        tiny_bench.load(tmp_path, TUNED.replace(old, new))


def test_without_tuning_every_method_has_its_own_settings(tuned):
    plain = tuned.untuned()
    assert plain.tuning is None and "tuning" not in plain.methods["fedprox"]
    assert tuned.tuning.effort == 1.5
