"""Tables: ties, parts that fit a window, means without deviations."""

import pytest

from polysite.report.grid import Cell, Grid, Line, fitting, mark_best, name, narrowed, spread
from polysite.report.tables import show_grid


def table(columns, rows=3, long="hospital"):
    lines = [
        Line((name(f"{long} {r}"), *(spread([0.1 * r, 0.2 + 0.01 * k]) for k in range(columns)))) for r in range(rows)
    ]
    return Grid("dice", "Dice", ("hospital", *(f"method {k}" for k in range(columns))), tuple(lines), "A note.")


def test_cells_that_show_the_same_digits_are_tied_and_none_is_best_if_all_do():
    scores = {"one": ("0.812 ± 0.1", 0.8121), "two": ("0.812 ± 0.2", 0.8119), "three": ("0.700 ± 0.1", 0.7)}
    lines = [Line((name(n), Cell(*score), Cell("0.990", 0.99))) for n, score in scores.items()]
    marked = mark_best(lines, [0, 1, 1])
    assert [(line.cells[1].best, line.cells[1].tie) for line in marked] == [(True, True), (True, True), (False, False)]
    assert not any(line.cells[2].best for line in marked)


def test_a_single_best_cell_is_no_tie_and_the_lowest_can_be_best():
    marked = mark_best([Line((name(t), Cell(t, float(t)))) for t in ("2.10", "2.31", "2.31")], [0, -1])
    assert [(line.cells[1].best, line.cells[1].tie) for line in marked] == [
        (True, False),
        (False, False),
        (False, False),
    ]


@pytest.mark.parametrize("columns", [2, 7, 13])
def test_every_part_fits_the_window_and_no_column_is_lost(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    grid = table(columns, long="Universitätsklinikum Hamburg-Eppendorf, Radiologie")
    parts = fitting(grid, 80)
    assert [h for part in parts for h in part.head[1:]] == list(grid.head[1:])
    assert all(part.head[0] == "hospital" and len(part.lines) == 3 for part in parts)
    show_grid(grid)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80 and not any("…  " in line for line in shown)
    assert any("0.150" in line for line in shown)  # numbers are whole


def test_a_table_that_fits_stays_as_it_is():
    assert fitting(table(2), 80) == [table(2)]


def test_a_page_shows_means_of_wide_tables_and_the_rest_beside_the_pointer():
    wide = narrowed(table(12))
    cell = wide.lines[1].cells[1]
    assert cell.text == "0.150" and cell.more == "0.150 ± 0.071" and "pointer" in wide.note
    assert narrowed(table(3)) == table(3)


def test_every_part_has_all_columns_of_names():
    head = ("average", "method", *(f"measure {k}" for k in range(9)))
    lines = tuple(
        Line((name("pooled"), name(m), *(Cell("0.123", 0.123) for _ in range(9)))) for m in ("fedavg", "alone")
    )
    parts = fitting(Grid("averages", "Averages", head, lines, names=2), 60)
    assert len(parts) > 1 and all(part.head[:2] == ("average", "method") for part in parts)
    assert all([line.cells[1].text for line in part.lines] == ["fedavg", "alone"] for part in parts)
    assert [h for part in parts for h in part.head[2:]] == list(head[2:])
