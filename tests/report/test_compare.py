"""Tables and tests over runs: what is paired with what and said to be significant; questions of users; subgroups."""

import csv
import io
import json

import numpy as np
import pytest
from scipy.stats import PermutationMethod, mannwhitneyu, wilcoxon
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from folders import cases, load, row, write
from polysite.cli import app
from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, RunError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.metrics.subgroups import subgroup_test
from polysite.report import costs, example_cases
from polysite.report.compare import compare, summary, tables
from polysite.report.page import Options, build
from polysite.report.paired_tests import parse
from polysite.report.runs import methods, read

FILES = {"data": {"name": "files", "path": "x", "modalities": ["t1"]}}


@pytest.fixture
def pair(tmp_path):
    """Load two methods with these cases: one as fedavg, the other as fedprox."""

    def loaded(one, other, names=("fedavg", "x")):
        algorithms = zip(names, (one, other), ("fedavg", "fedprox"), strict=True)
        return load(*(write(tmp_path / name, found, algorithm=algorithm) for name, found, algorithm in algorithms))

    return loaded


def everywhere(label):
    """Cases whose row for the label WT depends on their number."""
    return {s: {c: {"WT": label(k)} for k, c in enumerate(each)} for s, each in cases().items()}


def by_name(comparison):
    return {g.name: g for g in tables(comparison)}


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


def test_a_smaller_distance_is_a_gain_and_the_best_is_marked_whichever_way_is_better(pair):
    near, far = everywhere(lambda k: row(0.5, 4.0 + k / 2)), everywhere(lambda k: row(0.6, 9.0 + k))
    found = compare(pair(far, near, ("far", "near")), "far")
    (dice, distance) = found.tests
    assert dice.difference == pytest.approx(-0.1) and distance.measure == "hd95"
    assert distance.difference > 4 and distance.effect == 1 and distance.cases_won == (13, 0, 0)
    best = {name: [[c.best for c in line.cells] for line in g.lines] for name, g in by_name(found).items()}
    assert best["overview"] == [[False, True, False, False, False], [False, False, True, False, False]]
    assert best["hospitals_hd95"] == [[False, False, False, True]] * 4
    assert best["hospitals_dice"] == [[False, False, True, False]] * 4
    assert best["measures"][1] == [False, False, False, False, True, False]  # specificity is equal, ASSD less
    assert [c.text for c in by_name(found)["fairness"].lines[0].cells][1:3] == ["0.600", "0.600 (island)"]


def test_neither_a_false_alarm_nor_a_missed_tumour_falls_out_of_the_paired_test(pair):
    right = {"a": {f"{k}": {"WT": row(1.0, truth=0.0, predicted=0.0)} for k in range(6)}}
    right["a"] |= {f"t{k}": {"WT": row(0.6, 5.0)} for k in range(7)}
    wrong = {"a": {c: {"WT": row(0.0, truth=0.0) if c.isdigit() else row(0.6, 4.5)} for c in right["a"]}}
    wrong["a"]["t0"] = {"WT": row(0.0, predicted=0.0)}
    loaded = pair(right, wrong)
    test = next(t for t in compare(loaded).tests if t.measure == "hd95")
    assert test.cases == 13 and test.difference == pytest.approx((6 * 0.5 - 6 * 100 - 95) / 13)
    assert test.cases_won == (6, 0, 7)
    lines = [[c.text for c in line.cells] for line in by_name(compare(loaded))["empty_masks"].lines]
    assert lines == [["fedavg", "13", "0", "0", "6"], ["x", "13", "1", "6", "0"]]
    excluded = next(t for t in compare(loaded, policy=EmptyMaskPolicy("excluded")).tests if t.measure == "hd95")
    assert excluded.cases == 6 and excluded.difference == pytest.approx(0.5)


def test_better_and_worse_go_by_the_effect_that_was_tested(pair):
    usual = {"a": {f"{k:02d}": {"WT": 0.5 + k / 100} for k in range(13)}}
    better = {c: {"WT": v["WT"] + 0.02} for c, v in usual["a"].items()}
    found = compare(pair(usual, {"a": {**better, "12": {"WT": 0.01}}}))
    assert found.tests[0].difference < 0 < found.tests[0].effect and found.tests[0].significant
    assert "better: x" in summary(found)[1] and "worse" not in summary(found)[1]


