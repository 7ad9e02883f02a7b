"""Every algorithm against two answers on paper: its first round and its limit."""

from dataclasses import replace

import numpy as np
import pytest

from polysite.algorithms.cfl import Cfl
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.cost_weighted import FedCostWAvg, FedPIDAvg, TopK, _blend
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.fedexp import FedExP
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedper import FedPer, LGFedAvg
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.ifca import Ifca
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.robust import GeometricMedian, Krum, Median, TrimmedMean, krum_scores
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server_optimisers import Adagrad, Adam, Sgd, Yogi
from polysite.algorithms.weighted import Weighted
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import CaseScore, Fit
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


# Four more, on which every formula of the specification has been checked by scripts of its own
A, B, N = np.array([0.5, 1.0, 2.0, 3.0]), np.array([-1.0, 0.3, 2.0, 0.9]), np.array([2, 8, 5, 5])
P, ETA, K, Q0 = N / N.sum(), 0.1, 5, 0.7
STEPS = np.array([4, 10, 8, 8])  # two epochs of 10, 40, 25 and 25 cases in batches of 8
R = (1 - ETA * A) ** K
C = 1 - R


class Frank(Quadratic):
    """Its cost, one minus its score, is its loss."""

    def score(self, params, cases):
        return {n: CaseScore({"L": 1 - loss}, loss) for n, loss in self.losses(params).items() if n in cases}


def bed(a=A, b=B, n=N, steps=None, kind=Frank):
    steps = [K] * len(b) if steps is None else steps
    return {
        f"s{i}": kind(a[i], np.full(n[i], b[i]), lr=ETA, steps=int(steps[i]), start={"w": np.array([Q0])})
        for i in range(len(b))
    }


