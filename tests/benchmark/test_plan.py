"""Before a start: runs and hours from published sizes; rounds for equal steps or bytes of every method."""

from dataclasses import replace
from importlib import import_module

import pytest
import tomli_w
from typer.testing import CliRunner

import tiny_bench
from polysite import benchmark, config, study
from polysite.algorithms.cfft import Cfft
from polysite.benchmark import jobs
from polysite.benchmark.budget import equalise, lengthen
from polysite.benchmark.jobs import studies
from polysite.cli import app
from polysite.costs.budget import spent
from polysite.costs.model import total
from polysite.errors import ConfigError

plan, pace = (import_module(f"polysite.benchmark.{name}") for name in ("plan", "pace"))  # functions have these names
TINY = ["--set", "model.name=unet_small", "--set", "model.filters=[2, 4, 4]", "--set", "train.patch=[16, 16, 16]"]


def test_without_data_a_benchmark_prints_its_plan_and_says_what_to_name():
    words = ["bench", "paper_b", "--only", "fedavg", "--only", "local fine-tuning", "--set", "train.device=cpu", *TINY]
    planned = CliRunner().invoke(app, [*words, "--plan"], env={"COLUMNS": "200"})
    assert planned.exit_code == 0 and "Plan of paper_b" in planned.output and "after fedavg" in planned.output
    assert "CPU hours" in planned.output and "23 sites, 1251 cases" in " ".join(planned.output.split())
    refused = CliRunner().invoke(app, words)
    assert "Plan of paper_b" in refused.output and "name them with --data" in str(refused.exception)
    assert "partitioning_1.csv" in str(refused.exception) and refused.exit_code


def test_a_plan_counts_what_table_2_counts():
    every = studies(plan._counted(benchmark.load("paper_b")), {})
    chosen = {n: every[n] for n in ("fedavg", "fedavg, fixed iterations")}
    found = {n: plan._Work.of(s) for n, s in chosen.items()}
    assert found["fedavg"].rounds == 300 and found["fedavg, fixed iterations"].rounds == 720
    assert found["fedavg, fixed iterations"].steps == 165600  # Table 2
    assert found["fedavg"].steps == pytest.approx(59400, rel=0.07)  # every site rounds up its last batch
    tuned = plan._Work.of(every["local fine-tuning"])
    left = tuned.after(found["fedavg"])
    assert left.rounds == 30 and left.steps == 6 * 30 * found["fedavg"].steps // 300  # six rates


def test_rounds_that_are_not_validated_are_not_counted_as_validated():
    chosen = studies(benchmark.load("phantoms"), {"run.rounds": "20", "run.validate_every": "5"})["fedavg"]
    cases = sum(len(splits["validation"]) for splits in study.deal_cases(chosen).values())
    assert plan._Work.of(chosen).cases == 4 * cases == total(study.loads(chosen)).cases


def test_seconds_on_a_cpu_are_scaled_by_voxels_batch_and_windows(monkeypatch):
    monkeypatch.setattr(pace, "_timed", lambda call, network: 1.0)
    given = {"train.device": "cpu", "model.name": "unet_small", "model.filters": "[2, 4, 4]"}
    found = pace.measure(studies(plan._counted(benchmark.load("paper_b")), given)["fedavg"])
    assert (found.step, found.case) == (8 * 4, 8 * 8)  # 128 against 64 voxels a side; four patches; eight windows
    given = {"train.device": "cpu", "data.shape": "[32, 48, 32]", "train.patch": "[16, 16, 16]", "train.overlap": "0"}
    assert pace.measure(studies(benchmark.load("phantoms"), given)["fedavg"]).case == 2 * 3 * 2


BASE = tiny_bench.study(
    sites={"east": {"cases": 8}, "west": {"cases": 12}},
    train={"batch": 2, "gamma": 0.9},
    run={"rounds": 20, "validate_every": 4},
)
METHODS = {
    "fedavg": {},
    "local": {"algorithm": "local"},
    "ditto": {"algorithm": "ditto"},
    "l2gd": {"algorithm": "l2gd"},
    "pfedme": {"algorithm": {"name": "pfedme", "outer": 4, "inner": 5}},
    "feddiv": {"algorithm": "feddiv", "model": {"name": "unet_small_sub", "filters": [2, 4, 4]}},
    "ifca": {"algorithm": {"name": "ifca", "k": 2}},
}
CFFT = {"algorithm": {"name": "cfft", "components": 2, "dimensions": 2, "rounds": 4}, "run": {"rounds": 90}}


def several(*names):
    return {n: config.build(config.merge(BASE, METHODS[n])) for n in ("fedavg", *names)}


@pytest.fixture(scope="module", params=["steps", "bytes"])
def equal(request):
    return request.param, equalise(several(*list(METHODS)[1:]), "fedavg", request.param)


