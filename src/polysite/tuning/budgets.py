"""Budgets of a search: rounds, hours or bytes as whole trainings of the reference."""

from polysite import study
from polysite.benchmark import pace
from polysite.config import Study
from polysite.costs.budget import Kind, spent
from polysite.costs.model import total
from polysite.errors import ConfigError
from polysite.tuning.space import Candidate, Space

DEFAULT = 30.0  # trainings


def budget(
    base: Study,
    space: Space,
    *,
    trainings: float | None = None,
    rounds: int | None = None,
    hours: float | None = None,
    gigabytes: float | None = None,
    default: float = DEFAULT,
) -> tuple[float, Kind]:
    """Return a budget in whole trainings of the reference, and what candidates have equal: steps, or bytes.

    At most one kind of budget may be given; without any it is ``default`` trainings.
    """
    given = {"trainings": trainings, "rounds": rounds, "hours": hours, "gigabytes": gigabytes}
    asked = {k: v for k, v in given.items() if v is not None}
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
