"""The strategies that a tournament compares: those that an assessment proposes, and clusters of patients.

Every strategy trains by the same recipe, the one that was best for one model of all hospitals, and takes the same steps
in two phases: all rounds of the study, and a fifth of them more at half of the learning rate. Strategies of several
models share the first phase, which trains one model for all hospitals; in the last phase they fine-tune it for each
group of hospitals, each hospital (``personal.py``) or each cluster of patients. One model for all, the reference, is
trained by all hospitals in the last phase, too. So strategies differ only in who trains together, and the first phase
is trained once.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polysite import config
from polysite.algorithms.base import facts
from polysite.config import Study
from polysite.errors import ConfigError, nearest
from polysite.heterogeneity.verdict import Strategy, Verdict

Family = Literal["one model", "outlier", "groups", "own", "alone", "patients"]
REFERENCE = "fedavg"
LEFT_OUT = ("fedprox", "graded", "common-modalities")  # variants of one model and of less weight; other data
START = "one model, first phase"
PATIENTS = 24  # training cases; with fewer, clusters of patients would have too few each
CLUSTERS, DIMENSIONS = (2, 3, 4), 10  # of patients: numbers to choose from by BIC, principal components
LAST = 5  # the last phase has a fifth of the rounds, at half of the learning rate
SLOWER = 2
FAMILIES: tuple[Family, ...] = ("one model", "outlier", "groups", "own", "alone", "patients")  # the simplest first


@dataclass(frozen=True)
class Contender:
    """A strategy as a study that can be trained."""

    name: str
    title: str
    family: Family
    study: Study
    reasons: tuple[str, ...] = ()
    continues: bool = True  # after the first phase of one model for all

    @property
    def trainings(self) -> float:
        """Whole trainings that it takes on one inner fold, beside the first phase that strategies share."""
        return 1 / LAST + (0 if self.continues else 1)


def contenders(verdict: Verdict, recipe: Study, cases: int, only: Sequence[str] = ()) -> list[Contender]:
    """Return the strategies to compare, the reference first.

    Args:
        verdict: The recommendations of an assessment.
        recipe: The study with the best recipe for one model of all hospitals.
        cases: Training cases of all hospitals.
        only: Names of the strategies to keep; empty for all. The reference is always among them.
    """
    one_model = config.vary(recipe, {"then": [last_phase(recipe)]})
    found = [Contender(REFERENCE, "One model for all hospitals", "one model", one_model, ("the yardstick",))]
    for strategy in verdict.strategies:
        if strategy.name != REFERENCE and strategy.name not in LEFT_OUT:
            found.append(_proposed(strategy, recipe))
    if recipe.data.task == "segmentation" and cases >= PATIENTS:
        found.append(_patients(recipe))
    names = [c.name for c in found]
    odd = next((name for name in only if name not in names), None)
    if odd is not None:
        raise ConfigError(f"the assessment does not propose a strategy {odd!r}; {nearest(odd, names)}")
    return [c for c in found if not only or c.name in only or c.name == REFERENCE]


def last_phase(shared: Study, algorithm: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the last phase of a strategy, by another algorithm than the study's if one is given."""
    rounds = max(1, shared.run.rounds // LAST)
    phase = {"train": {"lr": shared.train.lr / SLOWER}, "run": {"rounds": rounds, "validate_every": rounds}}
    return phase if algorithm is None else {"algorithm": dict(algorithm), **phase}


def _proposed(strategy: Strategy, recipe: Study) -> Contender:
    mine = tomllib.loads(config.dump(recipe))["algorithm"]
    given = trained_by(strategy.changes["algorithm"], mine)
    grouped = given["name"] == "clustered"
    changes = {
        **strategy.changes,
        "algorithm": mine if grouped else given,
        "then": [last_phase(recipe, given if grouped else None)],
    }
    study, why = config.vary(recipe, changes), strategy.reasons
    return Contender(strategy.name, strategy.title, _family(strategy), study, why, continues=grouped)


def _family(strategy: Strategy) -> Family:
    """Return the family of a proposed strategy; one hospital apart from all others is an outlier."""
    given = strategy.changes["algorithm"]
    sizes = sorted(len(group) for group in given.get("groups", {}).values())
    if given["name"] == "weighted" or (len(sizes) == 2 and sizes[0] == 1):
        return "outlier"
    return "groups" if sizes else "alone" if given["name"] == "local" else "one model"


def trained_by(strategy: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm of a strategy in which the recipe takes the place of FedAvg.

    Factors of hospitals go around the algorithm that averages, inside a moving average of its model.

    >>> adam = {"name": "averaged", "decay": 0.9, "inner": {"name": "fedavg", "lr": 0.1}}
    >>> trained_by({"name": "clustered", "inner": {"name": "fedavg"}}, adam)["inner"]["decay"]
    0.9
    >>> trained_by({"name": "weighted", "weights": {"a": 0.5}, "inner": {"name": "fedavg"}}, adam)
    {'name': 'averaged', 'decay': 0.9, 'inner': {'name': 'weighted', 'weights': {'a': 0.5}, \
'inner': {'name': 'fedavg', 'lr': 0.1}}}
    """
    if strategy["name"] == "fedavg":
        return _with_own(recipe, {k: v for k, v in strategy.items() if k != "name"})
    if strategy["name"] == "weighted" and recipe["name"] == "averaged":
        return {**recipe, "inner": trained_by(strategy, recipe["inner"])}
    inner = {"inner": trained_by(strategy["inner"], recipe)} if "inner" in strategy else {}
    return {**strategy, **inner}


def _with_own(recipe: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with settings of the averaging algorithm, such as equal weights, at its innermost."""
    if "inner" in recipe:
        return {**recipe, "inner": _with_own(recipe["inner"], own)}
    return {**recipe, **own}


def _patients(recipe: Study) -> Contender:
    own = {"name": "cfft", "components": list(CLUSTERS), "dimensions": DIMENSIONS}
    tuned = last_phase(recipe, own)
    rounds = tuned["run"]["rounds"]
    tuned["algorithm"]["rounds"], tuned["run"] = rounds, {"rounds": rounds + EXCHANGES}
    why = "scanners or protocols may differ inside a hospital; patients are grouped by the radiomics of their scans"
    study = config.vary(recipe, {"then": [tuned]})
    return Contender("patients", "A model for each cluster of patients", "patients", study, (why,))


EXCHANGES = 60  # room for the fit of the clusters, beside the rounds of fine-tuning


def ends_in_clusters(study: Study) -> bool:
    """Return whether a study ends with a model per cluster of patients, which nothing can go on from."""
    return any(facts(phase.algorithm).ends_study for phase in config.phases(study))


def unselected(study: Study) -> Study:
    """Return a study in which no phase chooses anything by the validation cases: it serves its last models.

    So the scores of the validation cases are those of cases that nothing was chosen by.
    """
    plain = tomllib.loads(config.dump(study))
    then = [_last(phase) for phase in plain.get("then", ())]
    return config.vary(study, {"run": _last(plain)["run"], **({"then": then} if then else {})})


def _last(phase: Mapping[str, Any]) -> dict[str, Any]:
    rounds = phase["run"]["rounds"]
    own: dict[str, Any] = dict(phase.get("algorithm", {}))
    if own.get("name") == "cfft":
        own["choose"] = False
    run = {**phase["run"], "validate_every": rounds, "best_from": 1}
    return {**phase, "run": run, **({"algorithm": own} if own else {})}
