"""Where cases come from: the choices of ``[data] name``.

A source says what its images and labels are called and loads every case of every site.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from polysite.data.case import Case
from polysite.data.folder import Folder
from polysite.data.phantom import LABELS, MODALITIES, Hospital, draw, four_hospitals
from polysite.errors import ConfigError


class Source(Protocol):
    @property
    def dims(self) -> int: ...

    @property
    def modality_names(self) -> tuple[str, ...]: ...

    @property
    def label_names(self) -> tuple[str, ...]: ...

    def load(self, seed: int) -> Mapping[str, list[Case]]:
        """The cases of every site."""
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
    def dims(self) -> int:
        return 3

    @property
    def modality_names(self) -> tuple[str, ...]:
        return MODALITIES

    @property
    def label_names(self) -> tuple[str, ...]:
        return LABELS

    def load(self, seed: int) -> Mapping[str, list[Case]]:
        x, y, z = self.shape
        return {
            name: [draw(h, site=name, index=i, seed=seed, shape=(x, y, z)) for i in range(h.cases)]
            for name, h in self.sites.items()
        }


SOURCES: Mapping[str, type] = {"phantom": Phantom, "folder": Folder}
