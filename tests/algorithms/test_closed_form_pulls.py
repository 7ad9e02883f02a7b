"""pFedMe, FedAMP, L2GD and SuPerFed against answers on paper: first round, limit, and what they become at the edges."""

from itertools import groupby, pairwise, product
from statistics import median

import numpy as np
import pytest
from scipy.optimize import brentq

from polysite import tree
from polysite.algorithms.fedamp import FedAMP
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.l2gd import L2gd
from polysite.algorithms.local import Local
from polysite.algorithms.pfedme import PFedMe
from polysite.algorithms.superfed import SuPerFed
from polysite.algorithms.weighted import Weighted
from polysite.costs.rehearsal import rehearse
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import Budget, CaseScore, Mix
from quadratic import Quadratic, mixed_gradients
from table import START as PARTS
from table import same
from table import sites as four

A, B, N = np.array([0.5, 1.0, 2.0, 3.0]), np.array([-1.0, 0.3, 2.0, 0.9]), np.array([2, 8, 5, 5])
P, ETA, K, Q0 = N / N.sum(), 0.1, 5, 0.7
START = {"w": np.array([Q0])}
NAMES = ["s0", "s1", "s2", "s3"]


def bed(a=A, b=B, n=N, kind=Quadratic, **kw):
    return {
        f"s{i}": kind(a[i], np.full(n[i], b[i]), **{"lr": ETA, "steps": K, "start": START, **kw}) for i in range(len(b))
    }


def played(algorithm, sites, rounds, share=1.0, start=START):
    """(The rounds, what the sites remember in the end.)"""
    engine = Simulator(algorithm, sites)
    return list(run_rounds(algorithm, engine, start, Plan(rounds=rounds, share=share), seed=0)), engine.memories()


def own(memories, field="model"):
    return np.array([m[field]["w"].item() for _, m in sorted(memories.items())])


def model(rounds):
    return rounds[-1].state.model["w"].item()


def crossed(rounds):
    """Every array that went over the wire."""
    payloads = [p for r in rounds for p in (*r.sent.values(), *(x.payload for x in r.replies.values()))]
    return [x for p in payloads for v in p.values() if not isinstance(v, float) for x in v.values()]


# pFedMe: the letters of the specification
LAM, OUTER, BETA, INNER, ETA_P = 2.0, 3, 0.9, 7, 0.05
SIGMA = (1 - ETA_P * (A + LAM)) ** INNER
SHRINK = 1 - ETA * LAM * (1 - SIGMA) * A / (A + LAM)  # of w - b in an outer step
PFEDME = PFedMe(LAM, ETA, OUTER, ETA_P, INNER, warm=False, beta=BETA)


def theta(w):
    """The inner steps from w."""
    aim = (A * B + LAM * w) / (A + LAM)
    return aim + SIGMA * (w - aim)


def test_pfedme_first_round_and_limit():
    rounds, memories = played(PFEDME, bed(), 1)
    assert model(rounds) == pytest.approx((1 - BETA) * Q0 + BETA * np.mean(B + SHRINK**OUTER * (Q0 - B)), abs=1e-12)
    assert own(memories) == pytest.approx(theta(B + SHRINK ** (OUTER - 1) * (Q0 - B)), abs=1e-12)
    rounds, memories = played(PFEDME, bed(), 400)
    limit = sum((1 - SHRINK**OUTER) * B) / sum(1 - SHRINK**OUTER)
    assert model(rounds) == pytest.approx(limit, abs=1e-9)
    assert own(memories) == pytest.approx(theta(B + SHRINK ** (OUTER - 1) * (limit - B)), abs=1e-9)


def test_pfedme_serves_its_own_model_and_a_stranger_what_the_inner_steps_make_of_the_shared_one():
    sites = bed()
    rounds, memories = played(PFEDME, sites, 400)
    got = PFEDME.send(rounds[-1].state, ["any"])["any"]
    for k, (i, s) in enumerate(sites.items()):
        ((mine, _),) = PFEDME.serve(got, memories[i], s, ("0",))
        assert mine["w"] == memories[i]["model"]["w"] != got["model"]["w"]
        ((theirs, _),) = PFEDME.serve(got, Payload(), s, ("0",))
        assert theirs["w"] == pytest.approx(theta(model(rounds))[k], abs=1e-12)
    ((plain, _),) = PFEDME.serve(got, Payload(), Quadratic(1.0, np.array([])), ())
    assert plain["w"] == got["model"]["w"]


