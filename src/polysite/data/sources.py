"""Where cases come from: the choices of ``[data] name``.

A source says what its images and labels are called and lists the patients of every site; none is opened yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from polysite.data.case import Case, Patient
from polysite.data.files import Files
from polysite.data.phantom import LABELS, MODALITIES, Hospital, draw, four_hospitals, grade
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

    def patients(self, seed: int) -> Mapping[str, list[Patient]]:
        """The patients of every site, not opened yet."""
        ...


@dataclass(frozen=True)
class Phantom:
    """Drawn hospitals: brain-like volumes whose scanners and patients differ as those of real hospitals do."""

    shape: tuple[int, ...] = (64, 64, 64)
    sites: Mapping[str, Hospital] = field(default_factory=four_hospitals)

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 24:
            raise ConfigError(f"data.shape = {list(self.shape)}: a phantom has three sides of at least 24 voxels")
        if not self.sites:
            raise ConfigError("data.sites is empty: a federation needs at least one hospital")

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

    def patients(self, seed: int) -> Mapping[str, list[Patient]]:
        return {name: [self._patient(name, i, seed) for i in range(h.cases)] for name, h in self.sites.items()}

    def _patient(self, site: str, index: int, seed: int) -> Patient:
        x, y, z = self.shape
        hospital = self.sites[site]

        def read() -> Case:
            return draw(hospital, site=site, index=index, seed=seed, shape=(x, y, z))

        return Patient(
            site=site,
            name=f"{site}-{index:03d}",
            read=read,
            volumes=lambda: dict(zip(LABELS, read().label.sum((1, 2, 3)) / 1000, strict=True)),
            group=grade(hospital, site=site, index=index, seed=seed),
            modalities=len(MODALITIES),
        )


SOURCES: Mapping[str, type] = {"phantom": Phantom, "files": Files}
