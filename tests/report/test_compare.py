"""Tables and tests over runs: what is paired with what, what is said to be significant, and how it is written down."""

import csv
import io
import json

import numpy as np
import pytest
from scipy.stats import wilcoxon
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from folders import cases, load, row, write
from polysite.cli import app
from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, RunError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.report import costs, example_cases, publish
from polysite.report.compare import compare, summary, tables
from polysite.report.page import Options, build
from polysite.report.runs import methods, read


def test_identical_runs_are_never_said_to_differ(tmp_path):
    runs = [write(tmp_path / name, cases(), algorithm={"name": name}) for name in ("fedavg", "fedprox", "fednova")]
    found = compare(load(*runs))
    assert [t.method for t in found.tests] == ["fedprox", "fednova"] * 2
    for t in found.tests:
        assert (t.p, t.adjusted, t.effect, t.difference, t.low, t.high) == (1, 1, 0, 0, 0, 0)
        assert t.cases_won == (0, 13, 0) and t.hospitals_won == (0, 3, 0) and not t.significant
    assert "no significant difference: 2 methods" in " ".join(summary(found))


def test_p_values_are_scipys_and_corrected_as_statsmodels_does(tmp_path):
    shifts = {"fedavg": (0, 0), "fedprox": (0.05, 0.05), "fednova": (0.0, 0.05), "median": (-0.1, 0.1)}
    data = {name: cases(shift, noise, seed=k) for k, (name, (shift, noise)) in enumerate(shifts.items())}
    found = compare(load(*(write(tmp_path / n, c, algorithm={"name": n}) for n, c in data.items())))
    tests = [t for t in found.tests if t.measure == "dice"]

    def means(name):
        return np.array([np.mean(list(c.values())) for s in sorted(data[name]) for c in data[name][s].values()])

    p = [wilcoxon(means(t.method) - means("fedavg")).pvalue for t in tests]
    np.testing.assert_allclose([t.p for t in tests], p)
    np.testing.assert_allclose([t.adjusted for t in tests], multipletests(p, method="holm")[1])
    best = tests[0]
    assert best.method == "fedprox" and best.significant and best.difference > 0 and best.low > 0
    assert best.difference == pytest.approx((means("fedprox") - means("fedavg")).mean())
    assert sum(best.cases_won) == 13 and sum(best.hospitals_won) == 3
    one_sided = compare(found.methods, tail="greater").tests
    assert one_sided[0].p == pytest.approx(wilcoxon(means("fedprox") - means("fedavg"), alternative="greater").pvalue)


def test_a_smaller_distance_is_a_gain(tmp_path):
    far = {s: {c: {"WT": row(0.5, 9.0 + k)} for k, c in enumerate(found)} for s, found in cases().items()}
    near = {s: {c: {"WT": row(0.5, 4.0 + k / 2)} for k, c in enumerate(found)} for s, found in cases().items()}
    found = compare(load(write(tmp_path / "far", far), write(tmp_path / "near", near, algorithm="fedprox")), "far")
    (dice, distance) = found.tests
    assert dice.difference == 0 and distance.measure == "hd95"
    assert distance.difference > 4 and distance.effect == 1 and distance.cases_won == (13, 0, 0)


def test_missing_every_tumour_does_not_pay(tmp_path):
    good = {s: {c: {"WT": row(0.6, 30.0)} for c in found} for s, found in cases().items()}
    lazy = {s: {c: {"WT": row(0.0, predicted=0.0)} for c in found} for s, found in good.items()}
    lazy["north"]["north-0"] = {"WT": row(0.9, 1.0)}
    loaded = load(write(tmp_path / "good", good), write(tmp_path / "lazy", lazy, algorithm="fedprox"))
    fair, unfair = (compare(loaded, "good", EmptyMaskPolicy(empty)) for empty in ("penalty", "excluded"))
    distance = {f.policy.empty: next(t for t in f.tests if t.measure == "hd95") for f in (fair, unfair)}
    assert distance["penalty"].difference < 0 < distance["excluded"].difference
    grids = {g.name: g for g in tables(fair)}
    lines = {line.cells[0].text: [c.text for c in line.cells[1:]] for line in grids["empty_masks"].lines}
    assert lines == {"good": ["13", "0", "0", "0"], "lazy": ["13", "12", "0", "0"]}
    assert "counts the diagonal" in grids["overview"].note and "left out" in tables(unfair)[0].note


