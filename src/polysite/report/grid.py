"""Tables that can be written as Markdown, LaTeX, CSV, HTML, or in the terminal."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from rich import box
from rich.markup import escape
from rich.table import Table

from polysite.report.names import shorten
from polysite.spreadsheets import shielded

WIDE = 10  # columns of a table that a page shows in full
FOLD = 26  # characters from which a column of words is folded in the terminal
HEAD = 22  # letters of a column's name in a table that is too wide for the terminal


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: What it shows.
        value: Its number.
        best: Whether it is the best of its column, or of its row.
        tie: Whether others are as good, in the digits that are shown.
        more: What a page shows beside the pointer.
    """

    text: str
    value: float | None = None
    best: bool = False
    tie: bool = False
    more: str = ""

    @property
    def shown(self) -> str:
        """The number as it is shown, without a deviation or a name after it."""
        return self.text.partition(" ± ")[0].partition(" (")[0]


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    cells: tuple[Cell, ...]
    kind: str = ""  # "total": all rows above together; "label": one label of the row above


@dataclass(frozen=True)
class Grid:
    """A table. The first columns hold names, all others numbers."""

    name: str  # file name of its CSV
    title: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown; the best of a column is bold."""

        def row(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

        rule = "|---|" + "---:|" * (len(self.head) - 1)
        lines = [row([f"**{c.text}**" if c.best else c.text for c in line.cells]) for line in self.lines]
        return "\n".join([f"### {self.title}", "", row(self.head), rule, *lines, "", self.note]).rstrip() + "\n"

    def latex(self) -> str:
        """Return the table as LaTeX with booktabs."""

        def row(cells: Sequence[str]) -> str:
            return " & ".join(cells) + r" \\"

        body = []
        for k, line in enumerate(self.lines):
            if line.kind == "total" and k:
                body.append(r"\midrule")
            body.append(row([rf"\textbf{{{_tex(c.text)}}}" if c.best else _tex(c.text) for c in line.cells]))
        columns = "l" + "r" * (len(self.head) - 1)
        begin = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(self.title)}. {_tex(self.note)}}}"]
        begin += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", row([_tex(h) for h in self.head]), r"\midrule"]
        end = [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
        return "\n".join([r"% needs \usepackage{booktabs}", *begin, *body, *end])

    def csv(self) -> str:
        """Return the table as CSV: the text of every cell, then the unrounded numbers."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        numbers = [k for k in range(len(self.head)) if _has_numbers(self, k)]
        writer.writerow(shielded(name) for name in [*self.head, *(f"{self.head[k]} (value)" for k in numbers)])
        for line in self.lines:
            values = ("" if (v := line.cells[k].value) is None else repr(float(v)) for k in numbers)
            writer.writerow([*(shielded(c.text) if c.value is None else c.text for c in line.cells), *values])
        return text.getvalue()

    def terminal(self) -> Table:
        """Return the table for the terminal; a single row of many numbers is transposed."""
        table = Table(title=escape(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        if len(self.lines) == 1 and len(self.head) > 7:
            table.show_header = False
            for name, cell in zip(self.head, self.lines[0].cells, strict=True):
                table.add_row(escape(name), escape(cell.text))
            return table
        for k, name in enumerate(self.head):
            numbers = _has_numbers(self, k)
            table.add_column(escape(name), justify="right" if k and numbers else "left", no_wrap=numbers or not k)
        for line in self.lines:
            if line.kind == "total":
                table.add_section()
            style = {"total": "bold", "label": "dim"}.get(line.kind)
            table.add_row(
                *(f"[bold]{escape(c.text)}[/]" if c.best else escape(c.text) for c in line.cells), style=style
            )
        return table


def write_tables(folder: Path, grids: Sequence[Grid], words: str) -> None:
    """Write tables as ``tables.md``, below some words, as ``tables.tex`` and as NAME.csv."""
    body = "\n".join(g.markdown() for g in grids)
    (folder / "tables.md").write_text(f"{words}\n\n{body}", encoding="utf-8")
    (folder / "tables.tex").write_text("\n".join(g.latex() for g in grids), encoding="utf-8")
    for grid in grids:
        (folder / f"{grid.name}.csv").write_text(grid.csv(), encoding="utf-8")


def name(text: str) -> Cell:
    """Return a cell that holds text."""
    return Cell(text)


def number(value: float | None, style: str = ".3f") -> Cell:
    """Return a cell that holds a number; a dash for None."""
    return Cell("–", None) if value is None else Cell(f"{value:{style}}", value)


def spread(values: Sequence[float], digits: int = 3) -> Cell:
    """Return a cell with mean and standard deviation, ``0.812 ± 0.034``; a dash without values."""
    if not values:
        return Cell("–")
    mean = fmean(values)
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return Cell(f"{mean:.{digits}f}{deviation}", mean)


def mark_best(lines: Sequence[Line], better: Sequence[int]) -> tuple[Line, ...]:
    """Mark the best cells of every column: the highest (+1), the lowest (-1) or none (0)."""
    columns = [with_best([line.cells[k] for line in lines], sign) for k, sign in enumerate(better)]
    return tuple(Line(cells, line.kind) for line, cells in zip(lines, zip(*columns, strict=True), strict=True))


def with_best(cells: Sequence[Cell], better: int) -> list[Cell]:
    """Mark the best of some cells, and as ties all that show the same digits; if all do, none is marked.

    >>> [(c.best, c.tie) for c in with_best([Cell("0.81", 0.812), Cell("0.81", 0.808), Cell("0.70", 0.7)], 1)]
    [(True, True), (True, True), (False, False)]
    """
    known = [c for c in cells if c.value is not None]
    if not better or len(known) < 2:
        return list(cells)
    top = max(known, key=lambda c: better * (c.value or 0.0)).shown
    winners = sum(c.shown == top for c in known)
    if winners == len(known):
        return list(cells)
    return [replace(c, best=True, tie=winners > 1) if c.value is not None and c.shown == top else c for c in cells]


def narrowed(grid: Grid) -> Grid:
    """Return a wide table as a page shows it: without deviations, which appear beside the pointer."""
    if len(grid.head) <= WIDE:
        return grid

    lines = tuple(replace(e, cells=tuple(replace(_mean_alone(c), more=c.text) for c in e.cells)) for e in grid.lines)
    if all(" ± " not in cell.text for line in grid.lines for cell in line.cells):
        return grid
    note = f"{grid.note} Only the mean is shown; the deviation appears beside the pointer, and is in the files."
    return replace(grid, lines=lines, note=note)


def fitting(grid: Grid, width: int) -> Grid:
    """Return a table as a window of so many characters can show it.

    A table that is too wide shows means without deviations; if it still is, long names are shortened, and the columns
    that fit are shown.
    """
    if len(grid.lines) < 2 or sum(_widths(grid)) < width:
        return grid
    lines = tuple(replace(e, cells=tuple(_mean_alone(c) for c in e.cells)) for e in grid.lines)
    if lines != grid.lines:
        grid = replace(grid, lines=lines, note=f"{grid.note} This window shows the mean alone.".strip())
    if sum(_widths(grid)) < width:
        return grid
    names = shorten([line.cells[0].text for line in grid.lines], width // 2)
    named = tuple(replace(e, cells=(Cell(names[e.cells[0].text]), *e.cells[1:])) for e in grid.lines)
    grid = replace(grid, head=tuple(shorten(grid.head, HEAD)[h] for h in grid.head), lines=named)
    columns = len(grid.head)
    shown = max(2, sum(total < width for total in accumulate(_widths(grid))))
    if shown == columns:
        return grid
    lines = tuple(replace(e, cells=e.cells[:shown]) for e in grid.lines)
    note = f"{grid.note} {shown} of {columns} columns fit into this window; COLUMNS=200 before the command shows more."
    return replace(grid, head=grid.head[:shown], lines=lines, note=note.strip())


def _widths(grid: Grid) -> list[int]:
    """Return the characters of every column in the terminal, with the space beside it."""
    texts = [[head, *(line.cells[k].text for line in grid.lines)] for k, head in enumerate(grid.head)]
    widths = [max(map(len, column)) + 3 for column in texts]
    return [width if k == 0 or _has_numbers(grid, k) else min(width, FOLD) for k, width in enumerate(widths)]


def _has_numbers(grid: Grid, column: int) -> bool:
    return any(line.cells[column].value is not None for line in grid.lines)


def _mean_alone(cell: Cell) -> Cell:
    return replace(cell, text=cell.shown) if " ± " in cell.text else cell


def _tex(text: str) -> str:
    """Escape text for LaTeX.

    >>> _tex("50 % of a_b ± 1")
    '50 \\\\% of a\\\\_b $\\\\pm$ 1'
    """
    plain = {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
        "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "×": r"$\times$",
        "–": "--", "≤": r"$\leq$", "<": r"$<$", ">": r"$>$", "ω": r"$\omega$", "λ": r"$\lambda$", "μ": r"$\mu$",
        "\n": " ", "[": "{[}", "]": "{]}", "→": r"$\to$", "·": r"$\cdot$", "…": r"\ldots{}",
    }  # fmt: skip
    return "".join(plain.get(c, c) for c in text)
