"""Replies: steps on the way out and back, and sums as they arrive, with the bits of held replies."""

import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import polysite as ps
from polysite import tree
from polysite.algorithms.base import facts
from polysite.engines.compress import Compress
from polysite.engines.guard_state import Guard
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.site_turn import restore_reply, take_turn
from polysite.payload import Payload
from quadratic import Quadratic
from table import CASES, START, one_of_each_kind, same, sites

SUMS = {name: a for name, a in CASES.items() if facts(a).needs == "sum"}


class Counting(Simulator):
    """A simulator that counts how often replies were asked for again."""

    repeats = 0

    def repeat(self, round, sent):
        self.repeats += 1
        return super().repeat(round, sent)


def played(algorithm, engine, keep, rounds=4, **plan):
    """(state, memories, records) of a run."""
    records = []
    for r in run_rounds(algorithm, engine, START, Plan(rounds=rounds, **plan), seed=0, keep_replies=keep):
        record = r.record(0, False)
        records.append((record.shares, record.refused, record.absent, record.diagnostics, r.replies.keys()))
        records.append({i: (s.loss, s.steps, s.numbers) for i, s in record.sites.items()})
        records.append((record.bytes_down, record.bytes_up))
    return r.state, engine.memories(), records


def agree(algorithm, engine=Counting, repeats=0, **options):
    """Compare summing with holding; ``engine`` makes a transport from an algorithm and sites."""
    held, summed = engine(algorithm, sites()), engine(algorithm, sites())
    one, other = played(algorithm, held, True, **options), played(algorithm, summed, False, **options)
    assert same(one[:2], other[:2]) and one[2] == other[2]
    assert held.repeats == 0 and repeats in (summed.repeats, None)


@pytest.mark.parametrize("name", one_of_each_kind(SUMS))
def test_the_sum_has_the_bits_of_held_replies(name):
    agree(SUMS[name], share=0.75)
    agree(SUMS[name], repeats=None, guard=Guard(use="on"))


def with_fields(reply, **fields):
    return replace(reply, payload=Payload(**{**reply.payload, **fields}))


class Backwards(Counting):
    def train(self, round, sent):
        yield from reversed(list(super().train(round, sent)))


class Broken(Counting):
    """Site c is not finite from round 1 on; site b is absent in round 2."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            if i == "c" and round > 0:
                reply = with_fields(reply, model=tree.scale(START, np.nan))
            if i != "b" or round != 2:
                yield i, reply


class Lying(Counting):
    """Site b claims many more cases than it has; too many in round 1."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            factor = 1 if i != "b" else 1e5 if round == 1 else 7
            yield i, with_fields(reply, weight=reply.payload["weight"] * factor)


