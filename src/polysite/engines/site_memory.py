"""The memory of a site between rounds, on disk.

It never leaves the site. It has a version, so that memories of different rounds are not mixed after a crash.

The version is the last round whose reply was merged. A resumed study names the version that it continues from; a memory
of another version, site or algorithm is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polysite.engines import checkpoint
from polysite.errors import RunError
from polysite.payload import Payload, SiteId
from polysite.storage import private_folder

FORMAT = 1  # of the file


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one site."""

    site: SiteId
    algorithm: str  # that wrote it
    version: int  # last round whose reply was merged; -1: none yet
    content: Payload
    format: int = FORMAT


def save(path: Path, memory: Memory, twins: Iterable[Path] = ()) -> None:
    """Write a memory; if one of the ``twins`` holds the same one, let the file be another name of it."""
    private_folder(path.parent)
    checkpoint.save(path, memory, twins)


def load_any(path: Path, lift: checkpoint.Lift | None = None) -> Memory:
    """Return a memory of any site, algorithm and version."""
    found = checkpoint.load(path, lift) if lift else checkpoint.load(path, mapped=True)
    if not isinstance(found, Memory) or found.format != FORMAT:
        raise checkpoint.Damaged(f"{path} holds no memory of a site that this version of polysite can read")
    return found


def load(path: Path, site: SiteId, algorithm: str, version: int, lift: checkpoint.Lift | None = None) -> Payload:
    """Return the content of a memory; refuse one of another site, algorithm or version.

    Without ``lift``, which moves arrays to the device of the computation, the arrays are mapped into memory.
    """
    found = load_any(path, lift)
    for what, there, wanted in (
        ("site", found.site, site),
        ("algorithm", found.algorithm, algorithm),
        ("version", found.version, version),
    ):
        if there != wanted:
            raise RunError(f"{path} is the memory of another {what}: {there!r} instead of {wanted!r}")
    return found.content
