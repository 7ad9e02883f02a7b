"""Broken and hostile replies: refused by name and reason, and the round goes on as if the site had not answered."""

import re
from dataclasses import replace

import numpy as np
import pytest

import polysite as ps
from phased import play
from polysite import tree
from polysite.engines.phases import Phase
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.payload import Payload
from table import CASES, START, arrays, every, one_of_each_kind, same, screen, sites


def tampered(payload, **fields):
    return Payload(**{**payload, **fields})


def trees(payload):
    return {k: dict(v) for k, v in payload.items() if not isinstance(v, float)}


def first(f):
    """A lie that applies ``f`` to the first array of every tree."""

    def lie(payload):
        found = trees(payload)
        for t in found.values():
            name = next(iter(t))
            t[name] = f(t[name])
        return tampered(payload, **found)

    return lie


def whole(f):
    """A lie that applies ``f`` to every tree."""
    return lambda payload: tampered(payload, **{k: f(v) for k, v in trees(payload).items()})


def number(value):
    return lambda p: tampered(p, **dict.fromkeys(p.keys() - trees(p), value))


TREES = {
    "nan": (first(lambda x: x * np.nan), "is not finite"),
    "wrong shape": (first(lambda x: np.ones((2, 3))), r"of shape \(2, 3\) instead of \(1,\)"),
    "missing tensor": (whole(lambda t: dict(list(t.items())[1:])), "lacks '"),
    "unknown tensor": (whole(lambda t: {**t, "x": np.ones(1)}), "has an unknown 'x'"),
    "wrong type": (first(lambda x: x.astype(np.float32)), "of type float32 instead of float64"),
    "1e8 times too large": (first(lambda x: 1e8 * (x + 1)), "times as large as is usual"),
    "largest number there is": (first(lambda x: x * 0 + 1.7e308), "is not finite"),
    "numbers for trees": (whole(lambda t: 1.0), "is a"),
}
NUMBERS = {
    "negative count": (number(-3.0), "is -3"),
    "absurd count": (number(1e30), r"is 1e\+30"),
    "trees for numbers": (number(START), "is a set"),
}
ANY = {
    "nothing": (lambda p: Payload(), "it holds nothing instead of"),
    "a field too many": (lambda p: tampered(p, scan=START), "'scan'"),
}


def damages(algorithm):
    kinds = set(algorithm.reply.values())
    if not kinds or any(name.endswith("?") for name in algorithm.reply):  # these lies tell of no stage in particular
        return {"a field too many": ANY["a field too many"]}
    numbers, models = kinds & {"count", "cost"}, kinds & {"model", "update"}
    return {**ANY, **(TREES if models else {}), **(NUMBERS if numbers else {})}


def silent(payload):
    """No lie, but no answer."""


class Hostile(Simulator):
    """Some sites say something else in some rounds."""

    def __init__(self, algorithm, everyone, liars, lie, when=lambda round: True):
        super().__init__(algorithm, everyone)
        self.liars, self.lie, self.when = liars, lie, when

    def train(self, round, sent):
        for site, reply in super().train(round, sent):
            false = site in self.liars and self.when(round)
            payload = self.lie(reply.payload) if false else reply.payload
            if payload is not None:
                yield site, replace(reply, payload=payload)


def last(engine, rounds=3):
    *_, end = run_rounds(engine.algorithm, engine, START, Plan(rounds=rounds), seed=0)
    return end


@every
def test_a_lie_is_refused_and_changes_nothing(algorithm):
    alone = last(Hostile(algorithm, sites(), "b", silent))
    assert all(np.isfinite(a).all() for a in arrays(alone.state))
    for what, (lie, reason) in damages(algorithm).items():
        heard = last(Hostile(algorithm, sites(), "b", lie))
        assert list(heard.refused) == ["b"] and re.search(reason, heard.refused["b"]), (what, heard.refused)
        assert same(heard.state, alone.state), what


@pytest.mark.parametrize("name", one_of_each_kind())
def test_honest_sites_are_never_refused(name):
    """Also when one trains ten times longer than the others, and near the optimum, where updates vanish."""
    algorithm, everyone = CASES[name], sites()
    everyone["c"].steps = 50
    engine = Simulator(algorithm, everyone)
    assert not any(r.refused for r in run_rounds(algorithm, engine, START, Plan(rounds=150), seed=0))


def test_the_record_lists_who_was_refused_and_why(tmp_path, caplog):
    class Crowd(Hostile):
        def train(self, round, sent):
            yield from (replies := list(super().train(round, sent)))
            yield "stranger", replies[0][1]

    engine = Crowd(ps.FedAvg(), sites(), "b", TREES["nan"][0], lambda round: round > 0)
    _, folder = play(tmp_path / "run", [Phase(ps.FedAvg(), engine, Plan(rounds=2))], START)
    stranger = {"stranger": "it was not asked"}
    assert [r.refused for r in folder.records()] == [stranger, {"b": "'model' is not finite", **stranger}]
    assert "the reply of 'b' is refused: 'model' is not finite" in caplog.text


