"""Preparation of a case for a network, with MONAI's transforms: reorient, resample, crop, resize, normalise, pad."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from polysite.data.case import Case
from polysite.data.images import MAX_VOXELS
from polysite.data.placement import Placement
from polysite.errors import ConfigError, DataError

AXES = ("LR", "PA", "IS")


@dataclass(frozen=True)
class Prepare:
    """Steps that prepare a case once, in this order. The result is padded to the patch.

    Args:
        orientation: Reorient the axes, as in "RAS"; empty keeps them as stored.
        spacing: Resample to this voxel size in millimetres; empty keeps it as stored.
        clip: Clip intensities to this range, as in [-200, 300] for CT; empty for no clipping.
        crop: Crop to the box around all voxels that are not zero.
        size: Then crop or pad every axis about its centre to this number of voxels, as in [0, 256, 256]; 0 keeps an
            axis, empty keeps all.
        normalise: Voxels for the z-score of every modality: those that are not zero, all, all after padding to the
            patch with zeros ("padded"), or none (no z-score).
    """

    orientation: str = ""
    spacing: tuple[float, ...] = ()
    clip: tuple[float, ...] = ()
    crop: bool = True
    size: tuple[int, ...] = ()
    normalise: Literal["nonzero", "all", "padded", "none"] = "nonzero"

    def __post_init__(self) -> None:
        letters = self.orientation
        if letters and not (len(letters) == 3 and all(sum(x in pair for x in letters) == 1 for pair in AXES)):
            raise ConfigError(f"prepare.orientation = {letters!r}: one letter of each of LR, PA and IS, as in 'RAS'")
        if self.spacing and not all(0 < s < np.inf for s in self.spacing):
            raise ConfigError(f"prepare.spacing = {list(self.spacing)}: millimetres, more than zero")
        if self.clip and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise ConfigError(f"prepare.clip = {list(self.clip)}: two intensities, the lower first")
        if any(side < 0 for side in self.size):
            raise ConfigError(f"prepare.size = {list(self.size)}: voxels along every axis, 0 to keep an axis as it is")

    def apply(self, case: Case, patch: Sequence[int]) -> Case:
        """Return the prepared case, at least as large as the patch. A slice of a prepared volume stays as it is."""
        return case if case.prepared else self.place(case, patch)[0]

    def place(self, case: Case, patch: Sequence[int]) -> tuple[Case, Placement]:
        """Return the prepared case, and its place in the scan, by which predictions find their way back."""
        import monai  # noqa: F401 - whole, before its parts: threads that import parts at once meet half of it
        from monai.transforms.croppad.array import SpatialPad  # here, since it takes seconds to import

        dims = case.image.ndim - 1
        if dims != len(patch):
            raise DataError(
                f"case {case.name!r} of site {case.site!r} has {dims} dimensions, the patch {len(patch)}: "
                "leave the case out, or correct its file"
            )
        scan = case.image.shape[1:]
        case, (affine, turned, turned_size, resampled) = self._on_grid(case)
        resampled_size = case.image.shape[1:]
        image = np.clip(case.image, self.clip[0], self.clip[1]) if self.clip else case.image
        box = _foreground(image, case.label) if self.crop else tuple(slice(0, n) for n in resampled_size)
        image = image[:, *box].astype(np.float32)  # a copy: MONAI normalises in place
        label = case.label if case.label.ndim == 1 else case.label[:, *box]
        zero = self.normalise in ("nonzero", "padded")  # else zero is an arbitrary intensity, so pad with the darkest
        if self.size:
            image = np.stack([self._resized(m[None], 0.0 if zero else m.min())[0] for m in image])
            label = label if label.ndim == 1 else self._resized(label)
        inner = image.shape[1:]
        size = [max(s, p) for s, p in zip(inner, patch, strict=True)]
        if self.normalise == "padded":
            image = _z_scores(np.asarray(SpatialPad(size)(image)), nonzero=False)
        elif self.normalise == "nonzero":
            image = np.asarray(SpatialPad(size)(_z_scores(image, nonzero=True)))
        else:
            image = _z_scores(image, nonzero=False) if self.normalise == "all" else image
            image = np.concatenate([np.asarray(SpatialPad(size, value=float(m.min()))(m[None])) for m in image])
        label = label if label.ndim == 1 else np.asarray(SpatialPad(size)(label))
        made = replace(case, image=np.ascontiguousarray(image, np.float32), label=np.ascontiguousarray(label, np.uint8))
        grid = (scan, affine, turned, turned_size, resampled, resampled_size)
        return made, Placement(*grid, box, inner, tuple(image.shape[1:]))

    def brain(self, image: np.ndarray, modalities: Sequence[str]) -> np.ndarray:
        """Return the mask of the brain in a prepared image, for radiomics.

        After a z-score over all voxels the background has the minimum of every modality, and so has padding. The brain
        is where FLAIR exceeds its minimum (the first modality whose name contains "flair"); without FLAIR, where any
        modality does. Otherwise the background is zero, and the brain is where any modality is not.
        """
        if self.normalise not in ("all", "padded"):
            return np.asarray((image != 0).any(0))
        flair = [m for m, name in zip(image, modalities, strict=True) if "flair" in name.lower() and np.ptp(m)]
        bright = [m > m.min() for m in flair[:1] or image]
        return np.asarray(np.any(bright, axis=0))

    def _resized(self, array: np.ndarray, value: float = 0.0) -> np.ndarray:
        """Crop or pad about the centre; padding has the given value."""
        from monai.transforms.croppad.array import ResizeWithPadOrCrop

        if len(self.size) != array.ndim - 1:
            raise ConfigError(
                f"prepare.size = {list(self.size)} has {len(self.size)} numbers for {array.ndim - 1}D data"
            )
        size = [wanted or given for wanted, given in zip(self.size, array.shape[1:], strict=True)]
        return np.ascontiguousarray(np.asarray(ResizeWithPadOrCrop(size, value=float(value))(array)))

    def _on_grid(self, case: Case) -> tuple[Case, tuple[np.ndarray, np.ndarray, tuple[int, ...], np.ndarray]]:
        """Reorient and resample; labels use the nearest voxel. The affine is dropped: later steps move the origin.

        Also return the affine of the scan, affine and size after reorientation, and the affine after resampling.
        """
        dims = case.image.ndim - 1
        affine = np.diag([*case.spacing, 1.0]) if case.affine is None else case.affine
        if not self.orientation and not self.spacing:
            return replace(case, affine=None), (affine, affine, case.image.shape[1:], affine)
        if self.spacing and len(self.spacing) != dims:
            raise ConfigError(
                f"prepare.spacing = {list(self.spacing)} has {len(self.spacing)} numbers for {dims}D data"
            )
        if self.orientation and dims != 3:
            raise ConfigError("prepare.orientation is for volumes; 2D images have no orientation")
        from monai.data.meta_tensor import MetaTensor
        from monai.transforms.spatial.array import Orientation, Spacing

        image, label = MetaTensor(case.image, affine=affine), None
        if case.label.ndim > 1:
            label = MetaTensor(case.label.astype(np.float32), affine=affine)
        if self.orientation:
            turn = Orientation(self.orientation, labels=None)
            image, label = turn(image), None if label is None else turn(label)
        turned = np.asarray(image.affine) if self.orientation else affine
        size, resampled = tuple(image.shape[1:]), turned
        if self.spacing:
            if image[0].numel() * np.prod(case.spacing) / np.prod(self.spacing) > MAX_VOXELS:
                raise DataError(
                    f"case {case.name!r} of site {case.site!r}: voxels of {case.spacing} mm resampled to "
                    f"{list(self.spacing)} mm would fill gigabytes; check its voxel size"
                )
            image = Spacing(self.spacing, mode="bilinear", padding_mode="border", dtype=np.float32)(image)
            label = None if label is None else Spacing(self.spacing, mode="nearest", dtype=np.float32)(label)
            resampled = np.asarray(image.affine)
        truth = case.label if label is None else np.asarray(label).round().astype(np.uint8)
        spacing = tuple(float(s) for s in np.linalg.norm(np.asarray(image.affine)[:-1, :-1], axis=0))
        made = replace(case, image=np.asarray(image), label=truth, spacing=spacing, affine=None)
        return made, (affine, turned, size, resampled)


def _z_scores(image: np.ndarray, nonzero: bool) -> np.ndarray:
    """Return every modality with mean 0 and deviation 1, over all voxels or those that are not zero."""
    from monai.transforms.intensity.array import NormalizeIntensity

    return np.asarray(NormalizeIntensity(nonzero=nonzero, channel_wise=True)(image))


def _foreground(image: np.ndarray, label: np.ndarray) -> tuple[slice, ...]:
    """Return the box around all voxels that are not zero. Labels outside the image are kept, to count as missed."""
    inside: np.ndarray = (image != 0).any(0)
    if label.ndim > 1:
        inside = inside | (label != 0).any(0)
    if not inside.any():
        return tuple(slice(0, n) for n in inside.shape)
    from monai.transforms.utils import generate_spatial_bounding_box

    start, stop = generate_spatial_bounding_box(inside[None], select_fn=lambda x: x)
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))
