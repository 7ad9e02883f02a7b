"""Results by subgroup: grade, scanner, sex."""

import json

import numpy as np
import pytest

from folders import load, row, write
from polysite.metrics.subgroups import subgroup_test
from polysite.report import page
from polysite.report.compare import compare, tables


def run(folder, groups, gap=0.0, sites=("north", "south"), cases=8):
    """A run whose cases of the second group score less by a gap."""
    rng, names = np.random.default_rng(1), sorted(set(groups))
    of = {s: {f"{s}-{c}": groups[(c + k * cases) % len(groups)] for c in range(cases)} for k, s in enumerate(sites)}
    scores = {
        s: {c: {"WT": row(float(0.8 - gap * (g == names[-1]) + rng.uniform(0, 0.1)))} for c, g in found.items()}
        for s, found in of.items()
    }
    path = write(folder, scores)
    about = path / "evaluation" / "test" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "subgroups": of}))
    return path


def table(*paths, name="subgroups_dice"):
    return next(g for g in tables(compare(load(*paths))) if g.name == name)


def test_a_planted_difference_is_found_with_counts_means_and_intervals(tmp_path):
    grid = table(run(tmp_path / "fedavg", ["HGG", "LGG"], gap=0.2))
    assert grid.head == ("method", "HGG (8)", "LGG (8)", "p", "p (Holm)")
    _, high, low, _, last = grid.lines[0].cells
    assert high.value - low.value == pytest.approx(0.2, abs=0.03) and "[" in high.text
    assert last.text.endswith("*") and last.value < 0.01


def test_no_difference_is_claimed_where_there_is_none(tmp_path):
    last = table(run(tmp_path / "fedavg", ["HGG", "LGG"])).lines[0].cells[-1]
    assert last.value > 0.05


def test_few_cases_are_too_few_to_tell_and_have_no_interval(tmp_path):
    line = table(run(tmp_path / "fedavg", ["HGG", "LGG"], gap=0.4, sites=("north",), cases=4)).lines[0]
    assert line.cells[-1].text == "too few cases to tell" and "[" not in line.cells[1].text


def test_a_subgroup_of_one_hospital_cannot_be_told_from_the_hospital(tmp_path):
    line = table(run(tmp_path / "fedavg", ["old"] * 8 + ["young"] * 8, gap=0.4)).lines[0]
    assert line.cells[-1].text == "too few cases to tell"


def test_p_values_are_corrected_for_the_number_of_methods(tmp_path):
    paths = [run(tmp_path / name, ["HGG", "LGG"], gap) for name, gap in (("fedavg", 0.2), ("ditto", 0.0))]
    (tmp_path / "ditto" / "config.toml").write_text(
        (tmp_path / "ditto" / "config.toml").read_text().replace('name = "fedavg"', 'name = "local"', 1)
    )
    grid = table(*paths)
    first = grid.lines[0].cells
    assert len(grid.lines) == 2 and first[-1].value == pytest.approx(2 * first[-2].value)


def test_without_groups_there_is_no_table_and_no_section(tmp_path):
    write(tmp_path / "fedavg", {"north": {"n1": {"WT": 0.8}, "n2": {"WT": 0.7}}})
    methods = load(tmp_path / "fedavg")
    assert not [g for g in tables(compare(methods)) if g.name.startswith("subgroups")]
    assert "Results by subgroup" not in page.build("One", methods)


def test_the_page_has_a_section(tmp_path):
    made = page.build("One", load(run(tmp_path / "fedavg", ["HGG", "LGG"])))
    assert "Results by subgroup" in made and "Dice by subgroup" in made and "HD95 (mm) by subgroup" in made


def test_the_test_agrees_with_scipy_where_there_is_one_hospital():
    from scipy.stats import PermutationMethod, mannwhitneyu

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
