"""Broken and hostile replies: refused by name and reason, and the round goes on as if the site had not answered."""

import re

import numpy as np
import pytest

from polysite import tree
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.feddyn import FedDyn
from polysite.algorithms.scaffold import Scaffold
from polysite.engines.phases import Phase, run_phases
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.engines.transport import Reply
from polysite.payload import Payload
from table import CASES, START, arrays, every, one_of_each_kind, same, screen, sites


def tampered(payload, **fields):
    return Payload(**{**payload, **fields})


def trees(payload):
    return {k: dict(v) for k, v in payload.items() if not isinstance(v, float)}


def each_tree(payload, f):
    """The payload with ``f`` applied to the first array of every tree."""
    found = trees(payload)
    for t in found.values():
        first = next(iter(t))
        t[first] = f(t[first])
    return tampered(payload, **found)


def without_one(payload):
    return tampered(payload, **{k: dict(list(v.items())[1:]) for k, v in trees(payload).items()})


def with_one_more(payload):
    return tampered(payload, **{k: {**v, "x": np.ones(1)} for k, v in trees(payload).items()})


def number(value):
    return lambda p: tampered(p, **dict.fromkeys(p.keys() - trees(p), value))


TREES = {
    "nan": (lambda p: each_tree(p, lambda x: x * np.nan), "is not finite"),
    "inf": (lambda p: each_tree(p, lambda x: x + np.inf), "is not finite"),
    "wrong shape": (lambda p: each_tree(p, lambda x: np.ones((2, 3))), r"of shape \(2, 3\) instead of \(1,\)"),
    "more values": (lambda p: each_tree(p, lambda x: np.tile(x, 2)), r"of shape \(2,\) instead of \(1,\)"),
    "missing tensor": (without_one, "lacks 'body.w'"),
    "unknown tensor": (with_one_more, "has an unknown 'x'"),
    "wrong type": (lambda p: each_tree(p, lambda x: x.astype(np.float32)), "of type float32 instead of float64"),
    "integers": (lambda p: each_tree(p, lambda x: np.ones(1, np.int64)), "of type int64 instead of float64"),
    "1e8 times too large": (lambda p: each_tree(p, lambda x: 1e8 * (x + 1)), "times as large as is usual"),
    "largest number there is": (lambda p: each_tree(p, lambda x: x * 0 + 1.7e308), "is not finite"),
    "a number for a tree": (
        lambda p: tampered(p, **{k: 1.0 for k, v in p.items() if v is not p.get("weight")}),
        "is a",
    ),
}
NUMBERS = {
    "negative count": (number(-3.0), "is -3"),
    "nan count": (number(np.nan), "is nan"),
    "inf count": (number(np.inf), "is inf"),
    "absurd count": (number(1e30), r"is 1e\+30"),
    "trees for numbers": (
        lambda p: tampered(p, **{k: START for k, v in p.items() if isinstance(v, float)}),
        "is a set",
    ),
}
ANY = {
    "nothing": (lambda p: Payload(), "it holds nothing instead of"),
    "a field too many": (lambda p: tampered(p, scan=START), "'scan'"),
}


def damages(algorithm):
    kinds = set(algorithm.reply.values())
    if not kinds or any(name.endswith("?") for name in algorithm.reply):  # these lies tell of no stage in particular
        return {"a field too many": ANY["a field too many"]}
    return {
        **ANY,
        **(TREES if kinds & {"model", "update"} else {}),
        **(NUMBERS if kinds & {"positive", "cost"} else {}),
    }


class Hostile(Simulator):
    """One site tells the truth until a certain round, and then something else."""

    def __init__(self, algorithm, everyone, liar, lie, since=0):
        super().__init__(algorithm, everyone)
        self.liar, self.lie, self.since = liar, lie, since

    def train(self, round, sent):
        for site, reply in super().train(round, sent):
            if site == self.liar and round >= self.since:
                reply = Reply(self.lie(reply.payload), reply.fits, reply.seconds, reply.nbytes)
            yield site, reply


class Mute(Simulator):
    """One site trains and never answers."""

    def train(self, round, sent):
        yield from ((site, reply) for site, reply in super().train(round, sent) if site != "b")


@every
def test_a_lie_is_refused_and_changes_nothing(algorithm):
    *_, alone = run_rounds(algorithm, Mute(algorithm, sites()), START, Plan(rounds=3), seed=0)
    assert all(np.isfinite(a).all() for a in arrays(alone.state))
    for what, (lie, reason) in damages(algorithm).items():
        *_, heard = run_rounds(algorithm, Hostile(algorithm, sites(), "b", lie), START, Plan(rounds=3), seed=0)
        assert list(heard.refused) == ["b"] and re.search(reason, heard.refused["b"]), (what, heard.refused)
        assert same(heard.state, alone.state), what


