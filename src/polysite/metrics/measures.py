"""All measures of one label of one case, and the policy for empty masks.

`measure` returns raw numbers: an empty mask has no surface, so its distances are NaN. An `EmptyMaskPolicy` turns them
into the numbers that are averaged, and a report states it. BraTS gives a missed tumour 373.13 mm. Code that leaves such
cases out, as the published code of Manthe et al. 2023 and 2024 does, rewards a model that finds nothing at all.

>>> import numpy as np
>>> row = measure(np.zeros((3, 4), bool), np.eye(3, 4, dtype=bool), (1.0, 1.0))
>>> penalty, excluded = EmptyMaskPolicy(), EmptyMaskPolicy("excluded")
>>> row["hd95"], penalty.value(row, "hd95"), excluded.value(row, "hd95"), penalty.kind(row)
(nan, 5.0, nan, 'missed')
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from polysite.errors import ConfigError
from polysite.metrics.overlap import overlap
from polysite.metrics.surface import surfaces


@dataclass(frozen=True, slots=True)
class Measure:
    """Name, direction and range of a measure. Tables, figures and the deployment protocol read them here.

    Args:
        title: Name in tables and figures.
        better: 1 if more is better, -1 if less is better, 0 for neither.
        low: Smallest value.
        high: Largest finite value.
        distance: Whether it has the unit of the voxel size and is infinite if exactly one mask is empty.
        defined: Whether it always has a finite value; otherwise it can be NaN.
        shown: Whether tables have a column for it.
    """

    title: str
    better: Literal[-1, 0, 1] = 1
    low: float = 0.0
    high: float = 1.0
    distance: bool = False
    defined: bool = False
    shown: bool = True

    @property
    def digits(self) -> int:
        """Decimals that tables show."""
        return 2 if self.distance else 3


MEASURES: Mapping[str, Measure] = {  # of a segmented label, in the order of tables; the first is the main one
    "dice": Measure("Dice"),
    "iou": Measure("IoU"),
    "sensitivity": Measure("sensitivity"),
    "specificity": Measure("specificity"),
    "hd95": Measure("HD95", -1, high=1e9, distance=True),
    "hd95_union": Measure("HD95, directions pooled", -1, high=1e9, distance=True, shown=False),
    "assd": Measure("ASSD", -1, high=1e9, distance=True),
    "nsd": Measure("NSD"),
    "truth": Measure("voxels of the ground truth", 0, high=1e15, defined=True, shown=False),
    "predicted": Measure("voxels of the prediction", 0, high=1e15, defined=True, shown=False),
    "diagonal": Measure("diagonal of the image", 0, high=1e9, defined=True, shown=False),
}
OF_SURFACES = ("hd95", "hd95_union", "assd", "nsd")  # undefined where exactly one mask is empty
ACCURACY = Measure("accuracy", defined=True)  # the main measure of a classification


def about(name: str) -> Measure:
    """Return what is known of a measure by its name."""
    return ACCURACY if name == "accuracy" else MEASURES[name]


Empty = Literal["penalty", "excluded", "excluded-case"]
Definition = Literal["max", "union"]
Kind = Literal["", "missed", "false alarm", "both empty"]


def measure(
    predicted: NDArray[np.bool_],
    truth: NDArray[np.bool_],
    spacing: Sequence[float],
    tolerance: float = 1.0,
) -> dict[str, float]:
    """Return all measures of two boolean masks, with the voxels of both and the diagonal of the image.

    Args:
        predicted: Predicted mask.
        truth: Ground truth.
        spacing: Voxel size per axis.
        tolerance: Tolerance of the NSD, in the unit of the spacing.
    """
    counts = overlap(predicted, truth)
    apart = surfaces(predicted, truth, spacing)
    return {
        "dice": counts.dice,
        "iou": counts.iou,
        "sensitivity": counts.sensitivity,
        "specificity": counts.specificity,
        "hd95": apart.hausdorff(),
        "hd95_union": apart.hausdorff(how="union"),
        "assd": apart.assd(),
        "nsd": apart.nsd(tolerance),
        "truth": float(counts.tp + counts.fn),
        "predicted": float(counts.tp + counts.fp),
        "diagonal": math.hypot(*(n * s for n, s in zip(truth.shape, spacing, strict=True))),
    }


@dataclass(frozen=True)
class EmptyMaskPolicy:
    """Value of a distance if exactly one mask is empty, and the definition of HD95.

    If both masks are empty, distances are left out, and Dice, IoU and NSD are 1.

    Args:
        empty: ``penalty`` counts a penalty if one mask is empty; ``excluded`` leaves the label of the case out, so that
            the mean of a case is over the labels that have a distance; ``excluded-case`` leaves the mean of a case out
            if any label has no distance, also where both masks are empty (the code of Manthe et al. 2024).
        penalty: The diagonal of the image, or a distance; BraTS uses 373.13 mm.
        hd95: ``max`` is the larger of the two directed percentiles, ``union`` the percentile of all distances.
    """

    empty: Empty = "penalty"
    penalty: Literal["diagonal"] | float = "diagonal"
    hd95: Definition = "max"

    def __post_init__(self) -> None:
        for name, given, known in (("empty", self.empty, Empty), ("hd95", self.hd95, Definition)):
            if given not in get_args(known):
                raise ConfigError(f"{name} = {given!r} is no policy; choose {', '.join(get_args(known))}")
        if self.penalty != "diagonal" and not (
            isinstance(self.penalty, int | float) and not isinstance(self.penalty, bool) and 0 < self.penalty < math.inf
        ):
            raise ConfigError(f"penalty = {self.penalty!r} is no distance; give 'diagonal' or a positive number")

    def value(self, row: Mapping[str, float], measure: str) -> float:
        """Return a measure of a row of `measure` under this policy; NaN means that the case is left out."""
        kind, union = self.kind(row), measure == "hd95" and self.hd95 == "union"
        raw = row["hd95_union" if union else measure]
        if kind == "both empty":
            return 1.0 if measure == "nsd" else raw
        if not kind or measure not in OF_SURFACES:
            return raw
        if self.empty != "penalty":
            return math.nan
        if measure == "nsd":
            return 0.0
        return row["diagonal"] if self.penalty == "diagonal" else float(self.penalty)

    def mean(self, values: Iterable[float], measure: str) -> float:
        """Return the mean of a measure over the labels of a case; NaN means that the case is left out.

        >>> EmptyMaskPolicy("excluded").mean([4.0, 8.0, math.nan], "hd95")
        6.0
        >>> EmptyMaskPolicy("excluded-case").mean([4.0, 8.0, math.nan], "hd95")
        nan
        """
        each = list(values)
        known = [x for x in each if not math.isnan(x)]
        whole = self.empty == "excluded-case" and measure in OF_SURFACES
        return fmean(known) if known and not (whole and len(known) < len(each)) else math.nan

    @staticmethod
    def kind(row: Mapping[str, float]) -> Kind:
        """Return which masks of a row are empty."""
        if row["truth"]:
            return "" if row["predicted"] else "missed"
        return "false alarm" if row["predicted"] else "both empty"

    @property
    def words(self) -> str:
        """Description of the policy for a report."""
        how = {
            "max": "the larger of the 95th percentiles of the distances from prediction to truth and back",
            "union": "the 95th percentile of the distances from prediction to truth and back, taken together",
        }
        distance = "the diagonal of the image" if self.penalty == "diagonal" else f"a distance of {self.penalty:g}"
        one = {
            "penalty": f"counts {distance} in HD95 and ASSD and 0 in NSD",
            "excluded": "is left out of HD95, ASSD and NSD, so that a missed label can improve their means",
            "excluded-case": "is left out of HD95, ASSD and NSD, so that a missed label can improve their means; the "
            "mean over labels leaves out every case of which any label has no distance",
        }
        return (
            f"HD95 is {how[self.hd95]}. A case where exactly one mask is empty has Dice 0 and {one[self.empty]}; "
            "where both are empty, Dice and NSD are 1 and there is no distance."
        )
