"""Replies that are summed as they arrive: the bits of held replies, with one model at a time."""

import weakref

import numpy as np
import pytest
import torch

from polysite import tree
from polysite.algorithms.base import Algorithm, facts
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.fedprox import FedProx
from polysite.algorithms.weighted import Weighted
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.engines.transport import Reply
from polysite.payload import Payload
from quadratic import Quadratic
from table import CASES, START, one_of_each_kind, same, sites

SUMS = {name: a for name, a in CASES.items() if facts(a).needs == "sum"}
MODELS = [name for name, a in SUMS.items() if "model" in a.reply]


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
        record = r.record(0, {}, False)
        records.append((record.shares, record.refused, record.absent, record.diagnostics, r.replies.keys()))
        records.append({i: (s.loss, s.steps, s.bytes_up, s.numbers) for i, s in record.sites.items()})
    return r.state, engine.memories(), records


def agree(algorithm: Algorithm, engine=Counting, repeats=0, **options) -> None:
    """Compare summing with holding; ``engine`` makes a transport from an algorithm and sites."""
    held, summed = engine(algorithm, sites()), engine(algorithm, sites())
    one, other = played(algorithm, held, True, **options), played(algorithm, summed, False, **options)
    assert same(one[:2], other[:2]) and one[2] == other[2]
    assert held.repeats == 0 and summed.repeats == repeats


@pytest.mark.parametrize("name", one_of_each_kind(SUMS))
def test_the_sum_has_the_bits_of_held_replies(name):
    agree(SUMS[name], share=0.75)
    agree(SUMS[name], compress="half")


@pytest.mark.parametrize("name", one_of_each_kind(MODELS))
def test_one_reply_that_stands_for_all_has_their_bits(name):
    algorithm, s = CASES[name], sites()
    state = algorithm.init(START, sorted(s))
    sent = algorithm.send(state, sorted(s))
    replies = {i: algorithm.local(sent[i], Payload(), s[i])[0] for i in s}
    weights = {i: p.get("weight", 1.0) for i, p in replies.items()}
    total = None
    for i in sorted(s):
        total = tree.add_share(total, replies[i]["model"], weights[i] / sum(weights.values()))
    one = {"x": Payload(model=total, weight=sum(weights.values()))}
    assert same(algorithm.merge(state, one), algorithm.merge(state, replies))


class Backwards(Counting):
    def train(self, round, sent):
        yield from reversed(list(super().train(round, sent)))


class Broken(Counting):
    """Site c is not finite from round 1 on; site b is absent in round 2."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            if i == "c" and round > 0:
                reply = Reply(Payload(**{**reply.payload, "model": tree.scale(START, np.nan)}), (), 1.0, 8)
            if i != "b" or round != 2:
                yield i, reply


class Lying(Counting):
    """Site b claims many more cases than it has; too many in round 1."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            weight = reply.payload["weight"] * (1 if i != "b" else 1e5 if round == 1 else 7)
            yield i, Reply(Payload(**{**reply.payload, "weight": weight}), reply.fits, reply.seconds, reply.nbytes)


class Crowded(Counting):
    """A site that was not asked replies, and site a replies twice."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            yield i, reply
            yield ("stranger" if i == "b" else "a" if i == "a" else i), reply


@pytest.mark.parametrize("algorithm", [FedAvg(), Weighted({"b": 0.3}, FedProx(mu=0.5))])
@pytest.mark.parametrize(
    ("engine", "repeats"),
    [(Backwards, 0), (Broken, 3), (Lying, 4), (Crowded, 8)],
    ids=["other order", "refused or absent", "another weight", "not asked, and twice"],
)
def test_what_was_not_expected_is_summed_in_a_second_pass(algorithm, engine, repeats):
    """Round 1 has a refusal, round 2 also an absent site, round 3 that site again: each costs one repetition."""
    agree(algorithm, engine, repeats)


def test_no_reply_is_held_while_the_next_site_trains():
    trained, most = [], 0

    def alive():
        return sum(leaf() is not None for leaf in trained)

    class Large(Quadratic):
        def fit(self, *args, **options):
            nonlocal most
            most = max(most, alive())
            fit = super().fit(*args, **options)
            trained.append(weakref.ref(fit.params["body.w"]))
            return fit

    everyone = {f"{k:02d}": Large(1.0, np.array([float(k)]), start=START) for k in range(12)}
    for r in run_rounds(FedAvg(), Simulator(FedAvg(), everyone), START, Plan(rounds=2), 0, keep_replies=False):
        assert alive() == 0 and not any(f.params for reply in r.replies.values() for f in reply.fits)
    assert len(trained) == 24 and most == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, np.float32])
def test_a_running_sum_has_the_bits_of_a_mean(monkeypatch, kind):
    monkeypatch.setattr(tree, "TENSOR_SLICE", 37)
    monkeypatch.setattr(tree, "ARRAY_SLICE", 37)
    rng, weights = np.random.default_rng(0), [3.0, 1.0, 7.0, 0.3]
    arrays = [{"a": rng.normal(size=(5, 23)), "b": rng.normal(size=()), "c": rng.normal(size=(0,))} for _ in weights]
    if isinstance(kind, torch.dtype):
        trees = [{k: torch.tensor(x, dtype=kind) for k, x in a.items()} for a in arrays]
    else:
        trees = [{k: np.asarray(x, kind) for k, x in a.items()} for a in arrays]
    total = None
    for t, w in zip(trees, weights, strict=True):
        total = tree.add_share(total, t, w / sum(weights))
    assert Payload(m=total) == Payload(m=tree.mean(trees, weights))
