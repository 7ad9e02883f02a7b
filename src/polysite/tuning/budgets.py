"""Budgets of a search: rounds, hours or bytes as whole trainings of the reference."""

from dataclasses import dataclass

from polysite import study
from polysite.benchmark import pace
from polysite.config import Study
from polysite.costs.budget import Kind, spent
from polysite.costs.model import total
from polysite.errors import ConfigError
from polysite.tuning.space import Candidate, Space

DEFAULT = 30.0  # trainings


@dataclass(frozen=True)
class Amounts:
    """A budget as a user gives it: at most one of these."""

    trainings: float | None = None
    rounds: int | None = None
    hours: float | None = None
    gigabytes: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """What was given, by name."""
        return {name: amount for name, amount in vars(self).items() if amount is not None}


def budget(base: Study, space: Space, amounts: Amounts = Amounts(), default: float = DEFAULT) -> tuple[float, Kind]:
    """Return a budget in whole trainings of the reference, and what candidates have equal: steps, or bytes.

    Without any amount it is ``default`` trainings.
    """
    asked = amounts.given
    if len(asked) > 1:
        raise ConfigError(f"the budget is given as {' and as '.join(asked)}; choose one")
    kind, amount = next(iter(asked.items()), ("trainings", default))
    if not amount > 0:
        raise ConfigError(f"the budget must be more than zero {kind}, got {amount}")
    reference = space.study(base, Candidate(space.reference))
    if kind == "trainings":
        return amount, "steps"
    loads = study.loads(reference)
    if kind == "rounds":
        return amount / len(loads), "steps"
    if kind == "gigabytes":
        if not (sent := spent(loads, "bytes")):
            raise ConfigError(f"the reference {space.reference!r} sends nothing; give the budget in rounds or hours")
        return amount * 1e9 / sent, "bytes"
    whole = total(loads)
    seconds = pace.measure(reference, whole.steps).seconds(whole.steps, whole.cases)
    return 3600 * amount / seconds, "steps"
