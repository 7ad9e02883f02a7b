"""Reader of DICOM: a folder that holds one series is a volume, a single file is a 2D image.

Of an image, only the tags that geometry and voxels need are read. Names, numbers and dates of patients are read to
compare them with names of folders (``private_names``), and for nothing else; the texts of pydicom's errors, which may
quote a file, are not passed on.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from polysite.data.images import MAX_VOXELS, Image
from polysite.errors import DataError

SUFFIXES = (".dcm", ".ima", ".dicom")
GEOMETRY = (
    "SeriesInstanceUID", "SeriesNumber", "Modality", "Rows", "Columns", "NumberOfFrames", "PixelSpacing",
    "ImagePositionPatient", "ImageOrientationPatient", "SliceThickness", "SpacingBetweenSlices", "SamplesPerPixel",
    "ImagerPixelSpacing",
)  # fmt: skip
VOXELS = (
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PhotometricInterpretation", "PlanarConfiguration",
    "RescaleSlope", "RescaleIntercept", "PixelData",
)  # fmt: skip
IDENTIFIERS = (
    "PatientName", "PatientID", "OtherPatientNames", "OtherPatientIDs", "PatientBirthDate", "PatientBirthName",
    "PatientMotherBirthName", "PatientAddress", "PatientTelephoneNumbers", "AccessionNumber", "IssuerOfPatientID",
)  # fmt: skip
DEFLATED = "1.2.840.10008.1.2.1.99"
UNEVEN = 0.01  # share of the usual distance by which distances between slices may differ


def slices_of(folder: Path) -> tuple[Path, ...]:
    """Return the DICOM files in a folder, by name; other files are left out."""
    files = sorted(f for f in folder.iterdir() if not f.name.startswith(".") and f.name.upper() != "DICOMDIR")
    return tuple(f for f in files if f.is_file() and is_slice(f))


def is_slice(file: Path) -> bool:
    """Return whether a file is DICOM: by its suffix, or, without a usual one, by its first bytes."""
    kind = file.suffix.lower()
    if kind in SUFFIXES:
        return True
    if kind and not kind[1:].isdecimal():  # names such as IM0001 or 1.2.840.113619
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def read_series(folder: Path) -> Image:
    """Return the volume in a folder; refuse several series, missing slices and unequal distances."""
    files = slices_of(folder)
    if not files:
        raise DataError(f"{folder} is a folder without DICOM files; name an image file, or the folder of one series")
    heads = {file: _header(file) for file in files}
    _one_series(folder, heads)
    sizes = {(int(h.Columns), int(h.Rows)) for h in heads.values()}
    if len(sizes) > 1:
        raise DataError(f"{folder}: the slices differ in size ({sorted(sizes)}); leave one series in the folder")
    size = sizes.pop()
    if math.prod(size) * len(files) > MAX_VOXELS:
        raise DataError(f"{folder}: the slices claim more voxels than the {MAX_VOXELS:.3g} allowed")
    files, affine = _geometry(folder, heads)
    return Image(np.stack([_voxels(f) for f in files], axis=2), affine, "mm")


def ordered(folder: Path) -> tuple[Path, ...]:
    """Return the slices of a series in the order of their positions, which is that of the volume."""
    return _geometry(folder, {file: _header(file) for file in slices_of(folder)})[0]


def read_slice(file: Path) -> Image:
    """Return the 2D image in a file."""
    head = _header(file)
    with _sentences(file):
        spacing = [float(v) for v in head.get("PixelSpacing") or head.get("ImagerPixelSpacing") or ()]
        if len(spacing) not in (0, 2):
            raise ValueError("spacing")
    rows, columns = spacing or (1.0, 1.0)
    return Image(_voxels(file), np.diag([columns, rows, 1.0]), "mm" if spacing else "")


def identifiers(place: Path) -> tuple[list[str], str]:
    """Return what identifies the patient of a file or a folder, and the series, to compare names of files with.

    They must not be shown or written. Nothing is returned of files that are marked as de-identified, or unreadable:
    reading the image reports these.
    """
    files = slices_of(place) if place.is_dir() else (place,)
    if not files:
        return [], ""
    try:
        tags = (*IDENTIFIERS, "PatientIdentityRemoved", "SeriesInstanceUID")
        found = _dataset(files[0], tags, stop_before_pixels=True)
        if str(found.get("PatientIdentityRemoved", "")).strip().upper() == "YES":
            return [], ""
        texts = [str(v) for tag in IDENTIFIERS if (v := found.get(tag))]
        return texts, str(found.get("SeriesInstanceUID", ""))
    except Exception:  # of pydicom, about a damaged file
        return [], ""


@contextmanager
def _sentences(file: Path) -> Iterator[None]:
    """Turn any error of pydicom into a sentence without its text, which may quote what stands in the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as problem:
        raise DataError(
            f"{file} cannot be read: it is damaged or no DICOM image ({type(problem).__name__}); export it again"
        ) from None


