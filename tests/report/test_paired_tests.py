"""Questions that a user asks of a comparison: which cases, which label, which tail, corrected over all of them."""

import csv
import io
import json

import numpy as np
import pytest
from scipy.stats import wilcoxon
from typer.testing import CliRunner

from folders import load, row, write
from polysite.cli import app
from polysite.errors import ConfigError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.report.compare import compare, tables
from polysite.report.page import Options, build
from polysite.report.paired_tests import parse

SITES = {"01": 9, "12": 8, "13": 7, "18": 6}


def dice(method, noise=0.1):
    rng, own = np.random.default_rng(1), np.random.default_rng(method)
    base = {
        s: {f"{s}-{k}": {n: rng.uniform(0.3, 0.7) for n in ("WT", "TC")} for k in range(c)} for s, c in SITES.items()
    }
    shift = 0.05 * method
    return {
        s: {c: {n: float(v + shift + own.normal(0, noise)) for n, v in each.items()} for c, each in found.items()}
        for s, found in base.items()
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write(root / n, dice(k), algorithm={"name": n}) for k, n in enumerate(("fedavg", "scaffold", "fedprox"))]


@pytest.fixture(scope="module")
def methods(paths):
    return load(*paths)


def gains(sites, labels, one=1, other=0):
    a, b = dice(one), dice(other)
    return np.array([np.mean([a[s][c][n] - b[s][c][n] for n in labels]) for s in sites for c in a[s]])


def test_sites_label_and_tail_are_those_of_the_question(methods):
    asked = compare(
        methods,
        questions=[
            "scaffold > fedavg @ 12,13 / TC",
            "scaffold != fedavg @ !1,18",
            "fedprox < scaffold",
        ],
    ).asked
    p = [
        wilcoxon(gains(["12", "13"], ["TC"]), alternative="greater").pvalue,
        wilcoxon(gains(["12", "13"], ["WT", "TC"])).pvalue,
        wilcoxon(gains(SITES, ["WT", "TC"], 2, 1), alternative="less").pvalue,
    ]
    assert [a.test.p for a in asked] == pytest.approx(p)
    order, steps = np.argsort(p), sorted(p) * np.array([3, 2, 1])
    expected = np.empty(3)
    expected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    assert [a.test.adjusted for a in asked] == pytest.approx(expected.tolist())  # Holm over what is asked
    assert [a.test.cases for a in asked] == [15, 15, 30]
    assert [a.question.sites for a in asked] == [("12", "13"), ("12", "13"), tuple(SITES)]
    assert asked[0].test.difference == pytest.approx(gains(["12", "13"], ["TC"]).mean())


def test_the_other_tests_do_not_change_by_what_is_asked(methods):
    assert compare(methods).tests == compare(methods, questions=["scaffold > fedavg"]).tests
    assert not compare(methods).asked and "asked" not in {g.name for g in tables(compare(methods))}


def test_smaller_distances_are_better(tmp_path):
    far, near = ({"a": {f"{k}": {"WT": row(0.5, d + k)} for k in range(8)}} for d in (9.0, 4.0))
    loaded = load(write(tmp_path / "far", far), write(tmp_path / "near", near, algorithm="fedprox"))
    (asked,) = compare(loaded, "far", questions=["near > far / HD95 WT"]).asked
    assert asked.test.difference == 5 and asked.test.p == pytest.approx(1 / 256)
    assert (asked.question.measure, asked.question.label) == ("hd95", "WT")


def test_a_case_without_a_distance_in_a_label_drops_out_of_the_test_of_the_mean(tmp_path):
    one, other = ({"a": {f"{k}": {"WT": row(0.5, d), "ET": row(0.5, d)} for k in range(7)}} for d in (9.0, 4.0))
    other["a"]["0"]["ET"] = row(0.0, predicted=0.0)
    loaded = load(write(tmp_path / "one", one), write(tmp_path / "other", other, algorithm="fedprox"))
    cases = {
        empty: next(t.cases for t in compare(loaded, "one", EmptyMaskPolicy(empty)).tests if t.measure == "hd95")
        for empty in ("penalty", "excluded", "excluded-case")
    }
    assert cases == {"penalty": 7, "excluded": 7, "excluded-case": 6}
    means = {e: loaded[1].first.values("hd95", EmptyMaskPolicy(e)).get(("a", "0")) for e in cases}
    assert means == {"penalty": 52.0, "excluded": 4.0, "excluded-case": None}
    assert loaded[1].first.values("hd95", EmptyMaskPolicy("excluded-case"), "WT")["a", "0"] == 4.0
    overview = tables(compare(loaded, "one", EmptyMaskPolicy("excluded-case")))[0]
    assert "leaves out every case" in overview.note


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
def test_unknown_names_are_refused(methods, text, words):
    with pytest.raises(ConfigError, match=words):
        compare(methods, questions=[text])


