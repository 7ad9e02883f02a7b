"""Every algorithm against answers on paper: its first round and its limit."""

from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from polysite.algorithms.cost_weighted import _blend
from polysite.algorithms.robust import cut_of
from polysite.engines.rounds import Progress
from polysite.engines.simulator import Simulator
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import ETA, NAMES, Q0, START, A, B, K, N, P, Quadratic, R, bed, play

C = 1 - R
SHRINK = (1 - ETA) ** K  # of sites of curvature one
STEPS = np.array([4, 10, 8, 8])  # two epochs of 10, 40, 25 and 25 cases in batches of 8


class Frank(Quadratic):
    """Its cost, one minus its score, is its loss."""

    def score(self, params, cases):
        return {n: CaseScore({"L": 1 - loss}, loss) for n, loss in self.losses(params).items() if n in cases}


def left(steps=K, lr=ETA, held=0.0):
    """(1 - eta (a + mu))^K: what so many steps leave of the way."""
    return (1 - lr * (A + held)) ** steps


def averaged(p, r=R, w=Q0):
    """sum p (b + r (w - b)): the mean of the models after a fit from w."""
    return sum(p * (B + r * (w - B)))


def balance(p):
    """sum p b / sum p: where pulls of these strengths leave the model."""
    return sum(p * B) / sum(p)


def stepping(steps):
    """The four sites with numbers of steps of their own."""
    return {i: replace(s, steps=int(k)) for (i, s), k in zip(bed().items(), steps, strict=True)}


EQUAL = np.full(4, 0.25)
OMEGA, FACTORS = np.array([1.0, 0.3, 1.0, 2.0]), {"s1": 0.3, "s3": 2.0}
WEIGHED = OMEGA * N / sum(OMEGA * N)
W1 = averaged(P)  # after the first round, by size
D = W1 - Q0
W2 = averaged(P, w=W1)
HALF = Q0 + 0.5 * D
D2 = averaged(P, w=HALF) - HALF
PROX = (1 - left(held=0.8)) * A / (A + 0.8)
NOVA = (1 - left(STEPS)) / STEPS
GAMMA = 4 * sum(P**2)  # K sum p^2, of equations 4 and 5
Q_TWO = {q: ((3.0**q * (1 - 0.7**K)) / (1 - 0.9**K)) ** (1 / (2 * q + 1)) for q in (0.5, 1.0, 5.0)}
COST0, COST1 = A / 2 * (R * (Q0 - B)) ** 2, A / 2 * (R * (W1 - B)) ** 2  # after the first training and the second


def q_step(q):
    """The first round of q-FedAvg: Delta_k = F^q d / eta, h_k = q F^(q-1) |d / eta|^2 + F^q / eta."""
    f, d = A / 2 * (Q0 - B) ** 2, C * (Q0 - B) / ETA
    return Q0 - sum(f**q * d) / sum(q * f ** (q - 1) * d**2 + f**q / ETA)


def cost_weights(ratio):
    return 0.5 * P + 0.5 * ratio / ratio.sum()


def pid_weights(fall, history):
    return 0.45 * P + 0.45 * fall / fall.sum() + 0.1 * history / history.sum()


def exp_step(p):
    """The first round of FedExP, with epsilon = 0.001."""
    d = C * (Q0 - B)
    return Q0 - max(1, sum(p * d**2) / 2 / (sum(p * d) ** 2 + 1e-3)) * sum(p * d)


def best(k):
    return np.isin(np.arange(4), np.argsort(COST0)[:k]) * P


