"""Equal budgets: studies with as many rounds as cost the steps, or the bytes, of a reference.

A round is not the same effort in every method: Ditto trains twice, FedDiv sends half of the network, pFedMe takes its
own number of steps. The steps and bytes of a round come from a rehearsal (`polysite.costs.rehearsal`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polysite import config, study
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.costs.budget import Kind, rounds_for, spent
from polysite.errors import ConfigError


def equalise(studies: Mapping[str, Study], reference: str | None, kind: Kind) -> dict[str, Study]:
    """Return the studies with rounds that cost as much as those of the reference, as nearly as whole rounds allow.

    All phases of a study are lengthened or shortened by one factor (`lengthen`). A study without any cost of this kind,
    such as local training by bytes, keeps its rounds.

    Args:
        studies: The study of every method.
        reference: The method whose cost is the budget; None: fedavg, or else the first.
        kind: What to hold equal: rounds (the studies as they are), steps or bytes, over all sites and rounds.
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
    whole = sum(_length(phase) for phase in config.phases(chosen))

    def cost(rounds: int) -> int:
        return spent(study.loads(lengthen(chosen, rounds / whole)), kind)

    return lengthen(chosen, rounds_for(budget, cost, whole) / whole)


def lengthen(chosen: Study, factor: float) -> Study:
    """Return a study with so many times the rounds in every phase.

    Learning rates end at the same value (``train.gamma`` is adapted), and the model is validated as often over the run.
    """
    first, *later = config.phases(chosen)
    then = tuple(config.merge(given, _longer(phase, factor)) for given, phase in zip(chosen.then, later, strict=True))
    sections = {name: replace(getattr(chosen, name), **keys) for name, keys in _longer(first, factor).items()}
    return replace(chosen, **sections, then=then)


def _length(phase: Study) -> int:
    """Return the rounds of training of a phase; an algorithm that fits clusters first has its own number of them."""
    return _tuning(phase) or phase.run.rounds


def _tuning(phase: Study) -> int:
    """Return the algorithm's own number of rounds; 0 if it has none."""
    return getattr(phase.algorithm, "rounds", 0) if facts(phase.algorithm).exchanges else 0


def _longer(phase: Study, factor: float) -> dict[str, Any]:
    """Return the settings of a phase that change with its number of rounds."""
    before = _length(phase)
    after = max(1, round(before * factor))
    plan, ratio = phase.run, after / before
    rounds = plan.rounds + after - before
    run = {
        "rounds": rounds,
        "validate_every": max(1, round(plan.validate_every * ratio)),
        "best_from": plan.best_from if plan.best_from <= 1 else min(rounds, max(1, round(plan.best_from * ratio))),
    }
    own = {"algorithm": {"rounds": after}} if _tuning(phase) else {}
    return {"run": run, "train": {"gamma": phase.train.gamma ** (before / after)}, **own}
