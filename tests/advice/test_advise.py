"""A small advice from a study to a page; an interrupted one ends with the same choice."""

import json
from dataclasses import replace

import pytest

import polysite as ps
from jobs_here import JobsHere
from polysite import advice, config, study
from polysite.advice.deliver import Recipe
from polysite.advice.exceptions import Confirmation, Promise
from polysite.advice.personal import Choice
from polysite.errors import ConfigError, RunError
from polysite.metrics import shrinkage
from studies import SEARCHED, tiny

SITES = {"north": 6, "east": 6, "west": ps.Hospital(cases=6, scanner=11, contrast=2.0)}
ASSESS = ps.Assess(permutations=99, resamples=100, projections=0)
BASE = tiny(SITES, filters=(2, 2, 2), train=SEARCHED, run={"rounds": 2}, assess=ASSESS)


def cases_of(*splits):
    return {c.name for site in study.deal_cases(BASE).values() for split in splits for c in site[split]}


def test_an_advice_ends_with_a_study_and_a_page_and_resumes_to_the_same_choice(tmp_path):
    here = JobsHere(3)
    given = {"trainings": 16, "inner": 2, "only": ["clustered"], "trainer": here}
    with pytest.raises(KeyboardInterrupt):
        advice.advise(BASE, tmp_path / "cut", **given)
    here.limit = 1000
    found = advice.advise(BASE, tmp_path / "whole", **given)
    assert {*found.trained.strategies} == {"fedavg", "clustered", "own 0.5 after fedavg", "own 1 after fedavg"}
    cases, tested = cases_of("train", "validation"), cases_of("test")
    assert not cases & tested
    for each in found.trained.one.values():  # each case once, none that is tested
        assert {case for _, case in each.scores} == cases or len(each.jobs) == 1
    assert found.gain.cases == len(cases) and set(found.sites) == set(found.hospitals) == {*SITES}
    assert all(0 <= choice.promise.expected.positive <= 1 for choice in found.hospitals.values())
    advised = config.load(tmp_path / "whole" / "study.toml")
    assert advised.split == replace(BASE.split, validation=0.05, seed=0)
    assert advised.run.rounds == round(found.effort.times * 2) > 2
    study.check(advised)
    page = advice.write_page(found).read_text()
    assert all(site in page for site in SITES) and "no difference shown" in page
    numbers = json.loads((tmp_path / "whole" / "advice.json").read_text())
    assert found.models.members == numbers["trainings of the models"] == 1
    assert config.parse(found.models.run.folder.config).run.rounds == advised.run.rounds
    assert {c for s in found.models.run.result.test.values() for c in s} == tested
    assert numbers["test"]["mean"] == pytest.approx(found.models.run.mean)
    assert found.trainings == numbers["trainings"] <= 16
    assert f"for {found.effort.times:g} times the rounds" in page
    assert advised.train.clip_gradients == 1 and "with gradients clipped to a norm of 1" in page
    assert f'<a href="{numbers["models"]}/">' in page and (tmp_path / "whole" / numbers["models"]).is_dir()
    assert numbers["strategy"] == found.chosen.name and set(numbers["hospitals"]) == {*SITES}

    _check_exceptions(found)

    again = advice.advise(BASE, tmp_path / "cut", **given)
    assert json.loads((tmp_path / "cut" / "advice.json").read_text()) == numbers
    assert again.final.scores == found.final.scores
    with pytest.raises(RunError, match="began with another budget"):
        advice.advise(BASE, tmp_path / "cut", **{**given, "trainings": 17})


def _check_exceptions(found):
    """Check the texts of an advice in which the second training confirmed something for single hospitals."""
    shared = replace(found.recipe, played=found.trained.one["fedavg"])
    one = replace(found, recipe=shared, hospitals=dict.fromkeys(SITES, Choice()))
    assert one.family == "one model" and not one.claims

    def with_west(name):
        played = found.trained.one[name]
        promise = Promise(played.contender, shrinkage.Gain(0.2, 0.05, 1.0, 5), 0.01)
        west = Choice(promise, Confirmation(found.gain, 0.001, True))
        return replace(one, hospitals={**one.hospitals, "west": west}, exceptions=(Recipe(played, played.study, name),))

    own = with_west("own 0.5 after fedavg")
    assert own.family == "own" and own.claims and own.used("west").share == 0.5
    assert "west should use a model of its own (study-own-0.5-after-fedavg.toml)." in advice.decision(own)
    apart = with_west("clustered")
    assert apart.used("west").name == "clustered" and apart.family == apart.used("west").family
    assert "study-clustered.toml" in advice.write_page(apart).read_text()


@pytest.mark.parametrize(
    ("chosen", "budget", "words"),
    [
        (replace(BASE, then=({"algorithm": "fine_tune"},)), 20, "an advice chooses the phases: leave them out"),
        (BASE, 1, "raise it, or name fewer"),
        (config.vary(BASE, {"run": {"secure": {"use": "on"}}}), 20, "set assess.private.epsilon"),
    ],
)
def test_what_is_refused_leaves_no_folder_that_would_refuse_another(chosen, budget, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        advice.advise(chosen, tmp_path / "out", budget)
    assert not (tmp_path / "out").exists()


def test_an_advice_whose_shared_first_phase_fails_says_so(tmp_path):
    class Full(JobsHere):
        def train(self, jobs):
            return {job.title: "no memory" for job in jobs if job.method == "one model, first phase"}

    with pytest.raises(RunError, match="one model, first phase failed, which all others are compared with: no memory"):
        advice.advise(BASE, tmp_path / "out", 20, inner=2, trainer=Full())
