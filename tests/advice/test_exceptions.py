"""Hospitals that use something else than the strategy for all: hand-made scores of two trainings."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest
from scipy import stats

from advice.test_decide import played
from polysite.advice.decide import PRIOR, RATE
from polysite.advice.exceptions import LUCK, Promise, chance, confirm, promises, repeated
from polysite.advice.personal import Trainings, choose
from polysite.advice.tournament import Played, Runs
from polysite.metrics import shrinkage

OWN = "own 1 after fedavg"
FAMILIES = {"fedavg": "one model", "clustered": "groups", OWN: "own", "patients": "patients"}
ISLAND = {"c": 0.2}  # gain at hospital c alone


def gains(at, seed, noise=0.02, name="x", family=""):
    """Return scores of a strategy with a gain at some hospitals."""
    return played(lambda site, fold: at.get(site, 0.0), noise, seed, name, family or FAMILIES.get(name, "one model"))


@dataclass
class Known(Trainings):
    """Trainings whose second scores are known beforehand; ``asked`` are those that were trained again."""

    second: dict[str, Played] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def again(self, *wanted):
        self.asked += [each.name for each in wanted if each.name not in self.two]
        self.two |= {each.name: self.second[each.name] for each in wanted}

    def chosen(self, shared="fedavg"):
        return choose(self, self.one[shared].contender)


def trainings(first, second):
    """Return two trainings of FedAvg, groups and own models; ``first`` and ``second`` are the gains of own models."""
    one = [played(0.0, 0.01, 1), gains({}, 2, name="clustered"), gains(first, 3, name=OWN)]
    two = [played(0.0, 0.01, 4), gains({}, 5, name="clustered"), gains(second, 6, name=OWN)]
    one, two = ({each.contender.name: each for each in listed} for listed in (one, two))
    reference = one["fedavg"].contender
    return Known(Runs(Path(), 2, None), replace(reference, name="given"), reference, one, second=two)


def test_a_hospital_that_gains_much_in_both_trainings_gets_its_own_model():
    trained = trainings(ISLAND, ISLAND)
    choices = trained.chosen()
    assert {site: choice.used.name for site, choice in choices.items() if choice.used} == {"c": OWN}
    assert trained.asked == ["fedavg", OWN]
    both = trained.both(OWN).scores
    assert both == pytest.approx({k: (x + trained.two[OWN].scores[k]) / 2 for k, x in trained.one[OWN].scores.items()})
    found = choices["c"].confirmation
    assert found.gain.mean == pytest.approx(0.2, abs=0.02) and found.p <= RATE
    trained = trainings(ISLAND, {})  # the second one does not show the gain
    choices = trained.chosen()
    assert trained.asked == ["fedavg", OWN] and choices["c"].promise.promising
    assert not choices["c"].used and choices["c"].confirmation.p > RATE


def test_a_loss_in_the_second_training_is_never_used_and_all_hospitals_and_strategies_count():
    one, two = (gains(ISLAND, 1, 0.001), played(0.0, 0)), (gains({"c": -0.001}, 2, 0.0), played(0.0, 0))
    assert not confirm("c", one, two, 1).steady
    one, two = ((gains({"c": 0.03}, s), played(0.0, 0)) for s in (1, 2))
    alone, of_ten = (confirm("c", one, two, count).p for count in (1, 10))
    assert of_ten == pytest.approx(10 * alone)


def test_equal_scores_claim_nothing_and_train_nothing_again():
    trained = trainings({}, {})
    same = trained.one["fedavg"]
    trained.one = {name: replace(each, scores=same.scores) for name, each in trained.one.items()}
    assert not any(choice.used for choice in trained.chosen().values()) and not trained.asked
    found = confirm("a", (same, same), (same, same), 1)
    assert not found.better and found.p == pytest.approx(0.5)


def test_own_models_may_be_left_out_and_a_strategy_that_ended_early_is_no_candidate():
    trained = trainings(*[{"a": 0.2, "b": 0.2, "c": -0.2}] * 2)
    del trained.one["clustered"]  # equals FedAvg up to noise
    used = {site: choice.used.name for site, choice in trained.chosen(OWN).items() if choice.used}
    assert used == {"c": "fedavg"}
    trained, best = trainings({}, {}), gains({"a": 0.3, "b": 0.3, "c": 0.3}, 7, name="clustered")
    trained.one["clustered"] = replace(best, scores={k: v for k, v in best.scores.items() if best.folds[k] == 0})
    assert all(choice.promise.contender.name == OWN for choice in trained.chosen().values())


def test_chance_by_hand():
    values, apart = [0.05, 0.07, 0.06, 0.02], (0.01, -0.03)
    everywhere = [apart, (0.0, 0.02)]
    usual = (PRIOR * 2 * LUCK**2 + (0.01**2 + 0.03**2 + 0.02**2) / 2) / (PRIOR + 4)
    luck = (PRIOR * usual + (0.01**2 + 0.03**2) / 2) / (PRIOR + 2) / 4
    cases = variance(values) / 4
    freedom = (cases + luck) ** 2 / (cases**2 / 3 + luck**2 / (PRIOR + 2))
    expected = stats.t.sf(fmean(values) / np.sqrt(cases + luck), freedom)
    assert chance(values, apart, everywhere) == pytest.approx(expected)
    assert chance([0.5], (0.0,), [(0.0,)]) == 1.0


def test_the_highest_expected_gain_is_promised():
    shared = played(0.0, 0)
    others = gains({"a": 0.05}, 1), gains({"a": 0.15, "b": -0.1}, 2, name="more", family="outlier")
    found = promises(others, shared, 2, 6)
    assert found["a"].contender.name == "more" and found["b"].contender.name == "x" and found["a"].promising
    others = gains(ISLAND, 1, 0.001, "sure", "patients"), gains({"c": 0.2}, 2, 0.5)  # the simpler one is not promising
    found = promises(others, shared, 2, 6)
    assert found["c"].contender.name == "sure" and found["c"].promising


def test_the_simplest_of_what_cannot_be_told_apart_at_a_hospital_is_promised():
    bound = 1.96 * np.sqrt(2 * LUCK**2 / 2)  # of equal leads at all cases: 0.0274
    shared, base = played(0.0, 0), gains(ISLAND, 1, name="apart", family="outlier")
    cases = ((bound - 1e-6, 0, "apart"), (bound + 1e-6, 0, "patients"), (bound + 1e-6, 0.05, "apart"))
    for more, noise, expected in cases:  # noise of +-0.05 over eight cases: a bound of 0.046
        at = {key: more + noise * (-1) ** fold if key[0] == "c" else 0.0 for key, fold in base.folds.items()}
        lead = {key: score + at[key] for key, score in base.scores.items()}
        for family, wanted in (("patients", expected), ("outlier", "patients")):  # and of equally simple ones, the best
            leader = Played(replace(base.contender, name="patients", family=family), (), lead, base.folds)
            found = promises([leader, base], shared, 2, 6)
            assert found["c"].contender.name == wanted and found["c"].promising


def test_an_outlier_trains_apart_though_a_cluster_of_its_patients_scores_a_little_higher():
    trained = trainings({}, {})
    for known, seed in ((trained.one, 7), (trained.second, 9)):
        known["clustered"] = gains(ISLAND, seed, name="clustered", family="outlier")
        known["patients"] = gains({"c": 0.21}, seed + 1, name="patients")
    assert trained.chosen()["c"].used.name == "clustered" and trained.asked == ["fedavg", "clustered"]


def test_nothing_is_trained_again_that_a_second_training_like_the_first_would_not_confirm():
    values = [0.05, 0.07, 0.06, 0.02]
    cases, luck = variance(values) / 4, LUCK**2 / 2  # l^2 = 2 LUCK^2, over two trainings and two folds
    freedom = (cases + luck) ** 2 / (cases**2 / 3 + luck**2 / (PRIOR + 2))
    expected = 3 * stats.t.sf(fmean(values) / np.sqrt(cases + luck), freedom)
    assert repeated(values, 2, 3) == pytest.approx(expected) and repeated(values, 2, 10**6) == 1.0
    sure = Promise(played(0.0).contender, shrinkage.Gain(0.05, 0.01, 0.99, 8), RATE)
    assert sure.promising and not replace(sure, p=RATE + 1e-9).promising
    trained = trainings({"c": 0.05}, {"c": 0.05})
    few, many = (promises([trained.one[OWN]], trained.one["fedavg"], 2, count)["c"] for count in (1, 1000))
    assert few.promising and not many.promising and few.expected == many.expected
