"""Results by subgroup of cases: the ``group`` column of a manifest (grade, scanner, sex).

For every method: the mean of every subgroup with a bootstrap interval, and a test of whether subgroups differ. They
are compared within hospitals (`polysite.metrics.subgroups`), so that a hospital with good scores and many cases of one
subgroup does not make the subgroup look better.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from polysite.data.slices import volume_of
from polysite.metrics.measures import about
from polysite.metrics.statistics import holm, interval
from polysite.metrics.subgroups import subgroup_test
from polysite.report.evaluations import Key
from polysite.report.grid import Cell, Grid, Line, name
from polysite.report.paired_tests import LEVEL, by_volume, p_value
from polysite.report.runs import Method

if TYPE_CHECKING:
    from polysite.report.compare import Comparison

FEWEST = 5  # cases of a subgroup, for an interval of its mean
MOST = 8  # subgroups in a table
FEW = "too few cases to tell"


def tables(comparison: "Comparison") -> list[Grid]:
    """Return a table for the main measure, and one for HD95; none if fewer than two subgroups are known."""
    groups = {m.name: _groups(m) for m in comparison.methods}
    counts = Counter(groups[comparison.methods[0].name].values())
    if len(counts) < 2:
        return []
    shown = [group for group, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))][:MOST]
    measures = [comparison.main, *(["hd95"] if "hd95" in comparison.measures else [])]
    return [_table(comparison, measure, groups, shown, counts) for measure in measures]


def _groups(method: Method) -> dict[Key, str]:
    """Return the subgroup of every case, or of every volume if cases are slices."""
    sliced = method.first.sliced
    return {(s, volume_of(c) if sliced else c): group for (s, c), group in method.subgroups.items()}


def _table(
    comparison: "Comparison",
    measure: str,
    groups: Mapping[str, Mapping[Key, str]],
    shown: Sequence[str],
    counts: Mapping[str, int],
) -> Grid:
    digits = about(measure).digits
    values, tests = {}, {}
    for m in comparison.methods:
        scores, own = by_volume(m.values(measure, comparison.policy), m), groups[m.name]
        values[m.name] = known = {key: value for key, value in scores.items() if own.get(key) in shown}
        tests[m.name] = subgroup_test(list(known.values()), [own[k] for k in known], [site for site, _ in known])
    adjusted = dict(zip(tests, holm(np.array([t.p for t in tests.values()])), strict=True))
    lines = []
    for method in comparison.methods:
        found, test, p = values[method.name], tests[method.name], float(adjusted[method.name])
        cells = [_mean(found, groups[method.name], group, digits) for group in shown]
        told = test.smallest * len(tests) <= LEVEL
        last = p_value(p, " *" * (p <= LEVEL)) if told else Cell(FEW)
        lines.append(Line((name(method.name), *cells, p_value(test.p) if told else Cell("–"), last)))
    title = f"{comparison.title(measure)} by subgroup"
    head = ("method", *(f"{group} ({counts[group]})" for group in shown), "p", "p (Holm)")
    note = _note(comparison, len(counts) - len(shown), len(tests))
    return Grid(f"subgroups_{measure}", title, head, tuple(lines), note)


def _note(comparison: "Comparison", hidden: int, tests: int) -> str:
    what = "volumes" if comparison.methods[0].first.sliced else "cases"
    note = (
        f"The column 'group' of the data names the subgroups; in brackets their numbers of {what}. Mean with a 95 % "
        f"bootstrap interval ({what} resampled within their hospital; none below {FEWEST} {what}). p: do the subgroups "
        "differ under this method? A permutation test of ranks within hospitals, so that a difference between "
        f"hospitals does not count. Holm: corrected for the {tests} methods of this table, * at {LEVEL:g}. "
        f"'{FEW[0].upper()}{FEW[1:]}': no outcome of the test could have been significant, because there are too few, "
        "or because hardly any hospital has more than one subgroup."
    )
    return note + (f" {hidden} smaller subgroups are not shown." if hidden > 0 else "")


def _mean(found: Mapping[Key, float], groups: Mapping[Key, str], group: str, digits: int) -> Cell:
    """Return the mean of a subgroup with its interval."""
    keys = [key for key in found if groups[key] == group]
    if not keys:
        return Cell("–")
    numbers = [found[key] for key in keys]
    mean = float(np.mean(numbers))
    if len(keys) < FEWEST:
        return Cell(f"{mean:.{digits}f}", mean)
    sites = Counter(site for site, _ in keys)
    low, high = interval(numbers, ["" if sites[site] == 1 else site for site, _ in keys])
    return Cell(f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]", mean)