def test_seeds_are_averaged_and_folds_are_joined(tmp_path):
    one, two = cases(), cases(0.1)
    files = {"data": {"name": "files", "path": "x", "modalities": ["t1"]}}
    runs = [write(tmp_path / "fedavg" / f"s{k}", c, seed=k, **files) for k, c in enumerate((one, two))]
    (method,) = load(*runs)
    assert method.name == "fedavg" and len(method.runs) == 2
    assert method.values("dice", label="WT")["north", "north-0"] == pytest.approx(one["north"]["north-0"]["WT"] + 0.05)
    assert len(method.spread("dice")) == 2 and "over seeds" in tables(compare([method]))[0].head
    halves = [{s: dict(list(c.items())[k::2]) for s, c in one.items()} for k in (0, 1)]
    folds = [write(tmp_path / "folds" / f"f{k}", c, fold=k, split="test", **files) for k, c in enumerate(halves, 1)]
    (joined,) = load(*folds)
    assert joined.values("dice") == load(write(tmp_path / "whole", one, **files))[0].values("dice")
    assert len(joined.spread("dice")) == 1


def test_phantoms_of_another_seed_are_other_patients(tmp_path):
    (method,) = load(*(write(tmp_path / "fedavg" / f"s{k}", cases(), seed=k) for k in range(2)))
    assert len(method.values("dice")) == 26


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: cases(labels=("WT", "TC")), "cannot be compared with"),
        (lambda c: {"elsewhere": {"x": {"WT": 0.5, "ET": 0.5}}}, "no evaluated case in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, words, tmp_path):
    runs = write(tmp_path / "one", cases()), write(tmp_path / "two", change(cases()), algorithm="fedprox")
    with pytest.raises(RunError, match=words):
        compare(load(*runs))


def test_other_cases_are_remarked_on_and_an_unknown_reference_is_refused(tmp_path):
    less = {**cases(), "south": {"south-0": {"WT": 0.5, "ET": 0.5}}}
    loaded = load(write(tmp_path / "fedavg", cases()), write(tmp_path / "fedprox", less, algorithm="fedprox"))
    found = compare(loaded)
    assert any("9 cases were evaluated by all methods" in r for r in found.remarks)
    assert any("island, south have fewer than five" in r for r in found.remarks)
    assert {t.cases for t in found.tests} == {9}
    with pytest.raises(ConfigError, match="no method 'fedavq'"):
        compare(loaded, "fedavq")


def test_a_run_that_has_not_finished_is_not_compared(tmp_path):
    (write(tmp_path / "run", cases()) / "result.json").unlink()
    with pytest.raises(RunError, match=r"has not finished; 'polysite train --resume"):
        compare(load(tmp_path / "run"))


def test_every_table_as_markdown_latex_and_csv(tmp_path):
    nasty = {"a|b & 50%_$x$": cases()["north"], "<b>south</b>": cases()["south"]}
    runs = [write(tmp_path / n, nasty, algorithm={"name": n}) for n in ("fedavg", "fedprox")]
    found = compare(load(*runs))
    for grid in tables(found):
        lines = grid.markdown().splitlines()
        assert lines[2].count("|") == lines[3].count("|") == len(grid.head) + 1
        tex = grid.latex()
        assert tex.count(r"\begin{tabular}") == 1 and "_$x$" not in tex and "50%" not in tex
        assert all(line.count(" & ") == len(grid.head) - 1 for line in tex.splitlines() if line.endswith(r" \\"))
        table = list(csv.DictReader(io.StringIO(grid.csv())))
        assert len(table) == len(grid.lines) and all(None not in r and None not in r.values() for r in table)
    overview = next(csv.DictReader(io.StringIO(tables(found)[0].csv())))
    mean = np.mean(list(found.methods[0].values("dice").values()))
    assert float(overview["Dice (value)"]) == pytest.approx(mean)


def test_published_folds_are_joined_and_a_case_of_two_folds_is_said(tmp_path):
    files = {"data": {"name": "files", "path": "x"}, "file": "x_test_fold_{fold}.csv"}
    dice = [{"a": {"one": 0.4, "two": 0.6}}, {"a": {"two": 0.8, "three": 0.3}, "b": {"four": 0.5}}]
    found = [{s: {c: {"WT": v} for c, v in each.items()} for s, each in fold.items()} for fold in dice]
    runs = [write(tmp_path / "folds" / f"f{k}", c, fold=k, **files) for k, c in enumerate(found, 1)]
    (joined,) = load(*runs)
    assert joined.in_several_folds == [("a", "two")]
    assert joined.of(None, "dice") == pytest.approx([0.4, 0.3, 0.7, 0.5])  # one, three, two, four
    said = "two of a is in the test set of more than one fold and counts once, with the mean of the scores."
    assert said in compare([joined]).remarks
    seeds = [write(tmp_path / "seeds" / str(k), found[0], seed=k, **files) for k in (0, 1)]
    assert not load(*seeds)[0].in_several_folds


def test_the_command_writes_a_folder_and_names_runs(tmp_path):
    runs = [write(tmp_path / n, cases(k / 20), algorithm={"name": n}) for k, n in enumerate(("fedavg", "fedprox"))]
    words = ["compare", str(runs[0]), f"mine={runs[1]}", "--out", str(tmp_path / "out"), "--json", "--empty", "373.13"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.output)
    assert printed["policy"]["penalty"] == 373.13 and {t["method"] for t in printed["tests"]} == {"mine"}
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"index.html", "tables.md", "tables.tex", "overview.csv", "tests_dice.csv", "cost.csv"} <= names
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, RunError) and "exists already" in str(again.exception)
    for wrong, sentence in (("--tail=up", "--tail up"), ("--speeds=slow", "no speeds called"), ("--hd95=x", "policy")):
        done = CliRunner().invoke(app, ["compare", str(runs[0]), wrong, "--out", str(tmp_path / "x")])
        assert sentence in str(done.exception)


