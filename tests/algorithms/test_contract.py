"""What every algorithm keeps, whatever it computes. Adding an algorithm adds a line to CASES in tests/table.py."""

import numpy as np
import pytest

import polysite as ps
from polysite import tree
from polysite.algorithms import ALGORITHMS, name_of
from polysite.algorithms.base import Facts, facts, in_rounds, scaled, serving_payloads
from polysite.algorithms.fedavg import FEDADAM
from polysite.config import dump, parse, phases
from polysite.engines import checkpoint
from polysite.engines.rounds import Progress
from polysite.errors import ConfigError
from polysite.payload import Payload
from quadratic import play
from table import CASES, START, arrays, every, exchange, same, screen, sites

MEANS_OF_THEIR_OWN = ("averaged", "clustered", "weighted", "top_k", "geometric_median", "robust")  # not by n_k or 1/K


def simulate(algorithm, rounds, **how):
    """(final state, memories) after some rounds."""
    run = play(algorithm, sites(), rounds, start=START, **how)
    return run.state, run.memories


def freeze(x):
    """Make every array underneath read-only, so that a hidden in-place update raises."""
    for array in arrays(x):
        array.setflags(write=False)
    return x


def test_every_algorithm_is_in_the_table_and_its_hyperparameters_are_frozen():
    assert {name_of(a) for a in CASES.values()} == set(ALGORITHMS)
    assert all(type(algorithm).__dataclass_params__.frozen for algorithm in CASES.values())


@every
def test_a_site_replies_what_is_declared_and_nothing_else(algorithm):
    _, sent, replies = exchange(algorithm)
    may = {name for name in algorithm.reply if name.endswith(("?", "*"))}
    for reply in replies.values():
        assert algorithm.reply.keys() - may <= reply.keys()
        assert all(name in algorithm.reply or f"{name}?" in may for name in reply)
    assert screen(algorithm.reply, START, sent, replies) == {}


@every
def test_running_statistics_are_averaged_and_never_extrapolated(algorithm):
    """Every site pulls its variance from 16 towards a^2, between 1 and 9: the mean lies between what they send."""
    state, _ = simulate(algorithm, 1)
    s, model = sites(), algorithm.send(state, ["a"])["a"].get("model", {})
    if "norm.running_var" not in model:  # it stays at the sites
        return
    left = 0.9 ** getattr(algorithm, "outer", 1)  # of what was sent: pFedMe trains on from there, several times
    theirs = {i: left * 16 + (1 - left) * site.a**2 for i, site in s.items()}
    assert min(theirs.values()) - 1e-9 <= model["norm.running_var"].item() <= max(theirs.values()) + 1e-9
    if "weight" in algorithm.reply and name_of(algorithm) not in MEANS_OF_THEIR_OWN:
        n = {i: 1.0 if getattr(algorithm, "uniform", False) else x.size for i, x in s.items()}
        plain = sum(n[i] * theirs[i] for i in s) / sum(n.values())
        assert model["norm.running_var"].item() == pytest.approx(plain, abs=1e-12)


@every
def test_what_stays_at_a_site_crosses_the_wire_in_neither_direction(algorithm):
    """Every payload of a run is looked at: what algorithms with a private part declare, and what all others do not."""
    private = getattr(getattr(algorithm, "inner", algorithm), "private", ())
    run = play(algorithm, sites(), 4, 0.75, wire=True)
    crossed = [*run.crossed, *algorithm.send(run.state, [*"abcd"]).values()]
    names = {k for p in crossed for field in p.values() if not isinstance(field, float) for k in field}
    assert not any(tree.matches(k, private) for k in names)
    if private:
        assert names == {k for k in START if not tree.matches(k, private)}
        assert not any(tree.matches(k, private) for k in run.state.model)
        assert all(m["private"].keys() == START.keys() - names for m in run.memories.values() if m)


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
    assert same(simulate(algorithm, 4, wire=True), simulate(algorithm, 4))


@every
def test_resuming_from_disk_is_not_noticeable(algorithm, tmp_path):
    checkpoint.save(tmp_path / "half.safetensors", Progress(2, *simulate(algorithm, 3)))
    half = checkpoint.load(tmp_path / "half.safetensors")
    assert same(simulate(algorithm, 6, resume=half), simulate(algorithm, 6))


@every
def test_order_of_replies_does_not_matter(algorithm):
    state, _, replies = exchange(algorithm)
    assert same(algorithm.merge(state, replies), algorithm.merge(state, dict(reversed(replies.items()))))


def combined(replies):
    """One reply that stands for all: the mean of the models by weight, and the sum of the weights."""
    weights = [p.get("weight", 1.0) for p in replies.values()]
    return Payload(model=tree.mean([p["model"] for p in replies.values()], weights), weight=sum(weights))


@pytest.mark.parametrize("name", [n for n, a in CASES.items() if facts(a).needs == "sum" and "model" in a.reply])
def test_needs_sum_means_that_the_weighted_sum_of_the_replies_is_enough(name):
    algorithm = CASES[name]
    state, _, replies = exchange(algorithm)
    assert set(algorithm.reply) <= {"model", "weight"}
    each, one = (algorithm.merge(state, r) for r in (replies, {"a": combined(replies)}))
    for x, y in zip(arrays(each), arrays(one), strict=True):
        assert x == pytest.approx(y, abs=1e-12)


