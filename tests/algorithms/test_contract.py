"""What every algorithm keeps, whatever it computes. Adding an algorithm adds a line to CASES."""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import numpy as np
import pytest

from polysite.algorithms import ALGORITHMS, name_of
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.local import Local
from polysite.algorithms.scaffold import Scaffold
from polysite.algorithms.server import Adagrad, Adam, Sgd, Yogi
from polysite.engines import checkpoint
from polysite.engines.rounds import Plan, Progress, run
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
    "local": Local(),
    "scaffold": Scaffold(),
    "scaffold, weighted": Scaffold(uniform=False),
}
START = {"body.w": np.array([3.0]), "head.w": np.array([0.0])}
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
