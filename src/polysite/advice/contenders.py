"""The strategies that a tournament compares: those that an assessment proposes, and clusters of patients.

Every strategy trains with the settings of the study, and takes the same steps in two phases: all rounds of the study,
and a fifth of them more at half of the learning rate. Strategies of several models share the first phase, which trains
one model for all hospitals; in the last phase they fine-tune it for each group of hospitals, each hospital
(``personal.py``) or each cluster of patients. One model for all, the reference, is trained by all hospitals in the last
phase, too. So strategies differ only in who trains together, and the first phase is trained once.
"""

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


def contenders(verdict: Verdict, base: Study, cases: int, only: Sequence[str] = ()) -> list[Contender]:
    """Return the strategies to compare, the reference first.

    Args:
        verdict: The recommendations of an assessment.
        base: The study, by FedAvg.
        cases: Training cases of all hospitals.
        only: Names of the strategies to keep; empty for all. The reference is always among them.
    """
    one_model = config.vary(base, {"then": [last_phase(base)]})
    found = [Contender(REFERENCE, "One model for all hospitals", "one model", one_model, ("the yardstick",))]
    for strategy in verdict.strategies:
        if strategy.name != REFERENCE and strategy.name not in LEFT_OUT:
            found.append(_proposed(strategy, base))
    if base.data.task == "segmentation" and cases >= PATIENTS:
        found.append(_patients(base))
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


def _proposed(strategy: Strategy, base: Study) -> Contender:
    mine = config.plain(base)["algorithm"]
    given = trained_by(strategy.changes["algorithm"], mine)
    grouped = given["name"] == "clustered"
    changes = {
        **strategy.changes,
        "algorithm": mine if grouped else given,
        "then": [last_phase(base, given if grouped else None)],
    }
    study, why = config.vary(base, changes), strategy.reasons
    return Contender(strategy.name, strategy.title, _family(strategy), study, why, continues=grouped)


def _family(strategy: Strategy) -> Family:
    """Return the family of a proposed strategy; one hospital apart from all others is an outlier."""
    given = strategy.changes["algorithm"]
    sizes = sorted(len(group) for group in given.get("groups", {}).values())
    if given["name"] == "weighted" or (len(sizes) == 2 and sizes[0] == 1):
        return "outlier"
    return "groups" if sizes else "alone" if given["name"] == "local" else "one model"


def trained_by(strategy: Mapping[str, Any], fedavg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm of a strategy in which FedAvg has the settings of the study, where it has none of its own.

    >>> trained_by({"name": "clustered", "inner": {"name": "fedavg", "uniform": True}}, {"name": "fedavg", "lr": 0.1})
    {'name': 'clustered', 'inner': {'name': 'fedavg', 'lr': 0.1, 'uniform': True}}
    """
    if strategy["name"] == "fedavg":
        return {**fedavg, **strategy}
    inner = {"inner": trained_by(strategy["inner"], fedavg)} if "inner" in strategy else {}
    return {**strategy, **inner}


def _patients(base: Study) -> Contender:
    own = {"name": "cfft", "components": list(CLUSTERS), "dimensions": DIMENSIONS}
    tuned = last_phase(base, own)
    rounds = tuned["run"]["rounds"]
    tuned["algorithm"]["rounds"], tuned["run"] = rounds, {"rounds": rounds + EXCHANGES}
    why = "scanners or protocols may differ inside a hospital; patients are grouped by the radiomics of their scans"
    study = config.vary(base, {"then": [tuned]})
    return Contender("patients", "A model for each cluster of patients", "patients", study, (why,))


EXCHANGES = 60  # room for the fit of the clusters, beside the rounds of fine-tuning


def ends_in_clusters(study: Study) -> bool:
    """Return whether a study ends with a model per cluster of patients, which nothing can go on from."""
    return any(facts(phase.algorithm).ends_study for phase in config.phases(study))


def unselected(study: Study) -> Study:
    """Return a study in which no phase chooses anything by the validation cases: it serves its last models.

    So the scores of the validation cases are those of cases that nothing was chosen by.
    """
    plain = config.plain(study)
    then = [_last(phase) for phase in plain.get("then", ())]
    return config.vary(study, {"run": _last(plain)["run"], **({"then": then} if then else {})})


def _last(phase: Mapping[str, Any]) -> dict[str, Any]:
    rounds = phase["run"]["rounds"]
    own: dict[str, Any] = dict(phase.get("algorithm", {}))
    if own.get("name") == "cfft":
        own["choose"] = False
    run = {**phase["run"], "validate_every": rounds, "best_from": 1}
    return {**phase, "run": run, **({"algorithm": own} if own else {})}
