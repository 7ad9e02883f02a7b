"""What an advice costs and delivers: steps that were spent, trainings of the advised study."""

import shutil
from dataclasses import replace

import pytest

import polysite as ps
from jobs_here import JobsHere
from polysite import config, study
from polysite.advice import deliver
from polysite.advice.contenders import Contender, last_phase, unselected
from polysite.advice.deliver import Recipe
from polysite.advice.tournament import Played, Runs
from polysite.benchmark.jobs import inner_jobs
from studies import SEARCHED, clinics, tiny

TRAIN = {**SEARCHED, "patch": (16, 16, 16)}
BASE = study.with_fixed_cases(tiny(clinics("east", "west", cases=6), filters=(2, 2, 2), train=TRAIN, run={"rounds": 5}))


def recipe(chosen):
    """Return what is delivered of a study, before that is decided."""
    return Recipe(Played(Contender("x", "x", "one model", chosen), (), {}, {}), chosen)


def test_phases_that_runs_share_are_spent_once(tmp_path):
    """Five rounds of 2 x 2 steps on each inner fold (2 or 3 training cases, batches of 2), and one round more."""
    one = inner_jobs(tmp_path, {"one": unselected(BASE)}, 2)["one"]
    last = [replace(j, method="both", study=replace(j.study, then=(last_phase(BASE),))) for j in one]
    steps = deliver.steps_of(one[0].study)
    assert steps == 5 * sum(-(-len(splits["train"]) // 2) for splits in study.deal_cases(one[0].study).values())
    more = deliver.steps_of(last[0].study) - steps
    assert more * 5 == steps  # a fifth of the rounds
    first, second = (Played(recipe(BASE).played.contender, tuple(runs), {}, {}) for runs in (one, last))
    assert deliver.steps_spent([first]) == 2 * steps
    assert deliver.steps_spent([first, second]) == 2 * (steps + more)
    assert deliver.steps_spent([second]) == 2 * (steps + more)  # nothing to take over


def test_what_is_left_of_the_budget_trains_the_advised_study_longer_then_again():
    compared = replace(unselected(BASE), then=(last_phase(BASE),))
    short = deliver.watched(compared, BASE)
    whole = deliver.steps_of(short)
    for left, times, members in ((0.4 * whole, 1, 1), (4 * whole, 4, 1), (33 * whole, 16, 2), (99 * whole, 16, 5)):
        (wanted,), effort = deliver.to_train([recipe(compared)], BASE, left)
        assert (effort.times, effort.members) == (times, members)
        assert deliver.steps_of(wanted.study) == times * whole
    (wanted,), effort = deliver.to_train([recipe(compared)], BASE, None)
    assert wanted.study == short and effort == deliver.Effort(1.0, 0)
    assert deliver.longer(short, 1.0) == short
    clusters = {"algorithm": {"name": "cfft", "components": 2, "rounds": 1}, "run": {"rounds": 61}}
    grouped = config.vary(compared, {"then": [clusters]})
    assert deliver.to_train([recipe(grouped)], BASE, 99 * whole)[1].members == 1  # they cannot be averaged
    once = deliver.watched(config.vary(compared, {"run": {"patience": 1}}), BASE)
    assert once.run.patience is None

    first, last = config.phases(deliver.longer(short, 4.0))
    assert (first.run.rounds, last.run.rounds) == (20, 4) and first.split.validation == 0.05
    assert (first.run.best_from, last.run.best_from) == (18, 1) and last.run.validate_every == 4  # serves its last
    assert first.train.clip_gradients == last.train.clip_gradients == 1 and short.train.clip_gradients == 0
    mine = config.vary(short, {"train": {"clip_gradients": 12.0}})
    private = config.vary(short, {"train": {"private": {"unit": "patient"}}})  # clips by itself
    assert [deliver.longer(each, 4.0).train.clip_gradients for each in (mine, private)] == [12.0, 0.0]
    assert first.train.gamma**first.run.rounds == pytest.approx(BASE.train.gamma**5)
    assert last.train.lr * last.train.gamma ** (last.run.rounds - 1) == pytest.approx(0.25 * 0.04)  # of the last round
    assert deliver.longer(short, 16.0).run.validate_every == 2  # 40 validations


def test_the_advised_study_is_trained_once_or_several_times_and_what_fails_is_left_out(tmp_path):
    short, here = replace(BASE, run=ps.Plan(rounds=1)), JobsHere()

    def trained(folder, members):
        (found,) = deliver.train([recipe(short)], members, Runs(tmp_path / folder, 2, here))
        return found.delivered

    for folder, members in (("one", 1), ("two", 2)):
        found = trained(folder, members)
        assert found.members == members and found.run.folder.path == tmp_path / folder / "models"
        assert trained(folder, members).run.result == found.run.result  # continued: nothing to do
    assert (tmp_path / "one" / "models" / "evaluation" / "test").is_dir()
    (tmp_path / "two" / "models" / "result.json").unlink()  # interrupted: made anew from its members
    shutil.rmtree(tmp_path / "two" / "models" / "checkpoints")
    assert trained("two", 2).run.result == found.run.result
    here.failing.add(2)
    assert trained("three", 3).members == 2 and here.said[-1].endswith("failed and is left out: no memory")
    here.failing.add(0)
    assert trained("four", 1) is None