def path(algorithm, sites, rounds, share=1.0, start=None):
    """The model after every round."""
    engine = Simulator(algorithm, sites)
    for r in run_rounds(algorithm, engine, start or {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0):
        yield r.state.model["w"].item()


def last(algorithm, sites, rounds, **kw):
    *_, found = path(algorithm, sites, rounds, **kw)
    return found


def first(algorithm, sites):
    return last(algorithm, sites, 1)


def after(algorithm, sites, rounds, share=1.0):
    """(the model or None, what each site remembers) after some rounds."""
    engine = Simulator(algorithm, sites)
    *_, last = run_rounds(algorithm, engine, START, Plan(rounds=rounds, share=share), seed=0)
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
    assert after(FedAvg(), one, 600)[0] == pytest.approx(optimum, abs=1e-9)


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
    assert after(Scaffold(uniform=uniform), sites, 1200, share)[0] == pytest.approx(optimum, abs=1e-6)


def test_fedavg_on_the_bed():
    assert first(FedAvg(), bed()) == pytest.approx(sum(P * (B + R * (Q0 - B))), abs=1e-12)
    assert last(FedAvg(), bed(), 400) == pytest.approx(sum(P * C * B) / sum(P * C), abs=1e-12)


def test_fedprox():
    mu = 0.8
    pull = (1 - (1 - ETA * (A + mu)) ** K) * A / (A + mu)
    assert first(FedProx(mu), bed()) == pytest.approx(Q0 - sum(P * pull * (Q0 - B)), abs=1e-12)
    assert last(FedProx(mu), bed(), 400) == pytest.approx(sum(P * pull * B) / sum(P * pull), abs=1e-12)
    exact = A / (A + mu)  # when the sites train to the end
    assert last(FedProx(mu), bed(steps=[150] * 4), 60) == pytest.approx(sum(P * exact * B) / sum(P * exact), abs=1e-9)


def test_fednova():
    share = (1 - (1 - ETA * A) ** STEPS) / STEPS
    sites = bed(steps=STEPS)
    assert first(FedNova(), sites) == pytest.approx(Q0 - sum(P * STEPS) * sum(P * share * (Q0 - B)), abs=1e-12)
    assert last(FedNova(), sites, 400) == pytest.approx(sum(P * share * B) / sum(P * share), abs=1e-12)


def test_fednova_forgets_the_number_of_steps_where_fedavg_does_not():
    """Small steps: FedNova rests at the optimum of sum p F, FedAvg at that of sum p tau F."""
    true, drawn = sum(P * A * B) / sum(P * A), sum(P * STEPS * A * B) / sum(P * STEPS * A)
    lr, sites = 1e-6, {i: replace(s, lr=1e-6) for i, s in bed(steps=STEPS).items()}
    for start, still, moves in ((true, FedNova(), FedAvg()), (drawn, FedAvg(), FedNova())):
        stay, go = (abs(last(x, sites, 1, start={"w": np.array([start])}) - start) / lr for x in (still, moves))
        assert stay < 1e-3 and go > 0.1


def test_fednova_with_steps_in_proportion_to_size_is_the_benchmarks_form():
    models = B + (1 - ETA * A) ** N * (Q0 - B)
    assert first(FedNova(), bed(steps=N)) == pytest.approx(Q0 + sum(P**2) * sum(models - Q0), abs=1e-12)
    assert first(FedNova("sizes"), bed(steps=N)) == pytest.approx(first(FedNova(), bed(steps=N)), abs=1e-12)


def test_fednova_by_sizes_is_the_benchmarks_form_whatever_the_steps():
    """Equations 4 and 5: gamma = K sum p^2 of the mean update; a factor of a site is one of its own term alone."""
    models, gamma = B + (1 - ETA * A) ** STEPS * (Q0 - B), len(P) * sum(P**2)
    sites = bed(steps=STEPS)
    assert first(FedNova("sizes"), sites) == pytest.approx(Q0 + gamma / len(P) * sum(models - Q0), abs=1e-12)
    assert first(FedNova("sizes"), sites) != pytest.approx(first(FedNova(), sites), abs=1e-3)
    factors = np.array([0.3, 1, 1, 1])
    q = factors * N / sum(factors * N)
    weighted = first(Weighted({"s0": 0.3}, FedNova("sizes")), sites)
    assert weighted == pytest.approx(Q0 + sum(q * N) * sum(q * (models - Q0) / N), abs=1e-12)


@pytest.mark.parametrize(
    ("server", "v"),
    [
        (Adagrad(0.05), lambda d, t: t + d * d),
        (Adam(0.05), lambda d, t: 0.99 * t + 0.01 * d * d),
        (Yogi(0.05), lambda d, t: t - 0.01 * d * d * np.sign(t - d * d)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_adaptive_servers_on_the_bed(server, v):
    d = sum(P * C * (B - Q0))
    want = Q0 + 0.05 * (1 - server.b1) * d / (np.sqrt(v(d, server.tau**2)) + server.tau)
    assert first(FedAvg(server=server), bed()) == pytest.approx(want, abs=1e-12)


def test_qfedavg_first_round():
    for q in (0.5, 1.0, 2.0):
        f, d = A / 2 * (Q0 - B) ** 2, C * (Q0 - B) / ETA
        want = Q0 - sum(f**q * d) / sum(q * f ** (q - 1) * d**2 + f**q / ETA)
        assert first(QFedAvg(q), bed()) == pytest.approx(want, abs=1e-8)


@pytest.mark.parametrize("q", [0.5, 1.0, 5.0])
def test_qfedavg_limit(q):
    a, b = np.array([1.0, 3.0]), np.array([-1.0, 2.0])
    c = 1 - (1 - ETA * a) ** K
    ratio = ((a[1] ** q * c[1]) / (a[0] ** q * c[0])) ** (1 / (2 * q + 1))
    assert last(QFedAvg(q), bed(a, b, [1, 1]), 2500) == pytest.approx((b[0] + ratio * b[1]) / (1 + ratio), abs=1e-6)


def test_qfedavg_equalises_the_losses_as_q_grows():
    a, b = np.array([1.0, 3.0]), np.array([-1.0, 2.0])
    ends = [last(QFedAvg(q), bed(a, b, [1, 1]), 1200) for q in (0.0, 1.0, 10.0)]
    gaps = [abs(np.subtract(*(a / 2 * (w - b) ** 2))) for w in ends]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 0.1 * gaps[0]


COST0 = A / 2 * (R * (Q0 - B)) ** 2  # after the first training
W1 = sum(P * (B + R * (Q0 - B)))  # the first round, by size
COST1 = A / 2 * (R * (W1 - B)) ** 2


def test_fedcostwavg():
    ratio = COST0 / COST1
    rounds = list(path(FedCostWAvg(), bed(), 900))
    want = sum((0.5 * P + 0.5 * ratio / ratio.sum()) * (B + R * (W1 - B)))
    assert rounds[:2] == pytest.approx([W1, want], abs=1e-8)
    settled = 0.5 * P + 0.5 / 4  # the ratios tend to one
    assert rounds[-1] == pytest.approx(sum(settled * C * B) / sum(settled * C), abs=1e-8)


def test_fedpidavg_without_costs_before_the_first():
    fall, history = np.maximum(COST0 - COST1, 0), COST0 + COST1
    weights = 0.45 * P + 0.45 * fall / fall.sum() + 0.1 * history / history.sum()
    rounds = list(path(FedPIDAvg(start="size"), bed(), 2))
    assert rounds == pytest.approx([W1, sum(weights * (B + R * (W1 - B)))], abs=1e-12)


def test_fedpidavg_first_round_with_costs_of_one_before():
    fall, history = np.maximum(1 - COST0, 0), COST0 + 5
    weights = 0.45 * P + 0.45 * fall / fall.sum() + 0.1 * history / history.sum()
    assert first(FedPIDAvg(), bed()) == pytest.approx(sum(weights * (B + R * (Q0 - B))), abs=1e-12)


def test_fedpidavg_weights_sum_to_one_where_nobody_improved():
    """Sites at their optimum: costs stay zero, so nobody improves and there is no history; the model must stay."""
    same = bed(b=np.full(4, Q0))
    assert list(path(FedPIDAvg(), same, 12)) == pytest.approx([Q0] * 12, abs=1e-12)
    worse = {i: replace(s, lr=-0.01) for i, s in bed().items()}  # every site gets worse: only size and history count
    *_, before, end = path(FedPIDAvg(), worse, 8)
    models = [s.b.mean() + (1 - s.lr * s.a) ** K * (before - s.b.mean()) for s in worse.values()]
    assert min(models) <= end <= max(models)


def test_fedpidavg_limit_without_the_derivative_and_no_limit_with_it():
    end = last(FedPIDAvg(beta=0.0), bed(), 600)
    cost = R**2 * A / 2 * (end - B) ** 2
    weights = (0.45 * P + 0.1 * cost / cost.sum()) / 0.55
    assert end == pytest.approx(sum(weights * C * B) / sum(weights * C), abs=1e-8)
    tail = list(path(FedPIDAvg(start="size"), bed(), 1500))[-200:]
    assert max(tail) - min(tail) > 0.1 and B.min() <= min(tail) and max(tail) <= B.max()


def test_top_k():
    best = np.argsort(COST0)[:2]
    p = P[best] / P[best].sum()
    assert first(TopK(2), bed()) == pytest.approx(sum(p * (B[best] + R[best] * (Q0 - B[best]))), abs=1e-12)
    alone = B[np.argmin(COST0)]  # the best site draws the model to itself, and stays the best
    assert last(TopK(1), bed(), 400) == pytest.approx(alone, abs=1e-9)


def test_fedexp_first_round():
    d, eps = C * (Q0 - B), 1e-3
    step = max(1, sum(d**2) / (8 * (d.mean() ** 2 + eps)))
    assert step > 1
    assert first(FedExP(eps, uniform=True), bed()) == pytest.approx(Q0 - step * d.mean(), abs=1e-12)
    step = max(1, sum(P * d**2) / (2 * (sum(P * d) ** 2 + eps)))
    assert first(FedExP(eps), bed()) == pytest.approx(Q0 - step * sum(P * d), abs=1e-12)


@pytest.mark.parametrize(("times", "settles"), [(1.3, True), (0.7, False)])
def test_fedexp_limit_is_the_mean_if_epsilon_is_large_enough(times, settles):
    c = 1 - (1 - ETA) ** K
    sites = bed(a=np.ones(4))
    near = {"w": np.array([B.mean() + 1e-4])}
    end = last(FedExP(times * c**3 * B.var() / 4, uniform=True), sites, 400, start=near)
    assert (abs(end - B.mean()) < 1e-6) == settles


def test_fedexp_swings_around_the_mean_and_serves_the_middle():
    c = 1 - (1 - ETA) ** K
    swing = np.sqrt(c * B.var() / (4 - c))
    sites, algorithm = bed(a=np.ones(4)), FedExP(0.0, uniform=True)
    begin = {"w": np.array([B.mean() + swing])}
    state = algorithm.init(begin, sorted(sites))
    sent = algorithm.send(state, sorted(sites))
    state = algorithm.merge(state, {i: algorithm.local(sent[i], Payload(), s)[0] for i, s in sites.items()})
    assert state.model["w"] == pytest.approx(B.mean() - swing, abs=1e-12)
    ((served, _),) = algorithm.serve(algorithm.send(state, ["s0"])["s0"], Payload(), sites["s0"], ("0",))
    assert served["w"] == pytest.approx(B.mean(), abs=1e-12)


def test_feddyn_first_round():
    alpha = 0.7
    aim = (A * B + alpha * Q0) / (A + alpha)
    models = aim + (1 - ETA * (A + alpha)) ** K * (Q0 - aim)
    engine = Simulator(FedDyn(alpha), bed())
    (only,) = run_rounds(FedDyn(alpha), engine, {"w": np.array([Q0])}, Plan(rounds=1), seed=0)
    assert only.state.model["w"] == pytest.approx(2 * models.mean() - Q0, abs=1e-12)
    got = np.array([engine.memories()[f"s{i}"]["gradient"]["w"].item() for i in range(4)])
    assert got == pytest.approx(-alpha * (models - Q0), abs=1e-12)


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 500), (0.5, 1500)])
def test_feddyn_reaches_the_true_optimum_whoever_takes_part(share, rounds):
    optimum = sum(A * B) / sum(A)
    engine = Simulator(FedDyn(0.7), bed())
    *_, end = run_rounds(FedDyn(0.7), engine, {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0)
    assert end.state.model["w"] == pytest.approx(optimum, abs=1e-7)
    gradients = np.array([engine.memories()[f"s{i}"]["gradient"]["w"].item() for i in range(4)])
    assert gradients == pytest.approx(A * (optimum - B), abs=1e-6)
    assert end.state.h["w"] == pytest.approx(gradients.mean(), abs=1e-7)
    assert abs(last(FedAvg(uniform=True), bed(), 400) - optimum) > 0.01  # where FedAvg does not


def test_feddyn_when_a_site_joins_late():
    """h stays the mean over all sites: 4 become 5, and the newcomer has no gradient yet."""
    algorithm, sites = FedDyn(0.7), bed()
    state = algorithm.init({"w": np.array([Q0])}, sorted(sites))
    memory = {i: Payload() for i in sites}
    for late in (False, True):
        here = {**sites, **({"new": sites["s0"]} if late else {})}
        sent, replies = algorithm.send(state, sorted(here)), {}
        for i, s in here.items():
            replies[i], memory[i] = algorithm.local(sent[i], memory.get(i, Payload()), s)
        state = algorithm.merge(state, replies)
    mean = np.mean([m["gradient"]["w"].item() for m in memory.values()])
    assert len(state.sites) == 5 and state.h["w"] == pytest.approx(mean, abs=1e-12)


SPREAD = np.array([0.0, 0.2, 0.3, 0.9, 50.0])
SHRINK = (1 - ETA) ** K


@pytest.mark.parametrize(
    ("algorithm", "point"),
    [
        (Median(), 0.3),
        (TrimmedMean(0.2), np.mean([0.2, 0.3, 0.9])),
        (Krum(f=1), 0.2),
        (Krum(f=1, keep=3), 1 / 6),
        (GeometricMedian(iterations=3000, tolerance=0.0), 0.3),
    ],
    ids=["median", "trimmed mean", "krum", "multi-krum", "geometric median"],
)
def test_robust_means(algorithm, point):
    """Equal curvature: the first round goes to r w0 + (1 - r) m, the limit is m, the robust middle of the optima."""
    sites = bed(a=np.ones(5), b=SPREAD, n=[3] * 5)
    assert first(algorithm, sites) == pytest.approx(SHRINK * Q0 + (1 - SHRINK) * point, abs=1e-6)
    assert last(algorithm, sites, 150) == pytest.approx(point, abs=1e-6)


def of(points, weights=None):
    weights = weights or [1] * len(points)
    return {
        f"s{i}": Payload(model={"w": np.asarray(x, float)}, weight=w)
        for i, (x, w) in enumerate(zip(points, weights, strict=True))
    }


def test_krum_scores_take_squares_of_the_nearest_others():
    scores = krum_scores(of([[x] for x in SPREAD]), 2)
    assert [scores[f"s{i}"] for i in range(4)] == pytest.approx([0.04 + 0.09, 0.04 + 0.01, 0.01 + 0.09, 0.36 + 0.49])


def test_geometric_median_in_the_plane():
    triangle = [[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]]
    rule = GeometricMedian(iterations=3000, tolerance=0.0)
    state = rule.init({"w": np.zeros(2)}, ["s0", "s1", "s2"])
    assert rule.merge(state, of(triangle)).model["w"] == pytest.approx(np.mean(triangle, 0), abs=1e-8)
    assert rule.merge(state, of(triangle, [0.6, 0.2, 0.2])).model["w"] == pytest.approx(triangle[0], abs=1e-4)
    four = [[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]]  # a point inside the triangle of the others is the median
    assert rule.merge(state, of(four)).model["w"] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_weighted_first_round_and_limit():
    omega = np.array([1.0, 0.3, 1.0, 2.0])
    p = omega * N / sum(omega * N)
    algorithm = Weighted({"s1": 0.3, "s3": 2.0})
    assert first(algorithm, bed()) == pytest.approx(sum(p * (B + R * (Q0 - B))), abs=1e-12)
    assert last(algorithm, bed(), 400) == pytest.approx(sum(p * C * B) / sum(p * C), abs=1e-12)
    optimum = sum(p * A * B) / sum(p * A)
    inner = Scaffold(uniform=False)
    assert last(replace(algorithm, inner=inner), bed(), 1200) == pytest.approx(optimum, abs=1e-6)
    assert last(replace(algorithm, inner=inner), bed(), 1500, share=0.5) == pytest.approx(optimum, abs=1e-6)


GROUPS = {"south": ("s3", "s1"), "north": ("s0", "s2")}
MEMBERS = {"south": [1, 3], "north": [0, 2]}


def models_of_groups(algorithm, rounds, share=1.0):
    engine = Simulator(algorithm, bed())
    *_, end = run_rounds(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0)
    return {name: state.model["w"].item() for name, state in end.state.groups.items()}


def test_clustered_first_round_is_the_mean_of_every_group():
    found = models_of_groups(Clustered(GROUPS), 1)
    assert found.keys() == MEMBERS.keys()
    for name, k in MEMBERS.items():
        p = N[k] / sum(N[k])
        assert found[name] == pytest.approx(sum(p * (B[k] + R[k] * (Q0 - B[k]))), abs=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_clustered_limit_is_the_optimum_of_every_group(share):
    """With one step for FedAvg, or SCAFFOLD inside, the minimiser of sum_k p_k F_k over the sites of the group."""
    optimum = {name: sum(N[k] * A[k] * B[k]) / sum(N[k] * A[k]) for name, k in MEMBERS.items()}
    assert abs(optimum["north"] - optimum["south"]) > 0.5
    found = models_of_groups(Clustered(GROUPS, Scaffold(uniform=False)), 1200, share)
    assert found == pytest.approx(optimum, abs=1e-6)
    if share == 1:
        assert models_of_groups(Clustered(GROUPS, FedAvg(steps=1)), 800) == pytest.approx(optimum, abs=1e-9)
        biased = {name: sum(N[k] * C[k] * B[k]) / sum(N[k] * C[k]) for name, k in MEMBERS.items()}
        assert models_of_groups(Clustered(GROUPS), 400) == pytest.approx(biased, abs=1e-12)


def test_factors_hold_inside_a_group():
    omega = np.array([1.0, 0.3, 1.0, 2.0])
    for algorithm in (
        Weighted({"s1": 0.3, "s3": 2.0}, Clustered(GROUPS)),
        Clustered(GROUPS, Weighted({"s1": 0.3, "s3": 2.0})),
    ):
        for name, found in models_of_groups(algorithm, 1).items():
            k = MEMBERS[name]
            p = omega[k] * N[k] / sum(omega[k] * N[k])
            assert found == pytest.approx(sum(p * (B[k] + R[k] * (Q0 - B[k]))), abs=1e-12)


TWO = {"body.w": np.array([3.0]), "head.w": np.array([0.5])}


def test_moon_second_round_on_paper():
    """One step of training: the gradient of the contrast, seen from the received model, is (1 - q)/T dcos(w, w_k)."""
    mu, temperature, a, b = 20.0, 0.5, np.array([1.0, 2.0]), np.array([-1.0, 4.0])
    sites = {f"s{i}": Quadratic(a[i], np.array([b[i]]), steps=1, lr=ETA, start=TWO) for i in range(2)}
    algorithm = Moon(mu, temperature)
    *_, end = run_rounds(algorithm, Simulator(algorithm, sites), TWO, Plan(rounds=2), seed=0)
    w0 = np.array([3.0, 0.5])
    mine = [w0 - ETA * a[i] * (w0.sum() - b[i]) for i in range(2)]
    w1, found = np.mean(mine, 0), []
    for i in range(2):
        cos = w1 @ mine[i] / np.linalg.norm(w1) / np.linalg.norm(mine[i])
        slope = mine[i] / np.linalg.norm(w1) / np.linalg.norm(mine[i]) - cos * w1 / (w1 @ w1)
        q = 1 / (1 + np.exp((cos - 1) / temperature))
        found.append(w1 - ETA * (a[i] * (w1.sum() - b[i]) + mu * (1 - q) / temperature * slope))
    got = np.concatenate(list(end.state.model.values()))
    assert got == pytest.approx(np.mean(found, 0), abs=1e-12)
    assert abs(got - (w1 - ETA * np.mean(a * (w1.sum() - b)))).max() > 1e-3  # and it is not FedAvg's


def test_moon_of_equal_sites_is_fedavg_to_its_limit():
    sites = {i: Quadratic(2.0, np.array([1.0]), start=TWO) for i in "ab"}
    for rounds in (1, 2, 200):
        *_, moon = run_rounds(Moon(5.0), Simulator(Moon(5.0), sites), TWO, Plan(rounds=rounds), seed=0)
        *_, plain = run_rounds(FedAvg(), Simulator(FedAvg(), sites), TWO, Plan(rounds=rounds), seed=0)
        for k in TWO:
            assert moon.state.model[k] == pytest.approx(plain.state.model[k], abs=1e-9)
    assert sum(moon.state.model.values()) == pytest.approx(1.0)


def test_qfedavg_where_rates_differ_and_losses_vanish():
    """Every site counts with its own L; a loss of zero is no division by zero, and such a site does not pull."""
    found = {
        "s0": Payload(model={"w": np.array([1.0])}, weight=1, loss=0.5, lr=0.1),
        "s1": Payload(model={"w": np.array([3.0])}, weight=1, loss=2.0, lr=0.4),
    }
    rule = QFedAvg(1.0)
    state = rule.init({"w": np.array([0.0])}, ["s0", "s1"])
    f, steep, moved = np.array([0.5, 2.0]), np.array([10.0, 2.5]), np.array([1.0, 3.0])
    want = sum(f * steep * moved) / sum((steep * moved) ** 2 + steep * f)
    assert rule.merge(state, found).model["w"] == pytest.approx(want, abs=1e-8)
    calm = {**found, "s0": Payload(**{**found["s0"], "loss": 0.0})}
    alone = 2.0 * 2.5 * 3 / ((2.5 * 3) ** 2 + 2.5 * 2.0 + (10.0 * 1.0) ** 2)  # h keeps the curvature of the other
    assert rule.merge(state, calm).model["w"] == pytest.approx(alone, abs=1e-6)
    none = {i: Payload(**{**p, "loss": 0.0}) for i, p in found.items()}
    for q in (0.5, 1.0, 50.0):
        assert np.isfinite(QFedAvg(q).merge(state, none).model["w"]).all()


@pytest.mark.parametrize("augmented", [False, True])
def test_qfedavg_measures_the_received_model_as_it_is_told(augmented):
    class Asked(Quadratic):
        def losses(self, params, *, augmented=False):
            asked.append((params["w"].item(), augmented))
            return {"0": 0.25}

    asked = []
    reply, _ = QFedAvg(1.0, augmented).local(Payload(model=START), Payload(), Asked(1.0, np.array([0.0])))
    assert asked[0] == (W0, augmented) and reply["loss"] == 0.25


def test_fedexp_remembers_the_model_before_and_stands_still_where_nothing_moves():
    sites, algorithm = bed(), FedExP(0.0)
    state = algorithm.init({"w": np.array([Q0])}, sorted(sites))
    for _ in range(3):
        sent = algorithm.send(state, sorted(sites))
        new = algorithm.merge(state, {i: algorithm.local(sent[i], Payload(), s)[0] for i, s in sites.items()})
        assert new.before["w"] == state.model["w"] != new.model["w"]
        state = new
    still = {i: Payload(model=state.model, weight=1) for i in sites}
    assert algorithm.merge(state, still).model["w"] == state.model["w"]


def test_feddyn_keeps_the_mean_of_all_gradients_when_sites_are_absent():
    engine = Simulator(FedDyn(0.7), bed())
    for r in run_rounds(FedDyn(0.7), engine, {"w": np.array([Q0])}, Plan(rounds=9, share=0.5), seed=0):
        known = [m["gradient"]["w"].item() for m in engine.memories().values() if m]
        assert r.state.h["w"] == pytest.approx(sum(known) / 4, abs=1e-12)


def costs_of(*rounds):
    """FedPIDAvg's state after rounds of {site: cost}; every site sends its name's number as its model."""
    rule = FedPIDAvg(start="size")
    state = rule.init({"w": np.array([0.0])}, ["1", "2", "3"])
    for costs in rounds:
        state = rule.merge(
            state, {i: Payload(model={"w": np.array([float(i)])}, size=1, cost=c) for i, c in costs.items()}
        )
    return state


def test_fedpidavg_with_an_absent_site():
    """Its last cost stays, its terms are left out of the sums, and it goes on from there when it is back."""
    state = costs_of({"1": 0.9, "2": 0.8, "3": 0.7}, {"1": 0.5, "2": 0.7})
    assert state.costs == {"1": (0.9, 0.5), "2": (0.8, 0.7), "3": (0.7,)}
    p1 = 0.45 / 2 + 0.45 * 0.4 / 0.5 + 0.1 * 1.4 / 2.9
    assert state.model["w"] == pytest.approx(p1 * 1 + (1 - p1) * 2)
    state = costs_of({"1": 0.9, "2": 0.8, "3": 0.7}, {"1": 0.5, "2": 0.7}, {"2": 0.7, "3": 0.6})
    p2 = 0.45 / 2 + 0.45 * 0.0 + 0.1 * 2.2 / 3.5
    assert state.model["w"] == pytest.approx(p2 * 2 + (1 - p2) * 3)


def test_fedpidavg_remembers_six_costs():
    state = costs_of(*({"1": 1.0 - 0.1 * k, "2": 0.5} for k in range(8)))
    assert state.costs["1"] == pytest.approx((0.8, 0.7, 0.6, 0.5, 0.4, 0.3)) and state.costs["2"] == (0.5,) * 6


@pytest.mark.parametrize("fall", [{"1": 0.0, "2": 0.0}, {"1": 0.3, "2": 0.1}])
@pytest.mark.parametrize("history", [{"1": 0.0, "2": 0.0}, {"1": 2.0, "2": 6.0}])
def test_cost_weights_sum_to_one_whatever_is_zero(fall, history):
    replies = {"1": Payload(), "2": Payload()}
    weights = _blend(replies, (0.45, {"1": 3.0, "2": 1.0}), (0.45, fall), (0.1, history))
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-15) and min(weights.values()) > 0


def test_a_cost_is_of_validation_cases_and_of_quality_not_loss():
    class Split(Quadratic):
        def cases(self, split):
            return {"train": ("0", "1"), "validation": self.kept, "test": ()}[split]

        def score(self, params, cases):
            return {n: CaseScore({"WT": 0.25 if n == "v" else 0.75, "TC": 0.5}, loss=9.0) for n in cases}

        def losses(self, params, *, augmented=False):
            return {"0": 1.0, "1": 1.0}

    for kept, cost in ((("v",), 0.625), ((), 0.375)):
        site = Split(1.0, np.array([0.0, 1.0]))
        site.kept = kept
        reply, _ = FedPIDAvg().local(Payload(model=START), Payload(), site)
        assert reply["cost"] == pytest.approx(cost)


def test_geometric_median_starts_from_the_mean_by_size():
    points, weights = np.array([[0.0], [1.0], [4.0]]), np.array([1.0, 1.0, 2.0])
    rule = GeometricMedian(iterations=1)
    centre = weights @ points / 4
    pull = weights / np.abs(points - centre).ravel()
    merged = rule.merge(rule.init({"w": np.zeros(1)}, []), of(points, list(weights))).model["w"]
    assert merged == pytest.approx(pull @ points / pull.sum())


def test_a_share_of_the_sites_is_counted_without_rounding_errors():
    assert [TrimmedMean(0.29)._cut(100), TrimmedMean(0.1)._cut(30), TrimmedMean(0.2)._cut(4)] == [29, 3, 0]


@pytest.mark.parametrize(
    "rule", [QFedAvg(1.0), FedExP(1e-3), Krum(f=1), GeometricMedian()], ids=lambda r: type(r).__name__
)
def test_running_statistics_are_no_part_of_a_distance(rule):
    def merged(statistic):
        found = {}
        for i, x in enumerate((0.0, 0.2, 0.3, 0.9, 5.0)):
            model = {"w": np.array([x]), "norm.running_var": np.array([statistic * (i + 1.0)])}
            found[f"s{i}"] = Payload(model=model, weight=1, loss=1.0, lr=0.1)
        start = {"w": np.array([-1.0]), "norm.running_var": np.array([1.0])}
        return rule.merge(rule.init(start, sorted(found)), found).model["w"]

    assert merged(1.0) == merged(1e4)


def scaffold_control(state, memories):
    """The mean of the c_k of all sites by their weights, those that were never heard included."""
    total = sum(state.weights.values()) + len(state.awaited)
    return sum(w * memories[i]["control"]["w"].item() for i, w in state.weights.items()) / total


@pytest.mark.parametrize("algorithm", [Scaffold(), Scaffold(uniform=False), Weighted({"s1": 0.3}, Scaffold())], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_scaffolds_control_is_always_the_mean_of_the_sites(algorithm, share):
    engine = Simulator(algorithm, bed())
    for r in run_rounds(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=12, share=share), seed=0):
        assert r.state.control["w"] == pytest.approx(scaffold_control(r.state, engine.memories()), abs=1e-12)


def test_scaffold_second_round_and_server_rate():
    """y <- y - eta (a (y - b) - c_k + c) from w_1; c_k' = c_k - c + (w_1 - y) / (K eta)."""
    rate = 0.6
    first = B + R * (Q0 - B)
    w1 = Q0 + rate * (first.mean() - Q0)
    own = (Q0 - first) / (K * ETA)
    aim = B + (own - own.mean()) / A  # where the corrected gradient vanishes
    second = aim + R * (w1 - aim)
    engine = Simulator(Scaffold(server_lr=rate), bed())
    *_, end = run_rounds(Scaffold(server_lr=rate), engine, {"w": np.array([Q0])}, Plan(rounds=2), seed=0)
    assert end.state.model["w"] == pytest.approx(w1 + rate * (second.mean() - w1), abs=1e-12)
    found = np.array([engine.memories()[f"s{i}"]["control"]["w"].item() for i in range(4)])
    assert found == pytest.approx(own - own.mean() + (w1 - second) / (K * ETA), abs=1e-12)


def test_scaffold_stays_right_when_a_site_grows():
    """Its weight in the mean of the models follows at once, that in the control does not, so that c stays a mean."""
    sites, algorithm = bed(), Scaffold(uniform=False)
    engine, state = Simulator(algorithm, sites), None
    for r in run_rounds(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=40), seed=0):
        if r.index == 4:
            sites["s0"].b = np.full(40, B[0])
            engine.sites["s0"] = sites["s0"]
        state = r.state
        assert state.control["w"] == pytest.approx(scaffold_control(state, engine.memories()), abs=1e-12)


def test_fedcostwavg_weighs_a_newcomer_by_its_size():
    rule = FedCostWAvg(0.5)
    state = rule.init({"w": np.array([0.0])}, ["1", "2", "3"])
    for costs in ({"1": 0.8, "2": 0.8}, {"1": 0.4, "2": 0.8, "3": 0.6}):
        found = {i: Payload(model={"w": np.array([float(i)])}, size=2, cost=c) for i, c in costs.items()}
        state = rule.merge(state, found)
    p1 = 0.5 / 3 + 0.5 * (2 / 3) * (2 / 3)
    assert state.model["w"] == pytest.approx(p1 * 1 + (2 / 3 - p1) * 2 + 1 / 3 * 3)
    alone = FedCostWAvg(0.0)
    assert last(alone, bed(), 1) == pytest.approx(W1)


def test_geometric_median_holds_statistics_too():
    found = {f"s{i}": Payload(model={"w": np.array([x]), "n.running_var": np.array([1.0])}, weight=1)
             for i, x in enumerate((0.0, 0.2, 0.3, 0.9))}  # fmt: skip
    found["loud"] = Payload(model={"w": np.array([1e6]), "n.running_var": np.array([1e6])}, weight=1)
    rule = GeometricMedian()
    merged = rule.merge(rule.init(found["s0"]["model"], sorted(found)), found).model
    assert merged["n.running_var"] == pytest.approx(1.0, abs=1.0) and merged["w"] < 1


def own(algorithm, rounds, sites=None, start=None, field="model", name="w", share=1.0):
    """(the shared model after every round, what the sites keep after every round)."""
    sites, start = sites or bed(), start or {"w": np.array([Q0])}
    engine, models, kept = Simulator(algorithm, sites), [], []
    for r in run_rounds(algorithm, engine, start, Plan(rounds=rounds, share=share), seed=0):
        models.append(r.state.model)
        kept.append(np.array([engine.memories()[i][field][name].item() for i in sites]))
    return models, kept


def test_ditto_first_two_rounds_and_limit():
    """v starts at w_0 and is drawn to the model that was received, not to what the site or the server made of it."""
    lam, steps = 0.6, 3
    models, kept = own(Ditto(lam, own_steps=steps), 400)
    w = [Q0, *(m["w"].item() for m in models)]
    v, q = np.full(4, Q0), (1 - ETA * (A + lam)) ** steps
    for k in range(2):
        assert w[k + 1] == pytest.approx(sum(P * (B + R * (w[k] - B))), abs=1e-12)  # FedAvg
        aim = (A * B + lam * w[k]) / (A + lam)
        v = aim + q * (v - aim)
        assert kept[k] == pytest.approx(v, abs=1e-12)
    limit = sum(P * C * B) / sum(P * C)
    assert w[-1] == pytest.approx(limit, abs=1e-12)
    assert kept[-1] == pytest.approx((A * B + lam * limit) / (A + lam), abs=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "rate", "steps"),
    [
        (Ditto(0.6, lr=0.05), 0.05, K),
        (Ditto(0.6, lr=0.05, own_lr=0.02), 0.02, K),
        (Ditto(0.6, steps=3), ETA, 3),
        (Ditto(0.6, epochs=2), ETA, 2 * K),
        (Ditto(0.6, steps=3, own_epochs=2), ETA, 2 * K),
    ],
    ids=str,
)
def test_ditto_trains_its_own_model_as_it_is_told(algorithm, rate, steps):
    models, kept = own(algorithm, 1)
    plain = FedAvg(lr=algorithm.lr, epochs=algorithm.epochs, steps=algorithm.steps)
    assert models[0]["w"] == pytest.approx(first(plain, bed()), abs=1e-15)
    aim = (A * B + 0.6 * Q0) / (A + 0.6)
    assert kept[0] == pytest.approx(aim + (1 - rate * (A + 0.6)) ** steps * (Q0 - aim), abs=1e-12)