def test_seeds_are_averaged_and_folds_are_joined(tmp_path):
    one, two = cases(), cases(0.1)
    runs = [write(tmp_path / "fedavg" / f"s{k}", c, seed=k, **FILES) for k, c in enumerate((one, two))]
    other = write(tmp_path / "fedavg" / "s2", one, seed=2, split_seed=3, **FILES)
    method, _ = methods([*map(read, runs), read(write(tmp_path / "fedprox", one, algorithm="fedprox", **FILES))])
    assert method.name == "fedavg" and len(method.runs) == 2 and len(method.spread("dice")) == 2
    assert len(methods(map(read, (*runs, other)))) == 1
    assert method.values("dice", label="WT")["north", "north-0"] == pytest.approx(one["north"]["north-0"]["WT"] + 0.05)
    halves = [{s: dict(list(c.items())[k::2]) for s, c in one.items()} for k in (0, 1)]
    folds = [write(tmp_path / "folds" / f"f{k}", c, fold=k, split="test", **FILES) for k, c in enumerate(halves, 1)]
    (joined,) = load(*folds)
    assert joined.values("dice") == load(write(tmp_path / "whole", one, **FILES))[0].values("dice")
    assert len(joined.spread("dice")) == 1
    phantoms = load(*(write(tmp_path / "phantoms" / f"s{k}", cases(), seed=k) for k in range(2)))
    assert len(phantoms[0].values("dice")) == 26  # of another seed, they are other patients


def test_published_folds_are_joined_and_a_case_of_two_folds_counts_once(tmp_path):
    files = {"data": {"name": "files", "path": "x"}, "file": "x_test_fold_{fold}.csv"}
    dice = [{"a": {"one": 0.4, "two": 0.6}}, {"a": {"two": 0.8, "three": 0.3}, "b": {"four": 0.5}}]
    found = [{s: {c: {"WT": v} for c, v in each.items()} for s, each in fold.items()} for fold in dice]
    (joined,) = load(*(write(tmp_path / "folds" / f"f{k}", c, fold=k, **files) for k, c in enumerate(found, 1)))
    assert joined.in_several_folds == [("a", "two")]
    assert joined.of(None, "dice") == pytest.approx([0.4, 0.3, 0.7, 0.5])  # one, three, two, four
    assert any("two of a is in the test set of more than one fold" in remark for remark in compare([joined]).remarks)


def test_a_matrix_is_the_mean_over_cases_of_all_folds(tmp_path):
    one = {"a": {"1": {"WT": 0.2}}, "b": {"2": {"WT": 0.5}}}
    two = {"a": {k: {"WT": 0.8} for k in "345"}, "b": {"6": {"WT": 0.5}}}
    settings = {"own": True, "algorithm": "local"}
    (method,) = load(*(write(tmp_path / "m" / f"f{k}", c, fold=k, **settings) for k, c in enumerate((one, two), 1)))
    assert method.matrix()["a"]["a"] == pytest.approx(np.mean([0.2, 0.8, 0.8, 0.8]))
    assert method.curve(lambda run: run.curve)[0] == [1, 2, 3]


def test_other_cases_are_remarked_on_and_what_cannot_be_compared_is_refused(pair, tmp_path):
    loaded = pair(cases(), {**cases(), "south": {"south-0": {"WT": 0.5, "ET": 0.5}}})
    found = compare(loaded)
    assert any("9 cases were evaluated by all methods" in r for r in found.remarks)
    assert any("island, south have fewer than five" in r for r in found.remarks)
    assert {t.cases for t in found.tests} == {9}
    with pytest.raises(ConfigError, match="no method 'fedavq'"):
        compare(loaded, "fedavq")
    strange = {"labels": cases(labels=("WT", "TC")), "places": {"elsewhere": {"x": {"WT": 0.5, "ET": 0.5}}}}
    for name, words in (("labels", "cannot be compared with"), ("places", "no evaluated case in common")):
        other = load(write(tmp_path / name, strange[name], algorithm="fedprox"))
        with pytest.raises(RunError, match=words):
            compare([loaded[0], *other])
    flattering = load(write(tmp_path / "run", cases(), split="validation"))
    assert any("the scores are too good" in r for r in compare(flattering).remarks)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("evaluation/test/cases.csv", None, "holds 12 cases of 13"),
        ("evaluation/test/about.json", "{}", "cannot be read"),
        ("versions.json", "{", "cannot be read"),
        ("result.json", "{}", "cannot be read"),
        ("rounds.jsonl", "[1]\n", "cannot be read"),
        ("config.toml", "", "cannot be read"),
        ("result.json", "absent", r"has not finished; 'polysite train --resume"),
    ],
)
def test_a_damaged_or_unfinished_folder_is_refused_in_a_sentence(file, text, words, tmp_path):
    path = write(tmp_path / "run", cases()) / file
    path.write_text("\n".join(path.read_text().splitlines()[:-3]) if text is None else text)
    if text == "absent":
        path.unlink()
    with pytest.raises(RunError, match=words):
        compare(load(tmp_path / "run"))


