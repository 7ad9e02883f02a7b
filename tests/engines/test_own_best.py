"""The best round of every site, or cluster of sites: against answers on paper, and after any interruption."""

import numpy as np
import pytest

import polysite as ps
import table
from phased import START, interrupted, phases, play, timeless
from polysite.engines.own_best import STRANGER, Own, improved
from polysite.engines.phases import find_models
from polysite.engines.record import Result, mean_score
from polysite.errors import ConfigError
from polysite.site import CaseScore
from quadratic import Aims, served_models

OPTIMA = {"a": -1.0, "b": 0.5, "c": 2.0}
GOALS = {"a": 1.5, "b": 0.6, "c": 2.1}  # what the validation cases of a site call for
NUMBERS = {"a": 2, "b": 6, "c": 4}
PULL = 1 - (1 - 0.05 * 1.0) ** 5


def sites(goals=GOALS):
    made = {i: Aims(1.0, np.full(NUMBERS[i], OPTIMA[i]), start=START) for i in OPTIMA}
    for i, site in made.items():
        site.goal = goals[i]
    return made


def go(path, *parts, goals=GOALS):
    return play(path, phases(parts, lambda: sites(goals)))


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
    result, folder = go(tmp_path / "own", (ps.Local(), {"rounds": 12, "best": "own"}))
    single, plain = go(tmp_path / "common", (ps.Local(), {"rounds": 12}))
    path = paths(12)
    wanted = {i: nearest(path[i], GOALS[i]) for i in OPTIMA}
    assert result.best_rounds == wanted and len(set(wanted.values())) == 3
    assert models(folder) == pytest.approx({i: path[i][wanted[i]] for i in OPTIMA})
    assert result.best_round == single.best_round and models(folder, "common") == models(plain)  # both are reported
    assert (result.common["validation"], result.common["test"]) == (single.validation, single.test)
    assert result.test["a"]["0"].loss == pytest.approx(abs(path["a"][wanted["a"]] - GOALS["a"]))
    assert mean_score(result.validation, "case") > mean_score(result.common["validation"], "case")
    assert Result.from_json(result.to_json()) == result == folder.result
    assert folder.records()[-1].best_rounds == wanted and result.round_of("a") == wanted["a"]
    assert not single.best_rounds and not single.common


def test_each_site_has_its_own_round_of_a_shared_model_and_a_hospital_that_never_took_part_the_common(tmp_path):
    part = ps.FedAvg(), {"rounds": 15, "best": "own"}
    result, folder = go(tmp_path / "run", part)
    path, everyone = paths(15, [tuple(OPTIMA)]), (*OPTIMA, "new")
    assert result.best_rounds == {i: nearest(path[i], GOALS[i]) for i in OPTIMA}
    assert models(folder) == pytest.approx({i: path[i][r] for i, r in result.best_rounds.items()})
    (common,) = set(models(folder, "common").values())
    sent = find_models(folder, phases([part], sites), result, everyone).payloads(everyone)
    assert {i: p["model"]["w"].item() for i, p in sent.items()} == models(folder) | {"new": common}


GROUPS = {"one": ("a", "b"), "two": ("c",)}


def test_a_group_has_the_round_that_the_cases_of_all_its_sites_call_for(tmp_path):
    grouped = ps.Weighted({"a": 1.0}, ps.Clustered(GROUPS))
    result, _ = go(tmp_path / "run", (grouped, {"rounds": 15, "best": "own"}))
    path = paths(15, GROUPS.values())
    together = int(np.argmax([sum(NUMBERS[i] / (1 + abs(w - GOALS[i])) for i in "ab") for w in path["a"]]))
    assert result.best_rounds == {"a": together, "b": together, "c": nearest(path["c"], GOALS["c"])}
    assert result.best_rounds["a"] != result.best_rounds["c"]


@pytest.mark.parametrize("best_from", [0, 1])
def test_the_model_that_a_phase_began_from_is_its_round_0(tmp_path, best_from):
    """All sites call for the model of the first phase; the groups then only lead away from it."""
    aim = sum(NUMBERS[i] * OPTIMA[i] for i in OPTIMA) / 12
    goals = dict.fromkeys(OPTIMA, aim)
    then = ps.Clustered(GROUPS), {"rounds": 4, "best": "own", "best_from": best_from}
    result, folder = go(tmp_path / "run", (ps.FedAvg(), {"rounds": 60}), then, goals=goals)
    start = models(go(tmp_path / "before", (ps.FedAvg(), {"rounds": 60}), goals=goals)[1])["a"]
    if best_from:
        assert result.best_phase == 1 and result.best_round == 60 and set(result.best_rounds.values()) == {60}
        assert models(folder) == pytest.approx({i: w[0] for i, w in paths(1, GROUPS.values(), start).items()})
    else:
        assert result.best_phase == 0 and set(result.best_rounds.values()) == {59}
        assert models(folder) == dict.fromkeys(OPTIMA, start)


SPLITS = ps.Cfl(split_at=(4,), split_first=True, least=2)


