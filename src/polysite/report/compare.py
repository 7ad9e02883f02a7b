"""Methods side by side: the tables of a paper, and whether a difference is more than chance.

Every test is paired by case: Wilcoxon's signed-rank test of a method against the reference, on the mean over labels,
Holm's correction over all methods that are tested by the same measure. Beside the p stand the effect (the matched-pairs
rank-biserial correlation: +1 if every case is better, -1 if every case is worse), the mean difference with a bootstrap
interval (cases resampled within their hospital), and how many hospitals and cases are better or worse off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import fmean

import numpy as np

from polysite.errors import ConfigError, RunError, nearest
from polysite.metrics import classification
from polysite.metrics.fairness import Fairness, fairness
from polysite.metrics.measures import BETTER, DISTANCES, EmptyMaskPolicy
from polysite.metrics.statistics import Tail, holm, interval, rank_biserial, signed_rank, wins
from polysite.report.grid import Cell, Grid, Line, mark_best, name, number, spread
from polysite.report.runs import Key, Method

LEVEL = 0.05
NAMES = {
    "dice": "Dice", "iou": "IoU", "sensitivity": "sensitivity", "specificity": "specificity", "hd95": "HD95",
    "assd": "ASSD", "nsd": "NSD", "accuracy": "accuracy",
}  # fmt: skip


@dataclass(frozen=True)
class Test:
    """A method against the reference, by one measure. Differences are such that more than 0 is better."""

    measure: str
    method: str
    cases: int
    difference: float
    low: float
    high: float
    p: float
    adjusted: float
    effect: float
    cases_won: tuple[int, int, int]  # better, equal, worse
    hospitals_won: tuple[int, int, int]

    @property
    def significant(self) -> bool:
        return self.adjusted <= LEVEL


@dataclass(frozen=True)
class Comparison:
    methods: Sequence[Method]
    reference: str
    policy: EmptyMaskPolicy
    tests: Sequence[Test]
    remarks: Sequence[str]
    tail: Tail = "two-sided"

    @property
    def measures(self) -> list[str]:
        """What is known of every method; the first is the main one."""
        if self.methods[0].first.measure != "Dice":
            return ["accuracy"]
        every = all(m.evaluated for m in self.methods)
        return ["dice", "iou", "sensitivity", "specificity", "hd95", "assd", "nsd"] if every else ["dice"]

    @property
    def main(self) -> str:
        return self.measures[0]

    @property
    def unit(self) -> str:
        """Of distances; nothing where the files do not say."""
        found = {str(run.evaluation.about["unit"]) for m in self.methods for run in m.runs if run.evaluation}
        return found.pop() if len(found) == 1 else ""

    @property
    def sites(self) -> list[str]:
        return sorted({s for m in self.methods for s in m.sites})

    def fairness(self, method: Method) -> Fairness:
        return fairness({s: fmean(v) for s in method.sites if (v := method.of(s, self.main, self.policy))})


def compare(
    methods: Sequence[Method],
    reference: str | None = None,
    policy: EmptyMaskPolicy = EmptyMaskPolicy(),
    tail: Tail = "two-sided",
) -> Comparison:
    """Compare finished runs of one task on the same patients."""
    names = [m.name for m in methods]
    _comparable(methods)
    if reference is not None and reference not in names:
        raise ConfigError(f"there is no method {reference!r} to compare with; {nearest(reference, names)}")
    chosen = reference or ("fedavg" if "fedavg" in names else names[0])
    bare = Comparison(methods, chosen, policy, (), (), tail)
    tested = [k for k in ("dice", "hd95", "accuracy") if k in bare.measures]
    tests = [t for measure in tested for t in _tests(bare, measure, tail)]
    return replace(bare, tests=tests, remarks=list(_remarks(bare)))


def _comparable(methods: Sequence[Method]) -> None:
    if not methods:
        raise RunError("there is nothing to compare; name finished run folders")
    for run in (run for m in methods for run in m.runs):
        if not run.finished:
            raise RunError(f"{run.path} has not finished; 'polysite train --resume {run.path}' brings it to its end")
    first = methods[0].first
    for run in (run for m in methods for run in m.runs):
        if (run.measure, run.labels, run.split) != (first.measure, first.labels, first.split):
            raise RunError(
                f"{run.path} cannot be compared with {first.path}: {_what(run.measure, run.labels, run.split)} against "
                f"{_what(first.measure, first.labels, first.split)}"
            )
    shared = set.intersection(*(set(m.values(_main(m))) for m in methods))
    if not shared:
        raise RunError("these runs have no examined case in common, so they cannot be compared")


def _what(measure: str, labels: Sequence[str], split: str) -> str:
    return f"{measure} of {', '.join(labels)} on {split} patients"


def _main(method: Method) -> str:
    return "dice" if method.first.measure == "Dice" else "accuracy"


def _tests(bare: Comparison, measure: str, tail: Tail) -> list[Test]:
    """Every other method against the reference, corrected for their number."""
    usual = next(m for m in bare.methods if m.name == bare.reference)
    found = []
    for method in bare.methods:
        pairs = _gains(method, usual, measure, bare.policy)
        if method.name == bare.reference or not pairs:
            continue
        gain, sites = np.array(list(pairs.values())), [site for site, _ in pairs]
        hospitals = [float(gain[[s == site for s in sites]].mean()) for site in dict.fromkeys(sites)]
        alone = {site for site in sites if sites.count(site) == 1}  # of one case nothing can be drawn again
        low, high = interval(gain, ["" if site in alone else site for site in sites])
        p, effect, mean = signed_rank(gain, tail), rank_biserial(gain), float(gain.mean())
        found.append(Test(measure, method.name, len(pairs), mean, low, high, p, p, effect, wins(gain), wins(hospitals)))
    corrected = holm(np.array([t.p for t in found]))
    return [replace(t, adjusted=float(p)) for t, p in zip(found, corrected, strict=True)]


def _gains(mine: Method, usual: Method, measure: str, policy: EmptyMaskPolicy) -> dict[Key, float]:
    """By how much a method is better, case by case: the mean over the labels that at least one of both has a value for.

    A distance is none where both masks are empty. If the other method finds something there, its penalty is held
    against 0: a false alarm must not fall out of the comparison. Where the policy leaves such cases out, so does this.
    """
    gains: dict[Key, list[float]] = {}
    for label in mine.first.labels:
        a, b = mine.values(measure, policy, label), usual.values(measure, policy, label)
        whole = measure in DISTANCES and policy.empty == "penalty"
        for key in (a.keys() | b.keys()) if whole else (a.keys() & b.keys()):
            if key in mine.keys and key in usual.keys:
                gains.setdefault(key, []).append(BETTER[measure] * (a.get(key, 0.0) - b.get(key, 0.0)))
    return {key: fmean(gains[key]) for key in sorted(gains)}


def _remarks(bare: Comparison) -> list[str]:
    """What a reader should know before believing a table."""
    said = []
    values = {m.name: m.values(bare.main, bare.policy) for m in bare.methods}
    common = set.intersection(*map(set, values.values()))
    uneven = [f"{n} ({len(v)})" for n, v in values.items() if len(v) != len(common)]
    if uneven:
        said.append(
            f"{len(common)} cases were examined by all methods; more by {', '.join(uneven)}. Tables show all cases of "
            "a method, tests only those that both have."
        )
    runs = {m.name: len(m.runs) for m in bare.methods}
    if len(set(runs.values())) > 1:
        said.append(f"The methods have different numbers of runs: {', '.join(f'{n} {k}' for n, k in runs.items())}.")
    small = sorted(s for s in bare.sites if sum(site == s for site, _ in common) < 5)
    if small:
        said.append(
            f"{', '.join(small)} {'has' if len(small) == 1 else 'have'} fewer than five cases here: "
            "the mean of one hospital is then hardly more than an anecdote."
        )
    if bare.methods[0].first.split == "validation":
        said.append("These are the patients on which the best round was chosen: the scores are too good.")
    if len(bare.methods) > 1 and len(common) < 6:
        said.append(f"With {len(common)} cases no test can show a difference.")
    tolerances = {run.evaluation.about["tolerance"] for m in bare.methods for run in m.runs if run.evaluation}
    if len(tolerances) > 1:
        said.append(f"NSD was measured with different tolerances: {', '.join(f'{t:g}' for t in sorted(tolerances))}.")
    if bare.main == "dice" and bare.measures == ["dice"] and any(m.evaluated for m in bare.methods):
        missing = [m.name for m in bare.methods if not m.evaluated]
        said.append(f"Only Dice is shown: 'polysite evaluate' has not measured {', '.join(missing)}.")
    if "hd95" in bare.measures and not bare.unit:
        said.append("The voxel size is not known in millimetres, so distances are in the unit of the files.")
    return said


def tables(found: Comparison) -> list[Grid]:
    """The tables in the order of a paper: overview, hospitals, tests, what empty masks did."""
    if found.main == "accuracy":
        return [_classes(found), _hospitals(found, "accuracy"), _fair(found), *_tested(found), *_peeked(found)]
    grids = [_overview(found), _hospitals(found, "dice")]
    if "hd95" in found.measures:
        grids += [_hospitals(found, "hd95"), _more(found)]
    grids += [_fair(found), *_tested(found), *_peeked(found)]
    return [*grids, _empties(found)] if "hd95" in found.measures else grids


def _unit(found: Comparison, measure: str) -> str:
    return f"{NAMES[measure]} ({found.unit})" if measure in DISTANCES and found.unit else NAMES[measure]


def _digits(measure: str) -> int:
    return 2 if measure in DISTANCES else 3


def _overview(found: Comparison) -> Grid:
    """Mean ± standard deviation over all cases, per label, with HD95."""
    labels, distance = found.methods[0].first.labels, "hd95" in found.measures
    several = len(labels) > 1
    seeds = max(len(m.spread(found.main, found.policy)) for m in found.methods) > 1
    head = ["method", "Dice", *(f"Dice {k}" for k in labels if several)]
    head += [_unit(found, "hd95")] if distance else []
    head += ["over seeds"] if seeds else []
    lines = []
    for m in found.methods:
        cells = [name(m.name), spread(m.of(None, "dice", found.policy))]
        cells += [spread(m.of(None, "dice", found.policy, k)) for k in labels if several]
        cells += [spread(m.of(None, "hd95", found.policy), 2)] if distance else []
        cells += [spread(m.spread("dice", found.policy))] if seeds else []
        lines.append(Line(tuple(cells)))
    better = [0, *[1] * (1 + len(labels) * several), *[-1] * distance, *[0] * seeds]
    cases = len(found.methods[0].values("dice", found.policy))
    note = f"Mean ± standard deviation over the {cases} {_part(found)} cases of all hospitals"
    note += "; Dice is the mean over the labels of a case. " if several else ". "
    note += found.policy.words if distance else "Both masks empty counts as Dice 1, exactly one as 0."
    note += " Over seeds: mean of all cases ± its deviation over the seeds." if seeds else ""
    return Grid("overview", "What the patients get", tuple(head), mark_best(lines, better), note)


def _part(found: Comparison) -> str:
    return found.methods[0].first.split


def _hospitals(found: Comparison, measure: str) -> Grid:
    """Every hospital by every method; whichever are more stand in the rows."""
    digits, better = _digits(measure), BETTER[measure]
    unseen = found.methods[0].first.unseen
    shown = {s: f"{s} (unseen)" if s in unseen else s for s in found.sites}
    cells = {
        (m.name, s): spread(m.of(s, measure, found.policy), digits) for m in found.methods for s in (*found.sites, None)
    }
    counts = {s: len(found.methods[0].of(s, found.main, found.policy)) for s in found.sites}
    title = f"{_unit(found, measure)} hospital by hospital"
    note = f"Mean ± standard deviation over the {_part(found)} cases of a hospital; the best of each is marked."
    if len(found.methods) > len(found.sites):
        columns = [*found.sites, None]
        head = ("method", *(f"{shown[s]} ({counts[s]})" if s else "all" for s in columns))
        lines = [Line((name(m.name), *(cells[m.name, s] for s in columns))) for m in found.methods]
        return Grid(f"hospitals_{measure}", title, head, mark_best(lines, [0, *[better] * len(columns)]), note)
    head = ("hospital", "cases", *(m.name for m in found.methods))
    lines = [
        _across(shown[s] if s else "all", counts[s] if s else sum(counts.values()), s, cells, found, better)
        for s in (*found.sites, None)
    ]
    return Grid(f"hospitals_{measure}", title, head, tuple(lines), note)


def _across(
    title: str, count: int, site: str | None, cells: dict[tuple[str, str | None], Cell], found: Comparison, better: int
) -> Line:
    """A row in which the best is marked."""
    row = [cells[m.name, site] for m in found.methods]
    known = [c.value for c in row if c.value is not None]
    top = (max(known) if better > 0 else min(known)) if len(known) > 1 else None
    marked = [Cell(c.text, c.value, top is not None and c.value == top) for c in row]
    return Line((name(title), number(count, "d"), *marked), "" if site else "total")


def _more(found: Comparison) -> Grid:
    """The other measures."""
    rest = [k for k in found.measures if k not in ("dice", "hd95")]
    lines = [Line((name(m.name), *(_wide(m, k, found.policy) for k in rest))) for m in found.methods]
    tolerance = {m.first.evaluation.about["tolerance"] for m in found.methods if m.first.evaluation}
    note = (
        "Mean ± standard deviation over cases of the mean over labels. ASSD: average symmetric surface distance. "
        f"NSD: share of both surfaces within {', '.join(f'{t:g}' for t in sorted(tolerance))} "
        f"{found.unit or 'of the files’ unit'} of the other. Specificity counts the voxels of the prepared image."
    )
    head = ("method", *(_unit(found, k) for k in rest))
    return Grid("measures", "Other measures", head, mark_best(lines, [0, *(BETTER[k] for k in rest)]), note)


def _wide(method: Method, measure: str, policy: EmptyMaskPolicy) -> Cell:
    return spread(method.of(None, measure, policy), _digits(measure))


def _fair(found: Comparison) -> Grid:
    """How evenly the hospitals are served."""
    lines = []
    for m in found.methods:
        f = found.fairness(m)
        worst = Cell(f"{f.worst[1]:.3f} ({f.worst[0]})", f.worst[1])
        lines.append(
            Line((name(m.name), number(f.mean), worst, number(f.spread), number(f.std), number(f.jain, ".4f")))
        )
    head = ("method", "mean of hospitals", "worst hospital", "best − worst", "std over hospitals", "Jain index")
    note = f"Every hospital counts once, with its mean {NAMES[found.main]}. "
    note += "Jain's index is 1 if all are served alike, 1/K at worst."
    return Grid("fairness", "How evenly", head, mark_best(lines, [0, 1, 1, -1, -1, 1]), note)


def _tested(found: Comparison) -> list[Grid]:
    grids = []
    for measure in dict.fromkeys(t.measure for t in found.tests):
        tests = [t for t in found.tests if t.measure == measure]
        digits = _digits(measure)
        lines = []
        for t in tests:
            gain = Cell(f"{t.difference:+.{digits}f} [{t.low:+.{digits}f}, {t.high:+.{digits}f}]", t.difference)
            cells = (
                name(t.method), gain, number(t.effect, "+.2f"), _p(t.p), _p(t.adjusted, " *" * t.significant),
                Cell("{} / {} / {}".format(*t.cases_won), t.cases_won[0]),
                Cell("{} / {} / {}".format(*t.hospitals_won), t.hospitals_won[0]),
            )  # fmt: skip
            lines.append(Line(cells))
        head = (
            "method", f"gain in {NAMES[measure]} [95 %]", "effect", "p", "p (Holm)", "cases + / = / −",
            "hospitals + / = / −",
        )  # fmt: skip
        note = (
            f"Against {found.reference}, paired by case. A gain above 0 is better, also for distances. p: Wilcoxon's "
            f"signed-rank test, {found.tail}; Holm: corrected for the number of methods in this table, * at {LEVEL:g}. "
            "Effect: matched-pairs rank-biserial correlation. Interval: bootstrap, cases within their hospital. Cases "
            "of one hospital, and folds that share training cases, are less independent than the test takes them to be."
        )
        title = f"Against {found.reference}: {NAMES[measure]}"
        grids.append(Grid(f"tests_{measure}", title, head, tuple(lines), note))
    return grids


def _p(value: float, star: str = "") -> Cell:
    return Cell(f"{'< 0.001' if value < 0.001 else f'{value:.3f}'}{star}", value)


def _peeked(found: Comparison) -> list[Grid]:
    """What papers report that choose the round by the test itself, beside what they should; only where it was asked."""
    lines = []
    for m in found.methods:
        looks = [(run.mean_of_hospitals, run.best_mean) for run in m.runs if not isnan(run.best_mean)]
        if looks:
            honest, best = (fmean(x) for x in zip(*looks, strict=True))
            lines.append(Line((name(m.name), number(honest), number(best), number(best - honest, "+.3f"))))
    note = (
        "Means over hospitals. The first is of the round that was best on validation patients. The second is of the "
        "round that was best on the test patients themselves, as some papers report it: it is too good, because it "
        "was chosen by what it is judged by. Nothing else here uses it."
    )
    head = ("method", "honest", "best mean", "difference")
    title = "Beside it, the “best mean” of papers"
    return [Grid("best_mean", title, head, mark_best(lines, [0, 1, 1, 0]), note)] if lines else []


def _empties(found: Comparison) -> Grid:
    """How often a mask was empty, which decides what a distance is."""
    lines = []
    for m in found.methods:
        kinds = [
            found.policy.kind(row)
            for run in m.runs
            if run.evaluation
            for labels in run.evaluation.own.values()
            for row in labels.values()
        ]
        counts = [number(kinds.count(k), "d") for k in ("missed", "false alarm", "both empty")]
        lines.append(Line((name(m.name), number(len(kinds), "d"), *counts)))
    head = ("method", "masks", "missed", "false alarm", "both empty")
    return Grid("empty_masks", "Empty masks", head, tuple(lines), found.policy.words)


def _classes(found: Comparison) -> Grid:
    """The measures of a classification, over all cases."""
    lines = []
    for m in found.methods:
        pairs = [
            (case.predicted or 0, case.true or 0)
            for run in m.runs
            for cases in run.scores.values()
            for case in cases.values()
        ]
        said, true = [s for s, _ in pairs], [t for _, t in pairs]
        classes = 1 + max(max(said), max(true))
        scores = (
            classification.accuracy(said, true),
            classification.balanced_accuracy(said, true, classes),
            classification.f1(said, true, classes),
            classification.specificity(said, true, classes),
        )
        lines.append(Line((name(m.name), *(number(None if isnan(x) else x) for x in scores))))
    head = ("method", "accuracy", "balanced accuracy", "F1", "specificity")
    note = f"Over the {_part(found)} cases of all hospitals; all but the accuracy are means over the classes."
    return Grid("overview", "What the patients get", head, mark_best(lines, [0, 1, 1, 1, 1]), note)


def summary(found: Comparison) -> list[str]:
    """What came out, in words."""
    means = {m.name: fmean(m.of(None, found.main, found.policy)) for m in found.methods}
    what = NAMES[found.main]
    if len(found.methods) == 1:
        (only,) = found.methods
        fair = found.fairness(only)
        said = [
            f"{only.name} reaches a mean {what} of {means[only.name]:.3f} on {len(only.of(None, found.main))} "
            f"{_part(found)} cases of {len(only.sites)} hospital{'s' * (len(only.sites) != 1)}."
        ]
        if len(only.sites) > 1:
            said.append(
                f"{fair.best[0]} is served best ({fair.best[1]:.3f}), {fair.worst[0]} worst ({fair.worst[1]:.3f})."
            )
        return said
    ranked = sorted(means, key=lambda n: -means[n])
    best, last = ranked[0], ranked[-1]
    said = [f"{best} has the highest mean {what}, {means[best]:.3f}; {last} the lowest, {means[last]:.3f}."]
    main = [t for t in found.tests if t.measure == found.main]
    better = [t.method for t in main if t.significant and t.effect > 0]
    worse = [t.method for t in main if t.significant and t.effect < 0]
    told = []
    told += [f"better: {', '.join(better)}"] if better else []
    told += [f"worse: {', '.join(worse)}"] if worse else []
    rest = len(main) - len(better) - len(worse)
    told += [f"no difference shown: {rest} method{'s' * (rest != 1)}"] if rest else []
    how = "" if found.tail == "two-sided" else f" one-sided ({found.tail})"
    said.append(f"Against {found.reference} ({means[found.reference]:.3f}), tested{how} over cases: {'; '.join(told)}.")
    worst_of = {m.name: found.fairness(m).worst for m in found.methods}
    kindest = max(worst_of, key=lambda n: worst_of[n][1])
    site, value = worst_of[kindest]
    said.append(f"The worst-served hospital does best with {kindest}: {site} at {value:.3f}.")
    return said
