"""A small search: its plan, its choice, its resumption, and that test cases are never used."""

import csv
import json
from dataclasses import replace
from itertools import pairwise

import pytest

import polysite as ps
from jobs_here import JobsHere
from polysite import config, study
from polysite.benchmark.jobs import inner_jobs
from polysite.benchmark.scores import last_scores
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, Paused, RunError
from polysite.tuning import budget, load, plan, tables, tune, write_page
from polysite.tuning.budgets import DEFAULT
from polysite.tuning.halving import affordable, cost, rungs, survivors
from polysite.tuning.search import Row, Tuned
from polysite.tuning.space import Candidate
from studies import SEARCHED, tiny

BASE = tiny({"east": 5, "west": 6}, filters=(2, 2, 2), train=SEARCHED, run={"rounds": 9})


def test_rungs_end_with_a_whole_training_and_fewer_candidates_and_a_budget_is_used_and_kept():
    for count in (1, 2, 3, 7, 10, 40, 200):
        made = rungs(count, 0.01)
        assert made[0].candidates == count and made[-1].share == 1 and cost(made) <= count + 1
        for a, b in pairwise(made):
            assert b.candidates <= a.candidates // 3 and b.share == pytest.approx(3 * a.share)
    for trainings in (1, 2.5, 10, 60):
        count = affordable(trainings, 1000, 0.01)
        assert cost(rungs(count, 0.01)) <= trainings < cost(rungs(count + 1, 0.01))
    # the reference always goes on
    assert survivors({"ref": 0.1, "a": 0.3, "b": 0.2}, 1, "ref") == ["a", "ref"]
    assert survivors({"ref": 0.4, "a": 0.3, "b": 0.2}, 2, "ref") == ["ref", "a"]


def test_a_run_pauses_where_it_should_and_ends_as_without_a_pause(tmp_path):
    short = replace(BASE, run=ps.Plan(rounds=4))
    whole = study.train(short, tmp_path / "whole", evaluate=False)
    with pytest.raises(Paused):
        study.train(short, tmp_path / "parts", evaluate=False, until=2)
    for until in (2, 3):
        with pytest.raises(Paused):
            study.resume(tmp_path / "parts", evaluate=False, until=until)
    records = (tmp_path / "parts" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(r)["round"] for r in records] == [0, 1, 2]
    assert study.resume(tmp_path / "parts", evaluate=False).result == whole.result


def test_a_study_that_is_validated_once_is_scored_where_it_pauses_and_serves_its_last_model(tmp_path):
    short = replace(BASE, run=ps.Plan(rounds=5, validate_every=5))
    whole, parts = (inner_jobs(tmp_path / name, {"one": short}, 2)["one"][0] for name in ("whole", "parts"))
    done, rung = study.train(whole.study, whole.run, evaluate=False), parts.paused(1 / 3)
    with pytest.raises(Paused):
        study.train(parts.study, parts.run, evaluate=False, until=rung.until)
    assert [bool(r.validation) for r in RunFolder(parts.run).records()] == [False, True]
    assert last_scores(rung) and not last_scores(whole.paused(1 / 3))
    assert study.resume(parts.run, evaluate=False).result == done.result and done.result.best_round == 4
    assert last_scores(parts) == last_scores(whole)  # the end alone, not the mean with the rung


def test_inner_folds_validate_every_case_that_is_not_tested_once():
    outer = replace(BASE.split, folds=3, fold=1)
    tested = {c.name for s in study.deal_cases(replace(BASE, split=outer)).values() for c in s["test"]}
    seen = []
    for fold in range(3):
        dealt = study.deal_cases(replace(BASE, split=replace(outer, inner=3, inner_fold=fold)))
        assert all(not splits["test"] for splits in dealt.values())
        here = [c.name for splits in dealt.values() for c in splits["validation"]]
        rest = {c.name for splits in dealt.values() for c in splits["train"]}
        assert not rest & ({*here} | tested)
        seen += here
    everyone = {c.name for refs in BASE.data.case_refs(0).values() for c in refs}
    assert sorted(seen) == sorted(everyone - tested)


def test_a_search_chooses_and_resumes_to_the_same_choice(tmp_path):
    states, here = [], JobsHere()
    space = load(methods=["fedprox"])
    planned = plan(BASE, space, 8, inner=2)
    assert len(planned.candidates) == 6 and [r.candidates for r in planned.rungs] == [6, 2]
    found = tune(planned, tmp_path / "whole", trainer=here, seen=states.append)
    assert [(each.rung, each.finished) for each in states] == [(1, False), (2, True)] and states[-1] is found
    assert found.best.share == 1 and found.reference.share == 1
    assert found.best.score == max(row.score for row in found.rows if row.share == 1)
    spent = sum(job.until or 9 for job in here.began) / 9
    assert spent <= planned.trainings + 2 / 3  # a run that goes on is counted twice up to its pause
    page = write_page(found).read_text()
    assert found.best.candidate.name in page and (tmp_path / "whole" / "figures" / "rungs.svg").exists()
    best = config.load(tmp_path / "whole" / "best.toml")
    assert best.split == BASE.split and best.train == found.study.train
    rows = list(csv.DictReader((tmp_path / "whole" / "candidates.csv").read_text().splitlines()))
    assert len(rows) == 6 and {"east", "west"} <= rows[0].keys()

    here.limit = len(here.began) + 5
    with pytest.raises(KeyboardInterrupt):
        tune(planned, tmp_path / "cut", trainer=here)
    here.limit = 1000
    again = tune(planned, tmp_path / "cut", trainer=here)
    assert [(r.candidate, r.score) for r in again.rows] == [(r.candidate, r.score) for r in found.rows]
    with pytest.raises(RunError, match="began with another budget"):
        tune(plan(BASE, space, 9, inner=2), tmp_path / "cut", trainer=here)


def test_a_candidate_that_diverges_is_left_behind(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text("[search]\n'train.lr' = [1e30]\n[methods.fedavg]\nalgorithm = 'fedavg'\n")
    found = tune(plan(BASE, load(file), 5, inner=2), tmp_path / "out", trainer=JobsHere())
    lost = [row for row in found.rows if row.failed]
    assert len(lost) == 1 and "diverged" in lost[0].failed and found.best is found.reference


def test_budgets_are_whole_trainings_of_the_reference():
    space = load(methods=["fedprox"])
    assert budget(BASE, space) == DEFAULT and budget(BASE, space, 4) == 4
    with pytest.raises(ConfigError, match="given as trainings and as hours"):
        budget(BASE, space, trainings=1, hours=3)
    with pytest.raises(ConfigError, match="more than zero hours"):
        budget(BASE, space, hours=0)
    with pytest.raises(ConfigError, match="takes 4: name fewer methods, or raise the budget"):
        plan(BASE, space, 1, inner=2)


def test_of_many_hospitals_the_table_has_the_lowest_and_the_highest(tmp_path):
    sites, scores = {f"hospital {k:02}": 0.5 + 0.01 * k for k in range(23)}, [0.9 - 0.01 * k for k in range(13)]
    rows = [Row(str(k), Candidate(f"method{k}", {}), 1.0, x, sites, ((1.0, x),)) for k, x in enumerate(scores)]
    many = Tuned(tmp_path, tuple(rows), rows[-1], BASE, 1, 1)
    assert tables.table(many).head[3:] == ("lowest hospital", "highest hospital")
    assert [c.text for c in tables.table(many).lines[0].cells[3:]] == ["0.500", "0.720"]