TWO_SITES = bed(np.array([1.0, 3.0]), np.array([-1.0, 2.0]), [1, 1])
FORMS = {  # the algorithm, its sites, the model on paper after so many rounds
    "fedavg": (ps.FedAvg(), bed(), {1: W1, 2: W2, 60: balance(P * C)}),
    "fedavg, uniform": (ps.FedAvg(uniform=True), bed(), {1: averaged(EQUAL), 60: balance(C)}),
    "fedavg, iterations": (ps.FedAvg(steps=3), bed(), {1: averaged(P, left(3)), 60: balance(P * (1 - left(3)))}),
    "fedavg, epochs": (ps.FedAvg(epochs=2), bed(), {1: averaged(P, left(2 * K)), 60: balance(P * (1 - left(2 * K)))}),
    "fedavg, rate": (ps.FedAvg(lr=0.02), bed(), {1: averaged(P, left(lr=0.02))}),
    "fedavg, one step": (ps.FedAvg(), bed(steps=1), {150: balance(P * A)}),
    "server sgd": (ps.FedAvg(server=ps.Sgd(0.5)), bed(), {1: HALF, 120: balance(P * C)}),
    "server momentum": (ps.FedAvg(server=ps.Sgd(0.5, momentum=0.9)), bed(),
                        {1: HALF, 2: HALF + 0.5 * (D2 + 0.9 * D), 500: balance(P * C)}),
    "fedadagrad": (ps.FedAvg(server=ps.Adagrad(0.05, 0.0)), bed(), {1: Q0 + 0.05 * D / ((1e-6 + D**2) ** 0.5 + 1e-3)}),
    "fedadam": (ps.FedAvg(server=ps.Adam(0.05)), bed(), {1: Q0 + 0.005 * D / ((0.99e-6 + 0.01 * D**2) ** 0.5 + 1e-3)}),
    "fedyogi": (ps.FedAvg(server=ps.Yogi(0.05)), bed(), {1: Q0 + 0.005 * D / ((1e-6 + 0.01 * D**2) ** 0.5 + 1e-3)}),
    "fedprox": (ps.FedProx(0.8), bed(), {1: Q0 - sum(P * PROX * (Q0 - B)), 60: balance(P * PROX)}),
    "fedprox, exact": (ps.FedProx(0.8), bed(steps=150), {60: balance(P * A / (A + 0.8))}),
    "fednova": (ps.FedNova(), stepping(STEPS),
                {1: Q0 - sum(P * STEPS) * sum(P * NOVA * (Q0 - B)), 60: balance(P * NOVA)}),
    "fednova, steps by size": (ps.FedNova(), stepping(N), {1: Q0 + GAMMA * (averaged(EQUAL, left(N)) - Q0)}),
    "fednova of sizes": (ps.FedNova("sizes"), stepping(STEPS), {1: Q0 + GAMMA * (averaged(EQUAL, left(STEPS)) - Q0)}),
    "weighted fednova of sizes": (ps.Weighted(FACTORS, ps.FedNova("sizes")), stepping(STEPS),
                                  {1: Q0 + sum(WEIGHED * N) * sum(WEIGHED * (1 - left(STEPS)) * (B - Q0) / N)}),
    "q-fedavg, half": (ps.QFedAvg(0.5), bed(), {1: q_step(0.5)}),
    "q-fedavg": (ps.QFedAvg(1.0), bed(), {1: q_step(1.0)}),
    "q-fedavg, two": (ps.QFedAvg(2.0), bed(), {1: q_step(2.0)}),
    **{f"q-fedavg of two, {q}": (ps.QFedAvg(q), TWO_SITES, {80: (2 * r - 1) / (1 + r)}) for q, r in Q_TWO.items()},
    "fedcostwavg": (ps.FedCostWAvg(), bed(kind=Frank),
                    {1: W1, 2: averaged(cost_weights(COST0 / COST1), w=W1), 100: balance((0.5 * P + 0.125) * C)}),
    "fedcostwavg without sizes": (ps.FedCostWAvg(0.0), bed(kind=Frank), {1: W1}),
    "fedpidavg": (ps.FedPIDAvg(), bed(kind=Frank), {1: averaged(pid_weights(np.maximum(1 - COST0, 0), COST0 + 5))}),
    "fedpidavg, by size at first": (ps.FedPIDAvg(start="size"), bed(kind=Frank),
        {1: W1, 2: averaged(pid_weights(np.maximum(COST0 - COST1, 0), COST0 + COST1), w=W1)}),
    "top-k": (ps.TopK(2), bed(kind=Frank), {1: averaged(best(2) / sum(best(2)))}),
    "top-k, the best draws the model to itself": (ps.TopK(1), bed(kind=Frank), {120: B[np.argmin(COST0)]}),
    "fedexp": (ps.FedExP(1e-3), bed(), {1: exp_step(P)}),
    "fedexp, uniform": (ps.FedExP(1e-3, uniform=True), bed(), {1: exp_step(EQUAL)}),
    "weighted": (ps.Weighted(FACTORS), bed(), {1: averaged(WEIGHED), 60: balance(WEIGHED * C)}),
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "sites", "paper"), FORMS.values(), ids=FORMS.keys())
def test_first_rounds_and_limit(algorithm, sites, paper):
    found = play(algorithm, sites, max(paper)).models()
    assert {k: found[k - 1] for k in paper} == pytest.approx(paper, abs=1e-8)


@pytest.mark.parametrize("server", [ps.Adagrad(0.5), ps.Adam(0.02), ps.Yogi(0.02)], ids=str)
def test_adaptive_servers_come_near_fedavgs_limit(server):
    assert play(ps.FedAvg(server=server), bed(), 120).models()[-1] == pytest.approx(balance(P * C), abs=2e-2)


CONTROLLED = {  # variates that correct the drift of sites: the minimiser of sum p F is reached
    "scaffold": (ps.Scaffold(), EQUAL),
    "scaffold, by size": (ps.Scaffold(uniform=False), P),
    "weighted scaffold": (ps.Weighted(FACTORS, ps.Scaffold(uniform=False)), WEIGHED),
    "feddyn": (ps.FedDyn(0.7), EQUAL),
}


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 100), (0.5, 400)])
@pytest.mark.parametrize(("algorithm", "p"), CONTROLLED.values(), ids=CONTROLLED.keys())
def test_control_variates_reach_the_true_optimum_whoever_takes_part(algorithm, p, share, rounds):
    assert play(algorithm, bed(), rounds, share).models()[-1] == pytest.approx(balance(p * A), abs=1e-6)


def test_local_sites_go_their_own_way():
    run = play(ps.Local(), bed(), 40)
    for round in (0, 39):
        assert run.own(round=round) == pytest.approx(B + R ** (round + 1) * (Q0 - B), abs=1e-12)


def test_fedpidavg_limit_without_the_derivative_and_no_limit_with_it():
    end = play(ps.FedPIDAvg(beta=0.0), bed(kind=Frank), 80).models()[-1]
    cost = R**2 * A / 2 * (end - B) ** 2
    assert end == pytest.approx(balance((0.45 * P + 0.1 * cost / cost.sum()) * C), abs=1e-8)
    tail = play(ps.FedPIDAvg(start="size"), bed(kind=Frank), 150).models()[-50:]
    assert max(tail) - min(tail) > 0.1 and B.min() <= min(tail) and max(tail) <= B.max()


