"""Lines of the same cases put together: a federation, its distances, and the gain of every method over FedAvg.

A run is compared with the run of FedAvg on the same training and test cases, with the same network, whose training
settings differ in the fewest keys, and of these with the one whose number of local steps is nearest. A network of its
own, as that of FedDiv, is compared with FedAvg's if the numbers of parameters differ by at most a factor of two.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from polysite.evidence import table
from polysite.evidence.lines import AnyLine, DistanceLine, RunLine

REFERENCE = "fedavg"
ALIKE = 2.0  # ratio of parameters up to which two networks are compared


@dataclass(frozen=True)
class Gain:
    """What a method with one choice of settings scored in a federation, as a mean over its runs, beside FedAvg."""

    line: RunLine  # the first of its runs
    score: float
    gain: float | None  # mean difference to FedAvg on the same cases; None without such a run of FedAvg
    pairs: int  # runs with such a run of FedAvg
    runs: int
    steps: float | None  # mean local steps of a run
    bytes: float | None
    steps_ratio: float | None  # its local steps over those of FedAvg

    @property
    def method(self) -> str:
        """Title of the method."""
        return self.line.method

    @property
    def pooled(self) -> bool:
        """Whether it takes the cases of all hospitals to one place: a bound, not a choice."""
        return "pooled" in self.method.split("-")


@dataclass(frozen=True)
class Federation:
    """All lines about the same hospitals and cases."""

    data: str
    runs: tuple[RunLine, ...]
    distances: DistanceLine | None = None

    @property
    def first(self) -> RunLine:
        """The first run, for what all runs have in common."""
        return self.runs[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training cases of the hospitals, most first."""
        return self.first.sizes

    @property
    def title(self) -> str:
        """Its title, or the number of its hospitals and cases."""
        if self.first.title:
            return self.first.title
        least, most = min(self.sizes), max(self.sizes)
        return f"{len(self.sizes)} hospitals, {least}{f' to {most}' * (least != most)} training cases"

    @property
    def source(self) -> str:
        """Where its results are printed; empty for runs of this user."""
        return self.first.source

    def gains(self) -> list[Gain]:
        """Return what every method scored beside FedAvg, best gain first; methods without a gain come last."""
        ordered = sorted(self.runs, key=_kind)
        found = [_gain(list(same), self.runs) for _, same in groupby(ordered, _kind)]
        return sorted(found, key=lambda g: (g.gain is None, -(g.gain or 0.0), -g.score))

    @property
    def compares(self) -> bool:
        """Whether a method that leaves the cases at their hospitals was compared with FedAvg here."""
        return any(g.gain is not None and not g.pooled for g in self.gains())


def federations(lines: Iterable[AnyLine] | None = None) -> list[Federation]:
    """Return the federations of some lines; by default of the local table and the one that comes with polysite.

    The distances of a federation are those of its last assessment. Distances of cases without a run are left out.
    """
    runs: dict[str, list[RunLine]] = {}
    distances: dict[str, DistanceLine] = {}
    for line in [*table.shipped(), *table.read()] if lines is None else lines:
        if isinstance(line, RunLine):
            runs.setdefault(line.data, []).append(line)
        else:
            distances[line.data] = line
    return [Federation(data, tuple(each), distances.get(data)) for data, each in runs.items()]


def _kind(run: RunLine) -> tuple[str, ...]:
    """Return what must be equal for two runs to count as repetitions: everything but the cases."""
    settings = json.dumps([run.settings, run.training, run.network, run.parameters, run.rounds], sort_keys=True)
    return run.method, run.split, run.measure, settings, run.source, run.note


def _gain(same: Sequence[RunLine], runs: Sequence[RunLine]) -> Gain:
    weights = [run.runs for run in same]
    pairs = [(run, ref) for run in same if (ref := _reference(run, runs)) is not None]
    gain = math.fsum((a.score - b.score) * a.runs for a, b in pairs) / sum(a.runs for a, _ in pairs) if pairs else None
    ratios = [a.steps / b.steps for a, b in pairs if a.steps and b.steps]
    return Gain(
        line=same[0],
        score=math.fsum(run.score * n for run, n in zip(same, weights, strict=True)) / sum(weights),
        gain=gain,
        pairs=sum(a.runs for a, _ in pairs),
        runs=sum(weights),
        steps=_mean([run.steps for run in same]),
        bytes=_mean([run.bytes for run in same]),
        steps_ratio=fmean(ratios) if ratios else None,
    )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [x for x in values if x is not None]
    return fmean(known) if known else None


def _reference(run: RunLine, runs: Sequence[RunLine]) -> RunLine | None:
    """Return the run of FedAvg that a run is compared with; None if there is none, or for that run itself."""
    fitting = [
        other
        for other in runs
        if other.method == REFERENCE
        and not other.settings
        and (other.cases, other.split, other.measure) == (run.cases, run.split, run.measure)
        and _ratio(other.parameters, run.parameters) <= math.log(ALIKE)
    ]
    if not fitting:
        return None

    def unlike(other: RunLine) -> tuple[bool, int, float]:
        keys = {*run.training, *other.training}
        differing = sum(run.training.get(k) != other.training.get(k) for k in keys)
        network = (other.network, other.parameters) != (run.network, run.parameters)
        return network, differing, _ratio(other.steps, run.steps)

    chosen = min(fitting, key=unlike)
    return None if _kind(chosen) == _kind(run) else chosen


def _ratio(a: float | None, b: float | None) -> float:
    """Return the logarithm of the ratio of two numbers, without its sign; 0 if one is not known."""
    return abs(math.log(a / b)) if a and b else 0.0
