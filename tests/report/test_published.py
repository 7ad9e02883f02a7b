"""Published numbers beside measured ones, and averages over classes: the best mean beside the honest one."""

import csv
import io
import json
from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from folders import write as write_run
from polysite import config
from polysite.costs.speeds import Speeds
from polysite.engines.record import Result, RoundRecord, SiteRecord, SiteValidation
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, RunError
from polysite.metrics.averages import WAYS
from polysite.report import axes, published
from polysite.report.averages import best_mean, honest
from polysite.report.compare import compare, tables
from polysite.report.published import Paper, numbers
from polysite.report.runs import Method, read
from polysite.site import CaseScore

GOOD, FAIR = (8, 1, 1, 90), (5, 5, 5, 85)
EFFORT = SiteRecord(1.0, steps=4, lr_sum=0.1, seconds=0.1)


def test_every_table_of_the_four_papers_is_there():
    names = published.names()
    wanted = {f"{paper}_table{k + 1}" for paper, count in zip("ABCD", (7, 3, 4, 4), strict=True) for k in range(count)}
    assert wanted | {f"{paper}_text" for paper in "ABCD"} | {"B_tableA4"} < set(names)
    assert all(numbers(name) and all(n.table == name and n.measure for n in numbers(name)) for name in names)
    assert len(numbers("B_table1")) == 95 and len(numbers("C_table3")) == 138


def measured(tmp_path, found, **given):
    """A comparison of one method, called mine."""
    write_run(tmp_path / "run", found, **given)
    return compare([Method("mine", (read(tmp_path / "run", "mine"),))])


def test_measured_values_stand_beside_the_published_ones(tmp_path):
    dice = {"01": {"a": {"WT": 0.9, "TC": 0.7, "ET": 0.5}, "b": {"WT": 0.7, "TC": 0.5, "ET": 0.3}}}
    paper = Paper(("B_table3", "C_table3"), {"mine": ("Centralized",)})
    one, sites = published.tables(measured(tmp_path, dice), paper, Speeds())
    lines = {line.cells[1].text: line.cells for line in one.lines}
    _, _, theirs, ours, gap, within = lines["Dice"]
    assert (theirs.text, ours.value, within.text) == ("0.815 ± 0.161", pytest.approx(0.6), "no")
    assert gap.value == pytest.approx(0.6 - 0.815) and lines["Dice WT"][3].value == pytest.approx(0.8)
    assert lines["Dice WT"][5].text == "no" and lines["Dice ET"][5].text == "no"
    order = [line.cells[1].text.removeprefix("Dice institution ") for line in sites.lines]
    assert order == sorted(order, key=int)
    local = {line.cells[1].text: line.cells for line in sites.lines}
    assert local["Dice institution 1"][3].value == pytest.approx(0.6)  # the site is called 01
    assert local["Dice institution 4"][3].text == "–" and local["Dice institution 1"][5].text == ""


def seen(**sites):
    """Counts of the only label of every site, and those of its background."""
    return {s: SiteValidation(1, 0.5, {"WT": 0.5}, {"background": c[::-1], "WT": c}) for s, c in sites.items()}


def test_best_means_stand_beside_those_of_paper_d_in_the_setting_of_the_federation(tmp_path):
    rounds = [seen(a=GOOD, b=GOOD), seen(a=FAIR, b=FAIR)]
    counts = {s: {"1": v.counts} for s, v in rounds[-1].items()}
    found = measured(tmp_path, {s: {"1": {"WT": 0.5}} for s in "ab"}, rounds=2, counts=counts, peeked=rounds)
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
    found = measured(tmp_path, cases)
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
    found = measured(tmp_path, {"a": {"1": {"WT": 0.5}}})
    paper = Paper(("A_table1", "A_table2"), setting=("FeTS ET", "FeTS^A"))
    one, two = published.tables(found, paper, Speeds(), stored.parent)
    assert {line.cells[0].text: line.cells[3].value for line in one.lines} == {"EMD_maxI": 3.5, "EMD_maxL": 7.0}
    rows = {(line.cells[0].text, line.cells[1].text): line.cells[3].value for line in two.lines}
    assert (rows["D_EMD", "EMD 2-4"], rows["D_EMD", "EMD column sum 1"]) == (7.5, 9.0)
    assert "D_EUC" in two.note  # which this assessment does not have
    assert axes.distances([stored.parent]) == {"EMD_maxI": 3.5, "EMD_maxL": 7.0, "EMD": 5.25}
    stored.write_text("{}")
    with pytest.raises(RunError, match="is no assessment that can be read"):
        published.tables(found, paper, Speeds(), stored.parent)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"settings": {"l = 0": ("BraTS2017 l=9",)}}, r"published\.settings: l = 0 is 'BraTS2017 l=9' in no table"),
        ({"setting": ("BraTS",)}, r"published\.setting is 'BraTS' in no table"),
        ({"methods": {"mine": ("FedAvg @ BraTS",)}}, r"published\.methods: mine is 'BraTS' in no table"),
        ({"methods": {"mine": ("FedAvq",)}}, r"published\.methods: mine is 'FedAvq' in no table"),
        ({"tables": ("B_table9",)}, "there is no published table 'B_table9'"),
    ],
)
def test_what_is_not_there_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Paper(**{"tables": ("D_table4",), **wrong})


