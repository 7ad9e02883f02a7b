"""Every algorithm against two answers on paper: its first round and its limit."""

import numpy as np
import pytest

from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adagrad, Adam, Sgd, Yogi
from polysite.engines.rounds import Plan, run
from polysite.engines.simulator import Simulator
from quadratic import Quadratic

W0 = 3.0
START = {"w": np.array([W0])}


def unequal(**kw):
    """Three sites that differ in curvature, optimum and number of cases."""
    return {
        "a": Quadratic(1.0, np.array([0.0, 0.2]), **kw),
        "b": Quadratic(4.0, np.array([1.0] * 6), **kw),
        "c": Quadratic(2.0, np.array([-1.0, -2.0, -3.0]), **kw),
    }


def after(algorithm, sites, rounds, share=1.0):
    """(the model or None, what each site remembers) after some rounds."""
    engine = Simulator(algorithm, sites)
    *_, last = run(algorithm, engine, START, Plan(rounds=rounds, share=share), seed=0)
    return getattr(last.state, "model", {}).get("w"), engine.memories()


def fedavg(sites, p, w0, rounds):
    """w_T = w* + (sum p r)^T (w_0 - w*), with w* = sum p c b / sum p c, r = (1 - eta a)^K, c = 1 - r."""
    c = {i: s.pull for i, s in sites.items()}
    limit = sum(p[i] * c[i] * s.b.mean() for i, s in sites.items()) / sum(p[i] * c[i] for i in sites)
    return limit + sum(p[i] * (1 - c[i]) for i in sites) ** rounds * (w0 - limit)


def by_size(sites):
    total = sum(s.size for s in sites.values())
    return {i: s.size / total for i, s in sites.items()}


def equal(sites):
    return dict.fromkeys(sites, 1 / len(sites))


@pytest.mark.parametrize("rounds", [1, 2, 7, 400])
def test_fedavg_by_size_and_uniform(rounds):
    sites = unequal()
    assert after(FedAvg(), sites, rounds)[0] == pytest.approx(fedavg(sites, by_size(sites), W0, rounds), abs=1e-12)
    assert after(FedAvg(uniform=True), sites, rounds)[0] == pytest.approx(
        fedavg(sites, equal(sites), W0, rounds), abs=1e-12
    )


@pytest.mark.parametrize("rounds", [1, 400])
def test_fedavg_with_fixed_epochs_or_iterations(rounds):
    sites = unequal()
    for algorithm, steps in ((FedAvg(steps=3), 3), (FedAvg(epochs=2), 2 * 5)):
        same = unequal(steps=steps)
        assert after(algorithm, sites, rounds)[0] == pytest.approx(fedavg(same, by_size(same), W0, rounds), abs=1e-12)
    half = unequal(lr=0.025)
    assert after(FedAvg(lr=0.025), sites, rounds)[0] == pytest.approx(
        fedavg(half, by_size(half), W0, rounds), abs=1e-12
    )


def test_fedavg_is_biased_where_sites_differ_and_exact_with_one_step():
    sites, one = unequal(), unequal(steps=1)
    p = by_size(sites)
    optimum = sum(p[i] * s.a * s.b.mean() for i, s in sites.items()) / sum(p[i] * s.a for i, s in sites.items())
    assert abs(after(FedAvg(), sites, 400)[0] - optimum) > 0.01
    assert after(FedAvg(), one, 2000)[0] == pytest.approx(optimum, abs=1e-9)


def test_server_optimisers_first_step():
    sites = unequal()
    d = fedavg(sites, by_size(sites), W0, 1) - W0  # the mean update of the first round
    tau, lr = 1e-3, 0.01
    expected = {
        Sgd(lr=0.5): W0 + 0.5 * d,
        Adagrad(lr=lr, b1=0.0): W0 + lr * d / ((tau**2 + d**2) ** 0.5 + tau),
        Adam(lr=lr): W0 + lr * 0.1 * d / ((0.99 * tau**2 + 0.01 * d**2) ** 0.5 + tau),
        Yogi(lr=lr): W0 + lr * 0.1 * d / ((tau**2 + 0.01 * d**2) ** 0.5 + tau),
    }
    for server, value in expected.items():
        assert after(FedAvg(server=server), sites, 1)[0] == pytest.approx(value, abs=1e-12), server


def test_server_momentum_second_step():
    sites = unequal()
    p = by_size(sites)
    one = fedavg(sites, p, W0, 1)
    second = fedavg(sites, p, one, 1) - one
    assert after(FedAvg(server=Sgd(1.0, momentum=0.9)), sites, 2)[0] == pytest.approx(
        one + second + 0.9 * (one - W0), abs=1e-12
    )


@pytest.mark.parametrize(
    "server", [Sgd(0.5), Sgd(0.5, momentum=0.5), Adagrad(0.5), Adam(0.02), Yogi(0.02)], ids=lambda s: type(s).__name__
)
def test_server_optimisers_share_fedavgs_limit(server):
    sites = unequal()
    limit = fedavg(sites, by_size(sites), W0, 10_000)
    assert after(FedAvg(server=server), sites, 1500)[0] == pytest.approx(limit, abs=2e-2)


def test_local_sites_go_their_own_way():
    sites = unequal()
    for rounds in (1, 300):
        _, memories = after(Local(), sites, rounds)
        for i, s in sites.items():
            assert memories[i]["model"]["w"] == pytest.approx(
                s.b.mean() + (1 - s.pull) ** rounds * (W0 - s.b.mean()), abs=1e-12
            )


def test_scaffold_first_round_is_fedavg_and_its_control_the_mean_gradient_of_the_path():
    sites = unequal()
    w, memories = after(Scaffold(), sites, 1)
    assert w == pytest.approx(fedavg(sites, equal(sites), W0, 1), abs=1e-12)
    for i, s in sites.items():
        path = s.b.mean() + (1 - s.lr * s.a) ** np.arange(s.steps) * (W0 - s.b.mean())
        assert memories[i]["control"]["w"] == pytest.approx((s.a * (path - s.b.mean())).mean(), abs=1e-12)


@pytest.mark.parametrize(("uniform", "share"), [(True, 1.0), (False, 1.0), (True, 0.67), (False, 0.67)])
def test_scaffold_reaches_the_true_optimum_whoever_takes_part(uniform, share):
    sites = unequal()
    p = equal(sites) if uniform else by_size(sites)
    optimum = sum(p[i] * s.a * s.b.mean() for i, s in sites.items()) / sum(p[i] * s.a for i, s in sites.items())
    assert after(Scaffold(uniform=uniform), sites, 3000, share)[0] == pytest.approx(optimum, abs=1e-6)
