"""Gains over FedAvg and the most similar federations, on hand-made lines."""

from dataclasses import replace
from pathlib import Path

import pytest

from evidence_lines import FAR, RUN
from polysite import evidence
from polysite.evidence import show, table
from polysite.evidence.federations import Federation
from polysite.evidence.lines import Spans


def federation(name, sizes, task="segmentation", distances=None):
    run = replace(RUN, data=name, sizes=sizes, task=task)
    return Federation(name, (run, replace(run, method="ditto")), distances)


def nearest(like, *others):
    return [m.federation.data for m in evidence.similar(like, 9, others)]


def test_a_gain_is_paired_by_cases():
    runs = [
        replace(RUN, cases="fold 0", score=0.5),
        replace(RUN, cases="fold 1", score=0.9),
        replace(RUN, cases="fold 0", method="ditto", score=0.6, steps=240),
        replace(RUN, cases="fold 2", method="ditto", score=0.1, steps=240),  # FedAvg has no such run
    ]
    (known,) = evidence.federations(runs)
    ditto, fedavg = known.gains()
    assert ditto.gain == pytest.approx(0.1)
    assert (ditto.pairs, ditto.runs, ditto.steps_ratio) == (1, 2, 2.0)
    assert ditto.score == pytest.approx(0.35)
    assert (fedavg.gain, fedavg.runs, fedavg.score) == (None, 2, 0.7)


@pytest.mark.parametrize(
    ("changes", "gain"),
    [
        ({}, 0.1),
        ({"split": "validation"}, None),
        ({"parameters": 5000}, None),
        ({"network": "UNetSub", "parameters": 1400}, 0.1),
        ({"steps": 900}, 0.05),  # nearer to the longer FedAvg
        ({"training": {"lr": 0.4, "augment": "none"}, "steps": 120}, 0.2),  # nearer to FedAvg with this augmentation
    ],
)
def test_the_reference_is_the_nearest_fedavg(changes, gain):
    run = replace(RUN, method="ditto", score=0.8, **changes)
    long = replace(RUN, rounds=80, steps=960, score=0.75)
    plain = replace(RUN, training={"lr": 0.4, "augment": "none"}, score=0.6)
    (known,) = evidence.federations([RUN, long, plain, replace(RUN, settings={"uniform": True}, score=0.1), run])
    found = next(g for g in known.gains() if g.method == "ditto").gain
    assert found == (None if gain is None else pytest.approx(gain))


def test_number_and_sizes_of_hospitals_count():
    like = evidence.describe({"x": 10, "y": 10, "z": 10, "w": 0})
    same, many = federation("same", (10, 10, 10)), federation("many", (10,) * 12)
    rich, uneven = federation("rich", (60, 60, 60)), federation("uneven", (30, 10, 2))
    assert nearest(like, rich, many, uneven, same) == ["same", "uneven", "many", "rich"]
    match = evidence.similar(like, 1, [many])[0]
    assert (match.parts, match.distance) == ({"hospitals": 2.0, "cases": 0.0, "unevenness": 0.0}, 2.0)


def test_another_task_is_far():
    like = evidence.describe([10, 10, 10], task="classification")
    assert nearest(like, federation("seg", (10, 10, 10)), federation("cls", (10, 10, 12), "classification"))[0] == "cls"


def test_phantoms_are_no_patients():
    scans, drawn = federation("scans", (9, 8, 5)), federation("drawn", (9, 8, 4))
    drawn = replace(drawn, runs=tuple(replace(run, drawn=True) for run in drawn.runs))
    assert nearest(evidence.describe((9, 8, 4)), drawn, scans) == ["scans", "drawn"]
    assert nearest(evidence.describe((9, 8, 4), drawn=True), scans, drawn) == ["drawn", "scans"]


def test_distances_count_where_both_are_known():
    sizes = (9, 8, 4)
    like = replace(evidence.describe(sizes), distances=FAR)  # twice the chance, one of three differs
    alike = replace(FAR, distances={"emd": Spans(4.0, 5.0, 2.0, 0.3)})  # twice the chance on another scale
    apart = replace(FAR, distances={"emd": Spans(0.8, 1.1, 0.1, 0.3)}, differing=3)
    known = [federation(n, sizes, distances=d) for n, d in (("unknown", None), ("apart", apart), ("alike", alike))]
    assert nearest(like, *known) == ["alike", "unknown", "apart"]
    assert evidence.similar(like, 1, known[:1])[0].parts["distances"] == 1
    assert nearest(evidence.describe(sizes), *known) == ["unknown", "apart", "alike"]  # not known here: all equal


def test_the_federation_itself_comes_first():
    like = evidence.describe((9, 8, 4), data="mine")
    first, second = evidence.similar(like, 2, [federation("other", (9, 8, 4)), federation("mine", (20, 8, 4))])
    assert (first.federation.data, first.same, second.same) == ("mine", True, False)


def test_a_federation_without_a_comparison_is_left_out():
    alone = Federation("alone", (RUN, replace(RUN, method="pooled", score=0.8)))
    assert nearest(evidence.describe((9, 8, 4)), alone) == []
    assert nearest(evidence.describe((9, 8, 4), data="alone"), alone) == ["alone"]


def test_test_cases_come_before_validation_cases():
    seen = [replace(RUN, split="validation"), replace(RUN, split="validation", method="ditto", score=0.9)]
    tested = Federation("a", (RUN, replace(RUN, method="ditto"), *seen))
    (match,) = evidence.similar(evidence.describe((9, 8, 4)), 1, [tested])
    assert [g.line.split for g in match.gains] == ["test", "test"]
    (match,) = evidence.similar(evidence.describe((9, 8, 4)), 1, [Federation("a", tuple(seen))])
    assert [g.line.split for g in match.gains] == ["validation", "validation"]


def test_the_shipped_table_is_sound():
    known = evidence.federations(table.shipped())
    assert all(f.source and f.title for f in known)
    by_name = {f.data: f for f in known}
    both = [g for g in by_name["tcga-lgg"].gains() if g.line.source == "docs/results/hospitals.md"]
    tcga, tuned = ({g.method: g for g in both if ("rates tried" in g.line.cases) == equal} for equal in (False, True))
    assert tcga["fedadam"].gain == pytest.approx(0.712 - 0.693)
    invalid = {"fedamp", "fpfc", "feddiv", "pfednet", "superfed", "l2gd"}  # so marked where nothing was tuned
    assert invalid.isdisjoint(tcga) and invalid <= set(tuned)
    assert tuned["fedexp"].gain == pytest.approx(0.693 - 0.660) and "lr" not in tuned["fedexp"].line.training
    assert tuned["ditto"].line.rounds == 75 and tcga["ditto"].line.rounds == 150
    assert tcga["local"].line.by_site == (0.648, 0.681, 0.583, 0.611)  # CS, DU, HT, FG: most training cases first
    assert by_name["scanners"].distances.differing is not None
    assert show.overview(known).lines
    assert all(show.methods(f).lines for f in known)


def test_the_page_shows_code_that_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out.splitlines()) == 3
