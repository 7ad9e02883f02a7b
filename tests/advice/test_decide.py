"""What a tournament shows: paired differences on hand-made scores."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import polysite as ps
from polysite.advice import decide
from polysite.advice.contenders import Contender
from polysite.advice.decide import candidate, chance, compare, confirmed, differences, gain_of, hopeful, leads, mean_of
from polysite.advice.tournament import Played

SITES, CASES, FOLDS = ("a", "b", "c"), 8, 2


def played(gain, noise=0.01, seed=0, name="fedavg", family="one model"):
    """Return scores around 0.7; ``gain`` is added, by site and fold or everywhere."""
    rng = np.random.default_rng(seed)
    scores, folds = {}, {}
    for site in SITES:
        for k in range(CASES):
            key = site, f"{site}{k}"
            folds[key] = k % FOLDS
            more = gain(site, k % FOLDS) if callable(gain) else gain
            scores[key] = 0.7 + 0.1 * np.sin(sum(map(ord, site + key[1]))) + more + noise * rng.standard_normal()
    share = 1.0 if family == "own" else 0.0
    return Played(Contender(name, name, family, ps.Study(), share=share), (), scores, folds)


def named(**scores):
    """Return strategies by name."""
    return {n: replace(one, contender=replace(one.contender, name=n)) for n, one in scores.items()}


def test_a_strategy_that_looks_better_is_a_candidate_and_needs_a_second_training():
    scores = named(better=played(0.05, family="groups"), same=played(0.0, seed=1))
    better, same = compare(scores.values(), played(0.0, 0))
    assert candidate([better, same], scores) is better
    assert better.looks_better and not better.better and not same.looks_better
    assert better.gain.mean == pytest.approx(0.05, abs=0.01) and better.gain.low < better.gain.mean < better.gain.high
    assert better.gain.cases == 24 and set(better.sites) == {*SITES}
    assert np.mean(better.folds) == pytest.approx(better.gain.mean)
    again = played(0.05, seed=3), played(0.0, 0)
    first = scores["better"], played(0.0, 0)
    sure = confirmed(first, again, 2)
    assert sure.better and sure.twice and sure.contender == first[0].contender
    assert sure.gain.mean == pytest.approx(mean_of(first[0], again[0]).mean - mean_of(first[1], again[1]).mean)
    alone, of_six = (confirmed(first, again, count).p for count in (1, 6))
    assert of_six == pytest.approx(6 * alone)  # the number of strategies counts


def test_a_gain_of_one_fold_alone_is_not_shown_and_a_loss_is_no_gain_whatever_its_p():
    scores = named(lucky=played(lambda site, fold: 0.06 if fold else -0.001, 0.0), worse=played(-0.05))
    found, worse = compare(scores.values(), played(0.0, 0))
    assert worse.p > 0.5 and not worse.looks_better and worse.gain.high < 0
    assert found.gain.mean > 0.02 and found.folds[0] < 0 < found.folds[1]
    assert not found.looks_better and candidate([found], scores) is None


def test_the_simplest_of_strategies_that_cannot_be_told_apart_is_the_candidate():
    kinds = ("groups", "outlier", "near"), ("outlier", "groups", "best"), ("own", "own", "best")  # equally simple
    for one, other, expected in kinds:
        best, near = played(0.06, family=one), played(0.056, seed=1, family=other)
        scores = named(best=best, near=near, far=played(0.03, seed=2, family="patients"))
        found = compare(scores.values(), played(0.0, 0))
        assert [c.contender.name for c in found] == ["best", "near", "far"] and all(c.looks_better for c in found)
        assert candidate(found, scores).contender.name == expected


def test_a_lead_counts_the_luck_of_both_trainings():
    bound = 1.96 * np.sqrt(2 * decide.LUCK**2 / FOLDS)  # without any noise of cases: 0.0137
    reference = played(0.0, 0)
    assert bound == pytest.approx(0.01372) and leads(played(bound + 1e-6, 0), reference)
    assert not leads(played(bound - 1e-6, 0), reference) and not leads(reference, played(bound + 1e-6, 0))
    noisy = played(lambda site, fold: 0.017 + (0.03 if fold else -0.03), 0)
    lead = gain_of(differences(noisy, reference))  # 0.017 with a standard error of 0.006: 1.96 errors are 0.018
    assert lead.low > 0 and lead.mean > bound and not leads(noisy, reference)


def test_intervals_resample_inside_hospitals():
    gains = {("a", f"{k}"): 0.1 for k in range(5)} | {("b", f"{k}"): -0.1 for k in range(5)}
    found = gain_of(gains)
    assert (found.mean, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert str(gain_of({("a", "1"): 0.5, ("a", "2"): 0.5})) == "+0.500 (+0.500 to +0.500)"


def test_luck_of_a_training_is_no_gain_unless_strategy_and_reference_share_it():
    unlucky = played(-0.06, 0)
    (seen,) = compare([played(0.0)], unlucky)
    assert seen.looks_better and seen.gain.mean == pytest.approx(0.06, abs=0.005)
    sure = confirmed((played(0.0), unlucky), (played(0.0, seed=1), played(0.0, 0)), 1)
    assert not sure.better and sure.gain.mean == pytest.approx(0.03, abs=0.005)
    bad, good = (played(-0.04, 0), played(-0.08, 0)), (played(0.04, 0.001), played(0.0, 0))
    assert confirmed(bad, good, 3).better
    lucky = (played(0.04, 0), played(-0.08, 0)), (played(-0.04, 0.001), played(0.0, 0))  # the same mean gain
    assert not confirmed(*lucky, 3).better


def test_chance_by_hand():
    gains = {("a", f"{k}"): 0.02 + 0.001 * (-1) ** k for k in range(8)}
    found, apart = gain_of(gains), (0.01, -0.03)
    luck = (2 * 2 * decide.WHOLE**2 + (0.01**2 + 0.03**2) / 2) / 4 / 4  # over two folds and two seeds
    cases = ((found.high - found.low) / 3.92) ** 2
    freedom = (cases + luck) ** 2 / (cases**2 / 7 + luck**2 / 4)
    expected = stats.t.sf(0.02 / np.sqrt(cases + luck), freedom)
    assert chance(gains, apart) == pytest.approx(expected) and 4 < freedom < 4.2  # nearly all of it is luck


def test_a_strategy_goes_on_if_it_may_help_all_or_one_hospital():
    reference = played(0.0, 0)
    assert hopeful(played(0.01, 0.001), reference)
    assert hopeful(played(lambda site, fold: 0.1 if site == "a" else -0.1), reference)
    assert not hopeful(played(-0.05), reference)
