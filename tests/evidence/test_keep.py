"""Lines of finished runs and assessments: their content, what is left out, and faults that do not end a run."""

import json
import logging
from dataclasses import replace

import pytest

import polysite as ps
from polysite import config, evidence
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.weighted import Weighted
from polysite.evidence import table
from polysite.evidence.anonymous import _changed, data_digest, method_settings, split_digest, training_settings
from polysite.study import deal_cases

NAMES = ("Charite", "Karolinska", "Lausanne")
TINY = """
[model]
filters = [2, 2, 4]
[data]
shape = [24, 24, 24]
[data.sites]
Charite = { cases = 7 }
Karolinska = { cases = 5 }
Lausanne = { cases = 6, contrast = 2.0 }
[train]
patch = [8, 8, 8]
epochs = 1
overlap = 0.0
[run]
rounds = 1
checkpoint_every = 1
[assess]
permutations = 99
resamples = 100
projections = 0
"""


@pytest.fixture
def study():
    return config.parse(TINY)


def grouped(study):
    groups = {"Berlin": ("Charite",), "others": ("Karolinska", "Lausanne")}
    return replace(study, algorithm=Weighted({"Charite": 0.3}, inner=Clustered(groups, FedProx(mu=0.1))))


def test_a_run_and_an_assessment_of_the_same_cases_meet(study, tmp_path, monkeypatch):
    monkeypatch.setattr("polysite.report.assess_page.write", lambda *_: None)  # figures
    ps.train(study, tmp_path / "Karolinska-run", evaluate=False)
    ps.train(replace(study, algorithm=FedProx(mu=0.1)), tmp_path / "b", evaluate=False)
    found = ps.assess(replace(study, seed=3), tmp_path / "c").assessment
    one, two, far = table.read()
    (federation,) = evidence.federations([one, two, far])
    assert federation.distances == far
    assert far.distances["emd"].mean == pytest.approx(found.distances["emd"].matrix.sum() / 6, rel=1e-5)
    assert [g.method for g in federation.gains()] == ["fedprox", "fedavg"]
    assert federation.gains()[0].gain == pytest.approx(two.score - one.score)
    assert federation.gains()[0].steps_ratio == 1
    assert one.sizes == (5, 4, 3)
    assert one.split == "test"
    assert one.steps == 4
    assert one.tested == 3
    assert two.settings == {"mu": 0.1}
    assert one.training == {"patch": [8, 8, 8], "overlap": 0.0}
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    sites = {s: c for s, c in result["test"].items() if len(c) == 1}
    (case,) = sites["Charite"].values()
    assert two.by_site[0] == pytest.approx(sum(case["labels"].values()) / 3)
    text = (table.place() / table.FILE).read_text()
    assert not any(word in text for word in (*NAMES, "Berlin", "contrast", str(tmp_path), "capital"))


def test_settings_have_no_names(study):
    settings = method_settings(grouped(study))
    assert settings == {
        "weights": [0.3], "inner.name": "clustered", "inner.groups": [1, 2], "inner.inner.name": "fedprox",
        "inner.inner.mu": 0.1,
    }  # fmt: skip


def test_settings_of_every_algorithm_are_plain():
    from table import CASES

    for algorithm in CASES.values():
        found = dict(_changed(algorithm))
        json.dumps(found, allow_nan=False)
        assert not {"a", "b", "c", "d", "north", "south"} & {str(v) for v in found.values()}


def test_later_phases_are_listed(study):
    later = replace(study, then=({"algorithm": {"name": "fine_tune", "lr": [0.1, 0.2]}, "train": {"epochs": 2}},))
    assert method_settings(later) == {"then.lr": [0.1, 0.2], "then.train.epochs": 2}
    assert training_settings(later) == training_settings(study)


def test_digests_say_which_cases(study):
    key, other = bytes(32), bytes([1] * 32)
    data = data_digest(study, key)
    assert data == data_digest(replace(study, seed=1, split=replace(study.split, folds=3)), key)  # another fold
    assert data == data_digest(replace(study, split=replace(study.split, inner=2)), key)  # a search
    assert data != data_digest(study, other)
    assert data != data_digest(config.parse(TINY.replace("contrast = 2.0", "contrast = 1.0")), key)
    assert data != data_digest(config.parse(TINY.replace("Lausanne", "Lyon")), key)
    splits = [replace(study, seed=s) for s in (0, 0, 1)]
    one, same, drawn = (split_digest(s, deal_cases(s), key) for s in splits)
    assert one == same != drawn


def test_off_writes_nothing(study, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYSITE_EVIDENCE", "off")
    ps.train(study, tmp_path / "a", evaluate=False)
    assert not (tmp_path / "home").exists()


def test_an_unwritable_table_costs_a_warning(study, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYSITE_EVIDENCE", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING, "polysite"):
        run = ps.train(study, tmp_path / "a", evaluate=False)
    assert run.folder.finished
    (warning,) = (r.message for r in caplog.records if "evidence" in r.message)
    assert warning.startswith("this run adds nothing to the evidence bank (NotADirectoryError")
