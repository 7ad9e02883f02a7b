"""What an algorithm becomes at the edge of its hyper-parameters: another one. And what others compute: the same."""

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.spatial import distance

import polysite as ps
from polysite.models import MODELS
from polysite.models.names import canonical
from polysite.payload import Payload
from quadratic import play
from table import START, exchange, same, sites


def played(algorithm, share=1.0):
    return play(algorithm, sites(), 6, share)


def models(algorithm, share=1.0):
    return [s.model for s in played(algorithm, share).states]


UNIFORM = ps.FedAvg(uniform=True)
EQUAL = {
    "fedprox, mu = 0": (ps.FedProx(0.0), ps.FedAvg()),
    "fednova, equal steps": (ps.FedNova(), ps.FedAvg()),
    "q-fedavg, q = 0": (ps.QFedAvg(0.0), UNIFORM),
    "weighted, omega = 1": (ps.Weighted({"a": 1.0, "b": 1.0}), ps.FedAvg()),
    "weighted scaffold, omega = 1": (ps.Weighted({}, ps.Scaffold(uniform=False)), ps.Scaffold(uniform=False)),
    "trimmed mean, beta = 0": (ps.TrimmedMean(0.0), UNIFORM),
    "trimmed mean of all but the middle": (ps.TrimmedMean(0.49), ps.Median()),
    "multi-krum, f = 0, all kept": (ps.Krum(f=0, keep=4), UNIFORM),
    "fedexp, large epsilon": (ps.FedExP(1e12), ps.FedAvg()),
    "moon, mu = 0": (ps.Moon(0.0), ps.FedAvg()),
    "fedcostwavg, alpha = 1": (ps.FedCostWAvg(1.0), ps.FedAvg()),
    "fedpidavg, size alone": (ps.FedPIDAvg(1.0, 0.0, 0.0), ps.FedAvg()),
    "top-k, all": (ps.TopK(4), ps.FedAvg()),
    "server sgd of rate one": (ps.FedAvg(server=ps.Sgd(1.0)), ps.FedAvg()),
}


@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL.keys())
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_two_names_for_the_same(one, other, share):
    for x, y in zip(models(one, share), models(other, share), strict=True):
        for k in START:
            assert x[k] == pytest.approx(y[k], abs=1e-9), k


INNER = (
    ps.FedAvg(), ps.FedAvg(server=ps.Adam()), ps.Scaffold(), ps.Scaffold(uniform=False), ps.FedExP(), ps.FedPIDAvg(),
    ps.Median(), ps.Moon(), ps.Local(),
)  # fmt: skip


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_one_group_of_all_is_the_inner_algorithm_to_the_last_bit(inner, share):
    ours, theirs = played(ps.Clustered({"all": tuple("dacb")}, inner), share), played(inner, share)
    assert same([s.groups["all"] for s in ours.states], theirs.states) and same(ours.memories, theirs.memories)
    assert same([r.sent for r in ours.rounds], [r.sent for r in theirs.rounds])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ditto_without_a_pull_is_local_training_beside_fedavg_to_the_last_bit(share):
    ours, alone = played(ps.Ditto(0.0), share), played(ps.Local(), share).memories
    assert same([s.model for s in ours.states], models(ps.FedAvg(), share))
    assert same(ours.memories, alone) and not same(ours.memories, played(ps.Ditto(0.1), share).memories)
    groups = played(ps.Clustered({i: (i,) for i in "abcd"}), share).state.groups  # a group for every site, too
    assert all(same(dict(alone[i].get("model", START)), dict(groups[i].model)) for i in "abcd")


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    "rule", [ps.Cfl(eps1=0.0, eps2=0.0, after=0), ps.Cfl(split_at=(99,)), ps.Cfl(1e9, 0.0, least=5)], ids=str
)
def test_cfl_that_never_splits_is_fedavg_to_the_last_bit(rule, share):
    states = played(rule, share).states
    assert same([s.clusters[""].model for s in states], models(ps.FedAvg(), share))
    assert all(len(s.clusters) == 1 for s in states)


def leaves(model, dims):
    """The names of a network, in its order: (parameters, running statistics too)."""
    net = model.build(dims=dims, modalities=4, outputs=3, seed=0)
    named = [canonical(n) for n, _ in net.named_parameters()]
    return named, [*named, *(canonical(n) for n, b in net.named_buffers() if b.is_floating_point())]


