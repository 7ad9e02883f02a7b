"""The rules around a host, one by one, around a host that answers what the test says."""

from types import SimpleNamespace

import numpy as np
import pytest

import polysite as ps
from polysite.deploy.site.answers import Leaving
from polysite.deploy.site.budgeted import Budgeted
from polysite.deploy.site.checked import Checked
from polysite.deploy.site.held import Held
from polysite.deploy.site.policy import Refusal, SitePolicy
from polysite.deploy.site.privacy_budget import PrivacyBudget
from polysite.deploy.site.timed import Timed
from polysite.engines.host import HostPhase
from polysite.engines.messages import ExamineModel, Score, Scored, Train, Trained
from polysite.engines.site_turn import Turn
from polysite.payload import Payload
from polysite.privacy import Private, Release
from polysite.site import CaseScore


class Inner:
    """Answers what it is given, or raises it, and keeps what it was asked."""

    def __init__(self, answer):
        self.given, self.asked = answer, []

    def answer(self, *asked):
        self.asked.append(asked)
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.fixture
def hospital(tmp_path):
    pseudonyms = SimpleNamespace(of=lambda case: f"case-{len(case)}")
    budget = PrivacyBudget(tmp_path)
    folder = lambda study: tmp_path  # noqa: E731
    return SimpleNamespace(policy=SitePolicy(epsilon=8.0), budget=budget, pseudonyms=pseudonyms, folder=folder)


@pytest.fixture
def agreed():
    phase = HostPhase(ps.FedAvg(), None, private=Private(unit="patient", noise=1.0))
    return SimpleNamespace(id="s", host=SimpleNamespace(phases={0: phase}))


def trained(**reply):
    release = Release(1.0, 0.1, 10, 1e-6)
    step = SimpleNamespace(reveals="each", release=release)
    turn = Turn(Payload(**reply), Payload(), (), 0.0, {"model": "model"}, (step,))
    return Trained(turn.reply, releases=turn.releases, turn=turn)


def test_a_reply_that_may_not_leave_costs_nothing_and_one_that_leaves_is_written_down(hospital, agreed):
    with pytest.raises(Refusal, match="may not"):
        Budgeted(hospital, agreed, Inner(Refusal("it may not leave"))).answer(Train(round=3))
    assert hospital.budget.entries() == []
    reply = trained(model={"w": np.zeros(2)})
    assert Budgeted(hospital, agreed, Inner(reply)).answer(Train(round=3)) is reply
    assert [(e.study, e.round) for e in hospital.budget.entries()] == [("s", 3)]


def test_what_the_budget_does_not_reach_is_not_computed(hospital, agreed):
    hospital.policy = SitePolicy(epsilon=1e-3)
    hospital.budget.note("s", 0, 0, [Release(1.0, 0.5, 100, 1e-6)])
    inner = Inner(trained())
    with pytest.raises(Refusal, match="budget of this hospital is spent"):
        Budgeted(hospital, agreed, inner).answer(Train(round=1))
    assert not inner.asked


def test_names_of_cases_stay_and_a_response_that_is_not_known_does_not_leave(hospital, agreed):
    found = Checked(hospital, agreed, Inner(Scored({"Jane": CaseScore({"WT": 0.5}, 1.0)}))).answer(Score(split="test"))
    assert list(found.scores) == ["case-4"]
    with pytest.raises(Refusal, match="does not answer examine_model"):
        Checked(hospital, agreed, Inner(None)).answer(ExamineModel())


def test_after_three_late_answers_nothing_is_computed(hospital):
    hospital.policy, inner = SitePolicy(seconds=5.0), Inner(Leaving())
    assert Timed(hospital, inner).answer("s", Train()) == Leaving()
    (hospital.folder("s") / "late.count").write_bytes(b"...")
    with pytest.raises(Refusal, match="seconds = 5"):
        Timed(hospital, inner).answer("s", Train())
    assert len(inner.asked) == 1


def test_a_body_is_held_under_its_name_until_another_comes():
    inner = Inner(({"ok": 1}, b""))
    held = Held(inner)
    assert held.answer({"body": "x"}, b"", ["lost"]) == ({"missing": True, "incidents": ["lost"]}, b"")
    assert held.answer({"body": "x"}, b"1")[0] == {"ok": 1, "holds": "x"}
    held.answer({}, b"small")  # without a name: it changes nothing
    held.answer({"body": "x"}, b"")
    assert [body for _, body, _ in inner.asked] == [b"1", b"small", b"1"]
    held.answer({"body": "y"}, b"2")
    assert held.answer({"body": "x"}, b"")[0]["missing"]
