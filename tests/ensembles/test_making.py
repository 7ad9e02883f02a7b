"""Ensembles of finished runs: they are runs themselves, and runs that do not go together are refused."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import polysite as ps
from polysite import ensembles
from polysite.cli import app
from polysite.config import parse
from polysite.engines.record import mean_score
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, RunError
from polysite.models.ensemble import Ensemble
from polysite.report.runs import read

SITES = {name: ps.Hospital(cases=5, scanner=k) for k, name in enumerate(("east", "west"))}
TINY = ps.Study(
    model=ps.UNet(filters=(2, 4, 4)),
    data=ps.Phantom(shape=(24, 24, 24), sites=SITES),
    train=ps.Train(patch=(24, 24, 24), batch=4, device="cpu", augment="none", lr=0.5),
    run=ps.Plan(rounds=1),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A shared model, personal ones of another network, two inner folds, another split."""
    root = tmp_path_factory.mktemp("runs")
    personal = {"algorithm": ps.Local(), "model": ps.UNet(filters=(4, 4, 4), deep_supervision=1)}
    inner = [{"split": replace(TINY.split, inner=2, inner_fold=k)} for k in range(2)]
    studies = {"global": {}, "local": personal, "fold0": inner[0], "fold1": inner[1]}
    studies["elsewhere"] = {"split": replace(TINY.split, seed=1)}
    studies["mirrored"] = {"train": replace(TINY.train, mirror=True)}
    for name, changes in studies.items():
        ps.train(replace(TINY, **changes), root / name, evaluate=False)
    return root


def changed(run, copy, old, new):
    """Copy a run with another line in its configuration."""
    shutil.copytree(run, copy)
    text = (copy / "config.toml").read_text()
    assert old in text
    (copy / "config.toml").write_text(text.replace(old, new, 1))


def rows(run):
    return {
        (r["Site"], r["Subject_ID"]): r["Split"] for r in csv.DictReader((run / "split.csv").read_text().splitlines())
    }


def test_identical_members_score_as_the_member(root, tmp_path):
    made, member = ensembles.ensemble([root / "global"] * 2, tmp_path / "twice"), read(root / "global")
    assert {s: {c: x.labels for c, x in cases.items()} for s, cases in made.result.test.items()} == {
        s: {c: x.labels for c, x in cases.items()} for s, cases in member.scores.items()
    }
    assert made.result.validation == RunFolder(root / "global").result.validation
    assert (tmp_path / "twice" / "models" / "best.safetensors").exists()  # one model for all hospitals
    assert rows(tmp_path / "twice") == rows(root / "global")
    effort = made.folder.records()[0].sites["east"]
    assert effort.steps == 2 * RunFolder(root / "global").records()[0].sites["east"].steps
    itself = (tmp_path / "twice" / "evaluation" / "test" / "cases.csv").read_text()
    ps.evaluate(tmp_path / "twice", again=True)
    assert (tmp_path / "twice" / "evaluation" / "test" / "cases.csv").read_text() == itself
    (tmp_path / "twice" / "result.json").unlink()
    assert ps.resume(tmp_path / "twice", evaluate=False).dice() == made.dice()  # as after an interruption
    with pytest.raises(RunError, match="exists already"):
        ensembles.ensemble([root / "global"] * 2, tmp_path / "twice")


def test_a_global_and_a_personal_model_by_command(root, tmp_path):
    words = [str(root / "global"), str(root / "local"), "--out", str(tmp_path / "both"), "--json"]
    done = CliRunner().invoke(app, ["ensemble", *words])
    assert done.exit_code == 0, done.output
    assert [m["name"] for m in json.loads(done.stdout)["ensemble"]["members"]] == ["global", "local"]
    study = parse(RunFolder(tmp_path / "both").config)
    assert study.model == Ensemble((TINY.model, ps.UNet(filters=(4, 4, 4))))  # without heads that do not predict
    assert (tmp_path / "both" / "models" / "best.east.safetensors").exists()
    page = (tmp_path / "both" / "index.html").read_text()
    assert "Members of the ensemble" in page and "both: global, local." in page


def test_folds_share_their_unseen_test_cases(root, tmp_path):
    made = ensembles.ensemble([root / "fold0", root / "fold1"], tmp_path / "folds")
    parts, whole = rows(tmp_path / "folds"), rows(root / "global")
    tested = {case for case, part in whole.items() if part == "test"}
    assert {case for case, part in parts.items() if part == "test"} == tested
    assert "validation" not in parts.values() and parts.keys() == whole.keys()
    assert {(s, c) for s, cases in made.result.test.items() for c in cases} == tested and made.split == "test"
    (tmp_path / "folds").rename(tmp_path / "moved")
    ps.evaluate(tmp_path / "moved", again=True, pictures=False)


def test_mirrored_members_predict_mirrored(root, tmp_path):
    made = ensembles.ensemble([root / "mirrored"] * 2, tmp_path / "mirrored")
    assert parse(made.folder.config).train.mirror and made.mean == pytest.approx(
        mean_score(read(root / "mirrored").scores, "case")
    )


def test_runs_that_do_not_go_together_are_refused(root, tmp_path):
    def refused(words, *names, kind=ConfigError):
        with pytest.raises(kind, match=words):
            ensembles.ensemble([root / n for n in names], tmp_path / "none")
        assert not (tmp_path / "none").exists()

    refused("at least two runs, got 1", "global")
    refused("is a test case of .*as a (train|validation) case", "global", "elsewhere")
    refused("differs from .* in its train.mirror", "global", "mirrored")
    changed(root / "global", tmp_path / "seeds", "seed = 0\n", "seed = 3\n")
    refused("patients, which come from the seed", "global", tmp_path / "seeds")
    changed(root / "global", tmp_path / "prepared", 'normalise = "nonzero"', 'normalise = "all"')
    refused("in its preparation", "global", tmp_path / "prepared")
    (tmp_path / "prepared" / "result.json").unlink()
    refused("has not finished", "global", tmp_path / "prepared", kind=RunError)
    with pytest.raises(ConfigError, match="an ensemble is not trained: train its members"):
        ps.train(replace(TINY, model=Ensemble((TINY.model, TINY.model))), tmp_path / "none")