def test_every_method_costs_as_much_as_whole_rounds_allow(equal):
    kind, found = equal
    budget = spent(study.loads(found["fedavg"]), kind)
    assert found["fedavg"] == several()["fedavg"]
    for name, each in found.items():
        assert each.train.gamma**each.run.rounds == pytest.approx(0.9**20)  # rates decay over the same part of the run
        assert abs(each.run.rounds / each.run.validate_every - 5) <= 2
        if (name, kind) == ("local", "bytes"):
            assert each == several("local")["local"]  # it sends nothing, so its rounds stay
            continue
        near = [lengthen(each, max(1, each.run.rounds + n) / each.run.rounds) for n in (-1, 0, 1)]
        off = [abs(spent(study.loads(one), kind) - budget) for one in near]
        assert off[1] == min(off), name
    rounds = {n: s.run.rounds for n, s in found.items()}
    if kind == "steps":  # 7 steps a round at the two sites; pFedMe takes 40
        own = rounds.pop("l2gd")
        assert rounds == {"fedavg": 20, "local": 20, "ditto": 10, "pfedme": 3, "feddiv": 20, "ifca": 20}
        assert 3 <= own <= 9  # ten steps a round on average, drawn by its coin
    else:
        assert rounds["ditto"] == rounds["pfedme"] == rounds["l2gd"] == 20
        assert rounds["feddiv"] in (38, 39, 40) and rounds["ifca"] in (13, 14)  # its models go down to be scored, too


def test_phases_become_longer_together():
    tuned = {"algorithm": {"name": "fine_tune", "lr": [0.1]}, "run": {"rounds": 10, "best_from": 1}}
    then = [tuned, config.merge(CFFT, {"run": {"best_from": 0}})]
    long = config.build({**BASE, "run": {"rounds": 20, "best_from": 10}, "then": then})
    first, tuned, clustered = config.phases(lengthen(long, 1.5))
    assert [p.run.rounds for p in (first, tuned, clustered)] == [30, 15, 92]  # cfft: two more rounds of tuning
    assert clustered.algorithm.rounds == 6 and clustered.train.gamma == pytest.approx(0.9 ** (4 / 6))
    assert (first.run.best_from, tuned.run.best_from, clustered.run.best_from) == (15, 1, 0)
    assert lengthen(long, 1.0) == replace(long, then=lengthen(long, 1.0).then)
    short = lengthen(config.build({**BASE, "then": [{"algorithm": "cfft", "run": {"rounds": 200}}]}), 0.5)
    assert short.then[0].algorithm == Cfft(rounds=25) and short.then[0].run.rounds == 175
    alone = config.build(config.merge(BASE, CFFT))
    longer = lengthen(alone, 2)
    assert longer.algorithm == replace(alone.algorithm, rounds=8) and longer.run.rounds == 94
    shares = lengthen(several("ifca")["ifca"], 2)
    assert shares.algorithm.warmup == 0.1 and config.phases(shares)[0].algorithm.warmup == 4  # still a share


def test_a_reference_that_is_left_out_or_sends_nothing_is_refused():
    with pytest.raises(ConfigError, match="--only 'scaffold'"):
        equalise(several(), "scaffold", "steps")
    with pytest.raises(ConfigError, match="'local' sends nothing"):
        equalise(several("local"), "local", "bytes")
    assert equalise(several("ditto"), "scaffold", "rounds") == several("ditto")


def test_a_benchmark_names_its_budget_in_its_file_or_on_the_command_line(tmp_path):
    """Seven steps a round; an algorithm with rounds of its own has the budget in its first phase, too."""
    head = f'{tiny_bench.HEAD}seeds = [0, 1]\nbudget = "steps"\n'
    methods = 'fedavg = {}\nditto.algorithm = "ditto"\n' + tomli_w.dumps({"cfft": CFFT})
    bench = tiny_bench.load(
        tmp_path, tiny_bench.text(methods.replace("[cfft", "[methods.cfft"), head, run={"rounds": 6})
    )
    found = {(j.method, j.seed): j.study for j in jobs.jobs(bench, tmp_path / "out", {})}
    for seed in (0, 1):
        assert found["fedavg", seed].run.rounds == 6 and found["ditto", seed].run.rounds == 3
        steps = [spent(study.loads(found[name, seed]), "steps") for name in ("fedavg", "cfft")]
        assert steps[0] == steps[1] and found["cfft", seed].algorithm.rounds < 6
    same = jobs.jobs(bench.at_equal("rounds").only(["fedavg", "ditto"]), tmp_path / "out", {})
    assert {j.study.run.rounds for j in same} == {6}
    assert 'budget = "steps"' in jobs.settings(tmp_path / "out", bench, {})
    wrong = CliRunner().invoke(app, ["bench", str(tmp_path / "tiny.toml"), "--budget", "time"])
    assert "rounds, steps or bytes" in str(wrong.exception)