def test_fedexp_swings_around_the_mean_and_serves_the_middle():
    c, sites, algorithm = 1 - SHRINK, bed(a=np.ones(4)), ps.FedExP(0.0, uniform=True)
    swing = np.sqrt(c * B.var() / (4 - c))
    ends = B.mean() + swing, B.mean() - swing
    run = play(algorithm, sites, 3, start={"w": np.array([ends[0]])})
    assert run.models() == pytest.approx([ends[1], ends[0], ends[1]], abs=1e-9)
    ((served, _),) = algorithm.serve(algorithm.send(run.state, ["s0"])["s0"], Payload(), sites["s0"], ("0",))
    assert served["w"] == pytest.approx(B.mean(), abs=1e-9)
    still = {i: Payload(model=run.state.model, weight=1) for i in NAMES}  # where nothing moves, it stands still
    assert algorithm.merge(run.state, still).model["w"] == run.state.model["w"]


def test_feddyn_first_round_and_the_gradients_that_it_learns():
    aim = (A * B + 0.7 * Q0) / (A + 0.7)
    models, optimum = aim + left(held=0.7) * (Q0 - aim), balance(A)
    run = play(ps.FedDyn(0.7), bed(), 120)
    assert run.models()[0] == pytest.approx(2 * models.mean() - Q0, abs=1e-12)
    assert run.own("gradient", round=0) == pytest.approx(-0.7 * (models - Q0), abs=1e-12)
    assert run.own("gradient") == pytest.approx(A * (optimum - B), abs=1e-6)
    assert abs(balance(C) - optimum) > 0.01  # where FedAvg ends


class Away(Simulator):
    """Some sites are out of reach in some rounds."""

    def __init__(self, algorithm, sites, away):
        super().__init__(algorithm, sites)
        self.away = away

    def train(self, round, sent):
        yield from super().train(round, {i: p for i, p in sent.items() if round not in self.away.get(i, ())})


def test_feddyn_keeps_the_mean_of_all_gradients_when_sites_are_absent_and_when_one_joins_late():
    """Four sites become five; who was never heard has no gradient yet."""
    rule, sites = ps.FedDyn(0.7), bed([*A, 1.0], [*B, 0.5], [*N, 3])
    run = play(rule, sites, 9, 0.5, state=rule.init(START, NAMES), engine=Away(rule, sites, {"s4": (0, 1, 2)}))
    for state, kept in zip(run.states, run.kept, strict=True):
        known = [m["gradient"]["w"].item() for m in kept.values() if m]
        assert state.h["w"] == pytest.approx(sum(known) / len(state.sites), abs=1e-12)
    assert {len(state.sites) for state in run.states} == {4, 5}


SPREAD = np.array([0.0, 0.2, 0.3, 0.9, 50.0])
ROBUST = {
    "median": (ps.Median(), 0.3),
    "trimmed mean": (ps.TrimmedMean(0.2), np.mean([0.2, 0.3, 0.9])),
    "krum": (ps.Krum(f=1), 0.2),
    "multi-krum": (ps.Krum(f=1, keep=3), 1 / 6),
    "geometric median": (ps.GeometricMedian(iterations=3000, tolerance=0.0), 0.3),
}


@pytest.mark.parametrize(("algorithm", "point"), ROBUST.values(), ids=ROBUST.keys())
def test_robust_means(algorithm, point):
    """Equal curvature: the first round goes to r w0 + (1 - r) m, the limit is m, the robust middle of the optima."""
    found = play(algorithm, bed(a=np.ones(5), b=SPREAD, n=[3] * 5), 40).models()
    assert found[0] == pytest.approx(SHRINK * Q0 + (1 - SHRINK) * point, abs=1e-6)
    assert found[-1] == pytest.approx(point, abs=1e-6)


def of(points, weights=None, statistics=None, **more):
    """Replies of sites that moved to these points, with a running variance each if there are ``statistics``."""
    found = {}
    for i, x in enumerate(points):
        model = {"w": np.asarray(x, float)} | ({} if statistics is None else {"n.running_var": statistics[i : i + 1]})
        found[f"s{i}"] = Payload(model=model, weight=1 if weights is None else weights[i], **more)
    return found


def merged(rule, *replies, **more):
    """The state after one round, in which sites moved from zero."""
    found = of(*replies, **more)
    return rule.merge(rule.init({k: 0.0 * v for k, v in found["s0"]["model"].items()}, sorted(found)), found)


def test_geometric_median_at_one_of_the_points():
    """Of a triangle the one that weighs more than half; of four, the one inside the triangle of the others."""
    rule, points = ps.GeometricMedian(iterations=3000, tolerance=0.0), [[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]]
    assert merged(rule, points[:3], [0.6, 0.2, 0.2]).model["w"] == pytest.approx(points[0], abs=1e-4)
    assert merged(rule, points).model["w"] == pytest.approx(points[3], abs=1e-3)


def test_geometric_median_starts_from_the_mean_by_size_and_holds_statistics_too():
    points, weights = np.array([[0.0], [1.0], [4.0]]), np.array([1.0, 1.0, 2.0])
    pull = weights / np.abs(points - weights @ points / 4).ravel()
    found = merged(ps.GeometricMedian(iterations=1), points, weights).model["w"]
    assert found == pytest.approx(pull @ points / pull.sum())
    loud = merged(ps.GeometricMedian(), [[0.0], [0.2], [0.3], [0.9], [1e6]], None, np.array([1.0, 1, 1, 1, 1e6])).model
    assert loud["n.running_var"] == pytest.approx(1.0, abs=1.0) and loud["w"] < 1


