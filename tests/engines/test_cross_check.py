"""The cross-check: who is found, and when; who keeps its weight; summed replies, checkpoints."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from hostile import Hostile
from polysite.algorithms.fedavg import FedAvg
from polysite.engines import checkpoint
from polysite.engines.guard_state import TOLERATED, Guard
from polysite.engines.plan import Plan
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.simulator import Simulator
from polysite.site import CaseScore, Fit
from quadratic import Quadratic
from table import same

WIDE = 64
ON = Guard(use="on")
TASK, UNLIKE = np.eye(WIDE)[:2]


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


def test_inverted_labels_are_found_by_the_harm_that_they_do_also_after_a_pause(tmp_path):
    sites = hospitals(e=-TASK)
    rounds, part = played(sites), played(sites, 3)[-1]
    assert all(r.guard["e"].harm > 0.5 and r.guard["e"].judges == 4 and r.guard["e"].factor == 0.05 for r in rounds)
    assert max(r.guard[i].harm for r in rounds for i in "abcd") < TOLERATED
    sentences = [sentence for r in rounds for site, sentence in r.alarms if site == "e"]
    assert any("worse on the validation cases of the other sites" in s for s in sentences)
    checkpoint.save(tmp_path / "at.safetensors", Progress(2, part.state, {}, guard=part.guard_state))
    rest = played(sites, resume=checkpoint.load(tmp_path / "at.safetensors"))
    assert same(rest[-1].state, rounds[-1].state) and rest[-1].guard == rounds[-1].guard


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


def test_a_juror_that_lies_condemns_nobody():
    rounds = played(hospitals(e=TASK), attack="aware")
    assert {r.guard[i].factor for r in rounds for i in "abcd"} == {1.0} and rounds[-1].guard["e"].harm > 0.1


def test_an_honest_hospital_with_other_outlines_keeps_its_weight():
    rounds = played(hospitals(e=TASK + 0.7 * UNLIKE), 12)
    assert {g.factor for r in rounds for g in r.guard.values()} == {1.0}
    plain = played(hospitals(e=TASK + 0.7 * UNLIKE), 12, guard=Guard())
    assert same(plain[-1].state, rounds[-1].state)