def test_a_round_in_which_all_are_refused_leaves_the_state_as_it_was():
    end = last(Hostile(ps.FedAvg(), sites(), "abcd", NUMBERS["negative count"][0]))
    assert len(end.refused) == 4 and same(end.state.model, START)


def sizes(model, *replies, kind="update"):
    """Who is refused, if the model and the replies have these lengths."""
    sent = {str(i): Payload(model={"w": np.array([model])}) for i in range(len(replies))}
    came = {str(i): Payload(x={"w": np.array([float(r)])}) for i, r in enumerate(replies)}
    return sorted(screen({"x": kind}, {"w": np.array([1.0])}, sent, came))


def test_too_large_is_a_thousand_times_the_model_and_what_half_of_the_others_sent():
    assert sizes(1.0, 0.1, 0.1, 990.0) == [] and sizes(1.0, 0.1, 0.1, 1010.0) == ["2"]
    assert sizes(1e-9, 2.0, 2.0, 1990.0) == [] and sizes(1e-9, 2.0, 2.0, 2010.0) == ["2"]  # a model near zero
    assert sizes(1e-9, 2.0, 3.0, 1e9, 1e9) == ["2", "3"]  # half of them lie
    assert sizes(1.0, 0.0, 0.0, 2.0, 2.0, 2.0) == []  # some sites do not move at all
    assert sizes(0.0, 5.0) == [] and sizes(0.0, 0.0, 0.0) == []  # nothing to compare with
    assert sizes(5.0, 1e9) == ["0"]


def refusal(kinds, reply, sent=Payload()):
    """Why a reply is refused; None if it is not."""
    return screen(kinds, START, {"a": sent}, {"a": reply}).get("a")


PART = {k: v for k, v in START.items() if k != "head.w"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (PART, None),
        (START, "'model' has an unknown 'head.w'"),  # what is private is not wanted here
        ({"body.w": START["body.w"]}, "'model' lacks 'norm.running_var'"),
        ({**PART, "norm.running_var": np.array([-1.0])}, "'model' has a negative variance 'norm.running_var'"),
        ({**PART, "norm.running_var": np.array([1e12])}, None),  # raw intensities have such variances
        ({**PART, "body.w": np.array([1e9])}, "'model' is 3e+08 times as large as is usual"),
    ],
    ids=str,
)
def test_of_a_model_a_site_answers_with_what_it_was_sent(model, says):
    assert refusal(ps.FedAvg().reply, Payload(model=model, weight=2.0), Payload(model=PART)) == says


def test_an_update_has_no_running_statistics():
    for sent in (Payload(model=START), Payload()):
        assert refusal({"x": "update"}, Payload(x=tree.trained(START)), sent) is None
        assert "norm.running_var" in refusal({"x": "update"}, Payload(x=START), sent)
    assert "lacks 'head.w'" in refusal(ps.FedAvg().reply, Payload(model=PART, weight=1))


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("count", 1, 1e9), ("rate", 1e-12, 1e9), ("cost", 0, 1e9), ("one", 1, 1)]
)
def test_numbers_have_limits(kind, low, high):
    def refused(value):
        return refusal({"x": kind}, Payload(x=value))

    assert not refused(low) and not refused(high)
    assert all(refused(x) for x in (1.01 * high, 0.99 * low - 1e-300, -1e-9, np.nan, np.inf))
    assert bool(refused(-0.0)) == (kind != "cost")


@pytest.mark.parametrize(
    ("kind", "lie", "says"),
    [
        ("count", 1e6, "as large as is usual"),
        ("rate", 1e-6, "as small as is usual"),
        ("count", 1.0, None),  # a small hospital
        ("cost", 1e6, None),  # some losses are
    ],
)
def test_numbers_are_seen_beside_those_of_the_others(kind, lie, says):
    came = {str(i): Payload(x=x) for i, x in enumerate((5.0, 7.0, 90.0, lie))}
    refused = screen({"x": kind}, START, dict.fromkeys(came, Payload()), came)
    assert (list(refused) == ["3"] and says in refused["3"]) if says else refused == {}


@pytest.mark.parametrize("uniform", [True, False])
def test_a_site_that_is_told_to_count_as_one_counts_as_one(uniform):
    end = last(Hostile(ps.FedAvg(uniform=uniform), sites(), "b", lambda p: tampered(p, weight=500.0)), 1)
    assert end.refused == ({"b": "'weight' is 500"} if uniform else {})


@pytest.mark.parametrize("algorithm", [ps.Scaffold(), ps.Scaffold(uniform=False), ps.FedDyn(0.7)], ids=str)
def test_who_is_not_heard_forgets_the_round_so_that_sums_stay_right(algorithm):
    """A lie in two rounds, the truth before and after: the optimum is reached as if nothing had been."""
    engine = Hostile(algorithm, sites(), "b", TREES["nan"][0], lambda round: round in (2, 5))
    found, plain = last(engine, 500), last(Simulator(algorithm, sites()), 500)
    out, want = (sum(v.item() for v in tree.trained(r.state.model).values()) for r in (found, plain))
    assert out == pytest.approx(want, abs=1e-6)
