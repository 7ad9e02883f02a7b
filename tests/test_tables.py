"""Results in Python: cases, rounds and comparisons as tables; ps.train writes the page."""

from dataclasses import replace

import pytest

import polysite as ps
from polysite import frames
from polysite.errors import RunError
from polysite.study import training
from studies import SMALL

pandas = pytest.importorskip("pandas", reason="tables are DataFrames only where pandas is installed")
WITH_PAGE = training.with_page  # before the suite turns it off


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    one = ps.train(SMALL, root / "fedavg")
    return one, ps.train(replace(SMALL, algorithm=ps.Local()), root / "local")


def test_cases_and_rounds_are_data_frames(runs):
    run, _ = runs
    cases = run.cases()
    assert isinstance(cases, pandas.DataFrame) and {"model", "site", "case", "label", "dice", "hd95"} <= {
        *cases.columns
    }
    by_site = cases.groupby("site")["dice"].mean()
    assert by_site.to_dict() == pytest.approx(run.dice(), abs=1e-5)
    rounds = run.rounds()
    assert len(rounds) == 2 * 3 and rounds["round"].tolist() == [0, 0, 0, 1, 1, 1]
    record = run.folder.records()[1]
    row = rounds[(rounds["round"] == 1) & (rounds["site"] == "east")].iloc[0]
    assert row["loss"] == record.sites["east"].loss and row["share"] == record.shares["east"]
    scores = record.validation["east"].score
    assert row["validation"] == pytest.approx(sum(scores.values()) / len(scores))


def test_without_pandas_they_are_dictionaries(runs, monkeypatch):
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    run, _ = runs
    cases, rounds = run.cases(), run.rounds()
    assert isinstance(cases[0], dict) and isinstance(cases[0]["dice"], float) and isinstance(cases[0]["case"], str)
    assert rounds[0]["round"] == 0 and rounds[0]["steps"] == run.folder.records()[0].sites["east"].steps


def test_a_run_without_an_evaluation_says_how_to_get_one(tmp_path):
    run = ps.train(SMALL, tmp_path / "run", evaluate=False)
    with pytest.raises(RunError, match=r"cases\.csv; 'polysite evaluate .*run' writes it"):
        run.cases()


def test_a_comparison_has_its_tables(runs, tmp_path):
    fed, alone = (run.folder.path for run in runs)
    done = ps.compare({"together": fed, "alone": alone}, tmp_path / "page", reference="together")
    assert (tmp_path / "page" / "index.html").is_file()
    for name, table in done.tables.items():
        assert isinstance(table, pandas.DataFrame) and (tmp_path / "page" / f"{name}.csv").is_file()
        assert len(table) == len((tmp_path / "page" / f"{name}.csv").read_text().splitlines()) - 1
    assert len(done.tables) >= 2 and len(done.tests) >= 1
    assert done.comparison.reference == "together"


def test_training_in_python_evaluates_and_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "with_page", WITH_PAGE)
    run = ps.train(SMALL, tmp_path / "run")
    assert (run.folder.path / "evaluation" / "test" / "cases.csv").is_file()
    assert "fedavg" in (run.folder.path / "index.html").read_text()
    ps.train(SMALL, tmp_path / "plain", page=False)
    assert not (tmp_path / "plain" / "index.html").exists()
