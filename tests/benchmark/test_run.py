"""Whole benchmarks: from one file to a comparison, interrupted and gone on with; equal tuning."""

import json
from shutil import rmtree

import pytest
from typer.testing import CliRunner

import tiny_bench
from polysite import benchmark, config, study
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.weighted import Weighted
from polysite.benchmark import jobs as benchmark_jobs
from polysite.cli import app
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import ConfigError, RunError

METHODS = """
fedavg = {}
fedprox.algorithm = "fedprox"
"omega".outlier = { distance = "emd", weight = 0.3 }
"groups".clusters = "emd"
"far away" = { train = { device = "cuda:7" } }
"krum".algorithm = { name = "krum", f = 1 }
"""
HEAD = f"{tiny_bench.HEAD}seeds = [0, 1]\n"
TINY = tiny_bench.text(METHODS, HEAD, assess={"projections": 0}, train={"augment": "light"}, run={"rounds": 2})


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def jobs(bench, out):
    return list(benchmark_jobs.jobs(bench, out, {}))


def test_every_shipped_benchmark_is_a_list_of_studies_that_can_be_read():
    for name in benchmark.names():
        for scale in benchmark.load(name).scales:
            bench = benchmark.load(name, scale)
            files = {"data.path": "here"} if bench.study.get("data", {}).get("name") == "files" else {}
            for each in benchmark_jobs.studies(bench, files).values():
                assert config.parse(config.dump(each)) == each
            assert bench.title and bench.about
            assert bench.radiomics or bench.sweep or bench.reference in bench.methods


def test_an_assessment_names_whom_to_count_less_and_whom_to_train_together(tiny, tmp_path):
    found = {(j.method, j.seed): j.study for j in jobs(benchmark.load(str(tiny)), tmp_path / "out")}
    assert len(found) == 12
    for seed in (0, 1):
        weighted, grouped = found["omega", seed].algorithm, found["groups", seed].algorithm
        assessment = json.loads((tmp_path / "out" / "assess" / f"fold0-seed{seed}" / "assessment.json").read_text())
        assert isinstance(weighted, Weighted) and weighted.weights == {assessment["distances"]["emd"]["outlier"]: 0.3}
        assert isinstance(grouped, Clustered)
        assert sorted(s for g in grouped.groups.values() for s in g) == ["east", "north", "west"]
        assert found["fedavg", seed].seed == seed and found["fedavg", seed].split.seed == 0


