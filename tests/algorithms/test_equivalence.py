"""What an algorithm becomes at the edge of its hyper-parameters: another one. And what others compute: the same."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.spatial import distance

import polysite as ps
from polysite import tree
from polysite.algorithms.base import facts
from polysite.models import MODELS
from polysite.models.names import canonical
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import Quadratic, play
from table import same

START = {"body.w": np.array([3.0, 1.0]), "head.w": np.array([0.5, 2.0]), "norm.running_var": np.array([1.0, 1.0])}


class Wide(Quadratic):
    """Two coordinates, each a quadratic of its own."""

    def losses(self, params, *, augmented=False):
        out = params["body.w"] + params["head.w"]
        return {str(i): 0.5 * self.a * float(((out - b) ** 2).sum()) for i, b in enumerate(self.b)}

    def score(self, params, cases):
        return {n: CaseScore({"L": 1 / (1 + loss)}, loss) for n, loss in self.losses(params).items() if n in cases}


def sites():
    rng = np.random.default_rng(2)
    about = (("a", 1, -1, 4), ("b", 2, 0, 8), ("c", 1, 1, 6), ("d", 3, 2, 5))
    return {i: Wide(a, rng.normal(b, 0.1, n), start=START) for i, a, b, n in about}


def models(algorithm, share=1.0):
    return [s.model for s in play(algorithm, sites(), 6, share).states]


UNIFORM = ps.FedAvg(uniform=True)
EQUAL = {
    "fedprox, mu = 0": (ps.FedProx(0.0), ps.FedAvg()),
    "fednova, equal steps": (ps.FedNova(), ps.FedAvg()),
    "q-fedavg, q = 0": (ps.QFedAvg(0.0), UNIFORM),
    "weighted, omega = 1": (ps.Weighted({"a": 1.0, "b": 1.0}), ps.FedAvg()),
    "weighted, all omegas equal": (ps.Weighted(dict.fromkeys("abcd", 0.3)), ps.FedAvg()),
    "weighted fedprox, omega = 1": (ps.Weighted({"a": 1.0}, ps.FedProx(0.3)), ps.FedProx(0.3)),
    "weighted scaffold, omega = 1": (ps.Weighted({}, ps.Scaffold(uniform=False)), ps.Scaffold(uniform=False)),
    "weighted twice": (ps.Weighted({"a": 0.5}, ps.Weighted({"a": 0.5})), ps.Weighted({"a": 0.25})),
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
    for x, y in zip(models(one, share=share), models(other, share=share), strict=True):
        for k in START:
            assert x[k] == pytest.approx(y[k], abs=1e-9), k


INNER = (
    ps.FedAvg(),
    ps.FedAvg(server=ps.Adam()),
    ps.Scaffold(),
    ps.Scaffold(uniform=False),
    ps.FedExP(),
    ps.FedPIDAvg(),
    ps.Median(),
    ps.Moon(),
    ps.Local(),
)


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_one_group_of_all_is_the_inner_algorithm_to_the_last_bit(inner, share):
    ours, theirs = play(ps.Clustered({"all": tuple("dacb")}, inner), sites(), 4, share), play(inner, sites(), 4, share)
    assert same([s.groups["all"] for s in ours.states], theirs.states) and same(ours.memories, theirs.memories)
    assert same([r.sent for r in ours.rounds], [r.sent for r in theirs.rounds])


def test_a_group_for_every_site_is_local_training():
    alone = play(ps.Local(), sites(), 5, 0.5).memories
    groups = play(ps.Clustered({i: (i,) for i in "abcd"}), sites(), 5, 0.5).state.groups
    assert all(same(dict(alone[i].get("model", START)), dict(groups[i].model)) for i in "abcd")


def played(algorithm, share=1.0):
    """(the states, what the sites remember in the end)."""
    run = play(algorithm, sites(), 6, share)
    return run.states, run.memories


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ditto_without_a_pull_is_local_training_beside_fedavg_to_the_last_bit(share):
    states, kept = played(ps.Ditto(0.0), share)
    shared, alone = played(ps.FedAvg(), share)[0], played(ps.Local(), share)[1]
    assert same([s.model for s in states], [s.model for s in shared])
    assert same(kept, alone) and not same(kept, played(ps.Ditto(0.1), share)[1])


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    "rule", [ps.Cfl(eps1=0.0, eps2=0.0, after=0), ps.Cfl(split_at=(99,)), ps.Cfl(1e9, 0.0, least=5)], ids=str
)
def test_cfl_that_never_splits_is_fedavg_to_the_last_bit(rule, share):
    states, _ = played(rule, share)
    assert same([s.clusters[""].model for s in states], [s.model for s in played(ps.FedAvg(), share)[0]])
    assert all(len(s.clusters) == 1 for s in states)


def test_cfl_after_a_split_is_fedavg_in_known_groups():
    """From a split in the first round on, as if the groups had been known and had started from its model."""
    states, _ = played(ps.Cfl(split_at=(1,)))
    known = ps.Clustered({f"half {k}": tuple(i for i in "abcd" if states[0].places[i] == k) for k in "01"})
    groups = play(known, sites(), 5, start=states[0].clusters["0"].model).state.groups
    for k in "01":
        assert same(dict(groups[f"half {k}"].model), dict(states[-1].clusters[k].model))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_private_statistics_alone_leave_fedavg_as_it_is(share):
    """These sites do not look at them, as a network does not in training."""
    states, kept = played(ps.FedPer(("norm.*",)), share)
    assert same([s.model for s in states], [dict(tree.trained(s.model)) for s in played(ps.FedAvg(), share)[0]])
    alone = played(ps.Local(), share)[1]
    assert same({i: dict(m.get("private", {})) for i, m in kept.items()},
                {i: dict(tree.statistics(m.get("model", {}))) for i, m in alone.items()})  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedper_and_lg_fedavg_differ_in_nothing_but_what_is_private(share):
    for private in (("head.*",), ("body.*", "norm.*")):
        (one, kept), (other, theirs) = played(ps.FedPer(private), share), played(ps.LGFedAvg(private), share)
        assert same(([s.model for s in one], kept), ([s.model for s in other], theirs))


def leaves(model, dims):
    """The names of a network, in its order: (parameters, running statistics too)."""
    net = model.build(dims=dims, modalities=4, outputs=3, seed=0)
    named = [canonical(n) for n, _ in net.named_parameters()]
    return named, [*named, *(canonical(n) for n, b in net.named_buffers() if b.is_floating_point())]


@pytest.mark.parametrize(("name", "last"), [("unet", "decoder.3.*"), ("unet_small", "decoder.2.*")])
def test_the_patterns_of_the_benchmark_are_its_eight_parameters(name, last):
    named, _ = leaves(MODELS[name], 3)
    assert f'"{last}", "head.*"' in (ps.FedPer.__doc__ or "") and '"stem.*", "encoder.0.*"' in (
        ps.LGFedAvg.__doc__ or ""
    )
    for private, eight in (((last, "head.*"), named[-8:]), (("stem.*", "encoder.0.*"), named[:8])):
        shared = ps.FedPer(private).init(dict.fromkeys(named, 0.0), "ab").model
        assert [n for n in named if n not in shared] == eight


@pytest.mark.parametrize("name", MODELS)
def test_every_network_has_layers_that_are_private_by_default(name):
    model = MODELS[name]
    for dims in (2, 3):
        named, everything = leaves(model, dims)
        shared = {a: set(a().init(dict.fromkeys(everything, 0.0), "ab").model) for a in (ps.FedPer, ps.LGFedAvg)}
        assert set(named) - shared[ps.FedPer] == {n for n in named if n.startswith("head.")}
        first = {n for n in everything if n.startswith(("stem.", "encoder."))}
        assert set(everything) - shared[ps.LGFedAvg] == first and shared[ps.LGFedAvg]
        if name in ("densenet", "densenet_small"):
            inside = ps.FedPer(("encoder.denseblock1.*", "stem.norm0.bias")).init(dict.fromkeys(everything, 0.0), "ab")
            kept = set(everything) - set(inside.model)
            assert {"stem.norm0.running_mean", "stem.norm0.running_var", "stem.norm0.bias"} <= kept
            assert "stem.norm0.weight" in inside.model and any("denseblock1" in n and "running" in n for n in kept)


def test_a_group_without_replies_stays_as_it_is():
    algorithm, everyone = ps.Clustered({"north": ("a", "b"), "south": ("c", "d")}), sites()
    state = algorithm.init(START, "abcd")
    sent = algorithm.send(state, "dca")
    assert list(sent) == ["d", "c", "a"]
    one = algorithm.merge(state, {"a": algorithm.local(sent["a"], Payload(), everyone["a"])[0]})
    assert one.groups["south"] is state.groups["south"] and not same(one.groups["north"], state.groups["north"])
    assert same(algorithm.send(one, "abcd")["b"], algorithm.send(one, "a")["a"])


def test_what_clusters_ask_of_a_server_is_what_the_inner_algorithm_does():
    for inner in (
        ps.FedAvg(),
        ps.FedAvg(uniform=True),
        ps.Scaffold(),
        ps.Median(),
        ps.QFedAvg(),
        ps.Weighted({"a": 0.3}),
    ):
        around = ps.Clustered({"all": tuple("abcd")}, inner)
        assert (around.reply, facts(around).plain_sgd) == (inner.reply, facts(inner).plain_sgd)
        assert facts(around).needs == "each"  # a sum over all sites would mix the groups


@pytest.mark.parametrize(
    "rule",
    [ps.Krum(f=1), ps.Krum(f=1, keep=3), ps.Median(), ps.TrimmedMean(0.2), ps.GeometricMedian()],
    ids=lambda r: type(r).__name__,
)
def test_one_site_of_noise_a_million_times_too_large_is_ignored(rule):
    rng = np.random.default_rng(0)
    honest = {f"s{i}": Payload(model={"w": rng.normal(size=50)}, weight=5) for i in range(6)}
    loud = {**honest, "loud": Payload(model={"w": 1e6 * rng.normal(size=50)}, weight=5)}
    state = rule.init({"w": np.zeros(50)}, sorted(loud))
    merged = rule.merge(state, loud).model["w"]
    inside = np.array([p["model"]["w"] for p in honest.values()])
    assert np.all(merged >= inside.min(0) - 0.05) and np.all(merged <= inside.max(0) + 0.05)
    assert np.abs(ps.FedAvg().merge(state, loud).model["w"]).max() > 1e4  # a mean is carried away
    if isinstance(rule, ps.Krum) and rule.keep == 1:
        assert any(np.array_equal(merged, x) for x in inside)


@pytest.mark.parametrize(
    ("rule", "sites", "points", "middle"),
    [
        (ps.Krum(f=1), 5, (0.0, 1.0, 50.0, 2.0), 1.5),  # too few reply: the median
        (ps.Krum(f=1, keep=5), 6, (0.0, 0.1, 0.2, 0.3, 50.0), 0.15),  # no more are kept than can be good: four
    ],
)
def test_krum_of_fewer_replies_than_sites(rule, sites, points, middle):
    few = {f"s{i}": Payload(model={"w": np.array([x])}) for i, x in enumerate(points)}
    state = rule.init({"w": np.zeros(1)}, [f"s{i}" for i in range(sites)])
    assert rule.merge(state, few).model["w"] == pytest.approx(middle)


def replies(seed, sites=7, size=11):
    rng = np.random.default_rng(seed)
    trees = [{"a": rng.normal(size=(size, 2)), "b": rng.normal(size=3)} for _ in range(sites)]
    return {f"s{i}": Payload(model=t, weight=float(rng.integers(1, 9))) for i, t in enumerate(trees)}


def flat(model):
    return np.concatenate([np.ravel(model[k]) for k in sorted(model)])


def merged(algorithm, found):
    start = {k: np.zeros_like(v) for k, v in found["s0"]["model"].items()}
    return flat(algorithm.merge(algorithm.init(start, sorted(found)), found).model)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sites", [5, 6, 7])
def test_robust_means_against_numpy_and_scipy(seed, sites):
    found = replies(seed, sites)
    points, weights = np.array([flat(p["model"]) for p in found.values()]), [p["weight"] for p in found.values()]
    assert merged(ps.Median(), found) == pytest.approx(np.median(points, 0))
    assert merged(ps.TrimmedMean(0.2), found) == pytest.approx(stats.trim_mean(points, 0.2, axis=0))
    best = optimize.minimize(lambda z: weights @ np.linalg.norm(points - z, axis=1), points.mean(0), tol=1e-12)
    mine = merged(ps.GeometricMedian(iterations=2000, tolerance=0.0), found)
    assert weights @ np.linalg.norm(points - mine, axis=1) <= best.fun * (1 + 1e-6)
    assert mine == pytest.approx(best.x, abs=1e-3)


def test_krum_against_a_matrix_of_distances():
    for seed in range(5):
        found = replies(seed, 8)
        points = np.array([flat(p["model"]) for p in found.values()])
        apart = distance.cdist(points, points, "sqeuclidean")
        for f in (0, 1, 2):
            scores = np.sort(apart, 1)[:, 1 : 8 - f - 1].sum(1)  # the first is the distance to itself
            assert merged(ps.Krum(f), found) == pytest.approx(points[np.argmin(scores)])
            assert merged(ps.Krum(f, 3), found) == pytest.approx(points[np.argsort(scores)[:3]].mean(0))


def test_server_momentum_against_torch():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    theirs = torch.optim.SGD([weight], lr=0.3, momentum=0.8)
    server, model = ps.Sgd(0.3, 0.8), {"w": np.array([1.0, -2.0])}
    state = server.init(model)
    for step in range(6):
        update = np.array([np.sin(step), np.cos(step)])
        weight.grad = torch.tensor(-update)  # an update points downhill, a gradient uphill
        theirs.step()
        model, state = server.step(model, {"w": update}, state)
    assert model["w"] == pytest.approx(weight.detach().numpy())
