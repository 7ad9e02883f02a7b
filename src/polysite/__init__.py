"""Federated learning for medical image segmentation, for hospitals whose data differ."""

import warnings
from importlib import import_module
from typing import Any

from polysite.algorithms import ALGORITHMS, SERVER_OPTIMISERS

_ALGORITHMS = (place.split(":") for place in (*ALGORITHMS.values(), *SERVER_OPTIMISERS.values()))
_HOME = {
    **{name: f"polysite.algorithms.{module}" for module, name in _ALGORITHMS if not name.isupper()},
    "Study": "polysite.config",
    "Phantom": "polysite.data.sources",
    "Files": "polysite.data.files",
    "Prepare": "polysite.data.prepare",
    "Hospital": "polysite.data.phantom",
    "Slices": "polysite.data.slices",
    "Split": "polysite.data.split",
    "Train": "polysite.training.settings",
    "Guard": "polysite.engines.guard_state",
    "Plan": "polysite.engines.plan",
    "Engine": "polysite.study",
    "UNet": "polysite.models.unet",
    "Monai": "polysite.models.monai",
    "DenseNet": "polysite.models.densenet",
    "DenseNetSub": "polysite.models.sub_encoders",
    "PhantomClasses": "polysite.data.sources",
    "UNetSub": "polysite.models.sub_encoders",
    "Assess": "polysite.heterogeneity.exchange",
    "Bundled": "polysite.models.encoders",
    "Clean": "polysite.training.cleaning",
    "MedicalNet": "polysite.models.encoders",
    "Run": "polysite.study",
    "EmptyMaskPolicy": "polysite.metrics.measures",
    "SPEEDS": "polysite.costs.speeds",
    "Speeds": "polysite.costs.speeds",
    "assess": "polysite.assessment",
    "cost": "polysite.study",
    "train_ensemble": "polysite.ensembles.trainings",
    "evaluate": "polysite.evaluation",
    "plan": "polysite.planning",
    "predict": "polysite.prediction",
    "serve_model": "polysite.export.serve",
    "compare": "polysite.report.comparing",
    "train": "polysite.study.training",
    "resume": "polysite.study.training",
}
_RENAMED = {"Policy": "EmptyMaskPolicy", "forecast": "cost", "run": "train", "survey": "assess"}  # until 0.3


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``polysite --help`` need not wait for torch."""
    if name in _RENAMED:
        message = f"'polysite.{name}' is now 'polysite.{_RENAMED[name]}'; the old name goes in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'polysite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = sorted(_HOME)
