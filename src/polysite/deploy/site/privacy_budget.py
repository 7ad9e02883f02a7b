"""The privacy budget of a hospital: what all its studies have spent, in a file that only the hospital writes.

Every reply that leaves under differential privacy is one line of ``STATE/privacy.jsonl``, on disk before the reply
leaves. The cost of all lines together must not exceed ``epsilon`` of the policy, at its ``delta``; a reply that would
exceed it does not leave. No request can change or remove a line, and the folder of a study, which may be deleted, has
none. A file that cannot be read stops all training, so that nothing is forgotten.

The budget is that of a patient who takes part in all studies. Noise for the hospital as a whole protects each of its
patients, too; one patient can move the released change from any point of the ball of radius ``clip`` to any other, by
twice its radius, so it counts with half of its noise.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from polysite.errors import DataError
from polysite.privacy import Private, Release, epsilon
from polysite.storage import Journal

FILE = "privacy.jsonl"


@dataclass(frozen=True)
class Entry:
    """One reply that left.

    Args:
        study: Name of the study.
        phase: Its phase.
        round: Its round.
        time: Seconds since 1970.
        release: What it cost, for a patient.
    """

    study: str
    phase: int
    round: int
    time: float
    release: Release


class PrivacyBudget:
    """The budget in the state folder of a hospital."""

    def __init__(self, state: Path):
        self._journal = Journal(state / FILE, _entry)

    def entries(self) -> list[Entry]:
        """Return all that left; DataError if the file is damaged."""
        try:
            return self._journal.read()
        except (OSError, ValueError) as problem:
            raise DataError(
                f"{problem}, so it is not known what studies have spent; restore it from a backup"
            ) from problem

    def spent(self, delta: float, more: Iterable[Release] = ()) -> float:
        """Return the epsilon of all that left, and of ``more`` besides."""
        return epsilon([*(entry.release for entry in self.entries()), *more], delta)

    def refuse(self, limit: float, delta: float, more: Iterable[Release] = ()) -> str | None:
        """Return why no more may leave, or why ``more`` may not; None if it may. A limit of 0 is none."""
        if not limit:
            return None
        planned = list(more)
        if not planned and self.spent(delta) < limit:
            return None
        if planned and self.spent(delta, planned) <= limit:
            return None
        return (
            f"the privacy budget of this hospital is spent: policy.toml says epsilon = {limit:g} and delta = {delta:g}"
        )

    def note(self, study: str, phase: int, round: int, releases: Iterable[Release]) -> None:
        """Write what leaves, and wait until it is on disk."""
        now = time.time()
        self._journal.append(*(json.dumps(asdict(Entry(study, phase, round, now, release))) for release in releases))


def for_patients(private: Private, releases: Iterable[Release]) -> list[Release]:
    """Return what releases cost a single patient."""
    if private.unit != "hospital":
        return list(releases)
    return [replace(release, noise=release.noise / 2) for release in releases]


def _entry(known: Any) -> Entry:
    release = known["release"]
    return Entry(
        str(known["study"]),
        int(known["phase"]),
        int(known["round"]),
        float(known["time"]),
        Release(**{f.name: release[f.name] for f in fields(Release)}),
    )
