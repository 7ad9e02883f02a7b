"""Run folders, evaluations and assessments of polysite 0.1.0 can still be read, shown and compared."""

import csv
import json
from pathlib import Path
from shutil import copytree
from statistics import fmean

import pytest
from typer.testing import CliRunner

from polysite.cli import app
from polysite.report import page, publish
from polysite.report.runs import methods, read

ROOT = Path(__file__).parents[1] / "fixtures" / "v0.1.0"
EXPECTED = json.loads((ROOT / "expected.json").read_text())
FINISHED = {"phases": ROOT / "phases", "classes": ROOT / "classes", "deployed": ROOT / "deployed" / "finished" / "run"}
RAW = {name: list(map(json.loads, (path / "rounds.jsonl").read_text().splitlines())) for name, path in FINISHED.items()}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_has_the_scores_that_0_1_0_gave_it(name):
    run, expected = read(FINISHED[name]), EXPECTED[name]
    main = "accuracy" if name == "classes" else "dice"
    (method,) = methods([run])
    assert fmean(run.values(main).values()) == pytest.approx(expected["mean"], abs=1e-12)
    assert {s: fmean(method.of(s, main)) for s in run.sites} == pytest.approx(expected["by_site"], abs=1e-12)
    assert (len(run.records), run.best_round) == (expected["rounds"], expected["best_round"])
    assert run.split == "test" and run.finished


@pytest.mark.parametrize("name", FINISHED)
def test_the_records_of_its_rounds_keep_every_number(name):
    for record, raw in zip(read(FINISHED[name]).records, RAW[name], strict=True):
        assert record.diagnostics == raw.get("told", {}) and record.shares == raw["shares"]
        assert {s: dict(r.numbers) for s, r in record.sites.items()} == {s: r["said"] for s, r in raw["sites"].items()}
        assert {s: r.bytes_up for s, r in record.sites.items()} == {s: r["bytes_up"] for s, r in raw["sites"].items()}
        assert {s: v.score for s, v in record.validation.items()} == {
            s: v["score"] for s, v in raw.get("validation", {}).items()
        }


@pytest.mark.parametrize("name", ["phases", "classes"])
def test_its_evaluation_is_read(name):
    run = read(FINISHED[name], evaluation="test")
    with (FINISHED[name] / "evaluation" / "test" / "cases.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(run.evaluation.rows) == len(rows)
    if name == "classes":
        answers = {(r["site"], r["case"]): (int(float(r["said"])), int(float(r["true"]))) for r in rows}
        assert {(s, c): (v.predicted, v.true) for s, cases in run.scores.items() for c, v in cases.items()} == answers
        assert run.scores.keys() == read(FINISHED[name]).scores.keys()
    else:
        hd95 = [float(r["hd95"]) for r in rows]
        assert [r["hd95"] for r in run.evaluation.rows] == pytest.approx(hd95, nan_ok=True)
        assert run.measure == "Dice" and methods([run])[0].matrix()


@pytest.mark.parametrize("name", FINISHED)
def test_its_page_and_a_comparison_are_built(name, tmp_path):
    mean = f"{EXPECTED[name]['mean']:.3f}"
    text = page.build(name, methods([read(FINISHED[name])]), page.Options(assessment=ROOT / "assessment"))
    assert mean in text and all(site in text for site in EXPECTED[name]["by_site"])
    copytree(FINISHED[name], tmp_path / "again")
    (tmp_path / "again" / "config.toml").write_text(
        (FINISHED[name] / "config.toml").read_text().replace("batch = ", "batch = 1")
    )
    found = methods([read(FINISHED[name], "first"), read(tmp_path / "again", "second")])
    publish.comparison(tmp_path / "comparison", "Both", found)
    assert (tmp_path / "comparison" / "tables.md").read_text().count(mean) >= 2 and len(found) == 2


def test_the_commands_take_it(tmp_path):
    copytree(ROOT / "phases", tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0 and "Results of run" in (tmp_path / "run" / "index.html").read_text()
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "run"), "--json", "--out", str(tmp_path / "comparison")])
    assert done.exit_code == 0 and json.loads(done.output)["values"]["run"]["dice"].keys() == {"north", "south"}


@pytest.mark.parametrize("name", ["ditto", "phases"])
def test_a_run_that_was_interrupted_is_shown(name):
    run = read(ROOT / "interrupted" / name)
    assert not run.finished and run.records and f"round {len(run.records)} of" in page.build(name, methods([run]))
