"""pFedMe, FedAMP, L2GD and SuPerFed against answers on paper: first round, limit, and what they become at the edges."""

from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import pytest

import polysite as ps
from polysite import tree
from polysite.costs.rehearsal import rehearse
from polysite.payload import Payload
from polysite.site import Budget, CaseScore
from quadratic import ETA, NAMES, Q0, START, A, B, K, P, Quadratic, bed, play
from table import START as PARTS
from table import same
from table import sites as four

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


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.4])
def test_pfedmes_defaults_follow_the_rate_of_the_site(rate):
    """lam = 1 / 5r, inner_lr = r / 1.2, lr = 1 / lam: the numbers that could be given, and a scale-free round."""
    lam, sites = 0.2 / rate, bed(A / 4 / rate, lr=rate)
    given, found = play(ps.PFedMe(lam, 1 / lam, 20, rate / 1.2), sites, 3), play(ps.PFedMe(), sites, 3)
    assert found.models() == pytest.approx(given.models(), abs=1e-12)
    assert found.own() == pytest.approx(given.own(), abs=1e-12)
    assert found.models() == pytest.approx(play(ps.PFedMe(), bed(A / 4, lr=1.0), 3).models(), abs=1e-10)


def test_pfedme_takes_its_inner_steps_on_one_minibatch_and_the_next_ones_on_the_next():
    site = Quadratic(1.0, np.array([0.0]))
    PFEDME.local(Payload(model=START), Payload(), site)
    assert [(budget.minibatch, budget.steps) for _, _, budget, _ in site.asked] == [(r, INNER) for r in range(OUTER)]
    anchors = [objective.tilt.anchor["w"].item() for _, objective, _, _ in site.asked]
    assert anchors[0] == Q0 and len(set(anchors)) == OUTER  # the anchor moves with w_k


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


def heard(algorithm, *rounds, start=START["w"]):
    """The state after rounds of {site: its model}."""
    state = algorithm.init({"w": start}, NAMES)
    for models in rounds:
        state = algorithm.merge(state, {i: Payload(model={"w": np.atleast_1d(x)}) for i, x in models.items()})
    return state


def sent(algorithm, state, site):
    return algorithm.send(state, [site])[site]["model"]["w"].item()


def test_fedamp_keeps_the_last_model_of_an_absent_site_and_means_for_a_new_one():
    state, w = heard(FEDAMP, {"s0": 0.0, "s1": 1.0, "s2": 4.0}, {"s0": 0.5, "s2": 3.0}), np.array([0.5, 1.0, 3.0])
    x = AL * slope((w - w[0]) ** 2)
    assert sent(FEDAMP, state, "s0") == pytest.approx(w[0] + x[1:] @ (w[1:] - w[0]), abs=1e-12)
    assert sent(FEDAMP, state, "s3") == sent(FEDAMP, state, "stranger") == pytest.approx(w.mean(), abs=1e-12)
    assert sent(FEDAMP, heard(FEDAMP), "s3") == Q0


def test_fedamp_finds_its_own_scale_in_every_round():
    rule, models = ps.FedAMP(), {"s0": 0.0, "s1": 1.0, "s2": 3.0}
    assert heard(rule, {"s0": 2.0}).sigma is None
    assert heard(rule, {"s0": 2.0}, models, {"s1": 90.0}).sigma == median((90.0**2, 87.0**2, 9.0))
    before = heard(rule, models)
    x = {j: np.exp(-((models[j] - 1.0) ** 2) / 4) / 3 for j in ("s0", "s2")}
    assert before.attention["s1"] == pytest.approx({**x, "s1": 1 - sum(x.values())}, abs=1e-12)
    assert rule.diagnostics(before)["sigma"] == 4.0 and 1 / 3 < rule.diagnostics(before)["own"] < 1
    together = heard(rule, models, dict.fromkeys(models, 5.0)).attention
    assert together["s0"] == pytest.approx(dict.fromkeys(models, 1 / 3))  # all alike: the plain mean
    assert heard(rule, dict.fromkeys(models, 5.0)).sigma is None  # and no scale to be had from that
    assert heard(rule, models, dict.fromkeys(models, 5.0)).sigma == 4.0  # the last one that there was


