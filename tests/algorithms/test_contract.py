"""What every algorithm keeps, whatever it computes. Adding an algorithm adds a line to CASES."""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import numpy as np
import pytest

from polysite.algorithms import ALGORITHMS, name_of
from polysite.algorithms.costs import FedCostWAvg, FedPIDAvg, TopK
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.fedexp import FedExP
from polysite.algorithms.fednova import FedNova
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.local import Local
from polysite.algorithms.moon import Moon
from polysite.algorithms.qfedavg import QFedAvg
from polysite.algorithms.robust import GeometricMedian, Krum, Median, TrimmedMean
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adagrad, Adam, Sgd, Yogi
from polysite.algorithms.weighted import Weighted
from polysite.engines import checkpoint
from polysite.engines.rounds import Plan, Progress, run
from polysite.engines.screen import screen
from polysite.engines.simulator import Simulator
from polysite.payload import Payload
from quadratic import Quadratic

CASES = {
    "fedavg, fixed epochs": FedAvg(epochs=2),
    "fedavg, fixed iterations": FedAvg(steps=3),
    "fedavg, uniform": FedAvg(uniform=True),
    "fedavg, server momentum": FedAvg(server=Sgd(0.5, momentum=0.9)),
    "fedadagrad": FedAvg(server=Adagrad()),
    "fedadam": FedAvg(server=Adam()),
    "fedyogi": FedAvg(server=Yogi()),
    "fedcostwavg": FedCostWAvg(),
    "feddyn": FedDyn(alpha=0.7),
    "fedexp": FedExP(),
    "fedexp, uniform": FedExP(uniform=True),
    "fednova": FedNova(),
    "fedpidavg": FedPIDAvg(),
    "fedpidavg, no cost before the first": FedPIDAvg(start=None),
    "fedprox": FedProx(mu=0.5),
    "geometric median": GeometricMedian(),
    "krum": Krum(f=0),
    "multi-krum": Krum(f=0, keep=2),
    "local": Local(),
    "median": Median(),
    "moon": Moon(),
    "q-fedavg": QFedAvg(q=2.0),
    "scaffold": Scaffold(),
    "scaffold, by size": Scaffold(uniform=False),
    "top-k": TopK(keep=2),
    "trimmed mean": TrimmedMean(),
    "weighted fedadam": Weighted({"b": 0.3}, FedAvg(server=Adam())),
    "weighted fednova": Weighted({"b": 0.3}, FedNova()),
    "weighted q-fedavg": Weighted({"b": 0.3}, QFedAvg()),
    "weighted scaffold": Weighted({"b": 0.3, "c": 2.0}, Scaffold(uniform=False)),
}
START = {"body.w": np.array([3.0]), "head.w": np.array([0.5]), "norm.running_var": np.array([1.0])}
SITES = (("a", 1, -1, 4), ("b", 2, 0, 8), ("c", 1, 1, 6), ("d", 3, 2, 5))


def sites():
    rng = np.random.default_rng(1)
    return {i: Quadratic(a, rng.normal(b, 0.1, n), start=START) for i, a, b, n in SITES}


def simulate(algorithm, rounds=6, *, wire=False, share=1.0, resume=None):
    """(final state, memories) after some rounds."""
    engine = Simulator(algorithm, sites(), wire=wire)
    *_, last = run(algorithm, engine, START, Plan(rounds=rounds, share=share), seed=0, resume=resume)
    return last.state, engine.memories()


def freeze(x):
    """Make every array underneath read-only, so that a hidden in-place update raises."""
    for array in arrays(x):
        array.setflags(write=False)
    return x


def arrays(x):
    if isinstance(x, np.ndarray):
        yield x
    elif is_dataclass(x):
        for f in fields(x):
            yield from arrays(getattr(x, f.name))
    elif hasattr(x, "values"):
        for v in x.values():
            yield from arrays(v)
    elif isinstance(x, tuple | list):
        for v in x:
            yield from arrays(v)


def same(x, y):
    """Equal to the last bit, whatever the nesting: compared through the disk codec's own view of a value."""
    left, right = {}, {}
    return checkpoint._flatten(x, "", left) == checkpoint._flatten(y, "", right) and Payload(v=left) == Payload(v=right)


every = pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES.keys())


def test_every_algorithm_is_in_the_table():
    assert {name_of(a) for a in CASES.values()} == set(ALGORITHMS)


