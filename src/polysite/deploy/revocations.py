"""The list of keys that a coordinator does not accept any more: revoked.txt of its project."""

import base64
from pathlib import Path

HEAD = (
    "# Public keys that are not accepted any more, with the day and the hospital. A running server reads this again.\n"
)


class Revocations:
    """The revoked keys, read again whenever the file changes.

    Args:
        path: The list; None for none.
    """

    def __init__(self, path: Path | None):
        self._path, self._state = path, (0, 0, 0)
        self._keys: frozenset[bytes] = frozenset()

    def __contains__(self, public: bytes) -> bool:
        """Whether a public key (PEM) was revoked."""
        if self._path is None:
            return False
        try:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except FileNotFoundError:
            state = (0, 0, 0)
        if state != self._state:
            self._keys, self._state = listed(self._path), state
        return der(public) in self._keys


def listed(path: Path) -> frozenset[bytes]:
    """Return the keys of a list (DER); a line that does not begin with a key counts as none."""
    keys = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            keys.add(base64.b64decode(line.split()[0], validate=True))
        except (IndexError, ValueError):
            continue
    return frozenset(keys)


def der(public: bytes) -> bytes:
    """Return a public key (PEM) without the lines around it."""
    return base64.b64decode(b"".join(line for line in public.splitlines() if not line.startswith(b"-----")))
