"""CSV files in which no cell is a formula, and which polysite reads back as it wrote them."""

import csv
import io

import pytest

from polysite.data import manifest
from polysite.data.case import CaseRef
from polysite.data.manifest import Manifest, Row
from polysite.data.split import Split, table
from polysite.evaluation_folder import _write_csv
from polysite.report.grid import Cell, Grid, Line
from polysite.report.runs import _read_counts
from polysite.spreadsheets import Writer, plain_cell, rows, shielded

NAMES = [
    "=1+2",
    "+A1",
    "-A1",
    "@SUM(A1)",
    "'=x",
    "''@x",
    "\t=1",
    '=cmd|" /C calc"!A0',
    "-1+cmd|x",
    "north",
    "'a'",
]
NUMBERS = ["-0.5", "+3", "-1e-05", "-inf", "nan", "-1.5 2 -3", "-", "", "1"]


@pytest.mark.parametrize("name", [*NAMES, "\r=1", *NUMBERS])
def test_a_cell_is_no_formula_and_reads_back_equal(name):
    cell = shielded(name)
    assert plain_cell(cell) == name
    assert cell == name if name in NUMBERS else cell[:1] not in "=+-@\t\r"


def test_rows_read_what_the_writer_wrote():
    text = io.StringIO()
    writer = Writer(text)
    writer.writerow(["=head", "case", "x"])
    writer.writerows([name, "c", -0.5] for name in NAMES)
    again = list(rows(io.StringIO(text.getvalue(), newline="")))
    assert [row["=head"] for row in again] == NAMES and {row["x"] for row in again} == {"-0.5"}
    assert_no_formula(text.getvalue())


def assert_no_formula(text):
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    odd = [c for c in cells if c[:1] in ("=", "+", "@") or (c[:1] == "-" and shielded(c) != c)]
    assert cells and not odd, odd


def refs(names):
    return [CaseRef("=site", name, None, None) for name in names]


def test_a_split_and_a_manifest_read_back_equal(tmp_path):
    names = [n for n in NAMES if n.strip() == n]
    dealt = Split().apply({"=site": refs(names)}, 0)
    (tmp_path / "split.csv").write_text(table(dealt))
    assert_no_formula(table(dealt))
    again = Split(file=str(tmp_path / "split.csv")).apply({"=site": refs(names)}, 1)
    assert {k: [c.name for c in v] for k, v in again["=site"].items()} == {
        k: [c.name for c in v] for k, v in dealt["=site"].items()
    }
    listed = [Row("@site", n, {"t1": "a.nii"}, category="=class", notes={"+note": "-x"}) for n in names]
    manifest.write(Manifest(tuple(listed), tmp_path), tmp_path / "m.csv")
    assert_no_formula((tmp_path / "m.csv").read_text())
    found = manifest.read(tmp_path / "m.csv")
    assert [(r.site, r.case, r.category, dict(r.notes)) for r in found.rows] == [
        ("@site", n, "=class", {"+note": "-x"}) for n in names
    ]


def test_an_evaluation_reads_back_equal(tmp_path):
    counts = [
        {"model": "=m", "site": "+s", "case": n, "label": "@l", "tp": 1, "fp": 2, "fn": 3, "tn": 4} for n in NAMES
    ]
    _write_csv(tmp_path / "counts.csv", counts)
    assert _read_counts(tmp_path / "counts.csv") == {("=m", "+s", n): {"@l": (1, 2, 3, 4)} for n in NAMES}


def test_a_table_of_a_page_has_no_formula():
    lines = (Line((Cell("=a"), Cell("-0.5 ± 0.1", -0.5))), Line((Cell("@b"), Cell("-x"))))
    text = Grid("g", "G", ("+head", "Dice"), lines).csv()
    assert [row[0] for row in csv.reader(io.StringIO(text))] == ["'+head", "'=a", "'@b"]
    assert "\n'=a,-0.5 ± 0.1,-0.5\n" in text and "'-x" in text
