"""Equal budgets: set the rounds of studies so that all take the steps, or send the bytes, of a reference.

A round is not the same effort in every method: Ditto trains twice, FedDiv sends half of the network, pFedMe takes its
own number of steps. The steps and bytes of a round come from a rehearsal (`polysite.costs.rehearsal`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from polysite import config, study
from polysite.algorithms.base import facts
from polysite.config import Study, Then
from polysite.costs.budget import Kind, rounds_for, spent
from polysite.errors import ConfigError

T = TypeVar("T", Study, Then)  # a phase: the first one is the study itself


def equalise(studies: Mapping[str, Study], reference: str | None, kind: Kind) -> dict[str, Study]:
    """Return the studies with the number of rounds whose cost is nearest to that of the reference.

    The rounds of all phases of a study change by one factor (`lengthen`). A study without a cost of this kind, such as
    local training with ``bytes``, keeps its rounds.

    Args:
        studies: The study of every method.
        reference: Method whose cost is the budget; None: fedavg, or the first method without it.
        kind: What is equal: rounds (returns the studies unchanged), or steps or bytes over all sites and rounds.
    """
    if kind == "rounds":
        return dict(studies)
    chosen = reference or ("fedavg" if "fedavg" in studies else next(iter(studies)))
    if chosen not in studies:
        raise ConfigError(f"the budget is that of {chosen!r}, which is left out; add --only {chosen!r}")
    budget = spent(study.loads(studies[chosen]), kind)
    if not budget:
        raise ConfigError(f"{chosen!r} sends nothing, so no method can have its bytes; choose another reference")
    return {n: s if n == chosen else _equal(s, budget, kind) for n, s in studies.items()}


def _equal(chosen: Study, budget: int, kind: Kind) -> Study:
    whole = sum(training_rounds(phase) for phase in config.phases(chosen))
    params = study.initial_params(chosen)

    def cost(rounds: int) -> int:
        return spent(study.loads(lengthen(chosen, rounds / whole), params=params), kind)

    return lengthen(chosen, rounds_for(budget, cost, whole) / whole)


def lengthen(chosen: Study, factor: float) -> Study:
    """Return a study with the rounds of every phase multiplied by a factor.

    Learning rates end at the same value (``train.gamma`` is adapted), and the number of validations stays the same.
    """
    first, *later = config.phases(chosen)
    then = tuple(_longer(given, phase, factor) for given, phase in zip(chosen.then, later, strict=True))
    return replace(_longer(chosen, first, factor), then=then)


def training_rounds(phase: Study) -> int:
    """Return the training rounds of a phase: those of an algorithm that fits clusters first, else ``run.rounds``."""
    return _tuning(phase) or phase.run.rounds


def _tuning(phase: Study) -> int:
    """Return the algorithm's own number of rounds; 0 if it has none."""
    return getattr(phase.algorithm, "rounds", 0) if facts(phase.algorithm).exchanges else 0


def _longer(given: T, phase: Study, factor: float) -> T:
    """Return a phase with another number of rounds, and what changes with it.

    Args:
        given: The phase as its study states it.
        phase: The same phase as a study of its own.
        factor: The rounds, as a multiple of its own.
    """
    before = training_rounds(phase)
    after = max(1, round(before * factor))
    plan, ratio = phase.run, after / before
    rounds = plan.rounds + after - before
    best_from = plan.best_from if plan.best_from <= 1 else min(rounds, max(1, round(plan.best_from * ratio)))
    validate_every = max(1, round(plan.validate_every * ratio))
    run = replace(given.run, rounds=rounds, validate_every=validate_every, best_from=best_from)
    train = replace(given.train, gamma=phase.train.gamma ** (before / after))
    own: Any = phase.algorithm if given.algorithm is None else given.algorithm
    algorithm = replace(own, rounds=after) if _tuning(phase) else given.algorithm
    return replace(given, algorithm=algorithm, train=train, run=run)
