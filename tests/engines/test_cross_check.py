"""The cross-check: closed forms of harm; what a juror sees; who is found; summed replies, checkpoints."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from hostile import Hostile
from polysite.algorithms.fedavg import FedAvg
from polysite.engines import checkpoint
from polysite.engines.cross_check import PRIOR, Ballot, Contrasts, harms, moved
from polysite.engines.guard import TOLERATED, Guard, GuardState
from polysite.engines.plan import Plan
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError
from polysite.site import CaseScore, Fit
from quadratic import Quadratic
from table import same

WIDE = 64
ON = Guard(use="on")
TASK, UNLIKE = np.eye(WIDE)[:2]
LEARNT = 2.0


def ballots(effects, jurors, rounds=1, lie=None):
    """Ballots of sites with these effects; a liar reports the opposite."""
    sites, history = sorted(effects), []
    for k in range(rounds):
        signs = Contrasts([sites], len(sites), (5, k)).signs
        cast = {h: sum(s * effects[i] for i, s in signs[h].items()) for h in jurors}
        history.append(tuple(Ballot(h, signs[h], LEARNT * (-y if h == lie else y), LEARNT) for h, y in cast.items()))
    return history


@pytest.mark.parametrize("sites", ["abcde", "abcdefg"])
def test_harm_is_the_effect_as_a_share_of_what_was_learnt(sites):
    effects = dict.fromkeys(sites, 0.0) | {"e": 0.8}
    found, learnt = harms(ballots(effects, sites, rounds=2)), 1.9 * LEARNT  # the older round counts by 0.9
    assert found["e"] == pytest.approx(0.8 * learnt / (learnt + PRIOR), abs=0.01)
    assert all(abs(found[i]) < 0.01 for i in sites if i != "e")


def test_several_sites_that_do_harm_are_told_apart():
    found = harms(ballots(dict.fromkeys("abcdf", 0.0) | {"e": 0.8, "g": 0.6}, "abcdefg", rounds=2))
    assert found["e"] > 0.7 and found["g"] > 0.5 and all(abs(found[i]) < 0.02 for i in "abcdf")


def test_a_juror_that_lies_is_outvoted():
    effects = dict.fromkeys("abcd", 0.0) | {"e": 0.8}
    found = harms(ballots(effects, "abcde", rounds=2, lie="d"))
    assert found["e"] > 0.7 and all(abs(found[i]) < 0.02 for i in "abcd")


def test_nobody_is_blamed_by_one_round_or_before_anything_is_learnt():
    history = ballots(dict.fromkeys("abcd", 0.0) | {"e": 0.8}, "abcd", rounds=2)
    assert set(harms(history[:1]).values()) == {0.0} and harms([]) == {}
    early = [[Ballot(b.juror, b.signs, b.difference / 200, b.learnt / 200) for b in cast] for cast in history]
    assert max(harms(early).values()) < TOLERATED < harms(history)["e"]


@pytest.mark.parametrize("count", [5, 6, 7, 12])
def test_a_juror_cannot_derive_the_change_of_a_single_other_site(count):
    """It sees the served model (positive weights, unequal) and its contrast, and knows its own change."""
    sites, random = [f"s{k:02}" for k in range(count)], np.random.default_rng(0)
    for juror, signs in Contrasts([sites], count, (1, 2)).signs.items():
        others = [i for i in sites if i != juror]
        assert juror not in signs and sum(signs.values()) == pytest.approx(0)
        assert min(sum(s > 0 for s in signs.values()), sum(s < 0 for s in signs.values())) >= 2
        shares = random.uniform(0.01, 1, len(others))
        seen = np.stack([shares, [signs[i] for i in others]])
        for row in np.eye(len(others)):
            nearest = seen.T @ np.linalg.lstsq(seen.T, row, rcond=None)[0]
            assert np.linalg.norm(nearest - row) > 0.1


def test_contrasts_are_differences_of_means_and_juries_are_limited():
    models = {i: {"w": np.full(2, float(k)), "bn.running_var": np.ones(1)} for k, i in enumerate("abcdef")}
    contrasts = Contrasts(["abcdef"], 3, (0, 0))
    for site, model in models.items():
        contrasts.add(site, model)
    assert len(contrasts.trees) == 3 and contrasts.complete("abcdef") and not contrasts.complete("abcde")
    for juror, tree in contrasts.trees.items():
        halves = [[models[i]["w"] for i, s in contrasts.signs[juror].items() if s * side > 0] for side in (1, -1)]
        assert tree.keys() == {"w"} and tree["w"] == pytest.approx(np.mean(halves[0], 0) - np.mean(halves[1], 0))
    assert not Contrasts(["abcd"], 7, (0, 0)).signs and not Contrasts(["abcdef"], 0, (0, 0)).signs
    assert moved({"w": 1.0, "v": 1.0}, {"w": 4.0}, 0.5) == {"w": 3.0, "v": 1.0}
    assert moved({"w": 1.0, "v": 1.0}, {"w": 4.0}, None) == {"w": 0.0, "v": 1.0}


@dataclass
class Hospital(Quadratic):
    """A site with its own optimum; its loss is 1 for the zero model and 0 there."""

    aim: np.ndarray = field(default_factory=lambda: TASK)

    def fit(self, params, *given, **more):
        changed = {"w": params["w"] + 0.3 * (self.aim - params["w"])}
        self.fits.append(Fit(changed, 1.0, 1, 1.0, 1.0))
        return self.fits[-1]

    def score(self, params, cases):
        loss = float(np.sum((params["w"] - self.aim) ** 2) / np.sum(self.aim**2))
        return {n: CaseScore({"L": max(1 - loss, 0.0)}, loss) for n in cases}


def hospitals(**aims):
    random = np.random.default_rng(0)
    usual = {i: TASK + 0.3 * random.standard_normal(WIDE) / WIDE**0.5 for i in "abcd"}
    return {i: Hospital(1.0, np.zeros(4), aim=aim) for i, aim in (usual | aims).items()}


def played(sites, rounds=6, keep=False, resume=None, attack="", guard=ON):
    transport = Hostile(FedAvg(), sites).attacked(attack, ("e",)) if attack else Simulator(FedAvg(), sites)
    plan = Plan(rounds=rounds, guard=guard)
    start = {"w": np.full(WIDE, 0.01)}
    return list(run_rounds(FedAvg(), transport, start, plan, 0, keep_replies=keep, resume=resume))


def test_inverted_labels_are_found_by_the_harm_that_they_do():
    rounds = played(hospitals(e=-TASK))
    assert rounds[-1].guard["e"].harm > 0.5 and rounds[-1].guard["e"].judges == 4
    assert max(r.guard[i].harm for r in rounds for i in "abcd") < TOLERATED
    sentences = [sentence for r in rounds for site, sentence in r.alarms if site == "e"]
    assert any("worse on the validation cases of the other sites" in s for s in sentences)


def test_an_honest_hospital_with_other_outlines_keeps_its_weight():
    rounds = played(hospitals(e=TASK + 0.7 * UNLIKE), 12)
    assert {g.factor for r in rounds for g in r.guard.values()} == {1.0} and not any(r.alarms for r in rounds)
    plain = played(hospitals(e=TASK + 0.7 * UNLIKE), 12, guard=Guard())
    assert same(plain[-1].state, rounds[-1].state)


def test_a_suspect_gets_its_weight_back_slowly():
    state = GuardState(harms={"e": 0.6})
    innocent = ballots(dict.fromkeys("abcde", 0.0), "abcde")[0]
    state = state.checked(ON, innocent, {})
    seen = []
    for _ in range(14):
        state = state.checked(ON, innocent, {})
        seen.append(state.harms["e"])
    assert seen[:10] == pytest.approx([0.6 * 0.95**k for k in range(2, 12)]) and abs(seen[-1]) < 0.01
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
