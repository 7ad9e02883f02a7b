"""Writers of scans as other programs leave them: DICOM series with the names of patients, palettes, pictures."""

import warnings
from pathlib import Path

import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

SECRETS = ("Doe^Jane", "MRN-4711-X", "19481231", "20240229", "ACC-0815", "Dr^Referrer", "Elm Street")


def dicom_series(
    folder: Path,
    array: np.ndarray,
    *,
    spacing: tuple[float, float, float] = (0.7, 0.8, 2.5),
    origin: tuple[float, float, float] = (-10.0, 20.0, 30.0),
    axes: tuple[float, ...] = (1, 0, 0, 0, 1, 0),
    intercept: int = -1024,
    name: str = "IM{:04d}.dcm",
    series: str = "",
    places: list[float] | None = None,
    syntax: str = ExplicitVRLittleEndian,
) -> Path:
    """Write an array (x, y, z) as one file per slice, in shuffled order, with the identifiers of a patient."""
    folder.mkdir(parents=True, exist_ok=True)
    series, study, frame = series or generate_uid(), generate_uid(), generate_uid()
    normal = np.cross(axes[:3], axes[3:])
    count = array.shape[2]
    numbers = np.random.default_rng(0).permutation(count)
    for k in range(count):
        shift = (spacing[2] * k if places is None else places[k]) * normal
        d = _tagged(series, study, frame, CTImageStorage)
        d.ImageOrientationPatient = [float(v) for v in axes]
        d.ImagePositionPatient = [float(v) for v in np.array(origin) + shift]
        d.PixelSpacing, d.SliceThickness = [spacing[1], spacing[0]], spacing[2]
        d.InstanceNumber = k + 1
        d.Rows, d.Columns = array.shape[1], array.shape[0]
        d.SamplesPerPixel, d.PhotometricInterpretation = 1, "MONOCHROME2"
        d.BitsAllocated, d.BitsStored, d.HighBit, d.PixelRepresentation = 16, 16, 15, 1
        d.RescaleSlope, d.RescaleIntercept = 1, intercept
        d.PixelData = np.ascontiguousarray((array[..., k] - intercept).astype("<i2").T).tobytes()
        d.file_meta.TransferSyntaxUID = syntax
        save(d, folder / name.format(int(numbers[k])))
    return folder


def save(dataset: Dataset, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pydicom.dcmwrite(file, dataset, enforce_file_format=True)


def _tagged(series: str, study: str, frame: str, kind: str) -> Dataset:
    d = Dataset()
    d.file_meta = FileMetaDataset()
    d.file_meta.MediaStorageSOPClassUID = d.SOPClassUID = kind
    d.file_meta.MediaStorageSOPInstanceUID = d.SOPInstanceUID = generate_uid()
    d.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    d.PatientName, d.PatientID, d.PatientBirthDate, d.StudyDate, d.AccessionNumber, d.ReferringPhysicianName = SECRETS[
        :6
    ]
    d.PatientAddress, d.SeriesDescription, d.StudyDescription = SECRETS[6], f"head of {SECRETS[0]}", SECRETS[1]
    d.Modality, d.SeriesNumber = "CT", 3
    d.SeriesInstanceUID, d.StudyInstanceUID, d.FrameOfReferenceUID = series, study, frame
    return d


def written(folder: Path) -> bytes:
    """Return names and contents of everything below a folder, for a search."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
    return b"\n".join(str(f).encode() + b"\n" + f.read_bytes() for f in files)
