"""In a terminal or a file: tables with ties and parts that fit a window, progress as plain lines."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from polysite.report import progress
from polysite.report.grid import Cell, Grid, Line, fitting, mark_best, name, narrowed, spread
from polysite.report.progress import PlainProgress
from polysite.report.tables import show_grid


def table(columns, rows=3, long="hospital"):
    lines = [
        Line((name(f"{long} {r}"), *(spread([0.1 * r, 0.2 + 0.01 * k]) for k in range(columns)))) for r in range(rows)
    ]
    return Grid("dice", "Dice", ("hospital", *(f"method {k}" for k in range(columns))), tuple(lines), "A note.")


@pytest.mark.parametrize(
    ("cells", "sense", "marked"),
    [
        ({"0.812 ± 0.1": 0.8121, "0.812 ± 0.2": 0.8119, "0.700": 0.7}, 1, [(True, True), (True, True), (False, False)]),
        ({"2.10": 2.1, "2.31": 2.31, "2.4": 2.4}, -1, [(True, False), (False, False), (False, False)]),
        ({"0.990": 0.99, "0.990 ": 0.99, "0.990  ": 0.99}, 1, 3 * [(False, False)]),
    ],
)
def test_cells_that_show_the_same_digits_are_tied_and_none_is_best_if_all_do(cells, sense, marked):
    found = mark_best([Line((name("x"), Cell(text.strip(), value))) for text, value in cells.items()], [0, sense])
    assert [(line.cells[1].best, line.cells[1].tie) for line in found] == marked


def test_every_part_fits_the_window_and_no_column_is_lost(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    grid = table(13, long="Universitätsklinikum Hamburg-Eppendorf, Radiologie")
    parts = fitting(grid, 80)
    assert [h for part in parts for h in part.head[1:]] == list(grid.head[1:])
    assert all(part.head[0] == "hospital" and len(part.lines) == 3 for part in parts)
    assert fitting(table(2), 80) == [table(2)]
    show_grid(grid)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80 and not any("…  " in line for line in shown)
    assert any("0.150" in line for line in shown)  # numbers are whole
    show_grid(table(40), Path("dice.csv"))
    assert "Dice: 41 columns, too wide to print; see the page or dice.csv" in capsys.readouterr().out


def test_a_page_shows_means_of_wide_tables_and_a_window_repeats_all_columns_of_names():
    cell = narrowed(table(12)).lines[1].cells[1]
    assert cell.text == "0.150" and cell.more == "0.150 ± 0.071" and narrowed(table(3)) == table(3)
    head = ("average", "method", *(f"measure {k}" for k in range(9)))
    lines = tuple(Line((name("pooled"), name(m), *9 * (Cell("0.123", 0.123),))) for m in ("fedavg", "alone"))
    parts = fitting(Grid("averages", "Averages", head, lines, names=2), 60)
    assert len(parts) > 1 and [h for part in parts for h in part.head[2:]] == list(head[2:])
    for part in parts:
        assert part.head[:2] == head[:2] and [line.cells[1].text for line in part.lines] == ["fedavg", "alone"]


def test_a_line_tells_what_is_left_and_between_two_lines_nothing_is_printed():
    now, text = 100.0, io.StringIO()
    bars = PlainProgress(Console(file=text, width=40), 5.0, lambda: now)
    task = bars.add_task("fedavg      ", total=4, note="")
    for k, now in ((1, 110.0), (2, 111.0)):  # noqa: B007  the clock reads it
        bars.update(task, completed=k, note=f"round {k} · Dice 0.512")
    now = 120.0
    bars.stop_task(task)
    first, last = text.getvalue().splitlines()
    assert first == "fedavg: round 1 · Dice 0.512 · 1 of 4 · about 30.0 s left"
    assert last.startswith("fedavg: round 2")  # the end is always told


def test_runs_and_searches_print_plain_lines_where_nobody_watches(capsys):
    with progress.progress() as bar:
        bar.case(2, 2, "n01")
        bar.begin("fedavg", 1, 0, 0.0)
        bar.site(0, "north", 1, 1)
        bar.end()
    with progress.counting("runs", 3, quiet=False) as step:
        step("fedavg of fold 1")
    with progress.counting("silent", 3, quiet=True) as step:
        step("fedavg of fold 2")
    shown = capsys.readouterr().err
    assert "fedavg: done" in shown and "runs: fedavg of fold 1 · 1 of 3" in shown
    assert "━" not in shown and "silent" not in shown