def test_pfedme_with_a_warm_start():
    """(w, v, 1) goes through an affine map OUTER times, from v = w."""
    warm, maps = PFedMe(LAM, ETA, OUTER, ETA_P, INNER), []
    for a, b, s in zip(A, B, SIGMA, strict=True):
        v = np.array([(1 - s) * LAM / (a + LAM), s, (1 - s) * a * b / (a + LAM)])
        w = np.array([1 - ETA * LAM, 0, 0]) + ETA * LAM * v
        maps.append(np.linalg.matrix_power(np.array([w, v, [0, 0, 1]]), OUTER))
    slope, shift = np.mean([m[0, 0] + m[0, 1] for m in maps]), np.mean([m[0, 2] for m in maps])
    rounds, memories = played(warm, bed(), 1)
    assert model(rounds) == pytest.approx(slope * Q0 + shift, abs=1e-12)
    assert own(memories) == pytest.approx([m[1] @ [Q0, Q0, 1] for m in maps], abs=1e-12)
    assert model(played(warm, bed(), 400)[0]) == pytest.approx(shift / (1 - slope), abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pfedme_held_ever_tighter_is_uniform_fedavg(share):
    """Exact inner steps, lr fixed: the gradient of the envelope becomes that of F, an outer step one of FedAvg's."""
    tight = PFedMe(1e7, ETA, OUTER, 5e-8, 60)
    plain = FedAvg(lr=ETA, steps=OUTER, uniform=True)
    for x, y in zip(played(tight, bed(), 6, share)[0], played(plain, bed(), 6, share)[0], strict=True):
        assert x.state.model["w"] == pytest.approx(y.state.model["w"], abs=1e-5)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.4])
def test_pfedmes_defaults_follow_the_rate_of_the_site(rate):
    """lam = 1 / 5r, inner_lr = r / 1.2, lr = 1 / lam: the numbers that could be given, and a scale-free round."""
    sites = {i: Quadratic(a / rate, s.b, lr=rate, start=START) for (i, s), a in zip(bed().items(), A / 4, strict=True)}
    lam = 0.2 / rate
    given, memories = played(PFedMe(lam, 1 / lam, 20, rate / 1.2), sites, 3)
    found, mine = played(PFedMe(), sites, 3)
    assert model(found) == pytest.approx(model(given), abs=1e-12) and own(mine) == pytest.approx(
        own(memories), abs=1e-12
    )
    reference = {i: Quadratic(a, s.b, lr=1.0, start=START) for (i, s), a in zip(bed().items(), A / 4, strict=True)}
    assert model(found) == pytest.approx(model(played(PFedMe(), reference, 3)[0]), abs=1e-10)


def test_pfedme_with_its_default_rate_ends_an_outer_step_at_the_personal_model():
    one, memories = played(PFedMe(outer=1), bed(), 1)
    assert [r.payload["model"]["w"].item() for _, r in sorted(one[0].replies.items())] == pytest.approx(own(memories))
    r, lam = ETA, 0.2 / ETA
    aim = (A * B + lam * Q0) / (A + lam)
    want = aim + (1 - r / (1 + r * lam) * (A + lam)) ** 5 * (Q0 - aim)
    assert own(memories) == pytest.approx(want, abs=1e-12)


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
    rounds, memories = played(PFedMe(LAM, ETA, OUTER, ETA_P, INNER), bed(), 5)
    assert not {x.item() for x in crossed(rounds)} & set(own(memories))


# FedAMP
SIG, AL, LAM1 = 3.0, 0.5, 1.0
FEDAMP = FedAMP(LAM1 / AL, SIG, AL)