@pytest.mark.parametrize(("eta", "steps"), [(0.1, 5), (0.02, 25), (0.4, 2)])
def test_fedamp_holds_by_the_effort_of_a_round(eta, steps):
    """pull = 1 / reach, reach = K eta: over a round of any rate and length, K steps of 1 - eta a - 1/K."""
    run, pull = play(ps.FedAMP(), bed(lr=eta, steps=steps), 2), 1 / (eta * steps)
    free = B + (1 - eta * A) ** steps * (Q0 - B)  # the first round is local training
    assert run.own(round=0) == pytest.approx(free, abs=1e-12)
    assert [m["reach"] for m in run.kept[0].values()] == pytest.approx([eta * steps] * 4)
    cloud = np.array([sent(ps.FedAMP(), run.states[0], i) for i in NAMES])
    aim = (A * B + pull * cloud) / (A + pull)
    assert run.own() == pytest.approx(aim + (1 - eta * (A + pull)) ** steps * (free - aim), abs=1e-12)


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
    rule, points = ps.FedAMP(cosine=2.0, own=0.4), {"s0": [1.0, 0.0], "s1": [2.0, 2.0], "s2": third}
    state = heard(rule, points, start=np.zeros(2))
    force = np.exp(2.0 * np.array([np.sqrt(0.5), 0.0]))
    want = [0.4, *0.6 * force / force.sum()]
    assert list(state.attention["s0"].values()) == pytest.approx(want, abs=1e-12)
    cloud = rule.send(state, ["s0"])["s0"]["model"]["w"]
    assert cloud == pytest.approx(np.array(want) @ np.array(list(points.values())), abs=1e-12)
    if not any(third):
        assert list(state.attention["s2"].values()) == pytest.approx([0.3, 0.3, 0.4], abs=1e-12)
    few = [heard(ps.FedAMP(cosine=2.0), dict.fromkeys(NAMES[:k], 3.0)).attention["s0"]["s0"] for k in (1, 2, 4)]
    assert few == [1.0, 0.5, 0.25]  # the weight of its own model is 1/K if none is given


def test_fedamp_compares_by_what_it_is_told_and_leaves_statistics_to_their_site():
    names = ("body.w", "head.w", "norm.running_var")

    def merged(rule, **points):
        found = {
            i: Payload(model={k: np.array([x]) for k, x in zip(names, xs, strict=True)}) for i, xs in points.items()
        }
        return rule.merge(rule.init(found["s0"]["model"], sorted(found)), found)

    rule = ps.FedAMP(1.0, SIG, AL, on=("head.*",))
    state = merged(rule, s0=(0.0, 1.0, 7.0), s1=(90.0, 2.0, 5.0))
    assert state.attention["s0"]["s1"] == pytest.approx(AL * slope(1.0), abs=1e-15)
    sent = rule.send(state, ["s0", "new"])
    assert sent["s0"]["model"]["norm.running_var"] == 7.0 and sent["new"]["model"]["norm.running_var"] == 6.0
    plain = merged(ps.FedAMP(), s0=(0.0, 0.0, 0.0), s1=(1.0, 1.0, 0.0), s2=(3.0, 3.0, 0.0))
    noisy = merged(ps.FedAMP(), s0=(0.0, 0.0, 900.0), s1=(1.0, 1.0, -900.0), s2=(3.0, 3.0, 0.0))
    assert noisy.attention == plain.attention and noisy.sigma == plain.sigma


# L2GD
RULE = ps.L2gd(lam=0.9, p=0.4, lr=0.08)
PULL = 0.08 * 0.9 * 0.6 / 0.4  # theta


def toss(x, coin, rate=RULE.lr, pull=PULL):
    return (1 - pull) * x + pull * x.mean() if coin else x - rate * A * (x - B)


def coins(run):
    """Every toss of a run."""
    told = [(int(r.diagnostics["aggregations"]), int(r.diagnostics["local steps"])) for r in run.rounds]
    return [coin for ones, zeros in told for coin in [1] * ones + [0] * zeros]


def test_l2gd_is_the_coin_tossed_one_by_one():
    run, x = play(RULE, bed(), 40), np.full(4, Q0)
    ones, zeros = RULE.tosses(0)
    assert ones >= 1 and zeros >= 1  # the first round is a run of local steps
    assert run.own(round=0) == pytest.approx(B + (1 - 0.08 * A) ** zeros * (Q0 - B), abs=1e-12)
    for coin in coins(run):
        x = toss(x, coin)
    assert run.own() == pytest.approx(x, abs=1e-12) and run.models()[-1] == pytest.approx(x.mean(), abs=1e-12)