@pytest.mark.slow
def test_a_benchmark_runs_fails_in_part_and_goes_on(tiny, tmp_path):
    out = tmp_path / "out"

    def bench(*more):
        chosen = (word for name in more for word in (("--only", name) if not name.startswith("-") else (name,)))
        return CliRunner().invoke(app, ["bench", str(tiny), "--out", str(out), "--jobs", "1", *chosen])

    early = bench("fedavg", "krum")  # it wants more sites: nothing is trained
    assert "krum, fold 0, seed 0: krum tolerates" in str(early.exception) and not out.exists()
    first = bench("fedavg", "far away")
    assert first.exit_code == 1 and "far away, fold 0, seed 1 failed: train.device = 'cuda:7'" in first.stderr
    assert "fedavg" in (out / "comparison" / "overview.csv").read_text()
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("result.json")}
    assert len(stamps) == 2
    half = out / "runs" / "fedavg" / "fold0-seed1"  # as if it had been killed
    before = (half / "result.json").read_text()
    (half / "result.json").unlink()
    rmtree(half / "evaluation")
    second = bench("fedavg", "groups")
    assert second.exit_code == 0, second.stderr
    assert "Against fedavg: Dice" in second.stdout and (half / "result.json").read_text() == before
    whole = out / "runs" / "fedavg" / "fold0-seed0" / "result.json"
    assert whole.stat().st_mtime_ns == stamps[whole] and len(list(out.rglob("result.json"))) == 4
    other = bench("fedavg", "--set=train.lr=0.3")
    assert "was begun with other settings (set)" in str(other.exception)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["paper_z"], "there is no benchmark called 'paper_z'"),
        (["paper_c_cc359"], "at full scale is for real scans"),
        (["hospitals", "--scale", "small"], "has no small scale"),
        (["paper_a_fets", "--scale", "large"], "--scale large: full or small or tiny"),
        (["scanners", "--folds", "here"], "no folds were published for scanners"),
        (["paper_a_fets", "--scale", "small", "--only", "fedavq"], "paper_a_fets has no method 'fedavq'"),
        (["title = 1\nmethod = {}"], "unknown key 'method'"),
        (["title = 'x'"], "has no [methods]"),
        (["[small]\nrounds = 3\n[methods.fedavg]"], "unknown key 'rounds'"),  # at whatever scale
        (["[study]\ndata = 3\n[methods.fedavg]"], "mine: study.data = 3 must be a section"),
        (["title ="], "not valid TOML"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(words, sentence, tmp_path):
    if "=" in words[0]:  # the text of a file
        (tmp_path / "mine.toml").write_text(words[0])
        words = [str(tmp_path / "mine.toml")]
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert sentence in str(done.exception) and not (tmp_path / "out").exists()


def test_runs_of_another_configuration_are_not_taken_for_these(tiny, tmp_path):
    bench, out = benchmark.load(str(tiny)).only(["fedavg"]), tmp_path / "out"
    (job, _) = jobs(bench, out)
    job.run.mkdir(parents=True)
    (job.run / "versions.json").write_text("{}")
    (job.run / "config.toml").write_text(config.dump(config.vary(job.study, {"train": {"lr": 0.3}})))
    with pytest.raises(RunError, match="was trained with another configuration"):
        benchmark_jobs.fits(job, study.deal_cases(job.study))


def test_methods_that_test_different_cases_are_refused_before_training(tiny, tmp_path):
    methods = '[methods]\nfedavg = {}\nother.federation = { name = "dirichlet", sites = 2 }\n'
    tiny.write_text(tiny.read_text().split("[methods]")[0] + methods)
    with pytest.raises(ConfigError, match="other and fedavg test different cases in fold 0, so they cannot be"):
        benchmark.run(benchmark.load(str(tiny)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


TUNING = """
title = "Tuned"
reference = "fedavg"

[tuning]
share = 0.5
settings = { "train.lr" = [1e-9, 0.05] }

"""
TRIED = """
[methods.fedavg]
[methods.fedprox]
algorithm = "fedprox"
tuning = { "algorithm.mu" = [0.1, 1.0] }
[[methods."fine-tuned".then]]
algorithm = { name = "fine_tune", lr = [0.01] }
run = { rounds = 1, validate_every = 1 }
"""
TUNED = tiny_bench.text(
    TRIED,
    TUNING,
    sites={"east": {"cases": 4}, "west": {"cases": 4, "scanner": 9}},
    train={"optimiser": "adam", "lr": 0.02, "batch": 4},
    run={"rounds": 2, "validate_every": 1},
)


@pytest.fixture
def tuned(tmp_path):
    return tiny_bench.load(tmp_path, TUNED)


@pytest.mark.slow
def test_the_best_trial_goes_on_and_a_second_call_trains_nothing(tuned, tmp_path, in_process):
    out, told = tmp_path / "out", []
    results = benchmark.run(tuned, out, parallel=1, step=lambda note, *_, **__: told.append(note))
    assert not results.failed
    run = RunFolder(out / "runs" / "fedavg" / "fold0-seed0")
    assert config.parse(run.config).train.lr == 0.05 and [r.round for r in run.records()] == [0, 1]
    scores = json.loads((out / "tuning" / "scores" / "fedavg" / "fold0-seed0.json").read_text())
    assert scores["settings"] == [{"train.lr": 1e-9}, {"train.lr": 0.05}] and scores["scores"][1] > scores["scores"][0]
    lost = RunFolder(out / "tuning" / "runs" / file_name("fedavg, lr 1e-09") / "fold0-seed0")
    assert [r.round for r in lost.records()] == [0] and not (lost.path / "evaluation").exists()
    after = config.parse(RunFolder(out / "runs" / "fine-tuned" / "fold0-seed0").config)
    assert after.train.lr == 0.05, "a method that goes on from fedavg takes over its choice"
    assert config.parse(RunFolder(out / "runs" / "fedprox" / "fold0-seed0").config).train.lr == 0.02
    assert "fedavg: lr 0.05 (1 times)" in " ".join(results.remarks)
    assert tuned.tuning.effort == 1.5 and "tuning" not in tuned.untuned().methods["fedprox"]

    before = {path: path.stat().st_mtime_ns for path in out.rglob("rounds.jsonl")}
    again = benchmark.run(tuned, out, parallel=1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("rounds.jsonl")} == before
    assert [m.name for m in again.cells[""]] == ["fedavg", "fedprox", "fine-tuned"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("share = 0.5", "share = 1.0", "between 0 and 1"),
        ("[0.1, 1.0]", "[0.1]", "has 1 settings, but other methods try 2"),
        ("[0.1, 1.0]", "0.1", "write a list of values"),
        ("[tuning]", "[sweep]\n'train.lr' = [1, 2]\n[tuning]", "leave out one of them"),
    ],
)
def test_unequal_tuning_is_refused(old, new, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        tiny_bench.load(tmp_path, TUNED.replace(old, new))


def test_ensembles_of_a_former_version_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="this key no longer exists; leave it out; 'polysite train --trainings'"):
        tiny_bench.load(tmp_path, f"{TUNED}\n[ensembles]\nfolds = {{ of = 'fedavg', folds = 2 }}")