def slope(x, sigma=SIG):
    return np.exp(-x / sigma) / sigma


def test_fedamp_first_round_and_limit():
    kappa = LAM1 / AL
    aim = (A * B + kappa * Q0) / (A + kappa)
    want = aim + (1 - ETA * (A + kappa)) ** K * (Q0 - aim)
    assert own(played(FEDAMP, bed(), 1)[1]) == pytest.approx(want, abs=1e-12)
    w = own(played(FEDAMP, bed(), 600)[1])
    gap = w[:, None] - w[None]
    assert A * (w - B) + LAM1 * np.sum(slope(gap**2) * gap, 1) == pytest.approx(np.zeros(4), abs=1e-9)
    assert abs(w - B).max() > 0.1


def test_fedamp_of_a_symmetric_pair():
    far = 1.3
    root = brentq(lambda x: x - far + 2 * LAM1 * x * slope(4 * x * x), 0, far)
    sites = bed(np.ones(2), np.array([far, -far]), [1, 1])
    assert own(played(FEDAMP, sites, 600, start={"w": np.array([0.0])})[1]) == pytest.approx([root, -root], abs=1e-9)


def test_fedamp_without_attraction_is_local_training():
    """alpha = 0: every site is held near its own last model, pull = 0: it is not held at all."""
    assert same(played(FedAMP(0.0), bed(), 6)[1], played(Local(), bed(), 6)[1])
    pull, rounds = 0.8, 7
    shrink = 1 - (1 - (1 - ETA * (A + pull)) ** K) * A / (A + pull)
    held = own(played(FedAMP(pull, alpha=0.0), bed(), rounds)[1])
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
    rule, models = FedAMP(), {"s0": 0.0, "s1": 1.0, "s2": 3.0}
    state = heard(FedAMP(freeze=True), {"s0": 2.0}, models, {"s1": 90.0})
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


def test_fedamp_gives_the_same_weights_to_models_a_thousand_times_further_apart():
    """A frozen scale leaves every site to itself once training has driven the models apart."""
    models = {"s0": 0.0, "s1": 1.0, "s2": 3.0}
    apart = {i: 1024 * w for i, w in models.items()}
    now, later = heard(FedAMP(), models).attention, heard(FedAMP(), models, apart).attention
    assert all(later[i] == pytest.approx(now[i], abs=1e-12) for i in models)
    alone = heard(FedAMP(freeze=True), models, apart).attention
    assert all(alone[i][i] == pytest.approx(1.0) for i in models)


def test_fedamp_holds_by_the_effort_of_a_round():
    """pull = 1 / reach, reach = K eta: over a round of any rate and length, K steps of 1 - eta a - 1/K."""
    for eta, steps in ((0.1, 5), (0.02, 25), (0.4, 2)):
        sites = bed(lr=eta, steps=steps)
        free = B + (1 - eta * A) ** steps * (Q0 - B)  # the first round is local training
        rounds, memories = played(FedAMP(), sites, 1)
        assert own(memories) == pytest.approx(free, abs=1e-12)
        assert [m["reach"] for _, m in sorted(memories.items())] == pytest.approx([eta * steps] * 4)
        cloud = np.array([sent(FedAMP(), rounds[0].state, i) for i in NAMES])
        pull = 1 / (eta * steps)
        aim = (A * B + pull * cloud) / (A + pull)
        want = aim + (1 - eta * (A + pull)) ** steps * (free - aim)
        assert own(played(FedAMP(), sites, 2)[1]) == pytest.approx(want, abs=1e-12)
    flat = bed(a=np.full(4, 1e-12), lr=0.01, steps=100)  # without a loss, a round goes 1 - 1/e of the way to the cloud
    engine = {
        i: Payload(model={"w": np.array([w])}, reach=1.0) for i, w in zip(NAMES, (0.0, 1.0, 2.0, 3.0), strict=True)
    }
    for i, s in flat.items():
        reply, _ = FedAMP().local(Payload(model={"w": np.array([5.0])}, pull=1.0), engine[i], s)
        before = engine[i]["model"]["w"].item()
        assert (reply["model"]["w"].item() - before) / (5.0 - before) == pytest.approx(1 - np.exp(-1), abs=2e-3)


