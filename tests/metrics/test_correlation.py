"""Correlation over a few federations, against SciPy and against what a bootstrap must do."""

from math import isnan

import numpy as np
import pytest
from scipy.stats import bootstrap, pearsonr, spearmanr

from polysite.metrics.correlation import correlation, interval


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=15), rng.integers(0, 5, 15).astype(float)  # with ties
    assert correlation(x, y) == pytest.approx(pearsonr(x, y).statistic)
    assert correlation(x, y, "spearman") == pytest.approx(spearmanr(x, y).statistic)


def test_without_variation_or_with_two_units_there_is_no_correlation():
    assert isnan(correlation([1, 2, 3], [2, 2, 2])) and isnan(correlation([1, 2], [1, 2]))
    assert all(map(isnan, interval([1, 1, 1, 1], [1, 2, 3, 4])))


def test_the_interval_of_a_line_is_a_point():
    assert interval(range(14), range(14)) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_the_interval_is_that_of_scipy(kind):
    """SciPy resamples pairs too; 2,000 resamples of each agree to their own error."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=16)
    y = x + rng.normal(size=16)
    ours = interval(x, y, kind, draws=2000)
    theirs = bootstrap(
        (x, y), lambda a, b: correlation(a, b, kind), paired=True, vectorized=False, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(4),
    ).confidence_interval  # fmt: skip
    assert ours == pytest.approx(tuple(theirs), abs=0.05)
