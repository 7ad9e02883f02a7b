"""Writer of DICOM segmentations (DICOM-SEG) of a DICOM series, by highdicom, which is an optional package.

A segmentation refers to the slices of its series by their UIDs: otherwise a viewer could not lay it over them. It takes
over nothing else of the series: the patient has the name of the case, and no date, number or description is read.
"""

import io
import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from polysite.data import dicom
from polysite.errors import ConfigError

TAGS = (
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "Rows", "Columns",
    "PixelSpacing", "ImagePositionPatient", "ImageOrientationPatient", "SliceThickness", "SpacingBetweenSlices",
    "ImageType", "Modality",
)  # fmt: skip
EMPTY = (
    "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate", "StudyTime", "ReferringPhysicianName",
)  # fmt: skip
TISSUE = ("85756007", "SCT", "Tissue")  # what every label is said to be: polysite does not know more


def check(source: Path) -> None:
    """Refuse a scan that is no DICOM series, and a machine without highdicom."""
    if not source.is_dir():
        raise ConfigError(f"--format dicom-seg is for folders of DICOM slices, and {source} is none; choose nifti")
    if find_spec("highdicom") is None:
        raise ConfigError("--format dicom-seg needs the package highdicom: pip install 'polysite[dicom]'")


def content(masks: np.ndarray, labels: Sequence[str], source: Path, case: str) -> bytes:
    """Return the segmentation of a series as a DICOM file, one segment per label.

    Args:
        masks: (label, column, row, slice) of 0 and 1, as ``dicom.read_series`` orders the slices.
        labels: Names of the labels.
        source: The folder of the series.
        case: Name of the case, which stands for the patient.
    """
    import highdicom
    from highdicom.seg import SegmentationTypeValues
    from pydicom.sr.coding import Code

    slices = [_slice(file, case) for file in dicom.ordered(source)]
    maker = highdicom.AlgorithmIdentificationSequence(
        "polysite", Code("123110", "DCM", "Artificial Intelligence"), version("polysite")
    )
    described = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=label[:64],
            segmented_property_category=Code(*TISSUE),
            segmented_property_type=Code(*TISSUE),
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=maker,
        )
        for number, label in enumerate(labels, start=1)
    ]
    made = highdicom.seg.Segmentation(
        source_images=slices,
        pixel_array=np.ascontiguousarray(masks.transpose(3, 2, 1, 0)).astype(np.uint8),
        segmentation_type=SegmentationTypeValues.BINARY,
        segment_descriptions=described,
        series_instance_uid=highdicom.UID(),
        series_number=1,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="polysite",
        manufacturer_model_name="polysite predict",
        software_versions=version("polysite"),
        device_serial_number="0",
        omit_empty_frames=bool(masks.any()),
    )
    out = io.BytesIO()
    made.save_as(out)
    return out.getvalue()


def _slice(file: Path, case: str) -> Any:
    """Return the geometry and the UIDs of a slice of a patient with the name of the case."""
    import pydicom

    found = pydicom.dcmread(file, specific_tags=list(TAGS), stop_before_pixels=True)
    plain = re.sub(r"[\\^=]|[^\x20-\x7e]", "_", case)[:60]
    found.PatientName, found.PatientID = f"{plain}^", plain
    for tag in EMPTY:
        setattr(found, tag, None)
    return found
