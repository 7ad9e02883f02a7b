"""Ensembles of finished runs: their logits are averaged, hospital by hospital.

from polysite import ensembles

ensembles.ensemble(["runs/fold0", "runs/fold1"], "runs/ensemble")
ensembles.train_ensemble(study, "runs/three", trainings=3)
"""

from polysite.ensembles.making import ensemble, made_ensemble
from polysite.ensembles.trainings import train_ensemble

__all__ = ["ensemble", "made_ensemble", "train_ensemble"]
