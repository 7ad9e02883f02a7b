"""Ensembles of several trainings of one study: their logits are averaged, hospital by hospital.

from polysite import ensembles

ensembles.train_ensemble(study, "runs/three", trainings=3)
"""

from polysite.ensembles.making import made_ensemble
from polysite.ensembles.trainings import train_ensemble

__all__ = ["made_ensemble", "train_ensemble"]
