"""How the budget of an advice is divided among its stages.

The unit is a whole training of FedAvg on one inner fold. Strategies come first, because they answer the question; then
personal models. What is left trains the advised study on all cases: for up to 16 times its rounds, then up to five
times with other seeds. Length comes first, because it brought most on real hospitals (docs/results/advised.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polysite.errors import ConfigError

TRAININGS = 50.0  # default budget: five strategies on three inner folds, and a long training of the advised study
AGAIN = 3.6  # trainings with another seed, at most: one model for all, a better one, one more for single hospitals
OWN = 0.8  # of a training: four fine-tunings of a fifth of the rounds each
WHOLE = 1.2  # a training of the advised study with its last phase
TOLERANCE = 1e-6  # of ratios of steps
LONGEST = 16.0  # times the rounds of the advised study, at most
STEP = 0.05  # between two lengths
MEMBERS = 5  # trainings of the advised study at most, whose predictions are averaged


def comparing(trainings: float | None, strategies: Sequence[float], inner: int) -> float:
    """Return how many trainings the comparison takes, at most; refuse a budget that does not also cover the models.

    Args:
        trainings: The budget, in whole trainings of FedAvg; None for what the comparison takes.
        strategies: Trainings that every strategy takes on one inner fold, FedAvg among them, beside the first phase
            that strategies share.
        inner: Number of inner folds.

    >>> comparing(25, [0.2, 1.2, 0.2], 3), comparing(None, [0.2], 2)
    (21.0, 11.2)
    """
    first, rest = float(inner), round(sum(strategies) * inner, 6)  # the shared first phase, and what follows
    found = first + rest + round(OWN * inner, 6) + round(AGAIN * inner, 6)
    needed = found + round(WHOLE * inner / (inner - 1), 6)  # on all cases, not on those of the other inner folds
    if trainings is not None and trainings < needed:
        raise ConfigError(
            f"the budget is {trainings:.3g} trainings, but {len(strategies)} strategies on {inner} inner folds, their "
            f"personal models and a training of the advised study take {needed:.3g}: raise it, or name fewer "
            "strategies with --only"
        )
    return found


def runs_of(strategies: int, inner: int) -> tuple[int, int]:
    """Return how many runs an advice takes at least, and at most.

    At least: FedAvg and one model for all on every inner fold, the other strategies on the first one, own models, and a
    training on all cases. At most, all strategies on every fold, own models after two strategies, four strategies and
    the own models with another seed, and seven trainings on all cases: for all hospitals, and for exceptions.

    >>> runs_of(2, 2), runs_of(6, 3)
    ((10, 37), (18, 64))
    """
    own = 2 * inner
    least = 2 * inner + (strategies - 1) + own + 1
    return least, (1 + strategies) * inner + 4 * own + 4 * inner + 7


@dataclass(frozen=True)
class Effort:
    """How the advised study is trained on all cases."""

    times: float  # rounds, as a multiple of those that were compared
    members: int  # trainings, with different seeds; 0 without a budget


def effort(left: float, whole: float, most: int = MEMBERS) -> Effort:
    """Return how long and how often the advised study is trained with what is left of the budget.

    Args:
        left: What is left of the budget.
        whole: Cost of one training with the rounds that were compared.
        most: Largest number of trainings.

    >>> effort(7.5, 2.4), effort(0.5, 2.4)
    (Effort(times=3.1, members=1), Effort(times=1.0, members=1))
    >>> effort(30.0, 2.4), effort(80.0, 2.4), effort(999.0, 2.4)
    (Effort(times=12.5, members=1), Effort(times=16.0, members=2), Effort(times=16.0, members=5))
    """
    affordable = round(int(left / (whole * STEP) + TOLERANCE) * STEP, 2)
    times = min(LONGEST, max(1.0, affordable))
    return Effort(times, max(1, min(most, int(left / (times * whole) + TOLERANCE))))