def test_ditto_serves_its_own_model_and_strangers_the_shared_one():
    algorithm, engine = Ditto(0.6), Simulator(Ditto(0.6), bed())
    *_, end = run_rounds(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=3), seed=0)
    sent = algorithm.send(end.state, ["s0", "new"])
    served = [
        next(algorithm.serve(sent[i], engine.memories().get(i, Payload()), bed()["s0"], ("0",)))[0]["w"]
        for i in ("s0", "new")
    ]
    assert served[0] == engine.memories()["s0"]["model"]["w"] != end.state.model["w"] == served[1]


def test_dittos_own_models_never_leave_a_site():
    algorithm = Ditto(0.6)
    engine, kept, crossed = Simulator(algorithm, bed()), set(), set()
    for r in run_rounds(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=9, share=0.5), seed=0):
        kept |= {m["model"]["w"].item() for m in engine.memories().values() if m}
        crossed |= {p["model"]["w"].item() for p in (*r.sent.values(), *(x.payload for x in r.replies.values()))}
    assert len(kept) == 18 and not kept & crossed


SPLITS = {"body.w": np.array([0.7]), "head.w": np.array([-0.2])}
PRIVATE = pytest.mark.parametrize(
    ("algorithm", "shared", "private"),
    [(FedPer(), "body.w", "head.w"), (LGFedAvg(("body.*",)), "head.w", "body.w")],
    ids=["fedper", "lg-fedavg"],
)


