"""Outlying cases: the numbers that sites share, and both readings of the paper."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.radiomics import NAMES
from polysite.radiomics.outliers import find, share

COLUMN = NAMES.index("glcm_ClusterProminence")


def table(cases=30, seed=0):
    return np.random.default_rng(seed).uniform(1, 2, (cases, len(NAMES)))


def dealt(values, sites=4):
    """The rows at several sites, of which one has a single case."""
    cuts = [0, *np.linspace(1, len(values), sites).astype(int).tolist()]
    return {f"s{k}": values[a:b] for k, (a, b) in enumerate(pairwise(cuts))}


def outlying(values, sites=4):
    shared = share(values)
    return [e for own in dealt(values, sites).values() for e in find(own, shared)]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=64)


@settings(deadline=None, max_examples=20)
@given(st.lists(NUMBERS, min_size=4, max_size=40))
def test_shared_numbers_are_values_of_cases(numbers):
    values = np.array(numbers)[:, None] * np.ones(len(NAMES))
    values[0, 5] = np.nan
    found = share(values)
    assert found.cases[5] == len(values) - 1 and found.cases[6] == len(values)
    for column in (5, 6):
        own = values[np.isfinite(values[:, column]), column]
        size = np.sort(np.abs(own))
        assert found.low[column] == np.percentile(own, 2, method="higher")
        assert found.high[column] == np.percentile(own, 98, method="lower")
        assert found.second[column] == size[-2] and found.size[column] == size[(len(size) - 1) // 2]


@pytest.mark.parametrize(("value", "found"), [(250.0, True), (150.0, False), (-250.0, True)])
def test_above_any_other_volume(value, found):
    """Values spread over a wide range, so that only the first reading sees a larger one; wherever the cases lie."""
    values = table()
    values[:, COLUMN] = np.linspace(-2, 2, 30)
    values[17, COLUMN] = value
    for sites in (2, 3, 5):
        assert [e.column for e in outlying(values, sites)] == [COLUMN] * found
        assert all(e.above == pytest.approx(250 / 2) and e.times < 100 for e in outlying(values, sites))


def test_outside_the_range_of_all():
    """Values close together, far from zero: the second reading sees what the first cannot."""
    values = table()
    values[:, COLUMN] = np.linspace(1000, 1001, 30)
    values[17, COLUMN] = 1150
    (extreme,) = outlying(values)
    low, high = np.sort(values[:, COLUMN])[[1, 28]]
    assert extreme.times == pytest.approx((1150 - high) / (high - low)) and extreme.above < 2
    assert (extreme.low, extreme.high, extreme.value) == (low, high, 1150)


def test_two_outliers_of_one_kind_hide_from_the_first_reading_alone():
    values = table(60)
    values[[4, 40], COLUMN] = 5000
    assert [(e.column, e.above, e.times > 100) for e in outlying(values)] == [(COLUMN, 1, True)] * 2


def test_few_cases_and_features_that_no_case_has_have_no_outliers():
    few, empty = table(9), table()
    few[3, COLUMN], empty[:, COLUMN] = 1e9, np.nan
    assert not outlying(few) and not outlying(empty) and np.isnan(share(empty).low[COLUMN])
