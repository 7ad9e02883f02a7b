"""Cleaning of predicted masks: small components, all but the largest component, holes.

A component is a set of voxels that touch by a face, an edge or a corner. A hole is background that does not reach the
border of the image through faces. Steps apply in this order to every label by itself: remove small components, keep the
largest one, fill holes. Where a voxel has at most one label, only voxels without any label are filled, label by label.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from polysite.errors import ConfigError, DataError

Mask = np.ndarray  # of bool


@dataclass(frozen=True)
class Clean:
    """Cleaning of predicted masks, in validation, test and predictions; none by default.

    Args:
        largest: Keep only the largest component of every label.
        smallest: Remove components of a label that are smaller than this; 0 removes none.
        unit: Unit of ``smallest``: voxels, or mm for cubic (in 2D square) millimetres.
        fill: Fill the holes of every label.
    """

    largest: bool = False
    smallest: float = 0.0
    unit: Literal["voxels", "mm"] = "voxels"
    fill: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.smallest < float("inf"):
            raise ConfigError(f"train.clean.smallest = {self.smallest} must be a size, 0 or more")

    @property
    def does(self) -> bool:
        """Whether masks are changed."""
        return self.largest or self.smallest > 0 or self.fill

    def __str__(self) -> str:
        unit = "voxels" if self.unit == "voxels" else "mm³"
        steps = [f"components below {self.smallest:g} {unit} removed"] * (self.smallest > 0)
        steps += ["largest component kept"] * self.largest + ["holes filled"] * self.fill
        return ", ".join(steps) or "none"


def cleaned(masks: Mask, clean: Clean, spacing: Sequence[float], unit: str = "mm", exclusive: bool = False) -> Mask:
    """Return the cleaned masks of a case.

    Args:
        masks: The masks (label, *space).
        clean: What to do.
        spacing: Size of a voxel.
        unit: Unit of the spacing; empty if it is not known.
        exclusive: Whether a voxel has at most one label.
    """
    least = clean.smallest
    if clean.smallest and clean.unit == "mm":
        if unit != "mm":
            raise DataError(
                "train.clean.unit = 'mm' needs scans with a voxel size in millimetres; give the size in voxels instead"
            )
        least = clean.smallest / prod(spacing)
    kept = np.stack([_components(mask, least, clean.largest) for mask in masks])
    if not clean.fill:
        return kept
    for k, mask in enumerate(kept):
        holes = _holes(mask)
        kept[k] = mask | (holes & ~kept.any(0) if exclusive else holes)
    return kept


def _components(mask: Mask, least: float, largest: bool) -> Mask:
    """Return the components that are at least so large, or the largest of them."""
    from scipy import ndimage

    box = _box(mask)
    if box is None or not (least or largest):
        return mask
    marks, _ = ndimage.label(mask[box], np.ones((3,) * mask.ndim))
    sizes = np.bincount(marks.reshape(-1))
    sizes[0] = 0
    keep = sizes >= max(least, 1)
    if largest:
        keep &= np.arange(len(sizes)) == sizes.argmax()
    found = np.zeros_like(mask)
    found[box] = keep[marks]
    return found


def _holes(mask: Mask) -> Mask:
    """Return the background that does not reach the border."""
    from scipy import ndimage

    found, box = np.zeros_like(mask), _box(mask)
    if box is None:
        return found
    inner = (slice(1, -1),) * mask.ndim
    marks, count = ndimage.label(~np.pad(mask[box], 1))
    outside = marks[(0,) * mask.ndim]
    if count > 1:
        found[box] = ((marks != outside) & (marks != 0))[inner]
    return found


def _box(mask: Mask) -> tuple[slice, ...] | None:
    """Return the smallest box around a mask; None if it is empty."""
    lines = [np.flatnonzero(mask.any(tuple(a for a in range(mask.ndim) if a != axis))) for axis in range(mask.ndim)]
    return tuple(slice(int(at[0]), int(at[-1]) + 1) for at in lines) if len(lines[0]) else None