def test_fedamp_with_a_fading_alpha():
    rule = FedAMP(2.0, SIG, AL, decay=0.1, every=2)
    pulls = [r.sent["s0"]["pull"] for r in played(rule, bed(), 5)[0]]
    assert pulls == pytest.approx([2.0, 2.0, 20.0, 20.0, 200.0])
    once = {"s0": 0.0, "s1": 1.0}
    for rounds, left in ((1, 1.0), (2, 0.1), (4, 0.01)):
        found = heard(rule, *[once] * rounds).attention["s0"]["s1"]
        assert found == pytest.approx(left * AL * slope(1.0), abs=1e-15)


def test_fedamp_by_direction():
    rule = FedAMP(cosine=2.0, own=0.4)
    state = rule.init({"w": np.zeros(2)}, NAMES[:3])
    points = {"s0": [1.0, 0.0], "s1": [2.0, 2.0], "s2": [0.0, -3.0]}
    state = rule.merge(state, {i: Payload(model={"w": np.array(x)}) for i, x in points.items()})
    force = np.exp(2.0 * np.array([np.sqrt(0.5), 0.0]))
    want = [0.4, *0.6 * force / force.sum()]
    assert list(state.attention["s0"].values()) == pytest.approx(want, abs=1e-12)
    cloud = rule.send(state, ["s0"])["s0"]["model"]["w"]
    assert cloud == pytest.approx(np.array(want) @ np.array(list(points.values())), abs=1e-12)
    alone = FedAMP(cosine=2.0)
    assert heard(alone, {"s0": 3.0}).attention == {"s0": {"s0": 1.0}}
    assert heard(alone, {"s0": 3.0, "s1": 1.0}).attention["s0"]["s0"] == 0.5


def test_fedamp_compares_by_what_it_is_told_and_leaves_statistics_to_their_site():
    rule = FedAMP(1.0, SIG, AL, on=("head.*",))
    points = {"s0": (0.0, 1.0, 7.0), "s1": (90.0, 2.0, 5.0)}
    names = ("body.w", "head.w", "norm.running_var")
    found = {i: Payload(model={k: np.array([x]) for k, x in zip(names, xs, strict=True)}) for i, xs in points.items()}
    state = rule.merge(rule.init(found["s0"]["model"], ["s0", "s1"]), found)
    assert state.attention["s0"]["s1"] == pytest.approx(AL * slope(1.0), abs=1e-15)
    sent = rule.send(state, ["s0", "new"])
    assert sent["s0"]["model"]["norm.running_var"] == 7.0 and sent["new"]["model"]["norm.running_var"] == 6.0


# L2GD
RULE = L2gd(lam=0.9, p=0.4, lr=0.08)
PULL = 0.08 * 0.9 * 0.6 / 0.4  # theta


def toss(x, coin, rule=RULE, pull=PULL):
    return (1 - pull) * x + pull * x.mean() if coin else x - rule.lr * A * (x - B)


def test_l2gd_first_round_is_a_run_of_local_steps():
    ones, zeros = RULE.tosses(0)
    assert ones >= 1 and zeros >= 1
    assert own(played(RULE, bed(), 1)[1]) == pytest.approx(B + (1 - 0.08 * A) ** zeros * (Q0 - B), abs=1e-12)


def test_l2gd_is_the_coin_tossed_one_by_one():
    rounds, memories = played(RULE, bed(), 60)
    x = np.full(4, Q0)
    for r in rounds:
        told = r.diagnostics
        for coin in [1] * int(told["aggregations"]) + [0] * int(told["local steps"]):
            x = toss(x, coin)
    assert own(memories) == pytest.approx(x, abs=1e-12)
    assert model(rounds) == pytest.approx(x.mean(), abs=1e-12)


class Fixed(L2gd):
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
    x = own(played(rule, bed(), len(rule.runs))[1]) if rule.runs else np.full(4, Q0)
    for _ in range(last):
        x = toss(x, 1)
    return x


