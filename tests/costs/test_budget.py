"""Budgets: the number of rounds that cost as much as another method."""

import pytest

from polysite.costs.budget import rounds_for, spent
from polysite.costs.model import Load


def test_what_a_run_spent():
    run = [{"a": Load(steps=3, down=8, up=16), "b": Load(steps=1, down=8)}, {"a": Load(steps=2, up=1)}]
    assert [spent(run, kind) for kind in ("rounds", "steps", "bytes")] == [2, 6, 33]


@pytest.mark.parametrize(
    ("budget", "cost", "wanted"),
    [
        (1440, lambda n: 36 * n, 40),
        (1440, lambda n: 400 * n, 4),  # 1600 is nearer than 1200
        (250, lambda n: 100 * n, 2),  # of two that are equally near, the cheaper one
        (1, lambda n: 100 * n, 1),  # never less than one round
        (5000, lambda n: 7 * n + 900, 586),  # a first exchange that sends more
        (1000, lambda n: n * n, 32),  # 1024, not 961: rounds that become dearer
    ],
)
def test_the_number_of_rounds_whose_cost_is_nearest(budget, cost, wanted):
    found = rounds_for(budget, cost, rounds=40)
    assert found == wanted
    assert all(abs(cost(found) - budget) <= abs(cost(n) - budget) for n in range(1, 700))


def test_rounds_that_cost_nothing_stay():
    assert rounds_for(10, lambda n: 0, rounds=40) == 40
