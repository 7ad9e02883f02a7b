"""The best round of every site, or cluster of sites: against answers on paper, and after any interruption."""

from dataclasses import replace

import numpy as np
import pytest

import table
from polysite.algorithms.cfl import Cfl
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.algorithms.weighted import Weighted
from polysite.engines.own_best import STRANGER, Own, improved
from polysite.engines.phases import Phase, find_models, find_progress, run_phases
from polysite.engines.plan import Plan
from polysite.engines.record import Result, mean_score
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.site import CaseScore
from quadratic import Aims, served_models

START = {"w": np.array([3.0])}
OPTIMA = {"a": -1.0, "b": 0.5, "c": 2.0}
GOALS = {"a": 1.5, "b": 0.6, "c": 2.1}  # what the validation cases of a site call for
NUMBERS = {"a": 2, "b": 6, "c": 4}
PULL = 1 - (1 - 0.05 * 1.0) ** 5


def sites(goals=GOALS):
    made = {i: Aims(1.0, np.full(NUMBERS[i], OPTIMA[i]), start=START) for i in OPTIMA}
    for i, site in made.items():
        site.goal = goals[i]
    return made


def phases(*parts, goals=GOALS):
    return [Phase(algorithm, Simulator(algorithm, sites(goals)), Plan(**plan)) for algorithm, plan in parts]


def go(path, *parts, goals=GOALS):
    folder = RunFolder.create(path, "", 0)
    return run_phases(phases(*parts, goals=goals), START, 0, folder), folder


def models(folder, name="best"):
    return served_models(folder, OPTIMA, name)


def paths(rounds, groups=(("a",), ("b",), ("c",)), start=3.0):
    """The model of every site after each round, where groups of sites average."""
    found = {}
    for group in groups:
        weights = np.array([NUMBERS[i] for i in group], float)
        aim = float(weights @ [OPTIMA[i] for i in group] / weights.sum())
        found |= {i: [aim + (1 - PULL) ** (r + 1) * (start - aim) for r in range(rounds)] for i in group}
    return found


def nearest(path, goal):
    return int(np.argmin([abs(w - goal) for w in path]))


def test_a_site_that_trains_alone_keeps_the_round_that_its_own_cases_call_for(tmp_path):
    result, folder = go(tmp_path / "own", (Local(), {"rounds": 12, "best": "own"}))
    single, plain = go(tmp_path / "common", (Local(), {"rounds": 12}))
    path = paths(12)
    wanted = {i: nearest(path[i], GOALS[i]) for i in OPTIMA}
    assert result.best_rounds == wanted and len(set(wanted.values())) == 3
    assert models(folder) == pytest.approx({i: path[i][wanted[i]] for i in OPTIMA})
    assert result.best_round == single.best_round and models(folder, "common") == models(plain)  # both are reported
    assert {k: result.common[k] for k in ("validation", "test")} == {
        "validation": single.validation,
        "test": single.test,
    }
    assert result.test["a"]["0"].loss == pytest.approx(abs(path["a"][wanted["a"]] - GOALS["a"]))
    assert mean_score(result.validation, "case") > mean_score(result.common["validation"], "case")
    assert Result.from_json(result.to_json()) == result == folder.result
    assert folder.records()[-1].best_rounds == wanted and result.round_of("a") == wanted["a"]
    assert not single.best_rounds and not single.common


def test_each_site_has_its_own_round_of_a_shared_model(tmp_path):
    result, folder = go(tmp_path / "run", (FedAvg(), {"rounds": 15, "best": "own"}))
    path = paths(15, [tuple(OPTIMA)])
    assert result.best_rounds == {i: nearest(path[i], GOALS[i]) for i in OPTIMA}
    assert models(folder) == pytest.approx({i: path[i][r] for i, r in result.best_rounds.items()})
    assert len(set(models(folder, "common").values())) == 1


def test_a_group_has_the_round_that_the_cases_of_all_its_sites_call_for(tmp_path):
    groups = {"one": ("a", "b"), "two": ("c",)}
    for name, algorithm in (("groups", Clustered(groups)), ("weighted", Weighted({"a": 1.0}, Clustered(groups)))):
        result, _ = go(tmp_path / name, (algorithm, {"rounds": 15, "best": "own"}))
        path = paths(15, groups.values())
        score = [
            sum(NUMBERS[i] / (1 + abs(w - GOALS[i])) for i in "ab") / (NUMBERS["a"] + NUMBERS["b"]) for w in path["a"]
        ]
        assert result.best_rounds == {
            "a": int(np.argmax(score)),
            "b": int(np.argmax(score)),
            "c": nearest(path["c"], 2.1),
        }
        assert result.best_rounds["a"] != result.best_rounds["c"]