@every
def test_hyperparameters_are_frozen(algorithm):
    with pytest.raises(FrozenInstanceError):
        algorithm.lr = 2.0


@every
def test_a_site_replies_what_is_declared_and_nothing_else(algorithm):
    s = sites()
    sent = algorithm.send(algorithm.init(START, sorted(s)), sorted(s))
    reply, _ = algorithm.local(sent["a"], Payload(), s["a"])
    assert reply.keys() == algorithm.reply.keys()
    assert screen(algorithm.reply, START, sent, {"a": reply}) == {}


@every
def test_running_statistics_are_averaged_and_never_extrapolated(algorithm):
    """Every site pulls its variance towards a^2, between 1 and 9: where one starts at 1, a mean never falls below."""
    state, _ = simulate(algorithm, 1)
    s, model = sites(), algorithm.send(state, ["a"])["a"].get("model", START)
    theirs = sorted(0.9 + 0.1 * site.a**2 for site in s.values())
    if model is not START:
        assert theirs[0] <= model["norm.running_var"].item() <= theirs[-1]
    if "weight" in algorithm.reply and name_of(algorithm) not in ("weighted", "top_k"):
        n = {i: 1.0 if getattr(algorithm, "uniform", name_of(algorithm) == "qfedavg") else x.size for i, x in s.items()}
        plain = sum(n[i] * (0.9 + 0.1 * s[i].a ** 2) for i in s) / sum(n.values())
        assert model["norm.running_var"].item() == pytest.approx(plain, abs=1e-12)


@every
def test_no_step_changes_its_inputs(algorithm):
    s = sites()
    state, memory = freeze(algorithm.init(freeze(dict(START)), sorted(s))), {i: Payload() for i in s}
    for _ in range(4):
        sent, replies = freeze(dict(algorithm.send(state, sorted(s)))), {}
        for i in s:
            replies[i], memory[i] = freeze(algorithm.local(sent[i], memory[i], s[i]))
        state = freeze(algorithm.merge(state, replies))


@every
def test_the_wire_changes_nothing(algorithm):
    assert same(simulate(algorithm, wire=True), simulate(algorithm, wire=False))


@every
def test_resuming_is_not_noticeable(algorithm, tmp_path):
    state, memories = simulate(algorithm, 3)
    checkpoint.save(tmp_path / "half.safetensors", Progress(2, state, memories))
    half = checkpoint.load(tmp_path / "half.safetensors")
    assert same(simulate(algorithm, 6, resume=half), simulate(algorithm, 6))


@every
def test_the_state_survives_its_disk_codec(algorithm, tmp_path):
    value = simulate(algorithm)
    checkpoint.save(tmp_path / "state.safetensors", value)
    assert same(checkpoint.load(tmp_path / "state.safetensors"), value)


@every
def test_order_of_replies_does_not_matter(algorithm):
    s = sites()
    state = algorithm.init(START, sorted(s))
    sent = algorithm.send(state, sorted(s))
    replies = {i: algorithm.local(sent[i], Payload(), s[i])[0] for i in s}
    assert same(algorithm.merge(state, replies), algorithm.merge(state, dict(reversed(replies.items()))))


@every
def test_a_site_may_drop_out(algorithm):
    """Who is asked and does not answer leaves the same state as who was not asked."""
    s = sites()
    state = algorithm.init(START, sorted(s))
    sent = algorithm.send(state, sorted(s))
    replies = {i: algorithm.local(sent[i], Payload(), s[i])[0] for i in s if i != "b"}
    some = algorithm.send(state, ["a", "c", "d"])
    asked = {i: algorithm.local(some[i], Payload(), s[i])[0] for i in some}
    assert same(algorithm.merge(state, replies), algorithm.merge(state, asked))
    final, _ = simulate(algorithm, share=0.5)
    assert all(np.isfinite(a).all() for a in arrays(final))


@every
def test_a_site_never_seen_can_be_served(algorithm):
    state, _ = simulate(algorithm, 3)
    got = algorithm.send(state, ["stranger"])["stranger"]
    stranger = sites()["a"]
    groups = list(algorithm.serve(got, Payload(), stranger, stranger.cases("test")))
    assert all(params.keys() == START.keys() for params, _ in groups)
    assert sorted(n for _, cases in groups for n in cases) == sorted(stranger.cases("test"))
