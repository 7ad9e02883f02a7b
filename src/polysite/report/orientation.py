"""Orientation of volumes on a page: radiological, axial slices seen from the feet. Nothing here draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from nibabel.orientations import aff2axcodes, apply_orientation, axcodes2ornt, ornt_transform

from polysite.data.case import Case


def axes_of(case: Case) -> str:
    """Return the orientation of the axes, such as RAS; empty for a 2D image, which has rows and columns already."""
    affine = np.diag([*case.spacing, 1.0]) if case.affine is None else case.affine
    return "" if case.image.ndim == 3 else "".join(aff2axcodes(affine))


def turned(volumes: np.ndarray, axes: str) -> np.ndarray:
    """Return an array (channel, *space) with this orientation as (channel, slice, row, column)."""
    if not axes:
        return volumes[:, None]
    upright: np.ndarray = apply_orientation(np.moveaxis(volumes, 0, -1), _turn(axes)).transpose(3, 2, 1, 0)
    return upright


def turned_size(spacing: Sequence[float], axes: str) -> tuple[float, ...]:
    """Return the voxel size in the order slice, row, column."""
    return tuple(spacing[k] for k in np.argsort(_turn(axes)[:, 0])[::-1]) if axes else (1.0, *spacing)


def _turn(axes: str) -> Any:
    return ornt_transform(axcodes2ornt(axes), axcodes2ornt("LPS"))
