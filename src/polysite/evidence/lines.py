"""Lines of the evidence bank: the outcome of a run, and the distances between the hospitals of a federation."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

Settings = Mapping[str, Any]  # dotted key -> number, truth value, choice, or a list of numbers


@dataclass(frozen=True)
class RunLine:
    """The outcome of a finished run; of several runs of a table of results, their mean."""

    data: str  # digest of cases and hospitals, or the name of a federation that comes with polysite
    cases: str  # digest of the split: runs with the same one trained and were scored on the same cases
    task: str
    dims: int
    sizes: tuple[int, ...]  # training cases of every hospital, most first
    modalities: int
    labels: int
    network: str
    parameters: int | None
    method: str
    settings: Settings  # of the method, where they differ from the defaults
    training: Settings  # of the local training, likewise
    rounds: int | None
    steps: int | None  # local steps of all hospitals
    bytes: int | None  # to and from all hospitals
    split: str  # test or validation
    measure: str  # Dice or accuracy
    score: float  # mean over all cases
    by_site: tuple[float | None, ...] = ()  # mean of every hospital, in the order of ``sizes``
    spread: float | None = None  # standard deviation over the cases
    tested: int | None = None  # number of cases that were scored
    runs: int = 1  # that the score is a mean of
    drawn: bool = False  # phantoms instead of scans of patients
    version: str = ""
    date: str = ""
    title: str = ""  # of the federation; only in the table that comes with polysite
    source: str = ""  # where the numbers are printed; empty for a run of this user
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("sizes", "by_site"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        texts = ("data", "cases", "task", "network", "method", "split", "measure", "title", "source", "note", "date")
        if not all(isinstance(getattr(self, name), str) for name in texts):
            raise ValueError("a text is missing")
        if not self.sizes or not all(isinstance(n, int) and n >= 0 for n in self.sizes):
            raise ValueError("sizes must be numbers of cases")
        if not isinstance(self.score, int | float) or not math.isfinite(self.score):
            raise ValueError("the score must be a number")
        if not all(x is None or isinstance(x, int | float) for x in (*self.by_site, *self._counts())):
            raise ValueError("a number is expected")
        if not (isinstance(self.settings, Mapping) and isinstance(self.training, Mapping)):
            raise ValueError("settings must be a mapping")

    def _counts(self) -> tuple[Any, ...]:
        return self.parameters, self.rounds, self.steps, self.bytes, self.spread, self.tested, self.runs


@dataclass(frozen=True)
class Spans:
    """One distance over all pairs of hospitals."""

    mean: float
    largest: float | None = None
    chance: float | None = None  # mean over pairs of what is expected if the cases of a pair are assigned at random
    silhouette: float | None = None  # of the groups by average linkage

    def __post_init__(self) -> None:
        values = (self.mean, self.largest, self.chance, self.silhouette)
        if not isinstance(self.mean, int | float) or any(not isinstance(x, int | float | None) for x in values):
            raise ValueError("a distance must be a number")


@dataclass(frozen=True)
class DistanceLine:
    """How much the hospitals of a federation differ, from an assessment."""

    data: str
    sizes: tuple[int, ...]  # cases of every hospital that was compared, most first
    distances: Mapping[str, Spans]  # emd, euclidean, energy
    differing: int | None = None  # hospitals that differ significantly from the others together
    remoteness: float | None = None  # largest of these: mean distance to the others over that between the others
    version: str = ""
    date: str = ""
    title: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        found = {k: v if isinstance(v, Spans) else Spans(**v) for k, v in self.distances.items()}
        object.__setattr__(self, "distances", found)
        if not isinstance(self.data, str) or not all(isinstance(n, int) for n in self.sizes):
            raise ValueError("the name of the data, or a size, is missing")
        if any(not isinstance(x, int | float | None) for x in (self.differing, self.remoteness)):
            raise ValueError("a number is expected")

    @property
    def stands_out(self) -> bool | None:
        """Whether a hospital differs and is farther from the others than these are from one another; None: unknown."""
        if self.differing is None:
            return None
        return self.differing > 0 and (self.remoteness or 0.0) > 1


AnyLine = RunLine | DistanceLine
KINDS: Mapping[str, type[AnyLine]] = {"run": RunLine, "distances": DistanceLine}


def to_json(line: AnyLine) -> str:
    """Return a line as JSON, without the line break; fields with their default value are left out.

    >>> print(to_json(DistanceLine("a1", (9, 8), {"emd": Spans(0.5)})))
    {"kind": "distances", "data": "a1", "sizes": [9, 8], "distances": {"emd": {"mean": 0.5}}}
    """
    kind = next(name for name, each in KINDS.items() if isinstance(line, each))
    defaults = {f.name: f.default for f in fields(line) if f.default is not MISSING}
    values = {k: v for k, v in asdict(line).items() if k not in defaults or v != defaults[k]}
    if isinstance(line, DistanceLine):
        spans = {name: asdict(each).items() for name, each in line.distances.items()}
        values["distances"] = {name: {k: v for k, v in items if v is not None} for name, items in spans.items()}
    return json.dumps({"kind": kind, **values}, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> AnyLine:
    """Parse a line; keys that this version does not know are ignored. ValueError if it is no line of the bank."""
    try:
        found = json.loads(text)
        kind = KINDS[found["kind"]]
        known = {f.name for f in fields(kind)}
        return kind(**{k: v for k, v in found.items() if k in known})
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as problem:
        raise ValueError(f"no line of the evidence bank: {problem!r}") from problem
