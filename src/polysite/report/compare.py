"""Compare methods: the tables of a paper, and tests of the differences.

Every test is paired by case: Wilcoxon's signed-rank test of a method against the reference, on the mean over labels,
with Holm's correction over all methods that are tested by the same measure. Each test reports the effect size (the
matched-pairs rank-biserial correlation: +1 if every case is better, -1 if every case is worse), the mean difference
with a bootstrap interval (cases resampled within their hospital), and the numbers of hospitals and cases that are
better or worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import fmean

from polysite.data.slices import volume_of
from polysite.errors import ConfigError, RunError, nearest
from polysite.metrics.averages import average, of_classes
from polysite.metrics.fairness import Fairness, fairness
from polysite.metrics.measures import MEASURES, EmptyMaskPolicy, about
from polysite.metrics.statistics import Tail
from polysite.report import averages, paired_tests, subgroups
from polysite.report.costs import with_effort
from polysite.report.grid import Cell, Grid, Line, mark_best, name, number, spread, with_best
from polysite.report.names import listed
from polysite.report.paired_tests import LEVEL, Answer, Test, outcome
from polysite.report.runs import Method


@dataclass(frozen=True)
class Comparison:
    """Methods with the tests of all others against a reference."""

    methods: Sequence[Method]
    reference: str
    policy: EmptyMaskPolicy
    tests: Sequence[Test]
    remarks: Sequence[str]
    tail: Tail = "two-sided"
    asked: Sequence[Answer] = ()  # additional tests

    @property
    def measures(self) -> list[str]:
        """Measures that are known of every method; the first is the main one."""
        if self.methods[0].first.measure != "Dice":
            return ["accuracy"]
        every = all(m.evaluated for m in self.methods)
        return [k for k, measure in MEASURES.items() if measure.shown] if every else ["dice"]

    @property
    def main(self) -> str:
        """The main measure: dice or accuracy."""
        return self.measures[0]

    @property
    def by_hospital(self) -> bool:
        """Whether every hospital counts once in means over all: scores are its own reports, and a guard was on."""
        return any(run.guarded for m in self.methods for run in m.runs)

    def all_of(self, method: Method, measure: str, label: str | None = None) -> list[float]:
        """Return what a mean over all hospitals is taken of: all cases, or the mean of every hospital."""
        if self.by_hospital:
            return method.site_means(measure, self.policy, label)
        return method.of(None, measure, self.policy, label)

    @property
    def unit(self) -> str:
        """Unit of distances; empty if the files do not state it."""
        units = {str(run.evaluation.about["unit"]) for m in self.methods for run in m.runs if run.evaluation}
        return units.pop() if len(units) == 1 else ""

    def title(self, measure: str) -> str:
        """Return the name of a measure with its unit."""
        known = about(measure)
        return f"{known.title} ({self.unit})" if known.distance and self.unit else known.title

    @property
    def sites(self) -> list[str]:
        """Sites of all methods."""
        return sorted({s for m in self.methods for s in m.sites})

    @property
    def trained(self) -> list[Method]:
        """Methods that were trained: without the rows in which all hospitals use the model of one hospital."""
        return [m for m in self.methods if not m.owner]

    def find(self, name: str) -> Method:
        """Return the method of a name."""
        return next(m for m in self.methods if m.name == name)

    @property
    def sites_by_size(self) -> list[str]:
        """Sites of all methods, by decreasing number of cases in all splits."""
        sizes = {s: max(m.sizes.get(s, 0) for m in self.methods) for s in self.sites}
        return sorted(self.sites, key=lambda s: (-sizes[s], s))

    def fairness(self, method: Method) -> Fairness:
        """Return how evenly a method serves the hospitals."""
        return fairness({s: fmean(v) for s in method.sites if (v := method.of(s, self.main, self.policy))})


def compare(
    methods: Sequence[Method],
    reference: str | None = None,
    policy: EmptyMaskPolicy = EmptyMaskPolicy(),
    tail: Tail = "two-sided",
    questions: Sequence[str] = (),
) -> Comparison:
    """Compare finished runs of one task on the same cases.

    Args:
        methods: The methods.
        reference: Method that the others are tested against; fedavg, or else the first, if None.
        policy: Rule for distances of empty masks.
        tail: Alternative of the tests: ``two-sided``, ``greater`` (better than the reference) or ``less``.
        questions: Additional tests, as in ``scaffold > fedavg @ 12,13 / TC`` (`polysite.report.paired_tests`).
    """
    names = [m.name for m in methods]
    _comparable(methods)
    if reference is not None and reference not in names:
        raise ConfigError(f"there is no method {reference!r} to compare with; {nearest(reference, names)}")
    chosen = reference or ("fedavg" if "fedavg" in names else names[0])
    bare = Comparison(_with_owners(methods), chosen, policy, (), (), tail)
    tested = [k for k in ("dice", "hd95", "accuracy") if k in bare.measures]
    tests = [t for measure in tested for t in _tests(bare, measure, tail)]
    asked = paired_tests.ask(questions, bare.methods, bare.measures, policy)
    return replace(bare, tests=tests, remarks=list(_remarks(bare)), asked=asked)


def _with_owners(methods: Sequence[Method]) -> list[Method]:
    """Add a row after each method whose hospitals train alone: the model of the largest hospital on all cases."""
    shown = []
    for method in methods:
        site = _largest(method)
        beside = method.under(site) if site else None
        shown += [method, beside] if beside else [method]
    return shown


def _largest(method: Method) -> str | None:
    """Return the hospital with most cases, if all hospitals train alone."""
    if any(run.exchanged or run.settings["run"]["pooled"] for run in method.runs) or not method.matrix():
        return None
    return max(method.sites, key=lambda s: method.sizes[s])


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
    if not set.intersection(*(m.keys for m in methods)):
        raise RunError("these runs have no evaluated case in common, so they cannot be compared")


def _what(measure: str, labels: Sequence[str], split: str) -> str:
    return f"{measure} of {', '.join(labels)} on {split} cases"


def _tests(bare: Comparison, measure: str, tail: Tail) -> list[Test]:
    """Test every other method against the reference, corrected for their number."""
    reference = bare.find(bare.reference)
    others = [m for m in bare.trained if m.name != bare.reference]
    pairs = {m.name: paired_tests.gains(m, reference, measure, bare.policy) for m in others}
    tests = [paired_tests.paired(measure, title, each, tail) for title, each in pairs.items() if each]
    return paired_tests.corrected(tests)


def _remarks(bare: Comparison) -> list[str]:
    """Return warnings about what the tables cannot show."""
    remarks = []
    sliced = any(m.first.sliced for m in bare.methods)
    if sliced:
        remarks.append(
            "Cases are slices of volumes, and means are over slices; tests and their intervals count a volume once, "
            "with the mean gain of its slices, since slices of a patient are not independent."
        )
    values = {m.name: m.values(bare.main, bare.policy) for m in bare.methods}
    common = set.intersection(*map(set, values.values()))
    uneven = [f"{n} ({len(v)})" for n, v in values.items() if len(v) != len(common)]
    if uneven:
        remarks.append(
            f"{len(common)} cases were evaluated by all methods; more by {', '.join(uneven)}. Tables show all cases of "
            "a method, tests use the cases that both have."
        )
    runs = {m.name: len(m.runs) for m in bare.trained}
    if len(set(runs.values())) > 1:
        remarks.append(f"The methods have different numbers of runs: {', '.join(f'{n} {k}' for n, k in runs.items())}.")
    again = sorted({key for m in bare.methods for key in m.in_several_folds})
    if again:
        remarks.append(
            f"{', '.join(f'{case} of {site}' for site, case in again[:5])}{', …' * (len(again) > 5)} "
            f"{'is' if len(again) == 1 else 'are'} in the test set of more than one fold and "
            f"{'counts' if len(again) == 1 else 'count'} once, with the mean of the scores."
        )
    for m in bare.methods if bare.by_hospital else ():
        counts = {s: len(m.of(s, bare.main, bare.policy)) for s in m.sites}
        most = max(counts, key=counts.__getitem__)
        if len(counts) > 1 and 2 * counts[most] > sum(counts.values()):
            remarks.append(
                f"{most} reports {counts[most]} of the {sum(counts.values())} cases of {m.name}; tests over cases are "
                "mostly about its own reports."
            )
    scans = {(site, volume_of(case)) for site, case in common} if sliced else common
    what = "volumes" if sliced else "cases"
    small = sorted(s for s in bare.sites if sum(site == s for site, _ in scans) < 5)
    if small:
        remarks.append(
            f"{listed(small, len(bare.sites))} {'has' if len(small) == 1 else 'have'} fewer than five {what} here, too "
            "few for a reliable mean."
        )
    if bare.methods[0].first.split == "validation":
        remarks.append("The best round was chosen on these cases, so the scores are too good.")
    if len(bare.trained) > 1 and len(scans) < 6:
        remarks.append(f"With {len(scans)} {what} no test can show a difference.")
    tolerances = {run.evaluation.about["tolerance"] for m in bare.methods for run in m.runs if run.evaluation}
    if len(tolerances) > 1:
        remarks.append(
            f"NSD was measured with different tolerances: {', '.join(f'{t:g}' for t in sorted(tolerances))}."
        )
    if bare.main == "dice" and bare.measures == ["dice"] and any(m.evaluated for m in bare.methods):
        missing = [m.name for m in bare.methods if not m.evaluated]
        remarks.append(f"Only Dice is shown: there is no evaluation of {', '.join(missing)}.")
    if "hd95" in bare.measures and not bare.unit:
        remarks.append("The voxel size is not known in millimetres, so distances are in the unit of the files.")
    return remarks


def tables(comparison: Comparison) -> list[Grid]:
    """Return the tables in the order of a paper: overview, hospitals, tests, empty masks."""
    main, far = comparison.main, "hd95" in comparison.measures
    scores = _classes(comparison) if main == "accuracy" else _overview(comparison)
    return [
        with_effort(scores, comparison.methods),
        _hospitals(comparison, main),
        *([_hospitals(comparison, "hd95"), _more(comparison)] if far else []),
        _fair(comparison),
        *subgroups.tables(comparison),
        *_tested(comparison),
        *paired_tests.answers(comparison.asked),
        *averages.tables(comparison.methods, _split(comparison)),
        *([_empties(comparison)] if far else []),
    ]


def _overview(comparison: Comparison) -> Grid:
    """Return mean ± standard deviation over all cases, per label, with HD95."""
    labels, distance = comparison.methods[0].first.labels, "hd95" in comparison.measures
    several = len(labels) > 1
    seeds = max(len(m.spread(comparison.main, comparison.policy)) for m in comparison.methods) > 1
    head = ["method", "Dice", *(f"Dice {k}" for k in labels if several)]
    head += [comparison.title("hd95")] if distance else []
    head += ["over seeds"] if seeds else []
    lines = []
    for m in comparison.methods:
        cells = [name(m.name), spread(comparison.all_of(m, "dice"))]
        cells += [spread(comparison.all_of(m, "dice", k)) for k in labels if several]
        cells += [spread(comparison.all_of(m, "hd95"), 2)] if distance else []
        cells += [spread(m.spread("dice", comparison.policy))] if seeds else []
        lines.append(Line(tuple(cells)))
    better = [0, *[1] * (1 + len(labels) * several), *[-1] * distance, *[0] * seeds]
    cases = len(comparison.methods[0].values("dice", comparison.policy))
    over = f"the {cases} {_split(comparison)} cases of all hospitals"
    if comparison.by_hospital:
        over = f"the means of the hospitals, each of which counts once, whatever number of cases it reports ({cases})"
    note = f"Mean ± standard deviation over {over}"
    note += "; Dice is the mean over the labels of a case. " if several else ". "
    note += comparison.policy.words if distance else "Both masks empty counts as Dice 1, exactly one as 0."
    note += " Over seeds: mean over all cases ± standard deviation over the seeds." if seeds else ""
    for m in comparison.methods:
        note += f" {m.name}: every hospital uses the model that {m.owner} trained." if m.owner else ""
    title = "Mean over the hospitals" if comparison.by_hospital else "Mean over all cases"
    return Grid("overview", title, tuple(head), mark_best(lines, better), note)


def _split(comparison: Comparison) -> str:
    return comparison.methods[0].first.split


def _hospitals(comparison: Comparison, measure: str) -> Grid:
    """Return the mean of every hospital under every method; the longer of the two lists stands in the rows."""
    digits, better = about(measure).digits, about(measure).better
    unseen = comparison.methods[0].first.unseen
    shown = {s: f"{s} (unseen)" if s in unseen else s for s in comparison.sites}
    cells = {
        (m.name, s): spread(m.of(s, measure, comparison.policy) if s else comparison.all_of(m, measure), digits)
        for m in comparison.methods
        for s in (*comparison.sites, None)
    }
    counts = {s: len(comparison.methods[0].of(s, comparison.main, comparison.policy)) for s in comparison.sites}
    title = f"{comparison.title(measure)} hospital by hospital"
    note = f"Mean ± standard deviation over the {_split(comparison)} cases of a hospital"
    note += "; the best of each is marked." if len(comparison.methods) > 1 else "."
    if len(comparison.methods) > len(comparison.sites):
        columns = [*comparison.sites, None]
        head = ("method", *(f"{shown[s]} ({counts[s]})" if s else "all" for s in columns))
        lines = [Line((name(m.name), *(cells[m.name, s] for s in columns))) for m in comparison.methods]
        return Grid(f"hospitals_{measure}", title, head, mark_best(lines, [0, *[better] * len(columns)]), note)
    head = ("hospital", "cases", *(m.name for m in comparison.methods))
    lines = []
    for s in (*comparison.sites, *[None] * (len(comparison.sites) > 1)):
        first = (name(shown[s]), number(counts[s], "d")) if s else (name("all"), number(sum(counts.values()), "d"))
        row = with_best([cells[m.name, s] for m in comparison.methods], better)
        lines.append(Line((*first, *row), "" if s else "total"))
    return Grid(f"hospitals_{measure}", title, head, tuple(lines), note)


def _more(comparison: Comparison) -> Grid:
    """Return the measures other than Dice and HD95."""
    rest = [k for k in comparison.measures if k not in ("dice", "hd95")]
    lines = [
        Line((name(m.name), *(spread(comparison.all_of(m, k), about(k).digits) for k in rest)))
        for m in comparison.methods
    ]
    tolerance = {m.first.evaluation.about["tolerance"] for m in comparison.methods if m.first.evaluation}
    note = (
        "Mean ± standard deviation over cases of the mean over labels. ASSD: average symmetric surface distance. "
        f"NSD: share of both surfaces within {', '.join(f'{t:g}' for t in sorted(tolerance))} "
        f"{comparison.unit or 'of the files’ unit'} of the other. Specificity counts the voxels of the prepared image."
    )
    head = ("method", *(comparison.title(k) for k in rest))
    return Grid("measures", "Other measures", head, mark_best(lines, [0, *(about(k).better for k in rest)]), note)


def _fair(comparison: Comparison) -> Grid:
    """Return how evenly the hospitals are served."""
    lines = []
    for m in comparison.methods:
        f = comparison.fairness(m)
        worst = Cell(f"{f.worst[1]:.3f} ({f.worst[0]})", f.worst[1])
        lines.append(
            Line((name(m.name), number(f.mean), worst, number(f.spread), number(f.std), number(f.jain, ".4f")))
        )
    head = ("method", "mean of hospitals", "lowest hospital", "highest − lowest", "std over hospitals", "Jain index")
    note = f"Every hospital counts once, with its mean {about(comparison.main).title}. "
    note += "Jain's index is 1 if all K hospitals have the same mean, and at least 1/K."
    return Grid("fairness", "Fairness between hospitals", head, mark_best(lines, [0, 1, 1, -1, -1, 1]), note)


def _tested(comparison: Comparison) -> list[Grid]:
    grids = []
    for measure in dict.fromkeys(t.measure for t in comparison.tests):
        tests = [t for t in comparison.tests if t.measure == measure]
        won = [Cell("{} / {} / {}".format(*t.hospitals_won), t.hospitals_won[0]) for t in tests]
        lines = [Line((name(t.method), *outcome(t), cell)) for t, cell in zip(tests, won, strict=True)]
        head = (
            "method", f"gain in {about(measure).title} [95 %]", "effect", "p", "p (Holm)", "cases + / = / −",
            "hospitals + / = / −",
        )  # fmt: skip
        note = (
            f"Against {comparison.reference}, paired by case. A gain above 0 is better, also for distances. p: "
            f"Wilcoxon's signed-rank test, {comparison.tail}; Holm: corrected for the number of methods in this table, "
            f"* at {LEVEL:g}. Effect: matched-pairs rank-biserial correlation. Interval: bootstrap of cases within "
            "their hospital. Cases of one hospital, and folds that share training cases, are less independent than "
            "the test assumes."
        )
        title = f"Against {comparison.reference}: {about(measure).title}"
        grids.append(Grid(f"tests_{measure}", title, head, tuple(lines), note))
    return grids


def _empties(comparison: Comparison) -> Grid:
    """Return how often masks were empty, for which distances are undefined."""
    lines = []
    for m in comparison.methods:
        known = [labels for run in m.runs if run.evaluation for labels in run.evaluation.own.values()]
        kinds = [comparison.policy.kind(row) for labels in known for row in labels.values()]
        counts = [number(kinds.count(k), "d") for k in ("missed", "false alarm", "both empty")]
        lines.append(Line((name(m.name), number(len(kinds), "d"), *counts)))
    head = ("method", "masks", "missed", "false alarm", "both empty")
    return Grid("empty_masks", "Empty masks", head, tuple(lines), comparison.policy.words)


def _classes(comparison: Comparison) -> Grid:
    """Return the measures of a classification over all cases."""
    lines = []
    for m in comparison.methods:
        cases = [case for run in m.runs for cases in run.scores.values() for case in cases.values()]
        counts = of_classes((case.predicted or 0, case.true or 0) for case in cases)
        scores = [average(counts, measure) for measure in ("accuracy", "balanced_accuracy", "f1", "specificity")]
        lines.append(Line((name(m.name), *(number(None if isnan(x) else x) for x in scores))))
    head = ("method", "accuracy", "balanced accuracy", "F1", "specificity")
    note = (
        f"Over the {_split(comparison)} cases of all hospitals, pooled; all measures but accuracy are means over the "
        "classes."
    )
    return Grid("overview", "Mean over all cases", head, mark_best(lines, [0, 1, 1, 1, 1]), note)


def summary(comparison: Comparison) -> list[str]:
    """Return the main results as sentences."""
    means = {m.name: fmean(comparison.all_of(m, comparison.main)) for m in comparison.trained}
    what = about(comparison.main).title
    if len(comparison.trained) == 1:
        (only,) = comparison.trained
        fair = comparison.fairness(only)
        cases = f"{len(only.of(None, comparison.main))} {_split(comparison)} cases"
        hospitals = f"{len(only.sites)} hospital{'s' * (len(only.sites) != 1)}"
        counted = f"on {cases} of {hospitals}"
        if comparison.by_hospital:
            counted = f"over {hospitals}, each of which counts once ({cases} by their own reports)"
        sentences = [f"{only.name} reaches a mean {what} of {means[only.name]:.3f} {counted}."]
        if len(only.sites) > 1:
            sentences.append(
                f"The highest-scoring hospital is {fair.best[0]} ({fair.best[1]:.3f}), the lowest-scoring "
                f"{fair.worst[0]} ({fair.worst[1]:.3f})."
            )
        return sentences
    ranked = sorted(means, key=lambda n: -means[n])
    best, last = ranked[0], ranked[-1]
    trained = f"Of the {len(ranked)} methods, " if len(ranked) < len(comparison.methods) else ""
    sentences = [
        f"{trained}{best} has the highest mean {what}, {means[best]:.3f}; {last} the lowest, {means[last]:.3f}."
    ]
    main = [t for t in comparison.tests if t.measure == comparison.main]
    better = [t.method for t in main if t.significant and t.effect > 0]
    worse = [t.method for t in main if t.significant and t.effect < 0]
    outcome = [f"better: {', '.join(better)}"] if better else []
    outcome += [f"worse: {', '.join(worse)}"] if worse else []
    rest = len(main) - len(better) - len(worse)
    outcome += [f"no significant difference: {rest} method{'s' * (rest != 1)}"] if rest else []
    how = "" if comparison.tail == "two-sided" else f" one-sided ({comparison.tail})"
    reference = f"{comparison.reference} ({means[comparison.reference]:.3f})"
    sentences.append(f"Against {reference}, tested{how} over cases: {'; '.join(outcome)}.")
    worst_of = {m.name: comparison.fairness(m).worst for m in comparison.trained}
    fairest = max(worst_of, key=lambda n: worst_of[n][1])
    site, value = worst_of[fairest]
    sentences.append(f"With {fairest} even the lowest-scoring hospital ({site}) reaches {what} {value:.3f}.")
    return sentences
