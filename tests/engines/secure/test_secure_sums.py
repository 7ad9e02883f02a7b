"""Secure sums: exact with drop-outs, uniform for the server, and the result of plain sums within rounding."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import polysite as ps
from polysite import tree
from polysite.algorithms import ALGORITHMS, find
from polysite.algorithms.base import facts
from polysite.config import parse
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.secure import fixed_point, shamir
from polysite.engines.secure.masks import add_masks, new_seed
from polysite.engines.secure.member import Mask, open_session, packed, take_step, unpacked
from polysite.engines.secure.settings import Secure, summable
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, PayloadError
from polysite.payload import Payload
from quadratic import Quadratic
from table import CASES, START, arrays, one_of_each_kind, sites

ON = Secure("on")
SUMS = {name: a for name, a in CASES.items() if facts(a).needs == "sum"}
KINDS = {"model": "model", "weight": "count"}
FIVE = "abcde"


def test_a_threshold_of_shares_gives_the_secret_and_one_less_does_not():
    secret = new_seed()
    shares = shamir.split(secret, 3, range(1, 6))
    for some in ((1, 2, 3), (5, 1, 4), (2, 3, 4, 5)):
        assert shamir.combine({x: shares[x] for x in some}) == secret
    assert shamir.combine({x: shares[x] for x in (1, 2)}) != secret
    changed = {**shares, 2: shares[3]}
    assert shamir.combine({x: changed[x] for x in (1, 2, 3)}) != secret
    # fewer are uniform: the leading bytes of the first share of a constant secret, over many splits
    drawn = [int.from_bytes(shamir.split(bytes(32), 2, [1])[1][1:3]) for _ in range(4000)]
    assert stats.kstest(np.array(drawn) / 2**16, "uniform").pvalue > 1e-4


def test_whole_numbers_hold_small_and_large_values():
    values = np.array([0.0, 1.0, -1.0, 1e-15, -3.7e14, 2.0**61 + 12345, -(2.0**-60)])
    found = fixed_point.number(fixed_point.digits(values))
    assert np.abs(found - values).max() <= 2.0**-61 + 1e-9
    assert (np.delete(found, 3) == np.delete(values, 3)).all()
    many = np.random.default_rng(0).normal(0, 1e6, (50, 7))
    summed = sum(fixed_point.digits(row) for row in many)
    assert fixed_point.number(summed) == pytest.approx([math.fsum(column) for column in many.T], rel=1e-15)


@pytest.mark.parametrize(("value", "sentence"), [(np.inf, "not finite"), (np.nan, "not finite"), (1e10, "lower it")])
def test_what_does_not_fit_whole_numbers_is_refused(value, sentence):
    with pytest.raises(PayloadError, match=sentence):
        fixed_point.encode(KINDS, Payload(model={"w": np.array([value])}, weight=3), 32, 5)


TOLD = Payload(session=packed({"id": bytes(16)}))


def opened(names=FIVE, reveal="majority"):
    """The session of every site, and the keys that it sends."""
    found = {i: open_session(TOLD, i, 3, reveal=reveal) for i in names}
    return {i: s for i, (s, _) in found.items()}, {i: unpacked(answer["keys"]) for i, (_, answer) in found.items()}


def every(keys):
    """What the server relays."""
    fields = (("mask", "mask_keys"), ("share", "share_keys"), ("digest", "digests"))
    return Payload(**TOLD, **{field: packed({i: k[name] for i, k in keys.items()}) for name, field in fields})


def dealt(names=FIVE, **more):
    """Sessions of sites that have exchanged keys, and their shares for the others."""
    sessions, keys = opened(names, **more)
    found = {i: take_step("shares", every(keys), s) for i, s in sessions.items()}
    return {i: s for i, (s, _) in found.items()}, {i: unpacked(a["sealed"]) for i, (_, a) in found.items()}


def relayed(names=FIVE, **more):
    """Sessions of sites that have exchanged keys and shares."""
    sessions, shares = dealt(names, **more)
    mine = {i: Payload(**TOLD, sealed=packed({j: shares[j][i] for j in names if j != i})) for i in names}
    return {i: take_step("members", mine[i], s)[0] for i, s in sessions.items()}


def revealing(*answered):
    return Payload(**TOLD, answered=packed(dict.fromkeys(answered, b"")))


def test_a_masked_reply_is_uniform_and_says_nothing_of_its_content():
    """Kolmogorov and Smirnov on 64-bit numbers, chi-square on bytes and on the lowest bits, for a reply of zeros and
    for a constant one; the same masks without the own mask of the site would do too, so that is left out as well."""
    session = relayed()["b"]
    for value in (0.0, 0.125):
        reply = Payload(model={"w": np.full(200_000, value, np.float32)}, weight=8)
        masked = Mask(session, 32).apply(KINDS, Payload(), reply)["model"]["w"]
        assert stats.kstest(masked / 2.0**64, "uniform").pvalue > 1e-4
        assert stats.chisquare(np.bincount(masked.view(np.uint8), minlength=256)).pvalue > 1e-4
        assert stats.chisquare(np.bincount(masked & np.uint64(15), minlength=16).astype(int)).pvalue > 1e-4
        plain = fixed_point.encode(KINDS, reply, 32, 5)["model"]["w"]
        assert stats.chisquare(np.bincount(plain.view(np.uint8), minlength=256)).pvalue < 1e-100
    first, again = (np.array([1, 2], np.uint64) for _ in range(2))
    add_masks([first], [(new_seed(), 1)])
    add_masks([again], [(new_seed(), 1)])
    assert (first != again).all()


def test_a_site_reveals_one_kind_of_share_for_every_other_and_tells_one_story():
    session = relayed()["a"]
    told, answer = take_step("reveal", revealing(*"abc"), session)
    assert sorted(answer["seeds"]) == ["a", "b", "c"] and sorted(answer["keys"]) == ["d", "e"]
    assert take_step("reveal", revealing(*"abc"), told)[1] == answer
    for others in ("abcd", "ade"):
        with pytest.raises(PayloadError, match="another list"):
            take_step("reveal", revealing(*others), told)
    with pytest.raises(PayloadError, match="closed"):
        Mask(told, 32).apply(KINDS, Payload(), Payload(model={"w": np.ones(1)}, weight=1))


def secrets_of(sessions, stories):
    """What a server learns of site a that tells every site its own story about who answered; e gives it both shares."""
    seeds, keys = {}, {}
    both = [("e", "abcde"), ("e", "bcde")]  # the conspirator answers both
    for i, answered in [*stories.items(), *both]:
        with suppress(PayloadError):
            got = take_step("reveal", revealing(*answered), sessions[i])[1]
            seeds |= {sessions[i].place(i): x for j, x in unpacked(got["seeds"]).items() if j == "a"}
            keys |= {sessions[i].place(i): x for j, x in unpacked(got["keys"]).items() if j == "a"}
    return shamir.combine(seeds), shamir.combine(keys)


def test_it_takes_more_than_a_third_of_the_sites_to_unmask_one_with_shares_of_two_thirds():
    """With a majority of five, a lying server and one site are enough, which docs/protection.md says."""
    stories = {"a": "abcde", "b": "abcde", "c": "bcde", "d": "bcde"}
    for reveal, unmasked in (("majority", True), ("two_thirds", False)):
        sessions = relayed(reveal=reveal)
        seed, key = secrets_of(sessions, stories)
        assert (seed == sessions["a"].seed and key == sessions["a"].mask_key) is unmasked
        assert (seed == sessions["a"].seed or key == sessions["a"].mask_key) is unmasked


@pytest.mark.parametrize(
    ("answered", "sentence"), [("ab", "needs 3"), ("bcd", "not one of this sum"), ("abx", "not one of this sum")]
)
def test_a_site_refuses_to_reveal_a_sum_of_few_or_of_strangers(answered, sentence):
    with pytest.raises(PayloadError, match=sentence):
        take_step("reveal", revealing(*answered), relayed()["a"])


def test_shares_that_were_changed_on_the_way_are_refused():
    sessions, shares = dealt("abc")
    b, c = shares["b"]["a"], shares["c"]["a"]
    for wrong in (b[:-1] + bytes([b[-1] ^ 1]), c):
        with pytest.raises(PayloadError, match="changed on the way"):
            take_step("members", Payload(**TOLD, sealed=packed({"b": wrong, "c": c})), sessions["a"])


def test_a_key_of_another_site_in_its_own_place_is_refused():
    sessions, keys = opened("abc")
    keys["a"] = {**keys["a"], "mask": keys["b"]["mask"]}
    with pytest.raises(PayloadError, match="not those that it sent"):
        take_step("shares", every(keys), sessions["a"])


class Dropping(Simulator):
    """Sites that are gone at some step: {site: step}."""

    def __init__(self, algorithm, sites, gone, secure=ON):
        super().__init__(algorithm, sites, secure=secure)
        self.gone, self.sums = gone, []

    def mask_step(self, step, round, sent, least):
        answers = super().mask_step(step, round, sent, least)
        return {i: p for i, p in answers.items() if self.gone.get(i) != step}

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            if self.gone.get(i) != "train":
                self.sums.append((i, reply.payload))
                yield i, reply


def five():
    rng = np.random.default_rng(3)
    return {i: Quadratic(1 + k, rng.normal(k, 1, 4 + k), start=START) for k, i in enumerate(FIVE)}


def once(gone, kind=Dropping, secure=ON):
    """The only round of a run."""
    (only,) = run_rounds(ps.FedAvg(), kind(ps.FedAvg(), five(), gone, secure), START, Plan(rounds=1, secure=secure), 0)
    return only


def same(one, other):
    return all(np.array_equal(one.state.model[k], other.state.model[k]) for k in START)


@pytest.mark.parametrize(
    "gone",
    [
        {},
        {"b": "reveal"},
        {"c": "members"},
        {"a": "train", "e": "train"},
        {"b": "train", "d": "reveal"},
        {"a": "reveal", "b": "reveal"},
        {"a": "keys", "c": "train"},
        {"b": "shares", "d": "train"},
    ],
    ids=str,
)
def test_a_sum_is_exact_with_none_one_or_two_drop_outs_of_five(gone):
    """The masked sum is the sum of the encoded replies of the sites that replied, to the last bit."""
    only, everyone = once(gone), five()
    heard = [i for i in FIVE if gone.get(i) not in ("keys", "shares", "train")]
    assert sorted(only.replies) == heard and not only.refused and not only.remarks
    replies = {i: ps.FedAvg().local(Payload(model=START), Payload(), everyone[i].at(0))[0] for i in heard}
    members = len([i for i in FIVE if gone.get(i) not in ("keys", "shares")])
    encoded = [fixed_point.encode(KINDS, replies[i], 32, members) for i in heard]
    exact = {k: sum(e["model"][k].view(np.int64).astype(object) for e in encoded) for k in START}
    weight = sum(everyone[i].size for i in heard)
    for k, whole in exact.items():
        assert only.state.model[k] == np.array([float(whole[0]) / 2**32 / weight])
    if len(gone) < 2:  # shares of two thirds bear one
        strict = once(gone, secure=Secure("on", reveal="two_thirds"))
        assert not strict.remarks and same(strict, only)
    plain = tree.mean([replies[i]["model"] for i in heard], [everyone[i].size for i in heard])
    assert all(only.state.model[k] == pytest.approx(plain[k], abs=len(heard) * 2.0**-33) for k in START)


@pytest.mark.parametrize("step", ["train", "reveal"])
def test_three_drop_outs_of_five_leave_no_sum_and_change_nothing(step):
    only = once(dict.fromkeys("abc", step))
    assert all(np.array_equal(only.state.model[k], START[k]) for k in START)
    assert "there is no secure sum in this round" in only.remarks[0] and only.replies.keys() == only.refused.keys()


class Lying(Dropping):
    """Site b reveals wrong shares."""

    def mask_step(self, step, round, sent, least):
        answers = dict(super().mask_step(step, round, sent, least))
        if step == "reveal":
            wrong = {f: {i: x ^ 1 for i, x in of.items()} for f, of in answers["b"].items()}
            answers["b"] = Payload(**wrong)
        return answers


def test_wrong_shares_of_a_site_are_passed_over():
    assert same(once({"d": "train"}, Lying), once({"d": "train"}))


class Odd(Dropping):
    """Site b sends a masked reply of another form, site c an open one."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            model = {"b": {k: np.zeros(7, np.uint64) for k in START}, "c": START}.get(i, reply.payload["model"])
            yield i, replace(reply, payload=Payload(**{**reply.payload, "model": model}))