@pytest.mark.parametrize("name", one_of_each_kind())
def test_honest_sites_are_never_refused(name):
    """Also when one trains ten times longer than the others, and near the optimum, where updates vanish."""
    algorithm, everyone = CASES[name], sites()
    everyone["c"].steps = 50
    assert not any(
        r.refused for r in run_rounds(algorithm, Simulator(algorithm, everyone), START, Plan(rounds=150), seed=0)
    )


def test_zero_cases_are_refused_and_a_zero_cost_is_not():
    zero = Payload(model=START, weight=0.0)
    assert screen(FedAvg().reply, START, {"a": zero}, {"a": zero}) == {"a": "'weight' is 0"}
    fine = Payload(model=START, size=2.0, cost=0.0)
    assert screen({"model": "model", "size": "count", "cost": "cost"}, START, {"a": fine}, {"a": fine}) == {}


def test_the_record_lists_who_was_refused_and_why(tmp_path, caplog):
    folder = RunFolder.create(tmp_path / "run", "", 0)
    engine = Hostile(FedAvg(), sites(), "b", TREES["nan"][0], since=1)
    run_phases([Phase(FedAvg(), engine, Plan(rounds=3))], START, 0, folder)
    assert [r.refused for r in folder.records()] == [{}, *[{"b": "'model' is not finite"}] * 2]
    assert "the reply of 'b' is refused: 'model' is not finite" in caplog.text


def test_a_round_in_which_all_are_refused_leaves_the_state_as_it_was(tmp_path):
    class AllHostile(Simulator):
        def train(self, round, sent):
            for site, reply in super().train(round, sent):
                yield site, Reply(NUMBERS["negative count"][0](reply.payload), reply.fits, reply.seconds, reply.nbytes)

    *_, end = run_rounds(FedAvg(), AllHostile(FedAvg(), sites()), START, Plan(rounds=2), seed=0)
    assert len(end.refused) == 4 and same(end.state.model, START)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_federations_are_guarded_too(count):
    few = dict(list(sites().items())[:count])
    liar = sorted(few)[-1]
    *_, end = run_rounds(
        FedAvg(), Hostile(FedAvg(), few, liar, TREES["1e8 times too large"][0]), START, Plan(rounds=2), seed=0
    )
    assert list(end.refused) == [liar]


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


def test_an_update_has_no_running_statistics_and_a_model_has():
    whole, trained = START, {k: v for k, v in START.items() if "running" not in k}
    for kind, good, bad in (("model", whole, trained), ("update", trained, whole)):
        sent = {"a": Payload(model=START)}
        assert screen({"x": kind}, START, sent, {"a": Payload(x=good)}) == {}
        assert "norm.running_var" in screen({"x": kind}, START, sent, {"a": Payload(x=bad)})["a"]


def test_of_a_model_a_site_answers_with_what_it_was_sent():
    part = {k: v for k, v in START.items() if k != "head.w"}
    sent, weight = {"a": Payload(model=part)}, 2.0
    for model, says in (
        (part, None),
        (START, "'model' has an unknown 'head.w'"),  # what is private is not wanted here
        ({"body.w": START["body.w"]}, "'model' lacks 'norm.running_var'"),
        ({}, "'model' lacks 'body.w'"),
        ({**part, "body.w": np.ones(2)}, "'model' has 'body.w' of shape (2,) instead of (1,)"),
        ({**part, "body.w": np.array([np.nan])}, "'model' is not finite"),
        ({**part, "norm.running_var": np.array([-1.0])}, "'model' has a negative variance 'norm.running_var'"),
        ({**part, "body.w": np.array([1e9])}, "'model' is 3e+08 times as large as is usual"),
    ):
        refused = screen(FedAvg().reply, START, sent, {"a": Payload(model=model, weight=weight)})
        assert refused == ({"a": says} if says else {})
    assert (
        "lacks 'head.w'" in screen(FedAvg().reply, START, {"a": Payload()}, {"a": Payload(model=part, weight=1)})["a"]
    )
    assert screen({"x": "update"}, START, sent, {"a": Payload(x={"body.w": np.ones(1)})}) == {}


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("count", 1, 1e9), ("rate", 1e-12, 1e9), ("cost", 0, 1e9), ("one", 1, 1)]
)
def test_numbers_have_limits(kind, low, high):
    def refused(value):
        return screen({"x": kind}, START, {"a": Payload()}, {"a": Payload(x=value)})

    assert not refused(low) and not refused(high)
    assert all(refused(x) for x in (1.01 * high, 0.99 * low - 1e-300, -1e-9, np.nan, np.inf))
    assert bool(refused(-0.0)) == (kind != "cost")


