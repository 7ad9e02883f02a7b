"""How the budget of an advice is divided among its stages.

The unit is a whole training of FedAvg on one inner fold. Strategies come first, because they answer the question; then
personal models, and the training of the advised study on all cases: for up to 16 times its rounds, then up to five
times with other seeds. What is then left searches for a better recipe. Length comes first, because it brought most on
real hospitals, and the recipe last, because it is chosen by short trainings (docs/results/advised.md).
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


@dataclass(frozen=True)
class Shares:
    """Trainings of every stage, over all inner folds."""

    strategies: float
    own: float
    recipe: float  # 0: the study's own recipe is used
    reserve: float  # for second trainings; the models get what these leave
    models: float  # kept for the training of the advised study on all cases; 0: it is not trained

    @property
    def total(self) -> float:
        """All stages together."""
        return self.strategies + self.own + self.recipe + self.reserve + self.models


def shares(trainings: float | None, strategies: Sequence[float], inner: int, least: float) -> Shares:
    """Return the trainings of every stage within a budget; refuse one that does not cover the strategies.

    Args:
        trainings: The budget, in whole trainings of FedAvg; None for what strategies and personal models take.
        strategies: Trainings that every strategy takes on one inner fold, FedAvg among them, beside the first phase
            that strategies share.
        inner: Number of inner folds.
        least: Smallest budget of a search for a recipe, over all inner folds.

    >>> shares(25, [0.2, 1.2, 0.2], 3, 6)
    Shares(strategies=7.8, own=2.4, recipe=0.0, reserve=10.8, models=4.0)
    >>> shares(TRAININGS, [0.2, 1.2, 0.2, 1.2, 0.2], 3, 6).recipe, shares(180, [0.2, 1.2, 0.2, 1.2, 0.2], 3, 6).recipe
    (0.0, 13.8)
    """
    first, rest = float(inner), round(sum(strategies) * inner, 6)  # the shared first phase, and what follows
    own, again = round(OWN * inner, 6), round(AGAIN * inner, 6)
    if trainings is None:
        return Shares(first + rest, own, 0.0, again, 0.0)
    models = round(WHOLE * inner / (inner - 1), 6)  # on all cases, not on those of the other inner folds
    needed = first + rest + own + again + models
    if trainings < needed:
        raise ConfigError(
            f"the budget is {trainings:.3g} trainings, but {len(strategies)} strategies on {inner} inner folds, their "
            f"personal models and a training of the advised study take {needed:.3g}: raise it, or name fewer "
            "strategies with --only"
        )
    recipe = round(trainings - rest - own - again - MEMBERS * LONGEST * models, 6)
    if recipe >= least:  # the search trains the first phase, and FedAvg as the study has it
        return Shares(rest, own, recipe, again, round(trainings - rest - own - recipe - again, 6))
    return Shares(first + rest, own, 0.0, again, round(trainings - first - rest - own - again, 6))


@dataclass(frozen=True)
class Effort:
    """How the advised study is trained on all cases."""

    times: float  # rounds, as a multiple of those that were compared
    members: int  # trainings, with different seeds


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
