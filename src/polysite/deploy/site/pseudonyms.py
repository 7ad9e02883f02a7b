"""Pseudonyms of cases: numbers that only the hospital can trace back to its cases."""

import hmac
import secrets
from pathlib import Path

from polysite.data.slices import volume_of
from polysite.storage import write_file


class Pseudonyms:
    """Replaces names of cases by keyed hashes; the key is a file that stays at the hospital.

    Args:
        path: File of the key; made with its folder if missing.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        if not path.exists():
            write_file(path, lambda p: p.write_bytes(secrets.token_bytes(32)))
            path.chmod(0o600)
        self._key = path.read_bytes()

    def of(self, case: str) -> str:
        """Return the pseudonym of a case, which is the same in every study of this hospital.

        A slice keeps its number after the pseudonym of its volume, so that slices of a patient count as one in tests.
        """
        volume = volume_of(case)
        number = hmac.new(self._key, volume.encode(), "sha256").hexdigest()[:10]
        return f"case-{number}{case.removeprefix(volume)}"