@pytest.mark.parametrize("rate", [0.001, 0.08, 1.5])
def test_l2gd_by_default_goes_half_of_the_way_to_the_mean_at_any_rate(rate):
    """theta = 1/2, as with lam = p / (2 lr (1 - p))."""
    p, sites, x = 0.4, bed(A * 0.08 / rate, lr=rate), np.full(4, Q0)
    run, given = (play(rule, sites, 12) for rule in (ps.L2gd(p=p), ps.L2gd(lam=p / (2 * rate * (1 - p)), p=p)))
    for coin in coins(run):
        x = toss(x, coin, 0.08, 0.5)
    assert run.own() == pytest.approx(x, abs=1e-12) and run.own() == pytest.approx(given.own(), abs=1e-12)


def test_l2gd_is_gradient_descent_in_expectation():
    """A toss, on average: the step is alpha/m = lr (1 - p), on the sum of F_k and lam/2 |x_k - x|^2."""
    p, lam, x = RULE.p, RULE.lam, np.array([0.4, -2.0, 1.5, 3.0])
    down = x - RULE.lr * (1 - p) * (A * (x - B) + lam * (x - x.mean()))
    assert p * toss(x, 1) + (1 - p) * toss(x, 0) == pytest.approx(down, abs=1e-12)
    mean, end = np.mean([play(replace(RULE, seed=s), bed(), 60).own() for s in range(40)], 0), np.full(4, Q0)
    for _ in range(3000):
        end = end - 0.1 * (A * (end - B) + lam * (end - end.mean()))
    assert mean == pytest.approx(end, abs=0.15)  # the limit


def test_l2gd_without_a_pull_is_local_training():
    """To the last bit, from what a site was first sent, with the steps that the coin gives; absent, it does nothing."""
    run = play(ps.L2gd(lam=0.0, p=0.3), bed(), 8, 0.5)
    for i, s in bed().items():
        x = {}
        for r in run.rounds:
            if i in r.replies:
                steps = Budget(steps=int(r.diagnostics["local steps"]))
                x = s.fit(x or r.sent[i]["model"], budget=steps).params
        assert same(dict(run.memories[i].get("model", {})), x)


@pytest.mark.parametrize("p", [0.1, 0.8])
def test_l2gd_exchanges_only_where_a_one_follows_a_zero(p):
    """Counted in bytes, of a run and of its rehearsal: one exchange for every run of ones, not for every one."""
    each, rule = 4 * (8 + 2 * 8 + 8), ps.L2gd(lam=0.01, p=p)  # four sites: the model and two numbers down, the model up
    run = play(rule, bed(), 300)
    tossed, moved = coins(run), sum(payload.nbytes for payload in run.crossed)
    begun = 1 + sum(b > a for a, b in pairwise(tossed))  # the first run has no zero before it
    assert moved == begun * each == 300 * each
    assert sum(tossed) / len(tossed) == pytest.approx(p, abs=0.06)
    loads = list(rehearse(rule, START, dict.fromkeys(NAMES, 2), rounds=300))
    assert sum(x.down + x.up for load in loads for x in load.values()) == moved
    assert sum(load["s0"].steps for load in loads) == tossed.count(0)


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
    got, memory = Payload(model={"w": np.array([2.0])}, ones=1, zeros=1), Payload(model={"w": np.array([9.0])}, lr=0.5)
    reply, _ = ps.L2gd(lam=50.0, p=0.2).local(got, memory, Quadratic(1.0, np.array([0.0]), lr=0.5))
    assert reply["model"]["w"] == pytest.approx(2.0 - 0.5 * 2.0)


# SuPerFed
MU, NU = 0.01, 2.0


def turn(a, b):
    """(c, d, e): in a round a site's two models go from (w, v) to c + d w + e v, in the mean over lam."""
    curve = np.array([[a / 3 + 2 * MU, a / 6], [a / 6, a / 3]])
    power = np.linalg.matrix_power(np.eye(2) - ETA * curve, K)
    moved = (np.eye(2) - power) @ np.linalg.inv(curve)
    return moved @ np.full(2, a * b / 2), moved @ [2 * MU, 0.0] + power[:, 0], power[:, 1]


