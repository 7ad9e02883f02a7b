"""Ensembles in a benchmark: compared like methods, made of its runs, refused with a reason."""

import pytest
import tomli_w

import tiny_bench
from polysite import benchmark
from polysite.benchmark.mixed import EnsembleOf
from polysite.errors import ConfigError

CASES = {"cases": 5}
TINY = {
    "title": "mixed",
    "reference": "fedavg",
    "study": tiny_bench.study(sites={"a": CASES, "b": CASES}),
    "methods": {"fedavg": {}},
    "ensembles": {"folds": {"of": "fedavg", "folds": 2}},
}


def load(tmp_path, **changes):
    return tiny_bench.load(tmp_path, tomli_w.dumps({**TINY, **changes}))


def test_an_ensemble_of_inner_folds_is_compared_like_a_method(tmp_path, in_process):
    bench = load(tmp_path)
    done = benchmark.run(bench, tmp_path / "out")
    assert not done.failed and [m.name for m in done.cells[""]] == ["fedavg", "folds"]
    fedavg, folds = done.cells[""]
    assert folds.values("dice").keys() == fedavg.values("dice").keys()
    assert sorted(p.name for p in (tmp_path / "out" / "runs").iterdir() if p.is_dir()) == [
        "fedavg", "folds", "folds inner fold 0", "folds inner fold 1"
    ]  # fmt: skip
    file = tmp_path / "out" / "bench.toml"
    text = file.read_text()
    file.write_text(text.replace("folds = 2", 'folds = 2\nweights = "equal"'))  # as polysite 0.1.0 wrote it
    again = benchmark.run(bench, tmp_path / "out")
    assert file.read_text() == text
    assert again.cells[""][1].values("dice") == folds.values("dice")


def test_ensembles_of_a_file(tmp_path):
    bench = load(tmp_path)
    assert bench.whole.methods.keys() == {"fedavg", "folds inner fold 0", "folds inner fold 1"}
    assert bench.members["folds inner fold 1"] == {"split": {"inner": 2, "inner_fold": 1}}
    alone = bench.only(["folds"])
    assert not alone.methods and len(alone.whole.methods) == 2
    assert not bench.only(["fedavg"]).ensembles and not bench.only(["fedavg"]).members
    both = load(
        tmp_path, methods={"fedavg": {}, "local": {"algorithm": "local"}}, ensembles={"x": {"of": ["fedavg", "local"]}}
    )
    assert both.only(["x"]).methods.keys() == {"fedavg", "local"} and not both.members
    for ensembles, words in (
        ({"x": {"of": "fedavx", "folds": 2}}, "of 'fedavx', which is no method"),
        ({"fedavg": {"of": "fedavg", "folds": 2}}, "a method and an ensemble called 'fedavg'"),
        ({"x": {"of": "fedavg"}}, "one method with two or more folds"),
        ({"x": {"of": "fedavg", "fold": 2}}, "unknown key"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path, ensembles=ensembles)
    assert EnsembleOf(("a", "b")).members("x") == ("a", "b")


def test_the_ablation_has_both_ingredients():
    bench = benchmark.load("ingredients")
    assert bench.ensembles["ensemble of folds"].folds == 3 and "cleaned masks" in bench.methods
    studies = benchmark.variants(bench.whole, {})
    assert len(studies) == len(bench.methods) + 3


def test_the_ablation_on_real_hospitals_has_the_study_of_their_benchmark():
    ours, theirs = benchmark.load("hospital_ingredients"), benchmark.load("hospitals")
    assert (ours.study, ours.folds) == (theirs.study, theirs.folds)
    assert benchmark.load("ingredients").methods.keys() < ours.methods.keys() and len(ours.ensembles) == 3
