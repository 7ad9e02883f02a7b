"""The studies that a hospital agreed to, and which of them are too much alike.

What leaves a hospital is made of at least ``fewest`` cases. But the results of two studies can be subtracted: if their
training cases differ by one patient, or one of two equal trainings takes one step more, the difference is about that
patient. Two studies are **similar** here if, with what may be subtracted,

- their training cases (or the cases that their assessments describe) are not the same and differ by fewer than
  ``fewest`` cases, or
- their training cases and seeds are the same, and the numbers of cases that one training sees are not the same and
  differ by less than ``fewest``. This also applies to two phases of one study.

A study that is similar to one of the last ``similar_days`` days is refused. Cases are compared by keyed digests. The
file is not in the folder of a study, so that deleting the folder forgets nothing.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from polysite.errors import DataError
from polysite.storage import Journal

DAY = 86400.0  # seconds
KEPT = 400 * DAY


@dataclass(frozen=True)
class Trace:
    """What a study does with the cases of a hospital.

    Args:
        study: Name of the study.
        time: When it was agreed to, in seconds since 1970.
        train: Digests of the training cases, sorted.
        assessed: Digests of the cases that the assessment describes, sorted; empty without one.
        seed: Seed by which cases are drawn.
        seen: Cases, or slices, that one training sees, of every phase that trains.
        of_one: Most slices of one volume; 1 if cases are volumes.
    """

    study: str
    time: float
    train: tuple[str, ...]
    assessed: tuple[str, ...]
    seed: int
    seen: tuple[int, ...]
    of_one: int = 1

    def alike(self, other: "Trace", fewest: int) -> bool:
        """Whether the results of two studies, subtracted, would be about fewer than ``fewest`` cases."""
        if any(_close(len({*mine} ^ {*theirs}), fewest) for mine, theirs in self._groups(other)):
            return True
        same = self.train == other.train and self.seed == other.seed
        few = fewest * max(self.of_one, other.of_one)
        return same and any(_close(abs(a - b), few) for a in self.seen for b in other.seen)

    def _groups(self, other: "Trace") -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        yield self.train, other.train
        if self.assessed and other.assessed:
            yield self.assessed, other.assessed


class Studies:
    """The list of studies in a file of the hospital."""

    def __init__(self, path: Path):
        self._journal = Journal(path, _trace)

    def within(self, days: float) -> list[Trace]:
        """Return the studies of the last days; DataError if the list is damaged, so that nothing is forgotten."""
        try:
            now = time.time()
            return [trace for trace in self._journal.read() if now - trace.time < days * DAY]
        except (OSError, ValueError) as problem:
            raise DataError(
                f"the list of the studies that this hospital agreed to cannot be read: {problem}; restore it from a "
                "backup, or move it aside to begin a new one"
            ) from problem

    def similar(self, new: Trace, days: float, fewest: int) -> str:
        """Return the name of a study of the last days that is similar to a new one, or of itself; empty if none is."""
        earlier = (trace for trace in self.within(days) if trace.study != new.study) if days else ()
        return next((trace.study for trace in (new, *earlier) if days and new.alike(trace, fewest)), "")

    def add(self, trace: Trace) -> None:
        """Add a study, and drop those that are too old to matter."""
        kept = [each for each in self.within(KEPT / DAY) if each.study != trace.study]
        self._journal.replace(json.dumps(asdict(each)) for each in (*kept, trace))


def _close(difference: int, fewest: int) -> bool:
    return 0 < difference < fewest


def _trace(found: Mapping[str, Any]) -> Trace:
    values = {f.name: found[f.name] for f in fields(Trace)}
    lists = {name: tuple(values[name]) for name in ("train", "assessed", "seen")}
    if not all(isinstance(text, str) for text in (values["study"], *lists["train"], *lists["assessed"])):
        raise ValueError("a digest or a name is no text")
    if not all(type(n) is int for n in (*lists["seen"], values["of_one"])):
        raise ValueError("a number of cases is no whole number")
    return Trace(**{**values, **lists, "time": float(values["time"]), "seed": int(values["seed"])})
