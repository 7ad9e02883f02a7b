"""Published numbers beside measured ones.

Every table of the papers is a CSV file of the package, ``published/PAPER_tableN.csv``, one number a row: table, method,
setting, measure, where (all, a label, a site), value, spread (± in the paper), unit, note. ``PAPER_text.csv`` has
numbers of the running text, ``PAPER_sizes*.csv`` the cases of every site.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import fmean, stdev

from polysite.costs.model import Cost
from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, nearest
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.report import costs
from polysite.report.compare import Comparison
from polysite.report.grid import Cell, Grid, Line, name, number
from polysite.report.runs import Method

INSTITUTION = "institution "  # in ``where``: the site with this number


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
        methods: For every method of the benchmark, its names in these tables.
        setting: Only numbers of this setting; empty for all.
    """

    tables: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    setting: str = ""

    def __post_init__(self) -> None:
        listed = {n.method for table in self.tables for n in numbers(table)}
        for ours, theirs in self.methods.items():
            odd = next((title for title in theirs if title not in listed), None)
            if odd is not None:
                raise ConfigError(f"published.methods: {ours} is {odd!r} in no table; {nearest(odd, listed)}")


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
    rows = csv.DictReader(text.splitlines())
    return tuple(_parsed(**row) for row in rows)


def _parsed(value: str, spread: str, **texts: str) -> Number:
    return Number(value=_number(value), spread=_number(spread), printed=value, **texts)


def _number(text: str) -> float | None:
    return float(text) if text else None


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


def tables(comparison: Comparison, paper: Paper, speeds: Speeds) -> list[Grid]:
    """Return every published table with the measured values beside it."""
    ours = {theirs: m for m in comparison.methods for theirs in paper.methods.get(m.name, ())}
    look = _Look(comparison.policy, speeds)
    grids = []
    for table in paper.tables:
        listed = [n for n in numbers(table) if n.method and paper.setting in ("", n.setting)]
        absent = list(dict.fromkeys(n.method for n in listed if n.method not in ours))
        known = ((n, ours[n.method]) for n in sorted(listed, key=_order) if n.method in ours and n.value is not None)
        lines = tuple(_line(n, method.name, look.values(n, method)) for n, method in known)
        note = " ".join([NOTE, *([f"Not measured here: {', '.join(absent)}."] if absent else []), *_doubts(listed)])
        grids.append(Grid(f"published_{table}", _title(table), HEAD, lines, note))
    return grids


def facts(table: str, setting: str, measured: Mapping[str, float]) -> Grid:
    """Return the published numbers of a setting that are measured without any method, by the name of the measure."""
    known = [n for n in numbers(table) if n.setting == setting and n.measure in measured]
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


def _line(published: Number, title: str, found: Sequence[float]) -> Line:
    """Return the line of a published number and the values whose mean is set beside it."""
    measured = fmean(found) if found else None
    places = len(published.printed.partition(".")[2])
    unit = {"fraction": "", "mm (unit not printed)": "mm"}.get(published.unit, published.unit)
    what = f"{published.measure} {published.where}".removesuffix(" all") + (f" ({unit})" if unit else "")
    theirs = published.printed + (f" ± {published.spread:.{places}f}" if published.spread is not None else "")
    beside = f" ± {stdev(found):.{places}f}" if published.spread is not None and len(found) > 1 else ""
    gap = None if measured is None else measured - (published.value or 0.0)
    within = "" if gap is None or published.spread is None else ("yes" if abs(gap) <= published.spread else "no")
    return Line(
        (
            name(title),
            name(what),
            Cell(theirs, published.value),
            Cell("–") if measured is None else Cell(f"{measured:.{places}f}{beside}", measured),
            number(gap, f"+.{places}f"),
            name(within),
        )
    )


@dataclass(frozen=True)
class _Look:
    """What a published number measures, computed from the runs of a method."""

    policy: EmptyMaskPolicy
    speeds: Speeds

    def values(self, published: Number, method: Method) -> Sequence[float]:
        """Return the measured values, whose mean is set beside the published number; none if it is not measured."""
        known: Mapping[str, Callable[[Cost], float | None]] = {
            "total SGD steps": lambda c: c.pooled_steps,
            "total maximum parallel SGD steps": lambda c: c.parallel_steps,
            "total communications": lambda c: c.bytes_of_busiest / 4e9,
            "estimated training time": lambda c: c.seconds / 3600,
        }
        if published.measure in known:
            each = [known[published.measure](costs.cost(run, self.speeds, grid=False)) for run in method.runs]
            return [x for x in each if x is not None]
        if published.measure == "Dice" or (published.measure == "HD95" and method.evaluated):
            site, label = self._place(published.where, method)
            if site == "":
                return []
            return method.of(site, published.measure.lower(), self.policy, label)
        return []

    @staticmethod
    def _place(where: str, method: Method) -> tuple[str | None, str | None]:
        """Return the site and the label of a published number; an empty site if there is none of that number."""
        if where == "all":
            return None, None
        if where in method.first.labels:
            return None, where
        wanted = where.removeprefix(INSTITUTION)
        same = (s for s in method.sites if s == wanted or (s.isdigit() and wanted.isdigit() and int(s) == int(wanted)))
        return next(same, ""), None