def test_a_site_may_be_written_without_leading_zeros(methods):
    assert parse("scaffold > fedavg @ 1", methods, ["dice"]).sites == ("01",)


def test_answers_are_on_the_page_in_the_table_and_in_json(paths, methods, tmp_path):
    text = "scaffold > fedavg @ 12,13 / TC"
    grid = next(g for g in tables(compare(methods, questions=[text])) if g.name == "asked")
    line = next(csv.DictReader(io.StringIO(grid.csv())))
    assert line["question"] == text and line["test"] == "greater" and float(line["cases (value)"]) == 15
    assert "Questions" in build("page", methods, Options(questions=(text,), scans=False))
    words = ["compare", *map(str, paths), "--out", str(tmp_path / "out"), "--test", text, "--no-scans", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (asked,) = json.loads(done.output)["asked"]
    assert asked["text"] == text and asked["tail"] == "greater" and asked["sites"] == ["12", "13"]
    assert (tmp_path / "out" / "asked.csv").is_file() and (tmp_path / "out" / "figures" / "gets.png").is_file()


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
    grids = {g.name: g for g in tables(found)}
    lines = {line.cells[0].text: [c.value for c in line.cells[1:-2]] for line in grids["overview"].lines}
    expected = [
        np.mean([np.mean(list(c.values())) / (1 if s == "01" else 2) for s in held for c in held[s].values()]),
        *(np.mean([c[n] / (1 if s == "01" else 2) for s in held for c in held[s].values()]) for n in ("WT", "TC")),
        (9 * 1.0 + 21 * 9.0) / 30,
    ]
    assert lines["local, model of 01"] == pytest.approx(expected)
    assert found.methods[2].of("01", "dice") == found.methods[1].of("01", "dice")
    assert [m.name for m in compare(loaded, owner="").methods] == ["fedavg", "local", "fedper"]
    assert compare(loaded, owner="13").methods[2].name == "local, model of 13"
    with pytest.raises(ConfigError, match="no site '14'"):
        compare(loaded, owner="14")
    with pytest.raises(ConfigError, match="no method here has a model of '13'"):
        compare([loaded[0], loaded[2]], owner="13")


def test_the_row_costs_what_that_hospital_did(tmp_path):
    from polysite.costs.speeds import Speeds
    from polysite.report import costs

    (method,) = load(write(tmp_path / "local", dice(0), alone=True, algorithm="local"))
    whole, one = (costs.cost(m.first, Speeds()) for m in (method, method.under("12")))
    assert (whole.steps, one.steps, one.parallel_steps) == (48, 12, 12)


def test_slices_of_a_volume_count_as_one_case(tmp_path):
    """Three slices of each of six volumes: the test sees six means, not eighteen differences."""
    rng = np.random.default_rng(0)
    base, better = {}, {}
    for site in ("n", "s"):
        for volume, lift in zip(("a", "b", "c"), rng.normal(0.1, 0.1, 3), strict=True):
            for k in range(3):
                name, value = f"{volume}/z{k:03d}", float(rng.uniform(0.2, 0.5))
                base.setdefault(site, {})[name] = {"WT": value}
                better.setdefault(site, {})[name] = {"WT": float(value + lift + rng.normal(0, 0.01))}
    settings = {"slices": {"axis": "axial"}, "train": {"patch": [16, 16]}, "data": {"name": "hospitals",
                "modalities": ["t1"], "labels": ["WT"]}}  # fmt: skip
    runs = [
        write(tmp_path / n, cases, algorithm={"name": n}, **settings)
        for n, cases in (("fedavg", base), ("scaffold", better))
    ]
    found = compare(load(*runs), reference="fedavg", questions=["scaffold > fedavg"])
    volumes = [
        np.mean([better[s][f"{v}/z{k:03d}"]["WT"] - base[s][f"{v}/z{k:03d}"]["WT"] for k in range(3)])
        for s in ("n", "s")
        for v in "abc"
    ]
    test, (answer,) = found.tests[0], found.asked
    assert (test.cases, answer.test.cases, sum(test.cases_won)) == (6, 6, 6)
    assert test.p == pytest.approx(wilcoxon(volumes).pvalue)
    assert test.difference == pytest.approx(np.mean(volumes))
    assert len(found.find("scaffold").of(None, "dice")) == 18
    assert any("count a volume once" in remark for remark in found.remarks)
    assert any("n, s have fewer than five volumes here" in remark for remark in found.remarks)  # of nine slices each
    assert "count a volume once" in build("page", load(*runs), Options(scans=False))
