"""Budgets of a search: whole trainings of the reference, or hours on this machine's device."""

from polysite import study
from polysite.benchmark import pace
from polysite.config import Study
from polysite.costs.model import total
from polysite.errors import ConfigError
from polysite.tuning.space import Candidate, Space

DEFAULT = 30.0  # trainings


def budget(
    base: Study, space: Space, trainings: float | None = None, hours: float | None = None, default: float = DEFAULT
) -> float:
    """Return a budget in whole trainings of the reference; ``default`` if none is given."""
    if trainings is not None and hours is not None:
        raise ConfigError("the budget is given as trainings and as hours; choose one")
    amount = hours if hours is not None else default if trainings is None else trainings
    if not amount > 0:
        raise ConfigError(
            f"the budget must be more than zero {'trainings' if hours is None else 'hours'}, got {amount}"
        )
    if hours is None:
        return amount
    reference = space.study(base, Candidate(space.reference))
    whole = total(study.loads(reference))
    return 3600 * hours / pace.measure(reference, whole.steps).seconds(whole.steps, whole.cases)
