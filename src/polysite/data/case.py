"""One case: a reference to its files, and its arrays once they are opened."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from polysite.errors import DataError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """An imaging study in memory: image, ground truth and geometry."""

    site: str
    name: str
    image: np.ndarray
    """(modality, *space), float32."""
    label: np.ndarray
    """(label, *space) of 0 and 1; labels may overlap. In a classification (class,), with 1 for the true class."""
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)  # millimetres
    group: str = ""
    affine: np.ndarray | None = None  # voxels to millimetres; None: axes in the order of the spacing
    unit: str = "mm"  # of the spacing; empty if the files do not state it
    prepared: bool = False  # a slice of a prepared volume
    patient: str = ""  # identifier of a patient with several cases; empty if this is the only case

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
    """A case that is not opened yet, with the facts that splits and federations need."""

    site: str
    name: str
    read: Callable[[], Case]
    volumes: Callable[[], Mapping[str, float]]  # of every label, in millilitres
    patient: str = ""  # identifier of a patient with several cases; empty if this is the only case
    group: str = ""  # tumour grade, scanner
    category: str = ""  # class, in a classification
    split: str = ""  # train, validation or test, if the data fix it
    files: tuple[Path, ...] = ()  # files to read; a case without files is not cached
    recipe: str = ""  # how the files are read, as part of a cache key
    modalities: int = 1  # number of modalities
    hidden: tuple[int, ...] = ()  # modalities that a federation hides from this site
    origin: tuple[str, str] = ("", "")  # site and name in the data, if a federation moved the case or it is a slice
    prepared: bool = False  # a slice of a prepared volume

    @property
    def source(self) -> tuple[str, str]:
        """Site and name of the case in the data; of a slice, those of its volume."""
        return self.origin if any(self.origin) else (self.site, self.name)

    def open(self) -> Case:
        """Read the case; hidden modalities are zero."""
        case = self.read()
        if self.hidden and not case.prepared:
            case.image[list(self.hidden)] = 0
        return replace(case, site=self.site, name=self.name, patient=self.patient)


def channels(values: np.ndarray, labels: Sequence[tuple[str, Iterable[int]]], where: str) -> np.ndarray:
    """Convert a label map of integers to one channel of 0 and 1 per label.

    >>> channels(np.array([0, 1, 4]), [("WT", (1, 2, 4)), ("ET", (4,))], "seg.nii.gz").tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    if not np.isfinite(values).all():
        raise DataError(f"{where}: the label map holds NaN or infinite values")
    known = {0} | {int(v) for _, members in labels for v in members}
    undeclared = {v.item() for v in np.unique(values)} - known
    if undeclared:
        raise DataError(
            f"{where}: label values {sorted(undeclared)} are not declared (declared: {sorted(known)}); "
            "declare them in the manifest or under data.labels, or correct the file"
        )
    return np.stack([np.isin(values, list(members)) for _, members in labels]).astype(np.uint8)
