"""Correlation over a few federations, against SciPy and against what a bootstrap must do."""

from math import isnan

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from polysite.metrics.correlation import correlation, interval


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=15), rng.integers(0, 5, 15).astype(float)  # with ties
    assert correlation(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert correlation(x, y, "spearman") == pytest.approx(spearmanr(x, y).statistic)


def test_without_variation_or_with_two_units_there_is_no_correlation():
    assert isnan(correlation([1, 2, 3], [2, 2, 2])) and isnan(correlation([1, 2], [1, 2]))
    assert all(map(isnan, interval([1, 1, 1, 1], [[1.0], [2.0], [3.0], [4.0]])))


def test_the_interval_covers_both_federations_and_seeds():
    x = list(range(14))
    exact = [[float(v)] * 3 for v in x]
    noisy = [[v - 6.0, float(v), v + 6.0] for v in x]  # the same means; seeds differ
    assert interval(x, exact) == (pytest.approx(1), pytest.approx(1))
    low, high = interval(x, noisy)
    assert low < 0.9 < high and low > 0
    assert interval(x, noisy) == (low, high)  # the same resamples


def test_the_interval_holds_a_true_correlation_of_zero_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    draws = [(rng.normal(size=16), rng.normal(size=16)) for _ in range(200)]
    bounds = [interval(x.tolist(), [[v] for v in y], draws=500) for x, y in draws]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in bounds]) <= 0.99
