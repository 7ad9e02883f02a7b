"""What a study will take: steps and bytes of every round, memory and disk at the peak. Nothing is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polysite import config, peak
from polysite.algorithms.base import trials
from polysite.config import Study
from polysite.costs.model import Cost, Load, planned, without_grid
from polysite.costs.rehearsal import Effort, rehearse
from polysite.data.case import SPLITS
from polysite.engines.plan import cohort
from polysite.payload import Payload
from polysite.peak import Peak
from polysite.study.cases import PreparedCases, deal_cases
from polysite.study.sites import POOLED, build_module
from polysite.training.network import Network
from polysite.tree import Tree

Sizes = Mapping[str, Mapping[str, int]]  # number of cases by site and split


def initial_params(study: Study) -> Tree:
    """Return the parameters that every site starts from, without building a site."""
    return Network(build_module(study), replace(study.train, device="cpu", compile=False)).start


def cost(study: Study, grid: bool = True) -> Cost:
    """Forecast the steps, bytes, simulated time and energy of a study. Nothing is trained: the rounds are rehearsed
    with the sizes of its hospitals.

    Args:
        study: The study.
        grid: Count all candidates that fine-tuning chooses from; otherwise only the one that a site keeps.
    """
    done = loads(study)
    return planned(done if grid else without_grid(done), study.cost, study.train.batch)


def loads(
    study: Study,
    look: Callable[[Any, Mapping[str, Payload]], None] | None = None,
    sizes: Sizes | None = None,
    params: Tree | None = None,
) -> list[Mapping[str, Load]]:
    """Return the work and traffic of every site in each round of a study, by rehearsing the rounds.

    Args:
        study: The study.
        look: Sees the server's state and the memories of the sites after every round.
        sizes: Numbers of cases that hospitals reported, where the data are not here; None counts the study's cases.
        params: Initial parameters; None builds the network of the study.
    """
    params = initial_params(study) if params is None else params
    if sizes is None:
        sizes = {site: {k: len(splits[k]) for k in SPLITS} for site, splits in deal_cases(study).items()}
    train = {site: splits["train"] for site, splits in sizes.items() if splits["train"]}
    validation = {site: splits["validation"] for site, splits in sizes.items() if splits["validation"]}
    done: list[Mapping[str, Load]] = []
    for phase in config.phases(study):
        central = {POOLED: sum(train.values())}, {POOLED: sum(validation.values())}
        done += _rehearsed(phase, params, *(central if phase.run.pooled else (train, validation)), done, look)
    return done


def _rehearsed(
    study: Study,
    params: Tree,
    train: Mapping[str, int],
    validation: Mapping[str, int],
    before: Sequence[Mapping[str, Load]],
    look: Callable[[Any, Mapping[str, Payload]], None] | None,
) -> list[Mapping[str, Load]]:
    """Return the load of every site in each round of a phase. The first round includes the model handed over."""
    effort = Effort(study.train.batch, study.train.epochs, study.train.patches, study.train.steps)

    def asked(index: int) -> Sequence[str]:
        return cohort(tuple(sorted(train)), study.run.share, study.seed, len(before) + index)

    plan = study.run
    loads = list(
        rehearse(
            study.algorithm,
            params,
            train,
            effort,
            rounds=plan.rounds,
            cohort=asked,
            validation=validation,
            validate_every=plan.validate_every,
            modalities=len(study.data.modality_names),
            look=look,
        )
    )
    for site in train if before else ():
        last = next((each[site].down for each in reversed(before) if site in each and each[site].down), 0)
        mine = loads[0].get(site, Load())
        loads[0][site] = replace(mine, down=mine.down + last)
    if plan.pooled:
        loads = [{i: replace(load, down=0, up=0) for i, load in each.items()} for each in loads]
    return [{i: replace(load, trials=trials(study.algorithm)) for i, load in each.items()} for each in loads]


def foresee(study: Study, ready: PreparedCases, out: Path) -> Peak:
    """Return the memory and disk that a run of a study takes at its peak; refuse one that cannot fit."""
    module = build_module(study)
    params = Network(module, replace(study.train, device="cpu", compile=False)).start
    cases = sum(c.image.nbytes + c.label.nbytes for splits in ready.values() for k in SPLITS for c in splits[k])
    train = {site: len(splits["train"]) for site, splits in ready.items() if splits["train"]}
    return peak.estimate(study, module, params, cases, train, out).check()