@pytest.mark.parametrize("best_from", [0, 1])
def test_the_model_that_a_phase_began_from_is_its_round_0(tmp_path, best_from):
    """All sites call for the model of the first phase; the groups then only lead away from it."""
    aim = sum(NUMBERS[i] * OPTIMA[i] for i in OPTIMA) / 12
    goals = dict.fromkeys(OPTIMA, aim)
    then = Clustered({"one": ("a", "b"), "two": ("c",)}), {"rounds": 4, "best": "own", "best_from": best_from}
    result, folder = go(tmp_path / "run", (FedAvg(), {"rounds": 300}), then, goals=goals)
    start = models(go(tmp_path / "before", (FedAvg(), {"rounds": 300}), goals=goals)[1])["a"]
    if best_from:
        assert result.best_phase == 1 and result.best_round == 300 and set(result.best_rounds.values()) == {300}
        assert models(folder) == pytest.approx({i: w[0] for i, w in paths(1, (("a", "b"), ("c",)), start).items()})
    else:
        assert result.best_phase == 0 and set(result.best_rounds.values()) == {299}
        assert models(folder) == dict.fromkeys(OPTIMA, start)


SPLITS = Cfl(split_at=(4,), split_first=True, least=2)


def test_a_model_from_before_a_split_does_not_win_after_it(tmp_path):
    """With these goals the models of all together are nearest to them before the split, at c in the first round."""
    goals = {"a": 2.0, "b": 2.0, "c": 2.6}
    before, plan = paths(3, [tuple(OPTIMA)])["a"], {"rounds": 8, "best": "own"}
    after = paths(5, (("a", "b"), ("c",)), before[-1])
    result, folder = go(tmp_path / "own", (SPLITS, plan), goals=goals)
    assert min(abs(w - 2.6) for w in before) < min(abs(w - 2.6) for w in after["c"])
    wanted = {i: 3 + nearest(after[i], goals[i]) for i in goals}
    assert result.best_rounds == wanted
    assert models(folder) == pytest.approx({i: after[i][r - 3] for i, r in wanted.items()})
    assert result.best_round < 3  # without best_from the common best round may precede the split
    told, _ = go(tmp_path / "from", (SPLITS, {**plan, "best_from": 4}), goals=goals)
    assert told.best_round >= 3 and told.best_rounds == result.best_rounds


def test_rounds_before_the_first_that_counts_neither_win_nor_exhaust_the_patience(tmp_path):
    plan = {"rounds": 12, "best_from": 9, "patience": 1}
    result, _ = go(tmp_path / "run", (FedAvg(), plan), goals=dict.fromkeys(OPTIMA, 2.5))  # every round is worse
    assert (result.best_round, result.rounds) == (8, 10)
    with pytest.raises(ConfigError, match=r"best_from must lie between 0 and run\.rounds = 5"):
        Plan(rounds=5, best_from=6)


def test_training_goes_on_while_any_site_gets_better(tmp_path):
    goals = {**dict.fromkeys("ab", 2.9), "c": 2.0}  # a and b are best at once, c at its optimum
    alone = {"rounds": 9, "patience": 2}
    assert go(tmp_path / "common", (Local(), alone), goals=goals)[0].rounds < 9
    assert go(tmp_path / "own", (Local(), {**alone, "best": "own"}), goals=goals)[0].rounds == 9


