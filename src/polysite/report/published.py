"""Published numbers beside measured ones.

Every table of the papers is a CSV file of the package, ``published/PAPER_tableN.csv``, one number a row: table, method,
setting, measure, where (all, a label, a site), value, spread (± in the paper), unit, note. ``PAPER_text.csv`` has
numbers of the running text, ``PAPER_sizes*.csv`` the cases of every site.
"""

import csv
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import chain
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from polysite.costs.model import Cost
from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, nearest
from polysite.metrics.averages import AVERAGES, Way
from polysite.payload import natural
from polysite.report import costs
from polysite.report.averages import best_mean, honest
from polysite.report.compare import Comparison
from polysite.report.grid import Cell, Grid, Line, name, number, spread
from polysite.report.runs import Method, Summary
from polysite.report.site_distances import Matrix, over_pairs
from polysite.report.site_distances import read as read_distances

INSTITUTION = "institution "  # in ``where``: the site with this number
AT = " @ "  # between a method and the only setting that is meant
BEST_MEANS = {average.best_mean: measure for measure, average in AVERAGES.items()}  # names in paper D


@dataclass(frozen=True)
class Number:
    """A published number."""

    table: str
    method: str
    setting: str
    measure: str
    where: str
    value: float | None  # None where the paper prints none
    spread: float | None
    unit: str
    note: str
    printed: str  # the value as the paper prints it


@dataclass(frozen=True)
class Paper:
    """The tables of a paper that a benchmark is set beside.

    Args:
        tables: Names of published tables, as in ``B_table1``.
        methods: For every method of the benchmark, its names in these tables; ``NAME @ SETTING`` is a name in one
            setting only.
        setting: Only numbers of these settings; empty for all.
        settings: For every federation of the benchmark, by its title, the settings that it has in these tables.
        sites: For every site of the benchmark, its name in these tables. By default ``1`` is the first site in natural
            order, and ``institution 1`` the site of that number.
        over: What a mean over everything and its ± are over: ``cases``, or ``sites`` (of the means of the sites).
    """

    tables: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    setting: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)
    over: Literal["cases", "sites"] = "cases"

    def __post_init__(self) -> None:
        listed = [n for table in self.tables for n in numbers(table)]
        methods, settings = {n.method for n in listed}, {n.setting for n in listed}
        for ours, theirs in self.methods.items():
            for title, _, where in (each.partition(AT) for each in theirs):
                if title not in methods:
                    raise ConfigError(f"published.methods: {ours} is {title!r} in no table; {nearest(title, methods)}")
                _check_setting(f"methods: {ours}", where, settings)
        for ours, theirs in (("setting", self.setting), *self.settings.items()):
            for where in theirs:
                _check_setting(ours if ours == "setting" else f"settings: {ours}", where, settings)

    def on(self, federation: str) -> "Paper":
        """Return the paper with the numbers of one federation only; without tables if it has no setting there."""
        if not self.settings or not federation:
            return self
        return replace(self, setting=self.settings[federation]) if federation in self.settings else Paper()

    def shows(self, published: "Number") -> bool:
        """Return whether a number is of the settings that are asked for."""
        wanted = self.setting or tuple(chain.from_iterable(self.settings.values()))
        return not wanted or published.setting in wanted

    def methods_of(self, published: "Number", methods: Iterable[Method]) -> list[Method]:
        """Return the methods that a published number is of."""
        names = {published.method, f"{published.method}{AT}{published.setting}"}
        return [m for m in methods if names & set(self.methods.get(m.name, ()))]


def _check_setting(what: str, setting: str, settings: Collection[str]) -> None:
    if setting and setting not in settings:
        raise ConfigError(f"published.{what} is {setting!r} in no table; {nearest(setting, settings)}")


def names() -> list[str]:
    """Return the names of the published tables."""
    return sorted(f.name.removesuffix(".csv") for f in resources.files("polysite").joinpath("published").iterdir())


