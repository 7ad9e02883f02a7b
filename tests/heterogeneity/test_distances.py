"""Distances between sorted lists, against SciPy and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import linalg, stats
from sklearn.metrics.pairwise import laplacian_kernel

from polysite.heterogeneity import distances, significance
from polysite.heterogeneity.distances import (
    SQUARES,
    Weights,
    discrepancy,
    earth_movers,
    earth_movers_of,
    energy,
    frechet,
    merged,
    shift,
    slices,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)
lists = arrays(np.float64, st.integers(1, 30), elements=numbers)


def one_pair(statistic, a, b, width=1.0):
    z, weights, _ = merged(np.sort(a)[None], np.sort(b)[None])
    return statistic(z, Weights(weights[:, None]), np.array([width])).item()


@given(lists, lists)
def test_earth_movers_distance_is_scipys(a, b):
    """From the quantiles of up to 256 cases it is exact, in both forms."""
    expected = stats.wasserstein_distance(a, b)
    laws = [slices(x, 256)[None] for x in (a, b)]
    assert earth_movers(laws)[0, 0, 1] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert one_pair(earth_movers_of, a, b) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(
    arrays(np.float64, st.integers(1, 90), elements=numbers),
    arrays(np.float64, st.integers(1, 90), elements=numbers),
    st.integers(2, 40),
)
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
def test_energy_distance_is_scipys(a, b):
    assert one_pair(energy, a, b) ** 0.5 == pytest.approx(stats.energy_distance(a, b), rel=1e-6, abs=1e-4)


@given(lists, lists)
def test_shift_is_the_difference_of_the_means(a, b):
    assert one_pair(shift, a, b) ** 0.5 == pytest.approx(abs(a.mean() - b.mean()), rel=1e-6, abs=1e-4)


@given(lists, lists)
def test_discrepancy_is_that_of_scikit_learns_kernel(a, b):
    width = 0.7e5
    k = [[laplacian_kernel(x[:, None], y[:, None], 1 / width).mean() for y in (a, b)] for x in (a, b)]
    expected = k[0][0] + k[1][1] - 2 * k[0][1]
    assert one_pair(discrepancy, a, b, width) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_frechet_is_that_of_two_normal_laws():
    """And averaged over directions it is the distance in many dimensions, where the laws are round."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=9), rng.normal(1, 2, size=14)
    assert one_pair(frechet, a, b) == pytest.approx((a.mean() - b.mean()) ** 2 + (a.std() - b.std()) ** 2)
    one, other, move = np.eye(5) * 4.0, np.eye(5) * 9.0, np.arange(5.0)
    whole = move @ move + np.trace(one + other - 2 * linalg.sqrtm(one @ other)).real
    along = rng.normal(size=(200_000, 5))
    along *= np.sqrt(5) / np.linalg.norm(along, axis=1, keepdims=True)
    apart = np.mean((along @ move) ** 2 + 5 * (2 - 3) ** 2)
    assert apart == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("name", [*SQUARES, "emd"])
def test_every_distance_keeps_what_a_distance_must(name):
    """Zero between equal lists; the same both ways; blind to the order and to the duplication of all values."""
    statistic = {**SQUARES, "emd": earth_movers_of}[name]
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=7), rng.normal(0.5, 2, size=12)
    apart = one_pair(statistic, a, b)
    assert apart > 1e-3
    assert one_pair(statistic, a, a[::-1]) == pytest.approx(0, abs=1e-12)
    assert one_pair(statistic, a, np.repeat(a, 3)) == pytest.approx(0, abs=1e-12)
    assert one_pair(statistic, b, a) == pytest.approx(apart)
    assert one_pair(statistic, rng.permutation(a), np.tile(b, 2)) == pytest.approx(apart)
    assert one_pair(statistic, np.array([3.0]), np.array([3.0])) == 0


def test_lists_of_any_lengths_in_one_matrix():
    rng = np.random.default_rng(2)
    lists = [np.sort(rng.normal(k, 1, (3, n)), -1) for k, n in enumerate((5, 5, 8, 1, 13))]
    found = earth_movers(lists)
    for q in range(3):
        for i, a in enumerate(lists):
            for j, b in enumerate(lists):
                assert found[q, i, j] == pytest.approx(stats.wasserstein_distance(a[q], b[q]), abs=1e-12)


