"""Factors of the sites' weights, applied at the sites: what is sent, what leaves, and what the server may refuse."""

from dataclasses import replace

import numpy as np
import pytest

from polysite import tree
from polysite.algorithms.base import facts
from polysite.algorithms.fedavg import FEDADAM, FedAvg
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedper import FedPer
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.weighted import Weighted
from polysite.engines.plan import Plan
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
    _, sent, replies = exchange(Weighted(OMEGA))
    assert {i: p.get("factor") for i, p in sent.items()} == {"a": None, "b": 0.3, "c": None, "d": 2.0}
    assert {i: p["weight"] for i, p in replies.items()} == {i: OMEGA.get(i, 1.0) * s.size for i, s in sites().items()}
    assert all(p.keys() == {"model", "weight"} for p in replies.values())


def test_a_sum_of_the_replies_is_enough():
    """Sum of omega_k n_k w_k over the sum of omega_k n_k: no single reply is needed, so masks may hide each."""
    algorithm = Weighted(OMEGA)
    state, _, replies = exchange(algorithm)
    weights = [p["weight"] for p in replies.values()]
    total = {k: sum(w * p["model"][k] for w, p in zip(weights, replies.values(), strict=True)) for k in START}
    from_sums = tree.map(lambda x: x / sum(weights), total)
    np.testing.assert_allclose(algorithm.merge(state, replies).model["body.w"], from_sums["body.w"], rtol=1e-14)


def test_it_needs_what_the_inner_algorithm_needs():
    inner = FedAvg(), FEDADAM, FedProx(), FedPer(), Scaffold(), FedNova(), Weighted(OMEGA), Weighted(OMEGA, Scaffold())
    found = [facts(Weighted(OMEGA, each)).needs for each in inner]
    assert found == [facts(each).needs for each in inner] == ["sum"] * 4 + ["each"] * 2 + ["sum", "each"]


class Hidden:
    reveals = "sum"


def test_a_secure_sum_is_refused_only_where_each_reply_is_needed():
    check_steps(Weighted(OMEGA, FedProx()), "weighted", [Hidden()])
    with pytest.raises(ConfigError, match="weighted needs the reply of each site"):
        check_steps(Weighted(OMEGA, Scaffold()), "weighted", [Hidden()])


@pytest.mark.parametrize("inner", [FedAvg(), FedAvg(uniform=True)], ids=["by cases", "uniform"])
@pytest.mark.parametrize("factor", [1e-6, 0.1, 1e6])
def test_a_scaled_weight_is_checked_as_if_it_were_not(inner, factor):
    """No factor makes the reply of an honest site look absurd, and none lets an absurd one pass."""
    algorithm = Weighted({"b": factor}, inner)
    _, sent, replies = exchange(algorithm)
    assert screen(algorithm.reply, START, sent, replies) == {}
    for lie in (0.5, 1e5):
        false = Payload(**{**replies["b"], "weight": lie * factor})
        assert list(screen(algorithm.reply, START, sent, {**replies, "b": false})) == ["b"]


def test_an_inner_factor_multiplies_the_outer_one():
    nested = Weighted({"b": 0.5, "c": 3.0}, Weighted({"a": 2.0, "b": 0.2}))
    _, sent, replies = exchange(nested)
    factors = {"a": 2.0, "b": 0.1, "c": 3.0}
    assert {i: p["factor"] for i, p in sent.items() if "factor" in p} == pytest.approx(factors)
    assert replies["b"]["weight"] == pytest.approx(0.1 * sites()["b"].size)


def test_the_record_holds_the_scaled_shares():
    algorithm = Weighted(OMEGA)
    *_, last = run_rounds(algorithm, Simulator(algorithm, sites()), START, Plan(rounds=2), seed=0)
    weights = {i: OMEGA.get(i, 1.0) * s.size for i, s in sites().items()}
    assert last.shares == pytest.approx({i: w / sum(weights.values()) for i, w in weights.items()})
    assert not last.refused


def test_factors_do_not_change_what_is_served():
    algorithm = Weighted(OMEGA)
    state, sent, _ = exchange(algorithm)
    served = [list(algorithm.serve(sent[i], Payload(), sites()[i], ("x",))) for i in "ab"]
    assert same(served[0], served[1]) and same(served[0][0][0], state.model)
    assert facts(replace(algorithm, weights={})).needs == "sum"
