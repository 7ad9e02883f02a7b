"""Accidents that are drawn: processes are killed, a link is cut, and the study comes to the end of the simulator.

Three short schedules over the same five hospitals, one of them in every full run; ``scripts/faults.py`` draws more.
"""

import faults
import pytest

pytestmark = pytest.mark.slow
SCHEDULES = [faults.draw(32, index, rounds=2, cut=16.0, events=2) for index in (1, 2, 3)]
assert {event.what for schedule in SCHEDULES for event in schedule.events} == set(faults.KINDS)


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=pytest.mark.soak if k else (), id=s.name) for k, s in enumerate(SCHEDULES)],
)
def test_a_study_survives(schedule, stage, tmp_path):
    simulated = faults.simulate(schedule.text, tmp_path / "simulated")
    assert faults.play(schedule, stage, tmp_path / "deployed", simulated) == []
