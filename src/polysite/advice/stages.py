"""How the budget of an advice is divided among its stages.

The unit is a whole training of FedAvg on one inner fold. Strategies come first, because they answer the question; then
personal models, a training of the advised study on all cases, the recipe, and a longer training, each if the budget
lasts. Stages take less than they may, since second trainings take place only if something looks better: what is left at
the end decides whether a longer training is tried, and how often the advised study is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polysite.errors import ConfigError

TRAININGS = 50.0  # default budget: reaches for all stages with five strategies on three inner folds
AGAIN = 3.6  # trainings with another seed, at most: one model for all, a better one, one more for single hospitals
OWN = 0.8  # of a training: four fine-tunings of a fifth of the rounds each
LONGER = 2  # times as many rounds
TUNED = 1.4  # a longer training with its last phase and a fine-tuning
WHOLE = 1.2  # a training of the advised study with its last phase
TOLERANCE = 1e-6  # of sums of steps
MEMBERS = 5  # trainings of the advised study at most, whose predictions are averaged


@dataclass(frozen=True)
class Shares:
    """Trainings of every stage, over all inner folds."""

    strategies: float
    own: float
    recipe: float  # 0: the study's own recipe is used
    reserve: float  # for second trainings, a longer training, and more trainings of the advised study
    models: float  # kept for a training of the advised study on all cases; 0: it is not trained

    @property
    def total(self) -> float:
        """All stages together."""
        return self.strategies + self.own + self.recipe + self.reserve + self.models


def shares(trainings: float | None, strategies: Sequence[float], inner: int, least: float) -> Shares:
    """Return the trainings of every stage within a budget; refuse one that does not cover the strategies.

    Second trainings and a longer training come from the same reserve, since both are seldom needed.

    Args:
        trainings: The budget, in whole trainings of FedAvg; None for what strategies and personal models take.
        strategies: Trainings that every strategy takes on one inner fold, FedAvg among them, beside the first phase
            that strategies share.
        inner: Number of inner folds.
        least: Smallest budget of a search for a recipe, over all inner folds.

    >>> shares(25, [0.2, 1.2, 0.2], 3, 6)
    Shares(strategies=7.8, own=2.4, recipe=0.0, reserve=13.0, models=1.8)
    >>> shares(TRAININGS, [0.2, 1.2, 0.2, 1.2, 0.2], 3, 6).recipe
    26.0
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
    longer = round(LONGER * TUNED * inner + (LONGER - 1) * models, 6)
    for reserve in (max(again, longer), again):
        left = round(trainings - rest - own - reserve - models, 6)
        if left >= least:  # the search trains the first phase, and FedAvg as the study has it
            return Shares(rest, own, left, reserve, models)
    return Shares(first + rest, own, 0.0, round(trainings - first - rest - own - models, 6), models)


def affords_longer(left: float, inner_folds: float, whole: float) -> bool:
    """Return whether what is left affords a longer training on all inner folds, and one on all cases after it.

    Args:
        left: What is left of the budget.
        inner_folds: Cost of the advised study on all inner folds, as it is.
        whole: Its cost on all cases.

    >>> affords_longer(10.0, 2.4, 2.4), affords_longer(9.0, 2.4, 2.4)
    (True, False)
    """
    return left >= LONGER * (inner_folds + whole) - TOLERANCE


def members(left: float, whole: float) -> int:
    """Return how often the advised study is trained with what is left of the budget: at least once.

    >>> members(7.5, 2.4), members(0.5, 2.4), members(100.0, 2.4)
    (3, 1, 5)
    """
    return max(1, min(MEMBERS, int((left + TOLERANCE) / whole)))
