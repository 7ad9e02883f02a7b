"""Distances between sorted lists, against SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from polysite.heterogeneity import significance
from polysite.heterogeneity.distances import (
    Weights,
    earth_movers,
    earth_movers_of,
    energy,
    merged,
    shift,
    slices,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)
lists = arrays(np.float64, st.integers(1, 30), elements=numbers)


def one_pair(statistic, a, b):
    z, weights, _ = merged(np.sort(a)[None], np.sort(b)[None])
    return statistic(z, Weights(weights[:, None])).item()


@given(lists, lists)
def test_earth_movers_distance_is_scipys(a, b):
    """From the quantiles of up to 256 cases it is exact, in both forms."""
    expected = stats.wasserstein_distance(a, b)
    laws = [slices(x, 256)[None] for x in (a, b)]
    assert earth_movers(laws)[0, 0, 1] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert one_pair(earth_movers_of, a, b) == pytest.approx(expected, rel=1e-9, abs=1e-6)


longer = arrays(np.float64, st.integers(1, 90), elements=numbers)


@given(longer, longer, st.integers(2, 40))
def test_cut_lists_keep_the_stated_bound(a, b, levels):
    """Cutting to ``levels`` quantiles changes it by at most (range + range) / (2 levels), ranges of cut lists only."""
    cut = [slices(x, levels) for x in (a, b)]
    assert [len(c) for c in cut] == [min(len(a), levels), min(len(b), levels)]
    assert all((np.diff(c) >= 0).all() for c in cut)
    off = abs(earth_movers([c[None] for c in cut])[0, 0, 1] - stats.wasserstein_distance(a, b))
    ranges = sum(np.ptp(x) for x in (a, b) if len(x) > levels)
    assert off <= ranges / (2 * levels) * (1 + 1e-9) + 1e-6


def test_a_cut_list_keeps_its_mean():
    values = np.random.default_rng(0).lognormal(size=1000)
    assert slices(values, 7).mean() == pytest.approx(values.mean())
    assert slices(values, 250)[3] == pytest.approx(np.sort(values)[12:16].mean())


@given(lists, lists)
def test_distances_are_those_of_scipy(a, b):
    assert one_pair(energy, a, b) ** 0.5 == pytest.approx(stats.energy_distance(a, b), rel=1e-6, abs=1e-4)
    assert one_pair(shift, a, b) ** 0.5 == pytest.approx(abs(a.mean() - b.mean()), rel=1e-6, abs=1e-4)


def test_lists_of_any_lengths_in_one_matrix():
    rng = np.random.default_rng(2)
    lists = [np.sort(rng.normal(k, 1, (3, n)), -1) for k, n in enumerate((5, 5, 8, 1, 13))]
    found = earth_movers(lists)
    for q in range(3):
        for i, a in enumerate(lists):
            for j, b in enumerate(lists):
                assert found[q, i, j] == pytest.approx(stats.wasserstein_distance(a[q], b[q]), abs=1e-12)


def test_permutation_p_is_scipys():
    """Against all deals of a small pair, which SciPy lists one by one."""
    a, b = np.array([1.0, 2.0, 4.0, 4.5]), np.array([3.0, 5.0, 6.0, 7.5, 9.0])
    exact = stats.permutation_test((a, b), lambda x, y: stats.wasserstein_distance(x, y), alternative="greater")
    p, chance = significance.permuted(a[None], b[None], earth_movers_of, 9999)
    assert p[0] == pytest.approx(exact.pvalue, abs=0.01)
    assert chance[0] == pytest.approx(exact.null_distribution.mean(), rel=0.05)


def test_equal_hospitals_are_seldom_told_apart():
    """Over directions that depend on one another, the combined p is below 0.05 no more often than that."""
    rng = np.random.default_rng(3)
    mix, wrong = rng.normal(size=(6, 64)), 0
    for _ in range(150):
        along = rng.normal(size=(64, 16))
        one, other = (np.sort((rng.normal(size=(k, 6)) @ mix @ along).T, -1) for k in (5, 20))
        p, _ = significance.permuted(one, other, energy, 499)
        wrong += significance.simes(p) <= 0.05
    assert wrong <= 13  # of 150; more than this happens once in fifty times at a true level of 0.05


def test_intervals_hold_the_true_distance():
    """Two normal laws one apart: the 95 % interval holds 1 in most draws, and never lies below zero."""
    rng, held = np.random.default_rng(4), 0
    for k in range(100):
        one, other = (np.sort(rng.normal(mean, 1, (1, 20)), -1) for mean in (0, 1))
        drawn = significance.counts(f"a{k}", 20, 200), significance.counts(f"b{k}", 20, 200)
        again = significance.resampled(one, other, drawn, earth_movers_of)[0]
        upper = significance.upper(again)
        low, high = significance.interval(earth_movers([one, other])[0, 0, 1], upper, np.array(0.01))
        assert 0 <= low <= high
        held += low <= 1 <= high
    assert held >= 88


def test_an_interval_reaches_zero_where_chance_would_do():
    upper = significance.upper(np.linspace(0.9, 1.3, 100))
    assert significance.interval(np.array(1.0), upper, np.array(0.06))[0] == 0
    assert significance.interval(np.array(1.0), upper, np.array(0.04))[0] == pytest.approx(0.71)


def test_the_least_p_is_reached():
    """Two cases against seven: of 36 deals one is as extreme; of many cases, what the number of deals can tell."""
    p, _ = significance.permuted(np.array([[0.0, 1.0]]), np.arange(7.0)[None] + 50, earth_movers_of, 9999)
    assert significance.least_p(2, 7) == pytest.approx(1 / 36) == pytest.approx(p[0], rel=0.2)
    a, b = np.arange(12.0)[None], np.arange(12.0)[None] + 100
    p = {n: significance.permuted(a, b, earth_movers_of, n)[0][0] for n in (999, 9999)}
    assert p == {999: 1 / 1000, 9999: 1 / 10_000}


def test_weighted_slices():
    """A value that stands for three cases counts thrice."""
    values, weights = np.array([5.0, 1.0, 9.0]), np.array([1.0, 3.0, 2.0])
    np.testing.assert_allclose(slices(values, 6, weights), [1, 1, 1, 5, 9, 9])
    np.testing.assert_allclose(slices(values, 3, weights), [1, 3, 9])
