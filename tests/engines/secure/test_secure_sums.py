"""Secure sums: exact with drop-outs, uniform for the server, and the result of plain sums within rounding."""

import math
from contextlib import suppress

import numpy as np
import pytest
from scipy import stats

from polysite import tree
from polysite.algorithms import ALGORITHMS, find
from polysite.algorithms.base import facts
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.robust import Krum
from polysite.algorithms.weighted import Weighted
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
from table import CASES, START, one_of_each_kind, sites

ON = Secure("on")
SUMS = {name: a for name, a in CASES.items() if facts(a).needs == "sum"}
KINDS = {"model": "model", "weight": "count"}
FIVE = "abcde"


# secret sharing


def test_the_modulus_is_the_prime_next_above_all_secrets():
    def is_prime(n):  # Miller and Rabin, 40 bases
        d, r = n - 1, 0
        while d % 2 == 0:
            d, r = d // 2, r + 1
        for a in range(2, 42):
            x = pow(a, d, n)
            if x not in (1, n - 1) and not any((x := pow(x, 2, n)) == n - 1 for _ in range(r - 1)):
                return False
        return True

    assert is_prime(shamir.PRIME) and not any(map(is_prime, range(2**256, shamir.PRIME)))


def test_a_threshold_of_shares_gives_the_secret_and_one_less_does_not():
    secret = new_seed()
    shares = shamir.split(secret, 3, range(1, 6))
    for some in ((1, 2, 3), (5, 1, 4), (2, 3, 4, 5)):
        assert shamir.combine({x: shares[x] for x in some}) == secret
    assert shamir.combine({x: shares[x] for x in (1, 2)}) != secret
    changed = {**shares, 2: shares[3]}
    assert shamir.combine({x: changed[x] for x in (1, 2, 3)}) != secret


def test_fewer_shares_than_the_threshold_are_uniform():
    """The first share of a constant secret, over many splits: its leading bytes are uniform."""
    drawn = [int.from_bytes(shamir.split(bytes(32), 2, [1])[1][1:3]) for _ in range(4000)]
    assert stats.kstest(np.array(drawn) / 2**16, "uniform").pvalue > 1e-4


# whole numbers


def test_whole_numbers_hold_small_and_large_values():
    values = np.array([0.0, 1.0, -1.0, 1e-15, -3.7e14, 2.0**61 + 12345, -(2.0**-60)])
    found = fixed_point.number(fixed_point.digits(values))
    assert (
        np.abs(found - values).max() <= 2.0**-61 + 1e-9
        and (found[[0, 1, 2, 4, 5, 6]] == values[[0, 1, 2, 4, 5, 6]]).all()
    )
    many = np.random.default_rng(0).normal(0, 1e6, (50, 7))
    summed = sum(fixed_point.digits(row) for row in many)
    assert fixed_point.number(summed) == pytest.approx([math.fsum(column) for column in many.T], rel=1e-15)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [([np.inf], "not finite"), ([np.nan], "not finite"), ([1e10], "lower it")],
)
def test_what_does_not_fit_whole_numbers_is_refused(values, sentence):
    with pytest.raises(PayloadError, match=sentence):
        fixed_point.encode(KINDS, Payload(model={"w": np.array(values)}, weight=3), 32, 5)


# masks


def relayed(names=FIVE, fewest=3, reveal="majority"):
    """Sessions of sites that have exchanged keys and shares."""
    told = Payload(session=packed({"id": bytes(16)}))
    opened = {i: open_session(told, i, fewest, reveal=reveal) for i in names}
    keys = {i: unpacked(answer["keys"]) for i, (_, answer) in opened.items()}
    every = {
        field: packed({i: k[name] for i, k in keys.items()})
        for name, field in (("mask", "mask_keys"), ("share", "share_keys"), ("digest", "digests"))
    }
    dealt = {i: take_step("shares", Payload(**{**told, **every}), s) for i, (s, _) in opened.items()}
    sealed = {i: unpacked(answer["sealed"]) for i, (_, answer) in dealt.items()}
    mine = {i: Payload(**told, sealed=packed({j: sealed[j][i] for j in names if j != i})) for i in names}
    return {i: take_step("members", mine[i], s)[0] for i, (s, _) in dealt.items()}


def revealing(*answered):
    return Payload(session=packed({"id": bytes(16)}), answered=packed(dict.fromkeys(answered, b"")))


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