def test_every_table_as_markdown_latex_and_csv(pair):
    nasty = {"a|b & 50%_$x$": cases()["north"], "<b>south</b>": cases()["south"]}
    found = compare(pair(nasty, nasty))
    for grid in tables(found):
        lines = grid.markdown().splitlines()
        assert lines[2].count("|") == lines[3].count("|") == len(grid.head) + 1
        tex = grid.latex()
        assert tex.count(r"\begin{tabular}") == 1 and "_$x$" not in tex and "50%" not in tex
        assert all(line.count(" & ") == len(grid.head) - 1 for line in tex.splitlines() if line.endswith(r" \\"))
        table = list(csv.DictReader(io.StringIO(grid.csv())))
        assert len(table) == len(grid.lines) and all(None not in r and None not in r.values() for r in table)
    overview = next(csv.DictReader(io.StringIO(tables(found)[0].csv())))
    assert float(overview["Dice (value)"]) == pytest.approx(np.mean(list(found.methods[0].values("dice").values())))


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
    for wrong, sentence in (("--tail=up", "--tail up"), ("--hd95=x", "policy")):
        done = CliRunner().invoke(app, ["compare", str(runs[0]), wrong, "--out", str(tmp_path / "x")])
        assert sentence in str(done.exception)


def test_the_cases_to_look_at_are_ranked_by_the_reference(tmp_path):
    dice = {"a": {f"{k}": {"WT": 0.1 * (k + 1)} for k in range(2)}}
    runs = [write(tmp_path / "m" / f"s{k}", dice, seed=k) for k in (0, 1)]
    other = {"a": {c: {"WT": 0.9} for c in dice["a"]}}
    loaded = load(*runs, write(tmp_path / "x", other, algorithm="fedprox"))
    shown = example_cases.cases(loaded, "m")
    assert [(s.case, s.why) for s in shown] == [("0", "worst"), ("1", "best")]
    assert [list(s.scores) for s in shown] == [["m", "x"]] * 2 and shown[0].scores["m"] == {"WT": 0.1}
    assert example_cases.cases(loaded, "x")[0].scores["x"] == {"WT": 0.9}


SITES = {"01": 9, "12": 8, "13": 7, "18": 6}


def dice(method, noise=0.1):
    """Dice of a method, which is better the higher its number."""
    rng, own = np.random.default_rng(1), np.random.default_rng(method)
    base = {(s, k): {n: rng.uniform(0.3, 0.7) for n in ("WT", "TC")} for s, c in SITES.items() for k in range(c)}
    found = {s: {} for s in SITES}
    for (s, k), labels in base.items():
        found[s][f"{s}-{k}"] = {n: float(v + 0.05 * method + own.normal(0, noise)) for n, v in labels.items()}
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write(root / n, dice(k), algorithm={"name": n}) for k, n in enumerate(("fedavg", "scaffold", "fedprox"))]


@pytest.fixture(scope="module")
def three(paths):
    return load(*paths)


def gains(sites, labels, one=1, other=0):
    a, b = dice(one), dice(other)
    return np.array([np.mean([a[s][c][n] - b[s][c][n] for n in labels]) for s in sites for c in a[s]])


def test_sites_label_and_tail_are_those_of_the_question(three):
    questions = ["scaffold > fedavg @ 12,13 / TC", "scaffold != fedavg @ !1,18", "fedprox < scaffold"]
    asked = compare(three, questions=questions).asked
    p = [
        wilcoxon(gains(["12", "13"], ["TC"]), alternative="greater").pvalue,
        wilcoxon(gains(["12", "13"], ["WT", "TC"])).pvalue,
        wilcoxon(gains(SITES, ["WT", "TC"], 2, 1), alternative="less").pvalue,
    ]
    assert [a.test.p for a in asked] == pytest.approx(p)
    assert [a.test.adjusted for a in asked] == pytest.approx(multipletests(p, method="holm")[1].tolist())
    assert [a.test.cases for a in asked] == [15, 15, 30]
    assert [a.question.sites for a in asked] == [("12", "13"), ("12", "13"), tuple(SITES)]
    assert asked[0].test.difference == pytest.approx(gains(["12", "13"], ["TC"]).mean())
    assert parse("scaffold > fedavg @ 1", three, ["dice"]).sites == ("01",)


