"""Published numbers: the files, and the tables that set measured values beside them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from folders import write as write_run
from polysite.costs.speeds import Speeds
from polysite.engines.record import SiteValidation
from polysite.errors import ConfigError, RunError
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


def seen(tp, fp, fn, tn):
    """Counts of one label and its background in the only case of two sites."""
    counts = {"background": (tn, fn, fp, tp), "WT": (tp, fp, fn, tn)}
    return {s: SiteValidation(1, 0.5, {"WT": 0.5}, counts) for s in ("a", "b")}


def test_best_means_stand_beside_those_of_paper_d_in_the_setting_of_the_federation(tmp_path):
    rounds = [seen(8, 1, 1, 90), seen(5, 5, 5, 85)]
    counts = {s: {"1": v.counts} for s, v in rounds[-1].items()}
    write_run(tmp_path / "run", {s: {"1": {"WT": 0.5}} for s in "ab"}, rounds=2, counts=counts, peeked=rounds)
    found = compare([Method("mine", (read(tmp_path / "run", "mine"),))])
    settings = {f"l = {k}": (f"BraTS2017 l={k} four-target",) for k in (0, 3)}
    paper = Paper(("D_table4",), {"mine": ("FedAvg",)}, settings=settings)
    (grid,) = published.tables(found, paper.on("l = 3"), Speeds())
    assert grid.head[-1] == "honest" and len(grid.lines) == 4 and "best mean" in grid.note
    lines = {line.cells[1].text: line.cells for line in grid.lines}
    printed = {n.measure: n.value for n in numbers("D_table4") if n.method == "FedAvg" and " l=3 " in n.setting}
    _, _, theirs, ours, gap, _, chosen = lines["BMDice (%)"]
    best = 100 * (16 / 18 + 180 / 182) / 2  # with the background
    assert (theirs.value, ours.value) == (printed["BMDice"], pytest.approx(best))
    assert gap.value == pytest.approx(best - printed["BMDice"])
    assert chosen.value == pytest.approx(100 * (10 / 20 + 170 / 180) / 2)
    assert lines["BMIoU (%)"][3].value == pytest.approx(100 * (8 / 10 + 90 / 92) / 2)
    assert lines["BMSens (%)"][3].value == lines["BMSpec (%)"][3].value == pytest.approx(100 * (8 / 9 + 90 / 91) / 2)
    (both,) = published.tables(found, paper, Speeds())
    assert len(both.lines) == 8 and both.lines[0].cells[1].text.endswith(", BraTS2017 l=0 four-target")
    assert published.tables(found, paper.on("l = 2"), Speeds()) == []


def test_clients_of_paper_a_are_the_sites_in_natural_order(tmp_path):
    write_run(tmp_path / "run", {s: {"1": {"WT": x}} for s, x in (("13", 0.2), ("6", 0.1), ("20", 0.3), ("21", 0.4))})
    found = compare([Method(n, (read(tmp_path / "run", n),)) for n in ("mine", "other")])
    paper = Paper(
        ("A_table3", "A_table4"),
        {"mine": ("FedAvg_default", "FedAvg_w (0.1)"), "other": ("DITTO", "FedAvg_w (0.1) @ Prostate^B: Client_4")},
        setting=("FeTS^A", "FeTS^A: Client_1"),
    )
    weights, clients = published.tables(found, paper, Speeds())
    assert [(line.cells[0].text, line.cells[2].text) for line in weights.lines] == [("mine", "0.812 ± 0.140")]
    rows = {(line.cells[0].text, line.cells[1].text): line.cells[3].value for line in clients.lines}
    assert [rows["mine", f"Dice {k}"] for k in range(1, 5)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rows["other", "Dice"] == pytest.approx(0.25) and "Not measured here: FedAvg_{1,2}{3,4}." in clients.note
    named = replace(paper, sites={"21": "1", "6": "4"})
    mine = [line.cells for line in published.tables(found, named, Speeds())[1].lines if line.cells[0].text == "mine"]
    swapped = {cells[1].text: cells[3].value for cells in mine}
    assert (swapped["Dice 1"], swapped["Dice 4"]) == (0.4, 0.1)


def test_a_mean_over_sites_stands_beside_one_with_its_spread_between_sites(tmp_path):
    """Table 3 of paper A: four clients with the means that Table 4 prints give 0.828 ± 0.12, whatever their sizes."""
    means = {n.where: n.value for n in numbers("A_table4") if (n.method, n.setting) == ("FedAvg_default", "FeTS^A")}
    cases = {s: {str(k): {"WT": means[s]} for k in range(int(s))} for s in "1234"}
    write_run(tmp_path / "run", cases)
    found = compare([Method("mine", (read(tmp_path / "run", "mine"),))])
    paper = Paper(("A_table3",), {"mine": ("FedAvg (default 1.0)",)}, setting=("FeTS^A: Client_1",), over="sites")
    (line,) = published.tables(found, paper, Speeds())[0].lines
    assert (line.cells[2].text, line.cells[3].text, line.cells[5].text) == ("0.828 ± 0.120", "0.828 ± 0.119", "yes")
    (other,) = published.tables(found, replace(paper, over="cases"), Speeds())[0].lines
    assert other.cells[3].value == pytest.approx(sum(int(s) * means[s] for s in "1234") / 10)


def test_distances_of_an_assessment_stand_beside_those_of_paper_a(tmp_path):
    matrix = np.array([[0, 1, 2, 3], [1, 0, 4, 5], [2, 4, 0, 6], [3, 5, 6, 0.0]])
    quantities = {
        "flair": {"kind": "intensity", "matrix": matrix.tolist()},
        "t1": {"kind": "intensity", "matrix": (matrix / 2).tolist()},
        "WT": {"kind": "volume", "matrix": (matrix * 2).tolist()},
    }
    distances = {"emd": {"matrix": (matrix * 1.5).tolist()}}
    (tmp_path / "assess").mkdir()
    stored = tmp_path / "assess" / "assessment.json"
    stored.write_text(json.dumps({"quantities": quantities, "distances": distances}))
    write_run(tmp_path / "run", {"a": {"1": {"WT": 0.5}}})
    found = compare([Method("mine", (read(tmp_path / "run", "mine"),))])
    paper = Paper(("A_table1", "A_table2"), setting=("FeTS ET", "FeTS^A"))
    one, two = published.tables(found, paper, Speeds(), stored.parent)
    assert {line.cells[0].text: line.cells[3].value for line in one.lines} == {"EMD_maxI": 3.5, "EMD_maxL": 7.0}
    rows = {(line.cells[0].text, line.cells[1].text): line.cells[3].value for line in two.lines}
    assert (rows["D_EMD", "EMD 2-4"], rows["D_EMD", "EMD column sum 1"]) == (7.5, 9.0)
    assert "D_EUC" in two.note  # which this assessment does not have
    stored.write_text("{}")
    with pytest.raises(RunError, match="is no assessment that can be read"):
        published.tables(found, paper, Speeds(), stored.parent)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"settings": {"l = 0": ("BraTS2017 l=9",)}}, r"published\.settings: l = 0 is 'BraTS2017 l=9' in no table"),
        ({"setting": ("BraTS",)}, r"published\.setting is 'BraTS' in no table"),
        ({"methods": {"mine": ("FedAvg @ BraTS",)}}, r"published\.methods: mine is 'BraTS' in no table"),
    ],
)
def test_a_setting_that_is_not_there_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Paper(("D_table4",), **wrong)
