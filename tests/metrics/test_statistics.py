"""Tests, effects, intervals, correlations and fairness against SciPy, statsmodels, NumPy and the definition."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, pearsonr, spearmanr, wilcoxon
from statsmodels.stats.multitest import multipletests

from polysite.errors import ConfigError, DataError
from polysite.metrics import statistics
from polysite.metrics.correlation import correlation
from polysite.metrics.correlation import interval as spread_of_pairs
from polysite.metrics.fairness import Fairness, fairness
from polysite.metrics.statistics import holm, interval, rank_biserial, signed_rank, wins

TAILS = ("two-sided", "greater", "less")
whole = st.lists(st.integers(-6, 6), min_size=1, max_size=9)
real = st.lists(st.floats(-1, 1).filter(lambda x: abs(x) > 1e-6), min_size=1, max_size=40, unique_by=abs)


@pytest.mark.parametrize("p", [[0.02, 0.01, 0.9, 0.01, 0.2], [0.3], np.random.default_rng(0).random(40) ** 4], ids=len)
def test_holm_is_that_of_statsmodels(p):
    np.testing.assert_allclose(holm(np.array(p)), multipletests(p, method="holm")[1], atol=1e-12)


@settings(deadline=None)
@given(real, st.sampled_from(TAILS))
def test_signed_rank_is_exact_for_few_without_ties(differences, tail):
    expected = wilcoxon(differences, alternative=tail, method="exact").pvalue
    assert signed_rank(differences, tail) == pytest.approx(expected)
    assert signed_rank([*differences, 0.0, 0.0], tail) == signed_rank(differences, tail)


@settings(deadline=None, max_examples=40)
@given(whole)
def test_signed_rank_of_few_with_ties_tries_all_signs(differences):
    some = np.array([d for d in differences if d])
    if not some.size:
        assert signed_rank(differences) == 1
        return
    size = np.abs(some)
    ranks = np.array([(size < s).sum() + ((size == s).sum() + 1) / 2 for s in size])
    sums = np.array([ranks[np.array(signs) > 0].sum() for signs in product((-1, 1), repeat=some.size)])
    expected = (sums >= ranks[some > 0].sum() - 1e-9).mean()
    assert signed_rank(differences, "greater") == pytest.approx(expected)


def test_signed_rank_of_many():
    x = np.random.default_rng(0).normal(0.2, 1, 200).round(1)
    for tail in TAILS:
        assert signed_rank(x, tail) == wilcoxon(x[x != 0], alternative=tail, method="asymptotic").pvalue
    assert signed_rank(x, "greater") < 0.05 < signed_rank(x, "less")


@given(st.one_of(whole, real))
def test_rank_biserial(differences):
    d = np.array([x for x in differences if x], float)
    ranks = [(np.abs(d) < abs(x)).sum() + ((np.abs(d) == abs(x)).sum() + 1) / 2 for x in d]
    up = sum(r for r, x in zip(ranks, d, strict=True) if x > 0)
    assert rank_biserial(differences) == pytest.approx((2 * up - sum(ranks)) / sum(ranks) if len(d) else 0, abs=1e-12)
    assert rank_biserial(np.negative(differences)) == pytest.approx(-rank_biserial(differences), abs=1e-12)


@given(st.lists(st.integers(-4, 4), max_size=20), st.integers(0, 3))
def test_wins(differences, margin):
    expected = [sum(x > margin for x in differences), sum(x < -margin for x in differences)]
    assert wins(differences, margin) == (expected[0], len(differences) - sum(expected), expected[1])


def test_interval_is_that_of_scipy_but_for_its_scale():
    x = np.random.default_rng(0).gamma(1, 1, 60)
    found = np.array(interval(x, draws=40_000))
    usual = bootstrap((x,), np.mean, method="percentile", n_resamples=40_000, rng=0).confidence_interval
    np.testing.assert_allclose((found - x.mean()) / np.sqrt(60 / 59), np.array(usual) - x.mean(), atol=0.006)
    assert found[0] < x.mean() < found[1]
    narrow = interval(x, level=0.5)
    assert found[0] < narrow[0] < narrow[1] < found[1]


def test_interval_resamples_within_groups(monkeypatch):
    """Hospitals that differ a lot, cases of one that do not: the interval is as narrow as the cases are alike."""
    rng = np.random.default_rng(0)
    x, groups = rng.normal(0, 0.01, 30), np.repeat(["a", "b", "c"], 10)
    x[groups == "b"] += 5
    low, high = interval(x, groups)
    expected = np.sqrt(sum(x[groups == g].var(ddof=1) * 10 for g in "abc")) / 30
    assert high - low == pytest.approx(2 * 1.96 * expected, rel=0.05)
    assert interval(x)[1] - interval(x)[0] > 100 * (high - low)
    assert interval([1.0, 2.0], ["a", "b"]) == (1.5, 1.5)
    assert interval(x, groups) == (low, high) != interval(x, groups, seed=1)
    monkeypatch.setattr(statistics, "CHUNK", 64)
    assert interval(x, groups) == (low, high)  # in small pieces, too


def test_refused():
    for test in (signed_rank, rank_biserial, wins, interval):
        with pytest.raises(DataError, match="1 of 2 differences are not finite"):
            test([1.0, math.nan])
    for values, groups, said in (([1.0, 2.0], ["a"], "2 differences in 1"), ([], None, "at least one")):
        with pytest.raises(DataError, match=said):
            interval(values, groups)
    with pytest.raises(ConfigError, match="level"):
        interval([1.0], level=1.0)


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=15), rng.integers(0, 5, 15).astype(float)  # with ties
    assert correlation(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert correlation(x, y, "spearman") == pytest.approx(spearmanr(x, y).statistic)


def test_without_variation_or_with_two_units_there_is_no_correlation():
    assert math.isnan(correlation([1, 2, 3], [2, 2, 2])) and math.isnan(correlation([1, 2], [1, 2]))
    assert all(map(math.isnan, spread_of_pairs([1, 1, 1, 1], [1, 2, 3, 4])))


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_the_interval_of_a_correlation_is_that_of_scipy(kind):
    """SciPy resamples pairs too; 2,000 resamples of each agree to their own error."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=16)
    y = x + rng.normal(size=16)
    ours = spread_of_pairs(x, y, kind, draws=2000)
    theirs = bootstrap(
        (x, y), lambda a, b: correlation(a, b, kind), paired=True, vectorized=False, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(4),
    ).confidence_interval  # fmt: skip
    assert ours == pytest.approx(tuple(theirs), abs=0.05)
    assert spread_of_pairs(range(14), range(14), kind) == (
        pytest.approx(1),
        pytest.approx(1),
    )  # of a line, a point


