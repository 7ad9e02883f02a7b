"""pFedMe, FedAMP, L2GD and SuPerFed against answers on paper: first round, limit, and what they become at the edges."""

from itertools import groupby, pairwise, product
from statistics import median

import numpy as np
import pytest

import polysite as ps
from polysite import tree
from polysite.costs.rehearsal import rehearse
from polysite.payload import Payload
from polysite.site import Budget, CaseScore, Mix
from quadratic import ETA, NAMES, Q0, START, A, B, K, P, Quadratic, bed, mixed_gradients, play
from table import START as PARTS
from table import same
from table import sites as four


def crossed(run):
    """Every array that went over the wire."""
    return [x for p in run.crossed for v in p.values() if not isinstance(v, float) for x in v.values()]


# pFedMe: the letters of the specification
LAM, OUTER, BETA, INNER, ETA_P = 2.0, 3, 0.9, 7, 0.05
SIGMA = (1 - ETA_P * (A + LAM)) ** INNER
SHRINK = 1 - ETA * LAM * (1 - SIGMA) * A / (A + LAM)  # of w - b in an outer step
PFEDME = ps.PFedMe(LAM, ETA, OUTER, ETA_P, INNER, warm=False, beta=BETA)


def theta(w):
    """The inner steps from w."""
    aim = (A * B + LAM * w) / (A + LAM)
    return aim + SIGMA * (w - aim)


def test_pfedme_first_round_and_limit():
    run, limit = play(PFEDME, bed(), 250), sum((1 - SHRINK**OUTER) * B) / sum(1 - SHRINK**OUTER)
    first = (1 - BETA) * Q0 + BETA * np.mean(B + SHRINK**OUTER * (Q0 - B))
    assert [run.models()[0], run.models()[-1]] == pytest.approx([first, limit], abs=1e-9)
    for round, w in ((0, Q0), (-1, limit)):
        assert run.own(round=round) == pytest.approx(theta(B + SHRINK ** (OUTER - 1) * (w - B)), abs=1e-9)


def test_pfedme_serves_its_own_model_and_a_stranger_what_the_inner_steps_make_of_the_shared_one():
    sites, run = bed(), play(PFEDME, bed(), 5)
    got = PFEDME.send(run.state, ["any"])["any"]
    for k, (i, s) in enumerate(sites.items()):
        ((mine, _),) = PFEDME.serve(got, run.memories[i], s, ("0",))
        assert mine["w"] == run.memories[i]["model"]["w"] != got["model"]["w"]
        ((theirs, _),) = PFEDME.serve(got, Payload(), s, ("0",))
        assert theirs["w"] == pytest.approx(theta(run.models()[-1])[k], abs=1e-12)
    ((plain, _),) = PFEDME.serve(got, Payload(), Quadratic(1.0, np.array([])), ())
    assert plain["w"] == got["model"]["w"]


def test_pfedme_with_a_warm_start():
    """(w, v, 1) goes through an affine map OUTER times, from v = w."""
    warm, maps = ps.PFedMe(LAM, ETA, OUTER, ETA_P, INNER), []
    for a, b, s in zip(A, B, SIGMA, strict=True):
        v = np.array([(1 - s) * LAM / (a + LAM), s, (1 - s) * a * b / (a + LAM)])
        w = np.array([1 - ETA * LAM, 0, 0]) + ETA * LAM * v
        maps.append(np.linalg.matrix_power(np.array([w, v, [0, 0, 1]]), OUTER))
    slope, shift = np.mean([m[0, 0] + m[0, 1] for m in maps]), np.mean([m[0, 2] for m in maps])
    run = play(warm, bed(), 100)
    assert run.models()[0] == pytest.approx(slope * Q0 + shift, abs=1e-12)
    assert run.own(round=0) == pytest.approx([m[1] @ [Q0, Q0, 1] for m in maps], abs=1e-12)
    assert run.models()[-1] == pytest.approx(shift / (1 - slope), abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pfedme_held_ever_tighter_is_uniform_fedavg(share):
    """Exact inner steps, lr fixed: the gradient of the envelope becomes that of F, an outer step one of FedAvg's."""
    tight = ps.PFedMe(1e7, ETA, OUTER, 5e-8, 60)
    plain = ps.FedAvg(lr=ETA, steps=OUTER, uniform=True)
    assert play(tight, bed(), 6, share).models() == pytest.approx(play(plain, bed(), 6, share).models(), abs=1e-5)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.4])
