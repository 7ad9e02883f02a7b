"""Pseudonyms and digests of cases: numbers that only the hospital can trace back to its cases.

All are HMACs under a secret of the hospital, so that a person without the secret can neither find the name behind a
number nor test whether a known name is behind it.
"""

import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from polysite.data.slices import volume_of
from polysite.storage import private_folder, write_private


class Pseudonyms:
    """Replaces names of cases by keyed hashes; the key is a file that stays at the hospital.

    Args:
        path: File of the key; made with its folder if missing.
    """

    def __init__(self, path: Path):
        private_folder(path.parent)
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        self._key = path.read_bytes()

    def of(self, case: str) -> str:
        """Return the pseudonym of a case, which is the same in every study of this hospital.

        A slice keeps its number after the pseudonym of its volume, so that slices of a patient count as one in tests.
        """
        volume = volume_of(case)
        number = hmac.new(self._key, volume.encode(), "sha256").hexdigest()[:10]
        return f"case-{number}{case.removeprefix(volume)}"

    def digest(self, case: str) -> str:
        """Return a digest of a case, for files that stay here; of a slice, that of its volume."""
        return self._hmac("case", volume_of(case)).hexdigest()[:32]

    def list_digest(self, study: str, splits: Mapping[str, Iterable[str]]) -> str:
        """Return a digest of which cases are in which split: it changes with any case, and identifies none.

        Args:
            study: The study; digests of two studies cannot be compared.
            splits: Names of the cases of every split. Their order does not matter; slices count as their volume.
        """
        listed = sorted((split, self.digest(case)) for split, cases in splits.items() for case in cases)
        return self._hmac("list", json.dumps([study, sorted(set(listed))])).hexdigest()

    def _hmac(self, purpose: str, text: str) -> "hmac.HMAC":
        """Return an HMAC that has nothing to do with those of other purposes."""
        return hmac.new(self._key, f"{purpose}\0{text}".encode(), "sha256")