def test_the_other_tests_do_not_change_by_what_is_asked(three):
    assert compare(three).tests == compare(three, questions=["scaffold > fedavg"]).tests
    assert not compare(three).asked and "asked" not in {g.name for g in tables(compare(three))}


def test_smaller_distances_are_better(tmp_path):
    far, near = ({"a": {f"{k}": {"WT": row(0.5, d + k)} for k in range(8)}} for d in (9.0, 4.0))
    loaded = load(write(tmp_path / "far", far), write(tmp_path / "near", near, algorithm="fedprox"))
    (asked,) = compare(loaded, "far", questions=["near > far / HD95 WT"]).asked
    assert asked.test.difference == 5 and asked.test.p == pytest.approx(1 / 256)
    assert (asked.question.measure, asked.question.label) == ("hd95", "WT")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scaffold fedavg", "cannot be read; write it as"),
        ("scafold > fedavg", "no method 'scafold'; .*scaffold"),
        ("scaffold > fedavg @ 2", "no site '2'"),
        ("scaffold > fedavg / TX", "no label or measure 'TX'; .*TC"),
        ("scaffold > fedavg / HD95 TX", "no label or measure 'TX'"),
        ("scaffold > scaffold", "with itself"),
        ("scaffold > fedavg @ !1,12,13,18", "no case of these sites"),
    ],
)
def test_unknown_names_are_refused(three, text, words):
    with pytest.raises(ConfigError, match=words):
        compare(three, questions=[text])


def test_answers_are_on_the_page_in_the_table_and_in_json(paths, tmp_path):
    text, out = "scaffold > fedavg @ 12,13 / TC", tmp_path / "out"
    words = ["compare", *map(str, paths), "--out", str(out), "--test", text, "--no-scans", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (asked,) = json.loads(done.output)["asked"]
    assert asked["text"] == text and asked["tail"] == "greater" and asked["sites"] == ["12", "13"]
    line = next(csv.DictReader(io.StringIO((out / "asked.csv").read_text())))
    assert line["question"] == text and line["test"] == "greater" and float(line["cases (value)"]) == 15
    assert "Questions" in (out / "index.html").read_text() and (out / "figures" / "gets.png").is_file()


def test_the_model_of_one_hospital_on_all_cases_is_a_row(tmp_path):
    held = dice(0, 0.01)
    loaded = load(
        write(tmp_path / "fedavg", held),
        write(tmp_path / "local", held, alone=True, algorithm="local"),
        write(tmp_path / "fedper", held, own=True, algorithm="fedper"),
    )
    found = compare(loaded)
    assert [m.name for m in found.methods] == ["fedavg", "local", "local, model of 01", "fedper"]
    assert {t.method for t in found.tests} == {"local", "fedper"}  # the row changes no correction
    overview = next(g for g in tables(found) if g.name == "overview")
    lines = {line.cells[0].text: [c.value for c in line.cells[1:-2]] for line in overview.lines}
    share = {s: 1 if s == "01" else 2 for s in held}  # on cases of others it has half the Dice
    wt, tc = (np.mean([c[n] / share[s] for s in held for c in held[s].values()]) for n in ("WT", "TC"))
    assert lines["local, model of 01"] == pytest.approx([(wt + tc) / 2, wt, tc, (9 * 1.0 + 21 * 9.0) / 30])
    assert found.methods[2].of("01", "dice") == found.methods[1].of("01", "dice")
    whole, one = (costs.cost(m.first, Speeds()) for m in (loaded[1], loaded[1].under("12")))
    assert (whole.steps, one.steps, one.parallel_steps) == (48, 12, 12)  # the row costs what that hospital did


def test_slices_of_a_volume_count_as_one_case(tmp_path):
    """Three slices of each of six volumes: the test sees six means, not eighteen differences."""
    rng = np.random.default_rng(0)
    base, better, gained = {"n": {}, "s": {}}, {"n": {}, "s": {}}, []
    for site in base:
        for volume, lift in zip(("a", "b", "c"), rng.normal(0.1, 0.1, 3), strict=True):
            low, gain = rng.uniform(0.2, 0.5, 3), lift + rng.normal(0, 0.01, 3)
            gained.append(gain.mean())
            for k in range(3):
                base[site][f"{volume}/z{k:03d}"] = {"WT": float(low[k])}
                better[site][f"{volume}/z{k:03d}"] = {"WT": float(low[k] + gain[k])}
    settings = {"slices": {"axis": "axial"}, "train": {"patch": [16, 16]}, "data": {"name": "hospitals",
                "modalities": ["t1"], "labels": ["WT"]}}  # fmt: skip
    held = {"fedavg": base, "scaffold": better}
    runs = [write(tmp_path / n, cases, algorithm={"name": n}, **settings) for n, cases in held.items()]
    found = compare(load(*runs), reference="fedavg", questions=["scaffold > fedavg"])
    test, (answer,) = found.tests[0], found.asked
    assert (test.cases, answer.test.cases, sum(test.cases_won)) == (6, 6, 6)
    assert test.p == pytest.approx(wilcoxon(gained).pvalue)
    assert test.difference == pytest.approx(np.mean(gained))
    assert len(found.find("scaffold").of(None, "dice")) == 18
    assert any("n, s have fewer than five volumes here" in remark for remark in found.remarks)  # of nine slices each
    assert "count a volume once" in build("page", load(*runs), Options(scans=False))


def grouped(folder, groups, gap=0.0, sites=("north", "south"), cases=8, **settings):
    """A run whose cases of the second group score less by a gap."""
    rng, names = np.random.default_rng(1), sorted(set(groups))
    of = {s: {f"{s}-{c}": groups[(c + k * cases) % len(groups)] for c in range(cases)} for k, s in enumerate(sites)}
    scores = {
        s: {c: {"WT": row(float(0.8 - gap * (g == names[-1]) + rng.uniform(0, 0.1)))} for c, g in found.items()}
        for s, found in of.items()
    }
    path = write(folder, scores, **settings)
    about = path / "evaluation" / "test" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "subgroups": of}))
    return path