def test_pfedmes_defaults_follow_the_rate_of_the_site(rate):
    """lam = 1 / 5r, inner_lr = r / 1.2, lr = 1 / lam: the numbers that could be given, and a scale-free round."""
    lam, sites = 0.2 / rate, bed(A / 4 / rate, lr=rate)
    given, found = play(ps.PFedMe(lam, 1 / lam, 20, rate / 1.2), sites, 3), play(ps.PFedMe(), sites, 3)
    assert found.models() == pytest.approx(given.models(), abs=1e-12)
    assert found.own() == pytest.approx(given.own(), abs=1e-12)
    assert found.models() == pytest.approx(play(ps.PFedMe(), bed(A / 4, lr=1.0), 3).models(), abs=1e-10)


def test_pfedme_takes_its_inner_steps_on_one_minibatch_and_the_next_ones_on_the_next():
    class Asked(Quadratic):
        def fit(self, params, objective, budget):
            asked.append((budget.minibatch, budget.steps, objective.tilt.anchor["w"].item()))
            return super().fit(params, objective, budget)

    asked = []
    PFEDME.local(Payload(model=START), Payload(), Asked(1.0, np.array([0.0])))
    assert [x[:2] for x in asked] == [(r, INNER) for r in range(OUTER)]
    assert asked[0][2] == Q0 and len({anchor for *_, anchor in asked}) == OUTER  # the anchor moves with w_k


def test_pfedmes_own_models_cross_the_wire_in_neither_direction():
    run = play(ps.PFedMe(LAM, ETA, OUTER, ETA_P, INNER), bed(), 5)
    assert not {x.item() for x in crossed(run)} & set(run.own())


# FedAMP
SIG, AL, LAM1 = 3.0, 0.5, 1.0
FEDAMP = ps.FedAMP(LAM1 / AL, SIG, AL)


def slope(x, sigma=SIG):
    return np.exp(-x / sigma) / sigma


def test_fedamp_first_round_and_limit():
    kappa, run = LAM1 / AL, play(FEDAMP, bed(), 250)
    aim = (A * B + kappa * Q0) / (A + kappa)
    assert run.own(round=0) == pytest.approx(aim + (1 - ETA * (A + kappa)) ** K * (Q0 - aim), abs=1e-12)
    w = run.own()
    gap = w[:, None] - w[None]
    assert A * (w - B) + LAM1 * np.sum(slope(gap**2) * gap, 1) == pytest.approx(np.zeros(4), abs=1e-7)
    assert abs(w - B).max() > 0.1


def test_fedamp_without_attraction_is_local_training():
    """alpha = 0: every site is held near its own last model, pull = 0: it is not held at all."""
    assert same(play(ps.FedAMP(0.0), bed(), 6).memories, play(ps.Local(), bed(), 6).memories)
    pull, rounds = 0.8, 7
    shrink = 1 - (1 - (1 - ETA * (A + pull)) ** K) * A / (A + pull)
    held = play(ps.FedAMP(pull, alpha=0.0), bed(), rounds).own()
    assert held == pytest.approx(B + shrink**rounds * (Q0 - B), abs=1e-12)


def heard(algorithm, *rounds):
    """The state after rounds of {site: its model}."""
    state = algorithm.init(START, NAMES)
    for models in rounds:
        state = algorithm.merge(state, {i: Payload(model={"w": np.array([x])}) for i, x in models.items()})
    return state


def sent(algorithm, state, site):
    return algorithm.send(state, [site])[site]["model"]["w"].item()


def test_fedamp_keeps_the_last_model_of_an_absent_site_and_means_for_a_new_one():
    state = heard(FEDAMP, {"s0": 0.0, "s1": 1.0, "s2": 4.0}, {"s0": 0.5, "s2": 3.0})
    w = np.array([0.5, 1.0, 3.0])
    x = AL * slope((w - w[0]) ** 2)
    assert sent(FEDAMP, state, "s0") == pytest.approx(w[0] + x[1:] @ (w[1:] - w[0]), abs=1e-12)
    assert sent(FEDAMP, state, "s3") == sent(FEDAMP, state, "stranger") == pytest.approx(w.mean(), abs=1e-12)
    assert sent(FEDAMP, heard(FEDAMP), "s3") == Q0


