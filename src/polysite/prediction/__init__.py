"""Predictions of unlabelled scans by a finished run: ``polysite predict``.

``predictor.py`` turns a scan into masks, ``folder.py`` writes them with tables and a preview, ``predicting.py`` goes
through all scans.
"""

from polysite.prediction.predicting import Predicted, predict
from polysite.prediction.predictor import Prediction, Predictor

__all__ = ["Predicted", "Prediction", "Predictor", "predict"]
