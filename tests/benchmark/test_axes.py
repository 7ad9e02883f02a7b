"""Axes of a benchmark: federations and swept settings, what is refused before training, the way to the page."""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
from typer.testing import CliRunner

import tiny_bench
from polysite import benchmark, study
from polysite.benchmark import jobs as benchmark_jobs
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.data.federation import Dirichlet, Iid
from polysite.errors import ConfigError
from polysite.machine import Memory
from polysite.study import estimate

plan = import_module("polysite.benchmark.plan")  # the package has a function of this name
running = import_module("polysite.benchmark.run")

HEAD = """
title = "Axes"
about = "Cases dealt in three ways."
reference = "fedavg"
federations = [
    { title = "natural", name = "natural" },
    { name = "iid", sites = 2 },
    { title = "mixed / 2", federation = { name = "dirichlet", by = "site", alpha = 9, sites = 2, least = 6, draw = 1 }},
]
"""
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
        ("centralised", ("natural", "iid, sites = 2", "mixed / 2")),
        ("fedavg", ("natural",)),
        ("fedavg", ("iid, sites = 2",)),
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
    assert [j.federations for j in found] == [("natural", "iid, sites = 2"), ("mixed / 2",)]
    assert found[1].study.split.test == 0.4 and found[0].study.split.test == 0.2


def test_swept_values_are_combined_for_the_methods_that_have_the_key(write, tmp_path):
    bench = write(HEAD.split("federations")[0] + REST + SWEPT)
    found = {j.method: j.study for j in jobs(bench, tmp_path)}
    assert list(found) == [
        *(f"{m}, lr = {lr}" for m in ("centralised", "fedavg") for lr in ("0.1", "0.2")),
        *(f"prox, mu = {mu}, lr = {lr}" for mu in ("0", "1") for lr in ("0.1", "0.2")),
    ]
    assert found["prox, mu = 1, lr = 0.2"].algorithm.mu == 1 and found["prox, mu = 1, lr = 0.2"].train.lr == 0.2
    only = write(HEAD.split("federations")[0] + 'sweep_methods = ["prox"]\n' + REST + SWEPT)
    assert list(studies(only, {}))[:3] == ["centralised", "fedavg", "prox, mu = 0, lr = 0.1"]
    assert list(studies(only.only(["fedavg"]), {})) == ["fedavg"]
    with pytest.raises(ConfigError, match=r"--set train\.lr=0\.3, but tiny sweeps this key"):
        jobs(bench, tmp_path, **{"train.lr": "0.3"})


def test_an_assessment_is_of_the_federation_as_it_is_dealt(write, tmp_path):
    method = '\nomega.outlier = { distance = "emd", weight = 0.3 }\n'
    bench = write(HEAD + REST + method).only(["omega"])
    for job in jobs(replace(bench, federations=bench.federations[1:]), tmp_path):
        folder = tmp_path / "assess" / benchmark_jobs.file_name(job.federations[0]) / "fold0-seed0"
        stored = json.loads((folder / "assessment.json").read_text())
        train = {site for site, splits in study.deal_cases(job.study).items() if splits["train"]}
        assert set(stored["sites"]) == train and set(job.study.algorithm.weights) <= train
    assert set(stored["sites"]) == {"dirichlet-1", "dirichlet-2"}


