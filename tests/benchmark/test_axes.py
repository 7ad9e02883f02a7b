"""Axes of a benchmark: federations and swept settings, what is refused before training, the way to the page."""

import json
from dataclasses import replace
from functools import partial

import pytest

import tiny_bench
from polysite import benchmark, study
from polysite.benchmark import jobs as benchmark_jobs
from polysite.benchmark.jobs import studies
from polysite.data.federation import Dirichlet, Iid
from polysite.errors import ConfigError
from polysite.machine import Memory
from polysite.study import estimate

HEAD = """
title = "Axes"
about = "Cases dealt in three ways."
reference = "fedavg"
federations = [
    { title = "natural", name = "natural" },
    { title = "halves", name = "iid", sites = 2 },
    { title = "mixed / 2", federation = { name = "dirichlet", by = "site", alpha = 9, sites = 2, least = 6, draw = 1 }},
]
"""
ONE = HEAD.split("federations")[0]  # a single federation
REST = tiny_bench.text(
    "centralised.run.pooled = true\nfedavg = {}\n",
    "",
    sites={"east": {"cases": 7}, "north": {"cases": 7, "scanner": 2}, "west": {"cases": 7, "scanner": 9}},
    assess={"projections": 0, "permutations": 99, "resamples": 100, "fewest": 2},
    split={"keep": True},
)
SWEPT = '\n[methods.prox]\nalgorithm = "fedprox"\n\n[sweep]\n"algorithm.mu" = [0, 1]\n"train.lr" = [0.1, 0.2]\n'


@pytest.fixture
def write(tmp_path):
    return partial(tiny_bench.load, tmp_path)


def jobs(bench, out, **overrides):
    return benchmark_jobs.jobs(bench, out, overrides)


def test_every_method_runs_in_every_federation_and_pooled_training_once(write, tmp_path):
    found = jobs(write(HEAD + REST), tmp_path / "out")
    assert [(j.method, j.federations) for j in found] == [
        ("centralised", ("natural", "halves", "mixed / 2")),
        ("fedavg", ("natural",)),
        ("fedavg", ("halves",)),
        ("fedavg", ("mixed / 2",)),
    ]
    assert found[2].study.federation == Iid(2) and isinstance(found[3].study.federation, Dirichlet)
    assert found[3].run == tmp_path / "out" / "runs" / "fedavg" / "mixed %2F 2" / "fold0-seed0"
    assert found[3].title == "fedavg, mixed / 2, fold 0, seed 0"
    tested = [{c.source for splits in study.deal_cases(j.study).values() for c in splits["test"]} for j in found]
    assert tested[0] == tested[1] == tested[2] == tested[3] != set()


def test_pooled_training_runs_again_where_the_cases_differ(write, tmp_path):
    other = HEAD.replace('"mixed / 2", ', '"mixed / 2", study = { split = { test = 0.4 } }, ')
    found = [j for j in jobs(write(other + REST), tmp_path) if j.method == "centralised"]
    assert [j.federations for j in found] == [("natural", "halves"), ("mixed / 2",)]
    assert found[1].study.split.test == 0.4 and found[0].study.split.test == 0.2


def test_swept_values_are_combined_for_the_methods_that_have_the_key(write, tmp_path):
    bench = write(ONE + REST + SWEPT)
    found = {j.method: j.study for j in jobs(bench, tmp_path)}
    assert list(found) == [
        *(f"{m}, lr = {lr}" for m in ("centralised", "fedavg") for lr in ("0.1", "0.2")),
        *(f"prox, mu = {mu}, lr = {lr}" for mu in ("0", "1") for lr in ("0.1", "0.2")),
    ]
    assert found["prox, mu = 1, lr = 0.2"].algorithm.mu == 1 and found["prox, mu = 1, lr = 0.2"].train.lr == 0.2
    only = write(ONE + 'sweep_methods = ["prox"]\n' + REST + SWEPT)
    assert list(studies(only, {}))[:3] == ["centralised", "fedavg", "prox, mu = 0, lr = 0.1"]
    assert list(studies(only.only(["fedavg"]), {})) == ["fedavg"]
    with pytest.raises(ConfigError, match=r"--set train\.lr=0\.3, but tiny sweeps this key"):
        jobs(bench, tmp_path, **{"train.lr": "0.3"})