def test_masks_cancel_in_the_sum_of_all_but_the_own_ones():
    sessions = relayed()
    rng = np.random.default_rng(0)
    replies = {i: Payload(model={"w": rng.normal(size=(3, 5))}, weight=k + 1) for k, i in enumerate(FIVE)}
    total = sum(Mask(sessions[i], 32).apply(KINDS, Payload(), replies[i])["model"]["w"] for i in FIVE)
    own = [total.reshape(-1)]
    weights = np.zeros(fixed_point.DIGITS, np.uint64)
    add_masks([own[0], weights], [(s.seed, -1) for s in sessions.values()])
    exact = sum(fixed_point.encode(KINDS, replies[i], 32, 5)["model"]["w"] for i in FIVE)
    assert (own[0].reshape(3, 5) == exact).all()


def test_a_site_reveals_one_kind_of_share_for_every_other_and_tells_one_story():
    session = relayed()["a"]
    told, answer = take_step("reveal", revealing("a", "b", "c"), session)
    assert sorted(answer["seeds"]) == ["a", "b", "c"] and sorted(answer["keys"]) == ["d", "e"]
    assert take_step("reveal", revealing("a", "b", "c"), told)[1] == answer
    for others in (("a", "b", "c", "d"), ("a", "d", "e")):
        with pytest.raises(PayloadError, match="another list"):
            take_step("reveal", revealing(*others), told)
    with pytest.raises(PayloadError, match="closed"):
        Mask(told, 32).apply(KINDS, Payload(), Payload(model={"w": np.ones(1)}, weight=1))


def secrets_of(sessions, stories):
    """What a server learns of site a that tells every site its own story about who answered; e gives it both shares."""
    seeds, keys = {}, {}
    for i, answered in stories.items():
        with suppress(PayloadError):
            got = take_step("reveal", revealing(*answered), sessions[i])[1]
            seeds |= {sessions[i].place(i): x for j, x in unpacked(got["seeds"]).items() if j == "a"}
            keys |= {sessions[i].place(i): x for j, x in unpacked(got["keys"]).items() if j == "a"}
    for answered in ("abcde", "bcde"):  # the conspirator answers both
        got = take_step("reveal", revealing(*answered), sessions["e"])[1]
        for found, name in ((seeds, "seeds"), (keys, "keys")):
            found |= {sessions["e"].place("e"): x for j, x in unpacked(got[name]).items() if j == "a"}
    return shamir.combine(seeds), shamir.combine(keys)


def test_it_takes_more_than_a_third_of_the_sites_to_unmask_one_with_shares_of_two_thirds():
    """With a majority of five, a lying server and one site are enough, which docs/protection.md says."""
    stories = {"a": "abcde", "b": "abcde", "c": "bcde", "d": "bcde"}
    for reveal, unmasked in (("majority", True), ("two_thirds", False)):
        sessions = relayed(reveal=reveal)
        seed, key = secrets_of(sessions, stories)
        assert (seed == sessions["a"].seed and key == sessions["a"].mask_key) is unmasked
        assert (seed == sessions["a"].seed or key == sessions["a"].mask_key) is unmasked


@pytest.mark.parametrize("gone", [{}, {"a": "train"}, {"b": "reveal"}], ids=str)
def test_shares_of_two_thirds_give_the_same_sum_with_one_drop_out_of_five(gone):
    strict = Secure("on", reveal="two_thirds")
    engine = Dropping(FedAvg(), five(), gone)
    engine.secure = strict
    (only,) = run_rounds(FedAvg(), engine, START, Plan(rounds=1, secure=strict), 0)
    (usual,) = run_rounds(FedAvg(), Dropping(FedAvg(), five(), gone), START, Plan(rounds=1, secure=ON), 0)
    assert not only.remarks and all(np.array_equal(only.state.model[k], usual.state.model[k]) for k in START)


@pytest.mark.parametrize(
    ("answered", "sentence"),
    [(("a", "b"), "needs 3"), (("b", "c", "d"), "not one of this sum"), (("a", "b", "x"), "not one of this sum")],
)
def test_a_site_refuses_to_reveal_a_sum_of_few_or_of_strangers(answered, sentence):
    with pytest.raises(PayloadError, match=sentence):
        take_step("reveal", revealing(*answered), relayed()["a"])


