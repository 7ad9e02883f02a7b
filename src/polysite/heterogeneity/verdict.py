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

    nobody differs       federated averaging, then FedProx: nothing measured speaks against one model for all
    one or more differ   one model with less weight for the farthest of them, if it is farther from the others than
                         these are from one another; then a model for each group, those that do not differ together
                         and the others by kind; the plain mean as the yardstick
    brightness alone     the plain mean first: training normalises every scan, and the encoder sees no difference
    groups go first      where average linkage finds groups of two or more with a silhouette of at least 0.5, and
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
from itertools import combinations
from typing import Any, Literal

import numpy as np

from polysite.heterogeneity.assessment import LEVEL, MANY, TESTED, Assessment, Distance, Groups, Quantity, remoteness
from polysite.heterogeneity.exchange import CLASS, INTENSITY, VOLUME
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
    evidence: Strength | None  # that the hospitals differ as the reasons say; None: nothing was tested for this
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


def judge(found: Assessment, modalities_can_change: bool = True, unseen: bool = False) -> Verdict:
    """What the assessment speaks for. ``modalities_can_change``: a study may be told to use fewer of them; ``unseen``:
    there are hospitals that do not train, for which groups have no model."""
    differing = differ(found)
    findings = [f for rule in RULES for f in rule(found)]
    if len(found.sites) == 2:  # what is told of the one is told of the other
        findings = [f for f in findings if f.about in ("missing", "sizes") or f.site == found.sites[0]]
    strategies = [s for s in _strategies(found, differing, findings) if not (unseen and s.goal == GROUP)]
    if modalities_can_change:
        strategies += _common_modalities(found, findings)
    ranked = tuple(replace(s, rank=k) for k, s in enumerate(strategies, start=1))
    return Verdict(_summary(found, differing), tuple(findings), ranked, tuple(thin(found)))


def differ(found: Assessment) -> dict[SiteId, float]:
    """The sites that differ from the others together, with their p, the smaller of metadata's and embeddings'."""
    least = {site: min(p for (_, s), p in tests(found).items() if s == site) for site in found.sites}
    return {site: p for site, p in least.items() if p <= LEVEL}


def tests(found: Assessment) -> dict[tuple[str, SiteId], float]:
    """p that a site differs from the others, by distance and site, adjusted for there being so many."""
    p = {(name, s): found.distances[name].alone[s] for name in TESTED if name in found.distances for s in found.sites}
    return dict(zip(p, holm(np.array(list(p.values()))).tolist(), strict=True))


def missing(found: Assessment) -> Iterator[Finding]:
    for quantity in _of(found, INTENSITY):
        for site, absent in quantity.absent.items():
            if absent == found.cases[site]:
                yield Finding(site, "missing", f"{quantity.of} was never acquired at {site}")
            elif absent:
                text = f"{quantity.of} is missing in {absent} of {found.cases[site]} cases of {site}"
                yield Finding(site, "missing", text)


def labels(found: Assessment) -> Iterator[Finding]:
    for quantity, site, here, there in _out_of_size(found, VOLUME):
        way = f"{_times(here, there):.1f} times {'larger' if here > there else 'smaller'}"
        sizes = f"median {here:.3g} {quantity.unit}, elsewhere {there:.3g} {quantity.unit}"
        yield Finding(site, "labels", f"{quantity.of} is {way} at {site}: {sizes}")
    for quantity, site in _standing_out(found, VOLUME):
        empty, usual = _absent(found, quantity, [site]), _absent(found, quantity, found.against[site])
        if abs(empty - usual) > 0.2:
            text = f"{empty:.0%} of the cases of {site} have no {quantity.of}, elsewhere {usual:.0%}"
            yield Finding(site, "labels", text)
    for quantity, site in _standing_out(found, CLASS):
        here, there = (1 - _absent(found, quantity, which) for which in ([site], found.against[site]))
        text = f"{here:.0%} of the cases of {site} are {quantity.of}, elsewhere {there:.0%}"
        yield Finding(site, "labels", text)


def images(found: Assessment) -> Iterator[Finding]:
    for (name, site), p in tests(found).items():
        if name == "energy" and p <= LEVEL:
            text = f"to the encoder, scans of {site} look unlike those of the other hospitals (p = {p:.3f})"
            yield Finding(site, "images", text)


