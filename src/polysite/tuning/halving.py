"""Successive halving: many candidates train for few rounds, and at each rung the better third goes on.

Paper: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter optimization, AISTATS 2016

A rung is a share of a whole training. Survivors go on from their checkpoints, so a candidate that reaches the last rung
has trained once. The unit of cost is a whole training of one candidate on one inner fold; methods are compared at equal
steps (or bytes), so that it is the same for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

THIRD = 3  # of the candidates of a rung, one of three goes on
SHORTEST = 1 / 27  # of a whole training, at the first rung


@dataclass(frozen=True)
class Rung:
    """A share of a whole training, and the number of candidates that train up to it."""

    share: float
    candidates: int


def rungs(count: int, shortest: float) -> list[Rung]:
    """Return the rungs for a number of candidates; the last is a whole training.

    Args:
        count: Candidates at the first rung.
        shortest: Smallest share of a training at which scores can be compared, such as one validation.

    >>> rungs(10, 0.02)
    [Rung(share=0.1111111111111111, candidates=10), Rung(share=0.3333333333333333, candidates=3), \
Rung(share=1.0, candidates=1)]
    >>> rungs(2, 0.02)
    [Rung(share=1.0, candidates=2)]
    """
    counts = [count]
    while counts[-1] >= THIRD and THIRD ** -len(counts) >= max(shortest, SHORTEST):
        counts.append(counts[-1] // THIRD)
    return [Rung(THIRD ** (k + 1.0 - len(counts)), n) for k, n in enumerate(counts)]


def cost(plan: Sequence[Rung]) -> float:
    """Return the cost of all rungs in whole trainings of one candidate.

    The reference trains to the end, whether or not it is among the best, so it is counted beside them.

    >>> round(cost(rungs(10, 0.02)), 3), cost(rungs(2, 0.02))
    (3.333, 2.0)
    """
    shares = [0.0, *(rung.share for rung in plan)]
    going = sum(rung.candidates * (b - a) for rung, a, b in zip(plan, shares, shares[1:], strict=False))
    return going + 1 - plan[0].share


def affordable(budget: float, most: int, shortest: float) -> int:
    """Return the largest number of candidates whose rungs cost at most the budget; 0 if one does not fit.

    >>> affordable(3.4, 100, 0.02), affordable(0.5, 100, 0.02), affordable(1000, 12, 0.02)
    (10, 0, 12)
    """
    return max((n for n in range(1, most + 1) if cost(rungs(n, shortest)) <= budget + 1e-9), default=0)


def survivors(scores: Mapping[str, float], keep: int, reference: str) -> list[str]:
    """Return the candidates that go on, best first; the reference is always among them. Ties: by the order given.

    >>> survivors({"a": 0.5, "b": 0.7, "c": 0.6}, 1, "a")
    ['b', 'a']
    """
    ranked = sorted(scores, key=lambda name: -scores[name])
    kept = ranked[:keep]
    return kept if reference in kept else [*kept, reference]
