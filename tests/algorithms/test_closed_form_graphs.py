"""IFCA, FPFC and pFedNet against answers on paper: first round, limit, who ends up with whom."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import tree
from polysite.algorithms.base import facts
from polysite.algorithms.ifca import State as Clusters
from polysite.cluster.directions import direction_groups
from polysite.cluster.fusion import lasso_mixture, nearest_edges, scad_share
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload
from polysite.site import CaseScore
from polysite.tree import components
from quadratic import ETA, Q0, A, B, K, N, Quadratic, R, bed, play
from table import START, same
from table import sites as two_part_sites


class Guest(Quadratic):
    """Without training cases."""

    size = 0

    def score(self, params, cases):
        assert cases == self.cases("validation"), "no model is chosen by the cases that it is tested on"
        return {n: CaseScore({}, float((params["w"].item() - self.b[0]) ** 2)) for n in cases}

    def sketch(self, kind, cases):
        assert kind == "images" or self.cases("validation"), "no label of a test is looked at"
        return self.b


def guest(b, *of):
    return Guest(1.0, np.array([float(b)]), splits={s: ("0",) * (s in of) for s in ("train", "validation", "test")})


# IFCA


def centres(state):
    return [model["w"].item() for model in state.models]


def two_centres(low=-0.5, high=1.5):
    """The settling rounds are over: every site chooses its model by loss."""
    return Clusters({}, tuple({"w": np.array([x])} for x in (low, high)), {}, since=-99)


HALVES = slice(0, 2), slice(2, 4)  # who is nearest to which of two centres, and stays there


@pytest.mark.parametrize("uniform", [True, False])
def test_ifca_first_round_and_limit(uniform):
    p, run = np.ones(4) if uniform else N, play(ps.Ifca(uniform=uniform), bed(), 60, state=two_centres())
    assert run.states[0].places == {"s0": 0, "s1": 0, "s2": 1, "s3": 1}
    trained = [B + R * (x - B) for x in (-0.5, 1.5)]
    means = [np.average(t[g], weights=p[g]) for t, g in zip(trained, HALVES, strict=True)]
    assert centres(run.states[0]) == pytest.approx(means, abs=1e-12)
    limit = [np.average(B[g], weights=(p * (1 - R))[g]) for g in HALVES]
    assert centres(run.state) == pytest.approx(limit, abs=1e-8)


@pytest.mark.parametrize("uniform", [True, False])
def test_ifca_with_gradients_steps_by_the_share_of_a_cluster(uniform):
    algorithm, p = ps.Ifca(averaged="gradients", uniform=uniform), np.full(4, 0.25) if uniform else N / N.sum()
    run = play(algorithm, bed(), 300, state=two_centres())
    pulls = [(p * A * (x - B))[g].sum() for x, g in zip((-0.5, 1.5), HALVES, strict=True)]
    assert centres(run.states[0]) == pytest.approx([-0.5 - ETA * pulls[0], 1.5 - ETA * pulls[1]], abs=1e-12)
    assert centres(run.state) == pytest.approx([np.average(B[g], weights=(p * A)[g]) for g in HALVES], abs=1e-4)
    assert facts(algorithm).plain_sgd and not facts(ps.Ifca()).plain_sgd
    assert all(f.steps == 1 for reply in run.last.replies.values() for f in reply.fits)


@pytest.mark.parametrize("starts", ["groups", "sites", "noise"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ifca_separates_two_planted_populations(starts, share):
    """From its own starts, whatever they are: each population has a model of its own in the end."""
    rng = np.random.default_rng(0)
    b = np.concatenate([rng.normal(-2, 0.2, 4), rng.normal(3, 0.2, 3)])
    sites = bed(rng.uniform(0.5, 2, 7), b, rng.integers(2, 9, 7), start={"w": np.array([0.5])})
    run = play(ps.Ifca(starts=starts, warmup=0 if starts == "noise" else 2, spread=0.5), sites, 60, share=share)
    end, members = run.last, {"s0": range(4), "s6": range(4, 7)}
    assert end.state.places == {f"s{i}": end.state.places[one] for one, here in members.items() for i in here}
    assert end.state.places["s0"] != end.state.places["s6"] and end.diagnostics == {"clusters": 2.0}
    served = run.engine.serve(60, ps.Ifca().send(end.state, sorted(sites))).models
    for one, here in members.items():
        limit = np.average(b[here], weights=[sites[f"s{i}"].size * sites[f"s{i}"].pull for i in here])
        model = centres(end.state)[end.state.places[one]]
        assert model == pytest.approx(limit, abs=1e-6 if share == 1 else 0.3)
        assert {served[f"s{i}"][0]["w"].item() for i in here} == {model}


STARTS = {
    "conv.weight": np.random.default_rng(0).normal(0.3, 0.05, (40, 50)).astype(np.float32),
    "norm.weight": np.ones(40, np.float32),
    "norm.bias": np.zeros(40, np.float32),
    "norm.running_var": np.linspace(1, 2, 40, dtype=np.float32),
}
RANDOM = partial(ps.Ifca, starts="noise", warmup=0)  # the paper's starts


@pytest.mark.parametrize("spread", [0.1, 0.6, 1.0])
def test_ifca_starts_differ_keep_their_scale_and_are_those_of_the_seed(spread):
    algorithm = RANDOM(k=4, spread=spread, seed=3)
    models = algorithm.init(STARTS, ["a"]).models
    first, *others = (model["conv.weight"] for model in models)
    assert same(models[0], STARTS) and len({w.tobytes() for w in (first, *others)}) == 4
    for w, model in zip(others, models[1:], strict=True):
        assert w.dtype == np.float32 and w.mean() == pytest.approx(0.3, abs=0.005)
        assert w.std() == pytest.approx(0.05, rel=0.05)
        assert np.corrcoef(w.ravel(), first.ravel())[0, 1] == pytest.approx((1 - spread**2) ** 0.5, abs=0.06)
        assert all(np.array_equal(model[k], STARTS[k]) for k in STARTS if k != "conv.weight")
    lifted = algorithm.init({k: torch.tensor(v) for k, v in STARTS.items()}, ["a"]).models  # wherever it is computed
    assert same([{k: v.numpy() for k, v in model.items()} for model in lifted], list(models))
    assert not np.array_equal(others[0], replace(algorithm, seed=2).init(STARTS, ["a"]).models[1]["conv.weight"])


def test_ifca_warms_up_by_fedavg_and_then_parts():
    warm = play(ps.Ifca(k=3, warmup=2, settle=2), two_part_sites(), 6).rounds
    assert [len(r.state.models) for r in warm] == [1, 3, 3, 3, 3, 3]
    assert same(warm[0].state.models[0], play(ps.FedAvg(), two_part_sites(), 1).state.model)
    assert [sum(f.startswith("model_") for f in r.sent["a"]) for r in warm] == [1, 1, 3, 3, 3, 3]
    held, free = warm[1].state.places, dict.fromkeys("abcd", -1)
    groups = [{i: got.get("group") for i, got in r.sent.items()} for r in warm]
    assert groups == [dict.fromkeys("abcd")] * 2 + [held] * 2 + [free] * 2
    assert all({i: reply.payload["cluster"] for i, reply in r.replies.items()} == held for r in warm[2:4])


def updates(**points):
    """Replies of sites that were sent a model of zeros."""
    return {i: Payload(model={"w": np.array(w)}, cluster=0, weight=1 + n) for n, (i, w) in enumerate(points.items())}


def test_ifca_starts_from_groups_of_sites_whose_updates_point_alike():
    """However long they are. A start is the mean of a group by weight, the model of its most typical site, or noise."""
    replies = updates(a=[9.0, 0.5], b=[0.1, 0.0], c=[0.0, -3.0], d=[-0.02, -0.2], e=[1.0, 0.1])
    found = {}
    for starts in ("groups", "sites", "noise"):
        algorithm = ps.Ifca(starts=starts, warmup=1, spread=0.1)
        state = algorithm.merge(algorithm.init({"w": np.zeros(2)}, list("abcde")), replies)
        assert state.places == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 0} and state.since == 1
        found[starts] = [model["w"] for model in state.models]
    means = [(np.array([9.0, 0.5]) + 2 * np.array([0.1, 0]) + 5 * np.array([1.0, 0.1])) / 8,
             (3 * np.array([0.0, -3.0]) + 4 * np.array([-0.02, -0.2])) / 7]  # fmt: skip
    assert np.array(found["groups"]) == pytest.approx(np.array(means), abs=1e-12)
    assert found["sites"][0].tolist() == [9.0, 0.5]  # in the middle of b, a and e
    for mean, noisy in zip(means, found["noise"], strict=True):
        assert 0 < np.abs(noisy - mean).max() <= 0.1 * 3**0.5 * mean.std() + 0.01 * np.abs(mean - mean.mean()).max()


def test_groups_by_direction():
    def cosines(*angles):
        return np.cos(np.subtract.outer(angles, angles))

    assert direction_groups(cosines(0.0, 0.2, 2.0, 2.1, 4.0), 3) == ((0, 1), (2, 3), (4,))
    assert direction_groups(cosines(3.1, 2.0, 0.0, 2.1, 0.2, 0.1, -0.1), 2) == ((2, 4, 5, 6), (0, 1, 3))
    assert direction_groups(cosines(1.0, 1.0, 1.0), 2) == ((0, 2), (1,))  # all alike: none is empty
    assert direction_groups(np.zeros((3, 3)), 3) == ((0,), (1,), (2,)) and direction_groups([[1.0]], 1) == ((0,),)
    with pytest.raises(DataError, match="2 sites cannot form 3 groups"):
        direction_groups(np.eye(2), 3)
    with pytest.raises(DataError, match="a square table of finite cosines"):
        direction_groups([[1.0, np.nan], [np.nan, 1.0]], 2)


def test_ifca_waits_for_as_many_sites_as_models():
    algorithm = ps.Ifca(k=3, starts="sites", warmup=1)
    state = algorithm.init({"w": np.zeros(2)}, list("abc"))
    replies = updates(a=[1.0, 0.0], b=[0.0, 4.0], c=[-3.0, 0.0])
    few = algorithm.merge(state, {i: replies[i] for i in "ab"})
    assert len(few.models) == 1 and few.rounds == 1
    after = algorithm.merge(few, replies)
    assert len(after.models) == 3 and after.places.keys() == set("abc") and after.since == 2


@pytest.mark.parametrize("clustered", [("head.*",), ("*",)])
def test_ifca_averages_what_is_clustered_within_a_cluster_and_the_rest_over_all(clustered):
    """Running statistics too. What is shared goes down once, and one model comes up."""
    algorithm, s = RANDOM(clustered=clustered), two_part_sites()
    state = algorithm.init(START, sorted(s))
    first = {**state.models[0], "head.w": np.array([-4.0])}
    last = play(algorithm, s, 1, state=replace(state, models=(first, state.models[1]))).last
    got, chosen = {i: r.payload for i, r in last.replies.items()}, last.state.places
    assert set(chosen.values()) == {0, 1} and chosen == {i: p["cluster"] for i, p in got.items()}
    for j in (0, 1):
        here = {i: s[i].size for i in s if chosen[i] == j}
        assert {i: last.shares[i] for i in here} == pytest.approx({i: n / sum(here.values()) for i, n in here.items()})
        for name in START:
            apart = tree.matches(name, clustered)
            mean = tree.mean(
                [got[i]["model"] for i in (here if apart else s)], [s[i].size for i in (here if apart else s)]
            )
            found = last.state.models[j] if apart else last.state.shared
            assert found[name] == pytest.approx(mean[name], abs=1e-12)
    whole, twice = (sum(x.nbytes for k, x in START.items() if tree.matches(k, p)) for p in (("*",), clustered))
    assert {p.nbytes for p in last.sent.values()} == {whole + twice + 8}
    assert {p.nbytes for p in got.values()} == {whole + 16}


def test_ifca_serves_by_loss_and_without_labels_the_largest_cluster():
    rule, trains = ps.Ifca(), Quadratic(1.0, np.array([-3.0]))
    trains.score = None  # a site that trains chooses by its training cases
    low, high, tested = (guest(b, *of, "test") for b, *of in ((-3, "validation"), (3, "validation"), (-3,)))
    got = rule.send(replace(two_centres(-1.0, 2.0), places={"s0": 1, "s1": 0, "s2": 1}), ["x"])["x"]
    for site, model in ((trains, -1), (low, -1), (high, 2), (tested, 2)):
        ((served, _),) = rule.serve(got, Payload(), site, site.cases("test"))
        assert served["w"] == model


def test_ifca_leaves_out_who_names_a_model_that_there_is_not():
    algorithm, state = ps.Ifca(), two_centres()
    good = Payload(model={"w": np.array([1.0])}, cluster=1, weight=2)
    bad = [Payload(model={"w": np.array([9.0])}, cluster=j, weight=5) for j in (2, 0.5, 7)]
    after = algorithm.merge(state, {"a": bad[0], "b": good, "c": bad[1], "d": bad[2]})
    assert centres(after) == [-0.5, 1.0] and after.places == {"b": 1}
    assert algorithm.shares(state, {"a": bad[0], "b": good}) == {"b": 1.0}
    assert algorithm.merge(state, {"a": bad[0]}) is state


# FPFC

LAM, BEND, XI, RHO = 0.4, 3.7, 0.05, 1.0
FUSED = ps.Fpfc(lam=LAM, a=BEND, xi=XI, rho=RHO, fused=("*",))


def penalty(t):
    t = abs(t)
    if t <= XI:
        return LAM * t * t / 2 / XI + LAM * XI / 2
    if t <= LAM:
        return LAM * t
    if t <= BEND * LAM:
        return (BEND * LAM * t - (t * t + LAM * LAM) / 2) / (BEND - 1)
    return LAM * LAM * (BEND + 1) / 2


def slope(t):
    size = abs(t)
    steep = LAM * size / XI if size <= XI else LAM if size <= LAM else max(BEND * LAM - size, 0) / (BEND - 1)
    return np.sign(t) * steep


def prox(d, lam=LAM):
    return scad_share(abs(d), lam, BEND, XI, RHO) * d


def own_models(state):
    return np.array([state.models[i]["w"].item() for i in sorted(state.models)])


@pytest.mark.parametrize("d", [0.02, 0.3, 0.44, 0.46, 0.6, 0.79, 0.81, 1.2, 1.47, 1.5, 2.5, -0.7])
def test_scad_shrinks_to_the_least_of_penalty_and_distance(d):
    grid = np.linspace(0, d, 4001)
    values = [penalty(t) + RHO / 2 * (t - d) ** 2 for t in grid]
    assert prox(d) == pytest.approx(grid[int(np.argmin(values))], abs=abs(d) / 3000)


class Pair(NamedTuple):
    delta: dict
    share: float
    gap: float


def pairs_of(state):
    """What the server of FPFC knows of every pair of sites, by their names."""
    pairs = zip(combinations(state.models, 2), state.lengths, strict=True)
    return {p: Pair({k: x[n] for k, x in state.deltas.items()}, *both) for n, (p, both) in enumerate(pairs)}


def test_fpfc_first_rounds_take_every_pair_once():
    """The whole recursion with theta and v kept apart, as the paper has it."""
    w, theta, dual, pairs = np.full(4, Q0), np.zeros((4, 4)), np.zeros((4, 4)), list(combinations(range(4), 2))
    for state in play(FUSED, bed(), 3).states:
        zeta = np.array([np.mean(w + theta[i] - dual[i] / RHO) for i in range(4)])
        middle = (A * B + RHO * zeta) / (A + RHO)
        w = middle + (1 - ETA * (A + RHO)) ** K * (w - middle)
        assert own_models(state) == pytest.approx(w, abs=1e-12)
        for i, j in pairs:
            theta[i, j] = prox(w[i] - w[j] + dual[i, j] / RHO)
            dual[i, j] += RHO * (w[i] - w[j] - theta[i, j])
            theta[j, i], dual[j, i] = -theta[i, j], -dual[i, j]
            pair = pairs_of(state)[f"s{i}", f"s{j}"]
            known = pair.delta["w"].item()
            assert [pair.share * known, RHO * (1 - pair.share) * known] == pytest.approx([theta[i, j], dual[i, j]])
            assert pair.gap == pytest.approx(abs(theta[i, j]), abs=1e-12)


@pytest.mark.parametrize("b", [B, B / 9], ids=["far apart", "near"])
def test_fpfc_limit_is_stationary(b):
    w = own_models(play(FUSED, bed(b=b), 400).state)
    forces = A * (w - b) + np.array([sum(slope(x - y) for y in w) for x in w]) / 4
    assert forces == pytest.approx(np.zeros(4), abs=1e-6)
    strong = play(replace(FUSED, lam=20.0, xi=1e-4, nu=1e-3), bed(b=b), 300).last  # one model at the common optimum
    assert own_models(strong.state) == pytest.approx([(A * b).sum() / A.sum()] * 4, abs=1e-3)
    assert strong.diagnostics == {"clusters": 1.0}


def test_fpfc_without_penalty_every_site_ends_at_its_own_optimum():
    rule = replace(FUSED, lam=0.0, nu=0.0)
    run = play(rule, bed(), 300)
    assert own_models(run.state) == pytest.approx(B, abs=1e-6) and run.last.diagnostics == {"clusters": 4.0}
    anchors = [p["anchor"]["w"].item() for p in rule.send(run.states[1], ["s0", "s1", "s2", "s3"]).values()]
    assert anchors == pytest.approx(own_models(run.states[1]), abs=1e-12)
    stranger = rule.send(run.state, ["new"])["new"]["model"]["w"].item()
    assert stranger == pytest.approx(np.average(B, weights=N), abs=1e-6)  # nobody is served what one site alone made


def planted(seed):
    """Three populations of sites, far apart; inside, they differ by less than lam / m can hold together."""
    rng = np.random.default_rng(seed)
    b = np.concatenate([rng.normal(c, 0.02, 3) for c in (-3.0, 0.0, 4.0)])
    return bed(rng.uniform(0.8, 2.0, 9), b, rng.integers(2, 9, 9), start={"w": np.array([0.2])})


@pytest.mark.parametrize(("seed", "share"), [(0, 1.0), (1, 0.4)])
def test_fpfc_fuses_pairs_inside_planted_groups_and_none_across(seed, share):
    algorithm, sites = replace(FUSED, lam=0.5, xi=1e-3, nu=0.01), planted(seed)
    run = play(algorithm, sites, 120 if share == 1 else 300, share, seed=seed)
    last, group = run.last, {f"s{i}": i // 3 for i in range(9)}
    for (i, j), pair in pairs_of(last.state).items():
        assert (pair.gap <= algorithm.nu) == (group[i] == group[j])
    assert last.diagnostics == {"clusters": 3.0}
    served = run.engine.serve(0, algorithm.send(last.state, sorted(sites))).models
    for g in range(3):
        here = [i for i in sites if group[i] == g]
        mean = np.average([last.state.models[i]["w"].item() for i in here], weights=[sites[i].size for i in here])
        assert [served[i][0]["w"].item() for i in here] == pytest.approx([mean] * 3, abs=1e-12)
        optimum = np.average([sites[i].b.mean() for i in here], weights=[sites[i].a for i in here])
        assert mean == pytest.approx(optimum, abs=2e-3)  # that of the group, not biased by the other groups


def test_fpfc_leaves_pairs_of_absent_sites_alone():
    last = play(FUSED, bed(), 3).last
    sent = FUSED.send(last.state, ["s1"])
    reply, _ = FUSED.local(sent["s1"], Payload(own=last.state.models["s1"]), bed()["s1"])
    after = FUSED.merge(last.state, {"s1": reply})
    for i, j in combinations(("s0", "s1", "s2", "s3"), 2):
        assert same(pairs_of(after)[i, j], pairs_of(last.state)[i, j]) == ("s1" not in (i, j))


def test_fpfc_a_site_goes_on_from_what_the_server_knows_of_it():
    run = play(ps.Fpfc(lam=0.2), two_part_sites(), 5, share=0.5)
    heard = {i: m["own"] for i, m in run.memories.items() if m}
    assert heard and all(same(dict(own), dict(run.state.models[i])) for i, own in heard.items())


def test_fpfc_averages_what_is_not_fused_and_holds_only_what_is():
    """Both parts move alike but for the pull of rho on the head alone."""
    s, (u, v) = two_part_sites(), (START[k].item() for k in ("body.w", "head.w"))
    last = play(ps.Fpfc(lam=0.2), s, 1).last
    got = {i: r.payload["model"] for i, r in last.replies.items()}
    for i, site in s.items():
        body, head = u, v
        for _ in range(site.steps):
            g = site.a * (body + head - site.b.mean())
            body, head = body - site.lr * g, head - site.lr * (g + 1.0 * (head - v))
        assert [got[i]["body.w"].item(), got[i]["head.w"].item()] == pytest.approx([body, head], abs=1e-12)
        assert last.state.models[i]["head.w"].item() == pytest.approx(head, abs=1e-12)
    shares = {i: x.size / sum(y.size for y in s.values()) for i, x in s.items()}
    for name in ("body.w", "norm.running_var"):
        mean = sum(share * got[i][name] for i, share in shares.items())
        assert last.state.shared[name] == pytest.approx(mean, abs=1e-12)
    assert last.shares == pytest.approx(shares)
    whole = sum(x.nbytes for x in START.values())
    assert {p.nbytes for p in last.sent.values()} == {whole + START["head.w"].nbytes}
    assert {r.payload.nbytes for r in last.replies.values()} == {whole + 8}


def test_fpfc_warms_up_without_penalty():
    free, warm = (play(replace(FUSED, **how), bed(), 5).states for how in ({"lam": 0.0}, {"warmup": 4}))
    assert all(same(x, y) for x, y in zip(free[:4], warm[:4], strict=True))
    assert not same(pairs_of(free[4]), pairs_of(warm[4]))
    near = play(replace(FUSED, warmup=4), bed(a=[1.0] * 4, b=[0.0, 0.1, 0.2, 0.3]), 5).state
    assert all(p.share < 1 for (i, _), p in pairs_of(near).items() if i == "s0")


def test_fpfc_in_relative_units_does_not_know_how_large_the_network_is():
    rule = ps.Fpfc(relative=True, lam=0.2, xi=1e-3, nu=0.01, warmup=3, fused=("*",))
    vast = {i: replace(s, b=s.b * 1024, start={"w": s.start["w"] * 1024}) for i, s in planted(1).items()}
    small, large = play(rule, planted(1), 60).last, play(rule, vast, 60).last
    assert own_models(large.state) == pytest.approx(1024 * own_models(small.state), rel=1e-9)
    assert small.diagnostics["clusters"] == large.diagnostics["clusters"] == 3.0
    assert large.diagnostics["unit"] == pytest.approx(1024 * small.state.unit)


def test_fpfc_measures_its_unit_again_in_every_round():
    """The largest distance so far: distances that grow are followed, those that shrink are not."""
    algorithm = ps.Fpfc(relative=True, lam=0.2, warmup=1, fused=("*",))
    state, units = algorithm.init({"w": np.zeros(1)}, ["a", "b", "c"]), []
    for spots in ((0.0, 1.0, 9.0), (0.0, 1.0, 2.0), (0.0, 1.0, 5.0), (0.0, 1.0, 3.0)):
        replies = {i: Payload(model={"w": np.array([x])}, cases=1) for i, x in zip("abc", spots, strict=True)}
        state = algorithm.merge(state, replies)
        units.append(state.unit)
    assert units == [0.0, 2.0, 5.0, 5.0]
    pair = pairs_of(state)["a", "b"]
    d = -1.0
    for unit in units[1:]:
        share = scad_share(abs(d), 0.2 * unit, 3.7, 1e-3 * unit, 1.0)
        now, d = d, -1.0 + (1 - share) * d
    assert pair.delta["w"].item() == pytest.approx(now, abs=1e-12) and pair.share == pytest.approx(share, abs=1e-12)


def test_fpfc_refuses_pairs_that_cannot_fit_or_are_many_times_the_models(monkeypatch):
    params, sites = {"head.w": np.zeros(10), "body.w": np.zeros(10)}, [*"abcde"]
    monkeypatch.setattr("polysite.algorithms.fpfc.SMALL", 1000)
    ps.Fpfc().init(params, sites)  # ten pairs of half a model: as much as the five models
    ps.Fpfc(fused=("*",)).init(params, sites[:4])  # six pairs: 1.5 times the four models
    with pytest.raises(ConfigError, match=r"needs 6400 bytes .* its pairs 2.0 times .* pair_memory = 2 "):
        ps.Fpfc(fused=("*",)).init(params, sites)
    ps.Fpfc(fused=("*",), pair_memory=2).init(params, sites)
    monkeypatch.setattr(tree, "memory", lambda a: 2000)
    ps.Fpfc(fused=("*",)).init({"w": np.zeros(10)}, ["a", "b", "c"])  # 3 pairs twice, 3 models 4 times: 1440 bytes
    with pytest.raises(ConfigError, match=r"each of the 6 pairs of 4 sites and needs 2240 bytes"):
        ps.Fpfc(fused=("*",)).init({"w": np.zeros(10)}, ["a", "b", "c", "d"])


def test_fpfc_updates_large_leaves_like_small_ones(monkeypatch):
    found, rng = [], np.random.default_rng(0)
    rounds = [{i: {"head.w": rng.normal(size=(2, 50))} for i in who} for who in ("abcd", "abcd", "ac")]
    for piece in (1 << 17, 30):  # all pairs at once, or pair by pair in pieces of 30
        monkeypatch.setattr("polysite.algorithms.fpfc.PIECE", piece)
        monkeypatch.setattr("polysite.algorithms.fpfc.LARGE", piece)
        for kind in (np.asarray, torch.tensor):
            state = ps.Fpfc(lam=20.0).init({"head.w": kind(np.zeros((2, 50)))}, [*"abcd"])
            for models in rounds:
                given = {i: Payload(model={"head.w": kind(w["head.w"])}, cases=1) for i, w in models.items()}
                state = ps.Fpfc(lam=20.0).merge(state, given)
            found.append((np.asarray(state.deltas["head.w"]), np.array(state.lengths)))
    for deltas, lengths in found[1:]:
        assert deltas == pytest.approx(found[0][0], abs=1e-12) and lengths == pytest.approx(found[0][1], abs=1e-12)
    assert 0 < found[0][1][:, 0].min() < 1  # of pairs that are shrunk


PAIRWISE = [ps.Fpfc(lam=0.5, fused=("*",)), ps.FedAMP(), ps.FedAMP(cosine=2.0), ps.Cfl(split_at=(2,)), ps.Krum()]


@pytest.mark.parametrize("algorithm", PAIRWISE)
def test_tensors_give_the_pairs_of_arrays(algorithm):
    found, shapes = [], {"w": (3, 4), "b": ()}
    for kind in (np.asarray, torch.tensor):
        rng = np.random.default_rng(0)
        state = algorithm.init({k: kind(np.zeros(s)) for k, s in shapes.items()}, [*"abcde"])
        for _ in range(3):
            models = {i: {k: kind(rng.normal(size=s)) for k, s in shapes.items()} for i in "abcde"}
            state = algorithm.merge(state, {i: Payload(model=w, cases=2, weight=2) for i, w in models.items()})
        sent = algorithm.send(state, [*"abcde", "new"])
        found.append([np.asarray(x) for p in sent.values() for f in ("model", "anchor") for x in p.get(f, {}).values()])
    assert all(x == pytest.approx(y, abs=1e-9) for x, y in zip(*found, strict=True)) and len(found[0]) >= 12


def test_fpfc_who_is_new_starts_at_the_mean_and_who_never_trains_gets_the_largest_cluster():
    algorithm, zero = replace(FUSED, lam=0.5, xi=1e-3, nu=0.01), {"w": np.array([0.0])}
    last = play(algorithm, bed(np.ones(4), [-3.0, -3.1, -2.9, 3.0], (2, 4, 6, 50), start=zero), 200).last
    got = algorithm.send(last.state, ["new"])["new"]
    anchor = got["anchor"]["w"].item()
    assert anchor == pytest.approx(own_models(last.state).mean(), abs=1e-12)
    (served, _), *_ = algorithm.serve(got, Payload(), guest(0, "test"), ("0",))
    assert served["w"].item() == pytest.approx(np.average(own_models(last.state)[:3], weights=[2, 4, 6]), abs=1e-12)
    reply, _ = algorithm.local(got, Payload(), Quadratic(1.0, np.full(5, 3.0), lr=ETA, steps=200, start=zero))
    assert reply["model"]["w"].item() == pytest.approx((3.0 + RHO * anchor) / (1 + RHO), abs=1e-9)
    after = algorithm.merge(last.state, {"new": reply})
    assert len(after.models) == 5 and {j for i, j in pairs_of(after) if i == "new"} == {"s0", "s1", "s2", "s3"}


# pFedNet


def published(gram_root, edges, weight, iterations=20000):
    """The authors' ADMM as specified, on the vectors themselves: eta = 1, rho = 1."""
    y, q = gram_root, np.zeros((gram_root.shape[1], len(edges)))
    for e, (i, j) in enumerate(edges):
        q[i, e], q[j, e] = 1, -1
    w = dual = np.zeros((len(y), len(edges)))
    inverse = np.linalg.inv(np.eye(y.shape[1]) + q @ q.T)
    for _ in range(iterations):
        z = (y + (w - dual) @ q.T) @ inverse
        v = z @ q + dual
        w = v * np.maximum(1 - weight / np.maximum(np.linalg.norm(v, axis=0), 1e-300), 0)
        dual = v - w
    return z


