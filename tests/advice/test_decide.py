"""What a tournament shows: paired differences on hand-made scores."""

import numpy as np
import pytest

import polysite as ps
from polysite.advice.decide import LUCK, Luck, compare, gain_of, mean_of, winner
from polysite.advice.tournament import Played

SITES, CASES, FOLDS = ("a", "b", "c"), 8, 2


SMALL = Luck(LUCK**2, 4.0, FOLDS)


def played(gain, noise=0.01, seed=0, sites=SITES):
    """Return scores around 0.7; ``gain`` is added, by site and fold or everywhere."""
    rng = np.random.default_rng(seed)
    scores, folds = {}, {}
    for site in sites:
        for k in range(CASES):
            key = site, f"{site}{k}"
            folds[key] = k % FOLDS
            more = gain(site, k % FOLDS) if callable(gain) else gain
            scores[key] = 0.7 + 0.1 * np.sin(hash_of(key)) + more + noise * rng.standard_normal()
    return Played(ps.Study(), (), scores, folds)


def hash_of(key):
    return sum(map(ord, key[0] + key[1]))


def test_a_clear_gain_in_every_fold_is_shown():
    scores = {"fedavg": played(0.0, 0), "better": played(0.05), "same": played(0.0, seed=1)}
    found = compare(scores, "fedavg", SMALL)
    better, same = found
    assert better.name == winner(found, "fedavg", scores, SMALL, ["same", "better"])
    assert better.better and not same.better
    assert better.gain.mean == pytest.approx(0.05, abs=0.01) and better.gain.low < better.gain.mean < better.gain.high
    assert better.gain.cases == 24 and set(better.sites) == {*SITES}
    assert np.mean(better.folds) == pytest.approx(better.gain.mean)


def test_a_gain_of_one_fold_alone_is_not_shown():
    lucky = played(lambda site, fold: 0.06 if fold else -0.001, 0.0)
    (found,) = compare({"fedavg": played(0.0, 0), "lucky": lucky}, "fedavg", SMALL)
    assert found.gain.mean > 0.02 and found.folds[0] < 0 < found.folds[1]
    assert not found.better and winner([found], "fedavg", {}, SMALL, ["lucky"]) == "fedavg"


def test_the_simplest_of_strategies_that_cannot_be_told_apart_wins():
    scores = {
        "fedavg": played(0.0, 0),
        "best": played(0.06),
        "near": played(0.055, seed=1),
        "far": played(0.03, seed=2),
    }
    found = compare(scores, "fedavg", SMALL)
    assert [c.name for c in found] == ["best", "near", "far"] and all(c.better for c in found)
    assert winner(found, "fedavg", scores, SMALL, ["far", "near", "best"]) == "near"
    assert winner(found, "fedavg", scores, SMALL, ["far", "best", "near"]) == "best"


def test_a_loss_is_no_gain_whatever_its_p():
    (found,) = compare({"fedavg": played(0.0, 0), "worse": played(-0.05)}, "fedavg", SMALL)
    assert found.p > 0.5 and not found.better and found.gain.high < 0


def test_holm_counts_all_strategies():
    names = {f"s{k}": played(0.004, 0.01, seed=k) for k in range(6)}
    alone = {name: compare({"fedavg": played(0.0, 0), name: p}, "fedavg", SMALL)[0].p for name, p in names.items()}
    together = compare({"fedavg": played(0.0, 0), **names}, "fedavg", SMALL)
    assert all(c.p >= alone[c.name] for c in together)
    smallest = min(alone, key=alone.__getitem__)
    assert next(c.p for c in together if c.name == smallest) == pytest.approx(min(1.0, 6 * alone[smallest]))


def test_intervals_resample_inside_hospitals():
    gains = {("a", f"{k}"): 0.1 for k in range(5)} | {("b", f"{k}"): -0.1 for k in range(5)}
    found = gain_of(gains)
    assert (found.mean, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert str(gain_of({("a", "1"): 0.5, ("a", "2"): 0.5})) == "+0.500 (+0.500 to +0.500)"


def test_an_unlucky_training_shows_in_the_difference_of_two():
    lucky, unlucky = played(0.0, 0), played(-0.06, 0)
    luck = Luck.of(lucky, unlucky)
    assert luck.variance == pytest.approx((2 * LUCK**2 + 2 * 0.06**2 / 2) / 4) and luck.freedom == 4
    (against_one,) = compare({"fedavg": unlucky, "same": played(0.0)}, "fedavg", SMALL)
    both = mean_of(unlucky, lucky)
    (against_both,) = compare({"fedavg": both, "same": played(0.0)}, "fedavg", luck)
    assert against_one.better and not against_both.better
    assert against_both.gain.mean == pytest.approx(0.03, abs=0.005)


def test_luck_is_that_of_the_prior_if_two_trainings_agree():
    same = Luck.of(played(0.0, 0), played(0.0, 0))
    assert same.variance == pytest.approx(LUCK**2 / 2)  # two folds without a difference