PARTS = {
    "own models": ((Ditto(lam=0.3), {"rounds": 11, "best": "own"}),),
    "groups after another": (
        (FedAvg(), {"rounds": 4}),
        (Clustered({"one": ("a", "b"), "two": ("c",)}), {"rounds": 7, "best": "own"}),
    ),
    "halves": ((SPLITS, {"rounds": 11, "best": "own"}),),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("after", [0, 3, 4, 7, 10])
def test_a_run_resumes_wherever_it_was_interrupted(tmp_path, name, after, monkeypatch):
    parts = tuple((algorithm, {**plan, "checkpoint_every": 2}) for algorithm, plan in PARTS[name])
    result, whole = go(tmp_path / "whole", *parts)
    folder, append, seen = RunFolder.create(tmp_path / "half", "", 0), RunFolder.append, []

    def fail(self, record):
        append(self, record)
        seen.append(record.round)
        if record.round == after and seen.count(after) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append", fail)
    with pytest.raises(KeyboardInterrupt):
        run_phases(phases(*parts), START, 0, folder)
    again = phases(*parts)
    assert run_phases(again, START, 0, folder, resume=find_progress(folder, again)) == result
    for kind in ("best", "common", "last"):
        assert models(folder, kind) == models(whole, kind)
    assert [replace(r, elapsed=0, sites={}) for r in folder.records()] == [
        replace(r, elapsed=0, sites={}) for r in whole.records()
    ]
    kept = {p.name for p in (folder.path / "checkpoints").glob("own-*.safetensors")}
    assert {folder.own(r).name for r in result.best_rounds.values()} <= kept  # checkpoints of own best rounds are kept
    assert len(kept) <= len(set(result.best_rounds.values())) + 4


def test_a_damaged_own_best_is_noticed_and_made_again(tmp_path, caplog):
    parts = ((Ditto(lam=0.3), {"rounds": 8, "best": "own", "checkpoint_every": 1}),)
    goals = dict.fromkeys(OPTIMA, 0.0)  # every round is better, so that the last checkpoint alone needs the last one
    result, folder = go(tmp_path / "run", *parts, goals=goals)
    (folder.path / "result.json").unlink()
    folder.own(7).write_bytes(b"x")
    again = phases(*parts, goals=goals)
    at = find_progress(folder, again)
    assert at.round == 6 and "own-000007.safetensors cannot be read" in caplog.text
    assert run_phases(again, START, 0, folder, resume=at) == result


def test_the_models_are_found_again_also_for_a_hospital_that_never_took_part(tmp_path):
    result, folder = go(tmp_path / "run", (FedAvg(), {"rounds": 15, "best": "own"}))
    again = phases((FedAvg(), {"rounds": 15, "best": "own"}))
    found = find_models(folder, again, result, ("a", "b", "c", "new"))
    sent = found.payloads(("a", "b", "c", "new"))
    best = models(folder) | {"new": models(folder, "common")["a"]}
    assert {i: p["model"]["w"].item() for i, p in sent.items()} == best


def scored(**values):
    return {i: {"1": CaseScore({"L": v}, 0.0)} if v is not None else {} for i, v in values.items()}


def test_who_judges_a_site():
    alone = {i: i for i in "abc"}
    first = improved({}, alone, scored(a=0.4, b=0.8), 0)  # c has no validation case
    assert first == {
        "a": Own(0, 0.4, "a"), "b": Own(0, 0.8, "b"), "c": Own(0, pytest.approx(0.6), None),
        STRANGER: Own(0, pytest.approx(0.6), None),
    }  # fmt: skip
    second = improved(first, alone, scored(b=0.9), 1)  # a is absent, and no other site shares its cluster
    assert set(second) == {"b", "c", STRANGER}
    assert set(improved(first, alone, scored(a=0.4, b=0.8), 1)) == set()  # no better: the earlier round stays
    assert improved(first, alone, scored(a=0.1, b=0.1, c=0.05), 1) == {"c": Own(1, 0.05, "c")}  # its own judge, at last


def test_a_site_that_changes_its_cluster_starts_again():
    before = improved({}, dict.fromkeys("abc", ""), scored(a=0.9, b=0.9, c=0.9), 0)
    halves = {"a": "0", "b": "0", "c": "1"}
    after = improved(before, halves, scored(a=0.1, b=0.3, c=0.2), 1)
    assert {i: (own.round, own.score) for i, own in after.items()} == {
        "a": (1, pytest.approx(0.2)), "b": (1, pytest.approx(0.2)), "c": (1, 0.2)
    }  # fmt: skip


@pytest.mark.parametrize("name", table.one_of_each_kind())
def test_every_algorithm_ends_with_own_best_rounds_after_another(name, tmp_path):
    """Every site is served the model of its reported best round."""
    algorithm = table.CASES[name]
    rounds = 12 if hasattr(algorithm, "is_finished") else 4
    parts = ((FedAvg(), Plan(rounds=2)), (algorithm, Plan(rounds=rounds, best="own")))
    made = [Phase(a, Simulator(a, table.sites()), plan) for a, plan in parts]
    folder = RunFolder.create(tmp_path / "run", "", 0)
    result = run_phases(made, table.START, 0, folder)
    assert set(result.best_rounds) == set("abcd") and all(1 <= r < result.rounds for r in result.best_rounds.values())
    assert result.best_rounds == {i: r for i, r in folder.own_rounds().items() if i != STRANGER}
    again = [Phase(a, Simulator(a, table.sites()), plan) for a, plan in parts]
    found = find_models(folder, again, result, tuple("abcd"))
    assert found.phase.transport.score(found.round, found.payloads(tuple("abcd")), "validation") == result.validation
