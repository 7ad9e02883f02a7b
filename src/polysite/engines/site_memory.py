"""What a site remembers between rounds, on disk: never sent, and versioned, so that a crash does not mix rounds.

A version is the round after which the site remembered this. Whoever resumes says which version it goes on from; any
other, or one that another algorithm made, is refused rather than mixed in.
"""

from dataclasses import dataclass
from pathlib import Path

from polysite.engines import checkpoint
from polysite.errors import RunError
from polysite.payload import Payload, SiteId

FORMAT = 1  # of what the file holds


@dataclass(frozen=True, slots=True)
class Memory:
    """What one site remembers."""

    site: SiteId
    algorithm: str  # that made it
    version: int  # the last round in which the site was heard; -1: none yet
    content: Payload
    format: int = FORMAT


def save(path: Path, memory: Memory) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, memory)


def load(path: Path, site: SiteId, algorithm: str, version: int, lift: checkpoint.Lift = lambda t: t) -> Payload:
    """What the site remembered then; refuse what is another's."""
    found = checkpoint.load(path, lift)
    if not isinstance(found, Memory) or found.format != FORMAT:
        raise RunError(f"{path} holds no memory of a site that this version of polysite can read")
    for what, there, wanted in (
        ("site", found.site, site),
        ("algorithm", found.algorithm, algorithm),
        ("version", found.version, version),
    ):
        if there != wanted:
            raise RunError(f"{path} is the memory of another {what}: {there!r} instead of {wanted!r}")
    return found.content