def test_draws_that_differ_by_quantity_and_shared_ones_agree():
    rng = np.random.default_rng(7)
    one, other = np.sort(rng.normal(size=(3, 6))), np.sort(rng.normal(1, 1, (3, 9)))
    z, _, _ = merged(one, other)
    deals = np.where(np.argsort(rng.random((5, 15))) < 6, 1 / 6, -1 / 9)
    for statistic in (*SQUARES.values(), earth_movers_of):
        shared = statistic(z, Weights(deals), np.ones(3))
        assert shared.shape == (3, 5)
        apart = np.stack([deals] * 3)
        for laid_out in (apart, apart.transpose(0, 2, 1).copy().transpose(0, 2, 1)):  # values or draws side by side
            np.testing.assert_allclose(shared, statistic(z, Weights(laid_out), np.ones(3)), atol=1e-12)


def test_permutation_p_is_scipys():
    """Against all deals of a small pair, which SciPy lists one by one."""
    a, b = np.array([1.0, 2.0, 4.0, 4.5]), np.array([3.0, 5.0, 6.0, 7.5, 9.0])
    exact = stats.permutation_test((a, b), lambda x, y: stats.wasserstein_distance(x, y), alternative="greater")
    p, chance = significance.permuted(a[None], b[None], {"emd": earth_movers_of}, np.ones(1), 9999)["emd"]
    assert p[0] == pytest.approx(exact.pvalue, abs=0.01)
    assert chance[0] == pytest.approx(exact.null_distribution.mean(), rel=0.05)


def test_a_small_p_is_looked_at_more_closely():
    """A thousand deals cannot find less than 0.001; ten thousand can, and are made only then."""
    a, b = np.arange(12.0)[None], np.arange(12.0)[None] + 100
    p = {n: significance.permuted(a, b, {"emd": earth_movers_of}, np.ones(1), n)["emd"][0][0] for n in (999, 9999)}
    assert p[999] == 1 / 1000
    assert p[9999] == 1 / 10_000


def test_equal_hospitals_are_seldom_told_apart():
    """Over directions that depend on one another, the combined p is below 0.05 no more often than that."""
    rng = np.random.default_rng(3)
    mix, wrong = rng.normal(size=(6, 64)), 0
    for _ in range(150):
        along = rng.normal(size=(64, 16))
        one, other = (np.sort((rng.normal(size=(k, 6)) @ mix @ along).T, -1) for k in (5, 20))
        p, _ = significance.permuted(one, other, {"energy": energy}, np.ones(16), 499)["energy"]
        wrong += significance.simes(p) <= 0.05
    assert wrong <= 13  # of 150; more than this happens once in fifty times at a true level of 0.05


def test_intervals_hold_the_true_distance():
    """Two normal laws one apart: the 95 % interval holds 1 in most draws, and never lies below zero."""
    rng, held = np.random.default_rng(4), 0
    for k in range(100):
        one, other = (np.sort(rng.normal(mean, 1, (1, 20)), -1) for mean in (0, 1))
        drawn = significance.counts(f"a{k}", 20, 200), significance.counts(f"b{k}", 20, 200)
        again = significance.resampled(one, other, drawn, {"emd": earth_movers_of}, np.ones(1))["emd"][0]
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
    """Two cases against seven: of 36 deals one is as extreme, so nothing below 1/36 can come out."""
    a, b = np.array([[0.0, 1.0]]), np.arange(7.0)[None] + 50
    p, _ = significance.permuted(a, b, {"emd": earth_movers_of}, np.ones(1), 9999)["emd"]
    assert significance.least_p(2, 7) == pytest.approx(1 / 36)
    assert p[0] == pytest.approx(1 / 36, rel=0.2)


def test_deals_differ_from_part_to_part():
    first, second = (significance._permutations(4, 5, block).each for block in (0, 1))
    assert (first != second).any()
    for deals in (first, second):
        assert ((deals > 0).sum(1) == 4).all() and np.allclose(deals.sum(1), 0)


def test_resamples_in_parts_are_the_same_as_at_once(monkeypatch):
    rng = np.random.default_rng(5)
    one, other = np.sort(rng.normal(size=(5, 6))), np.sort(rng.normal(1, 1, (5, 9)))
    drawn = significance.counts("a", 6, 100), significance.counts("b", 9, 100)
    together = significance.resampled(one, other, drawn, SQUARES, np.ones(5))
    monkeypatch.setattr(distances, "CHUNK", 200)  # two quantities at a time
    for name, found in significance.resampled(one, other, drawn, SQUARES, np.ones(5)).items():
        np.testing.assert_array_equal(found, together[name])


def test_weighted_slices():
    """A value that stands for three cases counts thrice."""
    values, weights = np.array([5.0, 1.0, 9.0]), np.array([1.0, 3.0, 2.0])
    np.testing.assert_allclose(slices(values, 6, weights), [1, 1, 1, 5, 9, 9])
    np.testing.assert_allclose(slices(values, 3, weights), [1, 3, 9])