def two_part_bed():
    return {i: replace(s, start=SPLITS) for i, s in bed(kind=Quadratic).items()}


@PRIVATE
def test_private_layers_first_two_rounds_and_limit(algorithm, shared, private):
    """F_k = a/2 (u + v - b)^2: u and v move alike, and u - sum p v never changes, so that it tells the limit."""
    models, kept = own(algorithm, 800, two_part_bed(), SPLITS, "private", private)
    u, v, pull = SPLITS[shared].item(), np.full(4, SPLITS[private].item()), (1 - (1 - 2 * ETA * A) ** K) / 2
    constant = u - sum(P * v)
    for k in range(2):
        off = u + v - B
        u, v = u - sum(P * pull * off), v - pull * off
        assert models[k].keys() == {shared}
        assert models[k][shared] == pytest.approx(u, abs=1e-12) and kept[k] == pytest.approx(v, abs=1e-12)
    limit = (constant + sum(P * B)) / 2
    assert models[-1][shared] == pytest.approx(limit, abs=1e-9) and kept[-1] == pytest.approx(B - limit, abs=1e-9)


class Product(Quadratic):
    """F = (e h - b)^2 / 2, of an encoder and a head."""

    def losses(self, params, *, augmented=False):
        return {"0": float((params["encoder.w"] * params["head.w"] - self.b.mean()).item() ** 2 / 2)}

    def fit(self, params, **kw):
        e, h = params["encoder.w"], params["head.w"]
        for _ in range(self.steps):
            off = e * h - self.b.mean()
            e, h = e - self.lr * h * off, h - self.lr * e * off
        return Fit({"encoder.w": e, "head.w": h}, 0.0, self.steps, self.steps * self.lr, self.steps * self.lr)