def test_a_method_that_deals_the_cases_anew_has_an_assessment_of_its_own(write, tmp_path):
    method = '\nomega = { outlier = { distance = "emd", weight = 0.3 }, federation = { name = "iid", sites = 2 } }\n'
    bench = write(HEAD.split("federations")[0] + REST + method).only(["omega"])
    (job,) = jobs(bench, tmp_path)
    stored = json.loads((tmp_path / "assess" / "omega" / "fold0-seed0" / "assessment.json").read_text())
    assert set(stored["sites"]) == {"iid-1", "iid-2"} and set(job.study.algorithm.weights) <= {"iid-1", "iid-2"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD.replace('"mixed / 2"', '"natural"') + REST, "two federations are called 'natural'"),
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
        (HEAD + REST + '[published.settings]\nnaturel = "x"', "published.settings names the federation 'naturel'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_training(write, tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        jobs(write(text), tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


def test_a_step_that_exceeds_the_memory_is_refused(write, tmp_path, monkeypatch):
    bench = write(HEAD + REST).only(["fedavg"])
    listed = jobs(bench, tmp_path)
    benchmark_jobs.refuse_too_large(listed, tmp_path)
    step = estimate.step_bytes(listed[0].study, study.build_module(listed[0].study))
    monkeypatch.setattr(benchmark_jobs, "device_memory", lambda chosen: ("this machine", Memory(step.total - 1, 0)))
    sentence = "fedavg, natural, fold 0, seed 0: a training step with . patches of 16 x 16 x 16 takes at least"
    with pytest.raises(ConfigError, match=sentence):
        benchmark_jobs.refuse_too_large(listed, tmp_path)
    benchmark_jobs.refuse_too_large(listed, tmp_path, elsewhere=True)
    monkeypatch.setattr(benchmark_jobs, "free_disk", lambda path: 3 * 5 * step.model - 1)  # five models of each run
    with pytest.raises(ConfigError, match="the models of 3 runs take at least"):
        benchmark_jobs.refuse_too_large(listed, tmp_path, elsewhere=True)
    monkeypatch.setattr(benchmark_jobs, "free_disk", lambda path: 3 * 5 * step.model)
    benchmark_jobs.refuse_too_large(listed, tmp_path, elsewhere=True)


def test_a_plan_counts_federations_and_swept_values(write, monkeypatch):
    monkeypatch.setattr(plan, "measure", lambda *_: plan.Pace(3600.0, 0.0, "cpu", "Given."))
    swept = SWEPT.partition('"train.lr"')[0]
    grid = plan.plan(write(HEAD + "seeds = [0, 1]\n" + REST + swept), {})
    runs = {line.cells[0].text: line.cells[1].value for line in grid.lines}
    assert runs == {"centralised": 2, "fedavg": 6, "prox, mu = 0": 6, "prox, mu = 1": 6, "all": 20}
    assert "3 federations x 2 seeds and folds" in grid.note


APART = """
title = "Folds"
federations = [
    { title = "first", name = "natural", study = { split = { folds = 4, fold = 0 } } },
    { title = "second", name = "natural", study = { split = { folds = 4, fold = 1 } } },
]
"""
ALONE = REST.replace("centralised.run.pooled = true\n", "")


def _stop(*_):
    raise InterruptedError


def test_the_cases_that_federations_share_are_counted_before_training(write, tmp_path, monkeypatch, caplog):
    """Every hospital has 7 cases; the federations deal all of them out, and test other ones without ``keep``."""
    bench = write(HEAD + ALONE.replace("keep = true", "test = 0.5"))
    tested = [{c.source for x in study.deal_cases(j.study).values() for c in x["test"]} for j in jobs(bench, tmp_path)]
    shared, sizes = len(set.intersection(*tested)), sorted(map(len, tested))
    assert 0 < shared < sizes[0] < sizes[-1]
    monkeypatch.setattr(running, "refuse_too_large", _stop)
    with pytest.raises(InterruptedError):
        benchmark.run(bench, tmp_path / "out")
    assert f"all 3 federations share {shared} test cases, and each has {sizes[0]} to {sizes[-1]}." in caplog.text
    assert benchmark_jobs.check(jobs(write(HEAD + ALONE), tmp_path / "out")) == ()
    pooled = write(HEAD + REST.replace("keep = true", "test = 0.5"))
    assert benchmark_jobs.check(jobs(pooled, tmp_path / "out")) == ()


def test_federations_without_a_shared_case_have_no_figure_of_distances(write, tmp_path):
    (remark,) = benchmark_jobs.check(jobs(write(APART + ALONE), tmp_path / "out"))
    assert "share 0 test cases" in remark
    with pytest.raises(ConfigError, match="'distance' compares the scores of 2 federations, but no case is tested"):
        benchmark.run(write(APART + ALONE + '[compare]\nfigures = ["distance"]\n'), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_from_one_file_to_the_page_over_all_federations(write, tmp_path):
    write(HEAD + REST)
    words = ["bench", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "Does distance predict loss?" in done.output and "iid, sites = 2" in done.output
    out = tmp_path / "out"
    assert len(list((out / "runs").rglob("result.json"))) == 4  # one of them pooled
    page = (out / "comparison" / "index.html").read_text()
    assert "../federations/mixed%20%252F%202/index.html" in page
    assert (out / "federations" / "mixed %2F 2" / "index.html").is_file()
    assert "centralised" in (out / "federations" / "mixed %2F 2" / "overview.csv").read_text()
    table = (out / "comparison" / "distance.csv").read_text().splitlines()
    assert table[0].startswith("federation,sites,EMD_maxI,EMD_maxL,EMD,Dice fedavg,loss fedavg") and len(table) == 4
    again = CliRunner().invoke(app, [*words, "--set", "run.rounds=2"])
    assert "was begun with other settings (set)" in str(again.exception)