def test_algorithms_that_need_each_reply():
    """The others need no model of a site (fine-tuning, local training), or their weighted sum."""
    each = {name_of(a) for a in CASES.values() if facts(a).needs == "each"}
    summed = {name_of(a) for a in CASES.values() if facts(a).needs == "sum"}
    assert summed & each == {"averaged", "weighted", "cfft"}  # what their inner algorithm needs; cfft with ``together``
    assert summed | each == set(ALGORITHMS)
    assert each == {
        "averaged", "cfft", "cfl", "clustered", "fedamp", "fedcostwavg", "feddiv", "feddyn", "fedexp", "fednova",
        "fedpidavg", "fpfc", "geometric_median", "ifca", "interpolated", "krum", "median", "pfednet", "qfedavg",
        "robust", "scaffold", "top_k", "trimmed_mean", "weighted",
    }  # fmt: skip


def test_combinators_need_what_is_inside_and_groups_need_each_reply():
    omega = {"b": 0.3}
    for inner in (ps.FedAvg(), FEDADAM, ps.FedProx(), ps.FedPer(), ps.Weighted(omega), ps.Scaffold(), ps.FedNova()):
        groups = ps.Clustered({"all": tuple("abcd")}, inner)
        assert facts(ps.Weighted(omega, inner)).needs == facts(inner).needs
        assert (groups.reply, facts(groups).plain_sgd) == (inner.reply, facts(inner).plain_sgd)
        assert facts(groups).needs == "each"  # a sum over all sites would mix the groups
        if facts(inner).shared_model:
            assert facts(ps.Averaged(inner=inner)).needs == facts(inner).needs


def test_a_class_from_outside_needs_what_it_is_around_or_derives_from():
    class Around:
        inner = ps.Scaffold()
        plain_sgd = property(lambda self: self.inner.plain_sgd)  # as it was in 0.1.0

    class Mine(ps.Scaffold):
        facts = Facts(poolable=True)

    class Alone(ps.Local):
        facts = Facts(poolable=True)

    assert facts(Around()) == facts(ps.Scaffold()) and facts(Mine()).plain_sgd and facts(Mine).plain_sgd
    assert facts(Mine()).poolable and not facts(Alone()).strangers


@every
def test_a_site_may_drop_out(algorithm):
    """Who is asked and does not answer leaves the same state as who was not asked."""
    state, _, replies = exchange(algorithm)
    _, _, asked = exchange(algorithm, "acd")
    assert same(algorithm.merge(state, {i: replies[i] for i in "acd"}), algorithm.merge(state, asked))
    final, _ = simulate(algorithm, 4, share=0.5)
    assert all(np.isfinite(a).all() for a in arrays(final))


@every
def test_a_site_never_seen_can_be_served(algorithm):
    state, _ = simulate(algorithm, 3)
    if hasattr(state, "groups"):  # no group's model is its own
        assert not facts(algorithm).strangers
        with pytest.raises(ConfigError, match="'stranger' is in none of the groups 'north', 'south', so it has no"):
            algorithm.send(state, ["a", "stranger"])
        return
    got = serving_payloads(algorithm, state, ["stranger"])["stranger"]
    stranger = sites()["a"]
    groups = list(algorithm.serve(got, Payload(), stranger, stranger.cases("test")))
    assert all(params.keys() == START.keys() for params, _ in groups)
    assert sorted(n for _, cases in groups for n in cases) == sorted(stranger.cases("test"))


@every
def test_shares_of_all_rounds_become_rounds_once(algorithm):
    once = scaled(algorithm, 40)
    assert scaled(once, 40) == once and scaled(once, 400) == once


def test_algorithms_and_combinators_scale_what_they_count_in_rounds():
    assert [in_rounds(*x) for x in ((0.4, 1), (0.999, 4), (1, 30), (50, 30))] == [1, 4, 1, 50]  # never none or more
    assert scaled(ps.Ifca(), 100) == ps.Ifca(warmup=10, settle=30) and scaled(ps.Fpfc(warmup=0.1), 100).warmup == 10
    around, plain = (ps.Weighted({}, ps.Clustered({"all": ("a",)}, x)) for x in (ps.SuPerFed(), ps.FedAvg()))
    assert scaled(around, 50).inner.inner == ps.SuPerFed(after=20) and scaled(plain, 50) is plain


def test_every_phase_of_a_study_counts_its_own_rounds():
    study = parse("[run]\nrounds = 20\n[algorithm]\nname = 'superfed'\n[[then]]\nalgorithm = 'ifca'\nrun.rounds = 50\n")
    first, second = phases(study)
    assert first.algorithm == ps.SuPerFed(after=8) and second.algorithm == ps.Ifca(warmup=5, settle=15)
    assert study.algorithm == ps.SuPerFed() and parse(dump(study)) == study  # a file keeps the shares
    assert phases(first) == (first,)
