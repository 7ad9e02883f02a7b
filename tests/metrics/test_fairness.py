"""How evenly sites are served, against NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysite.errors import DataError
from polysite.metrics.fairness import Fairness, fairness

means = st.dictionaries(st.text(min_size=1), st.floats(0, 400), min_size=1, max_size=8)


@given(means, st.sampled_from([1, -1]))
def test_numpy(means, better):
    found, x = fairness(means, better), np.array(list(means.values()))
    low, high = (x.min(), x.max()) if better == 1 else (x.max(), x.min())
    assert found.worst[1] == low == means[found.worst[0]] and found.best[1] == high == means[found.best[0]]
    assert found.spread == np.ptp(x) and found.mean == pytest.approx(x.mean())
    assert found.std == pytest.approx(np.std(x, ddof=1) if len(x) > 1 else 0, abs=1e-9)
    assert 1 / len(x) - 1e-9 <= found.jain <= 1 + 1e-9


def test_by_hand():
    assert fairness({"a": 0.0, "b": 1.0}) == Fairness(("a", 0.0), ("b", 1.0), 0.5, 1.0, math.sqrt(0.5), 0.5)
    assert fairness({"a": 0.0, "b": 0.0}).jain == 1 and fairness({"a": 2.0}).std == 0
    assert fairness({"a": 3.0, "b": 9.0}, better=-1).worst == ("b", 9.0)


def test_refused():
    with pytest.raises(DataError, match="north has the mean score nan"):
        fairness({"south": 1.0, "north": math.nan})
    with pytest.raises(DataError, match="at least one"):
        fairness({})
