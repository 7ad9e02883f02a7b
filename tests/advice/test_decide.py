"""What a tournament shows: paired differences on hand-made scores."""

import numpy as np
import pytest
from scipy import stats

import polysite as ps
from polysite.advice import decide
from polysite.advice.decide import candidate, chance, compare, confirmed, differences, gain_of, hopeful, leads
from polysite.advice.tournament import Played

SITES, CASES, FOLDS = ("a", "b", "c"), 8, 2


def played(gain, noise=0.01, seed=0, sites=SITES):
    """Return scores around 0.7; ``gain`` is added, by site and fold or everywhere."""
    rng = np.random.default_rng(seed)
    scores, folds = {}, {}
    for site in sites:
        for k in range(CASES):
            key = site, f"{site}{k}"
            folds[key] = k % FOLDS
            more = gain(site, k % FOLDS) if callable(gain) else gain
            scores[key] = 0.7 + 0.1 * np.sin(sum(map(ord, site + key[1]))) + more + noise * rng.standard_normal()
    return Played(ps.Study(), (), scores, folds)


def test_a_strategy_that_looks_better_is_a_candidate_and_needs_a_second_training():
    scores = {"fedavg": played(0.0, 0), "better": played(0.05), "same": played(0.0, seed=1)}
    better, same = compare(scores, "fedavg")
    assert candidate([better, same], scores, {"same": 0, "better": 1}) is better
    assert better.looks_better and not better.better and not same.looks_better
    assert better.gain.mean == pytest.approx(0.05, abs=0.01) and better.gain.low < better.gain.mean < better.gain.high
    assert better.gain.cases == 24 and set(better.sites) == {*SITES}
    assert np.mean(better.folds) == pytest.approx(better.gain.mean)
    again = played(0.05, seed=3), played(0.0, 0)
    first = scores["better"], scores["fedavg"]
    sure, mine, reference = confirmed("better", first, again, 2)
    assert sure.better and sure.twice and sure.gain.mean == pytest.approx(mine.mean - reference.mean)
    alone, of_six = (confirmed("better", first, again, count)[0].p for count in (1, 6))
    assert of_six == pytest.approx(6 * alone)  # the number of strategies counts


def test_a_gain_of_one_fold_alone_is_not_shown_and_a_loss_is_no_gain_whatever_its_p():
    scores = {"fedavg": played(0.0, 0), "lucky": played(lambda site, fold: 0.06 if fold else -0.001, 0.0)}
    found, worse = compare({**scores, "worse": played(-0.05)}, "fedavg")
    assert worse.p > 0.5 and not worse.looks_better and worse.gain.high < 0
    assert found.gain.mean > 0.02 and found.folds[0] < 0 < found.folds[1]
    assert not found.looks_better and candidate([found], scores, {"lucky": 0}) is None


def test_the_simplest_of_strategies_that_cannot_be_told_apart_is_the_candidate():
    scores = {"fedavg": played(0.0, 0), "best": played(0.06), "near": played(0.056, seed=1)}
    scores |= {"far": played(0.03, seed=2)}
    found = compare(scores, "fedavg")
    assert [c.name for c in found] == ["best", "near", "far"] and all(c.looks_better for c in found)
    assert candidate(found, scores, {"far": 0, "near": 1, "best": 2}).name == "near"
    assert candidate(found, scores, {"far": 0, "best": 1, "near": 2}).name == "best"
    assert candidate(found, scores, {"far": 0, "best": 1, "near": 1}).name == "best"  # equally simple


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
    (seen,) = compare({"fedavg": unlucky, "same": played(0.0)}, "fedavg")
    assert seen.looks_better and seen.gain.mean == pytest.approx(0.06, abs=0.005)
    sure, _, _ = confirmed("same", (played(0.0), unlucky), (played(0.0, seed=1), played(0.0, 0)), 1)
    assert not sure.better and sure.gain.mean == pytest.approx(0.03, abs=0.005)
    bad, good = (played(-0.04, 0), played(-0.08, 0)), (played(0.04, 0.001), played(0.0, 0))
    assert confirmed("tuned", bad, good, 3)[0].better
    lucky = (played(0.04, 0), played(-0.08, 0)), (played(-0.04, 0.001), played(0.0, 0))  # the same mean gain
    assert not confirmed("tuned", *lucky, 3)[0].better


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
