"""Sources of cases: the choices of ``[data] name``.

A source names its modalities and labels, and lists the cases of every site without opening them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, NoReturn

from polysite.data import phantom
from polysite.data.case import Case, CaseRef
from polysite.data.files import Files
from polysite.data.phantom import Hospital
from polysite.errors import ConfigError, DataError


class _Drawn:
    """What sources of phantoms have in common."""

    shape: tuple[int, ...]
    sites: Mapping[str, Hospital]
    seed: int | None

    task: ClassVar[str] = "segmentation"
    modality_names: ClassVar[tuple[str, ...]] = phantom.MODALITIES

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 24:
            raise ConfigError(f"data.shape = {list(self.shape)}: a phantom has three sides of at least 24 voxels")
        if not self.sites:
            raise ConfigError("data.sites is empty: a federation needs at least one hospital")

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        """Return the cases of every hospital, not drawn yet."""
        seed = seed if self.seed is None else self.seed
        return {name: [self._ref(name, i, seed) for i in range(h.cases)] for name, h in self.sites.items()}

    def _ref(self, site: str, index: int, seed: int) -> CaseRef:
        hospital = self.sites[site]
        grade = phantom.grade(hospital, site=site, index=index, seed=seed)
        read = partial(self._drawn, hospital, site, index, seed)
        return CaseRef(
            site=site,
            name=f"{site}-{index:03d}",
            read=read,
            volumes=lambda: self._volumes(grade, read),
            group=grade,
            category=grade if self.task == "classification" else "",
            modalities=len(self.modality_names),
        )

    def _drawn(self, hospital: Hospital, site: str, index: int, seed: int) -> Case:
        x, y, z = self.shape
        return phantom.draw(hospital, site=site, index=index, seed=seed, shape=(x, y, z))

    def _volumes(self, grade: str, read: Callable[[], Case]) -> Mapping[str, float]:
        return dict(zip(phantom.LABELS, read().label.sum((1, 2, 3)) / 1000, strict=True))


@dataclass(frozen=True)
class Phantom(_Drawn):
    """Simulated hospitals: brain phantoms with tumours; scanners and patients differ from hospital to hospital.

    Args:
        shape: Size of a volume in voxels.
        sites: Hospitals by name.
        seed: Seed of the patients; None for the study's. Set it to train on the same patients with other seeds.
    """

    shape: tuple[int, ...] = (64, 64, 64)
    sites: Mapping[str, Hospital] = field(default_factory=phantom.four_hospitals)
    seed: int | None = None

    dims: ClassVar[int] = 3
    label_names: ClassVar[tuple[str, ...]] = phantom.LABELS


@dataclass(frozen=True)
class PhantomClasses(_Drawn):
    """Brain phantoms for a classification: healthy, or with a low-grade or high-grade tumour.

    Args:
        shape: Size of a volume in voxels.
        flat: Use one slice of every volume, where the tumour is largest, instead of the whole volume.
        sites: Hospitals by name.
        seed: Seed of the patients; None for the study's. Set it to train on the same patients with other seeds.
    """

    shape: tuple[int, ...] = (32, 32, 32)
    flat: bool = True
    sites: Mapping[str, Hospital] = field(default_factory=phantom.three_clinics)
    seed: int | None = None

    task: ClassVar[str] = "classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.label_names) < 2:
            raise ConfigError(
                f"data.sites: all patients are of one class, {self.label_names[0]!r}; change low_grade or healthy"
            )

    @property
    def dims(self) -> int:
        """Number of spatial dimensions: 2 for slices, 3 for volumes."""
        return 2 if self.flat else 3

    @property
    def label_names(self) -> tuple[str, ...]:
        """Grades that patients of these hospitals may have."""
        shares = [(h.healthy, h.low_grade, 1 - h.healthy - h.low_grade) for h in self.sites.values()]
        return tuple(g for k, g in enumerate(phantom.GRADES) if any(each[k] > 1e-9 for each in shares))

    def _drawn(self, hospital: Hospital, site: str, index: int, seed: int) -> Case:
        x, y, z = self.shape
        return phantom.picture(
            hospital, site=site, index=index, seed=seed, shape=(x, y, z), grades=self.label_names, flat=self.flat
        )

    def _volumes(self, grade: str, read: Callable[[], Case]) -> Mapping[str, float]:
        return {name: float(name == grade) for name in self.label_names}


class _Named:
    """What sources have in common whose settings name the modalities and labels."""

    modalities: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def modality_names(self) -> tuple[str, ...]:
        """Names of the modalities."""
        return self.modalities

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels to segment, or classes."""
        return self.labels


@dataclass(frozen=True)
class AtHospitals(_Named):
    """Cases that stay at the hospitals: each hospital configures its own, for ``polysite deploy run``.

    Args:
        modalities: Modalities that every hospital must have, in this order.
        labels: Labels to segment, or classes.
        dims: Spatial dimensions of the images.
        task: Segmentation or classification.
    """

    modalities: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    dims: int = 3
    task: Literal["segmentation", "classification"] = "segmentation"

    def __post_init__(self) -> None:
        for name in ("modalities", "labels"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name} is empty: name what every hospital must have; none is opened here")

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        """Refuse: no case can be listed here."""
        raise ConfigError("the cases of this study are at the hospitals: 'polysite deploy run' asks them")


@dataclass(frozen=True)
class Counted(_Named):
    """Cases that are only counted, to estimate costs before the data are available.

    Args:
        sizes: Number of cases of every site.
        modalities: Names of the modalities.
        labels: Labels to segment, taken to have equal volumes; or classes, taken to be equally frequent at every site.
        dims: Spatial dimensions of the images.
        task: Segmentation or classification.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    modalities: tuple[str, ...] = ("flair", "t1", "t1ce", "t2")
    labels: tuple[str, ...] = ("WT", "TC", "ET")
    dims: int = 3
    task: Literal["segmentation", "classification"] = "segmentation"

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        """Return as many cases as every site has, all of one known group; none can be opened."""
        return {site: [self._ref(site, k) for k in range(count)] for site, count in self.sizes.items()}

    def _ref(self, site: str, index: int) -> CaseRef:
        def absent() -> NoReturn:
            raise DataError(f"the cases of site {site!r} are only counted; name the data under [data]")

        return CaseRef(
            site,
            f"{site}-{index:04d}",
            absent,
            lambda: dict.fromkeys(self.labels, 1.0),
            group="known",
            category=self.labels[index % len(self.labels)] if self.task == "classification" else "",
            modalities=len(self.modalities),
        )


Source = Phantom | PhantomClasses | Files | AtHospitals | Counted

SOURCES: Mapping[str, type[Source]] = {
    "phantom": Phantom,
    "phantom_classes": PhantomClasses,
    "files": Files,
    "hospitals": AtHospitals,
    "counted": Counted,
}
