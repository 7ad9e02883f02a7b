"""What every hospital gets: all models on everyone's patients, own data and others."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from pyarrow import parquet

import polysite as ps
from polysite.algorithms.base import facts
from polysite.data.federation import LeaveOut
from polysite.data.phantom import write
from polysite.errors import ConfigError, DataError, RunError
from polysite.report import runs, scans
from polysite.report.runs import read
from polysite.study import build_sites
from polysite.training.torch_site import TorchSite
from studies import SMALL

LABELS = ("WT", "TC", "ET")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A shared model and personal ones, trained and examined."""
    root = tmp_path_factory.mktemp("runs")
    for name, algorithm in (("fedavg", ps.FedAvg()), ("local", ps.Local())):
        ps.train(replace(SMALL, algorithm=algorithm), root / name)
        itself = (root / name / "evaluation" / "test" / "cases.csv").read_text()
        ps.evaluate(root / name, parquet=True, again=True)
        assert (root / name / "evaluation" / "test" / "cases.csv").read_text() == itself  # as the run evaluated itself
    return root


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Two new patients of a hospital that nobody has seen, and one of a known one, as files."""
    folder = tmp_path_factory.mktemp("elsewhere") / "new"
    sites = {"abbey": ps.Hospital(cases=2, scanner=5), "north": ps.Hospital(cases=1, scanner=1)}
    patients = ps.Phantom(shape=(24, 24, 24), sites=sites).case_refs(9)
    write((p.open() for site in patients.values() for p in site), folder)
    rows = ["site,case,t1,t1ce,t2,flair,label,labels"]
    for case in sorted(p for p in folder.glob("*/*") if p.is_dir()):
        files = [str(next(case.glob(f"*{m}.nii.gz"))) for m in ("t1", "t1ce", "t2", "flair", "seg")]
        rows.append(",".join([case.parent.name, case.name, *files, '"WT=1,2,4; TC=1,4; ET=4"']))
    (folder / "new.csv").write_text("\n".join(rows) + "\n")
    return folder / "new.csv"


def rows_of(folder):
    with (folder / "cases.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_the_counts_are_those_of_the_measures_and_of_the_result(name, root):
    run = read(root / name)
    own, scores = run.evaluation.own, run.scores
    for row in run.evaluation.rows:
        counts = run.evaluation.counts[row["model"], row["site"], row["case"]]
        tp, fp, fn, tn = counts[row["label"]]
        assert (tp + fn, tp + fp) == (row["truth"], row["predicted"]) and tp + fp + fn + tn > row["truth"]
        assert set(counts) == {"background", *LABELS} and len({sum(c) for c in counts.values()}) == 1
    for (site, case), labels in own.items():
        model = next(iter(labels.values()))["model"]
        assert scores[site][case].counts == run.evaluation.counts[model, site, case]
    again = read(root / name, evaluation="test")
    assert again.counts == run.counts and set(run.counts) == set(run.sites)


def test_a_shared_model_has_a_row_for_every_label_of_every_case(root):
    run, found = read(root / "fedavg"), rows_of(root / "fedavg" / "evaluation" / "test")
    assert {r["model"] for r in found} == {"*"} and len(found) == 3 * sum(map(len, run.scores.values()))
    for r in found:
        assert float(r["dice"]) == run.scores[r["site"]][r["case"]].labels[r["label"]]
        assert float(r["iou"]) == pytest.approx(float(r["dice"]) / (2 - float(r["dice"])))
    table = parquet.read_table(root / "fedavg" / "evaluation" / "test" / "cases.parquet").to_pylist()
    assert [{k: str(v) for k, v in r.items()} for r in table] == found


@pytest.mark.filterwarnings("ignore:monai.metrics.utils:FutureWarning")
def test_the_distances_are_monais_on_the_answers_that_were_kept(root):
    evaluation, sites = read(root / "fedavg").evaluation, build_sites(SMALL)
    checked = 0
    for (site, case), labels in evaluation.own.items():
        answer, truth = evaluation.prediction(site, case), sites[site]._volumes[case][1].numpy()
        for k, label in enumerate(LABELS):
            mask, row = (answer >> k & 1).astype(bool), labels[label]
            assert (row["predicted"], row["truth"]) == (mask.sum(), truth[k].sum())
            if mask.any() and truth[k].any():
                tensors = (torch.tensor(m.astype(np.float32))[None, None] for m in (mask, truth[k]))
                monai = compute_hausdorff_distance(*tensors, percentile=95, include_background=True)
                assert row["hd95"] == pytest.approx(float(monai), abs=1e-5)
                checked += 1
    assert checked > 3


def test_personal_models_are_tried_on_everyone(root):
    found = read(root / "local").evaluation
    matrix = runs.matrix(found.rows)
    assert set(matrix) == {"east", "north", "west"} and all(set(r) == set(matrix) for r in matrix.values())
    for site in matrix:
        own = [r["dice"] for (s, _), labels in found.own.items() if s == site for r in labels.values()]
        assert matrix[site][site] == pytest.approx(np.mean(own))
    for site, cases in read(root / "local").scores.items():
        for case, score in cases.items():
            assert {k: r["dice"] for k, r in found.own[site, case].items()} == score.labels


def test_an_unseen_hospital_is_given_the_shared_model_and_every_personal_one(root, elsewhere):
    place = ps.evaluate(root / "fedavg", on=elsewhere)
    assert place == root / "fedavg" / "evaluation" / "new"
    assert {(r["model"], r["site"]) for r in rows_of(place)} == {("*", "abbey"), ("*", "north")}
    place = ps.evaluate(root / "local", on=elsewhere)
    pairs = {(r["model"], r["site"]) for r in rows_of(place)}
    assert pairs == {(m, s) for m in ("east", "north", "west") for s in ("abbey", "north")}
    run = read(root / "local", evaluation="new")
    assert run.sites == ["north"]  # the hospital that has a model of its own
    assert read(root / "fedavg", evaluation="new").sites == ["abbey", "north"]


def test_a_hospital_that_did_not_train_is_examined_too(tmp_path):
    ps.train(replace(SMALL, federation=LeaveOut("west")), tmp_path / "run")
    found = rows_of(ps.evaluate(tmp_path / "run", pictures=False, again=True))
    assert sum(r["site"] == "west" for r in found) == 15
    run = read(tmp_path / "run")
    assert run.unseen == {"west"} and not run.evaluation.about["shown"]
    assert run.evaluation.prediction("west", "west-000") is None


def test_other_parts_and_pooled_training_can_be_examined(tmp_path):
    ps.train(replace(SMALL, run=replace(SMALL.run, pooled=True)), tmp_path / "run")
    found = rows_of(ps.evaluate(tmp_path / "run", "validation"))
    assert {r["model"] for r in found} == {"*"} and {r["site"] for r in found} == {"east", "north", "west"}
    about = json.loads((tmp_path / "run" / "evaluation" / "validation" / "about.json").read_text())
    assert about["unit"] == "mm" and about["trained"] == ["pooled"] and len(about["shown"]) == 3


@pytest.mark.parametrize("algorithm", [ps.Local(), ps.FedAvg()], ids=["personal", "shared"])
def test_models_of_own_best_rounds_are_examined_and_found_again(algorithm, tmp_path, elsewhere, monkeypatch):
    """Every test case once by the model that its hospital uses, and once more where the common best is another."""
    seen, predictions = Counter(), TorchSite.predictions

    def counted(self, params, cases):
        seen.update(c for c in cases if c in self.cases("test"))
        return predictions(self, params, cases)

    monkeypatch.setattr(TorchSite, "predictions", counted)
    study = replace(SMALL, algorithm=algorithm, train=replace(SMALL.train, lr=8.0), run=ps.Plan(rounds=4, best="own"))
    run = ps.train(study, tmp_path / "run")
    result = run.result
    assert len({result.best_round, *result.best_rounds.values()}) > 1  # or nothing would be shown
    found = rows_of(tmp_path / "run" / "evaluation" / "test")
    names = {r["model"] for r in found}
    for site, cases in result.test.items():
        for case in cases:
            other = result.best_rounds[site] != result.best_round
            assert seen[case] == (1 if names == {"*"} else 3) + other  # three hospitals' models on every case
    before = (tmp_path / "run" / "evaluation" / "test" / "cases.csv").read_text()
    ps.evaluate(tmp_path / "run", again=True)
    assert (tmp_path / "run" / "evaluation" / "test" / "cases.csv").read_text() == before
    if facts(algorithm).strangers:
        assert {r["site"] for r in rows_of(ps.evaluate(tmp_path / "run", on=elsewhere))} == {"abbey", "north"}


def test_what_cannot_be_examined_is_refused_and_leaves_nothing_behind(root, elsewhere, tmp_path):
    before = sorted(root.rglob("*"))
    with pytest.raises(RunError, match="exists already; --again"):
        ps.evaluate(root / "fedavg")
    with pytest.raises(ConfigError, match="there is no split 'tset'"):
        ps.evaluate(root / "fedavg", "tset")
    with pytest.raises(ConfigError, match="must be a distance"):
        ps.evaluate(root / "fedavg", tolerance=-1)
    with pytest.raises(DataError, match="does not fit this run: its label names"):
        other = tmp_path / "other.csv"
        other.write_text(elsewhere.read_text().replace("ET=4", "XX=4"))
        ps.evaluate(root / "fedavg", on=other)
    with pytest.raises(RunError, match="not a run folder"):
        ps.evaluate(tmp_path)
    assert sorted(root.rglob("*")) == before
    mtime = (root / "fedavg" / "evaluation" / "test" / "cases.csv").stat().st_mtime_ns
    text = (root / "fedavg" / "evaluation" / "test" / "cases.csv").read_text()
    ps.evaluate(root / "fedavg", again=True)
    file = root / "fedavg" / "evaluation" / "test" / "cases.csv"
    assert file.read_text() == text and file.stat().st_mtime_ns != mtime


def test_an_unfinished_run_and_other_data_are_refused(tmp_path):
    ps.train(SMALL, tmp_path / "run")
    split = tmp_path / "run" / "split.csv"
    split.write_text(split.read_text().replace(",test,", ",train,"))
    with pytest.raises(RunError, match="the data are not those"):
        ps.evaluate(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RunError, match="has not finished"):
        ps.evaluate(tmp_path / "run")


def test_without_pyarrow_parquet_is_refused_in_a_sentence(root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'polysite\[parquet\]'"):
        ps.evaluate(root / "fedavg", "validation", parquet=True)
    assert not (root / "fedavg" / "evaluation" / "validation").exists()


def test_an_evaluation_goes_by_its_own_name(root, elsewhere, tmp_path):
    ps.evaluate(root / "fedavg", "train", pictures=False)
    assert read(root / "fedavg", evaluation="train").split == "train"
    same = tmp_path / "test.csv"
    same.write_text(elsewhere.read_text())
    place = ps.evaluate(root / "fedavg", on=same)
    assert place.name == "on test" and read(root / "fedavg").sites == ["east", "north", "west"]


def test_the_kept_cases_are_the_worst_median_and_best(root):
    found = read(root / "fedavg").evaluation
    for site in ("east", "north", "west"):
        shown = [s for s in found.about["shown"] if s["site"] == site]
        dice = [np.mean([r["dice"] for r in found.own[site, s["case"]].values()]) for s in shown]
        assert next(s["why"] for s in shown) == "worst" and dice == sorted(dice)


def test_a_large_scan_is_thinned_out_but_seen_everywhere():
    label = np.zeros((1, 200, 8, 8), np.uint8)
    label[0, 150:153, 2:4, 2:4] = 1
    label[0, 151, 1:6, 1:6] = 1
    slices = scans._slices(label)
    assert len(slices) <= scans.SLICES and {150, 151, 152} <= set(slices) and (slices[0], slices[-1]) == (0, 199)
    assert max(np.diff(slices)) <= 8
    grey = scans._grey(np.array([[0.0, 1.0, 2.0, 3.0]]))
    assert grey.tolist()[0][0] == 0 and grey.max() == 255


def test_an_old_evaluation_stays_if_a_new_one_cannot_take_its_place(root, monkeypatch):
    before = (root / "local" / "evaluation" / "test" / "cases.csv").read_text()
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr("polysite.storage._exchange", lambda one, other: False)  # a system that cannot exchange names
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RunError, match="could not be written: no space left"):
        ps.evaluate(root / "local", again=True)
    assert (root / "local" / "evaluation" / "test" / "cases.csv").read_text() == before
    assert not list((root / "local" / "evaluation").glob(".*"))


def test_a_finished_run_predicts_each_test_case_once_per_model(tmp_path, monkeypatch):
    """Count the predictions of test cases: shared models predict each case once, personal ones once per model."""
    predicted = Counter()
    inner = TorchSite.predictions

    def counted(self, params, cases):
        predicted.update(case for case in cases if case in self.cases("test"))
        return inner(self, params, cases)

    monkeypatch.setattr(TorchSite, "predictions", counted)
    for algorithm, models in ((ps.FedAvg(), 1), (ps.Local(), 3)):
        predicted.clear()
        run = ps.train(replace(SMALL, algorithm=algorithm), tmp_path / type(algorithm).__name__)
        cases = [case for site in run.result.test.values() for case in site]
        assert cases and predicted == dict.fromkeys(cases, models)


def test_without_evaluation_a_run_has_scores_alone(tmp_path):
    whole = ps.train(SMALL, tmp_path / "whole")
    bare = ps.train(SMALL, tmp_path / "bare", evaluate=False)
    assert bare.result == whole.result and not (tmp_path / "bare" / "evaluation").exists()