def _dataset(file: Path, tags: Sequence[str], **options: Any) -> Any:
    """Read some tags of a file."""
    import pydicom  # here, since most datasets do without it
    from pydicom.config import IGNORE, settings

    settings.reading_validation_mode = IGNORE
    warnings.filterwarnings("ignore", module="pydicom")  # they quote values of the file
    with file.open("rb") as stream:
        if stream.read(132)[128:] != b"DICM":
            raise DataError(f"{file} cannot be read: it does not begin with the header of a DICOM file")
    meta = pydicom.filereader.read_file_meta_info(file)
    if str(meta.get("TransferSyntaxUID", "")) == DEFLATED:
        raise DataError(f"{file} is deflated as a whole; write it again without that compression")
    return pydicom.dcmread(file, specific_tags=list(tags), **options)


def _header(file: Path) -> Any:
    with _sentences(file):
        head = _dataset(file, GEOMETRY, stop_before_pixels=True)
        kind = str(head.get("Modality", ""))
        if kind in ("SEG", "RTSTRUCT"):
            raise DataError(f"{file} is a DICOM segmentation ({kind}), which is not read; export it as NIfTI or NRRD")
        if int(head.get("NumberOfFrames") or 1) > 1:
            raise DataError(f"{file} holds {int(head.NumberOfFrames)} frames in one file; convert it to NIfTI or NRRD")
        if int(head.get("Rows") or 0) < 1 or int(head.get("Columns") or 0) < 1:
            raise DataError(f"{file} is a DICOM file without an image; remove it from the folder")
        if int(head.Rows) * int(head.Columns) * int(head.get("SamplesPerPixel") or 1) > MAX_VOXELS:
            raise DataError(f"{file} claims more voxels than the {MAX_VOXELS:.3g} allowed")
        return head


def _one_series(folder: Path, heads: dict[Path, Any]) -> None:
    series: dict[str, list[Path]] = {}
    for file, head in heads.items():
        series.setdefault(str(head.get("SeriesInstanceUID", "")), []).append(file)
    if len(series) > 1:
        texts = []
        for files in list(series.values())[:5]:
            head = heads[files[0]]
            modality, number = (_word(head.get(k)) for k in ("Modality", "SeriesNumber"))
            texts.append(f"{modality} series {number} ({len(files)} files from {files[0].name})")
        more = ", ..." * (len(series) > 5)
        raise DataError(
            f"{folder} holds {len(series)} DICOM series: {', '.join(texts)}{more}; give each a folder of its own"
        )


def _word(value: Any) -> str:
    """Return a code or number of a header as text, if it is one."""
    text = str(value if value is not None else "")
    return text if text.isalnum() and len(text) <= 8 else "?"