def test_which_layers_are_shared():
    """One step from (e, h): FedPer averages e by the slope h, LG-FedAvg averages h by the slope e."""
    e, h = 0.6, 1.1
    start, off = {"encoder.w": np.array([e]), "head.w": np.array([h])}, e * h - sum(P * B)
    sites = {f"s{i}": Product(1.0, np.full(N[i], B[i]), lr=ETA, steps=1, start=start) for i in range(4)}
    for algorithm, shared, private, want in (
        (FedPer(), "encoder.w", "head.w", e - ETA * h * off),
        (LGFedAvg(("encoder.*",)), "head.w", "encoder.w", h - ETA * e * off),
    ):
        models, kept = own(algorithm, 1000, sites, start, "private", private)
        assert models[0][shared] == pytest.approx(want, abs=1e-12)
        assert kept[-1] * models[-1][shared].item() == pytest.approx(B, abs=1e-9)  # every site reaches its optimum


@PRIVATE
def test_who_is_absent_keeps_its_private_part_and_who_is_new_gets_the_first_one(algorithm, shared, private):
    sites, memory = two_part_bed(), {}
    state = algorithm.init(SPLITS, sorted(sites))
    for cohort in (["s0", "s1"], ["s1", "s2"]):
        before, sent, replies = dict(memory), algorithm.send(state, cohort), {}
        for i in cohort:
            replies[i], memory[i] = algorithm.local(sent[i], memory.get(i, Payload()), sites[i])
        state = algorithm.merge(state, replies)
    assert memory["s0"] is before["s0"] and memory["s1"] != before["s1"]
    got = algorithm.send(state, ["new"])["new"]
    for kept, own_part in ((Payload(), SPLITS[private]), (memory["s0"], memory["s0"]["private"][private])):
        ((served, _),) = algorithm.serve(got, kept, sites["s0"], ("0",))
        assert served[shared] == state.model[shared] and served[private] == own_part


