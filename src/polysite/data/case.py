"""One patient: an image of several modalities and the label maps drawn on it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from polysite.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """``image`` is (modality, *space) float32; ``label`` is (label, *space) of 0 and 1, labels may overlap."""

    site: str
    name: str
    image: np.ndarray
    label: np.ndarray
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)
    group: str = ""

    def __post_init__(self) -> None:
        who = f"case {self.name!r} of site {self.site!r}"
        if self.image.shape[1:] != self.label.shape[1:]:
            raise DataError(f"{who}: image {self.image.shape[1:]} and label {self.label.shape[1:]} differ in shape")
        if len(self.spacing) != self.image.ndim - 1:
            raise DataError(f"{who}: {len(self.spacing)} voxel sizes for an image of {self.image.ndim - 1} dimensions")
        if not np.isfinite(self.image).all():
            odd = int(np.count_nonzero(~np.isfinite(self.image)))
            raise DataError(f"{who}: {odd} voxels of the image are NaN or infinite; repair or leave out this case")


def channels(values: np.ndarray, labels: Sequence[tuple[str, Iterable[int]]], where: str) -> np.ndarray:
    """A label map of integers as one channel of 0 and 1 per label.

    >>> channels(np.array([0, 1, 4]), [("WT", (1, 2, 4)), ("ET", (4,))], "seg.nii.gz").tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    if not np.isfinite(values).all():
        raise DataError(f"{where}: the label map holds NaN or infinite values")
    known = {0} | {int(v) for _, members in labels for v in members}
    found = {v.item() for v in np.unique(values)}
    if found - known:
        raise DataError(
            f"{where}: label values {sorted(found - known)} are not declared (declared: {sorted(known)}); "
            "declare them under data.labels or correct the file"
        )
    return np.stack([np.isin(values, list(members)) for _, members in labels]).astype(np.uint8)
