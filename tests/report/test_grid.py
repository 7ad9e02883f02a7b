"""In a terminal or a file: tables with ties that fit a window, progress as plain lines."""

import io

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


def test_a_wide_table_shows_the_columns_that_fit_the_window_and_says_how_many(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    grid = table(13, long="Universitätsklinikum Hamburg-Eppendorf, Radiologie")
    part = fitting(grid, 80)
    assert 2 < len(part.head) < 14 and part.head == grid.head[: len(part.head)] and len(part.lines) == 3
    assert f"{len(part.head)} of 14 columns fit into this window" in part.note
    assert fitting(table(2), 80) == table(2)
    show_grid(grid)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80 and not any("…  " in line for line in shown)
    assert any("0.150" in line for line in shown)  # numbers are whole


def test_a_page_shows_means_of_wide_tables():
    cell = narrowed(table(12)).lines[1].cells[1]
    assert cell.text == "0.150" and cell.more == "0.150 ± 0.071" and narrowed(table(3)) == table(3)


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
