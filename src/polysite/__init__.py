"""Federated learning for medical image segmentation, for hospitals whose data differ."""

from importlib import import_module
from typing import Any

_HOME = {
    "Study": "polysite.config",
    "FedAvg": "polysite.algorithms.fedavg",
    "Local": "polysite.algorithms.local",
    "Scaffold": "polysite.algorithms.scaffold",
    "Phantom": "polysite.data.sources",
    "Files": "polysite.data.files",
    "Prepare": "polysite.data.prepare",
    "Hospital": "polysite.data.phantom",
    "Split": "polysite.data.split",
    "Train": "polysite.train.settings",
    "Plan": "polysite.engines.rounds",
    "UNet": "polysite.models.unet",
    "DenseNet": "polysite.models.densenet",
    "Run": "polysite.study",
    "run": "polysite.study",
    "resume": "polysite.study",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``polysite --help`` need not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'polysite' has no attribute {name!r}")


__all__ = sorted(_HOME)
