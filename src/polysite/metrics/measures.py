"""What one label of one case gets, and what an empty mask is worth.

`measure` gives raw numbers: where a mask is empty there is no surface, so distances are NaN. A `Policy` turns them into
what is averaged, and a report names it. BraTS gives a missed tumour 373.13 mm. Code that leaves such cases out, as that
of a published comparison does, rewards a model for finding nothing at all.

>>> import numpy as np
>>> row = measure(np.zeros((3, 4), bool), np.eye(3, 4, dtype=bool), (1.0, 1.0))
>>> penalty, excluded = EmptyMaskPolicy(), EmptyMaskPolicy("excluded")
>>> row["hd95"], penalty.value(row, "hd95"), excluded.value(row, "hd95"), penalty.kind(row)
(nan, 5.0, nan, 'missed')
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from polysite.errors import ConfigError
from polysite.metrics.overlap import overlap
from polysite.metrics.surface import Surfaces
from polysite.metrics.surface import surfaces as numpy_surfaces

BETTER = {"dice": 1, "iou": 1, "sensitivity": 1, "specificity": 1, "hd95": -1, "assd": -1, "nsd": 1, "accuracy": 1}
DISTANCES = ("hd95", "assd")

Empty = Literal["penalty", "excluded"]
Definition = Literal["max", "union"]
Kind = Literal["", "missed", "false alarm", "both empty"]


def measure(
    predicted: Any,
    truth: Any,
    spacing: Sequence[float],
    tolerance: float = 1.0,
    surfaces: Callable[[Any, Any, Sequence[float]], Surfaces] = numpy_surfaces,
) -> dict[str, float]:
    """All measures of two boolean masks; ``surfaces`` suits the kind of array (tensors: `polysite.training.surface`).

    The tolerance is that of the NSD, in the unit of the spacing. ``truth`` and ``predicted`` count voxels, ``diagonal``
    is that of the image.
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
    """What a distance means where exactly one mask is empty, and which HD95 is meant.

    Where both are empty there is nothing to be far from: distances are left out, Dice, IoU and NSD are 1.
    """

    empty: Empty = "penalty"
    penalty: Literal["diagonal"] | float = "diagonal"  # of the image; or a distance: BraTS takes 373.13 mm
    hd95: Definition = "max"

    def __post_init__(self) -> None:
        for name, given, known in (("empty", self.empty, Empty), ("hd95", self.hd95, Definition)):
            if given not in get_args(known):
                raise ConfigError(f"{name} = {given!r} is no policy; choose {' or '.join(get_args(known))}")
        if self.penalty != "diagonal" and not (
            isinstance(self.penalty, int | float) and not isinstance(self.penalty, bool) and 0 < self.penalty < math.inf
        ):
            raise ConfigError(f"penalty = {self.penalty!r} is no distance; give 'diagonal' or a positive number")

    def value(self, row: Mapping[str, float], measure: str) -> float:
        """A measure of a row of `measure`, as this policy counts it; NaN is to be left out."""
        kind, union = self.kind(row), measure == "hd95" and self.hd95 == "union"
        raw = row["hd95_union" if union else measure]
        if kind == "both empty":
            return 1.0 if measure == "nsd" else raw
        if not kind or measure not in (*DISTANCES, "hd95_union", "nsd"):
            return raw
        if self.empty == "excluded":
            return math.nan
        if measure == "nsd":
            return 0.0
        return row["diagonal"] if self.penalty == "diagonal" else float(self.penalty)

    @staticmethod
    def kind(row: Mapping[str, float]) -> Kind:
        """Which masks of a row are empty."""
        if row["truth"]:
            return "" if row["predicted"] else "missed"
        return "false alarm" if row["predicted"] else "both empty"

    @property
    def words(self) -> str:
        """The policy in a sentence, for a report."""
        how = {
            "max": "the larger of the 95th percentiles of the distances from prediction to truth and back",
            "union": "the 95th percentile of the distances from prediction to truth and back, taken together",
        }
        distance = "the diagonal of the image" if self.penalty == "diagonal" else f"a distance of {self.penalty:g}"
        one = {
            "penalty": f"counts {distance} in HD95 and ASSD and 0 in NSD",
            "excluded": "is left out of HD95, ASSD and NSD, so that a missed label can improve their means",
        }
        return (
            f"HD95 is {how[self.hd95]}. A case where exactly one mask is empty has Dice 0 and {one[self.empty]}; "
            "where both are empty, Dice and NSD are 1 and there is no distance."
        )
