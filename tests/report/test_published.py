"""Published numbers: the files, and the tables that set measured values beside them."""

import pytest

from folders import write as write_run
from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError
from polysite.report import published
from polysite.report.compare import compare
from polysite.report.published import Paper, numbers
from polysite.report.runs import Method, read


def test_every_table_of_the_four_papers_is_there():
    names = published.names()
    wanted = {"A": 7, "B": 3, "C": 4, "D": 4}
    assert {f"{p}_table{k}" for p, count in wanted.items() for k in range(1, count + 1)} < set(names)
    assert {*(f"{p}_text" for p in wanted), "B_tableA4"} < set(names)
    for name in names:
        assert numbers(name) and all(n.table == name and n.measure for n in numbers(name)), name
    assert len(numbers("B_table1")) == 95 and len(numbers("C_table3")) == 138


def test_a_table_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="there is no published table 'B_table9'"):
        numbers("B_table9")
    with pytest.raises(ConfigError, match=r"published\.methods: mine is 'FedAvq' in no table"):
        Paper(("B_table3",), {"mine": ("FedAvq",)})


def test_measured_values_stand_beside_the_published_ones(tmp_path):
    dice = {"01": {"a": {"WT": 0.9, "TC": 0.7, "ET": 0.5}, "b": {"WT": 0.7, "TC": 0.5, "ET": 0.3}}}
    write_run(tmp_path / "run", dice)
    methods = [Method("mine", (read(tmp_path / "run", "mine"),))]
    paper = Paper(("B_table3", "C_table3"), {"mine": ("Centralized",)})
    one, sites = published.tables(compare(methods), paper, Speeds())
    lines = {line.cells[1].text: line.cells for line in one.lines}
    _, _, theirs, ours, gap, within = lines["Dice"]
    assert (theirs.text, ours.value, within.text) == ("0.815 ± 0.161", pytest.approx(0.6), "no")
    assert gap.value == pytest.approx(0.6 - 0.815) and lines["Dice WT"][3].value == pytest.approx(0.8)
    assert lines["Dice WT"][5].text == "no" and lines["Dice ET"][5].text == "no"
    assert "Not measured here: FedAvg w/ fixed local epochs" in one.note
    assert "On the printed Dice TC of Prior CFL HGG/LGG: " in one.note and "misprint" in one.note
    order = [line.cells[1].text.removeprefix("Dice institution ") for line in sites.lines]
    assert order == sorted(order, key=int)
    local = {line.cells[1].text: line.cells for line in sites.lines}
    assert local["Dice institution 1"][3].value == pytest.approx(0.6)  # the site is called 01
    assert local["Dice institution 4"][3].text == "–" and local["Dice institution 1"][5].text == ""
