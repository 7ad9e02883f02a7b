"""The place of a prepared image in its scan: brings predicted masks back to the grid of the scan.

``Prepare`` reorients, resamples, crops, resizes and pads, in this order. ``Placement`` undoes the steps in the opposite
order: what was padded is cut off, what was cropped is background, and resampled masks take the nearest voxel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Box = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """Sizes and affines between the steps of a preparation."""

    scan: tuple[int, ...]  # size of the scan
    affine: np.ndarray  # of the scan
    turned: np.ndarray  # affine after reorientation
    turned_size: tuple[int, ...]
    resampled: np.ndarray  # affine after resampling
    resampled_size: tuple[int, ...]
    box: Box  # that was kept of the resampled image
    size: tuple[int, ...]  # after the crop or padding about the centre; that of the box without one
    padded: tuple[int, ...]  # size of the prepared image

    def restore(self, masks: np.ndarray) -> np.ndarray:
        """Return masks (label, *space) of the prepared image on the grid of the scan."""
        inner = masks[:, *centred(self.size, self.padded)]
        kept = tuple(s.stop - s.start for s in self.box)
        whole = np.zeros((len(masks), *self.resampled_size), masks.dtype)
        whole[:, *self.box] = _recentred(inner, kept)
        if self.resampled is not self.turned:
            whole = self._resampled_back(whole)
        return np.ascontiguousarray(_turned_back(whole, self.affine, self.turned))

    def _resampled_back(self, masks: np.ndarray) -> np.ndarray:
        """Return masks on the grid before resampling; each voxel has the value of the nearest one."""
        from monai.data.meta_tensor import MetaTensor
        from monai.transforms.spatial.array import SpatialResample

        given = MetaTensor(masks.astype(np.float32), affine=self.resampled)
        back = SpatialResample(mode="nearest", padding_mode="border", align_corners=False, dtype=np.float32)
        found = back(given, dst_affine=self.turned, spatial_size=self.turned_size)
        return np.asarray(found).astype(masks.dtype)


def centred(inner: Sequence[int], outer: Sequence[int]) -> Box:
    """Return the place of an image that MONAI's SpatialPad padded to a size.

    >>> centred((3, 4), (6, 4))
    (slice(1, 4, None), slice(0, 4, None))
    """
    starts = [(o - i) // 2 for i, o in zip(inner, outer, strict=True)]
    return tuple(slice(a, a + i) for a, i in zip(starts, inner, strict=True))


def _recentred(masks: np.ndarray, before: Sequence[int]) -> np.ndarray:
    """Undo MONAI's ResizeWithPadOrCrop: cut off what it padded, and pad what it cropped, axis by axis."""
    found = np.zeros((len(masks), *before), masks.dtype)
    here, there = [slice(None)], [slice(None)]
    for size, old in zip(masks.shape[1:], before, strict=True):
        start = (size - old) // 2 if size > old else old // 2 - size // 2  # as SpatialPad, or as CenterSpatialCrop
        here.append(slice(start, start + old) if size > old else slice(None))
        there.append(slice(None) if size > old else slice(start, start + size))
    found[tuple(there)] = masks[tuple(here)]
    return found


def _turned_back(masks: np.ndarray, affine: np.ndarray, turned: np.ndarray) -> np.ndarray:
    """Return masks with the axes of the scan, given its affine and that of the reoriented image."""
    if turned is affine:
        return masks
    from nibabel.orientations import apply_orientation, io_orientation, ornt_transform

    way = ornt_transform(io_orientation(turned), io_orientation(affine))
    return np.moveaxis(apply_orientation(np.moveaxis(masks, 0, -1), way), -1, 0)
