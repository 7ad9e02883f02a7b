"""Run folders of 0.1.0 are still read, evaluated and resumed. tests/fixtures/v0.1.0/README.md describes them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from polysite import config, foreign
from polysite.engines.run_folder import FORMAT, RunFolder
from polysite.errors import ConfigError, RunError
from polysite.evaluation import evaluate
from polysite.report.runs import read
from polysite.study import Run, resume

OLD = Path(__file__).parent / "fixtures" / "v0.1.0"
EXPECTED = json.loads((OLD / "expected.json").read_text())


@pytest.mark.parametrize("name", ["phases", "classes"])
def test_finished_runs_are_read_and_evaluated_again(tmp_path, name):
    shutil.copytree(OLD / name, tmp_path / name)
    folder, want = RunFolder.open(tmp_path / name), EXPECTED[name]
    run = Run(folder, folder.result)
    assert run.mean == pytest.approx(want["mean"], abs=1e-12) and run.dice() == pytest.approx(want["by_site"])
    assert all(getattr(run.result, key) == want[key] for key in ("rounds", "best_round", "best_phase"))
    assert len(folder.records()) == want["rounds"] and all(r.sites and r.measure for r in folder.records())
    if name == "classes":
        score = next(iter(run.result.test["valley"].values()))
        assert score.labels["accuracy"] == (score.predicted == score.true)
    main = "dice" if name == "phases" else "accuracy"
    before = read(tmp_path / name).values(main)
    evaluate(tmp_path / name, again=True, pictures=False)
    assert read(tmp_path / name).values(main) == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("name", ["ditto", "phases"])
def test_interrupted_runs_are_resumed_to_the_same_end(tmp_path, name):
    shutil.copytree(OLD / "interrupted" / name, tmp_path / name)
    run, want = resume(tmp_path / name), EXPECTED[f"interrupted/{name}"]
    assert (run.result.rounds, run.result.best_round) == (want["rounds"], want["best_round"])
    assert run.mean == pytest.approx(want["mean"], abs=1e-3)
    for path in sorted((OLD / "interrupted" / f"{name}-resumed" / "models").glob("*.safetensors")):
        old, new = load_file(path), load_file(tmp_path / name / "models" / path.name)
        assert old.keys() == new.keys() and all(np.allclose(old[k], new[k], atol=1e-5) for k in old)


def test_a_folder_of_a_later_version_is_refused(tmp_path):
    shutil.copytree(OLD / "classes", tmp_path / "run")
    versions = tmp_path / "run" / "versions.json"
    assert "format" not in json.loads(versions.read_text())  # 0.1.0 did not say
    versions.write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(RunError, match=f"has format {FORMAT + 1}, this polysite reads up to {FORMAT}: install a newer"):
        RunFolder.open(tmp_path / "run")


def test_a_removed_key_is_ignored_and_reported_once_in_a_run_and_refused_in_a_study(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(foreign.REMOVED, "train.haste", foreign.Removed("set train.lr", idle=0))
    known = (OLD / "classes" / "config.toml").read_text()
    study, old = tmp_path / "study.toml", known.replace("[train]\n", "[train]\nhaste = 2\n")
    assert old != known
    assert config.parse(old) == config.parse(old) == config.parse(known)
    study.write_text(old)
    refusal = r"^train\.haste = 2: this key no longer exists; set train\.lr$"
    with pytest.raises(ConfigError, match=refusal):
        config.load(study)
    with pytest.raises(ConfigError, match=refusal):
        config.parse(known, {"train.haste": "2"})
    study.write_text(old.replace("haste = 2", "haste = 0"))
    assert config.load(study) == config.parse(known)
    assert caplog.messages == ["the configuration: train.haste no longer exists and is ignored; set train.lr"]


def test_a_removed_key_is_ignored_in_a_phase_and_refused_in_that_of_a_study(tmp_path):
    phase = '[[then]]\nalgorithm.name = "cfft"\nrun.rounds = 200\n'
    assert config.parse(f"{phase}algorithm.fewest = 5\n") == config.parse(phase)
    study = tmp_path / "study.toml"
    study.write_text(f"{phase}algorithm.fewest = 5\n")
    with pytest.raises(ConfigError, match=r"algorithm\.fewest = 5: this key no longer exists; choose run\.secure\.use"):
        config.load(study)
