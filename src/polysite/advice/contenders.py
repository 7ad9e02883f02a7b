"""The strategies that a tournament compares: those that an assessment proposes, and clusters of patients.

Every strategy trains with the settings of the study, and takes the same steps in two phases: all rounds of the study,
and a fifth of them more at half of the learning rate. Strategies of several models share the first phase, which trains
one model for all hospitals; in the last phase they fine-tune it for each group of hospitals, each hospital
(``personal.py``) or each cluster of patients. One model for all, the reference, is trained by all hospitals in the last
phase, too. So strategies differ only in who trains together, and the first phase is trained once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from polysite import config
from polysite.algorithms.base import Algorithm, facts
from polysite.algorithms.cfft import Cfft
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.interpolated import Interpolated
from polysite.algorithms.local import Local
from polysite.algorithms.weighted import Weighted
from polysite.config import Study, Then, ThenRun, ThenTrain
from polysite.errors import ConfigError, nearest
from polysite.heterogeneity.verdict import Strategy, Verdict

Family = Literal["one model", "outlier", "groups", "own", "alone", "patients"]
REFERENCE = "fedavg"
LEFT_OUT = ("fedprox", "graded", "common-modalities")  # variants of one model and of less weight; other data
PATIENTS = 24  # training cases; with fewer, clusters of patients would have too few each
CLUSTERS, DIMENSIONS = (2, 3, 4), 10  # of patients: numbers to choose from by BIC, principal components
EXCHANGES = 60  # room for the fit of the clusters, beside the rounds of fine-tuning
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
    start: "Contender | None" = None  # the first phases, if another contender trains them: that one
    share: float = 0.0  # of a hospital's own model in its prediction; 0 for a strategy without own models

    @property
    def trainings(self) -> float:
        """Whole trainings that it takes on one inner fold, beside the first phase that strategies share."""
        return 1 / LAST + (0 if self.start else 1)

    @property
    def rank(self) -> int:
        """How simple it is; 0 for the simplest."""
        return FAMILIES.index(self.family)

    @property
    def ends_in_clusters(self) -> bool:
        """Whether it ends with a model per cluster of patients, which nothing can go on from."""
        return any(facts(phase.algorithm).ends_study for phase in config.phases(self.study))

    def own(self, share: float, sites: Sequence[str]) -> "Contender":
        """Return models of all hospitals, fine-tuned after this strategy, as a strategy.

        One model for all is fine-tuned in the place of its last phase.
        """
        start = self.start if self.name == REFERENCE and self.start else self
        last = last_phase(start.study, Interpolated(fixed=dict.fromkeys(sites, share)))
        between = "" if share == 1 else f", {share:.0%} of the way to it"
        return Contender(
            f"own {share:g} after {self.name}",
            f"One model, fine-tuned at every hospital{between}",
            "own",
            replace(start.study, then=(*start.study.then, last)),
            ("hospitals may outline or scan in their own way",),
            start,
            share,
        )


def contenders(verdict: Verdict, base: Study, cases: int, only: Sequence[str] = ()) -> list[Contender]:
    """Return the strategies to compare, the reference first; it starts from FedAvg as the study has it.

    Args:
        verdict: The recommendations of an assessment.
        base: The study, by FedAvg.
        cases: Training cases of all hospitals.
        only: Names of the strategies to keep; empty for all. The reference is always among them.
    """
    given = Contender("one model, first phase", "FedAvg as given", "one model", base)
    one_model = replace(base, then=(last_phase(base),))
    found = [Contender(REFERENCE, "One model for all hospitals", "one model", one_model, ("the yardstick",), given)]
    for strategy in verdict.strategies:
        if strategy.name != REFERENCE and strategy.name not in LEFT_OUT:
            found.append(_proposed(strategy, given))
    if base.data.task == "segmentation" and cases >= PATIENTS:
        found.append(_patients(given))
    names = [c.name for c in found]
    odd = next((name for name in only if name not in names), None)
    if odd is not None:
        raise ConfigError(f"the assessment does not propose a strategy {odd!r}; {nearest(odd, names)}")
    return [c for c in found if not only or c.name in only or c.name == REFERENCE]


def last_phase(shared: Study, algorithm: Algorithm[Any] | None = None) -> Then:
    """Return the last phase of a strategy, by another algorithm than the study's if one is given."""
    rounds = max(1, shared.run.rounds // LAST)
    return Then(algorithm, ThenTrain(lr=shared.train.lr / SLOWER), ThenRun(rounds=rounds, validate_every=rounds))


def _proposed(strategy: Strategy, given: Contender) -> Contender:
    base = given.study
    proposed = config.vary(base, strategy.changes)
    algorithm = trained_by(proposed.algorithm, base.algorithm)
    grouped = isinstance(algorithm, Clustered)
    first, last = (base.algorithm, last_phase(base, algorithm)) if grouped else (algorithm, last_phase(base))
    chosen, start = replace(proposed, algorithm=first, then=(last,)), given if grouped else None
    return Contender(strategy.name, strategy.title, _family(algorithm), chosen, strategy.reasons, start)


def _family(algorithm: Algorithm[Any]) -> Family:
    """Return the family of a proposed strategy; one hospital apart from all others is an outlier."""
    if isinstance(algorithm, Clustered):
        sizes = sorted(map(len, algorithm.groups.values()))
        return "outlier" if len(sizes) == 2 and sizes[0] == 1 else "groups"
    return "outlier" if isinstance(algorithm, Weighted) else "alone" if isinstance(algorithm, Local) else "one model"


def trained_by(strategy: Algorithm[Any], fedavg: Algorithm[Any]) -> Algorithm[Any]:
    """Return the algorithm of a strategy in which FedAvg has the settings of the study, but for equal weights.

    >>> trained_by(Clustered(inner=FedAvg(uniform=True)), FedAvg(lr=0.1)).inner
    FedAvg(lr=0.1, epochs=None, steps=None, uniform=True, server=None)
    """
    if isinstance(strategy, FedAvg) and isinstance(fedavg, FedAvg):
        return replace(fedavg, uniform=fedavg.uniform or strategy.uniform)
    if isinstance(strategy, Clustered | Weighted):
        return replace(strategy, inner=trained_by(strategy.inner, fedavg))
    return strategy


def _patients(given: Contender) -> Contender:
    last = last_phase(given.study)
    rounds = last.run.rounds or 1
    own = Cfft(components=CLUSTERS, dimensions=DIMENSIONS, rounds=rounds)
    chosen = replace(given.study, then=(replace(last, algorithm=own, run=ThenRun(rounds=rounds + EXCHANGES)),))
    why = "scanners or protocols may differ inside a hospital; patients are grouped by the radiomics of their scans"
    return Contender("patients", "A model for each cluster of patients", "patients", chosen, (why,), given)


def unselected(study: Study) -> Study:
    """Return a study in which no phase chooses anything by the validation cases: it serves its last models.

    So the scores of the validation cases are those of cases that nothing was chosen by.
    """
    run = replace(study.run, validate_every=study.run.rounds, best_from=1)
    return replace(study, run=run, then=tuple(map(_unselected, study.then, config.phases(study)[1:])))


def _unselected(then: Then, phase: Study) -> Then:
    run = replace(then.run, validate_every=phase.run.rounds, best_from=1)
    own = then.algorithm
    return replace(then, run=run, algorithm=replace(own, choose=False) if isinstance(own, Cfft) else own)
