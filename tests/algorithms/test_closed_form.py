"""Every algorithm against two answers on paper: its first round and its limit."""

from dataclasses import replace

import numpy as np
import pytest

from polysite.algorithms.clustered import Clustered
from polysite.algorithms.costs import FedCostWAvg, FedPIDAvg, TopK, _blend
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.fedexp import FedExP
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.robust import GeometricMedian, Krum, Median, TrimmedMean, _distances
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adagrad, Adam, Sgd, Yogi
from polysite.algorithms.weighted import Weighted
from polysite.engines.rounds import Plan, run
from polysite.engines.simulator import Simulator
from polysite.payload import Payload
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
        return {n: {"L": 1 - loss, "loss": loss} for n, loss in self.losses(params).items() if n in cases}


def bed(a=A, b=B, n=N, steps=None, kind=Frank):
    steps = [K] * len(b) if steps is None else steps
    return {
        f"s{i}": kind(a[i], np.full(n[i], b[i]), lr=ETA, steps=int(steps[i]), start={"w": np.array([Q0])})
        for i in range(len(b))
    }


def path(algorithm, sites, rounds, share=1.0, start=None):
    """The model after every round."""
    engine = Simulator(algorithm, sites)
    for r in run(algorithm, engine, start or {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0):
        yield r.state.model["w"].item()


def last(algorithm, sites, rounds, **kw):
    *_, found = path(algorithm, sites, rounds, **kw)
    return found


def first(algorithm, sites):
    return last(algorithm, sites, 1)


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
    assert last(QFedAvg(q), bed(a, b, [1, 1]), 6000) == pytest.approx((b[0] + ratio * b[1]) / (1 + ratio), abs=1e-6)


def test_qfedavg_equalises_the_losses_as_q_grows():
    a, b = np.array([1.0, 3.0]), np.array([-1.0, 2.0])
    ends = [last(QFedAvg(q), bed(a, b, [1, 1]), 6000) for q in (0.0, 1.0, 10.0)]
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
    end = last(FedPIDAvg(beta=0.0), bed(), 1500)
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
    (only,) = run(FedDyn(alpha), engine, {"w": np.array([Q0])}, Plan(rounds=1), seed=0)
    assert only.state.model["w"] == pytest.approx(2 * models.mean() - Q0, abs=1e-12)
    got = np.array([engine.memories()[f"s{i}"]["gradient"]["w"].item() for i in range(4)])
    assert got == pytest.approx(-alpha * (models - Q0), abs=1e-12)


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 1000), (0.5, 3000)])
def test_feddyn_reaches_the_true_optimum_whoever_takes_part(share, rounds):
    optimum = sum(A * B) / sum(A)
    engine = Simulator(FedDyn(0.7), bed())
    *_, end = run(FedDyn(0.7), engine, {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0)
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
    apart = _distances(of([[x] for x in SPREAD]))
    scores = [sum(sorted(apart[f"s{i}", f"s{j}"] ** 2 for j in range(5) if j != i)[:2]) for i in range(4)]
    assert scores == pytest.approx([0.04 + 0.09, 0.04 + 0.01, 0.01 + 0.09, 0.36 + 0.49])


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
    assert last(replace(algorithm, inner=inner), bed(), 3000) == pytest.approx(optimum, abs=1e-6)
    assert last(replace(algorithm, inner=inner), bed(), 3000, share=0.5) == pytest.approx(optimum, abs=1e-6)


GROUPS = {"south": ("s3", "s1"), "north": ("s0", "s2")}
MEMBERS = {"south": [1, 3], "north": [0, 2]}


def models_of_groups(algorithm, rounds, share=1.0):
    engine = Simulator(algorithm, bed())
    *_, end = run(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=rounds, share=share), seed=0)
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
    found = models_of_groups(Clustered(GROUPS, Scaffold(uniform=False)), 3000, share)
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
    *_, end = run(algorithm, Simulator(algorithm, sites), TWO, Plan(rounds=2), seed=0)
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
        *_, moon = run(Moon(5.0), Simulator(Moon(5.0), sites), TWO, Plan(rounds=rounds), seed=0)
        *_, plain = run(FedAvg(), Simulator(FedAvg(), sites), TWO, Plan(rounds=rounds), seed=0)
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
    for r in run(FedDyn(0.7), engine, {"w": np.array([Q0])}, Plan(rounds=9, share=0.5), seed=0):
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
            return {n: {"WT": 0.25 if n == "v" else 0.75, "TC": 0.5, "loss": 9.0} for n in cases}

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
    for r in run(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=12, share=share), seed=0):
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
    *_, end = run(Scaffold(server_lr=rate), engine, {"w": np.array([Q0])}, Plan(rounds=2), seed=0)
    assert end.state.model["w"] == pytest.approx(w1 + rate * (second.mean() - w1), abs=1e-12)
    found = np.array([engine.memories()[f"s{i}"]["control"]["w"].item() for i in range(4)])
    assert found == pytest.approx(own - own.mean() + (w1 - second) / (K * ETA), abs=1e-12)


def test_scaffold_stays_right_when_a_site_grows():
    """Its weight in the mean of the models follows at once, that in the control does not, so that c stays a mean."""
    sites, algorithm = bed(), Scaffold(uniform=False)
    engine, state = Simulator(algorithm, sites), None
    for r in run(algorithm, engine, {"w": np.array([Q0])}, Plan(rounds=40), seed=0):
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
