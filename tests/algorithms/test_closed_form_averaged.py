"""A moving average of the shared model against answers on paper: the first rounds and the limit."""

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.base import facts, serving_payloads
from polysite.payload import Payload
from quadratic import ETA, Q0, K, bed, play

A, B, N = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.3, 2.0]), np.array([2, 8, 5])
P = N / N.sum()
R = (1 - ETA * A) ** K  # a fit goes from w to b + R (w - b)
RHO = P @ R  # FedAvg goes from w to w* + rho (w - w*)
OPTIMUM = (P * (1 - R)) @ B / (P @ (1 - R))


def sites():
    return bed(A, B, N)


def states(algorithm, rounds):
    """The server's state after every round."""
    return play(algorithm, sites(), rounds).states


def served(algorithm, state, site="s0"):
    got = serving_payloads(algorithm, state, [site])[site]
    ((model, cases),) = algorithm.serve(got, Payload(), sites()[site], ("x",))
    assert cases == ("x",)
    return model["w"].item()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_first_rounds_are_a_geometric_series(decay):
    """m_t = w* + (w0 - w*) (1 - d) / (1 - d^t) rho (rho^t - d^t) / (rho - d), and the first is FedAvg's own."""
    algorithm = ps.Averaged(decay)
    for t, state in enumerate(states(algorithm, 4), start=1):
        series = RHO * (RHO**t - decay**t) / (RHO - decay)
        expected = OPTIMUM + (Q0 - OPTIMUM) * (1 - decay) / (1 - decay**t) * series
        assert served(algorithm, state) == pytest.approx(expected, abs=1e-12)
        assert state.inner.model["w"].item() == pytest.approx(OPTIMUM + RHO**t * (Q0 - OPTIMUM), abs=1e-12)
    (once,) = states(algorithm, 1)
    assert served(algorithm, once) == once.inner.model["w"].item()


def test_limit_is_that_of_the_inner_algorithm():
    """The difference from it shrinks like decay^t."""
    algorithm = ps.Averaged(0.5)
    state = states(algorithm, 60)[-1]
    assert served(algorithm, state) == pytest.approx(OPTIMUM, abs=1e-10)
    (plain,) = states(ps.FedAvg(), 60)[-1:]
    assert state.inner.model == plain.model  # training does not notice the average


def test_the_initial_model_is_served_before_the_first_round():
    algorithm = ps.Averaged(0.9)
    assert served(algorithm, algorithm.init({"w": np.array([Q0])}, ["s0"])) == Q0


def test_combinators_serve_the_average_of_what_is_inside():
    """Factors and groups outside or inside of the average give the same model."""
    factors = {"s1": 0.3}
    outside, inside = ps.Weighted(factors, ps.Averaged(0.5)), ps.Averaged(0.5, ps.Weighted(factors))
    outer, inner = states(outside, 3)[-1], states(inside, 3)[-1]
    assert served(outside, outer, "s1") == served(inside, inner, "s1") != inner.inner.model["w"].item()
    groups = ps.Clustered({"x": ("s0",), "y": ("s1", "s2")}, ps.Averaged(0.5))
    state = states(groups, 3)[-1]
    assert served(groups, state) == state.groups["x"].model["w"].item() != state.groups["x"].inner.model["w"].item()


def test_it_needs_what_the_inner_algorithm_needs():
    inner = ps.FedAvg(), ps.FedAvg(server=ps.Adam()), ps.Weighted({}), ps.Scaffold(), ps.FedExP()
    assert [facts(ps.Averaged(inner=each)).needs for each in inner] == ["sum"] * 3 + ["each"] * 2
