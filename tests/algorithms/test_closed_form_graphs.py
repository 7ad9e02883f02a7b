"""IFCA, FPFC and pFedNet against answers on paper: first round, limit, who ends up with whom."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polysite as ps
from polysite import tree
from polysite.algorithms.base import facts
from polysite.algorithms.ifca import State as Clusters
from polysite.cluster import fusion
from polysite.cluster.directions import direction_groups
from polysite.cluster.fusion import components, lasso_mixture, nearest_edges, scad_share
from polysite.data.case import Case
from polysite.errors import ConfigError, DataError
from polysite.payload import Payload
from polysite.site import CaseScore, Fit
from polysite.training.network import Network
from polysite.training.tasks import Classify
from polysite.training.torch_site import TorchSite
from quadratic import ETA, Q0, A, B, K, N, Quadratic, R, bed, play
from table import START, same
from table import sites as two_part_sites


class Guest(Quadratic):
    """Without training cases; ``of`` says which cases it has beside."""

    of = ("validation", "test")

    @property
    def size(self):
        return 0

    def cases(self, split):
        return tuple(map(str, range(len(self.b)))) if split in self.of else ()

    def losses(self, params, *, augmented=False):
        raise AssertionError("it has no training case")

    def score(self, params, cases):
        assert cases == self.cases("validation"), "no model is chosen by the cases that it is tested on"
        return {n: CaseScore({}, float((params["w"].item() - self.b[int(n)]) ** 2)) for n in cases}

    def sketch(self, kind, cases):
        assert kind == "images" or "validation" in self.of, "no label of a test is looked at"
        return np.array([self.b.mean()])


class Trainer(Quadratic):
    def score(self, params, cases):
        raise AssertionError("a site that trains chooses by its training cases")


def guest(b, *of):
    found = Guest(1.0, np.array([float(b)]))
    found.of = of
    return found


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


def test_ifca_of_models_that_start_alike_everyone_takes_the_first():
    last = play(ps.Ifca(), bed(), 1, state=two_centres(Q0, Q0)).last
    assert set(last.state.places.values()) == {0} and centres(last.state)[1] == Q0 != centres(last.state)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ifca_separates_two_planted_populations(seed, share):
    """From its own starts, which lie between the populations, whatever the seed."""
    rng = np.random.default_rng(seed)
    b = np.concatenate([rng.normal(-2, 0.2, 4), rng.normal(3, 0.2, 3)])
    sites = bed(rng.uniform(0.5, 2, 7), b, rng.integers(2, 9, 7), start={"w": np.array([0.5])})
    run = play(ps.Ifca(starts="noise", warmup=0, spread=0.5, seed=seed), sites, 60, share=share, seed=seed)
    end = run.last
    low, high = (end.state.places[f"s{k}"] for k in (0, 6))
    assert end.state.places == {f"s{i}": low if i < 4 else high for i in range(7)} and low != high
    pull = {i: s.size * s.pull for i, s in sites.items()}
    for j, members in ((low, range(4)), (high, range(4, 7))):
        here = [f"s{i}" for i in members]
        limit = np.average([sites[i].b.mean() for i in here], weights=[pull[i] for i in here])
        assert centres(end.state)[j] == pytest.approx(limit, abs=1e-6 if share == 1 else 0.3)
    assert end.diagnostics == {"clusters": 2.0}
    served = run.engine.serve(60, ps.Ifca().send(end.state, ["s1", "s5"])).models
    assert [served[i][0]["w"].item() for i in ("s1", "s5")] == [centres(end.state)[j] for j in (low, high)]


STARTS = {
    "conv.weight": np.random.default_rng(0).normal(0.3, 0.05, (40, 50)).astype(np.float32),
    "norm.weight": np.ones(40, np.float32),
    "norm.bias": np.zeros(40, np.float32),
    "norm.running_var": np.linspace(1, 2, 40, dtype=np.float32),
}


@pytest.mark.parametrize("spread", [0.1, 0.6, 1.0])
def test_ifca_starts_differ_and_keep_their_scale(spread):
    models = ps.Ifca(k=4, starts="noise", warmup=0, spread=spread, seed=3).init(STARTS, ["a"]).models
    assert same(models[0], STARTS)
    first = STARTS["conv.weight"]
    for j, model in enumerate(models[1:], 1):
        w = model["conv.weight"]
        assert w.dtype == np.float32 and w.mean() == pytest.approx(0.3, abs=0.005)
        assert w.std() == pytest.approx(0.05, rel=0.05)
        kept = np.corrcoef(w.ravel(), first.ravel())[0, 1]
        assert kept == pytest.approx((1 - spread**2) ** 0.5, abs=0.06)
        assert all(not np.array_equal(w, other["conv.weight"]) for other in models[:j])
        assert all(np.array_equal(model[k], STARTS[k]) for k in STARTS if k != "conv.weight")


RANDOM = partial(ps.Ifca, starts="noise", warmup=0)  # the paper's starts


def test_ifca_starts_are_those_of_the_seed_wherever_they_are_computed():
    one, again, other = (RANDOM(seed=s).init(STARTS, ["a"]).models for s in (1, 1, 2))
    assert same(one, again) and not np.array_equal(one[1]["conv.weight"], other[1]["conv.weight"])
    lifted = RANDOM(seed=1).init({k: torch.tensor(v) for k, v in STARTS.items()}, ["a"]).models
    assert all(isinstance(x, torch.Tensor) for model in lifted for x in model.values())
    assert same([{k: v.numpy() for k, v in model.items()} for model in lifted], list(one))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("uniform", [False, True])
def test_ifca_with_one_model_is_fedavg_to_the_last_bit(share, uniform):
    rules = ps.Ifca(k=1, uniform=uniform), ps.FedAvg(uniform=uniform)
    alone, plain = (play(rule, two_part_sites(), 6, share).last for rule in rules)
    assert same(alone.state.models[0], plain.state.model) and alone.state.shared == {}
    assert alone.shares == pytest.approx(plain.shares)


def test_ifca_warms_up_by_fedavg_and_then_parts():
    warm = play(ps.Ifca(k=3, warmup=2, settle=2), two_part_sites(), 6).rounds
    assert [len(r.state.models) for r in warm] == [1, 3, 3, 3, 3, 3]
    assert same(warm[0].state.models[0], play(ps.FedAvg(), two_part_sites(), 1).state.model)
    assert [sum(f.startswith("model_") for f in r.sent["a"]) for r in warm] == [1, 1, 3, 3, 3, 3]
    groups = warm[1].state.places
    for r in warm[2:4]:  # held to their groups
        assert {i: got["group"] for i, got in r.sent.items()} == groups
        assert {i: reply.payload["cluster"] for i, reply in r.replies.items()} == groups
    assert all("group" not in got for r in warm[:2] for got in r.sent.values())
    assert all(got["group"] == -1 for r in warm[4:] for got in r.sent.values())  # free to choose


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


class Vast(Quadratic):
    """Many parameters: F(w) = a/2 |w - aim|^2. As in a network, groups differ little beside the size of weights."""

    aim: np.ndarray

    def losses(self, params, *, augmented=False):
        return {n: self.a / 2 * float(((params["w"] - self.aim) ** 2).sum()) for n in self.cases("train")}

    def fit(self, params, objective=None, budget=None, *, only=("*",), keep=None):
        w = self.aim + (1 - self.pull) * (params["w"] - self.aim)
        self.fits.append(Fit({"w": w}, 0.0, self.steps, self.steps * self.lr, self.steps * self.lr))
        return self.fits[-1]


def vast(seed, size=40):
    """Two planted groups of three and four sites, and a start that none of them likes."""
    rng = np.random.default_rng(seed)
    middle, apart = rng.normal(size=size), rng.normal(scale=0.3, size=size)
    sites = {}
    for i in range(7):
        sites[f"s{i}"] = Vast(
            rng.uniform(0.5, 2), np.zeros(rng.integers(2, 9)), lr=ETA, start={"w": rng.normal(size=size)}
        )
        sites[f"s{i}"].aim = middle + (apart if i < 3 else -apart) + rng.normal(scale=0.05, size=size)
    return sites


STARTING = {
    "groups": ps.Ifca(),
    "sites": ps.Ifca(starts="sites"),
    "noise": ps.Ifca(starts="noise"),
    "similar noise": ps.Ifca(starts="noise", spread=0.1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", STARTING.values(), ids=STARTING.keys())
def test_ifca_uses_every_model_from_every_kind_of_start(algorithm, seed):
    """Each planted group has a model of its own in the end, where everybody chooses by the loss."""
    algorithm, sites = replace(algorithm, seed=seed).scaled(60), vast(seed)
    end = play(algorithm, sites, 60).last
    assert all(got["group"] == -1 for got in end.sent.values()) and end.diagnostics == {"clusters": 2.0}
    first, second = end.state.places["s0"], end.state.places["s6"]
    assert end.state.places == {f"s{i}": first if i < 3 else second for i in range(7)} and first != second
    for j, members in ((first, range(3)), (second, range(3, 7))):
        here = [sites[f"s{i}"] for i in members]
        limit = np.average([s.aim for s in here], 0, [s.size * s.pull for s in here])
        assert end.state.models[j]["w"] == pytest.approx(limit, abs=1e-6)


SMALL = ps.Train(lr=0.1, gamma=1.0, patch=(16, 16), augment="none", batch=4, device="cpu")


def pictures(name, network, swapped):
    """Bright and dark pictures of two classes, which the hospitals of the second group name the other way round."""
    rng, kinds = np.random.default_rng(ord(name)), [0, 1] * 4
    found = [
        Case(name, f"{name}{k}", rng.normal(2 * y - 1, 1, (1, 16, 16)).astype(np.float32),
             np.eye(2, dtype=np.uint8)[1 - y if swapped else y], (1.0, 1.0))
        for k, y in enumerate(kinds)
    ]  # fmt: skip
    return TorchSite(name, network, {"train": found}, ["x", "y"], SMALL, 0, Classify())


def test_ifca_of_a_network_uses_both_models():
    net = Network(ps.DenseNet(blocks=(2,), growth=4, features=8).build(dims=2, modalities=1, outputs=2, seed=0), SMALL)
    hospitals = {name: pictures(name, net, name in "cde") for name in "abcde"}
    places = play(ps.Ifca().scaled(10), hospitals, 10, start=net.start).state.places
    assert places == {n: places["e" if n in "cde" else "a"] for n in "abcde"} and places["a"] != places["e"]


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


@pytest.mark.parametrize("k", [1, 2, 5])
def test_ifca_sends_every_model_and_gets_one(k):
    """What is shared goes down once."""
    whole = sum(x.nbytes for x in START.values())
    for clustered, times in ((("*",), k * whole), (("head.*",), whole + (k - 1) * START["head.w"].nbytes)):
        last = play(RANDOM(k=k, clustered=clustered), two_part_sites(), 1).last
        assert {p.nbytes for p in last.sent.values()} == {times + 8}
        assert {r.payload.nbytes for r in last.replies.values()} == {whole + 16}


def test_ifca_averages_what_is_not_clustered_over_all():
    algorithm, s = RANDOM(clustered=("head.*",)), two_part_sites()
    state = algorithm.init(START, sorted(s))
    last = play(algorithm, s, 1, state=replace(state, models=({"head.w": np.array([-4.0])}, state.models[1]))).last
    got = {i: r.payload for i, r in last.replies.items()}
    chosen = {i: int(p["cluster"]) for i, p in got.items()}
    assert set(chosen.values()) == {0, 1}
    for name in ("body.w", "norm.running_var"):
        mean = np.average([got[i]["model"][name].item() for i in s], weights=[x.size for x in s.values()])
        assert last.state.shared[name].item() == pytest.approx(mean, abs=1e-12)
    for j in (0, 1):
        here = [i for i in s if chosen[i] == j]
        mean = np.average([got[i]["model"]["head.w"].item() for i in here], weights=[s[i].size for i in here])
        assert last.state.models[j]["head.w"].item() == pytest.approx(mean, abs=1e-12)
        total = sum(s[i].size for i in here)
        assert {i: last.shares[i] for i in here} == pytest.approx({i: s[i].size / total for i in here})


def test_ifca_averages_statistics_within_a_cluster():
    state = Clusters({}, ({**START, "head.w": np.array([-4.0])}, START), {}, since=-99)
    last = play(ps.Ifca(), two_part_sites(), 1, state=state).last
    s, places = two_part_sites(), last.state.places
    assert set(places.values()) == {0, 1}
    for j in (0, 1):
        here = [x for i, x in s.items() if places[i] == j]
        mean = np.average([0.9 * 16 + 0.1 * x.a**2 for x in here], weights=[x.size for x in here])
        assert last.state.models[j]["norm.running_var"].item() == pytest.approx(mean, abs=1e-12)


def test_ifca_serves_by_loss_and_without_labels_the_largest_cluster():
    algorithm = ps.Ifca()
    state = replace(two_centres(-1.0, 2.0), places={"s0": 1, "s1": 0, "s2": 1})
    got = algorithm.send(state, ["x"])["x"]
    served = {
        "trains": Trainer(1.0, np.array([-3.0])),
        "validates, low": guest(-3, "validation", "test"),
        "validates, high": guest(3, "validation", "test"),
        "is only tested": guest(-3, "test"),
    }
    found = {
        who: next(algorithm.serve(got, Payload(), site, site.cases("test")))[0]["w"].item()
        for who, site in served.items()
    }
    assert found == {"trains": -1, "validates, low": -1, "validates, high": 2, "is only tested": 2}


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
            pair = state.pairs[f"s{i}"][f"s{j}"]
            known = pair.delta["w"].item()
            assert [pair.share * known, RHO * (1 - pair.share) * known] == pytest.approx([theta[i, j], dual[i, j]])
            assert pair.gap == pytest.approx(abs(theta[i, j]), abs=1e-12)


def test_fpfc_limit_is_stationary():
    last = play(FUSED, bed(), 400).last
    w = own_models(last.state)
    forces = A * (w - B) + np.array([sum(slope(x - y) for y in w) for x in w]) / 4
    assert forces == pytest.approx(np.zeros(4), abs=1e-6)


@pytest.mark.parametrize(("b", "near"), [((2.0, -1.0), False), ((0.1, -0.05), True)])
def test_fpfc_of_two_sites(b, near):
    """Far apart, neither feels the other; near, both yield to a spring of lam / 2 xi."""
    a, spring = np.array([1.0, 2.0]), LAM / 2 / XI
    last = play(FUSED, bed(a, b, (3, 3), start={"w": np.array([0.0])}), 400).last
    d = (b[0] - b[1]) / (1 + spring * (1 / a).sum())
    assert not near or abs(d) <= XI
    expected = [b[0] - spring * d / a[0], b[1] + spring * d / a[1]] if near else b
    assert own_models(last.state) == pytest.approx(expected, abs=1e-7)
    assert last.diagnostics == {"clusters": 1.0 if near else 2.0}


def planted(seed, size=3):
    """Three populations of sites, far apart; inside, they differ by less than lam / m can hold together."""
    rng = np.random.default_rng(seed)
    b = np.concatenate([rng.normal(c, 0.02, size) for c in (-3.0, 0.0, 4.0)])
    return bed(rng.uniform(0.8, 2.0, 3 * size), b, rng.integers(2, 9, 3 * size), start={"w": np.array([0.2])})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_fpfc_fuses_pairs_inside_planted_groups_and_none_across(seed, share):
    algorithm, sites = replace(FUSED, lam=0.5, xi=1e-3, nu=0.01), planted(seed)
    run = play(algorithm, sites, 120 if share == 1 else 300, share, seed=seed)
    last = run.last
    group = {f"s{i}": i // 3 for i in range(9)}
    for i, row in last.state.pairs.items():
        for j, pair in row.items():
            assert (pair.gap <= algorithm.nu) == (group[i] == group[j]), (i, j, pair.gap)
    assert last.diagnostics == {"clusters": 3.0}
    served = run.engine.serve(0, algorithm.send(last.state, sorted(sites))).models
    for g in range(3):
        here = [i for i in sites if group[i] == g]
        mean = np.average([last.state.models[i]["w"].item() for i in here], weights=[sites[i].size for i in here])
        assert [served[i][0]["w"].item() for i in here] == pytest.approx([mean] * 3, abs=1e-12)
        optimum = np.average([sites[i].b.mean() for i in here], weights=[sites[i].a for i in here])
        assert mean == pytest.approx(optimum, abs=2e-3)  # that of the group, not biased by the other groups


def test_fpfc_without_penalty_every_site_ends_at_its_own_optimum():
    algorithm = replace(FUSED, lam=0.0, nu=0.0)
    run = play(algorithm, bed(), 300)
    one, end = run.states[1], run.last
    assert all(pair.share == 1 for row in one.pairs.values() for pair in row.values())
    anchors = {i: p["anchor"]["w"].item() for i, p in algorithm.send(one, sorted(one.models)).items()}
    assert [anchors[f"s{i}"] for i in range(4)] == pytest.approx(own_models(one), abs=1e-12)
    assert own_models(end.state) == pytest.approx(B, abs=1e-6) and end.diagnostics == {"clusters": 4.0}
    stranger = algorithm.send(end.state, ["new"])["new"]["model"]["w"].item()
    assert stranger == pytest.approx(np.average(B, weights=N), abs=1e-6)  # nobody is served what one site alone made


def test_fpfc_with_a_strong_penalty_is_one_model_at_the_common_optimum():
    last = play(replace(FUSED, lam=20.0, xi=1e-4, nu=1e-3), bed(), 300).last
    assert own_models(last.state) == pytest.approx([(A * B).sum() / A.sum()] * 4, abs=1e-3)
    assert last.diagnostics == {"clusters": 1.0}


def test_fpfc_leaves_pairs_of_absent_sites_alone():
    last = play(FUSED, bed(), 3).last
    sent = FUSED.send(last.state, ["s1"])
    reply, _ = FUSED.local(sent["s1"], Payload(own=last.state.models["s1"]), bed()["s1"])
    after = FUSED.merge(last.state, {"s1": reply})
    for i, j in (("s0", "s2"), ("s0", "s3"), ("s2", "s3")):
        assert same(after.pairs[i][j], last.state.pairs[i][j])
    for i, j in (("s0", "s1"), ("s1", "s2"), ("s1", "s3")):
        assert not same(after.pairs[i][j], last.state.pairs[i][j])


def test_fpfc_a_site_goes_on_from_what_the_server_knows_of_it():
    run = play(ps.Fpfc(lam=0.2), two_part_sites(), 5, share=0.5)
    heard = {i: m["own"] for i, m in run.memories.items() if m}
    assert heard and all(same(dict(own), dict(run.state.models[i])) for i, own in heard.items())


def test_fpfc_averages_what_is_not_fused_and_holds_only_what_is():
    """Both parts move alike but for the pull of rho on the head alone."""
    s = two_part_sites()
    last = play(ps.Fpfc(lam=0.2), s, 1).last
    for i, site in s.items():
        body, head, b = START["body.w"].item(), START["head.w"].item(), site.b.mean()
        for _ in range(site.steps):
            g = site.a * (body + head - b)
            body, head = body - site.lr * g, head - site.lr * (g + 1.0 * (head - START["head.w"].item()))
        reply = last.replies[i].payload["model"]
        assert [reply["body.w"].item(), reply["head.w"].item()] == pytest.approx([body, head], abs=1e-12)
        assert last.state.models[i]["head.w"].item() == pytest.approx(head, abs=1e-12)
    sizes = [x.size for x in s.values()]
    for name in ("body.w", "norm.running_var"):
        mean = np.average([last.replies[i].payload["model"][name].item() for i in s], weights=sizes)
        assert last.state.shared[name].item() == pytest.approx(mean, abs=1e-12)
    assert last.shares == pytest.approx({i: x.size / sum(sizes) for i, x in s.items()})
    whole = sum(x.nbytes for x in START.values())
    assert {p.nbytes for p in last.sent.values()} == {whole + START["head.w"].nbytes}
    assert {r.payload.nbytes for r in last.replies.values()} == {whole + 8}


def test_fpfc_warms_up_without_penalty():
    free, warm = (play(replace(FUSED, **how), bed(), 5).states for how in ({"lam": 0.0}, {"warmup": 4}))
    assert all(same(x, y) for x, y in zip(free[:4], warm[:4], strict=True)) and not same(free[4].pairs, warm[4].pairs)
    near = play(replace(FUSED, warmup=4), bed(a=[1.0] * 4, b=[0.0, 0.1, 0.2, 0.3]), 5).state
    assert all(p.share < 1 for p in near.pairs["s0"].values())


def test_fpfc_in_relative_units_does_not_know_how_large_the_network_is():
    algorithm = ps.Fpfc(relative=True, lam=0.2, xi=1e-3, nu=0.01, warmup=3, fused=("*",))
    small = play(algorithm, planted(1), 60).last
    large = {i: replace(s, b=s.b * 1024, start={"w": s.start["w"] * 1024}) for i, s in planted(1).items()}
    large = play(algorithm, large, 60).last
    assert own_models(large.state) == pytest.approx(1024 * own_models(small.state), rel=1e-9)
    assert large.diagnostics == pytest.approx({"clusters": 3.0, "unit": 1024 * small.state.unit})
    assert small.diagnostics == {"clusters": 3.0, "unit": small.state.unit}
    first = play(algorithm, planted(1), 4).last
    w = own_models(first.state)
    assert first.state.unit == pytest.approx(w.max() - w.min(), abs=1e-12)


def test_fpfc_measures_its_unit_again_in_every_round_unless_it_is_frozen():
    """The largest distance so far: distances that grow are followed, those that shrink are not."""
    for freeze in (False, True):
        algorithm = ps.Fpfc(relative=True, lam=0.2, warmup=1, fused=("*",), freeze=freeze)
        state, units = algorithm.init({"w": np.zeros(1)}, ["a", "b", "c"]), []
        for spots in ((0.0, 1.0, 9.0), (0.0, 1.0, 2.0), (0.0, 1.0, 5.0), (0.0, 1.0, 3.0)):
            replies = {i: Payload(model={"w": np.array([x])}, cases=1) for i, x in zip("abc", spots, strict=True)}
            state = algorithm.merge(state, replies)
            units.append(state.unit)
        assert units == ([0.0, 2.0, 2.0, 2.0] if freeze else [0.0, 2.0, 5.0, 5.0])
    pair = state.pairs["a"]["b"]  # the last of the frozen ones: lam = 0.2 * 2
    d = -1.0
    for _ in range(3):
        share = scad_share(abs(d), 0.2 * 2, 3.7, 1e-3 * 2, 1.0)
        now, d = d, -1.0 + (1 - share) * d
    assert pair.delta["w"].item() == pytest.approx(now, abs=1e-12) and pair.share == pytest.approx(share, abs=1e-12)


def test_fpfc_refuses_pairs_that_cannot_fit(monkeypatch):
    monkeypatch.setattr(tree, "memory", lambda a: 2000)
    algorithm = ps.Fpfc(fused=("*",))
    algorithm.init({"w": np.zeros(10)}, ["a", "b", "c"])  # three pairs twice, three models four times: 1440 bytes
    with pytest.raises(ConfigError, match=r"each of the 6 pairs of 4 sites and needs 2240 bytes"):
        algorithm.init({"w": np.zeros(10)}, ["a", "b", "c", "d"])


def test_fpfc_refuses_pairs_that_are_many_times_the_models(monkeypatch):
    monkeypatch.setattr("polysite.algorithms.fpfc.SMALL", 1000)
    params, sites = {"head.w": np.zeros(10), "body.w": np.zeros(10)}, [*"abcde"]
    ps.Fpfc().init(params, sites)  # ten pairs of half a model: as much as the five models
    ps.Fpfc(fused=("*",)).init(params, sites[:4])  # six pairs: 1.5 times the four models
    with pytest.raises(ConfigError, match=r"needs 6400 bytes .* its pairs 2.0 times .* pair_memory = 2 "):
        ps.Fpfc(fused=("*",)).init(params, sites)
    ps.Fpfc(fused=("*",), pair_memory=2).init(params, sites)


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


def test_the_network_lasso_ends_after_a_bounded_number_of_iterations(monkeypatch):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(6, 12))
    edges = nearest_edges(rng.normal(size=(12, 2)).tolist(), 3)
    exact = y @ lasso_mixture(y.T @ y, edges, 0.3)
    monkeypatch.setattr(fusion, "WORK", 0)  # the fewest iterations, whatever the size
    assert y @ lasso_mixture(y.T @ y, edges, 0.3) == pytest.approx(exact, abs=1e-6)
    monkeypatch.setattr(fusion, "FEWEST_ITERATIONS", 2)
    assert abs(y @ lasso_mixture(y.T @ y, edges, 0.3) - exact).max() > 1e-3


def test_fpfc_who_is_new_starts_at_the_mean_and_who_never_trains_gets_the_largest_cluster():
    algorithm = replace(FUSED, lam=0.5, xi=1e-3, nu=0.01)
    b = np.array([-3.0, -3.1, -2.9, 3.0])
    last = play(algorithm, bed(np.ones(4), b, (2, 4, 6, 50), start={"w": np.array([0.0])}), 200).last
    got = algorithm.send(last.state, ["new"])["new"]
    assert got["anchor"]["w"].item() == pytest.approx(own_models(last.state).mean(), abs=1e-12)
    (served, _), *_ = algorithm.serve(got, Payload(), guest(0, "test"), ("0",))
    assert served["w"].item() == pytest.approx(np.average(own_models(last.state)[:3], weights=[2, 4, 6]), abs=1e-12)
    newcomer = Quadratic(1.0, np.full(5, 3.0), lr=ETA, steps=200, start={"w": np.array([0.0])})
    reply, _ = algorithm.local(got, Payload(), newcomer)
    near = (3.0 + RHO * got["anchor"]["w"].item()) / (1 + RHO)
    assert reply["model"]["w"].item() == pytest.approx(near, abs=1e-9)
    after = algorithm.merge(last.state, {"new": reply})
    assert len(after.models) == 5 and set(after.pairs["new"]) == {"s0", "s1", "s2", "s3"}


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


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 7), st.integers(1, 5), st.floats(1e-3, 3.0))
def test_the_network_lasso_is_that_of_the_vectors_and_the_least(seed, sites, size, weight):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(size, sites))
    edges = nearest_edges(rng.normal(size=(sites, 2)).tolist(), 2)
    z = y @ lasso_mixture(y.T @ y, edges, weight)

    def cost(x):
        return 0.5 * ((x - y) ** 2).sum() + weight * sum(np.linalg.norm(x[:, i] - x[:, j]) for i, j in edges)

    assert z.sum(1) == pytest.approx(y.sum(1), abs=1e-8)
    for scale in (1e-1, 1e-3):
        assert all(cost(z) <= cost(z + scale * rng.normal(size=z.shape)) + 1e-10 for _ in range(20))


def test_the_network_lasso_against_the_published_iteration():
    rng = np.random.default_rng(0)
    y, edges = rng.normal(size=(3, 6)), ((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (2, 3))
    for weight in (0.01, 0.2, 5.0):
        z = y @ lasso_mixture(y.T @ y, edges, weight)
        assert z == pytest.approx(published(y, edges, weight), abs=1e-8)
    assert y @ lasso_mixture(y.T @ y, edges, 50.0) == pytest.approx(np.repeat(y.mean(1)[:, None], 6, 1), abs=1e-8)
    assert (lasso_mixture(y.T @ y, (), 1.0) == np.eye(6)).all() and (lasso_mixture([[0.0]], (), 1.0) == 1).all()
    with pytest.raises(DataError, match="a square table of finite inner products"):
        lasso_mixture([[1.0, np.nan], [np.nan, 1.0]], [(0, 1)], 1.0)


@pytest.mark.parametrize("weight", [0.05, 0.4, 3.0])
def test_the_network_lasso_of_one_edge_shrinks_along_it(weight):
    y = np.random.default_rng(1).normal(size=(3, 2))
    middle, half = y.mean(1), (y[:, 0] - y[:, 1]) / 2
    half = max(1 - weight / np.linalg.norm(half), 0) * half
    z = y @ lasso_mixture(y.T @ y, [(0, 1)], weight)
    assert z == pytest.approx(np.c_[middle + half, middle - half], abs=1e-9)


def test_an_edge_is_there_if_either_lists_the_other():
    """Sites on a line: the last lists the third as its nearest, which lists others."""
    assert nearest_edges([(0.0,), (1.0,), (1.5,), (5.0,)], 1) == ((0, 1), (1, 2), (2, 3))
    assert nearest_edges([(0.0,), (1.0, 2.0), (4.0,)], 2) == ((0, 2),)
    assert nearest_edges([(0.0,)], 3) == () and components("ba", []) == (("a",), ("b",))


def personal_bed(a, b, steps=1, n=None):
    start = {"body.w": np.array([0.4]), "head.w": np.array([-0.1])}
    n = [3] * len(b) if n is None else n
    return {f"s{i}": Quadratic(a[i], np.full(n[i], b[i]), steps, ETA, start) for i in range(len(b))}


def whole(state):
    return np.array([(state.shared["body.w"] + z["head.w"]).item() for z in state.personal.values()])


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
    assert whole(last.state) == pytest.approx(limit, abs=1e-6)


def test_pfednet_limit_on_a_graph_is_the_least_of_the_objective():
    rng = np.random.default_rng(3)
    a, b, lam = rng.uniform(0.5, 2, 6), np.array([-2.0, -1.9, -1.7, 1.0, 1.2, 1.5]), 0.02
    last = play(ps.PFedNet(lam=lam, neighbours=2), personal_bed(a, b), 500).last
    edges = nearest_edges([(v,) for v in b], 2)

    def cost(u):
        return (a / 2 * (u - b) ** 2).mean() + lam * sum(abs(u[i] - u[j]) for i, j in edges)

    u = whole(last.state)
    assert all(cost(u) <= cost(u + s * rng.normal(size=6)) + 1e-9 for s in (0.1, 1e-2, 1e-3) for _ in range(50))
    assert last.diagnostics == {"edges": float(len(edges))}


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


def test_pfednet_moves_all_down_and_what_was_trained_up():
    size, head = sum(x.nbytes for x in START.values()), START["head.w"].nbytes
    for r in play(ps.PFedNet(), two_part_sites(), 4, wire=True).rounds:
        assert {p.nbytes for p in r.sent.values()} == {size}
        up = {i: reply.payload for i, reply in r.replies.items()}
        assert {p.nbytes for p in up.values()} == {(head if r.index % 2 else size - head) + 8 + 8}  # sketch and time
        assert all(("head.w" in p["model"]) == bool(r.index % 2) for p in up.values()) and not r.refused


def test_pfednet_an_absent_site_is_moved_by_its_neighbours_alone():
    lam, sites = 0.02, personal_bed(np.ones(3), np.array([1.0, 0.0, -1.0]))
    algorithm = ps.PFedNet(lam=lam, neighbours=1)
    last = play(algorithm, sites, 21).last
    z = {i: v["head.w"].item() for i, v in last.state.personal.items()}
    sent = algorithm.send(last.state, ["s0"])
    reply, _ = algorithm.local(sent["s0"], Payload(), sites["s0"])
    after = algorithm.merge(last.state, {"s0": reply})
    y = np.array([[reply["model"]["head.w"].item(), z["s1"], z["s2"]]])
    expected = published(y, ((0, 1), (1, 2)), 3 * ETA * lam)
    assert [v["head.w"].item() for v in after.personal.values()] == pytest.approx(expected[0], abs=1e-8)
    assert after.personal["s1"]["head.w"].item() != z["s1"]


@pytest.mark.parametrize("half", ["shared", "personal"])
def test_pfednet_serves_a_stranger_by_those_that_are_like_it(half):
    """By its validation cases, or by images of any; where only a test has labels, by the mean of all."""
    state = ps.PFedNet().init({"body.w": np.zeros(1), "head.w": np.zeros(1)}, list("abcd"))
    heads = {i: {"head.w": np.array([v])} for i, v in zip("abcd", (1.0, 2.0, 4.0, 9.0), strict=True)}
    sketches = {"a": (0.0,), "b": (1.0,), "c": (5.0,), "d": (6.0, 1.0)}  # the last one does not fit the others
    state = replace(state, personal=heads, sketches=sketches, half=half)

    def served(algorithm, site):
        got = algorithm.send(state, ["x"])["x"]
        assert not any(name in repr(got) for name in ("'a'", "'b'"))
        ((model, cases),) = algorithm.serve(got, Payload(), site, site.cases("test"))
        assert model.keys() == {"body.w", "head.w"} and cases == site.cases("test")
        return model["head.w"].item()

    labels, images = ps.PFedNet(neighbours=2), ps.PFedNet(neighbours=2, sketch="images")
    assert served(labels, guest(0.2, "validation", "test")) == 1.5
    assert served(replace(labels, neighbours=1), guest(4.8, "validation", "test")) == 4.0
    assert served(replace(labels, neighbours=3), guest(9, "validation", "test")) == pytest.approx(7 / 3)
    assert served(labels, guest(0.2, "test")) == 4.0
    assert served(images, guest(0.2, "test")) == 1.5
    assert labels.send(state, ["a"])["a"].keys() == {"model", "fixed"}  # who trains is not sent the others' parts


def test_pfednet_takes_in_who_is_new():
    algorithm, sites = ps.PFedNet(lam=0.01), personal_bed(np.ones(3), np.array([1.0, 0.0, -1.0]))
    last = play(algorithm, sites, 7).last
    new = Quadratic(1.0, np.full(4, 0.5), 1, ETA, sites["s0"].start)
    sent = algorithm.send(last.state, ["new"])["new"]
    mean = tree.mean(last.state.personal.values())
    assert last.state.half == "personal" and same(dict(sent["model"]), dict(mean))
    reply, _ = algorithm.local(sent, Payload(), new)
    after = algorithm.merge(last.state, {"new": reply})
    assert set(after.personal) == {"new", "s0", "s1", "s2"} == set(after.sketches)
    assert algorithm.diagnostics(after) == {"edges": 6.0}


@pytest.mark.parametrize("eta", [None, 0.3])
def test_pfednet_draws_parameters_together_and_no_running_statistics(eta):
    """So strong a pull makes the heads one; every site's variance is what its own training left: 16 moved to a^2."""
    start = {"body.w": np.array([0.4]), "head.w": np.array([-0.1]), "head.running_var": np.array([16.0])}
    sites = {f"s{i}": Quadratic(a, np.full(3, b), 1, ETA, start) for i, (a, b) in enumerate([(1.0, 1.0), (2.0, -0.4)])}
    two = play(ps.PFedNet(lam=3.0, eta=eta), sites, 2).last
    one, other = two.state.personal.values()
    assert one["head.w"].item() == pytest.approx(other["head.w"].item(), abs=1e-9)
    assert one["head.running_var"].item() == pytest.approx(0.9 * 16 + 0.1 * 1, abs=1e-12)
    assert other["head.running_var"].item() == pytest.approx(0.9 * 16 + 0.1 * 4, abs=1e-12)


def test_the_network_lasso_knows_no_unit():
    """Vectors a million times shorter, drawn together a million times less, mix just so."""
    y = np.random.default_rng(2).normal(size=(4, 5))
    edges = [(0, 1), (1, 2), (3, 4), (0, 4)]
    usual = lasso_mixture(y.T @ y, edges, 0.3)
    assert lasso_mixture(1e-12 * (y.T @ y), edges, 1e-6 * 0.3) == pytest.approx(usual, abs=1e-9)