def test_a_share_of_the_sites_is_counted_without_rounding_errors():
    assert [cut_of(0.29, 100), cut_of(0.1, 30), cut_of(0.2, 4)] == [29, 3, 0]


GROUPS = {"south": ("s3", "s1"), "north": ("s0", "s2")}


def in_groups(p, aim=B):
    """The mean of every group by these weights."""
    return {name: np.average(aim[k], weights=p[k]) for name, k in (("south", [1, 3]), ("north", [0, 2]))}


AROUND, INSIDE = ps.Weighted(FACTORS, ps.Clustered(GROUPS)), ps.Clustered(GROUPS, ps.Weighted(FACTORS))
ONE_STEP, EXACT = ps.Clustered(GROUPS, ps.FedAvg(steps=1)), ps.Clustered(GROUPS, ps.Scaffold(uniform=False))
IN_GROUPS = {  # the algorithm, rounds, the share of sites that take part, the model of every group
    "first round": (ps.Clustered(GROUPS), 1, 1.0, in_groups(N, B + R * (Q0 - B))),
    "first round, factors around": (AROUND, 1, 1.0, in_groups(OMEGA * N, B + R * (Q0 - B))),
    "first round, factors inside": (INSIDE, 1, 1.0, in_groups(OMEGA * N, B + R * (Q0 - B))),
    "limit": (ps.Clustered(GROUPS), 60, 1.0, in_groups(N * C)),
    "limit of one step: the minimiser of sum p F over the group": (ONE_STEP, 150, 1.0, in_groups(N * A)),
    "limit of scaffold: the same": (EXACT, 60, 1.0, in_groups(N * A)),
    "limit of scaffold, some absent": (EXACT, 500, 0.25, in_groups(N * A)),
}


@pytest.mark.parametrize(("algorithm", "rounds", "share", "paper"), IN_GROUPS.values(), ids=IN_GROUPS.keys())
def test_clustered_first_round_and_limit_of_every_group(algorithm, rounds, share, paper):
    groups = play(algorithm, bed(), rounds, share).state.groups
    assert {name: state.model["w"].item() for name, state in groups.items()} == pytest.approx(paper, abs=1e-7)


TWO = {"body.w": np.array([3.0]), "head.w": np.array([0.5])}


def test_moon_second_round_on_paper():
    """One step of training: the gradient of the contrast, seen from the received model, is (1 - q)/T dcos(w, w_k)."""
    mu, temperature, a, b = 20.0, 0.5, np.array([1.0, 2.0]), np.array([-1.0, 4.0])
    w0 = np.array([3.0, 0.5])
    mine = [w0 - ETA * a[i] * (w0.sum() - b[i]) for i in range(2)]
    w1, found = np.mean(mine, 0), []
    for i in range(2):
        cos = w1 @ mine[i] / np.linalg.norm(w1) / np.linalg.norm(mine[i])
        slope = mine[i] / np.linalg.norm(w1) / np.linalg.norm(mine[i]) - cos * w1 / (w1 @ w1)
        q = 1 / (1 + np.exp((cos - 1) / temperature))
        found.append(w1 - ETA * (a[i] * (w1.sum() - b[i]) + mu * (1 - q) / temperature * slope))
    model = play(ps.Moon(mu, temperature), bed(a, b, [1, 1], steps=1, start=TWO), 2).state.model
    assert np.concatenate(list(model.values())) == pytest.approx(np.mean(found, 0), abs=1e-12)


def test_moon_of_equal_sites_is_fedavg_to_its_limit():
    sites = {i: Quadratic(2.0, np.array([1.0]), start=TWO) for i in "ab"}
    moon, plain = (play(algorithm, sites, 30) for algorithm in (ps.Moon(5.0), ps.FedAvg()))
    for name in TWO:
        assert moon.models(name) == pytest.approx(plain.models(name), abs=1e-9)
    assert sum(moon.state.model.values()) == pytest.approx(1.0)


def test_qfedavg_where_rates_differ_and_losses_vanish():
    """Every site counts with its own L; a loss of zero is no division by zero, and such a site does not pull."""

    def model(q, *losses):
        sent = zip((1.0, 3.0), losses, (0.1, 0.4), strict=True)
        found = {x: Payload(model={"w": np.array([x])}, weight=1, loss=loss, lr=lr) for x, loss, lr in sent}
        return ps.QFedAvg(q).merge(ps.QFedAvg(q).init({"w": np.zeros(1)}, sorted(found)), found).model["w"]

    f, steep, moved = np.array([0.5, 2.0]), np.array([10.0, 2.5]), np.array([1.0, 3.0])
    want = sum(f * steep * moved) / sum((steep * moved) ** 2 + steep * f)
    assert model(1.0, 0.5, 2.0) == pytest.approx(want, abs=1e-8)
    alone = 2.0 * 2.5 * 3 / ((2.5 * 3) ** 2 + 2.5 * 2.0 + (10.0 * 1.0) ** 2)  # h keeps the curvature of the other
    assert model(1.0, 0.0, 2.0) == pytest.approx(alone, abs=1e-6)
    assert np.isfinite([model(q, 0.0, 0.0) for q in (0.5, 1.0, 50.0)]).all()