@pytest.mark.parametrize(
    ("kind", "lie", "says"),
    [
        ("count", 1e6, "as large as is usual"),
        ("rate", 1e6, "as large as is usual"),
        ("rate", 1e-6, "as small as is usual"),
        ("count", 1.0, None),  # a small hospital
        ("cost", 1e6, None),  # some losses are
    ],
)
def test_numbers_are_seen_beside_those_of_the_others(kind, lie, says):
    came = {str(i): Payload(x=x) for i, x in enumerate((5.0, 7.0, 90.0, lie))}
    refused = screen({"x": kind}, START, dict.fromkeys(came, Payload()), came)
    assert (list(refused) == ["3"] and says in refused["3"]) if says else refused == {}


@pytest.mark.parametrize(
    ("value", "says"), [(np.nan, "not finite"), (np.inf, "not finite"), (-1.0, "negative variance 'norm.running_var'")]
)
def test_running_statistics_alone_are_looked_at(value, says):
    bad = {**START, "norm.running_var": np.array([value])}
    sent = {"a": Payload(model=START)}
    assert says in screen(FedAvg().reply, START, sent, {"a": Payload(model=bad, weight=2)})["a"]
    large = {**START, "norm.running_var": np.array([1e12])}  # raw intensities have such variances
    assert screen(FedAvg().reply, START, sent, {"a": Payload(model=large, weight=2)}) == {}


@pytest.mark.parametrize("field", ["model", "control", "weight"])
def test_every_field_is_looked_at_by_itself(field):
    expected, small = Scaffold(uniform=False).reply, tree.trained(START)
    good = {"model": START, "control": small, "weight": 3.0}
    for lie in (lambda x: x * np.nan, lambda x: 1e8 * (x + 1)):
        bad = {**good, field: {k: lie(v) for k, v in good[field].items()} if field != "weight" else lie(3.0)}
        came = {"a": Payload(**good), "b": Payload(**bad), "c": Payload(**good)}
        assert list(screen(expected, START, dict.fromkeys(came, Payload(model=START)), came)) == ["b"]


def test_who_was_not_asked_is_not_heard(tmp_path):
    class Crowd(Simulator):
        def train(self, round, sent):
            for site, reply in super().train(round, sent):
                yield site, reply
            yield "stranger", reply

    folder = RunFolder.create(tmp_path / "run", "", 0)
    run_phases([Phase(FedAvg(), Crowd(FedAvg(), sites()), Plan(rounds=2))], START, 0, folder)
    assert folder.records()[1].refused == {"stranger": "it was not asked"}


@pytest.mark.parametrize("uniform", [True, False])
def test_a_site_that_is_told_to_count_as_one_counts_as_one(uniform):
    refused = {
        site: reason
        for r in run_rounds(
            FedAvg(uniform=uniform),
            Hostile(FedAvg(uniform=uniform), sites(), "b", lambda p: tampered(p, weight=500.0)),
            START,
            Plan(rounds=1),
            seed=0,
        )
        for site, reason in r.refused.items()
    }
    assert refused == ({"b": "'weight' is 500"} if uniform else {})


@pytest.mark.parametrize("algorithm", [Scaffold(), Scaffold(uniform=False), FedDyn(0.7)], ids=str)
def test_who_is_not_heard_forgets_the_round_so_that_sums_stay_right(algorithm):
    """A lie in two rounds, the truth before and after: the optimum is reached as if nothing had been."""

    class Once(Hostile):
        def train(self, round, sent):
            self.since = 0 if round in (2, 5) else 10**9
            yield from super().train(round, sent)

    *_, end = run_rounds(algorithm, Once(algorithm, sites(), "b", TREES["nan"][0]), START, Plan(rounds=500), seed=0)
    *_, plain = run_rounds(algorithm, Simulator(algorithm, sites()), START, Plan(rounds=500), seed=0)
    out, want = (sum(v.item() for v in tree.trained(r.state.model).values()) for r in (end, plain))
    assert out == pytest.approx(want, abs=1e-6)
