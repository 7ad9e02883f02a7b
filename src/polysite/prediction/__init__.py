"""Predictions of unlabelled scans by finished runs: ``polysite predict``.

``predictor.py`` turns a scan into masks, ``folder.py`` writes them with tables and a preview, ``predicting.py`` goes
through all scans.
"""

from polysite.prediction.predicting import Predicted, predict
from polysite.prediction.predictor import Options, Prediction, Predictor

__all__ = ["Options", "Predicted", "Prediction", "Predictor", "predict"]
