"""Recommendations from an assessment: findings in plain words, and strategies in order, each ready to run.

The rules, one function each:

    missing     a modality that a site never acquired, or not in all cases
    labels      labels of a site that are 1.5 times larger or smaller, or missing more often, than elsewhere
    brightness  intensities of a site that are 1.5 times higher or lower than elsewhere
    images      embeddings of a site that differ from those of all others together
    sizes       a site with four times as many cases as another
    thin        sites and pairs with too few cases for a conclusion; what noise adds, under differential privacy

A site differs if a permutation test against the other sites together has p <= 0.05, after Holm over all sites and over
both metadata and embeddings. The farthest of these sites is set apart before the others are tested again (of more than
30 sites, several at a time). Labels and
brightness use the same level, with Bonferroni over all sites, quantities and kinds of evidence. Then:

    no site differs      federated averaging, then FedProx: nothing measured speaks against one model for all
    one or more differ   one model with less weight for the farthest of them, if it is farther from the others than
                         these are from one another; then a model for each group, with the sites that do not differ in
                         one group and the others by similarity; federated averaging as the baseline
    brightness alone     federated averaging first: training normalises every scan, and the encoder sees no difference
    groups first         if average linkage finds groups of two or more with a silhouette of at least 0.5, or if the
                         site that differs holds more than half of all cases
    two sites            neither is the outlier of two: federated averaging, then local training
    uneven sizes         in addition, federated averaging with equal weights of the sites
    one or more differ   in addition, federated averaging with weights that fall with the distance of every site
    three sites or more  in addition, a model for each group around the outlier (Algorithm 1 of the paper), by metadata
                         and by embeddings, whether or not a site differs
    modalities missing   in addition, federated averaging on the modalities that all sites acquire

A group of one site is local training, and is called so; where all groups are of one, the strategy is local training.

The weight is one of the paper's: 0.5, 0.3 or 0.1 for a site that is less than 2, less than 4, or more than 4 times as
far from the others as these are from one another. The studies with the paper's other weights are written too, so that
the weight can be chosen by the validation score. Only training can show which of two strategies is better; the order
says what to try first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from polysite.errors import DataError
from polysite.heterogeneity.assessment import (
    LEVEL,
    METADATA,
    TESTED,
    TITLES,
    Assessment,
    Distance,
    Groups,
    Quantity,
    remoteness,
)
from polysite.heterogeneity.bounds import CLASS, INTENSITY, VOLUME
from polysite.metrics.statistics import holm
from polysite.payload import SiteId

NOTABLE = 1.5  # ratio of medians that is reported
FEW = 10  # cases; with fewer, a site's distances are uncertain
UNEVEN = 4  # ratio of numbers of cases that is reported
GROUPED = 0.5  # smallest silhouette of groups that are recommended
WEIGHTS, LEAST = ((2.0, 0.5), (4.0, 0.3)), 0.1  # (remoteness below, weight) pairs, and the weight beyond
OMEGAS = (0.1, 0.3, 0.5)  # the weights of the paper
PAPER = ("emd", "euclidean")  # the distances of the paper
NAMED = 4  # sites that a finding names
LISTED = 10  # sites; texts on more of them name the first ones and the number of others
REASONS = 12  # findings among the reasons of a strategy
HIDDEN = 1 / 3  # standard error by noise above which a difference of one standard deviation is hidden
SURE = 0.8  # share of the resamples with the same outlier
Strength = Literal["clear", "likely", "thin"]
Goal = Literal["one model for all", "a model for each group", "a model for each hospital"]
ONE: Goal = "one model for all"
GROUP: Goal = "a model for each group"
OWN: Goal = "a model for each hospital"


@dataclass(frozen=True)
class Finding:
    """One observation, in words for a clinician."""

    site: SiteId | None  # None for the whole federation
    about: str  # name of the rule
    text: str


@dataclass(frozen=True)
class Strategy:
    """A recommended way to train."""

    name: str
    title: str
    goal: Goal
    reasons: tuple[str, ...]
    evidence: Strength | None  # that the hospitals differ as the reasons say; None if nothing was tested
    changes: Mapping[str, Any]  # sections of the study that differ
    rank: int = 0  # 1 is to be tried first
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # changes with another value, by that value

    @property
    def file(self) -> str:
        """File name of the study that is ready to run."""
        return f"{self.rank}-{self.name}.toml"

    @property
    def files(self) -> dict[str, Mapping[str, Any]]:
        """Changes of every study that is ready to run, by file name; the variants come last."""
        others = {f"{self.rank}-{self.name}-{value}.toml": changes for value, changes in self.variants.items()}
        return {self.file: self.changes, **others}


@dataclass(frozen=True)
class Verdict:
    """Recommendations of an assessment."""

    summary: str
    findings: tuple[Finding, ...]
    strategies: tuple[Strategy, ...]
    cautions: tuple[str, ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Verdict":
        """Return the recommendations that ``assessment.json`` holds."""
        try:
            strategies = tuple(Strategy(**{**s, "reasons": tuple(s["reasons"])}) for s in plain["strategies"])
            findings = tuple(Finding(**f) for f in plain["findings"])
            return cls(str(plain["summary"]), findings, strategies, tuple(plain["cautions"]))
        except (KeyError, TypeError, AttributeError) as problem:
            raise DataError(f"the recommendations of an assessment cannot be read: {problem!r}") from problem


def judge(assessment: Assessment, modalities_can_change: bool = True, unseen: bool = False) -> Verdict:
    """Return the recommendations of an assessment.

    Args:
        assessment: The assessment.
        modalities_can_change: Whether a study can use fewer modalities.
        unseen: Whether some hospitals do not train; models of groups would not cover them.
    """
    differing = differ(assessment)
    findings = [f for rule in RULES for f in rule(assessment)]
    if len(assessment.sites) == 2:  # findings of one site hold for the other, reversed
        findings = [f for f in findings if f.about in ("missing", "sizes") or f.site == assessment.sites[0]]
    strategies = _around_outlier(assessment, list(_strategies(assessment, differing, findings)))
    strategies = [s for s in strategies if s.goal == ONE or not unseen]
    if modalities_can_change:
        strategies += _common_modalities(assessment, findings)
    ranked = tuple(replace(s, rank=k) for k, s in enumerate(strategies, start=1))
    return Verdict(_summary(assessment, differing), tuple(findings), ranked, tuple(thin(assessment)))


def differ(assessment: Assessment) -> dict[SiteId, float]:
    """Return the sites that differ significantly from all others pooled, with the lowest p-value over the distances."""
    least = {site: min(p for (_, s), p in tests(assessment).items() if s == site) for site in assessment.sites}
    return {site: p for site, p in least.items() if p <= LEVEL}


def tests(assessment: Assessment) -> dict[tuple[str, SiteId], float]:
    """Return the p-values, adjusted by Holm, of the difference of a site from all others, by (distance, site)."""
    p = {
        (name, s): assessment.distances[name].alone[s]
        for name in TESTED
        if name in assessment.distances
        for s in assessment.sites
    }
    return dict(zip(p, holm(np.array(list(p.values()))).tolist(), strict=True))


def missing(assessment: Assessment) -> Iterator[Finding]:
    """Yield modalities that a site did not acquire in some or all cases."""
    for quantity in _of(assessment, INTENSITY):
        for site, absent in quantity.absent.items():
            if absent == assessment.cases[site]:
                yield Finding(site, "missing", f"{quantity.of} was never acquired at {site}")
            elif absent:
                text = f"{quantity.of} is missing in {absent} of {assessment.cases[site]} cases of {site}"
                yield Finding(site, "missing", text)


def labels(assessment: Assessment) -> Iterator[Finding]:
    """Yield findings on labels that are larger, smaller, or missing more or less often at a site than elsewhere, and on
    classes with another share of the cases."""
    for quantity, site, here, there in _out_of_size(assessment, VOLUME):
        way = f"{_times(here, there):.1f} times {'larger' if here > there else 'smaller'}"
        where = _elsewhere(assessment, site)
        middle = "mean" if assessment.noise else "median"
        sizes = f"{middle} {here:.3g} {quantity.unit}, {where} {there:.3g} {quantity.unit}"
        yield Finding(site, "labels", f"{quantity.of} is {way} at {site}: {sizes}")
    for quantity, site in _standing_out(assessment, VOLUME):
        others = assessment.metadata.against[site]
        empty, usual = _absent(assessment, quantity, [site]), _absent(assessment, quantity, others)
        if abs(empty - usual) > 0.2:
            where = _elsewhere(assessment, site)
            text = f"{empty:.0%} of the cases of {site} have no {quantity.of}, {where} {usual:.0%}"
            yield Finding(site, "labels", text)
    for quantity, site in _standing_out(assessment, CLASS):
        others = assessment.metadata.against[site]
        here, there = (1 - _absent(assessment, quantity, which) for which in ([site], others))
        text = f"{here:.0%} of the cases of {site} are {quantity.of}, {_elsewhere(assessment, site)} {there:.0%}"
        yield Finding(site, "labels", text)


def images(assessment: Assessment) -> Iterator[Finding]:
    """Yield sites with embeddings that differ from those of the others."""
    for (name, site), p in tests(assessment).items():
        if name not in METADATA and p <= LEVEL:
            where = _elsewhere(assessment, site, name)
            text = f"to the encoder, scans of {site} look unlike those {where} (p = {p:.3f})"
            yield Finding(site, "images", text)


def brightness(assessment: Assessment) -> Iterator[Finding]:
    """Yield sites with higher or lower intensities than elsewhere."""
    for quantity, site, here, there in _out_of_size(assessment, INTENSITY):
        way = f"{_times(here, there):.1f} times {'higher' if here > there else 'lower'}"
        text = f"the largest {quantity.of} intensity is {way} at {site} than {_elsewhere(assessment, site)}"
        yield Finding(site, "brightness", f"{text}; normalising each scan, as training does, may undo this")


def sizes(assessment: Assessment) -> Iterator[Finding]:
    """Yield a finding if a site has many times the cases of another."""
    most, least = (f(assessment.sites, key=assessment.cases.__getitem__) for f in (max, min))
    times = assessment.cases[most] / assessment.cases[least]
    if times >= UNEVEN:
        text = f"{most} has {times:.0f} times as many cases as {least}, and counts for as much more in a mean by cases"
        yield Finding(None, "sizes", text)


RULES = (missing, labels, images, brightness, sizes)


def thin(assessment: Assessment) -> Iterator[str]:
    """Yield cautions about sites and pairs with too few cases."""
    for site in assessment.silent:
        count = assessment.cases[site]
        yield f"{site} has {count} case{'s' * (count != 1)}: too few to be described without describing a patient"
    few = [site for site in assessment.sites if assessment.cases[site] < FEW]
    if few:
        listed = some([f"{site} ({assessment.cases[site]})" for site in few])
        yield f"fewer than {FEW} cases at {listed}: distances are uncertain, and a difference may go unnoticed"
    unable = assessment.unable()
    if 0 < len(unable) <= 6:
        listed = ", ".join(f"{one} from {other}" for one, other in unable)
        yield f"no test could tell {listed}, however different they are: they have too few cases"
    elif unable:
        yield f"{len(unable)} pairs have too few cases for any test to tell them apart, however different they are"
    yield from assessment.limits
    yield from _noise(assessment)
    if not any(d.matrix.any() for d in assessment.distances.values()):
        yield "the hospitals are the same in everything that was measured"
    least, *others = sorted(assessment.cases[site] for site in assessment.sites)
    smallest = min(assessment.sites, key=assessment.cases.__getitem__)
    alone = not others or least < others[0]
    named = any(d.outlier == smallest for d in assessment.distances.values())
    if alone and named and smallest not in differ(assessment):
        yield f"of those compared, {smallest} has the fewest cases, and few cases look distant by chance alone"
    unsure = [d for d in assessment.distances.values() if d.named[d.outlier] < SURE]
    if unsure and len(assessment.sites) > 2:
        listed = "; ".join(f"{d.outlier} in {d.named[d.outlier]:.0%} by {d.title}" for d in unsure)
        yield f"the most distant hospital is not always the same when cases are drawn again: {listed}"
    yield from unsettled(assessment)


def _noise(assessment: Assessment) -> Iterator[str]:
    """Yield what noise does to the distances, if there is any."""
    if not assessment.noise:
        return
    cost = f"noise for epsilon = {assessment.noise.epsilon:g} (delta = {assessment.noise.delta:g})"
    errors = [f"{_usual_error(d):.2g} to the {d.title}" for d in assessment.distances.values() if d.error is not None]
    yield f"{cost} adds a standard error of {' and of '.join(errors)}, for half of the pairs"
    if assessment.noise.hidden:
        yield (
            f"noise hides how much these vary: {some(assessment.noise.hidden)}; their shifts are in deviations of the "
            "noise, and narrower ranges (assess.private), a larger epsilon or more cases would help"
        )
    yield (
        "under noise, sums of bounded numbers are compared: differences between hospitals that leave the means of "
        "quantities and embeddings as they are go unnoticed"
    )


def _usual_error(distance: Distance) -> float:
    """Return the median, over the pairs, of the standard error that noise adds."""
    if distance.error is None:
        return 0.0
    return float(np.median(distance.error[np.triu_indices(len(distance.error), 1)]))


def unsettled(assessment: Assessment) -> Iterator[str]:
    """Yield the settings that would name another most distant hospital: scale, combination, encoder."""
    for name, others in assessment.alternatives.items():
        distance = assessment.distances[name]
        changed = [f"{site} with {setting}" for setting, site in others.items() if site != distance.outlier]
        if changed and len(assessment.sites) > 2:
            outlier = f"by the {distance.title} the most distant hospital is {distance.outlier}"
            yield f"{outlier}, but it would be {', '.join(changed)}"


def weight(times: float) -> float:
    """Return the recommended weight of a site with this remoteness.

    >>> weight(1.4), weight(3), weight(10)
    (0.5, 0.3, 0.1)
    """
    return next((factor for below, factor in WEIGHTS if times < below), LEAST)


def _strategies(
    assessment: Assessment, differing: Mapping[SiteId, float], findings: Sequence[Finding]
) -> Iterator[Strategy]:
    if not differing:
        reason = "no hospital was shown to differ, so one model of all cases has the most to learn from"
        yield _mean(reason)
        reason = "a cheap safeguard, in case a difference went unnoticed"
        changes = {"algorithm": {"name": "fedprox", "mu": 0.01}}
        yield Strategy("fedprox", "FedProx: hospitals held near the shared model", ONE, (reason,), None, changes)
    else:
        by, site, times = _most_distant(assessment, differing)
        groups = _groups(by)
        clusters = _clustered(assessment, by, groups, differing, findings)
        reasons = _about(findings, site)
        down = _weighted(assessment, by, site, times, reasons, _strength(assessment, differing[site], site))
        mean = _mean("the yardstick: what the other strategies have to beat")
        dull = {f.about for f in findings if f.site in differing} == {"brightness"}  # not in the embeddings
        if dull:
            mean = _mean("only the brightness of scans was shown to differ, which normalising them may undo")
            down = replace(down, evidence="thin")
        if times <= 1:
            yield from [clusters, mean] if groups else [mean, clusters]
        elif dull:
            yield from [mean, down, clusters]
        elif groups or assessment.cases[site] > sum(assessment.cases.values()) / 2:
            yield from [clusters, down, mean]
        else:
            yield from [down, clusters, mean]
    uneven = tuple(f.text for f in findings if f.about == "sizes")
    if uneven:
        title = "Federated averaging in which every hospital counts alike"
        changes = {"algorithm": {"name": "fedavg", "uniform": True}}
        reason = "this way small hospitals have the same say; large ones may get a little less"
        yield Strategy("uniform", title, ONE, (*uneven, reason), None, changes)
    if differing and times > 1:
        yield from _graded(by, down.evidence)


def _mean(reason: str) -> Strategy:
    return Strategy("fedavg", "Federated averaging", ONE, (reason,), None, {"algorithm": {"name": "fedavg"}})


def _weighted(
    assessment: Assessment, by: Distance, site: SiteId, times: float, seen: tuple[str, ...], evidence: Strength
) -> Strategy:
    factor = weight(times)
    far = f"{site} is {times:.1f} times as far from the others as these are from one another ({by.title})"
    rest = sum(assessment.cases.values()) - assessment.cases[site]
    before, after = (w * assessment.cases[site] / (w * assessment.cases[site] + rest) for w in (1.0, factor))
    effect = f"with weight {factor:g} its share of the mean falls from {before:.0%} to {after:.0%}"
    others = [omega for omega in OMEGAS if omega != factor]
    try_all = (
        f"which weight is best shows only in training: {' and '.join(f'{omega:g}' for omega in others)}, the paper's "
        "others, have studies too; keep the one with the highest validation score"
    )
    title = f"Federated averaging with weight {factor:g} for {site}"
    variants = {f"{omega:g}": _weights({site: omega}) for omega in others}
    reasons = (*seen, far, effect, try_all)
    return Strategy("weighted", title, ONE, reasons, evidence, _weights({site: factor}), variants=variants)


def _graded(by: Distance, evidence: Strength | None) -> Iterator[Strategy]:
    """Recommend weights that fall with the distance of every site."""
    factors = {site: round(factor, 3) for site, factor in by.graded.items() if factor < 0.9995}
    if not factors:
        return
    listed = some([f"{site} {factors[site]:g}" for site in sorted(factors, key=factors.__getitem__)])
    how = f"the farther a hospital is from the others ({by.title}), the less it counts: {listed}; the others 1"
    choice = "no hospital is picked out, and no weight has to be chosen"
    title = "Federated averaging with weights that fall with the distance"
    yield Strategy("graded", title, ONE, (how, choice), evidence, _weights(factors))


def _weights(factors: Mapping[SiteId, float]) -> dict[str, Any]:
    return {"algorithm": {"name": "weighted", "weights": dict(factors), "inner": {"name": "fedavg"}}}


def _clustered(
    assessment: Assessment, by: Distance, apart: Groups, differing: Mapping[SiteId, float], findings: Sequence[Finding]
) -> Strategy:
    """Recommend one model per group: the clear clusters, or, without any, groups of sites that do not differ."""
    groups = apart or _alike(assessment, differing)
    if apart:
        how = f"these groups stand apart (silhouette {by.silhouette:.2f}, {by.title})"
    else:
        how = "within a group, no hospital was shown to differ"
    seen = [text for site in differing for text in _about(findings, site)]
    if len(seen) > REASONS:
        seen = [*seen[:REASONS], f"{len(seen) - REASONS} more findings on {len(differing)} hospitals that differ"]
    worst = min(differing, key=differing.__getitem__)
    evidence = _strength(assessment, differing[worst], worst)
    return _of_groups(assessment, "clustered", groups, (*seen, how), evidence)


def _around_outlier(assessment: Assessment, offered: list[Strategy]) -> list[Strategy]:
    """Return the strategies with those of Algorithm 1: groups around the outlier, by either distance of the paper.

    Groups that are offered already get one more reason instead.
    """
    if len(assessment.sites) < 3:
        return offered
    found: dict[Groups, list[str]] = {}
    for name in (n for n in PAPER if n in assessment.distances):
        found.setdefault(assessment.distances[name].clusters, []).append(name)
    for groups, names in found.items():
        outlier = " and ".join(dict.fromkeys(assessment.distances[n].outlier for n in names))
        titles = " and ".join(TITLES[n] for n in names)
        how = f"{outlier}, the most distant by the {titles}, with those nearest to it, apart from the others"
        how += " (Algorithm 1 of the paper)"
        untested = "groups of this kind are formed whether or not hospitals differ by more than chance"
        new = _of_groups(assessment, f"clustered-{names[0]}", groups, (how, untested), None)
        same = next((k for k, s in enumerate(offered) if _groups_of(s) == _groups_of(new)), None)
        if same is None:
            offered = [*offered, new]
        else:
            offered[same] = replace(offered[same], reasons=(*offered[same].reasons, f"also the groups around {how}"))
    return offered


def _groups_of(strategy: Strategy) -> set[frozenset[SiteId]] | None:
    """Return the groups of sites that a strategy trains, in no order; None if it trains no groups."""
    groups = strategy.changes["algorithm"].get("groups")
    return None if groups is None else {frozenset(group) for group in groups.values()}


def _of_groups(
    assessment: Assessment, name: str, groups: Groups, reasons: tuple[str, ...], evidence: Strength | None
) -> Strategy:
    """Return the strategy of one model per group; a group of one site is called local training."""
    if all(len(group) == 1 for group in groups):
        few = "each learns from its own cases alone: nothing is exchanged, so no hospital gains from the others"
        changes: dict[str, Any] = {"algorithm": {"name": "local"}}
        return Strategy("local", "Local training at every hospital", OWN, (*reasons, few), evidence, changes)
    title = _title(groups)
    # these sites train, but could not be compared
    rest = [site for site in {**assessment.cases, **assessment.refused} if site not in assessment.sites]
    if rest:
        largest = max(groups, key=lambda g: sum(assessment.cases[s] for s in g))
        groups = tuple((*g, *rest) if g is largest else g for g in groups)
        reasons = (*reasons, f"{', '.join(rest)} could not be compared and joins the largest group")
    single = [g[0] for g in groups if len(g) == 1]
    alone = some([f"{site} ({assessment.cases[site]})" for site in single])
    reasons = (*reasons, "each group trains a model of its own, on fewer cases")
    if single:
        reasons = (*reasons, f"alone in a group is local training, on the hospital's own cases: {alone}")
    named = {f"group-{k}": list(group) for k, group in enumerate(groups, start=1)}
    changes = {"algorithm": {"name": "clustered", "groups": named, "inner": {"name": "fedavg"}}}
    return Strategy(name, title, GROUP, reasons, evidence, changes)


def _title(groups: Groups) -> str:
    """Return the title of a strategy with a model per group.

    >>> _title((("a", "b"), ("c", "d"))), _title((("a", "b"), ("c",)))
    ('A model for each of {a, b} and {c, d}', 'A model for {a, b}, local training at c')
    """
    several = tuple(g for g in groups if len(g) > 1)
    alone = [g[0] for g in groups if len(g) == 1]
    start = f"A model for {'each of ' * (len(several) > 1)}{_in_words(several)}"
    return start + (f", local training at {some(alone)}" if alone else "")


def _alike(assessment: Assessment, differing: Mapping[SiteId, float]) -> Groups:
    """Return groups of sites: first the sites that do not differ from the others, then groups of differing sites that
    do not differ from one another."""
    groups = [[site for site in assessment.sites if site not in differing]]
    for site in differing:
        near = (g for g in groups[1:] if not any(set(assessment.differ(site, other)) & set(TESTED) for other in g))
        place = next(near, None)
        if place is None:
            groups.append([site])
        else:
            place.append(site)
    return tuple(tuple(g) for g in groups if g)


def some(names: Sequence[str]) -> str:
    """Return a list in words; of a long one, only the first names and the number of others.

    >>> some("ab"), some("abcdefghijkl")
    ('a, b', 'a, b, c, d and 8 more')
    """
    if len(names) <= LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _in_words(groups: Groups) -> str:
    """Return a short description of groups.

    >>> _in_words((("a", "b"), ("c",))), _in_words((("a",), tuple("bcdefghi")))
    ('{a, b} and {c}', '{a} and {8 others}')
    """
    largest = max(groups, key=len)
    short = [f"{len(g)} others" if g is largest and len(g) > 6 else some(g) for g in groups]
    return " and ".join("{" + text + "}" for text in short)


def _common_modalities(assessment: Assessment, findings: Sequence[Finding]) -> Iterator[Strategy]:
    gone = {
        q.of
        for q in _of(assessment, INTENSITY)
        for site, absent in q.absent.items()
        if absent == assessment.cases[site]
    }
    common = [q.of for q in _of(assessment, INTENSITY) if q.of not in gone]
    if gone and common:
        why = tuple(f.text for f in findings if f.about == "missing")
        price = "a model can rely everywhere on what every hospital acquires; the others lose what only they acquire"
        reasons = (*why, price)
        changes = {"data": {"modalities": common}, "algorithm": {"name": "fedavg"}}
        title = f"Federated averaging on {', '.join(common)} alone"
        yield Strategy("common-modalities", title, ONE, reasons, None, changes)


def _most_distant(assessment: Assessment, differing: Mapping[SiteId, float]) -> tuple[Distance, SiteId, float]:
    """Return the differing site with the largest remoteness, with the distance and the remoteness."""
    seen = [
        (remoteness(assessment.distances[name].matrix, assessment.index(site)), name, site)
        for (name, site), p in tests(assessment).items()
        if site in differing and p <= LEVEL
    ]
    times, name, site = max(seen)
    return assessment.distances[name], site, times


def _groups(by: Distance) -> Groups:
    """Return well separated clusters of two or more sites each; nothing if there are none."""
    apart = by.silhouette >= GROUPED and len(by.linked) > 1 and min(map(len, by.linked)) > 1
    return by.linked if apart else ()


def _strength(assessment: Assessment, p: float, site: SiteId) -> Strength:
    """Return the strength of evidence: thin with few cases, clear if p <= 0.01, else likely."""
    return "thin" if assessment.cases[site] < FEW else "clear" if p <= 0.01 else "likely"


def _summary(assessment: Assessment, differing: Mapping[SiteId, float]) -> str:
    count = sum(assessment.cases[s] for s in assessment.sites)
    start = f"{len(assessment.sites)} hospitals with {count} cases were compared"
    if len(assessment.sites) == 2 and differing:
        return f"{start}: they differ by more than chance (p = {min(differing.values()):.3f})."
    if not differing:
        apart = [p for p in combinations(assessment.sites, 2) if set(assessment.differ(*p)) & set(TESTED)]
        listed = ", ".join(f"{a} and {b}" for a, b in apart[:6])
        pairs = f", although these do from one another: {listed}{' and more' * (len(apart) > 6)}" if apart else ""
        error = _usual_error(assessment.metadata)
        hidden = len(assessment.noise.hidden) if assessment.noise else 0
        if assessment.noise and not apart and (error > HIDDEN or 2 * hidden > len(assessment.quantities)):
            return (
                f"Too few cases to tell under this privacy: {start}, and noise for epsilon = "
                f"{assessment.noise.epsilon:g} adds a standard error of {error:.2g} standard deviations to the "
                f"{assessment.metadata.title}, so that differences below {3 * error:.2g} are hidden."
            )
        few, blind = [s for s in assessment.sites if assessment.cases[s] < FEW], assessment.untestable()
        if not apart and len(blind) == len(assessment.sites):
            return f"Too few cases to tell: {start}, and no test could show a difference, however large it is."
        if not apart and 2 * len(few) > len(assessment.sites):
            hospitals = "all" if len(few) == len(assessment.sites) else f"{len(few)} of the {len(assessment.sites)}"
            doubt = f"but {hospitals} have fewer than {FEW} cases, so that a difference may go unnoticed"
            return f"{start}: none was shown to differ from the others, {doubt}."
        return f"{start}: none was shown to differ from the others{pairs}."
    named = [f"{site} (p = {p:.3f})" for site, p in sorted(differing.items(), key=lambda e: e[1])]
    return f"{start}: {some(named)} differ{'s' * (len(differing) == 1)} from the others by more than chance."


def _standing_out(assessment: Assessment, kind: str) -> Iterator[tuple[Quantity, SiteId]]:
    """Yield the quantities in which a site differs from the others together."""
    for quantity in _of(assessment, kind):
        yield from ((quantity, site) for site in assessment.sites if assessment.stands_out(quantity, site))


def _out_of_size(assessment: Assessment, kind: str) -> Iterator[tuple[Quantity, SiteId, float, float]]:
    """Yield (quantity, site, median at the site, median elsewhere) where the site differs significantly and the ratio
    of the medians is notable."""
    for quantity, site in _standing_out(assessment, kind):
        others = assessment.metadata.against[site]
        here, there = _median(assessment, quantity, [site]), _median(assessment, quantity, others)
        if here > 0 and there > 0 and _times(here, there) >= NOTABLE:
            yield quantity, site, here, there


def _elsewhere(assessment: Assessment, site: SiteId, name: str = "") -> str:
    """Return the sites that a site was tested against in words: "elsewhere" if these are all others."""
    others = (assessment.distances[name] if name else assessment.metadata).against[site]
    if len(others) == len(assessment.sites) - 1 > 1:
        return "elsewhere"
    return f"at {' and '.join(others)}" if len(others) <= NAMED else f"at {len(others)} of the others"


def _about(findings: Sequence[Finding], site: SiteId) -> tuple[str, ...]:
    return tuple(f.text for f in findings if f.site == site)


def _of(assessment: Assessment, kind: str) -> list[Quantity]:
    return [q for q in assessment.quantities.values() if q.kind == kind]


def _median(assessment: Assessment, quantity: Quantity, sites: Sequence[SiteId]) -> float:
    """Return the median over the cases of these sites that have the quantity; 0 if there are none."""
    kept = [(v[v != 0], assessment.cases[s] / len(v)) for s, v in quantity.values.items() if s in sites]
    values = np.concatenate([v for v, _ in kept])
    if not len(values):
        return 0.0
    order = np.argsort(values)
    places = np.cumsum(np.concatenate([np.full(len(v), heavy) for v, heavy in kept])[order])
    at = np.searchsorted(places, [places[-1] / 2, places[-1] / 2 + 1e-9 * places[-1]])
    return float(values[order][np.minimum(at, len(values) - 1)].mean())


def _absent(assessment: Assessment, quantity: Quantity, sites: Sequence[SiteId]) -> float:
    """Return the share of the cases of these sites that lack the quantity."""
    return sum(quantity.absent[s] for s in sites) / sum(assessment.cases[s] for s in sites)


def _times(here: float, there: float) -> float:
    return max(here / there, there / here)
