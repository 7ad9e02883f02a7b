"""How the budget of an advice is divided among its stages.

The unit is a whole training of FedAvg on one inner fold. Strategies come first, because they answer the question; then
personal models, the recipe, and a longer training, each if the budget lasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polysite.errors import ConfigError

TRAININGS = 50.0  # default budget: reaches for all stages with five strategies on three inner folds
AGAIN = 3.6  # trainings with another seed, at most: one model for all, a better one, one more for single hospitals
OWN = 0.8  # of a training: four fine-tunings of a fifth of the rounds each
LONGER = 3  # times as many rounds
TUNED = 1.4  # a longer training with its last phase and a fine-tuning


@dataclass(frozen=True)
class Shares:
    """Trainings of every stage, over all inner folds."""

    strategies: float
    own: float
    recipe: float  # 0: the study's own recipe is used
    longer: float  # 0: the rounds stay as they are

    @property
    def total(self) -> float:
        """All stages together."""
        return self.strategies + self.own + self.recipe + self.longer


def shares(trainings: float | None, strategies: Sequence[float], inner: int, least: float) -> Shares:
    """Return the trainings of every stage within a budget; refuse one that does not cover the strategies.

    Args:
        trainings: The budget, in whole trainings of FedAvg; None for what strategies and personal models take.
        strategies: Trainings that every strategy takes on one inner fold, FedAvg among them, beside the first phase
            that strategies share.
        inner: Number of inner folds.
        least: Smallest budget of a search for a recipe, over all inner folds.

    >>> shares(25, [0.2, 1.2, 0.2], 3, 6)
    Shares(strategies=18.6, own=2.4, recipe=0.0, longer=0.0)
    >>> shares(TRAININGS, [0.2, 1.2, 0.2, 1.2, 0.2], 3, 6).longer
    12.6
    """
    needed, own = round((1 + sum(strategies) + AGAIN) * inner, 6), round(OWN * inner, 6)
    if trainings is None:
        return Shares(needed, own, 0.0, 0.0)
    if trainings < needed + own:
        raise ConfigError(
            f"the budget is {trainings:.3g} trainings, but {len(strategies)} strategies on {inner} inner folds and "
            f"their personal models take {needed + own:.3g}: raise it, or name fewer strategies with --only"
        )
    left = trainings - needed - own
    more = round(LONGER * TUNED * inner, 6)
    if left < least + inner:  # with a recipe, FedAvg as the study has it is one more strategy
        return Shares(needed, own, 0.0, more if left >= more else 0.0)
    longer = more if left >= least + inner + more else 0.0
    return Shares(needed + inner, own, left - inner - longer, longer)