@pytest.mark.parametrize("augmented", [False, True])
def test_qfedavg_measures_the_received_model_as_it_is_told(augmented):
    class Told(Quadratic):
        def losses(self, params, *, augmented=False):
            return {"0": params["w"].item() + 5 * augmented}

    reply, _ = ps.QFedAvg(1.0, augmented).local(Payload(model=START), Payload(), Told(1.0, np.array([0.0])))
    assert reply["loss"] == Q0 + 5 * augmented


def costs_of(rule, *rounds, size=1):
    """The state after rounds of {site: cost}; every site sends its name's number as its model."""
    state = rule.init({"w": np.array([0.0])}, ["1", "2", "3"])
    for costs in rounds:
        found = {i: Payload(model={"w": np.array([float(i)])}, size=size, cost=c) for i, c in costs.items()}
        state = rule.merge(state, found)
    return state


def test_fedpidavg_with_an_absent_site():
    """Its last cost stays, its terms are left out of the sums, and it goes on from there when it is back."""
    rule, rounds = ps.FedPIDAvg(start="size"), ({"1": 0.9, "2": 0.8, "3": 0.7}, {"1": 0.5, "2": 0.7})
    state = costs_of(rule, *rounds)
    assert state.costs == {"1": (0.9, 0.5), "2": (0.8, 0.7), "3": (0.7,)}
    p1 = 0.45 / 2 + 0.45 * 0.4 / 0.5 + 0.1 * 1.4 / 2.9
    assert state.model["w"] == pytest.approx(p1 * 1 + (1 - p1) * 2)
    p2 = 0.45 / 2 + 0.45 * 0.0 + 0.1 * 2.2 / 3.5
    assert costs_of(rule, *rounds, {"2": 0.7, "3": 0.6}).model["w"] == pytest.approx(p2 * 2 + (1 - p2) * 3)
    six = costs_of(rule, *({"1": 1.0 - 0.1 * k, "2": 0.5} for k in range(8))).costs  # no more are remembered
    assert six["1"] == pytest.approx((0.8, 0.7, 0.6, 0.5, 0.4, 0.3)) and six["2"] == (0.5,) * 6


def test_fedcostwavg_weighs_a_newcomer_by_its_size():
    state = costs_of(ps.FedCostWAvg(0.5), {"1": 0.8, "2": 0.8}, {"1": 0.4, "2": 0.8, "3": 0.6}, size=2)
    p1 = 0.5 / 3 + 0.5 * (2 / 3) * (2 / 3)
    assert state.model["w"] == pytest.approx(p1 * 1 + (2 / 3 - p1) * 2 + 1 / 3 * 3)


@pytest.mark.parametrize("fall", [{"1": 0.0, "2": 0.0}, {"1": 0.3, "2": 0.1}])
@pytest.mark.parametrize("history", [{"1": 0.0, "2": 0.0}, {"1": 2.0, "2": 6.0}])
def test_cost_weights_sum_to_one_whatever_is_zero(fall, history):
    weights = _blend(dict.fromkeys("12", Payload()), (0.45, {"1": 3.0, "2": 1.0}), (0.45, fall), (0.1, history))
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-15) and min(weights.values()) > 0


@pytest.mark.parametrize(("validation", "cost"), [(("v",), 0.625), ((), 0.375)])
def test_a_cost_is_of_validation_cases_and_of_quality_not_loss(validation, cost):
    class Graded(Quadratic):
        def score(self, params, cases):
            return {n: CaseScore({"WT": 0.25 if n == "v" else 0.75, "TC": 0.5}, loss=9.0) for n in cases}

    site = Graded(1.0, np.array([0.0, 1.0]), splits={"validation": validation})
    assert ps.FedPIDAvg().local(Payload(model=START), Payload(), site)[0]["cost"] == pytest.approx(cost)


@pytest.mark.parametrize(
    "rule", [ps.QFedAvg(1.0), ps.FedExP(1e-3), ps.Krum(f=1), ps.GeometricMedian()], ids=lambda r: type(r).__name__
)
def test_running_statistics_are_no_part_of_a_distance(rule):
    points = [[1.0], [1.2], [1.3], [1.9], [6.0]]
    calm, wild = (merged(rule, points, None, s * np.arange(1.0, 6.0), loss=1.0, lr=0.1) for s in (1.0, 1e4))
    assert calm.model["w"] == wild.model["w"] and calm.model["n.running_var"] != wild.model["n.running_var"]


def scaffold_control(state, memories):
    """The mean of the c_k of all sites by their weights, those that were never heard included."""
    total = sum(state.weights.values()) + len(state.awaited)
    return sum(w * memories[i]["control"]["w"].item() for i, w in state.weights.items()) / total


