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
from polysite.errors import ConfigError, RunError
from polysite.metrics.measures import Policy
from polysite.report import publish
from polysite.report.compare import compare, summary, tables
from polysite.report.page import Options


def test_identical_runs_are_never_said_to_differ(tmp_path):
    runs = [write(tmp_path / name, cases(), algorithm={"name": name}) for name in ("fedavg", "fedprox", "fednova")]
    found = compare(load(*runs))
    assert [t.method for t in found.tests] == ["fedprox", "fednova"] * 2
    for t in found.tests:
        assert (t.p, t.adjusted, t.effect, t.difference, t.low, t.high) == (1, 1, 0, 0, 0, 0)
        assert t.cases_won == (0, 13, 0) and t.hospitals_won == (0, 3, 0) and not t.significant
    assert "no difference shown: 2 methods" in " ".join(summary(found))


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
    fair, unfair = (compare(loaded, "good", Policy(empty)) for empty in ("penalty", "excluded"))
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
        (lambda c: {"elsewhere": {"x": {"WT": 0.5, "ET": 0.5}}}, "no examined case in common"),
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
    assert any("9 cases were examined by all methods" in r for r in found.remarks)
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


def test_the_command_writes_a_folder_and_names_runs(tmp_path):
    runs = [write(tmp_path / n, cases(k / 20), algorithm={"name": n}) for k, n in enumerate(("fedavg", "fedprox"))]
    words = ["compare", str(runs[0]), f"mine={runs[1]}", "--out", str(tmp_path / "out"), "--json", "--empty", "373.13"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["policy"]["penalty"] == 373.13 and {t["method"] for t in told["tests"]} == {"mine"}
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
