"""The jury: what a juror cannot derive."""

import numpy as np
import pytest

from polysite.engines.jury import draw


@pytest.mark.parametrize("count", [5, 12])
def test_a_juror_cannot_derive_the_change_of_a_single_other_site(count):
    """It sees the merged model (one site counts by 0.05) and two contrasts, and knows its own change."""
    sites, random, closest = [f"s{k:02}" for k in range(count)], np.random.default_rng(0), []
    for secret in range(10):
        first = draw([sites], sites, count, (secret, 0))
        second = draw([sites], sites, count, (secret, 1), first.values(), first)
        assert first.keys() == second.keys() == set(sites)
        for juror in sites:
            others = [i for i in sites if i != juror]
            votes = [[signs[juror][i] for i in others] for signs in (first, second)]
            assert [sum(signs) for signs in votes] == pytest.approx([0, 0]) and juror not in first[juror]
            assert {(a > 0, b > 0) for a, b in zip(*votes, strict=True)} == {(x, y) for x in (0, 1) for y in (0, 1)}
            shares = random.uniform(0.5, 1, len(others))
            shares[random.integers(len(others))] *= 0.05
            seen = np.stack([shares, *votes])
            for row in np.eye(len(others)):
                nearest = seen.T @ np.linalg.lstsq(seen.T, row, rcond=None)[0]
                closest.append(np.linalg.norm(nearest - row))
    assert min(closest) > 0.1