def brightness(found: Assessment) -> Iterator[Finding]:
    for quantity, site, here, there in _out_of_size(found, INTENSITY):
        way = f"{_times(here, there):.1f} times {'higher' if here > there else 'lower'}"
        text = f"the largest {quantity.of} intensity is {way} at {site}"
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
        yield f"fewer than {FEW} cases at {told}: distances are uncertain, and a difference may go unnoticed"
    unable = found.unable()
    if 0 < len(unable) <= 6:
        told = ", ".join(f"{one} from {other}" for one, other in unable)
        yield f"no test could tell {told}, however different they are: they have too few cases"
    elif unable:
        yield f"{len(unable)} pairs have too few cases for any test to tell them apart, however different they are"
    if len(found.sites) > MANY and len(found.distances) > 1:
        yield "with so many pairs, only Earth Mover's and energy distances are tested finely enough to be starred"
    if not any(d.matrix.any() for d in found.distances.values()):
        yield "the hospitals are the same in everything that was measured"
    smallest = min(found.sites, key=found.cases.__getitem__)
    if any(d.outlier == smallest for d in found.distances.values()) and smallest not in differ(found):
        yield f"of those compared, {smallest} has the fewest cases, and few cases look distant by chance alone"
    unsure = [d for d in found.distances.values() if d.named[d.outlier] < SURE]
    if unsure and len(found.sites) > 2:
        told = "; ".join(f"{d.outlier} in {d.named[d.outlier]:.0%} by {d.title}" for d in unsure)
        yield f"the most distant hospital is not always the same when cases are drawn again: {told}"


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
        yield _mean(reason)
        reason = "a cheap safeguard, in case a difference went unnoticed"
        changes = {"algorithm": {"name": "fedprox", "mu": 0.01}}
        yield Strategy("fedprox", "FedProx: hospitals held near the shared model", ONE, (reason,), None, changes)
    else:
        by, site, times = _most_distant(found, differing)
        groups = _groups(by)
        clusters = _clustered(found, by, groups, differing, findings)
        reasons = _about(findings, site)
        down = _weighted(found, by, site, times, reasons, _strength(found, differing[site], site))
        mean = _mean("the yardstick: what the other strategies have to beat")
        dull = {f.about for f in findings if f.site in differing} == {"brightness"}  # and the encoder sees nothing
        if dull:
            mean = _mean("only the brightness of scans was shown to differ, which normalising them may undo")
        if times <= 1:
            yield from [clusters, mean] if groups else [mean, clusters]
        elif dull:
            yield from [mean, replace(down, evidence="thin"), clusters]
        elif groups or found.cases[site] > sum(found.cases.values()) / 2:
            yield from [clusters, down, mean]
        else:
            yield from [down, clusters, mean]
    uneven = tuple(f.text for f in findings if f.about == "sizes")
    if uneven:
        title = "Federated averaging in which every hospital counts alike"
        changes = {"algorithm": {"name": "fedavg", "uniform": True}}
        reason = "this way small hospitals have the same say; large ones may get a little less"
        yield Strategy("uniform", title, ONE, (*uneven, reason), None, changes)


def _mean(reason: str) -> Strategy:
    return Strategy("fedavg", "Federated averaging", ONE, (reason,), None, {"algorithm": {"name": "fedavg"}})


def _weighted(
    found: Assessment, by: Distance, site: SiteId, times: float, seen: tuple[str, ...], evidence: Strength
) -> Strategy:
    factor = weight(times)
    far = f"{site} is {times:.1f} times as far from the others as these are from one another ({by.title})"
    rest = sum(found.cases.values()) - found.cases[site]
    before, after = (w * found.cases[site] / (w * found.cases[site] + rest) for w in (1.0, factor))
    effect = f"with weight {factor:g} its share of the mean falls from {before:.0%} to {after:.0%}"
    changes = {"algorithm": {"name": "weighted", "weights": {site: factor}, "inner": {"name": "fedavg"}}}
    title = f"Federated averaging with weight {factor:g} for {site}"
    return Strategy("weighted", title, ONE, (*seen, far, effect), evidence, changes)


def _clustered(
    found: Assessment, by: Distance, apart: Groups, differing: Mapping[SiteId, float], findings: Sequence[Finding]
) -> Strategy:
    """A model for each group: those that stand apart, or else the sites that do not differ, and the others by kind."""
    groups = apart or _alike(found, differing)
    told = _told(groups)
    if apart:
        how = f"these groups stand apart (silhouette {by.silhouette:.2f}, {by.title})"
    else:
        how = "within a group, no hospital was shown to differ"
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
    evidence = _strength(found, differing[worst], worst)
    return Strategy("clustered", f"A model for each of {told}", GROUP, reasons, evidence, changes)


def _alike(found: Assessment, differing: Mapping[SiteId, float]) -> Groups:
    """The sites that were not shown to differ, together; of the others, those that do not differ from one another."""
    groups = [[site for site in found.sites if site not in differing]]
    for site in differing:
        near = (g for g in groups[1:] if not any(set(found.differ(site, other)) & set(TESTED) for other in g))
        place = next(near, None)
        if place is None:
            groups.append([site])
        else:
            place.append(site)
    return tuple(tuple(g) for g in groups if g)


def _told(groups: Groups) -> str:
    """In words, not too many of them.

    >>> _told((("a", "b"), ("c",))), _told((("a",), tuple("bcdefghi")))
    ('{a, b} and {c}', '{a} and {8 others}')
    """
    largest = max(groups, key=len)
    short = [f"{len(g)} others" if g is largest and len(g) > 6 else ", ".join(g) for g in groups]
    return " and ".join("{" + text + "}" for text in short)


