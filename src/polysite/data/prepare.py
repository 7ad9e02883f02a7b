"""From a raw case to what a network sees: foreground crop, z-score, padding to the patch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polysite.data.case import Case


def prepare(case: Case, patch: Sequence[int]) -> Case:
    """Crop to the foreground, normalise every modality over its non-zero voxels, pad with zeros to the patch."""
    box = _foreground(case)
    image, label = case.image[:, *box], case.label[:, *box]
    margins = [
        (0, 0),
        *(((p - s) // 2, (p - s + 1) // 2) if s < p else (0, 0) for s, p in zip(image.shape[1:], patch, strict=True)),
    ]
    image = np.pad(np.stack([z_score(m) for m in image]), margins)
    return replace(case, image=image, label=np.pad(label, margins))


def z_score(modality: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 over the non-zero voxels; zeros (background, a missing modality) stay zero.

    >>> z_score(np.array([0, 1, 3], np.float32)).tolist()
    [0.0, -1.0, 1.0]
    """
    inside = modality != 0
    values = modality[inside].astype(np.float64)
    if not values.size:
        return modality.astype(np.float32)
    spread = values.std()
    return np.where(inside, (modality - values.mean()) / (spread if spread > 0 else 1), 0).astype(np.float32)


def _foreground(case: Case) -> tuple[slice, ...]:
    """The box around everything that is not zero; a label outside the image is kept, and then counts as missed."""
    inside = (case.image != 0).any(0) | (case.label != 0).any(0)
    if not inside.any():
        return tuple(slice(None) for _ in inside.shape)
    spans = (
        np.flatnonzero(inside.any(tuple(a for a in range(inside.ndim) if a != axis))) for axis in range(inside.ndim)
    )
    return tuple(slice(int(s[0]), int(s[-1]) + 1) for s in spans)
