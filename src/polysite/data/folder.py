"""A federation from a plain tree of NIfTI files, and back.

``SITE/CASE/modality.nii.gz`` for every modality, with the truth in ``SITE/CASE/seg.nii.gz`` beside them.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nibabel
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from polysite.data.case import Case, channels
from polysite.errors import ConfigError, DataError

SUFFIX = ".nii.gz"
TOLERANCE = 1e-3  # of the affine, in millimetres


@dataclass(frozen=True)
class Folder:
    path: str = ""
    modalities: tuple[str, ...] = ()  # empty: every file of the first case but the label
    label: str = "seg"
    labels: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"tumour": (1,)}
    )  # name -> values of the file
    exclude: tuple[str, ...] = ()  # sites to leave out

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("data.path is missing: name the folder that holds SITE/CASE/modality.nii.gz")
        if not self.labels:
            raise ConfigError("data.labels is empty: name at least one label and its values in the file")

    @property
    def dims(self) -> int:
        return 3

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(self.labels)

    @property
    def modality_names(self) -> tuple[str, ...]:
        if self.modalities:
            return self.modalities
        first = next((c for cases in self._tree().values() for c in cases), None)
        found = sorted(f.name.removesuffix(SUFFIX) for f in first.glob(f"*{SUFFIX}")) if first else []
        names = tuple(n for n in found if n != self.label)
        if not names:
            raise DataError(f"{first or self.path} holds no image: expected SITE/CASE/modality{SUFFIX}")
        return names

    def load(self, seed: int) -> Mapping[str, list[Case]]:
        """Every case of every site, read and checked."""
        names = self.modality_names
        return {site: [self._read(site, c, names) for c in cases] for site, cases in self._tree().items()}

    def _tree(self) -> dict[str, list[Path]]:
        root = Path(self.path)
        if not root.is_dir():
            raise DataError(f"data.path = {self.path!r} is not a folder")
        sites = [d for d in sorted(root.iterdir()) if d.is_dir() and d.name not in self.exclude]
        if not sites:
            raise DataError(f"{root} holds no site: expected SITE/CASE/modality{SUFFIX}")
        return {s.name: [c for c in sorted(s.iterdir()) if c.is_dir()] for s in sites}

    def _read(self, site: str, case: Path, names: Iterable[str]) -> Case:
        files = {n: case / f"{n}{SUFFIX}" for n in (*names, self.label)}
        missing = [f.name for f in files.values() if not f.exists()]
        if missing:
            raise DataError(f"case {case.name!r} of site {site!r} lacks {', '.join(missing)} in {case}")
        images = {n: _open(f) for n, f in files.items()}
        truth, affine = images.pop(self.label)
        for n, (array, other) in images.items():
            if array.shape != truth.shape or not np.allclose(other, affine, atol=TOLERANCE):
                raise DataError(
                    f"{files[n]} and {files[self.label].name} differ in shape or affine: resample them to one grid"
                )
        return Case(
            site=site,
            name=case.name,
            image=np.stack([a for a, _ in images.values()]).astype(np.float32),
            label=channels(truth, list(self.labels.items()), str(files[self.label])),
            spacing=tuple(float(s) for s in np.linalg.norm(affine[:3, :3], axis=0)),
        )


def _open(file: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        image = nibabel.nifti1.load(file)
        array = np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, TypeError, zlib.error, ImageFileError, HeaderDataError) as problem:
        raise DataError(f"{file} cannot be read as NIfTI: {problem}") from problem
    if array.ndim != 3:
        raise DataError(f"{file} has {array.ndim} dimensions; a volume has 3")
    return array, np.asarray(image.affine)


def write(
    cases: Iterable[Case], root: Path, modalities: Iterable[str], values: Iterable[int], label: str = "seg"
) -> None:
    """Write cases as such a tree; where labels overlap, the value of the last label of the list is written."""
    for case in cases:
        folder = root / case.site / case.name
        folder.mkdir(parents=True, exist_ok=True)
        affine = np.diag([*case.spacing, 1.0])
        truth = np.zeros(case.label.shape[1:], np.uint8)
        for value, channel in zip(values, case.label, strict=True):
            truth[channel > 0] = value
        for name, array in (*zip(modalities, case.image, strict=True), (label, truth)):
            nibabel.save(nibabel.nifti1.Nifti1Image(array, affine), folder / f"{name}{SUFFIX}")
