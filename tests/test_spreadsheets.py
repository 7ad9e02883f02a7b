"""CSV files in which no cell is a formula, and which polysite reads back as it wrote them."""

import csv
import io

import pytest

from polysite.data import manifest
from polysite.data.case import CaseRef
from polysite.data.manifest import Manifest, Row
from polysite.data.split import Split, table
from polysite.evaluation_folder import _write_csv
from polysite.report.evaluations import read_counts
from polysite.report.grid import Cell, Grid, Line
from polysite.spreadsheets import plain_cell, shielded

NAMES = ["=1+2", "+A1", "-A1", "@SUM(A1)", "'=x", "''@x", "\t=1", '=cmd|" /C calc"!A0', "north", "'a'"]
NUMBERS = ["-0.5", "+3", "-1e-05", "-inf", "nan", "-1.5 2 -3", "-", "", "1"]


@pytest.mark.parametrize("name", [*NAMES, "\r=1", *NUMBERS])
def test_a_cell_is_no_formula_and_reads_back_equal(name):
    cell = shielded(name)
    assert plain_cell(cell) == name
    assert cell == name if name in NUMBERS else cell[:1] not in "=+-@\t\r"


def assert_no_formula(text):
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    odd = [c for c in cells if c[:1] in ("=", "+", "@") or (c[:1] == "-" and shielded(c) != c)]
    assert cells and not odd, odd


def test_a_split_and_a_manifest_and_an_evaluation_read_back_equal(tmp_path):
    names = [n for n in NAMES if n.strip() == n]
    cases = {"=site": [CaseRef("=site", name, None, None) for name in names]}
    (tmp_path / "split.csv").write_text(table(Split().apply(cases, 0)))
    assert_no_formula((tmp_path / "split.csv").read_text())
    assert Split(file=str(tmp_path / "split.csv")).apply(cases, 1) == Split().apply(cases, 0)
    listed = [Row("@site", n, {"t1": "a.nii"}, category="=class") for n in names]
    manifest.write(Manifest(tuple(listed), tmp_path), tmp_path / "m.csv")
    assert_no_formula((tmp_path / "m.csv").read_text())
    found = [(r.site, r.case, r.category) for r in manifest.read(tmp_path / "m.csv").rows]
    assert found == [("@site", n, "=class") for n in names]
    counts = {"model": "=m", "site": "+s", "label": "@l", "tp": 1, "fp": 2, "fn": 3, "tn": 4}
    _write_csv(tmp_path / "counts.csv", [{**counts, "case": n} for n in NAMES])
    assert read_counts(tmp_path / "counts.csv") == {("=m", "+s", n): {"@l": (1, 2, 3, 4)} for n in NAMES}


def test_a_table_of_a_page_has_no_formula():
    lines = (Line((Cell("=a"), Cell("-0.5 ± 0.1", -0.5))), Line((Cell("@b"), Cell("-x"))))
    text = Grid("g", "G", ("+head", "Dice"), lines).csv()
    assert [row[0] for row in csv.reader(io.StringIO(text))] == ["'+head", "'=a", "'@b"]
    assert "\n'=a,-0.5 ± 0.1,-0.5\n" in text and "'-x" in text
