"""What a hospital sends in an assessment under differential privacy: sums of which every patient changes little.

Every case becomes a vector of bounded numbers; a patient with several cases is the mean of these:

    quantity q     x = (value, limited to the range of its kind, - middle) / half width, in [-1, 1]
                   (x, x^2 - 1/2, a - 1/2),   a = 1 if the modality or label is absent       |.|^2 <= 5/4 + 1/4
    embedding      u = the vector, shortened to ``length``, / length
                   (u, |u|^2 - 1/2)                                                          |.|^2 <= 5/4

The ranges belong to the study and do not depend on any data. The sum over the patients is divided by the largest length
of such a vector, so that one patient more or less changes it by at most 1; ``engines/noise.py`` adds noise of a
deviation that follows from ``epsilon``. The number of patients is taken for public.

Sorted lists, angles between cases, the energy distance, counts of cases without any label and the unit of a hospital as
a whole are no sums of bounded numbers: they do not leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polysite.errors import ConfigError
from polysite.privacy import Release, check_limits, noise_for

INTENSITY, VOLUME, CLASS = "intensity", "volume", "class"  # prefixes of the names of quantities
EMBEDDING, SQUARE = "embedding", "square"  # names of the sums of embeddings
QUANTITY, VECTOR = 1.5, 1.25  # largest squared length of the numbers of a quantity, and of an embedding


@dataclass(frozen=True)
class PrivateSums:
    """Differential privacy of an assessment, for every patient; the ranges must not be taken from the data.

    Args:
        epsilon: What the assessment may cost every patient described; 0: no noise, and statistics leave as they are.
        delta: Probability with which the guarantee may fail; below one over the number of patients.
        intensity: Least and largest intensity, as scanners store it; values outside count as the nearest.
        volume: Least and largest volume of a label, in mL (areas in square centimetres); a voxel of unknown size counts
            as 1 mm wide.
        length: Longest embedding of a case, more than 0; longer ones are shortened.
    """

    epsilon: float = 0.0
    delta: float = 1e-5
    intensity: tuple[float, float] = (0.0, 4096.0)
    volume: tuple[float, float] = (0.0, 200.0)
    length: float = 10.0

    def __post_init__(self) -> None:
        check_limits("assess.private", self.epsilon, self.delta)
        for name in ("intensity", "volume"):
            low, high = getattr(self, name)
            if not -1e12 < low < high < 1e12:
                raise ConfigError(f"assess.private.{name} = [{low:g}, {high:g}] must be a range, the smaller one first")
        if not 0 < self.length < 1e12:
            raise ConfigError(f"assess.private.length = {self.length} must be more than 0")

    @property
    def on(self) -> bool:
        """Whether noise is added."""
        return self.epsilon > 0

    @property
    def noise(self) -> float:
        """Deviation of the noise, as a multiple of what one patient can change in all sums."""
        return noise_for(self.epsilon, self.delta)

    @property
    def release(self) -> Release | None:
        """What the sums cost; None without noise."""
        return Release(self.noise, delta=self.delta) if self.on else None

    def range_of(self, quantity: str) -> tuple[float, float]:
        """Return the range of a quantity by its name."""
        kind = quantity.partition(" ")[0]
        return {INTENSITY: self.intensity, VOLUME: self.volume}.get(kind, (0.0, 1.0))


def largest(quantities: int, embedded: bool) -> float:
    """Return the largest length of the vector of a patient."""
    return float(np.sqrt(QUANTITY * quantities + VECTOR * embedded))


def bounded_sums(
    settings: PrivateSums, quantities: Mapping[str, Any], absent: Mapping[str, Any], patients: Any, vectors: Any = None
) -> dict[str, Any]:
    """Return the sums over the patients; one patient more or less changes them by at most 1 in length.

    Args:
        settings: Ranges.
        quantities: Values of every quantity, one for each case.
        absent: Whether a quantity is absent in a case.
        patients: A number for every case, the same for all cases of a patient.
        vectors: Embeddings, (case, number); None if there are none.
    """
    share = _by_patient(np.asarray(patients)) / largest(len(quantities), vectors is not None)
    sums = {}
    for name, values in quantities.items():
        low, high = settings.range_of(name)
        known = np.clip(np.nan_to_num(np.asarray(values, np.float64)), low, high)
        x = (known - (low + high) / 2) / ((high - low) / 2)
        sums[name] = np.stack([x, x**2 - 0.5, np.asarray(absent[name], np.float64) - 0.5]) @ share
    if vectors is not None:
        flat = np.nan_to_num(np.asarray(vectors, np.float64)) / settings.length
        flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)
        sums |= {EMBEDDING: share @ flat, SQUARE: np.array([share @ (np.square(flat).sum(1) - 0.5)])}
    return sums


def _by_patient(patients: Any) -> Any:
    """Return the share of every case in its patient: one over the number of the patient's cases."""
    _, which, counts = np.unique(patients, return_inverse=True, return_counts=True)
    return 1.0 / counts[which]
