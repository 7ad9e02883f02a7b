"""Settings of radiomics, and the discretisation of grey values.

With a fixed width, bins start at multiples of the width; with a fixed count, they divide the range of the values.
Levels are numbered from the smallest value of the image, or of the dataset (``bin_range``). Width and count
follow PyRadiomics on NumPy 1 (`imageoperations.getBinEdges`), to the last bit of every edge. On NumPy 2 PyRadiomics
computes the edges of a fixed width in the type of the image: in single precision, so that some voxels change their bin,
and for images of bytes with an overflow at 255, which is wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polysite.errors import ConfigError, DataError

MAX_BINS = 4096  # a matrix of grey levels by grey levels has to fit into memory


@dataclass(frozen=True)
class Settings:
    """PyRadiomics' options under its names.

    Args:
        bin_width: Width of a bin of grey values.
        bin_count: Number of bins, instead of a width.
        bin_range: Smallest and largest value of a dataset, as in [-1.01, 10.81]: its bins of ``bin_width`` apply to
            every image, so that a grey value has the same level everywhere. Values beyond it count in the first or
            last bin. Empty for the range of each image, as in PyRadiomics.
        label: Value of the mask inside the region.
    """

    bin_width: float = 25.0
    bin_count: int | None = None
    bin_range: tuple[float, ...] = ()
    label: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.bin_width < math.inf:
            raise ConfigError(f"bin_width is {self.bin_width}; give a positive number")
        if self.bin_count is not None and not 1 <= self.bin_count <= MAX_BINS:
            raise ConfigError(f"bin_count is {self.bin_count}; give a whole number from 1 to {MAX_BINS}, or none")
        low, high = self.bin_range if len(self.bin_range) == 2 else (0.0, 0.0 if self.bin_range else 1.0)
        if not (-math.inf < low < high < math.inf) or (self.bin_range and self.bin_count is not None):
            given = list(self.bin_range)
            raise ConfigError(f"bin_range is {given}; give a smaller and a larger value, and no bin_count")

    def edges(self, least: float, largest: float, dtype: DTypeLike) -> NDArray[np.float64]:
        """Return the lower edges of the bins for values of this range and type; level k begins at edge k − 1.

        >>> Settings(bin_width=25).edges(54.0, 166.0, np.float64).tolist()
        [50.0, 75.0, 100.0, 125.0, 150.0, 175.0, 200.0]
        >>> Settings(bin_width=25, bin_range=(54, 166)).edges(60.0, 70.0, np.float64).tolist()
        [-inf, 75.0, 100.0, 125.0, 150.0]
        """
        if self.bin_count is not None:
            edges = np.histogram_bin_edges(np.array([least, largest], dtype), self.bin_count)
            edges[-1] += 1  # so that the largest value is in the last bin
            return edges.astype(np.float64)
        if self.bin_range:
            low, high = self.bin_range
            edges = replace(self, bin_range=()).edges(low, high, dtype)
            edges = edges[edges <= high].astype(np.float64)  # what lies beyond is in the last bin
            edges[0] = -math.inf  # or in the first
            return edges
        if (largest - least) / self.bin_width > MAX_BINS - 1:
            raise ConfigError(
                f"bin_width {self.bin_width:g} cuts values from {least:g} to {largest:g} into more than {MAX_BINS} "
                f"bins; take a width near {(largest - least) / 100:.2g}, or a bin_count"
            )
        return np.arange(least - least % self.bin_width, largest + 2 * self.bin_width, self.bin_width)


def check(image: Sequence[int], mask: Sequence[int], spacing: Sequence[float]) -> None:
    """Refuse different shapes and an invalid spacing."""
    if tuple(image) != tuple(mask):
        raise DataError(f"the image has shape {tuple(image)}, the mask {tuple(mask)}; bring both to one grid")
    if len(image) not in (2, 3) or len(spacing) != len(image) or not all(0 < s < math.inf for s in spacing):
        raise DataError(
            f"an image of shape {tuple(image)} with spacing {tuple(spacing)}; give two or three axes and a positive "
            "size for each"
        )


def check_values(voxels: int, least: float, largest: float, label: int) -> None:
    """Refuse a mask of fewer than two voxels, and values that are not finite."""
    if voxels == 0:
        raise DataError(f"the mask holds no voxel of label {label}; give a mask that does, or another label")
    if voxels == 1:
        raise DataError(f"the mask holds one voxel of label {label}; texture needs two at least")
    if not (math.isfinite(least) and math.isfinite(largest)):
        raise DataError("the image holds NaN or infinity inside the mask; mend the image or take them out of the mask")