def test_a_server_that_sends_what_is_private_is_not_listened_to_and_not_answered():
    sites = two_part_bed()
    sent = Payload(model={"body.w": np.array([0.1]), "head.w": np.array([99.0])})
    reply, kept = FedPer().local(sent, Payload(), sites["s0"])
    fair, same_kept = FedPer().local(Payload(model={"body.w": np.array([0.1])}), Payload(), sites["s0"])
    assert reply == fair and kept == same_kept and reply["model"].keys() == {"body.w"}


def test_running_statistics_stay_with_the_parameters_of_their_layer():
    start = {
        "stem.w": np.array([1.0]),
        "head.norm.weight": np.array([0.5]),
        "head.norm.running_var": np.array([16.0]),
        "stem.norm.running_var": np.array([16.0]),
    }
    sites = {i: Quadratic(a, np.array([1.0]), start=start) for i, a in (("a", 1.0), ("b", 3.0))}
    for patterns in (("head.*",), ("head.norm.weight",)):
        algorithm, engine = FedPer(patterns), Simulator(FedPer(patterns), sites)
        *_, end = run_rounds(algorithm, engine, start, Plan(rounds=2), seed=0)
        assert end.state.model.keys() == {"stem.w", "stem.norm.running_var"}
        assert end.state.model["stem.norm.running_var"] == pytest.approx(0.81 * 16 + 0.19 * (1 + 9) / 2)
        for i, s in sites.items():
            assert engine.memories()[i]["private"]["head.norm.running_var"] == pytest.approx(0.81 * 16 + 0.19 * s.a**2)


TWO_KINDS = np.array([0.9, -1.1, 1.1, -0.9])  # optima of two populations, mixed


def cfl(algorithm, sites, rounds, share=1.0, start=None, engine=None):
    """Every state."""
    start = start or {"w": np.array([Q0])}
    engine = engine or Simulator(algorithm, sites)
    return [r.state for r in run_rounds(algorithm, engine, start, Plan(rounds=rounds, share=share), seed=0)]


def groups(state):
    return {tuple(i for i in state.places if state.places[i] == place) for place in state.places.values()}


def test_cfl_first_round_split_and_limit():
    """FedAvg until it stands still at the mean; there a site at distance d moves by c d, and the sides part."""
    sites, c = bed(a=np.ones(4), b=TWO_KINDS, n=[2, 6, 2, 2]), 1 - (1 - ETA) ** K
    p = np.array([2, 6, 2, 2]) / 12
    middle = sum(p * TWO_KINDS)
    furthest = c * max(abs(TWO_KINDS - middle))
    states = cfl(Cfl(eps1=1e-3, eps2=0.99 * furthest, after=0), sites, 300)
    assert states[0].clusters[""].model["w"] == pytest.approx(Q0 + c * (middle - Q0), abs=1e-12)
    when = next(k for k, s in enumerate(states) if len(s.clusters) > 1)
    at = [middle + (1 - c) ** k * (Q0 - middle) for k in range(when + 2)]  # the model before round k
    assert c * abs(at[when] - middle) < 1e-3 <= c * abs(at[when - 1] - middle)
    split = states[when]
    assert split.clusters[""].model["w"] == pytest.approx(at[when], abs=1e-12)  # where the updates are from
    for half in "01":
        assert split.clusters[half].model["w"] == pytest.approx(at[when + 1], abs=1e-12)
    assert groups(split) == groups(states[-1]) == {("s0", "s2"), ("s1", "s3")}
    assert states[-1].clusters["0"].model["w"] == pytest.approx(1.0, abs=1e-9)
    assert states[-1].clusters["1"].model["w"] == pytest.approx((6 * -1.1 + 2 * -0.9) / 8, abs=1e-9)
    assert len(cfl(Cfl(eps1=1e-3, eps2=1.01 * furthest, after=0), sites, 300)[-1].clusters) == 1
    late = cfl(Cfl(eps1=1e-3, eps2=0.99 * furthest, after=40), sites, 60)
    assert [len(s.clusters) for s in late] == [1] * 40 + [3] * 20