def _common_modalities(found: Assessment, findings: Sequence[Finding]) -> Iterator[Strategy]:
    gone = {q.of for q in _of(found, INTENSITY) for site, absent in q.absent.items() if absent == found.cases[site]}
    common = [q.of for q in _of(found, INTENSITY) if q.of not in gone]
    if gone and common:
        why = tuple(f.text for f in findings if f.about == "missing")
        price = "a model can rely everywhere on what every hospital acquires; the others lose what only they acquire"
        reasons = (*why, price)
        changes = {"data": {"modalities": common}, "algorithm": {"name": "fedavg"}}
        title = f"Federated averaging on {', '.join(common)} alone"
        yield Strategy("common-modalities", title, ONE, reasons, None, changes)


def _most_distant(found: Assessment, differing: Mapping[SiteId, float]) -> tuple[Distance, SiteId, float]:
    """The differing site that is farthest out, the distance by which it is, and how many times as far."""
    seen = [
        (remoteness(found.distances[name].matrix, found.index(site)), name, site)
        for (name, site), p in tests(found).items()
        if site in differing and p <= LEVEL
    ]
    times, name, site = max(seen)
    return found.distances[name], site, times


def _groups(by: Distance) -> Groups:
    """Clusters that stand apart, none of them a single site; nothing if there are none."""
    apart = by.silhouette >= GROUPED and len(by.linked) > 1 and min(map(len, by.linked)) > 1
    return by.linked if apart else ()


def _strength(found: Assessment, p: float, site: SiteId) -> Strength:
    """How sure: thin with few cases, clear where chance does this less than once in a hundred times."""
    return "thin" if found.cases[site] < FEW else "clear" if p <= 0.01 else "likely"


def _summary(found: Assessment, differing: Mapping[SiteId, float]) -> str:
    count = sum(found.cases[s] for s in found.sites)
    start = f"{len(found.sites)} hospitals with {count} cases were compared"
    if len(found.sites) == 2 and differing:
        return f"{start}: they differ by more than chance (p = {min(differing.values()):.3f})."
    if not differing:
        apart = [p for p in combinations(found.sites, 2) if set(found.differ(*p)) & set(TESTED)]
        told = ", ".join(f"{a} and {b}" for a, b in apart[:6])
        pairs = f", although these do from one another: {told}{' and more' * (len(apart) > 6)}" if apart else ""
        return f"{start}: none was shown to differ from the others{pairs}."
    told = ", ".join(f"{site} (p = {p:.3f})" for site, p in sorted(differing.items(), key=lambda e: e[1]))
    return f"{start}: {told} differ{'s' * (len(differing) == 1)} from the others by more than chance."


def _standing_out(found: Assessment, kind: str) -> Iterator[tuple[Quantity, SiteId]]:
    """Quantities in which a site differs from the others together."""
    for quantity in _of(found, kind):
        yield from ((quantity, site) for site in found.sites if found.stands_out(quantity, site))


def _out_of_size(found: Assessment, kind: str) -> Iterator[tuple[Quantity, SiteId, float, float]]:
    """Those of them whose medians are notably far apart: at the site, and elsewhere."""
    for quantity, site in _standing_out(found, kind):
        here, there = _median(found, quantity, [site]), _median(found, quantity, found.against[site])
        if here > 0 and there > 0 and _times(here, there) >= NOTABLE:
            yield quantity, site, here, there


def _about(findings: Sequence[Finding], site: SiteId) -> tuple[str, ...]:
    return tuple(f.text for f in findings if f.site == site)


def _of(found: Assessment, kind: str) -> list[Quantity]:
    return [q for q in found.quantities.values() if q.kind == kind]


def _median(found: Assessment, quantity: Quantity, sites: Sequence[SiteId]) -> float:
    """Over the cases of these sites in which it is not absent; 0 if there are none."""
    kept = [(v[v != 0], found.cases[s] / len(v)) for s, v in quantity.values.items() if s in sites]
    values = np.concatenate([v for v, _ in kept])
    if not len(values):
        return 0.0
    order = np.argsort(values)
    places = np.cumsum(np.concatenate([np.full(len(v), heavy) for v, heavy in kept])[order])
    at = np.searchsorted(places, [places[-1] / 2, places[-1] / 2 + 1e-9 * places[-1]])
    return float(values[order][np.minimum(at, len(values) - 1)].mean())


def _absent(found: Assessment, quantity: Quantity, sites: Sequence[SiteId]) -> float:
    """The share of the cases of these sites in which it is absent."""
    return sum(quantity.absent[s] for s in sites) / sum(found.cases[s] for s in sites)


def _times(here: float, there: float) -> float:
    return max(here / there, there / here)