means = st.dictionaries(st.text(min_size=1), st.floats(0, 400), min_size=1, max_size=8)


@given(means, st.sampled_from([1, -1]))
def test_fairness_against_numpy(means, better):
    found, x = fairness(means, better), np.array(list(means.values()))
    low, high = (x.min(), x.max()) if better == 1 else (x.max(), x.min())
    assert found.worst[1] == low == means[found.worst[0]] and found.best[1] == high == means[found.best[0]]
    assert found.spread == np.ptp(x) and found.mean == pytest.approx(x.mean())
    assert found.std == pytest.approx(np.std(x, ddof=1) if len(x) > 1 else 0, abs=1e-9)
    assert 1 / len(x) - 1e-9 <= found.jain <= 1 + 1e-9


def test_fairness_by_hand():
    assert fairness({"a": 0.0, "b": 1.0}) == Fairness(("a", 0.0), ("b", 1.0), 0.5, 1.0, math.sqrt(0.5), 0.5)
    assert fairness({"a": 0.0, "b": 0.0}).jain == 1 and fairness({"a": 2.0}).std == 0
    assert fairness({"a": 3.0, "b": 9.0}, better=-1).worst == ("b", 9.0)


def test_means_that_are_refused():
    with pytest.raises(DataError, match="north has the mean score nan"):
        fairness({"south": 1.0, "north": math.nan})
    with pytest.raises(DataError, match="at least one"):
        fairness({})