def test_an_assessment_is_of_the_federation_as_it_is_dealt(write, tmp_path):
    omega = 'outlier = { distance = "emd", weight = 0.3 }'
    bench = write(f"{HEAD}{REST}\nomega = {{ {omega} }}\n").only(["omega"])
    for job in jobs(replace(bench, federations=bench.federations[1:]), tmp_path):
        folder = tmp_path / "assess" / benchmark_jobs.file_name(job.federations[0]) / "fold0-seed0"
        stored = json.loads((folder / "assessment.json").read_text())
        train = {site for site, splits in study.deal_cases(job.study).items() if splits["train"]}
        assert set(stored["sites"]) == train and set(job.study.algorithm.weights) <= train
    assert set(stored["sites"]) == {"dirichlet-1", "dirichlet-2"}
    own = 'federation = { name = "iid", sites = 2 }'  # a method that deals the cases anew has an assessment of its own
    bench = write(f"{ONE}{REST}\nomega = {{ {omega}, {own} }}\n").only(["omega"])
    (job,) = jobs(bench, tmp_path)
    stored = json.loads((tmp_path / "assess" / "omega" / "fold0-seed0" / "assessment.json").read_text())
    assert set(stored["sites"]) == {"iid-1", "iid-2"} and set(job.study.algorithm.weights) <= {"iid-1", "iid-2"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD.replace('"mixed / 2"', '"natural"') + REST, "two federations are called 'natural'"),
        (HEAD.replace('title = "halves", ', "") + REST, "an entry is a table with a title"),
        (HEAD.replace("federation = {", "federatino = {") + REST, "unknown key 'federation.federatino'"),
        (HEAD + REST + '\nother.federation = "iid"\n', "the method 'other' of tiny has a federation"),
        (HEAD + REST + SWEPT.replace("algorithm.mu", "split.test"), "would change the cases that are compared"),
        (HEAD + REST + SWEPT.replace("algorithm.mu", "algorithm.muu"), "this key; in 'algorithm', did you mean 'mu'"),
        (HEAD + REST + SWEPT.replace("algorithm.mu", "trian.lr"), "there is no section 'trian'; did you mean 'train'"),
        (HEAD + REST + "fedprox = {}", "'fedprox' of tiny sets no algorithm and would train fedavg"),
        (HEAD + REST + SWEPT.replace("[0, 1]", "[1]"), "needs a list of at least two values"),
        (HEAD + REST + SWEPT.replace("[0, 1]", "[1, 1.0]"), "names a value twice"),
        (HEAD + 'sweep_methods = ["prix"]\n' + REST + SWEPT, "sweep_methods names 'prix'; did you mean 'prox'"),
        (HEAD.replace('= "fedavg"', '= "fedavq"') + REST, "the reference 'fedavq' of tiny is no method"),
        (HEAD + REST + '[compare]\nfigures = ["distances"]', "there is no figure 'distances'; did you mean 'distance'"),
        (
            HEAD + REST + '[published]\ntables = ["A_table1"]\nsettings = { naturel = "FeTS WT" }',
            "published.settings names the federation 'naturel'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_training(write, tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        jobs(write(text), tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


def test_a_step_that_exceeds_the_memory_and_models_that_exceed_the_disk_are_refused(write, tmp_path, monkeypatch):
    listed = jobs(write(HEAD + REST).only(["fedavg"]), tmp_path)
    step = estimate.step_bytes(listed[0].study, study.build_module(listed[0].study))
    stored = 3 * 5 * step.model  # five models of each run
    monkeypatch.setattr(benchmark_jobs, "free_disk", lambda path: stored)
    benchmark_jobs.refuse_too_large(listed, tmp_path)
    monkeypatch.setattr(benchmark_jobs, "free_disk", lambda path: stored - 1)
    with pytest.raises(ConfigError, match="the models of 3 runs take at least"):
        benchmark_jobs.refuse_too_large(listed, tmp_path)
    monkeypatch.setattr(benchmark_jobs, "device_memory", lambda chosen: ("this machine", Memory(step.total - 1, 0)))
    sentence = "fedavg, natural, fold 0, seed 0: a training step with . patches of 16 x 16 x 16 takes at least"
    with pytest.raises(ConfigError, match=sentence):
        benchmark_jobs.refuse_too_large(listed, tmp_path)


APART = """
title = "Folds"
federations = [
    { title = "first", name = "natural", study = { split = { folds = 4, fold = 0 } } },
    { title = "second", name = "natural", study = { split = { folds = 4, fold = 1 } } },
]
"""
ALONE = REST.replace("centralised.run.pooled = true\n", "")


def test_the_cases_that_federations_share_are_counted_before_training(write, tmp_path):
    """Every hospital has 7 cases; the federations deal all of them out, and test other ones without ``keep``."""
    dealt = jobs(write(HEAD + ALONE.replace("keep = true", "test = 0.5")), tmp_path)
    tested = [{c.source for x in study.deal_cases(j.study).values() for c in x["test"]} for j in dealt]
    shared, sizes = len(set.intersection(*tested)), sorted(map(len, tested))
    assert 0 < shared < sizes[0] < sizes[-1]
    (remark,) = benchmark_jobs.check(dealt)
    assert f"all 3 federations share {shared} test cases, and each has {sizes[0]} to {sizes[-1]}." in remark
    for same in (HEAD + ALONE, HEAD + REST.replace("keep = true", "test = 0.5")):  # or pooled training tests all
        assert benchmark_jobs.check(jobs(write(same), tmp_path / "out")) == ()
    with pytest.raises(ConfigError, match="'distance' compares the scores of 2 federations, but no case is tested"):
        benchmark.run(write(APART + ALONE + '[compare]\nfigures = ["distance"]\n'), tmp_path / "out")
    assert not (tmp_path / "out").exists()
