"""Budgets: the number of rounds that costs a method a given number of local steps or bytes."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal

from polysite.costs.model import Load
from polysite.payload import SiteId

Kind = Literal["rounds", "steps", "bytes"]
"""What is equal for all methods of a comparison: rounds, or local steps or bytes of a run over all sites."""

GUESS = 8  # largest number of rounds of the first estimate
ATTEMPTS = 8  # largest number of estimates, each scaled from the cost of the last


def spent(exchanges: Iterable[Mapping[SiteId, Load]], kind: Kind) -> int:
    """Return the rounds of a run, its local steps at all sites, or its bytes from and to all sites.

    >>> run = [{"a": Load(steps=3, down=8, up=16), "b": Load(steps=1, down=8, up=16)}] * 10
    >>> spent(run, "rounds"), spent(run, "steps"), spent(run, "bytes")
    (10, 40, 480)
    """
    loads = list(exchanges)
    if kind == "rounds":
        return len(loads)
    return sum(x.steps if kind == "steps" else x.down + x.up for load in loads for x in load.values())


def rounds_for(budget: int, cost: Callable[[int], int], rounds: int) -> int:
    """Return the number of rounds, at least one, whose cost is nearest to a budget; of two, the smaller.

    Args:
        budget: Steps or bytes to spend.
        cost: Function from a number of rounds to the steps or bytes of a run; it must not decrease.
        rounds: The method's own number of rounds, which is returned if they cost nothing.

    >>> rounds_for(240, lambda n: 100 * n, rounds=40), rounds_for(7, lambda n: 0, rounds=40)
    (2, 40)
    """
    known = cache(cost)
    now = min(rounds, GUESS)
    for _ in range(ATTEMPTS):
        if not known(now):
            return rounds
        now, before = max(1, round(now * budget / known(now))), now
        if now == before:
            break

    def off(count: int) -> tuple[int, int]:
        return abs(known(count) - budget), count

    while (nearer := min(max(1, now - 1), now, now + 1, key=off)) != now:
        now = nearer
    return now
