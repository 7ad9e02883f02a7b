"""A small advice from a study to a page; an interrupted one ends with the same choice."""

import json
from dataclasses import replace

import pytest

import polysite as ps
from polysite import advice, config, study
from polysite.advice import deliver, tournament
from polysite.advice.exceptions import Confirmation, Promise
from polysite.advice.personal import Choice
from polysite.errors import ConfigError, RunError
from polysite.metrics import shrinkage

SITES = {
    "north": ps.Hospital(cases=6),
    "east": ps.Hospital(cases=6),
    "west": ps.Hospital(cases=6, scanner=11, contrast=2.0),
}
BASE = ps.Study(
    data=ps.Phantom(shape=(24, 24, 24), sites=SITES),
    model=ps.UNet(filters=(2, 2, 2)),
    train=ps.Train(lr=0.5, patch=(8, 8, 8), window=(24, 24, 24), batch=2, device="cpu", augment="none"),
    run=ps.Plan(rounds=2),
    assess=ps.Assess(permutations=99, resamples=100, projections=0),
)


@pytest.fixture
def in_this_process(monkeypatch):
    """Run jobs here instead of in worker processes; ``limit`` interrupts after some of them."""
    done, limit = [], []

    def work(jobs, parallel, step):
        finished = [job for job in jobs if job.done]
        for job in (job for job in jobs if not job.done):
            if limit and len(done) >= limit[0]:
                raise KeyboardInterrupt
            done.append(job.title)
            before = job.first(finished)
            study.train(config.load(job.file), job.run, after=before and before.run, evaluate=False, until=job.until)
            finished.append(job)
        return {}

    for module in (tournament, deliver):
        monkeypatch.setattr(module, "work", work)
    return done, limit


def test_an_advice_ends_with_a_study_and_a_page_and_resumes_to_the_same_choice(tmp_path, in_this_process):
    done, limit = in_this_process
    given = {"trainings": 16, "inner": 2, "only": ["clustered"]}
    found = advice.advise(BASE, tmp_path / "whole", **given)
    own = ["own 0.5 after fedavg", "own 1 after fedavg"]
    assert [c.name for c in found.contenders] == ["fedavg", "clustered", *own]
    cases = {c.name for s in study.deal_cases(BASE).values() for k in ("train", "validation") for c in s[k]}
    tested = {c.name for s in study.deal_cases(BASE).values() for c in s["test"]}
    assert not cases & tested
    for each in found.played.values():  # each case once, none that is tested
        assert {case for _, case in each.scores} == cases or len(each.jobs) == 1
    assert found.gain.cases == len(cases) and set(found.sites) == {*SITES}
    assert set(found.hospitals) == {*SITES}
    assert all(0 <= choice.promise.expected.positive <= 1 for choice in found.hospitals.values())
    advised = config.load(tmp_path / "whole" / "study.toml")
    assert advised.split == replace(BASE.split, validation=0.05, seed=0)
    assert advised.run.rounds == round(found.times * 2) > 2
    study.check(advised)
    page = advice.write_page(found).read_text()
    assert all(site in page for site in SITES) and "no difference shown" in page
    numbers = json.loads((tmp_path / "whole" / "advice.json").read_text())
    assert found.models.members == numbers["trainings of the models"] == 1
    assert config.parse(found.models.run.folder.config).run.rounds == advised.run.rounds
    assert {c for s in found.models.run.result.test.values() for c in s} == tested
    assert numbers["test"]["mean"] == pytest.approx(found.models.run.mean)
    assert found.spent == numbers["trainings"] <= 16 and f"for {found.times:g} times the rounds" in page
    assert advised.train.clip_gradients == 1 and "with gradients clipped to a norm of 1" in page
    assert f'<a href="{numbers["models"]}/">' in page and (tmp_path / "whole" / numbers["models"]).is_dir()
    assert numbers["strategy"] == found.chosen.name and set(numbers["hospitals"]) == {*SITES}

    _check_exceptions(found)

    done.clear()
    limit.append(3)
    with pytest.raises(KeyboardInterrupt):
        advice.advise(BASE, tmp_path / "cut", **given)
    limit.clear()
    again = advice.advise(BASE, tmp_path / "cut", **given)
    assert json.loads((tmp_path / "cut" / "advice.json").read_text()) == numbers
    assert again.final.scores == found.final.scores
    with pytest.raises(RunError, match="began with another budget"):
        advice.advise(BASE, tmp_path / "cut", **{**given, "trainings": 17})


def _check_exceptions(found):
    """Check the texts of an advice in which the second training confirmed something for single hospitals."""
    one = replace(found, chosen=found.contenders[0], hospitals=dict.fromkeys(SITES, Choice()))
    assert one.family == "one model" and not one.claims
    sure = {n: Choice(Promise(n, shrinkage.Gain(0.2, 0.05, 1.0, 5), 0.01), Confirmation(n, found.gain, 0.001, True))
            for n in ("clustered", "own 0.5 after fedavg")}  # fmt: skip
    own = replace(one, hospitals={**one.hospitals, "west": sure["own 0.5 after fedavg"]})
    own = replace(own, studies={"own 0.5 after fedavg": found.study})
    assert own.family == "own" and own.claims and own.alphas == {"west": 0.5}
    assert "west should use a model of its own (study-own-0.5-after-fedavg.toml)." in advice.decision(own)
    apart = replace(one, hospitals={**one.hospitals, "west": sure["clustered"]}, studies={"clustered": found.study})
    assert apart.strategies == {"west": "clustered"} and apart.family == found.contenders[1].family
    assert "west should use another strategy" in advice.decision(apart)
    assert "study-clustered.toml" in advice.write_page(apart).read_text()


def test_a_study_with_phases_is_refused(tmp_path):
    phases = replace(BASE, then=({"algorithm": "fine_tune"},))
    with pytest.raises(ConfigError, match="an advice chooses the phases: leave them out"):
        advice.advise(phases, tmp_path / "out", 20)
    assert not (tmp_path / "out").exists()


def test_a_budget_that_is_too_small_leaves_no_folder_that_would_refuse_another(tmp_path):
    with pytest.raises(ConfigError, match="raise it, or name fewer"):
        advice.advise(BASE, tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()