def _geometry(folder: Path, heads: dict[Path, Any]) -> tuple[tuple[Path, ...], np.ndarray]:
    """Return the files in the order of their positions, and the affine of the volume."""
    places: dict[Path, np.ndarray] = {}
    axes: dict[Path, np.ndarray] = {}
    steps: dict[Path, np.ndarray] = {}
    for file, head in heads.items():
        lacking = [k for k in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing") if not head.get(k)]
        if lacking:
            raise DataError(f"{file} has no {lacking[0]}, so its place in a volume is not known; leave it out")
        with _sentences(file):
            places[file] = np.array([float(v) for v in head.ImagePositionPatient]).reshape(3)
            axes[file] = np.array([float(v) for v in head.ImageOrientationPatient]).reshape(2, 3)
            steps[file] = np.array([float(v) for v in head.PixelSpacing]).reshape(2)
    first = next(iter(heads))
    for file in heads:
        if np.abs(axes[file] - axes[first]).max() > 1e-3 or np.abs(steps[file] - steps[first]).max() > 1e-3:
            raise DataError(
                f"{folder}: {file.name} and {first.name} differ in orientation or pixel size, so they are no slices of "
                "one volume; leave one of them out (a localiser?)"
            )
    row, column = axes[first]
    normal = np.cross(row, column)
    order = sorted(heads, key=lambda f: float(places[f] @ normal))
    step = _step(folder, order, np.array([places[f] for f in order]), normal, heads[first])
    affine = np.eye(4)
    between, within = steps[first]  # rows, then columns
    affine[:3, :3] = np.stack([row * within, column * between, step], axis=1)
    affine[:3, 3] = places[order[0]]
    affine[:2] *= -1  # DICOM's x and y point to the left and to the back
    return tuple(order), affine


def _step(folder: Path, order: Sequence[Path], places: np.ndarray, normal: np.ndarray, head: Any) -> np.ndarray:
    """Return the vector from one slice to the next; refuse gaps."""
    if len(order) == 1:
        with _sentences(order[0]):
            return normal * float(head.get("SpacingBetweenSlices") or head.get("SliceThickness") or 1.0)
    gaps = np.diff(places @ normal)
    if gaps.min() < 1e-3:
        k = int(gaps.argmin())
        raise DataError(
            f"{folder}: {order[k].name} and {order[k + 1].name} lie at the same place; leave one time point or echo in "
            "the folder"
        )
    usual = Counter(np.round(gaps, 3).tolist()).most_common(1)[0][0]
    k = int(np.abs(gaps - usual).argmax())
    if abs(gaps[k] - usual) > UNEVEN * usual:
        between = f"{gaps[k]:.3g} mm lie between {order[k].name} and {order[k + 1].name}, {usual:.3g} mm between others"
        if abs(gaps[k] / usual - round(gaps[k] / usual)) < 0.1:
            raise DataError(f"{folder}: slices are missing ({between}); export the series again")
        raise DataError(
            f"{folder}: the slices are unequally spaced ({between}); resample the series to equal distances"
        )
    step = (places[-1] - places[0]) / (len(order) - 1)
    if np.abs(np.diff(places, axis=0) - step).max() > max(0.1, 0.1 * usual):
        raise DataError(f"{folder}: the slices are shifted against one another; leave one series in the folder")
    return np.asarray(step)


def _voxels(file: Path) -> np.ndarray:
    """Return the voxels of a slice as (column, row), rescaled to the modality's unit."""
    with _sentences(file):
        found = _dataset(file, (*GEOMETRY, *VOXELS))
        if "PixelData" not in found:
            raise DataError(f"{file} is a DICOM file without voxels; remove it from the folder")
        syntax = found.file_meta.TransferSyntaxUID
        try:
            array = found.pixel_array
        except (NotImplementedError, RuntimeError) as problem:
            if not syntax.is_compressed:
                raise
            raise DataError(
                f"{file} is compressed ({syntax.name}) and cannot be unpacked here; run 'pip install python-gdcm', or "
                "export the series without compression"
            ) from problem
        slope, shift = (float(found.get(k, d)) for k, d in (("RescaleSlope", 1), ("RescaleIntercept", 0)))
        if not (math.isfinite(slope) and math.isfinite(shift) and slope):
            raise ValueError("rescale")
        array = np.swapaxes(array, 0, 1)
        if slope == 1 and shift.is_integer() and abs(shift) < 1 << 30 and array.dtype.itemsize <= 2:
            return np.asarray(array if shift == 0 else array.astype(np.int32) + np.int32(shift))
        return np.asarray(array.astype(np.float32) * np.float32(slope) + np.float32(shift))