def test_cfl_measures_against_the_first_round_if_told():
    """All lengths ten times as long: thresholds that are relative split in the same round, the others do not."""

    def when(algorithm, scale):
        sites = bed(a=np.ones(4), b=scale * TWO_KINDS)
        return [len(s.clusters) for s in cfl(algorithm, sites, 60, start={"w": np.array([scale * Q0])})].count(1)

    relative, plain = Cfl(0.05, 0.2, relative=True, after=0), Cfl(0.05, 0.2, after=0)
    assert when(relative, 1.0) == when(relative, 10.0) < 60 and when(plain, 1.0) != when(plain, 10.0)
    longest = (1 - (1 - ETA) ** K) * max(abs(TWO_KINDS - Q0))
    states = cfl(relative, bed(a=np.ones(4), b=TWO_KINDS), 9)
    assert [s.unit for s in states] == pytest.approx([longest] * 9, abs=1e-12)


def merged_at(algorithm, angles, length=1.0, names=None, weights=None):
    """The state after one round, in which sites moved in these directions of the plane, with mean zero removed."""
    points = length * np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], 1)
    names = names or [f"s{i}" for i in range(len(points))]
    state = algorithm.init({"w": np.zeros(2)}, names)
    found = {i: Payload(model={"w": x}, weight=w) for i, x, w in zip(names, points, weights or [1] * 9, strict=False)}
    return algorithm.merge(state, found)


@pytest.mark.parametrize(("gamma_max", "splits"), [(0.0, True), (0.49, True), (0.51, False), (1.0, False)])
def test_cfl_splits_at_an_angle_wider_than_the_noise_explains(gamma_max, splits):
    """Sixty degrees apart: sin(60 / 2) = 0.5."""
    state = merged_at(Cfl(eps1=2.0, eps2=0.5, after=0, gamma_max=gamma_max), [0, 10, 70])
    assert groups(state) == ({("s0", "s1"), ("s2",)} if splits else {("s0", "s1", "s2")})


def test_cfl_does_not_part_sites_that_move_alike():
    assert len(merged_at(Cfl(eps1=2.0, eps2=0.5, after=0), [30, 30, 30]).clusters) == 1


def test_cfl_parts_by_either_linkage():
    angles = [0, 67, 88, 119, 160]
    assert groups(merged_at(Cfl(split_at=(1,)), angles)) == {("s0",), ("s1", "s2", "s3", "s4")}
    assert groups(merged_at(Cfl(split_at=(1,), linkage="complete"), angles)) == {("s0", "s1", "s2"), ("s3", "s4")}


def test_cfl_knows_a_mean_by_weights_and_no_statistics():
    """A site of many cases makes the mean update long; a huge running mean makes nothing longer or more alike."""
    rule = Cfl(eps1=0.1, eps2=0.5, after=0)
    assert len(merged_at(rule, [0, 0, 180, 180]).clusters) == 3
    assert len(merged_at(rule, [0, 0, 180, 180], weights=[5, 1, 1, 1]).clusters) == 1
    names, moves = list("abcd"), (1.0, 1.0, -1.0, -1.0)
    start = {"w": np.zeros(1), "norm.running_mean": np.zeros(1)}
    for statistic in (0.0, 1e6):
        found = {
            i: Payload(model={"w": np.array([x]), "norm.running_mean": np.array([statistic * k])}, weight=k + 1)
            for k, (i, x) in enumerate(zip(names, moves, strict=True))
        }
        state = replace(rule, eps1=0.5).merge(rule.init(start, names), found)
        assert groups(state) == {("a", "b"), ("c", "d")} and state.clusters[""].updates["a"].keys() == {"w"}
        assert state.clusters["0"].model["norm.running_mean"] == pytest.approx(statistic * (2 + 6 + 12) / 10)


def test_cfl_a_site_that_does_not_move_is_like_nobody():
    state = Cfl(split_at=(1,)).init({"w": np.zeros(1)}, "abc")
    found = {i: Payload(model={"w": np.array([x])}, weight=1) for i, x in zip("abc", (1.0, 0.0, 2.0), strict=True)}
    assert groups(Cfl(split_at=(1,)).merge(state, found)) == {("a", "c"), ("b",)}


@pytest.mark.parametrize("seed", range(6))
def test_cfl_splits_twice_and_never_mixes_up_names(seed):
    """Three populations under shuffled names: first the one below zero leaves, then the two above part."""
    order = np.random.default_rng(seed).permutation(9)
    optima = np.repeat([6.0, 2.0, -3.0], 3)[order]
    sites = bed(a=np.ones(9), b=optima, n=[3] * 9)
    states = cfl(Cfl(eps1=0.01, eps2=0.1, after=0), sites, 200)
    kinds = {tuple(f"s{i}" for i in np.flatnonzero(optima == x)) for x in (6.0, 2.0, -3.0)}
    assert groups(states[-1]) == kinds
    for state in states:  # who once went apart stays apart, and every name is there once
        assert sorted(state.places) == sorted(sites)
        assert all(set(few) <= next(set(g) for g in groups(state) if few[0] in g) for few in kinds)
    for i, place in states[-1].places.items():
        assert states[-1].clusters[place].model["w"] == pytest.approx(sites[i].b.mean(), abs=1e-6)


def test_cfl_at_fixed_rounds():
    sites = bed(a=np.ones(4), b=TWO_KINDS)
    states = cfl(Cfl(split_at=(3, 5), least=2), sites, 7)
    assert [len(set(s.places.values())) for s in states] == [1, 1, 2, 2, 4, 4, 4]
    assert [len(set(s.places.values())) for s in cfl(Cfl(split_at=(3, 5)), sites, 7)] == [1, 1, 2, 2, 2, 2, 2]


def test_cfl_splits_before_or_after_it_averages():
    """Either way by the updates of round 3; the halves then have the mean of all, or each the mean of its own."""
    numbers = np.array([2, 6, 2, 2])
    sites, c = bed(a=np.ones(4), b=TWO_KINDS, n=numbers), 1 - (1 - ETA) ** K
    middle = sum(numbers * TWO_KINDS) / 12
    before = middle + (1 - c) ** 2 * (Q0 - middle)
    after, early = (cfl(Cfl(split_at=(3,), least=2, split_first=x), sites, 6) for x in (False, True))
    assert [groups(s) for s in early] == [groups(s) for s in after] == 2 * [{tuple(sites)}] + 4 * [groups(after[-1])]
    for half, own in (("0", [0, 2]), ("1", [1, 3])):
        aim = numbers[own] @ TWO_KINDS[own] / numbers[own].sum()
        assert after[2].clusters[half].model["w"] == pytest.approx(middle + (1 - c) * (before - middle), abs=1e-12)
        assert early[2].clusters[half].model["w"] == pytest.approx(aim + (1 - c) * (before - aim), abs=1e-12)
        # one round ahead of a split after the round before, where the sides are the same
        late = cfl(Cfl(split_at=(2,), least=2), sites, 3)[-1]
        assert late.clusters[half].model["w"] == pytest.approx(early[2].clusters[half].model["w"], abs=1e-12)


def test_cfl_shares_are_those_of_the_halves_if_it_splits_first():
    numbers = np.array([2, 6, 2, 2])
    sites, algorithm = bed(a=np.ones(4), b=TWO_KINDS, n=numbers), Cfl(split_at=(2,), least=2, split_first=True)
    rounds = run_rounds(algorithm, Simulator(algorithm, sites), {"w": np.array([Q0])}, Plan(rounds=3), seed=0)
    whole, *rest = [r.shares for r in rounds]
    assert whole == pytest.approx({"s0": 1 / 6, "s1": 1 / 2, "s2": 1 / 6, "s3": 1 / 6})
    assert rest[0] == rest[1] == pytest.approx({"s0": 0.5, "s1": 0.75, "s2": 0.5, "s3": 0.25})


class Away(Simulator):
    """Some sites are out of reach in some rounds."""

    def __init__(self, algorithm, sites, away):
        super().__init__(algorithm, sites)
        self.away = away

    def train(self, round, sent):
        yield from super().train(round, {i: p for i, p in sent.items() if round not in self.away.get(i, ())})


