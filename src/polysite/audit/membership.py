"""Scores by which an attacker tells who was trained on (``metrics/membership.py`` has the areas).

The score of a patient is the loss under reference models less the loss under the model that the attacker has: models
that have not seen the patient in this round, or have seen the patient less. Without any it is the loss alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from polysite.errors import DataError
from polysite.metrics.membership import Group
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

MAX_REFERENCES = 4  # models that losses are calibrated by


def member_scores(
    sites: Mapping[str, TorchSite],
    models: Mapping[str, Tree],
    references: Mapping[str, Sequence[Tree]],
    patients: Mapping[str, str],
) -> dict[str, Group]:
    """Return the scores of the training patients of every hospital, and of its test patients.

    Args:
        sites: The hospitals with their cases.
        models: The model that the attacker has of every hospital, or the common one.
        references: Models to calibrate by, of every hospital; none for an attack by the loss alone.
        patients: Patient of every case; a patient's loss is the mean over the cases.
    """
    scores = dict[str, Group]()
    for name, model in sorted(models.items()):
        site = sites[name]
        if not (site.cases("train") and site.cases("test")):
            continue
        own = _losses(site, model, patients)
        each = [_losses(site, r, patients) for r in references.get(name, ())[:MAX_REFERENCES]]
        usual = [np.mean([e[k] for e in each], axis=0) if each else 0.0 for k in (0, 1)]
        scores[name] = usual[0] - own[0], usual[1] - own[1]
    if not scores:
        raise DataError("no hospital has training cases and test cases to tell apart; raise split.test")
    return scores


def _losses(site: TorchSite, model: Tree, patients: Mapping[str, str]) -> Group:
    """Return the mean loss of every training patient, and of every other one."""

    def of(split: str) -> np.ndarray:
        found: dict[str, list[float]] = {}
        for case, score in site.score(site.lift(model), site.cases(split)).items():
            found.setdefault(patients.get(case, case), []).append(score.loss)
        return np.array([np.mean(found[patient]) for patient in sorted(found)])

    return of("train"), of("test")
