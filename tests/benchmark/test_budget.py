"""Equal budgets: every method of a benchmark with the steps, or the bytes, of the reference."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import tiny_bench
from polysite import benchmark, config, study
from polysite.benchmark import jobs
from polysite.benchmark.budget import equalise, lengthen
from polysite.cli import app
from polysite.costs.budget import rounds_for, spent
from polysite.errors import ConfigError

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


def studies(*names):
    return {n: config.build(config.merge(BASE, METHODS[n])) for n in ("fedavg", *names)}


@pytest.fixture(scope="module", params=["steps", "bytes"])
def equal(request):
    return request.param, equalise(studies(*list(METHODS)[1:]), "fedavg", request.param)


def test_every_method_costs_as_much_as_whole_rounds_allow(equal):
    kind, found = equal
    budget = spent(study.loads(found["fedavg"]), kind)
    assert found["fedavg"] == studies()["fedavg"]
    for name, each in found.items():
        if (name, kind) == ("local", "bytes"):
            assert each == studies("local")["local"]  # it sends nothing, so its rounds stay
            continue
        off = [abs(spent(study.loads(_with(each, n)), kind) - budget) for n in (-1, 0, 1)]
        assert off[1] == min(off), name


def _with(chosen, more):
    rounds = max(1, chosen.run.rounds + more)
    return lengthen(chosen, rounds / chosen.run.rounds)


def test_rounds_follow_the_effort_of_a_round(equal):
    kind, found = equal
    rounds = {n: s.run.rounds for n, s in found.items()}
    if kind == "steps":  # 7 steps a round at the two sites; pFedMe takes 40
        own = rounds.pop("l2gd")
        assert rounds == {"fedavg": 20, "local": 20, "ditto": 10, "pfedme": 3, "feddiv": 20, "ifca": 20}
        assert 3 <= own <= 9  # ten steps a round on average, drawn by its coin
    else:
        assert rounds["ditto"] == rounds["pfedme"] == rounds["l2gd"] == 20
        assert rounds["feddiv"] in (38, 39, 40) and rounds["ifca"] in (14, 15)


def test_rates_decay_and_models_are_validated_over_the_same_part_of_the_run(equal):
    _, found = equal
    for each in found.values():
        assert each.train.gamma**each.run.rounds == pytest.approx(0.9**20)
        assert abs(each.run.rounds / each.run.validate_every - 5) <= 2


def test_phases_become_longer_together():
    long = config.build(
        {
            **BASE,
            "run": {"rounds": 20, "best_from": 10},
            "then": [
                {"algorithm": {"name": "fine_tune", "lr": [0.1]}, "run": {"rounds": 10, "best_from": 1}},
                config.merge(CFFT, {"run": {"best_from": 0}}),
            ],
        }
    )
    first, tuned, clustered = config.phases(lengthen(long, 1.5))
    assert [p.run.rounds for p in (first, tuned, clustered)] == [30, 15, 92]  # cfft: two more rounds of tuning
    assert clustered.algorithm.rounds == 6 and clustered.train.gamma == pytest.approx(0.9 ** (4 / 6))
    assert (first.run.best_from, tuned.run.best_from, clustered.run.best_from) == (15, 1, 0)
    assert lengthen(long, 1.0) == replace(long, then=lengthen(long, 1.0).then)
    short = lengthen(config.build({**BASE, "then": [{"algorithm": "cfft", "run": {"rounds": 200}}]}), 0.5)
    assert short.then[0]["algorithm"] == {"name": "cfft", "rounds": 25} and short.then[0]["run"]["rounds"] == 175
    alone = config.build(config.merge(BASE, CFFT))
    longer = lengthen(alone, 2)
    assert longer.algorithm == replace(alone.algorithm, rounds=8) and longer.run.rounds == 94
    shares = lengthen(studies("ifca")["ifca"], 2)
    assert shares.algorithm.warmup == 0.1 and config.phases(shares)[0].algorithm.warmup == 4  # still a share


def test_an_algorithm_with_its_own_rounds_gets_the_budget_in_the_first_phase_too(tmp_path):
    """Seven steps a round: 20 rounds of FedAvg, and as many rounds of tuning."""
    methods = {"fedavg": {}, "cfft": CFFT}
    bench = benchmark.Bench("b", "B", methods, BASE, seeds=(0, 1), budget="steps")
    found = {(j.method, j.seed): j.study for j in jobs.jobs(bench, tmp_path, {})}
    budget = spent(study.loads(found["fedavg", 0]), "steps")
    for seed in (0, 1):
        assert found["cfft", seed].algorithm.rounds == 20 and found["cfft", seed].run.rounds == 106
        assert spent(study.loads(found["cfft", seed]), "steps") == budget


@pytest.mark.parametrize(
    ("cost", "wanted"),
    [
        (lambda n: 7, 40),  # the same whatever the rounds
        (lambda n: 10**6, 40),
        (lambda n: 900 + n, 100),  # nearly all of it before the first round
        (lambda n: 100 * (n // 3), 30),
        (lambda n: 2000 + n, 1),
    ],
)
def test_rounds_of_a_budget_take_few_rehearsals(cost, wanted):
    asked = []
    found = rounds_for(1000, lambda n: (asked.append(n), cost(n))[1], rounds=40)
    assert found == wanted and len(asked) <= 10 and max(asked) <= 101


def test_a_reference_that_is_left_out_or_sends_nothing_is_refused():
    with pytest.raises(ConfigError, match="--only 'scaffold'"):
        equalise(studies(), "scaffold", "steps")
    with pytest.raises(ConfigError, match="'local' sends nothing"):
        equalise(studies("local"), "local", "bytes")
    assert equalise(studies("ditto"), "scaffold", "rounds") == studies("ditto")


def test_a_benchmark_names_its_budget_in_its_file_or_on_the_command_line(tmp_path):
    head = f'{tiny_bench.HEAD}seeds = [0, 1]\nbudget = "steps"\n'
    text = tiny_bench.text('fedavg = {}\nditto.algorithm = "ditto"\n', head, run={"rounds": 6})
    bench = tiny_bench.load(tmp_path, text)
    rounds = {(j.method, j.seed): j.study.run.rounds for j in jobs.jobs(bench, tmp_path / "out", {})}
    assert rounds == {("fedavg", 0): 6, ("fedavg", 1): 6, ("ditto", 0): 3, ("ditto", 1): 3}
    same = {(j.method, j.seed): j.study.run.rounds for j in jobs.jobs(bench.at_equal("rounds"), tmp_path / "out", {})}
    assert set(same.values()) == {6}
    assert 'budget = "steps"' in jobs.settings(tmp_path / "out", bench, {})
    wrong = CliRunner().invoke(app, ["bench", str(tmp_path / "tiny.toml"), "--budget", "time"])
    assert "rounds, steps or bytes" in str(wrong.exception)
