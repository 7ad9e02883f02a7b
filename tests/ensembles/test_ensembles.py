"""Ensembles of several trainings of a study: they are runs themselves."""

import csv
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
from polysite.models.ensemble import Ensemble
from polysite.report import publish
from polysite.report.runs import read
from studies import SHAPE, clinics, tiny

TRAIN = {"patch": SHAPE, "batch": 4, "augment": "none", "lr": 0.5}
TINY = tiny(clinics("east", "west"), train=TRAIN, run={"rounds": 1})
SEEDED = replace(TINY, seed=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A shared model, personal ones, another split, mirroring."""
    root = tmp_path_factory.mktemp("runs")
    studies = {
        "global": {},
        "local": {"algorithm": ps.Local(), "model": ps.UNet(filters=(4, 4, 4), deep_supervision=1)},
        "others": {"split": replace(TINY.split, seed=1)},
        "mirrored": {"train": replace(TINY.train, mirror=True)},
    }
    for name, changes in studies.items():
        ps.train(replace(TINY, **changes), root / name, evaluate=False)
    return root


def rows(run):
    found = csv.DictReader((run / "split.csv").read_text().splitlines())
    return {(row["Site"], row["Subject_ID"]): row["Split"] for row in found}


def labels(scores):
    return {case: score.labels for cases in scores.values() for case, score in cases.items()}


@pytest.mark.parametrize("name", ["global", "mirrored"])
def test_identical_members_score_as_the_member(name, root, tmp_path):
    twice, member = tmp_path / "twice", RunFolder(root / name)
    made = ensembles.made_ensemble([root / name] * 2, twice)
    assert labels(made.result.test) == labels(read(root / name).scores)
    assert made.result.validation == member.result.validation
    assert (twice / "models" / "best.safetensors").exists()  # one model for all hospitals
    assert rows(twice) == rows(root / name) and config.parse(made.folder.config).train.mirror == (name == "mirrored")
    assert made.folder.records()[0].sites["east"].steps == 2 * member.records()[0].sites["east"].steps
    itself = (twice / "evaluation" / "test" / "cases.csv").read_text()
    ps.evaluate(twice, again=True)
    assert (twice / "evaluation" / "test" / "cases.csv").read_text() == itself
    (twice / "result.json").unlink()
    assert ps.resume(twice, evaluate=False).dice() == made.dice()  # as after an interruption


def test_personal_models_are_averaged_hospital_by_hospital(root, tmp_path):
    made = ensembles.made_ensemble([root / "local"] * 2, tmp_path / "both")
    member = ps.UNet(filters=(4, 4, 4))  # without heads that do not predict
    assert config.parse(made.folder.config).model == Ensemble((member, member))
    assert (tmp_path / "both" / "models" / "best.east.safetensors").exists()
    publish.run_page(tmp_path / "both")
    page = (tmp_path / "both" / "index.html").read_text()
    assert "Members of the ensemble" in page and "both: local, local." in page


def test_what_is_no_ensemble_is_refused(root, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(RunError, match="exists already"):
        ensembles.made_ensemble([root / "global"] * 2, tmp_path / "here")
    with pytest.raises(ConfigError, match=r"others has other cases than .*global; an ensemble needs equal ones"):
        ensembles.made_ensemble([root / "global", root / "others"], tmp_path / "none")
    with pytest.raises(ConfigError, match="an ensemble is not trained: train its members"):
        ps.train(replace(TINY, model=Ensemble((TINY.model, TINY.model))), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_trainings_differ_by_their_luck_alone_and_the_command_continues(tmp_path, monkeypatch):
    out = tmp_path / "both"
    with monkeypatch.context() as patch:
        patch.setattr(trainings, "made_ensemble", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ensembles.train_ensemble(SEEDED, out, trainings=2)
    members = [RunFolder.open(tmp_path / "both-trainings" / f"seed{k}") for k in (3, 4)]
    assert members[0].split == members[1].split
    first, second = (load_file(m.path / "models" / "last.safetensors") for m in members)
    assert any(not np.allclose(first[k], second[k]) for k in first)
    kept = [(m.path / "result.json").stat().st_mtime_ns for m in members]

    file = tmp_path / "study.toml"
    file.write_text(config.dump(SEEDED))
    shown = CliRunner().invoke(app, ["train", str(file), "--trainings", "2", "--out", str(out), "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert [(m.path / "result.json").stat().st_mtime_ns for m in members] == kept  # not trained again
    (out / "result.json").unlink()  # interrupted in the evaluation of the ensemble
    ensembles.train_ensemble(SEEDED, out, trainings=2)
    with pytest.raises(RunError, match="exists already"):
        ensembles.train_ensemble(SEEDED, out, trainings=2)
    run = RunFolder.open(out)
    assert len(config.parse(run.config).model.members) == 2 and (out / "evaluation" / "test").is_dir()
    alone = ps.train(SEEDED, tmp_path / "alone", page=False)  # the first training is that of the study
    assert alone.result.test == members[0].result.test
    assert {c for s in run.result.test.values() for c in s} == {c for s in alone.result.test.values() for c in s}


def test_what_cannot_be_averaged_or_continued_is_refused(tmp_path):
    clusters = {"algorithm": {"name": "cfft", "components": 2}, "run": {"rounds": 150}}
    with pytest.raises(ConfigError, match="cluster of patients, and such models cannot be averaged"):
        ensembles.train_ensemble(replace(SEEDED, then=(clusters,)), tmp_path / "out", trainings=2)
    with pytest.raises(ConfigError, match="at least two"):
        ensembles.train_ensemble(SEEDED, tmp_path / "out", trainings=1)
    assert not list(tmp_path.iterdir())
    ps.train(SEEDED, tmp_path / "out-trainings" / "seed3", evaluate=False, page=False)
    with pytest.raises(RunError, match="seed3 was trained with another configuration"):
        ensembles.train_ensemble(replace(SEEDED, run=ps.Plan(rounds=2)), tmp_path / "out", trainings=2)
    shown = CliRunner().invoke(app, ["train", "--trainings", "2", "--resume", str(tmp_path)])
    assert "the same command continues" in str(shown.exception)