@pytest.mark.parametrize(("name", "last"), [("unet", "decoder.3.*"), ("unet_small", "decoder.2.*")])
def test_the_patterns_of_the_benchmark_are_its_eight_parameters(name, last):
    named, _ = leaves(MODELS[name], 3)
    for private, eight in (((last, "head.*"), named[-8:]), (("stem.*", "encoder.0.*"), named[:8])):
        shared = ps.FedPer(private).init(dict.fromkeys(named, 0.0), "ab").model
        assert [n for n in named if n not in shared] == eight


@pytest.mark.parametrize("name", MODELS)
def test_every_network_has_layers_that_are_private_by_default(name):
    for dims in (2, 3):
        named, everything = leaves(MODELS[name], dims)
        shared = {a: set(a().init(dict.fromkeys(everything, 0.0), "ab").model) for a in (ps.FedPer, ps.LGFedAvg)}
        assert set(named) - shared[ps.FedPer] == {n for n in named if n.startswith("head.")}
        first = {n for n in everything if n.startswith(("stem.", "encoder."))}
        assert set(everything) - shared[ps.LGFedAvg] == first and shared[ps.LGFedAvg]


def test_a_group_without_replies_stays_as_it_is():
    algorithm = ps.Clustered({"north": ("a", "b"), "south": ("c", "d")})
    state, sent, replies = exchange(algorithm, "dca")
    assert list(sent) == ["d", "c", "a"]
    one = algorithm.merge(state, {"a": replies["a"]})
    assert one.groups["south"] is state.groups["south"] and not same(one.groups["north"], state.groups["north"])
    assert same(algorithm.send(one, "abcd")["b"], algorithm.send(one, "a")["a"])


@pytest.mark.parametrize(
    ("rule", "points", "middle"),
    [
        (ps.Krum(f=1), (0.0, 1.0, 50.0, 2.0), 1.5),  # too few reply: the median
        (ps.Krum(f=1, keep=5), (0.0, 0.1, 0.2, 0.3, 50.0), 0.15),  # no more are kept than can be good: four
    ],
)
def test_krum_of_fewer_replies_than_sites(rule, points, middle):
    few = {f"s{i}": Payload(model={"w": np.array([x])}) for i, x in enumerate(points)}
    assert rule.merge(rule.init({"w": np.zeros(1)}, [*few, "away"]), few).model["w"] == pytest.approx(middle)


@pytest.mark.parametrize(("seed", "sites"), [(0, 5), (1, 6), (2, 7), (3, 8)])
def test_robust_means_against_numpy_and_scipy(seed, sites):
    rng = np.random.default_rng(seed)
    trees = [{"a": rng.normal(size=(11, 2)), "b": rng.normal(size=3)} for _ in range(sites)]
    weights, points = rng.integers(1, 9, sites).astype(float), np.array([np.r_[t["a"].ravel(), t["b"]] for t in trees])
    found = {f"s{i}": Payload(model=t, weight=w) for i, (t, w) in enumerate(zip(trees, weights, strict=True))}

    def merged(rule):
        model = rule.merge(rule.init(trees[0], sorted(found)), found).model
        return np.r_[model["a"].ravel(), model["b"]]

    assert merged(ps.Median()) == pytest.approx(np.median(points, 0))
    assert merged(ps.TrimmedMean(0.2)) == pytest.approx(stats.trim_mean(points, 0.2, axis=0))
    best = optimize.minimize(lambda z: weights @ np.linalg.norm(points - z, axis=1), points.mean(0), tol=1e-12)
    mine = merged(ps.GeometricMedian(iterations=2000, tolerance=0.0))
    assert weights @ np.linalg.norm(points - mine, axis=1) <= best.fun * (1 + 1e-6)
    assert mine == pytest.approx(best.x, abs=1e-3)
    apart = np.sort(distance.cdist(points, points, "sqeuclidean"), 1)
    for f in (0, 1, (sites - 3) // 2):
        scores = apart[:, 1 : sites - f - 1].sum(1)  # the first is the distance to itself
        assert merged(ps.Krum(f)) == pytest.approx(points[np.argmin(scores)])
        assert merged(ps.Krum(f, 3)) == pytest.approx(points[np.argsort(scores)[:3]].mean(0))