def test_cfl_waits_for_a_site_that_is_absent_when_a_split_is_due():
    sites, algorithm = bed(a=np.ones(4), b=TWO_KINDS), Cfl(split_at=(3,))
    states = cfl(algorithm, sites, 8, engine=Away(algorithm, sites, {"s1": (2, 3)}))
    assert [len(set(s.places.values())) for s in states] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert groups(states[-1]) == {("s0", "s2"), ("s1", "s3")}


def test_cfl_who_was_absent_from_a_split_chooses_its_side_when_it_is_back():
    """By an update of the model that was split, which joins no mean; until then it is served that model."""
    optima = np.array([*TWO_KINDS, 1.0])
    sites = bed(a=np.ones(5), b=optima, n=[2] * 5)
    algorithm = Cfl(split_at=(3, 6), quorum=0.6, least=2)
    states = cfl(algorithm, sites, 9, engine=Away(algorithm, sites, {"s4": (2, 3, 5), "s1": (6,)}))
    assert [s.places["s4"] for s in states[:6]] == ["", "", "", "", "0", "0"]
    parent, before = states[3].clusters[""], states[1].clusters[""]
    assert parent.model["w"] == before.model["w"] and parent.updates.keys() == set(sites) - {"s4"}
    assert algorithm.send(states[3], ["s4", "new"])["s4"]["model"]["w"] == parent.model["w"]
    alone = cfl(algorithm, sites, 5, engine=Away(algorithm, sites, {"s4": (2, 3, 4)}))
    assert same_models(states[4], alone[4])
    assert states[5].places["s0"] != states[5].places["s2"]  # split again without s4, which chooses once more
    assert states[6].places["s4"] == states[6].places["s0"] or states[6].places["s4"] == states[6].places["s2"]


def same_models(x, y):
    return all(x.clusters[k].model["w"] == y.clusters[k].model["w"] for k in x.clusters.keys() | y.clusters.keys())


@pytest.mark.parametrize("seed", range(4))
def test_cfl_finds_planted_populations_when_only_some_take_part(seed):
    rng = np.random.default_rng(seed)
    kind = rng.permutation(np.repeat([-1.0, 1.0], 5))
    sites = bed(a=np.ones(10), b=kind + rng.uniform(-0.2, 0.2, 10), n=[3] * 10)
    algorithm = Cfl(eps1=0.15, eps2=0.3, after=5, quorum=0.5)
    states = cfl(algorithm, sites, 80, share=0.6, start={"w": np.array([0.0])})
    assert groups(states[-1]) == {tuple(f"s{i}" for i in np.flatnonzero(kind == x)) for x in (-1.0, 1.0)}


def test_cfl_a_new_site_walks_down_one_split_a_round():
    optima = np.repeat([6.0, 2.0, -3.0], 3)
    sites = bed(a=np.ones(9), b=optima, n=[3] * 9)
    algorithm = Cfl(eps1=0.01, eps2=0.1, after=0)
    state = cfl(algorithm, sites, 200)[-1]
    for optimum, like in ((6.1, "s0"), (1.9, "s3"), (-2.0, "s6")):
        new, now, path = Quadratic(1.0, np.array([optimum]), lr=ETA, start={"w": np.array([Q0])}), state, []
        for _ in range(4):
            sent = algorithm.send(now, ["new"])
            now = algorithm.merge(now, {"new": algorithm.local(sent["new"], Payload(), new)[0]})
            path.append(now.places["new"])
        goal = state.places[like]
        assert path == [goal[: k + 1] for k in range(4)]
        inner = [c for c in state.clusters if state.clusters[c].updates]
        assert all(now.clusters[c] == state.clusters[c] for c in inner)


def test_cfl_a_new_site_is_compared_by_direction_not_by_length():
    rule = Cfl(split_at=(1,), least=2)
    moves = {"near": [0.1, 0.0], "long": [5.0, 5.0]}
    state = rule.init({"w": np.zeros(2)}, sorted(moves))
    state = rule.merge(state, {i: Payload(model={"w": np.array(x)}, weight=1) for i, x in moves.items()})
    state = rule.merge(state, {"new": Payload(model={"w": np.array([1.0, 0.2])}, weight=1)})
    assert state.places["new"] == state.places["near"] != state.places["long"]


def test_cfl_says_how_many_clusters_there_are_and_how_much_a_site_counts_in_its_own():
    rule = Cfl(split_at=(1,))
    state = merged_at(rule, [0, 10, 180], weights=[1, 3, 5])
    late = {i: Payload(model={"w": np.ones(2)}, weight=w) for i, w in (("s0", 1), ("s1", 3), ("s2", 5), ("new", 7))}
    assert rule.shares(rule.init({"w": np.zeros(2)}, []), late) == {
        "s0": 1 / 16,
        "s1": 3 / 16,
        "s2": 5 / 16,
        "new": 7 / 16,
    }
    assert rule.shares(state, late) == {"s0": 0.25, "s1": 0.75, "s2": 1.0, "new": 0.0}
    assert rule.diagnostics(rule.init({"w": np.zeros(2)}, [])) == {"clusters": 1} and rule.diagnostics(state) == {
        "clusters": 2
    }


@pytest.mark.parametrize(
    ("server", "square"),
    [
        (Adagrad(0.1, 0.5, 1.0), lambda v, d: v + d * d),
        (Adam(0.1, 0.5, 0.75, 1.0), lambda v, d: 0.75 * v + 0.25 * d * d),
        (Yogi(0.1, 0.5, 0.75, 1.0), lambda v, d: v - 0.25 * d * d * np.sign(v - d * d)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_adaptive_servers_where_updates_are_smaller_than_before_as_large_and_larger(server, square):
    """v begins at 1, so Yogi's falls in the first place, stays in the second and grows in the third."""
    model, state = {"w": np.zeros(3)}, server.init({"w": np.zeros(3)})
    w, m, v = np.zeros(3), np.zeros(3), np.ones(3)
    for d in np.array([[0.5, 1.0, 2.0], [2.0, -0.5, 0.25]]):
        v, m = square(v, d), 0.5 * m + 0.5 * d
        w = w + 0.1 * m / (np.sqrt(v) + 1)
        model, state = server.step(model, {"w": d}, state)
        assert model["w"] == pytest.approx(w, abs=1e-15)


def test_groups_are_told_apart_in_the_record():
    """Of every group its own numbers, by its name; of a site its share among those of its group that replied."""
    algorithm = Clustered({"north": ("a", "b"), "south": ("c", "d")}, Ifca(starts="noise", warmup=0))
    state = algorithm.init({"w": np.ones(2)}, list("abcd"))
    told = {"a": (0, 1), "b": (0, 3), "c": (0, 2), "d": (1, 6)}  # the model that it chose, its cases
    replies = {i: Payload(model={"w": np.ones(2)}, cluster=c, weight=n) for i, (c, n) in told.items()}
    assert algorithm.diagnostics(state) == {"clusters (north)": 0, "clusters (south)": 0}
    assert algorithm.diagnostics(algorithm.merge(state, replies)) == {"clusters (north)": 1, "clusters (south)": 2}
    assert algorithm.shares(state, replies) == {"a": 0.25, "b": 0.75, "c": 1.0, "d": 1.0}
    alone = {"b": replies["b"]}
    assert algorithm.shares(state, alone) == {"b": 1.0}
    assert algorithm.diagnostics(algorithm.merge(state, alone)) == {"clusters (north)": 1, "clusters (south)": 0}


def test_a_window_of_two_costs_is_the_shortest():
    assert FedPIDAvg(window=2).window == 2
    with pytest.raises(ConfigError, match="window = 1 must be at least 2"):
        FedPIDAvg(window=1)
