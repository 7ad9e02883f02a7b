"""Algorithms around others: a moving average, robust rules, factors of weights; on paper, and what leaves a site."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.base import serving_payloads
from polysite.engines.site_turn import check_steps
from polysite.errors import ConfigError
from polysite.payload import Payload
from quadratic import Q0, B, P, R, bed, play
from table import START, exchange, same, screen, sites

RHO = P @ R  # FedAvg goes from w to w* + rho (w - w*)
OPTIMUM = (P * (1 - R)) @ B / (P @ (1 - R))


def states(algorithm, rounds):
    """The server's state after every round."""
    return play(algorithm, bed(), rounds).states


def served(algorithm, state, site="s0"):
    got = serving_payloads(algorithm, state, [site])[site]
    ((model, cases),) = algorithm.serve(got, Payload(), bed()[site], ("x",))
    assert cases == ("x",)
    return model["w"].item()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_first_rounds_of_an_average_are_a_geometric_series(decay):
    """m_t = w* + (w0 - w*) (1 - d) / (1 - d^t) rho (rho^t - d^t) / (rho - d), and the first is FedAvg's own."""
    algorithm = ps.Averaged(decay)
    for t, state in enumerate(states(algorithm, 4), start=1):
        series = RHO * (RHO**t - decay**t) / (RHO - decay)
        expected = OPTIMUM + (Q0 - OPTIMUM) * (1 - decay) / (1 - decay**t) * series
        assert served(algorithm, state) == pytest.approx(expected, abs=1e-12)
        assert state.inner.model["w"].item() == pytest.approx(OPTIMUM + RHO**t * (Q0 - OPTIMUM), abs=1e-12)
        assert t > 1 or served(algorithm, state) == state.inner.model["w"].item()


def test_limit_of_an_average_is_that_of_the_inner_algorithm_and_its_beginning_the_first_model():
    """The difference from it shrinks like decay^t."""
    algorithm = ps.Averaged(0.5)
    state, plain = states(algorithm, 60)[-1], states(ps.FedAvg(), 60)[-1]
    assert served(algorithm, state) == pytest.approx(OPTIMUM, abs=1e-10)
    assert state.inner.model == plain.model  # training does not notice the average
    assert served(algorithm, algorithm.init({"w": np.array([Q0])}, ["s0"])) == Q0


def test_factors_and_groups_around_an_average_serve_it():
    """Outside or inside of the average, factors give the same model."""
    factors = {"s1": 0.3}
    outside, inside = ps.Weighted(factors, ps.Averaged(0.5)), ps.Averaged(0.5, ps.Weighted(factors))
    outer, inner = states(outside, 3)[-1], states(inside, 3)[-1]
    assert served(outside, outer, "s1") == served(inside, inner, "s1") != inner.inner.model["w"].item()
    groups = ps.Clustered({"x": ("s0",), "y": ("s1", "s2", "s3")}, ps.Averaged(0.5))
    state = states(groups, 3)[-1]
    assert served(groups, state) == state.groups["x"].model["w"].item() != state.groups["x"].inner.model["w"].item()


ZERO = {"w": np.array([0.0])}
POINTS = {"s0": 0.0, "s1": 0.2, "s2": 0.3, "s3": 0.9, "s4": 100.0}  # where sites went; control variates: the other way
REPLIES = {i: Payload(model={"w": np.array([x])}, control={"w": np.array([-x])}, weight=1.0) for i, x in POINTS.items()}
RULES = {
    "median": (ps.Robust("median"), 0.3),
    "trimmed mean": (ps.Robust("trimmed_mean", beta=0.2), np.mean([0.2, 0.3, 0.9])),
    "krum": (ps.Robust("krum", f=1), 0.2),
    "multi-krum": (ps.Robust("krum", f=1, keep=3), 0.5 / 3),
    "geometric median": (ps.Robust("geometric_median"), 0.3),
    "centred clipping": (ps.Robust("centred_clipping", iterations=1), (0.0 + 0.2 + 0.3 + 0.3 + 0.3) / 5),
    "centred clipping, radius": (ps.Robust("centred_clipping", radius=0.5, iterations=1), (0.2 + 0.3 + 0.5 + 0.5) / 5),
}


@pytest.mark.parametrize(("rule", "point"), RULES.values(), ids=RULES.keys())
def test_robust_aggregate_around_averages_and_around_scaffold(rule, point):
    """Model and control of SCAFFOLD are aggregated alike."""
    for inner in (ps.FedAvg(), ps.FedProx(), ps.FedAvg(uniform=True), ps.Scaffold()):
        around = replace(rule, inner=inner)
        state = around.merge(around.init(ZERO, sorted(POINTS)), REPLIES)
        assert state.model["w"] == pytest.approx(point, abs=2e-4)
    assert state.control["w"] == pytest.approx(-point, abs=2e-4)


def test_centred_clipping_forgets_a_far_reply():
    """After several steps the centre is among the four near points, however far the fifth is."""
    rule = ps.Robust("centred_clipping", iterations=20)
    assert 0.2 < rule.merge(rule.init(ZERO, sorted(POINTS)), REPLIES).model["w"].item() < 0.6


def test_a_round_with_too_few_replies_for_krum_takes_the_median():
    around, few = ps.Robust("krum", f=1), {i: p for i, p in REPLIES.items() if i != "s4"}
    assert around.merge(around.init(ZERO, sorted(POINTS)), few).model["w"] == pytest.approx(0.25)
    assert around.shares(None, few) == {} and sum(around.shares(None, REPLIES).values()) == 1


OMEGA = {"b": 0.3, "d": 2.0}


def test_a_site_is_sent_its_factor_and_applies_it_itself():
    run, weights = play(ps.Weighted(OMEGA), sites(), 1), {i: OMEGA.get(i, 1.0) * s.size for i, s in sites().items()}
    replies = {i: r.payload for i, r in run.last.replies.items()}
    assert {i: p.get("factor") for i, p in run.last.sent.items()} == {"a": None, "b": 0.3, "c": None, "d": 2.0}
    assert {i: p["weight"] for i, p in replies.items()} == weights
    assert all(p.keys() == {"model", "weight"} for p in replies.values()) and not run.last.refused
    assert run.last.shares == pytest.approx({i: w / sum(weights.values()) for i, w in weights.items()})
    rule, got = ps.Weighted(OMEGA), ps.Weighted(OMEGA).send(run.state, "ab")  # a factor does not change what is served
    assert all(
        same([*rule.serve(p, Payload(), sites()["a"], ("x",))], [(run.state.model, ("x",))]) for p in got.values()
    )


def test_a_secure_sum_is_refused_only_where_each_reply_is_needed():
    hidden = SimpleNamespace(reveals="sum")
    check_steps(ps.Weighted(OMEGA, ps.FedProx()), "weighted", [hidden])
    with pytest.raises(ConfigError, match="weighted needs the reply of each site"):
        check_steps(ps.Weighted(OMEGA, ps.Scaffold()), "weighted", [hidden])


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
    _, sent, replies = exchange(ps.Weighted({"b": 0.5, "c": 3.0}, ps.Weighted({"a": 2.0, "b": 0.2})))
    assert [sent[i].get("factor", 1.0) for i in "abcd"] == pytest.approx([2.0, 0.1, 3.0, 1.0])
    assert replies["b"]["weight"] == pytest.approx(0.1 * sites()["b"].size)
