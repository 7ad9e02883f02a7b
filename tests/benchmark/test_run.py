"""Whole benchmarks: from one file to a comparison, interrupted and gone on with."""

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
    assert "How the hospitals differ" in (out / "comparison" / "index.html").read_text()
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
        (["scanners", "--scale", "tiny"], "the benchmark scanners has no tiny scale"),
        (["scanners", "--folds", "here"], "no folds were published for scanners"),
        (["paper_a_fets", "--scale", "small", "--only", "fedavq"], "paper_a_fets has no method 'fedavq'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(words, sentence, tmp_path):
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert sentence in str(done.exception) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title = 1\nmethod = {}", "unknown key 'method'"),
        ("title = 'x'", "has no .methods."),
        ("title =", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused(text, sentence, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        benchmark.load(str(tmp_path / "mine.toml"))


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
