"""Strategies as studies: settings of the study inside them, families, and models that nothing was chosen by."""

from dataclasses import asdict, replace
from json import dumps, loads

import pytest

import polysite as ps
from polysite import config
from polysite.advice.contenders import contenders, unselected
from polysite.advice.stages import comparing
from polysite.algorithms import name_of
from polysite.errors import ConfigError
from polysite.heterogeneity.verdict import GROUP, ONE, OWN, Strategy, Verdict

FEDAVG, PROX = {"name": "fedavg"}, {"name": "fedprox"}
ADAM = {**FEDAVG, "server": {"name": "adam", "lr": 0.03}}
GROUPS = {"g": ["north", "east"], "h": ["south", "west"]}
ONE_APART = {"g": ["north", "east", "south"], "h": ["west"]}


def strategy(name, algorithm, goal=ONE):
    return Strategy(name, name, goal, ("because",), None, {"algorithm": algorithm})


VERDICT = Verdict(
    "they differ",
    (),
    (
        strategy("weighted", {"name": "weighted", "weights": {"west": 0.3}, "inner": FEDAVG}),
        strategy("clustered", {"name": "clustered", "groups": GROUPS, "inner": FEDAVG}, GROUP),
        strategy("clustered-emd", {"name": "clustered", "groups": ONE_APART, "inner": FEDAVG}, GROUP),
        strategy("fedavg", FEDAVG),
        strategy("fedprox", PROX),
        strategy("uniform", {**FEDAVG, "uniform": True}),
        strategy("local", {"name": "local"}, OWN),
    ),
    (),
)


STUDY = config.vary(ps.Study(run=ps.Plan(rounds=30)), {"algorithm": ADAM})


def test_strategies_keep_their_kind_and_take_the_settings_of_the_study():
    found = {c.name: c for c in contenders(VERDICT, STUDY, cases=40)}
    assert [(name, each.family) for name, each in found.items()] == [
        ("fedavg", "one model"), ("weighted", "outlier"), ("clustered", "groups"), ("clustered-emd", "outlier"),
        ("uniform", "one model"), ("local", "alone"), ("patients", "patients"),
    ]  # fmt: skip
    weighted = found["weighted"].study.algorithm
    assert weighted.weights == {"west": 0.3} and weighted.inner.server.lr == 0.03
    shared, grouped = config.phases(found["clustered"].study)
    assert name_of(shared.algorithm) == name_of(grouped.algorithm.inner) == "fedadam"
    assert name_of(grouped.algorithm) == "clustered"
    uniform = found["uniform"].study.algorithm
    assert uniform.uniform and uniform.server.lr == 0.03
    assert name_of(found["local"].study.algorithm) == "local"
    phases = config.phases(found["patients"].study)
    assert [name_of(p.algorithm) for p in phases] == ["fedadam", "cfft"]


def test_all_strategies_have_the_same_rounds_and_rates_and_most_share_the_first_phase():
    found = contenders(VERDICT, STUDY, cases=40)
    for each in found:
        first, last = config.phases(each.study)
        tuned = last.algorithm.rounds if each.name == "patients" else last.run.rounds
        assert (first.run.rounds, tuned, last.train.lr) == (30, 6, first.train.lr / 2)
        assert config.is_beginning(STUDY, of=each.study) == (each.start is not None)
    assert {c.name for c in found if not c.start} == {"weighted", "uniform", "local"}
    assert [c.trainings for c in found[:3]] == [0.2, 1.2, 0.2]


def test_few_cases_have_no_clusters_and_only_keeps_the_reference():
    assert "patients" not in {c.name for c in contenders(VERDICT, STUDY, cases=10)}
    assert [c.name for c in contenders(VERDICT, STUDY, 40, ["local"])] == ["fedavg", "local"]


def test_nothing_is_chosen_by_validation_cases():
    patients = contenders(VERDICT, STUDY, 40, ["patients"])[1].study
    first, second = config.phases(unselected(patients))
    for phase in (first, second):
        assert (phase.run.validate_every, phase.run.best_from) == (phase.run.rounds, 1)
    assert not second.algorithm.choose and second.algorithm.rounds == 6
    assert unselected(unselected(patients)) == unselected(patients)


def test_the_budget_covers_the_strategies_and_the_models():
    efforts = [0.2, 1.2, 0.2, 0.2]  # with the first phase 2.8, own models 0.8, second trainings 3.6, on each fold
    compared = 8.4 + 2.4 + 10.8
    assert comparing(None, efforts, 3) == comparing(24, efforts, 3) == comparing(999, efforts, 3)
    assert comparing(compared + 1.8, efforts, 3) == pytest.approx(compared)  # one training on all cases
    with pytest.raises(ConfigError, match=r"4 strategies on 3 inner folds, .* take 23.4: raise it, or name fewer"):
        comparing(23.3, efforts, 3)


def test_a_verdict_is_read_back_from_json():
    given = replace(VERDICT, cautions=("few",))
    assert Verdict.of(loads(dumps(asdict(given)))) == given
