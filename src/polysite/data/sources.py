"""Where cases come from: the choices of ``[data] name``.

A source says what its images and labels are called and lists the patients of every site; none is opened yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from polysite.data.case import Case, CaseRef
from polysite.data.files import Files
from polysite.data.phantom import (
    GRADES,
    LABELS,
    MODALITIES,
    Hospital,
    draw,
    four_hospitals,
    grade,
    picture,
    three_clinics,
)
from polysite.errors import ConfigError


class Source(Protocol):
    @property
    def task(self) -> str:
        """``segmentation`` or ``classification``."""
        ...

    @property
    def dims(self) -> int: ...

    @property
    def modality_names(self) -> tuple[str, ...]: ...

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels, or the classes."""
        ...

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        """The patients of every site, not opened yet."""
        ...


@dataclass(frozen=True)
class Phantom:
    """Drawn hospitals: brain-like volumes whose scanners and patients differ as those of real hospitals do."""

    shape: tuple[int, ...] = (64, 64, 64)
    sites: Mapping[str, Hospital] = field(default_factory=four_hospitals)

    def __post_init__(self) -> None:
        _check(self.shape, self.sites)

    @property
    def task(self) -> str:
        return "segmentation"

    @property
    def dims(self) -> int:
        return 3

    @property
    def modality_names(self) -> tuple[str, ...]:
        return MODALITIES

    @property
    def label_names(self) -> tuple[str, ...]:
        return LABELS

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        return {name: [self._patient(name, i, seed) for i in range(h.cases)] for name, h in self.sites.items()}

    def _patient(self, site: str, index: int, seed: int) -> CaseRef:
        x, y, z = self.shape
        hospital = self.sites[site]

        def read() -> Case:
            return draw(hospital, site=site, index=index, seed=seed, shape=(x, y, z))

        return CaseRef(
            site=site,
            name=f"{site}-{index:03d}",
            read=read,
            volumes=lambda: dict(zip(LABELS, read().label.sum((1, 2, 3)) / 1000, strict=True)),
            group=grade(hospital, site=site, index=index, seed=seed),
            modalities=len(MODALITIES),
        )


@dataclass(frozen=True)
class PhantomClasses:
    """The same heads, to be told apart: healthy, or with a tumour of low or of high grade."""

    shape: tuple[int, ...] = (32, 32, 32)
    flat: bool = True  # one slice of every patient, where the tumour is largest; otherwise whole volumes
    sites: Mapping[str, Hospital] = field(default_factory=three_clinics)

    def __post_init__(self) -> None:
        _check(self.shape, self.sites)
        if len(self.label_names) < 2:
            raise ConfigError(
                f"data.sites: all patients are of one class, {self.label_names[0]!r}; change low_grade or healthy"
            )

    @property
    def task(self) -> str:
        return "classification"

    @property
    def dims(self) -> int:
        return 2 if self.flat else 3

    @property
    def modality_names(self) -> tuple[str, ...]:
        return MODALITIES

    @property
    def label_names(self) -> tuple[str, ...]:
        """The grades that patients of these hospitals may have."""
        shares = [(h.healthy, h.low_grade, 1 - h.healthy - h.low_grade) for h in self.sites.values()]
        return tuple(g for k, g in enumerate(GRADES) if any(each[k] > 1e-9 for each in shares))

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        return {name: [self._patient(name, i, seed) for i in range(h.cases)] for name, h in self.sites.items()}

    def _patient(self, site: str, index: int, seed: int) -> CaseRef:
        (x, y, z), hospital, grades = self.shape, self.sites[site], self.label_names

        def read() -> Case:
            where = (x, y, z)
            return picture(hospital, site=site, index=index, seed=seed, shape=where, grades=grades, flat=self.flat)

        found = grade(hospital, site=site, index=index, seed=seed)
        return CaseRef(
            site=site,
            name=f"{site}-{index:03d}",
            read=read,
            volumes=lambda: {n: float(n == found) for n in grades},
            group=found,
            category=found,
            modalities=len(MODALITIES),
        )


@dataclass(frozen=True)
class AtHospitals:
    """Cases that nobody here can look at: every hospital names its own, for ``polysite deploy run``."""

    modalities: tuple[str, ...] = ()  # what every hospital must have, in this order
    labels: tuple[str, ...] = ()  # what is outlined, or the classes
    dims: int = 3
    task: Literal["segmentation", "classification"] = "segmentation"

    def __post_init__(self) -> None:
        for name in ("modalities", "labels"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name} is empty: name what every hospital must have; none is opened here")

    @property
    def modality_names(self) -> tuple[str, ...]:
        return self.modalities

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.labels

    def case_refs(self, seed: int) -> Mapping[str, list[CaseRef]]:
        raise ConfigError("the cases of this study are at the hospitals: 'polysite deploy run' asks them")


def _check(shape: tuple[int, ...], sites: Mapping[str, Hospital]) -> None:
    if len(shape) != 3 or min(shape) < 24:
        raise ConfigError(f"data.shape = {list(shape)}: a phantom has three sides of at least 24 voxels")
    if not sites:
        raise ConfigError("data.sites is empty: a federation needs at least one hospital")


SOURCES: Mapping[str, type] = {
    "phantom": Phantom,
    "phantom_classes": PhantomClasses,
    "files": Files,
    "hospitals": AtHospitals,
}
