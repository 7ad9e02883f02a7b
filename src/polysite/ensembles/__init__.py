"""Ensembles of finished runs: their logits are averaged, hospital by hospital.

from polysite import ensembles

ensembles.ensemble(["runs/fold0", "runs/fold1"], "runs/ensemble", weights="validation")
"""

from polysite.ensembles.making import ensemble

__all__ = ["ensemble"]