def test_a_reply_without_masks_or_of_another_form_is_refused_and_the_rest_is_summed():
    only = once({}, Odd)
    assert sorted(only.refused) == ["b", "c"] and "not masked" in only.refused["c"]
    assert same(only, once({"b": "train", "c": "train"}))


def test_a_site_whose_reply_is_not_finite_drops_out_by_itself():
    broken = five()
    broken["c"].b[:] = np.nan
    engine = Dropping(ps.FedAvg(), broken, {})
    (only,) = run_rounds(ps.FedAvg(), engine, START, Plan(rounds=1, secure=ON), 0)
    assert sorted(only.replies) == list("abde") and np.isfinite(only.state.model["body.w"]).all()
    assert "not finite" in engine.incidents()[0]["what"]


def final(algorithm, **plan):
    engine = Simulator(algorithm, sites(), secure=plan.get("secure", Secure()), wire=bool(plan))
    *_, last = run_rounds(algorithm, engine, START, Plan(rounds=4, share=0.75, **plan), 0, keep_replies=False)
    return last, engine


@pytest.mark.parametrize("name", one_of_each_kind(SUMS))
def test_every_algorithm_that_needs_a_sum_gives_the_plain_result_within_rounding(name):
    plain, one = final(SUMS[name])
    secure, other = final(SUMS[name], secure=ON)
    assert sorted(plain.replies) == sorted(secure.replies) and not secure.refused and not secure.remarks
    found = zip(arrays((plain.state, one.memories())), arrays((secure.state, other.memories())), strict=True)
    assert all(x == pytest.approx(y, abs=1e-7) for x, y in found)


