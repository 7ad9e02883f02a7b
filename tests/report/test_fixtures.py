"""Run folders, evaluations and assessments of polysite 0.1.0 can still be read, shown and compared."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from polysite.report import page, publish
from polysite.report.runs import methods, read

ROOT = Path(__file__).parents[1] / "fixtures" / "v0.1.0"
EXPECTED = json.loads((ROOT / "expected.json").read_text())
FINISHED = {"phases": ROOT / "phases", "classes": ROOT / "classes", "deployed": ROOT / "deployed" / "finished" / "run"}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_has_the_scores_and_the_records_that_0_1_0_gave_it(name):
    run, expected = read(FINISHED[name]), EXPECTED[name]
    main = "accuracy" if name == "classes" else "dice"
    (method,) = methods([run])
    assert fmean(run.values(main).values()) == pytest.approx(expected["mean"], abs=1e-12)
    assert {s: fmean(method.of(s, main)) for s in run.sites} == pytest.approx(expected["by_site"], abs=1e-12)
    assert (len(run.records), run.best_round) == (expected["rounds"], expected["best_round"])
    assert run.split == "test" and run.finished
    written = map(json.loads, (FINISHED[name] / "rounds.jsonl").read_text().splitlines())
    for record, raw in zip(run.records, written, strict=True):
        assert record.diagnostics == raw.get("told", {}) and record.shares == raw["shares"]
        assert {s: dict(r.numbers) for s, r in record.sites.items()} == {s: r["said"] for s, r in raw["sites"].items()}
        assert record.bytes_up == {s: r["bytes_up"] for s, r in raw["sites"].items()}
        scores = {s: v["score"] for s, v in raw.get("validation", {}).items()}
        assert {s: v.score for s, v in record.validation.items()} == scores


@pytest.mark.parametrize("name", ["phases", "classes"])
def test_its_page_and_a_comparison_are_built(name, tmp_path):
    mean = f"{EXPECTED[name]['mean']:.3f}"
    text = page.build(name, methods([read(FINISHED[name])]))
    assert mean in text and all(site in text for site in EXPECTED[name]["by_site"])
    publish.comparison(tmp_path / "comparison", "Alone", methods([read(FINISHED[name])]), page.Options(scans=False))
    assert mean in (tmp_path / "comparison" / "tables.md").read_text()


@pytest.mark.parametrize("name", ["ditto", "phases"])
def test_a_run_that_was_interrupted_is_shown(name):
    run = read(ROOT / "interrupted" / name)
    assert not run.finished and run.records and f"round {len(run.records)} of" in page.build(name, methods([run]))