class Crowded(Counting):
    """A site that was not asked replies, and all others twice."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            yield i, reply
            yield ("stranger" if i == "b" else i), reply


@pytest.mark.parametrize("algorithm", [ps.FedAvg(), ps.Weighted({"b": 0.3}, ps.FedProx(mu=0.5))])
@pytest.mark.parametrize(("engine", "repeats"), [(Backwards, 0), (Broken, 3), (Lying, 4), (Crowded, 8)])
def test_what_was_not_expected_is_summed_in_a_second_pass(algorithm, engine, repeats):
    """Round 1 has a refusal, round 2 also an absent site, round 3 that site again: each costs one repetition."""
    agree(algorithm, engine, repeats)


@pytest.mark.parametrize(("use", "turns"), [("off", 24), ("on", 36)])  # with a guard, the first round is repeated
def test_no_reply_is_held_while_the_next_site_trains(use, turns):
    trained, most = [], []

    def alive():
        return sum(leaf() is not None for leaf in trained)

    class Large(Quadratic):
        def fit(self, *args, **options):
            most.append(alive())
            fit = super().fit(*args, **options)
            trained.append(weakref.ref(fit.params["body.w"]))
            return fit

    everyone = {f"{k:02d}": Large(1.0, np.array([float(k)]), start=START) for k in range(12)}
    engine, plan = Simulator(ps.FedAvg(), everyone), Plan(rounds=2, guard=Guard(use=use))
    for r in run_rounds(ps.FedAvg(), engine, START, plan, 0, keep_replies=False):
        assert alive() == 0 and not any(f.params for reply in r.replies.values() for f in reply.fits)
    assert most == [0] * turns


@pytest.mark.parametrize("make", [np.float32, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float32)])
def test_a_running_sum_has_the_bits_of_a_mean(monkeypatch, make):
    monkeypatch.setattr(tree, "TENSOR_SLICE", 37)
    monkeypatch.setattr(tree, "ARRAY_SLICE", 37)
    rng, weights = np.random.default_rng(0), [3.0, 1.0, 7.0, 0.3]
    trees = [{str(s): make(rng.normal(size=s)) for s in ((5, 23), (), (0,))} for _ in weights]
    total = None
    for t, w in zip(trees, weights, strict=True):
        total = tree.add_share(total, t, w / sum(weights))
    assert Payload(m=total) == Payload(m=tree.mean(trees, weights))


MODEL = {"w": np.array([3.0], np.float32)}


class Single(Quadratic):
    """A site whose parameters have single precision, as those of networks do; others are not compressed."""

    def fit(self, *args, **keywords):
        fit = super().fit(*args, **keywords)
        return replace(fit, params=tree.map(lambda x: x.astype(np.float32), fit.params))


def site(b=1.0):
    return Single(a=1.0, b=np.array([b, b]), start=MODEL)


@dataclass(frozen=True)
class Affine:
    """Send the model times a factor plus a number; the server goes back. Two of them do not commute."""

    factor: float = 1.0
    shift: float = 0.0
    reveals: str = "each"

    def apply(self, kinds, got, reply):
        assert kinds == {"model": "model", "weight": "count"}
        return Payload(**{**reply, "model": tree.map(lambda x: self.factor * x + self.shift, reply["model"])})

    def restore(self, kinds, sent, reply):
        return Payload(**{**reply, "model": tree.map(lambda x: (x - self.shift) / self.factor, reply["model"])})


def test_steps_are_applied_in_order_and_reversed_in_the_opposite_order():
    got, steps = Payload(model=MODEL), [Affine(factor=2.0), Affine(shift=5.0)]
    plain = take_turn(ps.FedAvg(), got, Payload(), site())
    turn = take_turn(ps.FedAvg(), got, Payload(), site(), steps)
    assert turn.reply["model"]["w"] == 2 * plain.reply["model"]["w"] + 5
    restored = restore_reply(ps.FedAvg(), got, turn.reply, steps)
    assert restored["model"]["w"] == pytest.approx(plain.reply["model"]["w"], rel=1e-6)
    assert turn.memory == plain.memory and len(turn.fits) == 1 and turn.kinds == {"model": "model", "weight": "count"}


def rounded(kind=Simulator, plan=Plan(rounds=1, compress="half"), keep=True):
    engine = kind(ps.FedAvg(), {"a": site(1.0), "b": site(2.0)}, outgoing=plan.outgoing)
    (only,) = run_rounds(ps.FedAvg(), engine, MODEL, plan, seed=0, keep_replies=keep)
    return only


def test_the_plan_chooses_the_steps_and_the_simulator_applies_them():
    assert Plan().outgoing == () and Plan(compress="int8").outgoing == (Compress("int8"),)
    half, exact = rounded(), rounded(plan=Plan(rounds=1))
    assert half.replies["a"].nbytes < exact.replies["a"].nbytes  # that crossed, not those of the restored reply
    assert 0 < abs(half.state.model["w"] - exact.state.model["w"]) < 1e-3
    assert same(half.state, rounded(keep=False).state)


def test_a_reply_that_cannot_be_restored_is_refused_and_the_round_goes_on():
    wrong = Payload(model={"w": np.zeros(7, np.float16)}, weight=2)

    class Odd(Simulator):
        def train(self, round, sent):
            for name, reply in super().train(round, sent):
                yield name, replace(reply, payload=wrong) if name == "a" else reply

    only = rounded(Odd)
    assert "does not fit what was sent" in only.refused["a"] and set(only.shares) == {"b"}
    assert only.record(0, False).sites["a"].numbers == {}


def test_compiling_is_no_training_time_and_is_logged(caplog):
    class Compiles(Single):
        setup = (7.0, "")

        def fit(self, *args, **keywords):
            type(self).setup = (1007.0, "no compiler")
            return super().fit(*args, **keywords)

    compiling = Compiles(a=1.0, b=np.ones(2), start=MODEL)
    with caplog.at_level("INFO", "polysite"):
        turn = take_turn(ps.FedAvg(), Payload(model=MODEL), Payload(), compiling)
    assert turn.seconds < -900  # 1000 of the seconds do not count
    assert "took 1000 s" in caplog.text and "is not compiled, which makes training slower: no compiler" in caplog.text