@pytest.fixture
def segmented(tmp_path):
    """The second of three rounds is the best on test cases; the last was chosen on validation cases."""
    rounds = [seen(a=FAIR, b=FAIR), seen(a=GOOD, b=GOOD), seen(a=GOOD, b=FAIR)]
    counts = {s: {f"{s}-1": v.counts} for s, v in rounds[-1].items()}
    found = {s: {f"{s}-1": {"WT": 0.5}} for s in "ab"}
    write_run(tmp_path / "peeked", found, counts=counts, peeked=rounds)
    write_run(tmp_path / "old", found, algorithm="fedprox")
    return [Method(name, (read(tmp_path / name, name),)) for name in ("peeked", "old")]


def classified(path, rounds):
    """A run of a classification; ``rounds``: site -> pairs of predicted and true class of its test cases."""
    folder = RunFolder.create(path, config.dump(config.build({})), 0)
    scores = [{s: {} for s in found} for found in rounds]
    for k, found in enumerate(scores):
        for site, pairs in rounds[k].items():
            answers = [CaseScore({"accuracy": float(p == t)}, 0.5, p, t) for p, t in pairs]
            found[site].update({str(n): answer for n, answer in enumerate(answers)})
        peeked = {s: SiteValidation.of(cases, counted=True) for s, cases in found.items()}
        folder.append(RoundRecord(k, 0, dict.fromkeys(found, EFFORT), measure="accuracy", peeked=peeked))
    nothing = {s: {} for s in scores[-1]}
    about = "classification", ("x", "y"), ("t1",)
    folder.finish(Result(*about, len(rounds), len(rounds) - 1, 0, validation=nothing, test=scores[-1]))
    return read(path, path.name)


def test_a_segmentation_has_all_four_averages_with_the_best_mean_beside_each(segmented):
    found = compare(segmented)
    (grid,) = [g for g in tables(found) if g.name == "averages"]
    assert grid.head == (
        "average", "method", "IoU", "BMIoU", "Dice", "BMDice", "sensitivity", "BMSens", "specificity", "BMSpec",
    )  # fmt: skip
    assert [line.cells[0].text for line in grid.lines[::2]] == [way.title for way in WAYS]
    rows = {(line.cells[0].text, line.cells[1].text): [c.value for c in line.cells[2:]] for line in grid.lines}
    assert rows["per client", "peeked"][:2] == pytest.approx([(8 / 10 + 5 / 15) / 2, 8 / 10])
    assert rows["per client", "peeked"][2:4] == pytest.approx([(16 / 18 + 10 / 20) / 2, 16 / 18])
    assert rows["pooled", "peeked"][:2] == pytest.approx([13 / 25, 8 / 10])
    bg = (90 / 92 + 8 / 10) / 2, (85 / 95 + 5 / 15) / 2
    assert rows["per client + bg", "peeked"][:2] == pytest.approx([sum(bg) / 2, bg[0]])
    assert rows["pooled + bg", "peeked"][:2] == pytest.approx([(175 / 187 + 13 / 25) / 2, bg[0]])
    assert all(value is None for (_, method), row in rows.items() if method == "old" for value in row)
    assert "best on validation cases" in grid.note and "counts as a class" in grid.note
    written = list(csv.DictReader(io.StringIO(grid.csv())))
    assert float(written[0]["BMIoU (value)"]) == pytest.approx(0.8) and written[-1]["average"] == "pooled + bg"
    run, old = (method.first for method in segmented)
    assert run.counts == {s: run.records[-1].peeked[s].counts for s in "ab"}
    assert run.counts["a"] == {"background": (90, 1, 1, 8), "WT": GOOD}
    assert old.counts == {} and isnan(honest(old, "dice")) and isnan(best_mean(old, "dice"))
    assert not any(g.name == "averages" for g in tables(compare(segmented[1:])))


def test_a_classification_has_two_averages(tmp_path):
    """One of four at each client is of the other class, and everybody answers its own majority in the last round."""
    own = [(0, 0)] * 4 + [(0, 1)], [(1, 1)] * 4 + [(1, 0)]
    right = [(0, 0)] * 4 + [(1, 1)], [(1, 1)] * 4 + [(1, 0)]
    run = classified(tmp_path / "run", [dict(zip("ab", each, strict=True)) for each in (right, own)])
    (grid,) = [g for g in tables(compare([Method("run", (run,))])) if g.name == "averages"]
    rows = {line.cells[0].text: [c.value for c in line.cells[2:]] for line in grid.lines}
    assert set(rows) == {"per client", "pooled"} and grid.head[2:6] == (
        "accuracy", "BMACC", "balanced accuracy", "BMBACC",
    )  # fmt: skip
    assert rows["per client"][::2] == pytest.approx([0.8, 0.5, 4 / 9, 0.5, 0.5])
    assert rows["pooled"][::2] == pytest.approx([0.8] * 5)
    assert rows["per client"][1::2] == pytest.approx([0.9, 0.75, (1 + 4 / 9) / 2, 0.75, 0.75])
    assert rows["pooled"][1] == pytest.approx(0.9)