def test_fedamp_finds_its_own_scale_in_every_round_unless_it_is_frozen():
    rule, models = ps.FedAMP(), {"s0": 0.0, "s1": 1.0, "s2": 3.0}
    state = heard(ps.FedAMP(freeze=True), {"s0": 2.0}, models, {"s1": 90.0})
    assert state.sigma == median((1.0, 4.0, 9.0)) and heard(rule, {"s0": 2.0}).sigma is None
    assert heard(rule, {"s0": 2.0}, models, {"s1": 90.0}).sigma == median((90.0**2, 87.0**2, 9.0))
    before = heard(rule, models)
    x = {j: np.exp(-((models[j] - 1.0) ** 2) / 4) / 3 for j in ("s0", "s2")}
    assert before.attention["s1"] == pytest.approx({**x, "s1": 1 - sum(x.values())}, abs=1e-12)
    assert rule.diagnostics(before)["sigma"] == 4.0 and 1 / 3 < rule.diagnostics(before)["own"] < 1
    together = heard(rule, models, dict.fromkeys(models, 5.0)).attention
    assert together["s0"] == pytest.approx(dict.fromkeys(models, 1 / 3))  # all alike: the plain mean
    assert heard(rule, dict.fromkeys(models, 5.0)).sigma is None  # and no scale to be had from that
    assert heard(rule, models, dict.fromkeys(models, 5.0)).sigma == 4.0  # the last one that there was


def test_fedamp_holds_by_the_effort_of_a_round():
    """pull = 1 / reach, reach = K eta: over a round of any rate and length, K steps of 1 - eta a - 1/K."""
    for eta, steps in ((0.1, 5), (0.02, 25), (0.4, 2)):
        run = play(ps.FedAMP(), bed(lr=eta, steps=steps), 2)
        free = B + (1 - eta * A) ** steps * (Q0 - B)  # the first round is local training
        assert run.own(round=0) == pytest.approx(free, abs=1e-12)
        assert [m["reach"] for m in run.kept[0].values()] == pytest.approx([eta * steps] * 4)
        cloud = np.array([sent(ps.FedAMP(), run.states[0], i) for i in NAMES])
        pull = 1 / (eta * steps)
        aim = (A * B + pull * cloud) / (A + pull)
        assert run.own() == pytest.approx(aim + (1 - eta * (A + pull)) ** steps * (free - aim), abs=1e-12)
    flat = Quadratic(1e-12, np.zeros(1), lr=0.01, steps=100)  # without a loss, a round goes 1 - 1/e of the way
    for w in (0.0, 3.0):
        memory = Payload(model={"w": np.array([w])}, reach=1.0)
        reply, _ = ps.FedAMP().local(Payload(model={"w": np.array([5.0])}, pull=1.0), memory, flat)
        assert (reply["model"]["w"].item() - w) / (5.0 - w) == pytest.approx(1 - np.exp(-1), abs=2e-3)


def test_fedamp_with_a_fading_alpha():
    rule = ps.FedAMP(2.0, SIG, AL, decay=0.1, every=2)
    pulls = [r.sent["s0"]["pull"] for r in play(rule, bed(), 5).rounds]
    assert pulls == pytest.approx([2.0, 2.0, 20.0, 20.0, 200.0])
    once = {"s0": 0.0, "s1": 1.0}
    for rounds, left in ((1, 1.0), (2, 0.1), (4, 0.01)):
        found = heard(rule, *[once] * rounds).attention["s0"]["s1"]
        assert found == pytest.approx(left * AL * slope(1.0), abs=1e-15)


@pytest.mark.parametrize("third", [[0.0, -3.0], [0.0, 0.0]], ids=["at a right angle", "zeros point nowhere"])
def test_fedamp_by_direction(third):
    rule = ps.FedAMP(cosine=2.0, own=0.4)
    points = {"s0": [1.0, 0.0], "s1": [2.0, 2.0], "s2": third}
    state = rule.init({"w": np.zeros(2)}, NAMES[:3])
    state = rule.merge(state, {i: Payload(model={"w": np.array(x)}) for i, x in points.items()})
    force = np.exp(2.0 * np.array([np.sqrt(0.5), 0.0]))
    want = [0.4, *0.6 * force / force.sum()]
    assert list(state.attention["s0"].values()) == pytest.approx(want, abs=1e-12)
    cloud = rule.send(state, ["s0"])["s0"]["model"]["w"]
    assert cloud == pytest.approx(np.array(want) @ np.array(list(points.values())), abs=1e-12)
    if not any(third):
        assert list(state.attention["s2"].values()) == pytest.approx([0.3, 0.3, 0.4], abs=1e-12)
    alone = ps.FedAMP(cosine=2.0)
    assert heard(alone, {"s0": 3.0}).attention == {"s0": {"s0": 1.0}}
    assert heard(alone, {"s0": 3.0, "s1": 1.0}).attention["s0"]["s0"] == 0.5