@pytest.mark.parametrize("rate", [0.001, 0.08, 1.5])
def test_l2gd_by_default_goes_half_of_the_way_to_the_mean_at_any_rate(rate):
    """theta = 1/2, as with lam = p / (2 lr (1 - p))."""
    p = 0.4
    sites = {i: Quadratic(s.a * 0.08 / rate, s.b, lr=rate, start=START) for i, s in bed().items()}
    rounds, memories = played(L2gd(p=p), sites, 12)
    x = np.full(4, Q0)
    for r in rounds:
        for coin in [1] * int(r.diagnostics["aggregations"]) + [0] * int(r.diagnostics["local steps"]):
            x = (x + x.mean()) / 2 if coin else x - 0.08 * A * (x - B)
    assert own(memories) == pytest.approx(x, abs=1e-12)
    given = played(L2gd(lam=p / (2 * rate * (1 - p)), p=p), sites, 12)[1]
    assert own(memories) == pytest.approx(own(given), abs=1e-12)


def test_l2gd_is_gradient_descent_in_expectation():
    """Over all strings of six tosses: the step is alpha/m = lr (1 - p), on the sum of F_k and lam/2 |x_k - x|^2."""
    p, mean = RULE.p, np.zeros(4)
    for coins in product((0, 1), repeat=6):
        mean += p ** sum(coins) * (1 - p) ** (6 - sum(coins)) * after_these(coins)
    x = np.full(4, Q0)
    for _ in range(6):
        x = x - RULE.lr * (1 - p) * (A * (x - B) + RULE.lam * (x - x.mean()))
    assert mean == pytest.approx(x, abs=1e-12)


def test_l2gd_settles_around_the_optimum_of_its_objective():
    middle = sum(A * B / (A + 0.9)) / sum(A / (A + 0.9))
    want = (A * B + 0.9 * middle) / (A + 0.9)
    slow = L2gd(lam=0.9, p=0.4, lr=4e-3)
    rounds, memories = played(slow, bed(), 1500)
    assert own(memories) == pytest.approx(want, abs=0.02) and model(rounds) == pytest.approx(middle, abs=0.02)
    assert abs(want - B).max() > 0.3


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_l2gd_without_a_pull_is_local_training(share):
    """To the last bit, from what a site was first sent, with the steps that the coin gives; absent, it does nothing."""
    rounds, memories = played(L2gd(lam=0.0, p=0.3), bed(), 8, share)
    for i, s in bed().items():
        x = {}
        for r in rounds:
            x = (
                s.fit(x or r.sent[i]["model"], budget=Budget(steps=int(r.diagnostics["local steps"]))).params
                if i in r.replies
                else x
            )
        assert same(dict(memories[i].get("model", {})), x)
    assert not same(memories, played(L2gd(lam=0.1, p=0.3), bed(), 8, share)[1])


def test_l2gd_exchanges_only_where_a_one_follows_a_zero():
    """Counted in bytes, of a run and of its rehearsal: one exchange for every run of ones, not for every one."""
    each = 4 * (8 + 2 * 8 + 8)  # four sites: the model and two numbers down, the model up
    found = {}
    for p in (0.1, 0.5, 0.8):
        rule, tossed = L2gd(lam=0.01, p=p), []
        rounds, _ = played(rule, bed(), 300)
        for r in rounds:
            tossed += [1] * int(r.diagnostics["aggregations"]) + [0] * int(r.diagnostics["local steps"])
        moved = sum(p.nbytes for r in rounds for p in r.sent.values())
        moved += sum(x.payload.nbytes for r in rounds for x in r.replies.values())
        begun = 1 + sum(b > a for a, b in pairwise(tossed))  # the first run has no zero before it
        assert moved == begun * each == 300 * each
        assert sum(tossed) / len(tossed) == pytest.approx(p, abs=0.06)
        loads = list(rehearse(rule, START, dict.fromkeys(NAMES, 2), rounds=300))
        assert sum(x.down + x.up for load in loads for x in load.values()) == moved
        assert sum(load["s0"].steps for load in loads) == tossed.count(0)
        found[p] = moved / len(tossed) / each
    # with p (1 - p) exchanges a toss, less than one for every aggregation
    assert found == pytest.approx({p: p * (1 - p) for p in found}, rel=0.1)