def test_shares_that_were_changed_on_the_way_are_refused():
    told = Payload(session=packed({"id": bytes(16)}))
    opened = {i: open_session(told, i, 3) for i in "abc"}
    keys = {i: unpacked(answer["keys"]) for i, (_, answer) in opened.items()}
    every = {
        field: packed({i: k[name] for i, k in keys.items()})
        for name, field in (("mask", "mask_keys"), ("share", "share_keys"), ("digest", "digests"))
    }
    dealt = {i: take_step("shares", Payload(**{**told, **every}), s) for i, (s, _) in opened.items()}
    blobs = {j: unpacked(dealt[j][1]["sealed"])["a"] for j in "bc"}
    blobs["b"] = blobs["b"][:-1] + bytes([blobs["b"][-1] ^ 1])
    with pytest.raises(PayloadError, match="changed on the way"):
        take_step("members", Payload(**told, sealed=packed(blobs)), dealt["a"][0])
    swapped = {"b": unpacked(dealt["c"][1]["sealed"])["a"], "c": unpacked(dealt["c"][1]["sealed"])["a"]}
    with pytest.raises(PayloadError, match="changed on the way"):
        take_step("members", Payload(**told, sealed=packed(swapped)), dealt["a"][0])


def test_a_key_of_another_site_in_its_own_place_is_refused():
    told = Payload(session=packed({"id": bytes(16)}))
    session, answer = open_session(told, "a", 3)
    keys = unpacked(answer["keys"])
    others = {i: unpacked(open_session(told, i, 3)[1]["keys"]) for i in "bc"}
    wrong = {"a": {**keys, "mask": others["b"]["mask"]}, **others}
    every = {
        field: packed({i: k[name] for i, k in wrong.items()})
        for name, field in (("mask", "mask_keys"), ("share", "share_keys"), ("digest", "digests"))
    }
    with pytest.raises(PayloadError, match="not those that it sent"):
        take_step("shares", Payload(**{**told, **every}), session)


# in a run


class Dropping(Simulator):
    """Sites that are gone at some step: {site: step}."""

    def __init__(self, algorithm, sites, gone, **more):
        super().__init__(algorithm, sites, secure=ON, **more)
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


