"""Budgets: the number of rounds that costs a method a given number of local steps or bytes."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal

from polysite.costs.model import Load, total
from polysite.payload import SiteId

Kind = Literal["rounds", "steps", "bytes"]
"""What is equal for all methods of a comparison: rounds, or local steps or bytes of a run over all sites."""

GUESS = 8  # largest number of rounds of the first estimate
FAR = 4 * GUESS  # rounds that must cost more, or else the cost does not depend on their number
ATTEMPTS = 8  # largest number of estimates, each scaled from the cost of the last


def spent(exchanges: Iterable[Mapping[SiteId, Load]], kind: Kind) -> int:
    """Return the rounds of a run, its local steps at all sites, or its bytes from and to all sites.

    Sites that are sent nothing train alone: the bytes of their scores do not count.

    >>> run = [{"a": Load(steps=3, down=8, up=16), "b": Load(steps=1, down=8, up=16)}] * 10
    >>> spent(run, "rounds"), spent(run, "steps"), spent(run, "bytes")
    (10, 40, 480)
    """
    loads = list(exchanges)
    if kind == "rounds":
        return len(loads)
    whole = total(loads)
    if kind == "steps":
        return whole.steps
    return whole.down + whole.up if whole.down else 0


def rounds_for(budget: int, cost: Callable[[int], int], rounds: int) -> int:
    """Return the number of rounds, at least one, whose cost is nearest to a budget; of two, the smaller.

    Args:
        budget: Steps or bytes to spend.
        cost: Function from a number of rounds to the steps or bytes of a run; it must not decrease.
        rounds: The method's own number of rounds, which it keeps if the cost does not depend on it.

    >>> rounds_for(240, lambda n: 100 * n, rounds=40), rounds_for(240, lambda n: 7, rounds=40)
    (2, 40)
    """
    known = cache(cost)
    first, now = min(rounds, GUESS), FAR
    if known(first) == known(now):
        return rounds
    for _ in range(ATTEMPTS):
        slope = (known(now) - known(first)) / (now - first)
        if slope <= 0:
            break
        now, before = max(1, round(first + (budget - known(first)) / slope)), now
        if now in (first, before):
            break

    def off(count: int) -> tuple[int, int]:
        return abs(known(count) - budget), count

    while (nearer := min(max(1, now - 1), now, now + 1, key=off)) != now:
        now = nearer
    return now