def test_fedamp_compares_by_what_it_is_told_and_leaves_statistics_to_their_site():
    rule = ps.FedAMP(1.0, SIG, AL, on=("head.*",))
    points = {"s0": (0.0, 1.0, 7.0), "s1": (90.0, 2.0, 5.0)}
    names = ("body.w", "head.w", "norm.running_var")
    found = {i: Payload(model={k: np.array([x]) for k, x in zip(names, xs, strict=True)}) for i, xs in points.items()}
    state = rule.merge(rule.init(found["s0"]["model"], ["s0", "s1"]), found)
    assert state.attention["s0"]["s1"] == pytest.approx(AL * slope(1.0), abs=1e-15)
    sent = rule.send(state, ["s0", "new"])
    assert sent["s0"]["model"]["norm.running_var"] == 7.0 and sent["new"]["model"]["norm.running_var"] == 6.0


# L2GD
RULE = ps.L2gd(lam=0.9, p=0.4, lr=0.08)
PULL = 0.08 * 0.9 * 0.6 / 0.4  # theta


def toss(x, coin, rate=RULE.lr, pull=PULL):
    return (1 - pull) * x + pull * x.mean() if coin else x - rate * A * (x - B)


def coins(run):
    """Every toss of a run."""
    told = [(int(r.diagnostics["aggregations"]), int(r.diagnostics["local steps"])) for r in run.rounds]
    return [coin for ones, zeros in told for coin in [1] * ones + [0] * zeros]


def test_l2gd_first_round_is_a_run_of_local_steps():
    ones, zeros = RULE.tosses(0)
    assert ones >= 1 and zeros >= 1
    assert play(RULE, bed(), 1).own() == pytest.approx(B + (1 - 0.08 * A) ** zeros * (Q0 - B), abs=1e-12)


def test_l2gd_is_the_coin_tossed_one_by_one():
    run, x = play(RULE, bed(), 40), np.full(4, Q0)
    for coin in coins(run):
        x = toss(x, coin)
    assert run.own() == pytest.approx(x, abs=1e-12) and run.models()[-1] == pytest.approx(x.mean(), abs=1e-12)


class Fixed(ps.L2gd):
    """L2GD with a coin whose runs are known: (ones, zeros) of every round."""

    def tosses(self, round):
        return self.runs[round]


def after_these(coins):
    """The sites' models after a string of tosses, by rounds as far as there are whole ones."""
    runs = [[int(coin), len(list(g))] for coin, g in groupby(coins)]
    if runs[0][0] == 0:
        runs.insert(0, [1, 1])  # from a common start a one moves nothing
    last = runs.pop()[1] if runs[-1][0] == 1 else 0
    rule = Fixed(RULE.lam, RULE.p, RULE.lr)
    object.__setattr__(rule, "runs", [(runs[i][1], runs[i + 1][1]) for i in range(0, len(runs), 2)])
    x = play(rule, bed(), len(rule.runs)).own() if rule.runs else np.full(4, Q0)
    for _ in range(last):
        x = toss(x, 1)
    return x


@pytest.mark.parametrize("rate", [0.001, 0.08, 1.5])
def test_l2gd_by_default_goes_half_of_the_way_to_the_mean_at_any_rate(rate):
    """theta = 1/2, as with lam = p / (2 lr (1 - p))."""
    p, sites, x = 0.4, bed(A * 0.08 / rate, lr=rate), np.full(4, Q0)
    run, given = (play(rule, sites, 12) for rule in (ps.L2gd(p=p), ps.L2gd(lam=p / (2 * rate * (1 - p)), p=p)))
    for coin in coins(run):
        x = toss(x, coin, 0.08, 0.5)
    assert run.own() == pytest.approx(x, abs=1e-12) and run.own() == pytest.approx(given.own(), abs=1e-12)


