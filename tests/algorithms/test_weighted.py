"""Factors of the sites' weights, applied at the sites: what is sent, what leaves, and what the server may refuse."""

from dataclasses import replace

import pytest

import polysite as ps
from polysite.algorithms.base import facts
from polysite.algorithms.fedavg import FEDADAM
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.site_turn import check_steps
from polysite.errors import ConfigError
from polysite.payload import Payload
from table import START, same, screen, sites

OMEGA = {"b": 0.3, "d": 2.0}


def exchange(algorithm):
    """(state, sent, replies) of one round."""
    state = algorithm.init(START, "abcd")
    sent = algorithm.send(state, "abcd")
    return state, sent, {i: algorithm.local(sent[i], Payload(), s)[0] for i, s in sites().items()}


def test_a_site_is_sent_its_factor_and_applies_it_itself():
    _, sent, replies = exchange(ps.Weighted(OMEGA))
    assert {i: p.get("factor") for i, p in sent.items()} == {"a": None, "b": 0.3, "c": None, "d": 2.0}
    assert {i: p["weight"] for i, p in replies.items()} == {i: OMEGA.get(i, 1.0) * s.size for i, s in sites().items()}
    assert all(p.keys() == {"model", "weight"} for p in replies.values())


def test_it_needs_what_the_inner_algorithm_needs():
    for inner in (ps.FedAvg(), FEDADAM, ps.FedProx(), ps.FedPer(), ps.Weighted(OMEGA)):
        assert facts(ps.Weighted(OMEGA, inner)).needs == facts(inner).needs == "sum"
    for inner in (ps.Scaffold(), ps.FedNova(), ps.Weighted(OMEGA, ps.Scaffold())):
        assert facts(ps.Weighted(OMEGA, inner)).needs == facts(inner).needs == "each"


class Hidden:
    reveals = "sum"


def test_a_secure_sum_is_refused_only_where_each_reply_is_needed():
    check_steps(ps.Weighted(OMEGA, ps.FedProx()), "weighted", [Hidden()])
    with pytest.raises(ConfigError, match="weighted needs the reply of each site"):
        check_steps(ps.Weighted(OMEGA, ps.Scaffold()), "weighted", [Hidden()])


@pytest.mark.parametrize("inner", [ps.FedAvg(), ps.FedAvg(uniform=True)], ids=["by cases", "uniform"])
@pytest.mark.parametrize("factor", [1e-6, 0.1, 1e6])
def test_a_scaled_weight_is_checked_as_if_it_were_not(inner, factor):
    """No factor makes the reply of an honest site look absurd, and none lets an absurd one pass."""
    algorithm = ps.Weighted({"b": factor}, inner)
    _, sent, replies = exchange(algorithm)
    assert screen(algorithm.reply, START, sent, replies) == {}
    for lie in (0.5, 1e5):
        false = Payload(**{**replies["b"], "weight": lie * factor})
        assert list(screen(algorithm.reply, START, sent, {**replies, "b": false})) == ["b"]


def test_an_inner_factor_multiplies_the_outer_one():
    nested = ps.Weighted({"b": 0.5, "c": 3.0}, ps.Weighted({"a": 2.0, "b": 0.2}))
    _, sent, replies = exchange(nested)
    factors = {"a": 2.0, "b": 0.1, "c": 3.0}
    assert {i: p["factor"] for i, p in sent.items() if "factor" in p} == pytest.approx(factors)
    assert replies["b"]["weight"] == pytest.approx(0.1 * sites()["b"].size)


def test_the_record_holds_the_scaled_shares():
    algorithm = ps.Weighted(OMEGA)
    *_, last = run_rounds(algorithm, Simulator(algorithm, sites()), START, ps.Plan(rounds=2), seed=0)
    weights = {i: OMEGA.get(i, 1.0) * s.size for i, s in sites().items()}
    assert last.shares == pytest.approx({i: w / sum(weights.values()) for i, w in weights.items()})
    assert not last.refused


def test_factors_do_not_change_what_is_served():
    algorithm = ps.Weighted(OMEGA)
    state, sent, _ = exchange(algorithm)
    served = [list(algorithm.serve(sent[i], Payload(), sites()[i], ("x",))) for i in "ab"]
    assert same(served[0], served[1]) and same(served[0][0][0], state.model)
    assert facts(replace(algorithm, weights={})).needs == "sum"
