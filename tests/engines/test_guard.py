"""The guard: closed forms of clipping, cap and factor; held and summed replies; the best round by voices."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

import polysite as ps
from hostile import CLAIMED, Hostile
from phased import play
from polysite.engines import checkpoint
from polysite.engines.best_round import advantage, surprises
from polysite.engines.guard import capped
from polysite.engines.guard_state import Guard
from polysite.engines.phases import Phase
from polysite.engines.plan import Plan
from polysite.engines.record import RoundRecord
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, Paused
from polysite.site import Fit
from quadratic import Quadratic
from table import same

WIDE = 64  # parameters; fewer than a sketch has numbers, so cosines are exact
ON = Guard(use="on")
ZERO = {"w": np.zeros(WIDE), "norm.running_var": np.ones(1)}
FIRST, SECOND = np.eye(WIDE)[:2]


@dataclass
class Steady(Quadratic):
    """A site that changes the model by the same amount in every round."""

    change: np.ndarray = field(default_factory=lambda: FIRST)
    variance: float = 1.0

    def fit(self, params, *given, **more):
        changed = {"w": params["w"] + self.change, "norm.running_var": params["norm.running_var"] * self.variance}
        self.fits.append(Fit(changed, 1.0, 1, 1.0, 1.0))
        return self.fits[-1]

    def score(self, params, cases):
        return {}


def steady(changes, sizes=None, **more):
    sizes = sizes or dict.fromkeys(changes, 4)
    return {i: Steady(1.0, np.zeros(sizes[i]), change=np.asarray(c), **more) for i, c in changes.items()}


def played(sites, algorithm=ps.FedAvg(), rounds=3, guard=ON, keep=False, engine=Simulator, resume=None, start=ZERO):
    transport = engine(algorithm, sites)
    plan = Plan(rounds=rounds, guard=guard)
    return list(run_rounds(algorithm, transport, start, plan, 0, keep_replies=keep, resume=resume))


def test_a_long_change_is_shortened_to_twice_the_usual_length_and_recorded():
    rounds = played(steady({**dict.fromkeys("abcd", FIRST), "e": 10 * FIRST}))
    for n, r in enumerate(rounds, start=1):
        assert r.state.model["w"] == pytest.approx(n * 6 / 5 * FIRST)
        assert {i: dict(g.clipped) for i, g in r.guard.items() if g.clipped} == {"e": {"model": pytest.approx(0.2)}}
        assert r.guard["e"].lengths["model"] == pytest.approx(10) and r.guard["e"].longest["model"] == pytest.approx(2)
    assert [len(r.alarms) for r in rounds] == [1, 0, 0] and "10 times as long" in rounds[0].alarms[0][1]
    line = rounds[0].record(0, False)
    plain = json.loads(line.to_json())
    plain["guard"]["e"] |= {"harm": 0.1, "judges": 3}  # of an earlier version
    assert RoundRecord.from_plain(plain).guard == line.guard and line.incidents[0]["site"] == "e"


def test_running_statistics_are_limited_by_themselves():
    sites = steady(dict.fromkeys("abcd", FIRST), variance=1.1)
    sites["e"] = Steady(1.0, np.zeros(4), change=FIRST, variance=1001.0)
    (first, *_) = played(sites)
    assert first.guard["e"].clipped.keys() == {"model statistics"}
    assert first.state.model["norm.running_var"] == pytest.approx(1 + (4 * 0.1 + 0.2) / 5)


def test_no_site_has_more_than_its_share():
    changes = {**dict.fromkeys("abcd", FIRST), "e": 1.5 * FIRST}
    r = played(steady(changes, {**dict.fromkeys("abcd", 4), "e": 100}))[-1]
    assert r.state.model["w"] == pytest.approx(3 * (0.55 + 0.45 * 1.5) * FIRST)
    assert r.shares["e"] == pytest.approx(0.45) and r.guard["e"].capped_share == pytest.approx(0.45)
    assert r.guard["e"].claimed_share == pytest.approx(100 / 116) and r.guard["a"].capped_share is None
    assert r.replies["e"].payload["weight"] == 100  # the record has what the site claimed


def test_shares_are_limited_together():
    given = capped({"a": 900.0, "b": 800.0, "c": 3.0, "d": 1.0}, 0.4)
    assert given == {"a": pytest.approx(8.0), "b": pytest.approx(8.0), "c": 3.0, "d": 1.0}
    assert capped({"a": 9.0, "b": 1.0}, 1.0) == {"a": 9.0, "b": 1.0}  # of two sites, 2/K is everything


def test_a_site_that_opposes_the_others_hardly_counts():
    r, *_ = rounds = played(steady({**dict.fromkeys("abcd", FIRST), "e": -FIRST}))
    assert r.state.model["w"] == pytest.approx((4 - 0.05) / 4.05 * FIRST)
    assert r.guard["e"].factor == 0.05 and r.guard["e"].cosine == pytest.approx(-1) and r.guard["a"].factor == 1
    assert r.alarms[0][0] == "e" and "lack the direction of the other sites" in r.alarms[0][1]
    assert len(rounds[2].alarms) == 0  # it was said
    (unweighted,) = played(steady({**dict.fromkeys("abcd", FIRST), "e": -FIRST}), ps.Median(), 1, keep=True)
    assert unweighted.state.model["w"] == pytest.approx(FIRST) and unweighted.guard["e"].factor == 0.05


def test_hospitals_that_are_merely_different_keep_their_weight():
    """They share a fifth of their direction, in the sense of the cosine, and have unlike lengths and sizes."""
    rng = np.random.default_rng(0)
    rows = [(FIRST + 2 * v) * (0.7 + 0.1 * n) for n, v in enumerate(_units(rng, 5))]
    sites = steady(dict(zip("abcde", rows, strict=True)))
    rounds = played(sites, rounds=12)
    assert not any(r.alarms for r in rounds)
    assert {g.factor for r in rounds for g in r.guard.values()} == {1.0}
    plain = played(sites, rounds=12, guard=Guard())
    assert same(plain[-1].state, rounds[-1].state) and not plain[-1].guard  # nothing was changed


def _units(rng, count):
    rows = rng.standard_normal((count, WIDE))
    rows[:, 0] = 0
    return rows / np.linalg.norm(rows, axis=1)[:, None]


def test_a_site_that_goes_its_own_way_is_noticed_though_it_agrees_a_little():
    """Differences of the others are random; what sets this one apart is the same in every round."""
    rng = np.random.default_rng(1)

    class Noisy(Steady):
        def fit(self, params, *given, **more):
            self.change = FIRST + _units(rng, 1)[0]
            return super().fit(params, *given, **more)

    sites = {i: Noisy(1.0, np.zeros(4)) for i in "abcd"} | steady({"e": 0.7 * FIRST + 1.2 * SECOND})
    first, *_, last = played(sites, rounds=6, keep=True)
    assert first.guard["e"].factor == 1 and last.guard["e"].factor == 0.05
    assert last.guard["e"].persistence > 0.6 > 0.3 > last.guard["a"].persistence
    assert {last.guard[i].factor for i in "abcd"} == {1.0}


def test_sites_with_different_models_are_not_compared():
    groups = ps.Clustered({"one": ("a", "b", "c", "x"), "two": ("d", "e", "f")})
    sites = steady({**dict.fromkeys("abcx", FIRST), **dict.fromkeys("def", -FIRST)})
    for r in played(sites, ps.Weighted({"a": 0.5}, groups)):
        assert [g.cosine for g in r.guard.values()] == pytest.approx([1.0] * 7)
    assert played(sites)[0].guard["d"].cosine < 0


ATTACKED = steady(dict(zip("abcde", [*(FIRST + 0.5 * _units(np.random.default_rng(2), 4)), FIRST], strict=True)))
ONES = {**ZERO, "w": np.ones(WIDE)}


@pytest.mark.parametrize("attack", ["quiet flip", "scaled update", "weight lie", "aware"])
def test_summed_replies_have_the_bits_of_held_ones_also_after_a_pause(attack, tmp_path):
    def play(rounds=4, **given):
        engine = lambda algorithm, sites: Hostile(algorithm, sites).attacked(attack, ("e",))  # noqa: E731
        return played(ATTACKED, rounds=rounds, engine=engine, start=ONES, **given)

    held, summed, part = play(keep=True), play(), play(2)[-1]
    assert all(same(a.state, b.state) and a.guard == b.guard for a, b in zip(held, summed, strict=True))
    assert held[-1].guard["e"].clipped or held[-1].guard["e"].factor < 1 or attack == "aware"
    checkpoint.save(tmp_path / "at.safetensors", Progress(1, part.state, {}, guard=part.guard_state))
    rest = play(resume=checkpoint.load(tmp_path / "at.safetensors"))
    assert same(rest[-1].state, held[-1].state) and rest[-1].guard == held[-1].guard


def test_the_settings_are_checked():
    with pytest.raises(ConfigError, match="between 1 and 1e"):
        Guard(clip=0.5)


# the best round is chosen by voices


def test_gains_are_trimmed_at_both_ends():
    best = dict.fromkeys("abcdefg", 0.5)
    assert advantage({"a": 0.6, "b": 0.7, "c": 0.65, "d": 1.0, "e": 0.0}, best) == pytest.approx(0.15)
    assert advantage({"a": 0.6, "b": 0.4}, best) == pytest.approx(0.0)  # of two gains, none is trimmed
    assert advantage({"a": 0.4, "b": 0.6, "c": 0.7}, best) == pytest.approx(0.1)  # three: the median
    assert advantage({i: 0.5 + k / 100 for k, i in enumerate(best)}, best) == pytest.approx(0.03)
    assert advantage({"x": 0.7}, {"y": 0.6}) == pytest.approx(0.1) and advantage({"x": 0.7}, {}) > 0


def test_jumps_and_other_numbers_of_cases_are_told():
    before = dict.fromkeys("abcde", (4, 0.5))
    now = dict.fromkeys("abcde", (4, 0.55)) | {"d": (2000, 0.55), "e": (4, 0.95)}
    assert dict(surprises(before, now)) == {
        "d": "scores 2000 validation cases instead of 4",
        "e": "its mean score jumps from 0.500 to 0.950, while that of the other sites changes by +0.050",
    }
    assert not dict(surprises(before, dict.fromkeys("abcde", (4, 0.9))))  # all of them learnt something


def run(path, use, until=None):
    sites = {i: Quadratic(1.0, np.full(4, 0.1 * k)) for k, i in enumerate("abcde")}
    transport = Hostile(ps.FedAvg(), sites).attacked("score lie", "e")
    plan = Plan(rounds=6, guard=Guard(use=use), checkpoint_every=1)
    return play(path, [Phase(ps.FedAvg(), transport, plan)], until=until)


def test_a_hospital_that_praises_a_bad_round_does_not_choose_it_after_a_pause_either(tmp_path):
    believed, _ = run(tmp_path / "off", "off")
    assert believed.best_round == 0 and len(believed.validation["e"]) == CLAIMED  # 2000 of 2016 cases
    with pytest.raises(Paused):
        run(tmp_path / "on", "on", until=2)
    result, folder = run(tmp_path / "on", "on")
    records = folder.records()
    assert result.best_round == 5 and [r.best_round for r in records] == list(range(6))
    assert records[0].mean_score < 0.6  # every hospital counts once
    assert [i["site"] for r in records for i in r.incidents if "jumps" in i["what"]] == ["e"]