def test_a_model_from_before_a_split_does_not_win_after_it(tmp_path):
    """With these goals the models of all together are nearest to them before the split, at c in the first round."""
    goals = {"a": 2.0, "b": 2.0, "c": 2.6}
    before, plan = paths(3, [tuple(OPTIMA)])["a"], {"rounds": 8, "best": "own"}
    after = paths(5, GROUPS.values(), before[-1])
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
    result, _ = go(tmp_path / "run", (ps.FedAvg(), plan), goals=dict.fromkeys(OPTIMA, 2.5))  # every round is worse
    assert (result.best_round, result.rounds) == (8, 10)
    with pytest.raises(ConfigError, match=r"best_from must lie between 0 and run\.rounds = 5"):
        go(tmp_path / "none", (ps.FedAvg(), {"rounds": 5, "best_from": 6}))


def test_training_goes_on_while_any_site_gets_better(tmp_path):
    goals = {**dict.fromkeys("ab", 2.9), "c": 2.0}  # a and b are best at once, c at its optimum
    alone = {"rounds": 9, "patience": 2}
    assert go(tmp_path / "common", (ps.Local(), alone), goals=goals)[0].rounds < 9
    assert go(tmp_path / "own", (ps.Local(), {**alone, "best": "own"}), goals=goals)[0].rounds == 9


THEN = ps.Clustered(GROUPS), {"rounds": 7, "best": "own"}
PARTS = {
    "own models": ((ps.Ditto(lam=0.3), {"rounds": 11, "best": "own"}),),
    "groups after another": ((ps.FedAvg(), {"rounds": 4}), THEN),
    "halves": ((SPLITS, {"rounds": 11, "best": "own"}),),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("after", [0, 4, 10])
def test_a_run_resumes_wherever_it_was_interrupted(tmp_path, name, after):
    parts = tuple((algorithm, {**plan, "checkpoint_every": 2}) for algorithm, plan in PARTS[name])
    result, whole = go(tmp_path / "whole", *parts)
    with interrupted(after):
        go(tmp_path / "half", *parts)
    again, folder = go(tmp_path / "half", *parts)
    assert again == result and timeless(folder) == timeless(whole)
    for kind in ("best", "common", "last"):
        assert models(folder, kind) == models(whole, kind)
    kept = {p.name for p in (folder.path / "checkpoints").glob("own-*.safetensors")}
    assert {folder.own(r).name for r in result.best_rounds.values()} <= kept  # checkpoints of own best rounds are kept
    assert len(kept) <= len(set(result.best_rounds.values())) + 4


def test_a_damaged_own_best_is_noticed_and_made_again(tmp_path, caplog):
    part = ps.Ditto(lam=0.3), {"rounds": 8, "best": "own", "checkpoint_every": 1}
    goals = dict.fromkeys(OPTIMA, 0.0)  # every round is better, so that the last checkpoint alone needs the last one
    result, folder = go(tmp_path / "run", part, goals=goals)
    (folder.path / "result.json").unlink()
    folder.own(7).write_bytes(b"x")
    assert go(tmp_path / "run", part, goals=goals)[0] == result
    assert "own-000007.safetensors cannot be read" in caplog.text


def scored(**values):
    return {i: {"1": CaseScore({"L": v}, 0.0)} if v is not None else {} for i, v in values.items()}


def test_who_judges_a_site():
    alone, mean = {i: i for i in "abc"}, pytest.approx(0.6)
    first = improved({}, alone, scored(a=0.4, b=0.8), 0)  # c has no validation case
    unjudged = {"c": Own(0, mean, None), STRANGER: Own(0, mean, None)}
    assert first == {"a": Own(0, 0.4, "a"), "b": Own(0, 0.8, "b"), **unjudged}
    second = improved(first, alone, scored(b=0.9), 1)  # a is absent, and no other site shares its cluster
    assert set(second) == {"b", "c", STRANGER}
    assert set(improved(first, alone, scored(a=0.4, b=0.8), 1)) == set()  # no better: the earlier round stays
    assert improved(first, alone, scored(a=0.1, b=0.1, c=0.05), 1) == {"c": Own(1, 0.05, "c")}  # its own judge, at last
    split = improved(first, {"a": "0", "b": "0", "c": "1"}, scored(a=0.1, b=0.3, c=0.2), 1)  # starts again
    assert {i: own.score for i, own in split.items()} == {"a": pytest.approx(0.2), "b": pytest.approx(0.2), "c": 0.2}


@pytest.mark.parametrize("name", table.one_of_each_kind())
def test_every_algorithm_ends_with_own_best_rounds_after_another(name, tmp_path):
    """Every site is served the model of its reported best round."""
    algorithm, everyone = table.CASES[name], tuple("abcd")
    rounds = 12 if hasattr(algorithm, "is_finished") else 4
    parts = (ps.FedAvg(), {"rounds": 2}), (algorithm, {"rounds": rounds, "best": "own"})
    result, folder = play(tmp_path / "run", phases(parts, table.sites), table.START)
    assert set(result.best_rounds) == set(everyone) and all(1 <= r < result.rounds for r in result.best_rounds.values())
    assert result.best_rounds == {i: r for i, r in folder.own_rounds().items() if i != STRANGER}
    found = find_models(folder, phases(parts, table.sites), result, everyone)
    assert found.phase.transport.score(found.round, found.payloads(everyone), "validation") == result.validation
