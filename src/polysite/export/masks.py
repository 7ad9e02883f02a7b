"""Cleaning of the masks that a bundle predicts, as polysite cleans them for its scores."""

from typing import Any, Literal

import numpy as np
import torch

from polysite.training.cleaning import Clean, cleaned


class CleanMasks:
    """A transform of a predicted case: cleans ``pred`` on the grid of the prepared ``image``.

    Args:
        labels: Number of labels.
        dims: Spatial dimensions of what the network sees; slices of a volume are cleaned one by one.
        exclusive: Whether ``pred`` is one image of label numbers instead of a mask per label.
        largest: As in ``polysite.training.cleaning.Clean``, like all that follow.
        smallest: Smallest size of a component.
        unit: Unit of ``smallest``.
        fill: Fill holes.
    """

    def __init__(
        self,
        labels: int,
        dims: int,
        exclusive: bool,
        largest: bool = False,
        smallest: float = 0.0,
        unit: Literal["voxels", "mm"] = "voxels",
        fill: bool = False,
    ):
        self.labels, self.dims, self.exclusive = labels, dims, exclusive
        self.clean = Clean(largest, smallest, unit, fill)

    def __call__(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the case with cleaned masks."""
        pred = case["pred"]
        given = pred.numpy()
        masks = np.stack([given[0] == k for k in range(1, self.labels + 1)]) if self.exclusive else given > 0
        affine = np.asarray(case["image"].affine)
        axes = masks.ndim - 1
        spacing = np.linalg.norm(affine[:axes, :axes], axis=0)[axes - self.dims :].tolist()
        parts = np.moveaxis(masks, 1, 0) if axes > self.dims else [masks]
        clean = [cleaned(part, self.clean, spacing, "mm", self.exclusive) for part in parts]
        found = np.stack(clean, 1) if axes > self.dims else clean[0]
        if self.exclusive:
            found = np.max([(k + 1) * mask for k, mask in enumerate(found)], axis=0)[None]
        new = pred.clone()  # with the metadata that MONAI needs to return to the grid of the scan
        new[...] = torch.from_numpy(found.astype(given.dtype))
        return {**case, "pred": new}
