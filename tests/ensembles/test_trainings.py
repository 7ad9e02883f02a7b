"""An ensemble of trainings: the same cases, other seeds, one run; what was interrupted is continued."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import polysite as ps
from polysite import config, ensembles
from polysite.cli import app
from polysite.engines.run_folder import RunFolder
from polysite.ensembles import trainings
from polysite.errors import ConfigError, RunError

SITES = {name: ps.Hospital(cases=5, scanner=k) for k, name in enumerate(("east", "west"))}
TINY = ps.Study(
    seed=3,
    model=ps.UNet(filters=(2, 4, 4)),
    data=ps.Phantom(shape=(24, 24, 24), sites=SITES),
    train=ps.Train(patch=(24, 24, 24), batch=4, device="cpu", augment="none", lr=0.5),
    run=ps.Plan(rounds=1),
)


def test_trainings_differ_by_their_luck_alone_and_the_command_continues(tmp_path, monkeypatch):
    out = tmp_path / "both"
    with monkeypatch.context() as patch:
        patch.setattr(trainings, "made_ensemble", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ensembles.train_ensemble(TINY, out, trainings=2)
    members = [RunFolder.open(tmp_path / "both-trainings" / f"seed{k}") for k in (3, 4)]
    assert members[0].split == members[1].split
    first, second = (load_file(m.path / "models" / "last.safetensors") for m in members)
    assert any(not np.allclose(first[k], second[k]) for k in first)
    kept = [(m.path / "result.json").stat().st_mtime_ns for m in members]

    file = tmp_path / "study.toml"
    file.write_text(config.dump(TINY))
    shown = CliRunner().invoke(app, ["train", str(file), "--trainings", "2", "--out", str(out), "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert [(m.path / "result.json").stat().st_mtime_ns for m in members] == kept  # not trained again
    (out / "result.json").unlink()  # interrupted in the evaluation of the ensemble
    ensembles.train_ensemble(TINY, out, trainings=2)
    with pytest.raises(RunError, match="exists already"):
        ensembles.train_ensemble(TINY, out, trainings=2)
    run = RunFolder.open(out)
    assert len(config.parse(run.config).model.members) == 2 and (out / "evaluation" / "test").is_dir()
    alone = ps.train(TINY, tmp_path / "alone", page=False)  # the first training is that of the study
    assert alone.result.test == members[0].result.test
    assert {c for s in run.result.test.values() for c in s} == {c for s in alone.result.test.values() for c in s}


def test_what_cannot_be_averaged_or_continued_is_refused(tmp_path):
    phase = {"algorithm": {"name": "cfft", "components": 2}, "run": {"rounds": 150}}
    clusters = replace(TINY, then=(phase,))
    with pytest.raises(ConfigError, match="cluster of patients, and such models cannot be averaged"):
        ensembles.train_ensemble(clusters, tmp_path / "out", trainings=2)
    with pytest.raises(ConfigError, match="at least two"):
        ensembles.train_ensemble(TINY, tmp_path / "out", trainings=1)
    assert not list(tmp_path.iterdir())
    ps.train(TINY, tmp_path / "out-trainings" / "seed3", evaluate=False, page=False)
    with pytest.raises(RunError, match="seed3 was trained with another configuration"):
        ensembles.train_ensemble(replace(TINY, run=ps.Plan(rounds=2)), tmp_path / "out", trainings=2)
    shown = CliRunner().invoke(app, ["train", "--trainings", "2", "--resume", str(tmp_path)])
    assert "the same command continues" in str(shown.exception)