def test_superfed_first_round_and_limit():
    """In the limit v = c + d w + e v for every twin, and the same for the mean w."""
    run = play(ps.SuPerFed(MU, NU, after=0), bed(), 300)
    (c, c_twin), (d, d_twin), (e, e_twin) = (np.array(x).T for x in zip(*map(turn, A, B), strict=True))
    w, v = Q0, 0.1 * A - 0.5 * Q0
    assert run.models()[0] == pytest.approx(P @ (c + d * w + e * v), abs=1e-12)
    assert run.own("twin", round=0) == pytest.approx(c_twin + d_twin * w + e_twin * v, abs=1e-12)
    rest, slope = c_twin / (1 - e_twin), d_twin / (1 - e_twin)
    w = P @ (c + e * rest) / (1 - P @ (d + e * slope))
    assert [run.models()[-1], *run.own("twin")] == pytest.approx([w, *(rest + slope * w)], abs=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_superfed_without_twins_is_fedprox_with_twice_the_mu_to_the_last_bit(share):
    rules = ps.SuPerFed(0.3, after=6), ps.FedProx(0.6), ps.SuPerFed(0.3, after=5)
    mine, theirs, later = (play(rule, four(), 6, share, PARTS) for rule in rules)
    assert same([s.model for s in mine.states], [s.model for s in theirs.states]) and not any(mine.memories.values())
    assert same(later.states[4].model, theirs.states[4].model)
    assert not same(later.states[5].model, theirs.states[5].model)
    assert [i for i, m in later.memories.items() if "twin" in m] == list(later.last.replies)


OWN = {  # what sites keep for themselves: (algorithm, field of the memory)
    "ditto": (ps.Ditto(0.6), "model"),
    "pfedme": (ps.PFedMe(LAM, ETA, OUTER, ETA_P, INNER), "model"),
    "fedrod": (ps.FedRoD(), "personal"),
    "superfed": (ps.SuPerFed(after=1, shared=("head.*",)), "twin"),
}


@pytest.mark.parametrize(("algorithm", "field"), OWN.values(), ids=OWN.keys())
def test_what_is_a_sites_own_crosses_the_wire_in_neither_direction_and_waits_for_it(algorithm, field):
    run, own, before = play(algorithm, four(), 6, 0.5, PARTS, wire=True), set(), {}
    for r, memories in zip(run.rounds, run.kept, strict=True):
        assert all(i in r.replies or m == before.get(i, Payload()) for i, m in memories.items())
        own |= {x.item() for m in memories.values() if m for x in tree.trained(m[field]).values()}
        before = memories
    crossed = {x.item() for p in run.crossed for v in p.values() if not isinstance(v, float) for x in v.values()}
    assert len(own) > 8 and not own & crossed
    if field == "twin":
        assert all(m.keys() == {"twin"} and m["twin"].keys() == {"body.w"} for m in run.memories.values() if m)


def test_superfed_serves_the_mixture_that_does_best_on_validation_cases():
    class Judged(Quadratic):
        def score(self, params, cases):
            judged.append((set(cases), params["norm.running_var"].item()))
            return {n: CaseScore({"L": 1 - abs(params["w"].item() - 0.61)}, -params["w"].item()) for n in cases}

    got = Payload(model={"w": np.array([0.0]), "norm.running_var": np.array([5.0])}, twins=1)
    memory = Payload(twin={"w": np.array([1.0])})
    for kept, asked in ((("v",), {"v"}), ((), {"0"})):
        judged, s = [], Judged(3.0, np.array([0.0]), splits={"validation": kept})
        ((found, cases),) = ps.SuPerFed().serve(got, memory, s, ("x",))
        assert found["w"] == pytest.approx(0.6) and cases == ("x",)
        assert judged == [(asked, 9.0)] * 11 and found["norm.running_var"] == 9.0  # measured anew for every mixture
        ((found, _),) = ps.SuPerFed(choices=(1.0, 0.25)).serve(got, memory, s, ("x",))
        assert found["w"] == 0.25
    ((plain, _),) = ps.SuPerFed().serve(got, Payload(), s, ("x",))
    assert plain["w"] == 0.0 and plain["norm.running_var"] == 5.0
