"""The federations of the bank that are most like a given one.

The distance between two federations is the root of the sum of the squares of

    hospitals    log2 of the ratio of their numbers of hospitals
    cases        log2 of the ratio of the median numbers of training cases of a hospital
    unevenness   difference of the coefficients of variation (standard deviation over mean) of these numbers
    emd, energy  for each, log2 of the ratio of the mean distance between hospitals over the one expected by chance; of
                 the mean distances themselves if the one by chance is not known
    differing    difference of the shares of hospitals that differ significantly from the others
    groups       difference of the silhouettes of groups of hospitals, by the larger of both distances
    task         2 for another task
    drawn        1 if one consists of phantoms and the other of patients

What is not known of the given federation does not count. What is known of it, but not of the other one, counts 1, as
much as twice the number of hospitals.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev

from polysite.config import Study
from polysite.evidence import table
from polysite.evidence.anonymous import Dealt, data_digest, is_drawn
from polysite.evidence.federations import Federation, Gain, federations
from polysite.evidence.keep import distance_line, train_size
from polysite.evidence.lines import DistanceLine, Spans
from polysite.heterogeneity.assessment import Assessment

UNKNOWN = 1.0  # for what is known of one federation only
OTHER_TASK = 2.0
DRAWN = 1.0
MEASURED = ("emd", "energy")


@dataclass(frozen=True)
class Description:
    """What federations are compared by."""

    sizes: tuple[int, ...]  # training cases of the hospitals that train
    task: str = "segmentation"
    distances: DistanceLine | None = None
    drawn: bool = False  # phantoms instead of scans of patients
    data: str = ""  # digest of the cases, to recognise the federation itself; empty if not known

    @property
    def hospitals(self) -> int:
        """Number of hospitals that train."""
        return len(self.sizes)

    @property
    def unevenness(self) -> float:
        """Coefficient of variation of the numbers of training cases."""
        return pstdev(self.sizes) / fmean(self.sizes)


@dataclass(frozen=True)
class Match:
    """A federation of the bank, its distance from the given one, and what methods gained there."""

    federation: Federation
    distance: float
    parts: Mapping[str, float]  # of the distance, by name
    same: bool  # whether it is the given federation itself
    gains: tuple[Gain, ...]  # best first; on test cases, or on validation cases where there are no others


def describe(
    sizes: Mapping[str, int] | Sequence[int],
    assessment: Assessment | None = None,
    task: str = "segmentation",
    drawn: bool = False,
    data: str = "",
) -> Description:
    """Describe a federation by its numbers of training cases and, if there is one, by its assessment.

    Args:
        sizes: Number of training cases of every hospital; hospitals without any are left out.
        assessment: The assessment of the same hospitals; without it, distances do not count.
        task: ``segmentation`` or ``classification``.
        drawn: Whether the cases are phantoms.
        data: Digest of the cases, if known.
    """
    given = sizes.values() if isinstance(sizes, Mapping) else sizes
    trained = tuple(sorted((n for n in given if n > 0), reverse=True)) or (1,)
    return Description(trained, task, distance_line(data, assessment) if assessment else None, drawn, data)


def describe_study(study: Study, dealt: Dealt, assessment: Assessment | None = None) -> Description:
    """Describe the federation of a study; without an assessment, by the last one of these cases in the local table."""
    data = "" if table.is_off() else data_digest(study, table.secret())
    sizes = {site: train_size(dealt, site) for site in dealt}
    found = describe(sizes, assessment, study.data.task, is_drawn(study), data)
    known = [line for line in table.read() if isinstance(line, DistanceLine) and line.data == data]
    if assessment is not None or not known:
        return found
    return replace(found, distances=known[-1])


def similar(like: Description, count: int = 5, among: Sequence[Federation] | None = None) -> list[Match]:
    """Return the federations that are most like the given one, nearest first.

    The given federation itself comes first, if it is in the bank. Others in which no method was compared with FedAvg,
    or only pooled training, are left out.

    Args:
        like: The given federation, from ``describe`` or ``describe_study``.
        count: Number of federations.
        among: Federations to choose from; by default those of the local table and of polysite's own results.
    """
    found = []
    for federation in federations() if among is None else among:
        same = bool(like.data) and federation.data == like.data
        if same or federation.compares:
            parts = dict(_parts(like, of(federation)))
            far = math.sqrt(math.fsum(x * x for x in parts.values()))
            found.append(Match(federation, far, parts, same, _shown(federation)))
    return sorted(found, key=lambda match: (not match.same, match.distance))[:count]


def _shown(federation: Federation) -> tuple[Gain, ...]:
    """Return the gains on test cases; on validation cases if no method has one on test cases."""
    gains = federation.gains()
    tested = tuple(g for g in gains if g.line.split == "test")
    return tested if any(g.gain is not None for g in tested) else tuple(gains)


def of(federation: Federation) -> Description:
    """Describe a federation of the bank."""
    sizes = tuple(n for n in federation.sizes if n > 0) or (1,)
    first = federation.first
    return Description(sizes, first.task, federation.distances, first.drawn, federation.data)


def _parts(like: Description, other: Description) -> Iterator[tuple[str, float]]:
    """Yield the parts of the distance between two federations, by name."""
    yield "hospitals", _doublings(like.hospitals, other.hospitals)
    yield "cases", _doublings(median(like.sizes), median(other.sizes))
    yield "unevenness", abs(like.unevenness - other.unevenness)
    if like.task != other.task:
        yield "task", OTHER_TASK
    if like.drawn != other.drawn:
        yield "drawn", DRAWN
    if like.distances is None:
        return
    if other.distances is None:
        yield "distances", UNKNOWN
        return
    for name in MEASURED:
        mine, theirs = like.distances.distances.get(name), other.distances.distances.get(name)
        if mine:
            yield name, _between(mine, theirs) if theirs else UNKNOWN
    if like.distances.differing is not None:
        known = other.distances.differing is not None
        yield "differing", abs(_share(like.distances) - _share(other.distances)) if known else UNKNOWN
    mine_grouped, theirs_grouped = _grouped(like.distances), _grouped(other.distances)
    if mine_grouped is not None:
        yield "groups", UNKNOWN if theirs_grouped is None else abs(mine_grouped - theirs_grouped)


def _between(mine: Spans, theirs: Spans) -> float:
    """Return how unlike two mean distances are, as multiples of chance where both are known."""
    if mine.chance and theirs.chance:
        return _doublings(mine.mean / mine.chance, theirs.mean / theirs.chance)
    return _doublings(mine.mean, theirs.mean)


def _doublings(a: float, b: float) -> float:
    """Return how often the smaller number must be doubled to reach the larger one.

    >>> _doublings(4, 16), _doublings(0, 0)
    (2.0, 0.0)
    """
    if a <= 0 or b <= 0:
        return 0.0 if a == b else UNKNOWN
    return abs(math.log2(a / b))


def _share(line: DistanceLine) -> float:
    return (line.differing or 0) / max(1, len(line.sizes))


def _grouped(line: DistanceLine) -> float | None:
    known = [d.silhouette for name, d in line.distances.items() if name in MEASURED and d.silhouette is not None]
    return max(known, default=None)