def test_l2gds_coin_is_one_for_all_and_known_from_the_state():
    state = L2gd(p=0.3).init(START, NAMES)
    one, two = L2gd(p=0.3).send(state, NAMES), L2gd(p=0.3).send(state, ["s2"])
    assert len({(p["ones"], p["zeros"]) for p in one.values()}) == 1 and one["s2"] == two["s2"]
    runs = [[L2gd(p=0.3, seed=s).tosses(r) for r in range(2000)] for s in (0, 1)]
    assert runs[0] != runs[1] and runs[0] == [L2gd(p=0.3).tosses(r) for r in range(2000)]
    ones, zeros = np.mean(runs[0], 0)
    assert ones == pytest.approx(1 / 0.7, rel=0.05) and zeros == pytest.approx(1 / 0.3, rel=0.05)


def test_l2gd_lets_a_newcomer_start_from_the_mean_and_keeps_statistics_at_home():
    rule, s = L2gd(lam=0.5, p=0.4, lr=0.05), Quadratic(2.0, np.array([1.0]), start=PARTS)
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
    wild, s = L2gd(lam=50.0, p=0.2), Quadratic(1.0, np.array([0.0]), lr=0.5)
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
    rounds, memories = played(SuPerFed(MU, NU, after=0), bed(), 1)
    w, v = pairs(1)
    assert model(rounds) == pytest.approx(w, abs=1e-12) and own(memories, "twin") == pytest.approx(v, abs=1e-12)


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
    rounds, memories = played(SuPerFed(MU, NU, after=3), bed(), 700)
    assert [model(rounds), *own(memories, "twin")] == pytest.approx(want, abs=1e-9)