def test_nothing_is_left_behind_where_a_folder_cannot_be_written(tmp_path):
    run, blocked = write(tmp_path / "run", cases()), tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunError, match="could not be written"):
        publish.comparison(blocked / "out", "title", load(run), Options())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run"]


def test_a_false_alarm_does_not_fall_out_of_the_paired_test(tmp_path):
    right = {"a": {f"{k}": {"WT": row(1.0, truth=0.0, predicted=0.0)} for k in range(6)}}
    right["a"] |= {f"t{k}": {"WT": row(0.6, 5.0)} for k in range(7)}
    wrong = {"a": {c: {"WT": row(0.0, truth=0.0) if c.isdigit() else row(0.6, 4.5)} for c in right["a"]}}
    loaded = load(write(tmp_path / "fedavg", right), write(tmp_path / "x", wrong, algorithm="fedprox"))
    test = next(t for t in compare(loaded).tests if t.measure == "hd95")
    assert test.cases == 13 and test.difference == pytest.approx((7 * 0.5 - 6 * 100) / 13)
    assert test.cases_won == (7, 0, 6)
    excluded = next(t for t in compare(loaded, policy=EmptyMaskPolicy("excluded")).tests if t.measure == "hd95")
    assert excluded.cases == 7 and excluded.difference == pytest.approx(0.5)


def test_better_and_worse_go_by_the_effect_that_was_tested(tmp_path):
    usual = {"a": {f"{k:02d}": {"WT": 0.5 + k / 100} for k in range(13)}}
    better = {"a": {c: {"WT": 0.01 if c == "12" else v["WT"] + 0.02} for c, v in usual["a"].items()}}
    found = compare(load(write(tmp_path / "fedavg", usual), write(tmp_path / "x", better, algorithm="fedprox")))
    assert found.tests[0].difference < 0 < found.tests[0].effect and found.tests[0].significant
    said = summary(found)
    assert "better: x" in said[1] and "worse" not in said[1]
    assert said[0] == "fedavg has the highest mean Dice, 0.560; x the lowest, 0.532."
    assert said[2] == "With fedavg even the lowest-scoring hospital (a) reaches Dice 0.560."


