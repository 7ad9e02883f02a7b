"""What every hospital gets: all models on everyone's patients, own data and others; in Python, as tables."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from monai.metrics.hausdorff_distance import compute_hausdorff_distance

import polysite as ps
from polysite import frames
from polysite.algorithms.base import facts
from polysite.data.federation import LeaveOut
from polysite.data.phantom import write
from polysite.engines.phases import SHARED
from polysite.errors import ConfigError, DataError, RunError
from polysite.report import evaluations
from polysite.report.runs import read
from polysite.study import build_sites, training
from polysite.training.torch_site import TorchSite
from studies import SMALL

LABELS = ("WT", "TC", "ET")


@pytest.fixture(scope="module")
def root(tmp_path_factory, trained):
    """A shared model and personal ones, trained and examined."""
    root = tmp_path_factory.mktemp("runs")
    for name, algorithm in (("fedavg", ps.FedAvg()), ("local", ps.Local())):
        copytree(trained(replace(SMALL, algorithm=algorithm)).folder.path, root / name)
        itself = text_of(root / name)
        ps.evaluate(root / name, again=True)
        assert text_of(root / name) == itself  # as the run evaluated itself
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
        files = ",".join(str(next(case.glob(f"*{m}.nii.gz"))) for m in ("t1", "t1ce", "t2", "flair", "seg"))
        rows.append(f'{case.parent.name},{case.name},{files},"WT=1,2,4; TC=1,4; ET=4"')
    (folder / "new.csv").write_text("\n".join(rows) + "\n")
    return folder / "new.csv"


def text_of(run):
    """The rows of the test cases of a run."""
    return (run / "evaluation" / "test" / "cases.csv").read_text()


def rows_of(folder):
    with (folder / "cases.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_the_counts_are_those_of_the_measures_and_of_the_result(name, root):
    run = read(root / name)
    for row in run.evaluation.rows:
        counts, voxels = run.evaluation.counts[row.model, row.site, row.case], row.values
        tp, fp, fn, tn = counts[row.label]
        assert (tp + fn, tp + fp) == (voxels["truth"], voxels["predicted"]) and tp + fp + fn + tn > voxels["truth"]
        assert set(counts) == {"background", *LABELS} and len({sum(c) for c in counts.values()}) == 1
    for site, case in run.evaluation.own:
        model = site if name == "local" else SHARED
        assert run.scores[site][case].counts == run.evaluation.counts[model, site, case]
    again = read(root / name, evaluation="test")
    assert again.counts == run.counts and set(run.counts) == set(run.sites)


def test_a_shared_model_has_a_row_for_every_label_of_every_case(root):
    run, found = read(root / "fedavg"), rows_of(root / "fedavg" / "evaluation" / "test")
    assert {r["model"] for r in found} == {"*"} and len(found) == 3 * sum(map(len, run.scores.values()))
    for r in found:
        assert float(r["dice"]) == run.scores[r["site"]][r["case"]].labels[r["label"]]
        assert float(r["iou"]) == pytest.approx(float(r["dice"]) / (2 - float(r["dice"])))
    for site in run.sites:  # the kept cases are the worst, median and best
        shown = [s for s in run.evaluation.about["shown"] if s["site"] == site]
        dice = [np.mean([r["dice"] for r in run.evaluation.own[site, s["case"]].values()]) for s in shown]
        assert shown[0]["why"] == "worst" and dice == sorted(dice)


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
    matrix = evaluations.matrix(found.rows)
    assert set(matrix) == {"east", "north", "west"} and all(set(r) == set(matrix) for r in matrix.values())
    for site in matrix:
        own = [r["dice"] for (s, _), labels in found.own.items() if s == site for r in labels.values()]
        assert matrix[site][site] == pytest.approx(np.mean(own))


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


def test_a_hospital_that_did_not_train_and_other_parts_are_examined_too(tmp_path, trained):
    ps.train(replace(SMALL, federation=LeaveOut("west")), tmp_path / "run")
    found = rows_of(ps.evaluate(tmp_path / "run", pictures=False, again=True))
    assert sum(r["site"] == "west" for r in found) == 15
    run = read(tmp_path / "run")
    assert run.unseen == {"west"} and not run.evaluation.about["shown"]
    assert run.evaluation.prediction("west", "west-000") is None
    found = rows_of(ps.evaluate(tmp_path / "run", "validation"))
    assert {r["model"] for r in found} == {"*"} and {r["site"] for r in found} == {"east", "north"}
    pooled = read(trained(replace(SMALL, run=replace(SMALL.run, pooled=True))).folder.path).evaluation
    assert pooled.about["unit"] == "mm" and pooled.about["trained"] == ["pooled"]
    assert {(r.model, r.site) for r in pooled.rows} == {("*", s) for s in ("east", "north", "west")}


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
    before = text_of(tmp_path / "run")
    ps.evaluate(tmp_path / "run", again=True)
    assert text_of(tmp_path / "run") == before
    if facts(algorithm).strangers:
        assert {r["site"] for r in rows_of(ps.evaluate(tmp_path / "run", on=elsewhere))} == {"abbey", "north"}


def test_what_cannot_be_examined_is_refused_and_leaves_nothing_behind(root, elsewhere, tmp_path):
    before = sorted(root.rglob("*"))
    other = tmp_path / "other.csv"
    other.write_text(elsewhere.read_text().replace("ET=4", "XX=4"))
    for run, given, error, words in (
        (root / "fedavg", {}, RunError, "exists already; --again"),
        (root / "fedavg", {"split": "tset"}, ConfigError, "there is no split 'tset'"),
        (root / "fedavg", {"tolerance": -1}, ConfigError, "must be a distance"),
        (root / "fedavg", {"on": other}, DataError, "does not fit this run: its label names"),
        (tmp_path, {}, RunError, "not a run folder"),
    ):
        with pytest.raises(error, match=words):
            ps.evaluate(run, **given)
    assert sorted(root.rglob("*")) == before


def test_an_unfinished_run_and_other_data_are_refused(root, tmp_path):
    copytree(root / "fedavg", tmp_path / "run")
    split = tmp_path / "run" / "split.csv"
    split.write_text(split.read_text().replace(",test,", ",train,"))
    with pytest.raises(RunError, match="the data are not those"):
        ps.evaluate(tmp_path / "run", again=True)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RunError, match="has not finished"):
        ps.evaluate(tmp_path / "run", again=True)


def test_an_evaluation_goes_by_its_own_name(root, elsewhere, tmp_path):
    ps.evaluate(root / "fedavg", "train", pictures=False)
    assert read(root / "fedavg", evaluation="train").split == "train"
    same = tmp_path / "test.csv"
    same.write_text(elsewhere.read_text())
    place = ps.evaluate(root / "fedavg", on=same)
    assert place.name == "on test" and read(root / "fedavg").sites == ["east", "north", "west"]


def test_an_old_evaluation_stays_if_a_new_one_cannot_take_its_place(root, monkeypatch):
    before, rename = text_of(root / "local"), Path.rename

    def fail(self, target):
        if self.name.endswith(".partial"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr("polysite.storage._exchange", lambda one, other: False)  # a system that cannot exchange names
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RunError, match="could not be written: no space left"):
        ps.evaluate(root / "local", again=True)
    assert text_of(root / "local") == before and not list((root / "local" / "evaluation").glob(".*"))


def test_without_evaluation_a_run_has_scores_alone(trained, tmp_path):
    bare = ps.train(SMALL, tmp_path / "bare", evaluate=False)
    whole = trained(SMALL).result  # all measures take more bytes than scores
    assert replace(bare.result, bytes_up=whole.bytes_up) == whole and not (tmp_path / "bare" / "evaluation").exists()


WITH_PAGE = training.with_page  # before the suite turns it off


@pytest.fixture
def both(trained):
    return trained(SMALL), trained(replace(SMALL, algorithm=ps.Local()))


def test_cases_and_rounds_are_data_frames(both):
    run, _ = both
    cases = run.cases()
    assert type(cases) is pytest.importorskip("pandas").DataFrame and "hd95" in cases.columns
    assert cases.groupby("site")["dice"].mean().to_dict() == pytest.approx(run.dice(), abs=1e-5)
    rounds = run.rounds()
    assert len(rounds) == 2 * 3 and rounds["round"].tolist() == [0, 0, 0, 1, 1, 1]
    record = run.folder.records()[1]
    row = rounds[(rounds["round"] == 1) & (rounds["site"] == "east")].iloc[0]
    assert row["loss"] == record.sites["east"].loss and row["share"] == record.shares["east"]
    scores = record.validation["east"].score
    assert row["validation"] == pytest.approx(sum(scores.values()) / len(scores))


def test_without_pandas_they_are_dictionaries(both, monkeypatch):
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    run, _ = both
    cases, rounds = run.cases(), run.rounds()
    assert isinstance(cases[0]["dice"], float) and isinstance(cases[0]["case"], str)
    assert rounds[0]["round"] == 0 and rounds[0]["steps"] == run.folder.records()[0].sites["east"].steps


def test_a_comparison_has_its_tables(both, tmp_path):
    fed, alone = (run.folder.path for run in both)
    done = ps.compare({"together": fed, "alone": alone}, tmp_path / "page", reference="together")
    assert (tmp_path / "page" / "index.html").is_file()
    for name, table in done.tables.items():
        assert len(table) == len((tmp_path / "page" / f"{name}.csv").read_text().splitlines()) - 1
    assert len(done.tables) >= 2 and len(done.tests) >= 1
    assert done.comparison.reference == "together"


def test_training_in_python_evaluates_and_writes_the_page_unless_asked_not_to(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "with_page", WITH_PAGE)
    run = ps.train(SMALL, tmp_path / "run").folder.path
    assert (run / "evaluation" / "test" / "cases.csv").is_file() and "fedavg" in (run / "index.html").read_text()
    bare = ps.train(SMALL, tmp_path / "bare", evaluate=False, page=False)
    assert not (tmp_path / "bare" / "index.html").exists()
    with pytest.raises(RunError, match=r"cases\.csv; 'polysite evaluate .*bare' writes it"):
        bare.cases()