def test_l2gd_is_gradient_descent_in_expectation():
    """Over all strings of six tosses: the step is alpha/m = lr (1 - p), on the sum of F_k and lam/2 |x_k - x|^2."""
    p, mean = RULE.p, np.zeros(4)
    for coins in product((0, 1), repeat=6):
        mean += p ** sum(coins) * (1 - p) ** (6 - sum(coins)) * after_these(coins)
    x = np.full(4, Q0)
    for _ in range(6):
        x = x - RULE.lr * (1 - p) * (A * (x - B) + RULE.lam * (x - x.mean()))
    assert mean == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_l2gd_without_a_pull_is_local_training(share):
    """To the last bit, from what a site was first sent, with the steps that the coin gives; absent, it does nothing."""
    run = play(ps.L2gd(lam=0.0, p=0.3), bed(), 8, share)
    for i, s in bed().items():
        x = {}
        for r in run.rounds:
            if i in r.replies:
                steps = Budget(steps=int(r.diagnostics["local steps"]))
                x = s.fit(x or r.sent[i]["model"], budget=steps).params
        assert same(dict(run.memories[i].get("model", {})), x)
    assert not same(run.memories, play(ps.L2gd(lam=0.1, p=0.3), bed(), 8, share).memories)


def test_l2gd_exchanges_only_where_a_one_follows_a_zero():
    """Counted in bytes, of a run and of its rehearsal: one exchange for every run of ones, not for every one."""
    each = 4 * (8 + 2 * 8 + 8)  # four sites: the model and two numbers down, the model up
    for p in (0.1, 0.8):
        rule = ps.L2gd(lam=0.01, p=p)
        run = play(rule, bed(), 300)
        tossed, moved = coins(run), sum(payload.nbytes for payload in run.crossed)
        begun = 1 + sum(b > a for a, b in pairwise(tossed))  # the first run has no zero before it
        assert moved == begun * each == 300 * each
        assert sum(tossed) / len(tossed) == pytest.approx(p, abs=0.06)
        loads = list(rehearse(rule, START, dict.fromkeys(NAMES, 2), rounds=300))
        assert sum(x.down + x.up for load in loads for x in load.values()) == moved
        assert sum(load["s0"].steps for load in loads) == tossed.count(0)
        # with p (1 - p) exchanges a toss, less than one for every aggregation
        assert moved / len(tossed) / each == pytest.approx(p * (1 - p), rel=0.1)


def test_l2gds_coin_is_one_for_all_and_known_from_the_state():
    state = ps.L2gd(p=0.3).init(START, NAMES)
    one, two = ps.L2gd(p=0.3).send(state, NAMES), ps.L2gd(p=0.3).send(state, ["s2"])
    assert len({(p["ones"], p["zeros"]) for p in one.values()}) == 1 and one["s2"] == two["s2"]
    runs = [[ps.L2gd(p=0.3, seed=s).tosses(r) for r in range(2000)] for s in (0, 1)]
    assert runs[0] != runs[1] and runs[0] == [ps.L2gd(p=0.3).tosses(r) for r in range(2000)]
    ones, zeros = np.mean(runs[0], 0)
    assert ones == pytest.approx(1 / 0.7, rel=0.05) and zeros == pytest.approx(1 / 0.3, rel=0.05)


def test_l2gd_lets_a_newcomer_start_from_the_mean_and_keeps_statistics_at_home():
    rule, s = ps.L2gd(lam=0.5, p=0.4, lr=0.05), Quadratic(2.0, np.array([1.0]), start=PARTS)
    got = Payload(model={k: v * 3 for k, v in PARTS.items()}, ones=2, zeros=3)
    reply, memory = rule.local(got, Payload(), s)
    assert same(dict(reply["model"]), dict(s.fit(got["model"], budget=Budget(lr=0.05, steps=3)).params))
    again, _ = rule.local(got, memory, s)
    keep = (1 - 0.05 * 0.5 * 0.6 / 0.4) ** 2
    start = {k: got["model"][k] + keep * (memory["model"][k] - got["model"][k]) for k in tree.trained(PARTS)}
    want = s.fit({**memory["model"], **start}, budget=Budget(lr=0.05, steps=3)).params
    assert all(again["model"][k] == pytest.approx(want[k], abs=1e-12) for k in PARTS)
    assert again["model"]["norm.running_var"] == 0.9 * memory["model"]["norm.running_var"] + 0.1 * 4