@pytest.mark.parametrize(
    "gone",
    [
        {},
        {"a": "train"},
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
    engine, everyone = Dropping(FedAvg(), five(), gone), five()
    (only,) = run_rounds(FedAvg(), engine, START, Plan(rounds=1, secure=ON), 0)
    heard = [i for i in FIVE if gone.get(i) not in ("keys", "shares", "train")]
    assert sorted(only.replies) == heard and not only.refused and not only.remarks
    replies = {i: FedAvg().local(Payload(model=START), Payload(), everyone[i].at(0))[0] for i in heard}
    members = len([i for i in FIVE if gone.get(i) not in ("keys", "shares")])
    encoded = [fixed_point.encode(KINDS, replies[i], 32, members) for i in heard]
    exact = {k: sum(e["model"][k].view(np.int64).astype(object) for e in encoded) for k in START}
    weight = sum(everyone[i].size for i in heard)
    for k, whole in exact.items():
        assert only.state.model[k] == np.array([float(whole[0]) / 2**32 / weight])
    plain = tree.mean([replies[i]["model"] for i in heard], [everyone[i].size for i in heard])
    assert all(only.state.model[k] == pytest.approx(plain[k], abs=len(heard) * 2.0**-33) for k in START)


@pytest.mark.parametrize("gone", [dict.fromkeys("abc", "train"), dict.fromkeys("abc", "reveal")], ids=str)
def test_three_drop_outs_of_five_leave_no_sum_and_change_nothing(gone):
    (only,) = run_rounds(FedAvg(), Dropping(FedAvg(), five(), gone), START, Plan(rounds=1, secure=ON), 0)
    assert only.state.model is START or all(np.array_equal(only.state.model[k], START[k]) for k in START)
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
    (only,) = run_rounds(FedAvg(), Lying(FedAvg(), five(), {"d": "train"}), START, Plan(rounds=1, secure=ON), 0)
    (right,) = run_rounds(FedAvg(), Dropping(FedAvg(), five(), {"d": "train"}), START, Plan(rounds=1, secure=ON), 0)
    assert all(np.array_equal(only.state.model[k], right.state.model[k]) for k in START)


class Odd(Dropping):
    """Site b sends a masked reply of another form, site c an open one."""

    def train(self, round, sent):
        for i, reply in super().train(round, sent):
            model = reply.payload["model"]
            if i == "b":
                model = {k: np.zeros(7, np.uint64) for k in model}
            if i == "c":
                model = START
            yield i, reply if i not in "bc" else type(reply)(Payload(**{**reply.payload, "model": model}), (), 1.0, 8)


def test_a_reply_without_masks_or_of_another_form_is_refused_and_the_rest_is_summed():
    (only,) = run_rounds(FedAvg(), Odd(FedAvg(), five(), {}), START, Plan(rounds=1, secure=ON), 0)
    (right,) = run_rounds(
        FedAvg(), Dropping(FedAvg(), five(), {"b": "train", "c": "train"}), START, Plan(rounds=1, secure=ON), 0
    )
    assert sorted(only.refused) == ["b", "c"] and "not masked" in only.refused["c"]
    assert all(np.array_equal(only.state.model[k], right.state.model[k]) for k in START)


class Sick(Quadratic):
    def fit(self, *args, **options):
        fit = super().fit(*args, **options)
        return type(fit)(**{**{f: getattr(fit, f) for f in fit.__slots__}, "params": tree.scale(fit.params, np.nan)})


def test_a_site_whose_reply_is_not_finite_drops_out_by_itself():
    broken = {**five(), "c": Sick(1.0, np.zeros(4), start=START)}
    engine = Dropping(FedAvg(), broken, {})
    (only,) = run_rounds(FedAvg(), engine, START, Plan(rounds=1, secure=ON), 0)
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
    left = [np.concatenate([np.ravel(x) for x in leaves(v)] or [np.zeros(0)]) for v in (plain.state, one.memories())]
    right = [
        np.concatenate([np.ravel(x) for x in leaves(v)] or [np.zeros(0)]) for v in (secure.state, other.memories())
    ]
    for a, b in zip(left, right, strict=True):
        assert len(a) == len(b) and np.abs(a - b).max(initial=0.0) < 1e-7


def leaves(value):
    if isinstance(value, np.ndarray | float | int):
        yield np.asarray(value, float)
    elif hasattr(value, "__dataclass_fields__"):
        for f in value.__dataclass_fields__:
            yield from leaves(getattr(value, f))
    elif hasattr(value, "items"):
        for k in sorted(value):
            yield from leaves(value[k])


def test_size_and_omega_weights_are_applied_at_the_site():
    """The server is sent products and their weights, and no number of a single site."""
    algorithm = Weighted({"b": 0.3})
    engine = Dropping(algorithm, five(), {})
    (only,) = run_rounds(algorithm, engine, START, Plan(rounds=1, secure=ON), 0)
    assert all(x.dtype == np.uint64 for _, p in engine.sums for tree in p.values() for x in tree.values())
    sizes = {i: s.size * (0.3 if i == "b" else 1) for i, s in five().items()}
    models = {i: FedAvg().local(Payload(model=START), Payload(), s.at(0))[0]["model"] for i, s in five().items()}
    plain = tree.mean(models.values(), sizes.values())
    assert all(only.state.model[k] == pytest.approx(plain[k], abs=5 * 2.0**-33) for k in START)
    assert not only.shares and all(not r.payload for r in only.replies.values())


# refusals


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_that_needs_each_reply_is_refused_with_those_that_work(name):
    algorithm = find(name, ALGORITHMS, "algorithm")
    algorithm = algorithm() if isinstance(algorithm, type) else algorithm
    text = f'run.secure.use = "on"\n[algorithm]\nname = "{name}"\n'
    if facts(algorithm).needs == "sum":
        assert parse(text).run.secure.on
        return
    with pytest.raises(ConfigError, match="needs the reply of each site") as refused:
        parse(text)
    assert ", ".join(summable()) in str(refused.value) and "fedavg" in str(refused.value)


def test_an_algorithm_that_needs_each_reply_is_refused_by_the_engine_before_any_site_trains():
    engine = Dropping(Krum(f=0), five(), {})
    with pytest.raises(ConfigError, match="krum needs the reply of each site"):
        next(run_rounds(Krum(f=0), engine, START, Plan(rounds=1, secure=ON), 0))
    assert not engine.sums and not any(site.fits for site in engine.sites.values())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ('compress = "half"', "leave out run.compress or run.secure"),
        ('guard.use = "on"', "run.guard judges each reply"),
        ("pooled = true", "run.pooled has one site"),
        ("secure.fewest = 2", "must be at least 3"),
        ("secure.fraction = 60", "between 16 and 48"),
    ],
)
def test_what_does_not_go_with_secure_sums_is_refused_when_the_study_is_read(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(f'[run]\nsecure.use = "on"\n{settings}\n')


def test_too_few_sites_are_refused_before_any_trains():
    few = {i: s for i, s in five().items() if i in "ab"}
    with pytest.raises(ConfigError, match="2 sites take part in a round, and a secure sum needs 3"):
        next(run_rounds(FedAvg(), Simulator(FedAvg(), few, secure=ON), START, Plan(rounds=1, secure=ON), 0))
    with pytest.raises(ConfigError, match=r"2 sites take part.*run\.share"):
        next(run_rounds(FedAvg(), Dropping(FedAvg(), five(), {}), START, Plan(rounds=1, share=0.4, secure=ON), 0))