def test_hospitals_of_one_case_still_have_an_interval(tmp_path):
    usual = {f"s{k}": {"c": {"WT": 0.5}} for k in range(8)}
    other = {s: {"c": {"WT": 0.5 + 0.01 * k}} for k, s in enumerate(usual)}
    found = compare(load(write(tmp_path / "fedavg", usual), write(tmp_path / "x", other, algorithm="fedprox")))
    assert found.tests[0].low < found.tests[0].difference < found.tests[0].high
    assert found.tests[0].hospitals_won == (7, 1, 0)


def test_the_best_is_marked_whichever_way_is_better(tmp_path):
    near = {s: {c: {"WT": row(0.5, 4.0)} for c in found} for s, found in cases().items()}
    far = {s: {c: {"WT": row(0.6, 9.0)} for c in found} for s, found in cases().items()}
    found = compare(load(write(tmp_path / "fedavg", near), write(tmp_path / "x", far, algorithm="fedprox")))
    grids = {g.name: g for g in tables(found)}
    best = {g.name: [[c.best for c in line.cells] for line in g.lines] for g in grids.values()}
    assert best["overview"] == [[False, False, True, False, False], [False, True, False, False, False]]
    assert best["hospitals_hd95"] == [[False, False, True, False]] * 4
    assert best["hospitals_dice"] == [[False, False, False, True]] * 4
    assert best["measures"][0] == [False, False, False, False, True, False]  # specificity is equal, ASSD less
    assert [c.text for c in grids["fairness"].lines[0].cells][1:3] == ["0.500", "0.500 (island)"]


def test_names_of_methods(tmp_path):
    files = {"data": {"name": "files", "path": "x", "modalities": ["t1"]}}
    runs = [
        write(tmp_path / "runs" / f"2026111{k}-101500-{n}", cases(), seed=k, algorithm=n, **files)
        for n in ("fedavg", "fedprox")
        for k in (0, 1)
    ]
    found = methods(read(p) for p in runs)
    assert [m.name for m in found] == ["fedavg", "fedprox"] and all(len(m.runs) == 2 for m in found)
    other = write(tmp_path / "s", cases(), seed=5, split_seed=3, **files)
    assert len(methods([*(read(p) for p in runs[:2]), read(other)])) == 1


def test_a_matrix_is_the_mean_over_cases_of_all_folds(tmp_path):
    one = {"a": {"1": {"WT": 0.2}}, "b": {"2": {"WT": 0.5}}}
    two = {"a": {k: {"WT": 0.8} for k in "345"}, "b": {"6": {"WT": 0.5}}}
    runs = [
        write(tmp_path / "m" / f"f{k}", c, own=True, fold=k, algorithm="local") for k, c in enumerate((one, two), 1)
    ]
    (method,) = load(*runs)
    assert method.matrix()["a"]["a"] == pytest.approx(np.mean([0.2, 0.8, 0.8, 0.8]))
    assert method.curve(lambda run: run.curve)[0] == [1, 2, 3]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("evaluation/test/cases.csv", None),
        ("evaluation/test/about.json", "{}"),
        ("versions.json", "{"),
        ("result.json", "{}"),
        ("rounds.jsonl", "[1]\n"),
        ("config.toml", "x ="),
        ("config.toml", ""),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(file, text, tmp_path):
    run = write(tmp_path / "run", cases())
    path = run / file
    path.write_text("\n".join(path.read_text().splitlines()[:-3]) if text is None else text)
    with pytest.raises(RunError, match=r"cannot be read|holds 12 cases of 13"):
        read(run)


def test_validation_patients_are_said_to_be_flattering(tmp_path):
    run = write(tmp_path / "run", cases(), split="validation")
    assert any("the scores are too good" in r for r in compare(load(run)).remarks)


def test_what_a_cost_table_says(tmp_path):
    grid = costs.table(load(write(tmp_path / "run", cases())), Speeds(patch=1.0, case=1.0, down=1e-4, up=1e-4))
    cells = dict(zip(grid.head, (c.value for c in grid.lines[0].cells), strict=True))
    assert (cells["rounds"], cells["best round"], cells["steps"], cells["parallel steps"]) == (3, 3, 36, 12)
    assert (cells["to sites"], cells["from sites"], cells["busiest site"]) == (900, 1800, 900)
    assert cells["simulated time"] == pytest.approx(3 * (4 * 4 + 2 + 1 + 2))