@cache
def numbers(table: str) -> tuple[Number, ...]:
    """Return the numbers of a published table.

    >>> [n.value for n in numbers("B_table1") if n.method == "SCAFFOLD" and n.where == "all"]
    [0.897, 4.839]
    """
    if table not in names():
        raise ConfigError(f"there is no published table {table!r}; {nearest(table, names())}")
    text = resources.files("polysite").joinpath("published", f"{table}.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        known: dict[str, Any] = {k: (float(row[k]) if row[k] else None) for k in ("value", "spread")}
        found.append(Number(**{**row, **known}, printed=row["value"]))
    return tuple(found)


def sizes(table: str) -> dict[str, int]:
    """Return the number of cases of every site in a published table.

    >>> sum(sizes("B_sizes").values()), sizes("B_sizes_limited")["01"]
    (1251, 35)
    """
    return {n.where: int(n.value or 0) for n in numbers(table)}


HEAD = ("method", "measure", "published", "measured", "difference", "within ±")
NOTE = (
    "Published value, measured value and their difference. Within ±: whether the difference is at most the published ±."
)
SITES = "Mean ± standard deviation of the means of the sites; at one site, of its cases."
BEST = (
    "BM… is the best mean: a measure of every client, averaged over its classes (in a segmentation with the "
    "background) and then over clients, in the round in which it is highest on the test cases; it takes run.peek = "
    "true. Honest: the same average in the round that was best on validation cases."
)


def tables(comparison: Comparison, paper: Paper, speeds: Speeds, assessment: Path | None = None) -> list[Grid]:
    """Return every published table with the measured values beside it.

    Args:
        comparison: The methods.
        paper: The published tables.
        speeds: Speeds of the sites, for times.
        assessment: Folder of an assessment of the sites, for published distances.
    """
    look = _Look(comparison, paper, speeds, read_distances(assessment) if assessment and paper.tables else None)
    return [grid for grid in (_table(table, paper, look) for table in paper.tables) if grid.lines or not paper.setting]


def _table(table: str, paper: Paper, look: "_Look") -> Grid:
    """Return a published table with the measured values beside it."""
    listed = sorted((n for n in numbers(table) if n.method and paper.shows(n)), key=_order)
    several, means = len({n.setting for n in listed}) > 1, any(n.measure in BEST_MEANS for n in listed)
    text = table.endswith("_text")  # most of its numbers are no results
    lines, found = [], set()
    for n in listed:
        for title, values, chosen in look.rows(n):
            found.add(n.method)
            if n.value is not None and (values or not text):
                line = _line(n, title, values, several and bool(paper.setting or paper.settings))
                lines.append(Line((*line.cells, _beside(n, chosen))) if means else line)
    absent = list(dict.fromkeys(n.method for n in listed if n.method not in found))
    missing = [f"Not measured here: {', '.join(absent)}."] if absent and not text else []
    note = " ".join(
        [NOTE, *([SITES] if paper.over == "sites" else []), *([BEST] if means else []), *missing, *_doubts(listed)]
    )
    return Grid(f"published_{table}", _title(table), (*HEAD, "honest") if means else HEAD, tuple(lines), note)


def _beside(published: Number, chosen: Sequence[float]) -> Cell:
    """Return a cell with the mean over runs, with the digits of the published number."""
    return spread(chosen, len(published.printed.partition(".")[2]))


def facts(table: str, setting: Collection[str], measured: Mapping[str, float]) -> Grid:
    """Return the published numbers of settings that are measured without any method, by the name of the measure."""
    known = [n for n in numbers(table) if n.setting in setting and n.measure in measured]
    lines = tuple(_line(n, n.method or n.setting, [measured[n.measure]]) for n in known)
    return Grid(f"published_{table}", _title(table), ("", *HEAD[1:]), lines, NOTE)


def _doubts(published: Sequence[Number]) -> list[str]:
    """Return sentences about numbers that are probably misprinted or do not agree with the others of their table."""
    doubtful = [n for n in published if "misprint" in n.note or "disagrees" in n.note]
    return [f"On the printed {n.measure} {n.where} of {n.method}: {n.note}." for n in doubtful]


def _order(published: Number) -> int:
    """Return the number of the institution, or 0: tables print them as text, 10 before 2."""
    wanted = published.where.removeprefix(INSTITUTION)
    return int(wanted) if wanted.isdigit() else 0


def _title(table: str) -> str:
    """Return the title of a published table.

    >>> _title("B_table1"), _title("C_text")
    ('Published and measured: paper B, Table 1', 'Published and measured: paper C, text')
    """
    paper, _, place = table.partition("_")
    return f"Published and measured: paper {paper}, {place.replace('table', 'Table ')}"


def _line(published: Number, title: str, found: Sequence[float], setting: bool = False) -> Line:
    """Return the line of a published number and the values whose mean is set beside it; ``setting`` names that."""
    measured = fmean(found) if found else None
    places = len(published.printed.partition(".")[2])
    unit = {"fraction": "", "mm (unit not printed)": "mm"}.get(published.unit, published.unit)
    what = f"{published.measure} {published.where}".removesuffix(" all") + (f" ({unit})" if unit else "")
    what += f", {published.setting}" if setting else ""
    theirs = published.printed + (f" ± {published.spread:.{places}f}" if published.spread is not None else "")
    beside = f" ± {stdev(found):.{places}f}" if published.spread is not None and len(found) > 1 else ""
    gap = None if measured is None else measured - (published.value or 0.0)
    within = "" if gap is None or published.spread is None else ("yes" if abs(gap) <= published.spread else "no")
    ours = Cell("–") if measured is None else Cell(f"{measured:.{places}f}{beside}", measured)
    cells = (name(title), name(what), Cell(theirs, published.value), ours, number(gap, f"+.{places}f"), name(within))
    return Line(cells)


TITLES = {"D_EMD": "EMD", "D_EUC": "EUC"}  # names of distances in paper A -> ours, where they differ


def _distance(found: Mapping[str, Matrix], published: Number) -> float | None:
    """Return the distance that a published number states: of a pair, ``1-2``; to all others, ``1``; or the mean."""
    title = published.method.partition(" (")[0]
    matrix = found.get(TITLES.get(title, title))
    places = [int(k) - 1 for k in published.where.split("-") if k.isdigit()]
    if matrix is None or any(k >= len(matrix) for k in places):
        return None
    if published.measure.endswith("column sum"):
        return float(matrix[:, places[0]].sum()) if len(places) == 1 else None
    return float(matrix[places[0], places[1]]) if len(places) == 2 else over_pairs(matrix)


def _variance_kept(run: Summary) -> float | None:
    """Return the share of the variance that principal components of radiomic features keep; None without clusters."""
    known = (record.diagnostics.get("variance kept") for record in reversed(run.records))
    return next((kept for kept in known if kept is not None), None)


@dataclass(frozen=True)
class _Look:
    """What a published number measures, computed from the runs of its methods or from an assessment."""

    comparison: Comparison
    paper: Paper
    speeds: Speeds
    distances: Mapping[str, Matrix] | None = None

    def rows(self, published: Number) -> list[tuple[str, Sequence[float], Sequence[float]]]:
        """Return title, values and honest values for every method that a published number is of.

        Values are those whose mean is set beside the number; none if it is not measured. Honest values are those of the
        round that was best on validation cases, beside a best mean.
        """
        apart = _distance(self.distances, published) if self.distances else None
        if apart is not None:
            return [(published.method, [apart], [])]
        methods = self.paper.methods_of(published, self.comparison.methods)
        if published.measure in BEST_MEANS:
            return [(m.name, self._means(published, m, best_mean), self._means(published, m, honest)) for m in methods]
        return [(m.name, self._values(published, m), []) for m in methods]

    def _means(self, published: Number, method: Method, mean: Callable[[Summary, str, Way], float]) -> list[float]:
        """Return an average per client of every run, with the background in a segmentation."""
        if published.where != "all":
            return []
        way, scale = Way(background=method.first.measure == "Dice"), 100 if published.unit == "%" else 1
        values = [scale * mean(run, BEST_MEANS[published.measure], way) for run in method.runs]
        return [] if any(map(isnan, values)) else values

    def _values(self, published: Number, method: Method) -> Sequence[float]:
        """Return costs or scores of a method."""
        known: Mapping[str, Callable[[Cost], float | None]] = {
            "total SGD steps": lambda c: c.pooled_steps,
            "total maximum parallel SGD steps": lambda c: c.parallel_steps,
            "total communications": lambda c: c.bytes_of_busiest / 4e9,
            "estimated training time": lambda c: c.seconds / 3600,
        }
        if published.measure in known:
            each = [known[published.measure](costs.cost(run, self.speeds, grid=False)) for run in method.runs]
            return [x for x in each if x is not None]
        if published.measure == "variance preserved":
            return [100 * kept for run in method.runs if (kept := _variance_kept(run)) is not None]
        if published.measure == "Dice" or (published.measure == "HD95" and method.evaluated):
            site, label = self._place(published.where, method)
            if site == "":
                return []
            measure, policy = published.measure.lower(), self.comparison.policy
            if site is None and self.paper.over == "sites":
                return method.site_means(measure, policy, label)
            return method.of(site, measure, policy, label)
        return []

    def _place(self, where: str, method: Method) -> tuple[str | None, str | None]:
        """Return the site and the label of a published number; an empty site if there is none of that name."""
        if where == "all":
            return None, None
        if where in method.first.labels:
            return None, where
        if where in self.paper.sites.values():
            return next((s for s in method.sites if self.paper.sites.get(s) == where), ""), None
        wanted = where.removeprefix(INSTITUTION)
        if where.isdigit():
            return dict(enumerate(natural(method.sites), 1)).get(int(where), ""), None
        same = (s for s in method.sites if s == wanted or (s.isdigit() and wanted.isdigit() and int(s) == int(wanted)))
        return next(same, ""), None