def test_the_network_lasso_against_the_published_iteration():
    rng = np.random.default_rng(0)
    y, edges = rng.normal(size=(3, 6)), ((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (2, 3))
    for weight in (0.01, 0.2, 5.0):
        mixture = lasso_mixture(y.T @ y, edges, weight)
        assert y @ mixture == pytest.approx(published(y, edges, weight), abs=1e-8)
        assert lasso_mixture(1e-12 * (y.T @ y), edges, 1e-6 * weight) == pytest.approx(mixture, abs=1e-8)  # no unit
    assert y @ lasso_mixture(y.T @ y, edges, 50.0) == pytest.approx(np.repeat(y.mean(1)[:, None], 6, 1), abs=1e-8)
    assert (lasso_mixture(y.T @ y, (), 1.0) == np.eye(6)).all() and (lasso_mixture([[0.0]], (), 1.0) == 1).all()
    with pytest.raises(DataError, match="a square table of finite inner products"):
        lasso_mixture([[1.0, np.nan], [np.nan, 1.0]], [(0, 1)], 1.0)


def test_an_edge_is_there_if_either_lists_the_other():
    """Sites on a line: the last lists the third as its nearest, which lists others."""
    assert nearest_edges([(0.0,), (1.0,), (1.5,), (5.0,)], 1) == ((0, 1), (1, 2), (2, 3))
    assert nearest_edges([(0.0,), (1.0, 2.0), (4.0,)], 2) == ((0, 2),)
    assert nearest_edges([(0.0,)], 3) == () and components("ba", []) == (("a",), ("b",))


HEADED = {"body.w": np.array([0.4]), "head.w": np.array([-0.1])}


def personal_bed(a, b, **settings):
    return bed(a, b, settings.pop("n", [3] * len(b)), **{"steps": 1, "start": HEADED, **settings})


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(("lam", "eta"), [(0.05, None), (0.05, 0.3), (3.0, None)])
def test_pfednet_first_two_exchanges(lam, eta, uniform):
    """The shared part takes the mean of the sites' moves, then the personal parts step, and shrink together."""
    a, b, x, z = np.array([1.0, 2.0]), np.array([1.0, -0.4]), 0.4, -0.1
    run = play(ps.PFedNet(lam=lam, eta=eta, uniform=uniform), personal_bed(a, b, steps=K, n=[2, 6]), 2)
    one, two = run.rounds
    r, p = (1 - ETA * a) ** K, np.array([0.5, 0.5] if uniform else [0.25, 0.75])
    x = x + (p * (1 - r) * (b - x - z)).sum()
    assert one.state.shared["body.w"].item() == pytest.approx(x, abs=1e-12) and one.state.half == "personal"
    assert {v["head.w"].item() for v in one.state.personal.values()} == {z} and one.shares == {"s0": p[0], "s1": p[1]}
    step = (2 * K * ETA if eta is None else eta) / 2  # eta / m
    y = z + step * (1 - r) * (b - x - z) / (K * ETA)
    half = (y[0] - y[1]) / 2
    half = np.sign(half) * max(abs(half) - 2 * step * lam, 0)
    heads = [v["head.w"].item() for v in two.state.personal.values()]
    assert heads == pytest.approx([y.mean() + half, y.mean() - half], abs=1e-9)
    assert two.state.shared["body.w"].item() == pytest.approx(x, abs=1e-12)
    assert two.state.half == "shared" and two.shares == {} and two.diagnostics == {"edges": 1.0}


@pytest.mark.parametrize("b", [(1.0, -0.4), (0.1, 0.05)], ids=["apart", "fused"])
def test_pfednet_limit_of_two_sites(b):
    a, lam, b = np.array([1.0, 2.0]), 0.05, np.array(b)
    last = play(ps.PFedNet(lam=lam), personal_bed(a, b), 400).last
    apart = b[0] - b[1] > 2 * lam * (1 / a).sum()
    limit = [b[0] - 2 * lam / a[0], b[1] + 2 * lam / a[1]] if apart else [(a @ b) / a.sum()] * 2
    found = [(last.state.shared["body.w"] + z["head.w"]).item() for z in last.state.personal.values()]
    assert found == pytest.approx(limit, abs=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pfednet_without_a_pull_is_personal_layers_beside_shared_ones_to_the_last_bit(share):
    s = two_part_sites()
    shared = {k: START[k] for k in ("body.w", "norm.running_var")}
    heads = {i: {"head.w": START["head.w"]} for i in s}
    for r in play(ps.PFedNet(lam=0.0, uniform=False), two_part_sites(), 6, share).rounds:
        there = sorted(r.sent)
        if r.index % 2:
            heads |= {i: {"head.w": s[i].fit({**shared, **heads[i]}, only=["head.w"]).params["head.w"]} for i in there}
        else:
            fits = [s[i].fit({**shared, **heads[i]}, only=tuple(shared)).params for i in there]
            shared = tree.mean([{k: f[k] for k in shared} for f in fits], [s[i].size for i in there])
        assert same(dict(r.state.shared), dict(shared)) and same({**r.state.personal}, heads)


def test_pfednet_an_absent_site_is_moved_by_its_neighbours_alone():
    algorithm, sites = ps.PFedNet(lam=0.02, neighbours=1), personal_bed(np.ones(3), np.array([1.0, 0.0, -1.0]))
    last = play(algorithm, sites, 21).last
    z = {i: v["head.w"].item() for i, v in last.state.personal.items()}
    reply, _ = algorithm.local(algorithm.send(last.state, ["s0"])["s0"], Payload(), sites["s0"])
    after = algorithm.merge(last.state, {"s0": reply}).personal
    y = np.array([[reply["model"]["head.w"].item(), z["s1"], z["s2"]]])
    expected = published(y, ((0, 1), (1, 2)), 3 * ETA * 0.02)
    assert [v["head.w"].item() for v in after.values()] == pytest.approx(expected[0], abs=1e-8)
    assert after["s1"]["head.w"].item() != z["s1"]


@pytest.mark.parametrize("half", ["shared", "personal"])
def test_pfednet_serves_a_stranger_by_those_that_are_like_it(half):
    """By its validation cases, or by images of any; where only a test has labels, by the mean of all."""
    heads = {i: {"head.w": np.array([v])} for i, v in zip("abcd", (1.0, 2.0, 4.0, 9.0), strict=True)}
    sketches = {"a": (0.0,), "b": (1.0,), "c": (5.0,), "d": (6.0, 1.0)}  # the last one does not fit the others
    state = replace(ps.PFedNet().init(HEADED, list("abcd")), personal=heads, sketches=sketches, half=half)
    both, only = ("validation", "test"), ("test",)
    for neighbours, sketch, site, head in (
        (2, "labels", guest(0.2, *both), 1.5),
        (1, "labels", guest(4.8, *both), 4.0),
        (3, "labels", guest(9, *both), 7 / 3),
        (2, "labels", guest(0.2, *only), 4.0),
        (2, "images", guest(0.2, *only), 1.5),
    ):
        rule = ps.PFedNet(neighbours=neighbours, sketch=sketch)
        got = rule.send(state, ["x"])["x"]
        assert not any(name in repr(got) for name in ("'a'", "'b'"))
        ((model, cases),) = rule.serve(got, Payload(), site, site.cases("test"))
        assert model.keys() == HEADED.keys() and cases == site.cases("test")
        assert model["head.w"] == pytest.approx(head)
    assert rule.send(state, ["a"])["a"].keys() == {"model", "fixed"}  # who trains is not sent the others' parts


def test_pfednet_takes_in_who_is_new():
    rule, sites = ps.PFedNet(lam=0.01), personal_bed(np.ones(4), np.array([1.0, 0.0, -1.0, 0.5]))
    last = play(rule, {i: sites[i] for i in ("s0", "s1", "s2")}, 7).last
    sent = rule.send(last.state, ["s3"])["s3"]
    assert last.state.half == "personal" and same(dict(sent["model"]), dict(tree.mean(last.state.personal.values())))
    after = rule.merge(last.state, {"s3": rule.local(sent, Payload(), sites["s3"])[0]})
    assert set(after.personal) == set(sites) == set(after.sketches) and rule.diagnostics(after) == {"edges": 6.0}


@pytest.mark.parametrize("eta", [None, 0.3])
def test_pfednet_draws_parameters_together_and_no_running_statistics(eta):
    """So strong a pull makes the heads one; every site's variance is what its own training left: 16 moved to a^2."""
    a, start = np.array([1.0, 2.0]), {**HEADED, "head.running_var": np.array([16.0])}
    two = play(ps.PFedNet(lam=3.0, eta=eta), personal_bed(a, np.array([1.0, -0.4]), start=start), 2).state.personal
    assert two["s0"]["head.w"] == pytest.approx(two["s1"]["head.w"], abs=1e-9)
    assert [x["head.running_var"].item() for x in two.values()] == pytest.approx(0.9 * 16 + 0.1 * a**2, abs=1e-12)