def subgroups(*paths):
    return next(g for g in tables(compare(load(*paths))) if g.name == "subgroups_dice")


def test_a_planted_difference_is_found_and_p_values_are_corrected_for_the_methods(tmp_path):
    one = grouped(tmp_path / "fedavg", ["HGG", "LGG"], gap=0.2)
    grid = subgroups(one, grouped(tmp_path / "ditto", ["HGG", "LGG"], algorithm="local"))
    assert grid.head == ("method", "HGG (8)", "LGG (8)", "p", "p (Holm)")
    _, high, low, p, adjusted = grid.lines[0].cells
    assert high.value - low.value == pytest.approx(0.2, abs=0.03) and "[" in high.text
    assert adjusted.text.endswith("*") and adjusted.value == pytest.approx(2 * p.value) and p.value < 0.01
    assert grid.lines[1].cells[-1].value > 0.05  # no difference is claimed where there is none
    made = build("One", load(one))
    assert "Dice by subgroup" in made and "HD95 (mm) by subgroup" in made


def test_few_cases_and_a_subgroup_that_is_a_hospital_are_too_few_to_tell(tmp_path):
    few = subgroups(grouped(tmp_path / "few", ["HGG", "LGG"], 0.4, sites=("north",), cases=4)).lines[0].cells
    assert few[-1].text == "too few cases to tell" and "[" not in few[1].text
    apart = subgroups(grouped(tmp_path / "apart", ["old"] * 8 + ["young"] * 8, 0.4)).lines[0].cells
    assert apart[-1].text == "too few cases to tell"


def test_the_test_agrees_with_scipy_where_there_is_one_hospital():
    rng = np.random.default_rng(0)
    values, groups = rng.normal(size=14), ["a"] * 6 + ["b"] * 8
    values[:6] += 1.0
    ours = subgroup_test(values, groups, ["one"] * 14).p
    exact = mannwhitneyu(values[:6], values[6:], method=PermutationMethod(n_resamples=9999, rng=rng)).pvalue
    assert ours == pytest.approx(exact, abs=0.02)


def test_it_keeps_its_level_when_hospitals_differ_and_their_mix_does_too():
    rng, hits = np.random.default_rng(3), 0
    for _ in range(200):
        sites = ["north"] * 12 + ["south"] * 12
        groups = ["a"] * 10 + ["b"] * 2 + ["a"] * 2 + ["b"] * 10  # the better hospital has more of a
        values = rng.normal(size=24) + np.array([3.0] * 12 + [0.0] * 12)
        hits += subgroup_test(values, groups, sites, draws=199).p <= 0.05
    assert hits <= 20  # 10 are expected; above 20 with a probability of 0.2 %
