"""One patient: before the files are opened, and after."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from polysite.errors import DataError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """``image`` is (modality, *space) float32. ``label`` is (label, *space) of 0 and 1, where labels may overlap; in a
    classification it is (class,), with 1 for what the image shows."""

    site: str
    name: str
    image: np.ndarray
    label: np.ndarray
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)  # millimetres
    group: str = ""
    affine: np.ndarray | None = None  # voxels to millimetres; None: the axes of the spacing
    unit: str = "mm"  # of the spacing; nothing where the files do not say

    def __post_init__(self) -> None:
        who = f"case {self.name!r} of site {self.site!r}"
        if self.label.ndim > 1 and self.image.shape[1:] != self.label.shape[1:]:
            raise DataError(f"{who}: image {self.image.shape[1:]} and label {self.label.shape[1:]} differ in shape")
        if len(self.spacing) != self.image.ndim - 1:
            raise DataError(f"{who}: {len(self.spacing)} voxel sizes for an image of {self.image.ndim - 1} dimensions")
        if not np.isfinite(self.image).all():
            odd = int(np.count_nonzero(~np.isfinite(self.image)))
            raise DataError(f"{who}: {odd} voxels of the image are NaN or infinite; repair or leave out this case")


@dataclass(frozen=True, eq=False)
class CaseRef:
    """A case that has not been opened: all that splits and federations need to know of it."""

    site: str
    name: str
    read: Callable[[], Case]
    volumes: Callable[[], Mapping[str, float]]  # of every label, in millilitres
    patient: str = ""  # the patient, where one has several cases; empty: this is the only case
    group: str = ""  # tumour grade, scanner
    category: str = ""  # the class, in a classification
    split: str = ""  # train, validation or test, where that is fixed
    files: tuple[Path, ...] = ()  # what is read; none: nothing that could be cached
    recipe: str = ""  # how they are read, in words
    modalities: int = 1  # how many
    hidden: tuple[int, ...] = ()  # modalities that this hospital must not see
    origin: tuple[str, str] = ("", "")  # site and name in the data, where a federation moved it

    @property
    def source(self) -> tuple[str, str]:
        """Site and name in the data."""
        return self.origin if any(self.origin) else (self.site, self.name)

    def open(self) -> Case:
        """Read it; hidden modalities are zero."""
        case = self.read()
        if self.hidden:
            case.image[list(self.hidden)] = 0
        return replace(case, site=self.site, name=self.name)


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
            "declare them in the manifest or under data.labels, or correct the file"
        )
    return np.stack([np.isin(values, list(members)) for _, members in labels]).astype(np.uint8)