@pytest.mark.parametrize(
    "algorithm", [ps.Scaffold(), ps.Scaffold(uniform=False), ps.Weighted({"s1": 0.3}, ps.Scaffold())], ids=str
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_scaffolds_control_is_always_the_mean_of_the_sites(algorithm, share):
    run = play(algorithm, bed(), 12, share)
    for state, kept in zip(run.states, run.kept, strict=True):
        assert state.control["w"] == pytest.approx(scaffold_control(state, kept), abs=1e-12)


@pytest.mark.parametrize("rate", [0.6, 1.0])
def test_scaffold_first_two_rounds_at_any_server_rate(rate):
    """y <- y - eta (a (y - b) - c_k + c) from w_1; c_k' = c_k - c + (w_1 - y) / (K eta)."""
    first = B + R * (Q0 - B)
    w1 = Q0 + rate * (first.mean() - Q0)
    own = (Q0 - first) / (K * ETA)
    aim = B + (own - own.mean()) / A  # where the corrected gradient vanishes
    second = aim + R * (w1 - aim)
    run = play(ps.Scaffold(server_lr=rate), bed(), 2)
    assert run.models() == pytest.approx([w1, w1 + rate * (second.mean() - w1)], abs=1e-12)
    assert run.own("control", round=0) == pytest.approx(own, abs=1e-12)
    assert run.own("control") == pytest.approx(own - own.mean() + (w1 - second) / (K * ETA), abs=1e-12)


def test_scaffold_stays_right_when_a_site_grows():
    """Its weight in the mean of the models follows at once, that in the control does not, so that c stays a mean."""
    sites, algorithm = bed(), ps.Scaffold(uniform=False)
    run = play(algorithm, sites, 5)
    sites["s0"].b = np.full(40, B[0])
    run = play(algorithm, sites, 35, resume=Progress(4, run.state, run.memories))
    for state, kept in zip(run.states, run.kept, strict=True):
        assert state.control["w"] == pytest.approx(scaffold_control(state, kept), abs=1e-12)
    assert run.last.shares["s0"] == 40 / 58


def test_ditto_first_two_rounds_and_limit():
    """v starts at w_0 and is drawn to the model that was received, not to what the site or the server made of it."""
    run, v, q = play(ps.Ditto(0.6, own_steps=3), bed(), 120), np.full(4, Q0), left(3, held=0.6)
    assert run.models()[:2] == pytest.approx([W1, W2], abs=1e-12)  # FedAvg
    for round, w in enumerate((Q0, W1)):
        aim = (A * B + 0.6 * w) / (A + 0.6)
        v = aim + q * (v - aim)
        assert run.own(round=round) == pytest.approx(v, abs=1e-12)
    limit = balance(P * C)
    assert run.models()[-1] == pytest.approx(limit, abs=1e-12)
    assert run.own() == pytest.approx((A * B + 0.6 * limit) / (A + 0.6), abs=1e-9)


TOLD = {  # the rate and the steps of the sites' own models
    ps.Ditto(0.6, lr=0.05): (0.05, K),
    ps.Ditto(0.6, lr=0.05, own_lr=0.02): (0.02, K),
    ps.Ditto(0.6, steps=3): (ETA, 3),
    ps.Ditto(0.6, epochs=2): (ETA, 2 * K),
    ps.Ditto(0.6, steps=3, own_epochs=2): (ETA, 2 * K),
}


@pytest.mark.parametrize("algorithm", TOLD, ids=str)
def test_ditto_trains_its_own_model_as_it_is_told(algorithm):
    run, (rate, steps) = play(algorithm, bed(), 1), TOLD[algorithm]
    plain = ps.FedAvg(lr=algorithm.lr, epochs=algorithm.epochs, steps=algorithm.steps)
    assert run.models() == pytest.approx(play(plain, bed(), 1).models(), abs=1e-15)
    aim = (A * B + 0.6 * Q0) / (A + 0.6)
    assert run.own() == pytest.approx(aim + left(steps, rate, 0.6) * (Q0 - aim), abs=1e-12)


def test_ditto_serves_its_own_model_and_strangers_the_shared_one():
    rule, run = ps.Ditto(0.6), play(ps.Ditto(0.6), bed(), 3)
    memory = run.memories["s0"]
    for kept, model in ((memory, memory["model"]), (Payload(), run.state.model)):
        ((served, _),) = rule.serve(rule.send(run.state, ["s0"])["s0"], kept, bed()["s0"], ("0",))
        assert served["w"] == model["w"]
    assert memory["model"]["w"] != run.state.model["w"]


TWO_KINDS = np.array([0.9, -1.1, 1.1, -0.9])  # optima of two populations, mixed


def cfl(algorithm, sites, rounds, **how):
    """Every state."""
    return play(algorithm, sites, rounds, **how).states


def groups(state):
    return {tuple(i for i in state.places if state.places[i] == place) for place in state.places.values()}


def test_cfl_first_round_split_and_limit():
    """FedAvg until it stands still at the mean; there a site at distance d moves by c d, and the sides part."""
    sites, c = bed(a=np.ones(4), b=TWO_KINDS, n=[2, 6, 2, 2]), 1 - (1 - ETA) ** K
    p = np.array([2, 6, 2, 2]) / 12
    middle = sum(p * TWO_KINDS)
    furthest = c * max(abs(TWO_KINDS - middle))
    states = cfl(ps.Cfl(eps1=1e-3, eps2=0.99 * furthest, after=0), sites, 90)
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
    assert len(cfl(ps.Cfl(eps1=1e-3, eps2=1.01 * furthest, after=0), sites, 90)[-1].clusters) == 1
    late = cfl(ps.Cfl(eps1=1e-3, eps2=0.99 * furthest, after=40), sites, 60)
    assert [len(s.clusters) for s in late] == [1] * 40 + [3] * 20


def test_cfl_measures_against_the_first_round_if_told():
    """All lengths ten times as long: thresholds that are relative split in the same round, the others do not."""

    def played(scale, **how):
        sites = bed(a=np.ones(4), b=scale * TWO_KINDS, start={"w": np.array([scale * Q0])})
        return cfl(ps.Cfl(0.05, 0.2, after=0, **how), sites, 60)

    def split(scale, **how):
        return [len(s.clusters) for s in played(scale, **how)].count(1)

    assert split(1.0, relative=True) == split(10.0, relative=True) < 60 and split(1.0) != split(10.0)
    longest = (1 - SHRINK) * max(abs(TWO_KINDS - Q0))
    assert [s.unit for s in played(1.0, relative=True)] == pytest.approx([longest] * 60, abs=1e-12)


def towards(*angles):
    """Points of the plane in these directions."""
    return np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], 1)