def test_the_cases_to_look_at_are_ranked_by_the_reference(tmp_path):
    dice = {"a": {f"{k}": {"WT": 0.1 * (k + 1)} for k in range(2)}}
    runs = [write(tmp_path / "m" / f"s{k}", dice, seed=k) for k in (0, 1)]
    other = {"a": {c: {"WT": 0.9} for c in dice["a"]}}
    loaded = load(*runs, write(tmp_path / "x", other, algorithm="fedprox"))
    shown = example_cases.cases(loaded, "m")
    assert [(s.case, s.why) for s in shown] == [("0", "worst"), ("1", "best")]
    assert [list(s.scores) for s in shown] == [["m", "x"]] * 2 and shown[0].scores["m"] == {"WT": 0.1}
    assert example_cases.cases(loaded, "x")[0].scores["x"] == {"WT": 0.9}


def test_own_and_common_best_rounds_stand_side_by_side(tmp_path):
    own = {"north": 0, "south": 2, "island": 1}
    chosen = write(tmp_path / "fedper", cases(), best_rounds=own, algorithm="fedper")
    path = chosen / "result.json"
    result = json.loads(path.read_text())
    for case in result["common"]["test"]["south"].values():
        case["labels"] = {k: v - 0.1 for k, v in case["labels"].items()}
    path.write_text(json.dumps(result))
    loaded = load(write(tmp_path / "fedavg", cases()), chosen)
    grid = next(g for g in tables(compare(loaded)) if g.name == "best_rounds")
    lines = {line.cells[0].text: [c.value for c in line.cells[1:]] for line in grid.lines}
    assert [lines[s][0] for s in ("north", "south", "island", "all")] == [1, 3, 2, 3]
    assert lines["north"][1] == lines["north"][2] and lines["south"][1] == pytest.approx(lines["south"][2] + 0.1)
    assert grid.head[1] == "fedper: round" and len(grid.head) == 4
    assert "Best round of every hospital" in build("page", loaded, Options(scans=False))
    assert "best_rounds" not in {g.name for g in tables(compare(loaded[:1]))}


def test_every_score_has_its_steps_and_bytes_and_the_note_says_what_is_unequal(tmp_path):
    held = cases()
    paths = [
        write(tmp_path / "fedavg", held),
        write(tmp_path / "local", held, alone=True, rounds=6, algorithm="local"),
    ]
    both = tables(compare(load(*paths), owner=""))[0]
    assert both.head[-2:] == ("steps", "bytes")
    steps = 4 * len(held)  # of a round; every site receives 100 bytes and sends 200
    assert [[c.value for c in line.cells[-2:]] for line in both.lines] == [
        [3 * steps, 3 * 300 * len(held)],
        [6 * steps, 0],
    ]
    assert f"unequal between methods: rounds 3 to 6, steps {3 * steps} to {6 * steps}, bytes 0 to" in both.note
    alike = load(paths[0], write(tmp_path / "fedprox", held, algorithm="fedprox"))
    assert "equal for all methods" in tables(compare(alike))[0].note
    assert "equal" not in tables(compare(alike[:1]))[0].note


def test_a_model_that_all_hospitals_use_is_explained_and_is_no_method_of_the_summary(tmp_path):
    paths = [
        write(tmp_path / "fedavg", cases()),
        write(tmp_path / "local", cases(), alone=True, algorithm="local"),
    ]
    found = compare(load(*paths), owner="north")
    assert [m.name for m in found.methods if m.owner] == ["local, model of north"]
    assert summary(found)[0].startswith("Of the 2 methods, ")
    note = tables(found)[0].note
    assert "local, model of north: every hospital uses the model that north trained." in note


def test_one_hospital_needs_no_line_of_all(tmp_path):
    one = {"north": cases()["north"]}
    grids = {g.name: g for g in tables(compare(load(write(tmp_path / "fedavg", one))))}
    assert [line.cells[0].text for line in grids["hospitals_dice"].lines] == ["north"]
