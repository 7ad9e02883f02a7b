"""Pseudonyms of DICOM scans whose folder or file is called after the patient.

The identifying tags of a file are compared with its name and nothing else: they are neither returned nor written. A
name that contains one of them is replaced by ``scan-`` and a digest of the series, which is the same in every command.
Files that are marked as de-identified (PatientIdentityRemoved) keep their names.
"""

import re
from hashlib import blake2b
from pathlib import Path

from polysite.data import dicom, images

SHORTEST = 3  # letters or digits of an identifier that is looked for


class Pseudonyms:
    """Names of cases that tell nothing about a patient."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}  # pseudonym -> the name that it replaces

    def of(self, case: str, file: Path) -> str:
        """Return the name of a case, or its pseudonym if the DICOM file or folder is called after its patient."""
        if not is_dicom(file):
            return case
        private, series = dicom.identifiers(file)
        plain = re.sub(r"[^a-z0-9]", "", case.lower())
        if not any(word in plain for word in _words(private)):
            return case
        name = f"scan-{blake2b(series.encode() or str(file).encode(), digest_size=5).hexdigest()}"
        self.known[name] = case
        return name


def is_dicom(file: Path) -> bool:
    """Return whether an image is DICOM: a folder, or a file by its suffix."""
    kind = images.suffix(str(file))
    return kind in images.DICOM or (not kind and file.is_dir())


def _words(identifiers: list[str]) -> set[str]:
    """Return the parts of identifiers to look for: words of a name, and whole numbers or dates.

    >>> sorted(_words(["Doe^Jane", "MRN-4711-X"]))
    ['doe', 'jane', 'mrn4711x']
    """
    parts = [part for text in identifiers for part in (re.split(r"[\^ ,=]+", text) if "^" in text else [text])]
    plain = {re.sub(r"[^a-z0-9]", "", part.lower()) for part in parts}
    return {word for word in plain if len(word) >= SHORTEST}