def test_superfed_of_equal_sites_comes_to_rest_where_both_models_are_the_optimum():
    sites = bed(np.full(2, 1.5), np.full(2, 0.9), [2, 3])
    rounds, memories = played(SuPerFed(MU, NU, after=0), sites, 300)
    assert [model(rounds), *own(memories, "twin")] == pytest.approx([0.9] * 3, abs=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_superfed_without_twins_is_fedprox_with_twice_the_mu_to_the_last_bit(share):
    mine, memories = played(SuPerFed(0.3, after=6), four(), 6, share, PARTS)
    theirs, _ = played(FedProx(0.6), four(), 6, share, PARTS)
    assert same([r.state.model for r in mine], [r.state.model for r in theirs]) and not any(memories.values())
    later, memories = played(SuPerFed(0.3, after=5), four(), 6, share, PARTS)
    assert same(later[4].state.model, theirs[4].state.model) and not same(later[5].state.model, theirs[5].state.model)
    assert [i for i, m in memories.items() if "twin" in m] == list(later[5].replies)


def test_superfed_counts_its_first_rounds_as_a_share_of_all():
    assert SuPerFed().scaled(30).after == 12 and SuPerFed(after=7).scaled(30) == SuPerFed(after=7)
    shared, counted = (played(rule, four(), 10, start=PARTS) for rule in (SuPerFed().scaled(10), SuPerFed(after=4)))
    assert same([r.state.model for r in shared[0]], [r.state.model for r in counted[0]])
    assert [bool(r.sent["a"]["twins"]) for r in shared[0]] == [False] * 4 + [True] * 6


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
    rule = SuPerFed(after=1, shared=("head.*",))
    engine, seen, over, before = Simulator(rule, four(), wire=True), set(), [], {}
    for r in run_rounds(rule, engine, PARTS, Plan(rounds=6, share=0.5), seed=0):
        over += crossed([r])
        memories = engine.memories()
        for i, m in memories.items():
            assert i in r.replies or m == before.get(i, Payload())
            if m:
                assert set(m) == {"twin"} and set(m["twin"]) == {"body.w"}
                seen.add(m["twin"]["body.w"].item())
        before = memories
    assert len(seen) > 8 and not seen & {x.item() for x in over}


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
        ((found, cases),) = SuPerFed().serve(got, memory, s, ("x",))
        assert found["w"] == pytest.approx(0.6) and cases == ("x",)
        assert asked == [(judged, 9.0)] * 11 and found["norm.running_var"] == 9.0  # measured anew for every mixture
        ((found, _),) = SuPerFed(choices=(1.0, 0.25)).serve(got, memory, s, ("x",))
        assert found["w"] == 0.25
    ((plain, _),) = SuPerFed().serve(got, Payload(), s, ("x",))
    assert plain["w"] == 0.0 and plain["norm.running_var"] == 5.0


def test_factors_go_around_those_that_average():
    assert Weighted({"a": 0.3}, SuPerFed()).reply == SuPerFed().reply
    assert Weighted({"a": 0.3}, PFedMe()).reply["weight"] == "one"
    for rule in (FedAMP(), L2gd()):
        with pytest.raises(ConfigError, match="does not average by weights"):
            Weighted({"a": 0.3}, rule)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PFedMe(lam=0.0), "lam = 0.0 must be more than 0"),
        (lambda: PFedMe(outer=0), "outer = 0 must be at least 1"),
        (lambda: FedAMP(alpha=0.5), "measures alpha = 0.5 against sigma; give sigma too, or leave alpha out"),
        (lambda: FedAMP(own=0.5), "own = 0.5 is of HeurFedAMP"),
        (lambda: FedAMP(sigma=1.0, cosine=1.0), "knows no sigma and no alpha"),
        (lambda: FedAMP(sigma=1.0, alpha=0.5).init({}, NAMES), "lower alpha to at most 0.333333, or raise sigma"),
        (lambda: FedAMP(on=("tail.*",)).init(PARTS, NAMES), "names no trained parameter of this network"),
        (lambda: L2gd(p=1.0), "p = 1.0 must be between 0.001 and 0.999"),
        (lambda: L2gd(lam=2.0, p=0.1, lr=0.1), r"theta = 1.8 of the way to their mean, beyond it; lower lam or lr"),
        (lambda: SuPerFed(choices=()), "at least one mixture, each between 0 and 1"),
        (lambda: SuPerFed(choices=(0.5, 1.5)), "at least one mixture, each between 0 and 1"),
        (lambda: SuPerFed(shared=("*",)).init(PARTS, NAMES), "leaves no parameter that could have a twin; name fewer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_fedamp_a_model_of_zeros_points_nowhere():
    """To the others it is as one at a right angle: cosine 0."""
    rule = FedAMP(cosine=2.0, own=0.4)
    points = {"s0": [1.0, 0.0], "s1": [2.0, 2.0], "s2": [0.0, 0.0]}
    state = rule.merge(
        rule.init({"w": np.zeros(2)}, NAMES[:3]), {i: Payload(model={"w": np.array(x)}) for i, x in points.items()}
    )
    force = np.exp(2.0 * np.array([np.sqrt(0.5), 0.0]))
    assert list(state.attention["s0"].values()) == pytest.approx([0.4, *0.6 * force / force.sum()], abs=1e-12)
    assert list(state.attention["s2"].values()) == pytest.approx([0.3, 0.3, 0.4], abs=1e-12)


def test_fedamp_compares_trained_parameters_and_not_running_statistics():
    """Models that differ only in running statistics are as near as models can be."""
    rule = FedAMP()
    state = rule.init({"w": np.zeros(2), "norm.running_mean": np.zeros(1)}, ["a", "b", "c"])

    def merged(statistics):
        models = {i: {"w": np.full(2, x), "norm.running_mean": np.array([s])} for i, (x, s) in statistics.items()}
        return rule.merge(state, {i: Payload(model=m) for i, m in models.items()})

    plain = merged({"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (3.0, 0.0)})
    noisy = merged({"a": (0.0, 900.0), "b": (1.0, -900.0), "c": (3.0, 0.0)})
    assert noisy.attention == plain.attention and noisy.sigma == plain.sigma
