"""Radiomics: 93 features of an image inside a mask, with PyRadiomics' definitions and names, compiled for all cores."""

from polysite.radiomics.extraction import comparable, features
from polysite.radiomics.formulas import NAMES
from polysite.radiomics.settings import Settings

__all__ = ["NAMES", "Settings", "comparable", "features"]