def test_l2gd_goes_no_further_than_to_the_mean():
    """At a site whose rate is too large for its lam, theta is 1: it is at the mean before it trains."""
    wild, s = ps.L2gd(lam=50.0, p=0.2), Quadratic(1.0, np.array([0.0]), lr=0.5)
    memory = Payload(model={"w": np.array([9.0])}, lr=0.5)
    got = Payload(model={"w": np.array([2.0])}, ones=1, zeros=1)
    assert wild.local(got, memory, s)[0]["model"]["w"] == pytest.approx(2.0 - 0.5 * 2.0)


# SuPerFed
MU, NU = 0.01, 2.0


def pairs(rounds, start=Q0):
    """Both models of every site in the mean over lam, as affine maps of (w_k, v_k, 1), K steps a round."""
    w, v = start, 0.1 * A - 0.5 * Q0
    for _ in range(rounds):
        f = np.full(4, w)
        for _ in range(K):
            gf, gl = A * (f / 3 + v / 6 - B / 2) + 2 * MU * (f - w), A * (f / 6 + v / 3 - B / 2)
            f, v = f - ETA * gf, v - ETA * gl
        w = sum(P * f)
    return w, v


def test_superfed_first_round_with_twins():
    run, (w, v) = play(ps.SuPerFed(MU, NU, after=0), bed(), 1), pairs(1)
    assert run.models() == pytest.approx([w], abs=1e-12) and run.own("twin") == pytest.approx(v, abs=1e-12)


def test_superfed_limit_is_that_of_its_mean_dynamics():
    """z = (w_k, v_k) goes to z* + T^K (z - z*) in a round: a linear equation for w and all twins."""
    system, right = np.zeros((5, 5)), np.zeros(5)
    system[0, 0] = 1
    for i in range(4):
        curve = np.array([[A[i] / 3 + 2 * MU, A[i] / 6], [A[i] / 6, A[i] / 3]])
        power = np.linalg.matrix_power(np.eye(2) - ETA * curve, K)
        moved = (np.eye(2) - power) @ np.linalg.inv(curve)
        fixed, by_w, by_v = moved @ np.full(2, A[i] * B[i] / 2), moved @ [2 * MU, 0.0] + power[:, 0], power[:, 1]
        system[0, 0] -= P[i] * by_w[0]
        system[0, 1 + i] -= P[i] * by_v[0]
        right[0] += P[i] * fixed[0]
        system[1 + i, 0] -= by_w[1]
        system[1 + i, 1 + i] += 1 - by_v[1]
        right[1 + i] += fixed[1]
    want = np.linalg.solve(system, right)
    run = play(ps.SuPerFed(MU, NU, after=3), bed(), 300)
    assert [run.models()[-1], *run.own("twin")] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_superfed_without_twins_is_fedprox_with_twice_the_mu_to_the_last_bit(share):
    rules = ps.SuPerFed(0.3, after=6), ps.FedProx(0.6), ps.SuPerFed(0.3, after=5)
    mine, theirs, later = (play(rule, four(), 6, share, PARTS) for rule in rules)
    assert same([s.model for s in mine.states], [s.model for s in theirs.states]) and not any(mine.memories.values())
    assert same(later.states[4].model, theirs.states[4].model)
    assert not same(later.states[5].model, theirs.states[5].model)
    assert [i for i, m in later.memories.items() if "twin" in m] == list(later.last.replies)


def test_superfed_counts_its_first_rounds_as_a_share_of_all():
    assert ps.SuPerFed().scaled(30).after == 12 and ps.SuPerFed(after=7).scaled(30) == ps.SuPerFed(after=7)
    run = play(ps.SuPerFed().scaled(10), four(), 10, start=PARTS)
    assert [bool(r.sent["a"]["twins"]) for r in run.rounds] == [False] * 4 + [True] * 6


