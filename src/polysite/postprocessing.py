"""The cleaning of predicted masks that a run chooses on the validation cases of its best model.

Every option of ``polysite.training.cleaning.OPTIONS`` is compared with no cleaning, case by case over all hospitals:
the gain of a case is the difference of its mean Dice. An option is eligible if Wilcoxon's signed-rank test finds its
gains above zero with p < 0.05 after Holm's correction for the number of options; of these the one with the largest mean
gain is taken, and without one nothing is cleaned. Options that lead to the same masks are one test (filling holes where
there is none), and those that change nothing are none. So fewer than five cases that change can choose nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np

from polysite import config
from polysite.config import Study
from polysite.engines.phases import Models, Phase
from polysite.engines.record import Result
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.metrics.statistics import holm, signed_rank
from polysite.models.ensemble import Ensemble
from polysite.training.cleaning import OPTIONS, Clean
from polysite.training.torch_site import TorchSite

LEVEL = 0.05
log = logging.getLogger("polysite")
Record = dict[str, Any]  # of the choice, in result.json


def refuse_remote(study: Study, where: str) -> None:
    """Refuse a choice of the cleaning where the validation cases are in other processes or at real hospitals."""
    if study.train.clean.auto:
        raise ConfigError(
            f"train.clean.auto compares masks in one process and does not work {where}: choose in a simulation, then "
            "set train.clean to what it chose"
        )


def chooser(phases: Sequence[Phase]) -> Callable[[Models], Record]:
    """Return the function that chooses the cleaning of a simulated run, and has all sites apply it."""

    def choose(models: Models) -> Record:
        transport = cast(Simulator, models.phase.transport)
        rows: list[list[float]] = []
        sent = models.payloads(transport.audience)
        for _, site, params, cases in transport.served_cases(models.round, sent, "validation"):
            rows += cast(TorchSite, site).try_cleaning(params, cases, OPTIONS).values()
        chosen, record = decide(np.array(rows).reshape(-1, 1 + len(OPTIONS)))
        for phase in phases:
            cast(Simulator, phase.transport).change_sites(lambda site: _under(cast(TorchSite, site), chosen))
        log.info("cleaning of masks, chosen on %d validation cases: %s", len(rows), chosen)
        return record

    return choose


def _under(site: TorchSite, clean: Clean) -> TorchSite:
    return site.under(replace(site.train, clean=clean))


def decide(scores: np.ndarray) -> tuple[Clean, Record]:
    """Choose a cleaning from the scores of all cases (rows) without cleaning and with each option (columns)."""
    gains = (scores[:, 1:] - scores[:, :1]).T
    sure = _sure(gains)
    mean = gains.mean(1) if gains.size else np.zeros(len(OPTIONS))
    eligible = [k for k in range(len(OPTIONS)) if sure[k] < LEVEL and mean[k] > 0]
    chosen = OPTIONS[max(eligible, key=lambda k: mean[k])] if eligible else Clean()
    tried = [
        {"option": str(o), "gain": float(mean[k]), "p": float(sure[k]), "changed": int((gains[k] != 0).sum())}
        for k, o in enumerate(OPTIONS)
    ]
    return chosen, {"chosen": asdict(chosen), "cases": len(scores), "options": tried}


def _sure(gains: np.ndarray) -> np.ndarray:
    """Return the corrected p-value of every option's gains; 1 if it changes nothing."""
    found = np.ones(len(gains))
    distinct, which = np.unique(gains, axis=0, return_inverse=True)
    tested = np.flatnonzero(distinct.any(1))
    if len(tested):
        adjusted = holm(np.array([signed_rank(distinct[k], "greater") for k in tested]))
        for k, p in zip(tested, adjusted, strict=True):
            found[which.reshape(-1) == k] = p
    return found


def study_of(folder: RunFolder) -> Study:
    """Return the study of a finished run with the cleaning that it chose.

    An ensemble whose members have different splits reads its own from its folder, also where that was moved.
    """
    study = config.parse(folder.config, where=str(folder.path / "config.toml"))
    if isinstance(study.model, Ensemble) and study.split.file and not study.split.validation:
        study = replace(study, split=replace(study.split, file=str(folder.path / "split.csv")))
    return resolved(study, folder.result)


def resolved(study: Study, result: Result) -> Study:
    """Return the study of a finished run with the cleaning that the run chose."""
    if not study.train.clean.auto:
        return study
    found: Mapping[str, Any] = result.cleaning.get("chosen", {})
    return replace(study, train=replace(study.train, clean=Clean(**found)))