FIVE = towards(0, 67, 88, 119, 160)


@pytest.mark.parametrize(
    ("rule", "points", "halves"),
    [
        (
            ps.Cfl(2.0, 0.5, after=0, gamma_max=0.49),
            towards(0, 10, 70),
            ["01", "2"],
        ),  # by 60 degrees: sin(60 / 2) = 0.5
        (ps.Cfl(2.0, 0.5, after=0, gamma_max=0.51), towards(0, 10, 70), ["012"]),
        (ps.Cfl(2.0, 0.5, after=0), towards(0, 10, 70), ["01", "2"]),
        (ps.Cfl(2.0, 0.5, after=0), towards(30, 30, 30), ["012"]),
        (ps.Cfl(split_at=(1,)), FIVE, ["0", "1234"]),
        (ps.Cfl(split_at=(1,), linkage="complete"), FIVE, ["012", "34"]),
        (ps.Cfl(split_at=(1,)), [[1.0], [0.0], [2.0]], ["02", "1"]),  # who does not move is like nobody
    ],
)
def test_cfl_parts_sites_by_the_angles_of_their_updates(rule, points, halves):
    assert groups(merged(rule, points)) == {tuple(f"s{i}" for i in half) for half in halves}


def test_cfl_knows_a_mean_by_weights_and_no_statistics():
    """A site of many cases makes the mean update long; a huge running mean makes nothing longer or more alike."""
    rule = ps.Cfl(eps1=0.1, eps2=0.5, after=0)
    assert len(merged(rule, towards(0, 0, 180, 180)).clusters) == 3
    assert len(merged(rule, towards(0, 0, 180, 180), [5, 1, 1, 1]).clusters) == 1
    for huge in (0.0, 1e6):
        state = merged(replace(rule, eps1=0.5), [[1.0], [1.0], [-1.0], [-1.0]], [1, 2, 3, 4], huge * np.arange(4.0))
        assert groups(state) == {("s0", "s1"), ("s2", "s3")} and state.clusters[""].updates["s0"].keys() == {"w"}
        assert state.clusters["0"].model["n.running_var"] == pytest.approx(huge * (2 + 6 + 12) / 10)


@pytest.mark.parametrize("seed", range(3))
def test_cfl_splits_twice_never_mixes_up_names_and_lets_a_new_site_walk_down_one_split_a_round(seed):
    """Three populations under shuffled names: first the one below zero leaves, then the two above part."""
    optima = np.random.default_rng(seed).permutation(np.repeat([6.0, 2.0, -3.0], 3))
    sites, algorithm = bed(a=np.ones(9), b=optima, n=[3] * 9), ps.Cfl(0.01, 0.1, after=0)
    *_, end = states = cfl(algorithm, sites, 80)
    kinds = {x: tuple(i for i, s in sites.items() if s.b[0] == x) for x in (6.0, 2.0, -3.0)}
    assert groups(end) == set(kinds.values())
    for state in states:  # who once went apart stays apart, and every name is there once
        assert sorted(state.places) == sorted(sites)
        assert all(set(few) <= next(set(g) for g in groups(state) if few[0] in g) for few in kinds.values())
    for x, (like, *_) in kinds.items():
        goal, new, now, path = end.places[like], bed(a=[1.0], b=[x + 0.1], n=[1])["s0"], end, []
        assert end.clusters[goal].model["w"] == pytest.approx(x, abs=1e-6)
        for _ in range(4):
            reply, _ = algorithm.local(algorithm.send(now, ["new"])["new"], Payload(), new)
            now = algorithm.merge(now, {"new": reply})
            path.append(now.places["new"])
        assert path == [goal[: k + 1] for k in range(4)]
        assert all(now.clusters[c] == end.clusters[c] for c in end.clusters if end.clusters[c].updates)


def test_cfl_at_fixed_rounds():
    sites = bed(a=np.ones(4), b=TWO_KINDS)
    states = cfl(ps.Cfl(split_at=(3, 5), least=2), sites, 7)
    assert [len(set(s.places.values())) for s in states] == [1, 1, 2, 2, 4, 4, 4]
    assert [len(set(s.places.values())) for s in cfl(ps.Cfl(split_at=(3, 5)), sites, 7)] == [1, 1, 2, 2, 2, 2, 2]


