"""Writer of predicted masks, on the grid and in the format of their scan.

========= ===================================================  ==========================================
format    default for scans in                                 geometry
========= ===================================================  ==========================================
nifti     NIfTI, MetaImage, folders of DICOM slices            affine (of NIfTI: with its codes and unit)
nrrd      NRRD                                                 the fields of the scan
png       pictures                                             rows and columns
npy       HDF5, NPY, NPZ                                       axes of the array
dicom-seg (never: to be asked for, for DICOM series only)      slices of the series
========= ===================================================  ==========================================
"""

import gzip
import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import nibabel
import numpy as np
from nibabel.nifti1 import Nifti1Image

from polysite.data import dicom_seg, images, nrrd
from polysite.data.images import Image
from polysite.errors import ConfigError
from polysite.storage import write_file

DICOM_SEG = "dicom-seg"  # one file with a segment for every label
ENDINGS = {"nifti": ".nii.gz", "nrrd": ".nrrd", "png": ".png", "npy": ".npy", DICOM_SEG: ".dcm"}
WHITE = 255  # of a mask as a picture


def format_for(source: Path, wanted: str, dims: int) -> str:
    """Return the format of the masks of a scan; refuse one that cannot hold them.

    Args:
        source: The scan.
        wanted: A format, or ``auto`` for that of the scan.
        dims: Dimensions of the scan.
    """
    kind = images.suffix(str(source))
    if wanted == "auto":
        return (
            "nrrd" if kind in images.NRRD else "png" if kind in images.FLAT else
            "npy" if kind in images.ARRAYS else "nifti"
        )  # fmt: skip
    if wanted not in ENDINGS:
        raise ConfigError(f"--format {wanted}: choose auto, {', '.join(ENDINGS)}")
    if wanted == DICOM_SEG:
        dicom_seg.check(source)
    if wanted == "png" and dims != 2:
        raise ConfigError(f"--format png holds 2D images, and {source} is a volume; choose nifti, nrrd or npy")
    return wanted


def write(path: Path, mask: np.ndarray, source: Path, grid: Image, kind: str, boxed: bool = False) -> None:
    """Write one mask, or one map of label numbers.

    Args:
        path: The file; its name ends as ``ENDINGS`` says.
        mask: Whole numbers on the grid of the scan; a mask has 0 and 1.
        source: The scan.
        grid: The scan as it was read.
        kind: The format.
        boxed: The mask is that of a box, which has a grid of its own.
    """
    own = source if not boxed else Path()
    writers: dict[str, Callable[[], bytes]] = {
        "nifti": lambda: _nifti(mask, own, grid),
        "nrrd": lambda: nrrd.write(mask, own if images.suffix(str(own)) in images.NRRD else None, grid.affine),
        "png": lambda: _png(mask),
        "npy": lambda: _npy(mask),
    }
    content = writers[kind]()
    write_file(path, lambda draft: draft.write_bytes(content))


def _nifti(mask: np.ndarray, source: Path, grid: Image) -> bytes:
    if images.suffix(str(source)) in images.NIFTI:
        header = nibabel.load(source).header
        image = Nifti1Image(mask, header.get_best_affine())
        image.header.set_xyzt_units(*header.get_xyzt_units())
        if int(header["sform_code"]):
            image.set_sform(header.get_sform(), int(header["sform_code"]))
        if int(header["qform_code"]):
            with suppress(ValueError, nibabel.spatialimages.HeaderDataError):  # of a quaternion that is none
                image.set_qform(header.get_qform(), int(header["qform_code"]))
    else:
        affine = np.eye(4)
        affine[: grid.dims, : grid.dims] = grid.affine[:-1, :-1]
        affine[: grid.dims, 3] = grid.affine[:-1, -1]
        image = Nifti1Image(mask, affine)
        if grid.unit:
            image.header.set_xyzt_units(grid.unit)
    return gzip.compress(image.to_bytes(), 6, mtime=0)


def _png(mask: np.ndarray) -> bytes:
    from PIL import Image as Pillow

    out = io.BytesIO()
    Pillow.fromarray(mask).save(out, "PNG")
    return out.getvalue()


def _npy(mask: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, mask, allow_pickle=False)
    return out.getvalue()
