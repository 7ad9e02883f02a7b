"""The choice of the best round when scores are only claims: every hospital has one voice, and none decides alone.

Scores of cases come from the hospitals themselves. With a guard (``run.guard``) a round is better than the best one so
far if the hospitals gained on average, each compared with its own mean score of that round, without the largest and the
smallest gains: one of each for three to six hospitals, two for seven to nine, and so on. So a hospital that claims 2000
cases, or perfect scores of a bad model, moves the choice by no more than one voice.

Sudden changes are reported: another number of cases, or a score that jumps while those of the others do not.
"""

from collections.abc import Iterator, Mapping
from statistics import fmean, median

from polysite.payload import SiteId
from polysite.site import Scores

JUMP = 0.3  # change of a hospital's mean score, beyond the median change of the others, that is reported

Means = Mapping[SiteId, float]
Judged = Mapping[SiteId, tuple[int, float]]  # number of cases and mean score of every site


def judged(scores: Mapping[SiteId, Scores]) -> dict[SiteId, tuple[int, float]]:
    """Return number of cases and mean score of every site that scored any."""
    return {i: (len(cases), fmean(s.mean for s in cases.values())) for i, cases in sorted(scores.items()) if cases}


def advantage(now: Means, best: Means) -> float:
    """Return by how much a round is better than the best so far: the trimmed mean of the sites' gains.

    If the two rounds were scored by different sites, the means of all are compared.

    >>> best = {"a": 0.5, "b": 0.7, "c": 0.6, "liar": 1.0}
    >>> round(advantage({"a": 0.6, "b": 0.8, "c": 0.7, "liar": 0.0}, best), 3)
    0.1
    """
    both = sorted(now.keys() & best.keys())
    if not both:
        return fmean(now.values()) - (fmean(best.values()) if best else -1.0)
    gains = sorted(now[i] - best[i] for i in both)
    cut = max((len(gains) - 1) // 3, 1) if len(gains) > 2 else 0
    return fmean(gains[cut : len(gains) - cut])


def surprises(before: Judged, now: Judged) -> Iterator[tuple[SiteId, str]]:
    """Yield (site, sentence) for every sudden change since the last validation."""
    changes = {i: now[i][1] - before[i][1] for i in now.keys() & before.keys()}
    for site in sorted(changes):
        (cases, score), (former_cases, former) = now[site], before[site]
        if cases != former_cases:
            yield site, f"scores {cases} validation cases instead of {former_cases}"
        others = [change for i, change in changes.items() if i != site]
        usual = median(others) if others else changes[site]
        if abs(changes[site] - usual) > JUMP:
            jump = f"its mean score jumps from {former:.3f} to {score:.3f}"
            yield site, f"{jump}, while that of the other sites changes by {usual:+.3f}"
