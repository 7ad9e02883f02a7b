"""The cross-check: closed forms of harm; who is found, and when; summed replies, checkpoints."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hostile import Hostile
from polysite.algorithms.fedavg import FedAvg
from polysite.engines import checkpoint
from polysite.engines.cross_check import PRIOR, findings
from polysite.engines.directions import Direction, Signs
from polysite.engines.guard import RoundGuard
from polysite.engines.guard_state import PAROLE, SOUND, SPOKEN, TOLERATED, Evidence, Guard, GuardState
from polysite.engines.jury import Ballot, draw
from polysite.engines.plan import Plan
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.site import CaseScore, Fit
from quadratic import Quadratic
from table import same

WIDE = 64
ON = Guard(use="on")
TASK, UNLIKE = np.eye(WIDE)[:2]
LEARNT = 2.0


def ballots(effects, jurors, rounds=1, lie=None, learnt=LEARNT):
    """Ballots of sites with these effects, with two votes in a round; a liar reports the opposite."""
    sites, history = sorted(effects), []
    for k in range(rounds):
        before = [b.signs for cast in history for b in cast]
        first = draw([sites], sites, len(sites), (5, k, 0), before)
        second = draw([sites], sites, len(sites), (5, k, 1), [*before, *first.values()], first)
        votes = [(h, signs[h]) for signs in (first, second) for h in jurors]
        cast = [(h, s, sum(x * effects[i] for i, x in s.items()) * (-1 if h == lie else 1)) for h, s in votes]
        history.append(tuple(Ballot(h, s, learnt * y, learnt) for h, s, y in cast))
    return history


def harms(history):
    return {i: found.harm for i, found in findings(history).items()}


@pytest.mark.parametrize("sites", ["abcde", "abcdefg"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_harm_is_the_effect_as_a_share_of_what_was_learnt(sites, rounds):
    effects = dict.fromkeys(sites, 0.0) | {"e": 0.8}
    found = findings(ballots(effects, sites, rounds))
    learnt = (1.0 if rounds == 1 else 1.9) * LEARNT  # the older round counts by 0.9
    assert found["e"].harm == pytest.approx(0.8 * learnt / (learnt + PRIOR), abs=0.02)
    assert found["e"].learnt == pytest.approx(learnt if rounds == 2 else LEARNT)
    assert all(abs(found[i].harm) < 0.02 for i in sites if i != "e")


@pytest.mark.parametrize("rounds", [1, 2])
def test_several_sites_that_do_harm_are_told_apart(rounds):
    found = harms(ballots(dict.fromkeys("abcdf", 0.0) | {"e": 0.8, "g": 0.6}, "abcdefg", rounds))
    assert found["e"] > 0.7 and found["g"] > 0.5 and all(abs(found[i]) < 0.02 for i in "abcdf")


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_juror_that_lies_is_outvoted(rounds):
    effects = dict.fromkeys("abcd", 0.0) | {"e": 0.8}
    for liar in "de":
        found = harms(ballots(effects, "abcde", rounds, lie=liar))
        assert found["e"] > 0.6 and all(found[i] < TOLERATED for i in "abcd")


def test_a_juror_that_has_learnt_nothing_is_not_heard():
    """A liar that calls good models bad says that its own model is worse than the zero model."""
    effects = dict.fromkeys("abcdf", 0.0) | {"e": 0.5, "g": 0.5}
    told = ballots(effects, "abcdefg")[0]
    honest = tuple(b for b in told if b.juror not in "eg")
    false = tuple(replace(b, difference=-b.difference, learnt=-b.learnt) for b in told if b.juror in "eg")
    expected = harms([honest])
    assert harms([honest + false]) == pytest.approx(expected, abs=1e-3) and min(expected[i] for i in "eg") > 0.4
    mild = tuple(replace(b, learnt=-b.learnt) for b in false)
    assert harms([honest + mild]) != pytest.approx(expected, abs=1e-3)
    assert max(abs(harm) for harm in harms([false]).values()) < 1e-3


def test_a_site_that_turns_hostile_is_found_by_the_newest_round_alone():
    history = ballots(dict.fromkeys("abcde", 0.0), "abcde", 6) + ballots(
        dict.fromkeys("abcd", 0.0) | {"e": 0.8}, "abcd"
    )
    found = harms(history)
    assert found["e"] > 0.7 and all(abs(found[i]) < 0.02 for i in "abcd")


def test_nobody_is_blamed_before_anything_is_learnt():
    effects = dict.fromkeys("abcd", 0.0) | {"e": 0.8}
    early = ballots(effects, "abcd", learnt=0.005)
    assert max(harms(early).values()) < TOLERATED < harms(ballots(effects, "abcd"))["e"] and findings([]) == {}
    state = GuardState().judged(ON, early[0], {})
    assert all(state.undecided(i) for i in "abcde") and state.learnt["e"] < SPOKEN and not state.undecided("f")
    assert not GuardState().judged(ON, ballots(effects, "abcd")[0], {}).undecided("e")


def test_an_acquittal_overrides_the_direction_and_a_conviction_acts_at_once():
    """A site that goes its own way counts less only where no jury judges; of one that turned around, less is borne."""
    doubtful = GuardState(evidence=dict.fromkeys("abcde", Evidence(agreement=-0.1, amount=0.2)))
    assert doubtful.standing("e") < SOUND and doubtful.factor(ON, "e") == 0.05
    acquitted = doubtful.judged(ON, ballots(dict.fromkeys("abcd", 0.0) | {"e": 0.1}, "abcde")[0], {})
    assert {acquitted.factor(ON, i) for i in "abcde"} == {1.0}
    turned = Evidence().after(Direction(0.2, 0.2, np.zeros(1))).after(Direction(-0.2, 0.2, np.zeros(1)))
    late = replace(acquitted, evidence={"e": turned})
    assert turned.turned and acquitted.harms["e"] == pytest.approx(0.098, abs=0.002) and late.factor(ON, "e") < 0.5
    assert not Evidence().after(Direction(0.2, 0.2, np.zeros(1))).after(Direction(0.0, 0.2, np.zeros(1))).turned
    convicted = GuardState().judged(ON, ballots(dict.fromkeys("abcd", 0.0) | {"e": 0.6}, "abcde")[0], {})
    assert convicted.factor(ON, "e") == 0.05 and {convicted.factor(ON, i) for i in "abcd"} == {1.0}


@dataclass
class Hospital(Quadratic):
    """A site with its own optimum; its loss is 1 for the zero model and 0 there."""

    aim: np.ndarray = field(default_factory=lambda: TASK)
    rate: float = 0.3

    def fit(self, params, *given, **more):
        changed = {"w": params["w"] + self.rate * (self.aim - params["w"])}
        self.fits.append(Fit(changed, 1.0, 1, 1.0, 1.0))
        return self.fits[-1]

    def score(self, params, cases):
        loss = float(np.sum((params["w"] - self.aim) ** 2) / np.sum(self.aim**2))
        return {n: CaseScore({"L": max(1 - loss, 0.0)}, loss) for n in cases}


def hospitals(rate=0.3, **aims):
    random = np.random.default_rng(0)
    usual = {i: TASK + 0.3 * random.standard_normal(WIDE) / WIDE**0.5 for i in "abcd"}
    return {i: Hospital(1.0, np.zeros(4), aim=aim, rate=rate) for i, aim in (usual | aims).items()}


def played(sites, rounds=6, keep=False, resume=None, attack="", guard=ON, every=1):
    transport = Hostile(FedAvg(), sites).attacked(attack, ("e",)) if attack else Simulator(FedAvg(), sites)
    plan = Plan(rounds=rounds, guard=guard, validate_every=every)
    start = {"w": np.full(WIDE, 0.01)}
    return list(run_rounds(FedAvg(), transport, start, plan, 0, keep_replies=keep, resume=resume))


def test_inverted_labels_are_found_by_the_harm_that_they_do():
    rounds = played(hospitals(e=-TASK))
    assert all(r.guard["e"].harm > 0.5 and r.guard["e"].judges == 4 and r.guard["e"].factor == 0.05 for r in rounds)
    assert max(r.guard[i].harm for r in rounds for i in "abcd") < TOLERATED
    sentences = [sentence for r in rounds for site, sentence in r.alarms if site == "e"]
    assert any("worse on the validation cases of the other sites" in s for s in sentences)


def test_reversed_changes_are_found_before_the_first_merge():
    """The first merged model is that of the others, but for the least factor."""
    (first,) = played(hospitals(e=TASK), 1, attack="quiet flip")
    assert first.guard["e"].factor == 0.05 and {first.guard[i].factor for i in "abcd"} == {1.0}
    changes = {i: 0.3 * (site.aim - 0.01) for i, site in hospitals(e=TASK).items()}
    expected = (sum(changes[i] for i in "abcd") - 0.05 * changes["e"]) / 4.05
    assert first.state.model["w"] == pytest.approx(0.01 + expected)


@pytest.mark.parametrize("keep", [True, False], ids=["held", "summed"])
def test_a_change_that_opposes_the_others_calls_a_jury_in_a_round_that_has_none(keep):
    """The sleeper awakes in the fifth round; a jury is due in the first three and in the last."""
    rounds = played(hospitals(0.1, e=TASK), 8, keep, attack="sleeper", every=100)
    assert [r.guard["a"].judges > 0 for r in rounds][:5] == [True, True, True, False, True]
    assert [r.guard["e"].factor for r in rounds] == [1, 1, 1, 1, 0.05, 0.05, 0.05, 0.05]
    assert any("worse on the validation cases" in sentence for site, sentence in rounds[4].alarms if site == "e")


def test_an_honest_hospital_with_other_outlines_keeps_its_weight():
    rounds = played(hospitals(e=TASK + 0.7 * UNLIKE), 12)
    assert {g.factor for r in rounds for g in r.guard.values()} == {1.0}
    plain = played(hospitals(e=TASK + 0.7 * UNLIKE), 12, guard=Guard())
    assert same(plain[-1].state, rounds[-1].state)


def test_while_nothing_is_learnt_no_claim_and_no_length_helps():
    """If all models score the same, the jury has no verdict: weights and lengths are limited to the median."""
    sites = hospitals(e=TASK)
    sites["e"] = Hospital(1.0, np.zeros(400), aim=TASK)
    for site in sites.values():
        site.score = lambda params, cases: {n: CaseScore({"L": 0.0}, 1.0) for n in cases}
    r = played(sites, 1)[0]
    assert r.shares == pytest.approx(dict.fromkeys("abcde", 0.2)) and {g.harm for g in r.guard.values()} == {0.0}
    usual = np.median([g.lengths["model"] for g in r.guard.values()])
    assert {g.longest["model"] for g in r.guard.values()} == {usual}


def test_a_weight_above_the_median_is_to_be_earned():
    """Harm times weight is limited: half of what is tolerated allows twice the median, no harm any weight."""
    sent = dict.fromkeys("abcde", Payload(model={"w": np.zeros(1)}))
    state = GuardState(harms={**dict.fromkeys("abcd", 0.0), "e": TOLERATED / 2})
    for site, expected in (("e", 8.0), ("a", 11.0)):
        guard = RoundGuard(Guard(use="on", cap=1.0), state, FedAvg().reply, sent, Signs(0), {})
        claimed = {**dict.fromkeys("abcde", 4.0), site: 11.0}
        assert guard.weights(claimed) == {**claimed, site: pytest.approx(expected)}


def test_a_suspect_gets_its_weight_back_slowly():
    state = GuardState(harms={"e": 0.6})
    innocent = ballots(dict.fromkeys("abcde", 0.0), "abcde")[0]
    state = state.judged(ON, innocent, {})
    seen = []
    for _ in range(40):
        state = state.judged(ON, innocent, {})
        seen.append(state.harms["e"])
    assert seen[:10] == pytest.approx([0.6 * PAROLE**k for k in range(2, 12)]) and abs(seen[-1]) < 0.01
    assert len(state.ballots) == 12


@pytest.mark.parametrize("attack", ["quiet flip", "sleeper", "aware", "score lie"])
def test_summed_replies_have_the_bits_of_held_ones(attack):
    held, summed = (played(hospitals(e=TASK), 6, keep, attack=attack) for keep in (True, False))
    assert all(same(a.state, b.state) and a.guard == b.guard for a, b in zip(held, summed, strict=True))
    assert held[-1].guard["a"].harm is not None


def test_harm_survives_a_checkpoint(tmp_path):
    sites = hospitals(e=-TASK)
    whole, part = played(sites), played(sites, 3)[-1]
    checkpoint.save(tmp_path / "at.safetensors", Progress(2, part.state, {}, guard=part.guard_state))
    rest = played(sites, resume=checkpoint.load(tmp_path / "at.safetensors"))
    assert same(rest[-1].state, whole[-1].state) and rest[-1].guard == whole[-1].guard


def test_without_validation_cases_or_without_a_jury_nobody_judges():
    sites = hospitals(e=-TASK)
    assert {g.harm for r in played(sites, guard=Guard(use="on", jury=0)) for g in r.guard.values()} == {None}
    for site in sites.values():
        site.score = lambda params, cases: {}
    assert {g.harm for r in played(sites) for g in r.guard.values()} == {None}
    with pytest.raises(ConfigError, match="jury = -1"):
        Guard(jury=-1)