def test_cfl_splits_before_or_after_it_averages():
    """Either way by the updates of round 3; the halves then have the mean of all, or each the mean of its own."""
    numbers = np.array([2, 6, 2, 2])
    sites, c = bed(a=np.ones(4), b=TWO_KINDS, n=numbers), 1 - SHRINK
    middle = sum(numbers * TWO_KINDS) / 12
    before = middle + (1 - c) ** 2 * (Q0 - middle)
    late, soon = (play(ps.Cfl(split_at=(3,), least=2, split_first=x), sites, 6) for x in (False, True))
    halves = [groups(s) for s in late.states]
    assert [groups(s) for s in soon.states] == halves == 2 * [{tuple(sites)}] + 4 * [halves[-1]]
    for half, own in (("0", [0, 2]), ("1", [1, 3])):
        aim = numbers[own] @ TWO_KINDS[own] / numbers[own].sum()
        for run, near in ((late, middle), (soon, aim)):
            assert run.states[2].clusters[half].model["w"] == pytest.approx(near + (1 - c) * (before - near), abs=1e-12)
    whole, halved = {"s0": 1 / 6, "s1": 1 / 2, "s2": 1 / 6, "s3": 1 / 6}, {"s0": 0.5, "s1": 0.75, "s2": 0.5, "s3": 0.25}
    for played, shares in zip(soon.rounds[1:4], (whole, halved, halved), strict=True):
        assert played.shares == pytest.approx(shares)


def test_cfl_waits_for_a_site_that_is_absent_when_a_split_is_due():
    sites, rule = bed(a=np.ones(4), b=TWO_KINDS), ps.Cfl(split_at=(3,))
    states = cfl(rule, sites, 8, engine=Away(rule, sites, {"s1": (2, 3)}))
    assert [groups(s) for s in states] == [{tuple(sites)}] * 4 + [{("s0", "s2"), ("s1", "s3")}] * 4


def test_cfl_who_was_absent_from_a_split_chooses_its_side_when_it_is_back():
    """By an update of the model that was split, which joins no mean; until then it is served that model."""
    sites = bed(a=np.ones(5), b=np.array([*TWO_KINDS, 1.0]), n=[2] * 5)
    algorithm = ps.Cfl(split_at=(3, 6), quorum=0.6, least=2)
    states = cfl(algorithm, sites, 9, engine=Away(algorithm, sites, {"s4": (2, 3, 5), "s1": (6,)}))
    assert [s.places["s4"] for s in states[:6]] == ["", "", "", "", "0", "0"]
    parent, before = states[3].clusters[""], states[1].clusters[""]
    assert parent.model["w"] == before.model["w"] and parent.updates.keys() == set(sites) - {"s4"}
    assert algorithm.send(states[3], ["s4", "new"])["s4"]["model"]["w"] == parent.model["w"]
    alone = cfl(algorithm, sites, 5, engine=Away(algorithm, sites, {"s4": (2, 3, 4)}))
    models = [{k: c.model["w"].item() for k, c in s.clusters.items()} for s in (states[4], alone[4])]
    assert models[0] == models[1]
    assert states[5].places["s0"] != states[5].places["s2"]  # split again without s4, which chooses once more
    assert states[6].places["s4"] in (states[6].places["s0"], states[6].places["s2"])


def test_cfl_a_new_site_is_compared_by_direction_not_by_length():
    rule = ps.Cfl(split_at=(1,), least=2)
    state = rule.merge(merged(rule, [[0.1, 0.0], [5.0, 5.0]]), {"new": of([[1.0, 0.2]])["s0"]})
    assert state.places["new"] == state.places["s0"] != state.places["s1"]


def test_cfl_says_how_many_clusters_there_are_and_how_much_a_site_counts_in_its_own():
    rule, start = ps.Cfl(split_at=(1,)), ps.Cfl().init({"w": np.zeros(2)}, [])
    state = merged(rule, towards(0, 10, 180), [1, 3, 5])
    late = of(np.ones((4, 2)), [1, 3, 5, 7])  # s3 is new
    assert rule.shares(start, late) == {"s0": 1 / 16, "s1": 3 / 16, "s2": 5 / 16, "s3": 7 / 16}
    assert rule.shares(state, late) == {"s0": 0.25, "s1": 0.75, "s2": 1.0, "s3": 0.0}
    assert rule.diagnostics(start) == {"clusters": 1} and rule.diagnostics(state) == {"clusters": 2}


@pytest.mark.parametrize(
    ("server", "square"),
    [
        (ps.Adagrad(0.1, 0.5, 1.0), lambda v, d: v + d * d),
        (ps.Adam(0.1, 0.5, 0.75, 1.0), lambda v, d: 0.75 * v + 0.25 * d * d),
        (ps.Yogi(0.1, 0.5, 0.75, 1.0), lambda v, d: v - 0.25 * d * d * np.sign(v - d * d)),
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
    rule = ps.Clustered({"north": ("a", "b"), "south": ("c", "d")}, ps.Ifca(starts="noise", warmup=0))
    state, model = rule.init({"w": np.ones(2)}, list("abcd")), {"w": np.ones(2)}
    told = {"a": (0, 1), "b": (0, 3), "c": (0, 2), "d": (1, 6)}  # the model that it chose, its cases
    replies = {i: Payload(model=model, cluster=c, weight=n) for i, (c, n) in told.items()}
    for heard, south, shares in (
        (replies, 2, {"a": 0.25, "b": 0.75, "c": 1.0, "d": 1.0}),
        ({"b": replies["b"]}, 0, {"b": 1.0}),
    ):
        assert rule.shares(state, heard) == shares
        assert rule.diagnostics(rule.merge(state, heard)) == {"clusters (north)": 1, "clusters (south)": south}
    assert rule.diagnostics(state) == {"clusters (north)": 0, "clusters (south)": 0}