@pytest.mark.parametrize("by", ["model", "layer"])
def test_the_mean_over_all_mixtures_is_what_the_quadratic_sites_descend(by):
    rng = np.random.default_rng(0)
    names, a, b, nu = ("x.w", "x.b", "y.w", "z.w"), 1.7, 0.4, 0.8
    u, v = ({k: rng.normal(size=1) for k in names} for _ in range(2))
    del v["z.w"]
    nodes, weights = np.polynomial.legendre.leggauss(6)
    grid = [((x + 1) / 2, w / 2) for x, w in zip(nodes, weights, strict=True)]
    parts = [("x", "y")] if by == "model" else [("x",), ("y",)]

    def objective(u, v):
        total = 0.0
        for draw in product(grid, repeat=len(parts)):
            lam = {part: x for group, (x, _) in zip(parts, draw, strict=True) for part in group}
            point = sum((1 - lam[k[0]]) * u[k] + lam[k[0]] * v[k] if k in v else u[k] for k in names).item()
            total += np.prod([w for _, w in draw]) * a / 2 * (point - b) ** 2
        mixed = {k: u[k] for k in v}
        return total + nu * tree.dot(mixed, v) ** 2 / tree.dot(mixed, mixed) / tree.dot(v, v)

    mine, other = mixed_gradients(a, b, u, v, Mix(v, nu, by))
    for k in names:
        steps = [objective({**u, k: u[k] + e}, v) for e in (1e-5, -1e-5)]
        assert mine[k].item() == pytest.approx((steps[0] - steps[1]) / 2e-5, abs=1e-7)
        if k in v:
            steps = [objective(u, {**v, k: v[k] + e}) for e in (1e-5, -1e-5)]
            assert other[k].item() == pytest.approx((steps[0] - steps[1]) / 2e-5, abs=1e-7)


def test_superfeds_twins_cross_the_wire_in_neither_direction_and_wait_for_their_site():
    run, seen, before = play(ps.SuPerFed(after=1, shared=("head.*",)), four(), 6, 0.5, PARTS, wire=True), set(), {}
    for r, memories in zip(run.rounds, run.kept, strict=True):
        for i, m in memories.items():
            assert i in r.replies or m == before.get(i, Payload())
            if m:
                assert set(m) == {"twin"} and set(m["twin"]) == {"body.w"}
                seen.add(m["twin"]["body.w"].item())
        before = memories
    assert len(seen) > 8 and not seen & {x.item() for x in crossed(run)}


def test_superfed_serves_the_mixture_that_does_best_on_validation_cases():
    class Judged(Quadratic):
        def cases(self, split):
            return {"train": ("t",), "validation": self.kept, "test": ("x",)}[split]

        def score(self, params, cases):
            asked.append((set(cases), params["norm.running_var"].item()))
            return {n: CaseScore({"L": 1 - abs(params["w"].item() - 0.61)}, -params["w"].item()) for n in cases}

    got = Payload(model={"w": np.array([0.0]), "norm.running_var": np.array([5.0])}, twins=1)
    memory = Payload(twin={"w": np.array([1.0])})
    for kept, judged in ((("v",), {"v"}), ((), {"t"})):
        asked, s = [], Judged(3.0, np.array([0.0]))
        s.kept = kept
        ((found, cases),) = ps.SuPerFed().serve(got, memory, s, ("x",))
        assert found["w"] == pytest.approx(0.6) and cases == ("x",)
        assert asked == [(judged, 9.0)] * 11 and found["norm.running_var"] == 9.0  # measured anew for every mixture
        ((found, _),) = ps.SuPerFed(choices=(1.0, 0.25)).serve(got, memory, s, ("x",))
        assert found["w"] == 0.25
    ((plain, _),) = ps.SuPerFed().serve(got, Payload(), s, ("x",))
    assert plain["w"] == 0.0 and plain["norm.running_var"] == 5.0


def test_factors_go_around_those_that_average():
    assert ps.Weighted({"a": 0.3}, ps.SuPerFed()).reply == ps.SuPerFed().reply
    assert ps.Weighted({"a": 0.3}, ps.PFedMe()).reply["weight"] == "one"


def test_fedamp_compares_trained_parameters_and_not_running_statistics():
    """Models that differ only in running statistics are as near as models can be."""
    rule = ps.FedAMP()
    state = rule.init({"w": np.zeros(2), "norm.running_mean": np.zeros(1)}, ["a", "b", "c"])

    def merged(statistics):
        models = {i: {"w": np.full(2, x), "norm.running_mean": np.array([s])} for i, (x, s) in statistics.items()}
        return rule.merge(state, {i: Payload(model=m) for i, m in models.items()})

    plain = merged({"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (3.0, 0.0)})
    noisy = merged({"a": (0.0, 900.0), "b": (1.0, -900.0), "c": (3.0, 0.0)})
    assert noisy.attention == plain.attention and noisy.sigma == plain.sigma