def test_size_and_omega_weights_are_applied_at_the_site():
    """The server is sent products and their weights, and no number of a single site."""
    algorithm = ps.Weighted({"b": 0.3})
    engine = Dropping(algorithm, five(), {})
    (only,) = run_rounds(algorithm, engine, START, Plan(rounds=1, secure=ON), 0)
    assert all(x.dtype == np.uint64 for _, p in engine.sums for tree in p.values() for x in tree.values())
    sizes = {i: s.size * (0.3 if i == "b" else 1) for i, s in five().items()}
    models = {i: ps.FedAvg().local(Payload(model=START), Payload(), s.at(0))[0]["model"] for i, s in five().items()}
    plain = tree.mean(models.values(), sizes.values())
    assert all(only.state.model[k] == pytest.approx(plain[k], abs=5 * 2.0**-33) for k in START)
    assert not only.shares and all(not r.payload for r in only.replies.values())


def test_algorithms_that_need_each_reply_are_refused_with_those_that_work():
    for name in ALGORITHMS:
        algorithm = find(name, ALGORITHMS, "algorithm")
        text = f'run.secure.use = "on"\n[algorithm]\nname = "{name}"\n'
        if facts(algorithm() if isinstance(algorithm, type) else algorithm).needs == "sum":
            assert parse(text).run.secure.on
        else:
            with pytest.raises(ConfigError, match=r"needs the reply of each site.*fedavg") as refused:
                parse(text)
            assert ", ".join(summable()) in str(refused.value)


def test_the_engine_refuses_before_any_site_trains():
    engine = Dropping(ps.Krum(f=0), five(), {})
    with pytest.raises(ConfigError, match="krum needs the reply of each site"):
        next(run_rounds(ps.Krum(f=0), engine, START, Plan(rounds=1, secure=ON), 0))
    assert not engine.sums and not any(site.fits for site in engine.known.values())
    few = {i: site for i, site in five().items() if i in "ab"}
    for took, share, where in ((few, 1.0, ", and a secure sum needs 3"), (five(), 0.4, r".*run\.share")):
        with pytest.raises(ConfigError, match=f"2 sites take part in a round{where}"):
            next(
                run_rounds(
                    ps.FedAvg(), Dropping(ps.FedAvg(), took, {}), START, Plan(rounds=1, share=share, secure=ON), 0
                )
            )
