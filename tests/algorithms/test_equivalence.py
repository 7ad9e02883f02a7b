"""What an algorithm becomes at the edge of its hyper-parameters: another one. And what others compute: the same."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.spatial import distance

from polysite import tree
from polysite.algorithms.base import facts
from polysite.algorithms.cfl import Cfl
from polysite.algorithms.clustered import Clustered
from polysite.algorithms.cost_weighted import FedCostWAvg, FedPIDAvg, TopK
from polysite.algorithms.ditto import Ditto
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.fedexp import FedExP
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedper import FedPer, LGFedAvg
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.robust import GeometricMedian, Krum, Median, TrimmedMean
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server_optimisers import Adam, Sgd
from polysite.algorithms.weighted import Weighted
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.models.names import canonical
from polysite.payload import Payload
from polysite.site import CaseScore
from quadratic import Quadratic
from table import same

START = {"body.w": np.array([3.0, 1.0]), "head.w": np.array([0.5, 2.0]), "norm.running_var": np.array([1.0, 1.0])}


class Wide(Quadratic):
    """Two coordinates, each a quadratic of its own."""

    def losses(self, params, *, augmented=False):
        out = params["body.w"] + params["head.w"]
        return {str(i): 0.5 * self.a * float(((out - b) ** 2).sum()) for i, b in enumerate(self.b)}

    def score(self, params, cases):
        return {n: CaseScore({"L": 1 / (1 + loss)}, loss) for n, loss in self.losses(params).items() if n in cases}


def sites(steps=(5, 5, 5, 5)):
    rng = np.random.default_rng(2)
    return {
        i: Wide(a, rng.normal(b, 0.1, n), start=START, steps=k)
        for (i, a, b, n), k in zip(
            (("a", 1, -1, 4), ("b", 2, 0, 8), ("c", 1, 1, 6), ("d", 3, 2, 5)), steps, strict=True
        )
    }


def models(algorithm, rounds=6, share=1.0, **kw):
    engine = Simulator(algorithm, sites(**kw))
    return [r.state.model for r in run_rounds(algorithm, engine, START, Plan(rounds=rounds, share=share), seed=0)]


UNIFORM = FedAvg(uniform=True)
EQUAL = {
    "fedprox, mu = 0": (FedProx(0.0), FedAvg()),
    "fednova, equal steps": (FedNova(), FedAvg()),
    "q-fedavg, q = 0": (QFedAvg(0.0), UNIFORM),
    "weighted, omega = 1": (Weighted({"a": 1.0, "b": 1.0}), FedAvg()),
    "weighted, all omegas equal": (Weighted(dict.fromkeys("abcd", 0.3)), FedAvg()),
    "weighted fedprox, omega = 1": (Weighted({"a": 1.0}, FedProx(0.3)), FedProx(0.3)),
    "weighted scaffold, omega = 1": (Weighted({}, Scaffold(uniform=False)), Scaffold(uniform=False)),
    "weighted twice": (Weighted({"a": 0.5}, Weighted({"a": 0.5})), Weighted({"a": 0.25})),
    "trimmed mean, beta = 0": (TrimmedMean(0.0), UNIFORM),
    "trimmed mean of all but the middle": (TrimmedMean(0.49), Median()),
    "multi-krum, f = 0, all kept": (Krum(f=0, keep=4), UNIFORM),
    "fedexp, large epsilon": (FedExP(1e12), FedAvg()),
    "moon, mu = 0": (Moon(0.0), FedAvg()),
    "fedcostwavg, alpha = 1": (FedCostWAvg(1.0), FedAvg()),
    "fedpidavg, size alone": (FedPIDAvg(1.0, 0.0, 0.0), FedAvg()),
    "top-k, all": (TopK(4), FedAvg()),
    "server sgd of rate one": (FedAvg(server=Sgd(1.0)), FedAvg()),
}


@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL.keys())
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_two_names_for_the_same(one, other, share):
    for x, y in zip(models(one, share=share), models(other, share=share), strict=True):
        for k in START:
            assert x[k] == pytest.approx(y[k], abs=1e-9), k


@pytest.mark.parametrize(
    "inner",
    [
        FedAvg(),
        FedAvg(server=Adam()),
        Scaffold(),
        Scaffold(uniform=False),
        FedExP(),
        FedPIDAvg(),
        Median(),
        Moon(),
        Local(),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_one_group_of_all_is_the_inner_algorithm_to_the_last_bit(inner, share):
    def played(algorithm):
        engine = Simulator(algorithm, sites())
        rounds = list(run_rounds(algorithm, engine, START, Plan(rounds=4, share=share), seed=0))
        return [r.sent for r in rounds], [r.state for r in rounds], engine.memories()

    sent, states, memories = played(Clustered({"all": ("d", "a", "c", "b")}, inner))
    assert same((sent, [s.groups["all"] for s in states], memories), played(inner))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_group_for_every_site_is_local_training(share):
    alone, plan = Simulator(Local(), sites()), Plan(rounds=5, share=share)
    list(run_rounds(Local(), alone, START, plan, seed=0))
    singles = Clustered({f"only {i}": (i,) for i in "abcd"})
    *_, end = run_rounds(singles, Simulator(singles, sites()), START, plan, seed=0)
    for i in "abcd":
        mine = end.state.groups[f"only {i}"].model
        assert same(dict(alone.memories()[i].get("model", START)), dict(mine))


def played(algorithm, share=1.0, rounds=6):
    """(the states, what the sites remember in the end)."""
    engine = Simulator(algorithm, sites())
    states = [r.state for r in run_rounds(algorithm, engine, START, Plan(rounds=rounds, share=share), seed=0)]
    return states, engine.memories()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ditto_without_a_pull_is_local_training_beside_fedavg_to_the_last_bit(share):
    states, kept = played(Ditto(0.0), share)
    shared, alone = played(FedAvg(), share)[0], played(Local(), share)[1]
    assert same([s.model for s in states], [s.model for s in shared])
    assert same(kept, alone) and not same(kept, played(Ditto(0.1), share)[1])


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    "rule", [Cfl(eps1=0.0, eps2=0.0, after=0), Cfl(split_at=(99,)), Cfl(1e9, 0.0, least=5)], ids=str
)
def test_cfl_that_never_splits_is_fedavg_to_the_last_bit(rule, share):
    states, _ = played(rule, share)
    assert same([s.clusters[""].model for s in states], [s.model for s in played(FedAvg(), share)[0]])
    assert all(len(s.clusters) == 1 for s in states)


def test_cfl_after_a_split_is_fedavg_in_known_groups():
    """From a split in the first round on, as if the groups had been known and had started from its model."""
    states, _ = played(Cfl(split_at=(1,)))
    found = {f"half {k}": tuple(i for i in "abcd" if states[0].places[i] == k) for k in "01"}
    known = Clustered(found)
    engine, start = Simulator(known, sites()), states[0].clusters["0"].model
    *_, end = run_rounds(known, engine, start, Plan(rounds=5), seed=0)
    for k in "01":
        assert same(dict(end.state.groups[f"half {k}"].model), dict(states[-1].clusters[k].model))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_private_statistics_alone_leave_fedavg_as_it_is(share):
    """These sites do not look at them, as a network does not in training."""
    states, kept = played(FedPer(("norm.*",)), share)
    assert same([s.model for s in states], [dict(tree.trained(s.model)) for s in played(FedAvg(), share)[0]])
    alone = played(Local(), share)[1]
    assert same({i: dict(m.get("private", {})) for i, m in kept.items()},
                {i: dict(tree.statistics(m.get("model", {}))) for i, m in alone.items()})  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedper_and_lg_fedavg_differ_in_nothing_but_what_is_private(share):
    for private in (("head.*",), ("body.*", "norm.*")):
        (one, kept), (other, theirs) = played(FedPer(private), share), played(LGFedAvg(private), share)
        assert same(([s.model for s in one], kept), ([s.model for s in other], theirs))


def test_a_lone_site_with_private_layers_trains_as_if_it_had_none():
    only = {"a": sites()["a"]}
    algorithm, alone = Simulator(FedPer(), only), Simulator(Local(), only)
    *_, end = run_rounds(FedPer(), algorithm, START, Plan(rounds=5), seed=0)
    list(run_rounds(Local(), alone, START, Plan(rounds=5), seed=0))
    whole = {**end.state.model, **algorithm.memories()["a"]["private"]}
    assert all(whole[k] == pytest.approx(v, abs=1e-12) for k, v in alone.memories()["a"]["model"].items())


def leaves(model, dims):
    """The names of a network, in its order: (parameters, running statistics too)."""
    net = model.build(dims=dims, modalities=4, outputs=3, seed=0)
    named = [canonical(n) for n, _ in net.named_parameters()]
    return named, [*named, *(canonical(n) for n, b in net.named_buffers() if b.is_floating_point())]


@pytest.mark.parametrize(("name", "last"), [("unet", "decoder.3.*"), ("unet_small", "decoder.2.*")])
def test_the_patterns_of_the_benchmark_are_its_eight_parameters(name, last):
    named, _ = leaves(MODELS[name], 3)
    assert f'"{last}", "head.*"' in (FedPer.__doc__ or "") and '"stem.*", "encoder.0.*"' in (LGFedAvg.__doc__ or "")
    for private, eight in (((last, "head.*"), named[-8:]), (("stem.*", "encoder.0.*"), named[:8])):
        shared = FedPer(private).init(dict.fromkeys(named, 0.0), "ab").model
        assert [n for n in named if n not in shared] == eight


@pytest.mark.parametrize("name", MODELS)
def test_every_network_has_layers_that_are_private_by_default(name):
    model = MODELS[name]
    for dims in (2, 3):
        named, everything = leaves(model, dims)
        shared = {a: set(a().init(dict.fromkeys(everything, 0.0), "ab").model) for a in (FedPer, LGFedAvg)}
        assert set(named) - shared[FedPer] == {n for n in named if n.startswith("head.")}
        first = {n for n in everything if n.startswith(("stem.", "encoder."))}
        assert set(everything) - shared[LGFedAvg] == first and shared[LGFedAvg]
        if name in ("densenet", "densenet_small"):
            inside = FedPer(("encoder.denseblock1.*", "stem.norm0.bias")).init(dict.fromkeys(everything, 0.0), "ab")
            kept = set(everything) - set(inside.model)
            assert {"stem.norm0.running_mean", "stem.norm0.running_var", "stem.norm0.bias"} <= kept
            assert "stem.norm0.weight" in inside.model and any("denseblock1" in n and "running" in n for n in kept)


def test_nothing_passes_between_groups():
    """Whatever the sites of one group do, the other group stays the same, and as it would be without them."""
    north, south = {"north": ("a", "b")}, {"south": ("c", "d")}

    def ends(groups, changed=()):
        everyone = {i: s for i, s in sites().items() if any(i in g for g in groups.values())}
        for i in changed:
            everyone[i] = Wide(9.0, np.array([50.0] * 3), start=START)
        algorithm = Clustered(groups, Scaffold())
        *_, end = run_rounds(algorithm, Simulator(algorithm, everyone), START, Plan(rounds=5), seed=0)
        return end.state.groups

    both = ends({**north, **south})
    assert same(both["north"], ends(north)["north"]) and same(both["south"], ends(south)["south"])
    assert same(both["north"], ends({**north, **south}, changed="cd")["north"])
    assert not same(both["north"], both["south"])


def test_a_group_without_replies_stays_as_it_is():
    algorithm, everyone = Clustered({"north": ("a", "b"), "south": ("c", "d")}), sites()
    state = algorithm.init(START, "abcd")
    sent = algorithm.send(state, "dca")
    assert list(sent) == ["d", "c", "a"]
    one = algorithm.merge(state, {"a": algorithm.local(sent["a"], Payload(), everyone["a"])[0]})
    assert one.groups["south"] is state.groups["south"] and not same(one.groups["north"], state.groups["north"])
    assert same(algorithm.send(one, "abcd")["b"], algorithm.send(one, "a")["a"])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_factors_go_around_groups_or_into_them(share):
    groups, factors = {"north": ("a", "b", "d"), "south": ("c",)}, {"a": 0.3, "c": 5.0}
    inner, plan = Scaffold(uniform=False), Plan(rounds=5, share=share)
    pair = (
        Weighted(factors, Clustered(groups, inner)),
        Clustered(groups, Weighted(factors, inner)),
        Weighted({"c": 5.0}, Clustered(groups, Weighted({}, Weighted({"a": 0.3}, inner)))),
    )
    first, *others = ([r.state for r in run_rounds(x, Simulator(x, sites()), START, plan, seed=0)] for x in pair)
    assert all(same(first, other) for other in others)
    plain = Clustered(groups, inner)
    assert not same(first, [r.state for r in run_rounds(plain, Simulator(plain, sites()), START, plan, seed=0)])


def test_what_clusters_ask_of_a_server_is_what_the_inner_algorithm_does():
    for inner in (FedAvg(), FedAvg(uniform=True), Scaffold(), Median(), QFedAvg(), Weighted({"a": 0.3})):
        around = Clustered({"all": tuple("abcd")}, inner)
        assert (around.reply, facts(around).plain_sgd) == (inner.reply, facts(inner).plain_sgd)
        assert facts(around).needs == "each"  # a sum over all sites would mix the groups


def test_fednova_with_unequal_steps_is_not_fedavg():
    steps = (2, 9, 5, 3)
    x, y = models(FedNova(), steps=steps)[0], models(FedAvg(), steps=steps)[0]
    assert abs(x["body.w"] - y["body.w"]).max() > 1e-2


def test_feddyn_and_scaffold_agree_on_the_optimum_and_fedavg_does_not():
    a, b = np.array([s.a for s in sites().values()]), np.array([s.b.mean() for s in sites().values()])
    optimum = sum(a * b) / sum(a)
    for algorithm in (FedDyn(0.7), Scaffold()):
        end = models(algorithm, 500)[-1]
        assert end["body.w"] + end["head.w"] == pytest.approx([optimum, optimum], abs=1e-6)
    end = models(UNIFORM, 200)[-1]
    assert abs(end["body.w"] + end["head.w"] - optimum).min() > 0.01


@pytest.mark.parametrize(
    "rule",
    [Krum(f=1), Krum(f=1, keep=3), Median(), TrimmedMean(0.2), GeometricMedian()],
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
    assert np.abs(FedAvg().merge(state, loud).model["w"]).max() > 1e4  # a mean is carried away
    if isinstance(rule, Krum) and rule.keep == 1:
        assert any(np.array_equal(merged, x) for x in inside)


def test_krum_takes_the_median_when_too_few_reply():
    few = {f"s{i}": Payload(model={"w": np.array([x])}) for i, x in enumerate((0.0, 1.0, 50.0, 2.0))}
    state = Krum(f=1).init({"w": np.zeros(1)}, [f"s{i}" for i in range(5)])
    assert Krum(f=1).merge(state, few).model["w"] == pytest.approx(1.5)


def test_krum_keeps_no_more_than_can_be_good():
    """Six sites, five replies, one may be bad: four are kept, though five were asked for."""
    points = {f"s{i}": Payload(model={"w": np.array([x])}) for i, x in enumerate((0.0, 0.1, 0.2, 0.3, 50.0))}
    state = Krum(f=1, keep=5).init({"w": np.zeros(1)}, [f"s{i}" for i in range(6)])
    assert Krum(f=1, keep=5).merge(state, points).model["w"] == pytest.approx(0.15)


REFUSED = {
    "negative mu": (lambda: FedProx(-1.0), "mu = -1.0 must be at least 0"),
    "mu not a number": (lambda: FedProx(float("nan")), "mu = nan"),
    "alpha of zero": (lambda: FedDyn(0.0), "alpha = 0.0 must be more than 0"),
    "negative q": (lambda: QFedAvg(-0.5), "q = -0.5"),
    "temperature of zero": (lambda: Moon(1.0, 0.0), "temperature = 0.0"),
    "half trimmed": (lambda: TrimmedMean(0.5), "less than half"),
    "an infinite mu": (lambda: FedProx(float("inf")), "mu = inf must be finite"),
    "a factor without end": (lambda: Weighted({"a": float("inf")}), "factor of 'a' must lie between"),
    "two sites to trim": (lambda: TrimmedMean(0.3).init(START, "ab"), "it takes three or more"),
    "what it says is not enough": (lambda: TrimmedMean(0.33).init(START, "abc"), "set it to 0.34 or more"),
    "nothing trimmed": (lambda: TrimmedMean(0.1).init(START, "abcd"), "cuts nothing from 4 sites; set it to 0.25"),
    "too few for krum": (lambda: Krum(f=1).init(START, "abcd"), "among 5 or more, and there are 4"),
    "krum keeps too many": (lambda: Krum(f=1, keep=6).init(START, "abcdef"), "cannot keep 6 of 6"),
    "a factor of zero": (lambda: Weighted({"a": 0.0}), "factor of 'a' must lie between"),
    "a factor for nobody": (lambda: Weighted({"A": 0.3}).init(START, "abcd"), "'A', which is no site that trains"),
    "factors around a median": (lambda: Weighted({"a": 0.3}, Median()), "Median does not average by weights"),
    "factors around fedpidavg": (lambda: Weighted({"a": 0.3}, FedPIDAvg()), "FedPIDAvg does not average by weights"),
    "a group without sites": (lambda: Clustered({"north": ("a",), "south": ()}), "group 'south' has no sites"),
    "a site in two groups": (
        lambda: Clustered({"north": ("a", "b"), "south": ("b", "c")}),
        "'b' is named twice, in the groups 'north' and 'south'",
    ),
    "a site twice in a group": (
        lambda: Clustered({"north": ("a", "a")}),
        "'a' is named twice, in the groups 'north' a",
    ),
    "a site in no group": (
        lambda: Clustered({"north": ("a", "b"), "south": ("c",)}).init(START, "abcd"),
        "'d' is in none of the groups 'north', 'south'; every site that trains has one",
    ),
    "a group with a stranger": (
        lambda: Clustered({"all": ("easy", "west")}).init(START, ["east", "west"]),
        "group 'all' names 'easy', which is no site that trains; did you mean 'east'?",
    ),
    "no groups": (lambda: Clustered().init(START, "abcd"), r"takes groups of sites; set them in \[algorithm.groups\]"),
    "a group too small for krum": (
        lambda: Clustered({"north": ("a", "b", "c"), "south": ("d",)}, Krum(f=0)).init(START, "abcd"),
        "in the group 'south', krum tolerates f = 0 bad sites among 3 or more, and there are 1",
    ),
    "a factor for nobody in a group": (
        lambda: Clustered({"all": tuple("abcd")}, Weighted({"e": 0.3})).init(START, "abcd"),
        "algorithm.weights names 'e', which is no site that trains",
    ),
    "factors around groups of medians": (
        lambda: Weighted({"a": 0.3}, Clustered({"all": ("a",)}, Median())),
        "does not average by weights",
    ),
    "negative lam": (lambda: Ditto(-0.1), "lam = -0.1 must be at least 0"),
    "epochs and steps": (lambda: Ditto(epochs=1, steps=2), r"not both \(epochs = 1, steps = 2\)"),
    "both for its own": (lambda: Ditto(own_epochs=1, own_steps=2), r"\(own_epochs = 1, own_steps = 2\)"),
    "a round before the first": (lambda: Cfl(split_at=(0, 200)), r"split_at = \[0, 200\] counts rounds from 1"),
    "noise above one": (lambda: Cfl(gamma_max=1.5), "gamma_max = 1.5 must be between 0 and 1"),
    "a cluster of one to split": (lambda: Cfl(least=1), "least = 1 must be at least 2"),
    "a quorum of none": (lambda: Cfl(quorum=0.0), "quorum = 0.0"),
    "nothing private": (lambda: FedPer(()), "names nothing that stays at a site"),
    "a pattern without a parameter": (
        lambda: FedPer(("head.*", "decoder.9.*")).init(START, "abcd"),
        "private names 'decoder.9.*', and no parameter of this network is called that; its parts are body, head, norm",
    ),
    "a position": (lambda: LGFedAvg(("0",)).init(START, "abcd"), "private names '0', and no parameter"),
    "everything private": (lambda: FedPer(("*",)).init(START, "abcd"), r"private = \['\*'\] keeps every parameter"),
    "everything but statistics": (lambda: LGFedAvg(("*.w",)).init(START, "abcd"), "keeps every parameter"),
    "a server rate of zero": (lambda: FedAvg(server=Adam(lr=0.0)), "lr = 0.0"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_makes_no_sense_is_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def replies(seed, sites=7, size=11):
    rng = np.random.default_rng(seed)
    trees = [{"a": rng.normal(size=(size, 2)), "b": rng.normal(size=3)} for _ in range(sites)]
    return {f"s{i}": Payload(model=t, weight=float(rng.integers(1, 9))) for i, t in enumerate(trees)}


def flat(model):
    return np.concatenate([np.ravel(model[k]) for k in sorted(model)])


def merged(algorithm, found):
    start = {k: np.zeros_like(v) for k, v in found["s0"]["model"].items()}
    return flat(algorithm.merge(algorithm.init(start, sorted(found)), found).model)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sites", [5, 6, 7])
def test_robust_means_against_numpy_and_scipy(seed, sites):
    found = replies(seed, sites)
    points, weights = np.array([flat(p["model"]) for p in found.values()]), [p["weight"] for p in found.values()]
    assert merged(Median(), found) == pytest.approx(np.median(points, 0))
    assert merged(TrimmedMean(0.2), found) == pytest.approx(stats.trim_mean(points, 0.2, axis=0))
    best = optimize.minimize(lambda z: weights @ np.linalg.norm(points - z, axis=1), points.mean(0), tol=1e-12)
    rule = GeometricMedian(iterations=5000, tolerance=0.0)
    mine = merged(rule, found)
    assert weights @ np.linalg.norm(points - mine, axis=1) <= best.fun * (1 + 1e-6)
    assert mine == pytest.approx(best.x, abs=1e-3)


def test_krum_against_a_matrix_of_distances():
    for seed in range(20):
        found = replies(seed, 8)
        points = np.array([flat(p["model"]) for p in found.values()])
        apart = distance.cdist(points, points, "sqeuclidean")
        for f in (0, 1, 2):
            scores = np.sort(apart, 1)[:, 1 : 8 - f - 1].sum(1)  # the first is the distance to itself
            assert merged(Krum(f), found) == pytest.approx(points[np.argmin(scores)])
            assert merged(Krum(f, 3), found) == pytest.approx(points[np.argsort(scores)[:3]].mean(0))


def test_server_momentum_against_torch():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    theirs = torch.optim.SGD([weight], lr=0.3, momentum=0.8)
    server, model = Sgd(0.3, 0.8), {"w": np.array([1.0, -2.0])}
    state = server.init(model)
    for step in range(6):
        update = np.array([np.sin(step), np.cos(step)])
        weight.grad = torch.tensor(-update)  # an update points downhill, a gradient uphill
        theirs.step()
        model, state = server.step(model, {"w": update}, state)
    assert model["w"] == pytest.approx(weight.detach().numpy())
