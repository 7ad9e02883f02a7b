"""From what was measured to what to do: findings in plain words, and strategies in order, each ready to run.

The rules, one function each:

    missing     a modality that a site never acquired, or often not
    labels      a site whose labels are 1.5 times larger or smaller, or missing more often, than elsewhere
    brightness  a site whose intensities are 1.5 times higher or lower than elsewhere
    images      a site whose embeddings differ from those of all others together
    sizes       a site with four times as many cases as another
    thin        sites and pairs with too few cases to tell

A site is said to differ if a permutation test against the other sites together finds p <= 0.05, by Holm over all sites
and over both metadata and embeddings; of these, the farthest out is set apart before the others are tested again.
Labels and brightness are told at the same level, by Bonferroni over all sites, quantities and kinds of evidence. Then:

    nobody differs       federated averaging, then FedProx: nothing measured speaks against one model for all; between
                         them less weight for a site that every distance names in 80 % of the resamples or more
    one or more differ   one model with less weight for the farthest of them, if it is farther from the others than
                         these are from one another; then a model for each cluster; the plain mean as the yardstick
    clusters go first    where average linkage finds groups of two or more with a silhouette of at least 0.5, and
                         where the site that differs holds more than half of all cases
    two sites            no site is the odd one of two: the plain mean, then each alone
    uneven sizes         also the mean in which every site counts alike
    modalities missing   also the mean on the modalities that all sites acquire

The weight is one of the paper's: 0.5, 0.3 or 0.1 for a site that is less than 2, less than 4, or more than 4 times as
far from the others as these are from one another. Which of two strategies is better on a federation, only training
tells; the order says what to try first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from polysite.assess.assessment import (
    CLASS,
    INTENSITY,
    LEVEL,
    TESTED,
    VOLUME,
    Assessment,
    Distance,
    Groups,
    Quantity,
    remoteness,
)
from polysite.assess.distances import Values
from polysite.metrics.statistics import holm
from polysite.payload import SiteId

NOTABLE = 1.5  # times larger or smaller
FEW = 10  # cases, below which a site's distances say little
UNEVEN = 4  # times as many cases
GROUPED = 0.5  # silhouette from which clusters count as such
WEIGHTS, LEAST = ((2.0, 0.5), (4.0, 0.3)), 0.1  # below so many times as far -> weight; and beyond
SURE = 0.8  # share of the resamples that name the same outlier
Strength = Literal["clear", "likely", "thin"]
Goal = Literal["one model for all", "a model for each group"]
ONE: Goal = "one model for all"
GROUP: Goal = "a model for each group"


@dataclass(frozen=True)
class Finding:
    """One thing that was seen, for a clinician."""

    site: SiteId | None  # None: of the federation
    about: str  # the rule that found it
    text: str


@dataclass(frozen=True)
class Strategy:
    """One thing to do."""

    name: str
    title: str
    goal: Goal
    reasons: tuple[str, ...]
    evidence: Strength | None  # None: a yardstick needs none
    changes: Mapping[str, Any]  # sections of the study that differ
    rank: int = 0  # 1: to try first

    @property
    def file(self) -> str:
        """The study that is ready to run."""
        return f"{self.rank}-{self.name}.toml"


@dataclass(frozen=True)
class Verdict:
    summary: str
    findings: tuple[Finding, ...]
    strategies: tuple[Strategy, ...]
    cautions: tuple[str, ...]


def judge(found: Assessment, modalities_can_change: bool = True) -> Verdict:
    """What the assessment speaks for. ``modalities_can_change``: a study may be told to use fewer of them."""
    differing = differ(found)
    findings = [f for rule in RULES for f in rule(found)]
    strategies = list(_strategies(found, differing, findings))
    if modalities_can_change:
        strategies += _common_modalities(found, findings)
    ranked = tuple(replace(s, rank=k) for k, s in enumerate(strategies, start=1))
    return Verdict(_summary(found, differing), tuple(findings), ranked, tuple(thin(found)))


def differ(found: Assessment) -> dict[SiteId, float]:
    """The sites that differ from the others together, with their p, the smaller of metadata's and embeddings'."""
    least = {site: min(p for (_, s), p in _tests(found).items() if s == site) for site in found.sites}
    return {site: p for site, p in least.items() if p <= LEVEL}


def _tests(found: Assessment) -> dict[tuple[str, SiteId], float]:
    """p that a site differs from the others, by distance and site, adjusted for there being so many."""
    p = {(name, s): found.distances[name].alone[s] for name in TESTED if name in found.distances for s in found.sites}
    return dict(zip(p, holm(np.array(list(p.values()))).tolist(), strict=True))


def missing(found: Assessment) -> Iterator[Finding]:
    for quantity in _of(found, INTENSITY):
        for site, values in quantity.values.items():
            share, cases = float(np.mean(values == 0)), found.cases[site]
            if share == 1:
                yield Finding(site, "missing", f"{quantity.of} was never acquired at {site}")
            elif share > 0:
                text = f"{quantity.of} is missing in {round(share * cases)} of {cases} cases of {site}"
                yield Finding(site, "missing", text)


def labels(found: Assessment) -> Iterator[Finding]:
    for quantity, site, mine, others in _standing_out(found, VOLUME):
        here, there = _median(mine[mine > 0]), _median(others[others > 0])
        if _notable(here, there):
            way = "larger" if here > there else "smaller"
            sizes = f"median {here:.3g} {quantity.unit}, elsewhere {there:.3g} {quantity.unit}"
            yield Finding(site, "labels", f"{quantity.of} is {_times(here, there)} times {way} at {site}: {sizes}")
        empty, usual = float(np.mean(mine == 0)), float(np.mean(others == 0))
        if abs(empty - usual) > 0.2:
            text = f"{empty:.0%} of the cases of {site} have no {quantity.of}, elsewhere {usual:.0%}"
            yield Finding(site, "labels", text)
    for quantity, site, mine, others in _standing_out(found, CLASS):
        text = f"{mine.mean():.0%} of the cases of {site} are {quantity.of}, elsewhere {others.mean():.0%}"
        yield Finding(site, "labels", text)


def images(found: Assessment) -> Iterator[Finding]:
    for (name, site), p in _tests(found).items():
        if name == "energy" and p <= LEVEL:
            text = f"to the encoder, scans of {site} look unlike those of the other hospitals (p = {p:.3f})"
            yield Finding(site, "images", text)


def brightness(found: Assessment) -> Iterator[Finding]:
    for quantity, site, mine, others in _standing_out(found, INTENSITY):
        here, there = _median(mine[mine != 0]), _median(others[others != 0])
        if _notable(here, there):
            way = "higher" if here > there else "lower"
            text = f"the largest {quantity.of} intensity is {_times(here, there)} times {way} at {site}"
            yield Finding(site, "brightness", f"{text}; normalising each scan, as training does, may undo this")


def sizes(found: Assessment) -> Iterator[Finding]:
    most, least = (f(found.sites, key=found.cases.__getitem__) for f in (max, min))
    times = found.cases[most] / found.cases[least]
    if times >= UNEVEN:
        text = f"{most} has {times:.0f} times as many cases as {least}, and counts for as much more in a mean by cases"
        yield Finding(None, "sizes", text)


RULES = (missing, labels, images, brightness, sizes)


def thin(found: Assessment) -> Iterator[str]:
    for site in found.silent:
        count = found.cases[site]
        yield f"{site} has {count} case{'s' * (count != 1)}: too few to be described without describing a patient"
    few = [site for site in found.sites if found.cases[site] < FEW]
    if few:
        told = ", ".join(f"{site} ({found.cases[site]})" for site in few)
        yield f"fewer than {FEW} cases at {told}: distances of so few are largely chance, differences go unnoticed"
    for one, other in found.unable(LEVEL):
        yield f"no test could tell {one} from {other}, however different they are: they have too few cases"
    unsure = [d for d in found.distances.values() if d.named[d.outlier] < SURE]
    if unsure and len(found.sites) > 2:
        told = "; ".join(f"{d.outlier} in {d.named[d.outlier]:.0%} of the resamples by {d.title}" for d in unsure)
        yield f"which hospital is the most distant hangs on who happened to be a patient: {told}"


def weight(times: float) -> float:
    """The weight of a site that is so many times as far.

    >>> weight(1.4), weight(3), weight(10)
    (0.5, 0.3, 0.1)
    """
    return next((factor for below, factor in WEIGHTS if times < below), LEAST)


def _strategies(
    found: Assessment, differing: Mapping[SiteId, float], findings: Sequence[Finding]
) -> Iterator[Strategy]:
    if not differing:
        reason = "no hospital was shown to differ, so one model of all cases has the most to learn from"
        yield _mean(reason, "thin" if min(found.cases[s] for s in found.sites) < FEW else None)
        yield from _suspect(found)
        reason = "a small pull towards the shared model steadies unequal hospitals, at no cost in traffic"
        changes = {"algorithm": {"name": "fedprox", "mu": 0.01}}
        yield Strategy("fedprox", "FedProx: hospitals held near the shared model", ONE, (reason,), "thin", changes)
    else:
        by, site, times = _most_distant(found, differing)
        groups = _groups(by)
        clusters = _clustered(found, by, groups, differing, findings)
        reasons = _about(findings, site)
        down = _weighted(by, site, times, reasons, _strength(found, differing[site], site))
        mean = _mean("the yardstick: what the other strategies have to beat", None)
        if times <= 1:
            yield from [clusters, mean] if groups else [mean, clusters]
        elif groups or found.cases[site] > sum(found.cases.values()) / 2:
            yield from [clusters, down, mean]
        else:
            yield from [down, clusters, mean]
    uneven = tuple(f.text for f in findings if f.about == "sizes")
    if uneven:
        title = "Federated averaging in which every hospital counts alike"
        changes = {"algorithm": {"name": "fedavg", "uniform": True}}
        reason = "this way small hospitals have the same say; large ones may get a little less"
        yield Strategy("uniform", title, ONE, (*uneven, reason), "likely", changes)


def _mean(reason: str, evidence: Strength | None) -> Strategy:
    return Strategy("fedavg", "Federated averaging", ONE, (reason,), evidence, {"algorithm": {"name": "fedavg"}})


def _suspect(found: Assessment) -> Iterator[Strategy]:
    """Less weight for a site that no test shows to differ, but that all distances name, whoever is drawn."""
    by = next(iter(found.distances.values()))
    site, times = by.outlier, remoteness(by.matrix, found.index(by.outlier))
    least = min(d.named[site] for d in found.distances.values())
    if len(found.distances) > 1 and least >= SURE and times > 1:
        reason = f"no test shows it, but every distance names {site}, in at least {least:.0%} of the resamples"
        yield _weighted(by, site, times, (reason,), "thin")


def _weighted(by: Distance, site: SiteId, times: float, seen: tuple[str, ...], evidence: Strength) -> Strategy:
    factor = weight(times)
    far = f"{site} is {times:.1f} times as far from the others as these are from one another ({by.title})"
    effect = f"with weight {factor:g} it takes part, but draws the shared model less towards itself"
    changes = {"algorithm": {"name": "weighted", "weights": {site: factor}, "inner": {"name": "fedavg"}}}
    title = f"Federated averaging with weight {factor:g} for {site}"
    return Strategy("weighted", title, ONE, (*seen, far, effect), evidence, changes)


def _clustered(
    found: Assessment, by: Distance, apart: Groups, differing: Mapping[SiteId, float], findings: Sequence[Finding]
) -> Strategy:
    """A model for each group: those that stand apart, or else the most distant site with those nearest to it."""
    groups = apart or by.clusters
    told = _told(groups)
    if apart:
        how = f"these groups stand apart (silhouette {by.silhouette:.2f}, {by.title})"
    else:
        how = f"{by.outlier} goes with those nearest to it ({by.title}); no clear groups were found"
    rest = [
        site for site in {**found.cases, **found.refused} if site not in found.sites
    ]  # they train, but could not be compared
    if rest:
        largest = max(groups, key=lambda g: sum(found.cases[s] for s in g))
        groups = tuple((*g, *rest) if g is largest else g for g in groups)
        how += f"; {', '.join(rest)} could not be compared and joins the largest group"
    alone = [f"{g[0]} would train alone, on its {found.cases[g[0]]} cases" for g in groups if len(g) == 1]
    seen = [text for site in differing for text in _about(findings, site)]
    reasons = (*seen, how, "each group trains a model of its own, on fewer cases", *alone)
    changes = {
        "algorithm": {
            "name": "clustered",
            "groups": {f"group-{k}": list(group) for k, group in enumerate(groups, start=1)},
            "inner": {"name": "fedavg"},
        }
    }
    worst = min(differing, key=differing.__getitem__)
    evidence = _strength(found, differing[worst], worst) if apart else "thin"
    return Strategy("clustered", f"A model for each of {told}", GROUP, reasons, evidence, changes)


def _told(groups: Groups) -> str:
    """In words, not too many of them.

    >>> _told((("a", "b"), ("c",))), _told((("a",), tuple("bcdefghi")))
    ('{a, b} and {c}', '{a} and {8 others}')
    """
    largest = max(groups, key=len)
    short = [f"{len(g)} others" if g is largest and len(g) > 6 else ", ".join(g) for g in groups]
    return " and ".join("{" + text + "}" for text in short)


def _common_modalities(found: Assessment, findings: Sequence[Finding]) -> Iterator[Strategy]:
    gone = {q.of for q in _of(found, INTENSITY) for values in q.values.values() if (values == 0).all()}
    common = [q.of for q in _of(found, INTENSITY) if q.of not in gone]
    if gone and common:
        why = tuple(f.text for f in findings if f.about == "missing")
        reasons = (*why, "a model can rely everywhere on what every hospital acquires")
        changes = {"data": {"modalities": common}, "algorithm": {"name": "fedavg"}}
        title = f"Federated averaging on {', '.join(common)} alone"
        yield Strategy("common-modalities", title, ONE, reasons, "clear", changes)


def _most_distant(found: Assessment, differing: Mapping[SiteId, float]) -> tuple[Distance, SiteId, float]:
    """The differing site that is farthest out, the distance by which it is, and how many times as far."""
    seen = [
        (remoteness(found.distances[name].matrix, found.index(site)), name, site)
        for (name, site), p in _tests(found).items()
        if site in differing and p <= LEVEL
    ]
    times, name, site = max(seen)
    return found.distances[name], site, times


def _groups(by: Distance) -> Groups:
    """Clusters that stand apart, none of them a single site; nothing if there are none."""
    apart = by.silhouette >= GROUPED and len(by.linked) > 1 and min(map(len, by.linked)) > 1
    return by.linked if apart else ()


def _strength(found: Assessment, p: float, site: SiteId | None = None) -> Strength:
    """How sure: thin with few cases, clear where chance does this less than once in a hundred times."""
    few = min(found.cases[s] for s in ([site] if site else found.sites)) < FEW
    return "thin" if few else "clear" if p <= 0.01 else "likely"


def _summary(found: Assessment, differing: Mapping[SiteId, float]) -> str:
    count = sum(found.cases[s] for s in found.sites)
    start = f"{len(found.sites)} hospitals with {count} cases were compared"
    if not differing:
        return f"{start}: none was shown to differ from the others."
    told = ", ".join(f"{site} (p = {p:.3f})" for site, p in sorted(differing.items(), key=lambda e: e[1]))
    return f"{start}: {told} differ{'s' * (len(differing) == 1)} from the others by more than chance."


def _standing_out(found: Assessment, kind: str) -> Iterator[tuple[Quantity, SiteId, Values, Values]]:
    """Quantities in which a site differs from the others together, with the values of both."""
    for quantity in _of(found, kind):
        for site in found.sites:
            if found.stands_out(quantity, site):
                others = np.concatenate([v for s, v in quantity.values.items() if s != site])
                yield quantity, site, quantity.values[site], others


def _about(findings: Sequence[Finding], site: SiteId) -> tuple[str, ...]:
    return tuple(f.text for f in findings if f.site == site)


def _of(found: Assessment, kind: str) -> list[Quantity]:
    return [q for q in found.quantities.values() if q.kind == kind]


def _median(values: Values) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _notable(here: float, there: float) -> bool:
    return here > 0 and there > 0 and max(here / there, there / here) >= NOTABLE


def _times(here: float, there: float) -> str:
    return f"{max(here / there, there / here):.1f}"
