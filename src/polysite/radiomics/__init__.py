"""Radiomics: 93 features of an image inside a mask, with PyRadiomics' definitions and names, compiled for all cores.

`features(image, mask)` takes arrays; `polysite.training.radiomics.features` takes tensors and counts on their device.
Both use the same formulas.
"""

from polysite.radiomics.extraction import comparable, features
from polysite.radiomics.formulas import NAMES
from polysite.radiomics.settings import Settings

__all__ = ["NAMES", "Settings", "comparable", "features"]
