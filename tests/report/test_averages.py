"""Averages over classes: per client and pooled, with the best mean beside the honest one, in tables, CSV and page."""

import csv
import io
from math import isnan

import pytest

from folders import write
from polysite import config
from polysite.engines.record import Result, RoundRecord, SiteRecord, SiteValidation
from polysite.engines.run_folder import RunFolder
from polysite.metrics.averages import WAYS
from polysite.report.averages import best_mean, honest
from polysite.report.compare import compare, tables
from polysite.report.page import build
from polysite.report.runs import Method, read
from polysite.site import CaseScore

GOOD, FAIR = (8, 1, 1, 90), (5, 5, 5, 85)
EFFORT = SiteRecord(1.0, steps=4, lr_sum=0.1, seconds=0.1, bytes_down=1, bytes_up=1)


def seen(**sites):
    """Counts of the only label of every site, and those of its background."""
    return {
        s: SiteValidation(1, 0.5, {"WT": 0.5}, {"background": tuple(reversed(c)), "WT": c}) for s, c in sites.items()
    }


@pytest.fixture
def segmented(tmp_path):
    """The second of three rounds is the best on test cases; the last was chosen on validation cases."""
    rounds = [seen(a=FAIR, b=FAIR), seen(a=GOOD, b=GOOD), seen(a=GOOD, b=FAIR)]
    counts = {s: {f"{s}-1": v.counts} for s, v in rounds[-1].items()}
    found = {s: {f"{s}-1": {"WT": 0.5}} for s in "ab"}
    write(tmp_path / "peeked", found, counts=counts, peeked=rounds)
    write(tmp_path / "old", found, algorithm="fedprox")
    return [Method(name, (read(tmp_path / name, name),)) for name in ("peeked", "old")]


def answers(pairs):
    return {str(k): CaseScore({"accuracy": float(p == t)}, 0.5, p, t) for k, (p, t) in enumerate(pairs)}


def classified(path, rounds):
    """A run of a classification; ``rounds``: site -> pairs of predicted and true class of its test cases."""
    folder = RunFolder.create(path, config.dump(config.build({})), 0)
    scores = [{s: answers(pairs) for s, pairs in found.items()} for found in rounds]
    for k, found in enumerate(scores):
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
    assert grid.names == 2  # a part of this table without the methods would say nothing
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
    page = build("x", segmented)
    assert "Averages over classes, per client and pooled" in page and "per client + bg" in page


def test_a_run_without_counts_has_no_such_table(segmented):
    old = segmented[1]
    assert old.first.counts == {} and isnan(honest(old.first, "dice")) and isnan(best_mean(old.first, "dice"))
    assert not any(g.name == "averages" for g in tables(compare([old])))


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


def test_counts_of_a_result_and_of_a_round_survive_their_files(segmented):
    run = segmented[0].first
    assert run.counts["a"] == {"background": (90, 1, 1, 8), "WT": GOOD}
    assert run.counts == {"a": run.records[-1].peeked["a"].counts, "b": run.records[-1].peeked["b"].counts}
